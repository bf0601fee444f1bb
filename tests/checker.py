"""Judges every test of faults: the messages by `orderedmq.testing.history`, and beside them the locks, offsets and published ranges.

A history may also have these events:

    grant    group queue epoch owner         a lock was granted (or seen to be granted)
    commit   group queue offset epoch accepted
    offset   group queue offset              a group's offset as an observer saw it
    reset    group                           a seek: offsets of the group may go back, its ranges begin anywhere
    read     query run batch group queue begin end epoch    a task of a run read this range
    publish  query run batch accepted replayed [began]      the sink's commit of a run ended; began: when it was called

Their anomalies:

    silent_gap            messages between two published ranges of a queue are in neither, and no loss was reported
    range_overlap         messages are in two published ranges of a queue
    epoch_regression      a grant with a lower epoch than an earlier grant of the queue, or with another owner's epoch
    fenced_write_accepted a commit or publish was accepted with an epoch that was no longer the highest
    offset_regression     a group's offset went back without a reset
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from orderedmq.broker import Broker
from orderedmq.model import MessageQueue
from orderedmq.testing import history as messages
from orderedmq.testing.history import Anomaly, Event, by_time


def judge(history: Iterable[Event], *, repeats: bool = False, drained: bool = True) -> list[Anomaly]:
    """All anomalies of a history. ``repeats``, ``drained``: see `messages.judge`."""
    given = list(history)
    events = by_time(given)
    moved = [{**event, "event": "offset"} if event["event"] == "commit" and event["accepted"] else event for event in given]
    return [*messages.judge(moved, repeats=repeats, drained=drained), *_locks(events), *_offsets(events), *_ranges(events)]


def _locks(events: Sequence[Event]) -> Iterator[Anomaly]:
    """Anomalies of ownership: epochs must rise, and commits and publishes may be accepted only under the highest epoch."""
    highest: dict[tuple[str, str], tuple[int, str]] = {}
    grants: dict[tuple[str, str], list[tuple[tuple[int, int], int]]] = defaultdict(list)
    runs: dict[tuple[Any, ...], list[Event]] = defaultdict(list)
    for event in events:
        match event["event"]:
            case "grant":
                lock, epoch, owner = (event["group"], event["queue"]), event["epoch"], event["owner"]
                known, holder = highest.get(lock, (-1, owner))
                if epoch < known or (epoch == known and owner != holder):
                    yield Anomaly("epoch_regression", event["queue"], f"epoch {epoch} for {owner} after {known} for {holder}")
                else:
                    highest[lock] = (epoch, owner)
                    grants[lock].append((event["at"], epoch))
            case "commit" if event["accepted"]:
                now = highest.get((event["group"], event["queue"]), (-1, ""))[0]
                if event["epoch"] < now:
                    detail = f"offset {event['offset']} was committed under epoch {event['epoch']} after {now} was granted"
                    yield Anomaly("fenced_write_accepted", event["queue"], detail)
            case "read":
                runs[event["query"], event["run"], event["batch"]].append(event)
            case "publish" if event["accepted"] and not event.get("replayed"):
                began = (event["began"], -1) if "began" in event else event["at"]
                for read in runs[event["query"], event["run"], event["batch"]]:
                    now = max((epoch for at, epoch in grants[read["group"], read["queue"]] if at < began), default=-1)
                    if read["epoch"] < now:
                        detail = f"batch {event['batch']} was published under epoch {read['epoch']} after {now} was granted"
                        yield Anomaly("fenced_write_accepted", read["queue"], detail)


def _offsets(events: Sequence[Event]) -> Iterator[Anomaly]:
    """Anomalies of group offsets: they may move backwards only through a reset."""
    highest: dict[tuple[str, str], int] = {}
    for event in events:
        if event["event"] == "reset":
            highest = {lock: offset for lock, offset in highest.items() if lock[0] != event["group"]}
        elif event["event"] == "offset" or (event["event"] == "commit" and event["accepted"]):
            lock = (event["group"], event["queue"])
            if event["offset"] < highest.get(lock, 0):
                yield Anomaly(
                    "offset_regression", event["queue"], f"{lock[0]} was at {highest[lock]}, now at {event['offset']}"
                )
            highest[lock] = event["offset"]


def _ranges(events: Sequence[Event]) -> Iterator[Anomaly]:
    """Anomalies of published ranges: the ranges of a group's queue must form one chain, whichever query and run published them."""
    lost = [(event["queue"], range(event["begin"], event["end"])) for event in events if event["event"] == "loss"]
    runs: dict[tuple[Any, ...], dict[str, Event]] = defaultdict(dict)
    ends: dict[tuple[str, str], int] = {}
    for event in events:
        if event["event"] == "reset":
            ends = {lock: end for lock, end in ends.items() if lock[0] != event["group"]}
        elif event["event"] == "read":
            runs[event["query"], event["run"], event["batch"]][event["queue"]] = event
        elif event["event"] == "publish" and event["accepted"] and not event.get("replayed"):
            for queue, read in runs[event["query"], event["run"], event["batch"]].items():
                begin: int = read["begin"]
                end = ends.get((read["group"], queue), begin)
                if begin < end:
                    yield Anomaly("range_overlap", queue, f"batch {event['batch']} begins at {begin}, another ended at {end}")
                missing = [n for n in range(end, begin) if not any(queue == gone and n in span for gone, span in lost)]
                if missing:
                    yield Anomaly(
                        "silent_gap", queue, f"batch {event['batch']} begins at {begin}, {missing[:5]} are in no batch"
                    )
                ends[read["group"], queue] = max(end, read["end"])


def sent(broker: Broker, *topics: str) -> list[dict[str, Any]]:
    """The stored messages of topics as acknowledged sends. A message's id is its body."""
    return [
        {"event": "send", "queue": str(queue), "offset": at, "key": key, "id": body.decode(), "outcome": "ok"}
        for topic in topics
        for queue in broker.log.queues(topic)
        for at, body, key, _ in _rows(broker, queue)
    ]


def delivered(broker: Broker, *topics: str) -> list[dict[str, Any]]:
    """The stored messages of topics as deliveries, one lane per queue. The column ``keys`` has a message's origin, ``queue:offset``."""
    out = []
    for queue in (queue for topic in topics for queue in broker.log.queues(topic)):
        origins = [(origin.rpartition(":"), key, body.decode()) for _, body, key, origin in _rows(broker, queue)]
        rows = [[source, int(at), key, body] for (source, _, at), key, body in origins]
        out.append({"event": "deliver", "lane": str(queue), "rows": rows})
    return out


def offsets(broker: Broker, group: str) -> list[dict[str, Any]]:
    """The group's current offsets, as events."""
    found = broker.admin.group_offsets(group)
    return [{"event": "offset", "group": group, "queue": str(queue), "offset": offset} for queue, offset in found.items()]


def _rows(broker: Broker, queue: MessageQueue) -> Iterator[tuple[int, bytes, str | None, str]]:
    at = broker.log.bounds([queue])[queue]
    position = at.min_offset
    while position < at.max_offset:
        batch = broker.log.pull(queue, position, 65536, 1 << 26, ("queue_offset", "body", "sharding_key", "keys"))
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)
        position += batch.num_rows
