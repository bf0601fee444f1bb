"""A broker that lost its last messages after it reported the ends of its queues: a reader gets an error and does not wait for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ordered_source import partition_reader
from ordered_source.partition_reader import QueuePartition
from orderedmq import connect
from orderedmq.broker import Broker, QueueBounds
from orderedmq.errors import DataLossError, aged_out
from orderedmq.model import MessageQueue
from orderedmq.options.source import SourceOptions
from orderedmq.tools import dead_letters, reader
from orderedmq.tools.audit_sides import TopicSide
from orderedmq.tools.reader import Selection
from tests.contract.support import refused, rows

QUEUE = MessageQueue("orders", "embedded", 0)
LOST = 3


class Shortened:
    """A log that reported larger ends of its queues than it has now."""

    tail_loss = "the test lost it"

    def __init__(self, broker: Broker) -> None:
        self._log = broker.log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def bounds(self, queues: Sequence[MessageQueue]) -> dict[MessageQueue, QueueBounds]:
        found = self._log.bounds(queues)
        return {queue: QueueBounds(at.min_offset, at.max_offset + LOST) for queue, at in found.items()}


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with connect(tmp_path / "store") as made:
        made.admin.create_topic("orders", 1)
        made.log.append({QUEUE: rows(range(10))})
        yield made


@pytest.fixture
def log(broker: Broker) -> Any:
    return Shortened(broker)


def side(log: Any) -> None:
    list(TopicSide(log, "orders").rows())


def place(log: Any) -> None:
    TopicSide(log, "orders").locate([9, 10])


def letters(log: Any) -> None:
    list(dead_letters.read(log, QUEUE, 0, log.bounds([QUEUE])[QUEUE].max_offset))


def look(log: Any, **chosen: Any) -> list[pa.RecordBatch]:
    return list(reader.batches(log, reader.ranges(log, "orders"), Selection(("queue_offset", "body"), **chosen)))


def first_messages(log: Any) -> None:
    look(log, first=20)


def last_messages(log: Any) -> None:
    look(log, last=5)


def messages_of_a_key(log: Any) -> None:
    look(log, key="k", order="queue")


READERS: list[Callable[[Any], object]] = [side, place, letters, first_messages, last_messages, messages_of_a_key]


@pytest.mark.parametrize("read", READERS)
def test_a_reader_gets_an_error_at_an_end_that_is_gone(read: Callable[[Any], object], log: Any) -> None:
    with refused("DATA_LOSS.BEYOND_END", "ends at 10", "the test lost it"):
        read(log)


def test_shows_all_requested_messages_of_a_shortened_queue(log: Any) -> None:
    assert sum(part.num_rows for part in look(log, first=10)) == 10


class Holed(Shortened):
    """A log that lacks messages in the middle although its bounds include them. In a real broker, the index may lag behind the files."""

    def bounds(self, queues: Sequence[MessageQueue]) -> dict[MessageQueue, QueueBounds]:
        return self._log.bounds(queues)

    def reading(self, how: object) -> Holed:
        return self

    def pull(self, queue: MessageQueue, offset: int, *args: Any) -> pa.RecordBatch:
        if 4 <= offset < 7:
            raise aged_out(queue, offset, 7)
        most = 4 - offset if offset < 4 else 100
        return self._log.pull(queue, offset, min(most, args[0]), *args[1:])


@pytest.mark.parametrize("accept", [False, True], ids=["fails", "accepted"])
def test_a_task_continues_behind_a_hole_within_the_bounds(
    accept: bool, broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Damaged:
        log = Holed(broker)
        groups, outbox, capabilities = broker.groups, broker.outbox, broker.capabilities

    monkeypatch.setattr(partition_reader, "cached", lambda *_: Damaged)
    options = SourceOptions(path="/nowhere", fail_on_data_loss=not accept, pull_batch_size=1000)
    part = QueuePartition("", QUEUE, 0, 10, None, broker.log.topic("orders").incarnation, streaming=False)
    found: list[int] = []

    def read() -> None:
        for batch in partition_reader.read(part, options, ("queue_offset",), pa.schema([("queue_offset", pa.int64())])):
            found.extend(batch.column(0).to_pylist())

    if accept:
        read()
        assert found == [0, 1, 2, 3, 7, 8, 9]
        assert "3 messages of queue orders/embedded/0 are lost, from 4 to 6" in caplog.text
    else:
        with pytest.raises(DataLossError, match=r"4 to 6 \(3\)"):
            read()
