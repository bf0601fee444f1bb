"""Real RocketMQ servers and Java clients for the tests of this folder. Tests use one release, with --nightly every release.

Each cluster starts when the first test requests it. A cluster that few tests need stops after the last of them, and the others stop
after the last test of the folder, because an idle broker takes 6 % of a CPU. If the jars cannot be downloaded, tests are skipped, or
fail in CI. Before each test, servers that another test killed or paused are started again.
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
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.rocketmq.sink.broker_lock import LockTiming
from tests.jars import jars_required
from tests.live.rocketmq.outbox_world import World
from tests.live.rocketmq.peers import Peers
from tests.live.rocketmq.proxy import Network
from tests.live.rocketmq.rocketmq_proxy import ProxyServer
from tests.quick_spark import QUICK_SERVER

#: The fixtures that start servers.
_CLUSTERS = ("cluster", "two_brokers", "quick_locks", "quick_offsets", "aging", "newest", "every_version")
#: Clusters that few tests need. Their tests run first, so that the clusters can stop early.
_SOME = ("quick_locks", "quick_offsets", "two_brokers", "aging", "newest")
#: Seconds. The first test's time may include the download of the jars.
_TIMEOUT = 900


#: Settings of a broker that deletes messages quickly: small files, and no minimum age.
AGING = {
    "mappedFileSizeCommitLog": 4 << 20,
    "mappedFileSizeConsumeQueue": 2000,
    "fileReservedTime": 0,
    "cleanResourceInterval": 500,
}


class Clusters:
    """All clusters of the run. Each starts when a test requests it."""

    def __init__(self) -> None:
        self._running: list[Cluster] = []
        self._pool = ThreadPoolExecutor(1, "clusters")
        self._usual: Cluster | None = None
        #: The cluster "aging", which starts before a test requests it.
        self._aging: Future[Cluster] | None = None
        self._folder: Path | None = None
        self._jars: dict[str, ServersError | None] = {}
        #: How many tests still need each cluster of _SOME.
        self._needed: Counter[str] = Counter()
        self._extra: dict[str, Cluster] = {}
        #: The Proxy in front of the cluster "newest". It stops with that cluster.
        self._proxy: ProxyServer | None = None
        self._starts = itertools.count()

    def jars(self, version: str) -> None:
        """Download the jars of a version. If that failed before, raise the same error again."""
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
        """Count how many tests need each cluster of _SOME, and start "aging", which deletes nothing in its first minute."""
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
        if name not in self._extra:
            started, self._aging = (self._aging, None) if name == "aging" else (None, self._aging)
            self._extra[name] = started.result() if started is not None else self.start(name, **more)
        return self._extra[name]

    def proxy(self) -> ProxyServer:
        """Return RocketMQ's own Proxy in front of the newest release, in cluster mode."""
        if self._proxy is None:
            cluster = self.newest()
            assert self._folder is not None
            home = self._folder / "rocketmq-proxy"
            home.mkdir()
            proxy_server = ProxyServer(home, cluster, {}, tls=True)
            proxy_server.start()
            self._proxy = proxy_server
        return self._proxy

    def newest(self) -> Cluster:
        return self.extra("newest", version=VERSIONS[-1], brokers=2)

    def done(self, names: Sequence[str]) -> None:
        """Stop the named clusters of _SOME that no remaining test needs."""
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
        # The fixtures of the package end before `done` is called for the last test.
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
    """Release the clusters after all fixtures of the test have ended."""
    yield
    _clusters.done(_some(item))


def _wants_servers(item: pytest.Item) -> bool:
    return Path(__file__).parent in item.path.parents and bool(set(_CLUSTERS).intersection(getattr(item, "fixturenames", ())))


def _some(item: pytest.Item) -> list[str]:
    return [name for name in _SOME if name in getattr(item, "fixturenames", ())]


def _turn(item: pytest.Item) -> int:
    """Return a sort key that brings together tests of this folder that need the same cluster of _SOME."""
    return min((place for place, name in enumerate(_SOME) if name in _some(item)), default=len(_SOME))


def _versions(item: pytest.Item) -> list[str]:
    """Return the versions of the session's clusters that a test uses."""
    if "cluster" in getattr(item, "fixturenames", ()):
        return [DEFAULT_VERSION]
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return [version for name, version in parameters.items() if name == "every_version"]


def _started(start: Callable[[], Cluster]) -> Cluster:
    with jars_required():
        return start()


@pytest.fixture(scope="package", autouse=True)
def _servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Starts clusters in advance, and stops all of them after the last test of this folder."""
    _clusters.begin(request.session.items, tmp_path_factory)
    yield
    _clusters.close()


@pytest.fixture(scope="package")
def cluster() -> Cluster:
    """A nameserver and one broker of the default version."""
    return _started(_clusters.usual)


@pytest.fixture(scope="module")
def two_brokers() -> Cluster:
    """A nameserver and two brokers."""
    return _started(lambda: _clusters.extra("two_brokers", brokers=2))


@pytest.fixture(scope="module")
def quick_locks() -> Cluster:
    """A cluster whose queue locks live 3 s."""
    return _started(lambda: _clusters.extra("quick_locks", lock_life=3.0))


@pytest.fixture(scope="module")
def quick_offsets() -> Cluster:
    """A broker that writes the offsets of groups to disk ten times a second."""
    return _started(lambda: _clusters.extra("quick_offsets", properties={"flushConsumerOffsetInterval": 100}))


@pytest.fixture(scope="module")
def aging() -> Cluster:
    """A broker that deletes full files, which hold few messages. The deletions begin a minute after its start."""
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
    """RocketMQ's own Proxy in front of ``newest``. It also accepts connections with TLS."""
    with jars_required():
        return _clusters.proxy()


@pytest.fixture
def through(proxy: ProxyServer) -> Iterator[Broker]:
    with orderedmq.connect(namesrv_addr=proxy.address) as broker:
        yield broker


@pytest.fixture(scope="package", params=VERSIONS)
def every_version(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster of each version in turn. pytest sorts the tests so that each cluster starts once."""
    if request.param == DEFAULT_VERSION:
        yield _started(_clusters.usual)
        return
    made = _started(lambda: _clusters.start(f"v{request.param}", request.param))
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
    """The lock timing of the outboxes of ``usual``. A module that needs another timing overrides this fixture."""
    return LockTiming()


@pytest.fixture
def usual(cluster: Cluster, timing: LockTiming) -> Iterator[World]:
    """A topic and a sink that belong to the test."""
    with World(cluster, timing) as world:
        yield world


@pytest.fixture
def network(usual: World) -> Iterator[Network]:
    """A network of proxies in front of the servers of ``usual``, which can break connections."""
    with Network.before(usual.cluster) as made:
        yield made


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow 60 s instead of 3 s for heartbeats and renewals, because a busy machine may pause for several seconds."""
    for name in ("groups._RENEW_TIMEOUT", "groups._LOCK_TIMEOUT", "membership._BEAT_TIMEOUT", "membership._TIMEOUT"):
        monkeypatch.setattr(f"orderedmq.rocketmq.group.{name}", 60.0)


@pytest.fixture(autouse=True)
def _healed(request: pytest.FixtureRequest) -> None:
    """Restarts servers that another test killed or paused."""
    if _wants_servers(request.node):
        _clusters.heal()
