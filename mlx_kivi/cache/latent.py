"""Decode attention on a packed cache of latents, which are keys and values at once.

Multi-head latent attention hands, for one token, the cached latent to mlx_lm's attention as keys
and as values, and the scores of the positional part of the keys as an additive mask. All query
heads look at the one latent, so that they are rows of one product.
"""

from __future__ import annotations

import mlx.core as mx

from .attention import CacheHandle, CacheView

# Up to this many query heads, two products with packed latents cost less on a CPU than unpacking
# them once: 20 ms against 26 for 3 heads, 27 against 29 for 4, 106 against 28 for 16 (rank 512,
# 8,192 tokens, int4, OpenBLAS on two x86-64 cores). GPUs unpack inside the product, tile by tile.
MAX_PACKED_ROWS = 3


class LatentHandle(CacheHandle):
    """Stands for latents [B, 1, slots, D], in the order of the slots that they are stored in."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, heads, _, dim = super().shape
        view = self.view
        return batch, heads, view.ring[0].shape[2] + view.stores[0].tokens, dim

    def attend(
        self,
        queries: mx.array,
        scale: float,
        mask: mx.array | str | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """`attend_latent`: these models give an array of a mask or none, and no learned sinks."""
        assert not isinstance(mask, str)
        return attend_latent(queries, self.view, scale, mask)


def attend_latent(
    queries: mx.array, view: CacheView, scale: float, mask: mx.array | None
) -> mx.array:
    """softmax(scale · q latentsᵀ + mask) latents, for one token.

    Args:
        queries: [B, H_q, 1, D].
        view: What to attend to.
        scale: Factor of the products with queries.
        mask: Additive, [B, H_q, 1, slots]: the scores of the positional part.

    Returns:
        [B, H_q, 1, D], of the queries' type.
    """
    shot, store = view.snapshot, view.stores[0]
    batch, heads, _, dim = queries.shape
    q = (queries.astype(mx.float32) * scale).reshape(batch, 1, heads, dim)
    ring = view.ring[0].astype(mx.float32)
    if store.shift is not None:
        ring = ring - store.shift
    few = heads <= MAX_PACKED_ROWS or mx.default_device().type == mx.gpu
    packed = store.packed()[0] if few else store.unpacked(after=view.ring[0])
    scores = mx.concatenate([q @ ring.swapaxes(-1, -2), packed.scores(q)], axis=-1)
    if mask is not None:
        scores = scores + mask.astype(mx.float32).reshape(batch, 1, heads, -1)
    if shot.slot_bias is not None:
        scores = scores + shot.slot_bias
    weights = mx.split(mx.softmax(scores, axis=-1), [ring.shape[2]], axis=-1)
    out = mx.addmm(packed.weighted(weights[1]), weights[0], ring)
    if store.shift is not None:
        out = out + store.shift  # taken off all of them, and weights sum to 1
    return out.reshape(batch, heads, 1, dim).astype(queries.dtype)
