"""The progress of a group's listener inside a range that is not committed."""

from __future__ import annotations

import pytest

from orderedmq.broker import Broker, Progress
from orderedmq.ownership.lock import ClientIdentity, LockToken
from tests.contract.support import FakeClock, Place, locked, needs, queues_of, refused, rows

BOOK = "consume_orderly books.book"


def test_progress_is_that_of_a_group_in_a_queue_and_moves_no_offset(place: Place, broker: Broker, token: LockToken):
    me, queues = broker.groups.join("other"), queues_of(broker)
    others = [locked(broker, "g", me, queues[1:2])[0], locked(broker, "h", me, queues[:1])[0]]
    assert broker.groups.progress(token, BOOK) == Progress()
    for progress in (Progress(3), Progress(7, 4), Progress(8, 4), Progress(9, 11), Progress(10)):
        broker.groups.record_progress(token, progress, BOOK)
        for one in (broker, place.connect()):
            assert one.groups.progress(token, BOOK) == progress
    assert [broker.groups.progress(one, BOOK) for one in others] == [Progress()] * 2
    assert broker.groups.offsets("g", queues) == {}
    broker.groups.commit({token: 2})
    assert broker.groups.progress(token, BOOK) == Progress(10)
    assert broker.admin.group_progress("g") == {token.queue: 10}
    assert broker.admin.group_offsets("g") == {token.queue: 2}


def test_another_listener_has_no_progress(broker: Broker, token: LockToken):
    broker.groups.record_progress(token, Progress(7, 4), BOOK)
    assert broker.groups.progress(token, "consume_orderly books.mail") == Progress()
    broker.groups.record_progress(token, Progress(2), "consume_orderly books.mail")
    assert broker.groups.progress(token, BOOK) == Progress()


def test_the_next_owner_finds_the_progress_and_the_former_one_records_none(broker: Broker, clock: FakeClock, token: LockToken):
    broker.groups.record_progress(token, Progress(7), BOOK)
    clock.pass_(61)
    [after] = locked(broker, "g", broker.groups.join("them"), [token.queue])
    with refused("LOCK.LOST", token.queue, "'g'"):
        broker.groups.record_progress(token, Progress(9), BOOK)
    assert broker.groups.progress(after, BOOK) == Progress(7)
    broker.groups.record_progress(after, Progress(8), BOOK)
    assert broker.groups.progress(after, BOOK) == Progress(8)


@pytest.mark.parametrize("way", ["seek", "reset"])
@pytest.mark.parametrize("offset", [0, 10])
def test_a_seek_and_a_reset_forget_the_progress_in_their_queue(broker: Broker, token: LockToken, way: str, offset: int):
    me, second = broker.groups.join("other"), queues_of(broker)[1]
    broker.log.append({second: rows(range(10))})
    [other] = locked(broker, "g", me, [second])
    for one in (token, other):
        broker.groups.record_progress(one, Progress(7, 4), BOOK)
    if way == "seek":
        broker.admin.seek("g", {token.queue: offset}, force=True)
        with refused("LOCK.LOST"):
            broker.groups.record_progress(token, Progress(9), BOOK)
        [after] = locked(broker, "g", ClientIdentity(token.owner, token.client_id), [token.queue])
    else:
        [after] = broker.groups.reset({token: offset})
    assert broker.groups.progress(after, BOOK) == Progress()
    assert broker.groups.progress(other, BOOK) == Progress(7, 4)
    assert broker.admin.group_progress("g") == {other.queue: 7}
    broker.groups.record_progress(after, Progress(3), BOOK)
    assert broker.groups.progress(after, BOOK) == Progress(3)


@needs("offsets of topics")
def test_a_topic_that_is_created_again_has_no_progress(broker: Broker, token: LockToken):
    broker.groups.record_progress(token, Progress(7), BOOK)
    broker.admin.delete_topic("orders")
    broker.admin.create_topic("orders", 3)
    broker.log.append({token.queue: rows(range(10))})
    assert broker.groups.progress(token, BOOK) == Progress()
    assert broker.admin.group_progress("g") == {}


def test_a_group_that_is_deleted_takes_its_progress_with_it(broker: Broker, token: LockToken):
    broker.groups.commit({token: 1})
    broker.groups.record_progress(token, Progress(7), BOOK)
    broker.admin.delete_group("g", force=True)
    assert broker.groups.progress(token, BOOK) == Progress()
