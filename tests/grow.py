"""Gives a topic more queues, on each kind of broker as its administrators do."""

from __future__ import annotations

from orderedmq.broker import Broker
from orderedmq.rocketmq.broker import RocketMQBroker
from orderedmq.rocketmq.messages.topic_changes import await_registration, every_master, queue_counts
from orderedmq.rocketmq.wire import admin_requests
from tests.waits import soon


def grow(broker: Broker, topic: str, queues: int) -> None:
    """Make ``queues`` the number of a topic's queues. Over RocketMQ this does what ``mqadmin updateTopic`` does at each broker."""
    if not isinstance(broker, RocketMQBroker):
        broker.admin.resize_topic(topic, queues)
        return
    client = broker.log._client
    masters, there = every_master(client), queue_counts(broker.log, topic)
    counts = {name: there.get(name, 0) for name in masters}
    for _ in range(queues - sum(there.values())):
        counts[min(counts, key=lambda name: (counts[name], name))] += 1
    for name, count in counts.items():
        if count > there.get(name, 0):
            client.call_address(masters[name], admin_requests.create_topic(topic, count), soon())
    await_registration(lambda: sum(queue_counts(broker.log, topic).values()) == queues, topic)
