"""Topic anchors: kept in a query's offsets, they tell later whether a topic is still the one that was read.

An anchor may cost a request to the broker, and it ages: over RocketMQ it is one of the messages that were read (`Log.anchor`).
So anchors are copied from offset to offset and refreshed now and then, one topic at a time: a batch makes at most one extra
request. Only a topic without an anchor gets one at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

from orderedmq.broker import Log
from orderedmq.model import MessageQueue

#: Seconds, or messages of the topic, after which an anchor is refreshed.
REFRESH_SECONDS: Final = 300.0
REFRESH_MESSAGES: Final = 1_000_000


class Anchors:
    """Refreshes anchors. Keeps when each one was asked for; the anchors themselves are in the offsets."""

    def __init__(self) -> None:
        #: Topic -> monotonic seconds of the last request, and the sum of the topic's next offsets then.
        self._asked: dict[str, tuple[float, int]] = {}

    def of(
        self, source: Log, topics: Iterable[str], kept: Mapping[str, str], following: Mapping[MessageQueue, int], now: float
    ) -> dict[str, str]:
        """Return the anchor of each topic for the offset that ends the next batch, whose next offsets are ``following``.

        ``kept``: the anchors in the previous offset, without topics that were deleted or recreated. Raises TopicError MISSING.
        """
        ends: defaultdict[str, dict[MessageQueue, int]] = defaultdict(dict)
        for queue, offset in following.items():
            ends[queue.topic][queue] = offset
        out: dict[str, str] = {}
        due: list[tuple[float, str]] = []
        for topic in topics:
            # An anchor from the checkpoint has an unknown age, so it is due.
            at, then = self._asked.get(topic, (float("-inf"), 0))
            if not kept.get(topic) and (topic not in kept or not then):
                out[topic] = self._ask(source, topic, ends[topic], now)
                continue
            out[topic] = kept[topic]
            if now - at >= REFRESH_SECONDS or sum(ends[topic].values()) - then >= REFRESH_MESSAGES:
                due.append((at, topic))
        if due:
            topic = min(due)[1]
            # Where messages have aged out, the broker may have no anchor; then the old one stays.
            out[topic] = self._ask(source, topic, ends[topic], now) or out[topic]
        return out

    def _ask(self, source: Log, topic: str, ends: Mapping[MessageQueue, int], now: float) -> str:
        self._asked[topic] = (now, sum(ends.values()))
        return source.anchor(topic, ends)
