"""Presets on the demo model: much less loss than KIVI's layout, at no more bytes."""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path

import mlx.core as mx
import pytest
from key_biases import divergence, log_probs
from mlx_lm import load
from mlx_lm.models.cache import KVCache

from mlx_kivi import KVCacheConfig, make_prompt_cache
from mlx_kivi.cache.sizes import Heads, best_plan, stored_bytes

TOKENS = 512


@pytest.fixture(scope="module")
def losses(smollm2: Path) -> dict[str, float]:
    """Mean KL to full precision in nats, of a text in calls of 32 tokens."""
    model, tokenizer = load(str(smollm2))[:2]
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))[: 8 * TOKENS]
    tokens = mx.array(tokenizer.encode(text)[:TOKENS])
    full = log_probs(model, [KVCache() for _ in model.layers], tokens, 0)
    found = {}
    for name in ("kivi4", "int4", "kivi2", "int2"):
        caches = make_prompt_cache(model, KVCacheConfig.from_name(name))
        found[name] = float(divergence(full, log_probs(model, caches, tokens, 0)).mean())
    return found


@pytest.mark.model
@pytest.mark.parametrize(
    ("ours", "theirs", "part"), [("int4", "kivi4", 0.7), ("int2", "kivi2", 0.4)]
)
def test_a_preset_loses_much_less_than_kivis_layout(
    losses: dict[str, float], ours: str, theirs: str, part: float
) -> None:
    assert 0 < losses[ours] < part * losses[theirs]


@pytest.mark.parametrize(("ours", "theirs"), [("int4", "kivi4"), ("int2", "kivi2")])
@pytest.mark.parametrize(("count", "dim"), [(3, 64), (8, 128)])
def test_a_preset_takes_no_more_bytes(ours: str, theirs: str, count: int, dim: int) -> None:
    """At 8,192 tokens in 16 bits; but for the middles of keys, 0.02% of float16's bytes."""
    heads = Heads(count, dim, dim, mx.float16)
    sizes = []
    for name in (ours, theirs):
        config = KVCacheConfig.from_name(name)
        plan = best_plan(config, heads, balanced=True)
        sizes.append(stored_bytes(config, plan, 256, heads, 8192, balanced=True))
    assert sizes[0] <= sizes[1] + 0.0002 * heads.full_bytes(8192)
