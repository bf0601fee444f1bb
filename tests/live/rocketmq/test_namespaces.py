"""Queries in a namespace, next to RocketMQ's Java client in the same namespace."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

import orderedmq
from ordered_source import ConsumeOrderlyContext, ConsumeOrderlyStatus, OrderPerQueue, consume_orderly
from orderedmq.broker import Broker
from orderedmq.cli import app
from orderedmq.model import RETRY_PREFIX
from orderedmq.ownership.lock import LockToken
from orderedmq.ownership.membership import Subscription
from orderedmq.pulls import pulls
from orderedmq.rocketmq.local.servers import Cluster
from tests.contract.support import rows
from tests.live.rocketmq.peers import Peers
from tests.waits import until

pytestmark = pytest.mark.spark

SPACE = "acme"


@pytest.fixture
def inside(cluster: Cluster) -> Iterator[Broker]:
    with orderedmq.connect(namesrv_addr=cluster.address, namespace=SPACE) as broker:
        yield broker


@pytest.fixture
def outside(cluster: Cluster) -> Iterator[Broker]:
    with orderedmq.connect(namesrv_addr=cluster.address) as broker:
        yield broker


def bodies(broker: Broker, topic: str) -> list[str]:
    out = []
    for queue, at in broker.log.bounds(broker.log.queues(topic)).items():
        for batch in pulls(broker.log, queue, at.min_offset, at.max_offset, 1000, 1 << 24, ("body", "topic")):
            assert set(batch.column(1).to_pylist()) == {topic}, topic
            out += [body.decode() for body in batch.column(0).to_pylist()]
    return sorted(out)


@pytest.mark.holds("namespaces")
def test_a_query_reads_what_a_java_producer_of_its_namespace_sends_and_a_java_consumer_what_it_writes(
    spark: SparkSession, cluster: Cluster, peers: Peers, inside: Broker, outside: Broker, tmp_path: Path
) -> None:
    for topic in ("ns-in", "ns-out"):
        inside.admin.create_topic(topic, 4)
    producer = peers.producer(cluster.address, namespace=SPACE)
    for number in range(20):
        producer.send("ns-in", str(number).encode(), f"key-{number % 3}")
    until(lambda: len(bodies(inside, "ns-in")) == 20, "the messages can be read")
    options = {"namesrvAddr": cluster.address, "namespace": SPACE, "vipChannelEnabled": "false", "unitName": "unit"}
    stream = spark.readStream.format("orderedmq").options(**options, topic="ns-in", consumerGroup="ns-g").load()
    target = stream.writeStream.format("orderedmq").options(**options, topic="ns-out", checkpointLocation=str(tmp_path / "ck"))
    target.trigger(availableNow=True).start().awaitTermination()
    consumer = peers.consumer(cluster.address, "ns-readers", "ns-out", namespace=SPACE)
    assert sorted(message.body.decode() for message in consumer.wait(20)) == bodies(inside, "ns-in")
    consumer.stop()
    # The servers know the names only with the namespace.
    assert bodies(outside, f"{SPACE}%ns-out") == bodies(inside, "ns-out")
    assert {"ns-in", "ns-out"}.isdisjoint(topic.name for topic in outside.log.topics())
    assert {"ns-in", "ns-out"} <= {topic.name for topic in inside.log.topics()}
    assert sum(outside.admin.group_offsets(f"{SPACE}%ns-g").values()) == 20
    assert inside.admin.group_offsets("ns-g").keys() == set(inside.log.queues("ns-in"))


@pytest.mark.holds("namespaces")
def test_a_listener_in_a_namespace_puts_dead_letters_where_its_tools_look(
    spark: SparkSession, cluster: Cluster, inside: Broker, outside: Broker, tmp_path: Path
) -> None:
    inside.admin.create_topic("ns-poison", 1)
    inside.log.append({inside.log.queues("ns-poison")[0]: rows([b"good", b"poison"])})

    def listener(messages: Sequence[Any], context: ConsumeOrderlyContext) -> ConsumeOrderlyStatus:
        assert messages[0].topic == "ns-poison"
        if bytes(messages[0].body) == b"poison":
            raise ValueError("poison")
        return ConsumeOrderlyStatus.SUCCESS

    options = {"namesrvAddr": cluster.address, "namespace": SPACE, "topic": "ns-poison", "consumerGroup": "ns-l"}
    stream = spark.readStream.format("orderedmq").options(**options, includeLockToken="true").load()
    done = consume_orderly(stream, listener, OrderPerQueue(max_reconsume_times=0)).writeStream.format("noop")
    done.option("checkpointLocation", str(tmp_path / "ck")).trigger(availableNow=True).start().awaitTermination()
    assert bodies(outside, f"%DLQ%{SPACE}%ns-l") == ["poison"] == bodies(inside, "%DLQ%ns-l")


@pytest.mark.holds("namespaces")
def test_a_java_member_of_the_namespace_and_a_lock_exclude_each_other(
    cluster: Cluster, peers: Peers, inside: Broker, outside: Broker
) -> None:
    inside.admin.create_topic("ns-shared", 2)
    consumer = peers.consumer(cluster.address, "ns-m", "ns-shared", namespace=SPACE)
    until(lambda: len(consumer.queues_of(f"{SPACE}%ns-shared")) == 2, "the Java consumer has the queues")
    me = inside.groups.join("me")
    queues = inside.log.queues("ns-shared")
    assert not [answer for answer in inside.groups.lock("ns-m", me, queues).values() if isinstance(answer, LockToken)]
    # The Java consumer may also have locked its queue of the retry topic by now. A second member, below, gets one of its queues.
    assert {lock.queue for lock in inside.admin.locks("ns-m") if not lock.queue.topic.startswith(RETRY_PREFIX)} == set(queues)
    members = {member.client_id: member for member in inside.groups.heartbeat("ns-m", me, Subscription("shared", "ns-shared"))}
    assert members.keys() == {consumer.id, me.client_id}
    assert members[consumer.id].subscription.topics == "ns-shared"
    assert outside.groups.members("ns-m") == []
    consumer.stop()


def test_the_command_shows_the_names_of_its_namespace_and_no_others(cluster: Cluster, inside: Broker, outside: Broker) -> None:
    inside.admin.create_topic("ns-listed", 1)
    outside.admin.create_topic("ns-not-listed", 1)
    shown = CliRunner().invoke(app, ["--namesrv", cluster.address, "--namespace", SPACE, "--json", "topic", "list"])
    names = {json.loads(line)["topic"] for line in shown.output.splitlines()}
    assert "ns-listed" in names
    assert "ns-not-listed" not in names
