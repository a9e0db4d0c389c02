"""What a policy does to a model's caches, in words and bytes."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, RotatingKVCache

from .cache.layout import Plan, can_pack, plan_for
from .cache.sizes import Heads, best_plan, stored_bytes
from .config import value_group
from .models.architectures import own_caches
from .models.calibration import Calibration, known
from .models.factory import NO_HANDLES, ours, why_none
from .models.latent_caches import LatentCache
from .quantized_streaming_cache import QuantizedStreamingCache

LONG = 32_768  # tokens at which costs are compared
_FED = 256  # tokens after which, and after twice as many, an unknown cache is measured
_KINDS = (KVCache, RotatingKVCache, ChunkedKVCache)  # of mlx_lm, whose growth is known

Growth = tuple[float, int]  # bytes a token, and before the first
Shape = tuple[Heads | None, Growth]

# By id, for as long as a model lives: its `_mark`, and the shapes of its own caches.
_known: dict[int, tuple[int, list[Shape]]] = {}


@dataclass(frozen=True)
class Part:
    """One cache of a model, members of a `CacheList` counted singly.

    cache: ours, or the one left alone; own: what the model makes, empty; heads: None where that is
    of no kind whose growth is known; growth: as it was measured there.
    """

    cache: Any
    own: Any
    heads: Heads | None
    growth: Growth = (0.0, 0)

    @property
    def ours(self) -> bool:
        return isinstance(self.cache, QuantizedStreamingCache)

    def full_bytes(self, tokens: int) -> int:
        """Bytes of the model's own cache after ``tokens`` tokens, fed one by one.

        They are the same after a prompt in mlx_lm's steps and one token more. But a
        `RotatingKVCache` grows from the prompt's length: it holds up to 255 tokens more or less
        until it is full.
        """
        if self.heads is None:
            return round(self.growth[0] * tokens) + self.growth[1]
        return self.heads.full_bytes(_slots(self.own, tokens))

    def bytes(self, tokens: int, shared: bool = False) -> int:
        """Bytes of the cache in use after ``tokens`` tokens, alone or as a row of a bucket."""
        if not self.ours or self.heads is None:
            return self.full_bytes(tokens)
        cache, heads, balanced = self.cache, self.heads, self._balanced
        return stored_bytes(cache.config, self.plan, cache.step, heads, tokens, balanced, shared)

    @property
    def plan(self) -> Plan:
        """The sizes of a cache of ours: an empty one has yet to find whether packing pays."""
        if self.heads is None or not self.cache.empty():
            return self.cache.plan
        return best_plan(self.cache.config, self.heads, self._balanced)

    @property
    def _balanced(self) -> bool:
        return self.cache.balance is not None

    def step_bytes(self, tokens: int) -> int:
        """Bytes that a step at ``tokens`` tokens takes beside what is held, 0 if it unpacks none.

        What is not read packed is unpacked while its layer runs: two copies in float32 and, but
        for the latents of a `LatentCache`, the array that the model gets.
        """
        if not self.ours or self.heads is None or self.cache.packed_attention:
            return 0
        if not self.plan.groups(tokens):
            return 0
        floats = 2 * mx.float32.size
        arrays = floats + self.heads.dtype.size
        of_keys = arrays
        if self._latents(tokens):
            of_keys = 0 if self.reads_latents_packed(tokens) else floats
        each = self.heads.key_dim * of_keys + self.heads.value_dim * arrays
        return self.heads.count * each * self.seen(tokens)

    def reads_latents_packed(self, tokens: int) -> bool:
        """Whether a step at ``tokens`` tokens unpacks the positional part of keys alone."""
        # A CPU does so for `MAX_PACKED_ROWS` query heads at most, and no large model has so few.
        return self._latents(tokens) and mx.default_device().type == mx.gpu

    def _latents(self, tokens: int) -> bool:
        """Whether a step gets no array of latents: all are seen, none picked by an indexer."""
        limit = getattr(self.cache, "limit", None)
        few = limit is None or self.seen(tokens) <= limit
        return isinstance(self.cache, LatentCache) and few

    def seen(self, tokens: int) -> int:
        """Of so many tokens, those that a step attends to."""
        window = self.plan.window
        return tokens if window is None else min(tokens, self.plan.sink + window)

    def packed_bytes(self) -> int:
        """Bytes of a full window of ours, were it packed."""
        config = self.cache.config
        if self.heads is None:
            return 0
        plan = plan_for(config, packed=True)
        return stored_bytes(config, plan, 1, self.heads, LONG, self._balanced)


def _slots(own: Any, tokens: int) -> int:
    """Tokens that a cache of `_KINDS` has room for after ``tokens`` tokens, fed one by one."""
    grown = -(-tokens // own.step) * own.step
    if isinstance(own, RotatingKVCache):
        return min(grown, own.max_size)
    if not isinstance(own, ChunkedKVCache) or tokens <= own.chunk_size + 1:
        return grown
    # Cut to the chunk, it takes a step for the next token; mlx-lm 0.31 cuts a whole step at once.
    by_step = not hasattr(own, "keys_and_values")
    if by_step and (tokens - own.chunk_size) % own.step != 1:
        return own.chunk_size
    return own.chunk_size + own.step


def parts(model: Any, caches: list[Any]) -> list[Part]:
    """The caches of a model with their shapes."""
    own = _leaves(own_caches(model))
    pairs = zip(_leaves(caches), own, _shapes(model), strict=True)
    return [Part(cache, mine, *shape) for cache, mine, shape in pairs]


def _leaves(caches: Iterable[Any]) -> list[Any]:
    """The caches, and in place of each `CacheList` its members."""
    flat: list[Any] = []
    for cache in caches:
        flat += _leaves(cache.caches) if hasattr(cache, "caches") else [cache]
    return flat


def _shapes(model: Any) -> list[Shape]:
    """What the model's own caches hold: built once a model, and again when its mark changes."""
    if not isinstance(model, nn.Module):
        return _built(model)
    mark = hash(tuple(_mark(model)))
    known = _known.get(id(model))
    if known is None:
        weakref.finalize(model, _known.pop, id(model), None)
    if known is None or known[0] != mark:
        known = _known[id(model)] = mark, _built(model)
    return known[1]


def _mark(node: Any) -> Iterator[Any]:
    """What the shapes of a model's keys and values follow from: its modules, and their arrays.

    It changes with ``set_dtype``, ``nn.quantize`` or LoRA.
    """
    if isinstance(node, mx.array):
        yield node.dtype
        yield node.shape
    elif isinstance(node, dict | list):
        yield type(node)
        for child in node.values() if isinstance(node, dict) else node:
            yield from _mark(child)


def _built(model: Any) -> list[Shape]:
    """The same, from forward passes that are built and never computed."""
    shapes: list[Shape] = []
    own = _leaves(_fed(model, 1))
    for cache in own:
        keys, values = getattr(cache, "keys", None), getattr(cache, "values", None)
        if type(cache) in _KINDS and isinstance(keys, mx.array) and isinstance(values, mx.array):
            heads = Heads(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
            shapes.append((heads, (0.0, 0)))
        else:
            shapes.append((None, (0.0, _own_bytes(cache))))
    unknown = [i for i, c in enumerate(own) if not (shapes[i][0] or isinstance(c, ArraysCache))]
    if unknown:
        early, late = (_leaves(_fed(model, n)) for n in (_FED, 2 * _FED))
        for i in unknown:
            first, second = _own_bytes(early[i]), _own_bytes(late[i])
            shapes[i] = None, ((second - first) / _FED, 2 * first - second)
    return shapes


def _fed(model: Any, tokens: int) -> list[Any]:
    """The model's own caches after ``tokens`` tokens."""
    own = own_caches(model)
    try:
        model(mx.zeros((1, tokens), mx.int32), cache=own)
    except Exception:  # a model that needs more than tokens: shapes stay unknown
        return own_caches(model)
    return own


def _own_bytes(own: Any) -> int:
    arrays = getattr(own, "cache", None)
    if isinstance(arrays, list):
        return sum(a.nbytes for a in arrays if a is not None)
    try:
        return own.nbytes
    except (AttributeError, NotImplementedError, TypeError):
        return 0


def describe(model: Any, caches: list[Any], tokens: int = LONG) -> str:
    """What is in force, for people: the policy, layers by kind, what a step unpacks, and bytes at
    ``tokens`` and at 32K."""
    flat = parts(model, caches)
    lines = []
    policies = Counter(p.cache.config.describe() for p in flat if p.ours)
    for policy, count in policies.items():
        lines.append(f"KV cache of {count} of {len(flat)} layers: {policy}")
    lines += unconverted(model, caches, flat=flat, tokens=tokens)
    lines += _bases(model, flat)
    lines += _regrouped(flat)
    lines += _unpacked(flat)
    lines += _in_a_step(flat, max(tokens, LONG))
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
    if all(isinstance(cache, QuantizedStreamingCache) for cache in _leaves(caches)):
        return []  # without shapes
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


def _bases(model: Any, flat: list[Part]) -> list[str]:
    """Which packed keys are in a basis of the model's own, its bytes, and why others are not."""
    found = known(model)
    own, others, latent = [], [], 0
    for i, part in enumerate(flat):
        if isinstance(part.cache, LatentCache) and part.plan.residual is not None:
            latent += (part.cache.config.k_bits or 8) < 8
        if not part.ours or not part.cache.config.moves_keys or part.plan.residual is None:
            continue
        if part.cache.balance is not None:
            own.append(part.cache.balance)
        else:
            others.append(_why_mixed(part.cache, i, found))
    lines = []
    if own:
        shared = sum({balance.name: balance.nbytes for balance in own}.values())
        lines.append(
            f"Keys of {len(own)} of {len(flat)} layers are in a basis of the model's own "
            f"({size(shared)}, once a model)"
        )
    if latent:
        lines.append(
            f"Keys of {latent} of {len(flat)} layers are packed as they are: they are latents"
        )
    for why, count in Counter(others).items():
        lines.append(f"Keys of {count} of {len(flat)} layers are packed as they are: {why}")
    return lines


def _why_mixed(cache: QuantizedStreamingCache, number: int, found: Calibration | None) -> str:
    if not cache.packed_attention:
        return NO_HANDLES
    if found is None or found.balances[number] is not None:  # it is from a file, or of no factory
        return "the cache was made without one"
    return why_none(found)


def _regrouped(flat: list[Part]) -> list[str]:
    """Values whose head size the policy's groups do not divide."""
    found: Counter[tuple[int, int, int]] = Counter()
    for p in flat:
        if p.ours and p.heads and p.heads.value_dim and p.cache.config.v_bits:
            if p.plan.residual is None:
                continue
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
    """Policies that ask for bits where the window is so small that packing it does not pay."""
    windows: dict[int, list[Part]] = {}
    for p in flat:
        if p.ours and p.cache.config.quantized and p.plan.residual is None:
            windows.setdefault(p.cache.config.window, []).append(p)
    lines = []
    for window, small in windows.items():
        why = f"a window of {window} fits in the full-precision part"
        if can_pack(small[0].cache.config):
            now, packed = sum(p.bytes(LONG) for p in small), sum(p.packed_bytes() for p in small)
            why = f"a window of {window} takes {size(now)} unpacked, {size(packed)} packed"
        lines.append(f"{len(small)} of {len(flat)} layers are not packed: {why}")
    return lines


def _in_a_step(flat: list[Part], tokens: int) -> list[str]:
    """What a step unpacks of layers that are not read packed, and takes beside what is held."""
    found = [p for p in flat if p.step_bytes(tokens)]
    if not found:
        return []
    part = all(p.reads_latents_packed(tokens) for p in found)
    what = "the positional part of " if part else ""
    most = size(max(p.step_bytes(tokens) for p in found))
    return [
        f"A step unpacks {what}{len(found)} of {len(flat)} layers, one at a time: {most} more "
        f"at {tokens:,} tokens"
    ]


def _bytes(tokens: int):
    return lambda part: part.bytes(tokens)


def _full(tokens: int):
    return lambda part: part.full_bytes(tokens)


def size(count: float) -> str:
    """Bytes for people, decimal units."""
    if count < 1000:
        return f"{count} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 999.5:
            break
    else:
        count, unit = count / 1000, "TB"
    return f"{count:.1f} {unit}" if count < 100 else f"{count:.0f} {unit}"


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
