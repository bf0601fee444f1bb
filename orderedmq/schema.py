"""The Arrow schema of messages, the selection of its columns, and batches of messages. Pure.

It is separate from `model`, so that code that needs only names and limits, such as the command's help, does not load pyarrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.conditions import SchemaCondition
from orderedmq.errors import SchemaError

PROPERTIES_TYPE: Final = pa.map_(pa.string(), pa.string())
TIMESTAMP_TYPE: Final = pa.timestamp("us", tz="UTC")

#: The schema of messages between brokers, source and sink. ``properties`` is read only if a user names it.
MESSAGE_SCHEMA: Final = pa.schema(
    [
        pa.field("topic", pa.string()),
        pa.field("broker_name", pa.string()),
        pa.field("queue_id", pa.int32()),
        pa.field("queue_offset", pa.int64()),
        pa.field("body", pa.binary()),
        pa.field("tags", pa.string()),
        pa.field("keys", pa.string()),
        pa.field("sharding_key", pa.string()),
        pa.field("message_id", pa.string()),
        pa.field("born_timestamp", TIMESTAMP_TYPE),
        pa.field("store_timestamp", TIMESTAMP_TYPE),
        pa.field("reconsume_times", pa.int32()),
        pa.field("properties", PROPERTIES_TYPE),
    ]
)
#: The columns that a reader gets by default: all but ``properties``.
DEFAULT_COLUMNS: Final = tuple(name for name in MESSAGE_SCHEMA.names if name != "properties")
#: The columns that a producer may set. The broker sets the others.
PRODUCER_COLUMNS: Final = ("body", "tags", "keys", "sharding_key", "properties")
PRODUCER_SCHEMA: Final = pa.schema([MESSAGE_SCHEMA.field(name) for name in PRODUCER_COLUMNS])


def select_schema(columns: tuple[str, ...]) -> pa.Schema:
    """Return the schema of messages with only ``columns``, in that order.

    Raises SchemaError UNKNOWN_COLUMN if a name is not a column of messages.
    """
    for name in columns:
        if name not in MESSAGE_SCHEMA.names:
            raise unknown_column(name)
    return pa.schema([MESSAGE_SCHEMA.field(name) for name in columns])


def unknown_column(name: str) -> SchemaError:
    """Return the error for a name that is not a column of messages."""
    names = ", ".join(MESSAGE_SCHEMA.names)
    return SchemaError(SchemaCondition.UNKNOWN_COLUMN, f"a message has no column {name!r}: its columns are {names}")


def concat_batches(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Return the rows of batches with one schema as one batch. At least one batch is needed.

    PyArrow has such a function from 19 on, and platforms have older ones. Raises ArrowInvalid if a column gets over 2 GiB.
    """
    return pa.RecordBatch.from_struct_array(pa.concat_arrays([batch.to_struct_array() for batch in batches]))


def null_where(mask: pa.Array, values: pa.Array) -> pa.Array:
    """Return ``values`` with a null where ``mask`` is true or null.

    Before 24, PyArrow returns damaged texts if the other argument of if_else is a scalar null and ``values`` is a slice.
    """
    return pc.if_else(mask, pa.nulls(len(values), values.type), values)


def bounded(batch: pa.RecordBatch, max_bytes: int) -> pa.RecordBatch:
    """Return the first rows, at least one, whose bodies fit into ``max_bytes``; all rows if there is no column body."""
    index = batch.schema.get_field_index("body")
    if index < 0 or batch.num_rows < 2:
        return batch
    sizes = pc.binary_length(batch.column(index))
    if int(pc.sum(sizes).as_py() or 0) <= max_bytes:
        return batch
    sums = pc.cumulative_sum(sizes.cast(pa.int64()))
    return batch.slice(0, max(1, int(pc.sum(pc.less_equal(sums, max_bytes)).as_py() or 0)))
