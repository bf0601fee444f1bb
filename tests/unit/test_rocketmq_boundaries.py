"""A look-back over messages of other tasks of the batch: few round trips, and the same result as without reading ahead."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
import pytest

from orderedmq.conditions import UnavailableCondition
from orderedmq.errors import RocketMQUnavailableError
from orderedmq.rocketmq.codec.decode import decode
from orderedmq.rocketmq.codec.encode import encode
from orderedmq.rocketmq.sink.boundaries import SAMPLES, STRIDE, Boundaries
from orderedmq.rocketmq.sink.lookback import Lookback
from orderedmq.rocketmq.sink.message_stamp import COLUMNS, SinkMessage, Writer, find_messages
from orderedmq.rocketmq.wire.message_requests import PullResult, PullStatus
from tests.stored_messages import Stored
from tests.unit.rocketmq_sink_queue import SINK, rows_of
from tests.unit.test_rocketmq_puller import QUEUE, FakeBroker, FakeLane

RUN = "0a1b2c3d"
OWN = Writer(SINK, 9, 0, RUN)


class StampedBroker(FakeBroker):
    """A queue of stamped messages that counts single pulls, and writes that contain many pulls."""

    def __init__(self, stamps: list[str]) -> None:
        super().__init__(0, len(stamps))
        self.stamps = stamps
        self.writes = self.reads = 0

    def found(self, begin: int, end: int, *, without: int | None = None) -> PullResult:
        messages = (
            Stored(offset=number, properties=f"OMQ\x01{self.stamps[number]}\x02".encode()) for number in range(begin, end)
        )
        body = b"".join(replace(message, **self.change).pack() for message in messages)
        return PullResult(PullStatus.FOUND, end, 0, self.end, 0, body)

    def lane(self, address: str, deadline: float) -> FakeLane:
        self.writes += 1
        return super().lane(address, deadline)

    def read(self, begin: int, end: int) -> pa.RecordBatch:
        self.reads += 1
        answers = [self.found(at, min(at + 32, end)).body for at in range(begin, end, 32)]
        return decode([memoryview(body) for body in answers], COLUMNS, QUEUE)[0]


def stamps(writer: Writer, first: int, count: int) -> list[str]:
    """The stamps of one request."""
    text = writer.stamp(0).text
    return [f"{text}{first + place:012}{place:04}" for place in range(count)]


def test_stamps_of_these_tests_are_those_of_the_encoder() -> None:
    [body] = encode(rows_of(["a1", "a2"]), pa.array(["U", "V"]), "", stamp=OWN.stamp(7))
    assert all(stamp.encode() in bytes(body.body) for stamp in stamps(OWN, 7, 2))


def walked(broker: StampedBroker, boundaries: Boundaries | None, bookmark: int) -> list[SinkMessage]:
    walk = Lookback(OWN, bookmark, broker.end)
    messages: list[SinkMessage] = []
    while (wanted := walk.next()) is not None:
        pair = boundaries.pair(wanted.begin) if boundaries is not None and wanted.messages == 2 else None
        if pair is not None:
            assert pair.column("queue_offset").to_pylist() == list(range(*wanted))
        messages += walk.record(find_messages(broker.read(*wanted) if pair is None else pair, OWN))
    return messages


def requests(draw: random.Random, count: int, own: bool) -> Iterator[str]:
    """A batch for which other partitions, and perhaps our own, have sent requests of many sizes."""
    sent = dict.fromkeys(range(3), 0)
    for _ in range(count):
        partition = draw.randrange(0 if own else 1, 3)
        rows = draw.choice([1, 40, 500, 3000, 4000])
        yield from stamps(Writer(SINK, 9, partition, RUN), sent[partition], rows)
        sent[partition] += rows


@pytest.mark.parametrize("own", [False, True])
def test_a_look_finds_the_same_with_messages_that_were_read_ahead(own: bool) -> None:
    draw = random.Random(own)
    for _ in range(2):
        old = stamps(Writer(SINK, 8, 5, "00000001"), 0, 3000)
        broker = StampedBroker([*old, *requests(draw, 30, own)])
        plain = walked(broker, None, 1)
        assert walked(broker, Boundaries(broker, QUEUE, SINK), 1) == plain  # type: ignore[arg-type]
        assert any(message.digest for message in plain) is own


def test_a_look_over_many_requests_takes_few_round_trips() -> None:
    others = [Writer(SINK, 9, partition, RUN) for partition in (1, 2)]
    queue = stamps(Writer(SINK, 8, 5, "00000001"), 0, 3000)
    for number in range(10):
        for writer in others:
            queue += stamps(writer, 4510 * number, 4000) + stamps(writer, 4510 * number + 4000, 510)
    assert len(queue) < SAMPLES * STRIDE
    broker = StampedBroker(queue)
    walked(broker, Boundaries(broker, QUEUE, SINK), 1)  # type: ignore[arg-type]
    assert (broker.writes, broker.reads <= 6) == (1, True)
    broker.reads = 0
    walked(broker, None, 1)
    assert broker.reads > 40


def test_a_look_behind_one_request_reads_nothing_ahead() -> None:
    broker = StampedBroker(stamps(Writer(SINK, 8, 5, "00000001"), 0, 3000) + stamps(Writer(SINK, 9, 1, RUN), 0, 4000))
    walked(broker, Boundaries(broker, QUEUE, SINK), 1)  # type: ignore[arg-type]
    assert (broker.writes, broker.reads) == (0, 2)


@pytest.mark.holds("foreign answer")
@pytest.mark.parametrize("fault", ["late", "messages of another queue", "messages of another topic"])
def test_after_a_fault_pairs_are_left_to_the_usual_pull(fault: str) -> None:
    broker = StampedBroker(list(requests(random.Random(1), 20, own=True)))
    late = RocketMQUnavailableError(UnavailableCondition.TIMEOUT, "late")
    # Messages of another queue may have any stamps. Here they have those of an older batch, at which a look-back would wrongly stop.
    other = StampedBroker(stamps(Writer(SINK, 8, 5, "00000001"), 0, broker.end + 1))
    other.change = {"queue_id": 4} if fault.endswith("queue") else {"topic": b"ordert"}
    broker.instead = {
        offset: [late if fault == "late" else other.found(offset, offset + 2)] * 9 for offset in range(broker.end)
    }
    boundaries = Boundaries(broker, QUEUE, SINK)  # type: ignore[arg-type]
    assert walked(broker, boundaries, 1) == walked(broker, None, 1)
    assert broker.writes == 1
    assert len(broker.given_back) == 1
