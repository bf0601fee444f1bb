"""Owner: rule by rule, and as a state machine of two queries of one group with crashes, pauses, take-overs and zombies.

The machine drives the real Owner and the real lock rules over a broker of plain dicts, in the order in which the source calls
them: boundary, lock, enter, plan, publish, Spark's commit. After every step it checks that each queue's messages are published as
0, 1, 2, …, once and in order (with a foreign sink: that no message is first delivered before its predecessor). It also checks that the
group's offset never goes back and never passes the processed messages. The same machine must detect planted bugs. The module is
long because half of it, the machine, is of no use elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from orderedmq.errors import OffsetError
from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.ownership import lock as rules
from orderedmq.ownership.lock import UNLOCK_DELAY, ClientIdentity, Instant, LockToken, QueueLock, Refusal
from orderedmq.ownership.offsets import Checkpoint, OffsetMap, ranges
from orderedmq.ownership.owned_queue import Owned
from orderedmq.ownership.owner import NO_OFFSETS, Behind, Commit, Lock, Owner, Policy
from orderedmq.parking.rules import lot_token, parked_queue

Q0, Q1 = QUEUES = tuple(MessageQueue("orders", "embedded", number) for number in range(2))
Ranges = dict[MessageQueue, OffsetRange]

# -- rule by rule -----------------------------------------------------------------------------------------------------------------


def token(queue: MessageQueue, epoch: int = 1, tenure: int | None = None) -> LockToken:
    return LockToken("g", queue, "me", "me@1", epoch, epoch if tenure is None else tenure)


def lot(queue: MessageQueue) -> MessageQueue:
    return parked_queue("g", queue)


def owner_of(*tokens: LockToken) -> Owner:
    owner = Owner("me")
    owner.locked(tokens)
    return owner


def logged(next_: Mapping[MessageQueue, int], gen: Mapping[MessageQueue, int]) -> Checkpoint:
    return Checkpoint("me", next_, {}, gen, {})


def test_the_first_boundary_asks_for_every_queue_in_order_all_or_none():
    assert Owner("me").boundary(Checkpoint(), [Q1, Q0]) == [Lock((Q0, Q1), all_or_none=True)]


def test_a_new_queue_is_asked_for_at_the_next_boundary():
    assert owner_of(token(Q0)).boundary(Checkpoint(), QUEUES) == [Lock((Q1,), all_or_none=True)]


def test_a_queue_that_nobody_knows_is_entered_at_its_beginning_and_the_group_learns_it():
    owner = owner_of(token(Q0))
    assert owner.unplaced().queues == (Q0,)
    commit, behind, left = owner.enter(Checkpoint(), {}, {Q0: 7})
    assert (commit, behind, left) == (Commit({token(Q0): 7}), [], {})
    assert owner.unplaced().queues == ()
    owner.backlog({Q0: 9})
    assert owner.plan({Q0: 2}, {}) == Checkpoint("me", {Q0: 9}, {Q0: 7}, {Q0: 1})


def test_a_queue_of_another_owners_making_is_entered_at_the_groups_offset():
    owner = owner_of(token(Q0))
    assert owner.enter(Checkpoint(), {Q0: 5}, {}) == (None, [], {})
    assert owner.backlog({Q0: 9}) == {Q0: OffsetRange(5, 9)}


def test_an_unbroken_tenure_goes_on_at_the_checkpoint_and_tells_the_group():
    owner = owner_of(token(Q0, 4, 2))
    assert owner.enter(logged({Q0: 8}, {Q0: 2}), {Q0: 5}, {}) == (Commit({token(Q0, 4, 2): 8}), [], {})
    assert not any(owned.entered for owned in owner.owned.values())
    assert owner.plan({}, {}).entered == {}


def test_a_broken_tenure_leaves_the_checkpoint_for_the_groups_offset_and_says_so():
    owner = owner_of(token(Q0, 4, 4))
    assert owner.enter(logged({Q0: 8}, {Q0: 2}), {Q0: 11}, {}) == (None, [], {Q0: (8, 11)})
    assert owner.plan({}, {}).entered == {Q0: 11}


def test_after_a_reset_the_next_offset_records_the_new_tenure_also_of_a_companion():
    owner = Owner("me", companion=lot_token)
    owner.locked([token(Q0, 4, 2), token(Q1, 5, 2)])
    owner.enter(logged({Q0: 8, Q1: 8}, {Q0: 2, Q1: 2}), {Q0: 8, Q1: 8}, dict.fromkeys(map(lot, QUEUES), 0))
    owner.restarted([token(Q0, 6)])
    owner.skip(Q0, 3)
    assert owner.plan({}, {}).gen == {Q0: 6, lot(Q0): 6, Q1: 2, lot(Q1): 2}
    assert owner.tokens() == [token(Q0, 6), token(Q1, 5, 2)]
    owner._check()


def test_a_checkpoint_behind_the_group_is_followed_in_an_unbroken_tenure_and_said():
    owner = owner_of(token(Q0, 4, 2))
    assert owner.enter(logged({Q0: 3}, {Q0: 2}), {Q0: 5}, {}) == (None, [Behind(Q0, 3, 5)], {})
    assert owner.backlog({Q0: 9}) == {Q0: OffsetRange(3, 9)}


def test_a_checkpoint_goes_on_where_the_group_knows_nothing():
    owner = owner_of(token(Q0, 4, 4))
    assert owner.enter(logged({Q0: 3}, {Q0: 2}), {}, {Q0: 0}) == (Commit({token(Q0, 4, 4): 3}), [], {})


def test_the_groups_offset_moves_only_once_spark_has_committed_the_batch():
    owner = owner_of(token(Q0))
    owner.enter(Checkpoint(), {Q0: 0}, {})
    owner.backlog({Q0: 5})
    end = owner.plan({Q0: 3}, {})
    assert owner.in_flight() == {Q0: OffsetRange(0, 3)}
    assert owner.boundary(end, [Q0]) == [Commit({token(Q0): 3})]
    assert owner.in_flight() == {}
    assert owner.boundary(end, [Q0]) == []


def test_a_plan_that_spark_did_not_run_is_planned_again():
    owner = owner_of(token(Q0))
    owner.enter(Checkpoint(), {Q0: 0}, {})
    owner.backlog({Q0: 5})
    owner.plan({Q0: 3}, {})
    assert owner.boundary(Checkpoint(), [Q0]) == []
    assert owner.backlog({Q0: 6}) == {Q0: OffsetRange(0, 6)}
    assert owner.plan({Q0: 6}, {}) == Checkpoint("me", {Q0: 6}, {Q0: 0}, {Q0: 1})


def test_a_plan_that_spark_did_not_run_is_not_taken_for_an_earlier_one_with_the_same_end():
    owner = owner_of(token(Q0, 4, 4))
    start = logged({Q0: 5}, {Q0: 2})
    owner.enter(start, {Q0: 3}, {})
    owner.backlog({Q0: 5})
    assert owner.plan({Q0: 2}, {}).next == start.next
    assert owner.boundary(start, [Q0]) == []
    assert owner.backlog({Q0: 5}) == {Q0: OffsetRange(3, 5)}


def test_a_queue_stays_entered_until_a_batch_that_says_so_has_run():
    owner = owner_of(token(Q0), token(Q1))
    owner.enter(Checkpoint(), {Q0: 4, Q1: 2}, {})
    owner.backlog({Q0: 4, Q1: 3})
    end = owner.plan({Q1: 1}, {})
    assert (end.next, end.entered) == ({Q0: 4, Q1: 3}, {Q0: 4, Q1: 2})
    owner.boundary(end, QUEUES)
    assert not any(owned.entered for owned in owner.owned.values())


def test_is_planned_recognises_what_was_planned_and_nothing_else():
    owner = owner_of(token(Q0))
    owner.enter(Checkpoint(), {Q0: 0}, {})
    owner.backlog({Q0: 5})
    end = owner.plan({Q0: 3}, {})
    assert owner.is_planned(Checkpoint.from_spark(end.to_spark()))
    assert not owner.is_planned(logged({Q0: 4}, {Q0: 1}))


def test_a_replay_repeats_queues_of_an_unbroken_tenure_and_leaves_the_others():
    start = logged({Q0: 2, Q1: 2}, {Q0: 1, Q1: 2})
    end = logged({Q0: 5, Q1: 6}, {Q0: 1, Q1: 2})
    owner = owner_of(token(Q0, 7, 1), token(Q1, 8, 8))
    owner.replay(start, end, {Q0: 2, Q1: 2})
    assert owner.in_flight() == {Q0: OffsetRange(2, 5)}
    assert owner.is_planned(end)
    assert owner.unplaced().queues == (Q1,)
    assert owner.boundary(end, QUEUES) == [Commit({token(Q0, 7, 1): 5})]
    assert owner.enter(end, {Q0: 5, Q1: 9}, {})[2] == {Q1: (6, 9)}


def test_a_replay_of_a_batch_that_only_changed_keys_reads_nothing_and_goes_on():
    owner = owner_of(token(Q0, 7, 1))
    end = logged({Q0: 5}, {Q0: 1})
    owner.replay(end, end, {Q0: 5})
    assert owner.in_flight() == {}
    owner._check()
    assert owner.unplaced().queues == ()
    assert owner.backlog({Q0: 6}) == {Q0: OffsetRange(5, 6)}


def test_a_skip_enters_the_queue_behind_what_is_lost():
    owner = owner_of(token(Q0))
    owner.enter(Checkpoint(), {Q0: 0}, {})
    owner.backlog({Q0: 9})
    owner.skip(Q0, 4)
    assert owner.backlog({Q0: 9}) == {Q0: OffsetRange(4, 9)}
    assert owner.plan({Q0: 5}, {}).entered == {Q0: 4}


def without_lineage(policy: Policy, reset: int = 0) -> Owner:
    """An owner that has just been granted Q0 by a broker that keeps no lineage. ``reset``: the epoch of the queue's last reset."""
    owner = Owner("me", policy=policy, lineage=False)
    owner.locked([replace(token(Q0, 99), reset=reset)])
    return owner


#: The group's offset, and where an exclusive and a shared query then resume Q0 if their checkpoint is at 5.
@pytest.mark.parametrize(
    ("at_group", "exclusive", "shared"),
    [
        pytest.param(2, 5, 2, id="the last commit was forgotten, or did not come to be"),
        pytest.param(5, 5, 5, id="the checkpoint's"),
        pytest.param(7, 7, 7, id="another went on"),
        pytest.param(None, 5, 5, id="forgotten"),
    ],
)
def test_without_lineage_an_exclusive_query_believes_its_checkpoint_until_another_has_moved_the_group(
    at_group: int | None, exclusive: int, shared: int
) -> None:
    group = {} if at_group is None else {Q0: at_group}
    for policy, position in ((Policy.REFUSE, exclusive), (Policy.HAND_OVER, shared)):
        owner = without_lineage(policy)
        owner.enter(logged({Q0: 5}, {Q0: 4}), group, {})
        assert owner.owned[Q0].position == position


@pytest.mark.parametrize(("reset", "position"), [(3, 5), (4, 3), (50, 3)], ids=["before", "in the same microsecond", "since"])
def test_without_lineage_a_queue_that_was_reset_since_the_checkpoint_follows_the_group(reset: int, position: int) -> None:
    start, end = logged({Q0: 2}, {Q0: 4}), logged({Q0: 5}, {Q0: 4})
    owner = without_lineage(Policy.REFUSE, reset)
    owner.enter(end, {Q0: 3}, {})
    assert owner.owned[Q0].position == position
    owner = without_lineage(Policy.REFUSE, reset)
    owner.replay(start, end, {Q0: 3})
    assert owner.in_flight() == ({Q0: OffsetRange(2, 5)} if position == 5 else {})


def test_without_lineage_an_exclusive_query_repeats_its_batch_unless_another_has_done_all_of_it() -> None:
    start, end = logged({Q0: 2}, {Q0: 4}), logged({Q0: 5}, {Q0: 4})
    whole = {Q0: OffsetRange(2, 5)}
    for at_group, exclusive, shared in (
        (1, whole, {}),
        (2, whole, {}),
        (4, whole, {}),
        (5, {}, {}),
        (9, {}, {}),
        (None, whole, whole),
    ):
        group = {} if at_group is None else {Q0: at_group}
        for policy, repeated in ((Policy.REFUSE, exclusive), (Policy.HAND_OVER, shared)):
            owner = without_lineage(policy)
            owner.replay(start, end, group)
            assert owner.in_flight() == repeated
            owner.boundary(end, QUEUES)
            owner.enter(end, group, {})
            assert owner.owned[Q0].position == (5 if repeated or at_group is None else at_group)


@pytest.mark.parametrize("former", ["other", None])
@pytest.mark.parametrize("lineage", [True, False], ids=["embedded", "rocketmq"])
@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize(("at_group", "position"), [(None, 5), (2, 5), (5, 5), (7, 7)])
def test_a_checkpoint_of_another_group_is_followed_unless_the_group_is_beyond_it(
    at_group: int | None, position: int, policy: Policy, lineage: bool, former: str | None
) -> None:
    group = {} if at_group is None else {Q0: at_group}
    start, end = (replace(logged({Q0: at}, {Q0: 4}), group=former) for at in (2, 5))

    def owner() -> Owner:
        owner = Owner("me", group="g", policy=policy, lineage=lineage)
        owner.locked([replace(token(Q0, 99), reset=50)])
        return owner

    placed = owner()
    _, behind, _ = placed.enter(end, group, {})
    assert (placed.owned[Q0].position, behind) == (position, [])
    assert placed.plan({}, {}).group == "g"
    repeating = owner()
    repeating.replay(start, end, group)
    # A part of a batch is never repeated.
    assert repeating.in_flight() == ({} if at_group is not None and at_group >= 5 else {Q0: OffsetRange(2, 5)})


@pytest.mark.parametrize(("at_group", "position"), [(None, 3), (2, 3), (4, 4)])
def test_a_tenure_that_is_broken_in_the_checkpoints_group_is_left_for_the_higher_of_both_groups_offsets(
    at_group: int | None, position: int
) -> None:
    group = {} if at_group is None else {Q0: at_group}
    start, end = (replace(logged({Q0: at}, {Q0: 4}), group="former") for at in (2, 5))
    owner = Owner("me", group="g")
    owner.locked([token(Q0, 99)])
    owner.replay(start, end, group, {Q0: 3})
    assert owner.in_flight() == {}
    commit, _, left = owner.enter(end, group, {}, {Q0: 3})
    assert (owner.owned[Q0].position, left) == (position, {Q0: (5, position)})
    assert (commit is None) == (at_group == 4), "the group must learn where the queue begins"


def test_a_checkpoint_of_a_group_is_followed_without_one() -> None:
    owner = Owner("me")
    owner.assume([Q0])
    owner.enter(replace(logged({Q0: 5}, {Q0: 4}), group="g"), {}, {})
    assert owner.plan({}, {}) == logged({Q0: 5}, {})


def test_a_shared_query_repeats_no_batch_without_what_a_former_run_of_it_holds() -> None:
    mine = Refusal(Q0, "me", "me@former", True, False, 40.0)
    others = Refusal(Q1, "other", "other@1", True, False, 40.0)
    for asked, lineage, missed in (
        (Lock(QUEUES, all_or_none=False, repeating=True), True, [mine]),
        (Lock(QUEUES, all_or_none=False), True, []),
        (Lock(QUEUES, all_or_none=True, repeating=True), True, [mine, others]),
        (Lock(QUEUES, all_or_none=True), True, [mine, others]),
        # Without lineage, the query resumes at the group's offset in either case.
        (Lock(QUEUES, all_or_none=False, repeating=True), False, []),
    ):
        owner = Owner("me", policy=Policy.REFUSE if asked.all_or_none else Policy.HAND_OVER, lineage=lineage)
        assert owner.indispensable(asked, [mine, others]) == missed


def test_stop_keeps_the_locks_of_what_is_in_flight_unless_it_was_published():
    for at_group, idle, busy in (({}, (), (token(Q0),)), ({Q0: 2}, (), (token(Q0),)), ({Q0: 3}, (token(Q0),), ())):
        owner = owner_of(token(Q0))
        owner.enter(Checkpoint(), {Q0: 0}, {})
        owner.backlog({Q0: 5})
        owner.plan({Q0: 3}, {})
        unlock = owner.stop(at_group)
        assert (unlock.idle, unlock.in_flight) == (idle, busy)


def test_without_a_group_there_is_nothing_to_commit_or_to_give_back():
    owner = Owner("me")
    owner.assume(QUEUES)
    assert owner.enter(logged({Q0: 3}, {}), {}, {Q1: 1}) == (None, [], {})
    owner.backlog({Q0: 5, Q1: 4})
    end = owner.plan({Q0: 2, Q1: 1}, {})
    assert (end.next, end.entered, end.gen) == ({Q0: 5, Q1: 2}, {Q1: 1}, {})
    assert owner.boundary(end, QUEUES) == []
    assert owner.stop({}).idle == ()


def test_without_a_group_a_replay_repeats_everything():
    owner = Owner("me")
    owner.assume(QUEUES)
    start, end = logged({Q0: 1, Q1: 1}, {}), logged({Q0: 4, Q1: 1}, {})
    owner.replay(start, end, {})
    assert owner.in_flight() == {Q0: OffsetRange(1, 4)}


# -- two queries ------------------------------------------------------------------------------------------------------------------


class World:
    """A broker of plain dicts: locks under the real rules, group offsets, and a sink with its records."""

    def __init__(self, *, atomic: bool, fence_publish: bool = True, remember: bool = True) -> None:
        self.atomic, self.fence_publish, self.remember = atomic, fence_publish, remember
        self.now, self.epoch = 0.0, 0
        self.alive: set[str] = set()
        self.locks: dict[MessageQueue, QueueLock] = {}
        self.offsets: dict[MessageQueue, int] = {}
        self.ends = dict.fromkeys(QUEUES, 2)
        self.batches: dict[tuple[str, int], Ranges] = {}
        self.out: dict[MessageQueue, list[int]] = {queue: [] for queue in QUEUES}
        self.zombies: list[tuple[str, int, Ranges, list[LockToken]]] = []

    def instant(self) -> Instant:
        return Instant("boot", self.now)

    def lock(self, client: ClientIdentity, queues: Iterable[MessageQueue], *, all_or_none: bool) -> list[LockToken] | None:
        tokens = []
        for queue in queues:
            self.epoch += 1
            lock = rules.grant(
                self.locks.get(queue), client, self.instant(), next_epoch=self.epoch, alive=lambda one: one in self.alive
            )
            if lock is not None:
                self.locks[queue] = lock
                tokens.append(rules.token_of(lock, "g", queue))
            elif all_or_none:
                self.unlock(tokens)
                return None
        return tokens

    def unlock(self, tokens: Iterable[LockToken], linger: float = 0.0) -> None:
        for token in tokens:
            lock = rules.unlock(self.locks.get(token.queue), token, self.instant(), linger)
            if lock is not None:
                self.locks[token.queue] = lock

    def current(self, token: LockToken) -> bool:
        return rules.is_current(self.locks.get(token.queue), token)

    def commit(self, commit: Commit | None) -> list[MessageQueue]:
        """Commit, and return the queues whose locks are lost. The offsets of the other queues move."""
        lost = []
        for token, offset in commit.offsets.items() if commit else ():
            if not self.current(token):
                lost.append(token.queue)
            else:
                self.offsets[token.queue] = max(offset, self.offsets.get(token.queue, 0))
        return lost

    def publish(self, name: str, batch: int, spans: Ranges, tokens: Iterable[LockToken]) -> bool:
        if not self.atomic:
            for queue, span in spans.items():
                self.out[queue] += range(*span)
            return True
        known = self.batches.get((name, batch))
        if known is not None and self.remember:
            return all(known.get(queue) == span for queue, span in spans.items())
        if self.fence_publish and not all(self.current(token) for token in tokens):
            return False
        self.batches[name, batch] = spans
        for queue, span in spans.items():
            self.out[queue] += range(*span)
            self.offsets[queue] = max(span.end, self.offsets.get(queue, 0))
        return True

    def check(self) -> None:
        for queue, out in self.out.items():
            if self.atomic:
                assert out == list(range(len(out))), f"{queue}: published {out}"
                processed = len(out)
            else:
                processed = 0
                for number in out:
                    assert number <= processed, f"{queue}: delivered {out}"
                    processed = max(processed, number + 1)
            assert self.offsets.get(queue, 0) <= processed, (
                f"{queue}: the group's offset is {self.offsets[queue]}, but messages were processed only up to {processed}"
            )


class Query:
    """A streaming query: the contents of its checkpoint and, while it runs, its Owner, called as the source calls it."""

    def __init__(self, world: World, name: str, *, shared: bool, kind: type[Owner]) -> None:
        self.world, self.name, self.shared, self.kind = world, name, shared, kind
        self.log: list[Checkpoint] = []
        self.committed = 0
        self.runs = 0
        self.phase = "down"
        self.owner = kind(name)
        self.client = ClientIdentity(name, "")
        self.batch: tuple[str, int, Ranges, list[LockToken]] = (name, 0, {}, [])
        self.replayed = False

    @property
    def start(self) -> Checkpoint:
        return self.log[self.committed - 1] if self.committed else Checkpoint()

    def step(self, wanted: tuple[bool, bool], counts: tuple[int, int]) -> None:
        """Take this query's next step, without any disturbance."""
        match self.phase:
            case "down":
                self.begin()
            case "idle":
                self.boundary([queue for queue, yes in zip(QUEUES, wanted) if yes])
            case "bounded":
                self.plan(dict(zip(QUEUES, counts)))
            case "planned":
                if self.world.publish(*self.batch):
                    self.phase = "published"
                else:
                    self.stop()
            case "published":
                self.committed = len(self.log)
                self.phase = "idle"

    def begin(self) -> None:
        self.runs += 1
        self.client = ClientIdentity(self.name, f"{self.name}@{self.runs}")
        self.world.alive.add(self.client.client_id)
        self.owner = self.kind(self.name)
        self.phase = "idle"
        if len(self.log) == self.committed:
            return
        end = self.log[-1]
        tokens = self.world.lock(self.client, sorted(end.next), all_or_none=not self.shared)
        if tokens is None:
            self.die()
            return
        self.owner.locked(tokens)
        self.owner.replay(self.start, end, self.world.offsets)
        self._plan_is(self.owner.in_flight())
        self.replayed = True

    def boundary(self, wanted: list[MessageQueue]) -> None:
        actions = self.owner.boundary(self.start, QUEUES)
        for action in actions:
            if isinstance(action, Commit):
                self._lost(self.world.commit(action))
                if self.phase == "down":
                    return
                continue
            assert isinstance(action, Lock)
            queues = [queue for queue in action.queues if queue in wanted] if self.shared else action.queues
            tokens = self.world.lock(self.client, queues, all_or_none=not self.shared)
            if tokens is None:
                self.stop()
                return
            self.owner.locked(tokens)
        unplaced = self.owner.unplaced().queues
        known = {queue: self.world.offsets[queue] for queue in unplaced if queue in self.world.offsets}
        commit, _, _ = self.owner.enter(self.start, known, dict.fromkeys(unplaced, 0))
        assert not self.world.commit(commit), "a queue that was just locked must not be lost"
        self.phase = "bounded"

    def plan(self, counts: dict[MessageQueue, int]) -> None:
        backlog = self.owner.backlog(self.world.ends)
        counts = {queue: min(counts[queue], span.messages) for queue, span in backlog.items()}
        if not any(counts.values()):
            self.phase = "idle"
            return
        end = self.owner.plan(counts, {})
        spans = ranges(self.start, end)
        assert spans == {queue: OffsetRange(span.begin, span.begin + counts[queue]) for queue, span in sorted(backlog.items())}
        self.log.append(end)
        self._plan_is({queue: span for queue, span in spans.items() if span.messages})
        self.replayed = False

    def _plan_is(self, spans: Ranges) -> None:
        tokens = [token for queue in spans if (token := self.owner.owned[queue].token) is not None]
        self.batch = (self.name, len(self.log) - 1, spans, tokens)
        self.phase = "planned"

    def _lost(self, queues: list[MessageQueue]) -> None:
        if queues and not self.shared:
            self.stop()
        self.owner.drop(queues)

    def tokens(self) -> list[LockToken]:
        return [owned.token for owned in self.owner.owned.values() if owned.token is not None]

    def renew(self) -> None:
        lost = []
        for token in self.tokens():
            lock = rules.renew(self.world.locks.get(token.queue), token, self.world.instant())
            if lock is None:
                lost.append(token.queue)
            else:
                self.world.locks[token.queue] = lock
        self._lost(lost)

    def give_up(self, queue: MessageQueue) -> None:
        owned = self.owner.owned.get(queue)
        if owned is not None and owned.token is not None:
            self.world.unlock([owned.token])
            self.owner.drop([queue])

    def forget_plan(self) -> None:
        """Drop the planned batch, as when Spark ends without having run it."""
        self.log.pop()
        self.phase = "idle"

    def stop(self) -> None:
        if self.phase == "down":
            return
        unlock = self.owner.stop(self.world.offsets)
        self.world.unlock(unlock.idle)
        self.world.unlock(unlock.in_flight, UNLOCK_DELAY)
        self.die()

    def die(self) -> None:
        self.world.alive.discard(self.client.client_id)
        self.owner = self.kind(self.name)
        self.phase = "down"


NAMES = st.sampled_from("AB")
WANTED = st.sampled_from([(True, True), (True, False), (False, True)])
COUNTS = st.sampled_from([(1, 1), (2, 0), (0, 1), (2, 2), (0, 0)])


class Queries(RuleBasedStateMachine):
    """Two queries of one group. Subclasses choose the kind of queries and the rules that they break."""

    shared = False
    atomic = True
    broken: Mapping[str, bool] = {}
    kind: type[Owner] = Owner

    def __init__(self) -> None:
        super().__init__()
        self.world = World(atomic=self.atomic, **self.broken)
        self.queries = {name: Query(self.world, name, shared=self.shared, kind=self.kind) for name in "AB"}
        self.before = dict(self.world.offsets)

    @rule(name=NAMES, wanted=WANTED, counts=COUNTS, steps=st.integers(1, 6))
    def go_on(self, name, wanted, counts, steps):
        for _ in range(steps):
            self.queries[name].step(wanted, counts)

    @rule(name=NAMES, zombie=st.booleans(), delivered=st.integers(0, 2))
    def crash(self, name, zombie, delivered):
        query = self.queries[name]
        if query.phase == "planned" and zombie:
            self.world.zombies.append(query.batch)
        elif query.phase == "planned" and not self.atomic:
            _, _, spans, _ = query.batch
            part = {queue: OffsetRange(span.begin, min(span.end, span.begin + delivered)) for queue, span in spans.items()}
            self.world.publish(name, -1, part, ())
        query.die()

    @rule(name=NAMES)
    def stop(self, name):
        self.queries[name].stop()

    @rule(name=NAMES)
    def plan_again(self, name):
        query = self.queries[name]
        if query.phase == "planned" and not query.replayed:
            query.forget_plan()

    @precondition(lambda self: self.shared)
    @rule(name=NAMES, queue=st.sampled_from(QUEUES))
    def give_up(self, name, queue):
        if self.queries[name].phase == "bounded":
            self.queries[name].give_up(queue)

    @rule(seconds=st.sampled_from([61.0, 15.0]), renewing=st.sampled_from(["", "A", "B", "AB"]))
    def time_passes(self, seconds, renewing):
        """A query that does not renew its locks is paused."""
        self.world.now += seconds
        for name in renewing:
            if self.queries[name].phase != "down":
                self.queries[name].renew()

    @precondition(lambda self: self.world.zombies)
    @rule()
    def a_zombie_publishes(self):
        self.world.publish(*self.world.zombies.pop())

    @rule(queue=st.sampled_from(QUEUES), count=st.integers(1, 3))
    def messages_arrive(self, queue, count):
        self.world.ends[queue] += count

    @invariant()
    def messages_are_processed_once_in_order_and_offsets_follow(self):
        self.world.check()

    @invariant()
    def a_groups_offset_never_goes_back(self):
        for queue, offset in self.before.items():
            assert self.world.offsets[queue] >= offset
        self.before = dict(self.world.offsets)

    @invariant()
    def an_owners_books_are_in_order(self):
        for query in self.queries.values():
            query.owner._check()


def machine(**attributes: object) -> type[Queries]:
    return type("Queries", (Queries,), attributes)


def walk(kind: type[Queries], seed: int, steps: int = 60) -> None:
    """One random walk of the machine. It is cheaper than an example that Hypothesis can shrink, so many more can run."""
    random, queries = Random(seed), kind()
    for _ in range(steps):
        name = random.choice("AB")
        match random.choice("ggggggcsputtzm"):  # the number of a letter's occurrences is the weight of its event
            case "g":
                wanted = random.choice([(True, True), (True, False), (False, True)])
                queries.go_on(name, wanted, (random.randint(0, 2), random.randint(0, 2)), random.randint(1, 6))
            case "c":
                queries.crash(name, random.random() < 0.5, random.randint(0, 2))
            case "s":
                queries.stop(name)
            case "p":
                queries.plan_again(name)
            case "u" if queries.shared:
                queries.give_up(name, random.choice(QUEUES))
            case "t":
                queries.time_passes(random.choice([15.0, 61.0]), random.choice(["", "A", "B", "AB"]))
            case "z" if queries.world.zombies:
                queries.a_zombie_publishes()
            case "m":
                queries.messages_arrive(random.choice(QUEUES), random.randint(1, 3))
        queries.messages_are_processed_once_in_order_and_offsets_follow()
        queries.a_groups_offset_never_goes_back()
        queries.an_owners_books_are_in_order()


KINDS = pytest.mark.parametrize(
    ("shared", "atomic"),
    [(False, True), (False, False), (True, True), (True, False)],
    ids=["exclusive, atomic sink", "exclusive, foreign sink", "shared, atomic sink", "shared, foreign sink"],
)


@KINDS
def test_two_queries_of_a_group_process_every_queue_in_order(shared, atomic):
    how = settings(stateful_step_count=40)
    run_state_machine_as_test(machine(shared=shared, atomic=atomic), settings=how)


@pytest.mark.holds("no overtaking")
@KINDS
def test_two_queries_process_every_queue_in_order_in_many_random_walks(shared, atomic):
    kind = machine(shared=shared, atomic=atomic)
    for seed in range(400):
        walk(kind, seed)


class IgnoresTenure(Owner):
    """Believes, whenever it was the last holder, that no other query had the queue in between."""

    def unbroken(self, owned: Owned, logged: Checkpoint, at_group: int | None, own: int) -> bool:
        return owned.token is None or owned.token.tenure < owned.token.epoch


class FollowsTheCheckpoint(Owner):
    """Resumes where its checkpoint says even if another query has had the queue since, and repeats everything in a replay."""

    def unbroken(self, owned: Owned, logged: Checkpoint, at_group: int | None, own: int) -> bool:
        return True


class ReplaysEverything(Owner):
    """Repeats a logged batch without checking which queries have had its queues since."""

    def replay(self, start: Checkpoint, end: Checkpoint, group: OffsetMap, former: OffsetMap = NO_OFFSETS) -> None:
        self.unbroken = lambda *_: True  # type: ignore[method-assign]
        try:
            super().replay(start, end, group, former)
        finally:
            del self.unbroken


class CommitsWhatIsPlanned(Owner):
    """Commits the offsets of a batch that Spark has not committed."""

    def enter(self, start, group, beginnings, former=NO_OFFSETS):
        _, behind, left = super().enter(start, group, beginnings, former)
        return (
            Commit(
                {owned.token: owned.position + 1 for owned in self.owned.values() if owned.token and owned.position is not None}
            ),
            behind,
            left,
        )


class KeepsItsPlace(Owner):
    """When it enters a queue at the group's offset, does not record this in the logged offset."""

    def plan(self, counts, topics):
        for owned in self.owned.values():
            owned.entered = False
        return super().plan(counts, topics)


MUTANTS = [
    ("publish without the fence", True, True, {"broken": {"fence_publish": False}}),
    ("batches not remembered", False, True, {"broken": {"remember": False}}),
    ("tenure ignored", True, True, {"kind": IgnoresTenure}),
    ("tenure ignored, foreign sink", True, False, {"kind": IgnoresTenure}),
    ("checkpoint always followed", False, True, {"kind": FollowsTheCheckpoint}),
    ("replay of a broken lineage", True, True, {"kind": ReplaysEverything}),
    ("replay of a broken lineage, exclusive", False, True, {"kind": ReplaysEverything}),
    ("commit of what is planned", False, False, {"kind": CommitsWhatIsPlanned}),
    ("entered queues not logged", False, True, {"kind": KeepsItsPlace}),
]


@pytest.mark.parametrize(("shared", "atomic", "how"), [mutant[1:] for mutant in MUTANTS], ids=[mutant[0] for mutant in MUTANTS])
def test_a_broken_rule_is_noticed(shared, atomic, how):
    kind = machine(shared=shared, atomic=atomic, **how)
    for seed in range(5000):
        try:
            walk(kind, seed)
        except (AssertionError, OffsetError):
            return
    pytest.fail("5000 walks did not detect the planted bug")
