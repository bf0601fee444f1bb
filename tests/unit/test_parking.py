"""The parking lot: names, tickets, due times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orderedmq.core.parking import BEHIND, HELD, Ticket, delay, parked_queue, parked_topic
from orderedmq.errors import GroupError
from orderedmq.model import MessageQueue, check_topic

QUEUE = MessageQueue("orders", "broker-a", 3)


def test_a_parked_queue_is_beside_its_queue_in_a_topic_of_group_and_topic() -> None:
    assert parked_queue("billing", QUEUE) == MessageQueue("%PARKED%billing%orders", "broker-a", 3)
    check_topic(parked_topic("billing", "orders"), writing=False)


def test_a_name_that_no_topic_may_have_is_refused_with_what_to_do() -> None:
    with pytest.raises(GroupError, match=r"BAD_NAME.*128 characters.*shorter group name"):
        parked_topic("g" * 60, "t" * 59)
    assert len(parked_topic("g" * 60, "t" * 58)) == 127


def test_retries_come_at_the_delay_levels_of_rocketmqs_concurrent_consumer() -> None:
    assert [delay(puts) for puts in range(4)] == [10, 30, 60, 120]
    assert delay(15) == delay(1000) == 7200


@pytest.mark.parametrize(
    ("due", "now", "expected"), [(1000, 999, False), (1000, 1000, True), (BEHIND, 0, True), (HELD, 2**62, False)]
)
def test_a_key_is_due_at_its_time_and_not_before(due: int, now: int, expected: bool) -> None:
    assert Ticket(7, 1, 1, due).is_due(now) is expected


def test_a_message_that_is_moved_is_another_put_with_the_same_attempts() -> None:
    first = Ticket(7, 3, 1, 1000)
    moved = Ticket(7, 3, 2, 1000)
    assert first.identity("g", QUEUE) != moved.identity("g", QUEUE)
    assert first.identity("g", QUEUE) == Ticket(7, 4, 1, 5).identity("g", QUEUE)


@given(
    st.builds(
        Ticket, st.integers(0, 2**62), st.integers(0, 2**31), st.integers(0, 2**31), st.integers(-1, 2**52), st.just("why")
    )
)
def test_a_ticket_survives_the_properties(ticket: Ticket) -> None:
    properties = ticket.to_properties()
    assert Ticket.from_properties({"mine": "x", **properties}) == ticket


def test_a_message_that_was_not_parked_has_no_ticket() -> None:
    with pytest.raises(KeyError):
        Ticket.from_properties({"mine": "x"})
