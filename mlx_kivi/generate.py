"""`mlx_lm.generate` with packed and bounded KV caches: its own flags, and ours.

Parsing, loading, prompts and sampling are mlx_lm's ``main``; what is replaced for its duration
is the parser (ours added), the loader (.tinygpt files, errors of one line) and the call that
generates (the cache, said before and after).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from tqdm import tqdm

from . import hooks, report
from .commands import cli, loading
from .commands.flags import in_flags
from .config import TRIM_MARGIN, KVCacheConfig
from .models import learned_positions
from .models.architectures import own_caches
from .models.factory import build, ours
from .patch import patched
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
        hints = loading.hinted_flags(args.model, args)
        args, config = cli.parse(setup_arg_parser, [*hints, *argv])
        run(argv, args, config, hints)


def run(
    argv: list[str],
    args: argparse.Namespace,
    config: KVCacheConfig | None,
    hints: list[str],
) -> None:
    """mlx_lm's main with our parts in place."""
    mlx_load, mlx_call = mlx_generate.load, mlx_generate.generate
    mlx_stream = mlx_generate.stream_generate

    def load(path: str, **kwargs: Any) -> Any:
        if not kwargs:  # as mlx_lm's main asks for the draft
            return loading.load(mlx_load, path, flag="--draft-model")
        return loading.load(mlx_load, path, args, **kwargs)

    def generate(model: Any, tokenizer: Any, prompt: Any, **kwargs: Any) -> Any:
        return _generate(mlx_call, args, config, hints, model, tokenizer, prompt, **kwargs)

    replacements = {
        "setup_arg_parser": setup_arg_parser,
        "load": load,
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
    verbose = kwargs.get("verbose", False)
    draft = kwargs.get("draft_model")
    caches = kwargs.get("prompt_cache")
    if caches is not None and any(ours(caches)):
        _check_file(args, model, draft, caches)
    if config is not None:
        try:
            built = build(model, config)
            if caches is not None:
                prompt_file.check(caches, built)
            else:
                caches = built + ([] if draft is None else build(draft, config))
        except ValueError as error:
            raise cli.CommandError(in_flags(str(error)), 2) from None
        kwargs["prompt_cache"] = caches
    packed = caches is not None and any(ours(caches))
    told = verbose and packed
    if packed and draft is not None and args.num_draft_tokens >= TRIM_MARGIN:
        raise cli.CommandError(
            f"--num-draft-tokens {args.num_draft_tokens}: use {TRIM_MARGIN - 1} or fewer, which a "
            "packed or bounded cache can take back",
            2,
        )
    main_caches = None if caches is None else caches[: len(caches) - _draft_count(draft)]
    if told:
        if hints:
            print(f"Defaults from the model file: {' '.join(hints)}")
        print(report.describe(model, main_caches, len(prompt) + report.seen(main_caches)))
        if line := learned_positions.describe(model, main_caches):
            print(line)
    if told and draft is None and len(prompt) > 2 * kwargs.get("prefill_step_size", 2048):
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
    if told:
        print(report.summary(model, main_caches))
    return text


def _check_file(args: argparse.Namespace, model: Any, draft: Any, caches: list[Any]) -> None:
    """Refuse flags of mlx_lm's that caches of ours from a file contradict, or can't serve."""
    if len(caches) != len(own_caches(model)) + _draft_count(draft) and draft is not None:
        raise cli.CommandError(
            "--prompt-cache-file has no caches for the draft model: leave --draft-model out", 2
        )
    policy = next(ours(caches)).config
    held = None if policy.window is None else policy.sink + policy.window
    for flag, value, fits in (
        ("--kv-bits", args.kv_bits, False),
        ("--max-kv-size", args.max_kv_size, args.max_kv_size == held),
        ("--kv-group-size", args.given_group_size, args.given_group_size == policy.group_size),
    ):
        if value is not None and not fits:
            raise cli.CommandError(
                f"{flag} {value} contradicts --prompt-cache-file ({policy.describe()}): leave it "
                "out, or make the file again",
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
