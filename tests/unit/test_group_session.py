"""The session of a query in its group when a call fails part-way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

import orderedmq
from ordered_source.columns import full_schema
from ordered_source.stream_reader import StreamReader
from ordered_source.topic_watch import TopicWatch
from orderedmq.broker import Broker
from orderedmq.conditions import TopicCondition
from orderedmq.embedded.groups import EmbeddedGroups
from orderedmq.embedded.log import EmbeddedLog
from orderedmq.errors import OffsetError, TopicError
from orderedmq.model import MessageQueue
from orderedmq.options.parse import parse
from orderedmq.options.source import SourceOptions
from orderedmq.ownership import offsets
from orderedmq.ownership.lock import LockToken
from tests.micro_batches import Checkpoint, MicroBatches
from tests.stopped_readers import stopped
from tests.unit.rocketmq_peer import Cluster

QUEUES = [MessageQueue("in", "embedded", number) for number in range(2)]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with orderedmq.connect(tmp_path / "store") as made:
        made.admin.create_topic("in", 2)
        yield made


def options(broker: Broker, **more: str) -> dict[str, str]:
    path: Any = broker
    return {"path": str(path.path), "topic": "in", "consumerGroup": "g", "assignment": "shared", **more}


def test_a_boundary_that_fails_before_its_commit_makes_it_when_it_is_tried_again(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens when a topic is deleted between batches: RocketMQ refuses all offsets, and Spark immediately repeats the call."""
    rows = pa.record_batch({"body": pa.array([b"x"], pa.binary())})
    broker.log.append(dict.fromkeys(QUEUES, rows))
    reader = StreamReader(options(broker), full_schema())
    with stopped(reader):
        spark = MicroBatches(reader, Checkpoint())
        limit = spark.open()
        end = spark.latest_offset(limit)
        assert end is not None
        spark.write_offset_log(end)
        assert len(spark.partitions()) == 2
        spark.write_commit_log()
        commit = EmbeddedGroups.commit
        failed: list[Mapping[LockToken, int]] = []

        def fails_once(self: EmbeddedGroups, offsets: Mapping[LockToken, int]) -> None:
            if not failed:
                failed.append(offsets)
                raise TopicError(TopicCondition.MISSING, "it was deleted a moment ago")
            commit(self, offsets)

        monkeypatch.setattr(EmbeddedGroups, "commit", fails_once)
        assert spark.latest_offset(limit) is None
        assert failed
        assert broker.groups.offsets("g", QUEUES) == dict.fromkeys(QUEUES, 1)


@pytest.mark.parametrize(("readable", "divided"), [(QUEUES[:1], QUEUES[:1]), ([], QUEUES)], ids=["some", "none"])
def test_a_shared_group_divides_the_queues_that_may_be_read(
    broker: Broker, readable: list[MessageQueue], divided: list[MessageQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EmbeddedLog, "readable", lambda self, topic: readable)
    watch = TopicWatch(broker, parse(SourceOptions, options(broker), streaming=True))
    watch.topics()
    assert watch.queues(offsets.Checkpoint(), None, shared=True) == divided
    assert watch.queues(offsets.Checkpoint(), None, shared=False) == QUEUES


def test_a_checkpoint_of_a_store_is_refused_with_a_cluster_before_the_query_joins_its_group() -> None:
    logged = offsets.Checkpoint("owner", {QUEUES[0]: 7}, {QUEUES[0]: 0}, {QUEUES[0]: 1}, {"T": "0123456789ABCDEF@" + "0" * 32})
    with Cluster() as cluster:
        cluster.scripted("a", lambda link: link.wait_for_end())
        there = {"namesrvAddr": cluster.nameserver().address, "topic": "T", "consumerGroup": "g"}
        reader = StreamReader(there, full_schema())
        with stopped(reader), pytest.raises(OffsetError, match=r"INVALID.*embedded broker.*checkpointLocation"):
            reader.latestOffset(logged.to_spark(), ReadAllAvailable())


@pytest.mark.parametrize("anchor", ["", "broker-a/0/6@1f"])
def test_a_checkpoint_of_a_cluster_is_refused_with_a_store(broker: Broker, anchor: str) -> None:
    queue = QUEUES[0]._replace(broker_name="broker-a")
    logged = offsets.Checkpoint("owner", {queue: 7}, {queue: 0}, {queue: 1}, {"in": anchor})
    reader = StreamReader(options(broker), full_schema())
    with stopped(reader), pytest.raises(OffsetError, match=r"INVALID.*RocketMQ.*checkpointLocation"):
        reader.latestOffset(logged.to_spark(), ReadAllAvailable())
