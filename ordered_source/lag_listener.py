"""Exports the lag and the parked messages of running queries to Prometheus and as log lines.

Call ``spark.streams.addListener(LagListener())`` on the driver, or in the client with Spark Connect, because PySpark runs
listeners there. A query's lag (defined in orderedmq/ownership/lag.py) is the lag after its last micro-batch. An idle query reports
nothing, so its last values stay. The values of a query that has ended are removed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final
from uuid import UUID

from pyspark.sql.streaming.listener import (
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
    StreamingQueryProgress,
)

from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError, OrderedMQError, missing_package
from orderedmq.model import MessageQueue
from orderedmq.ownership.lag import ParkedCounts, QueueLag, describe, is_ours, lag_of_query, parked_of_query

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Gauge

lag_log = logging.getLogger("orderedmq.lag")

#: Upper bounds of the histogram's buckets in seconds. A small batch takes a few hundred milliseconds; a batch with a large backlog takes
#: minutes.
_BUCKETS: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
#: The gauges of a query with a parking lot, in the order of `_Metrics.show_parked`.
_PARKED: Final = (
    ("orderedmq_parked_messages", "Messages that were parked when the query's last micro-batch was planned."),
    ("orderedmq_parked_keys", "Keys that have parked messages."),
    ("orderedmq_parked_oldest_age_seconds", "Time since the oldest parked message was stored in its queue."),
    ("orderedmq_parked_retries", "Failed calls of the first parked message of each key."),
)
_QUEUE_LABELS: Final = ("query", "topic", "broker", "queue")


class LagListener(StreamingQueryListener):
    """Exports the lag of a session's queries that read with the format orderedmq, and ignores other queries.

    ``prometheus``: export metrics in ``registry`` (default: prometheus-client's registry). This needs the extra ``metrics``. The metrics
    are the lag in messages and the next offset of each queue, the duration of micro-batches in seconds, and counts of parked messages if
    the query has a parking lot. ``log``: write a line per query and micro-batch to the logger ``orderedmq.lag`` with level INFO.

    Raises OptionError MISSING without the package prometheus-client, CONFLICT if the registry has the metrics of another
    LagListener. Later errors of this listener never reach Spark: each kind is logged once as a warning.
    """

    def __init__(self, *, prometheus: bool = True, registry: CollectorRegistry | None = None, log: bool = True) -> None:
        self._metrics = _Metrics(registry) if prometheus else None
        self._log = log
        self._lock = threading.Lock()
        self._complained: set[tuple[str, str]] = set()

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Do nothing: a query has no lag before its first micro-batch."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        with self._guarded("a query's progress"):
            progress = event.progress
            if not any(is_ours(source) for source in progress.sources):
                return
            query = progress.name or str(progress.id)
            if self._metrics is not None:
                self._metrics.count(query, progress)
            lags, parked = lag_of_query(progress.sources), parked_of_query(progress.sources)
            if self._metrics is not None:
                self._metrics.show(progress.runId, query, lags)
                self._metrics.show_parked(progress.runId, query, parked)
            if self._log:
                lag_log.info("query %s, batch %d: %s", query, progress.batchId, describe(lags, parked))

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        with self._guarded("a query's end"):
            if self._metrics is not None:
                self._metrics.hide(event.runId)

    def close(self) -> None:
        """Remove the metrics from the registry, so that no stale values stay.

        Call it after ``removeListener``, and when Spark does not report the end of a query: in classic Spark if the session is
        stopped while queries run, and in Spark Connect if the connection breaks.
        """
        with self._lock:
            if self._metrics is not None:
                self._metrics.unregister()
                self._metrics = None

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Handle one event at a time, because Spark may call from several threads. Log each kind of error once instead of raising it."""
        try:
            with self._lock:
                yield
        except Exception as error:
            kind = error.condition if isinstance(error, OrderedMQError) else type(error).__name__
            if (what, kind) not in self._complained:
                self._complained.add((what, kind))
                lag_log.warning("lag is not exported because handling %s failed (logged once): %s", what, error, exc_info=True)


class _Metrics:
    """The metrics in the registry. A gauge's series belong to one run of a query and are removed when the run ends. Counters stay."""

    def __init__(self, registry: CollectorRegistry | None) -> None:
        try:
            from prometheus_client import REGISTRY, Counter, Gauge, Histogram
        except ImportError as error:
            raise missing_package("LagListener", "prometheus-client", "metrics", "use LagListener(prometheus=False)") from error
        self._registry = registry if registry is not None else REGISTRY
        try:
            lag = Gauge(
                "orderedmq_queue_lag_messages",
                "Messages that are left in the queue after the query's last micro-batch.",
                _QUEUE_LABELS,
                registry=self._registry,
            )
        except ValueError as error:
            raise OptionError(
                OptionCondition.CONFLICT,
                "the registry has the metrics of another LagListener. Add that listener to this session, close() it, or give this one a "
                "separate registry",
            ) from error
        following = Gauge(
            "orderedmq_queue_next_offset",
            "Offset of the next message of the queue that the query will process.",
            _QUEUE_LABELS,
            registry=self._registry,
        )
        self._rows = Counter(
            "orderedmq_rows_processed_total",
            "Messages that the query has read, repeats included.",
            ("query",),
            registry=self._registry,
        )
        self._batches = Counter(
            "orderedmq_batches_total",
            "Micro-batches that the query has completed.",
            ("query",),
            registry=self._registry,
        )
        self._seconds = Histogram(
            "orderedmq_batch_seconds",
            "Time that a micro-batch of the query took.",
            ("query",),
            registry=self._registry,
            buckets=_BUCKETS,
        )
        parked = [Gauge(name, meaning, ("query",), registry=self._registry) for name, meaning in _PARKED]
        self._all = (lag, following, self._rows, self._batches, self._seconds, *parked)
        self._lag, self._next = _Series(lag), _Series(following)
        self._parked = [_Series(gauge) for gauge in parked]

    def count(self, query: str, progress: StreamingQueryProgress) -> None:
        rows = sum(max(0, source.numInputRows) for source in progress.sources if is_ours(source))
        self._rows.labels(query).inc(rows)
        self._batches.labels(query).inc()
        self._seconds.labels(query).observe(progress.batchDuration / 1000)

    def show(self, run: UUID, query: str, lags: Mapping[MessageQueue, QueueLag]) -> None:
        labelled = {(query, queue.topic, queue.broker_name, str(queue.queue_id)): lag for queue, lag in lags.items()}
        self._next.show(run, {labels: lag.next for labels, lag in labelled.items()})
        self._lag.show(run, {labels: lag.messages for labels, lag in labelled.items() if lag.messages is not None})

    def show_parked(self, run: UUID, query: str, parked: ParkedCounts | None) -> None:
        """Set the gauges of parked messages. Remove gauges whose value is unknown, for example the oldest age if no message is parked."""
        values: list[float | None] = [None] * len(self._parked)
        if parked is not None:
            age = None if parked.oldest is None else max(0.0, time.time() - parked.oldest / 1000)
            values = [parked.messages, parked.keys, age, parked.retries]
        for series, value in zip(self._parked, values, strict=True):
            series.show(run, {} if value is None else {(query,): value})

    def hide(self, run: UUID) -> None:
        for series in (self._next, self._lag, *self._parked):
            series.show(run, {})

    def unregister(self) -> None:
        for metric in self._all:
            self._registry.unregister(metric)


class _Series:
    """The series of a gauge. Each one is stored with the run that set it last.

    A query that is restarted under the same name takes over its series, even if the end of its former run is reported later.
    """

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._run: dict[tuple[str, ...], UUID] = {}

    def show(self, run: UUID, values: Mapping[tuple[str, ...], float]) -> None:
        """Set the series of ``run`` to ``values`` and remove all its other series."""
        for labels in [labels for labels, shown in self._run.items() if shown == run and labels not in values]:
            del self._run[labels]
            self._gauge.remove(*labels)
        for labels, value in values.items():
            self._run[labels] = run
            self._gauge.labels(*labels).set(value)
