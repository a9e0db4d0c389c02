"""The quantiser: its packing, and its error against the steps that it stores."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import dense

from mlx_kivi.cache.quantization import dequantize, min_scale, pack, quantize
from mlx_kivi.config import BITS, GROUP_SIZES

TYPES = (mx.float32, mx.float16, mx.bfloat16)
# Spacing of numbers around 1.
ULP = {mx.float16: 2**-10, mx.bfloat16: 2**-7}


def scales_of(dtype: mx.Dtype) -> mx.Dtype:
    """Sixteen bits a scale for any data."""
    return mx.bfloat16 if dtype == mx.float32 else dtype


def stream_of_bits(values: list[int], bits: int) -> list[int]:
    """Words of 32 bits, value after value, low bits first."""
    stream = sum(v << (bits * i) for i, v in enumerate(values))
    return [(stream >> (32 * w)) & 0xFFFFFFFF for w in range(len(values) * bits // 32)]


def check(
    x: mx.array, bits: int, group: int, dtype: mx.Dtype, inset: float = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Half a stored step bounds the error; returns steps and ranges, one a group."""
    words, scales, zeros = quantize(x, bits, group, dtype, inset)
    assert words.dtype == mx.uint32 and words.shape == (*x.shape[:-1], x.shape[-1] * bits // 32)
    assert scales.dtype == zeros.dtype == dtype
    assert scales.shape == zeros.shape == (*x.shape[:-1], x.shape[-1] // group)
    back = dequantize(words, scales, zeros, bits, group)
    assert back.dtype == mx.float32 and back.shape == x.shape
    data, back, steps = dense(x), dense(back), dense(scales)
    assert np.isfinite(back).all() and np.isfinite(steps).all() and (steps > 0).all()
    rounding = 2**-22 * np.abs(data)  # of float32, in which the sums are done
    limit = steps.repeat(group, -1) / 2 * (1 + 1e-5) + rounding
    error = np.abs(back - data)
    assert (error <= limit).all(), (error / limit).max()
    return steps, np.ptp(data.reshape(*steps.shape, group), axis=-1)


# Packing


@pytest.mark.parametrize("bits", BITS)
def test_packing_is_a_stream_of_bits_low_bits_first(bits: int) -> None:
    rng = np.random.default_rng(bits)
    q = rng.integers(0, 2**bits, (3, 2, 64), dtype=np.uint32)
    words = np.array(pack(mx.array(q), bits))
    assert words.shape == (3, 2, 2 * bits)
    for row, packed in zip(q.reshape(-1, 64), words.reshape(-1, 2 * bits), strict=True):
        assert packed.tolist() == stream_of_bits(row.tolist(), bits)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", GROUP_SIZES)
def test_packing_is_that_of_mlx(bits: int, group: int) -> None:
    x = mx.random.normal((4, 256), key=mx.random.key(bits))
    words, scales, zeros = mx.quantize(x, group, bits)
    ones, none = mx.ones_like(scales), mx.zeros_like(zeros)
    q = mx.dequantize(words, ones, none, group, bits)  # the bare integers
    assert mx.array_equal(pack(q.astype(mx.uint32), bits), words)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", GROUP_SIZES)
def test_quantized_matmul_reads_what_quantize_wrote(bits: int, group: int) -> None:
    x = mx.random.normal((2, 64, 128), key=mx.random.key(1))
    parts = quantize(x, bits, group, mx.float32)
    left = mx.random.normal((2, 3, 64), key=mx.random.key(2))
    product = mx.quantized_matmul(left, *parts, transpose=False, group_size=group, bits=bits)
    expected = dense(left) @ dense(dequantize(*parts, bits, group))
    np.testing.assert_allclose(dense(product), expected, rtol=0, atol=1e-4)


# Error


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", GROUP_SIZES)
@pytest.mark.parametrize("inset", [0, 0.25, 0.5])
def test_normal_data_is_within_half_a_stored_step(
    dtype: mx.Dtype, bits: int, group: int, inset: float
) -> None:
    x = mx.random.normal((2, 3, 5, 256), key=mx.random.key(bits)).astype(dtype)
    steps, ranges = check(x, bits, group, scales_of(dtype), inset)
    # Levels inside the range are closer together; the rest is the rounding of the step.
    assert (steps <= 1.02 * ranges / (2**bits - 1 + 2 * inset)).all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.7, 900.0, 1e4, -1e4, 1e-7])
def test_a_constant_group_comes_back_as_it_was(dtype: mx.Dtype, bits: int, value: float) -> None:
    x = mx.full((2, 64), value).astype(dtype)
    check(x, bits, 64, scales_of(dtype))
    back = dequantize(*quantize(x, bits, 64, scales_of(dtype)), bits, 64)
    # A zero of 16 bits can't always be the value itself.
    near = 2**-7 if dtype == mx.float32 else 2**-22
    floor = min_scale(scales_of(dtype)) / 2
    assert np.abs(dense(back) - dense(x)).max() <= near * abs(value) + floor


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("width", [1e-36, 1e-30, 1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3])
def test_tiny_ranges_are_finite_and_within_half_a_step(
    dtype: mx.Dtype, bits: int, width: float
) -> None:
    x = (width * mx.random.uniform(-1, 1, (4, 64), key=mx.random.key(3))).astype(dtype)
    steps, ranges = check(x, bits, 64, scales_of(dtype))
    # Steps are as fine as the data asks for, down to the least number of the type.
    floor = min_scale(scales_of(dtype))
    assert (steps <= 1.02 * ranges / (2**bits - 1) + floor).all()


@pytest.mark.parametrize("size", [1.0, 1e-4, 1e-6, 1e-8, 1e-30])
@pytest.mark.parametrize("bits", [8, 4])
def test_no_scale_is_lost_that_mlx_keeps(size: float, bits: int) -> None:
    x = mx.random.normal((64, 64), key=mx.random.key(0)) * size
    ours = dequantize(*quantize(x, bits, 64, mx.bfloat16), bits=bits, group_size=64)
    theirs = mx.dequantize(*mx.quantize(x, 64, bits), 64, bits)
    error, bar = (np.abs(dense(y) - dense(x)).max() / size for y in (ours, theirs))
    assert error <= 1.1 * bar


@pytest.mark.parametrize(
    ("dtype", "offset"),
    [
        (mx.float16, 1e4),
        (mx.float16, -6e4),
        *[(t, o) for t in (mx.bfloat16, mx.float32) for o in (1e4, -1e6, 1e30)],
    ],
)
@pytest.mark.parametrize("bits", BITS)
def test_huge_offsets_are_finite_and_within_half_a_step(
    dtype: mx.Dtype, offset: float, bits: int
) -> None:
    noise = mx.random.normal((4, 64), key=mx.random.key(4))
    x = (offset + noise * max(1.0, abs(offset) / 100)).astype(dtype)
    steps, ranges = check(x, bits, 64, scales_of(dtype))
    # The zero may lie lower than the data by the spacing of its type, nothing more.
    slack = np.abs(dense(x)).max() * ULP[scales_of(dtype)] * (dtype == mx.float32)
    assert (steps <= 1.02 * (ranges + slack) / (2**bits - 1)).all()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("bits", BITS)
def test_an_offset_of_900_widens_no_step_of_half_precision_data(dtype: mx.Dtype, bits: int) -> None:
    """Data of 16 bits: its own rounding is the only loss, and comes before."""
    x = (900 + mx.random.normal((8, 64), key=mx.random.key(5))).astype(dtype)
    steps, ranges = check(x, bits, 64, dtype)
    assert (steps <= 1.02 * ranges / (2**bits - 1)).all()


@given(
    bits=st.sampled_from(BITS),
    dtype=st.sampled_from(TYPES),
    center=st.just(0.0) | st.floats(-1e4, 1e4),
    power=st.integers(-36, 4),
    shape=st.sampled_from(["normal", "uniform", "two values", "one outlier", "ramp"]),
    inset=st.floats(0, 0.5),
    seed=st.integers(0, 99),
)
def test_any_group_is_within_half_a_stored_step(
    bits: int, dtype: mx.Dtype, center: float, power: int, shape: str, inset: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    noise = {
        "normal": rng.normal(size=(3, 64)),
        "uniform": rng.uniform(-1, 1, (3, 64)),
        "two values": rng.choice([-1.0, 1.0], (3, 64)),
        "one outlier": np.eye(3, 64) * 3,
        "ramp": np.linspace(-1, 1, 64) * np.ones((3, 1)),
    }[shape]
    x = mx.array((center + noise * 10.0**power).astype(np.float32)).astype(dtype)
    check(x, bits, 64, scales_of(dtype), inset)


def test_extreme_values_stay_finite() -> None:
    """In float16 their difference overflows; in the others it is near what float32 holds."""
    for dtype, top in ((mx.float16, 6e4), (mx.float32, 1.6e38), (mx.bfloat16, 1.6e38)):
        x = mx.array([[top, -top] * 32]).astype(dtype)
        for bits in BITS:
            back = dequantize(*quantize(x, bits, 64, scales_of(dtype)), bits, 64)
            assert mx.isfinite(back).all() and mx.isfinite(back.astype(dtype)).all()
