"""All rows given to a producer are checked before anything is written. An error names the number of the bad row."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orderedmq.conditions import MessageCondition, SchemaCondition
from orderedmq.errors import MessageError, OrderedMQError, SchemaError
from orderedmq.model import MAX_BODY_BYTES, MAX_KEY_BYTES, MAX_PROPERTIES_BYTES, RESERVED_PROPERTIES
from orderedmq.routing.sharding_key import hashed_keys
from orderedmq.rows.message_rows import normalise, several_tags
from orderedmq.schema import PRODUCER_SCHEMA, PROPERTIES_TYPE


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


def test_dictionary_and_large_text_columns_are_taken_as_text():
    rows = batch(
        body=bodies(3), tags=pa.array(["a", None, "a"]).dictionary_encode(), keys=pa.array(["x", "y", None], pa.large_string())
    )
    kept = normalise(rows, "queue q")
    assert kept.column("tags").to_pylist() == ["a", None, "a"]
    assert kept.column("keys").type == pa.string()


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


def test_rows_without_a_body_column_are_refused():
    refused(batch(tags=pa.array(["a"])), "ORDEREDMQ_SCHEMA.MISSING_COLUMN")


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


def test_a_null_body_is_refused_with_its_row():
    assert "row 2" in refused(batch(body=pa.array([b"a", b"", None, None], pa.binary())), "ORDEREDMQ_MESSAGE.NULL_BODY")


def test_an_empty_body_is_a_message():
    assert normalise(batch(body=pa.array([b""], pa.binary())), "queue q").num_rows == 1


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


def test_columns_of_nulls_pass():
    rows = batch(body=bodies(2), tags=pa.nulls(2), keys=pa.nulls(2, pa.string()), properties=pa.nulls(2, PROPERTIES_TYPE))
    kept = normalise(rows, "queue q")
    assert kept.schema.field("tags").type == pa.string()
    assert kept.column("properties").null_count == 2


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


def test_properties_of_a_slice_are_its_own():
    large = [("name", "v" * MAX_PROPERTIES_BYTES)]
    whole = batch(body=bodies(4), properties=properties(large, [("a", "1")], [("b", "2"), ("c", None)], large))
    kept = normalise(whole.slice(1, 2), "queue q")
    assert kept.column("properties").to_pylist() == [[("a", "1")], [("b", "2"), ("c", None)]]
    assert "row 1" in refused(whole.slice(2), "ORDEREDMQ_MESSAGE.PROPERTIES_TOO_LARGE")
    assert "row 0" in refused(whole.slice(0, 2), "ORDEREDMQ_MESSAGE.PROPERTIES_TOO_LARGE")


def test_reserved_properties_do_not_travel():
    rows = batch(
        body=bodies(3),
        properties=properties(
            [("KEYS", "k"), ("mine", "1")], None, [(name, "x") for name in [*sorted(RESERVED_PROPERTIES), "__RMQ.TRANSIENT.X"]]
        ),
    )
    assert normalise(rows, "queue q").column("properties").to_pylist() == [[("mine", "1")], None, []]


def test_no_rows_are_fine():
    rows = pa.RecordBatch.from_pylist([], schema=PRODUCER_SCHEMA)
    assert normalise(rows, "queue q").num_rows == 0


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


@pytest.mark.parametrize(
    "error",
    [
        MessageError(MessageCondition.NULL_BODY, "row 3 for queue q has no body"),
        SchemaError(SchemaCondition.MISSING_COLUMN, "no column 'body'"),
    ],
)
def test_errors_say_their_condition_first_and_survive_pickling(error):
    import pickle

    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.condition, str(again)) == (type(error), error.condition, str(error))
    assert str(error).startswith(f"[{error.condition}] ")


def test_tags_that_are_lists_are_counted():
    tags = ["A", "A,B", None, "A || B", "A|B", ",", "", "é,"]
    assert several_tags(batch(body=bodies(8), tags=pa.array(tags))) == 4
    assert several_tags(batch(body=bodies(2), tags=pa.nulls(2, pa.string()))) == 0
    assert several_tags(batch(body=bodies(0), tags=pa.array([], pa.string()))) == 0
    assert several_tags(batch(body=bodies(1))) == 0
