"""Drafts that are checked in one call, for models that get arrays from a packed cache.

Arrays show all rows of a call the same tokens. When a group is packed midway, the rows after that
point would still see it unpacked, and single steps would not: such a call is made in two.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from . import hooks
from .quantized_streaming_cache import QuantizedStreamingCache


class Stepwise:
    """A model whose calls end where one of its caches packs a group.

    Args:
        model: The model that is called.
        prompt: Tokens to pass on as they come: a prompt's calls are as without a draft.
    """

    def __init__(self, model: Any, prompt: int) -> None:
        self._model = model
        self._prompt = prompt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        """Logits [B, L, V] of tokens [B, L]."""
        parts = []
        if self._prompt > 0:
            self._prompt -= inputs.shape[1]
        else:
            while (due := _until_packing(cache)) < inputs.shape[1]:
                parts.append(self._model(inputs[:, :due], cache=cache))
                inputs = inputs[:, due:]
        last = self._model(inputs, cache=cache)
        return mx.concatenate([*parts, last], axis=1) if parts else last


def _dense(caches: list[Any]) -> Iterator[QuantizedStreamingCache]:
    """Caches of ours that pack and hand out arrays."""
    for cache in caches:
        for leaf in getattr(cache, "caches", [cache]):
            if isinstance(leaf, QuantizedStreamingCache) and not leaf.packed_attention:
                if leaf.config.quantized and leaf.plan.residual is not None:
                    yield leaf


def _until_packing(caches: list[Any]) -> int:
    return min(leaf.plan.until_packing(leaf.seen) for leaf in _dense(caches))


def hook() -> hooks.Hook:
    """`Stepwise` in mlx_lm's ``speculative_generate_step``."""
    # The package binds a function of this name over the module.
    function = importlib.import_module("mlx_lm.generate").speculative_generate_step
    streamed = "stream" in inspect.signature(function).parameters
    return hooks.Hook(function, _with_stream if streamed else _without_stream)


# mlx-lm 0.32 and 0.31. Their code runs with mlx_lm's globals and the defaults of the original.


def _with_stream(
    prompt,
    model,
    draft_model,
    stream,
    *,
    num_draft_tokens,
    max_tokens,
    sampler,
    logits_processors,
    prompt_cache,
    prefill_step_size,
    kv_bits,
    kv_group_size,
    quantized_kv_start,
):
    arguments = dict(locals())
    from mlx_kivi.speculation import dispatch

    return dispatch(arguments)


def _without_stream(
    prompt,
    model,
    draft_model,
    *,
    num_draft_tokens,
    max_tokens,
    sampler,
    logits_processors,
    prompt_cache,
    prefill_step_size,
    kv_bits,
    kv_group_size,
    quantized_kv_start,
):
    arguments = dict(locals())
    from mlx_kivi.speculation import dispatch

    return dispatch(arguments)


def dispatch(arguments: dict[str, Any]) -> Iterator[Any]:
    """``speculative_generate_step``, its model called so that drafts change no token."""
    from mlx_lm.models.cache import make_prompt_cache

    model, draft = arguments["model"], arguments["draft_model"]
    caches = arguments["prompt_cache"]
    if caches is None:
        caches = make_prompt_cache(model)
        if len(caches) == len(model.layers):  # mlx_lm tells the two models' apart by that
            arguments["prompt_cache"] = [*caches, *make_prompt_cache(draft)]
    if arguments["prompt_cache"] is not None and any(_dense(caches[: len(model.layers)])):
        arguments["model"] = Stepwise(model, arguments["prompt"].size - 1)
    return hooks.attention.original("speculative_generate_step")(**arguments)
