"""All differences between the releases of Spark, so that no other module asks which release runs.

Before 4.2, Spark calls ``latestOffset`` without arguments, and knows neither read limits nor `SupportsTriggerAvailableNow`. This is the
order of its calls, as measured on 4.0.5 and 4.1.4 and read in Spark's MicroBatchExecution:

- A query with a new checkpoint calls ``latestOffset`` first.
- A query with an old checkpoint first calls ``partitions(o, o)`` with the newest logged offset ``o``. If the batch of ``o`` was not
  committed, Spark repeats it with ``partitions(s, o)``.
- Spark calls ``latestOffset`` only between two batches. If the answer differs from the last one, Spark logs it and runs its batch, and asks
  again after it has committed the batch. If anything fails in between, the query ends, and its next run starts a new process.

So a call of ``latestOffset`` means that everything below the offset that the reader gave or was given last is processed, as
``latestOffset(start)`` means in newer releases.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pyspark
from pyspark.sql.datasource import InputPartition

from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError
from orderedmq.spark_support import concise_calls

logger = logging.getLogger("orderedmq")

Reader = TypeVar("Reader", bound=type)

#: Whether Spark passes the end of the last committed micro-batch and a limit to ``latestOffset``.
PASSES_START: Final = find_spec("pyspark.sql.streaming.datasource") is not None

if TYPE_CHECKING or PASSES_START:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxRows,
        ReadMinRows,
        SupportsTriggerAvailableNow,
    )
else:
    # Only this package creates these limits, from its own options.
    class ReadLimit: ...

    class ReadAllAvailable(ReadLimit): ...

    class ReadMaxRows(ReadLimit):
        def __init__(self, max_rows: int) -> None:
            self.max_rows = max_rows

    class ReadMinRows(ReadLimit): ...

    class ReadMaxBytes(ReadLimit): ...

    class SupportsTriggerAvailableNow: ...


__all__ = [
    "ReadAllAvailable", "ReadLimit", "ReadMaxBytes", "ReadMaxRows", "ReadMinRows", "SupportsTriggerAvailableNow",
    "called_by_this_release", "called_without_start",
]  # fmt: skip


def called_by_this_release(reader: Reader) -> Reader:
    """Return the class of a stream reader as this release of Spark calls it."""
    return reader if PASSES_START else called_without_start(reader)


def called_without_start(reader: Reader) -> Reader:
    """Return a subclass of a stream reader whose ``latestOffset`` takes no arguments. It has the same name, so pickles find it."""

    class Older(reader):  # type: ignore[misc, valid-type]
        #: The offset that Spark or this reader named last. None until then.
        _newest: dict[str, Any] | None = None
        #: Whether ``latestOffset`` was called.
        _limit_asked = False

        def latestOffset(self) -> dict[str, Any]:
            start = self.initialOffset() if self._newest is None else self._newest
            end: dict[str, Any] = super().latestOffset(start, self.getDefaultReadLimit())
            if not self._limit_asked:
                self._warn_of_limit()
            if end != start:
                # Spark calls no reportLatestOffset, but shows this answer as the latest offset in the query's progress.
                end |= {"latest": self.reportLatestOffset()}
            self._limit_asked = True
            self._newest = end
            return end

        def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
            if start == end and self._limit_asked:
                # The wrapper asks for the latest offset before Spark has passed the newest logged offset.
                raise OptionError(
                    OptionCondition.UNSUPPORTED,
                    "spark.sql.streaming.triggerAvailableNowWrapper.enabled is on, so this query would begin again instead of following its "
                    "checkpoint. Set it to false, which is its default",
                )
            if start != end and not self._limit_asked:
                self._warn("repeats the last micro-batch of the query's previous run")
            self._newest = end
            planned: Sequence[InputPartition] = super().partitions(start, end)
            return planned

        def _warn_of_limit(self) -> None:
            if self._run is None or isinstance(self.getDefaultReadLimit(), ReadAllAvailable):
                return
            backlog = self._run.session.backlog(self._run.positions.ends(None))
            remaining = sum(span.messages for span in backlog.values())
            if remaining:
                self._warn(f"leaves {remaining} messages because of the limits in the source's options")

        @staticmethod
        def _warn(what: str) -> None:
            logger.warning(
                "With the trigger availableNow, Spark %s ends a run after one micro-batch. This one %s, so run the query again until nothing "
                "is left. Other triggers continue by themselves",
                pyspark.__version__,
                what,
            )

    Older.__name__, Older.__qualname__, Older.__module__ = reader.__name__, reader.__qualname__, reader.__module__
    return concise_calls(Older)  # type: ignore[return-value]
