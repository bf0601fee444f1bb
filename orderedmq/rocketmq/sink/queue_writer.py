"""The rows of one attempt for one queue: finds out which are stored, and makes the requests that send the others. Uses no sockets.

`orderedmq.rocketmq.append` sends the requests, and explains why each row is stored once. Rows are sent only while the attempt holds the
lock of the queue's broker, and on the connection on which the lock was granted. After losing the lock or the connection, an attempt first
reads the messages that have arrived since, and then sends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from orderedmq.conditions import DataLossCondition, RocketMQCondition
from orderedmq.errors import DataLossError, OrderedMQError, RocketMQError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.append.once import Appender, AppendWait, Port
from orderedmq.rocketmq.codec.encode import Packing, SendBody, encode
from orderedmq.rocketmq.messages.sender import FreshKeys
from orderedmq.rocketmq.sink.commit_report import QueueReport, pack
from orderedmq.rocketmq.sink.lookback import Ledger, Lookback
from orderedmq.rocketmq.sink.message_stamp import Writer, find_messages
from orderedmq.rows.message_rows import normalise
from orderedmq.schema import PRODUCER_COLUMNS


class Start(NamedTuple):
    """The state of a queue when an attempt starts to write to it.

    ``bookmark``: the sink's bookmark; None if unknown. ``committed``: the sink's newest committed batch; -1 for none.
    """

    end: int
    bookmark: int | None
    committed: int = -1


class QueuePort(Port, Protocol):
    """One queue at its broker, as an attempt uses it. A method raises OrderedMQError after it has tried for long enough.

    `acquire` waits until other attempts of the partition, and attempts of other runs of the batch, have released their locks.
    """

    queue: MessageQueue

    def start(self) -> Start: ...
    def least(self) -> int:
        """Return the offset of the queue's first remaining message."""
        ...

    def end(self) -> int: ...
    def read(self, begin: int, end: int) -> Iterator[pa.RecordBatch]:
        """Yield the messages in [begin, end) with `message_stamp.COLUMNS`, except messages that are deleted during the call."""
        ...

    def packing(self, rows: pa.RecordBatch, where: str, first: int) -> Packing:
        """Return how to divide rows into requests. Errors name the target ``where``, and number the rows from ``first`` on."""
        ...


class QueueWriter:
    """Writes one attempt's rows to one queue. Used by one thread at a time. It is the `Outgoing` of the rows passed to `write`."""

    def __init__(self, port: QueuePort, writer: Writer | None, partition: int) -> None:
        """``writer`` is None for a batch without identity. Its rows are not searched for, and are sent again after a lost answer."""
        self._port = port
        self._writer = writer
        self._where = f"queue {port.queue} (partition {partition})"
        self._ledger = Ledger(writer or Writer("", 0, partition))
        self._keys = FreshKeys()
        self._appender = Appender(port, self)
        self._looked_back = False
        # The rows that are not yet written, and the number of the first one.
        self._rows: pa.RecordBatch | None = None
        self._first = 0
        #: Maximum rows per call of the encoder, and so per request; None for no limit.
        self._most_rows: int | None = None

    def write(self, rows: pa.RecordBatch, first: int) -> None:
        """Write the rows after those of earlier calls. ``first``: the number of the first row, for errors.

        Raises MessageError BAD_PROPERTY or PROPERTIES_TOO_LARGE, and the errors of the port.
        """
        for _ in self.steps(rows, first):
            pass

    def steps(self, rows: pa.RecordBatch, first: int) -> Iterator[AppendWait]:
        """Do what `write` does; see `Appender.steps`."""
        if rows.num_rows:
            self._rows, self._first = rows, first
            yield from self._appender.steps()
            self._rows = None

    def report(self) -> QueueReport:
        ledger = self._ledger
        begin, end = ledger.span or (0, 0)
        return QueueReport(
            self._port.queue,
            begin,
            end,
            ledger.sent,
            ledger.found,
            ledger.missing,
            ledger.extra,
            ledger.committed,
            ledger.newest,
            ledger.of_others,
            pack(ledger.taken),
        )

    def look_again(self) -> None:
        """Make the next write first read messages that arrived since."""
        self._appender.look_again()

    @property
    def end(self) -> int:
        """The offset after the attempt's last message in the queue; 0 without one."""
        return self._ledger.span.end if self._ledger.span is not None else 0

    # --- looking

    def look(self) -> bool:
        if self._writer is None:
            return False
        before = self._ledger.extra
        if self._looked_back:
            self._look(self._port.end(), self._writer)
        else:
            self._look_back(self._writer)
            self._looked_back = True
        return self._ledger.extra > before

    def _look_back(self, writer: Writer) -> None:
        start = self._port.start()
        self._ledger.note_committed(start.committed)
        walk = Lookback(writer, start.bookmark, start.end)
        steps = 0
        while (wanted := walk.next()) is not None:
            messages = [message for batch in self._port.read(*wanted) for message in find_messages(batch, writer)]
            self._ledger.read(walk.record(messages), 0, start.bookmark)
            self._port.keep()
            steps += 1
            if steps == 1 and walk.next() is not None:
                walk.set_least(self._port.least())
        self._ledger.read((), start.end)

    def _look(self, end: int, writer: Writer) -> None:
        """Read the messages that have arrived since this attempt last read the queue or sent to it."""
        begin = self._ledger.seen
        if begin < end:
            for batch in self._port.read(begin, end):
                self._ledger.read(find_messages(batch, writer), 0)
                self._port.keep()
            self._ledger.read((), end)

    # --- sending

    def missing(self) -> Iterator[SendBody]:
        assert self._rows is not None
        if self._writer is not None:
            before = self._rows.num_rows
            self._rows = self._ledger.claim(self._rows)
            self._first += before - self._rows.num_rows
        while self._rows.num_rows:
            yield from self._encoded(self._rows.slice(0, self._most_rows))

    def record_sent(self, body: SendBody, offset: int) -> None:
        assert self._rows is not None
        self._ledger.record_sent(offset, body.rows)
        self._rows = self._rows.slice(body.rows)
        self._first += body.rows

    def adapt(self, body: SendBody, error: OrderedMQError) -> bool:
        """Halve the number of rows per request if this request was too large, because the broker's limit is below the default."""
        if not _is_too_large(error):
            return False
        if body.rows == 1:
            raise RocketMQError(
                RocketMQCondition.MESSAGE_ILLEGAL,
                f"row {self._first} for {self._where} is larger than the broker accepts (its maxMessageSize), or has a property that the "
                f"broker refuses: {error.message}. The rows before it have been sent",
            )
        self._most_rows = body.rows // 2
        return True

    def _encoded(self, rows: pa.RecordBatch) -> Iterator[SendBody]:
        keys = self._keys.take(rows.num_rows)
        stamp = self._writer.stamp(self._ledger.sequence) if self._writer is not None else None
        packing = self._port.packing(rows, self._where, self._first)
        return encode(rows, keys, self._where, first=self._first, stamp=stamp, packing=packing)


def _is_too_large(error: OrderedMQError) -> bool:
    """Return whether a broker refused a request because of its size.

    Brokers before 5.0 report this with a code that they also use for other errors, so the message decides.
    """
    if not isinstance(error, RocketMQError):
        return False
    if error.sub == RocketMQCondition.SERVER_ERROR:
        return "body size" in error.message
    return error.sub == RocketMQCondition.MESSAGE_ILLEGAL


def settle(port: QueuePort, work: QueueWriter, where: str, taken: Mapping[int, int]) -> None:
    """Send rows until the queue has as many messages as the tasks have rows. Called by the commit.

    When a batch is written again with other partitions, its tasks find messages of an earlier run, and tasks that have rows with equal
    content may take the same message. This reads such messages from the queue, repeats each for every task that took it, and writes the
    copies like the rows of one more task. Of rows with equal content, the writer finds as many as there are messages, and sends the
    rest. An interrupted commit is repeated in the same way as a task.

    ``taken``: offsets of messages, and how many tasks took each message for one of their rows. ``work`` writes to the port for a
    partition of the same run that no task has. ``where`` names the queue and batch in errors. Raises DataLossError AGED_OUT if a
    message was deleted after a task took it, and the errors of `QueueWriter.write`.
    """
    offsets = np.array(sorted(taken), dtype=np.int64)
    counts = np.array([taken[offset] for offset in offsets.tolist()])
    read = rows = 0
    for batch in port.read(int(offsets[0]), int(offsets[-1]) + 1):
        _, rows_of_batch, chosen = np.intersect1d(batch.column("queue_offset").to_numpy(), offsets, return_indices=True)
        names = [name for name in PRODUCER_COLUMNS if name in batch.schema.names]
        again = batch.select(names).take(pa.array(np.repeat(rows_of_batch, counts[chosen])))
        work.write(normalise(again, where), rows)
        read, rows = read + len(rows_of_batch), rows + again.num_rows
    if read < len(offsets):
        raise DataLossError(
            DataLossCondition.AGED_OUT,
            f"{len(offsets) - read} messages of {where}, which an earlier attempt sent, were deleted by the broker before the batch was "
            "committed, so rows with their content may be missing. Let the broker keep messages for longer (fileReservedTime), and start "
            "the query again",
        )
