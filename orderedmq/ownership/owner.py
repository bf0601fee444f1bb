"""Decides which queues a query owns, from which offset it reads each, and what it commits, unlocks and locks at a boundary.

The Owner decides and the reader (ordered_source) acts: each method returns actions or takes the outcome of an action. The Owner has an
`Owned` for each queue, with the queue's offsets. Messages in a planned batch that Spark has not committed are in flight.

A queue that was just locked is read from one of three offsets (the lineage rules, which an exhaustive model checks):

- The checkpoint's offset, if the queue's tenure is the one that the checkpoint logged. The queue *resumes*.
- The group's offset otherwise, because another owner may have processed messages in between, or the queue was reset, which ends its
  tenure. The queue is *entered* there.
- If the group has no offset: the checkpoint's offset, or if the checkpoint has none either, the beginning that the reader's options name.

A broker that keeps no lineage cannot always distinguish the first two cases: see ``unbroken``. A replay of a logged batch repeats a
queue's whole range if the queue resumes at the checkpoint's offset, and no part of it if the queue is entered at the group's offset.
If the checkpoint belongs to another group, a queue begins where it would have begun there, or at this group's offset if that is higher.

Spark commits a logged batch as a whole, even the ranges that were not repeated. So a replay may leave a queue out only if another
query holds or held the queue, because the next run that locks it then enters it at the group's offset. If a former run of this
same query still holds the queue, its tenure is unbroken, so the next run would resume after messages that were never processed: see
``indispensable``. At a broker without lineage, the session ends the tenure instead (`Groups.end_tenures`).

Exclusive mode is the strategy "all queues" with the policy "refuse": every queue or none. Shared mode is an
AllocateMessageQueueStrategy with the policy "hand over": at a boundary, where nothing is in flight, a queue that the strategy
gives to another member is committed and unlocked. A queue that the strategy gives to this member is requested at each boundary,
until its owner has given it up. Without a group (broadcasting) there are no tokens, and the checkpoint alone holds the offsets.

A queue, the *leader*, may have a companion: its parking lot. A query owns the companion exactly while it owns the leader, under the
leader's lock. The companion has separate offsets, and a token that the broker checks against the leader's lock. It is never locked,
renewed or unlocked alone, and no strategy divides it. Pure: no clock, no broker.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Final

from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.ownership.allocate import Strategy, all_queues
from orderedmq.ownership.lock import LockToken, Refusal
from orderedmq.ownership.offsets import Checkpoint, OffsetMap, ranges
from orderedmq.ownership.owned_queue import Owned, Step

NO_OFFSETS: Final[OffsetMap] = MappingProxyType({})
#: Makes the token of a queue's companion from the queue's token.
Companion = Callable[[LockToken], LockToken]


class Policy(Enum):
    """The consequence of a refused lock for the query."""

    #: The query cannot run: all queues or none.
    REFUSE = "refuse"
    #: Another member has not given the queue up yet: continue without the queue, and ask for it again.
    HAND_OVER = "hand over"


@dataclass(frozen=True)
class Lock:
    """Ask for the locks of these queues. ``all_or_none``: if one lock is refused, give the granted locks back.

    ``repeating``: the queues belong to a logged batch, which Spark has committed, or commits once its tasks have run.
    ``tenures``: where the query's tenures began according to its checkpoint.
    """

    queues: tuple[MessageQueue, ...]
    all_or_none: bool
    repeating: bool = False
    tenures: OffsetMap = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class ReadOffset:
    """Read the group's offsets of these queues, *after* they were locked."""

    queues: tuple[MessageQueue, ...]


@dataclass(frozen=True)
class Commit:
    """Move the group's offsets."""

    offsets: Mapping[LockToken, int]


@dataclass(frozen=True)
class Unlock:
    """Give queues back. Queues ``in_flight`` are given back only after the unlock delay, because a task may still be running."""

    idle: tuple[LockToken, ...]
    in_flight: tuple[LockToken, ...]


@dataclass(frozen=True)
class Behind:
    """A queue whose checkpoint is below the group's offset, so that the messages in between are processed again."""

    queue: MessageQueue
    checkpoint: int
    group: int


class Owner:
    """The queues of one query in one group.

    ``owner_id`` is the query's id, which is stored in its checkpoint. Not thread-safe: only the reader's main thread uses it.
    """

    def __init__(
        self,
        owner_id: str,
        *,
        group: str | None = None,
        strategy: Strategy = all_queues,
        policy: Policy = Policy.REFUSE,
        lineage: bool = True,
        companion: Companion | None = None,
    ) -> None:
        """``group``: the consumer group, None without one. ``lineage``: whether the broker can distinguish a tenure that continues from a
        new one. ``companion``: makes the token of a queue's companion (None: queues have no companions).
        """
        self.owner_id = owner_id
        self.group = group
        self.strategy = strategy
        self.policy = policy
        self.lineage = lineage
        self._companion = companion
        #: Whether missing queues are requested. A run with availableNow takes all of its queues at its first boundary.
        self.taking = True
        self.owned: dict[MessageQueue, Owned] = {}
        self._planned: Checkpoint | None = None

    # -- the boundary between two micro-batches: nothing is in flight -------------------------------------------------------

    def boundary(
        self, start: Checkpoint, queues: Sequence[MessageQueue], members: Collection[str] = ()
    ) -> list[Commit | Unlock | Lock]:
        """Return the actions at a boundary, in this order: commit processed messages, unlock unwanted queues, lock missing ones.

        Spark has committed everything below ``start``. ``queues`` are the queues that exist. Unlocked queues are forgotten here.
        """
        actions: list[Commit | Unlock | Lock] = []
        commit = self.take_processed(start)
        if commit is not None:
            actions.append(commit)
        wanted = set(self.strategy(queues, members))
        if self.policy is Policy.HAND_OVER:
            released = self.release(wanted)
            if released:
                actions.append(Unlock(released, ()))
        missing = tuple(sorted(wanted - self.owned.keys()))
        if missing and self.taking:
            actions.append(Lock(missing, all_or_none=self.policy is Policy.REFUSE, tenures=start.gen))
        return actions

    def release(self, wanted: set[MessageQueue]) -> tuple[LockToken, ...]:
        """Forget all queues that are not ``wanted``, with their companions, and return the tokens to unlock. Nothing may be in flight."""
        leaving = [owned for queue, owned in sorted(self.owned.items()) if (owned.leader or queue) not in wanted]
        self._forget([owned.queue for owned in leaving], Step.RELEASED)
        return tuple(owned.token for owned in leaving if owned.token is not None and owned.leader is None)

    def take_processed(self, start: Checkpoint) -> Commit | None:
        """Return the commit of the messages below ``start``, which Spark has processed, or None if nothing is to be committed.

        The planned micro-batch ends with this: it is committed, or rolled back if it did not run.
        """
        if self._planned is None:
            return None
        # Compare whole checkpoints: a queue that was entered again at a lower offset may be planned up to the same end as before.
        ran = self.is_planned(start)
        self._planned = None
        placed = [owned for owned in self.owned.values() if owned.position is not None]
        if not ran:
            for owned in placed:
                owned.roll_back()
            return None
        offsets: dict[LockToken, int] = {}
        for owned in placed:
            committed = owned.commit()
            if committed is not None and owned.token is not None:
                offsets[owned.token] = committed
        return Commit(offsets) if offsets else None

    # -- entering queues ---------------------------------------------------------------------------------------------------

    def locked(self, tokens: Iterable[LockToken]) -> None:
        """Take queues whose locks were granted, and their companions. Their positions are not decided yet."""
        for token in tokens:
            self.owned[token.queue] = Owned(token.queue, token)
            if self._companion is not None:
                companion = self._companion(token)
                self.owned[companion.queue] = Owned(companion.queue, companion, token.queue)

    def assume(self, queues: Iterable[MessageQueue]) -> None:
        """Take queues without a lock (broadcasting)."""
        for queue in queues:
            self.owned[queue] = Owned(queue, None)

    def restarted(self, tokens: Iterable[LockToken]) -> None:
        """Take the tokens of new tenures, which begin when the group's offsets in these owned queues are reset."""
        for token in tokens:
            self.owned[token.queue].token = token
            if self._companion is not None:
                companion = self._companion(token)
                self.owned[companion.queue].token = companion

    def lost(self, tokens: Collection[LockToken]) -> list[MessageQueue]:
        """Forget the queues of stale tokens, and return those that were owned. Their new owner resumes at the group's offset.

        If a companion's token is stale, its leader is also lost, because both depend on the leader's lock.
        """
        stale = [self.owned[token.queue] for token in tokens if token.queue in self.owned]
        gone = sorted({owned.leader or owned.queue for owned in stale if owned.token in tokens})
        self.drop(gone)
        return gone

    def leader_of(self, queue: MessageQueue) -> MessageQueue:
        """Return the leader of an owned queue that is a companion, else the queue itself."""
        return self.owned[queue].leader or queue

    def all_tokens(self) -> list[LockToken]:
        """Return the tokens of all owned queues and their companions."""
        return [owned.token for owned in self.owned.values() if owned.token is not None]

    def tokens(self) -> list[LockToken]:
        """Return the tokens of all locks, without companions, which have no locks."""
        return [owned.token for owned in self.owned.values() if owned.token is not None and owned.leader is None]

    def drop(self, queues: Iterable[MessageQueue]) -> None:
        """Forget queues and their companions, including their messages in flight."""
        self._forget(queues, Step.LOST)

    def _forget(self, queues: Iterable[MessageQueue], step: Step) -> None:
        gone = set(queues)
        for queue, owned in self.owned.items():
            if queue in gone or owned.leader in gone:
                owned.on(step)
        self.owned = {queue: owned for queue, owned in self.owned.items() if queue not in gone and owned.leader not in gone}

    def indispensable(self, asked: Lock, refused: Sequence[Refusal]) -> list[Refusal]:
        """Return the refusals that prevent this query from continuing.

        Any refusal prevents an exclusive query. A shared query is prevented only from repeating a logged batch, and only by a former run
        of the same query that still holds a queue, if the broker keeps lineage (the module's docstring says why). Such a run is paused
        or slow to end, or the query was started twice.
        """
        if asked.all_or_none:
            return list(refused)
        if not asked.repeating or not self.lineage:
            return []
        return [refusal for refusal in refused if refusal.owner == self.owner_id]

    def unplaced(self) -> ReadOffset:
        """Return the action that reads the group's offsets of all queues whose positions are not decided."""
        return ReadOffset(tuple(sorted(queue for queue, owned in self.owned.items() if owned.position is None)))

    def unbroken(self, owned: Owned, logged: Checkpoint, at_group: int | None, own: int) -> bool:
        """Whether the queue had no other owner and was not reset since ``logged`` was written.

        ``at_group``: the group's offset in the queue. If it is None, no other owner is known to have processed anything. ``own``: the
        highest offset that this query can have committed.

        If the broker keeps no lineage, the result is false if the queue was reset, or if the group's offset is above ``own``, because
        only another owner can have moved it there: consumers in other languages record no tenure. An exclusive query, which has the
        group for itself, needs no more.

        If ``logged`` belongs to another group, its tenures say nothing about this one. This group has processed the messages below its
        offset, so the result is false if that is above ``own``.
        """
        if owned.token is None or at_group is None:
            return True
        if logged.of_another_group(self.group):
            return at_group <= own
        same = logged.gen.get(owned.queue) == owned.token.tenure
        if self.lineage:
            return same
        return not self.reset_since(owned.queue, logged) and at_group <= own and (same or self.policy is Policy.REFUSE)

    def reset_since(self, queue: MessageQueue, logged: Checkpoint) -> bool:
        """Whether an owned queue was reset since ``logged`` was written. For a broker without lineage, which stores each queue's resets."""
        token = self.owned[queue].token
        return token is not None and logged.gen.get(queue, 0) <= token.reset

    def enter(
        self, start: Checkpoint, group: OffsetMap, beginnings: OffsetMap, former: OffsetMap = NO_OFFSETS
    ) -> tuple[Commit | None, list[Behind], dict[MessageQueue, tuple[int, int]]]:
        """Decide the positions of all unplaced queues.

        ``group``: the group's offsets. ``beginnings``: where queues without any offset begin. Returns three things: a commit for the
        queues whose group offset is below their position or missing (everything below ``start`` is processed); the queues that resume
        below the group's offset; and the queues that left the checkpoint's offset for the group's, as (from, to).

        ``former``: if ``start`` belongs to another group, that group's offsets in the queues whose tenure is broken there. Otherwise 0 for
        each companion that was created again.
        """
        commits: dict[LockToken, int] = {}
        behind: list[Behind] = []
        moved: dict[MessageQueue, tuple[int, int]] = {}
        for queue in self.unplaced().queues:
            owned = self.owned[queue]
            logged = start.next.get(queue)
            at_group = _at_group(owned, group)
            if logged is not None and queue not in former and self.unbroken(owned, start, at_group, logged):
                position = logged
                if at_group is not None and at_group > logged:
                    behind.append(Behind(queue, logged, at_group))
            elif at_group is not None or queue in former:
                position = max(at_group or 0, former.get(queue, 0))
                if logged is not None and logged != position:
                    moved[queue] = (logged, position)
            else:
                position = beginnings[queue]
            owned.place(position, entered=logged != position)
            if owned.token is not None and (at_group is None or at_group < position) and (owned.leader is None or position):
                # The condition leaves out a parking lot at offset 0, because it may not exist yet.
                commits[owned.token] = position
        return (Commit(commits) if commits else None), behind, moved

    # -- planning ----------------------------------------------------------------------------------------------------------

    def backlog(self, ends: OffsetMap) -> dict[MessageQueue, OffsetRange]:
        """Return for each queue in ``ends`` the range of messages that are not planned yet. ``ends``: the queues' max offsets at the broker."""
        out: dict[MessageQueue, OffsetRange] = {}
        for queue, owned in self.owned.items():
            if owned.position is None or queue not in ends:
                continue
            owned.found(ends[queue])
            out[queue] = OffsetRange(owned.position, owned.known)
        return out

    def skip(self, queue: MessageQueue, offset: int) -> None:
        """Enter a queue at ``offset``, because the messages before it are lost and the user accepts that."""
        self.owned[queue].skip(offset)

    def following(self, counts: Mapping[MessageQueue, int]) -> dict[MessageQueue, int]:
        """Return the next offset of each queue after planning ``counts`` more of its messages."""
        return {
            queue: owned.position + counts.get(queue, 0)
            for queue, owned in sorted(self.owned.items())
            if owned.position is not None
        }

    def plan(self, counts: Mapping[MessageQueue, int], topics: Mapping[str, str]) -> Checkpoint:
        """Take ``counts`` messages of each queue into the next batch, and return the checkpoint to log."""
        following = self.following(counts)
        entered: dict[MessageQueue, int] = {}
        gen: dict[MessageQueue, int] = {}
        for queue in sorted(self.owned):
            owned = self.owned[queue]
            if owned.position is None:
                continue
            if owned.entered:
                entered[queue] = owned.position
            count = counts.get(queue, 0)
            if count:
                owned.plan(count)
            if owned.token is not None:
                gen[queue] = owned.token.tenure
        self._planned = Checkpoint(self.owner_id, following, entered, gen, dict(topics), self.group)
        return self._planned

    # -- running what was logged -------------------------------------------------------------------------------------------

    def is_planned(self, end: Checkpoint) -> bool:
        return self._planned is not None and self._planned.to_spark() == end.to_spark()

    def replay(self, start: Checkpoint, end: Checkpoint, group: OffsetMap, former: OffsetMap = NO_OFFSETS) -> None:
        """Plan again the ranges of a logged batch that this owner must repeat after a restart (see ``in_flight``).

        ``group``: the group's offsets, read after the queues were locked. ``former``: see `enter`. Queues with a broken lineage stay
        unplaced, so that the next boundary enters them at the group's offset. On a broker without lineage, another owner counts as having
        processed a range only if the group's offset has reached the range's end. A weaker condition would leave out a partly processed
        range. If this run died before it logged the next batch, nothing would show that the rest of the range was never processed.
        """
        for queue, span in ranges(start, end).items():
            owned = self.owned.get(queue)
            last = span.end - 1 if span.messages else span.end
            if owned is None or queue in former or not self.unbroken(owned, end, _at_group(owned, group), last):
                continue
            owned.repeat(span)
        self._planned = end

    # -- the end -----------------------------------------------------------------------------------------------------------

    def stop(self, group: OffsetMap) -> Unlock:
        """Return the action that gives every queue back.

        If the group's offset has reached a queue's planned end, the batch was published, so the queue has nothing in flight.
        """
        working: set[MessageQueue] = set()
        for queue, owned in self.owned.items():
            in_flight = owned.in_flight
            if in_flight.messages and group.get(queue, -1) < in_flight.end:
                working.add(owned.leader or queue)
        tokens = self.tokens()
        return Unlock(
            tuple(token for token in tokens if token.queue not in working),
            tuple(token for token in tokens if token.queue in working),
        )

    def in_flight(self) -> dict[MessageQueue, OffsetRange]:
        """Return the range of each queue that is planned and not committed."""
        out: dict[MessageQueue, OffsetRange] = {}
        for queue, owned in self.owned.items():
            if owned.in_flight.messages:
                out[queue] = owned.in_flight
        return out

    def _check(self) -> None:
        """Assert every invariant. For tests."""
        for queue, owned in self.owned.items():
            assert owned.queue == queue
            assert owned.token is None or owned.token.queue == queue
            assert owned.leader is None or owned.leader in self.owned, "a companion goes with its leader"
            if owned.position is not None:
                assert owned.begin <= owned.position <= owned.known


def _at_group(owned: Owned, group: OffsetMap) -> int | None:
    """Return the group's offset of a queue, or None if the group has none.

    A parking lot has no group offset until one is committed. Until then, 0 is returned for a lot whose queue has a group offset. The
    checkpoint may have no offset of the lot either, because a query that gives up a queue removes the queue and its lot from its checkpoint.
    """
    at = group.get(owned.queue)
    return 0 if at is None and owned.leader in group else at
