"""Two threads, two policies: neither sees the other's."""

from __future__ import annotations

from collections.abc import Callable
from threading import Barrier, Thread
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.models.llama import Model

import mlx_kivi
from mlx_kivi import KVCacheConfig, hooks

INT4 = KVCacheConfig(k_bits=4, v_bits=4, group_size=32, residual_length=16)
BOUNDED = KVCacheConfig(k_bits=8, v_bits=8, group_size=32, residual_length=16, window=90)


def together(*works: Callable[[], Any]) -> list[Any]:
    """What each work returns, all of them run at once in threads of their own."""
    results: list[Any] = [None] * len(works)

    def run(i: int) -> None:
        try:
            results[i] = works[i]()
        except BaseException as error:
            results[i] = error

    threads = [Thread(target=run, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def tokens_of(model: nn.Module, caches: list[Any], count: int, wait: Callable[[], Any]) -> Any:
    """Greedy tokens after a prompt of 100, one step of each thread at a time."""
    with mx.stream(mx.new_stream(mx.default_device())):
        y, out = (mx.arange(100) * 7 % 97)[None], []
        for _ in range(count):
            wait()
            y = model(y, cache=caches)[:, -1].argmax(-1)[None]
            out.append(y.item())
    return out


@pytest.mark.parametrize("other", [BOUNDED, None], ids=["another policy", "mlx_lm's own caches"])
def test_two_generations_at_once_do_not_disturb_each_other(
    other: KVCacheConfig | None, tiny_llama: Model
) -> None:
    barrier = Barrier(2, timeout=30)

    def work(config: KVCacheConfig | None, wait: Callable[[], Any]) -> Any:
        if config is None:
            wait()
            caches = make_prompt_cache(tiny_llama)
            wait()
            assert {type(c) for c in caches} == {KVCache}
            return tokens_of(tiny_llama, caches, 60, wait)
        with mlx_kivi.patched(config):
            wait()  # both are inside now
            caches = make_prompt_cache(tiny_llama)
            assert {c.config for c in caches} == {config}
            wait()
            return tokens_of(tiny_llama, caches, 60, wait)

    alone = [together(lambda c=c: work(c, lambda: None))[0] for c in (INT4, other)]
    for _ in range(3):
        both = together(lambda: work(INT4, barrier.wait), lambda: work(other, barrier.wait))
        assert both == alone
    assert not hooks.attention.active


def test_a_patch_holds_in_every_thread_and_a_block_in_its_own(tiny_llama: Model) -> None:
    mlx_kivi.patch(INT4)
    entered, done = Barrier(2, timeout=30), Barrier(2, timeout=30)

    def inside() -> Any:
        with mlx_kivi.patched(BOUNDED):
            entered.wait()
            config = make_prompt_cache(tiny_llama)[0].config
            done.wait()
        return config, make_prompt_cache(tiny_llama)[0].config

    def outside() -> Any:
        entered.wait()
        config = make_prompt_cache(tiny_llama)[0].config
        done.wait()
        return config

    assert together(inside, outside) == [(BOUNDED, INT4), INT4]


def test_the_end_of_one_threads_block_leaves_the_others(tiny_llama: Model) -> None:
    entered, left = Barrier(2, timeout=30), Barrier(2, timeout=30)

    def short() -> None:
        with mlx_kivi.patched(INT4):
            entered.wait()
        left.wait()

    def long() -> Any:
        with mlx_kivi.patched(BOUNDED):
            entered.wait()
            left.wait()
            assert hooks.attention.active
            return make_prompt_cache(tiny_llama)[0].config

    assert together(short, long)[1] == BOUNDED
    assert not hooks.attention.active


def test_blocks_opened_and_closed_at_once_leave_mlx_lm_as_it_was(tiny_llama: Model) -> None:
    code = make_prompt_cache.__code__

    def work(config: KVCacheConfig) -> int:
        right = 0
        for _ in range(100):
            with mlx_kivi.patched(config):
                right += make_prompt_cache(tiny_llama)[0].config == config
        return right

    assert together(lambda: work(INT4), lambda: work(BOUNDED)) == [100, 100]
    assert make_prompt_cache.__code__ is code
    assert type(make_prompt_cache(tiny_llama)[0]) is KVCache
