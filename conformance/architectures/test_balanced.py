"""What is measured of a model: the moments of the keys and queries that its attention gets."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from conformance.architectures import models
from conformance.architectures.reference import flat
from mlx_kivi import KVCacheConfig
from mlx_kivi.models import calibration, factory
from mlx_kivi.models.architectures import own_caches
from mlx_kivi.models.counted_keys import counting
from mlx_kivi.models.learned_positions import table_size

TOKENS = 1024
SINKS, RUN = 4, 32  # tokens that stay unpacked, and that share a scale
CLOSE = 1e-4  # of the largest moment: the rounding of float32, layer upon layer

# The module whose attention is called, if it is not the model's own.
ATTENTION = {"gemma3": "gemma3_text"}
# Plain; keys that several layers read; learned sinks; RoPE on a part of the head; trained windows;
# chunks; one KV head; members of a `CacheList`, beside recurrent state.
NAMES = [
    *("llama", "gemma3n", "afm7", "gpt_oss", "phi", "glm4", "cohere2", "gemma3", "llama4"),
    *("gpt_bigcode", "falcon_h1", "baichuan_m1"),
]
SHARED = {"gemma3n", "afm7"}


@dataclass
class Layer:
    """What goes by a stock cache: what it returned last, its keys [H, T, D], and the queries
    [H_q, T, D] of each call of attention on them."""

    keys: np.ndarray | None = None
    queries: list[np.ndarray] = field(default_factory=list)

    def moments(self) -> tuple[np.ndarray, np.ndarray]:
        """E[q qᵀ] of each KV head, and the covariance of its keys within a run: [H, D, D]."""
        q, k = [], []
        for head, keys in enumerate(self.keys):
            group = len(self.queries[0]) // len(self.keys)
            rows = [one for call in self.queries for one in call[head * group :][:group]]
            q.append(np.mean([row.T @ row / len(row) for row in rows], axis=0))
            starts = range(SINKS, len(keys) - RUN + 1, RUN)
            k.append(np.mean([np.cov(keys[i : i + RUN].T, bias=True) for i in starts], axis=0))
        return np.array(q), np.array(k)


def watched(name: str, monkeypatch: pytest.MonkeyPatch) -> list[Layer]:
    """What a model's attention gets of its stock caches for the ids that are measured with."""
    model, caches = models.build(name), own_caches(models.build(name))
    size = models.CONFIGS[name].get("text_config", models.CONFIGS[name])["vocab_size"]
    count = min(TOKENS, table_size(model) or TOKENS)
    ids = calibration.token_ids(size, count)[None]
    layers = [Layer() for _ in flat(caches)]
    for layer, cache in zip(layers, flat(caches), strict=True):
        if hasattr(cache, "update_and_fetch"):
            watch(layer, cache, monkeypatch)
    module = importlib.import_module(f"mlx_lm.models.{ATTENTION.get(name, name)}")
    own = module.scaled_dot_product_attention

    def spy(queries: mx.array, keys: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        found = np.array(keys.astype(mx.float32))[0]
        [layer] = [one for one in layers if one.keys is not None and same(one.keys, found)]
        layer.queries.append(np.array(queries.astype(mx.float32))[0].astype(np.float64))
        return own(queries, keys, *args, **kwargs)

    monkeypatch.setattr(module, "scaled_dot_product_attention", spy)
    model(mx.array(ids), cache=caches)
    return [layer for layer in layers if layer.keys is not None]


def watch(layer: Layer, cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    update = cache.update_and_fetch

    def noting(keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        layer.keys = np.array(keys.astype(mx.float32))[0].astype(np.float64)
        return update(keys, values)

    monkeypatch.setattr(cache, "update_and_fetch", noting)


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and bool((one == other).all())


def noted(name: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[np.ndarray, np.ndarray]]:
    """The moments that our pass makes a basis of, layer by layer."""
    model, found = models.build(name), []
    balanced = calibration.balanced
    monkeypatch.setattr(calibration, "shrunk", lambda moments: moments)

    def spy(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        found.append((queries, keys))
        return balanced(queries, keys)

    monkeypatch.setattr(calibration, "balanced", spy)
    plain = KVCacheConfig(sink=0)

    def make() -> list[Any]:
        caches = factory.convert_all(own_caches(model), plain, packed_attention=True)
        return counting(model, caches)

    balances = calibration.measure(model, make)
    assert sum(b is not None for b in balances) == len(found)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_moments_are_those_of_what_attention_is_given(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if factory.reads_state(models.build(name)):
        pytest.skip(f"this mlx-lm's {name} needs caches of mlx-lm")
    mine, layers = noted(name, monkeypatch), watched(name, monkeypatch)
    assert len(mine) == len(layers) > 0
    assert any(len(layer.queries) > 1 for layer in layers) == (name in SHARED)
    for moments, layer in zip(mine, layers, strict=True):
        for found, expected in zip(moments, layer.moments(), strict=True):
            # Any factor will do, for all heads alike.
            found = found / np.abs(found).max()
            assert np.abs(found - expected / np.abs(expected).max()).max() < CLOSE
