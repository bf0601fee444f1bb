"""Topics and messages of real servers, in addition to the contract suite's tests of every broker."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

import orderedmq
from orderedmq.broker import Broker, Log, PullSettings, QueueBounds
from orderedmq.endpoint import Endpoint, TlsOptions
from orderedmq.errors import DataLossError, OptionError, ProtocolError, RocketMQError, TopicError
from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.rocketmq.broker import RocketMQBroker
from orderedmq.rocketmq.codec.stored_message import BODY_AT
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.rocketmq.messages.topic_anchor import parse_anchor
from orderedmq.rocketmq.messages.topic_changes import delete_at_broker
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.wire import message_requests
from orderedmq.tools.producer import Producer
from tests import evidence
from tests.contract.support import rows
from tests.grow import grow
from tests.live.rocketmq.group_world import World
from tests.quick_spark import QUICK_JVM
from tests.waits import soon, until

MS = 1000


def numbers(count: int, first: int = 0) -> pa.RecordBatch:
    return rows([b"%d" % number for number in range(first, first + count)])


def read(broker: Broker, queue: MessageQueue, begin: int, end: int) -> list[bytes]:
    bodies: list[bytes] = []
    while begin + len(bodies) < end:
        batch = broker.log.pull(queue, begin + len(bodies), end - begin - len(bodies), 1 << 40, ("body",))
        assert batch.num_rows
        bodies += batch.column(0).to_pylist()
    return bodies


@pytest.fixture
def everywhere(every_version: Cluster) -> Iterator[World]:
    with World(every_version, queues=2) as world:
        yield world


@pytest.fixture
def world(cluster: Cluster) -> Iterator[World]:
    with World(cluster, queues=2) as world:
        yield world


# -- every version


def test_many_messages_are_read_completely_in_the_brokers_portions(everywhere: World) -> None:
    """A pull returns at most 32 messages or 256 KiB."""
    log, queue = everywhere.log, everywhere.queue
    assert log.append({queue: numbers(5000)})[queue] == OffsetRange(0, 5000)
    large = [bytes([number]) * 100_000 for number in range(40)]
    assert log.append({queue: rows(large)})[queue] == OffsetRange(5000, 5040)
    assert log.append({queue: numbers(100, 5040)})[queue] == OffsetRange(5040, 5140)
    expected = [b"%d" % number for number in range(5000)] + large + [b"%d" % number for number in range(5040, 5140)]
    assert read(everywhere.broker, queue, 0, 5140) == expected
    assert read(everywhere.broker, queue, 4990, 5050) == expected[4990:5050]


def test_messages_are_read_without_spark_in_the_order_of_arrival_and_of_queues(everywhere: World) -> None:
    log, address = everywhere.log, everywhere.cluster.address
    for number in range(200):
        log.append({everywhere.queues[number % 2]: rows([b"%d" % number], sharding_key=["ab"[number % 3 == 0]])})
    messages = orderedmq.read(everywhere.topic, namesrvAddr=address)
    assert [row["body"] for row in messages] == [b"%d" % number for number in range(200)]
    by_queue = orderedmq.read(everywhere.topic, namesrvAddr=address, order="queue", key="b", columns=("body",))
    assert by_queue.to_arrow()["body"].to_pylist() == [b"%d" % n for m in range(2) for n in range(m, 200, 2) if n % 3 == 0]
    relation = duckdb.sql("SELECT count(DISTINCT queue_offset), count(DISTINCT queue_id) FROM messages")
    assert relation is not None
    assert relation.fetchall() == [(100, 2)]


def test_a_delayed_message_of_another_producer_is_read_when_it_is_due(everywhere: World) -> None:
    log, queue = everywhere.log, everywhere.queue
    with Client(everywhere.cluster.address) as client:
        late = message_requests.send(queue, b"late", "DELAY\x011\x02", group="p", born=time.time_ns() // 1_000_000, batch=False)
        client.call(late, soon(), topic=queue.topic, broker_name=queue.broker_name)
    until(lambda: log.bounds([queue])[queue].max_offset == 1, "the message is due")
    assert read(everywhere.broker, queue, 0, 1) == [b"late"]


@contextlib.contextmanager
def changed(cluster: Cluster, position: int) -> Iterator[None]:
    """Flip a bit in the broker's memory-mapped commit log, and restore it afterwards because a restarting broker would stop there."""
    files = {int(file.name): file for file in (cluster.broker.home / "store" / "commitlog").glob("[0-9]*")}
    first = max(begin for begin in files if begin <= position)
    with files[first].open("r+b", buffering=0) as file:

        def flip() -> None:
            file.seek(position - first)
            bits = file.read(1)[0] ^ 1
            file.seek(position - first)
            file.write(bytes([bits]))

        flip()
        try:
            yield
        finally:
            flip()


@pytest.mark.fault("lying broker")
@pytest.mark.holds("foreign answer", "changed body")
def test_a_changed_byte_on_a_brokers_disk_gives_no_row_of_another_queue_and_a_body_can_be_verified(world: World) -> None:
    queue, log = world.queue, world.log
    verifying = log.reading(PullSettings(verify_body_crc=True))
    log.append({queue: numbers(5)})
    anchor = parse_anchor(log.anchor(queue.topic, {queue: 4}))
    assert anchor is not None
    assert anchor.offset == 3

    def bodies(log: Log, begin: int = 0) -> list[bytes]:
        column: list[bytes] = log.pull(queue, begin, 5, 1 << 20, ("body",)).column(0).to_pylist()
        return column

    right = [b"0", b"1", b"2", b"3", b"4"]
    assert bodies(log) == bodies(verifying) == right
    with changed(world.cluster, anchor.position + BODY_AT):
        assert bodies(verifying) == right[:3]
        with pytest.raises(DataLossError, match="UNREADABLE.* message 3 ") as caught:
            bodies(verifying, 3)
        assert caught.value.resume_at == 4
        assert bodies(verifying, 4) == [b"4"]
        # By default checksums are not verified, as in Java's client.
        assert bodies(log) == [b"0", b"1", b"2", b"2", b"4"]
    # Change the last byte of the queue's number, and then the first byte of the topic's name.
    for place in (15, BODY_AT + 2):
        with changed(world.cluster, anchor.position + place):
            for reader in (log, verifying):
                with pytest.raises(ProtocolError, match=f"a pull of queue {queue} with a message of .*, at queue offset 3:"):
                    bodies(reader)
    assert bodies(log) == bodies(verifying) == right
    evidence.note(runs=3, acknowledged=5)


def test_offset_at_finds_the_first_message_at_or_after_a_time(everywhere: World) -> None:
    """For a time between two messages, 4.9 returns the nearest message; for a future time, the last message."""
    log, queue = everywhere.log, everywhere.queue
    assert log.offset_at(queue, 0) == log.offset_at(queue, 1 << 60) == 0
    for number in range(30):
        log.append({queue: numbers(1 + number % 3)})
        time.sleep(0.02 if number % 5 == 0 else 0.002)
    end = log.bounds([queue])[queue].max_offset
    stamps = log.pull(queue, 0, end, 1 << 40, ("store_timestamp",)).column(0).cast(pa.int64()).to_pylist()
    assert stamps == sorted(stamps)
    for stamp in [stamps[0] - 10**9, *sorted(set(stamps))[::4], stamps[-1], stamps[-1] + 10**9]:
        for moment in (stamp - 7 * MS, stamp - 1, stamp, stamp + 1, stamp + MS):
            expected = next((n for n in range(end) if stamps[n] >= moment), end)
            assert log.offset_at(queue, moment) == expected, (stamp, moment)


def test_advance_follows_a_limit_in_bytes_approximately(world: World) -> None:
    """The limit is exact where the first few messages decide, and approximate beyond them."""
    log, queue = world.log, world.queue
    log.append({queue: rows([bytes(1000)] * 3000)})
    log.append({queue: rows([bytes(10)] * 3000)})
    assert [log.advance(queue, 0, 6000, size) for size in (0, 999, 1000, 12_345)] == [0, 0, 1, 12]
    assert 900 <= log.advance(queue, 0, 6000, 1_000_000) <= 1100
    assert log.advance(queue, 2000, 2100, 1 << 40) == 2100
    assert log.advance(queue, 6000, 6000, 5) == 6000


def test_an_append_does_not_create_a_topic_that_was_just_deleted(everywhere: World) -> None:
    """If a send names the broker's template topic, the broker creates a missing topic with its own default number of queues."""
    topic = everywhere.topic
    with RocketMQBroker(Endpoint(None, everywhere.cluster.address)) as other:
        producer = Producer(other.log, topic)
        producer.send(numbers(3))
        everywhere.broker.admin.delete_topic(topic)
        # The producer still believes that the topic exists, because it checks this at most once a second.
        other.log._confirmed[topic] = time.monotonic()
        for send in (lambda: producer.send(numbers(3)), lambda: other.log.append({everywhere.queue: numbers(3)})):
            with pytest.raises(TopicError, match=f"MISSING.*{topic}"):
                send()
        assert topic not in [info.name for info in everywhere.log.topics()]


def test_messages_are_sent_and_pulled_over_tls(cluster: Cluster, tmp_path: Path) -> None:
    """A server without a certificate makes one up, which no authority has signed."""
    with Cluster(tmp_path, cluster.version, jvm=QUICK_JVM) as encrypted:
        body = bytes(range(256)) * 4096
        with orderedmq.connect(namesrv_addr=encrypted.address, tls=TlsOptions(verify=False)) as broker:
            broker.admin.create_topic("encrypted", 1)
            [queue] = broker.log.queues("encrypted")
            broker.log.append({queue: rows([body])})
            assert read(broker, queue, 0, 1) == [body]
        with (
            orderedmq.connect(namesrv_addr=encrypted.address, tls=TlsOptions()) as broker,
            pytest.raises(RocketMQError) as caught,
        ):
            broker.log.topics()
        assert caught.value.sub == "TLS"


# -- faults


def test_all_messages_are_read_although_their_broker_is_killed_and_restarted(world: World) -> None:
    world.log.append({world.queue: numbers(20_000)})
    # Wait, because a broker that is killed right after the append may not have written the messages to disk in order.
    time.sleep(1.0)
    world.log.pull(world.queue, 0, 100, 1 << 40, ("body",))
    world.cluster.broker.kill()
    back = threading.Thread(target=world.cluster.broker.restart)
    back.start()
    try:
        assert read(world.broker, world.queue, 0, 20_000) == [b"%d" % number for number in range(20_000)]
    finally:
        back.join()


def test_topics_stay_known_while_a_nameserver_restarts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted nameserver has no routes until brokers report to it, which takes up to 30 s. The brokers still know their topics."""
    for module in ("net.client", "messages.log"):
        monkeypatch.setattr(f"orderedmq.rocketmq.{module}.NAMESERVER_TIMEOUT", 0.5)
    world.log.append({world.queue: numbers(3)})
    world.cluster.namesrv.kill()
    try:
        world.log.forget(world.topic)
        assert world.log.bounds([world.queue]) == {world.queue: QueueBounds(0, 3)}
        world.cluster.namesrv.start()
        world.log.forget(world.topic)
        assert world.log.bounds([world.queue]) == {world.queue: QueueBounds(0, 3)}
        assert world.log.queues(world.topic)[0] == world.queue
        assert world.topic in [info.name for info in world.log.topics()]
        assert read(world.broker, world.queue, 0, 3) == [b"0", b"1", b"2"]
    finally:
        # Wait until the nameserver knows the broker again.
        world.cluster.start()


# -- several brokers


def test_topics_are_divided_among_brokers(two_brokers: Cluster) -> None:
    """A topic is created at every master."""
    with RocketMQBroker(Endpoint(None, two_brokers.address)) as broker:
        name = f"t-{uuid.uuid4().hex[:8]}"
        assert broker.admin.create_topic(name, 5).queues == 5
        where = [(queue.broker_name, queue.queue_id) for queue in broker.log.queues(name)]
        assert where == [("broker-a", 0), ("broker-a", 1), ("broker-a", 2), ("broker-b", 0), ("broker-b", 1)]
        grow(broker, name, 8)
        assert [len([q for q in broker.log.queues(name) if q.broker_name == b]) for b in ("broker-a", "broker-b")] == [4, 4]
        with pytest.raises(OptionError, match="UNSUPPORTED"):
            broker.admin.resize_topic(name, 9)
        for number, queue in enumerate(broker.log.queues(name)):
            broker.log.append({queue: numbers(number)})
        assert [bounds.max_offset for bounds in broker.log.bounds(broker.log.queues(name)).values()] == list(range(8))
        broker.admin.delete_topic(name)
        with pytest.raises(TopicError, match="MISSING"):
            broker.log.queues(name)


def test_a_topic_that_one_broker_lacks_is_used_and_deleted(two_brokers: Cluster) -> None:
    with RocketMQBroker(Endpoint(None, two_brokers.address)) as broker, Client(two_brokers.address) as client:
        name = f"t-{uuid.uuid4().hex[:8]}"
        broker.admin.create_topic(name, 4)
        delete_at_broker(client, two_brokers.brokers[0].address, name)
        # Delete the topic at that broker again, although it no longer exists there.
        delete_at_broker(client, two_brokers.brokers[0].address, name)
        queue = broker.log.queues(name)[-1]
        broker.log.append({queue: numbers(1)})
        broker.admin.delete_topic(name)


# -- the connection


def test_a_cluster_is_identified_by_the_addresses_of_its_brokers(cluster: Cluster, two_brokers: Cluster) -> None:
    with RocketMQBroker(Endpoint(None, cluster.address)) as one, RocketMQBroker(Endpoint(None, two_brokers.address)) as two:
        assert one.identity != two.identity
        assert ":" not in two.identity
        assert len(two.identity.split(",")) == 2
        for identity in (one.identity, f"{one.identity},00000000"):
            with orderedmq.connect(namesrv_addr=cluster.address, identity=identity) as again:
                again.log.topics()
        other = orderedmq.connect(namesrv_addr=cluster.address, identity=two.identity)
        with other, pytest.raises(RocketMQError, match=rf"OTHER_CLUSTER.*local/broker-a@{cluster.broker.address}"):
            _ = other.log


def test_path_and_namesrv_addr_exclude_each_other() -> None:
    for path, namesrv_addr in ((None, None), ("x", "localhost:9876")):
        with pytest.raises(OptionError, match="CONFLICT"):
            orderedmq.connect(path, namesrv_addr=namesrv_addr)
    with pytest.raises(RocketMQError, match="ADDRESS"):
        orderedmq.connect(namesrv_addr="localhost")


def test_settings_that_rocketmq_lacks_are_refused_by_name(world: World) -> None:
    admin = world.broker.admin
    for settings in ({"retention_seconds": 1.0}, {"retention_bytes": 5}, {"compression": "none"}):
        with pytest.raises(OptionError, match="UNSUPPORTED"):
            admin.create_topic("never", 1, **settings)
    with pytest.raises(OptionError, match="UNSUPPORTED"):
        admin.trim(world.topic)
    with pytest.raises(TopicError, match="MISSING"):
        admin.trim("never")
