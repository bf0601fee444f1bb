"""The Admin protocol on the store: topics, groups, locks, trimming."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from orderedmq.broker import Admin, Keep, LockInfo, MemberInfo, QueueBounds, QueueInfo, TopicInfo
from orderedmq.conditions import OptionCondition
from orderedmq.embedded import garbage, groups, index, outbox, parking_lots, runs
from orderedmq.embedded.chunk_codec import CODECS
from orderedmq.embedded.clock import Clock
from orderedmq.embedded.groups import EmbeddedGroups
from orderedmq.embedded.index import new_incarnation, put_queues, put_topic, topic_at, topic_of
from orderedmq.embedded.store import schema
from orderedmq.embedded.store.database import Store
from orderedmq.embedded.store.schema import (
    DEAD_LETTERS,
    LOCKS,
    MEMBERS,
    OF_GROUPS,
    OFFSETS,
    PARKED,
    PROGRESS,
    QUEUES,
    RESIZES,
    TOPICS,
    LockRow,
    Table,
)
from orderedmq.embedded.store.transaction import Transaction
from orderedmq.errors import (
    GroupError,
    OptionError,
    StoreError,
    in_use,
    missing_group,
    no_such_queue,
    outside_queue,
    topic_exists,
)
from orderedmq.model import (
    DEAD_LETTER_PREFIX,
    DEFAULT_COMPRESSION,
    MessageQueue,
    check_group,
    check_queue_count,
    check_topic,
)
from orderedmq.ownership import lock as rules
from orderedmq.ownership.membership import present
from orderedmq.parking import (
    AtSeek,
    Command,
    delete_with_parked,
    is_parking_lot,
    leader_of,
    origin,
    seek_with_parked,
)

#: No retention may be so long or so large. In µs it is still a finite number.
_FOREVER: Final = 1e300


class EmbeddedAdmin(Admin):
    """The Admin protocol. ``store(create)`` opens the store, and creates a missing one if ``create`` is true."""

    def __init__(self, store: Callable[[bool], Store], clock: Clock, members: Callable[[], EmbeddedGroups]) -> None:
        self._open = store
        self._clock = clock
        self._members = members

    @contextlib.contextmanager
    def _read(self) -> Iterator[Transaction]:
        with self._open(False).read() as txn:
            yield txn

    @contextlib.contextmanager
    def _write(self) -> Iterator[Transaction]:
        with self._open(False).write() as txn:
            yield txn

    # -- topics ------------------------------------------------------------------------------------------------------------

    def create_topic(
        self,
        name: str,
        queues: int,
        *,
        retention_seconds: float | None = None,
        retention_bytes: int | None = None,
        compression: str = DEFAULT_COMPRESSION,
        message_type: str | None = None,
    ) -> TopicInfo:
        check_topic(name, writing=True)
        check_queue_count(name, queues)
        if message_type is not None:
            raise OptionError(
                OptionCondition.UNSUPPORTED,
                f"topic {name!r} cannot have a message type ({message_type}): message types belong to RocketMQ 5, and every topic of an "
                "embedded broker is ordered. Leave the type out",
            )
        if compression not in CODECS:
            raise OptionError(
                OptionCondition.INVALID, f"compression {compression!r} of topic {name!r} is not one of {', '.join(CODECS)}"
            )
        _check_retention(name, retention_seconds, retention_bytes)
        topic = TopicInfo(name, queues, new_incarnation(), retention_seconds, retention_bytes, compression)
        with self._open(True).write() as txn:
            existing = topic_at(txn, name)
            if existing is not None:
                raise topic_exists(name, existing.queues)
            put_queues(txn, topic)
        return topic

    def alter_topic(
        self, name: str, *, retention_seconds: float | Keep | None = Keep.KEEP, retention_bytes: int | Keep | None = Keep.KEEP
    ) -> TopicInfo:
        _check_retention(name, retention_seconds, retention_bytes)
        _refuse_parked(name)
        asked = {"retention_seconds": retention_seconds, "retention_bytes": retention_bytes}
        with self._write() as txn:
            changed = replace(topic_of(txn, name), **{what: value for what, value in asked.items() if value is not Keep.KEEP})  # type: ignore[arg-type]
            put_topic(txn, changed)
        return changed

    def resize_topic(self, name: str, queues: int) -> TopicInfo:
        check_queue_count(name, queues)
        _refuse_parked(name)
        with self._write() as txn:
            return index.resize(txn, topic_of(txn, name), queues)

    def delete_topic(self, name: str) -> None:
        _refuse_parked(name)
        with self._write() as txn:
            _delete(txn, [topic_of(txn, name)], self._members().alive)
            if name.startswith(DEAD_LETTER_PREFIX):
                _clear(txn, DEAD_LETTERS, name.removeprefix(DEAD_LETTER_PREFIX))

    def describe_topic(self, name: str) -> list[QueueInfo]:
        out = []
        with self._read() as txn:
            for queue in index.listed(txn, topic_of(txn, name)):
                at = index.state(txn, queue)
                chunks = list(index.chunks(txn, queue, at, at.min_offset))
                out.append(
                    QueueInfo(
                        queue,
                        QueueBounds(at.min_offset, at.max_offset),
                        len(chunks),
                        at.stored_bytes,
                        chunks[0].first_stored if chunks else None,
                        chunks[-1].last_stored if chunks else None,
                    )
                )
        return out

    def trim(self, name: str, before: Mapping[MessageQueue, int] | None = None) -> dict[MessageQueue, int]:
        _refuse_parked(name)
        store = self._open(False)
        with store.write() as txn:
            topic = topic_of(txn, name)
            deleted = index.retain(txn, topic, self._clock, most=None) if before is None else {}
            for queue in sorted(before or ()):
                if queue.topic != name:
                    raise no_such_queue(name, queue)
                messages = index.retire(txn, queue, before=(before or {})[queue])
                if messages:
                    deleted[queue] = messages
        # Ignore an error of the garbage collection, because the messages are already deleted.
        with contextlib.suppress(StoreError):
            garbage.collect_now(store, self._clock)
        return deleted

    def message_type(self, name: str) -> None:
        """Return None, because topics of an embedded broker have no message type."""

    def kept_for(self, topics: Iterable[str]) -> dict[str, float]:
        with self._read() as txn:
            existing = [topic for name in topics if (topic := topic_at(txn, name)) is not None]
        return {topic.name: topic.retention_seconds for topic in existing if topic.retention_seconds is not None}

    # -- groups ------------------------------------------------------------------------------------------------------------

    def groups(self, *, of_sinks: bool = False) -> list[str]:
        if of_sinks:
            return []
        with self._read() as txn:
            return sorted(_every_group(txn))

    def group_offsets(self, group: str) -> dict[MessageQueue, int]:
        check_group(group)
        with self._read() as txn:
            _require(txn, group)
            offsets = {schema.queue_of(row): row.next_offset for row in txn.scan(OFFSETS, group)}
        return dict(sorted(offsets.items()))

    def group_progress(self, group: str) -> dict[MessageQueue, int]:
        check_group(group)
        with self._read() as txn:
            return {schema.queue_of(row): row.next_offset for row in txn.scan(PROGRESS, group)}

    def seek(self, group: str, offsets: Mapping[MessageQueue, int], *, force: bool = False, parked: AtSeek = None) -> None:
        check_group(group)
        for queue in offsets:
            if leader_of(group, queue) != queue:
                raise is_parking_lot(queue.topic, group)
        with self._write() as txn:
            now = self._clock.instant()
            for queue, offset in offsets.items():
                at = index.state(txn, queue)
                if not 0 <= offset <= at.max_offset:
                    raise outside_queue(queue, offset, at.max_offset)
            if not force:
                self._require_unused(txn, group)
            lots = _lots(txn, group, {queue.topic for queue in offsets})
            if parked is None:
                _require_none_parked(txn, group, [lots[queue] for queue in offsets if queue in lots], seek_with_parked)
            for queue, offset in offsets.items():
                groups.begin_anew(txn, group, queue, offset)
                if parked == "drop" and queue in lots:
                    groups.put_offset(txn, group, lots[queue], index.state(txn, lots[queue]).max_offset)
                lock = groups.lock_at(txn, group, queue)
                if lock is not None:
                    groups.put_lock(txn, group, queue, rules.sought(txn.take_number(schema.LAST_EPOCH), now))

    def require_unused(self, group: str) -> None:
        check_group(group)
        with self._read() as txn:
            self._require_unused(txn, group)

    def _require_unused(self, txn: Transaction, group: str) -> None:
        """Raise GroupError IN_USE if a living process owns one of the group's queues or is a member of the group."""
        now, alive = self._clock.instant(), self._members().alive
        for row in txn.scan(LOCKS, group):
            lock = schema.lock_of(row)
            if lock.held and not lock.expired(now) and alive(lock.client_id):
                raise in_use(group, f"{lock.client_id} owns queue {schema.queue_of(row)}")
        for member in present(groups.all_members(txn, group).values(), now, alive):
            raise in_use(group, f"{member.client_id} is a member")

    def delete_group(self, group: str, *, force: bool = False) -> None:
        check_group(group)
        with self._write() as txn:
            _require(txn, group)
            lots = parking_lots.of_group(txn, group)
            if not force:
                self._require_unused(txn, group)
                queues = [queue for topic in lots for queue in index.queues_of(topic)]
                _require_none_parked(txn, group, queues, delete_with_parked)
            _delete(txn, lots, self._members().alive)
            for table in (*OF_GROUPS, DEAD_LETTERS, PARKED, PROGRESS):
                _clear(txn, table, group)

    def command_parked(self, group: str, queue: MessageQueue, commands: Sequence[Command]) -> None:
        check_group(group)
        with self._write() as txn:
            parking_lots.command(txn, group, queue, commands, self._clock.wall())

    def release(self, group: str, queues: Sequence[MessageQueue], *, force: bool = False) -> list[MessageQueue]:
        check_group(group)
        alive = self._members().alive
        out = []
        with self._write() as txn:
            _require(txn, group)
            now = self._clock.instant()
            for queue in queues:
                lock = groups.lock_at(txn, group, queue)
                if lock is None or not lock.held or lock.orphaned:
                    continue
                if not force and not lock.expired(now) and alive(lock.client_id):
                    raise in_use(group, f"{lock.client_id} owns queue {queue}")
                groups.put_lock(txn, group, queue, rules.released(lock, txn.take_number(schema.LAST_EPOCH)))
                out.append(queue)
        return out

    def members(self, group: str) -> list[MemberInfo]:
        check_group(group)
        now = self._clock.instant()
        members = sorted(self._members().members(group), key=lambda member: member.joined)
        names = _query_names(self._open(False))
        return [
            MemberInfo(replace(member, name=member.name or names.get(member.client_id)), max(0.0, member.age(now)))
            for member in members
        ]

    def locks(self, group: str | None = None) -> list[LockInfo]:
        members = self._members()
        store = self._open(False)
        with store.read() as txn:
            prefix = () if group is None else (group,)
            locks = [
                (row.consumer_group, schema.queue_of(row), schema.lock_of(row))
                for row in txn.scan(LOCKS, *prefix)
                if not row.orphaned
            ]
            registered = list(txn.scan(MEMBERS, *prefix))
        names = _query_names(store) | {member.client_id: member.name for member in registered if member.name is not None}
        now = self._clock.instant()
        # Each client is checked once, however many queues it owns.
        alive = {client_id: members.alive(client_id) for client_id in {lock.client_id for _, _, lock in locks if lock.held}}
        return [
            LockInfo(
                name,
                queue,
                lock.owner,
                lock.client_id,
                lock.epoch,
                lock.tenure,
                lock.held,
                alive.get(lock.client_id),
                lock.age(now),
                lock.remaining(now),
                names.get(lock.client_id),
            )
            for name, queue, lock in locks
        ]


def _query_names(store: Store) -> dict[str, str]:
    with store.errors_mapped("look for the names of queries"):
        return runs.query_names(store.path)


def _every_group(txn: Transaction) -> set[str]:
    return {row.consumer_group for table in OF_GROUPS for row in txn.scan(table)}


def _require(txn: Transaction, group: str) -> None:
    if not any(True for table in OF_GROUPS for _ in txn.scan(table, group)):
        raise missing_group(group, "this store", _every_group(txn))


def _lots(txn: Transaction, group: str, topics: Collection[str]) -> dict[MessageQueue, MessageQueue]:
    """Return the group's parking lots for these topics, keyed by the queue that each lot belongs to."""
    lots = [queue for topic in parking_lots.of_group(txn, group) for queue in index.queues_of(topic)]
    return {leader: lot for lot in lots if (leader := leader_of(group, lot)).topic in topics}


def _count(txn: Transaction, group: str, lots: Sequence[MessageQueue]) -> int:
    return sum(parking_lots.count(txn, lot, groups.offset_at(txn, group, lot)) for lot in lots)


def _require_none_parked(
    txn: Transaction, group: str, lots: Sequence[MessageQueue], error: Callable[[str, int, Sequence[MessageQueue]], GroupError]
) -> None:
    used = {lot: messages for lot in lots if (messages := _count(txn, group, [lot]))}
    if used:
        raise error(group, sum(used.values()), [leader_of(group, lot) for lot in used])


def _delete(txn: Transaction, topics: Sequence[TopicInfo], alive: Callable[[str], bool]) -> None:
    """Delete topics with their messages, their parking lots, and everything that groups and sinks have recorded about them.

    Locks whose owners are alive are orphaned instead.
    """
    going = list(topics)
    # The list grows during the loop, because a lot that another group reads may itself have lots.
    for topic in going:
        going += parking_lots.of_topic(txn, topic.name)
        for queue in index.queues_of(topic):
            index.retire(txn, queue, before=index.state(txn, queue).max_offset)
            txn.delete(QUEUES, *schema.key_of(queue))
        for resize in list(txn.scan(RESIZES, topic.name)):
            txn.delete(RESIZES, *resize[:2])
        txn.delete(TOPICS, topic.name)
    names = {topic.name for topic in going}
    of_queues: tuple[Table[Any], ...] = (OFFSETS, PROGRESS, LOCKS, DEAD_LETTERS, PARKED)
    for table in of_queues:
        for row in [row for row in txn.scan(table) if row.topic in names]:
            if isinstance(row, LockRow) and row.held and alive(row.client_id):
                txn.put(row._replace(orphaned=1))
            else:
                txn.delete(table, *row[: table.keys])
    outbox.forget_topics(txn, names)


def _refuse_parked(topic: str) -> None:
    """Refuse to change a topic that holds parking lots. Raises TopicError RESERVED."""
    lot = origin(topic)
    if lot is not None:
        raise is_parking_lot(topic, lot[0])


def _clear(txn: Transaction, table: Table[Any], group: str) -> None:
    for row in list(txn.scan(table, group)):
        txn.delete(table, *row[: table.keys])


def _check_retention(name: str, seconds: float | Keep | None, size: int | Keep | None) -> None:
    for value, what in ((seconds, "retention_seconds"), (size, "retention_bytes")):
        if isinstance(value, int | float) and not 0 < value < _FOREVER:
            raise OptionError(
                OptionCondition.INVALID,
                f"{what} of topic {name!r} is {value}. Give a positive number, or none to keep messages forever",
            )
