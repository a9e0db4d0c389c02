"""The cache policy: which precision, and how much of the past."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
DTYPES = ("float16", "bfloat16", "float32")

# Tokens behind the newest one that `trim` can always take back exactly.
TRIM_MARGIN = 32

# The named settings, chosen by benchmarks/quality.py: see docs/quality.md.
PRESETS: dict[str, dict[str, Any]] = {
    "none": {},
    "fp16": {"dtype": "float16"},
    "bf16": {"dtype": "bfloat16"},
    "int8": {"k_bits": 8, "v_bits": 8, "group_size": 64},
    "int4": {"k_bits": 4, "v_bits": 4, "group_size": 64, "residual_length": 64},
    "int3": {"k_bits": 3, "v_bits": 3, "group_size": 128, "residual_length": 64},
    "int2": {"k_bits": 3, "v_bits": 2, "group_size": 128, "residual_length": 64},
    "int2s": {"k_bits": 2, "v_bits": 2, "group_size": 128, "residual_length": 64},
    # The layout of the KIVI paper, to compare with.
    "kivi4": {
        "k_bits": 4,
        "v_bits": 4,
        "group_size": 64,
        "residual_length": 64,
        "balanced": False,
    },
    "kivi2": {"k_bits": 2, "v_bits": 2, "group_size": 32, "balanced": False},
}


@dataclass(frozen=True)
class KVCacheConfig:
    """What a cache stores and for how long.

    Keys are quantised per channel over ``group_size`` tokens, values per token over
    ``group_size`` channels (KIVI, arXiv:2402.02750, section 3.3). The first ``sink`` tokens and
    the last ``residual_length`` or more stay in full precision. With a ``window``, a query at
    position p attends to the sinks and to positions in (p - window, p] (StreamingLLM,
    arXiv:2309.17453, section 3.2).

    Args:
        k_bits: Bits a key value, one of 2, 3, 4, 5, 6, 8; None stores keys as they come.
        v_bits: The same for values.
        group_size: Values that share a scale and a zero: 32, 64 or 128. Head sizes that it
            does not divide take the cheapest legal group, padded if need be.
        residual_length: Most recent tokens never quantised, at least.
        sink: First tokens, never quantised and never evicted.
        window: Most recent tokens kept beside the sinks; None keeps all.
        reposition: Whether a sink's position is its index in the cache, as in the StreamingLLM
            paper; if not, it stays where it was in the text. Needs a window (docs/positions.md).
        dtype: "float16", "bfloat16" or "float32" for what is not quantised; None: the model's.
        layers: Numbers of the caches to quantise (-1 is the last); None: all. The others are
            bounded alike and stay in full precision.
        protect_first: So many caches from the first on take 8 bits at least.
        protect_last: The same from the last back.
        balanced: Whether keys and values in fewer than 8 bits are packed in a basis in which
            rounding costs least (docs/quality.md); if not, channel by channel, as in KIVI. Keys
            in 3 bits then have 4 in the channels that matter most and 2 in the others.

    Raises:
        ValueError: names the field, its value and what it may be.
    """

    k_bits: int | None = None
    v_bits: int | None = None
    group_size: int = 64
    residual_length: int = 32
    sink: int = 4
    window: int | None = None
    reposition: bool = False
    dtype: str | None = None
    layers: tuple[int, ...] | None = None
    protect_first: int = 0
    protect_last: int = 0
    balanced: bool = True

    def __post_init__(self) -> None:
        for name in ("k_bits", "v_bits"):
            bits = getattr(self, name)
            if bits is not None and (type(bits) is not int or bits not in BITS):
                raise ValueError(f"{name}={bits!r}: use one of {listed(BITS)}, or None")
        if type(self.group_size) is not int or self.group_size not in GROUP_SIZES:
            raise ValueError(f"group_size={self.group_size!r}: use one of {listed(GROUP_SIZES)}")
        _at_least("residual_length", self.residual_length, 0)
        _at_least("sink", self.sink, 0)
        if self.window is not None:
            _at_least("window", self.window, 1, " (or None to keep every token)")
        for name in ("reposition", "balanced"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: use True or False")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: use one of {', '.join(DTYPES)}, or None")
        _at_least("protect_first", self.protect_first, 0)
        _at_least("protect_last", self.protect_last, 0)
        if self.layers is not None:
            if not isinstance(self.layers, list | tuple) or any(
                type(i) is not int for i in self.layers
            ):
                raise ValueError(f"layers={self.layers!r}: use whole numbers, or None for all")
            object.__setattr__(self, "layers", tuple(self.layers))

    @classmethod
    def from_name(cls, name: str, **overrides: Any) -> KVCacheConfig:
        """A preset by its name (`PRESETS`), with fields overridden.

        Raises:
            ValueError: for an unknown name, listing those that exist.
        """
        if name not in PRESETS:
            raise ValueError(f"kv-quantize {name!r} is unknown: use one of {listed(PRESETS)}")
        return cls(**{**PRESETS[name], **overrides})

    @property
    def quantized(self) -> bool:
        return self.k_bits is not None or self.v_bits is not None

    @property
    def moves_keys(self) -> bool:
        """Whether keys are packed in another basis: 8 bits are as good without."""
        return self.balanced and self.k_bits is not None and self.k_bits < 8

    @property
    def moves_values(self) -> bool:
        """The same for values."""
        return self.balanced and self.v_bits is not None and self.v_bits < 8

    def replace(self, **changes: Any) -> KVCacheConfig:
        return replace(self, **changes)

    def at_least_bits(self, bits: int) -> KVCacheConfig:
        """The same with quantised keys and values in ``bits`` bits or more."""
        k, v = (b if b is None else max(b, bits) for b in (self.k_bits, self.v_bits))
        return replace(self, k_bits=k, v_bits=v)

    def by_layer(self, count: int) -> list[KVCacheConfig]:
        """The policy of each of ``count`` caches.

        Raises:
            ValueError: if ``layers`` names one that is not there.
        """
        bad = [i for i in self.layers or () if not -count <= i < count]
        if bad:
            raise ValueError(f"layers={bad[0]}: this model has caches 0 to {count - 1}")
        chosen = {i % count for i in self.layers} if self.layers is not None else set(range(count))
        one = replace(self, layers=None, protect_first=0, protect_last=0)
        policies = []
        for i in range(count):
            if i not in chosen:
                policies.append(replace(one, k_bits=None, v_bits=None))
            elif i < self.protect_first or i >= count - self.protect_last:
                policies.append(one.at_least_bits(8))
            else:
                policies.append(one)
        return policies

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self) -> str:
        """One line for people: bits, group, residual, sinks and window."""
        if self.quantized:
            k, v = (b or "full" for b in (self.k_bits, self.v_bits))
            bits = f"{k} bits" if k == v else f"keys {k}, values {v} bits"
            if not self.balanced and min(self.k_bits or 8, self.v_bits or 8) < 8:
                bits += " as they are"
            parts = [bits, f"group {self.group_size}", f"residual {self.residual_length}"]
        else:
            parts = [self.dtype or "full precision"]
        parts.append(f"sinks {self.sink}" + (" re-positioned" if self.reposition else ""))
        parts.append("no window" if self.window is None else f"window {self.window}")
        return ", ".join(parts)


def listed(values: Any) -> str:
    return ", ".join(str(v) for v in values)


def _at_least(name: str, value: Any, low: int, more: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"{name}={value!r}: use a whole number of at least {low}{more}")


@cache
def value_group(head_dim: int, group_size: int, bits: int) -> tuple[int, int]:
    """The cheapest legal (group, padded head size) for values of ``head_dim`` channels.

    ``mx.quantized_matmul`` takes groups of 32, 64 and 128 only, so a head size of 80, say, is
    padded: 96 in groups of 32 costs fewer bytes than 128 in groups of 64.
    """
    options = []
    for group in GROUP_SIZES:
        if group <= group_size:
            padded = -(-head_dim // group) * group
            options.append((padded * (bits + 32 / group), -group, padded))
    _, group, padded = min(options)
    return -group, padded


def with_max_kv_size(config: KVCacheConfig, max_kv_size: int | None) -> KVCacheConfig:
    """``max_kv_size`` as mlx_lm means it: sinks and window together, 4 sinks by default.

    Raises:
        ValueError: if the policy has a window already, or too little is left for one; or if
            neither gives the window that ``reposition`` needs.
    """
    if max_kv_size is None:
        if config.reposition and config.window is None:
            raise ValueError("reposition=True needs a window: add window=M")
        return config
    if config.window is not None:
        raise ValueError(f"max_kv_size={max_kv_size} and window={config.window}: use one of them")
    if max_kv_size <= config.sink:
        raise ValueError(
            f"max_kv_size={max_kv_size}: use more than the {config.sink} sinks it includes"
        )
    return config.replace(window=max_kv_size - config.sink)
