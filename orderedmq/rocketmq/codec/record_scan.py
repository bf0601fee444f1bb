"""Finds record boundaries and fixed fields of many pull responses in one vectorised scan. Pure.

Each step finds the next record in every response. Functions return None if a response is irregular. In that case the exact parser
must read the responses, or report what is wrong.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from orderedmq.model import MessageQueue
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

#: With fewer responses than this, scanning one at a time is faster than scanning with arrays.
_FEW: Final = 12
#: If there are fewer responses than `_MANY`, large ones are divided into parts of about `_DIVIDED` bytes.
_MANY: Final = 64
_DIVIDED: Final = 8192
_INT: Final = struct.Struct(">i")
_MAGIC: Final = MAGIC_V1.to_bytes(4, "big", signed=True)
_MAGIC_AT: Final = 4
_HOSTS: Final = BORN_HOST_V6 | STORE_HOST_V6
_TAIL: Final = 3


class ScannedRecords(NamedTuple):
    """Records of one layout: their fixed fields as an array of `head_type`, and the bounds of their variable fields in the buffer."""

    heads: Records
    body_begins: Int64s
    body_ends: Int64s
    properties_begins: Int64s
    properties_ends: Int64s

    def take(self, rows: npt.NDArray[np.bool_]) -> ScannedRecords:
        return ScannedRecords(
            self.heads[rows],
            self.body_begins[rows],
            self.body_ends[rows],
            self.properties_begins[rows],
            self.properties_ends[rows],
        )


@lru_cache
def head_type(born_v6: bool, store_v6: bool) -> np.dtype[np.void]:
    """Return the type of the fields that a record has before its body."""
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
    """Return where each record begins, in the order of the responses. None if a record's size is wrong.

    Response i is ``data[begins[i]:ends[i]]`` and must not be empty. Also None if the responses are not in the order of ``data`` and
    have different numbers of records.
    """
    sizes = at_every_byte(data, ">i4")
    starts = _equally_many(data, sizes, begins, ends)
    if starts is not None or (begins[1:] < ends[:-1]).any():
        return starts
    divided = _divided(data, begins, ends)
    if divided is not None:
        starts = _in_step(data, sizes, *divided)
    if starts is None:
        starts = _in_step(data, sizes, begins, ends)
    # The steps lead from the beginning of each response to its end, and each has at least the minimum size, so all records are inside.
    return None if starts is None or starts.min() < 0 or sizes[starts].min() < MIN_SIZE else np.sort(starts)


def _equally_many(data: Bytes, sizes: npt.NDArray[Any], begins: Int64s, ends: Int64s) -> Int64s | None:
    """Return where each record begins if all responses have as many records as the first one (the usual case); otherwise None.

    Also None if the first response has more records than there are responses, because dividing the responses is faster in that case.
    """
    count, at, end = 0, int(begins[0]), int(ends[0])
    while at <= end - MIN_SIZE:
        if count == len(begins):
            return None
        (length,) = _INT.unpack_from(data.data, at)
        if length < MIN_SIZE:
            return None
        at += length
        count += 1
    if at != end or len(begins) < _FEW:
        return None
    table = np.empty((count + 1, len(begins)), dtype=np.int64)
    table[0] = begins
    try:
        for step in range(count):
            np.add(table[step], sizes[table[step]], out=table[step + 1])
    except IndexError:
        return None
    if (table[count] != ends).any() or (table[1:] - table[:-1]).min() < MIN_SIZE:
        return None
    return table[:count].T.ravel()


def _divided(data: Bytes, begins: Int64s, ends: Int64s) -> tuple[Int64s, Int64s] | None:
    """Divide large responses at places where records may begin, which the scan then confirms. None if dividing is not worthwhile."""
    parts = (ends - begins) // _DIVIDED
    if len(begins) >= _MANY or parts.max() < 2:
        return None
    cuts: list[int] = []
    for begin, number in zip(begins.tolist(), parts.tolist()):
        cuts.append(begin)
        for at in range(begin + _DIVIDED, begin + number * _DIVIDED, _DIVIDED):
            place = data[at : at + _DIVIDED // 2].tobytes().find(_MAGIC)
            if place >= _MAGIC_AT and at + place - _MAGIC_AT > cuts[-1]:
                cuts.append(at + place - _MAGIC_AT)
    divided = np.array(cuts, dtype=np.int64)
    stops = np.append(divided[1:], ends[-1])
    # The last part of each response ends where the response ends.
    stops[np.searchsorted(divided, begins[1:]) - 1] = ends[:-1]
    return divided, stops


def _in_step(data: Bytes, sizes: npt.NDArray[Any], begins: Int64s, ends: Int64s) -> Int64s | None:
    """Return where records begin between each of ``begins`` and its end, in any order. None if a record's size is wrong."""
    steps = []
    at, stop = begins, ends
    # Limit the number of steps, because wrong sizes could make the scan endless.
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
    return np.concatenate([*steps, np.array(alone, dtype=np.int64)])


def scan_records(data: Bytes, at: Int64s, queue: MessageQueue) -> ScannedRecords | None:
    """Return the records that begin at ``at``, the non-empty result of `record_starts`. None if a record is irregular.

    Records are regular if they are V1, belong to ``queue``, and have the same kinds of hosts (IPv4 or IPv6).
    """
    (flags,) = _INT.unpack_from(data.data, int(at[0]) + SYS_FLAG_AT)
    kind = head_type(bool(flags & BORN_HOST_V6), bool(flags & STORE_HOST_V6))
    if int(at.max()) + kind.itemsize > len(data):
        return None
    # Copying the whole head is as fast as copying one field.
    heads = at_every_byte(data, f"V{kind.itemsize}")[at].view(kind)
    sizes = heads["total_size"].astype(np.int64)
    if sizes.min() < kind.itemsize + _TAIL:
        return None
    if (heads["sys_flag"] & _HOSTS != flags & _HOSTS).any() or (heads["magic"] != MAGIC_V1).any():
        return None
    if (heads["queue_id"] != queue.queue_id).any():
        return None
    lengths = heads["body_length"].astype(np.int64)
    if lengths.min() < 0 or (lengths > sizes - (kind.itemsize + _TAIL)).any():
        return None
    ends = at + sizes
    body_begins = at + kind.itemsize
    body_ends = body_begins + lengths
    topic = queue.topic.encode()
    if len(topic) > 127:
        return None
    topic = bytes([len(topic)]) + topic
    topic_ends = body_ends + len(topic)
    if (topic_ends > ends - 2).any():
        return None
    if not all_equal_to(data, body_ends, topic):
        return None
    if (at_every_byte(data, ">i2")[topic_ends] != ends - topic_ends - 2).any():
        return None
    return ScannedRecords(heads, body_begins, body_ends, topic_ends + 2, ends)
