"""The columns of tables that show a queue's owner."""

from __future__ import annotations

from collections.abc import Mapping

from orderedmq.cli.shell import Column
from orderedmq.tools.readable import duration, yes_no


def owner_columns(short: Mapping[str, str]) -> tuple[Column, ...]:
    """Return the columns for a queue's owner and the age of its lock. ``short``: short names of owners."""
    return (
        Column("owner", "owner", short.__getitem__),
        Column("lock_age", "renewed", duration, right=True, spare=2),
        Column("lock_remaining", "ends in", duration, right=True, spare=4),
        Column("alive", "alive", yes_no, spare=1),
    )
