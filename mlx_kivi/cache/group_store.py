"""Where whole groups of tokens live, packed: what keys (`key_store.py`) and values share; values.

A store is an array of ``capacity`` slots along time, each of one group of G tokens; which group
is in which slot is the cache's business. It is read in place, by ``mx.quantized_matmul``.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx

from ..config import value_group
from .basis import hadamard, unmix, value_inset
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
        self._write(slot, self._packable(x))

    def write_each(self, rows: Sequence[int], groups: Sequence[int], x: mx.array) -> None:
        """Pack tokens x [n, H, G, D]: for each of n rows its group of that number, in its slot."""
        self._write_each(rows, groups, self._packable(x))

    def _packable(self, x: mx.array) -> mx.array:
        x = mx.where(mx.isfinite(x), x, 0)
        return mx.clip(x, -_LARGEST, _LARGEST) if self.bits else x

    def _write(self, slot: int, x: mx.array) -> None:
        groups = x.shape[2] // self.group_size
        # Item assignment changes an object in place, which others may hold: `[...]` is a new one.
        self.arrays = [array[...] for array in self.arrays]
        for array, part in zip(self.arrays, self._encode(x), strict=True):
            array[self._span(array, slot, groups)] = part

    def _write_each(self, rows: Sequence[int], groups: Sequence[int], x: mx.array) -> None:
        self.arrays = [array[...] for array in self.arrays]
        for array, parts in zip(self.arrays, self._encode(x), strict=True):
            for n, (row, group) in enumerate(zip(rows, groups, strict=True)):
                span = self._span(array, group % self.capacity, 1)
                array[(slice(row, row + 1), *span)] = parts[n : n + 1]

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
