"""The parking lot: names, tokens, tickets, orders, due times, and parked messages as rows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orderedmq.model import MessageQueue, check_topic, is_parked, is_reserved
from orderedmq.parking import (
    AT_ONCE,
    DROPPED,
    HELD,
    RESTORE_COLUMNS,
    SOURCE_COLUMNS,
    Command,
    Lot,
    Parking,
    Ticket,
    command_rows,
    delay,
    leader_of,
    parked_queue,
    restore,
    to_park,
)
from orderedmq.schema import MESSAGE_SCHEMA, concat_batches

QUEUE = MessageQueue("orders", "broker-a", 3)
LOT = parked_queue("billing", QUEUE)
BORN = datetime(2026, 5, 6, 8, 0, tzinfo=UTC)


def test_a_parked_queue_is_beside_its_queue_in_a_topic_of_group_and_topic() -> None:
    assert MessageQueue("%PARKED%billing%orders", "broker-a", 3) == LOT
    check_topic(LOT.topic, writing=False)
    assert is_parked(LOT)
    assert not is_parked(QUEUE)
    assert leader_of("billing", LOT) == leader_of("billing", QUEUE) == QUEUE
    assert leader_of("other", LOT) == LOT


@pytest.mark.holds("waits of a key")
def test_retries_come_at_the_delay_levels_of_rocketmqs_concurrent_consumer() -> None:
    assert [delay(parkings) for parkings in range(4)] == [10, 30, 60, 120]
    assert delay(15) == delay(1000) == 7200
    # The numbers in the guide: 17 calls, with three or one in each micro-batch.
    assert (sum(map(delay, range(5))) / 60, round(sum(map(delay, range(16))) / 3600)) == (400 / 60, 5)


@pytest.mark.parametrize(
    ("due", "now", "expected"),
    [(1000, 999, False), (1000, 1000, True), (AT_ONCE, 0, True), (HELD, 2**62, False), (DROPPED, 0, True)],
)
def test_a_key_is_due_at_its_time_and_not_before(due: int, now: int, expected: bool) -> None:
    assert Ticket(7, 1, 1, due).is_due(now) is expected


@given(
    st.builds(
        Ticket,
        st.integers(0, 2**62),
        st.integers(0, 2**31),
        st.integers(0, 2**31),
        st.integers(-2, 2**52),
        st.just("why"),
        st.just("id"),
        st.integers(0, 2**52),
        st.integers(0, 2**52),
    )
)
def test_a_ticket_survives_the_properties_which_no_user_may_set(ticket: Ticket) -> None:
    properties = ticket.to_properties()
    assert Ticket.from_properties({"mine": "x", **properties}) == ticket
    assert all(map(is_reserved, properties))


def sent(*keys: str | None) -> pa.RecordBatch:
    """Messages of QUEUE from offset 0 on, with these keys."""
    rows = [
        {
            "body": f"body {offset}".encode(),
            "tags": "paid",
            "keys": None,
            "sharding_key": key,
            "properties": [("shop", "berlin")],
            "message_id": f"id-{offset}",
            "born_timestamp": BORN,
            "store_timestamp": BORN + timedelta(seconds=offset),
        }
        for offset, key in enumerate(keys)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=pa.schema([MESSAGE_SCHEMA.field(name) for name in SOURCE_COLUMNS]))


def lying(*parts: pa.RecordBatch, begin: int = 0) -> pa.RecordBatch:
    """These rows as the lot has them, from offset ``begin`` on."""
    rows = concat_batches([part.select(list(RESTORE_COLUMNS[1:])) for part in parts])
    return rows.add_column(0, "queue_offset", pa.array(range(begin, begin + rows.num_rows), pa.int64()))


def put(*tickets: Ticket, source: MessageQueue = QUEUE) -> list[Parking]:
    return [Parking(source, one.offset, one) for one in tickets]


def test_restores_a_message_as_it_was_sent_after_any_number_of_parkings() -> None:
    parked = to_park(sent("a", None), put(Ticket(0, 2, 1, 1000, "no"), Ticket(1, 0, 0, AT_ONCE)))
    again = lying(parked, begin=40)
    columns = {"message_id": ["other"] * 2, "born_timestamp": [None] * 2, "store_timestamp": [None] * 2}
    for name, values in columns.items():
        again = again.append_column(name, pa.array(values, MESSAGE_SCHEMA.field(name).type))
    moved = to_park(again, [Parking(LOT, 40, Ticket(0, 3, 2, 2000)), Parking(LOT, 41, Ticket(1, 0, 0, AT_ONCE))])
    lot = Lot(90)
    lot.add(lying(moved, begin=90))
    rows, tickets = restore(lying(moved, begin=90), QUEUE, lot)
    assert [(place, one.offset, one.attempts, one.parkings, one.due) for place, one in tickets] == [
        (90, 0, 3, 2, 2000),
        (91, 1, 0, 0, AT_ONCE),
    ]
    assert rows.schema == MESSAGE_SCHEMA
    assert rows.to_pylist() == [
        {
            **QUEUE._asdict(),
            "queue_offset": offset,
            "body": f"body {offset}".encode(),
            "tags": "paid",
            "keys": None,
            "sharding_key": key,
            "message_id": f"id-{offset}",
            "born_timestamp": BORN,
            "store_timestamp": BORN + timedelta(seconds=offset),
            "reconsume_times": attempts,
            "properties": [("shop", "berlin")],
        }
        for offset, key, attempts in ((0, "a", 3), (1, None, 0))
    ]
    assert dict(moved.column("properties")[0].as_py())["OMQ_PARKED_FROM"] == "P:40"


def test_a_lot_knows_its_keys_and_when_the_first_is_due() -> None:
    tickets = Ticket(0, 2, 1, 5000), Ticket(1, 2, 1, 3000), Ticket(2, 0, 0, AT_ONCE), Ticket(3, 9, 3, HELD)
    lot = Lot(10)
    assert (lot.next_due(), lot.messages, lot.max_offset) == (None, 0, -1)
    lot.add(lying(to_park(sent("a", "b", "a", None), put(*tickets)), begin=10))
    assert {key: (one.due, one.begin, one.offsets) for key, one in lot.keys.items()} == {
        "a": (5000, 10, [0, 2]),
        "b": (3000, 11, [1]),
        3: (HELD, 13, [3]),
    }
    assert (lot.next_due(), lot.messages, lot.max_offset, lot.end) == (3000, 4, 3, 14)


def test_a_lot_sums_up_the_first_message_of_each_key() -> None:
    lot = Lot(0)
    assert (lot.retries, lot.oldest) == (0, None)
    tickets = Ticket(0, 2, 1, 5000), Ticket(1, 3, 1, 3000), Ticket(2, 7, 2, AT_ONCE), Ticket(3, 9, 3, HELD)
    rows = lying(to_park(sent("a", "b", "a", None), put(*tickets)))
    # Two pulls, with newer keys first: the second pull has an older message of a known key, and two new keys.
    lot.add(rows.slice(1, 1))
    stored = int(BORN.timestamp()) * 1_000_000
    assert (lot.retries, lot.oldest) == (3, stored + 1_000_000)
    lot.add(rows.take(pa.array([0, 2, 3])))
    assert (lot.retries, lot.oldest) == (3 + 2 + 9, stored)
    # Orders and second copies are not counted as messages.
    lot.add(lying(command_rows([Command("retry", "a"), Command("drop", "gone")]), to_park(sent("a"), put(tickets[0])), begin=4))
    assert (lot.retries, lot.oldest) == (14, stored)


def test_of_two_copies_the_first_counts() -> None:
    parked = to_park(sent("a", "a"), put(Ticket(0, 1, 1, 5000), Ticket(1, 0, 0, AT_ONCE)))
    rows = lying(parked, parked.slice(0, 1))
    lot = Lot(0)
    lot.add(rows)
    assert lot.keys["a"].offsets == [0, 1]
    assert [place for place, _ in restore(rows, QUEUE, lot)[1]] == [2, 1]


@pytest.mark.parametrize(
    ("action", "due", "now_due"),
    [("retry", [AT_ONCE, AT_ONCE], AT_ONCE), ("hold", [HELD, AT_ONCE], HELD), ("drop", [DROPPED, DROPPED], AT_ONCE)],
)
def test_an_order_changes_the_messages_before_it(action: str, due: list[int], now_due: int) -> None:
    parked = to_park(sent("a", "b", "a"), put(Ticket(0, 1, 1, 5000), Ticket(1, 1, 1, 5000), Ticket(2, 0, 0, AT_ONCE)))
    later = to_park(sent("a"), put(Ticket(7, 0, 0, AT_ONCE)))
    rows = lying(parked, command_rows([Command(action, "a"), Command("retry", "gone")]), later)  # type: ignore[arg-type]
    lot = Lot(0)
    lot.add(rows)
    assert lot.next_due() == AT_ONCE
    assert lot.keys["a"].due == now_due
    tickets = {one.offset: one.due for _, one in restore(rows, QUEUE, lot)[1]}
    assert tickets == {0: due[0], 1: 5000, 2: due[1], 7: AT_ONCE}
