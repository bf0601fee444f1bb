"""A micro-batch of Spark: what ``foreachBatch`` calls. The rows are read once, and go to the table in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from ordered_sink.once.rule import POSITION_COLUMNS, QUEUE_COLUMNS, Position, Positions, merged, missing, queues_of
from ordered_sink.once.targets import Part, Target, append
from orderedmq.conditions import OptionCondition, SchemaCondition
from orderedmq.errors import OptionError, SchemaError
from orderedmq.model import MessageQueue
from orderedmq.spark_support import concise

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: What a task tells about each queue of a piece of its rows: the position after it, if the table lacks any of them, and their number.
_SUMMARY: Final = pa.schema(
    [
        ("topic", pa.string()),
        ("broker_name", pa.string()),
        ("queue_id", pa.int32()),
        ("next", pa.int64()),
        ("stored", pa.int64()),
        ("left_out", pa.int64()),
    ]
)
_SUMMARY_TYPES: Final = "topic string, broker_name string, queue_id int, next bigint, stored bigint, left_out bigint"
#: In how many parts the rows go through the driver. Each part is a job of Spark.
_PARTS: Final = 8
_TYPES: Final = dict(zip(POSITION_COLUMNS, ("string", "string", "int", "bigint", "timestamp"), strict=True))


class Once:
    """Appends each micro-batch to a table. `once.delta`, `once.iceberg` and `once.sql` return it."""

    def __init__(self, target: Target, shape: Callable[[DataFrame], DataFrame] | None, columns: Sequence[str]) -> None:
        for name in columns:
            if name not in POSITION_COLUMNS:
                raise OptionError(
                    OptionCondition.INVALID,
                    f"columns: {name!r} is not one of {', '.join(POSITION_COLUMNS)}. Drop other columns from the rows, or in shape",
                )
        self.target = target
        self._shape = shape
        self._queues: set[MessageQueue] = set()
        self._dropped = [name for name in POSITION_COLUMNS if name not in columns]

    @concise
    def __call__(self, rows: DataFrame, batch_id: int) -> None:
        """Append the rows of a micro-batch that the table lacks. The number of the batch means nothing to the table."""
        del batch_id
        self._check(rows)
        # Each further look at the rows would read them from the broker, and run the functions of the query, again.
        kept = rows.persist()
        batch = _Batch(kept, self._shaped)
        try:
            append(self.target, batch, self._queues)
        except Exception:
            if batch.failure is None:
                raise
            # The library that was reading the rows has wrapped their error.
            raise batch.failure from None
        finally:
            kept.unpersist()

    def _check(self, rows: DataFrame) -> None:
        types = dict(rows.dtypes)
        for name, expected in _TYPES.items():
            if name not in types:
                raise SchemaError(
                    SchemaCondition.MISSING_COLUMN,
                    f"{self.target.name} needs the column {name!r} of the source to have each message once, but the rows have only "
                    f"{', '.join(types)}. Select it too; columns=[] keeps it out of the table",
                )
            if types[name] != expected:
                raise SchemaError(
                    SchemaCondition.WRONG_TYPE,
                    f"{self.target.name} needs the column {name!r} as the source returns it, {expected}, but it is {types[name]}. Cast it in "
                    "shape",
                )
        if "ticket" in types:
            raise OptionError(
                OptionCondition.UNSUPPORTED,
                f"{self.target.name} cannot get rows of a query with parkingLot, because a parked message comes back after newer ones of its "
                "queue. Read without parkingLot",
            )

    def _shaped(self, rows: DataFrame) -> DataFrame:
        return (rows if self._shape is None else self._shape(rows)).drop(*self._dropped)


class _Batch:
    """The rows of a micro-batch. ``failure``: the error of a Spark job that read them while a library wrote them."""

    def __init__(self, rows: DataFrame, shaped: Callable[[DataFrame], DataFrame]) -> None:
        self._rows, self._shaped = rows, shaped
        self.failure: BaseException | None = None

    @cached_property
    def schema(self) -> pa.Schema:
        return self._shaped(self._rows).limit(0).toArrow().schema

    def missing(self, positions: Positions) -> Part:
        positioned = self._rows.select(*POSITION_COLUMNS)
        queues, moved, left_out = set[MessageQueue](), list[Positions](), 0
        for summary in positioned.mapInArrow(partial(_summary, positions), _SUMMARY_TYPES).toArrow().to_pylist():
            queue = MessageQueue(*(summary[name] for name in QUEUE_COLUMNS))
            queues.add(queue)
            left_out += summary["left_out"]
            if summary["next"] is not None:
                moved.append({queue: Position(summary["next"], summary["stored"])})
        rows = self._rows.mapInArrow(partial(_missing, positions), self._rows.schema) if left_out else self._rows
        return Part(pa.RecordBatchReader.from_batches(self.schema, self._pulled(self._shaped(rows))), merged(moved), queues)

    def _pulled(self, rows: DataFrame) -> Iterator[pa.RecordBatch]:
        """Yield rows. The driver has one part of them at a time."""
        try:
            for row in rows.coalesce(_PARTS).mapInArrow(_pieces, "piece binary").toLocalIterator():
                with pa.ipc.open_stream(row.piece) as piece:
                    for batch in piece:
                        yield from pa.Table.from_batches([batch]).cast(self.schema).to_batches()
        except Exception as error:
            self.failure = error
            raise


# These run in the tasks.


def _summary(positions: Positions, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        mask, moved = missing(batch, positions)
        left_out = batch.num_rows - (pc.sum(mask).as_py() or 0)
        for queue in queues_of(batch):
            at = moved[queue]._asdict() if queue in moved else {}
            yield pa.RecordBatch.from_pylist([{**queue._asdict(), **at, "left_out": left_out}], _SUMMARY)


def _missing(positions: Positions, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield batch.filter(missing(batch, positions)[0])


def _pieces(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield each batch as the bytes of an Arrow stream, so that Spark hands it to the driver as one value."""
    for batch in batches:
        stream = pa.BufferOutputStream()
        with pa.ipc.new_stream(stream, batch.schema) as writer:
            writer.write_batch(batch)
        yield pa.record_batch({"piece": pa.array([stream.getvalue().to_pybytes()], pa.binary())})
