"""Whole models in mlx_lm's own batches under `patch`: each prompt gets what it gets alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from batches import same
from mlx.utils import tree_map
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import (
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from mlx_lm.sample_utils import make_logits_processors

import mlx_kivi
from conformance.architectures import models
from conformance.common import tiny_llama
from mlx_kivi import KVCacheConfig, QuantizedStreamingCache

PACKED = {"group_size": 32, "residual_length": 16}
INT4 = KVCacheConfig(k_bits=4, v_bits=4, **PACKED)
POLICIES = {
    "full": KVCacheConfig(),
    "int8": KVCacheConfig(k_bits=8, v_bits=8, **PACKED),
    "int4": INT4,
    "int2": KVCacheConfig(k_bits=2, v_bits=2, **PACKED),
    "window": KVCacheConfig(sink=4, window=60),
    "no sinks": KVCacheConfig(sink=0, window=40),
    "int4 window": INT4.replace(sink=4, window=90),
    "re-positioned": INT4.replace(sink=4, window=90, reposition=True),
    "some layers": INT4.replace(layers=(1,)),
    "first layer apart": INT4.replace(protect_first=1),
}
LENGTHS = [90, 3, 150, 41, 1]
CLOSE = 1e-4  # the two likeliest logits of a tie

every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return sharp(tiny_llama(3))


def sharp(model: nn.Module) -> nn.Module:
    """With larger weights, so that logits lie far apart."""
    model.update(tree_map(lambda p: 3 * p if p.ndim == 2 else p, model.parameters()))
    mx.eval(model.parameters())
    return model


def prompts(lengths: Sequence[int], seed: int = 0, vocabulary: int = 97) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocabulary) for _ in range(n)] for n in lengths]


def alone(
    model: nn.Module, tokens: list[int], count: int, caches: Any = None, **kwargs: Any
) -> list[tuple[int, mx.array]]:
    """Tokens and their log probabilities, with the calls of a batch: all but the last at once."""
    caches = make_prompt_cache(model, kwargs.pop("max_kv_size", None)) if caches is None else caches
    stream = generate_step(mx.array(tokens), model, max_tokens=count, prompt_cache=caches, **kwargs)
    return [(int(token), logprobs) for token, logprobs in stream]


def agree(got: Sequence[int], want: list[tuple[int, mx.array]]) -> None:
    """The same tokens up to the first near tie, if there is one."""
    assert len(got) == len(want)
    for i, (token, (own, logprobs)) in enumerate(zip(got, want, strict=True)):
        if token != own:
            gap = (logprobs[own] - logprobs[token]).item()
            assert abs(gap) < CLOSE, f"token {i} is {token}, alone it is {own}: {gap} apart"
            return


# Prompts together


@every_policy
def test_prompts_of_five_lengths_get_their_own_tokens(
    policy: KVCacheConfig, llama: nn.Module
) -> None:
    asked = prompts(LENGTHS)
    with mlx_kivi.patched(policy):
        batch = BatchGenerator(llama, max_tokens=40, prefill_step_size=64)
        done = finished(batch, batch.insert(asked))
        for (got, _), tokens in zip(done.values(), asked, strict=True):
            agree(got, alone(llama, tokens, 40, prefill_step_size=64))


@pytest.mark.parametrize("policy", [KVCacheConfig(), INT4], ids=["full", "int4"])
def test_max_kv_size_bounds_each_row_and_keeps_its_sinks(
    policy: KVCacheConfig, llama: nn.Module
) -> None:
    asked = prompts(LENGTHS)
    with mlx_kivi.patched(policy):
        batch = BatchGenerator(llama, max_tokens=40, max_kv_size=104)
        done = finished(batch, batch.insert(asked))
        for tokens, (got, caches) in zip(asked, done.values(), strict=True):
            agree(got, alone(llama, tokens, 40, max_kv_size=104))
            assert all((c.config.sink, c.config.window) == (4, 100) for c in caches)


@pytest.mark.parametrize("name", ["int8", "int4 window", "window"])
@pytest.mark.parametrize("module", ["gemma3_text", "gpt_oss", "qwen3_next", "lfm2"])
def test_models_with_windows_sinks_and_states_of_their_own(module: str, name: str) -> None:
    model = models.build(module)
    asked = prompts([80, 5, 110], vocabulary=128)
    with mlx_kivi.patched(POLICIES[name]):
        batch = BatchGenerator(model, max_tokens=30)
        done = finished(batch, batch.insert(asked))
        for tokens, (got, _) in zip(asked, done.values(), strict=True):
            agree(got, alone(model, tokens, 30))


# BatchGenerator


def finished(
    batch: BatchGenerator, uids: Sequence[int]
) -> dict[int, tuple[list[int], list[Any] | None]]:
    """Tokens and caches of each row, once all are done."""
    done: dict[int, Any] = {uid: ([], None) for uid in uids}
    while responses := batch.next_generated():
        for r in responses:
            done[r.uid][0].append(r.token)
            if r.finish_reason is not None:
                done[r.uid] = done[r.uid][0], r.prompt_cache
    return done


@pytest.fixture(scope="module")
def small() -> nn.Module:
    return sharp(tiny_llama(5, num_hidden_layers=1))


# What each prompt gives alone is worked out once for all schedules.
POOL = prompts([5, 40, 70, 1, 130, 12, 33, 64], seed=4)
MOST = 8


@pytest.fixture(scope="module", params=["int4 window", "window"])
def pool(request: pytest.FixtureRequest, small: nn.Module) -> Iterator[list[Any]]:
    policy = POLICIES[request.param]
    with mlx_kivi.patched(policy):
        yield [alone(small, tokens, MOST) for tokens in POOL]


def test_rows_join_and_leave_by_any_schedule(small: nn.Module, pool: list[Any]) -> None:
    """100 schedules a policy, several rows leaving in one step while others join."""
    for seed in range(100):
        rng = random.Random(seed)
        batch = BatchGenerator(
            small,
            completion_batch_size=rng.choice([3, 8]),
            prefill_batch_size=rng.choice([1, 3, 8]),
            prefill_step_size=rng.choice([2048, 2048, 32]),
        )
        waiting = [(i, rng.choice([1, 2, 3, 5, 8])) for i in rng.sample(range(8), 8)]
        asked: dict[int, tuple[int, int]] = {}
        got: dict[int, list[int]] = {}
        while waiting or len(got) < len(asked) or not all(done(got, asked)):
            if waiting and (rng.random() < 0.5 or all(done(got, asked))):
                some = [waiting.pop() for _ in range(min(len(waiting), rng.randint(1, 4)))]
                uids = batch.insert([POOL[i] for i, _ in some], [count for _, count in some])
                asked.update(zip(uids, some, strict=True))
            for r in batch.next()[1]:
                got.setdefault(r.uid, []).append(r.token)
                assert (r.finish_reason is None) == (len(got[r.uid]) < asked[r.uid][1])
        for uid, (i, count) in asked.items():
            agree(got[uid], pool[i][:count])


def done(got: dict[int, list[int]], asked: dict[int, tuple[int, int]]) -> list[bool]:
    return [len(got.get(uid, [])) == count for uid, (_, count) in asked.items()]


def test_all_rows_finish_on_the_first_token_at_once(small: nn.Module, pool: list[Any]) -> None:
    batch = BatchGenerator(small, max_tokens=1)
    for _ in range(2):
        for want, (got, _) in zip(pool, finished(batch, batch.insert(POOL)).values(), strict=True):
            agree(got, want[:1])


@pytest.mark.parametrize("name", ["int8", "int4 window"])
def test_rows_removed_in_a_prompt_and_in_decoding_go_on_alone(name: str, llama: nn.Module) -> None:
    asked = prompts([300, 40, 7, 200])
    with mlx_kivi.patched(POLICIES[name]):
        batch = BatchGenerator(llama, max_tokens=30, prefill_step_size=64)
        uids = batch.insert(asked)
        got: dict[int, list[int]] = {uid: [] for uid in uids}
        while len(got[uids[2]]) < 4:
            for r in batch.next()[1]:
                got[r.uid].append(r.token)
        assert not got[uids[0]]
        taken = batch.remove([uids[0], uids[2]], return_prompt_caches=True)
        for uid in (uids[0], uids[2]):
            caches, tokens = taken[uid]
            assert {c.seen for c in caches} == {len(tokens)}
            text = asked[uids.index(uid)] + got[uid]
            assert text[: len(tokens)] == tokens
            fresh = make_prompt_cache(llama)
            feed = [64] * (len(asked[uids.index(uid)]) // 64)
            rest = text[len(tokens) :] or [5]
            replay(llama, fresh, tokens, feed, len(got[uid]))
            want, mine = (alone(llama, rest, 20, caches=c) for c in (fresh, caches))
            agree([token for token, _ in mine], want)
        for uid, (more, _) in finished(batch, [uids[1], uids[3]]).items():
            want = alone(llama, asked[uids.index(uid)], 30, prefill_step_size=64)
            agree(got[uid] + more, want)


def replay(
    model: nn.Module, caches: list[Any], tokens: list[int], calls: list[int], steps: int
) -> None:
    """Feed tokens in calls, the rest of the prompt at once, then as many steps."""
    rest = len(tokens) - sum(calls)
    single = min(rest, steps)
    begin = 0
    for length in [*calls, rest - single, *[1] * single]:
        if length:
            model(mx.array([tokens[begin : begin + length]]), cache=caches)
        begin += length


@pytest.mark.skipif(
    hasattr(BatchGenerator, "_make_new_cache"),
    reason="mlx-lm 0.31's own batches give a row's processors another text",
)
@pytest.mark.parametrize("name", ["int4", "window"])
def test_processors_of_one_row_are_its_own(name: str, llama: nn.Module) -> None:
    asked = prompts([60, 9, 30])
    own = [[], make_logits_processors(repetition_penalty=1.5), make_logits_processors({7: 1e3})]
    with mlx_kivi.patched(POLICIES[name]):
        batch = BatchGenerator(llama, max_tokens=25)
        done = finished(batch, batch.insert(asked, logits_processors=own))
        plain = [[t for t, _ in alone(llama, tokens, 25)] for tokens in asked]
        for tokens, processors, (got, _) in zip(asked, own, done.values(), strict=True):
            agree(got, alone(llama, tokens, 25, logits_processors=processors))
    results = [got for got, _ in done.values()]
    assert results[1] != plain[1] and set(results[2]) == {7}


# Caches that come back, and that are handed in


@pytest.mark.parametrize("name", ["int8", "int4", "int4 window"])
def test_returned_caches_are_saved_loaded_trimmed_and_gone_on_from(
    name: str, llama: nn.Module, tmp_path: Path
) -> None:
    asked = prompts([60, 9, 130])
    with mlx_kivi.patched(POLICIES[name]):
        batch = BatchGenerator(llama, max_tokens=30)
        done = finished(batch, batch.insert(asked))
        for i, ((got, caches), tokens) in enumerate(zip(done.values(), asked, strict=True)):
            assert {type(c) for c in caches} == {QuantizedStreamingCache}
            assert {c.offset for c in caches} == {len(tokens) + len(got)}
            path = str(tmp_path / f"{i}.safetensors")
            save_prompt_cache(path, caches)
            loaded = load_prompt_cache(path)
            assert all(same(a.state, b.state) for a, b in zip(loaded, caches, strict=True))
            # Trimmed, it gives the last tokens again.
            assert trim_prompt_cache(loaded, 11) == 11
            rest = alone(llama, got[-11:-10], 10, caches=loaded)
            agree(got[-10:], rest)
            again = [token for token, _ in alone(llama, [5], 20, caches=caches)]
            fresh = make_prompt_cache(llama)
            replay(llama, fresh, tokens + got, [len(tokens) - 1], len(got) + 1)
            agree(again, alone(llama, [5], 20, caches=fresh))


@pytest.mark.parametrize("name", ["int4", "int4 window", "window"])
def test_caches_that_are_handed_in_stay_as_they_are(name: str, llama: nn.Module) -> None:
    before, asked = prompts([120, 1, 50], seed=1), prompts([9, 30, 2], seed=2)
    with mlx_kivi.patched(POLICIES[name]):
        given = [make_prompt_cache(llama) for _ in range(4)]
        for tokens, caches in zip(before, given, strict=False):
            llama(mx.array([tokens]), cache=caches)
        asked.append(prompts([20], seed=3)[0])  # with empty caches
        states = [[c.state for c in caches] for caches in given]
        batch = BatchGenerator(llama, max_tokens=40)
        done = finished(batch, batch.insert(asked, caches=given))
        got = [tokens for tokens, _ in done.values()]
        assert all(
            same(cache.state, state)
            for caches, kept in zip(given, states, strict=True)
            for cache, state in zip(caches, kept, strict=True)
        )
        for tokens, caches, mine in zip(asked, given, got, strict=True):
            agree(mine, alone(llama, tokens, 40, caches=caches))
