"""The embedded broker in a folder of a test, and everything that a test does with it."""

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
from orderedmq.testing import comparison, failures, kill, queries, session
from orderedmq.testing.comparison import Given
from orderedmq.testing.kill import After
from orderedmq.testing.problems import QueryTestError
from orderedmq.testing.rows import Row, batches
from orderedmq.text import text_of
from orderedmq.tools.browse import rows_of
from orderedmq.tools.dead_letters import letter_queues
from orderedmq.tools.producer import Producer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from orderedmq.testing.queries import Query

F = TypeVar("F", bound=Callable[..., Any])

#: Queues of a topic that a test makes by producing to it.
_QUEUES = 4


class TemporaryStore:
    """A store of the embedded broker, with the checkpoints of the queries that a test runs over it.

    ``broker`` is the connection (`orderedmq.connect`), for what has no method here. ``options`` are the options by which a source or
    a sink names the broker: ``spark.readStream.format("orderedmq").options(**store.options, topic="orders")``.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        """Make a store in ``folder``, which stays; without one, in a new folder that `close` removes."""
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
        """Close the connection."""
        self.broker.close()
        if self._removed:
            shutil.rmtree(self.folder, ignore_errors=True)

    def produce(self, topic: str, *rows: Row, queues: int = _QUEUES) -> None:
        """Append messages to a topic, in this order. A topic that is missing is made, with ``queues`` queues, also by no rows at all.

        A row is ``(key, body)``, a dict of columns (``{"body": ..., "sharding_key": ..., "tags": ..., "properties": {...}}``, as
        `Producer.send` takes them), or a table or record batch of pyarrow. A body is text, bytes, or a dict or list, which becomes
        JSON. The key None is no key. Raises SchemaError, MessageError, TopicError.
        """
        found = batches(rows, f"topic {topic!r}")
        if topic not in self._topics():
            self.broker.admin.create_topic(topic, queues)
        producer = Producer(self.broker.log, topic)
        for batch in found:
            producer.send(batch)

    def messages(self, topic: str) -> list[dict[str, Any]]:
        """Return the messages that a topic has, one queue after the other, each in the order of its offsets.

        A message is a dict with topic, broker_name, queue_id, queue_offset, sharding_key, tags, keys, body (bytes), store_timestamp
        (µs since 1970), message_id and properties. Dead letters are in the topic ``%DLQ%<group>``, and a group may have none.
        Raises TopicError, GroupError or StoreError MISSING, so that a wrong name is not an empty topic.
        """
        if topic.startswith(DEAD_LETTER_PREFIX):
            queues = letter_queues(self.broker, topic.removeprefix(DEAD_LETTER_PREFIX))
        else:
            queues = self.broker.log.queues(topic)
        bounds = self.broker.log.bounds(queues)
        return [row for queue, at in bounds.items() for row in rows_of(self.broker.log, queue, at.min_offset, at.max_offset)]

    def by_key(self, topic: str) -> dict[str | None, list[str]]:
        """Return the bodies of a topic's messages as text, in order, by their sharding key: ``{"order-1": ["created", "paid"]}``.

        Raises what `messages` raises.
        """
        found: dict[str | None, list[str]] = {}
        for message in self.messages(topic):
            found.setdefault(message["sharding_key"], []).append(text_of(message["body"]))
        return found

    def run_to_end(
        self, query: Query, spark: SparkSession | None = None, *, checkpoint: str | None = None, timeout: float = 120
    ) -> StreamingQuery:
        """Run a query until everything that is there is processed, and return it.

        ``query`` is a function that gets the session and ``options``, and returns a writer that is not started:
        ``lambda spark, broker: spark.readStream....writeStream.format(...)``. A writer itself will do as well, without ``spark``. The
        test sets the trigger (availableNow) and the checkpoint, a folder of this store that has the name of the function, or
        ``checkpoint``. So a second call resumes where the first has ended.

        Raises Spark's StreamingQueryException if the query fails; QueryTestError NOT_A_QUERY, and TIMED_OUT after ``timeout`` seconds.
        """
        writer = queries.writer_of(query, spark, self.options)
        name = checkpoint or queries.checkpoint_of(query)
        running = queries.start(writer, self._checkpoint(name))
        queries.finish(running, name, timeout)
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
        """Kill a query in a micro-batch, then run it to its end as `run_to_end` does, which repeats that batch from the checkpoint.

        The query runs in a process of its own, with the settings of ``spark``. All its processes (Python, JVM, workers) are ended by SIGKILL
        in the micro-batch ``batch``, counted from 0 in this run:

        - ``after="written"``: all rows are processed, and the sink or foreachBatch has written them. Spark has not logged the batch as
          committed, so it comes again.
        - ``after="task"``: at least one task of the batch has ended, and perhaps all.
        - ``after="planned"``: the batch's offsets are logged. Its tasks may have begun.

        ``query`` is a function, as for `run_to_end`, which is pickled for that process; so are the functions that it uses, unless they can
        be imported there. ``timeout`` holds for each of the two runs.

        Raises what `run_to_end` raises; QueryTestError NOT_KILLED if the query ends before that batch, FAILED if it fails before.
        """
        if queries.is_writer(query):
            raise QueryTestError(
                QueryTestCondition.NOT_A_QUERY,
                "a writer belongs to the session of this process, which stays alive: pass a function of a session and the broker's options",
            )
        name = checkpoint or queries.checkpoint_of(query)
        place = self._checkpoint(name)
        first = max(queries.batches_in(place, "commits"), default=-1) + 1
        spec = kill.Spec(queries.pickled(query), name, self.options, place, session.settings(spark), first + batch, after)
        kill.run_and_kill(spec, self.folder, timeout)
        return self.run_to_end(query, spark, checkpoint=name, timeout=timeout)

    def fails_once(self, function: F, *, per_key: bool = False, after: bool = False) -> F:
        """Return a function that raises `FailedOnce` at its first call, and then does what ``function`` does.

        ``function`` is a listener, a function of foreachBatch, or any other that Spark's processes call. ``per_key``: a listener fails at
        the first call with each sharding key. ``after``: the function is called before it fails, so that its effect comes twice.
        Files of this store remember the calls, so all processes have one first call, also across restarts. Functions of one name
        share it. A listener that is a class stays one.
        """
        folder = self.folder / "failed"
        folder.mkdir(exist_ok=True)
        make: Any = failures.failing_class if isinstance(function, type) else failures.FailsOnce
        made: F = make(function, folder, per_key=per_key, after=after)
        return made

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
        """Assert that ``actual`` has the messages of ``expected`` and no others, each once, and those of a key in their order.

        Each is a topic's name, the ``Path`` of a Parquet file or directory, or rows as `produce` takes them, also a DataFrame with the
        columns sharding_key and body. Messages are compared, not totals. A message is known by its key and its body, or by the field
        ``id_field`` of JSON bodies. ``key_column``, ``id_column`` and ``order_column`` are those of Parquet, as in the command
        ``orderedmq audit``, which makes the same comparison.

        Raises AssertionError, with the first differences of each kind; OptionError and TopicError for what cannot be compared.
        """
        __tracebackhide__ = True
        columns = {"key_column": key_column, "id_column": id_column, "order_column": order_column}
        log = self.broker.log
        # The ends of ``actual`` are read first: a message that arrives meanwhile can then be missing there, but never unexpected.
        second = comparison.side(actual, "actual", log, id_field, columns)
        found = comparison.difference(comparison.side(expected, "expected", log, id_field, columns), second)
        if found is not None:
            raise AssertionError(found)

    def _topics(self) -> set[str]:
        try:
            return {topic.name for topic in self.broker.log.topics()}
        except StoreError as error:
            # The first topic makes the store.
            if error.sub is not StoreCondition.MISSING:
                raise
            return set()

    def _checkpoint(self, name: str) -> Path:
        return self.folder / "checkpoints" / name
