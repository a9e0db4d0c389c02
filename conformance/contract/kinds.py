"""The caches that the contract is run on: mlx-lm's own, and ours under five policies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlx_kivi import KVCacheConfig, QuantizedStreamingCache

from ..common import allowed, arrays_in, shown

HEADS, DIM = 2, 32
PACKED = {"group_size": 32, "residual_length": 16}
POLICIES = {
    "full": KVCacheConfig(),
    "int8": KVCacheConfig(k_bits=8, v_bits=8, **PACKED),
    "int4": KVCacheConfig(k_bits=4, v_bits=4, **PACKED),
    "bounded": KVCacheConfig(sink=4, window=60),
    "int4-bounded": KVCacheConfig(k_bits=4, v_bits=4, sink=4, window=90, **PACKED),
}


@dataclass(frozen=True)
class Kind:
    """A cache and the rule that it keeps.

    window: tokens that a query sees, itself included, besides ``sinks``; bits: of what is packed;
    limit: tokens up to which the rule holds. mlx-lm's rotating cache hides its sinks from later
    rows of a call and hands out tokens out of order once it is full.
    """

    name: str
    make: Callable[[], Any]
    sinks: int = 0
    window: int | None = None
    bits: int | None = None
    limit: int = 10_000

    @property
    def ours(self) -> bool:
        return self.name in POLICIES

    def sees(self, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Whether queries at positions see keys at others: [queries, keys]."""
        return allowed(queries, keys, self.sinks, self.window)

    def shown(self, first: int, count: int) -> np.ndarray:
        """Positions that any of ``count`` queries from ``first`` on sees, in order."""
        return shown(first, count, self.sinks, self.window)

    def __str__(self) -> str:
        return self.name


def _ours(name: str) -> Kind:
    config = POLICIES[name]
    return Kind(
        name,
        lambda: QuantizedStreamingCache(config),
        config.sink,
        config.window,
        config.k_bits,
    )


STOCK = [
    Kind("KVCache", KVCache),
    Kind("RotatingKVCache", lambda: RotatingKVCache(max_size=64, keep=4), 4, 60, limit=64),
]
OURS = [_ours(name) for name in POLICIES]
KINDS = [*STOCK, *OURS]


def tokens(start: int, stop: int, seed: int = 0) -> tuple[mx.array, mx.array]:
    """Keys and values of positions [start, stop): [1, HEADS, stop - start, DIM] each."""
    keys, values = _stream(seed)
    return keys[:, :, start:stop], values[:, :, start:stop]


@cache
def _stream(seed: int) -> mx.array:
    return mx.array(
        np.random.default_rng(seed).standard_normal((2, 1, HEADS, 600, DIM)), mx.float32
    )


def feed(cache: Any, *lengths: int, seed: int = 0) -> Any:
    """Append so many tokens a call; returns what the last call returned."""
    fetched = None
    for length in lengths:
        fetched = cache.update_and_fetch(*tokens(cache.offset, cache.offset + length, seed))
    return fetched


def chunks(total: int) -> list[int]:
    """Uneven calls, single steps among them, that add up to ``total`` tokens."""
    lengths, left = [], total
    for length in (5, 1, 1, 30, 7, 1, 40, 3, 64, 1, 1, 90, 500):
        if left:
            lengths.append(min(length, left))
            left -= lengths[-1]
    return lengths


def restored(cache: Any) -> Any:
    """The cache again from its state, as the mlx-lm in use asks for it."""
    if hasattr(KVCache, "meta_state"):
        return type(cache).from_state(cache.state, cache.meta_state)
    return type(cache).from_state(cache.state)


def same_state(a: Any, b: Any) -> bool:
    """Whether two caches store the same, bit by bit."""
    left, right = arrays_in(a.state), arrays_in(b.state)
    return (
        a.offset == b.offset
        and len(left) == len(right)
        and all(
            x.dtype == y.dtype and mx.array_equal(x, y) for x, y in zip(left, right, strict=True)
        )
    )
