"""An mlx that computes packed attention wrong is refused in one line, before anything changes."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import base, llama
from mlx_lm.models import cache as mlx_caches

import mlx_kivi
from mlx_kivi import QuantizedStreamingCache, hooks
from mlx_kivi.hooks import HookSet, UnsupportedError
from mlx_kivi.models import probe

LINE = "mlx {} computes packed attention wrong: install mlx 0.32.2 or newer (pip install -U mlx)"
patch_module = importlib.import_module("mlx_kivi.patch")


@pytest.fixture(autouse=True)
def _first_use(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hooks as they are before their first use."""
    mlx_kivi.unpatch()
    monkeypatch.setattr(hooks, "attention", HookSet(hooks.attention.make))
    yield
    mlx_kivi.unpatch()


@pytest.fixture
def prompt_file(tmp_path: Path) -> str:
    cache = QuantizedStreamingCache()
    cache.update_and_fetch(mx.ones((1, 1, 3, 32)), mx.ones((1, 1, 3, 32)))
    mlx_kivi.save_prompt_cache(tmp_path / "prompt", [cache])
    hooks.attention = HookSet(hooks.attention.make)
    return str(tmp_path / "prompt")


def codes() -> list[Any]:
    """The code of mlx_lm's functions that are replaced."""
    names = ("make_prompt_cache", "trim_prompt_cache", "save_prompt_cache", "load_prompt_cache")
    functions = [getattr(mlx_caches, name) for name in names]
    return [f.__code__ for f in (*functions, base.scaled_dot_product_attention)]


@pytest.mark.parametrize(
    "version",
    ["0.31.2", "0.32.1", "0.32", "0.9", "0.32.1.dev20260801", "0.32.1+cpu", "0.32.1.post1"],
)
def test_every_way_in_refuses_an_old_mlx_each_time(
    version: str, tiny_llama: llama.Model, prompt_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = codes()
    monkeypatch.setattr(mx, "__version__", version)

    def block() -> None:
        with mlx_kivi.patched(window=90):
            pass

    ways_in: list[Callable[[], Any]] = [
        mlx_kivi.patch,
        block,
        lambda: mlx_kivi.make_prompt_cache(tiny_llama),
        lambda: mlx_kivi.load_prompt_cache(prompt_file),
        lambda: mlx_kivi.save_prompt_cache(prompt_file, [QuantizedStreamingCache()]),
    ]
    for way_in in ways_in * 2:
        with pytest.raises(UnsupportedError) as raised:
            way_in()
        assert str(raised.value) == LINE.format(version)
        assert codes() == before
        assert not hooks.attention.active and not patch_module._factory.active
    assert not hasattr(mlx_caches, "QuantizedStreamingCache")
    assert type(mlx_caches.make_prompt_cache(tiny_llama)[0]) is mlx_caches.KVCache


@pytest.mark.parametrize(
    "version",
    ["0.32.2", "0.32.2.dev20260901", "0.32.2+cpu", "0.32.10", "0.33.0.dev1", "0.33", "1.0"],
)
def test_a_newer_mlx_is_taken(
    version: str, tiny_llama: llama.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "__version__", "0.31.2")
    with pytest.raises(UnsupportedError):
        mlx_kivi.patch()
    monkeypatch.setattr(mx, "__version__", version)
    mlx_kivi.patch()
    assert type(mlx_caches.make_prompt_cache(tiny_llama)[0]) is QuantizedStreamingCache


class Unlisted(llama.Model):
    """A model that no table knows: it is tried."""


def test_the_probe_does_not_take_an_old_mlx_for_a_model_that_needs_arrays(
    tiny_llama: llama.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Unlisted(tiny_llama.args)
    monkeypatch.setattr(mx, "__version__", "0.31.2")
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="0.31.2"):
            probe.takes_packed(model)
    monkeypatch.undo()
    assert probe.takes_packed(model)


def test_the_package_can_be_imported_on_an_old_mlx() -> None:
    code = "import mlx.core as mx; mx.__version__ = '0.31.2'; import mlx_kivi; mlx_kivi.patch()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stderr.splitlines()[-1] == "mlx_kivi.hooks.UnsupportedError: " + LINE.format(
        "0.31.2"
    )
