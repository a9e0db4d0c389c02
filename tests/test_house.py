"""The package's imports point down its floors, close no circle, and hide in no function."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers import ROOT

import mlx_kivi

PACKAGE = Path(mlx_kivi.__file__).parent
# From the top down. A module imports those below it, and those beside it that don't import it.
FLOORS = (
    (
        "__init__.py",
        "__main__.py",
        "calibrate.py",
        "generate.py",
        "sample.py",
        "server.py",
        "convert_tinygpt.py",
    ),
    ("patch.py", "commands/", "serving/"),
    ("report.py", "tinygpt/"),
    ("upstream/",),
    ("models/",),
    ("quantized_streaming_cache.py", "batch_cache.py"),
    ("cache/",),
    ("config.py", "hooks.py"),
)
FLOOR_OF = {name: len(FLOORS) - i for i, floor in enumerate(FLOORS) for name in floor}


class Import(NamedTuple):
    """Module ``source`` imports module ``target``; hidden: in a function that does more."""

    source: str
    target: str
    line: int
    hidden: bool


def module_paths(root: Path) -> dict[str, str]:
    """The modules of a package by name, with their paths in it."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        parts = (root.name, *inside.with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = inside.as_posix()
    return found


def imports(root: Path) -> list[Import]:
    """Every import of a package's modules by one another, wherever in a file it stands."""
    paths = module_paths(root)
    return [
        Import(source, target, node.lineno, hidden)
        for source, path in paths.items()
        for node, hidden in statements(ast.parse((root / path).read_text(encoding="utf-8")))
        for target in targets(node, source, path, paths)
    ]


def statements(node: ast.AST, around: tuple[ast.AST, ...] = ()) -> Iterator[tuple[ast.AST, bool]]:
    """What may import, and whether it is hidden in a function. ``around``: the functions."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        around = (*around, node)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, bool(around) and not is_replacement(around)
        elif isinstance(child, ast.Call):
            yield child, False
        yield from statements(child, around)


def is_replacement(functions: tuple[ast.AST, ...]) -> bool:
    """Whether the innermost function is one whose code mlx_lm runs, with its own globals.

    It is made inside another, and all it does is to import a function by its absolute name and
    to return what that returns.
    """
    match functions[-1].body:
        case [
            ast.ImportFrom(level=0, names=[ast.alias(name=dispatch, asname=None)]),
            ast.Return(value=ast.Call(func=ast.Name(id=called))),
        ]:
            return len(functions) > 1 and called == dispatch
    return False


def targets(node: ast.AST, source: str, path: str, names: dict[str, str]) -> list[str]:
    """The modules of the package that a statement of module ``source`` at ``path`` imports."""
    found = []
    match node:
        case ast.Call(
            func=ast.Name(id="import_module") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            found = [name]
        case ast.Import(names=aliases):
            found = [alias.name for alias in aliases]
        case ast.ImportFrom(module=base, names=aliases, level=level):
            if level:
                up = level - path.endswith("__init__.py")
                home = source.rsplit(".", up)[0]
                base = f"{home}.{base}" if base else home
            full = [f"{base}.{alias.name}" for alias in aliases]
            found = [name if name in names else base for name in full]
    package = source.partition(".")[0]
    return sorted({name for name in found if name.partition(".")[0] == package})


def floor(path: str) -> int | None:
    """The floor of a module, by its path in the package: 1 is the ground."""
    first, *deeper = path.split("/")
    return FLOOR_OF.get(f"{first}/" if deeper else first)


def faults(root: Path) -> list[str]:
    """What is wrong with the imports of a package, a line each."""
    paths, found = module_paths(root), imports(root)
    floors = {name: floor(path) for name, path in paths.items()}
    homeless = [name for name in paths if floors[name] is None]
    if homeless:
        return [f"{paths[name]} has no floor: give it one in FLOORS" for name in homeless]
    said = []
    for source, target, line, hidden in found:
        where = f"{paths[source]}:{line} imports {target}"
        if target not in paths:
            said.append(f"{where}, which is not there")
        elif floors[target] > floors[source]:
            said.append(f"{where}, which is on a floor above it")
        if hidden:
            said.append(f"{where} inside a function: do it at the top of the file")
    below: dict[str, set[str]] = {}
    for one in found:
        if one.target != one.source:
            below.setdefault(one.source, set()).add(one.target)
    try:
        TopologicalSorter(below).prepare()
    except CycleError as error:
        said.append("a circle: " + " imports ".join(reversed(error.args[1])))
    return said


def test_every_import_points_down() -> None:
    assert faults(PACKAGE) == []


def test_every_name_of_the_table_is_there() -> None:
    assert [name for name in FLOOR_OF if not (PACKAGE / name).exists()] == []


@pytest.mark.parametrize("name", ["config.py", "hooks.py"])
def test_the_ground_imports_nothing_of_ours(name: str) -> None:
    module = f"mlx_kivi.{name.removesuffix('.py')}"
    assert [one for one in imports(PACKAGE) if one.source == module] == []


def test_the_walker_sees_the_imports_that_are_there() -> None:
    seen = {(one.source, one.target) for one in imports(PACKAGE)}
    assert seen >= {
        ("mlx_kivi", "mlx_kivi.tinygpt"),
        ("mlx_kivi.__main__", "mlx_kivi"),
        ("mlx_kivi.cache.layout", "mlx_kivi.config"),
        ("mlx_kivi.models.probe", "mlx_kivi.hooks"),
        ("mlx_kivi.tinygpt", "mlx_kivi.tinygpt.model"),
        ("mlx_kivi.upstream.replacements", "mlx_kivi.models.learned_positions"),
        ("mlx_kivi.upstream.replacements", "mlx_kivi.upstream.prompt_file"),
    }


# docs/how_it_works.md


PAGE = (ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8")


def test_the_page_draws_the_floors_of_the_table() -> None:
    drawing = PAGE.split("```")[1]
    drawn = [re.findall(r"\w+(?:\.py|/)", line) for line in drawing.splitlines()]
    assert tuple(tuple(names) for names in drawn if names) == FLOORS


def test_every_file_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"[\w./]+(?:\.(?:py|json|md)\b|\w/)", PAGE))
    assert len(named) > 30
    places = (ROOT, PACKAGE, ROOT / "docs")
    assert [name for name in named if not any((at / name).exists() for at in places)] == []


def test_every_name_of_code_on_the_page_is_in_the_code() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    named = set(re.findall(r"`([A-Za-z_]\w*)(?:\([\w=]*\))?`", PAGE))
    assert {"PACKED", "BITS", "COMMANDS", "update_and_fetch"} <= named
    assert [name for name in named if not re.search(rf"\b{name}\b", code)] == []


# The walker itself, on packages with one fault each


LAZY = "def f():\n    {}\n"
REPLACEMENT = """
def hook():
    def theirs(x):
        from mlx_kivi.{module} import {name}

        return {call}(x)
"""
SOUND = {
    "config.py": "import json\nfrom importlib import resources\n",
    "cache/__init__.py": "",
    "cache/layout.py": "from ..config import X\nfrom . import attention\n",
    "cache/attention.py": "import mlx_kivi.config\n",
    "models/__init__.py": LAZY.format("import numpy\n    from json import dumps"),
    "upstream/__init__.py": "",
    "upstream/a.py": REPLACEMENT.format(module="upstream.b", name="dispatch", call="dispatch")
    + REPLACEMENT.format(module="upstream.a", name="own", call="own"),
    "upstream/b.py": "from ..cache import layout\nfrom .. import config\n",
    "__init__.py": "from .config import X\n",
    "__main__.py": "from . import __version__\nNAME = 'mlx_kivi.generate'\n",
    "generate.py": "",
}
UP = "which is on a floor above it"
BAD = {
    "up": ({"cache/layout.py": "\nfrom ..models import x"}, f"cache/layout.py:2 .*models, {UP}"),
    "up, absolute": ({"config.py": "import mlx_kivi.cache.layout"}, f"mlx_kivi.cache.layout, {UP}"),
    "up, a module by from": ({"cache/layout.py": "from .. import generate"}, f"generate, {UP}"),
    "up, to the package": ({"config.py": "from . import __version__"}, f"imports mlx_kivi, {UP}"),
    "up, for types": (
        {"config.py": "if TYPE_CHECKING:\n    from .cache.layout import Plan"},
        f"config.py:2 imports mlx_kivi.cache.layout, {UP}",
    ),
    "up, in a function": ({"config.py": LAZY.format("from . import cache")}, f"cache, {UP}"),
    "up, by name": (
        {"config.py": "x = importlib.import_module('mlx_kivi.generate')"},
        f"generate, {UP}",
    ),
    "up, in a replacement": (
        {"cache/layout.py": REPLACEMENT.format(module="generate", name="d", call="d")},
        f"mlx_kivi.generate, {UP}",
    ),
    "circle": (
        {"cache/attention.py": "from .layout import Plan"},
        "a circle: (mlx_kivi.cache.layout|mlx_kivi.cache.attention) imports ",
    ),
    "circle of three": (
        {
            "cache/attention.py": "from . import c",
            "cache/c.py": "from mlx_kivi.cache import layout",
        },
        "a circle: .*mlx_kivi.cache.c imports mlx_kivi.cache.layout",
    ),
    "circle in a function": (
        {"cache/attention.py": LAZY.format("from .layout import Plan")},
        "a circle: .*mlx_kivi.cache.layout imports mlx_kivi.cache.attention",
    ),
    "circle by a replacement": (
        {"upstream/b.py": "from .a import x"},
        "a circle: .*mlx_kivi.upstream.a imports mlx_kivi.upstream.b",
    ),
    "hidden": ({"generate.py": LAZY.format("from .cache import layout")}, "inside a function"),
    "hidden in a method": (
        {"generate.py": "class A:\n  async def f(self):\n    import mlx_kivi.config"},
        "generate.py:3 imports mlx_kivi.config inside a function",
    ),
    "a replacement that does more": (
        {"generate.py": REPLACEMENT.format(module="config", name="a", call="b")},
        "inside a function",
    ),
    "no floor": ({"cellar.py": ""}, r"cellar\.py has no floor: give it one in FLOORS"),
    "no such module": ({"generate.py": "from .nowhere import x"}, "nowhere, which is not there"),
}


def built(root: Path, *layers: dict[str, str]) -> Path:
    """A package of the files of all layers, the later ones in place of the earlier."""
    for files in layers:
        for name, text in files.items():
            path = root / "mlx_kivi" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return root / "mlx_kivi"


def test_a_sound_package_has_no_faults(tmp_path: Path) -> None:
    assert faults(built(tmp_path, SOUND)) == []


@pytest.mark.parametrize(("files", "says"), BAD.values(), ids=BAD)
def test_a_fault_is_found_and_told(files: dict[str, str], says: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=says):
        said = faults(built(tmp_path, SOUND, files))
        assert said == [], "\n".join(said)
