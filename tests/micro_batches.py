"""Spark's micro-batch loop in this process: the real source and sink, called as Spark calls them, without a JVM.

`MicroBatches` is the driver's part: the offset log, the commit log, and the calls that the source gets because of them. The
simulation runs it step by step. `OlderMicroBatches` is that of Spark 4.0 and 4.1. `MicroBatchLoop` is a whole query: it also runs the
tasks and the sink. tests/live/spark/test_micro_batches.py runs one scenario through this loop and through Spark, and compares the calls.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, Final, Literal, Self

import pyarrow as pa
from pyspark import TaskContext, cloudpickle
from pyspark.sql.datasource import CaseInsensitiveDict, DataSource, InputPartition, WriterCommitMessage
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.streaming import python_streaming_source_runner as runner
from pyspark.sql.types import StructType
from pyspark.sql.worker.plan_data_source_read import records_to_arrow_batches

from ordered_sink.commit import COMMITTER
from ordered_source.columns import arrow_schema
from ordered_source.older_spark import PASSES_START, ReadLimit, called_without_start
from ordered_source.partition_reader import QueuePartition
from ordered_source.stream_reader import StreamReader
from orderedmq import connections
from orderedmq.ownership.micro_batch import BATCH, QUERY, RUN
from pyspark_orderedmq import DefaultSource

#: The number of rows in an Arrow batch that Spark builds from single rows. Sources that yield Arrow batches choose their own size.
_ARROW_ROWS: Final = 10_000

#: Where a query can be paused: a micro-batch is planned; it is in the offset log; its tasks have ended; the sink has committed
#: it; it is in the commit log; or there was nothing to read.
Point = Literal["planned", "logged", "written", "published", "committed", "idle"]


class AnotherRun(Exception):
    """Another run on the same checkpoint has logged or committed this batch. Spark ends the run that notices this."""


@dataclass
class Checkpoint:
    """Spark's checkpoint: the offset log, and the number of batches in the commit log. ``runs``: how many runs were started on it.

    Each batch is logged and committed once. A run that finds its batch already logged or committed fails
    (concurrentStreamLogUpdate).
    """

    #: The end of each batch, as JSON text.
    log: list[str] = field(default_factory=list)
    committed: int = 0
    runs: int = 0
    query_id: str = field(default_factory=lambda: str(uuid.uuid4()))

    def copy(self) -> Checkpoint:
        """A copy of the checkpoint in its present state."""
        return Checkpoint(list(self.log), self.committed, self.runs, self.query_id)

    def end(self, batch: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.log[batch])
        return found


class MicroBatches:
    """One run of a query, as its source sees it: the calls that the source gets, and what Spark logs between them.

    Offsets pass through JSON, as between Spark's processes. An offset counts as new if its text differs from that of the last
    committed one.
    """

    def __init__(self, reader: StreamReader, checkpoint: Checkpoint) -> None:
        self.reader = reader
        self.checkpoint = checkpoint
        checkpoint.runs += 1
        #: The run's number among all runs on the checkpoint.
        self.number = checkpoint.runs
        #: The numbers of logged and of committed batches that this run knows of.
        self.logged, self.committed = len(checkpoint.log), checkpoint.committed

    def open(self, *, available_now: bool = False) -> ReadLimit:
        """Begin the run. Return the limit that Spark passes to each ``latestOffset``; Spark asks the source for it once."""
        if available_now:
            self.reader.prepareForTriggerAvailableNow()
        limit = self.reader.getDefaultReadLimit()
        return runner.READ_LIMIT_REGISTRY.get({**asdict(limit), "_type": type(limit).__name__})  # type: ignore[call-overload]

    @property
    def in_flight(self) -> bool:
        """Whether a batch is logged and not committed. A run that begins in this state repeats that batch before it asks for offsets."""
        return self.logged > self.committed

    @property
    def start(self) -> dict[str, Any]:
        """The end of the last committed batch. Until batch 0 is committed, each call asks the source for its initial offset."""
        if self.committed:
            return self.checkpoint.end(self.committed - 1)
        offset: dict[str, Any] = json.loads(json.dumps(self.reader.initialOffset()))
        return offset

    @property
    def end(self) -> dict[str, Any]:
        """The end of the last logged batch."""
        return self.checkpoint.end(self.logged - 1)

    def latest_offset(self, limit: ReadLimit) -> str | None:
        """Ask for the end of the next batch. Return None if there is nothing to read."""
        end = json.dumps(self.reader.latestOffset(self.start, limit))
        return end if not self.committed or end != self.checkpoint.log[self.committed - 1] else None

    @property
    def overtaken(self) -> bool:
        """Whether another run has logged the next batch."""
        return self.logged < len(self.checkpoint.log)

    def write_offset_log(self, end: str) -> None:
        """Log a batch. Raises AnotherRun if another run has logged it."""
        if self.overtaken:
            raise AnotherRun(f"logged batch {self.logged}")
        self.checkpoint.log.append(end)
        self.logged += 1

    def commit_source(self) -> None:
        """Tell the source that the batch before the last logged one is committed. Like Spark, do not call this before a repeated batch."""
        if self.committed:
            self.reader.commit(self.checkpoint.end(self.committed - 1))

    def report_latest_offset(self) -> None:
        json.dumps(self.reader.reportLatestOffset())

    def partitions(self) -> Sequence[InputPartition]:
        """Ask for the partitions of the logged batch."""
        return self.reader.partitions(self.start, self.end)

    def write_commit_log(self) -> None:
        """Commit the logged batch. Raises AnotherRun if another run has committed it."""
        if self.checkpoint.committed >= self.logged:
            raise AnotherRun(f"committed batch {self.logged - 1}")
        self.checkpoint.committed = self.committed = self.logged


class OlderMicroBatches(MicroBatches):
    """A run in Spark 4.0 or 4.1, which tells the source where the query stands by asking for the partitions of an empty range.

    ``latestOffset`` has no arguments.
    """

    def open(self, *, available_now: bool = False) -> Any:
        """Begin the run. Spark does not say that the trigger is availableNow."""
        del available_now
        if self.logged:
            assert not self.reader.partitions(self.end, self.end)

    def latest_offset(self, limit: Any) -> str | None:
        del limit
        reader: Any = self.reader
        end = json.dumps(reader.latestOffset())
        return end if not self.committed or end != self.checkpoint.log[self.committed - 1] else None

    def report_latest_offset(self) -> None:
        """Do nothing. Spark reports the answer of ``latestOffset``."""


Rows = Callable[[pa.RecordBatch], pa.RecordBatch]
#: A function of foreachBatch: all rows of the batch, and its number.
ForeachBatch = Callable[[pa.Table, int], object]


@dataclass(frozen=True)
class Frame:
    """The parts of a DataFrame that a listener needs: its columns' names, ``mapInArrow``, and a session with default settings."""

    sparkSession: ClassVar[Any] = SimpleNamespace(conf=SimpleNamespace(get=lambda name, default: default))

    columns: list[str]
    function: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]] | None = None

    def mapInArrow(self, function: Any, schema: str) -> Frame:
        # Only Spark can parse the schema's text. The batches themselves have the schema.
        del schema
        return Frame([], function)


@dataclass(frozen=True)
class Batch:
    """A micro-batch that has run: its number, the number of rows read, and the ranges of its tasks by queue."""

    number: int
    rows: int
    ranges: dict[str, tuple[int, int]]


class MicroBatchLoop:
    """One run of a streaming query that reads orderedmq. Its steps happen when a test asks for them; errors are raised unchanged.

    ``source``: the options of the source. ``sink``: the options of an orderedmq sink, a function for foreachBatch, or None
    (noop). ``rows``: a transformation of the rows between source and sink. ``listener``: a function that consumes a `Frame` of
    the transformed rows, such as a call of `consume_orderly`. ``schema``: the argument of ``readStream.schema``. ``name``: the
    query's name. ``format``: the data source, for source and sink. ``older``: run as Spark 4.0 and 4.1 do, where a run with
    ``available_now`` has one micro-batch.
    """

    def __init__(
        self,
        source: Mapping[str, object],
        sink: Mapping[str, object] | ForeachBatch | None = None,
        checkpoint: Checkpoint | None = None,
        *,
        rows: Rows | None = None,
        listener: Callable[[Any], Any] | None = None,
        schema: StructType | None = None,
        available_now: bool = False,
        name: str | None = None,
        format: type[DataSource] = DefaultSource,
        older: bool = not PASSES_START,
    ) -> None:
        self.checkpoint = checkpoint or Checkpoint()
        self._older = older
        self.batches: list[Batch] = []
        self.active = True
        self._format = format
        self._source = format(_options(source))
        self._sink = sink
        self._rows: Rows = rows or (lambda batch: batch)
        self._available_now = available_now
        self._name = name
        # The following lines do the work of readStream.load().
        found = schema or self._source.schema()
        assert isinstance(found, StructType)
        self._schema = found
        empty = arrow_schema(found).empty_table().combine_chunks().to_batches()
        arrow = empty[0] if empty else pa.RecordBatch.from_pylist([], arrow_schema(found))
        self._sink_schema = from_arrow_schema(self._rows(arrow).schema)
        #: The function that was passed to ``mapInArrow``, pickled.
        self._mapped: bytes | None = None
        if listener is not None:
            assert not isinstance(sink, Mapping), (
                "with a listener, the sink must be a function: it gets the listener's outcomes"
            )
            self._mapped = cloudpickle.dumps(listener(Frame(self._sink_schema.names)).function)
        self.reader: Any = None
        #: The pickled copy of the reader that tasks get. It is made in another process, once per run.
        self._tasks_reader: bytes | None = None
        self._run_id = str(uuid.uuid4())
        #: The local properties of the current batch's jobs, and of those that a function of foreachBatch starts.
        self.properties: Mapping[str, str] = {}
        self._points = self._run()

    # -- for tests -----------------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> list[int]:
        """The number of rows of each batch so far, without empty batches."""
        return [batch.rows for batch in self.batches if batch.rows]

    def advance(self, point: Point | None = None) -> Point | None:
        """Run to the next point, or to the next ``point``. Return the point that the query reached; None if the query has ended.

        Raises the errors of source, tasks and sink. After an error the query has ended, and its source is stopped.
        """
        with _signals_as_before():
            try:
                for at in self._points:
                    if point is None or at == point:
                        return at
            except BaseException:
                self._end(terminated=True)
                raise
        self._end(terminated=True)
        assert point is None or self._available_now, "the query has ended"
        return None

    def process_all_available(self) -> Self:
        """Run batches until there is nothing to read. With availableNow, run until the query ends."""
        self.advance("idle")
        if self._available_now:
            self.advance()
        return self

    def stop(self) -> None:
        """End the query as ``query.stop()`` does: by SIGTERM to the source's process, which then stops the reader."""
        self._end(terminated=True)

    def kill(self) -> None:
        """End the query as if Spark had died: the source's process sees the end of its input and stops the reader, without SIGTERM."""
        self._end(terminated=False)

    # -- as in Spark ----------------------------------------------------------------------------------------------------------

    def _run(self) -> Iterator[Point]:
        self.reader = self._source.streamReader(self._schema)
        if self._older and PASSES_START:
            self.reader.__class__ = called_without_start(type(self.reader))
        batches = (OlderMicroBatches if self._older else MicroBatches)(self.reader, self.checkpoint)
        limit = batches.open(available_now=self._available_now)
        while True:
            if not batches.in_flight:
                end = batches.latest_offset(limit)
                batches.report_latest_offset()
                if end is None:
                    yield "idle"
                    if self._available_now:
                        return
                    continue
                yield "planned"
                batches.write_offset_log(end)
                yield "logged"
                batches.commit_source()
            yield from self._execute(batches)
            batches.write_commit_log()
            yield "committed"
            if self._older and self._available_now:
                return

    def _execute(self, batches: MicroBatches) -> Iterator[Point]:
        parts = [pickle.loads(cloudpickle.dumps(part)) for part in batches.partitions()]
        if self._tasks_reader is None:
            copy = pickle.loads(cloudpickle.dumps(self._source))
            self._tasks_reader = cloudpickle.dumps(copy.streamReader(self._schema))
        number = batches.logged - 1
        self.properties = properties = {QUERY: self.checkpoint.query_id, BATCH: str(number), RUN: self._run_id}
        read: list[int] = []

        def rows(part: InputPartition) -> Iterator[pa.RecordBatch]:
            assert self._tasks_reader is not None
            found = pickle.loads(self._tasks_reader).read(part)
            for batch in records_to_arrow_batches(found, _ARROW_ROWS, self._schema, self._source):
                read.append(batch.num_rows)
                yield self._rows(batch)

        def task(part: InputPartition | None) -> Iterator[pa.RecordBatch]:
            found = iter(()) if part is None else rows(part)
            if self._mapped is None:
                return found
            mapped: Iterator[pa.RecordBatch] = pickle.loads(self._mapped)(found)
            return mapped

        # Spark runs one task even for a batch without partitions.
        inputs = [partial(task, part) for part in parts or [None]]
        if isinstance(self._sink, Mapping):
            yield from self._write(number, inputs, properties)
        else:
            outputs: list[pa.RecordBatch] = []
            for place, take in enumerate(inputs):
                with _task(place, properties):
                    outputs += take()
            yield "written"
            if self._sink is not None:
                expected = None if outputs and self._mapped is not None else _utc_schema(self._sink_schema)
                self._sink(pa.Table.from_batches(outputs, schema=expected), number)
            yield "published"
        ranges = {str(part.queue): (part.begin, part.end) for part in parts if isinstance(part, QueuePartition)}
        self.batches.append(Batch(number, sum(read), ranges))

    def _write(
        self, number: int, inputs: Sequence[Callable[[], Iterator[pa.RecordBatch]]], properties: dict[str, str]
    ) -> Iterator[Point]:
        """Write a batch. One writer is planned for all tasks. The commit and the abort each get a writer in another process."""
        planned = cloudpickle.dumps(self._writer())
        messages: list[WriterCommitMessage | None] = [None] * len(inputs)
        try:
            for place, take in enumerate(inputs):
                with _task(place, properties):
                    messages[place] = pickle.loads(cloudpickle.dumps(pickle.loads(planned).write(take())))
            yield "written"
            self._committer().commit(list(messages), number)
        except Exception:
            self._committer().abort(messages, number)
            raise
        yield "published"

    def _committer(self) -> Any:
        # Pretend that this is a process of Spark that commits or aborts.
        sys.modules[COMMITTER] = sys
        try:
            return self._writer()
        finally:
            del sys.modules[COMMITTER]

    def _writer(self) -> Any:
        assert isinstance(self._sink, Mapping)
        # Spark itself lower-cases the names of the options that it knows.
        more = {"checkpointlocation": f"file:/checkpoints/{self.checkpoint.query_id}"}
        if self._name is not None:
            more["queryname"] = self._name
        return self._format(_options({**self._sink, **more})).streamWriter(schema=self._sink_schema, overwrite=False)

    def _end(self, *, terminated: bool) -> None:
        if not self.active:
            return
        self.active = False
        self._points = iter(())
        if self.reader is None:
            return
        with _signals_as_before():
            if terminated:
                with contextlib.suppress(SystemExit):
                    self.reader._terminate(signal.SIGTERM, None)
            self.reader.stop()


def batch_write(
    source: DataSource, tasks: Sequence[pa.RecordBatch], *, overwrite: bool = False, properties: Mapping[str, str] = {}
) -> None:
    """Write rows as ``df.write`` does: one writer is planned, and its copies write and commit. ``properties``: the job's."""
    planned = cloudpickle.dumps(source.writer(from_arrow_schema(tasks[0].schema), overwrite))
    messages: list[WriterCommitMessage | None] = [None] * len(tasks)
    try:
        for place, rows in enumerate(tasks):
            with _task(place, properties):
                messages[place] = pickle.loads(cloudpickle.dumps(pickle.loads(planned).write(iter([rows]))))
        pickle.loads(planned).commit(list(messages))
    except Exception:
        pickle.loads(planned).abort(messages)
        raise


def _utc_schema(schema: StructType) -> pa.Schema:
    more: dict[str, Any] = {"timezone": "UTC"} if PASSES_START else {}
    return to_arrow_schema(schema, **more)


@contextlib.contextmanager
def _task(partition: int, properties: Mapping[str, str]) -> Iterator[None]:
    """Run the body as a Spark task, with the real TaskContext, filled in as a Python worker does."""
    before = TaskContext.get()
    TaskContext._setTaskContext(None)
    known = {
        "partitionId": partition,
        "attemptNumber": 0,
        "stageId": 0,
        "taskAttemptId": partition,
        "localProperties": dict(properties),
    }
    if PASSES_START:
        TaskContext(**known)
    else:
        # Before 4.2, a worker sets these attributes itself.
        vars(TaskContext()).update({f"_{name}": value for name, value in known.items()})
    try:
        yield
    finally:
        TaskContext._setTaskContext(before)


def end_workers() -> None:
    """Close the connections that tasks keep open, as happens when Spark's Python workers end.

    A store maps 1 TiB of address space, so a process can have only about 120 stores open.
    """
    for pid, broker in connections._cached.values():
        if pid == os.getpid():
            broker.close()
    connections._cached.clear()


def _options(given: Mapping[str, object]) -> CaseInsensitiveDict:
    """Options as Spark passes them: names are case-insensitive, and values are text."""
    out = CaseInsensitiveDict()
    for name, value in given.items():
        out[name] = str(value)
    return out


@contextlib.contextmanager
def _signals_as_before() -> Iterator[None]:
    """Restore this process's handler of SIGTERM afterwards, because a reader replaces it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
