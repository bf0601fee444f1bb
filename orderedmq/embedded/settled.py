"""Records messages that a group has processed out of turn: the group's offset was below them, or had already passed them.

The database ``settled`` has a bit for each message, in blocks of BLOCK. A seek or reset of the queue clears its bits, so that its
messages are processed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from orderedmq.embedded.store import layout
from orderedmq.embedded.store.transaction import Transaction
from orderedmq.model import MessageQueue, OffsetRange

#: Number of messages per entry. The entry's value is a number with one bit for each of them.
BLOCK: Final = 64


def settle(txn: Transaction, group: str, queue: MessageQueue, offsets: Sequence[int]) -> None:
    """Record that the messages at ``offsets`` are processed."""
    new: dict[int, int] = {}
    for offset in offsets:
        block, bit = divmod(offset, BLOCK)
        new[block] = new.get(block, 0) | 1 << bit
    for block, bits in new.items():
        key = layout.message_key(group, queue, block)
        known = txn.get("settled", key)
        txn.put("settled", key, layout.number(bits | (layout.to_number(known) if known else 0)))


def settled(txn: Transaction, group: str, queue: MessageQueue, span: OffsetRange) -> set[int]:
    """Return the offsets in ``span`` of messages that are recorded as processed."""
    begin, end = (layout.message_key(group, queue, block) for block in (span.begin // BLOCK, -(-span.end // BLOCK)))
    found: set[int] = set()
    for key, value in txn.between("settled", begin, end):
        first, bits = layout.index_offset(key) * BLOCK, layout.to_number(value)
        found.update(first + bit for bit in range(BLOCK) if bits >> bit & 1)
    return {offset for offset in found if span.begin <= offset < span.end}


def forget(txn: Transaction, group: str, queue: MessageQueue) -> None:
    for key in [key for key, _ in txn.scan("settled", layout.group_key(group, queue))]:
        txn.delete("settled", key)
