"""`python -m mlx_kivi.server`: flags, and errors of one line."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, run, tinygpt_file
from mlx_lm import server as mlx_server
from serving.servers import Client

from mlx_kivi import server as command
from mlx_kivi.serving.engine import Engine

USAGE = {
    ("--port", "99999"): "--port 99999: use a number from 1 to 65535",
    ("--kv-memory", "lots"): "argument --kv-memory: 'lots': use a number of bytes, as 500MB or 8GB",
    ("--kv-memory", "0"): "argument --kv-memory: '0': use a number of bytes, as 500MB or 8GB",
    ("--prompt-cache-bytes", "5Q"): "argument --prompt-cache-bytes: '5Q': use a number of bytes",
    ("--kv-memory", "1GB", "--kv-bits", "4"): "--kv-memory does not know what --kv-bits 4 takes",
    ("--kv-quantize", "int4", "--kv-bits", "4"): "--kv-bits is mlx_lm's own cache",
    ("--kv-quantize", "int5"): "--kv-quantize 'int5' is unknown: use one of none, fp16",
    ("--streaming-llm-sink", "4"): "--streaming-llm-sink needs --streaming-llm-window M",
    ("--temp", "nan"): "--temp nan: use 0 or more",
    ("--top-p", "2"): "--top-p 2.0: use a number from 0 to 1",
    ("--decode-concurrency", "0"): "--decode-concurrency 0: use 1 or more",
    ("--chat-template-args", "[]"): "--chat-template-args: use a JSON object",
    ("--frob",): "unrecognized arguments: --frob",
}


@pytest.mark.parametrize(("flags", "says"), USAGE.items(), ids=map(" ".join, USAGE))
def test_a_wrong_flag_is_one_line(
    flags: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, command.main, *flags)
    assert (code, out) == (2, "")
    assert err.startswith(f"mlx_kivi.server: error: {says}") and err.count("\n") == 1


def test_a_wrong_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.tinygpt"
    path.write_text("no model")
    for wrong in (path, tmp_path / "nothing", tmp_path):
        code, _, err = run(capsys, command.main, "--model", wrong, "--port", free())
        assert code == 1 and err.startswith(f"mlx_kivi.server: error: --model {wrong}: ")
        assert err.count("\n") == 1


@pytest.mark.model
def test_what_fails_once_a_model_is_loaded_is_one_line_too(smollm2: Path) -> None:
    """In a process of its own: mlx ends one whose thread leaves its streams behind."""
    argv = [sys.executable, "-m", command.PROG, "--model", str(smollm2), "--port", str(free())]
    argv += ["--draft-model", "/nowhere"]
    ended = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 1
    said = [line for line in ended.stderr.splitlines() if "PyTorch" not in line]
    assert said == ["mlx_kivi.server: error: --draft-model /nowhere: no such directory"]


def test_an_address_in_use_is_found_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, _, err = run(capsys, command.main, "--model", "/nowhere", "--port", port)
    assert code == 1 and f"--port {port}" in err and "in use" in err


def test_an_older_mlx_lm_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(mlx_server, "_image_parts")
    code, _, err = run(capsys, command.main, "--model", "model")
    assert code == 1 and "needs mlx-lm 0.32.1 or newer" in err


def test_all_flags_of_mlx_lm_are_there() -> None:
    parser = command.setup_arg_parser()
    known = {flag for action in parser._actions for flag in action.option_strings}
    assert {"--host", "--decode-concurrency", "--prompt-cache-bytes", "--kv-bits"} <= known
    assert {"--kv-quantize", "--streaming-llm-window", "--kv-memory", "--lora"} <= known


def test_a_tinygpt_file_is_served_with_what_it_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tinygpt_file(tmp_path, ctx=512, kviBits=4, streamingWindow=100, streamingSink=4)
    said = []

    def ask(host: str, port: int, engine: Engine, *handlers: type) -> None:
        httpd = handlers[0](("127.0.0.1", 0), lambda *a: handlers[1](engine, *a))
        said.append(Client.once(httpd, engine, prompt="ROMEO:", max_tokens=600))

    monkeypatch.setattr(mlx_server, "_run_http_server", ask)
    code, out, err = run(capsys, command.main, "--model", path, "--port", free())
    assert code == 0, err
    hints, line = out.splitlines()
    assert hints.startswith("Defaults from the model file: --kv-quantize int4")
    assert line.startswith("KV cache: 4 bits") and "window 100" in line
    ((status, answer),) = said
    assert status == 200 and answer["usage"]["completion_tokens"] == 600  # beyond its table


def free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
