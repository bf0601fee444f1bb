"""The engine of a listener with order per key: several keys of a queue at the same time, each in order. Pure: no clock, no effects.

A lane is a sharding key with undecided messages, and its head is the first of them. The engine may return `Consume` for a key while a
call for another key is in progress. The rules:

- Messages of one key reach the listener one batch at a time, in offset order. A batch has messages of one key that have not failed yet.
  Each message without a key counts as a separate key.
- A batch of several messages that fails is divided after its suspension: a message that has failed before goes to the listener alone.
- A head that fails is tried again after its suspension, while other keys continue. After ``in_batch_attempts`` failures, or after the
  range has run for ``max_batch_seconds``, the key is parked: the engine's messages of the key are appended to the queue's parking lot in
  order. Later messages of the key are parked after them without a call.
- A head that fails more than ``max_reconsume_times`` times in total becomes a dead letter, and its key continues. With
  ``on_exhausted="hold"`` the key is parked instead until an operator releases it.
- A range begins with the planned messages, which the micro-batch reads from the parking lot. Those that an operator has ended become dead
  letters first. A key whose head is due goes to the listener, before newer messages of the key. A key whose head is not due is parked
  again unchanged, with newer messages after it.
- A key may have messages in the lot that are not planned. From the lowest offset of these messages on, the key's messages in the range
  are also parked, unless they are already in the lot.
- The same rule applies if an earlier attempt of this range parked messages of the key, or if a seek moved the range back before parked
  messages. The key's messages below that offset are consumed. If they fail, they are parked or become dead letters as usual, because a
  lot is consumed in the queue's order, whatever the order in which it stores messages.
- A key is parked only if the lot has room for all of the engine's messages of the key. Otherwise the key is tried again, as with order
  per queue. Messages of keys that are already parked are always added, so a lot exceeds its limit by one range at most.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError
from orderedmq.listening.engine import (
    Batch,
    Engine,
    KeyLane,
    LotView,
    Message,
    Outcome,
    OutcomeStatus,
    Settings,
    in_company,
    not_accepted,
    outcomes,
)
from orderedmq.listening.listener import (
    ALL,
    Answer,
    ConsumeOrderlyContext,
    ConsumeOrderlyStatus,
    check_bounds,
    suspend_seconds,
)
from orderedmq.model import MessageQueue
from orderedmq.parking import lane_key
from orderedmq.text import MAX_ERROR_BYTES, clip

OnExhausted = Literal["dead_letter", "hold"]


@dataclass(frozen=True)
class OrderPerKey(Settings):
    """Settings of ``consume_orderly`` with which the order is kept per sharding key. Each message without a key counts as a separate key.

    The listener processes up to ``concurrency`` batches of a queue (at most 1024) at the same time, in threads or, if it is async, in an
    event loop. A batch has up to ``consume_message_batch_max_size`` messages of one key; if it fails, each of them is passed again alone.
    A key that fails is tried again after ``suspend_current_queue_time_millis`` (limited to 10 to 30,000 ms), while other keys continue.
    After ``in_batch_attempts`` failures of its first message, or when the task has processed the queue for ``max_batch_seconds``, the
    task's messages of this key are put into the group's parking lot, with later messages of the key after them. They come back by
    themselves, before newer messages of the key, after 10 s, 30 s, 1 min … 2 h. A message that failed more than ``max_reconsume_times``
    times in total (-1: no limit), the last time alone, becomes a dead letter, and its key continues. With ``on_exhausted="hold"``, the key
    stays parked instead until an operator releases it. Raises OptionError INVALID.
    """

    consume_message_batch_max_size: int = 1
    suspend_current_queue_time_millis: int = 1000
    max_reconsume_times: int = 16
    concurrency: int = 1
    in_batch_attempts: int = 3
    max_batch_seconds: float = 30.0
    on_exhausted: OnExhausted = "dead_letter"

    name: ClassVar[str] = "consume_orderly(..., OrderPerKey())"
    context: ClassVar[type] = ConsumeOrderlyContext
    statuses: ClassVar[type[ConsumeOrderlyStatus]] = ConsumeOrderlyStatus
    parks: ClassVar[bool] = True
    alone: ClassVar[bool] = False

    def __post_init__(self) -> None:
        most = 2**31 - 1
        bounds = {
            "consume_message_batch_max_size": (1, 1024),
            "suspend_current_queue_time_millis": (0, most),
            "max_reconsume_times": (-1, most),
            "concurrency": (1, 1024),
            "in_batch_attempts": (1, most),
        }
        check_bounds(self, bounds)
        seconds: object = self.max_batch_seconds
        if type(seconds) not in (int, float) or not self.max_batch_seconds > 0:
            raise OptionError(OptionCondition.INVALID, f"max_batch_seconds is {seconds!r}, but must be above 0")
        if self.on_exhausted not in ("dead_letter", "hold"):
            raise OptionError(
                OptionCondition.INVALID, f"on_exhausted is {self.on_exhausted!r}, but must be 'dead_letter' or 'hold'"
            )

    def engine(self, queue: MessageQueue, now: float, lot: LotView, begin: int) -> KeyEngine:
        return KeyEngine(queue, self, now, lot, begin)


class KeyEngine(Engine):
    """Passes one range of a queue to a listener, with order per key. The planned messages of the lot may be in any order."""

    def __init__(self, queue: MessageQueue, settings: OrderPerKey, now: float, lot: LotView, begin: int) -> None:
        super().__init__(queue, now, begin, concurrency=settings.concurrency, pause=settings.suspend_current_queue_time_millis)
        self.settings = settings
        self._capacity = lot.capacity
        #: Free places in the lot. Messages in it that do not belong to this micro-batch also take up places.
        self._room = lot.capacity - sum(map(len, lot.parked_before.values())) - sum(map(len, lot.parked_in_range.values()))
        self._lanes: dict[object, KeyLane] = {}
        #: Lanes whose messages may go to the listener now, and suspended lanes with the time at which they are tried again.
        self._ready: deque[KeyLane] = deque()
        self._suspended: list[tuple[float, int, KeyLane]] = []
        self._entered = 0
        self._began = now
        self._parked_before, self._parked_in_range = lot.parked_before, lot.parked_in_range
        headed: set[object] = set()
        for message in sorted(lot.planned, key=lambda one: one._offset):
            if message._ended:
                self._plan(message)
                continue
            lane = self._lane(lane_key(message._key, message._offset))
            if lane.key not in headed:
                headed.add(lane.key)
                lane.parked = lane.diverted_from is None and (message._held or not message._due)
            if message._offset not in lane.parked_offsets:
                self._plan(message)
                self._enter(lane, message)

    def _add(self, messages: Sequence[Message]) -> None:
        lanes, ready = self._lanes, self._ready
        for message in messages:
            # The same key as `lane_key` returns.
            own = message._key
            key: object = message._offset if own is None else own
            lane = lanes.get(key)
            if lane is None:
                lane = self._lane(key)
            if lane.parked or lane.parked_offsets:
                if message._offset in lane.parked_offsets:
                    self._range.remove_message([message._offset])
                else:
                    self._enter(lane, message)
                continue
            # The same as `_enter`, but faster for the many messages of keys without parked messages.
            if not lane.waiting and lane.batch is None:
                ready.append(lane)
            lane.waiting.append(message)

    def _take(self) -> Batch | None:
        if not self._ready:
            return None
        lane = self._ready.popleft()
        if lane.batch is None:
            waiting = lane.waiting
            head = waiting.popleft()
            messages = [head]
            more = 0 if head._attempts else self.settings.consume_message_batch_max_size - 1
            while more and waiting and not waiting[0]._attempts:
                messages.append(waiting.popleft())
                more -= 1
            lane.batch = Batch(messages, lane)
        return lane.batch

    def consumed(self, batch: Batch, answer: Answer, now: float) -> list[Outcome]:
        lane = batch.lane
        assert lane is not None
        self._returned(batch, now)
        status, error, context = answer
        if status is ConsumeOrderlyStatus.SUCCESS and context.auto_commit and context.ack_index == ALL:
            return self._decide(lane, "SUCCESS")
        by_hand = None
        if status is ConsumeOrderlyStatus.COMMIT or status is ConsumeOrderlyStatus.ROLLBACK:
            by_hand = status.name
        elif status is ConsumeOrderlyStatus.SUCCESS and not context.auto_commit:
            by_hand = "context.auto_commit=False"
        if by_hand is not None:
            status, error = None, f"{by_hand} is only for OrderPerQueue: with OrderPerKey, every accepted batch is committed"
        success = status is ConsumeOrderlyStatus.SUCCESS
        accepted = self._accepted(batch, context, success)
        if accepted == len(batch.messages):
            return self._decide(lane, "SUCCESS")
        return self._failed(lane, accepted, error or not_accepted(success), context, now)

    def _failed(
        self, lane: KeyLane, accepted: int | None, error: str, context: ConsumeOrderlyContext, now: float
    ) -> list[Outcome]:
        """Divide the lane's batch after a failure (`Engine._accepted`). Return the outcomes of its accepted messages."""
        batch = lane.batch
        assert batch is not None
        processed, rest = batch.messages[: accepted or 0], batch.messages[accepted or 0 :]
        cause_known = accepted is not None or len(rest) == 1
        text = clip(error if cause_known else in_company(error, len(rest)), MAX_ERROR_BYTES)
        for message in rest[:1] if cause_known else rest:
            message._attempts += 1
            message._error = text
        head, batch.messages = rest[0], rest[:1]
        lane.waiting.extendleft(reversed(rest[1:]))
        self._decided(processed)
        lane.failures += cause_known
        out = outcomes(processed, "SUCCESS", batch.seconds)
        millis = self._whole(context, "suspend_current_queue_time_millis", -1)
        pause = suspend_seconds(millis, self.settings.suspend_current_queue_time_millis)
        exhausted = cause_known and 0 <= self.settings.max_reconsume_times < head._attempts
        if exhausted:
            if self.settings.on_exhausted == "dead_letter":
                self._exhausted.append((batch, head))
                return out
            head._held = True
            if self._leave(lane):
                return out
        elif self._tried_enough(lane, now) and self._leave(lane):
            return out
        self._suspend(lane, now + pause)
        return out

    # -- inside

    def _lane(self, key: object) -> KeyLane:
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = KeyLane(key)
            if key in self._parked_before or key in self._parked_in_range:
                lane.parked_offsets = {*self._parked_before.get(key, ()), *self._parked_in_range.get(key, ())}
                lane.diverted_from = min(lane.parked_offsets)
        return lane

    @staticmethod
    def _may_consume(lane: KeyLane, message: Message) -> bool:
        return lane.diverted_from is None or message._offset < lane.diverted_from

    def _enter(self, lane: KeyLane, message: Message) -> None:
        if lane.parked or not self._may_consume(lane, message):
            self._to_park.append(message)
            self._room -= 1
            return
        lane.waiting.append(message)
        if len(lane.waiting) == 1 and lane.batch is None:
            self._ready.append(lane)

    def _tried_enough(self, lane: KeyLane, now: float) -> bool:
        late = now - self._began >= self.settings.max_batch_seconds
        return lane.failures >= (1 if late else self.settings.in_batch_attempts)

    def _leave(self, lane: KeyLane) -> bool:
        """Park the engine's messages of a key. Return False if the lot is full, so that the key has to be tried again."""
        leaving = [*(lane.batch.messages if lane.batch is not None else ()), *lane.waiting]
        if len(leaving) > self._room:
            self._warn(
                f"the parking lot of queue {self.queue} is full ({self._capacity} messages): keys that fail are "
                "tried again instead, and hold up the micro-batch. Raise the source's option parkingLotMaxMessages, or fix the cause"
            )
            return False
        self._room -= len(leaving)
        leaving[0]._again = True
        self._to_park += leaving
        lane.batch = None
        lane.waiting.clear()
        lane.parked = True
        return True

    def _decide(self, lane: KeyLane, status: OutcomeStatus) -> list[Outcome]:
        """Decide the messages of the lane's batch, and return their outcomes. The lane continues with the next message."""
        batch = lane.batch
        assert batch is not None
        lane.batch = None
        lane.failures = 0
        self._decided(batch.messages)
        if lane.waiting:
            self._ready.append(lane)
        elif not lane.parked_offsets:
            self._lanes.pop(lane.key, None)
        return outcomes(batch.messages, status, batch.seconds)

    def _suspend(self, lane: KeyLane, at: float) -> None:
        self._entered += 1
        heapq.heappush(self._suspended, (at, self._entered, lane))

    def _resume(self, now: float) -> None:
        """Make lanes ready when their suspension is over. After ``max_batch_seconds``, park lanes whose head has failed instead."""
        if not self._suspended:
            return
        if now - self._began >= self.settings.max_batch_seconds:
            waiting, self._suspended = self._suspended, []
            for entry in waiting:
                if not (entry[2].failures and self._leave(entry[2])):
                    # It is unknown which message of the lane fails, or the lot is full. The lane is tried again after its suspension.
                    heapq.heappush(self._suspended, entry)
        while self._suspended and self._suspended[0][0] <= now:
            self._ready.append(heapq.heappop(self._suspended)[2])
            self._tried_again(now)

    def _next_resume(self) -> float | None:
        return self._suspended[0][0] if self._suspended else None

    def _dead_lettered(self, batch: Batch, message: Message) -> list[Outcome]:
        if batch.lane is not None:
            return self._decide(batch.lane, "DEAD_LETTER")
        self._decided([message])
        return outcomes([message], "DEAD_LETTER", batch.seconds)
