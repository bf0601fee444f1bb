"""A client of a cluster: routes from its nameservers, and one connection to each address.

Rules: one deadline (monotonic seconds, finite) covers an operation with all its retries. A request is sent again if the server
reported that it did not execute the request, or if the request is repeatable. A route is requested when it is needed and the known
one is older than 30 s or doubtful. While no nameserver answers, the last known routes stay in use
(MQClientInstance.updateTopicRouteInfoFromNameServer). A restarted nameserver does not know all brokers yet. Brokers that it does not
know stay in a route for as long as their next reports may take, because otherwise keys would go to other queues.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from orderedmq.conditions import UnavailableCondition
from orderedmq.endpoint import CredentialsSource, TlsOptions, parse_nameservers
from orderedmq.errors import RocketMQUnavailableError, TopicError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.codec.encode import Packing
from orderedmq.rocketmq.net import behind_proxy
from orderedmq.rocketmq.net.account import Account
from orderedmq.rocketmq.net.connection import Connection, PushHandler
from orderedmq.rocketmq.net.deadline import REQUEST_TIMEOUT, RETRY, Deadline, leaves_attempt
from orderedmq.rocketmq.net.endpoints import Endpoints
from orderedmq.rocketmq.net.lane import Lane
from orderedmq.rocketmq.net.transport import ssl_context
from orderedmq.rocketmq.wire.codes import MASTER_ID
from orderedmq.rocketmq.wire.message_requests import cluster_info, topic_list, topic_route
from orderedmq.rocketmq.wire.namespaces import NO_NAMESPACES, Namespaces
from orderedmq.rocketmq.wire.request import Request
from orderedmq.rocketmq.wire.route import BrokerData, ClusterInfo, Route

logger = logging.getLogger("orderedmq")

T = TypeVar("T")

#: Seconds after which a route is requested again (Java: ``pollNameServerInterval``).
ROUTE_AGE: Final = 30.0
#: Seconds for which a broker that the nameserver no longer knows keeps its queues. It is the longest interval between two reports of a
#: broker (``registerNameServerPeriod``).
UNKNOWN_BROKER_LIFE: Final = 60.0
#: Seconds to wait for one nameserver before asking the next.
NAMESERVER_TIMEOUT: Final = 3.0
#: Seconds to wait for the answer to a repeatable request before sending it again, over another connection if this one was silent.
ATTEMPT_TIMEOUT: Final = 4.0


def attempt_deadline(request: Request[Any], deadline: float) -> float:
    """Return the deadline of one attempt at a request, in monotonic seconds."""
    return min(deadline, Deadline.after(ATTEMPT_TIMEOUT)) if request.repeatable else deadline


_NO_BROKERS: Final[Mapping[str, float]] = {}
#: For how many seconds a nameserver that did not answer is left out when all are asked.
_SILENCE: Final = 60.0


class _Known:
    """A route, when it was last requested, and whether a broker's error has made it doubtful (``stale``).

    ``unknown`` has the brokers that the nameserver no longer knows, with the time at which this was first noticed.
    """

    def __init__(self, route: Route, checked: float, unknown: Mapping[str, float] = _NO_BROKERS) -> None:
        self.route = route
        self.checked = checked
        self.stale = False
        self.unknown = unknown


class Client:
    """A client of one cluster; see the module. Thread-safe. Each use in a child after a fork raises OptionError UNSUPPORTED."""

    def __init__(
        self,
        nameservers: str,
        *,
        credentials: CredentialsSource | None = None,
        tls: TlsOptions | None = None,
        on_push: PushHandler | None = None,
        names: Namespaces = NO_NAMESPACES,
    ) -> None:
        """``nameservers``: "host:port", separated by ";". Does no I/O. Raises RocketMQError ADDRESS, OptionError INVALID."""
        self.nameservers = parse_nameservers(nameservers)
        context = ssl_context(tls) if tls is not None else None
        self._endpoints = Endpoints(self.nameservers, account=Account(credentials), tls=context, on_push=on_push, names=names)
        self.names = names
        self._turn = random.randrange(len(self.nameservers))
        #: Whether the log says that no nameserver answers.
        self._warned = False
        self._routes: dict[str, _Known] = {}
        self._proxied: bool | None = None  # See behind_proxy.
        #: Nameservers that have not answered, each with the time until which `whole_cluster` does not ask it again (monotonic seconds).
        self._silent: dict[str, float] = {}
        #: Whether the last route came from a Proxy. Unlike `behind_proxy`, this needs no request.
        self.routed_by_proxy = False
        #: Queues with a send that was given up and may still take effect; see `append.broker_port`.
        self.unsettled: set[MessageQueue] = set()
        #: How rows are sent through a Proxy, by topic and broker; see `append.broker_port`.
        self.packings: dict[tuple[str, str], Packing] = {}
        #: Held while a sink's group and bookmarks are created at a broker; see `sink.bookmarks`.
        self.entering = threading.Lock()

    @property
    def account(self) -> str | None:
        """The access key of the client's account; None without an account."""
        current = self._endpoints.account.current
        return current.access_key if current is not None else None

    def __repr__(self) -> str:
        return f"<Client of {';'.join(self.nameservers)}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def is_own(self) -> bool:
        """Whether this process has made the client. False in a child after a fork."""
        return self._endpoints.is_own

    def require_own(self) -> None:
        """Raises OptionError UNSUPPORTED in a child after a fork."""
        self._endpoints.require_own()

    def another(self, on_push: PushHandler | None = None) -> Client:
        """Return a client with separate connections, because a broker ties a group's member to its connection. Does no I/O."""
        client = Client(";".join(self.nameservers), on_push=on_push, names=self.names)
        client._endpoints.account, client._endpoints.tls = self._endpoints.account, self._endpoints.tls
        client._proxied = self._proxied
        return client

    def close(self) -> None:
        """Close every connection. Waiting operations raise an error."""
        self._endpoints.close()

    # --- requests to nameservers

    def route(self, topic: str, deadline: float, *, fresh: bool = False) -> Route:
        """Return a topic's route. Raises TopicError MISSING, RocketMQError STATIC_TOPIC, RocketMQUnavailableError.

        Unless ``fresh``, return the last known route if no route is found, because a restarted nameserver has no routes for a while.
        """
        now = time.monotonic()
        last = self._routes.get(topic)
        cached = None if fresh else last
        if cached is not None:
            if not cached.stale and now - cached.checked < ROUTE_AGE:
                return cached.route
            # Other threads use the known route during this request, and this thread uses it if no nameserver answers soon.
            cached.checked, cached.stale = now, False
            deadline = min(deadline, now + NAMESERVER_TIMEOUT)
        try:
            route = self._look_up(topic, deadline)
        except (RocketMQUnavailableError, TopicError):
            if cached is None:
                raise
            return cached.route
        newest = _Known(route, time.monotonic()) if last is None else self._complete(route, last, deadline)
        self._routes[topic] = newest
        self.routed_by_proxy = newest.route.by_proxy
        return newest.route

    def last_route(self, topic: str) -> Route | None:
        """Return the topic's last known route without a request; None if there is none."""
        last = self._routes.get(topic)
        return None if last is None else last.route

    def _complete(self, route: Route, last: _Known, deadline: float) -> _Known:
        """Return a new route, completed by brokers of the last route that the nameserver does not know.

        If a broker is missing in the new route but reports to the nameserver, it no longer has the topic. A missing broker that has not
        reported may do so soon, so it stays for `UNKNOWN_BROKER_LIFE` seconds.
        """
        if last.route.brokers.keys() <= route.brokers.keys():
            return _Known(route, time.monotonic())
        try:
            cluster = self.cluster(deadline)
            # A Proxy keeps the route from which the brokers are taken, also after one of them has gone away.
            reporting = {} if cluster.behind_proxy else cluster.brokers
            # Request the route again, so that it has brokers that have reported since the first request.
            route = self.call_nameserver(topic_route(route.topic), deadline)
        except (RocketMQUnavailableError, TopicError):
            return last
        now = time.monotonic()
        unknown = {
            name: last.unknown.get(name, now)
            for name in last.route.brokers
            if name not in route.brokers and name not in reporting and now - last.unknown.get(name, now) < UNKNOWN_BROKER_LIFE
        }
        return _Known(route.with_unknown(last.route, unknown), now, unknown)

    def _look_up(self, topic: str, deadline: float) -> Route:
        """Return a topic's route from the nameservers, and wait while they know no broker.

        A nameserver that knows no broker does not know which topics exist. It may have just started, and brokers report within 30 s.
        """
        failures = 0
        while True:
            try:
                return self.call_nameserver(topic_route(topic), deadline)
            except TopicError:
                route = self._look_up_everywhere(topic, deadline)
                if route is not None:
                    return route
                if self.cluster(deadline).brokers:
                    raise
            no_broker = RocketMQUnavailableError(
                UnavailableCondition.NO_BROKER,
                f"the nameserver {';'.join(self.nameservers)} knows no broker, so topic {topic!r} cannot be found: the "
                "nameserver has just started, or no broker reports to it. Start a broker, or name another nameserver",
            )
            failures += 1
            self._endpoints.pause(RETRY.delay(failures, random.random()), deadline, no_broker)

    def _look_up_everywhere(self, topic: str, deadline: float) -> Route | None:
        """Return the topic's route from any nameserver that has it, because a restarted one lacks it until brokers report."""
        for address in self.nameservers if len(self.nameservers) > 1 else ():
            limit = min(deadline, Deadline.after(NAMESERVER_TIMEOUT))
            with contextlib.suppress(RocketMQUnavailableError, TopicError):
                return self.connection(address, limit, wait=False).call(topic_route(topic), limit)
        return None

    def doubt(self, topic: str) -> None:
        """Mark the topic's route as doubtful after a broker's answer that does not fit it. It is requested again at its next use."""
        cached = self._routes.get(topic)
        if cached is not None:
            cached.stale = True

    def cluster(self, deadline: float) -> ClusterInfo:
        """Return every broker that one nameserver knows. Raises RocketMQUnavailableError."""
        failures = 0
        while True:
            try:
                cluster = behind_proxy.find_cluster(partial(self.call_nameserver, deadline=deadline), self._proxied)
            except RocketMQUnavailableError as error:
                failures += 1
                self._endpoints.pause(RETRY.delay(failures, random.random()), deadline, error)
            else:
                self._proxied = cluster.behind_proxy
                return cluster

    def whole_cluster(self, deadline: float, enough: Callable[[ClusterInfo], bool] | None = None) -> ClusterInfo:
        """Return every broker that any nameserver knows. Raises the errors of `cluster`.

        A restarted nameserver knows only the brokers that have reported after its start. Nameservers that do not answer are left out.
        One that is silent takes seconds, so it is asked again only after a minute, and ``enough`` ends the search: it returns whether the
        brokers found so far are enough.
        """
        cluster = self.cluster(deadline)
        for address in self.nameservers if len(self.nameservers) > 1 and not cluster.behind_proxy else ():
            if enough is not None and enough(cluster):
                break
            if time.monotonic() < self._silent.get(address, 0):
                continue
            limit = min(deadline, Deadline.after(NAMESERVER_TIMEOUT))
            try:
                cluster = cluster.united(self.connection(address, limit, wait=False).call(cluster_info(), limit))
            except RocketMQUnavailableError:
                self._silent[address] = Deadline.after(_SILENCE)
        return cluster

    def known_cluster(self, deadline: float, enough: Callable[[ClusterInfo], bool]) -> ClusterInfo:
        """Do what `whole_cluster` does, and wait while the nameservers know no broker. The result may be empty at the deadline."""
        failures = 0
        while True:
            cluster = self.whole_cluster(deadline, enough)
            failures += 1
            delay = RETRY.delay(failures, random.random())
            if cluster.brokers or not leaves_attempt(deadline, delay):
                return cluster
            none = RocketMQUnavailableError(UnavailableCondition.NO_BROKER, "no nameserver knows a broker")
            self._endpoints.pause(delay, deadline, none)

    def behind_proxy(self, deadline: float) -> bool:
        """Return whether ``nameservers`` are Proxies. Raises the errors of `cluster`."""
        return self.cluster(deadline).behind_proxy if self._proxied is None else self._proxied

    def refuse_proxy(self, what: str) -> None:
        """Raise RocketMQError NOT_SUPPORTED if ``nameservers`` are Proxies, because ``what`` is not possible through a Proxy."""
        if self.behind_proxy(Deadline.after(REQUEST_TIMEOUT)):
            behind_proxy.raise_not_through_proxy(what)

    def topics(self, deadline: float) -> tuple[str, ...]:
        """Return every topic name that the nameserver lists, including the servers' own. Raises RocketMQUnavailableError."""
        return self.call_nameserver(topic_list(), deadline)

    def address(
        self, topic: str, broker_name: str, deadline: float, broker_id: int = MASTER_ID, *, any_replica: bool = False
    ) -> str:
        """Return the address of a broker of the topic.

        ``any_replica``: if this broker is missing, return the address of any of its replicas, to read from.

        Raises RocketMQUnavailableError NO_BROKER, and the errors of `route`.
        """
        try:
            brokers = self.route(topic, deadline).brokers
        except TopicError:
            # The nameserver may not have heard of the topic yet. The broker itself knows whether it exists.
            brokers = self.cluster(deadline).brokers
        broker = brokers.get(broker_name, BrokerData(broker_name, "", {}))
        there: Callable[[int], str | None] = broker.address if any_replica else broker.addresses.get
        address = there(broker_id)
        if address is None:
            self.doubt(topic)
            which = "master" if broker_id == MASTER_ID else f"replica {broker_id}"
            raise RocketMQUnavailableError(
                UnavailableCondition.NO_BROKER,
                f"the nameserver has no {which} of broker {broker_name!r} for topic {topic!r}: "
                + ("a replica acts as master, without the master's locks" if broker.acting else "it is down or starting"),
            )
        return address

    def is_master(self, topic: str, broker_name: str, address: str, deadline: float) -> bool:
        """Return whether the broker's master has this address in the topic's route. Raises the errors of `route`."""
        broker = self.route(topic, deadline).brokers.get(broker_name)
        return broker is not None and broker.master == address

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
        """Send a request to a broker of the topic, with retries until the deadline, and return the parsed answer.

        Raises the errors of `Pending.result`.
        """
        return self._retry(
            request,
            deadline,
            lambda: self.address(topic, broker_name, deadline, broker_id, any_replica=any_replica),
            lambda: self.doubt(topic),
        )

    def call_address(self, address: str, request: Request[T], deadline: float) -> T:
        """Send a request to one server, with retries and errors as in `call`."""
        return self._retry(request, deadline, lambda: address, lambda: None)

    def call_nameserver(self, request: Request[T], deadline: float) -> T:
        """Ask the nameservers in turn until one answers. Raises the errors of `Pending.result`.

        When none has answered for the first time, the log says so, because a user who waits should learn what for.
        """
        failures = 0
        while True:
            for _ in self.nameservers:
                turn = self._turn
                limit = min(deadline, Deadline.after(NAMESERVER_TIMEOUT))
                try:
                    address = self.nameservers[turn % len(self.nameservers)]
                    answer = self.connection(address, limit, wait=len(self.nameservers) == 1).call(request, limit)
                    self._warned = False
                    return answer
                except RocketMQUnavailableError as error:
                    last = error
                # Another thread may already have switched to the next nameserver.
                if self._turn == turn:
                    self._turn = turn + 1
                if time.monotonic() >= deadline:
                    raise last
            failures += 1
            left = deadline - time.monotonic()
            if not self._warned and left > 1:
                self._warned = True
                logger.warning("%s. Trying again for %.0f s", last.message, left)
            self._endpoints.pause(RETRY.delay(failures, random.random()), deadline, last)

    def _retry(self, request: Request[T], deadline: float, where: Callable[[], str], doubt: Callable[[], None]) -> T:
        failures = 0
        unknown: RocketMQUnavailableError | None = None
        while True:
            limit = attempt_deadline(request, deadline)
            try:
                return self.connection(where(), deadline).call(request, limit)
            except TopicError:
                doubt()
                raise
            except RocketMQUnavailableError as error:
                if error.sub != UnavailableCondition.BUSY:
                    doubt()
                if error.outcome_unknown and not request.repeatable:
                    raise
                if error.outcome_unknown:
                    unknown = error
                last = unknown or error
            failures += 1
            self._endpoints.pause(RETRY.delay(failures, random.random()), deadline, last)

    # --- connections

    def connection(self, address: str, deadline: float, *, wait: bool = True) -> Connection:
        """Return the connection to an address, and make it if there is none. Requests sent directly on it are not retried.

        There is only one attempt to connect. After earlier failures it is delayed if ``wait`` is true, and otherwise fails immediately.
        Raises RocketMQUnavailableError UNREACHABLE, RocketMQError ADDRESS, TLS or CLOSED.
        """
        return self._endpoints.connection(address, deadline, wait=wait)

    def lane(self, address: str, deadline: float) -> Lane:
        """Return a connection for pulls that only the calling thread uses, until `give_back`. Raises the errors of `connection`."""
        return self._endpoints.lane(address, deadline, proxied=self.routed_by_proxy)

    def give_back(self, lane: Lane) -> None:
        """Keep a lane for the next pull. Close it if it has requests in flight, because nothing reads their answers."""
        self._endpoints.give_back(lane)
