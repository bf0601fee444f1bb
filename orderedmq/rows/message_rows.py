"""Checks a producer's rows and converts them to the message schema before anything is written. Pure.

Limits are RocketMQ's (model.py). Whole columns are checked in one step, and a single row is searched for only after an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.conditions import MessageCondition, SchemaCondition
from orderedmq.errors import MessageError, SchemaError
from orderedmq.model import (
    MAX_BODY_BYTES,
    MAX_KEY_BYTES,
    MAX_PROPERTIES_BYTES,
    RESERVED_PROPERTIES,
    TRANSIENT_PREFIX,
    is_reserved,
)
from orderedmq.schema import PRODUCER_COLUMNS, PRODUCER_SCHEMA
from orderedmq.text import TEXTS, narrow, repaired

_TEXT = ("tags", "keys", "sharding_key")
#: The columns that would make RocketMQ's delayed messages.
_DELAYS: Final = ("delay_time_level", "deliver_timestamp")


@functools.cache
def _reserved() -> pa.Array:
    """Return the reserved names. They are not created at import, because importing pandas for ``pa.array`` takes a third of the start-up."""
    return pa.array(sorted(RESERVED_PROPERTIES))


def normalise(
    rows: pa.RecordBatch,
    where: str,
    first: int = 0,
    malformed: Callable[[Sequence[int]], None] | None = None,
    *,
    most_key_bytes: int = MAX_KEY_BYTES,
) -> pa.RecordBatch:
    """Return the producer's columns of ``rows``, checked and in the types of the message schema.

    Reserved properties are removed. Texts that are not UTF-8 are converted (text.py), and ``malformed`` is called with the numbers of
    their rows, beginning with 0. In errors, ``where`` names the target, and ``first`` is the number of the first row. ``most_key_bytes``:
    the limit of tags, keys and sharding keys, which RocketMQ itself does not have.

    Raises SchemaError MISSING_COLUMN, UNKNOWN_COLUMN or WRONG_TYPE, or MessageError NULL_BODY, TOO_LARGE, KEY_TOO_LONG or
    PROPERTIES_TOO_LARGE with the row's number. TOO_LARGE also means that a column has more than 2 GiB.
    """
    rows = select_columns(rows, PRODUCER_COLUMNS, where)
    fields, arrays = [], []
    for name, column in zip(rows.schema.names, rows.columns):
        field = PRODUCER_SCHEMA.field(name)
        column = narrow(column, f"column {name!r} of the rows for {where}")
        if name in TEXTS and not pa.types.is_binary(column.type):
            column, bad = repaired(column)
            if len(bad) and malformed is not None:
                malformed(bad.tolist())
        if not column.type.equals(field.type):
            try:
                column = column.cast(field.type)
            except pa.ArrowException as error:
                raise SchemaError(
                    SchemaCondition.WRONG_TYPE, f"column {name!r} for {where} is {column.type}, not {field.type}"
                ) from error
        fields.append(field)
        arrays.append(column)
    checked = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
    _check_body(checked.column("body"), where, first)
    for name in _TEXT:
        if name in checked.schema.names:
            _check_length(checked.column(name), name, where, first, most_key_bytes)
    if "properties" in checked.schema.names:
        index = checked.schema.get_field_index("properties")
        column = _without_reserved(checked.column(index))
        _check_properties(column, where, first)
        checked = checked.set_column(index, checked.schema.field(index), column)
    return checked


def select_columns(rows: pa.RecordBatch, names: Sequence[str], where: str) -> pa.RecordBatch:
    """Return the columns ``names`` of a producer's rows, without those that are missing.

    Raises SchemaError MISSING_COLUMN without a body, UNKNOWN_COLUMN for a delay, WRONG_TYPE if there are several columns of a name.
    """
    refuse_delays(rows.schema.names, where)
    if "body" not in rows.schema.names:
        raise SchemaError(SchemaCondition.MISSING_COLUMN, f"rows for {where} have no column 'body' (binary or string)")
    chosen = [name for name in names if name in rows.schema.names]
    for name in chosen:
        count = rows.schema.names.count(name)
        if count > 1:
            raise SchemaError(
                SchemaCondition.WRONG_TYPE,
                f"rows for {where} have {count} columns {name!r}. Drop them, or give them other names",
            )
    return rows.select(chosen)


def refuse_unknown(names: Iterable[str], known: Collection[str | None], where: str, remedy: str) -> None:
    """Raise SchemaError UNKNOWN_COLUMN for a column that is not among ``known``. ``remedy``: what else a user can do than to drop it."""
    for name in names:
        if name not in known:
            refuse_delays([name], where)
            raise SchemaError(
                SchemaCondition.UNKNOWN_COLUMN,
                f"column {name!r} is not part of a message. Drop it, put it into body or properties, or {remedy}",
            )


def refuse_delays(names: Collection[str], where: str) -> None:
    """Raise SchemaError UNKNOWN_COLUMN for a column that would delay rows: they would come when they are due, in no order."""
    for name in _DELAYS:
        if name in names:
            raise SchemaError(
                SchemaCondition.UNKNOWN_COLUMN,
                f"rows for {where} have a column {name!r}, but a delayed message has no order. Drop the column and write the rows when they "
                "are due, or send them with RocketMQ's own producer",
            )


def _first(mask: pa.Array) -> int:
    return int(pc.index(mask, True).as_py())


def _check_body(body: pa.Array, where: str, first: int) -> None:
    if body.null_count:
        raise MessageError(
            MessageCondition.NULL_BODY,
            f"row {first + _first(body.is_null())} for {where} has no body. Filter such rows out, or write an empty body (b'')",
        )
    lengths = pc.binary_length(body)
    longest = pc.max(lengths).as_py() or 0
    if longest > MAX_BODY_BYTES:
        row = _first(pc.greater(lengths, MAX_BODY_BYTES))
        raise MessageError(
            MessageCondition.TOO_LARGE,
            f"row {first + row} for {where} has a body of {lengths[row].as_py()} bytes, but at most {MAX_BODY_BYTES} are allowed. Split "
            "it, or write a reference to it",
        )


def _check_length(column: pa.Array, name: str, where: str, first: int, most: int) -> None:
    if column.null_count == len(column):
        return
    lengths = pc.binary_length(column)
    if (pc.max(lengths).as_py() or 0) > most:
        row = _first(pc.fill_null(pc.greater(lengths, most), False))
        raise MessageError(
            MessageCondition.KEY_TOO_LONG,
            f"row {first + row} for {where} has a {name} of {lengths[row].as_py()} bytes, but at most {most} are allowed",
        )


def several_tags(rows: pa.RecordBatch) -> int:
    """Return how many of the rows (as `normalise` returns them) have a tag with a comma or ``||``, probably meant as several tags.

    A message has only one tag, so a filter by one of the parts does not match the message.
    """
    if "tags" not in rows.schema.names:
        return 0
    tags = rows.column(rows.schema.get_field_index("tags"))
    data = tags.buffers()[2]
    if tags.null_count == len(tags) or data is None:
        return 0
    # Such tags are rare, so first search all texts together, which takes a twentieth of the time.
    texts = data.to_pybytes()
    if b"," not in texts and b"|" not in texts:
        return 0
    return int(pc.sum(pc.match_substring_regex(tags, r",|\|\|")).as_py() or 0)


def reserved(names: pa.Array) -> pa.Array:
    """Return for each property name whether it is reserved, so that a user may not set it (`model.is_reserved`)."""
    return pc.or_(pc.is_in(names, value_set=_reserved()), pc.starts_with(names, TRANSIENT_PREFIX))


def _without_reserved(column: pa.Array) -> pa.Array:
    """Return the properties without reserved names, which must not get from a source's rows into a sink's rows."""
    if not pc.any(reserved(column.keys)).as_py():
        return column
    properties = [
        None if pairs is None else [(key, value) for key, value in pairs if not is_reserved(key)]
        for pairs in column.to_pylist()
    ]
    return pa.array(properties, column.type)


def _check_properties(column: pa.Array, where: str, first: int) -> None:
    offsets = column.offsets.to_numpy().astype(np.int64)
    if offsets[-1] == offsets[0]:
        return
    # In a sliced array, ``keys`` and ``items`` still belong to the whole array, and offsets count from their beginning.
    # RocketMQ writes a property as name, value and two separators.
    pairs = (
        pc.fill_null(pc.add(pc.binary_length(column.keys), pc.binary_length(column.items)), 0).to_numpy(zero_copy_only=False)
        + 2
    )
    ends = np.concatenate(([0], np.cumsum(pairs, dtype=np.int64)))
    sizes = ends[offsets[1:]] - ends[offsets[:-1]]
    row = int(np.argmax(sizes))
    if sizes[row] > MAX_PROPERTIES_BYTES:
        raise MessageError(
            MessageCondition.PROPERTIES_TOO_LARGE,
            f"row {first + row} for {where} has properties of {sizes[row]} bytes, but at most {MAX_PROPERTIES_BYTES} are allowed",
        )
