"""A cache as a flat list of arrays, and back.

The list is a header of bytes (JSON), then the live part of each array: ring, margin, keys' store,
values' store. It may come from a file that anyone wrote, so all of it is checked before it is used.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..config import DTYPES, KVCacheConfig
from .basis import Balance, known_balance
from .group_store import GroupStore
from .key_store import KeyStore
from .layout import Plan, can_pack, plan_for, spans
from .rotation import REBASE_BY, Rotation

_MAX_HEADER = 65_536  # bytes
_MAX_LENGTH = 2**31  # of an axis, in mlx


@dataclass(frozen=True)
class Header:
    """What is not in the arrays: the settings, and which tokens the arrays hold.

    offset: tokens seen; ring_low: oldest stream token in ring and margin; store_low: oldest group
    in the stores; dtype: the model's, None before the first token; rebased: positions not counted
    any more; rebase_at and rotation: as the cache's; packed: whether groups are packed; oldest:
    oldest stream token in the stores, where their first group has fillers; balance: name of the
    cache's `Balance`.
    """

    config: KVCacheConfig
    packed_attention: bool
    offset: int
    ring_low: int
    store_low: int
    dtype: str | None
    rebased: int = 0
    rebase_at: int | None = None
    rotation: Rotation | None = None
    packed: bool = False
    oldest: int = 0
    balance: str | None = None

    def encode(self) -> mx.array:
        text = json.dumps(asdict(self)).encode()
        return mx.array(np.frombuffer(text, dtype=np.uint8))

    @property
    def plan(self) -> Plan:
        return plan_for(self.config, self.packed)

    @property
    def ring_slots(self) -> int:
        """Slots of sinks and ring that hold tokens."""
        return self.plan.held(self.offset)

    @property
    def spares(self) -> bool:
        """Whether tokens are in the margin."""
        return self.plan.spares(self.offset)

    @property
    def store_slots(self) -> int:
        """Slots of the stores that hold groups."""
        groups, slots = self.plan.groups(self.offset), self.plan.slots
        return groups if slots is None else min(groups, slots)


def read_header(state: Sequence[Any]) -> tuple[Header, list[mx.array]]:
    """The header of a state, checked against itself, and the arrays that follow it.

    Raises:
        ValueError: one line that says what is wrong.
    """
    if not isinstance(state, list | tuple) or not all(isinstance(a, mx.array) for a in state):
        raise ValueError("the state is not a list of arrays")
    if not state or state[0].dtype != mx.uint8 or not 0 < state[0].size <= _MAX_HEADER:
        raise ValueError("the state has no header")
    try:
        fields = json.loads(bytes(np.array(state[0])))
        rotation = fields.get("rotation")
        rotation = None if rotation is None else Rotation(**rotation)
        # Before there was a choice, keys and values were packed as they are.
        config = KVCacheConfig(**{"balanced": False, **fields["config"]})
        first = "packed" not in fields  # version 0.1.0
        packed = can_pack(config) if first else fields["packed"]
        header = Header(**{**fields, "config": config, "rotation": rotation, "packed": packed})
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"the header is broken ({error})") from None
    _check_header(header)
    arrays = list(state[1:])
    if first:
        arrays = _with_margin(header, arrays)
    return header, arrays if "balance" in fields else _with_pairs(header, arrays)


def _with_pairs(header: Header, arrays: list[mx.array]) -> list[mx.array]:
    """Arrays of before there were bases, when scales and zeros of keys were apart."""
    scales, zeros = 3, 4  # after ring and words: no cache has both packed groups and a margin
    if not header.store_slots or not header.config.k_bits or len(arrays) <= zeros:
        return arrays
    pair = [arrays[scales], arrays[zeros]]
    if pair[0].ndim != 4 or pair[0].shape != pair[1].shape or pair[0].dtype != pair[1].dtype:
        raise ValueError(f"scales are {pair[0].shape}, zeros {pair[1].shape}")
    return [*arrays[:scales], mx.concatenate(pair, axis=2), *arrays[zeros + 1 :]]


def _with_margin(header: Header, arrays: list[mx.array]) -> list[mx.array]:
    """Arrays of version 0.1.0, which kept the margin of an unpacked window in the ring."""
    plan, stream = header.plan, header.offset - header.plan.sink
    if plan.margin == 0 or stream <= plan.ring or len(arrays) < 2:
        return arrays
    size = plan.kept
    if any(x.ndim != 4 or x.shape[2] != plan.sink + min(stream, size) for x in arrays[:2]):
        raise ValueError(f"recent keys are {arrays[0].shape}, values {arrays[1].shape}")

    def slots(start: int, stop: int, ring: int) -> np.ndarray:
        """Where stream tokens [start, stop) were, in their order in a ring of so many."""
        was = np.zeros(ring, dtype=np.int64)
        for j, slot, count in spans(max(0, start), stop, ring):
            was[slot : slot + count] = plan.sink + np.arange(j, j + count) % size
        return was

    ring = np.concatenate([np.arange(plan.sink), slots(stream - plan.ring, stream, plan.ring)])
    margin = slots(stream - plan.kept, plan.spared(stream), plan.margin)
    pairs = [[x[:, :, mx.array(index)] for x in arrays[:2]] for index in (ring, margin)]
    return [*pairs[0], *pairs[1], *arrays[2:]]


def _check_header(header: Header) -> None:
    plan = header.plan
    for name in ("offset", "ring_low", "store_low", "rebased", "oldest"):
        value = getattr(header, name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MAX_LENGTH:
            raise ValueError(f"{name} is {value!r}")
    limit = header.rebase_at
    if limit is not None and (type(limit) is not int or limit < REBASE_BY or not header.rotation):
        raise ValueError(f"rebase_at is {limit!r}")
    if header.rebased > (header.offset if limit else 0):
        raise ValueError(f"rebased is {header.rebased} after {header.offset} tokens")
    if not isinstance(header.packed_attention, bool):
        raise ValueError(f"packed_attention is {header.packed_attention!r}")
    if not isinstance(header.packed, bool) or header.packed > can_pack(header.config):
        raise ValueError(f"packed is {header.packed!r}")
    if header.dtype not in DTYPES and (header.offset or header.dtype is not None):
        raise ValueError(f"dtype is {header.dtype!r}")
    ring = 0 if plan.keeps_all else plan.ring
    sizes = (plan.sink, ring, (plan.slots or 0) * plan.group, header.config.protect_first)
    if max(sizes) >= _MAX_LENGTH:
        raise ValueError("a size in the settings is too large for an array")

    # What the next query may see has to be there.
    stream, groups = max(0, header.offset - plan.sink), plan.groups(header.offset)
    low, packed = plan.first_visible(header.offset) - plan.sink, groups * plan.group
    if header.ring_low > min(stream, max(packed, low)) or stream - header.ring_low > plan.kept:
        raise ValueError(f"ring_low is {header.ring_low} after {header.offset} tokens")
    in_store = groups if plan.slots is None else plan.slots
    if header.store_low > groups or groups - header.store_low > in_store:
        raise ValueError(f"store_low is {header.store_low} after {header.offset} tokens")
    if low < packed and low // plan.group < header.store_low:
        raise ValueError(f"store_low is {header.store_low} after {header.offset} tokens")
    if not isinstance(header.balance, str | None):
        raise ValueError(f"balance is {header.balance!r}")
    if header.balance is not None and not header.config.moves_keys:
        raise ValueError(f"balance is {header.balance!r}, though keys are stored as they are")
    if header.oldest > low:
        raise ValueError(f"oldest is {header.oldest} after {header.offset} tokens")


def read_ring(header: Header, arrays: Sequence[mx.array], step: int) -> tuple[mx.array, mx.array]:
    """Keys and values of the ring [B, H, slots, D], with room to grow by ``step`` tokens.

    Raises:
        ValueError: if there are no two arrays of the shape and type that the header asks for.
    """
    if len(arrays) < 2:
        raise ValueError("the arrays of sinks and recent tokens are missing")
    keys, values = arrays[:2]
    stored = header.config.dtype
    # Values may be of another type than keys, whose type is the model's.
    types = ((stored or header.dtype,), (stored,) if stored else DTYPES)
    for name, x, dtypes in zip(("keys", "values"), (keys, values), types, strict=True):
        shape_fits = x.ndim == 4 and x.shape[2] == header.ring_slots and min(x.shape[:2]) > 0
        if not shape_fits or dtype_name(x.dtype) not in dtypes:
            raise ValueError(f"recent {name} are {x.shape} of {dtype_name(x.dtype)}")
    if keys.shape[0] != values.shape[0] or keys.shape[3] == 0:
        raise ValueError(f"recent keys are {keys.shape}, values {values.shape}")
    if header.rotation and header.rotation.dims > keys.shape[3]:
        raise ValueError(f"recent keys are {keys.shape}, {header.rotation.dims} channels turn")
    total = header.plan.full_room(header.offset, step)
    return _padded(keys, total), _padded(values, total)


def read_balance(header: Header, ring: Sequence[mx.array]) -> Balance | None:
    """The basis that the header names, None if it names none.

    Args:
        ring: Keys and values [B, H, ·, D], of any shape before the first token.

    Raises:
        ValueError: if it is in no cache or model of this process, or is not for such keys.
    """
    if header.balance is None:
        return None
    found = known_balance(header.balance)
    if found is None:
        raise ValueError(
            f"its keys are in a basis ({header.balance[:40]!r}) that is not at hand: save with "
            "mlx_kivi.save_prompt_cache, which keeps it in the file"
        )
    if header.offset:
        check_balance(found, ring[0])
    return found


def check_balance(balance: Balance, keys: mx.array) -> None:
    """Raises ValueError if a basis is not for keys [B, H, ·, D]."""
    heads, dim, _ = balance.matrix.shape
    if (heads, dim) != (keys.shape[1], keys.shape[3]):
        raise ValueError(
            f"keys of {keys.shape[1]} heads, head size {keys.shape[3]}, do not fit their basis, "
            f"of {heads} heads, head size {dim}: use the model that the cache was made with"
        )


def read_margin(
    header: Header, ring: Sequence[mx.array], arrays: list[mx.array]
) -> tuple[tuple[mx.array, mx.array] | None, list[mx.array]]:
    """Keys and values of the margin [B, H, margin, D], None if it is empty, and what follows.

    Raises:
        ValueError: if they are not of the ring's heads and type.
    """
    if not header.spares:
        return None, arrays
    want = [((*x.shape[:2], header.plan.margin, x.shape[3]), x.dtype) for x in ring]
    got = [(x.shape, x.dtype) for x in arrays[:2]]
    if got != want:
        raise ValueError(f"evicted tokens are {got}, expected {want}")
    return (arrays[0], arrays[1]), arrays[2:]


def read_stores(
    header: Header,
    stores: Sequence[GroupStore],
    ring: Sequence[mx.array],
    arrays: Sequence[mx.array],
) -> None:
    """Fill empty stores with all of ``arrays``, as many slots as the cache had.

    Args:
        stores: For keys and for values, with bits and group size set.
        ring: Keys and values [B, H, ·, D] that fix heads, head sizes and type.

    Raises:
        ValueError: if one array is missing, too many, or of another shape or type.
    """
    plan, slots = header.plan, header.store_slots
    rest = list(arrays)
    if slots:
        capacity = plan.room(slots)
        for store, like in zip(stores, ring, strict=True):
            want = _shapes(store, slots, like)
            got = [(a.shape, a.dtype) for a in rest[: len(want)]]
            if got != want:
                raise ValueError(f"packed arrays are {got}, expected {want}")
            rest = store.restore(rest, like.shape[3], like.dtype)
            store.reserve(capacity, like)
    if rest:
        raise ValueError(f"{len(rest)} arrays too many")


def live_arrays(store: GroupStore, slots: int, like: mx.array) -> list[mx.array]:
    """The arrays of a store, cut to its first ``slots`` slots; later writes don't change them."""
    whole = store.live_arrays()
    shapes = [shape for shape, _ in _shapes(store, slots, like)]
    return [a[tuple(slice(n) for n in s)] for a, s in zip(whole, shapes, strict=True)]


def _shapes(store: GroupStore, slots: int, like: mx.array) -> list[tuple[tuple, mx.Dtype]]:
    """Shape and type of each array of a store with ``slots`` slots."""
    twin = store.emptied()
    twin.reserve(slots, like)
    shapes = [(a.shape, a.dtype) for a in twin.live_arrays()]
    if isinstance(store, KeyStore) and store.has_shift(like.dtype):
        shapes.append(((*like.shape[:2], 1, like.shape[3]), mx.float32))
    return shapes


def dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def _padded(x: mx.array, length: int) -> mx.array:
    more = length - x.shape[2]
    return x if more == 0 else mx.pad(x, [(0, 0), (0, 0), (0, more), (0, 0)])
