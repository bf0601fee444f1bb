"""Moves all rows of a queue into one task, in a given order, before they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.types import IntegerType, IntegralType

from ordered_sink.columns import check_order, key_type
from ordered_sink.row_order import sorted_rows
from orderedmq.concise import concise
from orderedmq.conditions import OptionCondition, SchemaCondition
from orderedmq.errors import OptionError, SchemaError
from orderedmq.model import MAX_QUEUES
from orderedmq.options.sink import SinkOptions, SortColumn, parse_buffer_size
from orderedmq.routing.selector import KEYED_SELECTORS, KeyedSelectorName, Keying
from orderedmq.routing.sharding_key import KEY_TYPES, GivenKeyType

_BUFFER: Final = "256m"


def route(
    df: DataFrame,
    order_by: str | Sequence[str],
    *,
    sharding_key: str = "sharding_key",
    queues: int | None = None,
    buffer_size: str = _BUFFER,
    sharding_key_type: GivenKeyType = "auto",
    message_queue_selector: KeyedSelectorName = "hash",
) -> DataFrame:
    """Return ``df`` repartitioned so that one task writes each queue, its rows sorted by ``order_by``.

    ``order_by``: columns, each with ``asc``, ``desc`` or neither, as in the sink's option orderBy: a list, or a text with
    commas. It is required because a shuffle destroys the order of rows. ``sharding_key``: the key's column. ``queues``: the
    target topic's number of queues. Without it, equal keys are still in one task, but several tasks may write to one queue.
    ``buffer_size``: maximum size of the rows that a task holds in memory to sort them, such as ``512k``, at most ``2g``.
    ``sharding_key_type`` and ``message_queue_selector`` are those of the sink's options. Works with streaming and batch
    DataFrames; the columns do not change.

    Raises OptionError INVALID, SchemaError MISSING_COLUMN or WRONG_TYPE immediately; SinkError ORDER_BUFFER_FULL or MessageError
    BAD_KEY when the query runs.
    """
    text = order_by if isinstance(order_by, str) else ", ".join(order_by)
    columns = SinkOptions.parse_order_by(text)
    check_order(df.schema, columns, "route: order_by")
    if sharding_key not in df.columns:
        raise SchemaError(
            SchemaCondition.MISSING_COLUMN, f"route: the rows have no column {sharding_key!r}, only {', '.join(df.columns)}"
        )
    if queues is not None and not 1 <= queues <= MAX_QUEUES:
        raise OptionError(OptionCondition.INVALID, f"route: queues={queues} is not a number of queues. Give 1 to {MAX_QUEUES}")
    if sharding_key_type not in KEY_TYPES:
        raise OptionError(
            OptionCondition.INVALID, f"route: sharding_key_type={sharding_key_type!r} is not auto, text, int or long"
        )
    if message_queue_selector not in KEYED_SELECTORS:
        raise OptionError(
            OptionCondition.INVALID, f"route: message_queue_selector={message_queue_selector!r} is not hash or mod"
        )
    kind = key_type(df.schema, sharding_key, sharding_key_type, message_queue_selector)
    if queues is None:
        together = df.repartition(df[sharding_key])
    else:
        key = df[sharding_key]
        if not isinstance(df.schema[sharding_key].dataType, IntegralType):
            key = key.cast("string")
        together = df.repartitionById(queues, _queue_of(queues, Keying(message_queue_selector, kind))(key))
    return together.mapInArrow(_sorter(columns, parse_buffer_size(buffer_size, "buffer_size")), df.schema)


def _queue_of(queues: int, keying: Keying) -> Callable[..., Any]:
    @arrow_udf(returnType=IntegerType())  # type: ignore[call-overload, untyped-decorator, unused-ignore]
    def queue_of(keys: pa.Array) -> pa.Array:
        # This is the sink's rule. A row without a key goes to the first task, where the sink spreads such rows over queues.
        return pa.array(keying.queues_of(keys, queues, "a batch that route moves").astype("int32"))

    return queue_of  # type: ignore[no-any-return, unused-ignore]


def _sorter(columns: Sequence[SortColumn], limit: int) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    full = (
        f"route holds a task's rows in memory to sort them, but they take more than buffer_size={limit} bytes. Raise it, or "
        "write smaller batches (maxOffsetsPerTrigger)"
    )

    @concise
    def in_order(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return sorted_rows(batches, columns, limit, full)

    return in_order
