"""Resizing a topic: which queues take messages and are read, rows that were routed before, and what a group waits for."""

from __future__ import annotations

import time
from collections import defaultdict

import pyarrow as pa
import pytest

from orderedmq.barrier import Barrier
from orderedmq.broker import Broker, ChooseAgain, Receipt, SinkBatch
from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import LockToken
from orderedmq.ownership.micro_batch import SourceRun
from orderedmq.parking import Parking, Ticket, lot_token, parked_queue
from orderedmq.routing.selector import HashSelector, by_queue
from orderedmq.schema import concat_batches
from orderedmq.tools.producer import Producer
from tests.contract.support import BIG, Place, bodies, locked, needs, queues_of, refused, rows

KEYS = [f"key-{number}" for number in range(20)]

resizes = needs("resizes")
atomic = needs("atomic resizes")
#: A queue has as its parents only queues in which RocketMQ's selectors may have put its keys.
by_selector = needs("selectors of topics")


def keyed(body: str) -> pa.RecordBatch:
    """Return a row for each key, whose body is the key and ``body``."""
    return rows([f"{key} {body}" for key in KEYS], sharding_key=KEYS)


def by_key(broker: Broker) -> dict[str, list[tuple[int, str]]]:
    """Return for each key the queues and bodies of its messages."""
    out: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for queue in queues_of(broker):
        for body in bodies(broker, queue):
            key, _, rest = body.partition(" ")
            out[key].append((queue.queue_id, rest))
    return out


def choice(_: int) -> ChooseAgain:
    chooser = HashSelector()
    return lambda some, queues: chooser.select(some, some.column("sharding_key"), queues)


def staged(broker: Broker, batch: SinkBatch, partition: int, some: pa.RecordBatch) -> Receipt:
    """Stage rows in the queues that their keys choose now."""
    staging = broker.outbox.open(batch, partition)
    targets = staging.targets("orders", broker.log.targets("orders"))
    chosen = HashSelector().select(some, some.column("sharding_key"), len(targets))
    for queue, those in by_queue(some, chosen, targets):
        staging.add(queue, those)
    return staging.receipt()


def numbered(batch: int, run: str = "run", *, own_selector: bool = False) -> SinkBatch:
    return SinkBatch("sink", batch, SourceRun("query", batch, run), own_selector=own_selector)


def waits(broker: Broker, group: str | None = "g", **positions: int) -> dict[int, tuple[int, list[int]]]:
    """Return for each queue that waits the offset of its barrier, and its parents."""
    given = {queue: positions[f"q{queue.queue_id}"] for queue in queues_of(broker) if f"q{queue.queue_id}" in positions}
    found = Barrier(broker, group).waits(["orders"], given)
    return {queue.queue_id: (wait.offset, [parent.queue.queue_id for parent in wait.parents]) for queue, wait in found.items()}


def held(broker: Broker, *queues: MessageQueue, offset: int | None = None) -> list[LockToken]:
    """Lock queues for the group g, and commit ``offset`` in each."""
    tokens = locked(broker, "g", broker.groups.join("me"), queues)
    if offset is not None:
        broker.groups.commit(dict.fromkeys(tokens, offset))
    return tokens


# -- the queues of a topic


def test_a_broker_that_cannot_resize_in_order_says_so(place: Place, broker: Broker):
    if "resizes" not in place.lacks:
        pytest.skip("this kind of broker resizes topics")
    with refused("OPTION.UNSUPPORTED", "'orders'", "5.0"):
        broker.admin.resize_topic("orders", 5)
    assert len(queues_of(broker)) == 3
    assert broker.log.resizes(["orders"]) == []


@atomic
@pytest.mark.holds("resize")
def test_a_queue_that_a_topic_lost_takes_no_more_messages_and_is_read_to_its_end(broker: Broker):
    first, _, third = every = queues_of(broker)
    broker.log.append({third: rows("abc")})
    resized = broker.admin.resize_topic("orders", 1)
    assert (resized.queues, resized.closed, broker.log.topic("orders")) == (1, 2, resized)
    assert broker.log.targets("orders") == [first]
    assert broker.log.queues("orders") == [first, third], "an empty queue is not read"
    assert [info.queue for info in broker.admin.describe_topic("orders")] == [first, third]
    for queue in every[1:]:
        with refused("TOPIC.NO_SUCH_QUEUE", queue.queue_id):
            broker.log.append({queue: rows("x")})
    batch = SinkBatch("sink", 0)
    staging = broker.outbox.open(batch, 0)
    staging.add(third, rows("x"))
    with refused("TOPIC.NO_SUCH_QUEUE", 2):
        broker.outbox.publish(batch, [staging.receipt()])
    assert bodies(broker, third) == ["a", "b", "c"]


@atomic
def test_a_queue_that_comes_back_continues_at_its_offset(broker: Broker):
    third = queues_of(broker)[2]
    broker.log.append({third: rows("abc")})
    broker.admin.resize_topic("orders", 1)
    broker.admin.trim("orders", {third: 3})
    assert third not in queues_of(broker)
    broker.admin.resize_topic("orders", 4)
    assert len(queues_of(broker)) == 4
    assert broker.log.append({third: rows("d")})[third] == (3, 4)
    assert broker.log.resizes(["orders"])[-1].ends[third] == 3


@atomic
def test_a_closed_queue_is_read_until_nothing_of_it_is_parked(broker: Broker):
    first, _, third = queues_of(broker)
    broker.log.append({third: rows("abc")})
    [token] = held(broker, third)
    broker.groups.park(token, [Parking(third, 1, Ticket(1, 1, 1, 9))])
    broker.groups.commit({token: 3})
    broker.admin.resize_topic("orders", 1)
    broker.admin.trim("orders", {third: 3})
    assert queues_of(broker) == [first, third]
    broker.groups.commit({lot_token(token): 1})
    assert queues_of(broker) == [first]


@resizes
def test_resizing_to_the_same_number_changes_nothing(broker: Broker):
    change = broker.log.change()
    assert broker.admin.resize_topic("orders", 3).queues == 3
    assert (broker.log.resizes(["orders"]), broker.log.change()) == ([], change)


@atomic
def test_resizes_are_forgotten_with_their_topic_and_with_the_messages_from_before_them(broker: Broker):
    first = queues_of(broker)[0]
    broker.log.append({first: rows("a")})
    broker.admin.resize_topic("orders", 4)
    broker.log.append({first: rows("b")})
    broker.admin.resize_topic("orders", 5)
    broker.admin.trim("orders", {first: 2})
    broker.admin.resize_topic("orders", 6)
    assert [len(resize.queues) for resize in broker.log.resizes(["orders"])] == [6]
    broker.admin.delete_topic("orders")
    assert broker.log.resizes(["orders"]) == []
    broker.admin.create_topic("orders", 2)
    broker.log.append({queues_of(broker)[1]: rows("a")})
    assert (broker.log.resizes(["orders"]), waits(broker)) == ([], {})


@atomic
def test_a_topic_with_a_thousand_queues_is_resized_within_a_tenth_of_a_second(broker: Broker):
    broker.admin.create_topic("wide", 1000)
    taken = []
    for count in (2000, 1000, 1999, 1000, 1500):
        begun = time.thread_time()
        broker.admin.resize_topic("wide", count)
        taken.append(time.thread_time() - begun)
    assert min(taken) <= 0.1, taken


# -- writers


@resizes
@pytest.mark.holds("same key, same queue", "resize")
def test_a_producer_routes_again_when_its_topic_was_resized(place: Place, broker: Broker):
    producer, other = Producer(broker.log, "orders"), place.connect()
    for count in (8, 2, 3, 7):
        producer.send(keyed(f"before {count}"))
        other.admin.resize_topic("orders", count)
        producer.send(keyed(f"after {count}"))
        Producer(other.log, "orders").send(keyed(f"other {count}"))
        chosen = [{queue for queue, body in found if body.endswith(f"r {count}")} for found in by_key(broker).values()]
        assert [len(queues) for queues in chosen] == [1] * len(KEYS)


@resizes
def test_a_producer_routes_again_when_its_topic_was_resized_and_has_its_former_queues_again(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
):
    producer, targets = Producer(broker.log, "orders"), broker.log.targets
    broker.admin.resize_topic("orders", 1)

    def resized_back(topic: str) -> list[MessageQueue]:
        broker.admin.resize_topic("orders", 3)
        return targets(topic)

    monkeypatch.setattr(broker.log, "targets", resized_back)
    producer.send(keyed("a"))
    assert len(by_key(broker)) == len(KEYS)


@resizes
def test_rows_that_a_group_passes_on_are_refused_whole_after_a_resize(broker: Broker):
    queues = queues_of(broker)
    [token] = held(broker, queues[0])
    broker.admin.resize_topic("orders", 2)
    with refused("TOPIC.QUEUE_COUNT", "'orders'"):
        broker.groups.pass_on(token, {queues[1]: rows("a")}, queues, 0)
    assert not any(bodies(broker, queue) for queue in queues_of(broker))


@atomic
@pytest.mark.holds("sink once", "resize")
@pytest.mark.parametrize("many", [1, BIG // len(KEYS)], ids=["receipt", "segment"])
@pytest.mark.parametrize("counts", [(8,), (2,), (5, 3)], ids=str)
def test_a_batch_that_was_routed_before_a_resize_is_routed_again_and_never_in_two_generations(
    broker: Broker, many: int, counts: tuple[int, ...]
):
    first = concat_batches([keyed(f"{number}{'x' * 99}") for number in range(many)])
    batches = [first, keyed("second"), keyed("third")]
    receipts = [staged(broker, numbered(0), number, batches[number]) for number in (0, 1)]
    broker.admin.resize_topic("orders", counts[0])
    # One task begins after the resize. Another resize comes while the first one's consequences are carried out.
    receipts.append(staged(broker, numbered(0), 2, batches[2]))
    rest = list(counts[1:])

    def again(partition: int) -> ChooseAgain:
        if rest:
            broker.admin.resize_topic("orders", rest.pop())
        return choice(partition)

    with refused("TOPIC.QUEUE_COUNT", "'orders'"):
        broker.outbox.publish(numbered(0), receipts)
    assert by_key(broker) == {}
    published = broker.outbox.publish(numbered(0), receipts, again=again)
    assert sum(span.messages for span in published.ranges.values()) == len(KEYS) * (many + 2)
    Producer(broker.log, "orders").send(keyed("fourth"))
    for messages in by_key(broker).values():
        assert len({queue for queue, _ in messages}) == 1
        assert [body for _, body in messages][-3:] == ["second", "third", "fourth"]
        assert [int(body.rstrip("x")) for _, body in messages[:-3]] == list(range(many))
    # A repeat routes by the generation of the published batch, so it is recognised.
    again_staged = [staged(broker, numbered(0, "again"), number, some) for number, some in enumerate(batches)]
    assert broker.outbox.publish(numbered(0, "again"), again_staged, again=choice).replayed


# -- what a group waits for


@pytest.fixture
def grown(broker: Broker) -> list[MessageQueue]:
    """The queues of a topic that grew from 3 to 6 when each of its queues had five messages."""
    for queue in queues_of(broker):
        broker.log.append({queue: rows("abcde")})
    broker.admin.resize_topic("orders", 6)
    return queues_of(broker)


@by_selector
@pytest.mark.holds("resize")
def test_the_groups_offsets_decide_for_queues_of_other_members(broker: Broker, grown: list[MessageQueue]):
    assert waits(broker) == {3: (0, [0]), 4: (0, [1]), 5: (0, [2])}, "a group that never read the topic"
    held(broker, grown[0], offset=4)
    held(broker, grown[1], offset=5)
    assert waits(broker) == {3: (0, [0]), 5: (0, [2])}
    # What the caller itself has processed counts for its own queues, also if the group's offset is higher.
    assert waits(broker, q0=5, q1=4) == {4: (0, [1]), 5: (0, [2])}
    assert waits(broker, None, q0=5, q1=5, q2=4) == {5: (0, [2])}


@by_selector
def test_a_seek_back_over_a_resize_lets_queues_wait_again(broker: Broker, grown: list[MessageQueue]):
    held(broker, *grown[:3], offset=5)
    assert waits(broker) == {}
    broker.admin.seek("g", {grown[1]: 2}, force=True)
    assert waits(broker) == {4: (0, [1])}
    broker.admin.seek("g", {grown[1]: 5}, force=True)
    assert waits(broker) == {}


@atomic
def test_messages_that_retention_has_deleted_hold_up_nothing(broker: Broker, grown: list[MessageQueue]):
    broker.admin.trim("orders", {grown[2]: 5})
    assert waits(broker) == {3: (0, [0]), 4: (0, [1])}


@resizes
@pytest.mark.holds("resize", "order per key")
def test_a_parked_key_from_before_a_resize_holds_the_queues_to_which_it_may_have_moved(
    broker: Broker, grown: list[MessageQueue]
):
    broker.log.append({grown[1]: rows("fg", sharding_key=["k", "k"])})
    broker.admin.resize_topic("orders", 2)
    broker.admin.resize_topic("orders", 6)
    tokens = held(broker, *grown)
    broker.groups.park(tokens[1], [Parking(grown[1], 5, Ticket(5, 1, 1, 9))])
    broker.groups.commit({token: broker.log.bounds([token.queue])[token.queue].max_offset for token in tokens})
    found = Barrier(broker, "g").waits(["orders"], {})
    assert {parent.key for wait in found.values() for parent in wait.parents if parent.queue == grown[1]} == {"k"}
    assert all(grown[1] in {parent.queue for parent in found[queue].parents} for queue in (grown[3], grown[5]))
    broker.groups.commit({lot_token(tokens[1]): 1})
    assert waits(broker) == {}


@resizes
def test_parked_messages_without_order_hold_up_nothing(broker: Broker, grown: list[MessageQueue]):
    tokens = held(broker, *grown[:3])
    # The messages have no key.
    broker.groups.park(tokens[1], [Parking(grown[1], 3, Ticket(3, 1, 1, 9))])
    broker.groups.commit(dict.fromkeys(tokens, 5))
    assert broker.log.bounds([parked_queue("g", grown[1])])
    assert waits(broker) == {}


@resizes
def test_every_queue_waits_for_every_other_if_a_selector_of_the_users_own_chose_queues(
    place: Place, broker: Broker, grown: list[MessageQueue]
):
    held(broker, *grown[:2], offset=5)
    if "selectors of topics" not in place.lacks:
        assert waits(broker) == {5: (0, [2])}
        batch = numbered(0, own_selector=True)
        broker.outbox.publish(batch, [staged(broker, batch, 0, keyed("a"))])
    assert waits(broker) == {0: (5, [2]), 1: (5, [2]), 3: (0, [2]), 4: (0, [2]), 5: (0, [2])}
