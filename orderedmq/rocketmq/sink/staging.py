"""One attempt of a writing task over RocketMQ: threads send the rows of its queues in parallel, and then give the queues back."""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pyarrow as pa

from orderedmq.broker import Receipt, SinkBatch
from orderedmq.errors import OrderedMQError, TopicError
from orderedmq.model import MessageQueue, check_topic
from orderedmq.rocketmq.append.message_type import packing_for
from orderedmq.rocketmq.messages.log import RocketMQLog
from orderedmq.rocketmq.net import access
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.deadline import Deadline
from orderedmq.rocketmq.sink.agreement import Agreement
from orderedmq.rocketmq.sink.bookmarks import Bookmarks
from orderedmq.rocketmq.sink.broker_queue import LockTiming, RocketMQQueue, abandoned
from orderedmq.rocketmq.sink.commit_report import Token
from orderedmq.rocketmq.sink.delayed_rows import DelayedRows
from orderedmq.rocketmq.sink.message_stamp import Writer, bookmark_group, run_name, sink_name
from orderedmq.rocketmq.sink.queue_writer import QueueWriter, Start
from orderedmq.rocketmq.sink.topic_brokers import TIMEOUT, RocketMQTopicBrokers
from orderedmq.rocketmq.wire import rights
from orderedmq.rows import delays
from orderedmq.rows.message_rows import normalise
from orderedmq.schema import concat_batches

#: Queues to which one task writes in parallel.
PARALLEL: Final = 16
#: Bytes of rows that may wait for their queues in one task. Above this, `RocketMQStaging.add` waits.
WAITING_BYTES: Final = 64 * 1024 * 1024


class _Backlog:
    """The rows that wait for one queue, and whether a thread is writing them."""

    def __init__(self, port: RocketMQQueue, writer: QueueWriter) -> None:
        self.port = port
        self.queue = port.queue
        self.writer = writer
        self.waiting: list[pa.RecordBatch] = []
        self.busy = False
        #: Rows that were added, and rows that the writer has written.
        self.rows = 0
        self.written = 0


class RocketMQStaging:
    """The Staging protocol for one attempt. Used by one thread.

    Its threads send the rows of several queues in parallel, but one thread at a time sends the rows of one queue.
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
        #: The client id of this attempt's locks. No other attempt has the same.
        self._client_id = f"sink@{uuid.uuid4().hex}"
        self._backlogs: dict[MessageQueue, _Backlog] = {}
        #: By topic, on the queues of the batch.
        self._agreements: dict[str, Agreement] = {}
        self._delayed = DelayedRows(client, batch.batch_id, partition, timing, self._enter, self._explain)
        self._pool: ThreadPoolExecutor | None = None
        self._stop = threading.Event()
        # Guards the fields below and the backlogs' contents.
        self._changed = threading.Condition()
        self._waiting_bytes = 0
        self._busy = 0
        self._error: BaseException | None = None

    def targets(self, topic: str, proposed: Sequence[MessageQueue]) -> list[MessageQueue]:
        """See `Staging.targets`. Nothing has been sent to the topic if this raises SinkError QUEUES_AWAY or a broker's error."""
        if self._writer is None or not proposed:
            return list(proposed)
        bookmarks = Bookmarks(self._client, self._writer.sink, topic, self._writer.group, timeout=TIMEOUT)
        brokers = RocketMQTopicBrokers(self._log, bookmarks, topic, self._broker_queue, self._stop)
        agreement = Agreement(brokers, self._writer.batch, self._timing.patience)
        try:
            queues = agreement.reach(proposed)
        except OrderedMQError as error:
            raise self._explain(error, proposed[0]) from error
        self._agreements[topic] = agreement
        return list(queues)

    def add(self, queue: MessageQueue, rows: pa.RecordBatch) -> None:
        """Take rows, which are sent later by a thread. Also raises the error of earlier rows, some of which may have been sent."""
        rows, delayed = delays.split(rows)
        if delayed is not None:
            self._require(queue)
            self._delayed.add(queue, delayed)
            if not rows.num_rows:
                return
        backlog = self._backlogs.get(queue)
        where, first = f"queue {queue}", backlog.rows if backlog is not None else 0
        checked = normalise(rows, where, first)
        if backlog is None:
            backlog = self._backlogs[queue] = self._make_backlog(queue)
        # Before any row of this call is sent, refuse rows that a Proxy does not pass on.
        packing_for(self._client, queue, checked, where, self._timing.patience, first)
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
        """Wait until all added rows are stored and can be read, give the queues back, and return the receipt."""
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
        """Stop sending, and give the queues back. Rows that were sent stay."""
        self._stop.set()
        with self._changed:
            self._error = self._error or abandoned(next(iter(self._backlogs), MessageQueue("", "", 0)))
        self._join()
        self._release_queues()

    # --- threads

    def _make_backlog(self, queue: MessageQueue) -> _Backlog:
        """Return an empty backlog for a queue. Raises TopicError MISSING, RESERVED or NO_SUCH_QUEUE."""
        self._require(queue)
        port = self._broker_queue(queue)
        return _Backlog(port, QueueWriter(port, self._writer, self._partition))

    def _require(self, queue: MessageQueue) -> None:
        check_topic(queue.topic, writing=True)
        # A route that is some seconds old is sufficient, because a broker refuses rows for a deleted queue.
        if queue not in self._route(queue.topic):
            self._log.require(queue)
        self._log.refuse_hidden_static(queue.topic)

    def _broker_queue(self, queue: MessageQueue) -> RocketMQQueue:
        return RocketMQQueue(
            self._client,
            self._log,
            queue,
            self._writer,
            self._client_id,
            self._timing,
            self._stop,
            self._yield,
            self._agreements.get(queue.topic),
        )

    def _enter(self, queue: MessageQueue) -> Start | None:
        """Create the sink's group for delayed rows, and return the state of the queue; None for a batch without identity."""
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
        """Write the rows that wait for one queue until none is left."""
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
        """Return the error, or one that names all missing rights if the account lacks some."""
        if self._writer is None:
            return error
        group = bookmark_group(self._writer.sink, queue.topic, self._writer.group)
        return access.explain(self._client, error, rights.of_sink(queue.topic, group), rights.SINK)

    def _next(self, backlog: _Backlog) -> list[pa.RecordBatch] | None:
        """Return the waiting rows. If there are none, or after an error, record that no thread works on the backlog, and return None."""
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
        """Give idle queues back while waiting for another attempt's lock, because that attempt may be waiting for one of them."""
        with self._changed:
            idle = [backlog for backlog in self._backlogs.values() if not backlog.busy]
            for backlog in idle:
                backlog.busy = True
                self._busy += 1
        for backlog in idle:
            try:
                backlog.writer.let_go()
                # Rows may have been added to the backlog during `let_go`.
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
        try:
            RocketMQQueue.release_all({backlog.port: backlog.writer.end for backlog in self._backlogs.values()})
        except BaseException as error:
            self._error = self._error or error
        self._pool.shutdown()
        self._pool = None


def _join_alike(waiting: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield adjacent batches with the same columns as one batch, so that small batches share a request."""
    for _, alike in itertools.groupby(waiting, key=lambda batch: batch.schema.names):
        batches = list(alike)
        yield concat_batches(batches) if len(batches) > 1 else batches[0]
