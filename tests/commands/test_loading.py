"""`mlx_kivi.generate` on .tinygpt files and directories made of them: flags, hints, errors."""

import json
import re
import struct
from functools import partial

import helpers
import mlx.core as mx
import numpy as np
import pytest
from helpers import parameters, tinygpt_file
from mlx_lm import load as mlx_load

from mlx_kivi import generate, tinygpt
from mlx_kivi.commands import loading
from mlx_kivi.convert_tinygpt import main as convert

CTX = 200
RULE = "=" * 10


@pytest.fixture
def make_file(tmp_path):
    """Write a random .tinygpt model with header switches; gives its path as text."""
    return partial(tinygpt_file, tmp_path, ctx=CTX)


@pytest.fixture
def make_lora(tmp_path):
    """Write a .lora file of rank 1 that adds 0 to 63 to a layer's rows; gives path and layer."""
    layer = "blocks.1.attn.o_proj"
    entries = [{"name": layer, "loraAShape": [64, 1], "loraBShape": [1, 64]}]
    raw = json.dumps({"rank": 1, "entries": entries}).encode()
    path = tmp_path / "side.lora"
    factors = np.concatenate([np.ones(64), np.arange(64)]).astype("<f4")
    path.write_bytes(b"TGLA" + struct.pack("<II", 2, len(raw)) + raw + factors.tobytes())
    return str(path), f"{layer}.weight"


@pytest.fixture
def run(capsys):
    """Run mlx_kivi.generate; gives exit code, the text, and all of stdout and stderr."""

    def run(*argv):
        code, out, err = helpers.run(capsys, generate.main, *argv)
        text = out.split(f"{RULE}\n")[1][:-1] if RULE in out else None
        return code, text, out + err

    return run


# Text


@pytest.mark.parametrize("storage", [[], ["--kv-quantize", "int8"]], ids=["full", "int8"])
def test_the_files_and_a_directory_give_the_engines_text(run, shared, tmp_path, storage):
    root = shared / "data" / "tinygpt"
    golden = json.loads((root / "golden.json").read_text())["greedy"]
    fp32, fp16 = (root / f"shakespeare-3l-{dtype}.tinygpt" for dtype in ("fp32", "fp16"))
    convert([str(fp32), str(tmp_path / "directory")])
    for prompt, wanted in golden.items():
        for model in (fp32, fp16, tmp_path / "directory"):
            argv = ("--model", model, "--prompt", prompt, "--max-tokens", 80, *storage)
            assert run(*argv)[:2] == (0, wanted)


def test_int4_sinks_and_window_run_packed_beyond_the_table(run, make_file):
    flags = ["--kv-quantize", "int4", "--kv-group-size", "32", "--kv-residual", "0"]
    flags += ["--streaming-llm-sink", "2", "--streaming-llm-window", "190"]
    path = make_file()
    code, text, said = run("--model", path, "--max-tokens", 300, *flags)
    assert code == 0
    assert re.search(r"4 bits, group 32, residual 0, sinks 2, window 190", said)
    assert "the table ends at 200 tokens, then 2 sinks and the last 103 are fed again" in said
    assert re.search(r"Generation: 300 tokens", said)
    assert re.search(r"KV cache: 305 tokens seen, 1\d\d stored", said)
    assert "not packed" not in said


@pytest.mark.parametrize("flags", [[], ["--kv-quantize", "int8"]])
@pytest.mark.parametrize("tokens", [-1, 300, 77])
def test_without_streaming_the_text_stops_at_the_table_and_says_so(run, make_file, flags, tokens):
    path = make_file(ctx=80)
    code, _, said = run("--model", path, "--prompt", "hello", "--max-tokens", tokens, *flags)
    # One more than the 75 positions after the prompt: the last token needs none.
    assert (code, "Generation: 76 tokens" in said) == (0, True)
    assert "Stopped at the end of the model's learned position table (ctx = 80)" in said


def test_a_text_that_just_fits_is_whole_and_not_stopped(run, make_file):
    argv = ("--model", make_file(ctx=80), "--prompt", "hello", "--max-tokens")
    long, fits = run(*argv, 300), run(*argv, 76)
    assert fits[:2] == long[:2]
    assert "Stopped" not in fits[2]


def test_a_draft_stops_at_the_table_too(run, make_file):
    path = make_file(ctx=80)
    argv = ("--model", path, "--draft-model", path, "--prompt", "hello", "--max-tokens", 300)
    code, text, said = run(*argv)
    alone = run("--model", path, "--prompt", "hello", "--max-tokens", 75)[1]
    assert (code, text) == (0, alone)
    assert "Stopped at the end" in said


# The flags of .tinygpt models


def parsed(*argv):
    return generate.setup_arg_parser().parse_args(["--model", "x", *argv])


def test_lora_is_merged_into_a_file_and_into_its_directory(make_file, make_lora, tmp_path):
    path, (side, layer) = make_file(), make_lora
    convert([path, str(tmp_path / "directory")])
    before = parameters(loading.load(mlx_load, path)[0])
    args = parsed("--lora", side, "--lora-weight", "0.5")
    for source in (path, str(tmp_path / "directory")):
        after = parameters(loading.load(mlx_load, source, args)[0])
        changed = [name for name in before if not mx.array_equal(before[name], after[name])]
        assert changed == [layer]
        assert mx.allclose(after[layer], before[layer] + 0.5 * mx.arange(64)[:, None], atol=1e-5)


def test_lora_reaches_the_text_and_not_the_draft(run, make_file, make_lora):
    path, (side, _) = make_file(), make_lora
    flags = ("--max-tokens", 20, "--lora", side, "--lora-weight", 3)
    with_lora = run("--model", path, *flags)[:2]
    assert with_lora != run("--model", path, "--max-tokens", 20)[:2]
    assert run("--model", path, "--draft-model", path, *flags)[:2] == with_lora


def test_a_tokenizer_is_taken_only_from_the_directory_that_is_named(run, make_file, tmp_path):
    named, other = tmp_path / "named", tmp_path / "other"
    tinygpt.byte_tokenizer().save_pretrained(named)
    path = make_file(tokenizerSource=str(other))
    code, _, said = run("--model", path, "--max-tokens", 5)
    assert (code, said.count("\n")) == (1, 1)
    assert "tokenizerSource" in said and "--tinygpt-tokenizer" in said
    assert run("--model", path, "--max-tokens", 5, "--tinygpt-tokenizer", named)[0] == 0


# Hints in the header


HINTS = {"kviBits": 4, "streamingSink": 3, "streamingWindow": 90}


@pytest.mark.parametrize("directory", [False, True], ids=["file", "directory"])
def test_hints_are_the_defaults_and_the_banner_says_so(run, make_file, tmp_path, directory):
    path = make_file(**HINTS)
    if directory:
        convert([path, str(tmp_path / "directory")])
        path = tmp_path / "directory"
    code, _, said = run("--model", path, "--max-tokens", 5)
    assert code == 0
    assert "4 bits, group 64, residual 64, sinks 3, window 90" in said
    assert "Defaults from the model file: --kv-quantize int4 --streaming-llm-window 90" in said


@pytest.mark.parametrize(
    "flags, policy",
    [
        (["--kv-quantize", "bf16"], "bfloat16, sinks 3, window 90"),
        (["--kv-key-bits", "8"], "keys 8, values full bits, .* sinks 3, window 90"),
        (["--streaming-llm-sink", "1"], "4 bits, .* sinks 1, window 90"),
        (["--streaming-llm-window", "50"], "4 bits, .* sinks 3, window 50"),
        (["--max-kv-size", "50"], "4 bits, .* sinks 3, window 47"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_each_flag_overrides_its_hint_alone(run, make_file, flags, policy):
    code, _, said = run("--model", make_file(**HINTS), "--max-tokens", 5, *flags)
    assert code == 0
    assert re.search(policy, said)


def test_mlx_lms_own_cache_drops_all_hints(run, make_file):
    argv = ("--model", make_file(**HINTS), "--max-tokens", 5, "--kv-bits", "8")
    code, _, said = run(*argv, "--quantized-kv-start", "100")
    assert (code, "KV cache" in said) == (0, False)


@pytest.mark.parametrize(
    "bits, policy",
    [(16, "float16"), (32, "full precision"), (2, "keys 3, values 2 bits")],
)
def test_bits_of_a_header_name_a_storage(run, make_file, bits, policy):
    code, _, said = run("--model", make_file(kviBits=bits), "--max-tokens", 5)
    assert (code, f"layers: {policy}" in said) == (0, True)


def test_a_sink_without_a_window_hints_nothing(run, make_file):
    code, _, said = run("--model", make_file(streamingSink=4), "--max-tokens", 5)
    assert (code, "KV cache" in said) == (0, False)


# Errors: one line, exit code 1, or 2 for usage


def is_one_line(result, code, *parts):
    assert result[0] == code
    assert result[2].count("\n") == 1
    for part in parts:
        assert part in result[2]


@pytest.mark.parametrize(
    "switches, flags, code, parts",
    [
        ({"kviBits": 7}, [], 1, ["config.kviBits", "got 7", "--kv-quantize"]),
        ({"streamingWindow": 300}, [], 1, ["config.streamingWindow", "--streaming-llm-window 196"]),
        ({}, ["--streaming-llm-window", "197"], 2, ["ctx = 200", "--streaming-llm-window 196"]),
        ({}, ["--max-kv-size", "300", "--kv-quantize", "int8"], 2, ["ctx = 200"]),
        ({}, ["--prompt", "x" * 201], 2, ["position 200", "--prompt of 201", "--streaming-llm-"]),
        ({}, ["--lora-weight", "2"], 2, ["--lora-weight needs --lora"]),
        ({}, ["--lora-weight", "much"], 2, ["--lora-weight"]),
        ({}, ["--lora", "nowhere.lora"], 1, ["nowhere.lora"]),
        ({}, ["--tinygpt-tokenizer", "nowhere"], 1, ["nowhere", "expected a directory"]),
        ({}, ["--adapter-path", "x"], 2, ["--adapter-path", "--lora"]),
        ({}, ["--quantize-activations"], 2, ["--quantize-activations"]),
        ({}, ["--draft-model", "/nowhere"], 1, ["--draft-model /nowhere: no such directory"]),
    ],
    ids=str,
)
def test_a_wrong_flag_or_hint(run, make_file, switches, flags, code, parts):
    is_one_line(run("--model", make_file(**switches), "--max-tokens", 5, *flags), code, *parts)


def test_a_broken_file(run, tmp_path, make_file):
    path = tmp_path / "broken.tinygpt"
    path.write_bytes(b"TGPT" + bytes(20))
    is_one_line(run("--model", path), 1, str(path))
    path.write_bytes(b"GGUF" + bytes(20))
    is_one_line(run("--model", path), 1, "--model", str(path), "not a .tinygpt file")


def test_flags_of_tinygpt_are_refused_for_directories(run, make_file, make_lora, tmp_path):
    convert([make_file(), str(tmp_path / "ours")])
    argv = ("--model", tmp_path / "ours", "--tinygpt-tokenizer", tmp_path)
    is_one_line(run(*argv), 2, "--tinygpt-tokenizer", "a directory has its own")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "other" / "model.safetensors").write_bytes(b"")
    argv = ("--model", tmp_path / "other", "--lora", make_lora[0])
    is_one_line(run(*argv), 2, "--lora", "--adapter-path")


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_an_incomplete_directory(run, make_file, tmp_path, missing):
    convert([make_file(), str(tmp_path / "directory")])
    (tmp_path / "directory" / missing).unlink()
    is_one_line(run("--model", tmp_path / "directory"), 1, "--model", "directory", missing[:5])


def test_a_directory_with_a_broken_config(run, make_file, tmp_path):
    convert([make_file(), str(tmp_path / "directory")])
    config = tmp_path / "directory" / "config.json"
    good = json.loads(config.read_text())
    config.write_text("{")
    is_one_line(run("--model", config.parent), 1, "--model", "config.json is broken")
    config.write_text(json.dumps({**good, "heads": 7}))
    is_one_line(run("--model", config.parent), 1, "config.json", "multiple of heads (7)")
