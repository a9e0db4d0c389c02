"""Attention on a batch: row by row while prompts are fed, bucket by bucket in steps.

A model gets one pair of handles for all rows, as from a cache of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from .attention import CacheHandle, CacheView, attend
from .reading import Reading

_HIDDEN = 2**30  # a position that no query reaches

Mask = mx.array | str | None
Attend = Callable[[mx.array, Any, Any, float, Mask, mx.array | None], mx.array]


class RowsHandle(CacheHandle):
    """Stands for the keys (``which`` 0) or values (1) of rows that are apart.

    Args:
        rows: What each row's cache returned, keys and values, arrays or handles; None for a row
            that has no token in this call.
        masks: Each row's own rule, as its `make_mask` says.
        lengths: Tokens of each row in this call; the rest of it is padding, on the right.
        attend_one: Attention of mlx_lm's, for one row.
        which: 0 or 1.
    """

    def __init__(
        self,
        rows: Sequence[tuple[Any, Any] | None],
        masks: Sequence[Mask],
        lengths: Sequence[int],
        attend_one: Attend,
        which: int,
    ) -> None:
        self.rows = rows
        self.masks = masks
        self.lengths = lengths
        self.attend_one = attend_one
        self.which = which

    @property
    def dtype(self) -> mx.Dtype:
        return self._some[self.which].dtype

    @property
    def shape(self) -> tuple[int, int, int, int]:
        _, heads, _, dim = self._some[self.which].shape
        longest = max(row[0].shape[2] for row in self.rows if row is not None)
        return len(self.rows), heads, longest, dim

    @property
    def _some(self) -> tuple[Any, Any]:
        return next(row for row in self.rows if row is not None)

    def attend(
        self,
        queries: mx.array,
        scale: float,
        mask: Mask = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Each row alone; an array of a mask has its tokens in order, from the left."""
        batch, heads, length, _ = queries.shape
        dim = self._some[1].shape[3]
        outputs = []
        for i, (row, own, n) in enumerate(zip(self.rows, self.masks, self.lengths, strict=True)):
            if row is None:
                outputs.append(mx.zeros((1, heads, length, dim), queries.dtype))
                continue
            keys, values = row
            if isinstance(mask, mx.array):
                of_row = mask[i : i + 1] if mask.ndim == 4 and mask.shape[0] > 1 else mask
                of_row = of_row[..., :n, :] if mask.shape[-2] > 1 else of_row
                own = of_row[..., : keys.shape[2]]
            out = self.attend_one(queries[i : i + 1, :, :n], keys, values, scale, own, sinks)
            if n < length:
                out = mx.pad(out, [(0, 0), (0, 0), (0, length - n), (0, 0)])
            outputs.append(out)
        return outputs[0] if batch == 1 else mx.concatenate(outputs, axis=0)


class BucketsHandle(CacheHandle):
    """Stands for the keys (``which`` 0) or values (1) of rows in buckets, for one token each.

    Args:
        views: What each bucket's queries see.
        rows: The number in the batch of each bucket's rows.
        which: 0 or 1.
    """

    def __init__(
        self, views: Sequence[CacheView], rows: Sequence[Sequence[int]], which: int
    ) -> None:
        self.views = views
        self.rows = rows
        self.which = which

    @property
    def dtype(self) -> mx.Dtype:
        return self.views[0].dtype

    @property
    def shape(self) -> tuple[int, int, int, int]:
        _, heads, _, dim = self.views[0].ring[self.which].shape
        longest = max(view.snapshot.length for view in self.views)
        return sum(map(len, self.rows)), heads, longest, dim

    def attend(
        self,
        queries: mx.array,
        scale: float,
        mask: Mask = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """All rows of a bucket in one; an array of a mask has their tokens in order, from the
        left."""
        order = [i for rows in self.rows for i in rows]
        if len(self.views) == 1 and order == sorted(order):
            return attend(queries, self.views[0], scale, mask, sinks)
        outputs = []
        for view, rows in zip(self.views, self.rows, strict=True):
            index = mx.array(list(rows), mx.int32)
            part = mask
            if isinstance(mask, mx.array) and mask.ndim == 4 and mask.shape[0] > 1:
                part = mask[index]
            outputs.append(attend(queries[index], view, scale, part, sinks))
        back = sorted(range(len(order)), key=order.__getitem__)
        return mx.concatenate(outputs, axis=0)[mx.array(back, mx.int32)]


def masks_of(
    rows: Sequence[Reading], own: Sequence[int], length: int, window_size: int | None
) -> mx.array:
    """What the next ``length`` tokens of each row may see of its own, the first ``own`` of them.

    Args:
        window_size: A window of the model's own, where it hides more than the policy does.

    Returns:
        Boolean, [B, 1, length, T]: each row's tokens in order, from the left.
    """
    parts = [row.columns(n) if n else np.zeros(1, int) for row, n in zip(rows, own, strict=True)]
    keys = np.full((len(parts), max(map(len, parts))), _HIDDEN)
    queries = np.zeros((len(parts), length), int)
    sinks = np.zeros(keys.shape, bool)
    for i, (row, part, n) in enumerate(zip(rows, parts, own, strict=True)):
        # Counted from the first query: a stream may be longer than int32 counts.
        if n:
            keys[i, : len(part)] = np.maximum(part - row._count, -_HIDDEN)
            sinks[i, : len(part)] = part < row.plan.sink
            queries[i] = np.minimum(np.arange(length), n - 1)
        else:
            keys[i, 0] = 0  # padding, which sees something
    k = mx.array(keys.astype(np.int32))[:, None, None]
    q = mx.array(queries.astype(np.int32))[:, None, :, None]
    mask = k <= q
    if any(n and row.cuts(n) for row, n in zip(rows, own, strict=True)):
        windows = [min(row.plan.window or _HIDDEN, _HIDDEN) for row in rows]
        window = mx.array(windows, mx.int32)[:, None, None, None]
        mask = mask & ((k > q - window) | mx.array(sinks)[:, None, None])
    return mask if window_size is None else mask & (k > q - window_size)
