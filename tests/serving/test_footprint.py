"""What a request is said to take before it starts is what it takes."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

import mlx_kivi
from conformance.architectures import models
from mlx_kivi import KVCacheConfig
from mlx_kivi.serving.footprint import Footprint

KINDS = {"full": "llama", "sliding": "gemma3_text", "hybrid": "lfm2", "latent": "deepseek_v3"}
INT4 = KVCacheConfig.from_name("int4")
POLICIES = {"stock": None, "int4": INT4, "int4, bounded": INT4.replace(window=300)}
ROWS = [[40], [600], [400, 400, 400], [1100, 600, 60]]
GENERATED = 30


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_known_before(kind: str, policy: KVCacheConfig | None) -> None:
    model = models.build(KINDS[kind])
    if policy is not None:
        mlx_kivi.patch(policy)
    footprint = Footprint([(model, make_prompt_cache(model))], policy)
    for rows in ROWS:
        used, said = most_used(model, rows), footprint.batch_bytes([n + GENERATED for n in rows])
        if len(rows) == 1:
            assert said == footprint.bytes(rows[0] + GENERATED)
        assert abs(said - used) <= 0.05 * used, (rows, said, used)


def most_used(model: Any, lengths: list[int]) -> int:
    """Bytes of a batch of prompts, and of what is generated after them, while all rows are there.

    While prompts are fed, layers of sliding attention hold all of a call.
    """
    generator = BatchGenerator(model, max_tokens=GENERATED, prefill_batch_size=1)
    mx.random.seed(0)
    generator.insert([mx.random.randint(1, 90, (n,)).tolist() for n in lengths])
    used, ended = 0, 0
    while not ended:
        if len(generator._generation_batch) == len(lengths):
            used = generator.prompt_cache_nbytes
        ended = sum(r.finish_reason is not None for r in generator.next()[1])
    generator.close()
    return used
