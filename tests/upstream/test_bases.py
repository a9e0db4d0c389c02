"""Bases of keys in prompt files: each once, found again anywhere, on any model."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map
from mlx_lm.models import cache as mlx_caches
from mlx_lm.models.cache import CacheList
from old_files import model as old_model
from prompt_files import PACKED, basis, filled, stock

import mlx_kivi
from conformance.common import tiny_llama
from mlx_kivi import KVCacheConfig, QuantizedStreamingCache
from mlx_kivi.cache.basis import Balance, known_balance
from mlx_kivi.models.chunked import ChunkedCache
from mlx_kivi.models.counted_keys import CountedKeysCache
from mlx_kivi.models.learned_positions import RestartingCache
from mlx_kivi.upstream.prompt_file import PromptFileError

INT4 = KVCacheConfig.from_name("int4", group_size=32, residual_length=16)
POLICIES = {
    "int4": KVCacheConfig.from_name("int4"),
    "int2": KVCacheConfig.from_name("int2"),
    "int4 and a window": INT4.replace(window=150),
    "keys alone": INT4.replace(v_bits=None),
}
CALLS = (1, 1, 5, 1, 140, 1)  # more is packed on the way, whatever the group


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return tiny_llama(peak=3.0)


def feed(model: nn.Module, caches: list[Any], *calls: int) -> mx.array:
    """Logits [calls, vocabulary] of the last token of each call."""
    rows = []
    for i, count in enumerate(calls):
        ids = (mx.arange(count) * 7 + 3 * i) % 31
        rows.append(model(ids[None], cache=caches)[0, -1])
        mx.eval(rows[-1])
    return mx.stack(rows)


def begun(model: nn.Module, policy: KVCacheConfig) -> list[Any]:
    caches = mlx_kivi.make_prompt_cache(model, policy)
    feed(model, caches, 300, 1)
    return caches


def names(caches: list[Any]) -> list[str]:
    return [cache.balance.name for cache in caches]


def matrices(path: Path) -> list[mx.array]:
    """What the file has behind the caches: found by shape and type."""
    arrays = mx.load(str(path)).values()
    return [x for x in arrays if x.ndim == 3 and x.dtype == mx.bfloat16]


def with_mlx_lm(path: Path, caches: list[Any]) -> list[Any]:
    mlx_caches.save_prompt_cache(str(path), caches, {"a": "b"})
    loaded, metadata = mlx_caches.load_prompt_cache(str(path), return_metadata=True)
    assert metadata == {"a": "b"}
    return loaded


def with_ours(path: Path, caches: list[Any]) -> list[Any]:
    mlx_kivi.save_prompt_cache(path, caches)
    return mlx_kivi.load_prompt_cache(path)


def with_open_files(path: Path, caches: list[Any]) -> list[Any]:
    with path.open("wb") as file:
        mlx_caches.save_prompt_cache(file, caches, {})
    with path.open("rb") as file:
        return mlx_caches.load_prompt_cache(file)


WAYS = [with_mlx_lm, with_ours, with_open_files]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", POLICIES)
def test_a_file_goes_on_as_the_cache_that_was_saved(
    name: str, way: Callable[..., list[Any]], llama: nn.Module, path: Path
) -> None:
    with mlx_kivi.patched(k_bits=8, v_bits=8):
        caches = begun(llama, POLICIES[name])
        assert all(cache.packed_tokens for cache in caches)
        loaded = way(path, caches)
        assert names(loaded) == names(caches)
        assert len(set(names(caches))) == len(matrices(path)) == 2
        assert mx.array_equal(feed(llama, loaded, *CALLS), feed(llama, caches, *CALLS))


def test_saved_two_times_a_file_is_the_same(llama: nn.Module, tmp_path: Path) -> None:
    caches = begun(llama, INT4)
    first, again = with_ours(tmp_path / "first", caches), with_ours(tmp_path / "again", caches)
    with_ours(tmp_path / "loaded", first)
    first_bytes, *others = (
        (tmp_path / f"{name}.safetensors").read_bytes() for name in ("first", "again", "loaded")
    )
    assert others == [first_bytes, first_bytes]
    assert len(again) == 2


def test_a_basis_of_many_caches_is_in_the_file_once(path: Path) -> None:
    one, other = basis(1), basis(2)
    caches = [filled(PACKED, balance=b) for b in (one, other, one, one)]
    loaded = with_ours(path, caches)
    assert names(loaded) == [one.name, other.name, one.name, one.name]
    assert len(matrices(path)) == 2
    alone = path.with_name("alone.safetensors")
    with_ours(alone, caches[:1])
    assert len(matrices(alone)) == 1
    # What is there already is shared, not made again.
    assert all(cache.balance is known_balance(cache.balance.name) for cache in loaded)


def test_caches_that_move_no_keys_leave_the_file_as_it_was(path: Path) -> None:
    caches = [filled(PACKED.replace(k_bits=8)), filled(PACKED.replace(balanced=False)), stock()]
    caches[0].balance = caches[1].balance = basis()
    loaded = with_ours(path, caches)
    assert matrices(path) == [] and [c.balance for c in loaded[:2]] == [None, None]


def test_a_model_that_was_measured_otherwise_goes_on_in_the_files_basis(
    llama: nn.Module, path: Path
) -> None:
    caches = begun(llama, INT4)
    mlx_kivi.save_prompt_cache(path, caches)
    moved = tiny_llama(peak=3.0)
    mx.random.seed(5)
    moved.update(tree_map(lambda p: p + 0.01 * mx.random.normal(p.shape), moved.parameters()))
    loaded = mlx_kivi.load_prompt_cache(path)
    assert set(names(mlx_kivi.make_prompt_cache(moved, INT4))).isdisjoint(names(caches))
    assert mx.array_equal(feed(moved, loaded, *CALLS), feed(moved, caches, *CALLS))
    assert names(loaded) == names(caches)


def test_a_copy_has_the_basis_and_is_saved_with_it(path: Path) -> None:
    cache = filled(PACKED, balance=basis())
    twin = copy.deepcopy(cache)
    del cache
    (loaded,) = with_ours(path, [twin])
    assert names([loaded]) == names([twin])
    assert all(map(mx.array_equal, loaded.state, twin.state))
    assert all(map(mx.array_equal, copy.deepcopy(loaded).arrays(), twin.arrays()))


@pytest.mark.parametrize("kind", [RestartingCache, ChunkedCache, CountedKeysCache])
def test_caches_of_every_kind_carry_theirs(kind: type[QuantizedStreamingCache], path: Path) -> None:
    cache = kind(PACKED)
    cache.balance = basis(3)
    if isinstance(cache, RestartingCache):
        cache.remember(mx.zeros((1, 250), mx.int32))
    cache.update_and_fetch(*mx.random.normal((2, 1, 2, 250, 32)))
    for caches in (
        [cache],
        [CacheList(stock(), cache) if kind is not RestartingCache else cache],
    ):
        (loaded,) = with_ours(path, caches)
        (one,) = getattr(loaded, "caches", [loaded])[-1:]
        assert type(one) is kind and names([one]) == names([cache])
        assert all(map(mx.array_equal, one.state, cache.state))
        assert len(matrices(path)) == 1


def test_members_of_lists_of_caches_carry_theirs(path: Path) -> None:
    model = old_model("baichuan_m1")
    caches = mlx_kivi.make_prompt_cache(model, INT4)
    members = [cache.caches[1] for cache in caches]
    for i, member in enumerate(members):
        member.balance = basis(i, heads=1, dim=16)
    feed(model, caches, 300, 1)
    assert members[1].packed_tokens  # the first has a window too short to pack
    loaded = with_ours(path, caches)
    assert len(loaded) == len(caches) and len(matrices(path)) == 2
    assert mx.array_equal(feed(model, loaded, *CALLS), feed(model, caches, *CALLS))


def test_a_cache_with_nothing_in_it_keeps_its_basis(path: Path) -> None:
    cache = QuantizedStreamingCache(PACKED)
    cache.balance = basis()
    (loaded,) = with_ours(path, [cache])
    assert names([loaded]) == names([cache])
    for one in (cache, loaded):
        mx.random.seed(0)
        one.update_and_fetch(*mx.random.normal((2, 1, 2, 250, 32)))
    assert all(map(mx.array_equal, loaded.arrays(), cache.arrays()))


def test_a_basis_that_does_not_fit_the_first_keys_is_named() -> None:
    cache = QuantizedStreamingCache(PACKED)
    cache.balance = basis(heads=1)
    with pytest.raises(ValueError, match="keys of 2 heads, .* basis, of 1 heads") as caught:
        cache.update_and_fetch(*mx.random.normal((2, 1, 2, 250, 32)))
    assert "\n" not in str(caught.value)


def other_generation(path: Path) -> None:
    """Turn a file of caches of ours into one of the other generation of mlx-lm."""
    arrays, header = mx.load(str(path), return_metadata=True)
    mx.eval(arrays)
    newer = header.get("2.0") == ""
    count = len({name.partition(".")[0] for name in arrays})
    out = {f"0.{i}": "" for i in range(count)} if newer else {"2.0": ""}
    for key, text in header.items():
        part, _, rest = key.partition(".")
        if part in ("01" if newer else "12"):
            out[f"{int(part) + (1 if newer else -1)}.{rest}"] = text
    mx.save_safetensors(str(path), arrays, out)


def test_the_other_generation_of_mlx_lm_keeps_them_as_well(path: Path) -> None:
    caches = [filled(PACKED, balance=basis(i)) for i in range(3)]
    mlx_kivi.save_prompt_cache(path, caches)
    before = path.read_bytes()
    other_generation(path)
    assert path.read_bytes() != before
    loaded = mlx_kivi.load_prompt_cache(path)
    assert names(loaded) == names(caches)
    for one, cache in zip(loaded, caches, strict=True):
        assert all(map(mx.array_equal, one.state, cache.state))


# Where nothing is known


RARE = basis(9).name


def forgotten() -> bool:
    gc.collect()
    return known_balance(RARE) is None


@pytest.mark.parametrize("way", ["set", "made"])
def test_a_state_whose_basis_is_not_at_hand_is_refused_in_one_line(way: str) -> None:
    state = filled(PACKED, balance=basis(9)).state
    assert forgotten()
    cache = filled(PACKED, balance=basis(1))
    before = cache.state
    with pytest.raises(ValueError, match="not at hand: save with mlx_kivi.save") as caught:
        if way == "set":
            cache.state = state
        else:
            QuantizedStreamingCache.from_state(state)
    assert "\n" not in str(caught.value)
    assert all(map(mx.array_equal, cache.state, before))


def test_a_file_brings_back_what_was_forgotten(path: Path) -> None:
    cache = filled(PACKED, balance=basis(9))
    mlx_kivi.save_prompt_cache(path, [cache])
    want = [mx.array(x) for x in cache.arrays()]
    mx.eval(want)
    del cache
    assert forgotten()
    (loaded,) = mlx_kivi.load_prompt_cache(path)
    assert loaded.balance.name == RARE
    assert all(map(mx.array_equal, loaded.arrays(), want))


@pytest.mark.parametrize("gone", [0, 1])
def test_a_basis_is_known_as_long_as_one_of_its_content_lives(gone: int) -> None:
    pair = [Balance(basis(9).matrix) for _ in range(2)]
    name = pair[0].name
    assert pair[1].name == name and known_balance(name) is not None
    del pair[gone]
    gc.collect()
    assert known_balance(name) is not None
    pair.clear()
    gc.collect()
    assert known_balance(name) is None


def test_open_files_of_stock_caches_are_left_to_mlx_lm(path: Path) -> None:
    with mlx_kivi.patched():
        (loaded,) = with_open_files(path, [stock()])
    assert type(loaded) is mlx_caches.KVCache and loaded.offset == 7


def test_an_open_file_that_is_broken_is_named(path: Path) -> None:
    path.write_bytes(b"nothing of the kind")
    with mlx_kivi.patched(), path.open("rb") as file:
        with pytest.raises(PromptFileError) as caught:
            mlx_caches.load_prompt_cache(file)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)
