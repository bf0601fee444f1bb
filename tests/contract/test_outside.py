"""Changes to a group by an administrator, while a client is a member or holds a lock."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from orderedmq.broker import Broker, SinkBatch
from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import LOCK_LIFE, UNLOCK_DELAY, ClientIdentity, LockToken
from orderedmq.ownership.micro_batch import SourceRun
from tests.contract.support import (
    FakeClock,
    Place,
    aside,
    beat,
    gone,
    ids,
    kill,
    known,
    letters,
    locked,
    needs,
    queues_of,
    refused,
    rows,
    span,
    state,
)

# -- from outside: release --------------------------------------------------------------------------------------------------------


def late_publish(broker: Broker, token: LockToken) -> None:
    """Publish a row that a task staged after reading under the token."""
    run = SourceRun("query", 0, "run")
    broker.outbox.register(run, token.queue, span(0, 1), token)
    staging = broker.outbox.open(SinkBatch("sink", 0, run), 0)
    staging.add(token.queue, rows(["late"]))
    broker.outbox.publish(SinkBatch("sink", 0, run), [staging.receipt()])


@needs("owners")
@pytest.mark.parametrize("how", ["left", "expired"])
def test_a_lock_whose_holder_is_gone_is_released_without_force(broker: Broker, clock: FakeClock, token: LockToken, how: str):
    if how == "left":
        client = ClientIdentity(token.owner, token.client_id)
        broker.groups.leave(client)
    else:
        clock.pass_(61)
    assert broker.admin.release("g", [token.queue]) == [token.queue]
    [lock] = broker.admin.locks("g")
    assert (lock.held, lock.owner, lock.tenure) == (False, "me", token.tenure)
    assert lock.epoch > token.epoch


@needs("owners")
def test_a_lingering_lock_of_a_process_that_is_gone_is_released_and_free_at_once(broker: Broker, token: LockToken):
    broker.groups.unlock([token], UNLOCK_DELAY)
    broker.groups.leave(ClientIdentity(token.owner, token.client_id))
    assert broker.admin.release("g", [token.queue]) == [token.queue]
    locked(broker, "g", broker.groups.join("them"), [token.queue])
    with refused("LOCK.LOST"):
        broker.groups.commit({token: 1})


@needs("owners")
def test_a_lock_that_is_held_to_its_last_second_is_not_released(broker: Broker, clock: FakeClock, token: LockToken):
    clock.pass_(LOCK_LIFE)
    for call in (
        lambda: broker.admin.release("g", [token.queue]),
        lambda: broker.admin.seek("g", {token.queue: 0}),
        lambda: broker.admin.delete_group("g"),
    ):
        with refused("GROUP.IN_USE", token.client_id):
            call()
    clock.pass_(0.001)
    assert broker.admin.release("g", [token.queue]) == [token.queue]


@needs("owners")
def test_a_living_holder_keeps_all_its_queues_unless_it_is_forced(broker: Broker, token: LockToken):
    free, dead = queues_of(broker)[1:]
    other = broker.groups.join("other")
    locked(broker, "g", other, [dead])
    broker.groups.leave(other)
    before = state(broker, ["orders"])
    with refused("GROUP.IN_USE", "'g'", token.client_id, token.queue):
        broker.admin.release("g", [dead, token.queue])
    assert state(broker, ["orders"]) == before, "the dead holder's queue must not be released either"
    assert broker.groups.stale([token]) == []
    assert broker.admin.release("g", [free, dead, token.queue], force=True) == [dead, token.queue]


@needs("owners")
def test_a_forced_release_makes_the_holders_token_stale_for_everything(broker: Broker, token: LockToken):
    broker.groups.commit({token: 2})
    broker.admin.release("g", [token.queue], force=True)
    assert broker.groups.stale([token]) == broker.groups.renew([token]) == [token]
    assert not broker.groups.check(token)
    before = state(broker, ["orders"])
    for call in (
        lambda: broker.groups.commit({token: 1}),
        lambda: broker.groups.commit({token: 3}),
        lambda: broker.groups.reset({token: 0}),
        lambda: broker.groups.dead_letter(token, letters([3]), [3]),
        lambda: late_publish(broker, token),
    ):
        with refused("LOCK.LOST", token.queue, "no other client has owned it"):
            call()
        broker.groups.unlock([token])
    assert state(broker, ["orders"]) == before
    assert broker.groups.offsets("g", [token.queue]) == {token.queue: 2}, "offsets stay"


@needs("owners")
def test_after_a_release_the_same_owners_tenure_goes_on_and_anothers_begins(broker: Broker, token: LockToken):
    broker.admin.release("g", [token.queue], force=True)
    [again] = locked(broker, "g", broker.groups.join("me"), [token.queue])
    assert again.tenure == token.tenure
    assert again.epoch > token.epoch
    broker.admin.release("g", [token.queue], force=True)
    [other] = locked(broker, "g", broker.groups.join("them"), [token.queue])
    assert other.tenure == other.epoch > again.epoch
    assert broker.groups.stale([token, again, other]) == [token, again]


def test_what_is_not_held_is_not_released(place: Place, broker: Broker, token: LockToken):
    broker.groups.unlock([token])
    assert broker.admin.release("g", queues_of(broker), force=True) == []
    if "epochs" not in place.lacks:
        broker.groups.commit({token: 1})
    with refused("GROUP.MISSING", "'nobody'"):
        broker.admin.release("nobody", queues_of(broker))
    with refused("GROUP.BAD_NAME"):
        broker.admin.release("a b", [])


# -- from outside: delete and seek ------------------------------------------------------------------------------------------------


def outside(broker: Broker, queue: MessageQueue) -> list[Callable[[], object]]:
    """Return the calls that are refused while a group is in use."""
    return [
        lambda: broker.admin.require_unused("g"),
        lambda: broker.admin.delete_group("g"),
        lambda: broker.admin.seek("g", {queue: 0}),
    ]


@needs("membership age")
def test_a_group_is_in_use_while_a_member_lives_without_any_lock(broker: Broker, clock: FakeClock):
    queue = queues_of(broker)[0]
    me = broker.groups.join("me")
    beat(broker, me)
    for call in outside(broker, queue):
        with refused("GROUP.IN_USE", "'g'", me.client_id, "member"):
            call()
    clock.pass_(LOCK_LIFE)
    for call in outside(broker, queue):
        with refused("GROUP.IN_USE"):
            call()
    assert broker.groups.offsets("g", [queue]) == {}
    clock.pass_(0.001)
    broker.admin.require_unused("g")
    broker.admin.seek("g", {queue: 0})
    beat(broker, me)
    broker.admin.seek("g", {queue: 0}, force=True)
    assert ids(broker) == known(me), "the client must stay a member"
    broker.groups.leave(me)
    broker.admin.seek("g", {queue: 0})


@needs("owners")
def test_a_group_is_in_use_while_an_owner_lives_that_is_no_member(broker: Broker, token: LockToken):
    for call in outside(broker, token.queue):
        with refused("GROUP.IN_USE", "'g'", token.client_id, token.queue):
            call()
    assert broker.groups.stale([token]) == []
    broker.groups.leave(ClientIdentity(token.owner, token.client_id))
    for call in outside(broker, token.queue)[::-1]:
        call()


def test_a_group_of_a_killed_member_is_not_in_use(broker: Broker, start, kind: str):
    process, them = start()
    with refused("GROUP.IN_USE", them.client_id):
        broker.admin.delete_group("g")
    kill(process)
    gone(broker, kind, them)
    broker.admin.delete_group("g")
    assert broker.admin.groups() == []


def test_members_of_one_group_do_not_hold_another(broker: Broker, token: LockToken):
    beat(broker, broker.groups.join("them"), "g2")
    broker.groups.unlock([token])
    for call in outside(broker, token.queue)[::-1]:
        call()
    assert broker.admin.groups() == ["g2"]
    assert len(ids(broker, "g2")) == 1


@needs("unused groups")
def test_a_deleted_group_is_forgotten_but_for_its_dead_letters(broker: Broker, token: LockToken):
    me = broker.groups.join("other")
    beat(broker, me)
    broker.groups.commit({token: 4})
    broker.groups.dead_letter(token, letters([3]), [3])
    with refused("GROUP.IN_USE"):
        broker.admin.delete_group("g")
    broker.admin.delete_group("g", force=True)
    assert (broker.admin.groups(), ids(broker), broker.admin.locks("g")) == ([], [], [])
    assert broker.groups.offsets("g", queues_of(broker)) == {}
    with refused("GROUP.MISSING", "'g'"):
        broker.admin.group_offsets("g")
    with refused("GROUP.MISSING", "'g'"):
        broker.admin.delete_group("g")
    assert aside(broker) == ["body 3"]
    [again] = locked(broker, "g", broker.groups.join("me"), [token.queue])
    assert broker.groups.dead_letter(again, letters([3]), [3]) == 1, "a new group of that name must start without letters"
    assert beat(broker, me) == known(me), "a living client can become a member again"


@needs("unused groups")
def test_tokens_of_a_deleted_group_stay_fenced_off_also_when_it_is_there_again(broker: Broker, token: LockToken):
    def stale() -> None:
        assert broker.groups.stale([token]) == broker.groups.renew([token]) == [token]
        for call in (
            lambda: broker.groups.commit({token: 0}),
            lambda: broker.groups.reset({token: 0}),
            lambda: broker.groups.dead_letter(token, letters([3]), [3]),
            lambda: late_publish(broker, token),
        ):
            with refused("LOCK.LOST", token.queue):
                call()
        broker.groups.unlock([token])

    broker.admin.delete_group("g", force=True)
    stale()
    assert broker.admin.groups() == []
    [again] = locked(broker, "g", broker.groups.join("me"), [token.queue])
    assert again.tenure == again.epoch > token.epoch, "the tenure must begin again"
    stale()
    assert broker.groups.stale([again]) == []


@needs("unused groups")
def test_a_checkpoint_from_before_a_seek_is_recognised_also_after_the_group_was_deleted(broker: Broker, token: LockToken):
    broker.groups.unlock([token])
    broker.admin.seek("g", {token.queue: 5})
    broker.admin.delete_group("g")
    broker.admin.seek("g", {token.queue: 5})
    [again] = locked(broker, "g", broker.groups.join("me"), [token.queue])
    assert again.tenure > token.tenure


def test_a_group_of_members_only_is_listed_and_has_no_offsets(broker: Broker):
    me = broker.groups.join("me")
    beat(broker, me, "m")
    assert broker.admin.groups() == ["m"]
    assert broker.admin.group_offsets("m") == {}
    with refused("GROUP.BAD_NAME"):
        broker.admin.delete_group("a b")
