"""The Groups protocol over a cluster: members, queue locks and group offsets.

lock_rules.py has the rules for locks, offsets.py stores the numbers, and membership.py lists the members. This module keeps the
locks of this process's clients, with the times when they were last confirmed. A token of another process, such as the driver's
token in a task, is verified at the brokers.

Nothing is enforced: brokers accept commits and pulls from any client. Stale tokens are refused as far as this process can
detect them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

import pyarrow as pa

from orderedmq.broker import Groups, Progress
from orderedmq.conditions import UnavailableCondition
from orderedmq.errors import (
    GroupError,
    OrderedMQError,
    RocketMQError,
    RocketMQUnavailableError,
    TopicError,
    not_an_offset,
)
from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.ownership.lock import HOLDER_TRUST, LOCK_LIFE, RENEW_INTERVAL, ClientIdentity, LockToken, Refusal
from orderedmq.ownership.membership import Member, Subscription
from orderedmq.parking import Parking, queue_token
from orderedmq.rocketmq.group import lock_rules
from orderedmq.rocketmq.group.dead_letters import DeadLetterTopic
from orderedmq.rocketmq.group.lock_rules import lock_name
from orderedmq.rocketmq.group.locks import Commits, HeldLock, HeldLocks, by_broker, by_group
from orderedmq.rocketmq.group.membership import Directory, MemberClient
from orderedmq.rocketmq.group.offsets import GROUP_TIMEOUT, GroupOffsets
from orderedmq.rocketmq.group.parking_lots import ParkingLots
from orderedmq.rocketmq.group.roster import Roster
from orderedmq.rocketmq.messages.log import RocketMQLog
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.deadline import LEAST_TIMEOUT, Deadline
from orderedmq.rocketmq.net.fan_out import lock_queues, unlock_queues

#: Seconds for a lock request. A lock is trusted from when its request is sent, so a slower grant could hardly be used.
_LOCK_TIMEOUT: Final = 15.0
#: Seconds for renewing locks at all brokers. This time, RENEW_INTERVAL and the next heartbeat together take less than HOLDER_TRUST.
_RENEW_TIMEOUT: Final = 3.0
#: Seconds for giving queues back when a client leaves. A lock whose broker cannot be reached expires by itself.
_UNLOCK_TIMEOUT: Final = 3.0
#: Seconds for which `stale` reuses a fence, because a query calls `stale` between any two batches. Tasks and commits always read the
#: fence.
FENCE_AGE: Final = 1.0
#: Seconds between checks whether a client is a member again.
_MEMBER_POLL: Final = 0.5


class RocketMQGroups(Groups):
    """The Groups protocol. Thread-safe."""

    def __init__(self, client: Client, log: RocketMQLog) -> None:
        self._client = client
        self._log = log
        self._offsets = GroupOffsets(client)
        self._dead_letters = DeadLetterTopic(client, log, self._offsets)
        self._parking_lots = ParkingLots(client, log, self._offsets)
        self._directory = Directory(client)
        self._epochs = lock_rules.Epochs()
        self._roster = Roster(self._directory)
        self._member_clients = self._roster.clients
        self._own_clients: set[str] = set()  # Clients of this process, including those that have left.
        self._locks = HeldLocks()
        self._commits = Commits(self._offsets, self._locks)
        #: Seconds for which a lock is trusted without a renewal.
        self.trust = HOLDER_TRUST
        #: Seconds for which `stale` reuses a fence that it has read.
        self.fence_age = FENCE_AGE
        #: Seconds for which a task waits for its driver to be a member again.
        self.patience = RENEW_INTERVAL + 5

    @property
    def _held_locks(self) -> HeldLocks:
        """The locks of this process. Raises OptionError UNSUPPORTED in a child after a fork, because they are its parent's locks."""
        self._client.require_own()
        return self._locks

    # -- clients and members

    def join(self, owner: str) -> ClientIdentity:
        self._client.require_own()
        identity = lock_rules.new_client(owner)
        self._member_clients[identity.client_id] = MemberClient(self._client, identity, self._reported_locks)
        self._own_clients.add(identity.client_id)
        return identity

    def leave(self, client: ClientIdentity) -> None:
        """End the client's membership and give back its locks, because no other client can do that. Lingering locks stay."""
        member_client = self._member_clients.pop(client.client_id, None)
        if member_client is None:
            return
        self._unlock([lock.token for lock in self._held_locks.of_client(client.client_id)], 0.0, _UNLOCK_TIMEOUT)
        member_client.leave()

    def close(self) -> None:
        for member_client in list(self._member_clients.values()):
            self.leave(member_client.identity)

    def heartbeat(self, group: str, client: ClientIdentity, subscription: Subscription) -> list[Member]:
        """See `Groups.heartbeat`. Membership ends with the connection, or 120 s after the last heartbeat.

        The first heartbeat waits for brokers that are away. Later ones do not wait, because the same thread renews locks. Raises
        GroupError DISAGREES or MISSING as `MemberClient.send_heartbeat` does.
        """
        lock_rules.check_name(group)
        member_client = self._member_clients.get(client.client_id)
        patience = 0.0
        # A client that has left must not rejoin through a late heartbeat.
        if member_client is not None:
            patience = GROUP_TIMEOUT if member_client.in_group(group) is None else 0.0
            self._roster.send_heartbeat(member_client, group, subscription, client.name, Deadline.after(patience))
        return self._roster.members(group, self.trust, patience)

    def cut_off(self, client: ClientIdentity) -> bool:
        member_client = self._member_clients.get(client.client_id)
        return member_client is not None and member_client.cut_off()

    def members(self, group: str) -> list[Member]:
        """See `Groups.members`. Waits for brokers that are away."""
        lock_rules.check_name(group)
        return self._roster.members(group, self.trust, GROUP_TIMEOUT)

    def _reported_locks(self, client_id: str, group: str) -> list[tuple[LockToken, float]]:
        """Return a client's locks in a group, with the wall-clock times of their confirmations. Other members read this list."""
        now, wall = time.monotonic(), time.time()
        return [
            (lock.token, round(wall - (now - lock.confirmed), 3))
            for lock in self._held_locks.of_client(client_id)
            if lock.token.group == group
        ]

    # -- locks

    def lock(
        self,
        group: str,
        client: ClientIdentity,
        queues: Sequence[MessageQueue],
        tenures: Mapping[MessageQueue, int] | None = None,
    ) -> dict[MessageQueue, LockToken | Refusal]:
        """See `Groups.lock`. Waits for brokers that are away.

        Raises RocketMQUnavailableError. After that error, the client holds only queues that it held before.
        """
        lock_rules.check_name(group)
        deadline = Deadline.after(GROUP_TIMEOUT)
        while queues:
            try:
                return self._lock(group, client, queues, tenures or {})
            except RocketMQUnavailableError:
                if time.monotonic() >= deadline:
                    raise
        return {}

    def _lock(
        self, group: str, client: ClientIdentity, queues: Sequence[MessageQueue], tenures: Mapping[MessageQueue, int]
    ) -> dict[MessageQueue, LockToken | Refusal]:
        requested = time.monotonic()
        by_name = self._brokers_of(queues)
        brokers = list(by_name.values())
        ids = self._roster.ids(group, brokers, self.trust)
        only_run = lock_rules.is_only_run(client.client_id, [*ids, *self._held_locks.clients(group)])
        tokens = [lock.token for queue in queues if (lock := self._held_locks.get(group, queue, client.client_id)) is not None]
        lost = self._confirm(tokens, requested + _LOCK_TIMEOUT)
        out: dict[MessageQueue, LockToken | Refusal] = {token.queue: token for token in tokens if token not in lost}
        unlocked = [queue for queue in queues if queue not in out]
        left_out = self._left_out(group, unlocked, client.client_id, ids, brokers)
        names = {queue: lock_name(client.client_id, only_run=only_run) for queue in unlocked if queue not in left_out}
        requested = time.monotonic()
        try:
            granted = lock_queues(self._client, group, names, _LOCK_TIMEOUT)
            # Not before, because the nameserver may hear of a broker just before it grants its locks.
            if (member_client := self._member_clients.get(client.client_id)) is not None:
                member_client.send_heartbeat_to_new(group, self._brokers_of(sorted(granted)))
            new = {queue: name != client.client_id for queue, name in names.items() if queue in granted}
            out.update(self._grant(group, client, new, tenures, requested))
        except OrderedMQError:
            # Give back all new locks, because one broker may have granted some although another broker could not be reached.
            unlock_queues(self._client, group, names, _UNLOCK_TIMEOUT)
            raise
        missing = [queue for queue in queues if queue not in out]
        for queue in missing:
            out[queue] = self._refusal(group, queue, client.client_id, ids, brokers, unsure=queue in left_out)
        return {queue: out[queue] for queue in queues}

    def _left_out(
        self, group: str, queues: Sequence[MessageQueue], mine: str, ids: Sequence[str], brokers: Sequence[str]
    ) -> set[MessageQueue]:
        """Return which of ``queues`` others may hold under locks that a restarted broker has forgotten and would grant again."""
        if not queues or not self._roster.may_lack_members(group, mine, self.trust):
            return set()
        fences = self._offsets.known_fences(group, queues)
        owned = {queue for queue, fence in fences.items() if lock_rules.is_owned_by_other(fence, mine)}
        return owned | self._roster.forgotten_locks(group, queues, mine, ids, brokers, self.trust)

    def _grant(
        self,
        group: str,
        client: ClientIdentity,
        queues: Mapping[MessageQueue, bool],
        tenures: Mapping[MessageQueue, int],
        requested: float,
    ) -> dict[MessageQueue, LockToken]:
        """Return new tokens, and make all older ones stale. ``queues``: for each queue, whether its lock has the query's name."""
        fences, resets = self._offsets.known_fences(group, list(queues)), self._offsets.resets(group, list(queues))
        epochs = {queue: self._epochs.next(max(fences[queue], resets[queue]), client.client_id) for queue in queues}
        last = self._offsets.tenures(group, [queue for queue in queues if tenures.get(queue, 0) > resets[queue]])
        began = {queue: last[queue] if queue in last and last[queue] == tenures[queue] else epochs[queue] for queue in queues}
        # Another owner's tenure ends before this one's token can be used.
        self._offsets.set_tenures(group, {queue: epoch for queue, epoch in began.items() if epoch == epochs[queue]})
        self._offsets.fence(group, {queue: lock_rules.fence_of(epoch) for queue, epoch in epochs.items()})
        tokens = {
            queue: LockToken(
                group, queue, client.owner, client.client_id, epochs[queue], began[queue], queues[queue], resets[queue]
            )
            for queue in queues
        }
        for token in tokens.values():
            self._held_locks.put(HeldLock(token, requested))
        return tokens

    def _refusal(
        self, group: str, queue: MessageQueue, mine: str, ids: Sequence[str], brokers: Sequence[str], *, unsure: bool
    ) -> Refusal:
        """Return the refusal for a queue. The broker does not name the holder, so search this process's locks and ask the members."""
        for lock in self._held_locks.of_queue(group, queue):
            if lock.token.client_id == mine:
                continue
            remaining = max(0.0, LOCK_LIFE - (time.monotonic() - lock.confirmed))
            return Refusal(queue, lock.token.owner, lock.token.client_id, None, False, remaining)
        others = [client_id for client_id in ids if client_id != mine]
        holder = self._directory.holder(group, queue, others, brokers)
        if holder is not None:
            member, held_queue = holder
            remaining = min(LOCK_LIFE, max(0.0, LOCK_LIFE - (time.time() - held_queue.renewed)))
            return Refusal(queue, member.owner, member.client_id, True, False, remaining)
        return Refusal(queue, "", ", ".join(others[:5]), None, False, LOCK_LIFE, unsure)

    def renew(self, tokens: Sequence[LockToken]) -> list[LockToken]:
        """See `Groups.renew`. Also stores offsets and fences again if a broker has forgotten them.

        A lock that is no longer trusted is renewed too, if it provably had no other owner. Raises RocketMQUnavailableError if a broker
        could not be reached and no lock is known to be lost.
        """
        return self._confirm(tokens, time.monotonic() + _RENEW_TIMEOUT)

    def _confirm(self, tokens: Sequence[LockToken], deadline: float) -> list[LockToken]:
        locks = {token: lock for token in tokens if (lock := self._held_locks.own(token)) is not None}
        gone = {token for token in tokens if token not in locks}
        failed: OrderedMQError | None = None
        for of_broker in by_broker(locks):
            # Unreachable brokers share one time limit, so that locks at other brokers are renewed while they are still trusted.
            seconds = max(LEAST_TIMEOUT, deadline - time.monotonic())
            try:
                with self._held_locks.requests[of_broker[0].queue.broker_name]:
                    gone.update(self._confirm_at_broker(of_broker, seconds))
            except RocketMQUnavailableError as error:
                failed = error
        for token in gone:
            self._held_locks.forget(token)
        if failed is not None and not gone:
            raise failed
        return [token for token in tokens if token in gone]

    def _confirm_at_broker(self, tokens: Sequence[LockToken], seconds: float) -> set[LockToken]:
        """Renew locks of one group at one broker. Return the tokens that are lost or were given back."""
        group = tokens[0].group
        locks = [lock for token in tokens if (lock := self._held_locks.own(token)) is not None]
        # Read the fences first, because a lock request would take back a queue that was taken from this client.
        fences = self._offsets.fences(group, [lock.token.queue for lock in locks], seconds)
        current = [lock for lock in locks if fences[lock.token.queue] < lock.token.epoch]
        requested = time.monotonic()
        doubtful = [lock for lock in current if not lock.trusted(requested, self.trust)]
        granted = lock_queues(self._client, group, {lock.token.queue: lock.name for lock in current}, seconds)
        doubtful = [lock for lock in doubtful if lock.token.queue in granted]
        # Another query may have had a doubtful lock in between. If it gave the queue back after the fences were read, they show it now.
        fenced = set(self._fenced([lock.token for lock in doubtful], seconds))
        current = [lock for lock in current if lock.token.queue in granted and lock.token not in fenced]
        for lock in current:
            lock.confirmed = requested
        forgotten = [lock.token for lock in current if fences[lock.token.queue] < lock_rules.fence_of(lock.token.epoch)]
        self._offsets.set_tenures(group, {token.queue: token.tenure for token in forgotten}, seconds)
        self._offsets.fence(group, {token.queue: lock_rules.fence_of(token.epoch) for token in forgotten}, seconds)
        moved = self._commits.repeat(current, seconds, doubtful)
        self._give_back([lock for lock in current if lock.token in moved])
        return set(tokens).difference(lock.token for lock in current).union(moved)

    def check(self, token: LockToken) -> bool:
        """See `Groups.check`. Outside of the client's process, this also renews the lock: brokers have no request that only checks it."""
        return not self._stale([token])

    def stale(self, tokens: Sequence[LockToken]) -> list[LockToken]:
        """See `Groups.stale`. A lock that was lost within the last second may not be noticed yet."""
        return self._stale(tokens, self.fence_age)

    def _stale(self, tokens: Sequence[LockToken], fence_age: float = 0.0) -> list[LockToken]:
        """Return the stale tokens. The token of a parking lot is stale if its queue's token is stale."""
        guards = {token: queue_token(token) for token in tokens}
        gone = self._stale_locks(list(dict.fromkeys(guards.values())), fence_age)
        return [token for token in tokens if guards[token] in gone]

    def _stale_locks(self, tokens: Sequence[LockToken], fence_age: float) -> set[LockToken]:
        now = time.monotonic()
        own = {token: lock for token in tokens if (lock := self._held_locks.own(token)) is not None}
        # All locks of this process's clients are known here, so a lock that is not known is lost.
        gone = {token for token in tokens if token not in own and token.client_id in self._own_clients}
        foreign = [token for token in tokens if token not in own and token not in gone]
        gone.update(self._lost_by_delay([token for token, lock in own.items() if not lock.trusted(now, self.trust)]))
        doubtful = [token for token in tokens if token not in gone and self._held_locks.must_read_fence(token, now, fence_age)]
        fenced = self._fenced(doubtful)
        self._held_locks.record_fences_read(doubtful, fenced, now)
        gone.update(fenced)
        # Ask for locks only if the client is still a member, because a lock request would also lock a queue that was given back. The
        # time limit begins here, because reading the fences may have waited for a broker that was away.
        deadline = Deadline.after(self.patience)
        of_members = [token for token in foreign if token not in gone and self._is_member(token, deadline)]
        granted = {token for token in of_members if self._still_granted(token)}
        gone.update(token for token in foreign if token not in granted)
        return gone

    def _lost_by_delay(self, tokens: Sequence[LockToken]) -> list[LockToken]:
        """Renew locks that were not renewed in time, because their broker or this process was paused. Return the tokens that are lost.

        Waits for brokers that are away.
        """
        deadline = Deadline.after(GROUP_TIMEOUT)
        return self._confirm(tokens, deadline) if tokens else []

    def _still_granted(self, token: LockToken) -> bool:
        names = {token.queue: lock_name(token.client_id, only_run=token.only_run)}
        return token.queue in lock_queues(self._client, token.group, names, _LOCK_TIMEOUT)

    def _is_member(self, token: LockToken, deadline: float) -> bool:
        """Return whether the token's client is a member. Wait for a client that lost its connection, because it will rejoin.

        Raises RocketMQUnavailableError if the broker stays away, because then it is unknown whether the client is a member.
        """
        while True:
            brokers = list(self._brokers_of([token.queue]).values())
            away: RocketMQUnavailableError | None = None
            try:
                if token.client_id in self._directory.ids(token.group, brokers):
                    return True
            except RocketMQUnavailableError as error:
                away = error
            if not brokers:
                why = f"the nameserver has no master for the broker of queue {token.queue}: the broker is down or starting"
                away = RocketMQUnavailableError(UnavailableCondition.NO_BROKER, why)
            if away is not None and time.monotonic() >= deadline:
                raise away
            if away is None and (time.monotonic() >= deadline or self._fenced([token])):
                return False
            time.sleep(_MEMBER_POLL)

    def _fenced(self, tokens: Sequence[LockToken], seconds: float = GROUP_TIMEOUT) -> list[LockToken]:
        """Return the tokens whose fence is too high, because the queue was granted again, given back, or changed by an administrator."""
        out = []
        for group in {token.group for token in tokens}:
            of_group = [token for token in tokens if token.group == group]
            fences = self._offsets.fences(group, [token.queue for token in of_group], seconds)
            out += [token for token in of_group if fences[token.queue] >= token.epoch]
        return out

    def unlock(self, tokens: Sequence[LockToken], linger: float = 0.0) -> None:
        """See `Groups.unlock`. A lingering lock expires like any lock that is not renewed, as with RocketMQ's unlockDelay.

        Waits for brokers that are away, because a broker that was killed may have forgotten the offsets at which the next owner begins.
        """
        self._unlock(tokens, linger, GROUP_TIMEOUT)

    def _unlock(self, tokens: Sequence[LockToken], linger: float, seconds: float) -> None:
        for of_broker in by_broker(tokens):
            with self._held_locks.requests[of_broker[0].queue.broker_name]:
                locks = [lock for token in of_broker if (lock := self._held_locks.own(token)) is not None]
                self._give_back(locks, linger, seconds)

    def _give_back(self, locks: Sequence[HeldLock], linger: float = 0.0, seconds: float = _UNLOCK_TIMEOUT) -> None:
        """Forget locks of one group at one broker and, unless they linger, unlock their queues."""
        for lock in locks:
            self._held_locks.forget(lock.token)
        if not locks:
            return
        group = locks[0].token.group
        # A lock that cannot be checked or given back now, or whose topic was deleted, expires by itself.
        with contextlib.suppress(RocketMQUnavailableError, TopicError):
            fenced = self._fenced([lock.token for lock in locks], seconds)
            own = [lock for lock in locks if lock.token not in fenced]
            self._commits.repeat(own, seconds, wait=seconds)
            if linger > 0:
                self._offsets.fence(group, {lock.token.queue: lock_rules.lingering(lock.token.epoch) for lock in own}, seconds)
                return
            # A fenced lock under the query's name may now belong to a later run.
            own += [lock for lock in locks if lock.token in fenced and lock.name == lock.token.client_id]
            # Raise the fences first, so that a task that checks its lock now does not take it again. A deleted group needs no fence.
            with contextlib.suppress(GroupError):
                self._offsets.raise_fences(group, {lock.token.queue: lock.token.epoch for lock in own}, seconds)
            unlock_queues(self._client, group, {lock.token.queue: lock.name for lock in own}, seconds)

    def end_tenures(self, group: str, tenures: Mapping[MessageQueue, int]) -> None:
        last = self._offsets.tenures(group, list(tenures))
        self._offsets.set_tenures(group, {queue: 0 for queue, epoch in tenures.items() if last[queue] == epoch})

    # -- offsets

    def offsets(self, group: str, queues: Sequence[MessageQueue]) -> dict[MessageQueue, int]:
        return self._offsets.read(group, queues)

    def commit(self, offsets: Mapping[LockToken, int]) -> None:
        """See `Groups.commit`. This process moves offsets only forward, although brokers accept any offset."""
        self._require(offsets, "committed")
        self._commits.move(offsets)

    def pass_on(
        self,
        token: LockToken,
        rows: Mapping[MessageQueue, pa.RecordBatch],
        among: Collection[MessageQueue],
        offset: int | None,
    ) -> None:
        require_lock = self._required(token, "rows made from its messages were sent")
        self._log.append(rows, among=among, require_lock=require_lock)
        if offset is not None:
            self.commit({token: offset})

    def reset(self, offsets: Mapping[LockToken, int]) -> list[LockToken]:
        """See `Groups.reset`. The offsets are not set all or none: after an error, a query follows the group's offset in each queue."""
        self._require(offsets, "reset")
        out: dict[LockToken, LockToken] = {}
        for group, tokens in by_group(offsets).items():
            resets = self._offsets.next_epochs(group, [token.queue for token in tokens])
            self._offsets.record_resets(group, resets)
            self._commits.reset(group, {token: offsets[token] for token in tokens})
            for token in tokens:
                reset = resets[token.queue]
                epoch = self._epochs.next(reset, token.client_id)
                out[token] = replace(token, epoch=epoch, tenure=epoch, reset=reset)
            self._offsets.set_tenures(group, {token.queue: out[token].tenure for token in tokens})
            self._offsets.fence(group, {token.queue: lock_rules.fence_of(out[token].epoch) for token in tokens})
            self._held_locks.replace({token: out[token] for token in tokens})
        return [out[token] for token in offsets]

    def dead_letter(self, token: LockToken, letters: pa.RecordBatch, offsets: Sequence[int]) -> int:
        """See `Groups.dead_letter`. A repeated letter is recognised among the last dead_letters.LOOK_BACK letters."""
        require_lock = self._required(token, f"{len(offsets)} of its messages became dead letters")
        return self._dead_letters.put(token.group, token.queue, letters, offsets, require_lock)

    def letters(self, token: LockToken, spans: Sequence[OffsetRange]) -> set[int]:
        """See `Groups.letters`. Finds letters that can be read now, among the last dead_letters.LOOK_BACK at the queue's broker."""
        return self._dead_letters.known(token.group, token.queue, spans)

    def record_progress(self, token: LockToken, progress: Progress, listener: str) -> None:
        self._required(token, f"its progress up to {progress.offset} was recorded")
        self._offsets.record_progress(token.group, token.queue, progress, listener)

    def progress(self, token: LockToken, listener: str) -> Progress:
        return self._offsets.progress(token.group, token.queue, listener)

    def park(self, token: LockToken, parkings: Sequence[Parking]) -> list[bool]:
        """See `Groups.park`. This is not atomic: after an error, the first ones of ``parkings`` may be parked, and a repeated call finds them.

        The lock is checked before each request. Also raises RocketMQError NO_PERMISSION, and MessageError PROPERTIES_TOO_LARGE
        for a message whose properties leave no room for those of a parked message.
        """
        require_lock = self._required(token, f"{len(parkings)} of its messages were parked")
        return self._parking_lots.park(token.group, queue_token(token).queue, parkings, require_lock)

    def _required(self, token: LockToken, doing: str) -> Callable[[], None]:
        """Check that the token's lock is held, and return a function that checks it again. Both raise LockError LOST if it is not."""

        def require() -> None:
            if self._stale([token]):
                raise lock_rules.lost_lock(token, doing, self.trust)

        require()
        return require

    def _require(self, offsets: Mapping[LockToken, int], doing: str) -> None:
        """Check tokens and offsets. Raises LockError LOST if a token is stale, and OffsetError INVALID if an offset is negative."""
        for token, offset in offsets.items():
            if offset < 0:
                raise not_an_offset(offset, token.queue, token.group)
        for token in self._stale(list(offsets)):
            raise lock_rules.lost_lock(token, f"its offset {offsets[token]} was {doing}", self.trust)

    def _brokers_of(self, queues: Sequence[MessageQueue]) -> dict[str, str]:
        """Return the addresses of the queues' brokers by broker name, without those that cannot be found."""
        deadline = Deadline.after(_LOCK_TIMEOUT)
        found = {}
        for topic, name in sorted({(queue.topic, queue.broker_name) for queue in queues}, key=lambda pair: pair[1]):
            # After a broker was not found, the route is requested again.
            for _ in range(2):
                with contextlib.suppress(RocketMQError):
                    found[name] = self._client.address(topic, name, deadline)
                    break
        return found
