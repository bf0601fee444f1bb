"""Metrics for Prometheus at one URL. All scrapers share what was read, and the exporter keeps running if the broker goes away.

Rules: a scrape returns the result of one read of the broker, which is rendered at most once. The scrape waits at most `PATIENCE` seconds
for it, because Prometheus gives up after 10; a slower read runs to its end, and a later scrape gets its result. If the last read failed
or is older than `STALE` seconds, groups have no samples and ``orderedmq_up`` is 0, because old values would look like an idle broker.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

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
from orderedmq.ui.guard import METRICS_PATH, Guard, Rules
from orderedmq.ui.metric_samples import FAILURES, LOOK_SECONDS, LOOK_TIME, UP, MetricKind, MetricSample, samples
from orderedmq.ui.shared_look import SharedLook
from orderedmq.ui.watches import BrokerNow, Watches

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

    def collect(self) -> Iterator[Metric]:
        yield from self.metrics(self.latest())

    def metrics(self, last: Looked | None) -> Iterator[Metric]:
        """Yield the metrics of a result, or only the exporter's own metrics if ``last`` is None or has no result."""
        found = last.found if last is not None else None
        yield _family(UP, [MetricSample({}, float(found is not None))])
        counts = sorted(self._failures.items())
        yield _family(FAILURES, [MetricSample({"condition": condition}, count) for condition, count in counts])
        if last is not None and found is not None:
            now = time.time()
            yield _family(LOOK_SECONDS, [MetricSample({}, last.seconds)])
            yield _family(LOOK_TIME, [MetricSample({}, found.when)])
            for kind, some in samples(found, now).items():
                yield _family(kind, some)

    def _look(self) -> None:
        before, begun = self._last, time.monotonic()
        try:
            look = self._watches().everything()
            found = look.get()
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
        if before is not None and before.found is found:
            # The next read was not due yet, so the previous result is still valid.
            self._last = replace(before, when=ended)
            return
        self._failures.update(error.condition for error in found.refused.values())
        self._last = Looked(ended, ended - begun, found, look)


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
            known = self._rendered.get(kind)
            if known is not None and last is not None and known[0] is last.found:
                return Response(known[1], headers={"content-type": kind})
            spent = time.thread_time()
            registry = CollectorRegistry(auto_describe=False)
            registry.register(_Once(self._collector, last))
            text = encoder(registry)
            if last is not None and last.found is not None and last.look is not None:
                last.look.spend(time.thread_time() - spent)
                self._rendered[kind] = last.found, text
            return Response(text, headers={"content-type": kind})


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
    family.samples = [Sample(kind.name, dict(one.labels), one.value) for one in some]
    return family


def exporter_app(collector: BrokerCollector, rules: Rules) -> ASGIApp:
    """Return the application of ``orderedmq exporter``, which serves only the metrics page."""

    def root(_: Request) -> Response:
        return PlainTextResponse(f"orderedmq exporter: metrics for Prometheus are at {METRICS_PATH}\n")

    metrics = Metrics(collector)
    return Guard(Starlette(routes=[Route("/", root), Route(METRICS_PATH, metrics.page)]), rules)
