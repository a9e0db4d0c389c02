"""Models that nobody listed: they are tried once, and get arrays when in doubt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache

import mlx_kivi
from conformance.architectures import matrix, models
from conformance.architectures.reference import pair_up, reference_caches
from mlx_kivi import hooks
from mlx_kivi.models import probe
from mlx_kivi.models.architectures import DENSE
from mlx_kivi.models.factory import reads_state

DIM, HEADS = 64, 2


class Passes(nn.Module):
    """A user's own model, whose attention hands over what it fetched."""

    def __init__(self) -> None:
        super().__init__()
        mx.random.seed(0)
        self.embed = nn.Embedding(matrix.VOCABULARY, DIM)
        self.layers = [nn.Linear(DIM, 3 * DIM) for _ in range(2)]
        self.calls = 0

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        self.calls += 1
        h = self.embed(inputs)
        mask = create_attention_mask(h, cache[0])
        for layer, c in zip(self.layers, cache, strict=True):
            heads = layer(h).reshape(1, -1, 3 * HEADS, DIM // HEADS).swapaxes(1, 2)
            q, k, v = mx.split(heads, 3, axis=1)
            k, v = c.update_and_fetch(k, v)
            out = self.attend(q, k, v, c, mask)
            h = h + out.swapaxes(1, 2).reshape(h.shape)
        return self.embed.as_linear(h)

    def attend(self, q: mx.array, k: Any, v: Any, cache: Any, mask: Any) -> mx.array:
        return scaled_dot_product_attention(q, k, v, cache=cache, scale=0.2, mask=mask)


class Computes(Passes):
    def attend(self, q: mx.array, k: Any, v: Any, cache: Any, mask: Any) -> mx.array:
        return super().attend(q, k * 0.5, v, cache, mask)


class CallsTheKernel(Passes):
    def attend(self, q: mx.array, k: Any, v: Any, cache: Any, mask: Any) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=0.2, mask=mask)


class ComputesOnShortCalls(Passes):
    def attend(self, q: mx.array, k: Any, v: Any, cache: Any, mask: Any) -> mx.array:
        if 1 < q.shape[2] < 8:
            v = mx.concatenate([v], axis=2)
        return super().attend(q, k, v, cache, mask)


class ComputesInAShortWindow(Computes):
    """Its windows are too small to be packed, yet their rings are read by handle."""

    def make_cache(self) -> list[Any]:
        return [RotatingKVCache(max_size=8), RotatingKVCache(max_size=8)]


class ComputesInChunks(Computes):
    def make_cache(self) -> list[Any]:
        return [ChunkedKVCache(64), ChunkedKVCache(64)]


class Fails(Passes):
    def attend(self, *args: Any) -> mx.array:
        raise RuntimeError("not today")


@pytest.mark.parametrize(
    ("kind", "packed"),
    [
        (Passes, True),
        (Computes, False),
        (CallsTheKernel, False),
        (ComputesOnShortCalls, False),
        (ComputesInAShortWindow, False),
        (ComputesInChunks, False),
        (Fails, False),
    ],
)
def test_a_model_that_only_hands_over_is_read_packed(kind: type, packed: bool) -> None:
    model = kind()
    assert probe.takes_packed(model) is packed
    assert not hooks.attention.active
    caches = mlx_kivi.make_prompt_cache(model, matrix.POLICIES["int4"])
    assert all(cache.packed_attention is packed for cache in caches)


@pytest.mark.parametrize("kind", [Passes, Computes, ComputesOnShortCalls])
def test_either_way_attention_is_that_of_what_is_stored(kind: type) -> None:
    model, config = kind(), matrix.POLICIES["int4 + sinks + window"]
    ours, theirs = mlx_kivi.make_prompt_cache(model, config), reference_caches(model, config)
    pair_up(theirs, ours)
    run = matrix.compare(model, ours, theirs, matrix.TOLERANCE_PACKED, splits=kind is Passes)
    assert max(run) == sum(matrix.CALLS)


@dataclass
class Settings:
    size: int


class Set(Passes):
    """One in the style of mlx_lm, with settings that say all about it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.args = Settings(size)


def test_a_model_is_probed_once_for_its_class_and_settings() -> None:
    first, again, other = Set(1), Set(1), Set(2)
    for model in (first, again, other):
        assert probe.takes_packed(model)
    assert first.calls == other.calls > again.calls == 0


@pytest.mark.parametrize("name", models.names())
def test_the_probe_agrees_with_the_table(name: str) -> None:
    model = models.build(name)
    packed = name not in DENSE and not reads_state(model)
    assert probe._runs_on_handles(model) is packed


@pytest.mark.skipif("gear" not in models.names(), reason="this mlx-lm has no gear")
def test_settings_decide_where_no_module_is_listed() -> None:
    """gear writes its attention out if its logits are capped."""
    plain = models.build("gear")
    capped = type(plain)(type(plain.args)(**{**vars(plain.args), "attn_logit_softcapping": 50.0}))
    assert probe.takes_packed(plain)
    assert not probe.takes_packed(capped)
