"""Rows of one queue sent in batches, in order, each message once.

A broker appends a batch whole or not at all, in the order in which requests come, so one is on its way for a queue at a time. Where an
answer is missing, nobody knows: the connection is dropped, what is still in the broker's queue is waited for, and then the queue is
searched for the first message's UNIQ_KEY. Producers of RocketMQ send again without a look, and make duplicates.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import defaultdict
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.core.message_rows import normalise
from orderedmq.errors import RocketMQUnavailableError
from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.rocketmq.codec.encode import SendBody, encode
from orderedmq.rocketmq.codec.message_id import UniqueKeys
from orderedmq.rocketmq.messages.puller import Puller
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.wire import message_requests

#: Brokers know producers by a group, and do not ask whether it exists (MixAll.CLIENT_INNER_PRODUCER_GROUP).
PRODUCER_GROUP: Final = "CLIENT_INNER_PRODUCER"
#: Seconds for one request.
_SEND_TIMEOUT: Final = 15.0
#: Seconds for a batch with all its retries.
_PATIENCE: Final = 60.0
#: Seconds after which a request that a broker got is done or refused (waitTimeMillsInSendQueue is 200 ms), and what is done can be seen.
SETTLED: Final = 1.0
#: Seconds within which acknowledged messages are seen by readers; it takes a few ms.
_VISIBLE: Final = 10.0
_POLL: Final = 0.001
_LOOK_MESSAGES: Final = 16384
_LOOK_BYTES: Final = 64 * 1024 * 1024


class Sender:
    """Sends for any thread; one request is on its way for each queue."""

    def __init__(self, client: Client, puller: Puller) -> None:
        self._client = client
        self._puller = puller
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._locks: defaultdict[MessageQueue, threading.Lock] = defaultdict(threading.Lock)
        self._keys_lock = threading.Lock()
        # Random instead of an address: a host has several, and containers share them.
        self._keys = UniqueKeys(secrets.token_bytes(4), self._pid, secrets.randbits(32))

    def append(self, queue: MessageQueue, rows: pa.RecordBatch) -> OffsetRange:
        """See `Log.append`. Raises RocketMQError when a broker refuses, RocketMQUnavailableError; a part of the rows may be there then."""
        checked = normalise(rows, f"queue {queue}")
        keys = self.unique_keys(checked.num_rows)
        # All before any is sent: a row that cannot be sent refuses the others, too.
        bodies = list(encode(checked, keys, f"queue {queue}"))
        if not bodies:
            end = self._ask_end(queue)
            return OffsetRange(end, end)
        with self._locks[queue]:
            # Nothing of this process stands behind what it sends now.
            end = self._ask_end(queue)
            begin = None
            for body in bodies:
                at = self.send(queue, body, keys[body.first].as_py(), end)
                begin = at if begin is None else begin
                end = at + body.rows
        assert begin is not None
        self.await_visible(queue, end)
        return OffsetRange(begin, end)

    def unique_keys(self, count: int) -> pa.Array:
        """UNIQ_KEYs that nobody else makes."""
        if self._pid != os.getpid():
            # In a child after fork: the parent makes the same keys, and its threads may have held the locks.
            self._begin()
        with self._keys_lock:
            return self._keys.take(count, time.time_ns() // 1_000_000)

    def send(self, queue: MessageQueue, body: SendBody, key: str, begin: int) -> int:
        """Send one body until it is stored; returns its first offset.

        ``key`` is its first message's UNIQ_KEY, which no message below offset ``begin`` has. The caller sees to it that nothing else is
        on its way for the queue.
        """
        deadline = time.monotonic() + _PATIENCE
        request = message_requests.send(
            queue,
            body.body,
            body.properties or "",
            group=PRODUCER_GROUP,
            born=time.time_ns() // 1_000_000,
            batch=body.properties is None,
        )
        while True:
            try:
                limit = min(deadline, time.monotonic() + _SEND_TIMEOUT)
                return self._client.call(request, limit, topic=queue.topic, broker_name=queue.broker_name).queue_offset
            except RocketMQUnavailableError as error:
                if time.monotonic() >= deadline:
                    raise
                if not error.outcome_unknown:
                    continue
            found = self._settle_and_look(queue, key, begin, deadline)
            if found is not None:
                return found

    def _settle_and_look(self, queue: MessageQueue, key: str, begin: int, deadline: float) -> int | None:
        """Where the message with UNIQ_KEY ``key`` stands at or behind ``begin``, when nothing of it can be on its way any more."""
        try:
            address = self._client.address(queue.topic, queue.broker_name, deadline)
            self._client.drop(address)
        except RocketMQUnavailableError:
            # Its connection has ended with it.
            pass
        # Only a broker that answers goes on with what it was sent before it was paused or cut off.
        self._ask_end(queue)
        time.sleep(SETTLED)
        end = self._ask_end(queue)
        at = begin
        while at < end:
            ids = self._puller.pull(queue, at, min(end - at, _LOOK_MESSAGES), _LOOK_BYTES, ("message_id",)).column(0)
            place = pc.index(ids, key).as_py()
            if place >= 0:
                return at + int(place)
            if not len(ids):
                break
            at += len(ids)
        return None

    def await_visible(self, queue: MessageQueue, end: int) -> None:
        """Return when readers see the messages below ``end``: a broker acknowledges before it has indexed them (ReputMessageService)."""
        limit = time.monotonic() + _VISIBLE
        while self._ask_end(queue) < end and time.monotonic() < limit:
            time.sleep(_POLL)

    def _ask_end(self, queue: MessageQueue) -> int:
        deadline = time.monotonic() + _PATIENCE
        return self._client.call(message_requests.max_offset(queue), deadline, topic=queue.topic, broker_name=queue.broker_name)
