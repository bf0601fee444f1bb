"""What a task tells the commit about each queue it wrote, as the text of a receipt's token; and what the commit makes of it. Pure."""

from __future__ import annotations

import base64
import json
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from orderedmq.broker import Receipt, SinkBatch
from orderedmq.errors import SinkError
from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.rocketmq.codec.gather import Int64s
from orderedmq.rocketmq.sink.lookback import KEPT


@dataclass(frozen=True)
class QueueReport:
    """One queue of one attempt. Rows: sent by it; found there, sent by an earlier attempt; missing from a committed batch.

    ``extra``: messages of the same run, partition and batch that are none of the rows. [begin, end): where they all are, others' among
    them; empty without any. ``committed``: the batch was, before this attempt. ``newest``: the sink's newest batch that was seen.
    ``of_others``: messages of the batch that other runs sent; ``taken``: which of them are rows, as `pack` gives the offsets.
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


@dataclass(frozen=True)
class Token:
    """All of an attempt. ``sink`` None: it has no identity."""

    sink: str | None
    batch: int
    partition: int
    reports: tuple[QueueReport, ...]
    run: str = ""

    def text(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))


def parse_token(batch: SinkBatch, receipt: Receipt) -> Token:
    """Raises SinkError TOKEN_GONE for a receipt that is not one of this batch."""
    try:
        fields = json.loads(receipt.token)
        reports = tuple(QueueReport(**{**report, "queue": MessageQueue(*report["queue"])}) for report in fields.pop("reports"))
        token = Token(**fields, reports=reports)
    except (ValueError, TypeError, KeyError) as error:
        raise SinkError("TOKEN_GONE", f"the receipt of partition {receipt.partition} is not of RocketMQ: {error}") from None
    of_sink = batch.sink_id is None or token.batch == batch.batch_id
    rows = {report.queue: report.sent + report.found + report.missing for report in reports}
    if (token.sink is None) != (batch.sink_id is None) or not of_sink or rows != dict(receipt.rows):
        raise SinkError(
            "TOKEN_GONE",
            f"the receipt of partition {receipt.partition} is one of batch {token.batch} of sink {token.sink}, not of batch {batch.batch_id} "
            f"of sink {batch.sink_id}: a commit takes what its own tasks gave it",
        )
    return token


def pack(offsets: Sequence[int]) -> str:
    """Offsets as a short text: a retry may have found a million."""
    if not offsets:
        return ""
    steps = np.diff(np.sort(np.asarray(offsets, dtype="<i8")), prepend=0)
    return base64.b85encode(zlib.compress(steps.tobytes())).decode()


def unpack(text: str) -> Int64s:
    """What `pack` was given, sorted."""
    steps = np.frombuffer(zlib.decompress(base64.b85decode(text)) if text else b"", dtype="<i8")
    return np.cumsum(steps, dtype=np.int64)


def taken(tokens: Sequence[Token]) -> dict[MessageQueue, dict[int, int]]:
    """Of each queue in which a message of another run was taken by several tasks: every message that was, and by how many."""
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


def left_over(tokens: Sequence[Token], settled: Sequence[QueueReport] = ()) -> dict[MessageQueue, int]:
    """Per queue: messages of the batch that other runs sent and that are none of the rows. ``settled``: as `judge` has it."""
    again = {report.queue for report in settled}
    there: dict[MessageQueue, int] = {}
    used: Counter[MessageQueue] = Counter()
    for report in [*settled, *(report for token in tokens for report in token.reports if report.queue not in again)]:
        there[report.queue] = max(there.get(report.queue, 0), report.of_others)
        used[report.queue] += len(unpack(report.taken))
    return {queue: count - used[queue] for queue, count in there.items() if count > used[queue]}


def ranges(reports: Sequence[QueueReport]) -> dict[MessageQueue, OffsetRange]:
    """Where the batch's messages are in each queue; others' may be among them."""
    out: dict[MessageQueue, OffsetRange] = {}
    for report in reports:
        if report.begin < report.end:
            before = out.get(report.queue, OffsetRange(report.begin, report.end))
            out[report.queue] = OffsetRange(min(before.begin, report.begin), max(before.end, report.end))
    return out


@dataclass(frozen=True)
class Verdict:
    """What a commit has to do: whether the batch was committed before, and the bookmarks that are to move."""

    replayed: bool
    bookmarks: Mapping[MessageQueue, int]
    #: Why this is not the batch that was committed; None when it is, as far as can be known.
    differs: str | None = None


def judge(
    batch: SinkBatch,
    tokens: Sequence[Token],
    bookmarks: Mapping[MessageQueue, int | None],
    settled: Sequence[QueueReport] = (),
) -> Verdict:
    """``bookmarks``: as they are now, of the queues that have rows. ``settled``: what `contested.settle` did in some of them, with all that
    the tasks took. Raises SinkError BATCH_TOO_OLD.

    A commit that died half-way has moved some bookmarks: the rest is moved then, and no row was sent.
    """
    reports = [report for token in tokens for report in token.reports]
    lacking = {report.queue: report.missing for report in settled}
    newest = max((report.newest for report in reports), default=-1)
    places = ranges(reports)
    committed = {queue for queue, place in places.items() if (bookmarks.get(queue) or 0) > place.begin}
    committed |= {report.queue for report in reports if report.committed}
    moves = {queue: place.begin + 1 for queue, place in places.items() if queue not in committed}
    replayed = bool(committed) and not moves
    if newest - batch.batch_id >= KEPT:
        raise SinkError(
            "BATCH_TOO_OLD",
            f"batch {batch.batch_id} of this query is older than the {KEPT} batches up to {newest} that are compared, so whether it is the "
            "one that was written cannot be told: restore the newest checkpoint, start with a new one, or set onReplayDiffers=skip to take "
            "it as written",
        )
    return Verdict(replayed, moves, _differs(batch, reports, committed, lacking, left_over(tokens, settled)))


def _differs(
    batch: SinkBatch,
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
                f"{extra} of its messages are none of the rows now, {missing} rows are not there; none of these has been sent"
            )
        elif committed and report.queue not in committed and report.sent:
            what = f"it had no rows there, {report.sent} now, which have been sent"
        else:
            continue
        return (
            f"batch {batch.batch_id} of this query was committed already, with other content (queue {report.queue}: {what}): an old copy of "
            "the checkpoint, or a query that is not deterministic; restore the newest checkpoint, start with a new one, or set "
            "onReplayDiffers=skip to keep what was committed"
        )
    return None
