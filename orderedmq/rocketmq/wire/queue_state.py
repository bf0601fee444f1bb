"""What routes and brokers prove about a queue. Pure.

A queue can be readable, unreadable, unknown or missing, and each of them can be mistaken for an empty queue, because brokers report
bounds for every queue (AdminBrokerProcessor.getMaxOffset).

- A queue in the route exists. Its messages cannot be read while the permission of its topic or broker forbids it, or while its number is
  not below readQueueNums (PullMessageProcessor). They are not lost.
- A queue that is not in the route may still exist. A route may be older than the queue, and a restarted nameserver knows only the brokers
  that have reported to it. A Proxy keeps routes for 20 s, those of deleted brokers and of topics that it could not find included. So a
  queue is missing only if the broker itself says so, in an answer that was requested after the queue was missed.
- A broker that no nameserver knows may have the queue. Nobody can say that the queue is missing until the broker answers.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Final

from orderedmq.conditions import UnavailableCondition
from orderedmq.errors import RocketMQUnavailableError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.wire.codes import ResponseCode
from orderedmq.rocketmq.wire.frame import RemotingCommand
from orderedmq.rocketmq.wire.route import Route

#: A broker's remarks about a pull that the permission of the topic or of the broker forbids.
FORBIDDEN: Final = re.compile(r"^the (topic|broker)\[.*\] pulling message is forbidden")
#: A broker's remark about a queue whose number is not below readQueueNums. Before 5.3.2 it has the code SYSTEM_ERROR.
_NO_SUCH_NUMBER: Final = re.compile(r"^queueId\[-?[0-9]+\] is illegal")
#: The remarks of `is_there`.
ABOUT_QUEUE: Final = re.compile(f"{FORBIDDEN.pattern}|{_NO_SUCH_NUMBER.pattern}")


class RouteState(Enum):
    """What a route shows about a queue."""

    READABLE = "readable"
    #: The queue exists, but its messages cannot be read at the moment.
    UNREADABLE = "unreadable"
    #: The route does not have the queue. This alone does not prove that it does not exist.
    UNKNOWN = "unknown"


def state_of(queue: MessageQueue, route: Route | None) -> RouteState:
    """Return what the topic's route shows about a queue. ``route`` is None if the topic was not found."""
    for data in route.queues if route is not None else ():
        if data.broker_name == queue.broker_name and queue.queue_id < data.all_queues:
            readable = data.readable and queue.queue_id < data.read_queues
            return RouteState.READABLE if readable else RouteState.UNREADABLE
    return RouteState.UNKNOWN


def is_there(response: RemotingCommand) -> bool:
    """Return whether a queue exists, from its broker's answer to a pull.

    For a topic that does not exist, a broker has a separate code.
    """
    refused = response.code in (ResponseCode.SYSTEM_ERROR, ResponseCode.INVALID_PARAMETER)
    return not (refused and _NO_SUCH_NUMBER.match(response.remark or ""))


def not_readable(queue: object, why: str) -> RocketMQUnavailableError:
    """Return the error for a queue that exists and cannot be read. ``why``: a clause."""
    return RocketMQUnavailableError(
        UnavailableCondition.NOT_READABLE,
        f"{queue} cannot be read at the moment, but its messages are not lost: {why}. Allow reading (mqadmin updateTopicPerm -p 6, or "
        "brokerPermission=6 in the settings of the broker), or raise the topic's readQueueNums (mqadmin updateTopic -r)",
    )


#: Why a queue in a route that has it as `RouteState.UNREADABLE` cannot be read.
ROUTE_FORBIDS: Final = "the route says that its permission forbids reading, or that its number is not below readQueueNums"
