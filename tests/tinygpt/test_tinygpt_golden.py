"""The shared model gives its own engine's outputs."""

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm import stream_generate
from mlx_lm.models.cache import make_prompt_cache

from mlx_kivi import KVCacheConfig, patched, tinygpt
from mlx_kivi.models.probe import takes_packed


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_greedy_bytes_are_the_engines(shared_models, dtype):
    root, golden = shared_models
    model, tokenizer, _ = tinygpt.load(root / f"shakespeare-3l-{dtype}.tinygpt")
    assert len(golden["greedy"]) == 3
    for prompt, wanted in golden["greedy"].items():
        responses = stream_generate(model, tokenizer, prompt, max_tokens=80)
        assert "".join(r.text for r in responses) == wanted


@pytest.mark.parametrize("tight", [False, True], ids=["preset", "packed_at_once"])
def test_an_int8_cache_gives_the_same_bytes(shared_models, tight):
    root, golden = shared_models
    model, tokenizer, _ = tinygpt.load(root / "shakespeare-3l-fp32.tinygpt")
    fields = {"group_size": 32, "residual_length": 0, "sink": 0} if tight else {}
    config = KVCacheConfig.from_name("int8", **fields)
    assert takes_packed(model)
    with patched(config):
        for prompt, wanted in golden["greedy"].items():
            cache = make_prompt_cache(model)
            responses = stream_generate(model, tokenizer, prompt, max_tokens=80, prompt_cache=cache)
            assert "".join(r.text for r in responses) == wanted
            assert cache[0].packed_tokens == (64 if tight else 0)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int4"])
def test_the_loss_is_the_engines(shared_models, dtype):
    root, golden = shared_models
    model, tokenizer, config = tinygpt.load(root / f"shakespeare-3l-{dtype}.tinygpt")
    ids = mx.array([tokenizer.encode(golden["loss"]["window_utf8"])])
    assert ids.shape == (1, 97)
    loss = nn.losses.cross_entropy(model(ids[:, :-1]), ids[:, 1:], reduction="mean")
    assert loss.item() == pytest.approx(golden["loss"][dtype], abs=1e-5)
    assert (config["model_type"], config["tinygpt"]["weightDtype"]) == ("tinygpt", dtype)
