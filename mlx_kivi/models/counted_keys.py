"""afm7: a model that takes the position of its queries from the number of keys it is handed.

Its last layers read the keys of an earlier one again, and rotate their queries by that number.
With a window in force there are fewer keys than positions; what they get says otherwise.
"""

from __future__ import annotations

from typing import Any

from .. import hooks
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

    def _mergeable(self) -> bool:
        # mlx_lm's counterpart of a bounded one hands out fewer keys than positions.
        return self.config.window is None and super()._mergeable()


def counting(model: Any, caches: list[Any]) -> list[Any]:
    """The caches that a model of afm7's kind needs in place of ours; other models keep theirs."""
    if "afm7" not in module_names(model):
        return caches
    return [CountedKeysCache(c.config, packed_attention=c.packed_attention) for c in caches]
