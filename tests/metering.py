"""A pytest plugin that measures the CPU time of each module, compares a whole run with its budget, and shows both at the end.

Each process of pytest-xdist measures its own modules and sends the result to the process that started it, which judges the run.
How much a JVM compiles and when it collects garbage varies from run to run. So modules over their budget run a second time, and
the run fails only if one of them exceeds its budget again.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import budget

#: The key of the CPU times in the output of a pytest-xdist worker.
_KEY = "cpu seconds"
#: The names of the files in pytest's cache with each line's CPU time: for a whole run, which `make budget` reads, and for any
#: other run.
_WHOLE, _PART = "cpu", "cpu of a part"
#: The folders whose tests kill processes that have children, or start programs that do so.
_WATCHED = ("tests/clusters/", "tests/faults/", "tests/processes/", "tests/rocketmq/", "tests/spark/")


def _module(nodeid: str) -> str:
    return nodeid.partition("::")[0]


class Metering:
    """The plugin's pytest hooks in one process. Only the process in which pytest was called judges the run."""

    def __init__(self, config: pytest.Config) -> None:
        self._runs_tests = config.getoption("dist", "no") == "no"
        self._judges = not hasattr(config, "workerinput")
        # A process that only distributes tests must not count its worker processes, because they count themselves.
        self._meter = budget.Meter(budget.Tree().seconds if self._runs_tests else time.process_time)
        self._begun = budget.Machine.now() if self._judges else None
        self._verdict: list[str] = []
        self._charges: list[budget.Charge] = []
        self._spent: dict[str, float] = {}

    # -- in a process that runs tests ---------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        self._meter.charge("collection")
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        """Charge the cost of a fixture for many modules to the fixture, not to the module that happens to run first."""
        if fixturedef.scope not in ("session", "package"):
            return (yield)
        self._meter.charge(_module(request._pyfuncitem.nodeid))
        try:
            return (yield)
        finally:
            self._meter.charge(f"fixture {fixturedef.argname}")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
        module = _module(item.nodeid)
        # Other modules are not watched, because a reading takes several ms, and some tests count the objects or the CPU time of
        # this process.
        self._meter.watch(module.startswith(_WATCHED))
        result = yield
        if nextitem is None or module != _module(nextitem.nodeid):
            self._meter.charge(module)
        return result

    # -- at the end -----------------------------------------------------------------------------------------------------------

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._charges += (budget.Charge(*charge) for charge in getattr(node, "workeroutput", {}).get(_KEY, []))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._meter.charge("pytest")
        if not self._judges:
            session.config.workeroutput[_KEY] = [tuple(charge) for charge in self._meter.charges]  # type: ignore[attr-defined]
            return
        self._charges += self._meter.charges
        self._spent = budget.totals(self._charges)
        failed, self._verdict = self._judge(session.config)
        if failed and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        # The cache does not exist if the user has disabled pytest's cache plugin.
        cache = getattr(session.config, "cache", None)
        if cache is not None:
            cache.set(_WHOLE if _is_whole(session.config) else _PART, self._spent)

    def _judge(self, config: pytest.Config) -> tuple[bool, list[str]]:
        """Return whether the run fails because of its CPU time, and lines that say why or why not."""
        assert self._begun is not None
        limits = budget.read()
        if not limits or not _is_whole(config):
            return False, []
        usual = budget.usual(self._spent, limits)
        found = budget.over(self._spent, limits, usual)
        disturbed = budget.disturbance(self._begun, budget.Machine.now(), sum(self._spent.values()), os.cpu_count() or 1)
        if disturbed is not None:
            return False, [f"not compared with the budget, because the machine was busy: {disturbed}"]
        if not found:
            return False, [f"within the budget of tests/budget.json; the median module needed {usual:.2f} times its budget"]
        again = _measure(found, config.rootpath)
        lines = [
            f"{module}: {self._spent[module]:.1f} s of CPU, then {again[module]:.1f} s; its budget is {limits.get(module, 0.0):.1f} s"
            for module in found
        ]
        if not budget.over({module: again[module] for module in found}, limits, usual):
            return False, ["within the budget of tests/budget.json after these modules had been measured again:", *lines]
        return True, [
            "above the budget of tests/budget.json in both runs, over 15 % more than the median module. Make it cheaper, or explain why not:",
            *lines,
        ]

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write these sections last, because a log that is cut off at its beginning then still contains the verdict."""
        if not self._charges or terminalreporter.config.option.collectonly:
            return
        wall: defaultdict[str, float] = defaultdict(float)
        for kind in terminalreporter.stats.values():
            for report in kind:
                if isinstance(report, pytest.TestReport):
                    wall[_module(report.nodeid)] += report.duration
        terminalreporter.section("CPU time per module, in seconds")
        for line in (*budget.table(self._spent, budget.read(), wall), *self._verdict):
            terminalreporter.write_line(line)


def _measure(modules: list[str], root: Path) -> Mapping[str, float]:
    """Run only these modules, in one process, and return the CPU seconds of each line; infinity if a test fails."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "pytest", "-n", "1", "-o", f"cache_dir={cache}", *modules]
        if subprocess.run(command, cwd=root, stdout=subprocess.DEVNULL).returncode != 0:
            return dict.fromkeys(modules, math.inf)
        seconds: dict[str, float] = json.loads(Path(cache, "v", _PART).read_text())
        return seconds


def _is_whole(config: pytest.Config) -> bool:
    """Whether the run selected exactly the tests of the fast tier."""
    options = config.option
    chosen = options.keyword or options.markexpr or options.deselect or options.nightly
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS and not chosen
