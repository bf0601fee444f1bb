"""Compares what a pipeline should have written with what it has, and says where they first differ."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import pyarrow as pa

from orderedmq.broker import Log
from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError
from orderedmq.testing.rows import Row, batches
from orderedmq.tools.audit import Audit, Side, audit
from orderedmq.tools.audit_sides import RowsSide, TableSide, TopicSide


@runtime_checkable
class Frame(Protocol):
    """What is used of a DataFrame of Spark."""

    def toArrow(self) -> pa.Table: ...


#: A topic; the Parquet file or directory at a path; rows; or a DataFrame.
Given: TypeAlias = str | Path | Iterable[Row] | pa.Table | Frame


def side(given: Given, name: str, log: Log, id_field: str | None, columns: dict[str, Any]) -> Side:
    """Return one side of the comparison. ``name`` is what rows are called. Raises the errors of the sides."""
    if isinstance(given, str):
        if "/" in given:
            raise OptionError(
                OptionCondition.INVALID,
                f"{given!r} is not the name of a topic: for a Parquet file or directory pass Path({given!r})",
            )
        return TopicSide(log, given, id_field)
    if isinstance(given, Path):
        return TableSide(given, id_field=id_field, **columns)
    if isinstance(given, Frame):
        given = given.toArrow()
    rows = [given] if isinstance(given, pa.Table) else list(given)
    return RowsSide(name, batches(rows, name), id_field)


def difference(expected: Side, actual: Side) -> str | None:
    """Return what is wrong with ``actual``, None if it has the messages of ``expected``, once and in the order of their keys."""
    found = audit(expected, actual)
    return None if found.ok else told(found)


def told(found: Audit) -> str:
    """Return the findings as lines, each with its first examples."""
    missed = f"{found.actual.name} does not have the messages of {found.expected.name}, each once and in the order of its key"
    lines = [f"{missed}: {found.verdict}"]
    for finding in found.findings:
        if finding.messages:
            lines.append(f"{finding.name}: {finding.messages:,}{finding.note and f' ({finding.note})'}")
            for one in found.examples:
                if one.kind == finding.kind:
                    key = "no key" if one.key is None else f"key {one.key}"
                    lines.append(f"  {one.side}, {one.where}: {key}, {one.id}")
    return "\n".join(lines)
