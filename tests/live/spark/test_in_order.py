"""``process_in_order`` in real Spark: state per key over resizes, a seek back, and timers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from ordered_source import KeyState, process_in_order
from orderedmq.tools.producer import Producer
from tests.live.spark.conftest import Rig
from tests.waits import until

KEYS = [f"order-{number}" for number in range(6)]
PROVIDER = "spark.sql.streaming.stateStore.providerClass"


@pytest.fixture(autouse=True)
def rocks_db(rig: Rig) -> Iterator[None]:
    rig.spark.conf.set(PROVIDER, "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider")
    yield
    rig.spark.conf.unset(PROVIDER)


def steps(key: str, messages: Any, state: KeyState) -> Iterator[tuple[str]]:
    """Yield all steps of the key so far after each of its messages, so that the rows show the order and each repeat."""
    (history,) = state.value or ("",)
    for message in messages:
        history += f" {message.body.decode()}"
        yield (f"{key}:{history}",)
    state.value = (history,)


def send(rig: Rig, first: int, count: int) -> None:
    producer = Producer(rig.broker.log, "in")
    for number in range(first, first + count):
        producer.send(
            pa.record_batch({"body": pa.array([str(number).encode()] * len(KEYS), pa.binary()), "sharding_key": KEYS})
        )


@pytest.mark.holds("state per key")
def test_each_message_counts_once_and_in_order_over_resizes_and_a_seek_back(rig: Rig) -> None:
    rig.topic("in", 4)
    rig.topic("out", 2)
    for first, queues in ((0, 3), (2, 8), (4, None)):
        send(rig, first, 2)
        rows = rig.stream(topic="in", consumerGroup="g", includeKeySequence=True)
        rig.run(process_in_order(rows, steps, state="history string", output="body string"), topic="out")
        rig.released()
        if queues is not None:
            rig.broker.admin.resize_topic("in", queues)
        # What the group has read comes again, except for the first messages.
        offsets = rig.broker.admin.group_offsets("g")
        rig.broker.admin.seek("g", {queue: min(1, offset) for queue, offset in offsets.items()})
    copied: dict[str, list[str]] = {key: [] for key in KEYS}
    for body in (body for bodies in rig.bodies("out").values() for body in bodies):
        key, _, history = body.partition(":")
        copied[key].append(history)
    whole = "".join(f" {number}" for number in range(6))
    assert copied == {key: [whole[: 2 * number + 2] for number in range(6)] for key in KEYS}


@pytest.mark.holds("state per key")
def test_a_timer_is_called_with_the_state_of_its_key(rig: Rig) -> None:
    def wait(key: str, messages: Any, state: KeyState) -> tuple[()]:
        state.value = (len(messages),)
        state.set_timer(state.now + 1)
        return ()

    def remind(key: str, at: int, state: KeyState) -> Iterator[tuple[str]]:
        assert state.value is not None
        yield (f"{key} has waited with {state.value[0]}",)
        state.value = None

    rig.topic("in", 2)
    rig.topic("out", 1)
    send(rig, 0, 2)
    rows = rig.stream(topic="in", consumerGroup="g", includeKeySequence=True)
    reminders = process_in_order(
        rows, wait, state="count int", output="body string", on_timer=remind, time_mode="ProcessingTime"
    )
    query = rig.start(reminders, topic="out")
    until(lambda: len(rig.bodies("out")[0]) == len(KEYS), "each key has its reminder", 60)
    query.stop()
    assert sorted(rig.bodies("out")[0]) == sorted(f"{key} has waited with 2" for key in KEYS)
