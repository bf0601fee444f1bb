"""One stream of the protocol without I/O: the numbers of requests, commands that arrive in pieces, and why the stream ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orderedmq.conditions import RocketMQCondition
from orderedmq.errors import OrderedMQError, ProtocolError, RocketMQError, RocketMQUnavailableError
from orderedmq.rocketmq.wire.codes import FLAG_RESPONSE
from orderedmq.rocketmq.wire.frame import FrameDecoder, RemotingCommand, encode
from orderedmq.rocketmq.wire.pull_frames import PullDecoder
from orderedmq.rocketmq.wire.stream import SILENCE, Stream

DECODERS = [FrameDecoder, PullDecoder]


def stream(decoder: Callable[[], FrameDecoder] = FrameDecoder) -> Stream[str, RemotingCommand]:
    return Stream("host:1", decoder(), 100.0)


def fed(one: Stream[str, RemotingCommand], data: bytes, now: float = 100.0) -> list[RemotingCommand]:
    one.buffer()[: len(data)] = data
    return one.receive(len(data), now)


def answer(number: int) -> bytes:
    return encode(RemotingCommand(0, number, FLAG_RESPONSE, body=b"body"))


def ended(one: Stream[str, RemotingCommand]) -> tuple[str, str]:
    """The condition and the message of the error for a request that was in flight."""
    error: OrderedMQError = one.no_answer("a pull")
    assert type(error) is (ProtocolError if "does not speak" in error.message else RocketMQUnavailableError)
    return str(error.sub), error.message


def test_numbers_stay_in_31_bits_and_pass_over_those_that_are_in_use() -> None:
    one = stream()
    assert one.numbers(2) == [0, 1]
    one.add({0: "held"}, 100.0)
    one._next = itertools.count(2**31 - 2)
    assert one.numbers(4, in_use={1: "repeated"}) == [2**31 - 2, 2**31 - 1, 2, 3]


@pytest.mark.parametrize("decoder", DECODERS)
@given(cuts=st.lists(st.integers(1, 60), max_size=20))
def test_the_same_events_come_in_any_pieces(decoder: Callable[[], FrameDecoder], cuts: list[int]) -> None:
    one, data = stream(decoder), b"".join(map(answer, range(5)))
    events = []
    for size in [*cuts, len(data)]:
        part, data = data[:size], data[size:]
        if part:
            events += fed(one, part)
    assert [event.opaque for event in events] == list(range(5))
    assert one.lost is None


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(
    ("before", "why"),
    [
        (b"", "host:1 closed it before any answer, perhaps because it requires TLS or refuses this client"),
        (
            answer(0)[:9],
            "host:1 closed it inside a frame before any answer, perhaps because it requires TLS or refuses this client",
        ),
        (answer(0), "host:1 closed it"),
        (answer(0) + answer(1)[:9], "host:1 closed it inside a frame"),
    ],
)
def test_the_end_says_where_it_was(decoder: Callable[[], FrameDecoder], before: bytes, why: str) -> None:
    one = stream(decoder)
    if before:
        fed(one, before)
    assert one.receive(0, 100.0) == []
    assert ended(one) == ("CONNECTION_LOST", f"there was no answer to a pull: the connection to host:1 has ended: {why}")
    one.end("later")
    assert ended(one)[1].endswith(why)


@pytest.mark.parametrize("decoder", DECODERS)
def test_the_answer_of_another_protocol_is_the_error_of_each_request(decoder: Callable[[], FrameDecoder]) -> None:
    one = stream(decoder)
    assert fed(one, b"HTTP/1.1 400 Bad Request\r\n") == []
    assert ended(one)[1].startswith("host:1 does not speak RocketMQ's protocol: ")
    assert isinstance(one.not_sent("pull", "why"), ProtocolError)
    assert one.no_answer("a pull") is not one.no_answer("a pull")


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_refusal_before_the_first_frame_is_the_error_of_every_request(decoder: Callable[[], FrameDecoder]) -> None:
    refusal = RocketMQError(RocketMQCondition.TLS, "refused")
    one = stream(decoder)
    one.end(one.reason(refusal))
    for error in (one.no_answer("a pull"), one.not_sent("pull", "why")):
        assert (type(error), error.sub, error.message) == (RocketMQError, "TLS", "refused")
        assert error is not refusal
    accepted = stream(decoder)
    fed(accepted, answer(0))
    accepted.end(accepted.reason(refusal))
    assert ended(accepted) == ("CONNECTION_LOST", "there was no answer to a pull: the connection to host:1 has ended: refused")


@pytest.mark.parametrize("decoder", DECODERS)
def test_damage_ends_the_stream_after_what_came_before_it(decoder: Callable[[], FrameDecoder]) -> None:
    one = stream(decoder)
    assert [event.opaque for event in fed(one, answer(3) + b"\0\0\0\0")] == [3]
    assert ended(one)[0] == "CONNECTION_LOST"
    error = one.not_sent("pull", "why")
    assert (error.sub, error.message) == ("UNREACHABLE", "the pull was not sent: why")


def test_a_server_has_vanished_if_no_byte_came_since_the_last_one_or_since_requests_wait() -> None:
    one = stream()
    assert not one.vanished(1000.0)
    one.add({0: "a"}, 1000.0)
    assert not one.vanished(1000.0 + SILENCE - 0.1)
    # Another request does not restart the wait; a received byte does.
    one.add({1: "b"}, 1001.0)
    fed(one, answer(7)[:3], 1002.0)
    assert not one.vanished(1000.0 + SILENCE)
    assert one.silent_for(1003.0) == 1.0
    assert one.vanished(1002.0 + SILENCE)
    assert ended(one)[1].endswith("host:1 sent nothing for 2.5 s")


def test_a_server_that_answers_no_short_request_has_vanished_at_last() -> None:
    """Each request has a deadline shorter than the silence, and is given up before the next one is sent."""
    one = stream()
    for number in range(6):
        now = 1000.0 + number
        one.add({number: "a"}, now)
        if one.vanished(now + 0.5):
            break
        del one.in_flight[number]
        one.late("check")
    assert number == 2
    assert one.lost is not None
    one = stream()
    one.add({0: "a"}, 1000.0)
    one.in_flight.clear()
    one.late("check")
    # A received byte shows that the server is alive.
    fed(one, answer(0), 1001.0)
    one.add({1: "a"}, 2000.0)
    assert not one.vanished(2000.5)


def test_a_late_answer_is_unknown_only_if_the_request_may_have_been_written() -> None:
    one = stream()
    assert [str(one.late("pull", written=written).sub) for written in (True, False)] == ["TIMEOUT", "UNREACHABLE"]
