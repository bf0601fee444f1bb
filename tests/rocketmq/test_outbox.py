"""A sink's batches on real servers: each row is written once, how far a task searches for earlier rows, and what is left at brokers."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from orderedmq.broker import Published, Receipt, SinkBatch
from orderedmq.errors import GroupError, MessageError, RocketMQError, SinkError, TopicError
from orderedmq.model import PRODUCER_COLUMNS, PRODUCER_SCHEMA, MessageQueue, OffsetRange
from orderedmq.rocketmq.admin import RocketMQAdmin
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.rocketmq.messages.log import RocketMQLog
from orderedmq.rocketmq.sink.bookmarks import Bookmarks
from orderedmq.rocketmq.sink.message_stamp import bookmark_group, read_stamp, sink_name
from orderedmq.rocketmq.wire import admin_requests, group_requests, message_requests, registers
from orderedmq.rocketmq.wire.codes import RequestCode
from tests.rocketmq.outbox_world import World, numbered, rows, spoil
from tests.rocketmq.proxy import Network
from tests.waits import soon, until


@pytest.fixture
def everywhere(every_version: Cluster) -> Iterator[World]:
    with World(every_version) as made:
        yield made


# --- every version


@pytest.mark.holds("sink once")
def test_a_batch_is_there_once_however_often_it_is_written(everywhere: World) -> None:
    world = everywhere
    names = numbered(200)
    first = world.write(names)
    assert world.bodies() == names
    # Run the same task again, with its rows in another order, as Spark may deliver them.
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
            {"body": b"", "tags": "t", "keys": "k1 k2", "sharding_key": "ä", "properties": [("x", "1"), ("OMQ", "other")]},
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
    for number, row in enumerate(got):
        stamp = read_stamp(dict(row["properties"]), world.sink)
        assert stamp is not None
        assert (stamp.batch, stamp.partition, stamp.sequence) == (7, 3, number)
        # A sink puts all its data into one property, because each property costs the broker work.
        assert [name for name in dict(row["properties"]) if name.startswith("OMQ")] == ["OMQ"]
    assert dict(got[0]["properties"])["x"] == "1"


@pytest.fixture
def on_two(two_brokers: Cluster) -> Iterator[World]:
    with World(two_brokers) as made:
        yield made


def test_a_batch_over_two_brokers(two_brokers: Cluster, on_two: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the brokers is killed while the batch is written."""
    world = on_two
    until(lambda: len(world.log.queues(world.topic)) == 6)
    world.queues = world.log.queues(world.topic)
    fill(world, 3000)
    monkeypatch.setattr("orderedmq.rocketmq.codec.encode.TARGET_BYTES", 2000)
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


@pytest.mark.holds("out of order")
@pytest.mark.parametrize("forgotten", [False, True], ids=["known", "forgotten"])
def test_a_lower_version_for_another_broker_than_the_highest_ones_is_out_of_order(on_two: World, forgotten: bool) -> None:
    """The version is refused before any row is sent, also if the rows' broker has lost the highest version."""
    world = on_two
    until(lambda: len(world.log.queues(world.topic)) == 6)
    here, there = world.log.queues(world.topic)[0], world.log.queues(world.topic)[-1]
    assert here.broker_name != there.broker_name

    def publish(number: int, queue: MessageQueue, *, skip: bool = False) -> Published:
        batch = SinkBatch(f"txn:{world.sink}", number, job=uuid.uuid4().hex, topic=world.topic)
        staging = world.outbox().open(batch, 0)
        assert queue in staging.targets(world.topic, world.log.targets(world.topic))
        staging.add(queue, rows([f"a{number}", f"b{number}"]))
        return world.outbox().publish(batch, [staging.receipt()], skip_differing_replay=skip)

    assert not publish(3, there).replayed
    assert not publish(10, here).replayed
    if forgotten:
        Bookmarks(world.client, sink_name(f"txn:{world.sink}"), world.topic).move(registers.committed(there), 4)
    for skip in (True, False):
        with pytest.raises(SinkError, match="OUT_OF_ORDER.*version 7 .*above 10"):
            publish(7, there, skip=skip)
    assert world.bodies(there) == ["a3", "b3"]
    assert publish(3, there).replayed
    assert publish(10, here).replayed
    assert not publish(11, there).replayed
    assert world.bodies(here) == ["a10", "b10"]


# --- the same batch in other partitions


def test_a_batch_that_is_written_again_in_other_partitions_is_there_once(everywhere: World) -> None:
    """The batch is written by two tasks, one of them interrupted; by three, whose job dies before its commit; and then by one."""
    world = everywhere
    names = numbered(300)
    # Rows that an older release of the package sent have no run in their stamps.
    world.write(names[:150], partition=0)
    world.write(names[150:200], partition=1)
    for job, count in (("second", 3), ("third", 1)):
        parts = [names[part::count] for part in range(count)]
        receipts = [world.write(part, partition=number, job=job) for number, part in enumerate(parts)]
        assert sorted(world.bodies()) == sorted(names)
    assert not world.outbox().publish(world.batch(job="third"), receipts).replayed
    again = [world.write(names[part::2], partition=part, job="fourth") for part in range(2)]
    assert world.outbox().publish(world.batch(job="fourth"), again).replayed
    assert sorted(world.bodies()) == sorted(names)


def test_rows_of_several_tasks_that_say_the_same_are_all_there(everywhere: World) -> None:
    """Each task finds the rows that an earlier run sent. The commit sends the missing rows, even when the commit is repeated."""
    world = everywhere
    world.write(["a1"] * 3 + ["b1"], job="first")
    parts = [["a1", "a1", "b1"], ["a1", "a1", "c1"], ["a1"]]
    receipts = [world.write(part, partition=number, job="second") for number, part in enumerate(parts)]
    assert Counter(world.bodies()) == {"a1": 3, "b1": 1, "c1": 1}
    published = world.outbox().publish(world.batch(job="second"), receipts)
    assert not published.replayed
    assert published.ranges == {world.queue: OffsetRange(0, 7)}
    for job in ("second", "third"):
        receipts = [world.write(part, partition=number, job=job) for number, part in enumerate(parts)]
        assert world.outbox().publish(world.batch(job=job), receipts).replayed
    assert Counter(world.bodies()) == {"a1": 5, "b1": 1, "c1": 1}


def test_a_run_waits_for_a_task_of_an_earlier_one_that_is_still_at_work(usual: World, network: Network) -> None:
    """A working task renews its lock, here before each request, so the tasks of the other run do not get it."""
    names = numbered(60)
    late = usual.outbox(network.address, replace(usual.timing, lock_renew=0.0)).open(usual.batch(job="first"), 5)
    late.add(usual.queue, rows(names[:20]))
    late.start()
    until(lambda: len(usual.bodies()) == 20)

    def asked(by_late: bool) -> int:
        """Return how many lock requests the late task has sent or, if not ``by_late``, the other tasks."""
        sent = network.broker.requests(RequestCode.LOCK_BATCH_MQ)
        return sum((late._attempt.client_id.encode() in one.body) is by_late for one in sent)

    with ThreadPoolExecutor(2) as pool:
        outboxes = [usual.outbox(network.address) for _ in range(2)]
        tasks = [pool.submit(usual.write, names[part::2], 0, part, outboxes[part], job="second") for part in range(2)]
        for part in range(4):
            before = asked(True), asked(False)
            late.add(usual.queue, rows([names[20 + part]]))
            late.start()
            until(lambda: asked(True) > before[0] and asked(False) > before[1] + 2)  # noqa: B023 (called at once)
        assert not any(task.done() for task in tasks)
        late.receipt()
        receipts = [task.result(60) for task in tasks]
    assert sorted(usual.bodies()) == sorted(names)
    assert not usual.outbox().publish(usual.batch(job="second"), receipts).replayed


# --- a committed batch with other rows


@pytest.mark.holds("changed replay")
@pytest.mark.parametrize("forgotten", [False, True], ids=["", "bookmarks lost"])
def test_a_committed_batch_that_comes_again_with_other_rows_is_refused_before_any_is_sent(
    everywhere: World, forgotten: bool
) -> None:
    """A batch of 1,000 rows in two queues is repeated with 320 different rows, some of them for the third queue."""
    world = everywhere

    def receipts(job: str, parts: list[dict[MessageQueue, list[str]]]) -> list[Receipt]:
        made = []
        for partition, given in enumerate(parts):
            staging = world.outbox().open(world.batch(job=job), partition)
            for queue, names in given.items():
                staging.add(queue, rows(names))
            made.append(staging.receipt())
        return made

    first, second, third = world.queues[:3]
    world.outbox().publish(world.batch(), receipts("first", [{first: numbered(500), second: numbered(500, 500)}]))
    if forgotten:
        for queue in world.queues:
            Bookmarks(world.client, world.sink, world.topic).move(queue, 0)
    others: list[list[dict[MessageQueue, list[str]]]] = [
        [{first: numbered(500), second: numbered(180, 500), third: numbered(320, 5000)}],
        [{first: numbered(340), second: numbered(340, 500)}, {first: numbered(160, 5000), third: numbered(160, 6000)}],
        [{third: numbered(1)}],
    ]
    for number, parts in enumerate(others):
        again = receipts(f"again {number}", parts)
        with pytest.raises(SinkError, match=r"REPLAY_DIFFERS.*batch 0.*have not been sent"):
            world.outbox().publish(world.batch(job=f"again {number}"), again)
        assert world.outbox().publish(world.batch(job=f"again {number}"), again, skip_differing_replay=True).replayed
        assert [len(world.bodies(queue)) for queue in (first, second, third)] == [500, 500, 0]
    # A batch without rows is also recognised.
    world.outbox().publish(world.batch(1), [world.outbox().open(world.batch(1, "empty"), 0).receipt()])
    late = world.write(numbered(3), 1, job="late")
    with pytest.raises(SinkError, match="REPLAY_DIFFERS"):
        world.outbox().publish(world.batch(1, "late"), [late])
    assert [len(world.bodies(queue)) for queue in (first, second, third)] == [500, 500, 0]


# --- how far a task searches


def fill(world: World, count: int) -> None:
    """Append messages of another producer to the first queue."""
    world.log.append({world.queue: rows(numbered(count))})


def test_the_history_of_an_old_topic_is_not_read(usual: World, network: Network) -> None:
    fill(usual, 20_000)
    outbox = usual.outbox(network.address)
    for number in range(4):
        pulls = len(network.broker.requests(RequestCode.PULL_MESSAGE))
        receipt = usual.write(numbered(40), number, outbox=outbox)
        pulls = len(network.broker.requests(RequestCode.PULL_MESSAGE)) - pulls
        outbox.publish(usual.batch(number), [receipt])
        # For the first batch, the task searches further back, in case the sink's bookmark was lost. For later batches, it finds
        # the previous batch.
        assert pulls <= (2048 // 32 + 4 if number == 0 else 2), (number, pulls)
    assert usual.bodies()[20_000:] == numbered(40) * 4


def test_a_late_task_looks_over_what_others_sent_in_few_round_trips(usual: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among the others' rows, the task also finds the rows that its own earlier attempt sent."""
    monkeypatch.setattr("orderedmq.rocketmq.codec.encode.TARGET_BYTES", 10_000)
    monkeypatch.setattr("orderedmq.rocketmq.sink.boundaries.STRIDE", 40)
    outbox = usual.outbox()
    ours, others = numbered(300, 10_000, "z"), [numbered(2000, 2000 * partition) for partition in range(2)]
    receipts = [usual.write(others[0], outbox=outbox, job="j")]
    usual.write(ours, partition=2, outbox=outbox, job="j")
    receipts.append(usual.write(others[1], partition=1, outbox=outbox, job="j"))
    real, pulls = RocketMQLog.pull, []

    def counted(self: RocketMQLog, *given: Any) -> pa.RecordBatch:
        pulls.append(given)
        return real(self, *given)

    monkeypatch.setattr(RocketMQLog, "pull", counted)
    again = usual.write(ours, partition=2, outbox=outbox, job="j")
    # The queue has the rows of about 45 sends, but the task must read in full only the rows that it sent.
    assert len(pulls) < 25, pulls
    monkeypatch.undo()
    outbox.publish(usual.batch(job="j"), [*receipts, again])
    assert sorted(usual.bodies()) == sorted([*others[0], *ours, *others[1]])


@pytest.mark.parametrize("deleted", [True, False], ids=["group deleted", "bookmark lost"])
def test_a_forgotten_bookmark_costs_time_and_nothing_else(usual: World, deleted: bool) -> None:
    fill(usual, 5000)
    marks = Bookmarks(usual.client, usual.sink, usual.topic)

    def forget() -> None:
        if deleted:
            for master in usual.masters():
                usual.client.call_address(master, admin_requests.delete_group(marks.group), soon())
        else:
            marks.move(usual.queue, 0)

    names = numbered(100)
    usual.write(names)
    forget()
    receipt = usual.write(names)
    usual.outbox().publish(usual.batch(), [receipt])
    forget()
    # The commit of the batch is recorded in the same group as the bookmarks.
    assert usual.outbox().publish(usual.batch(), [usual.write(names)]).replayed is not deleted
    usual.outbox().publish(usual.batch(1), [usual.write(numbered(10), 1)])
    assert usual.bodies()[5000:] == names + numbered(10)


def test_a_bookmark_of_a_topic_that_was_made_anew_hides_nothing(usual: World) -> None:
    marks = Bookmarks(usual.client, usual.sink, usual.topic)
    usual.outbox().publish(usual.batch(), [usual.write(numbered(10))])
    marks.move(usual.queue, 1000)
    for number in (1, 2):
        receipt = usual.write(numbered(20, 100 * number), number)
        assert not usual.outbox().publish(usual.batch(number), [receipt]).replayed
    assert usual.bodies() == numbered(10) + numbered(20, 100) + numbered(20, 200)


# --- what a sink leaves at brokers


def groups_of_sinks(world: World) -> set[str]:
    """Return the consumer groups of sinks that a broker knows from settings, offsets or retry topics."""
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
        # Before 5.0, a broker keeps the offsets of a deleted topic, and the command does not show such groups.
        assert left not in world.client.call_address(master, admin_requests.groups(), soon())
    assert world.cluster.version.startswith("4.") or left not in groups_of_sinks(world)


def test_the_group_of_a_sink_that_is_gone_can_be_deleted_by_its_name(usual: World) -> None:
    usual.outbox().publish(usual.batch(), [usual.write(numbered(2))])
    group = bookmark_group(usual.sink, usual.topic)
    assert group in groups_of_sinks(usual)
    RocketMQAdmin(usual.client, usual.log).delete_group(group)
    assert group not in groups_of_sinks(usual)


# --- refusals


def test_a_topic_that_is_deleted_meanwhile_is_not_made_again(usual: World) -> None:
    # At its end, the attempt searches for its rows although the topic is gone. A short ``visible`` limits that search.
    late = usual.outbox(timing=replace(usual.timing, visible=0.5)).open(usual.batch(), 0)
    late.add(usual.queue, rows(["a1"]))
    late.start()
    until(lambda: usual.bodies() == ["a1"])
    for master in usual.masters():
        # 5.x without a timer wheel deletes the topic and then reports an error.
        with contextlib.suppress(RocketMQError):
            usual.client.call_address(master, admin_requests.delete_topic(usual.topic), soon())
    with contextlib.suppress(TopicError):
        late.add(usual.queue, rows(["a2"]))
    with pytest.raises(TopicError) as caught:
        late.receipt()
    assert caught.value.sub == "MISSING"
    late.abandon()
    with pytest.raises(TopicError):
        usual.client.call_address(usual.masters()[0], message_requests.pull(usual.queue, "TOOLS_CONSUMER", 0, 1), soon())


def test_a_row_that_cannot_be_sent_is_named_and_leaves_the_queue_free(usual: World) -> None:
    bad = pa.RecordBatch.from_pylist([{"body": b"a"}, {"body": b"b", "properties": [("x", "\x01")]}], PRODUCER_SCHEMA)
    staging = usual.outbox().open(usual.batch(), 0)
    staging.add(usual.queue, rows(["a1", "a2"]))
    staging.add(usual.queue, bad)
    with pytest.raises(MessageError) as caught:
        staging.receipt()
    assert caught.value.sub == "BAD_PROPERTY"
    assert f"row 3 for queue {usual.queue}" in str(caught.value)
    staging.abandon()
    # If the queue were still locked, this attempt would be refused immediately.
    usual.write(["a1", "a2", "a3"], outbox=usual.outbox(timing=replace(usual.timing, lock_wait=0.0)))
    assert usual.bodies() == ["a1", "a2", "a3"]


def test_a_warning_tells_of_messages_that_nobody_can_take_back(usual: World, caplog: pytest.LogCaptureFixture) -> None:
    usual.write(["a1", "a2"])
    receipt = usual.write(["a1", "a3"])
    with caplog.at_level(logging.WARNING, "orderedmq"):
        usual.outbox().publish(usual.batch(), [receipt])
    assert "1 messages of batch 0, partition 0" in caplog.text
    assert usual.bodies() == ["a1", "a2", "a3"]


# --- a group given by the user


def in_group(world: World, sink: str, number: int, names: list[str], group: str, publish: bool = True) -> Published | None:
    """Write a batch as another process would, and publish it if ``publish``."""
    batch = SinkBatch(sink, number, None, group)
    outbox = world.outbox()
    staging = outbox.open(batch, 0)
    staging.add(world.queue, rows(names))
    receipt = staging.receipt()
    return outbox.publish(batch, [receipt]) if publish else None


def test_a_sink_keeps_its_bookmarks_in_the_group_that_the_user_named(everywhere: World) -> None:
    """The group may exist before the sink starts, because it may have to be created by an administrator."""
    world = everywhere
    group = f"g-{world.topic}"
    for master in world.masters():
        world.client.call_address(master, admin_requests.create_group(group), soon())
    before = groups_of_sinks(world)
    fill(world, 100)
    names = numbered(20)
    in_group(world, "one", 0, names, group, publish=False)
    assert in_group(world, "one", 0, names, group) == Published(False, {world.queue: OffsetRange(100, 120)})
    published = in_group(world, "one", 0, names, group)
    assert published is not None
    assert published.replayed
    in_group(world, "one", 1, numbered(5, 20), group)
    assert world.bodies()[100:] == numbered(25)
    assert groups_of_sinks(world) == before
    assert Bookmarks(world.client, "one", world.topic, group).get(world.queue) == 121


def test_a_query_with_a_new_checkpoint_takes_the_group_over(everywhere: World) -> None:
    world = everywhere
    group = f"g-{world.topic}"
    in_group(world, "old", 0, numbered(10), group)
    # The rows of sink "old" do not count, because a batch with the same number from another sink is a different batch.
    assert in_group(world, "new", 0, numbered(10), group) == Published(False, {world.queue: OffsetRange(10, 20)})
    in_group(world, "new", 1, numbered(5, 10), group, publish=False)
    assert in_group(world, "new", 1, numbered(5, 10), group) == Published(False, {world.queue: OffsetRange(20, 25)})
    assert world.bodies() == numbered(10) + numbered(15)


def test_two_queries_that_write_to_one_topic_need_two_groups(everywhere: World) -> None:
    world = everywhere
    group = f"g-{world.topic}"
    in_group(world, "one", 0, numbered(10), group)
    in_group(world, "one", 1, numbered(10, 10), group, publish=False)
    in_group(world, "two", 0, numbered(10), group)
    # The first query gets an error that names the conflict. Its rows are already written and are not sent again.
    for _ in range(2):
        with pytest.raises(GroupError, match=f"sinkGroup '{group}' has the bookmarks of another query") as caught:
            in_group(world, "one", 1, numbered(10, 10), group)
        assert caught.value.condition == "ORDEREDMQ_GROUP.IN_USE"
    in_group(world, "two", 1, numbered(10, 10), group)
    in_group(world, "one", 1, numbered(10, 10), f"{group}-2")
    assert Counter(world.bodies()) == Counter(numbered(20) * 2)
