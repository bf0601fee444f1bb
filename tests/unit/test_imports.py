"""Who may import whom: the queue knows no Spark, source and sink do not know each other, and no module is two."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
#: Modules that decide or parse: no socket, file, clock or thread in them.
PURE = (
    "model", "errors", "core/offsets", "core/process_queue", "core/lock", "core/ownership", "core/selector",
    "core/sharding_key", "core/message_rows", "core/micro_batch", "core/allocate", "core/membership", "core/orderly",
    "core/listener", "core/lag", "rocketmq/wire/acl", "rocketmq/wire/admin_requests", "rocketmq/net/backoff",
    "rocketmq/wire/codes", "rocketmq/wire/frame", "rocketmq/wire/group_requests", "rocketmq/wire/fastjson",
    "rocketmq/wire/request", "rocketmq/wire/message_requests", "rocketmq/wire/route", "rocketmq/codec/stored_message",
    "rocketmq/codec/row_decoder", "rocketmq/codec/record_scan", "rocketmq/codec/gather", "rocketmq/codec/decode",
    "rocketmq/codec/decode_properties", "rocketmq/codec/encode", "rocketmq/codec/properties",
    "rocketmq/codec/compression",
)  # fmt: skip


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def imported(package: str) -> dict[str, set[str]]:
    return {str(path.relative_to(ROOT)): set(imports(path)) for path in (ROOT / package).rglob("*.py")}


def roots(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def test_the_queue_imports_neither_spark_nor_source_nor_sink() -> None:
    allowed = {"orderedmq/__init__.py": {"pyspark_orderedmq"}}
    for path, names in imported("orderedmq").items():
        found = roots(names) & {"pyspark", "pyspark_orderedmq", "ordered_source", "ordered_sink", "orderedmq_demo"}
        assert found <= allowed.get(path, set()), path


@pytest.mark.parametrize(("package", "other"), [("ordered_source", "ordered_sink"), ("ordered_sink", "ordered_source")])
def test_source_and_sink_do_not_import_each_other(package: str, other: str) -> None:
    for path, names in imported(package).items():
        assert other not in roots(names), path


@pytest.mark.parametrize("package", ["ordered_source", "ordered_sink"])
def test_source_and_sink_know_no_kind_of_broker(package: str) -> None:
    for path, names in imported(package).items():
        assert not [name for name in names if name.startswith(("orderedmq.embedded", "orderedmq.rocketmq"))], path


@pytest.mark.parametrize("module", PURE)
def test_a_rule_is_pure(module: str) -> None:
    impure = {"os", "io", "socket", "threading", "time", "subprocess", "lmdb", "pathlib", "datetime", "random"}
    assert not roots(set(imports(ROOT / "orderedmq" / f"{module}.py"))) & impure


def test_importing_the_package_loads_neither_arrow_nor_spark() -> None:
    code = "import sys, orderedmq; print(sorted({'pyarrow', 'numpy', 'lmdb', 'pyspark'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_no_module_has_two_jobs_worth_of_lines() -> None:
    for package in ("orderedmq", "ordered_source", "ordered_sink"):
        for path in (ROOT / package).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= 420, path


def test_what_pyspark_asks_of_mapinarrow_comes_with_the_package() -> None:
    """``consume_orderly`` and ``route`` are made of it, and pyspark itself does not depend on pandas."""
    own = [Requirement(line) for line in requires("orderedmq") or ()]
    assert {"pyspark", "pyarrow", "pandas"} <= {one.name for one in own if one.marker is None}
