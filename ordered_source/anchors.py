"""What a query keeps of its topics in its offsets, to know later whether each is still the one that it has read.

A broker may have to be asked for it, and what it gives ages (over RocketMQ it is one of the messages that were read, `Log.anchor`). So it
is kept from offset to offset and asked for anew now and then, of one topic at a time: a batch costs one question more at most. Only a
topic of which nothing is known yet is asked for at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

from orderedmq.broker import Log
from orderedmq.model import MessageQueue

#: Seconds, or messages of the topic, after which an anchor is asked for anew.
REFRESH_SECONDS: Final = 300.0
REFRESH_MESSAGES: Final = 1_000_000


class Anchors:
    """When each topic's anchor was asked for; the anchors themselves live in the offsets."""

    def __init__(self) -> None:
        #: Moment (monotonic seconds) and sum of the next offsets at that time.
        self._asked: dict[str, tuple[float, int]] = {}

    def of(
        self, source: Log, topics: Iterable[str], kept: Mapping[str, str], following: Mapping[MessageQueue, int], now: float
    ) -> dict[str, str]:
        """The anchor of each topic for a batch that is about to be logged and ends at ``following``.

        ``kept``: those of the batch before, of topics that are still what they were. Raises TopicError MISSING.
        """
        ends: defaultdict[str, dict[MessageQueue, int]] = defaultdict(dict)
        for queue, offset in following.items():
            ends[queue.topic][queue] = offset
        out: dict[str, str] = {}
        due: list[tuple[float, str]] = []
        for topic in topics:
            # What the checkpoint brought is of any age.
            at, then = self._asked.get(topic, (float("-inf"), 0))
            if not kept.get(topic) and (topic not in kept or not then):
                out[topic] = self._ask(source, topic, ends[topic], now)
                continue
            out[topic] = kept[topic]
            if now - at >= REFRESH_SECONDS or sum(ends[topic].values()) - then >= REFRESH_MESSAGES:
                due.append((at, topic))
        if due:
            topic = min(due)[1]
            # Nothing may tell any more, where messages have aged out; then what is known stays.
            out[topic] = self._ask(source, topic, ends[topic], now) or out[topic]
        return out

    def _ask(self, source: Log, topic: str, ends: Mapping[MessageQueue, int], now: float) -> str:
        self._asked[topic] = (now, sum(ends.values()))
        return source.anchor(topic, ends)
