"""Learned positions: streams beyond the table equal a recomputation by the rule; else they end."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from helpers import tinygpt_model
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm import generate, stream_generate
from mlx_lm.models import gpt2, gpt_bigcode
from mlx_lm.models.cache import KVCache
from mlx_lm.models.cache import make_prompt_cache as mlx_make_prompt_cache
from reference import logits

from conformance.architectures.reference import DenseReference
from mlx_kivi import (
    KVCacheConfig,
    load_prompt_cache,
    make_prompt_cache,
    patched,
    save_prompt_cache,
    tinygpt,
)
from mlx_kivi.models.learned_positions import (
    PositionTableFull,
    RestartingCache,
    look_ahead,
    room,
    table_size,
)
from mlx_kivi.models.probe import takes_packed

SIZE = 24
KINDS = ["gpt2", "gpt_bigcode", "tinygpt"]
TOKENIZER = tinygpt.byte_tokenizer()


def make_model(kind, size=SIZE, **switches):
    """A random model of 2 layers, 2 heads of 32 and a table of ``size`` positions."""
    mx.random.seed(0)
    shape = {"n_embd": 64, "n_head": 2, "n_layer": 2, "n_positions": size, "vocab_size": 256}
    shape |= {"model_type": kind, "layer_norm_epsilon": 1e-5}
    if kind == "gpt2":
        model = gpt2.Model(gpt2.ModelArgs(n_ctx=size, **shape))
    elif kind == "gpt_bigcode":
        model = gpt_bigcode.Model(gpt_bigcode.ModelArgs(n_inner=96, **shape))
    else:
        model = tinygpt_model(ctx=size, **switches)
    mx.eval(model.parameters())
    return model


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    return make_model(request.param)


def segments(ids, size, sink, window, held=()):
    """For each token of a stream, what the table holds once it is in: the rule, spelt out."""
    held = list(held)
    last = min(window, size - sink - -(-window // 2))
    for token in ids:
        if len(held) == size:
            held = held[:sink] + held[size - last :]
        held = [*held, token]
        yield held


def recomputed(model, held, sink, window):
    """Logits [V] of the last of some tokens, from nothing."""
    caches = [DenseReference(sink, window) for _ in model.layers]
    return np.array(model(mx.array([held]), cache=caches)[0, -1])


def ids_of(count, seed=1):
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


def fed(model, ids, sizes, caches):
    """Logits [len(ids), V], fed in calls of the given sizes, again and again."""
    return logits(model, mx.array([ids]), caches, sizes)


def close(got, wanted):
    np.testing.assert_allclose(got, wanted, atol=1e-4 * np.abs(wanted).max())


# With a window: the stream goes on


@pytest.mark.parametrize("sink, window", [(4, 20), (2, 9), (0, 1), (3, 16)])
def test_a_stream_of_five_tables_equals_recomputation_by_the_rule(model, sink, window):
    ids = ids_of(5 * SIZE)
    caches = make_prompt_cache(model, KVCacheConfig(sink=sink, window=window))
    got = fed(model, ids, (1,), caches)
    wanted = [recomputed(model, held, sink, window) for held in segments(ids, SIZE, sink, window)]
    close(got, np.array(wanted))
    assert caches[0].seen == len(ids)
    assert all(cache.offset == caches[0].offset <= SIZE for cache in caches)


@given(
    sink=st.integers(0, 6),
    window=st.integers(1, SIZE),
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=4),
)
def test_logits_do_not_depend_on_how_a_stream_is_cut(sink, window, sizes):
    model, ids = make_model("tinygpt"), ids_of(100)
    config = KVCacheConfig(sink=sink, window=min(window, SIZE - sink))
    singly = fed(model, ids, (1,), make_prompt_cache(model, config))
    close(fed(model, ids, sizes, make_prompt_cache(model, config)), singly)


@pytest.mark.parametrize("sink, window", [(4, 20), (4, 7), (0, 1), (1, 2), (0, SIZE)])
def test_tokens_are_fed_again_at_most_once_in_half_a_window(monkeypatch, sink, window):
    model, restarts = make_model("gpt2"), []
    restart = RestartingCache.restart

    def counted(cache, size):
        restarts.append((cache.seen, kept := restart(cache, size)))
        return kept

    monkeypatch.setattr(RestartingCache, "restart", counted)
    caches = make_prompt_cache(model, KVCacheConfig(sink=sink, window=window))
    fed(model, ids_of(20 * SIZE), (1,), caches)
    gaps = np.diff([0, *(seen for seen, _ in restarts)])
    assert len(gaps) > 15
    assert gaps.min() >= window / 2
    assert all(sink <= kept.shape[1] <= sink + window for _, kept in restarts)


def test_half_of_the_largest_window_and_all_of_a_small_one_are_kept():
    ids = mx.array([ids_of(SIZE)])
    for window, kept in ((SIZE - 4, (SIZE - 4) // 2), (8, 8)):
        cache = RestartingCache(KVCacheConfig(sink=4, window=window))
        cache.remember(ids)
        cache.update_and_fetch(*[mx.zeros((1, 1, SIZE, 8))] * 2)
        again = cache.restart(SIZE)[0].tolist()
        assert again == ids[0, :4].tolist() + ids[0, SIZE - kept :].tolist()
        assert (cache.offset, cache.seen) == (0, SIZE - 4 - kept)


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_stream_restarts_as_a_new_cache_would_start(kind):
    model, ids = make_model(kind, size=120), ids_of(300)
    config = KVCacheConfig.from_name("int4", group_size=32, residual_length=32, sink=4, window=90)
    assert takes_packed(model)
    got = fed(model, ids, (1,), make_prompt_cache(model, config))
    wanted, packed, before, fresh = [], 0, [], []
    for token, held in zip(ids, segments(ids, 120, 4, 90), strict=True):
        call = [token]
        if len(held) <= len(before) or not before:
            call, fresh = held, make_prompt_cache(model, config)
        wanted.append(np.array(model(mx.array([call]), cache=fresh)[0, -1]))
        packed, before = max(packed, fresh[0].packed_tokens), held
    close(got, np.array(wanted))
    assert packed > 0


@pytest.mark.parametrize("switches", [{"useYOCO": True, "layers": 4}, {"slidingWindow": 7}])
def test_header_switches_stream_too(switches):
    model, ids = make_model("tinygpt", **switches), ids_of(3 * SIZE)
    sink, window = (0, 7) if "slidingWindow" in switches else (2, 15)
    caches = make_prompt_cache(model, KVCacheConfig(sink=2, window=15))
    got = fed(model, ids, (1,), caches)
    wanted = [recomputed(model, held, sink, window) for held in segments(ids, SIZE, sink, window)]
    close(got, np.array(wanted))


def test_mlx_lm_generates_on_while_patched(model):
    sink, window, prompt = 4, 20, "What is the matter?"
    with patched(sink=sink, window=window):
        text = generate(model, TOKENIZER, prompt, max_tokens=4 * SIZE)
    ids = TOKENIZER.encode(prompt)
    for _ in range(4 * SIZE):
        *_, held = segments(ids, SIZE, sink, window)
        ids.append(int(recomputed(model, held, sink, window).argmax()))
    assert text == TOKENIZER.decode(ids[len(prompt) :])


def test_a_draft_model_checks_out_across_restarts(model):
    draft = make_model("gpt2")
    config = KVCacheConfig(sink=2, window=18)
    prompt = TOKENIZER.encode("What is")
    with patched(config):
        plain = [r.token for r in stream_generate(model, TOKENIZER, prompt, max_tokens=60)]
        drafted = stream_generate(model, TOKENIZER, prompt, max_tokens=60, draft_model=draft)
        drafted = [r.token for r in drafted]
    assert len(drafted) == 60
    # Up to the first restart they are the same; beyond, what a draft's rejection left may differ.
    assert drafted[: SIZE - len(prompt)] == plain[: SIZE - len(prompt)]


# Copies, files, trim


@pytest.mark.parametrize("count", [1, SIZE, 2 * SIZE + 5])
def test_a_saved_or_copied_stream_goes_on_as_if_it_had_not_been(model, tmp_path, count):
    ids = ids_of(4 * SIZE)
    caches = make_prompt_cache(model, KVCacheConfig(sink=3, window=15))
    fed(model, ids[:count], (7,), caches)
    save_prompt_cache(tmp_path / "stream", caches)
    loaded, twin = load_prompt_cache(tmp_path / "stream"), copy.deepcopy(caches)
    assert loaded[0].seen == caches[0].seen == count
    wanted = fed(model, ids[count:], (1,), caches)
    for other in (loaded, twin):
        close(fed(model, ids[count:], (1,), other), wanted)


@pytest.mark.parametrize("count, taken", [(10, 4), (SIZE + 5, 3), (SIZE + 2, 2), (SIZE + 1, 4)])
def test_what_is_trimmed_is_not_fed_again(model, count, taken):
    sink, window, ids, rest = 2, 16, ids_of(count), ids_of(3 * SIZE, seed=2)
    caches = make_prompt_cache(model, KVCacheConfig(sink=sink, window=window))
    fed(model, ids, (1,), caches)
    assert all(cache.trim(taken) == taken for cache in caches)
    assert caches[0].seen == count - taken
    *_, held = segments(ids, SIZE, sink, window)
    after = segments(rest, SIZE, sink, window, held[:-taken])
    wanted = [recomputed(model, held, sink, window) for held in after]
    close(fed(model, rest, (1,), caches), np.array(wanted))


def test_what_a_restart_left_behind_is_not_trimmed():
    model = make_model("gpt2")
    caches = make_prompt_cache(model, KVCacheConfig(sink=2, window=16))
    fed(model, ids_of(SIZE + 4), (1,), caches)
    assert not caches[0].is_trimmable()
    assert not caches[0].can_trim(caches[0].offset - 1)


@pytest.mark.parametrize("broken", ["short", "float", "count"])
def test_a_broken_state_is_refused(broken):
    model = make_model("gpt2")
    caches = make_prompt_cache(model, KVCacheConfig(sink=2, window=16))
    fed(model, ids_of(9), (9,), caches)
    *rest, ids, dropped = caches[0].state
    if broken == "short":
        ids = ids[:, 1:]
    elif broken == "float":
        ids = ids.astype(mx.float32)
    else:
        dropped = -dropped - 1
    with pytest.raises(ValueError, match="ids of the tokens|before the last restart"):
        RestartingCache.from_state([*rest, ids, dropped])


def test_mlx_lm_sees_that_a_stream_cannot_be_batched():
    """It asks for ``merge``. A batch cache of its own would end with the table."""
    model = make_model("gpt2")
    with patched(KVCacheConfig(sink=0, window=16)):
        restarting, *others = mlx_make_prompt_cache(model)
    assert not hasattr(restarting, "merge")
    assert all(hasattr(cache, "merge") for cache in others)


# Without a window: the table's end


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "stock"])
def test_without_a_window_no_position_is_clamped(model, ours):
    with patched(KVCacheConfig.from_name("int8")):
        caches = mlx_make_prompt_cache(model) if ours else [KVCache() for _ in model.layers]
        fed(model, ids_of(SIZE), (5,), caches)
        assert room(model, caches) == 0
        with pytest.raises(PositionTableFull, match=f"position {SIZE} .*ctx = {SIZE}"):
            model(mx.array([[1]]), cache=caches)
        with pytest.raises(PositionTableFull, match=f"position {SIZE} .*ctx = {SIZE}"):
            model(mx.array([ids_of(SIZE + 1)]))
        assert caches[0].offset == SIZE


def test_a_batch_is_refused_at_the_end_of_its_longest_row():
    model = make_model("gpt2")
    with patched(KVCacheConfig()):
        rows = [[KVCache() for _ in model.layers] for _ in range(2)]
        for row, count in zip(rows, (SIZE - 1, 5), strict=True):
            fed(model, ids_of(count), (count,), row)
        batch = [KVCache.merge(list(layer)) for layer in zip(*rows, strict=True)]
        model(mx.array([[1], [2]]), cache=batch)
        with pytest.raises(PositionTableFull, match=f"position {SIZE} "):
            model(mx.array([[1], [2]]), cache=batch)


def test_looking_ahead_delivers_the_token_after_the_last_position(model):
    prompt = ids_of(SIZE - 6)
    with patched(KVCacheConfig()), look_ahead() as ahead:
        responses = list(stream_generate(model, TOKENIZER, prompt, max_tokens=7))
    assert ahead.used
    ids = list(prompt)
    for _ in range(7):
        ids.append(int(recomputed(model, ids, 0, SIZE).argmax()))
    assert [r.token for r in responses] == ids[SIZE - 6 :]
    with patched(KVCacheConfig()), pytest.raises(PositionTableFull):
        list(stream_generate(model, TOKENIZER, prompt, max_tokens=7))


def test_embeddings_cannot_be_fed_again():
    model = make_model("tinygpt")
    caches = make_prompt_cache(model, KVCacheConfig(sink=2, window=16))
    ids = mx.array([ids_of(SIZE)])
    model(ids, cache=caches, input_embeddings=model.token_embedding(ids))
    with pytest.raises(PositionTableFull, match="embeddings can't be fed again"):
        model(mx.array([[1]]), cache=caches)


def test_a_window_beyond_the_table_is_refused(model):
    with pytest.raises(ValueError, match=rf"ctx = {SIZE}\): use window={SIZE - 4} or less"):
        make_prompt_cache(model, KVCacheConfig(sink=4, window=SIZE - 3))
    with pytest.raises(ValueError, match=f"ctx = {SIZE}"):
        make_prompt_cache(model, max_kv_size=SIZE + 1)


def test_the_models_of_mlx_lm_are_put_back():
    before = [m.Model.__call__.__code__ for m in (gpt2, gpt_bigcode)]
    with patched(KVCacheConfig()):
        assert gpt2.Model.__call__.__code__ is not before[0]
    assert [m.Model.__call__.__code__ for m in (gpt2, gpt_bigcode)] == before


def test_other_models_have_no_table(tiny_llama):
    assert table_size(tiny_llama) is None
    assert room(tiny_llama, None) is None
    caches = make_prompt_cache(tiny_llama, KVCacheConfig(window=8))
    assert not any(isinstance(cache, RestartingCache) for cache in caches)
