"""CPU time of a run by module of tests, and the budget that it is compared with.

Wall time depends on what else the machine does at that moment, so the suite is held to the CPU time of its modules: that of the process
that runs a module's tests and of all its descendants, such as drivers, JVMs and servers. What a session-wide fixture starts is a line of
its own, because its cost belongs to whichever module happens to come first.

`budget.json` has the CPU seconds of each line, and the seconds that `work` took on the same machine. A run on another machine is
converted with its own value of `work`.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

FILE: Final = Path(__file__).with_name("budget.json")
#: A line may need this much more than its budget …
TOLERANCE: Final = 0.15
#: … and these CPU seconds: half a garbage collection of a JVM, or a neighbour in the caches, is a large share of a small module.
SLACK: Final = 2.0
#: A machine is quiet if programs other than the tests used at most this share of its processors,
QUIET: Final = 0.10
#: and if `work` took about the same time before and after the run.
STEADY: Final = 0.15


def tree_seconds() -> float:
    """CPU seconds that this process, the descendants that run and those that were waited for have used so far."""
    total = 0.0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


class Meter:
    """``spent``: CPU seconds by the line that they were charged to. ``read`` returns those of the whole process so far."""

    def __init__(self, read: Callable[[], float] = tree_seconds) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)
        self._read = read
        self._last = read()

    def charge(self, line: str) -> None:
        """Charge what was used since the last call to a line.

        A process whose parent was killed is no descendant any more and takes its time along, so the sum may get smaller.
        """
        now = self._read()
        self.spent[line] += max(now - self._last, 0.0)
        self._last = now


def work() -> float:
    """The CPU seconds that a fixed piece of work takes on this machine, in its best of a few tries."""
    tries = []
    for _ in range(7):
        begun = time.process_time()
        table: dict[str, int] = {}
        for number in range(300_000):
            name = f"{number % 1000}"
            table[name] = table.get(name, 0) + number
        tries.append(time.process_time() - begun)
    return min(tries)


@dataclass(frozen=True)
class Machine:
    """What a machine has done up to a moment: seconds on the clock, busy CPU seconds of all programs, and `work` at that moment."""

    clock: float
    busy: float
    work: float

    @classmethod
    def now(cls) -> Machine:
        measured = work()
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # On Linux, guests are in user and nice already.
        guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        return cls(time.monotonic(), sum(times) - idle - guests, measured)


def disturbance(begin: Machine, end: Machine, spent: float, processors: int) -> str | None:
    """Why a run on this machine proves nothing about CPU time; None if the machine was quiet. ``spent``: CPU seconds of the tests."""
    others = (end.busy - begin.busy - spent) / max((end.clock - begin.clock) * processors, 0.001)
    if others > QUIET:
        return f"other programs used {others:.0%} of its processors, more than {QUIET:.0%}"
    slower, faster = max(begin.work, end.work), min(begin.work, end.work)
    if slower > (1 + STEADY) * faster:
        return f"its speed changed by {slower / faster - 1:.0%} between the beginning and the end, more than {STEADY:.0%}"
    return None


def over(spent: Mapping[str, float], budget: Mapping[str, float], speed: float) -> list[str]:
    """Lines that say which modules need too much or have no budget. ``speed``: `work` when the budget was made, over `work` now."""
    found = []
    for line, seconds in sorted(spent.items()):
        used = seconds * speed
        if line not in budget:
            if used > SLACK:
                found.append(f"{line}: {used:.1f} s of CPU, and it has no budget")
        elif used > budget[line] * (1 + TOLERANCE) + SLACK:
            found.append(f"{line}: {used:.1f} s of CPU, its budget is {budget[line]:.1f} s")
    return found


def table(spent: Mapping[str, float], wall: Mapping[str, float], budget: Mapping[str, float]) -> list[str]:
    """Lines with CPU seconds, budget and wall seconds of each module, the most expensive first; those below a second are one line."""
    lines = [f"{'CPU':>8} {'budget':>8} {'wall':>8}"]
    small = [name for name in spent if spent[name] < 1]
    for name in sorted(set(spent) - set(small), key=lambda one: -spent[one]):
        lines.append(_row(f"{budget[name]:8.1f}" if name in budget else " " * 8, spent[name], wall.get(name), name))
    if small:
        seconds = sum(wall.get(name, 0.0) for name in small)
        lines.append(_row(" " * 8, sum(spent[name] for name in small), seconds, f"{len(small)} modules below 1 s each"))
    lines.append(_row(f"{sum(budget.values()):8.1f}", sum(spent.values()), None, "all"))
    return lines


def _row(budget: str, spent: float, wall: float | None, name: str) -> str:
    return f"{spent:8.1f} {budget} {'' if wall is None else f'{wall:.1f}':>8}  {name}"


def read(file: Path = FILE) -> tuple[float, dict[str, float]]:
    """Return `work` of the machine that the budget was made on, and the CPU seconds of each line."""
    if not file.exists():
        return 0.0, {}
    content = json.loads(file.read_text())
    return content["work"], content["seconds"]


def write(runs: Iterable[tuple[float, Mapping[str, float]]], file: Path = FILE) -> None:
    """Keep what the most expensive of these runs needed for each line. A run is its `work` and its CPU seconds."""
    given = list(runs)
    base = min(work for work, _ in given)
    most: defaultdict[str, float] = defaultdict(float)
    for work, spent in given:
        for line, seconds in spent.items():
            most[line] = max(most[line], seconds * base / work)
    content = {"work": round(base, 5), "seconds": {line: round(most[line], 1) for line in sorted(most) if most[line] >= 0.05}}
    file.write_text(json.dumps(content, indent=1) + "\n")


def main(files: Iterable[str]) -> None:
    """Make the budget from runs that ``pytest --keep-cpu`` kept, each a line of a file."""
    write([(work, spent) for file in files for work, spent in map(json.loads, Path(file).read_text().splitlines())])


if __name__ == "__main__":
    main(sys.argv[1:])
