"""Kinds of cache that stay as the model made them, and what is said about them."""

from __future__ import annotations

import re

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache

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
    model = models.build(name)
    own = model.make_cache()
    mx.eval(model(mx.zeros((1, 40), mx.int32), cache=own))
    states = [c for c in flat(own) if isinstance(c, ArraysCache)]
    held = sum(a.nbytes for c in states for a in c.cache)
    said, size, percent = share(text, "ArraysCache")
    assert said == layers == f"{len(states)} of {len(caches)}"
    assert size == report.size(held)
    ours = sum(isinstance(c, QuantizedStreamingCache) for c in caches)
    assert ours == len(caches) - len(states)
    assert percent == 100 if ours == 0 else 0 < percent < 100


@pytest.mark.skipif("deepseek_v41" not in models.names(), reason="this mlx-lm has no deepseek_v41")
def test_a_class_of_the_models_own_is_left_alone_and_its_growth_is_said() -> None:
    text, caches = left_alone("deepseek_v41")
    model = models.build("deepseek_v41")
    own = model.make_cache()
    for _ in range(4):
        mx.eval(model(mx.zeros((1, TOKENS // 4), mx.int32), cache=own))
    assert share(text, "LayerCache") == ("6 of 6", report.size(sum(c.nbytes for c in own)), 100)
    assert [type(cache) for cache in caches] == [type(cache) for cache in own]
    # As docs/architectures.md says it: rows for others, of so many channels.
    args = model.args
    rows = 4 * (args.head_dim + args.index_head_dim)
    expected = [
        rows / ratio if layer in args.kv_source_layer_ids else 0
        for layer, ratio in enumerate(args.compress_ratios)
    ]
    assert [part.growth[0] for part in report.parts(model, caches)] == expected
