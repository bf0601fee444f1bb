"""The orderly listener's engine: one queue's messages through a listener, one batch after another. Pure: no clock, no effects.

Rules (RocketMQ's ConsumeMessageOrderlyService): the listener gets a batch again until it is accepted or dead-lettered, and only
then does the queue go on. `OrderlyQueue.next` returns an action, and again the same one until another method has taken its
outcome. The table shows the effect of an answer, with ``context.auto_commit`` as the listener left it (None, an exception and
any other answer count as SUSPEND):

=======================  ===========================================  =============================================
answer                   auto-commit on                               off
=======================  ===========================================  =============================================
SUCCESS                  everything taken is committed                the batch stays taken
COMMIT                   SUCCESS, with a warning                      everything taken is committed
ROLLBACK                 SUCCESS, with a warning                      everything taken is put back; suspend
SUSPEND, retries left    the batch is put back; suspend               the same
SUSPEND, exhausted       dead letters; everything taken is committed  dead letters; this batch is settled, no other
... but the write fails  the batch is put back; suspend               the same
=======================  ===========================================  =============================================

A closed range differs from Java's endless queue:

- ``max_reconsume_times`` is 16: Java's default retries for ever, which would hold the micro-batch for ever (-1 asks for it).
- Every batch but the range's last is full; Java takes the messages that have arrived. So a batch is the same in every attempt
  and replay, however the range was cut into slices, and its messages have been retried equally often.
- A batch is dead-lettered as a whole, when all its messages are exhausted. Java dead-letters each exhausted message by itself,
  and again in every further attempt of its batch.
- Dead letters settle their batch without auto-commit, too. Java leaves it taken: a ROLLBACK would bring it back, and at the
  range's end it would be uncommitted with nothing left to do. The listener still has to commit the batches taken before.
- Messages taken and not committed at the end of the range are an error; Java waits for the next message.
- Taken messages never stop the flow; Java stops pulling above 1,000 uncommitted messages, and stalls.
- A lost lock ends the task; Java waits until it owns the queue again.
- A range may be repeated. Messages that became dead letters in an earlier attempt stay that: they are settled without a call. They
  still count for the size of their batch, so that the other batches are the same as before. What was taken before them stays
  taken, as without auto-commit: whether the call that gave them up had it on is not known.

ROLLBACK is not a retry and never exhausts, as in Java: a listener that always answers it holds the micro-batch for ever.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

import pyarrow.compute as pc

from orderedmq.conditions import ListenerCondition
from orderedmq.core.listener import (
    MAX_ERROR_BYTES,
    ConsumeOrderlyContext,
    ConsumeOrderlyStatus,
    OrderlySettings,
    clip,
    suspend_seconds,
)
from orderedmq.core.process_queue import ProcessQueue, Slice
from orderedmq.errors import ListenerError, LockError, lost_by_listener
from orderedmq.model import MessageQueue, OffsetRange

#: Messages held above which prefetching should stop (Java: ``pullThresholdForQueue``).
PULL_THRESHOLD: Final = 1000
#: Seconds of pause after a queue was consumed without one for ``max_time_consume_continuously``.
YIELD: Final = 0.01


#: How a batch ended: accepted, accepted by the answer that committed (auto-commit off), or dead-lettered.
OutcomeStatus = Literal["SUCCESS", "COMMIT", "DEAD_LETTER"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A decided batch: offsets ``begin_offset`` to ``end_offset`` (exclusive). A range's outcomes have each message once.

    ``attempts`` counts calls of the listener, ``duration`` is their seconds: both are 0 if an earlier attempt of the range has made
    dead letters. ``error`` is that of the last failed attempt, if any.
    """

    queue: MessageQueue
    begin_offset: int
    end_offset: int
    status: OutcomeStatus
    attempts: int
    duration: float
    error: str | None


@dataclass(slots=True)
class Batch:
    """Messages that go to the listener together, and the state of their processing. Only the engine changes it.

    ``slices`` hold ``count`` offsets from ``begin`` to ``end`` (exclusive), which may have gaps. ``attempts`` counts calls of
    the listener. ``retries`` counts those after which the batch was given back, except by ROLLBACK; it is to be added to
    ``reconsume_times``.
    """

    begin: int
    end: int
    count: int
    slices: list[Slice]
    attempts: int = 0
    retries: int = 0
    seconds: float = 0.0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Consume:
    """Call the listener with this batch; then `OrderlyQueue.consumed`."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Write this batch, with its error, to %DLQ%<group>; then `OrderlyQueue.dead_lettered`."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class Suspend:
    """Nothing to do for this long. Calling `OrderlyQueue.next` sooner does no harm."""

    seconds: float


@dataclass(frozen=True, slots=True)
class CheckLock:
    """Ask the broker whether the queue is still held; then `OrderlyQueue.lock`."""


@dataclass(frozen=True, slots=True)
class Pull:
    """More messages are needed: call `OrderlyQueue.put` or `OrderlyQueue.close`."""


@dataclass(frozen=True, slots=True)
class Done:
    """Every message of the range was consumed and committed."""


Action = Consume | DeadLetter | Suspend | CheckLock | Pull | Done


class OrderlyQueue:
    """The messages of one queue and one range on their way through a listener. An object belongs to one thread.

    ``now`` is monotonic seconds. A method that is called out of turn raises RuntimeError: the caller has a bug.
    """

    def __init__(self, queue: MessageQueue, settings: OrderlySettings, now: float) -> None:
        self.queue = queue
        self.settings = settings
        #: Texts that the caller should log, each of them once.
        self.warnings: list[str] = []
        self._process = ProcessQueue(now, max_messages=PULL_THRESHOLD)
        #: The end of the offsets that were put, and the number of messages taken.
        self._end = self._taken = 0
        #: The action that was returned and has no outcome yet.
        self._due: Consume | DeadLetter | CheckLock | None = None
        #: The batch to be dead-lettered, its ``auto_commit``, and its suspension in seconds if the write fails.
        self._exhausted: Batch | None = None
        self._auto_commit, self._pause = True, 0.0
        #: Batches taken and accepted, in order.
        self._held: list[Batch] = []
        #: The end of the last commit.
        self._settled = 0
        #: Offsets at which a batch must end, and how many of the next messages complete the batch that the last settled ones belong to.
        self._cuts: list[int] = []
        self._short = 0
        #: The number of messages that came, settled ones included.
        self._came = 0
        #: Batches given back, by their first offset.
        self._again: dict[int, Batch] = {}
        #: The engine resumes at ``_resume`` with a check of the lock. ``_began`` is when the first batch after that began.
        self._resume = now
        self._must_check_lock = True
        self._began: float | None = None
        self._called_at = now
        self._closed = self._lost = False

    # -- messages come in

    @property
    def full(self) -> bool:
        """Whether prefetching should stop for now. `Pull` must be answered all the same."""
        return self._process.full

    def put(self, messages: Slice) -> None:
        """Add messages of the range, above all put before. Raises ValueError otherwise: they would be consumed out of order."""
        if not messages.count:
            return
        self._come(messages.begin, messages.end)
        self._process.put(messages)
        if 0 < self._short <= messages.count:
            self._cuts.append(messages.begin + self._short)
        self._short = max(0, self._short - messages.count)

    def settle(self, begin: int, end: int) -> list[Outcome]:
        """Skip the range's next messages, offsets ``begin`` to ``end`` (exclusive), which have dead letters of an earlier attempt.

        Return their outcome. Raises ValueError as `put`.
        """
        self._come(begin, end)
        self._cuts.append(begin)
        self._short = -self._came % self.settings.consume_message_batch_max_size
        return [Outcome(self.queue, begin, end, "DEAD_LETTER", 0, 0.0, None)]

    def _come(self, begin: int, end: int) -> None:
        if self._closed or begin < self._end:
            raise ValueError(f"messages from {begin} of queue {self.queue} came after {self._end - 1} or its end")
        self._end = end
        self._came += end - begin

    def close(self) -> None:
        """The range has no more messages."""
        self._closed = True

    # -- what to do

    def next(self, now: float) -> Action:
        """Return the action to take now.

        Raises LockError LOST if the queue was lost or dropped, and ListenerError UNCOMMITTED at the end of the range.
        """
        process = self._process
        if process.dropped or self._lost:
            raise self._not_ours()
        if self._due is not None:
            return self._due
        if now < self._resume:
            return Suspend(self._resume - now)
        if self._must_check_lock or process.lock_expired(now):
            self._due = CheckLock()
        elif self._exhausted is not None:
            self._due = DeadLetter(self._exhausted)
        else:
            ready, complete = self._ready()
            size = self.settings.consume_message_batch_max_size
            if ready < size and not complete:
                return Pull()
            if not ready:
                if self._held:
                    raise self._uncommitted()
                return Done()
            if self._began is None:
                self._began = now
            elif now - self._began > self.settings.max_time_consume_continuously:
                self._suspend(YIELD, now)
                return Suspend(YIELD)
            self._due = Consume(self._take(min(size, ready), now))
        return self._due

    def _ready(self) -> tuple[int, bool]:
        """Return how many messages may be taken together, and whether no more of them will come."""
        ready = self._process.message_count - self._taken
        if ready and self._cuts:
            pending = self._process.pending()
            following = bisect_right(self._cuts, pending[0].begin)
            if following < len(self._cuts):
                cut = self._cuts[following]
                return sum(min(span.end, cut) - span.begin for span in pending if span.begin < cut), True
        return ready, self._closed

    def _take(self, count: int, now: float) -> Batch:
        self._called_at = now
        self._taken += count
        slices = self._process.take(count, now)
        begin = slices[0].begin
        if begin in self._again:
            return self._again.pop(begin)
        return Batch(begin, slices[-1].end, count, slices)

    @property
    def floor(self) -> int:
        """The offset below which every message has an outcome, and none is consumed again."""
        again = min(self._again) if self._again else self._settled
        return min(again, self._held[0].begin) if self._held else again

    # -- outcomes of actions

    def consumed(
        self, context: ConsumeOrderlyContext, status: ConsumeOrderlyStatus | None, error: str | None, now: float
    ) -> list[Outcome]:
        """Take the listener's answer to `Consume`, the context as it left it, and its error.

        Return the batches decided by it.
        """
        if not isinstance(self._due, Consume):
            raise RuntimeError(f"queue {self.queue} has no batch at the listener")
        batch = self._due.batch
        self._due = None
        batch.attempts += 1
        batch.seconds += now - self._called_at
        if context.auto_commit:
            if status is ConsumeOrderlyStatus.SUCCESS:
                return self._commit(batch, "SUCCESS")
            if status is ConsumeOrderlyStatus.COMMIT or status is ConsumeOrderlyStatus.ROLLBACK:
                text = f"the listener of queue {self.queue} answered {status.name} with auto_commit on: counted as SUCCESS"
                if text not in self.warnings:
                    self.warnings.append(text)
                return self._commit(batch, "SUCCESS")
        elif status is ConsumeOrderlyStatus.SUCCESS:
            self._held.append(batch)
            return []
        elif status is ConsumeOrderlyStatus.COMMIT:
            return self._commit(batch, "COMMIT")
        pause = suspend_seconds(context.suspend_current_queue_time_millis, self.settings.suspend_current_queue_time_millis)
        if status is ConsumeOrderlyStatus.ROLLBACK:
            self._again.update((each.begin, each) for each in (*self._held, batch))
            self._held.clear()
            self._process.rollback()
            self._taken = 0
            self._suspend(pause, now)
            return []
        batch.error = clip(error or "the listener answered SUSPEND_CURRENT_QUEUE_A_MOMENT", MAX_ERROR_BYTES)
        if _exhausted(batch, self.settings.max_reconsume_times):
            self._exhausted, self._auto_commit, self._pause = batch, context.auto_commit, pause
        else:
            self._retry(batch, pause, now)
        return []

    def dead_lettered(self, ok: bool, error: str | None, now: float) -> list[Outcome]:
        """Take the outcome of `DeadLetter`. Return the batches decided by it.

        ``ok``: all its messages are in %DLQ%<group>; otherwise ``error`` says why not.
        """
        if not isinstance(self._due, DeadLetter):
            raise RuntimeError(f"queue {self.queue} has no dead letters to be written")
        batch = self._due.batch
        self._due = self._exhausted = None
        if not ok:
            batch.error = clip(f"dead letters not written ({error or 'unknown'}) after: {batch.error}", MAX_ERROR_BYTES)
            self._retry(batch, self._pause, now)
            return []
        if self._auto_commit:
            return self._commit(batch, "DEAD_LETTER")
        # ProcessQueue.remove settles only pending messages.
        self._give_back(batch)
        self._process.remove(batch.begin, batch.end, now)
        return [self._outcome(batch, "DEAD_LETTER")]

    def lock(self, held: bool, now: float) -> None:
        """Record whether the queue is still held: the answer to `CheckLock`, or news that came unasked."""
        self._process.locked = held
        if not held:
            self._lost = True
            return
        self._process.last_lock = now
        if isinstance(self._due, CheckLock):
            self._due = None
            self._must_check_lock = False

    def drop(self) -> None:
        """The queue was given up: stop consuming it."""
        self._process.dropped = True

    # -- inside

    def _commit(self, last: Batch, status: OutcomeStatus) -> list[Outcome]:
        """Commit everything taken, up to and including ``last``."""
        self._process.commit()
        self._taken = 0
        self._settled = last.end
        self._cuts = [cut for cut in self._cuts if cut > last.end]
        outcomes = [self._outcome(batch, "SUCCESS") for batch in self._held]
        outcomes.append(self._outcome(last, status))
        self._held.clear()
        return outcomes

    def _outcome(self, batch: Batch, status: OutcomeStatus) -> Outcome:
        return Outcome(self.queue, batch.begin, batch.end, status, batch.attempts, batch.seconds, batch.error)

    def _give_back(self, batch: Batch) -> None:
        self._process.make_to_consume_again(batch.slices)
        self._taken -= batch.count

    def _retry(self, batch: Batch, pause: float, now: float) -> None:
        # As in Java, a dead-letter write that failed counts as one more retry.
        batch.retries += 1
        self._again[batch.begin] = batch
        self._give_back(batch)
        self._suspend(pause, now)

    def _suspend(self, seconds: float, now: float) -> None:
        self._resume = now + seconds
        self._began = None
        self._must_check_lock = True

    def _not_ours(self) -> LockError:
        return lost_by_listener(self.queue, "dropped" if self._process.dropped else "lost")

    def _uncommitted(self) -> ListenerError:
        return ListenerError(
            ListenerCondition.UNCOMMITTED,
            f"{self._taken} messages of queue {self.queue}, offsets {self._held[0].begin} to {self._held[-1].end - 1}, were taken and not "
            "committed at the end of the task's range: the listener answered SUCCESS with auto_commit off and no COMMIT followed; answer "
            "COMMIT for the last of them (a range may end behind any batch), or leave auto_commit on",
        )

    def _check(self) -> None:
        """Assert every invariant. For tests and simulations."""
        self._process._check()
        taken, again = list(self._held), list(self._again.values())
        if isinstance(self._due, Consume):
            taken.append(self._due.batch)
        elif self._exhausted is not None:
            taken.append(self._exhausted)
        assert all(a.end <= b.begin for a, b in pairwise(taken)), "batches are out of order"
        assert self._taken == sum(batch.count for batch in taken), "what is taken is not what the batches have"
        assert _offsets(self._process.taken()) == _offsets(s for batch in taken for s in batch.slices), "taken by no batch"
        assert _offsets(self._process.pending()) >= _offsets(s for batch in again for s in batch.slices), "a retry is lost"
        assert all(at == batch.begin for at, batch in self._again.items()), "a batch is under a wrong offset"
        for batch in taken + again:
            size = self.settings.consume_message_batch_max_size
            ended = (self._closed and batch.end == self._end) or any(batch.end <= cut for cut in self._cuts)
            assert batch.count == size or (batch.count < size and ended), "a batch in the middle is not full"
            assert not any(batch.begin < cut < batch.end for cut in self._cuts), "a batch goes across settled messages"
            assert batch.count == sum(piece.count for piece in batch.slices), "a batch lost a message"


def _offsets(spans: Iterable[Slice | OffsetRange]) -> set[int]:
    return {offset for span in spans for offset in range(span.begin, span.end)}


def _exhausted(batch: Batch, most: int) -> bool:
    """Whether every message has had ``most`` retries. If some have no ``reconsume_times``, only the batch's retries count."""
    if most == -1:
        return False
    if batch.retries >= most:
        return True
    for piece in batch.slices:
        if piece.rows is None or "reconsume_times" not in piece.rows.schema.names:
            return False
        column = piece.rows.column("reconsume_times")
        if column.null_count or pc.min(column).as_py() + batch.retries < most:
            return False
    return True
