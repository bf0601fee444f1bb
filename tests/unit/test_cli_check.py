"""``orderedmq check``: exit code 0 only for a sound store, and one line for each damaged part."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import sys
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


def change(store: Path, statement: str) -> None:
    """Change rows with the sqlite3 module, as another program might, without their seals."""
    with contextlib.closing(sqlite3.connect(store / "index.db", isolation_level=None)) as connection:
        assert connection.execute(statement).rowcount == 1


def test_reports_a_sound_store_and_does_not_change_it(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (store / "index.db").read_bytes()
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
    assert (store / "index.db").read_bytes() == before
    assert lines("--path", store, code=0) == lines(store, code=0)
    monkeypatch.chdir(store.parent)
    assert lines(store.name, code=0) == lines(store, code=0)


def test_checks_a_store_that_is_in_use(store: Path) -> None:
    with EmbeddedBroker(store, clock=FixedClock()) as broker:
        assert broker.log.topics()
        assert lines(store, code=0)[0]["sound"]


def test_names_each_damaged_entry_with_exit_code_1(store: Path) -> None:
    change(store, "UPDATE payloads SET content = zeroblob(length(content)) WHERE instr(content, 'qqqqqqqqq')")
    change(store, "UPDATE locks SET tenure = tenure + 1 WHERE consumer_group = 'g' AND queue_id = 1")
    change(store, "UPDATE topics SET retention_bytes = 1073741825 WHERE name = 'orders'")
    *findings, said = lines(store, code=1)
    assert said["sound"] is False
    texts = [str(one["finding"]) for one in findings]
    for words in (
        f"messages 0 to 1 of queue {QUEUES[2]}",
        "consumer_group='g', topic='orders', queue_id=1 of table locks",
        "name='orders' of table topics",
    ):
        assert [text for text in texts if words in text], texts


def test_damaged_pages_are_named(store: Path) -> None:
    """The header of every page of the tables says that its rows begin after the page's end."""
    content = bytearray((store / "index.db").read_bytes())
    for page in range(1, len(content) // 4096):
        if content[page * 4096] == 10:
            content[page * 4096 + 5 : page * 4096 + 7] = b"\xff\xff"
    (store / "index.db").write_bytes(content)
    *findings, said = lines(store, code=1)
    assert said["sound"] is False
    assert any("Page " in str(one["finding"]) for one in findings)


def test_a_folder_without_a_store_has_another_exit_code(tmp_path: Path) -> None:
    assert lines(tmp_path, code=3) == []
    assert lines("--namesrv", "localhost:1", code=2) == []


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_person_sees_a_table(store: Path) -> None:
    said, code = on_terminal(["check", str(store)])
    assert code == 0
    assert "is sound" in said
    change(store, "UPDATE locks SET tenure = tenure + 1 WHERE consumer_group = 'g' AND queue_id = 1")
    said, code = on_terminal(["check", str(store)])
    assert code == 1
    assert "finding" in said
    assert "consumer_group='g'" in said
