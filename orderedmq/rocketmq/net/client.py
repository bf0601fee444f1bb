"""A cluster, as its nameservers tell it: which broker has which queue, and one connection to each address.

Rules: one deadline (monotonic seconds, finite) holds for an operation with all its retries. A request is sent again when the server said
that it did nothing, or when it may be done twice. Routes are asked for when they are needed and older than 30 s or in doubt; while no
nameserver answers, the last known ones go on holding (MQClientInstance.updateTopicRouteInfoFromNameServer). A nameserver that was restarted
knows some brokers and not yet others: these go on holding too for as long as reporting may take, or keys would go to other queues.

Membership of a group is a connection's at the broker, so each member needs a Client of its own.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, NoReturn, Self, TypeVar

from orderedmq.errors import OrderedMQError, Remedy, RocketMQError, RocketMQUnavailableError, TopicError
from orderedmq.rocketmq.net.backoff import CONNECT, RETRY
from orderedmq.rocketmq.net.connection import Connection, PushHandler
from orderedmq.rocketmq.net.transport import TlsOptions, parse_address
from orderedmq.rocketmq.wire.acl import Credentials
from orderedmq.rocketmq.wire.codes import MASTER_ID
from orderedmq.rocketmq.wire.message_requests import cluster_info, topic_list, topic_route
from orderedmq.rocketmq.wire.request import Request
from orderedmq.rocketmq.wire.route import BrokerData, ClusterInfo, Route

T = TypeVar("T")

#: Seconds after which a route is asked for again (Java: ``pollNameServerInterval``).
ROUTE_AGE: Final = 30.0
#: Seconds for which a broker that the nameserver does not know any more keeps its queues: the longest between two of its reports
#: (``registerNameServerPeriod``).
UNKNOWN: Final = 60.0
#: Seconds that one nameserver has to answer before the next is asked.
NAMESERVER_TIMEOUT: Final = 3.0
#: Seconds for an answer to what may be asked again, on another connection then: the network may have dropped this one without a word.
ATTEMPT: Final = 4.0
#: Seconds after which an unused connection is replaced: a server ends it at 120, and a request must not cross that.
IDLE: Final = 100.0


def attempt(request: Request[Any], deadline: float) -> float:
    """Until when to wait for one answer."""
    return min(deadline, time.monotonic() + ATTEMPT) if request.repeatable else deadline


def parse_nameservers(text: str) -> tuple[str, ...]:
    """``a:9876;b:9876`` as addresses, in order and once each. Raises RocketMQError ADDRESS."""
    found = tuple(dict.fromkeys(address.strip() for address in re.split("[;,]", text) if address.strip()))
    if not found:
        raise RocketMQError(
            "ADDRESS", f"{text[:200]!r} names no nameserver: host:port is expected, several with ';' between them"
        )
    for address in found:
        parse_address(address)
    return found


_NOBODY: Final[Mapping[str, float]] = {}


class _Endpoint:
    """The connection to one address, and how connecting to it has gone."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.connection: Connection | None = None
        self.failures = 0
        self.not_before = 0.0
        self.last = ""

    def usable(self, now: float) -> Connection | None:
        found = self.connection
        if found is None or found.closed or (not found.in_flight and found.idle(now) > IDLE):
            return None
        return found


class _Known:
    """A route, when it was last asked for, and whether a broker's error made it doubtful.

    ``unknown``: brokers of it that the nameserver does not know, and since when.
    """

    def __init__(self, route: Route, checked: float, unknown: Mapping[str, float] = _NOBODY) -> None:
        self.route = route
        self.checked = checked
        self.stale = False
        self.unknown = unknown


class Client:
    """See the module. Safe to use from many threads, and in a child after fork, which makes connections of its own."""

    def __init__(
        self,
        nameservers: str,
        *,
        credentials: Credentials | None = None,
        tls: TlsOptions | None = None,
        on_push: PushHandler | None = None,
    ) -> None:
        """``nameservers``: "host:port", several with ";" between them. No I/O yet. Raises RocketMQError ADDRESS, OptionError INVALID."""
        self.nameservers = parse_nameservers(nameservers)
        self._credentials = credentials
        self._tls = tls.context() if tls is not None else None
        self._on_push = on_push
        self._turn = random.randrange(len(self.nameservers))
        self._lock = threading.Lock()
        self._endpoints: dict[str, _Endpoint] = {}
        self._routes: dict[str, _Known] = {}
        self._closing = threading.Event()
        _clients.add(self)

    @property
    def account(self) -> str | None:
        """The access key of the account whose requests these are; None without one."""
        return self._credentials.access_key if self._credentials is not None else None

    def __repr__(self) -> str:
        return f"<Client of {';'.join(self.nameservers)}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def another(self, on_push: PushHandler | None = None) -> Client:
        """A client of the same cluster with connections of its own, as each member of a group needs. No I/O yet."""
        made = Client(";".join(self.nameservers), credentials=self._credentials, on_push=on_push)
        made._tls = self._tls
        return made

    def close(self) -> None:
        """End every connection; whoever waits here is told."""
        self._closing.set()
        with self._lock:
            endpoints = list(self._endpoints.values())
        for endpoint in endpoints:
            if endpoint.connection is not None:
                endpoint.connection.close()

    # --- what the nameservers know

    def route(self, topic: str, deadline: float, *, fresh: bool = False) -> Route:
        """Where a topic's queues are. Raises TopicError MISSING, RocketMQError STATIC_TOPIC, RocketMQUnavailableError.

        Unless ``fresh``, a topic that was there before keeps its last route: a nameserver that was restarted has none for a while.
        """
        now = time.monotonic()
        last = self._routes.get(topic)
        known = None if fresh else last
        if known is not None:
            if not known.stale and now - known.checked < ROUTE_AGE:
                return known.route
            # Others go on with what is known; and so does this thread, rather soon.
            known.checked, known.stale = now, False
            deadline = min(deadline, now + NAMESERVER_TIMEOUT)
        try:
            route = self._look_up(topic, deadline)
        except (RocketMQUnavailableError, TopicError):
            if known is None:
                raise
            return known.route
        found = _Known(route, time.monotonic()) if last is None else self._completed(route, last, deadline)
        self._routes[topic] = found
        return found.route

    def _completed(self, route: Route, last: _Known, deadline: float) -> _Known:
        """A broker that is not in a topic's route any more, and reports to the nameserver, has the topic no more. One that does not report
        may not have done so yet.
        """
        if last.route.brokers.keys() <= route.brokers.keys():
            return _Known(route, time.monotonic())
        try:
            reporting = self.cluster(deadline).brokers
            # Who reported in between has brought its queues.
            route = self.call_nameserver(topic_route(route.topic), deadline)
        except (RocketMQUnavailableError, TopicError):
            return last
        now = time.monotonic()
        unknown = {
            name: last.unknown.get(name, now)
            for name in last.route.brokers
            if name not in route.brokers and name not in reporting and now - last.unknown.get(name, now) < UNKNOWN
        }
        return _Known(route.with_unknown(last.route, unknown), now, unknown)

    def _look_up(self, topic: str, deadline: float) -> Route:
        """A nameserver that knows no broker says nothing about topics: it was started just now, and brokers report within 30 s."""
        failures = 0
        while True:
            try:
                return self.call_nameserver(topic_route(topic), deadline)
            except TopicError:
                found = self._known_to_another(topic, deadline)
                if found is not None:
                    return found
                if self.cluster(deadline).brokers:
                    raise
            nobody = RocketMQUnavailableError(
                "NO_BROKER",
                f"the nameserver {';'.join(self.nameservers)} knows no broker, and so no topic {topic!r}: it was started just now, or no "
                "broker reports to it; start one, or name another nameserver",
            )
            failures += 1
            self._pause(RETRY.delay(failures, random.random()), deadline, nobody)

    def _known_to_another(self, topic: str, deadline: float) -> Route | None:
        """What one nameserver does not know, because it was restarted and not all brokers have reported to it, the others may."""
        for address in self.nameservers if len(self.nameservers) > 1 else ():
            limit = min(deadline, time.monotonic() + NAMESERVER_TIMEOUT)
            with contextlib.suppress(RocketMQUnavailableError, TopicError):
                return self.connection(address, limit, wait=False).call(topic_route(topic), limit)
        return None

    def doubt(self, topic: str) -> None:
        """A broker's answer does not fit the route: ask for it again before it is used."""
        known = self._routes.get(topic)
        if known is not None:
            known.stale = True

    def cluster(self, deadline: float) -> ClusterInfo:
        """Every broker. Raises RocketMQUnavailableError."""
        return self.call_nameserver(cluster_info(), deadline)

    def topics(self, deadline: float) -> tuple[str, ...]:
        """Every name that is a topic to the nameserver; see `route.user_topics`. Raises RocketMQUnavailableError."""
        return self.call_nameserver(topic_list(), deadline)

    def address(
        self, topic: str, broker_name: str, deadline: float, broker_id: int = MASTER_ID, *, any_replica: bool = False
    ) -> str:
        """Where a broker of the topic listens. ``any_replica``: another one if the one asked for is away, which is good for reading.

        Raises RocketMQUnavailableError NO_BROKER, and what `route` raises.
        """
        broker: BrokerData | None = self.route(topic, deadline).brokers.get(broker_name)
        found = None
        if broker is not None:
            found = broker.address(broker_id) if any_replica else broker.addresses.get(broker_id)
        if found is None:
            self.doubt(topic)
            which = "master" if broker_id == MASTER_ID else f"replica {broker_id}"
            raise RocketMQUnavailableError(
                "NO_BROKER",
                f"the nameserver has no {which} of broker {broker_name!r} for topic {topic!r}: it is down, or starting",
            )
        return found

    # --- requests

    def call(
        self,
        request: Request[T],
        deadline: float,
        *,
        topic: str,
        broker_name: str,
        broker_id: int = MASTER_ID,
        any_replica: bool = False,
    ) -> T:
        """Ask a broker of the topic, by name, until the deadline. Raises what the answer stands for; see `Pending.result`."""
        return self._retry(
            request,
            deadline,
            lambda: self.address(topic, broker_name, deadline, broker_id, any_replica=any_replica),
            lambda: self.doubt(topic),
        )

    def call_address(self, address: str, request: Request[T], deadline: float) -> T:
        """Ask one server, as `call`."""
        return self._retry(request, deadline, lambda: address, lambda: None)

    def call_nameserver(self, request: Request[T], deadline: float) -> T:
        """Ask the nameservers in turn until one answers. Raises what the answer stands for; see `Pending.result`."""
        failures = 0
        while True:
            for _ in self.nameservers:
                turn = self._turn
                limit = min(deadline, time.monotonic() + NAMESERVER_TIMEOUT)
                try:
                    address = self.nameservers[turn % len(self.nameservers)]
                    return self.connection(address, limit, wait=len(self.nameservers) == 1).call(request, limit)
                except RocketMQUnavailableError as error:
                    last = error
                # Not for what another thread has turned already.
                if self._turn == turn:
                    self._turn = turn + 1
                if time.monotonic() >= deadline:
                    raise last
            failures += 1
            self._pause(RETRY.delay(failures, random.random()), deadline, last)

    def _retry(self, request: Request[T], deadline: float, where: Callable[[], str], doubt: Callable[[], None]) -> T:
        failures = 0
        unknown: RocketMQUnavailableError | None = None
        while True:
            limit = attempt(request, deadline)
            try:
                return self.connection(where(), deadline).call(request, limit)
            except TopicError:
                doubt()
                raise
            except RocketMQUnavailableError as error:
                if error.sub != "BUSY":
                    doubt()
                if error.outcome_unknown and not request.repeatable:
                    raise
                if error.outcome_unknown:
                    unknown = error
                last = unknown or error
            failures += 1
            self._pause(RETRY.delay(failures, random.random()), deadline, last)

    def _pause(self, delay: float, deadline: float, last: OrderedMQError) -> None:
        """Wait before the next attempt, or raise the last one's error if there is no time for another."""
        if time.monotonic() + delay >= deadline:
            raise last
        if self._closing.wait(delay):
            self._raise_closed()

    # --- connections

    def connection(self, address: str, deadline: float, *, wait: bool = True) -> Connection:
        """The connection to an address, made if there is none: for many requests at once, which are not sent again by themselves.

        One attempt. After failures the next one has to wait its time; without ``wait`` it fails instead.
        Raises RocketMQUnavailableError UNREACHABLE, RocketMQError ADDRESS, TLS or CLOSED.
        """
        with self._lock:
            endpoint = self._endpoints.setdefault(address, _Endpoint())
        if self._closing.is_set():
            self._raise_closed()
        found = endpoint.usable(time.monotonic())
        if found is not None:
            return found
        if not endpoint.lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise self._unreachable(address, f"no connection to {address} in time{endpoint.last}")
        try:
            return endpoint.usable(time.monotonic()) or self._connect(address, endpoint, deadline, wait)
        finally:
            endpoint.lock.release()

    def drop(self, address: str) -> None:
        """End the connection to an address, if there is one: the next request makes another.

        For a send without an answer: what is on its way must have ended before somebody looks whether it was done.
        """
        with self._lock:
            endpoint = self._endpoints.get(address)
        if endpoint is not None and endpoint.connection is not None:
            endpoint.connection.close()

    def _connect(self, address: str, endpoint: _Endpoint, deadline: float, wait: bool) -> Connection:
        delay = endpoint.not_before - time.monotonic()
        if delay > 0:
            refused = self._unreachable(address, f"no connection to {address} in time{endpoint.last}")
            self._pause(delay, deadline if wait else 0.0, refused)
        try:
            made = Connection.open(address, deadline, tls=self._tls, credentials=self._credentials, on_push=self._on_push)
        except RocketMQError as error:
            endpoint.failures += 1
            endpoint.not_before = time.monotonic() + CONNECT.delay(endpoint.failures, random.random())
            endpoint.last = f"; the last attempt: {error.message}"
            if error.sub != "UNREACHABLE":
                raise
            raise self._unreachable(address, error.message) from None
        old, endpoint.connection = endpoint.connection, made
        endpoint.failures, endpoint.last = 0, ""
        if old is not None:
            old.close()
        if self._closing.is_set():
            made.close()
            self._raise_closed()
        return made

    def _unreachable(self, address: str, why: str) -> RocketMQUnavailableError:
        """The error of a server that cannot be connected to, with what it is and what to look at."""
        if address not in self.nameservers:
            asked = "the nameserver says that a broker listens there: is it running, and is the address (its brokerIP1) one of this network?"
            return RocketMQUnavailableError("UNREACHABLE", f"{why}; {asked}")
        asked = "is a nameserver running there? Check the address in"
        return RocketMQUnavailableError(
            "UNREACHABLE", why, Remedy(f"{asked} namesrvAddr", f"{asked} --namesrv (host:port, mostly port 9876)")
        )

    def _raise_closed(self) -> NoReturn:
        raise RocketMQError("CLOSED", f"the connection to {';'.join(self.nameservers)} was closed")

    def _forget(self) -> None:
        """In a child after fork: no connection is left, and a lock may be held by a thread that is not there."""
        closed = self._closing.is_set()
        self._lock, self._closing, self._endpoints = threading.Lock(), threading.Event(), {}
        if closed:
            self._closing.set()


_clients: weakref.WeakSet[Any] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client._forget()


os.register_at_fork(after_in_child=_after_fork_in_child)
