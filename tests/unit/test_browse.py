"""Browsing messages: the result of a search over queues is complete and in order, wherever the search is cut short and resumed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from orderedmq.embedded.broker import EmbeddedBroker
from orderedmq.errors import OrderedMQError
from orderedmq.tools import browse
from orderedmq.tools.browse import Arrival, last_of, message_at, search
from tests.contract.support import FakeClock, rows

KEYS = ("x", "y", None)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """The topic orders: five queues with 300 messages, appended in pieces. Many messages have equal times."""
    clock, chance = FakeClock(), random.Random(7)
    with EmbeddedBroker(tmp_path_factory.mktemp("browse") / "store", clock=clock) as made:
        made.admin.create_topic("orders", 5)
        queues = made.log.queues("orders")
        for number in range(100):
            clock.micros += chance.choice((0, 0, 1, 50))
            keys = [chance.choice(KEYS) for _ in range(3)]
            made.log.append({chance.choice(queues): rows([f"{number}.{part}" for part in range(3)], sharding_key=keys)})
        yield made


def places(found: list[browse.Row]) -> list[Arrival]:
    return [Arrival(row["store_timestamp"], row["queue"], row["queue_offset"]) for row in found]


def every(broker: EmbeddedBroker) -> list[browse.Row]:
    found = last_of(broker.log, broker.log.bounds(broker.log.queues("orders")), 1000)
    assert len(found) == 300
    return found


@pytest.mark.parametrize("key", ["x", None, "nobody"])
@pytest.mark.parametrize("patient", [True, False])
@pytest.mark.parametrize("most", [1, 7, 1000])
def test_searches_that_go_on_find_each_message_once_in_the_order_of_arrival(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch, key: str | None, patient: bool, most: int
) -> None:
    monkeypatch.setattr(browse, "_PULL_ROWS", 8)
    queues = broker.log.queues("orders")
    wanted = [row for row in every(broker) if key in (None, row["sharding_key"])]
    found: list[browse.Row] = []
    since: Arrival | None = None
    for _ in range(400):
        part = search(broker.log, queues, key, since, most, lambda: patient)
        assert len(part.rows) <= most
        found += part.rows
        since = part.next
        if since is None:
            break
    assert since is None
    assert places(found) == places(wanted)
    assert [row["body"] for row in found] == [row["body"] for row in wanted]


@pytest.mark.parametrize("pull", [2, 100])
def test_messages_of_a_queue_stay_in_order_where_a_brokers_clock_went_back(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch, pull: int
) -> None:
    monkeypatch.setattr(browse, "_PULL_ROWS", pull)
    read, queue = broker.log.pull, broker.log.queues("orders")[0]
    end = broker.log.bounds([queue])[queue].max_offset

    def stepping_back(*args: Any) -> pa.RecordBatch:
        batch = read(*args)
        place = batch.schema.get_field_index("store_timestamp")
        times = pc.subtract(1_000_000, pc.multiply(pc.floor(pc.divide(batch.column("queue_offset"), 7)).cast("int64"), 100))
        return batch.set_column(place, batch.schema.field(place), times.cast("int64").cast(batch.schema.field(place).type))

    monkeypatch.setattr(broker.log, "pull", stepping_back)
    found = search(broker.log, [queue], None, None, 1000, lambda: True)
    assert [row["queue_offset"] for row in found.rows] == list(range(end))
    last = last_of(broker.log, broker.log.bounds([queue]), end)
    assert [row["queue_offset"] for row in last] == list(range(end))


def test_a_message_that_is_not_there_is_an_error(broker: EmbeddedBroker) -> None:
    queue = broker.log.queues("orders")[0]
    at = broker.log.bounds([queue])[queue]
    assert message_at(broker.log, queue, at.max_offset - 1)["queue_offset"] == at.max_offset - 1
    with pytest.raises(OrderedMQError, match="so it has no message"):
        message_at(broker.log, queue, at.max_offset)
