"""Calls of a listener and its hooks, and the properties of a dead letter."""

from __future__ import annotations

from typing import Any

import pytest

from orderedmq.listening.listener import Caller, ConsumeOrderlyContext, ConsumeOrderlyStatus
from orderedmq.model import MAX_PROPERTIES_BYTES, MessageQueue
from orderedmq.rows.dead_letters import REPLAYS, dead_letter_properties, replayed_once_more, replays
from orderedmq.text import MAX_ERROR_BYTES

SUCCESS = ConsumeOrderlyStatus.SUCCESS
QUEUE = MessageQueue("orders", "embedded", 3)


class Hook:
    def __init__(self, log: list[Any], fails: bool = False) -> None:
        self.log = log
        self.fails = fails

    def consume_message_before(self, messages: Any, context: ConsumeOrderlyContext) -> None:
        self.log.append(("before", messages, context.message_queue))
        if self.fails:
            raise ValueError("hook")

    def consume_message_after(self, messages: Any, context: ConsumeOrderlyContext, status: Any, error: str | None) -> None:
        self.log.append(("after", messages, context.message_queue, status, error))
        if self.fails:
            raise ValueError("hook")


def call(listener: Any, *hooks: Hook) -> tuple[tuple[ConsumeOrderlyStatus | None, str | None], list[str]]:
    warnings: list[str] = []
    context = ConsumeOrderlyContext(QUEUE)
    status, error, returned = Caller(listener, hooks, warnings.append, ConsumeOrderlyStatus).call(["m"], context)
    assert returned is context
    return (status, error), warnings


@pytest.mark.parametrize("status", list(ConsumeOrderlyStatus))
def test_hooks_are_called_before_and_after_the_listener(status: ConsumeOrderlyStatus) -> None:
    log: list[Any] = []

    def listener(messages: Any, context: Any) -> ConsumeOrderlyStatus:
        log.append((messages, context.message_queue))
        return status

    assert call(listener, Hook(log)) == ((status, None), [])
    assert log == [("before", ["m"], QUEUE), (["m"], QUEUE), ("after", ["m"], QUEUE, status, None)]


def test_an_exception_or_a_wrong_result_of_a_listener_is_its_error() -> None:
    log: list[Any] = []

    def raises(messages: Any, context: Any) -> None:
        raise KeyError("id")

    assert call(raises, Hook(log)) == ((None, "KeyError: 'id'"), [])
    assert log[-1] == ("after", ["m"], QUEUE, None, "KeyError: 'id'")
    assert call(lambda m, c: None) == ((None, "the listener returned None, not a ConsumeOrderlyStatus"), [])
    assert call(lambda m, c: "SUCCESS") == ((None, "the listener returned 'SUCCESS', not a ConsumeOrderlyStatus"), [])


def test_a_listener_whose_objects_have_no_text_has_an_error_too() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            return str(self.args[3])

        __repr__ = __str__

    def raises(messages: Any, context: Any) -> None:
        raise Silent("id")

    assert call(raises) == ((None, "Silent: <Silent, whose text raises IndexError>"), [])
    said = "the listener returned <Silent, whose text raises IndexError>, not a ConsumeOrderlyStatus"
    assert call(lambda m, c: Silent()) == ((None, said), [])


def test_a_hook_that_raises_is_a_warning() -> None:
    log: list[Any] = []
    answer, warnings = call(lambda m, c: SUCCESS, Hook(log, fails=True), Hook(log))
    assert answer == (SUCCESS, None)
    assert len(log) == 4
    assert warnings == ["a hook of the listener of queue orders/embedded/3 raised ValueError: hook"] * 2


# -- dead letters ------------------------------------------------------------------------------------------------------------


def size(properties: dict[str, str]) -> int:
    return sum(len(name.encode()) + len(value.encode()) + 2 for name, value in properties.items())


def test_a_dead_letter_has_its_origin_in_properties() -> None:
    properties = dead_letter_properties(
        QUEUE, 17, message_id="7F01", reconsume_times=16, error="ValueError: no", properties={"colour": "red"}
    )
    assert properties == {
        "colour": "red",
        "REAL_TOPIC": "orders",
        "REAL_QID": "3",
        "ORIGIN_MESSAGE_ID": "7F01",
        "RECONSUME_TIME": "16",
        "ORDEREDMQ_BROKER": "embedded",
        "ORDEREDMQ_OFFSET": "17",
        "ORDEREDMQ_ERROR": "ValueError: no",
    }


def test_a_message_that_was_a_dead_letter_before_keeps_its_first_id_and_gets_its_new_origin() -> None:
    first = dead_letter_properties(QUEUE, 17, message_id="A", reconsume_times=16, error="old", properties={})
    other = MessageQueue("replayed", "embedded", 0)
    second = dead_letter_properties(other, 5, message_id="B", reconsume_times=2, error="", properties=first)
    assert second["ORIGIN_MESSAGE_ID"] == "A"
    assert (second["REAL_TOPIC"], second["ORDEREDMQ_OFFSET"]) == ("replayed", "5")
    assert "ORDEREDMQ_ERROR" not in second, "RocketMQ has no properties without a value"


@pytest.mark.parametrize("own", [0, 20_000, 31_000, 31_800, 32_450])
def test_the_error_is_cut_so_that_properties_stay_below_their_limit(own: int) -> None:
    properties = {"big": "x" * own, "small": "y"}
    result = dead_letter_properties(QUEUE, 17, message_id="A", reconsume_times=1, error="é" * 50_000, properties=properties)
    assert size(result) < MAX_PROPERTIES_BYTES - 200
    assert len(result["ORDEREDMQ_ERROR"].encode()) <= MAX_ERROR_BYTES
    assert result["REAL_TOPIC"] == "orders"
    assert result["small"] == "y"
    assert ("big" in result) == (own < 32_450)


def test_a_message_counts_the_replays_of_each_group() -> None:
    assert replays({}, "g") == replays({REPLAYS: ""}, "g") == 0
    once = replayed_once_more({"own": "x"}, "g")
    assert once == {"own": "x", REPLAYS: "g=1"}
    found = replayed_once_more(replayed_once_more(replayed_once_more(once, "h"), "g"), "%DLQ%g-_|1")
    assert [replays(found, group) for group in ("g", "h", "%DLQ%g-_|1", "other")] == [2, 1, 1, 0]
    # Invalid counts, which a producer may have set, are ignored.
    for text in ("=", "g", "g=", "g=x", "g=-1", "g=" + "9" * 5000, "g=1.5", ",,", "g=²"):
        assert replays({REPLAYS: text}, "g") == 0
        assert replayed_once_more({REPLAYS: text}, "g")[REPLAYS] == "g=1"


def test_a_dead_letter_keeps_the_count_of_replays_rather_than_other_properties() -> None:
    properties = {f"big{number}": "x" * 1000 for number in range(40)} | {REPLAYS: "g=2"}
    result = dead_letter_properties(QUEUE, 17, message_id="A", reconsume_times=1, error="e" * 9000, properties=properties)
    assert replays(result, "g") == 2
    assert "big39" not in result
