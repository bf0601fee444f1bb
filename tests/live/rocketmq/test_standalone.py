"""A real Spark cluster over a real RocketMQ: a master and two workers, each in its own folder. They share only the network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import orderedmq
from orderedmq.broker import Broker
from orderedmq.rocketmq.local.servers import Cluster
from tests.quick_spark import jvm_options
from tests.standalone import Standalone
from tests.waits import until

pytestmark = [pytest.mark.nightly, pytest.mark.spark]

#: The driver's program: a query from topic to topic that leaves a mark in each folder in which rows are processed. While a folder
#: has a file "hold", tasks there stop and create a file "held". The query begins when both workers have registered, and runs
#: until the job's input ends.
JOB = """
import json, sys, time
from pathlib import Path
from pyspark.sql import SparkSession
from pyspark.sql.types import BinaryType, StringType, StructType

url, address, checkpoint, source, target, options = sys.argv[1:]
spark = (SparkSession.builder.master(url).appName("standalone").config("spark.driver.host", "127.0.0.1")
         .config("spark.cores.max", "2").config("spark.scheduler.minRegisteredResourcesRatio", "1.0")
         .config("spark.scheduler.maxRegisteredResourcesWaitingTime", "300s")
         .config("spark.executor.memory", "512m").config("spark.executor.extraJavaOptions", options)
         .config("spark.ui.enabled", "false").getOrCreate())
spark.sparkContext.setLogLevel("ERROR")

def mark(batches):
    for batch in batches:
        Path("rows-were-here").touch()
        yield batch
        while Path("hold").exists():
            Path("held").touch()
            time.sleep(0.05)

rows = (spark.readStream.format("orderedmq").option("namesrvAddr", address).option("topic", source)
        .option("consumerGroup", target + "-group").option("maxOffsetsPerTrigger", 80)
        .schema("body binary, sharding_key string").load())
query = (rows.mapInArrow(mark, rows.schema).writeStream.format("orderedmq").option("namesrvAddr", address).option("topic", target)
         .option("checkpointLocation", checkpoint).trigger(processingTime="500 milliseconds").start())
print("started", flush=True)
sys.stdin.read()
failure = query.exception()
query.stop()
print(json.dumps({"failure": None if failure is None else str(failure)}), flush=True)
spark.stop()
"""


@pytest.fixture
def standalone(tmp_path: Path) -> Iterator[Standalone]:
    standalone = Standalone(tmp_path)
    yield standalone
    standalone.close()


def send(broker: Broker, topic: str, rows: int) -> None:
    """Append ``rows`` messages to each queue. The body is queue and offset."""
    queues = broker.log.queues(topic)
    ends = broker.log.bounds(queues)
    for queue in queues:
        places = range(ends[queue].max_offset, ends[queue].max_offset + rows)
        bodies = [f"{queue.queue_id}:{place}".encode() for place in places]
        keys = [f"{queue.queue_id}-{place % 5}" for place in places]
        broker.log.append({queue: pa.record_batch({"body": pa.array(bodies, pa.binary()), "sharding_key": keys})})


def read(broker: Broker, topic: str) -> list[dict[str, Any]]:
    """Return all rows in order, queue by queue."""
    out: list[dict[str, Any]] = []
    for queue in broker.log.queues(topic):
        at, end = 0, broker.log.bounds([queue])[queue].max_offset
        while at < end:
            batch = broker.log.pull(queue, at, end - at, 1 << 24, ("body", "sharding_key"))
            out += [{**row, "queue": queue} for row in batch.to_pylist()]
            at += batch.num_rows
    return out


@pytest.mark.holds("workers without a shared disk")
@pytest.mark.timeout(1500)
def test_workers_in_separate_folders_share_the_queues_and_replace_each_other(
    standalone: Standalone, quick_locks: Cluster, tmp_path: Path
) -> None:
    """Uses the cluster where a dead attempt's locks end after 3 s, because otherwise its successor waits for up to 60 s."""
    with orderedmq.connect(namesrv_addr=quick_locks.address) as broker:
        for topic in ("standalone-in", "standalone-out"):
            broker.admin.create_topic(topic, 4)
        send(broker, "standalone-in", 60)
        home = tmp_path / "driver"
        home.mkdir()
        (home / "job.py").write_text(JOB)
        names = (
            standalone.url,
            quick_locks.address,
            str(tmp_path / "checkpoint"),
            "standalone-in",
            "standalone-out",
            jvm_options(),
        )
        environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
        with (home / "errors.log").open("wb") as errors:
            job = subprocess.Popen(
                [sys.executable, "job.py", *names],
                cwd=home, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip
        try:

            def through(rows: int) -> Callable[[], bool]:
                def done() -> bool:
                    assert job.poll() is None, (home / "errors.log").read_text()[-3000:]
                    return sum(at.max_offset for at in broker.log.bounds(broker.log.queues("standalone-out")).values()) >= rows

                return done

            def marks() -> dict[str, Path]:
                """Return, for each worker, its executor's folder in which rows were processed."""
                return {mark.relative_to(tmp_path).parts[0]: mark.parent for mark in tmp_path.rglob("rows-were-here")}

            sent = 60
            until(through(4 * sent), "all rows are copied", 300.0)
            victim = marks()["worker-1"]
            (victim / "hold").touch()
            send(broker, "standalone-in", 100)
            sent += 100
            until((victim / "held").exists, "a task of the first worker is half-way", 180.0)
            standalone.kill(standalone.workers[0])
            until(through(4 * sent), "the other worker copies the remaining rows", 300.0)
            answer, _ = job.communicate(timeout=180)
            assert json.loads(answer.splitlines()[-1])["failure"] is None
        finally:
            if job.poll() is None:
                job.kill()
                job.communicate()
        rows = read(broker, "standalone-out")
    assert sorted(row["body"] for row in rows) == sorted(f"{q}:{n}".encode() for q in range(4) for n in range(sent))
    lanes = defaultdict(list)
    for row in rows:
        lanes[row["sharding_key"], row["queue"]].append(int(row["body"].decode().partition(":")[2]))
    assert len({key for key, _ in lanes}) == len(lanes), "each key must be in one queue"
    assert all(numbers == sorted(numbers) for numbers in lanes.values())
    assert marks().keys() == {"worker-1", "worker-2"}
