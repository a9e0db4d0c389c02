"""Multi-head latent attention: packed latents for a step, arrays for calls of several tokens.

For one token these models hand the cached latent on as it is; for more they expand it themselves.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_caches

from .. import hooks
from ..cache.latent import LatentHandle
from ..config import KVCacheConfig
from ..quantized_streaming_cache import QuantizedStreamingCache
from .architectures import INDEXED, LATENT, module_names


class LatentCache(QuantizedStreamingCache):
    """`QuantizedStreamingCache` of latents (keys) and the positional part of keys (values).

    ``limit``: most tokens of which the model attends to all; beyond, its indexer picks some from
    an array. None: there is no indexer.
    """

    limit: int | None = None

    def __init__(
        self, config: KVCacheConfig | None = None, *, packed_attention: bool = False
    ) -> None:
        # Latents are keys and values at once, and no layer's queries for them are seen here.
        as_they_are = (config or KVCacheConfig.from_name("int8")).replace(balanced=False)
        super().__init__(as_they_are, packed_attention=packed_attention)

    def keys_and_values(self) -> tuple[Any, Any]:
        """As the base; for one token over packed groups, a `LatentHandle` and an array.

        Returns:
            Latents [B, 1, T, rank] and the positional part of their keys [B, 1, T, D]. With a
            handle, T are the slots that tokens lie in, hidden ones too.
        """
        seen = self.limit is None or self.size() <= self.limit
        one = self._queries == 1 and self._chunk is None
        if not (one and seen and self._groups and hooks.attention_hooked()):
            return super().keys_and_values()
        view = self.view()
        return LatentHandle(view, 0), view.slots(1)

    # The state of the base, then the limit, 0 if there is none.

    def _save(self) -> list[mx.array]:
        return [*super()._save(), mx.array([self.limit or 0], mx.int64)]

    def _load(self, state: list[mx.array]) -> None:
        base = QuantizedStreamingCache.from_state(state[:-1])
        limit = state[-1]
        if limit.shape != (1,) or limit.dtype != mx.int64 or int(limit) < 0:
            raise ValueError("the limit of the indexer is broken")
        self.__dict__ = vars(base) | {"limit": int(limit) or None}


def latents(model: Any, caches: list[Any]) -> list[Any]:
    """The caches that a model of latent attention needs in place of ours; others keep theirs."""
    names = module_names(model)
    if LATENT.isdisjoint(names):
        return caches
    args = getattr(model, "language_model", model).args
    if INDEXED.isdisjoint(names):
        return [_latent(cache, None) for cache in caches]
    return [mlx_caches.CacheList(_latent(c[0], args.index_topk), c[1]) for c in caches]


def _latent(cache: Any, limit: int | None) -> Any:
    if type(cache) is mlx_caches.CacheList:
        return mlx_caches.CacheList(*(_latent(member, limit) for member in cache.caches))
    if type(cache) is not QuantizedStreamingCache:
        return cache
    twin = LatentCache(cache.config)
    twin.limit = limit
    return twin
