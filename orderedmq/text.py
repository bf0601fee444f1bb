"""Repairs tags, keys and properties that are not UTF-8, for both kinds of broker, and counts the messages for a warning. Vectorised.

Rules: bytes become the text that Java reads (``new String(bytes, UTF_8)``), with U+FFFD for each malformed sequence. So a
column shows the text that Java's consumers see, a key chooses the same queue as in Java, and a message that is written again is the
same that Java would write. Bodies are bytes and stay unchanged. `clip` makes an error's text fit into a property.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.conditions import MessageCondition
from orderedmq.errors import MessageError
from orderedmq.model import MessageQueue

logger = logging.getLogger("orderedmq")

Int64s = npt.NDArray[np.int64]

#: The text columns of a message that a producer sets.
TEXTS: Final = ("tags", "keys", "sharding_key", "properties")
#: Maximum bytes of an error's text. The rest is cut off.
MAX_ERROR_BYTES: Final = 4096
#: The greatest offset in a column whose offsets have 32 bits.
_MOST_BYTES: Final = 2**31 - 1
#: A UTF-16 surrogate encoded like UTF-8, complete or truncated. Java counts it as one malformed sequence, Python as two or three.
_SURROGATE: Final = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]?")
_REPLACEMENT: Final = "\ufffd".encode()


def is_text(data: bytes) -> bool:
    """Return whether bytes are valid UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def text_of(data: bytes) -> str:
    """Return bytes as the text that Java reads."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return _SURROGATE.sub(_REPLACEMENT, data).decode(errors="replace")


def clip(text: str, limit: int) -> str:
    """Return at most ``limit`` bytes of a text, in a form that a property can hold.

    The characters 0 to 2 become spaces, because RocketMQ separates properties by 1 and 2. Surrogates are replaced, because UTF-8 has
    none.
    """
    plain = text.translate({0: " ", 1: " ", 2: " "}).encode("utf-8", "replace")
    return plain[: max(limit, 0)].decode("utf-8", "ignore")


def repaired(column: pa.Array) -> tuple[pa.Array, Int64s]:
    """Return the column with valid UTF-8 in all texts, and the indices of the rows that had malformed text.

    Accepts columns of any type and keeps the type. Binary values are not text. If two keys of a map become equal, the later one is kept.
    """
    kind = column.type
    if _is_valid(column):
        return column, np.zeros(0, dtype=np.int64)
    rows: list[int] = []
    values: list[Any] = []
    for row, value in enumerate(column):
        malformed: list[bytes] = []
        values.append(_plain(value, malformed))
        if malformed:
            rows.append(row)
    return pa.array(values, kind), np.array(rows, dtype=np.int64)


def narrow(column: pa.Array, what: str) -> pa.Array:
    """Return a column of large_string or large_binary as string or binary, and any other column unchanged.

    Raises MessageError TOO_LARGE, which names ``what``, if the values have more than 2 GiB.
    """
    if not (pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)):
        return column
    kind = pa.string() if pa.types.is_large_string(column.type) else pa.binary()
    size = pc.sum(pc.binary_length(column)).as_py() or 0
    if size > _MOST_BYTES:
        raise MessageError(
            MessageCondition.TOO_LARGE,
            f"{what} has {size} bytes, but at most {_MOST_BYTES} fit into one call. Send fewer rows at once",
        )
    try:
        return column.cast(kind)
    except pa.ArrowInvalid:
        # The offsets of a slice count from the beginning of the whole column. Those of a copy do not.
        return column.take(pa.array(np.arange(len(column)))).cast(kind)


def repaired_rows(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, Int64s]:
    """Apply `repaired` to the columns of a batch in `TEXTS`."""
    repaired_in: list[Int64s] = []
    for name in TEXTS:
        index = batch.schema.get_field_index(name)
        if index < 0:
            continue
        column, rows = repaired(batch.column(index))
        if len(rows):
            batch = batch.set_column(index, batch.schema.field(index), column)
            repaired_in.append(rows)
    return batch, np.unique(np.concatenate(repaired_in)) if repaired_in else np.zeros(0, dtype=np.int64)


def _is_valid(column: pa.Array) -> bool:
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _is_utf8(column)
    if pa.types.is_map(kind) and pa.types.is_string(kind.key_type) and pa.types.is_string(kind.item_type):
        return _is_utf8(column.keys) and _is_utf8(column.items)
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _is_utf8(column: pa.Array) -> bool:
    """Return whether all strings are UTF-8. Checks for ASCII first, because most text is ASCII and the check is fast."""
    if not len(column):
        return True
    _, offsets, data = column.buffers()
    if data is None or not data.size:
        return True
    large = pa.types.is_large_string(column.type)
    bounds = np.frombuffer(offsets, dtype=np.int64 if large else np.int32)[column.offset : column.offset + len(column) + 1]
    raw = np.frombuffer(data, dtype=np.uint8)[bounds[0] : bounds[-1]]
    if not len(raw) or raw.max() < 128:
        return True
    try:
        column.view(pa.large_binary() if large else pa.binary()).cast(column.type)
    except pa.ArrowInvalid:
        return False
    return True


def _plain(value: pa.Scalar, malformed: list[bytes]) -> Any:
    """Return the Python value of a scalar. Bytes that are not UTF-8 are added to ``malformed``."""
    kind = value.type
    if not value.is_valid:
        return None
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        data = value.as_buffer().to_pybytes()
        if not is_text(data):
            malformed.append(data)
        return text_of(data)
    if pa.types.is_map(kind):
        pairs = {_plain(entry[0], malformed): _plain(entry[1], malformed) for entry in value.values}
        return list(pairs.items())
    if pa.types.is_struct(kind):
        return {field.name: _plain(value[index], malformed) for index, field in enumerate(kind)}
    if any(test(kind) for test in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)):
        return [_plain(item, malformed) for item in value.values]
    if pa.types.is_dictionary(kind):
        return _plain(value.value, malformed)
    return value.as_py()


@dataclass
class _Seen:
    messages: int = 0
    last: int = -1
    #: The number of messages at which the next warning is logged.
    warn_at: int = 1


class MalformedText:
    """Counts messages with malformed text. Warns about the first one in a queue and each time their number doubles. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[MessageQueue, _Seen] = {}

    def note(self, queue: MessageQueue, offsets: Iterable[int]) -> None:
        """Count malformed messages by their offsets. Ignores offsets up to the highest one counted so far."""
        sorted_offsets = sorted(offsets)
        if not sorted_offsets:
            return
        with self._lock:
            seen = self._seen.setdefault(queue, _Seen())
            new = [offset for offset in sorted_offsets if offset > seen.last]
            if not new:
                return
            seen.messages += len(new)
            seen.last = new[-1]
            if seen.messages < seen.warn_at:
                return
            seen.warn_at = 2 * seen.messages
            messages, last = seen.messages, seen.last
        logger.warning(
            "%d messages of queue %s, the last one at offset %d, have a tag, key or property that is not UTF-8. Each malformed byte "
            "sequence is shown as U+FFFD, as Java shows it. Correct the producer",
            messages,
            queue,
            last,
        )

    def repaired(self, batch: pa.RecordBatch, queue: MessageQueue, first: int) -> pa.RecordBatch:
        """Return the rows with repaired text, and count those that had malformed text. ``first``: offset of the first row."""
        batch, rows = repaired_rows(batch)
        self.note(queue, (first + rows).tolist())
        return batch
