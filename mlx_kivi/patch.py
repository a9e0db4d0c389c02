"""`patch`, `unpatch`, `patched`: make mlx_lm use our caches, and put it back exactly."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from mlx_lm.generate import BatchGenerator
from mlx_lm.models import cache as mlx_caches

from . import hooks
from .config import KVCacheConfig
from .hooks import Hook, HookSet, UnsupportedError
from .models.factory import build
from .report import unconverted
from .upstream import replacements  # noqa: F401 - tells the hooks what they install


def _factory_hooks() -> tuple[dict[str, Hook], list[tuple[Any, str, Any]]]:
    def make_prompt_cache(model, max_kv_size=None):
        from mlx_kivi.patch import dispatch_make

        return dispatch_make(model, max_kv_size)

    def _make_new_cache(self):
        from mlx_kivi.patch import dispatch_new

        return dispatch_new(self)

    found = {"make_prompt_cache": Hook(mlx_caches.make_prompt_cache, make_prompt_cache)}
    # mlx_lm 0.31 bounds caches of its own class here, and later ones ask for bounded ones.
    theirs = getattr(BatchGenerator, "_make_new_cache", None)
    if theirs is not None:
        found["_make_new_cache"] = Hook(theirs, _make_new_cache)
    return found, []


_factory = HookSet(_factory_hooks)
_patched_config: KVCacheConfig | None = None
_local_config: ContextVar[KVCacheConfig | None] = ContextVar("mlx_kivi_config", default=None)


class UnconvertedCacheWarning(UserWarning):
    """Some layers keep a cache that is not packed or not bounded."""


def patch(config: KVCacheConfig | None = None, **fields: Any) -> None:
    """Make every `make_prompt_cache` of mlx_lm, wherever it is bound, build our caches.

    Args:
        config: The policy; or its fields as keywords (`KVCacheConfig`). Without either: int8,
            no window, which changes no token.

    Raises:
        ValueError: for a bad field.
        TypeError: for an unknown one, or both a config and fields.
        UnsupportedError: if this mlx_lm is not one that is supported; nothing is changed then.
    """
    global _patched_config
    chosen = _as_config(config, fields)
    _hold("patch")
    _patched_config = chosen


def unpatch() -> None:
    """Undo `patch` and what `make_prompt_cache` needed; a `patched` block stays until its end."""
    global _patched_config
    _patched_config = None
    _release("patch")
    hooks.attention.release("make_prompt_cache")


@contextmanager
def patched(config: KVCacheConfig | None = None, **fields: Any) -> Iterator[KVCacheConfig]:
    """`patch` for a ``with`` block, in this thread only: other threads keep their policy.

    Threads that are started in the block do too, mlx_lm's server among them: use `patch` there.
    """
    chosen = _as_config(config, fields)
    holder = object()
    _hold(holder)
    token = _local_config.set(chosen)
    try:
        yield chosen
    finally:
        _local_config.reset(token)
        _release(holder)


def _hold(holder: Any) -> None:
    hooks.attention.hold(holder)
    try:
        _factory.hold(holder)
    except UnsupportedError:
        hooks.attention.release(holder)
        raise


def _release(holder: Any) -> None:
    _factory.release(holder)
    hooks.attention.release(holder)


def _as_config(config: KVCacheConfig | None, fields: dict[str, Any]) -> KVCacheConfig:
    if config is None:
        return KVCacheConfig(**fields) if fields else KVCacheConfig.from_name("int8")
    if fields:
        raise TypeError(f"give a config or its fields, not both: {', '.join(fields)}")
    return config


def dispatch_make(model: Any, max_kv_size: int | None) -> list[Any]:
    """What runs in place of mlx_lm's `make_prompt_cache` while it is patched."""
    config = _local_config.get() or _patched_config
    if config is None:  # in another thread's `patched` block
        return _factory.original("make_prompt_cache")(model, max_kv_size)
    caches = build(model, config, max_kv_size)
    for line in unconverted(model, caches):
        warnings.warn(f"mlx_kivi: {line}", UnconvertedCacheWarning, stacklevel=3)
    return caches


def dispatch_new(generator: BatchGenerator) -> list[Any]:
    """What runs in place of `BatchGenerator._make_new_cache`, where there is one."""
    if _local_config.get() is None and _patched_config is None:
        return _factory.original("_make_new_cache")(generator)
    return dispatch_make(generator.model, generator.max_kv_size)
