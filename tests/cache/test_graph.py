"""The graph of a step: how many primitives a basis adds to what every layer asks of mlx."""

from __future__ import annotations

import io

import mlx.core as mx
import pytest
from mlx_lm.models.base import scaled_dot_product_attention
from reference import Stream, arrays_in, new_cache, run

from mlx_kivi import KVCacheConfig
from mlx_kivi.cache.attention import CacheHandle

pytestmark = pytest.mark.usefixtures("attention_hooked")


def primitives(config: KVCacheConfig, dtype: mx.Dtype, seed: int | None) -> int:
    """In the graph of one token's call on a cache with packed groups, none of them due now."""
    stream = Stream(400, 2, 3, 64, 64, dtype=dtype)
    cache = new_cache(config, stream, seed=seed)
    run(cache, stream, [300, *[1] * 20])
    q, k, v = stream.cut(320, 321)
    mx.eval(q, k, v, arrays_in(cache))
    assert cache.packed_tokens and cache._groups == cache.plan.groups(cache.seen)
    keys, values = cache.update_and_fetch(k, v)
    assert isinstance(keys, CacheHandle)
    out = scaled_dot_product_attention(q, keys, values, cache, 0.125, None)
    graph = io.StringIO()
    mx.export_to_dot(graph, out)
    return graph.getvalue().count("shape=rectangle")


# Primitives of the same step in version 0.1.0, which packed keys and values as they are.
BEFORE = {mx.float32: 21, mx.bfloat16: 23}


@pytest.mark.parametrize("dtype", list(BEFORE), ids=str)
@pytest.mark.parametrize("seed", [None, 0], ids=["unmeasured", "balanced"])
@pytest.mark.parametrize(("name", "more"), [("kivi4", 0), ("kivi2", 0), ("int4", 3), ("int2", 6)])
def test_a_basis_adds_few_primitives_to_a_step(
    name: str, more: int, seed: int | None, dtype: mx.Dtype
) -> None:
    assert primitives(KVCacheConfig.from_name(name), dtype, seed) <= BEFORE[dtype] + more


def test_eight_bits_take_no_basis_and_no_primitive_more() -> None:
    int8 = KVCacheConfig.from_name("int8")
    counts = [
        primitives(config, mx.float32, seed)
        for config in (int8, int8.replace(balanced=False))
        for seed in (None, 0)
    ]
    assert len(set(counts)) == 1
