"""Writes one attempt's rows to one queue: look, send what is missing, and look again after a lost answer. No sockets here.

Rules: one request is in flight at a time, so the queue has the rows in order. Rows are sent only while the attempt holds the
queue's lock, on the connection on which it was granted. An attempt that lost the connection or the lock reads the messages that
came since, before it sends. Rows of a batch without identity are not searched for: after a lost answer they are sent again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol

import pyarrow as pa

from orderedmq.conditions import RocketMQCondition
from orderedmq.errors import OrderedMQError, RocketMQError, RocketMQUnavailableError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.codec.encode import SendBody, encode
from orderedmq.rocketmq.codec.message_id import UniqueKeys
from orderedmq.rocketmq.sink.commit_report import QueueReport, pack
from orderedmq.rocketmq.sink.lookback import Ledger, Lookback
from orderedmq.rocketmq.sink.message_stamp import Writer, find_messages

#: The producer's address in a UNIQ_KEY. The random salt makes the key unique.
_HOST: Final = b"\x7f\x00\x00\x01"


class Start(NamedTuple):
    """A queue's end when an attempt comes there, the sink's bookmark if known, and the sink's newest committed batch or -1."""

    end: int
    bookmark: int | None
    committed: int = -1


class QueuePort(Protocol):
    """One queue at its broker, as an attempt uses it. A method raises OrderedMQError after it has tried for long enough."""

    queue: MessageQueue

    def acquire(self) -> None:
        """Get the queue's lock.

        Waits until other attempts of the partition, and of other runs of the batch, have given it up.
        """
        ...

    def keep(self) -> bool:
        """Whether the lock is ours for long enough to send; renews it when that is due."""
        ...

    def start(self) -> Start: ...
    def least(self) -> int:
        """Return the offset of the queue's first remaining message."""
        ...

    def end(self) -> int: ...
    def read(self, begin: int, end: int) -> Iterator[pa.RecordBatch]:
        """Yield messages [begin, end) with `message_stamp.COLUMNS`; fewer if some are deleted meanwhile."""
        ...

    def send(self, body: SendBody) -> int:
        """Return the first row's offset. Raises RocketMQUnavailableError with ``outcome_unknown`` if no answer came."""
        ...

    def pause(self, error: RocketMQUnavailableError, failures: int) -> None:
        """Wait before the next try, after this many failures in a row. Raises ``error`` if they have lasted too long.

        An error whose outcome is unknown ends the lock. Once the lock is acquired again, all that the broker stored can be
        read.
        """
        ...

    def release(self, end: int) -> None:
        """Wait until all messages below ``end`` can be read, and give the lock back. It may be acquired again."""
        ...


class QueueWriter:
    """Writes one attempt's rows to one queue. Used by one thread at a time."""

    def __init__(self, port: QueuePort, writer: Writer | None, partition: int) -> None:
        self._port = port
        self._writer = writer
        self._where = f"queue {port.queue} (partition {partition})"
        self._ledger = Ledger(writer or Writer("", 0, partition))
        self._keys = UniqueKeys(_HOST, os.getpid(), int.from_bytes(os.urandom(4), "big"))
        self._looked_back = False
        self._ready = False
        self._failures = 0
        #: Maximum rows per call of the encoder, and so per request; None: no limit.
        self._most_rows: int | None = None

    def write(self, rows: pa.RecordBatch, first: int) -> None:
        """Write the rows behind those of earlier calls. ``first``: the number of the first row, for errors.

        Raises MessageError BAD_PROPERTY or PROPERTIES_TOO_LARGE, and what the port raises.
        """
        while rows.num_rows:
            if self._writer is not None:
                self._enter()
                before = rows.num_rows
                rows = self._ledger.claim(rows)
                first += before - rows.num_rows
            sent = self._send(rows, first)
            rows, first = rows.slice(sent), first + sent

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

    def let_go(self) -> None:
        """Wait until sent rows can be read, and give the queue back. The next write reads what came meanwhile."""
        self._ready = False
        span = self._ledger.span
        self._port.release(span.end if span is not None else 0)

    # --- looking

    def _enter(self) -> None:
        """Get the lock, and read all messages that came before it was granted."""
        while not (self._port.keep() and self._ready):
            if not self._port.keep():
                self._port.acquire()
            if self._looked_back:
                self._look(self._port.end())
            else:
                self._look_back()
                self._looked_back = True
            # A long look may have cost us the lock.
            self._ready = self._port.keep()

    def _look_back(self) -> None:
        assert self._writer is not None
        start = self._port.start()
        self._ledger.note_committed(start.committed)
        walk = Lookback(self._writer, start.bookmark, start.end)
        steps = 0
        while (wanted := walk.next()) is not None:
            messages = [message for batch in self._port.read(*wanted) for message in find_messages(batch, self._writer)]
            self._ledger.read(walk.record(messages), 0, start.bookmark)
            self._port.keep()
            steps += 1
            if steps == 1 and walk.next() is not None:
                walk.set_least(self._port.least())
        self._ledger.read((), start.end)

    def _look(self, end: int) -> None:
        """Read the messages that came since the last look or send."""
        assert self._writer is not None
        begin = self._ledger.seen
        if begin < end:
            for batch in self._port.read(begin, end):
                self._ledger.read(find_messages(batch, self._writer), 0)
                self._port.keep()
            self._ledger.read((), end)

    # --- sending

    def _send(self, rows: pa.RecordBatch, first: int) -> int:
        """Send rows and return how many are stored: fewer than all if a look or another try must come first."""
        done = 0
        rows = rows.slice(0, self._most_rows)
        for body in self._encoded(rows, first):
            if self._writer is not None and not self._port.keep():
                self._ready = False
                return done
            try:
                offset = self._port.send(body)
            except RocketMQUnavailableError as error:
                self._failures += 1
                self._ready = self._ready and not error.outcome_unknown
                self._port.pause(error, self._failures)
                return done
            except RocketMQError as error:
                if not _is_too_large(error):
                    raise
                if body.rows == 1:
                    raise self._refused_error(error, first + done) from None
                # The broker's limit for requests is below the default.
                self._most_rows = body.rows // 2
                return done
            self._failures = 0
            self._ledger.record_sent(offset, body.rows)
            done += body.rows
        return done

    def _encoded(self, rows: pa.RecordBatch, first: int) -> Iterator[SendBody]:
        count = rows.num_rows
        keys = self._keys.take(count, time.time_ns() // 1_000_000)
        stamp = self._writer.stamp(self._ledger.sequence) if self._writer is not None else None
        return encode(rows, keys, self._where, first=first, stamp=stamp)

    def _refused_error(self, error: RocketMQError, row: int) -> OrderedMQError:
        return RocketMQError(
            RocketMQCondition.MESSAGE_ILLEGAL,
            f"row {row} for {self._where} is larger than the broker takes (its maxMessageSize), or has a property that the broker refuses; the "
            f"rows before it have been sent: {error.message}",
        )


def _is_too_large(error: RocketMQError) -> bool:
    """Whether a broker refused a request for its size: before 5.0 with a code that other faults share, later with a text."""
    if error.sub == RocketMQCondition.SERVER_ERROR:
        return "body size" in error.message
    return error.sub == RocketMQCondition.MESSAGE_ILLEGAL
