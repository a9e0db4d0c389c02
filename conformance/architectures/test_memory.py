"""Models that get arrays: what a call needs beside what is held does not grow with depth.

It is one layer's unpacked data at a time, in 16 layers as in 4.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import mlx.core as mx
import pytest

import mlx_kivi
from conformance.architectures import models
from conformance.architectures.reference import flat
from mlx_kivi import KVCacheConfig, QuantizedStreamingCache
from mlx_kivi.cache import latent
from mlx_kivi.models import factory
from mlx_kivi.models.architectures import DENSE

FEW, MANY = 4, 16  # layers
BAR = 1.1  # what MANY layers may need, as a ratio to FEW
TOKENS = 506  # before the first call that counts
SMALL = {"k_bits": 4, "v_bits": 4, "group_size": 32, "residual_length": 32, "sink": 4}
POLICIES = {"int4": KVCacheConfig(**SMALL), "int4 + window": KVCacheConfig(**SMALL, window=400)}
# Tokens a call, and up to how many heads it reads latents packed. The second is the one after
# which a group is packed.
CALLS = ((1, 128), (1, 0), (40, 0), (64, 0))
NAMES = [name for name in models.names() if name in DENSE]

# Settings that make unpacked data large, and everything else that a call makes small.
WIDE = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 64,
    "index_n_heads": 2,
    "attn_res_block_size": MANY,
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "expert_ffn_hidden_size"), 32),
}


def deepened(name: str, layers: int) -> dict[str, Any]:
    """Settings of module ``name`` with so many layers, of the same kinds in turn."""
    config = copy.deepcopy(models.CONFIGS[name])
    inner = config.get("text_config", config)
    for key in {"num_hidden_layers", "num_layers", "n_layers"} & inner.keys():
        inner[key] = layers
    for key in {"layer_types", "mlp_layer_types"} & inner.keys():
        inner[key] = inner[key] * (layers // len(inner[key]))
    if "linear_attn_config" in inner:
        odd, even = (list(range(first, layers + 1, 2)) for first in (1, 2))
        inner["linear_attn_config"] |= {"kda_layers": odd, "full_attn_layers": even}
    inner.update({key: WIDE[key] for key in WIDE.keys() & inner.keys()})
    return config


@lru_cache(maxsize=2)
def build(name: str, layers: int) -> Any:
    return models.build_from(name, deepened(name, layers))


@pytest.fixture(autouse=True)
def _on_the_cpu() -> Iterator[None]:
    # A GPU keeps what a whole command buffer needs.
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(device)


def filled(model: Any, policy: str) -> list[Any]:
    """Caches of TOKENS tokens that the model never saw, and some that it did."""
    caches = mlx_kivi.make_prompt_cache(model, POLICIES[policy])
    mx.eval(model(mx.zeros((1, 8), mx.int32), cache=caches))
    for cache in flat(caches):
        if isinstance(cache, QuantizedStreamingCache):
            pair = cache.arrays()
            more = [mx.random.normal((*x.shape[:2], TOKENS, x.shape[3]), x.dtype) for x in pair]
            cache.update_and_fetch(*more)
        mx.eval(cache.state)
    return caches


def needs(model: Any, caches: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that each of `CALLS` takes beside what is held before it or after it."""
    found = []
    gc.collect()
    # Over the limit, mlx finishes an operation before it takes memory for the next: how far it
    # runs ahead depends on the machine.
    limit = mx.set_memory_limit(1)
    try:
        for count, rows in CALLS:
            monkeypatch.setattr(latent, "MAX_PACKED_ROWS", rows)
            logits = model(mx.zeros((1, count), mx.int32), cache=caches)
            found.append(max(beside(logits), beside([cache.state for cache in caches])))
    finally:
        mx.set_memory_limit(limit)
    return found


def beside(arrays: Any) -> int:
    """Bytes that it takes to evaluate arrays, beside what is held before or after."""
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(arrays)
    return mx.get_peak_memory() - max(before, mx.get_active_memory())


def growth(name: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What each of the calls needs with MANY layers, as a ratio to FEW."""
    few, many = (
        needs(build(name, layers), filled(build(name, layers), policy), monkeypatch)
        for layers in (FEW, MANY)
    )
    return [b / a for a, b in zip(few, many, strict=True)]


@pytest.mark.parametrize(
    ("name", "policy"),
    # In a window, what is not tied shows in prompts of every module but plamo2, which stays flat.
    [(name, "int4 + window") for name in NAMES]
    + [(name, "int4") for name in ("deepseek_v3", "glm_moe_dsa", "gemma2")],
)
def test_what_a_call_needs_does_not_grow_with_depth(
    name: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    least = growth(name, policy, monkeypatch)
    for _ in range(5):
        if max(least) <= BAR:
            return
        # mlx still runs ahead by a few operations now and then, with any number of layers.
        least = list(map(min, least, growth(name, policy, monkeypatch)))
    assert max(least) <= BAR, least


# Not glm_moe_dsa: in mlx-lm 0.31 its indexer orders the layers by itself.
@pytest.mark.parametrize("name", ["deepseek_v3", "gemma2"])
def test_some_call_needs_more_with_depth_where_nothing_is_tied(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "depends", lambda arrays, after: arrays)
    ratios = growth(name, "int4 + window", monkeypatch)
    assert max(ratios) > 1.3


def test_a_step_needs_more_with_depth_where_latents_are_arrays_and_not_tied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mx, "depends", lambda arrays, after: arrays)
    monkeypatch.setattr(factory, "latents", lambda model, caches: caches)
    ratios = growth("deepseek_v3", "int4", monkeypatch)
    assert all(ratio > 2 for ratio, (count, _) in zip(ratios, CALLS, strict=True) if count == 1)
