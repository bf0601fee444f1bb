"""The Outbox over RocketMQ: rows are sent as they are added, and a commit moves the sink's bookmarks.

RocketMQ cannot hide messages until a batch is committed. So a task that writes a batch again looks in each queue for what earlier attempts
sent, in whatever partitions they had the rows, and sends what is missing (lookback.py); a commit sends rows for which several tasks found
one message (contested.py). Readers see a batch's rows before its commit, and those of an attempt whose batch never is. What holds of a
batch with identity, once it is committed: each row is in its queue once, as long as its attempts were given the same rows and no request
that was given up is carried out a second later (a broker refuses what has waited for 200 ms, but a network may hold a request back for
longer; the repeated messages have the same stamps then). Of a batch without identity: at least once.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import pyarrow as pa

from orderedmq.broker import Published, Receipt, SinkBatch, SourceRun
from orderedmq.core.lock import LockToken
from orderedmq.core.message_rows import normalise
from orderedmq.errors import OrderedMQError, RocketMQUnavailableError, SinkError, TopicError
from orderedmq.model import MessageQueue, OffsetRange, check_topic
from orderedmq.rocketmq.group import lock_rules
from orderedmq.rocketmq.messages.log import RocketMQLog
from orderedmq.rocketmq.net import access
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.sink.bookmarks import Bookmarks
from orderedmq.rocketmq.sink.broker_queue import RocketMQQueue, Timing, given_up
from orderedmq.rocketmq.sink.commit_report import QueueReport, Token, judge, left_over, parse_token, ranges, taken
from orderedmq.rocketmq.sink.contested import settle
from orderedmq.rocketmq.sink.message_stamp import Writer, bookmark_group, run_name, sink_name
from orderedmq.rocketmq.sink.queue_writer import QueueWriter
from orderedmq.rocketmq.wire import rights

T = TypeVar("T")

log = logging.getLogger("orderedmq")

#: Queues that one task writes at the same time.
PARALLEL: Final = 16
#: Seconds for a question to a broker that has none of a batch's rows.
_OTHER_BROKERS: Final = 5.0
#: Bytes of rows that wait for their queues, of one task, above which whoever adds more has to wait.
WAITING_BYTES: Final = 64 * 1024 * 1024


class RocketMQOutbox:
    """The Outbox protocol. Thread-safe."""

    def __init__(self, client: Client, log: RocketMQLog, *, timing: Timing = Timing()) -> None:  # noqa: B008
        self._client = client
        self._log = log
        self._timing = timing

    def register(self, run: SourceRun, queue: MessageQueue, offsets: OffsetRange, token: LockToken | None) -> None:
        """Nothing: no broker could bind a publish to it."""

    def open(self, batch: SinkBatch, partition: int) -> RocketMQStaging:
        """Raises GroupError BAD_NAME."""
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
        """Note that the batch is complete; its rows can be read already. No group's offsets move here.

        Raises SinkError REPLAY_DIFFERS for a batch that was committed with other rows, as far as its tasks could see that in the queues
        that they write now; BATCH_TOO_OLD; TOKEN_GONE for receipts that are not of this batch. Of a batch that was committed nothing is
        sent; see `_note` for how that is known.
        """
        chosen: dict[int, Token] = {}
        for receipt in receipts:
            # Two attempts of one partition are the same rows: the first one named counts.
            chosen.setdefault(receipt.partition, parse_token(batch, receipt))
        tokens = [chosen[partition] for partition in sorted(chosen)]
        if batch.sink_id is None:
            return Published(False, ranges([report for token in tokens for report in token.reports]))
        settled = self._settle(batch, tokens)
        places = ranges([*(report for token in tokens for report in token.reports), *settled])
        marks = {queue: Bookmarks(self._client, sink_name(batch.sink_id), queue.topic, batch.group) for queue in places}
        self._each(
            {(queue.topic, queue.broker_name): queue for queue in places}.values(),
            lambda queue: marks[queue].require_own(queue),
        )
        try:
            verdict = judge(batch, tokens, self._each(places, lambda queue: marks[queue].get(queue)), settled)
        except SinkError:
            if not skip_differing_replay:
                raise
            return Published(True, {})
        if verdict.differs is not None and not skip_differing_replay:
            raise SinkError("REPLAY_DIFFERS", verdict.differs)
        self._each(verdict.bookmarks, lambda queue: marks[queue].move(queue, verdict.bookmarks[queue]))
        self._note(batch, places)
        _warn(batch, tokens, settled)
        return Published(True, {}) if verdict.replayed else Published(False, places)

    def _settle(self, batch: SinkBatch, tokens: Sequence[Token]) -> list[QueueReport]:
        """Send what is missing of rows for which several tasks found one message."""
        assert batch.sink_id is not None
        found = taken(tokens)
        nobodys = 1 + max((token.partition for token in tokens), default=0)
        run = tokens[0].run if tokens else ""
        writer = Writer(sink_name(batch.sink_id), batch.batch_id, nobodys, run, batch.group)
        return list(self._each(found, lambda queue: settle(self._place(queue, writer), writer, found[queue])).values())

    def _place(self, queue: MessageQueue, writer: Writer) -> RocketMQQueue:
        client_id = f"sink@{uuid.uuid4().hex}"
        return RocketMQQueue(self._client, self._log, queue, writer, client_id, self._timing, threading.Event())

    def _note(self, batch: SinkBatch, places: Iterable[MessageQueue]) -> None:
        """That the batch is committed, at each broker of its topics: a repeat with other rows may come to queues that it has no rows in.

        A broker that has none of its rows and cannot be asked is passed over. Where a batch names no topic (a topic column), topics that
        it has no rows for are not noted.
        """
        assert batch.sink_id is not None
        sink = sink_name(batch.sink_id)
        must = {(queue.topic, queue.broker_name): queue for queue in places}
        topics = {queue.topic for queue in must.values()} | ({batch.topic} if batch.topic is not None else set())
        others: dict[tuple[str, str], MessageQueue] = {}
        for topic in topics:
            with contextlib.suppress(TopicError, RocketMQUnavailableError):
                route = self._client.route(topic, time.monotonic() + _OTHER_BROKERS)
                others.update({(topic, queue.broker_name): queue for queue in route.publish_list()})

        def note(queue: MessageQueue) -> None:
            if must.get((queue.topic, queue.broker_name)) == queue:
                Bookmarks(self._client, sink, queue.topic, batch.group).commit(queue, batch.batch_id)
                return
            marks = Bookmarks(self._client, sink, queue.topic, batch.group, timeout=_OTHER_BROKERS)
            place = self._place(queue, Writer(sink, batch.batch_id, 0, group=batch.group))
            with contextlib.suppress(OrderedMQError):
                marks.commit_elsewhere(queue, batch.batch_id, place.seen_before, place.require_rights)

        self._each({**others, **must}.values(), note)

    def _each(self, queues: Iterable[MessageQueue], what: Callable[[MessageQueue], T]) -> dict[MessageQueue, T]:
        """Of many queues at the same time: each is a question to a broker."""
        asked = list(queues)
        if len(asked) < 2:
            return {queue: what(queue) for queue in asked}
        with ThreadPoolExecutor(min(PARALLEL, len(asked)), thread_name_prefix="publish") as pool:
            return dict(zip(asked, pool.map(what, asked)))

    def discard(self, receipts: Sequence[Receipt]) -> None:
        """Nothing: what was sent stays. The batch's next attempt believes it, and sends what is missing."""


def _warn(batch: SinkBatch, tokens: Sequence[Token], settled: Sequence[QueueReport]) -> None:
    """Messages that nobody can take back."""
    committed = {report.queue for token in tokens for report in token.reports if report.committed}
    for queue, extra in left_over(tokens, settled).items():
        if queue not in committed:
            log.warning(
                "queue %s has %d messages of batch %d that an earlier run of it sent and the last one did not have: readers see them; the "
                "query is not deterministic",
                queue,
                extra,
                batch.batch_id,
            )
    for token in tokens:
        for report in token.reports:
            if report.extra and not report.committed:
                log.warning(
                    "queue %s has %d messages of batch %d, partition %d, that an earlier attempt sent and the last one did not have: readers "
                    "see them; the query is not deterministic",
                    report.queue,
                    report.extra,
                    batch.batch_id,
                    token.partition,
                )


class _Line:
    """The rows that wait for one queue, and whether a thread is at work on them."""

    def __init__(self, queue: MessageQueue, writer: QueueWriter) -> None:
        self.queue = queue
        self.writer = writer
        self.waiting: list[pa.RecordBatch] = []
        self.busy = False
        #: Rows that were added, and that were handed to the writer.
        self.rows = 0
        self.written = 0


class RocketMQStaging:
    """The Staging protocol, of one attempt; used by one thread. A queue's rows are sent by one thread at a time, queues in parallel."""

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
        #: Whose the locks are. Each attempt is somebody else.
        self._client_id = f"sink@{uuid.uuid4().hex}"
        self._lines: dict[MessageQueue, _Line] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._stop = threading.Event()
        # Guards what follows and the lines' contents.
        self._changed = threading.Condition()
        self._waiting_bytes = 0
        self._busy = 0
        self._error: BaseException | None = None

    def add(self, queue: MessageQueue, rows: pa.RecordBatch) -> None:
        """Send rows, sooner or later. Raises also what became of rows that were added before; these may have been sent then."""
        line = self._lines.get(queue)
        checked = normalise(rows, f"queue {queue}", line.rows if line is not None else 0)
        if line is None:
            line = self._lines[queue] = self._line(queue)
        with self._changed:
            self._changed.wait_for(lambda: self._waiting_bytes < WAITING_BYTES or self._error is not None)
            if self._error is not None:
                raise self._error
            line.rows += checked.num_rows
            if not checked.num_rows:
                return
            line.waiting.append(checked)
            self._waiting_bytes += checked.nbytes
            if not line.busy:
                line.busy = True
                self._busy += 1
                self._started().submit(self._work, line)

    def receipt(self) -> Receipt:
        """Everything added is stored and can be read; the queues are free for other attempts."""
        self._join()
        if self._error is not None:
            raise self._error
        self._close_lines()
        if self._error is not None:
            raise self._error
        reports = tuple(line.writer.report() for line in self._lines.values())
        sink, run = (self._writer.sink, self._writer.run) if self._writer is not None else (None, "")
        token = Token(sink, self._batch.batch_id, self._partition, reports, run)
        return Receipt(token.text(), self._partition, {queue: line.rows for queue, line in self._lines.items()})

    def abandon(self) -> None:
        """Send no more, and free the queues. What was sent stays."""
        self._stop.set()
        with self._changed:
            self._error = self._error or given_up(next(iter(self._lines), MessageQueue("", "", 0)))
        self._join()
        self._close_lines()

    # --- threads

    def _line(self, queue: MessageQueue) -> _Line:
        """Raises TopicError MISSING, RESERVED or NO_SUCH_QUEUE."""
        check_topic(queue.topic, writing=True)
        # A route that is some seconds old will do: a queue that is gone refuses what is sent.
        if queue not in self._route(queue.topic):
            self._log.require(queue)
        place = RocketMQQueue(
            self._client, self._log, queue, self._writer, self._client_id, self._timing, self._stop, self._yield
        )
        return _Line(queue, QueueWriter(place, self._writer, self._partition))

    def _route(self, topic: str) -> tuple[MessageQueue, ...]:
        try:
            return self._client.route(topic, time.monotonic() + self._timing.patience).publish_list()
        except TopicError:
            return ()

    def _started(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix=f"send-{self._partition}")
        return self._pool

    def _work(self, line: _Line) -> None:
        """Write what waits for one queue, until nothing does."""
        try:
            while (waiting := self._next(line)) is not None:
                for rows in _joined(waiting):
                    line.writer.write(rows, line.written)
                    line.written += rows.num_rows
                with self._changed:
                    self._waiting_bytes -= sum(batch.nbytes for batch in waiting)
                    self._changed.notify_all()
        except BaseException as error:  # handed to the task's thread, which raises it
            explained = self._explained(error, line.queue)
            with self._changed:
                self._error = self._error or explained
                self._end(line)

    def _explained(self, error: BaseException, queue: MessageQueue) -> BaseException:
        """For an account that lacks a right: all that it lacks."""
        if self._writer is None:
            return error
        group = bookmark_group(self._writer.sink, queue.topic, self._writer.group)
        return access.explained(self._client, error, rights.of_sink(queue.topic, group), rights.SINK)

    def _next(self, line: _Line) -> list[pa.RecordBatch] | None:
        """What waits; None, and the line is not worked on any more, when nothing does."""
        with self._changed:
            waiting, line.waiting = line.waiting, []
            if waiting and self._error is None:
                return waiting
            self._end(line)
            return None

    def _end(self, line: _Line) -> None:
        line.busy = False
        self._busy -= 1
        self._changed.notify_all()

    def _yield(self) -> None:
        """A queue is another attempt's: if that one waits for a queue of ours, both would wait for ever."""
        with self._changed:
            idle = [line for line in self._lines.values() if not line.busy]
            for line in idle:
                line.busy = True
                self._busy += 1
        for line in idle:
            try:
                line.writer.let_go()
                # Rows may have come for it meanwhile.
                self._started().submit(self._work, line)
            except BaseException as error:  # as in `_work`
                with self._changed:
                    self._error = self._error or error
                    self._end(line)

    def _join(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._busy)

    def _close_lines(self) -> None:
        if self._pool is None:
            return
        for closing in [self._pool.submit(line.writer.let_go) for line in self._lines.values()]:
            try:
                closing.result()
            except BaseException as error:
                self._error = self._error or error
        self._pool.shutdown()
        self._pool = None


def _joined(waiting: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Small batches as one, where they have the same columns: one request for all."""
    for _, alike in itertools.groupby(waiting, key=lambda batch: batch.schema.names):
        batches = list(alike)
        yield pa.concat_batches(batches) if len(batches) > 1 else batches[0]
