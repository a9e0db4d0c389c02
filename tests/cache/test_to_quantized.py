"""mlx_lm's `kv_bits` on our caches: packed from some token on, with the same bounds."""

from __future__ import annotations

import warnings
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import Model, Stream, bounds, dense, new_cache, run, seeds, step, stored

from mlx_kivi import KVCacheConfig, QuantizedStreamingCache
from mlx_kivi.cache.rotation import Rotation
from mlx_kivi.config import BITS

pytestmark = pytest.mark.usefixtures("attention_hooked")


def packed_after(model: Model, cache: QuantizedStreamingCache, **how: int) -> tuple[Model, object]:
    """The cache's successor, and what it has to hold from now on."""
    before = (cache.offset, cache.size())
    other = cache.to_quantized(**how)
    assert (other.offset, other.size()) == before == (cache.offset, cache.size())
    model.config = other.config
    return model, other


@pytest.mark.filterwarnings("ignore:mlx_kivi. kv_bits")  # of windows too small to pay
@given(
    bounds,
    st.sampled_from(BITS),
    st.sampled_from([32, 64]),
    st.lists(st.just(1) | st.integers(2, 90), min_size=1, max_size=5),
    st.lists(st.just(1) | st.integers(2, 90), min_size=1, max_size=8),
    st.booleans(),
    seeds,
)
def test_the_same_tokens_go_on_packed(
    config: KVCacheConfig,
    bits: int,
    group: int,
    before: list[int],
    after: list[int],
    balanced: bool,
    seed: int | None,
) -> None:
    """Whatever the policy's bounds, and however the tokens came before and after."""
    wide = replace(config, window=config.window and 3 * config.window, balanced=balanced)
    stream = Stream(sum(before) + sum(after), heads=2, k_dim=32, v_dim=64)
    cache = new_cache(wide, stream, seed=seed)
    model = Model(wide, stream, cache.balance)
    for length in before:
        model.append(cache, length)
    model, other = packed_after(model, cache, group_size=group, bits=bits)
    expected = replace(wide, k_bits=bits, v_bits=bits, group_size=group)
    assert other.config == expected
    for length in after:
        model.append(other, length)
        n = min(length, 32)
        if other.can_trim(n):  # and trimmed tokens come again
            assert other.trim(n) == n
            model.trimmed(n)
            model.append(other, n)


@pytest.mark.parametrize("window", [None, 200, 300])
def test_it_takes_the_bytes_of_a_cache_that_was_packed_from_the_start(window: int | None) -> None:
    stream = Stream(801, k_dim=64, v_dim=64, dtype=mx.float16)
    plain = QuantizedStreamingCache(KVCacheConfig(window=window))
    start = QuantizedStreamingCache(KVCacheConfig(k_bits=4, v_bits=4, window=window))
    for cache in (plain, start):
        run(cache, stream, [400, 200])
    other = plain.to_quantized(group_size=64, bits=4)
    for cache in (other, start):
        run(cache, stream, [200, 1], begin=600)
    assert other.config == start.config and other.nbytes == start.nbytes
    (_, *held), (_, *want) = stored(other)[0], stored(start)[0]
    for got, expected in zip(held, want, strict=True):
        # Where groups lie is the same; a filler at the window's end may change one step.
        np.testing.assert_allclose(got, expected, rtol=0, atol=0.6)
        assert np.abs(got - expected).mean() < 0.01


@pytest.mark.parametrize("n", [1, 31, 32])
def test_a_window_that_was_packed_on_the_way_can_lose_32_tokens(n: int) -> None:
    """No more: what a filler stands for is gone."""
    stream = Stream(700)
    cache = QuantizedStreamingCache(KVCacheConfig(window=200), packed_attention=True)
    run(cache, stream, [500, 1, 1, 1])
    cache = cache.to_quantized(group_size=64, bits=8)
    assert cache.packed_tokens
    want = [dense(x) for x in run(cache, stream, [1] * 40, begin=503)]
    assert not cache.can_trim(100)
    assert cache.trim(n) == n
    got = [dense(x) for x in run(cache, stream, [1] * n, begin=543 - n)]
    for a, b in zip(got, want[-n:], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def test_right_after_the_change_no_filler_can_come_back_into_sight() -> None:
    stream = Stream(400)
    cache = QuantizedStreamingCache(KVCacheConfig(window=200), packed_attention=True)
    run(cache, stream, [1] * 390)
    plain = cache.can_trim(31), cache.can_trim(34)
    other = cache.to_quantized(group_size=64, bits=8)
    assert (other.can_trim(31), other.can_trim(34)) == plain == (True, False)


def test_an_empty_cache_is_packed_from_its_first_token() -> None:
    other = QuantizedStreamingCache(KVCacheConfig(window=500)).to_quantized(group_size=32, bits=4)
    stream = Stream(400)
    run(other, stream, [399, 1])
    assert other.packed_tokens and other.offset == 400


def test_a_re_based_stream_keeps_its_positions() -> None:
    stream = Stream(300)
    cache = QuantizedStreamingCache(KVCacheConfig(window=200), packed_attention=True)
    cache.rotation, cache.rebase_at = Rotation(32, base=1e4), 2**18
    run(cache, stream, [200])
    cache._rebased = -(2**18) + 250
    for t in range(200, 260):
        step(cache, stream, t, t + 1)
    assert cache.offset < 2**18 <= cache.offset + 2**17
    other = cache.to_quantized(group_size=32, bits=8)
    assert (other.offset, other.seen, other.rotation, other.rebase_at) == (
        cache.offset, cache.seen, cache.rotation, cache.rebase_at,
    )  # fmt: skip
    got, want = (dense(step(c, stream, 260, 261)) for c in (other, cache))
    np.testing.assert_allclose(got, want, rtol=0, atol=0.02)


def test_a_state_says_what_a_filler_stands_for() -> None:
    stream = Stream(300)
    cache = QuantizedStreamingCache(KVCacheConfig(window=200), packed_attention=True)
    run(cache, stream, [290])
    other = cache.to_quantized(group_size=64, bits=8)
    loaded = QuantizedStreamingCache.from_state(other.state)
    for n in range(1, 80):
        assert loaded.can_trim(n) == other.can_trim(n)
    got, want = (dense(step(c, stream, 290, 291)) for c in (loaded, other))
    np.testing.assert_array_equal(got, want)


def test_a_small_window_stays_as_it_is_and_says_so() -> None:
    cache = QuantizedStreamingCache(KVCacheConfig(window=40), packed_attention=True)
    stream = Stream(300)
    run(cache, stream, [90, 1])
    with pytest.warns(UserWarning, match="kv_bits=4 is left out, a window of 40 takes fewer bytes"):
        other = cache.to_quantized(group_size=64, bits=4)
    assert other.nbytes == cache.nbytes
    got, want = (run(c, stream, [1, 50, 1], begin=91) for c in (other, cache))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(dense(a), dense(b))


@pytest.mark.parametrize("how", [{"bits": 7}, {"bits": 0}, {"bits": 4, "group_size": 48}], ids=str)
def test_what_can_not_be_packed_is_named(how: dict[str, int]) -> None:
    cache = QuantizedStreamingCache(KVCacheConfig())
    with pytest.raises(ValueError, match="bits=[70]: use one of|group_size=48: use one of"):
        cache.to_quantized(**how)


def test_a_cache_that_is_packed_already_stays_and_says_so() -> None:
    cache = QuantizedStreamingCache(KVCacheConfig.from_name("int8"))
    with pytest.warns(UserWarning, match="kv_bits=4 is left out.* packs it already .8 bits"):
        assert cache.to_quantized(group_size=64, bits=4) is cache
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.to_quantized(group_size=64, bits=8) is cache


def test_a_deep_trim_brings_no_filler_back() -> None:
    """The window reached back to what was evicted before the change."""
    plain = QuantizedStreamingCache(KVCacheConfig(sink=0, window=300, residual_length=16))
    run(plain, Stream(340), [10] * 34)
    other = plain.to_quantized(group_size=64, bits=4)
    assert other.packed_tokens and other._oldest % 64
    for n in range(33, 341):
        assert not (other.can_trim(n) and not plain.can_trim(n)), n


def test_a_cache_that_lost_all_its_fillers_is_as_new() -> None:
    stream = Stream(900)
    cache = QuantizedStreamingCache(KVCacheConfig(sink=0, window=400, residual_length=16))
    run(cache, stream, [300])
    other = cache.to_quantized(group_size=64, bits=4)
    run(other, stream, [600], begin=300)
    cache = QuantizedStreamingCache(KVCacheConfig(sink=0, window=400, residual_length=16))
    run(cache, stream, [900])
    late = cache.to_quantized(group_size=64, bits=4)
    for one in (other, late):
        one.trim(10**6)
        run(one, stream, [4, 500], begin=0)
        assert QuantizedStreamingCache.from_state(one.state).offset == one.offset
        assert one.can_trim(20)
