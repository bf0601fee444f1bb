"""The stream reader on the driver: runs the Owner's actions against a broker, at the moments that Spark gives.

Rules (Spark's calls, as measured on 4.3): ``initialOffset`` decides nothing. ``latestOffset(start)`` means that everything below
``start`` is processed; its answer is logged before it is planned. ``partitions`` of a logged batch may come first after a restart.
``commit`` comes too late to be of use. SIGTERM comes twice; the handler must ignore the second to let ``stop`` run.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from ordered_source import data_loss, partition_reader, plan
from ordered_source.admission import Admission
from ordered_source.anchors import Anchors
from ordered_source.columns import chosen_columns
from ordered_source.group_session import GroupSession
from ordered_source.partition_reader import QueuePartition
from orderedmq.broker import Broker, Log, TopicInfo
from orderedmq.concise import concise_calls
from orderedmq.connections import reach
from orderedmq.core.lock import LockToken
from orderedmq.core.offsets import Checkpoint, offsets_to_json, ranges
from orderedmq.core.ownership import Commit, Lock, Owner, Unlock
from orderedmq.errors import DataLossError, OffsetError, TopicError, queue_deleted, recreated
from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.options.source import SourceOptions

log = logging.getLogger("orderedmq")

#: Seconds between two looks at a broker that cannot tell that nothing changed, while there is nothing to read.
POLL_INTERVAL: Final = 0.05
#: Seconds between two looks for new topics and queues, where the broker cannot tell that nothing changed.
LISTING_INTERVAL: Final = 1.0


@concise_calls
class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The source of one streaming query. A copy of it, unconnected, reads partitions in executors."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self.options = SourceOptions.parse(options, streaming=True)
        self.columns = chosen_columns(schema)
        self.schema = schema
        self._broker: Broker | None = None
        self._owner: Owner | None = None
        #: None in broadcasting.
        self._group: GroupSession | None = None
        self._admission = Admission(self.options, time.monotonic())
        self._target: dict[MessageQueue, int] | None = None
        self._topics: list[TopicInfo] = []
        #: (change number, moment) of the last listing.
        self._listed: tuple[int | None, float] = (None, float("-inf"))
        self._anchors = Anchors()
        #: The incarnation of each topic whose queues are owned, and losses that were accepted: topics and what was known of them.
        self._owned_topics: dict[str, str] = {}
        self._accepted: set[tuple[str, str]] = set()
        self._gone: set[MessageQueue] = set()
        #: (change number, start) for which there was nothing to read, and until when that is believed.
        self._quiet: tuple[int | None, Mapping[str, Any]] | None = None
        self._quiet_until = 0.0
        self._terminated = False

    # -- Spark's calls -----------------------------------------------------------------------------------------------------

    def getDefaultReadLimit(self) -> ReadLimit:
        return self._admission.default_limit()

    def prepareForTriggerAvailableNow(self) -> None:
        broker = self._connect()
        queues = plan.queues_of(broker, self._list(fresh=True))
        self._target = {queue: at.max_offset for queue, at in broker.log.bounds(queues).items()}
        self._admission.available_now = True

    def initialOffset(self) -> dict[str, Any]:
        return Checkpoint().to_spark()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        broker = self._connect()
        group = self._group
        change = broker.log.change()
        if self._quiet == (change, start) and time.monotonic() < self._quiet_until and not (group is not None and group.due()):
            if group is not None:
                group.raise_if_lost()
            return start
        since = Checkpoint.from_spark(start)
        owner = self._owner_for(since)
        known = self._same_topics(owner, since)
        self._boundary(owner, since, self._queues(known))
        self._place(owner, known)
        backlog = owner.backlog(self._ends(owner))
        counts = self._admission.counts(self._log, backlog, limit, time.monotonic())
        if not counts and not since.fresh:
            self._quiet = (change, start) if counts is not None else None
            self._quiet_until = time.monotonic() + POLL_INTERVAL if change is None else float("inf")
            return start
        # A fresh checkpoint is logged even without rows, so that it is decided once where each queue begins.
        topics = [topic.name for topic in self._topics]
        following = owner.following(counts or {})
        anchors = self._anchors.of(self._log, topics, known.topics, following, time.monotonic())
        return owner.plan(counts or {}, anchors, owner.reset).to_spark()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        if self._broker is None or self._owner is None:
            return None
        bounds = self._broker.log.bounds(list(self._owner.owned))
        return {"next": offsets_to_json({queue: at.max_offset for queue, at in bounds.items()})}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        if start == end:
            return []
        broker = self._connect()
        since, until = Checkpoint.from_spark(start), Checkpoint.from_spark(end)
        owner = self._owner_for(until)
        if self._group is not None:
            self._group.raise_if_lost()
        if owner.is_planned(until):
            spans = {queue: span for queue, span in ranges(since, until).items() if span.messages}
        else:
            spans = self._replay(owner, since, until, self._same_topics(owner, until))
        identity = broker.identity
        return [
            QueuePartition(
                self.options.endpoint,
                identity,
                queue,
                span.begin,
                span.end,
                owner.owned[queue].token,
                until.topics.get(queue.topic, ""),
                self.options.fail_on_data_loss,
                self.options.pull_batch_size,
                streaming=True,
                matching=self.options.matching,
                reading=self.options.reading,
            )
            for queue, span in spans.items()
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, QueuePartition)
        return partition_reader.read(partition, self.columns, to_arrow_schema(self.schema, timezone="UTC"))

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing: it arrives after the next latestOffset, which has said it already."""

    def stop(self) -> None:
        broker, owner = self._broker, self._owner
        self._broker = None
        if broker is None:
            return
        if owner is not None and self._group is not None:
            self._group.stop(owner, terminated=self._terminated)
        broker.close()

    # -- connecting and locking --------------------------------------------------------------------------------------------

    def _connect(self) -> Broker:
        if self._broker is None:
            broker = reach(self.options.endpoint)
            plan.check(broker, self.options)
            self._broker = broker
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, self._terminate)
        return self._broker

    @property
    def _log(self) -> Log:
        """The broker's log, for what is read of its messages."""
        return self._connect().log.reading(self.options.reading)

    def _terminate(self, signum: int, frame: object) -> None:
        del signum, frame
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._terminated = True
        raise SystemExit(0)

    def _owner_for(self, offsets: Checkpoint) -> Owner:
        if self._owner is None:
            name = offsets.owner or uuid.uuid4().hex
            if self.options.consumer_group is None:
                self._owner = Owner(name)
            else:
                self._group = GroupSession(self._connect(), self.options, name)
                self._owner = self._group.owner(name)
        elif offsets.owner is not None and offsets.owner != self._owner.owner_id:
            raise OffsetError(
                "INVALID", "the checkpoint belongs to another query than the one that is running; restart the query"
            )
        return self._owner

    @property
    def _shared(self) -> bool:
        return self._group is not None and self._group.shared

    def _boundary(self, owner: Owner, start: Checkpoint, queues: Sequence[MessageQueue]) -> None:
        """Run what the Owner decides where nothing is in flight."""
        group = self._group
        if group is None:
            for action in owner.boundary(start, queues):
                if isinstance(action, Lock):
                    owner.assume(action.queues)
            return
        group.forget_lost(owner)
        for action in owner.boundary(start, queues, group.members()):
            match action:
                case Commit():
                    group.commit(owner, action)
                case Unlock():
                    group.give_up(owner, action)
                case Lock():
                    group.take(owner, action, patient=self._admission.available_now)
        if self._admission.available_now:
            # What others give up later is for the next run, as what is written later is.
            owner.taking = not group.shared

    def _take(self, owner: Owner, action: Lock) -> None:
        if self._group is None:
            owner.assume(action.queues)
        else:
            self._group.take(owner, action, patient=False)

    # -- topics and queues -------------------------------------------------------------------------------------------------

    def _list(self, *, fresh: bool = False) -> list[TopicInfo]:
        change, now = self._connect().log.change(), time.monotonic()
        known, listed = self._listed
        if fresh or change != known or (change is None and now - listed >= LISTING_INTERVAL):
            self._topics = plan.topics(self._connect(), self.options)
            self._listed = (change, now)
        return self._topics

    def _queues(self, known: Checkpoint) -> list[MessageQueue]:
        """Those to read, without sharing also all that the checkpoint has: to leave one out would be to forget how far it was read."""
        queues = plan.queues_of(self._connect(), self._topics)
        if self._target is not None:
            # With availableNow, what appears later is for the next run.
            queues = [queue for queue in queues if queue in self._target]
        return queues if self._shared else [*queues, *sorted(known.next.keys() - set(queues))]

    def _same_topics(self, owner: Owner, start: Checkpoint) -> Checkpoint:
        """``start`` without the queues of topics that are not what they were. Raises DataLossError unless the user accepts it."""
        try:
            listed = {topic.name: topic.incarnation for topic in self._list()}
        except TopicError as error:
            if not start.topics:
                raise
            raise DataLossError("TOPIC_DELETED", f"{error.message}; this query has read it before") from error
        stale = {name for name, incarnation in self._owned_topics.items() if listed.get(name) != incarnation}
        gone: set[str] = set()
        for name, anchor in sorted(start.topics.items()):
            loss = self._loss(name, anchor, listed)
            if loss is None:
                continue
            gone.add(name)
            if (name, anchor) not in self._accepted:
                self._lose(loss)
                self._accepted.add((name, anchor))
                stale.add(name)
        if stale:
            owner.drop([queue for queue in owner.owned if queue.topic in stale])
        self._owned_topics = listed
        if not gone:
            return start
        return replace(
            start,
            next={queue: offset for queue, offset in start.next.items() if queue.topic not in gone},
            topics={name: anchor for name, anchor in start.topics.items() if name not in gone},
        )

    def _loss(self, name: str, anchor: str, listed: Mapping[str, str]) -> DataLossError | None:
        """What became of a topic that was read before."""
        try:
            if name in listed:
                return recreated(name) if self._log.is_another(name, anchor) else None
        except TopicError:
            pass
        return DataLossError("TOPIC_DELETED", f"topic {name!r} was deleted; failOnDataLoss=false goes on without it")

    # -- where to read -----------------------------------------------------------------------------------------------------

    def _place(self, owner: Owner, start: Checkpoint) -> None:
        queues = owner.unplaced().queues
        if not queues:
            return
        broker, group = self._connect(), self.options.consumer_group
        bounds = broker.log.bounds(queues)
        # Deleted since they were listed, and never read: the next look at the topics says so.
        owner.drop([queue for queue in queues if queue not in bounds and queue not in start.next])
        queues = tuple(queue for queue in queues if queue in owner.owned)
        starting = self.options.starting
        known: dict[MessageQueue, int] = {}
        reset = 0
        # One that is gone is in the checkpoint: where it was read up to says `_ends` what is lost.
        begins = {queue: at.min_offset for queue, at in bounds.items()}
        if start.fresh and starting.kind != "committed":
            begins = plan.beginnings(self._log, starting, queues, bounds)
        elif start.fresh:
            begins = plan.beginnings(self._log, plan.never_committed(self.options), queues, bounds)
        if group is not None:
            known = broker.groups.offsets(group, queues)
            reset = broker.groups.reset_number(group)
            remade = {name for name, _ in self._accepted}.difference(start.topics)
            old = {_token(owner, queue): begins[queue] for queue in known if queue.topic in remade}
            if old and reset == start.reset and not broker.capabilities.fenced and not self._shared:
                # Of the topic that is gone: RocketMQ 4 keeps a group's offsets of topics that were deleted.
                reset = broker.groups.reset(old)
                known.update((token.queue, begin) for token, begin in old.items())
            if start.fresh and starting.explicit and starting.kind != "committed" and not self._shared:
                log.warning("group %s is reset to %s, as the options say", group, offsets_to_json(begins))
                reset = broker.groups.reset({_token(owner, queue): begins[queue] for queue in queues})
                known = begins
        commit, behind, left = owner.enter(start, known, reset, begins)
        for late in behind:
            log.warning(
                "the checkpoint is behind group %s: queue %s is read again from %d, the group was at %d",
                group, late.queue, late.checkpoint, late.group,
            )  # fmt: skip
        for queue, (logged, at) in left.items():
            log.warning(
                "another query had queue %s of group %s, or the group was reset: it goes on at the group's offset %d, not at %d",
                queue, group, at, logged,
            )  # fmt: skip
        if commit is not None:
            broker.groups.commit(commit.offsets)

    def _ends(self, owner: Owner) -> dict[MessageQueue, int]:
        """Each owned queue's end, the target at most; what is lost before it is an error or skipped with a warning."""
        bounds = self._connect().log.bounds(list(owner.owned))
        ends: dict[MessageQueue, int] = {}
        for queue, owned in owner.owned.items():
            at, position = bounds.get(queue), owned.position
            if position is None:
                continue
            if at is None:
                if queue not in self._gone:
                    self._lose(queue_deleted(queue, f"this query has read it up to {position}"))
                    self._gone.add(queue)
                continue
            after, loss = data_loss.judged(queue, position, at, "this query", self._log.tail_loss)
            if loss is not None:
                self._lose(loss)
                owner.skip(queue, after)
            ends[queue] = at.max_offset if self._target is None else min(at.max_offset, self._target.get(queue, 0))
        return ends

    def _lose(self, error: DataLossError) -> None:
        data_loss.lose(error, fail=self.options.fail_on_data_loss)

    def _replay(self, owner: Owner, start: Checkpoint, end: Checkpoint, known: Checkpoint) -> dict[MessageQueue, OffsetRange]:
        """A batch that was logged before a restart; ``known``: its end without topics that are not what they were."""
        shared = self._shared
        logged = [queue for queue, span in ranges(start, end).items() if span.messages] if shared else list(end.next)
        missing = tuple(sorted(queue for queue in logged if queue in known.next and queue not in owner.owned))
        if missing:
            self._take(owner, Lock(missing, all_or_none=not shared, repeating=True))
        for queue in missing:
            if queue not in owner.owned:
                log.warning(
                    "queue %s of group %s has another owner: its part of the logged batch is not repeated",
                    queue,
                    self.options.consumer_group,
                )
        group = self.options.consumer_group
        groups = self._connect().groups
        reset = groups.reset_number(group) if group is not None else 0
        at_group = groups.offsets(group, sorted(owner.owned)) if group is not None else {}
        spans = owner.replay(start, end, reset, at_group)
        for queue in owner.unplaced().queues:
            log.warning(
                "queue %s of group %s had another owner, or was reset: its part of the logged batch is not repeated",
                queue,
                group,
            )
        return spans


def _token(owner: Owner, queue: MessageQueue) -> LockToken:
    token = owner.owned[queue].token
    assert token is not None
    return token
