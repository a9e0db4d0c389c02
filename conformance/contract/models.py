"""Tiny random models for the contract, and the calls that run them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from ..common import tiny_llama

VOCABULARY = 256


def llama(seed: int = 3, vocabulary: int = VOCABULARY) -> nn.Module:
    """A tiny one whose weights are large, so that logits lie far apart."""
    model = tiny_llama(seed, vocab_size=vocabulary)
    model.update(tree_map(lambda p: 3 * p if p.ndim == 2 else p, model.parameters()))
    mx.eval(model.parameters())
    return model


def perturbed(model: nn.Module, twin: nn.Module, amount: float) -> nn.Module:
    """``twin`` with the weights of ``model``, each moved a little: a draft that is often right."""
    mx.random.seed(77)
    twin.update(
        tree_map(
            lambda p: (
                p + amount * mx.abs(p).mean() * mx.random.normal(p.shape)
                if p.dtype == mx.float32
                else p
            ),
            model.parameters(),
        )
    )
    mx.eval(twin.parameters())
    return twin


def prompt(length: int, vocabulary: int = VOCABULARY) -> mx.array:
    """Token numbers without a short period: [length]."""
    return mx.array([(7 * i * i + 3 * i) % vocabulary for i in range(length)])


def run(model: nn.Module, caches: list[Any], parts: Sequence[mx.array]) -> list[mx.array]:
    """Logits of each call: [n, vocabulary] for n tokens."""
    out = [model(part[None], cache=caches)[0] for part in parts]
    mx.eval(out)
    return out


def steps(model: nn.Module, caches: list[Any], first: int, count: int) -> mx.array:
    """Logits of ``count`` greedy steps that begin with token ``first``: [count, vocabulary]."""
    token, out = mx.array([first]), []
    for _ in range(count):
        logits = model(token[None], cache=caches)[0]
        out.append(logits[0])
        token = logits[-1:].argmax(-1)
    return mx.stack(out)
