"""The audit finds everything that is wrong with a history, and nothing else."""

from __future__ import annotations

import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import orderedmq
from orderedmq.broker import Broker, QueueBounds
from orderedmq.errors import OptionError, TopicError
from orderedmq.model import MessageQueue
from orderedmq.tools.audit import NO_KEY, ROW, Audit, Location, Rows, audit
from orderedmq.tools.audit_sides import TableSide, TopicSide, identities

#: (key, identity, queue); 0 means no key.
Row = tuple[int, int, int]


class Made:
    """A hand-written history."""

    def __init__(self, name: str, rows: Sequence[Row]) -> None:
        self.name = name
        self.messages = len(rows)
        self._rows = rows

    def rows(self) -> Iterator[Rows]:
        for begin in range(0, len(self._rows), 3):
            part = self._rows[begin : begin + 3]
            yield np.array([(key, name, begin + place, 0, lane) for place, (key, name, lane) in enumerate(part)], ROW)

    def locate(self, rows: Sequence[int]) -> list[Location]:
        return [Location(f"row {number}", str(self._rows[number][0]), str(self._rows[number][1])) for number in rows]


def history(**keys: str) -> list[Row]:
    """A history with the keys a, b, ... Each letter of a text is a message of that key, in this order: history(a="xyz")."""
    return [(ord(key), ord(name), 0) for key, names in keys.items() for name in names]


def compare(expected: list[Row], actual: list[Row], **settings: Any) -> Audit:
    return audit(Made("expected", expected), Made("actual", actual), **settings)


def findings(found: Audit) -> dict[str, int]:
    names = ("lost", "lost_at_end", "gaps", "duplicated", "moved", "extra", "out_of_order", "keys_affected")
    return {name: getattr(found, name) for name in names if getattr(found, name)}


def test_the_same_history_is_fine_in_whatever_order_its_keys_come() -> None:
    found = compare(history(a="abc", b="xy"), [*history(b="x"), *history(a="ab"), *history(b="y"), *history(a="c")])
    assert found.ok
    assert findings(found) == {}
    assert (found.expected.messages, found.expected.keys, found.actual.messages, found.actual.keys) == (5, 2, 5, 2)
    assert found.examples == []


def test_nothing_against_nothing() -> None:
    found = compare([], [])
    assert found.ok
    assert found.expected.messages == found.actual.keys == 0


@pytest.mark.parametrize(
    ("actual", "wrong"),
    [
        (history(a="acd", b="xyz"), {"lost": 1, "gaps": 1, "keys_affected": 1}),
        (history(a="d", b="xyz"), {"lost": 3, "gaps": 1, "keys_affected": 1}),
        (history(a="ac", b="xyz"), {"lost": 2, "gaps": 1, "lost_at_end": 1, "keys_affected": 1}),
        (history(a="abcd"), {"lost": 3, "lost_at_end": 3, "keys_affected": 1}),
        ([], {"lost": 7, "lost_at_end": 7, "keys_affected": 2}),
        (history(a="abcd", b="xyzxyz"), {"duplicated": 3, "keys_affected": 1}),
        (history(a="abbbcd", b="xyz"), {"duplicated": 2, "keys_affected": 1}),
        (history(a="acbd", b="xyz"), {"out_of_order": 1, "keys_affected": 1}),
        (history(a="bcda", b="xyz"), {"out_of_order": 1, "keys_affected": 1}),
        (history(a="dabc", b="xyz"), {"out_of_order": 3, "keys_affected": 1}),
        (history(a="abcd", b="zyx"), {"out_of_order": 2, "keys_affected": 1}),
        (history(a="abcd!", b="xyz"), {"extra": 1, "keys_affected": 1}),
        (history(a="abcd", b="xyz", c="!"), {"extra": 1, "keys_affected": 1}),
        (history(a="abd", b="xycz"), {"moved": 1, "gaps": 1, "keys_affected": 2}),
        (history(a="abcd", b="xy", c="z"), {"moved": 1, "keys_affected": 2}),
        # The second half is repeated, as by a replayed batch: messages are duplicated, but their first occurrences are in order.
        (history(a="abcdcd", b="xyz"), {"duplicated": 2, "keys_affected": 1}),
        (history(a="adcc", b="xy?"), {"lost": 2, "gaps": 1, "lost_at_end": 1, "out_of_order": 1, "duplicated": 1, "extra": 1}),
    ],
)
@pytest.mark.parametrize("bucket_rows", [1000, 3])
def test_a_bad_history(actual: list[Row], wrong: dict[str, int], bucket_rows: int) -> None:
    found = compare(history(a="abcd", b="xyz"), actual, bucket_rows=bucket_rows)
    assert not found.ok
    assert findings(found) == {"keys_affected": 2} | wrong
    assert found.to_dict()["ok"] is False


def test_bodies_that_a_query_changed_are_said_to_differ() -> None:
    found = compare(history(a="ab", b="x"), history(a="AB", b="X"))
    assert findings(found) == {"lost": 3, "lost_at_end": 3, "extra": 3, "keys_affected": 2}
    assert "whole bodies are compared and all differ" in found.verdict
    assert "all differ" not in compare(history(a="ab", b="x"), history(a="AB", b="x")).verdict
    assert "all differ" not in compare(history(a="ab"), []).verdict


def test_what_a_key_has_several_times_is_matched_in_turn() -> None:
    beats = history(a="xbxbx")
    assert compare(beats, beats).ok
    assert compare(beats, beats).expected.repeated == 3
    assert findings(compare(beats, history(a="xbxb"))) == {"lost": 1, "lost_at_end": 1, "keys_affected": 1}
    assert findings(compare(beats, history(a="xbxbxx"))) == {"duplicated": 1, "keys_affected": 1}


def test_rows_without_a_key_are_counted_and_have_no_order() -> None:
    loose = [(int(NO_KEY), number, 0) for number in range(1, 9)]
    for bucket_rows in (1000, 2):
        assert compare(loose, loose[::-1], bucket_rows=bucket_rows).ok
        found = compare(loose, [*loose[:0:-1], loose[3]], bucket_rows=bucket_rows)
        assert findings(found) == {
            "lost": 1,
            "duplicated": 1,
            **({"lost_at_end": found.lost_at_end} if found.lost_at_end else {}),
        }
        assert found.expected.keys == 0


def test_a_key_in_two_queues_has_no_order() -> None:
    rows = [(7, 1, 0), (7, 2, 1), (8, 3, 1)]
    found = compare(rows, rows)
    assert (found.expected.split_keys, found.actual.split_keys) == (1, 1)
    assert not found.ok
    assert compare(rows, [(key, name, 0) for key, name, _ in rows]).ok


def test_examples_say_where() -> None:
    found = compare(history(a="abcd", b="xyz"), history(a="acbd", b="xyy"), examples=1)
    assert [(example.kind, example.side, example.where, example.id) for example in found.examples] == [
        ("lost", "expected", "row 6", str(ord("z"))),
        ("duplicated", "actual", "row 6", str(ord("y"))),
        ("out_of_order", "actual", "row 2", str(ord("b"))),
    ]
    assert compare(history(a="abcd"), history(a=""), examples=0).examples == []


def by_hand(expected: list[Row], actual: list[Row]) -> Counter[str]:
    """A second implementation of the audit's rules, row by row."""
    out: Counter[str] = Counter()
    there: dict[int, list[int]] = defaultdict(list)
    came: dict[int, list[int]] = defaultdict(list)
    for rows, into in ((expected, there), (actual, came)):
        for key, name, _ in rows:
            into[key].append(name)
    lost, extra, affected = Counter[int](), Counter[int](), set()
    for key in there.keys() | came.keys():
        places: dict[int, list[int]] = defaultdict(list)
        for place, name in enumerate(there[key]):
            places[name].append(place)
        matched: list[int] = []
        turns: Counter[int] = Counter()
        for name in came[key]:
            if name not in places:
                extra[name] += 1
                affected.add(key)
            elif turns[name] >= len(places[name]):
                out["duplicated"] += 1
                affected.add(key)
            else:
                place = places[name][turns[name]]
                turns[name] += 1
                if key and matched and place < max(matched):
                    out["out_of_order"] += 1
                    affected.add(key)
                matched.append(place)
        holes = [place for place in range(len(there[key])) if place not in matched]
        lost.update(there[key][place] for place in holes)
        if holes:
            affected.add(key)
        if key and matched:
            out["gaps"] += sum(place < max(matched) and place - 1 not in holes for place in holes)
    out["moved"] = (lost & extra).total()
    out["lost"], out["extra"] = lost.total() - out["moved"], extra.total() - out["moved"]
    out["keys_affected"] = len(affected - {0})
    return out


@pytest.mark.parametrize("seed", range(8))
def test_random_damage_is_found_as_by_hand(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(150):
        keys, names = dice.randint(0, 4), dice.choice([3, 8, 50])
        expected = [(dice.randint(0, keys), dice.randint(1, names), 0) for _ in range(dice.randint(0, 14))]
        actual = list(expected)
        for _ in range(dice.randint(0, 4) if actual else 0):
            at, to = dice.randrange(len(actual)), dice.randrange(len(actual))
            match dice.randint(0, 4):
                case 0 if len(actual) > 1:
                    actual.pop(at)
                case 1:
                    actual.insert(to, actual[at])
                case 2:
                    actual[at], actual[to] = actual[to], actual[at]
                case 3:
                    actual.insert(to, (dice.randint(0, keys), dice.randint(100, 102), 0))
                case 4:
                    actual[at] = (dice.randint(0, keys), *actual[at][1:])
        found = compare(expected, actual, bucket_rows=dice.choice([1000, 5, 2]))
        right = by_hand(expected, actual)
        for name in ("lost", "duplicated", "extra", "moved", "out_of_order", "gaps", "keys_affected"):
            assert getattr(found, name) == right[name], (name, expected, actual)


# Topics and tables.


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with orderedmq.connect(tmp_path / "store") as broker:
        yield broker


def fill(broker: Broker, topic: str, *queues: list[tuple[str | None, bytes]]) -> None:
    broker.admin.create_topic(topic, len(queues))
    for queue, rows in zip(broker.log.queues(topic), queues, strict=True):
        if rows:
            columns = {
                "sharding_key": pa.array([key for key, _ in rows], pa.string()),
                "body": pa.array([body for _, body in rows]),
            }
            broker.log.append({queue: pa.record_batch(columns)})


def test_two_topics_whatever_their_queues(broker: Broker) -> None:
    fill(broker, "one", [("k", b"1"), ("l", b"2"), ("k", b"3")], [("m", b"4")], [])
    fill(broker, "two", [("m", b"4"), ("k", b"1"), ("k", b"3"), ("l", b"2")])
    progress: list[int] = []
    found = audit(TopicSide(broker.log, "one"), TopicSide(broker.log, "two"), progress=progress.append)
    assert found.ok
    assert sum(progress) == 8
    with pytest.raises(TopicError, match="topic 'three' does not exist"):
        TopicSide(broker.log, "three")


def test_two_topics_from_a_time_on(broker: Broker) -> None:
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
    found = audit(*sides)
    assert findings(found) == {"lost": 1, "lost_at_end": 1, "extra": 1, "keys_affected": 1}
    assert [(example.kind, example.where) for example in found.examples] == [
        ("lost", "queue 0 offset 3"),
        ("extra", "queue 0 offset 1"),
    ]
    assert audit(*(TopicSide(broker.log, "live", since=at) for at in (1, None))).ok
    assert TopicSide(broker.log, "live", since=since + 3_600_000_000).messages == 0


def test_examples_of_topics_are_messages(broker: Broker) -> None:
    fill(broker, "one", [("x", b"0")], [("k", b"1"), ("k", b"2"), ("k", b"3")])
    fill(broker, "two", [("x", b"0"), ("k", b"2"), ("k", b"1"), ("k", b"\xff" * 100)], [])
    # Messages below the queue's first remaining offset are not part of the topic.
    broker.log.append({broker.log.queues("two")[1]: pa.record_batch({"body": [b"old"]})})
    broker.admin.trim("two", {broker.log.queues("two")[1]: 1})
    found = audit(TopicSide(broker.log, "one"), TopicSide(broker.log, "two"))
    assert [(example.kind, example.where, example.key, example.id[:4]) for example in found.examples] == [
        ("lost", "queue 1 offset 2", "k", "3"),
        ("out_of_order", "queue 0 offset 2", "k", "1"),
        ("extra", "queue 0 offset 3", "k", "�" * 4),
    ]
    assert len(found.examples[2].id) == 80


def test_a_field_of_json_tells_messages_whose_bodies_differ(broker: Broker) -> None:
    fill(broker, "one", [("k", b'{"id":1}'), ("k", b'{"id":2}')])
    fill(broker, "two", [("k", b'{"x":true,"id":"1"}'), ("k", b'{"id":2,"x":[1]}')])
    assert audit(TopicSide(broker.log, "one", "id"), TopicSide(broker.log, "two", "id")).ok
    assert findings(audit(TopicSide(broker.log, "one"), TopicSide(broker.log, "two")))["lost"] == 2
    with pytest.raises(OptionError, match=r"queue two/embedded/0 offset 0: there is no field 'name'"):
        audit(TopicSide(broker.log, "one", "id"), TopicSide(broker.log, "two", "name"))
    fill(broker, "text", [("k", b'{"id":1}'), ("k", b"two")])
    with pytest.raises(OptionError, match="queue text/embedded/0 offset 1: the text is not JSON"):
        audit(TopicSide(broker.log, "one", "id"), TopicSide(broker.log, "text", "id"))


class Cluster:
    """The log of several brokers, as far as an audit reads it."""

    tail_loss = ""

    def __init__(self, rows: dict[MessageQueue, list[tuple[str, bytes]]]) -> None:
        self._rows = rows

    def queues(self, topic: str) -> list[MessageQueue]:
        return sorted(queue for queue in self._rows if queue.topic == topic)

    def bounds(self, queues: Sequence[MessageQueue]) -> dict[MessageQueue, QueueBounds]:
        return {queue: QueueBounds(0, len(self._rows[queue])) for queue in queues}

    def pull(self, queue: MessageQueue, offset: int, most: int, *_: Any) -> pa.RecordBatch:
        keys, bodies = zip(*self._rows[queue][offset : offset + most], strict=True)
        return pa.record_batch({"sharding_key": pa.array(keys), "body": pa.array(bodies)})


def test_brokers_have_separate_queues_with_the_same_number(tmp_path: Path) -> None:
    """A key is at another broker while its own is away, but in a queue with the same number."""
    one, a, b = (MessageQueue("in", "broker-a", 0), MessageQueue("out", "broker-a", 0), MessageQueue("out", "broker-b", 0))
    log: Any = Cluster(
        {one: [("k", b"1"), ("k", b"2"), ("k", b"3")], a: [("k", b"1"), ("k", b"2")], b: [("k", b"3"), ("k", b"4")]}
    )
    found = audit(TopicSide(log, "in"), TopicSide(log, "out"))
    assert (found.expected.split_keys, found.actual.split_keys, found.ok) == (0, 1, False)
    assert [example.where for example in found.examples] == ["queue broker-b/0 offset 1"]
    rows = {"sharding_key": ["k", "k"], "body": ["1", "2"], "queue_id": pa.array([0, 0], pa.uint32())}
    for brokers, split in ((["broker-a", "broker-b"], 1), (["broker-a", "broker-a"], 0), ([None, None], 0)):
        pq.write_table(pa.table(rows | {"broker_name": pa.array(brokers, pa.string())}), tmp_path / "t.parquet")
        side = TableSide(tmp_path / "t.parquet")
        assert audit(side, side).actual.split_keys == split


def test_large_unsigned_numbers_order_rows(tmp_path: Path) -> None:
    for name, order in (("one", [1, 2**63, 2**64 - 1]), ("two", [2**64 - 1, 2**63, 1])):
        pq.write_table(
            pa.table({"sharding_key": ["k"] * 3, "body": ["a", "b", "c"], "at": pa.array(order, pa.uint64())}), tmp_path / name
        )
    one, two = (TableSide(tmp_path / name, order_column="at") for name in ("one", "two"))
    assert audit(one, one).ok
    assert findings(audit(one, two)) == {"out_of_order": 2, "keys_affected": 1}


def test_long_bodies_and_empty_ones_are_told_apart(broker: Broker) -> None:
    bodies = [b"", b"\0", b"x" * 512, b"x" * 513, b"x" * 5000, b"x" * 4999 + b"y"]
    fill(broker, "one", [("k", body) for body in bodies])
    fill(broker, "two", [("k", body) for body in bodies[:-1]])
    assert len(set(identities(pa.array(bodies)).tolist())) == len(bodies)
    assert (identities(pa.array(bodies)) == np.concatenate([identities(pa.array([body])) for body in bodies])).all()
    assert findings(audit(TopicSide(broker.log, "one"), TopicSide(broker.log, "two"))) == {
        "lost": 1,
        "lost_at_end": 1,
        "keys_affected": 1,
    }


def test_a_table_against_a_topic(broker: Broker, tmp_path: Path) -> None:
    fill(broker, "one", [("1", b"a"), ("2", b"b"), ("1", b"c"), (None, b"d")])
    table = pa.table({"order": [1, 1, 2, None], "text": ["c", "a", "b", "d"], "seq": [30, 10, 20, 40]})
    pq.write_table(table, tmp_path / "t.parquet")
    columns = {"key_column": "order", "id_column": "text"}
    assert audit(TopicSide(broker.log, "one"), TableSide(tmp_path / "t.parquet", order_column="seq", **columns)).ok
    found = audit(TopicSide(broker.log, "one"), TableSide(tmp_path / "t.parquet", **columns))
    assert findings(found) == {"out_of_order": 1, "keys_affected": 1}
    assert (found.examples[0].where, found.examples[0].key, found.examples[0].id) == ("row 1", "1", "a")


def test_what_spark_wrote_has_the_sources_columns(broker: Broker, tmp_path: Path) -> None:
    fill(broker, "one", [("a", b'{"id":1}'), ("a", b'{"id":2}')], [("b", b'{"id":3}')])
    rows = {"queue_id": [0, 0, 1], "queue_offset": [0, 1, 0], "sharding_key": ["a", "a", "b"]}
    bodies = [b'{"id":1,"v":7}', b'{"id":2,"v":8}', b'{"id":3,"v":9}']
    out = tmp_path / "out"
    (out / "_spark_metadata").mkdir(parents=True)
    # The order of rows follows from their offsets, not from the names of files. One file was left by a repeated batch.
    for name, picked in (("part-z", [0]), ("part-a", [1, 2]), ("part-b", [1, 2])):
        part = pa.table({**rows, "body": bodies}).take(picked)
        pq.write_table(part, out / f"{name}.parquet")
    assert audit(TopicSide(broker.log, "one", "id"), TableSide(out / "part-z.parquet", id_field="id")).lost == 2
    log = [["part-z"], ["part-a"]]
    for number, names in enumerate(log):
        lines = [json.dumps({"path": f"file://{out}/{name}.parquet", "action": "add"}) for name in names]
        (out / "_spark_metadata" / str(number)).write_text("\n".join(["v1", *lines]))
    assert audit(TopicSide(broker.log, "one", "id"), TableSide(out, id_field="id")).ok
    (out / "_spark_metadata" / "1.compact").write_text(
        "\n".join(["v1", *(json.dumps({"path": f"file:///moved/{name}.parquet"}) for name in ("part-z", "part-a"))])
    )
    assert audit(TopicSide(broker.log, "one", "id"), TableSide(out, id_field="id")).ok


def test_a_table_that_cannot_be_compared(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"sharding_key": ["a"], "body": pa.array([None], pa.string()), "at": ["x"], "l": [[1]]}),
        tmp_path / "t.parquet",
    )
    with pytest.raises(TopicError, match="the Parquet file or directory .* does not exist"):
        TableSide(tmp_path / "none")
    (tmp_path / "text").write_text("no table")
    with pytest.raises(OptionError, match="cannot be read as Parquet"):
        TableSide(tmp_path / "text")
    with pytest.raises(OptionError, match="has no column 'key', only sharding_key, body, at, l"):
        TableSide(tmp_path / "t.parquet", key_column="key")
    for settings, why in (
        ({}, "row 0: there is no value to identify the message"),
        ({"id_column": "sharding_key", "order_column": "at"}, "Give a column of whole numbers or times"),
        ({"id_column": "l"}, "'l' of .* is list<.*>, which cannot be compared"),
    ):
        with pytest.raises(OptionError, match=why):
            list(TableSide(tmp_path / "t.parquet", **settings).rows())
