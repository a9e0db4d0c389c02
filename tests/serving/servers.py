"""A server in this process, of a model that is here already."""

from __future__ import annotations

import http.client
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from conformance.contract.tokenizers import wrapped
from mlx_kivi.commands import cli, loading
from mlx_kivi.config import KVCacheConfig
from mlx_kivi.server import setup_arg_parser, started
from mlx_kivi.serving.engine import Engine
from mlx_kivi.serving.handler import Handler, Server


class Client:
    """What a test asks of a server at a port.

    Attributes:
        engine: The server's, to look into.
    """

    def __init__(self, engine: Engine, port: int) -> None:
        self.engine, self.port = engine, port

    @classmethod
    def once(cls, httpd: Server, engine: Engine, **body: Any) -> tuple[int, Any]:
        """One completion of a server that has yet to run."""
        thread = threading.Thread(target=httpd.handle_request)
        thread.start()
        answer = cls(engine, httpd.server_address[1]).post(**body)
        thread.join()
        httpd.server_close()
        return answer

    def get(self, path: str) -> tuple[int, Any]:
        """Status and body, which is parsed if it is JSON."""
        return self._ask("GET", path, None)

    def post(self, path: str = "/v1/completions", **body: Any) -> tuple[int, Any]:
        return self._ask("POST", path, json.dumps(body))

    def text(self, prompt: str, tokens: int = 8, **body: Any) -> str:
        status, answer = self.post(prompt=prompt, max_tokens=tokens, **body)
        assert status == 200, answer
        return answer["choices"][0]["text"]

    def figure(self, name: str) -> float:
        """A figure of `/metrics`, of all its labels together."""
        return self.figures(name)[0]

    def figures(self, *names: str) -> list[float]:
        """Figures that were read at once."""
        lines = [line.rsplit(" ", 1) for line in self.get("/metrics")[1].splitlines()]
        return [
            sum(float(n) for key, n in lines if key == name or key.startswith(name + "{"))
            for name in names
        ]

    def until(self, holds: Callable[[], bool], seconds: float = 20) -> None:
        """Wait until something holds."""
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, "it never came true"
            time.sleep(0.01)

    def _ask(self, method: str, path: str, body: str | bytes | None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body)
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response.status, json.loads(text) if text.startswith("{") else text


@contextmanager
def server(
    model: Any,
    *flags: str,
    policy: KVCacheConfig | None = None,
    draft: Any = None,
    tokenizer: Any = None,
) -> Iterator[Client]:
    """A server of a model, None for none, under a policy; ``flags`` are those of the command."""
    made = tokenizer or wrapped()
    argv = [*flags]
    for name, flag, given in (("model", "--model", model), ("draft", "--draft-model", draft)):
        argv += [flag, name] if given is not None else []
    args = setup_arg_parser().parse_args(argv)

    def load(_: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        if path == "draft":
            return draft, made
        if path != "model":
            raise ValueError(f"no such model: {path}")
        return model, made, {}

    with ExitStack() as stack:
        stack.enter_context(cli.replaced(loading, load=load))
        engine = stack.enter_context(started(args, policy))
        httpd = Server(("127.0.0.1", 0), lambda *a: Handler(engine, *a))
        thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
        thread.start()
        stack.callback(thread.join)
        stack.callback(httpd.shutdown)
        stack.callback(httpd.server_close)
        yield Client(engine, httpd.server_address[1])


def together(*asks: Callable[[], Any]) -> list[Any]:
    """What all return, asked at once."""
    found: list[Any] = [None] * len(asks)

    def run(i: int) -> None:
        found[i] = asks[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(asks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def errors(caplog: Any) -> list[str]:
    """Lines of the log that say that something went wrong."""
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
