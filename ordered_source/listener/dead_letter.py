"""``dead_letter``: puts the rows of a stream that cannot be processed into the group's dead letters, and lets the others pass.

Rules: a task decides row by row and keeps the order of what passes. It writes the letters of an Arrow batch before it hands the
batch's other rows on, so they are stored before the micro-batch is committed. A letter is known by (group, queue, offset): a batch
that Spark runs again puts nothing aside twice, and lets nothing pass that it has put aside, even if the condition has changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sql

from ordered_source.columns import COLUMN_TYPES
from ordered_source.listener.rows import Columns, Rows
from ordered_source.listener.tasks import NEEDED, by_queue, lock_of, require_columns, run_in_tasks, write_letters
from ordered_source.read_context import TaskLock
from orderedmq.conditions import SchemaCondition
from orderedmq.endpoint import Credentials, TlsOptions
from orderedmq.errors import SchemaError
from orderedmq.listening.engine import Message
from orderedmq.model import MAX_OFFSET, OffsetRange
from orderedmq.ownership.lock import LockToken

NAME: Final = "dead_letter"
#: The column that tasks get besides those of the DataFrame: why a row becomes a dead letter, null for the others.
_WHY: Final = "__orderedmq_why"


def dead_letter(
    df: DataFrame,
    condition: str | Column,
    error: str | Column = "the message cannot be processed",
    *,
    credentials: Credentials | None = None,
    tls: TlsOptions | None = None,
) -> DataFrame:
    """Put the rows that meet ``condition`` into the topic %DLQ%<group>, and return the other rows, in their order.

    ``df`` is a stream of the source with ``includeLockToken=true`` and whatever columns were added to it. It needs topic,
    broker_name, queue_id, queue_offset, body and lock_token as they were read, before any shuffle. ``condition`` is a Column or SQL, as
    in ``df.where``: a row is put aside if it is true, and passes if it is false or null. ``error`` says why, in the letter's property
    ORDEREDMQ_ERROR: a text for all rows, or a Column. A letter has the body of ``df``, the message's key, tags, keys and properties, which
    are read from the queue where ``df`` lacks them, and its origin. The command sends it again: ``orderedmq dlq replay``.

    The letters are stored before the micro-batch is committed, each once, also if Spark runs the batch again (over RocketMQ, if it
    is among the last 32,768 letters of its broker). ``credentials`` and ``tls`` are those of `consume_orderly`.

    Returns a DataFrame with the columns of ``df``. A watermark belongs behind it. Raises SchemaError MISSING_COLUMN, and WRONG_TYPE if
    a column of the message has another type than the source gives it, and OptionError UNSUPPORTED with spark.speculation. When the query
    runs, a task raises OptionError UNSUPPORTED for rows that were read without a lock, or with a parking lot or a retry topic, MISSING
    without the ``credentials`` that the source used, LockError LOST if another owner may have the queue, and the broker's error if a
    letter cannot be stored.
    """
    require_columns(df, NEEDED, NAME)
    for field in df.schema.fields:
        expected = COLUMN_TYPES.get(field.name)
        if expected is not None and field.dataType != expected:
            raise SchemaError(
                SchemaCondition.WRONG_TYPE,
                f"{NAME} needs column {field.name!r} as it was read, {expected.simpleString()}, the DataFrame has "
                f"{field.dataType.simpleString()}: give what you decode a name of its own",
            )
    text = sql.lit(error) if isinstance(error, str) else sql.coalesce(error.cast("string"), sql.lit(""))
    met = sql.expr(condition) if isinstance(condition, str) else condition

    rows = df.withColumn(_WHY, sql.when(met, text))
    return run_in_tasks(rows, lambda batches: separate(batches, credentials, tls), df.schema, NAME)


def separate(
    batches: Iterator[pa.RecordBatch], credentials: Credentials | None = None, tls: TlsOptions | None = None
) -> Iterator[pa.RecordBatch]:
    """Run one task: store letters of the rows whose last column is not null, and yield the other rows without that column."""
    letters = _Letters()
    for batch in batches:
        # Rows without a lock are refused before the first row is put aside.
        pieces = [
            (lock_of(queue, context, credentials, tls, NAME, parks=False), rows) for queue, context, rows in by_queue(batch)
        ]
        passing = [pc.invert(letters.settled(lock, rows)) for lock, rows in pieces]
        for lock, rows in pieces:
            _put(lock, rows.filter(pc.is_valid(rows.column(rows.num_columns - 1))))
        rest = batch.select(batch.schema.names[:-1])
        if not all(pc.all(one).as_py() for one in passing):
            rest = rest.filter(pa.concat_arrays(passing))
        if rest.num_rows:
            yield rest


class _Letters:
    """The dead letters that a task's queues had when it came to them."""

    def __init__(self) -> None:
        #: The first offset that was asked for, and the offsets with letters.
        self._known: dict[LockToken, tuple[int, pa.Array]] = {}

    def settled(self, lock: TaskLock, rows: pa.RecordBatch) -> pa.Array:
        """Return whether each row is a dead letter, now or since an earlier attempt."""
        offsets = rows.column("queue_offset")
        first: int = pc.min(offsets).as_py()
        begin, found = self._known.get(lock.token, (MAX_OFFSET, None))
        # After a shuffle, rows come in any order.
        if first < begin:
            found = pa.array(lock.broker.groups.letters(lock.token, [OffsetRange(first, MAX_OFFSET)]), pa.int64())
            self._known[lock.token] = first, found
        return pc.or_(pc.is_valid(rows.column(rows.num_columns - 1)), pc.is_in(offsets, found))


def _put(lock: TaskLock, rows: pa.RecordBatch) -> None:
    if rows.num_rows:
        columns = Columns(rows)
        made = map(Message, columns.get("queue_offset"), repeat(None), repeat(Rows(columns, 0)), range(rows.num_rows))
        write_letters(lock.broker, lock.token, list(made), columns.get(rows.schema.names[-1]))
