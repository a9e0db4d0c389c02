"""Generation with mlx-lm's own functions under `patch`: drafts, and prompts used again."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import (
    BatchGenerator,
    batch_generate,
    generate,
    generate_step,
    speculative_generate_step,
    stream_generate,
)
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

import mlx_kivi
from mlx_kivi import KVCacheConfig, QuantizedStreamingCache
from mlx_kivi.cache import latent
from mlx_kivi.upstream import speculation

from .architectures import models
from .architectures.models import CONFIGS
from .contract.kinds import POLICIES
from .contract.models import perturbed, prompt, run, steps

every_policy = pytest.mark.parametrize("name", POLICIES)
unbounded = pytest.mark.parametrize("name", ["full", "int8", "int4"])
bounded = pytest.mark.parametrize("name", ["bounded", "int4-bounded"])


def greedy(model: nn.Module, tokens: mx.array, count: int, **kwargs: Any) -> list[int]:
    return [token for token, _ in generate_step(tokens, model, max_tokens=count, **kwargs)]


def speculative(
    model: nn.Module, draft: nn.Module, tokens: mx.array, count: int, **kwargs: Any
) -> tuple[list[int], int]:
    """The tokens, and how many of them came from the draft."""
    out = list(speculative_generate_step(tokens, model, draft, max_tokens=count, **kwargs))
    return [token for token, _, _ in out], sum(drafted for *_, drafted in out)


# Drafts


@pytest.mark.parametrize(
    ("name", "drafts"),
    [
        *((name, 3) for name in POLICIES),
        *((n, d) for n in ("int4", "int4-bounded") for d in (1, 9, 31)),
        ("full", 64),
    ],
)
def test_a_draft_model_changes_no_token(
    name: str, drafts: int, llama: nn.Module, draft: nn.Module
) -> None:
    """From before the window to far past it, over groups that are packed midway."""
    with mlx_kivi.patched(POLICIES[name]):
        want = greedy(llama, prompt(30), 130)
        got, accepted = speculative(llama, draft, prompt(30), 130, num_draft_tokens=drafts)
    assert got == want
    assert 20 < accepted < 110  # some drafts are right, some wrong
    assert len(set(want)) > 40


@every_policy
def test_more_drafts_than_a_cache_can_serve_are_refused(
    name: str, llama: nn.Module, draft: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any work, whether mlx-lm makes the caches or gets them; full precision serves all."""
    with mlx_kivi.patched(POLICIES[name]):
        made = make_prompt_cache(llama) + make_prompt_cache(draft)
    mlx_kivi.make_prompt_cache(llama)  # hooks mlx_lm's functions, its factory not
    default = speculative_generate_step.__kwdefaults__
    for patched, kwargs in ((True, {}), (False, {"prompt_cache": made})):
        for drafts in ({"num_draft_tokens": 32}, {}):
            monkeypatch.setitem(default, "num_draft_tokens", 2 if drafts else 40)
            with mlx_kivi.patched(POLICIES[name]) if patched else contextlib.nullcontext():
                if name == "full":
                    assert len(speculative(llama, draft, prompt(3), 4, **kwargs, **drafts)[0]) == 4
                    continue
                count = drafts.get("num_draft_tokens", 40)
                with pytest.raises(ValueError, match=f"^num_draft_tokens={count}: use 31 or"):
                    speculative_generate_step(prompt(3), llama, draft, **kwargs, **drafts)
                assert all(cache.offset == 0 for cache in made)


@pytest.mark.parametrize("name", ["int4", "bounded"])
def test_what_is_refused_would_go_wrong(
    name: str, llama: nn.Module, draft: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed, tokens change; bounded, the draft's cache keeps what was not accepted."""
    monkeypatch.setattr(speculation, "TRIM_MARGIN", 1000)
    policy = POLICIES[name]
    if (
        name == "int4"
    ):  # as coarse as there is: on few bits balanced, so small a model keeps its text
        policy = policy.replace(k_bits=2, v_bits=2, balanced=False)
    with mlx_kivi.patched(policy):
        want = greedy(llama, prompt(30), 130)
        served, accepted = speculative(llama, draft, prompt(30), 130, num_draft_tokens=31)
        got, fewer = speculative(llama, draft, prompt(30), 130, num_draft_tokens=40)
    assert served == want
    assert got != want if name == "int4" else fewer < accepted / 2


@pytest.mark.parametrize("bits", [2, 4])
def test_each_token_of_a_draft_sees_what_a_single_step_would(bits: int, llama: nn.Module) -> None:
    """A group that is packed between two tokens of a call is packed for the second alone."""
    policy = KVCacheConfig(k_bits=bits, v_bits=bits, group_size=32, residual_length=16)
    windowed = policy.replace(window=90)
    for config in (policy, windowed):
        # Groups are packed after 52, 84, … tokens.
        for seen in (44, 51, 81, 113, 140, 173):
            single, together = (mlx_kivi.make_prompt_cache(llama, config) for _ in range(2))
            for caches in (single, together):
                run(llama, caches, [prompt(seen)])
            tokens = prompt(20)
            one_by_one = mx.concatenate(run(llama, single, tokens.split(20)))
            at_once = mx.concatenate(run(llama, together, [tokens]))
            assert mx.allclose(at_once, one_by_one, rtol=1e-4, atol=1e-3)
            assert together[0].packed_tokens == single[0].packed_tokens


def test_a_mask_of_the_models_own_is_split_with_the_call(llama: nn.Module) -> None:
    attention = importlib.import_module("mlx_lm.models.base").scaled_dot_product_attention
    config = POLICIES["int4-bounded"]
    mx.random.seed(0)
    keys, values = mx.random.normal((2, 1, 2, 200, 32))
    queries = mx.random.normal((1, 4, 200, 32))
    hidden = mx.arange(200) % 3 != 0  # the model hides every third position besides
    mlx_kivi.make_prompt_cache(llama)  # hooks mlx_lm's attention
    for seen in (70, 110, 175):
        outputs = []
        for lengths in ([20], [1] * 20):
            cache = QuantizedStreamingCache(config, packed_attention=True)
            cache.update_and_fetch(keys[:, :, :seen], values[:, :, :seen])
            parts, start = [], seen
            for n in lengths:
                mask = cache.make_mask(n, return_array=True)
                at = slice(start, start + n)
                k, v = cache.update_and_fetch(keys[:, :, at], values[:, :, at])
                low = max(4, start - 89)  # positions shown: sinks, and the first query's window
                shown = mx.concatenate([hidden[:4], hidden[low : start + n]])
                assert k.shape[2] == v.shape[2] == shown.size
                mask = shown[None] if mask is None else mask & shown
                parts.append(attention(queries[:, :, at], k, v, cache, 0.2, mask))
                start += n
            outputs.append(mx.concatenate(parts, axis=2))
        assert mx.allclose(*outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("module", ["deepseek_v3", "deepseek_v32", "plamo", "stablelm"])
@pytest.mark.parametrize("name", ["int4", "int4-bounded"])
def test_a_draft_model_changes_no_token_of_models_that_get_arrays(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that packs a group midway is made in two; a single step reads latents packed."""
    monkeypatch.setattr(latent, "MAX_PACKED_ROWS", 128)
    # An indexer that picks all tokens: deepseek_v32 reads packed too.
    config = {**CONFIGS[module], "index_topk": 1024}
    model, other = (models.build_from(module, config) for _ in range(2))
    tokens = prompt(90, 32)
    draft = perturbed(model, other, 0.02)
    for made_before in (False, True):
        with mlx_kivi.patched(POLICIES[name]):
            want = greedy(model, tokens, 150)
            kwargs = {"num_draft_tokens": 5}
            if made_before:
                kwargs["prompt_cache"] = make_prompt_cache(model) + make_prompt_cache(draft)
            got, accepted = speculative(model, draft, tokens, 150, **kwargs)
        assert got == want
        assert 5 < accepted < 125  # of 25 calls of five


@pytest.mark.parametrize("module", ["exaone4", "ministral3", "gpt_oss"])
def test_a_draft_model_changes_no_token_of_sliding_window_models(module: str) -> None:
    """mlx-lm's own rotating caches are wrong here, once past the window."""
    config = CONFIGS[module]
    package = importlib.import_module(f"mlx_lm.models.{module}")

    def make() -> nn.Module:
        mx.random.seed(0)
        made = package.Model(package.ModelArgs.from_dict(config))
        mx.eval(made.parameters())
        return made

    model = make()
    tokens = prompt(110, 32)
    draft = perturbed(model, make(), 0.02)
    for name in ("full", "int4", "int4-bounded"):
        with mlx_kivi.patched(POLICIES[name]):
            want = greedy(model, tokens, 50)
            got, accepted = speculative(model, draft, tokens, 50, num_draft_tokens=3)
        assert got == want
        assert 5 < accepted < 45


def test_stream_generate_with_a_draft_model_gives_the_same_text(
    llama: nn.Module, draft: nn.Module, tokenizer: TokenizerWrapper
) -> None:
    with mlx_kivi.patched(POLICIES["int4-bounded"]):
        texts = [
            "".join(r.text for r in stream_generate(llama, tokenizer, prompt(90), 60, **drafted))
            for drafted in ({}, {"draft_model": draft, "num_draft_tokens": 3})
        ]
    assert texts[0] == texts[1] != ""


def test_a_draft_model_needs_caches_that_nothing_was_evicted_from(
    llama: nn.Module, draft: nn.Module
) -> None:
    """mlx-lm asks once, before it begins; past the window is_trimmable() says no."""
    with mlx_kivi.patched(POLICIES["bounded"]):
        caches = [*make_prompt_cache(llama), *make_prompt_cache(draft)]
        run(llama, caches[:2], [prompt(100)])
        with pytest.raises(ValueError, match="trimmable"):
            speculative(llama, draft, prompt(3), 5, prompt_cache=caches)


# Batches


@every_policy
def test_a_batch_gives_the_tokens_of_each_prompt_alone(
    name: str, llama: nn.Module, tokenizer: TokenizerWrapper
) -> None:
    prompts = [prompt(n).tolist() for n in (90, 12, 61)]
    with mlx_kivi.patched(POLICIES[name]):
        together = batch_generate(llama, tokenizer, prompts, max_tokens=40).texts
        alone = [generate(llama, tokenizer, p, max_tokens=40) for p in prompts]
    assert together == alone
    assert len(set(alone)) == 3


@pytest.mark.parametrize("module", ["gpt2", "phi3small", "llama4"])
def test_what_does_not_go_into_a_batch_is_refused_before_any_work(module: str) -> None:
    """Positions that restart, a mask that takes no batch, and chunks of positions."""
    model = models.build(module)
    with mlx_kivi.patched(POLICIES["int4-bounded"]):
        caches = [make_prompt_cache(model) for _ in range(2)]
        batch = BatchGenerator(model, max_tokens=4)
        batch.insert([prompt(n, 32).tolist() for n in (9, 12)], caches=caches)
        with pytest.raises(ValueError, match="support batching") as caught:
            batch.next_generated()
    assert "\n" not in str(caught.value)
    assert all(cache.empty() for made in caches for cache in made)


# Prompts used again, as mlx_lm.server does


def stored(llama: nn.Module, tokens: mx.array, after: int) -> tuple[LRUPromptCache, list[int]]:
    """An `LRUPromptCache` that holds a prompt and ``after`` tokens generated from it."""
    caches = make_prompt_cache(llama)
    text = tokens.tolist() + greedy(llama, tokens, after, prompt_cache=caches)
    lru = LRUPromptCache()
    # The last token is made but not fed.
    seen = text[: caches[0].offset]
    lru.insert_cache("model", seen, caches)
    return lru, seen


@every_policy
def test_an_exact_hit_goes_on_where_it_was_and_stays_as_it_is(name: str, llama: nn.Module) -> None:
    with mlx_kivi.patched(POLICIES[name]):
        lru, seen = stored(llama, prompt(110), 20)
        fresh = make_prompt_cache(llama)
        # As generate_step does it: the prompt but for its last token at once.
        run(llama, fresh, [prompt(109), *mx.array(seen[109:]).split(len(seen) - 109)])
        want = steps(llama, fresh, 9, 20)
        for _ in range(2):
            caches, rest = lru.fetch_nearest_cache("model", seen)
            assert rest == []
            assert sum(c.nbytes for c in caches) == lru.nbytes
            assert mx.allclose(steps(llama, caches, 9, 20), want, rtol=1e-4, atol=1e-3)


@every_policy
def test_a_shorter_prompt_is_gone_on_from(name: str, llama: nn.Module) -> None:
    with mlx_kivi.patched(POLICIES[name]):
        lru, seen = stored(llama, prompt(110), 20)
        more = [*seen, 5, 6, 7]
        caches, rest = lru.fetch_nearest_cache("model", more)
        assert rest == [5, 6, 7]
        assert caches[0].offset == len(seen)
        assert greedy(llama, mx.array(rest), 20, prompt_cache=caches)


@unbounded
def test_a_longer_prompt_is_trimmed_and_gives_the_same_tokens(name: str, llama: nn.Module) -> None:
    with mlx_kivi.patched(POLICIES[name]):
        lru, seen = stored(llama, prompt(110), 20)
        asked = [*seen[:105], 200, 201, 202]
        caches, rest = lru.fetch_nearest_cache("model", asked)
        assert rest == [200, 201, 202]
        assert caches[0].offset == 105
        got = greedy(llama, mx.array(rest), 20, prompt_cache=caches)
        fresh = make_prompt_cache(llama)
        run(llama, fresh, [prompt(105)])
        assert got == greedy(llama, mx.array(rest), 20, prompt_cache=fresh)


@bounded
def test_after_eviction_there_is_no_reuse_rather_than_a_wrong_one(
    name: str, llama: nn.Module
) -> None:
    with mlx_kivi.patched(POLICIES[name]):
        lru, seen = stored(llama, prompt(110), 20)
        asked = [*seen[:60], 200, 201, 202]
        assert lru.fetch_nearest_cache("model", asked) == (None, asked)
        # A shorter one that is stored as well is used in its place.
        caches = make_prompt_cache(llama)
        run(llama, caches, [prompt(40)])
        lru.insert_cache("model", seen[:40], caches)
        found, rest = lru.fetch_nearest_cache("model", asked)
        assert (found[0].offset, rest) == (40, asked[40:])


@bounded
def test_before_eviction_a_longer_prompt_is_reused(name: str, llama: nn.Module) -> None:
    with mlx_kivi.patched(POLICIES[name]):
        lru, seen = stored(llama, prompt(40), 10)
        caches, rest = lru.fetch_nearest_cache("model", [*seen[:30], 200, 201])
        assert rest == [200, 201]
        fresh = make_prompt_cache(llama)
        run(llama, fresh, [prompt(30)])
        got, want = (greedy(llama, mx.array(rest), 60, prompt_cache=c) for c in (caches, fresh))
        assert got == want
