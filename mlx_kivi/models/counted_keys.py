"""afm7: a model that takes the position of its queries from the number of keys it is handed.

Its last layers read the keys of an earlier one again, and rotate their queries by that number.
With a window in force there are fewer keys than positions, and in a batch each row has another
number of them; what they get says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .. import hooks
from ..batch_cache import BatchCache
from ..cache.attention import CacheHandle
from ..quantized_streaming_cache import QuantizedStreamingCache
from .architectures import module_names


class CountedHandle(CacheHandle):
    """A handle whose shape is that of all keys ever seen."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, heads, _, dim = super().shape
        shot = self.view.snapshot
        return batch, heads, shot.placed + shot.chunk, dim


class CountedKeysCache(QuantizedStreamingCache):
    """`QuantizedStreamingCache` that hands out a `CountedHandle` once tokens have been evicted."""

    def keys_and_values(self) -> tuple[Any, Any]:
        """As the base.

        Raises:
            RuntimeError: if tokens have been evicted and mlx_lm's attention takes no handles.
        """
        keys, values = super().keys_and_values()
        if keys.shape[2] == self.offset or not self.packed_attention:
            return keys, values
        if not hooks.attention_hooked():
            raise RuntimeError(
                "a window on this model needs mlx_kivi's attention: call mlx_kivi.patch() first"
            )
        view = self.view()
        return CountedHandle(view, 0), CountedHandle(view, 1)

    @property
    def merge(self) -> Callable[[list[Any]], BatchCache]:
        """``merge(caches)``: a batch of them."""
        return CountedBatch.merge


class CountedRowsHandle(CacheHandle):
    """A handle of a batch whose shape has each row's number of keys: an array [B]."""

    def __init__(self, handle: CacheHandle, counts: mx.array) -> None:
        self.handle = handle
        self.counts = counts

    @property
    def dtype(self) -> mx.Dtype:
        return self.handle.dtype

    @property
    def shape(self) -> tuple[int, int, Any, int]:
        batch, heads, _, dim = self.handle.shape
        return batch, heads, self.counts, dim

    def attend(self, *args: Any, **kwargs: Any) -> mx.array:
        return self.handle.attend(*args, **kwargs)


class CountedBatch(BatchCache):
    """`BatchCache` that hands out a `CountedRowsHandle`."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """As the base.

        Raises:
            RuntimeError: if mlx_lm's attention takes no handles.
        """
        if not self._handles():
            raise RuntimeError(
                "a batch on this model needs mlx_kivi's attention: call mlx_kivi.patch() first"
            )
        counts = self.offset + keys.shape[2]  # padding too, since the call's length comes off it
        pair = super().update_and_fetch(keys, values)
        self._last = CountedRowsHandle(pair[0], counts), CountedRowsHandle(pair[1], counts)
        return self._last


def counting(model: Any, caches: list[Any]) -> list[Any]:
    """The caches that a model of afm7's kind needs in place of ours; other models keep theirs."""
    if "afm7" not in module_names(model):
        return caches
    return [CountedKeysCache(c.config, packed_attention=c.packed_attention) for c in caches]
