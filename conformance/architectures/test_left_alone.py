"""Kinds of cache that stay as the model made them, and what is said about them."""

from __future__ import annotations

import re

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache

import mlx_kivi
from conformance.architectures import matrix, models
from conformance.architectures.reference import flat
from mlx_kivi import QuantizedStreamingCache, report

TOKENS = 1000


def left_alone(name: str) -> tuple[str, list[object]]:
    """What `describe` says of a model under int4 + sinks + window, and its caches."""
    model = models.build(name)
    caches = mlx_kivi.make_prompt_cache(model, matrix.POLICIES["int4 + sinks + window"])
    return mlx_kivi.describe(model, caches, tokens=TOKENS), flat(caches)


def share(text: str, kind: str) -> tuple[str, str, int]:
    """Which layers keep a kind of cache, and their bytes at TOKENS tokens, with the percentage."""
    line = rf"(\d+ of \d+) layers keep {kind}, .*: (\S+ \S+) \((\d+)%\) at {TOKENS:,} tokens"
    layers, size, percent = re.search(line, text).groups()
    return layers, size, int(percent)


@pytest.mark.parametrize(
    ("name", "layers"), [("mamba", "2 of 2"), ("jamba", "2 of 4"), ("falcon_h1", "2 of 4")]
)
def test_recurrent_state_is_left_alone_and_its_bytes_are_said(name: str, layers: str) -> None:
    text, caches = left_alone(name)
    kept = [cache for cache in caches if isinstance(cache, ArraysCache)]
    model, own = models.build(name), models.build(name).make_cache()
    mx.eval(model(mx.zeros((1, 40), mx.int32), cache=own))
    held = sum(a.nbytes for c in flat(own) if isinstance(c, ArraysCache) for a in c.cache)
    said_layers, said, percent = share(text, "ArraysCache")
    assert said_layers == layers == f"{len(kept)} of {len(caches)}"
    assert said == report.size(held)
    rest = sum(
        report.stored_bytes(c, report.parts(model, [c])[0].heads, TOKENS) if False else 0
        for c in caches
    )
    assert rest == 0 and 0 < percent <= 100
    assert (percent == 100) is (name == "mamba")


def test_chunked_attention_is_left_alone_and_its_bytes_are_said() -> None:
    text, caches = left_alone("llama4")
    kept = [cache for cache in caches if isinstance(cache, ChunkedKVCache)]
    args = models.build("llama4").args.text_config
    chunk = args.attention_chunk_size * args.num_key_value_heads * args.head_dim * 2 * 4
    assert share(text, "ChunkedKVCache")[:2] == ("3 of 4", report.size(3 * chunk))
    assert len(kept) == 3
