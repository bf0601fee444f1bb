"""A task with order per key in the simulation: the real engine over a range of the parking lot, then a range of its queue."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final

from ordered_source.columns import LotPlan
from ordered_source.listener.settled import NO_PROGRESS, Settled
from orderedmq.errors import DataLossError, StoreError
from orderedmq.listening.engine import (
    Batch,
    CheckLock,
    Consume,
    Done,
    Message,
    Outcome,
    Park,
    Pull,
    Suspend,
    Wait,
    WriteLetter,
)
from orderedmq.listening.key_engine import KeyEngine, OrderPerKey
from orderedmq.listening.listener import ALL, Answer, ConsumeOrderlyContext, ConsumeOrderlyStatus
from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.ownership.lock import LockToken
from orderedmq.parking import AT_ONCE, DROPPED, HELD, Lot, Parking, Ticket, delay, lot_token
from tests.engine_messages import FULL, message
from tests.sim.key_judge import KeyJudge
from tests.sim.lots import Head, Lots
from tests.sim.process import Killed, Network
from tests.sim.sink import Run, Sink
from tests.sim.task import Task
from tests.sim.world import TICK, World

_FAILURES: Final = (ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT, None)


@dataclass
class Worker:
    """The process of one attempt of a task, which makes calls over the simulated network."""

    name: str
    dead: bool = False
    renewing: bool = False

    def kill(self) -> None:
        self.dead = True


@dataclass
class Listener:
    """The listener of all queries. It says which message of a batch failed if the batch's last offset is even.

    - ``poison``: the share of messages that fail several times.
    - ``deadly``: the share of poisoned messages that always fail.
    - ``flaky``: the share of calls that fail although the messages are good.
    """

    random: Random
    poison: float
    deadly: float
    flaky: float
    #: True makes the listener accept every message.
    calm: bool = False

    def __post_init__(self) -> None:
        self.failures: dict[tuple[MessageQueue, int], int] = {}
        self.calls: dict[tuple[MessageQueue, int], int] = {}

    def call(self, queue: MessageQueue, offsets: Sequence[int]) -> tuple[bool, int]:
        """Count a call for each message. Return whether the listener accepts all of them, and ``ack_index``."""
        good = not self.flaky or self.random.random() >= self.flaky
        for number, offset in enumerate(offsets):
            name = queue, offset
            fails = self.failures.get(name)
            if fails is None:
                poisoned = self.random.random() < self.poison
                fails = self.random.choice((1, 1, 2, 3, 5, 9)) if poisoned else 0
                fails = 1_000_000 if poisoned and self.random.random() < self.deadly else fails
                self.failures[name] = fails
            self.calls[name] = self.calls.get(name, 0) + 1
            if self.calls[name] > fails or self.calm:
                continue
            if good and offsets[-1] % 2 == 0:
                return False, number - 1
            good = False
        return good or self.calm, ALL


@dataclass(frozen=True)
class Keys:
    """The listeners with order per key of a scenario.

    - ``keyless``: some messages have no key.
    - ``orders``: operators give orders.
    - ``keys``: the number of keys of each queue.
    - ``seeks``: operators seek, and keep or drop parked messages.
    """

    settings: OrderPerKey
    #: The maximum number of messages in a lot.
    room: int
    poison: float
    deadly: float
    flaky: float
    keyless: bool
    orders: bool
    keys: int
    seeks: bool

    def key_of(self, queue: MessageQueue, offset: int) -> str | None:
        return None if self.keyless and offset % 4 == 1 else f"{queue.queue_id}.{offset % self.keys}"


@dataclass(frozen=True)
class Around:
    """Objects that all tasks of a world share."""

    network: Network
    lots: Lots
    judge: KeyJudge
    listener: Listener


class KeyTask(Task):
    """Runs a listener over the planned range of the lot and then of the queue. Several calls can run at the same time."""

    def __init__(
        self,
        world: World,
        sink: Sink,
        run: Run,
        span: OffsetRange,
        token: LockToken,
        keys: Keys,
        lot: OffsetRange,
        around: Around,
        *,
        staged: bool,
    ) -> None:
        super().__init__(world, sink, run, span, token, staged=staged)
        self.settings = keys.settings
        self.room = keys.room
        self.lot, self.lot_token = lot, lot_token(token)
        self.around = around
        self.batch = run.query, run.batch
        self.busy = False
        self.attempts = 0
        self.engine: KeyEngine | None = None

    def step(self, random: Random) -> None:
        if self.busy:
            # The task waits for the broker while other tasks and queries step.
            return
        self.busy = True
        try:
            super().step(random)
        except Killed:
            self.retry()
        except DataLossError:
            # The attempt could not read its part of the lot, so it has not begun.
            self.retry()
            raise
        finally:
            self.busy = False

    def reads(self) -> str:
        return f"{super().reads()}+{self.lot.begin}-{self.lot.end}"

    def unpublished(self) -> bool:
        return super().unpublished() or self.lot.end > self.world.group_offsets.get(self.lot_token.queue, 0)

    def register(self) -> None:
        super().register()
        planned = OffsetRange(self.lot.begin, self.lot.end)
        if planned.messages:
            self.sink.register(self.run, planned, self.lot_token)

    def retry(self) -> None:
        super().retry()
        if self.engine is not None:
            self.worker.kill()
        self.engine = None

    def start(self) -> None:
        """Begin an attempt by reading the lot to its end."""
        lots, lot, reached = self.around.lots, self.lot, self.world.reached
        parked = self.lot_token.queue
        self.position = self.span.begin
        self.attempts += 1
        self.worker = Worker(f"{self.run.query}.{self.token.queue.queue_id}")
        #: The broker's time in ms.
        self.began = self.world.milliseconds()
        self.heads: dict[object, Head] = lots.lanes(parked, lot.begin, lot.end)
        self.expected = {one for head in self.heads.values() for one in head.offsets} | set(
            range(self.span.begin, self.span.end)
        )
        #: The status of each decided offset, and the offsets that were passed to the listener.
        self.outcomes: dict[int, str] = {}
        self.seen: set[int] = set()
        self.called: set[int] = set()
        #: Messages that failed alone, or that the listener has named by ack_index.
        self.failed: set[int] = set()
        #: The last message of each key that this attempt has decided.
        self.passed: dict[object, int] = {}
        self.from_lot: set[int] = set()
        self.in_flight: list[Batch] = []
        self.around.judge.began(self)
        planned, behind = Lot(lot.begin), Lot(lot.end)
        if lot.begin < lot.end:
            planned.add(lots.pull(parked, lot.begin, lot.end))
        end = lots.end(parked)
        if lot.end < end:
            behind.add(lots.pull(parked, lot.end, end))
        self.settled = Settled(
            behind,
            LotPlan(self.span.begin, lot.begin, lot.end, self.room),
            set(self.world.letters.get(self.token.queue, ())),
            self.world.progress.get(self.token.queue, NO_PROGRESS),
        )
        view = self.settled.view()
        self.behind = set(view.parked_offsets)
        reached["repeated after parking"] += bool(view.parked_in_range)
        reached["order carried out"] += planned.commanded
        if self.world.trace is not None:
            places = [(one.place, one.offset if one.ticket else one.command) for one in lots.entries.get(parked, ())]
            self.world.note(
                f"{self}: attempt {self.attempts}, waiting {view.parked_before}, attempted {view.parked_in_range}, the lot {places}"
            )
        messages = self._planned(planned)
        last: dict[object, int] = {}
        for one in messages:
            lane = self.around.judge.lane(self.token.queue, one._offset)
            reached["lot in another order"] += one._offset < last.get(lane, -1)
            last[lane] = one._offset
        messages = self._unsettled(messages, [one._rows[1] for one in messages])
        self.engine = KeyEngine(
            self.token.queue, self.settings, self.world.now, view._replace(planned=messages), self.span.begin
        )

    def _planned(self, lot: Lot) -> list[Message]:
        out: list[Message] = []
        for one in self.around.lots.entries.get(self.lot_token.queue, [])[self.lot.begin : self.lot.end]:
            if one.ticket is None:
                continue
            ticket = lot.ticket(one.place, one.lane, one.ticket)
            if ticket is None:
                self.world.reached["second copy skipped"] += 1
                continue
            self.from_lot.add(one.offset)
            if ticket.due == DROPPED:
                if one.offset not in self.behind:
                    self._decide(one.offset, "DROPPED")
                    self.world.ledger.drops(self.token, [one.offset])
                    self.world.reached["dropped"] += 1
                continue
            rows = self.lot_token.queue, lot.place(one.offset), ticket
            due, held = ticket.is_due(self.began), ticket.due == HELD
            out.append(message(one.offset, one.key, rows, attempts=ticket.attempts, error=ticket.error, due=due, held=held))
        return out

    def half_done(self) -> bool:
        return not self.done and self.engine is not None and "PARKED" in self.outcomes.values()

    def lies(self, offset: int) -> bool:
        """Whether a message was in the lot, outside the planned range, when the attempt began."""
        return offset in self.behind

    def work(self, random: Random) -> None:
        for _ in range(random.randint(1, 10)):
            assert self.engine is not None
            now = self.world.now
            self.record(random, self.engine, self.settled)
            if self.in_flight and random.random() < 0.4:
                self._finish(random)
                continue
            match self.engine.next(now):
                case CheckLock():
                    self.engine.lock(self.world.check(self.token), now)
                case Pull():
                    self._pull(random)
                case Consume(batch):
                    offsets = [one._offset for one in batch.messages]
                    self.seen.update(offsets)
                    self.around.judge.called(self, offsets)
                    self.world.listening(self.token, offsets)
                    self.in_flight.append(batch)
                    if len(self.in_flight) > self.settings.concurrency:
                        self.world.fail(f"{self}: {len(self.in_flight)} calls at the same time")
                case WriteLetter(letter):
                    self._dead_letter(letter)
                case Park(messages):
                    self._park(messages)
                case Wait():
                    self._finish(random)
                case Suspend(seconds):
                    if random.random() < 0.5:
                        self.world.advance(-(-seconds // TICK) * TICK)
                    return
                case Done():
                    self._done()
                    return

    def _pull(self, random: Random) -> None:
        assert self.engine is not None
        end = min(self.span.end, self.position + random.randint(1, 6))
        if self.position == end:
            self.engine.close()
        else:
            keys = self.around.lots.key_of
            self.engine.add(
                self._unsettled(
                    [
                        Message(offset, keys(self.token.queue, offset), (self.token.queue, offset, None))
                        for offset in range(self.position, end)
                    ]
                )
            )
            self.position = end

    def _unsettled(self, messages: list[Message], places: Sequence[int] | None = None) -> list[Message]:
        """Return the messages that no earlier attempt has settled. Record those that it has decided."""
        left, settled = self.settled.divide(messages, places)
        self.skips(settled)
        for one in settled:
            if one.status != "PARKED":
                if one.status == "SUCCESS":
                    self.around.judge.skipped(self, one.begin)
                self.seen.add(one.begin)
                self._decide(one.begin, one.status, earlier=True)
        return left

    def _finish(self, random: Random) -> None:
        """Let one of the calls return."""
        assert self.engine is not None
        batch = self.in_flight.pop(random.randrange(len(self.in_flight)))
        offsets = [one._offset for one in batch.messages]
        good, ack_index = self.around.listener.call(self.token.queue, offsets)
        self.around.judge.returned(self, offsets, ack_index, accepted=good)
        status = ConsumeOrderlyStatus.SUCCESS if good else random.choice(_FAILURES)
        if self.world.trace is not None:
            self.world.note(f"{self}: {offsets}: {'accepted' if good else f'fails with ack_index {ack_index}'}")
        answer = Answer(status, None if good else "it failed", ConsumeOrderlyContext(self.token.queue, ack_index=ack_index))
        self._note(self.engine.consumed(batch, answer, self.world.now))

    def _call(self, effect: Any, *args: Any) -> Any:
        """Call the broker. Return None if that failed."""
        network, worker = self.around.network, self.worker

        def unless_gone(*given: Any) -> Any:
            # A killed process changes nothing later, because its store transaction ended with it.
            return None if worker.dead else effect(*given)

        try:
            answer = network.call(worker, effect.__name__, unless_gone, *args)
            # Lose more answers of writes than a real network does, because parking must recognise a repeated write by its
            # identity.
            return None if network.random.random() < 2 * network.mishap else answer
        except StoreError:
            return None

    def _dead_letter(self, message: Message) -> None:
        assert self.engine is not None
        self.around.judge.given_up(self, [message._offset])
        if not self._call(self.dead_letter, message._offset):
            self.engine.refused(FULL, self.world.now)
            return
        self.world.reached["dead letter from the lot"] += message._offset in self.from_lot
        self._note(self.engine.dead_lettered())

    def dead_letter(self, offset: int) -> bool:
        self.world.dead_letter(self.token, [offset])
        return True

    def _park(self, messages: Sequence[Message]) -> None:
        assert self.engine is not None
        self.around.judge.given_up(self, [one._offset for one in messages if one._again])
        parked = self._call(self.around.lots.park, self.token, [self._put(one) for one in messages])
        if self.world.trace is not None:
            parkings = " ".join(f"{one._offset} from {self._put(one).place}" for one in messages)
            self.world.note(f"{self} parks {parkings}: {parked}")
        if parked is None:
            self.engine.refused(FULL, self.world.now)
            return
        for one, lies in zip(messages, parked, strict=True):
            self._count(one, lies)
        self._note(self.engine.was_parked(parked))

    def _put(self, message: Message) -> Parking:
        source, at, ticket = message._rows
        known: Ticket = ticket or Ticket(message._offset, 0, 0, AT_ONCE)
        due, parkings = known.due, known.parkings
        if message._held:
            due = HELD
        elif message._again:
            due, parkings = self.world.milliseconds() + 1000 * delay(parkings), parkings + 1
        return Parking(
            source, at, replace(known, attempts=message._attempts, parkings=parkings, due=due, error=message._error or "")
        )

    def _count(self, message: Message, lies: bool) -> None:
        reached, ticket = self.world.reached, message._rows[2]
        reached["parked"] += lies and message._again
        reached["diverted"] += lies and ticket is None and not message._attempts
        reached["held"] += lies and message._held
        reached["moved not due"] += lies and ticket is not None and not message._due and not message._held

    def _note(self, outcomes: Iterable[Outcome]) -> None:
        for one in outcomes:
            self.world.reached["passed over"] += one.status == "REPEATED"
            if one.status in ("PARKED", "REPEATED"):
                self.outcomes[one.begin] = one.status
                # A message that is passed over was decided in an earlier attempt.
                change = self.world.ledger.accepts if one.status == "REPEATED" else self.world.ledger.undecided
                change(self.token, [one.begin])
                continue
            self._decide(one.begin, one.status)
            if one.status == "SUCCESS":
                self.world.ledger.accepts(self.token, [one.begin])
            self.world.reached["came back and succeeded"] += one.status == "SUCCESS" and one.begin in self.from_lot

    def _decide(self, offset: int, status: str, *, earlier: bool = False) -> None:
        if offset in self.outcomes:
            self.world.fail(f"{self}: {offset} is {self.outcomes[offset]} and {status}")
        self.outcomes[offset] = status
        self.around.judge.decided(self, offset, status, earlier=earlier)

    def _done(self) -> None:
        assert self.engine is not None
        self.world.reached["full lot fallback"] += any("is full" in text for text in self.engine.warnings)
        self.around.judge.finished(self)
        if not self.staged:
            self.world.ledger.out(self.run.query, self.token, self.span)
            self.world.ledger.out(self.run.query, self.lot_token, OffsetRange(self.lot.begin, self.lot.end))
        self.done = True

    def invariants(self) -> None:
        """Everything else is checked when it happens."""
        if self.engine is not None:
            self.keeps_progress(self.engine.progress, self.outcomes.keys() | self.behind)
