"""Fixtures, and what hypothesis does: with CI=true the same examples in every run."""

import os
from collections.abc import Iterator
from pathlib import Path

import mlx.nn as nn
import pytest
from helpers import ROOT
from hypothesis import settings
from reference import hooked

from conformance.common import tiny_llama

settings.register_profile(
    "mlx_kivi", max_examples=25, deadline=None, derandomize=os.environ.get("CI") == "true"
)
settings.load_profile("mlx_kivi")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The directory of SmolLM2-135M-Instruct: MLX_KIVI_MODEL, or where `make model` puts it."""
    named = os.environ.get("MLX_KIVI_MODEL")
    path = Path(named) if named else ROOT / "models" / "SmolLM2-135M-Instruct"
    if not (path / "config.json").is_file():
        if named:
            pytest.fail(f"MLX_KIVI_MODEL={named}: no model there (no config.json)")
        pytest.skip("needs the real SmolLM2 model: run `make model`")
    return path


@pytest.fixture(autouse=True)
def _model_for_marked_tests(request: pytest.FixtureRequest) -> None:
    """Let a test marked `model` skip without the model, even if it never asks for its path."""
    if request.node.get_closest_marker("model"):
        request.getfixturevalue("smollm2")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The directory of design documents and data beside the repository."""
    path = ROOT.parent / "shared"
    if not path.is_dir():
        pytest.skip("needs the shared data in ../shared, beside the repository")
    return path


@pytest.fixture(scope="session", name="tiny_llama")
def _tiny_llama() -> nn.Module:
    """A random llama, see `conformance.common`. Do not change it."""
    return tiny_llama()


@pytest.fixture
def attention_hooked() -> Iterator[None]:
    """mlx_lm's attention takes our handles, for tests that ask with `usefixtures`."""
    with hooked():
        yield
