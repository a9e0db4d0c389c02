"""The graph of a step: how many primitives a basis adds to what every layer asks of mlx."""

from __future__ import annotations

import io

import mlx.core as mx
import pytest
from mlx_lm.models.base import scaled_dot_product_attention
from reference import Stream, new_cache, run

from conformance import common
from mlx_kivi import KVCacheConfig
from mlx_kivi.batch_cache import BatchCache
from mlx_kivi.cache.attention import CacheHandle

pytestmark = pytest.mark.usefixtures("attention_hooked")


def primitives(config: KVCacheConfig, dtype: mx.Dtype, seed: int | None, rows: int = 1) -> int:
    """In the graph of one token's call on a cache with packed groups, none of them due now."""
    stream = Stream(400, 2, 3, 64, 64, dtype=dtype)
    cache = new_cache(config, stream, seed=seed)
    run(cache, stream, [300, *[1] * 20])
    q, k, v = stream.cut(320, 321)
    if rows > 1:
        cache = BatchCache([cache] * rows)
        q, k, v = (mx.repeat(x, rows, axis=0) for x in (q, k, v))
        cache.update_and_fetch(k, v)
        one = cache.extract(0)
    else:
        one = cache
    mx.eval(q, k, v, common.arrays_in(cache))
    assert one.packed_tokens and not one.is_due()
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


@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
def test_the_graph_of_a_batch_does_not_grow_with_its_rows(name: str) -> None:
    config = KVCacheConfig.from_name(name)
    one, two, eight = (primitives(config, mx.float32, 0, rows) for rows in (1, 2, 8))
    # The rest of a decoder's layer has about a hundred.
    assert two == eight <= one + 4


def test_eight_bits_take_no_basis_and_no_primitive_more() -> None:
    int8 = KVCacheConfig.from_name("int8")
    counts = [
        primitives(config, mx.float32, seed)
        for config in (int8, int8.replace(balanced=False))
        for seed in (None, 0)
    ]
    assert len(set(counts)) == 1
