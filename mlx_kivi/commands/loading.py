"""Loading a model by path or repository: mlx_lm's, or a .tinygpt file; errors say the mend."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from .. import tinygpt
from ..config import KVCacheConfig
from .cli import CommandError

# The flags that a header's kviBits stand for; 5 and 6 bits have no name.
_NAMED = {2: "int2", 3: "int3", 4: "int4", 8: "int8", 16: "fp16", 32: "none"}
_STORAGE = {bits: ["--kv-quantize", name] for bits, name in _NAMED.items()}
_STORAGE |= {bits: ["--kv-key-bits", str(bits), "--kv-value-bits", str(bits)] for bits in (5, 6)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of .tinygpt models."""
    flags = parser.add_argument_group(".tinygpt models")
    flags.add_argument(
        "--tinygpt-tokenizer",
        metavar="DIR",
        help="Directory with the tokenizer of a .tinygpt file that is not byte-level",
    )
    flags.add_argument(
        "--lora", metavar="FILE", help="A .lora file to merge into the weights. Default: none"
    )
    flags.add_argument(
        "--lora-weight", type=float, metavar="W", help="Factor of --lora. Default: 1"
    )


def load(
    mlx_load: Callable[..., Any],
    path: str,
    args: argparse.Namespace | None = None,
    *,
    flag: str = "--model",
    **kwargs: Any,
) -> Any:
    """`mlx_lm.load`, also for .tinygpt files.

    Args:
        mlx_load: mlx_lm's own function.
        path: A directory, a .tinygpt file or a Hugging Face repository.
        args: The flags of `add_arguments`, if they are about this model.
        flag: What named the path, for errors.
        kwargs: As mlx_lm's.

    Raises:
        CommandError: one line: what is missing or broken, and the mend.
    """
    local = Path(path)
    try:
        if local.is_file():
            return _load_file(local, args, flag, kwargs)
        if local.is_dir():
            _check_directory(path, local, flag)
        elif path.startswith((".", "/", "~")) or path.count("/") > 1:
            raise CommandError(f"{flag} {path}: no such directory")
        hints = _hints(path) if local.is_dir() else None
        _check_flags(args, hints is not None)
        if hints is None:
            return _mlx_load(mlx_load, path, local, flag, kwargs)
        with _quiet_transformers():
            loaded = _mlx_load(mlx_load, path, local, flag, kwargs)
        if hints.tokenizerSource is None:
            # mlx_lm would stream bytes by decoding the whole line for each.
            loaded = loaded[0], tinygpt.byte_tokenizer(), *loaded[2:]
        if args is not None and args.lora is not None:
            tinygpt.merge_lora(loaded[0], args.lora, _weight(args))
        return loaded
    except tinygpt.TinyGPTError as error:
        raise CommandError(str(error)) from None


def _load_file(
    path: Path, args: argparse.Namespace | None, flag: str, kwargs: dict[str, Any]
) -> Any:
    if not tinygpt.is_tinygpt(path):
        raise CommandError(f"{flag} {path}: not a .tinygpt file; name one, or a directory")
    if kwargs.get("adapter_path"):
        raise CommandError("--adapter-path is for model directories: use --lora FILE", 2)
    if (kwargs.get("model_config") or {}).get("quantize_activations"):
        raise CommandError("--quantize-activations needs a model of quantised weights", 2)
    given = {}
    if args is not None:
        given = {"tokenizer_dir": args.tinygpt_tokenizer, "lora": args.lora}
        given["lora_weight"] = _weight(args)
    model, tokenizer, config = tinygpt.load(path, **given)
    return (model, tokenizer, config) if kwargs.get("return_config") else (model, tokenizer)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """It warns that it does not know the model type: it loads the tokenizer only."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def _weight(args: argparse.Namespace) -> float:
    if args.lora_weight is None:
        return 1.0
    if args.lora is None:
        raise CommandError("--lora-weight needs --lora FILE", 2)
    return args.lora_weight


def _check_flags(args: argparse.Namespace | None, ours: bool) -> None:
    """Refuse the flags that a model directory has no use for."""
    if args is None:
        return
    if args.tinygpt_tokenizer is not None:
        raise CommandError("--tinygpt-tokenizer is for .tinygpt files: a directory has its own", 2)
    if not ours and args.lora is not None:
        raise CommandError("--lora is for .tinygpt models: use --adapter-path", 2)
    _weight(args)


def _mlx_load(
    mlx_load: Callable[..., Any], path: str, local: Path, flag: str, kwargs: dict[str, Any]
) -> Any:
    try:
        return mlx_load(path, **kwargs)
    except CommandError:
        raise
    except Exception as error:
        if os.environ.get("MLX_KIVI_TRACEBACK"):
            raise
        text = " ".join(str(error).split())[:300] or type(error).__name__
        if local.is_dir():
            raise CommandError(f"{flag} {path}: can't be loaded: {text}") from None
        raise CommandError(
            f"{flag} {path}: no such directory, and it can't be fetched from the hub: {text}"
        ) from None


def _check_directory(path: str, local: Path, flag: str) -> None:
    config = local / "config.json"
    if not config.is_file():
        raise CommandError(f"{flag} {path}: config.json is missing; name a model directory")
    try:
        if not isinstance(json.loads(config.read_text()), dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise CommandError(f"{flag} {path}: config.json is broken ({error})") from None
    if not list(local.glob("model*.safetensors")):
        raise CommandError(f"{flag} {path}: no model*.safetensors in it; download it again")


def hinted_flags(path: str | None, args: argparse.Namespace) -> list[str]:
    """The cache flags that a .tinygpt header's hints stand for, where the user gave no other.

    Args:
        path: The model; other kinds than .tinygpt files and their directories give no hints.
        args: The cache's flags as given.

    Raises:
        CommandError: for a file that is broken, or bits that no cache of ours stores.
    """
    try:
        hints = None if path is None else _hints(path)
    except tinygpt.TinyGPTError as error:
        raise CommandError(str(error)) from None

    def given(*names: str) -> bool:
        return any(getattr(args, name, None) is not None for name in names)

    if hints is None or given("kv_bits", "prompt_cache_file"):
        return []
    flags = []
    if hints.kviBits is not None and not given("kv_quantize", "kv_key_bits", "kv_value_bits"):
        if hints.kviBits not in _STORAGE:
            known = ", ".join(map(str, sorted(_STORAGE)))
            raise CommandError(
                f"{path}: config.kviBits: expected {known}, got {hints.kviBits}: choose with "
                "--kv-quantize NAME"
            )
        flags += _STORAGE[hints.kviBits]
    bounded = given("streaming_llm_window", "max_kv_size")
    if hints.streamingWindow is not None and not bounded:
        sinks = (args.streaming_llm_sink, hints.streamingSink, KVCacheConfig.sink)
        sink = next(n for n in sinks if n is not None)
        if hints.streamingWindow + sink > hints.ctx:
            raise CommandError(
                f"{path}: config.streamingWindow: expected sinks and window within the "
                f"{hints.ctx} positions of ctx, got {hints.streamingWindow}: choose with "
                f"--streaming-llm-window {hints.ctx - sink}"
            )
        flags += ["--streaming-llm-window", str(hints.streamingWindow)]
        bounded = True
    if hints.streamingSink is not None and bounded and not given("streaming_llm_sink"):
        flags += ["--streaming-llm-sink", str(hints.streamingSink)]
    return flags


def _hints(path: str) -> tinygpt.ModelArgs | None:
    """The arguments of a .tinygpt file or a directory made of one; None for any other model."""
    local = Path(path)
    if tinygpt.is_tinygpt(local):
        return tinygpt.TinyGPTFile(local).args
    try:
        config = json.loads((local / "config.json").read_text())
    except (OSError, ValueError):
        return None  # no such model, which loading will say
    if not isinstance(config, dict) or config.get("model_type") != "tinygpt":
        return None
    return tinygpt.ModelArgs.from_dict(config, local / "config.json")
