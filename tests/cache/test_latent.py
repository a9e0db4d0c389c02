"""Packed latents as keys and values of one token, against attention on arrays of the same."""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import scaled_dot_product_attention
from reference import attention, dense

from mlx_kivi import KVCacheConfig
from mlx_kivi.cache.latent import MAX_PACKED_ROWS, LatentHandle
from mlx_kivi.models.latent_caches import LatentCache

pytestmark = pytest.mark.usefixtures("attention_hooked")

RANK, ROPE = 64, 32
SMALL = {"group_size": 32, "residual_length": 16, "balanced": False}  # as the factory asks
POLICIES = {
    "int8": KVCacheConfig(k_bits=8, v_bits=8, **SMALL),
    "int4": KVCacheConfig(k_bits=4, v_bits=4, **SMALL),
    "int2, no sinks": KVCacheConfig(k_bits=2, v_bits=2, sink=0, **SMALL),
    "int4, window": KVCacheConfig(k_bits=4, v_bits=4, window=150, **SMALL),
    "latents alone": KVCacheConfig(k_bits=4, **SMALL),
    "positional part alone": KVCacheConfig(v_bits=4, **SMALL),
    "float16": KVCacheConfig(k_bits=4, v_bits=4, dtype="float16", **SMALL),
}


def normal(seed: int, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def tokens(n: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    """Latents, off zero as a norm with a bias would have them, and positional parts of keys."""
    latents = 3 + normal(seed, 1, 1, n, RANK, dtype=dtype)
    return latents.astype(dtype), normal(seed + 1, 1, 1, n, ROPE, dtype=dtype)


def step(
    cache: LatentCache, heads: int, seed: int, dtype: mx.Dtype = mx.float32
) -> tuple[mx.array, np.ndarray, type]:
    """One token as these models attend to it: its output, what it should be, and what was read."""
    scale = 0.1
    q, q_pe = (normal(seed + i, 1, heads, 1, d, dtype=dtype) for i, d in ((2, RANK), (3, ROPE)))
    latents, k_pe = cache.update_and_fetch(*tokens(1, seed, dtype))
    pe = (q_pe * scale) @ k_pe.swapaxes(-1, -2)
    out = scaled_dot_product_attention(q, latents, latents, cache, scale, pe)
    assert out.shape == (1, heads, 1, RANK) and out.dtype == dtype
    stored, positional = (dense(x) for x in cache.arrays())
    mask = dense(q_pe) * scale @ positional.swapaxes(-1, -2)
    rescaled = dense(q) * scale * RANK**0.5  # the reference has a scale of its own
    return out, attention(rescaled, stored, stored, mask), type(latents)


@pytest.mark.parametrize("heads", [1, MAX_PACKED_ROWS, MAX_PACKED_ROWS + 1, 16])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_step_is_attention_on_what_is_stored(policy: KVCacheConfig, heads: int) -> None:
    """By either product, at each place in a group, with evicted and trimmed slots."""
    cache = LatentCache(policy)
    cache.update_and_fetch(*tokens(210))
    kinds = set()
    near = 2e-5 if policy.dtype is None else 1e-3  # arrays are rounded to the type, products not
    for seed in range(10, 50):
        out, want, kind = step(cache, heads, seed)
        kinds.add(kind)
        np.testing.assert_allclose(dense(out), want, rtol=0, atol=near)
        if seed % 10 == 0:
            cache.update_and_fetch(*tokens(5, seed))
            assert cache.trim(5 + seed // 10) == 5 + seed // 10
    assert kinds == {LatentHandle}


@pytest.mark.parametrize("heads", [2, 16])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_half_precision_gets_its_type_back(dtype: mx.Dtype, heads: int) -> None:
    cache = LatentCache(POLICIES["int4"])
    cache.update_and_fetch(*tokens(150, dtype=dtype))
    for seed in range(20, 25):
        out, want, kind = step(cache, heads, seed, dtype)
        assert kind is LatentHandle
        np.testing.assert_allclose(dense(out), want, rtol=0, atol=0.03)


def test_what_is_handed_out_has_one_slot_for_each_score() -> None:
    cache = LatentCache(POLICIES["int4, window"])
    cache.update_and_fetch(*tokens(300))
    latents, k_pe = cache.update_and_fetch(*tokens(1))
    assert isinstance(latents, LatentHandle) and isinstance(k_pe, mx.array)
    assert latents.shape == (1, 1, k_pe.shape[2], RANK) and latents.dtype == mx.float32
    assert k_pe.shape[2] >= cache.size()


@pytest.mark.parametrize("length", [2, 8, 40])
def test_calls_of_several_tokens_get_arrays(length: int) -> None:
    cache = LatentCache(POLICIES["int4"])
    cache.update_and_fetch(*tokens(150))
    pair = cache.update_and_fetch(*tokens(length))
    assert all(isinstance(x, mx.array) and x.shape[2] == 150 + length for x in pair)
    for got, want in zip(pair, cache.arrays(), strict=True):
        assert mx.array_equal(got, want)


def test_before_anything_is_packed_a_step_gets_arrays() -> None:
    cache = LatentCache(POLICIES["int4"])
    cache.update_and_fetch(*tokens(40))
    pair = cache.update_and_fetch(*tokens(1))
    assert all(isinstance(x, mx.array) and x.shape[2] == 41 for x in pair)


def test_beyond_an_indexers_limit_a_step_gets_arrays() -> None:
    cache = LatentCache(POLICIES["int4"])
    cache.limit = 152
    cache.update_and_fetch(*tokens(150))
    kinds = [type(cache.update_and_fetch(*tokens(1))[0]) for _ in range(4)]
    assert kinds == [LatentHandle, LatentHandle, mx.array, mx.array]


@pytest.mark.parametrize("limit", [None, 300])
def test_a_state_and_a_copy_keep_the_limit(limit: int | None) -> None:
    cache = LatentCache(POLICIES["int8"])
    cache.limit = limit
    cache.update_and_fetch(*tokens(200))
    loaded, twin = LatentCache.from_state(cache.state), copy.deepcopy(cache)
    outs = [dense(step(c, 4, 7)[0]) for c in (cache, loaded, twin)]
    assert loaded.limit == twin.limit == limit
    np.testing.assert_array_equal(outs[1], outs[0])
    np.testing.assert_array_equal(outs[2], outs[0])


@pytest.mark.parametrize("last", [mx.array([-1]), mx.array([1.5]), mx.array([[3]])], ids=str)
def test_a_broken_limit_is_refused(last: mx.array) -> None:
    cache = LatentCache(POLICIES["int8"])
    cache.update_and_fetch(*tokens(20))
    with pytest.raises(ValueError, match="limit of the indexer"):
        LatentCache.from_state([*cache.state[:-1], last])


def test_without_the_hook_a_step_gets_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = LatentCache(POLICIES["int4"])
    cache.update_and_fetch(*tokens(150))
    monkeypatch.setattr("mlx_kivi.hooks.attention_hooked", lambda: False)
    assert all(isinstance(x, mx.array) for x in cache.update_and_fetch(*tokens(1)))


def test_what_was_trimmed_is_in_no_product() -> None:
    cache = LatentCache(POLICIES["int8"])
    cache.update_and_fetch(*tokens(200))
    bad = [mx.full(x.shape, mx.nan) for x in tokens(1)]
    for _ in range(3):
        cache.update_and_fetch(*bad)
    assert cache.trim(3) == 3
    out, want, _ = step(cache, 4, 9)
    assert np.isfinite(dense(out)).all()
    np.testing.assert_allclose(dense(out), want, rtol=0, atol=2e-5)
