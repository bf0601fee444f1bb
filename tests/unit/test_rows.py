"""All rows given to a producer are checked before anything is written. An error names the number of the bad row."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orderedmq.conditions import SchemaCondition
from orderedmq.errors import MessageError, OrderedMQError, SchemaError
from orderedmq.model import MAX_BODY_BYTES, MAX_KEY_BYTES, MAX_PROPERTIES_BYTES, RESERVED_PROPERTIES
from orderedmq.routing.sharding_key import hashed_keys
from orderedmq.rows.given import producer_rows
from orderedmq.rows.message_rows import normalise, several_tags
from orderedmq.schema import PRODUCER_COLUMNS, PRODUCER_SCHEMA, PROPERTIES_TYPE


def batch(**columns: Any) -> pa.RecordBatch:
    return pa.record_batch(columns)


def bodies(count: int) -> pa.Array:
    return pa.array([b"%d" % number for number in range(count)], pa.binary())


def refused(rows: pa.RecordBatch, condition: str) -> str:
    with pytest.raises(OrderedMQError) as caught:
        normalise(rows, "queue q")
    assert caught.value.condition == condition
    assert "queue q" in caught.value.message
    assert "\n" not in str(caught.value)
    return caught.value.message


def test_the_producers_columns_are_kept_in_the_message_schemas_order_and_the_rest_is_left_out():
    rows = batch(
        topic=pa.array(["x"]), sharding_key=pa.array(["k"]), body=bodies(1), queue_offset=pa.array([7]), tags=pa.array(["t"])
    )
    kept = normalise(rows, "queue q")
    assert kept.schema.names == ["body", "tags", "sharding_key"]
    assert kept.schema == pa.schema([PRODUCER_SCHEMA.field(name) for name in kept.schema.names])


def test_a_string_body_becomes_its_bytes():
    for kind in (pa.string(), pa.large_string(), pa.large_binary(), pa.string_view()):
        kept = normalise(batch(body=pa.array(["ä", ""], kind)), "queue q")
        assert kept.column("body") == pa.array(["ä".encode(), b""], pa.binary())


def wide(kind: pa.DataType, size: int, count: int) -> pa.Array:
    """Values of ``size`` bytes. They share pages of zeros that need no memory before they are written."""
    offsets = pa.array(np.arange(count + 1, dtype=np.int64) * size)
    return pa.Array.from_buffers(kind, count, [None, offsets.buffers()[1], pa.py_buffer(mmap.mmap(-1, size * count))])


@pytest.mark.parametrize("kind", [pa.large_binary(), pa.large_string()])
def test_rows_of_more_than_two_gibibytes_are_refused_as_too_large(kind: pa.DataType):
    rows = batch(body=wide(kind, MAX_BODY_BYTES, 513))
    assert "'body'" in refused(rows, "ORDEREDMQ_MESSAGE.TOO_LARGE")
    assert normalise(rows.slice(512), "queue q").column("body").to_pylist() == [b"\0" * MAX_BODY_BYTES]


def test_keys_of_more_than_two_gibibytes_are_refused_as_too_large():
    keys = wide(pa.large_string(), MAX_BODY_BYTES, 513)
    with pytest.raises(MessageError, match="TOO_LARGE"):
        hashed_keys(keys, "auto", "a batch")
    assert len(hashed_keys(keys.slice(512), "auto", "a batch").keys) == 1


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("body", pa.array([1.5])),
        ("body", pa.array([[b"a"]])),
        ("body", pa.array([{"a": 1}])),
        ("tags", pa.array([b"\xff"], pa.binary())),
        ("tags", pa.array([[1]])),
        ("properties", pa.array(["{}"])),
        ("properties", pa.array([{"a": "b"}])),
        ("properties", pa.array([[[1]]])),
    ],
)
def test_a_column_that_cannot_become_a_messages_is_refused_by_name(name, column):
    rows = batch(**({"body": bodies(1)} | {name: column}))
    assert repr(name) in refused(rows, "ORDEREDMQ_SCHEMA.WRONG_TYPE")


def test_a_column_that_is_there_twice_is_refused():
    rows = pa.RecordBatch.from_arrays([bodies(1), bodies(1)], names=["body", "body"])
    refused(rows, "ORDEREDMQ_SCHEMA.WRONG_TYPE")


@pytest.mark.parametrize("name", ["delay_time_level", "deliver_timestamp"])
def test_a_column_that_would_delay_rows_is_refused(name):
    with pytest.raises(SchemaError) as caught:
        normalise(pa.record_batch({"body": [b"x"], name: pa.nulls(1)}), "here")
    assert (caught.value.sub, name in caught.value.message) == (SchemaCondition.UNKNOWN_COLUMN, True)


def test_a_body_of_four_mebibytes_passes_and_one_byte_more_is_refused_with_its_row():
    most = b"x" * MAX_BODY_BYTES
    assert normalise(batch(body=pa.array([b"", most], pa.binary())), "queue q").num_rows == 2
    said = refused(batch(body=pa.array([b"", most, most + b"x"], pa.binary())), "ORDEREDMQ_MESSAGE.TOO_LARGE")
    assert "row 2" in said
    assert str(MAX_BODY_BYTES + 1) in said


@pytest.mark.parametrize("name", ["tags", "keys", "sharding_key"])
def test_a_key_that_is_too_long_in_bytes_is_refused_with_its_row(name):
    fits, long = "é" * (MAX_KEY_BYTES // 2), "é" * (MAX_KEY_BYTES // 2) + "x"
    assert normalise(batch(body=bodies(2), **{name: pa.array([None, fits])}), "queue q").num_rows == 2
    said = refused(batch(body=bodies(3), **{name: pa.array([None, fits, long])}), "ORDEREDMQ_MESSAGE.KEY_TOO_LONG")
    assert "row 2" in said
    assert name in said


def properties(*rows: Sequence[tuple[str, str | None]] | None) -> pa.Array:
    return pa.array(rows, PROPERTIES_TYPE)


def test_properties_are_measured_as_rocketmq_writes_them():
    fits = [("name", "v" * (MAX_PROPERTIES_BYTES - 6))]
    assert normalise(batch(body=bodies(1), properties=properties(fits)), "queue q").num_rows == 1
    said = refused(
        batch(body=bodies(4), properties=properties(None, fits, [("name", fits[0][1] + "v")], [])),
        "ORDEREDMQ_MESSAGE.PROPERTIES_TOO_LARGE",
    )
    assert "row 2" in said
    assert str(MAX_PROPERTIES_BYTES + 1) in said


def test_reserved_properties_do_not_travel():
    rows = batch(
        body=bodies(3),
        properties=properties(
            [("KEYS", "k"), ("mine", "1")], None, [(name, "x") for name in [*sorted(RESERVED_PROPERTIES), "__RMQ.TRANSIENT.X"]]
        ),
    )
    assert normalise(rows, "queue q").column("properties").to_pylist() == [[("mine", "1")], None, []]


PAIRS = st.one_of(
    st.none(),
    st.lists(
        st.tuples(st.sampled_from(["a", "KEYS", "TAGS", "é", "WAIT"]), st.one_of(st.none(), st.text(max_size=3))),
        max_size=3,
        unique_by=lambda pair: pair[0],
    ),
)


@given(st.lists(PAIRS, max_size=8), st.integers(0, 8), st.integers(0, 8))
def test_any_slice_keeps_its_own_properties_without_the_reserved_ones(rows, begin, count):
    whole = batch(body=bodies(len(rows)), properties=properties(*rows))
    kept = normalise(whole.slice(begin, count), "queue q").column("properties").to_pylist()
    expected = [None if row is None else [pair for pair in row if pair[0] not in RESERVED_PROPERTIES] for row in rows]
    assert kept == expected[begin : begin + count]


def test_tags_that_are_lists_are_counted():
    tags = ["A", "A,B", None, "A || B", "A|B", ",", "", "é,"]
    assert several_tags(batch(body=bodies(8), tags=pa.array(tags))) == 4
    assert several_tags(batch(body=bodies(2), tags=pa.nulls(2, pa.string()))) == 0
    assert several_tags(batch(body=bodies(0), tags=pa.array([], pa.string()))) == 0
    assert several_tags(batch(body=bodies(1))) == 0


EVENTS = [("order-1", b"created"), (None, b"swept"), ("order-1", b"paid")]


@pytest.mark.parametrize(
    ("rows", "key"),
    [
        (EVENTS, None),
        ([{"sharding_key": key, "body": body.decode()} for key, body in EVENTS], None),
        ([{"body": body, "order": key, "sharding_key": "other"} for key, body in EVENTS], "order"),
        (pd.DataFrame(EVENTS, columns=["order", "body"]).iloc[::-1].iloc[::-1], "order"),
        (pa.table({"body": [body for _, body in EVENTS], "order": [key for key, _ in EVENTS]}), "order"),
        (pa.record_batch({"body": [body.decode() for _, body in EVENTS], "tags": [key for key, _ in EVENTS]}), "tags"),
        ([EVENTS[0], pa.table({"body": ["swept"], "queue_id": [7]}), {"sharding_key": "order-1", "body": "paid"}], None),
    ],
    ids=["pairs", "dicts", "key", "pandas", "table", "batch", "mixed"],
)
def test_rows_of_each_form_are_the_same_messages(rows: Any, key: str | None) -> None:
    messages = producer_rows(rows, key, "topic 't'")
    assert messages["sharding_key"].to_pylist() == [key for key, _ in EVENTS]
    assert messages["body"].cast(pa.binary()).to_pylist() == [body for _, body in EVENTS]
    assert set(messages.schema.names) <= set(PRODUCER_COLUMNS)


@pytest.mark.parametrize(
    ("rows", "key", "condition"),
    [
        ({"body": "a", "order": None}, None, "SCHEMA.UNKNOWN_COLUMN"),
        (pd.DataFrame({"body": ["a"], "order": [1]}), None, "SCHEMA.UNKNOWN_COLUMN"),
        (pa.table({"body": ["a"], "delay_time_level": [3]}), None, "SCHEMA.UNKNOWN_COLUMN"),
        ({"body": "a"}, "order", "SCHEMA.MISSING_COLUMN"),
        (pd.DataFrame({"text": ["a"]}), None, "SCHEMA.MISSING_COLUMN"),
        (pa.table({"tags": ["a"]}), None, "SCHEMA.MISSING_COLUMN"),
        ([(1, "a"), pa.table({"body": ["a"], "sharding_key": ["b"]})], None, "SCHEMA.WRONG_TYPE"),
        (pd.Series(["a"]), None, "SCHEMA.WRONG_TYPE"),
        (pa.chunked_array([["a"]]), None, "SCHEMA.WRONG_TYPE"),
    ],
)
def test_rows_that_are_no_messages_are_refused(rows: Any, key: str | None, condition: str) -> None:
    with pytest.raises(SchemaError) as caught:
        producer_rows(rows, key, "topic 't'")
    assert caught.value.condition == f"ORDEREDMQ_{condition}"


@pytest.mark.parametrize("rows", [[], pd.DataFrame({"body": []}), pa.table({"body": pa.array([], pa.string())})])
def test_no_rows_are_no_messages(rows: Any) -> None:
    assert producer_rows(rows, "order", "topic 't'").num_rows == 0
