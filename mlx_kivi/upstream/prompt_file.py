"""Prompt caches in files: mlx_lm's own format, of either generation, read with suspicion.

While mlx_lm is hooked, its `save_prompt_cache` and `load_prompt_cache` come here for lists that
hold a cache of ours, and stay as they are for all others.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import hooks
from ..config import KVCacheConfig
from ..models.latent_caches import LatentCache
from ..quantized_streaming_cache import QuantizedStreamingCache
from . import compat

_SUFFIX = ".safetensors"


class PromptFileError(ValueError):
    """A prompt file that can't be used: one line that names the file, the fault and the mend."""


def save_prompt_cache(
    file_name: str | os.PathLike[str], cache: list[Any], metadata: dict[str, str] | None = None
) -> None:
    """Write caches to a file that mlx_lm's `load_prompt_cache`, patched, and ours can read.

    The file is complete or not there: it is written beside its place and moved.

    Args:
        file_name: ".safetensors" is appended where it is missing, as mlx_lm does.
        cache: One cache a layer, of any kind.
        metadata: Text to keep with it.

    Raises:
        PromptFileError: if it can't be written.
        UnsupportedError: if this mlx or mlx_lm is not one that is supported.
    """
    save = hooks.attention.original("save_prompt_cache")
    path = _named(file_name)
    place = os.path.realpath(path)
    beside = f"{place.removesuffix(_SUFFIX)}.{secrets.token_hex(4)}.tmp{_SUFFIX}"
    try:
        save(beside, cache, metadata or {})
        os.replace(beside, place)
    except (OSError, RuntimeError) as error:
        raise PromptFileError(f"{path}: can't be written ({_line(error)})") from None
    finally:
        Path(beside).unlink(missing_ok=True)


def load_prompt_cache(
    file_name: str | os.PathLike[str], return_metadata: bool = False
) -> list[Any] | tuple[list[Any], dict[str, str]]:
    """Read what `save_prompt_cache` wrote, ours or mlx_lm's; with or without `patch`.

    Settings are those of the file, whatever the policy in force; `check` compares the two.

    Returns:
        The caches; with ``return_metadata``, also the metadata.

    Raises:
        PromptFileError: for a file that is missing, cut short, of another kind or tampered with.
        UnsupportedError: if this mlx or mlx_lm is not one that is supported.
    """
    records, metadata = _read(file_name)
    caches = _restore(file_name, records)
    # As for `make_prompt_cache`: packed caches need mlx_lm's attention to know them.
    hooks.attention.hold("make_prompt_cache")
    return (caches, metadata) if return_metadata else caches


def check(caches: list[Any], expected: list[Any]) -> None:
    """Refuse caches from a file that contradict the model or the flags.

    Args:
        caches: What `load_prompt_cache` returned.
        expected: What the model and the policy in force give, as from `make_prompt_cache`.

    Raises:
        PromptFileError: names the first difference, and the mend.
    """
    if len(caches) != len(expected):
        raise PromptFileError(
            f"--prompt-cache-file has caches for {len(caches)} layers, the model has "
            f"{len(expected)}: use the model that the file was made with"
        )
    for layer, pair in enumerate(zip(caches, expected, strict=True)):
        flat = [list(_members(cache)) for cache in pair]
        # First the settings: what a cache is for may follow from them.
        for theirs, ours in zip(*flat, strict=False):
            if all(isinstance(cache, QuantizedStreamingCache) for cache in (theirs, ours)):
                _compare(layer, theirs.config, ours.config)
        kinds = [", ".join(map(_kind, members)) for members in flat]
        if kinds[0] != kinds[1]:
            raise PromptFileError(
                f"--prompt-cache-file has {kinds[0]} for layer {layer}, the flags give "
                f"{kinds[1]}: leave the cache's flags out, or make the file again"
            )


def _kind(cache: Any) -> str:
    # Version 0.1.0 had no class of its own for latents; what it saved is read as it was then.
    of = QuantizedStreamingCache if isinstance(cache, LatentCache) else type(cache)
    return of.__name__


def _compare(layer: int, theirs: KVCacheConfig, ours: KVCacheConfig) -> None:
    for field in fields(KVCacheConfig):
        mine, its = getattr(ours, field.name), getattr(theirs, field.name)
        if mine != its:
            raise PromptFileError(
                f"--prompt-cache-file was made with {field.name}={its} (layer {layer}), the flags "
                f"give {field.name}={mine}: leave the cache's flags out, or make the file again"
            )


def _members(cache: Any) -> Iterator[Any]:
    for member in getattr(cache, "caches", ()):
        yield from _members(member)
    if not hasattr(cache, "caches"):
        yield cache


def dispatch_save(file_name: Any, cache: list[Any], metadata: dict[str, str] | None) -> None:
    """mlx_lm's `save_prompt_cache` while it is hooked."""
    ours = any(isinstance(m, QuantizedStreamingCache) for c in cache for m in _members(c))
    if ours and isinstance(file_name, str | os.PathLike):
        save_prompt_cache(file_name, cache, metadata)
    else:
        hooks.attention.original("save_prompt_cache")(file_name, cache, metadata or {})


def dispatch_load(file_name: Any, return_metadata: bool) -> Any:
    """mlx_lm's `load_prompt_cache` while it is hooked."""
    if not isinstance(file_name, str | os.PathLike):
        return hooks.attention.original("load_prompt_cache")(file_name, return_metadata)
    records, metadata = _read(file_name)
    if any(record.ours for record in records):
        caches = _restore(file_name, records)
        return (caches, metadata) if return_metadata else caches
    with _broken_if_it_fails(file_name):
        return hooks.attention.original("load_prompt_cache")(_named(file_name), return_metadata)


def _named(file_name: str | os.PathLike[str]) -> str:
    path = os.fspath(file_name)
    return path if path.endswith(_SUFFIX) else path + _SUFFIX


def _read(file_name: str | os.PathLike[str]) -> tuple[list[compat.Record], dict[str, str]]:
    path = _named(file_name)
    if not os.path.isfile(path):
        raise PromptFileError(f"{path}: no such file")
    try:
        loaded: Any = mx.load(path, return_metadata=True)
        arrays, header = loaded
        mx.eval(arrays)  # now, not when the file may have changed
        return compat.read(arrays, header)
    except Exception as error:  # the file may be anything
        raise PromptFileError(
            f"{path}: not a whole prompt cache file ({_line(error)}); make it again"
        ) from None


def _restore(file_name: str | os.PathLike[str], records: list[compat.Record]) -> list[Any]:
    with _broken_if_it_fails(file_name):
        return [compat.restore(record) for record in records]


@contextmanager
def _broken_if_it_fails(file_name: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # mlx_lm's own classes check nothing
        raise PromptFileError(
            f"{_named(file_name)}: its caches are broken ({_line(error)}); make it again"
        ) from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
