"""Which queues rows go to, and which rows and options the sink refuses, in ``df.write`` and in a stream."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import orderedmq
from orderedmq.errors import OrderedMQError, SchemaError
from orderedmq.routing.selector import select_by_hash
from orderedmq.routing.sharding_key import HashedKeys
from tests.loop.conftest import LoopRig

OUT = {"topic": "out"}


def row(body: Any = b"x", sharding_key: Any = "k", **more: Any) -> pa.RecordBatch:
    """Return one row with these columns. A column whose value is None is left out."""
    given = {"body": body, "sharding_key": sharding_key, **more}
    columns = {name: value for name, value in given.items() if value is not None}
    return pa.record_batch(
        {name: value if isinstance(value, pa.Array) else pa.array([value]) for name, value in columns.items()}
    )


def null(kind: pa.DataType) -> pa.Array:
    return pa.nulls(1, kind)


BAD: list[tuple[str, pa.RecordBatch, dict[str, str], str]] = [
    ("a foreign column", row(foo=1), OUT, "SCHEMA.UNKNOWN_COLUMN"),
    ("a column that delays", row(delay_time_level=1), OUT, "SCHEMA.UNKNOWN_COLUMN"),
    ("no body", row(body=None), OUT, "SCHEMA.MISSING_COLUMN"),
    ("a body of another type", row(1, None), OUT, "SCHEMA.WRONG_TYPE"),
    ("a missing key column", row(sharding_key=None), {**OUT, "shardingKey": "order_id"}, "SCHEMA.MISSING_COLUMN"),
    ("a key that is a decimal", row(sharding_key=null(pa.decimal128(10, 0))), OUT, "SCHEMA.WRONG_TYPE"),
    ("a remainder of text", row(sharding_key="1"), {**OUT, "messageQueueSelector": "mod"}, "SCHEMA.WRONG_TYPE"),
    ("an order by a map", row(part=null(pa.map_(pa.string(), pa.string()))), {**OUT, "orderBy": "part"}, "SCHEMA.WRONG_TYPE"),
    (
        "an order by a struct with an array",
        row(part=null(pa.struct([("a", pa.list_(pa.int8()))]))),
        {**OUT, "orderBy": "part"},
        "SCHEMA.WRONG_TYPE",
    ),
    ("a key that is no number", row(), {**OUT, "shardingKeyType": "long"}, "MESSAGE.BAD_KEY"),
    ("no key", row(sharding_key=None), OUT, "SCHEMA.MISSING_COLUMN"),
    ("no key for a function of it", row(sharding_key=None), {**OUT, "messageQueueSelector": "mod"}, "SCHEMA.MISSING_COLUMN"),
    ("no topic at all", row(), {}, "SCHEMA.MISSING_COLUMN"),
    ("a missing topic", row(), {"topic": "nope"}, "TOPIC.MISSING"),
    ("a retry topic", row(), {"topic": "%RETRY%g"}, "TOPIC.RESERVED"),
    ("a path in a name", row(), {"topic": ".."}, "TOPIC.BAD_NAME"),
    ("a null topic", row(topic=null(pa.string())), {}, "MESSAGE.NULL_TOPIC"),
    ("a null body", row(null(pa.binary())), OUT, "MESSAGE.NULL_BODY"),
    ("an oversize body", row("x" * 4194305), OUT, "MESSAGE.TOO_LARGE"),
    ("a long key", row(sharding_key="k" * 5000), OUT, "MESSAGE.KEY_TOO_LONG"),
    ("an unloadable selector", row(sharding_key=None), {**OUT, "messageQueueSelector": "no.such:f"}, "OPTION.INVALID"),
]


@pytest.mark.parametrize(("rows", "options", "condition"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_rows_and_options_are_refused_and_nothing_is_written(
    rig: LoopRig, rows: pa.RecordBatch, options: dict[str, str], condition: str
) -> None:
    rig.topic("out", 2)
    with pytest.raises(OrderedMQError) as caught:
        rig.save(options, rows)
    assert caught.value.condition == f"ORDEREDMQ_{condition}"
    assert sum(map(len, rig.bodies("out").values())) == 0


@pytest.mark.parametrize("body", [b"x", "x"])
def test_the_row_that_the_bad_ones_vary_is_written(rig: LoopRig, body: Any) -> None:
    rig.topic("out", 2)
    rig.save(OUT, row(body))
    assert sum(map(len, rig.bodies("out").values())) == 1


def many(count: int, **columns: Callable[[int], Any]) -> pa.RecordBatch:
    """Return rows whose body is the row number, with a column for each given function of that number."""
    body = pa.array([str(number) for number in range(count)])
    return pa.record_batch({"body": body} | {name: [value(n) for n in range(count)] for name, value in columns.items()})


def test_the_topic_column_routes_when_no_option_does(rig: LoopRig) -> None:
    rig.topic("a", 1)
    rig.topic("b", 1)
    rig.save({}, many(10, topic=lambda n: "ab"[n % 2], sharding_key=lambda n: "k"))
    assert rig.bodies("a") == {0: ["0", "2", "4", "6", "8"]}
    assert rig.bodies("b") == {0: ["1", "3", "5", "7", "9"]}


def test_arrows_large_types_are_written_like_the_usual_ones(rig: LoopRig) -> None:
    """Spark passes them with spark.sql.execution.arrow.useLargeVarTypes=true."""
    large, text = pa.large_binary(), pa.large_string()
    rig.topic("a", 4)
    rig.topic("b", 4)
    kinds = {"topic": text, "body": large, "sharding_key": large, "tags": text, "properties": pa.map_(text, text)}
    rows = [
        {"topic": "ab"[n % 2], "body": b"%d" % n, "sharding_key": b"k%d" % n, "tags": "t", "properties": [("p", "q")]}
        for n in range(10)
    ]
    for options in ({}, {"orderBy": "sharding_key"}):
        rig.save(options, pa.RecordBatch.from_pylist(rows, pa.schema(kinds)))
    for topic, numbers in (("a", range(0, 10, 2)), ("b", range(1, 10, 2))):
        keys = pa.array([f"k{n}" for n in numbers])
        placed = zip(select_by_hash(HashedKeys(keys).java, 4), numbers, strict=True)
        expected: dict[int, list[str]] = {queue: [] for queue in range(4)}
        for queue, number in placed:
            expected[queue].append(str(number))
        assert rig.bodies(topic) == {queue: bodies * 2 for queue, bodies in expected.items()}


@pytest.mark.holds("same key, same queue")
def test_the_rows_of_a_task_keep_their_order_in_each_queue(rig: LoopRig) -> None:
    rig.topic("out", 4)
    rig.save(OUT, many(1000, sharding_key=lambda n: f"k{n % 7}"))
    queues = [list(map(int, bodies)) for bodies in rig.bodies("out").values()]
    assert sum(len(numbers) > 100 for numbers in queues) > 1
    assert queues == list(map(sorted, queues))


@pytest.mark.holds("hand-over")
def test_a_write_in_foreach_batch_leaves_the_groups_offsets_to_the_query(rig: LoopRig) -> None:
    """The function may fail after this write, and the query's next owner begins at the group's offsets."""
    rig.topic("in", 1, rows=5)
    rig.topic("out", 1)
    offsets: list[dict[int, int]] = []

    def write(rows: pa.Table, number: int) -> None:
        rig.save(OUT, *rows.select(["body", "sharding_key"]).to_batches(), properties=query.properties)
        offsets.append(rig.offsets("g"))

    query = rig.start({"topic": "in", "consumerGroup": "g"}, write)
    query.process_all_available()
    assert len(rig.bodies("out")[0]) == 5
    assert [*offsets, rig.offsets("g")] == [{0: 0}, {0: 5}]


def test_queue_id_chooses_the_queue(rig: LoopRig) -> None:
    rig.topic("out", 3)
    rows = many(9)
    rows = rows.append_column("queue_id", pa.array([n % 3 for n in range(9)], pa.int32()))
    rig.save({**OUT, "messageQueueSelector": "queueId"}, rows)
    assert rig.bodies("out") == {0: ["0", "3", "6"], 1: ["1", "4", "7"], 2: ["2", "5", "8"]}


def test_rows_without_a_key_go_round_if_the_user_says_that_they_have_none(rig: LoopRig) -> None:
    rig.topic("out", 4)
    with pytest.raises(SchemaError, match="SCHEMA.MISSING_COLUMN"):
        rig.save(OUT, many(100))
    # With shardingKey=none rows are distributed round-robin, and a column sharding_key is ignored.
    keyless = {**OUT, "shardingKey": "none"}
    rig.save(keyless, many(100))
    assert {number: len(bodies) for number, bodies in rig.bodies("out").items()} == dict.fromkeys(range(4), 25)
    rig.save(keyless, many(100, sharding_key=lambda n: "k"))
    assert {number: len(bodies) for number, bodies in rig.bodies("out").items()} == dict.fromkeys(range(4), 50)
    for queue in rig.broker.log.queues("out"):
        stored = rig.broker.log.pull(queue, 0, 100, 1 << 20, ("sharding_key",))
        assert stored.column(0).to_pylist() == [None] * 50
    with pytest.raises(SchemaError, match="SCHEMA.UNKNOWN_COLUMN"):
        rig.save(keyless, many(100, none=str))


def test_a_stream_without_the_key_column_is_refused_when_it_is_planned(rig: LoopRig) -> None:
    rig.topic("in", 2, rows=10)
    rig.topic("out", 2)

    def run(group: str, **sink: str) -> None:
        source = {"topic": "in", "consumerGroup": group}
        rig.start(
            source, {**OUT, **sink}, group, available_now=True, rows=lambda rows: rows.select(["body"])
        ).process_all_available()

    with pytest.raises(SchemaError, match="SCHEMA.MISSING_COLUMN"):
        run("g")
    run("h", shardingKey="none")
    assert sum(map(len, rig.bodies("out").values())) == 10


@pytest.mark.parametrize("selector", ["random", "tests.loop.test_sink:first"])
def test_a_selector_that_does_not_choose_by_the_key_needs_none(rig: LoopRig, selector: str) -> None:
    rig.topic("out", 4)
    rig.save({**OUT, "messageQueueSelector": selector}, many(40))
    used_queues = {number for number, bodies in rig.bodies("out").items() if bodies}
    assert used_queues == ({0} if ":" in selector else {0, 1, 2, 3})


def first(keys: pa.Array, n: int) -> list[int]:
    return [0] * len(keys)


def test_order_by_orders_a_tasks_rows(rig: LoopRig) -> None:
    rig.topic("out", 1)
    rows = many(100, sharding_key=lambda n: f"k{n % 7}", id=lambda n: n)
    rig.save({**OUT, "orderBy": "id desc"}, rows)
    assert rig.bodies("out")[0] == [str(number) for number in reversed(range(100))]


def test_a_missing_topic_and_store_are_made_when_the_number_of_queues_is_given(rig: LoopRig, tmp_path: Path) -> None:
    path = str(tmp_path / "new")
    rig.save({"path": path, "topic": "made", "topicQueueNums": "3", "compression": "lz4"}, row())
    with orderedmq.connect(path) as broker:
        topic = broker.log.topic("made")
        assert (topic.queues, topic.compression) == (3, "lz4")


def test_the_same_transaction_is_written_once(rig: LoopRig) -> None:
    rig.topic("out", 2)
    rows = many(100, sharding_key=lambda n: f"k{n % 7}")
    for _ in range(2):
        rig.save({**OUT, "txnAppId": "job", "txnVersion": "1"}, rows)
    assert sum(map(len, rig.bodies("out").values())) == 100
    rig.save({**OUT, "txnAppId": "job", "txnVersion": "2"}, rows)
    assert sum(map(len, rig.bodies("out").values())) == 200


def test_overwriting_is_refused(rig: LoopRig) -> None:
    rig.topic("out", 2)
    with pytest.raises(OrderedMQError, match="ORDEREDMQ_SINK.MODE"):
        rig.save(OUT, row(), overwrite=True)


def test_order_by_beyond_its_memory_is_refused_and_nothing_is_written(rig: LoopRig) -> None:
    rig.topic("out", 1)
    numbers = range(10000)
    columns = {"sharding_key": [f"k{n % 7}" for n in numbers], "body": [str(n) for n in numbers], "id": list(numbers)}
    with pytest.raises(OrderedMQError, match=r"ORDEREDMQ_SINK.ORDER_BUFFER_FULL"):
        rig.save({**OUT, "orderBy": "id", "orderBufferSize": "1k"}, pa.record_batch(columns))
    assert rig.bodies("out") == {0: []}
