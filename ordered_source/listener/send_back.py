"""Messages that a listener could not process, on their way back to the group's retry topic. Over RocketMQ only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from orderedmq.broker import Broker
from orderedmq.conditions import SchemaCondition
from orderedmq.errors import DataLossError, GroupError, LockError, OrderedMQError, SchemaError
from orderedmq.listening.engine import Message, Outcome
from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import LockToken

#: The delay level that makes a dead letter of a message at once (Java: delayLevelWhenNextConsume).
_DEAD_LETTER: Final = -1


class SendBack:
    """Sends messages of one queue back. It does not send a message again that it has sent, if a later one of them failed."""

    def __init__(self, broker: Broker, token: LockToken, max_reconsume_times: int) -> None:
        self._broker = broker
        self._token = token
        self._most = max_reconsume_times
        #: Offsets and delay levels of messages that were sent back together with others that could not be.
        self._sent: set[tuple[int, int]] = set()

    def send(self, messages: Sequence[Message]) -> str | None:
        """Send messages back. Return None, or the error's text if not all of them could be: call it again with the same.

        Raises LockError; DataLossError and GroupError, since waiting does not help.
        """
        return self._send([(one._offset, one._level) for one in messages])

    def give_up(self, messages: Sequence[Message]) -> str | None:
        """Have the broker make dead letters of messages. Return None, or the error's text. Raises as `send`."""
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
    """Return the engine's outcomes of messages that were sent back, where it says PARKED."""
    return [one._replace(status="SENT_BACK") for one in outcomes]


def require_retries(names: Sequence[str], queue: MessageQueue) -> None:
    """Require the column that counts a message's retries. Raises SchemaError MISSING_COLUMN."""
    if "reconsume_times" not in names:
        raise SchemaError(
            SchemaCondition.MISSING_COLUMN,
            f"consume_concurrently got rows of queue {queue} without the column reconsume_times: with retryTopic=true it says how often a "
            "message was retried; do not drop it",
        )
