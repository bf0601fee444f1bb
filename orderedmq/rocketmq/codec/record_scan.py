"""Finds record boundaries and fixed fields of many pull responses in one vectorised scan. Pure.

All responses are scanned in step. None means "irregular": the exact parser then reads the responses, or says what is wrong.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from orderedmq.rocketmq.codec.gather import Bytes, Int64s, all_equal_to, at_every_byte
from orderedmq.rocketmq.codec.stored_message import (
    BORN_HOST_V6,
    IPV4_HOST,
    IPV6_HOST,
    MAGIC_V1,
    MIN_SIZE,
    STORE_HOST_V6,
    SYS_FLAG_AT,
)

Records: TypeAlias = npt.NDArray[np.void]

#: Below this number of responses, scanning one at a time is faster than scanning with arrays.
_FEW: Final = 12
_INT: Final = struct.Struct(">i")
_TAIL: Final = 3


class ScannedRecords(NamedTuple):
    """Records of one layout: their fixed fields as a structured array (`head_type`), and the bounds of their variable fields.

    Bounds are positions in the buffer. ``topic`` is the topic of all records.
    """

    heads: Records
    body_begins: Int64s
    body_ends: Int64s
    topic: bytes
    properties_begins: Int64s
    properties_ends: Int64s

    def take(self, rows: npt.NDArray[np.bool_]) -> ScannedRecords:
        return ScannedRecords(
            self.heads[rows],
            self.body_begins[rows],
            self.body_ends[rows],
            self.topic,
            self.properties_begins[rows],
            self.properties_ends[rows],
        )


@lru_cache
def head_type(born_v6: bool, store_v6: bool) -> np.dtype[np.void]:
    """Return the type of a record's fields before its body."""
    return np.dtype(
        [
            ("total_size", ">i4"),
            ("magic", ">i4"),
            ("body_crc", ">i4"),
            ("queue_id", ">i4"),
            ("flag", ">i4"),
            ("queue_offset", ">i8"),
            ("physical_offset", ">i8"),
            ("sys_flag", ">i4"),
            ("born_timestamp", ">i8"),
            ("born_host", f"V{IPV6_HOST if born_v6 else IPV4_HOST}"),
            ("store_timestamp", ">i8"),
            ("store_host", f"V{IPV6_HOST if store_v6 else IPV4_HOST}"),
            ("reconsume_times", ">i4"),
            ("prepared_transaction_offset", ">i8"),
            ("body_length", ">i4"),
        ]
    )


def record_starts(data: Bytes, begins: Int64s, ends: Int64s) -> Int64s | None:
    """Return where each record begins, in order. None if a size does not add up.

    Response i is ``data[begins[i]:ends[i]]``, not empty.
    """
    sizes = at_every_byte(data, ">i4")
    steps = []
    at, stop = begins, ends
    # Wrong sizes may lead astray, so the number of steps is bounded.
    for _ in range(int((ends - begins).max()) // MIN_SIZE):
        if len(at) < _FEW:
            break
        steps.append(at)
        try:
            after = at + sizes[at]
        except IndexError:
            return None
        more = after < stop
        if more.all():
            at = after
            continue
        if (after > stop).any():
            return None
        at, stop = after[more], stop[more]
    else:
        if len(at):
            return None
    alone: list[int] = []
    for begin, end in zip(at.tolist(), stop.tolist()):
        while begin < end:
            if not 0 <= begin <= end - MIN_SIZE:
                return None
            (length,) = _INT.unpack_from(data.data, begin)
            if not MIN_SIZE <= length <= end - begin:
                return None
            alone.append(begin)
            begin += length
    found = np.concatenate([*steps, np.array(alone, dtype=np.int64)])
    # From the right beginning to the right end in steps of a right size: all of them lie inside their responses.
    if found.min() < 0 or sizes[found].min() < MIN_SIZE:
        return None
    return np.sort(found)


def scan_records(data: Bytes, at: Int64s) -> ScannedRecords | None:
    """Return the records that begin at ``at`` (see `record_starts`, not empty); None if one is irregular.

    Records are regular if they are V1, of one topic, and have the same kinds of hosts.
    """
    flags = at_every_byte(data[SYS_FLAG_AT:], ">i4")[at] & (BORN_HOST_V6 | STORE_HOST_V6)
    kind = head_type(bool(flags[0] & BORN_HOST_V6), bool(flags[0] & STORE_HOST_V6))
    sizes = at_every_byte(data, ">i4")[at].astype(np.int64)
    if (flags != flags[0]).any() or sizes.min() < kind.itemsize + _TAIL:
        return None
    # Copying the whole head is as fast as copying one field.
    heads = at_every_byte(data, f"V{kind.itemsize}")[at].view(kind)
    lengths = heads["body_length"].astype(np.int64)
    if (heads["magic"] != MAGIC_V1).any() or lengths.min() < 0 or (lengths > sizes - kind.itemsize - _TAIL).any():
        return None
    ends = at + sizes
    body_begins = at + kind.itemsize
    body_ends = body_begins + lengths
    topic_lengths = data[body_ends]
    width = int(topic_lengths[0])
    if width > 127 or (topic_lengths != width).any():
        return None
    topic_ends = body_ends + (1 + width)
    if (topic_ends > ends - 2).any():
        return None
    topic = data[body_ends[0] + 1 : topic_ends[0]].tobytes()
    if width and not all_equal_to(data, body_ends + 1, topic):
        return None
    if (at_every_byte(data, ">i2")[topic_ends] != ends - topic_ends - 2).any():
        return None
    return ScannedRecords(heads, body_begins, body_ends, topic, topic_ends + 2, ends)
