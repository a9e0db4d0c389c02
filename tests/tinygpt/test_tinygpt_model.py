"""The forward pass of every switch against float64 numpy written from the format page."""

import math

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import batch_generate, generate, stream_generate
from mlx_lm.models.cache import make_prompt_cache
from reference import logits

from mlx_kivi import KVCacheConfig, patched, tinygpt
from mlx_kivi.models.probe import takes_packed
from mlx_kivi.tinygpt import PositionTableFull

erf = np.vectorize(math.erf)


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def reference(config, weights, ids):
    """Logits [T, V] in float64."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    C, H, L, T = config["dModel"], config["heads"], config["layers"], len(ids)
    D = C // H
    behind = np.arange(T)[:, None] - np.arange(T)[None]
    visible = (behind >= 0) & (behind < config.get("slidingWindow", T))
    alpha = (2 * L) ** 0.25 if config.get("useDeepNorm") else 1
    anchor = max(0, L // 2 - 1) if config.get("useYOCO") else L - 1

    def linear(name, x):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    def norm(name, x):
        x = x - x.mean(axis=-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5)
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def heads(x):
        return x.reshape(T, H, D).transpose(1, 0, 2)

    def attend(q, k, v):
        scores = np.where(visible, heads(q) @ heads(k).transpose(0, 2, 1) / math.sqrt(D), -np.inf)
        return (softmax(scores) @ heads(v)).transpose(1, 0, 2).reshape(T, C)

    def mlp(name, x):
        h = linear(f"{name}.fc_in", x)
        return linear(f"{name}.fc_out", 0.5 * h * (1 + erf(h / math.sqrt(2))))

    def experts(block, x):
        out = np.zeros_like(x)
        for t, probs in enumerate(softmax(linear(f"{block}.moe.router", x))):
            top = np.argsort(probs)[::-1][: config.get("moeTopK", 1)]
            share = probs[top] if len(top) == 1 else probs[top] / probs[top].sum()
            for e, p in zip(top, share):
                out[t] += p * mlp(f"{block}.moe.experts.{e}", x[t])
        return out

    k = v = np.empty(0)  # the anchor leaves its own for the blocks after it
    x = w["token_embedding.weight"][ids]
    if config.get("useEmbeddingRMSNorm"):
        x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * w["embed_norm.weight"]
    x = x + w["position_embedding.weight"][:T]
    for i in range(L):
        block = f"blocks.{i}"
        h = norm(f"{block}.ln1", x)
        if i > anchor:
            name = f"{block}.cross_attn"
            out = attend(linear(f"{name}.q_proj", h), k, v)
        elif config.get("useDifferentialAttention"):
            name = f"{block}.diff_attn"
            q1, k1, q2, k2, v = (
                linear(f"{name}.{n}_proj", h) for n in ("q1", "k1", "q2", "k2", "v")
            )
            out = attend(q1, k1, v) - w[f"{name}.lambda"] * attend(q2, k2, v)
        else:
            name = f"{block}.attn"
            q, k, v = (linear(f"{name}.{n}_proj", h) for n in "qkv")
            out = attend(q, k, v)
        y = alpha * x + linear(f"{name}.o_proj", out)
        h = norm(f"{block}.ln2", y)
        many = config.get("nExperts", 1) > 1
        y = alpha * y + (experts(block, h) if many else mlp(f"{block}.mlp", h))
        if config.get("useMoD"):
            y = x + (y - x) / (1 + np.exp(-linear(f"{block}.mod_router", x)))
        x = y
    return norm("ln_final", x) @ w["token_embedding.weight"].T


def ids_of(length, seed=1):
    return np.random.default_rng(seed).integers(0, 256, length)


def in_chunks(model, ids, sizes, cache=None):
    cache = cache if cache is not None else make_prompt_cache(model)
    return logits(model, mx.array(ids[None]), cache, sizes), cache


def test_logits_are_those_of_the_format_page(config, make_file, make_weights):
    model, _, _ = tinygpt.load(make_file(config, unused=True))
    ids = ids_of(config["ctx"])
    wanted = reference(config, make_weights(config, unused=True), ids)
    got = np.array(model(mx.array(ids[None]))[0])
    np.testing.assert_allclose(got, wanted, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("sizes", [(1,), (7, 2, 5, 1, 1), (20, 1)], ids=str)
def test_cached_chunks_give_the_uncached_logits(config, make_file, sizes):
    model, _, _ = tinygpt.load(make_file(config))
    ids = ids_of(config["ctx"])
    whole = np.array(model(mx.array(ids[None]))[0])
    got, _ = in_chunks(model, ids, sizes)
    np.testing.assert_allclose(got, whole, atol=2e-5 * np.abs(whole).max())


def test_every_switch_decodes_on_packed_data(config, make_file):
    model, _, _ = tinygpt.load(make_file(config))
    assert takes_packed(model)
    ids, sizes = ids_of(config["ctx"]), (30, *[1] * 18)
    policy = KVCacheConfig.from_name("int4", group_size=32, residual_length=0, sink=0)
    with patched(policy):
        unpacked = make_prompt_cache(model)
        for layer in unpacked:
            layer.keys_and_values = layer.arrays
        wanted, _ = in_chunks(model, ids, sizes, unpacked)
        got, cache = in_chunks(model, ids, sizes)
    np.testing.assert_allclose(got, wanted, atol=1e-4 * np.abs(wanted).max())
    assert cache[0].packed_tokens == (0 if "slidingWindow" in config else 32)


def test_a_batch_of_uneven_prompts_gives_each_ones_own_tokens(config, make_file):
    model, tokenizer, _ = tinygpt.load(make_file(config))
    prompts = [tokenizer.encode(text) for text in ("What is", "To be, or not to be, that", "A")]
    batch = batch_generate(model, tokenizer, prompts, max_tokens=12).texts
    alone = [generate(model, tokenizer, prompt, max_tokens=12) for prompt in prompts]
    assert batch == alone


def test_a_mixed_batch_reads_each_rows_own_positions(make_file):
    model, _, _ = tinygpt.load(make_file())
    rows = [ids_of(9, seed=2), ids_of(4, seed=3)]
    caches = []
    for row in rows:
        cache = make_prompt_cache(model)
        model(mx.array(row[None]), cache=cache)
        caches.append(cache)
    merged = [type(a).merge([a, b]) for a, b in zip(*caches)]
    nexts = ids_of(2, seed=4)
    got = np.array(model(mx.array(nexts[:, None]), cache=merged)[:, -1])
    for row, token, last in zip(rows, nexts, got):
        alone = np.array(model(mx.array(np.array([[*row, token]])))[0, -1])
        np.testing.assert_allclose(last, alone, atol=2e-5 * np.abs(alone).max())


def test_input_embeddings_stand_for_token_embeddings(make_file):
    model, _, _ = tinygpt.load(make_file())
    ids = mx.array(ids_of(6)[None])
    given = model(mx.zeros_like(ids), input_embeddings=model.token_embedding(ids))
    assert mx.array_equal(given, model(ids))


def test_yoco_keeps_caches_only_up_to_the_anchor(make_file):
    config = {"layers": 6, "dModel": 32, "ctx": 48, "heads": 4, "dMlp": 40, "useYOCO": True}
    model, _, _ = tinygpt.load(make_file(config))
    cache = make_prompt_cache(model)
    assert len(model.layers) == 6
    assert len(cache) == 3  # 6 // 2 - 1 is the anchor
    model(mx.array(ids_of(5)[None]), cache=cache)
    assert [layer.offset for layer in cache] == [5, 5, 5]


def test_a_window_bounds_the_cache(make_file):
    config = {"layers": 2, "dModel": 32, "ctx": 48, "heads": 4, "dMlp": 40, "slidingWindow": 5}
    model, _, _ = tinygpt.load(make_file(config))
    _, cache = in_chunks(model, ids_of(40), (1,))
    assert all(layer.keys.shape[2] == 5 and layer.offset == 40 for layer in cache)


def test_differential_attention_stores_both_keys_and_one_value(make_file):
    config = {"layers": 2, "dModel": 32, "ctx": 48, "heads": 4, "dMlp": 40}
    model, _, _ = tinygpt.load(make_file({**config, "useDifferentialAttention": True}))
    _, cache = in_chunks(model, ids_of(8), (8,))
    keys, values, *_ = cache[0].state
    assert (keys.shape[1], keys.shape[3], values.shape[3]) == (4, 16, 8)


def test_differential_attention_works_on_the_stock_quantised_cache(make_file):
    config = {"layers": 2, "dModel": 64, "ctx": 48, "heads": 2, "dMlp": 40}
    model, _, _ = tinygpt.load(make_file({**config, "useDifferentialAttention": True}))
    ids = ids_of(24)
    whole = np.array(model(mx.array(ids[None]))[0])
    cache = make_prompt_cache(model)
    in_chunks(model, ids[:16], (16,), cache)
    cache = [layer.to_quantized(group_size=32, bits=8) for layer in cache]
    rest, _ = in_chunks(model, ids[16:], (3, 5), cache)
    assert np.abs(rest - whole[16:]).max() < 0.02 * np.abs(whole).max()


def test_positions_end_with_the_table(make_file):
    model, tokenizer, _ = tinygpt.load(make_file())
    cache = make_prompt_cache(model)
    ids = ids_of(49)
    with pytest.raises(PositionTableFull, match="position 48 .*ctx = 48"):
        model(mx.array(ids[None]))
    model(mx.array(ids[None, :48]), cache=cache)
    with pytest.raises(PositionTableFull, match="position 48 .*ctx = 48"):
        model(mx.array(ids[None, 48:]), cache=cache)
    batched = [type(layer).merge([layer, layer]) for layer in cache]
    with pytest.raises(PositionTableFull, match="position 48 .*ctx = 48"):
        model(mx.array([[1], [2]]), cache=batched)
    with pytest.raises(ValueError, match="ctx = 48"):
        generate(model, tokenizer, "x" * 40, max_tokens=20)


def test_generation_uses_the_last_position(make_file):
    model, tokenizer, _ = tinygpt.load(make_file())
    cache = make_prompt_cache(model)
    responses = stream_generate(model, tokenizer, "x" * 40, max_tokens=8, prompt_cache=cache)
    tokens = [r.token for r in responses]
    assert len(tokens) == 8
    assert cache[0].offset == 48
