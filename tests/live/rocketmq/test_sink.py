"""Queries that write to a real cluster, fail, and are repeated with their rows in another order."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import orderedmq
from orderedmq.broker import Broker
from orderedmq.errors import OptionError
from orderedmq.rocketmq.local.servers import Cluster
from pyspark_orderedmq import DefaultSource
from tests.contract import support
from tests.contract.support import rows
from tests.live.rocketmq.file_job import SPLITS, start
from tests.micro_batches import Checkpoint, MicroBatchLoop, batch_write
from tests.waits import until

ROWS = 3000
ROOT = Path(__file__).parents[3]


@pytest.fixture
def broker(cluster: Cluster) -> Iterator[Broker]:
    with orderedmq.connect(namesrv_addr=cluster.address) as broker:
        yield broker


def counts(broker: Broker, topic: str) -> list[int]:
    queues = broker.log.queues(topic)
    bounds = broker.log.bounds(queues)
    return [bounds[queue].max_offset for queue in queues]


def bodies(broker: Broker, topic: str) -> list[str]:
    return [body for queue in broker.log.queues(topic) for body in support.bodies(broker, queue)]


@pytest.mark.holds("sink once")
@pytest.mark.parametrize("selector", ["hash", "random"])
def test_a_batch_that_comes_again_with_keyless_rows_in_another_order_is_there_once(
    cluster: Cluster, broker: Broker, query: Callable[..., MicroBatchLoop], selector: str
) -> None:
    """The second task's first attempt fails after the first task has sent its rows. Each attempt has its rows in another order."""
    source, target, checkpoint = f"rows-{selector}", f"keyless-{selector}", Checkpoint()
    broker.admin.create_topic(source, 2)
    broker.admin.create_topic(target, 4)
    # Some rows occur twice, and a batch has rows for more than one queue.
    texts = [f"row-{number // 2 * 2}" for number in range(ROWS)]
    first, second = broker.log.queues(source)
    broker.log.append({first: rows(texts[::3]), second: rows([*texts[1::3], *texts[2::3]])})
    failed: list[int] = []

    def spoil(given: pa.RecordBatch) -> pa.RecordBatch:
        if not failed and given.num_rows and given["queue_id"][0].as_py() == second.queue_id:
            failed.append(sum(counts(broker, target)))
            raise RuntimeError("the second task fails")
        order = random.sample(range(given.num_rows), given.num_rows)
        return given.select(["body"]).take(pa.array(order, pa.int64()))

    def run() -> MicroBatchLoop:
        options = {"namesrvAddr": cluster.address, "topic": target, "messageQueueSelector": selector, "shardingKey": "none"}
        read = {"namesrvAddr": cluster.address, "topic": source, "consumerGroup": target, "consumeFromWhere": "first"}
        return query(read, options, checkpoint, rows=spoil, available_now=True).process_all_available()

    with pytest.raises(RuntimeError, match="the second task fails"):
        run()
    assert failed == [ROWS // 3]
    assert min(counts(broker, target)) > ROWS // 20
    assert run().rows == [ROWS]
    assert Counter(bodies(broker, target)) == Counter(texts)


def stamps(broker: Broker, topic: str) -> list[list[str]]:
    """Return sink, batch, run and partition from each message's stamp."""
    messages = [row for queue in broker.log.queues(topic) for row in support.read(broker, queue, columns=("properties",))]
    return [dict(row["properties"])["OMQ"].split(".") for row in messages]


def file_job(cores: int, address: str, topic: str, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.live.rocketmq.file_job", str(cores), address, topic, str(folder)]
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


def test_a_warning_says_that_rows_of_a_key_in_two_tasks_were_sent(
    cluster: Cluster, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    broker.admin.create_topic("conflicts", 1)
    options = {"namesrvAddr": cluster.address, "topic": "conflicts"}
    tasks = [rows(["1"], sharding_key=["k"])] * 2
    with caplog.at_level(logging.WARNING, "orderedmq"):
        batch_write(DefaultSource(options), tasks)
    assert "1 sharding keys occur in more than one task" in caplog.text
    assert "They were sent before this could be known" in caplog.text
    assert "onKeyConflict=warn" not in caplog.text
    assert counts(broker, "conflicts") == [2]
    with pytest.raises(OptionError, match="UNSUPPORTED.*onKeyConflict"):
        batch_write(DefaultSource({**options, "onKeyConflict": "error"}), tasks)
