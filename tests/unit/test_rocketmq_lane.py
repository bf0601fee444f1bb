"""Lanes for pulls from servers on loopback that answer late, wrongly, in part or never, and the lanes that a client keeps."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import pytest

from orderedmq.endpoint import Credentials
from orderedmq.errors import OrderedMQError, ProtocolError, RocketMQError, TopicError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.messages.puller import Puller
from orderedmq.rocketmq.net import endpoints
from orderedmq.rocketmq.net.account import Account
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.lane import Answer, Lane
from orderedmq.rocketmq.wire.codes import FLAG_ONEWAY
from orderedmq.rocketmq.wire.frame import RemotingCommand, encode
from orderedmq.rocketmq.wire.message_requests import PullResult
from orderedmq.rocketmq.wire.pull_frames import PullTemplate
from tests.stored_messages import Stored
from tests.unit.rocketmq_peer import Cluster, Link, Peer, answer
from tests.waits import soon, until

QUEUE = MessageQueue("T", "a", 0)
TEMPLATE = PullTemplate(QUEUE, "g")
RANGES = [(32 * n, 32) for n in range(20)]


@pytest.fixture
def lane_to() -> Iterator[Callable[..., Lane]]:
    """Makes a lane to a peer that runs a script; the arguments are those of `Lane`."""
    peers: list[Peer] = []
    lanes: list[Lane] = []

    def made(script: Callable[[Link], None], silence: float = 60.0, credentials: Credentials | None = None) -> Lane:
        peers.append(Peer(script))
        lane = Lane.open(peers[-1].address, soon(), account=Account(credentials))
        lane._stream._silence = silence
        lanes.append(lane)
        return lane

    yield made
    for lane in lanes:
        lane.close()
    for peer in peers:
        peer.close()


def found(request: RemotingCommand, body: bytes = b"") -> bytes:
    """The answer to a pull: ``body`` or, by default, one message whose body is the requested offset."""
    at = int(request.ext["queueOffset"])
    most = int(request.ext["maxMsgNums"])
    return answer(
        request,
        0,
        body or b"%d" % at,
        "FOUND",
        nextBeginOffset=str(at + most),
        minOffset="0",
        maxOffset="9999",
        suggestWhichBrokerId="0",
    )


def stored(request: RemotingCommand) -> bytes:
    """The answer of a queue with 9999 messages, whose bodies are their offsets."""
    begin = int(request.ext["queueOffset"])
    end = min(begin + min(32, int(request.ext["maxMsgNums"])), 9999)
    messages = b"".join(Stored(offset=n, body=b"%d" % n, topic=b"T", queue_id=0).pack() for n in range(begin, end))
    return answer(
        request, 0, messages, "FOUND", nextBeginOffset=str(end), minOffset="0", maxOffset="9999", suggestWhichBrokerId="0"
    )


def echo(link: Link) -> None:
    for request in link.requests():
        link.write(found(request))


def received(lane: Lane, count: int) -> list[Answer]:
    answers: list[Answer] = []
    while len(answers) < count:
        answers += lane.receive(10.0)
    return answers


def good(answers: list[Answer]) -> list[int]:
    """The offsets of the answers, which must all be correct."""
    for begin, most, result in answers:
        assert isinstance(result, PullResult)
        assert (bytes(result.body), result.next_begin_offset) == (b"%d" % begin, begin + most)
    return [begin for begin, _, _ in answers]


def error(found: Answer) -> OrderedMQError:
    _, _, result = found
    assert isinstance(result, OrderedMQError)
    return result


def body(found: Answer) -> bytes:
    _, _, result = found
    assert isinstance(result, PullResult)
    return bytes(result.body)


def test_answers_in_any_order_belong_to_their_requests(lane_to: Callable[..., Lane]) -> None:
    def script(link: Link) -> None:
        while True:
            asked = [link.read() for _ in RANGES]
            link.write(b"".join(map(found, asked[::-1])))

    lane = lane_to(script)
    for _ in range(3):
        lane.ask(TEMPLATE, RANGES, soon())
        assert lane.in_flight == len(RANGES)
        assert good(received(lane, len(RANGES))) == [begin for begin, _ in RANGES[::-1]]
        assert lane.in_flight == 0
    assert not lane.closed


def test_trap_1_requests_of_the_server_are_no_answers(lane_to: Callable[..., Lane]) -> None:
    """The server's request may have the number of a pull in flight. A request that is not one-way gets an answer."""
    refused: list[RemotingCommand] = []

    def script(link: Link) -> None:
        request = link.read()
        link.write(encode(RemotingCommand(40, request.opaque, FLAG_ONEWAY, ext={"consumerGroup": "g"})))
        link.write(encode(RemotingCommand(307, request.opaque)))
        refused.append(link.read())
        link.write(found(request))
        link.wait_for_end()

    lane = lane_to(script)
    lane.ask(TEMPLATE, RANGES[:1], soon())
    assert good(received(lane, 1)) == [0]
    assert [(command.code, command.is_response, command.remark) for command in refused] == [
        (3, True, "request code 307 is not supported")
    ]


def test_a_refused_pull_does_not_end_the_lane(lane_to: Callable[..., Lane]) -> None:
    def script(link: Link) -> None:
        first, second, third, fourth = (link.read() for _ in range(4))
        link.reply(first, 17, remark="no topic")
        link.reply(second, 2, remark="[OVERLOAD]")
        link.write(found(third))
        link.reply(fourth, 0, b"x", nextBeginOffset="no number")
        link.wait_for_end()

    lane = lane_to(script)
    lane.ask(TEMPLATE, RANGES[:4], soon())
    first, second, third, fourth = received(lane, 4)
    assert isinstance(error(first), TopicError)
    assert error(second).sub == "BUSY"
    assert good([third]) == [64]
    assert isinstance(error(fourth), ProtocolError)
    assert not lane.closed


@pytest.mark.parametrize("cut", [0, 1, 7, 60, -1])
def test_answers_before_a_cut_count_and_the_other_pulls_fail_with_one_error(lane_to: Callable[..., Lane], cut: int) -> None:
    def script(link: Link) -> None:
        first, second, _ = (link.read() for _ in range(3))
        link.write(found(first) + found(second)[:cut])

    lane = lane_to(script)
    lane.ask(TEMPLATE, RANGES[:3], soon())
    first, second, third = received(lane, 3)
    assert good([first]) == [0]
    assert error(second) is error(third)
    assert error(second).sub == "CONNECTION_LOST"
    assert ("inside a frame" in error(second).message) == (cut != 0)
    assert lane.closed
    lane.ask(TEMPLATE, RANGES[:1], soon())
    assert error(lane.receive(0.0)[0]).sub == "CONNECTION_LOST"


def test_a_pull_without_an_answer_is_given_up_and_others_are_not(lane_to: Callable[..., Lane]) -> None:
    late = threading.Event()

    def script(link: Link) -> None:
        first, second = link.read(), link.read()
        link.write(found(second))
        late.wait()
        link.write(found(first) + found(link.read()))
        link.wait_for_end()

    lane = lane_to(script)
    lane.ask(TEMPLATE, RANGES[:1], soon(0.05))
    lane.ask(TEMPLATE, RANGES[1:2], soon())
    assert good(received(lane, 1)) == [32]
    [given_up] = _until_some(lane)
    assert (given_up[0], error(given_up).sub) == (0, "TIMEOUT")
    lane.ask(TEMPLATE, RANGES[2:3], soon())
    late.set()
    # The late answer is ignored.
    assert good(received(lane, 1)) == [64]


def _until_some(lane: Lane) -> list[Answer]:
    while True:
        if answers := lane.receive(0.02):
            return answers


def test_a_half_open_connection_is_found_before_a_deadline_that_is_far_away(lane_to: Callable[..., Lane]) -> None:
    lane = lane_to(lambda link: link.wait_for_end())
    lane._stalled = 0.1
    lane.ask(TEMPLATE, RANGES[:2], soon(600))
    answers = _until_some(lane)
    assert lane.closed
    assert [begin for begin, _, _ in answers] == [0, 32]
    assert error(answers[0]).sub == "CONNECTION_LOST"
    assert "sent nothing" in error(answers[-1]).message


def test_an_idle_lane_is_not_closed_for_silence(lane_to: Callable[..., Lane]) -> None:
    lane = lane_to(lambda link: link.wait_for_end())
    lane._stalled = 0.0
    assert lane.receive(0.02) == []
    assert not lane.closed


def test_answers_that_arrived_before_the_deadline_are_not_late(lane_to: Callable[..., Lane]) -> None:
    """Decoding may take long. So answers that arrived during the decoding are read before the deadline is checked."""
    written = threading.Event()

    def script(link: Link) -> None:
        link.write(b"".join(found(link.read()) for _ in RANGES))
        written.set()
        link.wait_for_end()

    lane = lane_to(script, silence=0.0)
    lane.ask(TEMPLATE, RANGES, soon(0.0))
    written.wait()
    assert good(received(lane, len(RANGES))) == [begin for begin, _ in RANGES]


# -- the lanes of a client


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.nameserver().address) as client:
        yield client


def test_a_lane_is_kept_for_the_next_pull_and_no_two_threads_have_the_same(cluster: Cluster, client: Client) -> None:
    peer = cluster.scripted("a", echo)
    first, second = client.lane(peer.address, soon()), client.lane(peer.address, soon())
    assert first is not second
    client.give_back(first)
    assert client.lane(peer.address, soon()) is first
    first.ask(TEMPLATE, RANGES[:1], soon())
    client.give_back(first)
    assert first.closed, "a lane with an abandoned request must be closed"
    client.give_back(second)
    assert client.lane(peer.address, soon()) is second


def test_a_lane_that_the_server_closed_meanwhile_is_not_used(cluster: Cluster, client: Client) -> None:
    ending = threading.Event()

    def script(link: Link) -> None:
        link.write(found(link.read()))
        ending.wait()

    peer = cluster.scripted("a", script)
    lane = client.lane(peer.address, soon())
    lane.ask(TEMPLATE, RANGES[:1], soon())
    received(lane, 1)
    client.give_back(lane)
    ending.set()
    until(lambda: lane.receive(0.0) or lane.closed)
    other = client.lane(peer.address, soon())
    assert other is not lane
    assert not other.closed


def test_an_idle_lane_is_replaced_before_the_server_ends_it(
    cluster: Cluster, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = cluster.scripted("a", echo)
    lane = client.lane(peer.address, soon())
    client.give_back(lane)
    monkeypatch.setattr(endpoints, "MAX_IDLE", 0.0)
    assert client.lane(peer.address, soon()) is not lane
    assert lane.closed


def test_close_ends_a_pull_that_waits(cluster: Cluster, client: Client) -> None:
    asked = threading.Event()

    def script(link: Link) -> None:
        link.read()
        asked.set()
        link.wait_for_end()

    peer = cluster.scripted("a", script)
    idle = client.lane(peer.address, soon())
    client.give_back(idle)
    raised: list[OrderedMQError] = []

    def pull() -> None:
        with pytest.raises(RocketMQError) as caught:
            Puller(client).pull(QUEUE, 0, 100, 1 << 20, ("body",))
        raised.append(caught.value)

    thread = threading.Thread(target=pull)
    thread.start()
    asked.wait()
    client.close()
    thread.join()
    assert [one.sub for one in raised] == ["CLOSED"]
    assert idle.closed
    with pytest.raises(RocketMQError, match="CLOSED"):
        client.lane(peer.address, soon())


@pytest.mark.filterwarnings("always::ResourceWarning")
def test_pulls_that_were_read_ahead_end_with_the_client(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    for name in ("fetch.PIECE", "puller.AHEAD"):
        monkeypatch.setattr(f"orderedmq.rocketmq.messages.{name}", 64)
    ended = threading.Event()

    def script(link: Link) -> None:
        try:
            for request in link.requests():
                link.write(stored(request))
        except (EOFError, OSError):
            # A client that closes a connection with unread answers resets it.
            ended.set()

    cluster.scripted("a", script)
    with Client(cluster.nameserver().address) as client:
        puller = Puller(client)
        assert puller.pull(QUEUE, 0, 320, 1 << 30, ("body",), 9000).num_rows == 64
        assert not ended.is_set()
        [(fetch, _)] = puller._ahead.values()
        assert fetch._lane is not None
        here = str(fetch._lane._transport._socket.getsockname())
    assert ended.wait(60)
    del puller, client, fetch
    gc.collect()
    # Other tests may have left sockets that end only now, so only warnings about this module count.
    assert not [warning for warning in recwarn if here in str(warning.message)]


def test_a_broker_that_cuts_every_connection_after_some_answers_is_read_to_the_end(cluster: Cluster, client: Client) -> None:
    """A connection may also be cut inside an answer, with dozens of others on their way."""
    cuts = iter([1, 40, 0, 7, 3, 90] + [10_000] * 9)

    def script(link: Link) -> None:
        left = next(cuts)
        for request in link.requests():
            whole = stored(request)
            if not left:
                link.write(whole[: len(whole) // 2])
                return
            link.write(whole)
            left -= 1

    cluster.scripted("a", script)
    puller = Puller(client)
    rows: list[bytes] = []
    while len(rows) < 9999:
        rows += puller.pull(QUEUE, len(rows), 9999 - len(rows), 1 << 30, ("body",)).column("body").to_pylist()
    assert rows == [b"%d" % n for n in range(9999)]
