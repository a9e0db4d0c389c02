"""Packed keys: quantised per channel, along time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Self

import mlx.core as mx

from .basis import PLAIN, KeyBasis
from .group_store import GroupStore, scale_dtype, stored_as
from .packed_keys import PackedKeys, PlainKeys
from .quantization import dequantize, quantize


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
                self.shift = _middle(x[:, :, : self.group_size])
            x = x - self.shift
        super()._write(slot, x)

    def _write_each(self, rows: Sequence[int], groups: Sequence[int], x: mx.array) -> None:
        if self.has_shift(self.dtype):
            x = x.astype(mx.float32)
            if self.shift is None:
                self.shift = mx.zeros((self.arrays[0].shape[0], x.shape[1], 1, x.shape[3]))
            self.shift, middle = self.shift[...], _middle(x)
            for n, (row, group) in enumerate(zip(rows, groups, strict=True)):
                if group == 0:
                    self.shift[row : row + 1] = middle[n : n + 1]
            x = x - mx.take(self.shift, mx.array(list(rows), mx.int32), axis=0)
        super()._write_each(rows, groups, x)

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


def _middle(x: mx.array) -> mx.array:
    """Half way between the extremes of each channel: [B, H, 1, D]."""
    return x.max(axis=2, keepdims=True) / 2 + x.min(axis=2, keepdims=True) / 2
