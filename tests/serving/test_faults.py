"""What fails in the server fails for one request: the others are answered as alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.nn as nn
import pytest
from mlx_lm import server as mlx_server
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import BatchKVCache, KVCache
from mlx_lm.models.llama import Model
from serving.servers import Client, errors, server, together
from serving.test_server import POLICIES, TEXT, alone

from conformance.contract.tokenizers import wrapped
from mlx_kivi import KVCacheConfig
from mlx_kivi.batch_cache import BatchCache
from mlx_kivi.serving.answers import Answers
from mlx_kivi.upstream.prompt_cache import PromptCache

BAD = "~"  # a character that no good prompt has, and no answer to one
(TOKEN,) = wrapped().encode(BAD)
ALWAYS = {str(TOKEN): 1e4}  # a bias: the answer is this character, again and again
PROMPTS = [TEXT[i : i + 20 + 90 * i] for i in range(4)]
WORDS = (5, 9, 13, 17)  # tokens of the answers

policies = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


class Fault(Exception):
    pass


def good(client: Client) -> list[Callable[[], Any]]:
    """Questions to ask at once."""
    return [
        lambda p=p, n=n: client.post(prompt=p, max_tokens=n)
        for p, n in zip(PROMPTS, WORDS, strict=True)
    ]


def wanted(model: nn.Module, policy: KVCacheConfig | None) -> list[str]:
    texts = [alone(model, policy, p, n) for p, n in zip(PROMPTS, WORDS, strict=True)]
    assert not any(BAD in text for text in texts)
    return texts


def texts(answers: list[tuple[int, Any]]) -> list[str | None]:
    """What was answered; None: 500."""
    assert {status for status, _ in answers} <= {200, 500}
    return [a["choices"][0]["text"] if status == 200 else None for status, a in answers]


def refuse(name: str, patch: pytest.MonkeyPatch) -> None:
    """Let one place fail for requests that have, or generate, `BAD`."""

    def model(call: Any) -> Any:
        def failing(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if TOKEN in inputs.reshape(-1).tolist():
                raise Fault(name)
            return call(self, inputs, *args, **kwargs)

        return failing

    def cache(call: Any) -> Any:
        def failing(self: Any, key: Any, tokens: list[int], *args: Any, **kwargs: Any) -> Any:
            if TOKEN in tokens:
                raise Fault(name)
            return call(self, key, tokens, *args, **kwargs)

        return failing

    rehearsed: list[str] = []

    def made(call: Any) -> Any:
        def making(args: Any, *rest: Any) -> Any:
            one = call(args, *rest)
            if not args.sampling.temperature:
                return one

            def failing(*given: Any) -> Any:
                rehearsed.append(name)
                if len(rehearsed) > 1:
                    raise Fault(name)
                return given[-1] if isinstance(one, list) else one(*given)

            return [failing] if isinstance(one, list) else failing

        return making

    owner, attribute, replaced = {
        "model": (Model, "__call__", model),
        "insert": (PromptCache, "insert_cache", cache),
        "fetch": (PromptCache, "fetch_nearest_cache", cache),
        "sampler": (mlx_server, "_make_sampler", made),
        "processor": (mlx_server, "_make_logits_processors", made),
    }[name]
    patch.setattr(owner, attribute, replaced(getattr(owner, attribute)))


BODIES = {
    "in its prompt": {"prompt": TEXT[:150] + BAD + TEXT[:60], "max_tokens": 4},
    "in its answer": {
        "prompt": TEXT[:30],
        "max_tokens": 6,
        "logit_bias": ALWAYS,
        "temperature": 0.1,
    },
}


@policies
@pytest.mark.parametrize(
    "name,where",
    [
        *((name, where) for name in ("model", "insert") for where in BODIES),
        ("fetch", "in its prompt"),
        ("sampler", "in its answer"),
        ("processor", "in its answer"),
    ],
)
def test_a_request_that_fails_fails_alone(
    model: nn.Module,
    policy: KVCacheConfig | None,
    name: str,
    where: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts_alone = wanted(model, policy)
    with server(model, "--prefill-step-size", "32", policy=policy) as client:
        refuse(name, monkeypatch)
        (status, answer), *others = together(lambda: client.post(**BODIES[where]), *good(client))
        assert texts(others) == texts_alone
        assert (status, answer["error"]["code"]) == (500, 500)
        assert f"Fault: {name}" in answer["error"]["message"]
        said = [text for text in errors(caplog) if "ends with" in text]
        assert len(said) == 1 and "ends with 500: Fault" in said[0]
        assert client.get("/health")[0] == 200
        assert client.text(PROMPTS[0], WORDS[0]) == texts_alone[0]
        assert client.figure("requests_finished_total") == 6


# Called by the server for batches of any caches; how many of its calls succeed first.
POINTS: list[tuple[Any, str]] = [
    *((BatchCache, name) for name in ("extract", "filter", "extend", "prepare", "finalize")),
    *((BatchKVCache, name) for name in ("extract", "filter", "extend", "prepare", "finalize")),
    (BatchCache, "merge"),
    (KVCache, "merge"),
    (BatchCache, "update_and_fetch"),
    (BatchKVCache, "update_and_fetch"),
    (BatchGenerator, "remove"),
    (BatchGenerator, "insert_segments"),
    (BatchGenerator, "extract_cache"),
    (PromptCache, "insert_cache"),
    (Answers, "put"),
]


@policies
def test_what_fails_once_ends_one_request_at_most(
    model: nn.Module, policy: KVCacheConfig | None, caplog: pytest.LogCaptureFixture
) -> None:
    texts_alone = wanted(model, policy)
    failed = 0
    with server(model, "--prefill-step-size", "32", policy=policy) as client:
        others = (BatchCache,) if policy is None else (BatchKVCache, KVCache)
        for owner, name in POINTS:
            for after in () if owner in others else (0, 5):
                with pytest.MonkeyPatch.context() as patch:
                    raised = fail_once(patch, owner, name, after)
                    found = texts(together(*good(client)))
                told = f"{owner.__name__}.{name} after {after}"
                ended = [i for i, text in enumerate(found) if text is None]
                failed += len(ended)
                assert len(ended) <= len(raised), told
                for i, (text, right) in enumerate(zip(found, texts_alone, strict=True)):
                    assert i in ended or text == right, told
                assert "the server's loop failed" not in caplog.text, told
                caplog.clear()
        assert failed
        assert texts(together(*good(client))) == texts_alone
        client.until(lambda: client.figure("requests_running") == 0)
        assert client.get("/health")[0] == 200


def fail_once(patch: pytest.MonkeyPatch, owner: Any, name: str, after: int) -> list[Fault]:
    """Let a method raise at one call, and not again; what it has raised."""
    calls, raised = [0], []
    kept = vars(owner).get(name) or getattr(owner, name)
    original = getattr(kept, "__func__", kept)

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == after + 1:
            raised.append(Fault(name))
            raise raised[0]
        return original(*args, **kwargs)

    patch.setattr(owner, name, classmethod(failing) if isinstance(kept, classmethod) else failing)
    return raised
