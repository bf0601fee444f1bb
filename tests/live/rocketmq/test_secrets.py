"""Spark never shows secrets given as options. With Spark Connect, this needs the setting in docs/guides/rocketmq.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

import orderedmq
from orderedmq.rocketmq.local.servers import Cluster
from tests.live.rocketmq.secrets_job import SECRETS
from tests.snippets import ROOT

PAGE = ROOT / "docs" / "guides" / "rocketmq.md"
SETTING = re.compile(r"^spark\.redaction\.string\.regex +(\S.*)$", re.MULTILINE)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["classic", "connect"])
@pytest.mark.timeout(400)
def test_spark_shows_no_secret_of_a_query(kind: str, cluster: Cluster, tmp_path: Path) -> None:
    [pattern] = SETTING.findall(PAGE.read_text())
    (tmp_path / "events").mkdir()
    with orderedmq.connect(namesrv_addr=cluster.address) as broker:
        if "secrets" not in {topic.name for topic in broker.log.topics()}:
            broker.admin.create_topic("secrets", 2)
        broker.log.append({broker.log.queues("secrets")[0]: pa.record_batch({"body": [b"x"] * 4})})
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.live.rocketmq.secrets_job",
            kind,
            cluster.address,
            str(tmp_path),
            *([pattern] if kind == "connect" else []),
        ],
        cwd=ROOT,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=350,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    files = {str(file): file.read_bytes().decode(errors="replace") for file in tmp_path.rglob("*") if file.is_file()}
    events = "".join(text for name, text in files.items() if "/events/" in name)
    # The logs exist and mention the queries.
    assert events.count(cluster.address if kind == "connect" else "secrets") > 3
    shown = {"stdout": done.stdout, "stderr": done.stderr, **files}
    assert {(name, secret) for name, text in shown.items() for secret in SECRETS if secret in text} == set()
