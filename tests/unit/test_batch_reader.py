"""What a batch read plans: exact ranges and counted losses, also if the store changes between two requests to the broker."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import orderedmq
from ordered_source import batch_reader
from ordered_source.batch_reader import BatchReader
from ordered_source.columns import full_schema
from ordered_source.partition_reader import QueuePartition
from orderedmq.broker import Broker
from orderedmq.errors import DataLossError, OffsetError, OrderedMQError
from orderedmq.model import MessageQueue

QUEUE = MessageQueue("in", "embedded", 0)
FAR_FUTURE = "2999-01-01T00:00:00Z"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with orderedmq.connect(tmp_path / "store") as made:
        made.admin.create_topic("in", 1)
        yield made


def produce(broker: Broker, *counts: int) -> None:
    """Append one chunk per count, with that many messages. Retention deletes whole chunks."""
    for count in counts:
        broker.log.append({QUEUE: pa.record_batch({"body": pa.array([b"x"] * count, pa.binary())})})


def trim(broker: Broker, before: int) -> None:
    broker.admin.trim("in", {QUEUE: before})
    assert broker.log.bounds([QUEUE])[QUEUE].min_offset == before, "the test needs deleted messages"


def named(*offsets: int) -> str:
    return json.dumps({"in": {"embedded": {str(number): offset for number, offset in enumerate(offsets)}}})


def reader_of(broker: Broker, **options: Any) -> BatchReader:
    path: Any = broker
    return BatchReader({"path": str(path.path), "topic": "in", **options}, full_schema())


def spans(reader: BatchReader) -> list[tuple[int, int]]:
    return [(part.begin, part.end) for part in reader.partitions() if isinstance(part, QueuePartition)]


def planned(broker: Broker, **options: Any) -> list[tuple[int, int]]:
    return spans(reader_of(broker, **options))


def commit(broker: Broker, offset: int) -> None:
    """Commit as a query of the group that has processed everything below ``offset``."""
    client = broker.groups.join("query")
    token: Any = broker.groups.lock("g", client, [QUEUE])[QUEUE]
    broker.groups.commit({token: offset})
    broker.groups.unlock([token])
    broker.groups.leave(client)


class Interposed:
    """A broker that calls ``happening`` before its ``turn``-th request about messages or groups."""

    def __init__(self, broker: Broker, turn: int, happening: Callable[[], None]) -> None:
        self._broker, self._left, self._happening = broker, turn, happening

    @property
    def over(self) -> bool:
        """Whether ``happening`` was called."""
        return self._left < 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._broker, name)
        return _Part(self, found) if name in ("log", "groups") else found

    def ask(self) -> None:
        self._left -= 1
        if self._left == -1:
            self._happening()

    def __enter__(self) -> Interposed:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _Part:
    def __init__(self, whole: Interposed, part: Any) -> None:
        self._whole, self._part = whole, part

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._part, name)

        def asked(*args: Any) -> Any:
            if name == "reading":
                return _Part(self._whole, found(*args))
            self._whole.ask()
            return found(*args)

        return asked if callable(found) else found


class Turns:
    """Plans a batch repeatedly. ``happening`` is called before the first request of the first try, the second of the second, etc."""

    def __init__(self, patch: pytest.MonkeyPatch, make: Callable[[], Broker], happening: Callable[[Broker], None]) -> None:
        self._patch, self._make, self._happening = patch, make, happening

    def planned(self, **options: Any) -> list[list[tuple[int, int]] | str]:
        """The planned ranges of each try, or the condition of its error."""
        out: list[list[tuple[int, int]] | str] = []
        over = True
        while over:
            broker = self._make()
            interposed = Interposed(broker, len(out), partial(self._happening, broker))
            reader = reader_of(broker, **options)
            with self._patch.context() as patched:
                patched.setattr(batch_reader, "reach", lambda endpoint, meant=interposed: meant)
                try:
                    out.append(spans(reader))
                except OrderedMQError as error:
                    out.append(error.condition)
            over = interposed.over
        assert len(out) > 3, "planning makes too few requests for this test"
        return out


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[], Broker]]:
    """Makes stores with 10 messages each, of which group g has processed the first 4."""
    made: list[Broker] = []

    def one() -> Broker:
        broker = orderedmq.connect(tmp_path / f"store{len(made)}")
        made.append(broker)
        broker.admin.create_topic("in", 1)
        produce(broker, 10)
        commit(broker, 4)
        return broker

    yield one
    for broker in made:
        broker.close()


@pytest.mark.parametrize(
    "options",
    [
        {"startingOffsets": "committed", "consumerGroup": "g"},
        {"startingOffsets": "committed", "consumerGroup": "g", "endingTimestamp": FAR_FUTURE},
        {"startingOffsets": "committed", "consumerGroup": "g", "endingOffsets": named(10)},
    ],
    ids=["to the end", "to a time", "to an offset"],
)
def test_the_groups_query_going_on_meanwhile_never_blames_the_options(
    options: dict[str, str], monkeypatch: pytest.MonkeyPatch, make: Callable[[], Broker]
) -> None:
    def goes_on(broker: Broker) -> None:
        produce(broker, 5)
        commit(broker, 15)

    found = Turns(monkeypatch, make, goes_on).planned(**options)
    # All messages from the group's offset on that existed at one moment, or none if the group is already past the requested end.
    assert all(one in ([(4, 10)], [(4, 15)], []) for one in found), found
    assert found[-1] == [(4, 10)]


def test_a_producer_meanwhile_never_makes_a_range_end_before_it_begins(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Broker]
) -> None:
    found = Turns(monkeypatch, make, lambda broker: produce(broker, 5)).planned(startingTimestamp=FAR_FUTURE)
    assert all(one == [] for one in found), found


def test_a_topic_that_is_deleted_meanwhile_is_a_named_error(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Broker]
) -> None:
    turns = Turns(monkeypatch, make, lambda broker: broker.admin.delete_topic("in"))
    found = turns.planned(startingOffsets="committed", consumerGroup="g")
    assert found[0] == "ORDEREDMQ_TOPIC.MISSING"
    assert "ORDEREDMQ_DATA_LOSS.QUEUE_DELETED" in found
    assert set(map(str, found[:-1])) == {"ORDEREDMQ_TOPIC.MISSING", "ORDEREDMQ_DATA_LOSS.QUEUE_DELETED"}, found


@pytest.mark.holds("named loss")
def test_offsets_that_aged_out_are_an_error_or_a_counted_warning(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    produce(broker, 30, 10)
    trim(broker, 30)
    with pytest.raises(DataLossError, match=r"AGED_OUT\] messages 3 to 29 \(27\) of queue in/embedded/0"):
        planned(broker, startingOffsets=named(3))
    assert planned(broker, startingOffsets=named(3), failOnDataLoss="false") == [(30, 40)]
    assert "messages 3 to 29 (27) of queue in/embedded/0 were deleted" in caplog.text


def test_reports_a_group_past_the_end_of_its_queue_as_a_loss(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    produce(broker, 10)
    commit(broker, 14)
    options = {"startingOffsets": "committed", "consumerGroup": "g"}
    with pytest.raises(DataLossError, match=r"BEYOND_END\] queue in/embedded/0 ends at 10, but group 'g' has read up to 14"):
        planned(broker, **options)
    assert planned(broker, **options, failOnDataLoss="false") == []
    assert "ends at 10, but group 'g' has read up to 14" in caplog.text


def test_reads_nothing_for_a_group_past_the_requested_end_and_warns(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    produce(broker, 10)
    commit(broker, 7)
    assert planned(broker, startingOffsets="committed", consumerGroup="g", endingOffsets=named(5)) == []
    assert "no messages of queue in/embedded/0 are read: its start offset 7 is beyond its end offset 5" in caplog.text


@pytest.mark.parametrize("starting", [named(0, 0), named(7, 0), named(-1, 0), "earliest", "committed"])
def test_a_queue_whose_end_is_minus_2_is_left_out(broker: Broker, caplog: pytest.LogCaptureFixture, starting: str) -> None:
    """Whatever its beginning, and without a word about messages that were deleted or processed."""
    broker.admin.resize_topic("in", 2)
    produce(broker, 30, 10)
    trim(broker, 30)
    commit(broker, 5)
    group = {"consumerGroup": "g"} if starting == "committed" else {}
    assert planned(broker, startingOffsets=starting, endingOffsets=named(-2, -1), **group) == []
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("option", "start"),
    [
        ("startingOffsets", {"startingOffsets": named(-1)}),
        ("startingTimestamp", {"startingTimestamp": "9999-01-01"}),
        ("consumeTimestamp", {"consumeFromWhere": "timestamp", "consumeTimestamp": "9999-01-01"}),
    ],
)
def test_a_begin_after_the_end_names_its_option(broker: Broker, option: str, start: dict[str, str]) -> None:
    produce(broker, 10)
    with pytest.raises(OffsetError, match=rf"BEGIN_AFTER_END.*from 10 to 5: {option} .*endingOffsets"):
        planned(broker, **start, endingOffsets=named(5))


@pytest.mark.parametrize("accept", [False, True], ids=["fails", "accepted"])
def test_a_queue_that_lost_its_end_since_it_was_planned_is_counted(
    accept: bool, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    produce(broker, 10)
    reader = reader_of(broker, failOnDataLoss=str(not accept))
    [part] = reader.partitions()
    assert isinstance(part, QueuePartition)
    part.end = 14
    rows = reader.read(part)
    if accept:
        assert sum(found.num_rows for found in rows) == 10
        assert "4 messages of queue in/embedded/0 are lost, from 10 to 13" in caplog.text
    else:
        with pytest.raises(
            DataLossError, match=r"BEYOND_END\] queue in/embedded/0 ends at 10, but the batch was planned up to 14"
        ):
            list(rows)
