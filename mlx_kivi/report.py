"""What a policy does to a model's caches, in words and bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from .cache.sizes import Heads, stored_bytes
from .config import value_group
from .models.architectures import own_caches
from .models.factory import ours
from .quantized_streaming_cache import QuantizedStreamingCache

LONG = 32_768  # tokens at which costs are compared
_FED = 256  # tokens after which, and after twice as many, an unknown cache is measured


@dataclass(frozen=True)
class Part:
    """One cache of a model, members of a `CacheList` counted singly.

    cache: ours, or the one left alone; own: what the model made, after one token; heads: None
    where the cache holds no keys and values; growth: bytes a token and before the first, of a
    class of the model's own.
    """

    cache: Any
    own: Any
    heads: Heads | None
    growth: tuple[float, int] | None = None

    @property
    def ours(self) -> bool:
        return isinstance(self.cache, QuantizedStreamingCache)

    def full_bytes(self, tokens: int) -> int:
        """Bytes of the model's own cache after ``tokens`` tokens: it grows by 256."""
        if self.growth:
            return round(self.growth[0] * tokens) + self.growth[1]
        if self.heads is None:
            return _own_bytes(self.own)
        grown = -(-tokens // 256) * 256
        bound = getattr(self.own, "max_size", getattr(self.own, "chunk_size", grown))
        return self.heads.full_bytes(min(grown, bound))

    def bytes(self, tokens: int) -> int:
        """Bytes of the cache in use after ``tokens`` tokens."""
        if not self.ours or self.heads is None:
            return self.full_bytes(tokens)
        return stored_bytes(self.cache.config, self.cache.plan, self.cache.step, self.heads, tokens)


def parts(model: Any, caches: list[Any]) -> list[Part]:
    """The caches of a model with their shapes, from a forward pass built and never computed."""
    own = _fed(model, 1)
    flat: list[Part] = []
    for cache, mine in zip(caches, own, strict=True):
        flat += _parts(cache, mine)
    if all(p.heads or isinstance(p.own, ArraysCache) for p in flat):
        return flat
    early, late = (
        [p.own for cache in _fed(model, n) for p in _parts(cache, cache)] for n in (_FED, 2 * _FED)
    )
    for i, part in enumerate(flat):
        if part.heads is None and not isinstance(part.own, ArraysCache):
            first, second = _own_bytes(early[i]), _own_bytes(late[i])
            flat[i] = replace(part, growth=((second - first) / _FED, 2 * first - second))
    return flat


def _fed(model: Any, tokens: int) -> list[Any]:
    """The model's own caches after ``tokens`` tokens."""
    own = own_caches(model)
    try:
        model(mx.zeros((1, tokens), mx.int32), cache=own)
    except Exception:  # a model that needs more than tokens: shapes stay unknown
        return own_caches(model)
    return own


def _parts(cache: Any, own: Any) -> list[Part]:
    if hasattr(own, "caches"):
        pairs = zip(cache.caches, own.caches, strict=True)
        return [part for a, b in pairs for part in _parts(a, b)]
    keys, values = getattr(own, "keys", None), getattr(own, "values", None)
    heads = None
    if isinstance(keys, mx.array) and isinstance(values, mx.array):
        heads = Heads(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
    return [Part(cache, own, heads)]


def _own_bytes(own: Any) -> int:
    arrays = getattr(own, "cache", None)
    if isinstance(arrays, list):
        return sum(a.nbytes for a in arrays if a is not None)
    try:
        return own.nbytes
    except (AttributeError, NotImplementedError, TypeError):
        return 0


def describe(model: Any, caches: list[Any], tokens: int = LONG) -> str:
    """What is in force, for people: the policy, layers by kind, bytes at ``tokens`` and at 32K."""
    flat = parts(model, caches)
    lines = []
    policies = Counter(p.cache.config.describe() for p in flat if p.ours)
    for policy, count in policies.items():
        lines.append(f"KV cache of {count} of {len(flat)} layers: {policy}")
    lines += unconverted(model, caches, flat=flat, tokens=tokens)
    lines += _regrouped(flat)
    lines += _unpacked(flat)
    for length in sorted({tokens, LONG}):
        now, full = (sum(f(p) for p in flat) for f in (_bytes(length), _full(length)))
        if full:
            lines.append(
                f"At {length:,} tokens: {size(now)} instead of {size(full)} ({now / full:.0%})"
            )
    return "\n".join(lines)


def unconverted(
    model: Any, caches: list[Any], *, flat: list[Part] | None = None, tokens: int = LONG
) -> list[str]:
    """One line for each kind of cache that was left as the model made it."""
    flat = parts(model, caches) if flat is None else flat
    kinds: dict[str, list[Part]] = {}
    for part in flat:
        if not part.ours:
            kinds.setdefault(type(part.cache).__name__, []).append(part)
    lines = []
    for kind, group in kinds.items():
        shares = []
        for length in sorted({tokens, LONG}):
            mine = sum(p.bytes(length) for p in group)
            total = sum(p.bytes(length) for p in flat) or 1
            shares.append(f"{size(mine)} ({mine / total:.0%}) at {length:,} tokens")
        lines.append(
            f"{len(group)} of {len(flat)} layers keep {kind}, neither packed nor bounded by us: "
            + ", ".join(shares)
        )
    return lines


def _regrouped(flat: list[Part]) -> list[str]:
    """Values whose head size the policy's groups do not divide."""
    found: Counter[tuple[int, int, int]] = Counter()
    for p in flat:
        if p.ours and p.heads and p.heads.value_dim and p.cache.config.v_bits:
            config, dim = p.cache.config, p.heads.value_dim
            group, padded = value_group(dim, config.group_size, config.v_bits)
            if (group, padded) != (config.group_size, dim):
                found[group, dim, padded] += 1
    return [
        f"Values of {count} of {len(flat)} layers are in groups of {group}"
        + (f", their heads of {dim} channels padded to {padded}" if padded > dim else "")
        for (group, dim, padded), count in found.items()
    ]


def _unpacked(flat: list[Part]) -> list[str]:
    """Policies that ask for bits where the window leaves nothing to pack."""
    small = [
        p for p in flat if p.ours and p.cache.config.quantized and p.cache.plan.residual is None
    ]
    if not small:
        return []
    window = small[0].cache.config.window
    return [
        f"{len(small)} of {len(flat)} layers are not packed: a window of {window} fits in the "
        "full-precision part"
    ]


def _bytes(tokens: int):
    return lambda part: part.bytes(tokens)


def _full(tokens: int):
    return lambda part: part.full_bytes(tokens)


def size(count: int) -> str:
    """Bytes for people, decimal units."""
    if count < 1000:
        return f"{count} B"
    for unit in ("kB", "MB", "GB", "TB"):
        count /= 1000
        if count < 999.5 or unit == "TB":
            return f"{count:.1f} {unit}" if count < 100 else f"{count:.0f} {unit}"
    raise AssertionError


def seen(caches: list[Any]) -> int:
    """Tokens that the caches of ours have seen."""
    return max((cache.seen for cache in ours(caches)), default=0)


def summary(model: Any, caches: list[Any]) -> str:
    """After a generation: tokens seen and stored, bytes, and what full precision would take."""
    flat = parts(model, caches)
    count = seen(caches)
    stored = max((cache.size() for cache in ours(caches)), default=0)
    tokens = f"{count:,} tokens seen" + (f", {stored:,} stored" if stored != count else "")
    now = sum(cache.nbytes for cache in ours(caches))
    now += sum(p.bytes(count) for p in flat if not p.ours)
    full = sum(p.full_bytes(count) for p in flat)
    return f"KV cache: {tokens}, {size(now)} (full precision: {size(full)})"
