"""The cache of one layer against plain references: what it returns, keeps and costs."""

import copy
import gc
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, RotatingKVCache
from reference import (
    Stream,
    arrays_in,
    bounds,
    dense,
    follow,
    hooked,
    new_cache,
    policies,
    run,
    seeds,
    splits,
    step,
    stored,
)

from mlx_kivi import KVCacheConfig, QuantizedStreamingCache
from mlx_kivi.config import TRIM_MARGIN


@pytest.fixture(autouse=True, scope="module")
def _hooked() -> Iterator[None]:
    with hooked():
        yield


def cache_of(name: str = "int4", packed: bool = True, **fields: Any) -> QuantizedStreamingCache:
    """A cache whose groups are small, so that short streams fill several."""
    fields = {"group_size": 32, **fields}
    return QuantizedStreamingCache(KVCacheConfig.from_name(name, **fields), packed_attention=packed)


# Chunk invariance: the reference knows nothing of how a prompt is cut


@given(bounds, splits, st.integers(1, 3), st.integers(1, 2), st.booleans())
def test_full_precision_equals_the_masked_reference_for_any_split(
    config: KVCacheConfig, chunks: list[int], heads: int, repeats: int, packed: bool
) -> None:
    stream = Stream(sum(chunks), heads, repeats)
    follow(QuantizedStreamingCache(config, packed_attention=packed), stream, chunks)


@given(policies, splits, st.integers(1, 2), st.sampled_from([1, 3]), seeds)
def test_quantised_equals_the_masked_reference_on_its_storage_for_any_split(
    config: KVCacheConfig, chunks: list[int], heads: int, repeats: int, seed: int | None
) -> None:
    stream = Stream(sum(chunks), heads, repeats)
    for packed in (True, False):
        follow(new_cache(config, stream, packed, seed), stream, chunks)


@given(policies, st.integers(1, 250), st.lists(st.integers(1, 9), min_size=1, max_size=8), seeds)
def test_packed_and_plain_attention_give_the_same(
    config: KVCacheConfig, prompt: int, chunks: list[int], seed: int | None
) -> None:
    """After each call of decoding, token by token: chunks of the plain path see more precision."""
    stream = Stream(prompt + sum(chunks), 2, 2)
    cache = new_cache(config, stream, seed=seed)
    run(cache, stream, [prompt])
    for begin in range(prompt, stream.length):
        packed = step(cache, stream, begin, begin + 1)
        q, (keys, values) = stream.cut(begin, begin + 1)[0], cache.arrays()
        plain = mx.fast.scaled_dot_product_attention(q, keys, values, scale=32**-0.5)
        np.testing.assert_allclose(dense(packed), dense(plain), rtol=0, atol=1e-5)


@given(policies, st.integers(1, 250), st.lists(st.integers(2, 32), min_size=1, max_size=5), seeds)
def test_short_calls_on_packed_data_see_what_single_steps_see(
    config: KVCacheConfig, prompt: int, drafts: list[int], seed: int | None
) -> None:
    stream = Stream(prompt + sum(drafts), 1, 2)
    caches = [new_cache(config, stream, seed=seed) for _ in range(2)]
    short = run(caches[0], stream, [prompt, *drafts])
    single = run(caches[1], stream, [prompt] + [1] * sum(drafts))
    a, b = (mx.concatenate(x[1:], axis=2) for x in (short, single))
    np.testing.assert_allclose(dense(a), dense(b), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("k_bits", "v_bits", "seed"),
    [(4, 4, None), (2, None, 0), (None, 3, None), (8, 5, None), (3, 2, 0)],
)
@pytest.mark.parametrize(
    ("k_dim", "v_dim"), [(40, 112), (64, 32), (80, 80), (96, 64), (100, 120), (192, 128)]
)
@pytest.mark.parametrize("window", [None, 90])
def test_head_sizes_of_keys_and_values_are_free(
    k_dim: int,
    v_dim: int,
    k_bits: int | None,
    v_bits: int | None,
    seed: int | None,
    window: int | None,
) -> None:
    stream = Stream(150, 2, 2, k_dim, v_dim)
    for packed in (True, False):
        config = KVCacheConfig(k_bits=k_bits, v_bits=v_bits, group_size=32, window=window)
        cache = new_cache(config, stream, packed, seed)
        follow(cache, stream, [110, 1, 30, 1, 8])


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["none", "int8"])
def test_a_batch_is_so_many_caches(packed: bool, name: str) -> None:
    stream = Stream(170, 2, 2, batch=3, seed=1)
    follow(cache_of(name, packed, window=60), stream, [90, 1, 70, 1, 8])


def test_keys_without_values_are_stored() -> None:
    """An indexer passes values of head size 0."""
    cache = cache_of(packed=False)
    k = mx.random.normal((1, 1, 120, 32), key=mx.random.key(0))
    for lo, hi in ((0, 100), (100, 101), (101, 120)):
        keys, values = cache.update_and_fetch(k[:, :, lo:hi], mx.zeros((1, 1, hi - lo, 0)))
        assert keys.shape == (1, 1, hi, 32) and values.shape == (1, 1, hi, 0)
    assert 0 < mx.abs(keys - k).max() < 0.5


# The stock caches


@given(splits, st.integers(0, 99))
def test_full_precision_without_a_window_is_the_stock_cache_exactly(
    chunks: list[int], seed: int
) -> None:
    stream = Stream(sum(chunks), 2, 2, seed=seed)
    ours, theirs = cache_of("none"), KVCache()
    begin = 0
    for length in chunks:
        a, b = (step(c, stream, begin, begin + length) for c in (ours, theirs))
        assert mx.array_equal(a, b)
        begin += length
        for x, y in zip(ours.keys_and_values(), (theirs.keys, theirs.values), strict=True):
            assert isinstance(x, mx.array) and mx.array_equal(x, y[:, :, :begin])
    assert (ours.offset, ours.size()) == (theirs.offset, theirs.size())


@pytest.mark.parametrize(("sink", "window"), [(4, 60), (0, 20), (1, 1), (7, 128)])
def test_single_steps_with_a_window_are_the_stock_rotating_cache(sink: int, window: int) -> None:
    stream = Stream(300, 2, 2)
    ours = cache_of("none", sink=sink, window=window)
    theirs = RotatingKVCache(max_size=sink + window, keep=sink)
    for a, b in zip(*(run(c, stream, [1] * 300) for c in (ours, theirs)), strict=True):
        np.testing.assert_allclose(dense(a), dense(b), rtol=0, atol=1e-6)
    assert ours.size() == theirs.size() == sink + window


# Size and bytes


@given(policies, splits)
def test_sizes_follow_the_tokens(config: KVCacheConfig, chunks: list[int]) -> None:
    cache = QuantizedStreamingCache(config)
    assert cache and cache.empty() and (cache.offset, cache.size(), cache.nbytes) == (0, 0, 0)
    stream, seen = Stream(sum(chunks)), 0
    for length in chunks:
        _, k, v = stream.cut(seen, seen + length)
        cache.update_and_fetch(k, v)
        seen += length
        assert cache and not cache.empty() and cache.offset == seen
        limit = seen if config.window is None else config.sink + config.window
        assert cache.size() == min(seen, limit)
        assert cache.nbytes == sum(a.nbytes for a in arrays_in(cache))
        if not config.quantized:
            assert cache.packed_tokens == 0


def test_an_empty_cache_has_nothing_to_fetch() -> None:
    with pytest.raises(ValueError, match="empty"):
        cache_of().keys_and_values()


@pytest.mark.parametrize("name", ["none", "fp16", "int8", "int4", "int2"])
def test_nbytes_is_what_the_process_holds(name: str) -> None:
    """No array of full precision lives on behind the packed ones."""
    stream, chunks = Stream(2100, 2, 1, 64, 64), [500, 1, 1000, 1, 500] + [1] * 98
    mx.eval(stream.q, stream.k, stream.v)
    for _ in range(2):
        run(cache_of(name), stream, chunks)  # masks are remembered: here they come to be so
    gc.collect()
    before = mx.get_active_memory()
    cache = cache_of(name)
    run(cache, stream, chunks)
    gc.collect()
    held = mx.get_active_memory() - before
    # Masks and tables that are remembered come and go; full precision would be 2 MB.
    assert abs(held - cache.nbytes) <= 0.02 * cache.nbytes + 100_000


@pytest.mark.parametrize("name", ["none", "int8", "int4", "int2"])
@pytest.mark.parametrize(("sink", "window"), [(4, 252), (0, 64), (4, 8)])
def test_a_stream_with_a_window_keeps_its_buffers(name: str, sink: int, window: int) -> None:
    stream = Stream(900)
    cache = cache_of(name, sink=sink, window=window)
    sizes = set()
    for i in range(900):
        step(cache, stream, i, i + 1)
        if i >= sink + window + TRIM_MARGIN + cache.config.group_size:
            shapes = [a.shape for a in arrays_in(cache)]
            sizes.add((cache.nbytes, str(sorted(shapes))))
    assert len(sizes) == 1


def test_a_wide_window_costs_nothing_before_it_fills() -> None:
    stream = Stream(900)
    bounded, growing = cache_of("int4", sink=4, window=100_000), cache_of("int4", sink=4)
    for cache in (bounded, growing):
        run(cache, stream, [500] + [1] * 400)
    assert bounded.nbytes == growing.nbytes


@pytest.mark.parametrize(("name", "share"), [("int8", 0.55), ("int4", 0.30)])
def test_bytes_at_8192_tokens_against_float16(name: str, share: float) -> None:
    cache = QuantizedStreamingCache(KVCacheConfig.from_name(name))
    stream = Stream(8192, 2, 1, 64, 64, dtype=mx.float16)
    for lo in range(0, 8191, 1024):
        _, k, v = stream.cut(lo, min(lo + 1024, 8191))
        cache.update_and_fetch(k, v)
    cache.update_and_fetch(*stream.cut(8191, 8192)[1:])
    total = sum(a.nbytes for a in arrays_in(cache))
    assert total == cache.nbytes <= share * (stream.k.nbytes + stream.v.nbytes)
    assert cache.packed_tokens > 8000


# Copies and state


SITUATIONS = [
    [20],  # a chunk not yet placed, nothing packed
    [20, 1],
    [150, 1],  # packed
    [150, 1, 33],  # packed, and a chunk beside it
    [70, 100, 1, 40, 1, 130, 1],  # past the window
    [1] * 70,
]


@pytest.mark.parametrize("situation", range(len(SITUATIONS)))
@pytest.mark.parametrize("window", [None, 120])
@pytest.mark.parametrize(
    "fields",
    [
        {"name": "none"},
        {"name": "int4"},
        {"name": "int2", "v_bits": None},
        {"name": "int3", "k_bits": None},
        {"name": "int8", "dtype": "float16"},
        {"name": "int8", "sink": 0, "residual_length": 0},
    ],
    ids=str,
)
def test_a_cache_from_a_state_goes_on_bit_by_bit(
    fields: dict[str, Any], window: int | None, situation: int
) -> None:
    chunks, more = SITUATIONS[situation], [1] * 35 + [9, 1, 50, 1]
    seen = sum(chunks)
    stream = Stream(seen + sum(more), 1, 2)
    straight, saved = (cache_of(**fields, window=window) for _ in range(2))
    for one in (straight, saved):
        run(one, stream, chunks)
    again = type(saved).from_state(saved.state)
    assert (again.offset, again.config, again.packed_attention) == (seen, saved.config, True)
    assert again.nbytes <= saved.nbytes
    expected = run(straight, stream, more, seen)
    for a, b in zip(run(again, stream, more, seen), expected, strict=True):
        assert mx.array_equal(a, b)


@pytest.mark.parametrize("name", ["none", "int4"])
def test_a_state_is_a_list_of_arrays_that_later_tokens_do_not_change(name: str) -> None:
    stream = Stream(300, 1, 2)
    cache = cache_of(name, window=120)
    run(cache, stream, [150, 1])
    state = cache.state
    assert all(isinstance(a, mx.array) for a in state)
    first = type(cache).from_state(state)
    second = type(cache).from_state(list(state), "")  # mlx_lm up to 0.31 passes two
    expected = run(cache, stream, [1] * 100, 151)
    for one in (first, second):
        for a, b in zip(run(one, stream, [1] * 100, 151), expected, strict=True):
            assert mx.array_equal(a, b)


@pytest.mark.parametrize("model", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("storage", [None, "float32"])
def test_a_state_keeps_the_types(model: mx.Dtype, storage: str | None) -> None:
    stream = Stream(220, 1, 2, dtype=model)
    cache = cache_of(dtype=storage)
    run(cache, stream, [150, 1, 33])
    again = type(cache).from_state(cache.state)
    expected, outputs = (run(c, stream, [1] * 36, 184) for c in (cache, again))
    assert outputs[0].dtype == model
    for a, b in zip(outputs, expected, strict=True):
        assert mx.array_equal(a, b)


def test_the_state_of_an_empty_cache_is_an_empty_cache() -> None:
    cache = cache_of(window=50)
    again = type(cache).from_state(cache.state)
    assert again.empty() and again.offset == 0 and again.config == cache.config
    follow(again, Stream(100), [80, 1, 19])


@pytest.mark.parametrize("chunks", SITUATIONS[:5], ids=str)
@pytest.mark.parametrize("fields", [{"name": "none"}, {"name": "int4"}], ids=str)
def test_a_deep_copy_is_independent(fields: dict[str, Any], chunks: list[int]) -> None:
    seen, more = sum(chunks), [1] * 40 + [33, 1]
    first, second = Stream(seen + 74), Stream(seen + 74, seed=1)
    for which in ("q", "k", "v"):
        head = getattr(first, which)[:, :, :seen]
        setattr(second, which, mx.concatenate(
            [head, getattr(second, which)[:, :, seen:]], axis=2
        ))  # fmt: skip
    expected = []
    for stream in (first, second):
        cache = cache_of(**fields, window=110)
        run(cache, stream, chunks)
        expected.append(run(cache, stream, more, seen))
    cache = cache_of(**fields, window=110)
    run(cache, first, chunks)
    twin = copy.deepcopy(cache)
    assert twin.nbytes == cache.nbytes and twin.config == cache.config
    outputs = [[], []]
    at = seen
    for length in more:  # in turns, so that a shared buffer would show
        outputs[0] += run(cache, first, [length], at)
        outputs[1] += run(twin, second, [length], at)
        at += length
    for ours, right in zip(outputs, expected, strict=True):
        for a, b in zip(ours, right, strict=True):
            assert mx.array_equal(a, b)


# Refusals


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ((2, 2, 1, 32), (2, 2, 1, 48)),
        ((1, 3, 1, 32), (1, 3, 1, 48)),
        ((1, 2, 1, 64), (1, 2, 1, 48)),
        ((1, 2, 1, 32), (1, 2, 1, 32)),
        ((1, 2, 1, 32), (1, 1, 1, 48)),
        ((1, 2, 3, 32), (1, 2, 2, 48)),
        ((1, 2, 1, 32), (1, 2, 3, 48)),
        ((2, 1, 32), (2, 1, 48)),
    ],
)
def test_arrays_that_do_not_fit_are_refused_and_change_nothing(
    keys: tuple[int, ...], values: tuple[int, ...]
) -> None:
    stream = Stream(120, 2, 1, 32, 48)
    cache, twin = cache_of(), cache_of()
    for one in (cache, twin):
        run(one, stream, [100, 1, 5])
    before = stored(cache)
    with pytest.raises(ValueError) as caught:
        cache.update_and_fetch(mx.zeros(keys), mx.zeros(values))
    assert "\n" not in str(caught.value) and "shape" in str(caught.value)
    assert (cache.offset, cache.nbytes) == (106, twin.nbytes)
    for (_, *old), (_, *new) in zip(before, stored(cache), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(old, new, strict=True))
    for a, b in zip(*(run(c, stream, [1] * 14, 106) for c in (cache, twin)), strict=True):
        assert mx.array_equal(a, b)


@pytest.mark.parametrize("values", [(1, 2, 4, 32), (2, 2, 5, 32)])
def test_the_first_keys_and_values_must_match(values: tuple[int, ...]) -> None:
    cache = cache_of()
    with pytest.raises(ValueError, match="shape"):
        cache.update_and_fetch(mx.zeros((1, 2, 5, 32)), mx.zeros(values))
    assert cache.empty() and cache.offset == 0
