"""``orderedmq check``: exit code 0 only for a sound store, and one line for each damaged part."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orderedmq.cli import app
from orderedmq.embedded.broker import EmbeddedBroker
from tests.command import on_terminal
from tests.unit.small_store import QUEUES, FixedClock, make


@pytest.fixture
def store(tmp_path: Path) -> Path:
    broker, _, _ = make(tmp_path / "store")
    broker.close()
    return tmp_path / "store"


def lines(*arguments: object, code: int) -> list[dict[str, object]]:
    result = CliRunner().invoke(app, ["check", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def change(store: Path, old: bytes, new: Callable[[bytes], bytes]) -> None:
    """Replace every occurrence, because old pages are still in the file."""
    content = (store / "data.mdb").read_bytes()
    assert old in content
    (store / "data.mdb").write_bytes(content.replace(old, new(old)))


def test_reports_a_sound_store_and_does_not_change_it(store: Path) -> None:
    before = (store / "data.mdb").read_bytes()
    [said] = lines(store, code=0)
    assert said.pop("path") == str(store)
    assert len(str(said.pop("unused")).split(",")) == 1, "expected one unused file: the rows that a task has staged"
    assert said == {
        "sound": True,
        "foreign": [],
        "entries": said["entries"],
        "payloads": 7,
        "payload_bytes": said["payload_bytes"],
    }
    assert (store / "data.mdb").read_bytes() == before
    assert lines("--path", store, code=0) == lines(store, code=0)


def test_checks_a_store_that_is_in_use(store: Path) -> None:
    with EmbeddedBroker(store, clock=FixedClock()) as broker:
        assert broker.log.topics()
        assert lines(store, code=0)[0]["sound"]


def test_names_each_damaged_entry_with_exit_code_1(store: Path) -> None:
    change(store, b"q" * 3000, lambda old: b"Q" + old[1:])
    change(store, b'"tenure": 2', lambda _: b'"tenure": 3')
    change(store, b'"retention_bytes": 1073741824', lambda _: b'"retention_bytes": 1073741825')
    *findings, said = lines(store, code=1)
    assert said["sound"] is False
    texts = [str(one["finding"]) for one in findings]
    for words in (f"messages 0 to 1 of queue {QUEUES[2]}", f"lock of group 'g' on queue {QUEUES[1]}", "topic 'orders' fails"):
        assert [text for text in texts if words in text], texts


def test_pages_that_lmdb_would_not_survive_are_named(store: Path) -> None:
    """Damage every page of a tree: the page's header says that the nodes begin after the page's end, so they cannot be read."""
    content = bytearray((store / "data.mdb").read_bytes())
    for page in range(2, len(content) // 4096):
        if content[page * 4096 + 10] == 2:
            content[page * 4096 + 14 : page * 4096 + 16] = b"\xff\xff"
    (store / "data.mdb").write_bytes(content)
    *findings, said = lines(store, code=1)
    assert said["sound"] is False
    assert any("page " in str(one["finding"]) for one in findings)


def test_a_folder_without_a_store_has_another_exit_code(tmp_path: Path) -> None:
    assert lines(tmp_path, code=3) == []
    assert lines("--namesrv", "localhost:1", code=2) == []


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_person_sees_a_table(store: Path) -> None:
    said, code = on_terminal(["check", str(store)])
    assert code == 0
    assert "is sound" in said
    change(store, b'"tenure": 2', lambda _: b'"tenure": 3')
    said, code = on_terminal(["check", str(store)])
    assert code == 1
    assert "finding" in said
    assert "lock of group 'g'" in " ".join(said.split())
