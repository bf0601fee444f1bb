"""Sends rows of one queue in batches, in order, each message once.

A broker appends a batch whole or not at all, in the order in which requests arrive, so one request per queue is in flight at a
time. If an answer is missing, the outcome is unknown. Then the sender drops the connection, waits until the broker has handled
what it received, and searches the queue for the first message's UNIQ_KEY. RocketMQ's producers send again without a search, and
make duplicates.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.errors import OrderedMQError, RocketMQUnavailableError
from orderedmq.forks import BeginAnew
from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.rocketmq.codec.encode import SendBody, encode
from orderedmq.rocketmq.codec.message_id import UniqueKeys
from orderedmq.rocketmq.messages.puller import Puller
from orderedmq.rocketmq.net.behind_proxy import HOLDS_BACK
from orderedmq.rocketmq.net.client import Client, SendTrace
from orderedmq.rocketmq.net.deadline import Deadline
from orderedmq.rocketmq.wire import message_requests
from orderedmq.rocketmq.wire.frame import RemotingCommand
from orderedmq.rocketmq.wire.message_requests import SendResult
from orderedmq.rocketmq.wire.request import Request
from orderedmq.rows.message_rows import normalise

#: The group that a send names; brokers do not check that it exists (MixAll.CLIENT_INNER_PRODUCER_GROUP).
PRODUCER_GROUP: Final = "CLIENT_INNER_PRODUCER"
#: Seconds for one request.
_SEND_TIMEOUT: Final = 15.0
#: Seconds for a batch with all its retries.
_PATIENCE: Final = 60.0
#: Seconds after which a broker has done or refused a request that it received (waitTimeMillsInSendQueue is 200 ms), and readers
#: see what it did.
SETTLE_SECONDS: Final = 1.0
#: Seconds to wait at most until readers see acknowledged messages; it takes a few ms.
_VISIBLE_TIMEOUT: Final = 10.0
_POLL: Final = 0.001
_LOOK_MESSAGES: Final = 16384
_LOOK_BYTES: Final = 64 * 1024 * 1024
#: Of the rows of a request without an answer.
_PERHAPS: Final = ", and perhaps the next ones"

E = TypeVar("E", bound=OrderedMQError)


def send_request(queue: MessageQueue, body: SendBody, group: str, trace: SendTrace | None = None) -> Request[SendResult]:
    """The request that sends a body now, in the name of the producer group ``group``. ``trace`` is told of its answer."""
    born = time.time_ns() // 1_000_000
    request = message_requests.send(
        queue, body.body, body.properties or "", group=group, born=born, batch=body.properties is None
    )
    if trace is None:
        return request

    def traced(response: RemotingCommand) -> SendResult:
        result = request.parse(response)
        trace(queue, body, group, born, result, response.ext)
        return result

    return replace(request, parse=traced)


class Sender:
    """Sends for any thread, with one request in flight per queue."""

    def __init__(self, client: Client, puller: Puller) -> None:
        self._client = client
        self._puller = puller
        self._begin()
        _senders.add(self)

    def _begin(self) -> None:
        """Make new keys and locks. After a fork, parent and child would make the same keys, and the locks may be held for ever."""
        self._locks: defaultdict[MessageQueue, threading.Lock] = defaultdict(threading.Lock)
        self._keys_lock = threading.Lock()
        # Random instead of an address: a host has several, and containers share them.
        self._keys = UniqueKeys(secrets.token_bytes(4), os.getpid(), secrets.randbits(32))

    def encoded(self, queue: MessageQueue, rows: pa.RecordBatch) -> tuple[list[SendBody], pa.Array]:
        """Return the requests for rows, all checked, and the rows' new UNIQ_KEYs. Raises MessageError."""
        checked = normalise(rows, f"queue {queue}")
        keys = self.unique_keys(checked.num_rows)
        return list(encode(checked, keys, f"queue {queue}")), keys

    def append_encoded(
        self, queue: MessageQueue, bodies: Sequence[SendBody], keys: pa.Array, stored: Counter[MessageQueue] | None = None
    ) -> OffsetRange:
        """Append what `encode` yields. ``keys`` are the rows' UNIQ_KEYs, which no other message has.

        ``stored`` counts the rows that the broker has acknowledged. Raises RocketMQError or RocketMQUnavailableError.
        """
        if not bodies:
            end = self._ask_end(queue)
            return OffsetRange(end, end)
        with self._locks[queue]:
            # Messages that are sent from here on are stored at this offset or beyond.
            end = self._ask_end(queue)
            begin = None
            for body in bodies:
                at = self.send(queue, body, keys[body.first].as_py(), end)
                if stored is not None:
                    stored[queue] += body.rows
                begin = at if begin is None else begin
                end = at + body.rows
        assert begin is not None
        self.await_visible(queue, end)
        return OffsetRange(begin, end)

    def unique_keys(self, count: int) -> pa.Array:
        """Return UNIQ_KEYs that no other producer makes."""
        with self._keys_lock:
            return self._keys.take(count, time.time_ns() // 1_000_000)

    def send(self, queue: MessageQueue, body: SendBody, key: str, begin: int) -> int:
        """Send one body until it is stored; return its first offset.

        ``key`` is its first message's UNIQ_KEY, which no message below offset ``begin`` has. The caller ensures that no other
        request is in flight for the queue.
        """
        deadline = Deadline.after(_PATIENCE)
        while True:
            try:
                return self.send_once(queue, body, deadline)
            except RocketMQUnavailableError as error:
                if not error.outcome_unknown or time.monotonic() >= deadline:
                    raise
            self.settle(queue, deadline)
            found = self._look(queue, key, begin)
            if found is not None:
                return found

    def send_once(self, queue: MessageQueue, body: SendBody, deadline: float) -> int:
        """Send one body; return its first offset. Repeats requests that a broker did not carry out, until the deadline.

        Raises RocketMQUnavailableError with ``outcome_unknown`` if no answer came. Before it is sent again, `settle`, and look
        whether it is stored.
        """
        request = send_request(queue, body, PRODUCER_GROUP, self._client.trace)
        while True:
            limit = min(deadline, Deadline.after(_SEND_TIMEOUT))
            try:
                return self._client.call(request, limit, topic=queue.topic, broker_name=queue.broker_name).queue_offset
            except RocketMQUnavailableError as error:
                if error.outcome_unknown or time.monotonic() >= deadline:
                    raise

    def settle(self, queue: MessageQueue, deadline: float) -> None:
        """Wait until a request without an answer cannot be in flight any more: it is refused, or stored and readable."""
        try:
            address = self._client.address(queue.topic, queue.broker_name, deadline)
            self._client.drop(address)
        except RocketMQUnavailableError:
            # The broker is down, so the connection has ended, too.
            pass
        # Wait for an answer first: a broker that was paused or cut off handles earlier requests only when it works again.
        self._ask_end(queue)
        time.sleep(SETTLE_SECONDS + (HOLDS_BACK if self._client.behind_proxy(deadline) else 0))

    def _look(self, queue: MessageQueue, key: str, begin: int) -> int | None:
        """Return the offset of the message with ``key``; None if there is no such message at ``begin`` or behind."""
        end = self._ask_end(queue)
        at = begin
        while at < end:
            ids = self._puller.pull(queue, at, min(end - at, _LOOK_MESSAGES), _LOOK_BYTES, ("message_id",)).column(0)
            index = pc.index(ids, key).as_py()
            if index >= 0:
                return at + int(index)
            if not len(ids):
                break
            at += len(ids)
        return None

    def await_visible(self, queue: MessageQueue, end: int) -> None:
        """Wait until readers see the messages below ``end``: a broker acknowledges before it indexes (ReputMessageService)."""
        limit = Deadline.after(_VISIBLE_TIMEOUT)
        while self._ask_end(queue) < end and time.monotonic() < limit:
            time.sleep(_POLL)

    def _ask_end(self, queue: MessageQueue) -> int:
        deadline = Deadline.after(_PATIENCE)
        return self._client.call(message_requests.max_offset(queue), deadline, topic=queue.topic, broker_name=queue.broker_name)


_senders: Final = BeginAnew(Sender._begin)


def sent_in_part(error: E, stored: Mapping[MessageQueue, int], wanted: Mapping[MessageQueue, int]) -> E:
    """Return the error that ended an append, saying how many rows of each queue are stored; as it is if none are.

    ``stored`` and ``wanted``: the number of rows that the broker has acknowledged, and of all rows.
    """
    if not any(stored.values()):
        return error
    where = ", ".join(f"{stored[queue]} of {count} of queue {queue}" for queue, count in wanted.items() if stored[queue])
    unknown = isinstance(error, RocketMQUnavailableError) and error.outcome_unknown
    return type(error)(
        error.sub,
        f"{error.message}; {sum(stored.values())} of {sum(wanted.values())} rows are stored ({where}){_PERHAPS if unknown else ''}: send only "
        "the others again",
    )
