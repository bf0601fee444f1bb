"""A program that runs in the environment of one release of Spark, with the installed package: what users do, audited.

    python spark_scenario.py FOLDER STEP...

Each step prints a JSON line with what the audit counted (see ``audit``). FOLDER is the working directory. The program imports nothing of the
tests, which the environment does not have.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyspark
from pyspark.sql import DataFrame, SparkSession

import orderedmq
from ordered_sink import route
from ordered_source import ConsumeOrderlyStatus, OrderPerKey, consume_orderly, stop_at_boundary
from orderedmq.errors import StoreError, TopicError
from orderedmq.parking import Command

KEYS, QUEUES = 40, 4
#: Seconds that a condition may take on a busy machine.
PATIENCE = 300


def until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(0.05)


def session(**config: str) -> SparkSession:
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.memory": "1g",
    }
    builder = SparkSession.builder.master("local[2]")
    for name, value in (settings | config).items():
        builder = builder.config(name, value)
    return orderedmq.tuned(builder).getOrCreate()


# -- messages and the audit


def produce(path: str, topic: str, numbers: Iterable[int]) -> None:
    """Append messages: number n has the key n modulo 40, and its number as its body."""
    rows = list(numbers)
    with orderedmq.connect(path) as broker:
        with contextlib.suppress(TopicError):
            broker.admin.create_topic(topic, QUEUES)
        messages = pa.record_batch({"body": [str(n).encode() for n in rows], "sharding_key": [f"key-{n % KEYS}" for n in rows]})
        orderedmq.Producer(broker.log, topic).send(messages)


def bodies(path: str, topic: str) -> list[list[int]]:
    """The numbers in each queue of a topic, in order."""
    try:
        with orderedmq.connect(path) as broker:
            bounds = broker.log.bounds(broker.log.queues(topic))
            return [[int(body) for body in _bodies(broker.log, queue, at.max_offset)] for queue, at in bounds.items()]
    except (StoreError, TopicError):
        return []


def _bodies(log: Any, queue: Any, end: int) -> Iterator[bytes]:
    offset = 0
    while offset < end:
        # A pull may return fewer messages.
        rows = log.pull(queue, offset, end - offset, 2**24, ("body",))
        yield from rows.column("body").to_pylist()
        offset += rows.num_rows


def size(path: str, topic: str) -> int:
    return sum(map(len, bodies(path, topic)))


def audit(queues: Sequence[Sequence[int]], expected: Iterable[int]) -> dict[str, int]:
    """Count the messages that are lost, that came twice, and that came after a later one of their key."""
    wanted = set(expected)
    arrived = [n for queue in queues for n in queue]
    last: dict[int, int] = defaultdict(lambda: -1)
    late = 0
    for n in arrived:
        late += n < last[n % KEYS]
        last[n % KEYS] = max(last[n % KEYS], n)
    return {
        "messages": len(wanted),
        "lost": len(wanted - set(arrived)),
        "twice": len(arrived) - len(set(arrived)),
        "out of order": late,
    }


# -- queries


def stream(spark: SparkSession, path: str, **options: Any) -> DataFrame:
    return spark.readStream.format("orderedmq").options(path=path, **options).load()


def copy(df: DataFrame, path: str, topic: str, checkpoint: str, **trigger: Any) -> Any:
    writer = df.select("sharding_key", "body").writeStream.format("orderedmq")
    writer = writer.options(path=path, topic=topic, topicQueueNums=QUEUES, checkpointLocation=checkpoint)
    return writer.trigger(**(trigger or {"processingTime": "50 milliseconds"})).start()


# -- the steps


def batch_and_sql(path: str) -> dict[str, Any]:
    """Rows written by ``df.write`` and by SQL, routed rows, and reads of each kind."""
    spark = session()
    rows = spark.range(200).selectExpr("concat('key-', id % 40) AS sharding_key", "cast(cast(id AS string) AS binary) AS body")
    routed = route(rows.withColumn("id", rows.body.cast("string").cast("int")), "id", queues=QUEUES).drop("id")
    routed.write.format("orderedmq").mode("append").options(path=path, topic="batch", topicQueueNums=QUEUES).save()
    spark.sql(f"CREATE TEMPORARY VIEW batch USING orderedmq OPTIONS (path '{path}', topic 'batch')")
    spark.sql("SELECT sharding_key, body FROM batch WHERE queue_id < 4 ORDER BY queue_id, queue_offset").coalesce(
        1
    ).write.format("orderedmq").mode("append").options(path=path, topic="sql", topicQueueNums=QUEUES).save()
    count = spark.read.format("orderedmq").options(path=path, topic="sql").load().count()
    return audit(bodies(path, "sql"), range(200)) | {"read": count}


def hand_over(path: str) -> dict[str, Any]:
    """Two queries of a group: the second joins while the first runs, and the first leaves. No message is repeated."""
    spark = session()
    produce(path, "shared", range(100))
    shared = {"topic": "shared", "consumerGroup": "shared", "assignment": "shared", "maxOffsetsPerTrigger": 20}
    with orderedmq.connect(path) as broker:

        def owners() -> list[int]:
            held = [lock.owner for lock in broker.admin.locks("shared") if lock.held]
            return sorted(held.count(owner) for owner in set(held))

        first = copy(stream(spark, path, **shared), path, "shared-out", "ck-first")
        until(lambda: owners() == [4], "the first query owns all queues")
        second = copy(stream(spark, path, **shared), path, "shared-out", "ck-second")
        produce(path, "shared", range(100, 200))
        until(lambda: owners() == [2, 2], "the queries divide the queues")
        produce(path, "shared", range(200, 300))
        until(lambda: size(path, "shared-out") >= 300, "all messages are copied")
        stopped = stop_at_boundary(first)
        until(lambda: owners() == [4], "the second query owns all queues")
        produce(path, "shared", range(300, 400))
        until(lambda: size(path, "shared-out") >= 400, "all messages are copied")
        stop_at_boundary(second)
    return audit(bodies(path, "shared-out"), range(400)) | {"stopped": stopped}


def listener(path: str) -> dict[str, Any]:
    """A listener with order per key: one key fails, is parked, and comes back in order."""
    spark = session()
    produce(path, "heard", range(400))
    heard, healed = Path("heard").absolute(), Path("healed").absolute()
    outcomes: list[str] = []

    def process(messages: Sequence[Any], context: Any) -> ConsumeOrderlyStatus:
        del context
        if messages[0].sharding_key == "key-7" and not healed.exists():
            return ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT
        with heard.open("a") as file:
            file.write("".join(f"{message.body.decode()}\n" for message in messages))
        return ConsumeOrderlyStatus.SUCCESS

    rows = stream(spark, path, topic="heard", consumerGroup="heard", parkingLot="true", maxOffsetsPerTrigger=100)
    settings = OrderPerKey(in_batch_attempts=1, suspend_current_queue_time_millis=1000)
    writer = consume_orderly(rows, process, settings).writeStream.foreachBatch(
        lambda batch, _: outcomes.extend(row.status for row in batch.collect())
    )
    query = writer.option("checkpointLocation", "ck-heard").trigger(processingTime="50 milliseconds").start()
    until(lambda: outcomes.count("SUCCESS") >= 390, "the other keys are accepted")
    parked = outcomes.count("PARKED") > 0
    healed.touch()
    with orderedmq.connect(path) as broker:
        for queue in broker.log.queues("heard"):
            broker.admin.command_parked("heard", queue, [Command("retry", "key-7")])
        until(lambda: outcomes.count("SUCCESS") >= 400, "the parked key has come back")
    query.processAllAvailable()
    query.stop()
    by_key = defaultdict(list)
    for number in heard.read_text().split():
        by_key[int(number) % KEYS].append(int(number))
    return audit(list(by_key.values()), range(400)) | {"parked": parked}


def connect(path: str) -> dict[str, Any]:
    """A Spark Connect session copies a topic."""
    produce(path, "remote", range(200))
    spark = SparkSession.builder.remote("local[2]").getOrCreate()
    kind = type(spark).__module__
    source = stream(spark, path, topic="remote", consumerGroup="remote")
    copy(source, path, "remote-out", str(Path("ck-remote").absolute()), availableNow=True).awaitTermination()
    return audit(bodies(path, "remote-out"), range(200)) | {"connect": "connect" in kind}


def kills(path: str, count: int = 10) -> dict[str, Any]:
    """Kill the driver of a source → sink query with -9, again and again, at random moments of its micro-batches."""
    total = 400
    produce(path, "in", range(total))
    chance = random.Random(4)
    killed = 0
    while killed < count:
        before = size(path, "out")
        # Kill it somewhere in its share of what is left, so that each run makes progress.
        share = chance.randrange(1, 2 * (total - before) // (count - killed + 1))
        if _run_until(path, before + share, chance.random() / 2):
            killed += 1
    while not _run_until(path, total, 0.0):
        pass
    return audit(bodies(path, "out"), range(total)) | {"kills": killed}


def _run_until(path: str, rows: int, later: float) -> bool:
    """Run the query until its topic has so many rows, and kill it some seconds later. Return whether it got there."""
    with open("driver.log", "w") as log:
        arguments = [sys.executable, __file__, str(Path(path).parent), "source to sink"]
        driver = subprocess.Popen(arguments, stdout=log, stderr=log, start_new_session=True)
    try:
        until(lambda: size(path, "out") >= rows or driver.poll() is not None, "the query makes progress")
        if driver.poll() is not None:
            # A busy machine can keep Spark from starting the source's process in time.
            print(Path("driver.log").read_text()[-2000:], file=sys.stderr)
            return False
        time.sleep(later)
        return True
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()


def source_to_sink(path: str) -> dict[str, Any]:
    spark = session()
    source = stream(spark, path, topic="in", consumerGroup="copy", maxOffsetsPerTrigger=25)
    copy(source, path, "out", "ck-kills").awaitTermination()
    return {}


def moved(path: str) -> dict[str, Any]:
    """Copy more messages with the checkpoint that another release has left."""
    spark = session()
    before = size(path, "moved")
    produce(path, "moved", range(before, before + 200))
    copy(
        stream(spark, path, topic="moved", consumerGroup="moved"), path, "moved-out", "ck-moved", availableNow=True
    ).awaitTermination()
    return audit(bodies(path, "moved-out"), range(before + 200))


STEPS: Mapping[str, Callable[[str], dict[str, Any]]] = {
    "batch and SQL": batch_and_sql,
    "hand-over": hand_over,
    "listener": listener,
    "Spark Connect": connect,
    "kills": kills,
    "moved": moved,
    "source to sink": source_to_sink,
}


def main(folder: str, *steps: str) -> None:
    os.chdir(folder)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    orderedmq.prepare_spark()
    for step in steps:
        began = time.monotonic()
        result = partial(STEPS[step], str(Path("store").absolute()))()
        seconds = round(time.monotonic() - began)
        print(json.dumps({"step": step, "spark": pyspark.__version__, "seconds": seconds, **result}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
