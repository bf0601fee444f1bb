"""Owner with a strategy and the policy "hand over": what a member of a shared group does at a boundary, rule by rule."""

from __future__ import annotations

from orderedmq.model import MessageQueue
from orderedmq.ownership.allocate import divided
from orderedmq.ownership.lock import LockToken
from orderedmq.ownership.offsets import Checkpoint
from orderedmq.ownership.owner import Commit, Lock, Owner, Policy, Unlock

Q0, Q1, Q2, Q3 = QUEUES = tuple(MessageQueue("orders", "embedded", number) for number in range(4))
ALONE = {"me@1"}
TWO = {"me@1", "you@1"}


def token(queue: MessageQueue, epoch: int = 1) -> LockToken:
    return LockToken("g", queue, "me", "me@1", epoch, epoch)


def member(*queues: MessageQueue, strategy: str = "AVG") -> Owner:
    """A member that owns ``queues`` and has read each up to offset 0."""
    owner = Owner("me", strategy=divided(strategy, "me@1"), policy=Policy.HAND_OVER)
    owner.locked([token(queue) for queue in queues])
    owner.enter(Checkpoint(), dict.fromkeys(queues, 0), {})
    return owner


def planned(owner: Owner, **ends: int) -> Checkpoint:
    """Plan a batch that reads up to these ends, such as ``q0=5``."""
    found = {QUEUES[int(name[1:])]: end for name, end in ends.items()}
    backlog = owner.backlog(found)
    return owner.plan({queue: backlog[queue].messages for queue in found}, {})


def test_locks_the_queues_of_the_strategy_at_a_boundary():
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


def test_an_available_now_run_only_gives_queues_back():
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


def test_each_topic_is_divided_on_its_own():
    other = tuple(MessageQueue("bills", "embedded", number) for number in range(2))
    owner = member()
    assert owner.boundary(Checkpoint(), (*other, *QUEUES), TWO) == [Lock((other[0], Q0, Q1), all_or_none=False)]
