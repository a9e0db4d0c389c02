"""Measure a model's keys ahead of time, so that no first cache in few bits has to.

    python -m mlx_kivi.calibrate --model MODEL

The module can be called as well: to import it puts it in the place of `mlx_kivi.calibrate`, the
function.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import mlx_lm

from .commands import cli, loading
from .models.factory import Calibrated, calibrate
from .report import size

PROG = "mlx_kivi.calibrate"


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Measure what a model's keys are like, once, for caches of fewer than 8 bits.",
        allow_abbrev=False,
    )
    cli.one_line_usage(parser)
    parser.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help="A model directory, a .tinygpt file or a Hugging Face repository",
    )
    parser.add_argument("--adapter-path", metavar="DIR", help="Trained adapters. Default: none")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="Trust the tokenizer's own code"
    )
    loading.add_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    with cli.one_line_errors(PROG):
        args = setup_arg_parser().parse_args(argv)
        trust = {"trust_remote_code": True} if args.trust_remote_code else None
        model, *_ = loading.load(
            mlx_lm.load,
            args.model,
            args,
            adapter_path=args.adapter_path,
            tokenizer_config=trust,
        )
        print(told(calibrate(model)))


def told(found: Calibrated) -> str:
    """One line for people."""
    if found.why is not None:
        return f"Keys of 0 of {found.layers} layers take a basis of the model's own: {found.why}"
    done = "were measured already"
    if found.seconds is not None:
        done = f"measured in {found.seconds:.1f} s"
    kept = "kept in no file: the user's cache directory can't be written"
    if found.file is not None:
        kept = f"kept in {found.file} ({size(found.file.stat().st_size)})"
    return f"Keys of {found.measured} of {found.layers} layers {done}, {kept}"


class _Command(ModuleType):
    def __call__(self, model: Any) -> Calibrated:
        return calibrate(model)


sys.modules[__name__].__class__ = _Command

if __name__ == "__main__":
    main()
