"""Routes that lack a part of a topic: the nameserver has not heard of a broker, queues were removed, or a broker is read-only."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

import orderedmq
from ordered_sink.writer import target_queues
from ordered_source.columns import full_schema
from ordered_source.stream_reader import StreamReader
from orderedmq.broker import Broker
from orderedmq.errors import DataLossError, RocketMQUnavailableError, TopicError
from orderedmq.model import MessageQueue
from orderedmq.options.parse import parse
from orderedmq.options.sink import SinkOptions
from orderedmq.ownership.lock import LockToken
from orderedmq.rocketmq.group import groups as groups_module
from orderedmq.rocketmq.local.probe import ask
from orderedmq.rocketmq.local.servers import BrokerServer, Cluster
from orderedmq.rocketmq.messages import log as log_module
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.wire import admin_requests
from orderedmq.tools.producer import Producer
from tests.live.rocketmq.peers import Peers
from tests.micro_batches import Checkpoint, MicroBatchLoop
from tests.stopped_readers import stopped
from tests.waits import soon, until

UPDATE_BROKER_CONFIG = 25

#: Makes a `MicroBatchLoop`.
Query = Callable[..., MicroBatchLoop]


class World:
    """Two brokers and a topic of four queues with ten messages each."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.broker: Broker = orderedmq.connect(namesrv_addr=cluster.address)
        self.topic = f"partial-{uuid.uuid4().hex[:8]}"
        self.broker.admin.create_topic(self.topic, 4)
        self.queues = self.broker.log.queues(self.topic)
        for queue in self.queues:
            self.broker.log.append({queue: pa.record_batch({"body": [b"%d" % number for number in range(10)]})})

    @contextlib.contextmanager
    def reader(self, **options: str) -> Iterator[StreamReader]:
        common = {"namesrvAddr": self.cluster.address, "topic": self.topic, "consumerGroup": f"{self.topic}-g"}
        reader = StreamReader({**common, "consumeFromWhere": "first", **options}, full_schema())
        with stopped(reader):
            yield reader

    def started(self) -> dict[str, Any]:
        """Run a query that plans and processes everything, but ends before it commits to the group. Return its offset."""
        with self.reader() as reader:
            return reader.latestOffset(reader.initialOffset(), ReadAllAvailable())

    @contextlib.contextmanager
    def half_known(self) -> Iterator[None]:
        """Restart the nameserver, and make only broker-b report to it, not broker-a."""
        first, second = self.cluster.brokers
        first.pause()
        self.cluster.namesrv.restart()
        ask(second.address, UPDATE_BROKER_CONFIG, body=b"brokerPermission=6\n")
        with Client(self.cluster.address) as client:
            until(lambda: set(client.cluster(soon()).brokers) == {second.name}, "only broker-b has reported")
        try:
            yield
        finally:
            first.resume()
            until(first.ready, "broker-a has reported")
            with Client(self.cluster.address) as client:
                until(lambda: len(client.cluster(soon()).brokers) == 2, "the nameserver knows both brokers")

    def reads(self, query: Query, checkpoint: Checkpoint | None = None, **options: object) -> tuple[MicroBatchLoop, list[str]]:
        """Start a query and return it with a list to which it adds the bodies that it reads, as "queue body"."""
        bodies: list[str] = []
        source = {"namesrvAddr": self.cluster.address, "topic": self.topic, "consumerGroup": f"{self.topic}-g"}

        def record(rows: pa.Table, number: int) -> None:
            del number
            columns = (rows.column(name).to_pylist() for name in ("broker_name", "queue_id", "body"))
            bodies.extend(f"{name}/{number} {body.decode()}" for name, number, body in zip(*columns, strict=True))

        return query({**source, "startingOffsets": "earliest", **options}, record, checkpoint), bodies

    @contextlib.contextmanager
    def unreadable(self, how: str, broker: BrokerServer) -> Iterator[None]:
        """Forbid reading at one broker: of the topic, or of all its topics."""

        def allow(perm: int) -> None:
            if how == "broker":
                ask(broker.address, UPDATE_BROKER_CONFIG, body=b"brokerPermission=%d\n" % perm)
            else:
                with Client(self.cluster.address) as client:
                    client.call_address(broker.address, admin_requests.create_topic(self.topic, 2, perm=perm), soon())
            until(lambda: (broker.name in self._readable()) is (perm == 6), "the route has the permission")

        allow(2)
        try:
            yield
        finally:
            allow(6)

    def _readable(self) -> set[str]:
        return {queue.broker_name for queue in self.broker.log.readable(self.topic)}

    def resize(self, broker: BrokerServer, read: int, write: int) -> None:
        """Give the topic these numbers of queues for reading and for writing at one broker."""
        request = admin_requests.create_topic(self.topic, 1)
        counts = {"readQueueNums": str(read), "writeQueueNums": str(write)}
        with Client(self.cluster.address) as client:
            client.call_address(broker.address, replace(request, ext={**request.ext, **counts}), soon())
        until(lambda: len(self.broker.log.targets(self.topic)) == 2 + write, "the route has the numbers")


@pytest.fixture
def world(two_brokers: Cluster) -> Iterator[World]:
    world = World(two_brokers)
    yield world
    world.broker.close()


def positions(offset: dict[str, Any], topic: str) -> dict[MessageQueue, int]:
    brokers = offset["next"][topic]
    return {MessageQueue(topic, name, int(number)): at for name, ids in brokers.items() for number, at in ids.items()}


def read_all(run: MicroBatchLoop) -> MicroBatchLoop:
    """Run batches until there is nothing to read, also directly after a call that found nothing."""
    if run.reader is not None:
        run.reader._quiet_until = 0.0
    return run.process_all_available()


def blame(call: Callable[[], object]) -> str:
    """Return the error of a call with a short timeout. Retry if the error names broker-b, which runs but may be slow."""
    for _ in range(5):
        with pytest.raises(RocketMQUnavailableError) as caught:
            call()
        if "broker-b" not in caught.value.message:
            break
    return str(caught.value)


def test_a_query_that_is_restarted_forgets_no_queue_of_a_broker_that_the_nameserver_does_not_know_yet(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forgotten queue would resume at the group's older offset, because a batch is committed when the next one begins."""
    monkeypatch.setattr(groups_module, "_LOCK_TIMEOUT", 2.0)
    processed = world.started()
    assert positions(processed, world.topic) == dict.fromkeys(world.queues, 10)
    with world.half_known():
        with world.reader() as reader:
            assert re.search(r"NO_BROKER.*broker-a", blame(lambda: reader.latestOffset(processed, ReadAllAvailable())))
        # The reader must have released the locks that broker-b granted.
        with orderedmq.connect(namesrv_addr=world.cluster.address) as other:
            answers = other.groups.lock(f"{world.topic}-g", other.groups.join("other"), world.queues[2:])
            assert all(isinstance(answer, LockToken) for answer in answers.values()), answers
    with world.reader() as reader:
        world.broker.log.append({world.queues[0]: pa.record_batch({"body": [b"more"]})})
        later = reader.latestOffset(processed, ReadAllAvailable())
        assert positions(later, world.topic) == {**dict.fromkeys(world.queues, 10), world.queues[0]: 11}
        assert not later["entered"], "no range may be read again"


def test_removed_queues_are_a_loss_of_data_also_after_a_restart(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with world.reader() as reader:
        offset = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
        with Client(world.cluster.address) as client:
            client.call_address(world.cluster.brokers[1].address, admin_requests.create_topic(world.topic, 1), soon())
        gone = world.queues[3]
        until(lambda: gone not in world.broker.log.queues(world.topic), "the route no longer has the queue")
        with pytest.raises(DataLossError, match=rf"QUEUE_DELETED\] queue {gone} .*up to 10"):
            reader.latestOffset(offset, ReadAllAvailable())
    with world.reader() as reader, pytest.raises(DataLossError, match="QUEUE_DELETED"):
        reader.latestOffset(offset, ReadAllAvailable())
    world.broker.log.append({world.queues[0]: pa.record_batch({"body": [b"more"]})})
    with world.reader(failOnDataLoss="false") as reader, caplog.at_level(logging.WARNING, "orderedmq"):
        for _ in range(3):
            later = reader.latestOffset(offset, ReadAllAvailable())
            reader._quiet_until = 0.0
        assert positions(later, world.topic) == {**dict.fromkeys(world.queues, 10), world.queues[0]: 11}
    assert caplog.text.count("QUEUE_DELETED") == 1


@pytest.mark.parametrize("change", [{"writeQueueNums": "1"}, {"perm": "4"}], ids=["fewer_to_write", "read_only"])
def test_rows_go_where_java_sends_them_while_a_part_of_a_topic_is_for_reading_only(
    world: World, peers: Peers, change: dict[str, str]
) -> None:
    """Before a topic shrinks, its last queues become read-only; before a broker is retired, the whole broker becomes read-only."""
    request = admin_requests.create_topic(world.topic, 2)
    less = replace(request, ext={**request.ext, **change})
    with Client(world.cluster.address) as client:
        client.call_address(world.cluster.brokers[1].address, less, soon())
    count = 3 if "writeQueueNums" in change else 2
    until(lambda: len(world.broker.log.targets(world.topic)) == count, "the route has the change")
    assert world.broker.log.queues(world.topic) == world.queues, "all queues must remain readable"
    java = peers.producer(world.cluster.address)
    keys = [f"key-{number}" for number in range(30)]
    there = [java.send(world.topic, b"java", key).queue for key in keys]
    java.stop()
    assert len(set(there)) == count
    Producer(world.broker.log, world.topic).send(pa.record_batch({"body": [b"ours"] * 30, "sharding_key": keys}))
    queues_by_key = {}
    for queue in world.queues:
        rows = world.broker.log.pull(queue, 10, 100, 1 << 20, ("body", "sharding_key")).to_pylist()
        queues_by_key.update(
            {row["sharding_key"]: (queue.broker_name, queue.queue_id) for row in rows if row["body"] == b"ours"}
        )
    assert [queues_by_key[key] for key in keys] == there


def test_a_topic_for_reading_only_is_refused_before_any_row(world: World) -> None:
    with Client(world.cluster.address) as client:
        for broker in world.cluster.brokers:
            client.call_address(broker.address, admin_requests.create_topic(world.topic, 2, perm=4), soon())
        until(lambda: not client.route(world.topic, soon(), fresh=True).publish_list(), "the route has the change")
    options = {"namesrvAddr": world.cluster.address, "topic": world.topic}
    for more in ({}, {"topicQueueNums": "4"}):
        parsed = parse(SinkOptions, {**options, **more}, streaming=False)
        with pytest.raises(TopicError, match="NO_SUCH_QUEUE"):
            target_queues(world.broker, world.topic, parsed)
    with pytest.raises(TopicError, match="NO_SUCH_QUEUE"):
        Producer(world.broker.log, world.topic)


@pytest.mark.holds("unreadable is not lost")
@pytest.mark.parametrize("how", ["broker", "topic"])
def test_messages_of_a_broker_that_may_not_be_read_for_a_moment_are_not_lost(
    world: World, query: Query, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with failOnDataLoss=false: the query waits, then fails, and reads them later."""
    second = world.cluster.brokers[1]
    expected = sorted(f"{queue.broker_name}/{queue.queue_id} {number}" for queue in world.queues for number in range(10))
    first, bodies = world.reads(query, failOnDataLoss="false")
    read_all(first)
    assert sorted(bodies) == expected
    for queue in world.queues:
        world.broker.log.append({queue: pa.record_batch({"body": [b"later"]})})
    with world.unreadable(how, second):
        with monkeypatch.context() as patch:
            patch.setattr(log_module, "READABLE_PATIENCE", 1.0)
            with pytest.raises(RocketMQUnavailableError, match="NOT_READABLE") as caught:
                read_all(first)
        assert "failOnDataLoss" not in caught.value.message
        resumed, later = world.reads(query, first.checkpoint, failOnDataLoss="false")
        timer = threading.Timer(1.0, partial(ask, second.address, UPDATE_BROKER_CONFIG, body=b"brokerPermission=6\n"))
        if how == "broker":
            timer.start()
            read_all(resumed)
            timer.join()
    read_all(resumed)
    assert sorted({*bodies, *later}) == sorted(
        [*expected, *(f"{queue.broker_name}/{queue.queue_id} later" for queue in world.queues)]
    )


def test_a_shared_group_reads_the_other_queues_while_some_may_not_be_read(
    world: World, query: Query, caplog: pytest.LogCaptureFixture
) -> None:
    run, bodies = world.reads(query, assignment="shared", consumeFromWhere="first", startingOffsets="committed")
    read_all(run)
    assert len(bodies) == 40
    with world.unreadable("broker", world.cluster.brokers[1]), caplog.at_level(logging.WARNING, "orderedmq"):
        for queue in world.queues:
            world.broker.log.append({queue: pa.record_batch({"body": [b"later"]})})
        read_all(run)
        assert [body for body in bodies if body.endswith("later")] == ["broker-a/0 later", "broker-a/1 later"]
        assert "2 queues cannot be read at the moment" in caplog.text
    read_all(run)
    assert sorted(body for body in bodies if body.endswith("later")) == [
        f"{queue.broker_name}/{queue.queue_id} later" for queue in world.queues
    ]


@pytest.mark.parametrize(("read", "write"), [(4, 2), (2, 4)])
def test_a_topic_with_fewer_queues_for_reading_or_for_writing_is_read_and_written(
    world: World, query: Query, read: int, write: int
) -> None:
    """RocketMQ's way to grow a topic: first the queues for reading, then those for writing. Rows in the other order arrive later."""
    world.resize(world.cluster.brokers[1], read, write)
    run, bodies = world.reads(query)
    read_all(run)
    assert len(bodies) == 40
    keys = [f"key-{number}" for number in range(60)]
    Producer(world.broker.log, world.topic).send(
        pa.record_batch({"body": [key.encode() for key in keys], "sharding_key": keys})
    )
    read_all(run)
    if read < write:
        assert 40 < len(bodies) < 100, "some rows must be in queues that cannot be read yet"
        described = world.broker.admin.describe_topic(world.topic)
        assert [f"{row.queue.broker_name}/{row.queue.queue_id}" for row in described if not row.readable] == [
            "broker-b/2",
            "broker-b/3",
        ]
        assert sum(row.bounds.max_offset for row in described) == 100
    world.resize(world.cluster.brokers[1], 4, 4)
    until(lambda: read_all(run) and len(bodies) == 100, "every row was read")
    assert len(set(bodies)) == 100
