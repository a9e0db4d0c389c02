"""The table of architectures: complete, and the same in the code and in docs/architectures.md."""

from __future__ import annotations

import ast
import pkgutil
import re
import warnings
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import mlx_lm.models
import pytest

from conformance import report
from conformance.architectures import batches, models
from mlx_kivi.models.architectures import DENSE, INDEXED, PACKED


def test_every_module_of_the_installed_mlx_lm_is_in_the_matrix() -> None:
    absent = sorted(set(models.CONFIGS) - set(models.names()))
    if absent:
        unbounded = ", ".join(sorted(set(models.names()) - set(models.bounded())))
        warnings.warn(
            f"mlx-lm {models.MLX_LM} has {len(models.names())} of {len(models.CONFIGS)} modules; "
            f"left out: {', '.join(absent)}; without a window: {unbounded or 'none'}",
            stacklevel=1,
        )
    found = {
        module.name
        for module in pkgutil.iter_modules(mlx_lm.models.__path__)
        if defines_model(Path(find_spec(f"mlx_lm.models.{module.name}").origin))
    }
    assert found == set(models.names())


def defines_model(path: Path) -> bool:
    """Whether a module defines or re-exports a ``Model``, without importing it."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {"Model", "ModelArgs"} <= names


def test_each_module_has_one_place_in_the_table() -> None:
    listed = set(models.CONFIGS)
    assert not PACKED & set(DENSE)
    assert PACKED | set(DENSE) <= listed
    assert INDEXED <= set(DENSE)
    unlisted = listed - PACKED - set(DENSE)
    # Probed, as its settings decide; and without a cache that we convert.
    assert unlisted == report.PROBED | {"deepseek_v41", "mamba", "mamba2", "rwkv7"}


def test_the_page_agrees_with_the_table() -> None:
    """Write it anew with `python -m conformance.report`."""
    page, rows = report.PATH.read_text(), report.rows_of_the_page()
    assert "python -m conformance.report" in page
    assert set(rows) == set(models.CONFIGS)
    for name, (kinds, stored, basis, read, unpacks, why, left, batch) in rows.items():
        assert read == report.reads(name), name
        assert unpacks == report.unpacks(name), name
        assert why == DENSE.get(name, ""), name
        assert left == ", ".join(kind for kind in report.LEFT_ALONE if f" {kind}" in kinds), name
        assert batch == batches.cell(name), name  # test_batches.py measures it
        assert (stored == "none") is (read == "none") is (basis == ""), name
    counts = Counter(read for _, _, _, read, *_ in rows.values())
    assert f"- {counts['packed']} are read packed:" in page
    assert f"- {counts['packed at decode']} are read packed at decode:" in page
    assert f"- {counts['arrays']} get arrays," in page


def test_the_page_names_the_modules_whose_batches_deviate() -> None:
    page, rows = report.PATH.read_text(), report.rows_of_the_page()
    section = page.split("## In a batch")[1].split("## ")[0]
    cells = Counter(row[-1].split(":")[0].split(",")[0].split(";")[0] for row in rows.values())
    assert f"- {cells['as alone']} of {len(rows)} are `as alone`" in section
    as_stock = "as mlx-lm's"
    assert f"- {cells[as_stock]} are `{as_stock}`" in section
    assert f"- {cells['no']} can't be batched" in section
    deviating = batches.DEVIATES.keys() | batches.STOCK_DEVIATES | batches.WHOLE_CALL
    assert deviating <= set(re.findall(r"`([^`]+)`", section))
    assert not batches.DEVIATES.keys() & batches.NONE and deviating <= set(rows)


def test_at_least_95_modules_read_packed_take_the_balanced_basis() -> None:
    """test_quantized.py measures each row; the page names those that do not."""
    page, rows = " ".join(report.PATH.read_text().split()), report.rows_of_the_page()
    packed = {name: basis for name, (_, _, basis, read, *_) in rows.items() if read == "packed"}
    balanced = [name for name, basis in packed.items() if basis == report.BALANCED]
    assert len(balanced) >= 95
    pattern = r"(\d+) of the (\d+) read packed take it; the others: (.*?)\. - "
    taken, of, others = re.search(pattern, page).groups()
    assert (int(taken), int(of)) == (len(balanced), len(packed))
    assert set(re.findall(r"`([^`]+)`", others)) == set(packed) - set(balanced)
    assert (others == "none") is (len(balanced) == len(packed))


@pytest.mark.parametrize(
    "name", ["deepseek_v3", "deepseek_v32", "falcon_h1", "gemma2", "llama4", "mamba"]
)
def test_a_row_is_what_is_measured(name: str) -> None:
    assert report.measure(name).line in report.PATH.read_text().splitlines()
