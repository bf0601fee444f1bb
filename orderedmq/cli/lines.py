"""Turns lines of a file or a terminal into messages: splits them, and finds the body, key, tag and properties of each."""

from __future__ import annotations

import io
import os
import select
import time
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.conditions import MessageCondition, SchemaCondition
from orderedmq.errors import MessageError, SchemaError
from orderedmq.model import MAX_BODY_BYTES, MAX_KEY_BYTES
from orderedmq.routing.sharding_key import KeyType, check_lines
from orderedmq.schema import PROPERTIES_TYPE, null_where
from orderedmq.tools import json_field
from orderedmq.tools.json_field import BadJson

#: Lines are appended when they have this many bytes, or after this many seconds if they arrive slowly.
BLOCK_BYTES: Final = 8 * 1024 * 1024
LINGER: Final = 0.2
#: Bytes after which a line without an end is refused, because no message can be that long.
_LONGEST: Final = 2 * MAX_BODY_BYTES


@dataclass(frozen=True)
class LineForm:
    """The form of a line: a JSON object, or a body that may have a key before it.

    ``base64``: the body is bytes in Base64. ``key``, ``tags_field`` and the values of ``property_fields`` name fields of the JSON objects.
    ``tags`` and ``properties`` apply to all messages.
    """

    json: bool = False
    key: str | None = None
    separator: str | None = None
    key_type: KeyType = "text"
    tags: str | None = None
    tags_field: str | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    property_fields: Mapping[str, str] = field(default_factory=dict)
    base64: bool = False


def read_lines(source: IO[bytes]) -> Iterator[tuple[int, pa.Array]]:
    """Yield blocks of whole lines, each with the number of its first line (from 1). Raises SchemaError WRONG_TYPE."""
    first, rest = 1, b""
    for block in _blocks(source):
        whole, newline, tail = block.rpartition(b"\n")
        if not newline:
            rest += tail
            if len(rest) > _LONGEST:
                raise SchemaError(
                    SchemaCondition.WRONG_TYPE, f"line {first} is longer than any message may be ({MAX_BODY_BYTES} bytes)"
                )
            continue
        lines = (rest + whole).split(b"\n")
        rest = tail
        yield first, _stripped(lines)
        first += len(lines)
    if rest:
        yield first, _stripped([rest])


def _stripped(lines: list[bytes]) -> pa.Array:
    """Return lines without the carriage returns of a Windows file."""
    column = pa.array(lines, pa.binary())
    returned = pc.ends_with(column, b"\r")
    if not pc.any(returned).as_py():
        return column
    return pc.if_else(returned, pc.binary_slice(column, 0, -1), column)


def _blocks(source: IO[bytes]) -> Iterator[bytes]:
    """Yield the input in blocks of up to BLOCK_BYTES. After the first bytes of a block, wait at most LINGER seconds for more."""
    try:
        descriptor = source.fileno()
    except (OSError, io.UnsupportedOperation):
        while block := source.read(BLOCK_BYTES):
            yield block
        return
    parts: list[bytes] = []
    size, until = 0, 0.0
    while True:
        if parts and not select.select([descriptor], [], [], max(0.0, until - time.monotonic()))[0]:
            part = None
        else:
            part = os.read(descriptor, BLOCK_BYTES - size)
            if part and not parts:
                until = time.monotonic() + LINGER
            parts.append(part)
            size += len(part)
        if not part or size >= BLOCK_BYTES:
            if size:
                yield b"".join(parts)
            parts, size = [], 0
        if part == b"":
            return


def messages(lines: pa.Array, first: int, form: LineForm) -> pa.RecordBatch:
    """Return the messages of lines. ``first``: number of the first line. Raises SchemaError or MessageError, which name the line."""
    numbers: Sequence[int] = range(first, first + len(lines))
    keys = tags = None
    properties: list[pa.Array] = []
    if form.json:
        blank = pc.equal(pc.binary_length(pc.utf8_trim_whitespace(_as_text(lines, first))), 0)
        if pc.any(blank).as_py():
            numbers = pa.array(np.asarray(numbers)).filter(pc.invert(blank)).to_pylist()
            lines = lines.filter(pc.invert(blank))
        # If no key field is given, read the field "" and ignore its values, only to check that the lines are JSON objects.
        keys = _field(lines, form.key or "", numbers)
        if form.key is None:
            keys = None
        elif keys.null_count:
            row = int(pc.index(keys.is_null(), True).as_py())
            raise SchemaError(
                SchemaCondition.MISSING_COLUMN,
                f"line {numbers[row]} of the input has no field {form.key!r}, and a message without a key has no order. Filter the line out",
            )
        if form.tags_field is not None:
            tags = _field(lines, form.tags_field, numbers)
            # RocketMQ has no empty tag.
            tags = null_where(pc.equal(tags, ""), tags)
        properties = [_field(lines, name, numbers) for name in form.property_fields.values()]
    elif form.separator is not None:
        text = _as_text(lines, first)
        found_at = pc.find_substring(text, form.separator)
        if pc.any(pc.less(found_at, 0)).as_py():
            row = int(pc.index(pc.less(found_at, 0), True).as_py())
            raise SchemaError(
                SchemaCondition.MISSING_COLUMN,
                f"line {numbers[row]} of the input has no {form.separator!r} between key and body",
            )
        parts = pc.split_pattern(text, form.separator, max_splits=1)
        keys, lines = pc.list_element(parts, 0), pc.list_element(parts, 1)
    if form.base64:
        lines = _decoded(lines, numbers)
    if keys is not None:
        check_lines(keys, form.key_type, numbers)
    _check_length(lines, "body", MAX_BODY_BYTES, MessageCondition.TOO_LARGE, numbers)
    columns = {"body": lines}
    if keys is not None:
        _check_length(keys, "sharding key", MAX_KEY_BYTES, MessageCondition.KEY_TOO_LONG, numbers)
        columns["sharding_key"] = keys
    if form.tags is not None:
        tags = pa.repeat(pa.scalar(form.tags, pa.string()), len(lines))
    if tags is not None:
        _check_length(tags, "tag", MAX_KEY_BYTES, MessageCondition.KEY_TOO_LONG, numbers)
        columns["tags"] = tags
    if form.properties or properties:
        columns["properties"] = _properties(form, properties, len(lines))
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def _decoded(lines: pa.Array, numbers: Sequence[int]) -> pa.Array:
    """Return the bytes of lines in Base64. Raises SchemaError WRONG_TYPE."""
    bodies: list[bytes] = []
    for number, line in zip(numbers, lines.cast(pa.binary()).to_pylist(), strict=True):
        try:
            bodies.append(b64decode(line, validate=True))
        except ValueError as error:
            raise SchemaError(
                SchemaCondition.WRONG_TYPE, f"line {number} of the input has no body in Base64: {error}"
            ) from None
    return pa.array(bodies, pa.binary())


def _field(objects: pa.Array, name: str, numbers: Sequence[int]) -> pa.Array:
    """Return the text of a field, null where the field is missing or null. Raises SchemaError WRONG_TYPE."""
    try:
        return json_field.values(objects, name)
    except BadJson as error:
        raise SchemaError(SchemaCondition.WRONG_TYPE, f"line {numbers[error.row]} of the input: {error.why}") from error


def _properties(form: LineForm, fields: Sequence[pa.Array], count: int) -> pa.Array:
    same = list(form.properties.items())
    if not fields:
        return pa.array([same] * count, PROPERTIES_TYPE)
    rows = zip(*(column.to_pylist() for column in fields), strict=True)
    # RocketMQ has no property without a value.
    return pa.array(
        [same + [(name, value) for name, value in zip(form.property_fields, row, strict=True) if value] for row in rows],
        PROPERTIES_TYPE,
    )


def _check_length(column: pa.Array, what: str, most: int, sub: MessageCondition, numbers: Sequence[int]) -> None:
    lengths = pc.fill_null(pc.binary_length(column), 0)
    longest = pc.max(lengths).as_py() or 0
    if longest > most:
        row = int(pc.index(pc.greater(lengths, most), True).as_py())
        raise MessageError(
            sub,
            f"line {numbers[row]} of the input has a {what} of {lengths[row].as_py()} bytes, but at most {most} are allowed. Shorten it",
        )


def _as_text(lines: pa.Array, first: int) -> pa.Array:
    try:
        return lines.cast(pa.string())
    except pa.ArrowInvalid as error:
        for row, line in enumerate(lines.to_pylist()):
            try:
                line.decode()
            except UnicodeDecodeError:
                raise SchemaError(SchemaCondition.WRONG_TYPE, f"line {first + row} of the input is not UTF-8") from error
        raise
