"""``python -m mlx_kivi COMMAND …``: each command is a module with a ``main``."""

from __future__ import annotations

import importlib
import sys

from . import __version__
from .commands import cli

COMMANDS = {
    "generate": ("mlx_kivi.generate", "text from a prompt, with mlx_lm.generate's flags and ours"),
    "server": ("mlx_kivi.server", "mlx_lm.server, packed, bounded and in batches"),
    "sample": ("mlx_kivi.sample", "text with tinygpt's own flags and report"),
    "calibrate": ("mlx_kivi.calibrate", "measures a model's keys ahead of time, for few bits"),
    "convert-tinygpt": ("mlx_kivi.convert_tinygpt", ".tinygpt file to model directory, and back"),
}


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print("usage: python -m mlx_kivi COMMAND [flags]   (COMMAND --help lists them)\n")
        for name, (_, about) in COMMANDS.items():
            print(f"  {name:<16} {about}")
        sys.exit(0 if len(sys.argv) > 1 else 2)
    command = sys.argv.pop(1)
    if command == "--version":
        print(__version__)
        return
    if command not in COMMANDS:
        known = ", ".join(COMMANDS)
        cli.fail("mlx_kivi", f"unknown command {command!r}: use one of {known}", 2)
    importlib.import_module(COMMANDS[command][0]).main()


if __name__ == "__main__":
    main()
