"""The Outbox over RocketMQ: rows are sent as they are added, and a commit moves the sink's bookmarks.

RocketMQ cannot hide messages until a batch is committed. So a task that writes a batch again searches each queue for the rows
that earlier attempts sent, whatever their partitions, and sends what is missing (lookback.py). A commit sends rows for which
several tasks found the same message (contested.py). Readers see a batch's rows before its commit, and also those of a batch
that is never committed.

Once a batch with identity is committed, each row is in its queue once. This holds as long as all attempts were given the same
rows, and no request that was given up is carried out a second later. (A broker refuses a request that has waited for 200 ms,
but a network may hold one back; repeated messages have the same stamps.) A batch without identity is written at least once.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import pyarrow as pa

from orderedmq.broker import Published, Receipt, SinkBatch
from orderedmq.core import delays
from orderedmq.core.lock import LockToken
from orderedmq.core.message_rows import normalise
from orderedmq.core.micro_batch import SourceRun
from orderedmq.errors import OrderedMQError, RocketMQUnavailableError, SinkError, TopicError, replay_differs
from orderedmq.model import MessageQueue, OffsetRange, check_topic
from orderedmq.rocketmq.group import lock_rules
from orderedmq.rocketmq.messages.log import RocketMQLog
from orderedmq.rocketmq.net import access
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.deadline import Deadline
from orderedmq.rocketmq.sink import delayed_rows
from orderedmq.rocketmq.sink.bookmarks import Bookmarks
from orderedmq.rocketmq.sink.broker_queue import RocketMQQueue, Timing, abandoned
from orderedmq.rocketmq.sink.commit_report import (
    QueueReport,
    Token,
    count_contested,
    count_unmatched,
    judge,
    parse_token,
    ranges,
)
from orderedmq.rocketmq.sink.contested import settle
from orderedmq.rocketmq.sink.delayed_rows import DelayedRows
from orderedmq.rocketmq.sink.message_stamp import Writer, bookmark_group, run_name, sink_name
from orderedmq.rocketmq.sink.queue_writer import QueueWriter, Start
from orderedmq.rocketmq.wire import rights

T = TypeVar("T")

log = logging.getLogger("orderedmq")

#: Queues that one task writes in parallel.
PARALLEL: Final = 16
#: Seconds for a request to a broker that has none of a batch's rows.
_OTHER_BROKERS: Final = 5.0
#: Bytes of rows that may wait for their queues in one task. Above this, `RocketMQStaging.add` waits.
WAITING_BYTES: Final = 64 * 1024 * 1024


class RocketMQOutbox:
    """The Outbox protocol. Thread-safe."""

    def __init__(self, client: Client, log: RocketMQLog, *, timing: Timing = Timing()) -> None:  # noqa: B008
        self._client = client
        self._log = log
        self._timing = timing

    def register(self, run: SourceRun, queue: MessageQueue, offsets: OffsetRange, token: LockToken | None) -> None:
        """Do nothing: a RocketMQ broker cannot bind a publish to a source's lock."""

    def open(self, batch: SinkBatch, partition: int) -> RocketMQStaging:
        """See `Outbox.open`. Raises GroupError BAD_NAME for the group that the user named."""
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
    ) -> Published:
        """Record that the batch is complete; its rows can be read already. No group's offsets move here.

        A batch that was committed before is not sent again: `_record_commit` stores at the brokers that it was committed. Raises
        SinkError REPLAY_DIFFERS for a batch that was committed with other rows, as far as its tasks saw that in the queues that
        they now write; BATCH_TOO_OLD; TOKEN_GONE for receipts that are not of this batch.
        """
        chosen: dict[int, Token] = {}
        for receipt in receipts:
            # Two attempts of one partition have the same rows: the first receipt counts.
            chosen.setdefault(receipt.partition, parse_token(batch, receipt))
        tokens = [chosen[partition] for partition in sorted(chosen)]
        if batch.sink_id is None:
            return Published(False, ranges([report for token in tokens for report in token.reports]))
        settled = self._settle(batch, tokens)
        spans = ranges([*(report for token in tokens for report in token.reports), *settled])
        # Delayed rows have no bookmark, but that they were sent must be known when the batch comes again.
        delayed = [report.queue for token in tokens for report in token.reports if report.delayed]
        bookmarks = {
            queue: Bookmarks(self._client, sink_name(batch.sink_id), queue.topic, batch.group) for queue in (*delayed, *spans)
        }
        self._for_each(
            {(queue.topic, queue.broker_name): queue for queue in bookmarks}.values(),
            lambda queue: bookmarks[queue].require_own(queue),
        )
        try:
            verdict = judge(batch, tokens, self._for_each(spans, lambda queue: bookmarks[queue].get(queue)), settled)
        except SinkError:
            if not skip_differing_replay:
                raise
            return Published(True, {})
        if verdict.differs is not None and not skip_differing_replay:
            raise replay_differs(f"batch {batch.batch_id} of this query", verdict.differs)
        self._for_each(verdict.bookmarks, lambda queue: bookmarks[queue].move(queue, verdict.bookmarks[queue]))
        self._record_commit(batch, bookmarks)
        _warn(batch, tokens, settled)
        return Published(True, {}) if verdict.replayed else Published(False, spans)

    def require_delays(self, columns: Sequence[str], topic: str | None) -> None:
        """See `Outbox.require_delays`. What cannot be found out now is found out when rows go to a broker."""
        delayed_rows.require(self._client, columns, topic)

    def _settle(self, batch: SinkBatch, tokens: Sequence[Token]) -> list[QueueReport]:
        """Send the rows that are missing because several tasks found the same message."""
        assert batch.sink_id is not None
        contested = count_contested(tokens)
        free_partition = 1 + max((token.partition for token in tokens), default=0)
        run = tokens[0].run if tokens else ""
        writer = Writer(sink_name(batch.sink_id), batch.batch_id, free_partition, run, batch.group)
        return list(
            self._for_each(
                contested, lambda queue: settle(self._broker_queue(queue, writer), writer, contested[queue])
            ).values()
        )

    def _broker_queue(self, queue: MessageQueue, writer: Writer) -> RocketMQQueue:
        client_id = f"sink@{uuid.uuid4().hex}"
        return RocketMQQueue(self._client, self._log, queue, writer, client_id, self._timing, threading.Event())

    def _record_commit(self, batch: SinkBatch, queues: Iterable[MessageQueue]) -> None:
        """Store at each broker of its topics that the batch is committed: a repeat with other rows may come to any queue.

        A broker that has none of the batch's rows and cannot be reached is skipped. If the rows have a topic column, only
        topics with rows of the batch are covered.
        """
        assert batch.sink_id is not None
        sink = sink_name(batch.sink_id)
        required = {(queue.topic, queue.broker_name): queue for queue in queues}
        topics = {queue.topic for queue in required.values()} | ({batch.topic} if batch.topic is not None else set())
        others: dict[tuple[str, str], MessageQueue] = {}
        for topic in topics:
            with contextlib.suppress(TopicError, RocketMQUnavailableError):
                route = self._client.route(topic, Deadline.after(_OTHER_BROKERS))
                others.update({(topic, queue.broker_name): queue for queue in route.publish_list()})

        def record(queue: MessageQueue) -> None:
            if required.get((queue.topic, queue.broker_name)) == queue:
                Bookmarks(self._client, sink, queue.topic, batch.group).commit(queue, batch.batch_id)
                return
            bookmarks = Bookmarks(self._client, sink, queue.topic, batch.group, timeout=_OTHER_BROKERS)
            broker_queue = self._broker_queue(queue, Writer(sink, batch.batch_id, 0, group=batch.group))
            with contextlib.suppress(OrderedMQError):
                bookmarks.commit_elsewhere(queue, batch.batch_id, broker_queue.seen_before, broker_queue.require_rights)

        self._for_each({**others, **required}.values(), record)

    def _for_each(self, queues: Iterable[MessageQueue], what: Callable[[MessageQueue], T]) -> dict[MessageQueue, T]:
        """Call ``what`` for many queues in parallel, since each call waits for a broker."""
        asked = list(queues)
        if len(asked) < 2:
            return {queue: what(queue) for queue in asked}
        with ThreadPoolExecutor(min(PARALLEL, len(asked)), thread_name_prefix="publish") as pool:
            return dict(zip(asked, pool.map(what, asked)))

    def discard(self, receipts: Sequence[Receipt]) -> None:
        """Do nothing: sent rows stay. The batch's next attempt finds them and sends what is missing."""


def _warn(batch: SinkBatch, tokens: Sequence[Token], settled: Sequence[QueueReport]) -> None:
    """Warn of messages that match no row of the batch and cannot be taken back."""
    committed = {report.queue for token in tokens for report in token.reports if report.committed}
    for queue, extra in count_unmatched(tokens, settled).items():
        if queue not in committed:
            log.warning(
                "queue %s has %d messages of batch %d that an earlier run sent and that match no row of the last run: readers see them; the "
                "query is not deterministic",
                queue,
                extra,
                batch.batch_id,
            )
    for token in tokens:
        for report in token.reports:
            if report.extra and not report.committed:
                log.warning(
                    "queue %s has %d messages of batch %d, partition %d, that an earlier attempt sent and that match no row of the last one: "
                    "readers see them; the query is not deterministic",
                    report.queue,
                    report.extra,
                    batch.batch_id,
                    token.partition,
                )


class _Backlog:
    """The rows that wait for one queue, and whether a thread is writing them."""

    def __init__(self, queue: MessageQueue, writer: QueueWriter) -> None:
        self.queue = queue
        self.writer = writer
        self.waiting: list[pa.RecordBatch] = []
        self.busy = False
        #: Rows that were added, and rows that the writer has written.
        self.rows = 0
        self.written = 0


class RocketMQStaging:
    """The Staging protocol for one attempt; used by one thread.

    One thread at a time sends a queue's rows, queues in parallel.
    """

    def __init__(self, client: Client, log: RocketMQLog, batch: SinkBatch, partition: int, timing: Timing) -> None:
        self._client = client
        self._log = log
        self._batch = batch
        self._partition = partition
        self._timing = timing
        self._writer = (
            Writer(sink_name(batch.sink_id), batch.batch_id, partition, run_name(batch.job), batch.group)
            if batch.sink_id is not None
            else None
        )
        #: The client id of this attempt's locks, unique to it.
        self._client_id = f"sink@{uuid.uuid4().hex}"
        self._backlogs: dict[MessageQueue, _Backlog] = {}
        self._delayed = DelayedRows(client, batch.batch_id, partition, timing, self._enter, self._explain)
        self._pool: ThreadPoolExecutor | None = None
        self._stop = threading.Event()
        # Guards the fields below and the backlogs' contents.
        self._changed = threading.Condition()
        self._waiting_bytes = 0
        self._busy = 0
        self._error: BaseException | None = None

    def add(self, queue: MessageQueue, rows: pa.RecordBatch) -> None:
        """Send rows, sooner or later. Also raises the error of rows added before, some of which may have been sent."""
        rows, delayed = delays.split(rows)
        if delayed is not None:
            self._require(queue)
            self._delayed.add(queue, delayed)
            if not rows.num_rows:
                return
        backlog = self._backlogs.get(queue)
        checked = normalise(rows, f"queue {queue}", backlog.rows if backlog is not None else 0)
        if backlog is None:
            backlog = self._backlogs[queue] = self._make_backlog(queue)
        with self._changed:
            self._changed.wait_for(lambda: self._waiting_bytes < WAITING_BYTES or self._error is not None)
            if self._error is not None:
                raise self._error
            backlog.rows += checked.num_rows
            if not checked.num_rows:
                return
            backlog.waiting.append(checked)
            self._waiting_bytes += checked.nbytes
            if not backlog.busy:
                backlog.busy = True
                self._busy += 1
                self._start_pool().submit(self._work, backlog)

    def receipt(self) -> Receipt:
        """Wait until everything added is stored and readable, free the queues, and return the receipt."""
        self._join()
        if self._error is not None:
            raise self._error
        self._release_queues()
        if self._error is not None:
            raise self._error
        self._delayed.send()
        reports = self._delayed.add_to([backlog.writer.report() for backlog in self._backlogs.values()])
        sink, run = (self._writer.sink, self._writer.run) if self._writer is not None else (None, "")
        token = Token(sink, self._batch.batch_id, self._partition, reports, run)
        rows = {queue: backlog.rows for queue, backlog in self._backlogs.items()}
        for queue, count in self._delayed.counts.items():
            rows[queue] = rows.get(queue, 0) + count
        return Receipt(token.text(), self._partition, rows)

    def abandon(self) -> None:
        """Stop sending, and free the queues. Rows that were sent stay."""
        self._stop.set()
        with self._changed:
            self._error = self._error or abandoned(next(iter(self._backlogs), MessageQueue("", "", 0)))
        self._join()
        self._release_queues()

    # --- threads

    def _make_backlog(self, queue: MessageQueue) -> _Backlog:
        """Return an empty backlog for a queue. Raises TopicError MISSING, RESERVED or NO_SUCH_QUEUE."""
        self._require(queue)
        return _Backlog(queue, QueueWriter(self._broker_queue(queue), self._writer, self._partition))

    def _require(self, queue: MessageQueue) -> None:
        check_topic(queue.topic, writing=True)
        # A route that is some seconds old will do: a queue that was deleted refuses what is sent.
        if queue not in self._route(queue.topic):
            self._log.require(queue)
        self._log.refuse_hidden_static(queue.topic)

    def _broker_queue(self, queue: MessageQueue) -> RocketMQQueue:
        return RocketMQQueue(
            self._client, self._log, queue, self._writer, self._client_id, self._timing, self._stop, self._yield
        )

    def _enter(self, queue: MessageQueue) -> Start | None:
        """Make the sink's group for delayed rows, and return what is known of the sink there; None without identity."""
        if self._writer is None:
            return None
        broker_queue = self._broker_queue(queue)
        broker_queue.enter()
        return broker_queue.start()

    def _route(self, topic: str) -> tuple[MessageQueue, ...]:
        try:
            return self._client.route(topic, Deadline.after(self._timing.patience)).publish_list()
        except TopicError:
            return ()

    def _start_pool(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix=f"send-{self._partition}")
        return self._pool

    def _work(self, backlog: _Backlog) -> None:
        """Write the rows that wait for one queue until none are left."""
        try:
            while (waiting := self._next(backlog)) is not None:
                for rows in _join_alike(waiting):
                    backlog.writer.write(rows, backlog.written)
                    backlog.written += rows.num_rows
                with self._changed:
                    self._waiting_bytes -= sum(batch.nbytes for batch in waiting)
                    self._changed.notify_all()
        except BaseException as error:  # handed to the task's thread, which raises it
            explained = self._explain(error, backlog.queue)
            with self._changed:
                self._error = self._error or explained
                self._end(backlog)

    def _explain(self, error: BaseException, queue: MessageQueue) -> BaseException:
        """Return the error; if the account lacks a right, one that names all the rights that it lacks."""
        if self._writer is None:
            return error
        group = bookmark_group(self._writer.sink, queue.topic, self._writer.group)
        return access.explain(self._client, error, rights.of_sink(queue.topic, group), rights.SINK)

    def _next(self, backlog: _Backlog) -> list[pa.RecordBatch] | None:
        """Return the waiting rows. None if there are none, or after an error; the backlog then has no thread any more."""
        with self._changed:
            waiting, backlog.waiting = backlog.waiting, []
            if waiting and self._error is None:
                return waiting
            self._end(backlog)
            return None

    def _end(self, backlog: _Backlog) -> None:
        backlog.busy = False
        self._busy -= 1
        self._changed.notify_all()

    def _yield(self) -> None:
        """Give idle queues back while another attempt's lock is waited for: if it waits for ours, both would wait for ever."""
        with self._changed:
            idle = [backlog for backlog in self._backlogs.values() if not backlog.busy]
            for backlog in idle:
                backlog.busy = True
                self._busy += 1
        for backlog in idle:
            try:
                backlog.writer.let_go()
                # Rows may have been added to the backlog meanwhile.
                self._start_pool().submit(self._work, backlog)
            except BaseException as error:  # as in `_work`
                with self._changed:
                    self._error = self._error or error
                    self._end(backlog)

    def _join(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._busy)

    def _release_queues(self) -> None:
        if self._pool is None:
            return
        for closing in [self._pool.submit(backlog.writer.let_go) for backlog in self._backlogs.values()]:
            try:
                closing.result()
            except BaseException as error:
                self._error = self._error or error
        self._pool.shutdown()
        self._pool = None


def _join_alike(waiting: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield adjacent batches with the same columns as one, so that small ones share a request."""
    for _, alike in itertools.groupby(waiting, key=lambda batch: batch.schema.names):
        batches = list(alike)
        yield pa.concat_batches(batches) if len(batches) > 1 else batches[0]
