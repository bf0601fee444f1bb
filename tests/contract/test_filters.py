"""The Log protocol with a filter: a pull returns matching rows, and the offset after the last row that it looked at."""

from __future__ import annotations

import random

import pytest

from orderedmq.broker import Broker
from orderedmq.model import MessageQueue
from orderedmq.rows.filters import Filter
from orderedmq.schema import MESSAGE_SCHEMA, select_schema
from tests.contract.support import EVERYTHING, needs, queues_of, refused, rows

A = Filter(tags=("a",))


def matching(
    broker: Broker, queue: MessageQueue, begin: int, end: int, wanted: Filter, columns: tuple[str, ...] = ("queue_offset",)
) -> list:
    """Return all matching rows of [begin, end), in as many pulls as necessary."""
    out: list = []
    at = begin
    while at < end:
        batch, after = broker.log.pull_matching(queue, at, end - at, EVERYTHING, columns, wanted)
        assert batch.schema == select_schema(columns)
        assert at < after <= end
        out += batch.to_pylist()
        at = after
    return out


def offsets(broker: Broker, queue: MessageQueue, begin: int, end: int, wanted: Filter) -> list[int]:
    return [row["queue_offset"] for row in matching(broker, queue, begin, end, wanted)]


def test_only_rows_with_one_of_the_tags_come_and_the_others_are_passed_by(broker: Broker):
    queue = queues_of(broker)[0]
    tags = ["a", "b", None, "a", "Aa", "BB", "b c", "aa", "a"]
    broker.log.append({queue: rows(range(9), tags=tags)})
    assert offsets(broker, queue, 0, 9, A) == [0, 3, 8]
    assert offsets(broker, queue, 0, 9, Filter(tags=("a", "b c"))) == [0, 3, 6, 8]
    assert offsets(broker, queue, 1, 8, A) == [3], "rows before or after the range must not match"
    assert offsets(broker, queue, 0, 9, Filter(tags=("none of them",))) == []


def test_tags_whose_java_hashes_are_the_same_are_told_apart(broker: Broker):
    """Brokers compare hashes of tags, and "Aa" and "BB" have the same hash."""
    queue = queues_of(broker)[0]
    broker.log.append({queue: rows(range(100), tags=["Aa", "BB"] * 50)})
    assert offsets(broker, queue, 0, 100, Filter(tags=("Aa",))) == list(range(0, 100, 2))
    assert offsets(broker, queue, 0, 100, Filter(tags=("BB",))) == list(range(1, 100, 2))


@pytest.mark.parametrize("columns", [("body",), ("tags", "body"), tuple(MESSAGE_SCHEMA.names)])
def test_columns_come_in_the_order_asked_for_with_a_filter(broker: Broker, columns: tuple[str, ...]):
    queue = queues_of(broker)[0]
    broker.log.append({queue: rows(["x", "y", "z"], tags=["b", "a", "a"])})
    found = matching(broker, queue, 0, 3, A, columns)
    assert [row["body"] for row in found] == [b"y", b"z"]


def test_a_filtered_pull_stops_at_its_offsets_and_at_the_end(broker: Broker):
    queue = queues_of(broker)[0]
    broker.log.append({queue: rows(range(10), tags=["a", "b"] * 5)})
    for offset in (0, 4, 9):
        for most in (1, 3, 100):
            batch, after = broker.log.pull_matching(queue, offset, most, EVERYTHING, ("queue_offset",), A)
            assert offset < after <= min(10, offset + most)
            assert batch.column(0).to_pylist() == [at for at in range(offset, after) if at % 2 == 0]
    batch, after = broker.log.pull_matching(queue, 10, 5, EVERYTHING, ("body",), A)
    assert (batch.num_rows, batch.schema, after) == (0, select_schema(("body",)), 10)
    with refused("DATA_LOSS.BEYOND_END", 11, queue):
        broker.log.pull_matching(queue, 11, 5, EVERYTHING, ("body",), A)


def test_bytes_bound_a_filtered_pull_and_lose_nothing(broker: Broker):
    queue = queues_of(broker)[0]
    broker.log.append({queue: rows([bytes(100)] * 40, tags=["a", "b"] * 20)})
    at, found = 0, []
    while at < 40:
        batch, after = broker.log.pull_matching(queue, at, 40, 250, ("body", "queue_offset"), A)
        assert batch.num_rows <= 2
        assert after > at
        found += batch.column(1).to_pylist()
        at = after
    assert found == list(range(0, 40, 2))


@needs("trim")
def test_a_filtered_pull_before_the_first_message_names_what_is_gone(broker: Broker):
    queue = queues_of(broker)[0]
    broker.log.append({queue: rows(["a", "b", "c"], tags=["b", "b", "b"])})
    broker.admin.trim("orders", {queue: 3})
    broker.log.append({queue: rows(["d"], tags=["a"])})
    with refused("DATA_LOSS.AGED_OUT", "1 to 2 (2)", queue):
        broker.log.pull_matching(queue, 1, 10, EVERYTHING, ("body",), A)


@pytest.mark.parametrize("share", [0.5, 0.02, 0.0])
def test_many_messages_with_any_share_of_matches(broker: Broker, share: float):
    """There are runs of about ten thousand messages without a match, and pulls that return fewer rows than requested."""
    queue = queues_of(broker)[0]
    draw = random.Random(int(share * 100))
    tags = ["a" if draw.random() < share or at == 33_000 else draw.choice(["b", None]) for at in range(40_000)]
    broker.log.append({queue: rows(range(40_000), tags=tags)})
    expected = [at for at, tag in enumerate(tags) if tag == "a"]
    assert offsets(broker, queue, 0, 40_000, A) == expected
    assert offsets(broker, queue, 7, 33_001, A) == [at for at in expected if 7 <= at < 33_001]
    assert [int(row["body"]) for row in matching(broker, queue, 0, 40_000, A, ("body",))] == expected
