"""The tables of the command on a terminal of 80 columns, and their colours."""

from __future__ import annotations

import io
import re
import time
from datetime import UTC, datetime

import pytest
from rich.console import Console

from orderedmq.cli.groups import OFFSET_COLUMNS
from orderedmq.cli.shell import Column, fault, parse_moment, table
from orderedmq.errors import OptionError
from orderedmq.tools.readable import moment, recent_moment


def drawn(columns: tuple[Column, ...], rows: list[dict[str, object]]) -> list[str]:
    """Return the lines of a table on a terminal of 80 columns."""
    screen = io.StringIO()
    Console(file=screen, width=80, force_terminal=True, color_system="standard").print(table(rows, columns))
    return screen.getvalue().splitlines()


def test_a_row_with_long_texts_takes_one_line_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    columns = (
        Column("offset", "offset", right=True),
        Column("from", "from"),
        Column("error", "error", cut=True, colour=fault),
        Column("body", "body", cut=True),
    )
    row = {"offset": 7, "from": "order-events/broker-a/3", "error": "ValueError: " + "a\tb" * 60, "body": '{"order": 1,\n' * 20}
    lines = drawn(columns, [row, row])
    assert sum("order-events/broker-a/3" in line for line in lines) == 2
    # The title, the rule, two rows, and empty lines around them.
    assert sum(bool(line.strip()) for line in lines) == 4
    assert max(len(re.sub("\x1b\\[[0-9;]*m", "", line)) for line in lines) <= 80


def test_lag_errors_and_dead_owners_have_colours_unless_the_user_wants_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    columns = (*OFFSET_COLUMNS, Column("alive", "alive", str, colour=fault), Column("error", "error", colour=fault))
    rows: list[dict[str, object]] = [
        {"offset": 0, "lag": 12, "alive": False, "error": "bad"},
        {"offset": 12, "lag": 0, "alive": True, "error": None},
    ]
    behind, idle = (line for line in drawn(columns, rows) if "12" in line)
    assert "\x1b[33m 12" in behind
    assert "\x1b[31mFalse" in behind
    assert "\x1b[31mbad" in behind
    assert "\x1b[3" not in idle
    monkeypatch.setenv("NO_COLOR", "1")
    assert not any("\x1b[3" in line for line in drawn(columns, rows))


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("5m", 300), ("2h", 7200)])
def test_a_duration_is_a_time_before_now(text: str, seconds: int) -> None:
    assert parse_moment(text, "--since") == pytest.approx((time.time() - seconds) * 1e6, abs=5e6)


def test_a_time_of_day_is_that_of_today_in_utc() -> None:
    today = datetime.now(UTC).replace(hour=0, minute=1, second=0, microsecond=0)
    assert parse_moment(" 00:01 ", "--since") == parse_moment("00:01:00", "--since") == today.timestamp() * 1e6
    with pytest.raises(OptionError):
        parse_moment("25:00", "--since")


def test_a_time_of_today_has_no_date() -> None:
    now = datetime.now(UTC).replace(hour=9, minute=5, second=7)
    assert recent_moment(moment(int(now.timestamp() * 1e6)) or "") == "09:05:07"
    assert recent_moment("2013-01-02T03:04:05.000000Z") == "2013-01-02 03:04"
