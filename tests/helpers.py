"""What the tests of commands and of .tinygpt models share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_kivi import tinygpt

ROOT = Path(__file__).resolve().parents[1]


def tinygpt_model(**config: Any) -> tinygpt.Model:
    """A random .tinygpt model: 2 layers, 2 heads of 32; ``config`` says at least ``ctx``."""
    mx.random.seed(0)
    sizes = {"layers": 2, "dModel": 64, "heads": 2, "dMlp": 96}
    return tinygpt.Model(tinygpt.ModelArgs.from_dict({**sizes, **config}))


def tinygpt_file(directory: Path, name: str = "model", **config: Any) -> str:
    """The path of a file that holds `tinygpt_model`, in a directory."""
    path = directory / f"{name}.tinygpt"
    tinygpt.save(path, tinygpt_model(**config))
    return str(path)


def parameters(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def run(
    capsys: pytest.CaptureFixture[str], main: Callable[[list[str]], None], *argv: Any
) -> tuple[int, str, str]:
    """A command's exit code, stdout and stderr."""
    capsys.readouterr()
    code = 0
    try:
        main([str(word) for word in argv])
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()
