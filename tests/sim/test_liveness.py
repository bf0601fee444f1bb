"""After each change of membership every queue gets its owner in time, and queues move only as the strategy decides.

"In time" is two triggers of every query after a join, a clean stop or a kill on this machine, because these are noticed
immediately. After a pause, or a stop in the middle of a batch, the old owner's lock has to expire first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import LOCK_LIFE, UNLOCK_DELAY
from tests.sim.process import virtual
from tests.sim.query import Query
from tests.sim.simulation import Scenario, Simulation
from tests.sim.world import TICK

STRATEGIES = ("AVG", "AVG_BY_CIRCLE", "CONSISTENT_HASH")


class Group:
    """Up to four queries of one group, without random faults."""

    def __init__(self, strategy: str) -> None:
        kind = replace(
            Scenario.of(0).kind, keys=None, shared=True, strategy=strategy, atomic=True, listener=False, max_rows=None
        )
        self.simulation = Simulation(
            Scenario(0, calm=True, members=4, queues=8, seeks=False, stranger=False, twin=False, kind=kind)
        )
        self.world = self.simulation.world
        self.simulation.network.mishap = self.simulation.network.overlap = 0.0
        self.queries = self.simulation.queries
        for query in self.queries:
            query.staying = True

    def trigger(self, running: Sequence[Query]) -> None:
        """Run one trigger of each query: its boundary, and a micro-batch if there are messages to read."""
        self.world.advance(1.0)
        for query in running:
            for _ in range(100):
                query.step()
                if query.phase == "idle":
                    break
            assert query.phase == "idle"
            self.simulation._check()

    def settle(self, running: Sequence[Query]) -> None:
        """Run four triggers of each query. Two are not enough, because a new query's first batch is empty."""
        for _ in range(4):
            self.trigger(running)
        self.simulation._owned(running)

    def owners(self) -> dict[MessageQueue, str]:
        return {queue: lock.client_id for queue, lock in self.world.locks.items() if lock.held}

    @contextmanager
    def change(self, left: Sequence[Query], wait: float = 0.0) -> Iterator[None]:
        """Assert that two triggers after the block, the queries ``left`` own what the strategy gives them, and no other queue moved."""
        before, at = self.owners(), len(self.world.moves)
        for queue in self.world.queues:
            self.world.produce(queue, 2)
        yield
        self.world.advance(wait)
        self.trigger(left)
        self.trigger(left)
        self.simulation._owned(left)
        after = self.owners()
        moves = self.world.moves[at:]
        assert sorted(moves) == sorted((queue, client) for queue, client in after.items() if before.get(queue) != client)


@pytest.fixture(params=STRATEGIES)
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    found = Group(request.param)
    with virtual(found.simulation.network, lambda path: found.simulation.by_path[path].connect()):
        yield found


def end_idle(group: Group, query: Query) -> float:
    query.leave(terminated=True)
    return 0.0


def kill_the_runner(group: Group, query: Query) -> float:
    assert query.process is not None
    query.process.kill()
    return 0.0


def kill_the_driver(group: Group, query: Query) -> float:
    query.kill()
    return 0.0


def pause(group: Group, query: Query) -> float:
    assert query.process is not None
    query.process.frozen = True
    return LOCK_LIFE + TICK


def end_in_a_batch(group: Group, query: Query) -> float:
    while query.phase != "running":
        query.step()
    query.leave(terminated=True)
    return UNLOCK_DELAY + TICK


@pytest.mark.holds("shared take-over")
@pytest.mark.parametrize("ends", [end_idle, kill_the_runner, kill_the_driver, pause, end_in_a_batch])
def test_the_queues_of_who_is_gone_have_an_owner_in_time_and_no_other_moves(
    group: Group, ends: Callable[[Group, Query], float]
) -> None:
    first, second, third, _ = group.queries
    group.settle([first, second, third])
    left = [first, third]
    with group.change(left):
        group.world.advance(ends(group, second))


def test_a_new_member_gets_its_queues_within_two_triggers_after_its_first_and_no_other_queue_moves(group: Group) -> None:
    first, second, third, fourth = group.queries
    group.settle([first, second, third])
    with group.change(group.queries):
        # The first trigger of a query logs its identity and reads nothing.
        while fourth.committed == 0:
            fourth.step()


def test_new_queues_have_an_owner_within_two_triggers_and_each_queue_has_the_strategys_owner(group: Group) -> None:
    group.settle(group.queries)
    group.world.grow()
    group.world.grow()
    group.trigger(group.queries)
    group.trigger(group.queries)
    group.simulation._owned(group.queries)


def test_nothing_moves_while_nobody_comes_or_goes(group: Group) -> None:
    group.settle(group.queries)
    with group.change(group.queries):
        for _ in range(300):
            group.trigger(group.queries)
