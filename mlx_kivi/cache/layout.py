"""Which token is where: the arithmetic of a cache, in whole numbers.

Positions count from the start of the sequence. The first ``sink`` positions are the sinks; the
rest form the stream, indexed j = position - sink. The ring holds the sinks, then ``ring`` slots
for the newest of the stream (slot j mod ring); the margin holds tokens that left the ring last, and
those of their block that are next (slot j mod margin); the store holds packed groups of ``group``
tokens (slot g mod capacity).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ..config import TRIM_MARGIN, KVCacheConfig

UNBOUNDED = 2**62  # slots of a ring that grows for ever


class Plan(NamedTuple):
    """Sizes that follow from a policy.

    sink: sinks; ring: full-precision slots of the stream; margin: slots beside it for what trim may
    bring back, 0 if the ring itself has room for that; group: tokens in a packed group; residual:
    stream tokens that stay unpacked, None if all do; slots: groups in the store, None if it
    grows; window: as in the policy.
    """

    sink: int
    ring: int
    margin: int
    group: int
    residual: int | None
    slots: int | None
    window: int | None

    @property
    def keeps_all(self) -> bool:
        """Whether the ring holds every token: nothing is packed, nothing is evicted."""
        return self.ring == UNBOUNDED

    def groups(self, seen: int) -> int:
        """Groups that are packed once ``seen`` tokens are in: a function of the count alone."""
        if self.residual is None:
            return 0
        return max(0, seen - self.sink - self.residual) // self.group

    def held(self, seen: int) -> int:
        """Slots of sinks and ring that hold a token once ``seen`` tokens are in."""
        return min(seen, self.sink + self.ring)

    def full_room(self, seen: int, step: int) -> int:
        """Slots to keep for sinks and ring: they grow by ``step`` tokens until all are in use."""
        total = self.sink + self.ring
        return total if self.groups(seen) else min(total, -(-seen // step) * step)

    @property
    def kept(self) -> int:
        """Stream tokens that are in ring or margin at any time."""
        return self.ring + (TRIM_MARGIN if self.margin else 0)

    def spared(self, stream: int) -> int:
        """Stream tokens that are in the margin, or were, once the stream has so many.

        They go there in blocks, before the first of a block is overwritten.
        """
        block = self.margin - TRIM_MARGIN
        return -(-(stream - self.ring) // block) * block if stream > self.ring else 0

    def spares(self, seen: int) -> bool:
        """Whether tokens have left the ring for the margin."""
        return self.margin > 0 and seen > self.sink + self.ring

    @property
    def recent(self) -> int:
        """Stream tokens before a query that are in the ring still, whatever is packed of them."""
        return self.ring - TRIM_MARGIN

    def room(self, groups: int) -> int:
        """Slots of a store that holds ``groups`` groups: one step to spare, a window's at most.

        Steps are a fiftieth of the store, 256 tokens at the most: copied seldom, and little of
        it held and computed on for nothing.
        """
        step = max(1, min(groups // 50, 256 // self.group))
        room = -(-groups // step) * step
        return room if self.slots is None else min(room, self.slots)

    def until_packing(self, seen: int) -> int | None:
        """Tokens that follow ``seen`` ones before another group is packed; None: it never is."""
        if self.residual is None:
            return None
        return self.sink + self.residual + (self.groups(seen) + 1) * self.group - seen

    def evicted(self, seen: int) -> bool:
        """Whether a query that follows ``seen`` tokens can no longer attend to all of them."""
        return self.window is not None and seen - self.sink >= self.window

    def first_visible(self, query: int) -> int:
        """The oldest position of the stream that a query at position ``query`` may see."""
        return self.sink if self.window is None else max(self.sink, query - self.window + 1)


def can_pack(config: KVCacheConfig) -> bool:
    """Whether a policy asks for bits, and its window leaves tokens to pack beside the residual."""
    unpacked = config.residual_length + config.group_size
    return config.quantized and (config.window is None or config.window > unpacked)


def plan_for(config: KVCacheConfig, packed: bool) -> Plan:
    """The sizes for a policy, of a cache that packs groups or one that does not."""
    sink, group, window = config.sink, config.group_size, config.window
    if not packed:
        if window is None:
            return Plan(sink, UNBOUNDED, 0, group, None, None, None)
        margin = TRIM_MARGIN + min(TRIM_MARGIN, window)
        return Plan(sink, window, margin, group, None, None, window)
    residual = config.residual_length
    slots = None if window is None else -(-(window + TRIM_MARGIN - 1 - residual) // group)
    # Room for the residual, the group that is filling up, and what trim may take back.
    return Plan(sink, residual + group + TRIM_MARGIN, 0, group, residual, slots, window)


def spans(start: int, stop: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Cut [start, stop) where it wraps in a ring of ``size``: (start, slot, length) of each."""
    while start < stop:
        slot = start % size
        length = min(stop - start, size - slot)
        yield start, slot, length
        start += length


@dataclass(frozen=True)
class Snapshot:
    """What one call of attention may see: made by `snapshot`.

    plan: sizes; capacity: groups the store has room for now; placed: tokens in ring and store;
    groups: packed ones; chunk: newer tokens, not yet placed; queries: rows, the newest tokens;
    oldest: the first stream token in the ring, 0 if no query reads back so far, None if all that
    is packed is read from the store, by all rows alike.
    """

    plan: Plan
    capacity: int
    placed: int
    groups: int
    chunk: int
    queries: int
    oldest: int | None = None

    @cached_property
    def first_query(self) -> int:
        return self.placed + self.chunk - self.queries

    @cached_property
    def low(self) -> int:
        """The oldest placed position of the stream that any query may see."""
        return min(self.plan.first_visible(self.first_query), max(self.placed, self.plan.sink))

    @cached_property
    def sinks(self) -> int:
        return min(self.plan.sink, self.placed)

    @property
    def length(self) -> int:
        """Tokens that at least one query sees."""
        return self.sinks + max(0, self.placed - self.low) + self.chunk

    @cached_property
    def linear(self) -> bool:
        """Whether the first ``placed`` slots of the ring are what is visible, in order."""
        plan = self.plan
        fits = self.placed <= plan.sink + plan.ring
        return fits and self.groups == 0 and self.low == plan.sink

    def packed(self, rows: np.ndarray) -> np.ndarray:
        """Stream tokens that queries at positions ``rows`` read from the store: the first so many.

        Those that follow are read from ring and chunk, though some of them may be packed too.
        """
        stored = self.groups * self.plan.group
        if self.oldest is None:
            return np.full(rows.shape, stored)
        if self.queries > TRIM_MARGIN:
            rows = np.full(rows.shape, self.first_query)  # a long call shows all rows the same
        return np.clip(rows - self.plan.sink - self.plan.recent, self.oldest, stored)

    def ordered_positions(self) -> np.ndarray:
        """Positions in the order in which dense arrays are handed out: [length]."""
        old = np.arange(self.low, self.placed)
        new = np.arange(self.placed, self.placed + self.chunk)
        return np.concatenate([np.arange(self.sinks), old, new])

    def ring_shown(self, slots: int | None = None) -> np.ndarray:
        """Which slots show of a ring that has so many by now, or all: [queries, slots]."""
        return _shown(self._ring_positions(slots), self, stored=False)

    def store_shown(self) -> np.ndarray:
        """Which slots of the store show: [queries, capacity · group]."""
        return _shown(self._store_positions(), self, stored=True)

    @cached_property
    def ring_bias(self) -> mx.array | None:
        """Additive mask of the ring, [queries, sink + ring]; None if all of it shows."""
        return additive(self.ring_shown())

    def ring_scores(self, batch: int, heads: int, repeats: int) -> mx.array:
        """The same in the shape of scores, [batch, heads, repeats · queries, sink + ring]."""
        shape = batch, heads, repeats
        if shape not in self._ring_scores:
            bias = np.where(self.ring_shown(), np.float32(0), np.float32(-np.inf))
            self._ring_scores[shape] = mx.array(np.tile(bias, (batch, heads, repeats, 1)))
        return self._ring_scores[shape]

    @cached_property
    def _ring_scores(self) -> dict[tuple[int, int, int], mx.array]:
        return {}

    @cached_property
    def store_bias(self) -> mx.array | None:
        """Additive mask of the store, [queries, capacity · group]; None if all of it shows."""
        return additive(self.store_shown())

    @cached_property
    def slot_bias(self) -> mx.array | None:
        """Additive mask of ring and store together, [queries, slots]; None if all shows."""
        widths = self.plan.sink + self.plan.ring, self.capacity * self.plan.group
        parts = self.ring_bias, self.store_bias
        if parts[0] is None and parts[1] is None:
            return None
        shape = self.queries
        return mx.concatenate(
            [mx.zeros((shape, n)) if p is None else p for p, n in zip(parts, widths, strict=True)],
            axis=-1,
        )

    @cached_property
    def chunk_bias(self) -> mx.array | None:
        """Additive mask of the chunk, [queries, chunk]; None if all of it shows."""
        positions = np.arange(self.placed, self.placed + self.chunk)
        return additive(_shown(positions, self, stored=False))

    def block(self, start: int, stop: int) -> tuple[slice, mx.array | None]:
        """What rows ``start`` … ``stop - 1`` see beside the sinks, where sinks come first.

        Returns:
            The columns of dense arrays, and an additive mask [rows, sinks and columns].
        """
        plan, first = self.plan, self.first_query + start
        low = max(self.low, plan.first_visible(first))
        end = max(self.first_query + stop, low)
        begin = plan.sink + low - self.low
        # Relative to the first row: the same for most blocks, so made once.
        sizes = (plan.sink, min(first, plan.sink), first - low, end - low, plan.window)
        return slice(begin, begin + end - low), _block_bias(stop - start, *sizes)

    def reorder(self, mask: mx.array) -> mx.array:
        """Columns of a mask [..., length] over dense arrays, as ring, store and chunk lie."""
        return mask[..., self._order]

    @cached_property
    def _order(self) -> mx.array:
        return mx.array(self.order())

    def order(self, slots: int | None = None) -> np.ndarray:
        """Where dense arrays have what is in each slot; anywhere for a slot that is hidden."""
        chunk = np.arange(self.placed, self.placed + self.chunk)
        parts = [self._ring_positions(slots), self._store_positions(), chunk]
        positions = np.concatenate(parts)
        stream = np.maximum(positions - min(self.low, self.placed), 0) + self.sinks
        order = np.where(positions < self.sinks, positions, stream)
        return np.clip(order, 0, self.length - 1).astype(np.uint32)

    def _ring_positions(self, slots: int | None) -> np.ndarray:
        plan = self.plan
        if slots is None or slots == plan.sink + plan.ring:
            return _ring_positions(plan.sink, plan.ring, self.placed)
        positions = np.arange(slots)  # it is growing still: nothing has wrapped
        positions[self.placed :] = -1
        return positions

    def _store_positions(self) -> np.ndarray:
        plan = self.plan
        return _store_positions(plan.sink, plan.group, self.capacity, self.groups)


@lru_cache(maxsize=16)
def snapshot(
    plan: Plan,
    capacity: int,
    placed: int,
    groups: int,
    chunk: int,
    queries: int,
    oldest: int | None = None,
) -> Snapshot:
    """The one that all layers of a step share: what follows from it is computed once."""
    return Snapshot(plan, capacity, placed, groups, chunk, queries, oldest)


def _ring_positions(sink: int, ring: int, placed: int) -> np.ndarray:
    """Position in each slot of the ring, -1 where none is."""
    positions = np.full(sink + ring, -1)
    positions[: min(sink, placed)] = np.arange(min(sink, placed))
    stream = max(0, placed - sink)
    for j, slot, count in spans(max(0, stream - ring), stream, ring):
        positions[sink + slot : sink + slot + count] = np.arange(sink + j, sink + j + count)
    return positions


@lru_cache(maxsize=4)  # the same until a group is added
def _store_positions(sink: int, group: int, capacity: int, groups: int) -> np.ndarray:
    """Position of each token slot in the store, -1 where none is."""
    slots = np.arange(capacity)
    g = slots + (groups - 1 - slots) // capacity * capacity if capacity else slots
    start = np.where(g >= 0, g * group + sink, -group - sink)
    positions = (start[:, None] + np.arange(group)).reshape(-1)
    return np.maximum(positions, -1)


def _shown(positions: np.ndarray, shot: Snapshot, stored: bool) -> np.ndarray:
    """Which slots show, of those that hold some positions: of the store, or of ring and chunk."""
    # Made on the host: no graph nodes, and one array serves every layer of a step.
    plan = shot.plan
    rows = np.arange(shot.first_query, shot.first_query + shot.queries)[:, None]
    packed = plan.sink + shot.packed(rows)
    if stored:
        shown = (positions >= 0) & (positions < packed)
    else:
        shown = (positions >= packed) & (positions <= rows)
    if plan.window is not None:
        shown &= positions > rows - plan.window
    if not stored:
        shown |= (positions >= 0) & (positions < plan.sink) & (positions <= rows)
    return shown


@lru_cache(maxsize=4)
def _block_bias(
    rows: int, sink: int, seen: int, lead: int, width: int, window: int
) -> mx.array | None:
    """Mask of ``sink`` sinks, ``seen`` of them before the first row, then of ``width`` tokens of
    the stream, ``lead`` of them before it."""
    row = np.arange(rows)[:, None]
    sinks = np.arange(sink) - seen <= row
    stream = np.arange(width) - lead
    return additive(np.hstack([sinks, (stream <= row) & (stream > row - window)]))


def additive(shown: np.ndarray) -> mx.array | None:
    if shown.all():
        return None
    return mx.array(np.where(shown, np.float32(0), np.float32(-np.inf)))
