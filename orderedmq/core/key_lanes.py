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
- A repeat of a range honours what its first attempt parked, in the same way. Older messages of such a key were decided by the
  first attempt. They are consumed again, and where they fail again they are passed over (REPEATED): parked, they would come
  back behind newer messages of the key.
- A key is parked only if the lot has room for what the range has of it so far. Otherwise it is tried again, as with order per
  queue. Messages of keys that are parked already always get in, so a lot outgrows its bound by one range at most.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from orderedmq.core.key_order import (
    Action,
    Batch,
    CheckLock,
    Consume,
    DeadLetter,
    Done,
    KeySettings,
    Lane,
    Message,
    Outcome,
    OutcomeStatus,
    Park,
    Pull,
    Suspend,
    Wait,
)
from orderedmq.core.listener import MAX_ERROR_BYTES, ConsumeOrderlyStatus, clip, suspend_seconds
from orderedmq.core.lock import HOLDER_TRUST
from orderedmq.core.parked_rows import lane_key
from orderedmq.errors import LockError, lost_by_listener
from orderedmq.model import MessageQueue

#: Messages held above which no more are asked for (Java: ``pullThresholdForQueue``).
PULL_THRESHOLD: Final = 1000
#: Messages that are parked with one write, unless there is nothing else to do.
PARK_TOGETHER: Final = 256
NOTHING: Final[Mapping[object, Sequence[int]]] = {}
#: Seconds since the last look at the lock after which a key is not tried again without another look.
RETRY_TRUST: Final = 1.0


class KeyLanes:
    """One range of a queue on its way through a listener, with order per key. An object belongs to one thread.

    ``lot``: what is planned of the parking lot, in any order. ``waiting``: the keys of what lies there and is not planned, with
    their offsets in the queue; ``attempted``: of what an earlier attempt of this range has parked (`parked_rows.lane_key` makes
    the keys). ``now`` is monotonic seconds. A method that is called out of turn raises RuntimeError: the caller has a bug.
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
        self.queue = queue
        self.settings = settings
        #: What the caller should log; each text comes once.
        self.warnings: list[str] = []
        self._lanes: dict[object, Lane] = {}
        #: Lanes that may be called now, and lanes to be tried again at their time.
        self._ready: deque[Lane] = deque()
        self._suspended: list[tuple[float, int, Lane]] = []
        self._entered = 0
        self._in_flight: set[int] = set()
        self._to_park: list[Message] = []
        self._exhausted: deque[Lane] = deque()
        self._due: DeadLetter | Park | CheckLock | None = None
        self._end = -1
        #: Messages that are not decided, those to be parked included.
        self._held = 0
        self._began = now
        #: No park or dead letter before this time: the broker refused one.
        self._not_before = 0.0
        self._ask, self._last_lock = True, now
        self._closed = self._lost = self._dropped = False
        self._waiting, self._attempted = waiting, attempted
        lying = sum(map(len, waiting.values())) + sum(map(len, attempted.values()))
        self._room = settings.parking_lot_max_messages - lying
        seen: set[object] = set()
        for message in sorted(lot, key=lambda one: one.offset):
            lane = self._lane(lane_key(message.key, message.offset))
            if lane.key not in seen:
                seen.add(lane.key)
                lane.parked = lane.diverted_from is None and (message.held or not message.due)
            if message.offset not in lane.behind:
                self._add(lane, message)

    # -- messages come in

    @property
    def full(self) -> bool:
        """Whether prefetching should stop for now. `Pull` must be answered all the same."""
        return self._held >= PULL_THRESHOLD

    def put(self, messages: Iterable[Message]) -> None:
        """Add messages of the range in the order of their offsets, above all put before. Raises ValueError otherwise."""
        for message in messages:
            if self._closed or message.offset <= self._end:
                raise ValueError(f"message {message.offset} of queue {self.queue} came after {self._end} or its end")
            self._end = message.offset
            lane = self._lane(lane_key(message.key, message.offset))
            if message.offset not in lane.behind:
                self._add(lane, message)

    def close(self) -> None:
        """The range has no more messages."""
        self._closed = True

    # -- what to do

    def next(self, now: float) -> Action:
        """The action to take now. Raises LockError LOST if the queue was lost or dropped, once no call is under way."""
        if self._lost or self._dropped:
            if self._in_flight:
                return Wait(None)
            raise self._not_ours()
        if self._due is not None:
            return self._due
        self._resume(now)
        if self._ask or now - self._last_lock > HOLDER_TRUST:
            self._due = CheckLock()
            return self._due
        if now >= self._not_before:
            if self._exhausted:
                assert self._exhausted[0].batch is not None
                self._due = DeadLetter(self._exhausted[0].batch.messages[0])
                return self._due
            if len(self._to_park) >= PARK_TOGETHER:
                return self._park()
        free = len(self._in_flight) < self.settings.concurrency
        if free and self._ready:
            return self._consume(self._ready.popleft(), now)
        if free and not self._closed and not self.full:
            return Pull()
        if self._to_park and now >= self._not_before:
            return self._park()
        soonest = [at for at, _, _ in self._suspended[:1]]
        if self._to_park or self._exhausted:
            soonest.append(self._not_before)
        pause = max(0.0, min(soonest) - now) if soonest else None
        if self._in_flight:
            return Wait(pause)
        if pause is not None:
            return Suspend(pause)
        # Nothing is held that could be given out: even a full engine needs more, or is done.
        return Done() if self._closed else Pull()

    def _consume(self, lane: Lane, now: float) -> Consume:
        if lane.batch is None:
            messages = [lane.waiting.popleft()]
            while (
                lane.waiting
                and len(messages) < self.settings.consume_message_batch_max_size
                and lane.waiting[0].attempts == messages[0].attempts
                and self._may_consume(lane, lane.waiting[0])
            ):
                messages.append(lane.waiting.popleft())
            lane.batch = Batch(lane, messages)
        lane.in_flight = True
        lane.batch.since = now
        self._in_flight.add(id(lane))
        return Consume(lane.batch)

    def _park(self) -> Park:
        self._due = Park(tuple(self._to_park))
        return self._due

    # -- what came of it

    def consumed(
        self, batch: Batch, status: ConsumeOrderlyStatus | None, error: str | None, now: float, suspend_millis: int = -1
    ) -> list[Outcome]:
        """Take the listener's answer to `Consume`, its error, and its suspension in ms (-1: as in the settings).

        Return the messages decided by it.
        """
        lane = batch.lane
        if id(lane) not in self._in_flight or lane.batch is not batch:
            raise RuntimeError(f"queue {self.queue} has no such batch at the listener")
        self._in_flight.discard(id(lane))
        lane.in_flight = False
        batch.calls += 1
        batch.seconds += now - batch.since
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
        if lane.attempted and (exhausted or self._tried_enough(lane, now)):
            return self._decide(lane, len(batch.messages), "REPEATED")
        if exhausted:
            if self.settings.on_exhausted == "dead_letter":
                self._exhausted.append(lane)
                return []
            head.held = True
            if self._leave(lane):
                return []
        elif self._tried_enough(lane, now) and self._leave(lane):
            return []
        self._suspend(lane, now + pause)
        return []

    def dead_lettered(self, ok: bool, error: str | None, now: float) -> list[Outcome]:
        """Take the outcome of `DeadLetter`. Return what is decided by it; otherwise ``error`` says why not."""
        if not isinstance(self._due, DeadLetter):
            raise RuntimeError(f"queue {self.queue} has no dead letter to be written")
        self._due = None
        lane = self._exhausted[0]
        assert lane.batch is not None
        if not ok:
            head = lane.batch.messages[0]
            head.error = clip(f"dead letter not written ({error or 'unknown'}) after: {head.error}", MAX_ERROR_BYTES)
            self._refused(now)
            return []
        self._exhausted.popleft()
        return self._decide(lane, 1, "DEAD_LETTER")

    def was_parked(self, parked: Sequence[bool] | None, error: str | None, now: float) -> list[Outcome]:
        """Take the outcome of `Park`: for each message, whether it lies in the lot now. None: ``error`` says why nothing was done.

        A message that does not was settled before: the group's offset had passed it. Return what is decided.
        """
        if not isinstance(self._due, Park):
            raise RuntimeError(f"queue {self.queue} has no messages to be parked")
        messages = self._due.messages
        self._due = None
        if parked is None:
            self._warn(f"messages of queue {self.queue} cannot be parked for now: {error}")
            self._refused(now)
            return []
        del self._to_park[: len(messages)]
        self._held -= len(messages)
        return [
            Outcome(one.offset, one.key, "PARKED" if lies else "REPEATED", one.attempts, 0, 0.0, one.error)
            for one, lies in zip(messages, parked, strict=True)
        ]

    def lock(self, held: bool, now: float) -> None:
        """Take whether the queue is still held: the answer to `CheckLock`, or news that came unasked."""
        if not held:
            self._lost = True
            return
        self._last_lock = now
        if isinstance(self._due, CheckLock):
            self._due = None
            self._ask = False

    def drop(self) -> None:
        """The queue was given up: no new call starts."""
        self._dropped = True

    # -- inside

    def _lane(self, key: object) -> Lane:
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(key, attempted=key in self._attempted)
            lane.behind.update(self._waiting.get(key, ()), self._attempted.get(key, ()))
            lane.diverted_from = min(lane.behind, default=None)
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
        if lane.diverted_from is not None:
            return False
        leaving = [*(lane.batch.messages if lane.batch is not None else ()), *lane.waiting]
        if len(leaving) > self._room:
            self._warn(
                f"the parking lot of queue {self.queue} is full ({self.settings.parking_lot_max_messages} messages): keys that fail are "
                "tried again instead, and hold up the micro-batch; raise parking_lot_max_messages, or mend what fails"
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
        done, left = batch.messages[:count], batch.messages[count:]
        lane.batch = None
        lane.failures = 0
        lane.waiting.extendleft(reversed(left))
        self._held -= count
        if lane.waiting:
            self._ready.append(lane)
        elif not lane.behind:
            self._lanes.pop(lane.key, None)
        return [Outcome(one.offset, one.key, status, one.attempts, batch.calls, batch.seconds, one.error) for one in done]

    def _suspend(self, lane: Lane, at: float) -> None:
        lane.resume = at
        self._entered += 1
        heapq.heappush(self._suspended, (at, self._entered, lane))

    def _resume(self, now: float) -> None:
        """Make lanes ready whose suspension is over; after ``max_batch_seconds``, park those that wait."""
        if now - self._began >= self.settings.max_batch_seconds:
            waiting, self._suspended = self._suspended, []
            for entry in waiting:
                if not self._leave(entry[2]):
                    # It cannot be parked: it is tried again.
                    heapq.heappush(self._suspended, entry)
        while self._suspended and self._suspended[0][0] <= now:
            self._ready.append(heapq.heappop(self._suspended)[2])
            self._ask |= now - self._last_lock > RETRY_TRUST

    def _refused(self, now: float) -> None:
        self._not_before = now + suspend_seconds(-1, self.settings.suspend_current_queue_time_millis)
        self._ask = True

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def _not_ours(self) -> LockError:
        return lost_by_listener(self.queue, "dropped" if self._dropped else "lost")
