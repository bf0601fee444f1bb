"""Spark 4.0 and 4.1: latestOffset without arguments, availableNow as one micro-batch, checkpoints that move between releases."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import LongType, StructField, StructType

from ordered_source.columns import arrow_schema, full_schema
from ordered_source.older_spark import called_without_start
from ordered_source.stream_reader import StreamReader
from orderedmq.errors import OptionError
from tests.live.spark.conftest import numbers
from tests.live.spark.recorded_source import RecordedSource, calls
from tests.loop.conftest import LoopRig
from tests.micro_batches import MicroBatchLoop, OlderMicroBatches

SOURCE = {"topic": "in", "consumerGroup": "g"}
OUT = {"topic": "out", "topicQueueNums": 2}
#: The methods that Spark calls in the process of the source.
SPARKS = ("latestOffset", "initialOffset", "partitions", "commit", "stop")


@pytest.fixture
def older() -> bool:
    return True


def offsets(call: dict[str, Any]) -> Sequence[int]:
    """The sums of the next offsets in the start and in the end of a call."""
    return [
        sum(at for brokers in offset.get("next", {}).values() for queues in brokers.values() for at in queues.values())
        for offset in (call.get("start"), call.get("end") or call.get("result"))
        if offset is not None
    ]


def asked(rig: LoopRig, query: MicroBatchLoop, since: int) -> tuple[list[tuple[str, Sequence[int]]], int]:
    """The calls that the source of a query got after its constructor, and the number of all calls so far."""
    events = calls(Path(rig.path).parent)
    own = [call for call in events[since:] if call["object"] == query.reader.record.thing]
    return [(call["method"], offsets(call)) for call in own if call["method"] in SPARKS], len(events)


def test_the_loop_calls_the_source_in_the_recorded_order(rig: LoopRig) -> None:
    """The order was recorded on 4.0.5 and 4.1.4."""
    rig.topic("in", 1)
    at = 0

    def run(expected: list[tuple[str, Sequence[int]]], point: Any, checkpoint: str = "ck", **more: Any) -> None:
        nonlocal at
        rig.fill("in", 2)
        query = rig.start(SOURCE | {"consumerGroup": checkpoint}, None, checkpoint, format=RecordedSource, **more)
        query.advance(point)
        query.stop()
        source_calls, at = asked(rig, query, at)
        assert source_calls == [*expected, ("stop", [])]

    fresh: list[tuple[str, Sequence[int]]] = [
        ("initialOffset", []),
        ("latestOffset", [0, 2]),
        ("initialOffset", []),
        ("partitions", [0, 2]),
    ]
    run(fresh, "committed")
    run([("partitions", [2, 2]), ("latestOffset", [2, 4]), ("commit", [2]), ("partitions", [2, 4])], "written")
    run([("partitions", [4, 4]), ("partitions", [2, 4])], "committed")
    run([("partitions", [4, 4]), ("latestOffset", [4, 8]), ("commit", [4]), ("partitions", [4, 8])], "idle", available_now=True)
    run([("partitions", [8, 8]), ("latestOffset", [8, 10]), ("commit", [8]), ("partitions", [8, 10])], "written")
    run([("partitions", [10, 10]), ("partitions", [8, 10])], "idle", available_now=True)
    # Batch 0 is not committed.
    run([(method, [0, 14] if method != "initialOffset" else []) for method, _ in fresh], "written", "other")
    run([("partitions", [14, 14]), ("initialOffset", []), ("partitions", [0, 14])], "committed", "other")


@pytest.mark.parametrize("point", ["planned", "logged", "published", "committed"])
def test_a_source_without_new_messages_keeps_its_offset_beside_another_source(point: str, rig: LoopRig) -> None:
    """Both sources log an offset for each batch. Spark asks only a source whose offset is new for partitions."""
    rig.topic("in", 2, rows=10)
    rig.start({**SOURCE, "consumerGroup": "idle"}, None).process_all_available().stop()
    schema = StructType([StructField("queue_offset", LongType())])
    kept = rig.checkpoints["ck"]

    def reader() -> Any:
        return called_without_start(StreamReader)({"path": rig.path, "topic": "in", "consumerGroup": "idle"}, schema)

    first = OlderMicroBatches(reader(), kept)
    first.open()
    # The other source has new messages, so Spark runs a batch with the answer of this source, which repeats its offset.
    assert first.latest_offset(None) is None
    end = kept.log[-1]
    if point != "planned":
        first.write_offset_log(end)
        first.commit_source()
    if point == "committed":
        first.write_commit_log()
    first.reader.stop()
    second = OlderMicroBatches(reader(), kept)
    second.open()
    if second.in_flight:
        second.write_commit_log()
    rig.fill("in", 4, first=10)
    following = second.latest_offset(None)
    assert following is not None
    second.write_offset_log(following)
    planned: Any = second.partitions()
    assert sorted((part.queue.queue_id, part.begin, part.end) for part in planned) == [(0, 5, 7), (1, 5, 7)]
    second.reader.stop()


@pytest.mark.parametrize("limit", [{"maxOffsetsPerTrigger": "4"}, {"maxBytesPerTrigger": "8"}, {"minOffsetsPerTrigger": "100"}])
def test_a_run_with_available_now_warns_of_messages_beyond_its_limit(
    limit: dict[str, str], rig: LoopRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.topic("in", 2, rows=10)
    query = rig.start({**SOURCE, **limit}, OUT, available_now=True).process_all_available()
    left = 10 - sum(query.rows)
    assert left
    [warning] = caplog.messages
    assert f"leaves {left} messages" in warning
    assert "run the query again until nothing is left" in warning


def test_a_run_with_available_now_is_repeated_until_nothing_is_left(rig: LoopRig, caplog: pytest.LogCaptureFixture) -> None:
    rig.topic("in", 2, rows=10)
    runs = rig.run({**SOURCE, "maxOffsetsPerTrigger": "4"}, None)
    assert [run.rows for run in runs] == [[4], [4], [2], []]
    assert len(caplog.messages) == 2
    # The last run had nothing to read, so the source knows that everything is processed, and gives its queues back.
    assert rig.offsets("g") == {0: 5, 1: 5}
    assert not [lock for lock in rig.broker.admin.locks("g") if lock.held]


def test_a_run_with_available_now_warns_if_it_only_repeats_a_batch(rig: LoopRig, caplog: pytest.LogCaptureFixture) -> None:
    rig.topic("in", 2, rows=10)
    query = rig.start(SOURCE, OUT)
    query.advance("written")
    query.kill()
    rig.fill("in", 10, first=10)
    assert rig.start(SOURCE, OUT, available_now=True).process_all_available().rows == [10]
    [warning] = caplog.messages
    assert "repeats the last micro-batch" in warning
    assert rig.copied() == [10]
    assert numbers(rig.bodies("out")) == list(range(20))


def test_a_query_without_a_limit_warns_of_nothing(rig: LoopRig, caplog: pytest.LogCaptureFixture) -> None:
    rig.topic("in", 2, rows=10)
    assert rig.copied() == [10]
    assert caplog.messages == []


def test_the_wrapper_of_available_now_is_refused_where_it_would_lose_the_place_in_the_checkpoint(rig: LoopRig) -> None:
    rig.topic("in", 1, rows=4)
    rig.start(SOURCE, None).process_all_available().stop()
    end = rig.checkpoints["ck"].end(-1)
    reader: Any = called_without_start(StreamReader)({"path": rig.path, **SOURCE}, full_schema())
    reader.latestOffset()
    with pytest.raises(OptionError, match=r"ORDEREDMQ_OPTION.UNSUPPORTED.*triggerAvailableNowWrapper"):
        reader.partitions(end, end)
    reader.stop()


@pytest.mark.holds("releases of Spark")
@pytest.mark.parametrize("point", ["planned", "logged", "written", "published", "committed", "idle"])
@pytest.mark.parametrize("releases", [(False, True, False), (True, False, True)], ids=["4.3-4.1-4.3", "4.1-4.3-4.1"])
def test_a_checkpoint_moves_between_releases(releases: Sequence[bool], point: Any, rig: LoopRig) -> None:
    rig.topic("in", 2)
    source = {**SOURCE, "maxOffsetsPerTrigger": "4"}
    for number, older in enumerate(releases):
        rig.fill("in", 10, first=10 * number)
        query = rig.start(source, OUT, older=older)
        query.advance(point)
        query.kill()
    query = rig.start(source, OUT, older=releases[0]).process_all_available()
    assert numbers(rig.bodies("out")) == list(range(30))
    query.stop()


def test_the_end_of_the_queues_is_in_the_offset_that_spark_reports(rig: LoopRig) -> None:
    rig.topic("in", 1, rows=10)
    query = rig.start({**SOURCE, "maxOffsetsPerTrigger": "4", "parkingLot": "true"}, None)
    query.advance("committed")
    latest = json.loads(query.checkpoint.log[-1])["latest"]
    assert latest["next"] == {"in": {"embedded": {"0": 10}}}
    assert latest["parked"]["messages"] == 0


def test_the_arrow_schema_is_the_one_that_spark_makes() -> None:
    schema = full_schema("properties", "lock_token", "ticket")
    required = StructType([StructField(field.name, field.dataType, nullable=False) for field in schema.fields])
    assert arrow_schema(schema).equals(to_arrow_schema(schema, timezone="UTC"))
    assert arrow_schema(required).equals(to_arrow_schema(required, timezone="UTC"))


def test_pickles_find_the_class_by_its_own_name() -> None:
    kind = called_without_start(StreamReader)
    assert (kind.__module__, kind.__qualname__) == ("ordered_source.stream_reader", "StreamReader")
