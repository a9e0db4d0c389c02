"""A model for the server's tests."""

import mlx.nn as nn
import pytest

from conformance.common import tiny_llama


@pytest.fixture(scope="session")
def model() -> nn.Module:
    """A random llama that knows all bytes, and an end of text. Do not change it."""
    return tiny_llama(vocab_size=257)
