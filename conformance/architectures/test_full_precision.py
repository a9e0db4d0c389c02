"""Nothing quantised: ours must be the stock caches, and with a window, dense attention masked."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.models.cache import make_prompt_cache as stock_caches

import mlx_kivi
from conformance.architectures import matrix, models
from conformance.architectures.reference import DenseReference, pair_up, reference_caches
from mlx_kivi.models.factory import convert_all

# mlx_lm builds plamo3's cache for a window of W tokens and its mask for W + 1: a chunk sees one
# token more than single steps do.
NOT_THE_STOCK_RULE = {"plamo3"}
if not hasattr(KVCache, "keys_and_values"):
    NOT_THE_STOCK_RULE.add("llama4")  # mlx-lm 0.31 loses tokens of chunks of no multiple of 256


def feed(run: Iterator[int]) -> None:
    for _ in run:
        pass


@pytest.mark.parametrize("name", models.names())
def test_full_precision_equals_the_stock_caches(name: str) -> None:
    model = models.build(name)
    policy = matrix.POLICIES["full precision"]
    ours, theirs = mlx_kivi.make_prompt_cache(model, policy), reference_caches(model, policy)
    references = pair_up(theirs, ours)
    if name not in NOT_THE_STOCK_RULE:
        theirs = stock_caches(model)
    feed(matrix.compare(model, ours, theirs if references else None))


@pytest.mark.parametrize("name", models.bounded())
def test_sinks_and_a_window_equal_dense_attention_masked(name: str) -> None:
    model = models.build(name)
    policy = matrix.POLICIES["sinks + window"]
    ours, theirs = mlx_kivi.make_prompt_cache(model, policy), reference_caches(model, policy)
    references = pair_up(theirs, ours)
    for fed in matrix.compare(model, ours, theirs if references else None):
        for reference in references:
            assert reference.twin.size() == min(fed, reference.sink + reference.window)


@pytest.mark.parametrize("name", ["deepseek_v32", "gemma2", "glm_moe_dsa", "llama"])
def test_a_window_one_token_off_is_noticed(name: str) -> None:
    model = models.build(name)
    policy = matrix.POLICIES["sinks + window"]
    ours = mlx_kivi.make_prompt_cache(model, policy)
    theirs = reference_caches(model, policy.replace(window=policy.window + 1))
    with pytest.raises(AssertionError, match="logits"):
        feed(matrix.compare(model, ours, theirs))


def test_kept_tokens_of_a_rotating_cache_are_seen_by_each_row_of_a_chunk() -> None:
    """Stock hides them from all rows of a chunk but the first few: its mask goes by index."""
    model = models.build("qwen2")
    policy = matrix.POLICIES["full precision"]

    def stock() -> list[RotatingKVCache]:
        return [RotatingKVCache(max_size=28, keep=4) for _ in model.layers]

    def ours() -> list[mlx_kivi.QuantizedStreamingCache]:
        return convert_all(stock(), policy, packed_attention=False)

    references = [DenseReference(sink=4, window=24) for _ in model.layers]
    feed(matrix.compare(model, ours(), references))
    with pytest.raises(AssertionError, match="logits"):
        feed(matrix.compare(model, ours(), stock()))

    # Token by token, stock follows the same rule.
    mine, theirs = ours(), stock()
    tokens = mx.concatenate(matrix.parts()[:3], axis=1)
    for token in mx.split(tokens, tokens.shape[1], axis=1):
        a, b = (matrix.logits(model, token, caches) for caches in (mine, theirs))
        assert mx.abs(a - b).max() < matrix.TOLERANCE * mx.abs(b).max()
