"""HTTP: mlx_lm's handler, with errors that clients can tell apart, and what operators look at."""

from __future__ import annotations

import io
import json
import logging
from http.server import ThreadingHTTPServer
from typing import Any

from mlx_lm import server as mlx_server
from prometheus_client import CONTENT_TYPE_LATEST

from .answers import RequestError, line


class Server(ThreadingHTTPServer):
    """Its own, with room for many that connect at once: the system cuts off those beyond."""

    request_queue_size = 128


class Handler(mlx_server.APIHandler):
    """Adds `/metrics`, and ``kv`` to `/health` and `/v1/models`."""

    response_generator: Any
    _streaming = False

    def handle_completion(self, request: Any, stop_words: list[str]) -> None:
        request.connection = self.connection  # for the engine to see whether anybody is there
        try:
            super().handle_completion(request, stop_words)
        except RequestError as error:
            self._end_with(error)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client has gone
        except Exception as error:  # in what was generated, as a call of a tool
            logging.error(f"An answer ends with 500: {line(error)}")
            logging.debug("Where:", exc_info=error)
            self._end_with(RequestError(500, line(error)))

    def do_POST(self) -> None:
        try:
            if self.headers.get("Content-Length", "").strip().startswith("-"):
                raise ValueError("Content-Length: use a number of bytes")
            super().do_POST()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        except Exception as error:  # `handle_completion` has its own: it is the request
            logging.warning(f"A request ends with 400: {line(error)}")
            self._end_with(RequestError(400, line(error)))

    def validate_model_parameters(self) -> None:
        super().validate_model_parameters()
        self._validate("requested_draft_model", str, optional=True)
        self._validate("stream_options", dict, optional=True)
        if self.stream_options is not None:
            self.stream_options.setdefault("include_usage", False)

    def _set_stream_headers(self, status_code: int = 200) -> None:
        self._streaming = True
        super()._set_stream_headers(status_code)

    def _end_with(self, error: RequestError) -> None:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        body = {"error": {"message": str(error), "type": kind, "code": error.status}}
        if self._streaming:  # its status is out
            self._write(f"data: {json.dumps(body)}\n\n".encode())
            return
        self._headers_buffer: list[bytes] = []  # of an answer that did not come
        self._answer(body, error.status)

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        if self.path not in ("/metrics", "/health"):  # asked for again and again
            super().log_request(code, size)

    def do_GET(self) -> None:
        if self.path == "/metrics":
            text = self.response_generator.metrics.text()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE_LATEST)
            self.send_header("Content-Length", str(len(text)))
            self._write(text)
        else:
            super().do_GET()

    def handle_health_check(self) -> None:
        healthy = self.response_generator.is_healthy
        status = {"status": "ok" if healthy else "unavailable", "kv": self.response_generator.facts}
        self._answer(status, 200 if healthy else 503)

    def handle_models_request(self) -> None:
        theirs, self.wfile = self.wfile, io.BytesIO()
        try:
            super().handle_models_request()
            _, _, listed = self.wfile.getvalue().partition(b"\r\n\r\n")
        finally:
            self.wfile = theirs
        self._answer({**json.loads(listed), "kv": self.response_generator.facts}, 200)

    def _answer(self, body: Any, status: int) -> None:
        text = json.dumps(body).encode()
        self._set_completion_headers(status)
        self.send_header("Content-Length", str(len(text)))
        self._write(text)

    def _write(self, data: bytes) -> None:
        """Headers that are not out yet, and what follows, if anybody is there."""
        try:
            if self._headers_buffer:
                self.end_headers()
            self.wfile.write(data)
            self.wfile.flush()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
