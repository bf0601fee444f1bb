"""The benchmark against Kafka runs every case on a real Kafka, and leaves neither processes nor files."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from bench.figures import RESULTS, ROOT, VERSUS
from bench.run import CASES
from tests.waits import until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


def start(folder: Path, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "bench.run", "--quick", *args],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def servers(folder: Path) -> list[int]:
    """The ids of processes whose command line names Kafka and ``folder``."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if str(folder) in (line := " ".join(process.info["cmdline"] or ())) and "kafka" in line
    ]


def test_every_case_runs_on_a_real_kafka(tmp_path: Path) -> None:
    kept = RESULTS.read_bytes()
    bench = start(tmp_path, "--kafka")
    printed, _ = bench.communicate()
    if found := re.search(r"skipped: .*cannot be fetched.*", printed):
        pytest.skip(found[0])
    assert bench.returncode == 0, printed
    for case in (name for name in CASES if name.startswith(VERSUS)):
        assert re.search(rf"^{case} \(\d+ s\)$", printed, re.M), printed
    # A figure above 0 shows that its side has done its work. Kafka's server may be idle while our side works.
    lines = [
        line for line in printed.splitlines() if re.search(r" (M rows/s|µs/row|ms)\b", line) and "Kafka's server" not in line
    ]
    assert len(lines) > 30
    assert not [line for line in lines if re.search(r" \(?(0|-\S+|nan|inf)\)? ", line)]
    assert servers(tmp_path) == []
    assert list(tmp_path.glob("orderedmq-bench-*")) == []
    assert RESULTS.read_bytes() == kept


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_kafka_ends_with_a_bench_that_does_not_end_by_itself(number: signal.Signals, tmp_path: Path) -> None:
    bench = start(tmp_path, "--only", "kafka-start")

    def up() -> bool:
        """Whether both sides are being filled. Before that, an interrupted session would leave its JVM running, because PySpark
        does not end it.
        """
        return bench.poll() is not None or bool(list(tmp_path.glob("orderedmq-bench-*/embedded-*/data.mdb")))

    until(up, "the session and Kafka have started", 300)
    if bench.poll() is not None:
        assert bench.stdout is not None
        printed = bench.stdout.read()
        assert "cannot be fetched" in printed, printed
        pytest.skip("Kafka's jars cannot be fetched")
    assert servers(tmp_path)
    bench.send_signal(number)
    bench.communicate(timeout=120)
    until(lambda: servers(tmp_path) == [], "Kafka has ended")
