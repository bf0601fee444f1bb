"""Spark Connect in a driver of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa

import orderedmq
from orderedmq.java import ensure_java

JOB = Path(__file__).with_name("connect_job.py")


def test_a_connect_session_reads_and_writes_queues_found_and_registered(tmp_path: Path) -> None:
    ensure_java()
    path = str(tmp_path / "store")
    with orderedmq.connect(path) as broker:
        broker.admin.create_topic("in", 2)
        for queue in broker.log.queues("in"):
            bodies = [f"{queue.queue_id}-{number}".encode() for number in range(50)]
            broker.log.append(queue, pa.record_batch({"body": pa.array(bodies, pa.binary())}))
    done = subprocess.run(
        [sys.executable, str(JOB), path, str(tmp_path / "ck")],
        env={**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["rows"] == 100
    assert result["distinct"] == 100
    assert result["again"] == 100
    assert "connect" in result["kind"]
    assert len(result["refused"]) == 4
    for reason in result["refused"]:
        assert "write an absolute path on the server" in reason
