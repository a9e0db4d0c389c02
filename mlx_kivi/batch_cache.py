"""Batches of our caches: what mlx_lm's `batch_generate`, `BatchGenerator` and server ask for.

A row in a batch is the row alone: the same tokens packed in the same groups, whatever its
neighbours hold. While prompts are fed, a batch is a list of caches, each of which takes its own of
the tokens that come, and no padding. Steps of one token each find them in shared arrays, in
buckets of rows of about one length, so that no short row is read as if it were a long one.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx

from . import hooks
from .cache.attention import attend_causal
from .cache.batch_attention import BucketsHandle, RowsHandle, masks_of
from .cache.bucket import Bucket

# Rows of at most so many tokens are of one length: less than that costs no time to read.
_SHORT = 512


class BatchCache:
    """One layer's cache of several sequences.

    Args:
        rows: A `QuantizedStreamingCache` for each. They stay as they are: the batch has copies.

    Raises:
        ValueError: if a cache is of another kind, or of more than one sequence.
    """

    def __init__(self, rows: Sequence[Any]) -> None:
        for row in rows:
            if not hasattr(row, "count_one") or not (row.empty() or row.keys.shape[0] == 1):
                raise ValueError(
                    f"a batch is made of caches of one sequence, of this package: {type(row)}"
                )
        self._rows = [copy.deepcopy(row) for row in rows]
        # Where a row's arrays are: a bucket and its number there, None if it has its own.
        self._homes: list[tuple[Bucket, int] | None] = [None] * len(rows)
        # Tokens of each row in the calls to come, before padding; None: all of them are its own.
        self._left: list[int | None] = [None] * len(rows)
        self._last: tuple[Any, Any] | None = None

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchCache:
        return cls(caches)

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchCache:
        """An independent batch; arrays are shared until one of the two is written to."""
        twin = copy.copy(self)
        twin._rows, twin._left, twin._homes = list(self._rows), list(self._left), []
        buckets = {id(home[0]): copy.deepcopy(home[0], memo) for home in self._homes if home}
        for i, home in enumerate(self._homes):
            if home is None:
                twin._rows[i] = copy.deepcopy(self._rows[i], memo)
                twin._homes.append(None)
            else:
                bucket = buckets[id(home[0])]
                twin._rows[i] = bucket.rows[home[1]]
                twin._homes.append((bucket, home[1]))
        twin._last = None
        return twin

    def __len__(self) -> int:
        return len(self._rows)

    def __bool__(self) -> bool:
        return True

    # Append and fetch

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append to each row its own of keys [B, H, L, D_k] and values [B, H, L, D_v].

        Returns:
            Keys and values of all rows, as handles; for models that get arrays, arrays
            [B, H, T, D], each row's tokens in order from the left.

        Raises:
            ValueError: for what `QuantizedStreamingCache.update_and_fetch` raises it.
        """
        if keys.shape[0] != len(self._rows):
            raise ValueError(f"keys of {keys.shape[0]} rows do not fit a batch of {len(self)}")
        length = keys.shape[2]
        own = self._own(length)
        handles = self._handles()
        one = length == 1 and all(n is None for n in self._left)
        if one and len(self) > 1 and handles:
            self._last = self._step(keys, values)
            return self._last
        self._part()
        self._left = [
            None if left is None else left - n for left, n in zip(self._left, own, strict=True)
        ]
        rows, masks = [], []
        for i, (row, n) in enumerate(zip(self._rows, own, strict=True)):
            masks.append(row.make_mask(n) if n else None)
            if n:
                row.append(keys[i : i + 1, :, :n], values[i : i + 1, :, :n])
            rows.append(None if not n else row.keys_and_values() if handles else row.view())
        if handles:
            pair = [RowsHandle(rows, masks, own, _attend_one, which) for which in range(2)]
            self._last = pair[0], pair[1]
        else:
            own_keys, own_values = ([row and row.dense(i) for row in rows] for i in range(2))
            self._last = _padded(own_keys, keys), _padded(own_values, values)
        return self._last

    def keys_and_values(self) -> tuple[Any, Any]:
        """What the last `update_and_fetch` returned, again.

        Raises:
            ValueError: if there was none since the batch changed.
        """
        if self._last is None:
            raise ValueError("nothing was fetched: call update_and_fetch first")
        return self._last

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """The mask for the next N tokens over what `update_and_fetch` will return for them.

        Returns:
            None, "causal", or a boolean array [B, 1, N, T]: each row's tokens from the left.
        """
        own = self._own(N)
        narrowed = any(
            row.narrows(n, window_size) for row, n in zip(self._rows, own, strict=True) if n
        )
        if self._handles() and not narrowed and not return_array:
            return "causal" if N > 1 else None
        return masks_of(self._rows, own, N, window_size if narrowed else None)

    # Prompts of unequal length

    def prepare(
        self,
        *,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
        left_padding: Sequence[int] | None = None,
    ) -> None:
        """Say how many tokens of the calls to come are each row's own; padding follows them.

        Raises:
            ValueError: for padding on the left, or on the right without lengths.
        """
        if lengths is None and right_padding is not None and max(right_padding) > 0:
            raise ValueError("padding on the right: give lengths, each row's own tokens, too")
        if left_padding is not None and max(left_padding) > 0:
            raise ValueError("padding on the left: put it on the right, and give lengths")
        if lengths is not None:
            self._left = [int(n) for n in lengths]

    def finalize(self) -> None:
        """All tokens of the calls to come are the rows' own again."""
        self._left = [None] * len(self)

    # Rows come and go

    def filter(self, batch_indices: Sequence[int]) -> None:
        """Keep these rows alone, in this order."""
        keep = [int(i) for i in batch_indices]
        self._rows = [self._rows[i] for i in keep]
        self._homes = [self._homes[i] for i in keep]
        self._left = [self._left[i] for i in keep]
        self._last = None
        for bucket in self._buckets():
            numbers = [home[1] for home in self._homes if home and home[0] is bucket]
            if numbers != list(range(len(bucket.rows))):
                self._settle_in(bucket.keep(numbers), self._where(bucket))

    def extend(self, other: BatchCache) -> None:
        """Add another batch's rows."""
        more = copy.deepcopy(other)
        self._rows += more._rows
        self._homes += more._homes
        self._left += more._left
        self._last = None

    def extract(self, idx: int) -> Any:
        """A row as a cache that goes on alone."""
        home = self._homes[idx]
        return copy.deepcopy(self._rows[idx]) if home is None else home[0].row(home[1])

    def is_trimmable(self) -> bool:
        return all(row.is_trimmable() for row in self._rows)

    def trim(self, n: int) -> int:
        """Forget the last n tokens of each row, of all rows or of none.

        Returns:
            The number of tokens forgotten.
        """
        n = min(n, min((row.offset for row in self._rows), default=0))
        if n <= 0 or not all(row.can_trim(n) for row in self._rows):
            return 0
        self._part()
        self._last = None
        return [row.trim(n) for row in self._rows][0]

    @property
    def keys(self) -> mx.array | None:
        """The rows' buffers of keys, padded: models tie evaluation to them, by assignment."""
        return self._rings(0)

    @keys.setter
    def keys(self, value: mx.array) -> None:
        self._assign(0, value)

    @property
    def values(self) -> mx.array | None:
        """The same for values."""
        return self._rings(1)

    @values.setter
    def values(self, value: mx.array) -> None:
        self._assign(1, value)

    # Size and state

    @property
    def offset(self) -> mx.array:
        """The position of each row's next token: [B]."""
        return _positions(tuple(row.offset for row in self._rows))

    def size(self) -> int:
        """Tokens that the next query of any row can attend to."""
        return max((row.size() for row in self._rows), default=0)

    def empty(self) -> bool:
        return all(row.empty() for row in self._rows)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays that are alive, unused slots included."""
        apart = [row for row, home in zip(self._rows, self._homes, strict=True) if home is None]
        return sum(part.nbytes for part in (*apart, *self._buckets()))

    @property
    def state(self) -> list[list[mx.array]]:
        """The state of each row."""
        self._part()
        return [row.state for row in self._rows]

    @state.setter
    def state(self, state: list[list[mx.array]]) -> None:
        """Raises ValueError, one line, for a state that no batch of so many rows can have."""
        rows = [type(row).from_state(one) for row, one in zip(self._rows, state, strict=True)]
        self.__dict__ = vars(BatchCache(rows))

    @property
    def meta_state(self) -> str:
        """Nothing: see `QuantizedStreamingCache`."""
        return ""

    @meta_state.setter
    def meta_state(self, value: Any) -> None:
        pass

    # Inside

    def _handles(self) -> bool:
        return hooks.attention_hooked() and all(row.packed_attention for row in self._rows)

    def _own(self, length: int) -> list[int]:
        """How many tokens of the next call are each row's own."""
        return [length if left is None else min(left, length) for left in self._left]

    def _buckets(self) -> list[Bucket]:
        return list({id(home[0]): home[0] for home in self._homes if home}.values())

    def _part(self) -> None:
        """Give each row arrays of its own."""
        self._rows = [self._whole(i) for i in range(len(self))]
        self._homes = [None] * len(self)

    def _whole(self, i: int) -> Any:
        home = self._homes[i]
        return self._rows[i] if home is None else home[0].row(home[1])

    def _rings(self, which: int) -> mx.array | None:
        rows = [self._whole(i) for i in range(len(self))]
        rings = [None if row.empty() else row._ring[which] for row in rows]
        like = next((ring for ring in rings if ring is not None), None)
        return None if like is None else _padded(rings, like)

    def _assign(self, which: int, value: mx.array) -> None:
        self._part()
        for row, x in zip(self._rows, mx.split(value, len(self)), strict=True):
            if not row.empty():
                row._assign(which, x[:, :, : row._ring[which].shape[2]])

    def _settle_in(self, bucket: Bucket, where: Sequence[int]) -> None:
        for number, i in enumerate(where):
            self._homes[i] = bucket, number
            self._rows[i] = bucket.rows[number]

    def _step(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """One token for each row."""
        for bucket in self._buckets():
            where = self._where(bucket)
            index = None if where == list(range(len(self))) else mx.array(where, mx.int32)
            bucket.append(*(x if index is None else x[index] for x in (keys, values)))
            self._settle_in(bucket, where)
        new = [i for i, home in enumerate(self._homes) if home is None]
        for i in new:
            self._rows[i].append(keys[i : i + 1], values[i : i + 1])
        if new:
            self._join()
        buckets = self._buckets()
        views, rows = [b.view() for b in buckets], [self._where(b) for b in buckets]
        return BucketsHandle(views, rows, 0), BucketsHandle(views, rows, 1)

    def _where(self, bucket: Bucket) -> list[int]:
        """The rows that are in a bucket, as they are in order there."""
        return [i for i, home in enumerate(self._homes) if home and home[0] is bucket]

    def _join(self) -> None:
        """Put rows of like settings and sizes in one bucket."""
        kinds: dict[Any, list[int]] = {}
        for i, row in enumerate(self._rows):
            kinds.setdefault(row.kind(), []).append(i)
        sizes = [row.size() for row in self._rows]
        wanted = [
            sorted(where[k] for k in group)
            for where in kinds.values()
            for group in alike([sizes[i] for i in where])
        ]
        there = [self._where(bucket) for bucket in self._buckets()]
        new = [group for group in wanted if group not in there]
        for group, bucket in [(group, Bucket([self._whole(i) for i in group])) for group in new]:
            self._settle_in(bucket, group)


def alike(sizes: Sequence[int]) -> list[list[int]]:
    """Which rows share a bucket, by their numbers: none is more than twice as long as another."""
    sizes = [max(_SHORT, size) for size in sizes]
    groups: list[list[int]] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if groups and 2 * sizes[i] >= sizes[groups[-1][0]]:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _attend_one(
    queries: mx.array,
    keys: Any,
    values: Any,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array:
    if not isinstance(keys, mx.array):
        return keys.attend(queries, scale, mask, sinks)
    if isinstance(mask, str):
        return attend_causal(queries, keys, values, scale, sinks)
    own = hooks.attention.original("scaled_dot_product_attention")
    return own(queries, keys, values, None, scale, mask, sinks)


def _padded(parts: Sequence[mx.array | None], like: mx.array) -> mx.array:
    """Keys or values of all rows in one array, each row's from the left."""
    arrays = [like[:1, :, :0] if x is None else x for x in parts]
    longest = max(1, *(x.shape[2] for x in arrays))
    pads = [[(0, 0), (0, 0), (0, longest - x.shape[2]), (0, 0)] for x in arrays]
    return mx.concatenate([mx.pad(x, pad) for x, pad in zip(arrays, pads, strict=True)], axis=0)


@lru_cache(maxsize=16)
def _positions(offsets: tuple[int, ...]) -> mx.array:
    return mx.array(offsets, mx.int32)
