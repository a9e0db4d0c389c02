"""mlx-lm's own tests of prompt caches and generation, with its caches and with ours in their place.

They come with its source distribution, which pip fetches once; MLX_LM_TESTS names a directory that
has them instead. Their model is a download of 300 MB: both runs use a tiny stand-in, with which a
few of them fail in both (they expect certain words of the real one).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

from .contract.upstream import FILES

# They ask for mlx_lm's caches by class.
LOST = {
    "test_batch_max_kv_size_creates_rotating_cache",
    "test_batch_max_kv_size_none_creates_regular_cache",
}


@pytest.fixture(scope="module")
def directory(request: pytest.FixtureRequest) -> Path:
    """mlx-lm's tests of the release in use."""
    named = os.environ.get("MLX_LM_TESTS")
    if named:
        assert (Path(named) / f"{FILES[0]}.py").is_file(), f"MLX_LM_TESTS={named}: no tests there"
        return Path(named)
    release = version("mlx-lm")
    kept = request.config.cache.mkdir("mlx-lm-sources")
    tests = kept / f"mlx_lm-{release}" / "tests"
    if not tests.is_dir():
        fetch = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
        done = subprocess.run(
            [*fetch, "--timeout", "10", "--retries", "1", f"mlx-lm=={release}", "-d", kept],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
            pytest.skip(f"pip can't fetch the source of mlx-lm {release}: {reason[0]}")
        with tarfile.open(kept / f"mlx_lm-{release}.tar.gz") as archive:
            archive.extractall(kept, filter="data")
    return tests


@pytest.fixture(scope="module")
def plain(directory: Path) -> dict[str, str]:
    """What became of each test, with mlx-lm as it is."""
    return outcomes(directory)


def outcomes(directory: Path, *preset: str) -> dict[str, str]:
    """What became of each test, patched with a preset if there is one."""
    command = [sys.executable, "-m", "conformance.contract.upstream", str(directory), *preset]
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("preset", ["none", "int8"])
def test_as_many_stock_tests_pass_under_patch(
    plain: dict[str, str], directory: Path, preset: str
) -> None:
    patched = outcomes(directory, preset)
    assert plain.keys() == patched.keys()
    passed = {test for test, end in plain.items() if end == "passed"}
    assert len(passed) >= len(plain) - 4 > 35
    lost = {test: patched[test] for test in passed if patched[test] != "passed"}
    assert {test.rpartition(".")[2] for test in lost} == LOST, lost
