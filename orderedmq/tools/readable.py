"""Formats values for people: numbers, sizes, times, message bodies, and texts whose invisible characters are made visible.

Rule: a text from outside (a body, key, tag, property, error or name) passes through `escaped` before it is sent to a terminal or
a web page, and through `shortened` before it becomes a cell of a table.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import cache
from typing import Any, Final

#: Invisible characters that control a terminal or a browser: control characters except tabs and line ends, line and paragraph
#: separators, Unicode's property Bidi_Control (which reorders the text around it), and surrogates, which have no encoding.
_OBEYED: Final = r"\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
CONTROL: Final = re.compile(rf"[{_OBEYED}]|\r(?!\n)")
_LONE_RETURN: Final = re.compile(r"\r(?!\n)")


@cache
def _escapes() -> dict[int, str]:
    """Return the escape of each control character. Carriage returns are left out, because only lone ones are escaped."""
    every = "".join(map(chr, range(1 << 16)))
    return {ord(character): repr(character)[1:-1] for character in re.findall(f"[{_OBEYED}]", every)}


def escaped(text: str) -> str:
    r"""Return text with invisible characters as ``\x1b`` or ``\u202e``. Line ends and tabs stay."""
    if not CONTROL.search(text):
        return text
    # Use a table, because a function call for each character is too slow for a body of 4 MiB of NULs.
    return _LONE_RETURN.sub(r"\\r", text).translate(_escapes())


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


def moment(time: int | datetime | None) -> str | None:
    """Return a broker's time (aware, or µs since 1970) as text in UTC."""
    if time is None:
        return None
    return (time if isinstance(time, datetime) else datetime.fromtimestamp(time / 1e6, UTC)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def short_moment(text: str) -> str:
    """Return the result of `moment` shortened to seconds, for a table."""
    return f"{text[:10]} {text[11:19]}"


def recent_moment(text: str) -> str:
    """Return the result of `moment` for a narrow table: the time of today's moments, the date and the minute of others (UTC)."""
    return text[11:19] if text[:10] == datetime.now(UTC).date().isoformat() else f"{text[:10]} {text[11:16]}"


def shortened(text: str, most: int, whole: str) -> str:
    """Return a text with its invisible characters escaped, of at most ``most`` characters.

    A longer text ends with its length and ``whole``, which says where the whole text can be seen.
    """
    # Cut first, because escaping millions of characters takes seconds.
    shown = escaped(text[: most + 1])
    if len(shown) <= most:
        return shown
    end = f"… ({number(len(text))} characters, {whole})"
    return shown[: max(0, most - len(end))] + end


def one_line(text: str) -> str:
    """Return an escaped text without its line ends and tabs, whose width a table cannot know."""
    return " ".join(escaped(text).splitlines()).replace("\t", " ")


def preview(text: str, most: int) -> str:
    """Return a text as one line of at most ``most`` characters; a longer one ends with an ellipsis."""
    line = one_line(text[: most + 1])
    return line if len(line) <= most else f"{line[: most - 1]}…"


def body_fields(body: bytes) -> dict[str, Any]:
    """Return a body as fields of a row: as text if it is UTF-8, else as hexadecimal digits."""
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_hex": body.hex(), "body": None}


def body_text(row: dict[str, Any]) -> str:
    """Return the body in the fields of `body_fields` as text for a table."""
    return f"0x{row['body_hex']}" if row["body"] is None else row["body"]
