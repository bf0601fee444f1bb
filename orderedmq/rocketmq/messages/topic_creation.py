"""Makes topics at brokers, and waits until the nameserver knows their queues. Brokers store topics, nameservers list them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NoReturn

from orderedmq.conditions import TopicCondition, UnavailableCondition
from orderedmq.errors import RocketMQUnavailableError, TopicError
from orderedmq.rocketmq.messages.log import RocketMQLog
from orderedmq.rocketmq.net.deadline import Deadline

#: Seconds until a broker's new topic must be known to the nameservers; it usually takes a few ms.
_REGISTER_TIMEOUT: Final = 30.0
_POLL: Final = 0.01


def queue_counts(log: RocketMQLog, topic: str) -> dict[str, int]:
    """Return a topic's number of queues by broker, as the nameserver knows it now; empty for a topic that does not exist."""
    log.forget(topic)
    try:
        return {data.broker_name: max(data.read_queues, data.write_queues) for data in log.route(topic).queues}
    except TopicError as error:
        if error.sub != TopicCondition.MISSING:
            raise
        return {}


def await_registration(known: Callable[[], bool], topic: str) -> None:
    """Wait until ``known``, which asks the nameserver for the topic's new queues. Raises RocketMQUnavailableError TIMEOUT."""
    limit = Deadline.after(_REGISTER_TIMEOUT)
    while not known():
        if time.monotonic() > limit:
            _raise_unregistered(topic)
        time.sleep(_POLL)


def _raise_unregistered(topic: str) -> NoReturn:
    raise RocketMQUnavailableError(
        UnavailableCondition.TIMEOUT,
        f"the brokers created topic {topic!r}, but the nameserver does not know its queues after {_REGISTER_TIMEOUT:.0f} s: check that all "
        "brokers register with it",
    )
