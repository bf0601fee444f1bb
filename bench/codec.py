"""Measures how fast RocketMQ's messages are decoded and encoded, in bulk and one at a time: ``python -m bench.codec [rounds]``.

A message has 328 bytes, with a body of 100 bytes and 6 properties; a response has 32 messages. The variants run in turn. The
figures are medians of wall time and of CPU time (which other programs disturb less). Nothing is asserted.
"""

from __future__ import annotations

import statistics
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pyarrow as pa

from bench.rocketmq_data import mixed_messages
from orderedmq.rocketmq.codec.decode import decode
from orderedmq.rocketmq.codec.encode import encode
from orderedmq.rocketmq.codec.row_decoder import Wanted, decode_exactly
from orderedmq.rocketmq.codec.stored_message import bad_property
from orderedmq.rocketmq.messages.sender import UniqueKeys
from orderedmq.schema import DEFAULT_COLUMNS
from tests.stored_messages import QUEUE, Stored, text, usual

RESPONSE = 32
GROUPS = (1024, 4096, 16384)
NOW = 1_700_000_000_000
Ways = dict[str, tuple[int, Callable[[], object]]]


def properties_of(pairs: dict[str, str]) -> bytes:
    assert not any(bad_property(name, value) for name, value in pairs.items())
    return "".join(f"{name}\x01{value}\x02" for name, value in pairs.items()).encode()


def responses(messages: list[Stored]) -> list[bytes]:
    return [b"".join(one.pack() for one in messages[at : at + RESPONSE]) for at in range(0, len(messages), RESPONSE)]


def decoding() -> Ways:
    """Return the variants of decoding, by name: how many messages are decoded, and the function to run."""
    ways: Ways = {}
    everything = Wanted(QUEUE, DEFAULT_COLUMNS, 0, 2**63 - 1, frozenset(), False)
    for rows in GROUPS:
        given = responses([usual(number) for number in range(rows)])
        ways[f"decode, {rows} messages"] = rows, partial(decode, given, DEFAULT_COLUMNS, QUEUE)
    ways["decode, with a checksum each"] = rows, lambda: decode(given, DEFAULT_COLUMNS, QUEUE, verify_crc=True)
    for size, count in ((1_000, 4096), (10_000, 512)):
        large = responses([replace(usual(number), body=bytes(size)) for number in range(count)])
        ways[f"decode, bodies of {size} bytes"] = count, partial(decode, large, DEFAULT_COLUMNS, QUEUE)
        ways[f"decode, bodies of {size} bytes, checksums"] = (
            count,
            partial(decode, large, DEFAULT_COLUMNS, QUEUE, verify_crc=True),
        )
    ways["decode, with properties"] = rows, lambda: decode(given, (*DEFAULT_COLUMNS, "properties"), QUEUE)
    ways["decode, body and offset"] = rows, lambda: decode(given, ("body", "queue_offset"), QUEUE)
    ways["decode, by tag"] = rows, lambda: decode(given, DEFAULT_COLUMNS, QUEUE, tags=frozenset(["created"]))
    two = responses(
        [
            Stored(offset=number, body=bytes(100), properties=usual(number).properties[: None if number % 2 else -10])
            for number in range(rows)
        ]
    )
    ways["decode, two producers"] = rows, lambda: decode(two, DEFAULT_COLUMNS, QUEUE)
    mixed = responses(
        [
            Stored(
                offset=number,
                body=row["body"],
                properties=text(
                    *row["properties"],
                    *((name, row[column]) for name, column in (("KEYS", "keys"), ("TAGS", "tags")) if row[column]),
                    ("UNIQ_KEY", f"0A010203F4D2ABCDEF010000{number:08X}"),
                    ("__SHARDINGKEY", row["sharding_key"]),
                    last=False,
                ),
            )
            for number, row in enumerate(mixed_messages(rows).to_pylist())
        ]
    )
    ways["decode, mixed messages"] = rows, lambda: decode(mixed, DEFAULT_COLUMNS, QUEUE)
    single = given[: 4096 // RESPONSE]
    ways["decode, a response at a time"] = 4096, lambda: [decode([one], DEFAULT_COLUMNS, QUEUE) for one in single]
    ways["decode, one at a time"] = 4096, lambda: list(decode_exactly(single, everything))
    return ways


def encoding(rows: int) -> Ways:
    numbers = range(rows)
    batch = pa.record_batch(
        {
            "body": pa.array([b"%0100d" % number for number in numbers], pa.binary()),
            "tags": pa.array(["created"] * rows),
            "keys": pa.array([f"order-{number:010d}" for number in numbers]),
            "sharding_key": pa.array([f"{number % 1000:06d}" for number in numbers]),
        }
    )
    sink = {"SINK": "0123456789abcdef", "BATCH": "17", "PARTITION": "3", "SEQUENCE": pa.array(list(map(str, numbers)))}
    keys = UniqueKeys(b"\x0a\1\2\3", 1, 2)
    plain = batch.to_pylist()

    def one_at_a_time() -> bytes:
        parts = []
        for row, key in zip(plain, keys.take(rows, NOW).to_pylist()):
            text = properties_of(
                {"TAGS": row["tags"], "KEYS": row["keys"], "__SHARDINGKEY": row["sharding_key"], "UNIQ_KEY": key}
            )
            body = row["body"]
            parts.append(struct.pack(">iiiii", 22 + len(body) + len(text), 0, 0, 0, len(body)) + body)
            parts.append(struct.pack(">h", len(text)) + text)
        return b"".join(parts)

    return {
        f"encode, {rows} rows": (rows, lambda: list(encode(batch, keys.take(rows, NOW), "q"))),
        "encode, with the sink's 4 properties": (rows, lambda: list(encode(batch, keys.take(rows, NOW), "q", extra=sink))),
        "encode, one at a time": (rows, one_at_a_time),
    }


def main(rounds: int) -> None:
    ways = decoding() | encoding(GROUPS[-1])
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, (_, run) in ways.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            if turn:
                seen[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    print(f"{'':40}{'M/s':>8}{'M/s of CPU':>12}{'ratio':>8}   (medians of {rounds}; ratio of CPU time to one at a time)")
    speed = {name: tuple(ways[name][0] / statistics.median(part) / 1e6 for part in zip(*times)) for name, times in seen.items()}
    for name, (wall, cpu) in speed.items():
        ratio = cpu / speed[name.split(",")[0] + ", one at a time"][1]
        print(f"{name:40}{wall:8.2f}{cpu:12.2f}{ratio:8.1f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
