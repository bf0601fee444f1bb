"""The Outbox protocol: a batch's rows become visible once and in order.

Where the broker publishes atomically, the rows are also invisible until the publish, which also checks the locks of the sources.
The module is long because each rule of repeats, versions and attempts is tested with every kind of broker.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from orderedmq.broker import Broker, Receipt, SinkBatch
from orderedmq.model import RESERVED_PROPERTIES, MessageQueue
from orderedmq.ownership.micro_batch import SourceRun
from tests.contract.support import FakeClock, Place, bodies, locked, needs, queues_of, refused, rows, span, state
from tests.grow import grow

WEEK = 7 * 24 * 3600.0


@pytest.fixture
def atomic(broker: Broker) -> None:
    """Skip the test if the broker does not publish atomically."""
    if not broker.capabilities.atomic_publish:
        pytest.skip("rows that this kind of broker has accepted are visible immediately and cannot be taken back")


@pytest.fixture
def in_segments(kind: str) -> None:
    """Skip a test that needs staged rows in the store. If there are few, the embedded broker parkings them into the receipt."""
    if kind == "embedded":
        pytest.skip("a few rows are stored in the receipt; the same test runs with segments")


only_atomic = pytest.mark.usefixtures("atomic")
only_segments = pytest.mark.usefixtures("in_segments")


def staged(broker: Broker, batch: SinkBatch, partition: int, *parts: tuple[MessageQueue, object]) -> Receipt:
    staging = broker.outbox.open(batch, partition)
    for queue, values in parts:
        staging.add(queue, rows(values))  # type: ignore[arg-type]
    return staging.receipt()


def collect(broker: Broker) -> None:
    """Delete immediately the rows that can no longer be published. Otherwise this happens once a minute."""
    broker.admin.trim("orders")


def numbered(batch: int, run: str = "run", sink: str | None = "sink") -> SinkBatch:
    """Return a sink's batch, written by a run of a Spark query."""
    return SinkBatch(sink, batch, SourceRun("query", batch, run))


def test_rows_can_be_read_when_they_are_published_and_not_before_where_staging_is_invisible(place: Place, broker: Broker):
    first, second, _ = queues_of(broker)
    receipt = staged(broker, numbered(0), 0, (first, "ab"), (second, "x"), (first, "c"))
    assert receipt.rows == {first: 3, second: 1}
    other = place.connect()
    if broker.capabilities.atomic_publish:
        assert (bodies(other, first), bodies(other, second)) == ([], [])
    published = other.outbox.publish(numbered(0), [receipt])
    assert not published.replayed
    assert published.ranges == {first: span(0, 3), second: span(0, 1)}
    assert (bodies(broker, first), bodies(broker, second)) == (["a", "b", "c"], ["x"])


def test_rows_become_visible_in_the_order_of_partitions_and_rows(broker: Broker):
    queue = queues_of(broker)[0]
    broker.log.append({queue: rows("0")})
    late = staged(broker, numbered(0), 2, (queue, "e"), (queue, "f"))
    early = staged(broker, numbered(0), 0, (queue, "ab"))
    middle = staged(broker, numbered(0), 1, (queue, "cd"))
    assert broker.outbox.publish(numbered(0), [late, middle, early]).ranges == {queue: span(1, 7)}
    there = bodies(broker, queue)
    if broker.capabilities.atomic_publish:
        assert there == list("0abcdef")
    assert sorted(there) == list("0abcdef")
    for part in ("ab", "cd", "ef"):
        assert [letter for letter in there if letter in part] == list(part)


def test_columns_and_large_batches_survive_staging(broker: Broker):
    queue = queues_of(broker)[0]
    staging = broker.outbox.open(numbered(0), 0)
    count = 20
    for part in range(count):
        staging.add(queue, rows([b"%d" % part * 200_000], tags=[f"t{part}"], properties=[[("part", str(part))]]))
    receipt = staging.receipt()
    assert receipt.rows == {queue: count}
    broker.outbox.publish(numbered(0), [receipt])
    got: list[dict[str, Any]] = []
    while len(got) < count:
        got += broker.log.pull(queue, len(got), 100, 1 << 30, ("body", "tags", "properties")).to_pylist()
    for row in got:
        # A broker or a sink may add properties.
        row["properties"] = [pair for pair in row["properties"] if pair[0] not in RESERVED_PROPERTIES]
    assert got == [
        {"body": b"%d" % part * 200_000, "tags": f"t{part}", "properties": [("part", str(part))]} for part in range(count)
    ]


def test_what_only_a_broker_or_a_column_may_set_is_left_out(broker: Broker):
    queue = queues_of(broker)[0]
    smuggled = [(name, "smuggled") for name in [*sorted(RESERVED_PROPERTIES), "__RMQ.TRANSIENT.X", "mine"]]
    broker.log.append({queue: rows("a", properties=[smuggled])})
    [pairs] = broker.log.pull(queue, 0, 1, 1 << 20, ("properties",)).column(0).to_pylist()
    assert [name for name, value in pairs if value == "smuggled"] == ["mine"]


def test_an_empty_batch_is_published_too(broker: Broker):
    assert broker.outbox.publish(numbered(0), [staged(broker, numbered(0), 0)]).ranges == {}
    # A batch without rows is recognised only by a broker that keeps a list of batches.
    assert broker.outbox.publish(numbered(0), []).replayed is broker.capabilities.atomic_publish
    staging = broker.outbox.open(numbered(1), 0)
    staging.add(queues_of(broker)[0], rows([]))
    assert broker.outbox.publish(numbered(1), [staging.receipt()]).ranges == {}


# -- once -------------------------------------------------------------------------------------------------------------------------


def test_the_same_batch_again_changes_nothing(place: Place, broker: Broker):
    first, second, _ = queues_of(broker)
    for attempt in range(3):
        receipt = staged(broker, numbered(0, f"run {attempt}"), 0, (first, "ab"), (second, "c"))
        published = place.connect().outbox.publish(numbered(0, f"run {attempt}"), [receipt])
        assert published.replayed is (attempt > 0)
    assert (bodies(broker, first), bodies(broker, second)) == (["a", "b"], ["c"])


@pytest.mark.holds("changed replay")
def test_the_same_batch_again_with_rows_in_a_queue_that_had_none_is_refused_and_nothing_is_written(broker: Broker):
    first, second, third = queues_of(broker)

    def batch(job: str) -> SinkBatch:
        return SinkBatch("sink", 0, SourceRun("query", 0, job), job=job, topic="orders")

    broker.outbox.publish(batch("a"), [staged(broker, batch("a"), 0, (first, "ab"))])
    for job, parts in (("b", [(second, "ab")]), ("c", [(first, "ab"), (second, "c")]), ("d", [(third, "x")])):
        receipt = staged(broker, batch(job), 0, *parts)
        with refused("SINK.REPLAY_DIFFERS", "batch 0"):
            broker.outbox.publish(batch(job), [receipt])
        assert broker.outbox.publish(batch(job), [receipt], skip_differing_replay=True).replayed
        assert [bodies(broker, queue) for queue in (first, second, third)] == [["a", "b"], [], []]


@pytest.mark.parametrize("values", ["abc", "b", "ac"])
def test_the_same_batch_again_with_other_rows_in_a_queue_is_refused_and_can_be_skipped(broker: Broker, values: str):
    queue = queues_of(broker)[0]
    broker.outbox.publish(numbered(0), [staged(broker, numbered(0), 0, (queue, "ab"))])
    broker.outbox.publish(numbered(1), [staged(broker, numbered(1), 0, (queue, "x"))])
    receipt = staged(broker, numbered(0), 0, (queue, values))
    with refused("SINK.REPLAY_DIFFERS", "batch 0"):
        broker.outbox.publish(numbered(0), [receipt])
    assert broker.outbox.publish(numbered(0), [receipt], skip_differing_replay=True).replayed
    assert bodies(broker, queue) == ["a", "b", "x"]


@pytest.mark.holds("changed replay")
@pytest.mark.parametrize("column", ["body", "tags", "keys", "sharding_key", "properties"])
def test_the_same_version_with_as_many_rows_of_other_content_is_refused_and_nothing_is_written(broker: Broker, column: str):
    queue = queues_of(broker)[0]
    texts: dict[str, list[Any]] = {name: ["x", "y"] for name in ("tags", "keys", "sharding_key")}
    texts["properties"] = [[("p", "x")], [("p", "y")]]
    first = rows("ab", **texts)
    # Each column still has the same values, but in other rows.
    other = rows("ba", **texts) if column == "body" else rows("ab", **{**texts, column: texts[column][::-1]})

    def write(batch: pa.RecordBatch) -> bool:
        staging = broker.outbox.open(version(1), 0)
        staging.add(queue, batch)
        return broker.outbox.publish(version(1), [staging.receipt()]).replayed

    assert not write(first)
    with refused("SINK.REPLAY_DIFFERS", "version 1 of txnAppId 'billing' was published already", "above 1"):
        write(other)
    assert write(first)
    assert bodies(broker, queue) == ["a", "b"]


def test_a_repeat_with_its_rows_in_other_partitions_and_another_order_is_the_same_batch(broker: Broker):
    queue = queues_of(broker)[0]

    def batch(job: str) -> SinkBatch:
        return SinkBatch("sink", 0, SourceRun("query", 0, job), job=job, topic="orders")

    def published(job: str, *partitions: str) -> bool:
        receipts = [staged(broker, batch(job), number, (queue, values)) for number, values in enumerate(partitions)]
        return broker.outbox.publish(batch(job), receipts).replayed

    assert not published("a", "abcab")
    assert published("b", "ba", "", "acb")
    with refused("SINK.REPLAY_DIFFERS", "batch 0"):
        published("c", "ba", "bcb")
    assert bodies(broker, queue) == list("abcab")


@only_atomic
def test_a_repeat_whose_rows_without_keys_are_in_other_queues_is_the_same_batch(broker: Broker):
    """Such rows go to the queues in turn, so their queues depend on the order in which their task gets them."""
    first, second, _ = queues_of(broker)
    assert not publish(broker, version(1), (first, "ac"), (second, "bd"))
    assert publish(broker, version(1), (first, "bd"), (second, "ca"))
    assert (bodies(broker, first), bodies(broker, second)) == (["a", "c"], ["b", "d"])


def spread(broker: Broker, batch: SinkBatch, keys: str) -> Receipt:
    """Stage a row per key, whose queue is chosen by its place in the list of targets."""
    staging = broker.outbox.open(batch, 0)
    targets = staging.targets("orders", broker.log.targets("orders"))
    for key in keys:
        staging.add(targets[ord(key) % len(targets)], rows(key))
    return staging.receipt()


@pytest.mark.holds("sink once")
@pytest.mark.holds("same key, same queue")
def test_attempts_of_a_batch_use_the_same_queues_although_the_topic_got_more(broker: Broker):
    queues_of(broker)
    spread(broker, numbered(0, "dead"), "abcd")
    grow(broker, "orders", 8)
    assert not broker.outbox.publish(numbered(0), [spread(broker, numbered(0), "abcdefgh")]).replayed
    queues = broker.log.targets("orders")
    assert sorted(body for queue in queues for body in bodies(broker, queue)) == list("abcdefgh")


@pytest.mark.holds("changed replay")
def test_a_published_batch_is_the_same_although_the_topic_got_queues_since(broker: Broker):
    queues_of(broker)
    broker.outbox.publish(numbered(0), [spread(broker, numbered(0), "abcdefgh")])
    grow(broker, "orders", 8)
    before = state(broker, ["orders"])
    assert broker.outbox.publish(numbered(0, "again"), [spread(broker, numbered(0, "again"), "abcdefgh")]).replayed
    assert state(broker, ["orders"]) == before
    # The next batch uses the new queues.
    broker.outbox.publish(numbered(1), [spread(broker, numbered(1), "ABCDEFGH")])
    assert len([queue for queue in broker.log.targets("orders") if bodies(broker, queue)]) == 8


def test_sinks_do_not_mix(broker: Broker):
    queue = queues_of(broker)[0]
    for sink in ("a", "a/b", "ä", "x" * 1000, "x" * 1001, "a\0b", ""):
        batch = SinkBatch(sink, 0)
        assert not broker.outbox.publish(batch, [staged(broker, batch, 0, (queue, "m"))]).replayed
        assert broker.outbox.publish(batch, [staged(broker, batch, 0, (queue, "m"))]).replayed
    assert len(bodies(broker, queue)) == 7


def test_a_batch_without_identity_is_published_each_time(broker: Broker):
    queue = queues_of(broker)[0]
    batch = SinkBatch(None)
    for turn in range(1, 4):
        assert not broker.outbox.publish(batch, [staged(broker, batch, 0, (queue, "a"))]).replayed
        assert len(bodies(broker, queue)) == turn


# -- versions of a txnAppId -------------------------------------------------------------------------------------------------------


def version(number: int) -> SinkBatch:
    return SinkBatch("txn:billing", number, job=f"job {number}", topic="orders")


def publish(broker: Broker, batch: SinkBatch, *parts: tuple[MessageQueue, object], skip: bool = False) -> bool:
    """Write a batch. Return whether it had been published before."""
    receipt = staged(broker, batch, 0, *parts)
    return broker.outbox.publish(batch, [receipt], skip_differing_replay=skip).replayed


@pytest.mark.holds("out of order")
@pytest.mark.parametrize("skip", [False, True], ids=["error", "skip"])
def test_a_lower_version_that_was_never_written_is_out_of_order_wherever_its_rows_go(broker: Broker, skip: bool):
    first, second, third = queues_of(broker)
    assert not publish(broker, version(3), (second, "a"))
    assert not publish(broker, version(10), (first, "b"))
    before = [["b"], ["a"], []]
    lower: list[list[tuple[MessageQueue, object]]] = [
        [(first, "c")], [(second, "c")], [(third, "c")], [(first, "c"), (third, "d")], [],
    ]  # fmt: skip
    for number, parts in enumerate(lower, 4):
        with refused(
            "SINK.OUT_OF_ORDER", f"version {number} of txnAppId 'billing' was not written", "the later 10 was", "above 10"
        ):
            publish(broker, version(number), *parts, skip=skip)
        assert [bodies(broker, queue) for queue in (first, second, third)] == before
    # Versions that were written are recognised, and a greater version is accepted.
    assert publish(broker, version(3), (second, "a"), skip=skip)
    assert publish(broker, version(10), (first, "b"), skip=skip)
    assert not publish(broker, version(11), (third, "c"), skip=skip)
    assert [bodies(broker, queue) for queue in (first, second, third)] == [["b"], ["a"], ["c"]]


def test_versions_may_have_gaps_and_the_last_hundred_numbers_are_remembered(broker: Broker):
    first, second, _ = queues_of(broker)
    for number in (3, 931, 963, 1000):
        publish(broker, version(number), (first, [f"{number}"]))
    for number in (3, 900):
        with refused(
            "SINK.BATCH_TOO_OLD", f"version {number} of txnAppId 'billing'", "900 and below", "cannot tell", "above 1000"
        ):
            publish(broker, version(number), (first, [f"{number}"]))
        assert publish(broker, version(number), (first, [f"{number}"]), skip=True)
    for number in (901, 930, 932, 962, 964, 999):
        with refused("SINK.OUT_OF_ORDER", f"version {number} "):
            publish(broker, version(number), (second, [f"{number}"]))
    for number in (931, 963, 1000):
        assert publish(broker, version(number), (first, [f"{number}"]))
    assert (bodies(broker, first), bodies(broker, second)) == (["3", "931", "963", "1000"], [])


def test_the_greatest_version_of_all_is_written_and_known_again(broker: Broker):
    queue = queues_of(broker)[0]
    for replayed in (False, True):
        assert publish(broker, version(2**63 - 2), (queue, "a")) is replayed
    with refused("SINK.OUT_OF_ORDER", "another txnAppId"):
        publish(broker, version(2**63 - 3), (queue, "b"))
    assert bodies(broker, queue) == ["a"]


@needs("offsets of topics")
def test_a_version_whose_topic_was_deleted_is_written_again(place: Place, broker: Broker):
    queue = queues_of(broker)[0]
    for _ in range(2):
        broker.admin.delete_topic("orders")
        broker.admin.create_topic("orders", 3)
        for number in (1, 2):
            for replayed in (False, True):
                assert publish(place.connect(), version(number), (queue, f"{number}")) is replayed
    assert bodies(broker, queue) == ["1", "2"]


@only_atomic
@pytest.mark.parametrize("registered", [False, True], ids=["by rows", "by source"])
def test_a_batch_that_lost_one_of_its_topics_is_refused_when_it_has_rows_there_again(broker: Broker, source, registered: bool):
    broker.admin.create_topic("other", 1)
    queue, [other] = queues_of(broker)[0], queues_of(broker, "other")

    def write(*parts: tuple[MessageQueue, object], skip: bool = False) -> bool:
        batch = SinkBatch("sink", 0, SourceRun("query", 0, "run"))
        if registered:
            broker.outbox.register(batch.run, source[0], span(0, 4), None)  # type: ignore[arg-type]
        return publish(broker, batch, *parts, skip=skip)

    assert not write((queue, "a"), (other, "b"))
    for _ in range(2):
        broker.admin.delete_topic("orders")
        broker.admin.create_topic("orders", 3)
        with refused("SINK.REPLAY_DIFFERS", "batch 0", "'orders'", "deleted"):
            write((queue, "a"), (other, "b"))
        assert write((queue, "a"), (other, "b"), skip=True)
    assert (bodies(broker, queue), bodies(broker, other)) == ([], ["b"])
    broker.admin.delete_topic("other")
    broker.admin.create_topic("other", 1)
    assert not write((queue, "a"), (other, "b"))
    assert (bodies(broker, queue), bodies(broker, other)) == (["a"], ["b"])


@only_atomic
def test_a_batch_of_a_deleted_topic_is_no_gap_before_a_later_batch(broker: Broker):
    broker.admin.create_topic("other", 1)
    queue, [other] = queues_of(broker)[0], queues_of(broker, "other")
    assert not publish(broker, version(1), (queue, "a"))
    assert not publish(broker, version(2), (other, "b"))
    broker.admin.delete_topic("orders")
    broker.admin.create_topic("orders", 3)
    with refused("SINK.REPLAY_DIFFERS", "'orders'", "deleted"):
        publish(broker, version(1), (queue, "a"))
    assert publish(broker, version(1), (queue, "a"), skip=True)
    broker.admin.delete_topic("other")
    assert not publish(broker, version(1), (queue, "a"))


# -- attempts ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sink", ["sink", None])
@only_segments
def test_of_two_attempts_of_one_partition_the_first_one_named_counts(broker: Broker, sink: str | None):
    if sink is None and not broker.capabilities.atomic_publish:
        pytest.skip("for a batch without identity, this kind of broker stores the rows of both attempts")
    queue = queues_of(broker)[0]
    batch = SinkBatch(sink, 0)
    one, two = staged(broker, batch, 0, (queue, "ab")), staged(broker, batch, 0, (queue, "ab"))
    other = staged(broker, batch, 1, (queue, "c"))
    assert broker.outbox.publish(batch, [two, other, one]).ranges == {queue: span(0, 3)}
    assert bodies(broker, queue) == ["a", "b", "c"]
    with refused("SINK.TOKEN_GONE"):
        broker.outbox.publish(SinkBatch(None), [one])


@only_atomic
@only_segments
def test_a_token_that_is_gone_refuses_the_whole_batch(broker: Broker):
    queue = queues_of(broker)[0]
    one, two = staged(broker, numbered(0), 0, (queue, "a")), staged(broker, numbered(0), 1, (queue, "b"))
    broker.outbox.discard([two])
    with refused("SINK.TOKEN_GONE", two.token):
        broker.outbox.publish(numbered(0), [one, two])
    assert bodies(broker, queue) == []
    assert broker.outbox.publish(numbered(0), [one]).ranges == {queue: span(0, 1)}


def test_what_was_published_cannot_be_discarded(broker: Broker):
    queue = queues_of(broker)[0]
    receipt = staged(broker, numbered(0), 0, (queue, "ab"))
    broker.outbox.publish(numbered(0), [receipt])
    broker.outbox.discard([receipt])
    broker.outbox.discard([])
    assert bodies(broker, queue) == ["a", "b"]


@only_atomic
@only_segments
def test_an_abandoned_attempt_leaves_nothing(broker: Broker):
    queue = queues_of(broker)[0]
    for size in (10, 3_000_000):
        staging = broker.outbox.open(numbered(0), 0)
        staging.add(queue, rows([b"x" * size]))
        staging.add(queue, rows([b"y" * size]))
        staging.abandon()
        staging.abandon()
    staging = broker.outbox.open(numbered(0), 0)
    staging.add(queue, rows(["a"]))
    receipt = staging.receipt()
    staging.abandon()
    with refused("SINK.TOKEN_GONE"):
        broker.outbox.publish(numbered(0), [receipt])


@only_atomic
@only_segments
def test_a_zombie_that_ends_after_its_batch_was_aborted_stays_invisible(broker: Broker):
    queue = queues_of(broker)[0]
    zombie = broker.outbox.open(numbered(0, "first run"), 0)
    zombie.add(queue, rows(["zombie"]))
    broker.outbox.discard([staged(broker, numbered(0, "first run"), 1, (queue, "b"))])
    late = zombie.receipt()
    again = staged(broker, numbered(0, "second run"), 0, (queue, "a"))
    broker.outbox.publish(numbered(0, "second run"), [again])
    assert bodies(broker, queue) == ["a"]
    collect(broker)
    with refused("SINK.TOKEN_GONE"):
        broker.outbox.publish(SinkBatch(None), [late])


@only_atomic
def test_a_zombie_that_writes_on_after_its_batch_was_published_leaves_nothing(broker: Broker):
    """There are enough rows that some are on disk before the publish and others are written after it."""
    queue = queues_of(broker)[0]
    zombie = broker.outbox.open(numbered(0, "first run"), 0)
    for _ in range(12):
        zombie.add(queue, rows([b"z" * 1_000_000]))
    broker.outbox.publish(numbered(0, "second run"), [staged(broker, numbered(0, "second run"), 0, (queue, "a"))])
    collect(broker)
    for _ in range(12):
        zombie.add(queue, rows([b"z" * 1_000_000]))
    late = zombie.receipt()
    assert broker.outbox.publish(numbered(0, "first run"), [late], skip_differing_replay=True).replayed
    with refused("SINK.TOKEN_GONE"):
        broker.outbox.publish(SinkBatch(None), [late])
    assert bodies(broker, queue) == ["a"]


@only_atomic
@only_segments
def test_orphans_of_this_sinks_batches_are_swept_and_others_after_a_week(broker: Broker, clock: FakeClock):
    queue = queues_of(broker)[0]
    orphan = staged(broker, numbered(0), 5, (queue, ["orphan"]))
    ahead = staged(broker, numbered(2), 0, (queue, ["ahead"]))
    theirs = staged(broker, numbered(0, sink="other"), 0, (queue, ["theirs"]))
    nameless = staged(broker, SinkBatch(None), 0, (queue, ["nameless"]))
    broker.outbox.publish(numbered(1), [staged(broker, numbered(1), 0, (queue, "a"))])
    collect(broker)
    with refused("SINK.TOKEN_GONE"):
        broker.outbox.publish(SinkBatch(None), [orphan])
    clock.pass_(WEEK)
    collect(broker)
    broker.outbox.publish(numbered(2), [ahead])
    assert bodies(broker, queue) == ["a", "ahead"]
    clock.pass_(1)
    collect(broker)
    for gone in (theirs, nameless):
        with refused("SINK.TOKEN_GONE"):
            broker.outbox.publish(SinkBatch(None), [gone])


def test_rows_for_a_missing_queue_are_refused_when_they_are_added(broker: Broker):
    queue = queues_of(broker)[0]
    staging = broker.outbox.open(numbered(0), 0)
    staging.add(queue, rows(["a"]))
    with refused("TOPIC.MISSING", "'nothing'"):
        staging.add(queue._replace(topic="nothing"), rows(["a"]))
    with refused("TOPIC.NO_SUCH_QUEUE", 7):
        staging.add(queue._replace(queue_id=7), rows(["a"]))
    assert staging.receipt().rows == {queue: 1}


# -- sources ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def source(broker: Broker) -> list[MessageQueue]:
    """The queues of another topic, with ten messages each."""
    broker.admin.create_topic("in", 2)
    for queue in queues_of(broker, "in"):
        broker.log.append({queue: rows(range(10))})
    return queues_of(broker, "in")


@only_atomic
def test_a_publish_moves_the_group_offsets_of_its_runs_sources(broker: Broker, source):
    a, b = locked(broker, "g", broker.groups.join("me"), source)
    batch = numbered(0)
    assert batch.run is not None
    broker.outbox.register(batch.run, source[0], span(0, 4), a)
    broker.outbox.register(batch.run, source[1], span(2, 3), b)
    broker.outbox.register(SourceRun("query", 0, "another run"), source[1], span(0, 9), b)
    broker.outbox.register(SourceRun("query", 1, "run"), source[1], span(0, 9), b)
    broker.outbox.publish(batch, [staged(broker, batch, 0, (queues_of(broker)[0], "a"))])
    assert broker.groups.offsets("g", source) == {source[0]: 4, source[1]: 3}
    broker.groups.commit({a: 4, b: 3})


@only_atomic
def test_a_publish_never_moves_an_offset_back(broker: Broker, source):
    [token] = locked(broker, "g", broker.groups.join("me"), source[:1])
    broker.groups.commit({token: 8})
    batch = numbered(0)
    broker.outbox.register(batch.run, source[0], span(0, 4), token)  # type: ignore[arg-type]
    broker.outbox.publish(batch, [])
    assert broker.groups.offsets("g", source) == {source[0]: 8}


@only_atomic
def test_a_write_inside_a_batch_checks_the_epochs_and_leaves_the_offsets(broker: Broker, source, clock: FakeClock):
    [token] = locked(broker, "g", broker.groups.join("me"), source[:1])
    batch = SinkBatch("app", 7, SourceRun("query", 0, "run"))
    broker.outbox.register(batch.run, source[0], span(0, 4), token)  # type: ignore[arg-type]
    queue = queues_of(broker)[0]
    broker.outbox.publish(batch, [staged(broker, batch, 0, (queue, "a"))], move_offsets=False)
    assert broker.groups.offsets("g", source) == {}
    assert bodies(broker, queue) == ["a"]
    clock.pass_(61)
    locked(broker, "g", broker.groups.join("them"), source)
    late = SinkBatch("app", 8, batch.run)
    with refused("LOCK.LOST", source[0]):
        broker.outbox.publish(late, [staged(broker, late, 0, (queue, "b"))], move_offsets=False)
    assert bodies(broker, queue) == ["a"]


@only_atomic
@pytest.mark.holds("one owner")
@pytest.mark.parametrize("before", ["owned", "taken over", "given back"])
def test_a_batch_of_a_queue_that_is_deleted_before_the_publish(broker: Broker, source, clock: FakeClock, before: str):
    """Its messages were read. It is refused if another owner may have processed them before the deletion."""
    broker.admin.create_topic("read", 1)
    [queue], target = queues_of(broker, "read"), queues_of(broker)[0]
    broker.log.append({queue: rows("abcd")})
    tokens = [token] = locked(broker, "g", broker.groups.join("me"), [queue])
    batch = numbered(0)
    broker.outbox.register(batch.run, queue, span(0, 4), token)  # type: ignore[arg-type]
    receipt = staged(broker, batch, 0, (target, "a"))
    if before == "taken over":
        clock.pass_(61)
        locked(broker, "g", broker.groups.join("them"), [queue])
    elif before == "given back":
        broker.groups.unlock(tokens)
    broker.admin.delete_topic("read")
    broker.admin.create_topic("read", 1)
    if before == "owned":
        assert not broker.outbox.publish(batch, [receipt]).replayed
        assert bodies(broker, target) == ["a"]
    else:
        with refused("LOCK.LOST", queue):
            broker.outbox.publish(batch, [receipt])
        assert bodies(broker, target) == []
    assert broker.groups.offsets("g", [queue]) == {}


@only_atomic
def test_an_earlier_runs_registrations_bind_only_that_run(broker: Broker, source, clock: FakeClock):
    queue = queues_of(broker)[0]
    me = broker.groups.join("me")
    old = locked(broker, "g", me, source)
    first, second = numbered(0, "first"), numbered(0, "second")
    for place, token in zip(source, old):
        broker.outbox.register(first.run, place, span(0, 2), token)  # type: ignore[arg-type]
    zombie = staged(broker, first, 0, (queue, ["zombie"]))
    clock.pass_(61)
    locked(broker, "g", broker.groups.join("them"), source[1:])
    with refused("LOCK.LOST"):
        broker.outbox.publish(first, [zombie])
    [again] = locked(broker, "g", me, source[:1])
    broker.outbox.register(second.run, source[0], span(0, 2), again)  # type: ignore[arg-type]
    broker.outbox.publish(second, [staged(broker, second, 0, (queue, "a"))])
    assert bodies(broker, queue) == ["a"]
    assert broker.groups.offsets("g", source) == {source[0]: 2}
    with refused("SINK.REPLAY_DIFFERS"):
        broker.outbox.publish(first, [zombie])
    assert bodies(broker, queue) == ["a"]


def replayed(broker: Broker, run: str, ranges: dict[MessageQueue, tuple[int, int]], values: str) -> bool:
    batch = numbered(0, run)
    for queue, (begin, end) in ranges.items():
        broker.outbox.register(batch.run, queue, span(begin, end), None)  # type: ignore[arg-type]
    return broker.outbox.publish(batch, [staged(broker, batch, 0, (queues_of(broker)[0], values))]).replayed


@only_atomic
def test_a_replay_is_known_by_its_source_ranges_whatever_rows_it_has(broker: Broker, source):
    """A replay may lack queues, and messages at the beginning of a range that have aged out."""
    assert not replayed(broker, "1", {source[0]: (0, 5), source[1]: (0, 5)}, "abc")
    assert replayed(broker, "2", {source[0]: (0, 5), source[1]: (0, 5)}, "x")
    assert replayed(broker, "3", {source[1]: (0, 5)}, "b")
    assert replayed(broker, "4", {source[1]: (2, 5)}, "b")
    assert replayed(broker, "5", {}, "")
    assert bodies(broker, queues_of(broker)[0]) == ["a", "b", "c"]


@only_atomic
@pytest.mark.parametrize("other", [{0: (0, 6)}, {0: (5, 9)}, {0: (0, 5), 1: (0, 1)}, {1: (0, 5)}, {0: (0, 3)}], ids=str)
def test_a_replay_that_read_anything_else_differs(broker: Broker, source, other):
    """A replay that ends earlier also differs, because the next batch would publish the rest again."""
    assert not replayed(broker, "1", {source[0]: (0, 5)}, "abc")
    before = state(broker, ["orders"])
    with refused("SINK.REPLAY_DIFFERS", "batch 0"):
        replayed(broker, "2", {source[number]: ends for number, ends in other.items()}, "abc")
    assert state(broker, ["orders"]) == before


@only_atomic
def test_the_same_ranges_of_a_topic_that_was_created_again_are_another_batch(broker: Broker, source):
    assert not replayed(broker, "1", {source[0]: (0, 5)}, "abc")
    broker.admin.delete_topic("in")
    broker.admin.create_topic("in", 2)
    broker.log.append({source[0]: rows(range(5))})
    with refused("SINK.REPLAY_DIFFERS", "batch 0", "'in'", "created again"):
        replayed(broker, "2", {source[0]: (0, 5)}, "xyz")
    assert bodies(broker, queues_of(broker)[0]) == ["a", "b", "c"]


@only_atomic
def test_a_batch_with_source_ranges_that_is_too_old_to_be_compared_cannot_be_skipped(broker: Broker, source):
    for number in (0, 100):
        broker.outbox.publish(numbered(number), [staged(broker, numbered(number), 0, (queues_of(broker)[0], "a"))])
    old = numbered(0, "again")
    broker.outbox.register(old.run, source[0], span(0, 9), None)  # type: ignore[arg-type]
    with refused("SINK.BATCH_TOO_OLD", "batch 0", "skip does not apply"):
        broker.outbox.publish(old, [staged(broker, old, 0)], skip_differing_replay=True)


@only_atomic
def test_a_replay_without_its_sources_differs(broker: Broker, source):
    assert not replayed(broker, "1", {source[0]: (0, 5)}, "abc")
    with refused("SINK.REPLAY_DIFFERS"):
        replayed(broker, "2", {}, "abc")


@only_atomic
def test_a_query_may_read_a_queue_twice(broker: Broker, source):
    """A query without a group may do so, for example in a union of two reads of one topic."""
    for run in ("1", "2"):
        batch = numbered(0, run)
        for ends in ((0, 9), (5, 9), (0, 9)):
            broker.outbox.register(batch.run, source[0], span(*ends), None)  # type: ignore[arg-type]
        receipt = staged(broker, batch, 0, (queues_of(broker)[0], "ab"))
        assert broker.outbox.publish(batch, [receipt]).replayed is (run == "2")


# -- small publishes --------------------------------------------------------------------------------------------------------------


@only_atomic
def test_thousands_of_small_publishes_leave_few_chunks_and_every_row(broker: Broker, clock: FakeClock):
    queue = queues_of(broker)[0]
    turns, letters = 700, "abcdefg"
    for number in range(turns):
        batch = numbered(number)
        broker.outbox.publish(batch, [staged(broker, batch, 0, (queue, [f"{number}{letter}" for letter in letters]))])
        clock.pass_(0.25)
    assert bodies(broker, queue) == [f"{number}{letter}" for number in range(turns) for letter in letters]
    assert broker.admin.describe_topic("orders")[0].chunks <= 16
    stamps = broker.log.pull(queue, 0, 1 << 20, 1 << 30, ("store_timestamp",)).column(0).to_pylist()
    assert stamps == sorted(stamps)
    assert len(set(stamps)) == turns
