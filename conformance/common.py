"""What `conformance` and `tests` share: a tiny model, the rule, and the arrays of an object."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.llama import Model, ModelArgs


def tiny_llama(seed: int = 0, peak: float = 1.0, **changes: Any) -> Model:
    """A random llama: 2 layers, 4 heads of 32 on 2 KV heads, vocabulary of 97.

    The heads are wider than hidden / heads = 16, because the smallest quantisation group is 32.

    Args:
        seed: Of the weights.
        peak: Factor of what makes queries and keys: attention that is not flat, so that
            positions matter.
        changes: Other settings, by their names in `ModelArgs`.
    """
    mx.random.seed(seed)
    settings = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "vocab_size": 97,
        "tie_word_embeddings": False,
    }
    model = Model(ModelArgs.from_dict({**settings, **changes}))
    for layer in model.layers:
        for part in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            part.weight = part.weight * peak
    mx.eval(model.parameters())
    return model


def allowed(queries: np.ndarray, keys: np.ndarray, sink: int, window: int | None) -> np.ndarray:
    """The rule, over positions: the sinks and (query - window, query]. [queries, keys]"""
    q, k = queries[:, None], keys[None]
    rule = k <= q
    if window is not None:
        rule &= (k > q - window) | (k < sink)
    return rule


def shown(first: int, count: int, sink: int, window: int | None) -> np.ndarray:
    """Positions that at least one of ``count`` queries from ``first`` on sees, in order."""
    queries, keys = np.arange(first, first + count), np.arange(first + count)
    return keys[allowed(queries, keys, sink, window).any(axis=0)]


def arrays_in(thing: Any) -> list[mx.array]:
    """Every `mx.array` that an object reaches through attributes and containers, once each."""
    found, seen, todo = [], set(), [thing]
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, mx.array):
            found.append(one)
        elif isinstance(one, dict):
            todo += one.values()
        elif isinstance(one, list | tuple | set):
            todo += one
        elif hasattr(one, "__dict__"):
            todo += vars(one).values()
    return found
