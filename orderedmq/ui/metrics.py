"""Metrics for Prometheus at one URL. All scrapers share what was read, and the exporter keeps running if the broker goes away.

Rules: a scrape returns the result of one read of the broker, which is rendered at most once. The scrape waits at most `PATIENCE` seconds
for it, because Prometheus gives up after 10; a slower read runs to its end, and a later scrape gets its result. If the last read failed
or is older than `STALE` seconds, groups have no samples and ``orderedmq_up`` is 0, because old values would look like an idle broker.

Metrics of groups begin with ``orderedmq_group_`` and have a label ``group``. A label must have few different values in a cluster, so
client ids, keys and addresses are not labels. An unknown value has no sample, and is not reported as 0.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from orderedmq.broker import Broker
from orderedmq.errors import OrderedMQError
from orderedmq.model import MessageQueue
from orderedmq.parking import HELD
from orderedmq.ui.guard import HEALTH_PATH, METRICS_PATH, Guard, Rules
from orderedmq.ui.shared_look import SharedLook
from orderedmq.ui.watches import BrokerNow, GroupNow, Watches

#: Maximum seconds that a scrape waits until the broker has been read.
PATIENCE: Final = 5.0
#: Seconds after which a result is no longer exported.
STALE: Final = 60.0


class Reached:
    """A connection to a broker, and the `Watches` that use it. ``reach`` connects, and is called again after `close`.

    A RocketMQ client reconnects to its servers by itself. A store that was deleted, moved or replaced has to be opened again.
    """

    def __init__(self, reach: Callable[[], Broker]) -> None:
        self._reach = reach
        self._broker: Broker | None = None
        self._watches: Watches | None = None

    def watches(self) -> Watches:
        """Return the watches; connect first if necessary. Raises the errors of ``reach``."""
        if self._watches is None:
            self._broker = self._reach()
            self._watches = Watches(self._broker)
        return self._watches

    def close(self) -> None:
        broker, self._broker, self._watches = self._broker, None, None
        if broker is not None:
            broker.close()


@dataclass(frozen=True)
class Looked:
    """The result of reading the broker. ``found`` None: reading failed. ``when``: when it was last valid, in monotonic seconds."""

    when: float
    seconds: float
    found: BrokerNow | None
    look: SharedLook[BrokerNow] | None = None


class BrokerCollector(Collector):
    """Collects the metrics of a broker for a registry of prometheus-client.

    ``watches`` returns the broker's watches. ``lost`` is called after an error that a retry on the same connection cannot repair.
    ``say`` gets a line when the broker cannot be reached, and when it can be reached again.
    """

    def __init__(
        self,
        watches: Callable[[], Watches],
        lost: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._watches = watches
        self._lost = lost
        self._say = say
        self._guard = threading.Lock()
        self._looking: threading.Thread | None = None
        self._last: Looked | None = None
        self._failures: Counter[str] = Counter()
        #: The error that was counted last. It is not counted again, because several scrapes may get the same error object.
        self._counted: OrderedMQError | None = None

    def latest(self) -> Looked | None:
        """Return the last result, or None if it is older than `STALE` seconds. Wait up to `PATIENCE` seconds for a new one."""
        with self._guard:
            if self._looking is None or not self._looking.is_alive():
                self._looking = threading.Thread(target=self._look, name="orderedmq-metrics", daemon=True)
                self._looking.start()
            looking = self._looking
        looking.join(PATIENCE)
        last = self._last
        return last if last is not None and time.monotonic() - last.when <= STALE else None

    def problem(self) -> str | None:
        """Return why the broker cannot be watched now, or None if it was read within the last `STALE` seconds. Waits as `latest` does.

        The text names the condition of an error, but not its message, because that has names and addresses.
        """
        last = self.latest()
        if last is None:
            return f"no read of the broker has ended within the last {STALE:.0f} s"
        if last.found is None and self._counted is not None:
            return f"the broker cannot be read: {self._counted.condition}"
        return None

    def collect(self) -> Iterator[Metric]:
        yield from self.metrics(self.latest())

    def metrics(self, last: Looked | None) -> Iterator[Metric]:
        """Yield the metrics of a result, or only the exporter's own metrics if ``last`` is None or has no result."""
        state = last.found if last is not None else None
        yield _family(UP, [MetricSample({}, float(state is not None))])
        counts = sorted(self._failures.items())
        yield _family(FAILURES, [MetricSample({"condition": condition}, count) for condition, count in counts])
        if last is not None and state is not None:
            now = time.time()
            yield _family(LOOK_SECONDS, [MetricSample({}, last.seconds)])
            yield _family(LOOK_TIME, [MetricSample({}, state.when)])
            for kind, some in samples(state, now).items():
                yield _family(kind, some)

    def _look(self) -> None:
        before, begun = self._last, time.monotonic()
        try:
            look = self._watches().everything()
            state = look.get()
        except OrderedMQError as error:
            if error is not self._counted:
                self._counted = error
                self._failures[error.condition] += 1
            if before is None or before.found is not None:
                self._say(f"the broker cannot be reached, and each scrape tries again: [{error.condition}] {error.message}")
            if not error.retriable:
                self._lost()
            ended = time.monotonic()
            self._last = Looked(ended, ended - begun, None)
            return
        if before is not None and before.found is None:
            self._say("the broker can be reached again")
        ended = time.monotonic()
        if before is not None and before.found is state:
            # The next read was not due yet, so the previous result is still valid.
            self._last = replace(before, when=ended)
            return
        self._failures.update(error.condition for error in state.refused.values())
        self._last = Looked(ended, ended - begun, state, look)


class Metrics:
    """The metrics page. Each result is rendered once for all scrapers."""

    def __init__(self, collector: BrokerCollector) -> None:
        self._collector = collector
        self._guard = threading.Lock()
        #: Content type → the last result that was rendered, and its rendering.
        self._rendered: dict[str, tuple[BrokerNow, bytes]] = {}

    def page(self, request: Request) -> Response:
        encoder, kind = choose_encoder(request.headers.get("accept", ""))
        last = self._collector.latest()
        with self._guard:
            rendered = self._rendered.get(kind)
            if rendered is not None and last is not None and rendered[0] is last.found:
                return Response(rendered[1], headers={"content-type": kind})
            spent = time.thread_time()
            registry = CollectorRegistry(auto_describe=False)
            registry.register(_Once(self._collector, last))
            text = encoder(registry)
            if last is not None and last.found is not None and last.look is not None:
                last.look.spend(time.thread_time() - spent)
                self._rendered[kind] = last.found, text
            return Response(text, headers={"content-type": kind})

    def health(self, _: Request) -> Response:
        """Answer 200 if the server works and has read the broker recently, else 503 with the reason."""
        problem = self._collector.problem()
        return PlainTextResponse("ok\n") if problem is None else PlainTextResponse(f"{problem}\n", 503)


class _Once(Collector):
    """Collects the metrics of one result."""

    def __init__(self, collector: BrokerCollector, last: Looked | None) -> None:
        self._collector = collector
        self._last = last

    def collect(self) -> Iterator[Metric]:
        return self._collector.metrics(self._last)

    def describe(self) -> list[Metric]:
        """Return nothing. A registry calls this to find duplicate names, but this registry is used for one rendering only."""
        return []


def _family(kind: MetricKind, some: list[MetricSample]) -> Metric:
    family = Metric(kind.name.removesuffix("_total"), kind.meaning, kind.type)
    family.samples = [Sample(kind.name, dict(sample.labels), sample.value) for sample in some]
    return family


def exporter_app(collector: BrokerCollector, rules: Rules) -> ASGIApp:
    """Return the application of ``orderedmq exporter``, which serves only the metrics and its health."""

    def root(_: Request) -> Response:
        return PlainTextResponse(f"orderedmq exporter: metrics for Prometheus are at {METRICS_PATH}\n")

    metrics = Metrics(collector)
    routes = [Route("/", root), Route(METRICS_PATH, metrics.page), Route(HEALTH_PATH, metrics.health)]
    return Guard(Starlette(routes=routes), rules)


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
_PROGRESS: Final = MetricKind(
    "orderedmq_group_progress_messages",
    _QUEUE,
    "Messages of the lag that the listener of the running micro-batch is done with.",
)
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
    *(_LAG, _PROGRESS, _LAG_SECONDS, _NEXT, _COMMIT, _HORIZON, _DELETED, _LOCK),
)


def samples(look: BrokerNow, now: float) -> dict[MetricKind, list[MetricSample]]:
    """Return the samples of all groups in ``look``. Ages are computed at ``now`` (seconds since 1970)."""
    samples_by_kind: dict[MetricKind, list[MetricSample]] = {kind: [] for kind in METRICS if "group" in kind.labels}
    for group in look.groups:
        every = (_of_group(group), _of_topics(group, now), _of_queues(group, look, now))
        for kind, sample in (sample_of for some in every for sample_of in some):
            samples_by_kind[kind].append(sample)
    return samples_by_kind


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
        lots = [queue_now.lot for queue_now in group.queues if queue_now.queue.topic == topic and queue_now.lot is not None]
        yield _PARKED, MetricSample(labels, sum(lot.messages for lot in lots))
        yield _KEYS, MetricSample(labels, sum(len(lot.keys) for lot in lots))
        yield _HELD, MetricSample(labels, sum(key.due == HELD for lot in lots for key in lot.keys.values()))
        oldest = min((lot.oldest for lot in lots if lot.oldest is not None), default=None)
        if oldest is not None:
            yield _OLDEST, MetricSample(labels, _since(oldest / 1e6, now))


def _of_queues(group: GroupNow, look: BrokerNow, now: float) -> Iterator[tuple[MetricKind, MetricSample]]:
    passed = now - group.when
    for queue_now in group.queues:
        state, queue = queue_now.state, queue_now.queue
        labels = _labels(group.name, queue)
        yield _LAG, MetricSample(labels, state.lag)
        yield _PROGRESS, MetricSample(labels, state.progress)
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
            remaining = 0.0 if lock.alive is False else max(0.0, lock.remaining - passed)
            yield _LOCK, MetricSample({**labels, "owner": lock.name or lock.owner}, remaining)


def _labels(group: str, queue: MessageQueue) -> dict[str, str]:
    return {"group": group, "topic": queue.topic, "broker": queue.broker_name, "queue": str(queue.queue_id)}


def _since(then: float, now: float) -> float:
    # The clock of the machine that recorded ``then`` may be ahead.
    return max(0.0, now - then)
