"""`mlx_kivi.calibrate`, the function, and the command of that name."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import helpers
import mlx.core as mx
import pytest
from helpers import ROOT, tinygpt_file

import mlx_kivi
from conformance.architectures import models
from conformance.common import tiny_llama
from mlx_kivi import KVCacheConfig
from mlx_kivi.models import basis_files, factory

command = importlib.import_module("mlx_kivi.calibrate")
DASH_M = [sys.executable, "-W", "error::RuntimeWarning", "-m"]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(basis_files, "directory", lambda: tmp_path / "kept")
    return tmp_path / "kept"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    return partial(helpers.run, capsys, command.main)


def test_says_how_many_and_where(place: Path) -> None:
    model = tiny_llama()
    first = mlx_kivi.calibrate(model)
    assert (first.measured, first.layers, first.why) == (2, 2, None)
    assert first.file is not None and [first.file] == list(place.iterdir())
    assert first.seconds is not None and first.seconds > 0
    again = factory.Calibrated(2, 2, first.file, None, None)
    assert mlx_kivi.calibrate(model) == again and mlx_kivi.calibrate(tiny_llama()) == again
    first.file.unlink()
    assert mlx_kivi.calibrate(model) == again and first.file.is_file()


def test_says_why_not() -> None:
    for name, why in (
        ("gemma2", "the model computes on cached keys itself"),
        ("mamba", "no cache of it can be packed"),
    ):
        model = models.build(name)
        assert mlx_kivi.calibrate(model) == factory.Calibrated(0, 2, None, why, None)
    model = tiny_llama()
    model.args.vocab_size = None
    found = mlx_kivi.calibrate(model)
    assert (found.measured, found.file) == (0, None)
    assert "failed (the model does not say how many token ids it knows)" in str(found.why)


def test_a_cache_after_it_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    mlx_kivi.calibrate(model)
    monkeypatch.setattr("mlx_kivi.models.calibration.measure", None)
    caches = mlx_kivi.make_prompt_cache(model, KVCacheConfig.from_name("int2"))
    assert None not in [cache.balance for cache in caches]


def test_the_name_is_callable_whatever_was_imported() -> None:
    code = """
import mlx_kivi, importlib
first = mlx_kivi.calibrate
module = importlib.import_module("mlx_kivi.calibrate")
from mlx_kivi import calibrate
import mlx_kivi.calibrate as third
class Nothing: layers = ()
for each in (first, mlx_kivi.calibrate, calibrate, third, module):
    assert each(Nothing()).layers == 0
assert module.main and "mlx_kivi.calibrate" in __import__("sys").modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=100)


def test_the_command_measures_once(tmp_path: Path, place: Path, run: Any) -> None:
    path = tinygpt_file(tmp_path, ctx=64)
    code, out, err = run("--model", path)
    (file,) = place.iterdir()
    kept = f"kept in {file} ({file.stat().st_size / 1000:.1f} kB)\n"
    assert (code, err) == (0, "") and out.startswith("Keys of 2 of 2 layers measured in ")
    assert out.endswith(f" s, {kept}")
    assert run("--model", path) == (0, f"Keys of 2 of 2 layers were measured already, {kept}", "")


def test_a_disk_that_takes_nothing_is_said(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    path = tinygpt_file(tmp_path, ctx=64)
    monkeypatch.setattr(mx, "save_safetensors", full)
    code, out, err = run("--model", path)
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert out.endswith("kept in no file: the user's cache directory can't be written\n")


def test_a_model_without_says_why(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tinygpt_file(tmp_path, ctx=64)
    monkeypatch.setattr(command.mlx_lm, "load", None)
    monkeypatch.setattr(command.loading, "load", lambda *_, **__: (models.build("gemma2"), None))
    why = "the model computes on cached keys itself"
    line = f"Keys of 0 of 2 layers take a basis of the model's own: {why}\n"
    assert run("--model", path) == (0, line, "")


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        ([], 2, "the following arguments are required: --model"),
        (["--model", "x", "--kv-bits", 4], 2, "unrecognized arguments: --kv-bits 4"),
        (["--model", "./no/such"], 1, "--model ./no/such: no such directory"),
        (["--model", "{file}", "--lora-weight", 2], 2, "--lora-weight needs --lora FILE"),
        (["--model", "{file}", "--adapter-path", "x"], 2, "--adapter-path is for model"),
        (["--model", "{text}"], 1, "not a .tinygpt file"),
    ],
)
def test_what_is_wrong_is_one_line(
    flags: list[Any], code: int, says: str, tmp_path: Path, run: Any
) -> None:
    (tmp_path / "text").write_text("text")
    named = {"file": tinygpt_file(tmp_path, ctx=64), "text": tmp_path / "text"}
    got, out, err = run(*[str(flag).format(**named) for flag in flags])
    assert (got, out, err.count("\n")) == (code, "", 1)
    assert err.startswith("mlx_kivi.calibrate: error: ") and says in err


@pytest.mark.parametrize("words", [["mlx_kivi.calibrate"], ["mlx_kivi", "calibrate"]])
def test_both_ways_to_run_it(words: list[str], tmp_path: Path) -> None:
    path = tinygpt_file(tmp_path, ctx=64)
    for said in ("measured in", "were measured already"):
        done = subprocess.run(
            [*DASH_M, *words, "--model", path],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=100,
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "home"), "HOME": str(tmp_path)},
        )
        assert (done.returncode, done.stderr) == (0, "") and said in done.stdout
        assert str(tmp_path) in done.stdout
