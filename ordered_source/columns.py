"""The message schema in Spark's types, and the columns that a user's schema selects."""

from __future__ import annotations

from typing import Final, NamedTuple

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from orderedmq.conditions import SchemaCondition
from orderedmq.errors import SchemaError
from orderedmq.schema import DEFAULT_COLUMNS, MESSAGE_SCHEMA, unknown_column

#: The column that says how a row was read (`ReadContext.to_text`), or null without a group. Brokers do not have this column.
LOCK_TOKEN: Final = "lock_token"
#: The column with the ticket of a parked message, or null for a message of the queue itself. `LotPlace` describes the ticket's fields.
#: Brokers do not have this column.
TICKET: Final = "ticket"
TICKET_TYPE: Final = pa.struct(
    [("place", pa.int64()), ("attempts", pa.int32()), ("parkings", pa.int32()), ("due", pa.int64()), ("error", pa.string())]
)

#: The types of all columns that the source offers.
COLUMN_TYPES: Final[dict[str, DataType]] = {
    "topic": StringType(),
    "broker_name": StringType(),
    "queue_id": IntegerType(),
    "queue_offset": LongType(),
    "body": BinaryType(),
    "tags": StringType(),
    "keys": StringType(),
    "sharding_key": StringType(),
    "message_id": StringType(),
    "born_timestamp": TimestampType(),
    "store_timestamp": TimestampType(),
    "reconsume_times": IntegerType(),
    "properties": MapType(StringType(), StringType()),
    LOCK_TOKEN: StringType(),
    TICKET: StructType(
        [
            StructField("place", LongType()),
            StructField("attempts", IntegerType()),
            StructField("parkings", IntegerType()),
            StructField("due", LongType()),
            StructField("error", StringType()),
        ]
    ),
}


class LotPlace(NamedTuple):
    """A parked message's position in the parking lot, and the contents of its ticket (`parking.Ticket`).

    ``place``: the message's offset in the parking lot. ``attempts``: failed calls of the listener. ``parkings``: how often the message was
    parked after a failure. ``due``: a time in ms since 1970, or AT_ONCE, HELD or DROPPED.
    """

    place: int
    attempts: int
    parkings: int
    due: int
    error: str


def full_schema(include_properties: bool, include_lock_token: bool = False, include_ticket: bool = False) -> StructType:
    """Return the schema of a read without a user's schema."""
    wanted = {"properties": include_properties, LOCK_TOKEN: include_lock_token, TICKET: include_ticket}
    names = (*DEFAULT_COLUMNS, *(name for name, included in wanted.items() if included))
    return StructType([StructField(name, COLUMN_TYPES[name]) for name in names])


def chosen_columns(schema: StructType) -> tuple[str, ...]:
    """Return the columns named by a user's schema. Raises SchemaError UNKNOWN_COLUMN or WRONG_TYPE."""
    for field in schema.fields:
        expected = COLUMN_TYPES.get(field.name)
        if expected is None:
            raise unknown_column(field.name)
        if field.dataType != expected:
            raise SchemaError(
                SchemaCondition.WRONG_TYPE,
                f"column {field.name!r} is {expected.simpleString()}, but the schema asks for {field.dataType.simpleString()}. Cast it "
                "after reading",
            )
    return tuple(schema.names)


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema that Spark expects of the rows of a read with a schema that `chosen_columns` accepts."""
    own = {LOCK_TOKEN: pa.string(), TICKET: TICKET_TYPE}
    types = {field.name: own.get(field.name) or MESSAGE_SCHEMA.field(field.name).type for field in schema.fields}
    return pa.schema([pa.field(field.name, types[field.name], field.nullable) for field in schema.fields])


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the batch with exactly Spark's schema, including nullability and the names of a map's inner fields."""
    columns = [
        column if column.type.equals(field.type) else column.cast(field.type)
        for column, field in zip(batch.columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
