"""Tables that get each message once, by queries that are killed, paused and taken over."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.jars import jars_required
from tests.live.faults.conftest import World
from tests.live.faults.drivers import Driver
from tests.live.faults.once_loop import LoopDriver
from tests.live.faults.once_storm import OnceStorm
from tests.live.faults.store_access import age
from tests.postgres import Postgres

#: Longer than any lock lives.
_LONG = 1000.0


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with jars_required():
        server = Postgres()
    with server:
        yield server


@pytest.mark.fault("killed process", "embedded")
@pytest.mark.holds("tables once")
@pytest.mark.nightly
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("driver", [Driver, LoopDriver])
def test_tables_have_each_message_once_after_kills_pauses_and_take_overs(
    driver: type[Driver] | type[LoopDriver], worlds: Callable[..., World], postgres: Postgres
) -> None:
    world = worlds(4)

    def expire() -> None:
        # A living query keeps its queues unless another one takes them, and the other one is paused.
        for owner in {lock.owner for lock in world.broker.admin.locks(world.group)}:
            age(world.path, owner, _LONG)

    OnceStorm(world, postgres.database, expire, driver).run()
