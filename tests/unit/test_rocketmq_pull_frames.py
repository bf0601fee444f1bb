"""Pulls encoded by template and decoded in place give the same result as the general encoder and decoder, however the input is cut."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orderedmq.endpoint import Credentials
from orderedmq.errors import OrderedMQError, ProtocolError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.wire import message_requests
from orderedmq.rocketmq.wire.codes import RequestCode
from orderedmq.rocketmq.wire.frame import FrameDecoder, RemotingCommand, encode
from orderedmq.rocketmq.wire.message_requests import PullResult
from orderedmq.rocketmq.wire.pull_frames import Found, PullDecoder, PullTemplate
from orderedmq.rocketmq.wire.request import signed
from orderedmq.rows.filters import Filter
from tests.unit.rocketmq_peer import feed, pieces_into

QUEUE = MessageQueue("orders", "broker-a", 3)
REQUEST = message_requests.pull(QUEUE, "g", 0, 32)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)

#: Headers of answers with messages, by release.
HEADERS = {
    "4.9.7": '{"code":0,"extFields":{"suggestWhichBrokerId":"0","nextBeginOffset":"%d","maxOffset":"%d","minOffset":"%d"},'
    '"flag":1,"language":"JAVA","opaque":%d,"remark":"FOUND","serializeTypeCurrentRPC":"JSON","version":407}',
    "5.3.3": '{"code":0,"extFields":{"suggestWhichBrokerId":"0","groupSysFlag":"0","nextBeginOffset":"%d","maxOffset":"%d",'
    '"minOffset":"%d","topicSysFlag":"0"},"flag":1,"language":"JAVA","opaque":%d,"remark":"FOUND",'
    '"serializeTypeCurrentRPC":"JSON","version":479}',
}


def framed(header: bytes, body: bytes = b"", kind: int = 0) -> bytes:
    return struct.pack(">II", 4 + len(header) + len(body), kind << 24 | len(header)) + header + body


def found(opaque: int, at: int, body: bytes = b"", *, least: int = 0, most: int = 1000, release: str = "5.3.3") -> bytes:
    return framed((HEADERS[release] % (at, most, least, opaque)).encode(), body)


# -- requests


@given(
    topic=TEXT,
    group=TEXT,
    queue_id=st.integers(0, 99),
    sql=st.none() | TEXT,
    account=st.none() | st.tuples(TEXT, TEXT, st.none() | TEXT),
    asked=st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(-1, 2**63 - 1), st.integers(1, 1 << 20)), min_size=1),
)
def test_a_rendered_request_is_the_general_one(topic, group, queue_id, sql, account, asked) -> None:
    queue = MessageQueue(topic, "b", queue_id)
    matching = None if sql is None else Filter(sql=sql)
    credentials = None if account is None else Credentials(*account)
    template = PullTemplate(queue, group, matching, credentials)
    for opaque, offset, count in asked:
        request = message_requests.pull(queue, group, offset, count, matching=matching)
        ext = request.ext if credentials is None else signed(request.ext, b"", credentials)
        general = encode(RemotingCommand(RequestCode.PULL_MESSAGE, opaque, 0, None, ext))
        [rendered] = feed(FrameDecoder(), template.render(opaque, offset, count))
        assert [rendered] == feed(FrameDecoder(), general)
        assert rendered.ext == ext


# -- answers


def outcome(command: RemotingCommand) -> Any:
    """The result of the general path for a command: an answer's opaque and result, or the push itself."""
    if not command.is_response:
        return command
    try:
        result = REQUEST.answer(command, "server")
    except OrderedMQError as error:
        return command.opaque, type(error), error.message
    return command.opaque, result._replace(body=bytes(result.body))


def exact(stream: bytes) -> list[Any]:
    decoder, events = FrameDecoder(), []
    try:
        # Small pieces, so that few complete commands precede a broken frame in its piece.
        for at in range(0, len(stream), 64):
            events += [outcome(command) for command in feed(decoder, stream[at : at + 64])]
    except ProtocolError as error:
        # `feed` loses the commands before the error in the same piece, so decode the stream again, one command at a time.
        events = one_by_one(stream)
        events.append(error.message)
    return events


def one_by_one(stream: bytes) -> list[Any]:
    decoder, events = FrameDecoder(buffer_size=2 * len(stream) + 64), []
    decoder.buffer()[: len(stream)] = stream
    decoder.received(len(stream))
    try:
        while (command := decoder.next_command()) is not None:
            events.append(outcome(command))
    except ProtocolError:
        pass
    return events


def in_place(stream: bytes, cuts: Iterable[int], size: int) -> tuple[list[Any], int]:
    """The events of a PullDecoder that gets the stream in pieces, and how many answers it read in place."""
    decoder = PullDecoder(buffer_size=size)
    taken: list[Found | RemotingCommand] = []
    broken = None
    rest, sizes = memoryview(stream), iter(cuts)
    while len(rest) and broken is None:
        space = decoder.buffer()
        count = min(len(space), len(rest), next(sizes, len(rest)))
        space[:count] = rest[:count]
        rest = rest[count:]
        decoder.received(count)
        try:
            decoder.take(taken)
        except ProtocolError as error:
            broken = error.message
    # Bodies are copied only now, so that the comparison shows whether a body was overwritten.
    events = [
        (event[0], event[1]._replace(body=bytes(event[1].body))) if isinstance(event, tuple) else outcome(event)
        for event in taken
    ]
    return events + ([] if broken is None else [broken]), sum(isinstance(event, tuple) for event in taken)


NUMBER = st.one_of(st.integers(0, 70_000), st.sampled_from([2**31 - 1, 2**31, 10**17, 10**18, 2**63 - 1, 2**63, -1]))
ANSWERS = st.builds(
    lambda at, least, most, opaque, release, body: found(opaque, at, body, least=least, most=most, release=release),
    *(NUMBER, NUMBER, NUMBER, NUMBER, st.sampled_from(sorted(HEADERS)), st.binary(max_size=200)),
)
#: Headers with all fields of an answer, but in another form or with other values.
ODD_HEADERS = [
    '{"code":0,"extFields":{"nextBeginOffset":"007","maxOffset":"9","minOffset":"0"},"flag":1,"opaque":7}',
    '{"code":0,"extFields":{"nextBeginOffset":7,"maxOffset":9,"minOffset":0},"flag":1,"opaque":7}',
    '{ "opaque": 7, "code": 0, "flag": 1, "extFields": {"nextBeginOffset": "7", "maxOffset": "9", "minOffset": "0"}}',
    '{"opaque":7,"code":0,"flag":1,"extFields":{"nextBeginOffset":"7","maxOffset":"9","minOffset":"0"}}',
    '{"code":0,"extFields":{"maxOffset":"9","minOffset":"0"},"nextBeginOffset":"7","flag":1,"opaque":7}',
    '{"code":0,"extFields":{"opaque":"7","nextBeginOffset":"7","maxOffset":"9","minOffset":"0"},"flag":1,"opaque":7}',
    '{"code":0,"extFields":{"nextBeginOffset":"7","maxOffset":"9","minOffset":"0"},"flag":1,"opaque":7,"opaque":8}',
    '{"code":0,"extFields":{"nextBeginOffset":"7","maxOffset":"9","minOffset":"0"},"flag":1,"opaque":7,"remark":"\\"opaque\\":1"}',
    '{"code":0,"extFields":{"nextBeginOffset":"7","maxOffset":"9","minOffset":"0","suggestWhichBrokerId":"1"},"flag":1,"opaque":7}',
    '{"code":0,"extFields":{"nextBeginOffset":"7","maxOffset":"9","minOffset":"0","suggestWhichBrokerId":"x"},"flag":1,"opaque":7}',
    '{"code":0,"extFields":{"nextBeginOffset":"7"},"extFields":{"maxOffset":"9","minOffset":"0"},"flag":1,"opaque":7}',
    '{"code":0,"extFields":{"nextBeginOffset":"7","maxOffset":"9","minOffset":"0"},"flag":3,"opaque":7,"remark":"ü"}',
    '{"code":0,"extFields":{"nextBeginOffset":"7","maxOffset":"9","minOffset":"0"},"flag":0,"opaque":7}',
    '{"code":0,"extFields":{"nextBeginOffset":"7","maxOffset":"9","minOffset":"0"},"flag":1,"opaque":07}',
    '{"code":19,"extFields":{"nextBeginOffset":"7","maxOffset":"9","minOffset":"0"},"flag":1,"opaque":7}',
    '{"code":20,"extFields":{"nextBeginOffset":"7","maxOffset":"9","minOffset":"0"},"flag":1,"opaque":7,"remark":"NO_MATCHED_MESSAGE"}',
    '{"code":2,"flag":1,"opaque":7,"remark":"[OVERLOAD]"}',
    '{"code":40,"extFields":{"consumerGroup":"g"},"flag":2,"opaque":7}',
    '{"nextBeginOffset":"7","code":0,"extFields":{"nextBeginOffset":7,"maxOffset":"9","minOffset":"0"},"flag":1,"opaque":7}',
    '{"code":0,"extFields":{"next\\u0042eginOffset":"7","\\"nextBeginOffset":"7","maxOffset":"9","minOffset":"0"},"flag":1,"opaque":7}',
    "no JSON",
]
DIGITS = ("7", "0", "00", "07", "12345678901234567890", "8", "-8", "٣", "")
#: The same header twice, the second time with other digits. It may be read in place or not.
ODD = st.builds(
    lambda header, digit, body: framed(header.encode(), body) + framed(header.replace("7", digit).encode(), body),
    *(st.sampled_from(ODD_HEADERS), st.sampled_from(DIGITS), st.binary(max_size=9)),
)
BINARY = st.binary(max_size=40).map(lambda rest: framed(struct.pack(">hbhii", 0, 0, 479, 7, 1) + rest, kind=1))
FRAMES = st.one_of(ANSWERS, ANSWERS, ANSWERS, ODD, ODD, BINARY)


@given(
    frames=st.lists(FRAMES, max_size=12),
    again=st.integers(1, 3),
    cuts=st.lists(st.integers(1, 700), max_size=40),
    size=st.sampled_from([64, 300, 1000, 1 << 16]),
    end=st.binary(max_size=12),
)
def test_the_same_stream_cut_anywhere_gives_the_same_result(frames, again, cuts, size, end) -> None:
    stream = b"".join(frames * again) + end
    assert in_place(stream, cuts, size)[0] == exact(stream)


@pytest.mark.parametrize("header", ODD_HEADERS)
def test_an_odd_header_gives_the_same_result_with_other_digits(header: str) -> None:
    for digit in DIGITS:
        for place in range(header.count("7")):
            pieces = header.split("7")
            other = "7".join(pieces[: place + 1]) + digit + "7".join(pieces[place + 1 :])
            stream = framed(header.encode(), b"body") + framed(other.encode(), b"other")
            assert in_place(stream, (), 1 << 16)[0] == exact(stream)


@given(frames=st.lists(ANSWERS, min_size=1, max_size=4), damage=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255))))
def test_the_same_damaged_stream_gives_the_same_result(frames, damage) -> None:
    whole = [found(1, 32), *frames * 2]
    stream = bytearray(b"".join(whole))
    for at, value in damage:
        # The damage is after the first frame, whose header is learned.
        stream[len(whole[0]) + at % (len(stream) - len(whole[0]))] = value
    assert in_place(bytes(stream), (), 1 << 16)[0] == exact(bytes(stream))


@pytest.mark.parametrize("release", sorted(HEADERS))
def test_all_answers_but_the_first_are_read_in_place(release: str) -> None:
    stream = b"".join(found(n, 32 * n, b"x" * n, most=10**n, release=release) for n in range(17))
    events, read_in_place = in_place(stream, [100] * 100, 1 << 16)
    assert read_in_place == 16
    assert events == exact(stream)
    assert events[16] == (16, PullResult(message_requests.PullStatus.FOUND, 512, 0, 10**16, 0, b"x" * 16))


def test_another_header_is_learned_when_it_came_often_enough() -> None:
    """The broker was updated or now suggests a replica. Learning a header costs as much as reading many answers."""
    suggests = [found(n, 32).replace(b'WhichBrokerId":"0"', b'WhichBrokerId":"1"') for n in range(60)]
    stream = found(99, 1) + found(98, 1) + b"".join(suggests)
    events, read_in_place = in_place(stream, (), 1 << 16)
    assert events == exact(stream)
    assert read_in_place == 1 + 60 - 17
    mixed = b"".join(frame for n, suggest in enumerate(suggests) for frame in (found(n, 32), suggest))
    events, read_in_place = in_place(mixed, (), 1 << 16)
    assert events == exact(mixed)
    assert read_in_place > 50


def test_a_body_is_a_view_that_later_answers_do_not_change() -> None:
    decoder = PullDecoder(buffer_size=2000)
    kept: list[memoryview] = []
    for number in range(100):
        frame = found(number, 32, bytes([number]) * 300)
        for _ in pieces_into(decoder, frame):
            pass
        events: list[Found | RemotingCommand] = []
        decoder.take(events)
        for event in events:
            if isinstance(event, tuple):
                assert isinstance(event[1].body, memoryview)
                kept.append(event[1].body)
    assert [bytes(body) for body in kept] == [bytes([number]) * 300 for number in range(1, 100)]


def test_memory_grows_with_what_was_received_and_not_with_what_is_announced() -> None:
    asked: list[int] = []

    def allocate(size: int) -> memoryview:
        asked.append(size)
        return memoryview(bytearray(size))

    decoder = PullDecoder(allocate, buffer_size=1000)
    start = struct.pack(">II", 100_000_000, 10)
    decoder.buffer()[:8] = start
    decoder.received(8)
    for _ in range(30):
        events: list[Found | RemotingCommand] = []
        decoder.take(events)
        assert events == []
        decoder.received(len(decoder.buffer()[:200]))
    assert max(asked) <= 2 * (8 + 30 * 200)
