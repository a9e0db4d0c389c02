"""The `config` of a .tinygpt header, and the tensors it calls for.

Names and defaults are the file's own (camelCase).
"""

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .container import TinyGPTError, show

# Inclusive. The upper ends are beyond any model of this family and stop absurd work early.
_RANGES = {
    "layers": (1, 1024),
    "dModel": (1, 2**20),
    "ctx": (1, 2**24),
    "heads": (1, 4096),
    "dMlp": (1, 2**22),
    "vocabSize": (1, 2**24),
    "nExperts": (1, 1024),
    "moeTopK": (1, 1024),
    "slidingWindow": (1, 2**30),
    "kviBits": (1, 32),
    "streamingSink": (0, 2**30),
    "streamingWindow": (1, 2**30),
}


@dataclass(frozen=True)
class ModelArgs:
    """A model's shape and switches. Build it with `from_dict`, which checks everything.

    kviBits, streamingSink and streamingWindow are the file's hints of a cache policy.
    """

    model_type: str = "tinygpt"
    layers: int = 12
    dModel: int = 256
    ctx: int = 256
    heads: int = 8
    dMlp: int = 1024
    vocabSize: int = 256
    tokenizerSource: str | None = None
    nExperts: int = 1
    moeTopK: int = 1
    slidingWindow: int | None = None
    useMoD: bool = False
    useDifferentialAttention: bool = False
    useYOCO: bool = False
    useDeepNorm: bool = False
    useEmbeddingRMSNorm: bool = False
    kviBits: int | None = None
    streamingSink: int | None = None
    streamingWindow: int | None = None

    @classmethod
    def from_dict(
        cls, params: Mapping[str, Any], source: str | os.PathLike[str] = "config.json"
    ) -> "ModelArgs":
        """Check and take over the known keys; unknown ones are ignored.

        Raises:
            TinyGPTError: a value of the wrong type or out of range, or a forbidden combination.
        """
        values = {}
        for field in dataclasses.fields(cls):
            value = params.get(field.name, field.default)
            if field.name not in params or (value is None and field.default is None):
                continue
            accepts, wanted = _expectation(field.name)
            if not accepts(value):
                problem = f"expected {wanted}, got {show(value)}"
                raise TinyGPTError(source, f"config.{field.name}", problem)
            values[field.name] = value
        args = cls(**values)
        if args.dModel % args.heads:
            problem = f"expected a multiple of heads ({args.heads}), got {args.dModel}"
            raise TinyGPTError(source, "config.dModel", problem)
        if args.moeTopK > args.nExperts:
            problem = f"expected at most nExperts ({args.nExperts}), got {args.moeTopK}"
            raise TinyGPTError(source, "config.moeTopK", problem)
        if args.useYOCO and args.useDifferentialAttention:
            problem = "expected false beside useDifferentialAttention: YOCO shares one K, not two"
            raise TinyGPTError(source, "config.useYOCO", problem)
        return args

    def header_config(self) -> dict[str, Any]:
        """The `config` object of a .tinygpt header for this model."""
        values = dataclasses.asdict(self)
        del values["model_type"]
        return {name: value for name, value in values.items() if value is not None}

    @property
    def anchor(self) -> int:
        """The last block with a cache of its own: YOCO's anchor, otherwise the last block."""
        return max(0, self.layers // 2 - 1) if self.useYOCO else self.layers - 1


def _expectation(name: str) -> tuple[Callable[[Any], bool], str]:
    """A test of one key's value and, for messages, what it wants."""
    if name in _RANGES:
        low, high = _RANGES[name]
        return lambda v: type(v) is int and low <= v <= high, f"an integer from {low} to {high}"
    if name == "model_type":
        return lambda v: v == "tinygpt", "'tinygpt'"
    if name == "tokenizerSource":
        return lambda v: isinstance(v, str), "a string"
    return lambda v: isinstance(v, bool), "true or false"


class Tensor(NamedTuple):
    """One tensor of the file: its declared shape, and whether the forward pass reads it."""

    name: str
    shape: tuple[int, ...]
    used: bool = True

    @property
    def transposed(self) -> bool:
        """Whether the bytes are [in, out] while the shape says [out, in]."""
        return len(self.shape) == 2 and not self.name.startswith(("token_", "position_"))


def tensors(args: ModelArgs) -> Iterator[Tensor]:
    """Every tensor a file of this config may hold, in tinygpt's own order.

    tinygpt writes `attn.*` for each block, also where the forward pass replaces it by
    differential or cross attention; those are marked unused and may be absent.
    """
    C, M = args.dModel, args.dMlp
    yield Tensor("token_embedding.weight", (args.vocabSize, C))
    if args.useEmbeddingRMSNorm:
        yield Tensor("embed_norm.weight", (C,))
    yield Tensor("position_embedding.weight", (args.ctx, C))
    yield from _affine("ln_final", (C,))
    for i in range(args.layers):
        crossed = i > args.anchor
        block = f"blocks.{i}"
        yield from _affine(f"{block}.ln1", (C,))
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            used = not (args.useDifferentialAttention or crossed)
            yield from _affine(f"{block}.attn.{name}", (C, C), used)
        yield from _affine(f"{block}.ln2", (C,))
        if args.nExperts > 1:
            yield Tensor(f"{block}.moe.router.weight", (args.nExperts, C))
            for e in range(args.nExperts):
                yield from _affine(f"{block}.moe.experts.{e}.fc_in", (M, C))
                yield from _affine(f"{block}.moe.experts.{e}.fc_out", (C, M))
        else:
            yield from _affine(f"{block}.mlp.fc_in", (M, C))
            yield from _affine(f"{block}.mlp.fc_out", (C, M))
        if args.useMoD:
            yield from _affine(f"{block}.mod_router", (1, C))
        if args.useDifferentialAttention:
            for name in ("q1_proj", "k1_proj", "q2_proj", "k2_proj", "v_proj", "o_proj"):
                yield from _affine(f"{block}.diff_attn.{name}", (C, C))
            yield Tensor(f"{block}.diff_attn.lambda", ())
        if crossed:
            for name in ("q_proj", "o_proj"):
                yield from _affine(f"{block}.cross_attn.{name}", (C, C))


def _affine(name: str, shape: tuple[int, ...], used: bool = True) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", shape, used)
    yield Tensor(f"{name}.bias", shape[:1], used)
