"""Queries of a RocketMQ group whose broker restarts, is paused or is away: no seed breaks a promise, and each planted bug shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final
from unittest import mock

import pytest

from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import LockToken
from orderedmq.rocketmq.group import groups
from orderedmq.rocketmq.group.groups import RocketMQGroups
from orderedmq.rocketmq.group.locks import Commits
from orderedmq.rocketmq.group.offsets import GroupOffsets
from orderedmq.rocketmq.group.roster import Roster
from tests import evidence
from tests.sim.broker_faults import Simulation, violation

#: The number of seeds in the fast tier and in the long one.
SEEDS: Final = 60
MANY_SEEDS: Final = 3000
#: The number of seeds within which a planted bug must show.
ENOUGH: Final = 1000


def new_member_takes_what_a_broker_forgot() -> AbstractContextManager[Any]:
    """A new member trusts the member list of a broker that has just been restarted."""
    return mock.patch.object(Roster, "may_lack_members", lambda self, group, _, trust: self._rejoins(group, trust))


def late_renewal_is_a_loss() -> AbstractContextManager[Any]:
    """A lock that was not renewed in time counts as lost, although nobody else had the queue."""
    confirm = RocketMQGroups._confirm_at_broker

    def loses(self: RocketMQGroups, tokens: Sequence[LockToken], left: float) -> set[LockToken]:
        now = vars(groups)["time"].monotonic()
        locks = {token: self._held_locks.own(token) for token in tokens}
        late = {token for token, lock in locks.items() if lock is not None and not lock.trusted(now, self.trust)}
        rest = [token for token in tokens if token not in late]
        return late | (confirm(self, rest, left) if rest else set())

    return mock.patch.object(RocketMQGroups, "_confirm_at_broker", loses)


def late_renewal_takes_a_queue_back() -> AbstractContextManager[Any]:
    """A lock that was not renewed in time is renewed although another query had the queue in between."""
    confirm = RocketMQGroups._confirm_at_broker

    def takes(self: RocketMQGroups, tokens: Sequence[LockToken], left: float) -> set[LockToken]:
        with mock.patch.object(GroupOffsets, "fences", lambda _, __, queues, *___: dict.fromkeys(queues, 0)):
            return confirm(self, tokens, left)

    return mock.patch.object(RocketMQGroups, "_confirm_at_broker", takes)


def unlock_without_forgotten_offsets() -> AbstractContextManager[Any]:
    """A queue is given back although its broker has forgotten the last committed offset."""
    repeat = Commits.repeat

    def skips(self: Commits, *arguments: Any, wait: float = 0.0) -> list[LockToken]:
        return [] if wait else repeat(self, *arguments)

    return mock.patch.object(Commits, "repeat", skips)


def tenure_ends_with_the_run() -> AbstractContextManager[Any]:
    """A restarted query does not tell the broker which tenures its checkpoint has."""
    lock = RocketMQGroups.lock

    def forgets(self: RocketMQGroups, group: str, client: Any, queues: Sequence[MessageQueue], _: Any = None) -> Any:
        return lock(self, group, client, queues)

    return mock.patch.object(RocketMQGroups, "lock", forgets)


#: The planted bugs, each with a seed that notices it at present.
BUGS: Final[dict[Callable[[], AbstractContextManager[Any]], int]] = {
    new_member_takes_what_a_broker_forgot: 2,
    late_renewal_is_a_loss: 1,
    late_renewal_takes_a_queue_back: 596,
    unlock_without_forgotten_offsets: 226,
    tenure_ends_with_the_run: 4,
}


@pytest.mark.fault("all at random, simulated", "RocketMQ")
@pytest.mark.holds("one owner", "late renewal", "group offset")
@pytest.mark.timeout(1800)
def test_a_group_keeps_its_promises_whatever_happens_to_its_broker(nightly: bool) -> None:
    seeds = range(MANY_SEEDS if nightly else SEEDS)
    for seed in seeds:
        simulation = Simulation(seed)
        found = violation(simulation)
        assert found is None, f"seed {seed}: {found}\n" + "\n".join(simulation.trace[-80:])
    evidence.note(runs=len(seeds))


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
@pytest.mark.timeout(600)
def test_a_planted_bug_is_caught(bug: Callable[[], AbstractContextManager[Any]]) -> None:
    """The known seed is only the first one to try, because each change of the code's requests changes what a seed does."""
    for seed in (BUGS[bug], *range(ENOUGH)):
        with bug():
            found = violation(Simulation(seed))
        if found is not None:
            assert violation(Simulation(seed)) is None, f"seed {seed} also fails without the bug"
            return
    pytest.fail(f"{ENOUGH} seeds do not notice: {bug.__doc__}")
