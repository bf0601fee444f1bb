"""CPU time of a run by module of tests, and the budget that it is compared with.

Wall time depends on what else the machine does at that moment, so the suite is held to the CPU time of its modules: that of the process
that runs a module's tests and of all its descendants, such as drivers, JVMs and servers. What a session-wide fixture starts is a line of
its own, because its cost belongs to whichever module happens to come first.

`budget.json` has the CPU seconds of each line, and those that a piece of work took during the same run, its pace. A run on another
machine, or at another pace, is converted.
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
from typing import Final

import psutil

FILE: Final = Path(__file__).with_name("budget.json")
#: What pytest keeps of the last run.
_LAST: Final = FILE.parents[1] / ".pytest_cache" / "v" / "cpu"
#: A line may need this much more than its budget …
TOLERANCE: Final = 0.15
#: … and these CPU seconds: half a garbage collection of a JVM, or a neighbour in the caches, is a large share of a small module.
SLACK: Final = 2.0
#: A machine is quiet if programs other than the tests used at most this share of its processors,
QUIET: Final = 0.10
#: and if it computed about equally fast in each tenth of the run.
STEADY: Final = 0.15
#: Seconds between two pieces of work that tell how fast it computes.
_PIECE_EVERY: Final = 5.0


#: Clock ticks per second, the unit of /proc.
_TICKS: Final = os.sysconf("SC_CLK_TCK")
#: Whether /proc has the processes.
_PROC: Final = Path("/proc/self/stat").exists()
#: Seconds between two looks at the processes: what a killed process had used since the last look is not counted.
_LOOK: Final = 0.5


class Tree:
    """This process and its descendants, also those whose parent was killed."""

    def __init__(self) -> None:
        self._members: dict[int, float] = {}
        self._last = self._lost = 0.0
        self._lock = threading.Lock()

    def seconds(self) -> float:
        """CPU seconds that all of them have used so far, those that have ended included."""
        with self._lock:
            found = self._read()
            now = sum(found[pid].seconds for pid in self._members)
            # A process hands its time on to a parent that waits for it. The time of one whose parent was killed goes when it ends.
            self._lost += max(self._last - now, 0.0)
            self._last = now
            return now + self._lost

    def _read(self) -> Mapping[int, _Process]:
        """Read all processes while no member ends, and find the members among them.

        The time of a member that ends during the reading can be missing from it, because its parent was read before, or be in it twice.
        Both would stay in the sum for good, as time that was lost.
        """
        while True:
            before = self._members.keys() & _pids()
            found = _processes()
            self._members = self._members_of(found)
            if before | self._members.keys() <= _pids():
                return found

    def _members_of(self, found: Mapping[int, _Process]) -> dict[int, float]:
        """The beginnings of this process, the known members that still run, and the descendants of all of them."""
        children: defaultdict[int, list[int]] = defaultdict(list)
        for pid, process in found.items():
            children[process.parent].append(pid)
        members = {os.getpid()}
        members |= {pid for pid, began in self._members.items() if pid in found and found[pid].began == began}
        waiting = list(members)
        while waiting:
            new = [pid for pid in children[waiting.pop()] if pid not in members]
            members.update(new)
            waiting += new
        return {pid: found[pid].began for pid in members}


@dataclass(frozen=True)
class _Process:
    """``seconds``: CPU time of the process and of the children that it waited for."""

    parent: int
    began: float
    seconds: float


def _processes() -> dict[int, _Process]:
    """All processes of this machine by their pid. From the text of /proc, where there is one: that takes 2 ms, and psutil 15."""
    if not _PROC:
        found = {}
        for one in psutil.process_iter(["ppid", "create_time", "cpu_times"]):
            if one.info["cpu_times"] is not None:
                found[one.pid] = _Process(one.info["ppid"], one.info["create_time"], sum(one.info["cpu_times"][:4]))
        return found
    found = {}
    for pid in _pids():
        try:
            text = Path("/proc", str(pid), "stat").read_text()
        except OSError:
            continue
        # The name of the program is in parentheses and may contain blanks and parentheses.
        fields = text.rpartition(")")[2].split()
        found[pid] = _Process(int(fields[1]), float(fields[19]), sum(map(int, fields[11:15])) / _TICKS)
    return found


def _pids() -> set[int]:
    """The ids of all processes of this machine."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()} if _PROC else set(psutil.pids())


class Meter:
    """``spent``: CPU seconds by the line that they were charged to. ``read`` returns those of everything measured so far."""

    def __init__(self, read: Callable[[], float]) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)
        self._read = read
        self._last = read()
        self._watching = threading.Event()
        self._thread: threading.Thread | None = None

    def charge(self, line: str) -> None:
        """Charge what was used since the last call to a line."""
        now = self._read()
        self.spent[line] += now - self._last
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


class Pace:
    """``times``: the CPU seconds that a fixed piece of work took, again and again, in a thread that runs beside the tests.

    The processors of a virtual machine are slower while others compute on the same hardware, which shows in no other figure.
    """

    def __init__(self) -> None:
        self.times = [_piece()]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pace", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_PIECE_EVERY):
            self.times.append(_piece())


def _piece() -> float:
    begun = time.thread_time()
    table: dict[str, int] = {}
    for number in range(60_000):
        name = f"{number % 1000}"
        table[name] = table.get(name, 0) + number
    return time.thread_time() - begun


def phases(times: Sequence[float]) -> list[float]:
    """The median of each tenth of a run, or of each piece of work in a run with few."""
    size = max(len(times) // 10, 1)
    return [median(times[begin : begin + size]) for begin in range(0, len(times) - size + 1, size)]


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


def disturbance(begin: Machine, end: Machine, spent: float, processors: int, times: Sequence[float]) -> str | None:
    """Why a run on this machine proves nothing about CPU time; None if the machine was quiet.

    ``spent``: CPU seconds of the tests. ``times``: those of a `Pace`.
    """
    others = (end.busy - begin.busy - spent) / max((end.clock - begin.clock) * processors, 0.001)
    if others > QUIET:
        return f"other programs used {others:.0%} of its processors, more than {QUIET:.0%}"
    fastest, slowest = min(phases(times)), max(phases(times))
    if slowest > (1 + STEADY) * fastest:
        return f"its speed changed by {slowest / fastest - 1:.0%} during the run, more than {STEADY:.0%}"
    return None


def over(spent: Mapping[str, float], budget: Mapping[str, float], speed: float) -> list[str]:
    """Lines that say which modules need too much or have no budget. ``speed``: the pace of the budget over that of this run."""
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
    """Return the pace of the run that the budget was made of, and the CPU seconds of each line."""
    if not file.exists():
        return 0.0, {}
    content = json.loads(file.read_text())
    return content["pace"], content["seconds"]


def write(runs: Iterable[tuple[Sequence[float], Mapping[str, float]]], file: Path = FILE) -> None:
    """Keep what the most expensive of these runs needed for each line. A run is the times of its `Pace` and its CPU seconds."""
    given = [(median(times), spent) for times, spent in runs]
    base = min(pace for pace, _ in given)
    most: defaultdict[str, float] = defaultdict(float)
    for pace, spent in given:
        for line, seconds in spent.items():
            most[line] = max(most[line], seconds * base / pace)
    content = {"pace": round(base, 5), "seconds": {line: round(most[line], 1) for line in sorted(most) if most[line] >= 0.05}}
    file.write_text(json.dumps(content, indent=1) + "\n")


def main(files: Sequence[str]) -> None:
    """Make the budget from what whole runs left in their caches, or from the last run of this tree."""
    write(json.loads(Path(file).read_text()) for file in files or [str(_LAST)])


if __name__ == "__main__":
    main(sys.argv[1:])
