"""Rows of a batch and what each of them gives alone, call by call."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.base import scaled_dot_product_attention
from reference import Stream, dense, new_cache

from conformance.common import arrays_in
from mlx_kivi import KVCacheConfig, QuantizedStreamingCache
from mlx_kivi.batch_cache import BatchCache

ROPE = nn.RoPE(32)


@dataclass
class Row:
    """A sequence: its tokens, its cache alone, and how many tokens that has seen."""

    stream: Stream
    cache: QuantizedStreamingCache
    seen: int = 0

    def tokens(self, n: int) -> list[mx.array]:
        """The next n queries, keys and values, at their positions if the cache knows a RoPE."""
        q, k, v = self.stream.cut(self.seen, self.seen + n)
        if self.cache.rotation is not None:
            q, k = (ROPE(x, offset=self.cache.offset) for x in (q, k))
        return [q, k, v]

    def copy(self) -> Row:
        return Row(copy.copy(self.stream), copy.deepcopy(self.cache), self.seen)


def new_row(
    config: KVCacheConfig,
    length: int,
    number: int,
    *,
    heads: tuple[int, int] = (2, 2),
    packed: bool = True,
    seed: int | None = None,
) -> Row:
    """An empty row, with the ``number``-th stream of tokens."""
    stream = Stream(length, *heads, seed=1000 * number)
    return Row(stream, new_cache(config, stream, packed, seed))


def batch_of(rows: Sequence[Row]) -> BatchCache:
    return BatchCache.merge([row.cache for row in rows])


def attend(
    cache: Any,
    tokens: Sequence[mx.array],
    sinks: mx.array | None = None,
    window: int | None = None,
    additive: bool = False,
) -> mx.array:
    """One call of a model's attention layer."""
    q, k, v = tokens
    mask = cache.make_mask(q.shape[2], window_size=window, return_array=additive)
    if additive and isinstance(mask, mx.array):
        mask = mx.where(mask, 0.0, -mx.inf)
    keys, values = cache.update_and_fetch(k, v)
    out = scaled_dot_product_attention(q, keys, values, cache, q.shape[3] ** -0.5, mask, sinks)
    mx.eval(out)
    return out


def call(
    batch: Any,
    rows: Sequence[Row],
    lengths: Sequence[int] | None = None,
    *,
    padding: float = 9.0,
    atol: float = 1e-5,
    **kwargs: Any,
) -> mx.array:
    """Each row's next tokens, padded on the right; what comes out is compared with the rows alone.

    Args:
        lengths: Tokens of each row. Default: one each.
        padding: What stands behind them, in queries, keys and values.
        kwargs: Of `attend`.
    """
    lengths = lengths or [1] * len(rows)
    longest = max(lengths)
    parts = []
    for row, n in zip(rows, lengths, strict=True):
        pad = [(0, 0), (0, 0), (0, longest - n), (0, 0)]
        parts.append([mx.pad(x, pad, constant_values=padding) for x in row.tokens(n)])
    out = attend(batch, [mx.concatenate(x) for x in zip(*parts, strict=True)], **kwargs)
    for i, (row, n) in enumerate(zip(rows, lengths, strict=True)):
        if n:
            want = attend(row.cache, row.tokens(n), **kwargs)
            got, message = dense(out[i : i + 1, :, :n]), f"row {i} after {row.seen} tokens"
            np.testing.assert_allclose(got, dense(want), rtol=0, atol=atol, err_msg=message)
            row.seen += n
    return out


def prompt(
    batch: Any,
    rows: Sequence[Row],
    lengths: Sequence[int],
    chunk: int = 64,
    **kwargs: Any,
) -> None:
    """So many tokens of each row in calls of ``chunk``, as mlx_lm feeds prompts."""
    longest = max(lengths)
    batch.prepare(lengths=list(lengths), right_padding=[longest - n for n in lengths])
    for begin in range(0, longest, chunk):
        width = min(chunk, longest - begin)
        here = [min(max(n - begin, 0), width) for n in lengths]
        if max(here) < width:
            raise AssertionError("the longest row fills every call")
        call(batch, rows, here, **kwargs)
    batch.finalize()


def same(a: Any, b: Any) -> bool:
    """Whether two states are equal, bit by bit."""
    left, right = ([*arrays_in(x)] for x in (a, b))
    return len(left) == len(right) and all(
        x.shape == y.shape and x.dtype == y.dtype and mx.array_equal(x, y).item()
        for x, y in zip(left, right, strict=True)
    )


def check(batch: BatchCache, rows: Sequence[Row]) -> None:
    """Each row is in the batch what it is alone, and the batch says so."""
    assert len(batch) == len(rows) and batch
    assert batch.offset.tolist() == [row.cache.offset for row in rows]
    assert batch.size() == max((row.cache.size() for row in rows), default=0)
    assert batch.empty() == all(row.cache.empty() for row in rows)
    for i, row in enumerate(rows):
        taken = batch.extract(i)
        assert type(taken) is type(row.cache) and taken.seen == row.seen
        # A copy: what is saved is placed first, and forgotten tokens then leave other traces.
        alone = copy.deepcopy(row.cache)
        assert same(taken.state, alone.state), f"row {i} of {len(rows)}"
