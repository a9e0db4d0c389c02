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
from mlx_lm.models.cache import make_prompt_cache

from .. import hooks
from ..models.factory import ours
from ..models.probe import takes_packed

_NAME = "speculative_generate_step"


class Stepwise:
    """A model whose calls end where one of its caches packs a group.

    Args:
        model: The model that is called; its caches hand out arrays.
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
            while (due := _until_packing(cache, inputs.shape[1])) < inputs.shape[1]:
                parts.append(self._model(inputs[:, :due], cache=cache))
                inputs = inputs[:, due:]
        last = self._model(inputs, cache=cache)
        return mx.concatenate([*parts, last], axis=1) if parts else last


def _until_packing(caches: list[Any], most: int) -> int:
    """Tokens before the next group is packed, ``most`` if none is within so many."""
    dues = (cache.plan.until_packing(cache.seen) for cache in ours(caches))
    return min((due for due in dues if due is not None), default=most)


def hook() -> hooks.Hook:
    """`Stepwise` in mlx_lm's ``speculative_generate_step``, whose parameters vary by release."""

    def speculative_generate_step(*args, **kwargs):
        from mlx_kivi.upstream.speculation import dispatch

        return dispatch(*args, **kwargs)

    # The package binds a function of this name over the module.
    return hooks.Hook(
        importlib.import_module("mlx_lm.generate").speculative_generate_step,
        speculative_generate_step,
        needs=("prompt", "model", "draft_model", "prompt_cache"),
    )


def dispatch(*args: Any, **kwargs: Any) -> Iterator[Any]:
    """``speculative_generate_step``, its model called so that drafts change no token."""
    original = hooks.attention.original(_NAME)
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    model, caches = given["model"], given.get("prompt_cache")
    if not takes_packed(model):
        if caches is None:
            caches = make_prompt_cache(model)
            if len(caches) != len(model.layers):
                return original(**given)  # which tells two models' caches apart by that
            caches += make_prompt_cache(given["draft_model"])
        given |= {"model": Stepwise(model, given["prompt"].size - 1), "prompt_cache": caches}
    return original(**given)
