"""Code that listeners and ``dead_letter`` share: required columns, tasks, the lock of a task's rows, and writing dead letters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from ordered_source.columns import LOCK_TOKEN, LotPlace, ReadContext, TaskLock
from orderedmq.broker import Broker, PullSettings
from orderedmq.conditions import OptionCondition, SchemaCondition
from orderedmq.endpoint import Credentials, TlsOptions
from orderedmq.errors import LockError, MessageError, OptionError, OrderedMQError, SchemaError
from orderedmq.listening.engine import Message
from orderedmq.model import MAX_PROPERTIES_BYTES, PARKED_ID, MessageQueue
from orderedmq.ownership.lock import LockToken
from orderedmq.parking import lot_token
from orderedmq.pulls import pulls_at
from orderedmq.rows.dead_letters import dead_letter_properties, left_out
from orderedmq.schema import PRODUCER_SCHEMA
from orderedmq.spark_support import concise
from orderedmq.text import repaired

logger = logging.getLogger("orderedmq")

#: Required columns: the queue, offset, body and lock of a message.
NEEDED: Final = ("topic", "broker_name", "queue_id", "queue_offset", "body", LOCK_TOKEN)
#: The columns of a message that its dead letter contains, in addition to the body. Over RocketMQ, the first ones are also properties.
_TEXTS: Final = ("tags", "keys", "sharding_key")
_OF_LETTERS: Final = (*_TEXTS, "properties", "message_id")
#: Spark's setting that starts a second attempt of a slow task on another host.
SPECULATION: Final = "spark.speculation"
#: Maximum number and bytes of messages that one pull reads for dead letters.
_READ: Final = 1024
_READ_BYTES: Final = 8 * 1024 * 1024


def require_columns(
    df: DataFrame,
    needed: Sequence[str],
    what: str,
    remedy: str = "Read with includeLockToken=true, and do not drop these columns",
) -> None:
    """Raise SchemaError MISSING_COLUMN if the DataFrame lacks columns that ``what`` needs."""
    missing = [name for name in needed if name not in df.columns]
    if missing:
        raise SchemaError(
            SchemaCondition.MISSING_COLUMN,
            f"{what} needs the columns {', '.join(missing)}, but the DataFrame only has {', '.join(df.columns)}. {remedy}",
        )


def run_in_tasks(
    df: DataFrame, task: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]], schema: str | StructType, what: str
) -> DataFrame:
    """Return the DataFrame that Spark makes by calling ``task`` with the rows of each partition.

    Raises OptionError UNSUPPORTED with spark.speculation, also on a local master, where it has no effect. With speculation, two attempts
    of a task have the query's lock, so the broker allows both of them to process a key's messages, to park them and to write dead letters.
    """
    if str(df.sparkSession.conf.get(SPECULATION, "false")).strip().lower() == "true":
        raise OptionError(
            OptionCondition.UNSUPPORTED,
            f"{what} needs one attempt of a task at a time, but with {SPECULATION}=true Spark runs two attempts of a slow task, so a key's "
            f"messages would be processed twice and out of order. Start this application with {SPECULATION}=false",
        )
    return df.mapInArrow(concise(task), schema)


def lock_of(
    queue: MessageQueue,
    context: ReadContext | None,
    credentials: Credentials | None,
    tls: TlsOptions | None,
    listener: str,
    *,
    parks: bool,
) -> TaskLock:
    """Return the broker and the lock under which the rows were read.

    ``parks``: whether the listener needs a parking lot. Raises OptionError UNSUPPORTED for rows that were read without a lock, with a
    parking lot that the listener cannot use, or without one that it needs. Also raises the errors of `ReadContext.lock`.
    """
    if context is None:
        raise OptionError(
            OptionCondition.UNSUPPORTED,
            f"{listener} got rows of queue {queue} that were read without a lock. Use a stream with a consumerGroup, neither a "
            "batch read nor messageModel=broadcasting",
        )
    if parks and context.lot is None:
        raise OptionError(
            OptionCondition.UNSUPPORTED,
            f"{listener} got rows of queue {queue} that were read without a parking lot, where messages that fail wait. Read with "
            "parkingLot=true",
        )
    if not parks and context.lot is not None:
        raise OptionError(
            OptionCondition.UNSUPPORTED,
            f"{listener} got rows of queue {queue} that were read with parkingLot=true: parked messages come back out of the order of the "
            "queue. Give consume_orderly OrderPerKey(), or read without parkingLot",
        )
    return context.lock(queue, credentials, tls, listener=listener.partition("(")[0])


def by_queue(batch: pa.RecordBatch) -> Iterator[tuple[MessageQueue, ReadContext | None, pa.RecordBatch]]:
    """Split a batch into runs of consecutive rows with the same queue and lock; yield the queue, the context and the rows of each.

    A task normally has one queue and one lock, unless rows were shuffled. The column lock_token is removed from the rows. Raises
    LockError MALFORMED.
    """
    if not batch.num_rows:
        return
    texts = batch.column(LOCK_TOKEN).dictionary_encode()
    contexts = [None if text is None else ReadContext.from_text(text) for text in texts.dictionary.to_pylist()]
    columns = [*(batch.column(name) for name in ("topic", "broker_name", "queue_id")), texts.indices]
    rows = batch.drop_columns([LOCK_TOKEN])
    if all(len(column.unique()) == 1 for column in columns):
        runs = [(tuple(column[0].as_py() for column in columns), batch.num_rows)]
    else:
        of_rows = zip(*(column.to_pylist() for column in columns), strict=True)
        runs = [(queue, len(list(same))) for queue, same in groupby(of_rows)]
    begin = 0
    for (topic, broker, queue_id, place), size in runs:
        yield MessageQueue(topic, broker, queue_id), None if place is None else contexts[place], rows.slice(begin, size)
        begin += size


@contextmanager
def naming(queue: MessageQueue, messages: Sequence[Message], what: str) -> Iterator[None]:
    """Say in the broker's errors, except for a lost lock, which messages of a queue cannot ``what``, such as "be parked"."""
    try:
        yield
    except LockError:
        raise
    except OrderedMQError as error:
        first, last = messages[0]._offset, messages[-1]._offset
        which = f"message {first}" if len(messages) == 1 else f"messages {first} to {last}"
        raise error.during(f"{which} of queue {queue} cannot {what}") from error


def write_letters(broker: Broker, token: LockToken, messages: Sequence[Message], errors: Sequence[str | None]) -> None:
    """Write messages of the token's queue to the dead letters, each with its error.

    Fields that the DataFrame lacks are read from the queue, so that a letter contains the whole message, including the property that
    counts its replays. If a row cannot be stored as a message, for example because the query has set its body to null, its letter is
    the message as it was sent. Raises the errors of `Groups.dead_letter` and `Log.pull`.
    """
    if not messages:
        return
    names = messages[0]._rows.columns.names
    sent = _read(broker, token, messages, [name for name in _OF_LETTERS if name not in names])
    try:
        with naming(token.queue, messages, "become a dead letter" if len(messages) == 1 else "become dead letters"):
            _write_letters(broker, token, messages, errors, sent)
    except (MessageError, SchemaError):
        # None of these letters is stored.
        half = len(messages) // 2
        if half:
            write_letters(broker, token, messages[:half], errors[:half])
            write_letters(broker, token, messages[half:], errors[half:])
            return
        sent = _read(broker, token, messages, ("body", *_OF_LETTERS))
        if not sent:
            raise
        with naming(token.queue, messages, "become a dead letter"):
            _write_letters(broker, token, messages, errors, sent)


def _write_letters(
    broker: Broker,
    token: LockToken,
    messages: Sequence[Message],
    errors: Sequence[str | None],
    sent: Mapping[int, Mapping[str, Any]],
) -> None:
    """Write dead letters with the rows' fields, except for those in ``sent``.

    Raises MessageError or SchemaError before any letter is stored.
    """
    try:
        letters = [
            _letter(token.queue, message, error or "", sent.get(message._offset, {}))
            for message, error in zip(messages, errors, strict=True)
        ]
        rows = pa.RecordBatch.from_pylist(letters, schema=PRODUCER_SCHEMA)
    except (pa.ArrowException, TypeError, ValueError, AttributeError) as error:
        why = f"a column has values of another type than in a message: {error}"
        raise SchemaError(SchemaCondition.WRONG_TYPE, why) from error
    broker.groups.dead_letter(token, rows, [message._offset for message in messages])


def _letter(queue: MessageQueue, message: Message, error: str, sent: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a message's dead letter. ``sent``: the fields that are not those of the DataFrame's row."""
    fields = {name: sent[name] if name in sent else getattr(message, name, None) for name in ("body", *_OF_LETTERS)}
    own = dict(fields["properties"] or {})
    properties = dead_letter_properties(
        queue,
        message._offset,
        message_id=fields["message_id"] or "",
        # The number of retries that the listener saw in the last call is one less than the failed calls, as in Java.
        reconsume_times=message._attempts - 1 if message._attempts else getattr(message, "reconsume_times", 0) or 0,
        error=error,
        properties=own,
        texts=[fields[name] or "" for name in _TEXTS],
    )
    if names := left_out(own, properties):
        logger.warning(
            "the dead letter of message %d of queue %s has no room for its properties %s, because all properties together may have %d "
            "bytes. A replay sends the message without them",
            message._offset,
            queue,
            ", ".join(names),
            MAX_PROPERTIES_BYTES,
        )
    return {**fields, "properties": list(properties.items())}


def _read(broker: Broker, token: LockToken, messages: Sequence[Message], missing: Sequence[str]) -> dict[int, dict[str, Any]]:
    """Return fields of messages as they were sent, by offset. Messages that the broker has deleted are left out.

    Messages of the parking lot are read there, because they may have been corrected, or given back.
    """
    places: dict[MessageQueue, dict[int, int]] = {}
    for message in messages if missing else ():
        place = place_of(message)
        source, at = (token.queue, message._offset) if place is None else (lot_token(token).queue, place.place)
        places.setdefault(source, {})[at] = message._offset
    log = broker.log.reading(PullSettings(token.group))
    bounds = broker.log.bounds(list(places)) if places else {}
    fields: dict[int, dict[str, Any]] = {}
    for source, there in bounds.items():
        stored = sorted(at for at in places[source] if at >= there.min_offset)
        for chosen, rows in pulls_at(log, source, stored, _READ, _READ_BYTES, tuple({*missing, "properties"})):
            for at, row in zip(chosen, rows.to_pylist(), strict=True):
                row["message_id"] = dict(row["properties"] or ()).get(PARKED_ID, row.get("message_id"))
                fields[places[source][at]] = {name: row[name] for name in missing}
    return fields


class Columns:
    """The columns of one batch as Python values. A column is converted when a listener first uses it."""

    __slots__ = ("_batch", "_values")

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._batch = batch
        self._values: dict[str, list[Any]] = {}

    @property
    def names(self) -> list[str]:
        names: list[str] = self._batch.schema.names
        return names

    def get(self, name: str) -> list[Any]:
        values = self._values.get(name)
        if values is None:
            if name not in self.names:
                raise AttributeError(f"a message has no field {name!r}, because the DataFrame only has {', '.join(self.names)}")
            values = self._values[name] = repaired(self._batch.column(name))[0].to_pylist()
        return values

    def keys(self) -> Sequence[str | None]:
        """Return the column sharding_key, or None for each row if the column is missing."""
        return self.get("sharding_key") if "sharding_key" in self.names else [None] * self._batch.num_rows

    def retried(self) -> Sequence[int | None]:
        """Return the column reconsume_times, or an empty sequence if no message was retried."""
        if "reconsume_times" not in self.names or not pc.max(self._batch.column("reconsume_times")).as_py():
            return ()
        return self.get("reconsume_times")


class Rows(NamedTuple):
    """Rows of messages. ``first``: the first row's number. ``tickets``: their tickets in the parking lot; empty for rows of the queue."""

    columns: Columns
    first: int
    tickets: Sequence[LotPlace] = ()


def place_of(message: Message) -> LotPlace | None:
    """Return where a planned message lies in the parking lot, None for a message of the queue."""
    rows: Rows = message._rows
    return rows.tickets[message._number - rows.first] if rows.tickets else None
