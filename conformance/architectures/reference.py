"""What ours must equal: plain arrays of all ever seen, and the rule written out as a mask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as mlx_caches

from mlx_kivi import KVCacheConfig, QuantizedStreamingCache
from mlx_kivi.cache.basis import hadamard, value_inset
from mlx_kivi.cache.group_store import ValueStore
from mlx_kivi.cache.key_store import KeyStore
from mlx_kivi.cache.layout import spans
from mlx_kivi.models.architectures import INDEXED, module_names, own_caches
from mlx_kivi.models.factory import reads_state

# Their indexers choose among columns, as ours hand them out; and phi3small's block-sparse layers
# add a boolean mask to the scores, so that every column they get counts.
COLUMNS = INDEXED | {"phi3small"}


class DenseReference:
    """Keys and values of every token in full precision, and which of them a query may see.

    A query at position p sees positions below ``sink`` and those in (p - window, p]. Where a
    ``twin`` has packed groups, its dequantised content replaces ours, since a step of the
    quantiser turns the least noise into a large one.

    Args:
        sink: Sinks.
        window: Recent tokens beside them; None keeps all.
        packed_after: Stream tokens that stay unpacked and the size of a group; None: nothing
            is packed.
        drops: Whether tokens that no row of a call sees are left out of what it gets, not only
            masked.
    """

    def __init__(
        self,
        sink: int,
        window: int | None,
        packed_after: tuple[int, int] | None = None,
        drops: bool = False,
    ) -> None:
        self.sink, self.window, self.packed_after, self.drops = sink, window, packed_after, drops
        self.offset = 0
        self.twin: QuantizedStreamingCache | None = None
        # Of every token; models assign them.
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self._rows = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.offset:
            keys = mx.concatenate([self.keys, keys], axis=2)
            values = mx.concatenate([self.values, values], axis=2)
        self.keys, self.values = keys, values
        self._rows = keys.shape[2] - self.offset
        self.offset += self._rows
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        before = self.offset - self._rows
        visible = self._visible(before, self._rows)
        end = self._from_store(before)
        pair = [self.keys, self.values]
        oldest = int(visible[visible >= self.sink][0]) - self.sink if end else 0
        if oldest < end:
            size = self.packed_after[1]
            first = oldest // size
            start, stop = self.sink + first * size, self.sink + end
            for i, x in enumerate(pair):
                packed = unpacked_groups(self.twin, i, first, -(-end // size))
                packed = packed[:, :, : stop - start]
                pair[i] = mx.concatenate([x[:, :, :start], packed, x[:, :, stop:]], axis=2)
        if self.drops:
            pair = [x[:, :, mx.array(visible)] for x in pair]
        return pair[0], pair[1]

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | None:
        k = self._visible(self.offset, N) if self.drops else np.arange(self.offset + N)
        q = np.arange(self.offset, self.offset + N)[:, None]
        mask = k <= q
        if self.window is not None:
            mask &= (k < self.sink) | (k > q - self.window)
        if window_size is not None:
            mask &= k > q - window_size
        return None if mask.all() else mx.array(mask)

    def _visible(self, first: int, rows: int) -> np.ndarray:
        """Positions that a call of ``rows`` tokens from position ``first`` on can see."""
        positions = np.arange(first + rows)
        if self.window is None:
            return positions
        return positions[(positions < self.sink) | (positions > first - self.window)]

    def _from_store(self, seen: int) -> int:
        """Stream tokens that a query after ``seen`` tokens reads packed.

        Of what is packed, the newest are read as they were by models that read packed data.
        """
        # A trained window may be too small to pay.
        if self.packed_after is None or self.twin.plan.residual is None:
            return 0
        residual, group = self.packed_after
        stream = max(0, seen - self.sink)
        packed = max(0, stream - residual) // group * group
        if not self.twin.packed_attention:
            return packed
        return min(packed, max(0, stream - residual - group))

    def errors(self) -> tuple[list[mx.array], list[mx.array]]:
        """How far the twin's content is from what was given, largest difference of each array.

        Returns:
            In full precision, relative to the largest of all; and packed, in halves of a
            quantiser's step, where it is taken: in the basis of the store.
        """
        before = self.offset - self._rows
        columns = self._visible(before, self._rows)
        end = self.sink + self._from_store(before)
        is_packed = (columns >= self.sink) & (columns < end)
        loose, packed = [], []
        for which, stored in enumerate(self.twin.arrays()):
            given = (self.keys, self.values)[which]
            if not given.size or not given.any():  # an indexer's values, which its model clears
                continue
            off = stored - given[:, :, mx.array(columns)]
            exact = mx.abs(off[:, :, mx.array(np.flatnonzero(~is_packed))])
            loose.append(exact.max() / mx.abs(given).max())
            if is_packed.any():
                store = self.twin._stores[which]
                off = mx.abs(in_basis(store, off[:, :, mx.array(np.flatnonzero(is_packed))]))
                half = half_steps(store, given[:, :, self.sink :])
                packed.append((off / half[:, :, mx.array(columns[is_packed] - self.sink)]).max())
        return loose, packed


class ChunkedReference(DenseReference):
    """All keys and values ever seen, for a model that masks all but a query's own chunk."""

    start_position = 0

    def maybe_trim_front(self) -> None:
        pass


def in_basis(store: KeyStore | ValueStore, x: mx.array) -> mx.array:
    """Keys or values x [B, H, T, D], or differences of them, in the basis that they are packed in:
    float32."""
    x = x.astype(mx.float32)
    if isinstance(store, KeyStore):
        return store.basis.keys(x)
    return x @ hadamard(x.shape[1], x.shape[3]) if store.mixed else x


def half_steps(store: KeyStore | ValueStore, x: mx.array) -> mx.array:
    """Half a step of a store's quantiser for x [B, H, T, D], its bound of error in its basis.

    Scales and zeros of 8 significant bits widen the range by 2^-7 of the largest value twice.
    """
    dim, group, is_keys = x.shape[3], store.group_size, isinstance(store, KeyStore)
    if is_keys:
        x = x[:, :, : x.shape[2] // group * group]
        x = x if store.shift is None else x - store.shift
    x = in_basis(store, x)
    halves, start = [], 0
    for channels, bits in store.basis.parts(dim, store.bits) if is_keys else [(dim, store.bits)]:
        inset = store.basis.inset(bits) if is_keys else value_inset(bits, store.mixed)
        part = x[..., start : start + channels]
        start += channels
        coarse = mx.abs(part).max() / 64
        for low, high, shape in ranges(part, group, is_keys):
            step = (high - low + coarse) * (1 + 2**-7) / (2**bits - 1 + 2 * inset)
            halves.append(mx.broadcast_to(step / 2, shape).reshape(*x.shape[:3], -1))
    return mx.concatenate(halves, axis=-1)


def ranges(
    x: mx.array, group: int, over_time: bool
) -> Iterator[tuple[mx.array, mx.array, tuple[int, ...]]]:
    """Least and largest of each group of tokens, or of channels, and the shape of what they span:
    piece by piece along the head."""
    axis = 3
    pieces = [x[..., i : i + group] for i in range(0, x.shape[3], group)]
    if over_time:
        pieces = [x.reshape(*x.shape[:2], -1, group, x.shape[3])]
    for piece in pieces:
        yield piece.min(axis, keepdims=True), piece.max(axis, keepdims=True), piece.shape


def unpacked_groups(cache: QuantizedStreamingCache, which: int, first: int, stop: int) -> mx.array:
    """Groups ``first`` … ``stop - 1`` of a cache's packed keys (0) or values (1)."""
    store = cache._stores[which]
    parts = [store.dense(slot, count) for _, slot, count in spans(first, stop, store.capacity)]
    return mx.concatenate(parts, axis=2).astype(cache._dtype)


def reference_caches(model: Any, config: KVCacheConfig) -> list[Any]:
    """The model's own caches, with a `DenseReference` for each that a policy converts."""
    packed_after = (config.residual_length, config.group_size) if config.quantized else None
    more = {"packed_after": packed_after, "drops": bool(COLUMNS & set(module_names(model)))}

    def convert(cache: Any) -> Any:
        if type(cache) is mlx_caches.KVCache:
            return DenseReference(config.sink, config.window, **more)
        if type(cache) is mlx_caches.RotatingKVCache:
            return DenseReference(cache.keep, cache.max_size - cache.keep, **more)
        if type(cache) is mlx_caches.ChunkedKVCache:
            return ChunkedReference(0, cache.chunk_size, **more)
        if type(cache) is mlx_caches.CacheList:
            return mlx_caches.CacheList(*[convert(member) for member in cache.caches])
        return cache

    own = own_caches(model)
    return own if reads_state(model) else [convert(cache) for cache in own]


def flat(caches: list[Any]) -> list[Any]:
    """Caches, members of a `CacheList` singly."""
    return [leaf for cache in caches for leaf in getattr(cache, "caches", [cache])]


def pair_up(references: list[Any], ours: list[Any]) -> list[DenseReference]:
    """Give each reference its twin; returns the references.

    Raises:
        AssertionError: if another cache was converted, or one that should be was not.
    """
    paired = []
    for reference, twin in zip(flat(references), flat(ours), strict=True):
        converted = isinstance(reference, DenseReference)
        assert isinstance(twin, QuantizedStreamingCache) == converted, type(twin)
        assert converted or type(twin) is type(reference), type(twin)
        if converted:
            reference.twin = twin
            paired.append(reference)
    return paired
