"""The brokers that the contract suite holds to the protocols of orderedmq/broker.py.

A new kind of broker is one more entry of KINDS: something that makes connections to one place, with a clock that tests move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orderedmq.broker import Broker
from orderedmq.embedded.broker import EmbeddedBroker
from orderedmq.embedded.check import check
from tests.contract.support import FakeClock, Place


class EmbeddedPlace:
    """A directory. What a test leaves there must be consistent."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "store"
        self.clock = FakeClock()
        self._connections: list[Broker] = []

    def connect(self) -> Broker:
        broker = EmbeddedBroker(self.path, clock=self.clock)
        self._connections.append(broker)
        return broker

    def connecting(self) -> str:
        return (
            "from pathlib import Path\n"
            "from orderedmq.embedded.broker import EmbeddedBroker\n"
            "from tests.contract.support import FakeClock\n"
            f"broker = EmbeddedBroker(Path({str(self.path)!r}), clock={self.clock!r})\n"
        )

    def close(self) -> None:
        for broker in self._connections:
            broker.close()
        if self.path.exists():
            assert check(self.path) == []


KINDS: dict[str, Callable[[Path], EmbeddedPlace]] = {"embedded": EmbeddedPlace}


@pytest.fixture(params=sorted(KINDS))
def broker_factory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Place]]:
    """Each call is a new, empty place of its own."""
    made: list[EmbeddedPlace] = []

    def make() -> Place:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(KINDS[request.param](folder))
        return made[-1]

    yield make
    for place in made:
        place.close()


@pytest.fixture
def place(broker_factory: Callable[[], Place]) -> Place:
    return broker_factory()


@pytest.fixture
def broker(place: Place) -> Broker:
    """A connection to a place that has a topic ``orders`` of three queues."""
    broker = place.connect()
    broker.admin.create_topic("orders", 3)
    return broker


@pytest.fixture
def clock(place: Place) -> FakeClock:
    return place.clock
