"""Fixtures of the contract."""

from __future__ import annotations

import mlx.nn as nn
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

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
