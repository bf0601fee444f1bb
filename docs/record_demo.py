"""Records the demo as a picture of a terminal: ``make demo-svg`` writes docs/demo.svg, which the README shows.

It runs the real demo and shows its output unchanged, even if messages were lost. ``--events`` limits the number of events.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

PICTURE: Final = Path(__file__).resolve().parent / "demo.svg"
WIDTH: Final = 112
#: The demo's folder in the picture, instead of its random name, which would make each recording different.
FOLDER: Final = "/tmp/orderedmq-demo"
STYLES: Final = (
    (r"^  (produced|resumed|audited)\b", "bold green"),
    (r"^  killed\b", "bold red"),
    (r"\b0 lost, 0 duplicated, 0 out of order\b", "bold green"),
    (r"[1-9][\d,]* (lost|duplicated|out of order)\b", "bold red"),
    (r"SIGKILL", "bold red"),
    (r"^  orderedmq .*$", "cyan"),
)


def play(events: int | None) -> str:
    """Run the demo and return its output. Raises CalledProcessError."""
    folder = tempfile.mkdtemp(prefix="orderedmq-demo-")
    command = [sys.executable, "-m", "orderedmq", "demo", "--no-json", "--path", folder]
    command += [] if events is None else ["--events", str(events)]
    try:
        # There are no progress bars, because standard error is not a terminal here.
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return done.stdout.replace(folder, FOLDER)


def picture(said: str) -> str:
    """Return the SVG of a terminal that shows the demo's output ``said``."""
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor", highlight=False
    )
    console.print(Text.assemble(("$ ", "dim"), ("make demo", "bold")))
    for line in said.splitlines():
        text = Text(line)
        for pattern, style in STYLES:
            text.highlight_regex(pattern, style)
        console.print(text)
    svg = console.export_svg(title="orderedmq", unique_id="demo")
    # Without these, a reader of the page would fetch fonts from another site.
    return re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, help="number of events to play (default: all of the year)")
    parser.add_argument("--out", type=Path, default=PICTURE, help=f"file of the picture (default: {PICTURE.name})")
    given = parser.parse_args()
    given.out.write_text(picture(play(given.events)))
    sys.stdout.write(f"{given.out}\n")


if __name__ == "__main__":
    main()
