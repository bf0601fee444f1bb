"""Tasks of a micro-batch in the simulation. Each reads one range of one queue under the driver's lock, a few messages per step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random
from typing import Final

from ordered_source.listener.settled import NO_PROGRESS, Settled
from ordered_source.partition_reader import CHECK_INTERVAL
from orderedmq.conditions import LockCondition
from orderedmq.errors import LockError
from orderedmq.listening.engine import CheckLock, Consume, Done, Engine, Message, Outcome, Pull, Suspend, WriteLetter
from orderedmq.listening.listener import Answer, ConsumeOrderlyContext, ConsumeOrderlyStatus
from orderedmq.listening.queue_engine import OrderPerQueue, QueueEngine
from orderedmq.model import OffsetRange
from orderedmq.ownership.lock import LockToken
from tests.engine_messages import FULL
from tests.sim.sink import Run, Sink
from tests.sim.world import World

_ANSWERS: Final = (
    *(ConsumeOrderlyStatus.SUCCESS,) * 12,
    *(ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT,) * 2,
    ConsumeOrderlyStatus.ROLLBACK,
    ConsumeOrderlyStatus.COMMIT,
    None,
)
#: The share of a task's actions before which it records its progress.
RECORDED: Final = 0.1


class Task:
    """Delivers its range to a sink. Staged messages come out when the batch is published, others immediately (a foreign sink)."""

    def __init__(self, world: World, sink: Sink, run: Run, span: OffsetRange, token: LockToken, *, staged: bool) -> None:
        self.world, self.sink, self.run, self.span, self.token = world, sink, run, span, token
        self.staged = staged
        self.position = span.begin
        self.checked: float | None = None
        self.done = False

    def __str__(self) -> str:
        span = self.span
        return f"{self.run.query}'s task of batch {self.run.batch}, {self.token.queue} {span.begin}-{span.end} under {self.token.epoch}"

    def reads(self) -> str:
        return f"{self.token.queue.queue_id}:{self.span.begin}-{self.span.end}"

    def unpublished(self) -> bool:
        """Whether the group's offset is still below the end of the task's range."""
        return self.span.end > self.world.group_offsets.get(self.token.queue, 0)

    def step(self, random: Random) -> None:
        """Check the lock if a check is due, then work on some messages. Raises LockError LOST."""
        now = self.world.now
        if self.checked is None:
            self.check()
            self.register()
            self.start()
        elif now - self.checked > CHECK_INTERVAL:
            self.check()
        self.work(random)

    def register(self) -> None:
        self.sink.register(self.run, self.span, self.token)

    def check(self) -> None:
        if not self.world.check(self.token):
            raise LockError(LockCondition.LOST, f"{self.token.queue} was lost by {self.token.client_id}")
        self.checked = self.world.now

    def start(self) -> None:
        """Begin the range. Each attempt calls this."""
        self.position = self.span.begin

    def retry(self) -> None:
        self.checked = None

    def work(self, random: Random) -> None:
        end = min(self.span.end, self.position + random.randint(1, 6))
        if not self.staged:
            self.world.ledger.out(self.run.query, self.token, OffsetRange(self.position, end))
        self.position = end
        self.done = end == self.span.end

    def invariants(self) -> None:
        assert self.span.begin <= self.position <= self.span.end

    def record(self, random: Random, engine: Engine, settled: Settled) -> None:
        """Sometimes record the progress, as a task does after some seconds."""
        progress = settled.advance(engine.progress)
        if progress is not None and random.random() < RECORDED:
            self.world.reached["progress recorded"] += 1
            self.world.record_progress(self.token, progress)

    def skips(self, settled: Sequence[Outcome]) -> None:
        """Check the messages that the task does not give to the listener because an earlier attempt has decided them."""
        for one in settled:
            self.world.reached["dead letter honoured"] += one.status == "DEAD_LETTER"
            if one.status == "SUCCESS":
                self.world.reached["progress honoured"] += 1
                self.world.ledger.skipped(self.token, one.begin)

    def keeps_progress(self, progress: int, decided: Collection[int]) -> None:
        """Fail if a listener's progress is above an undecided message. ``decided``: all other offsets that the task has read."""
        undecided = next((offset for offset in range(self.span.begin, self.position) if offset not in decided), self.position)
        if progress > undecided:
            self.world.fail(f"{self}: the progress is {progress}, but the lowest undecided offset is {undecided}")


class ListenerTask(Task):
    """Runs a listener over its range with the real engine. The range counts as processed when the engine is done."""

    def __init__(
        self,
        world: World,
        sink: Sink,
        run: Run,
        span: OffsetRange,
        token: LockToken,
        settings: OrderPerQueue,
        *,
        auto: bool,
        staged: bool,
    ) -> None:
        super().__init__(world, sink, run, span, token, staged=staged)
        self.settings = settings
        self.auto = auto
        #: False makes the listener accept every message.
        self.moody = True
        self.start()

    def start(self) -> None:
        self.position = self.span.begin
        self.engine = QueueEngine(self.token.queue, self.settings, self.world.now, self.span.begin)
        self.outcomes: list[Outcome] = []
        #: The offsets of the last call, and whether the listener accepted them.
        self.last: tuple[list[int], bool] = ([], True)
        self.letters = set(self.world.letters.get(self.token.queue, ()))
        self.settled = Settled.without_lot(self.letters, self.world.progress.get(self.token.queue, NO_PROGRESS))

    def _note(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes += outcomes
        for one in outcomes:
            if one.status in ("SUCCESS", "COMMIT"):
                self.world.ledger.accepts(self.token, range(one.begin, one.end))

    def work(self, random: Random) -> None:
        for _ in range(random.randint(1, 8)):
            now = self.world.now
            self.record(random, self.engine, self.settled)
            match self.engine.next(now):
                case CheckLock():
                    self.engine.lock(self.world.check(self.token), now)
                case Pull():
                    self._pull(random)
                case Consume(batch):
                    offsets = _offsets(batch.messages)
                    self.world.ledger.called(self.token.queue, offsets[0], offsets[-1] + 1)
                    self.world.listening(self.token, offsets)
                    status, auto = self._answer(random, offsets[-1] + 1)
                    self.last = offsets, status in (ConsumeOrderlyStatus.SUCCESS, ConsumeOrderlyStatus.COMMIT)
                    answer = Answer(status, None, ConsumeOrderlyContext(self.token.queue, auto))
                    self._note(self.engine.consumed(batch, answer, now))
                case WriteLetter(letter):
                    if self.last != ([letter._offset], False):
                        self.world.fail(f"{self}: {letter._offset} is given up, but the last call was {self.last} (K6)")
                    if random.random() < 0.9 or not self.moody:
                        self.world.dead_letter(self.token, [letter._offset])
                        self._note(self.engine.dead_lettered())
                    else:
                        self.engine.refused(FULL, now)
                case Suspend():
                    return
                case Done():
                    self._finished()
                    return

    def _pull(self, random: Random) -> None:
        end = min(self.span.end, self.position + random.randint(1, 6))
        if self.position == end:
            self.engine.close()
        else:
            messages, settled = self.settled.divide(
                [Message(offset, None, None, offset - self.span.begin) for offset in range(self.position, end)]
            )
            self.skips(settled)
            self.outcomes += settled
            self.engine.add(messages)
            self.position = end

    def _answer(self, random: Random, end: int) -> tuple[ConsumeOrderlyStatus | None, bool]:
        status = random.choice(_ANSWERS) if self.moody else ConsumeOrderlyStatus.SUCCESS
        last = self.letters.issuperset(range(end, self.span.end))
        if not self.auto and status is ConsumeOrderlyStatus.SUCCESS and last:
            # Without auto-commit, the listener must commit with the last message that it gets.
            status = ConsumeOrderlyStatus.COMMIT
        return status, self.auto

    def invariants(self) -> None:
        super().invariants()
        if self.checked is not None:
            decided = {offset for outcome in self.outcomes for offset in range(outcome.begin, outcome.end)}
            self.keeps_progress(self.engine.progress, decided)

    def _finished(self) -> None:
        """Fail unless the outcomes cover each message of the range once."""
        decided = sorted(at for outcome in self.outcomes for at in range(outcome.begin, outcome.end))
        if decided != list(range(self.span.begin, self.span.end)):
            self.world.fail(f"{self}: outcomes of {decided}")
        if not self.staged:
            self.world.ledger.out(self.run.query, self.token, self.span)
        self.done = True


def _offsets(messages: Sequence[Message]) -> list[int]:
    return [one._offset for one in messages]
