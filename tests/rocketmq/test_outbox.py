"""A sink's batches on real servers: each row once in its queue, whatever becomes of connections, answers, brokers and tasks."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import random
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

from orderedmq.broker import Published, Receipt, SinkBatch
from orderedmq.errors import MessageError, OrderedMQError, RocketMQError, SinkError, TopicError
from orderedmq.model import PRODUCER_COLUMNS, PRODUCER_SCHEMA, MessageQueue, OffsetRange
from orderedmq.rocketmq import admin_requests, group_requests, requests
from orderedmq.rocketmq.admin import RocketMQAdmin
from orderedmq.rocketmq.bookmarks import Bookmarks
from orderedmq.rocketmq.client import Client
from orderedmq.rocketmq.codes import RequestCode
from orderedmq.rocketmq.encode import SendBody
from orderedmq.rocketmq.log import RocketMQLog
from orderedmq.rocketmq.outbox import RocketMQOutbox, RocketMQStaging
from orderedmq.rocketmq.queue_place import RocketMQQueue, Timing
from orderedmq.rocketmq.receipts import parse_token
from orderedmq.rocketmq.servers import Cluster
from orderedmq.rocketmq.stamp import bookmark_group
from tests.rocketmq.proxy import Connection, Network, Path, Way

ROOT = pathlib.Path(__file__).parents[2]
#: For locks that live 3 s.
QUICK = Timing(lock_trust=1.5, lock_renew=1.0, lock_wait=20.0, lock_yield=1.0, send_timeout=1.0, settle=0.4, patience=60.0)


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def until(good: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = soon(seconds)
    while not good():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def rows(names: Sequence[str], size: int = 0) -> pa.RecordBatch:
    """Rows whose key is their first letter, with bodies of at least ``size`` bytes."""
    columns: dict[str, Any] = {
        "body": [name.encode().ljust(size) for name in names],
        "sharding_key": [name[0] for name in names],
    }
    return pa.record_batch({name: pa.array(values, PRODUCER_SCHEMA.field(name).type) for name, values in columns.items()})


def numbered(count: int, first: int = 0, keys: str = "abc") -> list[str]:
    return [f"{keys[number % len(keys)]}{number}" for number in range(first, first + count)]


class World:
    """A topic of three queues, seen without any proxy; outboxes may be behind one."""

    def __init__(self, cluster: Cluster, timing: Timing = Timing()) -> None:  # noqa: B008
        self.cluster = cluster
        self.timing = timing
        self.client = Client(cluster.address)
        self.log = RocketMQLog(self.client)
        self.topic = f"t-{uuid.uuid4().hex[:8]}"
        self.sink = f"s-{self.topic}"
        self._clients = [self.client]
        for master in self.masters():
            self.client.call_address(master, admin_requests.create_topic(self.topic, 3), soon())
        deadline = soon(20)
        while True:
            try:
                self.queues = self.log.queues(self.topic)
                break
            except OrderedMQError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        self.queue = self.queues[0]

    def masters(self) -> list[str]:
        return [str(broker.master) for broker in self.client.cluster(soon()).brokers.values()]

    def outbox(self, address: str | None = None, timing: Timing | None = None) -> RocketMQOutbox:
        """Of a process of its own."""
        client = Client(address or self.cluster.address)
        self._clients.append(client)
        return RocketMQOutbox(client, RocketMQLog(client), timing=timing or self.timing)

    def batch(self, number: int = 0) -> SinkBatch:
        return SinkBatch(self.sink, number)

    def write(
        self, names: Sequence[str], batch: int = 0, partition: int = 0, outbox: RocketMQOutbox | None = None, size: int = 0
    ) -> Receipt:
        """One attempt of a task that has these rows for the first queue."""
        staging = (outbox or self.outbox()).open(self.batch(batch), partition)
        staging.add(self.queue, rows(names, size))
        return staging.receipt()

    def bodies(self, queue: MessageQueue | None = None) -> list[str]:
        queue = queue or self.queue
        bounds = self.log.bounds([queue])[queue]
        out: list[str] = []
        at = bounds.min_offset
        while at < bounds.max_offset:
            found = self.log.pull(queue, at, 1 << 20, 1 << 30, ("body",))
            out += [body.decode().rstrip() for body in found.column(0).to_pylist()]
            at += found.num_rows
        return out

    def close(self) -> None:
        for client in self._clients:
            client.close()


@pytest.fixture
def worlds() -> Iterator[list[World]]:
    made: list[World] = []
    yield made
    for world in made:
        world.close()


@pytest.fixture
def everywhere(every_version: Cluster, worlds: list[World]) -> World:
    worlds.append(World(every_version))
    return worlds[-1]


@pytest.fixture
def quick(quick_locks: Cluster, worlds: list[World]) -> World:
    worlds.append(World(quick_locks, QUICK))
    return worlds[-1]


@pytest.fixture
def network(quick: World) -> Iterator[Network]:
    with Network(quick.cluster.address, [broker.address for broker in quick.cluster.brokers]) as made:
        yield made


# --- every version


def test_a_batch_is_there_once_however_often_it_is_written(everywhere: World) -> None:
    world = everywhere
    names = numbered(200)
    first = world.write(names)
    assert world.bodies() == names
    # The same task again: Spark may deliver its rows in another order.
    again = world.write(names[100:] + names[:100])
    assert world.bodies() == names
    published = world.outbox().publish(world.batch(), [again, first])
    assert published == Published(False, {world.queue: OffsetRange(0, 200)})
    for receipt in (first, world.write(names)):
        assert world.outbox().publish(world.batch(), [receipt]).replayed
    more = numbered(50, 200)
    world.outbox().publish(world.batch(1), [world.write(more, 1)])
    assert world.outbox().publish(world.batch(), [world.write(names)]).replayed
    assert world.bodies() == names + more


def test_every_column_and_an_empty_body_arrive_and_are_known_again(everywhere: World) -> None:
    world = everywhere
    given = pa.RecordBatch.from_pylist(
        [
            {"body": b"", "tags": "t", "keys": "k1 k2", "sharding_key": "ä", "properties": [("x", "1"), ("OMQ_SINK", "other")]},
            {"body": b"\0" * 100_000, "tags": None, "keys": "", "sharding_key": None, "properties": None},
            {"body": b"a", "tags": None, "keys": None, "sharding_key": "k", "properties": [("y", "2"), ("CLUSTER", "no")]},
        ],
        PRODUCER_SCHEMA,
    )
    for _ in range(2):
        staging = world.outbox().open(world.batch(7), 3)
        staging.add(world.queue, given)
        world.outbox().publish(world.batch(7), [staging.receipt()])
    got = world.log.pull(world.queue, 0, 100, 1 << 30, PRODUCER_COLUMNS).to_pylist()
    assert [(row["body"], row["tags"], row["keys"], row["sharding_key"]) for row in got] == [
        (b"", "t", "k1 k2", "ä"),
        (b"\0" * 100_000, None, None, None),
        (b"a", None, None, "k"),
    ]
    stamp = {"OMQ_SINK": world.sink, "OMQ_BATCH": "7", "OMQ_PARTITION": "3"}
    for number, row in enumerate(got):
        properties = dict(row["properties"])
        assert properties.items() >= {**stamp, "OMQ_SEQUENCE": str(number)}.items()
    assert dict(got[0]["properties"])["x"] == "1"


def test_a_batch_over_two_brokers(two_brokers: Cluster, worlds: list[World], monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them is killed while the batch is written."""
    world = World(two_brokers)
    worlds.append(world)
    until(lambda: len(world.log.queues(world.topic)) == 6)
    world.queues = world.log.queues(world.topic)
    fill(world, 3000)
    monkeypatch.setattr("orderedmq.rocketmq.encode.TARGET_BYTES", 2000)
    restarts: list[threading.Thread] = []

    def kill() -> None:
        two_brokers.brokers[1].kill()
        restarts.append(threading.Thread(target=two_brokers.brokers[1].start))
        restarts[-1].start()

    spoil(monkeypatch, {20: kill})
    for number in range(2):
        for attempt in range(2):
            staging = world.outbox().open(world.batch(number), 0)
            for queue in world.queues:
                staging.add(queue, rows(numbered(40, 1000 * number)))
            receipt = staging.receipt()
            published = world.outbox().publish(world.batch(number), [receipt])
            assert published.replayed is (attempt == 1)
    for thread in restarts:
        thread.join()
    assert len(restarts) == 1
    for queue in world.queues:
        assert world.bodies(queue)[3000 if queue == world.queue else 0 :] == numbered(40) + numbered(40, 1000)


# --- answers that do not come


@pytest.fixture
def small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orderedmq.rocketmq.encode.TARGET_BYTES", 2000)


def spoil(monkeypatch: pytest.MonkeyPatch, fates: dict[int, Callable[[], None]]) -> list[int]:
    """Before the n-th send (from 1 on) of all queues its fate is called. Returns the sends' numbers."""
    real = RocketMQQueue.send
    sends: list[int] = []
    guard = threading.Lock()

    def send(self: RocketMQQueue, body: SendBody) -> int:
        with guard:
            sends.append(len(sends) + 1)
            fate = fates.get(sends[-1])
            if fate is not None:
                fate()
        return real(self, body)

    monkeypatch.setattr(RocketMQQueue, "send", send)
    return sends


def current(network: Network) -> Connection:
    """The connection to the broker that was made last."""
    return [connection for connection in network.broker.connections if not connection.closed.is_set()][-1]


CUTS: dict[str, Callable[[Connection], Path]] = {
    "answer lost": lambda c: Path(down=Way(cut_after=c.down)),
    "answer begun": lambda c: Path(down=Way(cut_after=c.down + 1)),
    "answer without its end": lambda c: Path(down=Way(cut_after=c.down + 100, reset=True)),
    "request not begun": lambda c: Path(up=Way(cut_after=c.up)),
    "request begun": lambda c: Path(up=Way(cut_after=c.up + 7)),
    "request without its body": lambda c: Path(up=Way(cut_after=c.up + 500, reset=True)),
    "answer held": lambda c: Path(down=Way(hold_after=c.down)),
    "request held": lambda c: Path(up=Way(hold_after=c.up + 5)),
}


def cut_now(network: Network, path: Callable[[Connection], Path]) -> None:
    current(network).alter(path(current(network)))


@pytest.mark.usefixtures("small_requests")
def test_a_cut_at_any_byte_of_a_send_leaves_each_row_once_in_order(
    quick: World, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = numbered(60)
    outbox = quick.outbox(network.address)
    expected: list[str] = []
    for number, (cut, path) in enumerate(CUTS.items()):
        with monkeypatch.context() as patch:
            # The first and the third request are spoilt.
            spoil(patch, dict.fromkeys((1, 3), partial(cut_now, network, path)))
            began = time.monotonic()
            receipt = quick.write(names, number, outbox=outbox)
            took = time.monotonic() - began
        expected += names
        assert quick.bodies() == expected, cut
        assert not outbox.publish(quick.batch(number), [receipt]).replayed
        # Two waits, and for those that are held two timeouts.
        assert took < 2 * (QUICK.settle + QUICK.send_timeout) + 2, (cut, took)
    assert_stamps_are_unique(quick)


def assert_stamps_are_unique(world: World) -> None:
    seen: Counter[tuple[str, ...]] = Counter()
    for queue in world.queues:
        end = world.log.bounds([queue])[queue].max_offset
        at = 0
        while at < end:
            found = world.log.pull(queue, at, 1 << 20, 1 << 30, ("properties",)).column(0).to_pylist()
            at += len(found)
            seen.update(
                (str(queue), *(dict(pairs)[f"OMQ_{name}"] for name in ("BATCH", "PARTITION", "SEQUENCE")))
                for pairs in found
                if "OMQ_SINK" in dict(pairs)
            )
    assert seen
    assert max(seen.values()) == 1


@pytest.mark.usefixtures("small_requests")
def test_queues_on_one_connection_recover_from_the_loss_that_one_of_them_causes(
    quick: World, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    fates: dict[int, Callable[[], None]] = {
        3: lambda: cut_now(network, CUTS["answer held"]),
        9: lambda: current(network).reset(),
    }
    spoil(monkeypatch, fates)
    outbox = quick.outbox(network.address)
    staging = outbox.open(quick.batch(), 0)
    for part in range(5):
        for queue in quick.queues:
            staging.add(queue, rows(numbered(20, 20 * part)))
    receipt = staging.receipt()
    assert receipt.rows == dict.fromkeys(quick.queues, 100)
    for queue in quick.queues:
        assert quick.bodies(queue) == numbered(100)
    assert_stamps_are_unique(quick)


@pytest.mark.usefixtures("small_requests")
def test_without_identity_a_lost_answer_repeats_rows_and_loses_none(
    quick: World, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, {2: lambda: cut_now(network, CUTS["answer lost"])})
    outbox = quick.outbox(network.address)
    names = numbered(30)
    staging = outbox.open(SinkBatch(None), 0)
    staging.add(quick.queue, rows(names))
    receipt = staging.receipt()
    assert not outbox.publish(SinkBatch(None), [receipt]).replayed
    found = quick.bodies()
    assert list(dict.fromkeys(found)) == names
    assert 0 < len(found) - len(names) < len(names)
    assert not network.broker.requests(RequestCode.LOCK_BATCH_MQ)


# --- brokers and tasks that die


@pytest.mark.usefixtures("small_requests")
def test_a_broker_that_is_killed_and_comes_back(quick: World, monkeypatch: pytest.MonkeyPatch) -> None:
    restarts: list[threading.Thread] = []

    def kill() -> None:
        quick.cluster.broker.kill()
        restarts.append(threading.Thread(target=quick.cluster.broker.start))
        restarts[-1].start()

    spoil(monkeypatch, {5: kill})
    expected: list[str] = []
    for number in range(2):
        names = numbered(100, 1000 * number)
        receipt = quick.write(names, number)
        expected += names
        assert quick.bodies() == expected
        quick.outbox().publish(quick.batch(number), [receipt])
    assert len(restarts) == 1
    restarts[0].join()


@pytest.mark.usefixtures("small_requests")
@pytest.mark.parametrize("identity", [True, False])
def test_a_broker_that_stops_for_longer_than_a_send_may_take(
    quick: World, monkeypatch: pytest.MonkeyPatch, identity: bool
) -> None:
    """When it goes on it does what it had received before: not knowing that, the client waits before it looks."""
    expected: list[str] = []
    for number, seconds in enumerate((1.2, 2.5, 4.0)):
        timers: list[threading.Timer] = []

        def stop(seconds: float = seconds, timers: list[threading.Timer] = timers) -> None:
            quick.cluster.broker.pause()
            timers.append(threading.Timer(seconds, quick.cluster.broker.resume))
            timers[-1].start()

        names = numbered(60, 1000 * number)
        with monkeypatch.context() as patch:
            spoil(patch, {3: stop})
            if identity:
                quick.write(names, number)
            else:
                staging = quick.outbox().open(SinkBatch(None), 0)
                staging.add(quick.queue, rows(names))
                staging.receipt()
        for timer in timers:
            timer.join()
        assert len(timers) == 1
        expected += names
        found = quick.bodies()
        assert list(dict.fromkeys(found)) == expected
        if identity:
            assert found == expected


def die_after(staging: RocketMQStaging, sends: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this attempt nothing is heard after so many sends, no more than of a process that was killed."""
    line = staging._lines[next(iter(staging._lines))]
    real, done = line.writer._place.send, 0

    def send(body: SendBody) -> int:
        nonlocal done
        if done == sends:
            raise MemoryError
        done += 1
        return real(body)

    monkeypatch.setattr(line.writer._place, "send", send)


@pytest.mark.usefixtures("small_requests")
def test_a_retry_waits_for_a_dead_attempts_lock_and_sends_what_is_missing(
    quick: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = numbered(100)
    dead = quick.outbox().open(quick.batch(), 0)
    dead.add(quick.queue, rows(names[:1]))
    die_after(dead, 3, monkeypatch)
    dead.add(quick.queue, rows(names[1:]))
    with pytest.raises(MemoryError):
        dead.receipt()
    sent = len(quick.bodies())
    assert 0 < sent < 100
    began = time.monotonic()
    backwards = sorted(names, key=lambda name: (-ord(name[0]), int(name[1:])))
    receipt = quick.write(backwards)
    # For the lock of the dead one, which lives 3 s, and not for 60.
    assert time.monotonic() - began < 20
    found = quick.bodies()
    assert Counter(found) == Counter(names)
    assert found[:sent] == names[:sent]
    for key in "abc":
        assert [name for name in found if name[0] == key] == [name for name in names if name[0] == key]
    [report] = parse_token(quick.batch(), receipt).reports
    assert (report.found, report.sent, report.extra) == (sent, 100 - sent, 0)
    quick.outbox().publish(quick.batch(), [receipt])


CHILD = """
import sys
from tests.rocketmq.test_outbox import *
from orderedmq.rocketmq import encode
address, sink, topic, broker, number = sys.argv[1:]
encode.TARGET_BYTES = 2000
client = Client(address)
staging = RocketMQOutbox(client, RocketMQLog(client)).open(SinkBatch(sink, int(number)), 0)
for part in range(200):
    staging.add(MessageQueue(topic, broker, 0), rows(numbered(20, 20 * part)))
    print(part, flush=True)
staging.receipt()
"""


def test_processes_that_are_killed_while_they_write(quick: World) -> None:
    draw = random.Random(1)
    partly = 0
    for number in range(2):
        arguments = [quick.cluster.address, quick.sink, quick.topic, quick.queue.broker_name, str(number)]
        with subprocess.Popen([sys.executable, "-c", CHILD, *arguments], stdout=subprocess.PIPE, cwd=ROOT) as child:
            assert child.stdout is not None
            child.stdout.readline()
            before = 4000 * number
            while len(quick.bodies()) <= before:
                time.sleep(0.01)
            time.sleep(draw.random() * 0.2)
            child.kill()
        partly += before < len(quick.bodies()) < before + 4000
        quick.outbox().publish(quick.batch(number), [quick.write(numbered(4000), number)])
        assert quick.bodies() == numbered(4000) * (number + 1)
    assert partly
    assert_stamps_are_unique(quick)


@pytest.mark.usefixtures("small_requests")
def test_attempts_of_one_partition_take_turns_and_partitions_do_not_wait(quick: World) -> None:
    names = {partition: numbered(300, 1000 * partition) for partition in range(2)}
    with ThreadPoolExecutor(6) as pool:
        tasks = [pool.submit(quick.write, names[number % 2], 0, number % 2) for number in range(6)]
        receipts = [task.result() for task in tasks]
    found = quick.bodies()
    assert Counter(found) == Counter(names[0] + names[1])
    for partition in range(2):
        assert [name for name in found if name in set(names[partition])] == names[partition]
    assert not quick.outbox().publish(quick.batch(), receipts).replayed


def test_attempts_that_have_what_the_other_one_waits_for_both_end(quick: World) -> None:
    names = {queue: numbered(20, 100 * queue.queue_id) for queue in quick.queues[:2]}
    attempts = [quick.outbox().open(quick.batch(), 0) for _ in range(2)]
    orders = [quick.queues[:2], quick.queues[1::-1]]
    for turn in range(2):
        for attempt, order in zip(attempts, orders):
            attempt.add(order[turn], rows(names[order[turn]]))
        if turn == 0:
            until(lambda: all(quick.bodies(queue) for queue in names))
    with ThreadPoolExecutor(2) as pool:
        ended = [pool.submit(attempt.receipt) for attempt in attempts]
        receipts = [one.result(15) for one in ended]
    assert {queue: quick.bodies(queue) for queue in names} == names
    quick.outbox().publish(quick.batch(), receipts)


def test_an_attempt_at_work_keeps_its_queue_for_longer_than_a_lock_lives(quick: World) -> None:
    slow = quick.outbox().open(quick.batch(), 0)
    slow.add(quick.queue, rows(numbered(10)))
    until(lambda: len(quick.bodies()) == 10)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(quick.write, numbered(200, 1000))
        for part in range(1, 12):
            time.sleep(0.4)
            slow.add(quick.queue, rows(numbered(10, 10 * part)))
        slow.receipt()
        other.result(15)
    assert quick.bodies() == numbered(120) + numbered(200, 1000)


def test_an_attempt_that_slept_longer_than_its_lock_believes_what_another_sent_meanwhile(quick: World) -> None:
    sleeper = quick.outbox().open(quick.batch(), 0)
    sleeper.add(quick.queue, rows(numbered(10)))
    time.sleep(3.5)
    other = quick.write(numbered(30))
    sleeper.add(quick.queue, rows(numbered(20, 10)))
    assert sleeper.receipt().rows == other.rows
    assert quick.bodies() == numbered(30)


def test_an_attempt_of_a_batch_that_was_committed_meanwhile_sends_nothing(quick: World) -> None:
    late = quick.outbox().open(quick.batch(), 0)
    late.add(quick.queue, rows(numbered(10)))
    time.sleep(3.5)
    for number in range(2):
        quick.outbox().publish(quick.batch(number), [quick.write(numbered(20), number)])
    late.add(quick.queue, rows(numbered(20, 10, keys="xyz")))
    receipt = late.receipt()
    assert quick.bodies() == numbered(20) * 2
    with pytest.raises(SinkError) as caught:
        quick.outbox().publish(quick.batch(), [receipt])
    assert caught.value.sub == "REPLAY_DIFFERS"
    assert quick.outbox().publish(quick.batch(), [receipt], skip_differing_replay=True).replayed


@pytest.mark.usefixtures("small_requests")
@pytest.mark.parametrize("seed", range(int(os.environ.get("STORMS", "2"))))
def test_a_storm_leaves_each_row_once_in_the_order_of_its_key(
    quick: World, network: Network, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Connections cut anywhere, attempts that die or run twice, retries in another order, replays of committed batches."""
    draw = random.Random(seed)
    real = RocketMQQueue.send

    def send(self: RocketMQQueue, body: SendBody) -> int:
        fate = draw.random()
        if fate < 0.05:
            cut_now(network, CUTS[draw.choice([name for name in CUTS if "held" not in name])])
        elif fate < 0.06:
            cut_now(network, CUTS["answer held"])
        elif fate < 0.09:
            raise MemoryError
        return real(self, body)

    monkeypatch.setattr(RocketMQQueue, "send", send)
    expected: dict[MessageQueue, list[list[str]]] = {queue: [] for queue in quick.queues}

    def task(number: int, partition: int, given: dict[MessageQueue, list[str]]) -> Receipt:
        """Attempts until one ends well, each with a client of its own."""
        while True:
            staging = quick.outbox(network.address).open(quick.batch(number), partition)
            try:
                for queue in draw.sample(sorted(given), len(given)):
                    names = shuffled(given[queue], draw)
                    half = draw.randint(0, len(names))
                    staging.add(queue, rows(names[:half]))
                    staging.add(queue, rows(names[half:]))
                return staging.receipt()
            except MemoryError:
                staging.abandon()

    for number in range(8):
        plan = [
            {queue: numbered(draw.randint(0, 60), 10_000 * number + 1000 * partition) for queue in quick.queues}
            for partition in range(2)
        ]
        for given in plan:
            for queue, names in given.items():
                expected[queue].append(names)
        for _ in range(draw.randint(1, 2)):
            with ThreadPoolExecutor(4) as pool:
                # The first partition may have a second attempt at the same time.
                tasks = [pool.submit(task, number, p, plan[p]) for p in (0, 1, 0)[: draw.randint(2, 3)]]
                receipts = [one.result() for one in tasks]
            quick.outbox().publish(quick.batch(number), receipts)
    for queue, parts in expected.items():
        found = quick.bodies(queue)
        assert sorted(found) == sorted(name for part in parts for name in part)
        for part in parts:
            there = [name for name in found if name in set(part)]
            for key in "abc":
                assert [name for name in there if name[0] == key] == [name for name in part if name[0] == key]
    assert_stamps_are_unique(quick)


def shuffled(names: list[str], draw: random.Random) -> list[str]:
    """Another order, in which the rows of one key keep theirs."""
    waiting = {key: [name for name in names if name[0] == key] for key in {name[0] for name in names}}
    order = draw.sample([name[0] for name in names], len(names))
    return [waiting[key].pop(0) for key in order]


# --- how far a task looks


def fill(world: World, count: int) -> None:
    """Another producer's messages in the first queue."""
    world.log.append(world.queue, rows(numbered(count)))


def test_the_history_of_an_old_topic_is_not_read(quick: World, network: Network) -> None:
    fill(quick, 20_000)
    outbox = quick.outbox(network.address)
    for number in range(4):
        pulls = len(network.broker.requests(RequestCode.PULL_MESSAGE))
        receipt = quick.write(numbered(40), number, outbox=outbox)
        pulls = len(network.broker.requests(RequestCode.PULL_MESSAGE)) - pulls
        outbox.publish(quick.batch(number), [receipt])
        # The first batch asks whether the sink was forgotten; later ones find the batch before.
        assert pulls <= (2048 // 32 + 4 if number == 0 else 2), (number, pulls)
    assert quick.bodies()[20_000:] == numbered(40) * 4


@pytest.mark.parametrize("deleted", [True, False], ids=["group deleted", "bookmark lost"])
def test_a_forgotten_bookmark_costs_time_and_nothing_else(quick: World, deleted: bool) -> None:
    fill(quick, 5000)
    marks = Bookmarks(quick.client, quick.sink, quick.topic)

    def forget() -> None:
        if deleted:
            for master in quick.masters():
                quick.client.call_address(master, admin_requests.delete_group(marks.group), soon())
        else:
            marks.move(quick.queue, 0)

    names = numbered(100)
    quick.write(names)
    forget()
    receipt = quick.write(names)
    quick.outbox().publish(quick.batch(), [receipt])
    forget()
    assert not quick.outbox().publish(quick.batch(), [quick.write(names)]).replayed
    quick.outbox().publish(quick.batch(1), [quick.write(numbered(10), 1)])
    assert quick.bodies()[5000:] == names + numbered(10)


def test_a_bookmark_of_a_topic_that_was_made_anew_hides_nothing(quick: World) -> None:
    marks = Bookmarks(quick.client, quick.sink, quick.topic)
    quick.outbox().publish(quick.batch(), [quick.write(numbered(10))])
    marks.move(quick.queue, 1000)
    for number in (1, 2):
        receipt = quick.write(numbered(20, 100 * number), number)
        assert not quick.outbox().publish(quick.batch(number), [receipt]).replayed
    assert quick.bodies() == numbered(10) + numbered(20, 100) + numbered(20, 200)


# --- what remains


def groups_of_sinks(world: World) -> set[str]:
    """Consumer groups of sinks, in whatever a broker keeps: settings, offsets, topics of retries."""
    found: set[str] = set()
    for master in world.masters():
        configured = world.client.call_address(master, admin_requests.groups(), soon())
        offsets = world.client.call_address(master, group_requests.all_consumer_offsets(), soon())
        found.update(configured, offsets)
    found.update(world.client.topics(soon()))
    return {name for name in found if "OMQ_SINK" in name}


def test_a_sink_leaves_one_group_however_many_batches_it_wrote_and_nobody_is_shown_it(everywhere: World) -> None:
    world = everywhere
    before = groups_of_sinks(world)
    admin = RocketMQAdmin(world.client, world.log)
    outbox = world.outbox()
    for number in range(int(os.environ.get("BATCHES", "20"))):
        receipts = [world.write(numbered(2), number, partition, outbox) for partition in range(3)]
        outbox.publish(world.batch(number), receipts)
    [left] = groups_of_sinks(world) - before
    assert left == bookmark_group(world.sink, world.topic)
    assert not [name for name in admin.groups() if "OMQ_SINK" in name]
    assert not [lock for lock in admin.locks() if "OMQ_SINK" in lock.group]
    admin.delete_topic(world.topic)
    for master in world.masters():
        # Before 5.0 a broker keeps the offsets of a topic that is gone, and the command does not show them.
        assert left not in world.client.call_address(master, admin_requests.groups(), soon())
    assert world.cluster.version.startswith("4.") or left not in groups_of_sinks(world)


def test_the_group_of_a_sink_that_is_gone_can_be_deleted_by_its_name(quick: World) -> None:
    quick.outbox().publish(quick.batch(), [quick.write(numbered(2))])
    group = bookmark_group(quick.sink, quick.topic)
    assert group in groups_of_sinks(quick)
    RocketMQAdmin(quick.client, quick.log).delete_group(group)
    assert group not in groups_of_sinks(quick)


# --- refusals


def test_a_topic_that_is_deleted_meanwhile_is_not_made_again(quick: World) -> None:
    late = quick.outbox().open(quick.batch(), 0)
    late.add(quick.queue, rows(["a1"]))
    until(lambda: quick.bodies() == ["a1"])
    for master in quick.masters():
        # 5.x without a timer wheel has deleted it, and fails then.
        with contextlib.suppress(RocketMQError):
            quick.client.call_address(master, admin_requests.delete_topic(quick.topic), soon())
    with contextlib.suppress(TopicError):
        late.add(quick.queue, rows(["a2"]))
    with pytest.raises(TopicError) as caught:
        late.receipt()
    assert caught.value.sub == "MISSING"
    late.abandon()
    with pytest.raises(TopicError):
        quick.client.call_address(quick.masters()[0], requests.pull(quick.queue, "TOOLS_CONSUMER", 0, 1), soon())


def test_a_row_that_cannot_be_sent_is_named_and_leaves_the_queue_free(quick: World) -> None:
    bad = pa.RecordBatch.from_pylist([{"body": b"a"}, {"body": b"b", "properties": [("x", "\x01")]}], PRODUCER_SCHEMA)
    staging = quick.outbox().open(quick.batch(), 0)
    staging.add(quick.queue, rows(["a1", "a2"]))
    staging.add(quick.queue, bad)
    with pytest.raises(MessageError) as caught:
        staging.receipt()
    assert caught.value.sub == "BAD_PROPERTY"
    assert f"row 3 for queue {quick.queue}" in str(caught.value)
    staging.abandon()
    began = time.monotonic()
    quick.write(["a1", "a2", "a3"])
    assert time.monotonic() - began < 1
    assert quick.bodies() == ["a1", "a2", "a3"]


def test_a_warning_tells_of_messages_that_nobody_can_take_back(quick: World, caplog: pytest.LogCaptureFixture) -> None:
    quick.write(["a1", "a2"])
    receipt = quick.write(["a1", "a3"])
    with caplog.at_level(logging.WARNING, "orderedmq"):
        quick.outbox().publish(quick.batch(), [receipt])
    assert "1 messages of batch 0, partition 0" in caplog.text
    assert quick.bodies() == ["a1", "a2", "a3"]
