"""An error's message must be among the first lines of the text that Spark shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pyspark.errors import PySparkException

from tests.live.spark.conftest import Rig

#: The message must be within this many lines. Before it come Spark's first line, the called method's frame and the frame that
#: shortens the rest; in a stream, also the batch's frames.
LINES, STREAM_LINES = 9, 13


def stream(rig: Rig, sink: dict[str, str] | None = None, **options: str) -> None:
    rig.run(rig.stream(topic="in", **options), **{"topic": "out", **(sink or {})})


def write(rig: Rig, body: str, **options: str) -> None:
    rows = rig.spark.range(1).selectExpr(f"{body} AS body", "'k' AS sharding_key")
    rows.write.format("orderedmq").mode("append").options(path=rig.path, topic="out", **options).save()


BAD: list[tuple[str, str, Callable[[Rig], Any], int]] = [
    ("schema", "OPTION.UNKNOWN", lambda rig: rig.batch(topic="in", foo="1"), LINES),
    ("schema of a missing topic", "TOPIC.MISSING", lambda rig: rig.stream(topic="nosuch"), LINES),
    ("schema of a missing store", "STORE.MISSING", lambda rig: rig.batch(topic="in", path=rig.path + "2"), LINES),
    ("a reader", "OPTION.UNSUPPORTED", lambda rig: rig.batch(topic="in", maxOffsetsPerTrigger="5").collect(), LINES),
    ("a writer", "OPTION.UNKNOWN", lambda rig: write(rig, "'a'", foo="1"), LINES),
    ("a task", "MESSAGE.NULL_BODY", lambda rig: write(rig, "CAST(NULL AS STRING)"), LINES),
    ("a stream's reader", "OPTION.MISSING", stream, STREAM_LINES),
    ("a stream's writer", "OPTION.UNKNOWN", lambda rig: stream(rig, {"foo": "1"}, consumerGroup="g"), STREAM_LINES),
]


@pytest.mark.parametrize(("what", "condition", "bad", "most"), BAD, ids=[row[0] for row in BAD])
def test_the_line_of_an_error_is_among_the_first(
    rig: Rig, what: str, condition: str, bad: Callable[[Rig], Any], most: int
) -> None:
    rig.topic("in", queues=1, rows=2)
    rig.topic("out", queues=1)
    with pytest.raises(PySparkException) as caught:
        bad(rig)
    lines = str(caught.value).splitlines()
    place = next(number for number, line in enumerate(lines, 1) if f"ORDEREDMQ_{condition}" in line)
    assert place <= most, "\n".join(lines)
