"""Fetches messages of one queue over a lane: many requests in flight, answers put in order and handed over in pieces.

A broker returns at most 32 messages or 256 KiB per pull, whatever is requested
(MessageStoreConfig.maxTransferCountOnMessageInMemory), and 8 messages or 64 KiB of what it must read from disk. So requests for
the ranges predicted to follow are sent before the answer comes. If an answer ends short, the rest is requested again. If it
says that there are no messages, the bounds decide what that means. A piece is handed over while requests for what follows are
in flight, so that the broker works while it is decoded.

With a filter, a broker scans some 800 messages per pull and returns those that match. So ranges of this size are requested side
by side, and the offset at which an answer says to continue is trusted.
"""

from __future__ import annotations

import random
import time
from typing import Final

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
from orderedmq.rocketmq.messages.batch_trim import TAIL_LOSS
from orderedmq.rocketmq.messages.pull_state import Answers, Known, PullLimits
from orderedmq.rocketmq.net.backoff import RETRY
from orderedmq.rocketmq.net.behind_proxy import answered_together
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.deadline import Deadline
from orderedmq.rocketmq.net.lane import Answer, Lane
from orderedmq.rocketmq.wire.codes import MASTER_ID
from orderedmq.rocketmq.wire.message_requests import PullResult, PullStatus
from orderedmq.rocketmq.wire.pull_frames import PullTemplate
from orderedmq.rows.filters import Filter

#: The most pulls in flight for one queue: enough for a broker to work while a piece is decoded.
IN_FLIGHT: Final = 256
#: Of large messages fewer are in flight: no more than about these bytes, but at least this number of pulls.
_COMING_BYTES: Final = 6 * 1024 * 1024
_ALWAYS_IN_FLIGHT: Final = 32
#: Messages or bytes of a piece, at least, if more follow: decoding many at once costs less for each, and takes as long as a broker
#: needs for the pulls that are in flight meanwhile.
PIECE: Final = 8192
PIECE_BYTES: Final = 6 * 1024 * 1024
#: Messages that the first pull requests, to learn how many a broker returns.
MOST_MESSAGES: Final = 1024
#: Messages that a broker scans for one pull with a filter (DefaultMessageStore.getMessage: 16,000 bytes of 20 each).
SCANNED: Final = 800
#: Seconds until a broker's limit is learned again: messages that were on disk are in memory by then.
_STEP_AGE: Final = 5.0
#: Seconds that one pull may take before it is sent again.
_PULL_TIMEOUT: Final = 15.0
#: Seconds for which a replica that failed is not used.
_REPLICA_AGAIN: Final = 30.0
#: Seconds between checks whether time is up.
_TICK: Final = 1.0
#: The least bytes of a stored message besides its body.
_LEAST_OVERHEAD: Final = 91
#: Stands for a replica id that is in the route and that the master does not know.
_STAND_IN: Final = -1


class Fetch:
    """Fetches messages from ``offset`` on, of one pull after another: `begin`, then `next_piece` until there are enough.

    Requests are for ranges that do not overlap, and an answer is never longer than its request, so answers in order are
    messages in order. With a filter an answer may reach into the next range; what it says of that range is not used.
    """

    def __init__(
        self,
        client: Client,
        queue: MessageQueue,
        group: str,
        known: Known,
        patience: float,
        offset: int,
        matching: Filter | None = None,
    ) -> None:
        self._client = client
        self._queue = queue
        self._group = group
        self._known = known
        self._patience = patience
        self._matching = matching
        #: Where the pull began, and its limits.
        self._offset = offset
        self._limits = PullLimits(0, 0, 0, 0)
        #: No offset from here on is requested. It is lowered if the queue turns out to end, or to have lost messages.
        self._stop = offset
        #: Whether it was.
        self._ended = False
        #: The most messages that any request was for.
        self._largest = 0
        #: The next offset to request, and (time, begin, count) of ranges below it to request again at that time.
        self._next = offset
        self._again: list[tuple[float, int, int]] = []
        #: Ranges to request, in one write, and the lane: which replica was wanted, and which it leads to.
        self._asks: list[tuple[int, int]] = []
        self._lane: Lane | None = None
        self._wanted: int | None = MASTER_ID
        self._replica = MASTER_ID
        self._template: PullTemplate | None = None
        #: Answers by the beginning of their range: (end, body). All below ``_done`` are in pieces or in ``_parts``.
        self._answers: dict[int, tuple[int, memoryview]] = {}
        self._done = offset
        self._parts: list[memoryview] = []
        self._parts_size = 0
        #: The offset after the last piece. Messages and bytes that have come since.
        self.position = offset
        self._count = self._size = 0
        #: Messages and bytes that this pull has handed over in pieces and the caller still holds, and when messages came last.
        self._held_count = self._held_size = 0
        self._heard = time.monotonic()
        self._answer = known.answer
        self._loss: DataLossError | None = None
        self._failures = 0
        self._last: OrderedMQError | None = None

    def begin(self, limits: PullLimits, until: int) -> None:
        """Begin a pull at `position`. Messages from ``until`` on are not requested."""
        self._offset, self._limits = self.position, limits
        self._held_count = self._held_size = 0
        self._heard = time.monotonic()
        if not self._ended:
            self._stop = max(until, self._next)

    def continues(self, offset: int, max_messages: int) -> bool:
        """Whether a pull of ``max_messages`` from ``offset`` on may continue with this object."""
        # Each answer must fit into a pull.
        return offset == self.position and not self._ended and max_messages >= min(self._largest, self._next - offset)

    def next_piece(self, most: int) -> Answers | None:
        """Return the next answers, of at most ``most`` messages; None if there are none that fit.

        There are none at the queue's end, and where an answer has more messages, which is the first of the next pull. Raises
        TopicError, RocketMQError; DataLossError if the pull has no piece yet.
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
        # The broker works on what follows while this piece is decoded.
        self._send_more()
        self._write()
        size = self._parts_size
        self._held_count += self._done - self.position
        self._held_size += size
        made = Answers(self._parts, self._done)
        self._count -= self._done - self.position
        self._size -= size
        self._parts, self._parts_size, self.position = [], 0, self._done
        return made

    def _take_in_order(self, least: int, most: int) -> bool:
        """Take answers that follow for a piece of ``least`` messages, and at most ``most``; return whether it needs more."""
        answers, parts, done, begin, size = self._answers, self._parts, self._done, self.position, self._parts_size
        fits = True
        while done - begin < least and size < PIECE_BYTES and (found := answers.get(done)) is not None:
            end, body = found
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
        """Let go of the lane. Requests in flight are given up."""
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
            due = [one for one in self._again if one[0] <= now]
            self._again = [one for one in self._again if one[0] > now and one[1] < self._stop]
            self._asks += [(begin, count) for _, begin, count in due if begin < self._stop]
            if self._again:
                return
        step, learned = self._known.step, now - self._known.learned < _STEP_AGE
        if self._matching is not None:
            step, learned = SCANNED, True
        room = self._room()
        stop = min(self._stop, self._offset + self._limits.hold_messages)
        following, end = self._next, self._known.end
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
        # Of a queue that was not pulled before, the end is not known yet.
        least = 1 if self._next == self._offset else 0
        if self._next >= self._known.end:
            return least
        answer = max(self._answer, 1)
        size, count = self._held_size + self._size, self._held_count + self._count
        bodies = size - _LEAST_OVERHEAD * count
        body = max(answer - _LEAST_OVERHEAD * self._known.step, 1)
        most = min(
            max(_ALWAYS_IN_FLIGHT, min(IN_FLIGHT, _COMING_BYTES // answer)),
            _divided(self._limits.hold_bytes - size, answer),
            _divided(self._limits.max_bytes - bodies, body),
        )
        return max(least, most - self._in_flight)

    def _write(self) -> None:
        """Send the collected requests, in one write, once the lane to the right replica has no others.

        A Proxy gets no more than it answers; the rest waits for answers.
        """
        if not self._asks:
            return
        deadline = min(Deadline.after(_PULL_TIMEOUT), self._heard + self._patience)
        lane, replica = self._lane, self._known.replica
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
        """Change to a lane to a replica; to another one if the route lacks it. Raises RocketMQUnavailableError."""
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

    # --- what comes

    def _receive(self) -> None:
        """Wait for some answers, or until a range is due again. Raises RocketMQUnavailableError TIMEOUT."""
        timeout = _TICK
        if self._again:
            timeout = max(0.0, min(min(one[0] for one in self._again) - time.monotonic(), _TICK))
        lane = self._lane
        answers: list[Answer] = []
        if lane is not None and lane.in_flight:
            answers = lane.receive(timeout)
        else:
            time.sleep(timeout)
        now = time.monotonic()
        # Not before receiving: if this process was stopped, or waited for a processor, the broker's answers have arrived meanwhile.
        if not answers and now - self._heard > self._patience:
            why = f": {self._last.message}" if self._last is not None else ""
            raise RocketMQUnavailableError(
                UnavailableCondition.TIMEOUT,
                f"queue {self._queue} returned no messages at offset {self._done} for {self._patience:g} s{why}; is its broker or the "
                "disk overloaded?",
            )
        # Nothing is to be learned from an answer with what was asked for. What follows is done for each 32 messages.
        usual = self._known.step if self._matching is None and now >= self._known.only_master else 0
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
                    known = self._known
                    known.end, known.replica, known.answer = last, suggested, size
                    self._heard, self._failures = now, 0
                else:
                    self._take(result, begin, count, now)
            elif self._replica == MASTER_ID and not isinstance(result, RocketMQUnavailableError):
                raise result
            else:
                # A replica may not know all topics and groups of its master yet: it copies them every 10 s.
                self._failed(result, begin, count, self._replica)
        if answers and lane is not None and lane.proxied:
            # The last answer may be that of a small request. After a large one, the size falls back slowly.
            self._answer = self._known.answer = max(self._known.answer, self._answer - self._answer // 16)

    def _failed(self, error: OrderedMQError, begin: int, count: int, replica: int) -> None:
        """Request a range without an answer again, later, from the master; by a new route unless the broker was only busy."""
        # A lane that ends fails all its requests with one error, which counts as one failure.
        if error is not self._last:
            self._failures += 1
            if error.sub != UnavailableCondition.BUSY:
                self._client.doubt(self._queue.topic)
        self._last = error
        self._known.replica = MASTER_ID
        if self._replica == _STAND_IN:
            # The master may be back: the next request looks for it.
            self._wanted = None
        if replica != MASTER_ID:
            # A replica that may not be read from (slaveReadEnable) answers that it is busy, and its master keeps suggesting it.
            self._known.only_master = time.monotonic() + _REPLICA_AGAIN
        self._ask_again(begin, count, RETRY.delay(self._failures, random.random()))

    def _take(self, result: PullResult, begin: int, count: int, now: float) -> None:
        self._known.end = result.max_offset
        none_match = self._matching is not None and result.filtered and result.next_begin_offset > begin
        if result.status is PullStatus.FOUND or none_match:
            self._found(result, begin, count, now)
        elif self._replica == _STAND_IN:
            why = f"its master is away, and a replica has no message at offset {begin} of queue {self._queue}"
            self._failed(RocketMQUnavailableError(UnavailableCondition.NO_BROKER, why), begin, count, MASTER_ID)
            return
        elif self._replica != MASTER_ID:
            # A replica does not correct offsets, and may lag behind (PullMessageProcessor, offsetCheckInSlave).
            self._known.replica = MASTER_ID
            self._ask_again(begin, count, 0.0)
            return
        else:
            self._not_found(result, begin, count)
        if now >= self._known.only_master:
            self._known.replica = result.suggested_broker_id

    def _found(self, result: PullResult, begin: int, count: int, now: float) -> None:
        if self._matching is not None and begin < result.min_offset:
            self._end_at(begin, aged_out(self._queue, begin, result.min_offset))
            return
        # next_begin_offset is beyond the range if messages in between were deleted; decoding shows which ones are missing.
        end = min(result.next_begin_offset, begin + count)
        if end <= begin:
            why = f"queue {self._queue}: a pull at offset {begin} found messages and says to continue at {end}"
            raise ProtocolError(ProtocolCondition.PROTOCOL, why)
        self._heard = now
        self._failures = 0
        size = self._known.answer = len(result.body)
        self._answer = max(self._answer, size)
        given, step = end - begin, self._known.step
        self._count += given
        self._size += size
        self._answers[begin] = (end, memoryview(result.body))
        short = given < count
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
            self._stop, self._loss, self._ended = begin, loss, True


def _divided(number: int, by: int) -> int:
    """Return the quotient, rounded up."""
    return -(-number // by)
