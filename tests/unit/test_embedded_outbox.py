"""What the store says of a batch that it does not remember: only what is true."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from orderedmq import connect
from orderedmq.broker import Broker, Published, SinkBatch
from orderedmq.model import MessageQueue
from tests.contract.support import bodies, refused, rows

QUEUE = MessageQueue("orders", "embedded", 0)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with connect(tmp_path / "store") as broker:
        broker.admin.create_topic("orders", 1)
        yield broker


def publish(broker: Broker, sink: str, number: int, *, skip: bool = False) -> Published:
    batch = SinkBatch(sink, number)
    staging = broker.outbox.open(batch, 0)
    staging.add(QUEUE, rows([f"{sink} {number}"]))
    return broker.outbox.publish(batch, [staging.receipt()], skip_differing_replay=skip)


@pytest.mark.parametrize("skip", [False, True])
def test_a_lower_version_that_was_never_written_is_told_so_and_never_taken_as_written(skip: bool, broker: Broker) -> None:
    publish(broker, "txn:billing", 10)
    with refused("SINK.OUT_OF_ORDER", "version 7 of txnAppId 'billing' was not written", "10, a later one, was", "above 10"):
        publish(broker, "txn:billing", 7, skip=skip)
    with refused("SINK.OUT_OF_ORDER", "batch 7 of this query", "10, a later one, was", "checkpoint"):
        publish(broker, "query", 10)
        publish(broker, "query", 7, skip=skip)
    assert bodies(broker, QUEUE) == ["txn:billing 10", "query 10"]
    assert not publish(broker, "txn:billing", 11).replayed
    assert publish(broker, "txn:billing", 10).replayed


def test_a_version_that_the_store_has_forgotten_is_refused_as_such(broker: Broker) -> None:
    """Versions may have gaps: the store remembers the last version numbers, not a number of writes."""
    publish(broker, "txn:billing", 3)
    publish(broker, "txn:billing", 1000)
    for number in (3, 900):
        with refused(
            "SINK.BATCH_TOO_OLD", f"version {number} of txnAppId 'billing'", "900 and below", "cannot tell", "above 1000"
        ):
            publish(broker, "txn:billing", number)
        assert publish(broker, "txn:billing", number, skip=True).replayed
    with refused("SINK.OUT_OF_ORDER", "version 901"):
        publish(broker, "txn:billing", 901)
    assert bodies(broker, QUEUE) == ["txn:billing 3", "txn:billing 1000"]


def test_a_version_that_comes_again_with_other_rows_is_called_by_its_name(broker: Broker) -> None:
    publish(broker, "txn:billing", 3)
    batch = SinkBatch("txn:billing", 3)
    staging = broker.outbox.open(batch, 0)
    staging.add(QUEUE, rows("ab"))
    with refused("SINK.REPLAY_DIFFERS", "version 3 of txnAppId 'billing' was published already", "1 rows then, 2 now"):
        broker.outbox.publish(batch, [staging.receipt()])
