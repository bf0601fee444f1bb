"""Sends message traces with a queue in memory and one thread, as Java's AsyncTraceDispatcher does. Thread-safe.

Delivery is best effort: a thread that adds a trace never waits, and gets no error. The number of waiting traces is limited. Traces above
the limit, and traces that the brokers do not accept within some seconds, are dropped, counted and logged. Traces are sent on separate
connections. As in Java, no namespace (version 1) is added to the trace topic's name.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import pyarrow as pa

from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError, OrderedMQError, TopicError
from orderedmq.model import MessageQueue, missing_topic
from orderedmq.rocketmq.append.broker_port import send_request
from orderedmq.rocketmq.codec import message_trace
from orderedmq.rocketmq.codec.encode import SendBody, encode
from orderedmq.rocketmq.codec.message_trace import Sent, Trace
from orderedmq.rocketmq.messages.sender import FreshKeys
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.deadline import REQUEST_TIMEOUT, Deadline
from orderedmq.rocketmq.wire.message_requests import SendResult, SendStatus
from orderedmq.rows.message_rows import normalise
from orderedmq.rows.message_trace import TRACE_TOPIC, TracedCall, region_of

log = logging.getLogger("orderedmq")

#: The producer group of the traces (TraceConstants.GROUP_NAME_PREFIX).
TRACE_PRODUCER_GROUP: Final = "_INNER_TRACE_PRODUCER"
#: Maximum number of messages whose traces are waiting, and maximum bytes of the requests that these traces describe.
MAX_WAITING: Final = 65_536
MAX_BYTES: Final = 16 * 1024 * 1024
#: Maximum number of messages whose traces are sent together.
_TOGETHER: Final = 4096
#: Seconds to wait for more traces before sending.
_LINGER: Final = 0.1
#: Seconds for a request (as the sendMsgTimeout of Java's trace producer), and for sending waiting traces during `close`.
_SEND_TIMEOUT: Final = 5.0
_CLOSE_TIMEOUT: Final = 5.0
#: Seconds between two warnings about dropped traces.
_WARN_INTERVAL: Final = 60.0


class _Item(NamedTuple):
    """Waiting traces of a listener's call, or of a request for ``queue``. ``size``: the bytes of the request's body."""

    messages: int
    size: int
    what: TracedCall | Sent
    queue: MessageQueue | None = None


class TraceDispatcher:
    """Collects and sends the traces of one client to one trace topic."""

    def __init__(self, client: Client, topic: str) -> None:
        """``client``: the client whose messages are traced. Does no I/O."""
        self.topic = topic
        self._traced = client
        self._client = client.another(names=client.names.without_prefix())
        #: Number of messages whose traces were dropped.
        self.dropped = 0
        self._changed = threading.Condition()
        self._waiting: deque[_Item] = deque()
        self._messages = self._bytes = 0
        self._sending = self._closed = False
        self._thread: threading.Thread | None = None
        self._untold, self._why, self._told = 0, "", float("-inf")
        self._hosts: dict[tuple[str, str], str] = {}
        self._keys = FreshKeys()
        self._turn = random.randrange(1 << 16)

    def check(self) -> None:
        """Check that the trace topic exists. Raises OptionError UNSUPPORTED if not."""
        try:
            self._client.route(self.topic, Deadline.after(REQUEST_TIMEOUT))
        except TopicError:
            remedy = (
                "Set traceTopicEnable=true at a broker and restart it, or name another topic in customizedTraceTopic"
                if self.topic == TRACE_TOPIC
                else "Create it, or leave out customizedTraceTopic"
            )
            raise OptionError(
                OptionCondition.UNSUPPORTED,
                f"option enableMsgTrace cannot be used because the cluster has no topic {self.topic!r} for message traces. {remedy}",
            ) from None

    # --- adding traces

    def sent(
        self, queue: MessageQueue, body: SendBody, group: str, born: int, result: SendResult, fields: Mapping[str, str]
    ) -> None:
        """Add the traces of a request after its answer; see `net.client.SendTrace`."""
        region = region_of(fields)
        if region is None or queue.topic == self.topic:
            return
        cost = max(time.time_ns() // 1_000_000 - born, 0)
        success = result.status is SendStatus.SEND_OK
        sent_message = Sent(queue.topic, group, region, "", body, born, cost, fields.get("msgId", ""), success)
        self._add(_Item(body.rows, len(body.body), sent_message, queue))

    def called(self, call: TracedCall) -> None:
        """Add the traces of a listener's call at its beginning or end."""
        self._add(_Item(len(call.messages), 0, call))

    def _add(self, item: _Item) -> None:
        with self._changed:
            full = self._closed or self._messages + item.messages > MAX_WAITING or self._bytes + item.size > MAX_BYTES
            if not full:
                self._waiting.append(item)
                self._messages += item.messages
                self._bytes += item.size
                self._changed.notify_all()
                if self._thread is not None:
                    return
                thread = self._thread = threading.Thread(target=self._run, name="orderedmq-trace", daemon=True)
        if full:
            self._drop(item.messages, "they came faster than they could be sent")
            return
        # No thread can start while Python exits or when the system has none left. `close` or the exit then drops the traces.
        with contextlib.suppress(RuntimeError):
            thread.start()

    # --- the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._sending = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                if not self._closed and self._messages < _TOGETHER:
                    self._changed.wait_for(lambda: self._closed or self._messages >= _TOGETHER, _LINGER)
                taken = self._take()
                self._sending = True
            try:
                self._send(taken)
            except Exception as error:
                self._failed(sum(item.messages for item in taken), error)

    def _take(self) -> list[_Item]:
        taken: list[_Item] = []
        count = 0
        while self._waiting and (not taken or count + self._waiting[0].messages <= _TOGETHER):
            item = self._waiting.popleft()
            taken.append(item)
            count += item.messages
            self._messages -= item.messages
            self._bytes -= item.size
        return taken

    def _traces(self, taken: list[_Item]) -> Iterator[Trace]:
        for item in taken:
            if isinstance(item.what, TracedCall):
                yield from message_trace.of_call(item.what)
            elif item.queue is not None:
                yield from message_trace.of_sent(item.what._replace(store_host=self._host(item.queue)))

    def _host(self, queue: MessageQueue) -> str:
        where = queue.topic, queue.broker_name
        if where not in self._hosts:
            try:
                self._hosts[where] = self._traced.address(*where, Deadline.after(_SEND_TIMEOUT))
            except OrderedMQError:
                return ""
        return self._hosts[where]

    def _send(self, taken: list[_Item]) -> None:
        bodies, keys = zip(*message_trace.packed(self._traces(taken)))
        where = f"the message traces of topic {self.topic}"
        rows = normalise(
            pa.RecordBatch.from_pydict({"body": pa.array(bodies, pa.binary()), "keys": pa.array(keys, pa.string())}), where
        )
        unique = self._keys.take(rows.num_rows)
        for body in encode(rows, unique, where):
            queues = self._client.route(self.topic, Deadline.after(_SEND_TIMEOUT)).publish_list()
            if not queues:
                raise missing_topic(self.topic)
            self._turn += 1
            queue = queues[self._turn % len(queues)]
            request = send_request(queue, body, TRACE_PRODUCER_GROUP)
            self._client.call(request, Deadline.after(_SEND_TIMEOUT), topic=self.topic, broker_name=queue.broker_name)

    # --- dropped traces

    def _failed(self, messages: int, error: Exception) -> None:
        self._drop(messages, str(error))

    def _drop(self, messages: int, why: str, *, at_once: bool = False) -> None:
        """Count dropped traces, and log a warning: immediately with ``at_once``, else at most every 60 s."""
        with self._changed:
            self.dropped += messages
            self._untold += messages
            if messages:
                self._why = why
            if not self._untold or not (at_once or time.monotonic() - self._told > _WARN_INTERVAL):
                return
            self._told = time.monotonic()
            untold, why, self._untold = self._untold, self._why, 0
        # Log without holding the lock, because a log handler may be slow.
        log.warning("the traces of %d messages were not written to topic %s: %s", untold, self.topic, why)

    def close(self) -> None:
        """Wait a few seconds at most until the waiting traces are sent, then end the thread and the connections."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._waiting and not self._sending, _CLOSE_TIMEOUT)
            left = sum(item.messages for item in self._waiting)
            self._waiting.clear()
        self._drop(left, "the connection was closed", at_once=True)
        self._client.close()
