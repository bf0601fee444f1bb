"""CPU time of a run by module of tests, and the budget that it is compared with.

Wall time depends on what else the machine does at that moment, so the suite is held to the CPU time of its modules: that of the process
that runs a module's tests and of all its descendants, such as drivers, JVMs and servers. What a session-wide fixture starts is a line of
its own, because its cost belongs to whichever module happens to come first.

`budget.json` has the CPU seconds of each line, and the seconds that `work` took on the same machine. A run on another machine is
converted with its own value of `work`.
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
#: and if `work` took about the same time before and after the run.
STEADY: Final = 0.15


#: Clock ticks per second, the unit of /proc.
_TICKS: Final = os.sysconf("SC_CLK_TCK")
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
            found = _processes()
            members = {os.getpid()}
            members |= {pid for pid, began in self._members.items() if pid in found and found[pid].began == began}
            children: defaultdict[int, list[int]] = defaultdict(list)
            for pid, process in found.items():
                children[process.parent].append(pid)
            waiting = list(members)
            while waiting:
                new = [pid for pid in children[waiting.pop()] if pid not in members]
                members.update(new)
                waiting += new
            self._members = {pid: found[pid].began for pid in members}
            now = sum(found[pid].seconds for pid in members)
            # A process hands its time on to a parent that waits for it. The time of one whose parent was killed goes when it ends.
            self._lost += max(self._last - now, 0.0)
            self._last = now
            return now + self._lost


@dataclass(frozen=True)
class _Process:
    """``seconds``: CPU time of the process and of the children that it waited for."""

    parent: int
    began: float
    seconds: float


def _processes() -> dict[int, _Process]:
    """All processes of this machine by their pid. From the text of /proc, where there is one: that takes 2 ms, and psutil 15."""
    if not Path("/proc/self/stat").exists():
        found = {}
        for one in psutil.process_iter(["ppid", "create_time", "cpu_times"]):
            if one.info["cpu_times"] is not None:
                found[one.pid] = _Process(one.info["ppid"], one.info["create_time"], sum(one.info["cpu_times"][:4]))
        return found
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                text = Path("/proc", name, "stat").read_text()
            except OSError:
                continue
            # The name of the program is in parentheses and may contain blanks and parentheses.
            fields = text.rpartition(")")[2].split()
            found[int(name)] = _Process(int(fields[1]), float(fields[19]), sum(map(int, fields[11:15])) / _TICKS)
    return found


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


def main(files: Sequence[str]) -> None:
    """Make the budget from what whole runs left in their caches, or from the last run of this tree."""
    write(json.loads(Path(file).read_text()) for file in files or [str(_LAST)])


if __name__ == "__main__":
    main(sys.argv[1:])
