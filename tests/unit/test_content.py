"""The queue of a row without a key depends on its content and not on its position, so that a retry finds its rows again."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orderedmq.rocketmq.sink.message_stamp import digests
from orderedmq.routing.content_hash import content_hash64
from orderedmq.routing.selector import selector
from orderedmq.schema import PRODUCER_SCHEMA

TEXT = st.sampled_from([None, "", "a", "b"])
ROW = st.fixed_dictionaries(
    {
        "body": st.sampled_from([b"", b"a", b"b", b"\0", b"x" * 300]),
        "tags": TEXT,
        "keys": TEXT,
        "sharding_key": TEXT,
        "properties": st.one_of(
            st.none(),
            st.lists(
                st.tuples(st.sampled_from(["p", "q"]), st.sampled_from([None, "", "a"])),
                max_size=2,
                unique_by=lambda pair: pair[0],
            ),
        ),
    }
)


def batch(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, PRODUCER_SCHEMA)


def bodies(values: list[bytes]) -> pa.RecordBatch:
    return pa.record_batch({"body": pa.array(values, pa.binary())})


@given(st.lists(ROW, max_size=12))
def test_rows_have_equal_hashes_exactly_if_their_digests_are_equal(rows):
    whole = batch(rows)
    hashes = content_hash64(whole).tolist()
    assert len(set(zip(digests(whole), hashes))) == len(set(digests(whole))) == len(set(hashes))


@given(st.lists(ROW, min_size=1, max_size=12), st.integers(0, 12), st.randoms())
def test_a_rows_hash_depends_on_nothing_but_the_row(rows, begin, draw):
    whole = batch(rows)
    hashes = content_hash64(whole).tolist()
    order = draw.sample(range(len(rows)), len(rows))
    assert content_hash64(batch([rows[at] for at in order])).tolist() == [hashes[at] for at in order]
    assert content_hash64(whole.slice(begin)).tolist() == hashes[begin:]


def test_a_retry_by_another_version_finds_its_queues():
    rows = batch([{"body": b"created", "tags": "t", "properties": [("p", "1"), ("q", "2")]}, {"body": b"created", "keys": "t"}])
    assert content_hash64(rows).tolist() == [13078426841738528797, 11883294904364624436]


def test_values_of_every_length_and_values_that_differ_in_few_bytes_have_different_hashes():
    draw = random.Random(1)
    values = {bytes(size) for size in range(300)} | {bytes(5000), bytes(70_000)}
    # The last bytes of words are the highest ones of their numbers, in which sums have the fewest differences.
    for place in range(7, 104, 8):
        values |= {bytes(place) + bytes([byte]) + bytes(103 - place) for byte in range(256)}
    values |= {b"".join(bytes(7) + draw.randbytes(1) for _ in range(13)) for _ in range(50_000)}
    assert len(set(content_hash64(bodies(list(values))).tolist())) == len(values)


@pytest.mark.parametrize("name", ["hash", "random"])
def test_rows_in_another_order_and_other_batches_go_to_the_same_queues(name):
    names = [b"row %d" % number for number in range(1000)]
    first = dict(zip(names, selector(name, 1, by_content=True).select(bodies(names), None, 7).tolist()))
    again = selector(name, 1, by_content=True)
    shuffled = random.Random(1).sample(names, len(names))
    for begin in (0, 300, 650):
        part = shuffled[begin : begin + 350]
        assert again.select(bodies(part), None, 7).tolist() == [first[name] for name in part]
    assert np.bincount(list(first.values()), minlength=7).min() > 100
