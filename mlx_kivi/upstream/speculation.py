"""Drafts that are checked in one call: what keeps them from changing tokens.

Handles show each row of a call of up to 32 tokens what a single step would see, and as many
tokens can be taken back: more drafts are refused. Arrays show all rows the same tokens: when a
group is packed midway, the rows after that point would still see it unpacked, so that a call of a
model that gets arrays is made in two there.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from .. import hooks
from ..config import TRIM_MARGIN, KVCacheConfig
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
        needs=("prompt", "model", "draft_model", "num_draft_tokens", "prompt_cache"),
    )


def dispatch(*args: Any, **kwargs: Any) -> Iterator[Any]:
    """``speculative_generate_step``, its model called so that drafts change no token.

    Raises:
        ValueError: for 32 drafts or more with a cache of ours that is packed or bounded.
    """
    original = hooks.attention.original(_NAME)
    signature = inspect.signature(original)
    given = signature.bind(*args, **kwargs).arguments
    model, caches = given["model"], given.get("prompt_cache")
    if caches is None:
        caches = make_prompt_cache(model)
        # mlx_lm tells two models' caches apart by the number of layers.
        if len(caches) == len(model.layers):
            given["prompt_cache"] = caches = caches + make_prompt_cache(given["draft_model"])
    drafts = given.get("num_draft_tokens", signature.parameters["num_draft_tokens"].default)
    if drafts >= TRIM_MARGIN and any(_changes(cache.config) for cache in ours(caches)):
        raise ValueError(
            f"num_draft_tokens={drafts}: use {TRIM_MARGIN - 1} or fewer, which a packed or bounded "
            "cache can take back"
        )
    if given.get("prompt_cache") is not None and not takes_packed(model):
        given["model"] = Stepwise(model, given["prompt"].size - 1)
    return original(**given)


def _changes(config: KVCacheConfig) -> bool:
    """Whether what a cache shows of a token changes as others follow."""
    return config.quantized or config.window is not None
