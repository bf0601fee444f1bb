"""A queue at its broker as an appender uses it: the queue's end, sends, and requests that were given up."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar

import pyarrow as pa

from orderedmq.conditions import RocketMQCondition, UnavailableCondition
from orderedmq.errors import RocketMQError, RocketMQUnavailableError, TopicError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.append import message_type
from orderedmq.rocketmq.codec.encode import Packing, SendBody
from orderedmq.rocketmq.net.behind_proxy import HOLDS_BACK
from orderedmq.rocketmq.net.client import Client, SendTrace
from orderedmq.rocketmq.net.connection import Connection
from orderedmq.rocketmq.net.deadline import RETRY, Backoff, Deadline
from orderedmq.rocketmq.wire import message_requests
from orderedmq.rocketmq.wire.frame import RemotingCommand
from orderedmq.rocketmq.wire.message_requests import PRODUCER_GROUP, SendResult
from orderedmq.rocketmq.wire.request import Request

T = TypeVar("T")

_VISIBLE_RETRY: Final = Backoff(first=0.002, most=0.1)


@dataclass(frozen=True)
class Timing:
    """Time limits of an appender, in seconds.

    ``send_timeout``: for one request. ``settle``: the wait after a lost answer; see `orderedmq.rocketmq.append`. ``visible``: the longest
    wait until sent messages can be read. ``patience``: the longest wait for a broker that is unavailable or busy.
    """

    send_timeout: float = 15.0
    settle: float = 1.0
    visible: float = 10.0
    patience: float = 60.0


def send_request(
    queue: MessageQueue,
    body: SendBody,
    group: str,
    trace: SendTrace | None = None,
    *,
    stored_in: MessageQueue | None = None,
    reconsume_times: int = 0,
    max_reconsume_times: int | None = None,
) -> Request[SendResult]:
    """Return the request that sends a body now, in the name of the producer group ``group``. Every send in this package uses this function.

    ``trace`` is called with the broker's answer. ``stored_in``: the queue in which the broker stores the body, if it is not ``queue``.
    The other arguments are those of `message_requests.send`.
    """
    born = time.time_ns() // 1_000_000
    request = message_requests.send(
        queue,
        body.body,
        body.envelope if body.properties is None else body.properties,
        group=group,
        born=born,
        batch=body.properties is None,
        reconsume_times=reconsume_times,
        max_reconsume_times=max_reconsume_times,
    )
    if trace is None:
        return request

    def traced(response: RemotingCommand) -> SendResult:
        result = request.parse(response)
        trace(stored_in or queue, body, group, born, result, response.ext)
        return result

    return replace(request, parse=traced)


class BrokerRequests:
    """The requests of one appender to one broker of a topic. ``queue`` identifies the broker."""

    def __init__(self, client: Client, queue: MessageQueue, timing: Timing) -> None:
        self.queue = queue
        self._client = client
        self._timing = timing
        self._failing_since = 0.0

    def _wait_out(self, error: RocketMQUnavailableError, failures: int) -> None:
        """Wait before the next attempt, after ``failures`` failures in a row. Raises ``error`` after ``patience`` seconds of failures."""
        now = time.monotonic()
        if failures == 1:
            self._failing_since = now
        if error.sub != UnavailableCondition.BUSY:
            self._client.doubt(self.queue.topic)
        self._wait(RETRY.delay(failures, random.random()))
        if now - self._failing_since > self._timing.patience:
            raise error

    def _ask(self, request: Request[T], deadline: float | None = None) -> T:
        if deadline is None:
            deadline = Deadline.after(self._timing.patience)
        return self._client.call(request, deadline, topic=self.queue.topic, broker_name=self.queue.broker_name)

    def _proxied(self) -> bool:
        return self._client.behind_proxy(Deadline.after(self._timing.patience))

    def _connect(self, deadline: float) -> Connection:
        address = self._client.address(self.queue.topic, self.queue.broker_name, deadline)
        return self._client.connection(address, deadline)

    def _wait(self, seconds: float) -> None:
        time.sleep(seconds)


class BrokerPort(BrokerRequests):
    """The `Port` of a queue for an appender that needs no lock at the broker. Used by one thread at a time."""

    def __init__(
        self,
        client: Client,
        queue: MessageQueue,
        timing: Timing = Timing(),
        *,
        request: Callable[[SendBody], Request[SendResult]] | None = None,
        target: MessageQueue | None = None,
        require_lock: Callable[[], None] = lambda: None,
    ) -> None:
        """``request`` returns the request for a body (default: `send_request` to the queue).

        ``target``: the queue to which the requests append, if ``queue`` only identifies the broker. ``require_lock`` is called before
        each request, and raises an error if the lock that excludes other appenders is lost.
        """
        super().__init__(client, queue, timing)
        self._request = request or (lambda body: send_request(queue, body, PRODUCER_GROUP, client.trace))
        self._target = target or queue
        self._require_lock = require_lock
        # Whether a request was given up without an answer and has not settled. If the appender gives up, the next appender has to wait.
        self._unsettled = self._target in client.unsettled
        self._sending_on: Connection | None = None
        # The position of the last messages in the broker's commit log. It can be compared with positions of the same log, which is
        # identified by the connection, or by this port if the log is not known. None if nothing was sent.
        self._stored_in: object | None = None
        self._position = 0

    def keep(self) -> bool:
        return not self._unsettled

    def require(self) -> None:
        self._require_lock()

    def acquire(self) -> None:
        self.settle_all([self], Deadline.after(self._timing.patience))

    def send(self, body: SendBody) -> Callable[[], int]:
        deadline = Deadline.after(self._timing.send_timeout)
        self._sending_on = None
        self._sending_on = connection = self._connection_to_send_on(deadline)
        return partial(self._offset, connection.begin(self._request(body), deadline))

    def _offset(self, answer: Callable[[], SendResult]) -> int:
        try:
            result = answer()
        except TopicError:
            self._client.doubt(self.queue.topic)
            raise
        except RocketMQError as error:
            if error.sub == RocketMQCondition.NOT_SUPPORTED:
                message_type.forget(self._client, self.queue.topic)
            raise
        if result.position is None or self._client.routed_by_proxy:
            # Through a Proxy, another broker may have become the master.
            self._stored_in, self._position = self, 0
        else:
            self._stored_in, self._position = self._sending_on, result.position
        return result.queue_offset

    def packing(self, rows: pa.RecordBatch, where: str, first: int) -> Packing:
        """Return how rows are divided into requests. Raises the errors of `message_type.packing_for`."""
        return message_type.packing_for(self._client, self.queue, rows, where, self._timing.patience, first)

    def pause(self, error: RocketMQUnavailableError, failures: int) -> None:
        if error.outcome_unknown:
            # Other requests on this connection would also wait in vain. Closing the connection ends them.
            if self._sending_on is not None:
                self._sending_on.close()
            self._unsettled = True
            self._client.unsettled.add(self._target)
        self._wait_out(error, failures)

    def least(self) -> int:
        """Return the offset of the first message that is still in the queue."""
        return self._ask(message_requests.min_offset(self.queue))

    def end(self) -> int:
        return self._ask(message_requests.max_offset(self.queue))

    def await_readable(self, end: int) -> None:
        """Wait up to ``visible`` seconds until readers see the messages below ``end``.

        A broker acknowledges messages before it indexes them (ReputMessageService).
        """
        await_end(self.end, end, self._timing.visible)

    @staticmethod
    def await_all_readable(ends: Iterable[tuple[BrokerPort, int]], deadline: float) -> None:
        """Do what `await_readable` does for queues of one broker to which messages were sent, each up to its end.

        A broker indexes messages in the order of its commit log (ReputMessageService), so it is sufficient to wait for the last ones.
        """
        last: dict[object, tuple[BrokerPort, int]] = {}
        for port, end in ends:
            log = port._stored_in
            if log is not None and (log not in last or last[log][0]._position < port._position):
                last[log] = port, end
        for port, end in last.values():
            await_end(partial(port._ask, message_requests.max_offset(port.queue), deadline), end, port._timing.visible)

    @staticmethod
    def settle_all(ports: Iterable[BrokerPort], deadline: float) -> None:
        """Wait until the requests that ports of one broker gave up are either refused or stored and readable.

        See `orderedmq.rocketmq.append`. The wait begins with the broker's next answer, to a request that ends at ``deadline``, because a
        broker that was paused continues with the requests that it had received.
        """
        unsettled = [port for port in ports if port._unsettled]
        if not unsettled:
            return
        first = unsettled[0]
        first._ask(message_requests.max_offset(first.queue), deadline)
        time.sleep(first._timing.settle + (HOLDS_BACK if first._proxied() else 0))
        for port in unsettled:
            port._unsettled = False
            port._client.unsettled.discard(port._target)

    def _connection_to_send_on(self, deadline: float) -> Connection:
        return self._connect(deadline)


def await_end(ask: Callable[[], int], end: int, seconds: float) -> None:
    """Wait until ``ask`` returns at least ``end``, or for ``seconds``. The calls become less frequent, because a slow broker is busy."""
    deadline = Deadline.after(seconds)
    waits = 0
    while ask() < end and time.monotonic() < deadline:
        waits += 1
        time.sleep(_VISIBLE_RETRY.delay(waits, random.random()))
