"""Changes topics at brokers, which store them, and at nameservers, which list them (MQAdminExt).

A topic is created at each broker. It is deleted at all brokers before it is deleted at the nameservers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final, NoReturn

from orderedmq.conditions import RocketMQCondition, TopicCondition, UnavailableCondition
from orderedmq.errors import RocketMQError, RocketMQUnavailableError, TopicError
from orderedmq.rocketmq.messages.log import RocketMQLog
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.deadline import REQUEST_TIMEOUT, Deadline
from orderedmq.rocketmq.wire import admin_requests
from orderedmq.rocketmq.wire.message_requests import topic_stats

#: Seconds within which the nameservers must know a new topic. It usually takes a few ms.
_REGISTER_TIMEOUT: Final = 30.0
_POLL: Final = 0.01


def queue_counts(log: RocketMQLog, topic: str) -> dict[str, int]:
    """Return a topic's current number of queues by broker, as the nameserver knows it. Empty if the topic does not exist."""
    log.forget(topic)
    try:
        return {data.broker_name: max(data.read_queues, data.write_queues) for data in log.route(topic).queues}
    except TopicError as error:
        if error.sub != TopicCondition.MISSING:
            raise
        return {}


def await_registration(registered: Callable[[], bool], topic: str) -> None:
    """Wait until ``registered`` returns true. It asks the nameserver for the topic's new queues. Raises RocketMQUnavailableError TIMEOUT."""
    limit = Deadline.after(_REGISTER_TIMEOUT)
    while not registered():
        if time.monotonic() > limit:
            _raise_unregistered(topic)
        time.sleep(_POLL)


def _raise_unregistered(topic: str) -> NoReturn:
    raise RocketMQUnavailableError(
        UnavailableCondition.TIMEOUT,
        f"the brokers changed topic {topic!r}, but the nameserver does not know its queues after {_REGISTER_TIMEOUT:.0f} s. Check that all "
        "brokers register with it",
    )


def every_master(client: Client, required: Iterable[str] = ()) -> dict[str, str]:
    """Return the address of each broker's master, by broker name.

    Raises RocketMQUnavailableError NO_BROKER if a broker has no master, or the nameservers do not know one that is ``required``.
    """
    cluster = client.whole_cluster(Deadline.after(REQUEST_TIMEOUT))
    masters = {name: broker.master for name, broker in cluster.brokers.items() if broker.master is not None}
    away = sorted({*cluster.brokers, *required} - masters.keys())
    if away or not masters:
        raise RocketMQUnavailableError(
            UnavailableCondition.NO_BROKER,
            "topics can be changed only while the nameservers know the master of every broker, but they do not know the master of "
            f"{', '.join(away) or 'any broker'}: it is down or starting. Try again when it runs",
        )
    return {name: masters[name] for name in sorted(masters)}


def delete_topic(client: Client, log: RocketMQLog, name: str, masters: Iterable[str]) -> None:
    """Delete a topic with its messages. Raises RocketMQUnavailableError."""
    for master in masters:
        delete_at_broker(client, master, name)
    failed: RocketMQUnavailableError | None = None
    for nameserver in client.nameservers:
        try:
            client.call_address(nameserver, admin_requests.delete_topic_in_nameserver(name), Deadline.after(REQUEST_TIMEOUT))
        except RocketMQUnavailableError as error:
            # A nameserver keeps routes only in memory, so one that is down has nothing to delete.
            failed = error
    log.forget(name)
    if failed is not None and len(client.nameservers) == 1:
        raise failed


def delete_at_broker(client: Client, master: str, topic: str) -> None:
    """Delete a topic at one broker. It may be missing there."""
    try:
        client.call_address(master, admin_requests.delete_topic(topic), Deadline.after(REQUEST_TIMEOUT))
    except RocketMQError as error:
        # With timerWheelEnable=false, 5.x reports an error after the topic is deleted (AdminBrokerProcessor.deleteTopicInBroker).
        if error.sub != RocketMQCondition.SERVER_ERROR or _is_at_broker(client, master, topic):
            raise


def _is_at_broker(client: Client, master: str, topic: str) -> bool:
    try:
        client.call_address(master, topic_stats(topic), Deadline.after(REQUEST_TIMEOUT))
    except TopicError:
        return False
    return True
