"""Sends delayed rows, each in its own request, because a broker does not delay messages that are sent in a batch.

Delayed rows have no order, so many requests are in flight at the same time.

Until it is due, a delayed message is stored in an internal topic that all producers share, so it cannot be found in its queue. If the
answer to its request is lost, the message is therefore sent again and may be delivered twice (rows/delays.py).
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import pyarrow as pa

from orderedmq.conditions import UnavailableCondition
from orderedmq.errors import RocketMQError, RocketMQUnavailableError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.append.broker_port import send_request
from orderedmq.rocketmq.append.fresh_keys import FreshKeys
from orderedmq.rocketmq.append.message_type import require_delayable
from orderedmq.rocketmq.codec import properties as names
from orderedmq.rocketmq.codec.encode import Packing, SendBody, encode
from orderedmq.rocketmq.net.backoff import RETRY
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.deadline import Deadline
from orderedmq.rocketmq.wire import message_requests
from orderedmq.rocketmq.wire.message_requests import PRODUCER_GROUP
from orderedmq.rows import delays
from orderedmq.rows.delays import DEFAULT_LEVELS, LEVEL, TIME, DelayLimits
from orderedmq.rows.message_rows import normalise

#: Maximum number of requests in flight to one broker, and the approximate maximum of the bytes of their bodies.
WINDOW: Final = 32
_WINDOW_BYTES: Final = 4 * 1024 * 1024
#: V5_0_0 (MQVersion): the first broker with the time wheel.
_HAS_WHEEL: Final = 413
#: Seconds for asking a broker which delays it accepts.
ASK_TIMEOUT: Final = 10.0
#: Seconds for a request, and for a row with all its retries.
_SEND_TIMEOUT: Final = 15.0
_PATIENCE: Final = 60.0
#: The remark of a broker that has too many messages that are due at the same moment.
_FLOW_CONTROL: Final = "timer message is under flow control"


class DelayedSend(NamedTuple):
    """A request to send, and the number of its row among the delayed rows of its queue."""

    queue: MessageQueue
    row: int
    body: SendBody


def limits_of(client: Client, queue: MessageQueue, seconds: float = ASK_TIMEOUT) -> DelayLimits:
    """Return which delays the queue's broker accepts. The version decides if the settings cannot be read (no right, or a Proxy)."""
    deadline = Deadline.after(seconds)
    try:
        version, settings = client.call(
            message_requests.broker_config(), deadline, topic=queue.topic, broker_name=queue.broker_name
        )
    except RocketMQError:
        asked = message_requests.version_of(queue)
        version, settings = client.call(asked, deadline, topic=queue.topic, broker_name=queue.broker_name), {}
    return limits(queue.broker_name, version, settings)


def limits(broker: str, version: int, settings: Mapping[str, str]) -> DelayLimits:
    """Return which delays a broker of this version (MQVersion) accepts. ``settings`` are empty if they are unknown."""
    levels = len(settings["messageDelayLevel"].split()) if "messageDelayLevel" in settings else DEFAULT_LEVELS
    seconds = settings.get("timerMaxDelaySec", "")
    most = int(seconds) * 1000 if seconds.isdecimal() else None
    no_time = None
    if version < _HAS_WHEEL:
        no_time = "it is older than RocketMQ 5.0 and would deliver such a message immediately"
    elif settings.get("timerWheelEnable") == "false":
        no_time = "its setting timerWheelEnable is false"
    return DelayLimits(broker, levels, no_time, most)


class DelayedSender:
    """Encodes and sends delayed rows. Used by one thread."""

    def __init__(
        self,
        client: Client,
        whose: str = "",
        *,
        group: str = PRODUCER_GROUP,
        patience: float = _PATIENCE,
        send_timeout: float = _SEND_TIMEOUT,
    ) -> None:
        """``whose``: the rows' origin for error messages, such as " (partition 0)". ``group``: the requests' producer group."""
        self._client = client
        self._whose = whose
        self._group = group
        self._patience = patience
        self._send_timeout = send_timeout
        #: The delays that a broker accepts, by topic and broker.
        self._limits: dict[tuple[str, str], DelayLimits] = {}
        self._keys = FreshKeys()
        #: The number of rows that brokers have stored.
        self.sent = 0

    def encoded(self, queue: MessageQueue, batches: Sequence[pa.RecordBatch]) -> list[DelayedSend]:
        """Check rows with the columns of `rows.delays` and return the requests for them.

        Raises OptionError UNSUPPORTED, MessageError BAD_DELAY, BAD_PROPERTY, PROPERTIES_TOO_LARGE, RocketMQUnavailableError, and
        RocketMQError NOT_SUPPORTED for a topic to which a Proxy does not pass on delayed messages.
        """
        where = self._where(queue)
        place = queue.topic, queue.broker_name
        if place not in self._limits:
            require_delayable(self._client, queue, self._patience)
            self._limits[place] = limits_of(self._client, queue, self._patience)
        out: list[DelayedSend] = []
        row = 0
        for rows in batches:
            now = time.time_ns() // 1_000_000
            self._limits[place].require(rows, where, row, now)
            extra: dict[str, pa.Array | str] = {
                name: delays.values(rows, column).cast(pa.int64()).cast(pa.string())
                for name, column in ((names.DELAY, LEVEL), (names.TIMER_DELIVER_MS, TIME))
                if column in rows.schema.names
            }
            checked = normalise(rows, where, row)
            keys = self._keys.take(rows.num_rows)
            bodies = encode(checked, keys, where, extra=extra, first=row, reserve=names.DELAYS_SHARE, packing=Packing.ALONE)
            out += [DelayedSend(queue, row + body.first, body) for body in bodies]
            row += rows.num_rows
        return out

    def send(self, entries: Iterable[DelayedSend]) -> None:
        """Send requests until each is stored. Raises the brokers' errors and RocketMQUnavailableError; `sent` rows are stored by then."""
        by_broker: dict[str, list[DelayedSend]] = {}
        for entry in entries:
            by_broker.setdefault(entry.queue.broker_name, []).append(entry)
        for asked in by_broker.values():
            for window in _windows(asked):
                self._send_window(window)

    def _where(self, queue: MessageQueue) -> str:
        return f"the delayed rows of queue {queue}{self._whose}"

    def _send_window(self, waiting: list[DelayedSend]) -> None:
        """Send requests to one broker until each is stored. A request without an answer is sent again."""
        failures, since = 0, time.monotonic()
        while waiting:
            failed, error = self._send_once(waiting)
            if error is None:
                return
            now = time.monotonic()
            if len(failed) < len(waiting):
                failures, since = 0, now
            if error.sub != UnavailableCondition.BUSY:
                self._client.doubt(waiting[0].queue.topic)
            if now - since > self._patience:
                raise error
            failures += 1
            time.sleep(RETRY.delay(failures, random.random()))
            waiting = failed

    def _send_once(self, waiting: list[DelayedSend]) -> tuple[list[DelayedSend], RocketMQUnavailableError | None]:
        """Return the requests whose errors are temporary, and the last of these errors."""
        queue = waiting[0].queue
        deadline = Deadline.after(self._send_timeout)
        try:
            address = self._client.address(queue.topic, queue.broker_name, deadline)
            connection = self._client.connection(address, deadline)
        except RocketMQUnavailableError as error:
            return waiting, error
        trace = self._client.trace
        requests = [send_request(one.queue, one.body, self._group, trace) for one in waiting]
        asked = connection.send_all([(request, None) for request in requests], deadline)
        failed: list[DelayedSend] = []
        last: RocketMQUnavailableError | None = None
        refused: BaseException | None = None
        for one, pending in zip(waiting, asked):
            try:
                pending.result()
                self.sent += 1
            except RocketMQUnavailableError as error:
                failed.append(one)
                last = error
                if error.outcome_unknown:
                    # The other requests on this connection would also wait in vain.
                    connection.close()
            except RocketMQError as error:
                if _FLOW_CONTROL in error.message:
                    failed.append(one)
                    last = RocketMQUnavailableError(UnavailableCondition.BUSY, error.message)
                else:
                    refused = refused or self._refusal(one, error)
        if refused is not None:
            raise refused
        return failed, last

    def _refusal(self, one: DelayedSend, error: RocketMQError) -> BaseException:
        if error.denied:
            return error
        return RocketMQError(
            error.sub,
            f"row {one.row} of {self._where(one.queue)} is refused by the broker: {error.message}. Its delay may be too long "
            "(timerMaxDelaySec), the broker's time wheel may be off (timerWheelEnable), or the row may be too large",
        )


def _windows(entries: Sequence[DelayedSend]) -> Iterator[list[DelayedSend]]:
    """Divide requests into groups that may be in flight together."""
    window: list[DelayedSend] = []
    size = 0
    for one in entries:
        if window and (len(window) == WINDOW or size + len(one.body.body) > _WINDOW_BYTES):
            yield window
            window, size = [], 0
        window.append(one)
        size += len(one.body.body)
    if window:
        yield window
