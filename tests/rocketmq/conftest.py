"""Real RocketMQ servers and real Java clients for the tests of this folder: of one release, with --nightly of each.

Each cluster boots when the first test asks for it. Those that few tests need stop after the last of these, and the others after
the last test of the folder, because an idle broker takes 6 % of a CPU. Where the jars cannot be had, tests are skipped, but not
in CI. Before each test, servers that another one killed or paused run again.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import orderedmq
from orderedmq.broker import Broker
from orderedmq.errors import ServersError
from orderedmq.rocketmq.local.jars import DEFAULT_VERSION, VERSIONS, fetch_jars
from orderedmq.rocketmq.local.servers import TIME_WHEEL, Cluster
from orderedmq.rocketmq.sink.broker_queue import LockTiming
from tests.jars import jars_required
from tests.quick_spark import QUICK_SERVER
from tests.rocketmq.outbox_world import World
from tests.rocketmq.peers import Peers
from tests.rocketmq.proxy import Network
from tests.rocketmq.rocketmq_proxy import ProxyServer

#: Of these fixtures each has servers.
_CLUSTERS = ("cluster", "two_brokers", "quick_locks", "aging", "newest", "every_version")
#: Those that few tests need. These tests come first, and then the cluster goes: an idle broker takes 6 % of a CPU.
_SOME = ("quick_locks", "two_brokers", "aging", "newest")
#: A first fetch of jars is part of the first test's time.
_TIMEOUT = 900


#: Of a broker that delivers a message at a time of its own, has the topic of message traces, and finds messages by their keys.
#: By default it compares the 39 MB of its wheel with the file every second, byte by byte (TimerWheel.flush). With the options of
#: QUICK_SERVER that takes 20 % of a processor.
TIMED = {**TIME_WHEEL, "timerFlushIntervalMs": 10_000, "traceTopicEnable": True, "messageIndexEnable": True}
#: Of a broker that deletes what it has: small files, and no age that they must reach.
AGING = {
    "mappedFileSizeCommitLog": 4 << 20,
    "mappedFileSizeConsumeQueue": 2000,
    "fileReservedTime": 0,
    "cleanResourceInterval": 500,
}


class Clusters:
    """All clusters of the run. Each starts when a test asks for it."""

    def __init__(self) -> None:
        self._running: list[Cluster] = []
        self._pool = ThreadPoolExecutor(1, "clusters")
        self._usual: Cluster | None = None
        #: It starts before it is asked for.
        self._aging: Future[Cluster] | None = None
        self._folder: Path | None = None
        self._jars: dict[str, ServersError | None] = {}
        #: How many tests still need each of _SOME.
        self._needed: Counter[str] = Counter()
        self._extra: dict[str, Cluster] = {}
        #: Before the cluster "newest", and stops with it.
        self._proxy: ProxyServer | None = None
        self._starts = itertools.count()

    def jars(self, version: str) -> None:
        """Fetch them, or find out once that they cannot be had."""
        if version not in self._jars:
            try:
                fetch_jars(version)
                self._jars[version] = None
            except ServersError as error:
                self._jars[version] = error
        failed = self._jars[version]
        if failed is not None:
            raise failed

    def begin(self, items: Sequence[pytest.Item], factory: pytest.TempPathFactory) -> None:
        """Before the first test: count who needs which of _SOME, and start the one that needs a minute until it does what tests want."""
        if self._folder is None:
            self._folder = factory.mktemp("rocketmq")
            self._needed.update(name for item in items for name in _some(item))
            if self._needed["aging"]:
                self._aging = self._pool.submit(self.start, "aging", properties=AGING)

    def usual(self) -> Cluster:
        if self._usual is None:
            self._usual = self.start("usual")
        return self._usual

    def start(self, name: str, version: str = DEFAULT_VERSION, **more: Any) -> Cluster:
        assert self._folder is not None
        self.jars(version)
        folder = self._folder / f"{name}-{next(self._starts)}"
        folder.mkdir()
        cluster = Cluster(folder, version, jvm=QUICK_SERVER, **more)
        cluster.start()
        self._running.append(cluster)
        return cluster

    def extra(self, name: str, **more: Any) -> Cluster:
        """One of _SOME."""
        if name not in self._extra:
            started, self._aging = (self._aging, None) if name == "aging" else (None, self._aging)
            self._extra[name] = started.result() if started is not None else self.start(name, **more)
        return self._extra[name]

    def proxy(self) -> ProxyServer:
        """RocketMQ's own Proxy before the newest release, in cluster mode."""
        if self._proxy is None:
            cluster = self.newest()
            assert self._folder is not None
            home = self._folder / "rocketmq-proxy"
            home.mkdir()
            made = ProxyServer(home, cluster, {}, tls=True)
            made.start()
            self._proxy = made
        return self._proxy

    def newest(self) -> Cluster:
        return self.extra("newest", version=VERSIONS[-1], brokers=2)

    def done(self, names: Sequence[str]) -> None:
        """A test that needed these of _SOME is over."""
        self._needed.subtract(names)
        for name in names:
            if not self._needed[name] and name in self._extra:
                if name == "newest":
                    self._stop_proxy()
                self.stop(self._extra.pop(name))

    def _stop_proxy(self) -> None:
        if self._proxy is not None:
            self._proxy.stop()
            self._proxy = None

    def stop(self, cluster: Cluster) -> None:
        self._running.remove(cluster)
        cluster.stop()

    def heal(self) -> None:
        for cluster in list(self._running):
            cluster.heal()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._stop_proxy()
        # The fixtures of the package end before `done` is called for its last test.
        self._extra.clear()
        for cluster in list(self._running):
            self.stop(cluster)


_clusters = Clusters()


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.rocketmq)
    if _wants_servers(item) and item.get_closest_marker("timeout") is None:
        item.add_marker(pytest.mark.timeout(_TIMEOUT))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("nightly"):
        left = [item for item in items if set(_versions(item)) - {DEFAULT_VERSION}]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]
    places = [place for place, item in enumerate(items) if Path(__file__).parent in item.path.parents]
    for place, item in zip(places, sorted((items[place] for place in places), key=_turn)):
        items[place] = item


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """When all fixtures that are over have ended."""
    yield
    _clusters.done(_some(item))


def _wants_servers(item: pytest.Item) -> bool:
    return Path(__file__).parent in item.path.parents and bool(set(_CLUSTERS).intersection(getattr(item, "fixturenames", ())))


def _some(item: pytest.Item) -> list[str]:
    return [name for name in _SOME if name in getattr(item, "fixturenames", ())]


def _turn(item: pytest.Item) -> int:
    """Tests of this folder that need the same of _SOME follow one another; all else stays as it is."""
    return min((place for place, name in enumerate(_SOME) if name in _some(item)), default=len(_SOME))


def _versions(item: pytest.Item) -> list[str]:
    """Of the session's clusters."""
    if "cluster" in getattr(item, "fixturenames", ()):
        return [DEFAULT_VERSION]
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return [version for name, version in parameters.items() if name == "every_version"]


def _started(start: Callable[[], Cluster]) -> Cluster:
    with jars_required():
        return start()


@pytest.fixture(scope="package", autouse=True)
def _servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The lives of all clusters of this folder."""
    _clusters.begin(request.session.items, tmp_path_factory)
    yield
    _clusters.close()


@pytest.fixture(scope="package")
def cluster() -> Cluster:
    """A nameserver and one broker of the usual version."""
    return _started(_clusters.usual)


@pytest.fixture(scope="module")
def two_brokers() -> Cluster:
    """A nameserver and two brokers."""
    return _started(lambda: _clusters.extra("two_brokers", brokers=2))


@pytest.fixture(scope="module")
def quick_locks() -> Cluster:
    """A cluster whose queue locks live 3 s, and whose broker has the time wheel."""
    return _started(lambda: _clusters.extra("quick_locks", lock_life=3.0, properties=TIMED))


@pytest.fixture(scope="module")
def aging() -> Cluster:
    """A broker that deletes full files at once, of a few messages. It begins with that a minute after its start."""
    return _started(lambda: _clusters.extra("aging", properties=AGING))


@pytest.fixture(scope="module")
def newest() -> Cluster:
    """A nameserver and two brokers of the newest release."""
    return _started(_clusters.newest)


@pytest.fixture
def direct(newest: Cluster) -> Iterator[Broker]:
    with orderedmq.connect(namesrv_addr=newest.address) as broker:
        yield broker


@pytest.fixture
def proxy(newest: Cluster) -> ProxyServer:
    """RocketMQ's own Proxy before ``newest``; it takes connections with TLS, too."""
    with jars_required():
        return _clusters.proxy()


@pytest.fixture
def through(proxy: ProxyServer) -> Iterator[Broker]:
    with orderedmq.connect(namesrv_addr=proxy.address) as broker:
        yield broker


@pytest.fixture(scope="package", params=VERSIONS)
def every_version(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster of each version in turn; pytest sorts the tests so that each boots once."""
    if request.param == DEFAULT_VERSION:
        yield _started(_clusters.usual)
        return
    made = _started(lambda: _clusters.start(f"v{request.param}", request.param, properties=TIMED))
    yield made
    _clusters.stop(made)


@pytest.fixture(scope="package")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peers]:
    """RocketMQ's Java client."""
    with jars_required():
        _clusters.jars(DEFAULT_VERSION)
        made = Peers(tmp_path_factory.mktemp("peers"))
    yield made
    made.close()


@pytest.fixture
def timing() -> LockTiming:
    """Of the outboxes of ``usual``. A module that needs another has a fixture of this name."""
    return LockTiming()


@pytest.fixture
def usual(cluster: Cluster, timing: LockTiming) -> Iterator[World]:
    """A topic and a sink of the test's own."""
    with World(cluster, timing) as made:
        yield made


@pytest.fixture
def network(usual: World) -> Iterator[Network]:
    """A network before the servers of ``usual``, which spoils connections."""
    with Network.before(usual.cluster) as made:
        yield made


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats and renewals have 3 s, for as long as a machine may stand still."""
    for name in ("groups._RENEW_TIMEOUT", "groups._LOCK_TIMEOUT", "membership._BEAT_TIMEOUT", "membership._TIMEOUT"):
        monkeypatch.setattr(f"orderedmq.rocketmq.group.{name}", 60.0)


@pytest.fixture(autouse=True)
def _healed(request: pytest.FixtureRequest) -> None:
    """No test meets what another one broke."""
    if _wants_servers(request.node):
        _clusters.heal()
