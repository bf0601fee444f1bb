"""A queue's companion, its parking lot, is owned, handed over, repeated and given back together with the queue."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest

from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.ownership.lock import LockToken
from orderedmq.ownership.offsets import Checkpoint
from orderedmq.ownership.owner import Commit, Lock, Owner, Policy, Unlock
from orderedmq.parking import parked_queue

Q = [MessageQueue("orders", "embedded", number) for number in range(2)]
P = [parked_queue("g", queue) for queue in Q]


def token(queue: MessageQueue, epoch: int = 1) -> LockToken:
    return LockToken("g", queue, "owner", "client", epoch, epoch)


def parked(leader: LockToken) -> LockToken:
    return replace(leader, queue=parked_queue(leader.group, leader.queue))


def owner(policy: Policy = Policy.REFUSE, mine: Sequence[MessageQueue] = Q) -> Owner:
    def strategy(queues: Sequence[MessageQueue], members: Collection[str]) -> Sequence[MessageQueue]:
        del members
        return [queue for queue in queues if queue in mine]

    return Owner("owner", strategy=strategy, policy=policy, companion=parked)


def began(policy: Policy = Policy.REFUSE) -> Owner:
    """An owner of both queues at offset 0, with 10 messages in each queue and 3 in the lot of the first one."""
    made = owner(policy)
    assert made.boundary(Checkpoint(), Q) == [Lock(tuple(Q), all_or_none=policy is Policy.REFUSE)]
    made.locked([token(queue) for queue in Q])
    made.enter(Checkpoint(), {}, dict.fromkeys([*Q, *P], 0))
    made.backlog({Q[0]: 10, Q[1]: 10, P[0]: 3, P[1]: 0})
    made._check()
    return made


def test_a_companion_is_read_and_committed_under_a_token_of_its_leaders_lock() -> None:
    made = began()
    planned = made.plan({Q[0]: 4, P[0]: 3}, {})
    assert planned.next == {Q[0]: 4, Q[1]: 0, P[0]: 3, P[1]: 0}
    [commit] = made.boundary(planned, Q)
    assert isinstance(commit, Commit)
    assert commit.offsets[token(Q[0])] == 4
    assert commit.offsets[parked(token(Q[0]))] == 3


@pytest.mark.holds("lot follows its queue")
def test_a_hand_over_takes_the_companion_along() -> None:
    made = began(Policy.HAND_OVER)
    made.strategy = lambda queues, members: [Q[1]]
    actions = made.boundary(Checkpoint(), Q)
    assert actions == [Unlock((token(Q[0]),), ())]
    assert sorted(made.owned) == [P[1], Q[1]]
    made._check()


@pytest.mark.holds("lot follows its queue")
@pytest.mark.parametrize("stale", [token(Q[0]), parked(token(Q[0]))], ids=["leader", "companion"])
def test_a_queue_and_its_companion_are_lost_together(stale: LockToken) -> None:
    made = began()
    assert made.lost([stale]) == [Q[0]]
    assert sorted(made.owned) == [P[1], Q[1]]


def test_a_replay_repeats_the_companions_range_with_its_leaders() -> None:
    start = Checkpoint("owner", dict.fromkeys([*Q, *P], 0), {}, dict.fromkeys([*Q, *P], 1))
    end = Checkpoint("owner", {Q[0]: 4, Q[1]: 0, P[0]: 3, P[1]: 0}, {}, dict.fromkeys([*Q, *P], 1))
    made = owner()
    made.locked([token(queue) for queue in Q])
    made.replay(start, end, dict.fromkeys([*Q, *P], 0))
    assert made.in_flight() == {Q[0]: OffsetRange(0, 4), P[0]: OffsetRange(0, 3)}
    broken = owner()
    broken.locked([replace(token(queue, 7), tenure=7) for queue in Q])
    broken.replay(start, end, dict.fromkeys([*Q, *P], 0))
    assert broken.in_flight() == {}


def test_a_queue_whose_companion_is_in_flight_is_not_given_back_at_once() -> None:
    made = began()
    made.plan({P[0]: 3}, {})
    assert made.stop({}) == Unlock((token(Q[1]),), (token(Q[0]),))
    assert made.stop({P[0]: 3}) == Unlock(tuple(token(queue) for queue in Q), ())


def test_reads_a_lot_without_an_offset_from_its_beginning_after_another_owner() -> None:
    start = Checkpoint("owner", dict.fromkeys([*Q, *P], 0), {}, dict.fromkeys([*Q, *P], 1))
    end = Checkpoint("owner", {Q[0]: 4, Q[1]: 0, P[0]: 3, P[1]: 0}, {}, dict.fromkeys([*Q, *P], 1))
    group = dict.fromkeys(Q, 0)
    again = owner()
    again.locked([replace(token(queue, 7), tenure=7) for queue in Q])
    again.replay(start, end, group)
    assert again.in_flight() == {}
    # Spark nevertheless commits the batch. The lot was not read in it, so the next batch must begin with the lot's first message.
    commit, behind, left = again.enter(end, group, dict.fromkeys([*Q, *P], 0))
    assert (commit, behind) == (None, [])
    assert left == {Q[0]: (4, 0), P[0]: (3, 0)}
    assert {queue: owned.position for queue, owned in again.owned.items()} == dict.fromkeys([*Q, *P], 0)


def test_a_lot_follows_the_checkpoint_if_the_group_was_deleted() -> None:
    logged = Checkpoint("owner", {Q[0]: 4, Q[1]: 0, P[0]: 3, P[1]: 0}, {}, dict.fromkeys([*Q, *P], 1))
    again = owner()
    again.locked([replace(token(queue, 7), tenure=7) for queue in Q])
    again.enter(logged, {}, dict.fromkeys([*Q, *P], 0))
    assert again.owned[P[0]].position == 3
