"""Messages lost before they are read: an error that names the range or, if the loss is accepted, a warning with the count."""

from __future__ import annotations

import shutil
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

import orderedmq
from ordered_source import partition_reader
from ordered_source.admission import Admission
from ordered_source.columns import full_schema
from ordered_source.stream_reader import StreamReader
from orderedmq.broker import TopicInfo
from orderedmq.embedded.log import EmbeddedLog
from orderedmq.embedded.store.schema import QUEUES
from orderedmq.errors import DataLossError, OptionError
from orderedmq.model import MessageQueue, OffsetRange, missing_topic
from orderedmq.options.parse import parse
from orderedmq.options.source import SourceOptions
from tests.contract import support
from tests.live.spark.conftest import StoreRig, numbers
from tests.loop.conftest import LoopRig, LoopWorld
from tests.micro_batches import Point
from tests.stopped_readers import stopped

ACCEPT = {"failOnDataLoss": "false"}


def trim(world: LoopWorld, before: int) -> None:
    """Delete messages below ``before``, as retention does, and assert that some were deleted."""
    gone = world.broker.admin.trim("in", dict.fromkeys(world.queues, before))
    assert all(gone[queue] > 0 for queue in world.queues)
    assert all(at.min_offset == before for at in world.broker.log.bounds(world.queues).values())


def fill(world: LoopWorld) -> None:
    """Produce three chunks, which end at offsets 100, 140 and 150, so that retention can delete them one by one."""
    for rows in (100, 40, 10):
        world.produce(rows)


def lost(world: LoopWorld, begin: int, end: int) -> list[dict[str, Any]]:
    return [{"event": "loss", "queue": str(queue), "begin": begin, "end": end} for queue in world.queues]


def sent_before(world: LoopWorld, end: int) -> list[dict[str, Any]]:
    """Return send events for messages below ``end``, which ``produce`` wrote and retention has since deleted."""
    return [
        {"event": "send", "queue": str(queue), "offset": place, "key": f"{queue.queue_id}-{place % 7}", "id": f"{queue}:{place}",
         "outcome": "ok"}
        for queue in world.queues for place in range(end)
    ]  # fmt: skip


@pytest.mark.parametrize("accept", [False, True], ids=["fails", "accepted"])
def test_messages_that_age_out_between_planning_and_reading(accept: bool, world: LoopWorld) -> None:
    fill(world)
    query = world.start(source=ACCEPT if accept else {})
    query.advance("logged")
    trim(world, 100)
    if not accept:
        text = world.fail(query)
        assert "[ORDEREDMQ_DATA_LOSS.AGED_OUT] messages 0 to 99 (100) of queue in/embedded/" in text
        assert world.count() == 0
        # Run the same batch again, with the loss accepted.
        query = world.start(source=ACCEPT)
    query.process_all_available().stop()
    assert world.count() == 150
    for queue in world.queues:
        assert f"100 messages of queue {queue} are lost, from 0 to 99" in world.log()
    world.judge(*sent_before(world, 150), *lost(world, 0, 100))


def test_messages_that_age_out_while_the_bytes_of_a_batch_are_counted_are_planned(world: LoopWorld) -> None:
    """The tasks that read these messages report the loss, or skip them."""
    fill(world)
    options = {"path": str(world.path), "topic": "in", "consumerGroup": "g", "maxBytesPerTrigger": "1m"}
    trim(world, 100)
    backlog = dict.fromkeys(world.queues, OffsetRange(0, 150))
    counts = Admission(parse(SourceOptions, options, streaming=True), 0).count_messages(
        world.broker.log, backlog, ReadMaxRows(500), 0
    )
    assert counts == dict.fromkeys(world.queues, 150)


def recreate(world: LoopWorld) -> None:
    world.broker.admin.delete_topic("in")
    world.broker.admin.create_topic("in", len(world.queues))
    for queue in world.queues:
        world.broker.log.append({queue: pa.record_batch({"body": [f"new {queue}:{place}".encode() for place in range(5)]})})


def bodies(world: LoopWorld) -> list[str]:
    return [body for queue in world.broker.log.queues("out") for body in support.bodies(world.broker, queue)]


def expected(world: LoopWorld, rows: int) -> list[str]:
    new = [f"new {queue}:{place}" for queue in world.queues for place in range(5)]
    return sorted([f"{queue}:{place}" for queue in world.queues for place in range(rows)] + new)


@pytest.mark.holds("named loss")
@pytest.mark.parametrize("running", [True, False], ids=["while it runs", "between two runs"])
def test_a_topic_that_was_deleted_and_created_again(running: bool, world: LoopWorld) -> None:
    world.produce(30)
    if running:
        query = world.start().process_all_available()
        recreate(world)
    else:
        world.run()
        recreate(world)
        query = world.start()
    text = world.fail(query)
    assert "[ORDEREDMQ_DATA_LOSS.TOPIC_RECREATED] topic 'in' was deleted and created again" in text
    assert "failOnDataLoss=false" in text
    assert world.count() == 90
    world.run(source=ACCEPT)
    assert "TOPIC_RECREATED" in world.log()
    assert sorted(bodies(world)) == expected(world, 30)
    assert world.group_at() == {0: 5, 1: 5, 2: 5}
    world.produce(1)
    world.run()
    assert world.count() == 108


@pytest.mark.holds("named loss")
@pytest.mark.parametrize("accept", [False, True], ids=["fails", "accepted"])
@pytest.mark.parametrize(
    ("again", "name"), [(False, "TOPIC_DELETED"), (True, "TOPIC_RECREATED")], ids=["deleted", "and created again"]
)
@pytest.mark.parametrize("when", ["before it is read", "while it is read", "after it is read"])
def test_a_topic_that_is_deleted_while_its_batch_runs(
    when: str,
    again: bool,
    name: str,
    accept: bool,
    rig: LoopRig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The query has not lost its locks to another one. What it had read before is written, once."""
    monkeypatch.setattr(partition_reader, "CHECK_INTERVAL", -1)
    for topic in ("in-a", "in-b"):
        rig.topic(topic, 1, rows=3)

    def delete() -> None:
        rig.broker.admin.delete_topic("in-b")
        if again:
            rig.topic("in-b", 1, rows=2)

    def pass_on(rows: pa.RecordBatch) -> pa.RecordBatch:
        if when == "while it is read" and rows["topic"].to_pylist() == ["in-b"] and deletions:
            deletions.pop()()
        return rows.drop_columns(["topic"])

    deletions = [delete]
    read = {"before it is read": 0, "while it is read": 1, "after it is read": 3}[when]
    source = {"topicPattern": "in-.*", "consumerGroup": "g", "pullBatchSize": 1, "failOnDataLoss": not accept}
    query = rig.start(source, {"topic": "out", "topicQueueNums": 1, "onKeyConflict": "ignore"}, rows=pass_on)
    query.advance("written" if when == "after it is read" else "logged")
    if when != "while it is read":
        delete()
    if accept:
        query.process_all_available()
        if read < 3:
            assert f"{3 - read} messages of queue in-b/embedded/0 are lost, from {read} to 2" in caplog.text
        assert query.rows == [3 + read] + ([2] if again else [])
    else:
        with pytest.raises(DataLossError, match=name):
            query.process_all_available()
        query = rig.start({**source, "failOnDataLoss": False}, {"topic": "out", "onKeyConflict": "ignore"}, rows=pass_on)
        query.process_all_available()
    written = {"in-a": 3, "in-b": (read if accept or read == 3 else 0) + (2 if again else 0)}
    assert sum(map(len, rig.bodies("out").values())) == sum(written.values())
    assert query.reader._run.owner.owned.keys() == {MessageQueue(topic, "embedded", 0) for topic in ("in-a", *["in-b"][:again])}
    query.stop()
    assert [lock.queue.topic for lock in rig.broker.admin.locks()] == ["in-a", *["in-b"][:again]]


def restored(rig: LoopRig, source: dict[str, str]) -> str:
    """Take a snapshot after 10 messages, and let the query process 20 more, which the snapshot lacks. Return the snapshot's path."""
    rig.topic("in", 1, rows=10)
    rig.start(source, None, available_now=True).process_all_available()
    path = str(rig.folder / "snapshot")
    orderedmq.snapshot(rig.path, path)
    rig.fill("in", 20, first=10)
    rig.start(source, None, available_now=True).process_all_available()
    return path


def send_again(path: str, count: int) -> None:
    with orderedmq.connect(path) as broker:
        broker.log.append({MessageQueue("in", "embedded", 0): pa.record_batch({"body": [b"again"] * count})})


def test_messages_that_a_restored_store_lacks_are_read_when_they_are_sent_again(rig: LoopRig) -> None:
    source = {"topic": "in", "consumerGroup": "g"}
    source["path"] = restored(rig, source)
    with pytest.raises(DataLossError, match="BEYOND_END"):
        rig.start(source, None, available_now=True).process_all_available()
    send_again(source["path"], 20)
    query = rig.start(source, None, "new", available_now=True).process_all_available()
    assert [batch.ranges for batch in query.batches] == [{"in/embedded/0": (10, 30)}]


@pytest.mark.parametrize("reads_as", [{"consumerGroup": "g"}, {"messageModel": "broadcasting"}], ids=["group", "broadcasting"])
def test_an_accepted_lost_end_is_skipped_only_once(reads_as: dict[str, str], rig: LoopRig) -> None:
    source = {"topic": "in", **reads_as}
    source["path"] = restored(rig, source)
    rig.start({**source, **ACCEPT}, None, available_now=True).process_all_available()
    send_again(source["path"], 5)
    query = rig.start(source, None, available_now=True).process_all_available()
    assert [batch.ranges for batch in query.batches] == [{"in/embedded/0": (10, 15)}]


def test_an_accepted_lost_end_is_known_to_the_next_run_also_if_it_was_not_logged(rig: LoopRig) -> None:
    source = {"topic": "in", "consumerGroup": "g"}
    source["path"] = restored(rig, source)
    query = rig.start({**source, **ACCEPT}, None)
    query.advance("planned")
    query.kill()
    send_again(source["path"], 5)
    query = rig.start(source, None, available_now=True).process_all_available()
    assert [batch.ranges for batch in query.batches] == [{"in/embedded/0": (10, 15)}]


def test_an_accepted_lost_end_moves_the_group_back(rig: LoopRig) -> None:
    rig.topic("in", 1, rows=10)
    support.commit_beyond_end(rig.broker, rig.broker.log.queues("in")[0], "g")
    rig.copied(**ACCEPT)
    assert rig.offsets("g") == {0: 10}
    rig.fill("in", 5, first=10)
    assert rig.copied("new") == [5]


def overtaken(rig: LoopRig) -> None:
    """Copy 10 messages of topic ``in``, let retention delete them and the 20 that follow, then add 5 more."""
    rig.topic("in", 1, rows=10)
    rig.copied()
    rig.fill("in", 20, first=10)
    gone = rig.broker.admin.trim("in", {rig.broker.log.queues("in")[0]: 30})
    assert sum(gone.values()) == 30, "the test needs messages that are lost"
    rig.fill("in", 5, first=30)


def test_retention_that_overtakes_a_reader_names_the_range_that_is_lost(rig: LoopRig) -> None:
    overtaken(rig)
    assert "[ORDEREDMQ_DATA_LOSS.AGED_OUT] messages 10 to 29 (20) of queue in/embedded/0" in rig.fails()
    assert numbers(rig.bodies("out")) == list(range(10))


def test_an_accepted_loss_is_skipped_once(rig: LoopRig) -> None:
    overtaken(rig)
    assert rig.copied(failOnDataLoss="false") == [5]
    assert numbers(rig.bodies("out")) == [*range(10), *range(30, 35)]
    assert rig.copied() == []


def test_a_deleted_topic_is_noticed(rig: LoopRig) -> None:
    rig.topic("in", 2, rows=20)
    rig.topic("in-b", 1, rows=4)
    source = {"topicPattern": "in.*", "consumerGroup": "g"}
    sink = {"topic": "out", "topicQueueNums": 2, "onKeyConflict": "ignore"}
    rig.start(source, sink, available_now=True).process_all_available()
    rig.broker.admin.delete_topic("in-b")
    with pytest.raises(DataLossError, match=r"ORDEREDMQ_DATA_LOSS.TOPIC_DELETED.*'in-b'"):
        rig.start(source, sink, available_now=True).process_all_available()
    rig.fill("in", 6, first=20)
    rig.start({**source, "failOnDataLoss": "false"}, sink, available_now=True).process_all_available()
    assert sum(map(len, rig.bodies("out").values())) == 30


@pytest.mark.parametrize("options", [{"topic": "in"}, {"topicPattern": "in"}], ids=["topic", "pattern"])
def test_a_topic_that_the_options_no_longer_select_is_not_lost(
    options: dict[str, str], rig: LoopRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.topic("in", 1, rows=2)
    rig.topic("in-b", 1, rows=3)
    both = {"topic": "in,in-b", "consumerGroup": "g"}
    rig.start(both, None, available_now=True).process_all_available()
    for _ in range(2):
        rig.start({**options, "consumerGroup": "g"}, None, available_now=True).process_all_available()
    assert caplog.text.count("the options no longer select topic 'in-b'") == 1
    rig.fill("in-b", 4, first=3)
    query = rig.start(both, None, available_now=True).process_all_available()
    assert [batch.ranges for batch in query.batches] == [{"in-b/embedded/0": (3, 7)}]


@pytest.mark.parametrize(
    ("assignment", "killed", "goes_on"),
    [
        ("exclusive", "logged", False),
        ("exclusive", "logged", True),
        ("exclusive", "committed", True),
        ("shared", "logged", False),
        ("shared", "committed", False),
    ],
)
def test_a_topic_that_is_selected_again_goes_on_where_the_query_left_it(
    assignment: str, killed: Point, goes_on: bool, rig: LoopRig
) -> None:
    """Spark commits a logged batch as a whole, so the run without the topic must repeat it, and commit it for the group."""
    rig.topic("in", 1, rows=2)
    rig.topic("in-b", 1, rows=3)
    both = {"topic": "in,in-b", "consumerGroup": "g", "assignment": assignment}
    query = rig.start(both, None)
    query.advance(killed)
    query.kill()
    query = rig.start({**both, "topic": "in"}, None)
    query.advance("committed")
    repeated = {"in/embedded/0": (0, 2), "in-b/embedded/0": (0, 3)}
    assert query.batches[0].ranges == (repeated if killed == "logged" else {})
    if goes_on:
        query.process_all_available()
        assert [owned.topic for owned in query.reader._run.owner.owned] == ["in"]
    query.kill()
    rig.fill("in-b", 1, first=3)
    query = rig.start(both, None).process_all_available()
    assert [batch.ranges for batch in query.batches if batch.rows] == [{"in-b/embedded/0": (3, 4)}]


def test_a_topic_that_another_query_took_over_is_left_to_it(rig: LoopRig) -> None:
    """Two exclusive queries of a group may read different topics."""
    rig.topic("in", 1, rows=2)
    rig.topic("in-b", 1, rows=3)
    source = {"topic": "in,in-b", "consumerGroup": "g", "lockTimeout": "0s"}
    rig.start(source, None, available_now=True).process_all_available()
    other = rig.start({**source, "topic": "in-b"}, None, "other").process_all_available()
    query = rig.start({**source, "topic": "in"}, None).process_all_available()
    rig.fill("in", 1, first=2)
    rig.fill("in-b", 1, first=3)
    assert (query.process_all_available().rows, other.process_all_available().rows) == ([1], [1])


def test_a_query_without_a_group_does_not_forget_where_it_was_in_a_topic(rig: LoopRig) -> None:
    rig.topic("in", 1, rows=2)
    rig.topic("in-b", 1, rows=3)
    both = {"topic": "in,in-b", "messageModel": "broadcasting"}
    rig.start(both, None, available_now=True).process_all_available()
    with pytest.raises(OptionError, match=r"CONFLICT.*no longer select topic 'in-b'.*Select the topic again"):
        rig.start({**both, "topic": "in"}, None, available_now=True).process_all_available()
    rig.fill("in-b", 4, first=3)
    query = rig.start(both, None, available_now=True).process_all_available()
    assert [batch.ranges for batch in query.batches] == [{"in-b/embedded/0": (3, 7)}]


@pytest.mark.holds("unreadable is not lost")
def test_a_topic_that_is_not_listed_for_a_moment_keeps_its_position(rig: LoopRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted nameserver does not list the topics of brokers that have not reported to it yet."""
    rig.topic("in-a", 1, rows=2)
    rig.topic("in-b", 1, rows=3)
    source, topic = {"topicPattern": "in-.*", "messageModel": "broadcasting"}, EmbeddedLog.topic

    def listed(log: EmbeddedLog, name: str) -> TopicInfo:
        if name == "in-b":
            raise missing_topic(name)
        return topic(log, name)

    rig.run(source, None)
    rig.fill("in-a", 1, first=2)
    with monkeypatch.context() as patch:
        patch.setattr(EmbeddedLog, "topics", lambda log: [topic(log, "in-a")])
        patch.setattr(EmbeddedLog, "topic", listed)
        [query] = rig.run(source, None)
        assert [batch.ranges for batch in query.batches] == [{"in-a/embedded/0": (2, 3)}]
    rig.fill("in-b", 4, first=3)
    [query] = rig.run(source, None)
    assert [batch.ranges for batch in query.batches] == [{"in-b/embedded/0": (3, 7)}]


@pytest.mark.parametrize("again", [False, True], ids=["deleted", "created again"])
def test_a_query_without_a_group_goes_on_without_a_topic_that_was_deleted(again: bool, rig: LoopRig) -> None:
    rig.topic("in", 1, rows=2)
    rig.topic("in-b", 1, rows=3)
    both = {"topic": "in,in-b", "messageModel": "broadcasting"}
    rig.start(both, None, available_now=True).process_all_available()
    rig.broker.admin.delete_topic("in-b")
    if again:
        rig.topic("in-b", 1, rows=3)
    rig.fill("in", 1, first=2)
    assert rig.start({**both, "topic": "in"}, None, available_now=True).process_all_available().rows == [1]


@pytest.mark.parametrize(
    ("point", "limit"),
    [("logged", {}), ("committed", {"maxOffsetsPerTrigger": 2}), ("committed", {"maxBytesPerTrigger": 10})],
    ids=["before it is read", "with a limit of messages", "with a limit of bytes"],
)
def test_an_accepted_deletion_of_a_queue(
    point: Point, limit: dict[str, int], rig: LoopRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.topic("in", 2, rows=24)
    kept, removed = rig.broker.log.queues("in")
    query = rig.start({"topic": "in", "consumerGroup": "g", **limit, **ACCEPT}, None)
    query.advance(point)
    # Do what RocketMQ's tools can do: remove a queue from a topic.
    with rig.broker.admin._write() as txn:  # type: ignore[attr-defined]
        txn.delete(QUEUES, removed.topic, removed.queue_id)
    query.process_all_available()
    later = query.batches[1:]
    assert all(set(batch.ranges) == {str(kept)} and batch.rows for batch in later)
    assert query.batches[-1].ranges[str(kept)][1] == 12
    assert f"QUEUE_DELETED] queue {removed} was deleted or removed from its topic" in caplog.text
    assert "TOPIC_DELETED" not in caplog.text


def test_an_accepted_deletion_of_the_last_topic_that_matches(rig: LoopRig) -> None:
    rig.topic("in-a", 1, rows=2)
    source = {"topicPattern": "in-.*", "consumerGroup": "g", **ACCEPT}
    query = rig.start(source, None).process_all_available()
    rig.broker.admin.delete_topic("in-a")
    query.process_all_available()
    rig.topic("in-b", 1, rows=3)
    assert query.process_all_available().rows == [2, 3]


@pytest.mark.holds("replaced store")
@pytest.mark.parametrize("options", [{}, {"failOnDataLoss": "false"}], ids=["", "failOnDataLoss=false"])
def test_a_checkpoint_of_another_store_is_refused(rig: LoopRig, options: dict[str, str]) -> None:
    rig.topic("in", 2, rows=20)
    rig.copied()
    rig.broker.close()
    shutil.move(rig.path, rig.path + "-before")
    with orderedmq.connect(rig.path) as broker:
        StoreRig(broker, rig.path, rig.folder).topic("in", 2, rows=4)
    assert f"[ORDEREDMQ_STORE.REPLACED] the store at {rig.path} is not the one" in rig.fails(**options)


def test_a_group_that_was_sought_back_is_followed_at_the_restart(rig: LoopRig) -> None:
    rig.topic("in", 1, rows=10)
    rig.copied()
    rig.broker.admin.seek("g", {MessageQueue("in", "embedded", 0): 4})
    assert rig.copied() == [6]
    assert numbers(rig.bodies("out")) == sorted([*range(10), *range(4, 10)])
    assert rig.copied() == []


@pytest.mark.holds("named loss")
def test_an_accepted_loss_is_warned_of_with_its_exact_count(rig: LoopRig, caplog: pytest.LogCaptureFixture) -> None:
    rig.topic("in", 1, rows=10)
    start = '{"in": {"embedded": {"0": 3}}}'
    options = {"path": rig.path, "topic": "in", "consumerGroup": "g", "startingOffsets": start, "failOnDataLoss": "false"}
    rig.fill("in", 20, first=10)
    rig.broker.admin.trim("in", {rig.broker.log.queues("in")[0]: 30})
    reader = StreamReader(options, full_schema())
    with stopped(reader):
        end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
        assert "messages 3 to 29 (27) of queue in/embedded/0" in caplog.text
        assert end["next"] == {"in": {"embedded": {"0": 30}}}
        assert list(reader.partitions({}, end)) == []
