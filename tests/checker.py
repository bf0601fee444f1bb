"""Judges every test of faults: reads a history of sends, grants, publishes and deliveries, and names its anomalies.

A history is a list of events, each a dict, in the order in which they happened. Events of several processes are sorted by ``at`` (ns).
A queue is given by its name, ``topic/broker/number``. Only recorded events are judged.

    send     queue offset key id outcome     outcome: ok, fail, unknown (offset may be missing then: see id)
    deliver  lane rows [batch]               rows: [queue, offset, key, id] in order; lane: where they came from
    loss     queue begin end                 the reader reported these messages as lost, so they are not expected
    grant    group queue epoch owner         a lock was granted (or seen to be granted)
    commit   group queue offset epoch accepted
    offset   group queue offset              a group's offset as an observer saw it
    reset    group                           a seek: offsets of the group may go back, its ranges begin anywhere
    read     query run batch group queue begin end epoch    a task of a run read this range
    publish  query run batch accepted replayed [began]      the sink's commit of a run ended; began: when it was called
    heal                                     the faults ended: everything must be delivered from now on

If Jepsen's Kafka checker has a name for an anomaly, that name is used:

    lost                  not delivered, although the group's offset has passed it, or a later message of its key was delivered
    unseen, stuck         not delivered at the end of a drained history; "stuck" if there was a heal
    duplicate             delivered twice (apart from repeated whole batches, with ``repeats``)
    skip                  delivered before its predecessor of the same key
    nonmonotonic          delivered after a later message of the same source queue in a lane, or of the same key
    split_key             the messages of a key are in two lanes, so they have no order
    inconsistent_offset   two messages at one offset, or the delivered message is not the one sent there
    aborted_read          delivered, but never sent, or its send failed
    silent_gap            messages between two published ranges of a queue are in neither, and no loss was reported
    range_overlap         messages are in two published ranges of a queue
    epoch_regression      a grant with a lower epoch than an earlier grant of the queue, or with another owner's epoch
    fenced_write_accepted a commit or publish was accepted with an epoch that was no longer the highest
    offset_regression     a group's offset went back without a reset
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from orderedmq.broker import Broker
from orderedmq.model import MessageQueue

Event = Mapping[str, Any]
Place = tuple[str, int]


class Anomaly(NamedTuple):
    kind: str
    where: str
    detail: str


class Sent(NamedTuple):
    key: str | None
    id: str | None
    outcome: str


@dataclass
class _Sends:
    """The messages that were sent. ``ids``: the messages without an offset, by id. ``lost``: reported losses."""

    at: dict[Place, Sent] = field(default_factory=dict)
    ids: dict[str, Sent] = field(default_factory=dict)
    queues: set[str] = field(default_factory=set)
    lost: list[tuple[str, int, int]] = field(default_factory=list)

    def excused(self, place: Place) -> bool:
        return any(queue == place[0] and begin <= place[1] < end for queue, begin, end in self.lost)

    def expected(self) -> dict[tuple[str, str | None], list[int]]:
        out: dict[tuple[str, str | None], list[int]] = defaultdict(list)
        for (queue, offset), sent in sorted(self.at.items()):
            if sent.outcome == "ok" and not self.excused((queue, offset)):
                out[queue, sent.key].append(offset)
        return out


def judge(history: Iterable[Event], *, repeats: bool = False, drained: bool = True) -> list[Anomaly]:
    """All anomalies of a history.

    repeats: an at-least-once sink may get the last batch again, as a whole. drained: all messages should have been delivered.
    """
    events: list[Event] = []
    at = 0
    for place, event in enumerate(history):
        at = event.get("at", at)
        events.append({**event, "at": (at, place)})
    events.sort(key=lambda event: event["at"])
    anomalies: list[Anomaly] = []
    sends = _sends(events, anomalies)
    if any(event["event"] == "deliver" for event in events):
        anomalies += _deliveries(events, sends, repeats, drained)
    return [*anomalies, *_locks(events), *_offsets(events), *_ranges(events, sends)]


def _sends(events: Sequence[Event], anomalies: list[Anomaly]) -> _Sends:
    sends = _Sends()
    sends.lost = [(event["queue"], event["begin"], event["end"]) for event in events if event["event"] == "loss"]
    for event in (event for event in events if event["event"] == "send"):
        sends.queues.add(event["queue"])
        sent = Sent(event.get("key"), event.get("id"), event["outcome"])
        if event.get("offset") is None:
            if sent.id is not None:
                sends.ids[sent.id] = sent
            continue
        place = (event["queue"], event["offset"])
        known = sends.at.get(place)
        if known is None or known.outcome != "ok":
            sends.at[place] = sent
        elif sent.outcome == "ok" and known.id != sent.id:
            anomalies.append(Anomaly("inconsistent_offset", _name(place), f"acknowledged for {known.id} and for {sent.id}"))
    return sends


def _deliveries(events: Sequence[Event], sends: _Sends, repeats: bool, drained: bool) -> Iterator[Anomaly]:
    """Anomalies of the delivered messages: order, gaps, duplicates and losses."""
    expected = sends.expected()
    seen: dict[Place, str] = {}
    ids: dict[str, Place] = {}
    lane_of: dict[str, str] = {}
    by_key: dict[tuple[str, str | None], int] = {}
    by_lane: dict[tuple[str, str], int] = {}
    for lane, rows in _once(events, repeats):
        for queue, offset, key, message in rows:
            place = (queue, offset)
            if place in seen:
                yield Anomaly("duplicate", _name(place), f"was delivered in {seen[place]} and again in {lane}")
                continue
            seen[place] = lane
            yield from _as_sent(place, key, message, sends)
            if message is not None and ids.setdefault(message, place) != place:
                yield Anomaly("duplicate", _name(place), f"{message} was delivered at {_name(ids[message])} before")
            if key is not None and lane_of.setdefault(key, lane) != lane:
                yield Anomaly("split_key", _name(place), f"key {key} was delivered in {lane_of[key]} and in {lane}")
            # Messages without a key have no order across lanes.
            last = -1 if key is None else by_key.get((queue, key), -1)
            before = max(last, by_lane.get((lane, queue), -1))
            if offset < before:
                yield Anomaly("nonmonotonic", _name(place), f"was delivered after {before} in {lane}")
            known = expected.get((queue, key), []) if key is not None else []
            between = [n for n in known[bisect_right(known, last) : bisect_left(known, offset)] if (queue, n) not in seen]
            if between:
                yield Anomaly("skip", _name(place), f"was delivered before {between[:5]} of its key {key}")
            by_key[queue, key] = max(offset, by_key.get((queue, key), -1))
            by_lane[lane, queue] = max(offset, by_lane.get((lane, queue), -1))
    moved = [event for event in events if event["event"] in ("commit", "offset") and event.get("accepted", True)]
    final = {event["queue"]: event["offset"] for event in moved}
    late = "stuck" if any(event["event"] == "heal" for event in events) else "unseen"
    for (queue, key), offsets in expected.items():
        for offset in offsets:
            if (queue, offset) in seen:
                continue
            if offset < final.get(queue, 0) or (key is not None and offset < by_key.get((queue, key), -1)):
                yield Anomaly(
                    "lost", _name((queue, offset)), f"key {key}: never delivered, although the group or the key is past it"
                )
            elif drained:
                yield Anomaly(late, _name((queue, offset)), f"key {key}: never delivered")


def _once(events: Sequence[Event], repeats: bool) -> Iterator[tuple[str, list[Any]]]:
    """The deliveries by lane. With ``repeats``, an identical repetition of a lane's latest batch is left out."""
    batches: dict[tuple[str, int], list[Any]] = {}
    latest: dict[str, int] = {}
    for event in (event for event in events if event["event"] == "deliver"):
        lane, batch, rows = event["lane"], event.get("batch"), [list(row) for row in event["rows"]]
        if repeats and batch is not None:
            known = batches.setdefault((lane, batch), rows)
            if known is not rows and known == rows and batch == latest.get(lane):
                continue
            latest[lane] = max(batch, latest.get(lane, batch))
        yield lane, rows


def _as_sent(place: Place, key: str | None, message: str | None, sends: _Sends) -> Iterator[Anomaly]:
    if place[0] not in sends.queues:
        return
    sent = sends.at.get(place) or (sends.ids.get(message) if message is not None else None)
    if sent is None:
        yield Anomaly("aborted_read", _name(place), f"{message} was never sent")
    elif sent.outcome == "fail":
        yield Anomaly("aborted_read", _name(place), f"the send of {message} failed")
    elif (sent.key, sent.id) != (key, message):
        yield Anomaly(
            "inconsistent_offset", _name(place), f"{sent.id} of key {sent.key} was sent, {message} of {key} was delivered"
        )


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


def _ranges(events: Sequence[Event], sends: _Sends) -> Iterator[Anomaly]:
    """Anomalies of published ranges: the ranges of a group's queue must form one chain, whichever query and run published them."""
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
                missing = [n for n in range(end, begin) if not sends.excused((queue, n))]
                if missing:
                    yield Anomaly(
                        "silent_gap", queue, f"batch {event['batch']} begins at {begin}, {missing[:5]} are in no batch"
                    )
                ends[read["group"], queue] = max(end, read["end"])


def _name(place: Place) -> str:
    return f"{place[0]}:{place[1]}"


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
