"""How much of a processor a process gets beside others. Linux weighs sessions against each other (autogroup), and niceness in each."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def weigh(pid: int, niceness: int) -> None:
    """Set the niceness of a process's session, where Linux weighs sessions."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(niceness))


def give_way(niceness: int) -> None:
    """Make this process the first of a session, and have that give way to all others."""
    with contextlib.suppress(OSError):
        # It is the first of one already.
        os.setsid()
    weigh(os.getpid(), niceness)
    os.nice(niceness)
