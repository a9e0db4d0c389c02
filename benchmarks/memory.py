"""Bytes of a cache by the length of the context, and the process's own memory.

Each cache of each length has a process of its own, so that its real memory can be read: resident
memory before the cache is filled, and after. Caches are filled directly, without a prefill.

    python benchmarks/memory.py [--tokens 2048 8192 32768] [--dtype float16]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import psutil
from common import arguments, caches, finish, load_model, table
from decode import fill

DEFAULT = ["stock", "stock-8-g64", "stock-4-g64", "int8", "int4", "int2", "int4-w1020"]


def resident() -> int:
    """Bytes of this process in memory, without what has been freed and could be given back."""
    mx.clear_cache()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def measure(model_path: str, name: str, tokens: int, dtype: mx.Dtype) -> dict[str, int]:
    """Bytes counted by the cache, and growth of the process's memory."""
    model, _ = load_model(model_path)
    fill(model, caches(model, name), 512, dtype)  # what the first use of anything costs
    before = resident()
    cache = caches(model, name)
    fill(model, cache, tokens, dtype)
    return {"bytes": sum(c.nbytes for c in cache), "process": resident() - before}


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--dtype", default="float16", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--caches", nargs="+", default=DEFAULT, help=f"Default: {DEFAULT}")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        dtype = getattr(mx, args.dtype)
        print(json.dumps(measure(args.model, args.one, args.tokens[0], dtype)))
        return
    results = {}
    for name in args.caches:
        results[name] = {}
        for count in args.tokens:
            command = [sys.executable, str(Path(__file__)), "--model", args.model, "--one", name]
            command += ["--dtype", args.dtype, "--tokens", str(count)]
            out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            results[name][count] = json.loads(out.splitlines()[-1])
    stock = results.get("stock")
    rows = []
    for name, by_length in results.items():
        row = [name]
        for count, r in by_length.items():
            ratio = f" ({r['bytes'] / stock[count]['bytes']:.3f})" if stock else ""
            row.append(f"{r['bytes'] / 1e6:.1f} MB{ratio}, process {r['process'] / 1e6:.0f} MB")
        rows.append(row)
    table(["cache", *(f"T = {t:,}" for t in args.tokens)], rows)
    print("(in brackets: bytes as a ratio to the stock KVCache)")
    finish("memory", dtype=args.dtype, results=results)


if __name__ == "__main__":
    main()
