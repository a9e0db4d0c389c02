"""Positions of models with RoPE: sinks at their index in the cache, and streams without end.

*Re-positioning* (StreamingLLM, arXiv:2309.17453, section 3.2): the position of a kept token is
its index in the cache. RoPE sees differences alone, and inside the window they are right already;
so only the sinks have to come nearer. Stored keys stay as they are: queries that look at the
sinks are turned back instead, at each call anew.

*Re-basing*: the angle of position p has an error of p · 2^-25 radians in float32. Before that
shows, the stream's keys are turned back once and positions are counted from less.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import isfinite, isnan
from typing import NamedTuple

import mlx.core as mx

from .key_store import KeyStore

# Where a cache re-bases, and by how many positions: the error of its angles costs no more than
# storage in 8 bits (docs/positions.md). Powers of two: their products with a frequency are exact.
REBASE_AT = 2**18
REBASE_BY = 2**17


@dataclass(frozen=True)
class Rotation:
    """How the keys of a layer turn from position to position.

    Lengths of vectors never change: a factor that YaRN or LongRoPE put on keys is in them once.

    Args:
        dims: Channels that turn; 0 if the layer has no positions.
        traditional: Whether neighbouring channels are a pair, not channels dims / 2 apart.
        base: Base of the frequencies, or None if ``freqs`` has them.
        scale: Factor of positions.
        freqs: Positions for a turn of one radian, dims / 2 of them.
        last: Whether the channels that turn are the last of a head, not the first.

    Raises:
        ValueError: if a field can't be.
    """

    dims: int
    traditional: bool = False
    base: float | None = None
    scale: float = 1.0
    freqs: tuple[float, ...] | None = None
    last: bool = False

    def __post_init__(self) -> None:
        if self.freqs is not None:
            object.__setattr__(self, "freqs", tuple(float(f) for f in self.freqs))
        dims = self.dims
        if not isinstance(dims, int) or isinstance(dims, bool) or dims < 0 or dims % 2:
            raise ValueError(f"a rotation of {dims!r} channels")
        if not all(isinstance(flag, bool) for flag in (self.traditional, self.last)):
            raise ValueError("a rotation's layout is broken")
        if not isfinite(self.scale) or (dims > 0 and (self.base is None) == (self.freqs is None)):
            raise ValueError("a rotation needs a scale, and either a base or frequencies")
        if self.base is not None and not (isfinite(self.base) and self.base > 0):
            raise ValueError(f"a rotation of base {self.base!r}")
        if self.freqs is not None and (
            2 * len(self.freqs) != dims or any(isnan(f) or f == 0 for f in self.freqs)
        ):
            raise ValueError("a rotation's frequencies are broken")

    def turned(self, x: mx.array, by: int | mx.array) -> mx.array:
        """Keys x [B, H, T, D], each ``by`` positions, or those of its row, later than it is;
        computed in float32."""
        if self.dims == 0 or x.size == 0:
            return x
        # One token a row: they all turn by the same angle.
        rows = x.astype(mx.float32).reshape(x.shape[0], -1, 1, x.shape[-1])
        return self._apply(rows, by, self.scale).reshape(x.shape).astype(x.dtype)

    def turned_back(self, x: mx.array, by: int | mx.array) -> mx.array:
        """Queries x [B, H, L, D], ``by``, ``by`` + 1, … positions earlier, in float32."""
        return self._apply(x.astype(mx.float32), by, -self.scale)

    def _apply(self, x: mx.array, offset: int | mx.array, scale: float) -> mx.array:
        rest = x.shape[-1] - self.dims if self.last else 0
        part = mx.fast.rope(
            x[..., rest:] if rest else x,
            self.dims,
            traditional=self.traditional,
            base=self.base,
            scale=scale,
            offset=offset,
            freqs=None if self.freqs is None else _array(self.freqs),
        )
        return mx.concatenate([x[..., :rest], part], axis=-1) if rest else part


@lru_cache(maxsize=64)
def _array(values: tuple[float, ...]) -> mx.array:
    return mx.array(values, dtype=mx.float32)


class Moved(NamedTuple):
    """Queries from ``row`` of a call on see the sinks ``by``, ``by`` + 1, … positions nearer.

    In a batch, ``by`` is an array: of each of its rows.
    """

    rotation: Rotation
    row: int
    by: int | mx.array

    def sinks(self, x: mx.array) -> mx.array:
        """Sinks x [B, H, N, D] as the only query of a call sees them."""
        return self.rotation.turned(x, self.by)

    def queries(self, x: mx.array) -> mx.array:
        """What of queries x [B, H, L, D] looks at the sinks, in float32."""
        late = self.rotation.turned_back(x[:, :, self.row :], self.by)
        if self.row == 0:
            return late
        return mx.concatenate([x[:, :, : self.row].astype(mx.float32), late], axis=2)


def rebase(rotation: Rotation, by: int, still: int, ring: mx.array, store: KeyStore) -> mx.array:
    """Count the positions of stored keys from ``by`` less; the first ``still`` of the ring stay.

    Packed groups are unpacked, turned and packed again: one more error of the quantiser for the
    tokens that are in the cache at the time.

    Returns:
        The new ring; the store is written to.
    """
    if rotation.dims == 0:
        return ring
    ring = ring[...]
    ring[:, :, still:] = rotation.turned(ring[:, :, still:], -by)
    if store.capacity:
        x = store.dense(0, store.capacity)
        if store.shift is not None:
            store.shift = rotation.turned(store.shift, -by)
        store.write(0, rotation.turned(x, -by))
    return ring


def rebased_by(offset: int, limit: int) -> int:
    """Positions to re-base by once the next one is ``offset``: 0 below the limit."""
    return max(0, (offset - limit) // REBASE_BY + 1) * REBASE_BY
