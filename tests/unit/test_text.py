"""Tags, keys and properties that are not UTF-8: shown as Java shows them, by either kind of broker, and never an error."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import orderedmq
from ordered_source.listener.task_rows import Columns, Rows
from orderedmq.broker import Broker
from orderedmq.cli import app
from orderedmq.errors import SchemaError
from orderedmq.listening.engine import Message
from orderedmq.model import MAX_OFFSET, MessageQueue
from orderedmq.rocketmq.codec import decode
from orderedmq.rocketmq.codec.row_decoder import Selection, decode_exactly
from orderedmq.routing.sharding_key import hashed_keys, java_string_hash
from orderedmq.rows.filters import Filter
from orderedmq.rows.message_rows import normalise
from orderedmq.schema import concat_batches
from orderedmq.text import MalformedText, is_text, repaired, text_of
from tests.raw_text import JAVAS, append_raw, pairs, strings
from tests.stored_messages import QUEUE as STORED
from tests.stored_messages import Stored, usual

QUEUE = MessageQueue("in", "embedded", 0)
#: A text that is not UTF-8, and the form in which it is shown.
RAW, SHOWN = b"order-\xff", "order-\ufffd"
COLUMNS = ("queue_offset", "body", "tags", "keys", "sharding_key", "properties")


# -- the rule


@pytest.mark.parametrize(("data", "shown"), JAVAS.items())
def test_bytes_are_the_text_that_java_makes_of_them(data: bytes, shown: str) -> None:
    assert text_of(data) == shown
    column, rows = repaired(strings([b"ok", data, None]))
    assert column.to_pylist() == ["ok", shown, None]
    assert rows.tolist() == ([] if is_text(data) else [1])
    # A key goes to the same queue as in Java.
    assert java_string_hash(strings([data])) == java_string_hash(pa.array([shown]))


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
@given(st.lists(st.one_of(st.none(), st.binary(max_size=5), st.just(b"a"))), st.integers(0, 3))
def test_a_column_of_any_kind_of_text_is_valid_then(kind: pa.DataType, values: list[bytes | None], begin: int) -> None:
    raw = pa.array(values, pa.binary())
    if pa.types.is_dictionary(kind):
        column = pa.DictionaryArray.from_arrays(pa.array(range(len(values)), pa.int32()), raw.view(pa.string()))
    elif pa.types.is_string_view(kind):
        column = raw.cast(pa.binary_view()).view(kind)
    else:
        column = raw.cast(pa.large_binary()).view(kind) if pa.types.is_large_string(kind) else raw.view(kind)
    found, rows = repaired(column.slice(begin))
    found.validate(full=True)
    assert found.type == kind
    assert found.to_pylist() == [None if value is None else text_of(value) for value in values[begin:]]
    assert rows.tolist() == [row for row, value in enumerate(values[begin:]) if value is not None and not is_text(value)]


def test_mends_nested_text_and_does_not_copy_valid_columns() -> None:
    nested = pa.StructArray.from_arrays(
        [
            strings([RAW, b"x"]),
            pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), strings([b"a", RAW])),
            pa.array([1, 2]),
        ],
        ["a", "b", "c"],
    )
    assert repaired(nested)[0].to_pylist() == [{"a": SHOWN, "b": ["a"], "c": 1}, {"a": "x", "b": [SHOWN], "c": 2}]
    # If names become equal, the last value counts, as in RocketMQ.
    properties = pairs([[(b"\xfe", b"1"), (b"\xff", b"2")], [], [(b"n", b"\xc3")]])
    assert repaired(properties)[0].to_pylist() == [[("\ufffd", "2")], [], [("n", "\ufffd")]]
    assert repaired(properties)[1].tolist() == [0, 2]
    for column in (
        pa.array(["é", None]),
        pa.array([1]),
        pairs([[(b"a", b"b")]]),
        pa.nulls(2),
        pa.array([b"\xff"]),
        pa.array([[b"\xff"]]),
    ):
        assert repaired(column)[0] is column


def test_warnings_count_messages_once_and_come_when_they_have_doubled(caplog: pytest.LogCaptureFixture) -> None:
    seen = MalformedText()
    for offsets in ([], [7], [7], [9], [8, 9, 12], range(12, 20), [20]):
        seen.note(QUEUE, offsets)
    seen.note(QUEUE._replace(queue_id=1), [0])
    said = [" ".join(record.getMessage().split()[:10]) for record in caplog.records]
    assert said == [
        "1 messages of queue in/embedded/0, the last one at offset",
        "2 messages of queue in/embedded/0, the last one at offset",
        "10 messages of queue in/embedded/0, the last one at offset",
        "1 messages of queue in/embedded/1, the last one at offset",
    ]
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 4


# -- RocketMQ's records


def test_records_by_columns_are_the_same_as_one_at_a_time() -> None:
    """Values that are not UTF-8 are decoded the fast way; names that are not UTF-8 are decoded the general way."""
    messages = [usual(number) for number in range(100)]
    for at, properties in {
        3: b"TAGS\x01\xff\x02__SHARDINGKEY\x01" + RAW + b"\x02",
        40: b"KEYS\x01\xed\xa0\x80\x02mine\x01x\xc3\x02",
        41: b"mine\x01\xe4\x02UNIQ_KEY\x01\xe4\x02",
    }.items():
        messages[at] = Stored(offset=at, properties=properties)
    named = [*messages, Stored(offset=100, properties=b"\xff\x01a\x02\xfe\x01b\x02")]
    for given_, columns, tags, odd in (
        (messages, COLUMNS, frozenset(), {3, 40, 41}),
        (messages, ("queue_offset", "tags"), frozenset(), {3}),
        (messages, ("queue_offset", "keys", "message_id"), frozenset(), {40, 41}),
        (messages, ("queue_offset", "sharding_key"), frozenset({"\ufffd", "created"}), {3}),
        (messages, ("queue_offset", "keys"), frozenset({"created"}), set()),
        (messages, ("queue_offset", "body"), frozenset(), set()),
        (named, COLUMNS, frozenset(), {3, 40, 41, 100}),
    ):
        responses = [b"".join(one.pack() for one in given_[at : at + 8]) for at in range(0, len(given_), 8)]
        asked = Selection(STORED, columns, 0, MAX_OFFSET, frozenset(tags), False)
        expected = concat_batches(list(decode_exactly(responses, asked)))
        noted: list[int] = []
        found, _ = decode.decode(responses, columns, STORED, tags=frozenset(tags), malformed=noted.extend)
        found.validate(full=True)
        assert found == expected
        assert noted == sorted(odd)
        fast = decode._decode_columns(list(responses), asked, expected.schema)
        assert (fast is None) == (given_ is named)


# -- what is written


def test_rows_are_written_as_java_would_write_them() -> None:
    body = pa.array([b"\xff", b"1", b"2"], pa.binary())
    rows = pa.record_batch(
        {"body": body, "tags": strings([b"a", None, RAW]), "properties": pairs([[], [(b"a", b"\xff"), (b"b", b"c")], []])}
    )
    odd: list[int] = []
    written = normalise(rows, "queue in", malformed=odd.extend)
    assert sorted(odd) == [1, 2]
    assert written.column("body").equals(body)
    assert written.column("tags").to_pylist() == ["a", None, SHOWN]
    assert written.column("properties").to_pylist() == [[], [("a", "\ufffd"), ("b", "c")], []]
    keys = hashed_keys(strings([RAW]), "auto", "partition 0")
    assert keys.keys.to_pylist() == [SHOWN]
    assert keys.java == java_string_hash(pa.array([SHOWN]))
    # Arbitrary bytes are refused, because different keys would become equal as text.
    with pytest.raises(SchemaError, match=r"WRONG_TYPE.*keys of partition 0 are binary.*hex\(key\)"):
        hashed_keys(pa.array([b"\xff"]), "auto", "partition 0")
    assert hashed_keys(pa.array(["é".encode()]), "auto", "partition 0").keys.to_pylist() == ["é"]


# -- a store that another program has written


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with orderedmq.connect(tmp_path / "store") as made:
        made.admin.create_topic("in", 1)
        append_raw(
            made,
            QUEUE,
            body=pa.array([b"0", b"\xff1", b"2"], pa.binary()),
            tags=strings([b"a", b"\xff", b"b"]),
            keys=strings([None, b"k\xc3", b"k"]),
            sharding_key=strings([b"x", RAW, b"x"]),
            properties=pairs([[], [(b"mine", RAW), (b"\xfe", b"y")], []]),
        )
        yield made


def test_a_store_is_read_and_its_messages_are_counted(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        rows = broker.log.pull(QUEUE, 0, 10, 1 << 20, COLUMNS)
        rows.validate(full=True)
        assert rows.to_pylist()[1] == {
            "queue_offset": 1,
            "body": b"\xff1",
            "tags": "\ufffd",
            "keys": "k\ufffd",
            "sharding_key": SHOWN,
            "properties": [("mine", SHOWN), ("\ufffd", "y")],
        }
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "1 messages of queue in/embedded/0, the last one at offset 1, have a tag, key or property that is not UTF-8. "
        "Each malformed byte sequence is shown as U+FFFD, as Java shows it. Correct the producer"
    ]
    found, end = broker.log.pull_matching(QUEUE, 0, 10, 1 << 20, ("queue_offset",), Filter(tags=("\ufffd",)))
    assert (found.column(0).to_pylist(), end) == ([1], 3)
    assert broker.log.pull(QUEUE, 1, 1, 1 << 20, ("sharding_key",)).column(0).to_pylist() == [SHOWN]


@pytest.mark.parametrize("name", ["--key", "--tags"])
def test_produce_refuses_an_option_that_is_not_utf_8(broker: Broker, tmp_path: Path, name: str) -> None:
    done = CliRunner().invoke(app, ["--path", str(tmp_path / "store"), "produce", "in", name, "\udcff"])
    assert (done.exit_code, "OPTION.INVALID" in done.stderr) == (2, True), done.output


# -- the listener


def test_a_listener_is_given_valid_text_whatever_columns_the_user_made() -> None:
    batch = pa.record_batch(
        {"queue_offset": pa.array([0, 1]), "mine": strings([b"a", RAW]), "properties": pairs([[(b"\xff", b"1")], []])}
    )
    first, second = (Message(at, None, Rows(Columns(batch), 0), at) for at in range(2))
    assert (first.mine, second.mine, first.properties, second.properties) == ("a", SHOWN, [("\ufffd", "1")], [])
