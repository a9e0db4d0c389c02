"""How the keys of a model's layers turn from position to position, and which can't be turned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from ..cache.rotation import REBASE_AT, REBASE_BY, Rotation
from .architectures import DENSE, LATENT, PACKED, module_names

_MLA = "the part of its keys that turns is cached apart from the rest"
_NORM = "its keys pass a weighted norm after RoPE"
_LEARNED = "its positions are learned, and a window already counts them inside the cache"

# Modules of mlx_lm.models whose cached keys can't be turned.
_FIXED = {
    **{name: _MLA for name in LATENT},
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
    last = any(name in _LAST for name in names)
    for name, module in _modules("", layer):
        if name in ("rope", "rotary_emb"):
            found.append(_of_rope(module, last))
        elif "_rope_freqs" in module:  # talkie, nanochat
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


def _modules(name: str, node: Any) -> Iterator[tuple[str, nn.Module]]:
    """A module and all below it, each by the name of its place.

    As ``named_modules``, in a third of the time: each new list of caches asks anew, so that what
    is changed in a RoPE counts.
    """
    if isinstance(node, nn.Module):
        yield name, node
    for key, child in node.items() if isinstance(node, dict) else zip(repeat(""), node):
        if isinstance(child, dict | list):
            yield from _modules(key, child)


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
