"""What a layer's cache takes, in bytes, from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from ..config import KVCacheConfig, value_group
from .basis import ranked_parts, ranks
from .group_store import scale_dtype
from .layout import Plan, can_pack, plan_for


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


def stored_bytes(
    config: KVCacheConfig,
    plan: Plan,
    step: int,
    heads: Heads,
    tokens: int,
    balanced: bool = False,
    shared: bool = False,
) -> int:
    """What `QuantizedStreamingCache.nbytes` is after ``tokens`` tokens.

    step: tokens by which a ring grows; balanced: whether the layer's `Balance` is known; shared:
    whether the cache is a row of a `Bucket`, which has its margin from the start.
    """
    full = getattr(mx, config.dtype) if config.dtype else heads.dtype
    slots = plan.full_room(tokens, step) + (plan.margin if shared or plan.spares(tokens) else 0)
    total = heads.count * (heads.key_dim + heads.value_dim) * full.size * slots
    groups = plan.room(plan.groups(tokens))
    if groups:
        total += heads.count * groups * _group_bytes(config, plan.group, heads, full, balanced)
        if config.k_bits and (full == mx.float32 or (balanced and config.moves_keys)):
            total += heads.count * heads.key_dim * mx.float32.size
    return total


def _group_bytes(
    config: KVCacheConfig, size: int, heads: Heads, full: mx.Dtype, balanced: bool
) -> int:
    pair = 2 * scale_dtype(full).size  # the same for mixed channels
    if config.k_bits:
        parts = [(heads.key_dim, config.k_bits)]
        if balanced and ranks(config, heads.key_dim):
            parts = ranked_parts(heads.key_dim)
        keys = sum(channels * (size * bits // 8 + pair) for channels, bits in parts)
    else:
        keys = heads.key_dim * size * full.size
    if config.v_bits and heads.value_dim:
        group, padded = value_group(heads.value_dim, config.group_size, config.v_bits)
        values = size * (padded * config.v_bits // 8 + padded // group * pair)
    else:
        values = heads.value_dim * size * full.size
    return keys + values


def best_plan(config: KVCacheConfig, heads: Heads, balanced: bool = False) -> Plan:
    """The plan that takes fewer bytes once the window is full: small windows don't pay packed."""
    plain = plan_for(config, packed=False)
    if not can_pack(config):
        return plain
    packed = plan_for(config, packed=True)
    if config.window is None:
        return packed
    full = 2 * (config.sink + config.window + packed.ring)
    sizes = [stored_bytes(config, plan, 1, heads, full, balanced) for plan in (plain, packed)]
    return packed if sizes[1] < sizes[0] else plain
