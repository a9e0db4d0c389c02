"""Latents read packed: logits as close to the stock caches' as those of the same data as arrays."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache as stock_caches

import mlx_kivi
from conformance.architectures import matrix, models
from conformance.architectures.reference import flat
from mlx_kivi import KVCacheConfig
from mlx_kivi.cache import latent
from mlx_kivi.models import factory
from mlx_kivi.models.architectures import INDEXED, LATENT
from mlx_kivi.models.latent_caches import LatentCache

INT8 = KVCacheConfig(k_bits=8, v_bits=8, group_size=32, residual_length=32, sink=4)
PROMPT, STEPS = 570, 30  # tokens; after the tenth step a group is packed

# A model, and how many tokens its indexer picks, if it has one: fewer than there are, or all.
CASES = [(name, None) for name in models.names() if name in LATENT - INDEXED]
CASES += [(n, picked) for n in models.names() if n in LATENT & INDEXED for picked in (16, 1024)]


def steps(model: Any, caches: list[Any]) -> mx.array:
    """Logits of single tokens after a prompt: [1, STEPS, vocabulary]."""
    size = PROMPT + STEPS
    tokens = mx.random.randint(0, matrix.VOCABULARY, (1, size), key=mx.random.key(1))
    for start in range(0, PROMPT, 200):
        matrix.logits(model, tokens[:, start : min(start + 200, PROMPT)], caches)
        mx.eval([cache.state for cache in caches])
    single = [matrix.logits(model, tokens[:, i : i + 1], caches) for i in range(PROMPT, size)]
    return mx.concatenate(single, axis=1)


@pytest.mark.parametrize(("name", "picked"), CASES)
def test_packed_latents_cost_no_more_than_the_same_data_as_arrays(
    name: str, picked: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = models.CONFIGS[name]
    model = models.build_from(name, config if picked is None else config | {"index_topk": picked})
    stock = steps(model, stock_caches(model))

    def off(rows: int, packed: bool) -> float:
        """How far from the stock caches' logits ours are, latents read so."""
        monkeypatch.setattr(latent, "MAX_PACKED_ROWS", rows)
        caches = mlx_kivi.make_prompt_cache(model, INT8)
        readers = sum(isinstance(cache, LatentCache) for cache in flat(caches))
        assert (readers > 0) == packed
        with matrix.counted() as reads:
            found = steps(model, caches)
        read_packed = packed and (picked is None or picked > PROMPT + STEPS)
        assert reads.latent == (readers * STEPS if read_packed else 0)
        assert all(c.packed_tokens for c in flat(caches) if isinstance(c, LatentCache))
        return mx.abs(found - stock).max().item()

    products, unpacked = (off(rows, packed=True) for rows in (128, 0))
    monkeypatch.setattr(factory, "latents", lambda model, caches: caches)
    arrays = off(0, packed=False)
    tiny = matrix.TOLERANCE_PACKED * mx.abs(stock).max().item()
    assert 0 < arrays
    assert max(products, unpacked) <= 1.05 * arrays + tiny
