"""llama4's layers that attend to a chunk: the stock rule, for any calls, packed and taken back."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_caches

import mlx_kivi
from conformance.architectures import matrix, models
from mlx_kivi import report
from mlx_kivi.models.chunked import ChunkedCache

CHUNK = models.CONFIGS["llama4"]["text_config"]["attention_chunk_size"]
FULL, INT4 = "full precision", "int4 + sinks + window"


def tokens(start: int, stop: int) -> mx.array:
    ids = mx.random.randint(0, matrix.VOCABULARY, (1, 400), key=mx.random.key(2))
    return ids[:, start:stop]


def fed(policy: str, *lengths: int) -> tuple[Any, list[Any]]:
    """The model, and its caches after calls of so many tokens."""
    model, start = models.build("llama4"), 0
    caches = mlx_kivi.make_prompt_cache(model, matrix.POLICIES[policy])
    for length in lengths:
        mx.eval(matrix.logits(model, tokens(start, start + length), caches))
        start += length
    return model, caches


def off(mine: mx.array, other: mx.array) -> float:
    return (mx.abs(mine - other).max() / mx.abs(other).max()).item()


@pytest.mark.parametrize("seed", range(6))
def test_any_calls_give_what_one_call_without_caches_gives(seed: int) -> None:
    model, caches = fed(FULL)
    at_once = model(tokens(0, 400))[..., : matrix.VOCABULARY]
    rng, start = random.Random(seed), 0
    while start < 400:
        stop = min(400, start + rng.choice([1, 1, 2, 9, 33, 99, 100, 101, 180]))
        logits = matrix.logits(model, tokens(start, stop), caches)
        assert off(logits, at_once[:, start:stop]) < matrix.TOLERANCE
        start = stop


def test_each_layer_is_stored_packed_in_the_bytes_that_are_said() -> None:
    model, caches = fed(INT4, 250, 1)
    chunked = [cache for cache in caches if isinstance(cache, ChunkedCache)]
    assert len(chunked) == 3 and all(c.packed_tokens and c.size() == CHUNK for c in chunked)
    assert "ChunkedKVCache" not in mlx_kivi.describe(model, caches)
    said = [part.bytes(251) for part in report.parts(model, caches)]
    assert said == [cache.nbytes for cache in caches]


@pytest.mark.parametrize("policy", [FULL, INT4])
@pytest.mark.parametrize("end", [CHUNK + 5, 2 * CHUNK + 1, 2 * CHUNK + 40])
@pytest.mark.parametrize("calls", [(1,) * 12, (12,)])
def test_what_is_taken_back_across_the_end_of_a_chunk_was_never_there(
    policy: str, end: int, calls: tuple[int, ...]
) -> None:
    start = end - 12
    model, caches = fed(policy, start - 40, *[1] * 40, *calls)
    _, others = fed(policy, start - 40, *[1] * 40)
    assert mlx_caches.trim_prompt_cache(caches, 12) == 12
    for at in range(start, start + 30):
        mine, other = (matrix.logits(model, tokens(at, at + 1), c) for c in (caches, others))
        assert off(mine, other) < matrix.TOLERANCE


@pytest.mark.parametrize("policy", [FULL, INT4])
def test_a_saved_cache_and_a_copy_go_on_alike(policy: str, tmp_path: Path) -> None:
    model, caches = fed(policy, 90, 40, 1)
    file = str(tmp_path / "prompt.safetensors")
    mlx_caches.save_prompt_cache(file, caches)
    others = [mlx_caches.load_prompt_cache(file), copy.deepcopy(caches)]
    assert [type(cache) for cache in others[0]] == [type(cache) for cache in caches]
    for start in range(131, 251, 8):
        expected = matrix.logits(model, tokens(start, start + 8), caches)
        for other in others:
            assert mx.array_equal(matrix.logits(model, tokens(start, start + 8), other), expected)


def test_a_window_a_token_less_than_a_chunk_is_noticed() -> None:
    model, caches = fed(FULL)
    caches[:3] = [ChunkedCache(c.config.replace(window=CHUNK - 1)) for c in caches[:3]]
    last = 2 * CHUNK - 1  # of its chunk
    at_once = model(tokens(0, last + 1))[..., : matrix.VOCABULARY]
    before = matrix.logits(model, tokens(0, last), caches)
    assert off(before, at_once[:, :last]) < matrix.TOLERANCE
    logits = matrix.logits(model, tokens(last, last + 1), caches)
    assert off(logits, at_once[:, last:]) > 10 * matrix.TOLERANCE


def test_there_is_no_batch_of_them() -> None:
    model, caches = fed(FULL)
    assert hasattr(caches[3], "merge") and not hasattr(caches[0], "merge")
