"""Stored messages read one at a time: the same result as RocketMQ's own classes, and a ProtocolError for malformed bytes.

java_messages.json has what the classes of rocketmq-client 5.3.3 encode and decode; JavaMessages.java, next to it, wrote that file.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orderedmq.errors import ProtocolError
from orderedmq.rocketmq.codec import stored_message
from orderedmq.rocketmq.codec.row_decoder import Selection, Unreadable, decode_exactly
from orderedmq.rocketmq.codec.stored_message import (
    bad_property,
    crc32,
    offset_message_id,
    parse_all,
    parse_batch,
    parse_properties,
    parse_stored,
)
from orderedmq.rocketmq.messages.sender import UniqueKeys, month_start
from orderedmq.schema import MESSAGE_SCHEMA
from tests.stored_messages import INNER, ODD, QUEUE, V2, Stored, compress, inner, text

JAVA: dict[str, list[Any]] = json.loads((Path(__file__).parent / "java_messages.json").read_text())
ALL = tuple(MESSAGE_SCHEMA.names)


def wanted(
    *columns: str, begin: int = 0, end: int = 2**63 - 1, tags: frozenset[str] = frozenset(), verify_crc: bool = True
) -> Selection:
    return Selection(QUEUE, columns or ALL, begin, end, tags, verify_crc)


def decoded(data: bytes, asked: Selection) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for piece in decode_exactly([data], asked):
        rows.extend(piece.to_pylist())
    for row in rows:
        if row.get("properties") is not None:
            names = [name for name, _ in row["properties"]]
            assert len(set(names)) == len(names), names
            row["properties"] = dict(row["properties"])
    return rows


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row in the form of java_messages.json."""
    for name in ("born_timestamp", "store_timestamp"):
        row[name] = round(row[name].timestamp() * 1000)
    row["body"] = row["body"].hex()
    assert row.pop("broker_name") == "broker-a"
    return row


class KeyParts(NamedTuple):
    """The parts of a UNIQ_KEY: the address, process number (16 bits) and salt of its maker; ms since the month began; a counter."""

    host: bytes
    pid: int
    salt: int
    ms_of_month: int
    counter: int


def _parts(key: str) -> KeyParts:
    data = bytes.fromhex(key)
    return KeyParts(data[:-12], *struct.unpack(">HIIH", data[-12:]))


# -- golden messages


@pytest.mark.parametrize("case", JAVA["records"])
def test_records_are_read_as_java_reads_them(case: dict[str, Any]) -> None:
    data = bytes.fromhex(case["bytes"])
    first, _ = parse_stored(data, 0)
    queue = QUEUE._replace(topic=first.topic.decode(), queue_id=first.queue_id)
    assert [shown(row) for row in decoded(data, wanted()._replace(queue=queue))] == case["messages"]


def test_a_record_built_by_hand_has_its_fields_where_the_layout_says() -> None:
    data = bytes.fromhex(
        "0000006b daa320a7 3310ff43 00000001 00000002 0000000000000003 0000000000000004 00000000 0000000000000005"
        "7f000001 0000c350 0000000000000006 7f000001 00002a9f 00000007 0000000000000008"
        "00000004 626f6479 06 6f7264657273 0006 610162026301"
    )
    message, end = parse_stored(data, 0)
    assert end == len(data) == 0x6B
    assert message == (
        0x3310FF43, 1, 2, 3, 4, 0, 5, b"\x7f\0\0\1\0\0\xc3\x50", 6, b"\x7f\0\0\1\0\0\x2a\x9f", 7, 8, b"body", b"orders", b"a\1b\2c\1",
    )  # fmt: skip


@pytest.mark.parametrize(("data", "expected"), JAVA["properties"])
def test_properties_are_read_as_java_reads_them(data: str, expected: dict[str, str]) -> None:
    assert parse_properties(bytes.fromhex(data)) == expected


@pytest.mark.parametrize(("data", "expected"), JAVA["checksums"])
def test_trap_15_a_checksum_is_cut_to_31_bits(data: str, expected: int) -> None:
    assert crc32(bytes.fromhex(data)) == expected
    assert 0 <= expected < 2**31
    # Some of these checksums have the 32nd bit set.
    assert any(zlib.crc32(bytes.fromhex(body)) >= 2**31 for body, _ in JAVA["checksums"])


def test_trap_15_a_checksum_covers_the_compressed_body() -> None:
    for method in (0, 0x100, 0x200):
        good = Stored(body=bytes(500), sys_flag=1 | method)
        assert decoded(good.pack(), wanted("body")) == [{"body": bytes(500)}]
        of_the_plain_body = replace(good, crc=crc32(bytes(500)))
        with pytest.raises(Unreadable, match="checksum") as caught:
            decoded(of_the_plain_body.pack(), wanted("body"))
        assert caught.value.offset == of_the_plain_body.offset
        assert decoded(of_the_plain_body.pack(), wanted("body", verify_crc=False)) == [{"body": bytes(500)}]


def test_an_inner_batch_is_read_as_its_messages() -> None:
    batch = inner((b"one", text(("TAGS", "a"))), (b"two", text(("TAGS", "b"))), (b"three", b""))
    data = Stored(offset=7, body=batch, sys_flag=INNER | 0x201).pack()
    asked = wanted("queue_offset", "body", "tags")
    assert [tuple(row.values()) for row in decoded(data, asked)] == [(7, b"one", "a"), (8, b"two", "b"), (9, b"three", None)]
    assert [row["queue_offset"] for row in decoded(data, wanted("queue_offset", begin=8, end=9))] == [8]
    assert [row["queue_offset"] for row in decoded(data, wanted("queue_offset", tags=frozenset("b")))] == [8]
    assert decoded(data, wanted("queue_offset", end=7)) == []
    # With only one of the two flags, the body is not an inner batch.
    assert [row["body"] for row in decoded(Stored(body=batch, sys_flag=0x80).pack(), wanted("body"))] == [batch]


def test_a_batch_within_a_batch_is_a_body() -> None:
    deepest = inner((b"x", b""))
    for _ in range(50):
        deepest = inner((deepest, b""))
    (row,) = decoded(Stored(body=deepest, sys_flag=INNER).pack(), wanted("body"))
    assert row["body"] == deepest[20:-2]


# -- refusals


def refused(data: bytes, asked: Selection | None = None) -> str:
    with pytest.raises(ProtocolError) as caught:
        decoded(data, asked or wanted())
    assert caught.value.condition == "ORDEREDMQ_ROCKETMQ.PROTOCOL"
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("case", JAVA["records"])
def test_a_response_cut_off_anywhere_is_refused(case: dict[str, Any]) -> None:
    data = bytes.fromhex(case["bytes"])
    whole = {0}
    for message in case["messages"]:
        whole.add(max(whole) + int.from_bytes(data[max(whole) : max(whole) + 4], "big"))
        if max(whole) == len(data):
            break
        assert message is not None
    for cut in range(len(data)):
        if cut in whole:
            decoded(data[:cut], wanted("queue_offset"))
        else:
            refused(data[:cut], wanted("queue_offset"))


@pytest.mark.parametrize(
    ("at", "number", "why"),
    [
        (0, 0, "announces 0 bytes"),
        (0, -1, "announces -1 bytes"),
        (0, 90, "announces 90 bytes"),
        (0, 2**31 - 1, "announces 2147483647 bytes"),
        (4, -875286124, "magic number 0xcbd43194"),
        (4, 0, "magic number 0x00000000"),
        (36, 0x10, "that does not fit"),
        (36, 0x20, "that does not fit"),
        (84, -1, "body of -1 bytes"),
        (84, 5, "that does not fit"),
        (84, 2**31 - 1, "body of 2147483647 bytes"),
    ],
)
def test_a_number_that_does_not_add_up_is_refused(at: int, number: int, why: str) -> None:
    data = bytearray(Stored(body=b"", topic=b"o").pack())
    data[at : at + 4] = number.to_bytes(4, "big", signed=number < 0)
    assert why in refused(bytes(data))


def test_lengths_of_topic_and_properties_that_do_not_add_up_are_refused() -> None:
    data = Stored(body=b"", topic=b"orders", properties=b"a\x01b").pack()
    for at, numbers in ((88, (128, 255, 11, 5, 7)), (95, (128, 255, 127)), (96, (0, 2, 4, 255))):
        for number in numbers:
            refused(data[:at] + bytes([number]) + data[at + 1 :])
    second = Stored(body=b"", topic=b"orders", magic=V2).pack()
    for pair in (b"\xff\xff", b"\x80\0", b"\x7f\xff", b"\0\x09", b"\0\5"):
        refused(second[:88] + pair + second[90:])


@given(ODD, st.data())
def test_changed_bytes_are_refused_or_read(message: Stored, data: st.DataObject) -> None:
    packed = bytearray(message.pack())
    for _ in range(data.draw(st.integers(1, 3))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        rows = decoded(bytes(packed), wanted(verify_crc=False))
    except (ProtocolError, Unreadable):
        return
    assert len(rows) <= 4


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_read(data: bytes) -> None:
    for parse in (parse_all, parse_batch):
        try:
            list(parse(data))
        except ProtocolError:
            pass


# -- compression


@pytest.mark.parametrize("method", [1, 2, 3])
def test_a_compressed_body_cut_off_or_changed_is_refused_or_another_body(method: int) -> None:
    body = b"0123456789" * 300
    packed = compress(body, method)
    flag = 1 | method << 8
    assert stored_message.decompress(packed, flag) == body
    assert stored_message.decompress(b"", flag) == b""
    for cut in range(1, len(packed)):
        with pytest.raises(stored_message.BodyError):
            stored_message.decompress(packed[:cut], flag)
    for at in range(len(packed)):
        changed = packed[:at] + bytes([packed[at] ^ 0x55]) + packed[at + 1 :]
        try:
            stored_message.decompress(changed, flag)
        except stored_message.BodyError:
            pass


def test_rows_end_before_a_message_whose_body_cannot_be_read() -> None:
    broken = Stored(offset=5, packed=b"x", sys_flag=0x501).pack()
    given = Stored(offset=3, properties=text(("TAGS", "a"))).pack() + Stored(offset=4).pack() + broken + Stored(offset=6).pack()
    pieces = decode_exactly([given], wanted("queue_offset", "body"))
    assert next(pieces).column(0).to_pylist() == [3, 4]
    with pytest.raises(Unreadable, match="unknown method 5") as caught:
        next(pieces)
    assert caught.value.offset == 5
    # A body is decompressed only if the column is requested, and only for messages with a requested offset and tag.
    for asked in (wanted("queue_offset"), wanted(end=5), wanted(begin=6), wanted(tags=frozenset("a"))):
        assert decoded(given, asked)
    unreadable_batch = Stored(offset=5, packed=b"x", sys_flag=INNER | 0x501).pack()
    for begin in (2, 5, 7):
        with pytest.raises(Unreadable) as caught:
            decoded(unreadable_batch, wanted("queue_offset", begin=begin))
        assert caught.value.offset == max(5, begin)


def test_the_largest_allowed_body_is_decompressed() -> None:
    body = bytes(stored_message.MAX_PLAIN_BYTES)
    assert stored_message.decompress(zlib.compress(body), 1) == body
    assert stored_message.decompress(compress(body, 2), 0x201) == body


# -- properties and ids


@given(st.dictionaries(st.text(min_size=1), st.text(min_size=1)))
def test_properties_that_are_taken_come_back(properties: dict[str, str]) -> None:
    if any(bad_property(name, value) for name, value in properties.items()):
        assert any("\x01" in part or "\x02" in part for pair in properties.items() for part in pair)
        return
    try:
        packed = text(*properties.items())
    except UnicodeEncodeError:
        return
    assert parse_properties(packed) == properties
    # The last separator is optional.
    assert parse_properties(packed[:-1]) == properties


def test_an_offset_message_id_names_a_place() -> None:
    for host in (b"\x7f\0\0\1", bytes(range(16))):
        message_id = offset_message_id(host + (10911).to_bytes(4, "big"), 2**40 + 5)
        assert len(message_id) == (32 if len(host) == 4 else 56)
        assert bytes.fromhex(message_id) == host + (10911).to_bytes(4, "big") + (2**40 + 5).to_bytes(8, "big")
    assert offset_message_id(b"\x7f\0\0\1\0\0\x51\xaf", 128) == "7F000001000051AF0000000000000080"


@pytest.mark.parametrize(("key", "host", "pid"), JAVA["keys"])
def test_a_unique_key_of_java_is_taken_apart(key: str, host: str, pid: int) -> None:
    parts = _parts(key)
    assert (parts.host.hex(), parts.pid, parts.salt) == (host, pid, int("ABCDEF01", 16))
    assert parts.ms_of_month in (255, 0x76543210)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-5, 5)), max_size=6))
def test_unique_keys_never_repeat(steps: list[tuple[int, int]]) -> None:
    maker = UniqueKeys(b"\x0a\1\2\3", 99999, 0xABCDEF01)
    now = 1_700_000_000_000
    seen: list[str] = []
    for count, step in steps:
        now += step
        keys = maker.take(count, now).to_pylist()
        assert len(keys) == count
        for key in keys:
            assert _parts(key)[:3] == (b"\x0a\1\2\3", 99999 & 0xFFFF, 0xABCDEF01)
        seen.extend(keys)
    assert len(set(seen)) == len(seen)
    assert seen == sorted(seen)


def test_a_unique_key_tells_when_it_was_made() -> None:
    now = 1_700_000_000_000
    for host in (b"\x0a\1\2\3", bytes(16)):
        maker = UniqueKeys(host, 7, 1)
        first = _parts(maker.take(1, now)[0].as_py())
        assert (first.ms_of_month, first.counter) == (now - month_start(now), 0)
        many = maker.take(70_000, now).to_pylist()
        assert _parts(many[-1])[3:] == (now - month_start(now) + 1, 70_000 - 65_536)
        next_month = now + 31 * 86_400_000
        later = _parts(maker.take(1, next_month)[0].as_py())
        assert later.ms_of_month == next_month - month_start(next_month)
        # This number of milliseconds does not fit into a signed 32-bit number.
        late = month_start(next_month) + 30 * 86_400_000
        key = maker.take(1, late)[0].as_py()
        assert _parts(key).ms_of_month == late - month_start(late) > 2**31
    with pytest.raises(ValueError, match="4 or 16 bytes"):
        UniqueKeys(b"123", 7, 1)
