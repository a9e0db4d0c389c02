"""Any order of appending, trimming, copying and saving, against a list of tokens and a mask.

Seven machines, one a kind of policy: 25 sequences of each, with CI=true 300.
"""

import copy
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule
from reference import Model, Stream, arrays_in, hooked, new_cache, seeds, some_bits

from mlx_kivi import KVCacheConfig, QuantizedStreamingCache

MARGIN = 32  # tokens behind the furthest one that can be taken back at any time
LENGTH = 420  # tokens of a stream, more than a sequence of calls gets through


@pytest.fixture(autouse=True, scope="module")
def _hooked() -> Iterator[None]:
    with hooked():
        yield


class Machine(RuleBasedStateMachine):
    """A cache, the model of it, and copies of both that were put aside."""

    bits = st.just((None, None))
    windows = st.none()
    residuals = st.sampled_from([0, 8, 32])
    storage = None
    balanced = st.just(True)
    seeds = st.none()
    aside = Bundle("aside")

    @initialize(data=st.data(), packed=st.booleans(), sink=st.integers(0, 5))
    def start(self, data: st.DataObject, packed: bool, sink: int) -> None:
        k_bits, v_bits = data.draw(self.bits, "bits")
        config = KVCacheConfig(
            k_bits=k_bits,
            v_bits=v_bits,
            group_size=32,
            residual_length=data.draw(self.residuals, "residual"),
            sink=sink,
            window=data.draw(self.windows, "window"),
            dtype=self.storage,
            balanced=data.draw(self.balanced, "balanced"),
        )
        heads, repeats = data.draw(st.sampled_from([(1, 1), (1, 2), (2, 1)]), "heads")
        stream = Stream(LENGTH, heads, repeats)
        self.cache = new_cache(config, stream, packed, data.draw(self.seeds, "balance"))
        self.model = Model(config, stream, self.cache.balance)

    def append(self, length: int) -> None:
        length = min(length, LENGTH - self.model.offset)
        if length:
            self.model.append(self.cache, length)

    @rule(length=st.integers(2, 12) | st.integers(13, 130))
    def append_a_chunk(self, length: int) -> None:
        self.append(length)

    @rule(count=st.integers(1, 6))
    def append_single_tokens(self, count: int) -> None:
        for _ in range(count):
            self.append(1)

    @rule(n=st.integers(1, 32) | st.integers(33, LENGTH))
    def trim(self, n: int) -> None:
        n = min(n, self.model.offset)
        free, can = self.cache.is_trimmable(), self.cache.can_trim(n)
        kept = self.model.peak - (self.model.offset - n) <= MARGIN
        assert can or not (free or kept)
        done = self.cache.trim(n)
        assert done == (n if can else 0)
        self.model.trimmed(done)

    @rule()
    def save_and_load(self) -> None:
        self.cache = type(self.cache).from_state(self.cache.state)

    @rule(target=aside)
    def put_a_copy_aside(self) -> tuple[QuantizedStreamingCache, Model]:
        return copy.deepcopy(self.cache), self.model.copy()

    @rule(other=aside)
    def go_on_with_a_copy(self, other: tuple[QuantizedStreamingCache, Model]) -> None:
        """A copy of it, so that it can be taken up again."""
        self.cache, self.model = copy.deepcopy(other[0]), other[1].copy()
        self.model.stream.redraw(self.model.offset)
        self.model.take_tokens()

    @invariant()
    def sizes_are_honest(self) -> None:
        if not hasattr(self, "cache"):
            return
        config, seen = self.cache.config, self.model.offset
        assert self.cache.offset == seen and self.cache
        limit = seen if config.window is None else config.sink + config.window
        assert self.cache.size() == min(seen, limit)
        assert self.cache.nbytes == sum(a.nbytes for a in arrays_in(self.cache))
        assert self.cache.is_trimmable() == (
            config.window is None or seen < config.sink + config.window
        )


class FullPrecision(Machine):
    pass


class FullPrecisionInAWindow(Machine):
    windows = st.integers(1, 12) | st.integers(13, 90)


class AnyBasis(Machine):
    balanced = st.booleans()
    seeds = seeds


class Packed(AnyBasis):
    bits = st.sampled_from([(8, 8), (4, 4), (3, 2)])


class PackedInAWindow(AnyBasis):
    bits = st.sampled_from([(8, 8), (4, 4), (3, 2)])
    windows = st.integers(1, 12) | st.integers(40, 180)


class PackedAtOnce(AnyBasis):
    """Without a residual, groups are packed as soon as they are whole."""

    bits = st.sampled_from([(8, 8), (3, 3)])
    windows = st.none() | st.integers(70, 180)
    residuals = st.just(0)


class AnyBits(AnyBasis):
    bits = st.tuples(some_bits, some_bits)
    windows = st.none() | st.integers(60, 180)


class HalfPrecision(AnyBasis):
    bits = st.sampled_from([(8, 8), (4, 4), (3, 3), (None, None)])
    windows = st.none() | st.integers(60, 180)
    storage = "float16"


for machine in (
    FullPrecision,
    FullPrecisionInAWindow,
    Packed,
    PackedInAWindow,
    PackedAtOnce,
    AnyBits,
    HalfPrecision,
):
    machine.TestCase.settings = settings(
        stateful_step_count=15, max_examples=300 if os.environ.get("CI") == "true" else 25
    )

TestFullPrecision = FullPrecision.TestCase
TestFullPrecisionInAWindow = FullPrecisionInAWindow.TestCase
TestPacked = Packed.TestCase
TestPackedInAWindow = PackedInAWindow.TestCase
TestPackedAtOnce = PackedAtOnce.TestCase
TestAnyBits = AnyBits.TestCase
TestHalfPrecision = HalfPrecision.TestCase
