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

from . import cli, hooks, loading, report
from .config import KVCacheConfig
from .factory import build
from .patch import patched

PROG = "mlx_kivi.generate"
# The package binds a function of this name over the module.
mlx_generate = importlib.import_module("mlx_lm.generate")
_mlx_setup_arg_parser = mlx_generate.setup_arg_parser


def setup_arg_parser() -> argparse.ArgumentParser:
    """mlx_lm.generate's parser with the flags of the cache."""
    parser = _mlx_setup_arg_parser()
    cli.extend(parser, PROG)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    argv = list(sys.argv[1:] if argv is None else argv)
    with cli.one_line_errors(PROG):
        args, config = cli.parse(setup_arg_parser, argv)
        run(argv, args, config)


def run(argv: list[str], args: argparse.Namespace, config: KVCacheConfig | None) -> None:
    """mlx_lm's main with our parts in place."""
    mlx_load, mlx_call = mlx_generate.load, mlx_generate.generate
    mlx_stream = mlx_generate.stream_generate

    def load(path: str, *rest: Any, **kwargs: Any) -> Any:
        return loading.load(mlx_load, path, *rest, **kwargs)

    def generate(model: Any, tokenizer: Any, prompt: Any, **kwargs: Any) -> Any:
        return _generate(mlx_call, config, model, tokenizer, prompt, **kwargs)

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
    config: KVCacheConfig | None,
    model: Any,
    tokenizer: Any,
    prompt: Any,
    **kwargs: Any,
) -> Any:
    """mlx_lm's ``generate``, told before and after what the cache is."""
    verbose = kwargs.get("verbose", False)
    draft = kwargs.get("draft_model")
    caches = kwargs.get("prompt_cache")
    if caches is None and config is not None:
        caches = build(model, config, kwargs.get("max_kv_size") if config.window is None else None)
        if draft is not None:
            caches = caches + build(draft, config)
        kwargs["prompt_cache"] = caches
    told = verbose and caches is not None and any(_ours(caches))
    main_caches = None if caches is None else caches[: len(caches) - _draft_count(draft)]
    if told:
        print(report.describe(model, main_caches, len(prompt)))
    if verbose and draft is None and len(prompt) > 2 * kwargs.get("prefill_step_size", 2048):
        kwargs["prompt_progress_callback"] = _progress_bar(len(prompt))
    with _interruptible():
        text = mlx_call(model, tokenizer, prompt, **kwargs)
    if told:
        print(report.summary(model, main_caches))
    return text


def _ours(caches: list[Any]) -> Iterator[bool]:
    for cache in caches:
        members = getattr(cache, "caches", [cache])
        yield any(isinstance(m, report.QuantizedStreamingCache) for m in members)


def _draft_count(draft: Any) -> int:
    return 0 if draft is None else len(report.own_caches(draft))


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
