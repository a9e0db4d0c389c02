"""`patch`, `unpatch` and `patched`: what they reach, and that they leave nothing behind."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import mlx_lm.models
import pytest
from helpers import ROOT
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache

import mlx_kivi
from mlx_kivi import KVCacheConfig, QuantizedStreamingCache, hooks
from mlx_kivi.hooks import Hook, HookSet, UnsupportedError
from mlx_kivi.patch import UnconvertedCacheWarning

patch_module = importlib.import_module("mlx_kivi.patch")
INT4 = KVCacheConfig(k_bits=4, v_bits=4, group_size=32, window=90)


def policy(model: nn.Module) -> KVCacheConfig | None:
    """What mlx_lm's function makes now; None for its own caches."""
    caches = make_prompt_cache(model)
    assert len({type(c) for c in caches}) == 1
    return caches[0].config if isinstance(caches[0], QuantizedStreamingCache) else None


# Exactly in reverse


@pytest.fixture(scope="module")
def every_module() -> list[Any]:
    """All of mlx_lm that can be imported here, commands and models."""
    names = [f"mlx_lm.{m.name}" for m in pkgutil.iter_modules(mlx_lm.__path__)]
    for name in (*names, "mlx_lm.models.llama", "mlx_lm.models.qwen3_next"):
        try:
            importlib.import_module(name)
        except ImportError:  # an optional package of that command is not installed
            pass
    loaded = [m for name, m in sorted(sys.modules.items()) if name.split(".")[0] == "mlx_lm"]
    assert len(loaded) > 20
    return loaded


def snapshot(modules: list[Any]) -> dict[str, Any]:
    """Every name in the modules and their classes, and all that a function is made of."""
    found: dict[str, Any] = {}
    for module in modules:
        types = [v for v in vars(module).values() if isinstance(v, type)]
        for owner in (module, *(t for t in types if t.__module__ == module.__name__)):
            name = f"{module.__name__}:{getattr(owner, '__qualname__', '')}"
            # Importing a model adds its module to its package, no more.
            own = {k: v for k, v in vars(owner).items() if not isinstance(v, ModuleType)}
            found[f"{name} names"] = list(own)
            for key, value in own.items():
                found[f"{name}.{key}"] = id(value)
                if isinstance(value, FunctionType):
                    found[f"{name}.{key} ()"] = (
                        value.__code__,
                        value.__defaults__,
                        value.__kwdefaults__,
                        value.__closure__,
                        dict(vars(value)),
                        value.__doc__,
                        value.__name__,
                    )
    return found


def use_patch(model: nn.Module) -> None:
    mlx_kivi.patch(INT4)
    make_prompt_cache(model)
    mlx_kivi.unpatch()


def use_patch_twice(model: nn.Module) -> None:
    mlx_kivi.patch()
    mlx_kivi.patch(INT4)
    mlx_kivi.unpatch()


def use_nested_blocks(model: nn.Module) -> None:
    with mlx_kivi.patched(INT4), mlx_kivi.patched(), mlx_kivi.patched(INT4):
        make_prompt_cache(model)


def use_a_block_in_a_patch(model: nn.Module) -> None:
    mlx_kivi.patch()
    with mlx_kivi.patched(INT4):
        mlx_kivi.unpatch()
        make_prompt_cache(model)


def use_a_patch_in_a_block(model: nn.Module) -> None:
    with mlx_kivi.patched(INT4):
        mlx_kivi.patch()
    mlx_kivi.unpatch()


def use_the_factory_alone(model: nn.Module) -> None:
    mlx_kivi.make_prompt_cache(model)
    mlx_kivi.unpatch()


def use_a_block_that_raises(model: nn.Module) -> None:
    with pytest.raises(KeyError), mlx_kivi.patched(INT4):
        raise KeyError("in the block")


@pytest.mark.parametrize(
    "use",
    [
        use_patch,
        use_patch_twice,
        use_nested_blocks,
        use_a_block_in_a_patch,
        use_a_patch_in_a_block,
        use_the_factory_alone,
        use_a_block_that_raises,
    ],
)
def test_nothing_of_mlx_lm_is_changed_afterwards(
    use: Any, every_module: list[Any], tiny_llama: nn.Module
) -> None:
    before = snapshot(every_module)
    use(tiny_llama)
    assert snapshot(every_module) == before
    assert policy(tiny_llama) is None


def test_what_is_changed_meanwhile_is_code_and_one_name(every_module: list[Any]) -> None:
    before = snapshot(every_module)
    with mlx_kivi.patched():
        during = snapshot(every_module)
    changed = {key for key in {*before, *during} if before.get(key) != during.get(key)}
    functions = {key.rpartition(".")[2] for key in changed if key.endswith(" ()")}
    if hasattr(BatchGenerator, "_make_new_cache"):  # of mlx-lm 0.31
        functions.remove("_make_new_cache ()")
    assert functions - {"__call__ ()"} == {
        "make_prompt_cache ()",
        "save_prompt_cache ()",
        "load_prompt_cache ()",
        "trim_prompt_cache ()",
        "scaled_dot_product_attention ()",
        "speculative_generate_step ()",
    }
    rest = {key.rpartition(".")[2] for key in changed if not key.endswith(" ()")}
    assert rest == {"QuantizedStreamingCache", "LatentCache", "cache: names"}


# What it reaches


USER_MODULE = """
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm import generate, stream_generate
"""

ORDERS = {
    "mlx_lm first": "import mine\nimport mlx_kivi\nmlx_kivi.patch(window=50)",
    "mlx_kivi first": "import mlx_kivi\nimport mine\nmlx_kivi.patch(window=50)",
    "after the patch": "import mlx_kivi\nmlx_kivi.patch(window=50)\nimport mine",
}

USE = """
import mlx.core as mx
from mlx_lm.generate import generate_step
from conformance.common import tiny_llama
model = tiny_llama(num_hidden_layers=1)
made = mine.make_prompt_cache(model)
assert [type(c).__name__ for c in made] == ["QuantizedStreamingCache"], made
assert made[0].config.window == 50

used = []
update = mlx_kivi.QuantizedStreamingCache.update_and_fetch
def spy(self, *args):
    used.append(self)
    return update(self, *args)
mlx_kivi.QuantizedStreamingCache.update_and_fetch = spy
list(generate_step(mx.array([1, 2, 3]), model, max_tokens=2))
assert used and used[0].config.window == 50

mlx_kivi.unpatch()
assert [type(c).__name__ for c in mine.make_prompt_cache(model)] == ["KVCache"]
"""


@pytest.mark.parametrize("order", ORDERS.values(), ids=list(ORDERS))
def test_names_bound_before_and_after_are_reached(order: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(USER_MODULE)
    code = f"import sys\nsys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n{order}\n{USE}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_copy_of_the_name_in_mlx_lm_makes_our_caches(
    every_module: list[Any], tiny_llama: nn.Module
) -> None:
    copies = [m for m in every_module if hasattr(m, "make_prompt_cache")]
    assert len(copies) > 2
    with mlx_kivi.patched(INT4):
        for module in copies:
            assert module.make_prompt_cache(tiny_llama)[0].config == INT4, module


def test_without_a_policy_it_is_int8(tiny_llama: nn.Module) -> None:
    mlx_kivi.patch()
    assert policy(tiny_llama) == KVCacheConfig.from_name("int8")


def test_fields_can_be_given_as_keywords(tiny_llama: nn.Module) -> None:
    mlx_kivi.patch(k_bits=4, window=77)
    assert policy(tiny_llama) == KVCacheConfig(k_bits=4, window=77)
    with mlx_kivi.patched(sink=1) as config:
        assert policy(tiny_llama) == config == KVCacheConfig(sink=1)


def test_max_kv_size_bounds_the_cache_as_in_mlx_lm(tiny_llama: nn.Module) -> None:
    mlx_kivi.patch(k_bits=4)
    cache = make_prompt_cache(tiny_llama, 64)[0]
    assert cache.config == KVCacheConfig(k_bits=4, sink=4, window=60)
    assert cache.size() == 0 and type(make_prompt_cache(tiny_llama)[0].config.window) is type(None)


def test_max_kv_size_keeps_its_sinks_alone_and_in_a_batch() -> None:
    """mlx_lm's own bounded cache drops them where it goes into a batch (mlx-lm#1631)."""

    class Plain(nn.Module):
        layers = [None, None]

    int4 = KVCacheConfig.from_name("int4")
    for config in (KVCacheConfig(), int4):
        with mlx_kivi.patched(config):
            caches = make_prompt_cache(Plain(), 64)
        assert {type(cache) for cache in caches} == {QuantizedStreamingCache}
        keys = mx.random.normal((1, 2, 200, 64), key=mx.random.key(0))
        for cache in caches:
            assert (cache.config.sink, cache.config.window) == (4, 60)
            cache.update_and_fetch(keys, keys)
        batch = caches[0].merge(caches)
        for end in range(100, 200):
            token = mx.concatenate([keys[:, :, end - 1 : end]] * 2)
            batch.update_and_fetch(token, token)
        for i in range(2):
            held, _ = batch.extract(i).arrays()
            assert held.shape[2] == 64
            assert mx.array_equal(held[:, :, :4], keys[:, :, :4])


def test_the_newest_patch_counts_and_one_unpatch_ends_all(tiny_llama: nn.Module) -> None:
    mlx_kivi.patch()
    mlx_kivi.patch(INT4)
    assert policy(tiny_llama) == INT4
    mlx_kivi.unpatch()
    assert policy(tiny_llama) is None
    mlx_kivi.unpatch()
    assert policy(tiny_llama) is None


def test_blocks_nest_and_each_ends_with_the_policy_before(tiny_llama: nn.Module) -> None:
    inner = INT4.replace(window=40)
    mlx_kivi.patch()
    with mlx_kivi.patched(INT4):
        assert policy(tiny_llama) == INT4
        with pytest.raises(RuntimeError), mlx_kivi.patched(inner):
            assert policy(tiny_llama) == inner
            raise RuntimeError("in the inner block")
        assert policy(tiny_llama) == INT4
        mlx_kivi.unpatch()
        assert policy(tiny_llama) == INT4  # a block lasts to its end
    assert policy(tiny_llama) is None


def test_caches_made_under_a_patch_go_on_after_it(tiny_llama: nn.Module) -> None:
    """On dense arrays, then: mlx_lm's attention knows no handles any more."""
    tokens = mx.arange(140) % 97
    with mlx_kivi.patched(INT4):
        inside, outside = make_prompt_cache(tiny_llama), make_prompt_cache(tiny_llama)
        for caches in (inside, outside):
            tiny_llama(tokens[None], cache=caches)
        want = tiny_llama(tokens[None, :1], cache=inside)
        mx.eval(want)
    got = tiny_llama(tokens[None, :1], cache=outside)
    assert mx.allclose(got, want, rtol=1e-4, atol=1e-4)


# What it refuses


def test_a_config_and_fields_together_are_refused() -> None:
    for call in (mlx_kivi.patch, lambda *a, **k: mlx_kivi.patched(*a, **k).__enter__()):
        with pytest.raises(TypeError, match="not both: window"):
            call(INT4, window=3)
        assert not hooks.attention.active


@pytest.mark.parametrize("fields", [{"k_bits": 5.5}, {"window": 0}, {"bits": 4}])
def test_a_bad_field_changes_nothing(fields: dict[str, Any], tiny_llama: nn.Module) -> None:
    mlx_kivi.patch(INT4)
    with pytest.raises((ValueError, TypeError)):
        mlx_kivi.patch(**fields)
    assert policy(tiny_llama) == INT4


@pytest.mark.parametrize("which", ["the factory", "what caches need"])
def test_an_mlx_lm_of_another_shape_is_refused_and_left_alone(
    which: str, every_module: list[Any], monkeypatch: pytest.MonkeyPatch, tiny_llama: nn.Module
) -> None:
    def newer(model: Any, max_kv_size: int | None = None, *, layout: str = "new") -> None: ...

    def ours(model: Any, max_kv_size: int | None = None) -> None: ...

    before = snapshot(every_module)
    broken = HookSet(lambda: ({"make_prompt_cache": Hook(newer, ours)}, []))
    if which == "the factory":
        monkeypatch.setattr(patch_module, "_factory", broken)
    else:
        monkeypatch.setattr(hooks, "attention", broken)
    with pytest.raises(UnsupportedError) as caught:
        mlx_kivi.patch(INT4)
    message = str(caught.value)
    assert "this mlx-lm is not supported" in message and "\n" not in message
    assert "model, max_kv_size, layout" in message and "install mlx-lm 0.31.3" in message
    with pytest.raises(UnsupportedError), mlx_kivi.patched(INT4):
        pass
    monkeypatch.undo()
    assert snapshot(every_module) == before
    assert policy(tiny_llama) is None


def test_a_hook_of_any_parameters_needs_those_that_it_reads() -> None:
    def theirs(prompt: Any, network: Any) -> None: ...

    def ours(*args: Any, **kwargs: Any) -> None: ...

    Hook(theirs, ours, needs=("prompt",))
    with pytest.raises(UnsupportedError, match="takes \\(prompt\\), not \\(prompt, model\\)"):
        Hook(theirs, ours, needs=("prompt", "model"))


# What it says


class Hybrid(nn.Module):
    """A layer of attention and one of recurrent state, each in its own kind of cache."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [None, None]

    def make_cache(self) -> list[Any]:
        return [KVCache(), ArraysCache(1)]

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        x = mx.zeros((1, 1, inputs.shape[1], 32))
        cache[0].update_and_fetch(x, x)
        cache[1][0] = mx.zeros((1, 64))
        return x


def test_layers_that_stay_as_they_are_are_told_of_once(tiny_llama: nn.Module) -> None:
    mlx_kivi.patch(INT4)
    with pytest.warns(UnconvertedCacheWarning, match="1 of 2 layers keep ArraysCache") as told:
        caches = make_prompt_cache(Hybrid())
    assert [type(c) for c in caches] == [QuantizedStreamingCache, ArraysCache]
    assert len(told) == 1
    assert told[0].filename == __file__  # where make_prompt_cache was called


def test_generation_outside_is_mlx_lms_own(tiny_llama: nn.Module) -> None:
    tokens = mx.arange(20)
    want = [t for t, _ in generate_step(tokens, tiny_llama, max_tokens=10)]
    with mlx_kivi.patched(KVCacheConfig()):
        inside = [t for t, _ in generate_step(tokens, tiny_llama, max_tokens=10)]
    after = [t for t, _ in generate_step(tokens, tiny_llama, max_tokens=10)]
    assert want == inside == after
