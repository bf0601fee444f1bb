"""The guide "From Kafka, in order" over a Kafka of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.live.processes import from_kafka_job
from tests.snippets import ROOT


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.holds("sink once")
def test_a_copy_has_each_message_once_and_in_order_though_it_is_killed(tmp_path: Path) -> None:
    job = [sys.executable, "-m", from_kafka_job.__name__, str(tmp_path)]
    done = subprocess.run(job, cwd=ROOT, capture_output=True, text=True, timeout=500)
    if done.returncode == from_kafka_job.NO_JARS and os.environ.get("CI") != "true":
        pytest.skip(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
