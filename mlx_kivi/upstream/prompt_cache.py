"""The server's prompt cache: what mlx_lm's does, and what it gets wrong.

mlx_lm's own (0.32.2) has no bound on its bytes but when a request joins a running batch
(mlx-lm#1390), gives a prompt that it holds whole with nothing left to feed (mlx-lm#1215), looks no
further than `can_trim_prompt_cache`, which no bounded cache fulfils once it has evicted, and
keeps caches under keys of more tokens than they hold (mlx-lm#1494).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, LRUPromptCache

from ..models.calibration import leaves
from ..models.factory import ours
from .replacements import can_trim

Key = tuple[Any, list[int]]  # a model, and tokens


class PromptCache(LRUPromptCache):
    """Caches of prompts and answers by their tokens, least recently used out first.

    Args:
        max_size: Entries at most.
        max_bytes: Bytes at most, of all arrays that entries keep alive; None: no bound.
    """

    def __init__(self, max_size: int = 10, max_bytes: int | None = None) -> None:
        super().__init__(max_size, 1 << 63 if max_bytes is None else max_bytes)

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[list[Any] | None, list]:
        """A copy of the caches that hold most of a prompt, and the tokens that are left to feed.

        At least one is left. An entry that goes on differently is trimmed to what both have in
        common, if each of its layers can be; otherwise the next best serves.
        """
        shared = [(_common(key, tokens[:-1]), key) for known, key in self._keys() if known == model]
        for count, key in sorted(shared, key=lambda one: (-one[0], len(one[1]))):
            if count == 0:
                break
            caches = trimmed(self._trie.get(model, key).prompt_cache, len(key) - count)
            if caches is not None:
                entry = self._trie.get(model, key)
                self._lru.remove(model, key)
                self._lru.push(model, key, entry.cache_type)
                return caches, tokens[count:]
        return None, tokens

    def insert_cache(
        self,
        model: Any,
        tokens: list[int],
        prompt_cache: list[Any],
        *,
        cache_type: str = "assistant",
        counted: bool = False,
    ) -> None:
        """Keep caches under the tokens that they hold: if fewer than ``tokens``, under those.

        Entries that it continues make way if it can be trimmed to serve whatever they can, or if
        they are of turns gone by. Caches of more bytes than all may have, of unknown bytes or of
        unknown tokens, are not kept.

        Args:
            model: What tells models apart.
            tokens: What was fed, and what may have been.
            prompt_cache: The caches, not to be used by the caller any more.
            cache_type: "assistant", "user" or "system": which go first.
            counted: Whether the caches hold just ``tokens``: the state of a recurrent layer does
                not tell.
        """
        count = _held(prompt_cache, len(tokens) if counted else None, len(tokens))
        if not count:
            return
        tokens = tokens[:count]
        for cache in ours(prompt_cache):
            cache.shrink()
        for cache in leaves(prompt_cache):
            if isinstance(cache, ArraysCache):  # a row of a batch is a slice, which keeps all alive
                cache.cache = [x if x is None else mx.contiguous(x) for x in cache.cache]
        # What is not computed keeps alive all that it is computed from.
        mx.eval([cache.state for cache in prompt_cache])
        try:
            size = sum(cache.nbytes for cache in prompt_cache)
        except NotImplementedError:  # it could not be bounded
            return
        if size > self.max_bytes:
            return
        self._make_way(model, tokens, prompt_cache)
        self._trie.add(model, tokens, self.CacheEntry(prompt_cache, size, cache_type))
        self._lru.push(model, tokens, cache_type)
        self._n_bytes += size
        self._n_bytes_by_type[cache_type] += size
        self.trim_to(n_sequences=self.max_size, n_bytes=self.max_bytes)

    def _make_way(self, model: Any, tokens: list[int], caches: list[Any]) -> None:
        """Remove what a new entry continues and can serve for, and what is of turns gone by.

        Where layers can't be trimmed, the longest of each kind stays, for a turn that is asked
        for again or written anew. What systems were told stays where they may come to that.
        """
        alike = [key for known, key in self._keys() if known == model]
        begin = [key for key in alike if key == tokens[: len(key)]]
        serves, kinds = all(map(_goes_back, leaves(caches))), set()
        ever = serves and not any(map(_bounded, leaves(caches)))
        for key in sorted(begin, key=len, reverse=True):
            kind = self._trie.get(model, key).cache_type
            if key == tokens or ever or (kind != "system" and (serves or kind in kinds)):
                self._remove(model, key)
            kinds.add(kind)

    def _keys(self) -> Iterator[Key]:
        for lru in self._lru._lrus.values():
            yield from lru

    def _remove(self, model: Any, tokens: list[int]) -> None:
        entry = self._trie.pop(model, tokens)
        self._lru.remove(model, tokens)
        self._n_bytes -= entry.nbytes
        self._n_bytes_by_type[entry.cache_type] -= entry.nbytes


def trimmed(caches: Sequence[Any], n: int) -> list[Any] | None:
    """A copy of caches without their last n tokens; None if a layer can't forget just so many."""
    if n and not all(can_trim(cache, n) for cache in caches):
        return None
    copies = copy.deepcopy(list(caches))
    if n and any(cache.trim(n) != n for cache in copies):
        return None
    return copies


def _bounded(cache: Any) -> bool:
    """Whether a cache lets go of tokens once it is full."""
    plan = getattr(cache, "plan", None)
    bounds = [getattr(cache, name, None) for name in ("max_size", "chunk_size")]
    return any(bounds) or (plan is not None and plan.window is not None)


def _goes_back(cache: Any) -> bool:
    """Whether a cache can be trimmed to any number of tokens."""
    return cache.is_trimmable() and not getattr(cache, "start_position", 0)


def _held(caches: list[Any], counted: int | None, most: int) -> int:
    """Tokens that all of the caches hold, ``most`` at most, what is beyond trimmed; 0: unknown."""
    caches = [cache for cache in caches if not cache.empty()]  # some models leave some unused
    counts = [count for cache in caches if (count := _count(cache)) is not None]
    known = counts if counted is None else [*counts, counted]
    least = min([*known, most]) if known else 0
    beyond = [(cache, (_count(cache) or least) - least) for cache in caches]
    if any(count > least for count in known):
        if len(counts) < len(caches) or not all(can_trim(cache, n) for cache, n in beyond):
            return 0
        if any(n and cache.trim(n) != n for cache, n in beyond):
            return 0
    return least


def _count(cache: Any) -> int | None:
    """Tokens that a cache has seen, None if it does not tell; members of a list agree."""
    members = [_count(member) for member in getattr(cache, "caches", ())]
    told = [count for count in members if count is not None]
    if told:
        return max(told)
    count = getattr(cache, "seen", getattr(cache, "offset", None))
    return None if count is None else int(count)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of what two lists of tokens begin with alike."""
    n = min(len(a), len(b))
    same = np.array(a[:n]) == np.array(b[:n])
    return n if same.all() else int(same.argmin())
