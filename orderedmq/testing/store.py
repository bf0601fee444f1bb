"""A store of the embedded broker in a test's folder, with all methods that a test needs."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from orderedmq.conditions import QueryTestCondition, StoreCondition
from orderedmq.connections import connect
from orderedmq.errors import StoreError
from orderedmq.model import DEAD_LETTER_PREFIX
from orderedmq.rows.given import Row, batches, producer_rows
from orderedmq.schema import MESSAGE_SCHEMA
from orderedmq.spark_support import has_work_left
from orderedmq.testing import failures, kill, queries, session
from orderedmq.testing.kill import After
from orderedmq.testing.queries import QueryTestError
from orderedmq.text import text_of
from orderedmq.tools.audit import require_duckdb
from orderedmq.tools.dead_letters import letter_queues
from orderedmq.tools.producer import Producer
from orderedmq.tools.reader import read

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from orderedmq.testing.queries import Query
from collections.abc import Iterable
from typing import Protocol, TypeAlias, runtime_checkable

import pyarrow as pa

from orderedmq.broker import Log
from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError
from orderedmq.tools.audit import Audit, audit
from orderedmq.tools.audit_sides import Side, TableSide, TopicSide, in_memory, open_table

F = TypeVar("F", bound=Callable[..., Any])

#: Number of queues of a topic that a test creates by producing to it.
_QUEUES = 4


class TemporaryStore:
    """A store of the embedded broker, with the checkpoints of the queries that a test runs over it.

    ``broker`` is the connection (`orderedmq.connect`). Use it for everything that has no method here. ``options`` are the options that
    connect a source or a sink to the store: ``spark.readStream.format("orderedmq").options(**store.options, topic="orders")``.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        """Make a store in ``folder``, which `close` keeps. Without ``folder``, make it in a new folder that `close` removes."""
        self._removed = folder is None
        self.folder = Path(tempfile.mkdtemp(prefix="orderedmq-") if folder is None else folder).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = str(self.folder / "store")
        self.options = {"path": self.path}
        self.broker = connect(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, and remove the folder if it is a temporary one."""
        self.broker.close()
        if self._removed:
            shutil.rmtree(self.folder, ignore_errors=True)

    def produce(self, topic: str, *rows: Row, queues: int = _QUEUES) -> None:
        """Append messages to a topic, in this order. A missing topic is created with ``queues`` queues, even without rows.

        A row is anything that `Producer.send` takes: ``(key, body)``, a dict of columns (``{"body": ..., "sharding_key": ..., "tags": ...,
        "properties": {...}}``), or a table. The key None means no key. Raises SchemaError, MessageError, TopicError.
        """
        messages = producer_rows(list(rows), None, f"topic {topic!r}")
        if topic not in self._topics():
            self.broker.admin.create_topic(topic, queues)
        if rows:
            Producer(self.broker.log, topic).send(messages)

    def messages(self, topic: str) -> list[dict[str, Any]]:
        """Return all messages of a topic, queue by queue, each queue in the order of its offsets.

        A message is a dict of all its columns, as `orderedmq.read` gives it. Dead letters are in the topic ``%DLQ%<group>``. The result is
        empty if the group has none. Raises TopicError, GroupError or StoreError MISSING, so that a wrong name does not look like an empty
        topic.
        """
        if topic.startswith(DEAD_LETTER_PREFIX) and not letter_queues(self.broker, topic.removeprefix(DEAD_LETTER_PREFIX)):
            return []
        return list(read(topic, path=self.path, columns=MESSAGE_SCHEMA.names, order="queue"))

    def by_key(self, topic: str) -> dict[str | None, list[str]]:
        """Return the bodies of a topic's messages as text, in order, by sharding key: ``{"order-1": ["created", "paid"]}``.

        Raises the errors of `messages`.
        """
        bodies: dict[str | None, list[str]] = {}
        for message in self.messages(topic):
            bodies.setdefault(message["sharding_key"], []).append(text_of(message["body"]))
        return bodies

    def run_to_end(
        self, query: Query, spark: SparkSession | None = None, *, checkpoint: str | None = None, timeout: float = 120
    ) -> StreamingQuery:
        """Run a query until all existing messages are processed, and return the query.

        ``query`` is a function that gets the session and ``options``, and returns a writer that is not started:
        ``lambda spark, broker: spark.readStream....writeStream.format(...)``. It may also be such a writer, which needs no ``spark``.
        This method sets the trigger (availableNow) and the checkpoint. The checkpoint is a folder of this store with the name
        ``checkpoint``, by default the name of the function. So a second call resumes where the first one ended.

        Raises Spark's StreamingQueryException if the query fails, and QueryTestError NOT_A_QUERY, or TIMED_OUT after ``timeout``
        seconds.
        """
        writer = queries.writer_of(query, spark, self.options)
        name = checkpoint or queries.checkpoint_of(query)
        while True:
            running = queries.start(writer, self._checkpoint(name))
            queries.finish(running, name, timeout)
            if not has_work_left(running.lastProgress):
                return running

    def kill_in_batch(
        self,
        query: Query,
        spark: SparkSession,
        batch: int = 0,
        *,
        after: After = "written",
        checkpoint: str | None = None,
        timeout: float = 120,
    ) -> StreamingQuery:
        """Kill a query in a micro-batch. Then run it to its end as `run_to_end` does, which repeats that batch from the checkpoint.

        The killed query runs in a separate process, with the settings of ``spark``. SIGKILL ends all its processes (Python, JVM, workers)
        in the micro-batch ``batch``, counted from 0 in this run:

        - ``after="written"``: all rows are processed, and the sink or foreachBatch has written them. Spark has not logged the batch as
          committed, so it runs again.
        - ``after="task"``: at least one task of the batch has ended, and perhaps all.
        - ``after="planned"``: the batch's offsets are logged. Its tasks may have started.

        ``query`` is a function, as for `run_to_end`. It is pickled for the process, together with the functions that it uses and that
        cannot be imported there. ``timeout`` applies to each of the two runs.

        Raises the errors of `run_to_end`, and QueryTestError NOT_KILLED if the query ends before that batch, or FAILED if it fails before.
        """
        if queries.is_writer(query):
            raise QueryTestError(
                QueryTestCondition.NOT_A_QUERY,
                "a writer belongs to the session of this process, which must not be killed. Pass a function of a session and the broker's "
                "options",
            )
        name = checkpoint or queries.checkpoint_of(query)
        place = self._checkpoint(name)
        first = max(queries.batches_in(place, "commits"), default=-1) + 1
        spec = kill.Spec(queries.pickled(query), name, self.options, place, session.settings(spark), first + batch, after)
        kill.run_and_kill(spec, self.folder, timeout)
        return self.run_to_end(query, spark, checkpoint=name, timeout=timeout)

    def fails_once(self, function: F, *, per_key: bool = False, after: bool = False) -> F:
        """Return a function that raises `FailedOnce` at its first call, and otherwise calls ``function``.

        ``function`` is a listener, a function of foreachBatch, or any other function that Spark's processes call. ``per_key``: a listener
        fails at the first call with each sharding key. ``after``: fail after ``function`` has returned, so that the retry repeats its effect.
        Files in this store's folder record the calls, so only one call fails in all processes together, even after restarts. Functions
        with the same name share this record. For an async listener the result is async, and for a listener that is a class it is a class.
        """
        folder = self.folder / "failed"
        folder.mkdir(exist_ok=True)
        failing: F = failures.failing(function, folder, per_key=per_key, after=after)
        return failing

    def assert_same(
        self,
        expected: Given,
        actual: Given,
        *,
        id_field: str | None = None,
        key_column: str = "sharding_key",
        id_column: str | None = None,
        order_column: str | None = None,
    ) -> None:
        """Assert that ``actual`` has exactly the messages of ``expected``, each once, and the messages of each key in order.

        Each side is the name of a topic, the ``Path`` of a Parquet file or directory, rows as for `produce`, or a DataFrame with the
        columns sharding_key and body. Every message is compared. A message is identified by its key and its body, or by the field
        ``id_field`` of JSON bodies. ``key_column``, ``id_column`` and ``order_column`` apply to Parquet, as in the command
        ``orderedmq audit``, which makes the same comparison.

        Needs DuckDB (the extra ``audit``). Raises AssertionError with the first differences of each kind, and OptionError or TopicError if
        a side cannot be read.
        """
        __tracebackhide__ = True
        require_duckdb("assert_same")
        columns = {"key_column": key_column, "id_column": id_column, "order_column": order_column}
        log = self.broker.log
        # Read the ends of ``actual`` first, so that a message that arrives between the two reads is reported as lost, never as unexpected.
        second = side(actual, "actual", log, id_field, columns)
        report = difference(side(expected, "expected", log, id_field, columns), second)
        if report is not None:
            raise AssertionError(report)

    def _topics(self) -> set[str]:
        try:
            return {topic.name for topic in self.broker.log.topics()}
        except StoreError as error:
            # The store does not exist until the first topic is created.
            if error.sub is not StoreCondition.MISSING:
                raise
            return set()

    def _checkpoint(self, name: str) -> Path:
        return self.folder / "checkpoints" / name


@runtime_checkable
class Frame(Protocol):
    """The part of Spark's DataFrame that is used here."""

    def toArrow(self) -> pa.Table: ...


#: The name of a topic, the path of a Parquet file or directory, rows, or a DataFrame.
Given: TypeAlias = str | Path | Iterable[Row] | pa.Table | Frame


def side(given: Given, name: str, log: Log, id_field: str | None, columns: dict[str, Any]) -> Side:
    """Return one side of the comparison. Raises the errors of `tools.audit_sides`.

    ``name``: what the report calls this side if it is neither a topic nor a file.
    """
    if isinstance(given, str):
        if "/" in given:
            raise OptionError(
                OptionCondition.INVALID,
                f"{given!r} is not the name of a topic. For a Parquet file or directory, pass Path({given!r})",
            )
        return TopicSide(log, given, id_field)
    if isinstance(given, Path):
        return TableSide(str(given), open_table(given), id_field=id_field, **columns)
    if isinstance(given, Frame):
        given = given.toArrow()
    rows = [given] if hasattr(given, "__arrow_c_stream__") else list(given)
    return TableSide(name, in_memory(name, batches(rows, name)), id_field=id_field)


def difference(expected: Side, actual: Side) -> str | None:
    """Return a report, or None if ``actual`` has exactly the messages of ``expected``, each once and in the order of its key."""
    report = audit(expected, actual)
    return None if report.ok else told(report)


def told(found: Audit) -> str:
    """Return the findings as lines, each with its first examples."""
    missed = f"{found.actual.name} does not have the messages of {found.expected.name}, each once and in the order of its key"
    lines = [f"{missed}: {found.verdict}"]
    for finding in found.findings:
        if finding.messages:
            lines.append(f"{finding.name}: {finding.messages:,}{finding.note and f' ({finding.note})'}")
            for example in found.examples:
                if example.kind == finding.kind:
                    key = "no key" if example.key is None else f"key {example.key}"
                    lines.append(f"  {example.side}, {example.where}: {key}, {example.id}")
    return "\n".join(lines)
