"""Pulls one queue with many requests in flight, puts the answers in order, and decodes them together.

A broker returns at most 32 messages or 256 KiB per pull, whatever is requested
(MessageStoreConfig.maxTransferCountOnMessageInMemory), and 8 messages or 64 KiB of what it must read from disk. So requests for
the ranges predicted to follow are sent before the answer comes. If an answer ends short, the rest is requested again. If it
says that there are no messages, the bounds decide what that means. A ProcessQueue keeps the order and bounds the memory.

With a filter, a broker scans some 800 messages per pull and returns those that match. So ranges of this size are requested side
by side, and the offset at which an answer says to continue is trusted.

Rules: rows come without a gap, or a DataLossError is raised, also for a message that cannot be read. With a filter, messages
that are just being deleted look like messages that do not match, until the broker says that they are gone. After 120 s without
progress, TIMEOUT is raised.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

import pyarrow as pa

from orderedmq.conditions import ProtocolCondition, RocketMQCondition, UnavailableCondition
from orderedmq.core.filters import Filter
from orderedmq.core.process_queue import PULL_MAX_IDLE, ProcessQueue, Slice
from orderedmq.core.pull_settings import DEFAULT_PULL, PullSettings
from orderedmq.errors import (
    DataLossError,
    OrderedMQError,
    ProtocolError,
    RocketMQError,
    RocketMQUnavailableError,
    aged_out,
    beyond_end,
)
from orderedmq.malformed_text import MalformedText
from orderedmq.model import MessageQueue, select_schema
from orderedmq.pulls import bounded
from orderedmq.rocketmq.messages.batch_trim import TAIL_LOSS, average_body, cut_at_gap, decode_rows, drop_repeats
from orderedmq.rocketmq.net.backoff import RETRY
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.connection import Connection, Pending
from orderedmq.rocketmq.net.deadline import Deadline
from orderedmq.rocketmq.wire import message_requests
from orderedmq.rocketmq.wire.codes import MASTER_ID
from orderedmq.rocketmq.wire.message_requests import PullResult, PullStatus
from orderedmq.rocketmq.wire.request import Request
from orderedmq.rocketmq.wire.rights import TOOLS_GROUP

T = TypeVar("T")

#: Pulls in flight for one queue.
IN_FLIGHT: Final = 32
#: Messages that the first pull requests, to learn how many a broker returns.
MOST_MESSAGES: Final = 1024
#: Messages that a broker scans for one pull with a filter (DefaultMessageStore.getMessage: 16,000 bytes of 20 each).
SCANNED: Final = 800
#: Seconds until a broker's limit is learned again: messages that were on disk are in memory by then.
_STEP_AGE: Final = 5.0
#: Seconds until the average body size is measured again.
_AVERAGE_AGE: Final = 10.0
#: Seconds that one pull may take before it is sent again.
_PULL_TIMEOUT: Final = 15.0
#: Seconds for which a replica that failed is not used.
_REPLICA_AGAIN: Final = 30.0
#: Answers to wait for while more are in flight: waking up for each one would cost more than handling it.
_WAKE: Final = 8
#: Seconds between checks whether time is up.
_TICK: Final = 1.0
#: The least bytes of a stored message besides its body.
_LEAST_OVERHEAD: Final = 91


@dataclass
class _Known:
    """What earlier pulls of a queue have shown."""

    #: Messages that the broker returns per pull, and when that was learned.
    step: int = 32
    learned: float = float("-inf")
    end: int = 0
    #: The replica that the broker suggested to read from (PullMessageResponseHeader.suggestWhichBrokerId).
    replica: int = MASTER_ID
    #: Until when only the master is used, because a replica failed.
    only_master: float = float("-inf")
    #: Approximate bytes of a body, and when that was measured.
    body_bytes: float | None = None
    measured: float = float("-inf")
    #: Bytes of the last answer.
    answer: int = 0


class Puller:
    """Pulls messages of any queue, for any thread."""

    def __init__(self, client: Client, settings: PullSettings = DEFAULT_PULL, *, patience: float = PULL_MAX_IDLE) -> None:
        """``patience``: seconds without progress after which a pull fails."""
        self._client = client
        self._settings = settings
        self._group = TOOLS_GROUP
        self._patience = patience
        self._known: dict[MessageQueue, _Known] = {}
        self._note = MalformedText().note

    def ask_as_group(self, ask: Callable[[str], T]) -> T:
        """Run ``ask`` as TOOLS_CONSUMER; if the account lacks permission for it, run it as the reader's own group.

        The reader's group is not tried first: a pull in its name would consume a reset by RocketMQ's own tools, which the
        group's next commit has to notice.
        """
        try:
            return ask(self._group)
        except RocketMQError as error:
            if error.sub != RocketMQCondition.NO_PERMISSION or self._settings.group in (None, self._group):
                raise
        assert self._settings.group is not None
        found = ask(self._settings.group)
        self._group = self._settings.group
        return found

    def knows(self, queue: MessageQueue) -> bool:
        """Return whether the queue existed when it was last pulled."""
        return queue in self._known

    def average(self, queue: MessageQueue) -> float | None:
        """Return the approximate bytes of the bodies pulled last; None if there were none in the last 10 s."""
        known = self._known.get(queue)
        return known.body_bytes if known is not None and time.monotonic() - known.measured < _AVERAGE_AGE else None

    def pull(
        self, queue: MessageQueue, offset: int, max_messages: int, max_bytes: int, columns: tuple[str, ...]
    ) -> pa.RecordBatch:
        """Pull rows; see `Log.pull`. Raises RocketMQUnavailableError TIMEOUT, too."""
        parts, end, known = self._fetch(queue, offset, max_messages, max_bytes, None)
        if not parts:
            return pa.RecordBatch.from_pylist([], schema=select_schema(columns))
        batch, end = decode_rows(queue, parts, columns, offset, end, max_bytes, self._note)
        batch = cut_at_gap(batch, queue, offset, end)
        known.body_bytes, known.measured = average_body(batch, sum(map(len, parts)), known.body_bytes), time.monotonic()
        return bounded(batch.select(list(columns)), max_bytes)

    def pull_matching(
        self, queue: MessageQueue, offset: int, max_messages: int, max_bytes: int, columns: tuple[str, ...], matching: Filter
    ) -> tuple[pa.RecordBatch, int]:
        """Pull the rows that match; see `Log.pull_matching`. Raises RocketMQUnavailableError TIMEOUT, too."""
        parts, end, _ = self._fetch(queue, offset, max_messages, max_bytes, matching)
        batch, end = decode_rows(queue, parts, columns, offset, end, max_bytes, self._note, frozenset(matching.tags))
        batch = drop_repeats(batch)
        rows = bounded(batch.select(list(columns)), max_bytes)
        if rows.num_rows < batch.num_rows:
            end = batch.column("queue_offset")[rows.num_rows].as_py()
        return rows, end

    def _fetch(
        self, queue: MessageQueue, offset: int, max_messages: int, max_bytes: int, matching: Filter | None
    ) -> tuple[list[memoryview], int, _Known]:
        known = self._known.get(queue) or _Known()

        def run(group: str) -> tuple[list[memoryview], int]:
            limits = self._settings
            wanted = _Wanted(offset, min(max_messages, limits.max_messages), max_bytes, limits.max_bytes, matching)
            return _Fetch(self._client, queue, group, known, self._patience, wanted).run()

        try:
            parts, end = self.ask_as_group(run)
        except OrderedMQError:
            self._known.pop(queue, None)
            raise
        self._known[queue] = known
        return parts, end, known


class _Wanted(NamedTuple):
    """Messages from ``offset`` on until their bodies have ``max_bytes``, with at most about ``hold`` bytes not yet returned."""

    offset: int
    max_messages: int
    max_bytes: int
    hold: int
    matching: Filter | None


class _Fetch:
    """One pull: collects responses for offsets [offset, offset + max_messages) until there are enough.

    Requests are for ranges that do not overlap, and an answer is never longer than its request, so responses in order are
    messages in order. With a filter an answer may reach into the next range; what it says of that range is not used.
    """

    def __init__(
        self, client: Client, queue: MessageQueue, group: str, known: _Known, patience: float, wanted: _Wanted
    ) -> None:
        self._client = client
        self._queue = queue
        self._group = group
        self._known = known
        self._patience = patience
        self._wanted = wanted
        self._offset = offset = wanted.offset
        self._matching = wanted.matching
        #: No offset from here on is requested. It is lowered if the queue turns out to end, or to have lost messages.
        self._stop = offset + wanted.max_messages
        #: The next offset to request, and (time, begin, count) of ranges below it to request again at that time.
        self._next = offset
        self._again: list[tuple[float, int, int]] = []
        self._in_flight = 0
        #: Requests to send, by connection, each with the callback for its answer.
        self._asked: dict[Connection, list[tuple[Request[PullResult], Callable[[Pending[PullResult]], None]]]] = {}
        self._connections: dict[int, Connection] = {}
        #: Answers from the connections' threads, and how many of them are worth waking up for.
        self._answers: deque[tuple[int, int, int, Connection, Pending[PullResult]]] = deque()
        self._enough = 1
        self._bell = threading.Event()
        self._held = ProcessQueue(time.monotonic())
        self._answer = known.answer
        self._responses: dict[int, tuple[int, memoryview]] = {}
        self._loss: DataLossError | None = None
        self._failures = 0
        #: Connections whose loss is among the failures.
        self._lost: set[Connection] = set()
        self._last: OrderedMQError | None = None

    def run(self) -> tuple[list[memoryview], int]:
        """Return responses in order, and the offset after their messages. Raises TopicError, DataLossError, RocketMQError."""
        while (done := self._reached()) < self._stop:
            self._send_more()
            self._write()
            if not self._in_flight and not self._again:
                break
            self._receive()
        if done == self._offset and self._loss is not None:
            raise self._loss
        parts: list[memoryview] = []
        at = self._offset
        while at < done:
            at, body = self._responses[at]
            parts.append(body)
        return parts, at

    def _reached(self) -> int:
        """Return the offset below which everything has come."""
        pending = self._held.pending()
        return pending[0].end if pending and pending[0].begin == self._offset else self._offset

    # --- asking

    def _send_more(self) -> None:
        now = time.monotonic()
        due = [one for one in self._again if one[0] <= now]
        self._again = [one for one in self._again if one[0] > now and one[1] < self._stop]
        for _, begin, count in due:
            if begin < self._stop:
                self._ask(begin, count)
        step, learned = self._known.step, now - self._known.learned < _STEP_AGE
        if self._matching is not None:
            step, learned = SCANNED, True
        while self._in_flight < IN_FLIGHT and not self._again and self._wants_more():
            count = min(step if learned else MOST_MESSAGES, self._stop - self._next)
            self._next += count
            self._ask(self._next - count, count)
            if not learned:
                return

    def _wants_more(self) -> bool:
        if self._next >= self._stop:
            return False
        if self._next == self._offset:
            return True
        held = self._held.message_size
        bodies = held - _LEAST_OVERHEAD * self._held.message_count
        coming = self._in_flight * self._answer
        return self._next < self._known.end and held + coming < self._wanted.hold and bodies < self._wanted.max_bytes

    def _ask(self, begin: int, count: int) -> None:
        replica = self._known.replica
        request = message_requests.pull(self._queue, self._group, begin, count, matching=self._matching)
        deadline = min(Deadline.after(_PULL_TIMEOUT), self._held.last_pull + self._patience)
        try:
            connection = self._connection(replica, deadline)
        except RocketMQUnavailableError as error:
            self._failed(error, begin, count, replica, None)
            return
        self._in_flight += 1
        sent = (begin, count, replica, connection)
        self._asked.setdefault(connection, []).append((request, lambda pending: self._answered(sent, pending)))

    def _write(self) -> None:
        """Send the collected requests, with one write per connection."""
        asked, self._asked = self._asked, {}
        for connection, requests_of_it in asked.items():
            connection.send_all(requests_of_it, Deadline.after(min(_PULL_TIMEOUT, self._patience)))

    def _connection(self, replica: int, deadline: float) -> Connection:
        found = self._connections.get(replica)
        if found is None or found.closed:
            topic, name = self._queue.topic, self._queue.broker_name
            address = self._client.address(topic, name, deadline, replica, any_replica=True)
            found = self._connections[replica] = self._client.connection(address, deadline)
        return found

    def _ask_again(self, begin: int, count: int, delay: float) -> None:
        self._again.append((time.monotonic() + delay, begin, count))

    # --- what comes

    def _receive(self) -> None:
        """Wait for some answers, or until a range is due again. Raises RocketMQUnavailableError TIMEOUT."""
        now = time.monotonic()
        if now - self._held.last_pull > self._patience:
            why = f": {self._last.message}" if self._last is not None else ""
            raise RocketMQUnavailableError(
                UnavailableCondition.TIMEOUT,
                f"queue {self._queue} returned no messages at offset {self._reached()} for {self._patience:g} s{why}; is its broker or the "
                "disk overloaded?",
            )
        first = min((one[0] for one in self._again), default=now + _TICK)
        self._bell.clear()
        self._enough = min(_WAKE, self._in_flight)
        if len(self._answers) < self._enough or not self._enough:
            self._bell.wait(max(0.0, min(first - now, _TICK)))
        while self._answers:
            self._take(*self._answers.popleft())

    def _answered(self, sent: tuple[int, int, int, Connection], pending: Pending[PullResult]) -> None:
        """Collect an answer, in a connection's thread."""
        self._answers.append((*sent, pending))
        if len(self._answers) >= self._enough:
            self._bell.set()

    def _failed(self, error: OrderedMQError, begin: int, count: int, replica: int, connection: Connection | None) -> None:
        """Request a range without an answer again, later, from the master; by a new route unless the broker was only busy."""
        self._last = error
        # A connection that is lost fails all its requests at once, which counts as one failure.
        if connection not in self._lost:
            self._failures += 1
        if connection is not None and connection.closed:
            self._lost.add(connection)
        self._known.replica = MASTER_ID
        if replica != MASTER_ID:
            # A replica that may not be read from (slaveReadEnable) answers that it is busy, and its master keeps suggesting it.
            self._known.only_master = time.monotonic() + _REPLICA_AGAIN
        if error.sub != UnavailableCondition.BUSY:
            self._client.doubt(self._queue.topic)
        self._ask_again(begin, count, RETRY.delay(self._failures, random.random()))

    def _take(self, begin: int, count: int, replica: int, connection: Connection, pending: Pending[PullResult]) -> None:
        self._in_flight -= 1
        try:
            result = pending.result()
        except OrderedMQError as error:
            # A replica may not know all topics and groups of its master yet: it copies them every 10 s.
            if replica == MASTER_ID and not isinstance(error, RocketMQUnavailableError):
                raise
            self._failed(error, begin, count, replica, connection)
            return
        self._known.end = result.max_offset
        none_match = self._matching is not None and result.filtered and result.next_begin_offset > begin
        if result.status is PullStatus.FOUND or none_match:
            self._found(result, begin, count)
        elif replica != MASTER_ID:
            # A replica does not correct offsets, and may lag behind (PullMessageProcessor, offsetCheckInSlave).
            self._known.replica = MASTER_ID
            self._ask_again(begin, count, 0.0)
            return
        else:
            self._not_found(result, begin, count)
        if time.monotonic() >= self._known.only_master:
            self._known.replica = result.suggested_broker_id

    def _found(self, result: PullResult, begin: int, count: int) -> None:
        if self._matching is not None and begin < result.min_offset:
            self._end_at(begin, aged_out(self._queue, begin, result.min_offset))
            return
        # next_begin_offset is beyond the range if messages in between were deleted; decoding shows which ones are missing.
        end = min(result.next_begin_offset, begin + count)
        if end <= begin:
            why = f"queue {self._queue}: a pull at offset {begin} found messages and says to continue at {end}"
            raise ProtocolError(ProtocolCondition.PROTOCOL, why)
        now = self._held.last_pull = time.monotonic()
        self._failures = 0
        self._known.answer = len(result.body)
        self._answer = max(self._answer, self._known.answer)
        self._held.put(Slice(begin, end, len(result.body)))
        self._responses[begin] = (end, memoryview(result.body))
        short = end < begin + count
        given, step = end - begin, self._known.step
        # Only an answer to a request for more than the known limit shows the broker's limit, and only before the queue's end.
        more = count > step or count == MOST_MESSAGES
        if self._matching is None and (given > step or (more and (end < result.max_offset or not short))):
            self._known.step, self._known.learned = given, now
        if not short:
            return
        if begin + count == self._next:
            self._next = end
        else:
            self._ask_again(end, begin + count - end, 0.0)

    def _not_found(self, result: PullResult, begin: int, count: int) -> None:
        """Handle an answer without messages: the queue's end, messages that are gone, or a broker that needs a moment."""
        if begin < result.min_offset:
            self._end_at(begin, aged_out(self._queue, begin, result.min_offset))
        elif begin == result.max_offset:
            self._end_at(begin, None)
        elif begin > result.max_offset:
            self._end_at(begin, beyond_end(self._queue, result.max_offset, f"offset {begin} was requested", TAIL_LOSS))
        else:
            # There are messages: not visible yet, just being deleted, or the pull met an admin's reset, which is over now.
            why = f"the broker answered {result.status.name} with next offset {result.next_begin_offset}"
            self._last = RocketMQUnavailableError(UnavailableCondition.BUSY, why)
            self._failures += 1
            self._ask_again(begin, count, RETRY.delay(self._failures, random.random()))

    def _end_at(self, begin: int, loss: DataLossError | None) -> None:
        if begin < self._stop:
            self._stop, self._loss = begin, loss
