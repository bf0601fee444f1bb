"""The engine of a listener with order per queue: one batch of the queue after another. Pure: no clock, no effects.

Rules (from RocketMQ's ConsumeMessageOrderlyService): the listener gets a batch again until it is accepted or its messages are dead
letters, and only then does the queue continue. A batch that is accepted but not yet committed is *taken*. The table shows the effect of
an answer for each value of ``context.auto_commit`` after the call. None, an exception and any other answer count as SUSPEND:

=======================  ===========================================  =============================================
answer                   auto-commit on                               off
=======================  ===========================================  =============================================
SUCCESS                  everything taken is committed                the batch stays taken
COMMIT                   SUCCESS, with a warning                      everything taken is committed
ROLLBACK                 SUCCESS, with a warning                      everything taken is put back; suspend
SUSPEND, several         each message is put back alone; suspend      the same
SUSPEND, retries left    the message is put back; suspend             the same
SUSPEND, exhausted       dead letter; everything taken is committed   dead letter; this message is settled, no other
=======================  ===========================================  =============================================

If ``context.ack_index`` is below the last message of a batch, the messages up to it are treated as a batch that was accepted, and the next
one as a batch that was suspended. The others have not been called.

A closed range differs from Java's endless queue:

- ``max_reconsume_times`` is 16. Java's default retries forever, which would block the micro-batch forever (-1 selects this).
- Every batch except the last of the range is full, while Java takes the messages that have arrived. So a batch is the same in every
  attempt and repeat, however the range was divided, until it fails.
- A batch that fails is divided, and a message becomes a dead letter after it has failed alone. Java retries the batch as a whole, and makes
  dead letters of good messages together with the bad one.
- Even without auto-commit, a dead letter is settled. Java leaves it taken. If this engine did so, a ROLLBACK would bring the message
  back, and it would be uncommitted at the range's end although nothing is left to do. The listener still has to commit the batches taken
  before.
- If a dead letter cannot be written, only the write is repeated. Java's consumer calls the listener again.
- Messages that are taken but not committed at the end of the range are an error. Java waits for the next message.
- Taken messages do not limit how many messages are read. Java stops pulling above 1,000 uncommitted messages, and stalls.
- A lost lock ends the task. Java waits until it owns the queue again.
- A range may be repeated, without the messages that an earlier run made dead letters. Each batch still covers the same message numbers
  (`Message`), so all other batches have the same messages. A batch with missing numbers is divided. Batches that were taken before
  missing messages stay taken, because it is unknown whether auto-commit was on when these messages became dead letters.

ROLLBACK is not a retry and never uses up the retries, as in Java. A listener that always answers ROLLBACK blocks the micro-batch forever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from orderedmq.conditions import ListenerCondition
from orderedmq.errors import ListenerError
from orderedmq.listening.engine import (
    PULL_THRESHOLD,
    Batch,
    Done,
    Engine,
    LotView,
    Message,
    Outcome,
    OutcomeStatus,
    Settings,
    in_company,
    not_accepted,
)
from orderedmq.listening.listener import (
    ALL,
    Answer,
    ConsumeOrderlyContext,
    ConsumeOrderlyStatus,
    check_bounds,
    suspend_seconds,
)
from orderedmq.model import MessageQueue
from orderedmq.text import MAX_ERROR_BYTES, clip


@dataclass(frozen=True)
class OrderPerQueue(Settings):
    """Settings of ``consume_orderly`` with which the batches of a queue are processed one after another.

    A batch has at most ``consume_message_batch_max_size`` messages (1 to 1024). If the listener suspends a batch or raises an exception,
    it gets the batch's messages again, one at a time, after ``suspend_current_queue_time_millis`` (limited to 10 to 30,000 ms). A message
    that fails alone is retried up to ``max_reconsume_times`` times in all. After that, it goes to the topic %DLQ%<group>.
    ``max_reconsume_times=-1``, RocketMQ's default, retries without limit, which can block the micro-batch forever. Raises OptionError
    INVALID.
    """

    consume_message_batch_max_size: int = 1
    suspend_current_queue_time_millis: int = 1000
    max_reconsume_times: int = 16

    name: ClassVar[str] = "consume_orderly"
    context: ClassVar[type] = ConsumeOrderlyContext
    statuses: ClassVar[type[ConsumeOrderlyStatus]] = ConsumeOrderlyStatus
    parks: ClassVar[bool] = False
    alone: ClassVar[bool] = False
    #: With more messages per call of `add`, Python's cyclic garbage collector would examine each message several times before its outcome
    #: is known, which costs as much as the rest of the task. The value does not change the batches, because only complete batches go to
    #: the listener.
    add_together: ClassVar[int] = 128

    def __post_init__(self) -> None:
        most = 2**31 - 1
        check_bounds(
            self,
            {
                "consume_message_batch_max_size": (1, 1024),
                "suspend_current_queue_time_millis": (0, most),
                "max_reconsume_times": (-1, most),
            },
        )

    @property
    def concurrency(self) -> int:
        return 1

    def engine(self, queue: MessageQueue, now: float, lot: LotView, begin: int) -> QueueEngine:  # noqa: ARG002
        return QueueEngine(queue, self, now, begin)


class QueueEngine(Engine):
    """Passes one range of a queue to a listener, one batch after another."""

    def __init__(self, queue: MessageQueue, settings: OrderPerQueue, now: float, begin: int) -> None:
        super().__init__(queue, now, begin, concurrency=1, pause=settings.suspend_current_queue_time_millis)
        self.settings = settings
        #: Messages that were not in a batch yet, from the index `_begin` on.
        self._waiting: list[Message] = []
        self._begin = 0
        #: Batches that the listener gets again, and taken batches, both in order.
        self._again: deque[Batch] = deque()
        self._taken: list[Batch] = []
        #: No batch goes to the listener before this time.
        self._suspended_until: float | None = None
        #: Whether auto-commit was on in the call after which a message became a dead letter.
        self._auto_commit = True

    @property
    def full(self) -> bool:
        # Batches that were at the listener do not count. A listener may take any number of messages before it commits.
        return len(self._waiting) - self._begin >= PULL_THRESHOLD

    def _add(self, messages: Sequence[Message]) -> None:
        del self._waiting[: self._begin]
        self._begin = 0
        self._waiting += messages

    def _take(self) -> Batch | None:
        if self._suspended_until is not None or self._exhausted:
            return None
        if self._again:
            return self._again.popleft()
        waiting, begin, size = self._waiting, self._begin, self.settings.consume_message_batch_max_size
        if begin == len(waiting):
            return None
        # The number of the first message of the next batch.
        following = (waiting[begin]._number // size + 1) * size
        end = begin + following - waiting[begin]._number
        if end > len(waiting) or waiting[end - 1]._number != following - 1:
            # Some of the batch's messages are missing, or have not arrived yet.
            if not self._closed and waiting[-1]._number - waiting[begin]._number == len(waiting) - 1 - begin:
                return None
            end = begin + 1
            while end < len(waiting) and waiting[end]._number == waiting[end - 1]._number + 1:
                end += 1
            if end == len(waiting) and not self._closed:
                return None
        self._begin = end
        return Batch(waiting[begin:end])

    def consumed(self, batch: Batch, answer: Answer, now: float) -> list[Outcome]:
        self._returned(batch, now)
        status, error, context = answer
        auto_commit = context.auto_commit
        if status is ConsumeOrderlyStatus.SUCCESS and auto_commit and context.ack_index == ALL:
            return self._commit(batch, "SUCCESS")
        if auto_commit and (status is ConsumeOrderlyStatus.COMMIT or status is ConsumeOrderlyStatus.ROLLBACK):
            self._warn(
                f"the listener of queue {self.queue} answered {status.name} with auto_commit on, which counts as SUCCESS"
            )
            status = ConsumeOrderlyStatus.SUCCESS
        if status is ConsumeOrderlyStatus.ROLLBACK:
            self._again.extendleft([batch, *reversed(self._taken)])
            self._taken.clear()
            self._suspend(context, now)
            return []
        success = status is ConsumeOrderlyStatus.SUCCESS or status is ConsumeOrderlyStatus.COMMIT
        accepted = self._accepted(batch, context, success)
        if accepted == len(batch.messages):
            return self._accept(batch, status, auto_commit)
        out = self._accept(_part(batch, 0, accepted), status, auto_commit) if accepted else []
        self._failed(batch, accepted, error or not_accepted(success), context, now)
        return out

    # -- inside

    def _accept(self, batch: Batch, status: ConsumeOrderlyStatus | None, auto_commit: bool) -> list[Outcome]:
        """Commit or take a batch. Return the outcomes of everything that this commits."""
        if auto_commit or status is ConsumeOrderlyStatus.COMMIT:
            return self._commit(batch, "SUCCESS" if auto_commit else "COMMIT")
        self._taken.append(batch)
        return []

    def _failed(self, batch: Batch, accepted: int | None, error: str, context: ConsumeOrderlyContext, now: float) -> None:
        """Divide a batch after a failure (`Engine._accepted`), and put back its messages, or make the failed one a dead letter."""
        begin, end = accepted or 0, len(batch.messages)
        alone = accepted is not None or end == 1
        head = batch if end == 1 else _part(batch, begin, begin + 1)
        rest = [_part(batch, begin + 1, end)] if alone else [_part(batch, at, at + 1) for at in range(1, end)]
        text = clip(error if alone else in_company(error, end), MAX_ERROR_BYTES)
        for message in head.messages if alone else batch.messages:
            message._attempts += 1
            message._error = text
        self._again.extendleft(reversed([part for part in rest if part.messages]))
        if alone and 0 <= self.settings.max_reconsume_times < head.messages[0]._attempts:
            self._auto_commit = context.auto_commit
            self._exhausted.append((head, head.messages[0]))
        else:
            self._again.appendleft(head)
            self._suspend(context, now)

    def _suspend(self, context: ConsumeOrderlyContext, now: float) -> None:
        millis = self._whole(context, "suspend_current_queue_time_millis", -1)
        self._suspended_until = now + suspend_seconds(millis, self.settings.suspend_current_queue_time_millis)

    def _resume(self, now: float) -> None:
        if self._suspended_until is not None and self._suspended_until <= now:
            self._suspended_until = None
            self._tried_again(now)

    def _next_resume(self) -> float | None:
        return self._suspended_until

    def _dead_lettered(self, batch: Batch, message: Message) -> list[Outcome]:
        if self._auto_commit:
            return self._commit(batch, "DEAD_LETTER")
        self._decided([message])
        return [_outcome(batch, "DEAD_LETTER")]

    def _commit(self, last: Batch, status: OutcomeStatus) -> list[Outcome]:
        """Return outcomes with SUCCESS for all taken batches, and one with ``status`` for ``last``."""
        taken, self._taken = self._taken, []
        for batch in (*taken, last):
            self._decided(batch.messages)
        return [*[_outcome(batch, "SUCCESS") for batch in taken], _outcome(last, status)] if taken else [_outcome(last, status)]

    def _finish(self) -> Done:
        """End the range. Raises ListenerError UNCOMMITTED if messages are taken and not committed."""
        messages = [message for batch in self._taken for message in batch.messages]
        if messages:
            raise ListenerError(
                ListenerCondition.UNCOMMITTED,
                f"{len(messages)} messages of queue {self.queue}, offsets {messages[0]._offset} to {messages[-1]._offset}, were taken and not "
                "committed at the end of the task's range: the listener answered SUCCESS with auto_commit off and no COMMIT followed. "
                "Answer COMMIT for the last of them (a range may end after any batch), or leave auto_commit on",
            )
        return super()._finish()


def _part(batch: Batch, begin: int, end: int) -> Batch:
    """Return a batch of some of the messages, which have had the same calls."""
    return Batch(batch.messages[begin:end], calls=batch.calls, seconds=batch.seconds)


def _outcome(batch: Batch, status: OutcomeStatus) -> Outcome:
    """Return the outcome of a batch. Its attempts are all its calls, because calls that ended with a rollback are not failures."""
    first, last = batch.messages[0], batch.messages[-1]
    # This is faster than Outcome(...), as in `outcomes`.
    values = (first._offset, last._offset + 1, None, status, batch.calls, batch.seconds, last._error, None)
    return tuple.__new__(Outcome, values)
