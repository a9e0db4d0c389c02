"""No waiting for a compiler."""

from collections.abc import Iterator

import mlx.core as mx
import pytest


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    # On a CPU, mlx compiles a fused function with the system's compiler: half a second each.
    mx.disable_compile()
    yield
    mx.enable_compile()
