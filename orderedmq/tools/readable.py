"""Values as people read them: numbers, sizes, times, bodies of messages, and texts whose control characters are shown."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any, Final

CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")


def escaped(text: str) -> str:
    r"""Return text with control characters as ``\x1b``, because a terminal obeys those in a message. Line ends and tabs stay."""
    return CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def number(value: float) -> str:
    return f"{value:,.0f}"


def size(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} m"
    return f"{seconds / 3600:.0f} h" if seconds < 172_800 else f"{seconds / 86400:.0f} d"


def yes_no(value: bool) -> str:
    return "yes" if value else "no"


def moment(micros: int | None) -> str | None:
    """Return a time of a broker (µs since 1970) as text in UTC."""
    if micros is None:
        return None
    return datetime.fromtimestamp(micros / 1e6, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def short_moment(text: str) -> str:
    """Return a text of ``moment`` in short, for a table."""
    return f"{text[:10]} {text[11:19]}"


def preview(text: str, most: int) -> str:
    """Return a text as one line of at most ``most`` characters; a longer one ends with an ellipsis."""
    line = " ".join(escaped(text[: most + 1]).splitlines())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def body_fields(body: bytes) -> dict[str, Any]:
    """Return a body as text if it is UTF-8, else in hexadecimal digits."""
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_hex": body.hex(), "body": None}


def body_text(row: dict[str, Any]) -> str:
    """Return the text of a row's body for a table."""
    return f"0x{row['body_hex']}" if row["body"] is None else row["body"]
