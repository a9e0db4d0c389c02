"""Bytes that are said of mlx_lm's own caches, and what is asked of a model for them."""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_lm.models.llama import Model
from mlx_lm.tuner.utils import linear_to_lora_layers

import mlx_kivi
from conformance.architectures import models
from conformance.common import tiny_llama
from mlx_kivi import KVCacheConfig, report
from mlx_kivi.cache.sizes import Heads

UnconvertedCacheWarning = importlib.import_module("mlx_kivi.patch").UnconvertedCacheWarning
# Not balanced: that takes a call of the model besides.
INT4 = KVCacheConfig(k_bits=4, v_bits=4, group_size=32, window=90, balanced=False)
HEADS = Heads(count=2, key_dim=3, value_dim=1, dtype=mx.float16)
WINDOWS = (1, 100, 255, 256, 257, 300, 512, 600)
# mlx-lm 0.31 is wrong with chunks that are no multiple of 256.
CHUNKS = WINDOWS if hasattr(ChunkedKVCache, "keys_and_values") else (256, 512)


def feed(cache: Any, tokens: int) -> int:
    """Its bytes after ``tokens`` more tokens, in one call as models make it."""
    if isinstance(cache, ChunkedKVCache):
        cache.maybe_trim_front()
    cache.update_and_fetch(
        mx.zeros((1, 2, tokens, 3), mx.float16), mx.zeros((1, 2, tokens, 1), mx.float16)
    )
    mx.eval(cache.keys, cache.values)
    return cache.nbytes


def said(cache: Any, tokens: int) -> int:
    return report.Part(cache, cache, HEADS).full_bytes(tokens)


def empty() -> list[Any]:
    rotating = [RotatingKVCache(max_size=size, keep=min(4, size - 1)) for size in WINDOWS]
    return [KVCache(), *rotating, *map(ChunkedKVCache, CHUNKS)]


@pytest.mark.parametrize("kind", range(len(empty())))
def test_what_is_said_of_mlx_lms_caches_is_what_they_hold(kind: int) -> None:
    cache = empty()[kind]
    held = [feed(cache, 1) for _ in range(1100)]
    assert [said(cache, tokens) for tokens in range(1, 1101)] == held


@pytest.mark.parametrize("step", [256, 512, 2048])
def test_a_prompt_leaves_the_same_once_a_token_follows(step: int) -> None:
    """mlx_lm feeds all but the last token in steps, then one by one."""
    for prompt in (1, 99, 255, 256, 257, 300, 511, 512, 513, 1000, 2048, 2049, 2500):
        for cache in empty():
            for start in range(0, prompt, step):
                feed(cache, min(step, prompt - start))
            for tokens in range(prompt + 1, prompt + 4):
                held, figure = feed(cache, 1), said(cache, tokens)
                if isinstance(cache, RotatingKVCache) and tokens < cache.max_size:
                    assert abs(held - figure) < HEADS.full_bytes(256)
                else:
                    assert held == figure


# Once a model


class Counted(Model):
    """A llama that counts its calls."""

    __module__ = Model.__module__  # the tables know it: it is not probed
    calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        self.calls += 1
        return super().__call__(*args, **kwargs)


class Hybrid(Counted):
    """One that has recurrent state besides: what it takes is said in a warning."""

    __module__ = Model.__module__

    def make_cache(self) -> list[Any]:
        return [KVCache(), ArraysCache(1)]

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        self.calls += 1
        x = self.layers[0].self_attn.k_proj(self.model.embed_tokens(inputs))
        cache[0].update_and_fetch(x[:, None], x[:, None])
        cache[1][0] = x[:, -1]
        return x


@pytest.fixture(autouse=True)
def _unpatched() -> Iterator[None]:
    yield
    mlx_kivi.unpatch()


def text(model: nn.Module) -> str:
    return mlx_kivi.describe(model, mlx_kivi.make_prompt_cache(model, INT4))


def test_new_caches_ask_nothing_of_a_model_whose_caches_are_all_ours(tiny_llama: Model) -> None:
    model = Counted(tiny_llama.args)
    with mlx_kivi.patched(INT4):
        make_prompt_cache(model)
    assert model.calls == 0


def test_a_model_is_asked_once(tiny_llama: Model) -> None:
    model, hybrid = Counted(tiny_llama.args), Hybrid(tiny_llama.args)
    assert len({text(model) for _ in range(3)}) == 1
    assert model.calls == 1
    with mlx_kivi.patched(INT4):
        for _ in range(3):
            with pytest.warns(UnconvertedCacheWarning, match="ArraysCache, .* 256 B .* at 32,768"):
                make_prompt_cache(hybrid)
    assert hybrid.calls == 1
    assert "ArraysCache" in text(hybrid) and hybrid.calls == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.set_dtype(mx.float16),
        lambda model: nn.quantize(model, group_size=32, bits=4),
        lambda model: linear_to_lora_layers(model, 2, {"rank": 4, "scale": 1.0, "dropout": 0.0}),
        lambda model: model.layers.append(model.layers[0]),
    ],
    ids=["set_dtype", "quantize", "lora", "a layer more"],
)
def test_a_model_is_asked_again_once_it_has_changed(
    change: Callable[[nn.Module], Any], tiny_llama: Model
) -> None:
    model, fresh = Counted(tiny_llama.args), Counted(tiny_llama.args)
    text(model)
    for one in (model, fresh):
        change(one)
    assert text(model) == text(fresh) == text(model)
    assert model.calls == 2


@pytest.mark.parametrize(("name", "calls"), [("int8", 0), ("kivi4", 0), ("int4", 1)])
def test_a_model_is_measured_once_if_the_policy_needs_it(
    name: str, calls: int, tiny_llama: Model
) -> None:
    # A width that no other test's model has: nothing of it is kept on the disk yet.
    model = Counted(replace(tiny_llama.args, intermediate_size=144))
    for window in (None, 400, None):
        mlx_kivi.make_prompt_cache(model, KVCacheConfig.from_name(name, window=window))
    assert model.calls == calls


def test_a_model_that_has_another_layer_is_measured_anew(tiny_llama: Model) -> None:
    model = Counted(tiny_llama.args)
    for count in (2, 3, 1):
        while len(model.layers) < count:
            model.layers.append(model.layers[0])
        while len(model.layers) > count:
            model.layers.pop()
        caches = mlx_kivi.make_prompt_cache(model, KVCacheConfig.from_name("int4"))
        assert len(caches) == count and all(cache.balance for cache in caches)


def test_half_the_precision_takes_half_the_bytes(tiny_llama: Model) -> None:
    model = Counted(tiny_llama.args)
    assert "instead of 33.6 MB" in text(model)
    model.set_dtype(mx.bfloat16)
    assert "instead of 16.8 MB" in text(model)


def test_what_is_kept_of_a_model_goes_with_it(tiny_llama: Model) -> None:
    model = Hybrid(tiny_llama.args)
    model.ballast = mx.zeros((2**22,))  # 16 MB
    mx.eval(model.parameters())
    text(model)
    key, ref, held = id(model), weakref.ref(model), mx.get_active_memory()
    assert key in report._known
    del model
    gc.collect()
    assert ref() is None and key not in report._known
    assert mx.get_active_memory() <= held - 2**24


def test_a_window_that_does_not_pay_packed_is_said_in_bytes() -> None:
    """And counted as what it is, before the first token and after."""
    model = tiny_llama()
    policy = KVCacheConfig.from_name("int8", window=97)
    caches = mlx_kivi.make_prompt_cache(model, policy)
    told = mlx_kivi.describe(model, caches)
    full = Heads(2, 32, 32, mx.float32).full_bytes(97 + 4 + 64)
    assert f"2 of 2 layers are not packed: a window of 97 takes {report.size(2 * full)}" in told
    packed = float(told.split("unpacked, ")[1].split(" kB")[0]) * 1000
    assert packed > 2 * full
    model(mx.zeros((1, 200), mx.int32), cache=caches)
    model(mx.zeros((1, 1), mx.int32), cache=caches)
    assert sum(cache.nbytes for cache in caches) == 2 * full
    assert mlx_kivi.describe(model, caches) == told
    wide = mlx_kivi.make_prompt_cache(model, policy.replace(window=1000))
    assert "not packed" not in mlx_kivi.describe(model, wide)


# What a step unpacks

STEP_AT = 4096  # tokens
SHAPES = {
    "gemma2": {},
    "plamo": {},
    "deepseek_v3": {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "first_k_dense_replace": 9},
    "deepseek_v32": {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
}


def held(name: str, dtype: mx.Dtype, **changes: Any) -> tuple[nn.Module, list[Any]]:
    """A model of a module of mlx_lm, and int4 caches that hold STEP_AT tokens."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    settings = {**models.CONFIGS[name], **SHAPES.get(name, {}), **changes}
    model = module.Model(module.ModelArgs.from_dict(settings))
    model.set_dtype(dtype)
    caches = mlx_kivi.make_prompt_cache(model, KVCacheConfig.from_name("int4"))
    for part in report.parts(model, caches):
        shape = 1, part.heads.count, STEP_AT
        dims = part.heads.key_dim, part.heads.value_dim
        part.cache.update_and_fetch(*[mx.random.normal((*shape, d)).astype(dtype) for d in dims])
    mx.eval(model(mx.zeros((1, 1), mx.int32), cache=caches))  # packs what was just put in
    mx.eval([cache.state for cache in caches])
    return model, caches


@pytest.fixture
def on_cpu() -> Iterator[None]:
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


def peak_of_a_step(model: nn.Module, caches: list[Any]) -> int:
    """Bytes that are alive at most in a step, beside those before it."""
    gc.collect()
    # Under a limit, mlx waits for one operation's memory before it takes that of the next.
    limit = mx.set_memory_limit(1)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(model(mx.zeros((1, 1), mx.int32), cache=caches))
    mx.set_memory_limit(limit)
    return mx.get_peak_memory() - before


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("layers", [2, 6])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gemma2", mx.float32),
        ("gemma2", mx.float16),
        ("plamo", mx.float32),
        ("deepseek_v3", mx.float32),
        ("deepseek_v3", mx.float16),
        ("deepseek_v32", mx.float32),
    ],
)
def test_what_a_step_is_said_to_take_is_what_it_takes(
    name: str, dtype: mx.Dtype, layers: int
) -> None:
    """A fifth more for activations at most; half where mlx gives each copy back before the next,
    as it does here: a CPU's threads run ahead of that otherwise."""
    model, caches = held(name, dtype, num_hidden_layers=layers)
    parts = report.parts(model, caches)
    said = max(part.step_bytes(STEP_AT) for part in parts)
    assert 0.45 * said < peak_of_a_step(model, caches) < 1.2 * said
    more = f"A step unpacks {len(parts)} of {len(parts)} layers, one at a time: "
    assert more in mlx_kivi.describe(model, caches)


def test_a_gpu_unpacks_no_latents_but_for_an_indexer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: SimpleNamespace(type=mx.gpu))
    model, caches = held("deepseek_v3", mx.float32)
    said = report.parts(model, caches)[0].step_bytes(STEP_AT)
    assert said == STEP_AT * 64 * 12
    # Scores of 4 heads count beside so little; one copy of the latents would be 2.7 times it.
    assert 0.45 * said < peak_of_a_step(model, caches) < 2 * said
    told = mlx_kivi.describe(model, caches)
    most = report.size(report.LONG * 64 * 12)
    more = f"the positional part of 2 of 2 layers, one at a time: {most} more at 32,768 tokens"
    assert f"A step unpacks {more}" in told

    for topk, latent in ((STEP_AT - 1, True), (STEP_AT, False)):
        main = report.parts(*held("deepseek_v32", mx.float32, index_topk=topk))[0]
        assert main.step_bytes(STEP_AT) == STEP_AT * (64 + 512 * latent) * 12


def test_nothing_is_said_where_a_step_unpacks_nothing() -> None:
    """A window bounds what there is to unpack, and may leave nothing packed."""
    model = models.build("gemma2")
    for window, tokens in ((1000, 1004), (97, 0)):
        caches = mlx_kivi.make_prompt_cache(model, KVCacheConfig.from_name("int8", window=window))
        for part in report.parts(model, caches):
            assert part.step_bytes(report.LONG) == part.heads.count * tokens * (32 + 32) * 12
        assert ("A step unpacks 2 of 2 layers" in mlx_kivi.describe(model, caches)) is (tokens > 0)
    assert "A step unpacks" not in text(tiny_llama())


# The basis that keys are in


def bases(model: nn.Module, caches: list[Any]) -> list[str]:
    return [line for line in mlx_kivi.describe(model, caches).splitlines() if "Keys of" in line]


def test_a_basis_of_the_models_own_is_said_with_its_bytes(tmp_path: Any) -> None:
    """In bfloat16, and what is made of it in float32: heads and one matrix that mixes."""
    model, config = tiny_llama(), KVCacheConfig.from_name("int4")
    caches = mlx_kivi.make_prompt_cache(model, config)
    held = 2 * (2 * 32 * 32 * (2 + 4) + 32 * 32 * 4)
    line = "Keys of 2 of 2 layers are in a basis of the model's own "
    expected = [line + f"({report.size(held)}, once a model)"]
    assert bases(model, caches) == expected
    mx.eval(model(mx.zeros((1, 200), mx.int32), cache=caches))
    mlx_kivi.save_prompt_cache(str(tmp_path / "file"), caches)
    loaded = mlx_kivi.load_prompt_cache(str(tmp_path / "file"))
    assert bases(model, loaded) == expected
    some = mlx_kivi.make_prompt_cache(model, config.replace(protect_last=1))
    assert bases(model, some) == [
        f"Keys of 1 of 2 layers are in a basis of the model's own ({report.size(held // 2)}, "
        "once a model)"
    ]


@pytest.mark.parametrize("name", ["none", "fp16", "int8", "kivi4", "kivi2"])
def test_nothing_is_said_where_nothing_is_moved(name: str) -> None:
    model = tiny_llama()
    assert bases(model, mlx_kivi.make_prompt_cache(model, KVCacheConfig.from_name(name))) == []
    small = KVCacheConfig.from_name("int4", window=100)
    assert bases(model, mlx_kivi.make_prompt_cache(model, small)) == []


def test_why_keys_are_in_no_basis_of_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    int4, line = KVCacheConfig.from_name("int4"), "Keys of 2 of 2 layers are packed as they are: "

    def said(model: Any, caches: list[Any] | None = None) -> list[str]:
        return bases(model, caches or mlx_kivi.make_prompt_cache(model, int4))

    assert said(models.build("gemma2")) == [line + "the model computes on cached keys itself"]
    assert said(models.build("deepseek_v3")) == [
        "Keys of 2 of 2 layers are packed as they are: they are latents"
    ]
    model = tiny_llama()
    by_hand = [mlx_kivi.QuantizedStreamingCache(int4, packed_attention=True) for _ in range(2)]
    assert said(model, by_hand) == [line + "the cache was made without one"]
    model.layers[0].input_layernorm.weight = mx.full((64,), mx.nan)
    why = "its queries or keys were not seen, or not finite"
    assert said(model) == [line + why]
    failing = tiny_llama()
    failing.args.vocab_size = 0
    assert said(failing)[0].startswith(line + "a forward pass over random tokens failed (the model")
    assert said(model, mlx_kivi.make_prompt_cache(model, int4)) == [line + why]


def test_the_papers_own_layout_is_told_from_ours() -> None:
    for name, bits in (
        ("kivi4", "4 bits as they are, "),
        ("int4", "4 bits, "),
        ("int8", "8 bits, "),
    ):
        assert KVCacheConfig.from_name(name).describe().startswith(bits)
    assert "as they are" not in KVCacheConfig.from_name("int8", balanced=False).describe()
    assert "8, values 4 bits as they" in KVCacheConfig(8, 4, balanced=False).describe()
