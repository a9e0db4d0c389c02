"""Prompt files to read and to refuse."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as mlx_caches

import mlx_kivi
from mlx_kivi import KVCacheConfig, QuantizedStreamingCache
from mlx_kivi.cache.basis import Balance
from mlx_kivi.upstream.prompt_file import PromptFileError

PACKED = KVCacheConfig(k_bits=4, v_bits=4, group_size=32, residual_length=16, window=90)
PLAIN = KVCacheConfig(window=60)


def basis(seed: int = 0, heads: int = 2, dim: int = 32) -> Balance:
    random = np.random.default_rng(seed)
    return Balance(mx.array(np.eye(dim) + random.normal(0, 0.1, (heads, dim, dim))))


def filled(
    config: KVCacheConfig, tokens: int = 250, balance: Balance | None = None
) -> QuantizedStreamingCache:
    cache = QuantizedStreamingCache(config)
    cache.balance = balance
    mx.random.seed(0)
    cache.update_and_fetch(*mx.random.normal((2, 1, 2, tokens, 32)))
    return cache


def stock() -> mlx_caches.KVCache:
    cache = mlx_caches.KVCache()
    cache.update_and_fetch(*mx.zeros((2, 1, 2, 7, 32)))
    return cache


def refused(path: Path, *words: str) -> str:
    """The error, which is one line and names the file; mlx_lm's function gives one as well."""
    with pytest.raises(PromptFileError) as caught:
        mlx_kivi.load_prompt_cache(path)
    message = str(caught.value)
    with mlx_kivi.patched(), pytest.raises(PromptFileError) as again:
        mlx_caches.load_prompt_cache(str(path))
    for text in (message, str(again.value)):
        assert text.startswith(f"{path}: ") and "\n" not in text
        assert all(word in text for word in words)
    return message
