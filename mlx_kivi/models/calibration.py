"""Measuring what a model's keys and queries are like: once a model, from random tokens.

One forward pass over random token ids gives every layer's second moments; `cache.basis` says what
follows from them. No text and no tokenizer is needed: on the model measured, a basis from random
tokens is as good as one from the text itself (docs/quality.md).
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten
from tqdm import tqdm

from .. import hooks
from ..cache.attention import CacheHandle, CacheView
from ..cache.basis import Balance
from ..quantized_streaming_cache import QuantizedStreamingCache
from . import basis_files
from .learned_positions import table_size

TOKENS = 1024
_RUN = 32  # tokens whose mean key is taken off: about as many share a scale
_SKIP = 4  # tokens that stay unpacked as sinks
_SIZES = ("vocab_size", "num_vocab", "vocabSize")
_FLOOR = 1e-5  # of eigenvalues, as a part of the largest
# Part of the moments between channels that is not believed: so few tokens say little of them.
_SHRINK = 0.3
_FIRST = 16  # ids from here on are drawn: those before are special in most vocabularies

MakeCaches = Callable[[], list[Any]]


@dataclass(frozen=True)
class Calibration:
    """What was measured of a model.

    balances: one a cache, members of a `CacheList` singly; None where nothing could be measured;
    failed: why the pass failed, None if it did not; file: what holds them, None if none does;
    seconds: what the pass took, None if they were there already; shapes: of the parameters then.
    """

    balances: tuple[Balance | None, ...]
    failed: str | None = None
    file: Path | None = None
    seconds: float | None = None
    shapes: int = 0


_measured: dict[int, Calibration] = {}  # by id, for as long as a model lives
_lock = threading.RLock()


def known(model: Any) -> Calibration | None:
    """What was measured of a model before, in this process or by a file that it read."""
    return _measured.get(id(model))


def calibration(model: Any, count: int, make: MakeCaches) -> Calibration:
    """The model's own, from memory, from the user's cache directory, or measured now.

    It stays what it is for as long as the model lives and its parameters keep their shapes:
    weights that are changed later are served less well by it, but as exactly. That of a model
    which computes in several processes is in no file.

    Args:
        model: The model.
        count: Its caches, members of a `CacheList` counted singly.
        make: Makes caches of ours for it, in full precision and empty.
    """
    with _lock:
        shapes = _shapes(model)
        found = _measured.get(id(model))
        if found is None:
            try:
                weakref.finalize(model, _measured.pop, id(model), None)
            except TypeError:  # an object with slots: nothing says when it is gone
                return _kept_or_measured(model, count, make)
        # Sharded since, a model has fewer heads in this process.
        if found is None or len(found.balances) != count or found.shapes != shapes:
            found = replace(_kept_or_measured(model, count, make), shapes=shapes)
            _measured[id(model)] = found
        return found


def _shapes(model: Any) -> int:
    if not isinstance(model, nn.Module):
        return 0
    flat = dict(tree_flatten(model.parameters()))
    return hash(tuple((name, x.shape) for name, x in flat.items()))


def _kept_or_measured(model: Any, count: int, make: MakeCaches) -> Calibration:
    # All processes of one model have to run the pass, or none: a file may be there for one alone.
    name = None if _spread(model) else _name(model)
    kept = None if name is None else basis_files.load(name, count)
    if name is not None and kept is not None:
        return Calibration(kept, file=basis_files.path(name))
    start = time.perf_counter()
    try:
        balances = measure(model, make)
    except Exception as error:  # whatever the model makes of it: it can do without
        line = " ".join(str(error).split())[:200] or type(error).__name__
        return Calibration((None,) * count, line)
    seconds = time.perf_counter() - start
    file = None if name is None else basis_files.save(name, balances)
    return Calibration(balances, file=file, seconds=seconds)


def _spread(model: Any) -> bool:
    """Whether the model computes in several processes together."""
    for module in model.modules() if isinstance(model, nn.Module) else []:
        groups = [x for x in vars(module).values() if isinstance(x, mx.distributed.Group)]
        if getattr(module, "pipeline_size", 1) > 1 or any(group.size() > 1 for group in groups):
            return True
    return False


def _name(model: Any) -> str | None:
    try:
        return basis_files.fingerprint(model)
    except Exception:  # a model of another kind: it is measured, and not kept
        return None


def measure(model: Any, make: MakeCaches) -> tuple[Balance | None, ...]:
    """One forward pass over random token ids, and the basis of each layer that it reaches.

    Args:
        model: The model.
        make: As for `calibration`.
    """
    table = table_size(model)
    count = TOKENS if table is None else min(TOKENS, table)
    ids = token_ids(_vocabulary(model), count)[None]
    watched = [_watched(cache) for cache in make()]
    holder = object()
    hooks.attention.hold(holder)
    try:
        with _undisturbed(model):
            model(mx.array(ids), cache=watched)
    finally:
        hooks.attention.release(holder)
    flat = [leaf if isinstance(leaf, Watched) else None for leaf in leaves(watched)]
    # Nothing is computed yet. What one layer leaves behind must not wait for the last.
    del watched
    for leaf in flat:
        if leaf is not None:
            leaf.cache.reset()
    shown: Iterable[Watched | None] = flat
    if _at_terminal():  # tqdm starts a thread even for a bar that it does not show
        shown = tqdm(flat, "Measuring the model's keys, once", unit=" layers", leave=False)
    return tuple([None if leaf is None else leaf.balance() for leaf in shown])


def _at_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # none, or closed
        return False


@contextmanager
def _undisturbed(model: Any) -> Iterator[None]:
    """No dropout, and the same random numbers each time; all is put back as it was."""
    modules = model.modules() if isinstance(model, nn.Module) else []
    training = [(module, module.training) for module in modules]
    state: Any = mx.random.state
    high, low = state[0].tolist()
    mx.random.seed(0)
    if any(was for _, was in training):
        model.eval()
    try:
        yield
    finally:
        mx.random.seed(high << 32 | low)  # the two words of which the state consists
        for module, was in training:  # parents come before their children
            if module.training != was:
                module.train(was)


def token_ids(size: int, count: int) -> np.ndarray:
    """Random ids [count] of a vocabulary of ``size``, always the same: int32.

    Small ones are as much likelier as common words are (Zipf): vocabularies begin with them.
    """
    draws = np.random.RandomState(0).random_sample(count)
    if size <= 2 * _FIRST:
        return (draws * size).astype(np.int32)
    return (_FIRST * (size / _FIRST) ** draws).astype(np.int32)


def leaves(caches: list[Any]) -> list[Any]:
    """The caches, and in place of each `CacheList` its members."""
    return [leaf for cache in caches for leaf in getattr(cache, "caches", [cache])]


def _watched(cache: Any) -> Any:
    if isinstance(cache, QuantizedStreamingCache):
        return Watched(cache)
    if hasattr(cache, "caches"):
        return type(cache)(*[_watched(member) for member in cache.caches])
    return cache


@dataclass
class Watched:
    """Stands for a cache of ours that hands out handles, and notes what goes by.

    keys: covariance [H, D, D] of keys within a run; queries: sums of q qᵀ [H, D, D].
    """

    cache: QuantizedStreamingCache
    keys: mx.array | None = None
    queries: list[mx.array] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        end = keys.shape[2] - (keys.shape[2] - _SKIP) % _RUN
        runs = keys[0, :, _SKIP:end].astype(mx.float32)
        runs = runs.reshape(runs.shape[0], -1, _RUN, runs.shape[2])
        runs = (runs - runs.mean(axis=2, keepdims=True)).flatten(1, 2)
        self.keys = runs.swapaxes(1, 2) @ runs / runs.shape[1]
        self.cache.update_and_fetch(keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        view = self.cache.view()
        return WatchedHandle(view, 0, self), WatchedHandle(view, 1, self)

    def balance(self) -> Balance | None:
        """What follows; None if no queries came, or if they say nothing."""
        if self.keys is None or not self.queries:
            return None
        queries = sum(self.queries[1:], self.queries[0])
        mx.eval(self.keys, queries)
        try:
            moments = shrunk(np.array(queries)), shrunk(np.array(self.keys))
            return Balance(mx.array(balanced(*moments)))
        except (ValueError, np.linalg.LinAlgError):
            return None


class WatchedHandle(CacheHandle):
    """A handle that notes the queries it is asked with."""

    def __init__(self, view: CacheView, which: int, watched: Watched) -> None:
        super().__init__(view, which)
        self._watched = watched

    def attend(
        self,
        queries: mx.array,
        scale: float,
        mask: mx.array | str | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """What mlx_lm's own attention gives."""
        heads, dim = self.shape[1], queries.shape[3]
        q = queries.astype(mx.float32).reshape(heads, -1, dim)
        self._watched.queries.append(q.swapaxes(1, 2) @ q / q.shape[1])
        own = hooks.attention.original("scaled_dot_product_attention")
        keys, values = (self.view.dense(which) for which in range(2))
        return own(queries, keys, values, None, scale, mask, sinks)


def balanced(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The matrix of a `Balance` from second moments of queries and keys, each [H, D, D].

    Raises:
        ValueError: if they are not finite, or all zero.
    """
    sq, sk = queries.astype(np.float64), keys.astype(np.float64)
    root = _power(sq, 0.5)
    values, vectors = _eigen(root @ sk @ root)
    falling = np.flip(values, axis=-1), np.flip(vectors, axis=-1)
    matrix = root @ falling[1] * falling[0][:, None] ** -0.25
    # Of about the size of a rotation: the keys stay in the range of 16 bits.
    return matrix / np.sqrt((matrix**2).sum(axis=1, keepdims=True).mean(axis=2, keepdims=True))


def shrunk(x: np.ndarray) -> np.ndarray:
    """Moments [H, D, D], the part between channels made smaller."""
    x = x.astype(np.float64)
    return (1 - _SHRINK) * x + _SHRINK * x * np.eye(x.shape[1])


def _power(x: np.ndarray, power: float) -> np.ndarray:
    values, vectors = _eigen(x)
    return (vectors * values[:, None] ** power) @ vectors.swapaxes(1, 2)


def _eigen(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues [H, D] and vectors of symmetric matrices, the least raised to a floor."""
    if not np.isfinite(x).all():
        raise ValueError("moments that are not finite")
    values, vectors = np.linalg.eigh((x + x.swapaxes(1, 2)) / 2)
    if values[:, -1].min() <= 0:
        raise ValueError("moments that are zero")
    return np.maximum(values, _FLOOR * values[:, -1:]), vectors


def _vocabulary(model: Any) -> int:
    """Token ids that the model knows.

    Raises:
        ValueError: if it does not say.
    """
    for part in (getattr(model, "language_model", None), model):
        for args in (getattr(part, "args", None), getattr(part, "config", None)):
            for settings in (args, getattr(args, "text_config", None)):
                for name in _SIZES:
                    size = getattr(settings, name, None)
                    if isinstance(settings, dict):
                        size = settings.get(name)
                    if isinstance(size, int) and size > 0:
                        return size
    raise ValueError("the model does not say how many token ids it knows")
