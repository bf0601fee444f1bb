"""What an Owner decides at a boundary, when it enters a queue, and when it repeats a batch. tests/sim runs all of it together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.ownership.lock import LockToken, Refusal
from orderedmq.ownership.offsets import Checkpoint
from orderedmq.ownership.owner import Behind, Commit, Lock, Owner, Policy
from orderedmq.parking import lot_token, parked_queue

Q0, Q1 = QUEUES = tuple(MessageQueue("orders", "embedded", number) for number in range(2))


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


def test_enters_a_new_queue_at_its_beginning_and_commits_that_offset():
    owner = owner_of(token(Q0))
    assert owner.unplaced().queues == (Q0,)
    commit, behind, left = owner.enter(Checkpoint(), {}, {Q0: 7})
    assert (commit, behind, left) == (Commit({token(Q0): 7}), [], {})
    assert owner.unplaced().queues == ()
    owner.backlog({Q0: 9})
    assert owner.plan({Q0: 2}, {}) == Checkpoint("me", {Q0: 9}, {Q0: 7}, {Q0: 1})


def test_after_a_reset_the_next_offset_records_the_new_tenure_also_of_a_companion():
    owner = Owner("me", companion=lot_token)
    owner.locked([token(Q0, 4, 2), token(Q1, 5, 2)])
    owner.enter(logged({Q0: 8, Q1: 8}, {Q0: 2, Q1: 2}), {Q0: 8, Q1: 8}, dict.fromkeys(map(lot, QUEUES), 0))
    owner.restarted([token(Q0, 6)])
    owner.skip(Q0, 3)
    assert owner.plan({}, {}).gen == {Q0: 6, lot(Q0): 6, Q1: 2, lot(Q1): 2}
    assert owner.tokens() == [token(Q0, 6), token(Q1, 5, 2)]
    owner._check()


def test_follows_and_reports_a_checkpoint_behind_the_group_in_an_unbroken_tenure():
    owner = owner_of(token(Q0, 4, 2))
    assert owner.enter(logged({Q0: 3}, {Q0: 2}), {Q0: 5}, {}) == (None, [Behind(Q0, 3, 5)], {})
    assert owner.backlog({Q0: 9}) == {Q0: OffsetRange(3, 9)}


def test_does_not_take_an_unused_plan_for_an_earlier_one_with_the_same_end():
    owner = owner_of(token(Q0, 4, 4))
    start = logged({Q0: 5}, {Q0: 2})
    owner.enter(start, {Q0: 3}, {})
    owner.backlog({Q0: 5})
    assert owner.plan({Q0: 2}, {}).next == start.next
    assert owner.boundary(start, [Q0]) == []
    assert owner.backlog({Q0: 5}) == {Q0: OffsetRange(3, 5)}


def test_a_replay_of_an_empty_batch_continues_at_its_end():
    owner = owner_of(token(Q0, 7, 1))
    end = logged({Q0: 5}, {Q0: 1})
    owner.replay(end, end, {Q0: 5})
    assert owner.in_flight() == {}
    owner._check()
    assert owner.unplaced().queues == ()
    assert owner.backlog({Q0: 6}) == {Q0: OffsetRange(5, 6)}


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


def test_without_lineage_an_exclusive_query_repeats_its_batch_unless_all_of_it_was_processed() -> None:
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


def test_a_checkpoint_of_a_group_is_followed_without_one() -> None:
    owner = Owner("me")
    owner.assume([Q0])
    owner.enter(replace(logged({Q0: 5}, {Q0: 4}), group="g"), {}, {})
    assert owner.plan({}, {}) == logged({Q0: 5}, {})


def test_a_shared_query_repeats_no_batch_without_the_queues_of_its_former_run() -> None:
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


def test_commits_and_unlocks_nothing_without_a_group():
    owner = Owner("me")
    owner.assume(QUEUES)
    assert owner.enter(logged({Q0: 3}, {}), {}, {Q1: 1}) == (None, [], {})
    owner.backlog({Q0: 5, Q1: 4})
    end = owner.plan({Q0: 2, Q1: 1}, {})
    assert (end.next, end.entered, end.gen) == ({Q0: 5, Q1: 2}, {Q1: 1}, {})
    assert owner.boundary(end, QUEUES) == []
    assert owner.stop({}).idle == ()
