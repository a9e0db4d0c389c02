"""Whether a model can be given handles on packed data: by the tables, else by trying."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_caches

from .. import hooks
from ..config import KVCacheConfig
from ..quantized_streaming_cache import QuantizedStreamingCache
from .architectures import DENSE, PACKED, module_names, own_caches
from .chunked import ChunkedCache

_PROBE = KVCacheConfig(k_bits=8, v_bits=8, group_size=32, residual_length=0, sink=0)
_probed: dict[tuple[type, str], bool] = {}


def takes_packed(model: Any) -> bool:
    """Whether the model's attention can be given handles in place of arrays.

    Modules in the tables of `architectures` are known. Any other is probed, once a class and its
    settings (``args``): a few calls on packed caches are built, not computed, and a model that
    does anything with a handle but pass it on gets arrays.
    """
    names = module_names(model)
    if any(name in DENSE for name in names):
        return False
    if names and all(name in PACKED for name in names):
        return True
    return _probe(model)


def _probe(model: Any) -> bool:
    settings = getattr(model, "args", None)
    if not is_dataclass(settings):  # two models of a class may differ in what can't be compared
        return _runs_on_handles(model)
    key = (type(model), repr(settings))
    if key not in _probed:
        _probed[key] = _runs_on_handles(model)
    return _probed[key]


def _runs_on_handles(model: Any) -> bool:
    holder = object()
    hooks.attention.hold(holder)
    try:
        caches = [_packed_at_once(cache) for cache in own_caches(model)]
        # A group to pack, then what a step and a short call make of it.
        for length in (_PROBE.group_size, 1, 2):
            model(mx.zeros((1, length), mx.int32), cache=caches)
        return True
    except Exception:  # whatever a model does with a handle, the answer is the same
        return False
    finally:
        hooks.attention.release(holder)


def _packed_at_once(cache: Any) -> Any:
    if type(cache) in (mlx_caches.KVCache, mlx_caches.RotatingKVCache):
        return QuantizedStreamingCache(_PROBE, packed_attention=True)
    if type(cache) is mlx_caches.ChunkedKVCache:
        return ChunkedCache(_PROBE, packed_attention=True)
    if type(cache) is mlx_caches.CacheList:
        return mlx_caches.CacheList(*[_packed_at_once(member) for member in cache.caches])
    return cache
