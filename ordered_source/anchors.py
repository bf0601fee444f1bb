"""Topic anchors, which a query stores in its offsets to check later whether a topic is still the one that it read.

Getting an anchor may cost a request to the broker. Over RocketMQ, an anchor names one of the messages that were read (`Log.anchor`), so
it becomes invalid when this message is deleted. So anchors are copied from offset to offset, and each batch refreshes at most one old
anchor. A topic without an anchor gets one in the next batch.
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
    """Refreshes anchors. It remembers when each anchor was requested; the anchors themselves are in the offsets."""

    def __init__(self) -> None:
        #: Topic -> monotonic seconds of the last request, and the sum of the topic's next offsets at that time.
        self._asked: dict[str, tuple[float, int]] = {}

    def of(
        self, source: Log, topics: Iterable[str], kept: Mapping[str, str], following: Mapping[MessageQueue, int], now: float
    ) -> dict[str, str]:
        """Return the anchor of each topic, to be stored in the offset at the end of the next batch.

        ``kept``: the anchors in the previous offset, without topics that were deleted or recreated. ``following``: the next offset of
        each queue after the batch. Raises TopicError MISSING.
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
            # If retention has deleted the messages, the broker may have no anchor. In that case, keep the old anchor.
            out[topic] = self._ask(source, topic, ends[topic], now) or out[topic]
        return out

    def _ask(self, source: Log, topic: str, ends: Mapping[MessageQueue, int], now: float) -> str:
        self._asked[topic] = (now, sum(ends.values()))
        return source.anchor(topic, ends)
