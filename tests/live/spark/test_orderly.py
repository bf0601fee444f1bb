"""``consume_orderly`` in real queries: statuses, retries, dead letters and the end of a range, as in RocketMQ's orderly listener."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ordered_source import (
    ConsumeOrderlyContext,
    ConsumeOrderlyStatus,
    OrderPerQueue,
    consume_orderly,
)
from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import UNLOCK_DELAY
from tests.live.faults.store_access import age
from tests.live.spark.conftest import Rig, StoreRig
from tests.waits import until

SUCCESS = ConsumeOrderlyStatus.SUCCESS
DLQ = MessageQueue("%DLQ%g", "embedded", 0)


@pytest.fixture
def heard(tmp_path: Path) -> Callable[[], list[str]]:
    """A function that returns the lines that listeners wrote, in order."""
    (tmp_path / "heard").touch()
    return lambda: (tmp_path / "heard").read_text().splitlines()


def run(rig: Rig, listener: Any, name: str = "ck", *, source: dict[str, Any] | None = None, **settings: Any) -> list[Any]:
    """Consume all current messages and return the outcomes."""
    rows = rig.stream(topic="in", consumerGroup="g", includeLockToken="true", **(source or {}))
    outcomes = rows.transform(consume_orderly, listener, OrderPerQueue(suspend_current_queue_time_millis=10, **settings))
    table = str(rig.folder / "outcomes")
    writer = outcomes.writeStream.format("parquet").option("path", table)
    writer.option("checkpointLocation", str(rig.folder / name)).trigger(availableNow=True).start().awaitTermination()
    table_rows = rig.spark.read.schema(outcomes.schema).parquet(table).orderBy("topic", "queue_id", "begin_offset").collect()
    return [(row.queue_id, row.begin_offset, row.end_offset, row.status, row.attempts, row.error) for row in table_rows]


def writing(rig: StoreRig, answer: Callable[[Sequence[Any], ConsumeOrderlyContext], Any]) -> Any:
    """A listener that writes the bodies of its messages to a file."""
    path = str(rig.folder / "heard")

    def listener(messages: Sequence[Any], context: ConsumeOrderlyContext) -> Any:
        with open(path, "a") as file:
            file.write(",".join(message.body.decode() for message in messages) + "\n")
        return answer(messages, context)

    return listener


@pytest.mark.holds("orderly listener")
def test_a_queue_continues_once_its_poison_message_is_a_dead_letter(rig: Rig, heard: Any) -> None:
    rig.topic("in", 1, rows=5)

    def answer(messages: Sequence[Any], context: ConsumeOrderlyContext) -> ConsumeOrderlyStatus | None:
        if messages[0].body == b"0:2":
            raise ValueError("no such customer")
        return SUCCESS

    outcomes = run(rig, writing(rig, answer), max_reconsume_times=3)
    assert [(begin, status, attempts) for _, begin, _, status, attempts, _ in outcomes] == [
        (0, "SUCCESS", 1), (1, "SUCCESS", 1), (2, "DEAD_LETTER", 4), (3, "SUCCESS", 1), (4, "SUCCESS", 1),
    ]  # fmt: skip
    assert heard() == ["0:0", "0:1", *["0:2"] * 4, "0:3", "0:4"]
    letters = rig.broker.log.pull(DLQ, 0, 10, 1 << 20, ("body", "sharding_key", "properties")).to_pylist()
    assert [(letter["body"], letter["sharding_key"]) for letter in letters] == [(b"0:2", "k0-2")]
    origin = dict(letters[0]["properties"])
    assert (origin["REAL_TOPIC"], origin["REAL_QID"], origin["ORDEREDMQ_OFFSET"]) == ("in", "0", "2")
    assert origin["ORDEREDMQ_ERROR"] == "ValueError: no such customer"


@pytest.mark.holds("stop during a call")
def test_a_queue_has_no_other_owner_until_the_listener_returns_or_the_unlock_delay_is_over(rig: Rig, heard: Any) -> None:
    rig.topic("in", 1, rows=1)
    path, go = str(rig.folder / "heard"), rig.folder / "go"

    def logging_listener(name: str, waits: bool) -> Any:
        def listener(messages: Sequence[Any], context: ConsumeOrderlyContext) -> ConsumeOrderlyStatus:
            with open(path, "a", buffering=1) as file:
                file.write(f"{name} begins\n")
                if waits:
                    until(go.exists, "the listener may return", 150.0)
                file.write(f"{name} returns\n")
            return SUCCESS

        return listener

    def start(name: str, listener: Any) -> Any:
        rows = rig.stream(topic="in", consumerGroup="g", includeLockToken="true", lockTimeout="120s")
        writer = rows.transform(consume_orderly, listener).writeStream.format("noop")
        return writer.option("checkpointLocation", str(rig.folder / name)).start()

    first = start("first", logging_listener("first", waits=True))
    until(heard, "the first listener is running", 90.0)
    first.stop()
    (lock,) = rig.broker.admin.locks("g")
    until(lambda: rig.broker.admin.locks("g")[0].remaining <= UNLOCK_DELAY, "the lock lingers")
    assert rig.broker.admin.locks("g")[0].held
    # Make the lock younger, so that its unlock delay cannot pass before the test ages the lock below, however slow the test is.
    age(rig.path, lock.owner, -1000)
    start("second", logging_listener("second", waits=False))
    until(lambda: rig.broker.groups.members("g"), "the second query is about to ask for the queue", 90.0)
    time.sleep(1)
    assert heard() == ["first begins"]
    age(rig.path, lock.owner, 1000 + UNLOCK_DELAY)
    until(lambda: "second returns" in heard(), "the second query has the queue", 90.0)
    go.touch()
