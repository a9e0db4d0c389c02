"""Keys and values far from zero, in every basis: finite, and off by half a step of that basis."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from reference import dense
from storage import ranked_mixing

from mlx_kivi.cache.basis import PLAIN, Balance, KeyBasis
from mlx_kivi.cache.group_store import GroupStore, ValueStore
from mlx_kivi.cache.key_store import KeyStore
from mlx_kivi.models.calibration import balanced

TYPES = (mx.float32, mx.float16, mx.bfloat16)
WIDTHS = (8, 6, 5, 4, 3, 2)
HEADS, DIM, GROUP = 2, 64, 64
ULP = {mx.float32: 2**-23, mx.float16: 2**-10, mx.bfloat16: 2**-7}  # spacing around 1
SUMS = DIM * 2**-24  # a sum over a head in float32, of the sum of its terms' sizes
KINDS = ("plain", "random", "balanced", "ranked")


def normal(tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((1, HEADS, tokens, DIM))


def biased(*channels: float) -> np.ndarray:
    """Constant channels with a thousandth of noise, among normal ones."""
    x = normal(256)
    for channel, value in zip((3, 40), channels, strict=False):
        x[..., channel] = value + 1e-3 * abs(value) * x[..., channel]
    return x


def turning() -> np.ndarray:
    """Biases of several hundred in three pairs that RoPE turns slowly, over 1,024 tokens."""
    x = normal(1024)
    for pair, size, speed in ((31, 300, 1e-4), (28, 600, 1e-3), (20, 400, 1e-2)):
        angle = 1 + speed * np.arange(x.shape[2])
        x[..., pair] += size * np.cos(angle)
        x[..., pair + DIM // 2] += size * np.sin(angle)
    return x


CASES = {"1e4": biased(1e4), "6e4": biased(6e4, -6e4), "hundreds, turning": turning()}


def hadamard(size: int) -> np.ndarray:
    signs = np.ones((1, 1))
    while len(signs) < size:
        signs = np.kron([[1, 1], [1, -1]], signs)
    return signs / np.sqrt(size)


def second_moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of queries of their own, and of keys around their mean over 32 tokens."""
    queries = np.random.default_rng(2).standard_normal((HEADS, DIM, DIM)) / 8
    keys = x[0].reshape(HEADS, -1, 32, DIM)
    keys = (keys - keys.mean(axis=2, keepdims=True)).reshape(HEADS, -1, DIM)
    return queries @ queries.swapaxes(1, 2), keys.swapaxes(1, 2) @ keys / keys.shape[1]


def basis_of(kind: str, x: np.ndarray) -> tuple[KeyBasis, np.ndarray]:
    """A basis for keys like x, and its matrix [H, D, D] in float64."""
    same = np.broadcast_to(np.eye(DIM), (HEADS, DIM, DIM))
    if kind == "plain":
        return PLAIN, same
    if kind == "random":
        made = np.random.default_rng(1).standard_normal((HEADS, DIM, DIM)) / 8
    else:
        made = balanced(*second_moments(x))
    balance = Balance(mx.array(made))
    exact = dense(balance.matrix)
    if kind == "ranked":
        return balance.basis(True), exact @ ranked_mixing(DIM)
    return balance.basis(False), exact @ hadamard(DIM)


def half_steps(y: np.ndarray, bits: int, inset: float, scales: mx.Dtype, group: int) -> np.ndarray:
    """Half the step that groups along the last axis of y need, and what 16 bits add: as y."""
    parts = y.reshape(*y.shape[:-1], -1, group)
    levels = 2**bits - 1
    size = np.abs(parts).max(axis=-1)
    step = np.ptp(parts, axis=-1) / (levels + 2 * inset) + ULP[scales] * size / (levels + inset)
    floor = 2.0**-24 if scales == mx.float16 else 0
    return ((step * (1 + ULP[scales]) + floor) / 2).repeat(group, axis=-1)


@dataclass
class Packed:
    """Keys x in a store, and what it may do to them."""

    store: KeyStore
    x: np.ndarray  # without the shift, in float64
    shift: np.ndarray
    matrix: np.ndarray
    bound: np.ndarray  # half a step, and the sums that went before: [1, H, T, D] in the basis


def packed(case: str, dtype: mx.Dtype, kind: str, bits: int) -> Packed:
    keys = mx.array(CASES[case].astype(np.float32)).astype(dtype)
    x = dense(keys)
    basis, matrix = basis_of(kind, x)
    store = KeyStore(bits, GROUP, basis)
    store.reserve(x.shape[2] // GROUP, keys)
    store.write(0, keys)
    shift = np.zeros((1, HEADS, 1, DIM)) if store.shift is None else dense(store.shift)
    y = ((x - shift) @ matrix).swapaxes(-1, -2)
    scales = mx.float16 if dtype == mx.float16 and kind == "plain" else mx.bfloat16
    bound, start = [], 0
    for channels, of_part in basis.parts(DIM, bits):
        part = y[:, :, start : start + channels]
        bound.append(half_steps(part, of_part, basis.inset(of_part), scales, GROUP))
        start += channels
    limit = np.concatenate(bound, axis=2).swapaxes(-1, -2)
    limit = limit + SUMS * ((np.abs(x) + np.abs(shift)) @ np.abs(matrix))
    return Packed(store, x - shift, shift, matrix, limit)


def bits_of(kind: str) -> tuple[int, ...]:
    return (3,) if kind == "ranked" else WIDTHS


every_basis = pytest.mark.parametrize(
    ("kind", "bits"), [(kind, bits) for kind in KINDS for bits in bits_of(kind)]
)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@every_basis
def test_keys_are_off_by_half_a_step_of_their_basis(
    case: str, dtype: mx.Dtype, kind: str, bits: int
) -> None:
    """Dense ones, scores of any queries, and of those that are one channel in the basis."""
    held = packed(case, dtype, kind, bits)
    y = held.x @ held.matrix
    inverse = np.linalg.inv(held.matrix)
    reach = np.abs(y) + held.bound

    for queries in (normal(4, seed=7), held.matrix.swapaxes(-1, -2)[None]):
        queries = queries.astype(np.float32)
        scores = dense(held.store.scores(mx.array(queries)))
        moved = queries.astype(np.float64) @ inverse.swapaxes(-1, -2)
        terms = np.abs(moved) + np.abs(queries) @ np.abs(inverse).swapaxes(-1, -2)
        limit = np.abs(moved) @ held.bound.swapaxes(-1, -2)
        limit = limit + SUMS * terms @ reach.swapaxes(-1, -2)
        assert (np.abs(scores - queries @ held.x.swapaxes(-1, -2)) <= limit).all()

    back = held.store.dense(0, y.shape[2] // GROUP)
    assert back.dtype == dtype and mx.isfinite(back).all()
    back = dense(back)
    # It is rounded to the type it comes back in: half a unit of the last place.
    sums = SUMS * (reach @ np.abs(inverse)) + ULP[dtype] / 2 * np.abs(back)
    sums = sums + 2**-24 * np.abs(held.shift)
    error = np.abs((back - held.shift) @ held.matrix - y)
    assert (error <= held.bound + sums @ np.abs(held.matrix)).all()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", ["random", "balanced"])
@pytest.mark.parametrize("bits", [4, 2])
def test_a_bias_makes_no_step_coarser(case: str, dtype: mx.Dtype, kind: str, bits: int) -> None:
    """Mixed into all channels, one of 6e4 would leave zeros of 16 bits nothing to say."""
    held = packed(case, dtype, kind, bits)
    y = (held.x @ held.matrix).reshape(HEADS, -1, GROUP, DIM)
    ideal = np.ptp(y, axis=2) / (2**bits - 1 + 2 * held.store.basis.inset(bits))
    scales = dense(held.store.live_arrays()[1])[0, :, :DIM].swapaxes(-1, -2)
    assert (scales / ideal).mean() <= 1.05


# Values


def values(store: ValueStore, x: mx.array) -> ValueStore:
    store.reserve(x.shape[2] // GROUP, x)
    store.write(0, x)
    return store


@pytest.mark.parametrize(
    ("dtype", "size"), [*((t, 1e5) for t in (mx.bfloat16, mx.float32)), (mx.float16, 6e4)], ids=str
)
@pytest.mark.parametrize("signs", [False, True], ids=["one sign", "both signs"])
@pytest.mark.parametrize("mixed", [False, True], ids=["plain", "mixed"])
@pytest.mark.parametrize("bits", WIDTHS)
def test_values_of_1e5_are_off_by_half_a_step_of_their_basis(
    dtype: mx.Dtype, size: float, signs: bool, mixed: bool, bits: int
) -> None:
    noise = normal(128)
    tokens = size * (np.sign(noise) if signs else 1) * (1 - 1e-2 * np.abs(noise))
    x = mx.array(tokens.astype(np.float32)).astype(dtype)
    store = values(ValueStore(bits, GROUP, mixed), x)
    exact, matrix = dense(x), hadamard(DIM) if mixed else np.eye(DIM)
    y = exact @ matrix
    inset = {2: 3 / 8, 3: 1 / 8, 4: 1 / 16}.get(bits, 0) if mixed else 0
    scales = mx.float16 if dtype == mx.float16 and not mixed else mx.bfloat16
    bound = half_steps(y, bits, inset, scales, GROUP) + SUMS * np.abs(exact) @ np.abs(matrix)
    sums = SUMS * (np.abs(y) + bound) @ np.abs(matrix)
    back = store.dense(0, 2)
    assert back.dtype == dtype and mx.isfinite(back).all()
    back = dense(back)
    rounding = sums + ULP[dtype] / 2 * np.abs(back)
    # What is cut off at float16's largest number comes nearer, but in no basis's channels.
    error = np.abs(back - exact)
    assert (error <= bound @ np.abs(matrix) + rounding).all()
    if dtype != mx.float16:
        assert (np.abs((back - exact) @ matrix) <= bound + rounding @ np.abs(matrix)).all()

    weights = np.random.default_rng(3).dirichlet(np.ones(128), (1, HEADS, 4)).astype(np.float32)
    out = dense(store.weighted(mx.array(weights)))
    error = np.abs((out - weights.astype(np.float64) @ exact) @ matrix)
    assert (error <= weights @ (bound + 4 * sums @ np.abs(matrix))).all()


# The end of the range


def ends() -> dict[str, np.ndarray]:
    signs = np.sign(normal(64))
    one = normal(64)
    one[..., 5] = 3e38 * signs[..., 5]
    return {"all": np.full_like(signs, 3e38), "both signs": 3e38 * signs, "one channel": one}


@pytest.mark.parametrize("tokens", ends().values(), ids=ends())
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [*KINDS[:3], "values", "mixed values"])
@pytest.mark.parametrize("bits", WIDTHS)
def test_numbers_at_the_end_of_float32_leave_everything_finite(
    tokens: np.ndarray, dtype: mx.Dtype, kind: str, bits: int
) -> None:
    """And the sign of those: they are cut off far out."""
    x = mx.array(tokens.astype(np.float32)).astype(dtype)
    store: GroupStore
    if "values" in kind:
        store = ValueStore(bits, GROUP, mixed="mixed" in kind)
    else:
        store = KeyStore(bits, GROUP, basis_of(kind, tokens)[0])
    store.reserve(1, x)
    store.write(0, x)
    rows = mx.full((1, HEADS, 1, DIM), 1 / DIM)
    product = store.weighted(rows) if isinstance(store, ValueStore) else store.scores(rows)
    assert mx.isfinite(product).all()
    back = store.dense(0, 1)
    assert mx.isfinite(back).all()
    if bits == 8 and kind != "random":
        huge = np.abs(tokens) > 1e38
        assert (np.sign(dense(back))[huge] == np.sign(tokens)[huge]).all()
        assert np.abs(dense(back))[huge].min() > 1e29


def test_a_store_without_bits_keeps_the_end_of_float32() -> None:
    x = mx.array(ends()["both signs"].astype(np.float32))
    for store in (KeyStore(None, GROUP), ValueStore(None, GROUP)):
        store.reserve(1, x)
        store.write(0, x)
        assert mx.array_equal(store.dense(0, 1), x)
