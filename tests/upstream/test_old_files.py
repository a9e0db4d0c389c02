"""Prompt files that version 0.1.0 saved: loaded, they go on as they did there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import load_prompt_cache
from old_files import CASES, follow, model, path_of

import mlx_kivi
from mlx_kivi import KVCacheConfig, QuantizedStreamingCache
from mlx_kivi.cache.layout import Snapshot, snapshot
from mlx_kivi.config import TRIM_MARGIN
from mlx_kivi.models.factory import ours


@pytest.fixture(scope="module")
def golden() -> dict[str, mx.array]:
    return mx.load(path_of("logits"))


@pytest.fixture
def read_as_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 0.1.0 read whole groups from the store as soon as they were packed."""

    def packed(self: Snapshot, rows: np.ndarray) -> np.ndarray:
        if self.plan.residual is None:
            return np.zeros(rows.shape, int)
        if self.queries > TRIM_MARGIN:
            rows = np.full(rows.shape, self.first_query)
        groups = np.maximum(0, rows - self.plan.sink - self.plan.residual) // self.plan.group
        return np.minimum(groups, self.groups) * self.plan.group

    monkeypatch.setattr(Snapshot, "packed", packed)
    snapshot.cache_clear()


def compare(name: str, load: Callable[[], list[Any]], golden: Any, again: Path) -> None:
    logits, back = follow(model(CASES[name].model), load, str(again / "again.safetensors"))
    assert back == golden[f"{name}: back"].tolist()
    got, want = np.array(logits), np.array(golden[name])
    # A group that is packed later may have steps of another last bit: half a percent of its range.
    atol = (0.01 if "packed" in name else 1e-3) * np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)


@pytest.mark.usefixtures("read_as_then")
@pytest.mark.parametrize("name", CASES)
def test_a_file_of_version_0_1_0_goes_on_trims_and_is_saved_again(
    name: str, golden: Any, tmp_path: Path
) -> None:
    # The policy in force is another one: the file's counts.
    with mlx_kivi.patched(k_bits=8, v_bits=8, window=500):
        compare(name, lambda: load_prompt_cache(path_of(name)), golden, tmp_path)


@pytest.mark.usefixtures("read_as_then")
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


# Between 0.1.0 and the bases: windows have a margin, scales and zeros of keys are apart.

PLAIN_LAYOUT = KVCacheConfig(k_bits=4, v_bits=4, group_size=32, residual_length=16, balanced=False)
BETWEEN = {
    "packed": (PLAIN_LAYOUT, "float32"),
    "packed, float16": (PLAIN_LAYOUT, "float16"),
    "packed, window": (PLAIN_LAYOUT.replace(window=140), "float32"),
    "packed keys alone": (PLAIN_LAYOUT.replace(v_bits=None), "float32"),
    "packed values alone": (PLAIN_LAYOUT.replace(k_bits=None), "float32"),
    "margin": (PLAIN_LAYOUT.replace(k_bits=None, v_bits=None, window=60), "float32"),
    "margin, too small to pack": (PLAIN_LAYOUT.replace(window=40), "float32"),
    "margin, int8": (PLAIN_LAYOUT.replace(k_bits=8, v_bits=8, window=40), "float32"),
}


def from_between(state: list[mx.array], keys_packed: bool) -> list[mx.array]:
    """A state as it was written then."""
    header = json.loads(bytes(np.array(state[0])))
    assert header.pop("balance") is None and header["config"].pop("balanced") is False
    first = mx.array(list(json.dumps(header).encode()), mx.uint8)
    if not keys_packed:
        return [first, *state[1:]]
    pair = mx.split(state[4], 2, axis=2)
    return [first, *state[1:4], *pair, *state[5:]]


@pytest.mark.parametrize("name", BETWEEN)
def test_a_state_of_before_the_bases_goes_on_and_trims_as_it_did(name: str) -> None:
    config, dtype = BETWEEN[name]
    text = mx.array(np.random.default_rng(0).normal(0, 1, (2, 1, 2, 600, 32)))
    text = text.astype(getattr(mx, dtype))

    def feed(cache: QuantizedStreamingCache, *calls: int) -> list[mx.array]:
        seen = []
        for n in calls:
            seen += cache.update_and_fetch(*text[..., cache.offset : cache.offset + n, :])
        return seen

    cache = QuantizedStreamingCache(config)
    feed(cache, 250, *[1] * 30)
    keys_packed = cache.packed_tokens > 0 and config.k_bits is not None
    assert keys_packed == (name.startswith("packed") and "values" not in name)
    assert (cache._margin is not None) == name.startswith("margin")
    again = QuantizedStreamingCache.from_state(from_between(cache.state, keys_packed))
    assert again.config == config and again.balance is None
    assert len(again.state) == len(cache.state)
    for back, calls in ((0, (1, 3, 1)), (25, (1, 1, 40)), (32, (1, 100, 1))):
        for one in (cache, again):
            assert one.trim(back) == back
        for got, want in zip(feed(again, *calls), feed(cache, *calls), strict=True):
            assert got.dtype == want.dtype and mx.array_equal(got, want)


def test_the_policy_of_an_old_file_is_to_pack_keys_and_values_as_they_are() -> None:
    for name in CASES:
        for cache in ours(mlx_kivi.load_prompt_cache(path_of(name))):
            assert cache.config.balanced is False and cache.balance is None


@pytest.mark.parametrize(
    "pair",
    [
        lambda scales, zeros: [scales, zeros[:, :, :-1]],
        lambda scales, zeros: [scales[:, :, :-1], zeros[:, :, :-1]],
        lambda scales, zeros: [scales, zeros.astype(mx.float32)],
        lambda scales, zeros: [scales[0], zeros[0]],
        lambda scales, zeros: [scales],
        lambda scales, zeros: [scales, zeros, zeros],
    ],
)
def test_an_old_pair_of_other_sizes_is_refused_in_one_line(pair: Callable[..., Any]) -> None:
    cache = QuantizedStreamingCache(PLAIN_LAYOUT)
    cache.update_and_fetch(*mx.random.normal((2, 1, 2, 250, 32)))
    state = from_between(cache.state, keys_packed=True)
    with pytest.raises(ValueError) as caught:
        QuantizedStreamingCache.from_state([*state[:4], *pair(*state[4:6]), *state[6:]])
    assert "\n" not in str(caught.value)
