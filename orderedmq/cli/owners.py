"""The columns of tables that show a queue's owner."""

from __future__ import annotations

from collections.abc import Mapping

from orderedmq.cli.shell import Column
from orderedmq.tools.readable import yes_no


def owner_columns(short: Mapping[str, str]) -> tuple[Column, ...]:
    """Return the columns for a queue's owner. ``short``: short names of owners."""
    return (Column("owner", "owner", short.__getitem__, cut=True), Column("alive", "alive", yes_no))
