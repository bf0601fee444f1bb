"""The delayed rows of one attempt: held until its other rows are stored, checked as a whole, and sent one by one.

A message that waits lies in a topic of the broker's own, which other producers fill as well, so a later attempt cannot find it: a
batch that is repeated before its commit sends its delayed rows again. They are held so that an attempt that fails before its
end sends none. A batch that was committed sends none either. They have no stamp: `lookback` would take one that becomes due for a
message that was sent then. A broker does not delay a message of a batch, so each is a request; many are in flight at a time,
since they have no order.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import pyarrow as pa

from orderedmq.conditions import UnavailableCondition
from orderedmq.core import delays
from orderedmq.core.delays import DEFAULT_LEVELS, LEVEL, TIME, DelayLimits
from orderedmq.core.message_rows import normalise
from orderedmq.errors import OptionError, RocketMQError, RocketMQUnavailableError, TopicError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.codec import properties as names
from orderedmq.rocketmq.codec.encode import SendBody, encode
from orderedmq.rocketmq.codec.message_id import UniqueKeys
from orderedmq.rocketmq.messages.sender import send_request
from orderedmq.rocketmq.net.backoff import RETRY
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.deadline import Deadline
from orderedmq.rocketmq.sink.broker_queue import PRODUCER_GROUP, Timing
from orderedmq.rocketmq.sink.commit_report import QueueReport
from orderedmq.rocketmq.sink.queue_writer import Start
from orderedmq.rocketmq.wire import message_requests

#: Bytes of delayed rows that a task holds. Above this it sends them before its other rows are stored.
HELD_BYTES: Final = 64 * 1024 * 1024
#: The most requests to one broker in flight, and about the most bytes of their bodies.
WINDOW: Final = 32
_WINDOW_BYTES: Final = 4 * 1024 * 1024
#: V5_0_0 (MQVersion): the first broker with the time wheel.
_HAS_WHEEL: Final = 413
#: Seconds for a broker to say what it accepts.
ASK_TIMEOUT: Final = 10.0
#: The remark of a broker that has too many messages for one moment.
_FLOW_CONTROL: Final = "timer message is under flow control"
_HOST: Final = b"\x7f\x00\x00\x01"


class _Entry(NamedTuple):
    """A request to send, and the number of its row among the delayed rows of its queue."""

    queue: MessageQueue
    row: int
    body: SendBody


#: What a broker is asked before the first delayed row of an attempt is sent there; None for a batch without identity.
Enter = Callable[[MessageQueue], Start | None]
#: Names the rights that an account lacks, if an error is about that.
Explain = Callable[[BaseException, MessageQueue], BaseException]


def require(client: Client, columns: Sequence[str], topic: str | None) -> None:
    """See `Outbox.require_delays`.

    A topic that is missing will be at every broker, and rows of several topics may go to any: then all brokers must refuse.
    Those that are away or do not tell are left out.
    """
    deadline = Deadline.after(ASK_TIMEOUT)
    found: list[DelayLimits] = []
    try:
        queues = client.route(topic, deadline).publish_list() if topic is not None else ()
    except TopicError:
        queues = ()
    except RocketMQUnavailableError:
        return
    for queue in {queue.broker_name: queue for queue in queues}.values():
        with contextlib.suppress(RocketMQError):
            found.append(limits_of(client, queue))
    if not queues:
        with contextlib.suppress(RocketMQError):
            for name, broker in sorted(client.cluster(deadline).brokers.items()):
                if broker.master is not None:
                    found.append(limits(name, *client.call_address(broker.master, message_requests.broker_config(), deadline)))
    refusals: list[OptionError] = []
    for one in found:
        try:
            one.require_columns(columns)
        except OptionError as error:
            refusals.append(error)
    if refusals and (topic is not None or len(refusals) == len(found)):
        raise refusals[0]


def limits_of(client: Client, queue: MessageQueue, seconds: float = ASK_TIMEOUT) -> DelayLimits:
    """Return what the queue's broker accepts. Where its settings may not be read, or by a proxy, the version decides."""
    deadline = Deadline.after(seconds)
    try:
        version, settings = client.call(
            message_requests.broker_config(), deadline, topic=queue.topic, broker_name=queue.broker_name
        )
    except RocketMQError:
        asked = message_requests.max_offset(queue)
        told = replace(asked, parse=lambda response: response.version)
        version, settings = client.call(told, deadline, topic=queue.topic, broker_name=queue.broker_name), {}
    return limits(queue.broker_name, version, settings)


def limits(broker: str, version: int, settings: Mapping[str, str]) -> DelayLimits:
    """Return what a broker of this version (MQVersion) accepts; ``settings`` are empty if they are unknown."""
    levels = len(settings["messageDelayLevel"].split()) if "messageDelayLevel" in settings else DEFAULT_LEVELS
    seconds = settings.get("timerMaxDelaySec", "")
    most = int(seconds) * 1000 if seconds.isdecimal() else None
    no_time = None
    if version < _HAS_WHEEL:
        no_time = "it is older than RocketMQ 5.0, and would deliver such a message at once"
    elif settings.get("timerWheelEnable") == "false":
        no_time = "its setting timerWheelEnable is false"
    return DelayLimits(broker, levels, no_time, most)


class DelayedRows:
    """The delayed rows of one attempt of one task. Used by one thread."""

    def __init__(self, client: Client, batch: int, partition: int, timing: Timing, enter: Enter, explain: Explain) -> None:
        self._client = client
        self._batch = batch
        self._partition = partition
        self._timing = timing
        self._enter = enter
        self._explain = explain
        self._held: dict[MessageQueue, list[pa.RecordBatch]] = {}
        self._bytes = 0
        #: Per topic and broker: what it accepts, and what it said first.
        self._limits: dict[tuple[str, str], DelayLimits] = {}
        self._starts: dict[tuple[str, str], Start | None] = {}
        self._keys = UniqueKeys(_HOST, os.getpid(), int.from_bytes(os.urandom(4), "big"))
        #: Rows per queue, sent or not.
        self.counts: dict[MessageQueue, int] = {}

    def add(self, queue: MessageQueue, rows: pa.RecordBatch) -> None:
        """Hold rows with the columns of `core.delays`. If too many are held, send all. Raises what `send` raises."""
        self._held.setdefault(queue, []).append(rows)
        self._bytes += rows.nbytes
        self.counts[queue] = self.counts.get(queue, 0) + rows.num_rows
        if self._bytes > HELD_BYTES:
            self.send()

    def send(self) -> None:
        """Send what is held. All rows are checked first.

        Raises OptionError UNSUPPORTED, MessageError BAD_DELAY, BAD_PROPERTY, PROPERTIES_TOO_LARGE; what brokers answer; and
        RocketMQUnavailableError. Rows may have been sent in the last two cases.
        """
        held, self._held, self._bytes = self._held, {}, 0
        entries = {queue: self._encoded(queue, batches) for queue, batches in held.items()}
        by_broker: dict[str, list[_Entry]] = {}
        for queue, encoded in entries.items():
            place = queue.topic, queue.broker_name
            if place not in self._starts:
                self._starts[place] = self._enter(queue)
            if not self._is_committed(queue):
                by_broker.setdefault(queue.broker_name, []).extend(encoded)
        for asked in by_broker.values():
            for window in _windows(asked):
                self._send_window(window)

    def add_to(self, reports: Sequence[QueueReport]) -> tuple[QueueReport, ...]:
        """Return the attempt's reports with its delayed rows counted. Call it after `send`."""
        made = {report.queue: report for report in reports}
        for queue, count in self.counts.items():
            report = made.get(queue) or QueueReport(queue, 0, 0)
            start = self._starts[queue.topic, queue.broker_name]
            newest = max(report.newest, start.committed if start is not None else -1)
            committed = report.committed or self._is_committed(queue)
            made[queue] = replace(report, delayed=count, newest=newest, committed=committed)
        return tuple(made.values())

    def _is_committed(self, queue: MessageQueue) -> bool:
        start = self._starts[queue.topic, queue.broker_name]
        return start is not None and start.committed >= self._batch

    def _encoded(self, queue: MessageQueue, batches: Sequence[pa.RecordBatch]) -> list[_Entry]:
        where = self._where(queue)
        place = queue.topic, queue.broker_name
        if place not in self._limits:
            self._limits[place] = limits_of(self._client, queue, self._timing.patience)
        out: list[_Entry] = []
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
            keys = self._keys.take(rows.num_rows, now)
            bodies = encode(checked, keys, where, extra=extra, first=row, reserve=names.DELAYS_SHARE, alone=True)
            out += [_Entry(queue, row + body.first, body) for body in bodies]
            row += rows.num_rows
        return out

    def _where(self, queue: MessageQueue) -> str:
        return f"the delayed rows of queue {queue} (partition {self._partition})"

    def _send_window(self, waiting: list[_Entry]) -> None:
        """Send requests to one broker until each is stored. One without an answer is sent again."""
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
            if now - since > self._timing.patience:
                raise error
            failures += 1
            time.sleep(RETRY.delay(failures, random.random()))
            waiting = failed

    def _send_once(self, waiting: list[_Entry]) -> tuple[list[_Entry], RocketMQUnavailableError | None]:
        """Return the requests that failed in a way that another try may cure, and the last such error."""
        queue = waiting[0].queue
        deadline = Deadline.after(self._timing.send_timeout)
        try:
            address = self._client.address(queue.topic, queue.broker_name, deadline)
            connection = self._client.connection(address, deadline)
        except RocketMQUnavailableError as error:
            return waiting, error
        trace = self._client.trace
        requests = [send_request(one.queue, one.body, PRODUCER_GROUP, trace) for one in waiting]
        asked = connection.send_all([(request, None) for request in requests], deadline)
        failed: list[_Entry] = []
        last: RocketMQUnavailableError | None = None
        refused: BaseException | None = None
        for one, pending in zip(waiting, asked):
            try:
                pending.result()
            except RocketMQUnavailableError as error:
                failed.append(one)
                last = error
                if error.outcome_unknown:
                    # The others on this connection would wait in vain, too.
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

    def _refusal(self, one: _Entry, error: RocketMQError) -> BaseException:
        if error.denied:
            return self._explain(error, one.queue)
        return RocketMQError(
            error.sub,
            f"row {one.row} of {self._where(one.queue)} is refused by the broker, and rows before it have been sent: {error.message}; its "
            "delay may lie too far ahead (timerMaxDelaySec), the broker's time wheel be off (timerWheelEnable), the row be too large, or a "
            "Proxy want message.type=MIXED of the topic",
        )


def _windows(entries: Sequence[_Entry]) -> Iterator[list[_Entry]]:
    """Yield what is in flight at a time."""
    window: list[_Entry] = []
    size = 0
    for one in entries:
        if window and (len(window) == WINDOW or size + len(one.body.body) > _WINDOW_BYTES):
            yield window
            window, size = [], 0
        window.append(one)
        size += len(one.body.body)
    if window:
        yield window
