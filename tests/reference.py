"""A plain reference for the caches: dense float64 arrays and an explicit mask.

Nothing here knows rings, groups' slots or packing. A cache is driven as a model drives it
(`step`), and what it holds is read through its own dense arrays (`stored`), so that quantised
storage is compared with what it stands for.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st
from mlx_lm.models.base import scaled_dot_product_attention
from storage import basis_of, half_step, random_balance

from conformance import common
from conformance.common import allowed, shown
from mlx_kivi import KVCacheConfig, QuantizedStreamingCache, hooks
from mlx_kivi.cache.attention import CacheHandle
from mlx_kivi.cache.basis import Balance
from mlx_kivi.config import BITS

EPS = {mx.float16: 2**-11, mx.bfloat16: 2**-8, mx.float32: 2**-24}

# Policies and prompts cut into calls, for hypothesis

some_bits = st.sampled_from([None, *BITS])
policies = st.builds(
    KVCacheConfig,
    k_bits=some_bits,
    v_bits=some_bits,
    group_size=st.sampled_from([32, 32, 64]),
    residual_length=st.sampled_from([0, 1, 32]) | st.integers(0, 70),
    sink=st.integers(0, 9),
    window=st.none() | st.integers(1, 30) | st.integers(31, 200),
    balanced=st.booleans(),
)
# Of a random `Balance`, see `new_cache`; None leaves keys as they are.
seeds = st.none() | st.integers(0, 2)
bounds = st.builds(
    KVCacheConfig,
    sink=st.integers(0, 9),
    window=st.none() | st.integers(1, 12) | st.integers(13, 99),
)
lengths = st.just(1) | st.integers(1, 12) | st.integers(13, 150)
splits = st.lists(lengths, min_size=1, max_size=14)


@contextmanager
def hooked() -> Iterator[None]:
    """mlx_lm's attention takes our handles inside."""
    holder = object()
    hooks.attention.hold(holder)
    try:
        yield
    finally:
        hooks.attention.release(holder)


def dense(x: mx.array) -> np.ndarray:
    """Any float array as float64."""
    return np.array(x.astype(mx.float32)).astype(np.float64)


# What a query may see


def as_rule(mask: mx.array | str | None, rows: int, columns: int) -> np.ndarray:
    """What a mask of mlx_lm means: boolean, [rows, columns]."""
    if mask is None:
        return np.ones((rows, columns), bool)
    if isinstance(mask, str):
        assert mask == "causal"
        return np.tri(rows, columns, columns - rows, dtype=bool)
    return np.array(mask)


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    mask: np.ndarray,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Attention written out: q [B, Hq, L, D], k and v [B, H, T, ·], mask boolean or additive."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat(repeats, axis=1), v.repeat(repeats, axis=1)
    bias = np.where(mask, 0.0, -np.inf) if mask.dtype == bool else mask
    scores = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5 + bias
    top = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks[None, :, None, None])
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[None, :, None, None] - top)
    return weights / total @ v


# Driving a cache


@dataclass
class Stream:
    """Random queries [B, H·repeats, T, Dk], keys [B, H, T, Dk] and values [B, H, T, Dv]."""

    length: int
    heads: int = 1
    repeats: int = 1
    k_dim: int = 32
    v_dim: int = 32
    batch: int = 1
    dtype: mx.Dtype = mx.float32
    seed: int = 0
    q: mx.array = field(init=False)
    k: mx.array = field(init=False)
    v: mx.array = field(init=False)

    def __post_init__(self) -> None:
        key = mx.random.key(self.seed)
        sizes = (self.heads * self.repeats, self.k_dim), (self.heads, self.k_dim)
        parts = []
        for (heads, dim), one in zip(
            (*sizes, (self.heads, self.v_dim)), mx.random.split(key, 3), strict=True
        ):
            x = mx.random.normal((self.batch, heads, self.length, dim), key=one)
            parts.append(x.astype(self.dtype))
        self.q, self.k, self.v = parts

    def redraw(self, begin: int) -> None:
        """Other tokens from position ``begin`` on."""
        other = replace(self, seed=self.seed + 1)
        for which in ("q", "k", "v"):
            parts = getattr(self, which)[:, :, :begin], getattr(other, which)[:, :, begin:]
            setattr(self, which, mx.concatenate(parts, axis=2))
        self.seed += 1

    def cut(self, begin: int, end: int) -> tuple[mx.array, mx.array, mx.array]:
        return tuple(x[:, :, begin:end] for x in (self.q, self.k, self.v))


def new_cache(
    config: KVCacheConfig, stream: Stream, packed: bool = True, seed: int | None = None
) -> QuantizedStreamingCache:
    """A cache for these heads, with a random `Balance` if there is a seed."""
    cache = QuantizedStreamingCache(config, packed_attention=packed)
    if seed is not None:
        cache.balance = random_balance(stream.heads, stream.k_dim, seed)
    return cache


def step(
    cache: Any, stream: Stream, begin: int, end: int, sinks: mx.array | None = None
) -> mx.array:
    """One call of a model's attention layer on tokens [begin, end) of a stream."""
    q, k, v = stream.cut(begin, end)
    mask = cache.make_mask(end - begin, window_size=None, return_array=False)
    keys, values = cache.update_and_fetch(k, v)
    scale = stream.k_dim**-0.5
    out = scaled_dot_product_attention(q, keys, values, cache, scale, mask, sinks)
    mx.eval(out)
    return out


def run(cache: Any, stream: Stream, chunks: list[int], begin: int = 0) -> list[mx.array]:
    """The outputs of several calls, one after the other."""
    outputs = []
    for length in chunks:
        outputs.append(step(cache, stream, begin, begin + length))
        begin += length
    return outputs


def arrays_in(cache: QuantizedStreamingCache) -> list[mx.array]:
    """Every array that a cache reaches, once each, but for its `Balance`: that is the model's."""
    of_the_model = {id(x) for x in common.arrays_in(cache.balance)}
    return [x for x in common.arrays_in(cache) if id(x) not in of_the_model]


def stored(
    cache: QuantizedStreamingCache, rows: int = 1
) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """What the ``rows`` queries of the last call saw: [(queries, keys, values)], dense.

    Row by row where they are handed what each of them may see.
    """
    keys, values = cache.keys_and_values()
    if isinstance(keys, CacheHandle):
        view = keys.view
        return [(1, *(dense(view.dense(which, row)) for which in range(2))) for row in range(rows)]
    return [(rows, dense(keys), dense(values))]


# What a cache should hold


class Model:
    """What a cache should hold, token by token, and what its queries should get.

    Content starts as the tokens themselves. Once a whole group has left the residual, it may
    change, one time, by half a step in the basis of its store: that is quantisation. From then on
    it is frozen.
    """

    def __init__(
        self, config: KVCacheConfig, stream: Stream, balance: Balance | None = None
    ) -> None:
        self.config, self.stream, self.balance = config, stream, balance
        self.offset = self.peak = 0  # tokens now, and at the most so far
        storage = stream.dtype if config.dtype is None else getattr(mx, config.dtype)
        # Coarsest float type that a value passes through on its way out.
        self.eps = max(EPS[storage], EPS[stream.dtype])
        self.storage = storage
        self.tokens = [np.zeros(x.shape) for x in (stream.k, stream.v)]
        self.content = [x.copy() for x in self.tokens]
        self.packed = [np.zeros(stream.length, bool) for _ in range(2)]
        # What trims left of groups that may have been packed: where, and their half steps then.
        self.returned = np.zeros(stream.length, bool)
        self.bound = [x.copy() for x in self.tokens]
        self.take_tokens()

    def take_tokens(self) -> None:
        """What is still to come, rounded as it will be stored."""
        for which, x in enumerate((self.stream.k, self.stream.v)):
            rounded = dense(x.astype(self.storage).astype(self.stream.dtype))
            self.tokens[which][:, :, self.offset :] = rounded[:, :, self.offset :]
            self.content[which][:, :, self.offset :] = rounded[:, :, self.offset :]

    def copy(self) -> Model:
        twin = copy.copy(self)
        twin.stream = copy.copy(self.stream)
        for name in ("tokens", "content", "packed", "bound"):
            setattr(twin, name, [x.copy() for x in getattr(self, name)])
        twin.returned = self.returned.copy()
        return twin

    def append(self, cache: QuantizedStreamingCache, rows: int) -> None:
        """Feed the next tokens to a cache, and compare what the call holds and returns."""
        begin = self.offset
        out = step(cache, self.stream, begin, begin + rows)
        self.offset += rows
        self.peak = max(self.peak, self.offset)
        assert cache.offset == self.offset
        positions = shown(begin, rows, self.config.sink, self.config.window)
        for queries, *held in stored(cache, rows):
            self._check_rows(held, out[:, :, :queries], begin, positions)
            out, begin = out[:, :, queries:], begin + queries
        assert begin == self.offset

    def _check_rows(
        self, held: list[np.ndarray], out: mx.array, begin: int, positions: np.ndarray
    ) -> None:
        end = begin + out.shape[2]
        sink, window = self.config.sink, self.config.window
        for which, one in enumerate(held):
            assert one.shape[2] == len(positions)
            self._accept(which, one, positions, begin)
        mask = allowed(np.arange(begin, end), np.arange(end), sink, window)
        q = dense(self.stream.q[:, :, begin:end])
        expected = attention(q, *(x[:, :, :end] for x in self.content), mask)
        atol = 1e-5 if self.config.quantized else 3e-6
        if self.eps != EPS[mx.float32]:
            atol = 8 * self.eps  # of the result, or of storage that dense arrays are rounded to
        np.testing.assert_allclose(dense(out), expected, rtol=0, atol=atol)

    def _accept(self, which: int, held: np.ndarray, positions: np.ndarray, begin: int) -> None:
        content, tokens, sink = self.content[which], self.tokens[which], self.config.sink
        bits = (self.config.k_bits, self.config.v_bits)[which]
        # Groups that a trim has opened may still have their tokens in full precision.
        intact = (held == tokens[:, :, positions]).all(axis=(0, 1, 3))
        intact = positions[intact & ~self.packed[which][positions]]
        content[:, :, intact] = tokens[:, :, intact]
        changed = (held != content[:, :, positions]).any(axis=(0, 1, 3))
        if (self.config.moves_keys, self.config.moves_values)[which]:
            # Unpacked by a product, whose last bit depends on how many tokens it is of.
            off = np.abs(held - content[:, :, positions])
            same = off <= 2 * self.eps * np.abs(content[:, :, positions]) + 4e-6
            changed &= ~(same.all(axis=(0, 1, 3)) & self.packed[which][positions])
        moved = positions[changed]
        if not len(moved):
            return
        assert bits is not None, f"position {moved[0]} changed in a store of full precision"
        assert not self.packed[which][moved].any(), "packed tokens changed again"
        assert moved.min() >= sink, f"sink {moved[0]} is quantised"
        ends = sink + ((moved - sink) // self.config.group_size + 1) * self.config.group_size
        due = ends <= begin - self.config.residual_length
        assert (due | self.returned[moved]).all(), f"the residual before {begin} is quantised"
        basis, _ = self._basis(which)
        error = np.abs((held[:, :, changed] - content[:, :, moved]) @ basis)
        size = np.abs(tokens[:, :, moved]) @ np.abs(basis)
        limit = self._half_steps(which)[:, :, moved] * 1.05 + self.eps * size + 1e-6
        assert (error <= limit).all(), f"off by {(error - limit).max()} more than half a step"
        content[:, :, moved] = held[:, :, changed]
        self.packed[which][moved[due]] = True

    def _basis(self, which: int) -> tuple[np.ndarray, np.ndarray]:
        _, heads, _, dim = self.tokens[which].shape
        return basis_of(self.config, which, heads, dim, self.balance)

    def _half_steps(self, which: int) -> np.ndarray:
        """The widest that a group can have: of its content, of its tokens, or before a trim.

        In the basis of the store, as `bound` is.
        """
        basis, levels = self._basis(which)
        both = [x[which][:, :, : self.offset] @ basis for x in (self.content, self.tokens)]
        steps = [half_step(self.config, which, x, self.config.sink, levels) for x in both]
        return np.maximum(np.maximum(*steps), self.bound[which][:, :, : self.offset])

    def trimmed(self, n: int) -> None:
        """The cache has forgotten the last n tokens; others will follow."""
        if n <= 0:
            return
        kept = self.offset - n
        self.returned[: self._groups_end()] = True
        self.returned[kept:] = False
        for which in range(2):
            self.bound[which][:, :, : self.offset] = self._half_steps(which)
            self.bound[which][:, :, kept:] = 0
        self.offset = kept
        self.stream.redraw(kept)
        self.take_tokens()
        recent = self.config.residual_length + self.config.group_size
        for packed in self.packed:
            packed[max(0, kept - recent) :] = False  # open again

    def _groups_end(self) -> int:
        """Where the last group ends that may be packed by now."""
        config = self.config
        full = max(0, self.offset - config.sink - config.residual_length)
        return config.sink + full // config.group_size * config.group_size


def follow(cache: QuantizedStreamingCache, stream: Stream, chunks: list[int]) -> Model:
    """Drive a cache and compare every call with the model of it."""
    model = Model(cache.config, stream, cache.balance)
    for length in chunks:
        model.append(cache, length)
    return model


# A whole model


def logits(model: Any, tokens: mx.array, caches: list[Any], calls: Sequence[int]) -> np.ndarray:
    """Logits [T, vocabulary] of tokens [1, T], fed in calls of so many, again and again."""
    rows, begin, lengths = [], 0, cycle(calls)
    while begin < tokens.shape[1]:
        end = begin + next(lengths)
        out = model(tokens[:, begin:end], cache=caches)
        rows.append(dense((out[0] if isinstance(out, tuple) else out)[0]))
        begin = end
    return np.concatenate(rows)


def random_tokens(length: int) -> mx.array:
    return mx.random.randint(0, 32, (1, length), key=mx.random.key(1))
