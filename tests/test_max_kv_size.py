"""`mlx_kivi.generate --max-kv-size N`, alone and with a prompt file, on models of every kind."""

import argparse
import re
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm import generate as mlx_text
from mlx_lm.models import gemma3_text, gpt2, llama, mamba
from mlx_lm.models.cache import KVCache, RotatingKVCache, save_prompt_cache

from mlx_kivi import KVCacheConfig, generate, make_prompt_cache, patched, tinygpt, unpatch
from mlx_kivi.commands import loading
from mlx_kivi.commands.cli import CommandError

INT8 = KVCacheConfig.from_name("int8")
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "rms_norm_eps": 1e-5, "vocab_size": 256}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}


def tiny_llama() -> nn.Module:
    args = llama.ModelArgs(model_type="llama", num_hidden_layers=2, **SHAPE, **HEADS)
    return llama.Model(args)


class NoMakeCache(llama.Model):
    """A model that leaves its caches to mlx_lm."""

    @property
    def make_cache(self):
        raise AttributeError


def no_make_cache() -> nn.Module:
    args = llama.ModelArgs(model_type="llama", num_hidden_layers=2, **SHAPE, **HEADS)
    return NoMakeCache(args)


def tiny_gemma3() -> nn.Module:
    """Caches 0 to 4 have a window of 64 that the model was trained with, cache 5 has none."""
    args = gemma3_text.ModelArgs(
        model_type="gemma3_text", num_hidden_layers=6, sliding_window=64, sliding_window_pattern=6,
        rope_theta=1e4, rope_local_base_freq=1e4, query_pre_attn_scalar=32,
        max_position_embeddings=4096, **SHAPE, **HEADS,
    )  # fmt: skip
    return gemma3_text.Model(args)


def tiny_gpt2() -> nn.Module:
    args = gpt2.ModelArgs(
        model_type="gpt2", n_ctx=64, n_embd=64, n_head=2, n_layer=2, n_positions=64,
        layer_norm_epsilon=1e-5, vocab_size=256,
    )  # fmt: skip
    return gpt2.Model(args)


def tiny_tinygpt() -> nn.Module:
    args = {"layers": 2, "dModel": 64, "heads": 2, "dMlp": 96, "ctx": 64}
    return tinygpt.Model(tinygpt.ModelArgs.from_dict(args))


def tiny_mamba() -> nn.Module:
    args = mamba.ModelArgs(
        model_type="mamba", vocab_size=256, hidden_size=64, intermediate_size=64, state_size=8,
        num_hidden_layers=2, conv_kernel=4, use_bias=False, use_conv_bias=True, time_step_rank=4,
    )  # fmt: skip
    return mamba.Model(args)


@pytest.fixture(autouse=True)
def _unhook():
    yield
    unpatch()


@pytest.fixture
def run(capsys, monkeypatch):
    """Run the command on a model that is there already; gives exit code, stdout and stderr."""

    def run(model, *argv):
        def load(mlx_load, path, args=None, **kwargs):
            loaded = model, tinygpt.byte_tokenizer()
            return (*loaded, {}) if kwargs.get("return_config") else loaded

        monkeypatch.setattr(loading, "load", load)
        capsys.readouterr()
        code = 0
        try:
            generate.main([str(arg) for arg in ("--model", "model", *argv)])
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return run


def made(factory: Any) -> nn.Module:
    mx.random.seed(0)
    model = factory()
    mx.eval(model.parameters())
    return model


QUIET = ["-p", "To be, or not to be", "-m", 100, "--verbose", "False"]


@pytest.mark.parametrize(
    "factory", [tiny_llama, no_make_cache, tiny_gemma3, tiny_gpt2, tiny_tinygpt]
)
def test_alone_it_bounds_as_the_window_that_it_names(factory, run):
    """4 sinks and N - 4, in full precision: the same text as the flags that spell it out."""
    model = made(factory)
    code, text, err = run(model, *QUIET, "--max-kv-size", 40)
    assert (code, err) == (0, "")
    spelled = ["--streaming-llm-window", 36, "--streaming-llm-sink", 4]
    assert (0, text, "") == run(model, *QUIET, *spelled)
    config = KVCacheConfig(sink=4, window=36)
    with patched(config):
        again = mlx_text(model, tinygpt.byte_tokenizer(), QUIET[1], max_tokens=100)
    assert text.removesuffix("\n") == again


@pytest.mark.parametrize("factory", [tiny_llama, no_make_cache])
def test_alone_it_gives_the_text_of_mlx_lms_bounded_cache(factory, run):
    model, tokenizer = made(factory), tinygpt.byte_tokenizer()
    bounded = [RotatingKVCache(max_size=40, keep=4) for _ in range(2)]
    expected = mlx_text(model, tokenizer, QUIET[1], max_tokens=100, prompt_cache=bounded)
    assert run(model, *QUIET, "--max-kv-size", 40)[1].removesuffix("\n") == expected
    assert expected != mlx_text(model, tokenizer, QUIET[1], max_tokens=100)


@pytest.mark.parametrize("factory", [tiny_llama, no_make_cache, tiny_gemma3])
def test_alone_it_says_what_is_in_force_and_stored(factory, run):
    code, out, _ = run(made(factory), "-p", "To be", "-m", 150, "--max-kv-size", 80)
    count = 1 if factory is tiny_gemma3 else 2
    assert code == 0
    assert re.search(rf"{count} of \d layers: full precision, sinks 4, window 76\n", out)
    assert re.search(r"tokens seen, 80 stored, ", out.splitlines()[-1])


def test_alone_on_a_table_of_positions_it_streams_beyond_it(run):
    code, out, _ = run(made(tiny_tinygpt), "-p", "To be", "-m", 150, "--max-kv-size", 40)
    assert code == 0 and "then 4 sinks and the last 36 are fed again" in out
    assert "Generation: 150 tokens" in out


def test_a_model_that_can_not_be_bounded_says_so(run):
    code, out, _ = run(made(tiny_mamba), "-p", "To be", "-m", 3, "--max-kv-size", 40)
    assert code == 0
    assert "2 of 2 layers keep ArraysCache, neither packed nor bounded by us" in out


@pytest.mark.parametrize(
    ("factory", "flags", "parts"),
    [
        (tiny_llama, [4], ["--max-kv-size 4", "more than the 4 sinks"]),
        (tiny_llama, [-1], ["--max-kv-size -1", "more than the 4 sinks"]),
        (tiny_llama, [40, "--kv-bits", 4], ["--kv-bits 4", "--max-kv-size 40", "--kv-quantize N"]),
        (tiny_gpt2, [65], ["--max-kv-size 65", "ctx = 64", "use --max-kv-size 64 or less"]),
        (tiny_tinygpt, [65, "--kv-quantize", "int8"], ["--max-kv-size 65", "use --max-kv-size 64"]),
    ],
)
def test_a_bound_that_can_not_be_is_one_line(factory, flags, parts, run):
    code, out, err = run(made(factory), "--max-kv-size", *flags)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert all(part in err for part in parts)


# With a prompt file


def refusal(model: Any, caches: list[Any], **flags: int) -> str | None:
    """What `generate` says of flags of mlx_lm's and caches from a file; None if they fit."""
    unset = {"kv_bits": None, "max_kv_size": None, "given_group_size": None}
    try:
        generate._check_file(argparse.Namespace(**{**unset, **flags}), model, None, caches)
    except CommandError as error:
        assert error.code == 2
        return str(error)
    return None


@pytest.mark.parametrize("name", ["none", "int8", "int2"])
@pytest.mark.parametrize("factory", [tiny_llama, tiny_gemma3, tiny_tinygpt])
def test_a_bound_is_compared_with_the_policy_of_the_file(factory, name):
    model = made(factory)
    config = KVCacheConfig.from_name(name)
    for size in (30, 60):
        caches = make_prompt_cache(model, config, max_kv_size=size)
        assert refusal(model, caches, max_kv_size=size) is None
        for other in (29, 31, 59, 61, 64):
            said = refusal(model, caches, max_kv_size=other) or ""
            assert said.startswith(f"--max-kv-size {other} contradicts --prompt-cache-file (")
            assert f"sinks 4, window {size - 4})" in said and "make the file again" in said
    free = make_prompt_cache(model, config)
    assert "no window)" in (refusal(model, free, max_kv_size=30) or "")


def test_windows_that_a_model_was_trained_with_are_no_bound_of_the_file():
    model = made(tiny_gemma3)
    caches = make_prompt_cache(model, INT8, max_kv_size=140)
    assert [c.config.window for c in caches] == [64] * 5 + [136]
    assert refusal(model, caches, max_kv_size=140) is None
    for wrong in (64, 68, 999):
        said = refusal(model, caches, max_kv_size=wrong)
        assert said == (
            f"--max-kv-size {wrong} contradicts --prompt-cache-file (8 bits, group 64, residual "
            "32, sinks 4, window 136): leave it out, or make the file again"
        )


def test_four_sinks_are_part_of_the_bound():
    model = made(tiny_llama)
    caches = make_prompt_cache(model, KVCacheConfig(sink=8, window=92))
    assert "sinks 8, window 92" in (refusal(model, caches, max_kv_size=100) or "")


def test_the_layer_that_contradicts_is_named():
    """A file whose layers differ: the second is bounded otherwise."""
    model = made(tiny_llama)
    small, large = (make_prompt_cache(model, INT8, max_kv_size=size) for size in (100, 200))
    mixed = [small[0], large[1]]
    assert "window 196" in (refusal(model, mixed, max_kv_size=100) or "")
    assert "window 96" in (refusal(model, mixed, max_kv_size=200) or "")
    theirs = [RotatingKVCache(max_size=100, keep=4), small[1]]
    assert refusal(model, theirs, max_kv_size=100) is None
    assert "(RotatingKVCache, sinks 4, window 96)" in (refusal(model, theirs, max_kv_size=50) or "")
    assert "(KVCache, no window)" in (refusal(model, [KVCache(), small[1]], max_kv_size=100) or "")


def test_a_group_size_is_compared_with_every_packed_layer():
    model = made(tiny_llama)
    by_size = {n: make_prompt_cache(model, INT8.replace(group_size=n)) for n in (32, 64)}
    assert refusal(model, by_size[64], given_group_size=64) is None
    assert "--kv-group-size 32 contradicts" in (refusal(model, by_size[64], given_group_size=32))
    mixed = [by_size[64][0], by_size[32][1]]
    assert "group 32" in (refusal(model, mixed, given_group_size=64) or "")
    assert "group 64" in (refusal(model, mixed, given_group_size=32) or "")
    # A layer that is not packed has no groups; one that is in 8 bits at least has them.
    half = make_prompt_cache(model, INT8.replace(group_size=32, layers=(1,)))
    half[0] = make_prompt_cache(model, KVCacheConfig())[0]
    assert refusal(model, half, given_group_size=32) is None
    safe = make_prompt_cache(model, KVCacheConfig.from_name("kivi2", protect_first=1))
    assert refusal(model, safe, given_group_size=32) is None


def test_bits_of_mlx_lms_own_cache_contradict_any_cache_of_ours():
    model = made(tiny_llama)
    caches = [KVCache(), make_prompt_cache(model, INT8)[1]]
    assert "--kv-bits 8 contradicts" in (refusal(model, caches, kv_bits=8) or "")


@pytest.fixture
def prompt_file(tmp_path):
    """A file as `mlx_lm.cache_prompt` leaves it."""

    def write(model, caches):
        model(mx.array([list(b"It was a dark and stormy night")]), cache=caches)
        path = str(tmp_path / "prompt.safetensors")
        save_prompt_cache(path, caches, {"model": "model", "tokenizer_config": "{}"})
        return path

    return write


@pytest.mark.parametrize("factory", [tiny_llama, tiny_gemma3, tiny_tinygpt])
def test_alone_with_a_file_only_the_bound_is_compared(factory, run, prompt_file):
    """The bits stay those of the file."""
    model = made(factory)
    path = prompt_file(model, make_prompt_cache(model, INT8, max_kv_size=60))
    unpatch()
    base = ["-p", "the rain", "-m", 5, "--prompt-cache-file", path]
    code, out, _ = run(model, *base, "--max-kv-size", 60)
    assert code == 0 and "8 bits, group 64, residual 32, sinks 4, window 56" in out
    code, _, err = run(model, *base, "--max-kv-size", 50)
    assert (code, err.count("\n")) == (2, 1) and "--max-kv-size 50 contradicts" in err


def test_a_flag_of_ours_compares_all_of_the_policy(run, prompt_file):
    model = made(tiny_gemma3)
    path = prompt_file(model, make_prompt_cache(model, INT8, max_kv_size=140))
    base = ["-p", "the rain", "-m", 5, "--prompt-cache-file", path, "--max-kv-size", 140]
    assert run(model, *base, "--kv-quantize", "int8")[0] == 0
    code, _, err = run(model, *base, "--kv-quantize", "int4")
    assert (code, err.count("\n")) == (2, 1) and "--kv-key-bits 8 " in err and "bits 4:" in err


def test_a_file_of_mlx_lms_own_caches_is_compared_too(run, prompt_file):
    model = made(tiny_llama)
    base = ["-p", "the rain", "-m", 5, "--verbose", "False"]
    path = prompt_file(model, [KVCache() for _ in range(2)])
    assert run(model, *base, "--prompt-cache-file", path)[0] == 0
    code, _, err = run(model, *base, "--prompt-cache-file", path, "--max-kv-size", 100)
    assert code == 2 and "--max-kv-size 100 contradicts --prompt-cache-file (KVCache, no" in err
    path = prompt_file(model, [RotatingKVCache(max_size=100, keep=4) for _ in range(2)])
    assert run(model, *base, "--prompt-cache-file", path, "--max-kv-size", 100)[0] == 0


def test_a_file_for_another_count_of_layers_is_one_line(run, prompt_file):
    model = made(tiny_llama)
    path = prompt_file(model, make_prompt_cache(model, INT8, max_kv_size=60))
    for flags in ([], ["--max-kv-size", 60], ["--kv-quantize", "int8"]):
        code, _, err = run(made(tiny_gemma3), "-m", 5, "--prompt-cache-file", path, *flags)
        assert (code, err.count("\n")) == (2, 1)
        assert "--prompt-cache-file has 2 caches, the model 6: use the model" in err
