"""A sink's batches on real servers, despite faults of connections, brokers and tasks: each row is written once to its queue."""

from __future__ import annotations

import os
import pathlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from orderedmq.broker import Receipt, SinkBatch
from orderedmq.errors import RocketMQUnavailableError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.codec.encode import SendBody
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.rocketmq.sink.broker_lock import LockTiming
from orderedmq.rocketmq.sink.broker_queue import RocketMQQueue
from orderedmq.rocketmq.sink.message_stamp import read_stamp
from tests import evidence
from tests.live.rocketmq.outbox_world import QUICK, SHORT_SENDS, World, numbered, rows, spoil
from tests.live.rocketmq.proxy import Connection, Network, Path, Way
from tests.waits import until

ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture
def quick(quick_locks: Cluster) -> Iterator[World]:
    with World(quick_locks, QUICK) as world:
        yield world


@pytest.fixture
def timing() -> LockTiming:
    """The timing of ``usual``, for tests in which no lock has to expire."""
    return SHORT_SENDS


@pytest.fixture
def quick_network(quick: World) -> Iterator[Network]:
    with Network.before(quick.cluster) as network:
        yield network


# --- answers that do not arrive


@pytest.fixture
def small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orderedmq.rocketmq.codec.encode.TARGET_BYTES", 2000)


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


def closed(network: Network) -> list[Connection]:
    return [connection for connection in network.broker.connections if connection.closed.is_set()]


def cut_now(network: Network, path: Callable[[Connection], Path]) -> None:
    network.broker.spoil_sends(path)


@pytest.mark.fault("network")
@pytest.mark.usefixtures("small_requests")
def test_a_cut_at_any_byte_of_a_send_leaves_each_row_once_in_order(
    usual: World, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = numbered(60)
    outbox = usual.outbox(network.address)
    expected: list[str] = []
    for number, (cut, path) in enumerate(CUTS.items()):
        ended = len(closed(network))
        with monkeypatch.context() as patch:
            # Break the first and the third request.
            spoil(patch, dict.fromkeys((1, 3), partial(cut_now, network, path)))
            receipt = usual.write(names, number, outbox=outbox)
        expected += names
        assert usual.bodies() == expected, cut
        assert not outbox.publish(usual.batch(number), [receipt]).replayed
        # To the proxy, a held connection looks open.
        until(lambda: "held" in cut or len(closed(network)) >= ended + 2)  # noqa: B023 (called at once)
    evidence.note_lists({"": expected}, {"": usual.bodies()}, runs=2 * len(CUTS))
    assert_stamps_are_unique(usual)


def assert_stamps_are_unique(world: World) -> None:
    seen: Counter[tuple[MessageQueue, int, str, int, int]] = Counter()
    for queue in world.queues:
        end = world.log.bounds([queue])[queue].max_offset
        at = 0
        while at < end:
            columns = world.log.pull(queue, at, 1 << 20, 1 << 30, ("properties",)).column(0).to_pylist()
            at += len(columns)
            seen.update(
                (queue, stamp.batch, stamp.run, stamp.partition, stamp.sequence)
                for pairs in columns
                if (stamp := read_stamp(dict(pairs), world.sink)) is not None
            )
    assert seen
    assert max(seen.values()) == 1


# --- brokers and tasks that die


@pytest.mark.fault("killed process")
@pytest.mark.usefixtures("small_requests")
def test_each_row_is_stored_once_although_the_broker_is_killed_and_restarted(
    usual: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    restarts: list[threading.Thread] = []

    def kill() -> None:
        usual.cluster.broker.kill()
        restarts.append(threading.Thread(target=usual.cluster.broker.start))
        restarts[-1].start()

    spoil(monkeypatch, {5: kill})
    expected: list[str] = []
    for number in range(2):
        names = numbered(100, 1000 * number)
        receipt = usual.write(names, number)
        expected += names
        assert usual.bodies() == expected
        usual.outbox().publish(usual.batch(number), [receipt])
    assert len(restarts) == 1
    restarts[0].join()
    evidence.note_lists({"": expected}, {"": usual.bodies()})


@pytest.mark.usefixtures("small_requests")
@pytest.mark.parametrize("identity", [True, False])
def test_each_row_is_stored_once_although_the_broker_pauses_for_longer_than_a_send(
    quick: World, monkeypatch: pytest.MonkeyPatch, identity: bool
) -> None:
    """When the broker resumes, it executes requests that it received before the pause, so the client must wait before it searches."""
    broker, expected = quick.cluster.broker, list[str]()
    gave_up = threading.Event()
    pause = RocketMQQueue.pause

    def giving_up(self: RocketMQQueue, error: RocketMQUnavailableError, failures: int) -> None:
        gave_up.set()
        pause(self, error, failures)

    monkeypatch.setattr(RocketMQQueue, "pause", giving_up)
    # Pause first until the client gives up the send, then until its lock has also expired.
    for number, seconds in enumerate((0.0, 3.2) if identity else (0.0,)):
        going_on: list[threading.Thread] = []

        def go_on(seconds: float = seconds) -> None:
            # The wait is limited, because after a send was given up, the next send waits for the broker.
            gave_up.wait(5)
            time.sleep(seconds)
            broker.resume()

        def stop(going_on: list[threading.Thread] = going_on, go_on: Callable[[], None] = go_on) -> None:
            gave_up.clear()
            broker.pause()
            going_on.append(threading.Thread(target=go_on))
            going_on[-1].start()

        names = numbered(60, 1000 * number)
        with monkeypatch.context() as patch:
            spoil(patch, {3: stop})
            if identity:
                quick.write(names, number)
            else:
                staging = quick.outbox().open(SinkBatch(None), 0)
                staging.add(quick.queue, rows(names))
                staging.receipt()
        for thread in going_on:
            thread.join()
        assert len(going_on) == 1
        expected += names
        bodies = quick.bodies()
        assert list(dict.fromkeys(bodies)) == expected
        if identity:
            assert bodies == expected


@pytest.mark.fault("network")
@pytest.mark.holds("sink once")
@pytest.mark.usefixtures("small_requests")
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, int(os.environ.get("STORMS", "3"))))]
)
def test_a_storm_leaves_each_row_once_in_the_order_of_its_key(
    quick: World, quick_network: Network, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Connections are cut, attempts die or run twice, and retries change the order of rows, the partitions or the whole run."""
    draw = random.Random(seed)
    real = RocketMQQueue.send

    def send(self: RocketMQQueue, body: SendBody) -> Callable[[], int]:
        fate = draw.random()
        if fate < 0.05:
            cut = CUTS[draw.choice([name for name in CUTS if "held" not in name])]
            quick_network.broker.spoil_sends(cut, later=False)
        elif fate < 0.06:
            quick_network.broker.spoil_sends(CUTS["answer held"], later=False)
        elif fate < 0.09:
            raise MemoryError
        elif fate < 0.10:
            quick_network.broker.each(Connection.reset)
        return real(self, body)

    monkeypatch.setattr(RocketMQQueue, "send", send)
    expected: dict[MessageQueue, list[list[str]]] = {queue: [] for queue in quick.queues}

    def task(batch: SinkBatch, partition: int, given: dict[MessageQueue, list[str]], dies: bool) -> Receipt | None:
        """Run attempts, each with a new client, until one succeeds. If the driver is going to die, run only one."""
        while True:
            staging = quick.outbox(quick_network.address).open(batch, partition)
            try:
                for queue in draw.sample(sorted(given), len(given)):
                    names = shuffled(given[queue], draw)
                    half = draw.randint(0, len(names))
                    staging.add(queue, rows(names[:half]))
                    staging.add(queue, rows(names[half:]))
                return staging.receipt()
            except MemoryError:
                staging.abandon()
                if dies:
                    return None

    for number in range(6):
        plan = {queue: numbered(draw.randint(0, 120), 10_000 * number) for queue in quick.queues}
        for queue, names in plan.items():
            expected[queue].append(names)
        runs = draw.randint(1, 3)
        for run in range(runs):
            count = draw.randint(1, 3)
            homes = {key: draw.randrange(count) for key in "abc"}
            parts = [
                {queue: [name for name in names if homes[name[0]] == part] for queue, names in plan.items()}
                for part in range(count)
            ]
            batch = quick.batch(number, f"job {number} {run}")
            dies = run < runs - 1 and draw.random() < 0.5
            with ThreadPoolExecutor(4) as pool:
                # Sometimes the first partition has a second attempt at the same time.
                attempts = [*range(count), *([0] if draw.random() < 0.5 else [])]
                tasks = [pool.submit(task, batch, part, parts[part], dies) for part in attempts]
                receipts = [receipt for task in tasks if (receipt := task.result()) is not None]
            if not dies:
                quick.outbox().publish(batch, receipts)
    sent = {queue: [name for names in batches for name in names] for queue, batches in expected.items()}
    # Only the names of a key within a batch have an order, which the assertions below compare.
    evidence.note_lists(
        {queue: sorted(names) for queue, names in sent.items()}, {queue: sorted(quick.bodies(queue)) for queue in sent}
    )
    for queue, batches in expected.items():
        bodies = quick.bodies(queue)
        assert sorted(bodies) == sorted(name for names in batches for name in names)
        for names in batches:
            there = [name for name in bodies if name in set(names)]
            for key in "abc":
                assert [name for name in there if name[0] == key] == [name for name in names if name[0] == key]
    assert_stamps_are_unique(quick)


def shuffled(names: list[str], draw: random.Random) -> list[str]:
    """Return the names in a random order that keeps the order of each key."""
    waiting = {key: [name for name in names if name[0] == key] for key in {name[0] for name in names}}
    order = draw.sample([name[0] for name in names], len(names))
    return [waiting[key].pop(0) for key in order]
