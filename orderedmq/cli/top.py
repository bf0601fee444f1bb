"""``orderedmq top``: a live view of queues, their owners and their lag."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from orderedmq.broker import Broker
from orderedmq.cli import queue_names
from orderedmq.cli.groups import (
    OFFSET_COLUMNS,
    owner_columns,
    parked_columns,
    progress_columns,
    queue_row,
    wait_columns,
)
from orderedmq.cli.shell import Column, Shell, command, commands, console, table
from orderedmq.conditions import OptionCondition
from orderedmq.errors import GroupError, OptionError
from orderedmq.model import check_group
from orderedmq.options.values import parse_duration
from orderedmq.tools.group_state import Rates, group_queues, owners_of, short_names
from orderedmq.tools.parked import LotReader
from orderedmq.tools.readable import number

if TYPE_CHECKING:
    from rich.console import RenderableType

app = commands("")

Row = dict[str, Any]

_LEAST_INTERVAL: Final = 0.1
#: Lines of the view that do not show queues.
_FRAME: Final = 5
_RATE: Final = Column("rate", "msg/s", number, right=True)


def _columns(rows: Sequence[Row]) -> tuple[Column, ...]:
    """Return the columns of a view. The line above them names a single group."""
    owners = owner_columns(short_names(owners_of(rows)))
    figures = (*OFFSET_COLUMNS, *progress_columns(rows), *parked_columns(rows), *wait_columns(rows), _RATE)
    several = len({row["group"] for row in rows}) > 1
    columns = (*((Column("group", "group"),) if several else ()), *queue_names.columns(rows), *figures, *owners)
    # Each queue has one line, so that the number of lines is known.
    return tuple(column._replace(cut=not column.right) for column in columns)


@command(app, "top")
def top(
    shell: Shell,
    group: Annotated[
        str | None,
        typer.Argument(
            metavar="GROUP",
            help="Only this consumer group (default: all).",
            show_default=False,
            autocompletion=queue_names.groups,
        ),
    ] = None,
    interval: Annotated[str, typer.Option(help="Time between two updates.", metavar="TIME")] = "1s",
    once: Annotated[
        bool, typer.Option("--once", help="Show the queues once and end. This is the default if the output is not a terminal.")
    ] = False,
) -> None:
    """Watch the queues of consumer groups: offset, lag, speed, owner. Press q or Ctrl-C to end.

    The speed is the number of committed messages per second, averaged over the last 10 seconds because each micro-batch commits many
    messages at once. While a listener has been at work for longer than 5 seconds, "done" is how many messages of the lag it is done with.
    If the window is too small for all queues, it shows the queues with the greatest lag.
    """
    if group is not None:
        check_group(group)
    seconds = parse_duration(interval.strip(), "--interval")
    if seconds < _LEAST_INTERVAL:
        raise OptionError(OptionCondition.INVALID, f"option --interval: {interval!r} is too short. Give at least 100ms")
    rates = Rates()
    with shell.broker() as broker:
        lots = LotReader(broker)
        if once or shell.json or not sys.stdout.isatty():
            rows = _look(broker, group, rates, lots)
            title = f"group {rows[0]['group']}" if len({row["group"] for row in rows}) == 1 else ""
            shell.show(rows, _columns(rows), title=title, none=f"there are no consumer groups in {shell.address}")
        else:
            _watch(lambda: _look(broker, group, rates, lots), seconds)


def _look(broker: Broker, group: str | None, rates: Rates, lots: LotReader) -> list[Row]:
    """Return a row for each queue of ``group``, or of all groups. Raises GroupError MISSING if ``group`` is missing."""
    rows: dict[tuple[str, str, str, int], Row] = {}
    for name in broker.admin.groups() if group is None else [group]:
        try:
            parked = lots.look(name)
            states = group_queues(broker, name, parked)
        except GroupError:
            if group is not None:
                raise
            # The group was deleted after it was listed.
            continue
        rows |= {(name, *each.queue): queue_row(each, parked.get(each.queue)) for each in states}
    speeds = rates.see(time.monotonic(), {key: row["offset"] for key, row in rows.items()})
    return [{**row, "rate": round(speeds[key], 3) if key in speeds else None} for key, row in rows.items()]


def _watch(look: Callable[[], list[Row]], seconds: float) -> None:
    from rich.live import Live

    shown = console()
    try:
        with _quit_key() as quits, Live(console=shown, auto_refresh=False) as live:
            while True:
                live.update(_view(look(), shown.height), refresh=True)
                if quits(seconds):
                    return
    except KeyboardInterrupt:
        # Ctrl-C is the normal end.
        return


def _view(rows: Sequence[Row], height: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    room = max(1, height - _FRAME)
    lag, speed = sum(row["lag"] for row in rows), sum(row["rate"] or 0 for row in rows)
    parked = sum(row.get("parked", 0) for row in rows)
    groups = {row["group"] for row in rows}
    head = f"{f'group {min(groups)}' if len(groups) == 1 else f'{len(groups)} groups'}, {len(rows)} queues, lag {lag:,}, "
    head += f"{f'parked {parked:,}, ' if parked else ''}{speed:,.0f} msg/s. q ends"
    if len(rows) > room:
        behind = set(sorted(range(len(rows)), key=lambda index: -rows[index]["lag"])[:room])
        rows = [row for index, row in enumerate(rows) if index in behind]
        head += f". The {room} with the most lag:"
    return Group(Text(head, no_wrap=True, overflow="ellipsis"), table(rows, _columns(rows)))


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


@contextlib.contextmanager
def _quit_key() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits for the given seconds. It returns True as soon as q is pressed, else False."""
    if not sys.stdin.isatty():
        yield _sleep
        return
    import termios
    import tty

    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)

    def asked(seconds: float) -> bool:
        until = time.monotonic() + seconds
        while select.select([keys], [], [], max(0.0, until - time.monotonic()))[0]:
            pressed = os.read(keys, 1)
            # An empty read means that the terminal was closed.
            if pressed in (b"q", b"Q", b""):
                return True
        return False

    try:
        tty.setcbreak(keys)
        yield asked
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)
