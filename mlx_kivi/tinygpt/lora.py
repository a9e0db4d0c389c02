"""Read .lora side files and add them to a model's weights (LoRA, arXiv:2106.09685).

    "TGLA" | u32 version, 1 or 2 | u32 N | N bytes of JSON | fp32 A and B of each entry

Little-endian. JSON: `rank`, `alpha` (default: `rank`), `entries` [{`name`, `loraAShape`
[in, r], `loraBShape` [r, out]}], and optionally the base model's `baseLayers, baseDModel,
baseCtx, baseHeads, baseDMlp`. The .tinygpt format page gives only the magic and A and B; the
rest follows tinygpt's public reader and has not been checked against an engine.
"""

import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from .config import ModelArgs, Tensor, tensors
from .container import Container, TinyGPTError, open_container, show

MAGIC = b"TGLA"
_BASE = {
    "baseLayers": "layers",
    "baseDModel": "dModel",
    "baseCtx": "ctx",
    "baseHeads": "heads",
    "baseDMlp": "dMlp",
}


def read_lora(
    path: str | os.PathLike[str], args: ModelArgs, weight: float = 1.0
) -> dict[str, np.ndarray]:
    """What to add to the weights: name to weight * alpha / rank * (A @ B)^T, [out, in] float32.

    Raises:
        TinyGPTError: the file is not sound, or not made for a model of these `args`.
    """
    if not math.isfinite(weight):
        raise TinyGPTError(path, "weight", f"expected a finite number, got {weight}")
    opened = open_container(path, MAGIC)
    if opened.version not in (1, 2):
        raise TinyGPTError(path, "version", f"expected 1 or 2, got {opened.version}")
    header = opened.header
    for key, name in _BASE.items():
        if header.get(key, getattr(args, name)) != getattr(args, name):
            problem = f"made for {name} {show(header[key])}, this model has {getattr(args, name)}"
            raise TinyGPTError(path, key, problem)
    rank = header.get("rank")
    if type(rank) is not int or rank < 1:
        raise TinyGPTError(path, "rank", f"expected a positive integer, got {show(rank)}")
    alpha = header.get("alpha", rank)
    if type(alpha) not in (int, float) or not abs(alpha) <= 1e30:
        raise TinyGPTError(path, "alpha", f"expected a number up to 1e30, got {show(alpha)}")
    targets = list(_targets(opened, args, rank))
    size = sum(4 * rank * sum(tensor.shape) for tensor in targets)
    body = len(opened.data) - opened.header_end
    if body != size:
        raise TinyGPTError(path, "body", f"expected {size} bytes for these entries, got {body}")
    deltas = {}
    start = opened.header_end
    for tensor in targets:
        outputs, inputs = tensor.shape
        factors = np.frombuffer(opened.data, "<f4", rank * (inputs + outputs), start)
        start += factors.nbytes
        a = factors[: inputs * rank].reshape(inputs, rank)
        b = factors[inputs * rank :].reshape(rank, outputs)
        with np.errstate(over="ignore", invalid="ignore"):
            delta = np.float32(weight * alpha / rank) * (a @ b).T
        if not np.isfinite(delta).all():
            raise TinyGPTError(path, tensor.name, "expected finite factors and product")
        deltas[tensor.name] = delta
    return deltas


def _targets(opened: Container, args: ModelArgs, rank: int) -> Iterator[Tensor]:
    """The weights the entries name, checked, in file order."""
    path = opened.path
    entries: Any = opened.header.get("entries")
    if not isinstance(entries, list):
        raise TinyGPTError(path, "entries", f"expected a list, got {show(entries)}")
    matrices = {t.name: t for t in tensors(args) if t.transposed and t.used}
    for i, entry in enumerate(entries):
        name = entry.get("name") if isinstance(entry, dict) else None
        tensor = matrices.pop(f"{name}.weight", None)
        if tensor is None:
            problem = f"expected a linear layer of the model, each once, got {show(name)}"
            raise TinyGPTError(path, f"entries[{i}].name", problem)
        outputs, inputs = tensor.shape
        for key, shape in (("loraAShape", [inputs, rank]), ("loraBShape", [rank, outputs])):
            if entry.get(key) != shape:
                problem = f"expected {shape} for {name}, got {show(entry.get(key))}"
                raise TinyGPTError(path, f"entries[{i}].{key}", problem)
        if entry.get("loraMShape") is not None:
            problem = "DoRA magnitudes are not supported; merge the adapter with tinygpt"
            raise TinyGPTError(path, f"entries[{i}].loraMShape", problem)
        yield tensor
