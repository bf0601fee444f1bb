"""A topic of the simulation that is resized while it is written and read, and the judge of its keys' order.

Producers choose queues by keys. The judge knows in which order each key's messages were written, whatever their queues: before messages are
planned into a batch, all older messages of their keys in other queues must be committed, and none may be left in a parking lot.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from orderedmq.model import EMBEDDED_BROKER, MessageQueue
from orderedmq.routing.generations import Resize
from tests.sim.world import TOPIC, World

#: The number of keys, which are numbers. Any two numbers of queues up to `QUEUES` divide them differently.
KEYS: Final = 24
QUEUES: Final = 8


class Resizing:
    """The generations of the world's topic, and the keys of its messages."""

    def __init__(self, world: World, keyless: bool) -> None:
        self.world = world
        self.keyless = keyless
        #: The number of queues that take messages.
        self.count = len(world.queues)
        self.resizes: list[Resize] = []
        self.keys: dict[tuple[MessageQueue, int], int] = {}
        #: The messages of each key in the order in which they were written.
        self.written: defaultdict[int, list[tuple[MessageQueue, int]]] = defaultdict(list)

    def produce(self, count: int) -> None:
        world = self.world
        for _ in range(count):
            key = world.random.randrange(KEYS)
            queue = world.queues[key % self.count]
            self.keys[queue, world.ends[queue]] = key
            self.written[key].append((queue, world.ends[queue]))
            world.ends[queue] += 1
        world.changes += 1

    def resize(self, count: int) -> None:
        world = self.world
        if count == self.count:
            return
        ends = dict(world.ends)
        while len(world.queues) < count:
            queue = MessageQueue(TOPIC, EMBEDDED_BROKER, len(world.queues))
            world.queues = [*world.queues, queue]
            world.ends[queue] = 0
            world.ledger.add(queue)
        former, self.count = self.count, count
        self.resizes = [*self.resizes, Resize(tuple(world.queues[:former]), tuple(world.queues[:count]), ends)]
        world.reached["resized"] += 1
        world.changes += 1

    def key_of(self, queue: MessageQueue, offset: int) -> str | None:
        return None if self.keyless and offset % 4 == 1 else str(self.keys[queue, offset])

    def planned(self, name: str, queue: MessageQueue, begin: int, end: int) -> None:
        """Messages are planned into a batch. Fail if an older message of one of their keys is not done."""
        world, lots = self.world, self.world.lots
        for offset in range(begin, end):
            if self.key_of(queue, offset) is None:
                continue
            for other, at in self.written[self.keys[queue, offset]]:
                if (other, at) == (queue, offset):
                    break
                if other == queue or self.key_of(other, at) is None:
                    continue
                world.reached["read after a move"] += 1
                what = f"{name} reads {queue} at {offset} before the older message of its key in {other} at {at} is"
                if world.group_offsets.get(other, 0) <= at:
                    world.fail(f"{what} processed")
                if lots is not None and any(parked.offset == at for parked in lots.messages(other)):
                    world.fail(f"{what} back from its parking lot")
