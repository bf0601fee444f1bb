"""The views of a broker that pages and scrapers watch: all groups, one group, all topics, one topic. Watchers of a view share its results."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeVar

from orderedmq.broker import Broker, MemberInfo, PullSettings, QueueInfo, TopicInfo
from orderedmq.conditions import GroupCondition
from orderedmq.errors import DataLossError, GroupError, OrderedMQError, RocketMQError, TopicError
from orderedmq.model import MessageQueue, check_group
from orderedmq.parking import Lot
from orderedmq.tools import dead_letters
from orderedmq.tools.dead_letters import REPLAY_GROUP, LetterCount
from orderedmq.tools.group_state import GroupQueue, Rates, group_queues
from orderedmq.tools.parked import LotReader, ParkedKey, due_in, parked_keys
from orderedmq.ui.lag_history import CommitTimes, HandOver, LagHistory, Owners
from orderedmq.ui.shared_look import SharedLook

T = TypeVar("T")

#: Seconds after which a watch that nobody used is dropped, together with its history.
FORGOTTEN: Final = 900.0
#: Maximum number of watches kept, not counting those of exported groups.
MOST: Final = 200


@dataclass(frozen=True)
class QueueNow:
    """The current state of a group's queue. ``rate``: committed messages per second, None if it is not known yet."""

    state: GroupQueue
    lot: Lot | None
    rate: float | None

    @property
    def queue(self) -> MessageQueue:
        return self.state.queue


@dataclass(frozen=True)
class GroupNow:
    """The state of a group at ``when`` (seconds since 1970). ``letters`` None: the account may not read dead letters."""

    name: str
    when: float
    queues: Sequence[QueueNow]
    letters: LetterCount | None
    members: Sequence[MemberInfo] = ()
    hand_overs: Sequence[HandOver] = ()
    #: The query name of each client, including former owners; None if the name is not known.
    names: Mapping[str, str | None] = field(default_factory=dict)
    since: float = 0.0
    #: When the group's offset of each queue last moved, or was first seen, in seconds since 1970.
    committed: Mapping[MessageQueue, float] = field(default_factory=dict)
    #: How often a queue was seen with an owner different from its previous owner.
    handed_over: int = 0

    @cached_property
    def lag(self) -> int:
        return sum(queue.state.lag for queue in self.queues)

    @cached_property
    def gone(self) -> int:
        return sum(queue.state.gone for queue in self.queues)

    @cached_property
    def furthest(self) -> QueueNow | None:
        """The queue with the greatest lag, the first such queue if several have it; None if no queue has a lag."""
        behind = [queue for queue in self.queues if queue.state.lag]
        return max(behind, key=lambda queue: queue.state.lag) if behind else None

    @cached_property
    def owned(self) -> list[QueueNow]:
        return [queue for queue in self.queues if queue.state.owned]

    @cached_property
    def left_alone(self) -> list[QueueNow]:
        """The queues that have a lag and whose owner is missing or dead."""
        return [queue for queue in self.queues if queue.state.lag and not queue.state.owned]

    @cached_property
    def owned_by(self) -> Counter[str]:
        """How many queues each client owns."""
        return Counter(queue.state.lock.client_id for queue in self.owned if queue.state.lock is not None)

    @cached_property
    def topics(self) -> list[str]:
        return sorted({queue.queue.topic for queue in self.queues})

    @cached_property
    def parked(self) -> int:
        return sum(queue.lot.messages for queue in self.queues if queue.lot is not None)

    @cached_property
    def parked_keys(self) -> int:
        return sum(len(queue.lot.keys) for queue in self.queues if queue.lot is not None)

    @cached_property
    def next_due(self) -> float | None:
        """Seconds until the first parked key is due, 0 if one is due now; None if no key will become due."""
        dues = [due_in(queue.lot.next_due(), self.when) for queue in self.queues if queue.lot is not None]
        return min((due for due in dues if due is not None), default=None)


@dataclass(frozen=True)
class TopicNow:
    """A topic in the list of topics."""

    topic: TopicInfo
    messages: int


class GroupWatch:
    """Reads the state of one group, and keeps the history of its lag and its hand-overs."""

    def __init__(self, broker: Broker, group: str) -> None:
        self._broker = broker
        self._group = group
        self._lots = LotReader(broker)
        self._rates = Rates()
        self._owners = Owners()
        self._commits = CommitTimes()
        self._names: dict[str, str | None] = {}
        self._since = time.time()
        self.lags = LagHistory()

    def look(self) -> GroupNow:
        """Return the current state of the group. Raises GroupError MISSING."""
        lots = self._lots.look(self._group)
        states = group_queues(self._broker, self._group, lots)
        members = self._broker.admin.members(self._group)
        letters = dead_letters.count(self._broker, self._group)
        now = time.time()
        self.lags.see(now, {state.queue: state.lag for state in states})
        self._owners.see(now, {state.queue: state.lock.client_id for state in states if state.lock is not None})
        rates = self._rates.see(time.monotonic(), {state.queue: state.offset for state in states})
        committed = self._commits.see(now, {state.queue: state.offset for state in states})
        queues = [QueueNow(state, lots.get(state.queue), rates.get(state.queue)) for state in states]
        events = tuple(self._owners.hand_overs)
        former = {name: self._names.get(name) for event in events for name in (event.before, event.after) if name is not None}
        there = {state.member.client_id: state.member.name for state in members}
        owners = {state.lock.client_id: state.lock.name for state in states if state.lock is not None}
        # Keep the names of former owners, because the broker no longer lists them.
        self._names = former | there | owners
        handed_over = self._owners.handed_over
        return GroupNow(self._group, now, queues, letters, members, events, self._names, self._since, committed, handed_over)


@dataclass(frozen=True)
class ParkedNow:
    """The parked keys of a group at ``when`` (seconds since 1970)."""

    when: float
    keys: Sequence[ParkedKey]


@dataclass(frozen=True)
class BrokerNow:
    """The state of all groups at ``when`` (seconds since 1970), except the group that replays dead letters.

    ``stored``: when the first unprocessed message of each queue was stored, if that is known. ``kept_for``: the retention time of
    each topic in seconds, if it is known. ``refused``: the errors of the groups that could not be read and are left out.
    """

    when: float
    groups: Sequence[GroupNow]
    stored: Mapping[Place, float]
    kept_for: Mapping[str, float]
    refused: Mapping[str, OrderedMQError]


class Watches:
    """All watches of a broker's pages and metrics. Each watch is created when it is first used."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._times = StoreTimes(broker)
        #: The number of exported groups. It is added to the limit `MOST`, because the metrics keep a watch for every group.
        self._exported = 0
        self._lots = LotReader(broker)
        self._guard = threading.Lock()
        self._looks: dict[tuple[str, str], SharedLook[Any]] = {}
        self._groups: dict[str, GroupWatch] = {}

    def groups(self) -> SharedLook[list[GroupNow]]:
        """Return the `SharedLook` of all groups, without the group that replays dead letters: the counts of dead letters show its lag."""
        return self._shared("groups", "", self._look_at_groups)

    def group(self, name: str) -> tuple[SharedLook[GroupNow], LagHistory]:
        """Return the `SharedLook` of one group, and the history of the group's lag. Raises GroupError BAD_NAME."""
        check_group(name)
        with self._guard:
            watch = self._groups.get(name) or GroupWatch(self._broker, name)
            look = self._kept("group", name, watch.look)
            self._groups[name] = watch
        return look, watch.lags

    def everything(self) -> SharedLook[BrokerNow]:
        """Return the `SharedLook` of all groups for the metrics. It shares results with the groups' pages, so no group is read twice."""
        return self._shared("everything", "", self._look_at_everything)

    def parked(self, group: str) -> SharedLook[ParkedNow]:
        """Return the `SharedLook` of the parked keys of a group. Raises GroupError BAD_NAME."""
        check_group(group)
        return self._shared("parked", group, lambda: ParkedNow(time.time(), parked_keys(self._broker, group)))

    def topics(self) -> SharedLook[list[TopicNow]]:
        return self._shared("topics", "", self._look_at_topics)

    def topic(self, name: str) -> SharedLook[tuple[float, TopicInfo, list[QueueInfo]]]:
        """Return the `SharedLook` of one topic. Its result is the time of the read, the topic, and the topic's queues."""

        def look() -> tuple[float, TopicInfo, list[QueueInfo]]:
            return time.time(), self._broker.log.topic(name), self._broker.admin.describe_topic(name)

        return self._shared("topic", name, look)

    def _shared(self, kind: str, name: str, look: Callable[[], T]) -> SharedLook[T]:
        with self._guard:
            return self._kept(kind, name, look)

    def _kept(self, kind: str, name: str, look: Callable[[], T]) -> SharedLook[T]:
        """Return the `SharedLook` of this kind and name. Create it if it does not exist. The caller must hold the guard."""
        shared = self._looks.get((kind, name))
        if shared is None:
            self._forget()
            shared = self._looks[kind, name] = SharedLook(look, self._broker.log.change)
        shared.asked = time.monotonic()
        return shared

    def _forget(self) -> None:
        """Drop watches that were not used recently, and the least recently used if there are too many: requests can name any topic."""
        oldest = sorted(self._looks, key=lambda key: self._looks[key].asked)
        late = time.monotonic() - FORGOTTEN
        for place, key in enumerate(oldest):
            if self._looks[key].asked < late or place < len(oldest) - MOST - self._exported:
                del self._looks[key]
        self._groups = {name: watch for name, watch in self._groups.items() if ("group", name) in self._looks}

    def _look_at_everything(self) -> BrokerNow:
        names = [name for name in self._broker.admin.groups() if name != REPLAY_GROUP]
        self._exported = len(names)
        groups, refused = [], {}
        for name in names:
            try:
                groups.append(self.group(name)[0].get())
            except (GroupError, TopicError, DataLossError, RocketMQError) as error:
                if error.retriable:
                    # The broker cannot be reached. Asking for the other groups would fail after the same wait.
                    raise
                # A group that was deleted a moment ago does not count as a failure.
                if error.sub != GroupCondition.MISSING:
                    refused[name] = error
        states = [queue.state for group in groups for queue in group.queues]
        stored = self._times.look(time.monotonic(), states)
        kept_for = self._broker.admin.kept_for({queue.queue.topic for queue in states})
        return BrokerNow(time.time(), groups, stored, kept_for, refused)

    def _look_at_groups(self) -> list[GroupNow]:
        return list(self._each_group(self._broker.admin.groups()))

    def _each_group(self, names: Iterable[str]) -> Iterable[GroupNow]:
        for name in names:
            if name == REPLAY_GROUP:
                continue
            try:
                lots = self._lots.look(name)
                queues = [QueueNow(state, lots.get(state.queue), None) for state in group_queues(self._broker, name, lots)]
            except GroupError:
                # The group was deleted a moment ago.
                continue
            yield GroupNow(name, time.time(), queues, dead_letters.count(self._broker, name))

    def _look_at_topics(self) -> list[TopicNow]:
        topics = []
        for topic in self._broker.log.topics():
            try:
                bounds = self._broker.log.bounds(self._broker.log.queues(topic.name)).values()
            except TopicError:
                # The topic was deleted a moment ago.
                continue
            topics.append(TopicNow(topic, sum(at.max_offset - at.min_offset for at in bounds)))
        return topics


#: Maximum number of messages that one call of `StoreTimes.look` requests.
MOST_LOOKED: Final = 500
#: Seconds after which a message is requested again, even if the account was not allowed to read it.
AGAIN: Final = 600.0

#: A group and one of its queues.
Place = tuple[str, MessageQueue]


class _Known(NamedTuple):
    """``stored``: in seconds since 1970, None if the message could not be read. ``asked``: when the broker was asked."""

    offset: int
    stored: float | None
    asked: float


class StoreTimes:
    """The store times of the first unprocessed messages of all groups of a broker, which show groups' lag as a time.

    Rules: a broker reports this time only with the message, so each `look` requests at most `MOST_LOOKED` messages. A message is
    requested again only after `AGAIN` seconds, because its topic may have been recreated. The queues that were requested longest ago
    come first. A queue whose offset has moved keeps the time of its former message until its new message is requested. The new message
    was stored later, so the lag may look greater than it is, but never smaller.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._known: dict[Place, _Known] = {}

    def look(self, now: float, queues: Sequence[GroupQueue]) -> dict[Place, float]:
        """Return when the first unprocessed message of each queue was stored, in seconds since 1970, as far as that is known.

        A queue without an unprocessed message is left out. ``now``: in seconds, from any clock.
        """
        behind = {(queue_state.group, queue_state.queue): queue_state.following for queue_state in queues if queue_state.lag}
        self._known = {place: last for place, last in self._known.items() if place in behind}
        due = [place for place, offset in behind.items() if self._is_due(now, place, offset)]
        due.sort(key=lambda place: self._known[place].asked if place in self._known else float("-inf"))
        by_group: dict[str, dict[MessageQueue, int]] = {}
        for group, queue in due[:MOST_LOOKED]:
            by_group.setdefault(group, {})[queue] = behind[group, queue]
        for group, offsets in by_group.items():
            times = self._ask(group, offsets)
            for queue, offset in offsets.items():
                stored = times.get(queue)
                self._known[group, queue] = _Known(offset, None if stored is None else stored / 1e6, now)
        return {place: last.stored for place, last in self._known.items() if last.stored is not None}

    def _is_due(self, now: float, place: Place, offset: int) -> bool:
        last = self._known.get(place)
        return last is None or last.offset != offset or now - last.asked >= AGAIN

    def _ask(self, group: str, offsets: dict[MessageQueue, int]) -> dict[MessageQueue, int]:
        try:
            # Read as the group: the account may have no right to read under another name.
            return self._broker.log.reading(PullSettings(group)).stored_at(offsets)
        except RocketMQError as error:
            if not error.denied:
                raise
            return {}
