"""The delayed rows of one attempt: they are held until the attempt's other rows are stored, checked together, and sent one by one.

Until it is due, a delayed message is stored in an internal topic that all producers of the broker share, so a later attempt cannot find
it. So a batch that is repeated before its commit sends its delayed rows again. The rows are held so that an attempt that fails before
its end sends none of them. If a committed batch is repeated, it also sends none. Delayed messages have no stamp, because for `lookback`
a message that becomes due would look like one that was sent at that time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import pyarrow as pa

from orderedmq.errors import OptionError, RocketMQError, RocketMQUnavailableError, TopicError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.append.message_type import require_delayable
from orderedmq.rocketmq.messages.delayed import ASK_TIMEOUT, DelayedSend, DelayedSender, limits, limits_of
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.deadline import Deadline
from orderedmq.rocketmq.sink.broker_queue import SINK_PRODUCER_GROUP, LockTiming
from orderedmq.rocketmq.sink.commit_report import QueueReport
from orderedmq.rocketmq.sink.queue_writer import Start
from orderedmq.rocketmq.wire import message_requests
from orderedmq.rows.delays import DelayLimits

#: Bytes of delayed rows that a task may hold. If it has more, it sends them before its other rows are stored.
HELD_BYTES: Final = 64 * 1024 * 1024

#: Called before an attempt sends its first delayed row to a broker. Returns the sink's state there; None for a batch without identity.
Enter = Callable[[MessageQueue], Start | None]


def require(client: Client, columns: Sequence[str], topic: str | None) -> None:
    """See `Outbox.require_delays`.

    Raises the OptionError of a broker that refuses the columns. If the topic is missing or None, rows may go to any broker, so this
    raises an error only if all brokers refuse. Brokers that are away or do not answer are left out. Raises RocketMQError
    NOT_SUPPORTED for a topic to which a Proxy does not pass on delayed messages.
    """
    deadline = Deadline.after(ASK_TIMEOUT)
    found: list[DelayLimits] = []
    try:
        queues = client.route(topic, deadline).publish_list() if topic is not None else ()
    except TopicError:
        queues = ()
    except RocketMQUnavailableError:
        return
    if queues:
        require_delayable(client, queues[0], ASK_TIMEOUT)
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


class DelayedRows:
    """The delayed rows of one attempt of one task. Used by one thread."""

    def __init__(self, client: Client, batch: int, partition: int, timing: LockTiming, enter: Enter) -> None:
        self._client = client
        self._patience = timing.patience
        self._batch = batch
        self._enter = enter
        self._sender = DelayedSender(
            client,
            f" (partition {partition})",
            group=SINK_PRODUCER_GROUP,
            patience=timing.patience,
            send_timeout=timing.send_timeout,
        )
        self._held: dict[MessageQueue, list[pa.RecordBatch]] = {}
        self._bytes = 0
        #: The first result of ``enter``, by topic and broker.
        self._starts: dict[tuple[str, str], Start | None] = {}
        #: Rows per queue, sent or not.
        self.counts: dict[MessageQueue, int] = {}

    def add(self, queue: MessageQueue, rows: pa.RecordBatch) -> None:
        """Hold rows with the columns of `rows.delays`. If more than HELD_BYTES are held, send all. Raises the errors of `send`."""
        if not any(known.topic == queue.topic for known in self.counts):
            require_delayable(self._client, queue, self._patience)
        self._held.setdefault(queue, []).append(rows)
        self._bytes += rows.nbytes
        self.counts[queue] = self.counts.get(queue, 0) + rows.num_rows
        if self._bytes > HELD_BYTES:
            self.send()

    def send(self) -> None:
        """Check all held rows, then send them.

        Raises OptionError UNSUPPORTED, MessageError BAD_DELAY, BAD_PROPERTY, PROPERTIES_TOO_LARGE; the brokers' errors; and
        RocketMQUnavailableError. Rows may have been sent in the last two cases.
        """
        held, self._held, self._bytes = self._held, {}, 0
        entries = {queue: self._sender.encoded(queue, batches) for queue, batches in held.items()}
        wanted: list[DelayedSend] = []
        for queue, encoded in entries.items():
            place = queue.topic, queue.broker_name
            if place not in self._starts:
                self._starts[place] = self._enter(queue)
            if not self._is_committed(queue):
                wanted += encoded
        self._sender.send(wanted)

    def add_to(self, reports: Sequence[QueueReport]) -> tuple[QueueReport, ...]:
        """Return the attempt's reports with the delayed rows added. Call this after `send`."""
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
