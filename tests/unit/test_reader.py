"""Messages that are read without Spark: each chosen one once and in order, also where a search is cut short and resumed."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import orderedmq
from orderedmq.embedded.broker import EmbeddedBroker
from orderedmq.errors import OrderedMQError
from orderedmq.model import MessageQueue
from orderedmq.options.endpoint import BrokerOptions
from orderedmq.options.parse import READ_PARAMETERS
from orderedmq.options.values import names_of
from orderedmq.schema import DEFAULT_COLUMNS, MESSAGE_SCHEMA
from orderedmq.tools import reader
from orderedmq.tools.reader import Arrival, Selection, batches, ranges
from orderedmq.ui.messages import message_at, search
from tests.contract.support import FakeClock, refused, rows

KEYS = ("x", "y", None)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """The topic orders: five queues with 300 messages, appended in pieces. Many messages have equal times."""
    clock, chance = FakeClock(), random.Random(7)
    with EmbeddedBroker(tmp_path_factory.mktemp("reader") / "store", clock=clock) as made:
        made.admin.create_topic("orders", 5)
        queues = made.log.queues("orders")
        for number in range(100):
            clock.micros += chance.choice((0, 0, 1, 50))
            keys = [chance.choice(KEYS) for _ in range(3)]
            made.log.append(
                {
                    chance.choice(queues): rows(
                        [f"{number}.{part}" for part in range(3)], sharding_key=keys, tags=["a", "b", None]
                    )
                }
            )
        yield made


Row = dict[str, Any]


def place_of(row: Row) -> tuple[datetime, int, int]:
    return row["store_timestamp"], row["queue_id"], row["queue_offset"]


def every(broker: EmbeddedBroker) -> list[Row]:
    """All messages in the order of arrival."""
    queues = broker.log.queues("orders")
    messages = [row for queue in queues for row in broker.log.pull(queue, 0, 1000, 1 << 40, DEFAULT_COLUMNS).to_pylist()]
    assert len(messages) == 300
    return sorted(messages, key=place_of)


def read(broker: EmbeddedBroker, **chosen: Any) -> list[Row]:
    return list(orderedmq.read("orders", path=broker.path, **chosen))


@pytest.mark.parametrize("key", ["x", None, "nobody"])
@pytest.mark.parametrize("patient", [True, False])
@pytest.mark.parametrize("most", [3, 1000])
def test_searches_that_go_on_find_each_message_once_in_the_order_of_arrival(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch, key: str | None, patient: bool, most: int
) -> None:
    monkeypatch.setattr(reader, "PULL_ROWS", 8)
    queues = broker.log.queues("orders")
    wanted = [row for row in every(broker) if key in (None, row["sharding_key"])]
    found: list[Row] = []
    since: Arrival | None = None
    for _ in range(400):
        part, since = search(broker.log, queues, key, since, most, lambda: patient)
        assert len(part) <= most
        found += part
        if since is None:
            break
    assert since is None
    assert list(map(place_of, found)) == list(map(place_of, wanted))
    assert [row["body"] for row in found] == [row["body"] for row in wanted]


@pytest.mark.parametrize("pull", [2, 100])
def test_messages_of_a_queue_stay_in_order_where_a_brokers_clock_went_back(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch, pull: int
) -> None:
    monkeypatch.setattr(reader, "PULL_ROWS", pull)
    read, queue = broker.log.pull, broker.log.queues("orders")[0]
    end = broker.log.bounds([queue])[queue].max_offset

    def stepping_back(*args: Any) -> pa.RecordBatch:
        batch = read(*args)
        place = batch.schema.get_field_index("store_timestamp")
        times = pc.subtract(1_000_000, pc.multiply(pc.floor(pc.divide(batch.column("queue_offset"), 7)).cast("int64"), 100))
        return batch.set_column(place, batch.schema.field(place), times.cast("int64").cast(batch.schema.field(place).type))

    monkeypatch.setattr(broker.log, "pull", stepping_back)
    for most in (None, end - 1):
        parts = batches(broker.log, ranges(broker.log, "orders", "0"), Selection(("queue_offset",), last=most))
        assert [offset for part in parts for offset in part["queue_offset"].to_pylist()] == list(range(end))[-(most or end) :]


def test_a_message_that_is_not_there_is_an_error(broker: EmbeddedBroker) -> None:
    queue = broker.log.queues("orders")[0]
    at = broker.log.bounds([queue])[queue]
    assert message_at(broker.log, queue, at.max_offset - 1)["queue_offset"] == at.max_offset - 1
    with pytest.raises(OrderedMQError, match="so it has no message"):
        message_at(broker.log, queue, at.max_offset)


@pytest.mark.parametrize("seed", range(15))
def test_reads_the_chosen_messages_and_no_other_in_order(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance, messages = random.Random(seed), every(broker)
    monkeypatch.setattr(reader, "PULL_ROWS", chance.choice((8, 65536)))
    times = sorted(chance.choice(messages)["store_timestamp"] for _ in range(2))
    chosen: dict[str, Any] = {
        "key": chance.choice((None, "x")),
        "tags": chance.choice(("*", "a", "b || c")),
        "since": chance.choice((None, times[0])),
        "until": chance.choice((None, times[1])),
        "order": chance.choice(("arrival", "queue")),
        "queue": chance.choice((None, 3)),
    }
    chosen["offset"] = chance.choice((None, 20)) if chosen["queue"] else None
    most = chance.choice((1, 5, 1000))
    expected = [
        row
        for row in messages
        if chosen["key"] in (None, row["sharding_key"])
        and (chosen["tags"] == "*" or row["tags"] in chosen["tags"].split(" || "))
        and (chosen["since"] is None or row["store_timestamp"] >= chosen["since"])
        and (chosen["until"] is None or row["store_timestamp"] < chosen["until"])
        and chosen["queue"] in (None, row["queue_id"])
        and row["queue_offset"] >= (chosen["offset"] or 0)
    ]
    if chosen["order"] == "queue":
        expected.sort(key=lambda row: (row["queue_id"], row["queue_offset"]))
    assert read(broker, **chosen) == expected
    assert read(broker, first=most, **chosen) == expected[:most]
    assert read(broker, last=most, **chosen) == expected[-most:]


def test_messages_are_a_table_in_all_forms(broker: EmbeddedBroker) -> None:
    columns = ("properties", "body", "queue_offset", "queue_id", "store_timestamp")
    messages = orderedmq.read("orders", path=broker.path, columns=columns)
    table = messages.to_arrow()
    assert table.schema == messages.schema == pa.schema([MESSAGE_SCHEMA.field(name) for name in columns])
    assert pa.table(messages) == table == pa.Table.from_batches(messages.batches())
    assert messages.to_pandas().equals(table.to_pandas())
    assert [row["body"] for row in messages] == table["body"].to_pylist()
    assert all(type(row["properties"]) is dict for row in messages)
    relation = duckdb.sql("SELECT queue_id, count(*), max(queue_offset) FROM messages GROUP BY ALL ORDER BY ALL")
    assert relation is not None
    bounds = broker.log.bounds(broker.log.queues("orders"))
    assert relation.fetchall() == [(queue.queue_id, at.max_offset, at.max_offset - 1) for queue, at in bounds.items()]


def test_messages_are_those_of_the_moment_of_the_call_and_can_be_sent_again(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    with orderedmq.connect(path) as broker:
        for topic in ("orders", "copies"):
            broker.admin.create_topic(topic, 2)
        producer = orderedmq.Producer(broker.log, "orders")
        producer.send([("a", "1"), ("b", "2"), ("a", "3")])
        messages = orderedmq.read("orders", path=path)
        producer.send(("a", "4"))
        orderedmq.Producer(broker.log, "copies").send(messages)
    copies = list(orderedmq.read("copies", path=path, columns=("sharding_key", "body"), key="a"))
    assert copies == [{"sharding_key": "a", "body": b"1"}, {"sharding_key": "a", "body": b"3"}]
    assert list(orderedmq.read("orders", path=path, queue=MessageQueue("orders", "embedded", 0), since="2999-01-01")) == []


@pytest.mark.parametrize(
    ("chosen", "condition", "says"),
    [
        ({"topic": "order"}, "TOPIC.MISSING", "did you mean 'orders'"),
        ({"columns": ("bdy",)}, "SCHEMA.UNKNOWN_COLUMN", "'bdy'"),
        ({"columns": "bdy"}, "SCHEMA.UNKNOWN_COLUMN", "'bdy'"),
        ({"columns": ()}, "OPTION.INVALID", "columns"),
        ({"path": None}, "OPTION.MISSING", "Set path, or namesrvAddr"),
        ({"namesrvAddr": "host:9876"}, "OPTION.CONFLICT", "path and namesrvAddr exclude each other"),
        ({"colums": ("body",)}, "OPTION.UNKNOWN", "Did you mean columns?"),
        ({"paht": "data"}, "OPTION.UNKNOWN", "Did you mean path?"),
        ({"startingOffsets": "earliest"}, "OPTION.UNKNOWN", "spark.read"),
        ({"subscribe": "orders"}, "OPTION.UNSUPPORTED", "Use topic"),
        ({"useTLS": "true"}, "OPTION.CONFLICT", "useTLS"),
        ({"order": "time"}, "OPTION.INVALID", "arrival, queue"),
        ({"tags": "a,b"}, "OPTION.INVALID", "A || B"),
        ({"since": "noon"}, "OPTION.INVALID", "since"),
        ({"first": 0}, "OPTION.INVALID", "first"),
        ({"first": 1, "last": 1}, "OPTION.CONFLICT", "first and last"),
        ({"offset": 1}, "OPTION.CONFLICT", "queue"),
        ({"queue": 5}, "TOPIC.NO_SUCH_QUEUE", "0 to 4"),
        ({"queue": 0, "offset": 1000}, "OFFSET.BEYOND_END", "orders/embedded/0"),
    ],
)
def test_what_cannot_be_read_is_refused_at_the_call(
    broker: EmbeddedBroker, chosen: dict[str, Any], condition: str, says: str
) -> None:
    with refused(condition, says):
        orderedmq.read(**{"topic": "orders", "path": broker.path, **chosen})


def test_a_wrong_parameter_is_compared_with_all_parameters() -> None:
    parameters = {name for name in inspect.signature(orderedmq.read).parameters if name not in ("topic", "options")}
    assert parameters - set(names_of(BrokerOptions)) == set(READ_PARAMETERS)


def test_messages_that_were_deleted_since_are_a_named_loss(tmp_path: Path) -> None:
    clock = FakeClock()
    with EmbeddedBroker(tmp_path / "store", clock=clock) as broker:
        broker.admin.create_topic("orders", 1, retention_seconds=60)
        [queue] = broker.log.queues("orders")
        broker.log.append({queue: rows("a")})
        messages = orderedmq.read("orders", path=broker.path)
        clock.pass_(timedelta(days=1).total_seconds())
        assert broker.admin.trim("orders") == {queue: 1}
        with refused("DATA_LOSS.AGED_OUT", "orders/embedded/0"):
            list(messages)
