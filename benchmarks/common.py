"""What the benchmarks share: the model, the caches to compare, and the last line."""

from __future__ import annotations

import argparse
import json
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import load
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from mlx_kivi import KVCacheConfig, make_prompt_cache, tinygpt

MODEL = Path(__file__).parent.parent / "models" / "SmolLM2-135M-Instruct"


def arguments(about: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument(
        "--model",
        default=str(MODEL),
        help="Model directory or .tinygpt file. Default: the one of `make model`",
    )
    return parser


def load_model(path: str) -> tuple[Any, Any]:
    if Path(path).is_file():
        model, tokenizer, _ = tinygpt.load(path)
        return model, tokenizer
    if not Path(path).is_dir():
        raise SystemExit(f"--model {path}: no such directory; run `make model` first")
    return load(path)


def caches(model: Any, name: str) -> list[Any]:
    """Caches by name: stock, stock-4-g64, rotating-1024, or one of ours: int4, int4-w1024."""
    layers = len(model.layers)
    kind, *rest = name.split("-")
    if kind == "stock" and not rest:
        return [KVCache() for _ in range(layers)]
    if kind == "stock":
        bits, group = int(rest[0]), int(rest[1][1:])
        return [QuantizedKVCache(group_size=group, bits=bits) for _ in range(layers)]
    if kind == "rotating":
        return [RotatingKVCache(max_size=int(rest[0]), keep=4) for _ in range(layers)]
    fields = {"w": "window", "r": "residual_length", "s": "sink", "g": "group_size"}
    fields |= {"k": "k_bits", "v": "v_bits"}
    overrides = {fields[item[0]]: int(item[1:]) for item in rest}
    return make_prompt_cache(model, KVCacheConfig.from_name(kind, **overrides))


def machine() -> dict[str, str]:
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{platform.system()} {platform.machine()}",
        "device": str(mx.default_device()),
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
    }


def table(headers: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[i]) for row in [headers, *rows]) for i in range(len(headers))]
    for row in [headers, *rows]:
        cells = [
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def finish(benchmark: str, **result: Any) -> None:
    """The last line: one JSON object for programs."""
    print(json.dumps({"benchmark": benchmark, **machine(), **result}))
