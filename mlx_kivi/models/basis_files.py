"""What was measured of a model, kept in the user's cache directory; any file of it may go.

A file is named by a fingerprint of the model, and holds the names of what is in it (hashes of the
content), so that one that was cut short or changed is found out, and made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
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
        samples.append(flat[:: max(1, flat.size // _SAMPLE)][:_SAMPLE].astype(mx.float32))
    if samples:
        digest.update(np.array(mx.concatenate(samples)).tobytes())
    return digest.hexdigest()[:32]


def _settings(model: Any) -> str:
    args = getattr(model, "args", None)
    if not is_dataclass(args) or isinstance(args, type):
        return ""
    return json.dumps(asdict(args), sort_keys=True, default=str)


def load(name: str, count: int) -> tuple[Balance | None, ...] | None:
    """What is kept under a fingerprint, for ``count`` caches; None if nothing sound is."""
    try:
        loaded: Any = mx.load(str(path(name)), return_metadata=True)
        arrays, metadata = loaded
        names = json.loads(metadata["names"])
        found = tuple(None if n is None else Balance(arrays[str(i)]) for i, n in enumerate(names))
    except Exception:  # the file may be anything, or not there
        return None
    if len(found) != count or [b and b.name for b in found] != names:
        return None
    return found


def save(name: str, balances: tuple[Balance | None, ...]) -> bool:
    """Keep them, all or nothing; whether that could be done: a disk may be full or read-only."""
    place = path(name)
    beside = place.with_name(f"{name}.{secrets.token_hex(4)}.tmp.safetensors")
    arrays = {str(i): b.matrix for i, b in enumerate(balances) if b is not None}
    names = json.dumps([b and b.name for b in balances])
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        mx.save_safetensors(str(beside), arrays, {"names": names})
        os.replace(beside, place)
        return True
    except (OSError, RuntimeError):
        return False
    finally:
        try:
            beside.unlink(missing_ok=True)
        except OSError:
            pass
