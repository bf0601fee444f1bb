"""Ports for servers on this machine: no port is chosen twice, even by different processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

from orderedmq.errors import ServersError
from orderedmq.rocketmq.local import probe

#: Outside the range from which the product chooses, and below the ports of outgoing connections.
PORTS = range(begin := 32_002 + os.getpid() % 80 * 9, begin + 6)
CHOOSES = f"""
import sys
from orderedmq.rocketmq.local import probe
probe._PORTS = range({PORTS.start}, {PORTS.stop})
print(*(probe.find_free_port() for _ in range(int(sys.argv[1]))), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def few_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reservations for this test only."""
    monkeypatch.setattr(probe, "_PORTS", PORTS)
    monkeypatch.setattr(probe, "_returned_ports", set())
    monkeypatch.setattr(probe, "_reservations", cache(probe._reservations.__wrapped__))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))


def test_a_port_is_chosen_by_one_process_until_that_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHOOSES, str(len(PORTS) - 1)]
    root = Path(__file__).parents[2]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=root, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        # No process listens on these ports.
        theirs = {int(port) for port in other.stdout.readline().split()}
        assert len(theirs) == len(PORTS) - 1
        [mine] = set(PORTS) - theirs
        assert probe.find_free_port() == mine
        with pytest.raises(ServersError, match="PORT_IN_USE"):
            probe.find_free_port()
        # The reservations end however the process ends, even when it is killed.
        other.send_signal(signal.SIGKILL)
    assert probe.find_free_port() in theirs


def test_a_broker_gets_a_port_with_all_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its VIP port is two below its own port, and the port of its replicas is one above (fastListenPort, haListenPort)."""
    monkeypatch.setattr(probe, "_PORTS", range(PORTS.start, PORTS.start + 1))
    for taken in (PORTS.start - 2, PORTS.start, PORTS.start + 1):
        with socket.socket() as server:
            server.bind((probe.HOST, taken))
            server.listen()
            with pytest.raises(ServersError, match="PORT_IN_USE"):
                probe.find_free_port(-2, 0, 1)
    assert probe.find_free_port(-2, 0, 1) == PORTS.start


def test_chooses_a_port_without_a_folder_for_reservations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "missing"))
    assert probe.find_free_port() in PORTS
