"""Converts the rows that users give, in any of several forms, to a producer's columns. Pure."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import pyarrow as pa

from orderedmq.conditions import MessageCondition, SchemaCondition
from orderedmq.errors import MessageError, SchemaError
from orderedmq.rows.message_rows import refuse_unknown, select_columns
from orderedmq.schema import MESSAGE_SCHEMA, PRODUCER_COLUMNS, PRODUCER_SCHEMA

if TYPE_CHECKING:
    import pandas as pd


class Stream(Protocol):
    """A table of any package that speaks Arrow: pyarrow's, Polars' or DuckDB's, or the messages of `orderedmq.read`."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object: ...


#: The key and body of a message, its columns by name, or many messages as a table.
Row: TypeAlias = "tuple[Any, Any] | Mapping[str, Any] | pd.DataFrame | pa.RecordBatch | Stream"

#: The types of the columns of single rows. Keys are texts or whole numbers.
_TYPES: Final = {name: PRODUCER_SCHEMA.field(name).type for name in PRODUCER_COLUMNS if name != "sharding_key"}

_GIVEN: Final = {
    "sharding_key": "either texts or whole numbers of 64 bits as keys",
    "tags": "texts",
    "keys": "texts",
    "properties": "a dict of texts",
}


def producer_rows(rows: Row | list[Row], key: str | None, where: str) -> pa.RecordBatch:
    """Return rows as one batch of the producer's columns, in their order.

    ``key``: the column that has the sharding keys; None: sharding_key, if there is one. Columns that only a broker sets are left out.
    ``where``: the target, for errors. Raises SchemaError, or MessageError TOO_LARGE for a column of more than 2 GiB.
    """
    batch = _together(batches(rows if isinstance(rows, list) else [rows], where), where)
    if not batch.num_rows:
        return pa.RecordBatch.from_pylist([], PRODUCER_SCHEMA)
    names = batch.schema.names
    if key is not None and key not in names:
        raise SchemaError(
            SchemaCondition.MISSING_COLUMN,
            f"key names column {key!r}, but the rows for {where} have only {', '.join(names)}. Name the column of the sharding keys",
        )
    columns = f"A producer's columns are {', '.join(PRODUCER_COLUMNS)}"
    refuse_unknown(names, {*MESSAGE_SCHEMA.names, key}, where, f"name it as key if it has the sharding keys. {columns}")
    if key not in (None, "sharding_key"):
        keys = batch.column(names.index(key))
        batch = batch.select([name for name in names if name != "sharding_key"]).append_column("sharding_key", keys)
    return select_columns(batch, PRODUCER_COLUMNS, where)


def _together(parts: list[pa.RecordBatch], where: str) -> pa.RecordBatch:
    """Return batches as one batch, with nulls for the columns that some of them lack."""
    if len(parts) == 1:
        return parts[0]
    try:
        tables = [pa.Table.from_batches([part]) for part in parts] or [PRODUCER_SCHEMA.empty_table()]
        whole = pa.concat_tables(tables, promote_options="permissive").combine_chunks().to_batches()
    except pa.ArrowException as error:
        raise SchemaError(
            SchemaCondition.WRONG_TYPE,
            f"the rows for {where} have a column of several types: {str(error).splitlines()[0]}. Give it one type",
        ) from error
    if len(whole) > 1:
        raise MessageError(
            MessageCondition.TOO_LARGE, f"a column of the rows for {where} has more than 2 GiB. Send fewer rows at once"
        )
    return whole[0] if whole else pa.RecordBatch.from_pylist([], PRODUCER_SCHEMA)


def batches(rows: Sequence[Row], where: str) -> list[pa.RecordBatch]:
    """Return rows as record batches, in their order. ``where``: the target, for errors. Raises SchemaError."""
    checked: list[pa.RecordBatch] = []
    single: list[Mapping[str, Any]] = []
    for number, row in enumerate(rows):
        if "pandas" in sys.modules and isinstance(row, sys.modules["pandas"].DataFrame):
            single += [_named(each, f"row {index} for {where}") for index, each in enumerate(row.to_dict("records"))]
        elif isinstance(row, pa.RecordBatch) or hasattr(row, "__arrow_c_stream__"):
            checked += _columns(single, where)
            single = []
            checked += [row] if isinstance(row, pa.RecordBatch) else _table(row, where).to_batches()
        else:
            single.append(_named(row, f"row {number} for {where}"))
    return checked + _columns(single, where)


def _table(row: Any, where: str) -> pa.Table:
    try:
        return pa.table(row)
    except pa.ArrowInvalid as error:
        raise SchemaError(
            SchemaCondition.WRONG_TYPE, f"the rows for {where} are no table: {str(error).splitlines()[0]}. Give them as a table"
        ) from error


def _named(row: Any, where: str) -> Mapping[str, Any]:
    """Return one row as a dict of columns. Raises SchemaError WRONG_TYPE or MISSING_COLUMN."""
    if isinstance(row, Mapping):
        columns = dict(row)
    elif isinstance(row, tuple) and len(row) == 2:
        columns = {"sharding_key": row[0], "body": row[1]}
    else:
        raise SchemaError(
            SchemaCondition.WRONG_TYPE,
            f'{where} is {row!r}. Give (key, body), such as ("order-1", "created"), a dict of columns, a DataFrame of pandas, or a '
            "table of pyarrow",
        )
    if "body" not in columns:
        raise SchemaError(SchemaCondition.MISSING_COLUMN, f"{where} has no column body, only {', '.join(columns)}. Add it")
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
    return [pa.record_batch({name: _column(name, [row.get(name) for row in rows], where) for name in names})]


def _column(name: str, values: list[Any], where: str) -> pa.Array:
    """Return the values of a column as an array. Raises SchemaError WRONG_TYPE."""
    try:
        column = pa.array(values, _TYPES.get(name), from_pandas=True)
    except (pa.ArrowException, OverflowError, UnicodeError) as error:
        raise SchemaError(
            SchemaCondition.WRONG_TYPE,
            f"column {name} of the rows for {where}: {str(error).splitlines()[0]}. Give {_GIVEN.get(name, 'values of one type')}",
        ) from error
    # A column of nulls only, such as the keys if no row has a key, has no type.
    return column.cast(pa.string()) if pa.types.is_null(column.type) else column
