"""Judges a history of a pipeline: which messages were lost, repeated, or delivered out of the order of their key.

A history is a list of events, each a dict, in the order in which they happened. If events have ``at``, a time, they are sorted by it. A
queue is given by its name, such as ``topic/broker/number``. Only recorded events are judged.

    send     queue offset key id outcome   outcome: ok, fail, unknown (offset may be missing then: see id)
    deliver  lane rows [batch]             rows: [queue, offset, key, id] in order; lane: where they are kept in order
    loss     queue begin end               the reader reported these messages as lost, so they are not expected
    offset   queue offset                  a consumer group has processed the messages below this offset

If Jepsen's Kafka checker has a name for an anomaly, that name is used:

    lost                  not delivered, although the group's offset has passed it, or a later message of its key was delivered
    unseen                not delivered at the end of a drained history
    duplicate             delivered twice (apart from repeated whole batches, with ``repeats``)
    skip                  delivered before its predecessor of the same key
    nonmonotonic          delivered after a later message of the same source queue in a lane, or of the same key
    split_key             the messages of a key are in two lanes, so they have no order
    inconsistent_offset   two messages at one offset, or the delivered message is not the one sent there
    aborted_read          delivered, but never sent, or its send failed
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Event = Mapping[str, Any]
#: A queue's name and an offset in it.
Place = tuple[str, int]


class Anomaly(NamedTuple):
    """Something that a pipeline with order per key must not do: its kind, the message (``queue:offset``), and what happened."""

    kind: str
    where: str
    detail: str


class _Sent(NamedTuple):
    key: str | None
    id: str | None
    outcome: str


@dataclass
class _Sends:
    """The messages that were sent. ``ids``: the messages without an offset, by id. ``lost``: reported losses."""

    at: dict[Place, _Sent] = field(default_factory=dict)
    ids: dict[str, _Sent] = field(default_factory=dict)
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
    """Return all anomalies of a history.

    ``repeats``: an at-least-once sink may get the last batch of a lane again, as a whole. ``drained``: all messages should have been
    delivered at the end.
    """
    events = by_time(history)
    anomalies: list[Anomaly] = []
    sends = _sends(events, anomalies)
    if any(event["event"] == "deliver" for event in events):
        anomalies += _deliveries(events, sends, repeats, drained)
    return anomalies


def by_time(history: Iterable[Event]) -> list[Event]:
    """Return the events in the order of their times. An event without a time stays after the one before it."""
    events: list[Event] = []
    at = 0
    for place, event in enumerate(history):
        at = event.get("at", at)
        events.append({**event, "at": (at, place)})
    events.sort(key=lambda event: event["at"])
    return events


def _sends(events: Sequence[Event], anomalies: list[Anomaly]) -> _Sends:
    sends = _Sends()
    sends.lost = [(event["queue"], event["begin"], event["end"]) for event in events if event["event"] == "loss"]
    for event in (event for event in events if event["event"] == "send"):
        sends.queues.add(event["queue"])
        sent = _Sent(event.get("key"), event.get("id"), event["outcome"])
        if event.get("offset") is None:
            if sent.id is not None:
                sends.ids[sent.id] = sent
            continue
        place = (event["queue"], event["offset"])
        before = sends.at.get(place)
        if before is None or before.outcome != "ok":
            sends.at[place] = sent
        elif sent.outcome == "ok" and before.id != sent.id:
            anomalies.append(Anomaly("inconsistent_offset", _name(place), f"acknowledged for {before.id} and for {sent.id}"))
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
            of_key = expected.get((queue, key), []) if key is not None else []
            between = [n for n in of_key[bisect_right(of_key, last) : bisect_left(of_key, offset)] if (queue, n) not in seen]
            if between:
                yield Anomaly("skip", _name(place), f"was delivered before {between[:5]} of its key {key}")
            by_key[queue, key] = max(offset, by_key.get((queue, key), -1))
            by_lane[lane, queue] = max(offset, by_lane.get((lane, queue), -1))
    final = {event["queue"]: event["offset"] for event in events if event["event"] == "offset"}
    for (queue, key), offsets in expected.items():
        for offset in offsets:
            if (queue, offset) in seen:
                continue
            if offset < final.get(queue, 0) or (key is not None and offset < by_key.get((queue, key), -1)):
                yield Anomaly(
                    "lost", _name((queue, offset)), f"key {key}: never delivered, although the group or the key is past it"
                )
            elif drained:
                yield Anomaly("unseen", _name((queue, offset)), f"key {key}: never delivered")


def _once(events: Sequence[Event], repeats: bool) -> Iterator[tuple[str, list[Any]]]:
    """The deliveries by lane. With ``repeats``, an identical repetition of a lane's latest batch is left out."""
    batches: dict[tuple[str, int], list[Any]] = {}
    latest: dict[str, int] = {}
    for event in (event for event in events if event["event"] == "deliver"):
        lane, batch, rows = event["lane"], event.get("batch"), [list(row) for row in event["rows"]]
        if repeats and batch is not None:
            first = batches.setdefault((lane, batch), rows)
            if first is not rows and first == rows and batch == latest.get(lane):
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


def _name(place: Place) -> str:
    return f"{place[0]}:{place[1]}"
