"""Requests that wait for room, that are served alone, and that go on after a fault."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import mlx.nn as nn
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer, TokenizerWrapper
from serving.servers import Client, errors, server, together
from serving.test_clients import ENDLESS, asked, handlers, running
from serving.test_faults import ALWAYS, BAD, Fault, fail_once, good, refuse, texts, wanted
from serving.test_server import POLICIES, PROMPTS, TEXT, alone

from conformance.common import tiny_llama
from conformance.contract.tokenizers import fast_tokenizer, wrapped
from mlx_kivi import KVCacheConfig
from mlx_kivi.serving.engine import Engine
from mlx_kivi.serving.handler import Handler
from mlx_kivi.serving.jobs import Batch

# The answer has letters, and none twice.
LETTERS: dict[str, Any] = {
    "logit_bias": {str(t): 1e4 for t in wrapped().encode("abcdefghijklmnopqrstuvwxyz")},
    "presence_penalty": 1e3,
}

policies = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


@policies
@pytest.mark.parametrize("more", [{}, {"seed": 1}], ids=["batched", "alone"])
def test_memory(model: nn.Module, policy: KVCacheConfig | None, more: dict[str, Any]) -> None:
    with server(model, policy=policy) as client:
        one = client.engine._footprint.bytes(100 + 20)
    with server(model, "--kv-memory", str(one + one // 2), policy=policy) as client:
        most = [0]

        def look() -> None:
            while len(done) < 4:
                most[0] = max(most[0], len(running(client)))
                time.sleep(0.001)

        done: list[str] = []
        asks = [lambda i=i: done.append(client.text(TEXT[i : i + 100], 20)) for i in range(4)]
        together(look, *asks)
        assert sorted(done) == sorted(alone(model, policy, TEXT[i : i + 100], 20) for i in range(4))
        assert most[0] <= 1
        fed = client.figure("prompt_tokens_total")
        if policy is None or policy.window is None:  # with one, no number is too many
            status, answer = client.post(prompt=TEXT, max_tokens=10**30, **more)
            assert status == 400
            message = answer["error"]["message"]
            need = client.engine._footprint.bytes(len(TEXT) + 10**30)
            assert f"({need} bytes)" in message and f"({one + one // 2} bytes)" in message
            assert client.figure("prompt_tokens_total") == fed
        assert client.text("hello") == alone(model, policy, "hello", 8)


@policies
def test_clients_that_leave_at_any_time(
    model: nn.Module, policy: KVCacheConfig | None, caplog: pytest.LogCaptureFixture
) -> None:
    pick = random.Random(0)
    right = wanted(model, policy)
    with server(
        model, "--prefill-step-size", "32", "--decode-concurrency", "7", policy=policy
    ) as client:

        def leave(wait: float, body: dict[str, Any]) -> None:
            with asked(client, **body):
                time.sleep(wait)

        leaving = [
            lambda w=pick.uniform(0, 0.6), b=body: leave(w, b)
            for i in range(20)
            for body in [
                {
                    "prompt": TEXT[i:] * pick.randint(1, 3),
                    "stream": pick.random() < 0.5,
                    **ENDLESS,
                    **({"seed": 1} if i % 7 == 6 else {}),
                }
            ]
        ]
        found = together(*leaving, *good(client))
        assert texts(found[20:]) == right
        client.until(lambda: not (running(client) or client.engine._waiting or handlers()))
        client.until(lambda: client.engine.requests.empty())
        assert errors(caplog) == []
        assert texts(together(*good(client))) == right
        assert client.figure("requests_finished_total") <= 28


@policies
def test_stop_words_across_a_fault(
    model: nn.Module, policy: KVCacheConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = alone(model, policy, PROMPTS[1], 16)
    ask = {"prompt": PROMPTS[0], "max_tokens": 16, **LETTERS}
    with server(model, policy=policy) as client:
        word = client.text(PROMPTS[0], 16, **LETTERS)[4:8]
        wanted = client.post(**ask, stop=word)[1]["choices"]
        assert wanted[0]["finish_reason"] == "stop" and len(wanted[0]["text"]) == 4
        for before in range(2, 8):  # tokens of the answer
            with monkeypatch.context() as patch:
                parted = part_after(before, client, patch)
                found, other = together(
                    lambda: client.post(**ask, stop=word)[1]["choices"],
                    lambda: client.text(PROMPTS[1], 16),
                )
            assert parted
            assert (found, other) == (wanted, right), before


def part_after(count: int, client: Client, patch: pytest.MonkeyPatch) -> list[Fault]:
    """Let a step of two fail when the one with a stop word has so many tokens; when it has."""
    call, parted = Batch.next, []

    def failing(batch: Batch, beside: int | None) -> Any:
        stops = [job for job in batch.jobs.values() if job.args.stop_words]
        if not parted and len(batch.jobs) == 2 and len(stops[0].answered) >= count:
            call(batch, beside)  # what it has done is lost
            parted.append(Fault())
            raise parted[0]
        return call(batch, beside)

    start = Engine._start_next

    def start_both(engine: Engine) -> bool:
        return (len(engine._waiting) == 2 or bool(running(client))) and start(engine)

    patch.setattr(Batch, "next", failing)
    patch.setattr(Engine, "_start_next", start_both)
    return parted


def test_what_is_served_alone_fails_alone(
    model: nn.Module, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = wanted(model, None)
    with server(model) as client:
        refuse("model", monkeypatch)
        seeded = {"prompt": TEXT[:40], "max_tokens": 9, "seed": 3, "temperature": 1.0}
        once = client.text(TEXT[:40], 9, seed=3, temperature=1.0)
        bad = {**seeded, "logit_bias": ALWAYS}
        found = together(
            *good(client),
            lambda: client.post(**seeded),
            lambda: client.post(**bad),
            lambda: client.post(**bad, stream=True),
            lambda: client.post(**seeded),
        )
        assert texts(found[:4]) == right
        assert texts([found[4], found[5], found[7]]) == [once, None, once]
        status, events = found[6]
        assert status == 200
        last = json.loads(events.strip().splitlines()[-1].removeprefix("data: "))
        assert last["error"]["code"] == 500 and "Fault" in last["error"]["message"]
        assert len(errors(caplog)) == 2
        assert texts(together(*good(client))) == right


def test_a_draft_model_that_fails(
    model: nn.Module, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = tiny_llama(seed=1, vocab_size=257)
    policy = POLICIES["int4"]
    right = wanted(model, policy)
    with server(model, draft=draft, policy=policy) as client:
        refuse("model", monkeypatch)
        bad, *others = together(
            lambda: client.post(prompt="a" + BAD + "b" * 30, max_tokens=4), *good(client)
        )
        assert bad[0] == 500 and len(errors(caplog)) == 1
        assert texts(others) == right
        assert client.post(prompt="hi", num_draft_tokens=64)[0] == 400
        assert client.post(prompt="hi", num_draft_tokens=0, max_tokens=2)[0] == 200
        assert texts(together(*good(client))) == right


@pytest.mark.parametrize("stream", [False, True])
def test_a_detokenizer_that_fails(
    model: nn.Module,
    stream: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (bad,) = wrapped().encode(BAD)

    class Failing(NaiveStreamingDetokenizer):
        def add_token(self, token: int, *args: Any, **kwargs: Any) -> None:
            if token == bad:
                raise Fault("no text")
            super().add_token(token, *args, **kwargs)

    tokenizer = TokenizerWrapper(fast_tokenizer(), Failing)
    right = wanted(model, None)
    with server(model, tokenizer=tokenizer) as client:
        found, *others = together(
            lambda: client.post(prompt="hello", logit_bias=ALWAYS, stream=stream), *good(client)
        )
        assert texts(others) == right
        assert found[0] == (200 if stream else 500)
        assert "Fault: no text" in (found[1] if stream else found[1]["error"]["message"])
        assert errors(caplog) == [line for line in errors(caplog) if "Fault: no text" in line]
        assert len(errors(caplog)) == 1
        client.until(lambda: not running(client))


def test_health_tells_that_the_thread_is_gone(model: nn.Module) -> None:
    with server(model) as client:
        assert client.get("/health")[0] == 200
        with asked(client, prompt="hi", **ENDLESS) as connection:
            client.until(lambda: bool(running(client)))
            client.engine.stop_and_join()
            assert b" 503 " in connection.recv(1000).splitlines()[0]
        assert client.get("/health")[0] == 503
        assert client.post(prompt="hi")[0] == 503


@policies
def test_who_stays_is_not_to_blame_as_another_fails_to_leave(
    model: nn.Module, policy: KVCacheConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = alone(model, policy, TEXT[:60], 40)
    with server(model, policy=policy) as client:
        with asked(client, prompt="gone", **ENDLESS):
            client.until(lambda: any(job.answered for job in running(client)))
            raised = fail_once(monkeypatch, BatchGenerator, "remove", 0)
            leaving = Engine._let_go

            def later(engine: Engine) -> None:
                if any(job.context.prompt[:3] == right_prompt for job in running(client)):
                    leaving(engine)

            right_prompt = wrapped().encode(TEXT[:3])
            monkeypatch.setattr(Engine, "_let_go", later)
        assert client.text(TEXT[:60], 40) == right
        assert raised
        monkeypatch.setattr(Engine, "_let_go", leaving)
        client.until(lambda: not (running(client) or handlers()))


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_whose_text_cannot_be_made(
    model: nn.Module,
    stream: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with server(model) as client:
        with monkeypatch.context() as patch:
            raised = fail_once(patch, Handler, "generate_response", 0)
            status, answer = client.post(
                prompt="hello", stream=stream, **ENDLESS | {"max_tokens": 9}
            )
        assert raised and status == (200 if stream else 500)
        assert "Fault: generate_response" in (answer if stream else answer["error"]["message"])
        assert errors(caplog) == ["An answer ends with 500: Fault: generate_response"]
        client.until(lambda: not running(client))
        assert client.text("hello") == alone(model, None, "hello", 8)
