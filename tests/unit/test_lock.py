"""Queue locks: RocketMQ's rules, and our additions: epochs, liveness, lingering and lineage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from orderedmq.model import MessageQueue
from orderedmq.ownership import lock as rules
from orderedmq.ownership.lock import ClientIdentity, Instant, LockToken, QueueLock

Q = MessageQueue("orders", "embedded", 0)
A1, A2 = ClientIdentity("a", "a@1"), ClientIdentity("a", "a@2")
B1 = ClientIdentity("b", "b@1")


def at(seconds: float, boot: str = "boot") -> Instant:
    return Instant(boot, seconds)


def everyone(client_id: str) -> bool:
    return True


def nobody(client_id: str) -> bool:
    return False


def unasked(client_id: str) -> bool:
    raise AssertionError("the decision must not depend on liveness")


def ask(
    lock: QueueLock | None,
    client: ClientIdentity,
    seconds: float,
    epoch: int,
    alive: Callable[[str], bool] = everyone,
    boot: str = "boot",
) -> QueueLock | None:
    return rules.grant(lock, client, at(seconds, boot), next_epoch=epoch, alive=alive)


def granted(client: ClientIdentity = A1, seconds: float = 0.0, epoch: int = 1) -> QueueLock:
    lock = ask(None, client, seconds, epoch, unasked)
    assert lock is not None
    return lock


def token_of(lock: QueueLock) -> LockToken:
    return rules.token_of(lock, "g", Q)


def given_back(lock: QueueLock, seconds: float = 1.0) -> QueueLock:
    free = rules.unlock(lock, token_of(lock), at(seconds))
    assert free is not None
    return free


def lingering(lock: QueueLock, seconds: float, linger: float) -> QueueLock:
    lasting = rules.unlock(lock, token_of(lock), at(seconds), linger)
    assert lasting is not None
    return lasting


def test_a_free_queue_is_granted_and_its_tenure_begins_with_the_epoch():
    lock = granted(A1, 5.0, 7)
    assert (lock.owner, lock.client_id, lock.epoch, lock.tenure, lock.held) == ("a", "a@1", 7, 7, True)
    assert lock.renewed == at(5.0)


def test_a_refusal_names_the_holder_and_the_remaining_time():
    lock = granted()
    assert ask(lock, B1, 20.0, 2) is None
    told = rules.refusal(lock, Q, at(20.0), True)
    assert (told.queue, told.owner, told.client_id, told.alive, told.lingering, told.remaining) == (
        Q,
        "a",
        "a@1",
        True,
        False,
        40.0,
    )


def test_a_lock_is_held_at_sixty_seconds_and_taken_over_after():
    lock = granted()
    assert ask(lock, B1, 60.0, 2) is None
    assert rules.refusal(lock, Q, at(60.0), True).remaining == 0.0
    taken = ask(lock, B1, 60.000001, 2, unasked)
    assert taken is not None
    assert taken.owner == "b"


@pytest.mark.holds("former run")
def test_another_living_run_of_the_owner_is_refused():
    assert ask(granted(), A2, 1.0, 2) is None


def test_a_lock_of_an_earlier_boot_is_expired_at_any_time():
    lock = granted(seconds=1000.0)
    for seconds in (0.0, 999.0, 1000.0, 1001.0):
        taken = ask(lock, B1, seconds, 2, unasked, boot="next boot")
        assert taken is not None
        assert taken.renewed == at(seconds, "next boot")
    assert lock.remaining(at(1.0, "next boot")) == 0.0


def test_the_same_owner_keeps_its_tenure_across_a_boot():
    again = ask(granted(epoch=3), A2, 1.0, 8, unasked, boot="next boot")
    assert again is not None
    assert again.tenure == 3


def test_renew_does_not_bring_a_lingering_lock_back_to_life():
    lock = lingering(granted(), 1.0, 20.0)
    assert rules.renew(lock, token_of(lock), at(2.0)) is None


def test_the_fence_accepts_the_last_holder_until_the_next_grant():
    lock = granted()
    token = token_of(lock)
    assert rules.is_current(lock, token)
    free = given_back(lock)
    assert rules.is_current(free, token)
    assert not rules.is_held(free, token)
    taken = ask(free, B1, 2.0, 2, unasked)
    assert not rules.is_current(taken, token)
    assert not rules.is_current(None, token)


def test_a_stale_token_unlocks_nothing():
    taken = ask(granted(), B1, 61.0, 2, unasked)
    assert rules.unlock(taken, token_of(granted()), at(62.0)) is None
    assert rules.unlock(None, token_of(granted()), at(62.0)) is None
    assert rules.unlock(given_back(granted()), token_of(granted()), at(62.0)) is None


def test_a_lingering_lock_outlives_its_dead_process_for_others():
    lock = lingering(granted(), 10.0, 20.0)
    assert ask(lock, B1, 30.0, 2, nobody) is None
    assert rules.refusal(lock, Q, at(30.0), False).lingering
    assert ask(lock, B1, 30.1, 2, unasked) is not None


def test_a_lingering_lock_ends_for_its_own_query_with_its_process():
    lock = lingering(granted(epoch=3), 10.0, 20.0)
    assert ask(lock, A2, 11.0, 7, everyone) is None
    again = ask(lock, A2, 11.0, 7, nobody)
    assert again is not None
    assert (again.epoch, again.tenure, again.lingering) == (7, 3, False)


def test_lingering_never_prolongs_a_lock():
    lock = lingering(granted(), 55.0, 20.0)
    assert lock.remaining(at(55.0)) == 5.0
    shorter = lingering(lock, 57.0, 20.0)
    assert shorter.remaining(at(57.0)) == 3.0
    assert lingering(granted(), 99.0, 20.0).expired(at(99.1))


def test_a_seek_frees_the_queue_forgets_the_lineage_and_makes_every_token_stale():
    lock = rules.sought(9, at(5.0))
    assert not rules.is_current(lock, token_of(granted(epoch=3)))
    assert rules.renew(lock, token_of(granted(epoch=3)), at(6.0)) is None
    again = ask(lock, A1, 6.0, 10, unasked)
    assert again is not None
    assert again.tenure == 10


def test_an_orphaned_lock_holds_for_its_owner_and_a_new_queue_of_the_name_is_free():
    orphan = replace(granted(), orphaned=True)
    assert rules.is_current(orphan, token_of(orphan))
    assert rules.renew(orphan, token_of(orphan), at(20.0)) is not None
    for client in (A1, B1):
        again = ask(orphan, client, 21.0, 2, unasked)
        assert again is not None
        assert (again.epoch, again.tenure, again.orphaned) == (2, 2, False)
