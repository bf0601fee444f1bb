"""Runs the command as a user does, in a separate process, with or without a terminal, and returns its output."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from orderedmq.broker import Broker

COMMAND = [sys.executable, "-c", "from orderedmq.cli import app; app()"]
#: Without PYTHONUNBUFFERED, so that Python buffers output as it does for users.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
#: A fixture that runs the command.
Run = Callable[..., Any]
CTRL_C = b"\x03"


def on_terminal(arguments: list[str], answer: tuple[bytes, bytes] | None = None) -> tuple[str, int]:
    """The text that a command writes to a terminal, and its exit code. ``answer``: the text to wait for, and the input to type then."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=ENVIRONMENT, close_fds=True
    )
    os.close(theirs)
    said = b""
    while select.select([ours], [], [], 60)[0]:
        try:
            part = os.read(ours, 4096)
        except OSError:
            # Linux raises this error when the other side is closed.
            break
        if not part:
            break
        said += part
        if answer is not None and answer[0] in said:
            if answer[1] == CTRL_C:
                # The terminal is not the process's controlling terminal, so typing Ctrl-C would send no signal.
                process.send_signal(signal.SIGINT)
            else:
                os.write(ours, answer[1])
            answer = None
    os.close(ours)
    return said.decode(), process.wait(60)


def bodies(broker: Broker, topic: str) -> list[list[tuple[str | None, bytes]]]:
    """The (key, body) pairs of each queue."""
    out = []
    for queue, at in broker.log.bounds(broker.log.queues(topic)).items():
        rows: list[tuple[str | None, bytes]] = []
        while at.min_offset + len(rows) < at.max_offset:
            batch = broker.log.pull(queue, at.min_offset + len(rows), 1000, 1 << 24, ("sharding_key", "body"))
            rows += zip(batch["sharding_key"].to_pylist(), batch["body"].to_pylist(), strict=True)
        out.append(rows)
    return out
