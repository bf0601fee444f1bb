"""The engine of a listener with order per key: a closed range of one queue, several keys at once. Pure: no clock, no effects.

A lane is a sharding key. `KeyLanes.next` returns an action; `Consume` may be returned again before the former one has its
outcome, for another key. The rules:

- Messages of one key reach the listener one batch at a time, in offset order. A batch has messages of one key with the same
  number of attempts. A message without a key is a key of its own.
- A batch that fails is tried again after its suspension, while other keys go on. After ``in_batch_attempts`` failures of its
  head, or once the range has been at work for ``max_batch_seconds``, what the range has of that key is parked: appended to the
  queue's parking lot, in order. Later messages of the key are parked behind it without a call.
- A head that fails more than ``max_reconsume_times`` times in all becomes a dead letter, and its key goes on; with
  ``on_exhausted="hold"`` the key is parked until somebody releases it.
- A range begins with what is planned of the parking lot. A key whose head is due goes to the listener, before newer messages
  of the key. A key whose head is not due is parked again as it is, and newer messages behind it.
- Keys of messages that lie in the lot and are not planned wait there: from the first such offset of a key on, messages of the
  range are parked behind, unless they lie there already.
- A repeat of a range honours what its first attempt parked, in the same way, and so does a range that a seek brought back to
  messages older than parked ones. Older messages of such a key are consumed, and where they fail they are parked or put aside as
  ever: a lot is consumed in the queue's order, whatever order it has.
- A key is parked only if the lot has room for what the range has of it so far. Otherwise it is tried again, as with order per
  queue. Messages of keys that are parked already always get in, so a lot outgrows its bound by one range at most.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from orderedmq.core.key_order import Batch, KeySettings, Lane, Message, Outcome, OutcomeStatus, outcomes
from orderedmq.core.listener import MAX_ERROR_BYTES, ConsumeOrderlyStatus, clip, suspend_seconds
from orderedmq.core.parked_rows import lane_key
from orderedmq.core.parking_engine import RETRY_TRUST, Limits, ParkingEngine
from orderedmq.model import MessageQueue

NOTHING: Final[Mapping[object, Sequence[int]]] = {}


class KeyLanes(ParkingEngine):
    """One range of a queue on its way through a listener, with order per key.

    ``lot``: what is planned of the parking lot, in any order. ``waiting``: the keys of what lies there and is not planned, with
    their offsets in the queue; ``attempted``: of what an earlier attempt of this range has parked (`parked_rows.lane_key` makes
    the keys).
    """

    def __init__(
        self,
        queue: MessageQueue,
        settings: KeySettings,
        now: float,
        lot: Sequence[Message] = (),
        waiting: Mapping[object, Sequence[int]] = NOTHING,
        attempted: Mapping[object, Sequence[int]] = NOTHING,
    ) -> None:
        limits = Limits(settings.concurrency, settings.suspend_current_queue_time_millis, settings.parking_lot_max_messages)
        super().__init__(queue, limits, now, sum(map(len, waiting.values())) + sum(map(len, attempted.values())))
        self.settings = settings
        self._lanes: dict[object, Lane] = {}
        #: Lanes that may be called now, and lanes to be tried again at their time.
        self._ready: deque[Lane] = deque()
        self._suspended: list[tuple[float, int, Lane]] = []
        self._entered = 0
        self._began = now
        self._waiting, self._attempted = waiting, attempted
        seen: set[object] = set()
        for message in sorted(lot, key=lambda one: one.offset):
            lane = self._lane(lane_key(message.key, message.offset))
            if lane.key not in seen:
                seen.add(lane.key)
                lane.parked = lane.diverted_from is None and (message.held or not message.due)
            if message.offset not in lane.behind:
                self._add(lane, message)

    def put(self, messages: Iterable[Message]) -> None:
        lanes, ready, end = self._lanes, self._ready, self._end
        for message in messages:
            offset = message.offset
            if self._closed or offset <= end:
                raise self._out_of_order(offset)
            self._end = end = offset
            # The key is `lane_key`'s.
            own = message.key
            key: object = offset if own is None else own
            lane = lanes.get(key)
            if lane is None:
                lane = self._lane(key)
            if lane.parked or lane.behind:
                if offset not in lane.behind:
                    self._add(lane, message)
                continue
            # `_add`, for the many messages of keys that nothing holds up.
            self._held += 1
            if not lane.waiting and lane.batch is None:
                ready.append(lane)
            lane.waiting.append(message)

    def _take(self) -> Batch | None:
        if not self._ready:
            return None
        lane = self._ready.popleft()
        if lane.batch is None:
            waiting, end = lane.waiting, lane.diverted_from
            head = waiting.popleft()
            messages, attempts = [head], head.attempts
            more = self.settings.consume_message_batch_max_size - 1
            while more and waiting:
                message = waiting[0]
                if message.attempts != attempts or (end is not None and message.offset >= end):
                    break
                messages.append(waiting.popleft())
                more -= 1
            lane.batch = Batch(lane, messages)
        return lane.batch

    def consumed(
        self, batch: Batch, status: ConsumeOrderlyStatus | None, error: str | None, now: float, suspend_millis: int = -1
    ) -> list[Outcome]:
        """Take the listener's answer to `Consume`, its error, and its suspension in ms (-1: as in the settings).

        Return the messages decided by it.
        """
        lane = batch.lane
        self._returned(batch, now)
        if status is ConsumeOrderlyStatus.COMMIT or status is ConsumeOrderlyStatus.ROLLBACK:
            error = f'{status.name} belongs to order="queue": with order="key" every batch commits itself'
            status = None
        if status is ConsumeOrderlyStatus.SUCCESS:
            return self._decide(lane, len(batch.messages), "SUCCESS")
        text = clip(error or "the listener answered SUSPEND_CURRENT_QUEUE_A_MOMENT", MAX_ERROR_BYTES)
        for message in batch.messages:
            message.attempts += 1
            message.error = text
        lane.failures += 1
        pause = suspend_seconds(suspend_millis, self.settings.suspend_current_queue_time_millis)
        head = batch.messages[0]
        exhausted = 0 <= self.settings.max_reconsume_times < head.attempts
        if exhausted:
            if self.settings.on_exhausted == "dead_letter":
                self._exhausted.append(batch)
                return []
            head.held = True
            if self._leave(lane):
                return []
        elif self._tried_enough(lane, now) and self._leave(lane):
            return []
        self._suspend(lane, now + pause)
        return []

    # -- inside

    def _lane(self, key: object) -> Lane:
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(key)
            if key in self._waiting or key in self._attempted:
                lane.behind = {*self._waiting.get(key, ()), *self._attempted.get(key, ())}
                lane.diverted_from = min(lane.behind)
        return lane

    @staticmethod
    def _may_consume(lane: Lane, message: Message) -> bool:
        return lane.diverted_from is None or message.offset < lane.diverted_from

    def _add(self, lane: Lane, message: Message) -> None:
        self._held += 1
        if lane.parked or not self._may_consume(lane, message):
            self._to_park.append(message)
            self._room -= 1
            return
        lane.waiting.append(message)
        if len(lane.waiting) == 1 and lane.batch is None:
            self._ready.append(lane)

    def _tried_enough(self, lane: Lane, now: float) -> bool:
        late = now - self._began >= self.settings.max_batch_seconds
        return late or lane.failures >= self.settings.in_batch_attempts

    def _leave(self, lane: Lane) -> bool:
        """Park what the range has of a key so far. Return False if the key has to be tried again instead."""
        leaving = [*(lane.batch.messages if lane.batch is not None else ()), *lane.waiting]
        if len(leaving) > self._room:
            self._warn(
                f"the parking lot of queue {self.queue} is full ({self.settings.parking_lot_max_messages} messages): keys that fail are "
                "tried again instead, and hold up the micro-batch; raise the source's option parkingLotMaxMessages, or mend what fails"
            )
            return False
        self._room -= len(leaving)
        leaving[0].again = True
        self._to_park += leaving
        lane.batch = None
        lane.waiting.clear()
        lane.parked = True
        return True

    def _decide(self, lane: Lane, count: int, status: OutcomeStatus) -> list[Outcome]:
        """The first ``count`` messages of the lane's batch are decided; the lane goes on with what is left of it."""
        batch = lane.batch
        assert batch is not None
        done, messages = batch.messages, lane.waiting
        if count < len(done):
            messages.extendleft(reversed(done[count:]))
            done = done[:count]
        lane.batch = None
        lane.failures = 0
        self._held -= count
        if messages:
            self._ready.append(lane)
        elif not lane.behind:
            self._lanes.pop(lane.key, None)
        return outcomes(done, status, batch)

    def _suspend(self, lane: Lane, at: float) -> None:
        lane.resume = at
        self._entered += 1
        heapq.heappush(self._suspended, (at, self._entered, lane))

    def _resume(self, now: float) -> None:
        """Make lanes ready whose suspension is over; after ``max_batch_seconds``, park those that wait."""
        if not self._suspended:
            return
        if now - self._began >= self.settings.max_batch_seconds:
            waiting, self._suspended = self._suspended, []
            for entry in waiting:
                if not self._leave(entry[2]):
                    # It cannot be parked: it is tried again.
                    heapq.heappush(self._suspended, entry)
        while self._suspended and self._suspended[0][0] <= now:
            self._ready.append(heapq.heappop(self._suspended)[2])
            self._ask |= now - self._last_lock > RETRY_TRUST

    def _next_resume(self) -> float | None:
        return self._suspended[0][0] if self._suspended else None

    def _put_aside(self, batch: Batch) -> list[Outcome]:
        return self._decide(batch.lane, 1, "DEAD_LETTER")
