"""Deletes what is no longer needed: segment files of killed attempts and of runs that can no longer publish them, and old messages.

Rules: a file is deleted only if it is a segment of this store, no index entry points to it, its writer has ended (the file's
``flock`` is free), and no run can publish it any more. The check runs in a write transaction, so that no publish runs at the same
time. Every publish, append, renewal and new connection asks for a collection, but a collection runs at most once a minute. The modification
time of the file LOOKED is the time of the last collection.

A write applies the retention of the topics that it writes to. Publishes, appends and renewals also apply that of all other topics, at most
once a minute in each process. A new connection does not, so that the retention of a restored store can be raised before messages go.

If a batch is killed and repeated again and again, only its last two runs keep their segments. An earlier run has ended, because a query
is started again only after it has failed. Should it still be alive, its publish raises TOKEN_GONE and makes no row visible.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Container, Iterable
from functools import partial
from pathlib import Path
from typing import Final

from orderedmq.embedded import index, liveness, runs
from orderedmq.embedded.clock import Clock, is_forgotten
from orderedmq.embedded.index import topic_of
from orderedmq.embedded.runs import KEPT_RUNS
from orderedmq.embedded.store.database import Store
from orderedmq.embedded.store.filesystem import without_owner
from orderedmq.embedded.store.schema import BATCHES, SEGMENTS
from orderedmq.embedded.store.segment_file import HEADER_BYTES, Header, was_begun
from orderedmq.embedded.store.segments import SegmentName, parse_name
from orderedmq.embedded.store.transaction import Transaction
from orderedmq.errors import StoreError, TopicError
from orderedmq.ownership.lock import Instant

#: Seconds between two collections, and the age from which a file without a header is deleted. The writer of a younger file may not
#: have locked it yet.
INTERVAL: Final = 60.0
#: Maximum chunks of a topic that retention deletes at once if it is not applied by a write to the topic.
RETIRED_AT_ONCE: Final = 1024
#: The file whose modification time is that of the last collection. Its name is not that of a segment.
LOOKED: Final = "looked"


def collect(store: Store, clock: Clock) -> None:
    """Delete the garbage, old registrations and the files of dead owners, unless that was done within the last minute.

    Errors are ignored, because the caller's work is already done.
    """
    with contextlib.suppress(StoreError, OSError):
        if _due(store):
            collect_now(store, clock)
            runs.sweep(store.path, clock.instant(), partial(liveness.is_alive, store.path))
            liveness.sweep(store.path)


def tidy(store: Store, clock: Clock) -> None:
    """Apply the retention of all topics, unless this process did that within the last minute, and `collect`. Errors are ignored."""
    now = clock.instant()
    if store.retained is None or now.since(store.retained) >= INTERVAL:
        store.retained = now
        with contextlib.suppress(StoreError):
            with store.read() as txn:
                names = [topic.name for topic in index.all_topics(txn)]
            for name in names:
                # An error of one topic does not keep others from being deleted.
                with contextlib.suppress(StoreError, TopicError):
                    _retain(store, clock, name)
    collect(store, clock)


def _retain(store: Store, clock: Clock, name: str) -> None:
    with store.read() as txn:
        if not index.is_overdue(txn, topic_of(txn, name), clock):
            return
    with store.write() as txn:
        index.retain(txn, topic_of(txn, name), clock, most=RETIRED_AT_ONCE)


def collect_now(store: Store, clock: Clock) -> int:
    """Delete the garbage, and return the number of deleted files. Raises StoreError PERMISSION or IO."""
    with store.errors_mapped("delete segments"):
        with store.read() as txn:
            unused = [segment for segment in map(parse_name, store.segments.names()) if segment and not _used(txn, segment)]
        replaced = _replaced(store, clock.instant(), unused)
        return sum(_delete(store, clock, segment, replaced) for segment in unused)


def can_be_published(header: Header, now: Instant, latest: int | None) -> bool:
    """Whether the run that wrote a complete segment may still publish it. ``latest``: the newest batch that the run's sink has published.

    A segment with ``own`` can be published only while its writer holds the lock.
    """
    if header.own or is_forgotten(Instant(header.boot, header.since), now):
        return False
    return latest is None or header.batch > latest


def _due(store: Store) -> bool:
    path = f"{store.segments.folder}/{LOOKED}"
    with contextlib.suppress(FileNotFoundError):
        if abs(time.time() - os.stat(path).st_mtime) < INTERVAL:
            return False
    Path(path).touch(mode=0o600)
    return True


def _used(txn: Transaction, segment: SegmentName) -> bool:
    return segment.complete and txn.get(SEGMENTS, segment.segment) is not None


def _replaced(store: Store, now: Instant, unused: Iterable[SegmentName]) -> set[SegmentName]:
    """Return the segments whose run has been followed by `KEPT_RUNS` other runs of the same batch."""
    batches: dict[tuple[str, int], dict[str, list[tuple[float, SegmentName]]]] = {}
    for segment in unused:
        # A file that cannot be read, or has been deleted since, counts for no run.
        with contextlib.suppress(OSError):
            header = _own_header(store, segment, store.segments.header(segment.name))
            if segment.complete and header is not None and header.sink is not None and can_be_published(header, now, None):
                batches.setdefault((header.sink, header.batch), {}).setdefault(header.run, []).append((header.since, segment))
    # A run counts from its first segment, because a task that outlives its driver may write later than the tasks of the next run.
    return {segment for runs in batches.values() for run in sorted(runs.values(), key=min)[:-KEPT_RUNS] for _, segment in run}


def _own_header(store: Store, segment: SegmentName, header: Header | None) -> Header | None:
    """Return the header of a file that this store wrote under this name, None for any other file."""
    ours = header is not None and header.store_id == store.segments.store_id and header.token == segment.segment
    return header if ours else None


def _delete(store: Store, clock: Clock, segment: SegmentName, replaced: Container[SegmentName]) -> bool:
    """Delete a file that looked unused, if it is garbage. Return whether it was deleted.

    The file's lock is tried inside the transaction and without waiting. Otherwise a writer that holds a transaction and waits for the
    file's lock could cause a deadlock.
    """
    path = store.segments.folder / segment.name
    with store.write() as txn, contextlib.ExitStack() as stack:
        try:
            descriptor = stack.enter_context(without_owner(path))
            head, age = os.pread(descriptor, HEADER_BYTES, 0), time.time() - os.fstat(descriptor).st_mtime
        except OSError:
            # The file's writer is alive or has deleted it, or the file cannot be read. The collection continues with other files.
            return False
        if _used(txn, segment) or not (segment in replaced or _is_garbage(txn, store, clock, segment, head, age)):
            return False
        store.segments.remove(segment.name)
        return True


def _is_garbage(txn: Transaction, store: Store, clock: Clock, segment: SegmentName, head: bytes, age: float) -> bool:
    if was_begun(head):
        return not segment.complete and age > INTERVAL
    header = _own_header(store, segment, Header.unpack(head))
    if header is None:
        return False
    if not segment.complete:
        return True
    last = None if header.sink is None else txn.last(BATCHES, header.sink)
    latest = None if last is None else last.batch_id
    return not can_be_published(header, clock.instant(), latest)
