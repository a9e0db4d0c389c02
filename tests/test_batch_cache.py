"""One layer's cache of several rows: each is what it is alone."""

from __future__ import annotations

import copy
import itertools
import math

import mlx.core as mx
import pytest
from batches import Row, attend, batch_of, call, check, new_row, prompt, same
from mlx_lm.models.base import scaled_dot_product_attention

from mlx_kivi import KVCacheConfig
from mlx_kivi.batch_cache import BatchCache
from mlx_kivi.cache.rotation import REBASE_AT, Rotation

PACKED = {"group_size": 32, "residual_length": 16}
INT8 = KVCacheConfig(k_bits=8, v_bits=8, **PACKED)
INT4 = KVCacheConfig(k_bits=4, v_bits=4, **PACKED)
CONFIGS = {
    "full": KVCacheConfig(),
    "window": KVCacheConfig(sink=4, window=60),
    "no sinks": KVCacheConfig(sink=0, window=3),
    "int8": INT8,
    "int4": INT4,
    "int4 window": INT4.replace(sink=4, window=100),
    "int2": INT4.replace(k_bits=2, v_bits=2),
    "3 and 2": KVCacheConfig(k_bits=3, v_bits=2, group_size=64, residual_length=64),
    "keys alone": KVCacheConfig(k_bits=8, v_bits=None, sink=0, window=150, **PACKED),
    "values alone": KVCacheConfig(k_bits=None, v_bits=4, **PACKED),
}
LENGTHS = [20, 3, 150, 97, 300]

pytestmark = pytest.mark.usefixtures("attention_hooked")
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
some_configs = pytest.mark.parametrize(
    "config",
    [CONFIGS[name] for name in ("window", "int8", "int4 window", "keys alone")],
    ids=["window", "int8", "int4 window", "keys alone"],
)
packed_or_arrays = pytest.mark.parametrize("packed", [True, False], ids=["packed", "arrays"])


def rows_of(config: KVCacheConfig, lengths: list[int], more: int, **kwargs: object) -> list[Row]:
    return [new_row(config, n + more, i, **kwargs) for i, n in enumerate(lengths)]


@packed_or_arrays
@every_config
def test_prompts_then_steps_give_each_row_what_it_gives_alone(
    config: KVCacheConfig, packed: bool
) -> None:
    rows = rows_of(config, LENGTHS, 45, packed=packed, seed=0)
    batch = batch_of(rows)
    prompt(batch, rows, LENGTHS)
    check(batch, rows)
    for _ in range(45):
        call(batch, rows)
    check(batch, rows)


# Padding


@pytest.mark.parametrize("padding", [math.nan, 1e30])
@packed_or_arrays
@pytest.mark.parametrize("name", ["full", "window", "int8", "int4 window"])
def test_padding_is_never_read_and_never_stored(name: str, packed: bool, padding: float) -> None:
    lengths = [5, 90, 1, 200]
    rows = rows_of(CONFIGS[name], lengths, 40, packed=packed)
    batch = batch_of(rows)
    prompt(batch, rows, lengths, padding=padding)
    alone = sum(row.cache.nbytes for row in rows)
    assert batch.nbytes <= alone
    for _ in range(40):
        call(batch, rows)
    check(batch, rows)


# Neighbours


@every_config
def test_what_neighbours_hold_changes_nothing_bit_for_bit(config: KVCacheConfig) -> None:
    lengths, outs, states = [70, 20, 110], [], []
    for other in (0, 7):
        rows = [new_row(config, n + 60, i + (other if i else 0)) for i, n in enumerate(lengths)]
        batch = batch_of(rows)
        prompt(batch, rows, lengths)
        outs.append([call(batch, rows)[:1] for _ in range(60)])
        states.append(batch.extract(0).state)
    assert all(mx.array_equal(a, b) for a, b in zip(*outs, strict=True))
    assert same(*states)


@packed_or_arrays
@pytest.mark.parametrize("neighbour", [3, 100, 900])
@pytest.mark.parametrize("name", ["window", "int4", "int4 window"])
def test_how_long_a_neighbour_is_changes_nothing(name: str, neighbour: int, packed: bool) -> None:
    lengths = [100, neighbour]
    rows = rows_of(CONFIGS[name], lengths, 50, packed=packed)
    batch = batch_of(rows)
    prompt(batch, rows, lengths, chunk=256)
    for _ in range(50):
        call(batch, rows)
    check(batch, rows)


@packed_or_arrays
@pytest.mark.parametrize("window", [60, 100])
@pytest.mark.parametrize("name", ["window", "int8"])
def test_rows_around_the_length_of_a_window(name: str, window: int, packed: bool) -> None:
    config = CONFIGS[name].replace(sink=4, window=window)
    lengths = [window - 1, window, window + 1, 2 * window - 1, window + 4]
    rows = rows_of(config, lengths, 45, packed=packed)
    batch = batch_of(rows)
    prompt(batch, rows, lengths, chunk=200)
    for _ in range(45):
        call(batch, rows)
    check(batch, rows)


# Shapes


@packed_or_arrays
@pytest.mark.parametrize(("count", "heads"), [(33, (1, 1)), (1, (2, 2)), (3, (1, 4)), (2, (3, 2))])
def test_any_number_of_rows_and_of_heads(count: int, heads: tuple[int, int], packed: bool) -> None:
    lengths = [(13 * i) % 90 + 1 for i in range(count)]
    rows = rows_of(INT4.replace(window=110), lengths, 35, heads=heads, packed=packed, seed=1)
    batch = batch_of(rows)
    prompt(batch, rows, lengths)
    for _ in range(35):
        call(batch, rows)
    check(batch, rows)


@packed_or_arrays
@some_configs
def test_learned_sinks_are_in_every_rows_softmax(config: KVCacheConfig, packed: bool) -> None:
    lengths = [80, 9, 130]
    rows = rows_of(config, lengths, 40, packed=packed)
    batch = batch_of(rows)
    sinks = mx.array([2.0, -1.0, 0.0, 3.0])
    prompt(batch, rows, lengths, sinks=sinks)
    for _ in range(38):
        call(batch, rows, sinks=sinks)
    q = mx.concatenate([row.tokens(1)[0] for row in rows])
    with_them, without = (
        scaled_dot_product_attention(q, *batch.keys_and_values(), batch, 0.2, None, which)
        for which in (sinks, None)
    )
    assert mx.abs(with_them - without).max() > 0.01


@packed_or_arrays
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("window", [1, 25, 500])
@pytest.mark.parametrize("name", ["full", "int4 window"])
def test_a_narrower_window_of_the_models_own(
    name: str, window: int, additive: bool, packed: bool
) -> None:
    lengths = [80, 9, 30, 160]
    rows = rows_of(CONFIGS[name], lengths, 30, packed=packed)
    batch = batch_of(rows)
    prompt(batch, rows, lengths, window=window, additive=additive)
    for _ in range(30):
        call(batch, rows, window=window, additive=additive)
    check(batch, rows)


# Size


@pytest.mark.parametrize("name", ["full", "int4", "int4 window"])
def test_a_batch_takes_what_its_rows_take(name: str) -> None:
    """A long row does not make short ones long."""
    lengths = [2100, 60, 100, 80]
    rows = rows_of(CONFIGS[name], lengths, 20, heads=(1, 1))
    batch = batch_of(rows)
    prompt(batch, rows, lengths, chunk=2100)
    assert all(row.cache.state for row in rows) and batch.state  # puts in its place what waits
    assert batch.nbytes == sum(row.cache.nbytes for row in rows)
    for _ in range(18):
        call(batch, rows)
    assert batch.nbytes <= 1.25 * sum(row.cache.nbytes for row in rows)
    batch.filter([1, 2, 3])
    assert batch.nbytes <= 1.25 * sum(row.cache.nbytes for row in rows[1:])


# Rows come and go


@some_configs
def test_a_merge_of_an_empty_and_a_full_row(config: KVCacheConfig) -> None:
    rows = rows_of(config, [0, 200, 0], 120)
    attend(rows[1].cache, rows[1].tokens(200))
    rows[1].seen = 200
    batch = batch_of(rows)
    check(batch, rows)
    prompt(batch, rows, [40, 3, 1])
    for _ in range(40):
        call(batch, rows)
    check(batch, rows)


@some_configs
def test_a_batch_goes_on_after_it_was_empty(config: KVCacheConfig) -> None:
    rows = rows_of(config, [50, 90], 0)
    batch = batch_of(rows)
    prompt(batch, rows, [49, 89])
    call(batch, rows)
    batch.filter([])
    check(batch, [])
    assert batch.nbytes == 0
    assert batch.trim(3) == 0
    for _ in range(2):
        others = rows_of(config, [30, 140], 50)
        other = batch_of(others)
        prompt(other, others, [30, 140])
        batch.extend(other)
        for _ in range(45):
            call(batch, others)
        check(batch, others)
        batch.filter([])


@some_configs
def test_the_longest_row_leaves_first_and_the_others_go_on(config: KVCacheConfig) -> None:
    lengths = [30, 300, 90, 60]
    rows = rows_of(config, lengths, 150)
    batch = batch_of(rows)
    prompt(batch, rows, lengths)
    for gone in (1, 1, 1):
        for _ in range(40):
            call(batch, rows)
        del rows[gone]
        batch.filter([i for i in range(len(rows) + 1) if i != gone])
        check(batch, rows)
    for _ in range(20):
        call(batch, rows)
    check(batch, rows)


@packed_or_arrays
@some_configs
def test_rows_removed_in_the_middle_of_a_prompt(config: KVCacheConfig, packed: bool) -> None:
    lengths = [150, 40, 90, 170]
    rows = rows_of(config, lengths, 40, packed=packed)
    batch = batch_of(rows)
    batch.prepare(lengths=lengths, right_padding=[170 - n for n in lengths])
    call(batch, rows, [64, 40, 64, 64])
    batch.filter([2, 0])
    rows = [rows[2], rows[0]]
    call(batch, rows, [26, 64])
    call(batch, rows, [0, 22])
    batch.finalize()
    check(batch, rows)
    for _ in range(40):
        call(batch, rows)
    check(batch, rows)


@some_configs
def test_rows_that_join_after_others_have_wrapped(config: KVCacheConfig) -> None:
    rows = rows_of(config, [300, 260], 130)
    batch = batch_of(rows)
    prompt(batch, rows, [300, 260])
    for length in (1, 40, 0):
        others = rows_of(config, [length + 1, 400], 130)
        other = batch_of(others)
        if length:
            prompt(other, others, [length, 100])
        batch.extend(other)
        rows += others
        for _ in range(40):
            call(batch, rows)
        check(batch, rows)


def test_rows_of_unlike_settings_are_apart_and_right() -> None:
    rows = [new_row(config, 160, i) for i, config in enumerate(CONFIGS.values())]
    batch = batch_of(rows)
    prompt(batch, rows, [20 + 9 * i for i in range(len(rows))])
    for _ in range(50):
        call(batch, rows)
    check(batch, rows)


def test_a_copy_goes_on_apart_and_shares_what_neither_changed() -> None:
    rows = rows_of(INT4, [70, 150], 200)
    batch = batch_of(rows)
    prompt(batch, rows, [70, 150])
    call(batch, rows)
    twin, twins = copy.deepcopy(batch), [row.copy() for row in rows]
    ring = batch._buckets()[0].ring[0]
    assert twin._buckets()[0].ring[0] is ring
    for row in twins:
        row.stream.redraw(row.seen)
    for _ in range(80):
        call(batch, rows)
        call(twin, twins)
    check(batch, rows)
    check(twin, twins)
    assert not same(twin.extract(0).state, batch.extract(0).state)


def test_merged_and_extracted_caches_are_independent() -> None:
    rows = rows_of(INT4, [70, 150], 100)
    batch = batch_of(rows)
    prompt(batch, rows, [70, 150])
    call(batch, rows)
    given = [batch.extract(i) for i in range(2)]
    before = [cache.state for cache in given]
    again = BatchCache.merge(given)
    for _ in range(60):
        call(again, rows)
    assert all(same(cache.state, state) for cache, state in zip(given, before, strict=True))
    assert all(same(batch.extract(i).state, state) for i, state in enumerate(before))


@some_configs
def test_an_extracted_row_goes_on_alone(config: KVCacheConfig) -> None:
    lengths = [200, 30, 95]
    rows = rows_of(config, lengths, 250)
    batch = batch_of(rows)
    prompt(batch, rows, lengths)
    for _ in range(20):
        call(batch, rows)
    for i, row in enumerate(rows):
        taken, alone = batch.extract(i), row.copy()
        assert taken.trim(5) == alone.cache.trim(5)
        alone.seen = alone.cache.seen
        for n in (1, 1, 60, 1, *[1] * 40):
            got, want = (attend(c, alone.tokens(n)) for c in (taken, alone.cache))
            assert mx.array_equal(got, want)
            alone.seen += n
        assert same(taken.state, alone.cache.state)
    check(batch, rows)


# Positions


def turning(config: KVCacheConfig, count: int, before: list[int]) -> list[Row]:
    """Rows whose keys turn, and re-base so many tokens after their start."""
    rows = rows_of(config, [300] * count, 0)
    for row, left in zip(rows, itertools.cycle(before), strict=False):
        row.cache.rotation = Rotation(32, base=10000.0)
        if left:
            row.cache.rebase_at = REBASE_AT
            row.cache._rebased = left - REBASE_AT
    return rows


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("before", [[0], [20], [100, 150, 117]])
def test_rows_with_repositioned_sinks_and_rebasing(bits: int | None, before: list[int]) -> None:
    config = KVCacheConfig(k_bits=bits, v_bits=bits, sink=4, window=90, reposition=True, **PACKED)
    for one in (config, config.replace(reposition=False)):
        rows = turning(one, 3, before)
        batch = batch_of(rows)
        prompt(batch, rows, [110, 10, 96], atol=1e-4)
        for _ in range(70):
            call(batch, rows, atol=1e-4)
        check(batch, rows)
        if before[0]:
            assert all(row.cache.offset < row.seen + REBASE_AT - 300 for row in rows[:1])


@pytest.mark.parametrize("config", [INT4, KVCacheConfig(sink=3, window=40)], ids=["int4", "full"])
def test_a_row_that_rebases_in_the_step_that_joins_it(config: KVCacheConfig) -> None:
    """Its keys are turned, and its groups packed, in the step after, as alone."""
    for length in range(60, 67):
        rows = turning(config, 2, [64])
        batch = batch_of(rows)
        prompt(batch, rows, [length, 90], atol=1e-4)
        for _ in range(4):
            call(batch, rows, atol=1e-4)
        check(batch, rows)


# Errors


def test_what_does_not_fit_is_refused_in_one_line() -> None:
    rows = rows_of(INT4, [40, 40], 9)
    batch = batch_of(rows)
    prompt(batch, rows, [40, 30])
    wrong = mx.zeros((3, 2, 1, 32))
    with pytest.raises(ValueError, match="^keys of 3 rows do not fit a batch of 2$"):
        batch.update_and_fetch(wrong, wrong)
    with pytest.raises(ValueError, match="^padding on the left: "):
        batch.prepare(lengths=[1, 2], left_padding=[1, 0])
    two = new_row(INT4, 9, 0).cache
    two.update_and_fetch(*[mx.zeros((2, 2, 5, 32))] * 2)
    with pytest.raises(ValueError, match="^a batch is made of caches of one sequence"):
        BatchCache.merge([two])
    check(batch, rows)
