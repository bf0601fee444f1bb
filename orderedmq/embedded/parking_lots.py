"""Parking lots in the store: parks messages, forgets settled ones, and counts parked ones (rules: parking).

The table ``parked`` records the place from which each parked message was copied, so that a message is copied only once. A record is
deleted when the group's offset passes that place. When the group's offset in a lot moves, only messages below the former offset are
deleted. The messages between the former offset and the new one stay, because their batch may be repeated.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from orderedmq.broker import TopicInfo
from orderedmq.embedded import index
from orderedmq.embedded.index import made, put_queues, topic_of
from orderedmq.embedded.log import append_rows, rows_at, rows_between
from orderedmq.embedded.store import schema
from orderedmq.embedded.store.schema import PARKED, QUEUES, TOPICS, ParkedRow
from orderedmq.embedded.store.transaction import Transaction
from orderedmq.model import MessageQueue
from orderedmq.parking import (
    LOT_COLUMNS,
    SOURCE_COLUMNS,
    Command,
    Lot,
    Parking,
    command_rows,
    lot_name,
    origin,
    parked_queue,
    to_park,
)
from orderedmq.schema import concat_batches


def put(
    txn: Transaction,
    group: str,
    queue: MessageQueue,
    parkings: Sequence[Parking],
    settled: Mapping[MessageQueue, int],
    now: int,
) -> list[bool]:
    """Park messages of ``queue`` or of its lot, and return for each whether it is parked now. ``now`` is in µs since the epoch.

    ``settled``: the group's offsets in the queue and its lot. A message below them is not parked. Raises DataLossError AGED_OUT or
    BEYOND_END.
    """
    lot = parked_queue(group, queue)
    new: dict[tuple[Any, ...], Parking] = {}
    answers = []
    for each in parkings:
        if each.source not in (queue, lot):
            raise ValueError(f"{each.source} is neither queue {queue} nor its parking lot {lot}")
        key = (group, *schema.key_of(each.source), each.at)
        unsettled = each.at >= settled.get(each.source, 0)
        if unsettled and key not in new and not _lies(txn, key, settled.get(lot, 0)):
            new[key] = each
        answers.append(unsettled)
    if new:
        topic = _lots(txn, queue, lot)
        rows = to_park(_copied(txn, list(new.values())), list(new.values()))
        begin = append_rows(txn, topic, lot, rows, now).begin
        for number, key in enumerate(new):
            txn.put(ParkedRow(*key, begin + number))
    return answers


def _lies(txn: Transaction, key: tuple[Any, ...], begin: int) -> bool:
    """Whether the message recorded under ``key`` is still in the lot, at ``begin`` or later. A seek may have dropped the message."""
    parked = txn.get(PARKED, *key)
    return parked is not None and parked.lot_offset >= begin


def _lots(txn: Transaction, queue: MessageQueue, lot: MessageQueue) -> TopicInfo:
    """Return the topic of the group's lots. It is created if missing, and extended to all queues of ``queue``'s topic."""
    queues = len(index.queues_of(topic_of(txn, queue.topic)))
    topic = made(txn, lot.topic, queues)
    if topic.queues >= queues:
        return topic
    grown = replace(topic, queues=queues)
    put_queues(txn, grown, topic.queues)
    return grown


def _copied(txn: Transaction, parkings: Sequence[Parking]) -> pa.RecordBatch:
    """Return the messages (SOURCE_COLUMNS) that ``parkings`` name, in the order of ``parkings``."""
    places: dict[MessageQueue, dict[int, int]] = {}
    for number, put in enumerate(parkings):
        places.setdefault(put.source, {})[put.at] = number
    batches, order = [], []
    for source, numbers in places.items():
        batches.append(rows_at(txn, source, sorted(numbers), SOURCE_COLUMNS))
        order += [numbers[at] for at in sorted(numbers)]
    behind = sorted(range(len(order)), key=order.__getitem__)
    return concat_batches(batches).take(pa.array(behind, pa.int64()))


def command(txn: Transaction, group: str, queue: MessageQueue, commands: Sequence[Command], now: int) -> None:
    """Append operators' commands to the lot of ``queue``. Raises TopicError MISSING or NO_SUCH_QUEUE if the lot does not exist."""
    lot = parked_queue(group, queue)
    topic = topic_of(txn, lot.topic)
    index.state(txn, lot)
    append_rows(txn, topic, lot, command_rows(commands), now)


def exists(txn: Transaction, lot: MessageQueue) -> bool:
    return txn.get(QUEUES, *schema.key_of(lot)) is not None


def forget(txn: Transaction, group: str, queue: MessageQueue, offset: int) -> None:
    """Delete the records of messages that were parked from offsets of ``queue`` below the group's new ``offset``."""
    below = itertools.takewhile(lambda parked: parked.message_offset < offset, txn.scan(PARKED, group, *schema.key_of(queue)))
    for parked in list(below):
        txn.delete(PARKED, *parked[:4])


def trim(txn: Transaction, lot: MessageQueue, before: int | None, offset: int) -> None:
    """Delete a lot's messages that are below both the former and the new offset. Others stay, because their batch may be repeated.

    ``before``: the former offset, None if there was none.
    """
    index.retire(txn, lot, before=min(before or 0, offset))


def count(txn: Transaction, lot: MessageQueue, at: int | None) -> int:
    """Return how many messages are parked in the lot, 0 if the lot does not exist. ``at``: the group's offset in the lot."""
    if not exists(txn, lot):
        return 0
    bounds = index.state(txn, lot)
    parked = Lot(max(bounds.min_offset, at or 0))
    for rows in rows_between(txn, lot, parked.begin, bounds.max_offset, LOT_COLUMNS):
        parked.add(rows)
    return parked.messages


def of_group(txn: Transaction, group: str) -> list[TopicInfo]:
    lots = [row.name for row in txn.scan(TOPICS) if (name := origin(row.name)) is not None and name[0] == group]
    return [topic_of(txn, name) for name in lots]


def of_topic(txn: Transaction, topic: str) -> list[TopicInfo]:
    """Return the topics of all groups' parking lots for ``topic``."""
    return [topic_of(txn, lot_name(group, topic)) for group in index.groups_with_lots(txn, topic)]
