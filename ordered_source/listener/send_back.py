"""Sends messages that a listener could not process to the group's retry topic, over RocketMQ only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ordered_source.listener.tasks import naming
from orderedmq.broker import Broker
from orderedmq.conditions import SchemaCondition
from orderedmq.errors import SchemaError
from orderedmq.listening.engine import Message, Outcome
from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import LockToken

#: The delay level that makes a message a dead letter immediately (Java: delayLevelWhenNextConsume).
_DEAD_LETTER: Final = -1


class SendBack:
    """Sends messages of one queue back. If sending stops half way, the next call does not repeat the messages that were already sent."""

    def __init__(self, broker: Broker, token: LockToken, max_reconsume_times: int) -> None:
        self._broker = broker
        self._token = token
        self._most = max_reconsume_times
        #: Offsets and delay levels of messages that were sent in a call that then failed for other messages.
        self._sent: set[tuple[int, int]] = set()

    def send(self, messages: Sequence[Message]) -> None:
        """Send messages back. Raises the errors of `Groups.send_back`. After one that passes, call this again with the same messages."""
        self._send(messages, [(message._offset, message._level) for message in messages])

    def give_up(self, message: Message) -> None:
        """Tell the broker to make a message a dead letter. Raises the errors of `send`."""
        self._send([message], [(message._offset, _DEAD_LETTER)])

    def _send(self, messages: Sequence[Message], levels: Sequence[tuple[int, int]]) -> None:
        left = [level for level in levels if level not in self._sent]
        with naming(self._token.queue, messages, "be sent back"):
            while left:
                done = self._broker.groups.send_back(self._token, left, self._most)
                self._sent.update(left[:done])
                left = left[done:]
        self._sent.difference_update(levels)


def told(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes of messages that were sent back, with the status SENT_BACK instead of the engine's PARKED."""
    return [outcome._replace(status="SENT_BACK") for outcome in outcomes]


def require_retries(names: Sequence[str], queue: MessageQueue) -> None:
    """Raise SchemaError MISSING_COLUMN if the column that counts a message's retries is missing."""
    if "reconsume_times" not in names:
        raise SchemaError(
            SchemaCondition.MISSING_COLUMN,
            f"consume_concurrently got rows of queue {queue} without the column reconsume_times, which with retryTopic=true says how often "
            "a message was retried. Do not drop it",
        )
