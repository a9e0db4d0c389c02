"""The buffers of one layer's cache, and how tokens move through them.

Sinks and recent tokens share one buffer, the *ring*; packed groups live in a pair of *stores*
(`layout.py` says which token is in which slot). All of them are written in place. A chunk of
several tokens stays beside them until the next call, so that it attends to itself in full
precision (KIVI, arXiv:2402.02750, section 3.3) and what it evicts is still there while it runs.
"""

from __future__ import annotations

import mlx.core as mx

from ..config import KVCacheConfig
from .group_store import KeyStore, ValueStore
from .layout import Plan, plan_for, spans
from .rotation import Rotation, rebase

Pair = tuple[mx.array, mx.array]


class Buffers:
    """Ring, stores and chunk of a cache, for a policy ``config``."""

    step = 256  # tokens by which a ring without bound grows

    config: KVCacheConfig
    rotation: Rotation | None

    def reset(self) -> None:
        """Forget every token, as if newly made."""
        self.plan: Plan = plan_for(self.config)
        # Views of attention hold these two: what is written to is a copy (of no data; see `_own`).
        self._ring: Pair | None = None  # keys, values: [B, H, sink + ring, D]
        self._stores: tuple[KeyStore, ValueStore] | None = None
        self._chunk: Pair | None = None  # keys, values: [B, H, L, D], the newest tokens
        self._dtype: mx.Dtype | None = None  # of the model
        self._queries = 1  # rows of the last call, but for
        self._cut = 0  # rows before them that see one packed group less
        self._groups = 0
        self._count = 0  # tokens
        self._rebased = 0  # positions that are not counted any more
        self._to_turn = 0  # those of them by which the stored keys are still ahead
        # What trim may go back to: the oldest stream token in the ring, the oldest group stored.
        self._ring_low = 0
        self._store_low = 0

    def empty(self) -> bool:
        return self._ring is None

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays that are alive, unused slots included."""
        chunk = self._chunk or ()
        return sum(a.nbytes for a in (*self._arrays(), *chunk))

    @property
    def packed_tokens(self) -> int:
        """Tokens held in packed groups now."""
        return max(0, self.plan.groups(self._count) - self._store_low) * self.plan.group

    def _settle(self) -> None:
        """Pack the groups that are due, move a chunk into the ring, and turn keys to re-base."""
        groups = self.plan.groups(self._count)
        if groups > self._groups:
            self._pack(groups)
        if self._chunk is not None and self.plan.ring is not None:
            self._place_chunk()
        if self._to_turn:
            keys, values = self._ring
            self._stores = tuple(store.copy() for store in self._stores)
            still = self.plan.sink if self.config.reposition else 0
            keys = rebase(self.rotation, self._to_turn, still, keys, self._stores[0])
            self._ring = keys, values
            self._to_turn = 0

    def _pack(self, groups: int) -> None:
        """Pack stream tokens until ``groups`` groups are in the stores."""
        size = self.plan.group
        first = self._groups
        capacity = max(self._stores[0].capacity, self.plan.room(groups))
        if self.plan.slots is not None:
            first = max(first, groups - capacity)
        placed = max(0, self._count - self._chunk_length() - self.plan.sink)
        self._stores = tuple(store.copy() for store in self._stores)
        for which, store in enumerate(self._stores):
            store.reserve(capacity, self._ring[which])
            parts = []
            for _, slot, count in spans(first * size, min(groups * size, placed), self.plan.ring):
                slot += self.plan.sink
                parts.append(self._ring[which][:, :, slot : slot + count])
            if groups * size > placed:
                # The chunk begins at ``placed``, or before it while it holds sinks.
                skip = self._chunk_length() - (self._count - self.plan.sink - placed)
                begin = skip + max(first * size, placed) - placed
                parts.append(self._chunk[which][:, :, begin : skip + groups * size - placed])
            x = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
            for g, slot, count in spans(first, groups, capacity):
                store.write(slot, x[:, :, (g - first) * size : (g - first + count) * size])
        self._store_low = max(self._store_low, groups - capacity)
        self._groups = groups

    def _place_chunk(self) -> None:
        end = self._count - self.plan.sink
        placed = self._count - self._chunk_length()
        self._own()
        for which, x in enumerate(self._chunk):
            sinks = min(max(0, self.plan.sink - placed), x.shape[2])
            if sinks:
                self._ring[which][:, :, placed : placed + sinks] = x[:, :, :sinks]
            if sinks < x.shape[2]:
                self._place(which, placed + sinks - self.plan.sink, x[:, :, sinks:])
        self._ring_low = max(self._ring_low, end - self.plan.ring)
        self._chunk = None
        self._queries = 1

    def _place(self, which: int, start: int, x: mx.array) -> None:
        """Write stream tokens x [B, H, L, D] from index ``start`` on into the ring."""
        sink, ring = self.plan.sink, self.plan.ring
        skip = max(0, x.shape[2] - ring)
        for j, slot, count in spans(start + skip, start + x.shape[2], ring):
            part = x[:, :, j - start : j - start + count]
            self._ring[which][:, :, sink + slot : sink + slot + count] = part

    def _write_ring(self, slot: int, end: int, pair: Pair) -> None:
        self._own()
        self._ring[0][:, :, slot:end] = pair[0]
        self._ring[1][:, :, slot:end] = pair[1]

    def _own(self) -> None:
        """New objects for the ring: item assignment changes the old ones, which views hold."""
        keys, values = self._ring
        self._ring = keys[...], values[...]

    def _grow(self, length: int) -> None:
        """Room for ``length`` tokens in a ring without end."""
        have = self._ring[0].shape[2]
        if length <= have:
            return
        more = -(-(length - have) // self.step) * self.step
        self._ring = tuple(
            mx.concatenate([a, mx.zeros((*a.shape[:2], more, a.shape[3]), a.dtype)], axis=2)
            for a in self._ring
        )

    def _reopen(self, target: int) -> None:
        """Make the placed tokens those of a cache that has seen ``target`` tokens."""
        groups = self.plan.groups(target)
        if groups >= self._groups:
            return
        start, end = groups * self.plan.group, max(0, target - self.plan.sink)
        if start < min(self._ring_low, end):
            # Packed tokens that must be in the ring again.
            stop = min(self._ring_low, end)
            whole = -(-stop // self.plan.group)
            self._own()
            for which, store in enumerate(self._stores):
                packed = [
                    store.dense(slot, count)
                    for _, slot, count in spans(groups, whole, store.capacity)
                ]
                x = mx.concatenate(packed, axis=2)[:, :, : stop - start]
                self._place(which, start, x)
            self._ring_low = start
        self._groups = groups

    def _in_store(self, stream: int) -> bool:
        group = stream // self.plan.group
        return self._store_low <= group < self._groups

    def _allocate(self, keys: mx.array, values: mx.array) -> None:
        self._dtype = keys.dtype
        length = 0 if self.plan.ring is None else self.plan.sink + self.plan.ring
        self._ring = tuple(
            mx.zeros((*x.shape[:2], length, x.shape[3]), self._storage_dtype(x))
            for x in (keys, values)
        )
        self._stores = self._new_stores(values)

    def _new_stores(self, values: mx.array) -> tuple[KeyStore, ValueStore]:
        group = self.plan.group
        # Some models store keys alone and pass values of head size 0.
        v_bits = self.config.v_bits if values.shape[3] else None
        return KeyStore(self.config.k_bits, group), ValueStore(v_bits, group)

    def _storage_dtype(self, x: mx.array) -> mx.Dtype:
        return x.dtype if self.config.dtype is None else getattr(mx, self.config.dtype)

    def _arrays(self) -> list[mx.array]:
        stores = self._stores or ()
        return [*(self._ring or ()), *(a for s in stores for a in s.live_arrays())]

    def _chunk_length(self) -> int:
        return 0 if self._chunk is None else self._chunk[0].shape[2]
