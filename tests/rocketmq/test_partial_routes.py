"""Routes that lack a part of a topic: the nameserver has not heard of a broker, queues were removed, or a broker is read-only."""

from __future__ import annotations

import contextlib
import logging
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
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
from orderedmq.options.sink import SinkOptions
from orderedmq.ownership.lock import LockToken
from orderedmq.rocketmq.broker import RocketMQBroker
from orderedmq.rocketmq.group import groups as groups_module
from orderedmq.rocketmq.group.offsets import GroupOffsets
from orderedmq.rocketmq.local.probe import ask
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.rocketmq.messages import log as log_module
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.wire import admin_requests
from orderedmq.tools.producer import Producer
from tests.rocketmq.peers import Peers
from tests.stopped_readers import stopped
from tests.waits import soon, until

UPDATE_BROKER_CONFIG = 25


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
        made = StreamReader({**common, "consumeFromWhere": "first", **options}, full_schema(False))
        with stopped(made):
            yield made

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


@pytest.fixture
def world(two_brokers: Cluster) -> Iterator[World]:
    made = World(two_brokers)
    yield made
    made.broker.close()


def positions(offset: dict[str, Any], topic: str) -> dict[MessageQueue, int]:
    found = offset["next"][topic]
    return {MessageQueue(topic, name, int(number)): at for name, ids in found.items() for number, at in ids.items()}


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


def test_what_a_broker_has_that_the_nameserver_does_not_know_yet_is_not_said_to_be_deleted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world.half_known(), RocketMQBroker(world.cluster.address) as anew:
        assert anew.log.queues(world.topic) == [queue for queue in world.queues if queue.broker_name == "broker-b"]
        assert len(anew.log.bounds(anew.log.queues(world.topic))) == 2
        with monkeypatch.context() as patch:
            patch.setattr(log_module, "REQUEST_TIMEOUT", 1.0)
            patch.setattr(anew.log._puller, "_patience", 1.0)
            for call in (
                lambda: anew.log.bounds(world.queues),
                lambda: anew.log.pull(world.queues[0], 0, 10, 1000, ("body",)),
                lambda: GroupOffsets(anew._checked).read(f"{world.topic}-g", world.queues, 1.0),
            ):
                assert "broker-a" in blame(call)
        asserted = {"namesrvAddr": world.cluster.address, "topic": world.topic, "topicQueueNums": "4"}
        with pytest.raises(TopicError, match="QUEUE_COUNT.*has 2 queues"):
            target_queues(anew, world.topic, SinkOptions.parse(asserted, streaming=False))
        # A client that already knew the whole topic still uses all queues, so that no key moves to another queue.
        assert world.broker.log.targets(world.topic) == world.queues
        with pytest.raises(TopicError, match="NO_SUCH_QUEUE"):
            anew.log.pull(MessageQueue(world.topic, "broker-b", 7), 0, 10, 1000, ("body",))


def test_queues_that_were_taken_out_of_a_topic_are_missed_also_after_a_restart(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
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
    found = {}
    for queue in world.queues:
        rows = world.broker.log.pull(queue, 10, 100, 1 << 20, ("body", "sharding_key")).to_pylist()
        found.update({row["sharding_key"]: (queue.broker_name, queue.queue_id) for row in rows if row["body"] == b"ours"})
    assert [found[key] for key in keys] == there


def test_a_topic_for_reading_only_is_refused_before_any_row(world: World) -> None:
    with Client(world.cluster.address) as client:
        for broker in world.cluster.brokers:
            client.call_address(broker.address, admin_requests.create_topic(world.topic, 2, perm=4), soon())
        until(lambda: not client.route(world.topic, soon(), fresh=True).publish_list(), "the route has the change")
    options = {"namesrvAddr": world.cluster.address, "topic": world.topic}
    for more in ({}, {"topicQueueNums": "4"}):
        parsed = SinkOptions.parse({**options, **more}, streaming=False)
        with pytest.raises(TopicError, match="NO_SUCH_QUEUE"):
            target_queues(world.broker, world.topic, parsed)
    with pytest.raises(TopicError, match="NO_SUCH_QUEUE"):
        Producer(world.broker.log, world.topic)
