"""afm7, whose queries are rotated by the number of keys: it has to be that of all ever seen."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_caches

import mlx_kivi
from conformance.architectures import matrix, models
from mlx_kivi.models.factory import reads_state

pytestmark = pytest.mark.skipif(
    reads_state(models.build("afm7")), reason="this mlx-lm's afm7 needs caches of mlx-lm"
)


def fed(policy: str) -> tuple[Any, list[Any]]:
    """The model, and its caches after tokens have been evicted."""
    model = models.build("afm7")
    caches = mlx_kivi.make_prompt_cache(model, matrix.POLICIES[policy])
    for part in matrix.parts()[:5]:
        matrix.logits(model, part, caches)
    return model, caches


@pytest.mark.parametrize("policy", ["sinks + window", "int4 + sinks + window"])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_the_number_of_keys_is_that_of_positions(policy: str, rows: int) -> None:
    model, caches = fed(policy)
    model(mx.zeros((1, rows), mx.int32), cache=caches)
    assert caches[-1].size() < caches[-1].offset
    assert caches[-1].keys_and_values()[0].shape[2] == caches[-1].offset == 112 + rows


@pytest.mark.parametrize("policy", ["sinks + window", "int4 + sinks + window"])
def test_a_saved_cache_and_a_copy_go_on_alike(policy: str, tmp_path: Path) -> None:
    model, caches = fed(policy)
    file = str(tmp_path / "prompt.safetensors")
    mlx_caches.save_prompt_cache(file, caches)
    others = [mlx_caches.load_prompt_cache(file), copy.deepcopy(caches)]
    for part in matrix.parts()[5:13]:
        expected = matrix.logits(model, part, caches)
        for other in others:
            assert mx.array_equal(matrix.logits(model, part, other), expected)


def test_without_our_attention_a_window_is_refused() -> None:
    model, caches = fed("sinks + window")
    mlx_kivi.unpatch()
    with pytest.raises(RuntimeError, match=r"call mlx_kivi\.patch\(\)"):
        matrix.logits(model, mx.zeros((1, 1), mx.int32), caches)


def test_without_our_attention_a_batch_is_refused() -> None:
    model, caches = fed("full precision")
    batch = [cache.merge([cache, cache]) for cache in caches]
    mlx_kivi.unpatch()
    with pytest.raises(RuntimeError, match=r"call mlx_kivi\.patch\(\)"):
        matrix.logits(model, mx.zeros((2, 1), mx.int32), batch)


def test_handles_of_a_batch_say_how_many_keys_each_row_has_had() -> None:
    model, caches = fed("int4 + sinks + window")
    longer = copy.deepcopy(caches)
    matrix.logits(model, mx.zeros((1, 9), mx.int32), longer)
    batch = [cache.merge([cache, other]) for cache, other in zip(caches, longer, strict=True)]
    matrix.logits(model, mx.zeros((2, 1), mx.int32), batch)
    assert batch[-1].keys_and_values()[0].shape[2].tolist() == [113, 122]
    assert batch[-1].extract(0).keys_and_values()[0].shape[2] == 113
