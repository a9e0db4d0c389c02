"""For `tests` and `conformance`: mlx_lm as it came, and a user's files untouched."""

from collections.abc import Iterator

import pytest

import mlx_kivi
from mlx_kivi.models import basis_files


@pytest.fixture(autouse=True)
def _unpatched() -> Iterator[None]:
    yield
    mlx_kivi.unpatch()  # `make_prompt_cache` and reading a prompt file leave it hooked


@pytest.fixture(autouse=True, scope="session")
def _own_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is measured of models is kept for the session alone."""
    place = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(basis_files, "directory", lambda: place)
        yield
