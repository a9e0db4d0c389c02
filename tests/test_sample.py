"""`mlx_kivi.sample`: tinygpt's flags and report, for .tinygpt files and model directories."""

import argparse
import json
import re
import sys
from functools import partial

import helpers
import pytest
from helpers import ROOT, tinygpt_file
from mlx import nn
from mlx_lm import stream_generate

from mlx_kivi import KVCacheConfig, make_prompt_cache, report, sample, tinygpt
from mlx_kivi.__main__ import main as command
from mlx_kivi.commands.flags import add_arguments as add_cache_flags
from mlx_kivi.convert_tinygpt import main as convert

CTX = 40
TIMES = r"in \d+\.\d\ds — \d+ tok/s"


@pytest.fixture
def make_file(tmp_path):
    """Write a random .tinygpt model with header switches; gives its path as text."""
    return partial(tinygpt_file, tmp_path, ctx=CTX)


@pytest.fixture
def run(capsys):
    """Run the command; gives exit code, stdout and stderr."""
    return partial(helpers.run, capsys, sample.main)


@pytest.fixture(scope="module")
def engine(shared):
    return shared / "data" / "tinygpt"


def text_of(out):
    return out.rpartition("\n\n")[0]


# Text


@pytest.mark.parametrize("extra", [[], ["--kv-quantize", "int8"], ["--no-cache"]], ids=" ".join)
def test_greedy_text_is_the_engines(run, engine, extra):
    golden = json.loads((engine / "golden.json").read_text())["greedy"]
    path = engine / "shakespeare-3l-fp32.tinygpt"
    for prompt, wanted in golden.items():
        code, out, _ = run(path, "--prompt", prompt, "--tokens", 80, "--temp", 0, *extra)
        assert (code, text_of(out)) == (0, prompt + wanted)


def test_a_model_directory_samples_as_its_file(run, make_file, tmp_path):
    path = make_file()
    convert([path, str(tmp_path / "directory")])
    texts = [run(p, "--tokens", 20, "--seed", 3)[1] for p in (path, tmp_path / "directory")]
    assert text_of(texts[0]).endswith(text_of(texts[1]).partition("ROMEO:")[2])


@pytest.mark.model
def test_a_model_of_mlx_lm_samples_until_its_end(run, smollm2):
    question = "What is the capital of France?"
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    code, out, _ = run(smollm2, "--prompt", prompt, "--temp", 0, "--tokens", 30)
    assert (code, text_of(out)) == (0, prompt + "The capital of France is Paris.")
    assert "\n(7 tokens" in out


def test_the_seed_decides_the_text(run, make_file):
    path = make_file()
    texts = [text_of(run(path, "--tokens", 20, "--seed", seed)[1]) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("temperature", ["0", "-1"])
def test_no_temperature_is_greedy(run, make_file, temperature):
    path = make_file()
    out = run(path, "--temperature", temperature, "--tokens", 20)[1]
    model, tokenizer, _ = tinygpt.load(path)
    responses = stream_generate(model, tokenizer, "ROMEO:", max_tokens=20)
    assert text_of(out) == "ROMEO:" + "".join(r.text for r in responses)


def test_half_characters_are_held_back(make_file, monkeypatch):
    text, pieces = "naïve €5 日本 👩‍👧", []

    def write(piece):
        pieces.append(piece)

    monkeypatch.setattr(sample, "generated", lambda *_: iter(text.encode()))
    monkeypatch.setattr(sys.stdout, "write", write)
    sample.main([make_file(), "--prompt", "x"])
    out = "".join(pieces)
    assert text_of(out) == "x" + text
    assert "\N{REPLACEMENT CHARACTER}" not in out
    assert len(pieces) > len(text)


def test_an_interrupt_ends_the_text_with_its_report(run, make_file, monkeypatch):
    def generated(*_):
        yield from b"hello"
        raise KeyboardInterrupt

    monkeypatch.setattr(sample, "generated", generated)
    code, out, _ = run(make_file(), "--prompt", "x")
    assert (code, text_of(out)) == (0, "xhello")
    assert "(5 tokens" in out


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_are_quantised_as_mlx_does(run, make_file, bits):
    path = make_file()
    argv = (path, "--quantize", f"int{bits}", "--quantize-group", 32, "--temp", 0, "--tokens", 20)
    code, out, _ = run(*argv)
    model, tokenizer, _ = tinygpt.load(path)
    nn.quantize(model, 32, bits)
    responses = stream_generate(model, tokenizer, "ROMEO:", max_tokens=20)
    assert (code, text_of(out)) == (0, "ROMEO:" + "".join(r.text for r in responses))


# The report


def test_the_report_counts_tokens_and_live_bytes(run, make_file):
    path = make_file()
    out = run(path, "--tokens", 30, "--temp", 0, "--kv-quantize", "bf16")[1]
    model, tokenizer, _ = tinygpt.load(path)
    caches = make_prompt_cache(model, KVCacheConfig.from_name("bf16"))
    list(stream_generate(model, tokenizer, "ROMEO:", max_tokens=30, prompt_cache=caches))
    size = report.size(sum(a.nbytes for c in caches for a in (c.keys, c.values)))
    last = out.splitlines()[-2:]
    assert re.fullmatch(rf"\(30 tokens {TIMES} · KV-cached\)", last[0])
    assert last[1] == f"KV cache:  36 tokens · {size}"


def test_without_a_cache_there_is_nothing_to_report_of_it(run, make_file):
    path = make_file()
    cached, uncached = (run(path, "--temp", 0, "--tokens", 25, *x)[1] for x in ([], ["--no-cache"]))
    assert text_of(cached) == text_of(uncached)
    assert re.fullmatch(rf"\(25 tokens {TIMES} · uncached\)", uncached.splitlines()[-1])


def test_yoco_says_which_layers_hold_anything(run, make_file):
    out = run(make_file(layers=6, useYOCO=True), "--tokens", 5)[1]
    assert re.search(r"KV cache:  11 tokens · \S+ kB · YOCO \(3/6 layers populated\)$", out.strip())


@pytest.mark.parametrize("sink, window", [(None, 36), (2, 20)])
def test_streaming_goes_on_beyond_the_table(run, make_file, sink, window):
    flags = ["--streaming-llm-window", window]
    flags += [] if sink is None else ["--streaming-llm-sink", sink]
    code, out, _ = run(make_file(), "--tokens", 150, "--temp", 0, *flags, "--kv-quantize", "int4")
    assert code == 0
    assert "(150 tokens" in out
    stored = int(re.search(r" · stored (\d+) \(StreamingLLM cap\)$", out.strip())[1])
    assert window / 2 <= stored <= window + (4 if sink is None else sink)
    assert "KV cache:  156 tokens" in out


def test_a_prompt_longer_than_the_table_streams(run, make_file):
    argv = ("--streaming-llm-window", 30, "--tokens", 10, "--prompt", "x" * 200)
    code, out, _ = run(make_file(), *argv)
    assert (code, "KV cache:  210 tokens" in out) == (0, True)


@pytest.mark.parametrize("extra", [[], ["--no-cache"], ["--kv-quantize", "int8"]], ids=" ".join)
def test_without_a_window_the_text_stops_with_the_table_and_says_so(run, make_file, extra):
    path = make_file()
    code, out, err = run(path, "--temp", 0, *extra)
    made = CTX - len("ROMEO:") + 1
    assert (code, f"\n({made} tokens" in out) == (0, True)
    assert "Stopped at the end of the model's learned position table (ctx = 40)" in out
    exactly = run(path, "--temp", 0, "--tokens", made, *extra)[1]
    assert text_of(exactly) == text_of(out)
    assert "Stopped" not in exactly


def test_preallocation_changes_when_not_what(run, make_file, monkeypatch):
    path, seen = make_file(ctx=300), []
    generated = sample.generated

    def watched(model, caches, *rest):
        for token in generated(model, caches, *rest):
            seen.append(sum(c.nbytes for c in caches))
            yield token

    monkeypatch.setattr(sample, "generated", watched)
    texts = [
        text_of(run(path, "--tokens", 280, "--temp", 0, *extra)[1])
        for extra in ([], ["--kv-preallocate"])
    ]
    assert texts[0] == texts[1]
    assert seen[0] < seen[279] == seen[280] == seen[559]


# Prompt caches


POLICY = ["--kv-quantize", "int4", "--streaming-llm-window", "30", "--temp", "0"]


@pytest.mark.parametrize("prompt", ["A", "What is the matter?", "And it goes on and on. " * 9])
def test_a_prompt_cache_is_written_once_and_read_after(run, make_file, tmp_path, prompt):
    path = make_file()
    argv = (path, "--prompt", prompt, *POLICY, "--tokens", 60)
    plain = run(*argv)[1]
    for extra in (["--cache-prompt", tmp_path / "one"], ["--prompt-cache-dir", tmp_path / "dir"]):
        runs = [run(*argv, *extra) for _ in range(2)]
        assert [code for code, *_ in runs] == [0, 0]
        assert [text_of(out) for _, out, _ in runs] == [text_of(plain)] * 2
        assert " written to " in runs[0][2]
        assert " read from " in runs[1][2]
        assert "(StreamingLLM cap)" in runs[1][1]
    assert len(list((tmp_path / "dir").iterdir())) == 1


def test_a_cache_directory_keeps_prompts_policies_and_models_apart(run, make_file, tmp_path):
    one, other = make_file("one"), make_file("other", dMlp=64)
    extra = ["--prompt-cache-dir", tmp_path / "dir", "--tokens", 1]
    calls = ([one], [one, "--prompt", "KING"], [one, "--kv-quantize", "int8"], [other])
    calls += ([one, "--quantize", "int8", "--quantize-group", 32],)
    assert all(" written to " in run(*call, *extra)[2] for call in calls)
    assert all(" read from " in run(*call, *extra)[2] for call in calls)


@pytest.mark.parametrize(
    "change, says",
    [
        (["--prompt", "KING"], "holds another prompt"),
        (["--kv-quantize", "int8"], "--kv-key-bits 4"),
        (["--streaming-llm-window", "20"], "--streaming-llm-window 30"),
    ],
    ids=["prompt", "bits", "window"],
)
def test_a_prompt_cache_of_another_kind_is_refused(run, make_file, tmp_path, change, says):
    argv = (make_file(), *POLICY, "--cache-prompt", tmp_path / "file")
    assert run(*argv)[0] == 0
    code, _, err = run(*argv, *change)
    assert (code, err.count("error:")) == (1, 1)
    assert says in err
    assert str(tmp_path / "file.safetensors") in err


def test_a_broken_prompt_cache_is_refused(run, make_file, tmp_path):
    (tmp_path / "file.safetensors").write_bytes(b"nothing")
    code, _, err = run(make_file(), "--cache-prompt", tmp_path / "file.safetensors")
    assert (code, err.count("\n")) == (1, 1)
    assert str(tmp_path / "file.safetensors") in err


# Hints in the header


HINTS = {"kviBits": 4, "streamingSink": 3, "streamingWindow": 25}


def test_hints_of_the_header_are_defaults_and_said(run, make_file):
    code, out, err = run(make_file(**HINTS), "--tokens", 60)
    assert (code, "(StreamingLLM cap)" in out) == (0, True)
    assert "Defaults from the model file: --kv-quantize int4" in err
    assert re.search("KV cache of 2 of 2 layers: 4 bits.* sinks 3, window 25", err)
    assert "2 of 2 layers are not packed: a window of 25 fits in the full-precision part" in err


def test_a_window_of_the_header_beyond_its_positions_is_named(run, make_file):
    code, _, err = run(make_file(streamingWindow=1024), "--tokens", 9)
    assert code == 1 and err.count("\n") == 1
    assert "config.streamingWindow: expected sinks and window within the 40 positions" in err


@pytest.mark.parametrize("bits", [5, 6])
def test_bits_of_the_header_without_a_name(run, make_file, bits):
    assert f"{bits} bits" in run(make_file(kviBits=bits), "--tokens", 9)[2]


def test_a_window_that_the_model_was_trained_with_is_no_cap_of_ours(run, make_file):
    model = make_file(slidingWindow=16)
    assert "(StreamingLLM cap)" not in run(model, "--tokens", 40)[1]
    _, out, err = run(model, "--tokens", 40, "--streaming-llm-window", 30)
    assert "(StreamingLLM cap)" not in out and "sinks 0, window 16" in err


def test_flags_override_hints(run, make_file):
    flags = ["--kv-quantize", "bf16", "--streaming-llm-sink", "1", "--streaming-llm-window", "30"]
    err = run(make_file(**HINTS), "--tokens", 9, *flags)[2]
    assert re.search("bfloat16, sinks 1, window 30", err)
    assert "from the model file" not in err
    assert run(make_file(**HINTS), "--no-cache", "--tokens", 9)[0] == 0


# Errors


@pytest.mark.parametrize(
    "argv",
    [
        ["--kv-quantize", "q4"],
        ["--kv-quantize", "int7"],
        ["--streaming-llm-window", "0"],
        ["--streaming-llm-window", "many"],
        ["--streaming-llm-window", "37"],
        ["--streaming-llm-sink", "4"],
        ["--streaming-llm-sink", "-1"],
        ["--tokens", "0"],
        ["--tokens", "ten"],
        ["--temperature", "hot"],
        ["--temperature", "nan"],
        ["--seed", "-1"],
        ["--cache-prompt", ""],
        ["--quantize", "int2"],
        ["--quantize-group", "48"],
        ["--prompt", ""],
        ["--prompt", "x" * 41],
        ["--prompt", "\udcff"],
        ["--prompt"],
        ["--no-cache", "--kv-quantize", "int8"],
        ["--no-cache", "--cache-prompt", "file"],
        ["--no-cache", "--kv-preallocate"],
        ["--lora-weight", "2"],
        ["--tok", "5"],
        ["--unknown"],
    ],
    ids=" ".join,
)
def test_a_bad_flag_is_one_line_and_exit_2(run, make_file, argv):
    code, out, err = run(make_file(), *argv)
    assert (code, out) == (2, "")
    assert len([line for line in err.splitlines() if "error:" in line]) == 1
    assert "Traceback" not in err
    assert argv[0] in err


def test_a_group_that_does_not_divide_the_weights_names_one_that_does(run, make_file):
    code, _, err = run(make_file(dModel=96), "--quantize", "int4")
    assert (code, "rows of 96 weights; use 32" in err) == (2, True)


def test_no_model_is_a_usage_error(run):
    assert run()[0] == 2


@pytest.mark.parametrize("content", [None, b"", b"TGPT", b"not a model at all"], ids=repr)
def test_a_model_that_cannot_be_loaded_is_one_line_and_exit_1(run, tmp_path, content):
    path = tmp_path / "model.tinygpt"
    if content is not None:
        path.write_bytes(content)
    code, out, err = run(path)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert str(path) in err


def test_the_command_is_listed_and_found(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mlx_kivi", "sample", "--help"])
    with pytest.raises(SystemExit) as stop:
        command()
    assert stop.value.code == 0
    help_text = capsys.readouterr().out
    for flag in ("--prompt-cache-dir", "--kv-preallocate", "--streaming-llm-window", "--quantize"):
        assert flag in help_text


def test_the_documentation_lists_every_flag():
    page = (ROOT / "docs" / "tinygpt.md").read_text(encoding="utf-8")
    others = argparse.ArgumentParser()
    add_cache_flags(others)
    flags = {flag for a in sample.setup_arg_parser()._actions for flag in a.option_strings}
    flags -= {flag for a in others._actions for flag in a.option_strings}
    assert [flag for flag in sorted(flags) if f"`{flag}" not in page] == []
