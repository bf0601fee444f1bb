"""Fetches messages of one queue over a `Lane`: many requests are in flight, and the answers are returned in order, in pieces.

A broker returns at most 32 messages or 256 KiB per pull, however many are requested
(MessageStoreConfig.maxTransferCountOnMessageInMemory), and 8 messages or 64 KiB if it must read them from disk. So requests for
the ranges that probably follow are sent before an answer arrives. If an answer has fewer messages than its request, the rest is
requested again. If an answer has no messages, the queue's bounds show why. A piece is returned while requests for the next messages are
in flight, so that the broker works while the caller decodes the piece.

With a filter, a broker scans some 800 messages per pull and returns those that match. So ranges of this size are requested in
parallel, and the next offset in an answer is trusted.
"""

from __future__ import annotations

import random
import time
from typing import Final, TypeVar

from orderedmq.conditions import ProtocolCondition, UnavailableCondition
from orderedmq.errors import (
    DataLossError,
    OrderedMQError,
    ProtocolError,
    RocketMQUnavailableError,
    aged_out,
    beyond_end,
)
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.messages.answers import TAIL_LOSS, Answers, PullLimits, QueueFacts
from orderedmq.rocketmq.messages.topic_anchor import first_message
from orderedmq.rocketmq.net.behind_proxy import answered_together
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.deadline import RETRY, Deadline
from orderedmq.rocketmq.net.lane import Answer, Lane
from orderedmq.rocketmq.wire import message_requests
from orderedmq.rocketmq.wire.codes import MASTER_ID
from orderedmq.rocketmq.wire.message_requests import PullResult, PullStatus
from orderedmq.rocketmq.wire.pull_frames import PullTemplate
from orderedmq.rocketmq.wire.request import Request
from orderedmq.rows.filters import Filter

T = TypeVar("T")

#: Maximum number of pulls in flight for one queue: enough to keep a broker working while a piece is decoded.
IN_FLIGHT: Final = 256
#: The limits for large messages: pulls in flight have answers of about this many bytes, but there are at least this many pulls.
_COMING_BYTES: Final = 6 * 1024 * 1024
_ALWAYS_IN_FLIGHT: Final = 32
#: Minimum number of messages or bytes in a piece, unless it is the last. Decoding many messages together costs less per message, and
#: takes about as long as a broker needs for the pulls that are in flight.
PIECE: Final = 8192
PIECE_BYTES: Final = 6 * 1024 * 1024
#: Messages that the first pull requests. Its answer shows how many messages a broker returns per pull.
MOST_MESSAGES: Final = 1024
#: Messages that a broker scans for one pull with a filter (DefaultMessageStore.getMessage: 16,000 bytes of 20 each).
SCANNED: Final = 800
#: Seconds until a broker's limit is measured again, because messages that were on disk may be in memory by then.
_STEP_AGE: Final = 5.0
#: Seconds that one pull may take before it is sent again.
_PULL_TIMEOUT: Final = 15.0
#: Seconds for which a replica that failed is not used.
_REPLICA_AGAIN: Final = 30.0
#: For how many seconds a pull is repeated if a broker leaves messages out. A broker skips messages that it cannot read
#: (DefaultMessageStore.getMessage), which also happens for a moment after its start.
HOLE_PATIENCE: Final = 15.0
#: Messages that a broker examines at most for one pull: the entries in a file of a consume queue (mappedFileSizeConsumeQueue).
_MOST_EXAMINED: Final = 300_000
#: Seconds between two checks of the time limit.
_TICK: Final = 1.0
#: Minimum bytes of a stored message without its body.
_LEAST_OVERHEAD: Final = 91
#: Used instead of a replica's id while the master is away and any replica in the route may be read.
_STAND_IN: Final = -1


class Fetch:
    """Fetches messages from ``offset`` on for consecutive pulls. For each pull, call `begin`, then `next_piece` until the pull has enough.

    Requested ranges do not overlap, and an answer is never longer than its request, so answers in order are messages in order.
    With a filter, an answer may reach into the next range. The answer's messages of that range are not used.
    """

    def __init__(
        self,
        client: Client,
        queue: MessageQueue,
        group: str,
        facts: QueueFacts,
        patience: float,
        offset: int,
        matching: Filter | None,
    ) -> None:
        self._client = client
        self._queue = queue
        self._group = group
        self._facts = facts
        self._patience = patience
        self._matching = matching
        #: Where the pull began, and its limits.
        self._offset = offset
        self._limits = PullLimits(0, 0, 0, 0)
        #: Offsets from this one on are not requested. Lowered to the offset at which the queue ends or has lost messages.
        self._stop = offset
        #: Whether ``_stop`` was lowered.
        self._ended = False
        #: The greatest number of messages in one request so far.
        self._largest = 0
        #: The next offset to request, and ranges below it to request again: (when, begin, count).
        self._next = offset
        self._again: list[tuple[float, int, int]] = []
        #: Ranges to request in one write.
        self._asks: list[tuple[int, int]] = []
        #: The lane in use, the replica for which it was opened, and the replica to which it leads.
        self._lane: Lane | None = None
        self._wanted: int | None = MASTER_ID
        self._replica = MASTER_ID
        self._template: PullTemplate | None = None
        #: Answers by the beginning of their range: (end, body). Messages below ``_done`` are in pieces or in ``_parts``.
        self._answers: dict[int, tuple[int, memoryview]] = {}
        self._done = offset
        self._parts: list[memoryview] = []
        self._parts_size = 0
        #: The offset after the last piece, and the messages and bytes that were received since that piece.
        self.position = offset
        self._count = self._size = 0
        #: Messages and bytes in this pull's pieces, which the caller holds, and when messages were last received.
        self._held_count = self._held_size = 0
        self._heard = time.monotonic()
        #: Since when the broker has skipped the next message without a failure in between; None if it does not.
        self._skipped_since: float | None = None
        self._answer = facts.answer
        self._loss: DataLossError | None = None
        self._failures = 0
        self._last: OrderedMQError | None = None

    def begin(self, limits: PullLimits, until: int) -> None:
        """Begin a pull at `position`. Do not request messages from ``until`` on."""
        self._offset, self._limits = self.position, limits
        self._held_count = self._held_size = 0
        self._heard = time.monotonic()
        if not self._ended:
            self._stop = max(until, self._next)

    def continues(self, offset: int, max_messages: int) -> bool:
        """Return whether a pull of ``max_messages`` from ``offset`` on can use this object and its requests in flight."""
        # Each answer must fit into the pull.
        return offset == self.position and not self._ended and max_messages >= min(self._largest, self._next - offset)

    def next_piece(self, most: int) -> Answers | None:
        """Return the next answers, with at most ``most`` messages. Return None at the queue's end or if the next answer has more.

        An answer that is too long is the first one of the next pull. Raises TopicError, RocketMQError, and DataLossError if the
        pull has no piece yet.
        """
        least = min(PIECE, most)
        while self._take_in_order(least, most) and self._done < self._stop:
            self._send_more()
            self._write()
            if not self._in_flight and not self._again:
                break
            self._receive()
        if self._done == self.position:
            if self._done == self._offset and self._loss is not None:
                raise self._loss
            return None
        # The broker works on the next requests while the caller decodes this piece.
        self._send_more()
        self._write()
        size = self._parts_size
        self._held_count += self._done - self.position
        self._held_size += size
        answers = Answers(self._parts, self._done)
        self._count -= self._done - self.position
        self._size -= size
        self._parts, self._parts_size, self.position = [], 0, self._done
        return answers

    def _take_in_order(self, least: int, most: int) -> bool:
        """Add consecutive answers to the piece until it has ``least`` messages, and at most ``most``. Return whether it needs more."""
        answers, parts, done, begin, size = self._answers, self._parts, self._done, self.position, self._parts_size
        fits = True
        while done - begin < least and size < PIECE_BYTES and (answer := answers.get(done)) is not None:
            end, body = answer
            if end - begin > most:
                fits = False
                break
            del answers[done]
            parts.append(body)
            size += len(body)
            done = end
        self._done, self._parts_size = done, size
        return fits and done - begin < least and size < PIECE_BYTES

    def close(self) -> None:
        """Give the lane back. Answers to requests in flight are discarded."""
        lane, self._lane = self._lane, None
        if lane is not None:
            self._client.give_back(lane)

    # --- asking

    @property
    def _in_flight(self) -> int:
        return len(self._asks) + (self._lane.in_flight if self._lane is not None else 0)

    def _send_more(self) -> None:
        now = time.monotonic()
        if self._again:
            due = [waiting for waiting in self._again if waiting[0] <= now]
            self._again = [waiting for waiting in self._again if waiting[0] > now and waiting[1] < self._stop]
            self._asks += [(begin, count) for _, begin, count in due if begin < self._stop]
            if self._again:
                return
        step, learned = self._facts.step, now - self._facts.learned < _STEP_AGE
        if self._matching is not None:
            step, learned = SCANNED, True
        room = self._room()
        stop = min(self._stop, self._offset + self._limits.hold_messages)
        following, end = self._next, self._facts.end
        largest = min(step if learned else MOST_MESSAGES, self._limits.max_messages)
        for _ in range(room if learned else min(room, 1)):
            count = min(largest, stop - following)
            if count <= 0:
                break
            self._asks.append((following, count))
            following += count
            if following >= end:
                break
        if following > self._next:
            self._largest = max(self._largest, min(largest, following - self._next))
            self._next = following

    def _room(self) -> int:
        """Return how many more requests may be sent now."""
        # The end of a queue is not known before its first pull.
        least = 1 if self._next == self._offset else 0
        if self._next >= self._facts.end:
            return least
        answer = max(self._answer, 1)
        size, count = self._held_size + self._size, self._held_count + self._count
        bodies = size - _LEAST_OVERHEAD * count
        body = max(answer - _LEAST_OVERHEAD * self._facts.step, 1)
        most = min(
            max(_ALWAYS_IN_FLIGHT, min(IN_FLIGHT, _COMING_BYTES // answer)),
            _divided(self._limits.hold_bytes - size, answer),
            _divided(self._limits.max_bytes - bodies, body),
        )
        return max(least, most - self._in_flight)

    def _write(self) -> None:
        """Send the collected requests in one write. If another replica is wanted, wait until the lane has no request in flight.

        A Proxy gets no more requests than it answers at the same time. The other requests wait until answers arrive.
        """
        if not self._asks:
            return
        deadline = min(Deadline.after(_PULL_TIMEOUT), self._heard + self._patience)
        lane, replica = self._lane, self._facts.replica
        if lane is None or lane.closed or replica != self._wanted:
            if lane is not None and lane.in_flight:
                return
            try:
                lane = self._connect(replica, deadline)
            except RocketMQUnavailableError as error:
                failed, self._asks = self._asks, []
                for begin, count in failed:
                    self._failed(error, begin, count, replica)
                return
        credentials = lane.account.current
        if self._template is None or self._template.credentials is not credentials:
            self._template = PullTemplate(self._queue, self._group, self._matching, credentials, lane.names)
        most = answered_together(self._answer) - lane.in_flight if lane.proxied else len(self._asks)
        if most > 0:
            asks, self._asks = self._asks[:most], self._asks[most:]
            lane.ask(self._template, asks, deadline)

    def _connect(self, replica: int, deadline: float) -> Lane:
        """Open a lane to the replica, or to another replica if the route lacks it. Raises RocketMQUnavailableError."""
        self.close()
        topic, name = self._queue.topic, self._queue.broker_name
        address = self._client.address(topic, name, deadline, replica, any_replica=True)
        lane = self._lane = self._client.lane(address, deadline)
        self._wanted = self._replica = replica
        if replica == MASTER_ID and not self._client.is_master(topic, name, address, deadline):
            self._replica = _STAND_IN
        return lane

    def _ask_again(self, begin: int, count: int, delay: float) -> None:
        self._again.append((time.monotonic() + delay, begin, count))

    # --- answers

    def _receive(self) -> None:
        """Wait for answers, or until a range is to be requested again. Raises RocketMQUnavailableError TIMEOUT."""
        timeout = _TICK
        if self._again:
            timeout = max(0.0, min(min(waiting[0] for waiting in self._again) - time.monotonic(), _TICK))
        lane = self._lane
        answers: list[Answer] = []
        if lane is not None and lane.in_flight:
            answers = lane.receive(timeout)
        else:
            time.sleep(timeout)
        now = time.monotonic()
        # Check the time after receiving: if this process was stopped for a while, the broker's answers have arrived by now.
        if not answers and now - self._heard > self._patience:
            why = f": {self._last.message}" if self._last is not None else ""
            raise RocketMQUnavailableError(
                UnavailableCondition.TIMEOUT,
                f"queue {self._queue} returned no messages at offset {self._done} for {self._patience:g} s{why}. Check whether its broker "
                "or the disk is overloaded",
            )
        # A fast path for answers with exactly the requested messages, because this loop runs for every 32 messages.
        usual = self._facts.step if self._matching is None and now >= self._facts.only_master else 0
        for begin, count, result in answers:
            if isinstance(result, PullResult):
                status, end, _, last, suggested, body, _ = result
                if status is PullStatus.FOUND and end - begin == count <= usual and count != MOST_MESSAGES:
                    size = len(body)
                    self._answers[begin] = (end, memoryview(body))
                    self._count += count
                    self._size += size
                    if size > self._answer:
                        self._answer = size
                    facts = self._facts
                    facts.end, facts.replica, facts.answer = last, suggested, size
                    self._heard, self._failures, self._skipped_since = now, 0, None
                else:
                    self._take(result, begin, count, now)
            elif self._replica == MASTER_ID and (
                not isinstance(result, RocketMQUnavailableError) or result.sub == UnavailableCondition.NOT_READABLE
            ):
                raise result
            else:
                # A replica copies topics and groups from its master every 10 s, so it may not know new ones yet.
                self._failed(result, begin, count, self._replica)
        if answers and lane is not None and lane.proxied:
            # The last answer may belong to a small request, so after a large answer the known size falls only slowly.
            self._answer = self._facts.answer = max(self._facts.answer, self._answer - self._answer // 16)

    def _failed(self, error: OrderedMQError, begin: int, count: int, replica: int) -> None:
        """Request an unanswered range again later, from the master. Use a new route unless the broker was only busy."""
        # A broker that was away may have been restarted.
        self._skipped_since = None
        # When a lane ends, all its requests fail with the same error object. They count as one failure.
        if error is not self._last:
            self._failures += 1
            if error.sub != UnavailableCondition.BUSY:
                self._client.doubt(self._queue.topic)
        self._last = error
        self._facts.replica = MASTER_ID
        if self._replica == _STAND_IN:
            # The master may be back, so the next request looks for it.
            self._wanted = None
        if replica != MASTER_ID:
            # A replica that refuses reads (slaveReadEnable=false) answers that it is busy, but its master still suggests it.
            self._facts.only_master = time.monotonic() + _REPLICA_AGAIN
        self._ask_again(begin, count, RETRY.delay(self._failures, random.random()))

    def _take(self, result: PullResult, begin: int, count: int, now: float) -> None:
        self._facts.end = result.max_offset
        none_match = self._matching is not None and result.filtered and result.next_begin_offset > begin
        if result.status is PullStatus.FOUND or none_match:
            self._found(result, begin, count, now)
        elif self._replica == _STAND_IN:
            why = f"the master of its broker is away, and a replica has no message at offset {begin} of queue {self._queue}"
            self._failed(RocketMQUnavailableError(UnavailableCondition.NO_BROKER, why), begin, count, MASTER_ID)
            return
        elif self._replica != MASTER_ID:
            # A replica may lag, and does not correct invalid offsets (PullMessageProcessor, offsetCheckInSlave).
            self._facts.replica = MASTER_ID
            self._ask_again(begin, count, 0.0)
            return
        else:
            self._not_found(result, begin, count, now)
        if now >= self._facts.only_master:
            self._facts.replica = result.suggested_broker_id

    def _found(self, result: PullResult, begin: int, count: int, now: float) -> None:
        if self._matching is not None and begin < result.min_offset:
            self._end_at(begin, aged_out(self._queue, begin, result.min_offset))
            return
        # With a next offset after the range, messages were deleted. If the first one exists, decoding shows which ones are missing.
        gap = self._matching is None and result.next_begin_offset > begin + count
        if gap and (after := self._first_offset(begin, result)) > begin:
            self._end_at(begin, aged_out(self._queue, begin, after))
            return
        end = min(result.next_begin_offset, begin + count)
        if end <= begin:
            why = f"a pull at offset {begin} of queue {self._queue} found messages, but its next offset is {end}"
            raise ProtocolError(ProtocolCondition.PROTOCOL, why)
        self._heard = now
        self._failures = 0
        self._skipped_since = None
        size = self._facts.answer = len(result.body)
        self._answer = max(self._answer, size)
        given, step = end - begin, self._facts.step
        self._count += given
        self._size += size
        self._answers[begin] = (end, memoryview(result.body))
        short = given < count
        # An answer shows the broker's limit only if its request exceeded the known limit and the queue has more messages.
        more = count > step or count == MOST_MESSAGES
        if self._matching is None and (given > step or (more and (end < result.max_offset or not short))):
            self._facts.step, self._facts.learned = given, now
        if not short:
            return
        if begin + count == self._next:
            self._next = end
        else:
            self._ask_again(end, begin + count - end, 0.0)

    def _not_found(self, result: PullResult, begin: int, count: int, now: float) -> None:
        """Handle an answer without messages: the queue's end, deleted messages, or a broker that cannot return them yet."""
        if begin < result.min_offset:
            self._end_at(begin, aged_out(self._queue, begin, result.min_offset))
        elif begin == result.max_offset:
            self._end_at(begin, None)
        elif begin > result.max_offset:
            self._end_at(begin, beyond_end(self._queue, result.max_offset, f"offset {begin} was requested", TAIL_LOSS))
        elif self._is_deleted(result, begin, now) and (after := self._after_gap(begin, result.max_offset)) > begin:
            self._end_at(begin, aged_out(self._queue, begin, after))
        else:
            # Messages exist, but they are not visible yet or are being deleted, or this pull met an administrator's reset, which does
            # not apply to the next pull.
            why = f"the broker answered {result.status.name} with next offset {result.next_begin_offset}"
            self._last = RocketMQUnavailableError(UnavailableCondition.BUSY, why)
            self._failures += 1
            self._ask_again(begin, count, RETRY.delay(self._failures, random.random()))

    def _is_deleted(self, result: PullResult, begin: int, now: float) -> bool:
        """Return whether the broker skips the message at ``begin`` for so long that it must have been deleted.

        Usually the queue's minimum shows this after 10 s. But before 5.0, a broker keeps the minimum of an idle queue whose messages
        were all deleted, and every broker does so if a pull used the file of the consume queue during its deletion
        (ConsumeQueue.correctMinOffset). A broker that has just started may skip messages for a moment.
        """
        skips = result.status is PullStatus.NO_MATCHED_MESSAGE or _is_in_deleted_file(result, begin)
        if not skips or begin >= self._stop:
            return False
        if self._skipped_since is None:
            self._skipped_since = now
        return now - self._skipped_since >= HOLE_PATIENCE

    def _after_gap(self, begin: int, end: int) -> int:
        """Return the offset after the messages from ``begin`` on that the broker skips. It examines as many messages as are requested."""
        result = self._call(message_requests.pull(self._queue, self._group, begin, min(end - begin, _MOST_EXAMINED)))
        if _is_in_deleted_file(result, begin):
            # If the broker corrected the minimum during this pull, the file also has messages that exist.
            least = self._call(message_requests.min_offset(self._queue))
            if least > begin:
                return least
        return self._first_offset(begin, result)

    def _call(self, request: Request[T]) -> T:
        deadline = Deadline.after(_PULL_TIMEOUT)
        return self._client.call(request, deadline, topic=self._queue.topic, broker_name=self._queue.broker_name)

    def _first_offset(self, begin: int, result: PullResult) -> int:
        """Return the offset of an answer's first message, or the next offset if the answer to the pull at ``begin`` has no messages."""
        message = first_message(self._client, self._queue, begin, result)
        return result.next_begin_offset if message is None else message.queue_offset

    def _end_at(self, begin: int, loss: DataLossError | None) -> None:
        if begin < self._stop:
            self._stop, self._loss, self._ended = begin, loss, True


def _is_in_deleted_file(result: PullResult, begin: int) -> bool:
    """Return whether the answer to the pull at ``begin`` skips the rest of a file of the consume queue (OFFSET_FOUND_NULL)."""
    return result.status is PullStatus.NO_NEW_MESSAGE and result.next_begin_offset > begin


def _divided(number: int, by: int) -> int:
    """Return the quotient, rounded up."""
    return -(-number // by)
