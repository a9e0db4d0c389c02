"""Bytes: what a cache takes as it grows, and where packing a window does not pay."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import RotatingKVCache
from reference import policies

from mlx_kivi import KVCacheConfig, QuantizedStreamingCache
from mlx_kivi.cache.layout import plan_for
from mlx_kivi.cache.sizes import Heads, best_plan, stored_bytes
from mlx_kivi.config import TRIM_MARGIN


def fed(config: KVCacheConfig, tokens: int, heads: Heads) -> QuantizedStreamingCache:
    """A cache after so many tokens, the last of them alone."""
    cache = QuantizedStreamingCache(config)
    for length in (tokens - 1, 1):
        if length:
            cache.update_and_fetch(
                *(
                    mx.zeros((1, heads.count, length, dim), heads.dtype)
                    for dim in (heads.key_dim, heads.value_dim)
                )
            )
    return cache


shapes = st.builds(
    Heads,
    count=st.integers(1, 3),
    key_dim=st.sampled_from([32, 64, 80]),
    value_dim=st.sampled_from([0, 32, 72, 128]),
    dtype=st.sampled_from([mx.float16, mx.bfloat16, mx.float32]),
)


@given(policies, shapes, st.integers(1, 900))
def test_bytes_are_known_from_shapes(config: KVCacheConfig, heads: Heads, tokens: int) -> None:
    cache = fed(config, tokens, heads)
    # Packing follows with the next token.
    groups = [cache.plan.groups(n) for n in (tokens - 1, tokens)]
    if groups[0] == groups[1]:
        plan = best_plan(config, heads)
        assert cache.nbytes == stored_bytes(config, plan, cache.step, heads, tokens)


@given(policies, shapes, st.integers(1, 400))
def test_a_window_is_packed_only_where_that_takes_fewer_bytes(
    config: KVCacheConfig, heads: Heads, window: int
) -> None:
    packed = replace(config, window=window)
    tokens = 900 + 2 * packed.residual_length
    bare = replace(packed, k_bits=None, v_bits=None)
    ours, plain = (fed(policy, tokens, heads) for policy in (packed, bare))
    assert ours.nbytes <= plain.nbytes
    if packed.quantized and ours.plan.residual is None and window > packed.residual_length + 128:
        # The other choice, had it been taken.
        other = plan_for(packed, packed=True)
        assert stored_bytes(packed, other, 1, heads, 10**6) >= plain.nbytes


@pytest.mark.parametrize("window", [97, 129, 150, 200, 240, 300, 1020])
@pytest.mark.parametrize("name", ["int8", "int4", "int3", "int2"])
def test_no_window_of_an_8b_model_takes_more_than_unpacked(name: str, window: int) -> None:
    heads = Heads(8, 128, 128, mx.bfloat16)
    config = KVCacheConfig.from_name(name, window=window)
    ours, plain = (fed(c, 900, heads).nbytes for c in (config, KVCacheConfig(window=window)))
    assert ours <= plain
    if window == 1020:
        assert ours < 0.6 * plain and best_plan(config, heads).residual is not None


@pytest.mark.parametrize(
    "config",
    [
        KVCacheConfig(window=2000),
        KVCacheConfig(window=2000, sink=0),
        KVCacheConfig.from_name("int8", residual_length=2000),
    ],
    ids=str,
)
def test_a_ring_grows_in_steps_and_is_fixed_once_full(config: KVCacheConfig) -> None:
    heads = Heads(2, 32, 32, mx.float16)
    stock = RotatingKVCache(2000 + config.sink, keep=config.sink)
    cache = QuantizedStreamingCache(config)
    one = mx.zeros((1, 2, 1, 32), mx.float16)
    sizes = []
    for _ in range(2400):
        cache.update_and_fetch(one, one)
        stock.update_and_fetch(one, one)
        spare = heads.full_bytes(2 * TRIM_MARGIN)
        assert cache.nbytes <= stock.nbytes + spare or config.quantized
        sizes.append(cache.nbytes)
    assert sizes[0] <= heads.full_bytes(256) and sizes[999] <= heads.full_bytes(1024)
    if not config.quantized:
        last = 2000 + config.sink
        assert len(set(sizes[last:])) == 1
        assert sizes[last] == heads.full_bytes(last + 2 * TRIM_MARGIN)


@pytest.mark.parametrize("residual", [0, 191, 192, 195, 223, 224, 440, 472, 500])
@pytest.mark.parametrize("chunk", [1, 97])
def test_a_ring_is_whole_once_a_group_is_packed(residual: int, chunk: int) -> None:
    heads = Heads(1, 32, 32, mx.float32)
    config = KVCacheConfig(k_bits=4, v_bits=4, group_size=32, residual_length=residual)
    cache = QuantizedStreamingCache(config, packed_attention=True)
    x = mx.zeros((1, 1, chunk, 32))
    for seen in range(chunk, 700, chunk):
        cache.update_and_fetch(x, x)
        if chunk == 1 and cache.plan.groups(seen) == cache.plan.groups(seen - 1):
            assert cache.nbytes == stored_bytes(config, cache.plan, cache.step, heads, seen)
        assert not cache._groups or cache._ring[0].shape[2] == 4 + cache.plan.ring


def test_a_wide_window_takes_one_step_at_its_first_token() -> None:
    heads = Heads(8, 128, 128, mx.float16)
    config = KVCacheConfig(window=131_068)
    assert fed(config, 1, heads).nbytes == heads.full_bytes(256)
    huge = KVCacheConfig.from_name("int8", residual_length=131_072)
    assert fed(huge, 1, heads).nbytes == heads.full_bytes(256)


def test_llama_4_scout_at_32768_tokens_takes_what_the_changelog_says() -> None:
    """48 layers, 36 of them in chunks of 8,192, of which mlx-lm keeps a step of 256 more."""
    heads, tokens = Heads(8, 128, 128, mx.float16), 32_768
    config = KVCacheConfig.from_name("int4")
    chunked = config.replace(sink=0, window=8192)
    whole, part = (
        stored_bytes(c, best_plan(c, heads), 256, heads, tokens) for c in (config, chunked)
    )
    stock, stock_part = heads.full_bytes(tokens), heads.full_bytes(8192 + 256)
    totals = [12 * whole + 36 * part, 12 * whole + 36 * stock_part, 12 * stock + 36 * stock_part]
    assert [round(total / 1e9, 2) for total in totals] == [0.82, 1.71, 2.86]
