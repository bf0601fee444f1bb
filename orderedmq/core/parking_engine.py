"""What the engines share that park messages: a closed range of a queue, calls in flight, its lock, the lot and dead letters. Pure.

An engine returns actions (`key_order`) and takes their outcomes. It says which messages go to the listener next, and what a
listener's answer does to them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from orderedmq.core.key_order import (
    Action,
    Batch,
    CheckLock,
    Consume,
    DeadLetter,
    Done,
    Message,
    Outcome,
    Park,
    Pull,
    Suspend,
    Wait,
)
from orderedmq.core.listener import MAX_ERROR_BYTES, clip, suspend_seconds
from orderedmq.core.lock import HOLDER_TRUST
from orderedmq.errors import LockError, lost_by_listener
from orderedmq.model import MessageQueue

#: Messages held above which no more are asked for (Java: ``pullThresholdForQueue``).
PULL_THRESHOLD: Final = 1000
#: Messages that are parked with one write, unless there is nothing else to do.
PARK_TOGETHER: Final = 256
#: Seconds since the last look at the lock after which nothing is tried again without another look.
RETRY_TRUST: Final = 1.0


class Limits(NamedTuple):
    """The settings that every engine has."""

    concurrency: int
    #: Milliseconds until a write that the broker refused is tried again.
    pause: int
    parking_lot_max_messages: int


class ParkingEngine(ABC):
    """One range of a queue on its way through a listener. An object belongs to one thread.

    ``now`` is monotonic seconds. A method that is called out of turn raises RuntimeError: the caller has a bug.
    """

    def __init__(self, queue: MessageQueue, limits: Limits, now: float, lying: int) -> None:
        self.queue = queue
        #: What the caller should log; each text comes once.
        self.warnings: list[str] = []
        self._limits = limits
        self._in_flight = 0
        self._to_park: list[Message] = []
        #: The head of each of these batches becomes a dead letter.
        self._exhausted: deque[Batch] = deque()
        self._due: DeadLetter | Park | CheckLock | None = None
        self._end = -1
        #: Messages that are not decided, those to be parked included.
        self._held = 0
        #: No park or dead letter before this time: the broker refused one.
        self._not_before = 0.0
        self._ask, self._last_lock = True, now
        self._closed = self._lost = self._dropped = False
        #: Messages that the lot still has room for; ``lying`` of those that lie there are not planned.
        self._room = limits.parking_lot_max_messages - lying

    # -- messages come in

    @property
    def full(self) -> bool:
        """Whether prefetching should stop for now. `Pull` must be answered all the same."""
        return self._held >= PULL_THRESHOLD

    @abstractmethod
    def put(self, messages: Sequence[Message]) -> None:
        """Add messages of the range in the order of their offsets, above all put before. Raises ValueError otherwise."""

    def close(self) -> None:
        """The range has no more messages."""
        self._closed = True

    def _out_of_order(self, offset: int) -> ValueError:
        return ValueError(f"message {offset} of queue {self.queue} came after {self._end} or its end")

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
                self._due = DeadLetter(self._exhausted[0].messages[0])
                return self._due
            if len(self._to_park) >= PARK_TOGETHER:
                return self._park()
        if self._in_flight < self._limits.concurrency:
            batch = self._take()
            if batch is not None:
                self._in_flight += 1
                batch.in_flight = True
                batch.since = now
                return Consume(batch)
            if not self._closed and not self.full:
                return Pull()
        return self._idle(now)

    def _idle(self, now: float) -> Action:
        """The action if nothing can be given to the listener now."""
        if self._to_park and now >= self._not_before:
            return self._park()
        resume = self._next_resume()
        soonest = [] if resume is None else [resume]
        if self._to_park or self._exhausted:
            soonest.append(self._not_before)
        pause = max(0.0, min(soonest) - now) if soonest else None
        if self._in_flight:
            return Wait(pause)
        if pause is not None:
            return Suspend(pause)
        # Nothing is held that could be given out: even a full engine needs more, or is done.
        return Done() if self._closed else Pull()

    def _park(self) -> Park:
        self._due = Park(tuple(self._to_park))
        return self._due

    # -- what an engine decides

    @abstractmethod
    def _take(self) -> Batch | None:
        """The batch to be called next, if there is one."""

    @abstractmethod
    def _resume(self, now: float) -> None:
        """Make ready what has waited long enough."""

    @abstractmethod
    def _next_resume(self) -> float | None:
        """When something will have waited long enough."""

    @abstractmethod
    def _put_aside(self, batch: Batch) -> list[Outcome]:
        """The batch's head is a dead letter now."""

    # -- what came of it

    def _returned(self, batch: Batch, now: float) -> None:
        """The listener answered."""
        if not batch.in_flight:
            raise RuntimeError(f"queue {self.queue} has no such batch at the listener")
        batch.in_flight = False
        self._in_flight -= 1
        batch.calls += 1
        batch.seconds += now - batch.since

    def dead_lettered(self, ok: bool, error: str | None, now: float) -> list[Outcome]:
        """Take the outcome of `DeadLetter`. Return what is decided by it; otherwise ``error`` says why not."""
        if not isinstance(self._due, DeadLetter):
            raise RuntimeError(f"queue {self.queue} has no dead letter to be written")
        self._due = None
        if not ok:
            head = self._exhausted[0].messages[0]
            head.error = clip(f"dead letter not written ({error or 'unknown'}) after: {head.error}", MAX_ERROR_BYTES)
            self._refused(now)
            return []
        return self._put_aside(self._exhausted.popleft())

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

    def _refused(self, now: float) -> None:
        self._not_before = now + suspend_seconds(-1, self._limits.pause)
        self._ask = True

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def _not_ours(self) -> LockError:
        return lost_by_listener(self.queue, "dropped" if self._dropped else "lost")
