"""Prompt files that version 0.1.0 saved: loaded, they go on as they did there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import load_prompt_cache
from old_files import CASES, follow, model, path_of

import mlx_kivi
from mlx_kivi.models.factory import ours


@pytest.fixture(scope="module")
def golden() -> dict[str, mx.array]:
    return mx.load(path_of("logits"))


def compare(name: str, load: Callable[[], list[Any]], golden: Any, again: Path) -> None:
    logits, back = follow(model(CASES[name].model), load, str(again / "again.safetensors"))
    assert back == golden[f"{name}: back"].tolist()
    got, want = np.array(logits), np.array(golden[name])
    # A group that is packed later may have steps of another last bit: half a percent of its range.
    atol = (0.01 if "packed" in name else 1e-3) * np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)


@pytest.mark.parametrize("name", CASES)
def test_a_file_of_version_0_1_0_goes_on_trims_and_is_saved_again(
    name: str, golden: Any, tmp_path: Path
) -> None:
    # The policy in force is another one: the file's counts.
    with mlx_kivi.patched(k_bits=8, v_bits=8, window=500):
        compare(name, lambda: load_prompt_cache(path_of(name)), golden, tmp_path)


@pytest.mark.parametrize("name", ["window, wrapped", "packed, small window", "learned positions"])
def test_the_older_generation_of_mlx_lm_wrote_them_otherwise(
    name: str, golden: Any, tmp_path: Path
) -> None:
    """mlx-lm 0.31 has a text a cache, ours empty ones, before the metadata and the classes."""
    arrays, header = mx.load(path_of(name), return_metadata=True)
    older = {f"0.{i}": "" for i in range(len(mlx_kivi.load_prompt_cache(path_of(name))))}
    for key, text in header.items():
        part, _, rest = key.partition(".")
        if part != "2":
            older[f"{int(part) + 1}.{rest}"] = text
    path = str(tmp_path / "older.safetensors")
    mx.save_safetensors(path, arrays, older)
    with mlx_kivi.patched():
        compare(name, lambda: load_prompt_cache(path), golden, tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_what_was_packed_stays_packed_and_what_was_not_does_not(name: str) -> None:
    for cache in ours(mlx_kivi.load_prompt_cache(path_of(name))):
        unpacked = cache.config.residual_length + cache.config.group_size
        packed = cache.config.quantized and (cache.config.window or unpacked + 1) > unpacked
        again = type(cache).from_state(cache.state)
        for one in (cache, again):
            assert (one.plan.residual is not None) == packed
            assert (one.packed_tokens > 0) == (packed and one.plan.groups(one.seen) > 0)


@pytest.mark.parametrize("name", ["window, ring not wrapped", "window, wrapped"])
@pytest.mark.parametrize("cut", [lambda x: x[:, :, :-1], lambda x: x[0], lambda x: x[:, :, :44]])
def test_an_old_ring_of_another_size_is_refused_in_one_line(
    name: str, cut: Callable[[mx.array], mx.array], tmp_path: Path
) -> None:
    arrays, header = mx.load(path_of(name), return_metadata=True)
    path = str(tmp_path / "cut.safetensors")
    mx.save_safetensors(path, {**arrays, "1.2": cut(arrays["1.2"])}, header)
    with pytest.raises(ValueError, match="recent keys are .*; make it again$") as caught:
        mlx_kivi.load_prompt_cache(path)
    assert "\n" not in str(caught.value)
