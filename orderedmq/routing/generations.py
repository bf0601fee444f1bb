"""The generations of a topic that was resized, and how far a group may read each queue so that every key keeps its order. Pure.

A topic's *generation* is the list of the queues to which its keys go. A resize ends one generation and begins the next. A key in place
``j`` of the new list was in a place ``i`` of the former list with ``i ≡ j (mod gcd(former, new))``, because RocketMQ's selectors choose
by the remainder of a number. These queues are the *parents* of the queue in place ``j``. A group may read a queue beyond the offset at which
the new generation begins there when its other parents are *done*: the group has processed them up to where the former generation ended,
has none of these messages in their parking lots, and did not have to wait for parents of theirs. The last condition covers a
generation in which a parent got no messages. The queue's own older messages are read before its newer ones anyway.

With a selector of the user's own, a key may have been in any queue, so all queues of the former list are parents.

The generations also give all messages of a key one order. The *key sequence* of a message is its generation's number and its offset in one
number, so it grows along a key's messages although a resize may let the key continue at a lower offset of another queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import gcd
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from orderedmq.model import MessageQueue
from orderedmq.ownership.offsets import OffsetMap

#: Bits of a key sequence that the offset takes. The 15 bits above them have the generation.
OFFSET_BITS: Final = 48


class Resize(NamedTuple):
    """The end of one generation of a topic, and the begin of the next.

    ``former``, ``queues``: the lists before and after it, in the order in which selectors count them. ``ends``: the offset in each queue at
    which the former generation ends and the next one begins. Queues that were new then are left out. ``by_key``: whether RocketMQ's
    selectors choose the queues of all keys (False: a selector of the user's own does so for some). ``number``: that of the former
    generation, from 0.
    """

    former: tuple[MessageQueue, ...]
    queues: tuple[MessageQueue, ...]
    ends: OffsetMap
    by_key: bool = True
    number: int = 0

    @property
    def families(self) -> int:
        """The number of families: queues of both lists whose places have the same remainder by it may have had the same keys."""
        return gcd(len(self.former), len(self.queues)) if self.by_key else 1

    def begin(self, queue: MessageQueue) -> int:
        """Return the offset of the queue's first message of the new generation."""
        return self.ends.get(queue, 0)

    def parents(self, queue: MessageQueue) -> list[MessageQueue]:
        """Return the queues that had the keys of ``queue``, which is in the new list, before the resize."""
        family = self.queues.index(queue) % self.families
        return [other for place, other in enumerate(self.former) if place % self.families == family]


class Parent(NamedTuple):
    """A queue that is not done: the group has processed it up to ``at``, and has to process it up to ``end``.

    ``key``: a key that has messages from before ``end`` in the queue's parking lot, if the queue itself is processed up to there.
    """

    queue: MessageQueue
    end: int
    at: int
    key: str | None = None

    def __str__(self) -> str:
        if self.key is not None:
            return f"queue {self.queue.queue_id}, where key {self.key!r} is parked"
        if self.at >= self.end:
            return f"queue {self.queue.queue_id}, which waits itself"
        return f"queue {self.queue.queue_id}, which is processed up to {self.at} of {self.end}"


class Wait(NamedTuple):
    """Why a group may read a queue only up to ``offset`` (exclusive): these parents of the queue are not done."""

    offset: int
    parents: tuple[Parent, ...]

    def __str__(self) -> str:
        return "; ".join(map(str, self.parents))


def waits(
    resizes: Iterable[Resize], processed: OffsetMap, parked: Mapping[MessageQueue, tuple[int, str]]
) -> dict[MessageQueue, Wait]:
    """Return the queues that a group may not read to their ends.

    ``resizes``: of one or more topics, those of a topic from the oldest to the newest. ``processed``: for each queue, the offset below which
    the group has processed all messages, or the broker has deleted them. ``parked``: for each queue in whose parking lot a key is left,
    the lowest offset of such a message in the queue, and its key.
    """
    out: dict[MessageQueue, Wait] = {}
    for resize in resizes:
        families = resize.families
        waiting: dict[int, list[Parent]] = {}
        for place, queue in enumerate(resize.former):
            end, at = resize.begin(queue), processed.get(queue, 0)
            offset, key = parked.get(queue, (end, ""))
            if at < end or queue in out:
                waiting.setdefault(place % families, []).append(Parent(queue, end, at))
            elif offset < end:
                waiting.setdefault(place % families, []).append(Parent(queue, end, at, key))
        if not waiting:
            continue
        for place, queue in enumerate(resize.queues):
            parents = tuple(parent for parent in waiting.get(place % families, ()) if parent.queue != queue)
            # An earlier resize stops the group at a lower offset of the queue.
            if parents and queue not in out:
                out[queue] = Wait(resize.begin(queue), parents)
    return out


class Generations(NamedTuple):
    """The generations of the messages in one queue. Those from the offset ``begins[i]`` on, up to the next one, are of ``numbers[i]``."""

    begins: tuple[int, ...] = (0,)
    numbers: tuple[int, ...] = (0,)

    @classmethod
    def of(cls, queue: MessageQueue, resizes: Iterable[Resize]) -> Generations:
        """Return the generations of a queue. ``resizes``: those of its topic, from the oldest to the newest."""
        begins: list[int] = []
        numbers: list[int] = []
        for resize in resizes:
            if not numbers:
                begins, numbers = [0], [resize.number]
            if queue in resize.queues:
                begins.append(resize.begin(queue))
                numbers.append(resize.number + 1)
        return cls(tuple(begins), tuple(numbers)) if numbers else ONE_GENERATION

    def key_sequences(self, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the key sequences of the messages at these offsets of the queue."""
        places = np.searchsorted(np.array(self.begins, np.int64), offsets, side="right") - 1
        return np.array(self.numbers, np.int64)[places] << OFFSET_BITS | offsets


#: The generations of a queue whose topic was never resized.
ONE_GENERATION: Final = Generations()


def generation_of(key_sequence: int) -> int:
    """Return the generation of the message with this key sequence."""
    return key_sequence >> OFFSET_BITS
