"""Taking tokens back: exact near the end, all or nothing further back, honest about which."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from mlx_lm.models.cache import trim_prompt_cache
from reference import (
    Model,
    Stream,
    dense,
    follow,
    hooked,
    lengths,
    new_cache,
    policies,
    run,
    seeds,
    splits,
)

from mlx_kivi import KVCacheConfig, QuantizedStreamingCache

MARGIN = 32  # tokens that can be taken back at any time


@pytest.fixture(autouse=True, scope="module")
def _hooked() -> Iterator[None]:
    with hooked():
        yield


def cache_of(name: str = "int4", packed: bool = True, **fields: Any) -> QuantizedStreamingCache:
    config = KVCacheConfig.from_name(name, **{"group_size": 32, **fields})
    return QuantizedStreamingCache(config, packed_attention=packed)


def cut_by(chunks: list[int], n: int) -> list[int]:
    """The same calls without the last n tokens."""
    left, kept = sum(chunks) - n, []
    for length in chunks:
        if left > 0:
            kept.append(min(length, left))
        left -= length
    return kept


def assert_equal_outputs(got: list[mx.array], expected: list[mx.array]) -> None:
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(dense(a), dense(b), rtol=0, atol=1e-5)


# Near the end: as if the tokens had never been there


@given(
    policies, splits, st.integers(1, MARGIN), st.lists(lengths, max_size=4), st.booleans(), seeds
)
def test_the_last_32_tokens_leave_no_trace(
    config: KVCacheConfig,
    chunks: list[int],
    n: int,
    more: list[int],
    packed: bool,
    seed: int | None,
) -> None:
    n = min(n, sum(chunks))
    kept, more = sum(chunks) - n, [1, *more, 1]
    stream = Stream(max(sum(chunks), kept + sum(more)), 1, 2)
    trimmed, fresh = (new_cache(config, stream, packed, seed) for _ in range(2))
    run(trimmed, stream, chunks)
    assert trimmed.can_trim(n) and trimmed.trim(n) == n
    stream.redraw(kept)  # what follows is not what was taken back
    run(fresh, stream, cut_by(chunks, n))
    assert (trimmed.offset, trimmed.size()) == (fresh.offset, fresh.size())
    assert trimmed.is_trimmable() == fresh.is_trimmable()
    assert_equal_outputs(*(run(c, stream, more, kept) for c in (trimmed, fresh)))


@pytest.mark.parametrize("n", [1, 31, 32])
@pytest.mark.parametrize("name", ["none", "int8", "int2"])
@pytest.mark.parametrize("window", [None, 40, 150])
def test_every_offset_around_group_boundaries_can_be_left_again(
    name: str, window: int | None, n: int
) -> None:
    """Sinks 4, residual 8, groups of 32: a group is packed at 44, 76, 108, …"""
    stream = Stream(300, 1, 2)
    cache = cache_of(name, window=window, residual_length=8)
    fresh = cache_of(name, window=window, residual_length=8)
    run(cache, stream, [60])
    run(fresh, stream, [60])
    for begin in range(60, 210, 3):  # goes on by 3 tokens, each time through n more
        run(cache, stream, [1, 1, 1] + [1] * n, begin)
        assert cache.trim(n) == n
        run(fresh, stream, [1, 1, 1], begin)
    assert cache.offset == fresh.offset
    assert_equal_outputs(*(run(c, stream, [1, 9, 1], fresh.offset) for c in (cache, fresh)))


@pytest.mark.parametrize("chunk", [33, 100, 300])
@pytest.mark.parametrize("window", [None, 50, 150])
@pytest.mark.parametrize("name", ["none", "int8"])
def test_a_chunk_just_appended_can_lose_its_end(name: str, window: int | None, chunk: int) -> None:
    stream = Stream(150 + chunk, 1, 2)
    for n in (1, 17, chunk - 1, chunk):
        cache, fresh = cache_of(name, window=window), cache_of(name, window=window)
        run(cache, stream, [100, 1, chunk])
        assert cache.trim(n) == n
        run(fresh, stream, cut_by([100, 1, chunk], n))
        begin = 101 + chunk - n
        assert_equal_outputs(*(run(c, stream, [1, 7, 1], begin) for c in (cache, fresh)))


@pytest.mark.parametrize(
    "fields", [{"name": "int8"}, {"name": "int4", "window": 70}, {"name": "none", "window": 20}],
    ids=str,
)  # fmt: skip
def test_drafts_that_are_taken_back_change_nothing(fields: dict[str, Any]) -> None:
    """Speculative decoding: calls of five tokens, of which one to five stay."""
    stream = Stream(400, 1, 2)
    drafted, single = cache_of(**fields), cache_of(**fields)
    run(drafted, stream, [90])
    run(single, stream, [90])
    begin = 90
    for i in range(70):
        accepted = i % 5 + 1
        (out,) = run(drafted, stream, [5], begin)
        if accepted < 5:
            assert drafted.trim(5 - accepted) == 5 - accepted
        expected = run(single, stream, [1] * accepted, begin)
        assert_equal_outputs([out[:, :, :accepted]], [mx.concatenate(expected, axis=2)])
        begin += accepted
    assert drafted.offset == single.offset == begin


# Further back


@given(policies, splits, st.integers(0, 600), st.lists(lengths, min_size=1, max_size=4), seeds)
def test_a_trim_is_right_or_refused(
    config: KVCacheConfig, chunks: list[int], n: int, more: list[int], seed: int | None
) -> None:
    """Packed tokens come back as they were packed, and are packed again later."""
    seen = sum(chunks)
    stream = Stream(seen + sum(more) + 1)
    cache = new_cache(config, stream, seed=seed)
    model = follow(cache, stream, chunks)
    can, free, clamped = cache.can_trim(min(n, seen)), cache.is_trimmable(), min(n, seen)
    assert free == (config.window is None or seen - config.sink < config.window)
    done = cache.trim(n)
    assert done == (clamped if can else 0)
    assert can or not free
    model.trimmed(done)
    assert cache.offset == model.offset
    for length in [*more, 1]:
        model.append(cache, length)


@pytest.mark.parametrize("n", [40, 100, 300])
@pytest.mark.parametrize("window", [None, 401])
def test_without_eviction_any_number_goes(n: int, window: int | None) -> None:
    stream = Stream(500)
    cache = cache_of("int4", window=window)
    model = follow(cache, stream, [250, 1, 150, 1])
    assert cache.is_trimmable() and cache.trim(n) == n
    model.trimmed(n)
    for length in (1, 30, 1, 40, 1):
        model.append(cache, length)


@pytest.mark.parametrize("name", ["none", "int8", "int4"])
@pytest.mark.parametrize("window", [30, 60, 200])
@pytest.mark.parametrize("last", [1, 20])
def test_what_was_evicted_cannot_come_back_and_nothing_changes(
    name: str, window: int, last: int
) -> None:
    stream = Stream(600, 1, 2)
    cache, twin = cache_of(name, window=window), cache_of(name, window=window)
    for one in (cache, twin):
        run(one, stream, [300, 1, 199, last])
    seen = 500 + last
    assert not cache.is_trimmable()
    for n in (200, 300, seen - 50):
        assert not cache.can_trim(n) and cache.trim(n) == 0
    assert (cache.offset, cache.size(), cache.nbytes) == (seen, twin.size(), twin.nbytes)
    for a, b in zip(*(run(c, stream, [1, 9, 1], seen) for c in (cache, twin)), strict=True):
        assert mx.array_equal(a, b)


@pytest.mark.parametrize("name", ["none", "int8"])
def test_sinks_are_never_gone(name: str) -> None:
    """Back to the sinks or before them nothing is needed that was evicted."""
    stream = Stream(300)
    for kept in (0, 2, 4):
        cache = cache_of(name, window=30)
        model = follow(cache, stream, [150, 1, 49])
        assert cache.trim(200 - kept) == 200 - kept
        model.trimmed(200 - kept)
        for length in (1, 60, 1):
            model.append(cache, length)


@pytest.mark.parametrize("name", ["none", "int4"])
@pytest.mark.parametrize("window", [None, 50])
def test_after_all_is_trimmed_a_cache_is_as_new(name: str, window: int | None) -> None:
    stream = Stream(200, 1, 2)
    cache = cache_of(name, window=window)
    run(cache, stream, [120, 1])
    assert cache.trim(1000) == 121
    assert (cache.offset, cache.size()) == (0, 0) and cache.is_trimmable()
    stream.redraw(0)
    new = cache_of(name, window=window)
    assert_equal_outputs(*(run(c, stream, [100, 1, 40, 1]) for c in (cache, new)))


@pytest.mark.parametrize("n", [0, -1, -100])
def test_no_tokens_are_no_trim(n: int) -> None:
    stream = Stream(60)
    cache = cache_of()
    run(cache, stream, [50, 1])
    assert cache.trim(n) == 0 and cache.offset == 51
    assert not cache.can_trim(-1) and not cache.can_trim(52) and cache.can_trim(51)
    assert cache_of().trim(5) == 0


@given(
    policies,
    splits,
    st.lists(st.tuples(lengths, st.integers(1, 40)), min_size=2, max_size=8),
    seeds,
)
def test_trims_and_appends_in_turns(
    config: KVCacheConfig, chunks: list[int], turns: list[tuple[int, int]], seed: int | None
) -> None:
    stream = Stream(sum(chunks) + sum(length for length, _ in turns))
    cache = new_cache(config, stream, seed=seed)
    model = Model(config, stream, cache.balance)
    for length in chunks:
        model.append(cache, length)
    for length, n in turns:
        done = cache.trim(n)
        assert done in (0, min(n, model.offset))
        model.trimmed(done)
        model.append(cache, length)


@given(policies, splits, st.integers(1, MARGIN), seeds)
def test_a_restored_cache_can_be_trimmed_alike(
    config: KVCacheConfig, chunks: list[int], n: int, seed: int | None
) -> None:
    assume(sum(chunks) >= n)
    kept = sum(chunks) - n
    stream = Stream(sum(chunks) + 40, 1, 2)
    fresh, saved = (new_cache(config, stream, seed=seed) for _ in range(2))
    run(saved, stream, chunks)
    again = type(saved).from_state(saved.state)
    assert again.trim(n) == n
    run(fresh, stream, cut_by(chunks, n))
    stream.redraw(kept)
    assert_equal_outputs(*(run(c, stream, [1, 33, 1], kept) for c in (again, fresh)))


def test_mlx_lm_trims_all_caches_of_a_model_or_none() -> None:
    stream = Stream(300)
    bounded, free = cache_of(window=40), cache_of()
    for cache in (bounded, free):
        run(cache, stream, [250, 1])
    assert trim_prompt_cache([free, bounded], 150) == 0
    assert free.offset == bounded.offset == 251
    assert trim_prompt_cache([free, bounded], 20) == 20
    assert free.offset == bounded.offset == 231
