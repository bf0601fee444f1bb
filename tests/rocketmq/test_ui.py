"""The web page over a cluster of two brokers, each of which has a queue 0."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
import pytest

from orderedmq.parking import Parking, Ticket
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.rows.dead_letters import dead_letter_properties
from orderedmq.schema import PRODUCER_SCHEMA
from tests.contract.support import rows
from tests.rocketmq.group_world import World
from tests.ui_site import served
from tests.waits import until

pytestmark = pytest.mark.usefixtures("unhurried")


@pytest.fixture
def world(two_brokers: Cluster) -> Iterator[World]:
    with World(two_brokers) as world:
        yield world


@pytest.mark.holds("web page live")
def test_the_page_shows_owners_and_hand_overs_and_repairs_letters_and_parked_keys(world: World) -> None:
    group, topic, broker = world.group, world.topic, world.broker
    for queue in world.queues:
        world.log.append(
            {queue: rows([f"{queue.broker_name}-{queue.queue_id}-{part}" for part in "ab"], sharding_key=["k", "k"])}
        )
    first = replace(broker.groups.join("query"), name="billing")
    broker.groups.heartbeat(group, first, world.shared())
    tokens = world.lock(broker, first)
    broker.groups.commit(dict.fromkeys(tokens[1:], 2))
    due = int(time.time() * 1000) + 600_000
    assert broker.groups.park(tokens[0], [Parking(world.queues[0], 1, Ticket(1, 2, 1, due, "no stock"))])
    letter_properties = dead_letter_properties(
        world.queues[0], 0, message_id="m", reconsume_times=3, error="ValueError: bad", properties={}
    )
    letter = {"body": b"given up", "sharding_key": "k", "properties": list(letter_properties.items())}
    broker.groups.dead_letter(tokens[0], pa.RecordBatch.from_pylist([letter], schema=PRODUCER_SCHEMA), [0])
    with served(world.connect(), allow_changes=True) as site:
        said = site.get("/").words
        assert f"{group} : 1 dead letter waiting" in said
        assert f"{group} : 1 parked message of 1 key" in said
        said = site.get(f"/groups/{group}").words
        assert re.search(rf"{topic}/broker-a/0 2 - 2 - 1 billing \d+\.\d s {topic}/broker-a/1 0 2 2 - 0 billing ", said), said
        assert "8 in 4 queues" in site.get(f"/topics/{topic}").words
        # The page shows a key's history over the queues of both brokers.
        history = site.get(f"/topics/{topic}/messages?key=k").words
        assert re.findall(r"broker-[ab]-\d-[ab]", history) == [
            f"{queue.broker_name}-{queue.queue_id}-{part}" for queue in world.queues for part in "ab"
        ]
        assert "broker-b-0-b" in site.get(f"/topics/{topic}/messages?of=broker-b/0&offset=1").words
        # The first member leaves, and the second one takes its queues.
        broker.groups.unlock(tokens)
        broker.groups.leave(first)
        other = world.connect()
        second = replace(other.groups.join("query-2"), name="shipping")
        other.groups.heartbeat(group, second, world.shared())
        world.lock(other, second)
        said = until(lambda: (words := site.get(f"/live/groups/{group}").words) and "→ shipping" in words and words)
        assert re.search(r"billing → shipping|billing → nobody", said), said
        # Retry the parked message and replay the dead letter.
        retry = [("action", "retry"), ("key", f"{world.queues[0]}/k/k")]
        assert "the owner does so" in site.follow(site.post(f"/groups/{group}/parked/order", retry)).words
        until(lambda: re.search(r"k \S+/0 1 now 2", site.get(f"/groups/{group}/parked").words))
        assert "Replayed 1 dead letter" in site.follow(site.post(f"/groups/{group}/dead/replay", [("all", "yes")])).words
        assert "9 in 4 queues" in until(lambda: (words := site.get(f"/topics/{topic}").words) and "9 in" in words and words)
        refused = site.get(f"/groups/{group}/seek?to=earliest&parked=keep")
        assert (refused.status, "is in use" in refused.words) == (409, True)
        shown = site.get(f"/groups/{group}/seek?to=earliest&parked=keep&force=yes").words
        assert f"{topic}/broker-b/1 2 0 2 again" in shown
