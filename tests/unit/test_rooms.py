"""Which queues are in which machine room, and which queues a sink then uses."""

from __future__ import annotations

import pyarrow as pa
import pytest

from orderedmq.errors import TopicError
from orderedmq.model import MessageQueue
from orderedmq.ownership.allocate import has_room, queues_in
from orderedmq.routing.selector import selector

QUEUES = [MessageQueue("t", broker, number) for broker in ("a@one", "a@two", "b@one", "plain") for number in range(2)]


@pytest.mark.parametrize(
    ("name", "found"),
    [("a@one", True), ("a@one@", True), ("a", False), ("@a", False), ("x@a", False), ("a@b@c", False), ("", False)],
)
def test_a_broker_is_in_the_room_before_its_at_sign(name, found):
    assert has_room(name, ("a", "b")) is found


def test_the_queues_of_rooms_keep_their_order():
    assert queues_in("t", QUEUES, ("b",)) == QUEUES[4:6]
    assert queues_in("t", QUEUES, ("b", "a")) == QUEUES[:6]


@pytest.mark.parametrize("queues", [QUEUES, []])
def test_a_room_without_a_queue_is_named(queues):
    with pytest.raises(
        TopicError,
        match=r"NO_SUCH_QUEUE.*machineRooms: topic 't' has no queue in room 'plain'.*plain@.* wait for the broker that is away",
    ):
        queues_in("t", queues, ("a", "plain") if queues else ("plain",))


def test_a_key_goes_to_the_queue_that_its_hash_chooses_among_those_of_the_rooms():
    rows = pa.record_batch({"body": [b"1", b"2", b"3"], "sharding_key": ["a", "hello", None]})
    chosen = selector("machineRoom", 0, by_content=True).select(rows, rows.column("sharding_key"), 4).tolist()
    assert chosen == selector("hash", 0, by_content=True).select(rows, rows.column("sharding_key"), 4).tolist()
    assert chosen[:2] == [97 % 4, 99162322 % 4]
