"""CPU time of a run by module of tests, and the budget that it is compared with.

Wall time depends on what else the machine does at that moment, so the suite is held to the CPU time of its modules: that of the process
that runs a module's tests and of all its descendants, such as drivers, JVMs and servers. What a session-wide fixture starts is a line of
its own, because its cost belongs to whichever module happens to come first.

The same work takes more CPU time on a slower machine, and on a virtual machine while others compute on the same hardware. So a run is
compared as a whole first: if the median module needs more than its budget, each may need as much more.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import psutil

FILE: Final = Path(__file__).with_name("budget.json")
#: What pytest keeps of the last run.
_LAST: Final = FILE.parents[1] / ".pytest_cache" / "v" / "cpu"
#: The fraction by which a line may exceed its budget.
TOLERANCE: Final = 0.15
#: CPU seconds that it may need on top of that: a JVM compiles and collects garbage at unpredictable moments, which is a large share
#: of a small module's time.
SLACK: Final = 3.0
#: A module is large if its budget is this many seconds: chance is a small part of what it needs.
LARGE: Final = 5.0
#: A machine is quiet if programs other than the tests used at most this share of its processors.
QUIET: Final = 0.10

#: Clock ticks per second, the unit of /proc.
_TICKS: Final = os.sysconf("SC_CLK_TCK")
#: Whether /proc has the processes.
_PROC: Final = Path("/proc/self/stat").exists()
#: Seconds between two looks at the processes: what a killed process had used since the last look is not counted.
_LOOK: Final = 1.0


class Tree:
    """This process and its descendants, also those whose parent was killed."""

    def __init__(self) -> None:
        self._members: dict[int, _Process] = {}
        self._spent = 0.0
        self._lock = threading.Lock()

    def seconds(self) -> float:
        """CPU seconds that all of them have used so far, those that have ended included."""
        with self._lock:
            found = self._read()
            ended = {pid: one for pid, one in self._members.items() if pid not in found or found[pid].began != one.began}
            handed_on = self._handed_on(ended)
            for pid, process in found.items():
                known = self._members[pid] if pid in self._members and pid not in ended else _Process(0, 0.0, 0.0, 0.0)
                # Waiting for a child adds the child's whole time to `waited`. What the last look saw of it has been counted already.
                self._spent += process.own - known.own + max(process.waited - known.waited - handed_on[pid], 0.0)
            self._members = found
            return self._spent

    def _handed_on(self, ended: Mapping[int, _Process]) -> Mapping[int, float]:
        """What was counted for members that have ended, in seconds, by the pid of the nearest ancestor that still runs."""
        seconds: defaultdict[int, float] = defaultdict(float)
        for process in ended.values():
            heir = process.parent
            while heir in ended:
                heir = ended[heir].parent
            seconds[heir] += process.own + process.waited
        return seconds

    def _read(self) -> dict[int, _Process]:
        """Read all processes while no member ends, and return the members among them.

        The time of a member that ends during the reading can be missing from it, because its parent was read before, or be in it twice.
        """
        while True:
            before = self._members.keys() & _pids()
            members = self._members_of(_processes())
            if before | members.keys() <= _pids():
                return members

    def _members_of(self, found: Mapping[int, _Process]) -> dict[int, _Process]:
        """This process, the known members that still run, and the descendants of all of them."""
        children: defaultdict[int, list[int]] = defaultdict(list)
        for pid, process in found.items():
            children[process.parent].append(pid)
        members = {os.getpid()}
        members |= {pid for pid, known in self._members.items() if pid in found and found[pid].began == known.began}
        waiting = list(members)
        while waiting:
            new = [pid for pid in children[waiting.pop()] if pid not in members]
            members.update(new)
            waiting += new
        return {pid: found[pid] for pid in members}


@dataclass(frozen=True)
class _Process:
    """``own``: CPU seconds of the process; ``waited``: of its children that have ended and that it waited for, and of theirs."""

    parent: int
    began: float
    own: float
    waited: float


def _processes() -> dict[int, _Process]:
    """All processes of this machine by their pid. From the text of /proc, where there is one: that takes 2 ms, and psutil 15."""
    if not _PROC:
        found = {}
        for one in psutil.process_iter(["ppid", "create_time", "cpu_times"]):
            times = one.info["cpu_times"]
            if times is not None:
                # macOS does not say what the children used.
                waited = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
                found[one.pid] = _Process(one.info["ppid"], one.info["create_time"], times.user + times.system, waited)
        return found
    found = {}
    for pid in _pids():
        try:
            text = Path("/proc", str(pid), "stat").read_text()
        except OSError:
            continue
        # The name of the program is in parentheses and may contain blanks and parentheses.
        fields = text.rpartition(")")[2].split()
        user, system, waited_user, waited_system = (int(ticks) / _TICKS for ticks in fields[11:15])
        found[pid] = _Process(int(fields[1]), float(fields[19]), user + system, waited_user + waited_system)
    return found


def _pids() -> set[int]:
    """The ids of all processes of this machine."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()} if _PROC else set(psutil.pids())


class Charge(NamedTuple):
    """CPU seconds that a line of the report has used between two moments."""

    line: str
    seconds: float


class Meter:
    """``charges``: all so far. ``read`` returns the CPU seconds of everything measured so far."""

    def __init__(self, read: Callable[[], float]) -> None:
        self.charges: list[Charge] = []
        self._read = read
        self._last = read()
        self._watching = threading.Event()
        self._thread: threading.Thread | None = None

    def charge(self, line: str) -> None:
        """Charge what was used since the last call to a line."""
        now = self._read()
        self.charges.append(Charge(line, now - self._last))
        self._last = now

    def watch(self, watching: bool) -> None:
        """Look at the processes all the time, or no more, from a thread that ends with this process."""
        (self._watching.set if watching else self._watching.clear)()
        if watching and self._thread is None:
            self._thread = threading.Thread(target=self._look, name="CPU meter", daemon=True)
            self._thread.start()

    def _look(self) -> None:
        while self._watching.wait():
            self._read()
            time.sleep(_LOOK)


def totals(charges: Iterable[Charge]) -> dict[str, float]:
    """The CPU seconds of each line."""
    spent: defaultdict[str, float] = defaultdict(float)
    for charge in charges:
        spent[charge.line] += charge.seconds
    return dict(spent)


@dataclass(frozen=True)
class Machine:
    """What a machine has done up to a moment: seconds on the clock, and busy CPU seconds of all programs."""

    clock: float
    busy: float

    @classmethod
    def now(cls) -> Machine:
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # On Linux, guests are in user and nice already.
        guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        return cls(time.monotonic(), sum(times) - idle - guests)


def disturbance(begin: Machine, end: Machine, spent: float, processors: int) -> str | None:
    """Why a run on this machine proves nothing about CPU time; None if the machine was quiet. ``spent``: CPU seconds of the tests."""
    others = (end.busy - begin.busy - spent) / max((end.clock - begin.clock) * processors, 0.001)
    if others > QUIET:
        return f"other programs used {others:.0%} of its processors, more than {QUIET:.0%}"
    return None


def usual(spent: Mapping[str, float], budget: Mapping[str, float]) -> float:
    """How many times its budget the median of the large modules needs; 1 if it needs less."""
    return max(1.0, median([spent.get(line, 0.0) / limit for line, limit in budget.items() if limit >= LARGE] or [1.0]))


def over(spent: Mapping[str, float], budget: Mapping[str, float], common: float) -> list[str]:
    """The modules that need too much or have no budget, in alphabetical order. Other lines, such as fixtures, are not judged.

    ``common``: what `usual` says of the whole run. If most modules need more, another processor, kernel or Java is the reason, so each
    may need as much more as the median one.
    """
    modules = (line for line in sorted(spent) if line.endswith(".py"))
    return [line for line in modules if spent[line] > budget.get(line, 0.0) * common * (1 + TOLERANCE) + SLACK]


def table(spent: Mapping[str, float], budget: Mapping[str, float], wall: Mapping[str, float]) -> list[str]:
    """Lines with CPU time, its budget and wall time of each module in seconds, the most expensive first; those below a second are one line."""
    lines = [f"{'CPU':>8} {'budget':>8} {'wall':>8}"]
    small = [name for name in spent if spent[name] < 1]
    for name in sorted(set(spent) - set(small), key=lambda one: -spent[one]):
        lines.append(_row(name, spent[name], budget.get(name), wall.get(name)))
    if small:
        sums = (sum(kind.get(name, 0.0) for name in small) for kind in (spent, budget, wall))
        lines.append(_row(f"{len(small)} modules below 1 s each", *sums))
    lines.append(_row("all", *(sum(kind.values()) for kind in (spent, budget)), None))
    return lines


def _row(name: str, *kinds: float | None) -> str:
    return "{:>8} {:>8} {:>8}  {}".format(*("" if not seconds else f"{seconds:.1f}" for seconds in kinds), name)


def read(file: Path = FILE) -> dict[str, float]:
    """The CPU seconds that each line may need; none if there is no budget yet."""
    budget: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}
    return budget


def write(runs: Iterable[Mapping[str, float]], file: Path = FILE) -> None:
    """Keep what the most expensive of these runs needed for each line, in CPU seconds."""
    most: defaultdict[str, float] = defaultdict(float)
    for run in runs:
        for line, seconds in run.items():
            most[line] = max(most[line], seconds)
    file.write_text(json.dumps({line: round(most[line], 1) for line in sorted(most) if most[line] >= 0.05}, indent=1) + "\n")


def main(files: Sequence[str]) -> None:
    """Make the budget from what whole runs left in their caches, or from the last run of this tree."""
    write(json.loads(Path(file).read_text()) for file in files or [str(_LAST)])


if __name__ == "__main__":
    main(sys.argv[1:])
