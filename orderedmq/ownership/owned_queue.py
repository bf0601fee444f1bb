"""One queue that a query owns: its tenure as a state machine, and how far its messages are planned. Only the Owner changes it. Pure."""

from __future__ import annotations

from enum import Enum
from typing import Final

from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.ownership.lock import LockToken


class Phase(Enum):
    """The state of a queue in the Owner of a query."""

    FREE = "free"
    #: Locked, but the offset from which the queue is read is not decided yet.
    UNPLACED = "unplaced"
    #: The next range begins at the queue's position, and everything before it is committed.
    IDLE = "idle"
    #: A range of the queue is planned into the batch that Spark runs.
    IN_FLIGHT = "in flight"


class Step(Enum):
    """A step in a queue's tenure. The Owner's methods take these steps."""

    LOCKED = "locked"
    PLACED = "entered at the group's offset, or resumed at the checkpoint's"
    REPEATED = "its logged range is repeated"
    PLANNED = "planned"
    DONE = "committed, or Spark has not run the batch"
    SKIPPED = "placed after messages that are lost"
    RELEASED = "released at a boundary"
    LOST = "lost or deleted"


#: The steps that are possible in each phase, with the phase that follows. Every other step is a defect in this package.
TRANSITIONS: Final[dict[tuple[Phase, Step], Phase]] = {
    (Phase.FREE, Step.LOCKED): Phase.UNPLACED,
    (Phase.UNPLACED, Step.PLACED): Phase.IDLE,
    (Phase.UNPLACED, Step.REPEATED): Phase.IN_FLIGHT,
    (Phase.UNPLACED, Step.RELEASED): Phase.FREE,
    (Phase.UNPLACED, Step.LOST): Phase.FREE,
    (Phase.IDLE, Step.PLANNED): Phase.IN_FLIGHT,
    (Phase.IDLE, Step.DONE): Phase.IDLE,
    (Phase.IDLE, Step.SKIPPED): Phase.IDLE,
    (Phase.IDLE, Step.RELEASED): Phase.FREE,
    (Phase.IDLE, Step.LOST): Phase.FREE,
    (Phase.IN_FLIGHT, Step.DONE): Phase.IDLE,
    (Phase.IN_FLIGHT, Step.LOST): Phase.FREE,
}


class Owned:
    """One owned queue: its lock token (None without a group), and its offsets.

    As in RocketMQ's ProcessQueue, messages are taken in order, and the committed offset is one more than the offset of the last message
    taken. Messages in flight and messages waiting to be planned each form a range without gaps. So three offsets suffice:
    [``begin``, ``position``) is in flight, and [``position``, ``known``) was found at the broker, may be read, and is not planned.
    """

    __slots__ = ("begin", "entered", "known", "leader", "phase", "position", "queue", "token")

    def __init__(self, queue: MessageQueue, token: LockToken | None, leader: MessageQueue | None = None) -> None:
        self.queue = queue
        self.token = token
        #: The queue to which this companion belongs, None if this queue is not a companion.
        self.leader = leader
        self.phase = Phase.FREE
        #: The offset of the next message to plan, None until it is decided.
        self.position: int | None = None
        self.begin = self.known = 0
        #: Whether the next range begins elsewhere than where the checkpoint's last range ended.
        self.entered = False
        self.on(Step.LOCKED)

    def on(self, step: Step) -> None:
        """Change the phase. Raises AssertionError for a step that `TRANSITIONS` does not allow."""
        after = TRANSITIONS.get((self.phase, step))
        if after is None:
            raise AssertionError(f"queue {self.queue} is {self.phase.value}, so this step is impossible: {step.value}")
        self.phase = after

    @property
    def in_flight(self) -> OffsetRange:
        """The range of messages that are planned and not committed."""
        return OffsetRange(self.begin, self.begin if self.position is None else self.position)

    def place(self, position: int, *, entered: bool) -> None:
        """Read the queue from ``position`` on."""
        self.on(Step.PLACED)
        self.begin = self.position = self.known = position
        self.entered = entered

    def skip(self, position: int) -> None:
        """Continue at ``position``, because the messages before it are lost and the user accepts that."""
        self.on(Step.SKIPPED)
        self.begin = self.position = self.known = position
        self.entered = True

    def found(self, end: int) -> None:
        """Record that messages up to ``end`` (exclusive) may be planned."""
        assert self.position is not None
        self.known = max(self.position, end)

    def plan(self, count: int) -> None:
        """Take the next ``count`` messages into a batch."""
        assert self.position is not None
        assert self.position + count <= self.known, "only messages that were found are planned"
        self.on(Step.PLANNED)
        self.position += count

    def repeat(self, span: OffsetRange) -> None:
        """Plan the range of a logged batch again. The range may be empty."""
        self.on(Step.REPEATED if span.messages else Step.PLACED)
        self.begin, self.position, self.known = span.begin, span.end, span.end
        self.entered = False

    def commit(self) -> int | None:
        """Record that Spark has committed the batch. Return the offset to commit, or None if nothing was in flight."""
        self.on(Step.DONE)
        self.entered = False
        if self.begin == self.position:
            return None
        self.begin = self.in_flight.end
        return self.begin

    def roll_back(self) -> None:
        """Record that Spark has not run the batch, so that its messages are planned again."""
        self.on(Step.DONE)
        self.position = self.begin
