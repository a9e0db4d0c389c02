"""The soak of benchmarks/stream.py, 20,000 tokens of it."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
from helpers import ROOT


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("stream")


def test_bytes_stay_and_nothing_is_nan_for_20_000_tokens(stream: ModuleType) -> None:
    series = stream.soak(stream.tiny_model(), stream.CONFIG, 20_000, rows=10)
    assert [row.tokens for row in series] == list(range(2_000, 20_001, 2_000))
    assert all(row.finite for row in series)
    assert len({row.cache_bytes for row in series}) == 1
    passed = stream.checks(series)
    assert passed["no NaN"] and passed["bytes flat"]


def test_the_checks_see_what_grows(stream: ModuleType) -> None:
    config = stream.CONFIG.replace(window=None)
    series = stream.soak(stream.tiny_model(), config, 1_000, rows=10)
    assert not stream.checks(series)["bytes flat"]
