"""The code that runs servers on this machine, with a Python program instead of Java."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orderedmq.rocketmq.local.jars import DEFAULT_VERSION
from orderedmq.rocketmq.local.servers import Server

BUSY = """
import hashlib, threading
def work():
    while True:
        hashlib.pbkdf2_hmac("sha256", b"a", b"b", 100_000)
for _ in range(4):
    threading.Thread(target=work).start()
print("busy", flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="this system cannot wait until a process is stopped")
def test_all_threads_of_a_paused_server_are_stopped(tmp_path: Path) -> None:
    server = Server(tmp_path, DEFAULT_VERSION, 0)
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        server._process = process
        try:
            for _ in range(10):
                server.pause()
                threads = Path("/proc", str(process.pid), "task").glob("*/stat")
                assert {file.read_text().rpartition(") ")[2][0] for file in threads} == {"T"}
                server.resume()
        finally:
            server.kill()
