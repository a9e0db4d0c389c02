"""Where whole groups of tokens live, packed: keys per channel, values per token.

A store is an array of ``capacity`` slots along time, each of one group of G tokens; which group
is in which slot is the cache's business. It is read in place, by ``mx.quantized_matmul``.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Self

import mlx.core as mx

from ..config import value_group
from .basis import PLAIN, KeyBasis, hadamard, unmix, value_inset
from .packed_keys import PackedKeys, PlainKeys
from .quantization import dequantize, quantize


def stored_as(x: mx.array, dtype: mx.Dtype) -> mx.array:
    """float32 data in the type that it came in: half a step past the largest number is that."""
    if dtype == mx.float16:
        x = mx.clip(x, -mx.finfo(dtype).max, mx.finfo(dtype).max)
    return x.astype(dtype)


# The largest that is packed as it is: sums over a head, in any basis, stay within float32.
_LARGEST = 2.0**100


def scale_dtype(dtype: mx.Dtype, mixed: bool = False) -> mx.Dtype:
    """Type of scales and zeros for data of ``dtype``, its channels mixed or not: 16 bits."""
    # bfloat16 has the range that float32 data may need, and sums of float16 data.
    return mx.float16 if dtype == mx.float16 and not mixed else mx.bfloat16


class GroupStore:
    """Common part of `KeyStore` and `ValueStore`.

    Args:
        bits: Bits a value; None keeps plain arrays [B, H, capacity · G, D].
        group_size: Tokens in a slot (G), and the largest quantisation group.
    """

    _time_axis = -2

    def __init__(self, bits: int | None, group_size: int) -> None:
        self.bits = bits
        self.group_size = group_size
        self.capacity = 0
        self.head_dim = 0
        self.dtype = mx.float32
        self.arrays: list[mx.array] = []

    @property
    def tokens(self) -> int:
        """Tokens that there is room for."""
        return self.capacity * self.group_size

    def copy(self) -> Self:
        """A store with the same content, to write to while this one is read."""
        return copy.copy(self)

    def emptied(self) -> Self:
        """A store of the same settings, with nothing in it."""
        new = copy.copy(self)
        new.capacity, new.arrays = 0, []
        return new

    @classmethod
    def stacked(cls, stores: Sequence[Self], capacity: int, like: mx.array) -> Self:
        """Stores of one row each as one of ``capacity`` slots, for tokens like ``like``
        [B, H, ·, D]."""
        wide = [store.copy() for store in stores]
        for store in wide:
            store.reserve(capacity, like[:1])
        new = wide[0].emptied()
        if capacity:
            new.capacity, new.head_dim, new.dtype = capacity, like.shape[-1], like.dtype
            each = zip(*(store.arrays for store in wide), strict=True)
            new.arrays = [mx.concatenate(list(arrays), axis=0) for arrays in each]
        return new

    def taken(self, rows: Sequence[int], capacity: int) -> Self:
        """Rows of it, the first ``capacity`` slots, copied."""
        new, index = self.emptied(), mx.array(list(rows), mx.int32)
        if capacity:
            new.capacity = capacity
            live = [array[self._span(array, 0, capacity)] for array in self.arrays]
            new.arrays = [mx.take(array, index, axis=0) for array in live]
        return new

    def put(self, row: int, other: Self, like: mx.array) -> None:
        """Make one row what another store of one row is, which has no fewer groups."""
        if not other.capacity:
            return
        self.reserve(other.capacity, like)
        self.arrays = [array[...] for array in self.arrays]
        for array, part in zip(self.arrays, other.arrays, strict=True):
            array[(slice(row, row + 1), *self._span(array, 0, other.capacity))] = part

    def reserve(self, capacity: int, like: mx.array) -> None:
        """Grow to ``capacity`` slots for tokens like ``like`` [B, H, ·, D]."""
        if capacity <= self.capacity:
            return
        axis, old = self._axis(), self.arrays
        if old:
            samples, slots = old, self.capacity
        else:
            self.head_dim, self.dtype = like.shape[-1], like.dtype
            # Of a group of zeros: shapes and types, never evaluated.
            group = mx.zeros((*like.shape[:2], self.group_size, self.head_dim), self.dtype)
            samples, slots = list(self._encode(group)), 1
        new = []
        for sample in samples:
            shape = list(sample.shape)
            shape[axis] = shape[axis] // slots * (capacity - self.capacity)
            new.append(mx.zeros(shape, sample.dtype))
        if old:
            new = [mx.concatenate([a, b], axis) for a, b in zip(old, new, strict=True)]
        self.arrays = new
        self.capacity = capacity

    def write(self, slot: int, x: mx.array) -> None:
        """Pack tokens x [B, H, n · G, D] into slots ``slot`` … ``slot + n - 1``.

        NaN and infinity become 0: one of them would take all that share its scale with it.
        Packed, numbers beyond ±2^100 become that.
        """
        x = mx.where(mx.isfinite(x), x, 0)
        self._write(slot, mx.clip(x, -_LARGEST, _LARGEST) if self.bits else x)

    def _write(self, slot: int, x: mx.array) -> None:
        groups = x.shape[2] // self.group_size
        # Item assignment changes an object in place, which others may hold: `[...]` is a new one.
        self.arrays = [array[...] for array in self.arrays]
        for array, part in zip(self.arrays, self._encode(x), strict=True):
            array[self._span(array, slot, groups)] = part

    def clear(self, slot: int, groups: int) -> None:
        """Make the tokens of ``groups`` slots from ``slot`` on zero."""
        self.arrays = [array[...] for array in self.arrays]
        for array in self.arrays:
            array[self._span(array, slot, groups)] = 0

    def dense(self, slot: int, groups: int, after: mx.array | None = None) -> mx.array:
        """The tokens of ``groups`` slots from ``slot`` on: [B, H, groups · G, D] of ``dtype``.

        With ``after``, they are unpacked once that array is there: what depends on nothing of a
        step would be unpacked for all layers of a model before the first one runs.
        """
        parts = [array[self._span(array, slot, groups)] for array in self.arrays]
        return self._decode(parts if after is None else mx.depends(parts, [after]))

    def _span(self, array: mx.array, slot: int, groups: int) -> tuple[Any, ...]:
        """Where the tokens of some slots are in one of the arrays."""
        axis = self._axis()
        width = array.shape[axis] // self.capacity
        span = slice(slot * width, (slot + groups) * width)
        return (..., span) if axis == -1 else (..., span, slice(None))

    def live_arrays(self) -> list[mx.array]:
        return list(self.arrays)

    def restore(self, arrays: list[mx.array], head_dim: int, dtype: mx.Dtype) -> list[mx.array]:
        """Take back what `live_arrays` gave, from the front of a list; returns the rest."""
        count = self._count(head_dim)
        self.arrays, self.head_dim, self.dtype = list(arrays[:count]), head_dim, dtype
        slots = self.arrays[-1].shape[self._axis()]
        self.capacity = slots if self._axis() == -1 else slots // self.group_size
        return arrays[count:]

    def _axis(self) -> int:
        return -2 if self.bits is None else self._time_axis

    def _count(self, head_dim: int) -> int:
        """Arrays of a store of so large heads."""
        raise NotImplementedError

    def _encode(self, x: mx.array) -> tuple[mx.array, ...]:
        raise NotImplementedError

    def _decode(self, parts: list[mx.array]) -> mx.array:
        raise NotImplementedError


class KeyStore(GroupStore):
    """Keys, transposed and quantised along time: a scale a channel and group of G tokens.

    Packed arrays: for each part of the channels that has bits of its own, words
    [B, H, channels, capacity · G · bits / 32]; then all scales and all zeros in one array
    [B, H, 2 · D, capacity]. (KIVI, arXiv:2402.02750, section 3.2: outliers sit in fixed channels
    of the keys.)

    Args:
        basis: What the keys are packed in.
    """

    _time_axis = -1

    def __init__(self, bits: int | None, group_size: int, basis: KeyBasis = PLAIN) -> None:
        super().__init__(bits, group_size)
        self.basis = basis
        # Middle of each channel [B, H, 1, D] float32, taken off keys before packing where their
        # 16-bit zeros would be too coarse for a channel with a large bias (`has_shift`).
        self.shift: mx.array | None = None

    def emptied(self) -> KeyStore:
        new = super().emptied()
        new.shift = None
        return new

    @classmethod
    def stacked(cls, stores: Sequence[Self], capacity: int, like: mx.array) -> Self:
        new = super().stacked(stores, capacity, like)
        if capacity and new.has_shift(like.dtype):
            none = mx.zeros((1, like.shape[1], 1, like.shape[3]))
            shifts = [none if store.shift is None else store.shift for store in stores]
            new.shift = mx.concatenate(shifts, axis=0)
        return new

    def taken(self, rows: Sequence[int], capacity: int) -> Self:
        new = super().taken(rows, capacity)
        if capacity and self.shift is not None:
            new.shift = mx.take(self.shift, mx.array(list(rows), mx.int32), axis=0)
        return new

    def put(self, row: int, other: Self, like: mx.array) -> None:
        super().put(row, other, like)
        if other.shift is not None:
            if self.shift is None:
                self.shift = mx.zeros((like.shape[0], like.shape[1], 1, like.shape[3]))
            self.shift = self.shift[...]
            self.shift[row : row + 1] = other.shift

    def has_shift(self, dtype: mx.Dtype) -> bool:
        """Whether a middle is taken off keys of this type, once there are any."""
        return self.bits is not None and (dtype == mx.float32 or self.basis.mixed)

    def _write(self, slot: int, x: mx.array) -> None:
        if self.has_shift(self.dtype):
            x = x.astype(mx.float32)
            if self.shift is None:
                # Of the first group alone: it must not depend on how many came at once.
                first = x[:, :, : self.group_size]
                high, low = first.max(axis=2, keepdims=True), first.min(axis=2, keepdims=True)
                self.shift = high / 2 + low / 2
            x = x - self.shift
        super()._write(slot, x)

    def scores(
        self, queries: mx.array, scale: float = 1, after: mx.array | None = None
    ) -> mx.array:
        """scale · queries [B, H, rows, D] float32 · (keys - shift): [B, H, rows, capacity · G].

        With ``after``, the keys are unpacked, once that array is there.
        """
        queries = self.basis.queries(queries, scale)
        keys = self.packed() if after is None else [self.unpacked(after)]
        if len(keys) == 1:
            return keys[0].scores(queries)
        ends = list(accumulate(part.channels for part in keys))
        each = mx.split(queries, ends[:-1], axis=-1)
        scores = [part.scores(q) for part, q in zip(keys, each, strict=True)]
        return sum(scores[1:], scores[0])

    def packed(self) -> Sequence[PackedKeys | PlainKeys]:
        """Products with the keys where they lie, in their basis, part by part."""
        if self.bits is None:
            return [PlainKeys(self.arrays[0].astype(mx.float32).swapaxes(-1, -2))]
        words, bits, scales, zeros = self._parts(self.arrays)
        packed = zip(words, scales, zeros, bits, strict=True)
        return [PackedKeys(*part, self.group_size) for part in packed]

    def unpacked(self, after: mx.array) -> PlainKeys:
        """The same products in one, from keys that are unpacked once ``after`` is there."""
        if self.bits is None:
            return PlainKeys(self.arrays[0].astype(mx.float32).swapaxes(-1, -2))
        return PlainKeys(self._dequantized(mx.depends(self.arrays, [after])))

    def live_arrays(self) -> list[mx.array]:
        return super().live_arrays() + ([] if self.shift is None else [self.shift])

    def restore(self, arrays: list[mx.array], head_dim: int, dtype: mx.Dtype) -> list[mx.array]:
        rest = super().restore(arrays, head_dim, dtype)
        if self.has_shift(dtype):
            self.shift, rest = rest[0], rest[1:]
        return rest

    def _count(self, head_dim: int) -> int:
        return 1 if self.bits is None else len(self.basis.parts(head_dim, self.bits)) + 1

    def _encode(self, x: mx.array) -> tuple[mx.array, ...]:
        if self.bits is None:
            return (x,)
        keys = self.basis.keys(x).swapaxes(-1, -2)
        dtype = scale_dtype(self.dtype, self.basis.mixed)
        packed, start = [], 0
        for channels, bits in self.basis.parts(self.head_dim, self.bits):
            part = keys[:, :, start : start + channels]
            inset = self.basis.inset(bits)
            packed.append(quantize(part, bits, self.group_size, dtype, inset))
            start += channels
        words, scales, zeros = zip(*packed, strict=True)
        return *words, mx.concatenate([*scales, *zeros], axis=2)

    def _decode(self, parts: list[mx.array]) -> mx.array:
        if self.bits is None:
            return parts[0]
        x = self.basis.back(self._dequantized(parts).swapaxes(-1, -2))
        return stored_as(x if self.shift is None else x + self.shift, self.dtype)

    def _dequantized(self, arrays: list[mx.array]) -> mx.array:
        """Keys [B, H, D, T] float32 in their basis."""
        packed = zip(*self._parts(arrays), strict=True)
        parts = [dequantize(w, s, z, bits, self.group_size) for w, bits, s, z in packed]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)

    def _parts(
        self, arrays: list[mx.array]
    ) -> tuple[list[mx.array], list[int], list[mx.array], list[mx.array]]:
        """Words, bits, scales and zeros of each part, these in float32."""
        assert self.bits
        *words, affine = arrays
        channels, bits = zip(*self.basis.parts(self.head_dim, self.bits), strict=True)
        # Few nodes in the graph of a step: one cast for all.
        ends = list(accumulate([*channels, *channels]))[:-1]
        each = list(mx.split(affine.astype(mx.float32), ends, axis=2))
        return words, list(bits), each[: len(words)], each[len(words) :]


class ValueStore(GroupStore):
    """Values, quantised along the head: a scale a token and group of channels.

    Packed arrays: words [B, H, capacity · G, P · bits / 32], scales and zeros
    [B, H, capacity · G, P / group], P the head size padded to whole groups.

    Args:
        mixed: Whether they are packed in Hadamard's basis.
    """

    def __init__(self, bits: int | None, group_size: int, mixed: bool = False) -> None:
        super().__init__(bits, group_size)
        self.mixed = mixed

    def weighted(self, weights: mx.array, after: mx.array | None = None) -> mx.array:
        """weights [B, H, rows, capacity · G] float32 times the values: [B, H, rows, D].

        With ``after``, the values are unpacked, once that array is there.
        """
        if self.bits is None:
            return weights @ self.arrays[0].astype(mx.float32)
        group, padded = value_group(self.head_dim, self.group_size, self.bits)
        if after is not None:
            words, scales, zeros = mx.depends(self.arrays, [after])
            values = dequantize(words, scales, zeros, self.bits, group)
            return self._back(weights @ values, padded)
        words, scales, zeros = self.arrays
        out = mx.quantized_matmul(
            weights,
            words,
            scales.astype(mx.float32),
            zeros.astype(mx.float32),
            transpose=False,
            group_size=group,
            bits=self.bits,
        )
        return self._back(out, padded)

    def _back(self, x: mx.array, padded: int) -> mx.array:
        """Values [B, H, ·, padded] in their basis as they were: [B, H, ·, D]."""
        if self.mixed:
            return x @ unmix(x.shape[1], self.head_dim, padded)
        return x[..., : self.head_dim] if padded > self.head_dim else x

    def _count(self, head_dim: int) -> int:
        return 1 if self.bits is None else 3

    def _encode(self, x: mx.array) -> tuple[mx.array, ...]:
        if self.bits is None:
            return (x,)
        group, padded = value_group(self.head_dim, self.group_size, self.bits)
        if self.mixed:
            x = x.astype(mx.float32) @ hadamard(x.shape[1], self.head_dim)
        if padded > self.head_dim:
            # Copies of the last channel: they widen no group's range.
            last = x[..., -1:]
            x = mx.concatenate([x, *[last] * (padded - self.head_dim)], axis=-1)
        dtype = scale_dtype(self.dtype, self.mixed)
        return quantize(x, self.bits, group, dtype, value_inset(self.bits, self.mixed))

    def _decode(self, parts: list[mx.array]) -> mx.array:
        if self.bits is None:
            return parts[0]
        group, padded = value_group(self.head_dim, self.group_size, self.bits)
        words, scales, zeros = parts
        x = dequantize(words, scales, zeros, self.bits, group)
        return stored_as(self._back(x, padded), self.dtype)
