"""Models that are, or will be, spread over several processes: each measured by all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.llama import Model

import mlx_kivi
from conformance.common import tiny_llama
from mlx_kivi import KVCacheConfig
from mlx_kivi.models import basis_files

INT4 = KVCacheConfig.from_name("int4")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(basis_files, "directory", lambda: tmp_path / "kept")
    return tmp_path / "kept"


class Group:
    """Stands for `mx.distributed.Group`, which one process can make of size 1 alone."""

    def __init__(self, size: int) -> None:
        self.size = lambda: size


def sharded(model: Model, size: int) -> None:
    # As mlx's own sharded layers hold it.
    model.layers[1].self_attn.o_proj.group = Group(size)


def in_stages(model: Model, size: int) -> None:
    model.model.pipeline_size = size


@pytest.mark.parametrize("spread", [sharded, in_stages])
def test_a_model_in_several_processes_neither_reads_nor_writes_files(
    spread: Any, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where one process read a file and another ran the pass, their sums would mix the two up.
    monkeypatch.setattr(mx.distributed, "Group", Group)
    alone = tiny_llama()
    spread(alone, 1)
    assert mlx_kivi.calibrate(alone).file is not None
    files = list(place.iterdir())
    both = tiny_llama()
    spread(both, 2)
    found = mlx_kivi.calibrate(both)
    assert (found.measured, found.file) == (2, None)
    assert found.seconds is not None
    assert list(place.iterdir()) == files


def halved(model: Model) -> None:
    """Half of the heads, as in each of two processes."""
    for layer in model.layers:
        part = layer.self_attn
        part.n_heads, part.n_kv_heads = part.n_heads // 2, part.n_kv_heads // 2
        for linear in (part.q_proj, part.k_proj, part.v_proj):
            linear.weight = linear.weight[: linear.weight.shape[0] // 2]
        part.o_proj.weight = part.o_proj.weight[:, : part.o_proj.weight.shape[1] // 2]


def test_a_model_that_has_fewer_heads_by_now_is_measured_again() -> None:
    model: nn.Module = tiny_llama()
    mlx_kivi.calibrate(model)
    halved(model)
    caches = mlx_kivi.make_prompt_cache(model, INT4)
    model(mx.zeros((1, 200), mx.int32), cache=caches)
    assert [cache.balance.matrix.shape for cache in caches] == [(1, 32, 32)] * 2
    fresh = tiny_llama()
    halved(fresh)
    names = [cache.balance.name for cache in mlx_kivi.make_prompt_cache(fresh, INT4)]
    assert [cache.balance.name for cache in caches] == names
