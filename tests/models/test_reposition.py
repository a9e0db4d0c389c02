"""Re-positioned sinks, against a reference that keeps keys as they are before RoPE.

The reference rotates the kept keys by their index in the cache, at each step anew, as the
StreamingLLM paper says (arXiv:2309.17453, section 3.2). It rotates in float64, with NumPy.
"""

from __future__ import annotations

import argparse
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import internlm2, rope_utils
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from reference import Stream, attention, dense, logits, random_tokens

from conformance.common import tiny_llama
from mlx_kivi import KVCacheConfig, QuantizedStreamingCache, hooks
from mlx_kivi.commands.flags import add_arguments, from_arguments
from mlx_kivi.models.factory import build

SINK, WINDOW = 4, 100
FULL = KVCacheConfig(sink=SINK, window=WINDOW, reposition=True)
INT4 = KVCacheConfig(
    k_bits=4, v_bits=4, group_size=32, residual_length=16, sink=SINK, window=WINDOW, reposition=True
)
LLAMA3 = {"factor": 8.0, "original_max_position_embeddings": 64}
FACTORS = np.linspace(1, 4, 16).tolist()
ROPES = {
    "plain": nn.RoPE(32),
    "traditional": nn.RoPE(32, traditional=True, base=500.0),
    "linear": nn.RoPE(32, scale=0.25),
    "partial": nn.RoPE(16),
    "llama3": rope_utils.Llama3RoPE(32, scaling_config=LLAMA3),
    "yarn": rope_utils.YarnRoPE(32, scaling_factor=4.0, original_max_position_embeddings=64),
    "su": rope_utils.SuScaledRoPE(
        32, max_position_embeddings=512, original_max_position_embeddings=64, long_factor=FACTORS
    ),
    "proportional": rope_utils.ProportionalRoPE(32, rotated_dims=16),
}


pytestmark = pytest.mark.usefixtures("attention_hooked")


def tiny(rope: nn.Module | None = None) -> nn.Module:
    """A random llama whose attention is not flat, with another RoPE if one is given."""
    model = tiny_llama(peak=4)
    for layer in model.layers:
        if rope is not None:
            layer.self_attn.rope = rope
    return model


# The reference


def rotate(rope: nn.Module, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """What ``rope`` makes of x [..., T, D] at ``positions`` [T], in float64."""
    factor = getattr(rope, "mscale", getattr(rope, "_scale", 1.0))
    if type(rope) is nn.RoPE:
        angles = rope.scale * rope.base ** (-np.arange(0, rope.dims, 2) / rope.dims)
    else:
        angles = 1 / dense(rope._freqs)
    half = len(angles)
    if getattr(rope, "traditional", False):
        first, second = np.arange(0, 2 * half, 2), np.arange(1, 2 * half, 2)
    else:
        first, second = np.arange(half), np.arange(half, 2 * half)
    cos, sin = np.cos(positions[:, None] * angles), np.sin(positions[:, None] * angles)
    out = x.copy()
    a, b = x[..., first] * factor, x[..., second] * factor
    out[..., first], out[..., second] = a * cos - b * sin, a * sin + b * cos
    return out


def without(rope: nn.Module, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The inverse of `rotate`."""
    factor = getattr(rope, "mscale", getattr(rope, "_scale", 1.0))
    out = rotate(rope, x, -positions)
    turning = 2 * len(rope._freqs) if hasattr(rope, "_freqs") else rope.dims
    out[..., :turning] /= factor**2
    return out


def kept(seen: int) -> np.ndarray:
    """Positions in the text of what the cache keeps, in order."""
    return np.r_[np.arange(min(SINK, seen)), np.arange(max(SINK, seen - WINDOW), seen)]


def random_stream(length: int) -> Stream:
    """Queries, keys and values of one layer, before RoPE: 4 heads of 32 on 2 KV heads."""
    stream = Stream(length, heads=2, repeats=2, seed=3)
    stream.q = stream.q * 2  # attention that is not flat
    return stream


def step(cache: Any, rope: nn.Module, stream: Stream, begin: int, end: int) -> np.ndarray:
    """One call of a model's attention layer on tokens [begin, end): [heads, L, 32]."""
    q, k, v = stream.cut(begin, end)
    mask = create_attention_mask(mx.zeros((1, end - begin, 1)), cache)
    offset = cache.offset
    keys, values = cache.update_and_fetch(rope(k, offset=offset), v)
    out = scaled_dot_product_attention(
        rope(q, offset=offset), keys, values, cache=cache, scale=32**-0.5, mask=mask
    )
    return dense(out)[0]


def expected(cache: Any, rope: nn.Module, stream: Stream, position: int) -> np.ndarray:
    """What the newest query should get, its keys rotated by their index in the cache."""
    where = kept(position + 1)
    index = np.arange(len(where))
    keys, values = dense(stream.k[0])[:, where], dense(stream.v[0])[:, where]
    if cache.config.quantized:
        # What is stored stands for keys that were rotated by their position in the text.
        k, v = map(dense, cache.arrays())
        keys, values = without(rope, k[0][:, -len(where) :], where), v[0][:, -len(where) :]
        if k.shape[2] > len(where):
            keys[:, :SINK] = without(rope, k[0][:, :SINK], where[:SINK])
            values[:, :SINK] = v[0][:, :SINK]
    q = rotate(rope, dense(stream.q[0, :, position : position + 1]), index[-1:])
    mask = np.ones((1, len(where)), bool)
    return attention(q[None], rotate(rope, keys, index)[None], values[None], mask)[0]


def layer_cache(rope: nn.Module, config: KVCacheConfig) -> QuantizedStreamingCache:
    return build(tiny(rope), config)[0]


# One layer


@pytest.mark.parametrize("config", [FULL, INT4], ids=["full", "int4"])
@pytest.mark.parametrize("kind", ROPES)
def test_a_thousand_steps_past_the_window_see_what_the_reference_sees(
    kind: str, config: KVCacheConfig
) -> None:
    rope = ROPES[kind]
    stream = random_stream(SINK + WINDOW + 1000)
    cache = layer_cache(rope, config)
    for position in range(stream.q.shape[2]):
        out = step(cache, rope, stream, position, position + 1)
        if position % 7 == 0 or abs(position - WINDOW) < 20:
            np.testing.assert_allclose(
                out, expected(cache, rope, stream, position), atol=2e-4, err_msg=str(position)
            )


@pytest.mark.parametrize("config", [FULL, INT4], ids=["full", "int4"])
@pytest.mark.parametrize("kind", ROPES)
def test_every_rope_rotates_sinks_by_their_index(kind: str, config: KVCacheConfig) -> None:
    rope = ROPES[kind]
    stream = random_stream(1200)
    cache = layer_cache(rope, config)
    begin = 0
    for length in (90, 1, 5, 1, 1, 1, 1, 3, 40, 1, 1, 700, 1, 8, 1, 1, 200, *[1] * 40):
        out = step(cache, rope, stream, begin, begin + length)
        begin += length
        np.testing.assert_allclose(
            out[:, -1:], expected(cache, rope, stream, begin - 1), atol=3e-4, err_msg=str(begin)
        )


def test_vanilla_sinks_are_elsewhere() -> None:
    """The reference tells the two schemes apart."""
    rope = ROPES["plain"]
    stream = random_stream(400)
    cache = layer_cache(rope, FULL.replace(reposition=False))
    step(cache, rope, stream, 0, 399)
    out = step(cache, rope, stream, 399, 400)
    assert np.abs(out - expected(cache, rope, stream, 399)).max() > 0.02


def test_stored_keys_are_never_changed() -> None:
    rope = ROPES["plain"]
    stream = random_stream(600)
    caches = [layer_cache(rope, c) for c in (INT4, INT4.replace(reposition=False))]
    begin = 0
    for length in (300, *[1] * 40, 60):
        for cache in caches:
            step(cache, rope, stream, begin, begin + length)
        begin += length
    for ours, vanilla in zip(*(c.state[1:] for c in caches), strict=True):
        assert mx.array_equal(ours, vanilla)


# A whole model


def reference_logits(model: nn.Module, tokens: mx.array) -> np.ndarray:
    """Logits [T, vocabulary], token by token, from keys before RoPE: llama written out."""
    past = [[[], []] for _ in model.layers]
    rows = []
    for t in range(tokens.shape[1]):
        h = model.model.embed_tokens(tokens[:, t : t + 1])
        where = kept(t + 1)
        index = len(where) - 1
        for layer, (keys, values) in zip(model.layers, past, strict=True):
            attn, x = layer.self_attn, layer.input_layernorm(h)
            q, k, v = (
                p(x).reshape(1, 1, -1, 32).swapaxes(1, 2)
                for p in (attn.q_proj, attn.k_proj, attn.v_proj)
            )
            keys.append(k)
            values.append(v)
            k, v = (mx.concatenate([x[i] for i in where], axis=2) for x in (keys, values))
            out = mx.fast.scaled_dot_product_attention(
                attn.rope(q, offset=index), attn.rope(k), v, scale=attn.scale
            )
            h = h + attn.o_proj(out.swapaxes(1, 2).reshape(1, 1, -1))
            h = h + layer.mlp(layer.post_attention_layernorm(h))
        rows.append(dense(model.lm_head(model.model.norm(h)))[0])
    return np.concatenate(rows)


def test_a_model_says_what_the_reference_says_however_its_tokens_come() -> None:
    model, tokens = tiny(), random_tokens(420)
    want = reference_logits(model, tokens)
    for calls in ([1] * 420, [420], [7] * 60, [100, 300, 20], [3, 90, 11, 1, 315]):
        got = logits(model, tokens, build(model, FULL), calls)
        np.testing.assert_allclose(got, want, atol=1e-3, err_msg=str(calls[:5]))


@pytest.mark.parametrize("sink", [1, 7, 300])
@pytest.mark.parametrize("window", [1, 40])
def test_chunks_do_not_change_logits_at_odd_sizes(sink: int, window: int) -> None:
    model, tokens = tiny(), random_tokens(700)
    config = KVCacheConfig(sink=sink, window=window, reposition=True)
    want = logits(model, tokens, build(model, config), [700])
    for calls in ([350, 350], [2, 5, 293, 8, 92, 300], [*[64] * 10, *[1] * 60]):
        got = logits(model, tokens, build(model, config), calls)
        np.testing.assert_allclose(got, want, atol=1e-3, err_msg=str(calls[:5]))


def test_short_calls_equal_single_steps_when_packed() -> None:
    """As speculative decoding needs; a group is packed in the middle of some of them."""
    model, tokens = tiny(), random_tokens(400)
    single, short = build(model, INT4), build(model, INT4)
    for caches in (single, short):
        model(tokens[:, :200], cache=caches)
    want = logits(model, tokens[:, 200:], single, [1] * 200)
    got = logits(model, tokens[:, 200:], short, [5] * 40)
    np.testing.assert_allclose(got, want, atol=2e-3)


def test_half_precision_keeps_up() -> None:
    model, tokens = tiny(), random_tokens(400)
    want = logits(model, tokens, build(model, FULL), [400])
    model.set_dtype(mx.float16)
    got = logits(model, tokens, build(model, FULL), [250, *[1] * 150])
    assert np.abs(got - want).max() < 0.05 * np.abs(want).max()


def test_nothing_moves_before_the_window_is_full() -> None:
    model, tokens = tiny(), random_tokens(SINK + WINDOW)
    got, want = (
        logits(model, tokens, build(model, FULL.replace(reposition=on)), [60, *[1] * 44])
        for on in (True, False)
    )
    np.testing.assert_array_equal(got, want)


def test_a_restored_cache_goes_on_alike() -> None:
    model, tokens = tiny(ROPES["yarn"]), random_tokens(400)
    caches = build(model, INT4)
    model(tokens[:, :300], cache=caches)
    again = [QuantizedStreamingCache.from_state([a[...] for a in c.state]) for c in caches]
    want, got = (logits(model, tokens[:, 300:], c, [60, *[1] * 40]) for c in (caches, again))
    np.testing.assert_array_equal(got, want)


# Errors


def test_without_a_window_the_error_says_the_mend() -> None:
    with pytest.raises(ValueError, match="reposition=True needs a window: add window=M"):
        build(tiny(), KVCacheConfig(reposition=True))


def test_max_kv_size_is_a_window_too() -> None:
    caches = build(tiny(), KVCacheConfig(reposition=True), max_kv_size=104)
    assert caches[0].config == FULL


def test_the_flag_needs_a_window() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parser.add_argument("--max-kv-size", type=int)
    flag = "--streaming-llm-reposition"
    with pytest.raises(ValueError, match=f"{flag} needs --streaming-llm-window M"):
        from_arguments(parser.parse_args([flag]), None)
    for bound in (["--streaming-llm-window", "100"], ["--max-kv-size", "104"]):
        assert from_arguments(parser.parse_args([flag, *bound]), None) == FULL
    assert "re-positioned" in FULL.describe()


def test_a_bad_value_is_named() -> None:
    with pytest.raises(ValueError, match="reposition=1: use True or False"):
        KVCacheConfig(window=9, reposition=1)


def test_a_cache_made_without_its_model_refuses() -> None:
    cache = QuantizedStreamingCache(FULL, packed_attention=True)
    with pytest.raises(ValueError, match="let make_prompt_cache make"):
        cache.update_and_fetch(*[mx.zeros((1, 2, 1, 32))] * 2)


def test_attention_that_is_not_hooked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    caches = build(model, FULL)
    monkeypatch.setattr(hooks, "attention_hooked", lambda: False)
    with pytest.raises(ValueError, match="needs mlx_lm patched"):
        model(random_tokens(1), cache=caches)
    assert caches[0].offset == 0


def test_dynamic_rope_is_refused_by_name() -> None:
    home = rope_utils if hasattr(rope_utils, "DynamicNTKScalingRoPE") else internlm2
    rope = home.DynamicNTKScalingRoPE(32, 64, False, 1e4, 2.0)
    with pytest.raises(ValueError) as caught:
        build(tiny(rope), FULL)
    assert "llama" in str(caught.value) and "DynamicNTKScalingRoPE" in str(caught.value)
    assert "leave it out" in str(caught.value)
