"""Spark Connect in a separate driver that all tests share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import orderedmq
from orderedmq.java import ensure_java

JOB = Path(__file__).with_name("connect_job.py")


@pytest.fixture(scope="module")
def connected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The output of the job, run on a store with several topics."""
    ensure_java()
    folder = tmp_path_factory.mktemp("connect")
    path = str(folder / "store")
    with orderedmq.connect(path) as broker:
        broker.admin.create_topic("keyed", 1)
        keys = ["fine", "poisoned", "also fine"] * 3
        broker.log.append({broker.log.queues("keyed")[0]: pa.record_batch({"body": [b"x"] * 9, "sharding_key": keys})})
        broker.admin.create_topic("in", 2)
        for queue in broker.log.queues("in"):
            bodies = [f"{queue.queue_id}-{number}".encode() for number in range(50)]
            broker.log.append({queue: pa.record_batch({"body": pa.array(bodies, pa.binary())})})
    done = subprocess.run(
        [sys.executable, str(JOB), path, str(folder)],
        env={**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=350,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    assert "connect" in said["kind"]
    return said


@pytest.mark.timeout(400)
def test_a_connect_session_reads_and_writes_queues_found_and_registered(connected: dict[str, Any]) -> None:
    copied = connected["copied"]
    assert (copied["rows"], copied["distinct"], copied["again"]) == (100, 100, 100)
    assert len(copied["refused"]) == 4
    for reason in copied["refused"]:
        assert "Write an absolute path on the server" in reason


@pytest.mark.timeout(400)
def test_in_a_connect_session_a_poisoned_key_is_parked_and_comes_back_in_order(connected: dict[str, Any]) -> None:
    said = connected["by key"]
    others = [f"fine {offset}" for offset in (0, 3, 6)], [f"also fine {offset}" for offset in (2, 5, 8)]
    poisoned = said["poisoned"]
    assert [line for line in poisoned if line.startswith("fine")] == others[0]
    assert [line for line in poisoned if line.startswith("also")] == others[1]
    assert [line for line in poisoned if line.startswith("poisoned")] == ["poisoned 1"]
    assert said["parked of poisoned"] == 3
    assert said["healed"] == [f"poisoned {offset}" for offset in (1, 4, 7)]
    assert said["parked of healed"] == 0
