"""Rows of a batch in shared arrays, for steps of one token each.

A row is a cache of one sequence whose arrays are here, with those of the others: [B, …] where it
alone has [1, …]. What it counts is still its own, and says which of its slots hold what. A group
that is due is packed where it lies. Whatever else a step does besides writing one token (growing a
margin, counting positions anew) is done by the row itself, taken out and put back: it is what the
row alone would do.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from .attention import CacheView
from .buffers import Pair, joined
from .group_store import ValueStore
from .key_store import KeyStore
from .layout import Plan, Snapshot, additive, snapshot, spans
from .rotation import Moved

Row = Any  # `QuantizedStreamingCache`, which is made of what is here
# What one call sees of a row: placed tokens, groups, and the first stream token in the ring.
Seen = tuple[int, int, int | None]


class Bucket:
    """Rows of like settings.

    Args:
        rows: Caches of one row, of equal `kind`, whose last call was of one token. What is due
            after that call stays due: its queries have yet to see the keys as they are.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        slots = max(row._ring[0].shape[2] for row in rows)
        capacity = max(row._stores[0].capacity for row in rows)
        keys, values = zip(*(row._ring for row in rows), strict=True)
        self.ring: Pair = _stacked(keys, slots), _stacked(values, slots)
        margins = [row._margin or row.no_margin() for row in rows]
        keys, values = zip(*margins, strict=True)
        self.margin: Pair = _stacked(keys), _stacked(values)
        self.stores: tuple[KeyStore, ValueStore] = (
            KeyStore.stacked([row._stores[0] for row in rows], capacity, self.ring[0]),
            ValueStore.stacked([row._stores[1] for row in rows], capacity, self.ring[1]),
        )
        self.rows = [bare(row) for row in rows]

    def __deepcopy__(self, memo: dict[int, Any]) -> Bucket:
        """An independent one; arrays are shared until one of the two is written to."""
        twin = copy.copy(self)
        twin.rows = [copy.copy(row) for row in self.rows]
        return twin

    @property
    def nbytes(self) -> int:
        arrays = [*self.ring, *self.margin]
        return sum(a.nbytes for a in arrays) + sum(
            a.nbytes for store in self.stores for a in store.live_arrays()
        )

    def row(self, i: int) -> Row:
        """Row i as a cache of its own."""
        row = copy.copy(self.rows[i])
        slots = row.plan.full_room(row.seen, row.step)
        keys, values = (_taken(x[:, :, :slots], [i]) for x in self.ring)
        row._ring = keys, values
        if row._margin is not None:
            keys, values = (_taken(x, [i]) for x in self.margin)
            row._margin = keys, values
        capacity = min(self.stores[0].capacity, row.plan.room(row._groups))
        row._stores = self.stores[0].taken([i], capacity), self.stores[1].taken([i], capacity)
        return row

    def keep(self, which: Sequence[int]) -> Bucket:
        """One of these rows alone."""
        new = copy.copy(self)
        new.rows = [copy.copy(self.rows[i]) for i in which]
        # No more room than the longest of them takes.
        slots = max(row.plan.full_room(row.seen, row.step) for row in new.rows)
        keys, values = (_taken(x[:, :, :slots], which) for x in self.ring)
        new.ring = keys, values
        keys, values = (_taken(x, which) for x in self.margin)
        new.margin = keys, values
        room = max(row.plan.room(row._groups) for row in new.rows)
        capacity = min(self.stores[0].capacity, room)
        new.stores = self.stores[0].taken(which, capacity), self.stores[1].taken(which, capacity)
        return new

    def append(self, keys: mx.array, values: mx.array) -> None:
        """A token for each row: keys [B, H, 1, D_k] and values [B, H, 1, D_v]."""
        first = self.rows[0]
        if self.ring[0].shape[2] < first.plan.sink + first.plan.ring:
            self._grow(max(row.plan.full_room(row.seen + 1, row.step) for row in self.rows))
        packing = [i for i, row in enumerate(self.rows) if row.is_due_to_pack()]
        if packing:
            self._pack(packing)
        for i, row in enumerate(self.rows):
            if row.is_due():
                whole = self.row(i)
                whole.append(keys[i : i + 1], values[i : i + 1])
                self._put(i, whole)
            else:
                row.count_one()
        # Those that were put back have theirs, which changes nothing.
        slots = tuple(row.slot_of(row.seen - 1) for row in self.rows)
        ring = []
        for to, x in zip(self.ring, (keys, values), strict=True):
            index = _index(slots, x.shape[1], x.shape[3])
            ring.append(mx.put_along_axis(to, index, x.astype(to.dtype), axis=2))
        self.ring = ring[0], ring[1]

    def view(self) -> CacheView:
        """What the newest token of each row sees."""
        first = self.rows[0]
        seen = tuple((row.seen, row._groups, row.oldest_read(row.seen - 1)) for row in self.rows)
        slots, capacity = self.ring[0].shape[2], self.stores[0].capacity
        shot: Any = bucket_snapshot(first.plan, slots, capacity, seen)
        return CacheView(shot, self.ring, self.stores, None, first._dtype, self._moved(shot.rows))

    def _moved(self, shots: Sequence[Snapshot]) -> Moved | None:
        moved = [row.moved(shot) for row, shot in zip(self.rows, shots, strict=True)]
        rotation = next((m.rotation for m in moved if m), None)
        if rotation is None:
            return None
        return Moved(rotation, 0, _offsets(tuple(m.by if m else 0 for m in moved)))

    def _grow(self, slots: int) -> None:
        more = slots - self.ring[0].shape[2]
        if more > 0:
            keys, values = (_padded(x, slots) for x in self.ring)
            self.ring = keys, values

    def _pack(self, which: Sequence[int]) -> None:
        """Pack a group of each of these rows."""
        plan, rows = self.rows[0].plan, [self.rows[i] for i in which]
        groups = [row._groups for row in rows]
        capacity = max(self.stores[0].capacity, *(plan.room(g + 1) for g in groups))
        self.stores = self.stores[0].copy(), self.stores[1].copy()
        for store, ring in zip(self.stores, self.ring, strict=True):
            store.reserve(capacity, ring)
            tokens = []
            for i, group in zip(which, groups, strict=True):
                start = group * plan.group
                slots = spans(start, start + plan.group, plan.ring)
                at = [slice(plan.sink + s, plan.sink + s + n) for _, s, n in slots]
                tokens.append(joined([ring[i : i + 1, :, span] for span in at]))
            store.write_each(which, groups, mx.concatenate(tokens, axis=0))
        for row in rows:
            row.count_group(capacity)

    def _put(self, i: int, row: Row) -> None:
        """Put a row back that was taken out."""
        at = slice(i, i + 1)
        self._grow(row._ring[0].shape[2])
        keys, values = (x[...] for x in self.ring)
        for to, x in zip((keys, values), row._ring, strict=True):
            to[at, :, : x.shape[2]] = x
        self.ring = keys, values
        if row._margin is not None:
            keys, values = (x[...] for x in self.margin)
            for to, x in zip((keys, values), row._margin, strict=True):
                to[at] = x
            self.margin = keys, values
        self.stores = self.stores[0].copy(), self.stores[1].copy()
        for store, new, like in zip(self.stores, row._stores, self.ring, strict=True):
            store.put(i, new, like)
        self.rows[i] = bare(row)


def bare(row: Row) -> Row:
    """The row without its arrays: what it counts."""
    twin = copy.copy(row)
    keys, values = (mx.zeros((*x.shape[:2], 0, x.shape[3]), x.dtype) for x in row._ring)
    twin._ring = keys, values
    twin._stores = row._stores[0].emptied(), row._stores[1].emptied()
    if row._margin is not None:
        twin._margin = keys, values
    return twin


class BucketSnapshot:
    """What one step of a bucket may see: as `Snapshot` is for one row.

    Attributes:
        rows: Of each row.
        slots: Of the ring, sinks included.
    """

    queries = 1
    chunk = 0

    def __init__(self, plan: Plan, slots: int, capacity: int, seen: Sequence[Seen]) -> None:
        self.plan = plan
        self.slots = slots
        self.capacity = capacity
        self.rows = [snapshot(plan, capacity, n, groups, 0, 1, low) for n, groups, low in seen]
        self.groups = max(groups for _, groups, _ in seen)
        self.sinks = plan.sink
        self.length = max(shot.length for shot in self.rows)

    @cached_property
    def _ring_shown(self) -> np.ndarray:
        return np.concatenate([shot.ring_shown(self.slots) for shot in self.rows])

    @cached_property
    def ring_bias(self) -> mx.array | None:
        """Additive mask of the ring, [B, 1, 1, slots]; None if all of it shows."""
        return additive(self._ring_shown[:, None, None])

    def ring_scores(self, batch: int, heads: int, repeats: int) -> mx.array:
        """The same in the shape of scores, [B, heads, repeats, slots]."""
        return _spread(self, heads, repeats)

    @cached_property
    def store_bias(self) -> mx.array | None:
        """Additive mask of the store, [B, 1, 1, capacity · group]; None if all of it shows."""
        shown = np.concatenate([shot.store_shown() for shot in self.rows])
        return additive(shown[:, None, None])

    def reorder(self, mask: mx.array) -> mx.array:
        """Columns of a mask [B, …, length], each row's in order from the left, as ring and store
        lie."""
        mask = mx.broadcast_to(mask, (len(self.rows), *mask.shape[1:]))
        order = mx.broadcast_to(self._order, (*mask.shape[:-1], self._order.shape[-1]))
        return mx.take_along_axis(mask, order, axis=-1)

    @cached_property
    def _order(self) -> mx.array:
        return mx.array(np.stack([shot.order(self.slots) for shot in self.rows])[:, None, None])


@lru_cache(maxsize=8)
def bucket_snapshot(
    plan: Plan, slots: int, capacity: int, seen: tuple[Seen, ...]
) -> BucketSnapshot:
    """The one that all layers of a step share: what follows from it is computed once."""
    return BucketSnapshot(plan, slots, capacity, seen)


@lru_cache(maxsize=8)
def _spread(shot: BucketSnapshot, heads: int, repeats: int) -> mx.array:
    bias = np.where(shot._ring_shown, np.float32(0), np.float32(-np.inf))[:, None, None]
    shape = len(shot.rows), heads, repeats, shot.slots
    return mx.array(np.ascontiguousarray(np.broadcast_to(bias, shape)))


@lru_cache(maxsize=16)
def _index(slots: tuple[int, ...], heads: int, dim: int) -> mx.array:
    """Where each row's token goes, for `mx.put_along_axis`: [B, heads, 1, dim]."""
    index = np.array(slots, np.int32)[:, None, None, None]
    return mx.array(np.ascontiguousarray(np.broadcast_to(index, (len(slots), heads, 1, dim))))


@lru_cache(maxsize=16)
def _offsets(by: tuple[int, ...]) -> mx.array:
    return mx.array(by, mx.int32)


def _padded(x: mx.array, slots: int) -> mx.array:
    more = slots - x.shape[2]
    if not more:
        return x
    return mx.concatenate([x, mx.zeros((*x.shape[:2], more, x.shape[3]), x.dtype)], axis=2)


def _stacked(parts: Sequence[mx.array], slots: int | None = None) -> mx.array:
    return mx.concatenate([x if slots is None else _padded(x, slots) for x in parts], axis=0)


def _taken(x: mx.array, which: Sequence[int]) -> mx.array:
    """Rows of an array, copied: a slice would keep all the others alive."""
    return mx.take(x, mx.array(list(which), mx.int32), axis=0)
