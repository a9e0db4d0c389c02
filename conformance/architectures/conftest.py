"""mlx_lm as it was after each test, and no waiting for a compiler."""

from collections.abc import Iterator

import mlx.core as mx
import pytest

import mlx_kivi


@pytest.fixture(autouse=True)
def _plain_mlx_lm() -> Iterator[None]:
    # On a CPU, mlx compiles a fused function with the system's compiler: half a second each.
    mx.disable_compile()
    yield
    mx.enable_compile()
    mlx_kivi.unpatch()
