"""The simulated broker: locks and members by the real rules, group offsets, and two clocks that only the simulation moves.

Planted bugs can break the rules. So the world keeps separate records (``Holding``, ``Ledger``) of what must be true independently
of the rules. A contradiction raises a Violation when it happens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Final, Protocol

from orderedmq.broker import Progress, QueueBounds, TopicInfo
from orderedmq.conditions import LockCondition
from orderedmq.errors import LockError
from orderedmq.model import EMBEDDED_BROKER, MessageQueue, OffsetRange, is_parked
from orderedmq.ownership import lock as rules
from orderedmq.ownership.lock import LOCK_LIFE, ClientIdentity, Instant, LockToken, QueueLock, Refusal
from orderedmq.ownership.membership import Member, Subscription, present
from orderedmq.parking import AtSeek, queue_token
from orderedmq.routing.generations import Resize

if TYPE_CHECKING:
    from tests.sim.key_judge import KeyJudge
    from tests.sim.lots import Lots
    from tests.sim.resizing import Resizing

GROUP: Final = "billing"
TOPIC: Final = "orders"
#: All times are multiples of this, which floats represent exactly, so that an age can equal its limit.
TICK: Final = 0.125


class Violation(AssertionError):
    """An invariant does not hold."""


class Renewing(Protocol):
    """A process that regularly renews its locks and its membership."""

    frozen: bool

    def renew_due(self) -> float | None: ...

    def renew_now(self) -> None: ...


@dataclass(slots=True)
class Holding:
    """The client that may work on a queue by the specification. It is recorded separately from the lock, with the true clock."""

    client: ClientIdentity
    since: float
    life: float = LOCK_LIFE
    lingering: bool = False


class World:
    """One machine with one store. ``alive``: ids of living clients; ``now``: the monotonic clock; ``wall``: the wall clock."""

    def __init__(self, random: Random, queues: int) -> None:
        self.random = random
        self.now = 1000.0
        self.wall_offset = 5_000_000.0
        self.boot = 1
        self.processes: list[Renewing] = []
        self.alive: set[str] = set()
        self.queues = [MessageQueue(TOPIC, EMBEDDED_BROKER, number) for number in range(queues)]
        self.topic_info = TopicInfo(TOPIC, queues, "incarnation")
        self.ends: dict[MessageQueue, int] = dict.fromkeys(self.queues, 0)
        self.locks: dict[MessageQueue, QueueLock] = {}
        self.group_offsets: dict[MessageQueue, int] = {}
        #: The offsets of each queue whose messages are dead letters.
        self.letters: dict[MessageQueue, set[int]] = {}
        #: The recorded progress of the group's listener in each queue.
        self.progress: dict[MessageQueue, Progress] = {}
        self.group_members: dict[str, Member] = {}
        self.numbers = 0
        self.changes = 0
        self.ledger = Ledger(self)
        #: The holder and the highest epoch of each queue according to the specification, recorded separately from the locks.
        self.holdings: dict[MessageQueue, Holding] = {}
        self.highest: dict[MessageQueue, int] = {}
        #: Each grant (queue, client id), in order. Tests check that a queue does not move without a reason.
        self.moves: list[tuple[MessageQueue, str]] = []
        self.trace: list[str] | None = None
        self.history: list[dict[str, Any]] = []
        self.broken: str | None = None
        #: The parking lots and their judge, if the listeners have order per key.
        self.lots: Lots | None = None
        self.keys: KeyJudge | None = None
        #: The generations of the topic, if it is resized.
        self.resizing: Resizing | None = None
        #: How often each event happened that the simulation must cover.
        self.reached: Counter[str] = Counter()

    # -- for the simulation --------------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now - 1000:9.3f}  {text}")

    def fail(self, what: str) -> None:
        """Raise a Violation, and record it in case the code under test catches it."""
        self.broken = self.broken or what
        raise Violation(what)

    def instant(self) -> Instant:
        return Instant(f"boot-{self.boot}", self.now)

    def wall(self) -> float:
        return self.now + self.wall_offset

    def milliseconds(self) -> int:
        """The broker's time in ms since 1970."""
        return int(self.wall() * 1000)

    def advance(self, seconds: float) -> None:
        """Let time pass. Processes that are not frozen renew their locks when a renewal is due."""
        target = self.now + seconds
        while True:
            due = [(at, n) for n, one in enumerate(self.processes) if not one.frozen and (at := one.renew_due()) is not None]
            at, first = min(due, default=(target, -1))
            if first < 0 or at > target:
                break
            self.now = max(self.now, at)
            self.processes[first].renew_now()
        self.now = max(self.now, target)

    def produce(self, queue: MessageQueue, count: int) -> None:
        """Write messages into a queue, or if the topic is resized, into the queues of random keys."""
        if self.resizing is not None:
            self.resizing.produce(count)
            return
        self.ends[queue] += count
        self.changes += 1

    def grow(self) -> None:
        queue = MessageQueue(TOPIC, EMBEDDED_BROKER, len(self.queues))
        self.queues = [*self.queues, queue]
        self.topic_info = TopicInfo(TOPIC, len(self.queues), "incarnation")
        self.ends[queue] = 0
        self.ledger.add(queue)
        self.changes += 1

    def resizes(self) -> list[Resize]:
        return [] if self.resizing is None else self.resizing.resizes

    def reboot(self) -> None:
        """Restart the monotonic clock. All processes must be dead already."""
        self.boot += 1
        self.now = 1000.0
        self.alive.clear()
        self.holdings.clear()

    def seek(self, offsets: Mapping[MessageQueue, int], parked: AtSeek = "keep") -> None:
        """Do what ``group seek --force --parked`` does."""
        self.changes += 1
        self.history.append({"event": "reset", "group": GROUP})
        for queue, offset in offsets.items():
            self.ledger.sought(queue, offset)
            self.group_offsets[queue] = offset
            self.letters[queue] = {one for one in self.letters.get(queue, ()) if one < offset}
            self._forget_progress(queue)
            if queue in self.locks:
                self._put(queue, rules.sought(self._number(), self.instant()))
                self.highest[queue] = self.locks[queue].epoch
                self.holdings.pop(queue, None)
            if self.lots is not None and self.keys is not None:
                self.lots.sought(queue, offset, parked)
                self.keys.sought(queue, offset)

    def dead_letter(self, token: LockToken, offsets: Iterable[int]) -> None:
        """Do what `Groups.dead_letter` promises. Like a commit, it is refused if the token is not current."""
        self.require_current(token)
        self.accepted(token)
        self.letters.setdefault(token.queue, set()).update(offsets)

    def _forget_progress(self, queue: MessageQueue) -> None:
        self.progress.pop(queue, None)
        self.ledger.progress_forgotten(queue)

    def record_progress(self, token: LockToken, progress: Progress) -> None:
        """Do what `Groups.record_progress` promises."""
        self.require_current(token)
        self.accepted(token)
        self.progress[token.queue] = progress
        waiting = self.lots.live(token.queue) if self.lots is not None else []
        # Several copies of a message may be in the lot, and the progress concerns the last one.
        places = {one.offset: one.place for one in waiting if one.command is None}
        self.ledger.progress_recorded(
            token.queue, progress.offset, {offset for offset, place in places.items() if place >= progress.lot}
        )

    def listening(self, token: LockToken, offsets: Iterable[int]) -> None:
        """A listener is called with messages. Fail if one of them must not come again and the queue's lock is still valid."""
        if not self.check(token):
            return
        offsets = list(offsets)
        for what, found in (("dead letters", self.letters), ("below a recorded progress (K7)", self.ledger.finished)):
            if again := found.get(token.queue, set()).intersection(offsets):
                self.fail(f"{token.queue}: {sorted(again)} are {what}, but a listener got them again")
        self.ledger.undecided(token, offsets)

    def release(self, queue: MessageQueue) -> None:
        """Do what ``lock release --force`` does."""
        before = self.locks.get(queue)
        if before is not None and before.held:
            self._put(queue, rules.released(before, self._number()))
            self.highest[queue] = self.locks[queue].epoch
            self.holdings.pop(queue, None)

    # -- the Log protocol, as far as the source's driver uses it --------------------------------------------------------------

    def change(self) -> int:
        return self.changes

    def bounds(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, QueueBounds]:
        return {queue: at for queue in queues if (at := self._bounds(queue)) is not None}

    def _bounds(self, queue: MessageQueue) -> QueueBounds | None:
        if queue in self.ends:
            return QueueBounds(0, self.ends[queue])
        if self.lots is None or not self.lots.made:
            return None
        return QueueBounds(self.lots.begins.get(queue, 0), self.lots.end(queue))

    # -- the Groups protocol ---------------------------------------------------------------------------------------------------

    def heartbeat(self, client: ClientIdentity, subscription: Subscription) -> list[Member]:
        self.changes += 1
        now, known = self.instant(), self.group_members
        mine = known.get(client.client_id)
        joined = mine.joined if mine is not None and not mine.expired(now) else self._number()
        known[client.client_id] = Member(client.owner, client.client_id, subscription, joined, now)
        counted = present(known.values(), now, self.alive.__contains__)
        self.group_members = {member.client_id: member for member in counted}
        return counted

    def members(self) -> list[Member]:
        return present(self.group_members.values(), self.instant(), self.alive.__contains__)

    def leave(self, client: ClientIdentity) -> None:
        self.changes += 1
        self.group_members.pop(client.client_id, None)
        self.alive.discard(client.client_id)

    def lock(self, client: ClientIdentity, queues: Sequence[MessageQueue]) -> dict[MessageQueue, LockToken | Refusal]:
        out: dict[MessageQueue, LockToken | Refusal] = {}
        now = self.instant()
        for queue in queues:
            before = self.locks.get(queue)
            after = rules.grant(before, client, now, next_epoch=self.numbers + 1, alive=self.alive.__contains__)
            if after is None:
                assert before is not None
                out[queue] = rules.refusal(before, queue, now, before.client_id in self.alive)
                continue
            self._granted(queue, before, after, client)
            out[queue] = rules.token_of(after, GROUP, queue)
        return out

    def _granted(self, queue: MessageQueue, before: QueueLock | None, after: QueueLock, client: ClientIdentity) -> None:
        holding = self.holdings.get(queue)
        if holding is not None and holding.client != client and self._protected(holding, client):
            self.fail(f"{queue} was given to {client.client_id}, although it is still {holding.client.client_id}'s")
        renewed = before is not None and before.held and before.epoch == after.epoch
        if not renewed and after.epoch <= self.highest.get(queue, 0):
            self.fail(f"{queue} was granted under epoch {after.epoch} after epoch {self.highest[queue]}")
        self.numbers = max(self.numbers, after.epoch)
        self.highest[queue] = after.epoch
        self.holdings[queue] = Holding(client, self.now)
        self._put(queue, after)
        self.moves.append((queue, client.client_id))
        if self.lots is not None and before is not None and before.owner != client.owner and self.lots.live(queue):
            self.reached["handed over with a lot"] += 1
        event = {"event": "grant", "group": GROUP, "queue": str(queue), "epoch": after.epoch, "owner": client.owner}
        self.history.append(event)

    def _protected(self, holding: Holding, asker: ClientIdentity) -> bool:
        """Whether the queue still belongs to the holder: the lock has not expired, and the client is alive or has stopped while
        tasks ran.
        """
        if self.now - holding.since > holding.life:
            return False
        if holding.lingering:
            return holding.client.owner != asker.owner
        return holding.client.client_id in self.alive

    def renew(self, tokens: Iterable[LockToken]) -> list[LockToken]:
        gone: list[LockToken] = []
        now = self.instant()
        for token in tokens:
            after = rules.renew(self.locks.get(token.queue), token, now)
            if after is None:
                gone.append(token)
                continue
            if after.epoch != self.highest[token.queue]:
                self.fail(
                    f"{token.queue} was renewed under epoch {after.epoch}, but {self.highest[token.queue]} was granted since"
                )
            holding = self.holdings.get(token.queue)
            if holding is None:
                self.fail(f"{token.queue} was renewed for {token.client_id}, although it was free")
            else:
                holding.since = self.now
            self._put(token.queue, after)
        return gone

    def unlock(self, tokens: Iterable[LockToken], linger: float) -> None:
        now = self.instant()
        for token in tokens:
            after = rules.unlock(self.locks.get(token.queue), token, now, linger)
            if after is None:
                continue
            holding = self.holdings.get(token.queue)
            if holding is None:
                self.fail(f"{token.queue} was unlocked by {token.client_id}, although it was free")
            elif linger:
                left = max(0.0, holding.life - (self.now - holding.since))
                self.holdings[token.queue] = Holding(holding.client, self.now, min(left, linger), lingering=True)
            else:
                self.ledger.unlocked(token)
                del self.holdings[token.queue]
            self._put(token.queue, after)

    def stale(self, tokens: Iterable[LockToken]) -> list[LockToken]:
        return [token for token in tokens if not self.check(token)]

    def check(self, token: LockToken) -> bool:
        leader = queue_token(token)
        return rules.is_held(self.locks.get(leader.queue), leader)

    def offsets(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int]:
        known = self.group_offsets
        return {queue: known[queue] for queue in queues if queue in known}

    def commit(self, offsets: Mapping[LockToken, int]) -> None:
        for token in offsets:
            self.require_current(token)
        for token, offset in offsets.items():
            self.accepted(token)
            self.forward(token.queue, offset)
        if self.keys is not None:
            self.keys.moved(offsets)

    def require_current(self, token: LockToken) -> None:
        leader = queue_token(token)
        if not rules.is_current(self.locks.get(leader.queue), leader):
            raise LockError(LockCondition.LOST, f"{token.queue} was lost by {token.client_id}")

    def accepted(self, token: LockToken) -> None:
        """A change under ``token`` was accepted. Fail if the queue was granted under a later epoch."""
        highest = self.highest[queue_token(token).queue]
        if token.epoch < highest:
            self.fail(f"{token.queue}: a change was accepted under epoch {token.epoch}, although {highest} was granted before")

    def forward(self, queue: MessageQueue, offset: int) -> None:
        known = self.group_offsets.get(queue)
        if known is not None and known >= offset:
            return
        self.changes += 1
        self.group_offsets[queue] = offset
        if offset > self.ledger.processed.get(queue, 0):
            self.fail(
                f"{queue}: the group is at {offset}, but only messages below {self.ledger.processed.get(queue, 0)} are processed"
            )
        if self.lots is not None and is_parked(queue):
            self.lots.passed(queue, known or 0)
        self.history.append({"event": "offset", "group": GROUP, "queue": str(queue), "offset": offset})

    def _put(self, queue: MessageQueue, lock: QueueLock) -> None:
        self.locks[queue] = lock
        self.changes += 1

    def _number(self) -> int:
        self.numbers += 1
        return self.numbers


class Ledger:
    """Checks the messages that come out of each queue: their order, their repeats, and the epochs under which they come out.

    ``processed``: all messages below this offset came out since the last seek. ``exact``: no message may come out twice. If not
    ``exact`` but ``strict``, an owner must not repeat messages below the group's offset.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.exact = True
        #: False if two runs use one checkpoint, because one run may not know that the other has committed a batch.
        self.strict = True
        self.processed: dict[MessageQueue, int] = dict.fromkeys(world.queues, 0)
        #: All messages below this offset came out at some time, or were skipped by a seek.
        self.seen: dict[MessageQueue, int] = dict.fromkeys(world.queues, 0)
        #: Messages that come out under this epoch or an earlier one were planned before the last seek.
        self.before_seek: dict[MessageQueue, int] = {}
        #: The messages whose last outcome since the last seek is that a listener accepted them, and those that were decided and below a
        #: progress then.
        self.accepted: dict[MessageQueue, set[int]] = {}
        self.finished: dict[MessageQueue, set[int]] = {}
        #: The messages that an operator has dropped since the last seek.
        self.dropped: dict[MessageQueue, set[int]] = {}
        #: Whether a task works on a queue under a token.
        self.at_work: Callable[[LockToken], bool] = lambda token: False
        self.repeats = 0

    def add(self, queue: MessageQueue) -> None:
        self.processed[queue] = self.seen[queue] = 0

    def sought(self, queue: MessageQueue, offset: int) -> None:
        if offset > self.processed[queue]:
            skipped = {"event": "loss", "queue": str(queue), "begin": self.processed[queue], "end": offset}
            self.world.history.append(skipped)
        self.processed[queue] = offset
        self.seen[queue] = max(offset, self.seen[queue])
        self.before_seek[queue] = self.world.numbers

    def lot_sought(self, lot: MessageQueue, offset: int) -> None:
        """Record a seek of a parking lot's queue. The group is now at ``offset`` in the lot."""
        self.processed[lot] = offset
        self.seen[lot] = max(offset, self.seen.get(lot, 0))
        self.before_seek[lot] = self.world.numbers

    def called(self, queue: MessageQueue, begin: int, end: int) -> None:
        """A listener is called with messages. Fail if it never got their predecessor."""
        if begin > self.seen[queue]:
            self.world.fail(f"{queue}: the listener gets {begin} before {self.seen[queue]}")
        self.seen[queue] = max(end, self.seen[queue])

    def accepts(self, token: LockToken, offsets: Iterable[int]) -> None:
        """A listener has accepted messages. What it does after its lock was lost does not count."""
        if self.world.check(token):
            self.accepted.setdefault(token.queue, set()).update(offsets)

    def drops(self, token: LockToken, offsets: Iterable[int]) -> None:
        """A task has carried out an operator's order to drop messages."""
        if self.world.check(token):
            self.dropped.setdefault(token.queue, set()).update(offsets)

    def undecided(self, token: LockToken, offsets: Iterable[int]) -> None:
        """A listener gets messages again, or they are parked, in a repeat of a range."""
        if self.world.check(token):
            self.accepted.get(token.queue, set()).difference_update(offsets)

    def skipped(self, token: LockToken, offset: int) -> None:
        """A task does not give a message to the listener because of the progress. Fail if no listener has accepted the message."""
        if self.world.check(token) and offset not in self.accepted.get(token.queue, ()):
            self.world.fail(f"{token.queue}: {offset} is skipped, but no listener has accepted it since the last seek (K7)")

    def progress_recorded(self, queue: MessageQueue, offset: int, parked: Collection[int]) -> None:
        """Record that all messages below ``offset`` are decided, except those that are ``parked``."""
        decided = self.accepted.get(queue, set()) | self.world.letters.get(queue, set()) | self.dropped.get(queue, set())
        below = {one for one in decided if one < offset}
        self.finished.setdefault(queue, set()).update(below.difference(parked))

    def progress_forgotten(self, queue: MessageQueue) -> None:
        self.accepted.pop(queue, None)
        self.dropped.pop(queue, None)
        self.finished.pop(queue, None)

    def out(self, query: str, token: LockToken, span: OffsetRange) -> None:
        """Messages came out. Fail if one comes out before its predecessor or, if ``exact``, a second time."""
        queue = token.queue
        if is_parked(queue):
            self.processed.setdefault(queue, 0)
        seen = self.seen.setdefault(queue, 0) if is_parked(queue) else self.seen[queue]
        if span.begin > seen:
            self.world.fail(f"{queue}: {query} delivers from {span.begin} on, but {seen} never came out")
        self.seen[queue] = max(span.end, seen)
        if token.epoch <= self.before_seek.get(queue, 0):
            return
        at = self.processed[queue]
        if span.begin > at:
            self.world.fail(f"{queue}: {query} delivers from {span.begin} on, but {at} has not come out yet")
        if span.begin < at:
            group = self.world.group_offsets.get(queue, 0)
            if self.strict and token.epoch == self.world.highest[queue_token(token).queue] and span.begin < group:
                self.world.fail(f"{queue}: {query} delivers {span.begin} again, although the group is already at {group}")
            if self.exact:
                self.world.fail(
                    f"{queue}: {query} delivers {span.begin} to {span.end - 1} again, although all up to {at - 1} came out before"
                )
            self.repeats += min(span.end, at) - span.begin
        if span.end > at:
            self.processed[queue] = span.end
            if is_parked(queue):
                return
            rows = [[str(queue), offset, *message(queue, offset)] for offset in range(at, span.end)]
            self.world.history.append({"event": "deliver", "lane": str(queue), "rows": rows})

    def unlocked(self, token: LockToken) -> None:
        """A queue became free without a delay. Fail if a task works on it."""
        if self.at_work(token):
            self.world.fail(f"{token.queue} was unlocked by {token.client_id} while a task works on it")


def message(queue: MessageQueue, offset: int) -> tuple[str, str]:
    """Return the key and the id of the message at ``offset``."""
    return f"{queue.queue_id}.{offset % 3}", f"{queue.queue_id}:{offset}"
