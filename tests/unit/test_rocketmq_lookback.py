"""How far back a task reads in a queue, which messages it skips, and how it recognises a message that it sent."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orderedmq.model import SINK_STAMP
from orderedmq.ownership.micro_batch import KEPT_BATCHES
from orderedmq.rocketmq.codec.encode import encode
from orderedmq.rocketmq.codec.stored_message import bad_property
from orderedmq.rocketmq.sink import message_stamp
from orderedmq.rocketmq.sink.lookback import Ledger, Lookback
from orderedmq.rocketmq.sink.message_stamp import (
    SinkMessage,
    Writer,
    digests,
    find_messages,
    may_concern,
    read_stamp,
    sink_digest,
    sink_name,
)
from orderedmq.schema import PRODUCER_SCHEMA
from tests import stored_messages
from tests.examples import examples
from tests.unit.rocketmq_sink_queue import SINK, Queue, Stored, rows_of, split


def test_the_usual_look_is_one_small_step() -> None:
    walk = Lookback(Writer(SINK, 9, 0), 500, 1_000_000)
    looked = walk.next()
    assert looked is not None
    assert looked.messages == 32
    walk.record([SinkMessage(looked.end - 1, 8, 3, 0, b"", 0)])
    assert walk.next() is None


def test_a_look_goes_on_behind_what_should_not_be_there() -> None:
    writer = Writer(SINK, 9, 0)
    cases: list[tuple[list[SinkMessage], bool]] = [
        ([SinkMessage(99, 8, 0, 5, b"", 5)], False),
        ([SinkMessage(99, 9, 0, 5, b"x", 5)], True),
        # This task may have made two attempts that began at 0, and a late attempt of the batch before may also have sent messages.
        ([SinkMessage(99, 9, 0, 0, b"x", 0)], True),
        ([SinkMessage(98, 8, 0, 5, b"", 5), SinkMessage(99, 9, 0, 5, b"x", 5)], True),
        ([SinkMessage(98, 8, 0, 5, b"", 5), SinkMessage(99, 9, 0, 0, b"x", 0)], False),
        # If a message of another run of this batch was seen, the first messages of that run must also be found.
        ([SinkMessage(98, 9, 0, 0, b"x", 0, "r"), SinkMessage(99, 9, 0, 0, b"x", 0)], True),
        ([SinkMessage(97, 8, 0, 5, b"", 5), SinkMessage(98, 9, 0, 3, b"x", 3, "r"), SinkMessage(99, 9, 0, 0, b"x", 0)], True),
        ([SinkMessage(97, 8, 0, 5, b"", 5), SinkMessage(98, 9, 7, 0, b"x", 0, "r"), SinkMessage(99, 9, 0, 0, b"x", 0)], False),
        # An old batch: its first messages do not end the look, but an older batch does, or a batch that is KEPT_BATCHES newer.
        ([SinkMessage(99, 10, 0, 0, b"", 0)], True),
        ([SinkMessage(98, 9, 0, 0, b"x", 0), SinkMessage(99, 10, 0, 0, b"", 0)], True),
        ([SinkMessage(98, 8, 0, 0, b"x", 0), SinkMessage(99, 10, 0, 0, b"", 0)], False),
        ([SinkMessage(99, 9 + KEPT_BATCHES - 1, 0, 0, b"", 0)], True),
        ([SinkMessage(99, 9 + KEPT_BATCHES, 0, 0, b"", 0)], False),
    ]
    for messages, goes_on in cases:
        walk = Lookback(writer, None, 100)
        walk.record(messages)
        assert (walk.next() is not None) is goes_on, messages


def test_a_look_for_an_old_batch_ends_some_way_before_its_first_message() -> None:
    """There may be no older batch, because this batch is the topic's first, or the sink's first in an old topic."""
    messages: list[SinkMessage | None] = [None] * 100_000
    messages[90_000:90_003] = [SinkMessage(90_000 + number, 9, number, 0, b"x", 0, "r") for number in range(3)]
    messages[90_003] = SinkMessage(90_003, 10, 0, 0, b"", 0)
    counted, reads = walked(Lookback(Writer(SINK, 9, 0), 90_004, len(messages)), messages)
    assert sorted(message.offset for message in counted) == [90_000, 90_001, 90_002, 90_003]
    assert reads < 15


def test_a_look_ends_at_the_bookmark_and_never_reads_a_message_twice() -> None:
    for bookmark, least in ((None, 0), (None, 77), (900_000, 0), (3, 50)):
        walk = Lookback(Writer(SINK, 9, 0), bookmark, 1_000_000)
        walk.set_least(least)
        at, steps = 1_000_000, 0
        while (looked := walk.next()) is not None:
            assert looked.end == at
            at, steps = looked.begin, steps + 1
            walk.record([])
        assert at == (899_999 if bookmark == 900_000 else least)
        assert steps <= 8 + 1_000_000 / 8192
    walk = Lookback(Writer(SINK, 0, 0), 6, 5)
    walk.set_least(5)
    assert walk.next() is None


def walked(walk: Lookback, messages: list[SinkMessage | None]) -> tuple[list[SinkMessage], int]:
    """All messages that a walk counts, as `message_stamp.find_messages` returns them, and the number of reads."""
    counted: list[SinkMessage] = []
    reads = 0
    while (looked := walk.next()) is not None:
        there = [message for message in messages[looked.begin : looked.end] if message is not None]
        others = [message for message in there if not message.digest]
        seen = {message.batch: message for message in reversed(others)}
        chosen = {*seen.values(), *others[-1:], *(message for message in there if message.digest)}
        counted += walk.record(sorted(chosen))
        reads += 1
    return counted, reads


def request(offset: int, batch: int, partition: int, first: int, count: int, own: bool) -> list[SinkMessage | None]:
    return [
        SinkMessage(offset + number, batch, partition, first + number, b"x" if own else b"", first) for number in range(count)
    ]


def test_a_look_goes_past_what_the_batch_s_other_partitions_sent() -> None:
    messages: list[SinkMessage | None] = [None, *request(1, 8, 0, 0, 1, own=False)]
    bookmark = len(messages)
    for first in range(0, 70_000, 7_000):
        for partition in (0, 1):
            messages += request(len(messages), 9, partition, first, 7_000, own=False)
        if first == 35_000:
            messages += request(len(messages), 9, 3, 0, 3, own=True)
    counted, reads = walked(Lookback(Writer(SINK, 9, 3), bookmark, len(messages)), messages)
    assert [message.sequence for message in sorted(counted) if message.digest] == [0, 1, 2]
    assert reads <= 2 * 20 + 8
    # Small requests are read, because skipping each one separately would take longer.
    messages = [message for number in range(2_000) for message in request(5 * number, 9, 0, 5 * number, 5, own=False)]
    assert walked(Lookback(Writer(SINK, 9, 3), None, len(messages)), messages)[1] <= 10


def test_a_look_that_goes_past_requests_ends_where_messages_were_deleted() -> None:
    """The first messages of a request were deleted. How many were deleted is known only after the first step."""
    for least in range(0, 1_100, 25):
        messages = (
            request(0, 9, 0, 0, 500, own=False) + request(500, 9, 1, 0, 500, own=True)[:1] + request(501, 9, 0, 500, 500, False)
        )
        walk = Lookback(Writer(SINK, 9, 1), None, len(messages))
        looked = walk.next()
        assert looked is not None
        walk.record([message for message in messages[looked.begin : looked.end] if message is not None])
        walk.set_least(min(least, len(messages)))
        counted, _ = walked(walk, messages)
        assert [message.offset for message in counted if message.digest] == ([500] if least <= 500 else [])


def test_a_look_reads_all_that_another_run_of_the_batch_sent() -> None:
    """The messages of other runs are read in all partitions. Messages that other tasks of the same run sent are skipped."""
    messages: list[SinkMessage | None] = []
    for partition in range(3):
        messages += [
            message and message._replace(run="old") for message in request(len(messages), 9, partition, 0, 500, own=True)
        ]
        messages += [
            message and message._replace(run="new") for message in request(len(messages), 9, partition, 0, 20_000, own=False)
        ]
    counted, reads = walked(Lookback(Writer(SINK, 9, 7, "new"), None, len(messages)), messages)
    assert sum(bool(message.digest) for message in counted) == 1500
    assert reads < 40


def compare_walks(draw: random.Random) -> None:
    """Walk over requests that are cut, delivered twice, or wrongly stamped. A walk that skips nothing must find the same messages."""
    messages: list[SinkMessage | None] = []
    sent = dict.fromkeys(range(3), 0)
    bookmark = None
    for _ in range(draw.randint(1, 12)):
        at, partition, count = len(messages), draw.randrange(3), draw.choice([1, 2, 40, 100, 300])
        part = request(at, 9, partition, sent[partition], count, own=partition == 0)
        sent[partition] += count
        kind = draw.choice(["whole", "whole", "whole", "cut", "twice", "lies", "nobody's", "older"])
        if kind == "cut":
            part = part[: draw.randint(1, count)]
        elif kind == "twice":
            part += [message._replace(offset=message.offset + count) for message in part if message is not None]
        elif kind == "lies":
            number = draw.randint(0, 500)
            part = [message._replace(request=max(0, message.sequence - number)) for message in part if message is not None]
        elif kind == "nobody's":
            part = [None] * count
        elif kind == "older":
            part = request(at, 8, partition, 0, count, own=False)
            bookmark = at + 1
        messages += part
    plain = Lookback(Writer(SINK, 9, 0), bookmark, len(messages))
    plain._trusts_stamps = False
    expected, _ = walked(plain, messages)
    counted, _ = walked(Lookback(Writer(SINK, 9, 0), bookmark, len(messages)), messages)
    own = [sorted(message for message in some if message.digest) for some in (counted, expected)]
    assert own[0] == own[1]
    assert {message.batch for message in counted} == {message.batch for message in expected}


@examples(6)
@given(st.integers(0, 2**62))
def test_a_look_with_skips_finds_the_messages_of_a_look_without_skips(seed: int) -> None:
    compare_walks(random.Random(seed))


@pytest.mark.parametrize("bug", ["_is_in_skipped_request", "_is_own"])
def test_that_a_look_goes_past_what_it_should_not_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lookback, bug, lambda self, message, messages=(): bug == "_is_in_skipped_request")

    def walks() -> None:
        for seed in range(300):
            compare_walks(random.Random(seed))

    with pytest.raises(AssertionError):
        walks()


def test_a_digest_covers_the_content_and_no_system_property() -> None:
    same: list[dict[str, Any]] = [
        {"body": b"a", "tags": "t", "keys": None, "sharding_key": "k", "properties": [("x", "1"), ("y", "2")]},
        {"body": b"a", "tags": "t", "keys": "", "sharding_key": "k", "properties": [("y", "2"), ("UNIQ_KEY", "u"), ("x", "1")]},
        {"body": b"a", "tags": "t", "keys": None, "sharding_key": "k", "properties": [("x", "0"), ("y", "2"), ("x", "1")]},
    ]
    other = [
        {**same[0], "body": b"b"},
        {**same[0], "tags": None},
        {**same[0], "keys": "t"},
        {**same[0], "sharding_key": "kk"},
        {**same[0], "properties": None},
        {**same[0], "properties": [("x", "1"), ("y", "3")]},
        {**same[0], "properties": [("x", "1\0y"), ("2", "")]},
        {**same[0], "tags": "t\0", "keys": None},
    ]
    found_digests = digests(pa.RecordBatch.from_pylist(same + other, PRODUCER_SCHEMA))
    assert len(set(found_digests[:3])) == 1
    assert len(set(found_digests)) == 1 + len(other)
    assert digests(rows_of(["a1"]).select(["body"])) != digests(rows_of(["a1"]))


@pytest.mark.parametrize("few", [0, 99])
def test_invalid_stamps_are_ignored(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_stamp, "_FEW", few)
    digest = sink_digest(SINK)
    stamps = [
        {},
        {"OMQ": f"{digest}.1..2.0000000000030001"},
        {"OMQ": f"{sink_digest('other')}.1..2.0000000000030001"},
        {"OMQ": f"{digest}.-1..2.0000000000030001"},
        {"OMQ": f"{digest}.1..2.000000000003001"},
        {"OMQ": f"{digest}.1..2.0000000000030001\n"},
        {"OMQ": f"{digest}.1.X.2.0000000000030001"},
        {"OMQ": f"{digest}.{2**63}..2.0000000000030001"},
        {"OMQ": f"{digest}.{'9' * 20}..2.0000000000030001"},
        {"OMQ": f"{digest}.1.0a1b2c3d.1.0000000000030004"},
        {"OMQ": f"{digest}.1..1.0000000000030001"},
    ]
    world = Queue([Stored(b"a", properties) for properties in stamps])
    messages = [
        message for batch in world.read(0, len(stamps), len(stamps)) for message in find_messages(batch, Writer(SINK, 1, 2))
    ]
    assert [(*message[:4], message.request, message.run, bool(message.digest)) for message in messages] == [
        (1, 1, 2, 3, 2, "", True),
        (9, 1, 1, 3, 0, "0a1b2c3d", True),
        (10, 1, 1, 3, 2, "", False),
    ]


@given(st.integers(0, 2**62))
def test_stamps_are_read_alike_by_column_and_one_by_one(seed: int) -> None:
    draw = random.Random(seed)
    messages = []
    for _ in range(draw.randint(1, 12)):
        # The number of a batch may be a time in nanoseconds.
        writer = Writer(
            draw.choice([SINK, "other"]), draw.choice([0, 1, 2**63 - 1]), draw.randint(0, 2), draw.choice(["", "0a1b2c3d"])
        )
        sequence = draw.randrange(10**12)
        [body] = encode(rows_of(["a1"]), pa.array(["U"]), "", stamp=writer.stamp(sequence))
        [message] = split(bytes(body.body))
        if writer.sink == SINK:
            expected = SinkMessage(0, writer.batch, writer.partition, sequence, b"", sequence, writer.run)
            assert read_stamp(message.properties, SINK) == expected
        messages.append(message)
    world = Queue(messages)
    [batch] = world.read(0, len(messages), len(messages))
    writer = Writer(SINK, draw.choice([0, 1, 2**63 - 1]), draw.randint(0, 2), draw.choice(["", "0a1b2c3d"]))
    plain = message_stamp._find_one_by_one(batch, writer)
    assert len(plain) == sum(read_stamp(message.properties, SINK) is not None for message in messages)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(message_stamp, "_FEW", 0)
        by_column = find_messages(batch, writer)
    assert set(by_column) <= set(plain)
    assert [one for one in by_column if one.digest] == [one for one in plain if one.digest]
    others = [one for one in plain if not one.digest]
    firsts = {other.batch: other for other in reversed(others)}
    assert {*firsts.values(), *others[-1:]} == {one for one in by_column if not one.digest}


def test_sinks_have_names_of_their_own_that_a_property_can_have() -> None:
    ids = ["a", "a/b", "ä", "", "#", "x" * 1000, "x" * 1001, "a\0b", "a\x01b", "\ud800", sink_name("ä")]
    named = [sink_name(sink) for sink in ids]
    assert len(set(named)) == len(ids)
    for name in named:
        assert bad_property("OMQ_SINK", name) is None
        assert name.encode()
    assert named[:2] == ids[:2]


@given(st.lists(st.tuples(st.integers(7, 10), st.sampled_from(["", "a", "b"]), st.integers(0, 2)), max_size=6), st.data())
def test_records_concern_a_writer_if_they_change_what_its_attempt_does(
    stamps: list[tuple[int, str, int]], data: st.DataObject
) -> None:
    writer = Writer(SINK, 9, 1, "a")
    bookmark = data.draw(st.integers(0, len(stamps)))
    records, messages = [], []
    for offset, (batch, run, partition) in enumerate(stamps):
        stamp = f"{SINK_STAMP}\x01{sink_digest(SINK)}.{batch}.{run}.{partition}.0000000000000000\x02"
        records.append(stored_messages.Stored(offset, properties=f"KEYS\x01k\x02{stamp}".encode()).pack())
        messages.append(SinkMessage(offset, batch, partition, 0, b"x", 0, run))
    ledger = Ledger(writer)
    ledger.read(messages, len(messages), bookmark)
    changes = bool(ledger.committed or ledger.extra or ledger.of_others)
    assert may_concern(writer, b"".join(records), len(b"".join(records[:bookmark]))) is changes
    assert not may_concern(Writer("other", 9, 1, "a"), b"".join(records), 0)
