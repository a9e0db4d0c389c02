"""Prompt files that are broken, foreign or tampered with, and writing that is cut off."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_caches
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache
from prompt_files import PACKED, PLAIN, filled, refused

import mlx_kivi
from mlx_kivi import KVCacheConfig, QuantizedStreamingCache
from mlx_kivi.models.learned_positions import RestartingCache
from mlx_kivi.upstream.prompt_file import PromptFileError, check

PRESET = KVCacheConfig.from_name

# Files that are no prompt files


def test_a_missing_file_is_named(path: Path) -> None:
    refused(path, "no such file")


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"\xff" * 100, b"PK\x03\x04" + bytes(200), bytes(8) + b"{}"]
)
def test_a_file_of_another_kind_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    refused(path, "make it again")


def test_a_directory_is_refused(path: Path) -> None:
    path.mkdir()
    refused(path)


@pytest.mark.parametrize("metadata", [{}, {"format": "mlx"}, {"0": "x"}, {"0.0": "", "1.0": "x"}])
def test_weights_of_a_model_are_refused(path: Path, metadata: dict[str, str]) -> None:
    mx.save_safetensors(str(path), {"model.embed.weight": mx.zeros((4, 4))}, metadata)
    refused(path, "make it again")


def test_a_file_cut_short_anywhere_is_refused(path: Path) -> None:
    mlx_kivi.save_prompt_cache(path, [filled(PACKED), filled(PLAIN)])
    content = path.read_bytes()
    for length in (0, 7, 8, 9, 100, 600, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        refused(path, "make it again")


def test_bytes_changed_at_random_give_a_cache_or_the_one_error(path: Path) -> None:
    """Of the two headers, that is: what the arrays hold can be anything."""
    stock = KVCache()
    stock.update_and_fetch(mx.ones((1, 1, 3, 4)), mx.ones((1, 1, 3, 4)))
    mlx_kivi.save_prompt_cache(path, [filled(PACKED, 70), stock, filled(PLAIN, 0)])
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    inner = content.index(b'{"config"')
    rng = random.Random(0)
    outcomes = {True: 0, False: 0}
    for i in range(300):
        broken = bytearray(content)
        start, stop = (0, end) if i % 2 else (inner, inner + 400)
        for _ in range(rng.randint(1, 3)):
            broken[rng.randrange(start, stop)] = rng.choice(b'0123456789"[]{},:-eEtn \x00\xff')
        path.write_bytes(broken)
        try:
            mlx_kivi.load_prompt_cache(path)
        except PromptFileError as error:
            assert "\n" not in str(error)
            outcomes[False] += 1
        else:
            outcomes[True] += 1
    assert outcomes[False] > 200


# Writing


@pytest.mark.parametrize("step", ["while writing", "before the move"])
def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(
    path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlx_kivi.save_prompt_cache(path, [filled(PACKED)], {"version": "old"})
    before = path.read_bytes()
    original = mx.save_safetensors

    def fail(name: str, *args: Any) -> None:
        if step == "while writing":
            Path(name).write_bytes(b"half a file")
        else:
            original(name, *args)
        raise RuntimeError("disk full")

    monkeypatch.setattr(mx, "save_safetensors", fail)
    with pytest.raises(PromptFileError, match=r"can't be written \(disk full\)"):
        mlx_kivi.save_prompt_cache(path, [filled(PLAIN)], {"version": "new"})
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "prompt.safetensors"
    with pytest.raises(PromptFileError) as caught:
        mlx_kivi.save_prompt_cache(path, [filled(PLAIN)])
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_replaces_the_one_before_and_a_link_stays(tmp_path: Path) -> None:
    target, link = tmp_path / "target.safetensors", tmp_path / "link.safetensors"
    mlx_kivi.save_prompt_cache(target, [filled(PACKED)])
    link.symlink_to(target)
    mlx_kivi.save_prompt_cache(link, [filled(PLAIN)])
    assert link.is_symlink()
    assert mlx_kivi.load_prompt_cache(target)[0].config == PLAIN
    assert sorted(tmp_path.iterdir()) == [link, target]


def test_the_suffix_is_appended_as_mlx_lm_does(tmp_path: Path) -> None:
    mlx_kivi.save_prompt_cache(tmp_path / "chat", [filled(PLAIN)])
    assert (tmp_path / "chat.safetensors").is_file()
    assert mlx_kivi.load_prompt_cache(tmp_path / "chat")[0].offset == 250


def test_a_file_of_stock_caches_is_found_without_its_suffix(tmp_path: Path) -> None:
    cache = KVCache()
    cache.update_and_fetch(*mx.zeros((2, 1, 2, 7, 32)))
    mlx_caches.save_prompt_cache(str(tmp_path / "chat.safetensors"), [cache])
    with mlx_kivi.patched():
        assert mlx_caches.load_prompt_cache(str(tmp_path / "chat"))[0].offset == 7


# Settings


def test_settings_that_agree_pass() -> None:
    caches = [filled(PACKED), CacheList(ArraysCache(1), filled(PLAIN)), KVCache()]
    check(caches, [filled(PACKED, 0), CacheList(ArraysCache(1), filled(PLAIN, 0)), KVCache()])


@pytest.mark.parametrize(
    ("expected", "words"),
    [
        ([PACKED], ["2 layers", "the model has 1", "the model that the file"]),
        ([PACKED, PACKED.replace(window=64)], ["window=90", "window=64", "layer 1"]),
        ([PACKED.replace(k_bits=8), PACKED], ["k_bits=4", "k_bits=8", "layer 0"]),
        ([PACKED, None], ["QuantizedStreamingCache for layer 1", "KVCache"]),
    ],
)
def test_settings_that_contradict_the_flags_are_named(
    expected: list[KVCacheConfig | None], words: list[str]
) -> None:
    wanted = [KVCache() if c is None else QuantizedStreamingCache(c) for c in expected]
    with pytest.raises(PromptFileError) as caught:
        check([filled(PACKED), filled(PACKED)], wanted)
    message = str(caught.value)
    assert message.startswith("--prompt-cache-file") and "\n" not in message
    assert all(word in message for word in words)


@pytest.mark.parametrize(
    ("made", "flags", "words"),
    [
        (PRESET("kivi4"), PRESET("int4"), ["balanced=False", "balanced=True", "kivi4, or leave"]),
        (PRESET("kivi4", window=200), PRESET("int4", window=200), ["use --kv-quantize kivi4,"]),
        (PRESET("int4"), PRESET("kivi4"), ["balanced=True", "use --kv-quantize int4, or leave"]),
        (PRESET("kivi2", sink=2), PRESET("int2"), ["k_bits=2", "use --kv-quantize kivi2,"]),
        (PRESET("int2"), PRESET("int3"), ["v_bits=2", "use --kv-quantize int2, or leave"]),
        (PRESET("none"), PRESET("int4"), ["k_bits=None", "use --kv-quantize none, or leave"]),
        (
            PRESET("kivi4", group_size=32),
            PRESET("int4", group_size=32),
            ["balanced=False", "give balanced=True: leave the cache's flags out, or make"],
        ),
        (
            PRESET("int4", window=90),
            PRESET("int4", window=60),
            ["give window=60: leave the cache's flags out, or make"],
        ),
    ],
)
def test_the_mend_names_the_preset_that_a_file_was_made_with(
    made: KVCacheConfig, flags: KVCacheConfig, words: list[str]
) -> None:
    with pytest.raises(PromptFileError) as caught:
        check([QuantizedStreamingCache(made)], [QuantizedStreamingCache(flags)])
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


@pytest.mark.parametrize("name", ["none", "int8", "bf16"])
def test_a_basis_that_nothing_is_packed_in_makes_no_difference(name: str) -> None:
    """As in files of before there was a choice."""
    made = [PRESET(name, balanced=balanced, window=500) for balanced in (False, True)]
    for theirs, ours in (made, made[::-1]):
        check([QuantizedStreamingCache(theirs)], [QuantizedStreamingCache(ours)])


@pytest.mark.parametrize("bits", [{"k_bits": 4}, {"v_bits": 4}])
def test_a_basis_that_keys_or_values_are_packed_in_makes_one(bits: dict[str, int]) -> None:
    theirs, ours = (KVCacheConfig(**bits, balanced=balanced) for balanced in (False, True))
    with pytest.raises(PromptFileError, match="with balanced=False"):
        check([QuantizedStreamingCache(theirs)], [QuantizedStreamingCache(ours)])


def test_a_window_that_changes_what_a_cache_is_for_is_named() -> None:
    caches = [RestartingCache(PLAIN)]
    with pytest.raises(PromptFileError, match=r"with window=60 \(layer 0\), .* give window=None:"):
        check(caches, [QuantizedStreamingCache(PLAIN.replace(window=None))])
    with pytest.raises(PromptFileError, match="has RestartingCache for layer 0"):
        check(caches, [QuantizedStreamingCache(PLAIN)])


def test_members_of_a_list_of_caches_are_compared_too() -> None:
    ours, theirs = (CacheList(KVCache(), filled(c)) for c in (PACKED, PACKED.replace(sink=2)))
    with pytest.raises(PromptFileError, match="sink=2"):
        check([theirs], [ours])
