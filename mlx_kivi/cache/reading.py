"""What the queries of a call see: of a cache that has stored its tokens, or is about to."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from .attention import CacheView
from .layout import Snapshot, snapshot
from .rewriting import Rewriting
from .rotation import Moved


class Reading(Rewriting):
    """Buffers, and views of them for attention."""

    packed_attention: bool

    def _snapshot(self, placed: int, chunk: int, queries: int) -> Snapshot:
        capacity, low = self._stores[0].capacity, self.oldest_read(placed + chunk - queries)
        return snapshot(self.plan, capacity, placed, self._groups, chunk, queries, low)

    def oldest_read(self, first: int) -> int | None:
        """`Snapshot.oldest` for queries from position ``first`` on."""
        # Arrays show all rows of a call the same: for models that get them, what is packed is
        # read from the store, so that a draft that is checked at once sees what steps would see.
        if not self.packed_attention or not self._groups:
            return None
        back = first - self.plan.sink - self.plan.recent
        return self._ring_low if self._ring_low > back else 0

    def view(self) -> CacheView:
        """What the queries of the last call see."""
        chunk = self._chunk_length()
        shot = self._snapshot(self._count - chunk, chunk, self._queries)
        ring, stores = self._ring, self._stores
        return CacheView(shot, ring, stores, self._chunk, self._dtype, self.moved(shot))

    def moved(self, shot: Snapshot) -> Moved | None:
        """Which queries are further from the sinks than the cache is long, and by how much."""
        rotation, window = self.rotation, self.plan.window
        if not self.config.reposition or rotation is None or window is None:
            return None
        if not rotation.dims or not self.plan.sink:
            return None
        last = self.plan.sink + window - 1  # the newest index in the cache
        row = max(0, last + 1 - shot.first_query)
        if row >= shot.queries:
            return None
        before = self._rebased - self._to_turn
        return Moved(rotation, row, shot.first_query + row - before - last)

    def arrays(self) -> tuple[mx.array, mx.array]:
        """What the last query saw, in order of position: keys and values [B, H, length, D]."""
        view = self.view()
        last = view.snapshot.queries - 1
        return view.dense(0, last), view.dense(1, last)

    def columns(self, N: int) -> np.ndarray:
        """Positions that `update_and_fetch` will return for the next N tokens, in order."""
        return self._snapshot(placed=self._count, chunk=N, queries=N).ordered_positions()

    def cuts(self, N: int) -> bool:
        """Whether the policy's window hides something from one of the next N tokens."""
        window = self.plan.window
        return window is not None and self._count + N - self.plan.sink > window

    def narrows(self, N: int, window_size: int | None) -> bool:
        """Whether a window of the model's own hides more from one of the next N tokens."""
        if window_size is None:
            return False
        shot = self._snapshot(placed=self._count, chunk=N, queries=N)
        # The oldest position shown; that there are sinks does not widen the model's window.
        oldest = 0 if self.plan.sink else shot.low
        return oldest + window_size < self._count + N
