"""Owner with a strategy and the policy "hand over": what a member of a shared group does at a boundary, rule by rule."""

from __future__ import annotations

from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.ownership.allocate import Allocation, divided
from orderedmq.ownership.lock import LockToken
from orderedmq.ownership.offsets import Checkpoint
from orderedmq.ownership.owner import Commit, Lock, Owner, Policy, Unlock

Q0, Q1, Q2, Q3 = QUEUES = tuple(MessageQueue("orders", "embedded", number) for number in range(4))
ALONE = {"me@1": None}
TWO = {"me@1": None, "you@1": None}


def token(queue: MessageQueue, epoch: int = 1) -> LockToken:
    return LockToken("g", queue, "me", "me@1", epoch, epoch)


def member(*queues: MessageQueue, strategy: str = "AVG") -> Owner:
    """A member that owns ``queues`` and has read each up to offset 0."""
    owner = Owner("me", strategy=divided(Allocation(strategy), "me@1"), policy=Policy.HAND_OVER)
    owner.locked([token(queue) for queue in queues])
    owner.enter(Checkpoint(), dict.fromkeys(queues, 0), {})
    return owner


def planned(owner: Owner, **ends: int) -> Checkpoint:
    """Plan a batch that reads up to these ends, such as ``q0=5``."""
    found = {QUEUES[int(name[1:])]: end for name, end in ends.items()}
    backlog = owner.backlog(found)
    return owner.plan({queue: backlog[queue].messages for queue in found}, {})


def test_a_boundary_asks_for_what_the_strategy_gives_and_takes_what_it_gets():
    owner = member()
    assert owner.boundary(Checkpoint(), QUEUES, TWO) == [Lock((Q0, Q1), all_or_none=False)]
    owner.locked([token(Q1)])
    assert list(owner.owned) == [Q1]


def test_a_queue_that_is_given_up_is_committed_then_unlocked_and_left_out_of_the_next_batch():
    owner = member(*QUEUES)
    ran = planned(owner, q0=3, q2=5)
    commit, unlock = owner.boundary(ran, QUEUES, TWO)
    assert isinstance(commit, Commit)
    assert commit.offsets == {token(Q0): 3, token(Q2): 5}
    assert unlock == Unlock((token(Q2), token(Q3)), ())
    assert sorted(planned(owner, q0=4).next) == [Q0, Q1]
    owner._check()


def test_messages_that_were_found_and_not_planned_are_not_committed_with_a_queue_that_is_given_up():
    owner = member(*QUEUES)
    ran = planned(owner, q2=5)
    owner.backlog({Q2: 9})
    commit, _ = owner.boundary(ran, QUEUES, TWO)
    assert isinstance(commit, Commit)
    assert commit.offsets == {token(Q2): 5}


def test_what_spark_did_not_run_is_not_committed_with_a_queue_that_is_given_up():
    owner = member(*QUEUES)
    planned(owner, q0=3, q2=5)
    assert owner.boundary(Checkpoint(), QUEUES, TWO) == [Unlock((token(Q2), token(Q3)), ())]
    assert owner.backlog({Q0: 3, Q1: 0}) == {Q0: OffsetRange(0, 3), Q1: OffsetRange(0, 0)}


def test_a_queue_taken_over_is_locked_first_then_its_groups_offset_is_read_and_it_is_read_in_the_same_batch():
    owner = member(Q0, Q1)
    start = planned(owner, q0=2)
    *_, lock = owner.boundary(start, QUEUES, ALONE)
    assert lock == Lock((Q2, Q3), all_or_none=False)
    assert owner.unplaced().queues == (), "the offset of an unlocked queue may still move"
    owner.locked([token(Q2, 7)])
    assert owner.unplaced().queues == (Q2,)
    owner.enter(start, {Q2: 6}, {})
    end = planned(owner, q2=9)
    assert end.entered == {Q2: 6}
    assert end.next[Q2] == 9


def test_a_checkpoints_offset_of_a_queue_that_others_had_is_not_trusted():
    owner = member(Q0, Q1, Q2, Q3)
    start = planned(owner, q2=5)
    owner.boundary(start, QUEUES, TWO)
    end = planned(owner, q0=1)
    owner.boundary(end, QUEUES, ALONE)
    for logged in (start, end):
        owner.locked([token(Q2, 8), token(Q3, 9)])
        owner.enter(logged, {Q2: 11, Q3: 0}, {})
        assert owner.owned[Q2].position == 11


def test_a_refused_lock_is_asked_for_again_at_the_next_boundary_and_the_others_are_read_meanwhile():
    owner = member(Q0, Q1)
    start = planned(owner, q0=2)
    for _ in range(3):
        assert owner.boundary(start, QUEUES, ALONE)[-1] == Lock((Q2, Q3), all_or_none=False)
        start = planned(owner, q1=owner.owned[Q1].known + 1)


def test_an_available_now_run_gives_up_and_takes_no_more():
    owner = member(Q0, Q1, Q2)
    owner.taking = False
    assert owner.boundary(Checkpoint(), QUEUES, ALONE) == []
    assert owner.boundary(Checkpoint(), QUEUES, TWO) == [Unlock((token(Q2),), ())]


def test_a_queue_that_was_lost_is_not_committed_and_not_read_on():
    owner = member(Q0, Q1)
    end = planned(owner, q0=3, q1=4)
    assert owner.lost([token(Q1), token(Q0, 99)]) == [Q1], "losing a token of another epoch is not a loss of this member"
    commit, *_ = owner.boundary(end, QUEUES, TWO)
    assert isinstance(commit, Commit)
    assert commit.offsets == {token(Q0): 3}
    assert owner.tokens() == [token(Q0)]


def test_a_member_in_a_long_batch_keeps_its_queues_until_its_boundary():
    owner = member(*QUEUES)
    planned(owner, q0=3, q2=5)
    assert [token.queue for token in owner.tokens()] == list(QUEUES), "all locks must be renewed until the boundary"
    assert owner.in_flight() == {Q0: OffsetRange(0, 3), Q2: OffsetRange(0, 5)}


def test_each_topic_is_divided_on_its_own():
    other = tuple(MessageQueue("bills", "embedded", number) for number in range(2))
    owner = member()
    assert owner.boundary(Checkpoint(), (*other, *QUEUES), TWO) == [Lock((other[0], Q0, Q1), all_or_none=False)]
