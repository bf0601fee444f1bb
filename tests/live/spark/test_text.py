"""Texts that are not UTF-8 in real queries: from source to sink, through a listener to dead letters, and as Java reads them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from ordered_source import ConsumeOrderlyContext, ConsumeOrderlyStatus, OrderPerQueue, consume_orderly
from orderedmq.model import MessageQueue
from orderedmq.routing.sharding_key import java_string_hash
from orderedmq.text import text_of
from tests.live.spark.conftest import Rig
from tests.raw_text import JAVAS, append_raw, pairs, strings

COLUMNS = ("body", "sharding_key", "tags", "properties")
ODD = (b"\xff1", "k\ufffd", "\ufffd", [("mine", "\ufffd")])


def fill(rig: Rig) -> None:
    """Produce three messages. The texts of the second one are not UTF-8."""
    rig.topic("in", 1)
    append_raw(
        rig.broker,
        rig.broker.log.queues("in")[0],
        body=pa.array([b"0", b"\xff1", b"2"], pa.binary()),
        sharding_key=strings([b"a", b"k\xff", b"a"]),
        tags=strings([None, b"\xff", None]),
        properties=pairs([[], [(b"mine", b"\xe4")], []]),
    )


def rows_by_queue(rig: Rig, topic: str) -> dict[int, list[Any]]:
    return {
        queue.queue_id: [tuple(row.values()) for row in rig.broker.log.pull(queue, 0, 10, 1 << 20, COLUMNS).to_pylist()]
        for queue in rig.broker.log.queues(topic)
    }


def test_bytes_are_the_text_that_the_jvm_makes_of_them(spark: SparkSession) -> None:
    draw, string = random.Random(1), spark._jvm.java.lang.String  # type: ignore[union-attr]
    some = [0x41, 0x80, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC2, 0xDF, 0xE0, 0xE1, 0xED, 0xEF, 0xF0, 0xF1, 0xF4, 0xF5, 0xFF, 0x01]
    for data in (*JAVAS, *(bytes(draw.choices(some, k=draw.randint(1, 8))) for _ in range(2000))):
        assert str(string(data, "UTF-8")) == text_of(data), data


@pytest.mark.holds("other encodings")
def test_a_message_goes_from_source_to_sink_and_to_the_queue_of_the_key_that_java_sees(rig: Rig) -> None:
    fill(rig)
    rig.run(rig.stream(topic="in", consumerGroup="g", includeProperties="true"), topic="out", topicQueueNums=5)
    out = rows_by_queue(rig, "out")
    assert out.pop(abs(int(java_string_hash(pa.array(["k\ufffd"]))[0])) % 5) == [ODD]
    assert [row for rows in out.values() for row in rows] == [(body, "a", None, []) for body in (b"0", b"2")]
    # Texts that Spark casts from bytes are treated in the same way.
    cast_rows = rig.spark.sql("SELECT X'01' AS body, cast(X'6BFF' AS string) AS sharding_key, cast(X'FF' AS string) AS tags")
    cast_rows.write.format("orderedmq").mode("append").option("path", rig.path).option("topic", "out").save()
    again = [row for rows in rows_by_queue(rig, "out").values() for row in rows if row[0] == b"\x01"]
    assert [row[:3] for row in again] == [(b"\x01", "k\ufffd", "\ufffd")]


@pytest.mark.holds("other encodings")
def test_a_message_with_other_encodings_becomes_a_dead_letter(rig: Rig) -> None:
    fill(rig)

    def listener(messages: Sequence[Any], context: ConsumeOrderlyContext) -> ConsumeOrderlyStatus:
        (message,) = messages
        assert message.sharding_key == "a", message
        return ConsumeOrderlyStatus.SUCCESS

    rows = rig.stream(topic="in", consumerGroup="g", includeLockToken="true", includeProperties="true")
    # Add a user's column that contains any bytes.
    rows = rows.selectExpr("*", "cast(body AS string) AS mine")
    outcomes = rows.transform(consume_orderly, listener, OrderPerQueue(max_reconsume_times=0))
    table = str(rig.folder / "outcomes")
    writer = outcomes.writeStream.format("parquet").option("path", table).option("checkpointLocation", str(rig.folder / "ck"))
    writer.trigger(availableNow=True).start().awaitTermination()
    ends = rig.spark.read.schema(outcomes.schema).parquet(table).orderBy("begin_offset").collect()
    assert [row.status for row in ends] == ["SUCCESS", "DEAD_LETTER", "SUCCESS"]
    assert "mine='\ufffd1'" in ends[1].error
    [letter] = rig.broker.log.pull(MessageQueue("%DLQ%g", "embedded", 0), 0, 10, 1 << 20, COLUMNS).to_pylist()
    assert (letter["body"], letter["sharding_key"], letter["tags"]) == ODD[:3]
    assert dict(letter["properties"])["mine"] == "\ufffd"
    assert rig.offsets("g") == {0: 3}
