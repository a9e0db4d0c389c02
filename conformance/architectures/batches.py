"""Rows of a batch beside the same rows alone, fed as by mlx_lm's `PromptProcessingBatch`."""

from __future__ import annotations

import math
import re
from typing import Any

import mlx.core as mx
from mlx_lm.generate import _merge_caches
from mlx_lm.models.cache import KVCache

import mlx_kivi
from mlx_kivi.models.architectures import READ_STATE, own_caches

from . import matrix, models

# Tokens of each row in one prompt and in another that follows; then single steps. Groups are
# packed once 52, 84, 116 and 148 tokens are in (four fewer without sinks): in prompts and in steps.
PROMPTS = ((9, 78, 80), (5, 4, 66))
STEPS = 4
ROWS = len(PROMPTS[0])
CALL = 64  # tokens of a prompt in one call
# A difference of rounding tips a code of the quantiser, or the choice of an expert, by chance and
# not with other tokens. A fault does not go by tokens.
TRIES = 3
TOLERANCE = matrix.TOLERANCE_PACKED

# Where ours and mlx_lm's deviate alike, and what in the model does it. The longest row, which has
# no padding, is as alone.
_LAST = "it keeps the state after the last column, which may be padding"
DEVIATES = {
    "baichuan_m1": "its convolution keeps the last column, which may be padding",
    "bailing_moe_linear": _LAST,
    "jamba": _LAST,
    "longcat_flash_ngram": "its n-grams keep the last columns, which may be padding",
    "mamba": _LAST,
    "minimax_m3_vl": "its indexer places the queries of all rows by the longest",
    "nemotron_h": "it keeps no state of a row that padding follows",
    "olmo_hybrid": "its convolution keeps the last columns, which may be padding",
    "recurrent_gemma": _LAST,
    "rwkv7": _LAST,
}
NONE = {
    "deepseek_v41": "mlx-lm has no batch of its `LayerCache`",
    "llama4": "mlx-lm has no batch of its `ChunkedKVCache`",
    "phi3small": "its block-sparse layers take no mask of a batch",
}
# mlx_lm's state-space layers look for a row's last token in calls that end before it, if these
# are of fewer than 256 tokens (`pos` in `ssm_attn`): they read what is no part of the array.
WHOLE_CALL = {"falcon_h1", "granitemoehybrid", "mamba2", "plamo2"}
LEARNED = {"gpt2", "gpt_bigcode"}
# Where only mlx_lm's deviates, or fails.
STOCK_DEVIATES = {
    "afm7": "rotates the queries of all rows by the length of the longest",
    "gpt_bigcode": "fails: it counts positions from one row's offset",
    "phi3small": "fails: its block-sparse layers take no mask of a batch",
}
# Up to mlx-lm 0.31 these mask without asking their caches, which ours do not need.
MASKED_BLINDLY = {"minicpm3", "phixtral"}
# Up to mlx-lm 0.31, with its own caches too: their linear attention keeps what padding adds, or
# they take one position for all rows and fail.
PADDED_STATES = {"kimi_linear", "qwen3_5", "qwen3_5_moe", "qwen3_next"}
ONE_POSITION = {"internlm2", "internlm3"}


def cell(name: str) -> str:
    """What the page says of a module in a batch."""
    if name in NONE:
        return f"no: {NONE[name]}"
    if name in DEVIATES:
        return f"as mlx-lm's: {DEVIATES[name]}"
    if name in WHOLE_CALL:
        return "as alone, prompts in calls of 256 tokens or a multiple"
    return "as alone" + ("; with a window no: positions are learned" if name in LEARNED else "")


def call(name: str) -> int:
    """Tokens of a module's prompts in one call."""
    return 256 if name in WHOLE_CALL else CALL


def check(name: str, policy: str | None) -> None:
    """See that a module's batch is what `cell` says, under a policy of the matrix; None: stock.

    Raises:
        RuntimeError: if it is not.
    """
    none, wrong = set(NONE), set(DEVIATES)
    refused = "does not yet support batching"
    if policy is None:
        none |= {"gpt_bigcode"}
        wrong |= {"afm7"}
        refused += "|broadcast|length-1"
    elif matrix.POLICIES[policy].window is not None:
        none |= LEARNED
    if not hasattr(KVCache, "keys_and_values"):  # mlx-lm 0.31
        none |= READ_STATE | ONE_POSITION
        wrong |= WHOLE_CALL | PADDED_STATES | (MASKED_BLINDLY if policy is None else set())
        refused += "|too many values|length-1"
    where = f"{name}, {policy or 'caches of mlx-lm'}"
    try:
        off = deviation(name, policy, 1 if name in wrong else TRIES)
    except ValueError as error:
        if name in none and re.search(refused, str(error)):
            return
        raise RuntimeError(f"{where}: {error}") from error
    if name in none:
        raise RuntimeError(f"{where}: there is a batch of it")
    rows = " ".join(f"{x:.0e}" for x in off)
    if off[-1] > TOLERANCE or (name not in wrong and max(off) > TOLERANCE):
        raise RuntimeError(f"{where}: rows in a batch are {rows} off")
    if name in wrong and min(off[:-1]) < 10 * TOLERANCE:
        raise RuntimeError(f"{where}: rows in a batch are as alone, {rows} off")


def deviation(name: str, policy: str | None, tries: int = TRIES) -> list[float]:
    """How far each row's logits in a batch are from those alone, relative to the largest.

    Args:
        name: The module.
        policy: Of the matrix; None for mlx_lm's own caches.
        tries: Up to so many times, with other tokens, for the least of a row.

    Raises:
        ValueError: of mlx_lm, if there is no batch of these caches.
    """
    model, step = models.build(name), 256 if name in WHOLE_CALL else CALL

    def make() -> list[Any]:
        if policy is None:
            return own_caches(model)
        return mlx_kivi.make_prompt_cache(model, matrix.POLICIES[policy])

    least = [math.inf] * ROWS
    for seed in range(tries):
        parts = tokens(seed)
        batch = in_a_batch(model, [make() for _ in range(ROWS)], parts, step)
        for i, mine in enumerate(batch):
            other = alone(model, make(), [part[i] for part in parts], step)
            off = (mx.abs(mine - other).max() / mx.abs(other).max()).item()
            least[i] = min(least[i], math.inf if math.isnan(off) else off)
        if max(least) < TOLERANCE:
            break
    return least


def tokens(seed: int) -> list[list[list[int]]]:
    """Of each row, for each prompt and for the steps."""
    lengths = [*PROMPTS, (STEPS,) * ROWS]
    keys = mx.random.split(mx.random.key(seed), len(lengths) * ROWS)
    ids = [
        mx.random.randint(0, matrix.VOCABULARY, (n,), key=key).tolist()
        for n, key in zip((n for part in lengths for n in part), keys, strict=True)
    ]
    return [ids[i : i + ROWS] for i in range(0, len(ids), ROWS)]


def alone(model: Any, caches: list[Any], parts: list[list[int]], step: int) -> mx.array:
    """Logits [n, VOCABULARY] of one row's tokens."""
    *prompts, steps = parts
    calls = [part[i : i + step] for part in prompts for i in range(0, len(part), step)]
    calls += [[token] for token in steps]
    return mx.concatenate([matrix.logits(model, mx.array([x]), caches)[0] for x in calls], axis=0)


def in_a_batch(
    model: Any, rows: list[list[Any]], parts: list[list[list[int]]], step: int
) -> list[mx.array]:
    """Logits [n, VOCABULARY] of each row's tokens."""
    caches = _merge_caches(rows)
    *prompts, steps = parts
    found: list[list[mx.array]] = [[] for _ in range(ROWS)]
    for prompt in prompts:
        lengths = [len(row) for row in prompt]
        longest = max(lengths)
        for cache in caches:
            cache.prepare(lengths=lengths, right_padding=[longest - n for n in lengths])
        padded = mx.array([row + [0] * (longest - len(row)) for row in prompt])
        seen = [
            matrix.logits(model, padded[:, start : start + step], caches)
            for start in range(0, longest, step)
        ]
        for cache in caches:
            cache.finalize()
        mx.eval(seen, [cache.state for cache in caches])
        for i, row in enumerate(mx.concatenate(seen, axis=1)):
            found[i].append(row[: lengths[i]])
    for column in zip(*steps, strict=True):
        step_logits = matrix.logits(model, mx.array(column)[:, None], caches)
        mx.eval(step_logits)
        for i, row in enumerate(step_logits):
            found[i].append(row)
    return [mx.concatenate(rows, axis=0) for rows in found]
