"""How keys turn in every model of mlx_lm, which of them re-base, re-position, or say why not."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import cache as mlx_caches
from reference import dense, logits, random_tokens

from conformance.architectures import models
from conformance.architectures.reference import flat
from mlx_kivi import KVCacheConfig
from mlx_kivi.cache.rotation import REBASE_AT, REBASE_BY, Rotation
from mlx_kivi.models.architectures import own_caches
from mlx_kivi.models.factory import build, ours
from mlx_kivi.models.rotations import rotations

STREAM = KVCacheConfig(sink=0, window=72)
# What the error has to say of the models whose keys can't be turned.
REFUSED = {
    "afm7": "weighted norm",
    "bailing_hybrid": "apart from the rest",
    "bailing_moe_v3": "apart from the rest",
    "deepseek_v3": "apart from the rest",
    "deepseek_v32": "apart from the rest",
    "deepseek_v41": "no model of mlx_lm whose positions are known",
    "glm4_moe_lite": "apart from the rest",
    "glm_moe_dsa": "apart from the rest",
    "gpt2": "learned",
    "gpt_bigcode": "learned",
    "hunyuan": "weighted norm",
    "hunyuan_v1_dense": "weighted norm",
    "kimi_k25": "apart from the rest",
    "kimi_k3": "apart from the rest",
    "kimi_linear": "apart from the rest",
    "kimi_vl": "apart from the rest",
    "longcat_flash": "apart from the rest",
    "longcat_flash_ngram": "apart from the rest",
    "mamba": "no model of mlx_lm whose positions are known",
    "mamba2": "no model of mlx_lm whose positions are known",
    "minimax_m3_vl": "indexer",
    "mistral4": "apart from the rest",
    "muse_spark": "fused kernel",
    "rwkv7": "no model of mlx_lm whose positions are known",
}
# Their keys turn, but they use the position besides, so counting it anew would show.
NOT_REBASED = {"bailing_moe_linear", "iquestloopcoder", "llama4", "ministral3", "mistral3"}
# They compute on the cached keys themselves.
DENSE = {"gemma2", "olmo", "phi3small", "plamo", "plamo2", "stablelm"}
NAMES = models.names()
if not hasattr(mlx_caches.KVCache, "keys_and_values"):  # mlx-lm 0.31
    # Angles by the length of the sequence; and models that need the caches of mlx-lm there.
    REFUSED |= dict.fromkeys(["internlm2", "internlm3"], "DynamicNTKScalingRoPE")
    NAMES = [name for name in NAMES if name not in ("afm7", "gemma3n")]


pytestmark = pytest.mark.usefixtures("attention_hooked")


# Every architecture


@pytest.fixture(scope="module", params=NAMES)
def architecture(request: pytest.FixtureRequest) -> tuple[str, Any]:
    return request.param, models.build(request.param)


class OneToken:
    """A cache at some offset that holds nothing but the token that is fed."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.keys: mx.array | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys, self.values = keys, values
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self.keys, self.values

    def make_mask(self, *_: Any, **__: Any) -> None:
        return None


def one_token(cache: Any, offset: int) -> Any:
    if type(cache) in (mlx_caches.KVCache, mlx_caches.RotatingKVCache):
        return OneToken(offset)
    if type(cache) is mlx_caches.CacheList:
        return mlx_caches.CacheList(*(one_token(member, offset) for member in cache.caches))
    return cache


def test_keys_turn_as_the_model_turns_them(architecture: tuple[str, Any]) -> None:
    """A token that sees itself alone has the same keys at each position, but for their turn."""
    name, model = architecture
    own = own_caches(model)
    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]):
            rotations(model, own)
        return
    runs = []
    for offset in (0, 1000):
        caches = [one_token(cache, offset) for cache in own_caches(model)]
        model(mx.array([[5]]), cache=caches)
        runs.append(caches)
    compared = 0
    # iquestloopcoder's second loop has gates made of turned queries: its input differs.
    pairs = list(zip(rotations(model, own), *runs, strict=True))
    for rotation, here, there in pairs[: 2 if name == "iquestloopcoder" else None]:
        for a, b in zip(flat([here]), flat([there]), strict=True):
            if isinstance(a, OneToken) and a.keys is not None:
                got, want = dense(rotation.turned(a.keys, 1000)), dense(b.keys)
                np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())
                compared += 1
    assert compared


def test_a_model_rebases_without_a_trace_or_not_at_all(architecture: tuple[str, Any]) -> None:
    name, model = architecture
    caches, early = build(model, STREAM), build(model, STREAM)
    limits = {cache.rebase_at for cache in ours(caches)}
    if name in REFUSED or name in NOT_REBASED:
        assert limits <= {None}
        return
    assert limits == {REBASE_AT}
    for cache in ours(early):
        cache._rebased = 90 - REBASE_AT  # its first token is at position REBASE_AT - 90
    calls = [40, 1, 30, 1, 1, 1, 13, *[1] * 8, 40, 70]
    tokens = random_tokens(sum(calls))
    want, got = (logits(model, tokens, c, calls) for c in (caches, early))
    assert {cache.offset for cache in ours(early)} == {REBASE_AT - 90 - REBASE_BY + len(want)}
    off = np.abs(got - want).max(axis=1) / np.abs(want).max()
    # Of the rows, because the least difference may send a token to another expert.
    assert np.median(off[:90]) < 0.02 and np.median(off[100:]) < 0.02


def test_repositioning_serves_a_model_in_chunks_of_any_size_or_says_why_not(
    architecture: tuple[str, Any],
) -> None:
    name, model = architecture
    config = KVCacheConfig(sink=4, window=24, reposition=True)
    if name not in REFUSED and name not in DENSE:
        tokens = random_tokens(110)
        want = logits(model, tokens, build(model, config), [110])
        got = logits(model, tokens, build(model, config), [37, 1, 1, 1, 30, 5, 1, 1, 33])
        off = np.abs(got - want).max(axis=1) / np.abs(want).max()
        assert np.median(off) < 1e-3
        return
    with pytest.raises(ValueError) as caught:
        build(model, config)
    message = str(caught.value)
    assert message.startswith("reposition=True can't serve ") and "leave it out" in message
    assert REFUSED.get(name, "computes on cached keys itself") in message and "\n" not in message


# Rotations and errors


@pytest.mark.parametrize(
    "fields",
    [
        {"dims": 3, "base": 1e4},
        {"dims": -2, "base": 1e4},
        {"dims": True, "base": 1e4},
        {"dims": 4},
        {"dims": 4, "base": 0.0},
        {"dims": 4, "base": float("inf")},
        {"dims": 4, "base": 1e4, "scale": float("nan")},
        {"dims": 4, "base": 1e4, "freqs": (1.0, 2.0)},
        {"dims": 4, "freqs": (1.0,)},
        {"dims": 4, "freqs": (1.0, float("nan"))},
        {"dims": 4, "freqs": (1.0, 0.0)},
        {"dims": 4, "base": 1e4, "traditional": 1},
    ],
)
def test_a_rotation_that_can_not_be_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="rotation"):
        Rotation(**fields)


def test_a_model_of_ones_own_streams_and_does_not_reposition() -> None:
    class Own(nn.Module):
        layers = [object()]

    assert build(Own(), STREAM)[0].rebase_at is None
    with pytest.raises(ValueError, match="no model of mlx_lm"):
        build(Own(), STREAM.replace(reposition=True))
