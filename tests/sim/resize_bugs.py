"""Deliberate bugs in the barrier of a topic that is resized. Tests check that the simulation notices each of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final
from unittest import mock

from orderedmq import barrier
from orderedmq.barrier import Barrier
from orderedmq.model import MessageQueue
from orderedmq.routing import generations
from orderedmq.routing.generations import Resize, Wait
from tests.sim.process import Process


def families_by_the_number_of_queues() -> AbstractContextManager[Any]:
    """The number of queues replaces the greatest common divisor."""
    return mock.patch.object(Resize, "families", property(lambda resize: len(resize.former)))


def first_parent_that_is_done() -> AbstractContextManager[Any]:
    """A queue is read when one of its parents is done, that is the one that is processed furthest."""

    def any_done(resizes: Any, processed: Any, parked: Any) -> dict[MessageQueue, Wait]:
        out = {}
        for queue, wait in generations.waits(resizes, processed, parked).items():
            resize = next(each for each in resizes if queue in each.queues and each.begin(queue) == wait.offset)
            if len(wait.parents) == len([parent for parent in resize.parents(queue) if parent != queue]):
                out[queue] = wait
        return out

    return mock.patch.object(barrier, "waits", any_done)


def generations_listed_before_the_ends() -> AbstractContextManager[Any]:
    """The generations are those of the last boundary."""
    resizes = Process.resizes
    last: dict[Process, list[Resize]] = {}

    def stale(self: Process, topics: Any) -> list[Resize]:
        now = resizes(self, topics)
        former, last[self] = last.get(self, now), now
        return former

    return mock.patch.object(Process, "resizes", stale)


def queues_closed_before_they_are_drained() -> AbstractContextManager[Any]:
    """Readers list only the queues that take messages."""

    def targets(self: Process, name: str) -> list[MessageQueue]:
        resizing = self.world.resizing
        return self.world.queues if resizing is None else self.world.queues[: resizing.count]

    return mock.patch.multiple(Process, queues=targets, readable=targets)


def lots_not_looked_at() -> AbstractContextManager[Any]:
    """A parked message of a parent holds nothing."""
    return mock.patch.object(Barrier, "_parked", return_value={})


def children_in_the_batch_of_their_parents() -> AbstractContextManager[Any]:
    """What a batch reads counts as processed when the batch is planned."""
    left = Barrier._left

    def planned(self: Barrier, queues: Any, positions: Any) -> Any:
        return {
            queue: span._replace(begin=span.end) if queue in positions else span
            for queue, span in left(self, queues, positions).items()
        }

    return mock.patch.object(Barrier, "_left", planned)


def empty_generation_forgotten() -> AbstractContextManager[Any]:
    """A queue without messages of a generation counts as done, although messages of the generation before are not."""

    def one_by_one(resizes: Any, processed: Any, parked: Any) -> dict[MessageQueue, Wait]:
        out: dict[MessageQueue, Wait] = {}
        for resize in resizes:
            out = generations.waits([resize], processed, parked) | out
        return out

    return mock.patch.object(barrier, "waits", one_by_one)


def ends_not_capped() -> AbstractContextManager[Any]:
    """There is no barrier."""
    return mock.patch.object(Barrier, "waits", return_value={})


RESIZE_BUGS: Final[tuple[Callable[[], AbstractContextManager[Any]], ...]] = (
    families_by_the_number_of_queues,
    first_parent_that_is_done,
    generations_listed_before_the_ends,
    queues_closed_before_they_are_drained,
    lots_not_looked_at,
    children_in_the_batch_of_their_parents,
    empty_generation_forgotten,
    ends_not_capped,
)
