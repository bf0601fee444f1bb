"""The whole suite, as ``make test`` runs it: ``python -m tests``.

In two processes side by side, since each waits more than it works: tests that need RocketMQ servers, and all others. The report of the
former is printed when the others are through.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from typing import Final

#: What pytest returns where no test was selected.
_NONE: Final = 5


def main() -> int:
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+") as report:
        servers = subprocess.Popen(_pytest("servers"), stdout=report, stderr=subprocess.STDOUT)
        try:
            others = subprocess.run(_pytest("not servers"), check=False).returncode
            print("\nwith RocketMQ servers:", flush=True)
            beside = servers.wait()
        finally:
            # Ctrl-C has reached it, too: it stops its servers.
            servers.wait()
        report.seek(0)
        print(report.read())
    print(f"{(time.monotonic() - begin) / 60:.1f} minutes")
    return next((code for code in (others, beside) if code not in (0, _NONE)), 0)


def _pytest(marked: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-m", marked]


if __name__ == "__main__":
    sys.exit(main())
