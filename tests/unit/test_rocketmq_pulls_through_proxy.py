"""Pulls and other requests through a Proxy, which discards answers while more than 64 KiB of them wait for a connection."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from orderedmq.errors import OrderedMQError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.messages.puller import Puller
from orderedmq.rocketmq.net import lane as lanes
from orderedmq.rocketmq.net.behind_proxy import UNWRITTEN, answered_together
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.fan_out import ask_queues
from orderedmq.rocketmq.net.lane import PASSED, Answer, Lane, RoundTrips
from orderedmq.rocketmq.wire.frame import RemotingCommand
from orderedmq.rocketmq.wire.message_requests import PullResult, max_offset
from orderedmq.rocketmq.wire.pull_frames import PullTemplate
from tests.stored_messages import Stored
from tests.unit.rocketmq_peer import Cluster, Link, Peer, answer
from tests.waits import soon

QUEUE = MessageQueue("T", "a", 0)
TEMPLATE = PullTemplate(QUEUE, "g")
END = 6000


def at(request: RemotingCommand) -> int:
    return int(request.ext["queueOffset"])


def stored(request: RemotingCommand, size: Callable[[int], int] = lambda offset: 1) -> bytes:
    """The answer of a queue with END messages: at most 32 messages or 256 KiB."""
    begin = at(request)
    messages: list[bytes] = []
    for offset in range(begin, min(begin + min(32, int(request.ext["maxMsgNums"])), END)):
        messages.append(Stored(offset=offset, body=b"%04d" % offset * size(offset), topic=b"T", queue_id=0).pack())
        if sum(map(len, messages)) > 256 * 1024:
            break
    following = str(begin + len(messages))
    fields: dict[str, Any] = {
        "minOffset": "0",
        "maxOffset": str(END),
        "suggestWhichBrokerId": "0",
        "MSG_REGION": "",
        "TRACE_ON": "false",
    }
    return answer(request, 0, b"".join(messages), "FOUND", nextBeginOffset=following, **fields)


class Dropping:
    """A Proxy that immediately answers all requests it has read. While more than UNWRITTEN bytes wait, it drops answers."""

    def __init__(self, size: Callable[[int], int] = lambda offset: 1) -> None:
        self.asked: Counter[int] = Counter()
        self.dropped = 0
        self._size = size

    def __call__(self, link: Link) -> None:
        while True:
            together = link.read_all()
            out: list[bytes] = []
            for request in together:
                self.asked[at(request)] += 1
                if sum(map(len, out)) > UNWRITTEN:
                    self.dropped += 1
                else:
                    out.append(stored(request, self._size))
            link.write(b"".join(out))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        cluster.fields = {"MSG_REGION": ""}
        yield cluster


def read_all(cluster: Cluster, most: int = 2000) -> list[int]:
    """The offsets of all messages, as a query pulls them."""
    with Client(cluster.nameserver().address) as client:
        puller = Puller(client)
        found: list[int] = []
        while len(found) < END:
            batch = puller.pull(QUEUE, len(found), most, 1 << 40, ("queue_offset",), END)
            found += batch.column(0).to_pylist()
        return found


@pytest.mark.holds("backlog through a Proxy")
@pytest.mark.parametrize("copies", [20, 250, 4000])
def test_no_more_pulls_are_in_flight_than_a_proxy_answers(
    cluster: Cluster, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of about 100, 1,000 and 16,000 bytes."""
    monkeypatch.setattr(lanes, "QUIET", 60.0)
    proxy = Dropping(lambda offset: copies)
    peer = cluster.scripted("a", proxy)
    assert read_all(cluster) == list(range(END))
    assert (proxy.dropped, peer.accepted) == (0, 1)
    assert set(proxy.asked.values()) == {1}


def test_a_broker_gets_many_pulls_at_once(cluster: Cluster) -> None:
    cluster.fields = {}
    proxy = Dropping()
    together: list[int] = []

    def script(link: Link) -> None:
        while True:
            requests = link.read_all()
            together.append(len(requests))
            link.write(b"".join(stored(request) for request in requests))

    cluster.scripted("a", script)
    assert read_all(cluster) == list(range(END))
    assert max(together) > answered_together(32 * 100)
    assert not proxy.asked


def test_messages_of_very_different_sizes_are_read_to_the_end_over_one_connection(cluster: Cluster) -> None:
    """The size of an answer is not known in advance. Answers that are dropped are requested again without an error."""
    proxy = Dropping(lambda offset: 1 if offset % 1000 < 900 else 2000)
    peer = cluster.scripted("a", proxy)
    assert read_all(cluster) == list(range(END))
    assert proxy.dropped > 0
    assert peer.accepted == 1
    assert sum(proxy.asked.values()) <= len(proxy.asked) + 2 * proxy.dropped


@pytest.mark.holds("backlog through a Proxy")
def test_a_pull_without_an_answer_is_sent_again_when_later_ones_were_answered(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pull is not repeated because of a timeout, which would take a minute."""
    monkeypatch.setattr(lanes, "QUIET", 60.0)
    asked: Counter[int] = Counter()
    unlucky = {96, 320, 352, 2016, 4096}

    def script(link: Link) -> None:
        for request in link.requests():
            asked[at(request)] += 1
            if at(request) not in unlucky or asked[at(request)] > 1:
                link.write(stored(request))

    peer = cluster.scripted("a", script)
    assert read_all(cluster, END) == list(range(END))
    assert peer.accepted == 1
    assert {offset for offset, times in asked.items() if times > 1} == unlucky
    assert max(asked.values()) == 2


# -- the lane


@pytest.fixture
def lane_to() -> Iterator[Callable[..., Lane]]:
    peers: list[Peer] = []
    lanes: list[Lane] = []

    def lane(script: Callable[[Link], None], *, proxied: bool = True) -> Lane:
        peers.append(Peer(script))
        lanes.append(Lane.open(peers[-1].address, soon(), proxied=proxied))
        return lanes[-1]

    yield lane
    for one in lanes:
        one.close()
    for peer in peers:
        peer.close()


def received(lane: Lane, count: int) -> list[int]:
    """The first offsets of ``count`` answers, which must all contain messages."""
    found: list[Answer] = []
    while len(found) < count:
        found += lane.receive(10.0)
    for begin, most, result in found:
        assert isinstance(result, PullResult)
        assert result.next_begin_offset == begin + most
    return [begin for begin, _, _ in found]


def ranges(numbers: Sequence[int]) -> list[tuple[int, int]]:
    return [(32 * number, 32) for number in numbers]


def test_after_silence_pulls_are_sent_again_one_for_each_answer(lane_to: Callable[..., Lane]) -> None:
    again: list[int] = []

    def script(link: Link) -> None:
        for _ in range(5):
            link.read()
        for _ in range(5):
            requests = link.read_all()
            again.extend(map(at, requests))
            link.write(b"".join(map(stored, requests)))
        link.wait_for_end()

    lane = lane_to(script)
    lane.ask(TEMPLATE, ranges(range(5)), soon())
    assert received(lane, 5) == [0, 32, 64, 96, 128]
    assert again == [0, 32, 64, 96, 128]
    assert lane.in_flight == 0


def test_of_two_answers_to_a_pull_the_first_counts(lane_to: Callable[..., Lane]) -> None:
    """It does not matter which of the two requests is answered, so a slow Proxy also works."""

    def script(link: Link) -> None:
        for turn in (1, -1):
            first, again = link.read(), link.read()
            assert at(first) == at(again)
            assert first.opaque != again.opaque
            link.write(b"".join(map(stored, (first, again)[::turn])))
        link.write(stored(link.read()))
        link.wait_for_end()

    lane = lane_to(script)
    for number in range(3):
        lane.ask(TEMPLATE, ranges([number]), soon())
        assert received(lane, 1) == [32 * number]
        assert lane.in_flight == 0


def test_an_error_is_an_answer_too(lane_to: Callable[..., Lane]) -> None:
    def script(link: Link) -> None:
        link.read()
        link.reply(link.read(), 2, remark="[OVERLOAD]")
        link.wait_for_end()

    lane = lane_to(script)
    lane.ask(TEMPLATE, ranges([0]), soon())
    answers: list[Answer] = []
    while not answers:
        answers = lane.receive(10.0)
    [(begin, _, result)] = answers
    assert begin == 0
    assert isinstance(result, OrderedMQError)
    assert result.sub == "BUSY"


def test_a_proxy_that_is_gone_is_given_up_however_often_it_was_asked(lane_to: Callable[..., Lane]) -> None:
    asked: list[int] = []

    def script(link: Link) -> None:
        for request in link.requests():
            asked.append(at(request))

    lane = lane_to(script)
    lane._stalled = 1.0
    lane.ask(TEMPLATE, ranges([0, 1]), soon())
    answers: list[Answer] = []
    while not answers:
        answers = lane.receive(10.0)
    assert lane.closed
    assert len(answers) == 2
    # Requests are repeated 0.1, 0.2, 0.4 and 0.8 s after the first ones. A busy machine skips some repetitions.
    assert asked[:2] == [0, 32]
    assert set(asked[2:]) == {0}
    assert 1 <= len(asked[2:]) <= math.ceil(math.log2(1.0 / lanes.QUIET))


def test_a_broker_is_asked_only_once(lane_to: Callable[..., Lane], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "QUIET", 0.0)
    asked: list[int] = []

    def script(link: Link) -> None:
        for request in link.requests():
            asked.append(at(request))
            if at(request):
                link.write(stored(request))

    lane = lane_to(script, proxied=False)
    lane.ask(TEMPLATE, ranges([0]), soon())
    for number in range(1, 20):
        lane.ask(TEMPLATE, ranges([number]), soon())
        received(lane, 1)
    assert lane.receive(0.02) == []
    assert asked == [32 * number for number in range(20)]
    assert lane.in_flight == 1


def test_round_trips_of_later_requests_show_that_one_has_no_answer() -> None:
    trips = RoundTrips()
    trips.sent([0, 1, 2, 3])
    # These requests were in flight together, so their order says nothing.
    assert trips.answered([3, 2]) == []
    for number in range(4, 2 + PASSED):
        trips.sent([number])
        assert trips.answered([number]) == []
    trips.sent([100, 101])
    assert trips.answered([100]) == [0], "each answer must make room for one repeated request"
    assert trips.answered([101]) == [1]
    trips.sent([102])
    assert trips.answered([102]) == [], "each request must be repeated only once"


# -- other requests


def test_no_more_requests_about_queues_are_in_flight_than_a_proxy_answers(cluster: Cluster) -> None:
    together: list[int] = []

    def script(link: Link) -> None:
        while True:
            requests = link.read_all()
            together.append(len(requests))
            for request in requests:
                link.offset(request, int(request.ext["queueId"]))

    cluster.scripted("a", script)
    with Client(cluster.nameserver().address) as client:
        client.route("T", soon())
        queues = [QUEUE._replace(queue_id=number) for number in range(1000)]
        ends = ask_queues(client, [(queue, max_offset(queue)) for queue in queues], soon())
    assert ends == list(range(1000))
    assert max(together) <= UNWRITTEN // 500
