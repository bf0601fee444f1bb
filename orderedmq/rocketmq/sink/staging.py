"""One attempt of a writing task over RocketMQ: threads send the rows of its queues in parallel, and then give the queues back."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pyarrow as pa

from orderedmq.broker import Receipt, SinkBatch
from orderedmq.conditions import TopicCondition
from orderedmq.errors import TopicError
from orderedmq.model import MessageQueue, check_topic
from orderedmq.rocketmq.append.broker_port import packing_for
from orderedmq.rocketmq.append.once import AppendWait
from orderedmq.rocketmq.messages.log import RocketMQLog
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.deadline import Deadline
from orderedmq.rocketmq.sink.agreement import Agreement
from orderedmq.rocketmq.sink.broker_lock import Attempt, BrokerLock, LockTiming, abandoned
from orderedmq.rocketmq.sink.broker_queue import RocketMQQueue, RocketMQTopicBrokers
from orderedmq.rocketmq.sink.commit_report import Token
from orderedmq.rocketmq.sink.message_stamp import Writer, run_name, sink_name
from orderedmq.rocketmq.sink.queue_writer import QueueWriter
from orderedmq.rocketmq.wire.route import RouteState, state_of
from orderedmq.schema import concat_batches

#: Threads with which one task writes.
PARALLEL: Final = 16
#: Added rows wait until there are this many bytes of them, or until the task ends, so that queues share requests. Also the most bytes that
#: one thread takes at once, unless they are for one queue.
TOGETHER_BYTES: Final = 1024 * 1024
#: The most queues that one thread takes at once. It reads up to 256 KiB from each.
TOGETHER: Final = 64
#: Bytes of rows that may wait for their queues in one task. Above this, `RocketMQStaging.add` waits.
WAITING_BYTES: Final = 64 * 1024 * 1024


class _Backlog:
    """The rows that wait for one queue. It is ``busy`` while it waits for a thread or a thread is writing its rows."""

    def __init__(self, port: RocketMQQueue, writer: QueueWriter) -> None:
        self.port = port
        self.queue = port.queue
        self.writer = writer
        self.waiting: list[pa.RecordBatch] = []
        self.busy = False
        #: The unfinished write, if it has to wait and so needs a separate thread.
        self.steps: Iterator[AppendWait] | None = None
        #: Rows that were added, and rows that the writer has written.
        self.rows = 0
        self.written = 0

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in self.waiting)


class RocketMQStaging:
    """The Staging protocol for one attempt. Used by one thread.

    Its threads send the rows of several queues in parallel, but one thread at a time sends the rows of one queue. A thread takes several
    queues of a broker together if they have few rows, because otherwise a task with rows for many queues would send many requests for each
    of them. A queue that has to wait, as for the lock of another attempt, gets a separate thread.
    """

    def __init__(self, client: Client, log: RocketMQLog, batch: SinkBatch, partition: int, timing: LockTiming) -> None:
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
        self._attempt = Attempt(client, log, self._writer, timing)
        #: By topic and broker. A batch without identity has none.
        self._locks: dict[tuple[str, str], BrokerLock] = {}
        self._backlogs: dict[MessageQueue, _Backlog] = {}
        #: By topic, on the queues of the batch.
        self._agreements: dict[str, Agreement] = {}
        #: By topic, the queues of a batch without identity.
        self._proposed: dict[str, Sequence[MessageQueue]] = {}
        self._pool: ThreadPoolExecutor | None = None
        # Guards the fields below and the backlogs' contents.
        self._changed = threading.Condition()
        self._waiting_bytes = 0
        self._busy = 0
        #: Busy backlogs that are in no group yet.
        self._added: list[_Backlog] = []
        self._added_bytes = 0
        #: The number of threads that use each lock.
        self._users: Counter[BrokerLock | None] = Counter()
        self._error: BaseException | None = None

    def targets(self, topic: str, proposed: Sequence[MessageQueue]) -> list[MessageQueue]:
        """See `Staging.targets`. Nothing has been sent to the topic if this raises SinkError QUEUES_AWAY or a broker's error."""
        if self._writer is None or not proposed:
            self._proposed[topic] = proposed
            return list(proposed)
        agreement = Agreement(RocketMQTopicBrokers(self._attempt, topic), self._writer.batch, self._timing.patience)
        queues = agreement.reach(proposed)
        self._agreements[topic] = agreement
        return list(queues)

    def add(self, queue: MessageQueue, rows: pa.RecordBatch) -> None:
        """Take rows, which are sent later by a thread. Also raises the error of earlier rows, some of which may have been sent."""
        backlog = self._backlogs.get(queue)
        if backlog is None:
            backlog = self._backlogs[queue] = self._make_backlog(queue)
        if queue.topic in self._proposed:
            self._require_unresized(queue.topic)
        # Before any row of this call is sent, refuse rows that a Proxy does not pass on.
        packing_for(self._client, queue, rows, f"queue {queue}", self._timing.patience, backlog.rows)
        with self._changed:
            self._changed.wait_for(lambda: self._waiting_bytes < WAITING_BYTES or self._error is not None)
            if self._error is not None:
                raise self._error
            backlog.rows += rows.num_rows
            if not rows.num_rows:
                return
            backlog.waiting.append(rows)
            self._waiting_bytes += rows.nbytes
            if not backlog.busy:
                backlog.busy = True
                self._busy += 1
                self._added.append(backlog)
            self._added_bytes += rows.nbytes
            if self._added_bytes >= TOGETHER_BYTES:
                self.start()

    def start(self) -> None:
        """Begin to send the rows that were added so far. Otherwise a few rows wait until `receipt`, or until there are more."""
        for group in self._take_added():
            self._submit(group)

    def receipt(self) -> Receipt:
        """Wait until all added rows are stored and can be read, give the queues back, and return the receipt."""
        self._join()
        if self._error is not None:
            raise self._error
        self._release_queues()
        if self._error is not None:
            raise self._error
        reports = tuple(backlog.writer.report() for backlog in self._backlogs.values())
        sink, run = (self._writer.sink, self._writer.run) if self._writer is not None else (None, "")
        token = Token(sink, self._batch.batch_id, self._partition, reports, run)
        rows = {queue: backlog.rows for queue, backlog in self._backlogs.items()}
        return Receipt(token.text(), self._partition, rows)

    def abandon(self) -> None:
        """Stop sending, and give the queues back. Rows that were sent stay."""
        self._attempt.stop.set()
        with self._changed:
            self._error = self._error or abandoned(next(iter(self._backlogs), MessageQueue("", "", 0)))
        self._join()
        self._release_queues()

    # --- threads

    def _make_backlog(self, queue: MessageQueue) -> _Backlog:
        """Return an empty backlog for a queue. Raises TopicError MISSING, RESERVED or NO_SUCH_QUEUE."""
        self._require(queue)
        port = RocketMQQueue(self._attempt, queue, self._lock_of(queue))
        return _Backlog(port, QueueWriter(port, self._writer, self._partition))

    def _require(self, queue: MessageQueue) -> None:
        check_topic(queue.topic, writing=True)
        # A route that is some seconds old is sufficient, because a broker refuses rows for a deleted queue.
        try:
            route = self._client.route(queue.topic, Deadline.after(self._timing.patience))
        except TopicError:
            route = None
        if state_of(queue, route) is RouteState.UNKNOWN:
            self._log.require(queue)
        self._log.refuse_hidden_static(queue.topic)

    def _require_unresized(self, topic: str) -> None:
        """Send no more rows of a batch without identity after its topic was resized. The resize waits only for other batches.

        It waits for longer than a route is kept. Raises TopicError QUEUE_COUNT.
        """
        route = self._client.route(topic, Deadline.after(self._timing.patience))
        resized = any(data.resized or data.paused for data in route.queues)
        if resized and route.publish_list() != tuple(self._proposed[topic]):
            raise TopicError(
                TopicCondition.QUEUE_COUNT,
                f"topic {topic!r} was resized during a batch write without txnAppId, whose rows belong to its former queues. Some of them are "
                "stored. Write the batch again",
            )

    def _lock_of(self, queue: MessageQueue) -> BrokerLock | None:
        """Return the lock of the queue's broker."""
        if self._writer is None:
            return None
        broker = queue.topic, queue.broker_name
        if broker not in self._locks:
            self._locks[broker] = BrokerLock(self._attempt, queue, self._yield, self._agreements.get(queue.topic))
        return self._locks[broker]

    def _take_added(self) -> list[list[_Backlog]]:
        """Return the busy backlogs that are in no group yet, in groups for one thread each."""
        with self._changed:
            added, self._added, self._added_bytes = self._added, [], 0
        by_broker: dict[tuple[str, str], list[_Backlog]] = {}
        for backlog in added:
            by_broker.setdefault((backlog.queue.topic, backlog.queue.broker_name), []).append(backlog)
        return [group for backlogs in by_broker.values() for group in _groups(backlogs)]

    def _submit(self, group: list[_Backlog]) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix=f"send-{self._partition}")
        self._pool.submit(self._work, group)

    def _work(self, group: list[_Backlog]) -> None:
        """Write the rows of a group."""
        lock = group[0].port.lock
        with self._changed:
            if self._error is not None:
                self._end(*group)
                return
            self._users[lock] += 1
        alone = group[0].steps is not None
        try:
            running = group if alone else self._acquire(group)
        except BaseException as error:  # handed to the task's thread, which raises it
            self._fail(error, *group)
            running = []
        while running:
            running = [backlog for backlog in running if self._advance(backlog, alone=alone)]
        with self._changed:
            self._users[lock] -= 1
            self._changed.notify_all()

    def _acquire(self, group: list[_Backlog]) -> list[_Backlog]:
        """Begin to write the rows of a group. Return the backlogs that need not wait, and let the others wait in separate threads."""
        others = [backlog for backlog in group if not backlog.port.keep()]
        RocketMQQueue.acquire_all([backlog.port for backlog in others])
        for backlog in others:
            # Another attempt may have had the lock in between.
            backlog.writer.look_again()
        for backlog in group:
            backlog.steps = self._write(backlog)
        waiting = [backlog for backlog in others if not backlog.port.has_read_ahead]
        with self._changed:
            for backlog in waiting:
                self._submit([backlog])
        return [backlog for backlog in group if backlog not in waiting]

    def _advance(self, backlog: _Backlog, *, alone: bool) -> bool:
        """Write until the next wait. Return whether the calling thread has to continue with this backlog."""
        assert backlog.steps is not None
        try:
            step = next(backlog.steps, None)
        except BaseException as error:  # as in `_work`
            self._fail(error, backlog)
            return False
        if step is AppendWait.LONG and not alone:
            with self._changed:
                self._submit([backlog])
            return False
        return step is not None

    def _write(self, backlog: _Backlog) -> Iterator[AppendWait]:
        """Write the rows that wait for one queue until none is left. See `Appender.steps`."""
        while (waiting := self._next(backlog)) is not None:
            for rows in _join_alike(waiting):
                yield from backlog.writer.steps(rows, backlog.written)
                backlog.written += rows.num_rows
            with self._changed:
                self._waiting_bytes -= sum(batch.nbytes for batch in waiting)
                self._changed.notify_all()

    def _fail(self, error: BaseException, *backlogs: _Backlog) -> None:
        with self._changed:
            self._error = self._error or error
            self._end(*backlogs)

    def _next(self, backlog: _Backlog) -> list[pa.RecordBatch] | None:
        """Return the waiting rows. If there are none, or after an error, record that no thread works on the backlog, and return None."""
        with self._changed:
            waiting, backlog.waiting = backlog.waiting, []
            if waiting and self._error is None:
                return waiting
            self._end(backlog)
            return None

    def _end(self, *backlogs: _Backlog) -> None:
        for backlog in backlogs:
            backlog.busy, backlog.steps = False, None
            self._busy -= 1
        self._changed.notify_all()

    def _yield(self) -> None:
        """Give locks that no thread uses back while waiting for another attempt's lock, because that attempt may wait for them."""
        with contextlib.ExitStack() as guards:
            with self._changed:
                idle = [
                    lock
                    for lock in list(self._locks.values())
                    if lock.is_held and not self._users[lock] and lock.guard.acquire(blocking=False)
                ]
                for lock in idle:
                    guards.callback(lock.guard.release)
            self._release(idle)

    def _release(self, locks: Collection[BrokerLock | None]) -> None:
        """Give locks back, and keep the first error. Queues without a lock belong to the lock None."""
        try:
            RocketMQQueue.release_all(
                {backlog.port: backlog.writer.end for backlog in list(self._backlogs.values()) if backlog.port.lock in locks}
            )
        except BaseException as error:  # as in `_work`
            with self._changed:
                self._error = self._error or error

    def _join(self) -> None:
        own, *others = self._take_added() or [[]]
        for group in others:
            self._submit(group)
        if own:
            # A task with few rows for one broker needs no other thread.
            self._work(own)
        with self._changed:
            self._changed.wait_for(lambda: not self._busy)

    def _release_queues(self) -> None:
        self._release([None, *self._locks.values()])
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _groups(backlogs: list[_Backlog]) -> Iterator[list[_Backlog]]:
    """Divide backlogs into groups for one thread each."""
    group: list[_Backlog] = []
    size = 0
    for backlog in backlogs:
        if group and (len(group) == TOGETHER or size + backlog.nbytes > TOGETHER_BYTES):
            yield group
            group, size = [], 0
        group.append(backlog)
        size += backlog.nbytes
    if group:
        yield group


def _join_alike(waiting: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield adjacent batches with the same columns as one batch, so that small batches share a request."""
    for _, alike in itertools.groupby(waiting, key=lambda batch: batch.schema.names):
        batches = list(alike)
        yield concat_batches(batches) if len(batches) > 1 else batches[0]
