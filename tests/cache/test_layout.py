"""Sizes that follow from a policy, and which slot holds which token."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from reference import allowed, shown

from mlx_kivi import KVCacheConfig
from mlx_kivi.cache.layout import UNBOUNDED, Plan, Snapshot, can_pack, plan_for, spans
from mlx_kivi.config import GROUP_SIZES, TRIM_MARGIN

configs = st.builds(
    KVCacheConfig,
    k_bits=st.sampled_from([None, 4]),
    v_bits=st.sampled_from([None, 8]),
    group_size=st.sampled_from(GROUP_SIZES),
    residual_length=st.integers(0, 150),
    sink=st.integers(0, 9),
    window=st.none() | st.integers(1, 400),
)


def plan_of(config: KVCacheConfig) -> Plan:
    return plan_for(config, can_pack(config))


@given(configs, st.integers(0, 2000))
def test_the_residual_stays_unpacked_and_little_more_does(config: KVCacheConfig, seen: int) -> None:
    plan = plan_of(config)
    groups = plan.groups(seen)
    assert groups <= plan.groups(seen + 1) <= groups + 1
    if plan.residual is None:
        assert groups == 0
        return
    left = seen - plan.sink - groups * plan.group
    assert (groups == 0 or left >= config.residual_length) and left < plan.residual + plan.group


@given(configs)
def test_a_plan_has_room_for_what_is_seen_and_what_trim_takes_back(
    config: KVCacheConfig,
) -> None:
    plan = plan_of(config)
    assert (plan.sink, plan.window, plan.group) == (config.sink, config.window, config.group_size)
    bounded = config.window is not None
    assert (plan.ring == UNBOUNDED) == (not bounded and not config.quantized)
    if plan.residual is None:
        assert plan.slots is None
        if bounded:
            assert (plan.ring, plan.kept) == (config.window, config.window + TRIM_MARGIN)
        return
    assert plan.margin == 0
    # The oldest token that a query sees, after the most that trim takes back at any moment.
    assert plan.ring >= plan.residual + plan.group - 1 + TRIM_MARGIN
    assert (plan.slots is None) == (not bounded)
    if bounded:
        assert plan.slots * plan.group >= config.window + TRIM_MARGIN - 1 - plan.residual


@given(configs)
def test_a_bounded_plan_is_little_larger_than_its_window(config: KVCacheConfig) -> None:
    plan = plan_of(config)
    assume(config.window is not None)
    packed = (plan.slots or 0) * plan.group
    held = plan.ring + plan.margin + packed
    overlap = TRIM_MARGIN + 3 * plan.group  # margin, the group that fills up, rounding twice
    assert held <= config.window + 2 * TRIM_MARGIN + (overlap if plan.slots else 0)


@given(st.integers(1, 100), st.integers(0, 400))
def test_a_margin_holds_what_left_last_and_no_more_than_fits(window: int, stream: int) -> None:
    plan = plan_for(KVCacheConfig(window=window), packed=False)
    left, spared = max(0, stream - window), plan.spared(stream)
    assert left <= spared <= stream  # what is copied has come, what left has been copied
    assert spared - max(0, left - TRIM_MARGIN) <= plan.margin
    assert plan.spared(stream + 1) in (spared, spared + plan.margin - TRIM_MARGIN)


@given(st.integers(0, 300), st.integers(0, 300), st.integers(1, 64))
def test_spans_cover_a_range_in_order_without_crossing_the_end(
    start: int, length: int, size: int
) -> None:
    covered = []
    for first, slot, count in spans(start, start + length, size):
        assert count > 0 and slot == first % size and slot + count <= size
        covered += range(first, first + count)
    assert covered == list(range(start, start + length))


@pytest.mark.parametrize(
    ("window", "seen", "evicted"),
    [(None, 10**6, False), (10, 13, False), (10, 14, True), (10, 15, True), (1, 4, False)],
)
def test_a_token_is_gone_when_the_next_query_cannot_see_it(
    window: int | None, seen: int, evicted: bool
) -> None:
    assert plan_of(KVCacheConfig(sink=4, window=window)).evicted(seen) is evicted


# What a call sees: the ring, the store and the chunk together hold each token once


def snapshot(config: KVCacheConfig, placed: int, chunk: int, by_token: bool = False) -> Snapshot:
    """A call of one token in the ring (chunk 0), or of a chunk beside it."""
    plan = plan_of(config)
    assume(plan.ring != UNBOUNDED)  # one array, in order
    groups = plan.groups(placed if chunk else placed - 1)
    if by_token and chunk <= TRIM_MARGIN:
        groups = plan.groups(placed + (chunk or 1) - 1)
    capacity = groups if plan.slots is None else plan.slots
    oldest = 0 if by_token and groups else None
    return Snapshot(plan, capacity, placed, groups, chunk, chunk or 1, oldest)


def shown_once(shot: Snapshot) -> np.ndarray:
    """How often each query row sees each position: [queries, placed + chunk]."""
    biases = shot.ring_bias, shot.store_bias, shot.chunk_bias
    widths = (
        shot.plan.sink + shot.plan.ring,
        shot.capacity * shot.plan.group,
        shot.chunk,
    )
    rows = []
    for bias, width in zip(biases, widths, strict=True):
        if bias is None:
            bias = mx.zeros((1, width))
        rows.append(np.broadcast_to(np.array(bias), (shot.queries, width)))
    bias = np.concatenate(rows, axis=1)
    assert np.isin(bias, [0, -np.inf]).all()
    column_of = np.array(shot.reorder(mx.arange(shot.length)))
    assert column_of.shape == (bias.shape[1],)
    position_of = shot.ordered_positions()[column_of]
    count = np.zeros((shot.queries, shot.placed + shot.chunk), int)
    for row, one in enumerate(bias):
        np.add.at(count[row], position_of[one == 0], 1)
    return count


@given(
    configs,
    st.integers(1, 700),
    st.integers(0, 40).map(lambda n: 0 if n == 1 else n),
    st.booleans(),
)
def test_every_query_sees_each_token_of_the_rule_once(
    config: KVCacheConfig, placed: int, chunk: int, by_token: bool
) -> None:
    shot = snapshot(config, placed, chunk, by_token)
    first = shot.first_query
    assert first + shot.queries == placed + chunk
    positions = shown(first, shot.queries, config.sink, config.window)
    assert shot.ordered_positions().tolist() == positions.tolist()
    assert shot.length == len(positions)
    queries, keys = np.arange(first, placed + chunk), np.arange(placed + chunk)
    expected = allowed(queries, keys, config.sink, config.window)
    np.testing.assert_array_equal(shown_once(shot), expected.astype(int))
