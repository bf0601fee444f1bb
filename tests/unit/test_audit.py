"""The audit reports every difference between two histories, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake
from pyiceberg.catalog.sql import SqlCatalog
from typer.testing import CliRunner

import orderedmq
from orderedmq.broker import Broker
from orderedmq.cli import app
from orderedmq.demo.play import Demo
from orderedmq.errors import OptionError, TopicError
from orderedmq.testing.store import TemporaryStore
from orderedmq.tools import audit as module
from orderedmq.tools.audit import Audit, audit
from orderedmq.tools.audit_sides import TableSide, TopicSide, in_memory, open_table

#: (key, identity, queue)
Row = tuple[str | None, str, int]


def history(**keys: str) -> list[Row]:
    """A history with the keys a, b, ... Each letter of a text is a message of that key, in this order: history(a="xyz")."""
    return [(key, name, 0) for key, names in keys.items() for name in names]


def table(name: str, rows: Sequence[Row]) -> TableSide:
    key, body, queue_id = zip(*rows, strict=True) if rows else ((), (), ())
    columns = {
        "sharding_key": pa.array(key, pa.string()),
        "body": pa.array(body, pa.string()),
        "queue_id": pa.array(queue_id, pa.int32()),
    }
    return TableSide(name, pyarrow.dataset.dataset(pa.table(columns)))


def compare(expected: Sequence[Row], actual: Sequence[Row], **settings: Any) -> Audit:
    return audit(table("expected", expected), table("actual", actual), **settings)


def findings(report: Audit) -> dict[str, int]:
    names = ("lost", "not_yet", "gaps", "duplicated", "moved", "extra", "out_of_order", "keys_affected")
    return {name: getattr(report, name) for name in names if getattr(report, name)}


def test_reports_nothing_for_the_same_history_in_another_order_of_keys() -> None:
    report = compare(history(a="abc", b="xy"), [*history(b="x"), *history(a="ab"), *history(b="y"), *history(a="c")])
    assert report.ok
    assert findings(report) == {}
    assert (report.expected.messages, report.expected.keys, report.actual.messages, report.actual.keys) == (5, 2, 5, 2)
    assert report.examples == []
    assert compare([], []).ok


@pytest.mark.parametrize(
    ("actual", "wrong"),
    [
        (history(a="acd", b="xyz"), {"lost": 1, "gaps": 1, "keys_affected": 1}),
        (history(a="ac", b="xyz"), {"lost": 2, "gaps": 1, "keys_affected": 1}),
        (history(a="abcd"), {"not_yet": 3, "keys_affected": 0}),
        ([], {"not_yet": 7, "keys_affected": 0}),
        (history(a="abbbcd", b="xyz"), {"duplicated": 2, "keys_affected": 1}),
        (history(a="acbd", b="xyz"), {"out_of_order": 1, "keys_affected": 1}),
        (history(a="dabc", b="xyz"), {"out_of_order": 3, "keys_affected": 1}),
        (history(a="abcd!", b="xyz"), {"extra": 1, "keys_affected": 1}),
        (history(a="abd", b="xycz"), {"moved": 1, "gaps": 1, "keys_affected": 2}),
        (history(a="abcd", b="xy", c="z"), {"moved": 1, "keys_affected": 2}),
        (history(a="adcc", b="xy?"), {"lost": 1, "gaps": 1, "not_yet": 1, "out_of_order": 1, "duplicated": 1, "extra": 1}),
    ],
)
def test_counts_each_kind_of_difference(actual: list[Row], wrong: dict[str, int]) -> None:
    report = compare(history(a="abcd", b="xyz"), actual)
    assert not report.ok
    assert findings(report) == {name: count for name, count in ({"keys_affected": 2} | wrong).items() if count}
    assert report.to_dict()["ok"] is False


def test_messages_after_the_last_one_of_their_queue_that_arrived_are_not_yet_there() -> None:
    expected: list[Row] = [("a", "1", 0), ("b", "2", 0), ("a", "3", 0), ("c", "4", 1), ("c", "5", 1), ("d", "6", 2)]
    # Another number of queues on the other side changes nothing.
    assert findings(compare(expected, [("b", "2", 7), ("c", "4", 7)])) == {"lost": 1, "not_yet": 3, "keys_affected": 1}
    report = compare(expected, [("a", "1", 0), ("b", "2", 0), ("c", "4", 1)])
    assert (report.ok, report.lost, report.not_yet) == (False, 0, 3)
    assert "3 messages of expected are not yet in actual" in report.verdict
    assert [(example.kind, example.side, example.id) for example in report.examples] == [
        ("not_yet", "expected", id) for id in "356"
    ]
    # A message that arrived under another key was reached as well.
    assert findings(compare(expected[:3], [("x", "3", 0)])) == {"lost": 2, "moved": 1, "keys_affected": 3}
    # Rows that name no queue have no ends of queues.
    rows = pa.record_batch({"sharding_key": ["a", "a"], "body": [b"1", b"2"]})
    unqueued = TableSide("expected", in_memory("expected", [rows]))
    assert findings(audit(unqueued, TableSide("actual", in_memory("actual", [rows.slice(0, 1)])))) == {
        "lost": 1,
        "keys_affected": 1,
    }


def test_matches_repeated_messages_of_a_key_in_turn() -> None:
    beats = history(a="xbxbx")
    report = compare(beats, beats)
    assert (report.ok, report.expected.repeated, report.actual.repeated) == (True, 3, 3)
    assert findings(compare(beats, history(a="xbxb"))) == {"not_yet": 1}
    assert findings(compare(beats, history(a="xbxbxx"))) == {"duplicated": 1, "keys_affected": 1}


def test_counts_rows_without_a_key_which_have_no_order() -> None:
    rows: list[Row] = [(None, name, number % 2) for number, name in enumerate("abcdefgh")]
    report = compare(rows, rows[::-1])
    assert (report.ok, report.expected.keys, report.actual.split_keys) == (True, 0, 0)
    assert findings(compare(rows, [*rows[:0:-1], rows[3]])) == {"lost": 1, "duplicated": 1}


def test_a_key_in_two_queues_has_no_order() -> None:
    rows: list[Row] = [("k", "a", 0), ("k", "b", 1), ("l", "c", 1)]
    report = compare(rows, rows)
    assert (report.expected.split_keys, report.actual.split_keys, report.ok) == (1, 1, False)
    assert compare(rows, [(key, name, 0) for key, name, _ in rows]).ok


@pytest.fixture(scope="module")
def many() -> TableSide:
    """400,000 rows, of which DuckDB needs 57 bytes each."""
    numbers = range(400_000)
    columns = {"sharding_key": pa.array(str(number % 1000) for number in numbers), "body": pa.array(map(str, numbers))}
    return TableSide("many", pyarrow.dataset.dataset(pa.table(columns)))


def test_writes_what_exceeds_its_memory_into_temporary_files(many: TableSide, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "THREADS", 1)
    monkeypatch.setattr(module, "MEMORY", "40MB")
    assert audit(many, many).ok
    monkeypatch.setattr(module, "MEMORY", "1MB")
    with pytest.raises(OSError, match="too little space"):
        audit(many, many)


def test_ctrl_c_ends_the_work_of_duckdb(many: TableSide) -> None:
    read = 0

    def interrupt_after_reading(rows: int) -> None:
        nonlocal read
        read += rows
        if read == 2 * many.messages:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()

    with pytest.raises(KeyboardInterrupt):
        audit(many, many, progress=interrupt_after_reading)


def test_without_duckdb_the_error_names_the_extra_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    result = CliRunner().invoke(app, ["audit", "./missing", "./missing"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "[ORDEREDMQ_OPTION.MISSING] orderedmq audit needs the package duckdb" in result.stderr
    with TemporaryStore() as store, pytest.raises(OptionError, match=r"pip install 'orderedmq\[audit\]'"):
        store.assert_same(tmp_path, tmp_path)
    with pytest.raises(OptionError, match=r"pip install 'orderedmq\[demo\]'"):
        Demo(tmp_path / "demo")
    assert not (tmp_path / "demo").exists()


# Topics and tables.


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with orderedmq.connect(tmp_path / "store") as broker:
        yield broker


def stored(path: Path, **settings: Any) -> TableSide:
    return TableSide(str(path), open_table(path), **settings)


def fill(broker: Broker, topic: str, *queues: list[tuple[str | None, bytes]]) -> None:
    broker.admin.create_topic(topic, len(queues))
    for queue, rows in zip(broker.log.queues(topic), queues, strict=True):
        if rows:
            columns = {
                "sharding_key": pa.array([key for key, _ in rows], pa.string()),
                "body": pa.array([body for _, body in rows]),
            }
            broker.log.append({queue: pa.record_batch(columns)})


def test_compares_topics_with_different_numbers_of_queues(broker: Broker) -> None:
    fill(broker, "one", [("k", b"1"), ("l", b"2"), ("k", b"3")], [("m", b"4")], [])
    fill(broker, "two", [("m", b"4"), ("k", b"1"), ("k", b"3"), ("l", b"2")])
    progress: list[int] = []
    report = audit(TopicSide(broker.log, "one"), TopicSide(broker.log, "two"), progress=progress.append)
    assert report.ok
    assert sum(progress) == 8
    with pytest.raises(TopicError, match="topic 'three' does not exist"):
        TopicSide(broker.log, "three")


def test_compares_a_topic_with_what_was_committed_to_a_delta_and_to_an_iceberg_table(broker: Broker, tmp_path: Path) -> None:
    fill(broker, "sent", [("k", b"1"), ("l", b"2"), ("k", b"3")])
    rows = pa.table({"sharding_key": ["l", "k", "k"], "body": pa.array([b"2", b"1", b"3"])})
    delta = tmp_path / "delta"
    write_deltalake(delta, rows)
    # A writer was killed before its commit.
    shutil.copy(next(delta.glob("*.parquet")), delta / "part-killed.parquet")
    lake = SqlCatalog("lake", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}/lake")
    lake.create_namespace("shop")
    iceberg = lake.create_table("shop.sent", rows.schema)
    iceberg.append(rows)
    lake.close()
    for table in (delta, Path(iceberg.metadata_location.removeprefix("file://"))):
        assert audit(TopicSide(broker.log, "sent"), stored(table)).ok


def test_compares_topics_from_a_time_on(broker: Broker) -> None:
    """Compare the outputs of a query and its canary: messages that the query wrote earlier are left out."""
    fill(broker, "live", [("k", b"1"), ("k", b"2")], [("m", b"3")])
    fill(broker, "canary", [], [])
    time.sleep(0.002)
    since = time.time_ns() // 1000
    time.sleep(0.002)
    for topic, rows in (("live", [b"4", b"5"]), ("canary", [b"4", b"6"])):
        columns = {"sharding_key": ["k", "k"], "body": rows}
        broker.log.append({broker.log.queues(topic)[0]: pa.record_batch(columns)})
    sides = [TopicSide(broker.log, topic, since=since) for topic in ("live", "canary")]
    assert [side.messages for side in sides] == [2, 2]
    report = audit(*sides)
    assert findings(report) == {"not_yet": 1, "extra": 1, "keys_affected": 1}
    assert [(example.kind, example.where) for example in report.examples] == [
        ("not_yet", "queue 0 offset 3"),
        ("extra", "queue 0 offset 1"),
    ]
    assert audit(*(TopicSide(broker.log, "live", since=at) for at in (1, None))).ok
    assert TopicSide(broker.log, "live", since=since + 3_600_000_000).messages == 0


def test_examples_of_topics_name_queue_and_offset(broker: Broker) -> None:
    fill(broker, "one", [("x", b"0")], [("k", b"1"), ("k", b"2"), ("k", b"3")])
    fill(broker, "two", [("x", b"0"), ("k", b"2"), ("k", b"1"), ("k", b"\xff" * 100)], [])
    # Messages below the queue's first remaining offset are not part of the topic.
    broker.log.append({broker.log.queues("two")[1]: pa.record_batch({"body": [b"old"]})})
    broker.admin.trim("two", {broker.log.queues("two")[1]: 1})
    report = audit(TopicSide(broker.log, "one"), TopicSide(broker.log, "two"))
    assert [(example.kind, example.where, example.key, example.id[:4]) for example in report.examples] == [
        ("not_yet", "queue 1 offset 2", "k", "3"),
        ("out_of_order", "queue 0 offset 2", "k", "1"),
        ("extra", "queue 0 offset 3", "k", "�" * 4),
    ]
    assert len(report.examples[2].id) == 80


def test_a_field_of_json_identifies_messages_whose_bodies_differ(broker: Broker) -> None:
    fill(broker, "one", [("k", b'{"id":1}'), ("k", b'{"id":2}')])
    fill(broker, "two", [("k", b'{"x":true,"id":"1"}'), ("k", b'{"id":2,"x":[1]}')])
    assert audit(TopicSide(broker.log, "one", "id"), TopicSide(broker.log, "two", "id")).ok
    assert findings(audit(TopicSide(broker.log, "one"), TopicSide(broker.log, "two")))["not_yet"] == 2
    with pytest.raises(OptionError, match=r"queue two/embedded/0 offset 0: there is no field 'name'"):
        audit(TopicSide(broker.log, "one", "id"), TopicSide(broker.log, "two", "name"))
    fill(broker, "text", [("k", b'{"id":1}'), ("k", b"two")])
    with pytest.raises(OptionError, match="queue text/embedded/0 offset 1: the text is not JSON"):
        audit(TopicSide(broker.log, "one", "id"), TopicSide(broker.log, "text", "id"))


def test_compares_a_topic_with_columns_of_a_table(broker: Broker, tmp_path: Path) -> None:
    fill(broker, "one", [("1", b"a"), ("2", b"b"), ("1", b"c"), (None, b"d")])
    table = pa.table({"order": [1, 1, 2, None], "text": ["c", "a", "b", "d"], "seq": [30, 10, 20, 40]})
    pq.write_table(table, tmp_path / "t.parquet")
    columns = {"key_column": "order", "id_column": "text"}
    assert audit(TopicSide(broker.log, "one"), stored(tmp_path / "t.parquet", order_column="seq", **columns)).ok
    report = audit(TopicSide(broker.log, "one"), stored(tmp_path / "t.parquet", **columns))
    assert findings(report) == {"out_of_order": 1, "keys_affected": 1}
    assert (report.examples[0].where, report.examples[0].key, report.examples[0].id) == ("row 1", "1", "a")


def test_reads_what_sparks_file_sink_has_committed_in_the_order_of_offsets(broker: Broker, tmp_path: Path) -> None:
    fill(broker, "one", [("a", b'{"id":1}'), ("a", b'{"id":2}')], [("b", b'{"id":3}')])
    rows = {"queue_id": [0, 0, 1], "queue_offset": [0, 1, 0], "sharding_key": ["a", "a", "b"]}
    bodies = [b'{"id":1,"v":7}', b'{"id":2,"v":8}', b'{"id":3,"v":9}']
    out = tmp_path / "out"
    (out / "_spark_metadata").mkdir(parents=True)
    # The order of rows follows from their offsets, not from the names of files. One file was left by a repeated batch.
    for name, picked in (("part-z", [0]), ("part-a", [1, 2]), ("part-b", [1, 2])):
        part = pa.table({**rows, "body": bodies}).take(picked)
        pq.write_table(part, out / f"{name}.parquet")
    assert audit(TopicSide(broker.log, "one", "id"), stored(out / "part-z.parquet", id_field="id")).not_yet == 2
    log = [["part-z"], ["part-a"]]
    for number, names in enumerate(log):
        lines = [json.dumps({"path": f"file://{out}/{name}.parquet", "action": "add"}) for name in names]
        (out / "_spark_metadata" / str(number)).write_text("\n".join(["v1", *lines]))
    assert audit(TopicSide(broker.log, "one", "id"), stored(out, id_field="id")).ok
    (out / "_spark_metadata" / "1.compact").write_text(
        "\n".join(["v1", *(json.dumps({"path": f"file:///moved/{name}.parquet"}) for name in ("part-z", "part-a"))])
    )
    assert audit(TopicSide(broker.log, "one", "id"), stored(out, id_field="id")).ok


def test_refuses_a_table_that_cannot_be_compared(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"sharding_key": ["a"], "body": pa.array([None], pa.string()), "at": ["x"], "l": [[1]]}),
        tmp_path / "t.parquet",
    )
    with pytest.raises(TopicError, match="the Parquet file or directory .* does not exist"):
        stored(tmp_path / "none")
    (tmp_path / "text").write_text("no table")
    with pytest.raises(OptionError, match="cannot be read as Parquet"):
        stored(tmp_path / "text")
    with pytest.raises(OptionError, match="has no column 'key', only sharding_key, body, at, l"):
        stored(tmp_path / "t.parquet", key_column="key")
    for settings, why in (
        ({}, "row 0: there is no value to identify the message"),
        ({"id_column": "sharding_key", "order_column": "at"}, "Give a column of whole numbers or times"),
        ({"id_column": "l"}, "'l' of .* is list<.*>, which cannot be compared"),
    ):
        with pytest.raises(OptionError, match=why):
            list(stored(tmp_path / "t.parquet", **settings).rows())
