"""What one streaming query does in its consumer group: be a member, take queue locks, keep them, notice when one is lost.

A query without a group (messageModel=broadcasting) has a session, too: every queue is its own, and nothing is kept for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol

from ordered_source.renewal import Renewal
from orderedmq.broker import Broker
from orderedmq.core import membership
from orderedmq.core.filters import ALL
from orderedmq.core.lock import RENEW_INTERVAL, UNLOCK_DELAY, LockToken, Refusal
from orderedmq.core.membership import Member, Subscription
from orderedmq.core.offsets import Checkpoint, offsets_to_json
from orderedmq.core.ownership import Commit, Lock, Members, Owner, Policy, Unlock, divided
from orderedmq.errors import GroupError, LockError
from orderedmq.model import MessageQueue
from orderedmq.options.source import SourceOptions

log = logging.getLogger("orderedmq")

#: Seconds between two tries for a lock that another owner has, and between two looks at the members of an idle group.
RETRY: Final = 0.1


class Session(Protocol):
    """What the stream reader asks of a query's group, or of nobody."""

    #: Whether the queues are divided among several queries.
    shared: bool

    def owner(self, owner_id: str) -> Owner:
        """The Owner that decides for this query."""

    def due(self) -> bool:
        """Whether to look at the members again though nothing in the broker changed."""

    def raise_if_lost(self) -> None:
        """Raises LockError LOST if a queue that this query counts on has another owner."""

    def boundary(self, owner: Owner, start: Checkpoint, queues: Sequence[MessageQueue], *, patient: bool) -> None:
        """Run what the Owner decides between two micro-batches. ``patient``: wait up to lockTimeout for every queue, as availableNow does."""

    def take(self, owner: Owner, action: Lock, *, patient: bool) -> None:
        """Lock the queues of ``action``. Raises LockError HELD_BY_OTHER for one that the query cannot do without."""

    def offsets(self, queues: Sequence[MessageQueue]) -> dict[MessageQueue, int]:
        """The group's offsets of these queues, of those that have one."""

    def reset_number(self) -> int:
        """How often the group's offsets were reset."""

    def known(
        self,
        owner: Owner,
        start: Checkpoint,
        queues: Sequence[MessageQueue],
        begins: Mapping[MessageQueue, int],
        made_anew: Collection[str],
    ) -> tuple[dict[MessageQueue, int], int]:
        """The group's offsets of ``queues`` and its reset number, after the resets that this query has to do first.

        ``begins``: where each queue that exists begins if the group has no offset of it. ``made_anew``: topics whose former offsets
        mean nothing any more.
        """

    def stop(self, owner: Owner, *, terminated: bool) -> None:
        """Give everything back and leave. ``terminated``: a task may still be at work on what is in flight."""


def session(broker: Broker, options: SourceOptions, owner_id: str) -> Session:
    """The session of the query ``owner_id``, which is a member of its group then. Raises GroupError, LockError."""
    return NoGroup() if options.consumer_group is None else GroupSession(broker, options, owner_id)


class NoGroup:
    """The session of a query that has no group: it owns every queue without a lock, and only its checkpoint has offsets."""

    shared = False

    def owner(self, owner_id: str) -> Owner:
        return Owner(owner_id)

    def due(self) -> bool:
        return False

    def raise_if_lost(self) -> None:
        return

    def boundary(self, owner: Owner, start: Checkpoint, queues: Sequence[MessageQueue], *, patient: bool) -> None:
        for action in owner.boundary(start, queues):
            if isinstance(action, Lock):
                self.take(owner, action, patient=patient)

    def take(self, owner: Owner, action: Lock, *, patient: bool) -> None:
        del patient
        owner.assume(action.queues)

    def offsets(self, queues: Sequence[MessageQueue]) -> dict[MessageQueue, int]:
        del queues
        return {}

    def reset_number(self) -> int:
        return 0

    def known(
        self,
        owner: Owner,
        start: Checkpoint,
        queues: Sequence[MessageQueue],
        begins: Mapping[MessageQueue, int],
        made_anew: Collection[str],
    ) -> tuple[dict[MessageQueue, int], int]:
        del owner, start, queues, begins, made_anew
        return {}, 0

    def stop(self, owner: Owner, *, terminated: bool) -> None:
        del owner, terminated


class GroupSession:
    """The query ``owner_id`` as a consumer of its group, from its first call to its stop."""

    def __init__(self, broker: Broker, options: SourceOptions, owner_id: str) -> None:
        assert options.consumer_group is not None
        self.group = options.consumer_group
        self.shared = options.assignment == "shared"
        self._groups = broker.groups
        self._lineage = broker.capabilities.fenced
        self._options = options
        self._subscription = Subscription(
            options.assignment,
            options.topic_pattern or ",".join(sorted(options.topics)),
            options.allocation.name() if self.shared else None,
            *((ALL, "TAG") if options.matching is None else (options.matching.expression, options.matching.kind)),
        )
        self._client = replace(self._groups.join(owner_id), name=options.query_name)
        self._renewal = Renewal(self._groups, self._beat, RENEW_INTERVAL, lambda: self._groups.cut_off(self._client))
        self._looked = float("-inf")
        try:
            self._join()
        except BaseException:
            self._groups.leave(self._client)
            raise
        self._renewal.start()

    def owner(self, owner_id: str) -> Owner:
        """The Owner that decides for this query."""
        if not self.shared:
            return Owner(owner_id, lineage=self._lineage)
        strategy = divided(self._options.allocation, self._client.client_id)
        return Owner(owner_id, strategy=strategy, policy=Policy.HAND_OVER, lineage=self._lineage)

    # -- members -----------------------------------------------------------------------------------------------------------

    def _beat(self) -> list[Member]:
        return self._groups.heartbeat(self.group, self._client, self._subscription, self._options.allocation.room)

    def _join(self) -> None:
        """Raises GroupError DISAGREES when a member with another subscription does not leave within lockTimeout; IN_USE for another run."""
        deadline = time.monotonic() + self._options.lock_timeout
        waiting = False
        while True:
            try:
                if self.shared and self._lineage:
                    # Before the first heartbeat: nobody is to divide the queues with a member that does not stay.
                    membership.refuse_second_run(self.group, self._client, self._groups.members(self.group))
                membership.refuse(self.group, self._client, self._beat())
            except GroupError as error:
                if time.monotonic() >= deadline:
                    raise
                if not waiting:
                    log.warning("waiting up to %.0f s: %s", self._options.lock_timeout, error.message)
                    waiting = True
                time.sleep(RETRY)
            else:
                return

    def due(self) -> bool:
        """Whether to look at the members again though nothing in the broker changed: a death and a pause change nothing there."""
        return self.shared and time.monotonic() - self._looked >= RETRY

    def members(self) -> Members:
        """Those with whom the queues are shared, this query included."""
        self._looked = time.monotonic()
        if not self.shared:
            return {}
        found = self._groups.members(self.group)
        if all(member.client_id != self._client.client_id for member in found):
            # This process was paused for longer than a member lives.
            found = self._beat()
        return {member.client_id: member.room for member in found if member.subscription == self._subscription}

    # -- locks -------------------------------------------------------------------------------------------------------------

    def boundary(self, owner: Owner, start: Checkpoint, queues: Sequence[MessageQueue], *, patient: bool) -> None:
        self.forget_lost(owner)
        for action in owner.boundary(start, queues, self.members()):
            match action:
                case Commit():
                    self.commit(owner, action)
                case Unlock():
                    self.give_up(owner, action)
                case Lock():
                    self.take(owner, action, patient=patient)

    def take(self, owner: Owner, action: Lock, *, patient: bool) -> None:
        """Lock what is missing: at once, or within lockTimeout what the query cannot do without, or everything if it is ``patient``.

        Raises LockError HELD_BY_OTHER for a queue that the query cannot do without.
        """
        deadline = time.monotonic() + self._options.lock_timeout
        wanted: Sequence[MessageQueue] = action.queues
        while True:
            answers = self._groups.lock(self.group, self._client, wanted)
            refused = [answer for answer in answers.values() if isinstance(answer, Refusal)]
            granted = [answer for answer in answers.values() if isinstance(answer, LockToken)]
            if refused and action.all_or_none:
                self._groups.unlock(granted)
            else:
                owner.locked(granted)
                wanted = [refusal.queue for refusal in refused]
            self._renewal.keep(owner.tokens())
            missed = owner.indispensable(action, refused)
            if not refused or not (missed or patient):
                break
            if time.monotonic() >= deadline:
                if missed:
                    raise held(self.group, missed, len(action.queues), owner.owner_id)
                break
            time.sleep(RETRY)
        if patient and not owner.owned:
            log.warning(
                "all %d queues that this query should have in group %s are held by others (%s): there is nothing to read for it, it ends",
                len(action.queues), self.group, "; ".join(sorted({refusal.holder for refusal in refused})),
            )  # fmt: skip

    def give_up(self, owner: Owner, action: Unlock) -> None:
        self._renewal.keep(owner.tokens())
        self._groups.unlock(action.idle)

    def commit(self, owner: Owner, action: Commit) -> None:
        """Move the group's offsets. Raises LockError LOST in an exclusive group; in a shared one lost queues are forgotten."""
        offsets: Mapping[LockToken, int] = action.offsets
        while offsets:
            try:
                self._groups.commit(offsets)
            except LockError:
                gone = self._groups.stale(list(offsets))
                if not self.shared or not gone:
                    raise
                self._forget(owner, gone)
                offsets = {token: offset for token, offset in offsets.items() if token not in gone}
            else:
                return

    def forget_lost(self, owner: Owner) -> None:
        """Before a boundary. Exclusive: raises LockError LOST if a renewal failed. Shared: queues that are lost are forgotten."""
        if not self.shared:
            self.raise_if_lost()
            return
        gone = self._groups.stale(owner.tokens())
        if gone:
            self._forget(owner, gone)
            self._renewal.keep(owner.tokens())

    def _forget(self, owner: Owner, gone: Sequence[LockToken]) -> None:
        queues = owner.lost(gone)
        if queues:
            log.warning(
                "group %s lost %s: this query was paused or cut off for longer than its locks live, or they were taken from it; who has "
                "them now goes on at the group's offset",
                self.group, ", ".join(map(str, queues)),
            )  # fmt: skip

    def raise_if_lost(self) -> None:
        """Raises LockError LOST if a renewal found a queue lost that this query still counts on."""
        if self._renewal.lost:
            token = self._renewal.lost[0]
            raise LockError(
                "LOST",
                f"group {token.group!r} lost queue {token.queue} (epoch {token.epoch}): this query was paused or cut off for longer than "
                "its lock lives and another took it over, or the group was reset; restart it, it goes on without a gap",
            )

    # -- offsets -----------------------------------------------------------------------------------------------------------

    def offsets(self, queues: Sequence[MessageQueue]) -> dict[MessageQueue, int]:
        return self._groups.offsets(self.group, queues)

    def reset_number(self) -> int:
        return self._groups.reset_number(self.group)

    def known(
        self,
        owner: Owner,
        start: Checkpoint,
        queues: Sequence[MessageQueue],
        begins: Mapping[MessageQueue, int],
        made_anew: Collection[str],
    ) -> tuple[dict[MessageQueue, int], int]:
        known, reset = self.offsets(queues), self.reset_number()
        stale = {_token(owner, queue): begins[queue] for queue in known if queue.topic in made_anew}
        if stale and reset == start.reset and not self._lineage and not self.shared:
            # RocketMQ 4 keeps a group's offsets of topics that were deleted.
            reset = self._groups.reset(stale)
            known.update((token.queue, begin) for token, begin in stale.items())
        starting = self._options.starting
        if start.fresh and starting.explicit and starting.kind != "committed" and not self.shared:
            log.warning("group %s is reset to %s, as the options say", self.group, offsets_to_json(begins))
            reset = self._groups.reset({_token(owner, queue): begins[queue] for queue in queues})
            known = dict(begins)
        return known, reset

    # -- the end -----------------------------------------------------------------------------------------------------------

    def stop(self, owner: Owner, *, terminated: bool) -> None:
        """Give everything back and leave. ``terminated``: Spark goes on and a task may still be at work on what is in flight."""
        self._renewal.stop()
        release = owner.stop(self._groups.offsets(self.group, list(owner.owned)))
        self._groups.unlock(release.idle)
        if terminated and release.in_flight:
            # When the driver died instead, its tasks die too, and this process's end frees all.
            self._groups.unlock(release.in_flight, linger=UNLOCK_DELAY)
        self._groups.leave(self._client)


def _token(owner: Owner, queue: MessageQueue) -> LockToken:
    token = owner.owned[queue].token
    assert token is not None
    return token


def held(group: str, refused: Sequence[Refusal], wanted: int, owner_id: str) -> LockError:
    """The error of the query ``owner_id``, which needs all ``wanted`` queues and was refused these."""
    first = refused[0]
    if first.owner == owner_id:
        return LockError(
            "HELD_BY_OTHER",
            f"{len(refused)} of {wanted} queues of group {group!r} are held by another run of this same query ({first.client_id}), which "
            f"{'is alive' if first.alive else 'may be alive'}: it is paused or slow to end, or the query was started twice on one "
            f"checkpointLocation. End that process, or start this query again when its lock of {first.queue} has ended (in "
            f"{first.remaining:.0f} s unless it is renewed); nothing is lost meanwhile",
        )
    if not first.owner:
        return LockError(
            "HELD_BY_OTHER",
            f"{len(refused)} of {wanted} queues of group {group!r} are held by {first.holder}; its lock of {first.queue} ends within "
            f"{first.remaining:.0f} s unless it is renewed. Start this query again then, or give it a consumerGroup of its own or "
            "messageModel=broadcasting to read everything too, or let members share the queues with assignment=shared",
        )
    if first.lingering:
        state = "has stopped in the middle of a batch, its tasks may still be at work"
    else:
        state = "is alive" if first.alive else "is not known to be alive"
    return LockError(
        "HELD_BY_OTHER",
        f"{len(refused)} of {wanted} queues of group {group!r} belong to {first.holder}, which {state}; its lock "
        f"of {first.queue} ends in {first.remaining:.0f} s unless it is renewed. Stop that query, or give this one a consumerGroup of its "
        "own or messageModel=broadcasting to read everything too, or let both share the queues with assignment=shared; for two outputs of "
        "one stream use foreachBatch; where one query reads the group twice (a join or union of two loads), load once and use that "
        "DataFrame twice, or give each load a consumerGroup of its own",
    )
