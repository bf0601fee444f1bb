"""Makes message ids: those of brokers, which contain the message's position, and those of producers (UNIQ_KEY).

Both consist of upper-case hex digits, as RocketMQ's tools expect. Pure: time, address and process number are arguments.
"""

from __future__ import annotations

import binascii
import struct
from datetime import datetime
from typing import Final

import numpy as np
import pyarrow as pa

_OFFSET: Final = struct.Struct(">q")
_COUNTER_BITS: Final = 16
_NUMBER_DIGITS: Final = 12
#: Up to this many keys are made one by one, because numpy takes as long for one key as for thousands.
_FEW: Final = 16


def offset_message_id(store_host: bytes, physical_offset: int) -> str:
    """Return the broker's id of a message (``MessageDecoder.createMessageId``): 32 digits, or 56 if the host has an IPv6 address.

    ``store_host`` is the field of the record: 4 or 16 bytes of address and 4 bytes of port.
    """
    return (store_host + _OFFSET.pack(physical_offset)).hex().upper()


def month_start(now_ms: int) -> int:
    """Return the start of the month in local time, in ms since 1970. ``MessageClientIDSetter`` and RocketMQ's tools count from it."""
    day = datetime.fromtimestamp(now_ms / 1000)
    return int(datetime(day.year, day.month, 1).timestamp() * 1000)


class UniqueKeys:
    """Makes UNIQ_KEYs that are unique within an instance, and between instances with different addresses, processes or salts.

    As in ``MessageClientIDSetter``, a key has the address, process number, salt, milliseconds since the month began, and a 16-bit
    counter. Time and counter form one number that only grows within a month. Therefore neither a clock that is set back nor more than
    65,536 keys in one millisecond cause duplicates. Not thread-safe.
    """

    def __init__(self, host: bytes, pid: int, salt: int) -> None:
        """``host`` has 4 or 16 bytes. ``salt`` has 32 random bits, different for each instance (in Java: the class loader's hash)."""
        if len(host) not in (4, 16):
            raise ValueError(f"an address has 4 or 16 bytes, not {len(host)}")
        prefix = host + struct.pack(">HI", pid & 0xFFFF, salt & 0xFFFFFFFF)
        self._text = prefix.hex().upper()
        self._prefix = np.frombuffer(self._text.encode(), dtype=np.uint8)
        self._month = 0
        self._next = 0

    def take(self, count: int, now_ms: int) -> pa.Array:
        """Return ``count`` new keys, as strings of 32 or 56 digits."""
        month = month_start(now_ms)
        if month > self._month:
            self._month, self._next = month, 0
        first = max(self._next, (now_ms - self._month) << _COUNTER_BITS)
        self._next = first + count
        if count <= _FEW:
            return pa.array([f"{self._text}{number:0{_NUMBER_DIGITS}X}" for number in range(first, first + count)], pa.string())
        digits = np.empty((count, len(self._prefix) + _NUMBER_DIGITS), dtype=np.uint8)
        digits[:, : len(self._prefix)] = self._prefix
        numbers = np.arange(first, first + count, dtype=">u8").view(np.uint8).reshape(count, 8)
        digits[:, len(self._prefix) :] = hex_digits(numbers[:, 2:])
        return fixed_strings(digits)


def hex_digits(data: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Return rows of bytes as rows of upper-case hex digits, two for each byte."""
    digits = np.frombuffer(binascii.hexlify(data.tobytes()).upper(), dtype=np.uint8)
    return digits.reshape(len(data), 2 * data.shape[1])


def fixed_strings(characters: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> pa.Array:
    """Return rows of ASCII characters as an array of strings."""
    count, width = characters.shape
    ends = np.arange(0, width * (count + 1), width, dtype=np.int32)
    data = pa.py_buffer(np.ascontiguousarray(characters))
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(ends), data])
