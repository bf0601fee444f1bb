"""Converts the rows that a test gives to the columns of a `Producer`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import pyarrow as pa

from orderedmq.conditions import SchemaCondition
from orderedmq.errors import SchemaError

#: The key and body of a message, its columns by name, or many messages as columns.
Row: TypeAlias = tuple[Any, Any] | Mapping[str, Any] | pa.RecordBatch | pa.Table

_TYPES: Final = {
    "body": pa.binary(),
    "tags": pa.string(),
    "keys": pa.string(),
    "properties": pa.map_(pa.string(), pa.string()),
}

_GIVEN: Final = {
    "sharding_key": "either texts or whole numbers of 64 bits as keys",
    "tags": "texts",
    "keys": "texts",
    "properties": "a dict of texts",
}


def batches(rows: Sequence[Row], where: str) -> list[pa.RecordBatch]:
    """Return rows as record batches, in their order. ``where``: the target, for errors. Raises SchemaError."""
    checked: list[pa.RecordBatch] = []
    single: list[Mapping[str, Any]] = []
    for number, row in enumerate(rows):
        if isinstance(row, pa.RecordBatch | pa.Table):
            checked += _columns(single, where)
            single = []
            checked += row.to_batches() if isinstance(row, pa.Table) else [row]
        else:
            single.append(_named(row, f"row {number} for {where}"))
    return checked + _columns(single, where)


def _named(row: Any, where: str) -> Mapping[str, Any]:
    """Return one row as a dict of columns. Raises SchemaError WRONG_TYPE or MISSING_COLUMN."""
    if isinstance(row, Mapping):
        columns = dict(row)
    elif isinstance(row, tuple) and len(row) == 2:
        columns = {"sharding_key": row[0], "body": row[1]}
    else:
        raise SchemaError(
            SchemaCondition.WRONG_TYPE,
            f'{where} is {row!r}. Give (key, body), such as ("order-1", "created"), a dict of columns, or a table of pyarrow',
        )
    if "body" not in columns:
        raise SchemaError(SchemaCondition.MISSING_COLUMN, f"{where} has no column body, only {', '.join(columns)}")
    columns["body"] = _body(columns["body"], where)
    if isinstance(columns.get("properties"), Mapping):
        columns["properties"] = list(columns["properties"].items())
    return columns


def _body(body: Any, where: str) -> bytes:
    try:
        if isinstance(body, dict | list):
            body = json.dumps(body, ensure_ascii=False)
        if isinstance(body, str):
            return body.encode()
    except (TypeError, ValueError) as error:
        raise SchemaError(
            SchemaCondition.WRONG_TYPE,
            f"{where} has a body that cannot be written as JSON or UTF-8: {error}. Convert it before",
        ) from error
    if isinstance(body, bytes):
        return body
    raise SchemaError(
        SchemaCondition.WRONG_TYPE,
        f"{where} has a body of type {type(body).__name__}. Give text, bytes, or a dict or list, which becomes JSON",
    )


def _columns(rows: Sequence[Mapping[str, Any]], where: str) -> list[pa.RecordBatch]:
    if not rows:
        return []
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: _column(name, [row.get(name) for row in rows], where) for name in names}
    # Drop columns that have only nulls, such as the keys if no row has a key, because they have no type.
    return [pa.record_batch({name: column for name, column in columns.items() if column.type != pa.null()})]


def _column(name: str, values: list[Any], where: str) -> pa.Array:
    """Return the values of a column as an array. Raises SchemaError WRONG_TYPE."""
    try:
        return pa.array(values, _TYPES.get(name))
    except (pa.ArrowException, OverflowError, UnicodeError) as error:
        raise SchemaError(
            SchemaCondition.WRONG_TYPE,
            f"column {name} of the rows for {where}: {str(error).splitlines()[0]}. Give {_GIVEN.get(name, 'values of one type')}",
        ) from error
