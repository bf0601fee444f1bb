"""The Log protocol over a RocketMQ cluster: finds, pulls and appends messages.

For a queue that does not exist, brokers return the bounds of an empty queue, so the route is checked first. What it lacks is looked for
at the brokers (`wire.route`). A queue that cannot be read has bounds; a pull of it waits until it can be read.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.broker import DEFAULT_PULL, Log, PullSettings, QueueBounds, TopicInfo
from orderedmq.conditions import DataLossCondition, RocketMQCondition, TopicCondition, UnavailableCondition
from orderedmq.errors import (
    DataLossError,
    OrderedMQError,
    RocketMQError,
    RocketMQUnavailableError,
    TopicError,
    no_such_queue,
    of_other_kind,
    recreated,
)
from orderedmq.model import RESERVED_PREFIXES, MessageQueue, OffsetRange, check_topic, missing_topic
from orderedmq.pulls import pulls
from orderedmq.rocketmq.messages.answers import TAIL_LOSS
from orderedmq.rocketmq.messages.fetch import HOLE_PATIENCE
from orderedmq.rocketmq.messages.puller import Puller
from orderedmq.rocketmq.messages.resizes import Resizes
from orderedmq.rocketmq.messages.sender import Sender, sent_in_part
from orderedmq.rocketmq.messages.topic_anchor import find_anchor, is_same_topic, message_at, parse_anchor
from orderedmq.rocketmq.net import checks
from orderedmq.rocketmq.net.client import NAMESERVER_TIMEOUT, Client
from orderedmq.rocketmq.net.deadline import REQUEST_TIMEOUT, RETRY, Deadline, leaves_attempt
from orderedmq.rocketmq.net.fan_out import ask_queues, existing, holds
from orderedmq.rocketmq.wire import message_requests, rights
from orderedmq.rocketmq.wire.message_requests import PullResult
from orderedmq.rocketmq.wire.rights import TOOLS_GROUP
from orderedmq.rocketmq.wire.route import ROUTE_FORBIDS, BrokerData, Route, RouteState, not_readable, state_of, user_topics
from orderedmq.routing.generations import Resize
from orderedmq.routing.selector import require_targets
from orderedmq.rows.filters import Filter
from orderedmq.schema import select_schema

T = TypeVar("T")

#: Seconds for which a route that the nameserver confirmed counts as fresh.
ROUTE_FRESH: Final = 1.0
#: Seconds to wait for a topic that is resized.
RESIZE_PATIENCE: Final = 240.0
#: Seconds to wait for a queue that cannot be read.
READABLE_PATIENCE: Final = 25.0
#: Seconds between two comparisons of a topic with its anchor.
COMPARISON_AGE: Final = 10.0
_MOST_COMPARED: Final = 10_000
#: The incarnation of every topic. Brokers store nothing that distinguishes a topic from an earlier one with the same name; `anchor`
#: distinguishes them where possible.
ONLY_INCARNATION: Final = ""
#: `RocketMQLog.advance` measures messages instead of estimating if its limit in bytes is less than this many messages of average size.
_EXACT_MESSAGES: Final = 64
_US_PER_MS: Final = 1000


class RocketMQLog(Log):
    """The Log protocol over a cluster. Thread-safe."""

    tail_loss = TAIL_LOSS

    def __init__(self, client: Client, settings: PullSettings = DEFAULT_PULL) -> None:
        self._client = client
        self._settings = settings
        self._puller = Puller(client, settings)
        self._by_settings: dict[PullSettings, RocketMQLog] = {}
        #: Appends without the checks of `append`, for topics to which users' producers may not write.
        self.sender = Sender(client, self._puller)
        #: When the nameserver confirmed a topic's route.
        self._confirmed: dict[str, float] = {}
        #: Topics that were checked through a Proxy and are not static.
        self._plain: set[str] = set()
        #: For each topic and anchor: when they were compared, and whether the topic had been created again.
        self._compared: dict[tuple[str, str], tuple[float, bool]] = {}
        self._resizes = Resizes(client)

    def reading(self, how: PullSettings) -> RocketMQLog:
        """See `Log.reading`. The log is kept, so that later tasks use its knowledge of the queues."""
        if how not in self._by_settings:
            self._by_settings[how] = RocketMQLog(self._client, how)
        return self._by_settings[how]

    # -- topics

    def topics(self) -> list[TopicInfo]:
        """Return the users' topics and dead letter topics, but no static topics.

        Topics that are created or deleted during the call may be missing.
        """
        deadline = Deadline.after(REQUEST_TIMEOUT)
        # A restarted nameserver may not list topics that this object has seen.
        try:
            listed = {*self._client.topics(deadline), *self._confirmed}
        except RocketMQError as error:
            if error.sub == RocketMQCondition.NOT_SUPPORTED:
                self._client.refuse_proxy("a list of topics, which the option topicPattern needs (the option topic does not),")
            raise
        names = user_topics(listed, self._client.cluster(deadline))
        topics = []
        for name in names:
            try:
                route = self.route(name, fresh=True)
            except TopicError:
                continue
            except RocketMQError as error:
                if error.sub != RocketMQCondition.STATIC_TOPIC:
                    raise
                continue
            topics.append(_info(name, route.reading_list(), route))
        return topics

    def topic(self, name: str) -> TopicInfo:
        return _info(name, self.queues(name), self.route(name))

    def queues(self, topic: str) -> list[MessageQueue]:
        """See `Log.queues`. Raises RocketMQUnavailableError NOT_READABLE for a topic that has only queues for writing."""
        route = self.route(topic, fresh=True)
        queues = list(route.reading_list())
        if not queues and route.all_queues():
            raise not_readable(f"topic {topic!r}", "its readQueueNums is 0")
        return queues

    def readable(self, topic: str) -> list[MessageQueue]:
        return list(self.route(topic, fresh=True).subscribe_set())

    def targets(self, topic: str) -> list[MessageQueue]:
        """See `Log.targets`. A topic that shrinks may have fewer queues for writing than for reading, and a broker may be read-only.

        Waits while the topic is resized.
        """
        deadline = Deadline.after(RESIZE_PATIENCE)
        while True:
            route = self.route(topic, fresh=True)
            if queues := list(route.publish_list()):
                return queues
            if not route.paused or time.monotonic() >= deadline:
                break
            time.sleep(ROUTE_FRESH)
        remedy = "Set their permission to 6"
        if route.paused:
            remedy = "A resize has stopped its producers. If it does not run any more, run orderedmq topic resize again"
        raise TopicError(
            TopicCondition.NO_SUCH_QUEUE,
            f"topic {topic!r} has no queue that accepts messages: the topic or its brokers are read-only. {remedy}",
        )

    def resizes(self, topics: Iterable[str]) -> list[Resize]:
        """See `Log.resizes`. They are at most some seconds old, for which a topic takes no messages after it was resized."""
        routes = []
        for topic in topics:
            with contextlib.suppress(TopicError):
                routes.append(self.route(topic))
        return self._resizes.of(routes)

    def forget(self, topic: str) -> None:
        """Forget the topic's route and the comparisons with its anchors, so that the next use asks the servers."""
        self._confirmed.pop(topic, None)
        self._compared = {pair: anchor for pair, anchor in self._compared.items() if pair[0] != topic}

    def route(self, topic: str, *, fresh: bool = False) -> Route:
        """Return the topic's route. It is at most 1 s old if a nameserver answers, and new if it is ``fresh``.

        Raises TopicError MISSING, RocketMQError STATIC_TOPIC.
        """
        deadline = Deadline.after(REQUEST_TIMEOUT)
        now = time.monotonic()
        if not fresh and now - self._confirmed.get(topic, float("-inf")) < ROUTE_FRESH:
            return self._client.route(topic, deadline)
        self._confirmed.pop(topic, None)
        try:
            check_topic(topic, writing=False)
            route = self._client.route(topic, now + NAMESERVER_TIMEOUT, fresh=True)
        except TopicError:
            route = self._still_there(topic, deadline)
        except RocketMQUnavailableError:
            route = self._client.route(topic, deadline)
        self._confirmed[topic] = time.monotonic()
        return route

    def _listed(self) -> Collection[str]:
        """Return the names of users' topics for an error, none if they cannot be listed (a Proxy, or an account without the right)."""
        deadline = Deadline.after(NAMESERVER_TIMEOUT)
        with contextlib.suppress(OrderedMQError):
            return user_topics(self._client.topics(deadline), self._client.cluster(deadline))
        return ()

    def _still_there(self, topic: str, deadline: float) -> Route:
        """Return the last known route of a topic that the nameserver lacks, if a broker has the topic. Raises TopicError MISSING.

        A Proxy may know a broker and not yet its topics. If no route of the topic is known, wait for one.
        """
        # The nameserver has just answered that it lacks the topic, so it is asked again only after a delay.
        route = self._client.last_route(topic)
        failures = 0
        while True:
            if failures:
                with contextlib.suppress(TopicError):
                    route = self._client.route(topic, deadline)
            if route is not None:
                brokers = route.brokers
            else:
                brokers = self._client.cluster(deadline).brokers if self._client.behind_proxy(deadline) else {}
            answers = [self._has(broker, topic, deadline) for broker in brokers.values()]
            if route is not None and not all(answer is False for answer in answers):
                return route
            if True not in answers:
                # Users do not type the names of a group's topics, and a query looks for them often.
                raise missing_topic(topic, () if topic.startswith(RESERVED_PREFIXES) else self._listed())
            failures += 1
            delay = RETRY.delay(failures, random.random())
            if not leaves_attempt(deadline, delay):
                raise RocketMQUnavailableError(
                    UnavailableCondition.NO_BROKER,
                    f"the brokers have topic {topic!r}, but the Proxy does not know its route yet. It keeps routes for 20 s",
                )
            time.sleep(delay)

    def _has(self, broker: BrokerData, topic: str, deadline: float) -> bool | None:
        """Return whether a broker has the topic; None if the account may not read it there. False without a master."""
        if broker.master is None:
            return False
        try:
            answer = holds(self._client, broker.master, MessageQueue(topic, broker.name, 0), self._groups, deadline)
        except TopicError:
            return False
        return None if answer is None else True

    @property
    def _groups(self) -> tuple[str, ...]:
        """The groups in which the account may read."""
        return (TOOLS_GROUP,) if self._settings.group is None else (TOOLS_GROUP, self._settings.group)

    def require(self, queue: MessageQueue) -> None:
        """Check that a queue exists. Raises TopicError MISSING or NO_SUCH_QUEUE."""
        route = self.route(queue.topic)
        if state_of(queue, route) is RouteState.UNKNOWN and not self._existing([queue]):
            size = f"it has {len(route.all_queues())} queues"
            raise no_such_queue(queue.topic, f"{queue.broker_name}/{queue.queue_id}", size)

    def refuse_hidden_static(self, topic: str) -> None:
        """Refuse to write to a static topic through a Proxy. Raises RocketMQError STATIC_TOPIC.

        A Proxy's routes do not show that a topic is static, but brokers refuse requests for logical queues of other brokers. A source
        gets that error when it requests the bounds of its queues.
        """
        if topic not in self._plain and self._client.behind_proxy(Deadline.after(REQUEST_TIMEOUT)):
            self.bounds(self.route(topic).all_queues())
            self._plain.add(topic)

    def _existing(self, queues: Sequence[MessageQueue]) -> list[MessageQueue]:
        """Return ``queues`` without those that are certain not to exist; see `fan_out.existing`."""
        return existing(
            self._client,
            queues,
            lambda topic, fresh: self.route(topic, fresh=fresh),
            self._groups,
            Deadline.after(REQUEST_TIMEOUT),
        )

    # -- anchors

    def anchor(self, topic: str, offsets: Mapping[MessageQueue, int]) -> str:
        """See `Log.anchor`. The anchor is a message before one of the offsets. This takes one request if that message is stored."""
        route = self.route(topic)
        of_queues = {queue: at for queue, at in offsets.items() if state_of(queue, route) is RouteState.READABLE}
        anchor = self._puller.ask_as_group(lambda group: find_anchor(self._client, group, of_queues))
        return "" if anchor is None else str(anchor)

    def require_place_of(self, anchor: str) -> None:
        """See `Log.require_place_of`. A cluster has no id, but only the anchors of a cluster name a queue."""
        if anchor and parse_anchor(anchor) is None:
            raise of_other_kind("an embedded broker", "Set path to its store")

    def is_another(self, topic: str, anchor: str) -> bool:
        """See `Log.is_another`. Compares at most every 10 s. An anchor whose message or queue cannot be read proves nothing."""
        now = time.monotonic()
        at, another = self._compared.get((topic, anchor), (float("-inf"), False))
        if not another and now - at >= COMPARISON_AGE:
            another = self._is_another(topic, anchor)
            if len(self._compared) >= _MOST_COMPARED:
                self._compared = {}
            self._compared[topic, anchor] = (now, another)
        return another

    def _is_another(self, topic: str, anchor: str) -> bool:
        route, parsed = self.route(topic), parse_anchor(anchor)
        if parsed is None:
            return False
        if state_of(MessageQueue(topic, parsed.broker_name, parsed.queue_id), route) is not RouteState.READABLE:
            return False
        return self._puller.ask_as_group(lambda group: is_same_topic(self._client, group, topic, parsed)) is False

    # -- bounds

    def bounds(self, queues: Sequence[MessageQueue]) -> dict[MessageQueue, QueueBounds]:
        """See `Log.bounds`. Raises RocketMQUnavailableError for a queue whose broker is away or unknown."""
        existing = self._existing(queues)
        # Request the minimum first, because a minimum that is read after the maximum could be higher.
        answers = ask_queues(
            self._client,
            [(queue, make(queue)) for queue in existing for make in (message_requests.min_offset, message_requests.max_offset)],
            Deadline.after(REQUEST_TIMEOUT),
        )
        return {queue: QueueBounds(*pair) for queue, pair in zip(existing, zip(answers[0::2], answers[1::2]))}

    def bounds_of(self, queue: MessageQueue) -> QueueBounds:
        """Return a queue's bounds. Raises TopicError MISSING or NO_SUCH_QUEUE."""
        bounds = self.bounds([queue])
        if queue not in bounds:
            self.require(queue)
        return bounds[queue]

    def change(self) -> None:
        """Return None, because brokers have no number of changes."""
        return

    def offset_at(self, queue: MessageQueue, timestamp: int) -> int:
        """See `Log.offset_at`. Brokers store milliseconds, which are compared as µs."""
        bounds = self.bounds_of(queue)
        ms = -(-timestamp // _US_PER_MS)
        hint = self._client.call(
            message_requests.search_offset(queue, max(0, ms)),
            Deadline.after(REQUEST_TIMEOUT),
            topic=queue.topic,
            broker_name=queue.broker_name,
        )
        low = bounds.min_offset
        while True:
            try:
                return find_first(lambda offset: self.stored(queue, offset) >= timestamp, low, bounds.max_offset, hint)
            except DataLossError as error:
                if error.sub != DataLossCondition.AGED_OUT or error.resume_at is None:
                    raise
                low = min(error.resume_at, bounds.max_offset)

    def stored(self, queue: MessageQueue, offset: int) -> int:
        """Return the store time of a message, in µs since the epoch. Raises DataLossError AGED_OUT or BEYOND_END."""
        row = next(pulls(self, queue, offset, offset + 1, 1, 0, ("store_timestamp",)))
        return int(row.column(0).cast(pa.int64())[0].as_py())

    def stored_at(self, offsets: Mapping[MessageQueue, int]) -> dict[MessageQueue, int]:
        """See `Log.stored_at`. Pulls all messages at the same time. Leaves out queues that cannot be read."""
        there = self._existing(list(offsets))
        readable = [queue for queue in there if state_of(queue, self.route(queue.topic)) is not RouteState.UNREADABLE]
        results = self.pull_once({queue: offsets[queue] for queue in readable}, 1)
        first = {queue: message_at(self._client, queue, offsets[queue], result) for queue, result in zip(readable, results)}
        return {queue: message.store_timestamp * _US_PER_MS for queue, message in first.items() if message is not None}

    # -- messages

    def pull_once(self, offsets: Mapping[MessageQueue, int], most: int) -> list[PullResult]:
        """Send one pull for up to ``most`` messages to each queue's master, all at the same time, and return the answers."""
        return self._puller.ask_as_group(
            lambda group: ask_queues(
                self._client,
                [(queue, message_requests.pull(queue, group, offset, most)) for queue, offset in offsets.items()],
                Deadline.after(REQUEST_TIMEOUT),
            )
        )

    def advance(self, queue: MessageQueue, begin: int, end: int, max_bytes: int) -> int:
        """See `Log.advance`. Exact if the first few messages reach the limit, else estimated from the sizes pulled last."""
        if begin >= end:
            return begin
        average = self._puller.average(queue)
        if average is None or max_bytes < _EXACT_MESSAGES * average:
            pull = partial(self._puller.pull, queue, begin, min(end - begin, _EXACT_MESSAGES), max_bytes + 1, ("body",))
            bodies = self._pull_again(queue, begin, pull).column(0)
            sums = np.cumsum(pc.binary_length(bodies).to_numpy().astype(np.int64))
            fitting = int(np.searchsorted(sums, max_bytes, side="right"))
            if not len(sums) or fitting < len(sums) or begin + fitting >= end:
                return begin + fitting
            begin, max_bytes = begin + fitting, max_bytes - int(sums[-1])
            average = self._puller.average(queue) or 1.0
        return min(end, begin + int(max_bytes / max(average, 1.0)))

    def pull(
        self,
        queue: MessageQueue,
        offset: int,
        max_messages: int,
        max_bytes: int,
        columns: tuple[str, ...],
        anchor: str | None = None,
        until: int | None = None,
    ) -> pa.RecordBatch:
        """See `Log.pull`. Checks the ``anchor`` at most every 10 s."""
        select_schema(columns)
        pull = partial(self._puller.pull, queue, offset, max_messages, max_bytes, columns, until)
        return self._shown(self._pulled(queue, offset, anchor, pull))

    def pull_matching(
        self,
        queue: MessageQueue,
        offset: int,
        max_messages: int,
        max_bytes: int,
        columns: tuple[str, ...],
        matching: Filter,
        anchor: str | None = None,
    ) -> tuple[pa.RecordBatch, int]:
        """See `Log.pull_matching`. Check SQL first with `require_filter`, because brokers return all messages if the SQL is invalid."""
        select_schema(columns)
        pull = partial(self._puller.pull_matching, queue, offset, max_messages, max_bytes, columns, matching)
        rows, following = self._pulled(queue, offset, anchor, pull)
        return self._shown(rows), following

    def _shown(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows with topic names without the client's namespace, as Java's client shows them."""
        index = rows.schema.get_field_index("topic")
        if self._client.names.prefix is None or index < 0:
            return rows
        return rows.set_column(index, rows.schema.field(index), self._client.names.bare_column(rows.column(index)))

    def _pulled(self, queue: MessageQueue, offset: int, anchor: str | None, pull: Callable[[], T]) -> T:
        if not self._puller.knows(queue):
            self.require(queue)
        if anchor and self.is_another(queue.topic, anchor):
            raise recreated(queue.topic)
        try:
            return self._pull_again(queue, offset, partial(self._pull_existing, queue, pull))
        except TopicError as error:
            if error.sub == TopicCondition.NO_SUCH_QUEUE:
                raise
            self.forget(queue.topic)
            raise missing_topic(queue.topic) from None

    def _pull_existing(self, queue: MessageQueue, pull: Callable[[], T]) -> T:
        """Pull. Raises TopicError NO_SUCH_QUEUE or RocketMQUnavailableError NOT_READABLE if the broker refuses the queue's number."""
        try:
            return pull()
        except RocketMQError as error:
            if error.sub in (RocketMQCondition.SERVER_ERROR, RocketMQCondition.INVALID_PARAMETER):
                # A broker answers with one of these errors for a queue that is deleted or for writing only, but also for other reasons.
                self.forget(queue.topic)
                self.require(queue)
                if state_of(queue, self.route(queue.topic)) is RouteState.UNREADABLE:
                    raise not_readable(f"queue {queue}", ROUTE_FORBIDS) from None
            raise

    def _pull_again(self, queue: MessageQueue, offset: int, pull: Callable[[], T]) -> T:
        """Pull, and retry while the queue cannot be read, or the broker skips messages that its own minimum says it still has."""
        deadline, failures = 0.0, 0
        while True:
            try:
                return pull()
            except RocketMQUnavailableError as error:
                if not failures:
                    deadline = Deadline.after(READABLE_PATIENCE)
                failures += 1
                delay = RETRY.delay(failures, random.random())
                if error.sub != UnavailableCondition.NOT_READABLE or not leaves_attempt(deadline, delay):
                    raise
            except DataLossError as error:
                if not failures:
                    # The pull itself may have waited for a broker that was away.
                    deadline = Deadline.after(HOLE_PATIENCE)
                failures += 1
                delay = RETRY.delay(failures, random.random())
                if error.sub != DataLossCondition.AGED_OUT or not leaves_attempt(deadline, delay):
                    raise
                least, limit = message_requests.min_offset(queue), Deadline.after(REQUEST_TIMEOUT)
                if self._client.call(least, limit, topic=queue.topic, broker_name=queue.broker_name) > offset:
                    raise
            time.sleep(delay)

    def require_filter(self, matching: Filter, topics: Sequence[str]) -> None:
        """See `Log.require_filter`."""
        checks.require_filter(self._client, matching, topics, self.route)

    def require_rights(self, topics: Sequence[str], group: str | None) -> None:
        """See `Log.require_rights`. Checks only if the client has an account."""
        checks.require_rights(self._client, rights.of_source(topics, group))

    def append(
        self,
        rows: Mapping[MessageQueue, pa.RecordBatch],
        among: Collection[MessageQueue] = (),
        *,
        require_lock: Callable[[], None] = lambda: None,
    ) -> dict[MessageQueue, OffsetRange]:
        """See `Log.append`. Readers see the rows when this returns. Without other producers, a queue's rows have consecutive offsets.

        ``among`` is compared with a route that is at most 1 s old, before any row is sent.

        Also raises TopicError MISSING if a topic is deleted during the call, which may delete rows that were sent. The topic is not
        created again. ``require_lock`` is called before each request, and raises an error if the lock under which they are sent is lost.
        """
        for topic in {queue.topic for queue in among}:
            require_targets(topic, among, self.route(topic).publish_list())
        for queue in rows:
            check_topic(queue.topic, writing=True)
            self.require(queue)
            self.refuse_hidden_static(queue.topic)
        # Encode all rows before sending any, so that nothing is sent if one row is invalid.
        encoded = {queue: self.sender.encoded(queue, some) for queue, some in rows.items()}
        counts = {queue: len(keys) for queue, (_, keys) in encoded.items()}
        stored: Counter[MessageQueue] = Counter()
        added: dict[MessageQueue, OffsetRange] = {}
        try:
            for queue, (bodies, keys) in encoded.items():
                try:
                    added[queue] = self.sender.append_encoded(queue, bodies, keys, stored, require_lock)
                except TopicError:
                    self.forget(queue.topic)
                    raise missing_topic(queue.topic) from None
        except TopicError:
            raise
        except OrderedMQError as error:
            raise sent_in_part(error, stored, counts) from None
        return added


def _info(name: str, queues: Sequence[MessageQueue], route: Route) -> TopicInfo:
    return TopicInfo(name, len(queues) - route.closed, ONLY_INCARNATION, closed=route.closed)


def find_first(late: Callable[[int], bool], low: int, high: int, hint: int) -> int:
    """Return the first offset in [low, high) that is ``late``, or ``high`` if none is. Every offset after a late one must be late. Pure.

    ``hint`` may be any offset. If it is the result, two calls of ``late`` are enough. A broker's answer to a search by time is
    only a hint: before 5.1.1 it is the nearest message, which may be too early, and in any release it may be outside the bounds
    (ConsumeQueue.getOffsetInQueueByTime).
    """
    at = min(max(hint, low), high)
    step = 1
    while at < high and not late(at):
        low = at + 1
        at = min(at + step, high)
        step *= 2
    high = at
    step = 1
    while high > low:
        at = max(high - step, low)
        if not late(at):
            low = at + 1
            break
        high = at
        step *= 2
    while low < high:
        at = (low + high) // 2
        if late(at):
            high = at
        else:
            low = at + 1
    return low
