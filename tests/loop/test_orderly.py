"""Listeners in a query: statuses, retries and the end of a range as in RocketMQ's orderly listener, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from ordered_source import (
    ConcurrentSettings,
    ConsumeOrderlyContext,
    ConsumeOrderlyStatus,
    OrderPerKey,
    OrderPerQueue,
    consume_concurrently,
    consume_orderly,
    dead_letter,
)
from ordered_source.columns import full_schema
from orderedmq.errors import OptionError, OrderedMQError, SchemaError
from orderedmq.model import MessageQueue
from tests.live.spark.test_orderly import SUCCESS, heard, writing
from tests.loop.conftest import LoopRig
from tests.micro_batches import Frame

__all__ = ["heard"]


def run(rig: LoopRig, listener: Any, **settings: Any) -> list[Any]:
    """Consume all current messages and return the outcomes."""
    rows: list[dict[str, Any]] = []

    def keep(outcomes: pa.Table, batch: int) -> None:
        if outcomes.num_rows:
            rows.extend(outcomes.sort_by([("queue_id", "ascending"), ("begin_offset", "ascending")]).to_pylist())

    rig.start(
        {"topic": "in", "consumerGroup": "g", "includeLockToken": "true"},
        keep,
        available_now=True,
        listener=lambda rows: consume_orderly(rows, listener, OrderPerQueue(suspend_current_queue_time_millis=10, **settings)),
    ).process_all_available()
    names = ("queue_id", "begin_offset", "end_offset", "status", "attempts", "error")
    return [tuple(row[name] for name in names) for row in rows]


def test_each_queue_is_consumed_in_order_in_batches_and_its_outcomes_are_rows(rig: LoopRig, heard: Any) -> None:
    rig.topic("in", 2, rows=20)
    outcomes = run(rig, writing(rig, lambda messages, context: SUCCESS), consume_message_batch_max_size=4)
    assert outcomes == [(q, b, min(b + 4, 10), "SUCCESS", 1, None) for q in (0, 1) for b in (0, 4, 8)]
    said = [body for line in heard() for body in line.split(",")]
    for queue in (0, 1):
        assert [body for body in said if body.startswith(f"{queue}:")] == [f"{queue}:{n}" for n in range(queue, 20, 2)]
    assert rig.offsets("g") == {0: 10, 1: 10}


def test_fields_are_named_like_the_columns_and_an_unknown_one_is_an_error_of_the_listener(rig: LoopRig) -> None:
    rig.topic("in", 1, rows=1)

    def listener(messages: Sequence[Any], context: ConsumeOrderlyContext) -> ConsumeOrderlyStatus:
        (message,) = messages
        assert (message.topic, message.queue_id, message.queue_offset) == ("in", 0, 0)
        assert (bytes(message.body), message.sharding_key) == (b"0:0", "k0-0")
        assert context.message_queue == MessageQueue("in", "embedded", 0)
        return message.colour

    ((*_, status, attempts, error),) = run(rig, listener, max_reconsume_times=0)
    assert (status, attempts) == ("DEAD_LETTER", 1)
    assert error.startswith(
        "AttributeError: a message has no field 'colour', because the DataFrame only has topic, broker_name"
    )


def test_none_counts_as_suspend_and_a_batch_is_retried_message_by_message(rig: LoopRig, heard: Any) -> None:
    rig.topic("in", 1, rows=4)
    path = str(rig.folder / "heard")

    def answer(messages: Sequence[Any], context: ConsumeOrderlyContext) -> ConsumeOrderlyStatus | None:
        # Retries are counted as in RocketMQ's orderly consumer, even for a message that was stored with a count.
        given_back = Path(path).read_text().count("\n") - 1
        assert [message.reconsume_times for message in messages] == [[0, 0], [1], [2], [1], [0, 0]][given_back]
        return SUCCESS if given_back > 1 else None

    outcomes = run(rig, writing(rig, answer), consume_message_batch_max_size=2)
    assert heard() == ["0:0,0:1", "0:0", "0:0", "0:1", "0:2,0:3"]
    assert [(begin, end, attempts) for _, begin, end, _, attempts, _ in outcomes] == [(0, 1, 3), (1, 2, 2), (2, 4, 1)]


def test_messages_taken_and_not_committed_at_the_end_fail_the_query_and_a_restart_repeats_them(
    rig: LoopRig, heard: Any
) -> None:
    rig.topic("in", 1, rows=2)

    def never(messages: Sequence[Any], context: ConsumeOrderlyContext) -> ConsumeOrderlyStatus:
        context.auto_commit = False
        return SUCCESS

    with pytest.raises(OrderedMQError, match=r"ORDEREDMQ_LISTENER.UNCOMMITTED"):
        run(rig, writing(rig, never))
    assert rig.offsets("g") == {0: 0}

    def commits(messages: Sequence[Any], context: ConsumeOrderlyContext) -> ConsumeOrderlyStatus:
        context.auto_commit = False
        return ConsumeOrderlyStatus.COMMIT if messages[0].queue_offset == 1 else SUCCESS

    outcomes = run(rig, writing(rig, commits))
    assert [status for *_, status, _, _ in outcomes] == ["SUCCESS", "COMMIT"]
    assert heard() == ["0:0", "0:1"] * 2
    assert rig.offsets("g") == {0: 2}


#: The columns of a stream with a lock. A parking lot adds a ticket.
LOCKED = [*full_schema().names, "lock_token"]


class Speculating(Frame):
    """A DataFrame in a session with spark.speculation=true."""

    sparkSession: ClassVar[Any] = SimpleNamespace(conf=SimpleNamespace(get=lambda name, default: "True"))


def never(*_: object) -> Any:
    raise AssertionError("no call is allowed")


@pytest.mark.holds("lost executor")
@pytest.mark.parametrize(
    ("consume", "frame", "settings", "condition"),
    [
        (consume_orderly, Frame(LOCKED[:-1]), OrderPerQueue(), "SCHEMA.MISSING_COLUMN"),
        (consume_orderly, Frame(LOCKED), OrderPerKey(), "SCHEMA.MISSING_COLUMN"),
        (consume_concurrently, Frame(LOCKED[:-1]), ConcurrentSettings(), "SCHEMA.MISSING_COLUMN"),
        (consume_orderly, Frame(LOCKED), "key", "OPTION.INVALID"),
        (consume_orderly, Speculating(LOCKED), OrderPerQueue(), "OPTION.UNSUPPORTED"),
        (consume_orderly, Speculating([*LOCKED, "ticket"]), OrderPerKey(), "OPTION.UNSUPPORTED"),
        (consume_concurrently, Speculating(LOCKED), ConcurrentSettings(), "OPTION.UNSUPPORTED"),
    ],
)
def test_a_dataframe_that_cannot_be_consumed_is_refused(consume: Any, frame: Frame, settings: Any, condition: str) -> None:
    with pytest.raises(OrderedMQError) as caught:
        consume(frame, never, settings)
    assert caught.value.condition == f"ORDEREDMQ_{condition}"


@pytest.mark.parametrize(
    ("schema", "condition"),
    [(StructType(), "MISSING_COLUMN"), (StructType().add("body", "string"), "WRONG_TYPE")],
    ids=["without a lock", "a decoded body"],
)
def test_rows_that_cannot_become_dead_letters_are_refused_when_the_query_is_defined(schema: StructType, condition: str) -> None:
    frame: Any = SimpleNamespace(columns=LOCKED if schema.fields else LOCKED[:-1], schema=schema)
    with pytest.raises(SchemaError) as caught:
        dead_letter(frame, "true")
    assert caught.value.sub == condition


@pytest.mark.parametrize("make", [lambda: OrderPerKey(in_batch_attempts=0), lambda: ConcurrentSettings(max_reconsume_times=-2)])
def test_numbers_that_no_listener_can_have_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(OptionError, match="OPTION.INVALID"):
        make()


def test_a_listener_that_uses_the_connection_of_its_program_is_refused(rig: LoopRig) -> None:
    rig.topic("in", 1, rows=1)
    broker = rig.broker
    with pytest.raises(OptionError, match="OPTION.UNSUPPORTED"):
        run(rig, lambda messages, context: broker.log.topics() and SUCCESS)
