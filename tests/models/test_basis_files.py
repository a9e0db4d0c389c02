"""What is kept of a model: by what it is found, and what is taken from it."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.tuner.utils import linear_to_lora_layers

from conformance.common import tiny_llama
from mlx_kivi.cache.basis import Balance
from mlx_kivi.models import basis_files
from mlx_kivi.models.basis_files import fingerprint, load, path, save

NAME = "0" * 32


def balance(seed: int = 0) -> Balance:
    return Balance(mx.array(np.random.RandomState(seed).normal(size=(2, 32, 32))))


KEPT = (balance(1), None, balance(2))


def names(found: Any) -> Any:
    return found and [b and b.name for b in found]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    where = tmp_path / "not" / "there yet"
    monkeypatch.setattr(basis_files, "directory", lambda: where)
    return where


@pytest.fixture
def kept(place: Path) -> Path:
    file = save(NAME, KEPT)
    assert file is not None
    return file


# Fingerprints


def changed(model: nn.Module) -> None:
    model.layers[1].mlp.up_proj.weight = model.layers[1].mlp.up_proj.weight + 1e-3


def merged(model: nn.Module) -> None:
    """As after LoRA: a product of two thin matrices on one weight, of one layer."""
    layer = model.layers[-1].self_attn.q_proj
    out, width = layer.weight.shape
    layer.weight = layer.weight + 0.01 * mx.random.normal((out, 2)) @ mx.random.normal((2, width))


def reworded(model: nn.Module) -> None:
    """One bit of each word of quantised weights, which float32 would round away."""
    nn.quantize(model, group_size=32, bits=8)
    before = fingerprint(model)
    for layer in model.layers:
        layer.self_attn.q_proj.weight = layer.self_attn.q_proj.weight ^ mx.array(1, mx.uint32)
    assert fingerprint(model) != before


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "a layer": changed,
    "dtype": lambda model: model.set_dtype(mx.bfloat16),
    "quantize": lambda model: nn.quantize(model, group_size=32, bits=4),
    "lora": lambda model: linear_to_lora_layers(model, 1, {"rank": 2, "scale": 1.0, "dropout": 0}),
    "lora, merged": merged,
    "words": reworded,
    "rope": lambda model: setattr(model.args, "rope_theta", 5e5),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_another_model_has_another_name(change: Callable[[nn.Module], Any]) -> None:
    model = tiny_llama()
    before = fingerprint(model)
    change(model)
    assert fingerprint(model) != before


def test_the_same_model_has_the_same_name() -> None:
    assert fingerprint(tiny_llama()) == fingerprint(tiny_llama())
    assert fingerprint(tiny_llama()) != fingerprint(tiny_llama(seed=1))
    assert len(fingerprint(nn.Module())) == 32  # of no weights and no settings


# Files


def test_what_was_kept_is_found(kept: Path) -> None:
    assert kept == path(NAME)
    assert names(load(NAME, 3)) == names(KEPT)
    assert [file.name for file in kept.parent.iterdir()] == [f"{NAME}.safetensors"]
    assert save(NAME, (None, None)) == kept
    assert load(NAME, 2) == (None, None)


def test_nothing_is_found_where_nothing_is(place: Path) -> None:
    assert load(NAME, 3) is None and not place.exists()


def test_a_file_may_go_at_any_time(kept: Path) -> None:
    found = load(NAME, 3)
    kept.unlink()
    assert load(NAME, 3) is None
    assert names(found) == names(KEPT) and found[0].matrix.sum().item() != 0
    assert save(NAME, found) == kept and names(load(NAME, 3)) == names(KEPT)


def rewrite(file: Path, change: Callable[[dict[str, mx.array], dict[str, str]], Any]) -> None:
    loaded: Any = mx.load(str(file), return_metadata=True)
    arrays, metadata = loaded
    mx.eval(arrays)
    change(arrays, metadata)
    mx.save_safetensors(str(file), arrays, metadata)


def tampered(arrays: dict[str, mx.array], _: Any) -> None:
    arrays["0"] = arrays["0"] * mx.array(1.01, mx.bfloat16)


def of_one_fewer(arrays: dict[str, mx.array], metadata: dict[str, str]) -> None:
    metadata["names"] = json.dumps(json.loads(metadata["names"])[:2])


def swapped(arrays: dict[str, mx.array], _: Any) -> None:
    arrays["0"], arrays["2"] = arrays["2"], arrays["0"]


def replaced_by_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def replaced_by_loop(file: Path) -> None:
    file.unlink()
    file.symlink_to(file)


def replaced_by_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)  # type: ignore[attr-defined,unused-ignore]


def header_of(length: int) -> Callable[[Path], Any]:
    return lambda file: file.write_bytes(length.to_bytes(8, "little") + b"{}")


FAULTS: dict[str, Callable[[Path], Any]] = {
    "empty": lambda file: file.write_bytes(b""),
    "garbage": lambda file: file.write_bytes(bytes(range(256)) * 40),
    "text": lambda file: file.write_text("[]"),
    "header of 2**60 bytes": header_of(2**60),
    "cut in the header": lambda file: os.truncate(file, 100),
    "cut by half": lambda file: os.truncate(file, file.stat().st_size // 2),
    "cut by a byte": lambda file: os.truncate(file, file.stat().st_size - 1),
    "a flipped bit": lambda file: file.write_bytes(
        file.read_bytes()[:-9] + bytes([file.read_bytes()[-9] ^ 1]) + file.read_bytes()[-8:]
    ),
    "tampered": lambda file: rewrite(file, tampered),
    "swapped": lambda file: rewrite(file, swapped),
    "one is missing": lambda file: rewrite(file, lambda arrays, _: arrays.pop("2")),
    "one name fewer": lambda file: rewrite(file, of_one_fewer),
    "names that are no list": lambda file: rewrite(file, lambda _, m: m.update(names="3")),
    "of another model": lambda file: rewrite(file, lambda _, m: m.update(model="1" * 32)),
    "no metadata": lambda file: rewrite(file, lambda _, m: m.clear()),
    "not finite": lambda file: rewrite(file, lambda a, _: a.update({"0": a["0"] * mx.nan})),
    "a directory": replaced_by_directory,
    "a loop of links": replaced_by_loop,
    "a pipe": replaced_by_pipe,
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_what_is_not_sound_is_not_taken_and_written_anew(
    fault: Callable[[Path], Any], kept: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fault(kept)
    assert load(NAME, 3) is None
    again = save(NAME, KEPT)
    if kept.is_dir():
        assert again is None
    else:
        assert again == kept and names(load(NAME, 3)) == names(KEPT)
    assert len(list(kept.parent.iterdir())) == 1  # nothing half written beside it
    assert capfd.readouterr() == ("", "")


def test_another_count_of_caches_is_not_taken(kept: Path) -> None:
    assert load(NAME, 2) is None and load(NAME, 4) is None


def short(file: str, *_: Any) -> None:
    """As mlx leaves it where a disk is full."""
    Path(file).write_bytes(b"\x40" + bytes(99))


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


READ_ONLY = OSError(errno.EROFS, "Read-only file system")
DISKS = {
    "no directory": (Path, "mkdir", raising(READ_ONLY)),
    "read-only": (mx, "save_safetensors", raising(RuntimeError("[save] Failed to open file"))),
    "full, told": (mx, "save_safetensors", raising(OSError(errno.ENOSPC, "No space left"))),
    "full, not told": (mx, "save_safetensors", short),
    "nothing written": (mx, "save_safetensors", lambda *_: None),
    "not to be moved": (os, "replace", raising(PermissionError(errno.EPERM, "no"))),
    "not to be removed": (Path, "unlink", raising(READ_ONLY)),
    "a name that can't be said": (mx, "save_safetensors", raising(UnicodeError("surrogates"))),
}


@pytest.mark.parametrize(("owner", "name", "fails"), DISKS.values(), ids=DISKS)
def test_a_disk_that_fails_is_no_error(
    owner: Any, name: str, fails: Any, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails)
        file = save(NAME, KEPT)
    assert (file is None) == (load(NAME, 3) is None) == (name != "unlink")
    assert file is not None or not list(place.glob("*"))


def test_what_was_kept_outlives_a_disk_that_became_full(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "save_safetensors", short)
    assert save(NAME, (None, balance(3), None)) is None
    assert names(load(NAME, 3)) == names(KEPT)


def test_a_file_in_place_of_the_directory_is_no_error(place: Path) -> None:
    place.parent.parent.mkdir(exist_ok=True)
    place.parent.write_text("")
    assert save(NAME, KEPT) is None and load(NAME, 3) is None


def test_what_a_stopped_process_left_is_swept_up_later(kept: Path) -> None:
    old, young = (kept.with_name(f"{name}.tmp.safetensors") for name in ("old.1", "young.2"))
    for file in (old, young):
        file.write_bytes(b"half")
    os.utime(old, (time.time() - 2 * 3600,) * 2)
    assert save(NAME, KEPT) == kept
    assert not old.exists() and young.exists()
