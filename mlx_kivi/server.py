"""`mlx_lm.server` with packed and bounded KV caches, in batches: its own flags, and ours.

Parsing, loading, templates, sampling and HTTP are mlx_lm's; what is replaced is named in
docs/server.md: the generation thread, the prompt cache, the loader (.tinygpt files, errors of one
line), and what operators ask for.
"""

from __future__ import annotations

import argparse
import logging
import signal
import socket
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NoReturn

from huggingface_hub import CacheNotFound
from mlx_lm import server as mlx_server
from mlx_lm.utils import _download

from .commands import cli, loading
from .commands.flags import in_flags
from .config import KVCacheConfig
from .hooks import UnsupportedError
from .patch import UnconvertedCacheWarning, patch, unpatch
from .serving.engine import Engine
from .serving.handler import Handler, Server
from .upstream.prompt_cache import PromptCache

PROG = "mlx_kivi.server"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "K": 10**3, "M": 10**6, "G": 10**9}
_mlx_load, _mlx_scan = mlx_server.load, mlx_server.scan_cache_dir


class _Made(Exception):
    """Carries the parser of mlx_lm's ``main`` out of it."""


def setup_arg_parser() -> argparse.ArgumentParser:
    """mlx_lm.server's parser with the flags of the cache."""

    def leave(parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        raise _Made(parser)

    try:
        with cli.replaced(argparse.ArgumentParser, parse_args=leave):
            mlx_server.main()
    except _Made as made:
        (parser,) = made.args
    cli.extend(parser, PROG)
    loading.add_arguments(parser)
    parser.add_argument(
        "--kv-memory",
        metavar="BYTES",
        help="Most that the caches of running requests may take, as 8GB: requests wait for room, "
        "those that would never have it are refused. Default: no bound",
    )
    for action in parser._actions:
        if action.dest in ("kv_memory", "prompt_cache_bytes"):
            action.type = _bytes
    parser.set_defaults(max_kv_size=None)
    return parser


def _bytes(text: str) -> int:
    digits = text.strip().rstrip("KkMmGgBb ")
    unit = text.strip()[len(digits) :].strip().upper()
    try:
        count = int(Decimal(digits) * _UNITS[unit])
    except (InvalidOperation, KeyError, ValueError, OverflowError):
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: use a number of bytes, as 500MB or 8GB")
    return count


def main(argv: Sequence[str] | None = None) -> None:
    argv = list(sys.argv[1:] if argv is None else argv)
    with cli.one_line_errors(PROG):
        if not hasattr(mlx_server, "_image_parts"):
            raise UnsupportedError("the server needs mlx-lm 0.32.1 or newer: pip install -U mlx-lm")
        args = setup_arg_parser().parse_args(argv)
        _check_flags(args)
        hints = loading.hinted_flags(args.model, args)
        args, config = cli.parse(setup_arg_parser, [*hints, *argv])
        if hints:
            print(f"Defaults from the model file: {' '.join(hints)}", flush=True)
        run(args, config)


def _check_flags(args: argparse.Namespace) -> None:
    """Refuse values at which mlx_lm fails in a thread, or without naming the flag."""
    least = {
        "prefill_step_size": 1,
        "decode_concurrency": 1,
        "prompt_concurrency": 1,
        "prompt_cache_size": 0,
        "num_draft_tokens": 0,
        "max_tokens": 1,
        "top_k": 0,
        "temp": 0,
    }
    for name, low in least.items():
        if not getattr(args, name) >= low:
            flag = "--" + name.replace("_", "-")
            raise cli.CommandError(f"{flag} {getattr(args, name)}: use {low} or more", 2)
    for name in ("top_p", "min_p"):
        if not 0 <= getattr(args, name) <= 1:
            flag = "--" + name.replace("_", "-")
            raise cli.CommandError(f"{flag} {getattr(args, name)}: use a number from 0 to 1", 2)
    if not 0 < args.port < 65_536:
        raise cli.CommandError(f"--port {args.port}: use a number from 1 to 65535", 2)
    if not isinstance(args.chat_template_args, dict):
        raise cli.CommandError(
            '--chat-template-args: use a JSON object, as {"enable_thinking": false}', 2
        )
    if args.kv_memory is not None and args.kv_bits is not None:
        raise cli.CommandError(
            f"--kv-memory does not know what --kv-bits {args.kv_bits} takes: use --kv-quantize", 2
        )


def run(args: argparse.Namespace, config: KVCacheConfig | None) -> None:
    """Load, say what is in force, and serve until it is stopped."""
    _check_address(args)
    mlx_server.maybe_set_recommended_wired_limit()
    logging.basicConfig(
        level=getattr(logging, args.log_level),
        format="%(asctime)s - %(levelname)s - %(message)s",
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with started(args, config) as engine:
        if engine.serves:
            mlx_server._run_http_server(args.host, args.port, engine, Server, Handler)
        else:
            engine.join()


@contextmanager
def started(args: argparse.Namespace, config: KVCacheConfig | None) -> Iterator[Engine]:
    """The engine for a ``with`` block, its model loaded, mlx_lm patched.

    Args:
        args: What the parser of `setup_arg_parser` returned.
        config: The policy; None: mlx_lm's own caches.

    Raises:
        CommandError: if the model can't be loaded, or can't have such caches.
    """

    def load(path: str, **kwargs: Any) -> Any:
        if not kwargs:  # as mlx_lm asks for a draft
            return loading.load(_mlx_load, path, flag="--draft-model")
        own = args if path == args.model else None
        return loading.load(_mlx_load, path, own, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(cli.replaced(mlx_server, load=load, scan_cache_dir=_scan))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", UnconvertedCacheWarning)  # the engine says it, once
        if config is not None:
            patch(config)
            stack.callback(unpatch)
        cache = PromptCache(args.prompt_cache_size, args.prompt_cache_bytes)
        engine = Engine(Provider(args), cache, config, args.kv_memory)
        stack.callback(engine.stop_and_join)
        try:
            engine.wait_until_loaded()
        except ValueError as error:
            raise cli.CommandError(in_flags(str(error)), 2) from None
        yield engine


class Provider(mlx_server.ModelProvider):
    """mlx_lm's, which knows one model by all of its names."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        if args.model is not None and Path(args.model).exists():
            # The name that `/v1/models` has for it.
            name = str(Path(args.model).resolve())
            self._model_map[name] = args.model
            self._adapter_map[name] = args.adapter_path

    def _load(self, model_path: str | None, *paths: Any) -> None:
        if model_path is None:
            raise ValueError("no model: name one in the request, or start the server with --model")
        if not Path(model_path).exists():
            # Before mlx_lm lets go of the model that it has.
            flag = "--model" if model_path == self.cli_args.model else "model"
            loading.load(lambda path: _download(path), model_path, flag=flag)
        super()._load(model_path, *paths)

    def key(self, wanted: Any) -> tuple[str | None, str | None, str | None]:
        """What `model_key` is once a model is loaded that a request describes."""
        return (
            self._model_map.get(wanted.model, wanted.model),
            self._adapter_map.get(wanted.model, wanted.adapter),
            self._draft_model_map.get(wanted.draft, wanted.draft),
        )


def _scan() -> Any:
    """The models of the hub's cache: none if there is no such directory."""
    try:
        return _mlx_scan()
    except CacheNotFound:
        return argparse.Namespace(repos=[])


def _check_address(args: argparse.Namespace) -> None:
    """Find out before a model is loaded that nothing can listen there."""
    try:
        found = socket.getaddrinfo(
            args.host, args.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, _, _, address = found[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        why = error.strerror or str(error)
        raise cli.CommandError(
            f"--host {args.host} --port {args.port}: {why}: choose another"
        ) from None


if __name__ == "__main__":
    main()
