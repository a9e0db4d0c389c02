"""What a layer's cache takes, in bytes, from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from ..config import KVCacheConfig, value_group
from .group_store import scale_dtype
from .layout import Plan


@dataclass(frozen=True)
class Heads:
    """Shape of one cache: KV heads, head sizes of keys and values, and the model's type."""

    count: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype

    def full_bytes(self, tokens: int) -> int:
        """Keys and values of ``tokens`` tokens in the model's own precision."""
        return self.count * (self.key_dim + self.value_dim) * self.dtype.size * tokens


def stored_bytes(config: KVCacheConfig, plan: Plan, step: int, heads: Heads, tokens: int) -> int:
    """What `QuantizedStreamingCache.nbytes` is after ``tokens`` tokens.

    step: tokens by which a ring grows.
    """
    full = getattr(mx, config.dtype) if config.dtype else heads.dtype
    slots = -(-tokens // step) * step if plan.ring is None else plan.sink + plan.ring
    total = heads.count * (heads.key_dim + heads.value_dim) * full.size * slots
    groups = plan.room(plan.groups(tokens))
    if groups:
        total += heads.count * groups * _group_bytes(config, plan.group, heads, full)
        if config.k_bits and full == mx.float32:
            total += heads.count * heads.key_dim * full.size
    return total


def _group_bytes(config: KVCacheConfig, size: int, heads: Heads, full: mx.Dtype) -> int:
    pair = 2 * scale_dtype(full).size
    if config.k_bits:
        keys = heads.key_dim * (size * config.k_bits // 8 + pair)
    else:
        keys = heads.key_dim * size * full.size
    if config.v_bits and heads.value_dim:
        group, padded = value_group(heads.value_dim, config.group_size, config.v_bits)
        values = size * (padded * config.v_bits // 8 + padded // group * pair)
    else:
        values = heads.value_dim * size * full.size
    return keys + values
