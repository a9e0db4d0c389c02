"""What the commands share: our flags on mlx_lm's parser, and errors of one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from ..config import KVCacheConfig
from ..hooks import UnsupportedError
from . import flags


class CommandError(Exception):
    """Something the user can mend: one line, and the exit code (2 for usage, else 1)."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def extend(parser: argparse.ArgumentParser, prog: str) -> None:
    """Give an mlx_lm parser our name, our flags, and usage errors of one line."""
    parser.prog = prog
    one_line_usage(parser)
    flags.add_arguments(parser)


def one_line_usage(parser: argparse.ArgumentParser) -> None:
    """No usage text before what is wrong."""

    def error(message: str) -> NoReturn:
        fail(parser.prog, f"{message} (--help lists the flags)", 2)

    parser.error = error  # type: ignore[method-assign]  # mlx_lm has made the parser


def parse(
    make_parser: Callable[[], argparse.ArgumentParser], argv: Sequence[str]
) -> tuple[argparse.Namespace, KVCacheConfig | None]:
    """Parse a command line of an mlx_lm command plus our flags.

    Args:
        make_parser: Makes the parser, ours added.
        argv: The command line without the program's name.

    Returns:
        The arguments, with ``given_group_size`` (None: --kv-group-size is at its default), and the
        policy: None if no flag of ours was given.

    Raises:
        CommandError: for a bad value; argparse itself exits with code 2 for a bad flag.
    """
    args = make_parser().parse_args(argv)
    # mlx_lm's default for --kv-group-size can't be told from the same value given.
    unset = make_parser()
    unset.set_defaults(kv_group_size=None)
    args.given_group_size = getattr(unset.parse_args(argv), "kv_group_size", None)
    try:
        config = flags.from_arguments(args, args.given_group_size)
    except ValueError as error:
        raise CommandError(str(error), 2) from None
    return args, config


def check_text_flags(args: argparse.Namespace) -> None:
    """Refuse a ``--prompt`` that is no text, and a ``--seed`` that mlx does not take."""
    try:
        args.prompt.encode()
    except UnicodeEncodeError:
        raise CommandError("--prompt is not UTF-8 text", 2) from None
    if args.seed is not None and not 0 <= args.seed < 2**64:
        raise CommandError(f"--seed {args.seed}: use a whole number from 0 to 2**64 - 1", 2)


@contextmanager
def one_line_errors(prog: str) -> Iterator[None]:
    """Turn an error into one line on stderr and an exit code: 2 for usage, 1 for the rest."""
    try:
        yield
    except CommandError as error:
        fail(prog, str(error), error.code)
    except UnsupportedError as error:
        fail(prog, str(error), 1)
    except KeyboardInterrupt:
        fail(prog, "stopped", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:  # the last line of defence: a user gets no traceback
        if os.environ.get("MLX_KIVI_TRACEBACK"):
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, OSError) and error.filename is not None:
            text = f"{error.filename}: {error.strerror}"
        elif not isinstance(error, ValueError):
            text += f" ({type(error).__name__}; MLX_KIVI_TRACEBACK=1 shows where)"
        fail(prog, text, 1)


def fail(prog: str, message: str, code: int) -> NoReturn:
    """One line on stderr, and the end."""
    sys.stdout.flush()
    print(f"{prog}: error: {message}", file=sys.stderr)
    sys.exit(code)


@contextmanager
def replaced(target: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of a module for a ``with`` block."""
    before = {name: getattr(target, name) for name in attributes}
    for name, value in attributes.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)
