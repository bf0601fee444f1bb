"""After a fork, a child that uses its parent's connection is refused by name and does it no harm. A connection of its own works."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from orderedmq.broker import Broker, SinkBatch
from orderedmq.errors import OrderedMQError
from orderedmq.ownership.lock import ClientIdentity, LockToken
from tests.contract.support import SHARED, Place, beat, bodies, ids, rows

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def in_child(work: Callable[[], str]) -> str:
    """Return the text that ``work`` returns in a fork of this process."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            text = work()
        except BaseException as error:
            text = repr(error)
        finally:
            os.write(writing, text.encode())
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(child, 0)
    return text


def test_a_child_is_refused_its_parents_connection_by_name_and_opens_its_own(broker: Broker, place: Place, token: LockToken):
    queue = token.queue
    client = ClientIdentity(token.owner, token.client_id)
    beat(broker, client)
    members = ids(broker)
    broker.log.append({queue: rows(["parent"])})
    outbox = broker.outbox

    def sink() -> None:
        staging = outbox.open(SinkBatch("sink", 1), 0)
        staging.add(queue, rows(["parent"]))
        outbox.publish(SinkBatch("sink", 1), [staging.receipt()])

    uses: list[Callable[[], Any]] = [
        lambda: broker.log.bounds([queue]),
        lambda: bodies(broker, queue),
        lambda: broker.log.append({queue: rows(["parent"])}),
        lambda: broker.groups.join("them"),
        lambda: broker.groups.heartbeat("g", client, SHARED),
        lambda: broker.groups.lock("g", client, [queue]),
        lambda: broker.groups.renew([token]),
        lambda: broker.groups.stale([token]),
        lambda: broker.groups.commit({token: 1}),
        lambda: broker.groups.unlock([token]),
        lambda: broker.groups.leave(client),
        sink,
        lambda: broker.admin.create_topic("t", 1),
    ]

    def work() -> str:
        conditions = []
        for use in uses:
            try:
                use()
                conditions.append("used")
            except OrderedMQError as error:
                conditions.append(error.condition)
        broker.close()
        with place.connect() as own:
            own.log.append({queue: rows(["child"])})
        return " ".join(conditions)

    assert in_child(work) == " ".join(["ORDEREDMQ_OPTION.UNSUPPORTED"] * len(uses))
    assert bodies(broker, queue)[10:] == ["parent", "child"]
    assert broker.groups.renew([token]) == []
    assert ids(broker) == members
