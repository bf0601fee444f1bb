"""A streaming query's part in its consumer group: membership, queue locks and their renewal, and the group's offsets.

Only this module changes the state of a query's Owner, so that a queue's tenure (`ownership.owned_queue`) can be followed here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from ordered_source.renewal import Renewal
from orderedmq.broker import Broker
from orderedmq.conditions import GroupCondition, LockCondition
from orderedmq.errors import FORMER_RUN, GroupError, LockError, RocketMQUnavailableError, TopicError, lost
from orderedmq.model import MessageQueue, OffsetRange, is_parked
from orderedmq.options.source import SourceOptions
from orderedmq.ownership import membership
from orderedmq.ownership.allocate import divided
from orderedmq.ownership.lock import RENEW_INTERVAL, UNLOCK_DELAY, ClientIdentity, LockToken, Refusal
from orderedmq.ownership.membership import Member, Subscription
from orderedmq.ownership.offsets import Checkpoint, OffsetMap, offsets_to_json, ranges
from orderedmq.ownership.owner import Commit, Lock, Owner, Policy, Unlock
from orderedmq.parking import lot_token
from orderedmq.rows.filters import ALL

logger = logging.getLogger("orderedmq")

#: Seconds between two attempts to get a lock that another owner holds, and between two checks of the members of an idle group.
LOCK_RETRY: Final = 0.1


class Session:
    """The session of a query without a group, which owns every queue without a lock, and whose offsets are only in its checkpoint.

    Other code of this package reads ``owner`` and calls the session to change it. `GroupSession` is the session of a query in a group.
    """

    #: Whether several queries divide the queues among themselves.
    shared = False

    def __init__(self, broker: Broker, options: SourceOptions, owner_id: str) -> None:
        self._groups = broker.groups
        self._lineage = broker.capabilities.fenced
        self._options = options
        #: Parking lots without a position that are newer than the checkpoint. Messages that are parked in the meantime may reach its offset.
        self._new_lots: set[MessageQueue] = set()
        self.owner = self._new_owner(owner_id)

    def _new_owner(self, owner_id: str) -> Owner:
        return Owner(owner_id)

    def members_due(self) -> bool:
        """Whether to check the members again although nothing changed at the broker."""
        return False

    def raise_if_lost(self) -> None:
        """Raise LockError LOST if a renewal lost the lock of a queue that this query still owns."""

    # -- locks

    def boundary(self, start: Checkpoint, queues: Sequence[MessageQueue], *, patient: bool) -> None:
        """Carry out the Owner's actions between micro-batches, when nothing is in flight.

        ``patient`` (set for availableNow): wait up to lockTimeout for queues that others hold. After that, a query of a shared group
        requests no further queues at later boundaries.
        """
        for action in self.owner.boundary(start, queues):
            if isinstance(action, Lock):
                self._take(action, patient=patient)

    def _take(self, action: Lock, *, patient: bool) -> None:
        """Lock the queues of ``action``. Raises LockError HELD_BY_OTHER for a queue that the query needs."""
        del patient
        self.owner.assume(action.queues)

    def take_former(self, start: Checkpoint, queues: Iterable[MessageQueue]) -> None:
        """Lock queues of ``start`` that this query no longer reads, so that `place` commits what it has processed.

        Queues of other queries are left out. Raises LockError HELD_BY_OTHER for a queue that a former run of this query holds.
        """
        missing = tuple(sorted(set(queues) - self.owner.owned.keys()))
        if missing:
            self._take(Lock(missing, all_or_none=False, repeating=True, tenures=start.gen), patient=False)

    def unlock_topics(self, topics: Collection[str]) -> None:
        """Give back the queues of topics that this query no longer reads. Nothing of them is in flight."""
        self._unlock(self.owner.release({queue for queue in self.owner.owned if queue.topic not in topics}))

    def _unlock(self, tokens: Sequence[LockToken]) -> None:
        """Unlock queues that the Owner has released."""

    # -- positions

    def offsets(self, queues: Sequence[MessageQueue]) -> dict[MessageQueue, int]:
        """Return the group's offsets of these queues. Queues without an offset are left out."""
        del queues
        return {}

    def place(
        self, start: Checkpoint, begins: Mapping[MessageQueue, int], ends: OffsetMap, recreated_topics: Collection[str]
    ) -> None:
        """Decide where to start reading each queue that has no position yet (see `Owner.enter`), and carry out the resets due at the start.

        ``begins``: where to start in each of these queues if the group has no offset for it. ``ends``: where each of them ends; the group's
        offset is not moved beyond that. ``recreated_topics``: topics whose former offsets are invalid.
        """
        del recreated_topics
        self.owner.enter(start, {}, begins, self._former(start, start.next, ends))
        self._warn_of_another_group(start, begins)

    def _former(self, logged: Checkpoint, own: OffsetMap, ends: OffsetMap) -> dict[MessageQueue, int]:
        """Return the offsets of the checkpoint's group in the owned queues whose tenure is broken there, if it is another group.

        Otherwise return 0 for each parking lot whose offset in the checkpoint is above its end: the former lot was deleted with its group or
        topic, and this is a new one.

        ``own``: see `Owner.unbroken`. ``ends``: where the parking lots end. The queues are locked in the former group for a moment, which
        fences off a former run of this query. Raises LockError HELD_BY_OTHER if a former run keeps a queue for lockTimeout.
        """
        group = logged.group
        if group is None or not logged.of_another_group(self.owner.group):
            self._new_lots |= {queue for queue in own if is_parked(queue) and logged.next[queue] > ends.get(queue, 0)}
            return dict.fromkeys(self._new_lots, 0)
        mine = [queue for queue in own if queue in self.owner.owned and not is_parked(queue)]
        # A lock would make a group that was deleted.
        queues = list(self._groups.offsets(group, mine))
        if not queues:
            return {}
        client = self._groups.join(self.owner.owner_id)
        try:
            policy = Policy.HAND_OVER if self._options.assignment == "shared" else Policy.REFUSE
            former = Owner(client.owner, group=group, policy=policy, lineage=self._lineage)
            former.locked(self._lock_formerly(client, logged, queues))
            offsets = self._groups.offsets(group, queues)
            self._groups.unlock(former.tokens())
        finally:
            self._groups.leave(client)
        locked = former.owned
        return {
            queue: at
            for queue, at in offsets.items()
            if queue not in locked or not former.unbroken(locked[queue], logged, at, own[queue])
        }

    def _lock_formerly(self, client: ClientIdentity, logged: Checkpoint, queues: Sequence[MessageQueue]) -> list[LockToken]:
        """Lock queues in the checkpoint's group, except those of other queries."""
        assert logged.group is not None
        deadline = time.monotonic() + self._options.lock_timeout
        while True:
            answers = self._groups.lock(logged.group, client, queues, logged.gen)
            mine = [answer for answer in answers.values() if isinstance(answer, Refusal) and answer.owner == client.owner]
            if not mine:
                return [answer for answer in answers.values() if isinstance(answer, LockToken)]
            if time.monotonic() >= deadline:
                raise held_by_other_error(logged.group, mine, len(queues), client.owner)
            time.sleep(LOCK_RETRY)

    def _warn_of_another_group(self, logged: Checkpoint, placed: Collection[MessageQueue]) -> None:
        """Warn if ``logged`` is the checkpoint of another group. ``placed``: the queues whose positions were decided with it."""
        at = {queue: position for queue, position in self.owner.following({}).items() if queue in placed}
        if at and logged.of_another_group(self.owner.group):
            logger.warning("%s", another_group(logged.group, self.owner.group, at))

    def skip(self, queue: MessageQueue, offset: int) -> None:
        """Continue at ``offset``, because the messages before it are lost and the user accepts that."""
        self.owner.skip(queue, offset)

    def drop(self, queues: Iterable[MessageQueue]) -> None:
        """Forget queues that no longer exist, and their parking lots."""
        self.owner.drop(queues)

    # -- micro-batches

    def backlog(self, ends: OffsetMap) -> dict[MessageQueue, OffsetRange]:
        """Return the part of each queue in ``ends`` that is not planned yet."""
        return self.owner.backlog(ends)

    def plan(self, counts: Mapping[MessageQueue, int], topics: Mapping[str, str]) -> Checkpoint:
        """Plan the next batch and return the offset that Spark logs for it.

        ``counts``: how many messages of each queue to take. ``topics``: the anchor of each topic.
        """
        return self.owner.plan(counts, topics)

    def repeat(self, start: Checkpoint, end: Checkpoint, missing: Sequence[MessageQueue], lot_ends: OffsetMap) -> None:
        """Lock the queues of a logged batch that this query does not own (``missing``), and plan the ranges that it must repeat.

        ``lot_ends``: where the parking lots of the batch end, without those that do not exist. Raises LockError HELD_BY_OTHER.
        """
        if missing:
            # The members of another group do not begin where this query's batch began, so no part of the batch can be left to them.
            all_or_none = not self.shared or end.of_another_group(self.owner.group)
            self._take(Lock(tuple(missing), all_or_none=all_or_none, repeating=True, tenures=end.gen), patient=False)
        own = {queue: max(span.begin, span.end - 1) for queue, span in ranges(start, end).items()}
        self.owner.replay(start, end, self.offsets(sorted(self.owner.owned)), self._former(end, own, lot_ends))
        self._warn_of_another_group(end, self.owner.owned)

    # -- the end

    def give_back(self, start: Checkpoint) -> None:
        """Commit the messages below ``start``, then `stop`. Called at a boundary after which no micro-batch follows."""
        self.owner.take_processed(start)

    def stop(self, *, terminated: bool) -> None:
        """Unlock the queues and leave the group. ``terminated``: whether a task may still process a batch in flight."""


def open_session(broker: Broker, options: SourceOptions, owner_id: str) -> Session:
    """Join the group of the query ``owner_id``, if it has one, and return the query's session. Raises GroupError, LockError."""
    return (Session if options.consumer_group is None else GroupSession)(broker, options, owner_id)


class GroupSession(Session):
    """The session of the query ``owner_id`` as a consumer of its group, from its first call to its stop."""

    def __init__(self, broker: Broker, options: SourceOptions, owner_id: str) -> None:
        assert options.consumer_group is not None
        self.group = options.consumer_group
        self.shared = options.assignment == "shared"
        self._groups = broker.groups
        self._subscription = Subscription(
            options.assignment,
            options.topic_pattern or ",".join(sorted(options.topics)),
            options.allocate_message_queue_strategy if self.shared else None,
            *((ALL, "TAG") if options.matching is None else (options.matching.expression, options.matching.kind)),
            options.parking_lot,
        )
        self._client = replace(self._groups.join(owner_id), name=options.query_name)
        self._renewal = Renewal(self._groups, self._beat, RENEW_INTERVAL, lambda: self._groups.cut_off(self._client))
        self._members_read = float("-inf")
        #: Offsets whose commit failed.
        self._uncommitted: dict[LockToken, int] = {}
        super().__init__(broker, options, owner_id)
        try:
            self._join()
        except BaseException:
            self._groups.leave(self._client)
            raise
        self._renewal.start()

    def _new_owner(self, owner_id: str) -> Owner:
        parked = lot_token if self._options.parking_lot else None
        if not self.shared:
            return Owner(owner_id, group=self.group, lineage=self._lineage, companion=parked)
        strategy = divided(self._options.allocate_message_queue_strategy, self._client.client_id)
        policy = Policy.HAND_OVER
        return Owner(owner_id, group=self.group, strategy=strategy, policy=policy, lineage=self._lineage, companion=parked)

    # -- members -----------------------------------------------------------------------------------------------------------

    def _beat(self) -> list[Member]:
        return self._groups.heartbeat(self.group, self._client, self._subscription)

    def _join(self) -> None:
        """Become a member. If other members exclude this query, or servers are away, wait up to lockTimeout.

        Raises GroupError DISAGREES if a member has another subscription, IN_USE if another run of this query is a member.
        """
        deadline = time.monotonic() + self._options.lock_timeout
        waiting = False
        while True:
            try:
                if self.shared and self._lineage:
                    # Check before the first heartbeat, so that no member divides the queues with a query that is refused.
                    membership.refuse_second_run(self.group, self._client, self._groups.members(self.group))
                membership.refuse(self.group, self._client, self._beat())
            except (GroupError, RocketMQUnavailableError) as error:
                if time.monotonic() >= deadline:
                    raise
                if not waiting:
                    logger.warning("waiting up to %.0f s: %s", self._options.lock_timeout, error.message)
                    waiting = True
                time.sleep(LOCK_RETRY)
            else:
                return

    def members_due(self) -> bool:
        # The broker does not report a change when a member dies or is paused.
        return self.shared and time.monotonic() - self._members_read >= LOCK_RETRY

    def _members(self) -> Collection[str]:
        """Return the client ids of the members that divide the queues, including this query. Return no members in an exclusive group."""
        self._members_read = time.monotonic()
        if not self.shared:
            return ()
        members = self._groups.members(self.group)
        if all(member.client_id != self._client.client_id for member in members):
            # This process was paused for longer than a membership lasts without a heartbeat.
            members = self._beat()
        return {member.client_id for member in members if member.subscription == self._subscription}

    # -- locks -------------------------------------------------------------------------------------------------------------

    def boundary(self, start: Checkpoint, queues: Sequence[MessageQueue], *, patient: bool) -> None:
        self._forget_lost()
        self._commit_what_is_left()
        for action in self.owner.boundary(start, queues, self._members()):
            match action:
                case Commit(offsets):
                    self._commit(offsets)
                case Unlock():
                    self._unlock(action.idle)
                case Lock():
                    self._take(action, patient=patient)
        if patient and self.shared:
            # Queues that others give up later are left to the next run, like messages that are written later.
            self.owner.taking = False

    def _unlock(self, tokens: Sequence[LockToken]) -> None:
        if tokens:
            self._renewal.keep(self.owner.tokens())
            self._groups.unlock(tokens)

    def _take(self, action: Lock, *, patient: bool) -> None:
        """Lock the queues of ``action``. Wait up to lockTimeout for the queues that the query needs, or for all of them if ``patient``.

        While a broker may have forgotten the holders, wait longer: otherwise a query that is started again and again would never get them.

        Raises LockError HELD_BY_OTHER for a queue that the query needs.
        """
        deadline = time.monotonic() + self._options.lock_timeout
        missing: Sequence[MessageQueue] = action.queues
        while True:
            answers = self._groups.lock(self.group, self._client, missing, action.tenures)
            refused = [answer for answer in answers.values() if isinstance(answer, Refusal)]
            granted = [answer for answer in answers.values() if isinstance(answer, LockToken)]
            if refused and action.all_or_none:
                self._groups.unlock(granted)
            else:
                self.owner.locked(granted)
                missing = [refusal.queue for refusal in refused]
            self._renewal.keep(self.owner.tokens())
            missed = self.owner.indispensable(action, refused)
            if not refused or not (missed or patient):
                break
            if time.monotonic() >= deadline and not any(refusal.unsure for refusal in refused):
                if missed:
                    raise held_by_other_error(self.group, missed, len(action.queues), self.owner.owner_id)
                break
            time.sleep(LOCK_RETRY)
        if patient and not self.owner.owned:
            logger.warning(
                "all %d queues that this query should have in group %s are held by others (%s), so it has nothing to read and ends",
                len(action.queues), self.group, "; ".join(sorted({refusal.holder for refusal in refused})),
            )  # fmt: skip

    def _commit_what_is_left(self) -> None:
        """Commit offsets that a failed `boundary` or `place` did not commit, because the Owner does not return them again.

        Deleted topics are skipped: the boundary finds out later which of their messages are lost.
        """
        mine = set(self.owner.all_tokens())
        commits = {token: offset for token, offset in self._uncommitted.items() if token in mine}
        for topic in sorted({token.queue.topic for token in commits}):
            with contextlib.suppress(TopicError):
                self._commit({token: offset for token, offset in commits.items() if token.queue.topic == topic})
        self._uncommitted = {}

    def _commit(self, offsets: Mapping[LockToken, int]) -> None:
        """Commit group offsets. For a lost queue, an exclusive query raises LockError LOST; a shared query drops it with a warning."""
        self._uncommitted = dict(offsets)
        while self._uncommitted:
            try:
                self._groups.commit(self._uncommitted)
            except LockError:
                gone = self._groups.stale(list(self._uncommitted))
                if not self.shared or not gone:
                    raise
                self._forget(gone)
                self._uncommitted = {token: offset for token, offset in self._uncommitted.items() if token not in gone}
            else:
                self._uncommitted = {}

    def _forget_lost(self) -> None:
        """Find lost queues before a boundary. An exclusive query raises LockError LOST; a shared query drops the queues with a warning."""
        if not self.shared:
            self.raise_if_lost()
            return
        gone = self._groups.stale(self.owner.tokens())
        if gone:
            self._forget(gone)

    def _forget(self, gone: Sequence[LockToken]) -> None:
        queues = self.owner.lost(gone)
        # Otherwise a renewal would report the tokens as lost again, and the query would end because of queues that it no longer has.
        self._renewal.keep(self.owner.tokens())
        if queues:
            logger.warning(
                "group %s lost %s: this query was paused or cut off for longer than its locks live, or they were taken from it. The next "
                "owner of these queues resumes at the group's offset",
                self.group, ", ".join(map(str, queues)),
            )  # fmt: skip

    def raise_if_lost(self) -> None:
        if self._renewal.lost:
            token = self._renewal.lost[0]
            raise lost(token.group, token.queue, token.epoch, "before a renewal, and another query may own it now")

    def drop(self, queues: Iterable[MessageQueue]) -> None:
        before = self.owner.tokens()
        super().drop(queues)
        remaining = set(self.owner.tokens())
        # A deleted queue has a lock too, which another member would wait for if the topic is created again.
        self._unlock([token for token in before if token not in remaining])

    def repeat(self, start: Checkpoint, end: Checkpoint, missing: Sequence[MessageQueue], lot_ends: OffsetMap) -> None:
        super().repeat(start, end, missing, lot_ends)
        left_out = {queue: end.gen[queue] for queue in missing if queue not in self.owner.owned and queue in end.gen}
        if left_out:
            self._groups.end_tenures(self.group, left_out)

    # -- offsets -----------------------------------------------------------------------------------------------------------

    def offsets(self, queues: Sequence[MessageQueue]) -> dict[MessageQueue, int]:
        return self._groups.offsets(self.group, queues)

    def place(
        self, start: Checkpoint, begins: Mapping[MessageQueue, int], ends: OffsetMap, recreated_topics: Collection[str]
    ) -> None:
        offsets = self._reset(start, begins, recreated_topics)
        changed = start.of_another_group(self.group)
        if changed and start.group is not None:
            # Another member of the former group had these queues.
            new = [queue for queue in begins if queue not in offsets and queue not in start.next]
            begins = {**begins, **(self._groups.offsets(start.group, new) if new else {})}
        former = self._former(start, {queue: at for queue, at in start.next.items() if queue in begins}, ends)
        # Before RocketMQ 5.0, a group keeps its offset of a former parking lot.
        offsets = {queue: at for queue, at in offsets.items() if queue not in self._new_lots or at <= ends.get(queue, 0)}
        commit, behind, moved = self.owner.enter(start, offsets, begins, former)
        self._new_lots.clear()
        if changed:
            moved = {}
            self._warn_of_another_group(start, begins)
        for late in behind:
            logger.warning(
                "the checkpoint is behind group %s: queue %s is read again from %d, although the group's offset was %d",
                self.group, late.queue, late.checkpoint, late.group,
            )  # fmt: skip
        for queue, (logged, at) in moved.items():
            logger.warning(
                "queue %s of group %s had another owner, was reset, or was created again: it is read from %d, not from the checkpoint's %d",
                queue, self.group, at, logged,
            )  # fmt: skip
        if commit is not None:
            # A queue that ends before its position has lost messages. Producers may send them again, and then the group must read them.
            self._commit({token: at for token, at in commit.offsets.items() if at <= ends.get(token.queue, 0)})

    def _reset(
        self, start: Checkpoint, begins: Mapping[MessageQueue, int], recreated_topics: Collection[str]
    ) -> dict[MessageQueue, int]:
        """Carry out the resets that are due when this query starts. Return the group's offsets of the queues."""
        offsets = self.offsets(list(begins))
        if not self._lineage and not self.shared:
            # RocketMQ 4 keeps a group's offsets of deleted topics. An offset that was reset since the checkpoint was logged is valid.
            stale = [queue for queue in offsets if queue.topic in recreated_topics]
            stale = [queue for queue in stale if not self.owner.reset_since(queue, start)]
            offsets.update(self._begin_anew({queue: begins[queue] for queue in stale}))
        starting = self._options.starting
        if start.fresh and starting.explicit and starting.kind != "committed" and not self.shared:
            # Parking lots are not reset: their messages are processed when they are due.
            begins = {queue: begin for queue, begin in begins.items() if not is_parked(queue)}
            logger.warning("group %s is reset to %s, as the options say", self.group, offsets_to_json(begins))
            offsets.update(self._begin_anew(begins))
        return offsets

    def _begin_anew(self, offsets: Mapping[MessageQueue, int]) -> Mapping[MessageQueue, int]:
        """Reset the group's offsets in these owned queues, of which nothing is in flight, and return them.

        This begins new tenures. If this query is killed before Spark logs its next offset, the next run follows the group's offsets.
        """
        if offsets:
            # Otherwise a renewal at the same time would find that the former tokens are lost.
            self._renewal.keep([token for token in self.owner.tokens() if token.queue not in offsets])
            try:
                self.owner.restarted(self._groups.reset({self._token(queue): at for queue, at in offsets.items()}))
            finally:
                self._renewal.keep(self.owner.tokens())
        return offsets

    def skip(self, queue: MessageQueue, offset: int) -> None:
        if not is_parked(queue) and (self.owner.owned[queue].position or 0) > offset:
            # The broker lost the queue's end. Commits never move the group back, so the next owner would skip the messages that follow.
            # So would the next run, if it followed a checkpoint from before the loss. A deleted topic needs no reset: the next boundary
            # finds out which of its messages are lost.
            with contextlib.suppress(TopicError):
                self._begin_anew({queue: offset})
        super().skip(queue, offset)

    def _token(self, queue: MessageQueue) -> LockToken:
        token = self.owner.owned[queue].token
        assert token is not None
        return token

    # -- the end -----------------------------------------------------------------------------------------------------------

    def give_back(self, start: Checkpoint) -> None:
        self._forget_lost()
        self._commit_what_is_left()
        commit = self.owner.take_processed(start)
        if commit is not None:
            self._commit(commit.offsets)
        self.stop(terminated=False)

    def stop(self, *, terminated: bool) -> None:
        # Queues in flight are unlocked after a delay if tasks may still run.
        self._renewal.stop()
        release = self.owner.stop(self._groups.offsets(self.group, list(self.owner.owned)))
        self._groups.unlock(release.idle)
        if terminated and release.in_flight:
            # If the driver has died, its tasks also die, and the locks are released when this process ends.
            self._groups.unlock(release.in_flight, linger=UNLOCK_DELAY)
        self._groups.leave(self._client)


def another_group(former: str | None, group: str | None, at: OffsetMap) -> GroupError:
    """Return the warning of a query in ``group`` whose checkpoint belongs to the group ``former``. ``at``: where its queues begin."""
    was, now = ("no consumer group" if name is None else f"group {name!r}" for name in (former, group))
    higher = "" if group is None else f", or at the offset of {now} where it is higher"
    elsewhere = "start it with another checkpointLocation" if group is None else f"run orderedmq group seek {group}"
    return GroupError(
        GroupCondition.CHANGED,
        f"the checkpoint belongs to {was}, but this query has {now}: so that no processed message is repeated, its queues begin where they "
        f"would have begun with {was}{higher}: {json.dumps(offsets_to_json(at))}. To begin elsewhere, stop this query and {elsewhere}",
    )


def held_by_other_error(group: str, refused: Sequence[Refusal], queue: int, owner_id: str) -> LockError:
    """Return the error for the query ``owner_id``, which needs all ``queue`` queues but was refused the locks in ``refused``."""
    first = refused[0]
    if first.owner == owner_id:
        return LockError(
            LockCondition.HELD_BY_OTHER,
            f"{len(refused)} of {queue} queues of group {group!r} are held by another run of this same query ({first.client_id}), which "
            f"{'is alive' if first.alive else 'may be alive'}: {FORMER_RUN} its lock of {first.queue} has ended (in "
            f"{first.remaining:.0f} s unless it is renewed). No message is lost while this query waits",
        )
    if not first.owner:
        return LockError(
            LockCondition.HELD_BY_OTHER,
            f"{len(refused)} of {queue} queues of group {group!r} are held by {first.holder}, whose lock of {first.queue} ends within "
            f"{first.remaining:.0f} s unless it is renewed. Start this query again after that, give it a separate consumerGroup, set "
            "messageModel=broadcasting to read every message, or set assignment=shared to share the queues",
        )
    if first.lingering:
        state = "stopped in the middle of a batch, so its tasks may still be running"
    else:
        state = "is alive" if first.alive else "is not known to be alive"
    return LockError(
        LockCondition.HELD_BY_OTHER,
        f"{len(refused)} of {queue} queues of group {group!r} belong to {first.holder}, which {state}. Its lock "
        f"of {first.queue} ends in {first.remaining:.0f} s unless it is renewed. Stop that query, give this one a separate consumerGroup, "
        "set messageModel=broadcasting to read every message, or set assignment=shared for both to share the queues. For two outputs of "
        "one stream, use foreachBatch. If one query reads the group twice (a join or union of two loads), load once and use that "
        "DataFrame twice, or give each load a separate consumerGroup",
    )
