"""A small run of the demo: its output, and a job that is really killed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from orderedmq.cli import app
from orderedmq.embedded.check import check
from tests.command import COMMAND

EVENTS = 20_000


def demo(folder: Path, *arguments: str, **environment: Path) -> subprocess.CompletedProcess[str]:
    """Run the demo in ``folder`` with these environment variables, and wait for its end."""
    command = [*COMMAND, "demo", "--path", str(folder), *arguments]
    env = os.environ | {name: str(value) for name, value in environment.items()}
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder.parent)


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_the_demo_kills_resumes_and_proves(tmp_path: Path) -> None:
    # Use a path with a blank, because temporary folders of some systems have one.
    folder, temporary = tmp_path / "a demo", tmp_path / "tmp"
    temporary.mkdir()
    done = demo(folder, "--events", str(EVENTS), "--batches", "6", TMPDIR=temporary)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    produced, killed, resumed, audited = (json.loads(line) for line in done.stdout.splitlines())
    assert (produced["step"], produced["events"], produced["queues"]) == ("produced", EVENTS, 8)
    # Some batches were committed, one was in flight, and the others were left to the second run.
    assert killed["step"] == "killed"
    assert killed["killed_in"] == killed["committed"] in (3, 4, 5)
    # The last batch may be published but not committed.
    assert 0 < killed["events"] <= EVENTS
    assert (resumed["killed_in"], resumed["committed"], resumed["events"]) == (None, 6, EVENTS)
    assert 0 < resumed["first_batch_after"] <= resumed["seconds"]
    assert audited["ok"] is True
    assert audited["expected"] == audited["actual"] | {"name": "flights"}
    assert audited["expected"]["messages"] == EVENTS
    assert [audited[kind] for kind in ("lost", "duplicated", "moved", "extra", "out_of_order")] == [0] * 5
    assert check(folder / "store") == []
    # No process remains, and the only files that remain are those that the demo mentions.
    assert [
        process for process in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(process.info["cmdline"] or [])
    ] == []
    assert sorted(entry.name for entry in folder.iterdir()) == ["checkpoint", "spark.log", "store"]
    assert list(temporary.iterdir()) == []


@pytest.mark.timeout(200)
def test_a_failed_job_is_reported_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # PYTHONPATH has priority, so this module replaces PySpark, which only the job imports.
    (tmp_path / "pyspark.py").write_text("print('noise'); raise SystemExit('[ORDEREDMQ_TEST.WHY] broken on purpose')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = CliRunner().invoke(app, ["demo", "--path", str(tmp_path / "d"), "--events", "1000", "--no-json"])
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"orderedmq: [ORDEREDMQ_DEMO.JOB_FAILED] the Spark job ended with exit code 1 (log: {tmp_path / 'd' / 'spark.log'}):"
    )
    assert line.endswith("[ORDEREDMQ_TEST.WHY] broken on purpose")
    assert "noise" in (tmp_path / "d" / "spark.log").read_text()
