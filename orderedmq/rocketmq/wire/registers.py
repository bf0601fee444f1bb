"""Registers: numbers of this package that brokers store as offsets of queues that do not exist. Pure.

A broker stores an offset for any (group, topic, queue id) and does not check that the queue exists. It writes these numbers to disk with
the real offsets, up to 5 s later, and deletes them with the group or the topic. Tools that list a topic's queues do not show them.

Each function returns a "queue" that is the place of one register. `group_requests.consumer_offset` reads the register and
``update_consumer_offset`` writes it. 0 and no offset both mean that the register was never written or that its broker has lost it. Ids
of real queues are below SPAN. Each register has its own span of ids, so registers do not collide even if a sink stores its registers in
the group with which a source reads.

===============  =================================  =========================================================================
register         one for each                       what its number means
===============  =================================  =========================================================================
`fence`          group, queue                       the greatest epoch that is stale for every client (group.lock_rules)
`tenure`         group, queue                       the epoch at which the last owner's unbroken tenure began (group.lock_rules)
`reset`          group, queue                       the epoch of the last reset of the group's offset (group.lock_rules)
`progress`       group, queue                       up to which offset the group's listener is done, and for which reset (`progress_of`)
`lot_progress`   group, queue                       the same in the queue's parking lot (`broker.Progress`)
`mark`           sink's group, topic, broker        which sink the other registers belong to (sink.bookmarks)
`writer`         sink's group, topic, broker        the run and batch that may write to the broker (sink.bookmarks)
`queues`         sink's group, topic, broker        over which queues the sink's last batch is spread (sink.batch_queues)
`committed`      sink's group, topic, broker        the sink's newest committed batch plus 1
`history`        sink's group, topic, broker, slot  which batches before `committed` are committed (sink.commit_history)
`resizes`        topic                              how often the topic was resized (messages.resizes, in a group of their own)
`resize`         topic, resize                      the numbers of queues before and after that resize, and of those that existed
`resize_end`     queue, resize                      where the queue ended in that resize
===============  =================================  =========================================================================

The bit `NEWER` stands for the format of all these numbers, of the stamps on a sink's messages, and of parked messages and dead letters. A
version that changes one of them sets it in the fence of each queue that it owns and in the mark of each sink, also of a sink whose group
has no mark so far. `require_known` refuses such a number. To a running query of an earlier version, the fence says that its lock is lost.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

from orderedmq.conditions import GroupCondition
from orderedmq.errors import GroupError
from orderedmq.model import MessageQueue

#: A time in milliseconds above OWNER_BITS reaches this bit in the year 2109.
NEWER: Final = 1 << 62

#: The number of ids in a register's span. It is greater than the maximum number of queues of a topic (MAX_QUEUES).
SPAN: Final = 1 << 20
_FENCES, _TENURES, _RESETS, _MARKS, _WRITERS, _QUEUES, _PROGRESS, _LOT_PROGRESS, _COMMITTED, _HISTORY = (
    number * SPAN for number in (1, 2, 4, 6, 8, 10, 12, 13, 16, 17)
)
#: An offset in a register of progress has this many bits, which 17 trillion messages of a queue do not exceed. The bits above it say under
#: which reset, and by which listener, it was recorded, so that a task that was paused before a seek records nothing that counts after it.
_OFFSET_BITS: Final = 44
_RESIZES: Final = 64
#: The most resizes of a topic: an id has 31 bits.
MOST_RESIZES: Final = 1900
_TAG_BYTES: Final = 2
#: An epoch is a time in milliseconds, and below it so many bits that identify the query (group.lock_rules).
OWNER_BITS: Final = 20


def require_known(group: str, numbers: Iterable[int]) -> None:
    """Refuse a group if one of ``numbers``, fences of its queues or a mark, has a newer format. Raises GroupError NEWER_FORMAT."""
    if any(number & NEWER for number in numbers):
        raise GroupError(
            GroupCondition.NEWER_FORMAT,
            f"group {group!r} has numbers at the brokers that a newer version of orderedmq has written, and this version would misread "
            "them. Upgrade orderedmq, or use another group",
        )


def fence(queue: MessageQueue) -> MessageQueue:
    return queue._replace(queue_id=queue.queue_id + _FENCES)


def tenure(queue: MessageQueue) -> MessageQueue:
    return queue._replace(queue_id=queue.queue_id + _TENURES)


def reset(queue: MessageQueue) -> MessageQueue:
    return queue._replace(queue_id=queue.queue_id + _RESETS)


def progress(queue: MessageQueue) -> MessageQueue:
    return queue._replace(queue_id=queue.queue_id + _PROGRESS)


def lot_progress(queue: MessageQueue) -> MessageQueue:
    return queue._replace(queue_id=queue.queue_id + _LOT_PROGRESS)


def progress_of(offset: int, reset: int, listener: str) -> int:
    """Return the number of a register of progress. ``reset``: the register `reset` of the queue. A greater offset counts as the greatest."""
    tag = hashlib.blake2b(f"{reset}/{listener}".encode(errors="surrogatepass"), digest_size=_TAG_BYTES).digest()
    return int.from_bytes(tag) << _OFFSET_BITS | min(offset, (1 << _OFFSET_BITS) - 1)


def offset_of(number: int) -> int:
    """Return the offset in a register of progress, whatever it was recorded for."""
    return number & ((1 << _OFFSET_BITS) - 1)


def mark(queue: MessageQueue) -> MessageQueue:
    return queue._replace(queue_id=_MARKS)


def writer(queue: MessageQueue) -> MessageQueue:
    return queue._replace(queue_id=_WRITERS)


def queues(queue: MessageQueue) -> MessageQueue:
    return queue._replace(queue_id=_QUEUES)


def committed(queue: MessageQueue) -> MessageQueue:
    return queue._replace(queue_id=_COMMITTED)


def history(queue: MessageQueue, slot: int) -> MessageQueue:
    return queue._replace(queue_id=_HISTORY + slot * SPAN)


def resizes(queue: MessageQueue) -> MessageQueue:
    return queue._replace(queue_id=_RESIZES * SPAN)


def resize(queue: MessageQueue, number: int) -> MessageQueue:
    return queue._replace(queue_id=(_RESIZES + number + 2) * SPAN - 1)


def resize_end(queue: MessageQueue, number: int) -> MessageQueue:
    return queue._replace(queue_id=queue.queue_id + (_RESIZES + number + 1) * SPAN)


def queue_of(place: MessageQueue) -> MessageQueue:
    """Return a queue whose broker stores the register at ``place``: the register's queue, if any. A real queue is returned unchanged."""
    return place._replace(queue_id=place.queue_id % SPAN)
