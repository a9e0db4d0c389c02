"""For `tests` and `conformance`: mlx_lm as it came after each test."""

from collections.abc import Iterator

import pytest

import mlx_kivi


@pytest.fixture(autouse=True)
def _unpatched() -> Iterator[None]:
    yield
    mlx_kivi.unpatch()  # `make_prompt_cache` and reading a prompt file leave it hooked
