"""Prompt files that version 0.1.0 saved, and what it went on to say: how they were made.

In the root of this repository, with a checkout of version 0.1.0 (commit cfdfe48) and mlx-lm 0.32.2:

    PYTHONPATH=CHECKOUT python tests/upstream/old_files.py

writes tests/upstream/files_0_1_0/: a file for each of `CASES`, and logits.safetensors, the logits
that followed (see `follow`). Heads are narrow: no file takes more than 40 kB.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models import baichuan_m1, gpt2, llama
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache, trim_prompt_cache

FOLDER = Path(__file__).with_name("files_0_1_0")
VOCABULARY = 32
REBASE_AT = 2**17 + 64


class Case(NamedTuple):
    """A model, a policy, and the calls that come before the file: tokens, or minus those trimmed.

    rebase_at: where positions are counted anew, if not where the factory says.
    """

    model: str
    policy: dict[str, Any]
    calls: tuple[int, ...]
    rebase_at: int | None = None


WINDOW = {"window": 40}
INT4 = {"k_bits": 4, "v_bits": 4, "group_size": 32, "residual_length": 16}

CASES = {
    "nothing": Case("llama", WINDOW, ()),
    "full precision": Case("llama", {}, (50, 1, 1)),
    "window, not full": Case("llama", WINDOW, (20, 1, 1)),
    "window, just full": Case("llama", WINDOW, (43, 1)),
    "window, ring not wrapped": Case("llama", WINDOW, (50, 3, 1, 1)),
    "window, ring full": Case("llama", WINDOW, (70, *[1] * 6)),
    "window, wrapped": Case("llama", WINDOW, (200, 7, *[1] * 93)),
    "window, a long call": Case("llama", WINDOW, (1, 333)),
    "window, trimmed": Case("llama", WINDOW, (300, *[1] * 40, -20)),
    "window, trimmed before it wrapped": Case("llama", WINDOW, (50, *[1] * 10, -15)),
    "window, trimmed below it": Case("llama", WINDOW, (43, 1, -30)),
    "window of one": Case("llama", {"window": 1, "sink": 0}, (60, 1, 1)),
    "window, float16": Case("llama", {**WINDOW, "dtype": "float16"}, (150, *[1] * 7)),
    "re-positioned": Case("llama", {**WINDOW, "reposition": True}, (60, *[1] * 60)),
    "re-based": Case("llama", WINDOW, (*[2**13] * 16, *[1] * 80), REBASE_AT),
    "packed": Case("llama", INT4, (100, 1, 1)),
    "packed, window": Case("llama", {**INT4, "window": 90}, (250, *[1] * 9)),
    "packed, window, trimmed": Case("llama", {**INT4, "window": 90}, (250, *[1] * 30, -28)),
    "packed keys alone": Case("llama", {**INT4, "v_bits": None, "window": 70}, (150, 1)),
    # Version 0.1.0 packed each window beyond residual and group, whatever that took.
    "packed, small window": Case("llama", {**INT4, "window": 60}, (200, *[1] * 9)),
    "packed, small window, not full": Case("llama", {**INT4, "window": 60}, (40, *[1] * 2)),
    "packed, too small a window": Case("llama", {**INT4, "window": 40}, (200, *[1] * 9)),
    "packed, re-based": Case(
        "llama", {**INT4, "window": 60}, (*[2**13] * 16, *[1] * 80), REBASE_AT
    ),
    "learned positions": Case("gpt2", {"window": 30}, (50, *[1] * 40)),
    "caches in lists": Case("baichuan_m1", {**WINDOW, "sink": 2}, (90, 1, 1)),
}

# Tokens of the calls that follow; logits of the last of each are compared.
CALLS = (1, 1, 5, 1, 40, 1, 1)
AFTER = (1, 3, 1, 90, 1, 1)
BACK = 25  # tokens


LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
}


def model(kind: str) -> nn.Module:
    """A tiny model with weights from numpy's frozen generator, the same on each machine."""
    if kind == "llama":
        args = {"model_type": kind, "tie_word_embeddings": False, "head_dim": 16, **LLAMA}
        made = llama.Model(llama.ModelArgs(**args))
    elif kind == "gpt2":
        sizes = {"n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 64, "n_ctx": 64}
        rest = {"vocab_size": VOCABULARY, "layer_norm_epsilon": 1e-5, "num_key_value_heads": 2}
        made = gpt2.Model(gpt2.ModelArgs(model_type=kind, **sizes, **rest))
    else:
        args = {"model_type": kind, "tie_word_embeddings": False, "rope_theta": 1000.0, **LLAMA}
        args |= {"sliding_window": 68, "sliding_window_layers": [0], "conv_window": 2}
        made = baichuan_m1.Model(baichuan_m1.ModelArgs(**args))
    random = np.random.RandomState(0)

    def weight(x: mx.array) -> mx.array:
        if x.ndim == 1:
            return mx.ones(x.shape)
        # Wide enough that attention is not flat.
        return mx.array((random.randn(*x.shape) * 2 * x.shape[-1] ** -0.5).astype(np.float32))

    made.update(tree_map(weight, made.parameters()))
    return made


def tokens(start: int, count: int) -> mx.array:
    """Tokens [1, count] of one endless text from its token ``start`` on."""
    place = np.arange(start, start + count)
    return mx.array((place * place // 7 + 3 * place) % VOCABULARY)[None]


def feed(made: nn.Module, caches: list[Any], calls: tuple[int, ...], start: int = 0) -> mx.array:
    """Logits [calls, vocabulary] of the last token of each call; a call below 0 is a trim."""
    rows = []
    for count in calls:
        if count < 0:
            assert trim_prompt_cache(caches, -count) == -count
            continue
        rows.append(made(tokens(start, count), cache=caches)[0, -1])
        start += count
        mx.eval(rows[-1])
    return mx.stack(rows) if rows else mx.zeros((0, VOCABULARY))


def follow(
    made: nn.Module, load: Callable[[], list[Any]], again: str
) -> tuple[mx.array, list[int]]:
    """What comes of a file: calls, then a trim and calls, saved as ``again`` and loaded midway.

    Returns:
        Logits [·, vocabulary], and the tokens that the trim took back.
    """
    caches = load()
    rows = [feed(made, caches, CALLS)]
    back = [trim_prompt_cache(caches, BACK)]
    rows.append(feed(made, caches, AFTER[:3], start=500))
    save_prompt_cache(again, caches, {})
    caches = load_prompt_cache(again)
    rows.append(feed(made, caches, AFTER[3:], start=600))
    # The file's own margin: a trim is the first that happens.
    caches = load()
    back.append(trim_prompt_cache(caches, BACK))
    rows.append(feed(made, caches, AFTER, start=700))
    return mx.concatenate(rows), back


def path_of(name: str) -> str:
    return str(FOLDER / f"{name.replace(',', '').replace(' ', '_')}.safetensors")


def main() -> None:
    import mlx_kivi

    assert find_spec("mlx_kivi.buffers"), "made by version 0.1.0 alone, whose package was flat"
    FOLDER.mkdir(exist_ok=True)
    out: dict[str, mx.array] = {}
    for name, case in CASES.items():
        made = model(case.model)
        with mlx_kivi.patched(**case.policy), TemporaryDirectory() as folder:
            caches = mlx_kivi.make_prompt_cache(made, mlx_kivi.KVCacheConfig(**case.policy))
            for cache in caches if case.rebase_at else []:
                cache.rebase_at = case.rebase_at
            feed(made, caches, case.calls)
            save_prompt_cache(path_of(name), caches, {"note": name})
            load = lambda: load_prompt_cache(path_of(name))  # noqa: B023, E731
            logits, back = follow(made, load, f"{folder}/again.safetensors")
        out[name], out[f"{name}: back"] = logits, mx.array(back)
        print(name, Path(path_of(name)).stat().st_size, back, file=sys.stderr)
    mx.save_safetensors(path_of("logits"), out)


if __name__ == "__main__":
    main()
