"""`ordered_sink.once` in real Spark: a query fails after its tables have the rows, another query takes over, and a third one begins at a
table's positions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql import functions as sql

from ordered_sink import once
from tests.live.faults.once_tables import COLUMNS, Tables
from tests.live.spark.conftest import Rig


def run(rig: Rig, write: Callable[[DataFrame, int], None], checkpoint: str, **source: Any) -> None:
    """Run a query until it has processed all messages."""
    options = {"consumerGroup": "g", "maxOffsetsPerTrigger": 30, "pullBatchSize": 3, **source}
    writer = (
        rig.stream(topic="in", **options)
        .select(*COLUMNS)
        .writeStream.foreachBatch(write)
        .option("checkpointLocation", str(rig.folder / checkpoint))
    )
    assert writer.trigger(availableNow=True).start().awaitTermination(120)


@pytest.mark.holds("tables once")
def test_tables_have_each_message_once_after_a_crash_a_take_over_and_a_lost_checkpoint(rig: Rig) -> None:
    rig.topic("in", 3, 60)
    tables = Tables(rig.folder / "tables")
    tables.create()
    writers = tables.writers()

    def append(rows: DataFrame, batch_id: int) -> None:
        for write in writers.values():
            write(rows, batch_id)

    def crash(rows: DataFrame, batch_id: int) -> None:
        append(rows, batch_id)
        if batch_id == 1:
            raise RuntimeError("the driver dies before Spark commits the batch")

    with pytest.raises(StreamingQueryException, match="the driver dies"):
        run(rig, crash, "first")
    rig.released()
    # Another query of the group begins with the batch that was not committed, with other batch numbers and other limits.
    run(rig, append, "second", maxOffsetsPerTrigger=60)
    everything = {queue: list(range(20)) for queue in range(3)}
    assert tables.appended() == dict.fromkeys(writers, everything)
    # A query without a checkpoint, in a new group, begins where the table ends.
    offsets = once.positions(writers["delta"], rig.broker.log.queues("in"))
    assert offsets == {"in": {"embedded": {"0": 20, "1": 20, "2": 20}}}
    rig.fill("in", 3, first=60)
    counts: list[int] = []

    def count(rows: DataFrame, batch_id: int) -> None:
        counts.append(rows.count())
        append(rows, batch_id)

    run(rig, count, "third", consumerGroup="h", startingOffsets=json.dumps(offsets))
    assert sum(counts) == 3
    assert tables.appended() == {name: {queue: list(range(21)) for queue in range(3)} for name in writers}


def test_a_shape_gets_only_the_rows_that_the_table_lacks(rig: Rig) -> None:
    rig.topic("in", 2, 40)
    path = str(rig.folder / "totals")

    def totals(rows: DataFrame) -> DataFrame:
        return rows.groupBy("sharding_key").agg(sql.count("*").alias("messages"))

    write = once.delta(path, totals)
    run(rig, write, "first")
    # Another group reads everything again, and new messages.
    rig.fill("in", 4, first=40)
    run(rig, write, "second", consumerGroup="h", maxOffsetsPerTrigger=30)
    totals_by_key: dict[str, int] = {}
    for row in DeltaTable(path).to_pyarrow_table().to_pylist():
        totals_by_key[row["sharding_key"]] = totals_by_key.get(row["sharding_key"], 0) + row["messages"]
    assert totals_by_key.keys() == {f"k{queue}-{number}" for queue in range(2) for number in range(5)}
    assert sum(totals_by_key.values()) == 44
