"""Streams without end: caches whose positions are counted anew, against the same stream from 0."""

from __future__ import annotations

import copy
import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from reference import dense, logits, random_tokens
from storage import basis_of

from conformance.common import tiny_llama
from mlx_kivi import KVCacheConfig, QuantizedStreamingCache
from mlx_kivi.cache.rotation import REBASE_AT, REBASE_BY, rebased_by
from mlx_kivi.models.factory import build

STREAM = KVCacheConfig(sink=0, window=72)

pytestmark = pytest.mark.usefixtures("attention_hooked")


def tiny(**changes: Any) -> nn.Module:
    """A random llama whose attention is not flat."""
    return tiny_llama(peak=2, **changes)


def jump(caches: list[Any], tokens: int) -> None:
    """As if about so many more tokens had been seen, whose positions are not counted any more."""
    for cache in caches:
        plan = cache.plan
        unit = math.lcm(plan.ring, plan.margin or 1, (plan.slots or 1) * plan.group)
        by = tokens // unit * unit
        cache._count += by
        cache._rebased += by
        cache._ring_low += by
        if plan.slots is not None:
            cache._groups += by // plan.group
            cache._store_low += by // plan.group


@pytest.mark.parametrize("start", [2**20, 2**24, 10**8, 2**33])
@pytest.mark.parametrize(
    ("config", "loose"),
    [
        (KVCacheConfig(sink=0, window=100), 5e-3),
        (KVCacheConfig(sink=4, window=100), 5e-3),
        (KVCacheConfig(sink=4, window=100, reposition=True), 5e-3),
        (
            KVCacheConfig(
                k_bits=8, v_bits=8, group_size=32, residual_length=16,
                sink=4, window=100, reposition=True,
            ),
            2e-2,
        ),
    ],
    ids=["no sinks", "vanilla sinks", "re-positioned", "int8"],
)  # fmt: skip
def test_a_stream_from_far_on_says_what_it_says_from_the_start(
    start: int, config: KVCacheConfig, loose: float
) -> None:
    model, tokens = tiny(), random_tokens(700)
    caches, late = build(model, config), build(model, config)
    for cache in [] if config.reposition else late:
        cache._rebased = 250 - REBASE_AT
    calls = [90, 60, 1, 1, 1]
    want, got = (logits(model, tokens[:, :153], c, calls) for c in (caches, late))
    jump(late, start)
    if config.reposition:
        # Sinks are where they are; what follows them is far on. Two layers see two windows back.
        for cache in late:
            cache._rebased -= REBASE_AT - 250
    assert late[0].seen > start * 0.99 and late[0].offset == REBASE_AT - 250 + 153
    calls = [*[1] * 60, 7, 90, *[1] * 40, 350]
    want, got = (logits(model, tokens[:, 153:], c, calls) for c in (caches, late))
    assert late[0].offset < REBASE_AT and late[0].seen == caches[0].seen + late[0].seen - 700
    off = np.abs(got - want).max(axis=1) / np.abs(want).max()
    assert off[210 if config.reposition else 0 :].max() < loose


def test_far_on_is_wrong_without_rebasing() -> None:
    """The comparison above can fail."""
    model, tokens = tiny(), random_tokens(300)
    caches, late = build(model, STREAM), build(model, STREAM)
    for cache in late:
        cache._rebased, cache.rebase_at = -(10**8), None
    want, got = (logits(model, tokens, c, [1] * 300) for c in (caches, late))
    off = np.abs(got - want).max(axis=1) / np.abs(want).max()
    assert np.median(off[10:]) > 0.2


def test_the_whole_of_a_long_call_is_at_the_old_positions() -> None:
    """A call that crosses the limit, several times over."""
    model, tokens = tiny(), random_tokens(400)
    caches, late = build(model, STREAM), build(model, STREAM)
    for cache in late:
        cache._rebased = 100 - REBASE_AT
    want, got = (logits(model, tokens, c, [50, 300, 50]) for c in (caches, late))
    assert np.abs(got - want).max() < 5e-3 * np.abs(want).max()
    assert [rebased_by(n, REBASE_AT) // REBASE_BY for n in (0, REBASE_AT - 1)] == [0, 0]
    assert [rebased_by(REBASE_AT + n, REBASE_AT) for n in (0, REBASE_BY - 1)] == [REBASE_BY] * 2
    assert rebased_by(REBASE_AT + 3 * REBASE_BY, REBASE_AT) == 4 * REBASE_BY


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("bits", [None, 4, 3])
def test_packed_keys_are_turned_to_half_a_step(bits: int | None, balanced: bool) -> None:
    config = KVCacheConfig(
        k_bits=bits,
        v_bits=4,
        group_size=32,
        residual_length=16,
        sink=4,
        window=200,
        balanced=balanced,
    )
    cache = build(tiny(), config)[0]
    keys = mx.random.normal((1, 2, 300, 32), key=mx.random.key(2))
    cache.update_and_fetch(keys, keys)
    cache.state  # moves the chunk into its place
    cache.packed_attention = False
    before = [dense(x) for x in cache.keys_and_values()]
    cache._to_turn = REBASE_BY
    cache.state
    after = [dense(x) for x in cache.keys_and_values()]
    np.testing.assert_array_equal(after[1], before[1])
    turned = dense(cache.rotation.turned(mx.array(before[0], mx.float32), -REBASE_BY))
    off = np.abs(after[0] - turned)
    assert off[:, :, :4].max() < 1e-5
    off = off[:, :, 4:]
    packed = off.shape[2] - (300 - 4 - cache.plan.groups(300) * 32)
    assert off[:, :, packed:].max() < 1e-5
    basis, levels = basis_of(config, 0, 2, 32, cache.balance)
    steps = np.ptp(turned[:, :, 4:] @ basis, axis=2, keepdims=True) / levels
    error = np.abs((after[0] - turned)[:, :, 4 : 4 + packed] @ basis)
    assert (error < (1e-5 if bits is None else steps / 2 * 1.1)).all()
    assert np.abs(turned - before[0]).max() > 1


def test_layers_of_a_trained_window_rebase_with_the_others() -> None:
    model = tiny(
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=40,
    )
    tokens = random_tokens(400)
    caches, late = build(model, STREAM), build(model, STREAM)
    assert {cache.plan.window for cache in late} == {40, 72}
    for cache in late:
        cache._rebased = 200 - REBASE_AT
    calls = [100, *[1] * 150, 150]
    want, got = (logits(model, tokens, c, calls) for c in (caches, late))
    assert np.abs(got - want).max() < 5e-3 * np.abs(want).max()
    assert {cache.offset for cache in late} == {REBASE_AT + 200 - REBASE_BY}


def test_caches_without_bound_never_rebase() -> None:
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 40}
    for model in (tiny(), tiny(**sliding)):
        assert {c.rebase_at for c in build(model, KVCacheConfig())} == {None}


def test_a_window_beyond_the_limit_stays_whole() -> None:
    caches = build(tiny(), KVCacheConfig(sink=4, window=2**20))
    assert {c.rebase_at for c in caches} == {2**20 + 4 + REBASE_BY}


@pytest.mark.parametrize("reposition", [False, True])
def test_vanilla_sinks_keep_their_distance_and_repositioned_ones_their_place(
    reposition: bool,
) -> None:
    cache = build(tiny(), KVCacheConfig(sink=4, window=100, reposition=reposition))[0]
    keys = mx.random.normal((1, 2, 120, 32), key=mx.random.key(2))
    cache.update_and_fetch(keys, keys)
    cache._rebased -= REBASE_AT
    cache.update_and_fetch(keys[:, :, :1], keys[:, :, :1])
    assert cache.offset == REBASE_AT - REBASE_BY + 121
    cache.state
    sinks, want = dense(cache.keys)[:, :, :4], keys[:, :, :4]
    if not reposition:
        want = cache.rotation.turned(want, -REBASE_BY)
    np.testing.assert_allclose(sinks, dense(want), atol=0 if reposition else 1e-5)


def test_trim_and_restore_work_across_a_rebase() -> None:
    model, tokens = tiny(), random_tokens(400)
    config = KVCacheConfig(k_bits=8, v_bits=8, group_size=32, sink=4, window=100, reposition=True)
    caches = build(model, config)
    model(tokens[:, :300], cache=caches)
    for cache in caches:
        cache._rebased = 302 - REBASE_AT
    jump(caches, 2**20)
    model(tokens[:, 300:304], cache=caches)
    assert caches[0].offset == REBASE_AT - REBASE_BY + 2
    trimmed = copy.deepcopy(caches)
    assert [cache.trim(3) for cache in trimmed] == [3, 3]
    assert trimmed[0].offset == REBASE_AT - REBASE_BY - 1
    again = [QuantizedStreamingCache.from_state([a[...] for a in c.state]) for c in trimmed]
    for cache in again:
        assert cache.offset == trimmed[0].offset
    want = logits(model, tokens[:, 301:], trimmed, [*[1] * 30, 69])
    got = logits(model, tokens[:, 301:], again, [*[1] * 30, 69])
    np.testing.assert_allclose(got, want, atol=1e-3)
