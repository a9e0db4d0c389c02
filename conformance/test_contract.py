"""The methods of one cache, on mlx-lm's own and on ours."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from mlx_kivi import KVCacheConfig, QuantizedStreamingCache

from .common import arrays_in
from .contract.kinds import (
    DIM,
    HEADS,
    KINDS,
    OURS,
    Kind,
    chunks,
    feed,
    restored,
    same_state,
    tokens,
)

every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
our_kinds = pytest.mark.parametrize("kind", OURS, ids=str)


def total(kind: Kind) -> int:
    """Tokens to feed: past every window and several groups, where the rule holds that long."""
    return min(230, kind.limit)


@every_kind
def test_update_and_fetch_returns_what_the_queries_see_in_order(kind: Kind) -> None:
    cache, seen = kind.make(), 0
    for length in chunks(total(kind)):
        fetched = cache.update_and_fetch(*tokens(seen, seen + length))
        positions = kind.shown(seen, length)
        seen += length
        for got, all_of_them in zip(fetched, tokens(0, seen), strict=True):
            want = np.array(all_of_them)[:, :, positions]
            assert got.shape == want.shape
            error = np.abs(np.array(got) - want)
            # Normal values span about 8; a step is that over the levels.
            assert error.max() <= (0 if kind.bits is None else 8 / (2**kind.bits - 1))
            assert not error[:, :, positions < kind.sinks].any()
            assert not error[:, :, positions >= seen - 16].any()


@every_kind
def test_keys_and_values_returns_the_same_again(kind: Kind) -> None:
    cache = kind.make()
    if not hasattr(cache, "keys_and_values"):
        pytest.skip("mlx-lm's own caches have keys_and_values from 0.32 on")
    for length in chunks(total(kind)):
        fetched = feed(cache, length)
        again = cache.keys_and_values()
        assert all(mx.array_equal(a, b) for a, b in zip(fetched, again, strict=True))


@every_kind
def test_offset_size_empty_and_truth_follow_the_tokens(kind: Kind) -> None:
    cache = kind.make()
    assert (cache.offset, cache.size(), cache.empty(), bool(cache)) == (0, 0, True, True)
    seen = 0
    for length in chunks(total(kind)):
        feed(cache, length)
        seen += length
        bound = seen if kind.window is None else kind.sinks + kind.window
        assert type(cache.offset) is int
        assert (cache.offset, cache.size()) == (seen, min(seen, bound))
        assert not cache.empty() and bool(cache)


@every_kind
def test_nbytes_counts_every_array_that_is_held(kind: Kind) -> None:
    cache = kind.make()
    assert cache.nbytes == 0
    for length in chunks(total(kind)):
        feed(cache, length)
        assert cache.nbytes == sum(a.nbytes for a in arrays_in(cache))


@pytest.mark.parametrize("return_array", [False, True])
@pytest.mark.parametrize("window_size", [None, 1, 3, 50, 70, 1000])
@every_kind
def test_make_mask_shows_what_the_rule_and_a_window_size_allow(
    kind: Kind, window_size: int | None, return_array: bool
) -> None:
    for seen in (0, 1, 3, 20, 57, 63, 64, 100, 150, 200):
        for count in (1, 2, 9, 40):
            if seen + count > kind.limit:
                continue
            cache = kind.make()
            feed(cache, *chunks(seen))
            mask = cache.make_mask(count, return_array=return_array, window_size=window_size)
            if return_array and count > 1:
                assert isinstance(mask, mx.array) and mask.dtype == mx.bool_
            keys = kind.shown(seen, count)
            assert feed(cache, count)[0].shape[2] == len(keys)
            queries = np.arange(seen, seen + count)
            want = kind.sees(queries, keys)
            if window_size is not None:
                want &= keys > queries[:, None] - window_size
            np.testing.assert_array_equal(shown_by(mask, count, len(keys)), want)


def shown_by(mask: mx.array | str | None, queries: int, keys: int) -> np.ndarray:
    """A mask in any of its forms, spelt out: [queries, keys]."""
    if mask is None:
        assert queries == 1
        return np.ones((1, keys), bool)
    if isinstance(mask, str):
        assert mask == "causal"
        return np.tri(queries, keys, keys - queries, dtype=bool)
    return np.broadcast_to(np.array(mask), (queries, keys))


@every_kind
def test_keys_and_values_can_be_assigned(kind: Kind) -> None:
    """Models tie evaluation to a cache: ``cache.keys = mx.depends(cache.keys, other)``."""
    cache, twin = kind.make(), kind.make()
    for length in chunks(total(kind) - 10):
        feed(cache, length)
        feed(twin, length)
        cache.keys = mx.depends(cache.keys, mx.ones(3) + 1)
        cache.values = mx.depends(cache.values, mx.ones(3) + 1)
    assert same_state(cache, twin)
    for got, want in zip(feed(cache, 10), feed(twin, 10), strict=True):
        assert mx.array_equal(got, want)


@our_kinds
def test_assigning_an_array_of_another_shape_is_refused(kind: Kind) -> None:
    cache = kind.make()
    feed(cache, 5)
    with pytest.raises(ValueError, match="shape of the buffer"):
        cache.keys = mx.zeros((1, HEADS, 3, DIM))


@every_kind
def test_a_deep_copy_is_equal_and_independent(kind: Kind) -> None:
    for seen in (0, 1, 30, total(kind) - 20):
        cache = kind.make()
        feed(cache, *chunks(seen))
        twin = copy.deepcopy(cache)
        assert twin.nbytes == cache.nbytes
        feed(cache, 7, 1, 1, seed=1)  # other tokens
        assert twin.offset == seen
        fresh = kind.make()
        feed(fresh, *chunks(seen))
        for length in (1, 9, 1):
            for got, want in zip(feed(twin, length), feed(fresh, length), strict=True):
                assert mx.array_equal(got, want)


@every_kind
def test_a_cache_goes_on_from_its_state(kind: Kind) -> None:
    for seen in (1, 3, 30, 60, total(kind) - 14):
        cache = kind.make()
        feed(cache, *chunks(seen))
        twin = restored(cache)
        assert twin.offset == seen
        assert same_state(cache, twin)
        for length in (1, 1, 9, 1):
            for got, want in zip(feed(twin, length), feed(cache, length), strict=True):
                assert mx.array_equal(got, want)


@our_kinds
def test_an_empty_cache_has_a_state_too(kind: Kind) -> None:
    twin = restored(kind.make())
    assert twin.empty() and twin.config == kind.make().config
    assert mx.array_equal(feed(twin, 20)[0], feed(kind.make(), 20)[0])


@our_kinds
def test_a_state_holds_what_is_live_and_its_arrays_stay_as_they_were(kind: Kind) -> None:
    cache = kind.make()
    for length in chunks(230):
        feed(cache, length)
        state = cache.state
        before = [mx.array(a) for a in state]
        # Whole steps of 256 tokens, and all slots of a bounded cache, are allocated at once.
        assert sum(a.nbytes for a in state[1:]) <= cache.nbytes
        assert state[1].shape[2] <= min(cache.offset, cache.keys.shape[2])
        for one in (copy.deepcopy(cache), restored(cache), restored(cache)):
            one.state = state
            feed(one, 100, *[1] * 40, seed=1)
            assert all(mx.array_equal(a, b) for a, b in zip(state, before, strict=True))


@our_kinds
def test_tokens_of_another_shape_are_refused_and_change_nothing(kind: Kind) -> None:
    cache = kind.make()
    feed(cache, 50, 20)
    before = copy.deepcopy(cache)
    bad: list[Any] = [
        mx.zeros((2, HEADS, 3, DIM)),
        mx.zeros((1, HEADS + 1, 3, DIM)),
        mx.zeros((1, HEADS, 3, DIM + 32)),
    ]
    for x in bad:
        with pytest.raises(ValueError, match="do not fit a cache"):
            cache.update_and_fetch(x, x)
    assert same_state(cache, before)


@our_kinds
def test_nothing_that_mlx_lm_takes_for_its_own_quantised_cache_is_there(kind: Kind) -> None:
    """`bits` would make mlx-lm's attention read tuples."""
    assert not any(hasattr(kind.make(), name) for name in ("bits", "group_size"))


@our_kinds
def test_merge_says_that_a_cache_goes_into_batches(kind: Kind) -> None:
    assert len(kind.make().merge([kind.make(), kind.make()])) == 2


@our_kinds
def test_reading_an_empty_cache_says_what_is_missing(kind: Kind) -> None:
    with pytest.raises(ValueError, match="empty: call update_and_fetch first"):
        kind.make().keys_and_values()


@pytest.mark.parametrize("window", [None, 150])
def test_for_kv_bits_a_packed_cache_of_ours_follows(window: int | None) -> None:
    """mlx-lm's own bounded cache can't be packed; ours keeps its sinks, window and offset."""
    cache = QuantizedStreamingCache(KVCacheConfig(window=window))
    feed(cache, 5, 200, 1)
    other = cache.to_quantized(group_size=32, bits=8)
    assert type(other) is QuantizedStreamingCache
    assert (other.config.k_bits, other.config.v_bits, other.config.group_size) == (8, 8, 32)
    assert (other.config.window, other.config.sink) == (cache.config.window, cache.config.sink)
    assert (other.offset, other.size()) == (cache.offset, cache.size()) and other.packed_tokens
    got, want = (feed(c, 3)[0] for c in (other, cache))
    assert mx.allclose(got, want, rtol=0, atol=0.03)


def test_the_stock_cache_and_ours_in_full_precision_return_the_same() -> None:
    ours, stock = next(k for k in OURS if k.name == "full").make(), KVCache()
    for length in chunks(230):
        for count in (1, 2, 7):
            for array in (False, True):
                mine, its = (
                    c.make_mask(count, return_array=array, window_size=None) for c in (ours, stock)
                )
                assert type(mine) is type(its)
        for got, want in zip(feed(ours, length), feed(stock, length), strict=True):
            assert mx.array_equal(got, want)
    assert (ours.offset, ours.size(), ours.nbytes) == (stock.offset, stock.size(), stock.nbytes)
