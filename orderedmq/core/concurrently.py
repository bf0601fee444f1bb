"""Listeners without order: RocketMQ's MessageListenerConcurrently for a closed range of one queue. Pure: no clock, no effects.

Rules (ConsumeMessageConcurrentlyService, and the broker's handling of CONSUMER_SEND_MSG_BACK): of a batch that was answered with
CONSUME_SUCCESS, the messages up to ``context.ack_index`` are done; of one answered with RECONSUME_LATER, None or an exception,
none is. Each of the others comes back alone after its delay level, or becomes a dead letter if it was retried
``max_reconsume_times`` times or if ``context.delay_level_when_next_consume`` is below 0.

Where Java sends a message back to the topic %RETRY%<group>, the caller may do so, too, or put it into the queue's parking lot. If
the lot has no room, the message goes to the listener again after 5 s, as in Java if it cannot be sent back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol

from orderedmq.core.key_order import Batch, Lane, Message, Outcome, outcomes
from orderedmq.core.listener import MAX_ERROR_BYTES, check_bounds, clip
from orderedmq.core.parking import DELAY_LEVELS, FIRST_LEVEL
from orderedmq.core.parking_engine import RETRY_TRUST, Limits, ParkingEngine
from orderedmq.model import MessageQueue

#: ``ack_index`` of a new context: all messages of the batch.
ALL: Final = 2**31 - 1
#: Seconds after which a message goes to the listener again that could not be parked (Java: submitConsumeRequestLater).
LATER: Final = 5.0
#: Milliseconds until the broker is asked again to park or to write a dead letter.
REFUSED_PAUSE: Final = 1000
#: RocketMQ's default of maxReconsumeTimes (-1 stands for it).
MAX_RECONSUME_TIMES: Final = 16


class ConsumeConcurrentlyStatus(Enum):
    """A listener's answer to a batch of messages, with the names of RocketMQ's ConsumeConcurrentlyStatus.

    CONSUME_SUCCESS: the messages up to ``context.ack_index`` are done, by default all. RECONSUME_LATER: all come again later, as
    after an exception.
    """

    CONSUME_SUCCESS = "CONSUME_SUCCESS"
    RECONSUME_LATER = "RECONSUME_LATER"


@dataclass(slots=True)
class ConsumeConcurrentlyContext:
    """One call's context, as RocketMQ's class of this name.

    ``message_queue`` has the fields topic, broker_name and queue_id. The listener may set ``ack_index`` to the index of the last
    message that succeeded (-1: none; it counts with CONSUME_SUCCESS only), and ``delay_level_when_next_consume`` for those that
    did not: 0 waits longer with each retry (10 s, 30 s, 1 min … 2 h), 1 to 18 is that delay level of RocketMQ (1 s … 2 h), and
    -1 makes dead letters of them at once.
    """

    message_queue: MessageQueue
    delay_level_when_next_consume: int = 0
    ack_index: int = ALL


class ConsumeConcurrentlyHook(Protocol):
    """Called before and after every call of the listener. After it, exactly one of ``status`` and ``error`` is None."""

    def consume_message_before(self, messages: Sequence[Any], context: ConsumeConcurrentlyContext) -> None: ...

    def consume_message_after(
        self,
        messages: Sequence[Any],
        context: ConsumeConcurrentlyContext,
        status: ConsumeConcurrentlyStatus | None,
        error: str | None,
    ) -> None: ...


@dataclass(frozen=True)
class ConcurrentSettings:
    """Parameters of ``consume_concurrently``. Raises OptionError INVALID."""

    consume_message_batch_max_size: int = 1
    concurrency: int = 1
    max_reconsume_times: int = MAX_RECONSUME_TIMES
    parking_lot_max_messages: int = 10_000

    def __post_init__(self) -> None:
        most = 2**31 - 1
        bounds = {
            "consume_message_batch_max_size": (1, 1024),
            "concurrency": (1, 1024),
            "max_reconsume_times": (-1, most),
            "parking_lot_max_messages": (0, 2**63 - 1),
        }
        check_bounds(self, bounds)

    @property
    def most_retries(self) -> int:
        """``max_reconsume_times``, or what -1 stands for."""
        return MAX_RECONSUME_TIMES if self.max_reconsume_times == -1 else self.max_reconsume_times


class ConcurrentRange(ParkingEngine):
    """One range of a queue on its way through a listener, in no order.

    ``lot``: what is planned of the parking lot. ``lying``: the offsets in the queue of what lies there and is not planned. What
    an earlier attempt of this range has parked is among them, and is not consumed again.
    """

    def __init__(
        self,
        queue: MessageQueue,
        settings: ConcurrentSettings,
        now: float,
        lot: Sequence[Message] = (),
        lying: Collection[int] = (),
    ) -> None:
        super().__init__(queue, Limits(settings.concurrency, REFUSED_PAUSE, settings.parking_lot_max_messages), now, len(lying))
        self.settings = settings
        self._most = settings.most_retries
        self._lying = lying
        self._ready: deque[Message] = deque()
        #: Messages that could not be parked, in the order of the times when they go to the listener again.
        self._later: deque[tuple[float, Message]] = deque()
        #: Every batch belongs to it: there is no order to keep.
        self._all = Lane(None)
        for message in lot:
            if message.offset in lying:
                continue
            self._held += 1
            if message.held or not message.due:
                self._to_park.append(message)
                self._room -= 1
            else:
                self._ready.append(message)

    def put(self, messages: Iterable[Message]) -> None:
        ready, lying, end = self._ready, self._lying, self._end
        before = len(ready)
        for message in messages:
            offset = message.offset
            if self._closed or offset <= end:
                raise self._out_of_order(offset)
            self._end = end = offset
            if offset not in lying:
                ready.append(message)
        self._held += len(ready) - before

    def _take(self) -> Batch | None:
        ready, size = self._ready, self.settings.consume_message_batch_max_size
        if not ready:
            return None
        if len(ready) <= size:
            batch = Batch(self._all, list(ready))
            ready.clear()
            return batch
        return Batch(self._all, [ready.popleft() for _ in range(size)])

    def _resume(self, now: float) -> None:
        while self._later and self._later[0][0] <= now:
            self._ready.append(self._later.popleft()[1])
            self._ask |= now - self._last_lock > RETRY_TRUST

    def _next_resume(self) -> float | None:
        return self._later[0][0] if self._later else None

    def consumed(
        self,
        batch: Batch,
        status: ConsumeConcurrentlyStatus | None,
        error: str | None,
        now: float,
        ack_index: int = ALL,
        delay_level: int = 0,
    ) -> list[Outcome]:
        """Take the listener's answer to `Consume`, its error, and the context as it left it. Return the messages decided by it."""
        self._returned(batch, now)
        messages = batch.messages
        done = 0
        if status is ConsumeConcurrentlyStatus.CONSUME_SUCCESS:
            done = min(max(ack_index, -1) + 1, len(messages))
        if done < len(messages):
            text = error or ("the listener answered RECONSUME_LATER" if not done else f"ack_index was {ack_index}")
            text = clip(text, MAX_ERROR_BYTES)
            for message in messages[done:]:
                self._failed(batch, message, text, delay_level, now)
        self._held -= done
        return outcomes(messages[:done], "SUCCESS", batch)

    def _failed(self, batch: Batch, message: Message, error: str, delay_level: int, now: float) -> None:
        retried = message.attempts
        message.attempts += 1
        message.error = error
        if delay_level < 0 or retried >= self._most:
            self._exhausted.append(Batch(self._all, [message], calls=batch.calls, seconds=batch.seconds))
        elif self._room > 0:
            self._room -= 1
            message.again = True
            message.level = min(delay_level or FIRST_LEVEL + retried, len(DELAY_LEVELS))
            self._to_park.append(message)
        else:
            self._warn(
                f"the parking lot of queue {self.queue} is full ({self.settings.parking_lot_max_messages} messages): messages that fail "
                f"come again after {LATER:g} s instead, and hold up the micro-batch; raise the source's option parkingLotMaxMessages, or "
                "mend what fails"
            )
            self._later.append((now + LATER, message))

    def _put_aside(self, batch: Batch) -> list[Outcome]:
        self._held -= 1
        return outcomes(batch.messages, "DEAD_LETTER", batch)
