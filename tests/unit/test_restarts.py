"""Every restart of a query whose last batch is logged and not committed by Spark: the table in ARCHITECTURE.md, row by row."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.ownership import lock as rules
from orderedmq.ownership.lock import ClientIdentity, Instant, LockToken, QueueLock
from orderedmq.ownership.offsets import Checkpoint
from orderedmq.ownership.owner import Lock, Owner, Policy

QUEUE = MessageQueue("orders", "embedded", 0)
ME, AGAIN, OTHER = ClientIdentity("me", "me@1"), ClientIdentity("me", "me@2"), ClientIdentity("other", "other@1")
S, E = 10, 20


class Store:
    """The lock and the offset of one queue in one group."""

    def __init__(self) -> None:
        self.now, self.epoch = 0.0, 0
        self.lock: QueueLock | None = None
        self.group: int | None = S
        self.alive: set[str] = set()

    def instant(self) -> Instant:
        return Instant("boot", self.now)

    def take(self, client: ClientIdentity) -> LockToken | None:
        self.epoch += 1
        self.alive.add(client.client_id)
        lock = rules.grant(self.lock, client, self.instant(), next_epoch=self.epoch, alive=self.alive.__contains__)
        if lock is None:
            return None
        self.lock = lock
        return rules.token_of(lock, "g", QUEUE)

    def give_back(self, token: LockToken | None) -> None:
        assert token is not None
        self.lock = rules.unlock(self.lock, token, self.instant()) or self.lock


@dataclass(frozen=True)
class Case:
    """What happened to the lock after the batch was logged, and the result of a restart."""

    name: str
    #: Steps: back = my run gave the lock back, die = my process died, expire = the lock expired, other = another query had the
    #: lock and gave it back, held = another query holds it, mine = after another query, my query had it again and gave it back,
    #: seek = the lineage was cleared, reset = my run reset the group's offset and was killed before its next offset was logged,
    #: former = my driver died but my process still has the lock, ended = that process also ended, release = an operator removed the
    #: lock.
    steps: tuple[str, ...]
    repeats: bool
    granted: bool = True


CASES = [
    Case("my dead process's still", ("die",), True),
    Case("given back", ("back",), True),
    Case("expired and nobody took it", ("expire",), True),
    Case("given back and another had it", ("back", "other"), False),
    Case("dead and another had it", ("die", "other"), False),
    Case("expired and another had it", ("expire", "other"), False),
    Case("mine again after another", ("back", "other", "mine"), False),
    Case("another's now", ("back", "held"), False, granted=False),
    Case("a former run's, which has ended meanwhile", ("former", "ended"), True),
    Case("a former run's, whose lock expired", ("former", "expire"), True),
    Case("a former run's, whose lock another took", ("former", "expire", "other"), False),
    Case("a former run's, released by an operator", ("former", "release"), True),
    Case("sought", ("back", "seek"), False),
    Case("reset", ("reset", "die"), False),
]


def happen(store: Store, token: LockToken, steps: tuple[str, ...]) -> None:
    for step in steps:
        match step:
            case "back":
                store.give_back(token)
                store.alive.discard(ME.client_id)
            case "die":
                store.alive.discard(ME.client_id)
            case "expire":
                store.now += rules.LOCK_LIFE + 1
                store.alive.discard(ME.client_id)
            case "other":
                store.give_back(store.take(OTHER))
                store.alive.discard(OTHER.client_id)
            case "held":
                assert store.take(OTHER) is not None
            case "mine":
                store.give_back(store.take(ClientIdentity("me", "me@between")))
            case "former":
                # A restart that cannot get the queue now is refused. The query does not continue without the queue.
                refusal = rules.refusal(store.lock, QUEUE, store.instant(), True) if store.lock else None
                assert store.take(AGAIN) is None
                assert refusal is not None
                for shared in (False, True):
                    owner = Owner("me", policy=Policy.HAND_OVER if shared else Policy.REFUSE)
                    assert owner.indispensable(Lock((QUEUE,), not shared, repeating=True), [refusal]) == [refusal]
            case "ended":
                store.alive.discard(ME.client_id)
            case "release":
                assert store.lock is not None
                store.epoch += 1
                store.lock = rules.released(store.lock, store.epoch)
            case "seek":
                store.epoch += 1
                store.lock = rules.sought(store.epoch, store.instant())
            case "reset":
                assert store.lock is not None
                store.epoch += 1
                store.lock = rules.restarted(store.lock, store.epoch)


@pytest.mark.holds("other sinks", "shared other sinks")
@pytest.mark.parametrize("shared", [False, True], ids=["exclusive", "shared"])
@pytest.mark.parametrize("entered", [False, True], ids=["continued", "entered"])
@pytest.mark.parametrize(
    "group", [S - 3, S, S + 4, E, E + 5, None], ids=["below", "at", "inside", "published", "after", "deleted"]
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_restart_repeats_the_batch_continues_or_follows_the_group(
    case: Case, group: int | None, entered: bool, shared: bool
) -> None:
    store = Store()
    first = store.take(ME)
    assert first is not None
    before = {QUEUE: first.tenure}
    start = Checkpoint("me", {} if entered else {QUEUE: S}, {}, {} if entered else before)
    end = Checkpoint("me", {QUEUE: E}, {QUEUE: S} if entered else {}, before)
    happen(store, first, case.steps)
    store.group = group

    owner = Owner("me", policy=Policy.HAND_OVER if shared else Policy.REFUSE)
    token = store.take(AGAIN)
    assert (token is not None) == case.granted
    if token is not None:
        owner.locked([token])
    known = {} if group is None else {QUEUE: group}
    owner.replay(start, end, known)
    # After the group's offsets were deleted, nothing shows that another query could have processed the batch.
    repeats = case.repeats or (group is None and token is not None)
    assert owner.in_flight() == ({QUEUE: OffsetRange(S, E)} if repeats else {})
    owner._check()
    if token is None:
        # A shared query requests the lock again at its next boundary. An exclusive query is refused before this point.
        assert owner.boundary(end, [QUEUE]) == [Lock((QUEUE,), all_or_none=not shared)]
        return
    owner.boundary(end, [QUEUE])
    owner.enter(end, known, {QUEUE: 0})
    assert owner.owned[QUEUE].position == (E if repeats else group)
    # If the queue does not resume at the checkpoint's end, the next logged offset records where it was entered.
    assert any(owned.entered for owned in owner.owned.values()) == (not repeats and group != E)
    owner._check()


@pytest.mark.parametrize("moved_to", [None, S, E - 1, E, E + 7])
@pytest.mark.parametrize("group", [S, E, E + 5, None], ids=["at", "published", "after", "deleted"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_restart_in_another_group_follows_the_former_one_unless_the_group_is_further(
    case: Case, group: int | None, moved_to: int | None
) -> None:
    store = Store()
    first = store.take(ME)
    assert first is not None
    tenures = {QUEUE: first.tenure}
    start, end = (replace(Checkpoint("me", {QUEUE: at}, {}, tenures), group="g") for at in (S, E))
    happen(store, first, case.steps)
    former = Owner("me", group="g")
    token = store.take(AGAIN)
    if token is not None:
        former.locked([token])
    kept = token is not None and former.unbroken(former.owned[QUEUE], end, group, E - 1)
    left = {} if kept or group is None else {QUEUE: group}

    owner = Owner("me", group="h")
    owner.locked([LockToken("h", QUEUE, "me", "me@2", 70, 70)])
    known = {} if moved_to is None else {QUEUE: moved_to}
    owner.replay(start, end, known, left)
    repeats = (case.repeats or group is None) and (moved_to is None or moved_to < E)
    assert owner.in_flight() == ({QUEUE: OffsetRange(S, E)} if repeats else {})
    owner.boundary(end, [QUEUE])
    owner.enter(end, known, {QUEUE: 0}, left)
    assert owner.owned[QUEUE].position == (E if repeats else max(left.get(QUEUE, 0), moved_to or 0))
    owner._check()
