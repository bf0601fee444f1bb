"""Finding stale locks, and requesting locks that other clients hold."""

from __future__ import annotations

import pytest

from orderedmq.broker import Broker
from orderedmq.ownership.lock import UNLOCK_DELAY, LockToken, Refusal
from tests.contract.support import (
    FakeClock,
    locked,
    needs,
    queues_of,
)


@needs("epochs")
def test_stale_names_exactly_the_tokens_whose_queue_is_not_theirs(broker: Broker, clock: FakeClock):
    broker.admin.create_topic("more", 3)
    queues = [*queues_of(broker), *queues_of(broker, "more")]
    me = broker.groups.join("me")
    kept, taken, back, lingering, sought, released = tokens = locked(broker, "g", me, queues)
    assert broker.groups.stale(tokens) == broker.groups.stale([]) == []
    clock.pass_(50)
    assert broker.groups.renew([kept, back, lingering, sought, released]) == []
    clock.pass_(11)
    locked(broker, "g", broker.groups.join("them"), [taken.queue])
    broker.groups.unlock([back])
    broker.groups.unlock([lingering], UNLOCK_DELAY)
    broker.admin.seek("g", {sought.queue: 0}, force=True)
    broker.admin.release("g", [released.queue], force=True)
    before = broker.log.change()
    assert broker.groups.stale(tokens) == [taken, back, sought, released]
    assert broker.groups.stale(tokens[::-1]) == [released, sought, back, taken]
    assert broker.log.change() == before
    clock.pass_(1000)
    assert broker.groups.stale([kept]) == [], "an expired lock that no other client took is not stale"


@needs("epochs")
def test_to_ask_whether_tokens_are_stale_prolongs_nothing(broker: Broker, clock: FakeClock):
    queue = queues_of(broker)[0]
    [token] = locked(broker, "g", broker.groups.join("me"), [queue])
    for _ in range(3):
        clock.pass_(20)
        assert broker.groups.stale([token]) == []
    clock.pass_(1)
    locked(broker, "g", broker.groups.join("them"), [queue])


@needs("linger")
def test_asking_in_vain_writes_nothing(broker: Broker, clock: FakeClock):
    queues = queues_of(broker)
    them = broker.groups.join("them")
    tokens = locked(broker, "g", them, queues)
    broker.groups.unlock(tokens[2:], UNLOCK_DELAY)
    me = broker.groups.join("me")
    before = broker.log.change()
    for _ in range(3):
        clock.pass_(5)
        answers = broker.groups.lock("g", me, queues)
        assert [answer.queue for answer in answers.values() if isinstance(answer, Refusal)] == queues
        assert broker.groups.lock("g", me, []) == {}
    assert broker.log.change() == before
    assert broker.groups.stale(tokens) == []


@pytest.mark.parametrize("how", ["left", "expired", "given back", pytest.param("rebooted", marks=needs("reboot"))])
def test_a_lock_that_is_free_by_now_is_granted_by_the_same_call(broker: Broker, clock: FakeClock, how: str):
    queues = queues_of(broker)
    me, them = broker.groups.join("me"), broker.groups.join("them")
    tokens = locked(broker, "g", them, queues)
    assert all(isinstance(answer, Refusal) for answer in broker.groups.lock("g", me, queues).values())
    if how == "left":
        broker.groups.leave(them)
    elif how == "expired":
        clock.pass_(60.001)
    elif how == "given back":
        broker.groups.unlock(tokens)
    else:
        clock.reboot()
    locked(broker, "g", me, queues)


def test_one_free_queue_among_refused_ones_is_granted(broker: Broker):
    queues = queues_of(broker)
    them = broker.groups.join("them")
    tokens = locked(broker, "g", them, queues[:2])
    answers = broker.groups.lock("g", broker.groups.join("me"), queues)
    assert [type(answers[queue]) for queue in queues] == [Refusal, Refusal, LockToken]
    assert broker.groups.stale(tokens) == []
