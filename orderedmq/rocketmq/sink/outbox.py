"""The Outbox over RocketMQ: tasks send their rows, and a commit moves the sink's bookmarks.

RocketMQ cannot hide messages until a batch is committed. So a task that writes a batch again searches each queue for the rows that
earlier attempts, of any partition, have sent, and sends only the missing ones (lookback.py). A commit sends rows that are missing
because several tasks found the same message (`queue_writer.settle`). Readers see a batch's rows before its commit, and also the rows of a batch
that is never committed.

Once a batch with identity is committed, each row is in its queue once. This requires that all attempts were given the same rows, and
that no abandoned request is executed more than a second later. (A broker refuses a request that has waited for 200 ms, but a network
may delay a request. Repeated messages have the same stamps.) A batch without identity is written at least once.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple, TypeVar

from orderedmq.broker import ChooseAgain, Outbox, Published, Receipt, SinkBatch
from orderedmq.errors import OrderedMQError, RocketMQUnavailableError, TopicError
from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.ownership.lock import LockToken
from orderedmq.ownership.micro_batch import SourceRun, require_same
from orderedmq.rocketmq.group import lock_rules
from orderedmq.rocketmq.messages.log import RocketMQLog
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.deadline import Deadline
from orderedmq.rocketmq.sink.bookmarks import TIMEOUT, Bookmarks
from orderedmq.rocketmq.sink.broker_lock import Attempt, BrokerLock, LockTiming
from orderedmq.rocketmq.sink.broker_queue import RocketMQQueue
from orderedmq.rocketmq.sink.commit_history import Committed
from orderedmq.rocketmq.sink.commit_report import (
    QueueReport,
    Token,
    count_contested,
    count_unmatched,
    judge,
    parse_token,
    ranges,
)
from orderedmq.rocketmq.sink.message_stamp import Writer, sink_name
from orderedmq.rocketmq.sink.queue_writer import QueueWriter, settle
from orderedmq.rocketmq.sink.staging import RocketMQStaging

P = TypeVar("P")
T = TypeVar("T")

logger = logging.getLogger("orderedmq")

#: Queues or brokers for which requests are sent in parallel.
PARALLEL: Final = 16
#: Seconds for a request to a broker that has none of a batch's rows.
_OTHER_BROKERS: Final = 5.0


class _TopicBroker(NamedTuple):
    """A topic at one broker, identified by one of the topic's queues there.

    ``required``: the broker has rows of the batch, so the commit must reach it.
    """

    queue: MessageQueue
    required: bool


class RocketMQOutbox(Outbox):
    """The Outbox protocol. Thread-safe."""

    def __init__(self, client: Client, log: RocketMQLog, *, timing: LockTiming = LockTiming()) -> None:  # noqa: B008
        self._client = client
        self._log = log
        self._timing = timing

    def register(self, run: SourceRun, queue: MessageQueue, offsets: OffsetRange, token: LockToken | None) -> None:
        """Do nothing: a RocketMQ broker cannot bind a publish to a source's lock."""

    def open(self, batch: SinkBatch, partition: int) -> RocketMQStaging:
        """See `Outbox.open`. Raises GroupError BAD_NAME if the user named a group with an invalid name."""
        if batch.group is not None:
            lock_rules.check_name(batch.group)
        return RocketMQStaging(self._client, self._log, batch, partition, self._timing)

    def publish(
        self,
        batch: SinkBatch,
        receipts: Sequence[Receipt],
        *,
        move_offsets: bool = True,  # noqa: ARG002
        skip_differing_replay: bool = False,
        again: Callable[[int], ChooseAgain] | None = None,  # noqa: ARG002
    ) -> Published:
        """Record that the batch is committed. Readers already see its rows. No source group's offsets are moved here.

        The tasks of a batch send nothing if it or a newer batch was committed: `_record_commit` stores the committed batches at the
        brokers. Raises SinkError REPLAY_DIFFERS if the batch was committed with other rows and its tasks noticed that in the queues
        to which they now write; OUT_OF_ORDER; BATCH_TOO_OLD; TOKEN_GONE for receipts of another batch.
        """
        chosen: dict[int, Token] = {}
        for receipt in receipts:
            # Two attempts of one partition have the same rows, so the first receipt counts.
            chosen.setdefault(receipt.partition, parse_token(batch, receipt))
        tokens = [chosen[partition] for partition in sorted(chosen)]
        if batch.sink_id is None:
            return Published(False, ranges([report for token in tokens for report in token.reports]))
        settled = self._settle(batch, tokens)
        spans = ranges([*(report for token in tokens for report in token.reports), *settled])
        sink = sink_name(batch.sink_id)
        marks = {queue.topic: Bookmarks(self._client, sink, queue.topic, batch.group) for queue in spans}
        # Rows that were not sent have no range, but their brokers know whether the batch was committed.
        written = [report.queue for token in tokens for report in token.reports if report.rows]
        brokers = self._brokers(batch, written)
        self._for_each(
            [broker.queue for broker in brokers if broker.required], lambda queue: self._marks(batch, queue).require_own(queue)
        )
        committed = self._for_each(brokers, lambda broker: self._committed(batch, broker))
        bookmarks: dict[MessageQueue, int | None] = {}
        for topic, of_topic in marks.items():
            queues = [queue for queue in spans if queue.topic == topic]
            bookmarks.update(zip(queues, of_topic.get_all(queues)))
        verdict = judge(
            batch,
            tokens,
            bookmarks,
            [stored for stored in committed.values() if stored is not None],
            settled,
            skip=skip_differing_replay,
        )
        require_same(batch.sink_id, batch.batch_id, verdict.newest, verdict.differs, skip=skip_differing_replay)
        for topic, of_topic in marks.items():
            of_topic.move_all({queue: bookmark for queue, bookmark in verdict.bookmarks.items() if queue.topic == topic})
        self._for_each(committed, lambda broker: self._record_commit(batch, broker, committed[broker]))
        _warn(batch, tokens, settled)
        return Published(True, {}) if verdict.replayed else Published(False, spans)

    def _settle(self, batch: SinkBatch, tokens: Sequence[Token]) -> list[QueueReport]:
        """Send the rows that are missing because several tasks found the same message."""
        assert batch.sink_id is not None
        contested = count_contested(tokens)
        if not contested:
            return []
        free_partition = 1 + max(token.partition for token in tokens)
        writer = Writer(sink_name(batch.sink_id), batch.batch_id, free_partition, tokens[0].run, batch.group)
        attempt = Attempt(self._client, self._log, writer, self._timing)
        locks = {(queue.topic, queue.broker_name): BrokerLock(attempt, queue) for queue in contested}
        writers: dict[RocketMQQueue, QueueWriter] = {}
        for queue in contested:
            port = RocketMQQueue(attempt, queue, locks[queue.topic, queue.broker_name])
            writers[port] = QueueWriter(port, writer, free_partition)
        try:
            self._for_each(
                writers,
                lambda port: settle(port, writers[port], f"queue {port.queue} (batch {batch.batch_id})", contested[port.queue]),
            )
        finally:
            RocketMQQueue.release_all({port: queue_writer.end for port, queue_writer in writers.items()})
        return [queue_writer.report() for queue_writer in writers.values()]

    def _brokers(self, batch: SinkBatch, written: Iterable[MessageQueue]) -> list[_TopicBroker]:
        """Return all brokers of the batch's topics, because the batch may be repeated with other rows, which may go to any queue.

        If the rows have a topic column, only topics with rows of the batch are included.
        """
        required = {(queue.topic, queue.broker_name): _TopicBroker(queue, True) for queue in written}
        topics = {topic for topic, _ in required} | ({batch.topic} if batch.topic is not None else set())
        others: dict[tuple[str, str], _TopicBroker] = {}
        for topic in topics:
            with contextlib.suppress(TopicError, RocketMQUnavailableError):
                # Brokers that are read-only now may accept rows later.
                route = self._client.route(topic, Deadline.after(_OTHER_BROKERS))
                names = [name for name, broker in route.brokers.items() if broker.master is not None]
                others.update({(topic, name): _TopicBroker(MessageQueue(topic, name, 0), False) for name in names})
        return list({**others, **required}.values())

    def _marks(self, batch: SinkBatch, queue: MessageQueue, timeout: float = TIMEOUT) -> Bookmarks:
        assert batch.sink_id is not None
        return Bookmarks(self._client, sink_name(batch.sink_id), queue.topic, batch.group, timeout=timeout)

    def _committed(self, batch: SinkBatch, broker: _TopicBroker) -> Committed | None:
        """Return what a broker knows about the batch; None if it has none of the rows and cannot be reached."""
        if broker.required:
            return self._marks(batch, broker.queue).committed(broker.queue, batch.batch_id)
        with contextlib.suppress(OrderedMQError):
            return self._marks(batch, broker.queue, _OTHER_BROKERS).committed(broker.queue, batch.batch_id)
        return None

    def _record_commit(self, batch: SinkBatch, broker: _TopicBroker, committed: Committed | None) -> None:
        """Store at a broker that the batch is committed. Skip a broker that has none of the rows and cannot be reached."""
        if committed is None:
            return
        assert batch.sink_id is not None
        if broker.required:
            self._marks(batch, broker.queue).commit(broker.queue, batch.batch_id, committed)
            return
        bookmarks = self._marks(batch, broker.queue, _OTHER_BROKERS)
        writer = Writer(sink_name(batch.sink_id), batch.batch_id, 0, group=batch.group)
        queue = RocketMQQueue(Attempt(self._client, self._log, writer, self._timing), broker.queue)
        with contextlib.suppress(OrderedMQError):
            bookmarks.commit_elsewhere(broker.queue, batch.batch_id, committed, queue.seen_before, queue.require_rights)

    def _for_each(self, places: Iterable[P], what: Callable[[P], T]) -> dict[P, T]:
        """Call ``what`` for many queues or brokers in parallel, because each call waits for a broker."""
        remaining = list(places)
        if len(remaining) < 2:
            return {place: what(place) for place in remaining}
        with ThreadPoolExecutor(min(PARALLEL, len(remaining)), thread_name_prefix="publish") as pool:
            return dict(zip(remaining, pool.map(what, remaining)))

    def discard(self, receipts: Sequence[Receipt]) -> None:
        """Do nothing: sent rows stay. The batch's next attempt finds them and sends the missing ones."""


def _warn(batch: SinkBatch, tokens: Sequence[Token], settled: Sequence[QueueReport]) -> None:
    """Warn about messages that match no row of the batch. A broker cannot delete them."""
    committed = {report.queue for token in tokens for report in token.reports if report.committed}
    for queue, extra in count_unmatched(tokens, settled).items():
        if queue not in committed:
            logger.warning(
                "queue %s has %d messages of batch %d that an earlier run sent and that match no row of the last run, because the query is "
                "not deterministic. Readers see these messages",
                queue,
                extra,
                batch.batch_id,
            )
    for token in tokens:
        for report in token.reports:
            if report.extra and not report.committed:
                logger.warning(
                    "queue %s has %d messages of batch %d, partition %d, that an earlier attempt sent and that match no row of the last "
                    "one, because the query is not deterministic. Readers see these messages",
                    report.queue,
                    report.extra,
                    batch.batch_id,
                    token.partition,
                )
