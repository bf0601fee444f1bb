"""Shared by the engines of all listeners: messages, actions, outcomes, and the lifecycle of a range of a queue. Pure.

A range is a fixed span of a queue's offsets that one task processes. The task drives an engine in a loop: `Engine.next` returns an action,
the task carries it out and reports the result, until `next` returns `Done`. The engine decides which messages go to the listener next and
what the listener's answer means for them. There are three: `queue_engine`, `key_engine` and `concurrent_engine`. This module has what
they have in common: calls in progress, the lock, writes to the parking lot and to the dead letters, and the end of the range.

- The lock is checked before the first call, before any retry if the last check was more than a second ago, and at least every 30 s.
  That holds while calls are in progress as well, however long they take. Once the engine knows that the lock is lost, no new call
  starts, and the task fails when the calls in progress have returned; the caller may cut them off before.
- If the broker rejects a write, the write is repeated after a pause. The listener is not called again for that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Final, Literal, NamedTuple

from orderedmq.errors import LockError, lost_by_listener
from orderedmq.listening.listener import Answer, suspend_seconds
from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import HOLDER_TRUST

#: Messages held above which no more are asked for (Java: ``pullThresholdForQueue``).
PULL_THRESHOLD: Final = 1000
#: Messages that are parked with one write, unless there is nothing else to do.
PARK_TOGETHER: Final = 256
#: Seconds since the last check of the lock after which nothing is tried again without another check.
RETRY_TRUST: Final = 1.0
#: The capacity of a parking lot that is not there.
NO_BOUND: Final = 2**62
NOTHING: Final[Mapping[object, Sequence[int]]] = {}

#: COMMIT: accepted by the answer that committed. PARKED: appended to the parking lot. REPEATED: it failed in a repeat of a micro-batch
#: after the group's offset had passed it. DROPPED: an operator dropped it. SENT_BACK: its broker has it in the retry topic.
OutcomeStatus = Literal["SUCCESS", "COMMIT", "DEAD_LETTER", "PARKED", "REPEATED", "DROPPED", "SENT_BACK"]


class Message:
    """A message as it is passed to a listener. The DataFrame's columns are its attributes: ``message.body``, ``message.sharding_key``, …

    ``reconsume_times`` is the number of retries so far, as in RocketMQ's MessageExt: 0 on the first call. A column that the DataFrame does
    not have raises AttributeError. Attributes that belong to the engine begin with an underscore, like a named tuple's ``_fields``, so that
    they do not hide a column.
    """

    # Without a dict, so that a listener cannot change what a retry or a dead letter of the message would have.
    __slots__ = ("_again", "_attempts", "_due", "_error", "_held", "_key", "_level", "_number", "_offset", "_rows")

    def __init__(self, offset: int, key: str | None, rows: Any = None, number: int = 0) -> None:
        """``offset``: in the queue, also if the message was parked. ``key``: None for a message that is a key of its own.

        ``rows``: what has its columns (`Rows` of ordered_source). ``number``: which message of the range it is, from 0 on; of a message
        from the parking lot, which of the rows.
        """
        self._offset = offset
        self._key = key
        self._rows = rows
        self._number = number
        #: Failed calls in all.
        self._attempts = 0
        #: Of the last failed call.
        self._error: str | None = None
        #: Of a parked head: whether its time has come. A held key's never does.
        self._due = True
        self._held = False
        #: It failed and is parked for that: its time until it is due begins now. Other messages keep theirs, or wait behind it.
        self._again = False
        #: The delay level that its time until it is due has then (`parking.DELAY_LEVELS`); 0: by how often it was parked.
        self._level = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        rows = self._rows
        value = rows.columns.get(name)[self._number - rows.first]
        return self._attempts or value if name == "reconsume_times" else value

    def __repr__(self) -> str:
        return f"Message({', '.join(f'{name}={getattr(self, name)!r}' for name in self._rows.columns.names)})"


@dataclass(slots=True, eq=False)
class Batch:
    """Messages that go to the listener together. ``calls`` and ``seconds`` are those of this range. ``lane``: of order per key."""

    messages: list[Message]
    lane: KeyLane | None = None
    since: float = 0.0
    in_flight: bool = False
    calls: int = 0
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class KeyLane:
    """A key with messages that are not decided."""

    key: object
    waiting: deque[Message] = field(default_factory=deque)
    batch: Batch | None = None
    #: Failures of the head in this range.
    failures: int = 0
    #: Everything that comes is parked.
    parked: bool = False
    #: Offsets of the key that are in the lot and not planned, and the least of them: from there on everything is parked.
    behind: Set[int] = frozenset()
    diverted_from: int | None = None


class Outcome(NamedTuple):
    """What became of the messages at the offsets ``begin`` to ``end`` (exclusive). A filter may have left out some of these offsets.

    Each message of a range is in exactly one outcome. ``key``: the key of a single message; None for a batch. ``attempts``: the number of
    calls of the listener, including those before the message was parked; 0 if an earlier run of this micro-batch had settled the message.
    ``seconds``: how long the calls of this range took. ``error``: why the last failed call failed. ``due``: when a parked message is due, in
    ms since 1970, if it has a time of its own; the task fills it in.
    """

    begin: int
    end: int
    key: str | None
    status: OutcomeStatus
    attempts: int
    seconds: float
    error: str | None
    due: int | None = None


def outcomes(messages: Sequence[Message], status: OutcomeStatus, seconds: float) -> list[Outcome]:
    """Return an outcome of each message of a batch. An accepted one was called once more than it failed."""
    accepted = status == "SUCCESS"
    # Outcome(...) by the shortest way: it is made for each message of a task.
    new, kind = tuple.__new__, Outcome
    return [
        new(kind, (one._offset, one._offset + 1, one._key, status, one._attempts + accepted, seconds, one._error, None))
        for one in messages
    ]


@dataclass(frozen=True, slots=True)
class Consume:
    """Call the listener with this batch; then `Engine.consumed`. Other actions may come before that."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Write these messages, each with its error, to %DLQ%<group>; then `Engine.dead_lettered`."""

    messages: Sequence[Message]


@dataclass(frozen=True, slots=True)
class Park:
    """Append these messages to the parking lot, in this order; then `Engine.was_parked`."""

    messages: Sequence[Message]


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for the outcome of a call, at most for this many seconds if they are given."""

    seconds: float | None


@dataclass(frozen=True, slots=True)
class Suspend:
    """Nothing to do for this long, and no call is under way."""

    seconds: float


@dataclass(frozen=True, slots=True)
class CheckLock:
    """Ask the broker whether the queue is still held; then `Engine.lock`."""


@dataclass(frozen=True, slots=True)
class Pull:
    """More messages are needed: call `Engine.put` or `Engine.close`."""


@dataclass(frozen=True, slots=True)
class Done:
    """Every message of the range is decided or parked."""


Action = Consume | GiveUp | Park | Wait | Suspend | CheckLock | Pull | Done


class LotView(NamedTuple):
    """A queue's parking lot when a task starts.

    ``capacity``: the maximum number of messages in it. ``planned``: the parked messages that belong to this micro-batch. The other fields
    describe all other parked messages by their offsets in the queue. ``places``: these offsets. ``waiting``: by key, the offsets of
    messages that were parked before this range. ``attempted``: by key, the offsets of messages that an earlier run of this range parked.
    `parking.lot.lane_key` makes the keys.
    """

    capacity: int = NO_BOUND
    planned: Sequence[Message] = ()
    places: Collection[int] = ()
    waiting: Mapping[object, Sequence[int]] = NOTHING
    attempted: Mapping[object, Sequence[int]] = NOTHING


NO_LOT: Final = LotView()


class Settings(ABC):
    """The settings of a kind of listener, which say what kind it is."""

    #: The function that the user calls, as error messages name it.
    name: ClassVar[str]
    #: What a call is given, and what it should return.
    context: ClassVar[type]
    statuses: ClassVar[type[Enum]]
    #: Whether a message that fails waits in a parking lot.
    parks: ClassVar[bool]
    #: Whether a failed message is parked by itself, so that newer messages of its key do not wait for it. The source of such a listener
    #: may have a retry topic instead of a parking lot. Then the broker counts the retries, and ``most_retries`` is what it is told.
    alone: ClassVar[bool]
    #: Messages that are given to the engine at once. A batch is made of those that came: with more of them it has more of one key.
    put_together: ClassVar[int] = 4096
    max_reconsume_times: int

    @property
    def most_retries(self) -> int:
        """The number of retries that ``max_reconsume_times`` stands for."""
        return self.max_reconsume_times

    @property
    @abstractmethod
    def concurrency(self) -> int:
        """Calls that may be under way at once."""

    @abstractmethod
    def engine(self, queue: MessageQueue, now: float, lot: LotView) -> Engine:
        """Return the engine of a task's range."""


class Engine(ABC):
    """One range of a queue on its way through a listener. An object belongs to one thread.

    ``now`` is monotonic seconds. ``concurrency``: calls that may be under way at once. ``pause``: milliseconds until a write that the
    broker refused is tried again. A method that is called out of turn raises RuntimeError: the caller has a bug.
    """

    def __init__(self, queue: MessageQueue, now: float, *, concurrency: int, pause: int) -> None:
        self.queue = queue
        #: What the caller should log; each text comes once.
        self.warnings: list[str] = []
        self._concurrency, self._pause = concurrency, pause
        self._in_flight = 0
        self._to_park: list[Message] = []
        #: Messages that become dead letters, and the batch that each of them belongs to.
        self._exhausted: deque[tuple[Batch, Sequence[Message]]] = deque()
        self._due: GiveUp | Park | CheckLock | None = None
        self._end = -1
        #: Messages that are not decided, those to be parked included.
        self._held = 0
        #: No park or dead letter before this time: the broker refused one.
        self._not_before = 0.0
        self._ask, self._last_lock = True, now
        self._closed = self._lost = False

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
        """The action to take now. Raises LockError LOST if the queue's lock was lost, once no call is under way."""
        if self._lost:
            if self._in_flight:
                return Wait(None)
            raise self._not_ours()
        if self._due is not None:
            return self._due
        self._resume(now)
        if self._ask or now - self._last_lock >= HOLDER_TRUST:
            self._due = CheckLock()
            return self._due
        if now >= self._not_before:
            if self._exhausted:
                self._due = GiveUp(self._exhausted[0][1])
                return self._due
            if len(self._to_park) >= PARK_TOGETHER:
                return self._park()
        if self._in_flight < self._concurrency:
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
        if self._in_flight:
            # However long the calls take, a lost lock is noticed.
            soonest.append(self._last_lock + HOLDER_TRUST)
            return Wait(max(0.0, min(soonest) - now))
        if soonest:
            return Suspend(max(0.0, min(soonest) - now))
        # Nothing is held that could be given out: even a full engine needs more, or is done.
        if not self._closed:
            return Pull()
        return self._finish()

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
    def consumed(self, batch: Batch, answer: Answer, now: float) -> list[Outcome]:
        """Take what came of `Consume`. Return the messages decided by it."""

    @abstractmethod
    def _given_up(self, batch: Batch, messages: Sequence[Message]) -> list[Outcome]:
        """Messages of a batch are dead letters now. Return the messages decided by it."""

    def _finish(self) -> Done:
        """The range has ended. Raise an error if it may not end like this."""
        return Done()

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
        """Take the outcome of `GiveUp`. Return what is decided by it; otherwise ``error`` says why not."""
        if not isinstance(self._due, GiveUp):
            raise RuntimeError(f"queue {self.queue} has no dead letters to be written")
        self._due = None
        if not ok:
            self._refused(f"dead letters of queue {self.queue} cannot be written for now: {error}", now)
            return []
        return self._given_up(*self._exhausted.popleft())

    def was_parked(self, parked: Sequence[bool] | None, error: str | None, now: float) -> list[Outcome]:
        """Take the outcome of `Park`: for each message, whether it is in the lot now. None: ``error`` says why nothing was done.

        A message that is not was settled before: the group's offset had passed it. Return what is decided.
        """
        if not isinstance(self._due, Park):
            raise RuntimeError(f"queue {self.queue} has no messages to be parked")
        messages = self._due.messages
        self._due = None
        if parked is None:
            self._refused(f"messages of queue {self.queue} cannot be parked for now: {error}", now)
            return []
        del self._to_park[: len(messages)]
        self._held -= len(messages)
        return [
            Outcome(
                one._offset, one._offset + 1, one._key, "PARKED" if is_there else "REPEATED", one._attempts, 0.0, one._error
            )
            for one, is_there in zip(messages, parked, strict=True)
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

    # -- inside

    def _refused(self, warning: str, now: float) -> None:
        self._warn(warning)
        self._not_before = now + suspend_seconds(-1, self._pause)
        self._ask = True

    def _tried_again(self, now: float) -> None:
        """Something goes to the listener again: the lock must have been checked a moment ago."""
        self._ask |= now - self._last_lock > RETRY_TRUST

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def _not_ours(self) -> LockError:
        return lost_by_listener(self.queue)
