"""The server with one module of each kind: requests at once are answered as each alone."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import server as mlx_server
from mlx_lm.tokenizer_utils import TokenizerWrapper
from serving.servers import Client, errors, server, together
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from mlx_kivi import make_prompt_cache
from mlx_kivi.models.architectures import own_caches

from . import matrix, models

pytestmark = pytest.mark.skipif(
    not hasattr(mlx_server, "_image_parts"), reason="the server needs mlx-lm 0.32.1 or newer"
)

VOCABULARY = 128  # of the largest model
# Trained windows, attention beside recurrent states, two whose states would take padding in,
# latents, chunks, and those that are served one by one: under which of their caches.
SERVED = {
    "llama": ("full precision", "int4", "int4 + sinks + window"),
    "qwen3": (None, "int4"),
    "jamba": (None,),
    "falcon_h1": ("int4",),
    "mamba": (None,),
    "deepseek_v3": ("int4 + sinks + window",),
    "llama4": (None, "int4"),
    "phi3small": (None, "int4"),
    "gpt_bigcode": (None, "int4"),
    "afm7": (None,),
    "minimax_m3_vl": ("int4",),
}
PROMPTS, MORE, ANSWER = (137, 78), 20, 6
# Of log probabilities: rounding, and not a fault that goes by tokens.
TOLERANCE = 1e-4

Answer = tuple[list[int], list[float]]


def tokenizer() -> TokenizerWrapper:
    """A character for each token, and an end that no model knows."""
    known = {chr(0x4E00 + i): i for i in range(VOCABULARY)} | {"<eos>": VOCABULARY}
    made = Tokenizer(WordLevel(known, unk_token="<eos>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>"))


def ids(count: int, seed: int) -> list[int]:
    return mx.random.randint(0, matrix.VOCABULARY, (count,), key=mx.random.key(seed)).tolist()


def ask(client: Client, prompt: list[int]) -> Answer:
    """Tokens of the answer, and their log probabilities."""
    text = "".join(chr(0x4E00 + i) for i in prompt)
    status, answer = client.post(prompt=text, max_tokens=ANSWER, logprobs=True)
    assert status == 200, answer
    content = answer["choices"][0]["logprobs"]["content"]
    return [one["id"] for one in content], [one["logprob"] for one in content]


def fed(model: Any, caches: list[Any], tokens: list[int]) -> mx.array:
    """Log probabilities after tokens, fed as the server does."""
    for call in (tokens[:-1], tokens[-1:]):
        logits = model(mx.array([call]), cache=caches)[0, -1].astype(mx.float32)
        mx.eval(logits, [cache.state for cache in caches])
    return logits - mx.logsumexp(logits)


def check(model: Any, caches: list[Any], prompt: list[int], answer: Answer) -> None:
    """An answer is what caches alone give, which have it afterwards; near-ties are either's."""
    found = fed(model, caches, prompt)
    for token, said in zip(*answer, strict=True):
        assert abs(found[token].item() - said) < TOLERANCE
        assert (found.max() - found[token]).item() < TOLERANCE
        logits = model(mx.array([[token]]), cache=caches)[0, -1].astype(mx.float32)
        found = logits - mx.logsumexp(logits)
    mx.eval(found)


@pytest.mark.filterwarnings("ignore::mlx_kivi.patch.UnconvertedCacheWarning")
@pytest.mark.parametrize(
    "name, policy", [(name, policy) for name, policies in SERVED.items() for policy in policies]
)
def test_requests_at_once_are_answered_as_alone(
    name: str, policy: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    model = models.build(name)
    # Arrays that are computed later are of the thread that made them.
    fed(model, own_caches(model), ids(PROMPTS[0], 9))
    prompts = [ids(count, seed) for seed, count in enumerate(PROMPTS)]
    config = None if policy is None else matrix.POLICIES[policy]
    with server(model, policy=config, tokenizer=tokenizer()) as client:
        first = together(*(lambda p=p: ask(client, p) for p in prompts))
        assert all(first), errors(caplog)
        longer = [
            [*prompt, *answer[0], *ids(MORE, 2)]
            for prompt, answer in zip(prompts, first, strict=True)
        ]
        second = together(*(lambda p=p: ask(client, p) for p in longer))
        client.until(lambda: client.figure("prompt_cache_hits_total") == len(prompts))
        for i, prompt in enumerate(prompts):
            caches = own_caches(model) if config is None else make_prompt_cache(model, config)
            check(model, caches, prompt, first[i])
            check(model, caches, ids(MORE, 2), second[i])
    assert errors(caplog) == []
