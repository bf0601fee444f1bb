"""One queue at its broker, as one attempt of one sink's partition uses it: lock, read, send. See queue_writer.py.

A lock is trusted for 30 s, and only on the connection on which it was granted, because a broker that restarted has forgotten the lock,
and a broker that was away may have granted it to another attempt (RocketMQ's lock is advisory). A send ends before the broker would
grant the lock to another attempt.

A connection to a Proxy survives a restart of the broker. So through a Proxy, each attempt also holds a *witness*, a lock that no other
attempt requests. Once a second, which is less than any restart takes, the attempt requests it under another name. If that is granted,
the broker has forgotten the attempt's locks. A Proxy may hold back a request that was sent before. So an attempt that takes over a queue
from another run of the batch waits for as long as a Proxy does that.

Attempts of one partition exclude each other by a lock of their run and partition. Runs of one batch exclude each other by the
queue's *entry*, a number that names the run that writes. An attempt that gets its lock reads the entry. If the entry names
another run, the attempt waits for the locks of all partitions of that run and changes the entry while it holds them. A gate
lock ensures that only one attempt at a time does this.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import pyarrow as pa

from orderedmq.broker import PullSettings
from orderedmq.conditions import LockCondition, SinkCondition, UnavailableCondition
from orderedmq.errors import DataLossError, LockError, OrderedMQError, RocketMQUnavailableError, SinkError
from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import HOLDER_TRUST, LOCK_LIFE, RENEW_INTERVAL
from orderedmq.rocketmq.append.broker_port import BrokerPort, Timing, await_end, send_request
from orderedmq.rocketmq.codec.decode import decode
from orderedmq.rocketmq.codec.row_decoder import Unreadable
from orderedmq.rocketmq.codec.stored_message import record_offsets
from orderedmq.rocketmq.messages.log import RocketMQLog
from orderedmq.rocketmq.net import access
from orderedmq.rocketmq.net.behind_proxy import HOLDS_BACK
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.connection import Connection
from orderedmq.rocketmq.net.deadline import Backoff, Deadline
from orderedmq.rocketmq.net.fan_out import ask_queues
from orderedmq.rocketmq.sink.agreement import Agreement
from orderedmq.rocketmq.sink.bookmarks import TIMEOUT, Bookmarks, Numbers, WriterEntry
from orderedmq.rocketmq.sink.boundaries import Boundaries
from orderedmq.rocketmq.sink.lookback import FIRST_STEP, PROBE
from orderedmq.rocketmq.sink.message_stamp import COLUMNS, Writer, find_messages, lock_key, may_concern
from orderedmq.rocketmq.sink.queue_writer import Start
from orderedmq.rocketmq.wire import message_requests, rights
from orderedmq.rocketmq.wire.group_requests import lock, unlock
from orderedmq.rocketmq.wire.message_requests import PullResult, PullStatus

#: The producer group of all sends. It is not used for anything else.
SINK_PRODUCER_GROUP: Final = "OMQ_SINK"
#: Bytes of bodies per read when a task looks back.
_READ_BYTES: Final = 16 * 1024 * 1024
#: The maximum number of attempts to take over a queue. A run that lost its locks may take the queue back, so one may not be enough.
_TAKE_OVERS: Final = 20
#: Seconds between two requests for a witness.
_WITNESS_INTERVAL: Final = 1.0
_LOCK_RETRY: Final = Backoff(first=0.02, most=0.5)


@dataclass(frozen=True)
class LockTiming(Timing):
    """Time limits of an attempt, in seconds.

    A lock is trusted for ``lock_trust`` and renewed after ``lock_renew``. An attempt waits for a lock for up to ``lock_wait``, and
    gives back its idle queues each time it has waited for about ``lock_yield``. ``send_timeout`` also limits a lock request.
    """

    visible: float = 5.0
    patience: float = 90.0
    lock_trust: float = HOLDER_TRUST
    lock_renew: float = RENEW_INTERVAL
    lock_wait: float = LOCK_LIFE + 15.0
    lock_yield: float = 3.0


class _Ahead(NamedTuple):
    """The messages with offsets in [begin, end); ``messages`` is None if none of them matters to the attempt."""

    begin: int
    end: int
    messages: pa.RecordBatch | None


class RocketMQQueue(BrokerPort):
    """The `QueuePort` of a queue. Used by one thread at a time.

    ``writer`` is None for a batch without identity, which is sent without a lock and without looking back.
    """

    def __init__(
        self,
        client: Client,
        log: RocketMQLog,
        queue: MessageQueue,
        writer: Writer | None,
        client_id: str,
        timing: LockTiming,
        stop: threading.Event,
        waits: Callable[[], None] = lambda: None,
        agreement: Agreement | None = None,
    ) -> None:
        """``waits`` is called from time to time while this attempt waits for a lock of another attempt.

        ``agreement``: on the batch's queues; None if no row is sent to a queue that the batch does not have there already.
        """
        super().__init__(
            client, queue, timing, request=lambda body: send_request(queue, body, SINK_PRODUCER_GROUP, client.trace)
        )
        self._writer = writer
        self._client_id = client_id
        self._lock_timing = timing
        self._stop = stop
        self._waits = waits
        self._agreement = agreement
        if writer is not None:
            self._bookmarks = Bookmarks(client, writer.sink, queue.topic, writer.group)
            self._entry = WriterEntry.of(writer)
            self._boundaries = Boundaries(client, queue, writer.sink)
        self._entered = False
        # The numbers that `acquire` has read under the lock, until `start` uses them.
        self._numbers: Numbers | None = None
        # All messages since the bookmark, if `acquire_all` has read them, until `read` uses them.
        self._ahead: _Ahead | None = None
        # If the account may not read as TOOLS_CONSUMER, read as the sink's group.
        self._log = log.reading(PullSettings(self._group)) if writer is not None else log
        # The connection on which the lock was granted, and when it was requested.
        self._granted: tuple[Connection, float] | None = None
        # The locks that were granted and not given back since: the attempt's lock, and through a Proxy its witness.
        self._held: list[MessageQueue] = []
        # When the broker was last known to remember these locks.
        self._remembered = 0.0

    # --- the lock

    @property
    def is_locked(self) -> bool:
        """Whether this attempt has locks that it has not given back."""
        return bool(self._held)

    def acquire(self) -> None:
        """See `QueuePort.acquire`. Raises LockError HELD_BY_OTHER."""
        if self._writer is None:
            super().acquire()
            return
        self._ahead = None
        keys = self._keys()
        got = self._lock_all(keys)
        assert got is not None
        self._granted, self._held, self._remembered = got, keys, got[1]
        numbers = self._bookmarks.read(self.queue)
        if self._lacks_group(numbers):
            self.enter()
            numbers = self._bookmarks.read(self.queue)
        self._entered = True
        if self._agreement is not None and self._lacks_record(numbers):
            # The broker was killed and has forgotten the record.
            self._agreement.renew()
            numbers = self._bookmarks.read(self.queue)
        for _ in range(_TAKE_OVERS):
            # A run that starts now waits for the lock that this attempt holds.
            if self._is_writer(numbers) or self._take_over(numbers.entry):
                self._numbers = numbers
                return
            numbers = self._bookmarks.read(self.queue)
        raise LockError(
            LockCondition.HELD_BY_OTHER,
            f"other runs of the same batch take over queue {self.queue} again and again, so the query may be running twice. Stop one of "
            "the runs",
        )

    @staticmethod
    def acquire_all(ports: Sequence[RocketMQQueue]) -> set[RocketMQQueue]:
        """Acquire queues of one topic at one broker, for one attempt, with a few requests. Return those that can be written to at once.

        The other queues need more: another attempt holds a lock, another run has to be waited for, the broker has forgotten a number, or
        there are many messages to look through. They need `acquire`, unless `keep` is true.
        """
        ports = [port for port in ports if not port._unsettled]
        if not ports or ports[0]._writer is None:
            return set()
        first = ports[0]
        try:
            locked = first._lock_some(ports)
        except RocketMQUnavailableError:
            return set()
        if not locked:
            return set()
        queues = [port.queue for port in locked]
        numbers = dict(zip(locked, first._bookmarks.read_all(queues, lambda bookmarks: _read_ahead(locked, bookmarks))))
        there = [port for port in locked if not port._lacks_group(numbers[port]) and not port._lacks_record(numbers[port])]
        acquired = {port for port in there if port._is_writer(numbers[port])}
        acquired |= first._take_over_some({port: numbers[port].entry for port in there if port not in acquired})
        for port in acquired:
            port._numbers, port._entered = numbers[port], True
        first._give_back([port for port in locked if port not in acquired], Deadline.after(first._timing.send_timeout))
        return {port for port in acquired if port._ahead is not None}

    def _lock_some(self, ports: Sequence[RocketMQQueue]) -> list[RocketMQQueue]:
        """Request the locks of queues of this broker once. Return those that were granted."""
        keys = {port: port._keys() for port in ports}
        asked = time.monotonic()
        connection = self._connect(asked + self._timing.send_timeout)
        request = lock(self._group, self._client_id, [key for of_port in keys.values() for key in of_port])
        got = connection.call(request, asked + self._timing.send_timeout)
        for port in ports:
            port._held = [key for key in keys[port] if key in got]
            port._granted, port._remembered = (connection, asked), asked
        locked = [port for port in ports if port._held == keys[port]]
        self._give_back([port for port in ports if port._held != keys[port]], asked + self._timing.send_timeout)
        return locked

    def _take_over_some(self, entries: Mapping[RocketMQQueue, WriterEntry]) -> set[RocketMQQueue]:
        """Do what `_take_over` does for queues of this broker where that needs no wait. Return those for which it would return True."""
        gates = {port: port._lock_named("gate") for port, entry in entries.items() if not port._is_rival(entry)}
        locked_gates: list[MessageQueue] = []
        deadline = Deadline.after(self._timing.send_timeout)
        try:
            if gates:
                got = self._connect(deadline).call(lock(self._group, self._client_id, list(gates.values())), deadline)
                locked_gates = [gate for gate in gates.values() if gate in got]
            ports = [port for port, gate in gates.items() if gate in locked_gates]
            there = self._bookmarks.entries([port.queue for port in ports])
            certain = [port for port, entry in zip(ports, there) if entry == entries[port]]
            self._bookmarks.write_entries({port.queue: port._entry.widened(entries[port]) for port in certain})
            return set(certain)
        except RocketMQUnavailableError:
            return set()
        finally:
            self._unlock(locked_gates, Deadline.after(self._timing.send_timeout))

    def _give_back(self, ports: Sequence[RocketMQQueue], deadline: float) -> None:
        """Give the locks of queues of this broker back."""
        keys = [key for port in ports for key in port._held]
        for port in ports:
            port._granted, port._held, port._ahead = None, [], None
        self._unlock(keys, deadline)

    def _lacks_group(self, numbers: Numbers) -> bool:
        """Return whether the sink's group may be missing at the broker."""
        return not self._entered and not numbers.bookmark and self._agreement is None

    def _lacks_record(self, numbers: Numbers) -> bool:
        """Return whether the broker has no record of the queues that the batch's attempts have agreed on, although rows may be sent."""
        assert self._writer is not None
        return (
            self._agreement is not None
            and self._committed(numbers) < self._writer.batch
            and not self._agreement.holds(self.queue.broker_name, numbers.record)
        )

    def _is_writer(self, numbers: Numbers) -> bool:
        """Return whether the entry names this attempt's run, or need not do so.

        If the batch is committed, this attempt sends nothing, and the entry may name the run of a later batch.
        """
        assert self._writer is not None
        return self._committed(numbers) >= self._writer.batch or numbers.entry.covers(self._entry)

    def _is_rival(self, entry: WriterEntry) -> bool:
        """Return whether the entry names another run of this batch."""
        # A queue that was never written to has an entry of batch 0 without a run, and the width 0.
        return entry.width > 0 and entry.batch == self._entry.batch and entry.run != self._entry.run

    def _committed(self, numbers: Numbers) -> int:
        """Return the newest batch that the queue's broker or another one knows to be committed."""
        return max(numbers.committed, self._agreement.committed if self._agreement is not None else -1)

    @contextlib.contextmanager
    def gate(self, unless: Callable[[], bool]) -> Iterator[Callable[[], bool] | None]:
        """See `TopicBrokers.gates`; for the queue's broker."""
        keys = [self._lock_named("queues")]
        got = self._lock_all(keys, unless=unless)
        if got is None:
            yield None
            return
        connection, since = got
        try:
            yield lambda: not connection.closed and time.monotonic() - since <= self._lock_timing.lock_trust
        finally:
            self._unlock(keys, Deadline.after(self._timing.send_timeout))

    def enter(self) -> None:
        """Create the sink's group and bookmarks at the queue's broker if they are missing."""
        if not self._entered:
            self._bookmarks.enter(self.queue, self.seen_before, self.require_rights)
            self._entered = True

    def _is_ours(self) -> bool:
        """Return whether the queue's entry names this attempt's run."""
        return self._bookmarks.entry(self.queue).covers(self._entry)

    def _take_over(self, known: WriterEntry) -> bool:
        """Make this run the queue's writer as soon as no attempt of the former run holds a lock.

        This attempt holds the former run's locks while it writes the entry. So an attempt that gets one of these locks later reads that
        the queue has another writer. Returns whether it is certain that no other run has sent a message since the entry was ``known``.
        """
        rival = self._is_rival(known)
        keys = [self._lock_named("gate")]
        if rival:
            keys += [self._lock_of(known, partition) for partition in range(known.width)]
        # Keep none of them while others are missing: if this attempt were killed then, the next one would also wait for its locks.
        if self._lock_all(keys, unless=self._is_ours) is None:
            return False
        try:
            if self._bookmarks.entry(self.queue) != known:
                # Another run or batch is the writer now, so this batch may be committed; or the run has more locks.
                return False
            if rival and self._proxied():
                self._wait(self._timing.settle + HOLDS_BACK)
            self._bookmarks.write_entries({self.queue: self._entry.widened(known)})
            return not rival
        finally:
            self._unlock(keys, Deadline.after(self._timing.send_timeout))

    def _lock_all(
        self, keys: list[MessageQueue], unless: Callable[[], bool] = lambda: False
    ) -> tuple[Connection, float] | None:
        """Wait for all these locks, and return their connection and when they were requested. Return None when ``unless()`` is true.

        If only some locks are granted, give them back. Raises LockError HELD_BY_OTHER.
        """
        began = time.monotonic()
        yields = began + self._lock_timing.lock_yield * random.uniform(0.5, 1.5)
        failures = refusals = 0
        while True:
            asked = time.monotonic()
            try:
                connection = self._connect(asked + self._timing.send_timeout)
                got = connection.call(lock(self._group, self._client_id, keys), asked + self._timing.send_timeout)
                if got.issuperset(keys):
                    self._settle(None)
                    return connection, asked
                self._unlock(sorted(got), asked + self._timing.send_timeout)
                failures = 0
            except RocketMQUnavailableError as error:
                failures += 1
                self.pause(error, failures)
                continue
            if unless():
                return None
            refusals += 1
            if asked - began > self._lock_timing.lock_wait:
                raise LockError(
                    LockCondition.HELD_BY_OTHER,
                    f"another attempt of the same task or batch has kept queue {self.queue} locked for {asked - began:.0f} s (group "
                    f"{self._group}), and this attempt must wait for it. The lock of a dead attempt expires after 60 s, so the other "
                    "attempt is alive, or the broker's clock was changed. End the other attempt",
                )
            if asked > yields:
                self._waits()
                yields = time.monotonic() + self._lock_timing.lock_yield * random.uniform(0.5, 1.5)
            self._wait(_LOCK_RETRY.delay(refusals, random.random()))

    def _unlock(self, keys: list[MessageQueue], deadline: float) -> None:
        """Give locks back. Another attempt's locks are not changed. A lock whose broker cannot be reached expires by itself."""
        if keys:
            with contextlib.suppress(RocketMQUnavailableError):
                self._connect(deadline).call(unlock(self._group, self._client_id, keys), deadline)

    def _lock_of(self, entry: WriterEntry, partition: int) -> MessageQueue:
        """Return the key of the lock of one partition in the entry's run."""
        return self._lock_named(f"{entry.run:08x}/{min(partition, entry.width - 1)}")

    def _keys(self) -> list[MessageQueue]:
        """Return the keys of the attempt's lock and, through a Proxy, of its witness."""
        assert self._writer is not None
        own = self._lock_of(self._entry, self._writer.partition)
        return [own, self._lock_named(f"witness/{self._client_id}")] if self._proxied() else [own]

    def _lock_named(self, name: str) -> MessageQueue:
        assert self._writer is not None
        return lock_key(self._writer.sink, self.queue, name, proxied=self._proxied())

    @property
    def _group(self) -> str:
        return self._bookmarks.group

    def keep(self) -> bool:
        """See `Port.keep`. Renews the lock when that is due."""
        if self._writer is None:
            return super().keep()
        if self._granted is None:
            return False
        connection, since = self._granted
        now = time.monotonic()
        if connection.closed or now - since > self._lock_timing.lock_trust or self._is_forgotten(connection, now):
            self._granted = None
        elif now - since > self._lock_timing.lock_renew:
            try:
                renewed = self._lock(connection, now + self._timing.send_timeout)
            except RocketMQUnavailableError:
                renewed = False
            # If the renewal came too late, another attempt may have held the lock in between.
            in_time = time.monotonic() - since <= self._lock_timing.lock_trust
            self._granted = (connection, now) if renewed and in_time else None
        return self._granted is not None

    @staticmethod
    def release_all(ends: Mapping[RocketMQQueue, int]) -> None:
        """Do what `release` does for many queues of one attempt, with one unlock for each broker and topic."""
        together: dict[tuple[str, str], dict[RocketMQQueue, int]] = {}
        for port, end in ends.items():
            # A queue whose request has to settle is given back alone.
            alone = str(port.queue) if port._unsettled else ""
            together.setdefault((port.queue.topic, port.queue.broker_name + alone), {})[port] = end
        errors = []
        for ports in together.values():
            try:
                RocketMQQueue._release(ports)
            except OrderedMQError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    @staticmethod
    def _release(ports: Mapping[RocketMQQueue, int]) -> None:
        """Release queues of one topic at one broker."""
        first = next(iter(ports))
        deadline = Deadline.after(first._timing.visible)
        try:
            # Wait until requests that got no answer have settled, before another attempt can get the lock.
            first._settle(deadline)
            sent = [port for port, end in ports.items() if end]
            asked = [(port.queue, message_requests.max_offset(port.queue)) for port in sent]
            for port, request, end in zip(sent, asked, ask_queues(first._client, asked, deadline)):
                if end < ports[port]:
                    await_end(partial(port._ask, request[1], deadline), ports[port], port._timing.visible)
            first._give_back(list(ports), deadline)
        except RocketMQUnavailableError:
            # Everything is stored, and the locks expire by themselves.
            pass

    def _is_forgotten(self, connection: Connection, now: float) -> bool:
        """Return whether the broker, reached through a Proxy, may have restarted since ``now`` - 1 s, and forgotten the locks."""
        if len(self._held) == 1 or now - self._remembered <= _WITNESS_INTERVAL:
            return False
        witness, other, deadline = self._held[-1:], f"{self._client_id}?", now + self._timing.send_timeout
        try:
            if connection.call(lock(self._group, other, witness), deadline):
                connection.call(unlock(self._group, other, witness), deadline)
                return True
        except RocketMQUnavailableError:
            return True
        self._remembered = now
        # The broker may have restarted since a late answer.
        return time.monotonic() - now > _WITNESS_INTERVAL

    def release(self, end: int) -> None:
        self._release({self: end})

    def _lock(self, connection: Connection, deadline: float) -> bool:
        return connection.call(lock(self._group, self._client_id, self._held), deadline).issuperset(self._held)

    # --- reading

    def start(self) -> Start:
        # Use numbers that were read under the lock, because the batch may have been committed while this attempt waited for the lock.
        numbers, self._numbers = self._numbers or self._bookmarks.read(self.queue), None
        return Start(numbers.end, numbers.bookmark, self._committed(numbers))

    def require_rights(self) -> None:
        """Check the account's rights. Raises RocketMQError NO_PERMISSION if it lacks one that a sink needs."""
        access.require(self._client, rights.of_sink(self.queue.topic, self._group))

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
                if error.behind is None:
                    raise
                begin = error.behind
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
        port = self
        if queue != self.queue:
            port = RocketMQQueue(self._client, self._log, queue, self._writer, self._client_id, self._lock_timing, self._stop)
        begin = max(port.least(), end - PROBE)
        return any(find_messages(batch, self._writer) for batch in port.read(begin, end))

    # --- sending

    def _connection_to_send_on(self, deadline: float) -> Connection:
        """Return the connection on which the lock was granted. After a reconnection, the broker may have forgotten the lock."""
        return self._granted[0] if self._granted is not None else super()._connection_to_send_on(deadline)

    def pause(self, error: RocketMQUnavailableError, failures: int) -> None:
        if error.outcome_unknown:
            self._granted = None
        super().pause(error, failures)

    def _wait(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise abandoned(self.queue)


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
    asked = [(queue, message_requests.max_offset(queue)) for queue in begins if queue not in ends]
    ends.update(zip([queue for queue, _ in asked], ask_queues(client, asked, Deadline.after(TIMEOUT))))
    return [ends[queue] for queue in begins]


def abandoned(queue: MessageQueue) -> OrderedMQError:
    """Return the error of an attempt that was abandoned while it was writing."""
    return SinkError(SinkCondition.TOKEN_GONE, f"the write to queue {queue} has been abandoned")
