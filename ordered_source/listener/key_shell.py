"""The shell of listeners that park what fails: ``consume_orderly(order="key")`` and ``consume_concurrently``.

Rules: a task has the rows of one queue's parking lot, if it is planned, and then those of the queue. The engine, the broker and
the rows for Spark stay in the task's own thread; only calls of the listener may be in others (`calls`). More rows are asked of
Spark only when the engine wants them. Delivery is at-least-once per micro-batch. A repeat must honour what an earlier attempt
has parked, and what it has made dead letters of, so a task reads the parking lot to its end and asks for dead letters before it
calls a listener.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby, repeat
from typing import Any, Final, Generic, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from ordered_source.columns import TICKET, LotPlace
from ordered_source.listener import tasks
from ordered_source.listener.calls import Calls
from ordered_source.listener.lying import Lying
from ordered_source.listener.messages import Columns, Message
from ordered_source.listener.send_back import SendBack, require_retries, told
from ordered_source.listener.tasks import by_queue, lock_of, put_aside
from ordered_source.listener.tracing import NO_TRACING, Tracing
from ordered_source.read_context import LotPlan, ReadContext, TaskLock
from orderedmq.concise import concise
from orderedmq.conditions import OptionCondition, SchemaCondition
from orderedmq.core import key_order
from orderedmq.core.key_order import Batch, CheckLock, Consume, DeadLetter, Done, Outcome, Park, Pull, Suspend, Wait
from orderedmq.core.parked_rows import Lot
from orderedmq.core.parking import BEHIND, DELAY_LEVELS, DROPPED, HELD, Put, Ticket, companion, delay
from orderedmq.core.parking_engine import ParkingEngine
from orderedmq.endpoint import Credentials, TlsOptions
from orderedmq.errors import DataLossError, GroupError, LockError, OptionError, OrderedMQError, SchemaError
from orderedmq.model import MessageQueue
from orderedmq.schema import TIMESTAMP_TYPE

log = logging.getLogger("orderedmq")

#: Columns of the outcomes, one row per decided or parked message.
OUTCOMES: Final = f"{tasks.OUTCOMES}, sharding_key string, due_timestamp timestamp"
_SCHEMA: Final = tasks.OUTCOME_SCHEMA.append(pa.field("sharding_key", pa.string())).append(
    pa.field("due_timestamp", TIMESTAMP_TYPE)
)
#: Messages that are given to the engine at once, and outcomes that are given to Spark at once.
PUT_TOGETHER: Final = 4096
GIVE_TOGETHER: Final = 4096
#: The room of a queue without a parking lot, whose broker takes back whatever fails.
NO_BOUND: Final = 2**62


#: What a call returned: the listener's answer, its error, and the context as the listener left it.
Answer = tuple[Any, str | None, Any]
Engine = TypeVar("Engine", bound=ParkingEngine)


class Kind(ABC, Generic[Engine]):
    """A kind of listener: its engine and its calls. ``name`` is the function that the user called.

    ``alone``: whether each message is parked alone, so that newer ones of its key do not wait for it. Such a listener can do
    with a retry topic in place of a parking lot: ``max_reconsume_times`` is for the broker then.
    """

    def __init__(
        self,
        name: str,
        listener: Any,
        concurrency: int,
        credentials: Credentials | None,
        tls: TlsOptions | None,
        *,
        alone: bool,
        max_reconsume_times: int = 0,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        self.name, self.listener, self.concurrency, self.alone, self.tracing = name, listener, concurrency, alone, tracing
        self.max_reconsume_times = max_reconsume_times
        self.credentials, self.tls = credentials, tls

    @abstractmethod
    def engine(self, queue: MessageQueue, now: float, room: int, lot: Sequence[key_order.Message], lying: Lying) -> Engine:
        """Return the engine of a task's range, for a parking lot with that room."""

    @abstractmethod
    def call(self, listener: Any, messages: Sequence[Message], queue: MessageQueue) -> Answer:
        """Call the listener and its hooks. Other threads may call it."""

    @abstractmethod
    def consumed(self, engine: Engine, batch: Batch, answer: Answer, now: float) -> list[Outcome]:
        """Tell the engine what `call` returned. Return what is decided."""


class Piece(NamedTuple):
    """Rows of one queue under one lock. ``places``: where they lie in the parking lot; None for rows of the queue."""

    queue: MessageQueue
    context: ReadContext | None
    rows: pa.RecordBatch
    places: Sequence[LotPlace] | None


class Rows(NamedTuple):
    """Rows that messages come from, each by its number (`key_order.Message`).

    ``counted``: the failed calls that their column reconsume_times has. ``places``: where they lie in the parking lot. Both are
    empty if there is nothing to tell.
    """

    columns: Columns
    counted: Sequence[int]
    places: Sequence[LotPlace]

    def retries(self, one: key_order.Message) -> int:
        """Return what is added to a message's ``reconsume_times``, so that it is the number of its failed calls."""
        return one.attempts - (self.counted[one.number] if self.counted else 0)


def run(df: DataFrame, kind: Kind[Any]) -> DataFrame:
    """Return the outcomes of a listener over the DataFrame's rows."""

    @concise
    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return consume(batches, kind)

    return df.mapInArrow(run, OUTCOMES)


def consume(
    batches: Iterable[pa.RecordBatch], kind: Kind[Any], wall: Callable[[], float] = time.time
) -> Iterator[pa.RecordBatch]:
    """Run one task: feed the rows to the listener, one queue after another, and yield the outcomes.

    ``wall`` is the clock of due times, in seconds since 1970.
    """
    pieces = chain.from_iterable(map(_pieces, batches))
    for (queue, context), own in groupby(pieces, lambda one: (one.queue, one.context)):
        lock = lock_of(queue, context, kind.credentials, kind.tls, kind.name, lot=True, retry_topic=kind.alone)
        yield from _Task(queue, lock, kind, wall).run(own)


class _Task:
    """Runs the engine of one queue with the listener, the broker, the clocks and the log."""

    def __init__(self, queue: MessageQueue, lock: TaskLock, kind: Kind[Any], wall: Callable[[], float]) -> None:
        self.queue, self._kind, self._wall = queue, kind, wall
        self._broker, self._token = lock.broker, lock.token
        #: Where what fails is sent back to; None: it is parked.
        self._back = None if lock.lot is not None else SendBack(lock.broker, lock.token, kind.max_reconsume_times)
        self._plan = lock.lot or LotPlan(0, 0, 0, NO_BOUND)
        if self._back is None:
            self._parked = companion(lock.token).queue
        self._listener = kind.tracing.listener(kind.listener, lock)
        self._out: list[Outcome] = []
        self._warned = 0

    def run(self, pieces: Iterator[Piece]) -> Iterator[pa.RecordBatch]:
        lot, rest = self._lot(pieces)
        if self._back is None:
            lying = Lying.read(self._broker, self._token, self._parked, self._plan, [one.offset for one in lot])
        else:
            lying = Lying(Lot(0), self._plan)
        lot, settled = lying.divide(lot)
        self._out += settled
        clock, kind = time.monotonic, self._kind
        engine = kind.engine(self.queue, clock(), self._plan.room, lot, lying)
        feed = self._feed(rest, lying)
        threads = Calls(self._call, kind.concurrency) if kind.concurrency > 1 else None
        try:
            while True:
                action = engine.next(clock())
                done = type(action) is Done
                match action:
                    case Consume(batch):
                        if threads is None:
                            self._out += kind.consumed(engine, batch, self._call(batch), clock())
                        else:
                            threads.start(batch)
                    case Pull():
                        messages = next(feed, None)
                        if messages is None:
                            engine.close()
                        else:
                            engine.put(messages)
                    case Wait(seconds):
                        assert threads is not None
                        self._answered(engine, threads, seconds)
                    case _:
                        self._at_broker(engine, action, threads)
                while threads is not None and threads.answered:
                    self._answered(engine, threads, None)
                if self._warned < len(engine.warnings):
                    self._warn(engine)
                if self._out and (done or len(self._out) >= GIVE_TOGETHER):
                    outcomes, self._out = self._out, []
                    yield self._table(outcomes)
                if done:
                    return
        finally:
            # Also if Spark closes the task, or ends the process: no call starts after this.
            if threads is not None:
                threads.end()

    # -- calls

    def _call(self, batch: Batch) -> Answer:
        messages = []
        for one in batch.messages:
            rows: Rows = one.row
            messages.append(Message(rows.columns, one.number, rows.retries(one) if one.attempts else 0))
        return self._kind.call(self._listener, messages, self.queue)

    def _answered(self, engine: ParkingEngine, threads: Calls[Batch, Answer], timeout: float | None) -> None:
        returned = threads.answer(timeout)
        if returned is not None:
            batch, answer = returned
            self._out += self._kind.consumed(engine, batch, answer, time.monotonic())

    # -- the broker

    def _at_broker(self, engine: ParkingEngine, action: key_order.Action, threads: Calls[Batch, Answer] | None) -> None:
        clock = time.monotonic
        try:
            match action:
                case CheckLock():
                    engine.lock(self._broker.groups.check(self._token), clock())
                case Park(messages):
                    self._park(engine, messages)
                case DeadLetter(message):
                    failed = self._put_aside(message) if self._back is None else self._back.put_aside(message)
                    self._out += engine.dead_lettered(failed is None, failed, clock())
                case Suspend(seconds):
                    time.sleep(seconds)
        except LockError:
            # No new call starts, and those under way are waited for.
            engine.lock(False, clock())
            while threads is not None and isinstance(waiting := _next(engine), Wait):
                self._answered(engine, threads, waiting.seconds)
            raise

    def _put_aside(self, message: key_order.Message) -> str | None:
        rows: Rows = message.row
        letter = Message(rows.columns, message.number, 0)
        return put_aside(self._broker, self._token, [letter], message.error, rows.retries(message))

    def _park(self, engine: ParkingEngine, messages: Sequence[key_order.Message]) -> None:
        if self._back is not None:
            error = self._back.send(messages)
            sent = None if error is not None else [True] * len(messages)
            self._out += told(engine.was_parked(sent, error, time.monotonic()))
            return
        now = int(self._wall() * 1000)
        puts = [self._put(one, now) for one in messages]
        try:
            parked = self._broker.groups.park(self._token, puts)
        except (LockError, DataLossError, GroupError):
            # Waiting does not help.
            raise
        except OrderedMQError as error:
            engine.was_parked(None, str(error), time.monotonic())
            return
        for outcome, put in zip(engine.was_parked(parked, None, time.monotonic()), puts, strict=True):
            due = put.ticket.due
            self._out.append(outcome._replace(due=due) if outcome.status == "PARKED" and due > BEHIND else outcome)

    def _put(self, message: key_order.Message, now: int) -> Put:
        rows: Rows = message.row
        place = rows.places[message.number] if rows.places else None
        due, puts = (BEHIND, 0) if place is None else (place.due, place.puts)
        if message.again:
            seconds = DELAY_LEVELS[message.level - 1] if message.level else delay(puts)
            due, puts = now + seconds * 1000, puts + 1
        if message.held:
            due = HELD
        ticket = Ticket(message.offset, message.attempts, puts, due, message.error or "", alone=self._kind.alone)
        return Put(self.queue, message.offset, ticket) if place is None else Put(self._parked, place.place, ticket)

    # -- rows

    def _lot(self, pieces: Iterator[Piece]) -> tuple[list[key_order.Message], Iterator[Piece]]:
        """Return the messages of the parking lot, which come first, and the other rows."""
        now = int(self._wall() * 1000)
        lot: list[key_order.Message] = []
        for piece in pieces:
            if piece.places is None:
                return lot, chain([piece], pieces)
            columns = Columns(piece.rows)
            counted = [place.attempts for place in piece.places] if "reconsume_times" in columns.names else ()
            rows = Rows(columns, counted, piece.places)
            every = zip(columns.get("queue_offset"), columns.keys(), piece.places, strict=True)
            for number, (offset, key, place) in enumerate(every):
                error = place.error or None
                if place.due == DROPPED:
                    self._out.append(Outcome(offset, key, "DROPPED", place.attempts, 0, 0.0, error))
                    continue
                due = Ticket(offset, place.attempts, place.puts, place.due).is_due(now)
                known = {"attempts": place.attempts, "parked": place.puts, "held": place.due == HELD, "error": error}
                lot.append(key_order.Message(offset, key, rows, number, due=due, **known))
        return lot, iter(())

    def _feed(self, pieces: Iterator[Piece], lying: Lying) -> Iterator[list[key_order.Message]]:
        """Yield the messages of the queue, some at a time."""
        for piece in pieces:
            if piece.places is not None:
                raise OptionError(
                    OptionCondition.UNSUPPORTED,
                    f"rows of the parking lot of queue {self.queue} came behind others: a key would be overtaken; give the listener the "
                    "source's rows in the order in which it reads them, neither sorted nor shuffled",
                )
            for begin in range(0, piece.rows.num_rows, PUT_TOGETHER):
                columns = Columns(piece.rows.slice(begin, PUT_TOGETHER))
                offsets, keys = columns.get("queue_offset"), columns.keys()
                if self._back is not None:
                    require_retries(columns.names, self.queue)
                counts = [count or 0 for count in columns.get("reconsume_times")] if "reconsume_times" in columns.names else []
                rows = Rows(columns, counts if any(counts) else (), ())
                messages = list(map(key_order.Message, offsets, keys, repeat(rows), range(len(offsets))))
                for message, count in zip(messages, rows.counted, strict=False):
                    message.attempts = count
                messages, settled = lying.divide(messages)
                self._out += settled
                yield messages

    # -- what is told

    def _warn(self, engine: ParkingEngine) -> None:
        for text in engine.warnings[self._warned :]:
            log.warning("%s", text)
        self._warned = len(engine.warnings)

    def _table(self, outcomes: Sequence[Outcome]) -> pa.RecordBatch:
        offsets, keys, statuses, attempts, _, seconds, errors, dues = zip(*outcomes, strict=True)
        count = len(outcomes)
        begin = pa.array(offsets, pa.int64())
        same = {
            "topic": self.queue.topic,
            "broker_name": self.queue.broker_name,
            "queue_id": self.queue.queue_id,
            **({"status": statuses[0]} if statuses.count(statuses[0]) == count else {}),
            **({"error": None} if errors.count(None) == count else {}),
            **({"due_timestamp": None} if dues.count(None) == count else {}),
        }
        arrays = {
            "begin_offset": begin,
            "end_offset": pc.add(begin, 1),
            "status": statuses,
            "attempts": attempts,
            "duration": seconds,
            "error": errors,
            "sharding_key": keys,
            "due_timestamp": [None if due is None else due * 1000 for due in dues] if "due_timestamp" not in same else (),
        }
        return pa.RecordBatch.from_arrays(
            [
                pa.repeat(pa.scalar(same[field.name], field.type), count)
                if field.name in same
                else pa.array(arrays[field.name], field.type)
                for field in _SCHEMA
            ],
            schema=_SCHEMA,
        )


def _next(engine: ParkingEngine) -> key_order.Action | None:
    """The engine's next action; None if it says that the lock is lost."""
    try:
        return engine.next(time.monotonic())
    except LockError:
        return None


def _pieces(batch: pa.RecordBatch) -> Iterator[Piece]:
    """Split a batch's rows where the queue or the lock changes, and between rows of the parking lot and of the queue.

    Raises SchemaError MISSING_COLUMN for rows that were read with a parking lot and come without their tickets.
    """
    for queue, context, rows in by_queue(batch):
        if TICKET not in rows.schema.names:
            if context is not None and context.lot is not None:
                raise SchemaError(
                    SchemaCondition.MISSING_COLUMN,
                    f"rows of queue {queue} were read with parkingLot=true and have no column {TICKET}, which says of a parked message when "
                    "it is due: do not drop it, or name it in the schema that you read with",
                )
            yield Piece(queue, context, rows, None)
            continue
        tickets, rows = rows.column(TICKET), rows.drop_columns([TICKET])
        runs = pc.run_end_encode(tickets.is_valid())
        begin = 0
        for end, parked in zip(runs.run_ends.to_pylist(), runs.values.to_pylist(), strict=True):
            places = None
            if parked:
                columns = (field.to_pylist() for field in tickets.slice(begin, end - begin).flatten())
                places = list(map(LotPlace, *columns))
            yield Piece(queue, context, rows.slice(begin, end - begin), places)
            begin = end
