"""The server, as its clients see it: right, bounded, and how fast beside mlx_lm's own.

*answers*: 8 clients, 50 requests each, int4: every answer beside the same request alone, and the
process's memory. *secret*: 16 clients with a prefix in common, one with a secret. *bytes*: 50
conversations under a prompt cache of 2 MB. *turns*: the second turn of a conversation of some
2,000 tokens. *held*: conversations of 2,000 tokens that one prompt cache holds. *speed*: tokens a
second of 8 clients, against mlx_lm.server in full precision and with --kv-bits 4. *gap*: the
longest pause of a running stream while a prompt of some 4,000 tokens arrives; *chunks*: the same
by the tokens that are fed between two steps, for a prompt of 1,000. *window*: one
conversation fed 20 times 500 tokens. *objects*: JSON and tool calls, packed and not.

    python benchmarks/server.py [--only answers secret bytes turns …]
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from common import arguments, finish, load_model
from mlx_lm.generate import generate_step
from quality import text_of
from server_texts import TEMPLATE, conversation, objects
from servers import Server, at_once, inside, process
from tqdm import tqdm

import mlx_kivi
from mlx_kivi import KVCacheConfig
from mlx_kivi.commands.cli import replaced
from mlx_kivi.serving import engine

LEGS = [
    "answers",
    "secret",
    "bytes",
    "turns",
    "held",
    "speed",
    "gap",
    "chunks",
    "window",
    "objects",
]
OURS, THEIRS = "mlx_kivi.server", "mlx_lm.server"
INT4 = KVCacheConfig.from_name("int4")
ROUNDS, ANSWER = 1, 160  # a round takes minutes on two cores; tokens of an answer
ENDLESS = {"0": -100, "2": -100}  # no end of the text
QUIET = ("--log-level", "WARNING")


def pieces(tokenizer: Any, lengths: list[int], seed: int = 0) -> list[str]:
    """Parts of Python's own help of so many tokens, or nearly, none twice."""
    tokens = tokenizer.encode(text_of("pydoc"))
    rng = np.random.default_rng(seed)
    starts = rng.choice(len(tokens) - max(lengths), len(lengths), replace=False)
    return [tokenizer.decode(tokens[s : s + n]) for s, n in zip(starts, lengths, strict=True)]


def alone(model: Any, tokenizer: Any, prompt: str, limit: int) -> list[tuple[int, Any]]:
    """Greedy tokens with their logits, of a cache in int4 that no other text shares."""
    cache = mlx_kivi.make_prompt_cache(model, INT4)
    tokens = mx.array(tokenizer.encode(prompt))
    found = []
    for token, logits in generate_step(tokens, model, max_tokens=limit, prompt_cache=cache):
        found.append((token, logits))
        if token in tokenizer.eos_token_ids:
            break
    return found


def answers(path: str) -> dict[str, Any]:
    model, tokenizer = load_model(path)
    rng = np.random.default_rng(1)
    lengths = [int(n) for n in rng.integers(20, 120, 400)]
    limits = [int(n) for n in rng.integers(4, 16, 400)]
    prompts = pieces(tokenizer, lengths)
    memory = []
    with process(OURS, path, "--kv-quantize", "int4", *QUIET) as server:
        bar = tqdm(total=400, desc="answers", leave=False)

        def after() -> None:
            memory.append(server.memory())
            bar.update()

        asks = [
            partial(server.complete, prompt, limit, extra_body={"logprobs": True})
            for prompt, limit in zip(prompts, limits, strict=True)
        ]
        found = at_once(asks, 8, after)
        bar.close()
        errors = server.errors()
    parted = []
    for number in tqdm(range(400), "alone", leave=False):
        wanted = alone(model, tokenizer, prompts[number], limits[number])
        tokens = [entry["id"] for entry in found[number].choices[0].logprobs.content]
        for at, (token, (other, logits)) in enumerate(zip(tokens, wanted, strict=False)):
            if token != other:
                gap = float(logits[other] - logits[token])
                parted.append({"request": number, "at": at, "gap": round(gap, 4)})
                break
        else:
            if len(tokens) != len(wanted):
                parted.append({"request": number, "tokens": len(tokens), "alone": len(wanted)})
    halves = [statistics.median(memory[a : a + 100]) for a in (200, 300)]
    return {
        "answered": len(found),
        "parted": parted,
        "largest_gap": max((p.get("gap", 99.0) for p in parted), default=0.0),
        "errors": errors,
        "memory_last_hundred_to_the_one_before": round(halves[1] / halves[0], 4),
        "memory_mb": round(memory[-1] / 1e6),
    }


def secret(path: str) -> dict[str, Any]:
    _, tokenizer = load_model(path)
    word = "zirkonquartz-4711"
    shared = pieces(tokenizer, [300])[0]
    ends = [f"\n\nQuestion {i}: what is described above? Answer:" for i in range(16)]
    ends[5] = f"\n\nThe secret word is {word}. Repeat: the secret word is"
    with inside(path, "--prompt-cache-size", "50", *QUIET, policy=INT4) as (server, inner):
        asks = [partial(server.complete, shared + end, 24) for end in ends]
        # Twice, so that entries of the first round serve the second.
        said = [[a.choices[0].text for a in at_once(asks, 16)] for _ in range(2)]
        cache = inner.prompt_cache
        wrong = [
            len(tokens)
            for model, tokens in cache._keys()
            for layer in cache._trie.get(model, tokens).prompt_cache
            if layer.offset != len(tokens)
        ]
        entries = len(cache)
    leaks = [i for texts in said for i, text in enumerate(texts) if i != 5 and "zirkon" in text]
    told = sum("zirkon" in texts[5] for texts in said)
    return {"leaks": leaks, "told_to_its_owner": told, "entries": entries, "wrong_keys": wrong}


def bounded(path: str) -> dict[str, Any]:
    _, tokenizer = load_model(path)
    limit, most = 2_000_000, {}
    for clients in (1, 8):
        flags = ("--prompt-cache-bytes", str(limit), "--prompt-cache-size", "100", *QUIET)
        seen: list[int] = []
        with inside(path, *flags, policy=INT4) as (server, inner):
            prompts = pieces(tokenizer, [12 + n for n in range(50)], seed=clients)
            asks = [partial(server.complete, prompt, 8) for prompt in prompts]
            at_once(asks, clients, lambda: seen.append(inner.prompt_cache.nbytes))
        most[f"most_bytes_{clients}_at_a_time"] = max(seen)
    return {"limit": limit, **most, "held": max(most.values()) <= limit}


def turns(path: str) -> dict[str, Any]:
    """Tokens of the second turn that are fed, beyond those that are new in it."""
    _, tokenizer = load_model(path)
    found = {}
    for name, policy in (("full", INT4), ("evicted", INT4.replace(window=512))):
        with inside(path, *QUIET, policy=policy) as (server, _):
            (text,) = pieces(tokenizer, [1950])
            first = [{"role": "user", "content": text + "\n\nSum this up."}]
            reply = server.chat(first, 48)
            said = reply.choices[0].message.content
            second = [*first, {"role": "assistant", "content": said}]
            second.append({"role": "user", "content": "Say it in one sentence, please."})
            usage = server.chat(second, 8).usage
            seen = reply.usage.prompt_tokens + reply.usage.completion_tokens
            processed = usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens
            new = usage.prompt_tokens - seen
            found[name] = {"processed": processed, "new": new, "more": processed - new}
    return found


def held(path: str) -> dict[str, Any]:
    _, tokenizer = load_model(path)
    found = {}
    flags = ("--prompt-cache-bytes", "100MB", "--prompt-cache-size", "100", *QUIET)
    for name, policy, count in (("stock", None, 2), ("int4", INT4, 6)):
        with inside(path, *flags, policy=policy) as (server, inner):
            prompts = pieces(tokenizer, [1992] * count)
            at_once([partial(server.complete, p, 8) for p in prompts], 2)
            found[name] = len(inner.prompt_cache)
    return {**found, "ratio": found["int4"] / found["stock"]}


def burst(server: Server, prompts: list[str], limit: int) -> float:
    """Tokens a second of all clients together, prompts included in the time."""
    start = time.perf_counter()
    asks = [partial(server.complete, prompt, limit) for prompt in prompts]
    made = at_once(asks, len(prompts))
    return sum(a.usage.completion_tokens for a in made) / (time.perf_counter() - start)


def speed(path: str) -> dict[str, Any]:
    _, tokenizer = load_model(path)
    rates: dict[str, list[float]] = {"ours": [], "stock": [], "stock_kv_bits_4": []}
    with (
        process(OURS, path, "--kv-quantize", "int4", *QUIET) as ours,
        process(THEIRS, path, *QUIET) as stock,
        process(THEIRS, path, "--kv-bits", "4", *QUIET) as bits,
    ):
        for number in tqdm(range(ROUNDS), "speed", leave=False):
            prompts = pieces(tokenizer, [512] * 8, seed=number)
            for name, server in zip(rates, (ours, stock, bits), strict=True):
                rates[name].append(burst(server, prompts, ANSWER))
    result = {name: statistics.median(each) for name, each in rates.items()}
    ours_, stock_, bits_ = (np.array(each) for each in rates.values())
    return {
        **{name: round(rate, 1) for name, rate in result.items()},
        "to_stock": round(float(np.median(ours_ / stock_)), 3),
        "to_stock_kv_bits_4": round(float(np.median(ours_ / bits_)), 3),
    }


def pause(server: Server, short: str, long: str, tokens: int = 150) -> float:
    """The longest pause in seconds of a stream while another prompt is fed."""
    times: list[float] = []
    more = {"logit_bias": ENDLESS}
    started = threading.Event()

    def stream() -> None:
        for _ in server.complete(short, tokens, stream=True, extra_body=more):
            times.append(time.perf_counter())
            if len(times) == 10:
                started.set()

    thread = threading.Thread(target=stream)
    thread.start()
    started.wait()
    server.complete(long, 2)
    thread.join()
    return max(np.diff(times[5:]))


def gap(path: str) -> dict[str, Any]:
    _, tokenizer = load_model(path)
    pauses: dict[str, list[float]] = {"ours": [], "stock": []}
    with (
        process(OURS, path, "--kv-quantize", "int4", *QUIET) as ours,
        process(THEIRS, path, *QUIET) as stock,
    ):
        for number in tqdm(range(ROUNDS), "gap", leave=False):
            short, long = pieces(tokenizer, [60, 4000], seed=number)
            pauses["ours"].append(pause(ours, short, long))
            pauses["stock"].append(pause(stock, short, long))
    result = {name: round(statistics.median(each), 3) for name, each in pauses.items()}
    return {**result, "ratio": round(result["ours"] / result["stock"], 3)}


def chunks(path: str) -> dict[str, Any]:
    """What a part of a prompt between two steps costs the stream, and the prompt."""
    _, tokenizer = load_model(path)
    found = {}
    for beside in tqdm([64, 128, 256, 512, 1024], "chunks", leave=False):
        short, long = pieces(tokenizer, [60, 1000], seed=beside)
        with replaced(engine, BESIDE=beside), inside(path, *QUIET, policy=INT4) as (server, _):
            start = time.perf_counter()
            longest = pause(server, short, long, 60)
            seconds = time.perf_counter() - start
        found[str(beside)] = {"pause": round(longest, 3), "seconds": round(seconds, 1)}
    return found


def window(path: str) -> dict[str, Any]:
    _, tokenizer = load_model(path)
    flags = ("--kv-quantize", "int4", "--streaming-llm-window", "512", "--streaming-llm-sink", "4")
    memory, said, fed = [], [], 0
    with process(OURS, path, *flags, *QUIET) as server:
        messages: list[dict[str, str]] = []
        for turn in tqdm(conversation(pieces(tokenizer, [470] * 20)), "window", leave=False):
            messages.append({"role": "user", "content": turn})
            reply = server.chat(messages, 24)
            said.append(reply.choices[0].message.content)
            fed = reply.usage.prompt_tokens
            messages.append({"role": "assistant", "content": said[-1]})
            memory.append(server.memory())
    return {
        "tokens": fed,
        "memory_mb": [round(m / 1e6) for m in memory],
        "last_to_third": round(memory[-1] / memory[2], 3),
        "said": said,
    }


def parsed_objects(path: str) -> dict[str, Any]:
    """The objects that each server's answers parse to."""
    found: dict[str, list[Any]] = {}
    for name in ("none", "int8", "int4"):
        flags = ("--kv-quantize", name, "--chat-template", TEMPLATE)
        with process(OURS, path, *flags, *QUIET) as server:
            found[name] = [ask(server) for ask in tqdm(objects(), name, leave=False)]
    parsed = sum(value is not None for value in found["none"])
    same = {n: sum(a == b for a, b in zip(found[n], found["none"], strict=True)) for n in found}
    differ = [i for n in found for i, v in enumerate(found[n]) if v != found["none"][i]]
    return {"asked": len(objects()), "parsed": parsed, **same, "differ": differ}


def main() -> None:
    parser = arguments("The server: right, bounded, and how fast beside mlx_lm's own.")
    parser.add_argument("--only", nargs="+", choices=LEGS, default=LEGS, metavar="LEG")
    args = parser.parse_args()
    each = (answers, secret, bounded, turns, held, speed, gap, chunks, window, parsed_objects)
    legs: dict[str, Callable[[str], dict[str, Any]]] = dict(zip(LEGS, each, strict=True))
    result = {}
    for name in args.only:
        result[name] = legs[name](args.model)
        print(name, json.dumps(result[name]), flush=True)
    finish("server", **result)


if __name__ == "__main__":
    main()
