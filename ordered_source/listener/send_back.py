"""Sends messages that a listener could not process to the group's retry topic, over RocketMQ only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from orderedmq.broker import Broker
from orderedmq.conditions import SchemaCondition
from orderedmq.errors import DataLossError, GroupError, LockError, OrderedMQError, SchemaError
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

    def send(self, messages: Sequence[Message]) -> str | None:
        """Send messages back. Return None, or an error's text if not all were sent: in that case, call this again with the same messages.

        Raises LockError, DataLossError and GroupError, because another call cannot succeed after these errors.
        """
        return self._send([(one._offset, one._level) for one in messages])

    def give_up(self, messages: Sequence[Message]) -> str | None:
        """Tell the broker to make messages dead letters. Return None, or the error's text. Raises the errors of `send`."""
        return self._send([(one._offset, _DEAD_LETTER) for one in messages])

    def _send(self, messages: Sequence[tuple[int, int]]) -> str | None:
        left = [one for one in messages if one not in self._sent]
        try:
            while left:
                done = self._broker.groups.send_back(self._token, left, self._most)
                self._sent.update(left[:done])
                left = left[done:]
        except (LockError, DataLossError, GroupError):
            raise
        except OrderedMQError as error:
            return str(error)
        self._sent.difference_update(messages)
        return None


def told(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes of messages that were sent back, with the status SENT_BACK instead of the engine's PARKED."""
    return [one._replace(status="SENT_BACK") for one in outcomes]


def require_retries(names: Sequence[str], queue: MessageQueue) -> None:
    """Raise SchemaError MISSING_COLUMN if the column that counts a message's retries is missing."""
    if "reconsume_times" not in names:
        raise SchemaError(
            SchemaCondition.MISSING_COLUMN,
            f"consume_concurrently got rows of queue {queue} without the column reconsume_times, which with retryTopic=true says how often "
            "a message was retried. Do not drop it",
        )
