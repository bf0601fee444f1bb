"""A reader that skips messages reports the loss, with a reason that fits the kind of broker."""

from __future__ import annotations

import pytest

from ordered_source.plan import check_position
from orderedmq.broker import QueueBounds
from orderedmq.embedded.log import EmbeddedLog
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.messages.log import RocketMQLog

QUEUE = MessageQueue("orders", "a", 0)
AT = QueueBounds(10, 30)


@pytest.mark.parametrize("position", [10, 11, 30])
def test_keeps_a_position_within_the_bounds(position: int) -> None:
    assert check_position(QUEUE, position, AT, "this query", "") == (position, None)


def test_counts_aged_out_messages_up_to_the_first_one_or_the_requested_end() -> None:
    after, loss = check_position(QUEUE, 4, AT, "this query", "")
    assert after == 10
    assert "messages 4 to 9 (6) of queue orders/a/0" in str(loss)
    after, loss = check_position(QUEUE, 4, AT, "this query", "", end=7)
    assert after == 7
    assert "messages 4 to 6 (3) of queue orders/a/0" in str(loss)


@pytest.mark.parametrize(
    ("cause", "says", "never"),
    [
        (EmbeddedLog.tail_loss, "the store was replaced by an older copy", "broker"),
        (RocketMQLog.tail_loss, "its broker died before its last messages were on its disk", "store"),
    ],
    ids=["embedded", "rocketmq"],
)
def test_a_queue_that_ends_too_early_has_a_cause_that_fits_the_broker(cause: str, says: str, never: str) -> None:
    after, loss = check_position(QUEUE, 35, AT, "this query", cause)
    assert after == 30
    assert loss is not None
    assert loss.sub == "BEYOND_END"
    assert loss.message.startswith("queue orders/a/0 ends at 30, ")
    assert says in loss.message
    assert never not in loss.message
    assert "failOnDataLoss=false" in loss.message
