"""Shared by the engines of all listeners: messages, actions, outcomes, and the lifecycle of a range of a queue. Pure.

A range is a fixed span of a queue's offsets that one task processes. The task drives an engine in a loop: `Engine.next` returns an action,
the task carries it out and reports the result, until `next` returns `Done`. The engine decides which messages go to the listener next and
what the listener's answer means for them. There are three engines: `queue_engine`, `key_engine` and `concurrent_engine`. This module has
their common parts: calls in progress, the lock, writes to the parking lot and to the dead letters, and the end of the range.

A message is *decided* when its outcome is known: for example, the listener has accepted it, or it is a dead letter.

- The lock is checked before the first call, before any retry if the last check was more than a second ago, and at least every 30 s.
  This also applies while calls are in progress, however long they take. When the engine knows that the lock is lost, no new call starts,
  and the task fails when the calls in progress have returned. The caller may cancel these calls before that.
- If the broker refuses a write for the moment, the write is repeated after a pause, for a limited time. The listener is not called again
  for that. A refusal that cannot pass ends the task at once.
- If a batch of several messages fails, the cause is one of them, and each of them goes to the listener again alone. A message is given up
  only after it has failed alone, or if the listener has said which message failed (``context.ack_index``). So no message becomes a dead
  letter because of its neighbours, and each has its own error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from math import isfinite
from operator import attrgetter, index
from typing import Any, ClassVar, Final, Literal, NamedTuple

from orderedmq.errors import LockError, OrderedMQError, lost_by_listener
from orderedmq.listening.listener import Answer, suspend_seconds
from orderedmq.listening.process_queue import ProcessQueue
from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import HOLDER_TRUST

#: The engine asks for no more messages while it has at least this many undecided ones (Java: ``pullThresholdForQueue``).
PULL_THRESHOLD: Final = 1000
#: The engine collects this many messages for one write to the parking lot, or fewer if it has nothing else to do.
PARK_TOGETHER: Final = 256
#: Seconds after which it parks fewer even if it has other work, because undecided messages hold up its progress.
PARK_WITHIN: Final = 5.0
#: For this many seconds after a check of the lock, messages are retried without another check.
RETRY_TRUST: Final = 1.0
#: For this many seconds, a write that the broker refuses for the moment is repeated. Then its error ends the task.
REFUSED_PATIENCE: Final = 60.0
#: The capacity if no parking lot exists.
NO_BOUND: Final = 2**62
NOTHING: Final[Mapping[object, Sequence[int]]] = {}

#: COMMIT: accepted with the answer COMMIT. PARKED: appended to the parking lot. REPEATED: the message failed in a repeat of a micro-batch
#: after the group's offset had passed it. DROPPED: an operator dropped it.
OutcomeStatus = Literal["SUCCESS", "COMMIT", "DEAD_LETTER", "PARKED", "REPEATED", "DROPPED"]


class Message:
    """A message as it is passed to a listener. The DataFrame's columns are its attributes: ``message.body``, ``message.sharding_key``, …

    ``reconsume_times`` is the number of retries so far, as in RocketMQ's MessageExt: 0 on the first call. A column that the DataFrame does
    not have raises AttributeError. Attributes that belong to the engine begin with an underscore, like a named tuple's ``_fields``, so that
    they do not hide a column.
    """

    # Without __dict__, a listener cannot overwrite a column. A retry or a dead letter of the message would contain the new value.
    __slots__ = ("_again", "_attempts", "_due", "_ended", "_error", "_held", "_key", "_level", "_number", "_offset", "_rows")

    def __init__(self, offset: int, key: str | None, rows: Any = None, number: int = 0) -> None:
        """``offset``: the offset in the queue, even if the message was parked. ``key``: None for a message without a sharding key.

        ``rows``: the object that has the message's columns (`Rows` of ordered_source). ``number``: the message's index in the range, or
        in ``rows`` for a message from the parking lot. Both indexes start at 0.
        """
        self._offset = offset
        self._key = key
        self._rows = rows
        self._number = number
        #: The total number of failed calls.
        self._attempts = 0
        #: The error of the last failed call.
        self._error: str | None = None
        #: For the first parked message of a key: whether it is due. If the key is held, it is not due.
        self._due = True
        self._held = False
        #: Whether the message becomes a dead letter without a call, because an operator has said so.
        self._ended = False
        #: Whether the message is parked because it failed, so that its delay begins now. Other messages keep their due times.
        self._again = False
        #: The level of that delay in `parking.DELAY_LEVELS`, from 1. With level 0, the delay depends on how often the message was
        #: parked.
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
    """Messages that go to the listener together. ``calls`` and ``seconds`` count this range only. ``lane``: set with OrderPerKey."""

    messages: list[Message]
    lane: KeyLane | None = None
    #: When the call that is in progress began.
    since: float | None = None
    calls: int = 0
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class KeyLane:
    """A key with undecided messages."""

    key: object
    waiting: deque[Message] = field(default_factory=deque)
    batch: Batch | None = None
    #: How often the first message has failed alone in this range.
    failures: int = 0
    #: Whether all further messages of the key are parked.
    parked: bool = False
    #: Offsets of the key's parked messages that this micro-batch does not read, and the lowest of these offsets. The key's messages of
    #: the range from the lowest offset on are parked.
    parked_offsets: Set[int] = frozenset()
    diverted_from: int | None = None


class Outcome(NamedTuple):
    """The result for the messages at the offsets ``begin`` to ``end`` (exclusive). A filter may have left out some of these offsets.

    Each message of a range is in exactly one outcome. ``key``: the key of a single message, or None for a batch. ``attempts``: the number
    of calls of the listener, including those before the message was parked, or 0 if an earlier run of this micro-batch had settled the
    message. ``seconds``: how long the calls of this range took. ``error``: why the last failed call failed. ``due``: when a parked message
    is due, in ms since 1970, or None if the message has no due time. The task fills in ``due``.
    """

    begin: int
    end: int
    key: str | None
    status: OutcomeStatus
    attempts: int
    seconds: float
    error: str | None
    due: int | None = None


def not_accepted(success: bool) -> str:
    """Return the error of a message that an orderly listener has not accepted, without an exception. ``success``: its status accepts."""
    return "context.ack_index is below this message" if success else "the listener answered SUSPEND_CURRENT_QUEUE_A_MOMENT"


def in_company(error: str, messages: int) -> str:
    """Return the error of each of several messages that failed in one call, any of which can be the cause."""
    return f"one of {messages} messages of a call failed: {error}"


def outcomes(messages: Sequence[Message], status: OutcomeStatus, seconds: float) -> list[Outcome]:
    """Return an outcome for each message of a batch. The attempts of an accepted message include the successful call."""
    accepted = status == "SUCCESS"
    # This is faster than Outcome(...), and a task makes an outcome for each message.
    new, kind = tuple.__new__, Outcome
    return [
        new(
            kind,
            (
                message._offset,
                message._offset + 1,
                message._key,
                status,
                message._attempts + accepted,
                seconds,
                message._error,
                None,
            ),
        )
        for message in messages
    ]


@dataclass(slots=True)
class Consume:
    """Call the listener with this batch, then call `Engine.consumed`. Other actions may follow before the call returns."""

    batch: Batch


@dataclass(slots=True)
class WriteLetter:
    """Write this message with its error to %DLQ%<group>, then call `Engine.dead_lettered` or `Engine.refused`."""

    message: Message


@dataclass(slots=True)
class Park:
    """Append these messages to the parking lot in this order, then call `Engine.was_parked` or `Engine.refused`."""

    messages: Sequence[Message]


@dataclass(slots=True)
class Wait:
    """Wait until a call returns, or for at most ``seconds`` if they are given."""

    seconds: float | None


@dataclass(slots=True)
class Suspend:
    """Sleep for this long. No call is in progress."""

    seconds: float


@dataclass(slots=True)
class CheckLock:
    """Ask the broker whether the query still holds the queue's lock, then call `Engine.lock`."""


@dataclass(slots=True)
class Pull:
    """Call `Engine.add` with more messages, or `Engine.close` if there are none."""


@dataclass(slots=True)
class Done:
    """The range has ended: every message is decided."""


Action = Consume | WriteLetter | Park | Wait | Suspend | CheckLock | Pull | Done


class LotView(NamedTuple):
    """A queue's parking lot when a task starts.

    ``capacity``: the maximum number of messages in the lot. ``planned``: the parked messages that belong to this micro-batch. The other
    fields describe all other parked messages by their offsets in the queue. ``parked_offsets``: these offsets. ``parked_before``: for
    each key, the offsets of messages that were parked before this range. ``parked_in_range``: for each key, the offsets of messages that an
    earlier run of this range parked. The keys are made by `parking.lane_key`.
    """

    capacity: int = NO_BOUND
    planned: Sequence[Message] = ()
    parked_offsets: Collection[int] = ()
    parked_before: Mapping[object, Sequence[int]] = NOTHING
    parked_in_range: Mapping[object, Sequence[int]] = NOTHING


class Settings(ABC):
    """The settings of a listener. Each kind of listener has a subclass."""

    #: The function that the user calls, as error messages name it.
    name: ClassVar[str]
    #: The type of the context that a call gets, and the type of the status that the listener should return.
    context: ClassVar[type]
    statuses: ClassVar[type[Enum]]
    #: Whether a message that fails waits in a parking lot.
    parks: ClassVar[bool]
    #: Whether a failed message is parked alone, so that newer messages of its key do not wait for it.
    alone: ClassVar[bool]
    #: Number of messages that one call of `Engine.add` passes. A greater number allows batches with more messages of one key.
    add_together: ClassVar[int] = 4096
    max_reconsume_times: int

    @property
    @abstractmethod
    def concurrency(self) -> int:
        """The maximum number of calls in progress."""

    @abstractmethod
    def engine(self, queue: MessageQueue, now: float, lot: LotView, begin: int) -> Engine:
        """Return the engine for a task's range, which begins at the offset ``begin``."""


class Engine(ABC):
    """Passes one range of a queue to a listener. An object belongs to one thread.

    ``now`` is in monotonic seconds. ``begin``: the range's first offset. ``concurrency``: the maximum number of calls in progress.
    ``pause``: milliseconds until a write that the broker refused is repeated. A method raises RuntimeError if it does not belong to the
    last action, which is a bug of the caller.
    """

    def __init__(self, queue: MessageQueue, now: float, begin: int, *, concurrency: int, pause: int) -> None:
        self.queue = queue
        #: Texts that the caller should log. Each text is added only once.
        self.warnings: list[str] = []
        self._concurrency, self._pause = concurrency, pause
        self._in_flight = 0
        self._to_park: list[Message] = []
        self._park_due = now + PARK_WITHIN
        #: Messages that become dead letters, with their batch.
        self._exhausted: deque[tuple[Batch, Message]] = deque()
        self._pending: WriteLetter | Park | CheckLock | None = None
        self._range = ProcessQueue(begin)
        #: The offsets of undecided messages that came from the parking lot.
        self._planned: set[int] = set()
        #: No message is parked or becomes a dead letter before this time, because the broker refused a write.
        self._not_before = 0.0
        #: When the broker began to refuse writes; None if it carried out the last one.
        self._refused_since: float | None = None
        self._check_due, self._last_lock = True, now
        self._closed = self._lost = False

    # -- messages come in

    @property
    def full(self) -> bool:
        """Whether prefetching should stop for now. The action `Pull` must be carried out even then."""
        return self._range.waiting + len(self._planned) >= PULL_THRESHOLD

    @property
    def progress(self) -> int:
        """The offset up to which every message is decided, of the range and from the parking lot.

        A message that is to be parked is undecided until it is.
        """
        return min([self._range.progress, *self._planned])

    def add(self, messages: Sequence[Message]) -> None:
        """Add the next messages of the range. Raises ValueError unless the offsets ascend, within this call and from call to call."""
        if self._closed:
            raise ValueError(f"messages came after the end of the range of queue {self.queue}")
        try:
            self._range.put_message([message._offset for message in messages])
        except ValueError as error:
            raise ValueError(f"{error} of queue {self.queue}") from None
        self._add(messages)

    def close(self) -> None:
        """Report that the range has no more messages."""
        self._closed = True

    # -- what to do

    def next(self, now: float) -> Action:
        """Return the action to take now. Raises LockError LOST if the queue's lock was lost and no call is in progress."""
        if self._lost:
            if self._in_flight:
                return Wait(None)
            raise self._not_ours()
        if self._pending is not None:
            return self._pending
        self._resume(now)
        if self._check_due or now - self._last_lock >= HOLDER_TRUST:
            self._pending = CheckLock()
            return self._pending
        if now >= self._not_before:
            if self._exhausted:
                self._pending = WriteLetter(self._exhausted[0][1])
                return self._pending
            if len(self._to_park) >= PARK_TOGETHER or (self._to_park and now >= self._park_due):
                return self._park(now)
        if self._in_flight < self._concurrency:
            batch = self._take()
            if batch is not None:
                self._in_flight += 1
                batch.since = now
                return Consume(batch)
            if not self._closed and not self.full:
                return Pull()
        return self._idle(now)

    def _idle(self, now: float) -> Action:
        """Return the action to take when no batch can be given to the listener."""
        if self._to_park and now >= self._not_before:
            return self._park(now)
        resume = self._next_resume()
        soonest = [] if resume is None else [resume]
        if self._to_park or self._exhausted:
            soonest.append(self._not_before)
        if self._in_flight:
            # Wait only until the next check of the lock is due, so that a lost lock is noticed however long the calls take.
            soonest.append(self._last_lock + HOLDER_TRUST)
            return Wait(max(0.0, min(soonest) - now))
        if soonest:
            return Suspend(max(0.0, min(soonest) - now))
        # None of the engine's messages can go to the listener. So even a full engine needs more messages, unless the range has ended.
        if not self._closed:
            return Pull()
        return self._finish()

    def _park(self, now: float) -> Park:
        self._park_due = now + PARK_WITHIN
        self._pending = Park(tuple(self._to_park))
        return self._pending

    # -- what each engine implements

    @abstractmethod
    def _add(self, messages: Sequence[Message]) -> None:
        """Take the next messages of the range, which `_range` has."""

    @abstractmethod
    def _take(self) -> Batch | None:
        """Return the next batch for the listener, or None."""

    @abstractmethod
    def _resume(self, now: float) -> None:
        """Make messages ready when their suspension is over."""

    @abstractmethod
    def _next_resume(self) -> float | None:
        """Return when the next suspension is over, or None if no message is suspended."""

    @abstractmethod
    def consumed(self, batch: Batch, answer: Answer, now: float) -> list[Outcome]:
        """Take the listener's answer after `Consume`. Return the outcomes of the messages that the answer decides."""

    @abstractmethod
    def _dead_lettered(self, batch: Batch, message: Message) -> list[Outcome]:
        """Record that a message, the only one of its batch, is a dead letter now. Return the outcomes that this decides."""

    def _finish(self) -> Done:
        """End the range. Raises an error if the range must not end in this state."""
        return Done()

    # -- results of actions

    def _returned(self, batch: Batch, now: float) -> None:
        """Record that a call of the listener has returned."""
        if batch.since is None:
            raise RuntimeError(f"queue {self.queue} has no such batch at the listener")
        self._in_flight -= 1
        batch.calls += 1
        batch.seconds += now - batch.since
        batch.since = None

    def dead_lettered(self) -> list[Outcome]:
        """Record that the letter of `WriteLetter` is stored. Return the resulting outcomes."""
        if not isinstance(self._pending, WriteLetter):
            raise RuntimeError(f"queue {self.queue} has no dead letter to be written")
        self._pending = self._refused_since = None
        return self._dead_lettered(*self._exhausted.popleft())

    def was_parked(self, parked: Sequence[bool]) -> list[Outcome]:
        """Record that the write of `Park` was carried out. Return the resulting outcomes.

        ``parked``: for each message, whether it is in the lot now. A message that is not in the lot was already settled: the group's
        offset had passed it.
        """
        if not isinstance(self._pending, Park):
            raise RuntimeError(f"queue {self.queue} has no messages to be parked")
        messages = self._pending.messages
        self._pending = self._refused_since = None
        del self._to_park[: len(messages)]
        self._decided(sorted(messages, key=attrgetter("_offset")))
        return [
            Outcome(
                message._offset,
                message._offset + 1,
                message._key,
                "PARKED" if is_there else "REPEATED",
                message._attempts,
                0.0,
                message._error,
            )
            for message, is_there in zip(messages, parked, strict=True)
        ]

    def refused(self, error: OrderedMQError, now: float) -> None:
        """Record that the broker refused the write of `WriteLetter` or `Park`. It is repeated after a pause.

        Raises ``error`` if it is permanent (`OrderedMQError.retriable`), or if writes have been refused for REFUSED_PATIENCE seconds.
        """
        if not isinstance(self._pending, WriteLetter | Park):
            raise RuntimeError(f"queue {self.queue} has nothing to be written")
        self._pending = None
        since = self._refused_since = now if self._refused_since is None else self._refused_since
        if not error.retriable or now - since >= REFUSED_PATIENCE:
            raise error
        self._warn(f"{error.message}. The task tries again for up to {REFUSED_PATIENCE:g} s")
        self._not_before = now + suspend_seconds(-1, self._pause)
        self._check_due = True

    def lock(self, held: bool, now: float) -> None:
        """Record whether the query still holds the queue's lock. The caller may also call this without the action `CheckLock`."""
        if not held:
            self._lost = True
            return
        self._last_lock = now
        if isinstance(self._pending, CheckLock):
            self._pending = None
            self._check_due = False

    # -- inside

    def _decided(self, messages: Sequence[Message]) -> None:
        """Record that waiting messages, which are in the order of their offsets, are decided."""
        if len(messages) == 1 and not self._planned:
            self._range.remove_message((messages[0]._offset,))
            return
        offsets = [message._offset for message in messages]
        if self._planned:
            planned, self._planned = self._planned, self._planned.difference(offsets)
            offsets = [offset for offset in offsets if offset not in planned]
        if offsets:
            self._range.remove_message(offsets)

    def _plan(self, message: Message) -> None:
        """Take a message from the parking lot."""
        self._planned.add(message._offset)
        if message._ended:
            self._exhausted.append((Batch([message]), message))

    def _tried_again(self, now: float) -> None:
        """Record that a message goes to the listener again. Request a check of the lock unless the last check was just before."""
        self._check_due |= now - self._last_lock > RETRY_TRUST

    def _accepted(self, batch: Batch, context: object, success: bool) -> int | None:
        """Return how many messages at the beginning of a batch an orderly listener has accepted. The next message has failed.

        Return None if the call failed and it is unknown which message is the cause. ``success``: whether the listener's status accepts.
        """
        count = len(batch.messages)
        accepted = self._whole(context, "ack_index", -1) + 1
        if accepted < count:
            return max(accepted, 0)
        return count if success else None

    def _whole(self, context: object, name: str, default: int) -> int:
        """Return the number ``name`` of a context, or ``default`` if the listener has set it to something else."""
        value = getattr(context, name)
        try:
            # Numbers of ms are often computed as floats.
            return int(value) if isinstance(value, float) and isfinite(value) else index(value)
        except TypeError:
            self._warn(
                f"the listener of queue {self.queue} set {name} to an object of type {type(value).__name__}, not to a whole number, so it "
                f"counts as {default}"
            )
            return default

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def _not_ours(self) -> LockError:
        return lost_by_listener(self.queue)
