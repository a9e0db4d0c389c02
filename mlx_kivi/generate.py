"""`mlx_lm.generate` with packed and bounded KV caches: its own flags, and ours.

Parsing, loading, prompts and sampling are mlx_lm's ``main``; what is replaced for its duration
is the parser (ours added), the loader (.tinygpt files, errors of one line) and the call that
generates (the cache, said before and after).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from tqdm import tqdm

from . import hooks, report
from .commands import cli, flags, loading
from .commands.flags import in_flags
from .config import TRIM_MARGIN, KVCacheConfig, with_max_kv_size
from .models import learned_positions
from .models.architectures import own_caches
from .models.factory import build, ours
from .patch import patched
from .quantized_streaming_cache import QuantizedStreamingCache
from .upstream import prompt_file

PROG = "mlx_kivi.generate"
# The package binds a function of this name over the module.
mlx_generate = importlib.import_module("mlx_lm.generate")
_mlx_setup_arg_parser = mlx_generate.setup_arg_parser


def setup_arg_parser() -> argparse.ArgumentParser:
    """mlx_lm.generate's parser with the flags of the cache."""
    parser = _mlx_setup_arg_parser()
    cli.extend(parser, PROG)
    loading.add_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    argv = list(sys.argv[1:] if argv is None else argv)
    with cli.one_line_errors(PROG):
        args = setup_arg_parser().parse_args(argv)
        _check_flags(args)
        hints = loading.hinted_flags(args.model, args)
        args, config = cli.parse(setup_arg_parser, [*hints, *argv])
        run(argv, args, config, hints)


def _check_flags(args: argparse.Namespace) -> None:
    """Refuse values at which mlx_lm hangs, or fails without naming the flag."""
    cli.check_text_flags(args)
    for name, least in (("prefill_step_size", 1), ("num_draft_tokens", 0)):
        value = getattr(args, name, least)  # mlx-lm 0.31 has no --prefill-step-size
        if value < least:
            flag = "--" + name.replace("_", "-")
            raise cli.CommandError(f"{flag} {value}: use {least} or more", 2)
    if args.chat_template_config is not None:
        try:
            known = isinstance(json.loads(args.chat_template_config), dict)
        except ValueError:
            known = False
        if not known:
            raise cli.CommandError(
                f"--chat-template-config {args.chat_template_config}: use a JSON object, as "
                '{"enable_thinking": false}',
                2,
            )


def run(
    argv: list[str],
    args: argparse.Namespace,
    config: KVCacheConfig | None,
    hints: list[str],
) -> None:
    """mlx_lm's main with our parts in place."""
    mlx_load, mlx_call = mlx_generate.load, mlx_generate.generate
    mlx_stream, mlx_load_cache = mlx_generate.stream_generate, mlx_generate.load_prompt_cache

    def load(path: str, **kwargs: Any) -> Any:
        if not kwargs:  # as mlx_lm's main asks for the draft
            return loading.load(mlx_load, path, flag="--draft-model")
        return loading.load(mlx_load, path, args, **kwargs)

    def generate(model: Any, tokenizer: Any, prompt: Any, **kwargs: Any) -> Any:
        return _generate(mlx_call, args, config, hints, model, tokenizer, prompt, **kwargs)

    def load_prompt_cache(path: str, **kwargs: Any) -> Any:
        caches, metadata = mlx_load_cache(path, **kwargs)
        _check_metadata(path, metadata)
        return caches, metadata

    replacements = {
        "setup_arg_parser": setup_arg_parser,
        "load": load,
        "load_prompt_cache": load_prompt_cache,
        "generate": generate,
        "stream_generate": lambda *a, **k: _until_interrupted(mlx_stream(*a, **k)),
    }
    with contextlib.ExitStack() as stack:
        # Files may hold our caches whatever the flags say.
        holder = object()
        hooks.attention.hold(holder)
        stack.callback(hooks.attention.release, holder)
        if config is not None:
            stack.enter_context(patched(config))
        stack.enter_context(cli.replaced(mlx_generate, **replacements))
        stack.enter_context(cli.replaced(sys, argv=[PROG, *argv]))
        mlx_generate.main()


def _generate(
    mlx_call: Callable[..., Any],
    args: argparse.Namespace,
    config: KVCacheConfig | None,
    hints: list[str],
    model: Any,
    tokenizer: Any,
    prompt: Any,
    **kwargs: Any,
) -> Any:
    """mlx_lm's ``generate``, told before and after what the cache is."""
    if not len(prompt):
        raise cli.CommandError("--prompt is empty: give at least one character", 2)
    verbose = kwargs.get("verbose", False)
    draft = kwargs.get("draft_model")
    caches = _caches(args, config, model, draft, kwargs.get("prompt_cache"))
    kwargs["prompt_cache"] = caches
    packed = caches is not None and any(ours(caches))
    if packed and draft is not None and args.num_draft_tokens >= TRIM_MARGIN:
        raise cli.CommandError(
            f"--num-draft-tokens {args.num_draft_tokens}: use {TRIM_MARGIN - 1} or fewer, which a "
            "packed or bounded cache can take back",
            2,
        )
    main_caches = None if caches is None else caches[: len(caches) - _draft_count(draft)]
    if main_caches is not None and verbose and (packed or config is not None):
        if hints:
            print(f"Defaults from the model file: {' '.join(hints)}")
        print(report.describe(model, main_caches, len(prompt) + report.seen(main_caches)))
        if line := learned_positions.describe(model, main_caches):
            print(line)
        if packed and draft is None and len(prompt) > 2 * kwargs.get("prefill_step_size", 2048):
            kwargs["prompt_progress_callback"] = _progress_bar(len(prompt))
    end = _end_of_table(model, main_caches, draft, len(prompt))
    cut = end is not None and not 0 <= kwargs["max_tokens"] <= end
    if cut:
        kwargs["max_tokens"] = end
    interruptible = _interruptible() if packed else contextlib.nullcontext()
    with interruptible, learned_positions.look_ahead() as ahead:
        text = mlx_call(model, tokenizer, prompt, **kwargs)
    if cut and (ahead.used or draft is not None):
        print(learned_positions.ended(model), file=sys.stdout if verbose else sys.stderr)
    if main_caches is not None and verbose and packed:
        print(report.summary(model, main_caches))
    return text


def _caches(
    args: argparse.Namespace,
    config: KVCacheConfig | None,
    model: Any,
    draft: Any,
    caches: list[Any] | None,
) -> list[Any] | None:
    """The caches to generate with: those of a file, which the flags must fit, or the policy's."""
    if caches is None:
        return None if config is None else _built(args, config, model, draft)
    if config is None and not any(ours(caches)):
        return caches
    count = len(own_caches(model)) + _draft_count(draft)
    if len(caches) != count:
        wrong, mend = f"{len(caches)} caches, the model {count}", "use the model it was made with"
        if draft is not None:
            wrong, mend = "no caches for the draft model", "leave --draft-model out"
        raise cli.CommandError(f"--prompt-cache-file has {wrong}: {mend}", 2)
    if config is None or not flags.asked(args):
        _check_file(args, model, draft, caches)
        return caches
    try:
        prompt_file.check(caches, _built(args, config, model, draft, balanced=False))
    except ValueError as error:
        raise cli.CommandError(in_flags(str(error)), 2) from None
    return caches


def _built(
    args: argparse.Namespace, config: KVCacheConfig, model: Any, draft: Any, balanced: bool = True
) -> list[Any]:
    """The policy's caches for the model, and those for its draft after them.

    ``balanced`` is that of `build`: off for caches that are only compared with.
    """
    caches = []
    for each in [model] if draft is None else [model, draft]:
        table, size = learned_positions.table_size(each), args.max_kv_size
        if table is not None and size is not None and size > table:
            raise cli.CommandError(
                f"--max-kv-size {size} is more than the model's learned position table "
                f"(ctx = {table}): use --max-kv-size {table} or less",
                2,
            )
        try:
            caches += build(each, config, balanced=balanced)
        except ValueError as error:
            raise cli.CommandError(in_flags(str(error)), 2) from None
    return caches


def _check_file(args: argparse.Namespace, model: Any, draft: Any, caches: list[Any]) -> None:
    """Refuse flags of mlx_lm's that caches from a file contradict, or can't serve.

    Each is compared with what it would give this model, cache by cache: a window that the model
    was trained with stays, whatever the flag.
    """
    held, group, size = list(ours(caches)), args.given_group_size, args.max_kv_size
    if args.kv_bits is not None and held:
        raise _contradicts("--kv-bits", args.kv_bits, held[0])
    for cache in held:
        if group is not None and cache.config.quantized and cache.config.group_size != group:
            raise _contradicts("--kv-group-size", group, cache)
    if size is None:
        return
    expected = _built(args, with_max_kv_size(KVCacheConfig(), size), model, draft)
    for pair in zip(caches, expected, strict=True):
        for cache, wanted in zip(*(getattr(c, "caches", [c]) for c in pair), strict=True):
            if isinstance(wanted, QuantizedStreamingCache) and _bound(cache) != _bound(wanted):
                raise _contradicts("--max-kv-size", size, cache)


def _check_metadata(path: str, metadata: dict[str, str]) -> None:
    """Refuse a prompt file that does not say what mlx_lm's main asks of it."""
    try:
        known = isinstance(json.loads(metadata["tokenizer_config"]), dict) and "model" in metadata
    except (KeyError, ValueError):
        known = False
    if not known:
        raise cli.CommandError(
            f"--prompt-cache-file {path}: its metadata does not name the model and the "
            "tokenizer_config (JSON): save it with both, as mlx_lm.cache_prompt does"
        )


def _bound(cache: Any) -> tuple[int, int] | None:
    """Sinks and window of a cache, ours or mlx_lm's; None if it keeps every token."""
    if isinstance(cache, QuantizedStreamingCache):
        return None if cache.config.window is None else (cache.config.sink, cache.config.window)
    size = getattr(cache, "max_size", None)
    return None if size is None else (cache.keep, size - cache.keep)


def _contradicts(flag: str, value: int, cache: Any) -> cli.CommandError:
    if isinstance(cache, QuantizedStreamingCache):
        policy = cache.config.describe()
    else:
        bound = _bound(cache)
        policy = f"{type(cache).__name__}, " + (
            "no window" if bound is None else f"sinks {bound[0]}, window {bound[1]}"
        )
    return cli.CommandError(
        f"{flag} {value} contradicts --prompt-cache-file ({policy}): leave it out, or make the "
        "file again",
        2,
    )


def _end_of_table(model: Any, caches: list[Any] | None, draft: Any, prompt: int) -> int | None:
    """Tokens that can be generated before a table of learned positions ends, None if none does."""
    try:
        end = learned_positions.tokens_to_come(model, caches, prompt)
    except learned_positions.PositionTableFull as error:
        raise cli.CommandError(str(error), 2) from None
    if draft is None or end is None:
        return end
    return max(1, end - 1)  # what is drafted is checked at once, so each token needs its place


def _draft_count(draft: Any) -> int:
    return 0 if draft is None else len(own_caches(draft))


def _progress_bar(total: int) -> Callable[[int, int], None]:
    bar = tqdm(total=total, unit=" tokens", desc="Prompt", leave=False, file=sys.stderr)

    def update(done: int, _: int) -> None:
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return update


_interrupted = False


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """The first ctrl-C ends the text, the second the program."""
    global _interrupted
    _interrupted = False

    def handle(*_: Any) -> None:
        global _interrupted
        if _interrupted:
            raise KeyboardInterrupt
        _interrupted = True

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _until_interrupted(responses: Iterator[Any]) -> Iterator[Any]:
    for response in responses:
        yield response
        if _interrupted:
            mx.synchronize()
            return


if __name__ == "__main__":
    main()
