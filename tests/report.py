"""Lines of a run's report that are shown before the failures: time per folder, and skipped tests counted by reason."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import pytest

_VERSION: Final = re.compile(r"(?<=rocketmq)-\d+(\.\d+)*")
_WIDTH: Final = 140


def skips(reasons: Iterable[str]) -> list[str]:
    """Lines such as ``40 x rocketmq has no fencing: …``, most frequent first. All releases of a broker are counted together."""
    counts = Counter(_VERSION.sub("", " ".join(reason.removeprefix("Skipped: ").split())) for reason in reasons)
    lines = (f"{count:4} x {reason}" for reason, count in counts.most_common())
    return [line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…" for line in lines]


def reason(report: object) -> str | None:
    """The reason why a test or module was skipped; None if it was not."""
    if isinstance(report, pytest.TestReport | pytest.CollectReport) and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    return None


def times(reports: Iterable[object]) -> list[str]:
    """Seconds and share of each folder of tests, slowest first. They include set-up and teardown."""
    seconds: defaultdict[str, float] = defaultdict(float)
    tests: defaultdict[str, set[str]] = defaultdict(set)
    for report in reports:
        if isinstance(report, pytest.TestReport):
            folder = str(Path(report.nodeid.partition("::")[0]).parent)
            seconds[folder] += report.duration
            tests[folder].add(report.nodeid)
    total = sum(seconds.values()) or 1.0
    return [
        f"{folder:<16} {seconds[folder]:7.1f} s {seconds[folder] / total:5.0%}  {len(tests[folder]):4} tests"
        for folder in sorted(seconds, key=seconds.__getitem__, reverse=True)
    ]
