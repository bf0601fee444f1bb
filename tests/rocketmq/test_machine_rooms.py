"""A sink that writes only to the brokers of certain machine rooms."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import orderedmq
from orderedmq.broker import Broker
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.routing.selector import select_by_hash
from orderedmq.routing.sharding_key import java_string_hash
from tests.jars import jars_required
from tests.quick_spark import QUICK_SERVER
from tests.rocketmq.peers import Peers

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def rooms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("rooms"), names=("a@one", "b@one"), jvm=QUICK_SERVER)
    with jars_required():
        cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture
def broker(rooms: Cluster) -> Iterator[Broker]:
    with orderedmq.connect(namesrv_addr=rooms.address) as broker:
        yield broker


def test_rows_go_to_the_queues_of_the_rooms_that_are_asked_for(spark: SparkSession, rooms: Cluster, broker: Broker) -> None:
    broker.admin.create_topic("rooms", 6)
    queues = broker.log.queues("rooms")
    assert [queue.broker_name for queue in queues] == ["a@one"] * 3 + ["b@one"] * 3
    keys = [f"key-{number}" for number in range(50)]
    rows = spark.createDataFrame([(key, key) for key in keys], "sharding_key string, body string").coalesce(1)
    writer = rows.write.format("orderedmq").mode("append").option("namesrvAddr", rooms.address).option("topic", "rooms")
    writer.option("messageQueueSelector", "machineRoom").option("machineRooms", "b").save()
    expected: list[list[bytes]] = [[], [], []]
    for key, chosen in zip(keys, select_by_hash(java_string_hash(pa.array(keys)), 3).tolist()):
        expected[chosen].append(key.encode())
    bodies_by_queue = [broker.log.pull(queue, 0, 100, 1 << 20, ("body",)).column("body").to_pylist() for queue in queues]
    assert bodies_by_queue == [[], [], [], *expected]
    with pytest.raises(PySparkException, match="NO_SUCH_QUEUE.*'c'"):
        writer.option("messageQueueSelector", "machineRoom").option("machineRooms", "a,c").save()


def test_numbers_go_to_the_queues_of_a_room_as_with_javas_hash_among_them(
    spark: SparkSession, rooms: Cluster, broker: Broker, peers: Peers
) -> None:
    broker.admin.create_topic("numbers", 6)
    broker.admin.create_topic("java-numbers", 6)
    # These keys do not fit into an Integer, so that py4j passes the selector's key back to Java as a Long.
    keys = [2**31 + 7 * number for number in range(20)]
    by_hash = peers.rocketmq.client.producer.selector.SelectMessageQueueByHash()

    def in_room_b(key: int, queues: int) -> int:
        """Select by hash among the queues of room b, as a user would, because RocketMQ's own selector by room is an empty stub."""
        of_room = peers.java.java.util.ArrayList()
        for number in range(queues // 2):
            of_room.add(peers.rocketmq.common.message.MessageQueue("java-numbers", "b@one", number))
        return queues // 2 + int(by_hash.select(of_room, None, key).getQueueId())

    producer = peers.producer(rooms.address)
    expected = {key: producer.send_by("java-numbers", key, "Long", in_room_b).queue for key in keys}
    producer.stop()
    rows = spark.createDataFrame([(key, str(key)) for key in keys], "sharding_key bigint, body string").coalesce(1)
    writer = rows.write.format("orderedmq").mode("append").option("namesrvAddr", rooms.address).option("topic", "numbers")
    writer.option("messageQueueSelector", "machineRoom").option("machineRooms", "b").save()
    queues_by_body = {}
    for queue in broker.log.queues("numbers"):
        for body in broker.log.pull(queue, 0, 100, 1 << 20, ("body",)).column("body").to_pylist():
            queues_by_body[int(body)] = queue.broker_name, queue.queue_id
    assert queues_by_body == expected
