"""One cell of the matrix: a model under a policy, call by call, beside what it must equal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_kivi import KVCacheConfig
from mlx_kivi.cache import attention, latent
from mlx_kivi.config import TRIM_MARGIN

SMALL = {"group_size": 32, "residual_length": 16, "sink": 4}
POLICIES = {
    "full precision": KVCacheConfig(sink=4),
    "int8": KVCacheConfig(k_bits=8, v_bits=8, **SMALL),
    "int4": KVCacheConfig(k_bits=4, v_bits=4, **SMALL),
    "int2": KVCacheConfig(k_bits=3, v_bits=2, **SMALL),
    "sinks + window": KVCacheConfig(sink=4, window=24),
    # About the least window that pays packed for every model here, indexers' 8 bits included.
    "int4 + sinks + window": KVCacheConfig(k_bits=4, v_bits=4, window=100, **SMALL),
}

# Tokens a call. The prompt ends past every window. Groups are packed once 52, 84, 116, 148, 180
# and 212 tokens are in; four fewer in layers of a trained window, which have no sinks. These fall
# into the prompt, into single steps, into long calls and into short ones (as of speculative
# decoding), and the store of the bounded cache wraps in both kinds.
CALLS = (37, 1, 72, *[1] * 8, 4, 3, 36, 1, 1, 12, 6, 33, 1)
VOCABULARY = 32  # of the smallest model
# Of logits, relative to the largest: rounding of float32, by the same products and by others.
TOLERANCE = 1e-5
TOLERANCE_PACKED = 5e-5


def parts() -> list[mx.array]:
    """The tokens of each call: [1, n]."""
    tokens = mx.random.randint(0, VOCABULARY, (1, sum(CALLS)), key=mx.random.key(1))
    ends = [sum(CALLS[: i + 1]) for i in range(len(CALLS))]
    return [tokens[:, end - n : end] for n, end in zip(CALLS, ends, strict=True)]


def split(part: mx.array) -> list[mx.array]:
    """A call as a reference has to make it.

    Ours, read packed, takes a short call as the steps of decoding that it stands for; a long
    one sees its own groups unpacked (KIVI, section 3.3).
    """
    return [part] if part.shape[1] > TRIM_MARGIN else mx.split(part, part.shape[1], axis=1)


def logits(model: Any, tokens: mx.array, caches: list[Any]) -> mx.array:
    """Logits of the tokens that were fed: [1, n, VOCABULARY]."""
    return model(tokens, cache=caches)[..., :VOCABULARY].astype(mx.float32)


def compare(
    model: Any,
    ours: list[Any],
    theirs: list[Any] | None,
    tolerance: float = TOLERANCE,
    splits: bool = False,
) -> Iterator[int]:
    """Feed a model twice, call by call, and compare the logits; yields the tokens fed so far.

    Args:
        model: The model.
        ours: Caches under test.
        theirs: Caches that they must equal; None if there is nothing of ours in them.
        tolerance: Of logits.
        splits: Cut short calls of ``theirs`` into single steps.

    Raises:
        AssertionError: if logits differ by more than ``tolerance`` of the largest.
    """
    fed = 0
    for part in parts():
        mine = logits(model, part, ours)
        assert mx.isfinite(mine).all()
        if theirs is not None:
            cuts = split(part) if splits else [part]
            other = mx.concatenate([logits(model, cut, theirs) for cut in cuts], axis=1)
            off = (mx.abs(mine - other).max() / mx.abs(other).max()).item()
            where = f"tokens {fed} to {fed + part.shape[1]}"
            assert off < tolerance, f"{where}: logits {off:.1e} off"
        fed += part.shape[1]
        yield fed


@dataclass
class Reads:
    """How attention read our caches: products with packed data, those of one token with packed
    latents, and arrays unpacked."""

    packed: int = 0
    latent: int = 0
    dense: int = 0


@contextmanager
def counted() -> Iterator[Reads]:
    """Count reads in a ``with`` block."""
    reads = Reads()
    attend, dense = attention.attend, attention.CacheView.dense
    attend_latent = latent.attend_latent

    def counting_attend(*args: Any, **kwargs: Any) -> mx.array:
        reads.packed += 1
        return attend(*args, **kwargs)

    def counting_latent(*args: Any, **kwargs: Any) -> mx.array:
        reads.latent += 1
        return attend_latent(*args, **kwargs)

    def counting_dense(self: attention.CacheView, which: int, row: int = 0) -> mx.array:
        reads.dense += 1
        return dense(self, which, row)

    attention.attend, attention.CacheView.dense = counting_attend, counting_dense
    latent.attend_latent = counting_latent
    try:
        yield reads
    finally:
        attention.attend, attention.CacheView.dense = attend, dense
        latent.attend_latent = attend_latent
