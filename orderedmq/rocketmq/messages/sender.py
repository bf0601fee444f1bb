"""Sends rows of one queue in batches, in order, each message once (`orderedmq.rocketmq.append`), and makes the UNIQ_KEYs of messages.

After a lost answer, RocketMQ's producers send again without searching for the messages, which can make duplicates. They also have
several requests in flight, so a failure can change the order.
"""

from __future__ import annotations

import os
import secrets
import struct
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.conditions import UnavailableCondition
from orderedmq.errors import OrderedMQError, RocketMQUnavailableError
from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.rocketmq.append.broker_port import BrokerPort, Timing, packing_for
from orderedmq.rocketmq.append.once import Appender
from orderedmq.rocketmq.codec.encode import SendBody, encode
from orderedmq.rocketmq.codec.gather import fixed_strings, hex_digits
from orderedmq.rocketmq.messages.puller import Puller
from orderedmq.rocketmq.net.client import Client
from orderedmq.rows.message_rows import normalise

_LOOK_MESSAGES: Final = 16384
_LOOK_BYTES: Final = 64 * 1024 * 1024
_COUNTER_BITS: Final = 16
_NUMBER_DIGITS: Final = 12
#: Up to this many keys are made one by one, because numpy takes as long for one key as for thousands.
_FEW: Final = 16

E = TypeVar("E", bound=OrderedMQError)


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


class FreshKeys:
    """Makes UNIQ_KEYs that no other producer makes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Random bytes instead of an IP address, because a host has several addresses and containers share them.
        self._keys = UniqueKeys(secrets.token_bytes(4), os.getpid(), secrets.randbits(32))

    def take(self, count: int) -> pa.Array:
        """Return ``count`` new keys, as strings."""
        with self._lock:
            return self._keys.take(count, time.time_ns() // 1_000_000)


class Sender:
    """Sends rows to any queue, with one request in flight per queue. Thread-safe."""

    def __init__(self, client: Client, puller: Puller) -> None:
        self._client = client
        self._puller = puller
        self.timing = Timing()
        self._locks: defaultdict[MessageQueue, threading.Lock] = defaultdict(threading.Lock)
        self.keys = FreshKeys()

    def encoded(self, queue: MessageQueue, rows: pa.RecordBatch) -> tuple[list[SendBody], pa.Array]:
        """Check rows, and return the requests for them and their new UNIQ_KEYs. Raises MessageError and the errors of `packing_for`."""
        where = f"queue {queue}"
        checked = normalise(rows, where)
        keys = self.keys.take(checked.num_rows)
        packing = packing_for(self._client, queue, checked, where, self.timing.patience)
        return list(encode(checked, keys, where, packing=packing)), keys

    def append_encoded(
        self,
        queue: MessageQueue,
        bodies: Sequence[SendBody],
        keys: pa.Array,
        stored: Counter[MessageQueue] | None = None,
        require_lock: Callable[[], None] = lambda: None,
    ) -> OffsetRange:
        """Append the requests that `encode` yielded. ``keys`` are the rows' UNIQ_KEYs, which no other message has.

        ``stored`` counts the rows that the broker has acknowledged. ``require_lock``: see `BrokerPort`. Raises RocketMQError or
        RocketMQUnavailableError. The error has ``outcome_unknown`` if more rows may be stored.
        """
        self._client.require_own()
        with self._locks[queue]:
            # Create the port under the lock, because it takes over requests that the last append has left unsettled.
            port = BrokerPort(self._client, queue, self.timing, require_lock=require_lock)
            rows = _NewRows(bodies, keys, port, self._puller, stored if stored is not None else Counter())
            appender = Appender(port, rows)
            try:
                appender.run()
            except RocketMQUnavailableError as error:
                if not appender.in_doubt or error.outcome_unknown:
                    raise
                # A request had no answer, and the broker was away afterwards: the error must say that the outcome is unknown.
                raise RocketMQUnavailableError(UnavailableCondition.CONNECTION_LOST, error.message) from error
        if bodies:
            port.await_readable(rows.end)
        return OffsetRange(rows.begin, rows.end)


class _NewRows:
    """Rows with new UNIQ_KEYs as `Outgoing` messages. They are stored after the end that the queue had at the first call of `look`."""

    def __init__(
        self, bodies: Sequence[SendBody], keys: pa.Array, port: BrokerPort, puller: Puller, stored: Counter[MessageQueue]
    ) -> None:
        self._waiting = list(bodies)
        self._keys = keys
        self._port = port
        self._puller = puller
        self._stored = stored
        #: The offset of the first stored row, and the offset after the last one. Both are the queue's end before a row is stored.
        self.begin = self.end = -1

    def look(self) -> bool:
        end = self._port.end()
        if self.end < 0:
            self.begin = self.end = end
            return False
        # Only one request is in flight at a time, so of the waiting requests only the first may be stored.
        body = self._waiting[0]
        offset = self._find(self._keys[body.first].as_py(), end)
        if offset is not None:
            self.record_sent(body, offset)
        return offset is not None

    def missing(self) -> Iterator[SendBody]:
        yield from list(self._waiting)

    def record_sent(self, body: SendBody, offset: int) -> None:
        if not body.first:
            self.begin = offset
        self.end = offset + body.rows
        self._stored[self._port.queue] += body.rows
        del self._waiting[0]

    def adapt(self, body: SendBody, error: OrderedMQError) -> bool:  # noqa: ARG002
        return False

    def _find(self, key: str, end: int) -> int | None:
        """Return the offset of the message with a key; None if no message from the last known end on has it."""
        at = self.end
        while at < end:
            ids = self._puller.pull(self._port.queue, at, min(end - at, _LOOK_MESSAGES), _LOOK_BYTES, ("message_id",)).column(0)
            index = pc.index(ids, key).as_py()
            if index >= 0:
                return at + int(index)
            if not len(ids):
                break
            at += len(ids)
        return None


def sent_in_part(error: E, stored: Mapping[MessageQueue, int], wanted: Mapping[MessageQueue, int]) -> E:
    """Return the error that ended an append, with the number of rows stored in each queue added to its message.

    ``stored``: the rows that the broker has acknowledged. ``wanted``: all rows. The error is unchanged if no row is stored.
    """
    sent, total = sum(stored.values()), sum(wanted.values())
    if not sent:
        return error
    where = ", ".join(f"{stored[queue]} of {count} of queue {queue}" for queue, count in wanted.items() if stored[queue])
    unknown = isinstance(error, RocketMQUnavailableError) and error.outcome_unknown
    perhaps = ", and perhaps the next ones" if unknown else ""
    return type(error)(
        error.sub, f"{error.message}. {sent} of {total} rows are stored ({where}){perhaps}. Send only the others again"
    )
