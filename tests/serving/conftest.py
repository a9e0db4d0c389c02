"""A model for the server's tests."""

import mlx.nn as nn
import pytest
from mlx_lm import server as mlx_server

from conformance.common import tiny_llama


@pytest.fixture(autouse=True)
def _newer() -> None:
    if not hasattr(mlx_server, "_image_parts"):
        pytest.skip("the server needs mlx-lm 0.32.1 or newer")


@pytest.fixture(scope="session")
def model() -> nn.Module:
    """A random llama that knows all bytes, and an end of text. Do not change it."""
    return tiny_llama(vocab_size=257)
