"""The queues and brokers of a topic, as one attempt of one sink's partition uses them. See queue_writer.py and agreement.py."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

import pyarrow as pa

from orderedmq.broker import PullSettings
from orderedmq.conditions import UnavailableCondition
from orderedmq.errors import DataLossError, OrderedMQError, RocketMQUnavailableError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.append.broker_port import BrokerPort, send_request
from orderedmq.rocketmq.codec.decode import decode
from orderedmq.rocketmq.codec.row_decoder import Unreadable
from orderedmq.rocketmq.codec.stored_message import record_offsets
from orderedmq.rocketmq.net import checks
from orderedmq.rocketmq.net.connection import Connection
from orderedmq.rocketmq.net.deadline import Deadline
from orderedmq.rocketmq.net.fan_out import ask_queues
from orderedmq.rocketmq.sink.agreement import BrokerState, States
from orderedmq.rocketmq.sink.batch_queues import Record
from orderedmq.rocketmq.sink.bookmarks import TIMEOUT, Bookmarks
from orderedmq.rocketmq.sink.boundaries import Boundaries
from orderedmq.rocketmq.sink.broker_lock import Attempt, BrokerLock, Grant
from orderedmq.rocketmq.sink.lookback import FIRST_STEP, PROBE
from orderedmq.rocketmq.sink.message_stamp import COLUMNS, find_messages, may_concern
from orderedmq.rocketmq.sink.queue_writer import Start
from orderedmq.rocketmq.wire import message_requests, rights
from orderedmq.rocketmq.wire.message_requests import PullResult, PullStatus
from orderedmq.rocketmq.wire.route import Route

#: The producer group of all sends. It is not used for anything else.
SINK_PRODUCER_GROUP: Final = "OMQ_SINK"
#: Bytes of bodies per read when a task looks back.
_READ_BYTES: Final = 16 * 1024 * 1024
#: Seconds to wait for a broker before it counts as away. This is less than the time for which a gate is trusted.
_AWAY: Final = 5.0


class _Ahead(NamedTuple):
    """The messages with offsets in [begin, end); ``messages`` is None if none of them matters to the attempt."""

    begin: int
    end: int
    messages: pa.RecordBatch | None


class RocketMQQueue(BrokerPort):
    """The `QueuePort` of a queue. Used by one thread at a time."""

    def __init__(self, attempt: Attempt, queue: MessageQueue, lock: BrokerLock | None = None) -> None:
        """``lock``: that of the queue's topic and broker. A batch without identity has none, and a port without it can only read."""
        client = attempt.client
        super().__init__(client, queue, attempt.timing, request=lambda body: send_request(queue, body, SINK_PRODUCER_GROUP))
        self.lock = lock
        self._attempt = attempt
        self._writer = attempt.writer
        self._log = attempt.log
        if self._writer is not None:
            self._bookmarks = Bookmarks(client, self._writer.sink, queue.topic, self._writer.group)
            self._boundaries = Boundaries(client, queue, self._writer.sink)
            # If the account may not read as TOOLS_CONSUMER, read as the sink's group.
            self._log = attempt.log.reading(PullSettings(self._bookmarks.group))
        # The grant under which the queue was read.
        self._grant: Grant | None = None
        # What was read under the grant, until `start` uses it.
        self._start: Start | None = None
        # All messages since the bookmark, if they were read with the start, until `read` uses them.
        self._ahead: _Ahead | None = None

    # --- the lock

    def acquire(self) -> None:
        """See `QueuePort.acquire`. Raises LockError HELD_BY_OTHER."""
        grant = self.lock.acquire(self.enter) if self.lock is not None else None
        super().acquire()
        self._grant, self._start, self._ahead = grant, None, None

    @staticmethod
    def acquire_all(ports: Sequence[RocketMQQueue]) -> None:
        """Acquire queues of one topic at one broker for one attempt, and read with a few requests what each needs to start.

        A queue with a request that has to settle is left out.
        """
        ports = [port for port in ports if not port._unsettled]
        if not ports or ports[0].lock is None:
            return
        first = ports[0]
        grant = ports[0].lock.acquire(first.enter)
        for port in ports:
            port._grant = grant
        for port, start in zip(ports, first._read_starts(ports)):
            port._start = start

    @property
    def has_read_ahead(self) -> bool:
        """Whether all messages that a look-back needs have been read."""
        return self._ahead is not None

    def keep(self) -> bool:
        """See `Port.keep`. Renews the lock when that is due."""
        if self.lock is None:
            return super().keep()
        return self._grant is not None and self.lock.keep(self._grant)

    @staticmethod
    def release_all(ends: Mapping[RocketMQQueue, int]) -> None:
        """Wait until all messages of an attempt's queues below their ends can be read, and give the locks back.

        An end of 0 means that nothing was sent. The queues must be all those of their brokers that the attempt has acquired.
        """
        by_broker: dict[tuple[str, str], dict[RocketMQQueue, int]] = {}
        for port, end in ends.items():
            by_broker.setdefault((port.queue.topic, port.queue.broker_name), {})[port] = end
        errors = []
        for ports in by_broker.values():
            lock = next(iter(ports)).lock
            readable = partial(RocketMQQueue._await_readable, ports)
            try:
                if lock is not None:
                    lock.release(readable)
                else:
                    with contextlib.suppress(RocketMQUnavailableError):
                        readable()
            except OrderedMQError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    @staticmethod
    def _await_readable(ends: Mapping[RocketMQQueue, int]) -> None:
        """Wait until the messages of queues of one broker can be read, before another attempt can get the lock."""
        first = next(iter(ends))
        deadline = Deadline.after(first._timing.visible)
        BrokerPort.settle_all(ends, deadline)
        BrokerPort.await_all_readable(ends.items(), deadline)

    def enter(self) -> None:
        """Create the sink's group and bookmarks at the queue's broker if they are missing."""
        self._bookmarks.enter(self.queue, self.seen_before, self.require_rights)

    # --- reading

    def start(self) -> Start:
        start, self._start = self._start or self._read_starts([self])[0], None
        return start

    def require_rights(self) -> None:
        """Check the account's rights. Raises RocketMQError NO_PERMISSION if it lacks one that a sink needs."""
        checks.require_rights(self._client, rights.of_sink(self.queue.topic, self._bookmarks.group))

    def read(self, begin: int, end: int) -> Iterator[pa.RecordBatch]:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.begin <= begin and end <= ahead.end:
            if ahead.messages is not None:
                yield ahead.messages.slice(begin - ahead.begin, end - begin)
            return
        if end - begin == 2 and (pair := self._boundaries.pair(begin)) is not None:
            yield pair
            return
        failures = 0
        while begin < end:
            try:
                batch = self._log.pull(self.queue, begin, end - begin, _READ_BYTES, COLUMNS)
            except DataLossError as error:
                # Messages were deleted, or another producer sent one that cannot be read: a sink's messages are never compressed.
                if error.resume_at is None:
                    raise
                begin = error.resume_at
                continue
            if not batch.num_rows:
                # The master has these messages, so a replica that lags has answered. If this counted as the end, rows would be sent twice.
                failures += 1
                why = f"a pull at offset {begin} of queue {self.queue}, which ends at {end}, returned no message: a replica may lag"
                self.pause(RocketMQUnavailableError(UnavailableCondition.UNAVAILABLE, why), failures)
                continue
            failures = 0
            yield batch
            begin = batch.column(0)[-1].as_py() + 1

    def _examined(self, result: PullResult, begin: int, bookmark: int) -> _Ahead | None:
        """Return the answer to a pull, or None if messages are missing in it. Raises ProtocolError, Unreadable."""
        assert self._writer is not None
        records = bytes(result.body)
        starts = record_offsets(records)
        if starts is None or [offset for _, offset in starts] != list(range(begin, result.max_offset)):
            return None
        committed = next((at for at, offset in starts if offset >= bookmark), len(records))
        if not may_concern(self._writer, records, committed):
            return _Ahead(begin, result.max_offset, None)
        messages, _ = decode([memoryview(records)], COLUMNS, self._client.names.spelled_queue(self.queue))
        return _Ahead(begin, result.max_offset, messages) if messages.num_rows == len(starts) else None

    def seen_before(self, queue: MessageQueue, end: int) -> bool:
        """Return whether messages of the sink are among the last PROBE messages of a queue of the topic before ``end``."""
        assert self._writer is not None
        if not end:
            return False
        port = self if queue == self.queue else RocketMQQueue(self._attempt, queue)
        begin = max(port.least(), end - PROBE)
        return any(find_messages(batch, self._writer) for batch in port.read(begin, end))

    def _read_starts(self, ports: Sequence[RocketMQQueue]) -> list[Start]:
        """Return where queues of this broker start, under their grant. Keep their messages since the bookmarks, if these are few."""
        bookmarks = self._bookmarks.get_own([port.queue for port in ports])
        starts = []
        # Read the ends after the entry, because another run may have sent messages until then.
        for port, bookmark, end in zip(ports, bookmarks, _read_ahead(ports, bookmarks)):
            committed = port._grant.committed if port._grant is not None else -1
            if bookmark is not None and bookmark > end:
                # The topic was created again, and the numbers would hide messages. The lock was acquired with them.
                self._bookmarks.forget(port.queue)
                if port.lock is not None:
                    port.lock.lose()
                bookmark, committed = None, -1
            starts.append(Start(end, bookmark, committed))
        return starts

    # --- sending

    def _connection_to_send_on(self, deadline: float) -> Connection:
        """Return the connection on which the lock was granted. After a reconnection, the broker may have forgotten the lock."""
        return self._grant.connection if self._grant is not None else super()._connection_to_send_on(deadline)

    def pause(self, error: RocketMQUnavailableError, failures: int) -> None:
        if error.outcome_unknown:
            # This closes the connection, so the grant has ended.
            self._grant = None
        super().pause(error, failures)

    def _wait(self, seconds: float) -> None:
        self._attempt.wait(seconds, self.queue)


def _read_ahead(ports: Sequence[RocketMQQueue], bookmarks: Sequence[int | None]) -> list[int]:
    """Return the ends of queues of one broker. With the same requests, pull for each queue the first messages since the bookmark.

    Through a Proxy nothing is pulled, because it drops answers if many bytes wait for one connection.
    """
    client, log = ports[0]._client, ports[0]._log
    # A look-back begins there.
    begins = {port.queue: max(0, (bookmark or 0) - 1) for port, bookmark in zip(ports, bookmarks)}
    pulled: list[PullResult] = []
    if not client.routed_by_proxy:
        # A queue may be unreadable for the moment. Then the queues are read one by one.
        with contextlib.suppress(OrderedMQError):
            pulled = log.pull_once(begins, FIRST_STEP)
    ends: dict[MessageQueue, int] = {}
    for port, bookmark, result in zip(ports, bookmarks, pulled):
        queue, begin = port.queue, begins[port.queue]
        if result.status in (PullStatus.FOUND, PullStatus.NO_NEW_MESSAGE):
            ends[queue] = result.max_offset
            # A message that cannot be read is looked at again when the queue is read.
            with contextlib.suppress(OrderedMQError, Unreadable):
                port._ahead = port._examined(result, begin, bookmark or 0)
    requests = [(queue, message_requests.max_offset(queue)) for queue in begins if queue not in ends]
    ends.update(zip([queue for queue, _ in requests], ask_queues(client, requests, Deadline.after(TIMEOUT))))
    return [ends[queue] for queue in begins]


class RocketMQTopicBrokers:
    """The `TopicBrokers` of one topic: the records and gates at all its brokers. Used by one thread at a time."""

    def __init__(self, attempt: Attempt, topic: str) -> None:
        """``attempt`` has a writer."""
        assert attempt.writer is not None
        self._attempt = attempt
        self._topic = topic
        self._bookmarks = Bookmarks(attempt.client, attempt.writer.sink, topic, attempt.writer.group, timeout=_AWAY)

    def route(self) -> Route:
        return self._attempt.log.route(self._topic)

    def read(self, names: Sequence[str]) -> States:
        queues = [self._queue(name) for name in names]
        with contextlib.suppress(RocketMQUnavailableError):
            return dict(zip(names, self._bookmarks.states(queues)))
        return {name: self._state(queue) for name, queue in zip(names, queues)}

    def _state(self, queue: MessageQueue) -> BrokerState | RocketMQUnavailableError:
        try:
            return self._bookmarks.states([queue])[0]
        except RocketMQUnavailableError as error:
            return error

    @contextlib.contextmanager
    def gates(self, names: Sequence[str], unless: Callable[[], bool]) -> Iterator[Callable[[], bool] | None]:
        with contextlib.ExitStack() as gates:
            checks: list[Callable[[], bool]] = []
            for name in names:
                is_locked = gates.enter_context(BrokerLock(self._attempt, self._queue(name)).gate(unless))
                if is_locked is None:
                    yield None
                    return
                checks.append(is_locked)
            yield lambda: all(is_locked() for is_locked in checks)

    def enter(self, name: str) -> None:
        RocketMQQueue(self._attempt, self._queue(name)).enter()

    def write(self, name: str, record: Record) -> None:
        self._bookmarks.write_record(self._queue(name), record)

    def wait(self, seconds: float) -> None:
        self._attempt.wait(seconds, self._queue(""))

    def now(self) -> float:
        return time.monotonic()

    def _queue(self, name: str) -> MessageQueue:
        """Return a queue that identifies the broker."""
        return MessageQueue(self._topic, name, 0)
