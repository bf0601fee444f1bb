"""Queries and sinks whose topics are resized while they run: no key is out of order, and no row is lost or written twice."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StructField, StructType

from ordered_source import stream_reader
from ordered_source.batch_reader import BatchReader
from ordered_source.columns import COLUMN_TYPES
from ordered_source.positions import STUCK_SECONDS
from orderedmq.errors import MessageError
from orderedmq.ownership.lock import LockToken
from orderedmq.parking import Parking, Ticket
from orderedmq.tools.producer import Producer
from tests.contract.support import locked
from tests.loop.conftest import EACH_LOOP, LoopRig
from tests.micro_batches import MicroBatchLoop, Point

KEYS = [f"key-{number}" for number in range(24)]
OUT = {"topic": "out", "onKeyConflict": "ignore"}
KINDS: dict[str, dict[str, Any]] = {
    "exclusive": {"consumerGroup": "g"},
    "shared": {"consumerGroup": "g", "assignment": "shared", "lockTimeout": "1s"},
    "broadcasting": {"messageModel": "broadcasting"},
}

#: With two members, each one gets one of the old queues and one of the new ones of a topic that grows from two queues to four.
CIRCLE = {"allocateMessageQueueStrategy": "AVG_BY_CIRCLE"}


class Resized:
    """A topic ``in`` that is resized, its producer, and queries that copy it to ``out``, a topic with one queue."""

    def __init__(self, rig: LoopRig, queues: int = 2, topic: str = "in") -> None:
        self.rig = rig
        self.topic = topic
        rig.topic(topic, queues)
        self.producer = Producer(rig.broker.log, topic)
        self.sent = 0

    def send(self, messages: int = 2) -> None:
        """Send messages of each key, whose bodies are the topic, the key and the number of the call."""
        for number in range(self.sent, self.sent + messages):
            body = pa.array([f"{self.topic} {key} {number}".encode() for key in KEYS], pa.binary())
            self.producer.send(pa.record_batch({"body": body, "sharding_key": KEYS}))
        self.sent += messages

    def resize(self, queues: int) -> None:
        self.rig.broker.admin.resize_topic(self.topic, queues)

    def start(self, kind: str = "exclusive", checkpoint: str = "ck", **more: Any) -> MicroBatchLoop:
        source = {"topic": self.topic, "startingOffsets": "earliest", **KINDS[kind], **more.pop("source", {})}
        return self.rig.start(source, OUT, checkpoint, **more)

    def require_order(self, topic: str = "out") -> None:
        """Require that each key's messages are in ``topic`` once and in the order in which they were sent."""
        copied: dict[str, list[int]] = defaultdict(list)
        for bodies in self.rig.bodies(topic).values():
            for body in bodies:
                of, key, number = body.split()
                if of == self.topic:
                    copied[key].append(int(number))
        assert copied == {key: list(range(self.sent)) for key in KEYS}


def batch_rows(options: dict[str, str], schema: StructType) -> Iterator[pa.RecordBatch]:
    reader = BatchReader(options, schema)
    for partition in reader.partitions():
        yield from reader.read(partition)


def stream_rows(options: dict[str, str], schema: StructType) -> Iterator[pa.RecordBatch]:
    options = {**options, "messageModel": "broadcasting", "startingOffsets": "earliest"}
    reader = stream_reader.StreamReader(options, schema)
    start = reader.initialOffset()
    while (end := reader.latestOffset(start, ReadAllAvailable())) != start:
        for partition in reader.partitions(start, end):
            yield from reader.read(partition)
        start = end
    reader.stop()


@pytest.mark.holds("resize")
@pytest.mark.parametrize("read", [batch_rows, stream_rows])
def test_key_sequences_grow_along_the_messages_of_a_key(
    resized: Resized, read: Callable[[dict[str, str], StructType], Iterator[pa.RecordBatch]]
) -> None:
    for count in (4, 3, 8, 2):
        resized.send()
        resized.resize(count)
    resized.send()
    columns = ("queue_offset", "key_sequence", "sharding_key", "body")
    schema = StructType([StructField(name, COLUMN_TYPES[name]) for name in columns])
    rows = [row for batch in read({"path": str(resized.rig.path), "topic": "in"}, schema) for row in batch.to_pylist()]
    for key in KEYS:
        of_key = sorted((row["key_sequence"], row["body"]) for row in rows if row["sharding_key"] == key)
        assert [body for _, body in of_key] == [f"in {key} {number}".encode() for number in range(resized.sent)]


def step(query: MicroBatchLoop) -> None:
    """Run a batch, or find that there is nothing to read."""
    while query.advance() not in ("committed", "idle"):
        pass


@pytest.fixture
def resized(rig: LoopRig) -> Resized:
    rig.topic("out", 1)
    return Resized(rig)


@pytest.mark.holds("resize", "no overtaking")
@EACH_LOOP
@pytest.mark.parametrize("kind", KINDS)
def test_keys_keep_their_order_over_several_generations(resized: Resized, kind: str) -> None:
    query = resized.start(kind, source={"maxOffsetsPerTrigger": "17"})
    for count in (4, 8, 3, 2, 7, 1, 5):
        resized.send()
        query.advance("committed")
        resized.resize(count)
    resized.send()
    query.process_all_available()
    resized.require_order()


@pytest.mark.holds("resize")
@EACH_LOOP
def test_members_of_a_group_wait_for_queues_of_each_other(resized: Resized) -> None:
    queries = [resized.start("shared", name, source={"maxOffsetsPerTrigger": "17"}) for name in ("one", "two")]
    for count in (4, 8, 3, 2, 7, 1, 5):
        resized.send()
        for query in queries:
            step(query)
        resized.resize(count)
    resized.send()
    for _ in range(30):
        for query in queries:
            query.process_all_available()
    resized.require_order()


@pytest.mark.holds("resize")
@EACH_LOOP
@pytest.mark.parametrize("kind", ["exclusive", "broadcasting"])
@pytest.mark.parametrize("point", ["planned", "logged", "written", "published", "committed"])
def test_a_query_that_is_killed_in_the_batch_before_a_barrier_repeats_that_batch_alone(
    resized: Resized, kind: str, point: Point
) -> None:
    resized.send()
    resized.resize(4)
    resized.send()
    query = resized.start(kind)
    query.advance(point)
    query.kill()
    resized.resize(3)
    resized.send()
    resized.start(kind).process_all_available()
    resized.require_order()


@pytest.mark.holds("resize")
@pytest.mark.parametrize("kind", KINDS)
def test_available_now_reads_through_the_generations_in_one_run_with_one_more_batch_for_each(
    resized: Resized, kind: str
) -> None:
    resized.send()
    for number, count in enumerate((4, 8, 3), 1):
        resized.resize(count)
        resized.send()
        # Each run is of another group, or of another query without a group.
        group = {} if kind == "broadcasting" else {"consumerGroup": f"g{number}"}
        query = resized.start(kind, f"ck {number}", available_now=True, source=group)
        query.process_all_available()
        assert len(query.rows) == number + 1
    copies = resized.rig.bodies("out")[0]
    assert len(copies) == len(KEYS) * (4 + 6 + 8)


def test_available_now_waits_for_queues_of_other_members_for_a_bounded_time(
    resized: Resized, caplog: pytest.LogCaptureFixture
) -> None:
    other = resized.start("shared", "other", source=CIRCLE).process_all_available()
    resized.send()
    resized.resize(4)
    resized.send()
    # The other member holds the old queues and processes nothing. This run gets one of the new ones.
    run = resized.start("shared", "one", available_now=True, source={**CIRCLE, "lockTimeout": "300ms"})
    run.process_all_available()
    assert run.rows == []
    assert "they wait for queues that other members hold" in caplog.text
    other.process_all_available()
    resized.start("shared", "one", available_now=True, source=CIRCLE).process_all_available()
    other.process_all_available()
    resized.require_order()


@pytest.mark.holds("resize")
def test_two_topics_of_a_query_have_barriers_of_their_own(resized: Resized) -> None:
    other = Resized(resized.rig, 3, "in2")
    query = resized.start(source={"topic": "in,in2", "maxOffsetsPerTrigger": "29"})
    for count in (4, 1, 6):
        resized.send()
        other.send()
        query.advance("committed")
        resized.resize(count)
        other.resize(7 - count)
    query.process_all_available()
    resized.require_order()
    other.require_order()


def test_a_group_that_begins_at_the_end_waits_for_nothing(resized: Resized) -> None:
    resized.send()
    resized.resize(4)
    resized.send()
    resized.sent = 0
    query = resized.start(source={"startingOffsets": "latest"}).process_all_available()
    resized.send()
    assert query.process_all_available().rows == [48]
    resized.require_order()


def test_a_seek_back_over_a_resize_reads_the_generations_in_order_again(resized: Resized) -> None:
    resized.send()
    resized.resize(4)
    resized.send()
    resized.start().process_all_available().stop()
    resized.require_order()
    resized.rig.broker.admin.seek("g", dict.fromkeys(resized.rig.broker.log.queues("in"), 0))
    query = resized.start().process_all_available()
    assert len(query.rows) == 2
    bodies = [body for body in resized.rig.bodies("out")[0] if " key-7 " in body]
    assert [int(body.split()[2]) for body in bodies] == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.holds("resize", "order per key")
def test_a_parked_key_holds_its_new_queue_until_it_is_dropped(resized: Resized, caplog: pytest.LogCaptureFixture) -> None:
    resized.send()
    broker, log = resized.rig.broker, resized.rig.broker.log
    queues = log.queues("in")
    tokens: list[LockToken] = locked(broker, "g", broker.groups.join("me"), queues)
    ends = {queue: at.max_offset for queue, at in log.bounds(queues).items()}
    broker.groups.park(tokens[1], [Parking(queues[1], 0, Ticket(0, 1, 1, -1))])
    broker.groups.commit({token: ends[token.queue] for token in tokens})
    broker.groups.unlock(tokens)
    key = log.pull(queues[1], 0, 1, 1 << 20, ("sharding_key",)).column(0)[0].as_py()
    resized.resize(4)
    resized.send()
    query = resized.start(source={"parkingLot": "true"}, rows=lambda batch: batch.select(["body", "sharding_key"]))
    query.process_all_available()
    unread = {
        queue.queue_id: at.max_offset - broker.groups.offsets("g", [queue])[queue]
        for queue, at in log.bounds(log.queues("in")).items()
    }
    assert unread[3] == log.bounds(log.queues("in"))[log.queues("in")[3]].max_offset > 0
    assert [unread[number] for number in range(3)] == [0, 0, 0]
    latest = query.reader.reportLatestOffset()
    assert latest is not None
    assert json.loads(json.dumps(latest))["waits"] == {"in/embedded/3": f"queue 1, where key {key!r} is parked"}


@pytest.mark.holds("resize")
def test_a_queue_that_waits_for_a_minute_is_one_warning_with_the_reason(
    resized: Resized, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(stream_reader, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time, sleep=time.sleep))
    resized.start("shared", "holder", source=CIRCLE).process_all_available()
    resized.send()
    resized.resize(4)
    resized.send()
    query = resized.start("shared", "one", source=CIRCLE)
    for _ in range(4):
        query.process_all_available()
        now[0] += STUCK_SECONDS
    warnings = [record.getMessage() for record in caplog.records if "was resized" in record.getMessage()]
    assert len(warnings) == 1
    assert "it has waited for queue" in warnings[0]
    assert "is processed up to 0 of" in warnings[0]


# -- sinks


@pytest.mark.holds("sink once", "same key, same queue", "resize")
@EACH_LOOP
@pytest.mark.parametrize("point", ["planned", "logged", "written", "published", "committed"])
@pytest.mark.parametrize("options", [{}, {"messageQueueSelector": "tests.loop.test_resize:by_length"}], ids=["hash", "own"])
def test_a_sink_whose_topic_is_resized_in_a_batch_routes_its_rows_again(
    rig: LoopRig, point: Point, options: dict[str, str]
) -> None:
    resized = Resized(rig)
    rig.topic("out", 2)
    query = rig.start(
        {"topic": "in", "consumerGroup": "g", "startingOffsets": "earliest"}, {**OUT, "topicQueueNums": 2, **options}
    )
    for count in (5, 3):
        resized.send()
        query.advance(point)
        rig.broker.admin.resize_topic("out", count)
        resized.send()
        query.process_all_available()
        copies = rig.bodies("out")
        last = defaultdict(set)
        for queue, bodies in copies.items():
            for body in bodies:
                if int(body.split()[2]) >= resized.sent - 2:
                    last[body.split()[1]].add(queue)
        assert set(map(len, last.values())) == {1}
        assert max(max(queues) for queues in last.values()) < count
    assert sorted(body for bodies in rig.bodies("out").values() for body in bodies) == sorted(
        f"in {key} {number}" for key in KEYS for number in range(resized.sent)
    )
    assert bool(rig.broker.log.topic("out").own_selector) == bool(options)


def by_length(keys: pa.Array, queues: int) -> list[int]:
    """A selector of the user's own."""
    return [(len(key) * 7 + int(key[4:])) % queues for key in keys.to_pylist()]


def test_rows_that_name_a_queue_that_is_gone_are_refused(rig: LoopRig) -> None:
    Resized(rig)
    rig.broker.admin.resize_topic("in", 1)
    some = pa.record_batch({"body": pa.array([b"a"], pa.binary()), "queue_id": pa.array([1], pa.int32())})
    with pytest.raises(MessageError, match="BAD_QUEUE_ID"):
        rig.save({"topic": "in", "messageQueueSelector": "queueId"}, some)
