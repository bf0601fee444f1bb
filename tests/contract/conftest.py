"""The brokers that the contract suite holds to the protocols of orderedmq/broker.py.

A new kind of broker is one more entry of KINDS: something that makes connections to one place, with a clock that tests move, and a list
of what it cannot do by nature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from orderedmq.broker import Broker
from orderedmq.embedded.broker import EmbeddedBroker
from orderedmq.embedded.check import check
from tests.contract.rocketmq import SERVERS, RocketMQPlace
from tests.contract.support import FakeClock, Place


class EmbeddedPlace:
    """A directory. What a test leaves there must be consistent."""

    lacks: ClassVar[Mapping[str, str]] = {}

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


KINDS: dict[str, type[EmbeddedPlace] | type[RocketMQPlace]] = {"embedded": EmbeddedPlace, "rocketmq": RocketMQPlace}
#: A first fetch of jars, and the servers' boot, are part of the first test's time.
_SERVERS_TIMEOUT = 900


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "needs(*features): skipped for kinds of brokers that lack one of these; see support.needs"
    )


def _uses_servers(item: pytest.Item) -> bool:
    return hasattr(item, "callspec") and item.callspec.params.get("broker_factory") == "rocketmq"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in filter(_uses_servers, items):
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_SERVERS_TIMEOUT))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    if any(map(_uses_servers, session.items)) and not session.config.option.collectonly:
        factory: pytest.TempPathFactory = session.config._tmp_path_factory  # type: ignore[attr-defined]
        SERVERS.prepare(factory.mktemp("contract-rocketmq"))


def pytest_sessionfinish() -> None:
    SERVERS.close()


@pytest.fixture(params=sorted(KINDS))
def broker_factory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Place]]:
    """Each call is a new, empty place of its own; a cluster is one place only."""
    made: list[Place] = []
    kind = KINDS[request.param]
    for marker in request.node.iter_markers("needs"):
        for feature in marker.args:
            if feature in kind.lacks:
                pytest.skip(f"{request.param} has no {feature}: {kind.lacks[feature]}")

    def make() -> Place:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(kind(folder))
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
