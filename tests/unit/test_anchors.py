"""Tests when a query reads the anchors of its topics again. Anchors distinguish a topic from a later topic of the same name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ordered_source.positions import REFRESH_MESSAGES, REFRESH_SECONDS, Anchors
from orderedmq.model import MessageQueue


class FakeLog:
    """A log whose anchor for a topic is the topic's highest offset. A topic without messages has no anchor."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.aged = False

    def anchor(self, topic: str, offsets: Mapping[MessageQueue, int]) -> str:
        self.asked.append(topic)
        assert all(queue.topic == topic for queue in offsets)
        highest = max(offsets.values(), default=0)
        return str(highest) if highest and not self.aged else ""


class Query:
    """A query that logs one batch after another, and resumes from the anchors of the last one."""

    def __init__(self, *topics: str) -> None:
        self.log, self.topics = FakeLog(), topics
        self.anchors, self.kept = Anchors(), dict[str, str]()
        self.now = 1000.0

    def batch(self, **ends: int) -> dict[str, str]:
        self.log.asked.clear()
        following = {MessageQueue(topic, "b", 0): end for topic, end in ends.items()}
        source: Any = self.log
        self.kept = self.anchors.of(source, self.topics, self.kept, following, self.now)
        return self.kept


def test_reads_the_anchor_again_after_a_time_or_many_messages() -> None:
    query = Query("a")
    query.batch(a=10)
    query.now += REFRESH_SECONDS
    assert query.batch(a=20) == {"a": "20"}
    assert query.batch(a=19 + REFRESH_MESSAGES) == {"a": "20"}
    assert query.batch(a=20 + REFRESH_MESSAGES) == {"a": str(20 + REFRESH_MESSAGES)}


def test_reads_the_anchor_of_one_topic_at_a_time_the_oldest_first() -> None:
    query = Query("a", "b", "c")
    assert query.batch(a=1, b=2, c=3) == {"a": "1", "b": "2", "c": "3"}
    query.now += REFRESH_SECONDS
    asked = []
    for number in range(4):
        query.now += 1
        query.batch(a=10 + number, b=20, c=30)
        asked.append(list(query.log.asked))
    assert asked == [["a"], ["b"], ["c"], []]


def test_reads_the_anchor_of_an_empty_topic_with_its_first_messages() -> None:
    query = Query("a", "b")
    assert query.batch(a=10, b=0) == {"a": "10", "b": ""}
    assert query.batch(a=20, b=0) == {"a": "10", "b": ""}
    assert query.batch(a=20, b=5) == {"a": "10", "b": "5"}


def test_keeps_the_anchor_once_its_message_has_aged_out() -> None:
    query = Query("a")
    query.batch(a=10)
    query.log.aged = True
    query.now += REFRESH_SECONDS
    assert query.batch(a=20) == {"a": "10"}
    query.kept = {"a": ""}
    assert query.batch(a=30) == {"a": ""}
    assert query.log.asked == []


def test_reads_the_anchor_of_a_recreated_topic_at_once() -> None:
    query = Query("a")
    query.batch(a=10)
    query.kept = {}
    assert query.batch(a=3) == {"a": "3"}
