"""The connections of a client by address: a connection that all threads share, and lanes for pulls, each used by one thread at a time.

Rules: all attempts to connect to an address share one back-off. A server closes a connection that is unused for 120 s, so one that is
idle for longer than MAX_IDLE is replaced. Connections belong to the process that made them.
"""

from __future__ import annotations

import os
import random
import ssl
import threading
import time
from collections.abc import Callable
from typing import Final, NoReturn, TypeVar

from orderedmq.conditions import RocketMQCondition, UnavailableCondition
from orderedmq.errors import OrderedMQError, RocketMQError, RocketMQUnavailableError, stays_here
from orderedmq.rocketmq.net.account import Account
from orderedmq.rocketmq.net.connection import Connection, PushHandler
from orderedmq.rocketmq.net.deadline import CONNECT, leaves_attempt, seconds_to
from orderedmq.rocketmq.net.lane import Lane
from orderedmq.rocketmq.wire.namespaces import Namespaces

T = TypeVar("T", Connection, Lane)

#: Seconds after which an unused connection is replaced. A server closes it after 120 s, which must not happen while a request is
#: being sent.
MAX_IDLE: Final = 100.0
#: The maximum number of unused lanes to one address. It is low because few threads of a process pull at the same time.
_MOST_IDLE_LANES: Final = 4


class AddressConnections:
    """The connections to one address, and the latest failures of connecting to it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.connection: Connection | None = None
        #: The lanes that no thread uses, and the lanes in use.
        self.idle: list[Lane] = []
        self.used: set[Lane] = set()
        self.failures = 0
        self.not_before = 0.0
        self.last = ""

    def usable_connection(self, now: float) -> Connection | None:
        connection = self.connection
        if connection is None or connection.closed or (not connection.in_flight and connection.idle_seconds(now) > MAX_IDLE):
            return None
        return connection

    def usable_lane(self, now: float) -> Lane | None:
        """Return the idle lane that was used last, or None if none is usable. Close lanes that are no longer usable."""
        while self.idle:
            try:
                lane = self.idle.pop()
            except IndexError:
                break
            if lane.idle_seconds(now) <= MAX_IDLE:
                # Read now whatever the server has sent while the lane was idle, such as the end of the connection.
                lane.receive(0.0)
                if not lane.closed:
                    return lane
            lane.close()
        return None


class Endpoints:
    """All connections of a client. Thread-safe."""

    def __init__(
        self,
        nameservers: tuple[str, ...],
        *,
        account: Account,
        tls: ssl.SSLContext | None,
        on_push: PushHandler | None,
        names: Namespaces,
    ) -> None:
        """``nameservers`` are used only for errors, whose advice differs between nameservers and brokers."""
        self.tls = tls
        self.by_address: dict[str, AddressConnections] = {}
        self.lock = threading.Lock()
        self._nameservers = nameservers
        self.account = account
        self._on_push = on_push
        self._names = names
        self._closing = threading.Event()
        self._pid = os.getpid()

    def __reduce__(self) -> NoReturn:
        raise stays_here(";".join(self._nameservers))

    @property
    def is_own(self) -> bool:
        """See `Client.is_own`."""
        return self._pid == os.getpid()

    def require_own(self) -> None:
        """See `Client.require_own`."""
        if not self.is_own:
            raise stays_here(";".join(self._nameservers))

    def connection(self, address: str, deadline: float, *, wait: bool = True) -> Connection:
        """See `Client.connection`."""
        endpoint = self._endpoint(address)

        def opened() -> Connection:
            connection = Connection.open(
                address, deadline, tls=self.tls, account=self.account, on_push=self._on_push, names=self._names
            )
            old, endpoint.connection = endpoint.connection, connection
            if old is not None:
                old.close()
            return connection

        return self._usable(address, endpoint, deadline, wait, endpoint.usable_connection, opened)

    def lane(self, address: str, deadline: float, *, proxied: bool) -> Lane:
        """See `Client.lane`. ``proxied``: the address is a Proxy's."""
        endpoint = self._endpoint(address)

        def opened() -> Lane:
            return Lane.open(address, deadline, tls=self.tls, account=self.account, names=self._names, proxied=proxied)

        lane = self._usable(address, endpoint, deadline, True, endpoint.usable_lane, opened)
        endpoint.used.add(lane)
        if self._closing.is_set():
            self.give_back(lane)
            self.raise_closed()
        return lane

    def give_back(self, lane: Lane) -> None:
        """See `Client.give_back`."""
        endpoint = self._endpoint(lane.address)
        endpoint.used.discard(lane)
        if lane.closed or lane.in_flight or self._closing.is_set() or len(endpoint.idle) >= _MOST_IDLE_LANES:
            lane.close()
        else:
            endpoint.idle.append(lane)

    def close(self) -> None:
        """Close every connection. Waiting operations raise an error."""
        self.require_own()
        self._closing.set()
        with self.lock:
            endpoints = list(self.by_address.values())
        for endpoint in endpoints:
            if endpoint.connection is not None:
                endpoint.connection.close()
            for lane in list(endpoint.used):
                lane.shutdown()
            while endpoint.idle:
                endpoint.idle.pop().close()

    def pause(self, delay: float, deadline: float, last: OrderedMQError) -> None:
        """Wait before the next attempt. Raises ``last`` if there is no time for one, and RocketMQError CLOSED if the client is closed."""
        if not leaves_attempt(deadline, delay):
            raise last
        if self._closing.wait(delay):
            self.raise_closed()

    def raise_closed(self) -> NoReturn:
        raise RocketMQError(RocketMQCondition.CLOSED, f"the connection to {';'.join(self._nameservers)} was closed")

    # --- inside

    def _endpoint(self, address: str) -> AddressConnections:
        self.require_own()
        with self.lock:
            return self.by_address.setdefault(address, AddressConnections())

    def _usable(
        self,
        address: str,
        endpoint: AddressConnections,
        deadline: float,
        wait: bool,
        usable: Callable[[float], T | None],
        opened: Callable[[], T],
    ) -> T:
        """Return the result of ``usable`` or, if it is None, wait for as long as earlier failures require and return that of ``opened``."""
        if self._closing.is_set():
            self.raise_closed()
        existing = usable(time.monotonic())
        if existing is not None:
            return existing
        if not endpoint.lock.acquire(timeout=seconds_to(deadline)):
            raise self._unreachable(address, f"this client could not connect to {address} in time{endpoint.last}")
        try:
            return usable(time.monotonic()) or self._connect(address, endpoint, deadline, wait, opened)
        finally:
            endpoint.lock.release()

    def _connect(self, address: str, endpoint: AddressConnections, deadline: float, wait: bool, opened: Callable[[], T]) -> T:
        delay = endpoint.not_before - time.monotonic()
        if delay > 0:
            refused = self._unreachable(address, f"this client could not connect to {address} in time{endpoint.last}")
            self.pause(delay, deadline if wait else 0.0, refused)
        self.account.renew()
        try:
            connection = opened()
        except RocketMQError as error:
            endpoint.failures += 1
            endpoint.not_before = time.monotonic() + CONNECT.delay(endpoint.failures, random.random())
            endpoint.last = f", and the last attempt failed: {error.message}"
            if error.sub != UnavailableCondition.UNREACHABLE:
                raise
            raise self._unreachable(address, error.message) from None
        endpoint.failures, endpoint.last = 0, ""
        if self._closing.is_set():
            connection.close()
            self.raise_closed()
        return connection

    def _unreachable(self, address: str, why: str) -> RocketMQUnavailableError:
        """Return the error for a server that cannot be reached. Its advice depends on whether that is a nameserver or a broker."""
        if address not in self._nameservers:
            asked = "Check that a broker is running there, and that its address (brokerIP1) is reachable from this machine"
            return RocketMQUnavailableError(UnavailableCondition.UNREACHABLE, f"{why}. {asked}")
        asked = "Check that a nameserver is running there, and check namesrvAddr (--namesrv): host:port, usually port 9876"
        return RocketMQUnavailableError(UnavailableCondition.UNREACHABLE, f"{why}. {asked}")
