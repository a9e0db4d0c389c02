"""`tinygpt sample`'s flags and report, for .tinygpt files and model directories.

    python -m mlx_kivi.sample model.tinygpt --prompt "ROMEO:" --kv-quantize int4

Unlike the original: an unknown value is an error, bytes are those that are alive, and with a
window the text goes on beyond the model's positions.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx import nn

from . import hooks, report
from .commands import cli, loading
from .commands.cli import CommandError
from .commands.flags import in_flags
from .config import GROUP_SIZES, KVCacheConfig
from .models import learned_positions
from .models.factory import build, ours
from .upstream.prompt_file import PromptFileError, check, load_prompt_cache, save_prompt_cache

PROG = "mlx_kivi.sample"
_PREFILL = 512  # tokens a call


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Text from a .tinygpt file or a model directory.", allow_abbrev=False
    )
    parser.add_argument("model", metavar="MODEL", help="A .tinygpt file or a model directory")
    parser.add_argument("--prompt", default="ROMEO:", help='Text to begin with. Default: "ROMEO:"')
    parser.add_argument(
        "--tokens", type=int, default=200, metavar="N", help="Tokens to generate. Default: 200"
    )
    parser.add_argument(
        "--temperature",
        "--temp",
        type=float,
        default=0.8,
        metavar="T",
        help="Sampling temperature; 0 or less takes the likeliest token. Default: 0.8",
    )
    parser.add_argument("--seed", type=int, help="Seed of the sampling. Default: none")
    parser.add_argument(
        "--cache",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Keep keys and values; without, every token goes over the whole text. Default: keep",
    )
    parser.add_argument(
        "--cache-prompt",
        metavar="PATH",
        help="Keep the prompt's cache in this file: written if it is not there, else read",
    )
    parser.add_argument(
        "--prompt-cache-dir",
        metavar="DIR",
        help="The same in a directory, a file for each model, prompt and cache policy",
    )
    parser.add_argument(
        "--kv-preallocate",
        action="store_true",
        help="Allocate a cache without a window at once for all tokens. Default: as it grows",
    )
    parser.add_argument(
        "--quantize", choices=("int4", "int8"), help="Quantise the weights. Default: no"
    )
    parser.add_argument(
        "--quantize-group",
        type=int,
        choices=GROUP_SIZES,
        default=64,
        help="Weights that share a scale. Default: 64",
    )
    parser.set_defaults(max_kv_size=None)
    cli.extend(parser, PROG)
    loading.add_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    argv = list(sys.argv[1:] if argv is None else argv)
    with cli.one_line_errors(PROG):
        args = setup_arg_parser().parse_args(argv)
        _check_flags(args)
        hints = loading.hinted_flags(args.model, args) if args.cache else []
        args, config = cli.parse(setup_arg_parser, [*hints, *argv])
        if not args.cache and config is not None:
            raise CommandError("--no-cache leaves nothing for the flags of the KV cache to do", 2)
        holder = object()
        hooks.attention.hold(holder)
        try:
            run(args, config, hints)
        finally:
            hooks.attention.release(holder)


def _check_flags(args: argparse.Namespace) -> None:
    if args.tokens < 1:
        raise CommandError(f"--tokens {args.tokens}: use 1 or more", 2)
    if not math.isfinite(args.temperature):
        raise CommandError(f"--temperature {args.temperature}: use a finite number", 2)
    if not args.prompt:
        raise CommandError("--prompt is empty: give at least one character", 2)
    cli.check_text_flags(args)
    if args.cache_prompt == "":
        raise CommandError("--cache-prompt is empty: name a file", 2)
    if not args.cache:
        for name in ("cache_prompt", "prompt_cache_dir", "kv_preallocate"):
            if getattr(args, name):
                raise CommandError(f"--{name.replace('_', '-')} needs the cache: not --no-cache", 2)


def run(args: argparse.Namespace, given: KVCacheConfig | None, hints: list[str]) -> None:
    """Load, prefill, stream the text, report.

    Args:
        args: The flags of `setup_arg_parser`.
        given: The policy that flags ask for, if any do.
        hints: Those of the flags that came from the model file.
    """
    config = given or KVCacheConfig()
    if args.seed is not None:
        mx.random.seed(args.seed)
    model, tokenizer = loading.load(mlx_lm.load, args.model, args, flag="MODEL")
    if args.quantize:
        _quantize(model, int(args.quantize[3:]), args.quantize_group)
    ids = tokenizer.encode(args.prompt)
    try:
        caches = build(model, config) if args.cache else None
        end = learned_positions.tokens_to_come(model, caches, len(ids))
    except ValueError as error:
        raise CommandError(in_flags(str(error)), 2) from None
    if caches is not None and given is not None:
        if hints:
            _note(f"Defaults from the model file: {' '.join(hints)}")
        _note(report.describe(model, caches, len(ids)))
    if caches is not None and args.kv_preallocate:
        _preallocate(caches, learned_positions.table_size(model), len(ids) + args.tokens)

    start = time.perf_counter()
    if caches is not None:
        caches = _prefilled(args, config, model, caches, ids[:-1])
    count, cut = args.tokens, end is not None and end < args.tokens
    if cut:
        count = end
    print(args.prompt, end="", flush=True)
    detokenizer = tokenizer.detokenizer
    detokenizer.reset()
    made = 0
    try:
        for token in generated(model, caches, ids, args.temperature, count, end):
            if token in tokenizer.eos_token_ids:
                break
            made += 1
            detokenizer.add_token(token)
            print(detokenizer.last_segment, end="", flush=True)
    except KeyboardInterrupt:
        pass
    detokenizer.finalize()
    print(detokenizer.last_segment, end="\n\n")
    if cut and made == count:
        print(learned_positions.ended(model))
    seconds = time.perf_counter() - start
    how = "uncached" if caches is None else "KV-cached"
    print(f"({made} tokens in {seconds:.2f}s — {made / seconds:.0f} tok/s · {how})")
    if caches is not None:
        print(_cache_line(model, caches, len(ids) + made, config.window))


def generated(
    model: Any,
    caches: list[Any] | None,
    ids: list[int],
    temperature: float,
    count: int,
    end: int | None,
) -> Iterator[int]:
    """Tokens that follow a prompt.

    Args:
        caches: Hold all of ``ids`` but the last; None: each step goes over the whole text.
        ids: The prompt's.
        temperature: 0 or less takes the likeliest token.
        count: Tokens to make.
        end: Tokens that can follow at all, the last of them without a place: see
            `learned_positions.tokens_to_come`.
    """
    text = mx.array(ids[:-1], mx.int32)

    def feed(new: mx.array) -> mx.array:
        """Logits [1, V] after new tokens [n]."""
        nonlocal text
        if caches is not None:
            return model(new[None], cache=caches)[:, -1].astype(mx.float32)
        text = mx.concatenate([text, new.astype(mx.int32)])
        return model(text[None])[:, -1].astype(mx.float32)

    logits = feed(mx.array(ids[-1:], mx.int32))
    for n in range(1, count + 1):
        if temperature <= 0:
            token = mx.argmax(logits, axis=-1)  # [1]
        else:
            token = mx.random.categorical(logits * (1 / temperature))
        mx.async_eval(token)
        if n != end:
            logits = feed(token)
        yield int(token)


def _quantize(model: Any, bits: int, group: int) -> None:
    layers = {n: m for n, m in model.named_modules() if hasattr(m, "to_quantized")}
    if any(isinstance(m, nn.QuantizedLinear) for _, m in model.named_modules()) or not layers:
        raise CommandError("--quantize: the model's weights are quantised already", 2)
    for name, layer in layers.items():
        width = layer.weight.shape[-1]
        if width % group:
            mend = "32" if width % 32 == 0 else "no --quantize: no group divides them"
            raise CommandError(
                f"--quantize-group {group}: {name} has rows of {width} weights; use {mend}", 2
            )
    nn.quantize(model, group, bits)


def _preallocate(caches: list[Any], table: int | None, tokens: int) -> None:
    tokens = tokens if table is None else min(tokens, table)
    for cache in caches:
        if hasattr(cache, "step"):
            cache.step = -(-tokens // cache.step) * cache.step


def _prefilled(
    args: argparse.Namespace,
    config: KVCacheConfig,
    model: Any,
    caches: list[Any],
    ids: list[int],
) -> list[Any]:
    """Caches with the prompt but its last token in them: from a file, or fed and put in one."""
    path = _file(args, config, ids)
    metadata = {"mlx_kivi.sample": _digest(_identity(args), ids)}
    try:
        if path is not None and path.exists():
            loaded, found = load_prompt_cache(path, return_metadata=True)
            if found.get("mlx_kivi.sample") != metadata["mlx_kivi.sample"]:
                raise CommandError(
                    f"{path}: holds another prompt, or another model's: remove it, or name another"
                )
            check(loaded, caches)
            _note(f"Prompt cache: {len(ids)} tokens read from {path}")
            return loaded
        for start in range(0, len(ids), _PREFILL):
            model(mx.array([ids[start : start + _PREFILL]]), cache=caches)
            mx.eval([cache.state for cache in caches])
        if path is not None:
            save_prompt_cache(path, caches, metadata)
            _note(f"Prompt cache: {len(ids)} tokens written to {path}")
        return caches
    except PromptFileError as error:
        line = in_flags(str(error)).replace("--prompt-cache-file", str(path))
        raise CommandError(line) from None


def _file(args: argparse.Namespace, config: KVCacheConfig, ids: list[int]) -> Path | None:
    """The prompt's file: as named, else in the directory under a name that tells all apart."""
    if args.cache_prompt is not None:
        path = Path(args.cache_prompt)
        return path if path.suffix == ".safetensors" else path.with_name(path.name + ".safetensors")
    if args.prompt_cache_dir is None:
        return None
    directory = Path(args.prompt_cache_dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"--prompt-cache-dir {directory}: {error.strerror}") from None
    key = _digest(_identity(args), config.to_dict(), ids)
    return directory / f"{Path(args.model).stem}-{key[:12]}.safetensors"


def _identity(args: argparse.Namespace) -> list[Any]:
    """What the weights are: files with size and time, and what is done to them."""
    paths = [Path(args.model), *sorted(Path(args.model).glob("*.safetensors"))]
    if args.lora is not None:
        paths.append(Path(args.lora))
    stats = [(path.name, path.stat()) for path in paths if path.is_file()]
    files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    quantized = args.quantize and (args.quantize, args.quantize_group)
    return [files or args.model, args.lora_weight, quantized]


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _cache_line(model: Any, caches: list[Any], tokens: int, window: int | None) -> str:
    seen = max((c.seen for c in ours(caches)), default=tokens)
    line = f"KV cache:  {seen} tokens · {report.size(sum(c.nbytes for c in caches))}"
    if getattr(model.args, "useYOCO", False):
        line += f" · YOCO ({len(caches)}/{len(model.layers)} layers populated)"
    # A window that the model was trained with is no cap of ours.
    capped = (c for c in ours(caches) if c.config.window in (None, window))
    stored = max((c.size() for c in capped), default=seen)
    if window is not None and stored < seen:
        line += f" · stored {stored} (StreamingLLM cap)"
    return line


def _note(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    main()
