"""Queries that write to a real cluster, fail, and are repeated with their rows in another order."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

import orderedmq
from ordered_sink.commit import BatchWriter
from ordered_sink.keys import SeenKeys
from ordered_sink.writer import Written
from orderedmq.broker import Broker, SinkBatch
from orderedmq.errors import OptionError
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.routing.key_hash import key_hash64
from orderedmq.routing.selector import Keying
from tests.rocketmq.file_job import SPLITS, start
from tests.sink_tasks import written
from tests.waits import until

pytestmark = pytest.mark.spark

ROWS = 3000
ROOT = Path(__file__).parents[2]


@pytest.fixture
def broker(cluster: Cluster) -> Iterator[Broker]:
    with orderedmq.connect(namesrv_addr=cluster.address) as made:
        yield made


def counts(broker: Broker, topic: str) -> list[int]:
    queues = broker.log.queues(topic)
    bounds = broker.log.bounds(queues)
    return [bounds[queue].max_offset for queue in queues]


def bodies(broker: Broker, topic: str) -> list[str]:
    out: list[str] = []
    for queue, end in zip(broker.log.queues(topic), counts(broker, topic)):
        at = 0
        while at < end:
            rows = broker.log.pull(queue, at, end - at, 1 << 24, ("body",))
            out += [body.decode() for body in rows.column("body").to_pylist()]
            at += rows.num_rows
    return out


def spoiler(address: str, topic: str, flag: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a function that shuffles each attempt's rows. The second task's first attempt fails once the first task's rows are sent."""

    def spoil(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = pa.Table.from_batches(batches)
        context = TaskContext.get()
        if context is not None and context.partitionId() == 1 and not Path(flag).exists():
            Path(flag).touch()
            with orderedmq.connect(namesrv_addr=address) as broker:
                until(lambda: sum(counts(broker, topic)) == ROWS - len(rows), "the first task has sent its rows", 120)
            # By now the first task has usually ended and released its locks. Otherwise the next run waits for them.
            time.sleep(1)
            raise RuntimeError("the second task fails")
        yield from rows.take(random.sample(range(len(rows)), len(rows))).combine_chunks().to_batches()

    return spoil


@pytest.mark.holds("sink once")
@pytest.mark.parametrize("selector", ["hash", "random"])
def test_a_batch_that_comes_again_with_keyless_rows_in_another_order_is_there_once(
    spark: SparkSession, cluster: Cluster, broker: Broker, tmp_path: Path, selector: str
) -> None:
    topic = f"keyless-{selector}"
    broker.admin.create_topic(topic, 4)
    # Some rows occur twice, and a batch has rows for more than one queue.
    rows = spark.range(ROWS).selectExpr("concat('row-', id div 2 * 2) AS body").repartition(2)
    rows.write.parquet(str(tmp_path / "rows"))
    spoil = spoiler(cluster.address, topic, str(tmp_path / "spoilt"))
    options: dict[str, Any] = {
        "messageQueueSelector": selector,
        "shardingKey": "none",
        "checkpointLocation": str(tmp_path / "checkpoint"),
    }

    def run() -> None:
        stream = spark.readStream.schema("body string").parquet(str(tmp_path / "rows"))
        stream = stream.repartition(2).mapInArrow(spoil, "body string")
        writer = stream.writeStream.format("orderedmq").option("namesrvAddr", cluster.address).option("topic", topic)
        writer.options(**options).trigger(availableNow=True).start().awaitTermination()

    with pytest.raises(Exception, match="the second task fails"):
        run()
    assert min(counts(broker, topic)) > ROWS // 20
    run()
    assert Counter(bodies(broker, topic)) == Counter(f"row-{number // 2 * 2}" for number in range(ROWS))


def stamps(broker: Broker, topic: str) -> list[list[str]]:
    """Return sink, batch, run and partition from each message's stamp."""
    out: list[list[str]] = []
    for queue, end in zip(broker.log.queues(topic), counts(broker, topic)):
        at = 0
        while at < end:
            rows = broker.log.pull(queue, at, end - at, 1 << 24, ("properties",))
            out += [dict(pairs)["OMQ"].split(".") for pairs in rows.column("properties").to_pylist()]
            at += rows.num_rows
    return out


def file_job(cores: int, address: str, topic: str, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.rocketmq.file_job", str(cores), address, topic, str(folder)]
    with (folder / "job.txt").open("wb") as errors:
        return subprocess.Popen(command, cwd=ROOT, stdout=errors, stderr=errors, start_new_session=True)


@pytest.mark.holds("sink once")
def test_a_killed_query_that_goes_on_with_more_cores_writes_each_row_once(
    spark: SparkSession, quick_locks: Cluster, tmp_path: Path
) -> None:
    """Spark splits files by the number of cores, so the batch has other partitions. Some rows of different splits are equal.

    The query continues in the tests' session, which is configured to split files for four cores.
    """
    topic, files, lines = "files", 3, 2000
    expected: Counter[str] = Counter()
    (tmp_path / "rows").mkdir()
    for file in range(files):
        texts = [f"row-{file}-{line}" if line % 10 else f"same-{line % 100}" for line in range(lines)]
        expected.update(texts)
        text = "".join(f'{{"sharding_key": "{text[:5]}{len(text)}", "body": "{text}"}}\n' for text in texts)
        (tmp_path / "rows" / f"{file}.json").write_text(text)
    (tmp_path / "hold").touch()
    with orderedmq.connect(namesrv_addr=quick_locks.address) as broker:
        broker.admin.create_topic(topic, 4)
        with file_job(2, quick_locks.address, topic, tmp_path) as killed:
            until((tmp_path / "reached").exists, "a task has sent some of its rows", 240)
            until(lambda: sum(counts(broker, topic)) > files * lines // 3, "the first task has sent its rows", 120)
            workers = psutil.Process(killed.pid).children(recursive=True)
            # This kills Python and the JVM. The workers end when they notice it.
            os.killpg(killed.pid, signal.SIGKILL)
            assert psutil.wait_procs(workers, 120)[1] == []
        there = sum(counts(broker, topic))
        assert there < files * lines
        (tmp_path / "hold").unlink()
        settings = {**SPLITS, "spark.sql.files.minPartitionNum": "4"}
        try:
            for name, value in settings.items():
                spark.conf.set(name, value)
            assert start(spark, "orderedmq", str(tmp_path), namesrvAddr=quick_locks.address, topic=topic).awaitTermination(300)
        finally:
            for name in settings:
                spark.conf.unset(name)
        assert Counter(bodies(broker, topic)) == expected
        sent = Counter((run, partition) for _, _, run, partition, _ in stamps(broker, topic))
    runs = Counter(run for run, _ in sent)
    assert len(runs) == 2
    assert sorted(runs.values())[-1] > 2, "the second run must have had more partitions"


def test_a_key_in_two_tasks_is_warned_of_in_words_that_are_true_of_rows_that_are_out(
    cluster: Cluster, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    broker.admin.create_topic("conflicts", 1)
    options = {"namesrvAddr": cluster.address, "topic": "conflicts"}
    schema = StructType().add("sharding_key", "string").add("body", "string")
    [queue] = broker.log.queues("conflicts")
    messages = []
    for partition in range(2):
        staging = broker.outbox.open(SinkBatch(None), partition)
        staging.add(queue, pa.record_batch({"body": [b"1"], "sharding_key": ["k"]}))
        seen = SeenKeys()
        seen.add(key_hash64(pa.array(["k"])))
        messages.append(Written(broker.identity, SinkBatch(None), staging.receipt(), seen.to_bytes()))
    with caplog.at_level(logging.WARNING, "orderedmq"):
        BatchWriter(options, schema, False).commit(list(messages))
    assert "1 sharding keys occur in more than one task" in caplog.text
    assert "They were sent before this could be known" in caplog.text
    assert "onKeyConflict=warn" not in caplog.text
    assert counts(broker, "conflicts") == [2]
    with pytest.raises(OptionError, match="onKeyConflict=error is not supported"):
        BatchWriter({**options, "onKeyConflict": "error"}, schema, False)


def test_rows_without_the_key_column_are_refused_and_null_keys_and_lists_of_tags_are_warned_of(
    spark: SparkSession, cluster: Cluster, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    broker.admin.create_topic("unkeyed", 2)
    options = {"namesrvAddr": cluster.address, "topic": "unkeyed"}
    df = spark.range(20).selectExpr(
        "cast(id as string) body", "if(id < 3, null, id) sharding_key", "if(id < 5, 'A,B', 'A') tags"
    )
    df = df.coalesce(1)
    for bare in (df.select("body"), df.drop("sharding_key")):
        with pytest.raises(PySparkException, match=r"SCHEMA.MISSING_COLUMN.*set shardingKey=none"):
            bare.write.format("orderedmq").mode("append").options(**options).save()
    writer = BatchWriter(options, df.schema, False)
    with caplog.at_level(logging.WARNING, "orderedmq"):
        writer.commit(list(written(df, writer)))
    assert caplog.text.count("ORDEREDMQ_") == 2
    assert (
        "NULL_KEY] 3 of 20 rows have no key (column 'sharding_key' is null): they go to queues by their content" in caplog.text
    )
    assert "SEVERAL_TAGS] 5 of 20 rows" in caplog.text
    assert sum(counts(broker, "unkeyed")) == 20


@pytest.mark.holds("delayed rows")
def test_delayed_rows_go_to_the_queue_of_their_key_and_need_a_word_where_keys_have_an_order(
    spark: SparkSession, cluster: Cluster, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    broker.admin.create_topic("delayed", 4)
    options = {"namesrvAddr": cluster.address, "topic": "delayed"}
    df = spark.range(200).selectExpr(
        "concat('row-', id) body", "concat('key-', id div 2) sharding_key", "if(id % 2 = 1, 1, null) delay_time_level"
    )
    # Each key has its ordinary row in one task and its delayed row in the other.
    df = df.repartition(2, df.delay_time_level.isNull())
    timed = df.withColumn("deliver_timestamp", df.delay_time_level.cast("timestamp")).drop("delay_time_level")
    unordered = {**options, "delayedRows": "unordered"}
    for refused, given, words in (
        (df, options, "OPTION.CONFLICT.*delay_time_level.*delayedRows=unordered"),
        (timed, unordered, "OPTION.UNSUPPORTED.*deliver_timestamp.*timerWheelEnable is false"),
        (timed, {**unordered, "topic": "none-yet", "topicQueueNums": "4"}, "OPTION.UNSUPPORTED.*timerWheelEnable is false"),
    ):
        with pytest.raises(OptionError, match=words):
            BatchWriter(given, refused.schema, False)
    assert counts(broker, "delayed") == [0] * 4
    assert "none-yet" not in [topic.name for topic in broker.log.topics()]
    writer = BatchWriter(unordered, df.schema, False)
    with caplog.at_level(logging.WARNING, "orderedmq"):
        writer.commit(list(written(df, writer)))
    assert caplog.text == ""
    until(lambda: sum(counts(broker, "delayed")) == 200, "all rows have arrived")
    for number, queue in enumerate(broker.log.queues("delayed")):
        rows = broker.log.pull(queue, 0, 1000, 1 << 24, ("body", "sharding_key")).to_pylist()
        keys = Counter(row["sharding_key"] for row in rows)
        assert set(keys.values()) == {2}
        assert set(Keying().queues_of(pa.array(list(keys)), 4, "topic delayed")) == {number}
