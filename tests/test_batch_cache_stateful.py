"""Any order of joining, feeding, leaving, copying and trimming: each row is what it is alone.

Four machines, one a kind of policy: 20 sequences of each, with CI=true 100.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator

import pytest
from batches import Row, attend, batch_of, call, check, new_row, prompt
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from reference import hooked, seeds, some_bits

from mlx_kivi import KVCacheConfig
from mlx_kivi.batch_cache import BatchCache
from mlx_kivi.cache.rotation import REBASE_AT, Rotation

LENGTH = 500  # tokens of a stream
MOST = 6  # rows

counts = st.integers(0, 40) | st.integers(41, 130)


@pytest.fixture(autouse=True, scope="module")
def _hooked() -> Iterator[None]:
    with hooked():
        yield


class Machine(RuleBasedStateMachine):
    """A batch, its rows alone, and copies of both that were put aside."""

    bits = st.just((None, None))
    windows = st.none() | st.integers(1, 12) | st.integers(13, 180)
    seeds = st.none()
    packed = st.booleans()
    turning = False
    atol = 1e-5
    aside = Bundle("aside")

    @initialize(data=st.data(), sink=st.integers(0, 5))
    def start(self, data: st.DataObject, sink: int) -> None:
        k_bits, v_bits = data.draw(self.bits, "bits")
        window = data.draw(self.windows, "window")
        self.config = KVCacheConfig(
            k_bits=k_bits,
            v_bits=v_bits,
            group_size=32,
            residual_length=data.draw(st.sampled_from([0, 8, 32]), "residual"),
            sink=sink,
            window=window,
            balanced=data.draw(st.booleans(), "balanced"),
            reposition=self.turning and window is not None and data.draw(st.booleans(), "moved"),
        )
        self.is_packed = data.draw(self.packed, "packed")
        self.heads = data.draw(st.sampled_from([(1, 1), (1, 2), (2, 1)]), "heads")
        self.seed = data.draw(self.seeds, "balance")
        self.made = 0
        self.rows: list[Row] = []
        self.batch = BatchCache([])
        self.join([(30, 1), (0, 2)])

    def new(self, before: int) -> Row:
        self.made += 1
        row = new_row(
            self.config,
            LENGTH,
            self.made,
            heads=self.heads,
            packed=self.is_packed,
            seed=self.seed,
        )
        if self.turning:
            row.cache.rotation = Rotation(32, base=10000.0)
            row.cache.rebase_at = REBASE_AT
            row.cache._rebased = 60 + before - REBASE_AT
        return row

    def room(self) -> int:
        """Tokens that each row has left."""
        return min(LENGTH - row.seen for row in self.rows)

    # Rows come and go

    @rule(fed=st.lists(st.tuples(counts, st.integers(0, 9)), min_size=1, max_size=3))
    def join(self, fed: list[tuple[int, int]]) -> None:
        """Rows that have had a prompt together, some of them none of it, and steps, or not."""
        fed = fed[: MOST - len(self.rows)]
        if not fed:
            return
        rows = [self.new(n) for n, _ in fed]
        other = batch_of(rows)
        if max(n for n, _ in fed):
            prompt(other, rows, [n for n, _ in fed], chunk=70, atol=self.atol)
        for _ in range(min(n for _, n in fed)):
            call(other, rows, atol=self.atol)
        self.batch.extend(other)
        self.rows += rows
        check(other, rows)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """Any subset stays, in any order."""
        order = data.draw(st.permutations(range(len(self.rows))), "order")
        keep = order[: data.draw(st.integers(0, len(order)), "stay")]
        self.batch.filter(keep)
        self.rows = [self.rows[i] for i in keep]

    # Tokens

    @precondition(lambda self: self.rows)
    @rule(
        data=st.data(),
        chunk=st.sampled_from([16, 50, 200]),
        padding=st.sampled_from([math.nan, 1e30]),
    )
    def feed_prompts(self, data: st.DataObject, chunk: int, padding: float) -> None:
        left = [LENGTH - row.seen for row in self.rows]
        lengths = [min(data.draw(counts, "tokens"), n) for n in left]
        if max(lengths):
            prompt(self.batch, self.rows, lengths, chunk, padding=padding, atol=self.atol)

    @precondition(lambda self: len(self.rows) > 1)
    @rule(data=st.data(), n=st.integers(2, 60))
    def leave_in_the_middle_of_a_prompt(self, data: st.DataObject, n: int) -> None:
        n = min(n, self.room())
        if n < 2:
            return
        lengths = [data.draw(st.integers(0, n), "tokens") for _ in self.rows]
        lengths[0] = n
        self.batch.prepare(lengths=lengths, right_padding=[n - m for m in lengths])
        call(self.batch, self.rows, [min(m, n // 2) for m in lengths], atol=self.atol)
        keep = data.draw(st.permutations(range(len(self.rows))), "order")[1:]
        self.batch.filter(keep)
        self.rows = [self.rows[i] for i in keep]
        rest = [max(0, lengths[i] - n // 2) for i in keep]
        if max(rest):
            call(self.batch, self.rows, rest, atol=self.atol)
        self.batch.finalize()

    @precondition(lambda self: self.rows)
    @rule(count=st.integers(1, 40))
    def steps(self, count: int) -> None:
        for _ in range(min(count, self.room())):
            call(self.batch, self.rows, atol=self.atol)

    @precondition(lambda self: self.rows)
    @rule(n=st.integers(2, 40))
    def a_call_of_several(self, n: int) -> None:
        if n <= self.room():
            call(self.batch, self.rows, [n] * len(self.rows), atol=self.atol)

    @precondition(lambda self: self.rows)
    @rule(n=st.integers(1, 32))
    def trim(self, n: int) -> None:
        n = min([n, *(row.seen for row in self.rows)])
        can = n > 0 and all(row.cache.can_trim(n) for row in self.rows)
        assert self.batch.trim(n) == (n if can else 0)
        for row in self.rows if can else []:
            assert row.cache.trim(n) == n
            row.seen -= n
            row.stream.redraw(row.seen)

    # Copies

    @precondition(lambda self: self.rows)
    @rule(i=st.integers(0, MOST), n=st.integers(1, 40))
    def take_one_out(self, i: int, n: int) -> None:
        row = self.rows[i % len(self.rows)].copy()
        taken = self.batch.extract(i % len(self.rows))
        n = min(n, LENGTH - row.seen)
        if n:
            outs = [attend(c, row.tokens(n)) for c in (taken, row.cache)]
            assert (abs(outs[0] - outs[1]).max() <= self.atol).item()
        else:
            assert taken.seen == row.seen

    @precondition(lambda self: not self.turning)  # positions below zero are none
    @rule()
    def set_the_state_again(self) -> None:
        self.batch.state = self.batch.state
        for row in self.rows:
            row.cache = type(row.cache).from_state(row.cache.state)

    @rule(target=aside)
    def put_a_copy_aside(self) -> tuple[BatchCache, list[Row]]:
        return copy.deepcopy(self.batch), [row.copy() for row in self.rows]

    @rule(other=aside)
    def go_on_with_a_copy(self, other: tuple[BatchCache, list[Row]]) -> None:
        """A copy of it, so that it can be taken up again."""
        self.batch, self.rows = copy.deepcopy(other[0]), [row.copy() for row in other[1]]
        for row in self.rows:
            row.stream.redraw(row.seen)

    @invariant()
    def rows_are_what_they_are_alone(self) -> None:
        if hasattr(self, "batch"):
            check(self.batch, self.rows)


class FullPrecision(Machine):
    pass


class Packed(Machine):
    bits = st.sampled_from([(8, 8), (4, 4), (2, 2), (3, 2)])
    windows = st.none() | st.integers(60, 180)
    seeds = seeds


class AnyBits(Machine):
    bits = st.tuples(some_bits, some_bits)
    seeds = seeds


class Turning(Machine):
    """Keys that turn: sinks are re-positioned, positions counted anew."""

    bits = st.sampled_from([(None, None), (8, 8), (4, 4), (None, 4)])
    windows = st.none() | st.integers(40, 120)
    packed = st.just(True)
    turning = True
    atol = 1e-4


for machine in (FullPrecision, Packed, AnyBits, Turning):
    machine.TestCase.settings = settings(
        stateful_step_count=12, max_examples=40 if os.environ.get("CI") == "true" else 20
    )

TestFullPrecision = FullPrecision.TestCase
TestPacked = Packed.TestCase
TestAnyBits = AnyBits.TestCase
TestTurning = Turning.TestCase
