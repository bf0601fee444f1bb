"""The lock of one attempt of one sink's partition on a topic at one broker. Only an attempt that holds it sends rows to that broker.

A lock is trusted for 30 s, and only on the connection on which it was granted, because a broker that restarted has forgotten the lock,
and a broker that was away may have granted it to another attempt (RocketMQ's lock is advisory). A send ends before the broker would
grant the lock to another attempt.

A connection to a Proxy survives a restart of the broker. So through a Proxy, each attempt also holds a *witness*, a lock that no other
attempt requests. Once a second, which is less than any restart takes, the attempt requests it under another name. If that is granted,
the broker has forgotten the attempt's locks. A Proxy may hold back a request that was sent before. So an attempt that takes over a
broker from another run of the batch waits for as long as a Proxy does that.

Attempts of one partition exclude each other by a lock of their run and partition. Runs of one batch exclude each other by the
broker's *entry*, a number that names the run that writes. An attempt that gets its lock reads the entry. If the entry names
another run, the attempt waits for the locks of all partitions of that run and changes the entry while it holds them. A gate
lock ensures that only one attempt at a time does this.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from orderedmq.conditions import LockCondition, SinkCondition
from orderedmq.errors import LockError, OrderedMQError, RocketMQUnavailableError, SinkError
from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import HOLDER_TRUST, LOCK_LIFE, RENEW_INTERVAL
from orderedmq.rocketmq.append.broker_port import BrokerRequests, Timing
from orderedmq.rocketmq.messages.log import RocketMQLog
from orderedmq.rocketmq.net.behind_proxy import HOLDS_BACK
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.connection import Connection
from orderedmq.rocketmq.net.deadline import Backoff, Deadline
from orderedmq.rocketmq.sink.agreement import Agreement
from orderedmq.rocketmq.sink.bookmarks import Bookmarks, Numbers, WriterEntry
from orderedmq.rocketmq.sink.message_stamp import Writer, lock_key
from orderedmq.rocketmq.wire.group_requests import lock, unlock
from orderedmq.rocketmq.wire.request import Request

#: The maximum number of attempts to take over a broker. A run that lost its locks may take it back, so one may not be enough.
_TAKE_OVERS: Final = 20
#: Seconds between two requests for a witness.
_WITNESS_INTERVAL: Final = 1.0
_LOCK_RETRY: Final = Backoff(first=0.02, most=0.5)


@dataclass(frozen=True)
class LockTiming(Timing):
    """Time limits of an attempt, in seconds.

    A lock is trusted for ``lock_trust`` and renewed after ``lock_renew``. An attempt waits for a lock for up to ``lock_wait``, and
    gives back its idle brokers each time it has waited for about ``lock_yield``. ``send_timeout`` also limits a lock request.
    """

    visible: float = 5.0
    patience: float = 90.0
    lock_trust: float = HOLDER_TRUST
    lock_renew: float = RENEW_INTERVAL
    lock_wait: float = LOCK_LIFE + 15.0
    lock_yield: float = 3.0


@dataclass(frozen=True)
class Attempt:
    """One attempt of a writing task.

    ``writer``: None for a batch without identity, which is sent without locks and without looking back. ``client_id``: the holder of
    its locks. No other attempt has the same. ``stop``: set when the attempt is abandoned.
    """

    client: Client
    log: RocketMQLog
    writer: Writer | None
    timing: LockTiming
    client_id: str = field(default_factory=lambda: f"sink@{uuid.uuid4().hex}")
    stop: threading.Event = field(default_factory=threading.Event)

    def wait(self, seconds: float, queue: MessageQueue) -> None:
        """Raises SinkError TOKEN_GONE, which names the queue, as soon as the attempt is abandoned."""
        if self.stop.wait(seconds):
            raise abandoned(queue)


@dataclass(eq=False)
class Grant:
    """An unbroken time in which an attempt holds its lock. ``committed``: the newest batch known to be committed; -1 for none."""

    connection: Connection
    #: When the lock was last requested.
    since: float
    committed: int
    #: When the broker was last known to remember the lock.
    remembered: float


class BrokerLock(BrokerRequests):
    """The lock of an attempt with identity on one topic at one broker. Thread-safe."""

    def __init__(
        self,
        attempt: Attempt,
        queue: MessageQueue,
        waits: Callable[[], None] = lambda: None,
        agreement: Agreement | None = None,
    ) -> None:
        """``queue``: any queue of the topic at the broker.

        ``waits`` is called from time to time while this attempt waits for a lock of another attempt. ``agreement``: on the batch's
        queues; None if no row is sent to a queue that the batch does not have there already.
        """
        super().__init__(attempt.client, queue._replace(queue_id=0), attempt.timing)
        assert attempt.writer is not None
        self._attempt = attempt
        self._writer = attempt.writer
        self._lock_timing = attempt.timing
        self._waits = waits
        self._agreement = agreement
        self._bookmarks = Bookmarks(attempt.client, self._writer.sink, queue.topic, self._writer.group)
        self._entry = WriterEntry.of(self._writer)
        self._entered = False
        self._grant: Grant | None = None
        # The locks that were granted and not given back since: the attempt's lock, and through a Proxy its witness.
        self._held: list[MessageQueue] = []
        #: Held by a thread that acquires, renews or releases the lock.
        self.guard = threading.RLock()

    @property
    def is_held(self) -> bool:
        """Whether this attempt has locks that it has not given back."""
        return bool(self._held)

    def acquire(self, enter: Callable[[], None]) -> Grant:
        """Wait until this attempt may send, and return the present grant. Raises LockError HELD_BY_OTHER.

        ``enter`` creates the sink's group and bookmarks at the broker if they are missing.
        """
        with self.guard:
            if self._grant is not None and self.keep(self._grant):
                return self._grant
            keys = self._keys()
            granted = self._lock_all(keys)
            assert granted is not None
            self._held = keys
            if self._agreement is None and not self._entered:
                enter()
            self._entered = True
            numbers = self._bookmarks.numbers(self.queue)
            if self._agreement is not None and self._lacks_record(self._agreement, numbers):
                # The broker was killed and has forgotten the record.
                self._agreement.renew()
                numbers = self._bookmarks.numbers(self.queue)
            for _ in range(_TAKE_OVERS):
                # A run that starts now waits for the lock that this attempt holds.
                if self._is_writer(numbers):
                    connection, since = granted
                    self._grant = Grant(connection, since, self._committed(numbers), since)
                    return self._grant
                self._take_over(numbers.entry)
                # The batch may have been committed while this attempt waited for the other run.
                numbers = self._bookmarks.numbers(self.queue)
        raise LockError(
            LockCondition.HELD_BY_OTHER,
            f"other runs of the same batch take over topic {self.queue.topic!r} at broker {self.queue.broker_name} again and again, so the "
            "query may be running twice. Stop one of the runs",
        )

    def keep(self, grant: Grant) -> bool:
        """Return whether the lock has been held since ``grant``. Renews it when that is due."""
        with self.guard:
            if grant is not self._grant:
                return False
            now = time.monotonic()
            age = now - grant.since
            if grant.connection.closed or age > self._lock_timing.lock_trust or self._is_forgotten(grant, now):
                self._grant = None
            elif age > self._lock_timing.lock_renew:
                try:
                    renewed = self._renew(grant.connection, now + self._timing.send_timeout)
                except RocketMQUnavailableError:
                    renewed = False
                # If the renewal came too late, another attempt may have held the lock in between.
                in_time = time.monotonic() - grant.since <= self._lock_timing.lock_trust
                grant.since = now
                self._grant = grant if renewed and in_time else None
            return self._grant is not None

    def lose(self) -> None:
        """Make this attempt acquire the lock again before the next send."""
        with self.guard:
            self._grant = None

    def release(self, before: Callable[[], None]) -> None:
        """Give the lock back after calling ``before``. No thread can send in the meantime."""
        with self.guard:
            self._grant = None
            try:
                before()
            except RocketMQUnavailableError:
                # Everything is stored, and the locks expire by themselves.
                return
            keys, self._held = self._held, []
            self._unlock(keys, Deadline.after(self._timing.visible))

    @contextlib.contextmanager
    def gate(self, unless: Callable[[], bool]) -> Iterator[Callable[[], bool] | None]:
        """See `TopicBrokers.gates`; for this broker."""
        keys = [self._lock_named("queues")]
        granted = self._lock_all(keys, unless=unless)
        if granted is None:
            yield None
            return
        connection, since = granted
        try:
            yield lambda: not connection.closed and time.monotonic() - since <= self._lock_timing.lock_trust
        finally:
            self._unlock(keys, Deadline.after(self._timing.send_timeout))

    # --- the run that writes

    def _lacks_record(self, agreement: Agreement, numbers: Numbers) -> bool:
        """Return whether the broker has no record of the queues that the batch's attempts have agreed on, although rows may be sent."""
        return self._committed(numbers) < self._writer.batch and not agreement.holds(self.queue.broker_name, numbers.record)

    def _is_writer(self, numbers: Numbers) -> bool:
        """Return whether the entry names this attempt's run, or need not do so.

        If the batch is committed, this attempt sends nothing, and the entry may name the run of a later batch.
        """
        return self._committed(numbers) >= self._writer.batch or numbers.entry.covers(self._entry)

    def _committed(self, numbers: Numbers) -> int:
        """Return the newest batch that this broker or another one knows to be committed."""
        return max(numbers.committed, self._agreement.committed if self._agreement is not None else -1)

    def _is_ours(self) -> bool:
        """Return whether the entry names this attempt's run."""
        return self._bookmarks.entry(self.queue).covers(self._entry)

    def _take_over(self, former: WriterEntry) -> None:
        """Make this run the broker's writer, unless the entry is no longer ``former``, as soon as no attempt of the former run holds a lock.

        This attempt holds the former run's locks while it writes the entry. So an attempt that gets one of these locks later reads that
        the broker has another writer.
        """
        # A broker to which was never written has an entry of batch 0 without a run, and the width 0.
        rival = former.width > 0 and former.batch == self._entry.batch and former.run != self._entry.run
        keys = [self._lock_named("gate")]
        if rival:
            keys += [self._lock_of(former, partition) for partition in range(former.width)]
        # Keep none of them while others are missing: if this attempt were killed then, the next one would also wait for its locks.
        if self._lock_all(keys, unless=self._is_ours) is None:
            return
        try:
            if self._bookmarks.entry(self.queue) != former:
                # Another run or batch is the writer now, so this batch may be committed; or the run has more locks.
                return
            if rival and self._proxied():
                self._wait(self._timing.settle + HOLDS_BACK)
            self._bookmarks.write_entry(self.queue, self._entry.widened(former))
        finally:
            self._unlock(keys, Deadline.after(self._timing.send_timeout))

    # --- requests for locks

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
            requested = time.monotonic()
            try:
                connection = self._connect(requested + self._timing.send_timeout)
                granted = connection.call(self._request(keys), requested + self._timing.send_timeout)
                if granted.issuperset(keys):
                    return connection, requested
                self._unlock(sorted(granted), requested + self._timing.send_timeout)
                failures = 0
            except RocketMQUnavailableError as error:
                failures += 1
                self._wait_out(error, failures)
                continue
            if unless():
                return None
            refusals += 1
            if requested - began > self._lock_timing.lock_wait:
                raise LockError(
                    LockCondition.HELD_BY_OTHER,
                    f"another attempt of the same task or batch has kept topic {self.queue.topic!r} at broker {self.queue.broker_name} locked "
                    f"for {requested - began:.0f} s (group {self._bookmarks.group}), and this attempt must wait for it. The lock of a dead "
                    "attempt expires after 60 s, so the other attempt is alive, or the broker's clock was changed. End the other attempt",
                )
            if requested > yields:
                self._waits()
                yields = time.monotonic() + self._lock_timing.lock_yield * random.uniform(0.5, 1.5)
            self._wait(_LOCK_RETRY.delay(refusals, random.random()))

    def _request(self, keys: list[MessageQueue]) -> Request[frozenset[MessageQueue]]:
        return lock(self._bookmarks.group, self._attempt.client_id, keys)

    def _renew(self, connection: Connection, deadline: float) -> bool:
        return connection.call(self._request(self._held), deadline).issuperset(self._held)

    def _unlock(self, keys: list[MessageQueue], deadline: float) -> None:
        """Give locks back. Another attempt's locks are not changed. A lock whose broker cannot be reached expires by itself."""
        if keys:
            with contextlib.suppress(RocketMQUnavailableError):
                self._connect(deadline).call(unlock(self._bookmarks.group, self._attempt.client_id, keys), deadline)

    def _is_forgotten(self, grant: Grant, now: float) -> bool:
        """Return whether the broker, reached through a Proxy, may have restarted since ``now`` - 1 s, and forgotten the locks."""
        if len(self._held) == 1 or now - grant.remembered <= _WITNESS_INTERVAL:
            return False
        witness, other, deadline = self._held[-1:], f"{self._attempt.client_id}?", now + self._timing.send_timeout
        try:
            if grant.connection.call(lock(self._bookmarks.group, other, witness), deadline):
                grant.connection.call(unlock(self._bookmarks.group, other, witness), deadline)
                return True
        except RocketMQUnavailableError:
            return True
        grant.remembered = now
        # The broker may have restarted since a late answer.
        return time.monotonic() - now > _WITNESS_INTERVAL

    def _keys(self) -> list[MessageQueue]:
        """Return the keys of the attempt's lock and, through a Proxy, of its witness."""
        own = self._lock_of(self._entry, self._writer.partition)
        return [own, self._lock_named(f"witness/{self._attempt.client_id}")] if self._proxied() else [own]

    def _lock_of(self, entry: WriterEntry, partition: int) -> MessageQueue:
        """Return the key of the lock of one partition in the entry's run."""
        return self._lock_named(f"{entry.run:08x}/{min(partition, entry.width - 1)}")

    def _lock_named(self, name: str) -> MessageQueue:
        return lock_key(self._writer.sink, self.queue, name, proxied=self._proxied())

    def _wait(self, seconds: float) -> None:
        self._attempt.wait(seconds, self.queue)


def abandoned(queue: MessageQueue) -> OrderedMQError:
    """Return the error of an attempt that was abandoned while it was writing."""
    return SinkError(SinkCondition.TOKEN_GONE, f"the write to queue {queue} has been abandoned")
