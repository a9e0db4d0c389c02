"""What passes from the engine to the thread of a request, and whether anybody is there."""

from __future__ import annotations

import socket
from queue import Queue
from typing import Any


class RequestError(BaseException):
    """How a request ends without an answer: a status of HTTP, and a line for the client.

    No ``Exception``: mlx_lm's handler takes each of those for a model that was not found (404).
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class Answers(Queue):
    """The queue of one request, with the connection of who asked.

    Args:
        connection: The client's socket, None if there is none to watch.
    """

    def __init__(self, connection: socket.socket | None = None) -> None:
        super().__init__()
        self._connection = connection

    def gone(self) -> bool:
        """Whether the client has closed its connection."""
        if self._connection is None:
            return False
        try:
            return not self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True


def line(error: BaseException) -> str:
    """An error in one line, its kind in front of it unless it is one that users can mend."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


def following(get: Any, on_progress: Any) -> Any:
    """The responses of a request, up to the last.

    Args:
        get: Returns what the engine puts next: a response, progress (done, total), None at the
            end, or what went wrong.
        on_progress: Called with progress, if it is not None.

    Raises:
        RequestError: if the request ended without an answer.
    """
    while (item := checked(get())) is not None:
        if not isinstance(item, tuple):
            yield item
        elif on_progress is not None:
            on_progress(*item)


def checked(item: Any) -> Any:
    """What the engine put, if it is no error.

    Raises:
        RequestError: if it is one.
    """
    if isinstance(item, RequestError):
        raise item
    if isinstance(item, ClientGone):
        raise RequestError(499, "the client has closed the connection")
    if isinstance(item, BaseException):
        raise RequestError(500, line(item)) from None
    return item
