"""The Admin protocol on the store: topics, groups, locks, trimming."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from orderedmq.broker import Keep, LockInfo, MemberInfo, QueueBounds, QueueInfo, TopicInfo
from orderedmq.conditions import OptionCondition
from orderedmq.core import lock as rules
from orderedmq.core.membership import present
from orderedmq.embedded import groups, index, layout, runs
from orderedmq.embedded.chunk_codec import CODECS
from orderedmq.embedded.clock import Clock
from orderedmq.embedded.groups import EmbeddedGroups
from orderedmq.embedded.log import new_incarnation, put_topic, topic_of
from orderedmq.embedded.store import Store
from orderedmq.embedded.transaction import Transaction
from orderedmq.errors import (
    OptionError,
    cannot_shrink,
    in_use,
    missing_group,
    no_such_queue,
    outside_queue,
    topic_exists,
)
from orderedmq.model import DEAD_LETTER_PREFIX, DEFAULT_COMPRESSION, MessageQueue, check_group, check_queue_count, check_topic


class EmbeddedAdmin:
    """The Admin protocol. ``store(create)`` opens the store; ``create`` makes a missing one."""

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
    ) -> TopicInfo:
        check_topic(name, writing=True)
        check_queue_count(name, queues)
        if compression not in CODECS:
            raise OptionError(
                OptionCondition.INVALID, f"compression {compression!r} of topic {name!r} is not one of {', '.join(CODECS)}"
            )
        _check_retention(name, retention_seconds, retention_bytes)
        topic = TopicInfo(name, queues, new_incarnation(), retention_seconds, retention_bytes, compression)
        with self._open(True).write() as txn:
            if txn.get("topics", name.encode()) is not None:
                raise topic_exists(name, topic_of(txn, name).queues)
            put_topic(txn, topic)
            self._put_queues(txn, topic, 0)
        return topic

    def alter_topic(
        self, name: str, *, retention_seconds: float | Keep | None = Keep.KEEP, retention_bytes: int | Keep | None = Keep.KEEP
    ) -> TopicInfo:
        _check_retention(name, retention_seconds, retention_bytes)
        asked = {"retention_seconds": retention_seconds, "retention_bytes": retention_bytes}
        with self._write() as txn:
            changed = replace(topic_of(txn, name), **{what: value for what, value in asked.items() if value is not Keep.KEEP})  # type: ignore[arg-type]
            put_topic(txn, changed)
        return changed

    def add_queues(self, name: str, queues: int) -> TopicInfo:
        check_queue_count(name, queues)
        with self._write() as txn:
            topic = topic_of(txn, name)
            if queues < topic.queues:
                raise cannot_shrink(name, topic.queues, queues)
            grown = replace(topic, queues=queues)
            put_topic(txn, grown)
            self._put_queues(txn, grown, topic.queues)
        return grown

    def _put_queues(self, txn: Transaction, topic: TopicInfo, begin: int) -> None:
        for queue in index.queues_of(topic)[begin:]:
            txn.put("queues", layout.queue_key(queue), layout.QueueState(0, 0, 0, 0).pack())

    def delete_topic(self, name: str) -> None:
        def delete(txn: Transaction) -> None:
            topic = topic_of(txn, name)
            for queue in index.queues_of(topic):
                index.retire(txn, queue, before=index.state(txn, queue).max_offset)
                txn.delete("queues", layout.queue_key(queue))
            txn.delete("topics", name.encode())
            for database in ("groups", "locks", "dead"):
                for key in [key for key, _ in txn.scan(database) if layout.group_of(key)[1].topic == name]:
                    txn.delete(database, key)
            if name.startswith(DEAD_LETTER_PREFIX):
                _clear(txn, "dead", name.removeprefix(DEAD_LETTER_PREFIX))

        self._open(False).write_deletion(delete)

    def describe_topic(self, name: str) -> list[QueueInfo]:
        out = []
        with self._read() as txn:
            for queue in index.queues_of(topic_of(txn, name)):
                at = index.state(txn, queue)
                found = [chunk for _, chunk in index.chunks(txn, queue, at, at.min_offset)]
                out.append(
                    QueueInfo(
                        queue,
                        QueueBounds(at.min_offset, at.max_offset),
                        len(found),
                        at.stored_bytes,
                        found[0].first_stored if found else None,
                        found[-1].last_stored if found else None,
                    )
                )
        return out

    def trim(self, name: str, before: Mapping[MessageQueue, int] | None = None) -> dict[MessageQueue, int]:
        def delete(txn: Transaction) -> dict[MessageQueue, int]:
            topic = topic_of(txn, name)
            if before is None:
                return index.retain(txn, topic, self._clock.wall(), most=None)
            out: dict[MessageQueue, int] = {}
            for queue in sorted(before):
                if queue.topic != name:
                    raise no_such_queue(name, queue)
                gone = index.retire(txn, queue, before=before[queue])
                if gone:
                    out[queue] = gone
            return out

        return self._open(False).write_deletion(delete)

    # -- groups ------------------------------------------------------------------------------------------------------------

    def groups(self) -> list[str]:
        with self._read() as txn:
            databases = ("groups", "locks", "members")
            return sorted({key.partition(b"\0")[0].decode() for database in databases for key, _ in txn.scan(database)})

    def group_offsets(self, group: str) -> dict[MessageQueue, int]:
        check_group(group)
        with self._read() as txn:
            _require(txn, group)
            found = txn.scan("groups", layout.group_prefix(group))
            known = {layout.group_of(key)[1]: layout.to_number(value) for key, value in found}
        return dict(sorted(known.items()))

    def seek(self, group: str, offsets: Mapping[MessageQueue, int], *, force: bool = False) -> int:
        check_group(group)
        with self._write() as txn:
            now = self._clock.instant()
            for queue, offset in offsets.items():
                at = index.state(txn, queue)
                if not 0 <= offset <= at.max_offset:
                    raise outside_queue(queue, offset, at.max_offset)
            if not force:
                self._require_unused(txn, group)
            for queue, offset in offsets.items():
                groups.put_offset(txn, group, queue, offset)
                lock = groups.lock_at(txn, group, queue)
                if lock is not None:
                    groups.put_lock(txn, group, queue, rules.sought(txn.take_number("epoch"), now))
            return groups.raise_reset_number(txn, group)

    def require_unused(self, group: str) -> None:
        check_group(group)
        with self._read() as txn:
            self._require_unused(txn, group)

    def _require_unused(self, txn: Transaction, group: str) -> None:
        """Raises GroupError IN_USE if a living process owns a queue of the group or is a member of it."""
        now, alive = self._clock.instant(), self._members().alive
        for key, value in txn.scan("locks", layout.group_prefix(group)):
            lock = layout.lock_from_json(value)
            if lock.held and not lock.expired(now) and alive(lock.client_id):
                raise in_use(group, f"{lock.client_id} owns queue {layout.group_of(key)[1]}")
        for member in present(groups.all_members(txn, group).values(), now, alive):
            raise in_use(group, f"{member.client_id} is a member")

    def delete_group(self, group: str, *, force: bool = False) -> None:
        check_group(group)

        def delete(txn: Transaction) -> None:
            _require(txn, group)
            if not force:
                self._require_unused(txn, group)
            for database in ("groups", "locks", "members"):
                _clear(txn, database, group)

        self._open(False).write_deletion(delete)

    def release(self, group: str, queues: Sequence[MessageQueue], *, force: bool = False) -> list[MessageQueue]:
        check_group(group)
        alive = self._members().alive
        out = []
        with self._write() as txn:
            _require(txn, group)
            now = self._clock.instant()
            for queue in queues:
                lock = groups.lock_at(txn, group, queue)
                if lock is None or not lock.held:
                    continue
                if not force and not lock.expired(now) and alive(lock.client_id):
                    raise in_use(group, f"{lock.client_id} owns queue {queue}")
                groups.put_lock(txn, group, queue, rules.released(lock, txn.take_number("epoch")))
                out.append(queue)
        return out

    def members(self, group: str) -> list[MemberInfo]:
        check_group(group)
        now = self._clock.instant()
        found = sorted(self._members().members(group), key=lambda member: member.joined)
        names = runs.query_names(self._open(False).path)
        return [
            MemberInfo(replace(member, name=member.name or names.get(member.client_id)), max(0.0, member.age(now)))
            for member in found
        ]

    def locks(self, group: str | None = None) -> list[LockInfo]:
        members = self._members()
        store = self._open(False)
        with store.read() as txn:
            prefix = b"" if group is None else layout.group_prefix(group)
            found = [(*layout.group_of(key), layout.lock_from_json(value)) for key, value in txn.scan("locks", prefix)]
            said = [layout.member_from_json(value) for _, value in txn.scan("members", prefix)]
        names = runs.query_names(store.path) | {member.client_id: member.name for member in said if member.name is not None}
        now = self._clock.instant()
        alive = {lock.client_id: members.alive(lock.client_id) for _, _, lock in found if lock.held}
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
            for name, queue, lock in found
        ]


def _require(txn: Transaction, group: str) -> None:
    if not any(True for database in ("groups", "locks", "members") for _ in txn.scan(database, layout.group_prefix(group))):
        raise missing_group(group, "this store")


def _clear(txn: Transaction, database: str, group: str) -> None:
    for key in [key for key, _ in txn.scan(database, layout.group_prefix(group))]:
        txn.delete(database, key)


def _check_retention(name: str, seconds: float | Keep | None, size: int | Keep | None) -> None:
    for value, what in ((seconds, "retention_seconds"), (size, "retention_bytes")):
        if isinstance(value, int | float) and value <= 0:
            raise OptionError(
                OptionCondition.INVALID,
                f"{what} of topic {name!r} is {value}; give a positive number, or none to keep for ever",
            )
