"""Messages with text that is not UTF-8, as other programs may store it."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import pyarrow as pa

from orderedmq.broker import Broker
from orderedmq.model import MessageQueue

#: Maps bytes to the text that Java's ``new String(bytes, UTF_8)`` decodes them to (JDK 21).
JAVAS = {
    b"": "",
    b"order-1": "order-1",
    "größe €😀".encode(): "größe €😀",
    "\ufffd".encode(): "\ufffd",
    b"\xff": "\ufffd",
    b"order-\xff": "order-\ufffd",
    b"\xe4hnlich": "\ufffdhnlich",
    b"\x80\xbf": "\ufffd\ufffd",
    b"\xc0\x80": "\ufffd\ufffd",
    b"\xc3": "\ufffd",
    b"\xc3(": "\ufffd(",
    b"\xe2\x82": "\ufffd",
    b"\xe2\x82(": "\ufffd(",
    b"\xe0\x80\x80": "\ufffd\ufffd\ufffd",
    b"\xf0\x9f\x98": "\ufffd",
    b"\xf0\x9f\x98x": "\ufffdx",
    b"\xf0\x80\x80\x80": "\ufffd\ufffd\ufffd\ufffd",
    b"\xf4\x90\x80\x80": "\ufffd\ufffd\ufffd\ufffd",
    b"\xf8\x88\x80\x80\x80": "\ufffd\ufffd\ufffd\ufffd\ufffd",
    b"\xed\xa0\x80": "\ufffd",
    b"\xed\xa0": "\ufffd",
    b"\xed\xa0\xbd\xed\xb8\x80": "\ufffd\ufffd",
    b"\xed\xa0x": "\ufffdx",
}


def strings(values: Sequence[bytes | None]) -> pa.Array:
    """Arbitrary bytes as a string column, as Spark's ``cast(body as string)`` returns it."""
    return pa.array(values, pa.binary()).view(pa.string())


def pairs(rows: Sequence[Sequence[tuple[bytes, bytes]]]) -> pa.Array:
    """A properties column with arbitrary bytes."""
    bounds = [0]
    for row in rows:
        bounds.append(bounds[-1] + len(row))
    every = [pair for row in rows for pair in row]
    offsets = pa.array(bounds, pa.int32())
    return pa.MapArray.from_arrays(offsets, strings([name for name, _ in every]), strings([value for _, value in every]))


def append_raw(broker: Broker, queue: MessageQueue, **columns: pa.Array) -> None:
    """Store messages unchanged, without the checks and corrections that this package makes when it writes."""
    with (
        patch("orderedmq.embedded.log.normalise", lambda rows, where: rows),
        patch("orderedmq.embedded.staging.check_topic", lambda name, writing: None),
    ):
        broker.log.append({queue: pa.record_batch(columns)})
