"""Attention on a cache that is packed, and the objects that carry it through a model.

A cache hands a model two handles in place of arrays. They have the shape, type and rank of the
keys and values they stand for; `scaled_dot_product_attention` of mlx_lm, once hooked, passes them
here with the queries.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ..config import TRIM_MARGIN
from .group_store import ValueStore
from .key_store import KeyStore
from .layout import Snapshot, spans
from .rotation import Moved

# Up to this many query rows, scores against packed keys cost less than unpacking them.
MAX_PACKED_QUERIES = 8
# Query rows whose scores against unpacked keys are in memory at a time.
BLOCK = 256
# The same for arrays on a CPU: what no row of a block sees costs nothing. 512 rows over 512 tokens
# take 26 ms so and 42 at once, 2,048 over 2,048 304 and 599 (9 heads of 64, float32, OpenBLAS on
# two x86-64 cores; blocks of 32 to 256: 293 to 328). GPUs have a kernel that skips what is hidden.
CPU_BLOCK = 64


class CacheView(NamedTuple):
    """One layer's keys and values as one call of attention sees them.

    ring: sinks and newest tokens [B, H, sink + ring, D], keys and values; stores: the packed
    groups; chunk: tokens not in the ring yet [B, H, chunk, D]; dtype: the model's own; moved:
    which queries see the sinks elsewhere, None if none do.
    """

    snapshot: Snapshot
    ring: tuple[mx.array, mx.array]
    stores: tuple[KeyStore, ValueStore]
    chunk: tuple[mx.array, mx.array] | None
    dtype: mx.Dtype
    moved: Moved | None = None

    def dense(self, which: int, row: int = 0) -> mx.array:
        """Keys (0) or values (1) as a row sees them, in order of position: [B, H, length, D]."""
        shot = self.snapshot
        plan = shot.plan
        parts = []
        if shot.placed or self.chunk is None:
            ring = self.ring[which]
            if shot.linear:
                parts.append(ring[:, :, : shot.placed])
            else:
                parts.append(ring[:, :, : shot.sinks])
                parts += self._stream(which, shot.low - plan.sink, row)
        if self.chunk is not None:
            parts.append(self.chunk[which])
        x = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
        return x.astype(self.dtype)

    def slots(self, which: int) -> mx.array:
        """Keys (0) or values (1) of ring and store as they lie, hidden ones too: no mask of a
        model's can be over them."""
        ring, store = self.ring[which], self.stores[which]
        packed = store.dense(0, store.capacity, after=ring)
        return mx.concatenate([ring, packed], axis=2).astype(self.dtype)

    def _stream(self, which: int, low: int, row: int) -> list[mx.array]:
        """Placed tokens of the stream from index ``low`` on, packed ones first."""
        shot = self.snapshot
        plan = shot.plan
        packed = int(shot.packed(np.array(shot.first_query + row)))
        newest = self.ring[0] if self.chunk is None else self.chunk[0]
        parts = []
        if low < packed:
            first, groups = low // plan.group, -(-packed // plan.group)
            for _, slot, count in spans(first, groups, shot.capacity):
                parts.append(self.stores[which].dense(slot, count, after=newest))
            parts[0] = parts[0][:, :, low - first * plan.group :]
            if packed % plan.group:
                parts[-1] = parts[-1][:, :, : packed % plan.group - plan.group]
        for _, slot, count in spans(max(low, packed), shot.placed - plan.sink, plan.ring):
            parts.append(self.ring[which][:, :, plan.sink + slot : plan.sink + slot + count])
        return parts


class CacheHandle:
    """Stands for the keys (``which`` 0) or values (1) that queries see: not an array.

    Args:
        view: What the queries see.
        which: 0 or 1.
    """

    ndim = 4

    def __init__(self, view: CacheView, which: int) -> None:
        self.view = view
        self.which = which

    @property
    def dtype(self) -> mx.Dtype:
        return self.view.dtype

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, heads, _, dim = self.view.ring[self.which].shape
        return batch, heads, self.view.snapshot.length, dim

    def attend(
        self,
        queries: mx.array,
        scale: float,
        mask: mx.array | str | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """`attend`, called on the handle of the keys."""
        return attend(queries, self.view, scale, mask, sinks)


def attend(
    queries: mx.array,
    view: CacheView,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """softmax(scale · q kᵀ + mask) v over a cache, without unpacking it.

    Args:
        queries: [B, H_q, L, D], H_q a multiple of the H heads of keys and values.
        view: What to attend to.
        scale: Factor of the scores.
        mask: None or "causal" for the cache's own rule; an array, boolean or additive, is over
            the tokens in order of position and counts besides.
        sinks: Learned logits [H_q] that join the denominator of the softmax.

    Returns:
        [B, H_q, L, D_v], of the queries' type.
    """
    shot, moved = view.snapshot, view.moved
    if shot.queries > TRIM_MARGIN or (shot.chunk and not shot.groups):
        return _attend_blocks(queries, view, scale, mask, sinks)
    if shot.groups == 0:
        return _attend_ring(queries, view, scale, mask, sinks)
    batch, heads, rows, _ = queries.shape
    kv_heads = view.ring[0].shape[1]
    repeats = heads // kv_heads
    q = _folded(queries, kv_heads)

    # What many rows read is unpacked, once the call's own keys are there.
    newest = view.ring[0] if view.chunk is None else view.chunk[0]
    after = newest if rows > MAX_PACKED_QUERIES else None
    # The softmax does not see what is taken off all keys alike.
    shift = view.stores[0].shift
    parts = [
        _products(q, scale, view.ring[0], shift, shot.ring_scores(batch, kv_heads, repeats)),
        _plus(view.stores[0].scores(q, scale, after), shot.store_bias, repeats),
    ]
    if moved:
        at_sinks = _folded(moved.queries(queries), kv_heads)
        some = slice(shot.sinks)
        bias = shot.ring_scores(batch, kv_heads, repeats)[..., some]
        at_sinks = _products(at_sinks, scale, view.ring[0][:, :, some], None, bias)
        if shift is not None:
            at_sinks = at_sinks - scale * (q @ shift.swapaxes(-1, -2))
        parts[0] = mx.concatenate([at_sinks, parts[0][..., shot.sinks :]], axis=-1)
    if view.chunk is not None:
        products = _products(q, scale, view.chunk[0], shift)
        parts.append(_plus(products, shot.chunk_bias, repeats))
    ends = list(accumulate(part.shape[-1] for part in parts))
    if sinks is not None:
        column = _learned(sinks, q, repeats)
        if shift is not None:
            column = mx.addmm(column, q, shift.swapaxes(-1, -2), alpha=-scale)
        parts.append(column)
    scores = mx.concatenate(parts, axis=-1)
    if isinstance(mask, mx.array):
        scores = _masked(scores, shot.reorder(mask), heads, kv_heads, ends[-1])
    cuts = ends[:-1] if sinks is None else ends
    weights = mx.split(mx.softmax(scores, axis=-1), cuts, axis=-1)
    out = view.stores[1].weighted(weights[1], after)
    out = mx.addmm(out, weights[0], view.ring[1].astype(mx.float32))
    if view.chunk is not None:
        out = mx.addmm(out, weights[2], view.chunk[1].astype(mx.float32))
    return out.reshape(batch, heads, rows, -1).astype(queries.dtype)


def attend_causal(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    sinks: mx.array | None = None,
) -> mx.array:
    """Causal attention on arrays: queries [B, H_q, L, D] are of the last L tokens of keys."""
    length, total = queries.shape[2], keys.shape[2]
    block = length if mx.default_device().type == mx.gpu else CPU_BLOCK
    outputs = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        seen = total - length + stop
        outputs.append(
            mx.fast.scaled_dot_product_attention(
                queries[:, :, start:stop],
                keys[:, :, :seen],
                values[:, :, :seen],
                scale=scale,
                mask="causal",
                sinks=sinks,
            )
        )
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)


def _attend_ring(queries, view, scale, mask, sinks) -> mx.array:
    """A cache of full precision only, whose ring has wrapped: the fused kernel and a mask."""
    shot = view.snapshot
    keys, values = (x.astype(view.dtype) for x in view.ring)
    bias = shot.ring_bias
    if isinstance(mask, mx.array):
        own = as_bias(shot.reorder(mask)[..., : keys.shape[2]], queries.dtype)
        bias = own if bias is None else own + bias
    mask = None if bias is None else bias.astype(queries.dtype)
    if view.moved:
        moved_sinks = view.moved.sinks(keys[:, :, : shot.sinks])
        keys = mx.concatenate([moved_sinks, keys[:, :, shot.sinks :]], axis=2)
    return mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scale, mask=mask, sinks=sinks
    )


def _attend_blocks(queries, view, scale, mask, sinks) -> mx.array:
    """A call of many rows, bounded: unpacked keys, a block of rows at a time."""
    shot, first = view.snapshot, view.snapshot.plan.sink
    keys, values = (view.dense(which).astype(mx.float32) for which in (0, 1))
    at_sinks = view.moved.queries(queries) if view.moved else queries
    batch, heads, length, _ = queries.shape
    kv_heads = keys.shape[1]
    repeats = heads // kv_heads
    outputs = []
    for start in range(0, length, BLOCK):
        rows = slice(start, min(start + BLOCK, length))
        seen, bias = shot.block(rows.start, rows.stop)
        k, v = (mx.concatenate([x[:, :, :first], x[:, :, seen]], axis=2) for x in (keys, values))
        q = _folded(queries[:, :, rows], kv_heads)
        nearer = _folded(at_sinks[:, :, rows], kv_heads)
        parts = [nearer @ k[:, :, :first].swapaxes(-1, -2), q @ k[:, :, first:].swapaxes(-1, -2)]
        scores = _plus(scale * mx.concatenate(parts, axis=-1), bias, repeats)
        if isinstance(mask, mx.array):
            part = mask[..., rows, :] if mask.shape[-2] > 1 else mask
            part = mx.concatenate([part[..., :first], part[..., seen]], axis=-1)
            scores = _masked(scores, part, heads, kv_heads, k.shape[2])
        if sinks is not None:
            scores = mx.concatenate([scores, _learned(sinks, q, repeats)], axis=-1)
        weights = mx.softmax(scores, axis=-1)[..., : k.shape[2]]
        outputs.append((weights @ v).reshape(batch, heads, -1, v.shape[3]))
    return mx.concatenate(outputs, axis=2).astype(queries.dtype)


def _folded(queries: mx.array, kv_heads: int) -> mx.array:
    # Query heads that share keys become rows of one product. float32 throughout: scores keep
    # their precision, and the CPU has no fast half-precision kernel.
    batch, _, _, dim = queries.shape
    return queries.astype(mx.float32).reshape(batch, kv_heads, -1, dim)


def _learned(sinks: mx.array, q: mx.array, repeats: int) -> mx.array:
    """Logits [H_q] as a column of scores for folded queries q: [B, H, rows, 1]."""
    rows = q.shape[2] // repeats
    sinks = mx.repeat(sinks.astype(mx.float32).reshape(q.shape[1], repeats), rows, axis=1)
    return mx.broadcast_to(sinks[None, ..., None], (*q.shape[:3], 1))


def _products(
    q: mx.array,
    scale: float,
    keys: mx.array,
    shift: mx.array | None = None,
    bias: mx.array | None = None,
) -> mx.array:
    """scale · q (keys - shift)ᵀ + bias, for keys [B, H, T, D] as they are: [B, H, rows, T]."""
    keys = keys.astype(mx.float32)
    keys = (keys if shift is None else keys - shift).swapaxes(-1, -2)
    return scale * (q @ keys) if bias is None else mx.addmm(bias, q, keys, alpha=scale)


def _plus(scores: mx.array, bias: mx.array | None, repeats: int) -> mx.array:
    return scores if bias is None else scores + _by_row(bias, repeats)


def _by_row(bias: mx.array, repeats: int) -> mx.array:
    return mx.tile(bias, (repeats, 1)) if bias.ndim == 2 and bias.shape[0] > 1 else bias


def as_bias(mask: mx.array, dtype: mx.Dtype = mx.float32) -> mx.array:
    """A model's mask, boolean or additive, as what is added to scores: float32, finite in
    ``dtype``."""
    # Lowest, not -inf: a row of which a mask hides everything has to stay finite.
    lowest = mx.array(mx.finfo(dtype).min, mx.float32)
    if mask.dtype == mx.bool_:
        return mx.where(mask, mx.array(0, mx.float32), lowest)
    return mx.maximum(mask.astype(mx.float32), lowest)


def _masked(scores, mask, heads, kv_heads, width) -> mx.array:
    """Apply a model's mask, broadcastable to [B, H_q, L, width], to folded scores."""
    batch, _, rows, total = scores.shape
    mask = as_bias(mask)
    repeats = heads // kv_heads
    length = rows // repeats
    mask = mx.broadcast_to(mask, (batch, heads, length, width))
    mask = mask.reshape(batch, kv_heads, rows, width)
    return scores + mx.pad(mask, [(0, 0)] * 3 + [(0, total - width)])
