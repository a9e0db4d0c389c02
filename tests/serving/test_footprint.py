"""What a footprint says, beside the bytes of caches that are in use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator

from conformance.architectures import models
from conformance.common import tiny_llama
from mlx_kivi import KVCacheConfig, make_prompt_cache
from mlx_kivi.models.architectures import own_caches
from mlx_kivi.serving.footprint import Footprint

POLICIES = {
    "stock": None,
    "int4": KVCacheConfig.from_name("int4"),
    "int4 bounded": KVCacheConfig.from_name("int4", window=512),
    "window": KVCacheConfig(window=500),
}
# Full attention; sliding windows, recurrent states beside attention, latents, both of these.
FULL = "tiny"
OTHERS = ["llama", "qwen3_next", "deepseek_v3", "kimi_linear"]
LENGTHS = [
    *((30,), (255,), (700,), (3000,)),
    *((30, 30), (1000, 1000, 1000), (100, 3000), (30, 300, 1000), (700, 900, 1200)),
]
FEW = [(30,), (600,), (300, 300), (30, 200, 700)]
STEPS = 5


@pytest.fixture(autouse=True, scope="module")
def _uncompiled() -> Iterator[None]:
    # On a CPU, mlx compiles a fused function with the system's compiler: half a second each.
    mx.disable_compile()
    yield
    mx.enable_compile()


def built(name: str) -> Any:
    return tiny_llama() if name == "tiny" else models.build(name)


def made(model: Any, policy: KVCacheConfig | None) -> list[Any]:
    return own_caches(model) if policy is None else make_prompt_cache(model, policy)


def footprint(name: str, policy: KVCacheConfig | None) -> Footprint:
    model = built(name)
    return Footprint([(model, made(model, policy))], policy)


def in_use(model: Any, policy: KVCacheConfig | None, lengths: Sequence[int]) -> int:
    """Bytes of a batch when the last token of each sequence is in."""
    generator = BatchGenerator(model, prefill_step_size=512)
    for length in lengths:
        prompt = [i * 7 % 31 for i in range(length - STEPS)]
        generator.insert([prompt], caches=[made(model, policy)])
    answered = 0
    while answered < STEPS * len(lengths):
        answered += len(generator.next()[1])
    count = generator.prompt_cache_nbytes
    generator.close()
    return count


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("name", [FULL, *OTHERS])
def test_bytes_are_those_in_use(name: str, policy: KVCacheConfig | None) -> None:
    model, found = built(name), footprint(name, policy)
    for lengths in LENGTHS if name == FULL else FEW:
        wanted = in_use(model, policy, lengths)
        assert found.batch_bytes(lengths) == pytest.approx(wanted, rel=0.05), lengths
        if len(lengths) == 1:
            assert found.batch_bytes(lengths) == found.bytes(*lengths)


def test_bytes_of_nothing() -> None:
    assert footprint("tiny", POLICIES["int4"]).batch_bytes([]) == 0
    assert footprint("tiny", None).batch_bytes([]) == 0


def test_a_draft_model_counts() -> None:
    model, policy = built("tiny"), POLICIES["int4"]
    one = Footprint([(model, made(model, policy))], policy)
    two = Footprint([(model, made(model, policy)) for _ in range(2)], policy)
    assert two.bytes(1000) == 2 * one.bytes(1000)


@pytest.mark.parametrize(
    "name, policy, coverage, layers",
    [
        ("tiny", POLICIES["int4"], "full", 1.0),
        ("tiny", POLICIES["window"], "full", 1.0),
        ("tiny", None, "none", 0.0),
        ("tiny", KVCacheConfig(), "none", 0.0),
        ("qwen3_next", POLICIES["int4"], "partial", None),
        ("mamba", POLICIES["int4"], "none", 0.0),
    ],
)
def test_facts(
    name: str, policy: KVCacheConfig | None, coverage: str, layers: float | None
) -> None:
    facts = footprint(name, policy).facts()
    assert facts["coverage"] == coverage
    if layers is None:
        assert 0 < facts["layers"] < 1 and 0 < facts["bytes"] < 1
    else:
        assert facts["layers"] == facts["bytes"] == layers
    asked = policy is not None and (policy.quantized or policy.window)
    assert (facts["policy"] == "full precision") == (not asked)
    assert facts["bits"]["keys"] == (policy.k_bits if policy else None)
    assert facts["window"] == (policy.window if policy else None)
