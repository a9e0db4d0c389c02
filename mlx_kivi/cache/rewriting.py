"""Changing what a cache has stored: forgetting the newest tokens, and packing by another policy."""

from __future__ import annotations

import mlx.core as mx

from ..config import KVCacheConfig
from .buffers import Buffers, joined
from .layout import can_pack, plan_for, spans


class Rewriting(Buffers):
    """Buffers that can go back to fewer tokens, and change from full precision to packed."""

    def is_trimmable(self) -> bool:
        """Whether any number of tokens can be trimmed: false once some have been evicted."""
        return not self.plan.evicted(self._count)

    def can_trim(self, n: int) -> bool:
        """Whether `trim` can take back n tokens: after eviction, the last 32 at least."""
        target = self._count - n
        if n < 0 or target < 0:
            return False
        placed = self._count - self._chunk_length()
        if target >= placed:
            return True
        stream = max(0, target - self.plan.sink)
        low = max(0, self.plan.first_visible(target) - self.plan.sink)
        packed = self.plan.groups(target) * self.plan.group
        if low < packed:
            return low >= self._oldest and low // self.plan.group >= self._store_low
        return stream <= low or low >= self._ring_low or self._in_store(low)

    def trim(self, n: int) -> int:
        """Forget the last n tokens, all or none of them.

        Exact for the last 32 that were ever appended at least. Further back, without eviction,
        tokens that would still be in full precision return with the precision they were packed in.

        Returns:
            The number of tokens forgotten: min(n, offset), or 0 if they can't be.
        """
        n = min(n, self._count - self._rebased)
        if n <= 0 or not self.can_trim(n):
            return 0
        target = self._count - n
        placed = self._count - self._chunk_length()
        if self._chunk is not None and target > placed:
            keys, values = self._chunk
            self._chunk = keys[:, :, : target - placed], values[:, :, : target - placed]
            self._reopen(self.plan.groups(target), max(0, target - self.plan.sink))
        else:
            self._chunk = None
            self._forget(target, placed)
        self._count = target
        self._queries = 1
        return n

    def _forget(self, target: int, placed: int) -> None:
        """Make ``placed`` tokens in ring, margin and stores the first ``target`` of them."""
        start, stop = (max(0, count - self.plan.sink) for count in (target, placed))
        if self.plan.residual is None:
            self._restore(start, stop)
        else:
            self._reopen(self.plan.groups(target), start)
        # What trim went back beyond is in no slot any more.
        self._ring_low = min(self._ring_low, start)
        self._store_low = min(self._store_low, self._groups)
        self._oldest = min(self._oldest, start)
        if self.plan.residual is not None and start < stop:
            # Attention multiplies hidden slots too: what is forgotten must not be NaN there.
            free = self._ring_low + self.plan.ring - start
            self._place(start, self._zeros(min(stop - start, free)))

    def _restore(self, start: int, stop: int) -> None:
        """Bring back what stream tokens [start, stop) of an unpacked window pushed out."""
        first = max(self._ring_low, start - self.plan.ring)
        end = min(stop - self.plan.ring, start)
        if self._margin is not None and first < end:
            keys, values = (joined(self._in_margin(which, first, end)) for which in range(2))
            self._place(first, (keys, values))

    def _reopen(self, groups: int, end: int) -> None:
        """Unpack tokens of a stream of ``end``, ``groups`` groups of which are to stay packed."""
        forgotten = self._groups - groups
        if forgotten <= 0:
            return
        start, stop = groups * self.plan.group, min(self._ring_low, end)
        if start < stop:
            # Packed tokens that must be in the ring again.
            keys, values = (
                joined([store.dense(slot, count) for _, slot, count in self._slots(groups, stop)])
                for store in self._stores
            )
            self._place(start, (keys[:, :, : stop - start], values[:, :, : stop - start]))
            self._ring_low = start
        if groups == 0:
            self._stores = self._new_stores(self._ring[1])
        else:
            self._copy_stores()
            first = max(groups, self._groups - self._stores[0].capacity)
            for store in self._stores:
                for _, slot, count in spans(first, self._groups, store.capacity):
                    store.clear(slot, count)
        self._groups = groups

    def _slots(self, groups: int, stop: int) -> list[tuple[int, int, int]]:
        """Where the groups from number ``groups`` on are that reach to stream index ``stop``."""
        whole = -(-stop // self.plan.group)
        return list(spans(groups, whole, self._stores[0].capacity))

    def _in_margin(self, which: int, start: int, stop: int) -> list[mx.array]:
        """Stream tokens from the margin, in parts."""
        if self._margin is None:
            return []
        x = self._margin[which]
        return [x[:, :, slot : slot + n] for _, slot, n in spans(start, stop, self.plan.margin)]

    def _in_store(self, stream: int) -> bool:
        group = stream // self.plan.group
        return self._oldest <= stream and self._store_low <= group < self._groups

    def _pack_by(self, config: KVCacheConfig) -> None:
        """Hold the same tokens by a policy that differs in bits and group size alone.

        Only for buffers in full precision.
        """
        self._settle()
        self.config = config
        if self.empty():
            self.plan = plan_for(config, can_pack(config))
            return
        end, low = max(0, self._count - self.plan.sink), self._ring_low
        left = max(low, end - self.plan.ring)
        ring, dtype = self._ring, self._dtype
        stream = [
            joined([*self._in_margin(which, low, left), *self._in_ring(which, left, end)])
            for which in range(2)
            if low < end
        ]
        self._allocate(*ring)
        self._dtype, self._margin = dtype, None
        self._grow(self._count)
        sinks = min(self._count, self.plan.sink)
        if sinks:
            self._write_ring(0, sinks, (ring[0][:, :, :sinks], ring[1][:, :, :sinks]))
        if not stream:
            return
        fill = low % self.plan.group if self.plan.residual is not None else 0
        if fill:
            # The oldest group is packed whole: copies in place of what was evicted of it.
            stream = [mx.concatenate([*[x[:, :, :1]] * fill, x], axis=2) for x in stream]
        if self.plan.residual is not None:
            self._groups = self._store_low = (low - fill) // self.plan.group
            self._oldest = low
        self._chunk = stream[0], stream[1]
        self._settle()
