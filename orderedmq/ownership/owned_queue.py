"""One queue that a query owns: its tenure as a state machine, and how far it is planned. Only the Owner changes it. Pure."""

from __future__ import annotations

from enum import Enum
from typing import Final

from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.ownership.lock import LockToken


class Phase(Enum):
    """The state of a queue in the Owner of a query."""

    FREE = "free"
    #: Locked, and it is not decided where it is read from.
    UNPLACED = "unplaced"
    #: Its next range begins at its position, and everything before that is committed.
    IDLE = "idle"
    #: A range is planned into the batch that Spark runs.
    IN_FLIGHT = "in flight"


class Step(Enum):
    """What happens to a queue: a call of the Owner."""

    LOCKED = "locked"
    PLACED = "entered at the group's offset, or resumed at the checkpoint's"
    REPEATED = "its logged range is repeated"
    PLANNED = "planned"
    DONE = "committed, or Spark has not run the batch"
    SKIPPED = "placed after messages that are lost"
    LOT_DELETED = "it is a parking lot that was deleted"
    GIVEN_UP = "given up at a boundary"
    LOST = "lost or deleted"


#: What may happen to a queue in which state, and its state after that. Every other step is an error in this package.
TRANSITIONS: Final[dict[tuple[Phase, Step], Phase]] = {
    (Phase.FREE, Step.LOCKED): Phase.UNPLACED,
    (Phase.UNPLACED, Step.PLACED): Phase.IDLE,
    (Phase.UNPLACED, Step.REPEATED): Phase.IN_FLIGHT,
    (Phase.UNPLACED, Step.GIVEN_UP): Phase.FREE,
    (Phase.UNPLACED, Step.LOST): Phase.FREE,
    (Phase.UNPLACED, Step.LOT_DELETED): Phase.UNPLACED,
    (Phase.IDLE, Step.PLANNED): Phase.IN_FLIGHT,
    (Phase.IDLE, Step.DONE): Phase.IDLE,
    (Phase.IDLE, Step.SKIPPED): Phase.IDLE,
    (Phase.IDLE, Step.GIVEN_UP): Phase.FREE,
    (Phase.IDLE, Step.LOST): Phase.FREE,
    (Phase.IDLE, Step.LOT_DELETED): Phase.UNPLACED,
    (Phase.IN_FLIGHT, Step.DONE): Phase.IDLE,
    (Phase.IN_FLIGHT, Step.LOST): Phase.FREE,
    (Phase.IN_FLIGHT, Step.LOT_DELETED): Phase.UNPLACED,
}


class Owned:
    """One owned queue: its lock token (None without a group), and its offsets.

    As in RocketMQ's ProcessQueue, messages are taken in order, and the committed offset is one more than the offset of the last message
    taken. Here the messages in flight, and those that were found and are not planned, are each a range without gaps, so three offsets say
    everything: [``begin``, ``position``) is in flight, and [``position``, ``known``) was found and is not planned.
    """

    __slots__ = ("begin", "entered", "known", "leader", "phase", "position", "queue", "token")

    def __init__(self, queue: MessageQueue, token: LockToken | None, leader: MessageQueue | None = None) -> None:
        self.queue = queue
        self.token = token
        #: The queue that this one is the companion of, if it is one.
        self.leader = leader
        self.phase = Phase.FREE
        #: None until it is decided.
        self.position: int | None = None
        self.begin = self.known = 0
        #: Whether the next range does not begin where the checkpoint's last one ended.
        self.entered = False
        self.on(Step.LOCKED)

    def on(self, step: Step) -> None:
        """Change the phase. Raises AssertionError for a step that `TRANSITIONS` does not have."""
        after = TRANSITIONS.get((self.phase, step))
        if after is None:
            raise AssertionError(f"queue {self.queue} is {self.phase.value}, so it cannot be {step.value}")
        self.phase = after

    @property
    def in_flight(self) -> OffsetRange:
        """What is planned and not committed."""
        return OffsetRange(self.begin, self.begin if self.position is None else self.position)

    def place(self, position: int, *, entered: bool) -> None:
        """Read the queue from ``position`` on."""
        self.on(Step.PLACED)
        self.begin = self.position = self.known = position
        self.entered = entered

    def skip(self, position: int) -> None:
        """Go on at ``position``: what was before it is lost, and the user accepts that."""
        self.on(Step.SKIPPED)
        self.begin = self.position = self.known = position
        self.entered = True

    def unplace(self) -> None:
        """Forget where the queue is read from, and what of it is in flight."""
        self.on(Step.LOT_DELETED)
        self.position = None

    def found(self, end: int) -> None:
        """Messages up to ``end`` are at the broker."""
        self.known = max(self.known, end)

    def plan(self, count: int) -> None:
        """Take the next ``count`` messages into a batch."""
        assert self.position is not None
        assert self.position + count <= self.known, "only what was found is planned"
        self.on(Step.PLANNED)
        self.position += count

    def repeat(self, span: OffsetRange) -> None:
        """Take the range of a logged batch again, which may be empty."""
        self.on(Step.REPEATED if span.messages else Step.PLACED)
        self.begin, self.position, self.known = span.begin, span.end, span.end
        self.entered = False

    def commit(self) -> int | None:
        """Spark has committed the batch: return the offset to commit, None if nothing was in flight."""
        self.on(Step.DONE)
        self.entered = False
        if self.begin == self.position:
            return None
        self.begin = self.in_flight.end
        return self.begin

    def roll_back(self) -> None:
        """Spark has not run the batch: its messages are to be planned again."""
        self.on(Step.DONE)
        self.position = self.begin
