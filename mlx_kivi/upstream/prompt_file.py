"""Prompt caches in files: mlx_lm's own format, of either generation, read with suspicion.

While mlx_lm is hooked, its `save_prompt_cache` and `load_prompt_cache` come here for lists that
hold a cache of ours, and stay as they are for all others. What their keys' bases are is a property
of the model: a file has each once, in an entry behind those of the model's caches.
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
from ..cache.basis import Balance
from ..config import PRESETS, KVCacheConfig
from ..models.latent_caches import LatentCache
from ..quantized_streaming_cache import QuantizedStreamingCache
from . import compat

_SUFFIX = ".safetensors"
# What a preset decides of a policy: bounds come from flags of their own.
_OF_PRESETS = ("k_bits", "v_bits", "group_size", "residual_length", "dtype", "balanced")


class PromptFileError(ValueError):
    """A prompt file that can't be used: one line that names the file, the fault and the mend."""


class KeyBases:
    """The bases that caches are packed in, as one more entry of a file.

    state: the matrix [H, D, D] bfloat16 of each, once; ``meta_state`` is what mlx-lm up to 0.31
    asks for.
    """

    meta_state = ""

    def __init__(self, balances: list[Balance]) -> None:
        self.balances = balances

    @property
    def state(self) -> list[mx.array]:
        return [balance.matrix for balance in self.balances]

    @classmethod
    def from_state(cls, state: Any) -> KeyBases:
        """Raises ValueError if it is no list of such matrices."""
        if not isinstance(state, list) or not all(isinstance(x, mx.array) for x in state):
            raise ValueError("its bases are not a list of arrays")
        wrong = [x.dtype for x in state if x.dtype != mx.bfloat16]
        if wrong:
            raise ValueError(f"a basis of {wrong[0]}")
        return cls([Balance.shared(x) for x in state])


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
        save(beside, _with_bases(cache), metadata or {})
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
        if field.name == "balanced" and _moved(ours) == _moved(theirs):
            continue  # as for 8 bits
        if mine != its:
            mend = "leave the cache's flags out, or make the file again"
            if field.name in _OF_PRESETS and (preset := _preset(theirs)):
                mend = f"use --kv-quantize {preset}, or {mend}"
            raise PromptFileError(
                f"--prompt-cache-file was made with {field.name}={its} (layer {layer}), the flags "
                f"give {field.name}={mine}: {mend}"
            )


def _moved(config: KVCacheConfig) -> tuple[bool, bool]:
    return config.moves_keys, config.moves_values


def _preset(config: KVCacheConfig) -> str | None:
    """The one that gives what a policy has beside its bounds."""
    for name in PRESETS:
        made = KVCacheConfig.from_name(name)
        if all(getattr(made, field) == getattr(config, field) for field in _OF_PRESETS):
            return name
    return None


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
        own = hooks.attention.original("save_prompt_cache")
        own(file_name, _with_bases(cache) if ours else cache, metadata or {})


def dispatch_load(file_name: Any, return_metadata: bool) -> Any:
    """mlx_lm's `load_prompt_cache` while it is hooked."""
    records, metadata = _read(file_name)
    if any(record.ours for record in records):
        caches = _restore(file_name, records)
        return (caches, metadata) if return_metadata else caches
    if hasattr(file_name, "seek"):
        file_name.seek(0)
    with _broken_if_it_fails(file_name):
        own = hooks.attention.original("load_prompt_cache")
        return own(_named(file_name), return_metadata)


def _with_bases(caches: list[Any]) -> list[Any]:
    """The caches, and behind them the bases that they name, if any."""
    once = {balance.name: balance for balance in _bases(caches)}
    return [*caches, KeyBases(list(once.values()))] if once else caches


def _bases(caches: list[Any]) -> Iterator[Balance]:
    """The basis of each cache whose state names one."""
    for cache in caches:
        for member in _members(cache):
            if isinstance(member, QuantizedStreamingCache) and member.config.moves_keys:
                if member.balance is not None:
                    yield member.balance


def _named(file_name: Any) -> Any:
    """A path with its suffix; an open file, which mlx_lm takes as well, as it is."""
    if not isinstance(file_name, str | os.PathLike):
        return file_name
    path = os.fspath(file_name)
    return path if path.endswith(_SUFFIX) else path + _SUFFIX


def _shown(file_name: Any) -> str:
    named = _named(file_name)
    return named if isinstance(named, str) else str(getattr(named, "name", "the open file"))


def _read(file_name: Any) -> tuple[list[compat.Record], dict[str, str]]:
    path = _named(file_name)
    if isinstance(path, str) and not os.path.isfile(path):
        raise PromptFileError(f"{path}: no such file")
    try:
        loaded: Any = mx.load(path, return_metadata=True)
        arrays, header = loaded
        mx.eval(arrays)  # now, not when the file may have changed
        return compat.read(arrays, header)
    except Exception as error:  # the file may be anything
        raise PromptFileError(
            f"{_shown(path)}: not a whole prompt cache file ({_line(error)}); make it again"
        ) from None


def _restore(file_name: Any, records: list[compat.Record]) -> list[Any]:
    with _broken_if_it_fails(file_name):
        carried: list[Balance] = []
        if records and records[-1].kind == KeyBases.__name__:
            *records, last = records
            carried = KeyBases.from_state(last.state).balances
        caches = [compat.restore(record) for record in records]
        _check_bases(carried, caches)
        return caches


def _check_bases(carried: list[Balance], caches: list[Any]) -> None:
    """Raises ValueError unless a file has the bases that its caches name, each once."""
    names, needed = [b.name for b in carried], {b.name for b in _bases(caches)}
    if missing := needed.difference(names):
        # Even if it is at hand here: it would not be elsewhere.
        raise ValueError(
            f"the basis {min(missing)} of its keys is not in it: save with "
            "mlx_kivi.save_prompt_cache"
        )
    if len(names) != len(needed):
        raise ValueError(f"it has {len(names)} bases, its caches name {len(needed)}")


@contextmanager
def _broken_if_it_fails(file_name: Any) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # mlx_lm's own classes check nothing
        raise PromptFileError(
            f"{_shown(file_name)}: its caches are broken ({_line(error)}); make it again"
        ) from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
