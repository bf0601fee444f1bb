"""A simulated RocketMQ broker that restarts, is paused or is away, and the clients of simulated processes that use it.

The code under test is real: `RocketMQGroups` with its roster, lock rules and commits. Only connections and clocks are simulated.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any, Final, cast
from unittest import mock

from ordered_source import group_session
from ordered_source.renewal import LOOK, RENEWAL_RETRY, Renewal
from orderedmq.conditions import UnavailableCondition
from orderedmq.errors import RocketMQUnavailableError
from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import LOCK_LIFE
from orderedmq.rocketmq.group import groups, lock_rules, membership, roster, running_info
from orderedmq.rocketmq.group.groups import RocketMQGroups
from orderedmq.rocketmq.net import deadline
from orderedmq.rocketmq.wire import registers
from orderedmq.rocketmq.wire.codes import RequestCode, ResponseCode
from orderedmq.rocketmq.wire.frame import RemotingCommand
from orderedmq.rocketmq.wire.namespaces import NO_NAMESPACES
from orderedmq.rocketmq.wire.request import Request
from orderedmq.rocketmq.wire.route import BrokerData, ClusterInfo, QueueData, Route

GROUP: Final = "billing"
TOPIC: Final = "orders"
BROKER: Final = "broker-a"
ADDRESS: Final = "broker-a:10911"
#: V5_3_3.
VERSION: Final = 479
#: Seconds between two writes of the broker's offsets to its disk, and from its start to the first one.
_PERSIST: Final = 5.0
_FIRST_PERSIST: Final = 10.0
#: Seconds after which a broker forgets a member without heartbeats.
_CHANNEL_LIFE: Final = 120.0


class Violation(AssertionError):
    """A promise is broken."""


class Killed(BaseException):
    """kill -9 of the process that made the call. It is a BaseException, so that no code of the project catches it."""


class Broker:
    """A broker's members, locks and numbers. Only the numbers that it wrote to its disk survive a restart."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.up = True
        #: Incremented by each restart, which ends all connections.
        self.starts = 0
        self.numbers: dict[MessageQueue, int] = {}
        self._disk: dict[MessageQueue, int] = {}
        self._persisted = world.now
        self._locks: dict[MessageQueue, tuple[str, float]] = {}
        self._members: dict[str, tuple[Client, float]] = {}

    def tick(self) -> None:
        if self.up and self._world.now - self._persisted >= _PERSIST:
            self._disk, self._persisted = dict(self.numbers), self._world.now

    def would_forget_a_grant(self) -> bool:
        """Return whether a kill would lose a fence or a tenure. The promises except it."""
        return any(
            self._disk.get(place) != number for place, number in self.numbers.items() if place.queue_id >= registers.SPAN
        )

    def kill(self) -> None:
        self.up = False
        self.numbers, self._locks, self._members = dict(self._disk), {}, {}
        self.starts += 1

    def start(self) -> None:
        self.up, self._persisted = True, self._world.now + _FIRST_PERSIST - _PERSIST

    def disconnected(self, client: Client) -> None:
        self._members = {name: known for name, known in self._members.items() if known[0] is not client}

    def answer(self, client: Client, request: Request[Any]) -> RemotingCommand:
        ext, now = request.ext, self._world.now
        match request.code:
            case RequestCode.HEART_BEAT:
                self._members[json.loads(bytes(request.body))["clientID"]] = client, now
            case RequestCode.UNREGISTER_CLIENT:
                self._members.pop(ext["clientID"], None)
            case RequestCode.GET_CONSUMER_LIST_BY_GROUP:
                self._members = {name: one for name, one in self._members.items() if now - one[1] < _CHANNEL_LIFE}
                return _reply(body=json.dumps({"consumerIdList": sorted(self._members)}).encode())
            case RequestCode.GET_CONSUMER_RUNNING_INFO:
                known = self._members.get(ext["clientId"])
                if known is None or known[0].process.frozen:
                    return _reply(ResponseCode.CONSUMER_NOT_ONLINE)
                return known[0].pushed(RemotingCommand(request.code, ext=ext))
            case RequestCode.LOCK_BATCH_MQ | RequestCode.UNLOCK_BATCH_MQ:
                return self._lock(json.loads(bytes(request.body)), unlock=request.code == RequestCode.UNLOCK_BATCH_MQ)
            case RequestCode.QUERY_CONSUMER_OFFSET:
                number = self.numbers.get(_place(ext))
                return _reply(ResponseCode.QUERY_NOT_FOUND) if number is None else _reply(offset=str(number))
            case RequestCode.UPDATE_CONSUMER_OFFSET:
                self.numbers[_place(ext)] = int(ext["commitOffset"])
            case _:
                raise AssertionError(f"the simulated broker does not know request {request.code}")
        return _reply()

    def _lock(self, asked: dict[str, Any], *, unlock: bool) -> RemotingCommand:
        granted = []
        for fields in asked["mqSet"]:
            queue = MessageQueue(fields["topic"], fields["brokerName"], fields["queueId"])
            holder, renewed = self._locks.get(queue, ("", float("-inf")))
            if unlock:
                if holder == asked["clientId"]:
                    del self._locks[queue]
            elif holder == asked["clientId"] or self._world.now - renewed > LOCK_LIFE:
                self._locks[queue] = asked["clientId"], self._world.now
                granted.append(fields)
        return _reply(body=json.dumps({"lockOKMQSet": granted}).encode())


def _place(ext: Any) -> MessageQueue:
    return MessageQueue(ext["topic"], BROKER, int(ext["queueId"]))


def _reply(code: int = ResponseCode.SUCCESS, body: bytes = b"", **ext: str) -> RemotingCommand:
    return RemotingCommand(code, ext=ext, body=body, version=VERSION)


class Process:
    """A process that may be paused (``frozen``) or killed (``dead``). ``renewing``: a renewal runs, which may hold a mutex."""

    def __init__(self) -> None:
        self.frozen = self.dead = self.renewing = False


class Connection:
    """A connection of a client to the broker, until the broker's next restart."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._starts = client.world.broker.starts

    @property
    def closed(self) -> bool:
        return self._starts != self._client.world.broker.starts

    def send_all(self, requests: Sequence[tuple[Request[Any], None]], limit: float) -> list[Any]:
        return [_Pending(self._client, request, limit) for request, _ in requests]


class _Pending:
    def __init__(self, client: Client, request: Request[Any], limit: float) -> None:
        self.result = lambda: client.call_address(ADDRESS, request, limit)


class Client:
    """A client of the cluster (net.client), with one connection."""

    names = NO_NAMESPACES
    routed_by_proxy = False
    trace = None

    def __init__(
        self, world: World, process: Process, on_push: Callable[[RemotingCommand], RemotingCommand | None] | None
    ) -> None:
        self.world, self.process, self._on_push = world, process, on_push
        self._connection = Connection(self)

    def another(self, on_push: Any = None, **_: Any) -> Client:
        return Client(self.world, self.process, on_push)

    def pushed(self, command: RemotingCommand) -> RemotingCommand:
        assert self._on_push is not None
        answer = self._on_push(command)
        assert answer is not None
        return answer

    def close(self) -> None:
        self.world.broker.disconnected(self)

    def require_own(self) -> None:
        """No process of the simulation forks."""

    def doubt(self, topic: str) -> None:
        """The broker never moves."""

    def behind_proxy(self, limit: float) -> bool:
        return False

    def topics(self, limit: float) -> tuple[str, ...]:
        return (TOPIC,)

    def route(self, topic: str, limit: float, *, fresh: bool = False) -> Route:
        return Route(
            topic, self.cluster(limit).brokers, (QueueData(BROKER, len(self.world.queues), len(self.world.queues), 6),)
        )

    def cluster(self, limit: float) -> ClusterInfo:
        return ClusterInfo({BROKER: BrokerData(BROKER, "c", {0: ADDRESS})}, {})

    whole_cluster = cluster

    def address(self, topic: str, broker_name: str, limit: float) -> str:
        return ADDRESS

    def connection(self, address: str, limit: float) -> Connection:
        self._reach(limit)
        if self._connection.closed:
            self._connection = Connection(self)
        return self._connection

    def call(self, request: Request[Any], limit: float, *, topic: str, broker_name: str) -> Any:
        return self.call_address(ADDRESS, request, limit)

    def call_address(self, address: str, request: Request[Any], limit: float) -> Any:
        self._reach(limit)
        self.connection(address, limit)
        self.world.meanwhile(self.process)
        self._reach(limit)
        return request.answer(self.world.broker.answer(self, request), address)

    def _reach(self, limit: float) -> None:
        while not self.process.dead and not self.world.broker.up:
            if self.world.now >= limit:
                raise RocketMQUnavailableError(UnavailableCondition.TIMEOUT, "the simulated broker is away")
            self.world.advance(LOOK)
        if self.process.dead:
            raise Killed


class World:
    """The broker, all processes, and a clock that only the simulation moves."""

    def __init__(self, random: Random, queues: int) -> None:
        self.random = random
        self.now = 1000.0
        self.queues = [MessageQueue(TOPIC, BROKER, number) for number in range(queues)]
        self.broker = Broker(self)
        self.renewals: list[VirtualRenewal] = []
        #: Events that are due: (when, what happens then).
        self.events: list[tuple[float, Callable[[], None]]] = []
        #: Called during some calls, so that other processes work at the same time.
        self.others: Callable[[], None] = lambda: None
        self.overlap = 0.0
        self._depth = 0

    def later(self, seconds: float, event: Callable[[], None]) -> None:
        self.events.append((self.now + seconds, event))

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += LOOK
            self.broker.tick()
            due = [event for at, event in self.events if at <= self.now]
            self.events = [(at, event) for at, event in self.events if at > self.now]
            for event in due:
                event()
            for renewal in list(self.renewals):
                renewal.tick()

    def meanwhile(self, process: Process) -> None:
        """Sometimes let time pass and others work before a call arrives at the broker."""
        if self._depth < 2 and self.random.random() < self.overlap:
            self._depth += 1
            before, process.frozen = process.frozen, False
            self.advance(self.random.choice((LOOK, LOOK, 2.0)))
            self.others()
            process.frozen = before
            self._depth -= 1


class VirtualRenewal(Renewal):
    """The renewal without its thread. The world's clock starts each round."""

    def start(self) -> None:
        client = cast(Client, cast(RocketMQGroups, self._groups)._client)
        self._world, self._process = client.world, client.process
        self._renewed = self._world.now
        self._world.renewals.append(self)

    def stop(self) -> None:
        self._world.renewals = [one for one in self._world.renewals if one is not self]

    def tick(self) -> None:
        age = self._world.now - self._renewed
        early = self.failed is not None or self._cut_off()
        if self._process.renewing or self._process.frozen or age < (RENEWAL_RETRY if early else self._interval):
            return
        mutexes = cast(RocketMQGroups, self._groups)._held_locks.requests
        if any(mutex.locked() for mutex in mutexes.values()):
            # The process gives queues back at this moment. In a thread, this renewal would wait.
            return
        self._process.renewing, rounds = True, iter((False, True))
        self._wait = lambda: next(rounds)  # type: ignore[method-assign]
        with contextlib.suppress(Killed):
            self._run()
        self._process.renewing, self._renewed = False, self._world.now


@contextlib.contextmanager
def virtual(world: World) -> Iterator[None]:
    """Let the code under test use the world's clock, renewals and client ids."""
    clock = SimpleNamespace(
        monotonic=lambda: world.now,
        time=lambda: world.now + 5_000_000,
        time_ns=lambda: int((world.now + 5_000_000) * 1e9),
        sleep=world.advance,
    )
    with contextlib.ExitStack() as patches:
        for module in (group_session, groups, lock_rules, membership, roster, running_info, deadline):
            patches.enter_context(mock.patch.object(module, "time", clock))
        patches.enter_context(mock.patch.object(group_session, "Renewal", VirtualRenewal))
        numbers = itertools.count()
        drawn = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=f"{next(numbers):08x}"))
        patches.enter_context(mock.patch.object(lock_rules, "uuid", drawn))
        yield
