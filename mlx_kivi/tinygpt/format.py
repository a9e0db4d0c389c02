"""Read and write .tinygpt files (version 2), all three body layouts.

    "TGPT" | u32 version | u32 N | N bytes of JSON | i32 training step | body

    fp32   per tensor: w, then the AdamW moments m and v, 4n bytes each
    fp16   one buffer; a tensor starts at `floatOffset` elements
    int4   all fp16 scales, ceil(n/64) a tensor; then 32 bytes of nibbles a block of 64,
           low nibble first; w = (nibble - 8) * scale

Integers and floats are little-endian. A 2-D weight that is not an embedding is declared
[out, in] while its bytes are row-major [in, out].
"""

import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np

from .config import ModelArgs, Tensor, tensors
from .container import MAX_HEADER, TinyGPTError, open_container, show

MAGIC = b"TGPT"
VERSION = 2
BLOCK = 64  # weights that share an int4 scale
DTYPES = ("fp32", "fp16", "int4")

# Set by `write` itself, so not carried over from another file's header.
_LAYOUT_KEYS = {
    "version",
    "config",
    "manifest",
    "weightDtype",
    "includesOptimizerState",
    "stateByteLength",
    "int4BlockSize",
    "int4ScalesBytes",
    "int4PackedBytes",
}


def is_tinygpt(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a regular file that starts with the .tinygpt magic."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(4) == MAGIC


class TinyGPTFile:
    """A checked, memory-mapped .tinygpt file.

    The header is read and every size checked at once; weights are read as `weights` yields
    them, and AdamW's moments never.

    Attributes:
        args: the model's shape and switches.
        config: the header's `config` object as it stands, unknown keys included.
        extra: the rest of the header, without the keys that describe the layout.
        dtype: "fp32", "fp16" or "int4".
        step: training steps taken.
        manifest: the tensors, in the file's order.

    Raises:
        TinyGPTError: whatever in the file is not as the format says.
    """

    def __init__(self, path: str | os.PathLike[str]):
        opened = open_container(path, MAGIC)
        self.path, self._data, header = opened.path, opened.data, opened.header
        if opened.version == 1:
            self._fail("version", "expected 2; version 1 has no manifest to find tensors by")
        if opened.version != VERSION:
            self._fail("version", f"expected 2, got {opened.version}")
        if not isinstance(header.get("config"), dict):
            self._fail("config", f"expected an object, got {show(header.get('config'))}")
        self.config: dict[str, Any] = header["config"]
        self.args = ModelArgs.from_dict(self.config, self.path)
        self.extra = {key: header[key] for key in header if key not in _LAYOUT_KEYS}
        self.dtype = self._dtype(header)
        self._body = opened.header_end + 4
        if len(self._data) < self._body:
            self._fail("step", "expected 4 bytes after the header, the file ends (truncated?)")
        (self.step,) = struct.unpack("<i", self._data[self._body - 4 : self._body])
        self.manifest, self._starts = self._read_manifest(header.get("manifest"))
        self._check_body(header)

    def _fail(self, field: str, problem: str) -> NoReturn:
        raise TinyGPTError(self.path, field, problem)

    def _dtype(self, header: dict[str, Any]) -> str:
        dtype = header.get("weightDtype", "fp32")
        if dtype not in DTYPES:
            self._fail("weightDtype", f"expected fp32, fp16 or int4, got {show(dtype)}")
        training = header.get("includesOptimizerState", True)
        if not isinstance(training, bool):
            self._fail("includesOptimizerState", f"expected true or false, got {show(training)}")
        return "fp16" if dtype == "fp32" and not training else dtype

    def _read_manifest(self, manifest: Any) -> tuple[list[Tensor], list[int]]:
        """The tensors in file order and where each starts, in elements."""
        if not isinstance(manifest, list):
            self._fail("manifest", f"expected a list, got {show(manifest)}")
        entries: dict[str, dict[str, Any]] = {}
        for i, entry in enumerate(manifest):
            if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
                self._fail(f"manifest[{i}]", f"expected an object with a name, got {show(entry)}")
            if entry["name"] in entries:
                self._fail(f"manifest[{i}].name", f"{show(entry['name'])} is there twice")
            entries[entry["name"]] = entry
        known: dict[str, Tensor] = {}
        for tensor in tensors(self.args):  # stops at the first one missing, so is never long
            if tensor.name in entries:
                known[tensor.name] = tensor
            elif tensor.used:
                self._fail(tensor.name, _missing(tensor.name))
        starts = []
        end = 0
        for name, entry in entries.items():
            if name not in known:
                self._fail(
                    show(name), "the manifest has this tensor, the config does not call for it"
                )
            shape = known[name].shape
            if entry.get("shape") != list(shape):
                problem = f"expected shape {list(shape)}, got {show(entry.get('shape'))}"
                self._fail(name, problem)
            start = entry.get("floatOffset", end)
            if type(start) is not int:
                self._fail(f"{name}.floatOffset", f"expected an integer, got {show(start)}")
            if self.dtype != "fp16" and start != end:
                problem = f"expected {end}, the sizes before it added up, got {show(start)}"
                self._fail(f"{name}.floatOffset", problem)
            starts.append(start)
            end += math.prod(shape)
        manifest_tensors = [known[name] for name in entries]
        end = 0
        for start, tensor in sorted(zip(starts, manifest_tensors)):
            if start != end:
                problem = f"expected {end}, where the tensor before it ends, got {show(start)}"
                self._fail(f"{tensor.name}.floatOffset", problem)
            end += math.prod(tensor.shape)
        return manifest_tensors, starts

    def _check_body(self, header: dict[str, Any]) -> None:
        sizes = [math.prod(tensor.shape) for tensor in self.manifest]
        self._blocks = [-(-size // BLOCK) for size in sizes]
        expected = {
            "fp32": 12 * sum(sizes),
            "fp16": 2 * sum(sizes),
            "int4": (2 + BLOCK // 2) * sum(self._blocks),
        }[self.dtype]
        if self.dtype == "int4":
            for key, value in (
                ("int4BlockSize", BLOCK),
                ("int4ScalesBytes", 2 * sum(self._blocks)),
                ("int4PackedBytes", BLOCK // 2 * sum(self._blocks)),
            ):
                if header.get(key, value) != value:
                    self._fail(key, f"expected {value}, got {show(header[key])}")
        if len(self._data) - self._body != expected:
            self._fail(
                "body",
                f"expected {expected} bytes of {self.dtype} for this manifest, "
                f"got {len(self._data) - self._body}",
            )

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        """Each tensor in its declared shape, file order: float16 for fp16, otherwise float32.

        Raises:
            TinyGPTError: a NaN or an infinity.
        """
        block = 0
        for tensor, start, blocks in zip(self.manifest, self._starts, self._blocks):
            size = math.prod(tensor.shape)
            if self.dtype == "fp32":
                flat = self._view("<f4", size, 12 * start)
            elif self.dtype == "fp16":
                flat = self._view("<f2", size, 2 * start)
            else:
                flat = self._unpack(block, blocks)[:size]
                block += blocks
            if not np.isfinite(flat).all():
                self._fail(tensor.name, "expected finite weights, got a NaN or an infinity")
            array = flat.reshape(tensor.shape[::-1]).T if tensor.transposed else flat
            # A copy, so that nothing the caller keeps holds the file mapped.
            yield tensor.name, np.array(array.reshape(tensor.shape), order="C")

    def _unpack(self, first: int, blocks: int) -> np.ndarray:
        """Dequantise `blocks` blocks from the `first` on: [blocks * 64] float32."""
        scales = self._view("<f2", blocks, 2 * first).astype(np.float32)
        nibbles_start = 2 * sum(self._blocks) + BLOCK // 2 * first
        packed = self._view(np.uint8, blocks * BLOCK // 2, nibbles_start)
        nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(blocks, BLOCK)
        with np.errstate(invalid="ignore"):  # 0 * infinity; `weights` reports it
            return ((nibbles.astype(np.float32) - 8) * scales[:, None]).reshape(-1)

    def _view(self, dtype: Any, count: int, offset: int) -> np.ndarray:
        return np.frombuffer(self._data, dtype, count, self._body + offset)


def _missing(name: str) -> str:
    if ".cross_attn." in name:
        return (
            "missing; tinygpt's writer leaves out a YOCO model's cross-attention weights, and "
            "without them this file cannot give the trained model"
        )
    return "missing from the manifest, the config calls for it"


def write(
    path: str | os.PathLike[str],
    config: Mapping[str, Any],
    weights: Mapping[str, Any],
    *,
    dtype: str = "fp32",
    step: int = 0,
    extra: Mapping[str, Any] | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write a .tinygpt file, whole or not at all.

    Args:
        config: the header's `config` object.
        weights: file tensor name to array in its declared shape (anything numpy can take).
        dtype: "fp32" (AdamW's moments are written as zeros), "fp16" or "int4".
        step: training steps taken.
        extra: further header keys.
        report: called with the tensors written and their total.

    Raises:
        TinyGPTError: missing, surplus or misshapen weights, or values `dtype` cannot hold.
    """
    path = Path(path)
    if dtype not in DTYPES:
        raise TinyGPTError(path, "dtype", f"expected fp32, fp16 or int4, got {show(dtype)}")
    if not -(2**31) <= step < 2**31:
        raise TinyGPTError(path, "step", f"expected a 32-bit integer, got {show(step)}")
    manifest = _check_weights(path, ModelArgs.from_dict(config, path), weights)
    sizes = [math.prod(tensor.shape) for tensor in manifest]
    blocks = sum(-(-size // BLOCK) for size in sizes)
    layout: dict[str, Any] = {"weightDtype": dtype, "includesOptimizerState": dtype == "fp32"}
    if dtype == "int4":
        layout["int4BlockSize"] = BLOCK
        layout["int4ScalesBytes"] = 2 * blocks
        layout["int4PackedBytes"] = BLOCK // 2 * blocks
    starts = accumulate(sizes, initial=0)
    header = {
        "version": VERSION,
        "config": dict(config),
        **{key: value for key, value in (extra or {}).items() if key not in _LAYOUT_KEYS},
        **layout,
        "manifest": [
            {"name": tensor.name, "shape": list(tensor.shape), "floatOffset": start}
            for tensor, start in zip(manifest, starts)
        ],
    }
    raw = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    if len(raw) > MAX_HEADER:
        raise TinyGPTError(path, "header", f"expected at most {MAX_HEADER} bytes, got {len(raw)}")
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(partial, "wb") as file:
            file.write(MAGIC + struct.pack("<II", VERSION, len(raw)) + raw)
            file.write(struct.pack("<i", step))
            scales_at = file.tell()
            if dtype == "int4":
                file.seek(2 * blocks, os.SEEK_CUR)
            for done, tensor in enumerate(manifest, 1):
                flat = _flat(path, tensor, weights[tensor.name])
                if dtype == "int4":
                    scales_at = _write_int4(path, tensor, flat, file, scales_at)
                else:
                    _write_floats(path, tensor, flat, file, dtype)
                report(done, len(manifest))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _check_weights(path: Path, args: ModelArgs, weights: Mapping[str, Any]) -> list[Tensor]:
    manifest = []
    for tensor in tensors(args):
        if tensor.name in weights:
            shape = tuple(weights[tensor.name].shape)
            if shape != tensor.shape:
                problem = f"expected shape {list(tensor.shape)}, got {list(shape)}"
                raise TinyGPTError(path, tensor.name, problem)
            manifest.append(tensor)
        elif tensor.used:
            raise TinyGPTError(path, tensor.name, "missing, the config calls for it")
    for name in weights.keys() - {tensor.name for tensor in manifest}:
        raise TinyGPTError(path, show(name), "the config does not call for this tensor")
    return manifest


def _flat(path: Path, tensor: Tensor, weight: Any) -> np.ndarray:
    """A tensor's elements in file order, float32 or float16."""
    array = np.asarray(weight)
    if not np.isfinite(array).all():
        raise TinyGPTError(path, tensor.name, "expected finite weights, got a NaN or an infinity")
    return (array.T if tensor.transposed else array).reshape(-1)


def _write_floats(
    path: Path, tensor: Tensor, flat: np.ndarray, file: IO[bytes], dtype: str
) -> None:
    with np.errstate(over="ignore"):
        data = flat.astype("<f4" if dtype == "fp32" else "<f2")
    if not np.isfinite(data).all():
        raise TinyGPTError(path, tensor.name, f"expected weights within {dtype}'s range")
    file.write(data.tobytes())
    if dtype == "fp32":
        file.write(bytes(8 * data.size))


def _write_int4(
    path: Path, tensor: Tensor, flat: np.ndarray, file: IO[bytes], scales_at: int
) -> int:
    """Quantise as tinygpt's converter does: scale = max / 7, nibbles 1 to 15.

    Writes nibbles at the file's position and scales at `scales_at`; returns the next one.
    """
    blocks = -(-flat.size // BLOCK)
    padded = np.zeros((blocks, BLOCK))
    padded.reshape(-1)[: flat.size] = flat
    scales = np.abs(padded).max(axis=1) / 7
    with np.errstate(over="ignore"):
        stored = scales.astype("<f2")
    if not np.isfinite(stored).all():
        raise TinyGPTError(path, tensor.name, "expected weights within int4's range")
    inverse = np.divide(1, scales, out=np.zeros(blocks), where=scales > 0)[:, None]
    nibbles = (np.clip(np.floor(padded * inverse + 0.5), -7, 7) + 8).astype(np.uint8)
    nibbles[scales == 0] = 0  # as its converter leaves them; the scale makes them zero
    nibbles.reshape(-1)[flat.size :] = 0
    file.write((nibbles[:, ::2] | nibbles[:, 1::2] << 4).tobytes())
    end = file.tell()
    file.seek(scales_at)
    file.write(stored.tobytes())
    file.seek(end)
    return scales_at + stored.nbytes
