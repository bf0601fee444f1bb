"""The Groups protocol: queue locks, group offsets, and the refusal of stale locks."""

from __future__ import annotations

import pytest

from orderedmq.broker import Broker, SinkBatch
from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import LOCK_LIFE, RENEW_INTERVAL, UNLOCK_DELAY, LockToken, Refusal
from orderedmq.ownership.membership import Subscription
from orderedmq.ownership.micro_batch import SourceRun
from orderedmq.ownership.offsets import Checkpoint
from orderedmq.ownership.owner import Owner
from tests import evidence
from tests.contract.support import FakeClock, Place, locked, needs, queues_of, refused, rows, span, state


def test_a_client_is_known_by_its_owner_and_its_own_name(broker: Broker):
    one, two = broker.groups.join("query"), broker.groups.join("query")
    assert one.owner == two.owner == "query"
    assert one.client_id != two.client_id


@pytest.mark.parametrize("owner", ["../../x", "a/b", "x" * 300, "", ".hidden", "ä\n", "a\0b"])
def test_an_owners_name_never_becomes_a_path(place: Place, broker: Broker, owner: str):
    queue = queues_of(broker)[0]
    client = broker.groups.join(owner)
    locked(broker, "g", client, [queue])
    other = place.connect()
    rival = other.groups.join("rival")
    assert isinstance(other.groups.lock("g", rival, [queue])[queue], Refusal)
    broker.groups.leave(client)
    assert isinstance(other.groups.lock("g", rival, [queue])[queue], LockToken)


def test_a_free_queue_is_granted_and_a_held_one_is_refused_with_its_holder(place: Place, broker: Broker, clock: FakeClock):
    first, second, _ = queues_of(broker)
    me = broker.groups.join("me")
    [token] = locked(broker, "g", me, [first])
    assert (token.group, token.queue, token.owner, token.client_id) == ("g", first, "me", me.client_id)
    other = place.connect()
    them = other.groups.join("them")
    clock.pass_(20)
    out = other.groups.lock("g", them, [first, second])
    assert isinstance(out[second], LockToken)
    refusal = out[first]
    assert isinstance(refusal, Refusal)
    assert refusal.queue == first
    assert 0 < refusal.remaining <= LOCK_LIFE
    if broker.capabilities.names_owner:
        assert refusal.remaining == pytest.approx(LOCK_LIFE - 20)
        assert (refusal.owner, refusal.client_id, refusal.alive) == ("me", me.client_id, True)


def test_groups_do_not_mix(broker: Broker):
    queues = queues_of(broker)
    one, two = broker.groups.join("one"), broker.groups.join("two")
    a, b = locked(broker, "g", one, queues)[0], locked(broker, "g2", two, queues)[0]
    broker.groups.commit({a: 0})
    broker.groups.commit({b: 0})
    assert broker.groups.offsets("g", queues) == {queues[0]: 0} == broker.groups.offsets("g2", queues)
    assert broker.groups.offsets("other", queues) == {}


def test_asking_again_renews_under_the_same_epoch(broker: Broker, clock: FakeClock):
    queues = queues_of(broker)
    me = broker.groups.join("me")
    before = locked(broker, "g", me, queues)
    for _ in range(4):
        clock.pass_(RENEW_INTERVAL)
        assert locked(broker, "g", me, queues) == before
    assert all(broker.groups.check(token) for token in before)
    assert all(isinstance(one, Refusal) for one in broker.groups.lock("g", broker.groups.join("them"), queues).values())


def test_epochs_grow_over_all_groups_and_queues(broker: Broker):
    epochs = []
    for group in ("g", "h", "g"):
        client = broker.groups.join("me")
        tokens = locked(broker, group, client, queues_of(broker))
        epochs += [token.epoch for token in tokens]
        broker.groups.unlock(tokens)
    assert epochs == sorted(set(epochs))


@needs("clock")
def test_a_lock_is_held_at_sixty_seconds_and_taken_over_after(broker: Broker, clock: FakeClock):
    queue = queues_of(broker)[0]
    [token] = locked(broker, "g", broker.groups.join("me"), [queue])
    them = broker.groups.join("them")
    clock.pass_(LOCK_LIFE)
    assert isinstance(broker.groups.lock("g", them, [queue])[queue], Refusal)
    clock.pass_(0.001)
    assert broker.groups.check(token), "an expired lock is valid until another client takes it"
    locked(broker, "g", them, [queue])
    assert not broker.groups.check(token)


def test_renewals_keep_a_lock_for_as_long_as_they_come(place: Place, broker: Broker, clock: FakeClock):
    queue = queues_of(broker)[0]
    [token] = locked(broker, "g", broker.groups.join("me"), [queue])
    them = broker.groups.join("them")
    for _ in range(5):
        # If brokers keep no epochs, a holder trusts its lock for only 30 s.
        clock.pass_(59 if "epochs" not in place.lacks else RENEW_INTERVAL)
        assert broker.groups.renew([token]) == []
        assert isinstance(broker.groups.lock("g", them, [queue])[queue], Refusal)


@needs("epochs")
def test_renew_names_what_is_lost_and_prolongs_the_rest(broker: Broker, clock: FakeClock):
    first, second, third = queues_of(broker)
    me = broker.groups.join("me")
    a, b, c = locked(broker, "g", me, [first, second, third])
    broker.groups.unlock([b])
    clock.pass_(61)
    locked(broker, "g", broker.groups.join("them"), [third])
    assert broker.groups.renew([a, b, c]) == [b, c]
    assert [broker.groups.check(token) for token in (a, b, c)] == [True, False, False]
    assert broker.groups.renew([]) == []


def test_a_queue_that_was_given_back_is_free_at_once(broker: Broker):
    queue = queues_of(broker)[0]
    [token] = locked(broker, "g", broker.groups.join("me"), [queue])
    broker.groups.unlock([token])
    [other] = locked(broker, "g", broker.groups.join("them"), [queue])
    broker.groups.unlock([token])
    assert broker.groups.check(other), "a stale token must not release the new owner's lock"


@needs("linger")
def test_a_lingering_lock_lives_as_long_as_it_was_told_also_without_its_process(broker: Broker, clock: FakeClock):
    queue = queues_of(broker)[0]
    me, them = broker.groups.join("me"), broker.groups.join("them")
    [token] = locked(broker, "g", me, [queue])
    broker.groups.unlock([token], UNLOCK_DELAY)
    broker.groups.leave(me)
    clock.pass_(UNLOCK_DELAY)
    refusal = broker.groups.lock("g", them, [queue])[queue]
    assert isinstance(refusal, Refusal)
    assert refusal.lingering
    assert broker.groups.check(token)
    clock.pass_(0.1)
    locked(broker, "g", them, [queue])


def test_a_restart_of_the_same_query_does_not_wait_for_a_lingering_lock(place: Place, broker: Broker):
    queue = queues_of(broker)[0]
    me = broker.groups.join("me")
    [token] = locked(broker, "g", me, [queue])
    broker.groups.unlock([token], UNLOCK_DELAY)
    broker.groups.leave(me)
    [again] = locked(broker, "g", broker.groups.join("me"), [queue])
    assert again.epoch > token.epoch
    assert again.tenure == (token.tenure if "lineage" not in place.lacks else again.epoch)


def test_a_connection_that_was_closed_holds_nothing(place: Place, broker: Broker):
    other = place.connect()
    locked(other, "g", other.groups.join("them"), queues_of(broker))
    other.close()
    locked(broker, "g", broker.groups.join("me"), queues_of(broker))


@pytest.mark.fault("wall clock")
@pytest.mark.holds("wall clock")
def test_the_wall_clock_moves_no_lock(broker: Broker, clock: FakeClock):
    queue = queues_of(broker)[0]
    [token] = locked(broker, "g", broker.groups.join("me"), [queue])
    for hours in (100, -200):
        clock.micros += hours * 3600 * 1_000_000
        assert isinstance(broker.groups.lock("g", broker.groups.join("them"), [queue])[queue], Refusal)
        assert broker.groups.check(token)
    evidence.note(runs=2)


@needs("lineage")
def test_a_tenure_goes_on_until_somebody_else_is_granted_the_queue(broker: Broker, clock: FakeClock):
    queue = queues_of(broker)[0]

    def held_by(owner: str) -> LockToken:
        client = broker.groups.join(owner)
        [token] = locked(broker, "g", client, [queue])
        broker.groups.unlock([token])
        broker.groups.leave(client)
        return token

    first, second = held_by("me"), held_by("me")
    assert second.tenure == first.tenure < second.epoch
    other = held_by("them")
    assert other.tenure == other.epoch
    assert held_by("me").tenure > other.tenure


@pytest.mark.parametrize("group", ["", "a b", "g/h", "x" * 128, "ä", "g\0h"])
def test_a_name_that_is_no_groups_is_refused(broker: Broker, group: str):
    with refused("GROUP.BAD_NAME"):
        broker.groups.lock(group, broker.groups.join("me"), queues_of(broker))
    assert broker.admin.groups() == []


# -- offsets ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.holds("group offset")
def test_offsets_move_only_forward(broker: Broker):
    queues = queues_of(broker)
    broker.log.append({queues[0]: rows(range(9))})
    a, b, _ = locked(broker, "g", broker.groups.join("me"), queues)
    assert broker.groups.offsets("g", queues) == {}
    broker.groups.commit({a: 5, b: 0})
    assert broker.groups.offsets("g", queues) == {queues[0]: 5, queues[1]: 0}
    broker.groups.commit({a: 3, b: 0})
    assert broker.groups.offsets("g", queues) == {queues[0]: 5, queues[1]: 0}
    broker.groups.commit({a: 9})
    assert broker.groups.offsets("g", queues[:1]) == {queues[0]: 9}
    broker.groups.commit({})


def test_an_offset_below_zero_is_refused(broker: Broker):
    queue = queues_of(broker)[0]
    [token] = locked(broker, "g", broker.groups.join("me"), [queue])
    for call in (lambda: broker.groups.commit({token: -1}), lambda: broker.groups.reset({token: -1})):
        with refused("OFFSET.INVALID", -1):
            call()
    assert broker.groups.offsets("g", [queue]) == {}
    assert broker.groups.check(token)


@needs("epochs")
def test_a_released_lock_that_nobody_took_still_commits(broker: Broker):
    queue = queues_of(broker)[0]
    [token] = locked(broker, "g", broker.groups.join("me"), [queue])
    broker.groups.unlock([token])
    broker.groups.commit({token: 0})
    assert broker.groups.offsets("g", [queue]) == {queue: 0}


@pytest.mark.holds("one owner")
def test_a_stale_epoch_moves_nothing_and_neither_does_what_goes_with_it(broker: Broker, clock: FakeClock):
    if not broker.capabilities.fenced:
        pytest.skip("this kind of broker does not check epochs")
    queues = queues_of(broker)
    for queue in queues:
        broker.log.append({queue: rows(range(9))})
    mine = locked(broker, "g", broker.groups.join("me"), queues)
    broker.groups.commit(dict.fromkeys(mine, 1))
    clock.pass_(61)
    locked(broker, "g", broker.groups.join("them"), queues[1:2])
    run = SourceRun("query", 0, "run")
    broker.outbox.register(run, queues[1], span(1, 3), mine[1])
    staging = broker.outbox.open(SinkBatch("sink", 0, run), 0)
    staging.add(queues[2], rows(["late"]))
    receipt = staging.receipt()
    before = state(broker, ["orders"])
    for call in (
        lambda: broker.groups.commit(dict.fromkeys(mine, 2)),
        lambda: broker.groups.reset(dict.fromkeys(mine, 0)),
        lambda: broker.outbox.publish(SinkBatch("sink", 0, run), [receipt]),
    ):
        with refused("LOCK.LOST", queues[1], "'g'"):
            call()
        assert state(broker, ["orders"]) == before
    broker.groups.commit({mine[0]: 2})
    assert broker.groups.offsets("g", queues) == {queues[0]: 2, queues[1]: 1, queues[2]: 1}


def test_a_commit_that_changes_nothing_is_fenced_too(broker: Broker, clock: FakeClock):
    queue = queues_of(broker)[0]
    [token] = locked(broker, "g", broker.groups.join("me"), [queue])
    broker.groups.commit({token: 0})
    clock.pass_(61)
    locked(broker, "g", broker.groups.join("them"), [queue])
    with refused("LOCK.LOST"):
        broker.groups.commit({token: 0})


def test_a_reset_moves_in_any_direction_under_the_lock_that_stays_held(broker: Broker):
    queue, other, _ = queues_of(broker)
    broker.log.append({queue: rows(range(9))})
    me, them = broker.groups.join("me"), broker.groups.join("them")
    a, b = locked(broker, "g", me, [queue, other])
    broker.groups.commit({a: 7})
    [first, second] = broker.groups.reset({a: 3, b: 0})
    assert [token.queue for token in (first, second)] == [queue, other]
    assert broker.groups.offsets("g", [queue, other]) == {queue: 3, other: 0}
    assert broker.groups.stale([a, b, first, second]) == [a, b]
    with refused("LOCK.LOST"):
        broker.groups.commit({a: 9})
    assert broker.groups.renew([first, second]) == []
    assert isinstance(broker.groups.lock("g", them, [queue])[queue], Refusal)
    assert broker.groups.lock("g", me, [queue]) == {queue: first}
    broker.groups.commit({first: 4})
    assert broker.groups.offsets("g", [queue]) == {queue: 4}
    [first] = broker.groups.reset({first: 8})
    assert broker.groups.offsets("g", [queue]) == {queue: 8}


@pytest.mark.holds("other sinks")
@pytest.mark.parametrize("restarted", [True, False], ids=["killed before it is logged", "logged"])
@pytest.mark.parametrize("way", ["a reset", "a seek"])
def test_a_reset_of_a_queue_ends_the_tenure_of_that_queue_only(way: str, restarted: bool, broker: Broker):
    """A query whose checkpoint is older follows the group's offset in that queue, and its checkpoint in all others."""
    queue, other, _ = queues_of(broker)
    broker.log.append(dict.fromkeys((queue, other), rows(range(9))))
    lineage = broker.capabilities.fenced

    def owner(known: Checkpoint) -> tuple[Owner, dict[MessageQueue, int | None]]:
        """Start the query, and return where it resumes."""
        owner = Owner("me", lineage=lineage)
        owner.locked(locked(broker, "g", broker.groups.join("me"), [queue, other]))
        owner.enter(known, broker.groups.offsets("g", [queue, other]), {})
        return owner, {owned.queue: owned.position for owned in owner.owned.values()}

    def end(owner: Owner) -> None:
        broker.groups.unlock(owner.tokens())

    first, _ = owner(Checkpoint("me", {queue: 5, other: 5}))
    broker.groups.commit(dict.fromkeys(first.tokens(), 5))
    first.owned[queue].skip(7)
    first.owned[other].skip(7)
    logged = first.plan({}, {})
    assert logged.next == {queue: 7, other: 7}
    end(first)
    resumed = owner(logged)
    assert resumed[1] == logged.next
    if way == "a seek":
        end(resumed[0])
        broker.admin.seek("g", {queue: 2}, force=True)
        resumed = owner(logged)
    else:
        [token] = [token for token in resumed[0].tokens() if token.queue == queue]
        resumed[0].restarted(broker.groups.reset({token: 2}))
        resumed[0].skip(queue, 2)
    if restarted:
        end(resumed[0])
        resumed = owner(logged)
    assert resumed[0].following({}) == {queue: 2, other: 7}
    resumed[0].owned[queue].skip(4)
    logged = resumed[0].plan({}, {})
    end(resumed[0])
    assert owner(logged)[1] == {queue: 4, other: 7}


# -- from outside -----------------------------------------------------------------------------------------------------------------


def test_a_seek_sets_offsets_and_makes_every_earlier_token_stale(place: Place, broker: Broker):
    queue, other, _ = queues_of(broker)
    broker.log.append({queue: rows(range(9))})
    me = broker.groups.join("me")
    a, b = locked(broker, "g", me, [queue, other])
    broker.groups.commit({a: 7, b: 0})
    broker.groups.unlock([a, b])
    broker.admin.seek("g", {queue: 2})
    assert broker.groups.offsets("g", [queue, other]) == {queue: 2, other: 0}
    with refused("LOCK.LOST"):
        broker.groups.commit({a: 8})
    if "epochs" not in place.lacks:
        broker.groups.commit({b: 0})
    [again] = locked(broker, "g", me, [queue])
    assert again.tenure == again.epoch > a.epoch


def test_a_seek_of_a_group_in_use_is_refused_unless_forced(broker: Broker):
    queue = queues_of(broker)[0]
    me = broker.groups.join("me")
    broker.groups.heartbeat("g", me, Subscription("exclusive", "orders"))
    [token] = locked(broker, "g", me, [queue])
    with refused("GROUP.IN_USE", "'g'", me.client_id):
        broker.admin.seek("g", {queue: 0})
    assert broker.groups.check(token)
    broker.admin.seek("g", {queue: 0}, force=True)
    assert not broker.groups.check(token)
    assert broker.groups.renew([token]) == [token]


def test_a_seek_of_a_dead_or_expired_holders_group_needs_no_force(broker: Broker, clock: FakeClock):
    queue = queues_of(broker)[0]
    me = broker.groups.join("me")
    locked(broker, "g", me, [queue])
    broker.groups.leave(me)
    broker.admin.seek("g", {queue: 0})
    locked(broker, "g", broker.groups.join("them"), [queue])
    clock.pass_(61)
    broker.admin.seek("g", {queue: 0})


def test_a_seek_of_a_group_that_never_was_makes_it(broker: Broker):
    queue = queues_of(broker)[0]
    broker.log.append({queue: rows("abc")})
    broker.admin.seek("new", {queue: 3})
    assert broker.admin.group_offsets("new") == {queue: 3}


@pytest.mark.parametrize("offset", [-1, 4])
def test_a_seek_beyond_the_queue_is_refused_whole(broker: Broker, offset: int):
    queue, other, _ = queues_of(broker)
    broker.log.append({queue: rows("abc")})
    with refused("OFFSET.BEYOND_END", offset, queue):
        broker.admin.seek("g", {other: 0, queue: offset})
    assert broker.admin.groups() == []


@needs("owners")
def test_locks_are_listed_with_who_has_them_and_who_had_them(broker: Broker, clock: FakeClock):
    first, second, _ = queues_of(broker)
    me = broker.groups.join("me")
    a, b = locked(broker, "g", me, [first, second])
    locked(broker, "h", me, [first])
    broker.groups.unlock([b])
    clock.pass_(10)
    [one, two] = broker.admin.locks("g")
    assert (one.queue, one.owner, one.client_id, one.epoch, one.tenure, one.held, one.alive) == (
        (first, "me", me.client_id, a.epoch, a.tenure, True, True)
    )
    assert (one.age, one.remaining) == (10.0, 50.0)
    assert (two.queue, two.held, two.remaining, two.epoch) == (second, False, 0.0, b.epoch)
    assert [lock.group for lock in broker.admin.locks()] == ["g", "g", "h"]


def test_groups_are_those_with_offsets_or_locks(broker: Broker):
    queue = queues_of(broker)[0]
    assert broker.admin.groups() == []
    with refused("GROUP.MISSING", "'g'"):
        broker.admin.group_offsets("g")
    [token] = locked(broker, "g", broker.groups.join("me"), [queue])
    assert broker.admin.groups() == ["g"]
    assert broker.admin.group_offsets("g") == {}
    broker.groups.commit({token: 0})
    assert broker.admin.group_offsets("g") == {queue: 0}
