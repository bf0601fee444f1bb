"""Spark's micro-batch loop without Spark: the processes of a query in Python, called as Spark's JVM calls them.

`SourceRunner` is PySpark's own source runner, a process that gets Spark's messages over a socket. `Tasks` is a process that runs the
code of Python workers: it reads partitions, calls a listener, writes and commits. A micro-batch takes a few milliseconds instead of
Spark's hundred, so a run can have many of them and shows whether this project's processes leak. Run as a program, this module is the
process of `Tasks`.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Final, Self

import pyarrow as pa
from pyspark import TaskContext
from pyspark.cloudpickle import dumps
from pyspark.sql.streaming import python_streaming_source_runner as runner
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from ordered_sink.commit import StreamWriter
from ordered_source import (
    ConsumeOrderlyContext,
    ConsumeOrderlyStatus,
    OrderPerKey,
    OrderPerQueue,
    consume_orderly,
)
from ordered_source.plan import planned_schema
from ordered_source.stream_reader import StreamReader
from orderedmq.ownership.micro_batch import BATCH, QUERY, RUN
from pyspark_orderedmq import DefaultSource

#: Rows of an Arrow batch: Spark's default.
_ARROW_ROWS: Final = 10_000
#: The orders of the listeners of those kinds that have one.
ORDERS: Final[Mapping[str, OrderPerQueue | OrderPerKey]] = {
    "listener-queue": OrderPerQueue(),
    "listener-key": OrderPerKey(in_batch_attempts=1),
}
_SINK_SCHEMA: Final = StructType([StructField("sharding_key", StringType()), StructField("body", BinaryType())])


class SourceRunner:
    """The source runner of one query. ``folder``: the folder of the files that Spark gives to the runner."""

    def __init__(self, options: Mapping[str, str], folder: Path) -> None:
        # The socket is not in ``folder``, because that path can be too long for a socket (107 characters on Linux).
        with tempfile.TemporaryDirectory() as place, socket.socket(socket.AF_UNIX) as server:
            address = f"{place}/socket"
            server.bind(address)
            server.listen()
            environment = os.environ | {"PYTHON_WORKER_FACTORY_SOCK_PATH": address}
            self._process = subprocess.Popen([sys.executable, "-m", runner.__name__], env=environment, stdin=subprocess.DEVNULL)
            self._socket, _ = server.accept()
        self._file: Any = self._socket.makefile("rwb")
        self.pid = self._int()
        schema = planned_schema(dict(options))
        assert isinstance(schema, StructType)
        # Send Python's release, the folder of added files and their number, the source, its schema, and the rows of an Arrow
        # batch.
        self._text(f"{sys.version_info.major}.{sys.version_info.minor}")
        self._text(str(folder))
        self._number(0)
        self._bytes(dumps(DefaultSource(dict(options))))
        self._text(schema.json())
        self._number(_ARROW_ROWS)
        self._answered()
        self._limit = self._call(runner.GET_DEFAULT_READ_LIMIT_FUNC_ID)

    def initial_offset(self) -> str:
        return self._call(runner.INITIAL_OFFSET_FUNC_ID)

    def latest_offset(self, start: str) -> str:
        return self._call(runner.LATEST_OFFSET_ADMISSION_CONTROL_FUNC_ID, start, self._limit)

    def report_latest_offset(self) -> None:
        self._call(runner.REPORT_LATEST_OFFSET_FUNC_ID)

    def partitions(self, start: str, end: str) -> list[bytes]:
        """Return the partitions of a batch, pickled."""
        self._send(runner.PARTITIONS_FUNC_ID, start, end)
        count = self._answered()
        parts = [self._read(self._int()) for _ in range(count)]
        assert self._int() == runner.PREFETCHED_RECORDS_NOT_FOUND
        return parts

    def commit(self, end: str) -> None:
        self._send(runner.COMMIT_FUNC_ID, end)
        self._answered()

    def close(self) -> None:
        """End the runner as Spark does, by SIGTERM and by closing the connection. Its last answer is not read."""
        self._process.terminate()
        self._socket.shutdown(socket.SHUT_WR)
        self._process.wait()
        self._file.close()
        self._socket.close()

    # -- messages ----------------------------------------------------------------------------------------------------------

    def _call(self, function: int, *texts: str) -> str:
        self._send(function, *texts)
        return self._read(self._answered()).decode()

    def _send(self, function: int, *texts: str) -> None:
        self._number(function)
        for text in texts:
            self._text(text)

    def _answered(self) -> int:
        """Return the first number of an answer. Raises RuntimeError if it announces an error."""
        self._file.flush()
        number = self._int()
        if number < 0:
            raise RuntimeError(self._read(self._int()).decode())
        return number

    def _text(self, text: str) -> None:
        self._bytes(text.encode())

    def _bytes(self, data: bytes) -> None:
        self._number(len(data))
        self._file.write(data)

    def _number(self, number: int) -> None:
        self._file.write(struct.pack("!i", number))

    def _int(self) -> int:
        (number,) = struct.unpack("!i", self._read(4))
        assert isinstance(number, int)
        return number

    def _read(self, size: int) -> bytes:
        found: bytes = self._file.read(size)
        if len(found) < size:
            raise RuntimeError("the source runner has ended")
        return found


class Tasks:
    """A process that runs the tasks of one query. ``kind``: what a task does, as in `soak`."""

    def __init__(self, kind: str, options: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, kind, json.dumps(dict(options))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[1],
        )
        self.pid = self._process.pid

    def run(self, batch: int, parts: Sequence[bytes]) -> int:
        """Run the tasks of a batch. Return the number of their rows. Raises RuntimeError if the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump((batch, parts), self._process.stdin)
        self._process.stdin.flush()
        answer = self._process.stdout.read(8)
        if len(answer) < 8:
            raise RuntimeError("the process of the tasks has ended")
        return int.from_bytes(answer, "big")

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class Query:
    """One query: its runner (except for a sink, whose rows come from Spark), its tasks, and its offsets."""

    def __init__(self, kind: str, options: Mapping[str, str], folder: Path) -> None:
        self.runner = None if kind == "sink" else SourceRunner(options, folder)
        self.tasks = Tasks(kind, options)
        self.batches = self.rows = 0
        self._start = "{}" if self.runner is None else self.runner.initial_offset()
        self._commit: str | None = None

    def trigger(self) -> bool:
        """Make a micro-batch. Return False if there was nothing to read."""
        if self.runner is None:
            self.rows += self.tasks.run(self.batches, [])
            self.batches += 1
            return True
        start, end = self._start, self.runner.latest_offset(self._start)
        if self._commit is not None:
            self.runner.commit(self._commit)
            self._commit = None
        if json.loads(end) == json.loads(start):
            return False
        parts = self.runner.partitions(start, end)
        if parts:
            self.rows += self.tasks.run(self.batches, parts)
        self.runner.report_latest_offset()
        self._start = self._commit = end
        self.batches += 1
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self.runner is not None:
            self.runner.close()
        self.tasks.close()


# --- the process of the tasks


class _Context:
    """Replaces Spark's TaskContext."""

    def __init__(self, batch: int) -> None:
        self._properties = {QUERY: f"soak-{os.getpid()}", BATCH: str(batch), RUN: "run"}

    def partitionId(self) -> int:
        return 0

    def getLocalProperty(self, name: str) -> str | None:
        return self._properties.get(name)


class _Frame:
    """Replaces a DataFrame: ``mapInArrow`` returns the function that a listener's tasks run. The session has no settings."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.columns = columns
        settings: dict[str, str] = {}
        self.sparkSession = SimpleNamespace(conf=settings)

    def mapInArrow(self, run: Any, schema: str) -> Any:
        return run


def listen(messages: Sequence[Any], context: ConsumeOrderlyContext) -> ConsumeOrderlyStatus:
    return ConsumeOrderlyStatus.SUCCESS


def _work(kind: str, options: dict[str, str]) -> None:
    schema = planned_schema(options) if kind != "sink" else _SINK_SCHEMA
    assert isinstance(schema, StructType)
    consume: Any = None
    order = ORDERS.get(kind)
    if order is not None:
        frame: Any = _Frame(schema.names)
        consume = consume_orderly(frame, listen, order)
    context: Any = None
    TaskContext.get = classmethod(lambda cls: context)  # type: ignore[assignment, method-assign]
    while True:
        try:
            batch, parts = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        context = _Context(batch)
        count = 0
        if kind == "sink":
            writer = StreamWriter(options, schema, False)
            row = pa.record_batch({"sharding_key": [f"key-{batch % 100}"], "body": pa.array([b"%d" % batch], pa.binary())})
            writer.commit([writer.write(iter([row]))], batch)
            count = 1
        for part in parts:
            # Create a new reader for each partition, because a Spark worker unpickles one for each task.
            rows: Iterator[pa.RecordBatch] = StreamReader(options, schema).read(pickle.loads(part))
            count += sum(one.num_rows for one in (rows if consume is None else consume(rows)))
        sys.stdout.buffer.write(count.to_bytes(8, "big"))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _work(sys.argv[1], json.loads(sys.argv[2]))
