"""llama4: layers that attend to a chunk of positions, stored as a window of a chunk's length.

A query sees the tokens of its own chunk up to itself, so never more than that window holds. The
model masks what in it is of the chunk before, over positions from ``start_position`` on.
"""

from __future__ import annotations

from ..quantized_streaming_cache import QuantizedStreamingCache


class ChunkedCache(QuantizedStreamingCache):
    """`QuantizedStreamingCache` for a model that expects a `ChunkedKVCache`."""

    @property
    def start_position(self) -> int:
        """The position of the oldest token that the next call gets."""
        return self.plan.first_visible(self.offset)

    def maybe_trim_front(self) -> None:
        """Nothing: tokens leave the window as others come."""

    def _mergeable(self) -> bool:
        return False  # mlx_lm has no counterpart of it in a batch
