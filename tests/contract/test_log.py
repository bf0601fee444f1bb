"""The Log protocol: topics, bounds, appends, pulls and time search."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import accumulate

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orderedmq.broker import Broker, QueueBounds
from orderedmq.model import MAX_BODY_BYTES, MessageQueue
from orderedmq.schema import MESSAGE_SCHEMA, concat_batches, select_schema
from orderedmq.tools.producer import Producer
from tests.contract.support import (
    BIG,
    EVERYTHING,
    SECOND,
    FakeClock,
    Place,
    bodies,
    needs,
    pull,
    queues_of,
    read,
    refused,
    rows,
    span,
    state,
    users_properties,
)
from tests.examples import examples
from tests.grow import grow
from tests.waits import until

#: All examples of a property-based test share one place; each example uses its own topic.
SHARED_PLACE = settings(examples(0.5), suppress_health_check=[HealthCheck.function_scoped_fixture])


def when(micros: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)


# -- topics and bounds ------------------------------------------------------------------------------------------------------------


def test_topics_and_queues_are_listed_in_order(broker: Broker):
    broker.admin.create_topic("aaa", 1)
    broker.admin.create_topic("orders2", 12)
    assert [(topic.name, topic.queues) for topic in broker.log.topics()] == [("aaa", 1), ("orders", 3), ("orders2", 12)]
    assert [queue.queue_id for queue in queues_of(broker, "orders2")] == list(range(12))
    assert len({queue.broker_name for queue in queues_of(broker)}) == 1


def test_a_missing_topic_is_named_with_what_to_do(broker: Broker):
    missing = queues_of(broker)[0]._replace(topic="nothing")
    for call in (
        lambda: broker.log.topic("nothing"),
        lambda: broker.log.queues("nothing"),
        lambda: pull(broker, missing),
        lambda: broker.log.append({missing: rows("a")}),
    ):
        with refused("TOPIC.MISSING", "'nothing'", "create it"):
            call()


def test_a_missing_queue_is_named(broker: Broker):
    missing = queues_of(broker)[0]._replace(queue_id=3)
    for call in (lambda: pull(broker, missing), lambda: broker.log.append({missing: rows("a")})):
        with refused("TOPIC.NO_SUCH_QUEUE", "orders", 3):
            call()


def test_bounds_leave_out_what_does_not_exist(broker: Broker):
    first, second, _ = queues_of(broker)
    broker.log.append({second: rows("abc")})
    asked = [first, second, first._replace(queue_id=9), first._replace(topic="nothing")]
    assert broker.log.bounds(asked) == {first: QueueBounds(0, 0), second: QueueBounds(0, 3)}


def test_a_change_is_noticed_from_another_connection(place, broker: Broker):
    other = place.connect()
    before = other.log.change()
    assert before is None or other.log.change() == before
    broker.log.append({queues_of(broker)[0]: rows("a")})
    assert before is None or other.log.change() != before


# -- appending and pulling --------------------------------------------------------------------------------------------------------


def test_what_is_appended_comes_back_in_order_from_any_connection(place, broker: Broker):
    queue, other, _ = queues_of(broker)
    assert broker.log.append({queue: rows(["a", "b"])})[queue] == span(0, 2)
    assert broker.log.append({other: rows(["x"])})[other] == span(0, 1)
    assert broker.log.append({queue: rows(["c"])})[queue] == span(2, 3)
    assert bodies(place.connect(), queue) == ["a", "b", "c"]
    assert bodies(broker, other) == ["x"]


@pytest.mark.holds("all queues or none")
def test_rows_of_several_queues_are_appended_in_one_call_all_or_none(broker: Broker):
    first, second, third = queues_of(broker)
    assert broker.log.append({second: rows("ab"), first: rows("c")}) == {second: span(0, 2), first: span(0, 1)}
    before = state(broker, ["orders"])
    for condition, other, letters in (
        ("TOPIC.NO_SUCH_QUEUE", third._replace(queue_id=7), rows("e")),
        ("TOPIC.MISSING", third._replace(topic="nothing"), rows("e")),
        ("MESSAGE.TOO_LARGE", third, rows([b"x" * 5_000_000])),
    ):
        with refused(condition):
            broker.log.append({first: rows("d"), other: letters})
        assert state(broker, ["orders"]) == before


def test_every_column_has_its_value(broker: Broker):
    queue = queues_of(broker)[1]
    broker.log.append(
        {
            queue: rows(
                ["a", "b"], tags=["t", None], keys=[None, "k1 k2"], sharding_key=["s", "s"], properties=[[("p", "1")], None]
            )
        },
    )
    broker.log.append({queue: rows(["c"])})
    batch = pull(broker, queue, columns=tuple(MESSAGE_SCHEMA.names))
    while batch.num_rows < 3:
        batch = concat_batches([batch, pull(broker, queue, batch.num_rows, tuple(MESSAGE_SCHEMA.names))])
    assert batch.schema == MESSAGE_SCHEMA
    ids = batch.column("message_id").to_pylist()
    assert len(set(ids)) == 3
    assert all(ids)
    common = {"topic": "orders", "broker_name": queue.broker_name, "queue_id": 1, "reconsume_times": 0}
    nothing = {"tags": None, "keys": None, "sharding_key": None, "properties": None}
    of_broker = ("message_id", "born_timestamp", "store_timestamp")
    made = users_properties(batch.to_pylist())
    assert [{name: value for name, value in row.items() if name not in of_broker} for row in made] == [
        {**common, **nothing, "queue_offset": 0, "body": b"a", "tags": "t", "sharding_key": "s", "properties": [("p", "1")]},
        {**common, **nothing, "queue_offset": 1, "body": b"b", "keys": "k1 k2", "sharding_key": "s"},
        {**common, **nothing, "queue_offset": 2, "body": b"c"},
    ]
    assert all(row["born_timestamp"] <= row["store_timestamp"] for row in made)


@needs("clock")
def test_messages_have_the_time_of_their_append(broker: Broker, clock: FakeClock):
    queue = queues_of(broker)[1]
    born = clock.micros
    broker.log.append({queue: rows(["a", "b"])})
    clock.pass_(2.5)
    broker.log.append({queue: rows(["c"])})
    for name in ("born_timestamp", "store_timestamp"):
        assert [row[name] for row in read(broker, queue, 0, (name,))] == [when(born), when(born), when(born + 2_500_000)]


@pytest.mark.parametrize("name", MESSAGE_SCHEMA.names)
def test_a_column_alone_is_what_it_is_among_all(broker: Broker, name: str):
    queue = queues_of(broker)[0]
    broker.log.append({queue: rows(["a", "b", "c"], tags=["x", None, "z"], properties=[None, [("p", "1")], []])})
    everything = pull(broker, queue, columns=tuple(MESSAGE_SCHEMA.names))
    alone = pull(broker, queue, columns=(name,))
    assert alone.schema == select_schema((name,))
    assert alone.column(0) == everything.column(name)


@needs("empty values")
def test_a_property_may_have_no_value(broker: Broker):
    queue = queues_of(broker)[0]
    broker.log.append({queue: rows(["a", "b"], properties=[[("p", None), ("q", "")], []])})
    assert [row["properties"] for row in read(broker, queue, 0, ("properties",))] == [[("p", None), ("q", "")], []]


def test_no_columns_still_count_messages(broker: Broker):
    queue = queues_of(broker)[0]
    broker.log.append({queue: rows(["a", "b", "c"])})
    assert pull(broker, queue, 1, ()).num_rows == 2
    assert pull(broker, queue, 3, ()).num_rows == 0


def test_a_column_that_no_message_has_is_refused(broker: Broker):
    for offset in (0, 1):
        with refused("SCHEMA.UNKNOWN_COLUMN", "'colour'"):
            pull(broker, queues_of(broker)[0], 0, ("body", "colour"))
        broker.log.append({queues_of(broker)[0]: rows(["a"] * offset)})


def test_a_pull_at_the_end_is_empty_and_in_the_right_schema(broker: Broker):
    queue = queues_of(broker)[0]
    assert pull(broker, queue, 0, ("body", "queue_offset")).num_rows == 0
    broker.log.append({queue: rows(["a", "b"])})
    at_end = pull(broker, queue, 2, ("body", "queue_offset"))
    assert at_end.num_rows == 0
    assert at_end.schema == select_schema(("body", "queue_offset"))


def test_a_pull_behind_the_end_is_refused(broker: Broker):
    queue = queues_of(broker)[0]
    broker.log.append({queue: rows(["a", "b"])})
    with refused("DATA_LOSS.BEYOND_END", 3, queue):
        pull(broker, queue, 3)


@needs("trim")
def test_a_pull_before_the_first_message_names_what_is_gone(broker: Broker):
    queue = queues_of(broker)[0]
    broker.log.append({queue: rows(["a", "b", "c"])})
    broker.admin.trim("orders", {queue: 3})
    begin = broker.log.bounds([queue])[queue].min_offset
    assert begin == 3
    broker.log.append({queue: rows(["d"])})
    with refused("DATA_LOSS.AGED_OUT", "1 to 2 (2)", queue):
        pull(broker, queue, 1)
    assert bodies(broker, queue) == ["d"]


@needs("empty recreation")
def test_a_pull_under_another_anchor_is_refused(broker: Broker):
    queue = queues_of(broker)[0]
    old = broker.log.topic("orders").incarnation
    broker.log.append({queue: rows(["old"])})
    assert broker.log.pull(queue, 0, 10, 10, ("body",), old).num_rows == 1
    broker.admin.delete_topic("orders")
    with refused("TOPIC.MISSING"):
        broker.log.pull(queue, 0, 10, 10, ("body",), old)
    broker.admin.create_topic("orders", 3)
    assert broker.log.topic("orders").incarnation != old
    with refused("DATA_LOSS.TOPIC_RECREATED", "orders"):
        broker.log.pull(queue, 0, 10, 10, ("body",), old)
    assert broker.log.pull(queue, 0, 10, 10, ("body",)).num_rows == 0


def test_an_anchor_tells_a_topic_from_a_later_one_of_its_name(broker: Broker, place: Place):
    one, two = queues_of(broker)[:2]
    broker.log.append({one: rows(range(10))})
    broker.log.append({two: rows(range(3))})
    anchor = broker.log.anchor("orders", {one: 10, two: 2})
    assert anchor
    assert not broker.log.is_another("orders", anchor)
    broker.log.append({one: rows(range(5))})
    assert not place.connect().log.is_another("orders", anchor)
    assert not broker.log.is_another("orders", "")
    broker.admin.delete_topic("orders")
    other = place.connect()
    for call in (lambda: other.log.is_another("orders", anchor), lambda: other.log.anchor("orders", {one: 10})):
        with refused("TOPIC.MISSING", "orders"):
            call()
    broker.admin.create_topic("orders", 3)
    for count in (0, 30):
        if count:
            broker.log.append({one: rows(range(count))})
        assert place.connect().log.is_another("orders", anchor)
    assert not place.connect().log.is_another("orders", broker.log.anchor("orders", {one: 30}))


def test_messages_of_a_recreated_topic_have_other_ids(broker: Broker):
    queue = queues_of(broker)[0]
    seen = set()
    for _ in range(2):
        broker.log.append({queue: rows(["a", "b"])})
        seen |= set(pull(broker, queue, 0, ("message_id",)).column(0).to_pylist())
        broker.admin.delete_topic("orders")
        broker.admin.create_topic("orders", 3)
    assert len(seen) == 4


def test_slices_are_appended_as_what_they_show(broker: Broker):
    queue = queues_of(broker)[0]
    whole = rows(
        range(100), tags=[str(number) for number in range(100)], properties=[[("n", str(number))] for number in range(100)]
    )
    for begin, count in ((90, 10), (0, 1), (37, 5), (50, 0)):
        broker.log.append({queue: whole.slice(begin, count)})
    expected = [*range(90, 100), 0, *range(37, 42)]
    assert users_properties(read(broker, queue, 0, ("body", "tags", "properties"))) == [
        {"body": str(number).encode(), "tags": str(number), "properties": [("n", str(number))]} for number in expected
    ]


def queues_by_key(broker: Broker) -> dict[str, set[int]]:
    """Return the queues that have messages of each sharding key."""
    found: dict[str, set[int]] = {}
    for queue in queues_of(broker):
        for row in read(broker, queue, columns=("sharding_key",)):
            found.setdefault(row["sharding_key"], set()).add(queue.queue_id)
    return found


@pytest.mark.holds("same key, same queue")
@pytest.mark.parametrize("count", [8, 2])
def test_a_producer_chooses_among_the_queues_that_its_topic_has_now(place: Place, broker: Broker, count: int):
    keyed = rows(range(20), sharding_key=[f"key-{number}" for number in range(20)])
    producer, other = Producer(broker.log, "orders"), place.connect()
    if count > len(queues_of(broker)):
        grow(other, "orders", count)
    else:
        other.admin.delete_topic("orders")
        other.admin.create_topic("orders", count)
    until(lambda: len(broker.log.targets("orders")) == count, "the connection sees the change")
    producer.send(keyed)
    Producer(other.log, "orders").send(keyed)
    assert [len(queues) for queues in queues_by_key(other).values()] == [1] * 20


@pytest.mark.holds("same key, same queue")
def test_a_producer_keeps_the_order_of_its_rows_in_each_queue(broker: Broker):
    Producer(broker.log, "orders").send(rows(range(300), sharding_key=[f"key-{number % 7}" for number in range(300)]))
    queues = [list(map(int, bodies(broker, queue))) for queue in queues_of(broker)]
    assert sum(map(bool, queues)) > 1
    assert queues == list(map(sorted, queues))


def test_a_producer_refuses_a_column_that_messages_do_not_have_or_that_key_names_and_rows_lack(broker: Broker):
    producer = Producer(broker.log, "orders")
    events = pa.record_batch({"body": [b"created", b"paid"], "key": ["order-1", "order-1"]})
    with refused("SCHEMA.UNKNOWN_COLUMN", "column 'key'"):
        producer.send(events)
    with refused("SCHEMA.MISSING_COLUMN", "'order'"):
        producer.send(events, key="order")
    assert [bodies(broker, queue) for queue in queues_of(broker)] == [[], [], []]
    producer.send(events, key="key")
    assert queues_by_key(broker).keys() == {"order-1"}


def test_rows_are_refused_whole_if_the_topic_has_other_queues_than_those_they_were_chosen_among(place: Place, broker: Broker):
    queues = queues_of(broker)
    broker.log.append({queues[0]: rows("a")}, among=queues)
    grow(place.connect(), "orders", 4)
    until(lambda: len(broker.log.targets("orders")) == 4, "the connection sees the new queue")
    with refused("TOPIC.QUEUE_COUNT", "'orders'"):
        broker.log.append({queue: rows("b") for queue in queues}, among=queues)
    assert [bodies(broker, queue) for queue in queues_of(broker)] == [["a"], [], [], []]


def test_a_message_of_the_greatest_size_passes(broker: Broker):
    queue = queues_of(broker)[0]
    broker.log.append({queue: rows([b"a", b"x" * MAX_BODY_BYTES, b"b"])})
    assert [len(row["body"]) for row in read(broker, queue)] == [1, MAX_BODY_BYTES, 1]


@pytest.mark.parametrize(
    ("bad", "condition"),
    [
        (pa.record_batch({"tags": pa.array(["a"])}), "SCHEMA.MISSING_COLUMN"),
        (pa.record_batch({"body": pa.array([1.5])}), "SCHEMA.WRONG_TYPE"),
        (pa.record_batch({"body": pa.array([b"a", None])}), "MESSAGE.NULL_BODY"),
        (rows([b"a", b"x" * (MAX_BODY_BYTES + 1)]), "MESSAGE.TOO_LARGE"),
        (rows(["a"], sharding_key=["k" * 5000]), "MESSAGE.KEY_TOO_LONG"),
        (rows(["a"], properties=[[("p", "v" * 40_000)]]), "MESSAGE.PROPERTIES_TOO_LARGE"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rows_that_are_no_messages_are_refused_whole(broker: Broker, bad, condition: str):
    queue = queues_of(broker)[0]
    broker.log.append({queue: rows(["before"])})
    before = state(broker, ["orders"])
    with refused(condition, queue):
        broker.log.append({queue: bad})
    assert state(broker, ["orders"]) == before


# -- time -------------------------------------------------------------------------------------------------------------------------


@needs("clock", "trim")
def test_offset_at_finds_the_first_message_at_or_after_a_time(broker: Broker, clock: FakeClock):
    queue = queues_of(broker)[0]
    begin = clock.micros
    assert broker.log.offset_at(queue, begin) == 0
    for number in range(20):
        broker.log.append({queue: rows([number, number])})
        clock.pass_(1.0)
    for number in range(20):
        assert broker.log.offset_at(queue, begin + number * SECOND) == 2 * number
        assert broker.log.offset_at(queue, begin + number * SECOND - 1) == 2 * number
        assert broker.log.offset_at(queue, begin + number * SECOND + 1) == 2 * number + 2
    assert broker.log.offset_at(queue, 0) == 0
    assert broker.log.offset_at(queue, 1 << 60) == 40
    broker.admin.trim("orders", {queue: 20})
    least = broker.log.bounds([queue])[queue].min_offset
    assert broker.log.offset_at(queue, 0) == least


def test_store_times_never_go_back_when_the_clock_does(broker: Broker, clock: FakeClock):
    queue = queues_of(broker)[0]
    for seconds in (0, -3600, 1, 5000, -86400):
        clock.micros += seconds * SECOND
        broker.log.append({queue: rows(["a"])})
    stamps = [row["store_timestamp"] for row in read(broker, queue, 0, ("store_timestamp",))]
    assert stamps == sorted(stamps)
    for number, stamp in enumerate(stamps):
        micros = int((stamp - when(0)) / timedelta(microseconds=1))
        assert broker.log.offset_at(queue, micros) == stamps.index(stamp) <= number


def test_messages_are_asked_for_when_they_were_stored(broker: Broker, clock: FakeClock):
    first, second, empty = queues_of(broker)
    broker.log.append({first: rows(["a", "b"])})
    clock.pass_(1.0)
    broker.log.append({first: rows(["c"]), second: rows(["d"])})
    stamps = {
        queue: [
            int((row["store_timestamp"] - when(0)) / timedelta(microseconds=1))
            for row in read(broker, queue, 0, ("store_timestamp",))
        ]
        for queue in (first, second)
    }
    assert stamps[first][0] < stamps[first][2]
    for offset in range(3):
        assert broker.log.stored_at({first: offset}) == {first: stamps[first][offset]}
    assert broker.log.stored_at({first: 2, second: 0, empty: 0}) == {first: stamps[first][2], second: stamps[second][0]}
    missing = [first._replace(queue_id=99), first._replace(topic="missing")]
    assert broker.log.stored_at({first: 3, **dict.fromkeys(missing, 0)}) == {}


@needs("trim")
def test_of_a_message_that_is_gone_nobody_knows_when_it_was_stored(broker: Broker):
    queue = queues_of(broker)[0]
    for _ in range(2):
        broker.log.append({queue: rows(range(BIG))})
    broker.admin.trim("orders", {queue: BIG})
    assert broker.log.stored_at({queue: 0}) == {}
    assert list(broker.log.stored_at({queue: BIG})) == [queue]


# -- against a plain model --------------------------------------------------------------------------------------------------------

BATCHES = st.lists(
    st.tuples(st.lists(st.integers(0, 30), min_size=1, max_size=30), st.sampled_from([0.0, 0.0, 0.001, 0.04])),
    min_size=1,
    max_size=12,
)


@SHARED_PLACE
@given(batches=BATCHES, data=st.data())
def test_any_appends_read_as_a_plain_list_does(place: Place, broker: Broker, clock: FakeClock, batches, data):
    """Compares bodies, times, pulls, time search and byte counts with a list, before and after a trim."""
    name = f"model-{len(broker.log.topics())}"
    broker.admin.create_topic(name, 1)
    queue = queues_of(broker, name)[0]
    written: list[bytes] = []
    for lengths, pause in batches:
        values = [b"%d" % len(written) * length for length in lengths]
        assert broker.log.append({queue: rows(values)})[queue] == span(len(written), len(written) + len(values))
        written += values
        clock.pass_(pause)
    stored = [row["store_timestamp"] for row in read(broker, queue, 0, ("store_timestamp",))]
    model = [(body, int((stamp - when(0)) / timedelta(microseconds=1))) for body, stamp in zip(written, stored)]
    assert len(stored) == len(written)
    least = 0
    if "trim" not in place.lacks and data.draw(st.booleans(), "trim"):
        broker.admin.trim(name, {queue: data.draw(st.integers(0, len(model)), "before")})
        least = broker.log.bounds([queue])[queue].min_offset
    end = len(model)
    assert broker.log.bounds([queue])[queue] == QueueBounds(least, end)
    for _ in range(3):
        offset = data.draw(st.integers(least, end), "offset")
        most, size = data.draw(st.integers(1, 40), "messages"), data.draw(st.integers(0, 400), "bytes")
        batch = broker.log.pull(queue, offset, most, size, ("queue_offset", "body", "store_timestamp"))
        got = [(row["queue_offset"], row["body"], row["store_timestamp"]) for row in batch.to_pylist()]
        assert got == [(n, model[n][0], when(model[n][1])) for n in range(offset, offset + len(got))]
        assert len(got) <= most
        assert bool(got) == (offset < end)
        assert len(got) == 1 or sum(len(body) for _, body, _ in got) <= size
        begin, stop = sorted((data.draw(st.integers(least, end), "begin"), data.draw(st.integers(least, end), "end")))
        sums = list(accumulate(len(body) for body, _ in model[begin:stop]))
        limit = data.draw(st.integers(0, 600) | st.sampled_from(sums or [0]), "limit")
        reached = broker.log.advance(queue, begin, stop, limit)
        if "sizes" in place.lacks:
            assert begin <= reached <= stop
        else:
            assert reached == begin + sum(total <= limit for total in sums)
        moment = data.draw(st.sampled_from([stamp for _, stamp in model]), "time") + data.draw(
            st.sampled_from([-1, 0, 1]), "shift"
        )
        later = [n for n in range(least, end) if model[n][1] >= moment]
        assert broker.log.offset_at(queue, moment) == (later[0] if later else end)


def test_advance_of_an_empty_range_stays(broker: Broker):
    queue = queues_of(broker)[0]
    assert broker.log.advance(queue, 0, 0, 10) == 0
    broker.log.append({queue: rows(["abc", "d"])})
    for begin in (0, 1, 2):
        assert broker.log.advance(queue, begin, begin, 10) == begin
    assert broker.log.advance(queue, 0, 2, EVERYTHING) == 2
    assert broker.log.advance(queue, 0, 2, 3) == 1
    assert broker.log.advance(queue, 0, 2, 2) == 0


@needs("trim")
def test_messages_that_were_deleted_count_as_empty(broker: Broker):
    """A query plans with bounds that were read before retention deleted the messages."""
    queue = queues_of(broker)[0]
    broker.log.append({queue: rows(["abc", "d"])})
    broker.admin.trim("orders", {queue: 2})
    assert broker.log.advance(queue, 0, 2, 1) == 2


def test_queues_do_not_mix(broker: Broker):
    """The topics have names that begin alike, and the queue numbers include limits of a byte (255, 256)."""
    broker.admin.create_topic("orders-1", 300)
    broker.admin.create_topic("order", 1)
    some = [*queues_of(broker), *queues_of(broker, "order"), *[queues_of(broker, "orders-1")[n] for n in (0, 1, 255, 256, 257)]]
    for turn in range(3):
        for queue in some:
            broker.log.append({queue: rows([f"{queue} {turn}"])})
    for queue in some:
        assert bodies(broker, queue) == [f"{queue} {turn}" for turn in range(3)]
    broker.admin.delete_topic("orders")
    assert bodies(broker, MessageQueue("orders-1", some[0].broker_name, 256)) == [f"{some[-2]} {turn}" for turn in range(3)]
