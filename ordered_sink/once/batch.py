"""A micro-batch of Spark: what ``foreachBatch`` calls. The rows are read once, and go to the table in pieces."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence, Set
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from ordered_sink.once.rule import POSITION_COLUMNS, Position, Positions, merged, missing, queues_of
from ordered_sink.once.targets import Part, Target, append
from orderedmq.conditions import OptionCondition, SchemaCondition
from orderedmq.errors import OptionError, SchemaError
from orderedmq.model import MessageQueue
from orderedmq.spark_support import concise

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

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
        #: The queues of earlier micro-batches. The set never changes, because several queries may use this object at the same time.
        self._queues: Set[MessageQueue] = frozenset()
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
            self._queues = append(self.target, batch, self._queues)
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
                    f"{self.target.name} needs the source's column {name!r} to have each message once, but the rows have only "
                    f"{', '.join(types)}. Select it too; columns=[] keeps it out of the table",
                )
            if types[name] != expected:
                raise SchemaError(
                    SchemaCondition.WRONG_TYPE,
                    f"{self.target.name} needs the column {name!r} as the source returns it, {expected}, but it is {types[name]}",
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
        summaries = self._rows.select(*POSITION_COLUMNS).mapInArrow(partial(_summary, positions), "summary string").toArrow()
        queues, moved, left_out = set[MessageQueue](), list[Positions](), 0
        for text in summaries["summary"].to_pylist():
            summary = json.loads(text)
            queues.update(MessageQueue(*queue) for queue in summary["queues"])
            moved.append({MessageQueue(*queue): Position(*at) for queue, at in summary["moved"]})
            left_out += summary["left_out"]
        rows = self._rows.mapInArrow(partial(_missing, positions), self._rows.schema) if left_out else self._rows
        return Part(pa.RecordBatchReader.from_batches(self.schema, self._pulled(self._shaped(rows))), merged(moved), queues)

    def _pulled(self, rows: DataFrame) -> Iterator[pa.RecordBatch]:
        """Yield the rows of each part as one batch, because deltalake changes the order of batches. The driver has one part at a time."""
        part: list[pa.RecordBatch] = []
        try:
            for row in rows.coalesce(_PARTS).mapInArrow(_pieces, "piece binary").toLocalIterator():
                if row.piece is not None:
                    with pa.ipc.open_stream(row.piece) as piece:
                        part += piece
                else:
                    yield from pa.Table.from_batches(part).cast(self.schema).combine_chunks().to_batches()
                    part.clear()
        except Exception as error:
            self.failure = error
            raise


# These run in the tasks.


def _summary(positions: Positions, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield for each batch its queues, the positions after it, and how many of its rows the table has."""
    for batch in batches:
        mask, moved = missing(batch, positions)
        left_out = batch.num_rows - (pc.sum(mask).as_py() or 0)
        summary = {"queues": queues_of(batch), "moved": list(moved.items()), "left_out": left_out}
        yield pa.record_batch({"summary": [json.dumps(summary)]})


def _missing(positions: Positions, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield batch.filter(missing(batch, positions)[0])


def _pieces(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield each batch as the bytes of an Arrow stream, so that Spark hands it to the driver as one value, and null after the last one."""
    piece = None
    for batch in batches:
        stream = pa.BufferOutputStream()
        with pa.ipc.new_stream(stream, batch.schema) as writer:
            writer.write_batch(batch)
        piece = stream.getvalue().to_pybytes()
        yield pa.record_batch({"piece": pa.array([piece], pa.binary())})
    if piece is not None:
        yield pa.record_batch({"piece": pa.nulls(1, pa.binary())})
