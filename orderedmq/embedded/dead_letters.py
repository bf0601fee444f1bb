"""Dead letters: messages that a consumer could not process, in the topic %DLQ%<group>, which is created with one queue.

(group, queue, offset) identifies a dead letter, so a batch that runs again puts no message aside twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from orderedmq.broker import TopicInfo
from orderedmq.conditions import GroupCondition
from orderedmq.core.message_rows import normalise
from orderedmq.embedded import chunk_codec as codec
from orderedmq.embedded import index, layout
from orderedmq.embedded.log import new_incarnation, put_topic, topic_of
from orderedmq.embedded.transaction import Transaction
from orderedmq.errors import GroupError
from orderedmq.model import DEAD_LETTER_PREFIX, DEFAULT_COMPRESSION, MAX_NAME_LENGTH, PROPERTIES_TYPE, MessageQueue


def topic_name(group: str) -> str:
    """Return the name of the group's dead-letter topic.

    Raises GroupError BAD_NAME if that name is longer than a topic's may be: the group's name alone can be short enough.
    """
    longest = MAX_NAME_LENGTH - len(DEAD_LETTER_PREFIX)
    if len(group) > longest:
        raise GroupError(
            GroupCondition.BAD_NAME,
            f"consumer group {group!r} has {len(group)} characters, at most {longest} are allowed for a group with dead letters: the "
            f"name of its topic {DEAD_LETTER_PREFIX}<group> may have {MAX_NAME_LENGTH}; choose a shorter name",
        )
    return DEAD_LETTER_PREFIX + group


def put(txn: Transaction, group: str, queue: MessageQueue, letters: pa.RecordBatch, offsets: Sequence[int], now: int) -> int:
    """Append the letters that are new, in order, and return their number. ``now`` is in µs since the epoch."""
    new: dict[int, int] = {}
    for row, offset in enumerate(offsets):
        if offset not in new and txn.get("dead", layout.dead_key(group, queue, offset)) is None:
            new[offset] = row
    if not new:
        return 0
    topic = topic_name(group)
    if txn.get("topics", topic.encode()) is None:
        info = TopicInfo(topic, 1, new_incarnation(), None, None, DEFAULT_COMPRESSION)
        put_topic(txn, info)
        txn.put("queues", layout.queue_key(index.queues_of(info)[0]), layout.QueueState(0, 0, 0, 0).pack())
    info = topic_of(txn, topic)
    # Always the first queue, even if others were added.
    target = index.queues_of(info)[0]
    at = index.state(txn, target).max_offset
    taken = letters.take(pa.array(new.values(), pa.int64()))
    rows = normalise(taken, f"dead letters of queue {queue}")
    column_index = rows.schema.get_field_index("properties")
    if column_index >= 0:
        # A letter's origin is in reserved properties, which ``normalise`` removes.
        rows = rows.set_column(column_index, rows.schema.field(column_index), taken.column("properties").cast(PROPERTIES_TYPE))
    for piece in codec.pieces(rows):
        payload, chunk = codec.encode(piece, codec.CODECS.index(info.compression), now)
        index.add(txn, target, index.store(txn, payload, chunk), now)
    for count, offset in enumerate(new):
        txn.put("dead", layout.dead_key(group, queue, offset), layout.number(at + count))
    return len(new)
