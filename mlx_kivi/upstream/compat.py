"""Prompt files of two generations of mlx-lm.

Up to 0.31 a cache has a ``state`` of arrays and a ``meta_state`` of text, and a file's header is
[meta states, metadata, classes]. From 0.32 on, ``state`` holds both, and the header is [metadata,
classes, which entries of the state are no arrays]. Ours are the same in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_caches

from ..models.chunked import ChunkedCache
from ..models.counted_keys import CountedKeysCache
from ..models.latent_caches import LatentCache
from ..models.learned_positions import RestartingCache
from ..quantized_streaming_cache import QuantizedStreamingCache

OURS = {
    cls.__name__: cls
    for cls in (
        QuantizedStreamingCache,
        RestartingCache,
        ChunkedCache,
        CountedKeysCache,
        LatentCache,
    )
}
_MAX_DEPTH = 16  # of lists in lists

# Attributes of mlx_lm's caches in the order of their state in 0.32, and of meta_state in 0.31.
_STATE = {
    "KVCache": ("keys", "values", "offset"),
    "RotatingKVCache": ("keys", "values", "offset", "keep", "max_size", "_idx"),
    "QuantizedKVCache": ("keys", "values", "offset", "group_size", "bits"),
    "ArraysCache": ("cache", "left_padding", "lengths"),
}
_META_STATE = {
    "KVCache": (),
    "RotatingKVCache": ("keep", "max_size", "offset", "_idx"),
    "QuantizedKVCache": ("offset", "group_size", "bits"),
    "ArraysCache": (),
}


def has_meta_state() -> bool:
    """Whether the mlx_lm in use is of the older generation."""
    return hasattr(mlx_caches.KVCache, "meta_state")


@dataclass(frozen=True)
class Record:
    """One cache of a file: its class, what it stored, and the members of a `CacheList`.

    meta: the meta state, None in a file of the newer generation.
    """

    kind: str
    state: Any
    meta: Any
    members: tuple[Record, ...] = ()

    @property
    def ours(self) -> bool:
        return self.kind in OURS or any(m.ours for m in self.members)


def read(
    arrays: dict[str, mx.array], header: Mapping[str, str]
) -> tuple[list[Record], dict[str, str]]:
    """The caches and the metadata of a file of either generation.

    Raises:
        ValueError: if the header or the names of the arrays are of no generation.
    """
    newer = header.get("2.0") == ""
    metadata_at = "0." if newer else "1."
    metadata = {k[2:]: v for k, v in header.items() if k.startswith(metadata_at)}
    tree = _nested({k: v for k, v in header.items() if not k.startswith(metadata_at)})
    classes = _listed(tree["1" if newer else "2"])
    if not isinstance(classes, list) or not all(isinstance(c, str) for c in classes):
        raise ValueError("the header lists no caches")
    if newer:
        arrays = _with_scalars(arrays, _listed(tree["2"])[1:])
    # A list without arrays leaves no name behind.
    states = _nested(arrays)
    parts = [(c, _listed(states.get(str(i), {}))) for i, c in enumerate(classes)]
    if newer:
        return [_newer(*part) for part in parts], metadata
    metas = _listed(tree["0"])
    return [_older(*part, meta) for part, meta in zip(parts, metas, strict=True)], metadata


def restore(record: Record) -> Any:
    """The cache that a record describes.

    Raises:
        ValueError: for a class that is unknown, or that can't cross between generations.
    """
    if record.kind in OURS:
        return OURS[record.kind].from_state(record.state)
    if record.members:
        return mlx_caches.CacheList(*(restore(m) for m in record.members))
    cls = getattr(mlx_caches, record.kind, None)
    if not isinstance(cls, type) or not hasattr(cls, "from_state"):
        raise ValueError(f"{record.kind} is no cache of this mlx-lm")
    if has_meta_state() == (record.meta is not None):
        return cls.from_state(*([record.state] if record.meta is None else _both(record)))
    if record.kind not in _STATE:
        raise ValueError(f"its {record.kind} was saved with another generation of mlx-lm")
    cache: Any = object.__new__(cls)
    vars(cache).update(_attributes(record))
    return cache


def _both(record: Record) -> list[Any]:
    return [record.state, record.meta]


def _attributes(record: Record) -> dict[str, Any]:
    if record.meta is None:
        return dict(zip(_STATE[record.kind], record.state, strict=True))
    if record.kind == "ArraysCache":
        return {"cache": record.state, "left_padding": None, "lengths": None}
    keys, values = record.state
    named = dict(zip(_META_STATE[record.kind], map(int, record.meta), strict=True))
    offset = {"offset": keys.shape[2]} if record.kind == "KVCache" else {}
    return {"keys": keys, "values": values, **offset, **named}


def _newer(kind: str, state: Any) -> Record:
    if kind != "CacheList":
        return Record(kind, state, None)
    return Record(kind, None, None, tuple(_newer(name, member) for member, name in state))


def _older(kind: str, state: Any, meta: Any) -> Record:
    if kind != "CacheList":
        return Record(kind, state, meta)
    return Record(kind, None, None, tuple(map(_older, meta[0], state, meta[1])))


def _with_scalars(arrays: dict[str, mx.array], listed: list[list[str]]) -> dict[str, Any]:
    """Turn the arrays that stand for other things back into them."""
    out: dict[str, Any] = dict(arrays)
    for name, kind in listed:
        if kind == "scalar":
            out[name] = arrays[name].item()
        elif kind == "string":
            codes: Any = arrays[name].tolist()
            out[name] = "".join(map(chr, codes))
        elif kind == "none":
            out[name] = None
        else:
            raise ValueError(f"{name} is of an unknown kind ({kind!r})")
    return out


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Dictionaries in dictionaries from names like "0.2.1"."""
    root: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        if len(path) > _MAX_DEPTH:
            raise ValueError("lists are nested too deeply")
        node = root
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return root


def _listed(tree: Any) -> Any:
    """The lists that such dictionaries stand for; mlx's own would fill any gap, however large."""
    if not isinstance(tree, dict):
        return tree
    if any(str(i) not in tree for i in range(len(tree))):
        raise ValueError(f"entries are missing among {', '.join(tree)[:80]}")
    return [_listed(tree[str(i)]) for i in range(len(tree))]
