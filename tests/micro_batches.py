"""Spark's micro-batch loop in this process: the real source and sink, called as Spark calls them, without a JVM.

`MicroBatches` is the driver's side: offset log, commit log, and the calls that a source gets because of them. The simulation drives it
step by step. `MicroBatchLoop` is a whole query: it also runs the tasks and the sink. tests/spark/test_micro_batches.py runs one scenario
through this loop and through Spark, and compares the calls.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
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
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.streaming.python_streaming_source_runner import READ_LIMIT_REGISTRY
from pyspark.sql.types import StructType
from pyspark.sql.worker.plan_data_source_read import records_to_arrow_batches

from ordered_source.partition_reader import QueuePartition
from ordered_source.stream_reader import StreamReader
from orderedmq import connections
from orderedmq.ownership.micro_batch import BATCH, QUERY, RUN
from pyspark_orderedmq import DefaultSource

#: Rows of an Arrow batch that Spark makes of single rows; sources that yield Arrow batches choose their own size.
_ARROW_ROWS: Final = 10_000

#: Where a query can be held: a micro-batch is planned, is in the offset log, its tasks are done, the sink has committed it, it is in the
#: commit log; or there was nothing to read.
Point = Literal["planned", "logged", "written", "published", "committed", "idle"]


class AnotherRun(Exception):
    """Another run on the same checkpoint has logged or committed this batch; Spark ends the run that notices it."""


@dataclass
class Checkpoint:
    """Spark's checkpoint: the offset log, and the number of batches in the commit log. ``runs`` counts the runs that were started on it.

    Each batch is logged and committed once. A run that finds a batch there already fails (concurrentStreamLogUpdate).
    """

    #: The end of each batch, as JSON text.
    log: list[str] = field(default_factory=list)
    committed: int = 0
    runs: int = 0
    query_id: str = field(default_factory=lambda: str(uuid.uuid4()))

    def copy(self) -> Checkpoint:
        """A copy of the checkpoint's folder, made now."""
        return Checkpoint(list(self.log), self.committed, self.runs, self.query_id)

    def end(self, batch: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.log[batch])
        return found


class MicroBatches:
    """One run of a query, as its source sees it: which offsets it is asked for, and what Spark writes down between the calls.

    Offsets pass through JSON, as between Spark's processes. A new offset is new if its text differs from that of the last committed one.
    """

    def __init__(self, reader: StreamReader, checkpoint: Checkpoint) -> None:
        self.reader = reader
        self.checkpoint = checkpoint
        checkpoint.runs += 1
        #: The run's number among all runs on the checkpoint.
        self.number = checkpoint.runs
        #: Number of batches that this run knows to be logged, and to be committed.
        self.logged, self.committed = len(checkpoint.log), checkpoint.committed

    def open(self, *, available_now: bool = False) -> ReadLimit:
        """Begin the run. Return the limit that Spark passes to each ``latestOffset``; it asks for it once."""
        if available_now:
            self.reader.prepareForTriggerAvailableNow()
        limit = self.reader.getDefaultReadLimit()
        return READ_LIMIT_REGISTRY.get({**asdict(limit), "_type": type(limit).__name__})  # type: ignore[call-overload]

    @property
    def in_flight(self) -> bool:
        """Whether a batch is logged and not committed. A run that begins so repeats that batch before it asks for offsets."""
        return self.logged > self.committed

    @property
    def start(self) -> dict[str, Any]:
        """The end of the last committed batch. Until batch 0 is committed, the source is asked each time where to begin."""
        if self.committed:
            return self.checkpoint.end(self.committed - 1)
        offset: dict[str, Any] = json.loads(json.dumps(self.reader.initialOffset()))
        return offset

    @property
    def end(self) -> dict[str, Any]:
        """The end of the last logged batch."""
        return self.checkpoint.end(self.logged - 1)

    def latest_offset(self, limit: ReadLimit) -> str | None:
        """Ask for the end of the next batch. None: there is nothing to read."""
        end = json.dumps(self.reader.latestOffset(self.start, limit))
        return end if not self.committed or end != self.checkpoint.log[self.committed - 1] else None

    @property
    def overtaken(self) -> bool:
        """Whether another run has logged the next batch."""
        return self.logged < len(self.checkpoint.log)

    def write_offset_log(self, end: str) -> None:
        """Log a batch. Raises AnotherRun."""
        if self.overtaken:
            raise AnotherRun(f"logged batch {self.logged}")
        self.checkpoint.log.append(end)
        self.logged += 1

    def commit_source(self) -> None:
        """Tell the source that the batch before the one just logged is committed: not sooner, and not before a batch is repeated."""
        if self.committed:
            self.reader.commit(self.checkpoint.end(self.committed - 1))

    def partitions(self) -> Sequence[InputPartition]:
        """Ask for the partitions of the logged batch."""
        return self.reader.partitions(self.start, self.end)

    def write_commit_log(self) -> None:
        """Commit the logged batch. Raises AnotherRun."""
        if self.checkpoint.committed >= self.logged:
            raise AnotherRun(f"committed batch {self.logged - 1}")
        self.checkpoint.committed = self.committed = self.logged


Rows = Callable[[pa.RecordBatch], pa.RecordBatch]
#: A function of foreachBatch: all rows of the batch, and its number.
ForeachBatch = Callable[[pa.Table, int], object]


@dataclass(frozen=True)
class Frame:
    """What a listener needs of a DataFrame: its columns' names, ``mapInArrow``, and a session in which every setting is the default."""

    sparkSession: ClassVar[Any] = SimpleNamespace(conf=SimpleNamespace(get=lambda name, default: default))

    columns: list[str]
    function: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]] | None = None

    def mapInArrow(self, function: Any, schema: str) -> Frame:
        # Only Spark can read the schema's text; the batches have it as well.
        del schema
        return Frame([], function)


@dataclass(frozen=True)
class Batch:
    """A micro-batch that was run: its number, how many rows were read, and the ranges of its tasks, by queue."""

    number: int
    rows: int
    ranges: dict[str, tuple[int, int]]


class MicroBatchLoop:
    """One run of a streaming query that reads orderedmq. Its steps happen when a test asks for them; errors are raised as they are.

    ``source``: the options of the source. ``sink``: the options of a sink orderedmq, a function for foreachBatch, or None (noop).
    ``rows``: what the query does with the rows in between. ``listener``: a function that consumes a `Frame` of these rows, such as a call
    of `consume_orderly`. ``schema``: what ``readStream.schema`` got.
    ``name``: the query's name. ``format``: the data source, for source and sink.
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
    ) -> None:
        self.checkpoint = checkpoint or Checkpoint()
        self.batches: list[Batch] = []
        self.active = True
        self._format = format
        self._source = format(_options(source))
        self._sink = sink
        self._rows: Rows = rows or (lambda batch: batch)
        self._available_now = available_now
        self._name = name
        # What readStream.load() does.
        found = schema or self._source.schema()
        assert isinstance(found, StructType)
        self._schema = found
        empty = to_arrow_schema(found, timezone="UTC").empty_table().combine_chunks().to_batches()
        arrow = empty[0] if empty else pa.RecordBatch.from_pylist([], to_arrow_schema(found, timezone="UTC"))
        self._sink_schema = from_arrow_schema(self._rows(arrow).schema)
        #: What ``mapInArrow`` got, pickled.
        self._mapped: bytes | None = None
        if listener is not None:
            assert not isinstance(sink, Mapping), "outcomes of a listener go to a function"
            self._mapped = cloudpickle.dumps(listener(Frame(self._sink_schema.names)).function)
        self.reader: Any = None
        #: A copy of the reader that tasks get; it is made in another process, once a run.
        self._tasks_reader: bytes | None = None
        self._run_id = str(uuid.uuid4())
        self._points = self._run()

    # -- a test's side -------------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> list[int]:
        """How many rows each batch has read so far, without the batches that had none."""
        return [batch.rows for batch in self.batches if batch.rows]

    def advance(self, point: Point | None = None) -> Point | None:
        """Go on to the next point, or to the next ``point``. Return where the query is; None: it has ended.

        Raises what source, tasks or sink raise; then the query has ended, and its source was stopped.
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
        """Run batches until there is nothing to read; with availableNow, until the query ends."""
        self.advance("idle")
        if self._available_now:
            self.advance()
        return self

    def stop(self) -> None:
        """End the query as ``query.stop()`` does: by SIGTERM to the source's process, which then stops the reader."""
        self._end(terminated=True)

    def kill(self) -> None:
        """Kill Spark: the source's process sees the end of its input and stops the reader, without SIGTERM."""
        self._end(terminated=False)

    # -- Spark's side --------------------------------------------------------------------------------------------------------

    def _run(self) -> Iterator[Point]:
        self.reader = self._source.streamReader(self._schema)
        batches = MicroBatches(self.reader, self.checkpoint)
        limit = batches.open(available_now=self._available_now)
        while True:
            if not batches.in_flight:
                end = batches.latest_offset(limit)
                json.dumps(self.reader.reportLatestOffset())
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

    def _execute(self, batches: MicroBatches) -> Iterator[Point]:
        parts = [pickle.loads(cloudpickle.dumps(part)) for part in batches.partitions()]
        if self._tasks_reader is None:
            copy = pickle.loads(cloudpickle.dumps(self._source))
            self._tasks_reader = cloudpickle.dumps(copy.streamReader(self._schema))
        number = batches.logged - 1
        properties = {QUERY: self.checkpoint.query_id, BATCH: str(number), RUN: self._run_id}
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

        # A batch without partitions has one task all the same.
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
                expected = None if outputs and self._mapped is not None else to_arrow_schema(self._sink_schema, timezone="UTC")
                self._sink(pa.Table.from_batches(outputs, schema=expected), number)
            yield "published"
        ranges = {str(part.queue): (part.begin, part.end) for part in parts if isinstance(part, QueuePartition)}
        self.batches.append(Batch(number, sum(read), ranges))

    def _write(
        self, number: int, inputs: Sequence[Callable[[], Iterator[pa.RecordBatch]]], properties: dict[str, str]
    ) -> Iterator[Point]:
        """Write a batch. One writer is planned for its tasks; the commit gets a writer in another process, and so does the abort."""
        planned = cloudpickle.dumps(self._writer())
        messages: list[WriterCommitMessage | None] = [None] * len(inputs)
        try:
            for place, take in enumerate(inputs):
                with _task(place, properties):
                    messages[place] = pickle.loads(cloudpickle.dumps(pickle.loads(planned).write(take())))
            yield "written"
            self._writer().commit(list(messages), number)
        except Exception:
            self._writer().abort(messages, number)
            raise
        yield "published"

    def _writer(self) -> Any:
        assert isinstance(self._sink, Mapping)
        # Spark lowers the names that it knows itself.
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


def batch_write(source: DataSource, tasks: Sequence[pa.RecordBatch], *, overwrite: bool = False) -> None:
    """Write rows as ``df.write`` does: one writer is planned, its copies write and commit."""
    planned = cloudpickle.dumps(source.writer(from_arrow_schema(tasks[0].schema), overwrite))
    messages: list[WriterCommitMessage | None] = [None] * len(tasks)
    try:
        for place, rows in enumerate(tasks):
            with _task(place, {}):
                messages[place] = pickle.loads(cloudpickle.dumps(pickle.loads(planned).write(iter([rows]))))
        pickle.loads(planned).commit(list(messages))
    except Exception:
        pickle.loads(planned).abort(messages)
        raise


@contextlib.contextmanager
def _task(partition: int, properties: Mapping[str, str]) -> Iterator[None]:
    """Let the code inside be a task of Spark: the real TaskContext, filled in as a Python worker does."""
    before = TaskContext.get()
    TaskContext._setTaskContext(None)
    TaskContext(partitionId=partition, attemptNumber=0, stageId=0, taskAttemptId=partition, localProperties=dict(properties))
    try:
        yield
    finally:
        TaskContext._setTaskContext(before)


def end_workers() -> None:
    """Close the connections that tasks keep, as the end of Spark's Python workers does.

    A store maps 1 TiB of address space, so a process can have about 120 of them open.
    """
    for pid, broker in connections._kept.values():
        if pid == os.getpid():
            broker.close()
    connections._kept.clear()


def _options(given: Mapping[str, object]) -> CaseInsensitiveDict:
    """Options as Spark passes them: names of any case, values as text."""
    out = CaseInsensitiveDict()
    for name, value in given.items():
        out[name] = str(value)
    return out


@contextlib.contextmanager
def _signals_as_before() -> Iterator[None]:
    """Restore the handler of SIGTERM, which a reader replaces in its own process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
