"""One queue that a query owns, and how far it is planned. Only the Owner changes it. Pure."""

from __future__ import annotations

from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import LockToken
from orderedmq.ownership.process_queue import ProcessQueue, Slice


class Owned:
    """One owned queue: its lock token (None without a group), where the next range begins, and whether it was entered there."""

    __slots__ = ("entered", "known", "leader", "pending", "position", "queue", "token")

    def __init__(self, queue: MessageQueue, token: LockToken | None, leader: MessageQueue | None = None) -> None:
        self.queue = queue
        self.token = token
        #: The queue that this one is the companion of, if it is one.
        self.leader = leader
        self.pending = ProcessQueue(0.0)
        #: None until it is decided.
        self.position: int | None = None
        self.entered = False
        #: End of the messages found at the broker so far.
        self.known = 0

    def place(self, position: int, *, entered: bool) -> None:
        self.pending.clear()
        self.position = self.known = position
        self.entered = entered

    def found(self, end: int) -> None:
        """Messages up to ``end`` are at the broker."""
        if end > self.known:
            self.pending.put(Slice(self.known, end))
            self.known = end
