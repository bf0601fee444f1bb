"""Rows and options that the sink refuses, in ``df.write`` and in a stream; nothing of them is visible."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from orderedmq.errors import OrderedMQError
from tests.loop.conftest import LoopRig

OUT = {"topic": "out"}


def one(body: Any = b"x", sharding_key: Any = "k", **more: Any) -> pa.RecordBatch:
    """A row with these columns; None: without the column."""
    given = {"body": body, "sharding_key": sharding_key, **more}
    columns = {name: value for name, value in given.items() if value is not None}
    return pa.record_batch(
        {name: value if isinstance(value, pa.Array) else pa.array([value]) for name, value in columns.items()}
    )


def null(kind: pa.DataType) -> pa.Array:
    return pa.nulls(1, kind)


BAD: list[tuple[str, pa.RecordBatch, dict[str, str], str, str]] = [
    ("a foreign column", one(foo=1), OUT, "ORDEREDMQ_SCHEMA.UNKNOWN_COLUMN", "foo"),
    ("no body", one(body=None), OUT, "ORDEREDMQ_SCHEMA.MISSING_COLUMN", "body"),
    ("a body of another type", one(1, None), OUT, "ORDEREDMQ_SCHEMA.WRONG_TYPE", "body"),
    (
        "a missing key column",
        one(sharding_key=None),
        {**OUT, "shardingKey": "order_id"},
        "ORDEREDMQ_SCHEMA.MISSING_COLUMN",
        "order_id",
    ),
    *(
        (
            f"a key that is {name}",
            one(sharding_key=null(kind)),
            OUT,
            "ORDEREDMQ_SCHEMA.WRONG_TYPE",
            f"'sharding_key' must be binary or integral or string, but it is {name}; cast it first",
        )
        for name, kind in (
            ("boolean", pa.bool_()),
            ("double", pa.float64()),
            ("decimal(10,0)", pa.decimal128(10, 0)),
            ("date", pa.date32()),
            ("timestamp", pa.timestamp("us", "UTC")),
        )
    ),
    (
        "a remainder of text",
        one(sharding_key="1"),
        {**OUT, "messageQueueSelector": "mod"},
        "ORDEREDMQ_SCHEMA.WRONG_TYPE",
        "whole numbers",
    ),
    ("a key that is no number", one(), {**OUT, "shardingKeyType": "long"}, "ORDEREDMQ_MESSAGE.BAD_KEY", "row 0 of partition"),
    ("no key", one(sharding_key=None), OUT, "ORDEREDMQ_SCHEMA.MISSING_COLUMN", "shardingKey=none"),
    (
        "no key for a function of it",
        one(sharding_key=None),
        {**OUT, "messageQueueSelector": "mod"},
        "ORDEREDMQ_SCHEMA.MISSING_COLUMN",
        "sharding_key",
    ),
    ("no topic at all", one(), {}, "ORDEREDMQ_SCHEMA.MISSING_COLUMN", "topic"),
    ("a missing topic", one(), {"topic": "nope"}, "ORDEREDMQ_TOPIC.MISSING", "topicQueueNums"),
    ("a retry topic", one(), {"topic": "%RETRY%g"}, "ORDEREDMQ_TOPIC.RESERVED", "%RETRY%g"),
    ("a path in a name", one(), {"topic": ".."}, "ORDEREDMQ_TOPIC.BAD_NAME", ".."),
    ("a null body", one(null(pa.binary())), OUT, "ORDEREDMQ_MESSAGE.NULL_BODY", "row 0"),
    ("an oversize body", one("x" * 4194305), OUT, "ORDEREDMQ_MESSAGE.TOO_LARGE", "4194305"),
    ("a long key", one(sharding_key="k" * 5000), OUT, "ORDEREDMQ_MESSAGE.KEY_TOO_LONG", "5000"),
    (
        "an unloadable selector",
        one(sharding_key=None),
        {**OUT, "messageQueueSelector": "no.such:f"},
        "ORDEREDMQ_OPTION.INVALID",
        "no.such",
    ),
    (
        "another number of queues than asserted",
        one(),
        {**OUT, "topicQueueNums": "3"},
        "ORDEREDMQ_TOPIC.QUEUE_COUNT",
        "has 2 queues",
    ),
]


@pytest.mark.parametrize(("rows", "options", "condition", "word"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_rows_and_options_are_refused_and_nothing_is_written(
    rig: LoopRig, rows: pa.RecordBatch, options: dict[str, str], condition: str, word: str
) -> None:
    rig.topic("out", 2)
    with pytest.raises(OrderedMQError, match="ORDEREDMQ_") as caught:
        rig.save(options, rows)
    assert condition in str(caught.value)
    assert word in str(caught.value)
    assert sum(map(len, rig.bodies("out").values())) == 0


@pytest.mark.parametrize("body", [b"x", "x"])
def test_the_row_that_the_bad_ones_vary_is_written(rig: LoopRig, body: Any) -> None:
    rig.topic("out", 2)
    rig.save(OUT, one(body))
    assert sum(map(len, rig.bodies("out").values())) == 1


def test_overwriting_is_refused(rig: LoopRig) -> None:
    rig.topic("out", 2)
    with pytest.raises(OrderedMQError, match="ORDEREDMQ_SINK.MODE"):
        rig.save(OUT, one(), overwrite=True)


def test_order_by_beyond_its_memory_is_refused_and_nothing_is_written(rig: LoopRig) -> None:
    rig.topic("out", 1)
    numbers = range(10000)
    columns = {"sharding_key": [f"k{n % 7}" for n in numbers], "body": [str(n) for n in numbers], "id": list(numbers)}
    with pytest.raises(OrderedMQError, match=r"ORDEREDMQ_SINK.ORDER_BUFFER_FULL"):
        rig.save({**OUT, "orderBy": "id", "orderBufferSize": "1k"}, pa.record_batch(columns))
    assert rig.bodies("out") == {0: []}
