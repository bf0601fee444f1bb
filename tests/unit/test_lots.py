"""Reading a parking lot from a broker to its end, and continuing from there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from orderedmq import pulls
from orderedmq.broker import Log
from orderedmq.embedded.broker import EmbeddedBroker
from orderedmq.errors import DataLossError
from orderedmq.model import MessageQueue
from orderedmq.parking import AT_ONCE, Lot, Ticket
from orderedmq.schema import PRODUCER_SCHEMA

#: An ordinary queue that serves as the lot.
QUEUE = MessageQueue("lot", "embedded", 0)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    # These rows represent messages that a broker parked. Unlike users' rows, they must keep their reserved properties.
    monkeypatch.setattr("orderedmq.embedded.log.normalise", lambda rows, where: rows)
    with EmbeddedBroker(tmp_path / "store") as broker:
        broker.admin.create_topic("lot", 1)
        yield broker.log


def parked(*messages: tuple[str | None, Ticket]) -> pa.RecordBatch:
    rows = [{"body": b"x", "sharding_key": key, "properties": list(one.to_properties().items())} for key, one in messages]
    return pa.RecordBatch.from_pylist(rows, schema=PRODUCER_SCHEMA)


def test_a_lot_is_continued_where_it_ended_and_never_goes_back(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls, "LOT_PULL", 2)
    log.append({QUEUE: parked(("a", Ticket(0, 1, 1, 1000)), ("a", Ticket(1, 0, 0, AT_ONCE)), (None, Ticket(2, 1, 1, 500)))})
    lot = Lot(0)
    pulls.read_lot(log, lot, QUEUE, 3)
    log.append({QUEUE: parked(("a", Ticket(3, 0, 0, AT_ONCE)))})
    pulls.read_lot(log, lot, QUEUE, pulls.end_of_lot(log, QUEUE))
    pulls.read_lot(log, lot, QUEUE, 2)
    assert {key: one.offsets for key, one in lot.keys.items()} == {"a": [0, 1, 3], 2: [2]}
    assert (lot.end, lot.messages, lot.next_due()) == (4, 4, 500)


def test_a_lot_that_ends_before_a_known_end_is_a_loss_of_data(log: Log) -> None:
    log.append({QUEUE: parked(("a", Ticket(0, 1, 1, 1000)))})
    lot = Lot(0)
    with pytest.raises(DataLossError, match="BEYOND_END"):
        pulls.read_lot(log, lot, QUEUE, 3)
    assert lot.messages == 1
