"""The resizes of topics, stored as numbers (`wire.registers`) by the broker that has the topic, as offsets of a group without consumers.

A broker stores such numbers for a topic for as long as the topic, and copies them to its replicas. It writes them to disk within some
seconds, and the command waits for that (`resizing`). A resize that was recorded never changes. So a reader asks only how many there are,
and at most every `AGE` seconds: the topic takes no messages for longer than that after a resize was recorded.

A broker cannot say which selectors have chosen the queues of a topic, so a queue has all other queues as its parents.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from orderedmq.errors import RocketMQError, TopicError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.deadline import REQUEST_TIMEOUT, Deadline
from orderedmq.rocketmq.net.fan_out import ask_queues
from orderedmq.rocketmq.wire import registers
from orderedmq.rocketmq.wire.group_requests import consumer_offset, update_consumer_offset
from orderedmq.rocketmq.wire.route import SYSTEM_GROUP_PREFIX, Route
from orderedmq.routing.generations import Resize

#: With this prefix, RocketMQ's tools do not list the group.
GROUP: Final = SYSTEM_GROUP_PREFIX + "ORDEREDMQ_RESIZES"
#: Seconds after which a topic's broker is asked again.
AGE: Final = 5.0
#: Seconds for which the resizes themselves are kept. A topic cannot be created again and resized as often in so short a time.
_KEPT: Final = 30.0
_COUNT_BITS: Final = 20
_COUNT: Final = (1 << _COUNT_BITS) - 1


class _Answer(NamedTuple):
    """When a topic's broker was asked, in monotonic seconds, and all resizes of the topic."""

    at: float = float("-inf")
    resizes: tuple[Resize, ...] = ()


class Resizes:
    """Reads and records the resizes of a cluster's topics. Thread-safe."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._answers: dict[str, _Answer] = {}

    def of(self, routes: Iterable[Route]) -> list[Resize]:
        """Return the resizes of these topics. Raises RocketMQError NO_PERMISSION if the account may not read those of a resized topic."""
        now = time.monotonic()
        places = {}
        for route in routes:
            answer = self._answers.setdefault(route.topic, _Answer())
            place = _place(route)
            if place is not None and now - answer.at >= AGE:
                places[place] = any(data.resized or data.paused for data in route.queues)
        for place, count in zip(places, self._counts(places)):
            former = self._answers[place.topic]
            kept = len(former.resizes) == count and now - former.at < _KEPT
            self._answers[place.topic] = _Answer(now, former.resizes if kept else self._recorded(place, count))
        return [resize for route in routes for resize in self._answers[route.topic].resizes]

    def count(self, place: MessageQueue) -> int:
        """Return how often the topic of ``place``, any queue of it, was resized."""
        return self._read([registers.resizes(place)])[0]

    def record(self, resize: Resize, existing: Sequence[MessageQueue]) -> None:
        """Record a resize. ``resize.ends`` has the end of each ``existing`` queue. The group `GROUP` exists."""
        place, number = existing[0], resize.number
        sizes = (len(resize.former) << _COUNT_BITS | len(resize.queues)) << _COUNT_BITS | len(existing)
        ends = {registers.resize_end(queue, number): resize.ends[queue] for queue in existing}
        # Readers ask for the others when the count says that they are there.
        for numbers in ({registers.resize(place, number): sizes}, ends, {registers.resizes(place): number + 1}):
            requests = [(register, update_consumer_offset(GROUP, register, value)) for register, value in numbers.items()]
            ask_queues(self._client, requests, Deadline.after(REQUEST_TIMEOUT))

    def is_recorded(self, resize: Resize, place: MessageQueue) -> bool:
        """Return whether the broker has the resize as the last one of its topic."""
        return self.count(place) == resize.number + 1 and self._recorded(place, resize.number + 1)[-1:] == (resize,)

    def _counts(self, places: Mapping[MessageQueue, bool]) -> list[int]:
        """Return how often each topic was resized. The values say whether the route knows of a resize."""
        counts = [registers.resizes(place) for place in places]
        try:
            return self._read(counts)
        except TopicError:
            # A topic was deleted after it was listed.
            out = [0] * len(counts)
            for index, count in enumerate(counts):
                with contextlib.suppress(TopicError):
                    out[index] = self._read([count])[0]
            return out
        except RocketMQError as error:
            # An account needs no right to read the group before one of its topics is resized.
            if not error.denied or any(places.values()):
                raise
            return [0] * len(counts)

    def _recorded(self, place: MessageQueue, count: int) -> tuple[Resize, ...]:
        sizes = self._read([registers.resize(place, number) for number in range(count)])
        queues = [[place._replace(queue_id=queue_id) for queue_id in range(size & _COUNT)] for size in sizes]
        ends = iter(self._read([registers.resize_end(queue, number) for number in range(count) for queue in queues[number]]))
        out = []
        for number, size in enumerate(sizes):
            former, after = (
                tuple(place._replace(queue_id=queue_id) for queue_id in range(size >> bits & _COUNT))
                for bits in (2 * _COUNT_BITS, _COUNT_BITS)
            )
            out.append(Resize(former, after, dict(zip(queues[number], ends)), by_key=False, number=number))
        return tuple(out)

    def _read(self, places: Sequence[MessageQueue]) -> list[int]:
        requests = [(place, consumer_offset(GROUP, place)) for place in places]
        return [number or 0 for number in ask_queues(self._client, requests, Deadline.after(REQUEST_TIMEOUT))]


def _place(route: Route) -> MessageQueue | None:
    """Return a queue at the broker that has the topic's resizes; None if the topic was never resized."""
    brokers = [data for data in route.queues if data.resized or data.paused] or route.queues
    return MessageQueue(route.topic, brokers[0].broker_name, 0) if len(brokers) == 1 else None
