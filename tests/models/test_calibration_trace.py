"""The pass that measures a model leaves no trace, holds little, and is silent but at a terminal."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from helpers import parameters
from mlx_lm.models import base
from mlx_lm.models.llama import Model

import mlx_kivi
from conformance.common import tiny_llama
from mlx_kivi import KVCacheConfig, hooks, make_prompt_cache
from mlx_kivi.models import basis_files, calibration
from mlx_kivi.models.calibration import measure
from mlx_kivi.models.factory import calibrated, ours

INT4 = KVCacheConfig.from_name("int4")


class Broken(Model):
    """A llama that can't be run."""

    __module__ = Model.__module__

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        raise RuntimeError("broken")


@pytest.fixture(autouse=True)
def _few(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory for each test, and a pass of fewer tokens."""
    monkeypatch.setattr(basis_files, "directory", lambda: tmp_path / "kept")
    monkeypatch.setattr(calibration, "TOKENS", 132)


def names(caches: list[Any]) -> list[str | None]:
    return [cache.balance and cache.balance.name for cache in ours(caches)]


def test_random_numbers_go_on_as_if_nothing_had_been() -> None:
    model = tiny_llama()
    state: Any = mx.random.state
    mx.random.seed(2**63 + 12345)
    mx.eval(mx.random.normal((3,)))
    before = state[0].tolist()
    calibrated(model)
    assert state[0].tolist() == before


class Noisy(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.drop = inner, nn.Dropout(0.5)

    def __call__(self, x: mx.array) -> mx.array:
        return self.drop(self.inner(x)) + 0.1 * mx.random.normal(x.shape)


def test_dropout_is_off_and_training_as_it_was_after() -> None:
    found = []
    for seed in range(2):
        model = tiny_llama()
        model.layers[0].mlp = Noisy(model.layers[0].mlp)
        model.train()
        model.layers[1].eval()
        model.layers[1].mlp.train()
        modes = [(name, module.training) for name, module in model.named_modules()]
        mx.random.seed(seed)
        found.append([b and b.name for b in measure(model, maker(model))])
        assert [(name, module.training) for name, module in model.named_modules()] == modes
    assert found[0] == found[1]
    model.layers[0].mlp.drop = nn.Dropout(0)
    assert [b and b.name for b in measure(model, maker(model))] == found[0]


def maker(model: nn.Module) -> Callable[[], list[Any]]:
    return lambda: make_prompt_cache(model, KVCacheConfig(sink=0))


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("kind", [Model, Broken])
def test_mlx_lm_is_as_it_was(held: bool, kind: type, tiny_llama: Model) -> None:
    function = base.scaled_dot_product_attention
    holder = object()
    if held:
        hooks.attention.hold(holder)
    try:
        before = function.__code__
        model = kind(tiny_llama.args)
        assert (calibrated(model).failed is None) is (kind is Model)
        assert function.__code__ is before and hooks.attention.active is held
    finally:
        hooks.attention.release(holder)


def test_other_caches_and_the_weights_are_untouched(tiny_llama: Model) -> None:
    other = make_prompt_cache(tiny_llama, KVCacheConfig.from_name("int8"))
    with_other = tiny_llama(mx.arange(97)[None], cache=other)
    states = [np.array(a) for cache in other for a in cache.state]
    model = Model(tiny_llama.args)
    before = dict(parameters(model))
    copies = {name: np.array(x) for name, x in before.items()}
    make_prompt_cache(model, INT4)
    after = parameters(model)
    assert all(after[name] is x for name, x in before.items()) and len(after) == len(before)
    assert all(np.array_equal(np.array(after[name]), x) for name, x in copies.items())
    now = [np.array(a) for cache in other for a in cache.state]
    assert all(np.array_equal(a, b) for a, b in zip(states, now, strict=True))
    assert mx.isfinite(with_other).all()


def test_weights_that_are_not_computed_yet_are_measured_alike() -> None:
    lazy, model = tiny_llama(), tiny_llama()
    scale = mx.array(1.0)
    lazy.update(nn.utils.tree_map(lambda x: x * scale, lazy.parameters()))
    assert names(make_prompt_cache(lazy, INT4)) == names(make_prompt_cache(model, INT4))


def peak_of(work: Callable[[], Any]) -> int:
    """Bytes that are alive at most, beside those before."""
    gc.collect()
    limit = mx.set_memory_limit(1)  # mlx then waits for one operation before the next
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    work()
    mx.set_memory_limit(limit)
    return mx.get_peak_memory() - before


def test_no_layer_waits_for_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward pass holds the keys and values of all layers; this one gives each back."""
    monkeypatch.setattr(calibration, "TOKENS", 516)
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    try:
        peaks = {}
        for layers in (4, 24):
            model = tiny_llama(num_hidden_layers=layers)
            make = maker(model)
            caches = make()
            held = peak_of(lambda: mx.eval(model(mx.zeros((1, 516), mx.int32), cache=caches)))
            peaks[layers] = peak_of(lambda: measure(model, make)), held
    finally:
        mx.set_default_device(device)
    few, many = peaks[4], peaks[24]
    a_layer = 516 * 2 * 32 * 4 * 2  # keys and values, in float32
    assert many[1] - few[1] > 15 * a_layer
    assert many[0] - few[0] < 5 * a_layer
    assert many[0] < many[1]


# At a terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_is_for_terminals(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    make_prompt_cache(tiny_llama(), INT4)
    out, err = capsys.readouterr()
    assert out == "" and ("Measuring the model's keys, once" in err) is terminal
    make_prompt_cache(tiny_llama(), INT4)
    assert capsys.readouterr() == ("", "")


def test_no_stderr_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    assert mlx_kivi.calibrate(tiny_llama()).why is None
