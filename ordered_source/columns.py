"""The message schema in Spark's types, and the columns that a user's schema selects."""

from __future__ import annotations

from typing import Final

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
from orderedmq.model import DEFAULT_COLUMNS
from orderedmq.schema import unknown_column

#: The source's own column: the lock under which a row was read (`lock_token.encode`). Null without a group.
LOCK_TOKEN: Final = "lock_token"

#: The types of all columns that the source gives.
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
}


def full_schema(include_properties: bool, include_lock_token: bool = False) -> StructType:
    """Return the schema of a read without a user's schema."""
    names = (*DEFAULT_COLUMNS, *(("properties",) if include_properties else ()), *((LOCK_TOKEN,) if include_lock_token else ()))
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
                f"column {field.name!r} is {expected.simpleString()}, the schema asks for {field.dataType.simpleString()}: cast it "
                "after reading",
            )
    return tuple(schema.names)


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the batch with exactly Spark's schema: names, nullability and the inner names of maps."""
    columns = [
        column if column.type.equals(field.type) else column.cast(field.type)
        for column, field in zip(batch.columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
