"""A parking lot that contains messages twice, and orders that were given while a task moved the key's messages."""

from __future__ import annotations

import pyarrow as pa
import pytest

from orderedmq.model import PARKED_FROM, MessageQueue
from orderedmq.parking import (
    AT_ONCE,
    DROPPED,
    HELD,
    RESTORE_COLUMNS,
    Command,
    CommandAction,
    Lot,
    Ticket,
    command_rows,
    restore,
)
from orderedmq.schema import PRODUCER_SCHEMA, concat_batches

QUEUE = MessageQueue("orders", "embedded", 0)
DUE = {"retry": AT_ONCE, "hold": HELD, "drop": DROPPED}


def parked(key: str, *copies: tuple[int, int, str]) -> pa.RecordBatch:
    """Rows with copies of messages, each given as its offset in the queue, its due time, and the place from which it was copied."""
    rows = []
    for offset, due, source in copies:
        properties = {**Ticket(offset, 1, 1, due).to_properties(), PARKED_FROM: source}
        rows.append({"body": b"", "sharding_key": key, "properties": list(properties.items())})
    return pa.RecordBatch.from_pylist(rows, schema=PRODUCER_SCHEMA)


def lot_of(*parts: pa.RecordBatch, begin: int = 0) -> tuple[Lot, pa.RecordBatch]:
    rows = concat_batches([part.select(list(RESTORE_COLUMNS[1:])) for part in parts])
    rows = rows.add_column(0, "queue_offset", pa.array(range(begin, begin + rows.num_rows), pa.int64()))
    lot = Lot(begin)
    lot.add(rows)
    return lot, rows


def test_of_two_copies_the_first_gives_the_position_and_the_last_the_place() -> None:
    first = parked("a", (0, 1000, "Q:0"), (1, AT_ONCE, "Q:1"), (2, AT_ONCE, "Q:2"))
    moved = parked("a", (0, 5000, "P:10"), (1, AT_ONCE, "P:11"))
    again = parked("a", (0, 7000, "P:13"))
    lot, rows = lot_of(first, moved, again, begin=10)
    messages, tickets = restore(rows, QUEUE, lot)
    assert messages.column("queue_offset").to_pylist() == [0, 1, 2]
    assert [place for place, _ in tickets] == [15, 14, 12]
    assert lot.messages == 3


@pytest.mark.parametrize("action", ["retry", "hold", "drop"])
def test_an_order_includes_messages_that_a_task_was_moving(action: CommandAction) -> None:
    # A batch had read the lot up to 10. Then the order was stored at 10. After that, the batch moved the key's messages to the end.
    moved = parked("a", (0, 5000, "P:8"), (1, AT_ONCE, "P:9"), (2, AT_ONCE, "Q:2"))
    lot, rows = lot_of(command_rows([Command(action, "a")]), moved, begin=10)
    due = [ticket.due for _, ticket in restore(rows, QUEUE, lot)[1]]
    assert due == [DUE[action], DROPPED if action == "drop" else AT_ONCE, AT_ONCE]


def test_a_hold_after_a_drop_holds_only_newer_messages() -> None:
    key = "a"
    parts = (parked(key, (0, 5000, "Q:0")), command_rows([Command("drop", key)]), parked(key, (1, 6000, "Q:1")))
    lot, rows = lot_of(*parts)
    assert [ticket.due for _, ticket in restore(rows, QUEUE, lot)[1]] == [DROPPED, 6000]
    assert lot.keys[key].due == 6000
    lot, rows = lot_of(*parts, command_rows([Command("hold", key)]))
    assert [ticket.due for _, ticket in restore(rows, QUEUE, lot)[1]] == [DROPPED, HELD]


def test_the_first_message_of_a_key_keeps_the_due_time_after_a_drop() -> None:
    drop = command_rows([Command("drop", "a")])
    lot, rows = lot_of(parked("a", (1, 5000, "Q:1")), drop, parked("a", (13, 6000, "Q:13"), (7, AT_ONCE, "Q:7")))
    assert (lot.keys["a"].due, lot.keys["a"].begin) == (6000, 3)
    assert [(one.offset, one.due) for _, one in restore(rows, QUEUE, lot)[1]] == [(1, DROPPED), (13, 6000), (7, 6000)]
