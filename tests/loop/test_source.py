"""What a streaming source plans: where reading begins and how much a batch reads. Also the options that it refuses."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from ordered_source.stream_reader import StreamReader
from orderedmq.errors import OptionError, OrderedMQError
from orderedmq.model import MessageQueue
from orderedmq.parking import Parking, Ticket
from tests.contract.support import locked
from tests.live.spark.conftest import numbers
from tests.loop.conftest import LoopRig
from tests.waits import until

OUT = {"topic": "out", "topicQueueNums": 2}


def test_a_trigger_takes_at_most_max_offsets_from_all_queues_in_proportion(rig: LoopRig) -> None:
    rig.topic("in", 2, rows=100)
    sizes = rig.copied(maxOffsetsPerTrigger="30")
    assert sizes == [30, 30, 30, 10]
    assert numbers(rig.bodies("out")) == list(range(100))


def test_a_trigger_takes_at_most_max_bytes(rig: LoopRig) -> None:
    rig.broker.admin.create_topic("in", 2)
    for queue in rig.broker.log.queues("in"):
        rig.broker.log.append({queue: pa.record_batch({"body": pa.array([bytes(100)] * 50, pa.binary())})})
    sizes = rig.copied(maxBytesPerTrigger="1000")
    assert sum(sizes) == 100
    assert max(sizes) <= 10
    # Shares are rounded down, so a batch may have one message less per queue than the limit allows.
    assert min(sizes[:-2]) >= 8


def test_a_message_larger_than_max_bytes_goes_alone(rig: LoopRig) -> None:
    rig.broker.admin.create_topic("in", 1)
    bodies = [b"small", bytes(5000), b"small", b"small"]
    rig.broker.log.append({rig.broker.log.queues("in")[0]: pa.record_batch({"body": pa.array(bodies, pa.binary())})})
    assert rig.copied(maxBytesPerTrigger="1000") == [1, 1, 2]


def test_min_offsets_does_not_keep_available_now_from_ending(rig: LoopRig) -> None:
    rig.topic("in", 2, rows=10)
    assert rig.copied(minOffsetsPerTrigger="1000", maxTriggerDelay="10m") == [10]


def test_available_now_ends_at_the_messages_of_its_start(rig: LoopRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the run is fixed before Spark asks for the first offset."""
    rig.topic("in", 2, rows=20)
    initial_offset = StreamReader.initialOffset

    def preceded_by_messages(reader: StreamReader) -> dict[str, Any]:
        rig.fill("in", 4, first=20)
        return initial_offset(reader)

    monkeypatch.setattr(StreamReader, "initialOffset", preceded_by_messages)
    query = rig.start({"topic": "in", "consumerGroup": "g", "maxOffsetsPerTrigger": "8"}, OUT, available_now=True)
    while query.advance("committed") is not None:
        rig.fill("in", 4, first=24)
    assert query.rows == [8, 8, 4]
    assert numbers(rig.bodies("out")) == list(range(20))


def test_min_offsets_holds_a_trigger_back_until_enough_is_there(rig: LoopRig) -> None:
    rig.topic("in", 2, rows=4)
    source = {"topic": "in", "consumerGroup": "g", "minOffsetsPerTrigger": "10", "maxTriggerDelay": "10m"}
    query = rig.start(source, OUT).process_all_available()
    assert sum(map(len, rig.bodies("out").values())) == 0
    rig.fill("in", 6, first=4)
    query.process_all_available()
    assert query.rows == [10]
    assert numbers(rig.bodies("out")) == list(range(10))


@pytest.mark.parametrize(("start", "expected"), [("earliest", 20), ("latest", 0)])
def test_an_explicit_start_resets_a_group_for_a_fresh_checkpoint_only(rig: LoopRig, start: str, expected: int) -> None:
    rig.topic("in", 2, rows=20)
    rig.copied("first")
    assert rig.copied("second", startingOffsets=start) == ([expected] if expected else [])
    assert rig.copied("second", startingOffsets=start) == []
    assert rig.offsets("g") == {0: 10, 1: 10}


def test_a_group_that_never_committed_begins_where_consume_from_where_says(rig: LoopRig) -> None:
    rig.topic("in", 2, rows=20)
    assert rig.copied(consumeFromWhere="last") == []
    assert rig.offsets("g") == {0: 10, 1: 10}
    rig.fill("in", 4, first=20)
    assert rig.copied(consumeFromWhere="last") == [4]


def test_broadcasting_reads_everything_without_group_or_lock(rig: LoopRig) -> None:
    rig.topic("in", 2, rows=20)
    source = {"topic": "in", "messageModel": "broadcasting"}
    for name in ("one", "two"):
        sink = {"topic": name, "topicQueueNums": 2}
        rig.start(source, sink, name, available_now=True).process_all_available()
        assert numbers(rig.bodies(name)) == list(range(20))
    assert rig.broker.admin.locks() == []
    rig.fill("in", 6, first=20)
    rig.start(source, {"topic": "one"}, "one", available_now=True).process_all_available()
    assert numbers(rig.bodies("one")) == list(range(26))


@pytest.mark.holds("no silent loss of parked messages")
def test_a_pattern_reads_neither_dead_letters_nor_parking_lots(rig: LoopRig) -> None:
    rig.topic("in-a", 1, rows=5)
    [queue] = rig.broker.log.queues("in-a")
    client = rig.broker.groups.join("another query")
    [token] = locked(rig.broker, "in-g", client, [queue])
    rig.broker.groups.dead_letter(token, rig.broker.log.pull(queue, 0, 1, 1 << 20, ("body",)), [0])
    rig.broker.groups.park(token, [Parking(queue, 1, Ticket(1, 1, 1, 0))])
    rig.broker.groups.leave(client)
    rig.topic("out", 1)
    assert len(rig.broker.log.topics()) == 4
    rig.run({"topicPattern": ".*in-.*", "consumerGroup": "g"}, OUT | {"topicQueueNums": 1})
    assert numbers(rig.bodies("out")) == list(range(5))


def test_a_pattern_reads_topics_that_appear_while_the_query_runs(rig: LoopRig) -> None:
    rig.topic("in-a", 1, rows=5)
    query = rig.start({"topicPattern": "in-.*", "consumerGroup": "g"}, OUT).process_all_available()
    assert numbers(rig.bodies("out")) == list(range(5))
    rig.topic("in-b", 1)
    rig.fill("in-b", 5, first=5)
    until(lambda: bool(query.process_all_available()) and numbers(rig.bodies("out")) == list(range(10)))


BAD = [
    (
        "an unknown option is named with its nearest",
        {"topic": "in", "consumerGroup": "g", "failOnDataLos": "x"},
        "failOnDataLoss",
    ),
    ("a missing topic says how to make it", {"topic": "nope", "consumerGroup": "g"}, "ORDEREDMQ_TOPIC.MISSING"),
    ("a missing store shows its path", {"path": "/nonexistent/omq", "topic": "in", "consumerGroup": "g"}, "/nonexistent/omq"),
    ("two brokers conflict", {"topic": "in", "consumerGroup": "g", "namesrvAddr": "x:1"}, "ORDEREDMQ_OPTION.CONFLICT"),
]


@pytest.mark.parametrize(("options", "words"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_input_is_refused_when_the_frame_is_built(rig: LoopRig, options: dict[str, str], words: str) -> None:
    rig.topic("in", 2)
    with pytest.raises(OrderedMQError, match="ORDEREDMQ_") as caught:
        rig.start(options, None)
    assert words in str(caught.value)
    assert rig.broker.admin.locks() == []


def test_a_stream_without_a_group_is_refused(rig: LoopRig) -> None:
    rig.topic("in", 2)
    query = rig.start({"topic": "in"}, OUT)
    with pytest.raises(OptionError, match=r"ORDEREDMQ_OPTION.MISSING.*consumerGroup.*broadcasting"):
        query.process_all_available()


def test_tags_choose_messages_and_offsets_count_all(rig: LoopRig) -> None:
    rig.topic("in", 1)
    rows = [f"0:{number}".encode() for number in range(60)]
    tags = pa.array([("a", "b", None)[number % 3] for number in range(60)])
    rig.broker.log.append(
        {rig.broker.log.queues("in")[0]: pa.record_batch({"body": pa.array(rows, pa.binary()), "tags": tags})}
    )
    expected = [number for number in range(60) if number % 3 == 0]
    assert sorted(rig.copied(tags="a || c", maxOffsetsPerTrigger="20")) == [6, 7, 7]
    assert numbers(rig.bodies("out")) == expected
    assert rig.offsets("g") == {0: 60}
    rig.fill("in", 5, first=60)
    assert rig.copied(tags="a || c") == []
    assert rig.offsets("g") == {0: 65}


def test_a_batch_has_partitions_for_queues_with_new_messages_only(rig: LoopRig) -> None:
    rig.topic("in", 3, rows=6)
    query = rig.start({"topic": "in", "consumerGroup": "g"}, OUT).process_all_available()
    rig.broker.log.append({MessageQueue("in", "embedded", 1): pa.record_batch({"body": pa.array([b"1:6"], pa.binary())})})
    query.process_all_available()
    every = {f"in/embedded/{number}": (0, 2) for number in range(3)}
    assert [batch.ranges for batch in query.batches] == [every, {"in/embedded/1": (2, 3)}]
