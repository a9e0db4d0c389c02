"""Affine quantisation of groups along the last axis, packed as ``mx.quantized_matmul`` reads it.

``x ≈ scale · q + zero`` with q in [0, 2^bits - 1], one (scale, zero) for each group: KIVI
(arXiv:2402.02750, equation 2). q is computed against the *stored*, rounded scale and zero, which
are rounded so that the grid still covers the group. The error is therefore at most half a stored
step, in whatever precision scales are kept.
"""

from __future__ import annotations

import mlx.core as mx


def min_scale(dtype: mx.Dtype) -> float:
    """Floor of a step, for a constant group must not divide by zero: the least that ``dtype`` has.

    Of bfloat16 and float32 the least normal number, since a GPU may take smaller ones for zero.
    """
    return 2.0**-24 if dtype == mx.float16 else 2.0**-126


def quantize(
    x: mx.array, bits: int, group_size: int, dtype: mx.Dtype, inset: float = 0.0
) -> tuple[mx.array, mx.array, mx.array]:
    """Quantise and pack groups of ``group_size`` neighbours along the last axis.

    Args:
        x: [..., n · group_size], any float type.
        bits: 2, 3, 4, 5, 6 or 8.
        group_size: Values that share a scale.
        dtype: Type of the scales and zeros.
        inset: How far, in steps, the lowest and highest level lie inside the group's range, from
            0 (on its ends, as in the paper) to 0.5 (in the middle of 2^bits equal parts). More
            means a finer step and coarser extremes; the error stays below half a step.

    Returns:
        words [..., n · group_size · bits / 32] uint32, scales and zeros [..., n] of ``dtype``.
    """
    levels = (1 << bits) - 1
    groups = x.astype(mx.float32).reshape(*x.shape[:-1], -1, group_size)
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    # Products and halves before the subtraction: the range of finite values may be infinite.
    inset_by = inset / (levels + 2 * inset)
    zeros = _rounded_down(low + (high * inset_by - low * inset_by), dtype)
    base = zeros.astype(mx.float32)
    steps = (high / 2 - base / 2) / ((levels + inset) / 2)
    scales = _rounded_up(mx.maximum(steps, min_scale(dtype)), dtype)
    q = mx.round((groups - base[..., None]) / scales.astype(mx.float32)[..., None])
    q = mx.clip(q, 0, levels).astype(mx.uint32)
    return pack(q.reshape(x.shape), bits), scales, zeros


def dequantize(
    words: mx.array, scales: mx.array, zeros: mx.array, bits: int, group_size: int
) -> mx.array:
    """The inverse, in float32: half-precision arithmetic would add an error of its own."""
    return mx.dequantize(
        words,
        scales.astype(mx.float32),
        zeros.astype(mx.float32),
        group_size=group_size,
        bits=bits,
    )


def pack(q: mx.array, bits: int) -> mx.array:
    """Pack integers below 2^bits into a stream of bits, low bits first.

    Args:
        q: [..., 32 · n] uint32.

    Returns:
        [..., bits · n] uint32: value i lies at bits [bits · i, bits · (i + 1)) of the stream.
    """
    q = q.reshape(*q.shape[:-1], -1, 32)
    if 32 % bits == 0:
        per_word = 32 // bits
        shifts = mx.arange(0, 32, bits, dtype=mx.uint32)
        sums = (q.reshape(*q.shape[:-1], bits, per_word) << shifts).sum(axis=-1)
        return sums.astype(mx.uint32).flatten(-2)
    words = []
    for word in range(bits):
        parts = []
        for i in range(32):
            shift = bits * i - 32 * word
            if -bits < shift < 32:
                value = q[..., i]
                parts.append(value << shift if shift >= 0 else value >> -shift)
        words.append(sum(parts[1:], parts[0]))
    return mx.stack(words, axis=-1).flatten(-2)


def _rounded_down(x: mx.array, dtype: mx.Dtype) -> mx.array:
    """x in ``dtype``, never above x: exact where x is representable."""
    y = x.astype(dtype)
    below = (x - _half_ulp(x, dtype)).astype(dtype)
    return mx.where(y.astype(mx.float32) > x, below, y)


def _rounded_up(x: mx.array, dtype: mx.Dtype) -> mx.array:
    """x in ``dtype``, never below x."""
    y = x.astype(dtype)
    above = (x + _half_ulp(x, dtype)).astype(dtype)
    return mx.where(y.astype(mx.float32) < x, above, y)


def _half_ulp(x: mx.array, dtype: mx.Dtype) -> mx.array:
    # Half the spacing of ``dtype`` at x, at most; 2^-24 is float16's smallest subnormal.
    return mx.abs(x) * (mx.finfo(dtype).eps / 2) + (2**-24 if dtype == mx.float16 else 0)
