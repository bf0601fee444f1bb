"""Attempts of a batch spread its rows over the same queues, whatever happens to the topic's brokers and queues between and within them.

The brokers are in memory; the code that decides is real. Each planted bug is detected.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orderedmq.conditions import UnavailableCondition
from orderedmq.errors import RocketMQUnavailableError, SinkError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.sink import agreement
from orderedmq.rocketmq.sink.agreement import Agreement, BrokerState, States
from orderedmq.rocketmq.sink.batch_queues import BatchQueues, Record, recorded
from orderedmq.rocketmq.wire.route import BrokerData, QueueData, Route

TOPIC = "t"
KEYS = "abcdefgh"
#: Seconds for which an attempt waits for brokers that are away.
PATIENCE = 3.0


class Crash(Exception):
    """The simulated process has died."""


@dataclass
class FakeBroker:
    """A broker with its queues, and what the sink has stored there. ``reports``: whether the nameserver knows it."""

    queues: int
    writable: bool = True
    reports: bool = True
    record: int = 0
    committed: int = -1
    gate: object = None
    messages: dict[int, list[str]] = field(default_factory=dict)


class Cluster:
    def __init__(self, **queues: int) -> None:
        self.brokers = {name: FakeBroker(count) for name, count in queues.items()}

    def route(self) -> Route:
        there = {name: broker for name, broker in self.brokers.items() if broker.reports}
        return Route(
            TOPIC,
            {name: BrokerData(name, "C", {0: f"{name}:1"}) for name in there},
            tuple(QueueData(name, broker.queues, broker.queues, 6 if broker.writable else 4) for name, broker in there.items()),
        )

    def proposed(self) -> tuple[MessageQueue, ...]:
        return self.route().publish_list()

    def places(self) -> dict[str, list[tuple[str, int]]]:
        """The queues in which each row is, once for each of its messages."""
        out: dict[str, list[tuple[str, int]]] = {}
        for name, broker in self.brokers.items():
            for number, rows in broker.messages.items():
                for row in rows:
                    out.setdefault(row, []).append((name, number))
        return out


class FakeBrokers:
    """The `TopicBrokers` of one attempt. ``meanwhile(where)`` is called before each step, and may do anything."""

    def __init__(self, cluster: Cluster, meanwhile: Callable[[str], None] = lambda _: None) -> None:
        self._cluster = cluster
        self._meanwhile = meanwhile
        self._now = 0.0
        self.reads = 0

    def route(self) -> Route:
        self._meanwhile("route")
        return self._cluster.route()

    def read(self, names: Sequence[str]) -> States:
        self._meanwhile("read")
        self.reads += 1
        out: States = {}
        for name in names:
            broker = self._cluster.brokers[name]
            out[name] = (
                BrokerState(Record.parse(broker.record), broker.committed, broker.record > 0)
                if broker.reports
                else RocketMQUnavailableError(UnavailableCondition.NO_BROKER, f"{name} is away")
            )
        return out

    @contextlib.contextmanager
    def gates(self, names: Sequence[str], unless: Callable[[], bool]) -> Iterator[Callable[[], bool] | None]:
        mine = object()
        self._meanwhile("gates")
        try:
            for name in names:
                broker = self._cluster.brokers[name]
                if broker.gate is not None and not self._expired():
                    # The attempt that has the gate continues only after this one has ended.
                    if unless():
                        yield None
                        return
                    raise Crash
                broker.gate = mine
            yield lambda: all(self._cluster.brokers[name].gate is mine for name in names)
        finally:
            for name in names:
                if self._cluster.brokers[name].gate is mine:
                    self._cluster.brokers[name].gate = None

    def _expired(self) -> bool:
        """Return whether the attempt that has a gate slept for so long that its locks have expired."""
        return False

    def enter(self, name: str) -> None:
        self._meanwhile("enter")
        self._require(name)

    def write(self, name: str, record: Record) -> None:
        self._meanwhile("write")
        self._require(name)
        self._cluster.brokers[name].record = record.value

    def _require(self, name: str) -> None:
        if not self._cluster.brokers[name].reports:
            raise RocketMQUnavailableError(UnavailableCondition.NO_BROKER, f"{name} is away")

    def wait(self, seconds: float) -> None:
        self._meanwhile("wait")
        self._now += seconds

    def now(self) -> float:
        return self._now


def write_batch(cluster: Cluster, batch: int, brokers: FakeBrokers, proposed: Sequence[MessageQueue], rows: str) -> None:
    """Run one attempt that has all rows, and commit the batch. Raises SinkError, RocketMQUnavailableError or Crash."""
    agreed = Agreement(brokers, batch, PATIENCE)
    queues = agreed.reach(proposed)
    for row in rows:
        queue = queues[ord(row) % len(queues)]
        brokers._meanwhile("send")
        broker = cluster.brokers[queue.broker_name]
        if max(agreed.committed, broker.committed) < batch and not agreed.holds(queue.broker_name, Record.parse(broker.record)):
            agreed.renew()
        stored = broker.messages.setdefault(queue.queue_id, [])
        row = f"{batch}{row}"
        if max(agreed.committed, broker.committed) >= batch:
            assert row in stored, "a committed batch was repeated over other queues"
        elif row not in stored:
            if not broker.writable or not broker.reports or queue.queue_id >= broker.queues:
                raise RocketMQUnavailableError(UnavailableCondition.UNAVAILABLE, "the row is refused")
            stored.append(row)
    brokers._meanwhile("commit")
    for broker in cluster.brokers.values():
        if broker.reports:
            broker.committed = max(broker.committed, batch)


def change(cluster: Cluster, draw: random.Random) -> None:
    """Change the topology. The broker c is always there, though perhaps read-only. Only b is killed, and only b gets no queues."""
    name = draw.choice(["a", "b", "c"])
    broker = cluster.brokers[name]
    kind = draw.choice(["perm", "away", "queues", "forget"])
    if kind == "perm":
        broker.writable = not broker.writable
    elif kind == "away" and name != "c":
        broker.reports = not broker.reports
    elif kind == "queues" and name != "b":
        broker.queues += 1
    elif kind == "forget" and name == "b":
        # A killed broker forgets its locks too.
        broker.record, broker.gate = 0, None


def scenario(draw: random.Random) -> None:
    cluster = Cluster(a=draw.randint(1, 3), b=draw.randint(1, 3), c=draw.randint(1, 3))
    batches = draw.randint(1, 3)
    for number in range(batches):
        jobs = draw.randint(1, 4)
        for _ in range(jobs):
            if proposed := cluster.proposed():
                try_to_write(cluster, number, proposed, draw, depth=2)
            if draw.random() < 0.6:
                change(cluster, draw)
        for broker in cluster.brokers.values():
            broker.reports = broker.writable = True
        write_batch(cluster, number, FakeBrokers(cluster), cluster.proposed(), KEYS)
    places = cluster.places()
    assert Counter(map(len, places.values())) == {1: batches * len(KEYS)}, places


def try_to_write(cluster: Cluster, batch: int, proposed: Sequence[MessageQueue], draw: random.Random, depth: int) -> None:
    """Make some attempts of one job. During each, the cluster may change, and other jobs may write the same batch."""
    for _ in range(draw.randint(1, 3)):
        faults = draw.randint(0, 4)

        def meanwhile(where: str) -> None:
            nonlocal faults
            if not faults or draw.random() < 0.6:
                return
            faults -= 1
            # A lock is trusted for half of its life, so a write arrives before another attempt could get the gate.
            kind = draw.choice(["crash", "change"] if where == "write" else ["crash", "change", "job"])
            if kind == "crash":
                raise Crash
            if kind == "change":
                change(cluster, draw)
            elif depth and (others := cluster.proposed()):
                try_to_write(cluster, batch, others, draw, depth - 1)

        with contextlib.suppress(Crash, SinkError, RocketMQUnavailableError):
            write_batch(cluster, batch, Expiring(cluster, meanwhile, draw), proposed, KEYS)


class Expiring(FakeBrokers):
    """Brokers at which the locks of gates may expire."""

    def __init__(self, cluster: Cluster, meanwhile: Callable[[str], None], draw: random.Random) -> None:
        super().__init__(cluster, meanwhile)
        self._draw = draw

    def _expired(self) -> bool:
        return self._draw.random() < 0.3


@pytest.mark.holds("sink once")
@pytest.mark.holds("same key, same queue")
@given(st.integers(0, 2**62))
def test_each_row_is_in_one_queue_after_any_changes_of_the_topology(seed: int) -> None:
    scenario(random.Random(seed))


# --- planted bugs


def _uses_the_route_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Agreement, "_reach", lambda self, proposed: proposed)
    monkeypatch.setattr(Agreement, "holds", lambda self, name, record: True)


def _sends_before_all_brokers_have_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_recorded(queues: BatchQueues, states: States) -> bool:
        return any(
            isinstance(state, BrokerState) and name in queues.counts and state.record == queues.record(name)
            for name, state in states.items()
        )

    monkeypatch.setattr(agreement, "_is_recorded", is_recorded)


def _decides_without_the_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def gates(self: FakeBrokers, names: Sequence[str], unless: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
        yield lambda: True

    monkeypatch.setattr(FakeBrokers, "gates", gates)


def _writes_after_the_gates_were_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Agreement._decide
    monkeypatch.setattr(
        Agreement, "_decide", lambda self, queues, route, states, held: real(self, queues, route, states, lambda: True)
    )


def _replaces_the_list_of_an_earlier_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "recorded", lambda *_: None)


def _knows_only_brokers_that_take_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def route(self: FakeBrokers) -> Route:
        full = self._cluster.route()
        names = {data.broker_name for data in full.queues if data.writable}
        return Route(
            TOPIC,
            {name: broker for name, broker in full.brokers.items() if name in names},
            tuple(data for data in full.queues if data.broker_name in names),
        )

    monkeypatch.setattr(FakeBrokers, "route", route)


def _believes_any_list_that_the_records_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchQueues, "digest", 7)


#: Each bug, and the first of the seeds that find it.
BUGS: dict[Callable[[pytest.MonkeyPatch], None], int] = {
    _uses_the_route_of_the_moment: 0,
    _sends_before_all_brokers_have_the_record: 0,
    _decides_without_the_gates: 0,
    _writes_after_the_gates_were_lost: 500,
    _replaces_the_list_of_an_earlier_attempt: 0,
    _knows_only_brokers_that_take_rows: 0,
    _believes_any_list_that_the_records_allow: 0,
}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_noticed(bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)

    def scenarios() -> None:
        for seed in range(BUGS[bug], BUGS[bug] + 100):
            scenario(random.Random(seed))

    with pytest.raises((AssertionError, SinkError)):
        scenarios()


# --- single rules


def refused(cluster: Cluster, batch: int = 0) -> SinkError:
    """Return the error of an attempt that must wait for other queues, and check that it has sent nothing."""
    before = cluster.places()
    brokers = FakeBrokers(cluster)
    with pytest.raises(SinkError) as caught:
        write_batch(cluster, batch, brokers, cluster.proposed(), KEYS)
    assert caught.value.sub == "QUEUES_AWAY"
    assert PATIENCE - 2 < brokers.now() <= PATIENCE
    assert cluster.places() == before
    return caught.value


def begun(cluster: Cluster, batch: int = 0) -> None:
    """Run an attempt that dies after it has sent half of the rows."""
    write_batch(cluster, batch, FakeBrokers(cluster), cluster.proposed(), KEYS[:4])
    for broker in cluster.brokers.values():
        broker.committed = batch - 1


def test_an_attempt_without_faults_reads_the_records_once() -> None:
    cluster = Cluster(a=2, b=2)
    begun(cluster)
    brokers = FakeBrokers(cluster)
    write_batch(cluster, 0, brokers, cluster.proposed(), KEYS)
    assert brokers.reads == 1


@pytest.mark.parametrize(
    ("change", "undo"),
    [
        ({"reports": False}, {"reports": True}),
        ({"writable": False}, {"writable": True}),
        ({"queues": 1}, {"queues": 2}),
    ],
    ids=["away", "read_only", "fewer_queues"],
)
def test_a_broker_of_the_batch_that_takes_no_rows_is_waited_for_and_named(
    change: dict[str, object], undo: dict[str, object]
) -> None:
    cluster = Cluster(a=2, b=2)
    begun(cluster)
    proposed = cluster.proposed()
    vars(cluster.brokers["b"]).update(change)
    refused(cluster)
    brokers = FakeBrokers(cluster, lambda where: vars(cluster.brokers["b"]).update(undo) if where == "wait" else None)
    with pytest.raises(SinkError, match="broker 'b'"):
        Agreement(FakeBrokers(cluster), 0, PATIENCE).reach(proposed)
    write_batch(cluster, 0, brokers, cluster.proposed(), KEYS)
    assert Counter(map(len, cluster.places().values())) == {1: len(KEYS)}


def test_the_record_of_a_version_with_the_same_last_bits_is_not_that_of_the_next_one() -> None:
    cluster = Cluster(a=2, b=2)
    for number in range(3):
        write_batch(cluster, number << 15, FakeBrokers(cluster), cluster.proposed(), KEYS)
    begun(cluster, 3 << 15)
    for broker in cluster.brokers.values():
        broker.committed = 2 << 15
    cluster.brokers["b"].queues = 3
    assert len(Agreement(FakeBrokers(cluster), 3 << 15, PATIENCE).reach(cluster.proposed())) == 4


def test_a_broker_that_has_forgotten_the_record_gets_it_again_before_it_takes_a_row() -> None:
    cluster = Cluster(a=2, b=2)

    def kill(where: str) -> None:
        if where == "send":
            cluster.brokers["b"].record = 0

    write_batch(cluster, 0, FakeBrokers(cluster, kill), cluster.proposed(), "ab")
    # The row "a" goes to the second queue of a, and "b" to the first queue of b.
    assert cluster.brokers["b"].record
    cluster.brokers["a"].record = cluster.brokers["b"].record = 0
    agreed = Agreement(FakeBrokers(cluster), 1, PATIENCE)
    agreed.reach(cluster.proposed())
    for broker in cluster.brokers.values():
        broker.record, broker.queues = 0, 3
    Agreement(FakeBrokers(cluster), 1, PATIENCE).reach(cluster.proposed())
    with pytest.raises(SinkError, match="QUEUES_AWAY"):
        agreed.renew()


@pytest.mark.holds("sink once")
def test_a_list_is_recorded_at_brokers_without_queues_before_it_can_be_used() -> None:
    cluster = Cluster(a=1, c=1)
    cluster.brokers["c"].writable = False
    writes: list[str] = []

    def kill(where: str) -> None:
        writes.extend([where] if where == "write" else [])
        if len(writes) == 2:
            raise Crash

    with pytest.raises(Crash):
        write_batch(cluster, 0, FakeBrokers(cluster, kill), cluster.proposed(), KEYS)
    begun(cluster)
    cluster.brokers["a"].reports, cluster.brokers["c"].writable = False, True
    refused(cluster)


def test_an_attempt_learns_from_any_broker_that_a_later_batch_is_committed() -> None:
    cluster = Cluster(a=1, b=1)
    cluster.brokers["a"].committed = 10
    agreed = Agreement(FakeBrokers(cluster), 7, PATIENCE)
    agreed.reach(cluster.proposed())
    assert agreed.committed == 10


def test_the_list_of_an_order_configuration_is_recognised_and_needs_no_absent_broker() -> None:
    conf = (("b", 2), ("a", 1))
    there = Route(TOPIC, {"a": BrokerData("a", "C", {0: "h"})}, (QueueData("a", 1, 1, 6),), conf)
    listed = BatchQueues(3, there.publish_list())
    records = {"a": listed.record("a")}
    assert recorded(BatchQueues(3, (MessageQueue(TOPIC, "a", 0),)), {"a": Record.parse(0)}, there) is None
    assert recorded(listed, records, there) == listed
    assert listed.lack(there, sending=True, recorded=False) is None
    without = Route(TOPIC, there.brokers, there.queues)
    assert "broker 'b' is away" in (listed.lack(without, sending=True, recorded=False) or "")
    both = Route(TOPIC, {**there.brokers, "b": BrokerData("b", "C", {0: "h"})}, (*there.queues, QueueData("b", 4, 4, 6)), conf)
    records["b"] = listed.record("b")
    assert recorded(BatchQueues(3, both.publish_list()[:1]), records, both) == listed


def test_a_record_is_one_number_of_63_bits() -> None:
    for record in (Record(0, 1, 0), Record(32767, 65536, (1 << 31) - 1)):
        assert Record.parse(record.value) == record
        assert 0 < record.value < 2**63
    many = BatchQueues(2**62, tuple(MessageQueue(TOPIC, "a", number) for number in range(65536)))
    assert many.record("a").is_of(2**62)
    assert not Record.parse(0).is_of(0)
