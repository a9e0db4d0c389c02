"""What the running caches of a model take, known before they are made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .. import report
from ..batch_cache import alike
from ..config import KVCacheConfig
from ..report import size

LONG = 8_192  # tokens of the conversation that the server's first line is about


class Footprint:
    """The bytes of a model's caches, by tokens.

    Args:
        pairs: A model and its caches, empty; and the same of a draft model.
        policy: What was asked for; None: mlx_lm's own caches.
    """

    def __init__(
        self, pairs: Iterable[tuple[Any, list[Any]]], policy: KVCacheConfig | None
    ) -> None:
        self._parts = [part for pair in pairs for part in report.parts(*pair)]
        self._policy = policy

    def bytes(self, tokens: int) -> int:
        """Of one sequence of so many tokens, fed and generated."""
        return sum(part.bytes(tokens) for part in self._parts)

    def batch_bytes(self, lengths: Sequence[int]) -> int:
        """Of a batch of sequences: rows that share arrays take what the longest of them takes."""
        return sum(_batch_bytes(part, lengths) for part in self._parts)

    def fp16_bytes(self, tokens: int) -> int:
        """Of one sequence in mlx_lm's own caches, in 16 bits."""
        total = 0
        for part in self._parts:
            full = part.full_bytes(tokens)
            total += full * 2 // part.heads.dtype.size if part.heads else full
        return total

    def evicted(self, tokens: int) -> int:
        """Tokens of so many that the policy's window has let go."""
        if self._policy is None or self._policy.window is None:
            return 0
        return max(0, tokens - self._policy.sink - self._policy.window)

    def facts(self) -> dict[str, Any]:
        """The policy and what it covers, for `/health` and `/v1/models`."""
        policy = self._policy
        asked = policy is not None and bool(policy.quantized or policy.window or policy.dtype)
        bounded = policy is not None and policy.window is not None
        covered = [p for p in self._parts if asked and p.ours and (bounded or _packs(p))]
        full = sum(part.full_bytes(LONG) for part in self._parts)
        of_bytes = sum(part.full_bytes(LONG) for part in covered) / full if full else 0.0
        whole = len(covered) == len(self._parts)
        return {
            "policy": policy.describe() if policy is not None and asked else "full precision",
            "bits": {
                "keys": policy.k_bits if policy else None,
                "values": policy.v_bits if policy else None,
            },
            "window": policy.window if policy else None,
            "sink": policy.sink if policy and policy.window else None,
            "layers": round(len(covered) / len(self._parts), 4) if self._parts else 0.0,
            "bytes": round(of_bytes, 4),
            "coverage": "none" if not covered else "full" if whole else "partial",
        }

    def line(self) -> str:
        """The same for people, in one line, with what a long conversation takes."""
        facts = self.facts()
        now, full = self.bytes(LONG), sum(part.full_bytes(LONG) for part in self._parts)
        takes = f"a conversation of {LONG:,} tokens takes {size(now)}"
        if facts["coverage"] == "none":
            return f"KV cache: full precision, nothing packed or bounded; {takes}"
        layers = round(facts["layers"] * len(self._parts))
        return (
            f"KV cache: {facts['policy']}, on {layers} of {len(self._parts)} layers "
            f"({facts['bytes']:.0%} of its bytes); {takes} (full precision: {size(full)})"
        )


def _batch_bytes(part: report.Part, lengths: Sequence[int]) -> int:
    """mlx_lm's caches pad all rows to one length; ours share arrays where attention is packed."""
    if not part.ours:
        return len(lengths) * part.bytes(max(lengths, default=0))
    if len(lengths) < 2 or not part.cache.packed_attention:
        return sum(map(part.bytes, lengths))
    buckets = alike([part.seen(n) for n in lengths])
    return sum(len(rows) * part.bytes(max(lengths[i] for i in rows), True) for rows in buckets)


def _packs(part: report.Part) -> bool:
    """Whether a cache of ours stores less than it gets, layer by layer."""
    return part.cache.config.quantized or part.cache.config.dtype is not None
