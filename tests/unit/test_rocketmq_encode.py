"""Rows as the bodies of batch sends: the same bytes as Java's, and no values that RocketMQ would silently change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orderedmq.errors import MessageError
from orderedmq.model import MAX_BODY_BYTES, MAX_PROPERTIES_BYTES, RESERVED_PROPERTIES, MessageQueue, is_reserved
from orderedmq.rocketmq.append.broker_port import fifo_packing, send_request
from orderedmq.rocketmq.codec import encode as module
from orderedmq.rocketmq.codec.encode import Packing, SendBody, Stamp, encode
from orderedmq.rocketmq.codec.stored_message import BROKERS_SHARE, MAX_SENT_BYTES, parse_batch, parse_properties
from orderedmq.rows.message_rows import normalise
from orderedmq.schema import PRODUCER_SCHEMA, PROPERTIES_TYPE

QUEUE = MessageQueue("t", "a", 0)
JAVA: dict[str, list[Any]] = json.loads((Path(__file__).parent / "java_messages.json").read_text())


@pytest.fixture(autouse=True, scope="module", params=[0, module.FEWEST], ids=["by column", "one at a time"])
def _fewest(request: pytest.FixtureRequest) -> Iterator[None]:
    """How few rows are encoded one at a time instead of by column."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FEWEST", request.param)
        yield


def unique(count: int) -> pa.Array:
    return pa.array([f"U{number}" for number in range(count)], pa.string())


def batch(**columns: Any) -> pa.RecordBatch:
    return pa.record_batch({name: pa.array(values, PRODUCER_SCHEMA.field(name).type) for name, values in columns.items()})


def sent(rows: pa.RecordBatch, **extra: pa.Array | str) -> list[SendBody]:
    return list(encode(rows, unique(rows.num_rows), "queue q", extra=extra))


def read(bodies: list[SendBody]) -> list[tuple[bytes, dict[str, str]]]:
    """The messages that arrive, after a check that they agree with the fields of their request."""
    messages: list[tuple[bytes, dict[str, str]]] = []
    for one in bodies:
        assert one.first == len(messages)
        if one.properties is None:
            batch_messages = list(parse_batch(bytes(one.body)))
            assert len(batch_messages) == one.rows > 0
            messages += [(message.body, parse_properties(message.properties)) for message in batch_messages]
        else:
            assert one.rows == 1
            messages.append((bytes(one.body), parse_properties(one.properties.encode())))
    return messages


def refused(condition: str, rows: pa.RecordBatch, first: int = 0, **extra: pa.Array | str) -> str:
    with pytest.raises(MessageError) as caught:
        list(encode(rows, unique(rows.num_rows), "queue q", extra=extra, first=first))
    assert caught.value.condition == f"ORDEREDMQ_MESSAGE.{condition}"
    assert "queue q" in caught.value.message
    assert "\n" not in caught.value.message
    return caught.value.message


# -- contents of requests


@pytest.mark.parametrize(("messages", "expected"), JAVA["batches"])
def test_a_batch_is_what_java_sends(messages: list[dict[str, Any]], expected: str) -> None:
    given = [message["properties"] for message in messages]
    ours = ("TAGS", "KEYS", "__SHARDINGKEY", "UNIQ_KEY")
    rows = batch(
        body=[bytes.fromhex(message["body"]) for message in messages],
        tags=[values.get("TAGS") for values in given],
        keys=[values.get("KEYS") for values in given],
        sharding_key=[values.get("__SHARDINGKEY") for values in given],
        properties=[[pair for pair in values.items() if pair[0] not in ours] for values in given],
    )
    (only,) = encode(rows, pa.array([values["UNIQ_KEY"] for values in given]), "queue q")
    assert bytes(only.body).hex() == expected
    assert only[:2] == (0, len(messages))


def test_a_batch_built_by_hand_has_its_fields_where_the_layout_says() -> None:
    (only,) = encode(batch(body=[b"body"]), pa.array(["U"]), "queue q")
    assert (
        bytes(only.body) == bytes.fromhex("00000025 00000000 00000000 00000000 00000004") + b"body" + b"\0\x0bUNIQ_KEY\x01U\x02"
    )


def test_trap_13_the_unique_key_stands_in_each_message_and_not_in_the_envelope() -> None:
    bodies = sent(batch(body=[b"a", b"b"]))
    assert [properties for _, properties in read(bodies)] == [{"UNIQ_KEY": "U0"}, {"UNIQ_KEY": "U1"}]
    # The request's header needs no properties, because the sender sets m=true.
    assert [body.properties for body in bodies] == [None]


def test_extra_properties_are_for_all_rows_or_for_each_and_win_over_the_users() -> None:
    rows = batch(body=[b"a", b"b"], properties=[[("SINK", "forged"), ("a", "1")], [("SEQ", "9")]])
    assert [properties for _, properties in read(sent(rows, SINK="s", SEQ=pa.array(["0", "1"])))] == [
        {"a": "1", "SINK": "s", "SEQ": "0", "UNIQ_KEY": "U0"},
        {"SINK": "s", "SEQ": "1", "UNIQ_KEY": "U1"},
    ]


def test_reserved_properties_of_a_sources_rows_are_left_out() -> None:
    everything = [(name, "v") for name in sorted(RESERVED_PROPERTIES)] + [
        ("__RMQ.TRANSIENT.X", "v"),
        ("mine", "v"),
        ("DELAY", ""),
    ]
    rows = batch(body=[b"a", b"b"], properties=[everything, [("TIMER_DELIVER_MS", "1")]])
    assert [properties for _, properties in read(sent(rows))] == [{"mine": "v", "UNIQ_KEY": "U0"}, {"UNIQ_KEY": "U1"}]


def test_no_rows_are_no_request() -> None:
    assert sent(batch(body=[])) == []
    assert sent(batch(body=[], tags=[], properties=[])) == []
    with pytest.raises(ValueError, match="1 keys for 2 rows"):
        list(encode(batch(body=[b"a", b"b"]), unique(1), "queue q"))


def test_a_slice_is_encoded_as_its_rows() -> None:
    whole = batch(
        body=[b"%d" % number for number in range(20)],
        tags=[f"t{number}" if number % 3 else None for number in range(20)],
        properties=[[(f"p{at}", str(number)) for at in range(number % 4)] or None for number in range(20)],
    )
    for begin, count in ((0, 20), (3, 9), (19, 1), (5, 0)):
        part = whole.slice(begin, count)
        keys = unique(20).slice(begin, count)
        extra = {"x": pa.array([f"x{number}" for number in range(20)]).slice(begin, count)}
        assert read(list(encode(part, keys, "queue q", extra=extra))) == [
            (
                row["body"],
                dict(row["properties"] or ())
                | ({"TAGS": row["tags"]} if row["tags"] else {})
                | {"x": f"x{begin + number}", "UNIQ_KEY": f"U{begin + number}"},
            )
            for number, row in enumerate(part.to_pylist())
        ]


def test_a_null_map_may_hide_entries() -> None:
    shown = pa.array([[("a", "1")], [("b", "2")], [("c", "3")]], PROPERTIES_TYPE)
    entries = pa.StructArray.from_arrays([shown.keys, shown.items], fields=[shown.type.key_field, shown.type.item_field])
    hidden = pa.Array.from_buffers(shown.type, 3, [pa.py_buffer(b"\x05"), shown.buffers()[1]], children=[entries])
    rows = pa.record_batch({"body": pa.array([b"", b"", b""], pa.binary()), "properties": hidden})
    assert [sorted(properties) for _, properties in read(sent(rows))] == [["UNIQ_KEY", "a"], ["UNIQ_KEY"], ["UNIQ_KEY", "c"]]


TEXT = st.one_of(st.none(), st.text(st.characters(codec="utf-8", exclude_characters="\x01\x02"), max_size=6))
NAME = st.text(st.characters(codec="utf-8", exclude_characters="\x01\x02"), min_size=1, max_size=4)
ROW = st.tuples(st.binary(max_size=20), TEXT, TEXT, TEXT, st.one_of(st.none(), st.dictionaries(NAME, NAME, max_size=3)), TEXT)


@given(st.lists(ROW, max_size=30))
def test_rows_arrive_as_they_were(given_rows: list[Any]) -> None:
    body, tags, keys, sharding, properties, extra = zip(*given_rows) if given_rows else ((),) * 6
    rows = batch(
        body=body,
        tags=tags,
        keys=keys,
        sharding_key=sharding,
        properties=[list(property.items()) if property is not None else None for property in properties],
    )
    # The sender's X replaces a user's property of that name.
    arrived = read(sent(normalise(rows, "queue q"), X=pa.array(extra, pa.string())))
    expected = []
    for number, row in enumerate(given_rows):
        texts = {"TAGS": row[1], "KEYS": row[2], "__SHARDINGKEY": row[3], "X": row[5], "UNIQ_KEY": f"U{number}"}
        kept = {name: value for name, value in (row[4] or {}).items() if not is_reserved(name) and name != "X"}
        expected.append((row[0], kept | {name: value for name, value in texts.items() if value}))
    assert arrived == expected


# -- size of requests


def test_requests_are_cut_near_a_mebibyte() -> None:
    rows = batch(body=[bytes(1000 + number % 7) for number in range(5000)])
    bodies = sent(rows)
    assert len(read(bodies)) == 5000
    assert all(module.TARGET_BYTES - 2000 < len(request.body) <= module.TARGET_BYTES for request in bodies[:-1])


def test_many_rows_are_encoded_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GROUP_ROWS", 7)
    rows = batch(
        body=[b"%d" % number for number in range(50)], tags=["t"] * 50, properties=[[("a", str(n))] for n in range(50)]
    )
    bodies = sent(rows, x=pa.array([str(number) for number in range(50)]))
    assert len(bodies) == 8
    assert [(body, found["a"], found["x"], found["UNIQ_KEY"]) for body, found in read(bodies)] == [
        (b"%d" % number, str(number), str(number), f"U{number}") for number in range(50)
    ]
    monkeypatch.setattr(module, "GROUP_BYTES", 10)
    assert read(sent(rows)) == [(b"%d" % n, {"TAGS": "t", "a": str(n), "UNIQ_KEY": f"U{n}"}) for n in range(50)]


def test_trap_13_a_batch_fits_the_brokers_limit_however_small_its_messages_are() -> None:
    bodies = sent(batch(body=[b""] * 40_000))
    assert sum(body.rows for body in bodies) == 40_000
    # Each message becomes a record of 91 bytes plus the topic's name, its properties and those that the broker adds.
    for request in bodies:
        assert request.rows * (91 - 22 + 127 + BROKERS_SHARE) + len(request.body) <= MAX_BODY_BYTES


@pytest.mark.parametrize("size", [2**20 - 40, 2**20, 2**21, MAX_BODY_BYTES - 37, MAX_BODY_BYTES - 36, MAX_BODY_BYTES])
def test_a_message_that_is_too_large_for_a_batch_goes_alone(size: int) -> None:
    rows = batch(body=[b"small", b"x" * size, b"small"], tags=["a", "b", "c"])
    bodies = list(encode(rows, pa.array(["U0", "U1", "U2"]), "queue q"))
    assert [len(body) for body, _ in read(bodies)] == [5, size, 5]
    assert [properties["UNIQ_KEY"] for _, properties in read(bodies)] == ["U0", "U1", "U2"]
    alone = size + 22 + len("TAGS\x01b\x02UNIQ_KEY\x01U1\x02") > MAX_BODY_BYTES
    assert [body.properties is not None for body in bodies if body.first == 1] == ([alone] if len(bodies) == 3 else [])


def test_each_message_says_its_number_and_its_place_in_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orderedmq.rocketmq.codec.encode.TARGET_BYTES", 1000)
    monkeypatch.setattr("orderedmq.rocketmq.codec.encode.MAX_BATCH_BYTES", 3000)
    monkeypatch.setattr("orderedmq.rocketmq.codec.encode.GROUP_ROWS", 30)
    rows = batch(
        body=[b"x" * (5000 if number == 20 else number % 300) for number in range(100)], tags=[str(n) for n in range(100)]
    )
    first = 9_999_999_950
    for stamp in (Stamp("S", "a.", first), None):
        bodies = list(encode(rows, unique(100), "queue q", stamp=stamp))
        messages = read(bodies)
        assert [properties["TAGS"] for _, properties in messages] == [str(number) for number in range(100)]
        assert sum(body.properties is not None for body in bodies) == 1
        places = [(body.first + place, place) for body in bodies for place in range(body.rows)]
        assert sum(place == 0 for _, place in places) > 10
        assert [properties.get("S") for _, properties in messages] == [
            f"a.{first + number:012d}{place:04d}" if stamp else None for number, place in places
        ]


def test_a_request_has_at_most_ten_thousand_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orderedmq.rocketmq.codec.encode.STORED_BYTES", 1 << 40)
    bodies = list(encode(batch(body=[b""] * 10_001), unique(10_001), "queue q", stamp=Stamp("S", "", 0)))
    assert [body.rows for body in bodies] == [10_000, 1]
    assert [properties["S"][12:] for _, properties in read(bodies)][-2:] == ["9999", "0000"]


def test_the_stamp_counts_among_a_message_s_properties() -> None:
    most = MAX_SENT_BYTES - len("UNIQ_KEY\x01U0\x02a\x01\x02S\x01text\x02") - 16
    fits, too_long = (batch(body=[b""], properties=[[("a", "x" * size)]]) for size in (most, most + 1))
    [body] = encode(fits, unique(1), "queue q", stamp=Stamp("S", "text", 0))
    assert len(read([body])[0][1]["a"]) == most
    with pytest.raises(MessageError, match="row 0 for queue q has properties of"):
        list(encode(too_long, unique(1), "queue q", stamp=Stamp("S", "text", 0)))


# -- refusals


@pytest.mark.parametrize("separator", ["\x01", "\x02"])
@pytest.mark.parametrize("name", ["tags", "keys", "sharding_key"])
def test_trap_14_a_separator_in_a_column_is_refused_by_row(name: str, separator: str) -> None:
    rows = batch(**{"body": [b""] * 4, name: ["a", None, f"b{separator}c", separator]})
    assert "row 12 for queue q" in refused("BAD_PROPERTY", rows, first=10)


def test_trap_14_a_separator_in_a_property_is_refused_by_row() -> None:
    for pair in (("a\x01", "b"), ("a\x02", "b"), ("a", "\x01"), ("a", "b\x02"), ("a", "b\x02c\x01d")):
        rows = batch(body=[b""] * 3, properties=[None, [("x", "y")], [("x", "y"), pair]])
        message = refused("BAD_PROPERTY", rows)
        assert "row 2 for" in message
        assert repr(pair[0]) in message
    assert "row 1 for" in refused("BAD_PROPERTY", batch(body=[b""] * 2), x=pa.array(["a", "\x01"]))
    assert "'x'" in refused("BAD_PROPERTY", batch(body=[b""] * 2), x="\x02")
    # A reserved property is dropped together with its separator.
    assert read(sent(batch(body=[b""], properties=[[("DELAY", "\x01")]])))[0][1] == {"UNIQ_KEY": "U0"}


def test_trap_14_a_property_without_a_name_or_value_is_refused_by_row() -> None:
    for pair in (("", "b"), ("a", ""), ("a", None)):
        rows = batch(body=[b""] * 3, properties=[None, [("x", "y")], [("x", "y"), pair]])
        assert "row 2 for" in refused("BAD_PROPERTY", rows)
        assert "row 5 for" in refused("BAD_PROPERTY", rows.slice(1), first=4)


def test_trap_14_properties_that_leave_the_broker_no_room_are_refused_by_row() -> None:
    others = len("a\x01\x02TAGS\x01t\x02UNIQ_KEY\x01U1\x02")
    fits = "v" * (MAX_SENT_BYTES - others)
    rows = batch(body=[b""] * 2, tags=["t", "t"], properties=[None, [("a", fits)]])
    assert read(sent(rows))[1][1]["a"] == fits
    rows = batch(body=[b""] * 2, tags=["t", "t"], properties=[None, [("a", fits + "v")]])
    assert f"row 1 for queue q has properties of {MAX_SENT_BYTES + 1} bytes" in refused("PROPERTIES_TOO_LARGE", rows)
    assert MAX_SENT_BYTES < MAX_PROPERTIES_BYTES


def test_a_row_is_refused_before_the_rows_with_it_are_sent() -> None:
    rows = batch(body=[bytes(2**20)] * 5, tags=["a", "b", "c", "d", "\x01"])
    bodies = encode(rows, unique(5), "queue q")
    with pytest.raises(MessageError):
        next(bodies)


def test_a_fifo_batch_has_the_key_of_its_first_row_in_its_envelope_and_each_row_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_ROWS", 2)
    rows = normalise(batch(body=[b"a", b"b", b"c"], sharding_key=["k1", "k2", "k3"]), "q")
    bodies = list(encode(rows, unique(3), "q", packing=Packing.FIFO_BATCH))
    assert [body.envelope for body in bodies] == ["__SHARDINGKEY\x01k1\x02", "__SHARDINGKEY\x01k3\x02"]
    assert [properties["__SHARDINGKEY"] for _, properties in read(bodies)] == ["k1", "k2", "k3"]
    assert [send_request(QUEUE, body, "g").ext["i"] for body in bodies] == [body.envelope for body in bodies]
    assert [request.envelope for request in encode(rows, unique(3), "q")] == ["", ""]
    alone = list(encode(rows, unique(3), "q", packing=Packing.ALONE))
    assert [(request.rows, request.envelope) for request in alone] == [(1, "")] * 3
    assert [properties["__SHARDINGKEY"] for _, properties in read(alone)] == ["k1", "k2", "k3"]


def test_a_broker_before_5_4_gets_the_rows_of_a_fifo_topic_one_by_one() -> None:
    """It would replace the key of each row by that of the envelope."""
    assert [fifo_packing(version) for version in (492, 493)] == [Packing.ALONE, Packing.FIFO_BATCH]
