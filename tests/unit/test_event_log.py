"""Events that processes write while a test reads them."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from tests import event_log


def test_a_line_that_a_process_is_writing_is_left_out_and_others_write_on(tmp_path: Path) -> None:
    event_log.write(tmp_path, event="first")
    # Half a line. A reader sees one while a line is written across two pages of the file system, or if the writer was killed.
    (tmp_path / "1.jsonl").write_text(json.dumps({"at": 0, "event": "earliest"}) + '\n{"event": "off')
    event_log.write(tmp_path, event="second")
    other = multiprocessing.get_context("fork").Process(target=event_log.write, args=(tmp_path,), kwargs={"event": "third"})
    other.start()
    other.join()
    assert [event["event"] for event in event_log.read(tmp_path)] == ["earliest", "first", "second", "third"]


def test_a_line_that_is_cut_off_elsewhere_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_text('{"event": "off\n' + json.dumps({"at": 1}) + "\n")
    with pytest.raises(ValueError):
        event_log.read(tmp_path)
