"""Maps the columns of written rows to the parts of a message, checks the columns while the query is planned, and sorts a task's rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    AtomicType,
    BinaryType,
    DataType,
    IntegralType,
    LongType,
    MapType,
    NullType,
    StringType,
    StructType,
)

from orderedmq.conditions import SchemaCondition, SinkCondition
from orderedmq.errors import SchemaError, SinkError
from orderedmq.options.sink import NO_KEY, SinkOptions, SortColumn
from orderedmq.routing.sharding_key import GivenKeyType, KeyType
from orderedmq.rows.message_rows import refuse_unknown
from orderedmq.schema import MESSAGE_SCHEMA, concat_batches

_TEXT: Final = ("tags", "keys", "topic")


@dataclass(frozen=True)
class Plan:
    """The input columns by their role. ``key`` None: rows have no sharding key. ``topic`` None: the option topic names the topic.

    ``key_type``: how keys are hashed.
    """

    key: str | None
    topic: str | None
    key_type: KeyType = "text"


def plan_columns(schema: StructType, options: SinkOptions) -> Plan:
    """Return the columns by role. Raises SchemaError MISSING_COLUMN, UNKNOWN_COLUMN or WRONG_TYPE."""
    names = set(schema.names)
    if "body" not in names:
        raise SchemaError(
            SchemaCondition.MISSING_COLUMN,
            f"the rows have no column 'body' (binary or string), only {', '.join(schema.names) or 'none'}. Make one, for example with "
            "select(to_json(struct('*')).alias('body'))",
        )
    _require(schema, "body", (BinaryType, StringType))
    for name in _TEXT:
        if name in names:
            _require(schema, name, (StringType,))
    if "properties" in names:
        pairs = schema["properties"].dataType
        if not (
            isinstance(pairs, MapType) and isinstance(pairs.keyType, StringType) and isinstance(pairs.valueType, StringType)
        ):
            raise SchemaError(
                SchemaCondition.WRONG_TYPE, f"column 'properties' must be map<string,string>, but it is {pairs.simpleString()}"
            )
    key = _key(schema, options)
    kind: KeyType = "text" if key is None else key_type(schema, key, options.sharding_key_type, options.selector)
    if options.topic is None and "topic" not in names:
        raise SchemaError(
            SchemaCondition.MISSING_COLUMN,
            "the topic to write to is not known. Set option topic, or give the rows a column 'topic' (string)",
        )
    if options.selector == "queueId":
        if "queue_id" not in names:
            raise SchemaError(
                SchemaCondition.MISSING_COLUMN,
                "messageQueueSelector=queueId needs a column 'queue_id' (int)",
            )
        _require(schema, "queue_id", (IntegralType,))
    check_order(schema, options.order_by, "option orderBy")
    columns = {*MESSAGE_SCHEMA.names, key, *(column.name for column in options.order_by)}
    refuse_unknown(schema.names, columns, "the sink", "name it in shardingKey or orderBy")
    return Plan(key, "topic" if options.topic is None else None, kind)


def _key(schema: StructType, options: SinkOptions) -> str | None:
    """Return the column of the sharding key; None if rows have no key. Raises SchemaError MISSING_COLUMN or UNKNOWN_COLUMN."""
    name, has = options.key_column, ", ".join(schema.names)
    if name is None:
        if NO_KEY in schema.names:
            raise SchemaError(
                SchemaCondition.UNKNOWN_COLUMN,
                f"shardingKey={NO_KEY} means that the rows have no key, but they have a column {NO_KEY!r}. Drop it, or give it another name",
            )
        return None
    if name in schema.names:
        return name
    if options.sharding_key is not None:
        raise SchemaError(
            SchemaCondition.MISSING_COLUMN, f"option shardingKey names column {name!r}, but the rows have only {has}"
        )
    if options.needs_key:
        raise SchemaError(
            SchemaCondition.MISSING_COLUMN,
            f"the rows have no column {name!r}, only {has}, and rows without a key have no order. Name the key's column in option shardingKey, "
            f"or set shardingKey={NO_KEY} if they need no order",
        )
    return None


def key_type(schema: StructType, key: str, given: GivenKeyType, selector: str) -> KeyType:
    """Return how a column's keys are hashed. Raises SchemaError WRONG_TYPE."""
    _require(schema, key, (StringType, BinaryType, IntegralType))
    column = schema[key].dataType
    kind: KeyType
    if given != "auto":
        kind = given
    elif isinstance(column, IntegralType):
        kind = "long" if isinstance(column, LongType) else "int"
    else:
        kind = "text"
    if kind == "text" and selector == "mod":
        raise SchemaError(
            SchemaCondition.WRONG_TYPE,
            f"messageQueueSelector=mod needs keys that are whole numbers, but column {key!r} is {column.simpleString()}. Cast it to bigint, or "
            "set shardingKeyType=long",
        )
    return kind


def check_order(schema: StructType, columns: Sequence[SortColumn], what: str) -> None:
    """Check that rows can be sorted by ``columns``, which ``what`` names. Raises SchemaError MISSING_COLUMN or WRONG_TYPE."""
    for name, _ in columns:
        if name not in schema.names:
            raise SchemaError(
                SchemaCondition.MISSING_COLUMN,
                f"{what} names column {name!r}, but the rows have only {', '.join(schema.names)}",
            )
        kind = schema[name].dataType
        if not _sortable(kind):
            raise SchemaError(
                SchemaCondition.WRONG_TYPE,
                f"{what} names column {name!r}, but values of type {kind.simpleString()} cannot be sorted. Name other columns",
            )


def _sortable(kind: DataType) -> bool:
    """Whether Arrow can sort values of this type as Spark does. It knows no collations."""
    if isinstance(kind, StructType):
        return bool(kind.fields) and all(_sortable(field.dataType) for field in kind.fields)
    return isinstance(kind, (AtomicType, NullType)) and not getattr(kind, "collationId", 0)


def _require(schema: StructType, name: str, kinds: tuple[type[DataType], ...]) -> None:
    kind = schema[name].dataType
    if not isinstance(kind, kinds):
        names_of_kinds = " or ".join(sorted({k.__name__.removesuffix("Type").lower() for k in kinds}))
        raise SchemaError(
            SchemaCondition.WRONG_TYPE,
            f"column {name!r} must be {names_of_kinds}, but it is {kind.simpleString()}. Cast it first",
        )


def sorted_rows(
    batches: Iterator[pa.RecordBatch], columns: Sequence[SortColumn], limit: int, full: str
) -> Iterator[pa.RecordBatch]:
    """Yield all rows as one batch, sorted by ``columns`` as Spark sorts; yield nothing if there are no rows.

    Null is less than any value, and NaN greater.

    Raises SinkError ORDER_BUFFER_FULL with the message ``full`` if the rows take more than ``limit`` bytes.
    """
    batches_held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        batches_held.append(batch)
        size += batch.nbytes
        if size > limit:
            raise SinkError(SinkCondition.ORDER_BUFFER_FULL, full)
    if batches_held:
        whole = batches_held[0] if len(batches_held) == 1 else concat_batches(batches_held)
        # Release each copy before the next one is made, because the caller also copies the result.
        batches_held.clear()
        ordered = whole.take(_sorted(whole, columns))
        del batch, whole
        yield ordered


def _sorted(rows: pa.RecordBatch, columns: Sequence[SortColumn]) -> pa.Array:
    """Return the indices of the rows in their order."""
    keys = [
        (key, "descending" if column.descending else "ascending")
        for column in columns
        for key in _comparable(rows.column(rows.schema.get_field_index(column.name)))
    ]
    together = pa.RecordBatch.from_arrays([key for key, _ in keys], names=[str(number) for number in range(len(keys))])
    return pc.sort_indices(together, sort_keys=[(str(number), order) for number, (_, order) in enumerate(keys)])


def _comparable(column: pa.Array) -> Iterator[pa.Array]:
    """Yield arrays that have together the order of the column.

    Arrow puts nulls and NaNs last, in ascending and in descending order.
    """
    if pa.types.is_null(column.type) or column.null_count:
        yield column.is_valid()
    if pa.types.is_struct(column.type):
        for field in column.flatten():
            yield from _comparable(field)
        return
    if pa.types.is_floating(column.type):
        yield pc.is_nan(column)
    if not pa.types.is_null(column.type):
        yield column
