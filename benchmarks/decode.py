"""Time of one decoded token, by the length of the context, against the stock caches.

Caches are filled directly, without a prefill, with random keys and values; then all caches of a
length decode in turn, token by token, so that a drift of the machine's speed hits them alike.

    python benchmarks/decode.py [--tokens 256 512 2048 8192] [--dtype float32]
"""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx
import numpy as np
from common import arguments, caches, finish, load_model, table
from mlx.utils import tree_map

DEFAULT = ["stock", "stock-8-g64", "stock-4-g64", "stock-2-g64", "rotating-1024"]
DEFAULT += ["int8", "int4", "int2", "int4-w1020"]


def fill(model: Any, cache: list[Any], tokens: int, dtype: mx.Dtype) -> None:
    args = model.args
    head = args.head_dim or args.hidden_size // args.num_attention_heads
    mx.random.seed(0)
    for layer in cache:
        for start in range(0, tokens, 2048):
            shape = (1, args.num_key_value_heads, min(2048, tokens - start), head)
            keys, values = (mx.random.normal(shape).astype(dtype) for _ in range(2))
            layer.update_and_fetch(keys, values)
            mx.eval(layer.state)


def decode(
    model: Any, filled: dict[str, list[Any]], steps: int, burst: int = 4
) -> dict[str, float]:
    """Median milliseconds of a token by cache: bursts, each the loop of mlx_lm's generate_step."""
    times: dict[str, list[float]] = {name: [] for name in filled}
    for step in range(steps + 1):
        for name, cache in filled.items():
            token = mx.array([1])
            start = time.perf_counter()
            for _ in range(burst):
                # The next step is built while this one is computed.
                token = mx.argmax(model(token[None], cache=cache)[:, -1], axis=-1)
                mx.async_eval(token)
            mx.eval(token)
            if step >= 1:
                times[name].append((time.perf_counter() - start) / burst * 1e3)
    return {name: float(np.median(t)) for name, t in times.items()}


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 2048, 8192])
    parser.add_argument("--steps", type=int, default=15, help="Bursts of 4 tokens. Default: 15")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--caches", nargs="+", default=DEFAULT, help=f"Default: {DEFAULT}")
    args = parser.parse_args()
    model, _ = load_model(args.model)
    dtype = getattr(mx, args.dtype)
    model.update(tree_map(lambda p: p.astype(dtype), model.parameters()))
    results = {}
    for tokens in args.tokens:
        filled = {name: caches(model, name) for name in args.caches}
        for cache in filled.values():
            fill(model, cache, tokens, dtype)
        results[tokens] = decode(model, filled, args.steps)
        del filled
        mx.clear_cache()
    rows = [
        [
            name,
            *(
                f"{r[name]:.1f} ms ({r['stock'] / r[name]:.2f})"
                if "stock" in r
                else f"{r[name]:.1f} ms"
                for r in results.values()
            ),
        ]
        for name in args.caches
    ]
    table(["cache", *(f"T = {t:,}" for t in results)], rows)
    print("(in brackets: speed as a ratio to the stock KVCache)")
    finish("decode", dtype=args.dtype, milliseconds=results)


if __name__ == "__main__":
    main()
