"""RocketMQ's own ProcessQueue against the recording with which tests/unit/test_process_queue.py compares ours."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from orderedmq.java import ensure_java
from orderedmq.rocketmq.local.jars import fetch_jars

PROGRAM = Path(__file__).parents[2] / "unit" / "JavaProcessQueue.java"


def test_the_recording_is_what_javas_class_does(tmp_path: Path) -> None:
    java = str(ensure_java())
    if "jdk.compiler" not in subprocess.run([java, "--list-modules"], capture_output=True, text=True, check=True).stdout:
        pytest.skip(f"{java} has no compiler")
    command = [java, f"-Duser.home={tmp_path}", "-cp", f"{fetch_jars()}/*", str(PROGRAM)]
    recording = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert recording == PROGRAM.with_name("java_process_queue.json").read_text()
