"""Clients that go away, and requests that can't be served: nothing of them stays."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.nn as nn
import pytest
from serving.servers import Client, errors, server, together
from serving.test_server import TEXT, alone

LONG = 100_000  # tokens: nobody waits for so many
ENDLESS = {"max_tokens": LONG, "logit_bias": {"256": -1000}}  # no end of text


@contextmanager
def asked(client: Client, **body: Any) -> Iterator[socket.socket]:
    """A request that was sent; its connection is closed on leaving."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", client.port)) as connection:
        connection.sendall(head + data)
        yield connection


def handlers() -> int:
    """Threads that are busy with a client."""
    return sum("process_request" in thread.name for thread in threading.enumerate())


def running(client: Client) -> list[Any]:
    return client.engine._jobs()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("flags", [(), ("--prefill-step-size", "32")], ids=["decodes", "is fed"])
def test_a_client_that_goes_away_leaves_nothing(
    model: nn.Module, stream: bool, flags: tuple[str, ...]
) -> None:
    prompt = TEXT * 40 if flags else TEXT[:50]
    with server(model, *flags) as client:
        with asked(client, prompt=prompt, stream=stream, **ENDLESS):
            client.until(lambda: any(job.answered or flags for job in running(client)))
        client.until(lambda: not running(client) and not handlers())
        assert client.figure("requests_finished_total") == 1
        assert client.text("hello") == alone(model, None, "hello", 8)


@pytest.mark.parametrize("more", [{}, {"seed": 1}], ids=["batched", "alone"])
def test_a_client_that_goes_away_while_it_waits_is_not_served(
    model: nn.Module, more: dict[str, Any]
) -> None:
    with server(model, "--decode-concurrency", "1") as client:
        with asked(client, prompt="first", **ENDLESS):
            client.until(lambda: bool(running(client)))
            with asked(client, prompt="second", **ENDLESS, **more):
                client.until(lambda: bool(client.engine._waiting))
            client.until(lambda: not client.engine._waiting and handlers() == 1)
            assert len(running(client)) == 1
        client.until(lambda: not handlers())
        assert client.figure("generated_tokens_total") > 0


def test_a_client_that_goes_away_while_it_is_served_alone(model: nn.Module) -> None:
    with server(model) as client:
        with asked(client, prompt="first", seed=1, **ENDLESS):
            client.until(lambda: client.figure("requests_running") == 1)
        client.until(lambda: not handlers())
        assert client.text("hello") == alone(model, None, "hello", 8)


SAMPLED = {"temperature": 1.0, "max_tokens": 3}


@pytest.mark.parametrize(
    "body",
    [
        {"top_k": 257, **SAMPLED},
        {"top_k": 10**30, **SAMPLED},
        {"temperature": 10**400},
        {"xtc_probability": 0.5, "xtc_threshold": 0.9, **SAMPLED},
        {"repetition_penalty": 1.5, "repetition_context_size": 10**30},
        {"logit_bias": {"257": 1.0}},
        {"logit_bias": {"1000000000": 1.0}},
        {"logit_bias": {"-1": 1.0}},
        {"logit_bias": {str(10**30): 1.0}},
        {"logit_bias": {"1": []}},
        {"seed": -1},
        {"seed": 1 << 64},
        {"prompt": ""},
        {"prompt": None},
        {"prompt": 5},
        {"prompt": ["one", "two"]},
        {"prompt": "\ud800"},
        {"stop": 5},
        {"stop": [5]},
        {"stop": [["a"]]},
        {"draft_model": []},
        {"stream_options": 5},
        {"max_tokens": None},
        {"max_tokens": 0},
        {"model": "unknown"},
        {"draft_model": "model of nobody"},
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused_and_forgotten(
    model: nn.Module, body: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with server(model) as client:
        right = alone(model, None, "hello", 40)
        bad, text = together(
            lambda: client.post(**{"prompt": "hi", **body}),
            lambda: client.text("hello", 40),
        )
        assert bad[0] in (400, 404), bad
        message = bad[1]["error"]
        assert "\n" not in (message if isinstance(message, str) else message["message"])
        assert text == right
        assert client.post(prompt="hi", **SAMPLED)[0] == 200
        assert not [thread for thread in errors(caplog) if "batch" in thread]


CHATS: list[Any] = [
    {},
    {"messages": "text"},
    {"messages": []},
    {"messages": [{}]},
    {"messages": [{"role": "user", "content": [5]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "data:"}]}]},
    {"messages": [{"role": "user", "content": "a", "tool_calls": 5}]},
    *(
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": given}
        for given in (5, {"tokenize": False}, {"return_tensors": "np"})
    ),
    {
        "messages": [{"role": "user", "content": "a"}],
        "chat_template_kwargs": {"chat_template": "{{ 1 / 0 }}"},
    },
]
RAW = [b"{", b"[]", b"5", b"\xff\xfe", b"[" * 100_000]


def test_chats_and_bodies_that_cannot_be_read(
    model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    with server(model) as client:
        for body in CHATS:
            status, answer = client.post("/v1/chat/completions", **body)
            assert status == 400 and answer["error"], body
        for data in RAW:
            assert client._ask("POST", "/v1/completions", data)[0] == 400, data[:20]
        with socket.create_connection(("127.0.0.1", client.port)) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n")
            assert b" 400 " in connection.recv(1000).splitlines()[0]
        # With content or without, as OpenAI's clients send what has only calls.
        chat = [{"role": "user"}]
        assert client.post("/v1/chat/completions", messages=chat, max_tokens=2)[0] == 200
        assert client.text("hello") == alone(model, None, "hello", 8)
        assert not handlers()


def test_a_stream_without_include_usage_ends_as_streams_do(model: nn.Module) -> None:
    with server(model) as client:
        _, text = client.post(prompt="hi", stream=True, stream_options={}, max_tokens=2)
    assert text.endswith("data: [DONE]\n\n")


def test_many_connect_at_once(model: nn.Module) -> None:
    with server(model) as client:
        right = alone(model, None, "hello", 2)
        assert together(*[lambda: client.text("hello", 2)] * 60) == [right] * 60
