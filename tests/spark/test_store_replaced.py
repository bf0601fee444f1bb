"""A store that is replaced, moved or deleted while a query uses it: source and sink fail soon with a named error."""

from __future__ import annotations

import re
import shutil
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException

from orderedmq import connect
from tests.spark.conftest import Rig, StoreRig
from tests.waits import until


def copied(rig: StoreRig) -> None:
    """Replace the store as a restore from a backup does, by a file with the same content. Between the two moves there is no store."""
    copy = shutil.copytree(rig.path, rig.path + "-copy")
    shutil.move(rig.path, rig.path + "-former")
    shutil.move(copy, rig.path)


def fails(query: Any) -> str:
    """Return the error of a query that is expected to fail soon. The timeout of a minute is for a busy machine."""
    with pytest.raises(StreamingQueryException) as caught:
        assert query.awaitTermination(60), "the query is still active"
    return str(caught.value)


@pytest.mark.holds("replaced store")
def test_a_query_that_writes_fails_by_name_when_its_store_is_replaced(rig: Rig) -> None:
    rig.topic("out", 2)
    landing = rig.folder / "landing"
    landing.mkdir()
    number = 0

    def arrive() -> None:
        nonlocal number
        number += 1
        (landing / f".{number}").write_text(f"row {number}\n")
        (landing / f".{number}").rename(landing / f"{number}.txt")

    query = rig.start(
        rig.spark.readStream.text(str(landing)).withColumnRenamed("value", "body"), topic="out", shardingKey="body"
    )

    def out() -> int:
        with connect(rig.path) as broker:
            return sum(at.max_offset for at in broker.log.bounds(broker.log.queues("out")).values())

    for _ in range(3):
        arrive()
        until(lambda: out() == number, "the row is written", 60)
    copied(rig)

    def ended() -> bool:
        arrive()
        return not query.isActive

    until(ended, "the query has failed", 60)
    text = fails(query)
    assert re.search(rf"\[ORDEREDMQ_STORE\.(REPLACED|MISSING)\] the store at {re.escape(rig.path)} was", text), text
