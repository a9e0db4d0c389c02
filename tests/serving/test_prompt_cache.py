"""The server's prompt cache, for ours and for mlx_lm's own caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache
from mlx_lm.models.cache import make_prompt_cache as stock

from conformance.architectures import models
from conformance.common import tiny_llama
from mlx_kivi import KVCacheConfig, make_prompt_cache
from mlx_kivi.upstream.prompt_cache import PromptCache

INT4 = KVCacheConfig.from_name("int4")
KINDS: dict[str, Callable[[Any], list[Any]]] = {
    "stock": lambda model: [KVCache() for _ in model.layers],
    "rotating": lambda model: [RotatingKVCache(100, keep=4) for _ in model.layers],
    "quantized": lambda model: [QuantizedKVCache(32, 8) for _ in model.layers],
    "full precision, bounded": lambda m: make_prompt_cache(m, KVCacheConfig(window=100)),
    "int8": lambda model: make_prompt_cache(model),
    "int4": lambda model: make_prompt_cache(model, INT4),
    "int4, bounded": lambda model: make_prompt_cache(model, INT4.replace(window=100)),
}
MODEL = "model"


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return tiny_llama()


def tokens(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, 97, n).tolist()


def fed(model: Any, caches: list[Any], text: list[int]) -> mx.array:
    """Logits after a text, fed in two calls and single steps, as a prompt and an answer are."""
    parts = [text[:-8], *([token] for token in text[-8:])] if len(text) > 8 else [text]
    for part in parts:
        logits = model(mx.array([part]), cache=caches)[0, -1]
        mx.eval(logits, [cache.state for cache in caches])
    return logits


def entries(cache: PromptCache) -> list[tuple[list[int], list[Any]]]:
    return [(key, cache._trie.get(model, key).prompt_cache) for model, key in cache._keys()]


def test_the_next_best_serves_where_an_entry_can_not_be_trimmed(llama: nn.Module) -> None:
    text = tokens(250)
    cache, kind = PromptCache(), KINDS["int4, bounded"]
    for n in (150, 250):
        caches = kind(llama)
        fed(llama, caches, text[:n])
        cache.insert_cache(MODEL, text[:n], caches)
    # The longer can't be trimmed to the shorter, so it took nobody's place.
    assert sorted(len(key) for key, _ in entries(cache)) == [150, 250]
    _, rest = cache.fetch_nearest_cache(MODEL, text[:180] + tokens(5, 1))
    assert len(rest) == 35
    assert cache.fetch_nearest_cache(MODEL, text[:100] + tokens(5, 1))[0] is None
    assert cache.fetch_nearest_cache("another", text)[0] is None


def test_of_a_conversation_the_last_turns_stay(llama: nn.Module) -> None:
    """A bounded entry can't serve for its beginnings: without an end they would pile up."""
    text, cache = tokens(900), PromptCache(max_size=100)
    for turn in range(1, 9):
        for n, kind in ((100 * turn, "user"), (100 * turn + 50, "assistant")):
            caches = KINDS["int4, bounded"](llama)
            fed(llama, caches, text[:n])
            cache.insert_cache(MODEL, text[:n], caches, cache_type="system" if n == 100 else kind)
    assert sorted(len(key) for key, _ in entries(cache)) == [100, 750, 800, 850]


def test_beginnings_that_an_entry_can_serve_for_go(llama: nn.Module) -> None:
    text, cache = tokens(120), PromptCache()
    for n in (50, 120, 120):
        caches = KINDS["int4"](llama)
        fed(llama, caches, text[:n])
        cache.insert_cache(MODEL, text[:n], caches)
    ((key, caches),) = entries(cache)
    assert key == text and cache.nbytes == sum(layer.nbytes for layer in caches)


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_has_the_tokens_that_are_held(llama: nn.Module, kind: str) -> None:
    """The last token of an answer that its limit ends is never fed: mlx_lm's key has it."""
    text, cache, caches = tokens(60), PromptCache(), KINDS[kind](llama)
    fed(llama, caches, text[:-1])
    cache.insert_cache(MODEL, text, caches)
    # And a draft model's caches may hold other counts than the model's.
    both = [*KINDS[kind](llama), *KINDS[kind](llama)]
    other = tokens(50, 1)
    fed(llama, both[:2], other)
    fed(llama, both[2:], other[:-3])
    cache.insert_cache("with a draft", other, both)
    held = {len(key): [layer.offset for layer in caches] for key, caches in entries(cache)}
    assert held == {59: [59, 59], 47: [47] * 4}


@pytest.mark.parametrize("name", ["mamba", "jamba"])
def test_recurrent_states_are_kept_by_what_was_counted(name: str) -> None:
    model, text = models.build(name), tokens(40)
    cache, caches = PromptCache(), stock(model)
    fed(model, caches, text)
    cache.insert_cache(MODEL, [*text, 5], caches)
    # Layers of attention tell how much was fed; states alone do not.
    assert [len(key) for key, _ in entries(cache)] == ([] if name == "mamba" else [40])
    cache.insert_cache("counted", text, caches, counted=True)
    found, rest = cache.fetch_nearest_cache("counted", [*text, 5])
    assert rest == [5] and found is not None
    wanted = fed(model, stock(model), [*text, 5])
    assert mx.allclose(fed(model, found, rest), wanted, atol=1e-4)
    # No state goes back: not by a token.
    assert cache.fetch_nearest_cache("counted", text)[0] is None


def test_one_that_is_too_large_does_not_drive_out_the_others(llama: nn.Module) -> None:
    cache = PromptCache(max_bytes=300_000)
    for n in (20, 2_000):
        caches = KINDS["stock"](llama)
        llama(mx.array([tokens(n, n)]), cache=caches)
        cache.insert_cache(MODEL, tokens(n, n), caches)
    assert [len(key) for key, _ in entries(cache)] == [20]


def test_what_was_asked_for_last_stays(llama: nn.Module) -> None:
    cache = PromptCache(max_size=2)
    for seed in (0, 1, 0, 2):
        text = tokens(20, seed)
        if cache.fetch_nearest_cache(MODEL, [*text, 1])[0] is None:
            caches = KINDS["stock"](llama)
            llama(mx.array([text]), cache=caches)
            cache.insert_cache(MODEL, text, caches)
    assert sorted(key for key, _ in entries(cache)) == sorted([tokens(20, 0), tokens(20, 2)])
