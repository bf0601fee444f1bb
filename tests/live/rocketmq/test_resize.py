"""Topics of real servers are resized, under Java's ordered producers, with commands that are killed and interrupted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError

from ordered_sink.writer import target_queues
from orderedmq import connect
from orderedmq.broker import Broker, Receipt, SinkBatch
from orderedmq.errors import OrderedMQError
from orderedmq.model import MessageQueue
from orderedmq.options.parse import parse
from orderedmq.options.sink import SinkOptions
from orderedmq.rocketmq import resizing
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.rocketmq.messages import log, resizes
from orderedmq.rocketmq.resizing import TopicResize
from orderedmq.rocketmq.wire import admin_requests
from orderedmq.rocketmq.wire.admin_requests import TopicConfig
from orderedmq.rocketmq.wire.route import PAUSED
from tests.contract.support import bodies, refused
from tests.contract.support import rows as some_rows
from tests.live.rocketmq.outbox_world import World, numbered, rows
from tests.live.rocketmq.peers import Peers
from tests.waits import soon, until

ROOT = Path(__file__).parents[3]
KEYS = [f"key-{number}" for number in range(12)]
#: Where a command is killed: the number of the call of a step, and whether before or after it.
POINTS = [
    ("_put", 1, True),
    ("_ends", 1, True),
    ("record", 1, False),
    ("record", 1, True),
    ("_put", 2, False),
    ("_put", 2, True),
]
#: Runs the command with a pause of so many seconds. It is killed at a point, or not.
COMMAND = """
import os, signal, sys
from orderedmq.cli import app
from orderedmq.rocketmq import resizing
from orderedmq.rocketmq.messages import resizes

address, topic, queues, pause, age, step, call, after = sys.argv[1:]
resizing.PAUSE, resizes.AGE = float(pause), float(age)
resizing.AGE = resizes.AGE
resizing.SETTLED = min(resizing.SETTLED, resizing.AGE)
owner = resizes.Resizes if step == "record" else resizing.TopicResize
calls = 0
if step:
    original = getattr(owner, step)
    def replaced(*arguments):
        global calls
        calls += 1
        for now in ("False", "True"):
            if calls == int(call) and after == now:
                os.kill(os.getpid(), signal.SIGKILL)
            answer = original(*arguments) if now == "False" else answer
        return answer
    setattr(owner, step, replaced)
app(["topic", "resize", topic, "--queues", queues, "--namesrv", address])
"""


def command(
    cluster: Cluster,
    topic: str,
    queues: int,
    pause: float = 0.0,
    age: float = 0.0,
    kill: tuple[str, int, bool] = ("", 0, False),
) -> int:
    arguments = [cluster.address, topic, *map(str, (queues, pause, age, *kill))]
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments], cwd=ROOT, check=False, stderr=subprocess.DEVNULL
    ).returncode


@pytest.fixture
def unpaused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resize without a pause, because no other producer runs."""
    for module, names in ((resizing, ("PAUSE", "SETTLED", "AGE", "PATIENCE")), (resizes, ("AGE",)), (log, ("ROUTE_FRESH",))):
        for name in names:
            monkeypatch.setattr(module, name, 0.0)


@pytest.fixture
def topic(quick_offsets: Cluster) -> Iterator[tuple[Broker, str]]:
    """A connection, and a topic of three queues."""
    with connect(namesrv_addr=quick_offsets.address) as broker:
        name = f"t-{uuid.uuid4().hex[:8]}"
        broker.admin.create_topic(name, 3)
        yield broker, name


def config_of(broker: Any, name: str) -> TopicConfig:
    request = admin_requests.topic_config(name)
    config: TopicConfig = broker.log._client.call(request, soon(), topic=name, broker_name="broker-a")
    return config


def staged(world: World, names: list[str], partition: int = 0, resize: bool = False, sink: str | None = "sink") -> Receipt:
    """Run a task of a batch, whose keys choose among the batch's queues. Its topic may be resized meanwhile."""
    staging = world.outbox().open(SinkBatch(sink, 0, job="job", topic=world.topic), partition)
    try:
        queues = staging.targets(world.topic, world.queues)
        for name in names:
            staging.add(queues[ord(name[0]) % len(queues)], rows([name]))
            if resize:
                TopicResize(world.client, world.log, world.topic, 5).run()
        return staging.receipt()
    except OrderedMQError:
        staging.abandon()
        raise


def sizes(broker: Broker, name: str) -> list[tuple[int, int]]:
    return [(len(resize.former), len(resize.queues)) for resize in broker.log.resizes([name])]


@pytest.mark.holds("resize")
@pytest.mark.parametrize(
    "point", [pytest.param(point, marks=[pytest.mark.nightly] * (point != POINTS[3])) for point in POINTS], ids=str
)
def test_a_command_that_was_killed_is_finished_by_the_next_one_with_any_number(
    quick_offsets: Cluster, topic: tuple[Broker, str], unpaused: None, point: tuple[str, int, bool]
) -> None:
    broker, name = topic
    broker.log.append({queue: some_rows("ab") for queue in broker.log.queues(name)})
    assert command(quick_offsets, name, 5, kill=point) == -signal.SIGKILL
    finished = point == POINTS[-1]
    assert bool(broker.log.route(name, fresh=True).publish_list()) is finished  # type: ignore[attr-defined]
    assert len(sizes(broker, name)) == (point in POINTS[3:])
    # The same number finishes the resize, and the former one cancels it.
    for queues in (5, 3):
        assert broker.admin.resize_topic(name, queues).queues == queues
        assert len(broker.log.targets(name)) == queues
        assert sizes(broker, name)[-1][1] == queues
    assert [list(resize.ends.values())[:3] for resize in broker.log.resizes([name])] == [[2, 2, 2]] * len(sizes(broker, name))
    assert config_of(broker, name)[:3] == (5, 3, 6)


@pytest.mark.parametrize("step", ["_restless", "_ends"])
def test_ctrl_c_gives_the_permission_back(
    topic: tuple[Broker, str], unpaused: None, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    broker, name = topic

    def interrupted(*_: Any) -> None:
        assert broker.log.route(name, fresh=True).publish_list() == ()  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    before = config_of(broker, name)
    monkeypatch.setattr(TopicResize, step, interrupted)
    with pytest.raises(KeyboardInterrupt):
        broker.admin.resize_topic(name, 5)
    assert config_of(broker, name) == before
    assert len(broker.log.targets(name)) == 3


def test_of_two_commands_the_earlier_one_leaves_the_topic_to_the_other(
    topic: tuple[Broker, str], unpaused: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, name = topic
    original = TopicResize._ends

    def meanwhile(self: TopicResize, queues: list[MessageQueue]) -> dict[MessageQueue, int]:
        monkeypatch.setattr(TopicResize, "_ends", original)
        broker.admin.resize_topic(name, 4)
        return original(self, queues)

    monkeypatch.setattr(TopicResize, "_ends", meanwhile)
    with refused("ROCKETMQ.TIMEOUT", "another command"):
        broker.admin.resize_topic(name, 5)
    assert (len(broker.log.targets(name)), sizes(broker, name)) == (4, [(3, 4)])


def test_a_writer_waits_for_a_resize_and_not_for_ever_and_the_former_number_cancels_it(
    quick_offsets: Cluster, topic: tuple[Broker, str], unpaused: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, name = topic
    config = config_of(broker, name)._replace(message_type=None)
    resize = TopicResize(broker.log._client, broker.log, name, 5)  # type: ignore[attr-defined, arg-type]
    resize._check()
    resize._put(config._replace(perm=4, sys_flag=PAUSED))
    monkeypatch.setattr(log, "RESIZE_PATIENCE", 0.1)
    with refused("TOPIC.NO_SUCH_QUEUE", "topic resize"):
        broker.log.targets(name)
    assert broker.admin.resize_topic(name, 3).queues == 3
    assert (len(broker.log.targets(name)), sizes(broker, name)) == (3, [])
    resize._put(config._replace(perm=4, sys_flag=PAUSED))
    monkeypatch.setattr(log, "RESIZE_PATIENCE", 60.0)
    resizer = threading.Thread(target=broker.admin.resize_topic, args=(name, 5))
    resizer.start()
    assert len(broker.log.targets(name)) == 5
    resizer.join()
    # The option has the former number, for a missing topic.
    address = {"namesrvAddr": quick_offsets.address, "topic": name, "topicQueueNums": "3"}
    assert len(target_queues(broker, name, parse(SinkOptions, address, streaming=True))) == 5


def test_settings_that_producers_do_not_see_and_producers_that_ignore_them_are_refused(
    two_brokers: Cluster, topic: tuple[Broker, str], unpaused: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, name = topic
    client = broker.log._client  # type: ignore[attr-defined]
    with connect(namesrv_addr=two_brokers.address) as other:
        other.admin.create_topic(name, 2)
        with refused("OPTION.UNSUPPORTED", "2 brokers"):
            other.admin.resize_topic(name, 4)
    before = config_of(broker, name)._replace(message_type=None)

    def put(config: TopicConfig) -> None:
        client.call(admin_requests.put_topic(name, config), soon(), topic=name, broker_name="broker-a")

    for config, words in (
        (before._replace(perm=4), "read-only"),
        (before._replace(message_type="TRANSACTION"), "transactions"),
    ):
        put(config)
        with refused("OPTION.UNSUPPORTED", words):
            broker.admin.resize_topic(name, 5)
    put(before._replace(message_type="NORMAL"))
    ends = iter(range(100))
    original = TopicResize._ends
    monkeypatch.setattr(TopicResize, "_ends", lambda self, queues: {**original(self, queues), queues[0]: next(ends)})
    with refused("ROCKETMQ.TIMEOUT", "without regard to its permission"):
        broker.admin.resize_topic(name, 5)
    assert (len(broker.log.targets(name)), sizes(broker, name)) == (3, [])


@pytest.mark.holds("sink once", "resize")
def test_a_resize_waits_for_the_batch_that_a_sink_has_begun(quick_offsets: Cluster, unpaused: None) -> None:
    """A later task of the batch may send during the pause, and no other batch begins."""
    with World(quick_offsets) as world, connect(namesrv_addr=quick_offsets.address) as broker:
        first, second = numbered(6), numbered(6, 6)
        receipts = [staged(world, first)]
        [group] = broker.admin.groups(of_sinks=True)
        with refused("GROUP.IN_USE", group):
            broker.admin.resize_topic(world.topic, 5)
        assert len(broker.log.targets(world.topic)) == 3
        resize = TopicResize(world.client, world.log, world.topic, 5)
        config, _ = resize._check()
        resize._put(config._replace(perm=4, sys_flag=PAUSED))
        receipts.append(staged(world, second, 1))
        world.outbox().publish(SinkBatch("sink", 0, job="job", topic=world.topic), receipts)
        assert broker.admin.resize_topic(world.topic, 5).queues == 5
        assert sorted(body for queue in world.queues for body in world.bodies(queue)) == sorted(first + second)


def test_a_batch_write_that_no_attempt_would_recognise_fails_when_its_topic_was_resized(
    quick_offsets: Cluster, unpaused: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A pause is longer than a route is kept.
    monkeypatch.setattr("orderedmq.rocketmq.net.client.ROUTE_AGE", 0.0)
    with World(quick_offsets) as world:
        staged(world, numbered(6), sink=None)
        with refused("TOPIC.QUEUE_COUNT", world.topic):
            staged(world, numbered(6), resize=True, sink=None)


# -- real pauses


class Sender(threading.Thread):
    """Java's ordered producer. Like its users, it sends again after an error that says that nothing was sent."""

    def __init__(self, peers: Peers, cluster: Cluster, topic: str) -> None:
        super().__init__(daemon=True)
        self._producer = peers.producer(cluster.address, f"p-{topic}", pollNameServerInterval=1000)
        self._topic = topic
        self._ended = threading.Event()
        self.queues: set[int] = set()
        self.refused = 0
        self.sent = 0

    def run(self) -> None:
        while not self._ended.is_set():
            for key in KEYS:
                self._send(key)
            self.sent += 1

    def _send(self, key: str) -> None:
        while True:
            try:
                sent = self._producer.send(self._topic, f"{key} {self.sent}".encode(), key)
            except Py4JJavaError as error:
                # Neither has sent anything: the topic has no queues, or the nameserver is away.
                if not any(words in str(error.java_exception) for words in ("No route info", "IllegalStateException")):
                    raise
                self.refused += 1
                time.sleep(0.1)
            else:
                self.queues.add(sent.queue[1])
                return

    def end(self) -> None:
        self._ended.set()
        self.join()
        self._producer.stop()


class Query:
    """A query that copies a topic to ``out``."""

    def __init__(self, folder: Path, cluster: Cluster, topic: str, out: str) -> None:
        common = {"namesrvAddr": cluster.address}
        source = {**common, "topic": topic, "consumerGroup": "g", "startingOffsets": "earliest", "maxOffsetsPerTrigger": "300"}
        sink = {**common, "topic": out, "onKeyConflict": "ignore"}
        (folder / "query.json").write_text(json.dumps({"id": str(uuid.uuid4()), "source": source, "sink": sink}))
        self.log = folder / "log"
        with self.log.open("wb") as log:
            run = [sys.executable, "-m", "tests.live.clusters.topology_query", str(folder)]
            self._process = subprocess.Popen(run, cwd=ROOT, stdin=subprocess.PIPE, stderr=log)

    def require_running(self) -> bool:
        assert self._process.poll() is None, self.log.read_text()[-2000:]
        return True

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.mark.nightly
@pytest.mark.holds("resize")
def test_no_key_of_a_java_producer_is_out_of_order_lost_or_twice_over_five_resizes_with_killed_commands(
    quick_offsets: Cluster, peers: Peers, topic: tuple[Broker, str], tmp_path: Path
) -> None:
    broker, name = topic
    out = f"{name}-out"
    broker.admin.create_topic(out, 1)
    query: Query | None = None
    sender = Sender(peers, quick_offsets, name)
    sender.start()

    def size() -> int:
        return sum(at.max_offset for at in broker.log.bounds(broker.log.queues(out)).values())

    def copied(messages: int) -> None:
        until(lambda: query and query.require_running() and size() >= messages, "the query copies messages")

    try:
        for number, queues in enumerate((5, 2, 6, 4, 7)):
            # The producer asks every second. Its last message is on its way for less than the rest of the pause.
            assert command(quick_offsets, name, queues, 5.0, resizes.AGE, POINTS[number]) == -signal.SIGKILL
            if number % 2:
                quick_offsets.namesrv.restart()
            assert command(quick_offsets, name, queues, 5.0, resizes.AGE) == 0
            until(lambda: len(broker.log.targets(name)) == queues, "the nameserver knows the queues")  # noqa: B023
            if number == 1:
                # The query begins with three generations of messages.
                query = Query(tmp_path, quick_offsets, name, out)
            sender.queues.clear()
            sent = sender.sent
            until(lambda: sender.sent > sent + 1, "the producer sends again")  # noqa: B023
            assert len(sender.queues) > 1
        sender.end()
        copied(sender.sent * len(KEYS))
    finally:
        if query is not None:
            query.kill()
    assert sender.refused
    copies: dict[str, list[int]] = defaultdict(list)
    for body in bodies(broker, MessageQueue(out, "broker-a", 0)):
        key, sent_number = body.split()
        copies[key].append(int(sent_number))
    assert copies == {key: list(range(sender.sent)) for key in KEYS}


@pytest.mark.nightly
def test_a_recorded_resize_survives_the_death_of_its_broker_and_of_the_nameserver(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker writes offsets to disk every 5 s."""
    monkeypatch.setattr(resizing, "PAUSE", 0.0)
    name = f"t-{uuid.uuid4().hex[:8]}"
    with connect(namesrv_addr=cluster.address) as broker:
        broker.admin.create_topic(name, 2)
        broker.log.append({queue: some_rows("ab") for queue in broker.log.queues(name)})
        broker.admin.resize_topic(name, 3)
        before = broker.log.resizes([name])
        cluster.broker.kill()
        cluster.namesrv.kill()
        cluster.start()
    with connect(namesrv_addr=cluster.address) as broker:
        until(lambda: broker.log.targets(name), "the topic is known")
        assert broker.log.resizes([name]) == before
        assert (len(before[0].queues), len(broker.log.targets(name))) == (3, 3)
        broker.admin.delete_topic(name)
        broker.admin.create_topic(name, 2)
        until(lambda: not broker.log.resizes([name]), "the numbers of the deleted topic are gone")
