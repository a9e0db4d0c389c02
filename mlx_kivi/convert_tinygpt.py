"""Convert a .tinygpt file into an MLX model directory, and back.

    python -m mlx_kivi convert-tinygpt model.tinygpt DIRECTORY
    python -m mlx_kivi convert-tinygpt DIRECTORY model.tinygpt --dtype fp16

The directory is an ordinary one; `import mlx_kivi` makes its model type known to `mlx_lm.load`.
Weights keep their bits, except that int4 becomes float32, exactly. AdamW's moments are left behind:
a file written back has zeros there.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

from .commands import cli
from .tinygpt import mlx_config
from .tinygpt.config import ModelArgs
from .tinygpt.container import TinyGPTError, parse_object
from .tinygpt.format import DTYPES, TinyGPTFile, write
from .tinygpt.model import file_tensors
from .tinygpt.tokenizer import load_tokenizer


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mlx_kivi convert-tinygpt",
        description="Convert a .tinygpt file into an MLX model directory, or back.",
    )
    cli.one_line_usage(parser)
    parser.add_argument("source", help="A .tinygpt file or an MLX directory of such a model.")
    parser.add_argument("target", help="What to write; must not exist yet.")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="Weights of the .tinygpt file to write. Default: as the directory's source had them.",
    )
    parser.add_argument(
        "--tokenizer-dir",
        help="Directory with the Hugging Face tokenizer of a model that is not byte-level.",
    )
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = setup_arg_parser()
    with cli.one_line_errors(parser.prog):
        print(convert(parser, parser.parse_args(argv)))


def convert(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """Write what the arguments ask for; returns a line that says so."""
    source, target = Path(args.source), Path(args.target)
    to_directory = not source.is_dir()
    if to_directory and args.dtype:
        parser.error("--dtype is for writing a .tinygpt file; a directory keeps the file's own")
    if not to_directory and args.tokenizer_dir:
        parser.error("--tokenizer-dir is for writing a directory; a .tinygpt file holds none")
    if os.path.lexists(target):
        raise TinyGPTError(target, "target", "exists already; remove it or name another")
    if not target.parent.is_dir():
        raise TinyGPTError(target.parent, "target", "expected a directory; make it first")
    if to_directory:
        return to_mlx(source, target, args.tokenizer_dir)
    return to_tinygpt(source, target, args.dtype)


def to_mlx(source: Path, target: Path, tokenizer_dir: str | None) -> str:
    """Write the directory `target`, whole or not at all; returns a line that says so."""
    file = TinyGPTFile(source)
    tokenizer = load_tokenizer(file.args, source, tokenizer_dir)
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        partial.mkdir()
        weights = {}
        for done, (name, array) in enumerate(file.weights(), 1):
            weights[name] = mx.array(array)
            _report(done, len(file.manifest))
        path = str(partial / "model.safetensors")
        mx.save_safetensors(path, weights, metadata={"format": "mlx"})
        tokenizer.save_pretrained(partial)
        (partial / "config.json").write_text(json.dumps(mlx_config(file), indent=2) + "\n")
        os.rename(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    moments = "; the optimizer state stays behind" if file.dtype == "fp32" else ""
    return (
        f"wrote {target}: {len(weights)} tensors{moments}; "
        "after `import mlx_kivi`, mlx_lm.load opens it"
    )


def to_tinygpt(source: Path, target: Path, dtype: str | None) -> str:
    """Write the file `target`, whole or not at all; returns a line that says so."""
    config = _read_config(source / "config.json")
    args = ModelArgs.from_dict(config, source / "config.json")
    origin = config.get("tinygpt", {})
    dtype = dtype or origin.get("weightDtype", "fp32")
    weights: dict[str, Any] = {}
    for path in sorted(source.glob("model*.safetensors")):
        try:
            weights.update(mx.load(str(path)))  # type: ignore[arg-type]  # a dictionary
        except RuntimeError as error:
            raise TinyGPTError(path, "file", str(error).splitlines()[0]) from None
    if not weights:
        raise TinyGPTError(source, "model.safetensors", "expected the model's weights here")
    weights = file_tensors(args, weights)
    write(
        target,
        {**origin.get("config", {}), **args.header_config()},
        weights,
        dtype=dtype,
        step=origin.get("step", 0),
        extra=origin.get("header"),
        report=_report,
    )
    return f"wrote {target}: {len(weights)} tensors, {dtype}"


def _read_config(path: Path) -> dict[str, Any]:
    config = parse_object(path, path.read_bytes())
    if config.get("model_type") != "tinygpt":
        raise TinyGPTError(path, "model_type", "expected 'tinygpt': convert-tinygpt's own output")
    if "quantization" in config:
        raise TinyGPTError(path, "quantization", "expected unquantised weights")
    origin = config.get("tinygpt", {})
    kinds = {"weightDtype": str, "step": int, "config": dict, "header": dict}
    if not isinstance(origin, dict) or not all(
        isinstance(origin[key], kind) for key, kind in kinds.items() if key in origin
    ):
        raise TinyGPTError(path, "tinygpt", "expected what convert-tinygpt wrote there")
    return config


def _report(done: int, total: int) -> None:
    """A progress line, where someone watches."""
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\r{done}/{total} tensors", end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
