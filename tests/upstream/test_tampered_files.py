"""Prompt files that were changed on purpose: refused in one line, and no cache is touched."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList
from prompt_files import PACKED, PLAIN, basis, filled, refused, stock

import mlx_kivi
from mlx_kivi import KVCacheConfig, hooks
from mlx_kivi.upstream.prompt_file import KeyBases


def tampered(
    path: Path,
    config: KVCacheConfig,
    change: Callable[[dict[str, mx.array], dict[str, str]], None],
) -> None:
    """A good file, its arrays ("0.0" is the header of the state) and text changed."""
    mlx_kivi.save_prompt_cache(path, [filled(config)])
    changed(path, change)


def changed(path: Path, change: Callable[[dict[str, mx.array], dict[str, str]], None]) -> None:
    arrays, text = mx.load(str(path), return_metadata=True)
    mx.eval(arrays)
    change(arrays, text)
    mx.save_safetensors(str(path), arrays, text)


def header_change(**fields: Any) -> Callable[..., None]:
    """Set fields of the header; those of the settings are written config__name."""

    def change(arrays: dict[str, mx.array], _: dict[str, str]) -> None:
        header = json.loads(bytes(np.array(arrays["0.0"])))
        for name, value in fields.items():
            section, _, inner = name.partition("__")
            (header[section] if inner else header)[inner or section] = value
        arrays["0.0"] = mx.array(list(json.dumps(header).encode()), mx.uint8)

    return change


def array_change(name: str, make: Callable[[mx.array], Any]) -> Callable[..., None]:
    def change(arrays: dict[str, mx.array], _: dict[str, str]) -> None:
        made = make(arrays[name])
        if made is None:
            del arrays[name]
        else:
            arrays[name] = made

    return change


HEADERS = {
    "no fields": lambda a, _: a.update({"0.0": mx.array(list(b"{}"), mx.uint8)}),
    "a list": lambda a, _: a.update({"0.0": mx.array(list(b"[1, 2]"), mx.uint8)}),
    "no JSON": lambda a, _: a.update({"0.0": mx.array(list(b"{'a': 1"), mx.uint8)}),
    "deep JSON": lambda a, _: a.update({"0.0": mx.array(list(b"[" * 50_000), mx.uint8)}),
    "not UTF-8": lambda a, _: a.update({"0.0": mx.array([255, 254], mx.uint8)}),
    "floats": lambda a, _: a.update({"0.0": a["0.0"].astype(mx.float32)}),
    "nothing": lambda a, _: a.update({"0.0": mx.zeros((0,), mx.uint8)}),
    "an unknown field": header_change(more=1),
    "negative offset": header_change(offset=-1),
    "offset too small": header_change(offset=3),
    "offset too large": header_change(offset=100_000),
    "offset beyond an array": header_change(offset=2**40),
    "offset of text": header_change(offset="250"),
    "offset of truth": header_change(offset=True),
    "offset with a fraction": header_change(offset=250.5),
    "negative ring_low": header_change(ring_low=-1),
    "ring_low too small": header_change(ring_low=0),
    "ring_low too large": header_change(ring_low=240),
    "negative store_low": header_change(store_low=-1),
    "store_low too large": header_change(store_low=90),
    "packed_attention of text": header_change(packed_attention="yes"),
    "no dtype": header_change(dtype=None),
    "an unknown dtype": header_change(dtype="complex64"),
    "another dtype": header_change(dtype="float16"),
    "dtype of a number": header_change(dtype=3),
    "settings of text": header_change(config="int4"),
    "an unknown setting": header_change(config__more=1),
    "bits out of range": header_change(config__k_bits=7),
    "other bits": header_change(config__v_bits=8),
    "no bits": header_change(config__k_bits=None),
    "group out of range": header_change(config__group_size=31),
    "another group": header_change(config__group_size=64),
    "negative residual": header_change(config__residual_length=-1),
    "another residual": header_change(config__residual_length=64),
    "negative window": header_change(config__window=-90),
    "no window": header_change(config__window=None),
    "a giant window": header_change(config__window=2**50),
    "giant sinks": header_change(config__sink=2**31),
    "more sinks": header_change(config__sink=5),
    "layers of a number": header_change(config__layers=5),
    "another storage dtype": header_change(config__dtype="float16"),
    "not packed": header_change(packed=False),
    "packed of text": header_change(packed="yes"),
    "packed of a number": header_change(packed=1),
    "packed of nothing": header_change(packed=None),
    "negative oldest": header_change(oldest=-1),
    "oldest too large": header_change(oldest=158),
    "oldest of text": header_change(oldest="0"),
    "oldest of truth": header_change(oldest=True),
    "oldest with a fraction": header_change(oldest=0.5),
    "oldest beyond an array": header_change(oldest=2**40),
}

ARRAYS = {
    "one dimension less": array_change("0.1", lambda x: x[0]),
    "fewer slots": array_change("0.1", lambda x: x[:, :, :-1]),
    "another batch": array_change("0.2", lambda x: mx.concatenate([x, x])),
    "integers": array_change("0.1", lambda x: x.astype(mx.int32)),
    "no heads": array_change("0.1", lambda x: x[:, :0]),
    "empty keys": array_change("0.1", lambda x: x[..., :0]),
    "keys of another head size": array_change("0.1", lambda x: x[..., :16]),
    "values of another head size": array_change("0.2", lambda x: mx.concatenate([x, x], -1)),
    "other heads": array_change("0.2", lambda x: mx.concatenate([x, x], 1)),
    "packed words of another type": array_change("0.3", lambda x: x.astype(mx.int32)),
    "fewer packed words": array_change("0.3", lambda x: x[..., :-1]),
    "scales of another type": array_change("0.4", lambda x: x.astype(mx.float32)),
    "scales alone": array_change("0.4", lambda x: x[:, :, :32]),
    "a scale too many": array_change("0.4", lambda x: mx.concatenate([x, x], -1)),
    "a shift of another type": array_change("0.5", lambda x: x.astype(mx.float16)),
    "a value's zero too few": array_change("0.8", lambda x: x[:, :, 1:]),
    "no header": array_change("0.0", lambda x: None),
    "no keys": array_change("0.1", lambda x: None),
    "no shift": array_change("0.5", lambda x: None),
    "no last array": array_change("0.8", lambda x: None),
    "an array too many": lambda a, _: a.update({"0.9": mx.zeros((3,))}),
    "a gap": lambda a, _: a.update({"0.10": mx.zeros((3,))}),
    "a giant index": lambda a, _: a.update({"0.999999999999": mx.zeros((3,))}),
    "an array under an array": lambda a, _: a.update({"0.1.0": mx.zeros((3,))}),
    "nested without end": lambda a, _: a.update({"0.1" + ".0" * 2000: mx.zeros((3,))}),
    "a name": lambda a, _: a.update({"0.keys": mx.zeros((3,))}),
    "an unknown class": lambda _, t: t.update({k: "Nonsense" for k in classes(t)}),
    "a function": lambda _, t: t.update({k: "make_prompt_cache" for k in classes(t)}),
    "another class": lambda _, t: t.update({k: "RotatingKVCache" for k in classes(t)}),
    "a list of caches": lambda _, t: t.update({k: "CacheList" for k in classes(t)}),
    "no class": lambda _, t: [t.pop(k) for k in classes(t)],
}

# Of an unpacked window, whose arrays 3 and 4 are the margin: what left the ring last.
MARGINS = {
    "packed": header_change(packed=True),
    "not full": header_change(offset=60),
    "of another window": header_change(config__window=59),
    "keys of fewer tokens": array_change("0.3", lambda x: x[:, :, 1:]),
    "values of more tokens": array_change("0.4", lambda x: mx.concatenate([x, x], 2)),
    "one dimension less": array_change("0.3", lambda x: x[0]),
    "another batch": array_change("0.4", lambda x: mx.concatenate([x, x])),
    "other heads": array_change("0.3", lambda x: x[:, :1]),
    "another head size": array_change("0.4", lambda x: x[..., :16]),
    "another type": array_change("0.3", lambda x: x.astype(mx.float16)),
    "integers": array_change("0.4", lambda x: x.astype(mx.int32)),
    "no keys": array_change("0.3", lambda x: None),
    "no values": array_change("0.4", lambda x: None),
    "none": lambda a, _: [a.pop(k) for k in ("0.3", "0.4")],
    "an array too many": lambda a, _: a.update({"0.5": mx.zeros((3,))}),
}


# Of a file of two caches, whose bases are entry 2.
BASES = {
    "of another type": (array_change("2.0", lambda x: x.astype(mx.float32)), "float32"),
    "of integers": (array_change("2.1", lambda x: x.view(mx.uint16)), "uint16"),
    "of one dimension less": (array_change("2.0", lambda x: x[0]), "shape"),
    "of one dimension more": (array_change("2.0", lambda x: x[None]), "shape"),
    "not square": (array_change("2.0", lambda x: x[:, 1:]), "shape"),
    "of no heads": (array_change("2.0", lambda x: x[:0]), "shape"),
    "not finite": (array_change("2.1", lambda x: mx.where(x == x[1, 2, 3], mx.nan, x)), "undone"),
    "infinite": (array_change("2.1", lambda x: x * mx.inf), "undone"),
    "of zeros": (array_change("2.0", lambda x: 0 * x), "undone"),
    "singular": (array_change("2.0", lambda x: mx.repeat(x[..., :1], 32, -1)), "undone"),
    "another": (array_change("2.0", lambda x: 2 * x), "is not in it"),
    "missing": (array_change("2.1", lambda x: None), "is not in it"),
    "all missing": (lambda a, _: [a.pop(k) for k in ("2.0", "2.1")], "is not in it"),
    "two times": (lambda a, _: a.update({"2.2": a["2.0"]}), "3 bases, its caches name 2"),
    "one too many": (lambda a, _: a.update({"2.2": basis(7).matrix}), "3 bases, its caches name 2"),
    "one in a list": (lambda a, _: a.update({"2.2.0": basis(7).matrix}), "not a list of arrays"),
    "named": (lambda a, _: a.update({"2.name": a.pop("2.0")}), "entries are missing"),
    "named by no cache": (header_change(balance=None), "packed arrays|2 bases, its caches name 1"),
    "of a name of a number": (header_change(balance=3), "balance is 3"),
    "of a name that no basis has": (header_change(balance="x" * 32), "not at hand"),
    "of a policy that has none": (header_change(config__balanced=False), "as they are"),
    "of keys in 8 bits": (header_change(config__k_bits=8), "as they are"),
    "of keys in full precision": (header_change(config__k_bits=None), "as they are"),
}


def two_with_bases(path: Path, change: Any) -> None:
    mlx_kivi.save_prompt_cache(path, [filled(PACKED, balance=basis(i)) for i in range(2)])
    changed(path, change)


@pytest.mark.parametrize(("change", "why"), BASES.values(), ids=list(BASES))
def test_bases_that_were_tampered_with_are_refused(path: Path, change: Any, why: str) -> None:
    # Whether or not they are at hand.
    alive = [basis(i) for i in range(2)]
    two_with_bases(path, change)
    assert re.search(why, refused(path))
    del alive
    assert re.search(f"{why}|not at hand", refused(path))


@pytest.mark.parametrize(
    ("heads", "dim"), [(1, 32), (4, 32), (2, 16), (2, 64)], ids=["head", "heads", "half", "double"]
)
def test_a_basis_of_other_heads_than_the_cache_that_names_it_is_refused(
    path: Path, heads: int, dim: int
) -> None:
    other = basis(0, heads, dim)
    mlx_kivi.save_prompt_cache(path, [filled(PACKED, balance=basis(0))])

    def change(arrays: dict[str, mx.array], text: dict[str, str]) -> None:
        header_change(balance=other.name)(arrays, text)
        arrays["1.0"] = other.matrix

    changed(path, change)
    refused(path, "keys of 2 heads, head size 32", f"of {heads} heads, head size {dim}")


@pytest.mark.parametrize("where", [[0], [1], [2], [2, 3], [0, 3]], ids=str)
def test_bases_in_other_places_than_behind_the_caches_are_refused(
    path: Path, where: list[int]
) -> None:
    parts = [filled(PACKED, balance=basis(0)), filled(PLAIN)]
    for place in where:
        parts.insert(place, KeyBases([basis(0)]))
    with mlx_kivi.patched():
        hooks.attention.original("save_prompt_cache")(str(path), parts, {})
    if where == [2]:
        assert len(mlx_kivi.load_prompt_cache(path)) == 2
    else:
        refused(path, "KeyBases")


def test_bases_among_the_members_of_a_list_of_caches_are_refused(path: Path) -> None:
    parts = [CacheList(stock(), KeyBases([basis(0)])), filled(PACKED, balance=basis(0))]
    hooks.attention.original("save_prompt_cache")(str(path), parts, {})
    refused(path)


def test_bases_of_stock_caches_are_refused(path: Path) -> None:
    hooks.attention.original("save_prompt_cache")(str(path), [stock(), KeyBases([basis(0)])], {})
    refused(path)


def classes(text: dict[str, str]) -> list[str]:
    return [name for name, value in text.items() if value == "QuantizedStreamingCache"]


@pytest.mark.parametrize("change", HEADERS.values(), ids=list(HEADERS))
def test_a_header_that_was_tampered_with_is_refused(path: Path, change: Any) -> None:
    tampered(path, PACKED, change)
    refused(path)


@pytest.mark.parametrize("change", ARRAYS.values(), ids=list(ARRAYS))
def test_arrays_that_were_tampered_with_are_refused(path: Path, change: Any) -> None:
    tampered(path, PACKED, change)
    refused(path)


@pytest.mark.parametrize("change", MARGINS.values(), ids=list(MARGINS))
def test_a_margin_that_was_tampered_with_is_refused(path: Path, change: Any) -> None:
    tampered(path, PLAIN, change)
    refused(path)


@pytest.mark.parametrize("ring_low", [0, 153, 187, 188, 246])
def test_a_ring_that_lacks_what_the_next_query_sees_is_refused(path: Path, ring_low: int) -> None:
    # 246 tokens follow the sinks, ring and margin hold 92 of them, the next query sees 59.
    tampered(path, PLAIN, header_change(ring_low=ring_low))
    if ring_low == 187:
        mlx_kivi.load_prompt_cache(path)  # the highest that will do
    else:
        refused(path, "ring_low")


def test_a_file_that_was_not_changed_is_read(path: Path) -> None:
    tampered(path, PACKED, lambda arrays, text: None)
    cache = filled(PACKED)
    loaded = mlx_kivi.load_prompt_cache(path)[0]
    for (_, a), (_, b) in zip(tree_flatten(loaded.state), tree_flatten(cache.state), strict=True):
        assert mx.array_equal(a, b)


def test_a_state_that_was_refused_leaves_a_cache_as_it_was() -> None:
    cache, twin = filled(PACKED), filled(PACKED)
    for bad in (None, [], [mx.zeros((3,))], cache.state[:-1], ["text"], {"0": 1}):
        with pytest.raises(ValueError):
            cache.state = bad
    for got, want in zip(cache.state, twin.state, strict=True):
        assert mx.array_equal(got, want)
