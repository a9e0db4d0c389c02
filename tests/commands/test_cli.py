"""Errors of the commands: one line on stderr, and the exit code."""

import pytest

from mlx_kivi.commands import cli
from mlx_kivi.hooks import UnsupportedError


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (cli.CommandError("--flag 3: use 2", 2), 2, "--flag 3: use 2"),
        (cli.CommandError("file: broken"), 1, "file: broken"),
        (UnsupportedError("this mlx is old: pip install 'mlx>=9'"), 1, "this mlx is old: pip inst"),
        (ValueError("two\nlines"), 1, "two lines"),
        (FileNotFoundError(2, "No such file", "a/b.png"), 1, "a/b.png: No such file\n"),
        (RuntimeError("odd"), 1, "odd (RuntimeError; MLX_KIVI_TRACEBACK=1 shows where)"),
        (KeyError(), 1, "KeyError (KeyError; "),
        (KeyboardInterrupt(), 130, "stopped"),
    ],
    ids=repr,
)
def test_every_error_is_one_line_and_a_code(
    error: BaseException,
    code: int,
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MLX_KIVI_TRACEBACK", raising=False)
    with pytest.raises(SystemExit) as stop, cli.one_line_errors("prog"):
        raise error
    said = capsys.readouterr().err
    assert stop.value.code == code
    assert said.startswith(f"prog: error: {line}") and said.count("\n") == 1
    assert ("TRACEBACK" in said) == (type(error) in (RuntimeError, KeyError))


def test_what_the_user_can_mend_is_one_line_for_developers_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_KIVI_TRACEBACK", "1")
    with pytest.raises(SystemExit), cli.one_line_errors("prog"):
        raise UnsupportedError("this mlx is old")
    assert capsys.readouterr().err == "prog: error: this mlx is old\n"
    with pytest.raises(RuntimeError, match="odd"), cli.one_line_errors("prog"):
        raise RuntimeError("odd")
