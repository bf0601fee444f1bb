"""The metrics of a broker for Prometheus: their names and meanings, and the samples that are computed from its state. Pure.

Rules: metrics of groups begin with ``orderedmq_group_`` and have a label ``group``. The metrics of running queries, which
`ordered_source.LagListener` exports, have a label ``query`` and other names, because a query's view differs from the broker's. A
label must have few different values in a cluster, so client ids, keys and addresses are not labels. An unknown value has no
sample, and is not reported as 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from orderedmq.model import MessageQueue
from orderedmq.parking.rules import HELD
from orderedmq.ui.watches import BrokerNow, GroupNow

_GROUP: Final = ("group",)
_TOPIC: Final = (*_GROUP, "topic")
_QUEUE: Final = (*_TOPIC, "broker", "queue")


class MetricKind(NamedTuple):
    """A metric. It is a counter if its name ends with ``_total``, else a gauge."""

    name: str
    labels: Sequence[str]
    meaning: str

    @property
    def type(self) -> Literal["counter", "gauge"]:
        return "counter" if self.name.endswith("_total") else "gauge"


class MetricSample(NamedTuple):
    """A value of a metric. Do not modify ``labels``, because other samples may share it."""

    labels: Mapping[str, str]
    value: float


#: The metrics of the exporter itself.
UP: Final = MetricKind("orderedmq_up", (), "1 if the broker could be read the last time, else 0.")
FAILURES: Final = MetricKind(
    "orderedmq_exporter_failures_total",
    ("condition",),
    "Failed attempts to read the broker or one of its groups, by the condition of the error.",
)
LOOK_SECONDS: Final = MetricKind("orderedmq_exporter_look_seconds", (), "Time that it took to read the broker the last time.")
LOOK_TIME: Final = MetricKind(
    "orderedmq_exporter_look_timestamp_seconds",
    (),
    "Time at which these metrics were read from the broker, in seconds since 1970.",
)

_MEMBERS: Final = MetricKind("orderedmq_group_members", _GROUP, "Members of the group.")
_HANDOVERS: Final = MetricKind(
    "orderedmq_group_handovers_total", _GROUP, "How often a queue was seen with an owner different from its previous owner."
)
_LETTERS: Final = MetricKind("orderedmq_group_dead_letters_total", _GROUP, "Dead letters ever written, including deleted ones.")
_WAITING: Final = MetricKind(
    "orderedmq_group_dead_letters_waiting",
    _GROUP,
    "Dead letters that no replay of all letters has reached.",
)
_PARKED: Final = MetricKind("orderedmq_group_parked_messages", _TOPIC, "Messages in the topic's parking lots.")
_KEYS: Final = MetricKind("orderedmq_group_parked_keys", _TOPIC, "Keys that have parked messages, including held keys.")
_HELD: Final = MetricKind("orderedmq_group_held_keys", _TOPIC, "Parked keys that an operator holds.")
_OLDEST: Final = MetricKind(
    "orderedmq_group_parked_oldest_age_seconds",
    _TOPIC,
    "Time since the oldest parked message was stored in its original queue.",
)
_LAG: Final = MetricKind("orderedmq_group_lag_messages", _QUEUE, "Messages that the group has not processed yet.")
_LAG_SECONDS: Final = MetricKind(
    "orderedmq_group_lag_seconds",
    _QUEUE,
    "Age of the first message that the group has not processed yet; 0 if it has processed all messages.",
)
_NEXT: Final = MetricKind(
    "orderedmq_group_next_offset", _QUEUE, "The group's offset, which is the offset of the next message to process."
)
_COMMIT: Final = MetricKind(
    "orderedmq_group_last_commit_age_seconds",
    _QUEUE,
    "Time since the group's offset was last seen to change, or was first seen.",
)
_HORIZON: Final = MetricKind(
    "orderedmq_group_retention_horizon_seconds",
    _QUEUE,
    "Time until retention may delete the first message that the group has not processed yet; negative after that time.",
)
_DELETED: Final = MetricKind(
    "orderedmq_group_deleted_messages", _QUEUE, "Messages that retention deleted before the group processed them."
)
_LOCK: Final = MetricKind(
    "orderedmq_group_lock_remaining_seconds",
    (*_QUEUE, "owner"),
    "Time until the owner's lock ends if it is not renewed; 0 if the owner is dead. A queue without an owner has no sample.",
)

METRICS: Final = (
    *(UP, FAILURES, LOOK_SECONDS, LOOK_TIME),
    *(_MEMBERS, _HANDOVERS, _LETTERS, _WAITING, _PARKED, _KEYS, _HELD, _OLDEST),
    *(_LAG, _LAG_SECONDS, _NEXT, _COMMIT, _HORIZON, _DELETED, _LOCK),
)


def samples(look: BrokerNow, now: float) -> dict[MetricKind, list[MetricSample]]:
    """Return the samples of all groups in ``look``. Ages are computed at ``now`` (seconds since 1970)."""
    found: dict[MetricKind, list[MetricSample]] = {kind: [] for kind in METRICS if "group" in kind.labels}
    for group in look.groups:
        every = (_of_group(group), _of_topics(group, now), _of_queues(group, look, now))
        for kind, sample in (one for some in every for one in some):
            found[kind].append(sample)
    return found


def _of_group(group: GroupNow) -> Iterator[tuple[MetricKind, MetricSample]]:
    labels = {"group": group.name}
    yield _MEMBERS, MetricSample(labels, len(group.members))
    yield _HANDOVERS, MetricSample(labels, group.handed_over)
    if group.letters is not None:
        yield _LETTERS, MetricSample(labels, group.letters.written)
        yield _WAITING, MetricSample(labels, group.letters.waiting)


def _of_topics(group: GroupNow, now: float) -> Iterator[tuple[MetricKind, MetricSample]]:
    for topic in group.topics:
        labels = {"group": group.name, "topic": topic}
        lots = [one.lot for one in group.queues if one.queue.topic == topic and one.lot is not None]
        yield _PARKED, MetricSample(labels, sum(lot.messages for lot in lots))
        yield _KEYS, MetricSample(labels, sum(len(lot.keys) for lot in lots))
        yield _HELD, MetricSample(labels, sum(key.due == HELD for lot in lots for key in lot.keys.values()))
        oldest = min((lot.oldest for lot in lots if lot.oldest is not None), default=None)
        if oldest is not None:
            yield _OLDEST, MetricSample(labels, _since(oldest / 1e6, now))


def _of_queues(group: GroupNow, look: BrokerNow, now: float) -> Iterator[tuple[MetricKind, MetricSample]]:
    passed = now - group.when
    for one in group.queues:
        state, queue = one.state, one.queue
        labels = _labels(group.name, queue)
        yield _LAG, MetricSample(labels, state.lag)
        yield _DELETED, MetricSample(labels, state.gone)
        stored = look.stored.get((group.name, queue)) if state.lag else None
        if stored is not None or not state.lag:
            yield _LAG_SECONDS, MetricSample(labels, 0.0 if stored is None else _since(stored, now))
        if stored is not None and queue.topic in look.kept_for:
            yield _HORIZON, MetricSample(labels, stored + look.kept_for[queue.topic] - now)
        if state.offset is not None:
            yield _NEXT, MetricSample(labels, state.offset)
        if queue in group.committed:
            yield _COMMIT, MetricSample(labels, _since(group.committed[queue], now))
        lock = state.lock
        if lock is not None:
            left = 0.0 if lock.alive is False else max(0.0, lock.remaining - passed)
            yield _LOCK, MetricSample({**labels, "owner": lock.name or lock.owner}, left)


def _labels(group: str, queue: MessageQueue) -> dict[str, str]:
    return {"group": group, "topic": queue.topic, "broker": queue.broker_name, "queue": str(queue.queue_id)}


def _since(then: float, now: float) -> float:
    # The clock of the machine that recorded ``then`` may be ahead.
    return max(0.0, now - then)
