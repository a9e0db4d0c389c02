"""The cache of one layer: sinks, packed groups, recent tokens; KIVI and StreamingLLM together.

    [ sinks, full precision | packed groups of G tokens | recent tokens, full precision ]

Here is what mlx_lm asks of a cache; `cache.buffers` holds the arrays and moves tokens through them.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from . import hooks
from .batch_cache import BatchCache
from .cache.attention import CacheHandle
from .cache.basis import Balance
from .cache.reading import Reading
from .cache.rotation import Rotation, rebased_by
from .cache.state import (
    Header,
    check_balance,
    dtype_name,
    live_arrays,
    read_balance,
    read_header,
    read_margin,
    read_ring,
    read_stores,
)
from .config import TRIM_MARGIN, KVCacheConfig


class QuantizedStreamingCache(Reading):
    """A drop-in for `mlx_lm.models.cache.KVCache`, packed and bounded as a policy says.

    What a query at position p sees is the sinks and the positions in (p - window, p], however
    the tokens were split into calls. ``offset`` is the position of the next token, ``seen`` the
    count of tokens: the same until the cache re-bases (see `cache.rotation`).

    Args:
        config: The policy. Default: int8, no window.
        packed_attention: Whether the model hands what it fetches straight to mlx_lm's
            `scaled_dot_product_attention`. Then, while that is hooked (see `hooks`), it gets
            handles on packed data; otherwise, plain arrays.
    """

    def __init__(
        self, config: KVCacheConfig | None = None, *, packed_attention: bool = False
    ) -> None:
        self.config = config if config is not None else KVCacheConfig.from_name("int8")
        self.packed_attention = packed_attention
        # How the model's keys turn, and the position at which to re-base; the factory knows.
        self.rotation: Rotation | None = None
        self.rebase_at: int | None = None
        # Whether the model can compute several rows of unequal length.
        self.batches = True
        # What the layer's keys are like, if that was measured: a property of the model.
        self.balance: Balance | None = None
        self.reset()

    # Append and fetch

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append keys [B, H, L, D_k] and values [B, H, L, D_v]; return all that L queries see.

        Returns:
            Keys and values in order of position, as arrays or as `CacheHandle`.

        Raises:
            ValueError: if batch, heads or head sizes differ from what is stored, or if the policy
                re-positions and the model's RoPE or mlx_lm's hooked attention is missing.
        """
        self.append(keys, values)
        return self.keys_and_values()

    def append(self, keys: mx.array, values: mx.array) -> None:
        """The first half of `update_and_fetch`."""
        self._append(keys, values, self._check(keys, values))
        if self.rebase_at is not None:
            # The next call counts from less; stored keys are turned when it comes, since some
            # models read this call's keys again.
            by = rebased_by(self.offset, self.rebase_at)
            self._rebased += by
            self._to_turn += by

    def _append(self, keys: mx.array, values: mx.array, length: int) -> None:
        self._settle()
        if self.empty():
            self._allocate(keys, values)
        self._queries = length
        ring, plan = self._ring, self.plan
        stored = keys.astype(ring[0].dtype), values.astype(ring[1].dtype)
        if length != 1 and not plan.keeps_all:
            self._grow(self._count)
            self._chunk = stored
        else:
            slot = self._count
            self._grow(slot + length)
            if slot >= plan.sink and not plan.keeps_all:
                stored = self._spared(slot - plan.sink, stored)
                slot = plan.sink + (slot - plan.sink) % plan.ring
            self._write_ring(slot, slot + length, stored)
        self._count += length
        if 1 < length <= TRIM_MARGIN and self.packed_attention:
            groups = self.plan.groups(self._count - 1)  # what a step for the last row would find
            if groups > self._groups:
                self._pack(groups)

    def keys_and_values(self) -> tuple[Any, Any]:
        """What the last `update_and_fetch` returned, again.

        Raises:
            ValueError: if nothing has been stored yet.
        """
        if self.empty():
            raise ValueError("the cache is empty: call update_and_fetch first")
        view = self.view()
        shot = view.snapshot
        hidden = shot.groups > 0 or (shot.chunk == 0 and not shot.linear)
        apart = view.moved or (hidden and shot.queries <= TRIM_MARGIN)
        if apart and self.packed_attention and hooks.attention_hooked():
            return CacheHandle(view, 0), CacheHandle(view, 1)
        return view.dense(0), view.dense(1)

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """The mask for the next N tokens over what `update_and_fetch` will return for them.

        Args:
            N: Tokens in the next call.
            window_size: A window of the model's own, besides the policy's.
            return_array: Never return "causal".

        Returns:
            None, "causal", or a boolean array [N, length].
        """
        first, window = self._count, self.plan.window
        cut, narrowed = self.cuts(N), self.narrows(N, window_size)
        if N == 1 and not narrowed:
            return None
        if not (cut or narrowed or return_array):
            return "causal"
        positions = self.columns(N)
        # Counted from the first query: a stream may be longer than int32 counts.
        k = mx.array(np.maximum(positions - first, -(2**30)).astype(np.int32))[None]
        q = mx.arange(N)[:, None]
        mask = k <= q
        if cut and window is not None:
            mask = mask & ((k > q - window) | mx.array(positions < self.plan.sink))
        if narrowed and window_size is not None:
            mask = mask & (k > q - window_size)
        return mask

    # Size

    def size(self) -> int:
        """Tokens that the next query can attend to: sinks and window at the most."""
        if self.plan.window is None:
            return self._count
        return min(self._count, self.plan.sink + self.plan.window)

    @property
    def offset(self) -> int:
        """The position of the next token, for RoPE."""
        return self._count - self._rebased

    @property
    def seen(self) -> int:
        """Tokens ever seen: ``offset``, unless the positions have been counted anew."""
        return self._count

    def __bool__(self) -> bool:
        return True

    # State

    @property
    def state(self) -> list[mx.array]:
        """A flat list: a header of bytes (JSON), then what is live of every array."""
        return self._save()

    @state.setter
    def state(self, state: list[mx.array]) -> None:
        """Raises ValueError, one line, for a state that no cache can have."""
        self._load(state)

    def _save(self) -> list[mx.array]:
        self._settle()
        header = Header(
            self.config,
            self.packed_attention,
            self._count,
            self._ring_low,
            self._store_low,
            None if self.empty() else dtype_name(self._dtype),
            self._rebased,
            self.rebase_at,
            self.rotation,
            self.plan.residual is not None,
            self._oldest,
            self.balance.name if self.balance and self.config.moves_keys else None,
        )
        arrays = []
        if self._count:
            arrays = [a[:, :, : header.ring_slots] for a in self._ring]
        if header.spares:
            arrays += self._margin or self._zeros(self.plan.margin)
        if header.store_slots:
            for store, like in zip(self._stores, self._ring, strict=True):
                arrays += live_arrays(store, header.store_slots, like)
        return [header.encode(), *arrays]

    def _load(self, state: list[mx.array]) -> None:
        header, arrays = read_header(state)
        new = type(self)(header.config, packed_attention=header.packed_attention)
        new.plan = header.plan
        new.rotation, new.rebase_at = header.rotation, header.rebase_at
        new._count = header.offset
        new._rebased = header.rebased
        new._groups = new.plan.groups(header.offset)
        new._ring_low = header.ring_low
        new._store_low = header.store_low
        new._oldest = header.oldest
        if header.dtype is not None and header.offset:
            new._dtype = getattr(mx, header.dtype)
            new._ring = read_ring(header, arrays, new.step)
            new._margin, arrays = read_margin(header, new._ring, arrays[2:])
        new.balance = read_balance(header, new._ring)
        if not new.empty():
            new._stores = new._new_stores(new._ring[1])
            read_stores(header, new._stores, new._ring, arrays)
        self.__dict__ = new.__dict__  # all or nothing

    @property
    def meta_state(self) -> str:
        """Nothing: mlx_lm up to 0.31 keeps settings here, we keep them in ``state``."""
        return ""

    @meta_state.setter
    def meta_state(self, value: Any) -> None:
        pass

    @classmethod
    def from_state(cls, state: list[mx.array], meta_state: Any = None) -> QuantizedStreamingCache:
        cache = cls.__new__(cls)
        cache.state = state
        return cache

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedStreamingCache:
        """An independent cache; arrays are shared until one of the two is written to."""
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    # For mlx_lm's batches and its ``kv_bits``.

    @property
    def merge(self) -> Callable[[list[Any]], BatchCache]:
        """``merge(caches)``: a batch of them, where there can be one."""
        if not self._mergeable():
            raise AttributeError("this cache does not go into a batch")
        return BatchCache.merge

    def _mergeable(self) -> bool:
        return self.batches

    def kind(self) -> tuple[Any, ...]:
        """What rows have in common that share arrays."""
        keys, values = self._ring
        shapes = keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, self._dtype
        basis = self.balance.name if self.balance else None
        return type(self), self.config, self.plan, shapes, basis, self.rotation, self.rebase_at

    def is_due(self) -> bool:
        near = self.rebase_at is not None and self.offset + 1 >= self.rebase_at
        return near or super().is_due()

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> QuantizedStreamingCache:
        """The same tokens, packed: what mlx_lm replaces a cache by for its ``kv_bits``.

        Sinks, window and ``offset`` stay as they are. A cache that is packed already, as its
        policy says, is returned itself; a warning says so if that has other bits.

        Raises:
            ValueError: for bits or a group size that there is no packing for.
        """
        config = self.config.replace(k_bits=bits, v_bits=bits, group_size=group_size)
        if not self.config.quantized:
            twin = copy.deepcopy(self)
            twin._pack_by(config)
            if twin.plan.residual is None:
                why = f"a window of {config.window} takes fewer bytes unpacked"
                warnings.warn(f"mlx_kivi: kv_bits={bits} is left out, {why}", stacklevel=2)
            return twin
        if config != self.config:
            why = f"the cache's own policy packs it already ({self.config.describe()})"
            warnings.warn(f"mlx_kivi: kv_bits={bits} is left out, {why}", stacklevel=2)
        return self

    # Models tie the order of evaluation to a cache's buffers (`mx.depends`), by assignment.

    @property
    def keys(self) -> mx.array | None:
        """The full-precision buffer of keys [B, H, slots, D]: sinks and recent tokens."""
        return None if self.empty() else self._ring[0]

    @keys.setter
    def keys(self, value: mx.array) -> None:
        self._assign(0, value)

    @property
    def values(self) -> mx.array | None:
        """The same for values."""
        return None if self.empty() else self._ring[1]

    @values.setter
    def values(self, value: mx.array) -> None:
        self._assign(1, value)

    def _assign(self, which: int, value: mx.array) -> None:
        if self.empty() or value.shape != self._ring[which].shape:
            raise ValueError("assign an array of the shape of the buffer that it replaces")
        keys, values = self._ring
        self._ring = (value, values) if which == 0 else (keys, value)

    # Inside

    def _check(self, keys: mx.array, values: mx.array) -> int:
        """The number of tokens, if they can be appended."""
        if self.config.reposition:
            if self.rotation is None or self.plan.window is None or not self.packed_attention:
                raise ValueError("reposition=True: let make_prompt_cache make the model's caches")
            if not hooks.attention_hooked():
                raise ValueError("reposition=True needs mlx_lm patched: use mlx_kivi.patch()")
        k, v = keys.shape, values.shape
        if len(k) != 4 or k[:3] != v[:3]:
            raise ValueError(
                f"keys of shape {k} and values of shape {v} do not fit each "
                "other: give [batch, heads, tokens, head size]"
            )
        if self.empty() and self.balance is not None and self.config.moves_keys:
            check_balance(self.balance, keys)
        if not self.empty():
            for name, new, ring in zip(("keys", "values"), (k, v), self._ring, strict=True):
                old = ring.shape
                if new[:2] != old[:2] or new[3] != old[3]:
                    raise ValueError(
                        f"{name} of shape {new} do not fit a cache of batch {old[0]}, "
                        f"{old[1]} heads, head size {old[3]}"
                    )
        return k[2]
