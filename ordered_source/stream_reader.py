"""The stream reader on the driver. It carries out the Owner's actions at the broker when Spark calls the reader.

Spark's calls, as measured on 4.3: ``initialOffset`` decides nothing. A call of ``latestOffset(start)`` means that all messages below
``start`` are processed. Spark logs the offset that this call returns, and then calls ``partitions``. After a restart, Spark may call
``partitions`` for a logged batch first. ``commit`` is called too late to be useful. Spark ends a source by two SIGTERM and by closing its
connection, whose end lets the source's process call ``stop``. The process may notice these in any order. `older_spark` gives the calls of
earlier releases the same meaning.
"""

from __future__ import annotations

import functools
import logging
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from ordered_source import group_session, partition_reader, plan
from ordered_source.admission import Admission
from ordered_source.columns import arrow_schema, chosen_columns
from ordered_source.group_session import LOCK_RETRY, Session
from ordered_source.lot_planner import NO_LOTS, BatchLots, LotPlanner, require_none, require_none_left, without_lots
from ordered_source.older_spark import ReadLimit, SupportsTriggerAvailableNow, called_by_this_release
from ordered_source.partition_reader import QueuePartition
from ordered_source.positions import STUCK_SECONDS, Anchors, Positions
from ordered_source.stopping import StopRequest
from ordered_source.topic_watch import TopicWatch
from orderedmq.broker import Broker
from orderedmq.conditions import OffsetCondition
from orderedmq.connections import reach
from orderedmq.errors import OffsetError, TopicError
from orderedmq.model import MessageQueue, OffsetRange, is_parked
from orderedmq.options.parse import parse
from orderedmq.options.source import SourceOptions
from orderedmq.ownership.offsets import Checkpoint, offsets_to_json
from orderedmq.parking import lot_token
from orderedmq.routing.generations import Generations
from orderedmq.spark_support import concise_calls

logger = logging.getLogger("orderedmq")

P = ParamSpec("P")
T = TypeVar("T")

#: Seconds between two polls of an idle query, at a broker that cannot report whether anything changed.
POLL_INTERVAL: Final = 0.05


class QueryRun:
    """The state of a running query, from its first offsets to its stop. Only the session changes ``owner``."""

    def __init__(self, broker: Broker, watch: TopicWatch, options: SourceOptions, owner_id: str) -> None:
        #: Created first, because it ignores requests that were made before.
        self.stop_request = StopRequest(owner_id)
        self.session: Session = group_session.open_session(broker, options, owner_id)
        self.owner = self.session.owner
        self.positions = Positions(broker, options, self.session, watch)
        log = broker.log.reading(options.pull_settings)
        self.lots = LotPlanner(log, options.parking_lot_max_messages) if options.parking_lot else None


def _interruptible(call: Callable[Concatenate[StreamReader, P], T]) -> Callable[Concatenate[StreamReader, P], T]:
    """Let SIGTERM interrupt this call of Spark, which may wait for a lock or a broker.

    Between two calls, the process waits for Spark, and the end of the connection ends it. In ``stop``, a signal would leave the queues
    locked.
    """

    @functools.wraps(call)
    def interruptible(reader: StreamReader, /, *args: P.args, **kwargs: P.kwargs) -> T:
        reader._interruptible = True
        try:
            return call(reader, *args, **kwargs)
        finally:
            reader._interruptible = False

    return interruptible


@called_by_this_release
@concise_calls
class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The source of one streaming query. Executors read partitions with a copy of it that has no connection."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self.options = parse(SourceOptions, options, streaming=True)
        self.columns = chosen_columns(schema)
        self.schema = schema
        self._connected: tuple[Broker, TopicWatch] | None = None
        #: None until Spark gives the first offsets, which may name the owner.
        self._run: QueryRun | None = None
        self._admission = Admission(self.options, time.monotonic())
        self._anchors = Anchors()
        #: The end of each queue when the query began, if it has the trigger availableNow.
        self._target: dict[MessageQueue, int] | None = None
        #: When the query began, in ms since 1970, if it has the trigger availableNow. Keys that are due later are left to the next run.
        self._due_by: int | None = None
        #: (change number, start) of the last call that found no messages to read. It is valid until ``_quiet_until``.
        self._quiet: tuple[int | None, Mapping[str, Any]] | None = None
        self._quiet_until = 0.0
        self._terminated = False
        #: Whether SIGTERM interrupts what the source is doing.
        self._interruptible = False
        #: Whether the query has given its queues back because it was asked to stop.
        self._given_back = False

    # -- Spark's calls -----------------------------------------------------------------------------------------------------

    def getDefaultReadLimit(self) -> ReadLimit:
        return self._admission.default_limit()

    @_interruptible
    def prepareForTriggerAvailableNow(self) -> None:
        broker, watch = self._connect()
        queues = plan.queues_of(broker, watch.topics(fresh=True))
        self._target = {queue: at.max_offset for queue, at in broker.log.bounds(queues).items()}
        self._due_by = int(time.time() * 1000)
        self._admission.available_now = True

    def initialOffset(self) -> dict[str, Any]:
        return Checkpoint().to_spark()

    @_interruptible
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        deadline = time.monotonic() + self.options.lock_timeout
        while True:
            try:
                end = self._latest_offset(start, limit)
            except TopicError:
                # A topic may have been deleted since it was listed. After a new listing, the deletion leads to a DataLossError or is an
                # accepted loss.
                self._connect()[1].forget_listing()
                end = self._latest_offset(start, limit)
            # With availableNow, the query would end although it has to read what other members of the group now hold up.
            if (
                end != start
                or not self._admission.available_now
                or self._run is None
                or not self._run.positions.waits_for_others
            ):
                return end
            if time.monotonic() >= deadline:
                logger.warning(
                    "this run leaves messages of %s to the next one, because they wait for queues that other members hold",
                    ", ".join(map(str, sorted(self._run.positions.waits))),
                )
                return end
            time.sleep(LOCK_RETRY)

    def _latest_offset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        if self._stops_here(start):
            return start
        broker, watch = self._connect()
        change = broker.log.change()
        if self._quiet == (change, start) and time.monotonic() < self._quiet_until:
            run = self._run
            if run is None or not run.session.members_due():
                if run is not None:
                    run.session.raise_if_lost()
                return start
        since = Checkpoint.from_spark(start)
        run = self._ensure_run(since)
        owner = run.owner
        current = watch.drop_lost_topics(run.session, since)
        queues = watch.queues(current, self._target, shared=run.session.shared)
        run.session.boundary(since, queues, patient=self._admission.available_now)
        former = watch.former_topics(current)
        run.session.take_former(current, [queue for queue in without_lots(current.next) if queue.topic in former])
        run.positions.place(current)
        run.session.unlock_topics(former)
        log, now = broker.log.reading(self.options.pull_settings), time.monotonic()
        ends = run.positions.ends(self._target)
        lots = NO_LOTS if run.lots is None else run.lots.plan(owner, ends, self._due_by or int(time.time() * 1000))
        backlog = run.session.backlog(ends)
        leaders = {queue: span for queue, span in backlog.items() if not is_parked(queue) and queue not in lots.full}
        counts = self._admission.count_messages(log, leaders, limit, now)
        # If topics, positions or the group have changed although no batch ran, as after an accepted loss, log them, or the next run would
        # repeat the change.
        moved = (
            bool(former)
            or current.topics != since.topics
            or (bool(owner.owned) and current.of_another_group(owner.group))
            or any(since.next.get(queue, at) != at for queue, at in owner.following({}).items())
        )
        run.positions.warn_of_waits(now)
        if not counts and not lots.counts and not since.fresh and not moved:
            self._quiet = (change, start) if counts is not None else None
            self._quiet_until = self._next_look(change, now, lots)
            if run.positions.waits:
                self._quiet_until = min(self._quiet_until, now + STUCK_SECONDS)
            return start
        planned = {**(counts or {}), **lots.counts}
        # A new checkpoint is logged even without rows, so that the start of each queue is decided only once.
        anchors = self._anchors.of(log, watch.names, current.topics, owner.following(planned), now)
        return run.session.plan(planned, anchors).to_spark()

    def _stops_here(self, start: Mapping[str, Any]) -> bool:
        """Return whether the query was asked to stop. The first call that finds a request gives the query's queues back."""
        run = self._run
        if run is None or self._given_back:
            return self._given_back
        if run.stop_request.is_made:
            self._give_back(run, Checkpoint.from_spark(start))
        return self._given_back

    def _give_back(self, run: QueryRun, processed: Checkpoint) -> None:
        run.session.give_back(processed)
        self._given_back = True
        run.stop_request.answer()

    @staticmethod
    def _next_look(change: int | None, now: float, lots: BatchLots) -> float:
        """Return when to look for messages again although nothing changed at the broker, in monotonic seconds."""
        if change is None:
            return now + POLL_INTERVAL
        return float("inf") if lots.next_due is None else now + lots.next_due / 1000 - time.time()

    @_interruptible
    def reportLatestOffset(self) -> dict[str, Any] | None:
        if self._connected is None or self._run is None or self._given_back:
            return None
        bounds = self._connected[0].log.bounds(without_lots(self._run.owner.owned))
        latest: dict[str, Any] = {"next": offsets_to_json({queue: at.max_offset for queue, at in bounds.items()})}
        if self._run.lots is not None:
            latest["parked"] = self._run.lots.summary()
        waits = self._run.positions.waits
        if waits:
            latest["waits"] = {str(queue): str(wait) for queue, wait in sorted(waits.items())}
        return latest

    @_interruptible
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        if start == end:
            return []
        broker, watch = self._connect()
        since, until = Checkpoint.from_spark(start), Checkpoint.from_spark(end)
        run = self._ensure_run(until)
        owner = run.owner
        run.session.raise_if_lost()
        if not owner.is_planned(until):
            run.positions.replay(since, until, watch.drop_lost_topics(run.session, until))
        # Spark calls this method once per scan of the stream. Each call returns what the first one planned: a repeated batch may leave out
        # queues that its offsets name.
        spans = owner.in_flight()
        queues = sorted({owner.leader_of(queue) for queue in spans})
        generations = plan.generations(broker, self.columns, queues)
        return [self._partition(broker, run, queue, spans, until, generations[queue]) for queue in queues]

    def _partition(
        self,
        broker: Broker,
        run: QueryRun,
        queue: MessageQueue,
        spans: Mapping[MessageQueue, OffsetRange],
        until: Checkpoint,
        generations: Generations,
    ) -> QueuePartition:
        """Return the partition of one queue and its parking lot. ``spans``: the non-empty ranges of the batch."""
        token = run.owner.owned[queue].token
        end = until.next.get(queue, 0)
        span = spans.get(queue, OffsetRange(end, end))
        lot = None
        if self.options.parking_lot and token is not None:
            parked = lot_token(token).queue
            at = until.next.get(parked)
            if at is None or run.owner.owned[parked].position is None:
                # The batch was logged by a run without parking lots, or the lot was deleted after the batch was logged.
                at = run.session.offsets([parked]).get(parked, 0)
            lot = spans.get(parked, OffsetRange(at, at))
        anchor = until.topics.get(queue.topic, "")
        return QueuePartition(broker.identity, queue, span.begin, span.end, token, anchor, True, lot, generations)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, QueuePartition)
        return partition_reader.read(partition, self.options, self.columns, arrow_schema(self.schema))

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing, because Spark calls this after the next latestOffset, which implies the commit."""

    def stop(self) -> None:
        connected, run = self._connected, self._run
        self._connected = None
        if connected is None:
            return
        if run is not None:
            self._end(run)
        connected[0].close()

    def _end(self, run: QueryRun) -> None:
        """Give the queues back as at a boundary if the application says that Spark has committed the last planned batch."""
        is_requested = run.stop_request.is_made
        processed = run.stop_request.processed if is_requested else None
        if self._given_back:
            # The application may have overwritten the answer with a request that says how far Spark has committed.
            if is_requested:
                run.stop_request.answer()
        elif processed is not None and (run.owner.is_planned(processed) or not run.owner.in_flight()):
            self._give_back(run, processed)
        else:
            run.session.stop(terminated=self._terminated)

    # -- the run -----------------------------------------------------------------------------------------------------------

    def _connect(self) -> tuple[Broker, TopicWatch]:
        if self._connected is None:
            broker = reach(self.options.endpoint)
            plan.check(broker, self.options)
            self._connected = broker, TopicWatch(broker, self.options)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, self._terminate)
        return self._connected

    def _terminate(self, signum: int, frame: object) -> None:
        del signum, frame
        self._terminated = True
        if self._interruptible:
            # The second signal must not interrupt what ends the call.
            self._interruptible = False
            raise SystemExit(0)

    def _ensure_run(self, offsets: Checkpoint) -> QueryRun:
        if self._run is None:
            broker, watch = self._connect()
            watch.require_place_of(offsets)
            if not self.options.parking_lot and self.options.consumer_group is not None:
                require_none(broker, self.options, plan.queues_of(broker, watch.topics()))
            require_none_left(broker, offsets, self.options.consumer_group)
            self._run = QueryRun(broker, watch, self.options, offsets.owner or uuid.uuid4().hex)
        elif offsets.owner is not None and offsets.owner != self._run.owner.owner_id:
            raise OffsetError(
                OffsetCondition.INVALID,
                "the checkpoint belongs to another query than the one that is running. Restart the query",
            )
        return self._run
