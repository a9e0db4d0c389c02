"""Positions of models with RoPE: sinks at their index in the cache, and streams without end.

*Re-positioning* (StreamingLLM, arXiv:2309.17453, section 3.2): the position of a kept token is
its index in the cache. RoPE sees differences alone, and inside the window they are right already;
so only the sinks have to come nearer. Stored keys stay as they are: queries that look at the
sinks are turned back instead, at each call anew.

*Re-basing*: the angle of position p has an error of p · 2^-25 radians in float32. Before that
shows, the stream's keys are turned back once and positions are counted from less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite, isnan
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from .architectures import DENSE, PACKED, module_names
from .group_store import KeyStore

# Where a cache re-bases, and by how many positions: the error of its angles costs no more than
# storage in 8 bits (docs/positions.md). Powers of two: their products with a frequency are exact.
REBASE_AT = 2**18
REBASE_BY = 2**17

_MLA = "the part of its keys that turns is cached apart from the rest"
_NORM = "its keys pass a weighted norm after RoPE"
_LEARNED = "its positions are learned, and a window already counts them inside the cache"

# Modules of mlx_lm.models whose cached keys can't be turned.
_FIXED = {
    **{name: _MLA for name, why in DENSE.items() if why.startswith("multi-head latent")},
    "afm7": _NORM,
    "gpt2": _LEARNED,
    "gpt_bigcode": _LEARNED,
    "hunyuan": _NORM,
    "hunyuan_v1_dense": _NORM,
    "minimax_m3_vl": "its indexer's keys turn otherwise",
    "muse_spark": "its RoPE is part of a fused kernel",
}
_KNOWN = (PACKED | set(DENSE) | {"gear"}) - set(_FIXED)

# Layers without a RoPE of theirs have no positions, in these modules.
_NOPE = set(
    """
    afmoe cohere2 exaone4 exaone_moe granitemoehybrid jamba llama4 llama4_text muse_glimmer
    nemotron_h olmo_hybrid smollm3
    """.split()
)
# The last channels of a key turn, not the first.
_LAST = {"deepseek_v2", "minicpm3", "youtu_llm"}
# The position has another use besides RoPE: turned keys summed up in a state, gates made of
# turned queries, scaled queries.
_ABSOLUTE = {"bailing_moe_linear", "iquestloopcoder", "llama4", "ministral3"}


@dataclass(frozen=True)
class Rotation:
    """How the keys of a layer turn from position to position.

    Lengths of vectors never change: a factor that YaRN or LongRoPE put on keys is in them once.

    Args:
        dims: Channels that turn; 0 if the layer has no positions.
        traditional: Whether neighbouring channels are a pair, not channels dims / 2 apart.
        base: Base of the frequencies, or None if ``freqs`` has them.
        scale: Factor of positions.
        freqs: Positions for a turn of one radian, dims / 2 of them.
        last: Whether the channels that turn are the last of a head, not the first.

    Raises:
        ValueError: if a field can't be.
    """

    dims: int
    traditional: bool = False
    base: float | None = None
    scale: float = 1.0
    freqs: tuple[float, ...] | None = None
    last: bool = False

    def __post_init__(self) -> None:
        if self.freqs is not None:
            object.__setattr__(self, "freqs", tuple(float(f) for f in self.freqs))
        dims = self.dims
        if not isinstance(dims, int) or isinstance(dims, bool) or dims < 0 or dims % 2:
            raise ValueError(f"a rotation of {dims!r} channels")
        if not all(isinstance(flag, bool) for flag in (self.traditional, self.last)):
            raise ValueError("a rotation's layout is broken")
        if not isfinite(self.scale) or (dims > 0 and (self.base is None) == (self.freqs is None)):
            raise ValueError("a rotation needs a scale, and either a base or frequencies")
        if self.base is not None and not (isfinite(self.base) and self.base > 0):
            raise ValueError(f"a rotation of base {self.base!r}")
        if self.freqs is not None and (
            2 * len(self.freqs) != dims or any(isnan(f) or f == 0 for f in self.freqs)
        ):
            raise ValueError("a rotation's frequencies are broken")

    def turned(self, x: mx.array, by: int) -> mx.array:
        """Keys x [B, H, T, D], each ``by`` positions later than it is; computed in float32."""
        if self.dims == 0 or x.size == 0:
            return x
        # One token a row: they all turn by the same angle.
        rows = x.astype(mx.float32).reshape(1, -1, 1, x.shape[-1])
        return self._apply(rows, by, self.scale).reshape(x.shape).astype(x.dtype)

    def turned_back(self, x: mx.array, by: int) -> mx.array:
        """Queries x [B, H, L, D], ``by``, ``by`` + 1, … positions earlier, in float32."""
        return self._apply(x.astype(mx.float32), by, -self.scale)

    def _apply(self, x: mx.array, offset: int, scale: float) -> mx.array:
        rest = x.shape[-1] - self.dims if self.last else 0
        part = mx.fast.rope(
            x[..., rest:] if rest else x,
            self.dims,
            traditional=self.traditional,
            base=self.base,
            scale=scale,
            offset=offset,
            freqs=None if self.freqs is None else _array(self.freqs),
        )
        return mx.concatenate([x[..., :rest], part], axis=-1) if rest else part


@lru_cache(maxsize=64)
def _array(values: tuple[float, ...]) -> mx.array:
    return mx.array(values, dtype=mx.float32)


class Moved(NamedTuple):
    """Queries from ``row`` of a call on see the sinks ``by``, ``by`` + 1, … positions nearer."""

    rotation: Rotation
    row: int
    by: int

    def sinks(self, x: mx.array) -> mx.array:
        """Sinks x [B, H, N, D] as the only query of a call sees them."""
        return self.rotation.turned(x, self.by)

    def queries(self, x: mx.array) -> mx.array:
        """What of queries x [B, H, L, D] looks at the sinks, in float32."""
        late = self.rotation.turned_back(x[:, :, self.row :], self.by)
        if self.row == 0:
            return late
        return mx.concatenate([x[:, :, : self.row].astype(mx.float32), late], axis=2)


def rebase(rotation: Rotation, by: int, still: int, ring: mx.array, store: KeyStore) -> mx.array:
    """Count the positions of stored keys from ``by`` less; the first ``still`` of the ring stay.

    Packed groups are unpacked, turned and packed again: one more error of the quantiser for the
    tokens that are in the cache at the time.

    Returns:
        The new ring; the store is written to.
    """
    if rotation.dims == 0:
        return ring
    ring = ring[...]
    ring[:, :, still:] = rotation.turned(ring[:, :, still:], -by)
    if store.capacity:
        x = store.dense(0, store.capacity)
        if store.shift is not None:
            store.shift = rotation.turned(store.shift, -by)
        store.write(0, rotation.turned(x, -by))
    return ring


def rebased_by(offset: int, limit: int) -> int:
    """Positions to re-base by once the next one is ``offset``: 0 below the limit."""
    return max(0, (offset - limit) // REBASE_BY + 1) * REBASE_BY


# What a model's layers do


def rotations(model: Any, caches: Sequence[Any]) -> list[Rotation]:
    """The rotation of each of a model's caches.

    Raises:
        ValueError: one line, without a subject: why cached keys can't be turned.
    """
    names = module_names(model)
    for name in names:
        if name in _FIXED:
            raise ValueError(_FIXED[name])
    if getattr(model, "model_type", None) == "tinygpt":
        raise ValueError(_LEARNED)
    if not names or not _KNOWN.issuperset(names):
        raise ValueError("it is no model of mlx_lm whose positions are known here")
    # nemotron-nas makes no cache for layers without attention; looped models use a layer more
    # than once, and models that share keys make caches for the first layers alone.
    layers = [layer for layer in model.layers if getattr(layer, "self_attn", layer) is not None]
    return [
        Rotation(0) if isinstance(cache, ArraysCache) else _of_layer(layers[i % len(layers)], names)
        for i, cache in enumerate(caches)
    ]


def _of_layer(layer: nn.Module, names: list[str]) -> Rotation:
    found = []
    for path, module in layer.named_modules():
        if path.rpartition(".")[2] in ("rope", "rotary_emb"):
            found.append(_of_rope(module, any(name in _LAST for name in names)))
        elif hasattr(module, "_rope_freqs"):  # talkie, nanochat
            freqs = module._rope_freqs.tolist()
            found.append(Rotation(2 * len(freqs), freqs=tuple(freqs)))
    if "cohere2" in names and not layer.self_attn.use_sliding_window:
        return Rotation(0)
    if len(found) > 1:
        raise ValueError("a layer of it has more than one RoPE")
    if found:
        return found[0]
    if not any(name in _NOPE for name in names):
        raise ValueError("a layer of it has no RoPE that can be found")
    return Rotation(0)


def _of_rope(rope: nn.Module, last: bool) -> Rotation:
    kind = type(rope).__name__
    if type(rope) is nn.RoPE:
        return Rotation(rope.dims, rope.traditional, rope.base, rope.scale, last=last)
    if kind == "NoPE":
        return Rotation(0)
    if kind in ("Llama3RoPE", "YarnRoPE", "ProportionalRoPE"):
        traditional = rope.traditional
    elif kind in ("SuScaledRoPE", "DeepseekV2YarnRotaryEmbedding"):
        traditional = kind != "SuScaledRoPE"
    elif kind.startswith("DynamicNTK"):
        raise ValueError(f"the angles of its {kind} depend on the length of the sequence")
    else:
        raise ValueError(f"its {kind} is not known here")
    freqs = rope._freqs.tolist()
    return Rotation(2 * len(freqs), traditional, freqs=tuple(freqs), last=last)


def rebase_at(model: Any, plans: Sequence[Any], others: Sequence[Any]) -> int | None:
    """The position at which all caches of a model re-base together, None if they can't.

    Args:
        plans: Sizes of our caches (`layout.Plan`).
        others: The model's caches that are not ours.
    """
    if any(name in _ABSOLUTE for name in module_names(model)):
        return None
    if any(plan.window is None for plan in plans):
        return None
    # Recurrent layers have no positions; any other kind would go on counting from the start.
    if not all(isinstance(cache, ArraysCache) for cache in others):
        return None
    # What a window holds keeps its distance to the sinks.
    held = max((plan.sink + plan.window for plan in plans), default=0)
    return max(REBASE_AT, held + REBASE_BY)
