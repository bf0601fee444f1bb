"""The Admin protocol: topics, retention, trimming and names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orderedmq.broker import Broker, QueueBounds, SinkBatch
from orderedmq.errors import OrderedMQError
from orderedmq.model import MAX_NAME_LENGTH, MAX_QUEUES, RESERVED_PREFIXES
from tests.contract.support import BIG, EVERYTHING, FakeClock, Place, bodies, locked, needs, queues_of, refused, rows, state
from tests.examples import examples
from tests.grow import grow


@needs("topic settings")
def test_a_topic_is_what_it_was_made(broker: Broker):
    made = broker.admin.create_topic("t", 5, retention_seconds=60.5, retention_bytes=1 << 20, compression="lz4")
    assert (made.name, made.queues, made.retention_seconds, made.retention_bytes, made.compression) == (
        "t",
        5,
        60.5,
        1 << 20,
        "lz4",
    )
    assert broker.log.topic("t") == made
    assert [broker.log.bounds([queue])[queue] for queue in queues_of(broker, "t")] == [QueueBounds(0, 0)] * 5


def test_a_topic_that_was_made_is_there_at_once_and_empty(place: Place, broker: Broker):
    made = broker.admin.create_topic("t", 5)
    assert (made.name, made.queues) == ("t", 5)
    other = place.connect()
    assert other.log.topic("t") == broker.log.topic("t") == made
    assert [other.log.bounds([queue])[queue] for queue in queues_of(other, "t")] == [QueueBounds(0, 0)] * 5


def test_a_topic_that_exists_is_not_made_again(broker: Broker):
    before = state(broker, ["orders"])
    with refused("TOPIC.EXISTS", "'orders'", 3):
        broker.admin.create_topic("orders", 4)
    assert state(broker, ["orders"]) == before


def test_names_the_topic_and_the_group_that_a_wrong_name_is_like(broker: Broker) -> None:
    with refused("TOPIC.MISSING", "did you mean 'orders'?"):
        broker.log.topic("oders")
    with refused("TOPIC.MISSING", "does not exist. Run"):
        broker.log.topic("invoices")
    broker.admin.seek("billing", {queues_of(broker, "orders")[0]: 0})
    with refused("GROUP.MISSING", "did you mean 'billing'?"):
        broker.admin.group_offsets("biling")


@pytest.mark.parametrize("count", [0, -1, MAX_QUEUES + 1])
def test_a_count_of_queues_out_of_range_is_refused(broker: Broker, count: int):
    for call in (lambda: broker.admin.create_topic("t", count), lambda: broker.admin.resize_topic("orders", count)):
        with refused("TOPIC.QUEUE_COUNT", count):
            call()
    assert [topic.name for topic in broker.log.topics()] == ["orders"]


@needs("topic settings")
@pytest.mark.parametrize(
    ("settings_", "word"),
    [
        ({"compression": "zip"}, "zip"),
        ({"retention_seconds": 0}, "retention_seconds"),
        ({"retention_bytes": -1}, "retention_bytes"),
        ({"retention_seconds": float("inf")}, "retention_seconds"),
        ({"retention_seconds": float("nan")}, "retention_seconds"),
    ],
)
def test_settings_that_make_no_sense_are_refused(broker: Broker, settings_, word):
    with refused("OPTION.INVALID", word):
        broker.admin.create_topic("t", 1, **settings_)
    assert [topic.name for topic in broker.log.topics()] == ["orders"]


def test_a_type_of_messages_is_made_or_refused(broker: Broker):
    """An embedded broker supports no message types, and RocketMQ does not accept every word as a type."""
    with refused("OPTION.UNSUPPORTED" if broker.capabilities.fenced else "OPTION.INVALID", "'t'", "Fifo"):
        broker.admin.create_topic("t", 1, message_type="Fifo")
    assert [topic.name for topic in broker.log.topics()] == ["orders"]
    assert broker.admin.message_type("orders") in (None, "NORMAL")


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/b", "a\\b", "a b", "a\0b", "ä", "\u202eabc", "a\n", "x" * (MAX_NAME_LENGTH + 1), "a.b", "a,b", "*"],
)
def test_a_name_that_is_no_topics_is_refused(broker: Broker, name: str):
    with refused("TOPIC.BAD_NAME"):
        broker.admin.create_topic(name, 1)


@pytest.mark.parametrize("prefix", RESERVED_PREFIXES)
def test_a_topic_of_a_group_cannot_be_made(broker: Broker, prefix: str):
    with refused("TOPIC.RESERVED", prefix):
        broker.admin.create_topic(prefix + "g", 1)


@settings(examples(4), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=130) | st.text("abcXYZ019_-%|./\0 ", max_size=130))
def test_any_name_is_a_topic_or_refused_before_anything_is_made(broker: Broker, name: str):
    before = broker.log.topics()
    try:
        broker.admin.create_topic(name, 1)
    except OrderedMQError:
        assert broker.log.topics() == before
    else:
        broker.log.append({queues_of(broker, name)[0]: rows(["a"])})
        assert bodies(broker, queues_of(broker, name)[0]) == ["a"]
        broker.admin.delete_topic(name)


def test_a_topic_grows_and_its_queues_stay(broker: Broker):
    broker.log.append({queues_of(broker)[0]: rows("abc")})
    incarnation = broker.log.topic("orders").incarnation
    grow(broker, "orders", 5)
    grown = broker.log.topic("orders")
    assert (grown.queues, grown.incarnation) == (5, incarnation)
    assert [len(bodies(broker, queue)) for queue in queues_of(broker)] == [3, 0, 0, 0, 0]
    broker.log.append({queues_of(broker)[4]: rows("x")})
    with refused("TOPIC.MISSING"):
        broker.admin.resize_topic("nothing", 4)


@needs("offsets of topics")
def test_a_deleted_topic_takes_its_groups_offsets_with_it(broker: Broker):
    broker.admin.create_topic("other", 1)
    queues, [other] = queues_of(broker), queues_of(broker, "other")
    broker.log.append({queues[0]: rows("abc")})
    broker.log.append({other: rows("xyz")})
    tokens = locked(broker, "g", broker.groups.join("me"), [*queues, other])
    broker.groups.commit(dict.fromkeys(tokens, 0))
    broker.admin.delete_topic("orders")
    assert broker.admin.group_offsets("g") == {other: 0}
    assert broker.log.bounds(queues) == {}
    assert bodies(broker, other) == ["x", "y", "z"]
    with refused("TOPIC.MISSING"):
        broker.admin.delete_topic("orders")
    broker.admin.create_topic("orders", 3)
    assert bodies(broker, queues[0]) == []
    assert broker.groups.offsets("g", [*queues, other]) == {other: 0}


@needs("owners", "epochs")
def test_an_owner_keeps_the_lock_of_a_deleted_queue_until_the_queue_has_another_owner(broker: Broker):
    broker.admin.create_topic("other", 1)
    queues, [other] = queues_of(broker), queues_of(broker, "other")
    tokens = locked(broker, "g", broker.groups.join("me"), [*queues, other])
    broker.admin.delete_topic("orders")
    assert [lock.queue for lock in broker.admin.locks("g")] == [other]
    assert broker.groups.renew(tokens) == broker.groups.stale(tokens) == []
    broker.groups.commit({tokens[0]: 1})
    broker.admin.create_topic("orders", 3)
    broker.groups.commit({tokens[0]: 1})
    assert broker.groups.offsets("g", queues) == {}, "the offset belongs to the deleted queue"
    with refused("LOCK.LOST"):
        broker.groups.reset({tokens[0]: 0})
    them = broker.groups.join("them")
    [theirs] = locked(broker, "g", them, queues[:1])
    with refused("LOCK.LOST"):
        broker.groups.commit({tokens[0]: 1})
    assert broker.groups.renew(tokens) == tokens[:1]
    broker.groups.unlock(tokens)
    assert [lock.queue for lock in broker.admin.locks("g")] == [theirs.queue, other]
    assert broker.groups.renew([theirs, *tokens]) == tokens
    broker.groups.leave(them)
    broker.admin.delete_topic("orders")
    assert [lock.queue for lock in broker.admin.locks("g")] == [other]
    assert broker.groups.stale([theirs]) == [theirs], "its owner has ended, so nobody completes a batch of the deleted queue"


@needs("offsets of topics")
def test_rows_staged_for_a_deleted_topic_are_refused_when_published(broker: Broker):
    broker.admin.create_topic("other", 1)
    queue, [other] = queues_of(broker)[0], queues_of(broker, "other")
    staging = broker.outbox.open(SinkBatch("s", 0), 0)
    staging.add(queue, rows("a"))
    staging.add(other, rows("b"))
    receipt = staging.receipt()
    broker.admin.delete_topic("other")
    with refused("TOPIC.MISSING", "'other'"):
        broker.outbox.publish(SinkBatch("s", 0), [receipt])
    if broker.capabilities.atomic_publish:
        assert bodies(broker, queue) == []


# -- retention --------------------------------------------------------------------------------------------------------------------


@needs("topic settings")
def test_retention_by_age_deletes_whole_chunks_that_are_too_old(broker: Broker, clock: FakeClock):
    broker.admin.create_topic("t", 1, retention_seconds=100.0)
    queue = queues_of(broker, "t")[0]
    for _ in range(4):
        broker.log.append({queue: rows(range(BIG))})
        clock.pass_(40)
    assert broker.log.bounds([queue])[queue] == QueueBounds(BIG, 4 * BIG)
    broker.log.append({queue: rows(["last"])})
    assert broker.log.bounds([queue])[queue] == QueueBounds(2 * BIG, 4 * BIG + 1)
    with refused("DATA_LOSS.AGED_OUT", f"0 to {2 * BIG - 1} ({2 * BIG})"):
        broker.log.pull(queue, 0, 10, 10, ("body",))
    clock.pass_(1000)
    assert broker.admin.trim("t") == {queue: 2 * BIG + 1}
    assert broker.log.bounds([queue])[queue] == QueueBounds(4 * BIG + 1, 4 * BIG + 1)
    assert broker.admin.trim("t") == {}


@needs("topic settings")
def test_retention_by_age_keeps_an_old_message_beside_a_young_one(broker: Broker, clock: FakeClock):
    """Small chunks are merged, and a chunk is deleted only when all its messages are too old."""
    broker.admin.create_topic("t", 1, retention_seconds=100.0)
    queue = queues_of(broker, "t")[0]
    broker.log.append({queue: rows(["old"])})
    clock.pass_(60)
    broker.log.append({queue: rows(["young"])})
    clock.pass_(60)
    assert broker.admin.trim("t") == {}
    assert bodies(broker, queue) == ["old", "young"]
    clock.pass_(60)
    assert broker.admin.trim("t") == {queue: 2}


@pytest.mark.holds("wall clock")
@needs("topic settings")
def test_retention_by_age_deletes_no_sooner_where_the_wall_clock_is_set(broker: Broker, clock: FakeClock):
    hour = 3600 * 1_000_000
    broker.admin.create_topic("t", 1, retention_seconds=1800.0)
    queue = queues_of(broker, "t")[0]

    def write_and_look() -> int:
        broker.log.append({queue: rows(range(BIG))})
        return broker.log.bounds([queue])[queue].min_offset

    assert write_and_look() == 0
    clock.pass_(600)
    clock.micros += hour
    assert write_and_look() == 0, "the first messages are ten minutes old and must stay"
    assert broker.admin.trim("t") == {}
    clock.pass_(600)
    clock.micros -= hour
    assert write_and_look() == 0, "the first messages are twenty minutes old and must stay"
    clock.micros += 24 * hour
    clock.pass_(601)
    assert write_and_look() == BIG, "the first messages are thirty minutes old and must be deleted"
    clock.pass_(1801)
    assert broker.admin.trim("t") == {queue: 3 * BIG}, "a clock change from before the retention time must not change ages"
    times = [
        row["store_timestamp"] for row in broker.log.pull(queue, 4 * BIG, 10, EVERYTHING, ("store_timestamp",)).to_pylist()
    ]
    assert times == sorted(times)


@pytest.mark.holds("wall clock")
@needs("topic settings")
def test_a_retention_that_is_added_knows_that_the_wall_clock_was_set_before(broker: Broker, clock: FakeClock):
    queue = queues_of(broker)[0]
    broker.log.append({queue: rows("abc")})
    clock.pass_(10)
    clock.micros += 24 * 3600 * 1_000_000
    broker.admin.alter_topic("orders", retention_seconds=1800.0)
    assert broker.admin.trim("orders") == {}
    clock.pass_(1801)
    assert broker.admin.trim("orders") == {queue: 3}


@needs("topic settings")
def test_a_retention_that_is_changed_counts_from_the_next_write(place: Place, broker: Broker, clock: FakeClock):
    made = broker.admin.create_topic("t", 1, retention_bytes=1 << 30)
    queue = queues_of(broker, "t")[0]
    for _ in range(3):
        broker.log.append({queue: rows(range(BIG))})
        clock.pass_(40)
    altered = place.connect().admin.alter_topic("t", retention_seconds=100.0)
    assert altered == replace(made, retention_seconds=100.0) == broker.log.topic("t")
    assert broker.log.bounds([queue])[queue] == QueueBounds(0, 3 * BIG)
    broker.log.append({queue: rows(["last"])})
    assert broker.log.bounds([queue])[queue] == QueueBounds(BIG, 3 * BIG + 1)
    assert broker.admin.alter_topic("t", retention_seconds=None, retention_bytes=None) == replace(made, retention_bytes=None)
    clock.pass_(1000)
    assert broker.admin.trim("t") == {}
    with refused("OPTION.INVALID", "retention_seconds"):
        broker.admin.alter_topic("t", retention_seconds=0)


def test_a_missing_topic_is_not_altered(broker: Broker):
    with refused("TOPIC.MISSING", "'none'"):
        broker.admin.alter_topic("none", retention_seconds=10.0)


@needs("topic settings")
def test_retention_by_size_keeps_at_least_what_it_says_and_not_a_chunk_more(broker: Broker):
    """The topic is not compressed, so that sizes are predictable. The last append is never deleted, however large it is."""
    broker.admin.create_topic("t", 1, retention_bytes=300_000, compression="none")
    queue = queues_of(broker, "t")[0]
    for _ in range(10):
        begin = broker.log.append({queue: rows([b"x" * 20] * BIG)})[queue].begin
        [info] = broker.admin.describe_topic("t")
        assert info.bounds.min_offset <= begin
        chunk = info.stored_bytes // info.chunks
        assert info.stored_bytes >= 300_000 or info.bounds.min_offset == 0
        assert info.stored_bytes < 300_000 + chunk
    assert info.bounds.min_offset > 0


@needs("topic settings")
def test_retention_by_size_counts_all_queues_together(broker: Broker):
    broker.admin.create_topic("t", 4, retention_bytes=600_000, compression="none")
    for _ in range(6):
        for queue in queues_of(broker, "t"):
            broker.log.append({queue: rows([b"x" * 20] * BIG)})
    infos = broker.admin.describe_topic("t")
    total, chunks = sum(info.stored_bytes for info in infos), sum(info.chunks for info in infos)
    assert 600_000 <= total < 600_000 + 4 * total // chunks
    assert all(info.bounds.min_offset > 0 for info in infos)


@needs("topic settings")
@pytest.mark.parametrize("retention", [{"retention_seconds": 10.0}, {"retention_bytes": 5_000_000}], ids=["age", "size"])
def test_retention_keeps_up_with_writes_of_many_chunks(broker: Broker, clock: FakeClock, retention: dict[str, Any]):
    broker.admin.create_topic("t", 1, compression="none", **retention)
    [queue], chunk = queues_of(broker, "t"), rows([b""] * BIG)
    for number in range(5):
        staging = broker.outbox.open(SinkBatch("s", number), 0)
        for _ in range(100):
            staging.add(queue, chunk)
        broker.outbox.publish(SinkBatch("s", number), [staging.receipt()])
        clock.pass_(11)
    # The last write stays, and by size a part of the one before.
    assert 100 <= sum(info.chunks for info in broker.admin.describe_topic("t")) <= 200


@needs("topic settings")
@pytest.mark.parametrize("occasion", ["append", "publish", "renewal"])
def test_retention_reaches_a_topic_that_nobody_writes_to(place: Place, broker: Broker, clock: FakeClock, occasion: str):
    broker.admin.create_topic("t", 1, retention_seconds=100.0)
    [idle], other = queues_of(broker, "t"), queues_of(broker)[0]
    broker.log.append({idle: rows(range(BIG))})
    clock.pass_(200)
    [token] = locked(broker, "g", broker.groups.join("me"), [other])
    # Before, somebody can still make the retention longer, as for a store that was restored.
    assert place.connect().log.bounds([idle])[idle] == QueueBounds(0, BIG)
    if occasion == "append":
        broker.log.append({other: rows("a")})
    elif occasion == "publish":
        broker.outbox.publish(SinkBatch("s", 0), [])
    else:
        broker.groups.renew([token])
    assert broker.log.bounds([idle])[idle] == QueueBounds(BIG, BIG)


def test_how_long_messages_are_kept_is_told_where_it_is_known(place: Place, broker: Broker):
    if "topic settings" in place.lacks:
        # The servers' default.
        assert broker.admin.kept_for(["orders"]) == {"orders": 72 * 3600}
        return
    broker.admin.create_topic("short", 1, retention_seconds=90.5)
    assert broker.admin.kept_for(["orders", "short", "missing"]) == {"short": 90.5}


@needs("trim")
def test_without_retention_nothing_is_deleted(broker: Broker, clock: FakeClock):
    queue = queues_of(broker)[0]
    broker.log.append({queue: rows(range(BIG))})
    clock.pass_(1e9)
    broker.log.append({queue: rows(["a"])})
    assert broker.admin.trim("orders") == {}
    assert broker.log.bounds([queue])[queue] == QueueBounds(0, BIG + 1)


@needs("trim")
def test_trim_deletes_whole_chunks_before_an_offset(broker: Broker):
    first, second, _ = queues_of(broker)
    for _ in range(3):
        broker.log.append({first: rows(range(BIG))})
    broker.log.append({second: rows(range(BIG))})
    assert broker.admin.trim("orders", {first: BIG - 1, second: 0}) == {}
    assert broker.admin.trim("orders", {first: 2 * BIG + 1}) == {first: 2 * BIG}
    assert broker.log.bounds([first, second]) == {first: QueueBounds(2 * BIG, 3 * BIG), second: QueueBounds(0, BIG)}
    assert bodies(broker, first) == [str(number) for number in range(BIG)]
    assert broker.admin.trim("orders", {first: 1 << 40}) == {first: BIG}
    assert broker.log.append({first: rows("ab")})[first].begin == 3 * BIG
    assert bodies(broker, first) == ["a", "b"]
    with refused("TOPIC.MISSING"):
        broker.admin.trim("nothing")
    with refused("TOPIC.NO_SUCH_QUEUE"):
        broker.admin.trim("orders", {first._replace(queue_id=9): 5})


@needs("trim")
def test_trim_of_one_topic_does_not_touch_another(broker: Broker):
    broker.admin.create_topic("other", 1)
    [other] = queues_of(broker, "other")
    broker.log.append({other: rows("abc")})
    with refused("TOPIC.NO_SUCH_QUEUE", "other"):
        broker.admin.trim("orders", {other: 3})
    assert len(bodies(broker, other)) == 3


@needs("chunks", "clock")
def test_a_topic_is_described_queue_by_queue(broker: Broker, clock: FakeClock):
    first = queues_of(broker)[0]
    begin = clock.micros
    broker.log.append({first: rows(range(BIG))})
    clock.pass_(5)
    broker.log.append({first: rows(range(BIG))})
    one, two, _ = broker.admin.describe_topic("orders")
    assert (one.queue, one.bounds, one.chunks) == (first, QueueBounds(0, 2 * BIG), 2)
    assert (one.first_timestamp, one.last_timestamp) == (begin, begin + 5_000_000)
    assert one.stored_bytes > 2 * BIG
    assert (two.bounds, two.chunks, two.stored_bytes, two.first_timestamp) == (QueueBounds(0, 0), 0, 0, None)
    with refused("TOPIC.MISSING"):
        broker.admin.describe_topic("nothing")


@needs("topic settings")
@pytest.mark.parametrize("compression", ["none", "lz4"])
def test_compression_changes_sizes_not_rows(broker: Broker, compression: str):
    broker.admin.create_topic("t", 1, compression=compression)
    queue = queues_of(broker, "t")[0]
    for _ in range(5):
        broker.log.append({queue: rows([b"abcd" * 100] * 500, tags=["x"] * 500)})
    assert bodies(broker, queue) == ["abcd" * 100] * 2500
    [info] = broker.admin.describe_topic("t")
    assert (info.stored_bytes < 200_000) is (compression == "lz4")
