"""Batches in full precision: mlx-lm's own batch caches hold the same then, and serve.

A packed cache, or one that keeps sinks, has no counterpart there. It lacks the names that mlx_lm
asks for, and mlx_lm says so (`batch_generate`) or serves one sequence at a time (the server).
"""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import KVCache, RotatingKVCache

from ..config import KVCacheConfig


def has_counterpart(config: KVCacheConfig) -> bool:
    """Whether a cache of mlx_lm keeps exactly what the policy asks for."""
    plain = not config.quantized and config.dtype is None
    return plain and (config.window is None or config.sink == 0)


def counterpart(cache: Any) -> KVCache | RotatingKVCache:
    """A cache of mlx_lm with the tokens of ours, one whose policy has a counterpart."""
    window = cache.config.window
    stock: Any = KVCache() if window is None else RotatingKVCache(max_size=window)
    if not cache.empty():
        stock.keys, stock.values = cache.arrays()
        stock.offset = cache.offset
        stock._idx = stock.keys.shape[2]
    return stock


def merge(caches: list[Any]) -> Any:
    """One batch cache of mlx_lm from caches of ours or of its own."""
    stock = [c if isinstance(c, KVCache | RotatingKVCache) else counterpart(c) for c in caches]
    return type(stock[0]).merge(stock)
