"""A model whose keys have biases of several hundred, as Qwen2 has, and what caches do to it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

CHUNK = 32


def bias_keys(model: nn.Module, tokens: mx.array, pairs: int = 2, damped: float = 1e-3) -> None:
    """Give each KV head of a llama a bias of 100 to 600 in ``pairs`` pairs that RoPE turns.

    They are those that its queries use least for these tokens [T], and these queries become
    ``damped`` times as large: the model would see hardly anything else otherwise.
    """
    rng = np.random.default_rng(0)
    x = model.model.embed_tokens(tokens[None])
    for layer in model.layers:
        attention = layer.self_attn
        heads, repeats = attention.n_kv_heads, attention.n_heads // attention.n_kv_heads
        weight = attention.q_proj.weight
        half = weight.shape[0] // attention.n_heads // 2
        queries = attention.q_proj(layer.input_layernorm(x)).astype(mx.float32)
        sizes = queries.square().sum(axis=(0, 1))
        use = np.array(sizes.reshape(heads, repeats, 2, half).sum(axis=(1, 2)))
        x = layer(x, "causal")
        bias = np.zeros((heads, 2, half))
        factor = np.ones((heads, repeats, 2, half))
        for head, least in enumerate(np.argsort(use, axis=1)[:, :pairs]):
            angle, size = rng.uniform(0, 2 * np.pi, pairs), rng.uniform(100, 600, pairs)
            bias[head][:, least] = size * np.cos(angle), size * np.sin(angle)
            factor[head][..., least] = damped
        attention.k_proj.bias = mx.array(bias.reshape(-1)).astype(weight.dtype)
        attention.q_proj.weight = weight * mx.array(factor.reshape(-1, 1)).astype(weight.dtype)
    mx.eval(model.parameters())


def log_probs(model: nn.Module, cache: list[Any], tokens: mx.array, alone: int) -> mx.array:
    """Log-probabilities after each token [T, vocabulary], the last ``alone`` fed one by one."""
    rows, start = [], 0
    while start < tokens.size:
        end = start + 1 if start >= tokens.size - alone else start + CHUNK
        logits = model(tokens[None, start:end], cache=cache)[0].astype(mx.float32)
        rows.append(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        mx.eval(rows[-1], [c.state for c in cache])
        start = end
    return mx.concatenate(rows)


def divergence(full: mx.array, other: mx.array) -> np.ndarray:
    """KL divergence in nats of each token's prediction: [T]."""
    return np.array(mx.sum(mx.exp(full) * (full - other), axis=-1))
