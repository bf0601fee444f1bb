"""``dead_letter`` in real queries: which rows pass, which become dead letters, and what happens when a batch is repeated."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as sql
from typer.testing import CliRunner

from ordered_source import dead_letter
from orderedmq.cli import app
from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import UNLOCK_DELAY
from tests.contract.support import read
from tests.live.faults.store_access import age
from tests.live.spark.conftest import Rig
from tests.waits import until

DLQ = MessageQueue("%DLQ%g", "embedded", 0)
BAD = (3, 4, 9, 15)


def fill(rig: Rig) -> None:
    """Append 20 orders to two queues. Those in BAD are not JSON or, as a bare number, decode to a null struct."""
    rig.topic("in", 2)
    for queue in rig.broker.log.queues("in"):
        bodies = [
            (b"\xff{", b"7")[n % 2] if n in BAD else b'{"n": %d, "list": [1, null]}' % n for n in range(queue.queue_id, 20, 2)
        ]
        keys = [f"k{n % 4}" for n in range(queue.queue_id, 20, 2)]
        properties = pa.array([[("colour", "red")]] * len(bodies), pa.map_(pa.string(), pa.string()))
        rows = {"body": pa.array(bodies, pa.binary()), "sharding_key": keys, "properties": properties}
        rig.broker.log.append({queue: pa.record_batch(rows)})


def decoded(rig: Rig) -> DataFrame:
    """A stream with columns of several types, to check that all of them pass a task unchanged."""
    rows = rig.stream(topic="in", consumerGroup="g", includeLockToken="true", includeProperties="true")
    order = sql.from_json(sql.col("body").cast("string"), "n long, list array<int>, _corrupt_record string")
    return rows.withColumn("order", order).withColumn("due", sql.current_timestamp()).withColumn("one", sql.lit(1))


def letters(rig: Rig) -> list[dict[str, Any]]:
    rows = read(rig.broker, DLQ, 0, ("body", "sharding_key", "properties"))
    return [{**row, **dict(row["properties"])} for row in rows]


def end_locks(rig: Rig) -> None:
    """End the locks that a failed query leaves for tasks that may still run, so that the test does not wait for their end."""
    until(lambda: all(lock.remaining <= UNLOCK_DELAY for lock in rig.broker.admin.locks("g")), "the locks linger")
    for owner in {lock.owner for lock in rig.broker.admin.locks("g")}:
        age(rig.path, owner, UNLOCK_DELAY)
    rig.released()


@pytest.mark.holds("dead letter by condition")
def test_rows_that_do_not_decode_become_dead_letters_once_and_the_others_pass_in_order(rig: Rig) -> None:
    fill(rig)
    why = sql.concat(sql.lit("not an order: "), sql.col("order._corrupt_record"))
    rows = decoded(rig).transform(dead_letter, "order IS NULL OR order._corrupt_record IS NOT NULL", why)
    assert rows.columns == decoded(rig).columns
    attempts: list[tuple[int, list[tuple[Any, ...]]]] = []

    def write(df: DataFrame, batch: int) -> None:
        stored = df.selectExpr("queue_id", "queue_offset", "order.n", "order.list", "one").collect()
        attempts.append((batch, list(map(tuple, stored))))
        if len(attempts) == 1:
            raise RuntimeError("after the letters, before Spark's commit")

    def run() -> None:
        writer = rows.writeStream.foreachBatch(write).option("checkpointLocation", str(rig.folder / "ck"))
        writer.trigger(availableNow=True).start().awaitTermination()

    with pytest.raises(Exception, match="after the letters"):
        run()
    assert len(letters(rig)) == len(BAD)
    end_locks(rig)
    run()
    stored = letters(rig)
    assert sorted((int(letter["REAL_QID"]), int(letter["ORDEREDMQ_OFFSET"])) for letter in stored) == sorted(
        (n % 2, n // 2) for n in BAD
    )
    assert {letter["colour"] for letter in stored} == {"red"}
    assert {letter["REAL_TOPIC"] for letter in stored} == {"in"}
    assert all(letter["ORDEREDMQ_ERROR"].startswith("not an order: ") for letter in stored)
    assert [batch for batch, _ in attempts] == [0, 0], "the batch must be repeated"
    for _, passed in attempts:
        for queue in (0, 1):
            expected = [(queue, n // 2, n, [1, None], 1) for n in range(queue, 20, 2) if n not in BAD]
            assert [row for row in passed if row[0] == queue] == expected
    assert rig.offsets("g") == {0: 10, 1: 10}

    shown = CliRunner().invoke(app, ["--path", rig.path, "--json", "dlq", "list", "g"])
    assert shown.output.count("not an order: ") == len(BAD)
    done = CliRunner().invoke(app, ["--path", rig.path, "dlq", "replay", "g", "--all"])
    assert done.exit_code == 0, done.output
    assert sum(at.max_offset for at in rig.broker.log.bounds(rig.broker.log.queues("in")).values()) == 20 + len(BAD)
