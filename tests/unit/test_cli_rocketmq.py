"""The start of ``orderedmq rocketmq up``, without servers; tests/live/rocketmq/test_local_servers.py starts real ones."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orderedmq.cli import app
from orderedmq.cli.shell import INTERRUPTED
from orderedmq.conditions import JavaCondition
from orderedmq.errors import JavaError
from orderedmq.rocketmq.local.jars import DEFAULT_VERSION
from orderedmq.rocketmq.local.servers import Server


@pytest.mark.parametrize("java_dies", [False, True])
def test_ctrl_c_while_servers_start_interrupts_none_of_their_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, java_dies: bool
) -> None:
    """An exception inside Popen can leave its lock acquired. Ctrl-C also reaches the Java process that is asked for its version."""
    begun, done, killed = list[str](), list[str](), list[str]()

    def launch(server: Server) -> None:
        begun.append(server.home.name)
        signal.raise_signal(signal.SIGINT)
        done.append(server.home.name)
        if java_dies:
            raise JavaError(JavaCondition.MISSING, "there is no Java")

    def kill(server: Server) -> None:
        signal.raise_signal(signal.SIGINT)
        killed.append(server.home.name)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "orderedmq" / f"rocketmq-{DEFAULT_VERSION}").mkdir(parents=True)
    (tmp_path / "orderedmq").chmod(0o700)
    monkeypatch.setattr(Server, "launch", launch)
    monkeypatch.setattr(Server, "kill", kill)
    before = signal.getsignal(signal.SIGINT)
    result = CliRunner().invoke(app, ["--path", str(tmp_path / "data"), "rocketmq", "up"])
    assert result.exit_code == INTERRUPTED
    assert result.stderr.splitlines()[-1] == "orderedmq: interrupted"
    assert result.stdout == ""
    assert begun == done == ["namesrv"]
    assert set(killed) == {"namesrv", "broker-a"}
    assert signal.getsignal(signal.SIGINT) is before
