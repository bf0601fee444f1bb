"""Makes what lies beside it: a store and two checkpoints, as code before the modules moved (commit 825f74c) left them.

    git worktree add --detach ../former 825f74c
    cd ../former && PYTHONPATH=. python THIS_FILE FOLDER

The topic orders has 3 queues of 20 messages. Two queries read it, 4 messages of each queue per batch, one batch per run:

- copying, in group copying, writes to the topic copies and is stopped after batch 2. The commit of batch 2 is then taken out of its
  checkpoint, so it is published, and Spark repeats it.
- billing, in group billing, hands its rows to a function. Its driver is killed in batch 2.

Group parking has put a message aside, and a batch write with txnAppId has filled the topic loads. answers.json has what that code
read, and the rows of billing's batches.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

import orderedmq
from orderedmq.broker import Broker
from orderedmq.model import MESSAGE_SCHEMA, MessageQueue

QUEUES, MESSAGES = 3, 20
TOPICS = ("orders", "copies", "loads", "%DLQ%parking")
LIMIT = {"maxOffsetsPerTrigger": "12"}
PROPERTIES = pa.map_(pa.string(), pa.string())


def orders(queue: int, numbers: Sequence[int]) -> pa.RecordBatch:
    """Messages for a queue of orders; the body is ``queue:number``, two digits each, so that text sorts as numbers do."""
    columns = {
        "body": pa.array([f"{queue:02}:{number:02}".encode() for number in numbers], pa.binary()),
        "sharding_key": pa.array([f"customer-{queue}-{number % 3}" for number in numbers]),
        "keys": pa.array([f"order-{queue}-{number}" for number in numbers]),
        "tags": pa.array([("paid", "shipped", None)[number % 3] for number in numbers]),
        "properties": pa.array([[("amount", str(number))] if number % 2 else None for number in numbers], PROPERTIES),
    }
    return pa.record_batch(columns)


def load(spark: SparkSession, store: str, version: int, rows: int) -> None:
    """Write rows to the topic loads, in one partition, as a job that may be run again."""
    made = spark.range(rows).coalesce(1).selectExpr(f"'{version}:' || id AS body", "'load-' || id % 2 AS sharding_key")
    options = {"path": store, "topic": "loads", "txnAppId": "loader", "txnVersion": str(version), "topicQueueNums": "2"}
    made.write.format("orderedmq").mode("append").options(**options).save()


def read(spark: SparkSession, store: str, group: str) -> DataFrame:
    options = {"path": store, "topic": "orders", "consumerGroup": group, "includeProperties": "true", **LIMIT}
    return spark.readStream.format("orderedmq").options(**options).load()


def copying(spark: SparkSession, store: str, checkpoint: Path) -> Any:
    """The query that copies orders, before it is triggered and started."""
    rows = read(spark, store, "copying").select("body", "sharding_key", "keys", "tags", "properties")
    options = {"path": store, "topic": "copies", "topicQueueNums": "2", "checkpointLocation": str(checkpoint)}
    return rows.writeStream.format("orderedmq").options(**options)


def billing(spark: SparkSession, store: str, checkpoint: Path, take: Any) -> Any:
    """The query that hands ``take`` the number of a batch and its rows per queue, as [offset, body], in their order."""

    def each(rows: DataFrame, batch: int) -> None:
        found: dict[str, list[list[Any]]] = {}
        for row in rows.select("queue_id", "queue_offset", "body").collect():
            found.setdefault(str(row.queue_id), []).append([row.queue_offset, bytes(row.body).decode()])
        take(batch, found)

    stream = read(spark, store, "billing").writeStream.foreachBatch(each)
    return stream.option("checkpointLocation", str(checkpoint))


def messages(broker: Broker, topic: str) -> dict[str, Any]:
    """All columns of all messages of a topic, per queue, in values of JSON."""
    found = {}
    for queue in broker.log.queues(topic):
        end = broker.log.bounds([queue])[queue].max_offset
        rows: list[Any] = []
        while len(rows) < end:
            batch = broker.log.pull(queue, len(rows), 1000, 1 << 20, tuple(MESSAGE_SCHEMA.names))
            assert batch.num_rows, f"{queue} ends at {len(rows)}"
            rows += [list(map(plain, row.values())) for row in batch.to_pylist()]
        found[str(queue.queue_id)] = rows
    return found


def plain(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value if isinstance(value, str | int | list | None) else str(value)


def offsets(broker: Broker, group: str) -> dict[str, int]:
    return {str(queue.queue_id): offset for queue, offset in broker.admin.group_offsets(group).items()}


def answers(broker: Broker) -> dict[str, Any]:
    """Everything that the test compares."""
    return {
        "messages": {topic: messages(broker, topic) for topic in TOPICS},
        "offsets": {group: offsets(broker, group) for group in broker.admin.groups()},
    }


# From here on: only what makes the data.


@contextmanager
def session() -> Iterator[SparkSession]:
    orderedmq.prepare_spark()
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.sql.shuffle.partitions", "2").config("spark.sql.session.timeZone", "UTC").getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


def one_batch(query: Any, number: int) -> None:
    """Start a query, and stop it when it has done a batch and waits for the next, an hour later."""
    running = query.trigger(processingTime="1 hour").start()
    while not (running.lastProgress and running.lastProgress.batchId == number) or running.status["isTriggerActive"]:
        assert running.isActive, running.exception()
        time.sleep(0.05)
    running.stop()


def fill(store: Path) -> None:
    with orderedmq.connect(store) as broker:
        broker.admin.create_topic("orders", QUEUES)
        for queue in broker.log.queues("orders"):
            broker.log.append({queue: orders(queue.queue_id, range(MESSAGES // 2))})
            broker.log.append({queue: orders(queue.queue_id, range(MESSAGES // 2, MESSAGES))})
        first = MessageQueue("orders", "embedded", 0)
        me = broker.groups.join("parker")
        token: Any = broker.groups.lock("parking", me, [first])[first]
        broker.groups.dead_letter(token, orders(0, [3]), [3])
        broker.groups.commit({token: 5})
        broker.groups.unlock([token])
        broker.groups.leave(me)


def be_killed(folder: Path) -> None:
    """Run billing, one batch at a time, until the third kills this driver."""
    with session() as spark:
        jvm = spark.sparkContext._gateway.proc.pid  # type: ignore[union-attr]

        def take(batch: int, rows: dict[str, Any]) -> None:
            with (folder / "billed.jsonl").open("a") as file:
                file.write(json.dumps([batch, rows]) + "\n")
            if batch == 2:
                os.kill(jvm, signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)

        for number in range(3):
            one_batch(billing(spark, str(folder / "store"), folder / "billing", take), number)


def make(out: Path) -> None:
    folder = Path(tempfile.mkdtemp())
    store = folder / "store"
    fill(store)
    with session() as spark:
        load(spark, str(store), 1, 6)
        for number in range(3):
            one_batch(copying(spark, str(store), folder / "copying"), number)
    for name in ("2", ".2.crc"):
        (folder / "copying" / "commits" / name).unlink()
    killed = subprocess.run([sys.executable, __file__, str(folder), "be killed"])
    assert killed.returncode == -signal.SIGKILL, killed
    with orderedmq.connect(store) as broker:
        while any(lock.alive for lock in broker.admin.locks()):
            time.sleep(0.05)
        found = answers(broker)
    found["billed"] = [json.loads(line) for line in (folder / "billed.jsonl").read_text().splitlines()]
    (out / "answers.json").write_text(json.dumps(found, indent=None, separators=(",", ":")) + "\n")
    (out / "data.mdb.gz").write_bytes(gzip.compress((store / "data.mdb").read_bytes(), mtime=0))
    for name in ("copying", "billing"):
        shutil.rmtree(out / name, ignore_errors=True)
        shutil.copytree(folder / name, out / name)
    shutil.rmtree(folder)


if __name__ == "__main__":
    be_killed(Path(sys.argv[1])) if len(sys.argv) > 2 else make(Path(sys.argv[1]))
