"""What was measured of a model, kept in the user's cache directory; any file of it may go.

A file is named by a fingerprint of the model, and holds the names of what is in it (hashes of the
content), so that one that was cut short or changed is found out, and made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import platformdirs
from mlx.utils import tree_flatten

from ..cache.basis import Balance

# Counts up when another basis is made from the same model.
_VERSION = 1
_SAMPLE = 8  # values of each array that the fingerprint looks at
_LEFT = 3600  # seconds after which what a stopped process was writing is swept up
_UNFINISHED = ".tmp.safetensors"

Balances = tuple[Balance | None, ...]


def directory() -> Path:
    return Path(platformdirs.user_cache_dir("mlx_kivi"))


def path(name: str) -> Path:
    """Where what has this fingerprint is kept."""
    return directory() / f"{name}.safetensors"


def fingerprint(model: Any) -> str:
    """Of the architecture's arguments, and of a sample of the weights."""
    digest = hashlib.sha256(f"{_VERSION} {type(model).__module__} {_settings(model)}".encode())
    samples = []
    for name, array in sorted(dict(tree_flatten(model.parameters())).items()):
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        flat = array.reshape(-1)
        # Their bytes: float32 would not tell the words of quantised weights apart.
        samples.append(flat[:: max(1, flat.size // _SAMPLE)][:_SAMPLE].view(mx.uint8))
    if samples:
        digest.update(np.array(mx.concatenate(samples)).tobytes())
    return digest.hexdigest()[:32]


def _settings(model: Any) -> str:
    for args in (getattr(model, "args", None), getattr(model, "config", None)):
        if is_dataclass(args) and not isinstance(args, type):
            args = asdict(args)
        if isinstance(args, dict):
            return json.dumps(args, sort_keys=True, default=str)
    return ""


def load(name: str, count: int) -> Balances | None:
    """What is kept under a fingerprint, for ``count`` caches; None if nothing sound is."""
    return _read(path(name), name, count)


def _read(place: Path, name: str, count: int) -> Balances | None:
    try:
        if not place.is_file():  # to read from a pipe would wait for ever
            return None
        loaded: Any = mx.load(str(place), return_metadata=True)
        arrays, metadata = loaded
        names = json.loads(metadata["names"])
        if metadata["model"] != name or len(names) != count:
            return None
        found = tuple([n and Balance.shared(arrays[str(i)]) for i, n in enumerate(names)])
    except Exception:  # the file may be anything, or not there
        return None
    return found if [b and b.name for b in found] == names else None


def save(name: str, balances: Balances) -> Path | None:
    """Keep them, all or nothing: the file, None if there is none: a disk may be full or
    read-only."""
    arrays = {str(i): b.matrix for i, b in enumerate(balances) if b is not None}
    metadata = {"model": name, "names": json.dumps([b and b.name for b in balances])}
    beside = None
    try:
        place = path(name)
        place.parent.mkdir(parents=True, exist_ok=True)
        _sweep(place.parent)
        beside = place.with_name(f"{name}.{secrets.token_hex(4)}{_UNFINISHED}")
        mx.save_safetensors(str(beside), arrays, metadata)
        # mlx says nothing of a disk that was full.
        if _read(beside, name, len(balances)) is None:
            return None
        os.replace(beside, place)
        return place
    except Exception:  # whatever a disk makes of it: it is measured again next time
        return None
    finally:
        if beside is not None:
            _remove(beside)


def _sweep(place: Path) -> None:
    """Remove what processes that were stopped left half written."""
    for left in place.glob(f"*{_UNFINISHED}"):
        if left.lstat().st_mtime < time.time() - _LEFT:
            _remove(left)


def _remove(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError:
        pass
