"""The engine of a listener without order, like RocketMQ's MessageListenerConcurrently, for a closed range of one queue. Pure.

Rules (from ConsumeMessageConcurrentlyService, and the broker's handling of CONSUMER_SEND_MSG_BACK): if the listener answers
CONSUME_SUCCESS, the messages of the batch up to ``context.ack_index`` are done. If it answers RECONSUME_LATER or None, or raises an
exception, no message is done. Each message that is not done comes back alone after the delay of its level. It becomes a dead letter
instead if it was retried ``max_reconsume_times`` times or if ``context.delay_level_when_next_consume`` is below 0.

Unlike in Java, a message that has failed before is always passed to the listener alone. A message without retries left is passed again
immediately if it is unknown whether it has failed itself: if it was in a batch of several, and not the first after ``context.ack_index``.

A message that should come back waits in the queue's parking lot; in Java it would wait in the topic %RETRY%<group>. If the lot is full,
the message goes to the listener again after 5 s, as in Java when a message cannot be sent back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from orderedmq.listening.engine import Batch, Engine, LotView, Message, Outcome, Settings, in_company, outcomes
from orderedmq.listening.listener import ALL, Answer, ConsumeConcurrentlyContext, ConsumeConcurrentlyStatus, check_bounds
from orderedmq.model import MessageQueue
from orderedmq.parking import DELAY_LEVELS, FIRST_LEVEL
from orderedmq.text import MAX_ERROR_BYTES, clip

#: Seconds after which a message that could not be parked goes to the listener again (Java: submitConsumeRequestLater).
LATER: Final = 5.0
#: Milliseconds after which a refused request to park a message or to write a dead letter is repeated.
REFUSED_PAUSE: Final = 1000
#: RocketMQ's default of maxReconsumeTimes. The value -1 means this default.
MAX_RECONSUME_TIMES: Final = 16


@dataclass(frozen=True)
class ConcurrentSettings(Settings):
    """Settings of ``consume_concurrently``.

    The listener processes up to ``concurrency`` batches of a queue (at most 1024) at the same time, in threads or, if it is async, in an
    event loop. A batch has 1 to ``consume_message_batch_max_size`` messages (at most 1024). A message that has failed before is passed
    alone, and becomes a dead letter after ``max_reconsume_times`` retries (-1: 16, as in RocketMQ). Raises OptionError INVALID.
    """

    consume_message_batch_max_size: int = 1
    concurrency: int = 1
    max_reconsume_times: int = MAX_RECONSUME_TIMES

    name: ClassVar[str] = "consume_concurrently"
    context: ClassVar[type] = ConsumeConcurrentlyContext
    statuses: ClassVar[type[ConsumeConcurrentlyStatus]] = ConsumeConcurrentlyStatus
    parks: ClassVar[bool] = True
    alone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        bounds = {"consume_message_batch_max_size": (1, 1024), "concurrency": (1, 1024), "max_reconsume_times": (-1, 2**31 - 1)}
        check_bounds(self, bounds)

    @property
    def most_retries(self) -> int:
        """The maximum number of retries of a message."""
        return MAX_RECONSUME_TIMES if self.max_reconsume_times == -1 else self.max_reconsume_times

    def engine(self, queue: MessageQueue, now: float, lot: LotView, begin: int) -> ConcurrentEngine:
        return ConcurrentEngine(queue, self, now, lot, begin)


class ConcurrentEngine(Engine):
    """Passes one range of a queue to a listener, in no order.

    Messages that an earlier attempt of this range has parked are among the lot's ``places``, and are not consumed again.
    """

    def __init__(self, queue: MessageQueue, settings: ConcurrentSettings, now: float, lot: LotView, begin: int) -> None:
        super().__init__(queue, now, begin, concurrency=settings.concurrency, pause=REFUSED_PAUSE)
        self.settings = settings
        self._places, self._capacity = lot.parked_offsets, lot.capacity
        #: Free places in the lot. Messages in it that do not belong to this micro-batch also take up places.
        self._room = lot.capacity - len(lot.parked_offsets)
        self._ready: deque[Message] = deque()
        #: Messages that have failed before.
        self._alone: deque[Message] = deque()
        #: Messages that could not be parked, ordered by the time when they go to the listener again.
        self._later: deque[tuple[float, Message]] = deque()
        for message in lot.planned:
            if message._offset in lot.parked_offsets:
                continue
            self._plan(message)
            if message._ended:
                continue
            if message._held or not message._due:
                self._to_park.append(message)
                self._room -= 1
            else:
                (self._alone if message._attempts else self._ready).append(message)

    def _add(self, messages: Sequence[Message]) -> None:
        if parked := [message for message in messages if message._offset in self._places]:
            self._decided(parked)
            messages = [message for message in messages if message._offset not in self._places]
        self._ready.extend([message for message in messages if not message._attempts])
        self._alone.extend([message for message in messages if message._attempts])

    def _take(self) -> Batch | None:
        ready, size = self._ready, self.settings.consume_message_batch_max_size
        if not ready:
            return Batch([self._alone.popleft()]) if self._alone else None
        if size == 1:
            return Batch([ready.popleft()])
        return Batch([ready.popleft() for _ in range(min(size, len(ready)))])

    def _resume(self, now: float) -> None:
        while self._later and self._later[0][0] <= now:
            self._alone.append(self._later.popleft()[1])
            self._tried_again(now)

    def _next_resume(self) -> float | None:
        return self._later[0][0] if self._later else None

    def consumed(self, batch: Batch, answer: Answer, now: float) -> list[Outcome]:
        self._returned(batch, now)
        status, error, context = answer
        messages = batch.messages
        if status is ConsumeConcurrentlyStatus.CONSUME_SUCCESS and context.ack_index == ALL:
            self._decided(messages)
            return outcomes(messages, "SUCCESS", batch.seconds)
        accepted, ack_index = 0, -1
        if status is ConsumeConcurrentlyStatus.CONSUME_SUCCESS:
            # Without a number it is unknown what succeeded, so the listener gets all messages again.
            ack_index = self._whole(context, "ack_index", -1)
            accepted = min(max(ack_index, -1) + 1, len(messages))
        if accepted < len(messages):
            succeeded = status is ConsumeConcurrentlyStatus.CONSUME_SUCCESS
            why = error or (f"ack_index was {ack_index}" if succeeded else "the listener answered RECONSUME_LATER")
            text = clip(why, MAX_ERROR_BYTES)
            company = clip(in_company(why, len(messages) - accepted), MAX_ERROR_BYTES)
            delay_level = self._whole(context, "delay_level_when_next_consume", 0)
            for number, message in enumerate(messages[accepted:]):
                # With ack_index -1, none is done, but it is unknown which one has failed.
                itself = len(messages) == 1 or (succeeded and accepted > 0 and not number)
                self._failed(batch, message, text if itself else company, delay_level, now, itself=itself)
        self._decided(messages[:accepted])
        return outcomes(messages[:accepted], "SUCCESS", batch.seconds)

    def _failed(self, batch: Batch, message: Message, error: str, delay_level: int, now: float, *, itself: bool) -> None:
        """Decide what becomes of a message after a failure. ``itself``: whether it is known that this message has failed."""
        retried = message._attempts
        message._attempts += 1
        message._error = error
        if delay_level < 0 or (itself and retried >= self.settings.most_retries):
            self._exhausted.append((batch, message))
        elif retried >= self.settings.most_retries:
            self._alone.append(message)
            self._tried_again(now)
        elif self._room > 0:
            self._room -= 1
            message._again = True
            message._level = min(delay_level or FIRST_LEVEL + retried, len(DELAY_LEVELS))
            self._to_park.append(message)
        else:
            self._warn(
                f"the parking lot of queue {self.queue} is full ({self._capacity} messages): messages that fail "
                f"go to the listener again after {LATER:g} s instead, and hold up the micro-batch. Raise the source's option "
                "parkingLotMaxMessages, or fix the cause of the failures"
            )
            self._later.append((now + LATER, message))

    def _dead_lettered(self, batch: Batch, message: Message) -> list[Outcome]:
        self._decided([message])
        return outcomes([message], "DEAD_LETTER", batch.seconds)
