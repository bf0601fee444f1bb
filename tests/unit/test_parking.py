"""The parking lot: names, tokens, tickets, orders, due times, and parked messages as rows."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orderedmq.model import MessageQueue, check_topic, is_parked, is_reserved
from orderedmq.parking import (
    AT_ONCE,
    DEAD_LETTERED,
    DROPPED,
    HELD,
    RESTORE_COLUMNS,
    SOURCE_COLUMNS,
    Command,
    CommandAction,
    Lot,
    Parking,
    Ticket,
    command_rows,
    corrected,
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


PARKED = (Ticket(0, 9, 4, 5000, "no"), Ticket(1, 1, 1, 5000), Ticket(2, 0, 0, AT_ONCE), Ticket(3, 0, 0, AT_ONCE))
WHEN = "2026-05-06T08:00:00Z"


def parked() -> pa.RecordBatch:
    """Key a has messages 0, 2 and 3, and b has 1."""
    return to_park(sent("a", "b", "a", "a"), put(*PARKED))


def replacing(offset: int, body: bytes = b"right") -> pa.RecordBatch:
    """A command that replaces the body of a message of key a."""
    return command_rows([Command("replace", "a", offset, corrected(parked().slice(offset, 1).to_pylist()[0], body, WHEN))])


def moved(place: int, rows: pa.RecordBatch) -> pa.RecordBatch:
    """The only one of ``rows`` as a task parks it again from ``place``."""
    columns = {"message_id": ["other"], "born_timestamp": [None], "store_timestamp": [None]}
    for name, values in columns.items():
        rows = rows.append_column(name, pa.array(values, MESSAGE_SCHEMA.field(name).type))
    ticket = Ticket.from_properties(dict(rows.column("properties")[0].as_py()))
    return to_park(rows, [Parking(LOT, place, replace(ticket, attempts=ticket.attempts + 1, due=7000))])


def returned(*parts: pa.RecordBatch, begin: int = 0) -> list[tuple[int, bytes, int, int]]:
    """For each message of the lot: its offset, its body, its due time, and the place from which it is parked again."""
    rows = lying(*parts, begin=begin)
    lot = Lot(begin)
    for number in range(rows.num_rows):
        lot.add(rows.slice(number, 1))
    messages, tickets = restore(rows, QUEUE, lot)
    return sorted(
        (ticket.offset, body, ticket.due, place)
        for body, (place, ticket) in zip(messages.column("body").to_pylist(), tickets, strict=True)
    )


@pytest.mark.parametrize(("action", "due"), [("drop", DROPPED), ("dead_letter", DEAD_LETTERED)])
def test_a_key_continues_with_its_next_message_when_its_first_one_has_ended(action: CommandAction, due: int) -> None:
    rest = [(1, b"body 1", 5000, 1), (2, b"body 2", AT_ONCE, 2), (3, b"body 3", AT_ONCE, 3)]
    assert returned(parked(), command_rows([Command(action, "a", 0)])) == [(0, b"body 0", due, 0), *rest]
    held = command_rows([Command("hold", "a"), Command(action, "a", 2)])
    assert returned(parked(), held) == [(0, b"body 0", HELD, 0), rest[0], (2, b"body 2", due, 2), rest[2]]
    both = command_rows([Command(action, "a", 0), Command(action, "a", 2), Command(action, "a", 3)])
    lot = Lot(0)
    lot.add(lying(parked(), both))
    assert (lot.keys["a"].due, lot.keys["a"].ended, lot.keys["b"].ended) == (due, 3, 0)


def test_a_command_for_a_message_of_another_key_or_none_changes_nothing() -> None:
    other = command_rows([Command("drop", "a", 1), Command("dead_letter", "b", 7), Command("drop", "gone", 0)])
    assert [due for _, _, due, _ in returned(parked(), other)] == [5000, 5000, AT_ONCE, AT_ONCE]


def test_a_replaced_message_keeps_its_place_and_has_the_corrected_body() -> None:
    assert returned(parked(), replacing(0))[0] == (0, b"right", AT_ONCE, 4)
    assert returned(parked(), replacing(2))[:3] == [(0, b"body 0", 5000, 0), (1, b"body 1", 5000, 1), (2, b"right", AT_ONCE, 4)]
    assert returned(parked(), replacing(0), replacing(0, b"again"))[0] == (0, b"again", AT_ONCE, 5)
    assert returned(parked(), replacing(0), command_rows([Command("drop", "a", 0)]))[0] == (0, b"right", DROPPED, 4)
    rows = lying(parked(), replacing(0))
    lot = Lot(0)
    lot.add(rows)
    messages, _ = restore(rows, QUEUE, lot)
    [row] = [row for row in messages.to_pylist() if row["queue_offset"] == 0]
    assert (row["properties"], row["tags"], row["sharding_key"], row["message_id"], row["reconsume_times"]) == (
        [("shop", "berlin"), ("ORDEREDMQ_CORRECTED", WHEN)], "paid", "a", "id-0", 9,
    )  # fmt: skip
    assert [key for key, one in lot.keys.items() if one.offsets == [0, 2, 3]] == ["a"]


def test_a_command_also_applies_to_a_message_that_a_task_moves_when_it_is_given() -> None:
    """The task has read the lot up to 4. The next one begins there, with the command before the moved message."""
    late = moved(0, parked().slice(0, 1))
    for action, due in (("drop", DROPPED), ("dead_letter", DEAD_LETTERED)):
        assert returned(command_rows([Command(action, "a", 0)]), late, begin=4) == [(0, b"body 0", due, 5)]  # type: ignore[arg-type]
    assert returned(replacing(0), late, begin=4) == [(0, b"right", AT_ONCE, 4)]
    # The task was killed, so the next one reads everything again, and moves the message once more before it is killed, too.
    assert returned(parked(), replacing(0), late)[0] == (0, b"right", AT_ONCE, 4)
    again = moved(4, replacing(0))
    assert returned(parked(), replacing(0), late, again)[0] == (0, b"right", AT_ONCE, 6)
    assert returned(again, begin=6) == [(0, b"right", 7000, 6)]


def test_a_command_does_not_apply_to_a_message_that_was_settled_before_it_returned() -> None:
    later = to_park(sent("a"), put(Ticket(0, 1, 1, 6000)))
    for command in (command_rows([Command("drop", "a", 0)]), replacing(0)):
        assert returned(command, later, begin=4) == [(0, b"body 0", 6000, 5)]


def test_a_replacement_has_the_ticket_of_its_message_and_leaves_room_for_its_property() -> None:
    properties = dict(replacing(0).column("properties")[0].as_py())
    ticket = Ticket.from_properties(properties)
    assert replace(ticket, message_id="", born=0, stored=0) == replace(PARKED[0], error="")
    assert (ticket.message_id, ticket.born) == ("id-0", int(BORN.timestamp()) * 1_000_000)
    assert "OMQ_PARKED_FROM" not in properties, "it is no copy, so its message can still be parked from there"
