"""A program in which one process is killed when a commit's sync fails, and another process continues with the store.

It runs under strace (`recorder`). ``python -m tests.power.failed_sync FOLDER [BUG]`` plants one of `BUGS` first.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from orderedmq.embedded.store import wal
from orderedmq.errors import StoreError
from tests.power.recorder import MARKS
from tests.power.workload import Workload, seen

#: The sync that fails: the commit of one of the first process's appends. The second process makes fewer syncs.
FAILING: Final = "fdatasync:error=EIO:when=9"
APPENDS: Final = 12


def _log_not_made_whole() -> None:
    wal.make_whole = lambda folder: None


BUGS: Final[Mapping[str, Callable[[], None]]] = {"the log is not made whole": _log_not_made_whole}


def _say(folder: Path, **what: Any) -> None:
    marks = os.open(folder / MARKS, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.write(marks, json.dumps(what).encode() + b"\n")
    os.close(marks)


def first(folder: Path) -> None:
    """Append messages until a sync fails, and be killed."""
    work = Workload(folder)
    _say(folder, begin="topic")
    work.broker.admin.create_topic("orders", 2, compression="none")
    _say(folder, end="topic", state=seen(work.broker))
    for number in range(APPENDS):
        _say(folder, begin=f"append {number}")
        try:
            work.append(10, 3000)
        except StoreError:
            os.kill(os.getpid(), signal.SIGKILL)
        _say(folder, end=f"append {number}", state=seen(work.broker))
    raise AssertionError("no sync has failed")


def second(folder: Path) -> None:
    """Report what there is, and append more."""
    work = Workload(folder)
    work._number = 1000
    _say(folder, end="the append whose process was killed", state=seen(work.broker))
    for number in range(3):
        _say(folder, begin=f"more {number}")
        work.append(10, 10)
        _say(folder, end=f"more {number}", state=seen(work.broker))
    # Nothing is closed, as if the machine lost its power now.
    os._exit(0)


def main() -> None:
    folder, bug = Path(sys.argv[1]), sys.argv[2:]
    match bug:
        case ["first"]:
            first(folder)
        case ["second", *planted]:
            for name in planted:
                BUGS[name]()
            second(folder)
        case _:
            program = [sys.executable, "-m", "tests.power.failed_sync", str(folder)]
            assert subprocess.run([*program, "first"]).returncode == -signal.SIGKILL
            subprocess.run([*program, "second", *bug], check=True)


if __name__ == "__main__":
    main()
