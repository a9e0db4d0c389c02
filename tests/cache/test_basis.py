"""Bases that keys and values are packed in: scores stay, rounding costs less, nothing overflows."""

from __future__ import annotations

import copy
import gc

import mlx.core as mx
import numpy as np
import pytest
from reference import Stream, dense, new_cache, run, step
from storage import basis_of, half_step, mixing, random_balance, ranked_mixing

from mlx_kivi import KVCacheConfig, QuantizedStreamingCache
from mlx_kivi.cache.basis import (
    PLAIN,
    Balance,
    KeyBasis,
    hadamard_matrix,
    key_basis,
    known_balance,
)
from mlx_kivi.cache.group_store import ValueStore
from mlx_kivi.cache.key_store import KeyStore
from mlx_kivi.cache.sizes import Heads, stored_bytes
from mlx_kivi.config import value_group
from mlx_kivi.models.calibration import balanced

pytestmark = pytest.mark.usefixtures("attention_hooked")

HEAD_SIZES = (32, 64, 72, 80, 96, 100, 112, 128, 192, 256)
BASES = ("plain", "balanced", "ranked")
HEADS, GROUP = 2, 32


def basis(name: str, dim: int, seed: int = 0) -> KeyBasis:
    if name == "plain":
        return PLAIN
    both = random_balance(HEADS, dim, seed)
    return both.basis(name == "ranked")


def normal(tokens: int, dim: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    """[2, HEADS, tokens, dim]"""
    return mx.random.normal((2, HEADS, tokens, dim), key=mx.random.key(seed)).astype(dtype)


# The matrices


@pytest.mark.parametrize("dim", [*HEAD_SIZES, 16, 40, 48, 120, 160])
def test_hadamards_matrix_is_orthogonal_and_spreads_evenly(dim: int) -> None:
    matrix = hadamard_matrix(dim)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(dim), atol=1e-12)
    sizes = np.unique(np.abs(matrix).round(12))
    assert len(sizes[sizes > 0]) == 1
    block = int(round(sizes[-1] ** -2))  # channels that one of the new ones is made of
    assert dim % block == 0 and block >= dim / 5
    np.testing.assert_allclose(matrix, mixing(dim), atol=1e-6)


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("dim", HEAD_SIZES)
def test_scores_are_what_they_were_in_any_basis(dim: int, name: str) -> None:
    one = basis(name, dim)
    q, k = normal(5, dim), normal(40, dim, seed=1)
    want = dense(q) @ dense(k).swapaxes(-1, -2)
    got = one.queries(q, 1) @ one.keys(k).astype(mx.float32).swapaxes(-1, -2)
    np.testing.assert_allclose(dense(got), want, rtol=0, atol=1e-5 * np.abs(want).max())
    back = one.back(one.keys(k).astype(mx.float32))
    np.testing.assert_allclose(dense(back), dense(k), rtol=0, atol=1e-5)


@pytest.mark.parametrize("bits", [2, 3, 4, 6])
@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("seed", [None, 0])
def test_keys_are_packed_in_the_basis_that_the_policy_means(
    seed: int | None, balanced: bool, bits: int
) -> None:
    config = KVCacheConfig(k_bits=bits, balanced=balanced)
    balance = None if seed is None else random_balance(HEADS, 64, seed)
    matrix, levels = basis_of(config, 0, HEADS, 64, balance)
    ours, k = key_basis(config, balance), normal(8, 64)
    np.testing.assert_allclose(dense(ours.keys(k)), dense(k) @ matrix, rtol=0, atol=1e-5)
    parts = ours.parts(64, bits)
    np.testing.assert_array_equal(np.concatenate([[2**b - 1] * n for n, b in parts]), levels)
    if bits == 3 and balanced and balance is not None:
        assert parts == [(24, 4), (40, 2)]


@pytest.mark.parametrize("bits", [None, 8])
def test_eight_bits_stay_as_they_are(bits: int | None) -> None:
    config = KVCacheConfig(k_bits=bits, v_bits=bits)
    assert key_basis(config, random_balance(HEADS, 64, 0)) is PLAIN
    assert not config.moves_keys and not config.moves_values


# The stores


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("dim", HEAD_SIZES)
def test_products_with_a_store_are_those_with_its_dense_tokens(
    dim: int, name: str, bits: int, dtype: mx.Dtype
) -> None:
    x = normal(96, dim, dtype=dtype)
    q, weights = normal(3, dim, seed=1), normal(3, 96, seed=2)
    keys = KeyStore(bits, GROUP, basis(name, dim))
    values = ValueStore(bits, GROUP, mixed=name != "plain")
    for store in (keys, values):
        store.reserve(3, x)
        store.write(0, x)
        assert store.dense(0, 3).dtype == dtype and store.dense(0, 3).shape == x.shape
    shift = 0 if keys.shift is None else dense(keys.shift)
    # dense() rounds to the type of the data, the products don't: a random walk of roundings.
    ulp = 2e-6 if dtype == mx.float32 else 2**-8 * 4
    scores = dense(q) @ (dense(keys.dense(0, 3)) - shift).swapaxes(-1, -2)
    np.testing.assert_allclose(dense(keys.scores(q)), scores, rtol=0, atol=ulp * dim**0.5 * 4)
    sums = dense(weights) @ dense(values.dense(0, 3))
    np.testing.assert_allclose(dense(values.weighted(weights)), sums, rtol=0, atol=ulp * 40)
    # The keys without their product: as one array, and slot by slot.
    unpacked = keys.unpacked(after=x).scores(keys.basis.queries(q, 1))
    np.testing.assert_allclose(dense(unpacked), scores, rtol=0, atol=ulp * dim**0.5 * 4)
    whole = dense(keys.dense(0, 3))[:, :, 32:64]
    np.testing.assert_allclose(dense(keys.dense(1, 1)), whole, rtol=ulp, atol=ulp)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("name", BASES)
def test_tokens_come_back_within_half_a_stored_step(name: str, bits: int) -> None:
    """In the basis of the store, however far inside the range its levels lie."""
    x, dim = normal(96, 80), 80
    one = basis(name, dim)
    keys, values = KeyStore(bits, GROUP, one), ValueStore(bits, GROUP, mixed=True)
    for store in (keys, values):
        store.reserve(3, x)
        store.write(0, x)
    error = dense(one.keys(keys.dense(0, 3))) - dense(one.keys(x))
    steps = dense(keys.live_arrays()[-2])[:, :, :dim].repeat(GROUP, axis=-1).swapaxes(-1, -2)
    assert (np.abs(error) <= steps / 2 + 1e-5).all()
    error = (dense(values.dense(0, 3)) - dense(x)) @ mixing(dim)
    size, _ = value_group(dim, GROUP, bits)
    steps = dense(values.live_arrays()[1]).repeat(size, axis=-1)[..., :dim]
    assert (np.abs(error) <= steps / 2 + 1e-5).all()


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("dim", HEAD_SIZES)
def test_ranked_channels_have_four_bits_then_two(dim: int, group: int) -> None:
    x = normal(2 * group, dim)
    store = KeyStore(3, group, basis("ranked", dim))
    store.reserve(2, x)
    store.write(0, x)
    first, second, affine, _ = store.live_arrays()
    some, tokens = dim * 3 // 8, 2 * group
    assert first.shape == (2, HEADS, some, tokens * 4 // 32) and first.dtype == mx.uint32
    assert second.shape == (2, HEADS, dim - some, tokens * 2 // 32) and second.dtype == mx.uint32
    assert affine.shape == (2, HEADS, 2 * dim, 2) and affine.dtype == mx.bfloat16
    # The first channels are kept five times as finely, whatever their ranges are.
    config = KVCacheConfig(k_bits=3, group_size=group)
    matrix, levels = basis_of(config, 0, HEADS, dim, random_balance(HEADS, dim, 0))
    kept, was = (dense(y) @ matrix for y in (store.dense(0, 2), x))
    ranges = [np.ptp(was[:, :, lo : lo + group], axis=2) for lo in (0, group)]
    error = np.abs(kept - was)
    for i, lo in enumerate((0, group)):
        worst = error[:, :, lo : lo + group].max(axis=2)
        assert (worst <= 1.05 * ranges[i] / levels / 2 + 1e-5).all()
        assert worst[..., some:].mean() > 0.3 * (ranges[i] / 3 / 2)[..., some:].mean()


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize(("k_bits", "v_bits"), [(3, 2), (4, 4), (2, 3), (6, None)])
@pytest.mark.parametrize(("k_dim", "v_dim"), [(64, 64), (100, 72), (128, 80)])
def test_bytes_are_what_they_are_said_to_be(
    k_dim: int, v_dim: int, k_bits: int, v_bits: int | None, dtype: mx.Dtype
) -> None:
    stream = Stream(270, HEADS, 1, k_dim, v_dim, dtype=dtype)
    config = KVCacheConfig(k_bits=k_bits, v_bits=v_bits, group_size=32)
    heads = Heads(HEADS, k_dim, v_dim, dtype)
    for seed in (None, 0):
        cache = new_cache(config, stream, seed=seed)
        run(cache, stream, [269, 1])
        assert cache.packed_tokens
        assert cache.nbytes == stored_bytes(
            config, cache.plan, cache.step, heads, 270, seed is not None
        )


@pytest.mark.parametrize("dim", [72, 80, 100, 112])
def test_padding_of_mixed_values_widens_no_step(dim: int) -> None:
    """Far from zero, the first mixed channel of a block is the mean of it: padding is another."""
    x = normal(32, dim) + 3
    store = ValueStore(4, GROUP, mixed=True)
    store.reserve(1, x)
    store.write(0, x)
    size, padded = value_group(dim, GROUP, 4)
    assert padded > dim
    mixed = dense(x) @ mixing(dim)
    scales = dense(store.live_arrays()[1])
    for i, lo in enumerate(range(0, dim, size)):
        part = mixed[..., lo : lo + size]
        near = np.ptp(part, axis=-1) + 2**-7 * np.abs(part).max(axis=-1)
        assert (scales[..., i] <= 1.02 * near / 15).all()


# What it is for


def moments(dim: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Second moments of queries and keys of very uneven channels, neither diagonal: [2, D, D]."""
    rng = np.random.RandomState(seed)

    def one() -> np.ndarray:
        turn = np.linalg.qr(rng.randn(2, dim, dim))[0]
        return turn * np.geomspace(30, 1, dim) @ turn.swapaxes(1, 2)

    return one(), one()


def rounding_cost(matrix: np.ndarray, sq: np.ndarray, sk: np.ndarray) -> np.ndarray:
    """Σ var(k'_c) E[q'_c²] for k' = k matrix, q' = q matrix⁻ᵀ: [H]."""
    undo = np.linalg.inv(matrix)
    variance = np.einsum("hdc,hde,hec->hc", matrix, sk, matrix)
    energy = np.einsum("hcd,hde,hce->hc", undo, sq, undo)
    return (variance * energy).sum(axis=1)


@pytest.mark.parametrize("dim", [32, 64, 80])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_balanced_basis_rounds_at_the_least_cost(dim: int, seed: int) -> None:
    sq, sk = moments(dim, seed)
    values, vectors = np.linalg.eigh(sq)
    root = (vectors * values[:, None] ** 0.5) @ vectors.swapaxes(1, 2)
    least = np.sqrt(np.linalg.eigvalsh(root @ sk @ root)).sum(axis=1) ** 2 / dim

    balance = Balance(mx.array(balanced(sq, sk).astype(np.float32)))
    matrix = dense(balance.matrix) @ mixing(dim)
    ours = rounding_cost(matrix, sq, sk)
    np.testing.assert_allclose(ours, least, rtol=0.01)  # the matrix is rounded to bfloat16
    plain = rounding_cost(np.stack([np.eye(dim)] * 2), sq, sk)
    spread = rounding_cost(np.stack([mixing(dim)] * 2), sq, sk)
    assert (ours < 0.9 * np.minimum(plain, spread)).all()
    # And it is what the store does.
    k = mx.random.normal((1, 2, 16, dim), key=mx.random.key(seed))
    got = dense(balance.basis(False).keys(k))
    np.testing.assert_allclose(got, dense(k) @ matrix, rtol=0, atol=1e-4)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_first_channels_are_those_that_count(seed: int) -> None:
    sq, sk = moments(64, seed)
    balance = Balance(mx.array(balanced(sq, sk).astype(np.float32)))
    matrix = dense(balance.matrix) @ ranked_mixing(64)
    undo = np.linalg.inv(matrix)
    variance = np.einsum("hdc,hde,hec->hc", matrix, sk, matrix)
    energy = np.einsum("hcd,hde,hce->hc", undo, sq, undo)
    cost = variance * energy
    assert (cost[:, :24].mean(axis=1) > 2 * cost[:, 24:].mean(axis=1)).all()


def test_attention_is_nearer_in_a_balanced_basis() -> None:
    """From the cache itself: keys and queries of uneven channels, 3 and 4 bits for keys alone."""
    sq, sk = moments(64, 0)
    made = balanced(sq, sk).astype(np.float32)
    stream = Stream(400, 2, 1, 64, 64)
    for name, moment in (("q", sq), ("k", sk)):
        root = mx.array(np.linalg.cholesky(moment).swapaxes(1, 2).astype(np.float32))
        setattr(stream, name, getattr(stream, name) @ root)
    stream.q = stream.q * 0.1  # a softmax that is not one token's
    exact = dense(run(QuantizedStreamingCache(KVCacheConfig()), stream, [399, 1])[-1])
    off = {}
    for bits in (3, 4):
        for name in ("plain", "balanced"):
            config = KVCacheConfig(k_bits=bits, group_size=64, balanced=name != "plain")
            cache = QuantizedStreamingCache(config, packed_attention=True)
            cache.balance = Balance(mx.array(made)) if name == "balanced" else None
            off[bits, name] = np.abs(dense(run(cache, stream, [399, 1])[-1]) - exact).mean()
        assert off[bits, "balanced"] < off[bits, "plain"]


# Whose it is


def broken(kind: str) -> mx.array:
    matrix = np.stack([np.eye(32)] * 2)
    if kind == "nan":
        matrix[1, 3, 4] = np.nan
    elif kind == "infinite":
        matrix[0, 0, 0] = np.inf
    elif kind == "singular":
        matrix[1, 5] = matrix[1, 6]
    elif kind == "nearly singular":
        matrix[0, 7, 7] = 1e-6
    elif kind == "zero":
        matrix[:] = 0
    elif kind == "not square":
        matrix = matrix[:, :, :31]
    elif kind == "no axis":
        matrix = matrix[0]
    else:
        matrix = matrix[:0]
    return mx.array(matrix.astype(np.float32))


@pytest.mark.parametrize(
    "kind", "nan|infinite|singular|nearly singular|zero|not square|no axis|no heads".split("|")
)
def test_what_is_no_basis_is_refused_in_one_line(kind: str) -> None:
    with pytest.raises(ValueError, match="a basis (of shape|that can't be undone)") as caught:
        Balance(broken(kind))
    assert "\n" not in str(caught.value)


def test_the_same_content_has_the_same_name() -> None:
    matrix = random_balance(2, 32, 5).matrix
    one, same = Balance(matrix), Balance(matrix.astype(mx.float32))
    other = np.array(matrix.astype(mx.float32))
    other[1, 3, 4] += 0.1
    swapped = Balance(matrix[::-1])
    names = {Balance(mx.array(other)).name, swapped.name, one.name}
    assert one.name == same.name and len(names) == 3
    assert known_balance(one.name) is not None


def test_a_name_is_known_for_as_long_as_someone_holds_it() -> None:
    one = Balance(random_balance(2, 32, 6).matrix * 2)
    name = one.name
    assert known_balance(name) is one
    del one
    gc.collect()
    assert known_balance(name) is None


@pytest.mark.parametrize("bits", [3, 4])
def test_caches_and_their_copies_share_a_balance(bits: int) -> None:
    config = KVCacheConfig(k_bits=bits, v_bits=4, group_size=32)
    stream = Stream(200, 2, 1, 64, 64)
    caches = [new_cache(config, stream, seed=4) for _ in range(2)]
    for cache in caches:
        run(cache, stream, [150, 1])
    twin, loaded = copy.deepcopy(caches[0]), type(caches[0]).from_state(caches[0].state)
    everyone = [*caches, twin, loaded]
    assert len({id(cache.balance) for cache in everyone}) == 1
    assert len({id(cache._stores[0].basis) for cache in everyone}) == 1
    outs = [dense(step(cache, stream, 151, 152)) for cache in everyone]
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])


# Large data


@pytest.mark.parametrize(("dtype", "top"), [(mx.float16, 6e4), (mx.bfloat16, 1e5)], ids=str)
@pytest.mark.parametrize("name", ["plain", "balanced", "ranked"])
@pytest.mark.parametrize("bits", [2, 3, 4, 6])
@pytest.mark.parametrize("how", ["signs", "constant", "one channel"])
def test_large_data_stays_finite_and_within_half_a_step(
    how: str, bits: int, name: str, dtype: mx.Dtype, top: float
) -> None:
    """Mixed, channels of one size add up to 8 times as much: more than float16 holds."""
    noise = normal(64, 64)
    if how == "signs":
        x = mx.where(noise > 0, top, -top)
    elif how == "constant":
        x = mx.full(noise.shape, -top)
    else:
        x = mx.where(mx.arange(64) == 7, top - 64 * mx.abs(noise), noise)
    x = x.astype(dtype)
    assert mx.isfinite(x).all()
    keys = KeyStore(bits, GROUP, basis(name, 64))
    values = ValueStore(bits, GROUP, mixed=True)
    for store in (keys, values):
        store.reserve(2, x)
        store.write(0, x)
        assert mx.isfinite(store.dense(0, 2)).all()
    assert mx.isfinite(keys.scores(normal(3, 64))).all()
    assert mx.isfinite(values.weighted(mx.ones((2, HEADS, 1, 64)) / 64)).all()

    was, largest = dense(x), float(mx.finfo(dtype).max)
    for which, store in enumerate((keys, values)):
        ranked = name == "ranked" and which == 0
        config = KVCacheConfig(k_bits=3 if ranked else bits, v_bits=bits, group_size=GROUP)
        balance = None if name == "plain" or which else random_balance(HEADS, 64, 0)
        matrix, levels = basis_of(config, which, HEADS, 64, balance)
        if balance and bits == 3 and not ranked:
            matrix, levels = dense(balance.matrix) @ mixing(64), np.full(64, 7.0)
        mixed, kept = was @ matrix, dense(store.dense(0, 2))
        # Zeros in bfloat16 are lower by 2^-8 of themselves at most.
        low = 2**-8 * 2 * np.abs(mixed).max() / levels / 2
        limit = 1.05 * half_step(config, which, mixed, 0, levels) + low
        ulp = 2**-11 if dtype == mx.float16 else 2**-8
        whole = (np.abs(kept) < largest).all(axis=-1)
        error = np.abs((kept - was) @ matrix) - limit - ulp * (np.abs(was) @ np.abs(matrix))
        assert (error[whole] <= 0).all()
        # What is cut off at the largest number of the type has come nearer in its own channel.
        limit = limit @ np.abs(np.linalg.inv(matrix)) + 2 * ulp * np.abs(was)
        assert (np.abs(kept - was) <= limit).all()
