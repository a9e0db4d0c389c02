"""Prompt files saved by either generation of mlx-lm, and what is in them.

``python -m conformance.contract.files`` writes the one of the mlx-lm in use, as mlx-lm itself
does while it is patched.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    save_prompt_cache,
)

import mlx_kivi
from mlx_kivi import QuantizedStreamingCache

from .kinds import POLICIES, tokens

DATA = Path(__file__).with_name("data")
RELEASES = ("0.31.3", "0.32.2")
METADATA = {"model": "tiny", "a.b": "c"}
SEEN = 150  # tokens in the bounded cache


def saved_by(release: str) -> Path:
    return DATA / f"saved-by-{release}.safetensors"


def fill(cache: Any, *lengths: int) -> Any:
    """Append the contract's tokens, of one head."""
    for n in lengths:
        keys, values = tokens(cache.offset, cache.offset + n)
        cache.update_and_fetch(keys[:, :1], values[:, :1])
    return cache


def mixed() -> list[Any]:
    """Ours, mlx-lm's own, and both in one `CacheList`."""
    arrays = ArraysCache(2)
    arrays[0], arrays[1] = mx.arange(6).reshape(1, 2, 3), mx.ones((1, 4), mx.float16)
    return [
        fill(QuantizedStreamingCache(POLICIES["int4-bounded"]), 100, 40, *[1] * 10),
        CacheList(arrays, fill(QuantizedStreamingCache(POLICIES["full"]), 5)),
        fill(KVCache(), 7),
        fill(RotatingKVCache(max_size=8, keep=2), 5, *[1] * 6),
        fill(QuantizedKVCache(group_size=32, bits=4), 6),
    ]


if __name__ == "__main__":
    DATA.mkdir(exist_ok=True)
    mlx_kivi.patch()
    save_prompt_cache(str(saved_by(version("mlx-lm"))), mixed(), METADATA)
