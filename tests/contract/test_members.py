"""Members of a group: joining, the duration of a membership, and the death of a process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orderedmq.broker import Broker
from orderedmq.model import DEAD_LETTER_PREFIX, MAX_NAME_LENGTH
from orderedmq.ownership.lock import LOCK_LIFE, Refusal
from orderedmq.ownership.membership import Subscription
from tests.contract.support import (
    SHARED,
    FakeClock,
    Place,
    beat,
    gone,
    ids,
    joined,
    kill,
    known,
    locked,
    needs,
    queues_of,
    refused,
)

LONGEST = MAX_NAME_LENGTH - len(DEAD_LETTER_PREFIX)


# -- members ----------------------------------------------------------------------------------------------------------------------


def test_a_heartbeat_makes_a_member_that_everyone_sees(place: Place, broker: Broker, clock: FakeClock):
    me = replace(broker.groups.join("me"), name="billing")
    assert ids(broker) == []
    subscription = Subscription("shared", "orders,invoices", "AVG", "red || blue")
    [member] = broker.groups.heartbeat("g", me, subscription)
    assert (member.owner, member.client_id, member.subscription) == ("me", me.client_id, subscription)
    assert member.name == "billing"
    if "clock" not in place.lacks:
        assert member.renewed == clock.instant()
    assert place.connect().groups.members("g") == [member]


def test_members_come_by_client_id_from_every_connection(place: Place, broker: Broker):
    other = place.connect()
    clients = []
    for number in range(6):
        one = (broker, other)[number % 2]
        clients.append(one.groups.join(f"{'zebra' if number < 3 else 'ant'}-{number}"))
        assert beat(one, clients[-1]) == known(*clients)
    assert ids(broker) == ids(other) == known(*clients)


def test_who_only_joined_is_no_member_and_a_member_needs_no_lock(broker: Broker):
    one, two = broker.groups.join("one"), broker.groups.join("two")
    locked(broker, "g", one, queues_of(broker))
    assert beat(broker, two) == known(two)


@needs("membership age")
def test_a_member_counts_for_as_long_as_a_lock_lives(broker: Broker, clock: FakeClock):
    one, two = broker.groups.join("one"), broker.groups.join("two")
    beat(broker, one)
    clock.pass_(LOCK_LIFE)
    assert ids(broker) == known(one)
    assert beat(broker, two) == known(one, two)
    clock.pass_(0.001)
    assert ids(broker) == known(two)


@needs("reboot")
def test_after_a_reboot_nobody_is_a_member(broker: Broker, clock: FakeClock):
    me = broker.groups.join("me")
    beat(broker, me)
    clock.reboot()
    assert ids(broker) == []
    assert beat(broker, me) == known(me)


def test_the_wall_clock_ends_no_membership(broker: Broker, clock: FakeClock):
    me = broker.groups.join("me")
    beat(broker, me)
    clock.micros += 10**12
    assert ids(broker) == known(me)


def test_who_leaves_is_gone_at_once_from_all_its_groups(place: Place, broker: Broker):
    one, two = broker.groups.join("one"), broker.groups.join("two")
    for group in ("g", "h"):
        beat(broker, one, group)
        beat(broker, two, group)
    broker.groups.leave(one)
    assert ids(place.connect()) == ids(broker, "h") == known(two)
    broker.groups.leave(one)
    broker.groups.leave(two)
    assert ids(broker) == ids(broker, "h") == []
    if "unused groups" not in place.lacks:
        assert broker.admin.groups() == [], "groups without members must be forgotten"


def test_a_heartbeat_that_comes_after_leaving_brings_nobody_back(broker: Broker):
    one, two = broker.groups.join("one"), broker.groups.join("two")
    beat(broker, one)
    broker.groups.leave(one)
    beat(broker, one)
    assert ids(broker) == []
    assert beat(broker, two) == known(two)


def test_a_connection_that_was_closed_has_no_members_and_its_clients_can_still_leave(place: Place, broker: Broker):
    other = place.connect()
    groups, them = other.groups, other.groups.join("them")
    beat(other, them)
    other.close()
    assert ids(broker) == []
    groups.leave(them)


def test_groups_have_members_of_their_own(broker: Broker):
    """Groups share no members, even if one group's name begins with the other's."""
    one, two = broker.groups.join("one"), broker.groups.join("two")
    beat(broker, one, "g")
    beat(broker, two, "g2")
    assert (ids(broker, "g"), ids(broker, "g2"), ids(broker, "G")) == (known(one), known(two), [])
    beat(broker, one, "g2")
    assert (ids(broker, "g"), ids(broker, "g2")) == (known(one), known(one, two))


@pytest.mark.parametrize("group", ["", "a b", "x" * 128, "x" * 600, "ä", "g\0h"])
def test_a_name_that_is_no_groups_has_no_members(broker: Broker, group: str):
    me = broker.groups.join("me")
    for call in (lambda: beat(broker, me, group), lambda: broker.groups.members(group)):
        with refused("GROUP.BAD_NAME"):
            call()


@pytest.mark.parametrize("owner", ["x" * 600, "../../x", "", "ä\n\u202e", "a\0b", "😀" * 100, '"{}\\'])
def test_any_client_id_is_a_members(place: Place, broker: Broker, owner: str):
    me, other = broker.groups.join(owner), broker.groups.join(owner + "2")
    assert beat(broker, me) == known(me)
    assert beat(broker, other) == known(me, other)
    assert [(member.owner, member.client_id) for member in place.connect().groups.members("g") if member.owner == owner] == [
        (owner, me.client_id)
    ]
    broker.groups.leave(me)
    assert ids(broker) == known(other)


def test_a_renewed_heartbeat_brings_the_subscription_up_to_date(place: Place, broker: Broker, clock: FakeClock):
    me = broker.groups.join("me")
    broker.groups.heartbeat("g", me, SHARED)
    clock.pass_(20)
    new = Subscription("exclusive", "invoices")
    [member] = broker.groups.heartbeat("g", me, new)
    assert member.subscription == new
    if "clock" not in place.lacks:
        assert member.renewed == clock.instant()
    assert broker.groups.members("g") == [member]


def test_members_are_ordered_by_their_first_heartbeat_which_repeats_do_not_change(broker: Broker, clock: FakeClock):
    first, second = broker.groups.join("z"), broker.groups.join("a")
    beat(broker, first)
    beat(broker, second)
    numbers = joined(broker, first), joined(broker, second)
    assert 0 < numbers[0] < numbers[1]
    for client in (second, first, second):
        clock.pass_(25)
        beat(broker, client)
    assert (joined(broker, first), joined(broker, second)) == numbers


@needs("membership age")
@pytest.mark.parametrize("swept", [False, True])
def test_who_comes_back_after_its_membership_expired_has_joined_anew(broker: Broker, clock: FakeClock, swept: bool):
    first, second = broker.groups.join("one"), broker.groups.join("two")
    beat(broker, first)
    before = joined(broker, first)
    clock.pass_(61)
    if swept:
        beat(broker, second)
        beat(broker, first)
        assert joined(broker, first) > joined(broker, second)
    beat(broker, first)
    assert joined(broker, first) > before


def test_a_heartbeat_prolongs_no_lock_and_a_renewal_no_membership(broker: Broker, clock: FakeClock):
    queue = queues_of(broker)[0]
    me, them = broker.groups.join("me"), broker.groups.join("them")
    [token] = locked(broker, "g", me, [queue])
    beat(broker, me)
    clock.pass_(40)
    beat(broker, me)
    clock.pass_(21)
    locked(broker, "g", them, [queue])
    assert broker.groups.stale([token]) == [token]
    assert ids(broker) == known(me)


# -- the death of a process -------------------------------------------------------------------------------------------------------


def test_a_killed_process_is_no_member_at_once(broker: Broker, start, kind: str):
    me = broker.groups.join("me")
    process, them = start()
    assert beat(broker, me) == known(me, them)
    kill(process)
    gone(broker, kind, them)
    assert ids(broker) == beat(broker, me) == known(me)


@needs("owners")
def test_the_first_ask_after_a_kill_is_granted(broker: Broker, start):
    """The death is noticed although a refused request writes nothing to the store."""
    queues = queues_of(broker)
    me = broker.groups.join("me")
    process, _ = start()
    before = broker.log.change()
    assert all(isinstance(answer, Refusal) for answer in broker.groups.lock("g", me, queues).values())
    assert broker.log.change() == before
    kill(process)
    locked(broker, "g", me, queues)


@needs("unused groups")
@pytest.mark.parametrize("how", ["dead", "expired"])
def test_the_next_heartbeat_sweeps_the_records_of_those_that_are_gone(place: Place, broker: Broker, clock: FakeClock, how: str):
    """The list of groups shows this, because a group is listed while the store has a member's record."""
    other = place.connect()
    beat(other, other.groups.join("them"))
    if how == "dead":
        other.close()
    else:
        clock.pass_(61)
    assert (ids(broker), broker.admin.groups()) == ([], ["g"])
    me = broker.groups.join("me")
    assert beat(broker, me) == known(me)
    broker.groups.leave(me)
    assert broker.admin.groups() == []
