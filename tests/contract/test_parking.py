"""A group's parking lots: parked messages come back once, in order and unchanged, and none is lost in between.

This module is long because every rule of a lot is tested with every kind of broker.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from orderedmq.broker import Broker, SinkBatch
from orderedmq.model import MAX_NAME_LENGTH, MAX_OFFSET, MessageQueue, OffsetRange
from orderedmq.ownership.lock import LockToken
from orderedmq.ownership.micro_batch import SourceRun
from orderedmq.parking import (
    AT_ONCE,
    DEAD_LETTERED,
    HELD,
    LOT_COLUMNS,
    RESTORE_COLUMNS,
    Command,
    Lot,
    Parking,
    Ticket,
    given_back,
    lot_token,
    parked_queue,
    restore,
)
from orderedmq.rocketmq.codec.stored_message import UNIQ_KEY
from orderedmq.rows.dead_letters import dead_letter_properties
from orderedmq.schema import MESSAGE_SCHEMA
from orderedmq.tools.dead_letters import LetterFilter, letter_queues
from orderedmq.tools.dead_letters import read as read_letters
from orderedmq.tools.parked import LotReader, give, parked_keys
from orderedmq.tools.replay import replay_dead_letters
from tests.contract.support import (
    BIG,
    FakeClock,
    bodies,
    locked,
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
from tests.grow import grow

LOTS = "%PARKED%g%orders"
ALL = tuple(MESSAGE_SCHEMA.names)


def put(source: MessageQueue, at: int, offset: int | None = None, **ticket: Any) -> Parking:
    """``at`` is the place to copy from. ``offset`` is the message's offset, which differs if the message is parked again."""
    return Parking(source, at, Ticket(at if offset is None else offset, **{"attempts": 1, "parkings": 1, "due": 9, **ticket}))


def park(broker: Broker, token: LockToken, offsets: Iterable[int]) -> list[bool]:
    return broker.groups.park(token, [put(token.queue, offset) for offset in offsets])


def lot_of(broker: Broker, queue: MessageQueue, group: str = "g") -> Lot:
    place = parked_queue(group, queue)
    lot = Lot(broker.groups.offsets(group, [place]).get(place, 0))
    end = broker.log.bounds([place])[place].max_offset
    while lot.end < end:
        lot.add(pull(broker, place, lot.end, LOT_COLUMNS))
    return lot


def parked(broker: Broker, queue: MessageQueue, group: str = "g") -> list[dict[str, Any]]:
    """Return the messages in the lot as they come back, each with its ticket."""
    lot, out = lot_of(broker, queue, group), list[dict[str, Any]]()
    at = lot.begin
    while at < lot.end:
        batch = pull(broker, parked_queue(group, queue), at, RESTORE_COLUMNS)
        found, tickets = restore(batch, queue, lot)
        out += [{**row, "ticket": ticket} for row, (_, ticket) in zip(found.to_pylist(), tickets, strict=True)]
        at += batch.num_rows
    return out


def offsets(broker: Broker, queue: MessageQueue, group: str = "g") -> list[int]:
    """Return the offsets of the messages in the lot, in its order."""
    return [row["queue_offset"] for row in parked(broker, queue, group)]


def everything(broker: Broker) -> Any:
    return state(broker, [topic.name for topic in broker.log.topics()]), broker.log.change()


# -- parked messages


def test_the_first_parked_message_makes_a_lot_for_each_queue_of_its_topic(broker: Broker, token: LockToken):
    assert park(broker, token, [3]) == [True]
    topic = broker.log.topic(LOTS)
    assert (topic.queues, topic.retention_seconds, topic.retention_bytes) == (3, None, None)
    assert bodies(broker, parked_queue("g", token.queue)) == ["3"]
    assert len(bodies(broker, token.queue)) == 10, "a parked message also stays in its queue"
    assert broker.groups.offsets("g", [token.queue]) == {}


@pytest.mark.holds("parked as sent")
def test_a_parked_message_is_in_all_its_columns_the_message_that_was_sent(broker: Broker, clock: FakeClock, token: LockToken):
    columns = {
        "tags": ["t", None],
        "keys": [None, "k1 k2"],
        "sharding_key": ["s", None],
        "properties": [[("own", "x"), ("ä\u202e", "ö")], None],
    }
    broker.log.append({token.queue: rows([b"\0\xff", "two"], **columns)})
    sent = pull(broker, token.queue, 10, ALL).to_pylist()
    clock.pass_(5)
    parkings = [put(token.queue, 10, attempts=4, parkings=2, due=77, error="why \u202e"), put(token.queue, 11)]
    assert broker.groups.park(token, parkings) == [True, True]
    found = parked(broker, token.queue)
    tickets = [row.pop("ticket") for row in found]
    assert [row.pop("reconsume_times") for row in found] == [4, 1]
    assert [row.pop("reconsume_times") for row in sent] == [0, 0]
    assert users_properties(found) == users_properties(sent)
    assert [(one.offset, one.attempts, one.parkings, one.due, one.error) for one in tickets] == [
        (10, 4, 2, 77, "why \u202e"),
        (11, 1, 1, 9, ""),
    ]


def test_a_message_that_is_parked_again_is_still_the_message_that_was_sent(broker: Broker, clock: FakeClock, token: LockToken):
    lot = parked_queue("g", token.queue)
    park(broker, token, [3, 4])
    [before, _] = parked(broker, token.queue)
    clock.pass_(5)
    assert broker.groups.park(token, [put(lot, 0, 3, attempts=2, parkings=2, due=HELD)]) == [True]
    broker.groups.commit({lot_token(token): 1})
    [behind, again] = parked(broker, token.queue)
    assert behind["queue_offset"] == 4
    ticket, former = again.pop("ticket"), before.pop("ticket")
    assert (again.pop("reconsume_times"), before.pop("reconsume_times")) == (2, 1)
    assert again == before
    assert (ticket.attempts, ticket.parkings, ticket.due) == (2, 2, HELD)
    assert (ticket.message_id, ticket.born, ticket.stored) == (former.message_id, former.born, former.stored)


def test_messages_are_parked_in_the_order_in_which_they_are_given(broker: Broker, token: LockToken):
    lot = parked_queue("g", token.queue)
    park(broker, token, [7, 2, 5])
    parkings = [put(token.queue, 9), put(lot, 1, 2), put(token.queue, 0), put(lot, 0, 7), put(token.queue, 1)]
    assert broker.groups.park(token, parkings) == [True] * 5
    assert bodies(broker, lot, 3) == ["9", "2", "0", "7", "1"]


@needs("chunks")
def test_messages_are_copied_from_any_number_of_chunks(broker: Broker, token: LockToken):
    broker.log.append({token.queue: rows(range(10, BIG))})
    broker.log.append({token.queue: rows(range(BIG, 2 * BIG))})
    chosen = [2 * BIG - 1, 9, *range(BIG - 3, BIG + 3), 10, 0]
    assert park(broker, token, chosen) == [True] * len(chosen)
    assert bodies(broker, parked_queue("g", token.queue)) == [str(offset) for offset in chosen]
    assert park(broker, token, range(2 * BIG)) == [True] * 2 * BIG
    assert sorted(offsets(broker, token.queue)) == list(range(2 * BIG))


def test_nothing_to_park_makes_no_topic(broker: Broker, token: LockToken):
    assert park(broker, token, []) == []
    assert [topic.name for topic in broker.log.topics()] == ["orders"]


def test_lots_grow_with_their_topic(broker: Broker, token: LockToken):
    park(broker, token, [3])
    grow(broker, "orders", 5)
    new = queues_of(broker)[4]
    broker.log.append({new: rows("a")})
    [other] = locked(broker, "g", broker.groups.join("other"), [new])
    assert park(broker, other, [0]) == [True]
    assert broker.log.topic(LOTS).queues == 5
    assert (offsets(broker, token.queue), offsets(broker, new)) == ([3], [0])


def test_each_group_and_each_queue_has_a_lot_of_its_own(broker: Broker, token: LockToken):
    second = queues_of(broker)[1]
    broker.log.append({second: rows(range(10))})
    me = broker.groups.join("other")
    [beside] = locked(broker, "g", me, [second])
    [elsewhere] = locked(broker, "h", me, [token.queue])
    for one in (token, beside, elsewhere):
        assert park(broker, one, [3]) == [True]
    for queue, group in ((token.queue, "g"), (second, "g"), (token.queue, "h")):
        assert offsets(broker, queue, group) == [3]


# -- once


def test_what_was_parked_from_its_place_is_not_parked_from_there_again(broker: Broker, token: LockToken):
    lot = parked_queue("g", token.queue)
    park(broker, token, [3, 4])
    broker.groups.park(token, [put(lot, 0, 3)])
    before = everything(broker)
    for again in ([put(token.queue, 3), put(token.queue, 4)], [put(token.queue, 4, due=1)], [put(lot, 0, 3)]):
        assert broker.groups.park(token, again) == [True] * len(again)
    assert everything(broker) == before


def test_a_place_that_is_given_twice_is_parked_once(broker: Broker, token: LockToken):
    assert broker.groups.park(token, [put(token.queue, 3), put(token.queue, 3, due=1)]) == [True, True]
    [row] = parked(broker, token.queue)
    assert row["ticket"].due == 9


@pytest.mark.holds("parked once")
def test_of_puts_that_are_partly_new_only_these_are_parked(broker: Broker, token: LockToken):
    park(broker, token, [3, 5])
    assert park(broker, token, [2, 3, 4, 5, 6]) == [True] * 5
    assert offsets(broker, token.queue) == [3, 5, 2, 4, 6]


@pytest.mark.holds("parked once")
def test_a_place_that_the_groups_offset_has_passed_is_settled(broker: Broker, token: LockToken):
    park(broker, token, [3])
    broker.groups.commit({token: 5})
    before = everything(broker)
    assert park(broker, token, [4, 3, 0]) == [False] * 3
    assert everything(broker) == before
    assert park(broker, token, [4, 5, 3, 6]) == [False, True, False, True]
    assert offsets(broker, token.queue) == [3, 5, 6]


def test_a_place_of_a_lot_that_the_groups_offset_has_passed_is_settled_too(broker: Broker, token: LockToken):
    lot = parked_queue("g", token.queue)
    park(broker, token, [3, 4, 5])
    broker.groups.commit({lot_token(token): 2})
    assert broker.groups.park(token, [put(lot, 0, 3), put(lot, 1, 4), put(lot, 2, 5)]) == [False, False, True]
    assert bodies(broker, lot, 2) == ["5", "5"]
    assert offsets(broker, token.queue) == [5], "of two copies of a message only one counts"


# -- all or none


def test_a_message_that_is_not_there_keeps_the_others_from_being_parked(broker: Broker, token: LockToken):
    before = everything(broker)
    with refused("DATA_LOSS.BEYOND_END", token.queue, 10):
        park(broker, token, [3, 10])
    assert everything(broker) == before
    assert park(broker, token, [3, 9]) == [True, True]


@needs("trim")
def test_a_message_that_retention_has_deleted_keeps_the_others_from_being_parked(broker: Broker, token: LockToken):
    broker.log.append({token.queue: rows([bytes(BIG)] * BIG)})
    broker.admin.trim("orders", {token.queue: 10 + BIG})
    begin = broker.log.bounds([token.queue])[token.queue].min_offset
    broker.log.append({token.queue: rows("z")})
    before = everything(broker)
    with refused("DATA_LOSS.AGED_OUT", token.queue):
        park(broker, token, [10 + BIG, begin - 1])
    assert everything(broker) == before


# -- who may park


@pytest.fixture
def fenced(broker: Broker) -> None:
    if not broker.capabilities.fenced:
        pytest.skip("this kind of broker does not check epochs")


def hand_over(broker: Broker, clock: FakeClock, token: LockToken) -> LockToken:
    """Return the token of another owner, who took the queue after the lock expired."""
    clock.pass_(61)
    return locked(broker, "g", broker.groups.join("them"), [token.queue])[0]


@pytest.mark.usefixtures("fenced")
@pytest.mark.parametrize("repeat", [False, True])
def test_a_stale_token_parks_nothing(broker: Broker, clock: FakeClock, token: LockToken, repeat: bool):
    if repeat:
        park(broker, token, [3])
    them = hand_over(broker, clock, token)
    before = everything(broker)
    with refused("LOCK.LOST", token.queue, "'g'", them.client_id):
        park(broker, token, [3, 4])
    assert everything(broker) == before


def test_a_lot_is_held_with_its_queue(broker: Broker, token: LockToken):
    lot = lot_token(token)
    assert broker.groups.check(lot)
    assert broker.groups.stale([token, lot]) == []
    broker.groups.unlock([token])
    assert not broker.groups.check(lot)
    assert broker.groups.stale([lot, token]) == [lot, token]


@pytest.mark.holds("lot follows its queue")
def test_a_lots_offset_moves_with_its_queues_in_one_commit(broker: Broker, token: LockToken):
    park(broker, token, [3, 4])
    broker.groups.commit({token: 8, lot_token(token): 1})
    both = [token.queue, lot_token(token).queue]
    assert broker.groups.offsets("g", both) == dict(zip(both, (8, 1), strict=True))
    broker.groups.commit({token: 7, lot_token(token): 0})
    assert broker.groups.offsets("g", both) == dict(zip(both, (8, 1), strict=True))


@pytest.mark.holds("lot follows its queue")
@pytest.mark.usefixtures("fenced")
def test_a_lot_is_handed_over_with_its_queue(broker: Broker, clock: FakeClock, token: LockToken):
    park(broker, token, [3, 4, 5])
    broker.groups.commit({token: 6, lot_token(token): 1})
    them = hand_over(broker, clock, token)
    before = everything(broker)
    for lost in ({lot_token(token): 3}, {token: 10, lot_token(token): 3}):
        with refused("LOCK.LOST", token.queue, them.client_id):
            broker.groups.commit(lost)
    assert broker.groups.stale([lot_token(token), lot_token(them)]) == [lot_token(token)]
    assert not broker.groups.check(lot_token(token))
    assert everything(broker) == before
    assert broker.groups.park(them, [put(lot_token(them).queue, 1, 4)]) == [True]
    broker.groups.commit({them: 7, lot_token(them): 2})
    assert offsets(broker, token.queue) == [5, 4]


@pytest.mark.parametrize("stale", [False, True])
def test_a_publish_moves_the_offsets_of_queue_and_lot_or_none(broker: Broker, clock: FakeClock, token: LockToken, stale: bool):
    if not broker.capabilities.atomic_publish:
        pytest.skip("with this kind of broker, a publish does not move offsets in its transaction")
    park(broker, token, [3, 4])
    target, lot = queues_of(broker)[1], lot_token(token)
    run = SourceRun("query", 1, "run")
    broker.outbox.register(run, token.queue, span(0, 5), token)
    broker.outbox.register(run, lot.queue, span(0, 2), lot)
    staging = broker.outbox.open(SinkBatch("sink", 1, run), 0)
    staging.add(target, rows("ab"))
    receipt = staging.receipt()
    if stale:
        them = hand_over(broker, clock, token)
        before = everything(broker)
        with refused("LOCK.LOST", them.client_id):
            broker.outbox.publish(SinkBatch("sink", 1, run), [receipt])
        assert everything(broker) == before
        return
    assert not broker.outbox.publish(SinkBatch("sink", 1, run), [receipt]).replayed
    assert broker.groups.offsets("g", [token.queue, lot.queue]) == {token.queue: 5, lot.queue: 2}
    assert broker.outbox.publish(SinkBatch("sink", 1, run), [receipt]).replayed
    assert bodies(broker, target) == ["a", "b"]
    assert (park(broker, token, [4]), broker.groups.park(token, [put(lot.queue, 1, 4)])) == ([False], [False])


def test_a_batch_that_is_repeated_after_its_publish_finds_its_part_of_the_lot(broker: Broker, token: LockToken):
    """The group's offset has moved, but Spark has not committed, so the same part of the lot is read again."""
    park(broker, token, range(10))
    lot = lot_token(token)
    for before, offset in ((0, 4), (4, 7), (7, 10)):
        broker.groups.commit({lot: offset})
        assert bodies(broker, lot.queue, before) == [str(number) for number in range(before, 10)]


# -- operator commands


def test_an_order_is_read_by_the_owner_of_the_queue(broker: Broker, token: LockToken):
    broker.log.append({token.queue: rows("abc", sharding_key=["k", "l", "k"])})
    broker.groups.park(token, [put(token.queue, 10), put(token.queue, 11), put(token.queue, 12, due=AT_ONCE)])
    assert lot_of(broker, token.queue).next_due() == 9
    broker.admin.command_parked("g", token.queue, [Command("hold", "l"), Command("retry", "k")])
    lot = lot_of(broker, token.queue)
    assert {key: one.due for key, one in lot.keys.items()} == {"k": AT_ONCE, "l": HELD}
    assert (lot.messages, lot.commanded, lot.next_due()) == (3, True, AT_ONCE)
    assert [(row["queue_offset"], row["ticket"].due) for row in parked(broker, token.queue)] == [
        (10, AT_ONCE),
        (11, HELD),
        (12, AT_ONCE),
    ]


def test_an_order_for_a_message_without_a_key_names_its_offset(broker: Broker, token: LockToken):
    park(broker, token, [3, 4])
    broker.admin.command_parked("g", token.queue, [Command("hold", None, 4)])
    assert [row["ticket"].due for row in parked(broker, token.queue)] == [9, HELD]


@pytest.mark.holds("one parked message")
def test_a_corrected_message_takes_the_place_of_its_message_until_it_is_settled(broker: Broker, token: LockToken):
    columns = {"tags": ["t", None], "keys": [None, "k1"], "sharding_key": ["k", "k"], "properties": [[("own", "x")], None]}
    broker.log.append({token.queue: rows([b"\0\xff", "two"], **columns)})
    broker.groups.park(token, [put(token.queue, 10, attempts=4, error="e" * 2000), put(token.queue, 11, due=AT_ONCE)])
    [former, other] = parked(broker, token.queue)
    [key] = parked_keys(broker, "g")
    give(broker, "g", "replace", [key.message(10)], b"right \0\xff")
    [kept, row] = parked(broker, token.queue)
    assert kept == other
    assert dict(row["properties"])["ORDEREDMQ_CORRECTED"]
    of_correction = ("ORDEREDMQ_CORRECTED", UNIQ_KEY)

    def compared(row: dict[str, Any]) -> dict[str, Any]:
        own = [pair for pair in row["properties"] or () if pair[0] not in of_correction]
        return {**row, "body": None, "ticket": None, "properties": own}

    assert (row["body"], row["ticket"].due) == (b"right \0\xff", AT_ONCE)
    assert compared(row) == compared(former)
    # It fails again, and then becomes a dead letter by another command.
    lot = parked_queue("g", token.queue)
    place = lot_of(broker, token.queue).place(10)
    again = [put(lot, place, 10, attempts=5), put(lot, 1, 11, due=AT_ONCE)]
    assert broker.groups.park(token, again) == [True, True]
    assert broker.groups.park(token, again) == [True, True]
    broker.groups.commit({lot_token(token): 3})
    broker.admin.command_parked("g", token.queue, [Command("dead_letter", "k", 10)])
    [row, other] = parked(broker, token.queue)
    assert (row["body"], row["ticket"].attempts, row["ticket"].due) == (b"right \0\xff", 5, DEAD_LETTERED)
    assert compared({**row, "reconsume_times": 4}) == compared(former)
    assert (other["queue_offset"], other["ticket"].due) == (11, AT_ONCE)


@pytest.mark.holds("given back")
def test_a_dead_letter_that_is_given_back_is_parked_as_it_was_sent_and_may_have_another_letter(
    broker: Broker, token: LockToken
):
    broker.log.append({token.queue: rows(["ten", "two"], sharding_key=["k", "k"], properties=[[("own", "x")], None])})

    def give_up(offset: int, properties: dict[str, str]) -> int:
        noted = dead_letter_properties(
            token.queue, offset, message_id="id", reconsume_times=1, error="e", properties=properties
        )
        return broker.groups.dead_letter(token, rows(["ten"], sharding_key=["k"], properties=[list(noted.items())]), [offset])

    assert give_up(10, {"own": "x"}) == 1
    with refused("GROUP.NOT_PARKED", token.queue):
        replay_dead_letters(broker, "g", to_group=True)
    park(broker, token, [11])
    assert replay_dead_letters(broker, "g", to_group=True).letters == 1
    assert replay_dead_letters(broker, "g", LetterFilter(offsets=frozenset([0])), to_group=True).letters == 1
    [other, row] = parked(broker, token.queue)
    assert (other["queue_offset"], row["queue_offset"], row["body"], row["sharding_key"]) == (11, 10, b"ten", "k")
    assert set(row["properties"]) >= {("own", "x"), ("ORDEREDMQ_REPLAYS", "g=1")}
    assert lot_of(broker, token.queue).max_offset == 11, "so that its queue is not waited for"
    offset, spans = row["ticket"].offset, [OffsetRange(0, MAX_OFFSET)]
    assert offset == given_back(10, 1) > 11
    # It is parked again, and then given up again.
    place = lot_of(broker, token.queue).place(offset)
    assert broker.groups.park(token, [put(parked_queue("g", token.queue), place, offset)]) == [True]
    assert broker.groups.letters(token, spans) == {10}
    assert (give_up(offset, dict(row["properties"])), give_up(offset, dict(row["properties"]))) == (1, 0)
    assert broker.groups.letters(token, spans) == {10, offset}
    [queue] = [each for each in letter_queues(broker, "g") if each.broker_name == token.queue.broker_name]
    letters = [letter for piece in read_letters(broker.log, queue, 0, 2) for letter in piece]
    assert [(letter.origin_offset, letter.replays) for letter in letters] == [(10, 0), (10, 1)]


def test_where_nothing_was_ever_parked_an_order_is_refused(broker: Broker, token: LockToken):
    before = everything(broker)
    with refused("TOPIC.MISSING", LOTS):
        broker.admin.command_parked("g", token.queue, [Command("retry", "k")])
    assert everything(broker) == before


# -- administration


@pytest.mark.holds("no silent loss of parked messages")
@needs("topic settings", "trim")
def test_retention_deletes_nothing_that_is_parked(broker: Broker, clock: FakeClock, token: LockToken):
    park(broker, token, [3, 4])
    broker.admin.alter_topic("orders", retention_seconds=10, retention_bytes=1)
    clock.pass_(50)
    broker.log.append({token.queue: rows(["x" * BIG])})
    clock.pass_(11)
    broker.log.append({token.queue: rows(["y" * BIG])})
    broker.admin.trim("orders")
    assert broker.log.bounds([token.queue])[token.queue].min_offset >= 10
    park(broker, token, [11])
    assert offsets(broker, token.queue) == [3, 4, 11]
    before = everything(broker)
    for change in (
        lambda: broker.admin.alter_topic(LOTS, retention_seconds=10),
        lambda: broker.admin.trim(LOTS),
        lambda: broker.admin.trim(LOTS, {lot_token(token).queue: 1}),
        lambda: broker.admin.resize_topic(LOTS, 9),
    ):
        with refused("TOPIC.RESERVED", LOTS, "'g'"):
            change()
    assert everything(broker) == before


@needs("offsets of topics")
def test_a_deleted_topic_takes_what_all_groups_have_parked_of_it(broker: Broker, token: LockToken):
    broker.admin.create_topic("more", 1)
    broker.log.append({queues_of(broker, "more")[0]: rows("a")})
    me = broker.groups.join("other")
    [other] = locked(broker, "h", me, [token.queue])
    [kept] = locked(broker, "g", me, queues_of(broker, "more"))
    for one in (token, other):
        park(broker, one, [3])
    park(broker, kept, [0])
    reader = LotReader(broker)
    assert list(reader.look("h")[token.queue].places) == [3]
    broker.groups.commit({token: 1, lot_token(token): 1})
    broker.groups.unlock([token])
    broker.admin.delete_topic("orders")
    assert [topic.name for topic in broker.log.topics()] == ["%PARKED%g%more", "more"]
    assert offsets(broker, kept.queue) == [0]
    assert broker.groups.offsets("g", [lot_token(token).queue]) == {}
    broker.admin.create_topic("orders", 3)
    broker.log.append({token.queue: rows(range(10))})
    [again] = locked(broker, "g", me, [token.queue])
    assert park(broker, again, [3, 0]) == [True, True]
    assert offsets(broker, token.queue) == [3, 0]
    # A reader of the former lot recognises the new one, although it has as many messages.
    [again] = locked(broker, "h", me, [token.queue])
    park(broker, again, [5])
    assert list(reader.look("h")[token.queue].places) == [5]


def test_a_lot_that_another_group_reads_has_lots_that_go_with_it(broker: Broker, token: LockToken):
    park(broker, token, [3, 4])
    [reader] = locked(broker, "h", broker.groups.join("other"), [lot_token(token).queue])
    assert broker.groups.park(reader, [put(lot_token(token).queue, 1)]) == [True]
    assert bodies(broker, lot_token(reader).queue) == ["4"]
    assert (broker.groups.check(reader), broker.groups.stale([reader, token])) == (True, [])
    broker.groups.commit({reader: 2})
    broker.admin.delete_topic("orders")
    assert broker.log.topics() == []


@pytest.mark.holds("no silent loss of parked messages")
def test_lots_are_not_deleted_while_their_topic_exists(broker: Broker, token: LockToken):
    park(broker, token, [3, 4])
    broker.groups.commit({token: 5, lot_token(token): 2})
    broker.groups.unlock([token])
    before = everything(broker)
    with refused("TOPIC.RESERVED", "'g'", LOTS):
        broker.admin.delete_topic(LOTS)
    assert everything(broker) == before


@pytest.mark.holds("no silent loss of parked messages")
def test_a_lot_is_not_written_to_from_outside(broker: Broker, token: LockToken):
    """Each row of a lot names the message's origin. A row without an origin would stop the owner."""
    park(broker, token, [3])
    lot, before = lot_token(token).queue, everything(broker)
    with refused("TOPIC.RESERVED", LOTS):
        broker.log.append({lot: rows("a")})
    staging = broker.outbox.open(SinkBatch("sink", 0), 0)
    with refused("TOPIC.RESERVED", LOTS):
        staging.add(lot, rows("a"))
    staging.abandon()
    assert everything(broker) == before


@pytest.mark.holds("no silent loss of parked messages")
def test_a_group_with_parked_messages_is_deleted_only_by_force(broker: Broker, token: LockToken):
    me = broker.groups.join("other")
    [other] = locked(broker, "h", me, [token.queue])
    park(broker, token, [3, 4])
    park(broker, other, [3])
    # Message 4 belongs to a batch that did not end.
    broker.groups.commit({token: 4})
    broker.groups.unlock([token])
    before = everything(broker)
    with refused("GROUP.PARKED", "'g'", "2 parked messages", token.queue, "force"):
        broker.admin.delete_group("g")
    assert everything(broker) == before
    broker.admin.delete_group("g", force=True)
    assert [topic.name for topic in broker.log.topics()] == ["%PARKED%h%orders", "orders"]
    assert broker.admin.groups() == ["h"]
    assert offsets(broker, token.queue, "h") == [3]
    [again] = locked(broker, "g", me, [token.queue])
    assert park(broker, again, [3]) == [True]
    assert offsets(broker, token.queue) == [3]


def test_a_group_that_has_nothing_parked_any_more_is_deleted_with_its_lots(broker: Broker, token: LockToken):
    park(broker, token, [3])
    broker.groups.commit({token: 5, lot_token(token): 1})
    broker.groups.unlock([token])
    broker.admin.delete_group("g")
    assert [topic.name for topic in broker.log.topics()] == ["orders"]


@pytest.mark.holds("no silent loss of parked messages")
def test_a_seek_says_what_becomes_of_parked_messages(broker: Broker, token: LockToken):
    second = queues_of(broker)[1]
    park(broker, token, [3, 4])
    broker.groups.commit({token: 5})
    broker.groups.unlock([token])
    before = everything(broker)
    with refused("GROUP.PARKED", "'g'", "2 parked messages", token.queue, "keep", "drop"):
        broker.admin.seek("g", {token.queue: 0, second: 0})
    assert everything(broker) == before
    broker.admin.seek("g", {second: 0})
    broker.admin.seek("g", {token.queue: 10}, parked="keep")
    assert offsets(broker, token.queue) == [3, 4]
    lot = lot_token(token).queue
    assert broker.groups.offsets("g", [token.queue, lot]) == {token.queue: 10}
    broker.admin.seek("g", {token.queue: 2}, parked="drop")
    assert offsets(broker, token.queue) == []
    assert broker.groups.offsets("g", [token.queue, lot]) == {token.queue: 2, lot: 2}
    broker.admin.seek("g", {token.queue: 0})
    broker.admin.seek("g", {token.queue: 0}, parked="drop")
    assert broker.groups.offsets("g", [token.queue, lot]) == {token.queue: 0, lot: 2}


@pytest.mark.parametrize("parked", ["keep", "drop"])
def test_after_a_seek_a_message_is_parked_from_its_place_again_and_lies_there_once(
    broker: Broker, token: LockToken, parked: Any
):
    """Message 7 belongs to a batch that did not end, so the group's offset has not passed it."""
    park(broker, token, [3, 7])
    broker.groups.commit({token: 5})
    broker.groups.unlock([token])
    broker.admin.seek("g", {token.queue: 2}, parked=parked)
    [again] = locked(broker, "g", broker.groups.join("me again"), [token.queue])
    assert park(broker, again, [3, 7]) == [True, True]
    assert sorted(offsets(broker, token.queue)) == [3, 7]


def test_a_lots_offset_is_not_sought_by_itself(broker: Broker, token: LockToken):
    park(broker, token, [3])
    broker.groups.unlock([token])
    before = everything(broker)
    for choice in (None, "keep", "drop"):
        with refused("TOPIC.RESERVED", LOTS):
            broker.admin.seek("g", {lot_token(token).queue: 0}, parked=choice, force=True)
    assert everything(broker) == before


@pytest.mark.parametrize("group", ["with%percent", "x" * (MAX_NAME_LENGTH - len("%PARKED%%orders") + 1)])
def test_a_group_whose_lots_could_have_no_name_parks_nothing(broker: Broker, token: LockToken, group: str):
    [other] = locked(broker, group, broker.groups.join("other"), [token.queue])
    before = everything(broker)
    with refused("GROUP.BAD_NAME", group, "OrderPerQueue"):
        park(broker, other, [3])
    assert everything(broker) == before
    broker.admin.seek(group, {token.queue: 0}, force=True)
    assert read(broker, token.queue)
