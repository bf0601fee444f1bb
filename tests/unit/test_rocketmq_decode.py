"""Decoding many pull responses by columns gives the same result as decoding one message at a time, whatever the responses contain."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orderedmq.errors import ProtocolError, SchemaError
from orderedmq.model import MAX_OFFSET, MessageQueue
from orderedmq.rocketmq.codec import decode
from orderedmq.rocketmq.codec.gather import total_bytes
from orderedmq.rocketmq.codec.record_scan import record_starts
from orderedmq.rocketmq.codec.row_decoder import Selection, Unreadable, decode_exactly
from orderedmq.routing.sharding_key import java_string_hash
from orderedmq.schema import DEFAULT_COLUMNS, MESSAGE_SCHEMA, concat_batches, select_schema
from tests.stored_messages import (
    INNER,
    ODD,
    PLAIN,
    QUEUE,
    QUEUES,
    STRANGERS,
    Stored,
    inner,
    moved,
    queue_of,
    text,
    usual,
)

ALL = tuple(MESSAGE_SCHEMA.names)
RELAXED = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
COLUMNS = st.lists(st.sampled_from(ALL), min_size=1, unique=True).map(tuple)


@pytest.fixture(autouse=True)
def _by_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode by columns even if there are few messages."""
    monkeypatch.setattr(decode, "FEWEST", 0)


def responses(messages: list[Stored], size: int) -> list[bytes]:
    return [b"".join(message.pack() for message in messages[at : at + size]) for at in range(0, len(messages), size)]


def exactly(given: list[bytes], asked: Selection) -> pa.RecordBatch:
    pieces = list(decode_exactly(given, asked))
    schema = select_schema(asked.columns)
    return (
        concat_batches(pieces) if pieces else pa.RecordBatch.from_arrays([pa.array([], f.type) for f in schema], schema=schema)
    )


def whole(given: list[Any], columns: tuple[str, ...], queue: MessageQueue, **rest: Any) -> pa.RecordBatch:
    """All rows, as one batch."""
    return decode.decode(given, columns, queue, max_bytes=1 << 40, **rest)[0]


def by_columns(given: list[Any], asked: Selection) -> pa.RecordBatch | None:
    return decode._decode_columns(list(filter(None, given)), asked, select_schema(asked.columns))


def received(given: list[bytes]) -> list[memoryview]:
    """The responses as a task has them: parts of one buffer, received in another order, with headers between them."""
    came = sorted(range(len(given)), key=lambda place: (place * 7) % 5)
    buffer = memoryview(bytearray(b"".join(b"\xda\xa3\x20\xa7header" + given[place] for place in came)))
    ends = list(accumulate(len(given[place]) + 10 for place in came))
    parts = {place: buffer[end - len(given[place]) : end] for place, end in zip(came, ends)}
    return [parts[place] for place in range(len(given))]


def same(given: list[bytes], asked: Selection) -> bool:
    """Check that both decoders return the same rows or raise the same error. Return whether the fast one decoded the responses."""
    taken = by_columns(given, asked) if any(given) else None
    in_place = by_columns(received(given), asked) if any(given) else None
    assert in_place == taken
    rest: dict[str, Any] = {"begin": asked.begin, "end": asked.end, "tags": asked.tags, "verify_crc": asked.verify_crc}
    try:
        expected = exactly(given, asked)
    except (ProtocolError, Unreadable) as error:
        with pytest.raises(type(error)):
            list(decode.decode_pieces(given, asked))
        assert taken is None
        return False
    found = whole(given, asked.columns, asked.queue, **rest)
    found.validate(full=True)
    assert found.schema == expected.schema
    assert found == expected
    return taken is not None


def everything(*columns: str) -> Selection:
    return Selection(QUEUE, columns or ALL, 0, MAX_OFFSET, frozenset(), True)


# -- the same rows as one message at a time


def test_usual_messages_take_the_fast_way() -> None:
    given = responses([usual(number) for number in range(200)], 32)
    assert same(given, everything())
    for name in ALL:
        assert same(given, everything(name))
    batch = whole(given, DEFAULT_COLUMNS, QUEUE)
    assert batch.num_rows == 200
    assert batch.column("queue_offset").to_pylist() == list(range(200))
    assert batch.slice(7, 1).to_pylist()[0] | {"born_timestamp": None, "store_timestamp": None} == {
        "topic": "orders",
        "broker_name": "broker-a",
        "queue_id": 3,
        "queue_offset": 7,
        "body": b"%0100d" % 7,
        "tags": "created",
        "keys": "order-0000000007",
        "sharding_key": "000007",
        "message_id": "0A010203F4D2ABCDEF01000000000007",
        "born_timestamp": None,
        "store_timestamp": None,
        "reconsume_times": 0,
    }


@pytest.mark.parametrize(
    "change",
    [
        {"sys_flag": 0x10},
        {"sys_flag": 0x20},
        {"sys_flag": 0x30},
        {"sys_flag": 0x30, "properties": b""},
        {"sys_flag": 0x101},
        {"properties": b""},
        {"properties": b"a\x01b"},
        {"properties": b"TAGS\x01b\x02a\x01c"},
        {"properties": "TAGS\x01é\x02UNIQ_KEY\x01日\x02".encode()},
        {"topic": b""},
        {"topic": "é".encode()},
        {"topic": b"%RETRY%billing"},
        {"body": b""},
        {"born": 2**63 - 1},
        {"queue_id": -1},
        {"offset": 2**62},
    ],
)
def test_what_all_messages_have_alike_takes_the_fast_way(change: dict[str, Any]) -> None:
    messages = [replace(usual(number), **change) for number in range(40)]
    asked = everything()._replace(queue=queue_of(messages[0]))
    for size in (1, 3, 40):
        assert same(responses(messages, size), asked)
        # The same messages with a usual one at the end.
        mixed = [*messages, moved(usual(40), asked.queue)]
        same(responses(mixed, size), asked)
    numbered = [replace(message, offset=number) for number, message in enumerate(messages)]
    assert same(responses(numbered, 4), asked._replace(columns=("body", "tags")))


def test_messages_of_many_producers_take_the_fast_way() -> None:
    pairs = [("TAGS", "t"), ("KEYS", "k"), ("a", "b"), ("__SHARDINGKEY", "s"), ("UNIQ_KEY", "u"), ("TAGT", "no")]
    messages = [Stored(offset=n, properties=text(*pairs[: n % 7], *pairs[n % 3 :][: n % 2])) for n in range(90)]
    distinct = [Stored(offset=n, properties=text(*pairs[n % 7 :], last=n % 2 == 0)) for n in range(90)]
    assert same(responses(messages, 5), everything("tags", "keys", "sharding_key", "message_id"))
    assert same(responses(distinct, 5), everything())
    # If a name occurs twice, the last value counts. A map with such names is decoded one message at a time.
    twice = [Stored(offset=n, properties=text(("a", "1"), ("TAGS", "x"), ("TAGS", str(n)))) for n in range(90)]
    assert same(responses(twice, 5), everything("tags"))
    assert not same(responses(twice, 5), everything("properties"))


@pytest.mark.parametrize(
    "properties",
    [
        b"TAGS\x01\x02a\x01b\x02",
        b"TAGS\x01t\x02\x02",
        b"\x02TAGS\x01t\x02",
        b"TAGS\x01t\x01u\x02",
        b"TAGS\x01t\x02u\x02",
        b"TAGS",
        b"\x01t\x02",
    ],
)
def test_irregular_properties_of_one_message_are_left_to_the_exact_parser(properties: bytes) -> None:
    for place in (0, 20, 39):
        messages = [usual(number) for number in range(40)]
        messages[place] = replace(messages[place], properties=properties)
        assert not same(responses(messages, 8), everything("tags", "keys"))


@RELAXED
@given(
    st.lists(st.one_of(PLAIN, PLAIN, PLAIN, ODD), max_size=40),
    st.integers(1, 5),
    COLUMNS,
    st.integers(0, 40),
    st.integers(0, 70),
    st.sets(st.sampled_from(["t", "x", "é"])),
    st.booleans(),
    QUEUES,
)
def test_mixed_groups_are_the_same_as_one_message_at_a_time(
    messages: list[Stored],
    size: int,
    columns: tuple[str, ...],
    begin: int,
    end: int,
    tags: set[str],
    verify: bool,
    queue: MessageQueue,
) -> None:
    messages = [moved(message, queue) for message in messages]
    same(responses(messages, size), Selection(queue, columns, begin, end, frozenset(tags), verify))


@RELAXED
@given(st.lists(PLAIN, min_size=1, max_size=40), st.integers(1, 5), COLUMNS)
def test_plain_groups_take_the_fast_way(messages: list[Stored], size: int, columns: tuple[str, ...]) -> None:
    assert same(responses(messages, size), Selection(QUEUE, columns, 0, MAX_OFFSET, frozenset(), True))


@pytest.mark.holds("foreign answer")
@RELAXED
@given(
    st.lists(st.one_of(PLAIN, PLAIN, ODD), max_size=40),
    st.lists(STRANGERS, min_size=1, max_size=3),
    st.integers(1, 50),
    COLUMNS,
    st.randoms(use_true_random=False),
)
def test_a_message_of_another_queue_is_refused_by_both_ways_wherever_it_is(
    messages: list[Stored], strangers: list[Stored], size: int, columns: tuple[str, ...], draw: random.Random
) -> None:
    for stranger in strangers:
        messages.insert(draw.randint(0, len(messages)), stranger)
    given = responses(messages, size)
    # A message of another queue is refused whether or not its offset is requested.
    for begin, end in ((0, MAX_OFFSET), (100, 200)):
        asked = Selection(QUEUE, columns, begin, end, frozenset(), False)
        assert by_columns(given, asked) is None
        with pytest.raises(
            ProtocolError, match="PROTOCOL.* answered a pull of queue orders/broker-a/3 with a message of queue"
        ):
            whole(given, columns, QUEUE, begin=begin, end=end)


@RELAXED
@given(
    names=st.lists(st.sampled_from(["TAGS", "KEYS", "UNIQ_KEY", "a", "__SHARDINGKEY"]), min_size=1, max_size=4, unique=True),
    values=st.lists(st.text("ab\x00é", min_size=1, max_size=9), min_size=1, max_size=4),
    bodies=st.lists(st.binary(max_size=30), min_size=1, max_size=3),
    size=st.integers(1, 9),
    columns=COLUMNS,
)
def test_messages_of_one_producer_take_the_fast_way(
    names: list[str], values: list[str], bodies: list[bytes], size: int, columns: tuple[str, ...]
) -> None:
    messages = [
        Stored(
            offset=n,
            body=bodies[n % len(bodies)],
            properties=text(*((name, values[(n * 3 + place) % len(values)]) for place, name in enumerate(names))),
        )
        for n in range(70)
    ]
    assert same(responses(messages, size), everything(*columns))


def test_large_responses_are_divided_where_records_begin() -> None:
    """A body may contain bytes that look like the beginning of a record. In that case, the response is scanned from its beginning."""
    record = usual(1).pack()
    for body in (b"", record, record[4:8] * 50):
        messages = [replace(usual(n), body=body + bytes(n % 90)) for n in range(900)]
        assert same(responses(messages, 300), everything("queue_offset", "body"))
        given = responses(messages, 300)
        given[1] = given[1][:-1]
        assert not same(given, everything("queue_offset"))
    one = b"".join(responses([usual(n) for n in range(500)], 500))
    starts = record_starts(np.frombuffer(one, np.uint8), np.array([0]), np.array([len(one)]))
    assert starts is not None
    assert len(starts) == 500


# -- refusals


def test_a_group_cut_off_anywhere_is_refused_or_shorter() -> None:
    whole = b"".join(message.pack() for message in (usual(1), Stored(properties=b"a\x01b"), usual(2)))
    first = usual(0).pack()
    for cut in range(len(whole)):
        # A whole response follows the cut one. It must not be read as the rest of the cut record.
        same([first, whole[:cut], first], everything())
        same([first] * 20 + [whole[:cut]], everything("queue_offset"))


def test_a_size_that_leads_astray_is_refused_wherever_it_stands() -> None:
    """Wrong sizes may lead back to an earlier record, to the same record forever, or into another response."""
    size = len(usual(0).pack())
    for response, record in ((0, 0), (0, 2), (7, 1), (15, 0), (15, 2)):
        for wrong in (0, -1, 90, 91, -size, -2 * size, 2 * size, 3 * size, 4 * size, size - 1, size + 1, -(2**31), 2**31 - 1):
            given = [bytearray(response) for response in responses([usual(n) for n in range(48)], 3)]
            given[response][record * size : record * size + 4] = wrong.to_bytes(4, "big", signed=True)
            assert not same([bytes(one) for one in given], everything("queue_offset"))
    for some in ([0], [15], range(16)):
        for left in range(4, 91):
            # The last record is split in two, and the second part is smaller than any record.
            given = [bytearray(response) for response in responses([usual(n) for n in range(48)], 3)]
            for response in some:
                given[response][2 * size : 2 * size + 4] = (size - left).to_bytes(4, "big")
                given[response][3 * size - left : 3 * size - left + 4] = left.to_bytes(4, "big")
            assert not same([bytes(one) for one in given], everything("queue_offset"))


@RELAXED
@given(st.lists(st.one_of(PLAIN, PLAIN, ODD), min_size=1, max_size=20), st.integers(1, 4), st.data())
def test_changed_bytes_are_refused_or_read_alike(messages: list[Stored], size: int, data: st.DataObject) -> None:
    given = [bytearray(response) for response in responses(messages, size)]
    for _ in range(data.draw(st.integers(1, 3))):
        one = data.draw(st.sampled_from(given))
        one[data.draw(st.integers(0, len(one) - 1))] = data.draw(st.sampled_from([0, 1, 2, 3, 127, 128, 255]))
    same([bytes(one) for one in given], Selection(QUEUE, ALL, 0, MAX_OFFSET, frozenset(), False))


def test_bodies_of_more_bytes_than_asked_for_come_in_pieces_and_the_rest_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [Stored(offset=n, body=bytes(2**20), sys_flag=0x201).pack() for n in range(9)]
    asked = everything("queue_offset", "body")._replace(piece_bytes=4 * 2**20)
    # The fast decoder accepts four of these bodies at a time, but not five.
    assert by_columns(given[:4], asked) is not None
    assert by_columns(given[:5], asked) is None
    assert [piece.num_rows for piece in decode.decode_pieces(given, asked)] == [4, 4, 1]
    for most, rows in ((0, 1), (1, 1), (2**20, 1), (2**20 + 1, 2), (4 * 2**20, 4), (10 * 2**20, 9)):
        batch, end = decode.decode(given, asked.columns, QUEUE, end=20, max_bytes=most)
        assert (batch.num_rows, end) == (rows, 20 if rows == 9 else rows)
    # The number of bytes is also limited if no body is requested.
    monkeypatch.setattr(decode, "PIECE_BYTES", 1000)
    monkeypatch.setattr(decode, "GROUP_BYTES", 5000)
    many = responses([usual(number) for number in range(500)], 8)
    batch, end = decode.decode(many, ("queue_offset", "keys"), QUEUE, max_bytes=0)
    assert batch.column(0).to_pylist() == list(range(end))
    assert 0 < end < 100


def test_an_unknown_column_is_refused() -> None:
    with pytest.raises(SchemaError):
        whole([], ("colour",), QUEUE)


# -- the interface


def test_nothing_is_an_empty_batch_of_the_asked_columns() -> None:
    for nothing in ([], [b""], [b"", b""]):
        batch = whole(nothing, ("body", "queue_id"), QUEUE)
        assert batch.num_rows == 0
        assert batch.schema == select_schema(("body", "queue_id"))
        assert list(decode.decode_pieces(nothing, everything("body"))) == []
    outside = whole([usual(5).pack()], ("body",), QUEUE, begin=6)
    assert outside.num_rows == 0
    assert outside.schema == select_schema(("body",))


def test_views_of_frames_are_taken_as_they_are_and_not_kept() -> None:
    frame = bytearray(b"head" + usual(1).pack())
    one = memoryview(frame)[4:]
    for many in (1, 30):
        batch = whole([one] * many, DEFAULT_COLUMNS, QUEUE)
        before = batch.to_pylist()
        frame[4:] = bytes(len(frame) - 4)
        assert batch.to_pylist() == before
        frame[4:] = usual(1).pack()


def test_the_bytes_of_all_values_are_those_of_each() -> None:
    array = pa.array([b"abc", None, b"", b"de", b"f"])
    for begin in range(6):
        for end in range(begin, 6):
            part = array[begin:end]
            assert total_bytes(part) == sum(len(value or b"") for value in part.to_pylist())


def test_trap_4_a_response_may_have_any_number_of_messages_and_gaps() -> None:
    offsets = [3, 4, 9, 100, 101, 102, 7000]
    messages = [usual(number) for number in offsets]
    given = [messages[0].pack(), b"".join(message.pack() for message in messages[1:6]), b"", messages[6].pack()]
    batch = whole(given, ("queue_offset",), QUEUE)
    # The last row does not say where to read next; nextBeginOffset does.
    assert batch.column(0).to_pylist() == offsets
    inside = whole(given, ("queue_offset",), QUEUE, begin=4, end=102)
    assert inside.column(0).to_pylist() == [4, 9, 100, 101]


def test_trap_13_messages_of_a_batch_send_carry_what_the_broker_added() -> None:
    # Up to 5.3.3, a broker appends the envelope's properties to those of each message of a batch.
    added = text(("CLUSTER", "C"), ("WAIT", "true"), ("MSG_REGION", "R"))
    messages = [Stored(offset=n, properties=text(("UNIQ_KEY", f"U{n}"), ("TAGS", "t")) + added) for n in range(60)]
    assert same(responses(messages, 30), everything())
    batch = whole(responses(messages, 30), ("message_id", "tags"), QUEUE)
    assert batch.column("message_id").to_pylist() == [f"U{n}" for n in range(60)]


def test_trap_14_an_empty_value_is_no_value() -> None:
    messages = [Stored(offset=n, properties=b"TAGS\x01\x02KEYS\x01k\x02") for n in range(60)]
    batch = whole(responses(messages, 30), ("tags", "keys"), QUEUE)
    assert batch.to_pylist() == [{"tags": None, "keys": "k"}] * 60


@pytest.mark.holds("changed body")
@pytest.mark.parametrize("change", [{}, {"sys_flag": 0x201}, {"body": inner((b"a", b""), (b"b", b"")), "sys_flag": INNER}])
def test_trap_15_rows_end_before_a_wrong_checksum_if_it_is_verified(change: dict[str, Any]) -> None:
    messages = [usual(number) for number in range(60)]
    messages[33] = replace(messages[33], **change)
    assert same(responses(messages, 7), everything("queue_offset", "body")) is (change.get("sys_flag") != INNER)
    messages[33] = replace(messages[33], crc=1)
    given, columns = responses(messages, 7), ("queue_offset", "body")
    assert not same(given, everything(*columns))
    rows, stop = decode.decode(given, columns, QUEUE, verify_crc=True)
    assert (rows.column(0).to_pylist(), stop) == (list(range(33)), 33)
    with pytest.raises(Unreadable, match="does not have the checksum that was stored with it") as caught:
        decode.decode(given, columns, QUEUE, begin=33, verify_crc=True)
    assert caught.value.offset == 33
    assert decode.decode(given, columns, QUEUE)[0].num_rows >= 60
    # The checksum is verified only if the body is requested, and only for messages with a requested offset and tag.
    assert whole(given, columns, QUEUE, end=33, verify_crc=True).num_rows == 33
    if change.get("sys_flag") != INNER:
        assert whole(given, ("queue_offset",), QUEUE, verify_crc=True).num_rows == 60
        assert whole(given, columns, QUEUE, verify_crc=True, tags=frozenset(["other"])).num_rows == 0


def test_trap_16_tags_of_one_hash_code_are_not_mixed_up() -> None:
    # The broker selects messages by their tag's hash code, so the client compares the tags themselves.
    first, second = "Aa", "BB"
    hashes = java_string_hash(pa.array([first, second]))
    assert hashes[0] == hashes[1]
    tags = [first, second, None, "AaBB", "a", "Aa "]
    messages = [Stored(offset=n, properties=text(("TAGS", tag)) if tag else b"") for n, tag in enumerate(tags * 10)]
    for columns in (("queue_offset", "tags"), ("queue_offset",), ("body", "properties")):
        asked = Selection(QUEUE, columns, 0, MAX_OFFSET, frozenset([first, "other"]), False)
        assert same(responses(messages, 7), asked)
        assert whole(responses(messages, 7), columns, QUEUE, tags=asked.tags).num_rows == 10
