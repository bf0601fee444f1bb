"""``python -m tests.evidence``: runs the tests of faults and stores what they have counted, for docs/reliability.md.

A test of a fault has a mark like ``@pytest.mark.fault("killed process", "embedded")`` and calls `note`. Without a broker in the mark, the
test's parameter is the broker. docs/reliability-results.json has the newest result of each such test, with its date. Tests that were not
run keep their former results. Arguments go to pytest, as in ``python -m tests.evidence --nightly tests/power``.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest

from orderedmq.testing.history import Anomaly, Event

RESULTS: Final = Path(__file__).parents[1] / "docs" / "reliability-results.json"
#: The kinds of faults, in the order of the page.
FAULTS: Final = (
    "killed process", "paused process", "loss of power", "failed sync", "full disk", "changed bits", "missing or cut files", "wall clock",
    "lying broker", "network", "topology", "all at random, simulated",
)  # fmt: skip
#: What is counted. ``wrong``: any other anomaly. ``runs``: a test with its faults, or each of the states or kills that a test tries.
COUNTS: Final = ("runs", "acknowledged", "lost", "twice", "disordered", "wrong")
_LOST: Final = ("lost", "unseen", "silent_gap")
_TWICE: Final = ("duplicate", "range_overlap")
_DISORDERED: Final = ("skip", "nonmonotonic", "split_key")

#: The counts of the running test, by what they are about.
_notes: dict[Hashable, dict[str, int]] = {}
#: The messages that earlier tests have counted.
_counted: Counter[Hashable] = Counter()


def note(
    about: Hashable = None,
    *,
    runs: int = 1,
    acknowledged: int = 0,
    lost: int = 0,
    twice: int = 0,
    disordered: int = 0,
    wrong: int = 0,
) -> None:
    """Record counts of the running test. A later call with the same ``about`` replaces the former one; others are added."""
    _notes[about] = dict(zip(COUNTS, (runs, acknowledged, lost, twice, disordered, wrong)))


def note_history(about: Hashable, history: Iterable[Event], anomalies: Sequence[Anomaly]) -> None:
    """Record what a history has. If several tests continue the history of ``about``, each counts only the messages that it has added."""
    kinds = Counter(anomaly.kind for anomaly in anomalies)
    sent = sum(event["event"] == "send" and event["outcome"] == "ok" for event in history)
    lost, twice, disordered = (sum(kinds[kind] for kind in group) for group in (_LOST, _TWICE, _DISORDERED))
    wrong = kinds.total() - lost - twice - disordered
    note(about, acknowledged=sent - _counted[about], lost=lost, twice=twice, disordered=disordered, wrong=wrong)


def note_lists(sent: Mapping[Any, Sequence[Any]], seen: Mapping[Any, Sequence[Any]], *, runs: int = 1) -> None:
    """Record what became of messages. Both sides have the messages of each key, or of each queue, in order."""
    lost = twice = disordered = wrong = 0
    for key in sent.keys() | seen.keys():
        # Equal messages are told apart by their number among equals.
        order = {message: place for place, message in enumerate(_numbered(sent.get(key, ())))}
        messages = _numbered(seen.get(key, ()))
        lost += len(order.keys() - set(messages))
        twice += sum(message not in order and (message[0], 0) in order for message in messages)
        wrong += sum((message[0], 0) not in order for message in messages)
        places = [order[message] for message in messages if message in order]
        disordered += sum(later < earlier for earlier, later in pairwise(places))
    total = sum(map(len, sent.values()))
    note(runs=runs, acknowledged=total, lost=lost, twice=twice, disordered=disordered, wrong=wrong)


def _numbered(messages: Iterable[Any]) -> list[tuple[Any, int]]:
    counts: Counter[Any] = Counter()
    numbered = []
    for message in messages:
        numbered.append((message, counts[message]))
        counts[message] += 1
    return numbered


def begin() -> None:
    """Forget what the last test has noted."""
    for about, counts in _notes.items():
        _counted[about] += counts["acknowledged"]
    _notes.clear()


def noted() -> list[tuple[str, object]]:
    """Return the running test's counts as properties of its report."""
    return [("counts", {name: sum(counts[name] for counts in _notes.values()) for name in COUNTS})] if _notes else []


def read_results() -> dict[str, Any]:
    """Return ``tests``, the newest result by test, and ``simulations``, the long runs of the simulation."""
    kept: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"tests": {}, "simulations": []}
    return kept


def write_results(results: Mapping[str, Any]) -> None:
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


class _Recorder:
    """A plugin of pytest that stores each result when its test has ended."""

    def __init__(self, *, everything: bool) -> None:
        self._everything = everything
        self._marked: dict[str, dict[str, str]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Store which tests there are, also those that are not run."""
        for item in items:
            mark = item.get_closest_marker("fault")
            if mark is not None:
                fault, broker = (*mark.args, "RocketMQ" if "rocketmq" in item.nodeid else "embedded")[:2]
                assert fault in FAULTS, fault
                self._marked[item.nodeid] = {"fault": fault, "broker": broker}
        results = read_results()
        former = {name: test for name, test in results["tests"].items() if name in self._marked or not self._everything}
        self._keep(results, {**former, **{name: {**former.get(name, {}), **mark} for name, mark in self._marked.items()}})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and not report.skipped and report.nodeid in self._marked:
            counts = dict(report.user_properties).get("counts")
            result = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "passed": report.passed, "counts": counts}
            # Read the results again, because another process may have added some.
            results = read_results()
            self._keep(results, {**results["tests"], report.nodeid: {**self._marked[report.nodeid], **result}})

    def _keep(self, results: dict[str, Any], tests: Mapping[str, Any]) -> None:
        write_results({**results, "tests": dict(sorted(tests.items()))})


def main(arguments: Sequence[str]) -> int:
    everything = not any(not argument.startswith("-") for argument in arguments)
    # One test at a time, because the faults of one must not slow down another.
    return pytest.main(["-n", "0", "-q", "-m", "fault", *arguments], plugins=[_Recorder(everything=everything)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
