"""When the driver plans parking lots: the reader runs on a real store, and the test parks messages as tasks would."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

import orderedmq
from ordered_source import stream_reader
from ordered_source.batch_reader import BatchReader
from ordered_source.columns import full_schema
from ordered_source.group_session import GroupSession
from ordered_source.partition_reader import QueuePartition
from ordered_source.stream_reader import StreamReader
from orderedmq.broker import Broker
from orderedmq.embedded import admin
from orderedmq.errors import DataLossError, GroupError, TopicError
from orderedmq.model import MessageQueue
from orderedmq.parking import AT_ONCE, HELD, Command, Parking, Ticket, parked_queue
from tests.micro_batches import Checkpoint, MicroBatches
from tests.stopped_readers import stopped
from tests.waits import until

QUEUE = MessageQueue("in", "embedded", 0)
LOT = parked_queue("g", QUEUE)
HOUR = 3_600_000


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with orderedmq.connect(tmp_path / "store") as made:
        made.admin.create_topic("in", 1)
        yield made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The driver's clock: it shows the real time plus ``passed`` seconds."""
    made = SimpleNamespace(passed=0.0)
    moved = SimpleNamespace(
        time=lambda: time.time() + made.passed, monotonic=lambda: time.monotonic() + made.passed, sleep=time.sleep
    )
    monkeypatch.setattr(stream_reader, "time", moved)
    return made


def produce(broker: Broker, *keys: str) -> None:
    rows = pa.record_batch({"body": pa.array([b"x"] * len(keys), pa.binary()), "sharding_key": list(keys)})
    broker.log.append({QUEUE: rows})


def options(broker: Broker, **more: str) -> dict[str, str]:
    path: Any = broker
    return {"path": str(path.path), "topic": "in", "consumerGroup": "g", "parkingLot": "true", **more}


class Run:
    """A query's driver: it plans batches, and the test does the work of their tasks. Planning a batch commits the one before."""

    def __init__(
        self, broker: Broker, checkpoint: Checkpoint | None = None, *, available_now: bool = False, **more: str
    ) -> None:
        self.broker = broker
        self.reader = StreamReader(options(broker, **more), full_schema())
        self.checkpoint = checkpoint or Checkpoint()
        self.spark = MicroBatches(self.reader, self.checkpoint)
        self.limit = self.spark.open(available_now=available_now)
        #: Whether this run planned the batch in flight. If not, the batch must be repeated.
        self.planned = False
        self.parts: list[QueuePartition] = []

    def batch(self) -> tuple[tuple[int, int], tuple[int, int]] | None:
        """Plan a batch, or repeat the one in flight. Return the ranges of the queue and of its lot; None if there is nothing to read."""
        if self.spark.in_flight and self.planned:
            self.spark.write_commit_log()
        if not self.spark.in_flight:
            end = self.spark.latest_offset(self.limit)
            if end is None:
                return None
            self.spark.write_offset_log(end)
            self.spark.commit_source()
        parts = self.spark.partitions()
        self.planned = True
        self.parts = [part for part in parts if isinstance(part, QueuePartition)]
        if not self.parts:
            return None
        [part] = self.parts
        assert part.queue == QUEUE
        assert part.lot is not None
        return (part.begin, part.end), part.lot

    def park(self, *tickets: Ticket) -> None:
        token = self.parts[0].token
        assert token is not None
        assert all(self.broker.groups.park(token, [Parking(QUEUE, one.offset, one) for one in tickets]))


def ticket(offset: int, due: int | None = None) -> Ticket:
    """The ticket of a message that is due in ``due`` ms; None: it waits for an older message of its key."""
    return Ticket(offset, 1, 1, AT_ONCE if due is None else int(time.time() * 1000) + due, "no")


def test_a_lot_is_read_when_its_first_key_is_due_and_then_whole(broker: Broker, clock: SimpleNamespace) -> None:
    produce(broker, "a", "b", "a")
    run = Run(broker)
    with stopped(run.reader):
        assert run.batch() == ((0, 3), (0, 0))
        run.park(ticket(0, HOUR), ticket(2), ticket(1, 2 * HOUR))
        assert run.batch() is None
        produce(broker, "c")
        assert run.batch() == ((3, 4), (0, 0))
        clock.passed = 3000
        assert run.batch() is None
        clock.passed = 3700
        assert run.batch() == ((4, 4), (0, 3))
        assert run.batch() is None
        assert broker.groups.offsets("g", [QUEUE, LOT]) == {QUEUE: 4, LOT: 3}


@pytest.mark.holds("parked key returns")
def test_an_idle_query_looks_again_when_a_key_is_due_and_not_before(
    broker: Broker, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce(broker, "a")
    run = Run(broker)
    with stopped(run.reader):
        run.batch()
        run.park(ticket(0, HOUR))
        # The first boundary commits the offset, which is a change at the broker; the second finds no change.
        assert run.batch() is None
        assert run.batch() is None
        looks: list[int] = []
        look = GroupSession.boundary

        def boundary(*given: Any, **more: Any) -> None:
            looks.append(1)
            look(*given, **more)

        monkeypatch.setattr(GroupSession, "boundary", boundary)
        clock.passed = 3000
        assert run.batch() is None
        assert not looks
        clock.passed = 3700
        assert run.batch() == ((1, 1), (0, 1))


def test_parked_messages_of_a_dead_owner_wait_until_their_range_is_repeated(broker: Broker) -> None:
    produce(broker, *"aabbcc")
    run = Run(broker)
    with stopped(run.reader):
        run.batch()
        run.park(ticket(3, -HOUR))
    again = Run(broker, maxOffsetsPerTrigger="2")
    with stopped(again.reader):
        assert again.batch() == ((0, 2), (0, 0))
        assert again.batch() == ((2, 4), (0, 0))
        assert again.batch() == ((4, 6), (0, 1))


def test_a_run_with_available_now_reads_what_was_due_when_it_began(broker: Broker, clock: SimpleNamespace) -> None:
    produce(broker, "a", "b")
    run = Run(broker)
    with stopped(run.reader):
        run.batch()
        run.park(ticket(1, HOUR))
        assert run.batch() is None
    now = Run(broker, run.checkpoint, available_now=True)
    with stopped(now.reader):
        clock.passed = 3700
        assert now.batch() is None
    later = Run(broker, run.checkpoint, available_now=True)
    with stopped(later.reader):
        assert later.batch() == ((2, 2), (0, 1))


@pytest.mark.holds("full lot")
def test_while_a_lot_is_full_no_more_of_its_queue_is_read(
    broker: Broker, clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    produce(broker, "a", "b")
    run = Run(broker, parkingLotMaxMessages="2")
    with stopped(run.reader):
        run.batch()
        run.park(ticket(0, HOUR), ticket(1, HOUR))
        produce(broker, "c")
        assert run.batch() is None
        assert run.batch() is None
        assert [record for record in caplog.messages if "parking lot of queue in/embedded/0 has 2 messages" in record]
        clock.passed = 3700
        assert run.batch() == ((2, 2), (0, 2))
        assert run.batch() == ((2, 3), (2, 2))


def test_a_restart_repeats_the_lots_range_with_the_queues(broker: Broker, clock: SimpleNamespace) -> None:
    produce(broker, "a", "b")
    run = Run(broker)
    with stopped(run.reader):
        run.batch()
        run.park(ticket(0, -HOUR))
        produce(broker, "c")
        assert run.batch() == ((2, 3), (0, 1))
    again = Run(broker, run.checkpoint)
    with stopped(again.reader):
        assert again.batch() == ((2, 3), (0, 1))
        assert again.batch() is None
        assert broker.groups.offsets("g", [QUEUE, LOT]) == {QUEUE: 3, LOT: 1}
        assert [lock.queue for lock in broker.admin.locks("g")] == [QUEUE]


def test_a_batch_that_was_logged_without_parking_lots_is_repeated_with_them(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    produce(broker, "a")
    plain = {name: value for name, value in options(broker).items() if name != "parkingLot"}
    reader = StreamReader(plain, full_schema())
    with stopped(reader):
        logged = reader.latestOffset({}, ReadAllAvailable())
    run = Run(broker, Checkpoint([json.dumps(logged)]))
    with stopped(run.reader):
        assert run.batch() == ((0, 1), (0, 0))
        assert run.batch() is None
    assert "not repeated" not in caplog.text


@pytest.mark.holds("unread lot")
def test_a_query_without_parking_lots_is_refused_while_something_is_parked(broker: Broker) -> None:
    produce(broker, "a")
    run = Run(broker)
    with stopped(run.reader):
        run.batch()
        run.park(ticket(0, HOUR))
    plain = {name: value for name, value in options(broker).items() if name != "parkingLot"}
    reader = StreamReader(plain, full_schema())
    with stopped(reader), pytest.raises(GroupError, match=r"GROUP.PARKED.* 1 of topic 'in'.*parkingLot=true"):
        reader.latestOffset({}, ReadAllAvailable())
    other = StreamReader({**plain, "consumerGroup": "other"}, full_schema())
    with stopped(other):
        other.latestOffset({}, ReadAllAvailable())


@pytest.mark.holds("no silent loss of parked messages")
def test_a_lot_is_read_by_its_groups_query_and_by_batches_alone(broker: Broker) -> None:
    """A stream of the group that reads the lot would move the lot's offset past parked messages, and they would be lost."""
    produce(broker, "a", "b")
    run = Run(broker)
    with stopped(run.reader):
        run.batch()
        run.park(ticket(0, HOUR), ticket(1, HOUR))
        before = broker.log.change()
        plain = {name: value for name, value in options(broker, topic=LOT.topic).items() if name != "parkingLot"}
        other = {**plain, "messageModel": "broadcasting"}
        del other["consumerGroup"]
        for given in (plain, {**plain, "parkingLot": "true"}, {**plain, "consumerGroup": "h"}, other):
            with pytest.raises(
                TopicError, match="RESERVED.*%PARKED%g%in.*group 'g'.*'in'.*parkingLot=true.*orderedmq parked list g"
            ):
                StreamReader(given, full_schema())
        assert broker.log.change() == before
        schema = full_schema("properties")
        batch = BatchReader({**plain, "startingOffsets": "committed", "includeProperties": "true"}, schema)
        [part] = batch.partitions()
        [rows] = batch.read(part)
        assert rows.column("sharding_key").to_pylist() == ["a", "b"]
        assert [dict(one)["OMQ_PARKED_OFFSET"] for one in rows.column("properties").to_pylist()] == ["0", "1"]
        assert broker.log.change() == before


def test_the_progress_of_a_query_with_a_parking_lot_says_what_is_parked(broker: Broker) -> None:
    produce(broker, "a", "b", "a")
    stored = broker.log.pull(QUEUE, 0, 1, 1 << 20, ("store_timestamp",)).column(0).cast(pa.int64())[0].as_py()
    run = Run(broker)
    with stopped(run.reader):
        run.batch()
        nothing = {"messages": 0, "keys": 0, "oldest": None, "retries": 0}
        assert run.reader.reportLatestOffset() == {"next": {"in": {"embedded": {"0": 3}}}, "parked": nothing}
        run.park(Ticket(0, 3, 1, HELD), Ticket(2, 0, 0, AT_ONCE), Ticket(1, 2, 1, HELD))
        assert run.batch() is None
        parked = {"messages": 3, "keys": 2, "oldest": stored // 1000, "retries": 5}
        assert run.reader.reportLatestOffset() == {"next": {"in": {"embedded": {"0": 3}}}, "parked": parked}
        broker.admin.command_parked("g", QUEUE, [Command("retry", "a"), Command("retry", "b")])
        assert run.batch() == ((3, 3), (0, 5))
        assert run.batch() is None
        assert run.reader.reportLatestOffset() == {"next": {"in": {"embedded": {"0": 3}}}, "parked": nothing}


@pytest.mark.parametrize("accepted", ["false", "true"])
def test_the_deletion_of_a_lot_ends_its_query_and_the_next_run_has_a_new_lot(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, accepted: str
) -> None:
    """RocketMQ's own tools can delete the lot."""
    produce(broker, "a")
    run = Run(broker, failOnDataLoss=accepted)
    with stopped(run.reader):
        run.batch()
        run.park(ticket(0, -HOUR))
        assert run.batch() == ((1, 1), (0, 1))
        assert run.batch() is None
        monkeypatch.setattr(admin, "_refuse_parked", lambda topic: None)
        broker.admin.delete_topic(LOT.topic)
        produce(broker, "b")
        with pytest.raises(DataLossError, match="QUEUE_DELETED.*%PARKED%g%in.*Restart the query"):
            run.batch()
    again = Run(broker, run.checkpoint, failOnDataLoss=accepted)
    with stopped(again.reader):
        assert again.batch() == ((1, 2), (0, 0))
        parks_and_gets_it_back(broker, again, 1)


def test_parked_messages_that_aged_out_are_an_error_or_a_counted_warning(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The test deletes parked messages as RocketMQ's brokers do, by age alone."""
    produce(broker, "a", "b")
    run = Run(broker)
    with stopped(run.reader):
        run.batch()
        run.park(ticket(0, HOUR), ticket(1, HOUR))
        assert run.batch() is None
    monkeypatch.setattr(admin, "_refuse_parked", lambda topic: None)
    broker.admin.trim(LOT.topic, {LOT: 2})
    failing = Run(broker, run.checkpoint)
    with stopped(failing.reader), pytest.raises(DataLossError, match="AGED_OUT.*%PARKED%g%in.*failOnDataLoss"):
        failing.batch()
    going = Run(broker, run.checkpoint, failOnDataLoss="false")
    with stopped(going.reader):
        produce(broker, "c")
        assert going.batch() == ((2, 3), (2, 2))
        assert any("AGED_OUT" in text and "messages 0 to 1 (2)" in text for text in caplog.messages)


def processed_lot(broker: Broker) -> Checkpoint:
    """Run a query that processes a lot of two messages to its end. Return its checkpoint."""
    produce(broker, "a", "b", "c")
    run = Run(broker)
    with stopped(run.reader):
        run.batch()
        run.park(ticket(0, -HOUR), ticket(1, -HOUR))
        assert run.batch() == ((3, 3), (0, 2))
        assert run.batch() is None
        return run.checkpoint


def parks_and_gets_it_back(broker: Broker, run: Run, at: int) -> None:
    """Park the message that the batch at ``at`` reads. The lot must be new: the next batch reads the message at its beginning."""
    run.park(ticket(at, -HOUR))
    assert broker.log.bounds([LOT])[LOT].max_offset == 1
    assert run.batch() == ((at + 1, at + 1), (0, 1))


def test_lots_of_a_topic_that_was_created_anew_begin_anew(broker: Broker) -> None:
    checkpoint = processed_lot(broker)
    broker.admin.delete_topic("in")
    broker.admin.create_topic("in", 1)
    produce(broker, "d")
    run = Run(broker, checkpoint, failOnDataLoss="false")
    with stopped(run.reader):
        assert run.batch() == ((0, 1), (0, 0))
        parks_and_gets_it_back(broker, run, 0)


def test_refuses_a_query_without_parking_lots_if_a_message_was_parked_while_it_waited(broker: Broker) -> None:
    """When the waiting query began, nothing was parked. Then the owner of the queue parked a message, and stopped."""
    owner = Run(broker)
    plain = {name: value for name, value in options(broker).items() if name != "parkingLot"}
    waiting = StreamReader({**plain, "lockTimeout": "60s"}, full_schema())
    produce(broker, "a")
    with stopped(waiting), ThreadPoolExecutor(1) as threads:
        with stopped(owner.reader):
            owner.batch()
            begun = threads.submit(waiting.latestOffset, {}, ReadAllAvailable())
            until(lambda: len(broker.groups.members("g")) == 2, "the second query waits for the lock")
            owner.park(ticket(0, HOUR))
        with pytest.raises(GroupError, match=r"GROUP.PARKED.* 1 of topic 'in'.*parkingLot=true"):
            begun.result()
