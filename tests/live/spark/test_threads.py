"""Threads in users' code: Spark looks up the format in the thread's session, where a new thread must register it first."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from pyspark.sql import DataFrame

import orderedmq
from tests.live.spark.conftest import Rig

TOPICS = ("invoices", "audit")


def everything(rig: Rig, topic: str) -> list[str]:
    return sorted(body for bodies in rig.bodies(topic).values() for body in bodies)


def test_outputs_are_written_side_by_side_in_foreachbatch(rig: Rig) -> None:
    rig.topic("in", queues=2, rows=30)
    for topic in TOPICS:
        rig.topic(topic, queues=2)
    together = Barrier(len(TOPICS), timeout=120)

    def side_by_side(df: DataFrame, batch_id: int) -> None:
        def write(topic: str) -> None:
            together.wait()
            orderedmq.register(df.sparkSession)
            writer = df.write.format("orderedmq").mode("append").option("path", rig.path).option("topic", topic)
            writer.option("txnAppId", f"side-by-side-{topic}").option("txnVersion", batch_id).save()

        with ThreadPoolExecutor(len(TOPICS)) as pool:
            list(pool.map(write, TOPICS))

    stream = rig.stream(topic="in", consumerGroup="g", maxOffsetsPerTrigger=10)
    writer = stream.writeStream.foreachBatch(side_by_side).option("checkpointLocation", str(rig.folder / "ck"))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    assert query.lastProgress is not None
    assert query.lastProgress.batchId == 2
    for topic in TOPICS:
        assert everything(rig, topic) == everything(rig, "in")
