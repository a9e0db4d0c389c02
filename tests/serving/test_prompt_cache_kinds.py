"""The prompt cache with every kind of cache: entries hold what they say, and stay as they are."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import _merge_caches
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from conformance.architectures import models
from conformance.common import tiny_llama
from mlx_kivi import KVCacheConfig, QuantizedStreamingCache, make_prompt_cache
from mlx_kivi.models.architectures import own_caches
from mlx_kivi.upstream.prompt_cache import PromptCache, trimmed

SMALL = {"group_size": 32, "residual_length": 16, "sink": 4}
INT4 = KVCacheConfig(k_bits=4, v_bits=4, **SMALL)
BOUNDED = INT4.replace(window=100)
WINDOW = KVCacheConfig(window=40, sink=4)
POLICIES = {
    "full precision": KVCacheConfig(sink=4),
    "window": WINDOW,
    "int4": INT4,
    "int4 bounded": BOUNDED,
    "int2": INT4.replace(k_bits=2, v_bits=2),
}
Maker = Callable[[Any], list[Any]]


def _ours(policy: KVCacheConfig) -> Maker:
    return lambda model: make_prompt_cache(model, policy)


# The model, and what makes its caches.
KINDS: dict[str, tuple[str, Maker]] = {
    "KVCache": ("tiny", own_caches),
    "RotatingKVCache": ("llama", own_caches),
    "ChunkedKVCache": ("llama4", own_caches),
    "QuantizedKVCache": ("tiny", lambda model: [QuantizedKVCache(32, 8) for _ in model.layers]),
    "ArraysCache": ("mamba", own_caches),
    "CacheList": ("falcon_h1", own_caches),
    "CacheList of KVCache": ("deepseek_v32", own_caches),
    "window": ("tiny", _ours(WINDOW)),
    "int4": ("tiny", _ours(INT4)),
    "int4 bounded": ("tiny", _ours(BOUNDED)),
    "int4 sliding": ("llama", _ours(INT4)),
    "int4 chunked": ("llama4", _ours(INT4)),
    "int4 hybrid": ("falcon_h1", _ours(INT4)),
    "int4 latent, indexed": ("deepseek_v32", _ours(BOUNDED)),
}
# What was packed comes back from a trim with the precision of its packing.
PACKED = {kind for kind in KINDS if kind.startswith("int4")} | {"QuantizedKVCache"}
TOLERANCE = 1e-5


@pytest.fixture(autouse=True, scope="module")
def _uncompiled() -> Any:
    # On a CPU, mlx compiles a fused function with the system's compiler: half a second each.
    mx.disable_compile()
    yield
    mx.enable_compile()


def built(name: str) -> Any:
    return tiny_llama() if name == "tiny" else models.build(name)


def ids(count: int, seed: int) -> list[int]:
    return mx.random.randint(0, 32, (count,), key=mx.random.key(seed)).tolist()


def fed(model: nn.Module, caches: list[Any], tokens: list[int], step: int = 64) -> mx.array:
    """Logits after tokens, which are fed in calls of ``step``, the last one alone."""
    calls = [tokens[i : min(i + step, len(tokens) - 1)] for i in range(0, len(tokens) - 1, step)]
    out = mx.zeros(0)
    for call in [*calls, tokens[-1:]]:
        out = model(mx.array([call]), cache=caches)[0, -1]
        mx.eval(out, [cache.state for cache in caches])
    return out


def off(mine: mx.array, other: mx.array) -> float:
    """How far logits are apart, of the largest."""
    return (mx.abs(mine - other).max() / mx.abs(other).max()).item()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_fetched_goes_on_as_if_it_were_fed(kind: str) -> None:
    """Entries of a conversation that grows, before and after caches let go of tokens."""
    name, make = KINDS[kind]
    model, store = built(name), PromptCache(max_size=10)
    tokens, caches, known = ids(240, 1), make(model), {0: make(model)}
    for end in (30, 90, 137, 190):
        fed(model, caches, tokens[max(known) : end])
        held = copy.deepcopy(caches)
        store.insert_cache("m", tokens[:end], held, cache_type="system", counted=True)
        known[end] = copy.deepcopy(caches)
    other = ids(20, 2)
    for length in (12, 120, 138, 180):
        prompt = tokens[:length] + other[:5]
        found, rest = store.fetch_nearest_cache("m", prompt)
        count = len(prompt) - len(rest)
        assert rest == prompt[count:] and rest
        if found is None:
            continue
        # What is fetched is written to, and fetched again: its entry is as it was.
        mine = fed(model, found, rest + other)
        if kind in PACKED:  # as one of those that it may be made from
            made = [trimmed(known[end], end - count) for end in known if end >= count]
            theirs = [fed(model, one, rest + other) for one in made if one is not None]
        else:
            theirs = [fed(model, make(model), prompt + other)]
        assert min(off(mine, x) for x in theirs) < TOLERANCE, (length, count)
    for end in list(known)[1:]:
        found, rest = store.fetch_nearest_cache("m", tokens[: end + 1])
        assert found is not None and len(rest) == 1


@pytest.mark.parametrize("policy", ["window", "int4 bounded", "RotatingKVCache", "ChunkedKVCache"])
def test_a_beginning_that_others_share_outlives_what_evicts_it(policy: str) -> None:
    """What systems were told makes way only for what can serve all that it could."""
    name, make = KINDS[policy]
    model, store = built(name), PromptCache(max_size=10)
    tokens, caches, end = ids(260, 1), make(model), 0
    for turn in (70, *[25] * 7):
        fed(model, caches, tokens[end : end + turn])
        end += turn
        kind_of = "system" if end == 70 else "assistant"
        held = copy.deepcopy(caches)
        store.insert_cache("m", tokens[:end], held, cache_type=kind_of, counted=True)
    _, rest = store.fetch_nearest_cache("m", tokens[:70] + ids(9, 2))
    assert len(rest) <= 9


class Numbers:
    """Caches whose contents are the tokens that they were fed, to be read back."""

    @staticmethod
    def feed(caches: list[Any], tokens: list[int]) -> None:
        x = mx.array(tokens, mx.float32)[None, None, :, None] * mx.ones((1, 1, 1, 32))
        for cache in caches:
            Numbers._feed(cache, x)

    @staticmethod
    def _feed(cache: Any, x: mx.array) -> None:
        if isinstance(cache, CacheList):
            for member in cache.caches:
                Numbers._feed(member, x)
        elif isinstance(cache, ArraysCache):
            state = mx.zeros((1, 1)) if cache[0] is None else cache[0]
            for i in range(x.shape[2]):
                state = state * 0.5 + x[:, 0, i, :1]
            cache[0] = state
        else:
            for i in range(x.shape[2]):
                cache.update_and_fetch(x[:, :, i : i + 1], x[:, :, i : i + 1])

    @staticmethod
    def read(cache: Any) -> list[float]:
        if isinstance(cache, CacheList):
            return [number for member in cache.caches for number in Numbers.read(member)]
        if isinstance(cache, ArraysCache):
            return cache[0].reshape(-1).tolist()
        if isinstance(cache, RotatingKVCache):
            return cache._temporal_order(cache.keys)[0, 0, -cache.max_size :, 0].tolist()
        keys, _ = cache.keys_and_values()
        return keys[0, 0, :, 0].tolist()


CONTENTS: dict[str, Callable[[], list[Any]]] = {
    "KVCache": lambda: [KVCache(), KVCache()],
    "RotatingKVCache": lambda: [KVCache(), RotatingKVCache(6)],
    "ArraysCache": lambda: [KVCache(), ArraysCache(1)],
    "CacheList": lambda: [CacheList(KVCache(), ArraysCache(1)), KVCache()],
    "ours": lambda: [_plain(), KVCache()],
    "ours bounded": lambda: [_plain(window=6)],
}


def _plain(**changes: Any) -> Any:
    return QuantizedStreamingCache(KVCacheConfig(sink=1, **changes))


@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize("seed", range(2))
def test_any_inserts_and_fetches(kind: str, seed: int) -> None:
    """Of keys that share beginnings, beside lists that are searched one by one."""
    make, rng = CONTENTS[kind], random.Random(seed)
    one = make()
    Numbers.feed(one, [1])
    size = sum(cache.nbytes for cache in one)
    store = PromptCache(max_size=5, max_bytes=4 * size)

    def fresh(tokens: list[int]) -> list[Any]:
        caches = make()
        Numbers.feed(caches, tokens)
        return caches

    def contents(caches: list[Any]) -> list[list[float]]:
        return [Numbers.read(cache) for cache in caches]

    for _ in range(40):
        model = rng.choice("ab")
        keys = [key for known, key in store._keys() if known == model]
        begin = rng.choice([[], *keys])
        tokens = begin[: rng.randint(0, len(begin))]
        tokens = tokens + [rng.randint(1, 3) for _ in range(rng.randint(1, 6))]
        found, rest = store.fetch_nearest_cache(model, tokens)
        count = len(tokens) - len(rest)
        shared = [key for key in keys if key == tokens[: len(key)] and len(key) < len(tokens)]
        assert count >= max(map(len, shared), default=0)
        assert rest == tokens[count:] and rest
        assert (found is None) == (count == 0)
        if found is not None:
            assert contents(found) == contents(fresh(tokens[:count]))
        if kind == "KVCache":  # which can always be trimmed
            best = max((_alike(key, tokens[:-1]) for key in keys), default=0)
            assert count == best
        caches = found or make()
        Numbers.feed(caches, rest)  # entries are not altered by it: they are read below
        kept = copy.deepcopy(caches)
        kind_of = rng.choice(["assistant", "user", "system"])
        store.insert_cache(model, tokens, caches, cache_type=kind_of, counted=True)
        assert contents(kept) == contents(fresh(tokens))
        held = list(store._keys())
        assert len(held) == len(store) <= 5
        entries = [store._trie.get(*key) for key in held]
        assert store.nbytes <= store.max_bytes
        assert store.nbytes == sum(cache.nbytes for e in entries for cache in e.prompt_cache)
        for (_, key), entry in zip(held, entries, strict=True):
            assert contents(entry.prompt_cache) == contents(fresh(key))


def _alike(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@pytest.mark.parametrize("name", ["mamba", "tiny"])
def test_an_entry_keeps_no_other_rows_alive(name: str) -> None:
    """A row that left a batch does not hold the arrays of all."""
    model = built(name)
    rows = [own_caches(model) for _ in range(8)]
    batch = _merge_caches(rows)
    tokens = mx.array([ids(40, seed) for seed in range(8)])
    mx.eval(model(tokens, cache=batch), [cache.state for cache in batch])
    store = PromptCache(max_size=10)
    row = [cache.extract(3) for cache in batch]
    store.insert_cache("m", tokens[3].tolist(), row, counted=True)
    size = store.nbytes
    del rows, row, batch
    gc.collect()
    before = mx.get_active_memory()
    store.trim_to(n_sequences=0)
    assert before - mx.get_active_memory() <= 1.5 * size


CALLS = (45, *[1] * 10, 30, 1, 1, 5, 70, *[1] * 20, 3, 12, 1)


@pytest.mark.parametrize(
    "name, policy",
    [
        *(("tiny", policy) for policy in POLICIES),
        *((name, "int4 bounded") for name in ("llama", "deepseek_v3", "llama4")),
    ],
)
def test_what_is_shrunk_goes_on_bit_for_bit(name: str, policy: str) -> None:
    """At any time: after long calls, in steps, when groups are due, once tokens were evicted."""
    model, rng = built(name), random.Random(0)
    mine, theirs = (make_prompt_cache(model, POLICIES[policy]) for _ in range(2))
    for number, count in enumerate(CALLS):
        tokens = mx.array([ids(count, number)])
        logits = [model(tokens, cache=caches) for caches in (mine, theirs)]
        assert mx.array_equal(*logits), number
        if rng.random() < 0.5:
            for cache in mine:
                cache.shrink()
        if number % 10 == 9:  # as far as it can be taken back always
            assert {cache.trim(7) for cache in (*mine, *theirs)} == {7}


@pytest.mark.parametrize("policy", POLICIES)
def test_shrunk_rows_go_on_in_batches_bit_for_bit(policy: str) -> None:
    """Rows that are shrunk before they join others, and rows that leave them and come back."""
    model = built("tiny")
    batches = []
    for shrinks in (True, False):
        rows = [make_prompt_cache(model, POLICIES[policy]) for _ in range(3)]
        for i, row in enumerate(rows):
            fed(model, row, ids((20, 70, 150)[i], i))
        found = []
        for turn in range(3):
            for row in rows:
                for cache in row if shrinks else ():
                    cache.shrink()
            batch = _merge_caches(rows)
            for step in range(12):
                tokens = mx.array([[token] for token in ids(3, 10 + 20 * turn + step)])
                found.append(model(tokens, cache=batch))
                mx.eval(found[-1])
            rows = [[cache.extract(i) for cache in batch] for i in range(3)]
        batches.append(mx.stack(found))
    assert mx.array_equal(*batches)
