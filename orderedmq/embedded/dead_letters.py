"""Dead letters: messages that a consumer could not process, in the topic %DLQ%<group>, which is created with one queue.

The store records each dead-lettered message by (group, queue, offset). So a batch that runs again writes no dead letter twice, and
its listener does not get a dead-lettered message again. A seek of the queue deletes these records, so that the messages are
processed again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pyarrow as pa

from orderedmq.embedded import index
from orderedmq.embedded.clock import Clock
from orderedmq.embedded.index import made
from orderedmq.embedded.log import append_rows
from orderedmq.embedded.store import schema
from orderedmq.embedded.store.schema import DEAD_LETTERS, DeadLetterRow
from orderedmq.embedded.store.transaction import Transaction
from orderedmq.model import MAX_OFFSET, MessageQueue, OffsetRange
from orderedmq.rows.dead_letters import dead_letter_topic
from orderedmq.rows.message_rows import normalise
from orderedmq.schema import PROPERTIES_TYPE


def put(
    txn: Transaction, group: str, queue: MessageQueue, letters: pa.RecordBatch, offsets: Sequence[int], clock: Clock
) -> int:
    """Append the letters that are not recorded yet, in order, and return their number. Apply the topic's retention, if it has one."""
    new: dict[int, int] = {}
    for row, offset in enumerate(offsets):
        if offset not in new and txn.get(DEAD_LETTERS, group, *schema.key_of(queue), offset) is None:
            new[offset] = row
    if not new:
        return 0
    topic = made(txn, dead_letter_topic(group), 1)
    # Letters always go to the first queue, even if queues were added.
    target = index.queues_of(topic)[0]
    taken = letters.take(pa.array(new.values(), pa.int64()))
    rows = normalise(taken, f"dead letters of queue {queue}")
    column_index = rows.schema.get_field_index("properties")
    if column_index >= 0:
        # Put back the reserved properties, which have the letter's origin, because ``normalise`` has removed them.
        rows = rows.set_column(column_index, rows.schema.field(column_index), taken.column("properties").cast(PROPERTIES_TYPE))
    begin = append_rows(txn, topic, target, rows, clock.wall()).begin
    for count, offset in enumerate(new):
        txn.put(DeadLetterRow(group, *schema.key_of(queue), offset, begin + count))
    index.retain(txn, topic, clock, most=index.most_after(len(new)))
    return len(new)


def known(txn: Transaction, group: str, queue: MessageQueue, spans: Sequence[OffsetRange]) -> set[int]:
    """Return the offsets in these ranges whose messages are recorded as dead-lettered."""
    return {letter.message_offset for span in spans for letter in _letters(txn, group, queue, span)}


def forget(txn: Transaction, group: str, queue: MessageQueue, begin: int) -> None:
    """Delete the records of the queue's dead-lettered messages from offset ``begin`` on. The letters stay in their topic."""
    for letter in list(_letters(txn, group, queue, OffsetRange(begin, MAX_OFFSET))):
        txn.delete(DEAD_LETTERS, *letter[:4])


def _letters(txn: Transaction, group: str, queue: MessageQueue, span: OffsetRange) -> Iterator[DeadLetterRow]:
    letters = txn.scan(DEAD_LETTERS, group, *schema.key_of(queue), begin=span.begin)
    return itertools.takewhile(lambda letter: letter.message_offset < span.end, letters)
