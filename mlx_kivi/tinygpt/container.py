"""What .tinygpt and .lora files share: magic, u32 version, u32 header length, JSON header.

Nothing in such a file is trusted. The checks bound memory and time by the file's own
size: the header may be at most MAX_HEADER bytes and MAX_VALUES JSON values.
"""

import json
import math
import mmap
import os
import reprlib
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_HEADER = 64 * 2**20  # bytes
MAX_VALUES = 2**20  # each JSON value costs up to about 100 bytes of memory


class TinyGPTError(ValueError):
    """A file that cannot be used. One line: the file, the field, what was expected."""

    def __init__(self, source: str | os.PathLike[str], field: str, problem: str):
        name = os.fspath(source)
        super().__init__(f"{name if name.isprintable() else repr(name)}: {field}: {problem}")


def show(value: Any) -> str:
    """A short one-line form of a value from an untrusted file."""
    return reprlib.repr(value)


@dataclass(frozen=True)
class Container:
    """An opened file: its path, memory map, version, header object and where that ends."""

    path: Path
    data: mmap.mmap
    version: int
    header: dict[str, Any]
    header_end: int  # byte offset of what follows the header


def open_container(path: str | os.PathLike[str], magic: bytes) -> Container:
    """Map a file and read its header.

    Raises:
        TinyGPTError: anything but a regular file with this magic and a sound JSON header.
    """
    path = Path(path)
    try:
        # O_NONBLOCK: opening a named pipe must fail the next check, not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except (OSError, ValueError) as error:
        raise TinyGPTError(path, "file", getattr(error, "strerror", None) or str(error)) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise TinyGPTError(path, "file", "expected a regular file")
        if status.st_size < 12:
            problem = f"expected at least 12 bytes, got {status.st_size} (truncated?)"
            raise TinyGPTError(path, "file", problem)
        data = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)
    if data[:4] != magic:
        raise TinyGPTError(path, "magic", f"expected {magic!r}, got {data[:4]!r}")
    version, length = struct.unpack("<II", data[4:12])
    if length > MAX_HEADER or 12 + length > len(data):
        limit = min(MAX_HEADER, len(data) - 12)
        raise TinyGPTError(
            path, "header length", f"expected at most {limit} bytes here, got {length}"
        )
    header = parse_object(path, data[12 : 12 + length])
    return Container(path, data, version, header, 12 + length)


def parse_object(path: Path, raw: bytes) -> dict[str, Any]:
    """A strict JSON object: no NaN, no key twice, bounded.

    Raises:
        TinyGPTError: it is not one.
    """
    if sum(raw.count(mark) for mark in b",[{") > MAX_VALUES:
        raise TinyGPTError(path, "header", f"expected at most {MAX_VALUES} JSON values")
    try:
        header = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_not_a_number,
            parse_float=_finite,
        )
    except UnicodeDecodeError as error:
        raise TinyGPTError(path, "header", f"expected UTF-8, got {error.reason}") from None
    except RecursionError:
        raise TinyGPTError(path, "header", "expected JSON of ordinary depth") from None
    except ValueError as error:
        raise TinyGPTError(path, "header", f"expected JSON, got {error}") from None
    if not isinstance(header, dict):
        raise TinyGPTError(path, "header", f"expected a JSON object, got {show(header)}")
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {show(key)} twice")
        found[key] = value
    return found


def _not_a_number(text: str) -> float:
    raise ValueError(f"the number {text}")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number too large for a float")
    return value
