"""A task's report on its queues, which is the token of the task's receipt, and the decisions of the commit. Pure."""

from __future__ import annotations

import base64
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from orderedmq.broker import Receipt, SinkBatch
from orderedmq.conditions import SinkCondition
from orderedmq.errors import SinkError
from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.ownership.micro_batch import KEPT_BATCHES, is_repeat
from orderedmq.rocketmq.codec.gather import Int64s
from orderedmq.rocketmq.sink.commit_history import Committed


class QueueReport(NamedTuple):
    """The report of one attempt on one queue.

    - ``begin``, ``end``: the smallest range [begin, end) with all of the attempt's messages; empty if it has none.
    - ``sent``: number of rows that this attempt sent.
    - ``found``: number of rows that an earlier attempt had sent.
    - ``missing``: number of rows that are not in the queue, although the batch is committed.
    - ``extra``: number of messages of the same run, partition and batch that match no row.
    - ``committed``: whether the batch was committed before this attempt.
    - ``newest``: the sink's newest batch that was seen.
    - ``of_others``: number of the batch's messages that other runs sent.
    - ``taken``: the offsets of those ``of_others`` messages that match rows of this attempt, as `pack` returns them.
    """

    queue: MessageQueue
    begin: int
    end: int
    sent: int = 0
    found: int = 0
    missing: int = 0
    extra: int = 0
    committed: bool = False
    newest: int = -1
    of_others: int = 0
    taken: str = ""

    @property
    def rows(self) -> int:
        """The number of rows that the attempt had for the queue."""
        return self.sent + self.found + self.missing


@dataclass(frozen=True)
class Token:
    """An attempt's report on all its queues. ``sink`` is None for a batch without identity."""

    sink: str | None
    batch: int
    partition: int
    reports: tuple[QueueReport, ...]
    run: str = ""

    def text(self) -> str:
        return json.dumps([self.sink, self.batch, self.partition, self.reports, self.run], separators=(",", ":"))


def parse_token(batch: SinkBatch, receipt: Receipt) -> Token:
    """Read a receipt's token. Raises SinkError TOKEN_GONE for a receipt of another batch."""
    try:
        sink, number, partition, fields, run = json.loads(receipt.token)
        reports = tuple(QueueReport(MessageQueue(*queue), *numbers) for queue, *numbers in fields)
        token = Token(sink, number, partition, reports, run)
    except (ValueError, TypeError, KeyError) as error:
        raise SinkError(
            SinkCondition.TOKEN_GONE, f"the receipt of partition {receipt.partition} is not from a RocketMQ sink: {error}"
        ) from None
    of_sink = batch.sink_id is None or token.batch == batch.batch_id
    rows = {report.queue: report.rows for report in reports}
    if (token.sink is None) != (batch.sink_id is None) or not of_sink or rows != dict(receipt.rows):
        raise SinkError(
            SinkCondition.TOKEN_GONE,
            f"the receipt of partition {receipt.partition} belongs to batch {token.batch} of sink {token.sink}, not to batch "
            f"{batch.batch_id} of sink {batch.sink_id}. Commit only receipts of the batch's tasks",
        )
    return token


def pack(offsets: Sequence[int]) -> str:
    """Encode offsets as a short text, because a retry may have found a million messages."""
    if not offsets:
        return ""
    steps = np.diff(np.sort(np.asarray(offsets, dtype="<i8")), prepend=0)
    return base64.b85encode(zlib.compress(steps.tobytes())).decode()


def unpack(text: str) -> Int64s:
    """Return the offsets that `pack` was given, sorted."""
    steps = np.frombuffer(zlib.decompress(base64.b85decode(text)) if text else b"", dtype="<i8")
    return np.cumsum(steps, dtype=np.int64)


def count_contested(tokens: Sequence[Token]) -> dict[MessageQueue, dict[int, int]]:
    """Return how many tasks took each message of another run, for queues in which several tasks took the same message."""
    offsets: dict[MessageQueue, list[Int64s]] = {}
    for token in tokens:
        for report in token.reports:
            if report.taken:
                offsets.setdefault(report.queue, []).append(unpack(report.taken))
    out = {}
    for queue, parts in offsets.items():
        messages, counts = np.unique(np.concatenate(parts), return_counts=True)
        if counts.max() > 1:
            out[queue] = dict(zip(messages.tolist(), counts.tolist()))
    return out


def count_unmatched(tokens: Sequence[Token], settled: Sequence[QueueReport]) -> dict[MessageQueue, int]:
    """Return, by queue, the number of messages that other runs of the batch sent and that match no row. ``settled``: see `judge`."""
    again = {report.queue for report in settled}
    there: dict[MessageQueue, int] = {}
    used: Counter[MessageQueue] = Counter()
    for report in [*settled, *(report for token in tokens for report in token.reports if report.queue not in again)]:
        there[report.queue] = max(there.get(report.queue, 0), report.of_others)
        used[report.queue] += len(unpack(report.taken))
    return {queue: count - used[queue] for queue, count in there.items() if count > used[queue]}


def ranges(reports: Sequence[QueueReport]) -> dict[MessageQueue, OffsetRange]:
    """Return for each queue the smallest range with all of the batch's messages. Other messages may be among them."""
    out: dict[MessageQueue, OffsetRange] = {}
    for report in reports:
        if report.begin < report.end:
            before = out.get(report.queue, OffsetRange(report.begin, report.end))
            out[report.queue] = OffsetRange(min(before.begin, report.begin), max(before.end, report.end))
    return out


@dataclass(frozen=True)
class Verdict:
    """The result of `judge`: whether the batch was committed before, and the bookmarks to move."""

    replayed: bool
    bookmarks: Mapping[MessageQueue, int]
    #: How the rows differ from those that were committed; None if no difference is known.
    differs: str | None = None
    #: The sink's newest batch that a task or broker has seen; -1 for none.
    newest: int = -1


def judge(
    batch: SinkBatch,
    tokens: Sequence[Token],
    bookmarks: Mapping[MessageQueue, int | None],
    known: Iterable[Committed],
    settled: Sequence[QueueReport] = (),
    *,
    skip: bool = False,
) -> Verdict:
    """Decide what a commit has to do. Raises SinkError OUT_OF_ORDER, and BATCH_TOO_OLD unless ``skip``.

    ``bookmarks``: the present bookmarks of the queues that have messages of the batch. ``known``: what the brokers of the batch's topics
    know about it. ``settled``: the reports of `queue_writer.settle` on some of these queues, with all messages that the tasks took there.
    If an earlier commit was interrupted, some bookmarks have already moved, and the tasks have found all rows and sent none. In that
    case the verdict has the bookmarks that have not moved.
    """
    assert batch.sink_id is not None
    number, known = batch.batch_id, list(known)
    reports = [report for token in tokens for report in token.reports]
    lacking = {report.queue: report.missing for report in settled}
    newest = max([*(report.newest for report in reports), *(stored.newest for stored in known)], default=-1)
    spans = ranges(reports)
    committed = {queue for queue, span in spans.items() if (bookmarks.get(queue) or 0) > span.begin}
    committed |= {report.queue for report in reports if report.committed}
    moves = {queue: span.begin + 1 for queue, span in spans.items() if queue not in committed}
    if newest > number:
        # As soon as a later batch exists, a task assumes that this batch is committed, and sends nothing. Only the commit finds out
        # whether that is true. If a killed broker has forgotten the commit of this batch, the tasks have found all rows.
        published = any(stored.has(number) for stored in known) or _is_complete(reports, lacking)
    else:
        published = bool(committed) or any(stored.has(number) for stored in known)
    replayed = is_repeat(batch.sink_id, number, max(newest, number), published, skip=skip, sent=_seen(reports))
    if newest - number >= KEPT_BATCHES:
        return Verdict(True, {}, newest=newest)
    differs = _differs(reports, committed, lacking, count_unmatched(tokens, settled))
    return Verdict(replayed and not moves, moves, differs, newest)


def _is_complete(reports: Sequence[QueueReport], lacking: Mapping[MessageQueue, int]) -> bool:
    """Return whether the batch has rows, and each of them was found in its queue."""
    found = sum(report.found for report in reports)
    return 0 < found == sum(report.rows for report in reports) and not any(lacking.values())


def _seen(reports: Sequence[QueueReport]) -> str:
    """Return a text that says how many rows of an uncommitted batch readers see; empty if none."""
    sent, found = sum(report.sent for report in reports), sum(report.found for report in reports)
    total = sum(report.rows for report in reports)
    return f" ({found + sent} of its {total} rows have been sent, and readers see them)" if found + sent else ""


def _differs(
    reports: Sequence[QueueReport],
    committed: set[MessageQueue],
    lacking: Mapping[MessageQueue, int],
    others: Mapping[MessageQueue, int],
) -> str | None:
    for report in reports:
        missing = report.missing + lacking.get(report.queue, 0)
        extra = report.extra + others.get(report.queue, 0)
        if report.committed and (missing or extra):
            what = (
                f"{extra} of the batch's messages there match no row now, and {missing} rows are missing and have not been sent"
            )
        elif committed and report.queue not in committed and report.sent:
            what = f"the batch had no rows there before, and has {report.sent} now, which have been sent"
        else:
            continue
        return f"queue {report.queue}: {what}"
    return None
