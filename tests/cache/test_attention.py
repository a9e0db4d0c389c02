"""Attention on packed data: what a model gets and passes on, masks, learned sinks."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, QuantizedKVCache
from reference import (
    Stream,
    allowed,
    as_rule,
    attention,
    dense,
    follow,
    hooked,
    policies,
    run,
    shown,
    splits,
    step,
    stored,
)

from mlx_kivi import KVCacheConfig, QuantizedStreamingCache
from mlx_kivi.cache.attention import CPU_BLOCK, MAX_PACKED_QUERIES, CacheHandle, attend_causal

TYPES = (mx.float32, mx.float16, mx.bfloat16)


@pytest.fixture(autouse=True)
def _hooked(request: pytest.FixtureRequest) -> Iterator[None]:
    if "unhooked" in request.node.name:
        yield
    else:
        with hooked():
            yield


def new_cache(name: str, packed: bool = True, **fields: Any) -> QuantizedStreamingCache:
    config = KVCacheConfig.from_name(name, **{"group_size": 32, **fields})
    return QuantizedStreamingCache(config, packed_attention=packed)


def filled(
    stream: Stream, chunks: list[int], packed: bool = True, **fields: Any
) -> QuantizedStreamingCache:
    cache = new_cache("int4", packed, **{"residual_length": 8, **fields})
    run(cache, stream, chunks)
    return cache


# What a model gets


def kind(cache: QuantizedStreamingCache, stream: Stream, rows: int) -> type:
    """The type of what a call returns, whose shape and type are those of dense arrays."""
    begin, end = cache.offset, cache.offset + rows
    length = len(shown(begin, rows, cache.config.sink, cache.config.window))
    _, k, v = stream.cut(begin, end)
    keys, values = cache.update_and_fetch(k, v)
    assert type(keys) is type(values)
    for got, like in ((keys, k), (values, v)):
        assert got.shape == (stream.batch, stream.heads, length, like.shape[3])
        assert got.ndim == 4 and got.dtype == like.dtype
    return type(keys)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("window", [None, 90])
def test_few_queries_get_packed_data_where_a_model_takes_it(
    window: int | None, dtype: mx.Dtype
) -> None:
    stream = Stream(230, 2, 2, 32, 64, batch=2, dtype=dtype)
    cache = filled(stream, [120], window=window)
    assert kind(cache, stream, 1) is CacheHandle
    assert kind(cache, stream, MAX_PACKED_QUERIES) is CacheHandle
    assert kind(cache, stream, 32) is CacheHandle  # a group is packed in the middle
    assert kind(cache, stream, 40) is mx.array
    assert kind(filled(stream, [120], False, window=window), stream, 1) is mx.array


def test_what_is_not_packed_is_handed_out_as_arrays() -> None:
    stream = Stream(80)
    cache = filled(stream, [20])
    for _ in range(10):
        assert kind(cache, stream, 1) is mx.array
    cache = filled(stream, [20], k_bits=None, v_bits=None)
    assert kind(cache, stream, 59) is mx.array and kind(cache, stream, 1) is mx.array


def test_unhooked_attention_gets_arrays() -> None:
    stream = Stream(150, 1, 2)
    cache = filled(stream, [120, 1])
    assert kind(cache, stream, 1) is mx.array
    unhooked = step(cache, stream, 122, 123)
    with hooked():
        again = filled(stream, [120, 1, 1])
        packed = step(again, stream, 122, 123)
        assert isinstance(again.keys_and_values()[0], CacheHandle)
    np.testing.assert_allclose(dense(unhooked), dense(packed), rtol=0, atol=1e-5)


def test_caches_of_mlx_lm_keep_its_attention() -> None:
    stream = Stream(40, 2, 2)
    # The last scales the queries that it gets in place.
    caches = [KVCache(), None, QuantizedKVCache(group_size=32, bits=8)]
    q, k, v = stream.cut(0, 40)
    expected = attention(dense(q), dense(k), dense(v), np.tri(40, dtype=bool))
    for cache in caches:
        keys, values = (k, v) if cache is None else cache.update_and_fetch(k, v)
        out = scaled_dot_product_attention(q, keys, values, cache, 32**-0.5, "causal")
        atol = 0.05 if isinstance(cache, QuantizedKVCache) else 3e-6
        np.testing.assert_allclose(dense(out), expected, rtol=0, atol=atol)


# Masks that a cache makes


@given(
    policies,
    splits,
    st.just(1) | st.integers(1, 40),
    st.none() | st.integers(1, 60) | st.integers(60, 400),
    st.booleans(),
    st.booleans(),
)
def test_a_mask_is_the_rule_over_what_is_returned(
    config: KVCacheConfig,
    chunks: list[int],
    rows: int,
    model_window: int | None,
    return_array: bool,
    packed: bool,
) -> None:
    seen = sum(chunks)
    stream = Stream(seen + rows)
    cache = QuantizedStreamingCache(config, packed_attention=packed)
    run(cache, stream, chunks)
    mask = cache.make_mask(rows, window_size=model_window, return_array=return_array)
    keys, _ = cache.update_and_fetch(*stream.cut(seen, seen + rows)[1:])
    queries = np.arange(seen, seen + rows)
    positions = shown(seen, rows, config.sink, config.window)
    expected = allowed(queries, positions, config.sink, config.window)
    if model_window is not None:
        expected &= positions[None] > queries[:, None] - model_window
    rule = as_rule(mask, rows, keys.shape[2])
    np.testing.assert_array_equal(np.broadcast_to(rule, expected.shape), expected)
    if return_array and rows > 1:
        assert isinstance(mask, mx.array) and mask.dtype == mx.bool_
    if not return_array and expected.all():
        assert mask is None  # the fast path of attention


@pytest.mark.parametrize("offset", [0, 30])
def test_a_prompt_that_nothing_narrows_is_causal_by_name(offset: int) -> None:
    cache = filled(Stream(30), [offset] if offset else [])
    assert cache.make_mask(8) == "causal" and cache.make_mask(1) is None


# Masks that a model makes, and learned sinks


def shape_of(form: str, stream: Stream, rows: int, length: int) -> tuple[int, ...]:
    heads = stream.heads * stream.repeats
    return {
        "rows": (rows, length),
        "batch": (stream.batch, 1, rows, length),
        "heads": (1, heads, rows, length),
        "all": (stream.batch, heads, rows, length),
        "columns": (1, 1, 1, length),
    }[form]


@pytest.mark.parametrize("form", ["rows", "batch", "heads", "all", "columns"])
@pytest.mark.parametrize("boolean", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 31])
@pytest.mark.parametrize(("name", "window"), [("int4", None), ("int4", 75), ("none", 60)])
@pytest.mark.parametrize("packed", [True, False])
def test_a_mask_of_the_model_counts_besides_the_rule(
    form: str, boolean: bool, rows: int, name: str, window: int | None, packed: bool
) -> None:
    stream = Stream(172, 2, 2, batch=2)
    config = KVCacheConfig.from_name(name, group_size=32, residual_length=8, window=window)
    cache = QuantizedStreamingCache(config, packed_attention=packed)
    run(cache, stream, [100, 1, 30, 1])
    begin, end = 132, 132 + rows
    q, k, v = stream.cut(begin, end)
    positions = shown(begin, rows, config.sink, config.window)
    rule = allowed(np.arange(begin, end), positions, config.sink, config.window)
    rng = np.random.default_rng(rows)
    own = rng.random(shape_of(form, stream, rows, len(positions)))
    own = own > 0.5 if boolean else own * 4
    if boolean:
        own[..., :1] = True  # a row without any key has no softmax
    keys, values = cache.update_and_fetch(k, v)
    mask = own
    if not isinstance(keys, CacheHandle):  # arrays leave the rule to the model
        mask = own & rule if boolean else own + np.where(rule, 0, -np.inf)
    mask = mx.array(mask if boolean else mask.astype(np.float32))
    out = scaled_dot_product_attention(q, keys, values, cache, 32**-0.5, mask)

    bias = np.where(own, 0, -np.inf) if boolean else own
    row = 0
    for queries, held_keys, held_values in stored(cache, rows):
        part = slice(row, row + queries)
        of_rows = bias[..., part, :] if bias.shape[-2] > 1 else bias
        total = of_rows + np.where(rule[part], 0, -np.inf)
        expected = attention(dense(q[:, :, part]), held_keys, held_values, total)
        np.testing.assert_allclose(dense(out[:, :, part]), expected, rtol=0, atol=1e-5)
        row += queries
    assert row == rows


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [1, 5, 31])
@pytest.mark.parametrize(("name", "window"), [("int4", None), ("int8", 75), ("none", 60)])
@pytest.mark.parametrize("packed", [True, False])
def test_learned_sinks_join_the_denominator(
    dtype: mx.Dtype, rows: int, name: str, window: int | None, packed: bool
) -> None:
    stream = Stream(172, 2, 2, batch=3, dtype=dtype)
    config = KVCacheConfig.from_name(name, group_size=32, residual_length=8, window=window)
    cache = QuantizedStreamingCache(config, packed_attention=packed)
    run(cache, stream, [100, 1, 30, 1])
    learned = mx.array([2.0, -1.0, 5.0, 0.0]).astype(dtype)
    out = step(cache, stream, 132, 132 + rows, sinks=learned)
    assert out.dtype == dtype and out.shape == (3, 4, rows, 32)
    atol = {mx.float32: 1e-5, mx.float16: 5e-3, mx.bfloat16: 4e-2}[dtype]
    row, positions = 0, shown(132, rows, config.sink, config.window)
    for queries, keys, values in stored(cache, rows):
        begin, end = 132 + row, 132 + row + queries
        rule = allowed(np.arange(begin, end), positions, config.sink, config.window)
        q = dense(stream.q[:, :, begin:end])
        expected = attention(q, keys, values, rule, dense(learned))
        got = dense(out[:, :, row : row + queries])
        np.testing.assert_allclose(got, expected, rtol=0, atol=atol)
        row += queries


def test_queries_of_large_scores_do_not_overflow() -> None:
    """Scores beyond what float16 holds: a softmax of one token, not of NaN."""
    stream = Stream(121, 1, 2, 64, 64, dtype=mx.float16)
    stream.k = stream.k * 100
    stream.q = stream.q * 100
    cache = filled(stream, [120])
    out = step(cache, stream, 120, 121)
    _, keys, values = stored(cache)[0]
    assert isinstance(cache.keys_and_values()[0], CacheHandle)
    expected = attention(dense(stream.q[:, :, 120:]), keys, values, np.ones((1, 121), bool))
    np.testing.assert_allclose(dense(out), expected, rtol=0, atol=0.02)


# Types


@pytest.mark.parametrize("storage", ["float16", "bfloat16", "float32", None])
@pytest.mark.parametrize("model", TYPES)
@pytest.mark.parametrize("name", ["none", "int8", "int3"])
def test_storage_of_any_type_returns_the_types_of_the_model(
    name: str, model: mx.Dtype, storage: str | None
) -> None:
    stream = Stream(150, 1, 2, dtype=model)
    for packed in (True, False):
        cache = new_cache(name, packed, dtype=storage, window=120)
        follow(cache, stream, [100, 1, 40, 1, 8])
        keys, values = cache.keys_and_values()
        assert keys.dtype == values.dtype == model
        kept = {a.dtype for a in (cache.keys, cache.values)}
        assert kept == {getattr(mx, storage) if storage else model}


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_is_finite_and_near_float32_with_large_keys(dtype: mx.Dtype) -> None:
    """Scores of some hundreds, one channel biased by 900."""
    exact = Stream(140, 1, 2, 64, 64)
    exact.k = exact.k * 3
    exact.k[..., 5] += 900
    exact.q[..., 5] *= 0.01
    half = Stream(140, 1, 2, 64, 64, dtype=dtype)
    half.q, half.k, half.v = (x.astype(dtype) for x in (exact.q, exact.k, exact.v))
    rounded = Stream(140, 1, 2, 64, 64)
    rounded.q, rounded.k, rounded.v = (x.astype(mx.float32) for x in (half.q, half.k, half.v))
    full = run(new_cache("none"), rounded, [120] + [1] * 20)
    ours = run(new_cache("int8", residual_length=8), half, [120] + [1] * 20)
    assert ours[-1].dtype == dtype
    for a, b in zip(ours[1:], full[1:], strict=True):
        assert mx.isfinite(a).all()
        np.testing.assert_allclose(dense(a), dense(b), rtol=0, atol=0.1)


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 20, 60])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_row_that_a_mask_hides_everything_of_is_finite(
    sinks: bool, window: int | None, rows: int, additive: bool
) -> None:
    """As from mlx's fused kernel; the other rows are as without it."""
    stream = Stream(200, heads=2, repeats=2)
    cache = filled(stream, [140], window=window)
    q, k, v = stream.cut(140, 140 + rows)
    keys, values = cache.update_and_fetch(k, v)
    mask = mx.array(np.ones((1, 1, rows, keys.shape[2]), bool))
    mask[:, :, :1] = False
    if additive:
        mask = mx.where(mask, 0.0, -mx.inf)
    learned = mx.zeros((4,)) if sinks else None
    got, want = (
        dense(scaled_dot_product_attention(q, keys, values, cache, 0.2, m, learned))
        for m in (mask, None)
    )
    if rows > 1 and cache.packed_tokens:
        assert isinstance(keys, CacheHandle) or rows > 32
    if isinstance(keys, CacheHandle) or not additive:
        assert np.isfinite(got).all()
    if isinstance(keys, CacheHandle):
        np.testing.assert_allclose(got[:, :, 1:], want[:, :, 1:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("boolean", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
def test_an_unpacked_window_of_which_a_mask_hides_everything_is_finite(
    dtype: mx.Dtype, boolean: bool
) -> None:
    stream = Stream(80, 2, 2, dtype=dtype)
    cache = filled(stream, [70], window=40, k_bits=None, v_bits=None)
    q, k, v = stream.cut(70, 71)
    keys, values = cache.update_and_fetch(k, v)
    assert isinstance(keys, CacheHandle)
    mask = mx.zeros((1, 1, 1, keys.shape[2]), mx.bool_)
    mask = mask if boolean else mx.where(mask, 0.0, -mx.inf)
    out = scaled_dot_product_attention(q, keys, values, cache, 0.2, mask)
    assert np.isfinite(dense(out)).all()


# Causal attention on arrays, in blocks of rows


@pytest.mark.parametrize("sinks", [None, [2.0, -1.0, 5.0, 0.0]])
@given(
    rows=st.integers(2, 40) | st.sampled_from([CPU_BLOCK, CPU_BLOCK + 1, 3 * CPU_BLOCK + 7]),
    before=st.integers(0, 150),
)
def test_causal_blocks_are_the_plain_product(
    sinks: list[float] | None, rows: int, before: int
) -> None:
    q, k, v = Stream(before + rows, 2, 2, 32, 64, batch=2).cut(0, before + rows)
    learned = None if sinks is None else mx.array(sinks)
    out = attend_causal(q[:, :, before:], k, v, 32**-0.5, learned)
    rule = as_rule("causal", rows, before + rows)
    expected = attention(*map(dense, (q[:, :, before:], k, v)), rule, sinks and np.array(sinks))
    np.testing.assert_allclose(dense(out), expected, rtol=0, atol=1e-5)
