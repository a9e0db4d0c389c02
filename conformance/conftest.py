"""Fixtures of the contract."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.nn as nn
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

import mlx_kivi

from .contract import models, tokenizers


@pytest.fixture(scope="session")
def llama() -> nn.Module:
    """A tiny random llama. Do not change it."""
    return models.llama()


@pytest.fixture(scope="session")
def draft() -> nn.Module:
    """A draft model for it: the same with moved weights, right about every other time."""
    return models.perturbed(models.llama(), models.llama(), 0.05)


@pytest.fixture(scope="session")
def tokenizer() -> TokenizerWrapper:
    """One token a byte."""
    return tokenizers.wrapped()


@pytest.fixture
def unpatched() -> Iterator[None]:
    """mlx_lm as it came, before the test and after."""
    mlx_kivi.unpatch()
    yield
    mlx_kivi.unpatch()
