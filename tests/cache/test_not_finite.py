"""Tokens whose keys or values are not finite: gone for good once no query can see them."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import RotatingKVCache
from reference import Stream, dense, run, step

from mlx_kivi import KVCacheConfig, QuantizedStreamingCache
from mlx_kivi.config import TRIM_MARGIN

pytestmark = pytest.mark.usefixtures("attention_hooked")

BAD = {"nan": mx.nan, "inf": mx.inf, "minus inf": -mx.inf}
POLICIES = {
    "full": KVCacheConfig(),
    "window": KVCacheConfig(window=50),
    "int8": KVCacheConfig.from_name("int8"),
    "int4, residual 0": KVCacheConfig(k_bits=4, v_bits=4, group_size=32, residual_length=0),
    "int4, window": KVCacheConfig.from_name("int4", window=300, group_size=32),
    "keys alone": KVCacheConfig(k_bits=4, group_size=32),
    "values alone": KVCacheConfig(v_bits=2, group_size=32, residual_length=8, window=200),
}


def new_cache(config: KVCacheConfig, packed: bool = True) -> QuantizedStreamingCache:
    return QuantizedStreamingCache(config, packed_attention=packed)


def feed_bad(cache: QuantizedStreamingCache, stream: Stream, bad: float, length: int) -> None:
    shape = (1, stream.heads, length)
    cache.update_and_fetch(
        mx.full((*shape, stream.k_dim), bad), mx.full((*shape, stream.v_dim), bad)
    )


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("config", POLICIES.values(), ids=POLICIES)
def test_what_was_trimmed_leaves_no_trace(config: KVCacheConfig, bad: float, packed: bool) -> None:
    """Single tokens and a draft, in turns, at each place in a group; a twin never sees them."""
    stream = Stream(620, heads=2, repeats=2)
    cache = new_cache(config, packed)
    run(cache, stream, [250])
    twin, begin = copy.deepcopy(cache), 250
    for lengths in ([1], [1, 1, 1], [5], [1, 30], [32]) * 7:
        for length in lengths:
            feed_bad(cache, stream, bad, length)
        assert cache.trim(sum(lengths)) == sum(lengths)
        for count in (1, 7, 1):
            got, want = (step(c, stream, begin, begin + count) for c in (cache, twin))
            assert np.isfinite(dense(got)).all()
            np.testing.assert_allclose(dense(got), dense(want), rtol=0, atol=1e-6)
            begin += count


@pytest.mark.parametrize("name", ["int8", "int4, residual 0"])
def test_packed_groups_that_are_trimmed_leave_no_trace(name: str) -> None:
    stream = Stream(700)
    cache = new_cache(POLICIES[name])
    run(cache, stream, [200])
    feed_bad(cache, stream, mx.nan, 300)
    run(cache, stream, [1, 1], begin=500)  # now they are packed
    assert cache.packed_tokens > 300 and cache.trim(302) == 302
    outputs = run(cache, stream, [1] * 200 + [40], begin=200)
    assert all(np.isfinite(dense(out)).all() for out in outputs)


def last_not_finite(cache: Any, stream: Stream, at: int, bad: dict[str, float]) -> int:
    """The last call whose output is not finite, one token a call, that at ``at`` being bad."""
    last = 0
    for begin in range(stream.length):
        q, k, v = stream.cut(begin, begin + 1)
        if begin == at:
            k, v = mx.full(k.shape, bad.get("keys", 1.0)), mx.full(v.shape, bad.get("values", 1.0))
        keys, values = cache.update_and_fetch(k, v)
        out = scaled_dot_product_attention(q, keys, values, cache, 0.2, None)
        if not mx.isfinite(out).all():
            last = begin
    return last


@pytest.mark.parametrize("bad", [{"keys": mx.nan}, {"values": mx.nan}, {"values": mx.inf}], ids=str)
@pytest.mark.parametrize("at", [0, 20, 149])
def test_an_unpacked_window_recovers_where_mlx_lms_does(at: int, bad: dict[str, float]) -> None:
    stream = Stream(400)
    ours, stock = new_cache(KVCacheConfig(sink=0, window=150)), RotatingKVCache(150)
    last = last_not_finite(ours, stream, at, bad)
    assert last == last_not_finite(stock, stream, at, bad) == at + 149


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
@pytest.mark.parametrize("bad", [{"keys": mx.nan}, {"values": mx.nan}, {"keys": -mx.inf}], ids=str)
@pytest.mark.parametrize("at", [4, 40, 100])
def test_a_packed_window_recovers_before_the_group_is_gone(
    at: int, bad: dict[str, float], dtype: mx.Dtype
) -> None:
    config = KVCacheConfig.from_name("int4", window=150, group_size=32)
    cache = new_cache(config)
    last = last_not_finite(cache, Stream(500, dtype=dtype), at, bad)
    assert cache.packed_tokens
    # It is seen as it is until its group is packed; its slot in the ring is taken a little later.
    assert at + config.residual_length <= last < at + cache.plan.ring <= at + 150 + TRIM_MARGIN


@pytest.mark.parametrize(
    "config", [POLICIES["int8"], KVCacheConfig(k_bits=8)], ids=["int8", "keys alone"]
)
def test_packed_neighbours_of_a_nan_are_what_they_were(config: KVCacheConfig) -> None:
    """Those that share its scale, and all later ones: float32 keys lose a middle for good."""
    stream = Stream(300)
    clean = [dense(x) for x in (stream.k, stream.v)]
    for x in (stream.k, stream.v):
        x[:, :, 10, 3], x[:, :, 70, 5] = mx.nan, mx.inf
    cache = new_cache(config.replace(sink=0))
    run(cache, stream, [300])
    cache.state  # packs
    for which, want in enumerate(clean):
        held = dense(cache.view().dense(which))
        want[:, :, 10, 3] = want[:, :, 70, 5] = 0
        packed = cache.packed_tokens
        np.testing.assert_allclose(held[:, :, :packed], want[:, :, :packed], rtol=0, atol=0.02)
