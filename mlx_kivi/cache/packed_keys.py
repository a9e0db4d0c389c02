"""Keys of a store, multiplied where they lie."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx


class PackedKeys(NamedTuple):
    """Words [B, H, D, T · bits / 32], scales and zeros [B, H, D, T / G] float32."""

    words: mx.array
    scales: mx.array
    zeros: mx.array
    bits: int
    group_size: int

    @property
    def channels(self) -> int:
        return self.words.shape[2]

    def scores(self, queries: mx.array) -> mx.array:
        """queries [B, H, rows, D] float32 times the keys: [B, H, rows, T]."""
        return self._product(queries, transpose=False)

    def weighted(self, weights: mx.array) -> mx.array:
        """weights [B, H, rows, T] float32 times the keys: [B, H, rows, D]."""
        return self._product(weights, transpose=True)

    def _product(self, x: mx.array, transpose: bool) -> mx.array:
        return mx.quantized_matmul(
            x,
            self.words,
            self.scales,
            self.zeros,
            transpose=transpose,
            group_size=self.group_size,
            bits=self.bits,
        )


class PlainKeys(NamedTuple):
    """Keys [B, H, D, T] in float32."""

    keys: mx.array

    @property
    def channels(self) -> int:
        return self.keys.shape[2]

    def scores(self, queries: mx.array) -> mx.array:
        """As `PackedKeys.scores`."""
        return queries @ self.keys

    def weighted(self, weights: mx.array) -> mx.array:
        """As `PackedKeys.weighted`."""
        return weights @ self.keys.swapaxes(-1, -2)
