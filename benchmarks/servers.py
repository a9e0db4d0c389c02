"""Servers to measure: in processes of their own, and ours in this one to look into."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
from openai import OpenAI

from mlx_kivi.config import KVCacheConfig
from mlx_kivi.server import setup_arg_parser, started
from mlx_kivi.serving.engine import Engine
from mlx_kivi.serving.handler import Handler


class Server:
    """A server that listens: `chat` and `complete` ask it, through the ``openai`` client."""

    def __init__(self, port: int, log: Path | None = None, pid: int | None = None) -> None:
        self.port, self._log, self._pid = port, log, pid
        self.client = OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=3600, max_retries=0
        )

    def complete(self, prompt: str, tokens: int, **more: Any) -> Any:
        return self.client.completions.create(
            model="default_model", prompt=prompt, max_tokens=tokens, temperature=0, **more
        )

    def chat(self, messages: list[Any], tokens: int, **more: Any) -> Any:
        return self.client.chat.completions.create(
            model="default_model", messages=messages, max_tokens=tokens, temperature=0, **more
        )

    def memory(self) -> int:
        """Bytes that the process holds."""
        return psutil.Process(self._pid).memory_info().rss

    def errors(self) -> list[str]:
        """Lines of its log that tell of a failure."""
        assert self._log is not None
        signs = ("ERROR", "Traceback", "Exception")
        return [
            line for line in self._log.read_text().splitlines() if any(s in line for s in signs)
        ]


@contextmanager
def process(module: str, model: str, *flags: str) -> Iterator[Server]:
    """``python -m module`` in a process of its own, until the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        argv = [sys.executable, "-m", module, "--model", model, "--port", str(port), *flags]
        with log.open("w") as out:
            child = subprocess.Popen(argv, stdout=out, stderr=out, env=dict(os.environ))
        try:
            for _ in range(600):
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health").read()
                    break
                except OSError:
                    if child.poll() is not None:
                        raise SystemExit(log.read_text()) from None
                    time.sleep(0.2)
            server = Server(port, log, child.pid)
            server.complete("Hello", 2)  # the model is loaded by then
            yield server
        finally:
            child.terminate()
            child.wait()


@contextmanager
def inside(
    model: str, *flags: str, policy: KVCacheConfig | None
) -> Iterator[tuple[Server, Engine]]:
    """Our server in this process, and its engine to look into."""
    args = setup_arg_parser().parse_args(["--model", model, *flags])
    with started(args, policy) as engine:
        httpd = ThreadingHTTPServer(("127.0.0.1", 0), lambda *a: Quiet(engine, *a))
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        try:
            yield Server(httpd.server_address[1]), engine
        finally:
            httpd.shutdown()
            httpd.server_close()


class Quiet(Handler):
    """No line a request."""

    def log_message(self, *_: Any) -> None:
        pass


def at_once(
    asks: Sequence[Callable[[], Any]], clients: int, after: Callable[[], None] = lambda: None
) -> list[Any]:
    """What all return, so many asked at a time; ``after`` is called after each."""
    found: list[Any] = [None] * len(asks)
    left = iter(range(len(asks)))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                i = next(left, None)
            if i is None:
                return
            found[i] = asks[i]()
            with lock:
                after()

    threads = [threading.Thread(target=work) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
