"""``dead_letter``, which writes rows that cannot be processed to the group's dead letters, and returns the other rows of the stream.

Rules: a task decides row by row and keeps the order of the rows that it returns. It writes the dead letters of an Arrow batch before it
returns the batch's other rows, so that the letters are stored before the micro-batch is committed. A letter is identified by (group,
queue, offset). If Spark runs a batch again, no letter is written twice, and a row that became a letter is not returned, even if the
condition has changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sql

from ordered_source.columns import COLUMN_TYPES, TaskLock
from ordered_source.listener.task_rows import (
    NEEDED,
    Columns,
    Rows,
    by_queue,
    lock_of,
    require_columns,
    run_in_tasks,
    write_letters,
)
from orderedmq.conditions import SchemaCondition
from orderedmq.endpoint import Credentials, TlsOptions
from orderedmq.errors import SchemaError
from orderedmq.listening.engine import Message
from orderedmq.model import MAX_OFFSET, OffsetRange
from orderedmq.ownership.lock import LockToken

NAME: Final = "dead_letter"
#: The column that is added to the DataFrame for the tasks: why a row becomes a dead letter, or null for other rows.
_WHY: Final = "__orderedmq_why"


def dead_letter(
    df: DataFrame,
    condition: str | Column,
    error: str | Column = "the message cannot be processed",
    *,
    credentials: Credentials | None = None,
    tls: TlsOptions | None = None,
) -> DataFrame:
    """Write the rows that meet ``condition`` to the topic %DLQ%<group>, and return the other rows in their order.

    ``df`` is a stream of the source with ``includeLockToken=true``, which may have further columns. It needs topic, broker_name,
    queue_id, queue_offset, body and lock_token as they were read, before any shuffle. ``condition`` is a Column or SQL, as in
    ``df.where``: a row becomes a dead letter if the condition is true, and is returned if it is false or null. ``error``, a text for all
    rows or a Column, is the reason in the letter's property ORDEREDMQ_ERROR. A letter has the body from ``df``, its origin, and the
    message's sharding key, tags, keys and properties, which are read from the queue if ``df`` lacks them. ``orderedmq dlq replay`` sends
    it again.

    The letters are stored before the micro-batch is committed. Each one is stored only once, even if Spark runs the batch again (over
    RocketMQ, if it is among the last 32,768 letters of its broker). ``credentials`` and ``tls`` are those of `consume_orderly`.

    Returns a DataFrame with the columns of ``df``. Set a watermark after it, not before. Raises SchemaError MISSING_COLUMN, SchemaError
    WRONG_TYPE if a message's column does not have the type with which it was read, and OptionError UNSUPPORTED with spark.speculation.
    When the query runs, a task raises OptionError UNSUPPORTED for rows that were read without a lock, or with a parking lot or a retry
    topic. It raises OptionError MISSING without the ``credentials`` that the source used, LockError LOST if another owner may have the
    queue, and the broker's error if a letter cannot be stored.
    """
    require_columns(df, NEEDED, NAME)
    for field in df.schema.fields:
        expected = COLUMN_TYPES.get(field.name)
        if expected is not None and field.dataType != expected:
            raise SchemaError(
                SchemaCondition.WRONG_TYPE,
                f"{NAME} needs column {field.name!r} as it was read, with type {expected.simpleString()}, but in the DataFrame it is "
                f"{field.dataType.simpleString()}. Give a decoded column another name",
            )
    text = sql.lit(error) if isinstance(error, str) else sql.coalesce(error.cast("string"), sql.lit(""))
    met = sql.expr(condition) if isinstance(condition, str) else condition

    rows = df.withColumn(_WHY, sql.when(met, text))
    return run_in_tasks(rows, lambda batches: separate(batches, credentials, tls), df.schema, NAME)


def separate(
    batches: Iterator[pa.RecordBatch], credentials: Credentials | None = None, tls: TlsOptions | None = None
) -> Iterator[pa.RecordBatch]:
    """Run one task. It stores dead letters of the rows whose last column is not null, and yields the other rows without that column."""
    letters = _Letters()
    for batch in batches:
        # Refuse rows without a lock before the first dead letter is written.
        pieces = [
            (lock_of(queue, context, credentials, tls, NAME, parks=False), rows) for queue, context, rows in by_queue(batch)
        ]
        passing = [pc.invert(letters.settled(lock, rows)) for lock, rows in pieces]
        for lock, rows in pieces:
            _put(lock, rows.filter(pc.is_valid(rows.column(rows.num_columns - 1))))
        rest = batch.select(batch.schema.names[:-1])
        if not all(pc.all(column).as_py() for column in passing):
            rest = rest.filter(pa.concat_arrays(passing))
        if rest.num_rows:
            yield rest


class _Letters:
    """The dead letters that a task's queues had when the task reached them."""

    def __init__(self) -> None:
        #: For each lock: the lowest offset whose dead letters were requested, and the offsets from there on that have dead letters.
        self._letters: dict[LockToken, tuple[int, pa.Array]] = {}

    def settled(self, lock: TaskLock, rows: pa.RecordBatch) -> pa.Array:
        """Return for each row whether it becomes a dead letter now or became one in an earlier attempt."""
        offsets = rows.column("queue_offset")
        first: int = pc.min(offsets).as_py()
        begin, letters = self._letters.get(lock.token, (MAX_OFFSET, None))
        # Rows may come in any order after a shuffle.
        if first < begin:
            letters = pa.array(lock.broker.groups.letters(lock.token, [OffsetRange(first, MAX_OFFSET)]), pa.int64())
            self._letters[lock.token] = first, letters
        return pc.or_(pc.is_valid(rows.column(rows.num_columns - 1)), pc.is_in(offsets, letters))


def _put(lock: TaskLock, rows: pa.RecordBatch) -> None:
    if rows.num_rows:
        columns = Columns(rows)
        messages = map(Message, columns.get("queue_offset"), repeat(None), repeat(Rows(columns, 0)), range(rows.num_rows))
        write_letters(lock.broker, lock.token, list(messages), columns.get(rows.schema.names[-1]))
