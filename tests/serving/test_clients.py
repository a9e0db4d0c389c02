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
from serving.servers import Client, server
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
