"""The Spark task that runs a listener. It gives the rows of a queue to an engine, and carries out the engine's actions.

Rules: a task gets the rows of one queue's parking lot, if the micro-batch reads it, and then the rows of the queue, unless the user
shuffled the rows. Only the task's thread uses the engine, the broker and the rows for Spark. Calls of the listener may run in other
threads (`calls`), or in the thread of an event loop if the listener is async. The task takes more rows from Spark only when the engine
asks for them.

Delivery is at-least-once: when one task of the batch fails, Spark runs the whole batch again, including the listeners of the other tasks.
A repeat must not process messages that an earlier attempt has parked or made dead letters, or that it had accepted before it recorded its
progress. So a task reads the parking lot to its end, and asks for dead letters and the progress, before it calls a listener.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, groupby, repeat
from types import MethodType
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import DataFrame

from ordered_source.columns import TICKET, LotPlace, ReadContext, TaskLock
from ordered_source.listener.calls import Awaiting, Calls, Inline, Threads, function_of
from ordered_source.listener.settled import NO_PROGRESS, Settled
from ordered_source.listener.task_rows import (
    Columns,
    Rows,
    by_queue,
    lock_of,
    naming,
    place_of,
    require_columns,
    run_in_tasks,
    write_letters,
)
from orderedmq.broker import PROGRESS_INTERVAL, Progress
from orderedmq.conditions import OptionCondition, SchemaCondition
from orderedmq.endpoint import Credentials, TlsOptions
from orderedmq.errors import LockError, OptionError, OrderedMQError, SchemaError
from orderedmq.listening.engine import (
    Action,
    Batch,
    CheckLock,
    Consume,
    Done,
    Engine,
    Message,
    Outcome,
    Park,
    Pull,
    Settings,
    Suspend,
    Wait,
    WriteLetter,
)
from orderedmq.listening.listener import Answer, Caller, ConsumeMessageHook, check_hooks, check_listener, is_async, name_of
from orderedmq.model import MAX_OFFSET, MessageQueue, OffsetRange
from orderedmq.parking import AT_ONCE, DEAD_LETTERED, DELAY_LEVELS, DROPPED, GIVEN_BACK, HELD, Parking, Ticket, delay, lot_token
from orderedmq.schema import TIMESTAMP_TYPE
from orderedmq.trace_context import in_spans, require

logger = logging.getLogger("orderedmq")

#: Columns of the outcomes, with one row for each outcome. ``end_offset`` is exclusive, ``duration`` is in seconds.
OUTCOMES: Final = (
    "topic string, broker_name string, queue_id int, begin_offset long, end_offset long, status string, attempts int, duration double, "
    "error string, sharding_key string, due_timestamp timestamp"
)
_SCHEMA: Final = pa.schema(
    [
        ("topic", pa.string()),
        ("broker_name", pa.string()),
        ("queue_id", pa.int32()),
        ("begin_offset", pa.int64()),
        ("end_offset", pa.int64()),
        ("status", pa.string()),
        ("attempts", pa.int32()),
        ("duration", pa.float64()),
        ("error", pa.string()),
        ("sharding_key", pa.string()),
        ("due_timestamp", TIMESTAMP_TYPE),
    ]
)
#: Number of rows whose columns are converted to Python values together.
ROWS_TOGETHER: Final = 4096
#: What needs the package opentelemetry-api and the messages' properties, as errors name it.
_TRACED: Final = "a listener with trace_context=True"
#: Number of outcomes that are given to Spark together.
GIVE_TOGETHER: Final = 4096


@dataclass(frozen=True)
class Consumer:
    """A listener with everything that its tasks need. ``credentials`` and ``tls``: see `consume_orderly`.

    Raises OptionError INVALID if the listener cannot be called, or a hook is async.
    """

    listener: Any
    settings: Settings
    hooks: Sequence[ConsumeMessageHook] = ()
    credentials: Credentials | None = None
    tls: TlsOptions | None = None
    trace_context: bool = False
    #: The number of the listener among those of its name (`numbered`).
    number: int = 0

    def __post_init__(self) -> None:
        check_listener(self.listener)
        check_hooks(self.hooks)

    @property
    def name(self) -> str:
        """The name under which the listener's progress is recorded."""
        return f"{self.settings.name} {name_of(self.listener)} {self.number}"


#: The listeners of this driver, by name.
_NAMED: Final[defaultdict[str, list[Callable[[], Any]]]] = defaultdict(list)
_NAMING: Final = threading.Lock()


def numbered(consumer: Consumer) -> Consumer:
    """Return the consumer with a number that tells its listener apart from others of the same name, such as other lambdas.

    Two listeners of one query may get different rows of a queue, so neither may continue at the other's progress. When the program is
    started again, it makes its listeners in the same order, so that they get the same numbers.
    """
    listener = consumer.listener
    # Each access to a method makes another object.
    owner = listener.__self__ if isinstance(listener, MethodType) else listener
    with _NAMING:
        named = _NAMED[consumer.name]
        for number, other in enumerate(named):
            if other() is owner:
                return replace(consumer, number=number)
        try:
            named.append(weakref.ref(owner))
        except TypeError:
            named.append(lambda: owner)
        return replace(consumer, number=len(named) - 1)


class QueueRows(NamedTuple):
    """Rows of one queue under one lock. ``tickets``: their tickets in the parking lot, or None for rows of the queue itself."""

    queue: MessageQueue
    context: ReadContext | None
    rows: pa.RecordBatch
    tickets: Sequence[LotPlace] | None


def run(df: DataFrame, consumer: Consumer) -> DataFrame:
    """Return the outcomes of running a listener over the DataFrame's rows. Raises the errors of `run_in_tasks`.

    Also raises OptionError MISSING and SchemaError MISSING_COLUMN without what the option trace_context needs.
    """
    if consumer.trace_context:
        require(_TRACED)
        require_columns(df, ("properties",), _TRACED, "Read with includeProperties=true")
    unique = numbered(consumer)
    return run_in_tasks(df, lambda batches: consume(batches, unique), OUTCOMES, consumer.settings.name)


def consume(
    batches: Iterable[pa.RecordBatch], consumer: Consumer, wall: Callable[[], float] = time.time
) -> Iterator[pa.RecordBatch]:
    """Run one task: give the rows to the listener, one queue after another, and yield the outcomes.

    ``wall`` is the clock for due times, in seconds since 1970.
    """
    settings = consumer.settings
    pieces = chain.from_iterable(map(_pieces, batches))
    # The objects that the process has already would make up most of each full run of the cyclic garbage collector.
    gc.freeze()
    try:
        for (queue, context), own in groupby(pieces, lambda one: (one.queue, one.context)):
            lock = lock_of(queue, context, consumer.credentials, consumer.tls, settings.name, parks=settings.parks)
            # After a shuffle or from a cache, a task may get only some of the queue's rows, so its progress is not that of the queue.
            task = TaskContext.get()
            is_whole = context is not None and context.attempt == (None if task is None else task.taskAttemptId())
            yield from _Task(queue, lock, consumer, wall, is_whole=is_whole).run(own)
    finally:
        gc.unfreeze()


class _Task:
    """Runs the engine of one queue."""

    def __init__(
        self, queue: MessageQueue, lock: TaskLock, consumer: Consumer, wall: Callable[[], float], *, is_whole: bool
    ) -> None:
        self.queue, self._wall, self._name, self._is_whole = queue, wall, consumer.name, is_whole
        self._settings = settings = consumer.settings
        self._broker, self._token, self._plan = lock
        listener = function_of(consumer.listener, in_spans(lock.token.group) if consumer.trace_context else None)
        self._caller = Caller(listener, consumer.hooks, logger.warning, settings.statuses)
        self._out: list[Outcome] = []
        self._warned = 0
        #: When the task's progress is recorded next, and at its end only after this time (monotonic seconds).
        self._record_due = self._record_from = time.monotonic() + PROGRESS_INTERVAL
        #: What is recorded, or would be if the task had recorded what it found at its beginning.
        self._recorded: Progress | None = None

    def run(self, pieces: Iterator[QueueRows]) -> Iterator[pa.RecordBatch]:
        planned, rest = self._planned(pieces)
        settled, begin, rest = self._settled([message._offset for message in planned], rest)
        planned, decided = settled.divide(
            planned, [each.place for message in planned if (each := place_of(message)) is not None]
        )
        self._out += decided
        clock = time.monotonic
        engine = self._settings.engine(self.queue, clock(), settled.view(planned), begin)
        self._recorded = settled.advance(engine.progress)
        feed = self._feed(rest, settled)
        calls = self._calls()
        try:
            while True:
                now = clock()
                if now >= self._record_due:
                    self._at_broker(engine, None, calls, settled)
                action = engine.next(now)
                is_done = type(action) is Done
                match action:
                    case Consume(batch):
                        calls.start(batch)
                    case Pull():
                        messages = next(feed, None)
                        if messages is None:
                            engine.close()
                        else:
                            engine.add(messages)
                    case Wait(seconds):
                        self._answered(engine, calls, None if seconds is None else min(seconds, self._record_due - now))
                    case Done() if now >= self._record_from:
                        self._at_broker(engine, None, calls, settled)
                    case _:
                        self._at_broker(engine, action, calls, settled)
                while calls.answered:
                    self._answered(engine, calls, None)
                if self._warned < len(engine.warnings):
                    self._warn(engine)
                if self._out and (is_done or len(self._out) >= GIVE_TOGETHER):
                    outcomes, self._out = self._out, []
                    yield self._table(outcomes)
                if is_done:
                    return
        except LockError:
            raise
        except (Exception, GeneratorExit):
            # Whoever repeats the task continues from here.
            with contextlib.suppress(OrderedMQError):
                self._record(engine, settled)
            raise
        finally:
            # No call starts after this, even if Spark closes the task or ends the process.
            calls.end()

    # -- calls

    def _calls(self) -> Calls[Batch, Answer]:
        """Return the object that calls the listener. With OrderPerQueue, an async listener also gets only one call at a time."""
        if is_async(self._caller.listener):
            return Awaiting(self._call_async)
        many = self._settings.concurrency
        return Threads(self._call, many) if many > 1 else Inline(self._call)

    def _call(self, batch: Batch) -> Answer:
        # Pass a copy, because a listener may remove messages from its list, but the engine still needs them.
        return self._caller.call(list(batch.messages), self._settings.context(self.queue))

    def _call_async(self, batch: Batch) -> Coroutine[Any, Any, Answer]:
        return self._caller.call_async(list(batch.messages), self._settings.context(self.queue))

    def _answered(self, engine: Engine, calls: Calls[Batch, Answer], timeout: float | None) -> None:
        answers = calls.answers(timeout)
        now = time.monotonic()
        for batch, answer in answers:
            self._out += engine.consumed(batch, answer, now)

    # -- the broker

    def _at_broker(self, engine: Engine, action: Action | None, calls: Calls[Batch, Answer], settled: Settled) -> None:
        """Carry out an action, or record the progress if it is None."""
        clock = time.monotonic
        try:
            match action:
                case CheckLock():
                    is_held = self._broker.groups.check(self._token)
                    engine.lock(is_held, clock())
                    if not is_held:
                        calls.cancel()
                case Park() | WriteLetter():
                    self._write(engine, action)
                case Suspend(seconds):
                    time.sleep(seconds)
                case None:
                    self._record(engine, settled)
        except LockError:
            # No new call starts. Running calls are cancelled if they are async, and the task waits until they have ended.
            engine.lock(False, clock())
            calls.cancel()
            while isinstance(waiting := _next(engine), Wait):
                self._answered(engine, calls, waiting.seconds)
            raise

    def _record(self, engine: Engine, settled: Settled) -> None:
        """Record how far the listener is. Raises LockError LOST. After another error, a repeat gets more messages again."""
        self._record_due = time.monotonic() + PROGRESS_INTERVAL
        progress = settled.advance(engine.progress) if self._is_whole else None
        if progress is None or progress == self._recorded:
            return
        try:
            self._broker.groups.record_progress(self._token, progress, self._name)
            self._recorded = progress
        except LockError:
            raise
        except OrderedMQError as error:
            logger.warning("the progress of queue %s up to %d is not recorded: %s", self.queue, progress.offset, error)

    def _write(self, engine: Engine, action: Park | WriteLetter) -> None:
        """Park messages, or make one a dead letter. Raises LockError, and the errors of `Engine.refused`."""
        try:
            match action:
                case Park(messages):
                    self._out += self._park(engine, messages)
                case WriteLetter(message):
                    write_letters(self._broker, self._token, [message], [message._error])
                    self._out += engine.dead_lettered()
        except LockError:
            raise
        except OrderedMQError as error:
            engine.refused(error, time.monotonic())

    def _park(self, engine: Engine, messages: Sequence[Message]) -> list[Outcome]:
        now = int(self._wall() * 1000)
        parkings = [self._parking(message, now) for message in messages]
        with naming(self.queue, messages, "be parked"):
            parked = self._broker.groups.park(self._token, parkings)
        return [
            outcome._replace(due=parking.ticket.due) if outcome.status == "PARKED" and parking.ticket.due > AT_ONCE else outcome
            for outcome, parking in zip(engine.was_parked(parked), parkings, strict=True)
        ]

    def _parking(self, message: Message, now: int) -> Parking:
        place = place_of(message)
        due, parkings = (AT_ONCE, 0) if place is None else (place.due, place.parkings)
        if message._again:
            seconds = DELAY_LEVELS[message._level - 1] if message._level else delay(parkings)
            due, parkings = now + seconds * 1000, parkings + 1
        if message._held:
            due = HELD
        ticket = Ticket(message._offset, message._attempts, parkings, due, message._error or "", alone=self._settings.alone)
        if place is None:
            return Parking(self.queue, message._offset, ticket)
        return Parking(lot_token(self._token).queue, place.place, ticket)

    # -- rows

    def _planned(self, pieces: Iterator[QueueRows]) -> tuple[list[Message], Iterator[QueueRows]]:
        """Return the messages of the parking lot, whose rows come first, and the other rows."""
        now = int(self._wall() * 1000)
        planned: list[Message] = []
        for piece in pieces:
            if piece.tickets is None:
                return planned, chain([piece], pieces)
            columns = Columns(piece.rows)
            rows = Rows(columns, 0, piece.tickets)
            for number, (key, place) in enumerate(zip(columns.keys(), piece.tickets, strict=True)):
                offset, error = place.offset, place.error or None
                if place.due == DROPPED:
                    self._out.append(Outcome(offset, offset + 1, key, "DROPPED", place.attempts, 0.0, error))
                    continue
                message = Message(offset, key, rows, number)
                message._due = Ticket(offset, place.attempts, place.parkings, place.due).is_due(now)
                message._attempts, message._held, message._error = place.attempts, place.due == HELD, error
                message._ended = place.due == DEAD_LETTERED
                planned.append(message)
        return planned, iter(())

    def _settled(self, planned: Sequence[int], rest: Iterator[QueueRows]) -> tuple[Settled, int, Iterator[QueueRows]]:
        """Return the settled messages, including those at the offsets ``planned``, where the range begins, and all of ``rest``."""
        progress = self._broker.groups.progress(self._token, self._name) if self._is_whole else NO_PROGRESS
        if self._plan is not None:
            settled = Settled.read(self._broker, self._token, lot_token(self._token).queue, self._plan, planned, progress)
            return settled, self._plan.q_begin, rest
        piece = next(rest)
        begin: int = piece.rows.column("queue_offset")[0].as_py()
        letters = self._broker.groups.letters(self._token, [OffsetRange(begin, MAX_OFFSET)])
        return Settled.without_lot(letters, progress), begin, chain([piece], rest)

    def _feed(self, pieces: Iterator[QueueRows], settled: Settled) -> Iterator[list[Message]]:
        """Yield the messages of the queue in lists."""
        first = 0
        for piece in pieces:
            if piece.tickets is not None:
                raise OptionError(
                    OptionCondition.UNSUPPORTED,
                    f"rows of the parking lot of queue {self.queue} came after rows of the queue, so a key's order would be lost. Give the "
                    "listener the source's rows in the order in which it reads them, neither sorted nor shuffled",
                )
            for begin in range(0, piece.rows.num_rows, ROWS_TOGETHER):
                columns = Columns(piece.rows.slice(begin, ROWS_TOGETHER))
                for messages in self._messages(columns, first):
                    messages, decided = settled.divide(messages)
                    self._out += decided
                    yield messages
                first += len(columns.get("queue_offset"))

    def _messages(self, columns: Columns, first: int) -> Iterator[list[Message]]:
        """Yield the messages of these rows in lists. ``first``: the number of the first row."""
        offsets, rows = columns.get("queue_offset"), Rows(columns, first)
        # OrderPerQueue does not use keys.
        keys = columns.keys() if self._settings.parks else [None] * len(offsets)
        retried = columns.retried()
        together = self._settings.add_together
        for begin in range(0, len(offsets), together):
            end = begin + together
            messages = list(map(Message, offsets[begin:end], keys[begin:end], repeat(rows), count(first + begin)))
            for message, retries in zip(messages, retried[begin:end], strict=False):
                message._attempts = retries or 0
            yield messages

    # -- warnings and outcomes

    def _warn(self, engine: Engine) -> None:
        for text in engine.warnings[self._warned :]:
            logger.warning("%s", text)
        self._warned = len(engine.warnings)

    def _table(self, outcomes: Sequence[Outcome]) -> pa.RecordBatch:
        begins, ends, keys, statuses, attempts, seconds, errors, dues = zip(*outcomes, strict=True)
        if max(begins) >= GIVEN_BACK:
            begins, ends = (tuple(offset % GIVEN_BACK for offset in offsets) for offsets in (begins, ends))
        many = len(outcomes)
        same = {
            "topic": self.queue.topic,
            "broker_name": self.queue.broker_name,
            "queue_id": self.queue.queue_id,
            **({"status": statuses[0]} if statuses.count(statuses[0]) == many else {}),
            **({"error": None} if errors.count(None) == many else {}),
            **({"sharding_key": None} if keys.count(None) == many else {}),
            **({"due_timestamp": None} if dues.count(None) == many else {}),
        }
        arrays = {
            "begin_offset": begins,
            "end_offset": ends,
            "status": statuses,
            "attempts": attempts,
            "duration": seconds,
            "error": errors,
            "sharding_key": keys,
            "due_timestamp": [None if due is None else due * 1000 for due in dues] if "due_timestamp" not in same else (),
        }
        return pa.RecordBatch.from_arrays(
            [
                pa.repeat(pa.scalar(same[field.name], field.type), many)
                if field.name in same
                else pa.array(arrays[field.name], field.type)
                for field in _SCHEMA
            ],
            schema=_SCHEMA,
        )


def _next(engine: Engine) -> Action | None:
    """Return the engine's next action, or None if it raises the error of the lost lock."""
    try:
        return engine.next(time.monotonic())
    except LockError:
        return None


def _pieces(batch: pa.RecordBatch) -> Iterator[QueueRows]:
    """Split a batch's rows where the queue or the lock changes, and between rows of the parking lot and of the queue.

    Raises SchemaError MISSING_COLUMN for rows that were read with a parking lot but have no column ticket.
    """
    for queue, context, rows in by_queue(batch):
        if TICKET not in rows.schema.names:
            if context is not None and context.lot is not None:
                raise SchemaError(
                    SchemaCondition.MISSING_COLUMN,
                    f"rows of queue {queue} were read with parkingLot=true but have no column {TICKET}, which says when a parked message "
                    "is due. Do not drop it, and name it in the schema if you read with one",
                )
            yield QueueRows(queue, context, rows, None)
            continue
        tickets, rows = rows.column(TICKET), rows.drop_columns([TICKET])
        runs = pc.run_end_encode(tickets.is_valid())
        begin = 0
        for end, parked in zip(runs.run_ends.to_pylist(), runs.values.to_pylist(), strict=True):
            of_run = None
            if parked:
                columns = (field.to_pylist() for field in tickets.slice(begin, end - begin).flatten())
                of_run = list(map(LotPlace, *columns))
            yield QueueRows(queue, context, rows.slice(begin, end - begin), of_run)
            begin = end
