"""Batches: each row's text as alone, and what a step costs, against rows alone and stock batches.

*rows*: eight prompts of 20 to 900 tokens, int4 with a window of 256, joining and leaving in
mid-stream; each row's greedy tokens beside those of the same prompt alone (where they part, the
gap between the two likeliest tokens is given). *alone*: eight rows of some 512 tokens in one batch,
and the same eight one after the other. *stock*: eight rows of some 2,048 tokens against mlx_lm's
own batch in full precision. *skewed*: a row of 8,192 tokens and seven of 256, against the same.
*graph*: primitives of a step that eight rows add to those of one. Caches are filled with random
keys and values; both sides decode in turn, burst by burst, and medians are compared.

    python benchmarks/batch.py [--only rows alone stock skewed graph] [--caches int4 …]
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from common import arguments, caches, finish, load_model, table
from decode import fill
from mlx.utils import tree_map
from mlx_lm.generate import BatchGenerator, generate_step
from quality import text_of
from tqdm import tqdm

import mlx_kivi
from mlx_kivi import KVCacheConfig

PARTS = ["rows", "alone", "stock", "skewed", "graph"]
PROMPTS = [20, 55, 110, 180, 300, 450, 640, 900]
TOKENS = 64
BURST = 4


def merged(each: list[list[Any]]) -> list[Any]:
    """One batch from each row's caches, as mlx_lm merges them."""
    return [row[0].merge(list(row)) for row in zip(*each, strict=True)]


def filled(
    model: Any, name: str, lengths: list[int], dtype: mx.Dtype = mx.float32
) -> list[list[Any]]:
    each = []
    for tokens in lengths:
        cache = caches(model, name)
        fill(model, cache, tokens, dtype)
        each.append(cache)
    return each


def burst(model: Any, cache: list[Any], rows: int) -> float:
    """Seconds a step of greedy decoding, the next built while this one is computed."""
    token = mx.ones((rows,), mx.int32)
    start = time.perf_counter()
    for _ in range(BURST):
        token = mx.argmax(model(token[:, None], cache=cache)[:, -1], axis=-1)
        mx.async_eval(token)
    mx.eval(token)
    return (time.perf_counter() - start) / BURST


def in_turn(sides: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Median of each side, and of their ratio in each round, the first to the second."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in tqdm(range(rounds + 1), " against ".join(sides), leave=False):
        for name, side in sides.items():
            took = side()
            if number:
                times[name].append(took)
    first, second = times.values()
    ratio = float(np.median(np.array(second) / np.array(first)))
    return {name: float(np.median(t)) for name, t in times.items()} | {"ratio": ratio}


def nbytes(cache: list[Any]) -> int:
    return sum(layer.nbytes for layer in cache)


def rows(model: Any, tokenizer: Any) -> dict[str, Any]:
    """Each row's tokens beside those of the row alone."""
    text = tokenizer.encode(text_of("pydoc")[:20_000])
    prompts = [text[100 * i : 100 * i + n] for i, n in enumerate(PROMPTS)]
    policy = KVCacheConfig.from_name("int4", window=256)
    alone = []
    for prompt in tqdm(prompts, "alone", leave=False):
        cache = mlx_kivi.make_prompt_cache(model, policy)
        steps = generate_step(mx.array(prompt), model, max_tokens=TOKENS, prompt_cache=cache)
        alone.append([(token, np.array(logits)) for token, logits in steps])
    found: dict[int, list[int]] = {}
    with mlx_kivi.patched(policy):
        batch = BatchGenerator(model, max_tokens=TOKENS, prefill_batch_size=3)
        waiting = list(enumerate(prompts))
        names: dict[int, int] = {}
        step = 0
        while waiting or names:
            # Three at the start, then one every ten steps: they join a batch that has wrapped.
            if waiting and (step < 3 or step % 10 == 0):
                number, prompt = waiting.pop(0)
                # Rows of fewer tokens leave in mid-stream.
                limit = TOKENS if number % 2 else TOKENS // 2
                names[batch.insert([prompt], max_tokens=[limit])[0]] = number
            for response in batch.next()[1]:
                number = names[response.uid]
                found.setdefault(number, []).append(response.token)
                if response.finish_reason:
                    del names[response.uid]
            step += 1
        batch.close()
    parted = []
    for number, tokens in sorted(found.items()):
        for at, (token, (wanted, logits)) in enumerate(zip(tokens, alone[number], strict=False)):
            if token != wanted:
                gap = float(logits[wanted] - logits[token])
                parted.append({"row": number, "at": at, "gap": gap})
                break
    return {"rows": len(prompts), "tokens": sum(map(len, found.values())), "parted": parted}


def against_alone(model: Any, name: str, rounds: int) -> dict[str, Any]:
    lengths = [512 + 9 * i for i in range(8)]
    each = filled(model, name, lengths)
    batch = merged(filled(model, name, lengths))
    sides = {
        "batch": lambda: burst(model, batch, 8),
        "one after the other": lambda: sum(burst(model, cache, 1) for cache in each),
    }
    return in_turn(sides, rounds)


def against_stock(model: Any, name: str, lengths: list[int], rounds: int) -> dict[str, Any]:
    ours, stock = (merged(filled(model, kind, lengths)) for kind in (name, "stock"))
    sides = {
        "ours": lambda: burst(model, ours, len(lengths)),
        "stock": lambda: burst(model, stock, len(lengths)),
    }
    return in_turn(sides, rounds) | sizes(model, name, lengths)


def sizes(model: Any, name: str, lengths: list[int]) -> dict[str, float]:
    """Bytes of a batch in float16, after a step."""
    each = filled(model, name, lengths, mx.float16)
    alone = sum(map(nbytes, each))
    batch, stock = merged(each), merged(filled(model, "stock", lengths, mx.float16))
    args = model.args
    head = args.head_dim or args.hidden_size // args.num_attention_heads
    token = mx.zeros((len(lengths), args.num_key_value_heads, 1, head), mx.float16)
    for layer in (*batch, *stock):
        layer.update_and_fetch(token, token)
    tokens = 2 * args.num_key_value_heads * head * len(model.layers) * sum(lengths)
    return {
        "MB": nbytes(batch) / 1e6,
        "bytes to the rows alone": nbytes(batch) / alone,
        "bytes to stock's batch": nbytes(batch) / nbytes(stock),
        "bytes to the tokens in fp16": nbytes(batch) / (2 * tokens),
    }


def primitives(model: Any, cache: list[Any], rows: int) -> int:
    """In the graph of a step in which no group is packed."""
    for _ in range(2):
        logits = model(mx.ones((rows, 1), mx.int32), cache=cache)
        mx.eval(logits, [layer.offset for layer in cache if rows > 1])
    graph = io.StringIO()
    mx.export_to_dot(graph, model(mx.ones((rows, 1), mx.int32), cache=cache))
    return graph.getvalue().count("shape=rectangle")


def graph(model: Any, name: str) -> dict[str, Any]:
    # Of equal length: in one bucket, and no group is due.
    one = primitives(model, filled(model, name, [600])[0], 1)
    eight = primitives(model, merged(filled(model, name, [600] * 8)), 8)
    layers = len(model.layers)
    return {"one": one / layers, "eight": eight / layers, "ratio": eight / one}


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="Default: all")
    parser.add_argument("--caches", nargs="+", default=["int4"], help="Default: int4")
    parser.add_argument("--rounds", type=int, default=9, help="Bursts of 4 steps. Default: 9")
    args = parser.parse_args()
    model, tokenizer = load_model(args.model)
    model.update(tree_map(lambda p: p.astype(mx.float32), model.parameters()))
    results: dict[str, Any] = {}
    if "rows" in args.only:
        results["rows"] = rows(model, tokenizer)
    for name in args.caches:
        if "alone" in args.only:
            results[f"alone {name}"] = against_alone(model, name, args.rounds)
        if "stock" in args.only:
            lengths = [2048 + 13 * i for i in range(8)]
            results[f"stock {name}"] = against_stock(model, name, lengths, args.rounds)
        if "skewed" in args.only:
            lengths = [256] * 3 + [8192] + [256] * 4
            results[f"skewed {name}"] = against_stock(model, name, lengths, args.rounds)
        if "graph" in args.only:
            results[f"graph {name}"] = graph(model, name)
    lines = []
    for part, found in results.items():
        for what, value in found.items():
            lines.append([part, what, f"{value:.3f}" if isinstance(value, float) else str(value)])
    table(["part", "", "seconds, ratios, bytes"], lines)
    finish("batch", results=results)


if __name__ == "__main__":
    main()
