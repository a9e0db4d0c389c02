"""Perplexity by the number of sinks, along a text that is longer than the window.

The table of the StreamingLLM paper (arXiv:2309.17453, table 2) on our model: window attention
with 0, 1, 2, … sinks, where they are in the text and re-positioned, in full precision and packed;
beside full attention, and beside the window computed again for each token. With --far, also what
sinks are worth when the rest of the text is so many tokens away from them. Then the time of a
token against recomputation, with caches of the same size.

    python benchmarks/sinks.py --text FILE [--tokens 2048] [--window 256] [--plot FILE.png]
        [--far 0 8000 32000]
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from common import arguments, caches, finish, load_model, table
from decode import decode, fill
from mlx.utils import tree_map
from tqdm import tqdm

from mlx_kivi import KVCacheConfig, make_prompt_cache

BATCH = 4  # windows recomputed at a time


def nats(model: Any, cache: list[Any], tokens: mx.array, chunk: int, name: str) -> np.ndarray:
    """-log p of each token but the first, fed through a cache in calls of ``chunk``: [T - 1]."""
    parts = []
    for start in tqdm(range(0, tokens.size - 1, chunk), desc=name, leave=False):
        stop = min(start + chunk, tokens.size - 1)
        logits = model(tokens[None, start:stop], cache=cache)[0].astype(mx.float32)
        parts.append(_nats(logits, tokens[start + 1 : stop + 1]))
        mx.eval(parts[-1], [c.state for c in cache])
    return np.concatenate([np.array(p) for p in parts])


def recomputed(model: Any, tokens: mx.array, window: int, at: np.ndarray) -> np.ndarray:
    """-log p of the tokens ``at``, each from the ``window`` tokens before it alone."""
    parts = []
    for start in tqdm(range(0, len(at), BATCH), desc="recomputation", leave=False):
        some = at[start : start + BATCH]
        windows = mx.stack([tokens[i - window : i] for i in some.tolist()])
        logits = model(windows)[:, -1].astype(mx.float32)
        parts.append(_nats(logits, tokens[mx.array(some)]))
        mx.eval(parts[-1])
        mx.clear_cache()
    return np.concatenate([np.array(p) for p in parts])


def _nats(logits: mx.array, targets: mx.array) -> mx.array:
    chosen = mx.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return mx.logsumexp(logits, axis=-1) - chosen


def speed(model: Any, size: int, kinds: list[str], dtype: mx.Dtype) -> dict[str, float]:
    """Milliseconds of a token with caches of ``size`` tokens, 4 of them sinks, and recomputed."""
    filled = {}
    for kind in kinds:
        for reposition in (False, True):
            config = KVCacheConfig.from_name(kind, window=size - 4, reposition=reposition)
            cache = filled[_name(kind, reposition)] = make_prompt_cache(model, config)
            fill(model, cache, size + 256, dtype)
    milliseconds = decode(model, filled, steps=8)
    text = mx.arange(size)[None] % 1000
    head = model.model.embed_tokens.as_linear if model.args.tie_word_embeddings else model.lm_head
    times = []
    for _ in tqdm(range(4), desc="time of recomputation", leave=False):
        start = time.perf_counter()
        mx.eval(head(model.model(text)[:, -1]))  # no more of the head than a token needs
        times.append((time.perf_counter() - start) * 1e3)
    return {**milliseconds, "recomputation": float(np.median(times[1:]))}


def far_away(
    model: Any, cache: list[Any], tokens: mx.array, chunk: int, tokens_between: int
) -> np.ndarray:
    """`nats` after the sinks, as if a text of so many tokens had come and gone between."""
    sink = cache[0].config.sink
    nats(model, cache, tokens[: sink + 1], chunk, "sinks")
    for layer in cache:
        layer._rebased -= tokens_between
    return nats(model, cache, tokens[sink:], chunk, f"{tokens_between:,} tokens away")


def _name(kind: str, reposition: bool) -> str:
    return f"{kind}, re-positioned" if reposition else kind


def plot(path: str, sinks: list[int], rows: dict[str, dict[int, float]], lines: dict) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name, by_sinks in rows.items():
        style = "--" if name.endswith("re-positioned") else "-"
        axes.plot([str(n) for n in sinks], by_sinks.values(), style, marker="o", label=name)
    for (name, perplexity), color in zip(lines.items(), ("black", "gray"), strict=True):
        axes.axhline(perplexity, color=color, linestyle=":", label=name)
    axes.set(xlabel="sinks", ylabel="perplexity", yscale="log")
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--text", required=True, help="Text file to feed")
    parser.add_argument("--tokens", type=int, default=2048, help="Default: 2048")
    parser.add_argument(
        "--first", type=int, help="Token from which on perplexity counts. Default: tokens / 2"
    )
    parser.add_argument("--window", type=int, default=256, help="Default: 256")
    parser.add_argument("--sinks", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--caches", nargs="+", default=["none", "int8", "int4"])
    parser.add_argument(
        "--far", type=int, nargs="*", default=[], help="Tokens between 4 sinks and the rest"
    )
    parser.add_argument("--chunk", type=int, default=32, help="Tokens a call. Default: 32")
    parser.add_argument(
        "--recompute", type=int, default=64, help="Tokens recomputed, of all. Default: 64"
    )
    parser.add_argument(
        "--speed", type=int, default=1024, help="Size of the caches that are timed. Default: 1024"
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--plot", metavar="FILE", help="Draw the table (needs matplotlib)")
    args = parser.parse_args()
    first = args.tokens // 2 if args.first is None else args.first
    model, tokenizer = load_model(args.model)
    dtype = getattr(mx, args.dtype)
    model.update(tree_map(lambda p: p.astype(dtype), model.parameters()))
    tokens = mx.array(tokenizer.encode(Path(args.text).read_text())[: args.tokens])
    if not args.window < first < tokens.size:
        parser.error(f"--text has {tokens.size} tokens: use a --first between --window and that")

    def perplexity(values: np.ndarray) -> float:
        return float(np.exp(values[first - tokens.size :].mean()))

    full = nats(model, caches(model, "stock"), tokens, args.chunk, "full attention")
    lines = {"full attention": perplexity(full)}
    # A sample: what recomputation adds to full attention varies less than either.
    at = np.linspace(first, tokens.size - 1, args.recompute).astype(int)
    more = recomputed(model, tokens, args.window, at) - full[at - 1]
    lines["recomputation"] = float(lines["full attention"] * np.exp(more.mean()))
    error = float(more.std() / len(more) ** 0.5)

    rows: dict[str, dict[int, float]] = {}
    for kind in args.caches:
        for reposition in (False, True):
            name = _name(kind, reposition)
            for sink in args.sinks:
                config = KVCacheConfig.from_name(
                    kind, sink=sink, window=args.window, reposition=reposition
                )
                cache = make_prompt_cache(model, config)
                values = nats(model, cache, tokens, args.chunk, f"{name}, {sink} sinks")
                rows.setdefault(name, {})[sink] = perplexity(values)
                tqdm.write(f"{name}, {sink} sinks: {rows[name][sink]:.2f}")
                mx.clear_cache()

    print(f"Perplexity of tokens {first:,} to {tokens.size:,}, window {args.window:,}")
    table(
        ["cache", *(f"{n} sinks" for n in args.sinks)],
        [[name, *(f"{p:.2f}" for p in row.values())] for name, row in rows.items()],
    )
    print(
        f"full attention {lines['full attention']:.2f}, "
        f"recomputation {lines['recomputation']:.2f} (± {error:.1%}, {len(at)} tokens)"
    )
    far: dict[str, dict[int, float]] = {}
    for kind in args.caches if args.far else []:
        for reposition in (False, True):
            config = KVCacheConfig.from_name(kind, window=args.window, reposition=reposition)
            row = far[_name(kind, reposition)] = {}
            for distance in args.far:
                cache = make_prompt_cache(model, config)
                row[distance] = perplexity(far_away(model, cache, tokens, args.chunk, distance))
    if far:
        print(f"The same with {config.sink} sinks and so many tokens between them and the rest")
        table(
            ["cache", *(f"{n:,}" for n in args.far)],
            [[name, *(f"{p:.2f}" for p in row.values())] for name, row in far.items()],
        )
    milliseconds = speed(model, args.speed, args.caches, dtype)
    print(f"Time of a token, {args.speed:,} tokens cached or recomputed")
    again = milliseconds["recomputation"]
    table(
        ["cache", "milliseconds", "speed against recomputation"],
        [[name, f"{t:.1f}", f"{again / t:.1f}"] for name, t in milliseconds.items()],
    )
    if args.plot:
        plot(args.plot, args.sinks, rows, lines)
    finish(
        "sinks",
        text=Path(args.text).name,
        tokens=tokens.size,
        first=first,
        window=args.window,
        dtype=args.dtype,
        perplexity={**lines, **rows},
        recomputation_error=error,
        far=far,
        speed_size=args.speed,
        milliseconds=milliseconds,
    )


if __name__ == "__main__":
    main()
