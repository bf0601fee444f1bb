"""Numeric keys: hashed as Java hashes an Integer or a Long, and which columns are refused."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orderedmq.errors import MessageError, SchemaError
from orderedmq.routing.selector import ModSelector, keyed, selector
from orderedmq.routing.sharding_key import GivenKeyType, HashedKeys, HashedNumbers, hashed_keys, key_hash64

INTS = st.integers(-(2**31), 2**31 - 1)
LONGS = st.integers(-(2**63), 2**63 - 1)
#: The values of Long.hashCode(key) as Java prints them.
KNOWN = {
    0: 0,
    17: 17,
    -1: 0,
    -7: 6,
    2**31: -(2**31),
    2**32: 1,
    1234567890123: 1912276436,
    2**63 - 1: -(2**31),
    -(2**63): -(2**31),
}


def signed(value: int, bits: int) -> int:
    value %= 2**bits
    return value - 2**bits if value >= 2 ** (bits - 1) else value


def java_long_hash(key: int) -> int:
    return signed(key ^ (key % 2**64 >> 32), 32)


def rows(n: int) -> pa.RecordBatch:
    return pa.record_batch({"body": pa.array([b""] * n, pa.binary())})


def queues(keys: pa.Array, n: int, name: str = "hash", kind: GivenKeyType = "auto") -> list[int]:
    return selector(name, 0).select(rows(len(keys)), hashed_keys(keys, kind, "t"), n).tolist()


def test_longs_that_java_has_hashed():
    assert hashed_keys(pa.array(list(KNOWN)), "auto", "t").java.tolist() == list(KNOWN.values())
    assert [java_long_hash(key) for key in KNOWN] == list(KNOWN.values())


@given(st.lists(st.one_of(st.none(), LONGS), max_size=20))
@example([None])
def test_a_bigint_is_hashed_as_a_long_and_stored_as_its_decimal_text(keys):
    hashed = hashed_keys(pa.array(keys, pa.int64()), "auto", "t")
    assert hashed.java.tolist() == [0 if key is None else java_long_hash(key) for key in keys]
    assert hashed.keys.to_pylist() == [None if key is None else str(key) for key in keys]
    # A key in two tasks is detected by its text, so this hash does not depend on the type.
    assert hashed.hash64.tolist() == key_hash64(hashed.keys).tolist()
    again = hashed_keys(hashed.keys, "long", "t")
    assert again.java.tolist() == hashed.java.tolist()
    assert again.keys.equals(hashed.keys)


@given(st.lists(st.one_of(st.none(), INTS), max_size=20))
def test_an_int_is_its_own_hash(keys):
    hashed = hashed_keys(pa.array(keys, pa.int32()), "auto", "t")
    assert hashed.java.tolist() == [key or 0 for key in keys] == hashed_keys(hashed.keys, "int", "t").java.tolist()
    assert hashed.java.dtype == np.int32


def test_an_unsigned_number_of_32_bits_is_hashed_as_a_long():
    key = 2**32 - 1
    assert hashed_keys(pa.array([key], pa.uint32()), "auto", "t").java.tolist() == [java_long_hash(key)]


@pytest.mark.parametrize("column", [pa.float64(), pa.bool_(), pa.date32(), pa.decimal128(10, 0), pa.list_(pa.int8())])
def test_a_column_that_can_have_no_keys_is_refused(column):
    with pytest.raises(SchemaError, match=r"WRONG_TYPE.*string or a whole number, not .*Cast"):
        hashed_keys(pa.nulls(1, column), "text", "t")


def test_the_queue_of_a_number_depends_on_its_type_and_text_is_the_former_one():
    # "17".hashCode() is 1574. In Java, -7 % 4 is -3, and SelectMessageQueueByHash drops the sign.
    assert queues(pa.array([17, -7, None], pa.int32()), 4)[:2] == [1, 3]
    assert queues(pa.array([17, -7, None], pa.int64()), 4)[:2] == [1, 2]
    assert queues(pa.array([17]), 4, kind="text") == queues(pa.array(["17"]), 4) == [1574 % 4]
    assert queues(pa.array(["17", "-7"]), 4, kind="long") == [1, 2]
    assert queues(pa.array([17], pa.int8()), 4) == [1]


@given(st.lists(st.integers(0, 2**63 - 1), max_size=20), st.integers(1, 65_536))
def test_mod_is_the_remainder(keys, n):
    assert queues(pa.array(keys, pa.int64()), n, "mod") == [key % n for key in keys]


def test_mod_refuses_a_negative_number_and_text():
    with pytest.raises(MessageError, match=r"BAD_KEY.* -8, .*Java's id % queues.*set messageQueueSelector=hash"):
        queues(pa.array([3, -8]), 4, "mod")
    with pytest.raises(SchemaError, match=r"WRONG_TYPE.*mod needs .*whole numbers, not text"):
        queues(pa.array(["3"]), 4, "mod")
    assert isinstance(keyed("mod"), ModSelector)
    assert not isinstance(keyed("hash"), ModSelector)


@pytest.mark.parametrize("bad", ["", "x", "1.0", "+7", " 7", "7\n", "0x10", "1e3", "٣", "9223372036854775808", "1" * 100])
def test_text_that_is_no_number_is_refused_with_its_row(bad):
    for column in (pa.array([None, "5", bad]), pa.array([None, b"5", bad.encode()])):
        with pytest.raises(MessageError, match=r"BAD_KEY.*row 12 of partition 3 .*Java's Long .*64 bits") as caught:
            hashed_keys(column, "long", "partition 3", 10)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 300


def test_a_number_that_java_cannot_hold_is_refused_with_its_row():
    assert hashed_keys(pa.array(["-2147483648", "007"]), "int", "t").java.tolist() == [-(2**31), 7]
    for column in (pa.array(["5", "2147483648"]), pa.array([5, 2**31])):
        with pytest.raises(MessageError, match=r"BAD_KEY.*row 1 of t .*'2147483648'.*Java's Integer.*32 bits"):
            hashed_keys(column, "int", "t")
    with pytest.raises(MessageError, match=r"BAD_KEY.*row 0 of t .*'18446744073709551615'.*64 bits"):
        hashed_keys(pa.array([2**64 - 1], pa.uint64()), "auto", "t")


def test_chosen_keys_keep_their_hashes():
    mask = pa.array([True, False, True])
    for column in (pa.array([2**40, 2, None]), pa.array(["a", "b", None])):
        whole = hashed_keys(column, "auto", "t")
        part = whole.filter(mask)
        assert part.java.tolist() == whole.java[[0, 2]].tolist()
        assert part.keys.to_pylist() == [whole.keys[0].as_py(), None]
        assert isinstance(part, HashedNumbers) is isinstance(whole, HashedNumbers)
        assert isinstance(part, HashedKeys)
