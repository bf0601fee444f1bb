"""A query's lag per queue, from the progress that Spark reports. Pure.

Lag is the number of messages that a queue had when the micro-batch was planned, and that are still unprocessed after it:
``latest - next``, never negative. A source's progress has ``next`` in its ``endOffset``, the Checkpoint that Spark logged, and ``latest``
in its ``latestOffset``, which the source's ``reportLatestOffset`` returned. Spark gives both as JSON text, but a progress that was
parsed from JSON has objects.

Spark reports no latest offset for a batch that it repeats after a restart, because the previous run planned it. In that case the lag
is unknown. Before 4.2, Spark calls no ``reportLatestOffset`` and reports the ``endOffset`` as the ``latestOffset``, so the source puts
its report into that offset, as ``latest``.

In the latest offset, a source with a parking lot also reports how many messages were parked at the time of planning.
"""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from orderedmq.conditions import OffsetCondition
from orderedmq.errors import OffsetError
from orderedmq.model import MessageQueue, is_parked
from orderedmq.ownership.offsets import Checkpoint, offsets_from_json

#: The values by which PySpark shows a missing offset, such as str(None) for Java's null (classic), or JSON's null (Connect).
_MISSING: Final = (None, "", "None", "null")


class QueueLag(NamedTuple):
    """The state of one queue as of the last micro-batch.

    next: offset of the next message to process. latest: offset after the last message in the queue, None if unknown.
    """

    next: int
    latest: int | None

    @property
    def messages(self) -> int | None:
        """The lag in messages, None if unknown."""
        return None if self.latest is None else max(0, self.latest - self.next)


class ParkedCounts(NamedTuple):
    """The parked messages of a query as of the last micro-batch.

    oldest: when the first of them was stored, in ms since the epoch, None if nothing is parked. retries: the number of failed listener
    calls for the next message of each key.
    """

    messages: int
    keys: int
    oldest: int | None
    retries: int


def is_ours(progress_source: Mapping[str, Any]) -> bool:
    """Whether this is the progress of an orderedmq source that has already decided where its queues begin."""
    end = _parsed(progress_source.get("endOffset"))
    return isinstance(end, Mapping) and {"v", "owner", "next"} <= end.keys()


def checkpoint_of(progress_source: Mapping[str, Any]) -> Checkpoint | None:
    """Return the checkpoint up to which one source is processed: None for another kind of source, or if none is decided yet.

    Raises OffsetError for a checkpoint that this version cannot read.
    """
    return Checkpoint.from_spark(_parsed(progress_source["endOffset"])) if is_ours(progress_source) else None


def lag_of(progress_source: Mapping[str, Any]) -> dict[MessageQueue, QueueLag]:
    """Return the lag of each queue of one source: an empty dict for another kind of source, or if no offset is decided yet.

    If Spark reports latest offsets, a queue that lacks ``next`` or ``latest`` is left out: without ``next``, its beginning is unknown,
    and without ``latest``, it was given up or deleted. Raises OffsetError for offsets that this version cannot read.
    """
    checkpoint = checkpoint_of(progress_source)
    if checkpoint is None:
        return {}
    every = checkpoint.next
    following = {queue: offset for queue, offset in every.items() if not is_parked(queue)}
    latest = _latest(progress_source)
    if latest is None:
        return {queue: QueueLag(offset, None) for queue, offset in following.items()}
    ends = offsets_from_json(latest["next"], "the latest offsets in the query's progress")
    return {queue: QueueLag(offset, ends[queue]) for queue, offset in following.items() if queue in ends}


def lag_of_query(progress_sources: Iterable[Mapping[str, Any]]) -> dict[MessageQueue, QueueLag]:
    """Return the lag of each queue of all sources, in queue order. If several sources read a queue, the slowest one counts."""
    found: dict[MessageQueue, QueueLag] = {}
    for source in progress_sources:
        for queue, lag in lag_of(source).items():
            if queue not in found or lag.next < found[queue].next:
                found[queue] = lag
    return {queue: found[queue] for queue in sorted(found)}


def parked_of_query(progress_sources: Iterable[Mapping[str, Any]]) -> ParkedCounts | None:
    """Return the parked messages of all sources with parking lots, or None if there is no such source or no latest offset."""
    found = []
    for source in progress_sources:
        latest = _latest(source) if is_ours(source) else None
        if latest is None or "parked" not in latest:
            continue
        try:
            found.append(ParkedCounts(**latest["parked"]))
        except TypeError:
            raise _not_ours(latest) from None
    if not found:
        return None
    oldest = min((lot.oldest for lot in found if lot.oldest is not None), default=None)
    return ParkedCounts(
        sum(lot.messages for lot in found), sum(lot.keys for lot in found), oldest, sum(lot.retries for lot in found)
    )


def describe(lags: Mapping[MessageQueue, QueueLag], parked: ParkedCounts | None = None) -> str:
    """Return one line with the total lag, the (first) queue with the largest lag, and the number of parked messages."""
    line = _describe(lags)
    return f"{line}, parked {parked.messages} messages of {parked.keys} keys" if parked and parked.messages else line


def _describe(lags: Mapping[MessageQueue, QueueLag]) -> str:
    messages = {queue: lag.messages for queue, lag in lags.items() if lag.messages is not None}
    if not messages:
        return f"lag of {len(lags)} queues is unknown"
    worst = min(messages, key=lambda queue: (-messages[queue], queue))
    total = f"lag {sum(messages.values())} messages in {len(messages)} queues"
    return f"{total}, worst {worst} with {messages[worst]}" if messages[worst] else total


def _latest(progress_source: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the latest offset that Spark reports, None if it reports none. Raises OffsetError INVALID."""
    latest = _parsed(progress_source.get("latestOffset"))
    if isinstance(latest, Mapping) and "latest" in latest:
        latest = latest["latest"]
    if latest in _MISSING:
        return None
    if not isinstance(latest, Mapping) or "next" not in latest:
        raise _not_ours(latest)
    return latest


def _not_ours(latest: object) -> OffsetError:
    return OffsetError(
        OffsetCondition.INVALID, f"the latest offset {latest!r} in the query's progress was not written by this source"
    )


def _parsed(offset: Any) -> Any:
    """Return an offset as Python objects. A value of another source that cannot be parsed is returned unchanged.

    Before 4.2, PySpark shows the offsets of ``query.lastProgress`` as ``str`` does the parsed JSON.
    """
    if not isinstance(offset, str):
        return offset
    for parse in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError):
            return parse(offset)
    return offset
