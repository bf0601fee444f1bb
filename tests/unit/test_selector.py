"""Hashes of sharding keys, compared with a plain reference, and the queue selectors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orderedmq.errors import MessageError, OptionError, SchemaError, SinkError
from orderedmq.routing.selector import (
    FunctionSelector,
    HashSelector,
    QueueIdSelector,
    RandomSelector,
    load_function,
    select_by_hash,
    selector,
)
from orderedmq.routing.sharding_key import HashedKeys, java_string_hash, key_hash64
from tests.examples import examples

TEXT = st.text(max_size=24)
KEYS = st.lists(st.one_of(st.none(), TEXT, st.text("ab€😀", min_size=1, max_size=4)), max_size=30)


def java_hash(text: str) -> int:
    units = text.encode("utf-16-le")
    result = 0
    for i in range(0, len(units), 2):
        result = (31 * result + units[i] + 256 * units[i + 1]) % 2**32
    return result - 2**32 if result >= 2**31 else result


def java_index(value: int, n: int) -> int:
    remainder = abs(value) % n if value >= 0 else -(abs(value) % n)
    return abs(remainder)


def expected(keys: Sequence[str | None]) -> list[int]:
    return [0 if key is None else java_hash(key) for key in keys]


def some_rows(n: int) -> pa.RecordBatch:
    return pa.record_batch({"body": pa.array([b""] * n, pa.binary())})


# -- Java's hash


@examples(8)
@given(keys=KEYS, kind=st.sampled_from([pa.string(), pa.large_string(), pa.string_view()]), cut=st.integers(0, 5))
@example(keys=["\x00", "", "\x00\x00", None], kind=pa.string(), cut=0)
@example(keys=["x" * 8, "y" * 8, "z" * 8], kind=pa.string(), cut=1)
@example(keys=["x" * 40, "y", "z" * 8, "é" * 9, "😀" * 5, "w" * 100], kind=pa.string(), cut=0)
def test_any_text_hashes_as_in_java(keys, kind, cut):
    array = pa.array(keys, kind)
    assert java_string_hash(array).tolist() == expected(keys)
    assert java_string_hash(array[cut : len(keys) - 1]).tolist() == expected(keys[cut : len(keys) - 1])


def test_a_dictionary_array_hashes_as_its_values():
    keys = ["b", None, "a", "b", "😀", "a"]
    for array in (pa.array(keys).dictionary_encode(), pa.array(keys, pa.large_string()).dictionary_encode()):
        assert java_string_hash(array).tolist() == expected(keys)
        assert key_hash64(array).tolist() == key_hash64(pa.array(keys)).tolist()
        assert java_string_hash(array[1:4]).tolist() == expected(keys[1:4])


def test_a_null_hashes_to_0_even_where_it_has_bytes():
    offsets = np.array([0, 2, 5, 8], np.int32)
    validity = pa.array([True, False, True]).buffers()[1]
    for data in (b"abxyzcde", b"ab\xc3\xa9zcde"):
        array = pa.Array.from_buffers(pa.string(), 3, [validity, pa.py_buffer(offsets), pa.py_buffer(data)])
        assert java_string_hash(array).tolist() == [java_hash("ab"), 0, java_hash("cde")]
        assert key_hash64(array)[1] == 0
    assert java_string_hash(pa.nulls(3)).tolist() == [0, 0, 0]
    assert java_string_hash(pa.nulls(3, pa.string())).tolist() == [0, 0, 0]


def test_bytes_that_are_not_utf8_hash_as_their_replacement_character():
    # In the second case, the bytes of two neighbouring values would be one character if they were read as one text.
    for data in ([b"ok", b"\xff", b"a\xc3", b"\xe2\x82", "é".encode()], [b"a\xc3", b"\xa9"]):
        keys = pa.Array.from_buffers(pa.string(), len(data), pa.array(data, pa.binary()).buffers())
        assert java_string_hash(keys).tolist() == [java_hash(value.decode(errors="replace")) for value in data]


@pytest.mark.parametrize("bad", [pa.array([1]), pa.array([b"x"]), pa.array([1]).dictionary_encode()])
def test_keys_that_are_not_strings_are_refused(bad):
    with pytest.raises(SchemaError, match="WRONG_TYPE"):
        HashedKeys(bad)


# -- the 64-bit hash


@examples(4)
@given(keys=KEYS)
@example(keys=["", "\x00", "\x00\x00", "\x00" * 8, "\x00" * 9, "a", "\x00a"])
def test_equal_keys_and_only_they_have_one_64_bit_hash(keys):
    values = [key for key in keys if key is not None]
    hashes = HashedKeys(pa.array(keys, pa.string())).hash64
    assert hashes.dtype == np.uint64
    assert len(set(hashes[[key is not None for key in keys]].tolist())) == len(set(values))
    # Neither neighbouring values nor the memory layout change a hash.
    alone = [key_hash64(pa.array([key], pa.large_string()))[0] for key in values]
    assert hashes[[key is not None for key in keys]].tolist() == alone


def test_64_bit_hashes_are_the_same_in_every_process():
    keys = ["", "order-1", "order-2", "é😀" * 9]
    program = f"import pyarrow as pa\nfrom orderedmq.routing.sharding_key import key_hash64\nprint(key_hash64(pa.array({keys!r})).tolist())"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=sys.path[0] or None)
    assert other.stdout.strip() == str(key_hash64(pa.array(keys)).tolist())


# -- selectors


@examples(4)
@given(hashes=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20), n=st.integers(1, 65_536))
@example(hashes=[-(2**31), 2**31 - 1, -1, 0, 1, -7], n=4)
@example(hashes=[-(2**31), 2**31 - 1, -1], n=65_536)
@example(hashes=[-(2**31), 2**31 - 1, -1], n=1)
def test_a_hash_selects_the_queue_that_java_selects(hashes, n):
    assert select_by_hash(np.array(hashes, np.int32), n).tolist() == [java_index(value, n) for value in hashes]


def test_the_remainder_truncates_as_in_java():
    assert select_by_hash(np.array([-7, 7, -(2**31)], np.int32), 4).tolist() == [3, 3, 0]
    assert select_by_hash(np.array([-(2**31)], np.int32), 7).tolist() == [2]


@pytest.mark.parametrize("n", [0, -1, 65_537])
def test_a_queue_count_that_no_topic_has_is_refused(n):
    one = some_rows(1)
    for call in (
        lambda: select_by_hash(np.zeros(1, np.int32), n),
        *(lambda name=name: selector(name, 0).select(one, None, n) for name in ("hash", "random", "queueId")),
    ):
        with pytest.raises(ValueError):
            call()


def test_hash_sends_a_key_to_its_queue_and_rows_without_a_key_round_robin_across_batches():
    chosen = HashSelector(5)
    keys = [None, "a", None, "hello", None]
    first = chosen.select(some_rows(5), pa.array(keys), 4)
    assert first.tolist() == [1, 97 % 4, 2, 99162322 % 4, 3]
    assert chosen.select(some_rows(3), None, 4).tolist() == [0, 1, 2]
    assert chosen.select(some_rows(2), pa.nulls(2, pa.string()), 4).tolist() == [3, 0]


def test_random_depends_on_the_seed_and_not_on_how_rows_come_in_batches():
    whole = RandomSelector(7).select(some_rows(1000), None, 5)
    parts = RandomSelector(7)
    assert np.concatenate([parts.select(some_rows(n), None, 5) for n in (0, 1, 499, 500)]).tolist() == whole.tolist()
    assert RandomSelector(8).select(some_rows(1000), None, 5).tolist() != whole.tolist()
    counts = np.bincount(whole, minlength=5)
    assert counts.min() > 140
    assert len(counts) == 5


def test_random_choices_stay_the_same_from_version_to_version():
    assert RandomSelector(1).select(some_rows(8), None, 100).tolist() == [51, 95, 14, 94, 31, 42, 82, 40]


def test_queue_id_takes_the_column():
    for kind in (pa.int32(), pa.int64(), pa.uint8()):
        rows = pa.record_batch({"queue_id": pa.array([2, 0, 1], kind)})
        assert QueueIdSelector().select(rows, None, 3).tolist() == [2, 0, 1]


@pytest.mark.parametrize(("value", "shown"), [(None, "null"), (3, "3"), (-1, "-1")])
def test_queue_id_refuses_a_null_or_an_unknown_queue_and_names_the_row(value, shown):
    chosen = QueueIdSelector()
    chosen.select(pa.record_batch({"queue_id": pa.array([0, 1], pa.int32())}), None, 3)
    with pytest.raises(MessageError, match=f"BAD_QUEUE_ID.*row 3 of .*queue_id {shown}, but .*0 to 2"):
        chosen.select(pa.record_batch({"queue_id": pa.array([0, value], pa.int32())}), None, 3)


def test_queue_id_needs_a_column_of_integers():
    with pytest.raises(SchemaError, match="MISSING_COLUMN"):
        QueueIdSelector().select(some_rows(1), None, 3)
    with pytest.raises(SchemaError, match="WRONG_TYPE"):
        QueueIdSelector().select(pa.record_batch({"queue_id": ["1"]}), None, 3)


def by_length(keys, n):
    return [len(key or "") % n for key in keys.to_pylist()]


def test_a_function_chooses():
    keys = pa.array(["a", None, "bcd"])
    for hashed in (keys, HashedKeys(keys)):
        assert FunctionSelector(by_length, "by_length").select(some_rows(3), hashed, 2).tolist() == [1, 0, 1]
    assert FunctionSelector(by_length, "by_length").select(some_rows(2), None, 2).tolist() == [0, 0]
    assert FunctionSelector(by_length, "by_length").select(some_rows(0), None, 2).tolist() == []
    assert FunctionSelector(lambda k, n: pa.array([1] * len(k)), "f").select(some_rows(2), None, 2).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda keys, n: 1 / 0, "raised ZeroDivisionError"),
        (lambda keys, n: [0], "shape"),
        (lambda keys, n: None, "shape"),
        # Before 1.24, NumPy warns, and here a warning is an error.
        (lambda keys, n: [[0], [0, 1]], "raised (ValueError|VisibleDeprecationWarning)"),
        (lambda keys, n: [0.0, 1.0], "float64"),
        (lambda keys, n: [True, False], "bool"),
        (lambda keys, n: [0, None], "object"),
        (lambda keys, n: [0, 2], "queue 2 for row 1"),
        (lambda keys, n: [-1, 0], "queue -1 for row 0"),
        (lambda keys, n: np.array([0, 2**63], np.uint64), "for row 1"),
    ],
)
def test_a_function_that_fails_is_named(function, says):
    with pytest.raises(SinkError, match=f"SELECTOR_FAILED.*jobs:pick .*{says}") as caught:
        FunctionSelector(function, "jobs:pick").select(some_rows(2), None, 2)
    assert "\n" not in str(caught.value)


def test_a_function_is_loaded_by_name(tmp_path, monkeypatch):
    (tmp_path / "picks.py").write_text(
        "def pick(keys, n):\n    return [n - 1] * len(keys)\nclass C:\n    pick = pick\nnumber = 3\n"
    )
    (tmp_path / "broken.py").write_text("raise RuntimeError('no\\nway')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_function("picks:pick")(pa.array(["a"]), 4) == [3]
    assert selector("picks:C.pick", 0).select(some_rows(2), None, 4).tolist() == [3, 3]
    for path, says in {
        "picks": "form",
        ":pick": "form",
        "picks:": "form",
        "no_such_module:pick": "ModuleNotFoundError.*every executor",
        ".relative:pick": "cannot be loaded",
        "picks:other": "has no other",
        "picks:number": "not a function but int",
        "broken:pick": "RuntimeError",
    }.items():
        with pytest.raises(OptionError, match=f"INVALID.*messageQueueSelector.*{says}") as caught:
            load_function(path)
        assert "\n" not in str(caught.value)


def test_refuses_an_unknown_selector_and_keys_in_chunks():
    with pytest.raises(OptionError) as caught:
        selector("Hash", 1)
    assert caught.value.condition == "ORDEREDMQ_OPTION.INVALID"
    with pytest.raises(TypeError):
        java_string_hash(pa.chunked_array([["a"]]))
