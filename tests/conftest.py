"""The fixtures and the report of the whole suite."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from orderedmq.java import ensure_java
from tests import evidence, quick_spark, report

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.micro_batches import MicroBatchLoop

#: The folders of tests, ordered by how long their scopes take, longest first.
_FOLDERS = ("rocketmq", "faults", "spark", "clusters", "contract", "sim", "loop", "browser", "power", "processes", "unit")

# There is no deadline, because a slow example is a sign of a busy machine, not of a fault. A property that needs more examples
# than others multiplies this number (tests/examples.py).
settings.register_profile("fast", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=50)
settings.register_profile("quick", settings.get_profile("fast"), max_examples=15)
settings.register_profile("nightly", settings.get_profile("fast"), max_examples=300)
settings.load_profile("fast")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--nightly",
        action="store_true",
        help="also run the nightly tests: every release of RocketMQ, 10000 seeds, damage to each used field of a store",
    )
    parser.addoption("--seeds", type=int, help="the number of seeds to simulate (default: 500; with --nightly: 10000)")


@pytest.fixture(scope="session")
def nightly(pytestconfig: pytest.Config) -> bool:
    """Whether the nightly tests run."""
    return bool(pytestconfig.getoption("--nightly"))


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts a background job with Ctrl-C ignored. The programs that tests start and interrupt would inherit that and
    # ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--nightly"):
        settings.load_profile("nightly")
    config.addinivalue_line("markers", "spark: the test starts a Spark driver or uses the shared session")
    config.addinivalue_line("markers", "rocketmq: the test needs real RocketMQ servers")
    config.addinivalue_line("markers", "holds(promise, ...): the test checks these promises of docs/promises.md")
    config.addinivalue_line("markers", "fault(kind, broker): the test meets this fault, and notes counts (tests/evidence.py)")
    config.addinivalue_line("markers", "nightly: the test runs only with --nightly, which make test-all uses")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests that use the shared session. In folders where every test starts Spark, the tests are marked there."""
    if "spark" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.spark)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Add the counts that the test notes to its report."""
    evidence.begin()
    try:
        yield
    finally:
        item.user_properties += evidence.noted()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--nightly"):
        long = [item for item in items if item.get_closest_marker("nightly") is not None]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item.get_closest_marker("nightly") is None]
    # Long scopes start first, so that the processes end at about the same time.
    items.sort(key=lambda item: _FOLDERS.index(folder_of(item.nodeid)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make drivers start quickly if any test starts one."""
    # The collected tests stay until the end. Without this, each full garbage collection examines them again, which takes a fifth
    # of a second.
    gc.freeze()
    if any(item.get_closest_marker("spark") is not None for item in session.items):
        quick_spark.use()


def folder_of(nodeid: str) -> str:
    """The folder of a test in ``tests``, or in ``tests/live``."""
    return nodeid.removeprefix("tests/").removeprefix("live/").split("/")[0]


def scope_of(nodeid: str) -> str:
    """The scope of a test. The tests of a scope run in one process, one after the other, so that their servers and their Spark start
    once.

    The tests of a folder are one scope, with two exceptions. The modules of unit, processes, power, sim, loop and clusters share
    nothing, so each of them is a scope. The contract suite has one scope for each kind of broker, because each needs different
    servers: ``tests/contract/test_log.py::test_x[embedded]`` → embedded.
    """
    module = nodeid.partition("::")[0]
    folder = folder_of(module)
    if folder == "contract":
        kind = re.search(r"\[(rocketmq-[\d.]+)", nodeid)
        return kind[1] if kind is not None else "embedded"
    return module if folder in ("unit", "processes", "power", "sim", "loop", "clusters") else folder


class Scopes(LoadScopeScheduling):
    """Gives each process of pytest-xdist whole scopes."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scopes:
    return Scopes(config, log)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A path at which a test may create a store."""
    return tmp_path / "store"


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """One classic session, shared by all tests that need no separate JVM. They leave nothing registered or running in it."""
    ensure_java()
    # Set before the JVM starts, because the workers inherit the JVM's environment.
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master("local[2]")
        .appName("orderedmq-tests")
        .config("spark.driver.memory", "1g")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@pytest.fixture
def query() -> Iterator[Callable[..., MicroBatchLoop]]:
    """A function that makes a `MicroBatchLoop`: the real source and sink in Spark's micro-batch loop, in this process, without
    Spark.

        run = query({"path": path, "topic": "in", "consumerGroup": "g"}, {"path": path, "topic": "out"}, checkpoint)
        run.process_all_available()

    At the end of the test, queries that still run are stopped.
    """
    from tests.micro_batches import MicroBatchLoop, end_workers

    made: list[MicroBatchLoop] = []

    def make(*given: Any, **more: Any) -> MicroBatchLoop:
        made.append(MicroBatchLoop(*given, **more))
        return made[-1]

    yield make
    for one in made:
        one.stop()
    end_workers()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write these sections before the failures, because a log that is cut off at its beginning then still contains the failures."""
    reports = [one for kind in terminalreporter.stats.values() for one in kind]
    reasons = [found for one in terminalreporter.stats.get("skipped", []) if (found := report.reason(one)) is not None]
    for title, lines in (("skipped", report.skips(reasons)), ("time per folder", report.times(reports))):
        if lines:
            terminalreporter.section(title)
            terminalreporter.write("".join(f"{line}\n" for line in lines))
