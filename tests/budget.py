"""The CPU time of a test run by module, and the budget that it is compared with.

Wall time depends on what else the machine does at that moment, so the budget limits the CPU time of each module: the CPU time of
the process that runs the module's tests and of all its descendants, such as drivers, JVMs and servers. Session-wide fixtures have
separate lines, because their cost would otherwise count for whichever module happens to run first.

The same work takes more CPU time on a slower machine, and on a virtual machine that shares its hardware with busy ones. So the
run as a whole is compared first: if the median module exceeds its budget, every module may exceed its budget by the same factor.
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
#: The CPU seconds of the last run, as pytest's cache stores them.
_LAST: Final = FILE.parents[1] / ".pytest_cache" / "v" / "cpu"
#: The fraction by which a line may exceed its budget.
TOLERANCE: Final = 0.15
#: CPU seconds that a line may need in addition: a JVM compiles and collects garbage at unpredictable moments, and that is a large
#: share of a small module's time.
SLACK: Final = 3.0
#: A module is large if its budget is at least this many seconds, because chance then has a small share in its CPU time.
LARGE: Final = 5.0
#: A machine counts as quiet if programs other than the tests used at most this share of its processors.
QUIET: Final = 0.10

#: Clock ticks per second, the unit of /proc.
_TICKS: Final = os.sysconf("SC_CLK_TCK")
#: Whether /proc lists the processes.
_PROC: Final = Path("/proc/self/stat").exists()
#: Seconds between two readings of the processes. What a killed process used after the last reading is not counted.
_LOOK: Final = 1.0


class Tree:
    """This process and its descendants, including those whose parent was killed."""

    def __init__(self) -> None:
        self._members: dict[int, _Process] = {}
        self._spent = 0.0
        self._lock = threading.Lock()

    def seconds(self) -> float:
        """The CPU seconds that this process and its descendants have used so far, including the descendants that have ended."""
        with self._lock:
            found = self._read()
            ended = {pid: one for pid, one in self._members.items() if pid not in found or found[pid].began != one.began}
            handed_on = self._handed_on(ended)
            for pid, process in found.items():
                known = self._members[pid] if pid in self._members and pid not in ended else _Process(0, 0.0, 0.0, 0.0)
                # Waiting for a child adds the child's whole time to `waited`. The part that the last reading saw has been counted
                # already.
                self._spent += process.own - known.own + max(process.waited - known.waited - handed_on[pid], 0.0)
            self._members = found
            return self._spent

    def _handed_on(self, ended: Mapping[int, _Process]) -> Mapping[int, float]:
        """The seconds already counted for members that have ended, by the pid of the nearest ancestor that still runs."""
        seconds: defaultdict[int, float] = defaultdict(float)
        for process in ended.values():
            heir = process.parent
            while heir in ended:
                heir = ended[heir].parent
            seconds[heir] += process.own + process.waited
        return seconds

    def _read(self) -> dict[int, _Process]:
        """Return the members, read at a time when none of them ended.

        If a member ends during the reading, its time may be missing from the result, because its parent was read first, or it may
        be counted twice.
        """
        while True:
            before = self._members.keys() & _pids()
            members = self._members_of(_processes())
            if before | members.keys() <= _pids():
                return members

    def _members_of(self, found: Mapping[int, _Process]) -> dict[int, _Process]:
        """This process, the known members that still run, and all their descendants."""
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
    """A process. ``own``: its CPU seconds. ``waited``: the CPU seconds of ended descendants, as the kernel adds them up."""

    parent: int
    began: float
    own: float
    waited: float


def _processes() -> dict[int, _Process]:
    """All processes of this machine by pid. They are read from /proc where it exists, which takes 2 ms; psutil takes 15 ms."""
    if not _PROC:
        found = {}
        for one in psutil.process_iter(["ppid", "create_time", "cpu_times"]):
            times = one.info["cpu_times"]
            if times is not None:
                # macOS does not report the time of the children.
                waited = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
                found[one.pid] = _Process(one.info["ppid"], one.info["create_time"], times.user + times.system, waited)
        return found
    found = {}
    for pid in _pids():
        try:
            text = Path("/proc", str(pid), "stat").read_text()
        except OSError:
            continue
        # The program's name is in parentheses and may itself contain blanks and parentheses.
        fields = text.rpartition(")")[2].split()
        user, system, waited_user, waited_system = (int(ticks) / _TICKS for ticks in fields[11:15])
        found[pid] = _Process(int(fields[1]), float(fields[19]), user + system, waited_user + waited_system)
    return found


def _pids() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()} if _PROC else set(psutil.pids())


class Charge(NamedTuple):
    """CPU seconds to be added to a line of the report."""

    line: str
    seconds: float


class Meter:
    """Divides CPU time among the lines of the report. ``charges``: all so far. ``read`` returns the CPU seconds used so far."""

    def __init__(self, read: Callable[[], float]) -> None:
        self.charges: list[Charge] = []
        self._read = read
        self._last = read()
        self._watching = threading.Event()
        self._thread: threading.Thread | None = None

    def charge(self, line: str) -> None:
        """Charge ``line`` with the CPU time used since the last call."""
        now = self._read()
        self.charges.append(Charge(line, now - self._last))
        self._last = now

    def watch(self, watching: bool) -> None:
        """Start or stop reading the processes continually, in a daemon thread."""
        (self._watching.set if watching else self._watching.clear)()
        if watching and self._thread is None:
            self._thread = threading.Thread(target=self._look, name="CPU meter", daemon=True)
            self._thread.start()

    def _look(self) -> None:
        while self._watching.wait():
            self._read()
            time.sleep(_LOOK)


def totals(charges: Iterable[Charge]) -> dict[str, float]:
    """The total CPU seconds of each line."""
    spent: defaultdict[str, float] = defaultdict(float)
    for charge in charges:
        spent[charge.line] += charge.seconds
    return dict(spent)


@dataclass(frozen=True)
class Machine:
    """A machine's counters at one moment: seconds on the clock, and busy CPU seconds of all programs."""

    clock: float
    busy: float

    @classmethod
    def now(cls) -> Machine:
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # On Linux, the times user and nice already include those of guests.
        guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        return cls(time.monotonic(), sum(times) - idle - guests)


def disturbance(begin: Machine, end: Machine, spent: float, processors: int) -> str | None:
    """Why the CPU time of a run on this machine cannot be judged; None if the machine was quiet. ``spent``: CPU seconds of the tests."""
    others = (end.busy - begin.busy - spent) / max((end.clock - begin.clock) * processors, 0.001)
    if others > QUIET:
        return f"other programs used {others:.0%} of its processors, more than {QUIET:.0%}"
    return None


def usual(spent: Mapping[str, float], budget: Mapping[str, float]) -> float:
    """The median, over the large modules, of the CPU time divided by the budget; 1 if it is less than 1."""
    return max(1.0, median([spent.get(line, 0.0) / limit for line, limit in budget.items() if limit >= LARGE] or [1.0]))


def over(spent: Mapping[str, float], budget: Mapping[str, float], common: float) -> list[str]:
    """The modules that exceed their budget or have none, in alphabetical order. Other lines, such as fixtures, are not judged.

    ``common``: the factor that `usual` returns for the whole run. If most modules exceed their budgets, the reason is a different
    processor, kernel or Java, so every module may exceed its budget by that factor.
    """
    modules = (line for line in sorted(spent) if line.endswith(".py"))
    return [line for line in modules if spent[line] > budget.get(line, 0.0) * common * (1 + TOLERANCE) + SLACK]


def table(spent: Mapping[str, float], budget: Mapping[str, float], wall: Mapping[str, float]) -> list[str]:
    """Lines with each module's CPU time, budget and wall time in seconds, the most expensive first. Those below one second share a line."""
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
    """The CPU seconds that each line may need; empty if there is no budget yet."""
    budget: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}
    return budget


def write(runs: Iterable[Mapping[str, float]], file: Path = FILE) -> None:
    """Make each line's budget the greatest CPU time that any of these runs needed for it."""
    most: defaultdict[str, float] = defaultdict(float)
    for run in runs:
        for line, seconds in run.items():
            most[line] = max(most[line], seconds)
    file.write_text(json.dumps({line: round(most[line], 1) for line in sorted(most) if most[line] >= 0.05}, indent=1) + "\n")


def main(files: Sequence[str]) -> None:
    """Write the budget from the results in these cache files of whole runs; without files, from the last run of this tree."""
    write(json.loads(Path(file).read_text()) for file in files or [str(_LAST)])


if __name__ == "__main__":
    main(sys.argv[1:])
