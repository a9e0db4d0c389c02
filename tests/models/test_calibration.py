"""The pass that measures a model: when it is made, what it finds, and that it leaves no trace."""

from __future__ import annotations

import gc
from threading import Barrier, Thread
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from helpers import tinygpt_model
from mlx_lm.models.llama import Model

import mlx_kivi
from conformance.architectures import models
from conformance.common import tiny_llama
from mlx_kivi import KVCacheConfig, make_prompt_cache
from mlx_kivi.config import PRESETS
from mlx_kivi.models import basis_files, calibration
from mlx_kivi.models.calibration import balanced, measure
from mlx_kivi.models.factory import build, calibrated, ours

INT4, INT2 = (KVCacheConfig.from_name(name) for name in ("int4", "int2"))


@pytest.fixture(autouse=True)
def _few(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory for each test, and a pass of fewer tokens."""
    monkeypatch.setattr(basis_files, "directory", lambda: tmp_path / "kept")
    monkeypatch.setattr(calibration, "TOKENS", 132)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The models that a pass was made of."""
    made: list[Any] = []

    def counted(model: Any, make: Any) -> Any:
        made.append(model)
        return measure(model, make)

    monkeypatch.setattr(calibration, "measure", counted)
    return made


def names(caches: list[Any]) -> list[str | None]:
    return [cache.balance and cache.balance.name for cache in ours(caches)]


# When


@pytest.mark.parametrize("name", [*PRESETS, "8 and 4", "a window too small"])
def test_only_keys_in_few_bits_cost_a_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(calibration, "measure", lambda *_: asked.append("pass") or (None, None))
    own = basis_files.fingerprint
    monkeypatch.setattr(
        basis_files, "fingerprint", lambda model: asked.append("name") or own(model)
    )
    config = {
        "8 and 4": KVCacheConfig(k_bits=8, v_bits=4),
        "a window too small": INT4.replace(window=100),
    }.get(name) or KVCacheConfig.from_name(name)
    make_prompt_cache(tiny_llama(), config)
    assert asked == (["name", "pass"] if name in ("int4", "int3", "int2", "int2s") else [])


def test_a_pass_is_made_once_a_model(passes: list[Any]) -> None:
    model = tiny_llama()
    first = names(make_prompt_cache(model, INT4))
    assert None not in first and len(first) == 2
    assert names(make_prompt_cache(model, INT2)) == first
    assert names(make_prompt_cache(tiny_llama(), INT2)) == first  # from the file
    assert passes == [model]
    other = tiny_llama(seed=1)
    assert set(names(make_prompt_cache(other, INT4))).isdisjoint(first)
    assert names(make_prompt_cache(model, INT4)) == first
    assert passes == [model, other]


def test_a_file_may_go_between_two_calls(passes: list[Any]) -> None:
    model = tiny_llama()
    first = names(make_prompt_cache(model, INT4))
    for file in basis_files.directory().iterdir():
        file.unlink()
    assert names(make_prompt_cache(model, INT4)) == first
    twin = tiny_llama()
    assert names(make_prompt_cache(twin, INT4)) == first
    assert passes == [model, twin]
    assert len(list(basis_files.directory().iterdir())) == 1


def test_a_file_that_is_broken_is_made_again(passes: list[Any]) -> None:
    first = names(make_prompt_cache(tiny_llama(), INT4))
    (file,) = basis_files.directory().iterdir()
    sound = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-7])
    assert names(make_prompt_cache(tiny_llama(), INT4)) == first
    assert len(passes) == 2 and file.stat().st_size == sound


def test_a_disk_that_takes_nothing_costs_a_pass_a_model(
    passes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mx, "save_safetensors", full)
    one, two = tiny_llama(), tiny_llama()
    found = [names(make_prompt_cache(model, INT4)) for model in (one, two, one)]
    assert found[0] == found[1] == found[2] and None not in found[0]
    assert passes == [one, two]


class Broken(Model):
    """A llama that can't be run on a long text."""

    __module__ = Model.__module__
    calls = 0

    def __call__(self, inputs: mx.array, cache: Any = None, **kwargs: Any) -> mx.array:
        if inputs.shape[1] > 100:
            self.calls += 1
            raise RuntimeError("too\nlong")
        return super().__call__(inputs, cache, **kwargs)


def test_a_pass_that_fails_is_tried_once_and_leaves_the_model_usable() -> None:
    model = Broken(tiny_llama().args)
    for config in (INT4, INT2, INT4):
        caches = make_prompt_cache(model, config)
        assert names(caches) == [None, None]
    assert model.calls == 1 and calibrated(model).failed == "too long"
    assert not basis_files.directory().exists()  # it may go better with another version
    for _ in range(4):
        logits = model(mx.arange(60)[None], cache=caches)
    assert mx.isfinite(logits).all()


def test_what_is_compared_with_costs_no_pass(passes: list[Any]) -> None:
    model = tiny_llama()
    assert names(build(model, INT4, balanced=False)) == [None, None]
    assert passes == []


def test_a_model_that_has_got_a_layer_more_is_measured_again(passes: list[Any]) -> None:
    model = tiny_llama()
    make_prompt_cache(model, INT4)
    model.layers.append(model.layers[0])
    assert len(names(make_prompt_cache(model, INT4))) == 3 and len(passes) == 2


def test_what_is_known_goes_with_the_model() -> None:
    model = tiny_llama()
    make_prompt_cache(model, INT4)
    key = id(model)
    assert key in calibration._measured
    del model
    gc.collect()
    assert key not in calibration._measured


def test_threads_share_one_pass(passes: list[Any], tiny_llama: Model) -> None:
    """While others take and release mlx_lm's hooks, and use the basis elsewhere."""
    model, barrier = Model(tiny_llama.args), Barrier(4, timeout=30)
    model.update(tiny_llama.parameters())
    found: list[Any] = [None] * 4

    def run(i: int) -> None:
        barrier.wait()
        with mx.stream(mx.new_stream(mx.default_device())):
            with mlx_kivi.patched(INT4):
                caches = make_prompt_cache(model, (INT4, INT2)[i % 2])
            for _ in range(3):
                mx.eval(model(mx.arange(90)[None], cache=caches))
        found[i] = names(caches)

    threads = [Thread(target=run, args=(i,), daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found[0] is not None and None not in found[0]
    assert found == [found[0]] * 4 and passes == [model]


# What it finds


def reference(queries: np.ndarray, keys: np.ndarray) -> float:
    """The error Σ_c var(k'_c) E[q'_c²] that the best of all bases leaves: (Σ √λ)² / D."""
    root = np.linalg.cholesky(queries)
    return float((np.linalg.eigvalsh(root.T @ keys @ root).clip(0) ** 0.5).sum() ** 2)


def moments(rng: np.random.RandomState, dim: int) -> np.ndarray:
    x = rng.normal(size=(dim, 3 * dim)) * np.geomspace(1, 10, dim)[:, None]
    return x @ x.T


def test_the_basis_is_the_best_there_is() -> None:
    """Its channels, mixed evenly, leave the least error that any matrix can."""
    rng = np.random.RandomState(0)
    queries, keys = (np.stack([moments(rng, 16) for _ in range(2)]) for _ in range(2))
    for q, k, matrix in zip(queries, keys, balanced(queries, keys), strict=True):
        there, back = matrix.T, np.linalg.inv(matrix)
        errors = np.diag(there @ k @ there.T).sum() * np.diag(back @ q @ back.T).sum()
        assert errors == pytest.approx(reference(q, k), rel=1e-3)
        plain = (np.diag(k) * np.diag(q)).sum() * 16
        assert errors < 0.7 * plain


@pytest.mark.parametrize("spoilt", [np.nan, np.inf, 0.0])
def test_moments_that_say_nothing_are_refused(spoilt: float) -> None:
    rng = np.random.RandomState(0)
    good = moments(rng, 8)[None]
    bad = good * spoilt if spoilt == 0 else good.copy()
    bad[0, 3, 3] *= spoilt
    for pair in ((bad, good), (good, bad)):
        with pytest.raises(ValueError, match="moments that are"):
            balanced(*pair)


def test_moments_are_those_of_the_models_queries_and_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against a plain forward pass over the same tokens."""
    monkeypatch.setattr(calibration, "shrunk", lambda moments: moments)
    model = tiny_llama(peak=8)
    ids = calibration.token_ids(97, 132)[None]
    attention = model.layers[0].self_attn
    x = model.layers[0].input_layernorm(model.model.embed_tokens(mx.array(ids)))
    q, k = (
        np.array(attention.rope(proj(x).reshape(1, 132, -1, 32).swapaxes(1, 2)))[0].astype(float)
        for proj in (attention.q_proj, attention.k_proj)
    )
    runs = k[:, 4:].reshape(2, 4, 32, 32)
    runs = (runs - runs.mean(axis=2, keepdims=True)).reshape(2, 128, 32)
    covariance = np.einsum("hti,htj->hij", runs, runs) / 128
    rows = q.reshape(2, -1, 32)
    second = np.einsum("hti,htj->hij", rows, rows) / rows.shape[1]
    matrix = np.array(calibrated(model).balances[0].matrix.astype(mx.float32), dtype=float)
    for h in range(2):
        there, back = matrix[h].T, np.linalg.inv(matrix[h])
        moved = np.diag(there @ covariance[h] @ there.T), np.diag(back @ second[h] @ back.T)
        assert moved[0].sum() * moved[1].sum() == pytest.approx(
            reference(second[h], covariance[h]), rel=0.01
        )


def test_two_passes_find_the_same_whatever_came_between(passes: list[Any]) -> None:
    found = []
    for before in (lambda model: None, generated, lambda model: mx.random.seed(5)):
        for file in basis_files.directory().glob("*"):
            file.unlink()
        model = tiny_llama()
        before(model)
        found.append(names(make_prompt_cache(model, INT4)))
    assert found[0] == found[1] == found[2] and len(passes) == 3


def generated(model: nn.Module) -> None:
    caches = make_prompt_cache(model)
    for _ in range(3):
        mx.eval(model(mx.arange(70)[None], cache=caches))


def test_a_layer_that_is_not_finite_goes_without_and_no_other() -> None:
    """In float16, keys of the first layer overflow; what it adds to the rest is cut off."""
    model = tiny_llama()
    model.set_dtype(mx.float16)
    first = model.layers[0].self_attn
    first.k_proj.weight = first.k_proj.weight * 6e4
    first.o_proj = Silent()
    keys = first.k_proj(model.layers[0].input_layernorm(model.model.embed_tokens(mx.arange(97))))
    assert not mx.isfinite(keys).all()
    found = calibrated(model)
    assert found.balances[0] is None and found.balances[1] is not None
    assert found.failed is None and found.file is not None
    caches = make_prompt_cache(model, INT4)
    assert names(caches)[0] is None and names(caches)[1] is not None


class Silent(nn.Module):
    def __call__(self, x: mx.array) -> mx.array:
        return mx.zeros((*x.shape[:2], 64), x.dtype)


@pytest.mark.parametrize(
    "args", [{"vocab_size": 7}, {"num_vocab": 7}, {"vocabSize": 7}, {"text_config": {}}]
)
def test_the_vocabulary_is_found_by_any_name(args: dict[str, Any]) -> None:
    named = args if "text_config" not in args else {"text_config": {"vocab_size": 7}}
    for where in ("args", "config"):
        model = SimpleNamespace(**{where: SimpleNamespace(**named)})
        assert calibration._vocabulary(model) == 7
        assert calibration._vocabulary(SimpleNamespace(language_model=model)) == 7
    with pytest.raises(ValueError, match="does not say how many"):
        calibration._vocabulary(SimpleNamespace(args=SimpleNamespace(vocab_size=None)))


KINDS = ("gpt2", "phixtral", "plamo3", "gemma3", "llama4", "minicpm3")


@pytest.mark.parametrize("name", [name for name in KINDS if name in models.names()])
def test_models_of_other_kinds_are_measured(name: str) -> None:
    """Tables of positions, other names in their settings, trained windows, chunks, latents."""
    found = mlx_kivi.calibrate(models.build(name))
    assert found.measured == found.layers > 0 and found.why is None and found.file is not None


def test_a_model_of_a_tinygpt_file_is_measured_within_its_positions() -> None:
    for ctx in (40, 400):
        found = mlx_kivi.calibrate(tinygpt_model(ctx=ctx))
        assert (found.measured, found.layers, found.why) == (2, 2, None)


class Foreign:
    """A model in mlx_lm's style that is no module of mlx: no parameters to tell it by."""

    def __init__(self) -> None:
        self._inner = tiny_llama()
        self.args, self.layers = self._inner.args, self._inner.layers

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        return self._inner(inputs, cache=cache)


def test_a_model_that_can_not_be_named_is_measured_and_not_kept() -> None:
    found = mlx_kivi.calibrate(Foreign())
    assert (found.measured, found.file, found.why) == (2, None, None)
    assert not basis_files.directory().exists()


class Slots:
    """A model that no weak reference can be made to."""

    __slots__ = ("args", "inner", "layers")

    def __init__(self, inner: nn.Module) -> None:
        self.inner, self.args, self.layers = inner, inner.args, inner.layers

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        return self.inner(inputs, cache=cache)


def test_a_model_that_can_not_be_remembered_is_measured_each_time(passes: list[Any]) -> None:
    model = Slots(tiny_llama())
    held = len(calibration._measured)
    both = [names(make_prompt_cache(model, INT4)) for _ in range(2)]
    assert both[0] == both[1] and None not in both[0]
    assert len(passes) == 2 and len(calibration._measured) == held
