"""The machine's clocks: the monotonic clock, shared by all processes of one boot, and the wall clock for timestamps."""

from __future__ import annotations

import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Final, Protocol

from orderedmq.ownership.lock import Instant

#: Seconds after which `is_forgotten` treats a run as ended.
FORGOTTEN: Final = 7 * 24 * 3600.0


class Clock(Protocol):
    """The clocks that a store uses. Tests pass their own."""

    def instant(self) -> Instant: ...

    def wall(self) -> int:
        """Return the wall clock's time in µs since the epoch, for message timestamps and retention by age, never for locks."""
        ...


@cache
def boot_id() -> str:
    """Return the id of the machine's current boot. No other boot has the same id."""
    if sys.platform == "darwin":
        return subprocess.run(
            ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"], capture_output=True, text=True, check=True
        ).stdout.strip()
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def is_forgotten(began: Instant, now: Instant) -> bool:
    """Whether a run that wrote a file at ``began`` counts as ended, if nothing else shows whether it has.

    The rule needs no wall clock, because that may be set while the run is at work. A run of an earlier boot has ended.
    """
    return now.since(began) > FORGOTTEN


class SystemClock:
    """The real clocks."""

    def instant(self) -> Instant:
        return Instant(boot_id(), time.monotonic())

    def wall(self) -> int:
        return time.time_ns() // 1000
