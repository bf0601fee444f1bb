"""Messages that are lost before they are read: a named error, or warnings with counts; never a silently shorter batch."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql.streaming.datasource import ReadAllAvailable

from ordered_source.columns import full_schema
from ordered_source.stream_reader import StreamReader
from orderedmq.model import MessageQueue
from tests.spark.conftest import Rig, copied, numbers
from tests.stopped_readers import stopped


def fails(rig: Rig, **options: Any) -> str:
    df = rig.stream(topic="in", **{"consumerGroup": "g", **options})
    with pytest.raises(PySparkException) as caught:
        rig.run(df, topic="out", topicQueueNums=2)
    return str(caught.value)


def overtaken(rig: Rig) -> None:
    """A query has copied 10 messages of topic in; retention deletes the 20 that come next; then 5 more come."""
    rig.topic("in", 1, rows=10)
    copied(rig)
    rig.fill("in", 20, first=10)
    gone = rig.broker.admin.trim("in", {rig.broker.log.queues("in")[0]: 30})
    assert sum(gone.values()) == 30, "the test needs something to be lost"
    rig.fill("in", 5, first=30)


@pytest.mark.nightly
def test_retention_that_overtakes_a_reader_names_the_range_that_is_lost(rig: Rig) -> None:
    overtaken(rig)
    assert "[ORDEREDMQ_DATA_LOSS.AGED_OUT] messages 10 to 29 (20) of queue in/embedded/0" in fails(rig)
    assert numbers(rig.bodies("out")) == list(range(10))


@pytest.mark.nightly
def test_an_accepted_loss_goes_on_behind_it_once(rig: Rig) -> None:
    overtaken(rig)
    assert copied(rig, failOnDataLoss="false") == [5]
    assert numbers(rig.bodies("out")) == [*range(10), *range(30, 35)]
    assert copied(rig) == []


@pytest.mark.nightly
def test_a_topic_that_was_made_anew_is_noticed(rig: Rig) -> None:
    rig.topic("in", 2, rows=20)
    copied(rig)
    rig.broker.admin.delete_topic("in")
    rig.topic("in", 2, rows=100)
    assert "[ORDEREDMQ_DATA_LOSS.TOPIC_RECREATED] topic 'in'" in fails(rig)
    assert numbers(rig.bodies("out")) == list(range(20))


@pytest.mark.nightly
def test_an_accepted_new_topic_is_read_from_its_beginning(rig: Rig) -> None:
    rig.topic("in", 2, rows=20)
    copied(rig)
    rig.broker.admin.delete_topic("in")
    rig.topic("in", 2)
    rig.fill("in", 30, first=100)
    assert copied(rig, failOnDataLoss="false") == [30]
    assert numbers(rig.bodies("out")) == [*range(20), *range(100, 130)]
    assert copied(rig) == []


def test_a_deleted_topic_is_noticed(rig: Rig) -> None:
    rig.topic("in", 2, rows=20)
    rig.topic("in-b", 1, rows=4)
    df = rig.stream(topicPattern="in.*", consumerGroup="g")
    rig.run(df, topic="out", topicQueueNums=2, onKeyConflict="ignore")
    rig.broker.admin.delete_topic("in-b")
    with pytest.raises(PySparkException, match=r"ORDEREDMQ_DATA_LOSS.TOPIC_DELETED.*'in-b'"):
        rig.run(df, topic="out")
    accepted = rig.stream(topicPattern="in.*", consumerGroup="g", failOnDataLoss="false")
    rig.fill("in", 6, first=20)
    rig.run(accepted, topic="out", onKeyConflict="ignore")
    assert sum(map(len, rig.bodies("out").values())) == 30


def test_a_batch_read_of_aged_out_offsets_is_refused(rig: Rig) -> None:
    rig.topic("in", 1, rows=10)
    rig.fill("in", 5, first=10)
    rig.broker.admin.trim("in", {rig.broker.log.queues("in")[0]: 15})
    rig.fill("in", 5, first=15)
    start = '{"in": {"embedded": {"0": 3}}}'
    with pytest.raises(PySparkException, match="ORDEREDMQ_DATA_LOSS.AGED_OUT"):
        rig.batch(topic="in", startingOffsets=start).count()
    assert rig.batch(topic="in", startingOffsets=start, failOnDataLoss="false").count() == 5


def test_a_checkpoint_of_another_store_is_refused(rig: Rig) -> None:
    rig.topic("in", 2, rows=20)
    copied(rig)
    other = Rig(rig.spark, rig.broker, rig.path, rig.folder)
    rig.broker.close()
    shutil.move(rig.path, rig.path + "-before")
    other.topic("in", 2, rows=4)
    assert "ORDEREDMQ_DATA_LOSS.TOPIC_RECREATED" in fails(other)


def test_a_group_whose_offsets_are_gone_goes_on_at_the_checkpoint(rig: Rig) -> None:
    rig.topic("in", 2, rows=20)
    copied(rig)
    rig.fill("in", 4, first=20)
    store = rig.broker.admin
    # Delete the group's records, as if it had never existed.
    with store._write() as txn:  # type: ignore[attr-defined]
        for database in ("groups", "locks"):
            for key in [key for key, _ in txn.scan(database)]:
                txn.delete(database, key)
    assert copied(rig) == [4]
    assert numbers(rig.bodies("out")) == list(range(24))


def test_a_group_that_was_sought_back_is_followed_at_the_restart(rig: Rig) -> None:
    rig.topic("in", 1, rows=10)
    copied(rig)
    rig.released()
    rig.broker.admin.seek("g", {MessageQueue("in", "embedded", 0): 4})
    assert copied(rig) == [6]
    assert numbers(rig.bodies("out")) == sorted([*range(10), *range(4, 10)])
    assert copied(rig) == []


def test_an_accepted_loss_is_warned_of_with_its_exact_count(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.topic("in", 1, rows=10)
    start = '{"in": {"embedded": {"0": 3}}}'
    options = {"path": rig.path, "topic": "in", "consumerGroup": "g", "startingOffsets": start, "failOnDataLoss": "false"}
    rig.fill("in", 20, first=10)
    rig.broker.admin.trim("in", {rig.broker.log.queues("in")[0]: 30})
    reader = StreamReader(options, full_schema(False))
    with stopped(reader):
        end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
        assert "messages 3 to 29 (27) of queue in/embedded/0" in caplog.text
        assert end["next"] == {"in": {"embedded": {"0": 30}}}
        assert list(reader.partitions({}, end)) == []
