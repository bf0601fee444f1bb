"""`orderedmq.testing` kills a process with all its descendants, even if they have left its process group, as PySpark's workers do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil

from orderedmq.testing.kill import kill_all
from tests.live.faults.drivers import gone

# A chain of processes: each starts the next one, and prints a word when that one ends.
_CHAIN = """
import os, signal, subprocess, sys
depth = int(sys.argv[1])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if depth == 0:
    os.setpgid(0, 0)
    os.write(1, b"started")
    signal.pause()
child = subprocess.Popen([sys.executable, "-c", sys.argv[2], str(depth - 1), sys.argv[2]])
child.wait()
os.write(1, b" noticed")
"""


def test_a_process_is_killed_with_all_that_it_has_started_and_none_notices() -> None:
    chain = subprocess.Popen([sys.executable, "-c", _CHAIN, "2", _CHAIN], stdout=subprocess.PIPE)
    assert chain.stdout is not None
    assert os.read(chain.stdout.fileno(), 7) == b"started"
    family = [process.pid for process in psutil.Process(chain.pid).children(recursive=True)]
    assert len(family) == 2
    kill_all(chain)
    assert chain.returncode == -signal.SIGKILL
    assert all(gone(pid) for pid in family)
    assert chain.stdout.read() == b""
    chain.stdout.close()
    # A second call has no effect.
    kill_all(chain)
