"""Compares the output of a pipeline with the expected messages, and reports the first differences."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import pyarrow as pa

from orderedmq.broker import Log
from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError
from orderedmq.testing.rows import Row, batches
from orderedmq.tools.audit import Audit, audit
from orderedmq.tools.audit_sides import Side, TableSide, TopicSide, in_memory, parquet


@runtime_checkable
class Frame(Protocol):
    """The part of Spark's DataFrame that is used here."""

    def toArrow(self) -> pa.Table: ...


#: The name of a topic, the path of a Parquet file or directory, rows, or a DataFrame.
Given: TypeAlias = str | Path | Iterable[Row] | pa.Table | Frame


def side(given: Given, name: str, log: Log, id_field: str | None, columns: dict[str, Any]) -> Side:
    """Return one side of the comparison. Raises the errors of `tools.audit_sides`.

    ``name``: what the report calls this side if it is neither a topic nor a file.
    """
    if isinstance(given, str):
        if "/" in given:
            raise OptionError(
                OptionCondition.INVALID,
                f"{given!r} is not the name of a topic. For a Parquet file or directory, pass Path({given!r})",
            )
        return TopicSide(log, given, id_field)
    if isinstance(given, Path):
        return TableSide(str(given), parquet(given), id_field=id_field, **columns)
    if isinstance(given, Frame):
        given = given.toArrow()
    rows = [given] if isinstance(given, pa.Table) else list(given)
    return TableSide(name, in_memory(name, batches(rows, name)), id_field=id_field)


def difference(expected: Side, actual: Side) -> str | None:
    """Return a report, or None if ``actual`` has exactly the messages of ``expected``, each once and in the order of its key."""
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
