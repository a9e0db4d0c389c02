"""Whether a request's numbers can be sampled with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm import server as mlx_server


def rehearse(
    args: Any, prompt: list[int], logits: mx.array, sampler: Callable[[mx.array], mx.array]
) -> None:
    """Do what a step will, before the request meets others, whose steps it would end.

    Args:
        args: mlx_lm's, of the request.
        prompt: Its tokens.
        logits: Of a row of the model, for their shape and type.
        sampler: The request's.

    Raises:
        Exception: what is wrong with the request.
    """
    known = logits.shape[-1]
    for token in args.logits.logit_bias or ():
        if not 0 <= token < known:  # mlx would write beyond the logits
            raise ValueError(f"logit_bias: use tokens from 0 to {known - 1}, not {token}")
    if args.seed is not None and not 0 <= args.seed < 1 << 64:
        raise ValueError(f"seed {args.seed}: use a number from 0 to 2^64 - 1")
    for processor in mlx_server._make_logits_processors(args):
        logits = processor(mx.array(prompt), logits)
    sampler(logits)
