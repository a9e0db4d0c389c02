"""Keys with biases of several hundred: caches of ours stay near full precision, others don't."""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from key_biases import bias_keys, divergence, log_probs
from mlx_lm import load
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from mlx_kivi import KVCacheConfig, make_prompt_cache

TOKENS, ALONE = 240, 16
PACKED = 200  # from here on, every preset has packed something


class Biased:
    """The demo model with biases, a text, and what full precision makes of it."""

    def __init__(self, path: Path) -> None:
        self.model, tokenizer = load(str(path))[:2]
        topics = pydoc_data.topics.topics
        text = "".join(topics[name] for name in sorted(topics))[: 8 * TOKENS]
        self.tokens = mx.array(tokenizer.encode(text)[:TOKENS])
        self.plain = log_probs(self.model, [KVCache() for _ in self.model.layers], self.tokens, 0)
        bias_keys(self.model, self.tokens)
        self.full = self.log_probs([KVCache() for _ in self.model.layers])

    def log_probs(self, cache: list[Any]) -> mx.array:
        return log_probs(self.model, cache, self.tokens, ALONE)

    def loss(self, cache: list[Any]) -> tuple[float, float]:
        """Mean KL to full precision: of tokens that came in chunks, and one by one."""
        kl = divergence(self.full, self.log_probs(cache))
        return float(kl[PACKED:-ALONE].mean()), float(kl[-ALONE:].mean())


@pytest.fixture(scope="module")
def biased(smollm2: Path) -> Biased:
    return Biased(smollm2)


@pytest.mark.model
def test_it_is_still_a_model_of_text(biased: Biased) -> None:
    """Its perplexity: 17.8, for 17.6 without the biases."""
    biases = [abs(layer.self_attn.k_proj.bias).max().item() for layer in biased.model.layers]
    assert min(biases) > 100 and max(biases) > 500
    before, after = (
        nn.losses.cross_entropy(x[:-1], biased.tokens[1:], reduction="mean").item()
        for x in (biased.plain, biased.full)
    )
    assert after == pytest.approx(before, abs=0.03)


@pytest.mark.model
@pytest.mark.parametrize(
    ("preset", "most"),
    # Twice what was measured.
    [("int8", 8e-6), ("int4", 0.0018), ("int2", 0.016)],
)
def test_presets_stay_near_full_precision(biased: Biased, preset: str, most: float) -> None:
    caches = make_prompt_cache(biased.model, KVCacheConfig.from_name(preset))
    losses = biased.loss(caches)
    assert all(cache.packed_tokens for cache in caches)
    assert max(losses) < most


@pytest.mark.model
@pytest.mark.parametrize(("bits", "least"), [(8, 0.35), (4, 2.0)])
def test_caches_of_mlx_lm_are_ruined(biased: Biased, bits: int, least: float) -> None:
    """Nats, half of what was measured: a scale is shared by channels with a bias and without."""
    caches = [QuantizedKVCache(group_size=64, bits=bits) for _ in biased.model.layers]
    assert min(biased.loss(caches)) > least
