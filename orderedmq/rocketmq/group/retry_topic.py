"""The retry topic %RETRY%<group>, into which brokers put copies of messages that a consumer sends back.

A broker creates the topic with the group's first heartbeat. The copy of a message that is sent back is first stored in the broker's delay
topic, in which clients cannot search. So a message may be sent back twice if the broker's answer was lost or the message's batch runs
again. This also happens with Java's consumers. Each copy counts its retries separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from orderedmq.conditions import TopicCondition
from orderedmq.errors import OrderedMQError, TopicError, aged_out, beyond_end
from orderedmq.model import RETRY_PREFIX, MessageQueue
from orderedmq.rocketmq.messages.log import RocketMQLog
from orderedmq.rocketmq.messages.topic_anchor import BEYOND, position_of
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.deadline import Deadline
from orderedmq.rocketmq.wire import message_requests

#: Seconds for sending one message back.
_TIMEOUT: Final = 25.0


class RetryTopic:
    """Sends messages back. Thread-safe."""

    def __init__(self, client: Client, log: RocketMQLog) -> None:
        self._client = client
        self._log = log

    def send_back(self, group: str, queue: MessageQueue, messages: Sequence[tuple[int, int]], max_reconsume_times: int) -> int:
        """See `Groups.send_back`."""
        if not messages:
            return 0
        self._require(group, queue)
        for number, (offset, delay_level) in enumerate(messages):
            try:
                self._send_back(group, queue, offset, delay_level, max_reconsume_times)
            except OrderedMQError:
                # The next call begins with this message and raises the error.
                if not number:
                    raise
                return number
        return len(messages)

    def _require(self, group: str, queue: MessageQueue) -> None:
        """Check that the queue's broker has a retry queue, because a broker without one drops the messages without an error."""
        topic = RETRY_PREFIX + group
        if not self._log.bounds([MessageQueue(topic, queue.broker_name, 0)]):
            raise TopicError(
                TopicCondition.NO_SUCH_QUEUE,
                f"broker {queue.broker_name!r} has no queue of {topic!r}, so it would drop messages that are sent back. Give the group a "
                f"retry queue there (mqadmin updateSubGroup -g {group} -q 1)",
            )

    def _send_back(self, group: str, queue: MessageQueue, offset: int, delay_level: int, max_reconsume_times: int) -> None:
        position = position_of(self._client, group, queue, offset)
        if position is None or position == BEYOND:
            bounds = self._log.bounds_of(queue)
            if position is None:
                # The broker may not have corrected the queue's minimum yet.
                raise aged_out(queue, offset, max(bounds.min_offset, offset + 1))
            raise beyond_end(queue, bounds.max_offset, f"message {offset} was to be sent back", self._log.tail_loss)
        request = message_requests.send_back(
            queue, group, position, delay_level=delay_level, max_reconsume_times=max_reconsume_times
        )
        self._client.call(request, Deadline.after(_TIMEOUT), topic=queue.topic, broker_name=queue.broker_name)
