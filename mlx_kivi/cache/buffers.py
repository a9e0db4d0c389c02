"""The buffers of one layer's cache, and how tokens move through them.

Sinks and recent tokens share one buffer, the *ring*; packed groups live in a pair of *stores*
(`layout.py` says which token is in which slot). All of them are written in place. A chunk of
several tokens stays beside them until the next call, so that it attends to itself in full
precision (KIVI, arXiv:2402.02750, section 3.3) and what it evicts is still there while it runs.
An unpacked window keeps what it evicted last in a *margin*, which attention never reads.
"""

from __future__ import annotations

import mlx.core as mx

from ..config import KVCacheConfig
from .basis import Balance, key_basis
from .group_store import ValueStore
from .key_store import KeyStore
from .layout import Plan, can_pack, plan_for, spans
from .rotation import Rotation, rebase
from .sizes import Heads, best_plan

Pair = tuple[mx.array, mx.array]
_NOTHING: Pair = (mx.zeros((0, 0, 0, 0)), mx.zeros((0, 0, 0, 0)))


class Buffers:
    """Ring, stores and chunk of a cache, for a policy ``config``."""

    step = 256  # tokens by which a ring grows

    config: KVCacheConfig
    rotation: Rotation | None
    balance: Balance | None

    def reset(self) -> None:
        """Forget every token, as if newly made."""
        # Until the first token says what packing saves.
        self.plan: Plan = plan_for(self.config, can_pack(self.config))
        # Views of attention hold these two: what is written to is a copy (of no data; see `_own`).
        self._ring: Pair = _NOTHING  # keys, values: [B, H, sink + ring, D], while it grows less
        self._stores = self._new_stores(self._ring[1])
        self._margin: Pair | None = None  # keys, values: [B, H, margin, D], once a token left
        self._chunk: Pair | None = None  # keys, values: [B, H, L, D], the newest tokens
        self._dtype = mx.float32  # of the model
        self._queries = 1  # rows of the last call
        self._groups = 0
        self._count = 0  # tokens
        self._rebased = 0  # positions that are not counted any more
        self._to_turn = 0  # those of them by which the stored keys are still ahead
        # What trim may go back to: the oldest stream token in ring and margin, the oldest group
        # stored, and the oldest token that is not a filler in that group.
        self._ring_low = 0
        self._store_low = 0
        self._oldest = 0

    def empty(self) -> bool:
        return self._ring is _NOTHING

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays that are alive, unused slots included."""
        chunk = self._chunk or ()
        return sum(a.nbytes for a in (*self._arrays(), *chunk))

    @property
    def packed_tokens(self) -> int:
        """Tokens held in packed groups now."""
        return max(0, self.plan.groups(self._count) - self._store_low) * self.plan.group

    def is_due(self) -> bool:
        """Whether one more token takes more than writing it into its slot of the ring."""
        plan, stream = self.plan, self._count - self.plan.sink
        if self._to_turn or self._chunk is not None or plan.groups(self._count) > self._groups:
            return True
        return plan.margin > 0 and plan.spared(stream) != plan.spared(stream + 1)

    def is_due_to_pack(self) -> bool:
        """Whether a group, and nothing else, is due before one more token."""
        others = self._chunk is not None or self._to_turn
        return not others and self.plan.groups(self._count) == self._groups + 1

    def count_group(self, capacity: int) -> None:
        """The group that was due has been packed by others, in a store of so many slots."""
        self._groups += 1
        self._store_low = max(self._store_low, self._groups - capacity)

    def count_one(self) -> None:
        """A token that is not due has been written by others."""
        self._count += 1
        self._queries = 1
        if not self.plan.keeps_all:
            self._ring_low = max(self._ring_low, self._count - self.plan.sink - self.plan.kept)

    def slot_of(self, position: int) -> int:
        """The slot of the ring that the token at a position goes to."""
        plan = self.plan
        stream = position - plan.sink
        return position if stream < 0 else plan.sink + stream % plan.ring

    def no_margin(self) -> Pair:
        """A margin that nothing has come to yet."""
        return self._zeros(self.plan.margin)

    def _settle(self) -> None:
        """Pack the groups that are due, move a chunk into the ring, and turn keys to re-base."""
        groups = self.plan.groups(self._count)
        if groups > self._groups:
            self._pack(groups)
        if self._chunk is not None:
            self._place_chunk(self._chunk)
        if self._to_turn and self.rotation is not None:
            self._turn(self.rotation)

    def _turn(self, rotation: Rotation) -> None:
        """Count the positions of stored keys anew."""
        still = self.plan.sink if self.config.reposition else 0
        keys, values = self._ring
        self._copy_stores()
        keys = rebase(rotation, self._to_turn, still, keys, self._stores[0])
        self._ring = keys, values
        if self._margin is not None:
            self._margin = rotation.turned(self._margin[0], -self._to_turn), self._margin[1]
        self._to_turn = 0

    def _pack(self, groups: int) -> None:
        """Pack stream tokens until ``groups`` groups are in the stores."""
        size = self.plan.group
        first = self._groups
        capacity = max(self._stores[0].capacity, self.plan.room(groups))
        if self.plan.slots is not None:
            first = max(first, groups - capacity)
        placed = max(0, self._count - self._chunk_length() - self.plan.sink)
        self._copy_stores()
        for which, store in enumerate(self._stores):
            store.reserve(capacity, self._ring[which])
            parts = self._in_ring(which, first * size, min(groups * size, placed))
            if self._chunk is not None and groups * size > placed:
                # The chunk begins at ``placed``, or before it while it holds sinks.
                skip = self._chunk_length() - (self._count - self.plan.sink - placed)
                begin = skip + max(first * size, placed) - placed
                parts.append(self._chunk[which][:, :, begin : skip + groups * size - placed])
            x = joined(parts)
            for g, slot, count in spans(first, groups, capacity):
                store.write(slot, x[:, :, (g - first) * size : (g - first + count) * size])
        self._store_low = max(self._store_low, groups - capacity)
        self._groups = groups

    def _place_chunk(self, chunk: Pair) -> None:
        sink, length = self.plan.sink, self._chunk_length()
        placed = self._count - length
        self._grow(self._count)
        sinks = min(max(0, sink - placed), length)
        if sinks:
            first = chunk[0][:, :, :sinks], chunk[1][:, :, :sinks]
            self._write_ring(placed, placed + sinks, first)
        if sinks < length:
            rest = chunk[0][:, :, sinks:], chunk[1][:, :, sinks:]
            self._place(placed + sinks - sink, self._spared(placed + sinks - sink, rest))
        self._chunk = None
        self._queries = 1

    def _place(self, start: int, pair: Pair) -> None:
        """Write stream tokens [B, H, L, D] from index ``start`` on into the ring."""
        sink, ring = self.plan.sink, self.plan.ring
        stop = start + pair[0].shape[2]
        self._own()
        for j, slot, count in spans(max(start, stop - ring), stop, ring):
            for x, to in zip(pair, self._ring, strict=True):
                part = x[:, :, j - start : j - start + count]
                to[:, :, sink + slot : sink + slot + count] = part

    def _spared(self, start: int, pair: Pair) -> Pair:
        """Copy what stream tokens from index ``start`` on push out of the ring to the margin.

        A block at a time: a ring that is read from can't be written in place in the same step.

        Returns:
            The tokens [B, H, L, D], to be written when that is done.
        """
        plan, margin, stop = self.plan, self.plan.margin, start + pair[0].shape[2]
        self._ring_low = max(self._ring_low, stop - plan.kept)
        if margin == 0 or plan.spared(start) == plan.spared(stop):
            return pair
        end = plan.spared(stop)
        if self._margin is None:
            self._margin = self._zeros(margin)
        keys, values = self._margin
        self._margin = keys[...], values[...]
        first = max(plan.spared(start), end - margin)
        for which, to in enumerate(self._margin):
            parts = self._in_ring(which, first, min(end, start))
            if end > start:
                parts.append(pair[which][:, :, max(first, start) - start : end - start])
            x = joined(parts)
            for j, slot, count in spans(first, end, margin):
                to[:, :, slot : slot + count] = x[:, :, j - first : j - first + count]
        # Else copies that nothing asks for would pile up in a lazy graph, and old rings with them.
        keys, values = mx.depends(list(pair), list(self._margin))
        return keys, values

    def _in_ring(self, which: int, start: int, stop: int) -> list[mx.array]:
        """Stream tokens from the ring, in parts."""
        ring, sink = self._ring[which], self.plan.sink
        return [
            ring[:, :, sink + slot : sink + slot + count]
            for _, slot, count in spans(start, stop, self.plan.ring)
        ]

    def _write_ring(self, slot: int, end: int, pair: Pair) -> None:
        self._own()
        self._ring[0][:, :, slot:end] = pair[0]
        self._ring[1][:, :, slot:end] = pair[1]

    def _own(self) -> None:
        """New objects for the ring: item assignment changes the old ones, which views hold."""
        keys, values = self._ring
        self._ring = keys[...], values[...]

    def _copy_stores(self) -> None:
        keys, values = self._stores
        self._stores = keys.copy(), values.copy()

    def _grow(self, length: int) -> None:
        """Room in the ring for a cache of ``length`` tokens."""
        have = self._ring[0].shape[2]
        more = self.plan.full_room(length, self.step) - have
        if more <= 0:
            return
        keys, values = self._zeros(more)
        if have:
            keys = mx.concatenate([self._ring[0], keys], axis=2)
            values = mx.concatenate([self._ring[1], values], axis=2)
        self._ring = keys, values

    def shrink(self) -> None:
        """Let go of slots that hold nothing, which come back with the next token."""
        self._settle()
        if self._count:
            held = self.plan.held(self._count)
            # A slice alone would keep all of the buffer alive.
            keys, values = (mx.contiguous(x[:, :, :held]) for x in self._ring)
            self._ring = keys, values

    def _zeros(self, slots: int) -> Pair:
        keys, values = (mx.zeros((*x.shape[:2], slots, x.shape[3]), x.dtype) for x in self._ring)
        return keys, values

    def _allocate(self, keys: mx.array, values: mx.array) -> None:
        self._dtype = keys.dtype
        heads = Heads(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
        self.plan = best_plan(self.config, heads, self.balance is not None)
        k, v = (
            mx.zeros((*x.shape[:2], 0, x.shape[3]), self._storage_dtype(x)) for x in (keys, values)
        )
        self._ring = k, v
        self._stores = self._new_stores(values)

    def _new_stores(self, values: mx.array) -> tuple[KeyStore, ValueStore]:
        group = self.plan.group
        # Some models store keys alone and pass values of head size 0.
        config, v_bits = self.config, self.config.v_bits if values.shape[3] else None
        keys = KeyStore(config.k_bits, group, key_basis(config, self.balance))
        return keys, ValueStore(v_bits, group, config.moves_values)

    def _storage_dtype(self, x: mx.array) -> mx.Dtype:
        return x.dtype if self.config.dtype is None else getattr(mx, self.config.dtype)

    def _arrays(self) -> list[mx.array]:
        packed = [a for store in self._stores for a in store.live_arrays()]
        return [*self._ring, *(self._margin or ()), *packed]

    def _chunk_length(self) -> int:
        return 0 if self._chunk is None else self._chunk[0].shape[2]


def joined(parts: list[mx.array]) -> mx.array:
    """Parts along time as one array."""
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
