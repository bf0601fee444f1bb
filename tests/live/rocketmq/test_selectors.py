"""Keys of each type go to the same queues as with a Java producer, for each selector that chooses by the key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import orderedmq
from ordered_sink import route
from orderedmq.broker import Broker
from orderedmq.rocketmq.local.servers import Cluster
from tests.live.rocketmq.peers import Peers, Producer

#: For each type of a column: the class of java.lang, and sample keys.
TYPES: dict[str, tuple[str, list[Any]]] = {
    "string": ("String", ["a", "order-17", "17", "-17", "é€😀", "polygenelubricants", *(f"key-{n}" for n in range(9))]),
    "tinyint": ("Byte", [0, 1, -1, 7, 127, -128]),
    "smallint": ("Short", [0, 17, -1, -7, 32767, -32768]),
    "int": ("Integer", [0, 17, 18, 19, -1, -7, 1234567, 2**31 - 1, -(2**31)]),
    "bigint": (
        "Long",
        [0, 17, 18, 19, -1, -7, 2**31, 2**32, 2**32 + 17, 1234567890123, -1234567890123, 2**63 - 1, -(2**63)],
    ),
}
#: Neither a power of two nor a divisor of 31, so that every part of a hash affects the queue.
QUEUES = 7


@pytest.fixture
def broker(cluster: Cluster) -> Iterator[Broker]:
    with orderedmq.connect(namesrv_addr=cluster.address) as broker:
        yield broker


@pytest.fixture(scope="module")
def java(peers: Peers, cluster: Cluster) -> Iterator[Producer]:
    made = peers.producer(cluster.address)
    yield made
    made.stop()


def rows(spark: SparkSession, keys: list[Any], kind: str) -> DataFrame:
    """Return rows with the key in column id and its text as the body."""
    return spark.createDataFrame([(key, str(key)) for key in keys], f"id {kind}, body string").coalesce(1)


def write(df: DataFrame, cluster: Cluster, topic: str, **options: Any) -> None:
    writer = df.write.format("orderedmq").mode("append").option("namesrvAddr", cluster.address).option("topic", topic)
    writer.options(**{"shardingKey": "id", **options}).save()


def found(broker: Broker, topic: str) -> dict[str, tuple[int, str | None]]:
    """Return the queue and the stored key of each body."""
    out: dict[str, tuple[int, str | None]] = {}
    for queue in broker.log.queues(topic):
        at, end = 0, broker.log.bounds([queue])[queue].max_offset
        while at < end:
            pulled = broker.log.pull(queue, at, end - at, 1 << 20, ("body", "sharding_key"))
            for body, key in zip(pulled["body"].to_pylist(), pulled["sharding_key"].to_pylist()):
                assert body.decode() not in out
                out[body.decode()] = queue.queue_id, key
            at += pulled.num_rows
    return out


@pytest.mark.holds("same key, same queue")
def test_a_key_of_each_type_goes_where_javas_hash_sends_it(
    spark: SparkSession, cluster: Cluster, broker: Broker, java: Producer
) -> None:
    for kind, (name, keys) in TYPES.items():
        broker.admin.create_topic(f"java-{kind}", QUEUES)
        broker.admin.create_topic(f"spark-{kind}", QUEUES)
        expected = {str(key): java.send_by(f"java-{kind}", key, name).queue[1] for key in keys}
        write(rows(spark, keys, kind), cluster, f"spark-{kind}")
        assert found(broker, f"spark-{kind}") == {text: (queue, text) for text, queue in expected.items()}
    # A reader gets a number's key as text. To write the number as Java does, the copy must name its type.
    copies = spark.read.format("orderedmq").option("namesrvAddr", cluster.address).option("topic", "spark-bigint").load()
    copies = copies.selectExpr("sharding_key AS id", "cast(body AS string) AS body").coalesce(1)
    for given, original in (("long", "spark-bigint"), ("auto", "spark-text"), ("text", "spark-text")):
        broker.admin.create_topic(f"copy-{given}", QUEUES)
        write(copies, cluster, f"copy-{given}", shardingKeyType=given)
        if original == "spark-text" and given == "auto":
            # Earlier releases ignored the type of whole numbers and sent all of them like this.
            broker.admin.create_topic("spark-text", QUEUES)
            write(rows(spark, TYPES["bigint"][1], "bigint"), cluster, "spark-text", shardingKeyType="text")
            texts = {str(key): java.send_by("java-string", str(key), "String").queue[1] for key in TYPES["bigint"][1]}
            assert {text: queue for text, (queue, _) in found(broker, "spark-text").items()} == texts
        assert found(broker, f"copy-{given}") == found(broker, original)


def seeds_rule(key: int, queues: int) -> int:
    """Return ``id % mqs.size()`` from RocketMQ's example of ordered messages, as Java computes it."""
    return abs(key) % queues * (-1 if key < 0 else 1)


def test_mod_is_the_rule_of_rocketmqs_own_example_which_fails_for_a_negative_number(
    spark: SparkSession, cluster: Cluster, broker: Broker, java: Producer
) -> None:
    for kind in ("int", "bigint"):
        name, every = TYPES[kind]
        keys = [key for key in every if key >= 0]
        broker.admin.create_topic(f"java-mod-{kind}", QUEUES)
        broker.admin.create_topic(f"spark-mod-{kind}", QUEUES)
        expected = {str(key): java.send_by(f"java-mod-{kind}", key, name, seeds_rule).queue[1] for key in keys}
        assert expected == {str(key): key % QUEUES for key in keys}
        df = rows(spark, keys, kind)
        # Shuffle by the same rule, so that one task writes each queue.
        routed = route(df, "body", sharding_key="id", queues=QUEUES, message_queue_selector="mod")
        write(routed, cluster, f"spark-mod-{kind}", messageQueueSelector="mod", onKeyConflict="warn")
        assert {text: queue for text, (queue, _) in found(broker, f"spark-mod-{kind}").items()} == expected
    with pytest.raises(Py4JJavaError):
        java.send_by("java-mod-bigint", -7 * QUEUES - 1, "Long", seeds_rule)
    with pytest.raises(PySparkException, match="ORDEREDMQ_MESSAGE.BAD_KEY.* -50, "):
        write(rows(spark, [1, -50], "bigint"), cluster, "spark-mod-bigint", messageQueueSelector="mod")
