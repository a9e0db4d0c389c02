"""Loading a model by path or repository: mlx_lm's, or a .tinygpt file; errors say the mend."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import tinygpt
from .cli import CommandError


def load(mlx_load: Callable[..., Any], path: str, **kwargs: Any) -> Any:
    """`mlx_lm.load`, also for .tinygpt files.

    Args:
        mlx_load: mlx_lm's own function.
        path: A directory, a .tinygpt file or a Hugging Face repository.
        kwargs: As mlx_lm's.

    Raises:
        CommandError: one line: what is missing or broken, and the mend.
    """
    local = Path(path)
    if local.is_file():
        if not tinygpt.is_tinygpt(local):
            raise CommandError(f"--model {path}: not a .tinygpt file; name one, or a directory")
        model, tokenizer, config = tinygpt.load(local)
        return (model, tokenizer, config) if kwargs.get("return_config") else (model, tokenizer)
    if local.is_dir():
        _check_directory(path, local)
    elif path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise CommandError(f"--model {path}: no such directory")
    try:
        return mlx_load(path, **kwargs)
    except CommandError:
        raise
    except Exception as error:
        if os.environ.get("MLX_KIVI_TRACEBACK"):
            raise
        text = " ".join(str(error).split())[:300] or type(error).__name__
        if local.is_dir():
            raise CommandError(f"--model {path}: can't be loaded: {text}") from None
        raise CommandError(
            f"--model {path}: no such directory, and it can't be fetched from the hub: {text}"
        ) from None


def _check_directory(path: str, local: Path) -> None:
    config = local / "config.json"
    if not config.is_file():
        raise CommandError(f"--model {path}: config.json is missing; name a model directory")
    try:
        if not isinstance(json.loads(config.read_text()), dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise CommandError(f"--model {path}: config.json is broken ({error})") from None
    if not list(local.glob("model*.safetensors")):
        raise CommandError(f"--model {path}: no model*.safetensors in it; download it again")
