"""A queue at its broker as an appender uses it: the queue's end, sends, and requests that were given up.

A topic of RocketMQ 5 may have the attribute ``message.type``. A broker stores messages of any type. A Proxy refuses a request whose type
is not the topic's, unless the topic's type is MIXED (``enableTopicMessageTypeCheck``). It derives the type of a request from the
properties in the request's header: a sharding key makes it FIFO, otherwise it is NORMAL
(TopicMessageType.parseFromMessageProperty). A batch has the properties of its messages in its body, where the Proxy does not look, and its
envelope is in the header. So a batch of messages with sharding keys passes as NORMAL if its envelope is empty, and as FIFO if its envelope
has a sharding key.

Brokers before 5.4 add the properties of the envelope to each message of the batch (MessageExtEncoder.encode), which would replace the
key of the message. Messages of a FIFO topic are therefore sent to these brokers one by one.

A Proxy does not return the attributes of topics, but it checks the type before it passes a message on. So the type is found by sending a
message for a queue that does not exist: the Proxy refuses the message and names the type, or the broker refuses it. Nothing is stored.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.conditions import RocketMQCondition, UnavailableCondition
from orderedmq.errors import RocketMQError, RocketMQUnavailableError, TopicError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.codec.encode import Packing, SendBody
from orderedmq.rocketmq.net.behind_proxy import HOLDS_BACK
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.connection import Connection
from orderedmq.rocketmq.net.deadline import RETRY, Backoff, Deadline
from orderedmq.rocketmq.wire import message_requests
from orderedmq.rocketmq.wire.message_requests import PRODUCER_GROUP, SendResult
from orderedmq.rocketmq.wire.request import Request, wrong_type

FIFO: Final = "FIFO"
#: MQVersion.V5_4_0. From this release on, only the Proxy uses the envelope of a batch.
_KEEPS_KEYS: Final = 493
T = TypeVar("T")
_VISIBLE_RETRY: Final = Backoff(first=0.002, most=0.1)


def packing_for(
    client: Client, queue: MessageQueue, rows: pa.RecordBatch, where: str, seconds: float, first: int = 0
) -> Packing:
    """Return how rows for a queue are divided into requests. ``seconds``: how long the servers may take to answer.

    ``where`` names the target in errors, which count rows from ``first``. Raises RocketMQError NOT_SUPPORTED for rows that a
    Proxy does not pass on to the topic, and RocketMQUnavailableError.
    """
    if not client.behind_proxy(Deadline.after(seconds)):
        return Packing.BATCH
    place = queue.topic, queue.broker_name
    packing = client.packings.get(place)
    if packing is None:
        try:
            expected = _expected(client, queue, seconds)
        except RocketMQUnavailableError:
            raise
        except RocketMQError:
            # The account may lack the right to write. In that case the first send gets the same error.
            return Packing.BATCH
        if expected is not None and expected != FIFO:
            raise wrong_type(_named(queue), expected, "NORMAL", "rows are sent as type NORMAL")
        packing = Packing.BATCH if expected is None else fifo_packing(_version(client, queue, seconds))
        client.packings[place] = packing
    if packing is not Packing.BATCH and (row := _first_without_key(rows)) is not None:
        why = f"row {first + row} for {where} has no sharding key"
        raise wrong_type(_named(queue), FIFO, "NORMAL", why, "give each row a sharding key, ")
    return packing


def fifo_packing(version: int) -> Packing:
    """Return how messages of type FIFO are sent through a Proxy to a broker of this version (MQVersion). Pure."""
    return Packing.FIFO_BATCH if version >= _KEEPS_KEYS else Packing.ALONE


def forget(client: Client, topic: str) -> None:
    """Forget how rows are sent to a topic. Called when a Proxy has refused rows, because the topic's type must have changed."""
    for place in [place for place in list(client.packings) if place[0] == topic]:
        client.packings.pop(place, None)


def _expected(client: Client, queue: MessageQueue, seconds: float) -> str | None:
    """Return the topic's type if a Proxy refuses messages without properties, or None if it passes them on."""
    request = message_requests.refused_type(queue)
    return client.call(request, Deadline.after(seconds), topic=queue.topic, broker_name=queue.broker_name)


def _named(queue: MessageQueue) -> str:
    return f"topic {queue.topic!r}"


def _version(client: Client, queue: MessageQueue, seconds: float) -> int:
    """Return the broker's version, which a Proxy passes on with each of the broker's answers."""
    request = message_requests.version_of(queue)
    return client.call(request, Deadline.after(seconds), topic=queue.topic, broker_name=queue.broker_name)


def _first_without_key(rows: pa.RecordBatch) -> int | None:
    """Return the number of the first row without a sharding key, or None. An empty key counts as none."""
    index = rows.schema.get_field_index("sharding_key")
    if index < 0:
        return 0 if rows.num_rows else None
    lengths = pc.fill_null(pc.binary_length(rows.column(index)), 0)
    row = pc.index(lengths, pa.scalar(0, lengths.type)).as_py()
    return int(row) if row >= 0 else None


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
    *,
    reconsume_times: int = 0,
    max_reconsume_times: int | None = None,
) -> Request[SendResult]:
    """Return the request that sends a body now, in the name of the producer group ``group``. Every send in this package uses this function.

    The other arguments are those of `message_requests.send`.
    """
    born = time.time_ns() // 1_000_000
    return message_requests.send(
        queue,
        body.body,
        body.envelope if body.properties is None else body.properties,
        group=group,
        born=born,
        batch=body.properties is None,
        reconsume_times=reconsume_times,
        max_reconsume_times=max_reconsume_times,
    )


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
        self._request = request or (lambda body: send_request(queue, body, PRODUCER_GROUP))
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
                forget(self._client, self.queue.topic)
            raise
        if result.position is None or self._client.routed_by_proxy:
            # Through a Proxy, another broker may have become the master.
            self._stored_in, self._position = self, 0
        else:
            self._stored_in, self._position = self._sending_on, result.position
        return result.queue_offset

    def packing(self, rows: pa.RecordBatch, where: str, first: int) -> Packing:
        """Return how rows are divided into requests. Raises the errors of `packing_for`."""
        return packing_for(self._client, self.queue, rows, where, self._timing.patience, first)

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
