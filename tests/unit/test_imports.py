"""What the contracts of import-linter in pyproject.toml cannot say about imports and about what modules contain."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import requires
from pathlib import Path
from typing import Final

import grimp
import pytest
from packaging.requirements import Requirement

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("orderedmq", "ordered_source", "ordered_sink")


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES: Final = [
    *(path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))),
    ROOT / "pyspark_orderedmq.py",
    ROOT / "pytest_orderedmq.py",
]
MODULES: Final = {name_of(path): path for path in FILES}


def inside(name: str, packages: Iterable[str]) -> bool:
    """Whether a module is one of the modules and packages, or is inside one of them."""
    return any(name == package or name.startswith(package + ".") for package in packages)


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*PACKAGES, include_external_packages=True, cache_dir=None)


def test_a_module_that_says_it_is_pure_is_pure(graph: grimp.ImportGraph) -> None:
    """So are the modules of the contract, which cannot see that a module opens a file."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = (contract for contract in contracts if contract["name"] == "What decides, parses or encodes is pure")
    claim = re.compile(r"\bPure(?:[.:]| and )")
    impurities, claims = set(), 0
    for name, path in MODULES.items():
        tree = ast.parse(path.read_text())
        pure = claim.search(ast.get_docstring(tree) or "")
        claims += bool(pure)
        if pure:
            imports = graph.find_modules_directly_imported_by(name) & set(contract["forbidden_modules"])
            impurities |= {f"{name} -> {module}" for module in imports}
        if pure or inside(name, contract["source_modules"]):
            calls = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
            impurities |= {f"{name} calls {call}" for call in calls & {"open", "input"}}
    assert impurities - set(contract["ignore_imports"]) == set()
    assert claims > 40


def test_importing_the_package_loads_neither_arrow_nor_spark() -> None:
    code = "import sys, orderedmq; print(sorted({'pyarrow', 'numpy', 'pyspark'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_pyspark_and_what_mapinarrow_needs_come_with_the_extra_spark_alone() -> None:
    """``consume_orderly`` and ``route`` use mapInArrow, for which pyspark needs pandas without declaring that dependency."""
    needed = [Requirement(line) for line in requires("orderedmq") or ()]
    assert {"pyspark", "pandas"} & {requirement.name for requirement in needed if requirement.marker is None} == set()
    extra = {
        requirement.name for requirement in needed if requirement.marker and requirement.marker.evaluate({"extra": "spark"})
    }
    assert extra == {"pyspark", "pandas"}
