"""`mlx_kivi.generate`: mlx_lm's flags and text, ours beside them, what is said, and errors."""

import importlib
import re
import subprocess
import sys
from functools import partial

import helpers
import mlx.core as mx
import pytest
from helpers import tinygpt_file
from mlx_lm import generate as mlx_text
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache

from mlx_kivi import (
    KVCacheConfig,
    generate,
    load_prompt_cache,
    patched,
    save_prompt_cache,
    tinygpt,
    unpatch,
)
from mlx_kivi import make_prompt_cache as our_prompt_cache

mlx_generate = importlib.import_module("mlx_lm.generate")
INT4 = ["--kv-quantize", "int4"]


@pytest.fixture
def model_file(tmp_path):
    return tinygpt_file(tmp_path, ctx=400)


@pytest.fixture
def run(capsys):
    """Run the command; gives exit code, stdout and stderr."""
    return partial(helpers.run, capsys, generate.main)


def actions(parser):
    return {
        tuple(a.option_strings): (a.dest, a.default, a.type, a.nargs, a.help)
        for a in parser._actions
    }


def test_takes_every_flag_of_mlx_lm_with_its_meaning():
    theirs, ours = actions(mlx_generate.setup_arg_parser()), actions(generate.setup_arg_parser())
    assert {flags: ours.get(flags) for flags in theirs} == theirs
    assert {flag for flags in set(ours) - set(theirs) for flag in flags} >= {
        "--kv-quantize",
        "--kv-key-bits",
        "--kv-value-bits",
        "--kv-residual",
        "--streaming-llm-sink",
        "--streaming-llm-window",
    }


def test_without_our_flags_it_is_mlx_lm(model_file, run):
    model, tokenizer, _ = tinygpt.load(model_file)
    expected = mlx_text(model, tokenizer, "To be", max_tokens=30)
    kinds = {type(c).__name__ for c in make_prompt_cache(model)}
    code, out, err = run("--model", model_file, "-p", "To be", "-m", 30, "--verbose", "False")
    assert (code, out.removesuffix("\n"), err) == (0, expected, "")
    assert kinds == {"KVCache"}


def test_the_cache_is_the_policys(model_file, run):
    """The text is what the same policy gives through `patched`, not what stock caches give."""
    model, tokenizer, _ = tinygpt.load(model_file)
    config = KVCacheConfig.from_name("int2", sink=2, window=40, residual_length=0)
    with patched(config):
        expected = mlx_text(model, tokenizer, "To be", max_tokens=150)
    flags = ["--kv-quantize", "int2", "--kv-residual", 0]
    flags += ["--streaming-llm-sink", 2, "--streaming-llm-window", 40]
    code, out, _ = run(
        "--model", model_file, "-p", "To be", "-m", 150, "--verbose", "False", *flags
    )
    assert (code, out.removesuffix("\n")) == (0, expected)
    assert expected != mlx_text(model, tokenizer, "To be", max_tokens=150)


def test_says_what_is_in_force_and_what_it_cost(model_file, run):
    flags = [*INT4, "--streaming-llm-sink", 4, "--streaming-llm-window", 200]
    code, out, _ = run("--model", model_file, "-p", "To be", "-m", 300, *flags)
    assert code == 0
    before, _, after = out.partition("==========")
    assert "2 of 2 layers: 4 bits, group 64, residual 64, sinks 4, window 200" in before
    assert "At 32,768 tokens: " in before
    last = after.strip().splitlines()[-1]
    tokens = r"KV cache: 30[0-9] tokens seen, 204 stored, [\d.]+ kB \(full precision: [\d.]+ kB\)"
    assert re.fullmatch(tokens, last)


def test_stored_tokens_are_named_only_where_they_differ(model_file, run):
    _, out, _ = run("--model", model_file, "-p", "To be", "-m", 20, *INT4)
    assert "stored" not in out and "tokens seen, " in out


def test_max_kv_size_is_four_sinks_and_a_window(model_file, run):
    _, out, _ = run("--model", model_file, "-m", 5, *INT4, "--max-kv-size", 104)
    assert "sinks 4, window 100" in out


def test_key_and_value_bits_stand_alone_and_beside_a_name(model_file, run):
    _, out, _ = run("--model", model_file, "-m", 5, "--kv-key-bits", 8, "--kv-value-bits", 4)
    assert "keys 8, values 4 bits" in out
    _, out, _ = run("--model", model_file, "-m", 5, "--kv-quantize", "int2", "--kv-key-bits", 4)
    assert "keys 4, values 2 bits, group 128" in out


def test_group_size_counts_only_when_given(model_file, run):
    _, out, _ = run("--model", model_file, "-m", 5, "--kv-quantize", "int2")
    assert "group 128" in out
    _, out, _ = run("--model", model_file, "-m", 5, "--kv-quantize", "int2", "--kv-group-size", 64)
    assert "group 64" in out


def test_a_window_that_leaves_nothing_to_pack_is_said(model_file, run):
    _, out, _ = run("--model", model_file, "-m", 5, *INT4, "--streaming-llm-window", 30)
    assert "2 of 2 layers are not packed: a window of 30 fits" in out


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--kv-quantize", "int7"], "--kv-quantize 'int7'"),
        (["--kv-quantize", ""], "--kv-quantize ''"),
        (["--kv-key-bits", "7"], "--kv-key-bits 7"),
        (["--kv-value-bits", "0"], "--kv-value-bits 0"),
        (["--kv-key-bits", "four"], "--kv-key-bits"),
        (["--kv-residual", "-1"], "--kv-residual -1"),
        (["--streaming-llm-sink", "4"], "--streaming-llm-sink needs --streaming-llm-window"),
        (["--kv-residual", "32"], "--kv-residual is for packed caches: add --kv-quantize NAME"),
        (["--streaming-llm-window", "0"], "--streaming-llm-window 0"),
        (["--streaming-llm-window", "-5"], "--streaming-llm-window -5"),
        (["--streaming-llm-window", "9", "--streaming-llm-sink", "-1"], "--streaming-llm-sink -1"),
        ([*INT4, "--kv-group-size", "48"], "--kv-group-size 48"),
        ([*INT4, "--kv-bits", "4"], "--kv-bits"),
        ([*INT4, "--max-kv-size", "4"], "--max-kv-size 4"),
        (["--streaming-llm-window", "9", "--max-kv-size", "9"], "--max-kv-size"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--prefill-step-size", "0"], "--prefill-step-size 0"),
        (["--num-draft-tokens", "-1"], "--num-draft-tokens -1: use 0 or more"),
        (["--seed", "-1"], "--seed -1: use a whole number from 0"),
        (["--chat-template-config", "{"], "--chat-template-config {: use a JSON object"),
        (["--chat-template-config", "3"], "--chat-template-config 3: use a JSON object"),
        (["--prompt", ""], "--prompt is empty"),
        (["--prompt", "\udcff"], "--prompt is not UTF-8 text"),
    ],
)
def test_a_bad_flag_ends_with_one_line_that_names_it(flags, named, model_file, run):
    code, out, err = run("--model", model_file, *flags)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and named in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (None, "no such directory"),
        ({}, "config.json is missing"),
        ({"config.json": "{"}, "config.json is broken"),
        ({"config.json": "[]"}, "config.json is broken"),
        ({"config.json": '{"model_type": "llama"}'}, "no model*.safetensors"),
        ({"config.json": '{"model_type": "llama"}', "model.safetensors": "x"}, "can't be loaded"),
        ({"config.json": "{}", "model.safetensors": "x"}, "can't be loaded"),
    ],
)
def test_a_missing_or_broken_model_ends_with_one_line(files, named, tmp_path, run):
    path = tmp_path / "broken"
    if files is not None:
        path.mkdir()
        for name, text in files.items():
            (path / name).write_text(text)
    code, out, err = run("--model", path, *INT4)
    assert (code, out) == (1, "")
    assert err.count("\n") == 1 and str(path) in err and named in err


def prompt_file(model_file, path, config):
    """A file as `mlx_lm.cache_prompt` leaves it, holding our caches."""
    model, tokenizer, _ = tinygpt.load(model_file)
    cache = our_prompt_cache(model, config)
    tokens = tokenizer.encode("It was a dark and stormy night; " * 6)
    model(mx.array([tokens]), cache=cache)
    save_prompt_cache(path, cache, {"model": model_file, "tokenizer_config": "{}"})
    return model, tokenizer


def test_a_prompt_file_brings_its_own_settings(model_file, tmp_path, run):
    path = str(tmp_path / "prompt.safetensors")
    config = KVCacheConfig.from_name("int4", window=150)
    model, tokenizer = prompt_file(model_file, path, config)
    expected = mlx_text(
        model, tokenizer, "the rain", max_tokens=20, prompt_cache=load_prompt_cache(path)
    )
    unpatch()
    quiet = ["-p", "the rain", "-m", 20, "--verbose", "False", "--prompt-cache-file", path]
    code, out, _ = run(*quiet)
    assert (code, out.removesuffix("\n")) == (0, expected)
    code, out, _ = run(*quiet[:4], *quiet[6:])
    assert "4 bits, group 64, residual 64, sinks 4, window 150" in out


def test_flags_that_contradict_a_prompt_file_are_refused(model_file, tmp_path, run):
    path = str(tmp_path / "prompt.safetensors")
    prompt_file(model_file, path, KVCacheConfig.from_name("int4", window=150))
    flags = ["--kv-quantize", "int8", "--streaming-llm-window", 150]
    code, _, err = run("-p", "x", "--verbose", "False", "--prompt-cache-file", path, *flags)
    assert (
        code == 2
        and err.count("\n") == 1
        and "--kv-key-bits 4 " in err
        and "--kv-key-bits 8:" in err
    )


def test_a_broken_prompt_file_ends_with_one_line(model_file, tmp_path, run):
    path = tmp_path / "prompt.safetensors"
    path.write_text("no prompt")
    code, _, err = run("--model", model_file, "--prompt-cache-file", path)
    assert code == 1 and err.count("\n") == 1 and str(path) in err


@pytest.mark.parametrize("metadata", [{}, {"model": "m", "tokenizer_config": "{"}])
def test_a_prompt_file_that_does_not_name_its_model_is_one_line(
    model_file, tmp_path, run, metadata
):
    path = str(tmp_path / "prompt.safetensors")
    save_prompt_cache(path, our_prompt_cache(tinygpt.load(model_file)[0]), metadata)
    code, out, err = run("--model", model_file, "--prompt-cache-file", path)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert path in err and "tokenizer_config" in err and "mlx_lm.cache_prompt" in err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--kv-bits", 4], "--kv-bits 4 contradicts --prompt-cache-file (4 bits"),
        (["--max-kv-size", 50], "--max-kv-size 50 contradicts"),
        (["--kv-group-size", 32], "--kv-group-size 32 contradicts"),
        (["--draft-model", "MODEL"], "no caches for the draft model: leave --draft-model out"),
    ],
)
def test_flags_of_mlx_lm_that_contradict_a_prompt_file_are_refused(
    model_file, tmp_path, run, flags, said
):
    path = str(tmp_path / "prompt.safetensors")
    prompt_file(model_file, path, KVCacheConfig.from_name("int4", window=150))
    flags = [model_file if flag == "MODEL" else flag for flag in flags]
    code, _, err = run("-p", "x", "-m", 3, "--prompt-cache-file", path, *flags)
    assert code == 2 and err.count("\n") == 1 and said in err
    fits = ["--max-kv-size", 154, "--kv-group-size", 64]
    assert run("-p", "x", "-m", 3, "--prompt-cache-file", path, *fits)[0] == 0


def test_bytes_are_said_for_the_prompt_with_its_file(model_file, tmp_path, run):
    path = str(tmp_path / "prompt.safetensors")
    prompt_file(model_file, path, KVCacheConfig.from_name("int4", window=150))
    out = run("-p", "x", "-m", 3, "--prompt-cache-file", path)[1]
    before, after = (re.search(mark, out)[1] for mark in (r"At (\d+) tokens", r"(\d+) tokens seen"))
    assert 186 < int(before) <= int(after) <= int(before) + 3


def test_more_drafts_than_can_be_taken_back_are_refused(model_file, run):
    base = ["--model", model_file, "-m", 3, *INT4, "--draft-model", model_file]
    code, _, err = run(*base, "--num-draft-tokens", 32)
    assert code == 2 and err.count("\n") == 1 and "--num-draft-tokens 32: use 31 or fewer" in err
    assert run(*base, "--num-draft-tokens", 31)[0] == 0


def test_a_draft_model_gets_our_cache_too(model_file, run):
    """Greedy text is the same with and without a draft."""
    base = ["--model", model_file, "-p", "To be", "-m", 60, "--verbose", "False", *INT4]
    assert run(*base)[1] == run(*base, "--draft-model", model_file)[1]


def test_ctrl_c_ends_the_text_with_the_report(model_file):
    code = f"""
import os, signal, sys, threading
from mlx_kivi import generate
threading.Timer(3, os.kill, (os.getpid(), signal.SIGINT)).start()
flags = ["--kv-quantize", "int4", "--streaming-llm-window", "100", "--max-tokens", "-1"]
generate.main(["--model", {model_file!r}, *flags])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.match(r"KV cache: [\d,]+ tokens seen", done.stdout.splitlines()[-1])


@pytest.mark.parametrize("command", [["mlx_kivi", "generate"], ["mlx_kivi.generate"]])
def test_runs_as_a_module(command, model_file):
    argv = [sys.executable, "-m", *command, "--model", model_file, "-m", "3", *INT4]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    assert "KV cache:" in done.stdout


def test_an_unknown_command_names_those_that_exist():
    argv = [sys.executable, "-m", "mlx_kivi", "generat"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "generate" in done.stderr and done.stderr.count("\n") == 1


PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):",
    "The three laws of thermodynamics are",
]


@pytest.mark.model
def test_int8_changes_no_token_of_the_real_model(smollm2):
    """Four prompts, 60 greedy tokens: the same text as the full-precision cache's."""
    model, tokenizer = load(str(smollm2))
    for prompt in PROMPTS:
        full = mlx_text(model, tokenizer, prompt, max_tokens=60)
        with patched(KVCacheConfig.from_name("int8")):
            assert mlx_text(model, tokenizer, prompt, max_tokens=60) == full


@pytest.mark.model
def test_the_demo_answers_its_question(smollm2, run):
    flags = ["--kv-quantize", "int4", "--streaming-llm-sink", 4, "--streaming-llm-window", 1024]
    code, out, _ = run("--model", smollm2, "-p", "How do I grow tomatoes?", "-m", 60, *flags)
    assert code == 0 and "tomato" in out.partition("==========")[2].lower()
