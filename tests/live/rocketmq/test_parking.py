"""Parking lots on real servers: each message is parked once, despite faults of connections, brokers and topics."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from orderedmq.endpoint import Endpoint
from orderedmq.model import MessageQueue
from orderedmq.parking import AT_ONCE, Parking, Ticket, lot_token, parked_queue
from orderedmq.rocketmq.append.broker_port import BrokerPort
from orderedmq.rocketmq.broker import RocketMQBroker
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.rocketmq.messages.topic_changes import delete_topic, every_master
from tests.contract.support import SHARED, read, rows
from tests.live.rocketmq.group_world import World, condition
from tests.live.rocketmq.proxy import Connection, Network, Path, Way
from tests.waits import until

#: Sizes of properties: one leaves room for a ticket without a long error, the other leaves no room at all.
FULL, OVERFULL = 32_000, 32_400


class Lots(World):
    """A topic with messages in its first queue, which a client has locked."""

    def __init__(self, cluster: Cluster, queues: int = 2, address: str | None = None) -> None:
        super().__init__(cluster, queues, address)
        self.send(self.queue, 10)
        self.client = self.broker.groups.join("me")
        [self.token] = self.lock(self.broker, self.client, [self.queue])
        self.lot = parked_queue(self.group, self.queue)

    def park(self, *offsets: int, broker: RocketMQBroker | None = None, error: str = "why") -> list[bool]:
        return (broker or self.broker).groups.park(self.token, parkings(self.queue, offsets, error))

    def parked(self) -> list[str]:
        """Return the bodies in the lot, read through a new connection that has cached nothing."""
        with RocketMQBroker(Endpoint(None, self.cluster.address)) as broker:
            return [row["body"].decode() for row in read(broker, self.lot, 0, ("body",))]


def parkings(source: MessageQueue, offsets: Sequence[int], error: str = "why") -> list[Parking]:
    return [Parking(source, at, Ticket(at, 1, 1, AT_ONCE, error)) for at in offsets]


@pytest.fixture
def usual(cluster: Cluster) -> Iterator[Lots]:
    with Lots(cluster) as world:
        yield world


# -- faults -----------------------------------------------------------------------------------------------------------------------


#: What happens to the second of two requests, and how many requests are sent in total in that case.
CUTS: list[tuple[Callable[[Connection], Path], int]] = [
    # The answer is lost, and the messages are found.
    (lambda c: Path(down=Way(cut_after=c.down)), 2),
    # The request is lost, so it is sent again.
    (lambda c: Path(up=Way(cut_after=c.up + 500, reset=True)), 3),
]


@pytest.mark.holds("parked once")
def test_a_message_is_parked_once_though_an_answer_or_a_request_is_lost(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two messages per request.
    monkeypatch.setattr("orderedmq.rocketmq.codec.encode.TARGET_BYTES", 700)
    send = BrokerPort.send
    with Network.before(cluster) as network, Lots(cluster, address=network.address) as world:
        sent = 0

        def spoilt(path: Callable[[Connection], Path], self: BrokerPort, *arguments: Any) -> Callable[[], int]:
            nonlocal sent
            sent += 1
            if sent == 2:
                network.broker.spoil_sends(path)
            return send(self, *arguments)

        assert world.park(0) == [True]
        expected = ["0"]
        for number, (path, requests) in enumerate(CUTS):
            sent = 0
            offsets = range(1 + 4 * number, 5 + 4 * number)
            with monkeypatch.context() as patch:
                patch.setattr(BrokerPort, "send", lambda self, *arguments, path=path: spoilt(path, self, *arguments))
                assert world.park(*offsets) == [True] * 4
            expected += map(str, offsets)
            assert world.parked() == expected
            assert sent == requests
        assert world.park(*range(9)) == [True] * 9
        assert world.parked() == expected


def text_of(path: pathlib.Path) -> str:
    """Return a file's text, or "" while the file is being replaced or has not been written yet."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_text()
    return ""


@pytest.mark.holds("parked once")
def test_a_broker_that_is_killed_between_two_parks_gets_each_message_once(usual: Lots) -> None:
    """The broker loses the offsets of the last seconds. The next renewal commits them again, including the lot's."""
    assert usual.park(0, 1, 2) == [True] * 3
    lot = lot_token(usual.token)
    usual.broker.groups.commit({usual.token: 1, lot: 1})
    offsets = usual.cluster.broker.home / "store" / "config" / "consumerOffset.json"
    until(lambda: f"{usual.lot.topic}@{usual.group}" in text_of(offsets), "the broker has written its offsets")
    usual.broker.groups.commit({usual.token: 2, lot: 2})
    usual.cluster.broker.restart()
    assert usual.park(3, 2) == [True] * 2
    assert usual.parked() == ["0", "1", "2", "3"]
    assert usual.broker.groups.renew([usual.token]) == []
    assert usual.connect().groups.offsets(usual.group, [usual.queue, usual.lot]) == {usual.queue: 2, usual.lot: 2}
    assert usual.park(0, 3) == [False, True]
    assert usual.broker.groups.park(usual.token, parkings(usual.lot, [0, 2])) == [False, True]
    assert usual.parked() == ["0", "1", "2", "3", "2"]


def delete(broker: RocketMQBroker, topic: str) -> None:
    """Delete a topic as mqadmin does, even if messages are parked in it."""
    delete_topic(broker._client, broker.log, topic, every_master(broker._client).values())


def test_a_deleted_lot_is_created_again_without_its_former_messages(usual: Lots) -> None:
    other = usual.connect()
    usual.broker.groups.heartbeat(usual.group, usual.client, SHARED)
    assert usual.park(0, 1) == [True] * 2
    delete(other, usual.lot.topic)
    assert usual.park(1) == [True]
    assert usual.parked() == ["1"]
    # Now the other client creates the lot again, with more messages than this client had known.
    delete(other, usual.lot.topic)
    assert usual.park(5, 6, 7, broker=other) == [True] * 3
    assert usual.park(1, 7) == [True] * 2
    assert usual.parked() == ["5", "6", "7", "1"]


def test_another_process_recognises_parked_messages(usual: Lots) -> None:
    usual.broker.groups.heartbeat(usual.group, usual.client, SHARED)
    assert usual.park(0, 5, 3) == [True] * 3
    assert usual.park(3, 0, 4, 5, broker=usual.connect()) == [True] * 4
    assert usual.park(4, 9) == [True] * 2
    assert usual.parked() == ["0", "5", "3", "4", "9"]
    usual.broker.groups.unlock([usual.token])
    for broker in (usual.broker, usual.connect()):
        assert condition(partial(usual.park, 8, broker=broker)) == "LOCK.LOST"
    assert usual.parked() == ["0", "5", "3", "4", "9"]


# -- the content of a parked copy --------------------------------------------------------------------------------------------------


@pytest.mark.holds("parked as sent")
def test_a_parked_copy_has_the_key_and_all_columns_of_its_message(usual: Lots) -> None:
    columns = {"tags": ["t", None], "keys": [None, "k"], "sharding_key": ["s", None], "properties": [[("own", "x")], None]}
    begin = usual.log.append({usual.queue: rows([b"\0\xff", b""], **columns)})[usual.queue].begin
    assert usual.park(begin, begin + 1, 0) == [True] * 3
    wanted = ("body", "tags", "keys", "sharding_key", "message_id")
    sent, copies = (read(usual.broker, queue, at, wanted) for queue, at in ((usual.queue, begin), (usual.lot, 0)))
    assert copies[:2] == sent
    assert copies[2]["body"] == b"0"


def test_an_error_is_cut_where_properties_leave_no_room_and_full_properties_are_refused_by_name(usual: Lots) -> None:
    full, overfull = ([("p", "x" * size)] for size in (FULL, OVERFULL))
    begin = usual.log.append({usual.queue: rows(["full", "overfull"], properties=[full, overfull])})[usual.queue].begin
    assert usual.park(begin, error="e" * 900) == [True]
    [row] = read(usual.broker, usual.lot, 0, ("properties",))
    ticket = Ticket.from_properties(dict(row["properties"]))
    assert dict(row["properties"])["p"] == "x" * FULL
    assert 0 < len(ticket.error) < 900
    assert (ticket.offset, set(ticket.error)) == (begin, {"e"})
    assert condition(lambda: usual.park(0, begin + 1)) == "MESSAGE.PROPERTIES_TOO_LARGE"
    assert usual.parked() == ["full"]


# -- the topic --------------------------------------------------------------------------------------------------------------------


def test_a_missing_lot_has_neither_bounds_nor_offsets(usual: Lots) -> None:
    with Network.before(usual.cluster) as network, RocketMQBroker(Endpoint(None, network.address)) as broker:
        assert broker.log.bounds([usual.lot, usual.queue]).keys() == {usual.queue}
        assert broker.groups.offsets(usual.group, [usual.lot]) == {}
        # A route in a cache does not prove that a queue is missing, so each of the two calls asks for the routes and the brokers again.
        assert len(network.namesrv.requests()) < 12
    assert usual.lot.topic not in {topic.name for topic in usual.log.topics()}


def test_lots_are_created_at_each_broker_of_the_topic_once_it_is_reachable(two_brokers: Cluster) -> None:
    with Network.before(two_brokers) as network, Lots(two_brokers, 6, network.address) as world:
        second = network.brokers[1]
        second.default = Path(refuse=True)
        second.each(Connection.reset)
        assert world.park(0) == [True]
        name = world.queue.broker_name
        assert [queue.broker_name for queue in world.log.queues(world.lot.topic)] == [name] * 3
        second.default = Path()
        queue = world.queues[-1]
        assert queue.broker_name != name
        world.send(queue, 1)
        [token] = world.lock(world.broker, world.client, [queue])
        assert world.broker.groups.park(token, parkings(queue, [0])) == [True]
        assert world.log.queues(world.lot.topic) == [parked_queue(world.group, queue) for queue in world.queues]
