"""Makes the writer of a test's query, and runs the query until all existing messages are processed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from orderedmq.conditions import QueryTestCondition
from orderedmq.errors import ErrorOf
from orderedmq.testing.failures import name_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    #: The query of a test: a writer that is not started, or a function that makes one from a session and the options that name the broker.
    Query = DataStreamWriter | Callable[[SparkSession, dict[str, str]], DataStreamWriter]

_REMEDY = (
    "Return the writer that df.writeStream makes, with its format and options, and leave trigger() and start() to the test"
)


class QueryTestError(ErrorOf[QueryTestCondition]):
    """A query cannot be run or killed in the way that the test requires."""

    family: ClassVar[str] = "ORDEREDMQ_TESTING"
    conditions = QueryTestCondition


def is_writer(query: object) -> bool:
    """Return whether a query is a writer of a classic session or of Spark Connect."""
    return hasattr(query, "foreachBatch") and hasattr(query, "trigger")


def checkpoint_of(query: Query) -> str:
    """Return the name of a query's checkpoint: the name of its function, or "query" for a writer."""
    return "query" if is_writer(query) else name_of(query).rpartition(".")[2].strip("<>")


def writer_of(query: Query, spark: SparkSession | None, options: dict[str, str]) -> DataStreamWriter:
    """Return the writer of a query. Raises QueryTestError NOT_A_QUERY."""
    result: Any = query
    if not is_writer(query):
        if not callable(query):
            raise QueryTestError(
                QueryTestCondition.NOT_A_QUERY, f"{query!r} is no query. Pass a function of a session and the broker's options"
            )
        if spark is None:
            raise QueryTestError(
                QueryTestCondition.NOT_A_QUERY,
                f"{name_of(query)} needs a session. Pass one as the next argument, such as the fixture orderedmq_spark",
            )
        result = query(spark, dict(options))
    if not is_writer(result):
        if hasattr(result, "awaitTermination"):
            result.stop()
        raise QueryTestError(QueryTestCondition.NOT_A_QUERY, f"{name_of(query)} returned {type(result).__name__}. {_REMEDY}")
    writer: DataStreamWriter = result
    return writer


def pickled(query: Query) -> bytes:
    """Return a query's function pickled, for another process."""
    from pyspark import cloudpickle

    data: bytes = cloudpickle.dumps(query)  # type: ignore[no-untyped-call]
    return data


def start(writer: DataStreamWriter, checkpoint: Path) -> StreamingQuery:
    """Start a writer with the trigger availableNow and the checkpoint of a test."""
    return writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()


def finish(query: StreamingQuery, name: str, timeout: float) -> None:
    """Wait until a query ends. Raises Spark's exception if the query fails, and QueryTestError TIMED_OUT after ``timeout`` seconds."""
    if not query.awaitTermination(max(1, round(timeout))):
        query.stop()
        raise QueryTestError(
            QueryTestCondition.TIMED_OUT,
            f"the query {name} was still at work after {timeout:g} s and was stopped. Pass a longer timeout, or check whether it waits for "
            "a lock or retries a message forever",
        )


def batches_in(checkpoint: Path, log: str) -> set[int]:
    """Return the batches in a log of a checkpoint. A batch that is in ``offsets`` and not in ``commits`` is in flight."""
    folder = checkpoint / log
    return {int(entry.name) for entry in folder.iterdir() if entry.name.isdigit()} if folder.is_dir() else set()
