"""Extracts one field of many JSON objects as one column. Pure.

Arrow's parser parses all objects in one call if every value has the same type as the first one. If Arrow refuses, each object is
parsed separately.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

#: The types of values that Arrow's parser converts to the same text as `_text`.
_TYPES: Final = {str: pa.string(), int: pa.int64()}


class BadJson(ValueError):
    """The text in ``row`` is not a JSON object, or its field is not UTF-8 text."""

    def __init__(self, row: int, why: str) -> None:
        self.row = row
        self.why = why
        super().__init__(f"row {row}: {why}")


def values(objects: pa.Array, path: str) -> pa.Array:
    """Return the text of a field of each object (binary or string): strings unchanged, other values as JSON.

    The text is null if the field is missing or null. A dot in ``path`` separates the names of nested fields, unless the first
    object has a field with exactly that name. Raises BadJson.
    """
    if not len(objects):
        return pa.array([], pa.string())
    texts = objects.cast(pa.binary())
    if texts.null_count:
        raise BadJson(int(pc.index(texts.is_null(), True).as_py()), "there is no text")
    first = _object(0, texts[0].as_py())
    names = (path,) if path in first else tuple(path.split("."))
    value = _find(first, names)
    kinds = _TYPES.values() if value is None else [kind for python_type, kind in _TYPES.items() if type(value) is python_type]
    # If every text begins and ends with a brace, Arrow cannot merge texts, because it refuses a newline in a string and a brace that
    # opens directly after one that closes within an object. So a text with several objects increases the number of rows, which
    # `_parsed` checks.
    if kinds and pc.all(pc.starts_with(texts, b"{")).as_py() and _all_closed(texts):
        for kind in kinds:
            # A name that is not UTF-8 (UnicodeEncodeError) can be a field only with an escape such as "\\udcff".
            with contextlib.suppress(pa.ArrowInvalid, _NotAligned, UnicodeEncodeError):
                return _parsed(texts, names, kind)
    texts_of_rows = [_text(row, _find(_object(row, text), names)) for row, text in enumerate(texts.to_pylist())]
    return pa.array(texts_of_rows, pa.string())


def _all_closed(texts: pa.Array) -> bool:
    """Whether each text ends with a closing brace, with or without white space after it."""
    return bool(pc.all(pc.ends_with(texts, b"}")).as_py() or pc.all(pc.match_substring_regex(texts, rb"\}[ \t\r\n]*$")).as_py())


class _NotAligned(Exception):
    pass


def _parsed(texts: pa.Array, names: tuple[str, ...], kind: pa.DataType) -> pa.Array:
    lines = pc.binary_join(pa.ListArray.from_arrays([0, len(texts)], texts), b"\n")[0].as_buffer()
    for name in reversed(names):
        kind = pa.struct([(name, kind)])
    table = pyarrow.json.read_json(
        pa.BufferReader(lines),
        # One block keeps the rows in order and does not cut an object in two.
        read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=lines.size + 1),
        parse_options=pyarrow.json.ParseOptions(explicit_schema=pa.schema(list(kind)), unexpected_field_behavior="ignore"),
    )
    if table.num_rows != len(texts):
        raise _NotAligned
    column = table.column(names[0]).combine_chunks()
    column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    if len(names) > 1:
        column = pc.struct_field(column, list(names[1:]))
    # Arrow's parser accepts text that is not UTF-8, so check it here.
    column.validate(full=True)
    return column.cast(pa.string())


def _object(row: int, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadJson(row, f"the text is not JSON ({error.msg}): {_shown(text)}") from error
    except UnicodeDecodeError as error:
        raise BadJson(row, f"the text is not JSON (not UTF-8): {_shown(text)}") from error
    except ValueError as error:
        raise BadJson(row, f"the text has a number with more digits than Python reads: {_shown(text)}") from error
    except RecursionError as error:
        raise BadJson(row, f"the text is nested too deeply: {_shown(text)}") from error
    if not isinstance(value, dict):
        raise BadJson(row, f"the text is not a JSON object: {_shown(text)}")
    return value


def _find(value: Any, names: tuple[str, ...]) -> Any:
    for name in names:
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return value


def _text(row: int, value: Any) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadJson(row, "the field contains half a character (a lone surrogate)") from error
    return text


def _shown(text: bytes) -> str:
    shown = text[:60].decode(errors="replace")
    return repr(shown + ("..." if len(text) > 60 else ""))
