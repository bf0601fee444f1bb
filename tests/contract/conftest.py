"""The brokers that the contract suite tests against the protocols of orderedmq/broker.py.

A new kind of broker needs an entry in KINDS and a Place. A Place makes connections to one broker, and has a clock that tests move
and a list of the features that the broker lacks by nature.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from orderedmq.broker import Broker
from orderedmq.embedded.broker import EmbeddedBroker
from orderedmq.embedded.check import check
from orderedmq.embedded.store import transaction
from orderedmq.ownership.lock import ClientIdentity, LockToken
from orderedmq.rocketmq.local.jars import VERSIONS
from tests.contract.rocketmq import RocketMQPlace, lacks, servers
from tests.contract.support import FakeClock, Place, locked, queues_of, rows
from tests.jars import jars_required


class EmbeddedPlace:
    """A store in a directory. Closing it checks that the store is consistent."""

    def __init__(self, folder: Path) -> None:
        self.lacks: Mapping[str, str] = {}
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

    def ended(self, client: ClientIdentity, group: str) -> None:
        """Do nothing, because every client sees that the process is dead."""

    def close(self) -> None:
        for broker in self._connections:
            broker.close()
        if self.path.exists():
            assert check(self.path) == []


ROOT = Path(__file__).parents[2]
#: Seconds. The first test's time includes the download of the jars and the start of the servers.
_SERVERS_TIMEOUT = 900
_ROCKETMQ = "rocketmq-"
#: The embedded broker with its default settings, and with all payloads in segment files, however small they are.
_EMBEDDED, _SEGMENTS = "embedded", "embedded-segments"
#: The modules that write payloads. The others are the same with and without segment files.
_OF_PAYLOADS = ("test_admin", "test_dead_letters", "test_filters", "test_log", "test_outbox", "test_parking")
KINDS = (_EMBEDDED, _SEGMENTS, *(_ROCKETMQ + version for version in VERSIONS))
#: The fast tier tests the newest release, because users move towards it. Most of tests/live/rocketmq uses an older one.
_USUAL = VERSIONS[-1]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "needs(*features): skipped for kinds of brokers that lack one of these features; see support.needs"
    )


def _kind(item: pytest.Item) -> str:
    """Return the kind of broker of a test, or an empty text if it has none."""
    kind = item.callspec.params.get("kind") if hasattr(item, "callspec") else None
    return kind if isinstance(kind, str) else ""


def _version(item: pytest.Item) -> str | None:
    """Return the version of the servers that a test needs, or None if it needs none."""
    kind = _kind(item)
    return kind.removeprefix(_ROCKETMQ) if kind.startswith(_ROCKETMQ) else None


def pytest_itemcollected(item: pytest.Item) -> None:
    if _version(item) is not None:
        item.add_marker(pytest.mark.rocketmq)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_SERVERS_TIMEOUT))


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Leave out the tests with segment files in the other modules. Deselected tests would count as tests that were not run."""
    items = yield
    if not isinstance(items, list):
        return items
    return [item for item in items if _kind(item) != _SEGMENTS or item.path.stem in _OF_PAYLOADS]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("nightly"):
        return
    left = {item for item in items if _version(item) not in (None, _USUAL)}
    config.hook.pytest_deselected(items=list(left))
    items[:] = [item for item in items if item not in left]


@pytest.fixture(scope="package", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The kind of broker. pytest sorts the tests by kind, so that each version's servers start once and stop early."""
    if request.param == _EMBEDDED:
        yield request.param
        return
    if request.param == _SEGMENTS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transaction, "INLINE_BYTES", 0)
            yield request.param
        return
    with jars_required():
        servers.start(tmp_path_factory.mktemp("contract"), request.param.removeprefix(_ROCKETMQ))
    with pytest.MonkeyPatch.context() as patch:
        # The suite has no producers that keep a route. tests/live/rocketmq/test_resize.py resizes with Java's producers.
        for constant in (
            "resizing.PAUSE",
            "resizing.SETTLED",
            "resizing.AGE",
            "messages.resizes.AGE",
            "messages.log.ROUTE_FRESH",
        ):
            patch.setattr(f"orderedmq.rocketmq.{constant}", 0.0)
        yield request.param
    servers.stop()


@pytest.fixture
def broker_factory(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Place]]:
    """A function that returns an empty place: a new store at each call, or the one RocketMQ cluster."""
    made: list[Place] = []
    cannot = {} if kind in (_EMBEDDED, _SEGMENTS) else lacks(kind.removeprefix(_ROCKETMQ))
    for marker in request.node.iter_markers("needs"):
        for feature in marker.args:
            if feature in cannot:
                pytest.skip(f"{kind} lacks {feature!r}: {cannot[feature]}")

    def make() -> Place:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        embedded = kind in (_EMBEDDED, _SEGMENTS)
        made.append(EmbeddedPlace(folder) if embedded else RocketMQPlace(kind.removeprefix(_ROCKETMQ)))
        return made[-1]

    yield make
    for place in made:
        place.close()


@pytest.fixture
def place(broker_factory: Callable[[], Place]) -> Place:
    return broker_factory()


@pytest.fixture
def broker(place: Place) -> Broker:
    """A connection to a place with a topic ``orders``, which has three queues."""
    broker = place.connect()
    broker.admin.create_topic("orders", 3)
    return broker


@pytest.fixture
def clock(place: Place) -> FakeClock:
    return place.clock


@pytest.fixture
def token(broker: Broker) -> LockToken:
    """The lock of group ``g`` on the first queue of ``orders``, which has ten messages."""
    queue = queues_of(broker)[0]
    broker.log.append({queue: rows(range(10))})
    [token] = locked(broker, "g", broker.groups.join("me"), [queue])
    return token


MEMBER = """
import sys
from orderedmq.ownership.membership import Subscription
client = broker.groups.join("them")
broker.groups.heartbeat("g", client, Subscription("shared", "orders", "averagely"))
broker.groups.lock("g", client, broker.log.queues("orders"))
print(client.client_id, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def start(place: Place) -> Iterator[Callable[[], tuple[subprocess.Popen, ClientIdentity]]]:
    """A function that starts a process that is a member of group ``g`` and owns all queues of ``orders``."""
    started: list[tuple[subprocess.Popen, ClientIdentity]] = []

    def make() -> tuple[subprocess.Popen, ClientIdentity]:
        process = subprocess.Popen(
            [sys.executable, "-c", place.connecting() + MEMBER],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        client = ClientIdentity("them", process.stdout.readline().strip())
        started.append((process, client))
        assert client.client_id, "the member failed to start"
        return started[-1]

    yield make
    for process, client in started:
        process.kill()
        process.communicate()
        place.ended(client, "g")
