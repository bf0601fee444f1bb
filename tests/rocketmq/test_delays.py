"""Delayed rows on real servers: they arrive when due, in the chosen queue, and do not affect the guarantees for other rows."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from orderedmq.broker import Published, Receipt
from orderedmq.cli import app
from orderedmq.errors import MessageError, OptionError
from orderedmq.model import OffsetRange
from orderedmq.rocketmq.local.jars import DEFAULT_VERSION
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.tools.producer import Producer
from tests.rocketmq.outbox_world import QUICK, World, numbered, rows
from tests.rocketmq.peers import Peers
from tests.waits import first_good, until

TIMES = pa.timestamp("ms", "UTC")
COLUMNS = ("queue_offset", "body", "sharding_key", "born_timestamp", "store_timestamp", "properties")


def mixed(ordinary: Sequence[str], delayed: Sequence[str], column: str, value: int) -> pa.RecordBatch:
    """Return ordinary rows with the delayed rows in between. ``value`` is a delay level or a time in ms since 1970."""
    names = [*ordinary[:3], *delayed, *ordinary[3:]]
    kind = pa.int32() if column == "delay_time_level" else TIMES
    values = [value if name in delayed else None for name in names]
    made = rows(names)
    made = made.append_column("tags", pa.array([f"tag-{name}" for name in names]))
    return made.append_column(column, pa.array(values, pa.int64()).cast(kind))


def attempt(world: World, given: pa.RecordBatch, batch: int = 0) -> Receipt:
    staging = world.outbox().open(world.batch(batch), 0)
    staging.add(world.queue, given)
    return staging.receipt()


def named(world: World, first: str) -> list[str]:
    """Return the bodies in the queue that begin with ``first``, in their order."""
    return [body for body in world.bodies() if body.startswith(first)]


def waits(world: World, first: str) -> list[float]:
    """Return, for each message whose body begins with ``first``, the seconds from sending until it was stored in its queue."""
    found = world.log.pull(world.queue, 0, 1 << 20, 1 << 30, COLUMNS).to_pylist()
    return [
        (row["store_timestamp"] - row["born_timestamp"]).total_seconds()
        for row in found
        if row["body"].startswith(first.encode())
    ]


@pytest.fixture
def everywhere(every_version: Cluster) -> Iterator[World]:
    with World(every_version) as made:
        yield made


@pytest.fixture
def timed(quick_locks: Cluster) -> Iterator[World]:
    with World(quick_locks, QUICK) as made:
        yield made


@pytest.mark.holds("delayed rows")
def test_delayed_rows_come_later_and_the_others_are_there_once_in_order(everywhere: World, peers: Peers) -> None:
    world = everywhere
    ordinary, late = numbered(40), [f"d{number}" for number in range(40)]
    given = mixed(ordinary, late, "delay_time_level", 1)
    with_java = peers.concurrent_consumer(world.cluster.address, f"java-{world.topic}", world.topic, lambda _: True)
    # The first attempt's batch is not committed, so the second attempt sends the delayed rows again.
    for _ in range(2):
        receipt = attempt(world, given)
    published = world.outbox().publish(world.batch(), [receipt])
    assert published == Published(False, {world.queue: OffsetRange(0, 40)})
    # A committed batch is not sent again.
    assert world.outbox().publish(world.batch(), [attempt(world, given)]).replayed
    first_good(lambda: Counter(named(world, "d")), lambda found: found == Counter(late * 2))
    assert [name for name in world.bodies() if not name.startswith("d")] == ordinary
    assert min(waits(world, "d")) >= 1.0
    # Delayed rows that arrived in between must not hide rows that an earlier attempt of the next batch sent.
    for _ in range(2):
        receipt = world.write(["e1", "e2"], 1)
    world.outbox().publish(world.batch(1), [receipt])
    assert world.bodies()[-2:] == ["e1", "e2"]
    assert len(world.bodies()) == 122
    received = {one.body.decode(): one for one in with_java.wait(122)}
    with_java.stop()
    assert received.keys() == {*ordinary, *late, "e1", "e2"}
    for name in late:
        one = received[name]
        assert (one.queue[1], one.key, one.tags) == (world.queue.queue_id, "d", f"tag-{name}")
        assert one.properties["REAL_TOPIC"] == world.topic
        assert not any(name.startswith("OMQ") for name in one.properties)


@pytest.mark.holds("delayed rows")
def test_a_batch_of_delayed_rows_alone_is_known_when_it_comes_again(everywhere: World) -> None:
    world = everywhere
    given = mixed([], ["d0", "d1"], "delay_time_level", 1)
    assert world.outbox().publish(world.batch(3), [attempt(world, given, 3)]) == Published(False, {})
    assert world.outbox().publish(world.batch(3), [attempt(world, given, 3)]) == Published(True, {})
    world.write(["e1"], 4)
    world.outbox().publish(world.batch(4), [world.write(["e1"], 4)])
    until(lambda: sorted(world.bodies()) == ["d0", "d1", "e1"], "every row is stored once")


@pytest.mark.holds("delayed rows")
def test_what_the_broker_would_not_delay_as_asked_is_refused_before_anything_is_sent(everywhere: World) -> None:
    world = everywhere
    with pytest.raises(MessageError, match=r"BAD_DELAY.*delay_time_level is 19.*levels 1 to 18"):
        attempt(world, mixed([], ["d0"], "delay_time_level", 19))
    soon = int(time.time() * 1000) + 2000
    outbox = world.outbox()
    given = mixed([], ["d0", "d1"], "deliver_timestamp", soon)
    reasons = {"4.9.7": "older than RocketMQ 5.0", DEFAULT_VERSION: "timerWheelEnable is false"}
    why = reasons.get(world.cluster.version)
    if why is None:
        outbox.require_delays(["deliver_timestamp"], world.topic)
        attempt(world, given)
        until(lambda: sorted(world.bodies()) == ["d0", "d1"], "both rows are stored")
        return
    for refused in (
        lambda: outbox.require_delays(["deliver_timestamp"], world.topic),
        lambda: outbox.require_delays(["deliver_timestamp"], "no-such-topic"),
        lambda: outbox.require_delays(["deliver_timestamp"], None),
        lambda: attempt(world, given),
    ):
        with pytest.raises(OptionError, match=rf"UNSUPPORTED.*deliver_timestamp.*{why}"):
            refused()
    outbox.require_delays(["delay_time_level"], world.topic)
    assert world.bodies() == []


CHILD = """
import sys
from orderedmq.broker import SinkBatch
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.messages.log import RocketMQLog
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.sink.outbox import RocketMQOutbox
from tests.rocketmq.outbox_world import numbered
from tests.rocketmq.test_delays import mixed
address, sink, topic, broker, due = sys.argv[1:]
client = Client(address)
staging = RocketMQOutbox(client, RocketMQLog(client)).open(SinkBatch(sink, 0), 0)
staging.add(MessageQueue(topic, broker, 0), mixed(numbered(500), [f"d{number}" for number in range(50)], "deliver_timestamp", int(due)))
staging.start()
print("added", flush=True)
sys.stdin.readline()
"""


@pytest.mark.holds("delayed rows")
@pytest.mark.nightly
def test_a_killed_attempt_loses_no_delayed_row_and_rows_come_at_their_time(timed: World) -> None:
    due = int(time.time() * 1000) + 3000
    late = [f"d{number}" for number in range(50)]
    arguments = [timed.cluster.address, timed.sink, timed.topic, timed.queue.broker_name, str(due)]
    command = [sys.executable, "-c", CHILD, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as child:
        assert child.stdout is not None
        child.stdout.readline()
        until(lambda: bool(timed.bodies()))
        child.kill()
    given = mixed(numbered(500), late, "deliver_timestamp", due)
    timed.outbox().publish(timed.batch(), [attempt(timed, given)])
    # The killed attempt had not sent any delayed rows.
    first_good(lambda: Counter(named(timed, "d")), lambda found: found == Counter(late))
    assert [name for name in timed.bodies() if not name.startswith("d")] == numbered(500)
    found = timed.log.pull(timed.queue, 0, 1 << 20, 1 << 30, COLUMNS).to_pylist()
    stored = [int(row["store_timestamp"].timestamp() * 1000) for row in found if row["body"].startswith(b"d")]
    # The broker's timer has a precision of one second (timerPrecisionMs).
    assert min(stored) > due - 1000
    # A row whose time is in the past is delivered immediately; a time too far in the future is refused with an error that names
    # the row.
    attempt(timed, mixed([], ["p0"], "deliver_timestamp", due - 1), 1)
    assert named(timed, "p") == ["p0"]
    with pytest.raises(MessageError, match=r"BAD_DELAY.*row 0 of the delayed rows.*timerMaxDelaySec"):
        attempt(timed, mixed([], ["f0"], "deliver_timestamp", due + 1000 * 3600 * 24 * 4), 2)


@pytest.mark.holds("delayed by a producer")
def test_a_producer_and_the_command_delay_messages(timed: World) -> None:
    def bodies() -> list[str]:
        return [body for queue in timed.queues for body in timed.bodies(queue)]

    due = int(time.time() * 1000) + 2000
    producer = Producer(timed.log, timed.topic)
    producer.send(pa.record_batch({"body": ["n0", "p1"], "delay_time_level": [None, 1], "tags": ["a", "b"]}))
    producer.send(rows(["p2"]).select(["body"]), deliver_timestamp=datetime.fromtimestamp(due / 1000, UTC))
    with pytest.raises(OptionError, match=r"CONFLICT.*sharding key 'p'"):
        producer.send(rows(["p3"]), delay_time_level=1)
    for arguments, line in (
        (["--delay-level", "1"], "p4"),
        (["--deliver-at", str(due)], "p5"),
        (["--delay-level", "1", "--unordered", "--key-separator", ":"], "k:p6"),
    ):
        done = CliRunner().invoke(app, ["--namesrv", timed.cluster.address, "produce", timed.topic, *arguments], input=line)
        assert done.exit_code == 0, done.output
    first_good(lambda: Counter(bodies()), lambda found: found == Counter(["n0", "p1", "p2", "p4", "p5", "p6"]))
    pulled = [timed.log.pull(queue, 0, 1 << 20, 1 << 30, (*COLUMNS, "tags")) for queue in timed.queues]
    found = [row for some in pulled for row in some.to_pylist()]
    stored = {row["body"]: int(row["store_timestamp"].timestamp() * 1000) for row in found}
    waited = {row["body"]: row["store_timestamp"] - row["born_timestamp"] for row in found}
    assert min(stored[b"p2"], stored[b"p5"]) > due - 1000
    assert min(waited[b"p1"], waited[b"p4"], waited[b"p6"]) >= timedelta(seconds=1)
    assert {row["body"]: (row["tags"], row["sharding_key"]) for row in found if row["body"] in (b"p1", b"p6")} == {
        b"p1": ("b", None),
        b"p6": (None, "k"),
    }
    # If a broker would deliver a row at a time that was not requested, the whole call is refused.
    late = pa.record_batch({"body": ["f0", "f1"], "delay_time_level": [None, 19]})
    with pytest.raises(MessageError, match=r"BAD_DELAY.*delay_time_level is 19.*levels 1 to 18"):
        producer.send(late)
    with pytest.raises(MessageError, match=r"BAD_DELAY.*timerMaxDelaySec"):
        producer.send(late.select(["body"]), deliver_timestamp=datetime.now(UTC) + timedelta(days=4))
    assert not any(body.startswith("f") for body in bodies())
