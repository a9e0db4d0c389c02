"""The stores of packed groups: keys per channel, values per token."""

import mlx.core as mx
import numpy as np
import pytest
from reference import dense

from mlx_kivi.cache.group_store import GroupStore, ValueStore
from mlx_kivi.cache.key_store import KeyStore
from mlx_kivi.config import BITS, value_group

TYPES = (mx.float32, mx.float16, mx.bfloat16)
HEAD_SIZES = (40, 64, 72, 80, 96, 100, 112, 120, 128, 160, 192)
GROUP = 32


def normal(tokens: int, dim: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> mx.array:
    """[2, 3, tokens, dim]"""
    return mx.random.normal((2, 3, tokens, dim), key=mx.random.key(seed)).astype(dtype)


def filled(store: GroupStore, x: mx.array, group: int = GROUP) -> GroupStore:
    slots = x.shape[2] // group
    store.reserve(slots, x)
    store.write(0, x)
    return store


def stored_steps(store: GroupStore, x: mx.array, group: int = GROUP) -> np.ndarray:
    """The step that each value of x was rounded to, as the store keeps it: as x."""
    scales = dense(store.live_arrays()[1])
    if isinstance(store, KeyStore):
        scales = scales[:, :, : x.shape[-1]]  # zeros follow
        return scales.repeat(group, axis=-1).swapaxes(-1, -2)
    size, _ = value_group(x.shape[-1], group, store.bits)
    return scales.repeat(size, axis=-1)[..., : x.shape[-1]]


def scored(store: KeyStore, queries: mx.array, keys: np.ndarray) -> np.ndarray:
    """What ``scores`` promises for these keys: products after the shift is taken off."""
    shift = 0 if store.shift is None else dense(store.shift)
    return dense(queries) @ (keys - shift).swapaxes(-1, -2)


def check_error(store: GroupStore, x: mx.array, group: int = GROUP) -> None:
    back = store.dense(0, x.shape[2] // group)
    assert back.shape == x.shape and back.dtype == x.dtype
    assert mx.isfinite(back).all()
    # The result is rounded to the type of the data; the sums, to float32.
    ulp = {mx.float32: 2**-22, mx.float16: 2**-11, mx.bfloat16: 2**-8}[x.dtype]
    back, x = dense(back), dense(x)
    rounding = ulp * np.maximum(np.abs(x), np.abs(back))
    limit = stored_steps(store, x, group) / 2 * (1 + 1e-5) + rounding + 1e-7
    assert (np.abs(back - x) <= limit).all()


@pytest.mark.parametrize("kind", [KeyStore, ValueStore])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", TYPES)
def test_tokens_come_back_within_half_a_stored_step(
    kind: type[GroupStore], bits: int, dtype: mx.Dtype
) -> None:
    x = normal(96, 64, dtype)
    check_error(filled(kind(bits, GROUP), x), x)


@pytest.mark.parametrize("kind", [KeyStore, ValueStore])
@pytest.mark.parametrize("dtype", TYPES)
def test_without_bits_tokens_come_back_exactly(kind: type[GroupStore], dtype: mx.Dtype) -> None:
    x = normal(96, 40, dtype)
    assert mx.array_equal(filled(kind(None, GROUP), x).dense(0, 3), x)


@pytest.mark.parametrize("head_dim", HEAD_SIZES)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_any_head_size_can_be_stored(head_dim: int, group: int, bits: int) -> None:
    x = normal(128, head_dim)
    weights = mx.random.normal((2, 3, 5, 128), key=mx.random.key(1))
    values = filled(ValueStore(bits, group), x, group)
    check_error(values, x, group)
    expected = dense(weights) @ dense(values.dense(0, 128 // group))
    out = values.weighted(weights)
    np.testing.assert_allclose(dense(out), expected, rtol=0, atol=1e-4)

    queries = mx.random.normal((2, 3, 5, head_dim), key=mx.random.key(2))
    keys = filled(KeyStore(bits, group), x, group)
    check_error(keys, x, group)
    expected = scored(keys, queries, dense(keys.dense(0, 128 // group)))
    np.testing.assert_allclose(dense(keys.scores(queries)), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("head_dim", [40, 80, 100])
def test_padding_widens_no_step_of_values(head_dim: int) -> None:
    """Far from zero, a padding of zeros would be the range."""
    x = normal(32, head_dim) + 50
    store = filled(ValueStore(4, GROUP), x)
    for lo in range(0, head_dim, GROUP):
        part = dense(x)[..., lo : lo + GROUP]
        # bfloat16 zeros near 50 are 1/4 apart.
        limit = 1.02 * (np.ptp(part, axis=-1) + 0.25) / 15
        assert (stored_steps(store, x)[..., lo] <= limit).all()


@pytest.mark.parametrize("bits", [None, 2, 4, 8])
@pytest.mark.parametrize("dtype", TYPES)
def test_products_with_a_store_are_those_with_its_dense_tokens(
    bits: int | None, dtype: mx.Dtype
) -> None:
    x = normal(96, 64, dtype)
    queries = mx.random.normal((2, 3, 4, 64), key=mx.random.key(1))
    weights = mx.random.normal((2, 3, 4, 96), key=mx.random.key(2))
    keys, values = filled(KeyStore(bits, GROUP), x), filled(ValueStore(bits, GROUP), x)
    # dense() rounds to the type of the data, the products don't.
    loose = {mx.float32: 1e-4, mx.float16: 0.05, mx.bfloat16: 0.4}[dtype]
    expected = scored(keys, queries, dense(keys.dense(0, 3)))
    np.testing.assert_allclose(dense(keys.scores(queries)), expected, rtol=0, atol=loose)
    expected = dense(weights) @ dense(values.dense(0, 3))
    np.testing.assert_allclose(dense(values.weighted(weights)), expected, rtol=0, atol=loose)


# The hard cases: biased channels, constants, tiny and huge numbers


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bias", [900.0, -900.0])
def test_a_channel_biased_by_900_keeps_the_step_of_its_range(
    dtype: mx.Dtype, bits: int, bias: float
) -> None:
    x = dense(normal(96, 64))
    x[..., 7] += bias
    x = mx.array(x.astype(np.float32)).astype(dtype)
    store = filled(KeyStore(bits, GROUP), x)
    check_error(store, x)
    steps = stored_steps(store, x)
    for lo in range(0, 96, GROUP):
        ideal = np.ptp(dense(x)[:, :, lo : lo + GROUP], axis=2) / (2**bits - 1)
        # The middle that is taken off is one for all groups: in 16 bits it leaves 2^-7 of it.
        assert (steps[:, :, lo] <= 1.04 * ideal + 1e-5).all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bits", BITS)
def test_queries_score_a_biased_channel_as_its_tokens_do(dtype: mx.Dtype, bits: int) -> None:
    """float32 queries of up to 1 against 900: the sum keeps what the step leaves."""
    x = dense(normal(64, 64))
    x[..., 7] += 900
    x = mx.array(x.astype(np.float32)).astype(dtype)
    store = filled(KeyStore(bits, GROUP), x)
    queries = mx.random.uniform(-1, 1, (2, 3, 4, 64), key=mx.random.key(3))
    exact = scored(store, queries, dense(x))
    bound = np.abs(dense(queries)) @ (stored_steps(store, x) / 2).swapaxes(-1, -2)
    assert (np.abs(dense(store.scores(queries)) - exact) <= bound + 2e-3).all()


@pytest.mark.parametrize("kind", [KeyStore, ValueStore])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("value", [0.0, 1.0, -900.0, 1e4])
def test_constant_tokens_come_back(
    kind: type[GroupStore], dtype: mx.Dtype, bits: int, value: float
) -> None:
    x = mx.full((2, 3, 64, 64), value).astype(dtype)
    store = filled(kind(bits, GROUP), x)
    check_error(store, x)
    if kind is KeyStore or dtype != mx.float32:
        np.testing.assert_allclose(dense(store.dense(0, 2)), dense(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [KeyStore, ValueStore])
@pytest.mark.parametrize(
    ("dtype", "center", "width"),
    [
        *[(t, 0.0, w) for t in TYPES for w in (1e-8, 1e-6, 1e-4, 1e-3)],
        *[(t, 1e4, 10.0) for t in TYPES],
        *[(t, c, abs(c) / 50) for t in (mx.float32, mx.bfloat16) for c in (1e6, -1e6, 1e30)],
    ],
)
def test_tiny_ranges_and_huge_offsets_are_finite_and_within_half_a_step(
    kind: type[GroupStore], dtype: mx.Dtype, center: float, width: float
) -> None:
    x = (center + width * normal(64, 64)).astype(dtype)
    store = filled(kind(4, GROUP), x)
    check_error(store, x)
    rows = mx.ones((2, 3, 1, 64))
    product = store.scores(rows) if kind is KeyStore else store.weighted(rows)
    assert mx.isfinite(product).all()


@pytest.mark.parametrize("kind", [KeyStore, ValueStore])
@pytest.mark.parametrize("bits", BITS)
def test_the_largest_numbers_of_float16_do_not_become_infinite(
    kind: type[GroupStore], bits: int
) -> None:
    x = mx.where(normal(64, 64) > 0, 65504.0, -65504.0).astype(mx.float16)
    assert mx.isfinite(filled(kind(bits, GROUP), x).dense(0, 2)).all()


# Slots


@pytest.mark.parametrize("kind", [KeyStore, ValueStore])
@pytest.mark.parametrize("bits", [None, 3, 4])
def test_slots_are_written_and_read_on_their_own(kind: type[GroupStore], bits: int | None) -> None:
    first, second = normal(128, 64), normal(64, 64, seed=9)
    store = filled(kind(bits, GROUP), first)
    before = store.dense(0, 4)
    store.write(1, second)
    after = store.dense(0, 4)
    assert mx.array_equal(after[:, :, :32], before[:, :, :32])
    assert mx.array_equal(after[:, :, 96:], before[:, :, 96:])
    assert not mx.array_equal(after[:, :, 32:96], before[:, :, 32:96])
    assert mx.array_equal(store.dense(1, 2), after[:, :, 32:96])


@pytest.mark.parametrize("kind", [KeyStore, ValueStore])
@pytest.mark.parametrize("bits", [None, 2, 3, 8])
def test_growing_keeps_what_is_stored_and_shrinking_is_no_growth(
    kind: type[GroupStore], bits: int | None
) -> None:
    x = normal(96, 80)
    store = filled(kind(bits, GROUP), x)
    before = store.dense(0, 3)
    store.reserve(7, x)
    assert store.capacity == 7 and mx.array_equal(store.dense(0, 3), before)
    store.reserve(2, x)
    assert store.capacity == 7
    store.write(3, x)
    assert mx.array_equal(store.dense(0, 3), before)


@pytest.mark.parametrize("kind", [KeyStore, ValueStore])
def test_a_copy_keeps_the_content_of_its_moment(kind: type[GroupStore]) -> None:
    x = normal(64, 64)
    store = filled(kind(4, GROUP), x)
    before = store.dense(0, 2)
    copy = store.copy()
    store.write(0, normal(64, 64, seed=5))
    store.reserve(4, x)
    assert mx.array_equal(copy.dense(0, 2), before)
    assert copy.capacity == 2


@pytest.mark.parametrize("kind", [KeyStore, ValueStore])
@pytest.mark.parametrize("bits", BITS)
def test_a_store_costs_its_bits_and_two_scales_a_group(kind: type[GroupStore], bits: int) -> None:
    x = normal(256, 64)
    store = filled(kind(bits, 64), x, 64)
    values = 2 * 3 * 256 * 64
    per_value = 8 * sum(a.nbytes for a in store.live_arrays()) / values
    middles = 32 * 2 * 3 * 64 / values if kind is KeyStore else 0  # one a channel, in float32
    assert per_value <= bits + 32 / 64 + middles
