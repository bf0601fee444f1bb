"""The Groups protocol on the store: queue locks by the rules of ownership/lock.py, and group offsets fenced by lock epochs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import pyarrow as pa

from orderedmq.broker import Groups, Progress
from orderedmq.embedded import dead_letters, garbage, parking_lots
from orderedmq.embedded.clock import Clock
from orderedmq.embedded.liveness import Presence, is_alive
from orderedmq.embedded.log import EmbeddedLog
from orderedmq.embedded.store import schema
from orderedmq.embedded.store.database import Store
from orderedmq.embedded.store.schema import LOCKS, MEMBERS, OFFSETS, PROGRESS, OffsetRow, ProgressRow
from orderedmq.embedded.store.transaction import Transaction
from orderedmq.errors import LockError, lost, not_an_offset
from orderedmq.model import MessageQueue, OffsetRange, check_group
from orderedmq.ownership import lock as rules
from orderedmq.ownership.lock import LOCK_LIFE, ClientIdentity, LockToken, QueueLock, Refusal
from orderedmq.ownership.membership import Member, Subscription, present
from orderedmq.parking import Parking, leader_of, parked_queue, queue_token


def lock_at(txn: Transaction, group: str, queue: MessageQueue) -> QueueLock | None:
    row = txn.get(LOCKS, group, *schema.key_of(queue))
    return None if row is None else schema.lock_of(row)


def put_lock(txn: Transaction, group: str, queue: MessageQueue, lock: QueueLock) -> None:
    txn.put(schema.lock_row(group, queue, lock))


def require_current(txn: Transaction, token: LockToken, doing: str, *, deleted: bool = False) -> QueueLock:
    """Return the lock that guards the token's queue. Raises LockError LOST unless it still has the epoch of ``token`` (the fence).

    ``deleted``: whether the queue may have been deleted since, because only what was read before is completed.
    """
    guard = queue_token(token)
    lock = lock_at(txn, guard.group, guard.queue)
    if lock is None or not rules.is_current(lock, guard) or (lock.orphaned and not deleted):
        raise _lost(guard, lock, doing)
    return lock


def is_held(txn: Transaction, token: LockToken) -> bool:
    """Whether the lock that guards the token's queue is held under ``token``."""
    guard = queue_token(token)
    return rules.is_held(lock_at(txn, guard.group, guard.queue), guard)


def _require_to_commit(txn: Transaction, token: LockToken, offset: int) -> QueueLock:
    return require_current(txn, token, f"its offset {offset} was committed", deleted=True)


def _lost(token: LockToken, lock: QueueLock | None, doing: str) -> LockError:
    if lock is None or not lock.owner:
        now = "it has no owner now"
    elif lock.client_id == token.client_id:
        now = "no other client has owned it since"
    else:
        now = f"it went to {lock.client_id}"
    life = f"its lock lives ({LOCK_LIFE:.0f} s)"
    return lost(token.group, token.queue, token.epoch, f"before {doing}, and {now}", life)


def offset_at(txn: Transaction, group: str, queue: MessageQueue) -> int | None:
    row = txn.get(OFFSETS, group, *schema.key_of(queue))
    return None if row is None else row.next_offset


def put_offset(txn: Transaction, group: str, queue: MessageQueue, offset: int) -> None:
    """Set a group's offset in a queue, and delete the records of messages that were parked from lower offsets.

    If the queue is a parking lot, this also deletes its messages below the offset.

    Do nothing for a parking lot that does not exist. Raises OffsetError INVALID if the offset is negative.
    """
    if offset < 0:
        raise not_an_offset(offset, queue, group)
    if leader_of(group, queue) != queue:
        if not parking_lots.exists(txn, queue):
            return
        parking_lots.trim(txn, queue, offset_at(txn, group, queue), offset)
    parking_lots.forget(txn, group, queue, offset)
    txn.put(OffsetRow(group, *schema.key_of(queue), offset))


def begin_anew(txn: Transaction, group: str, queue: MessageQueue, offset: int) -> None:
    """Set a group's offset in a queue, and forget which messages from there on were decided before."""
    put_offset(txn, group, queue, offset)
    dead_letters.forget(txn, group, queue, offset)
    txn.delete(PROGRESS, group, *schema.key_of(queue))


def forward(txn: Transaction, token: LockToken, offset: int, lock: QueueLock) -> None:
    """Move a group's offset in the queue of a current token, which ``lock`` guards, forward, never back. A deleted queue has no offset."""
    former = offset_at(txn, token.group, token.queue)
    if not lock.orphaned and (former is None or former < offset):
        put_offset(txn, token.group, token.queue, offset)


def all_members(txn: Transaction, group: str) -> dict[str, Member]:
    """Return every member of a group by client id, including those that are expired or whose process is dead."""
    return {row.client_id: schema.member_of(row) for row in txn.scan(MEMBERS, group)}


class EmbeddedGroups(Groups):
    """The Groups protocol. Thread-safe."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._present: dict[str, Presence] = {}
        #: The groups in which this process has written member records, by client id.
        self._joined: dict[str, set[str]] = {}
        #: Seconds that locks and memberships of this process live without a renewal.
        self.life = LOCK_LIFE

    def join(self, owner: str) -> ClientIdentity:
        with self._store.errors_mapped("join a group"):
            presence = Presence(self._store.path, owner)
        self._present[presence.client.client_id] = presence
        return presence.client

    def cut_off(self, client: ClientIdentity) -> bool:
        """Return False, because members are processes on this machine, without a connection that could break."""
        del client
        return False

    def leave(self, client: ClientIdentity) -> None:
        self._store.require_own()
        joined = self._joined.pop(client.client_id, set())
        presence = self._present.pop(client.client_id, None)
        if presence is None:
            return

        try:
            if joined:
                with self._store.write() as txn:
                    for group in joined:
                        txn.delete(MEMBERS, group, client.client_id)
        finally:
            presence.close()

    def close(self) -> None:
        for presence in self._present.values():
            presence.close()
        self._present.clear()
        self._joined.clear()

    def alive(self, client_id: str) -> bool:
        with self._store.errors_mapped("look for an owner"):
            return is_alive(self._store.path, client_id)

    def heartbeat(self, group: str, client: ClientIdentity, subscription: Subscription) -> list[Member]:
        check_group(group)
        self._joined.setdefault(client.client_id, set()).add(group)
        with self._store.write() as txn:
            now = self._clock.instant()
            members = all_members(txn, group)
            mine = members.get(client.client_id)
            joined = mine.joined if mine is not None and not mine.expired(now) else txn.take_number(schema.LAST_EPOCH)
            mine = Member(client.owner, client.client_id, subscription, joined, now, self.life, client.name)
            members[client.client_id] = mine
            txn.put(schema.member_row(group, mine))
            counted = present(members.values(), now, self.alive)
            for client_id in set(members) - {member.client_id for member in counted}:
                txn.delete(MEMBERS, group, client_id)
        return counted

    def members(self, group: str) -> list[Member]:
        check_group(group)
        with self._store.read() as txn:
            members = all_members(txn, group)
        return present(members.values(), self._clock.instant(), self.alive)

    def lock(
        self,
        group: str,
        client: ClientIdentity,
        queues: Sequence[MessageQueue],
        tenures: Mapping[MessageQueue, int] | None = None,
    ) -> dict[MessageQueue, LockToken | Refusal]:
        """See `Groups.lock`. The locks themselves keep the tenures."""
        del tenures
        check_group(group)
        out: dict[MessageQueue, LockToken | Refusal] = {}
        alive_by_client: dict[str, bool] = {}

        def alive(client_id: str) -> bool:
            if client_id not in alive_by_client:
                alive_by_client[client_id] = self.alive(client_id)
            return alive_by_client[client_id]

        # Members of a shared group repeatedly request queues that other members still hold, so a refusal must not need a write.
        with self._store.read() as txn:
            now = self._clock.instant()
            for queue in queues:
                before = lock_at(txn, group, queue)
                if before is None or rules.grant(before, client, now, next_epoch=0, alive=alive, life=self.life) is not None:
                    out.clear()
                    break
                out[queue] = rules.refusal(before, queue, now, alive(before.client_id))
            if out or not queues:
                return out
        alive_by_client.clear()
        with self._store.write() as txn:
            now = self._clock.instant()
            for queue in queues:
                before = lock_at(txn, group, queue)
                # An unused number leaves a gap in the epochs. That is harmless, because they only have to grow.
                after = rules.grant(
                    before, client, now, next_epoch=txn.take_number(schema.LAST_EPOCH), alive=alive, life=self.life
                )
                if after is None:
                    assert before is not None
                    out[queue] = rules.refusal(before, queue, now, alive(before.client_id))
                else:
                    put_lock(txn, group, queue, after)
                    out[queue] = rules.token_of(after, group, queue)
        return out

    def renew(self, tokens: Sequence[LockToken]) -> list[LockToken]:
        lost_tokens: list[LockToken] = []
        with self._store.write() as txn:
            now = self._clock.instant()
            for token in tokens:
                lock = rules.renew(lock_at(txn, token.group, token.queue), token, now)
                if lock is None:
                    lost_tokens.append(token)
                else:
                    put_lock(txn, token.group, token.queue, lock)
        garbage.tidy(self._store, self._clock)
        return lost_tokens

    def check(self, token: LockToken) -> bool:
        with self._store.read() as txn:
            return is_held(txn, token)

    def stale(self, tokens: Sequence[LockToken]) -> list[LockToken]:
        with self._store.read() as txn:
            return [token for token in tokens if not is_held(txn, token)]

    def unlock(self, tokens: Sequence[LockToken], linger: float = 0.0) -> None:
        with self._store.write() as txn:
            now = self._clock.instant()
            for token in tokens:
                lock = rules.unlock(lock_at(txn, token.group, token.queue), token, now, linger)
                if lock is not None and lock.orphaned:
                    txn.delete(LOCKS, token.group, *schema.key_of(token.queue))
                elif lock is not None:
                    put_lock(txn, token.group, token.queue, lock)

    def end_tenures(self, group: str, tenures: Mapping[MessageQueue, int]) -> None:
        """See `Groups.end_tenures`. The holder's grant has ended the tenure: `Owner.indispensable` leaves out no queue of a former run."""

    def offsets(self, group: str, queues: Sequence[MessageQueue]) -> dict[MessageQueue, int]:
        out: dict[MessageQueue, int] = {}
        with self._store.read() as txn:
            for queue in queues:
                offset = offset_at(txn, group, queue)
                if offset is not None:
                    out[queue] = offset
        return out

    def commit(self, offsets: Mapping[LockToken, int]) -> None:
        # A reader commits after every batch, but the sink's publish has usually moved the offsets already. In that case nothing is written.
        with self._store.read() as txn:
            committed = ((offset_at(txn, token.group, token.queue), offset) for token, offset in offsets.items())
            if all(at is not None and at >= offset for at, offset in committed):
                for token, offset in offsets.items():
                    _require_to_commit(txn, token, offset)
                return
        with self._store.write() as txn:
            for token, offset in offsets.items():
                forward(txn, token, offset, _require_to_commit(txn, token, offset))

    def pass_on(
        self,
        token: LockToken,
        rows: Mapping[MessageQueue, pa.RecordBatch],
        among: Collection[MessageQueue],
        offset: int | None,
    ) -> None:
        def commit(txn: Transaction) -> None:
            lock = require_current(txn, token, "rows made from its messages were appended")
            if offset is not None:
                forward(txn, token, offset, lock)

        EmbeddedLog(self._store, self._clock).append(rows, among=among, also=commit)

    def reset(self, offsets: Mapping[LockToken, int]) -> list[LockToken]:
        out: list[LockToken] = []
        with self._store.write() as txn:
            for token, offset in offsets.items():
                lock = require_current(txn, token, f"its offset was reset to {offset}")
                begin_anew(txn, token.group, token.queue, offset)
                lock = rules.restarted(lock, txn.take_number(schema.LAST_EPOCH))
                put_lock(txn, token.group, token.queue, lock)
                out.append(rules.token_of(lock, token.group, token.queue))
        return out

    def dead_letter(self, token: LockToken, letters: pa.RecordBatch, offsets: Sequence[int]) -> int:
        with self._store.write() as txn:
            require_current(txn, token, f"{len(offsets)} of its messages were dead-lettered")
            return dead_letters.put(txn, token.group, token.queue, letters, offsets, self._clock)

    def letters(self, token: LockToken, spans: Sequence[OffsetRange]) -> set[int]:
        with self._store.read() as txn:
            return dead_letters.known(txn, token.group, token.queue, spans)

    def record_progress(self, token: LockToken, progress: Progress, listener: str) -> None:
        with self._store.write() as txn:
            require_current(txn, token, f"its progress up to {progress.offset} was recorded")
            txn.put(ProgressRow(token.group, *schema.key_of(token.queue), *progress, listener))

    def progress(self, token: LockToken, listener: str) -> Progress:
        with self._store.read() as txn:
            row = txn.get(PROGRESS, token.group, *schema.key_of(token.queue))
        return Progress(row.next_offset, row.lot_offset) if row is not None and row.listener == listener else Progress()

    def park(self, token: LockToken, parkings: Sequence[Parking]) -> list[bool]:
        with self._store.write() as txn:
            require_current(txn, token, f"{len(parkings)} of its messages were parked")
            settled = {
                queue: offset_at(txn, token.group, queue) or 0
                for queue in (token.queue, parked_queue(token.group, token.queue))
            }
            return parking_lots.put(txn, token.group, token.queue, parkings, settled, self._clock.wall())
