"""From the caches that a model makes to ours, layer by layer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_lm.models import cache as mlx_caches

from .. import hooks
from ..cache.layout import can_pack
from ..config import KVCacheConfig, with_max_kv_size
from ..quantized_streaming_cache import QuantizedStreamingCache
from . import basis_files
from .architectures import INDEXED, ONE_ROW, READ_STATE, module_names, own_caches
from .calibration import Calibration, calibration, known, leaves
from .chunked import ChunkedCache
from .counted_keys import counting
from .latent_caches import latents
from .learned_positions import restarting
from .probe import takes_packed
from .rotations import rebase_at, rotations

# Why keys are in no basis of the model's own.
NO_HANDLES = "the model computes on cached keys itself"


def ours(caches: Sequence[Any]) -> Iterator[QuantizedStreamingCache]:
    """Those of a model's caches that are of this package, inside `CacheList` too."""
    for cache in caches:
        for member in getattr(cache, "caches", [cache]):
            if isinstance(member, QuantizedStreamingCache):
                yield member


def make_prompt_cache(
    model: Any, config: KVCacheConfig | None = None, *, max_kv_size: int | None = None
) -> list[Any]:
    """The model's caches, packed and bounded as a policy says; without patching the factory.

    Args:
        model: An mlx_lm model, or one in its style (``layers``, ``__call__(inputs, cache)``).
        config: The policy. Default: int8, no window.
        max_kv_size: As in mlx_lm: sinks and window together, 4 sinks by default.

    Returns:
        One cache a layer, as `mlx_lm.models.cache.make_prompt_cache` returns them. Kinds that
        can't be packed are left as they are: `mlx_kivi.describe` says which, and their bytes.

    Raises:
        ValueError: if both ``max_kv_size`` and the policy give a window, or a layer is named
            that the model does not have, or the policy re-positions and the model can't.
        UnsupportedError: if this mlx or mlx_lm is not one that is supported.
    """
    # Packed caches need mlx_lm's attention to know them; `unpatch` undoes this too.
    hooks.attention.hold("make_prompt_cache")
    return build(
        model, config if config is not None else KVCacheConfig.from_name("int8"), max_kv_size
    )


def build(
    model: Any, config: KVCacheConfig, max_kv_size: int | None = None, *, balanced: bool = True
) -> list[Any]:
    """`make_prompt_cache` without touching mlx_lm.

    With ``balanced`` off, keys get no basis of the model's own: for caches to compare with, which
    are not worth a pass.
    """
    config = with_max_kv_size(config, max_kv_size)
    if reads_state(model):
        if config.reposition:
            raise _no_reposition(model, "with this mlx-lm it needs the caches of mlx_lm")
        return own_caches(model)
    packed = takes_packed(model)
    indexed = any(name in INDEXED for name in module_names(model))
    caches = convert_all(own_caches(model), config, packed_attention=packed, indexed=indexed)
    caches = latents(model, counting(model, caches))
    _give_rotations(model, config, caches)
    caches = restarting(model, config, caches)
    for cache in ours(caches):
        cache.batches = ONE_ROW.isdisjoint(module_names(model))
    moved = any(c.config.moves_keys and can_pack(c.config) for c in ours(caches))
    if balanced and packed and moved:
        for leaf, balance in zip(leaves(caches), calibrated(model).balances, strict=True):
            if isinstance(leaf, QuantizedStreamingCache):
                leaf.balance = balance
    return caches


def calibrated(model: Any) -> Calibration:
    """What the model's keys are like, measured if need be.

    Args:
        model: A model that is read packed.
    """
    own = own_caches(model)

    def make() -> list[Any]:
        plain = KVCacheConfig(sink=0)
        return counting(model, convert_all(own, plain, packed_attention=True))

    return calibration(model, len(leaves(own)), make)


@dataclass(frozen=True)
class Calibrated:
    """What is known of a model's keys.

    measured: layers whose keys get a basis of the model's own when they are packed in fewer than
    8 bits; layers: of so many, counted by their caches; file: where it is kept, None if it could
    not be, or if the model computes in several processes; why: why no layer gets one, None if any
    does; seconds: what the pass took, None if there was nothing left to do.
    """

    measured: int
    layers: int
    file: Path | None
    why: str | None
    seconds: float | None


def calibrate(model: Any) -> Calibrated:
    """Measure a model's keys ahead of time: what the first cache in fewer than 8 bits would do.

    Args:
        model: As for `make_prompt_cache`.

    Returns:
        What is known of them now. No error is raised where they can't be measured or kept.

    Raises:
        UnsupportedError: if this mlx or mlx_lm is not one that is supported.
    """
    own = own_caches(model)
    why = None
    if not any(ours(convert_all(own, KVCacheConfig(), packed_attention=True))):
        why = "no cache of it can be packed"
    elif reads_state(model) or not takes_packed(model):
        why = NO_HANDLES
    if why is not None:
        return Calibrated(0, len(leaves(own)), None, why, None)
    before = known(model)
    found = calibrated(model)
    measured = sum(balance is not None for balance in found.balances)
    why = None if measured else why_none(found)
    file = found.file
    if file is not None and not os.path.isfile(file):  # deleted since
        file = basis_files.save(file.stem, found.balances)
    seconds = None if found is before else found.seconds
    return Calibrated(measured, len(found.balances), file, why, seconds)


def why_none(found: Calibration) -> str:
    """Why a layer of a model that is read packed has no basis of its own."""
    if found.failed is not None:
        return f"a forward pass over random tokens failed ({found.failed})"
    return "its queries or keys were not seen, or not finite"


def reads_state(model: Any) -> bool:
    """Whether the model looks into its caches, and so needs those of mlx_lm."""
    old = not hasattr(mlx_caches.KVCache, "keys_and_values")
    return old and not READ_STATE.isdisjoint(module_names(model))


def _give_rotations(model: Any, config: KVCacheConfig, caches: list[Any]) -> None:
    """Tell our caches how the model's keys turn, to re-position and to re-base.

    Raises:
        ValueError: if the policy re-positions and the model does not allow it.
    """
    try:
        found = rotations(model, caches)
        if config.reposition and not takes_packed(model):
            raise ValueError("it computes on cached keys itself")
    except ValueError as error:
        if config.reposition:
            raise _no_reposition(model, str(error)) from None
        return
    pairs = [
        (leaf, rotation)
        for cache, rotation in zip(caches, found, strict=True)
        for leaf in leaves([cache])
    ]
    ours = [pair for pair in pairs if isinstance(pair[0], QuantizedStreamingCache)]
    others = [leaf for leaf, _ in pairs if not isinstance(leaf, QuantizedStreamingCache)]
    limit = rebase_at(model, [cache.plan for cache, _ in ours], others)
    for cache, rotation in ours:
        cache.rotation, cache.rebase_at = rotation, limit


def _no_reposition(model: Any, reason: str) -> ValueError:
    name = (module_names(model) or [type(model).__module__])[-1].removesuffix(".model")
    return ValueError(f"reposition=True can't serve {name}: {reason}; leave it out")


def convert_all(
    caches: list[Any], config: KVCacheConfig, *, packed_attention: bool, indexed: bool = False
) -> list[Any]:
    """Convert each cache by the policy for its place in the list.

    Raises:
        ValueError: if the policy names a layer that is not there.
    """
    return [
        convert(cache, policy, packed_attention=packed_attention, indexed=indexed)
        for cache, policy in zip(caches, config.by_layer(len(caches)), strict=True)
    ]


def convert(
    cache: Any, config: KVCacheConfig, *, packed_attention: bool, indexed: bool = False
) -> Any:
    """One cache by its kind; a kind that is not known is returned as it is.

    `KVCache` takes the policy; `RotatingKVCache`, a window the model was trained with, keeps that
    window and its own sinks, `ChunkedKVCache` its chunk; `CacheList` is converted member by member.
    """
    if type(cache) is mlx_caches.KVCache:
        return QuantizedStreamingCache(config, packed_attention=packed_attention)
    if type(cache) is mlx_caches.RotatingKVCache and cache.max_size > cache.keep:
        trained = config.replace(sink=cache.keep, window=cache.max_size - cache.keep)
        return QuantizedStreamingCache(trained, packed_attention=packed_attention)
    if type(cache) is mlx_caches.ChunkedKVCache:
        trained = config.replace(sink=0, window=cache.chunk_size)
        return ChunkedCache(trained, packed_attention=packed_attention)
    if type(cache) is mlx_caches.CacheList:
        members = []
        for i, member in enumerate(cache.caches):
            policy = config.at_least_bits(8) if indexed and i == 1 else config
            members.append(convert(member, policy, packed_attention=packed_attention))
        return mlx_caches.CacheList(*members)
    return cache
