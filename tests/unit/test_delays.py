"""Delayed rows: the values that their columns may have, the values that brokers accept, and how the rows are sent."""

from __future__ import annotations

import datetime
import pathlib
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructType, TimestampNTZType, TimestampType
from typer.testing import CliRunner

import orderedmq
from ordered_sink.columns import plan_columns
from orderedmq.cli import app
from orderedmq.conditions import RocketMQCondition, UnavailableCondition
from orderedmq.errors import MessageError, OptionError, RocketMQError, RocketMQUnavailableError, SchemaError
from orderedmq.model import MessageQueue
from orderedmq.options.sink import SinkOptions
from orderedmq.rocketmq.messages import delayed
from orderedmq.rocketmq.messages.delayed import limits, limits_of
from orderedmq.rocketmq.sink import delayed_rows
from orderedmq.rocketmq.sink.broker_queue import LockTiming
from orderedmq.rocketmq.sink.commit_report import QueueReport
from orderedmq.rocketmq.sink.delayed_rows import DelayedRows
from orderedmq.rocketmq.sink.queue_writer import Start
from orderedmq.rocketmq.wire.codes import RequestCode
from orderedmq.rocketmq.wire.frame import RemotingCommand
from orderedmq.rows.delays import DelayLimits, delays, split
from orderedmq.tools.producer import Producer
from tests.unit.rocketmq_peer import Cluster, Link

NOW = 1_700_000_000_000
CLUSTER = {"namesrvAddr": "host:9876", "topic": "t"}
QUEUE = MessageQueue("t", "a", 1)


def at(ms: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(ms / 1000, datetime.UTC)


def batch(levels: Sequence[int | None] | None = None, times: Sequence[int | None] | None = None) -> pa.RecordBatch:
    """Rows 0, 1, ... with these columns. ``times`` are in ms since 1970."""
    count = len(levels or times or ())
    columns: dict[str, pa.Array] = {"body": pa.array([str(number).encode() for number in range(count)])}
    if levels is not None:
        columns["delay_time_level"] = pa.array(levels, pa.int64())
    if times is not None:
        given = [None if time is None else at(time) for time in times]
        columns["deliver_timestamp"] = pa.array(given, pa.timestamp("us", "Europe/Berlin"))
    return pa.record_batch(columns)


def checked(rows: pa.RecordBatch) -> pa.RecordBatch:
    found = delays(rows, "partition 0", 0)
    plain = rows.select(["body"])
    for name, column in found.items():
        plain = plain.append_column(name, column)
    return plain


# --- the columns


def plan(*columns: tuple[str, Any], **options: str) -> tuple[str, ...]:
    schema = StructType().add("body", BinaryType())
    for name, kind in columns:
        schema = schema.add(name, kind)
    given = {"topic": "t", **options} if "path" in options else {**CLUSTER, **options}
    return plan_columns(schema, SinkOptions.parse(given, streaming=True)).delays


KEY = ("sharding_key", StringType())
LEVEL = ("delay_time_level", IntegerType())
TIME = ("deliver_timestamp", TimestampType())


def test_rows_without_a_key_may_be_delayed() -> None:
    assert plan(LEVEL, TIME, shardingKey="none") == ("delay_time_level", "deliver_timestamp")
    assert plan(("queue_id", IntegerType()), TIME, messageQueueSelector="queueId") == ("deliver_timestamp",)


@pytest.mark.parametrize("column", [LEVEL, TIME])
def test_delays_collide_with_order_unless_the_user_says_that_they_have_none(column: tuple[str, Any]) -> None:
    for columns, options in (
        ([KEY, column], {}),
        ([("id", LongType()), column], {"shardingKey": "id"}),
        ([column], {"shardingKey": "none", "orderBy": "body"}),
    ):
        with pytest.raises(OptionError, match=rf"CONFLICT.*{column[0]}.*delayedRows=unordered.*shardingKey=none"):
            plan(*columns, **options)
        assert plan(*columns, **options, delayedRows="unordered") == (column[0],)
    assert plan(KEY) == ()


@pytest.mark.holds("delayed rows")
def test_the_embedded_broker_refuses_the_columns_by_name() -> None:
    for column in (LEVEL, TIME):
        with pytest.raises(OptionError, match=rf"UNSUPPORTED.*{column[0]}.*embedded broker.*namesrvAddr"):
            plan(column, path="/data/omq", shardingKey="none")
        assert plan(column, path="/data/omq", shardingKey="none", orderBy=column[0]) == ()


@pytest.mark.parametrize(
    "column",
    [("delay_time_level", StringType()), ("deliver_timestamp", LongType()), ("deliver_timestamp", TimestampNTZType())],
)
def test_a_delay_of_another_type_is_refused(column: tuple[str, Any]) -> None:
    with pytest.raises(SchemaError, match=rf"WRONG_TYPE.*{column[0]}.*Cast"):
        plan(column, shardingKey="none")


# --- the rows


def test_rows_with_a_value_are_delayed_and_the_others_are_not() -> None:
    ordinary, delayed = split(checked(batch([None, 3, 0, None], [None, None, None, NOW + 7])))
    assert ordinary.schema.names == ["body"]
    assert ordinary.column(0).to_pylist() == [b"0", b"2"]
    assert delayed is not None
    assert delayed.column(0).to_pylist() == [b"1", b"3"]
    assert delayed.column("delay_time_level").to_pylist() == [3, None]
    assert delayed.column("deliver_timestamp").cast(pa.int64()).to_pylist() == [None, NOW + 7]


@pytest.mark.parametrize("rows", [batch([None, 0]), batch(times=[None, None]), batch([0], [None])])
def test_columns_that_say_nothing_leave_no_trace(rows: pa.RecordBatch) -> None:
    assert delays(rows, "partition 0", 0) == {}
    assert split(checked(rows)) == (rows.select(["body"]), None)


def test_a_row_that_no_broker_would_understand_is_named() -> None:
    with pytest.raises(MessageError, match=r"BAD_DELAY.*row 12 for partition 0.*delay_time_level is -1"):
        delays(batch([None, 1, -1]), "partition 0", 10)
    with pytest.raises(MessageError, match=r"BAD_DELAY.*row 11 for partition 0 has both"):
        delays(batch([None, 1, 1], [NOW, NOW, None]), "partition 0", 10)
    empty = pa.record_batch({"body": [b"", b""], "delay_time_level": [0, 4]})
    with pytest.raises(MessageError, match=r"NULL_BODY.*row 1 for partition 0 is delayed"):
        delays(empty, "partition 0", 0)


@pytest.mark.parametrize("column", [pa.array([2**40]), pa.array([2**31], pa.uint32()), pa.array([2**63], pa.uint64())])
def test_a_level_beyond_all_numbers_of_java_is_refused_by_the_broker_and_is_no_smaller_one(column: pa.Array) -> None:
    rows = checked(pa.record_batch({"body": [b"x"], "delay_time_level": column}))
    with pytest.raises(MessageError, match=r"BAD_DELAY.*has the levels 1 to 18"):
        DelayLimits("a").require(rows, "queue t/a/1", 0, NOW)


def test_a_level_below_all_numbers_of_java_is_refused() -> None:
    with pytest.raises(MessageError, match=r"BAD_DELAY.*delay_time_level is -1"):
        delays(pa.record_batch({"body": [b"x"], "delay_time_level": [-(2**40)]}), "partition 0", 0)


# --- what brokers accept


OLD, NEW = 408, 453
WHEEL = {"timerWheelEnable": "true", "timerMaxDelaySec": "259200", "messageDelayLevel": "1s 5s 10s"}


def test_what_a_broker_accepts_follows_from_its_version_and_settings() -> None:
    assert limits("a", NEW, WHEEL) == DelayLimits("a", 3, None, 259_200_000)
    assert limits("a", NEW, {}) == DelayLimits("a", 18, None, None)
    assert "older than RocketMQ 5.0" in str(limits("a", OLD, {}).no_time)
    assert "timerWheelEnable is false" in str(limits("a", NEW, {**WHEEL, "timerWheelEnable": "false"}).no_time)


@pytest.mark.parametrize("version", [OLD, NEW])
def test_where_settings_may_not_be_read_the_version_decides(version: int) -> None:
    def call(request: Any, *_: object, **__: object) -> Any:
        if request.code == RequestCode.GET_BROKER_CONFIG:
            raise RocketMQError(RocketMQCondition.NO_PERMISSION, "denied")
        return request.parse(RemotingCommand(0, ext={"offset": "7"}, version=version))

    client: Any = SimpleNamespace(call=call)
    assert limits_of(client, QUEUE) == limits("a", version, {})


def test_what_a_broker_would_change_or_deliver_at_once_is_refused() -> None:
    new, old = limits("a", NEW, WHEEL), limits("a", OLD, {})
    new.require(checked(batch([3, None], [None, NOW + 259_200_000])), "queue t/a/1", 0, NOW)
    old.require(checked(batch([18])), "queue t/a/1", 0, NOW)
    with pytest.raises(MessageError, match=r"BAD_DELAY.*row 6 of queue t/a/1.*delay_time_level is 4.*levels 1 to 3"):
        new.require(checked(batch([3, 4])), "queue t/a/1", 5, NOW)
    with pytest.raises(MessageError, match=r"BAD_DELAY.*row 0 .*deliver_timestamp is 2023-11-17T22:13:20Z.*259200 s.*timerMax"):
        new.require(checked(batch(times=[NOW + 259_200_001])), "queue t/a/1", 0, NOW)
    with pytest.raises(OptionError, match=r"UNSUPPORTED.*deliver_timestamp.*broker a: it is older.*delay_time_level"):
        old.require(checked(batch(times=[NOW - 1])), "queue t/a/1", 0, NOW)
    old.require_columns(["delay_time_level"])
    with pytest.raises(OptionError, match="UNSUPPORTED"):
        old.require_columns(["delay_time_level", "deliver_timestamp"])


# --- sending


class FakeCluster:
    """Answers each send with the outcome that ``fates`` has for its body; with None, the message is stored."""

    trace = None

    def __init__(self) -> None:
        self.stored: list[str] = []
        self.sent: list[tuple[str, str]] = []
        self.fates: dict[str, list[Exception | None]] = {}
        self.closed = 0

    def address(self, *_: object) -> str:
        return "host:1"

    def connection(self, *_: object) -> FakeCluster:
        return self

    def close(self) -> None:
        self.closed += 1

    def doubt(self, topic: str) -> None:
        pass

    def behind_proxy(self, deadline: float) -> bool:
        return False

    def send_all(self, asked: Sequence[tuple[Any, None]], _deadline: float) -> list[Any]:
        return [SimpleNamespace(result=self._answer(request)) for request, _ in asked]

    def _answer(self, request: Any) -> Callable[[], None]:
        body = bytes(request.body).decode()
        assert request.ext["m"] == "false"
        self.sent.append((body, request.ext["i"]))

        def result() -> None:
            fate = self.fates[body].pop(0) if self.fates.get(body) else None
            if fate is not None:
                raise fate
            self.stored.append(body)

        return result


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    monkeypatch.setattr(delayed, "limits_of", lambda _client, queue, _seconds: DelayLimits(queue.broker_name))
    return FakeCluster()


def held(cluster: FakeCluster, start: Start | None = None, patience: float = 90.0) -> DelayedRows:
    made: Any = cluster
    return DelayedRows(made, 7, 0, LockTiming(patience=patience), lambda _: start)


def test_rows_are_held_to_the_end_and_sent_alone_with_their_delay(cluster: FakeCluster) -> None:
    work = held(cluster, Start(0, 0, 6))
    work.add(QUEUE, checked(batch([2, 5])))
    work.add(QUEUE, checked(batch(times=[NOW])))
    assert not cluster.sent
    work.send()
    assert [body for body, _ in cluster.sent] == ["0", "1", "0"]
    assert ["DELAY\x012\x02" in text for _, text in cluster.sent] == [True, False, False]
    assert f"TIMER_DELIVER_MS\x01{NOW}\x02" in cluster.sent[2][1]
    assert not any("OMQ" in text for _, text in cluster.sent)
    ordinary = QueueReport(QUEUE, 4, 6, sent=2)
    [report] = work.add_to([ordinary])
    assert (report.begin, report.end, report.sent, report.delayed, report.newest) == (4, 6, 2, 3, 6)


def test_too_many_rows_are_not_held(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delayed_rows, "HELD_BYTES", 1)
    work = held(cluster)
    work.add(QUEUE, checked(batch([1])))
    assert cluster.stored == ["0"]
    work.send()
    assert cluster.stored == ["0"]
    assert work.counts == {QUEUE: 1}


def test_a_batch_that_was_committed_sends_none(cluster: FakeCluster) -> None:
    work = held(cluster, Start(0, 0, 7))
    work.add(QUEUE, checked(batch([1])))
    work.send()
    assert not cluster.sent
    [report] = work.add_to([])
    assert report.committed
    assert (report.delayed, report.begin, report.end) == (1, 0, 0)


def test_one_bad_row_anywhere_keeps_all_from_being_sent(cluster: FakeCluster) -> None:
    work = held(cluster)
    work.add(QUEUE, checked(batch([1, 2])))
    work.add(QUEUE._replace(queue_id=2), checked(batch([1, 19])))
    with pytest.raises(MessageError, match=r"BAD_DELAY.*row 1 of the delayed rows of queue t/a/2 \(partition 0\)"):
        work.send()
    assert not cluster.sent


def test_what_may_be_lost_is_sent_again_and_what_is_stored_is_not(cluster: FakeCluster) -> None:
    lost = RocketMQUnavailableError(UnavailableCondition.CONNECTION_LOST, "lost")
    busy = RocketMQUnavailableError(UnavailableCondition.BUSY, "busy")
    full = RocketMQError(RocketMQCondition.SERVER_ERROR, "timer message is under flow control, max num limit is 2")
    cluster.fates = {"1": [lost], "2": [busy, full]}
    work = held(cluster)
    work.add(QUEUE, checked(batch([1] * 50)))
    work.send()
    assert sorted(cluster.stored, key=int) == [str(number) for number in range(50)]
    assert cluster.closed == 1
    cluster.fates = {"0": [busy] * 100}
    work = held(cluster, patience=0.0)
    work.add(QUEUE, checked(batch([1])))
    with pytest.raises(RocketMQUnavailableError, match="busy"):
        work.send()


def test_a_refused_row_is_named(cluster: FakeCluster) -> None:
    cluster.fates = {"1": [RocketMQError(RocketMQCondition.MESSAGE_ILLEGAL, "timer message illegal")]}
    work = held(cluster)
    work.add(QUEUE, checked(batch([1, 1])))
    with pytest.raises(
        RocketMQError, match=r"MESSAGE_ILLEGAL.*row 1 of the delayed rows of queue t/a/1.*timer message illegal"
    ):
        work.send()


# --- the producer


Rows = dict[MessageQueue, pa.RecordBatch]


class FakeLog:
    """A log with two queues that records the rows it gets."""

    def __init__(self) -> None:
        self.appended: list[tuple[int, list[bytes]]] = []
        self.delayed: list[tuple[int, list[dict[str, Any]]]] = []

    def targets(self, topic: str) -> list[MessageQueue]:
        return [MessageQueue(topic, "a", number) for number in range(2)]

    def append(self, rows: Rows, delayed: Rows, among: Collection[MessageQueue]) -> None:
        assert list(among) == self.targets("t")
        self.delayed += [(queue.queue_id, some.to_pylist()) for queue, some in delayed.items()]
        for queue, some in rows.items():
            assert not set(some.schema.names) & {"delay_time_level", "deliver_timestamp"}
            self.appended.append((queue.queue_id, some.column("body").to_pylist()))


def producer(log: FakeLog, **options: Any) -> Producer:
    given: Any = log
    return Producer(given, "t", **options)


def test_a_producer_sends_delayed_rows_apart_from_the_others() -> None:
    log = FakeLog()
    producer(log).send(batch([None, 3, 0, 4]))
    assert log.appended == [(0, [b"0"]), (1, [b"2"])]
    assert [row["delay_time_level"] for _, rows in log.delayed for row in rows] == [3, 4]
    producer(log := FakeLog()).send(batch([None, 0]))
    assert (log.delayed, sum(len(bodies) for _, bodies in log.appended)) == ([], 2)


def test_a_producer_delays_all_rows_of_a_call() -> None:
    log = FakeLog()
    rows = pa.record_batch({"body": [b"x", b"y"]})
    producer(log).send(rows, delay_time_level=2)
    producer(log).send(rows, deliver_timestamp=at(NOW))
    found = [row for _, rows in log.delayed for row in rows]
    assert [row.get("delay_time_level") for row in found] == [2, 2, None, None]
    assert [row.get("deliver_timestamp") for row in found] == [None, None, at(NOW), at(NOW)]


@pytest.mark.parametrize("name", ["sharding_key", "tags", "delay_time_level", "body"])
def test_a_producer_refuses_a_column_that_is_there_twice_and_ignores_other_columns(name: str) -> None:
    log = FakeLog()
    body, number = pa.array([b"x"]), pa.array([1])
    with pytest.raises(SchemaError, match=f"WRONG_TYPE.*'{name}'"):
        producer(log).send(pa.RecordBatch.from_arrays([body, number, number], names=["body", name, name]))
    producer(log).send(pa.RecordBatch.from_arrays([body, number, number], names=["body", "other", "other"]))
    assert log.appended == [(0, [b"x"])]


class Answering:
    """A broker that stores messages, except for those whose bodies have another answer in ``refuse``, and batches if ``full``."""

    def __init__(self) -> None:
        self.refuse: dict[bytes, tuple[int, str]] = {}
        self.full = False
        self.stored: list[bytes] = []

    def __call__(self, link: Link) -> None:
        for request in link.requests():
            body = bytes(request.body)
            if request.code == RequestCode.GET_BROKER_CONFIG:
                link.reply(request, body=b"messageDelayLevel=1s 5s\n")
            elif request.code == RequestCode.SEND_BATCH_MESSAGE and self.full:
                link.reply(request, 14, remark="the disk is full")
            elif request.code == RequestCode.SEND_MESSAGE_V2 and body in self.refuse:
                code, remark = self.refuse[body]
                link.reply(request, code, remark=remark)
            elif request.code == RequestCode.SEND_MESSAGE_V2:
                self.stored.append(body)
                link.reply(request, queueId="0", queueOffset="0")
            else:
                link.offset(request, 0)


@pytest.fixture
def answering() -> Iterator[tuple[Answering, Any]]:
    """A broker, and a connection to it. Its topic T has one queue."""
    broker = Answering()
    with Cluster() as cluster:
        cluster.scripted("a", broker)
        with orderedmq.connect(namesrv_addr=cluster.nameserver().address) as connection:
            yield broker, connection


@pytest.mark.holds("all queues or none")
def test_an_error_says_how_many_delayed_rows_are_stored(answering: tuple[Answering, Any]) -> None:
    """Delayed rows have no order: a row before the refused one may not be stored, and a later one may be."""
    broker, connection = answering
    broker.refuse = {b"0": (2, "[PCBUSY_CLEAN_QUEUE]broker busy"), b"1": (13, "message illegal")}
    with pytest.raises(RocketMQError, match=r"row 1 of the delayed rows .* is refused") as caught:
        Producer(connection.log, "T").send(batch([1, 1, 1]))
    assert broker.stored == [b"2"]
    assert caught.value.message.endswith(
        "1 of 3 rows are stored (1 of 3 delayed rows). Delayed rows are stored in any order, so send all rows again if some may be "
        "delivered twice"
    )


def test_an_error_of_the_other_rows_counts_the_delayed_rows(answering: tuple[Answering, Any]) -> None:
    broker, connection = answering
    broker.full = True
    connection.log.sender.timing = replace(connection.log.sender.timing, patience=0.2)
    with pytest.raises(
        RocketMQUnavailableError, match=r"1 of 3 rows are stored \(1 of 1 delayed rows\). Send only the others again"
    ):
        Producer(connection.log, "T").send(batch([1, None, None]))
    assert broker.stored == [b"0"]


def test_no_delayed_row_is_sent_if_another_row_is_refused(answering: tuple[Answering, Any]) -> None:
    broker, connection = answering
    properties = pa.array([None, [("a", "x\x01y")]], pa.map_(pa.string(), pa.string()))
    with pytest.raises(MessageError, match="BAD_PROPERTY"):
        Producer(connection.log, "T").send(batch([1, None]).append_column("properties", properties))
    assert broker.stored == []


@pytest.mark.holds("delayed by a producer")
@pytest.mark.parametrize(
    ("rows", "more", "error", "says"),
    [
        (
            {"body": [b"x"], "sharding_key": ["k"], "delay_time_level": [1]},
            {},
            OptionError,
            r"CONFLICT.*key 'k'.*delayed_rows=",
        ),
        ({"body": [b"x"], "sharding_key": [7]}, {"delay_time_level": 1}, OptionError, r"CONFLICT.*key '7'"),
        ({"body": [b"x"], "delay_time_level": [1]}, {"delay_time_level": 1}, OptionError, "CONFLICT.*argument.*column"),
        ({"body": [b"x"]}, {"delay_time_level": 1, "deliver_timestamp": at(NOW)}, MessageError, "BAD_DELAY.*has both"),
        ({"body": [b"x"]}, {"delay_time_level": -1}, MessageError, "BAD_DELAY.*delay_time_level is -1"),
        (
            {"body": [b"x"]},
            {"delay_time_level": 2**63},
            OptionError,
            "INVALID.*is 9223372036854775808. Give a delay level such as 3",
        ),
        ({"body": [b"x"]}, {"delay_time_level": "3"}, OptionError, "INVALID.*delay_time_level is '3'. Give a delay level"),
        ({"body": [b"x"]}, {"deliver_timestamp": datetime.datetime(2026, 1, 1)}, OptionError, "INVALID.*no time zone"),
        (
            {"body": [b"x"]},
            {"deliver_timestamp": datetime.date(2026, 1, 1)},
            OptionError,
            "INVALID.*Give a datetime with a time zone",
        ),
        ({"body": [b""]}, {"delay_time_level": 1}, MessageError, "NULL_BODY.*is delayed"),
        ({"body": [b"x"], "delay_time_level": ["1"]}, {}, SchemaError, "WRONG_TYPE.*delay_time_level.*whole number"),
        ({"body": [b"x"], "deliver_timestamp": pa.array([1], pa.timestamp("ms"))}, {}, SchemaError, "WRONG_TYPE.*time zone"),
        ({"body": [None, b"x"], "delay_time_level": [None, 1]}, {}, MessageError, "NULL_BODY.*row 0"),
    ],
)
def test_a_producer_refuses_what_the_sink_refuses_before_it_sends_anything(
    rows: dict[str, Any], more: dict[str, Any], error: type[Exception], says: str
) -> None:
    log = FakeLog()
    with pytest.raises(error, match=says):
        producer(log).send(pa.record_batch(rows), **more)
    assert (log.appended, log.delayed) == ([], [])


def test_a_producer_delays_a_key_whose_user_says_that_it_has_no_order() -> None:
    log = FakeLog()
    producer(log, delayed_rows="unordered").send(pa.record_batch({"body": [b"x"], "sharding_key": ["k"]}), delay_time_level=1)
    assert [row["sharding_key"] for _, rows in log.delayed for row in rows] == ["k"]
    # A row without a key has no order.
    rows = pa.record_batch({"body": [b"x", b"y"], "sharding_key": ["k", None], "delay_time_level": [None, 1]})
    producer(log := FakeLog()).send(rows)
    assert [row["body"] for _, rows in log.delayed for row in rows] == [b"y"]


def test_the_embedded_broker_refuses_a_producers_delay_by_name(tmp_path: pathlib.Path) -> None:
    with orderedmq.connect(tmp_path / "store") as broker:
        broker.admin.create_topic("t", 1)
        with pytest.raises(OptionError, match=r"UNSUPPORTED.*delay_time_level.*embedded broker.*namesrvAddr"):
            orderedmq.Producer(broker.log, "t").send(pa.record_batch({"body": [b"x"]}), delay_time_level=1)
        assert broker.log.bounds(broker.log.queues("t"))[MessageQueue("t", "embedded", 0)].max_offset == 0


# --- the command


@pytest.mark.holds("delayed by a producer")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--delay-level", "1", "--deliver-at", "2026-01-01T00:00:00Z"], "OPTION.CONFLICT.*exclude each other"),
        (["--delay-level", "1", "--key", "id"], "OPTION.CONFLICT.*--delay-level delays.*--unordered"),
        (["--deliver-at", "2026-01-01T00:00:00Z", "--key-separator", ":"], "OPTION.CONFLICT.*--deliver-at delays.*--unordered"),
        (["--unordered"], "OPTION.CONFLICT.*Give --delay-level or --deliver-at"),
        (["--deliver-at", "tomorrow"], "OPTION.INVALID.*--deliver-at.*tomorrow"),
        (["--deliver-at", "9999-12-31T23:59:59-01:00"], "OPTION.INVALID.*--deliver-at.*is not a time since 1970"),
        (["--delay-level", "1", "--queues", "1"], "OPTION.UNSUPPORTED.*--delay-level.*embedded broker"),
        (["--deliver-at", "2026-01-01T00:00:00Z", "--queues", "1"], "OPTION.UNSUPPORTED.*--deliver-at.*embedded broker"),
    ],
)
def test_the_command_refuses_a_delay_before_it_reads_or_makes_anything(
    arguments: list[str], says: str, tmp_path: pathlib.Path
) -> None:
    store = tmp_path / "store"
    done = CliRunner().invoke(app, ["--path", str(store), "produce", "t", *arguments], input="line")
    assert done.exit_code == 2
    assert re.search(says, done.stderr), done.stderr
    assert not store.exists()
