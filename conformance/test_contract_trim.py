"""Taking tokens back: `trim`, mlx-lm's own functions for it, and a step that was broken off."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    can_trim_prompt_cache,
    trim_prompt_cache,
)

import mlx_kivi
from mlx_kivi.config import TRIM_MARGIN

from .contract.kinds import KINDS, OURS, POLICIES, Kind, chunks, feed, same_state
from .contract.models import prompt, run, steps

every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
our_kinds = pytest.mark.parametrize("kind", OURS, ids=str)
bounded_kinds = pytest.mark.parametrize("kind", [k for k in OURS if k.window], ids=str)

# Before and past the windows; group boundaries lie at 52, 84, 116, 148 and 180.
LENGTHS = (20, 55, 84, 86, 100, 117, 150, 181, 210)


@pytest.fixture
def make(llama: nn.Module) -> Callable[[Kind], list[Any]]:
    """Caches of a kind for the tiny llama, packed attention on."""

    def make(kind: Kind) -> list[Any]:
        if kind.ours:
            return mlx_kivi.make_prompt_cache(llama, POLICIES[kind.name])
        return [kind.make() for _ in llama.layers]

    return make


@pytest.mark.parametrize("n", [1, 5, TRIM_MARGIN])
@pytest.mark.parametrize("how", ["step by step", "in one call"])
@every_kind
def test_after_trim_recent_tokens_were_never_seen(
    kind: Kind, how: str, n: int, llama: nn.Module, make: Callable[[Kind], list[Any]]
) -> None:
    for length in LENGTHS:
        if length > kind.limit or n > length:
            continue
        tokens = prompt(length)
        kept, gone = tokens[: length - n], tokens[length - n :]
        caches, fresh = make(kind), make(kind)
        for some in (caches, fresh):
            if kept.size:
                run(llama, some, [kept])
        run(llama, caches, [gone] if how == "in one call" else gone.split(n))
        assert trim_prompt_cache(caches, n) == n
        assert [c.offset for c in caches] == [length - n] * 2
        calls = [prompt(3) + 100, *(prompt(5) + 50).split(5), prompt(40)]
        for got, want in zip(run(llama, caches, calls), run(llama, fresh, calls), strict=True):
            assert mx.array_equal(got, want)
            if kind.name == "RotatingKVCache":
                break  # the later calls go beyond what it keeps in order


@pytest.mark.parametrize("name", ["KVCache", "full", "int8", "int4"])
def test_an_unbounded_cache_can_be_trimmed_to_any_length(name: str) -> None:
    kind = next(k for k in KINDS if k.name == name)
    for target in (199, 150, 101, 60, 20, 3, 0):
        cache, fresh = kind.make(), kind.make()
        feed(cache, *chunks(200))
        assert can_trim_prompt_cache([cache])
        assert trim_prompt_cache([cache], 200 - target) == 200 - target
        assert cache.offset == target
        if target:
            feed(fresh, target)
        for length in (1, 9, 70, 1):
            pair = zip(feed(cache, length, seed=1), feed(fresh, length, seed=1), strict=True)
            for got, want in pair:
                # Tokens that were packed keep the precision that they were packed in.
                step = 0 if kind.bits is None else 8 / (2**kind.bits - 1)
                assert got.shape == want.shape and mx.abs(got - want).max() <= step


@every_kind
def test_trim_returns_what_it_did(kind: Kind) -> None:
    cache = kind.make()
    assert cache.trim(5) == 0
    feed(cache, 10)
    assert cache.trim(0) == 0
    assert cache.trim(7) == 7
    assert cache.trim(7) == 3
    assert cache.offset == 0
    assert cache.trim(1) == 0


@our_kinds
def test_trim_ignores_a_negative_number(kind: Kind) -> None:
    cache = kind.make()
    feed(cache, 10)
    assert cache.trim(-3) == 0
    assert cache.offset == 10


@every_kind
def test_is_trimmable_says_whether_all_tokens_are_still_there(kind: Kind) -> None:
    cache, seen = kind.make(), 0
    bound = 10_000 if kind.window is None else kind.sinks + kind.window
    for length in chunks(230):
        feed(cache, length)
        seen += length
        assert cache.is_trimmable() == (seen < bound)
        assert can_trim_prompt_cache([cache]) == (seen < bound)


@bounded_kinds
def test_past_the_window_the_margin_can_be_trimmed_and_no_more(kind: Kind) -> None:
    cache = kind.make()
    feed(cache, *chunks(200), *[1] * 40)
    before = copy.deepcopy(cache)
    assert not cache.is_trimmable()
    for n in (200, 100):
        assert cache.trim(n) == 0
        assert same_state(cache, before)
    assert cache.trim(TRIM_MARGIN) == TRIM_MARGIN
    assert cache.trim(100) == 0
    assert cache.offset == 240 - TRIM_MARGIN


@bounded_kinds
def test_mlx_lms_trim_reaches_the_margin_while_it_is_hooked(kind: Kind) -> None:
    for hooked in (False, True):
        cache = kind.make()
        feed(cache, *chunks(200), *[1] * 40)
        if hooked:
            mlx_kivi.patch()
        assert trim_prompt_cache([cache], 5) == (5 if hooked else 0)
        assert not can_trim_prompt_cache([cache])


def test_a_list_of_caches_is_trimmed_all_or_not_at_all() -> None:
    mlx_kivi.patch()
    bounded = next(k for k in OURS if k.name == "bounded")
    full = next(k for k in OURS if k.name == "full")
    for with_it, done in ((ArraysCache(2), 0), (KVCache(), 5), (RotatingKVCache(16), 0)):
        if not isinstance(with_it, ArraysCache):
            feed(with_it, 100)
        caches = [full.make(), CacheList(bounded.make(), full.make()), with_it]
        for cache in (caches[0], *caches[1].caches):
            feed(cache, 100, 50, *[1] * 40)
        assert trim_prompt_cache(caches, 5) == done
        assert [c.offset for c in (caches[0], *caches[1].caches)] == [190 - done] * 3
        # One member can't go back so far.
        assert trim_prompt_cache(caches, 90) == 0
        assert [c.offset for c in (caches[0], *caches[1].caches)] == [190 - done] * 3
    assert trim_prompt_cache([], 5) == 0


class Broken:
    """A layer that fails the first time."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer, self.failed = layer, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.failed:
            self.failed = True
            raise InterruptedError("in the middle of a step")
        return self.layer(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


@pytest.mark.parametrize("length", [1, 5, 40])
@pytest.mark.parametrize("seen", [20, 116, 200])
@every_kind
def test_a_step_that_was_broken_off_can_be_taken_back_and_repeated(
    kind: Kind, seen: int, length: int, llama: nn.Module, make: Callable[[Kind], list[Any]]
) -> None:
    """Some layers have the step's tokens then: trim each cache to where the others are.

    That is promised for the last call, however long it was.
    """
    if seen + length > kind.limit:
        pytest.skip("mlx-lm's rotating cache has overwritten what it would go back to")
    caches, fresh = make(kind), make(kind)
    for some in (caches, fresh):
        run(llama, some, [prompt(seen - 3), *prompt(3).split(3)])
    layers = llama.model.layers
    layers[1] = Broken(layers[1])
    try:
        with pytest.raises(InterruptedError):
            run(llama, caches, [prompt(length)])
        assert [c.offset for c in caches] == [seen + length, seen]
        for cache in caches:
            assert cache.trim(cache.offset - seen) == cache.offset - seen or cache.offset == seen
        assert [c.offset for c in caches] == [seen, seen]
        got = [*run(llama, caches, [prompt(length)]), steps(llama, caches, 7, 5)]
    finally:
        layers[1] = layers[1].layer
    want = [*run(llama, fresh, [prompt(length)]), steps(llama, fresh, 7, 5)]
    assert all(mx.array_equal(a, b) for a, b in zip(got, want, strict=True))
