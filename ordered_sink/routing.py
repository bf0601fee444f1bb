"""Moves all rows of a queue into one task, in a given order, before they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as sql
from pyspark.sql.pandas.functions import pandas_udf
from pyspark.sql.types import DataType, IntegerType, IntegralType, StringType

from ordered_sink.columns import check_order, key_type, sorted_rows
from orderedmq.conditions import OptionCondition, SchemaCondition
from orderedmq.errors import OptionError, SchemaError
from orderedmq.model import MAX_QUEUES
from orderedmq.options.sink import SortColumn, parse_buffer_size, parse_order_by
from orderedmq.routing.selector import KEYED_SELECTORS, KeyedSelectorName, Keying
from orderedmq.routing.sharding_key import KEY_TYPES, GivenKeyType
from orderedmq.spark_support import concise

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
    columns = parse_order_by(text)
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
        of: DataType = df.schema[sharding_key].dataType
        if not isinstance(of, IntegralType):
            of = StringType()
        # Pandas has no integer column with nulls, so nulls are replaced and given separately.
        filled = sql.coalesce(key.cast(of), sql.lit("0").cast(of))
        number = _number_of(queues, Keying(message_queue_selector, kind))(filled, key.isNull())
        together = df.repartition(queues, number)
    return together.mapInArrow(_sorter(columns, parse_buffer_size(buffer_size, "buffer_size")), df.schema)


def _number_of(queues: int, keying: Keying) -> Callable[..., Any]:
    """Return a function of keys, and of whether they are null. Its result is a number that Spark hashes to the task of the key's queue."""
    numbers = numbers_of_tasks(queues)

    def number_of(keys: pd.Series, missing: pd.Series) -> pd.Series:
        of = None if keys.dtype.kind == "i" else pa.string()
        array = pa.array(keys, of, mask=missing.to_numpy(dtype=bool), from_pandas=False)
        # This is the sink's rule. A row without a key goes to the first task, where the sink spreads such rows over queues.
        return pd.Series(numbers[keying.queues_of(array, queues, "a batch that route moves")])

    return pandas_udf(number_of, IntegerType())  # type: ignore[call-overload, no-any-return, unused-ignore]


def numbers_of_tasks(count: int) -> npt.NDArray[np.int32]:
    """Return a number for each of ``count`` tasks: ``repartition(count, number)`` moves rows with that number into that task.

    Spark chooses the task by the hash of the number (Murmur3 with the seed 42) modulo ``count``. Only Spark 4.1 and later can be given the
    task itself.
    """
    numbers = np.full(count, -1, np.int32)
    tried = 0
    while (numbers < 0).any():
        some = np.arange(tried, tried + 8 * count, dtype=np.int32)[::-1]
        numbers[spark_hashes(some).astype(np.int64) % count] = some
        tried += len(some)
    return numbers


def spark_hashes(numbers: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return Spark's hash of each number, as an integer column is hashed."""

    def rotated(value: npt.NDArray[np.uint32], bits: int) -> npt.NDArray[np.uint32]:
        return (value << np.uint32(bits)) | (value >> np.uint32(32 - bits))

    mixed = rotated(numbers.astype(np.uint32) * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    mixed = rotated(np.uint32(42) ^ mixed, 13) * np.uint32(5) + np.uint32(0xE6546B64)
    # The hashed value has four bytes.
    mixed ^= np.uint32(4)
    mixed = (mixed ^ (mixed >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return (mixed ^ (mixed >> np.uint32(16))).view(np.int32)


def _sorter(columns: Sequence[SortColumn], limit: int) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    full = (
        f"route holds a task's rows in memory to sort them, but they take more than buffer_size={limit} bytes. Raise it, or "
        "write smaller batches (maxOffsetsPerTrigger)"
    )

    @concise
    def in_order(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return sorted_rows(batches, columns, limit, full)

    return in_order
