"""A program that makes every kind of write to a store, and reports the store's content after each step.

It runs under strace (`recorder`), so the recording contains each report after the writes that it describes. ``python -m
tests.power.workload FOLDER [BUG]`` plants one of `BUGS` first.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import xxhash

from orderedmq.broker import Receipt, SinkBatch
from orderedmq.conditions import StoreCondition
from orderedmq.embedded import garbage
from orderedmq.embedded.broker import EmbeddedBroker
from orderedmq.embedded.snapshot import snapshot
from orderedmq.embedded.store import database, segment_file
from orderedmq.embedded.store.database import Store
from orderedmq.embedded.store.filesystem import sync_folder
from orderedmq.embedded.store.segment_file import SegmentWriter
from orderedmq.embedded.store.transaction import Transaction
from orderedmq.errors import OrderedMQError, StoreError
from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import Instant
from orderedmq.ownership.membership import Subscription
from orderedmq.parking import Parking, Ticket
from tests.contract.support import locked, queues_of, rows
from tests.power.recorder import MARKS

#: The names of the store and of its copy in the folder of a run.
STORE, COPY = "store", "copy"
#: The size of a body in bytes for which an append or a task writes a segment.
LARGE: Final = 70_000


class BootClock:
    """Clocks of one boot. Each reading of the wall clock moves them forward by a second."""

    def __init__(self, boot: str, micros: int = 1_700_000_000_000_000) -> None:
        self.boot = boot
        self.micros = micros

    def instant(self) -> Instant:
        return Instant(self.boot, self.micros / 1e6)

    def wall(self) -> int:
        self.micros += 1_000_000
        return self.micros


def observed(broker: EmbeddedBroker) -> dict[str, Any]:
    """Return everything that a user can see of a store, in JSON types. Long bodies are replaced by checksums."""
    out: dict[str, Any] = {}
    for topic in broker.log.topics():
        for queue in queues_of(broker, topic.name):
            out[str(queue)] = [topic.incarnation, *_messages(broker, queue)]
    for group in broker.admin.groups():
        offsets = {str(queue): offset for queue, offset in broker.admin.group_offsets(group).items()}
        locks = [[str(lock.queue), lock.client_id, lock.epoch, lock.held] for lock in broker.admin.locks(group)]
        out[f"group {group}"] = [offsets, locks]
    return out


def _messages(broker: EmbeddedBroker, queue: MessageQueue) -> Iterator[Any]:
    bounds = broker.log.bounds([queue])[queue]
    yield [bounds.min_offset, bounds.max_offset]
    at = bounds.min_offset
    while at < bounds.max_offset:
        batch = broker.log.pull(queue, at, 1000, 1 << 20, ("body", "queue_offset"))
        for body, offset in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True):
            assert offset == at
            yield body.decode() if len(body) < 20 else xxhash.xxh3_64_hexdigest(body)
            at += 1


class Workload:
    """The steps, in order. The intermediate states of a step with several transactions must be invisible to a user."""

    def __init__(self, folder: Path) -> None:
        self.broker = EmbeddedBroker(folder / STORE, clock=BootClock("boot-before"))
        self._copy = folder / COPY
        self._number = 0

    def body(self, size: int) -> bytes:
        self._number += 1
        return (b"%06d" % self._number).ljust(size, b".")

    def queue(self, number: int = 0, topic: str = "orders") -> MessageQueue:
        return queues_of(self.broker, topic)[number]

    def append(self, *sizes: int, topic: str = "orders") -> None:
        """Append one message of each of these sizes to the topic's queues, in turn."""
        queues = zip(queues_of(self.broker, topic), sizes)
        self.broker.log.append({queue: rows([self.body(size)]) for queue, size in queues})

    def staged(self, batch: SinkBatch, partition: int, *sizes: int) -> Receipt:
        staging = self.broker.outbox.open(batch, partition)
        for queue, size in zip(queues_of(self.broker), sizes):
            staging.add(queue, rows([self.body(size)]))
        return staging.receipt()

    def publish(self, number: int, *sizes: int, attempts: int = 1) -> None:
        batch, before, receipts = SinkBatch("sink", number), self._number, []
        for partition in range(2):
            for _ in range(attempts):
                # All attempts of a task have the same rows, also those of a repeated batch.
                self._number = 100_000 + 100 * number + 10 * partition
                receipts.append(self.staged(batch, partition, *sizes))
        self._number = before
        self.broker.outbox.publish(batch, receipts)

    def snapshot(self) -> None:
        # A failed copy leaves files, which its user has to delete.
        shutil.rmtree(self._copy, ignore_errors=True)
        snapshot(self.broker.path, self._copy)

    def steps(self) -> Iterator[tuple[str, Callable[[], object]]]:
        broker = self.broker
        yield "topic", lambda: broker.admin.create_topic("orders", 2, compression="none")
        yield "aged", lambda: broker.admin.create_topic("aged", 2, compression="none", retention_bytes=200_000)
        for number in range(4):
            yield f"small append {number}", lambda: self.append(10, 10)
        yield "large append", lambda: self.append(LARGE, LARGE)
        yield "small batch", lambda: self.publish(0, 10, 10)
        yield "large batch", lambda: self.publish(1, LARGE, LARGE)
        yield "two attempts", lambda: self.publish(2, LARGE, 10, attempts=2)
        yield "the same again", lambda: self.publish(2, LARGE, 10)
        me = broker.groups.join("me")
        tokens: list[Any] = []
        yield "lock", lambda: tokens.extend(locked(broker, "g", me, queues_of(broker)))
        yield "member", lambda: broker.groups.heartbeat("g", me, Subscription("shared", "orders", "averagely"))
        yield "commit", lambda: broker.groups.commit({tokens[0]: 2, tokens[1]: 1})
        yield "renew", lambda: broker.groups.renew(tokens)
        yield "letters", lambda: broker.groups.dead_letter(tokens[0], rows([self.body(10), self.body(LARGE)]), [0, 1])
        yield "park", lambda: broker.groups.park(tokens[0], [Parking(self.queue(), at, Ticket(at, 1, 1, 9)) for at in (3, 4)])
        for number in range(5):
            yield f"merge {number}", lambda: self.append(30_000, 20_000)
        for number in range(6):
            yield f"aged {number}", lambda: self.append(LARGE, 10, topic="aged")
        yield "trim", lambda: broker.admin.trim("orders", {self.queue(): 3})
        yield "orphan", lambda: self.staged(SinkBatch("other", 0), 0, LARGE, 10)
        yield "garbage", lambda: garbage.collect_now(Store.open(broker.path), BootClock("boot-next"))
        yield "snapshot", self.snapshot
        yield "batch 3", lambda: self.publish(3, 10, LARGE)
        yield "delete topic", lambda: broker.admin.delete_topic("aged")
        yield "unlock", lambda: broker.groups.unlock(tokens)
        yield "leave", lambda: broker.groups.leave(me)
        yield "delete group", lambda: broker.admin.delete_group("g", force=True)
        yield "seek", lambda: broker.admin.seek("h", {self.queue(): 5})
        yield "last append", lambda: self.append(LARGE, 10)


# -- planted bugs -------------------------------------------------------------------------------------------------------------------


def _no_segment_sync() -> None:
    segment_file._fdatasync = lambda _: None  # type: ignore[misc]


def _no_folder_sync() -> None:
    segment_file.sync_folder = lambda path: None  # type: ignore[attr-defined]


def _published_before_sync() -> None:
    """The segment is synced after the commit of the transaction that publishes it."""
    late: list[tuple[int, Path]] = []
    write = Store.write

    def finish(self: SegmentWriter) -> None:
        late.append((os.dup(self._open), self._folder))
        complete = self._path.with_suffix(segment_file.COMPLETE)
        os.rename(self._path, complete)
        self._path = complete

    @contextlib.contextmanager
    def wrote(self: Store) -> Iterator[Transaction]:
        with write(self) as txn:
            yield txn
        for descriptor, folder in late:
            os.fdatasync(descriptor)
            os.close(descriptor)
            sync_folder(folder)
        late.clear()

    SegmentWriter.finish, Store.write = finish, wrote  # type: ignore[method-assign]


def _deleted_before_commit() -> None:
    drop = Transaction.drop

    def at_once(self: Transaction, segment: str) -> None:
        drop(self, segment)
        self.segments.delete(segment)

    Transaction.drop = at_once  # type: ignore[method-assign]


def _merge_not_synced() -> None:
    """The segment that a transaction writes is completed after its commit."""
    sign, end = Transaction.sign, Transaction.end

    def unsynced(self: Transaction) -> int | None:
        writer, self._writer = self._writer, None
        number = sign(self)
        self._writer = writer
        return number

    def late(self: Transaction, *, committed: bool) -> None:
        if self._writer is not None and committed:
            self._writer.finish()
        end(self, committed=committed)

    Transaction.sign, Transaction.end = unsynced, late  # type: ignore[method-assign]


def _commit_not_synced() -> None:
    synchronous, *others = database._PRAGMAS
    assert synchronous == "synchronous=FULL"
    database._PRAGMAS = ("synchronous=NORMAL", *others)  # type: ignore[assignment,misc]


#: Functions that plant a bug, by the name of the bug.
BUGS: Final[Mapping[str, Callable[[], None]]] = {
    "no sync of a segment": _no_segment_sync,
    "no sync of the folder": _no_folder_sync,
    "publish before the sync": _published_before_sync,
    "delete before the commit": _deleted_before_commit,
    "commit before the sync of a merge": _merge_not_synced,
    "no sync of a commit": _commit_not_synced,
}


def main() -> None:
    folder = Path(sys.argv[1])
    if len(sys.argv) > 2:
        BUGS[sys.argv[2]]()
    marks = os.open(folder / MARKS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def say(**what: Any) -> None:
        os.write(marks, json.dumps(what).encode() + b"\n")

    work = Workload(folder)
    for name, step in work.steps():
        # A step that fails because of the disk is tried again.
        for again in (False, True):
            say(begin=name)
            error = None
            try:
                step()
            except OrderedMQError as raised:
                error = raised.condition
            say(end=name, again=again, error=error, state=seen(work.broker))
            if error is None:
                break


def seen(broker: EmbeddedBroker) -> dict[str, Any] | None:
    """Return what a user can see, or None if the store does not exist or has no topics (the first topic creates the store)."""
    try:
        return observed(broker) or None
    except StoreError as error:
        if error.sub != StoreCondition.MISSING:
            raise
        return None


if __name__ == "__main__":
    main()
