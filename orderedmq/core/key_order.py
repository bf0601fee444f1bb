"""What the engine of a listener with order per key takes and gives: settings, messages, actions, outcomes. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from orderedmq.conditions import OptionCondition
from orderedmq.core.listener import check_bounds
from orderedmq.errors import OptionError

OnExhausted = Literal["dead_letter", "hold"]
#: REPEATED: it failed in a repeat of a micro-batch after the group's offset had passed it. DROPPED: an operator dropped it.
OutcomeStatus = Literal["SUCCESS", "DEAD_LETTER", "PARKED", "REPEATED", "DROPPED", "SENT_BACK"]


@dataclass(frozen=True)
class KeySettings:
    """Parameters of ``order="key"``; times in milliseconds or, where they say so, seconds. Raises OptionError INVALID."""

    consume_message_batch_max_size: int = 1
    suspend_current_queue_time_millis: int = 1000
    max_reconsume_times: int = 16
    concurrency: int = 1
    in_batch_attempts: int = 3
    max_batch_seconds: float = 30.0
    on_exhausted: OnExhausted = "dead_letter"
    parking_lot_max_messages: int = 10_000

    def __post_init__(self) -> None:
        most = 2**31 - 1
        bounds = {
            "consume_message_batch_max_size": (1, 1024),
            "suspend_current_queue_time_millis": (0, most),
            "max_reconsume_times": (-1, most),
            "concurrency": (1, 1024),
            "in_batch_attempts": (1, most),
            "parking_lot_max_messages": (0, 2**63 - 1),
        }
        check_bounds(self, bounds)
        seconds: object = self.max_batch_seconds
        if type(seconds) not in (int, float) or not self.max_batch_seconds > 0:
            raise OptionError(OptionCondition.INVALID, f"max_batch_seconds is {seconds!r}: give seconds above 0")
        if self.on_exhausted not in ("dead_letter", "hold"):
            raise OptionError(OptionCondition.INVALID, f"on_exhausted is {self.on_exhausted!r}: give 'dead_letter' or 'hold'")


@dataclass(init=False, eq=False)
class Message:
    """A message of the queue, wherever it comes from. ``offset`` is its offset in the queue, also if it was parked."""

    offset: int
    #: None: a message without a key, which is a key of its own.
    key: str | None
    #: The caller's handle: the row, or rows and the number of the message's row among them.
    row: Any = None
    number: int = 0
    #: Failed calls in all.
    attempts: int = 0
    #: How often it was put into the lot.
    parked: int = 0
    #: Of a parked head: whether its time has come. A held key's never does.
    due: bool = True
    held: bool = False
    #: It failed and is parked for that: its time until it is due begins now. Other messages keep theirs, or wait behind it.
    again: bool = False
    #: The delay level that its time until it is due has then (`parking.DELAY_LEVELS`); 0: by how often it was parked.
    level: int = 0
    error: str | None = None

    def __init__(self, offset: int, key: str | None, row: Any = None, number: int = 0, **other: Any) -> None:
        # Most messages have no others, and then the defaults of the class stand for them: a task makes millions of messages.
        self.offset = offset
        self.key = key
        self.row = row
        self.number = number
        if other:
            self.__dict__.update(other)


@dataclass(slots=True, eq=False)
class Batch:
    """Messages of one key that go to the listener together. ``calls`` and ``seconds`` are those of this range."""

    lane: Lane
    messages: list[Message]
    since: float = 0.0
    in_flight: bool = False
    calls: int = 0
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class Lane:
    """A key with messages that are not decided."""

    key: object
    waiting: deque[Message] = field(default_factory=deque)
    batch: Batch | None = None
    #: Failures of the head in this range, and when the key may be tried again.
    failures: int = 0
    resume: float = 0.0
    #: Everything that comes is parked.
    parked: bool = False
    #: Offsets of the key that lie in the lot and are not planned, and the least of them: from there on everything is parked.
    behind: Set[int] = frozenset()
    diverted_from: int | None = None


class Outcome(NamedTuple):
    """A decided or parked message. ``calls`` and ``seconds`` are those of its batch in this range.

    ``attempts`` counts calls of the listener in all, also those before it was parked. ``due``: of a parked message, when it is due
    in ms since 1970, if it has a time of its own; the caller knows it.
    """

    offset: int
    key: str | None
    status: OutcomeStatus
    attempts: int
    calls: int
    seconds: float
    error: str | None
    due: int | None = None


def outcomes(messages: Sequence[Message], status: OutcomeStatus, batch: Batch) -> list[Outcome]:
    """Return the outcomes of messages of a batch. An accepted one was called once more than it failed."""
    calls, seconds, accepted = batch.calls, batch.seconds, status == "SUCCESS"
    # Outcome(...) by the shortest way: it is made for each message of a task.
    new, kind = tuple.__new__, Outcome
    return [
        new(kind, (one.offset, one.key, status, one.attempts + accepted, calls, seconds, one.error, None)) for one in messages
    ]


@dataclass(frozen=True, slots=True)
class Consume:
    """Call the listener with this batch; then `key_lanes.KeyLanes.consumed`. Other actions may come before that."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Write this message, with its error, to %DLQ%<group>; then `key_lanes.KeyLanes.dead_lettered`."""

    message: Message


@dataclass(frozen=True, slots=True)
class Park:
    """Append these messages to the parking lot, in this order; then `key_lanes.KeyLanes.was_parked`."""

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
    """Ask the broker whether the queue is still held; then `key_lanes.KeyLanes.lock`."""


@dataclass(frozen=True, slots=True)
class Pull:
    """More messages are needed: call `key_lanes.KeyLanes.put` or `key_lanes.KeyLanes.close`."""


@dataclass(frozen=True, slots=True)
class Done:
    """Every message of the range is decided or parked."""


Action = Consume | DeadLetter | Park | Wait | Suspend | CheckLock | Pull | Done
