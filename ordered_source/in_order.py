"""``process_in_order``, which calls a function with the new messages of a key, in their order, and the key's state.

Spark's transformWithState keeps the state, but the shuffle that brings a key's rows together loses their order, and after a seek or a
take-over a query reads messages again. So the state has, besides the function's own value, how far the key is (`Progress`).
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, cast

from pyspark.sql import DataFrame
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import BooleanType, IntegerType, LongType, StringType, StructField, StructType

from ordered_source.listener.task_rows import require_columns
from orderedmq.conditions import MessageCondition, SchemaCondition
from orderedmq.errors import MessageError, SchemaError
from orderedmq.routing.generations import generation_of
from orderedmq.spark_support import concise_calls

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle, TimerValues

#: The columns that give the order of a key's messages.
NEEDED: Final = ("topic", "broker_name", "queue_id", "sharding_key", "store_timestamp", "key_sequence")
#: `store_timestamp` in µs since 1970. Pandas would get the timestamp in the session's time zone, in which an hour may come twice.
_STORED: Final = "store_micros"


class Progress(NamedTuple):
    """How far a key is: the sequence and the queue of its last message, and the latest time at which one of its messages was stored."""

    key_sequence: int = -1
    store_micros: int = -1
    broker_name: str | None = None
    queue_id: int | None = None


#: The columns of the stored state before those of the user. ``has_value``: whether the user has a state.
_PROGRESS: Final = [
    StructField("key_sequence", LongType()),
    StructField(_STORED, LongType()),
    StructField("broker_name", StringType()),
    StructField("queue_id", IntegerType()),
    StructField("has_value", BooleanType()),
]


class KeyState:
    """A key's state, for a call of the function.

    ``value``: a tuple of the state's columns, or None without a state. Assign to it to change the state. ``now`` and ``watermark`` are
    those of the micro-batch, in ms since 1970, or -1 if ``time_mode`` does not offer them.
    """

    def __init__(self, value: tuple[Any, ...] | None, handle: StatefulProcessorHandle, times: TimerValues) -> None:
        self.value = value
        self.now = times.getCurrentProcessingTimeInMs()
        self.watermark = times.getCurrentWatermarkInMs()
        self._handle = handle

    def set_timer(self, at: int) -> None:
        """Have ``on_timer`` called after the time ``at`` (ms since 1970)."""
        self._handle.registerTimer(at)

    def delete_timer(self, at: int) -> None:
        """Delete the timer of that time, if there is one."""
        self._handle.deleteTimer(at)


def process_in_order(
    df: DataFrame,
    function: Callable[[str, Sequence[Any], KeyState], Iterable[tuple[Any, ...]]],
    *,
    state: str,
    output: str,
    on_timer: Callable[[str, int, KeyState], Iterable[tuple[Any, ...]]] | None = None,
    time_mode: Literal["None", "ProcessingTime", "EventTime"] = "None",
) -> DataFrame:
    """Call ``function(key, messages, state)`` with the new messages of each sharding key, in the order in which they were sent.

    ``df`` is a stream of the source with ``includeKeySequence=true``, or with a schema that has the columns `NEEDED`. ``messages`` are
    named tuples of its columns. ``state`` is a `KeyState`; its value has the columns that the parameter ``state`` declares, such as
    "total double". The function yields tuples of the columns that ``output`` declares.

    A message that was processed before is left out, so each message counts once, whatever is read again. A resize of the topic does not
    change the order. Keys of different topics are different keys. With a ``time_mode``, Spark's kind of timers, ``on_timer(key, time,
    state)`` is called for each timer that has expired.

    Returns a DataFrame with the column sharding_key and those of ``output``. The rows of a key are in one task, in the order in which they
    were yielded, which the sink keeps. Spark's state store must be RocksDB (spark.sql.streaming.stateStore.providerClass).

    Raises SchemaError MISSING_COLUMN, and WRONG_TYPE for an output with a column sharding_key. When the query runs, a task raises
    MessageError NULL_KEY for a message without a key, and BAD_KEY for a key that was sent to several queues.
    """
    require_columns(df, NEEDED, "process_in_order", "Read with includeKeySequence=true, and do not drop these columns")
    columns = _declared(output)
    if any(column.name == "sharding_key" for column in columns):
        raise SchemaError(
            SchemaCondition.WRONG_TYPE,
            "process_in_order adds the column sharding_key to the output. Leave it out of output, and of the tuples that the function yields",
        )
    schema = StructType([df.schema["sharding_key"], *columns])
    rows = df.selectExpr("*", f"unix_micros(store_timestamp) AS {_STORED}")
    processor = _InOrder(function, on_timer, StructType([*_PROGRESS, *_declared(state)]), schema.names)
    return rows.groupBy("topic", "sharding_key").transformWithStateInPandas(processor, schema, "append", time_mode)


def _declared(columns: str) -> list[StructField]:
    return cast(StructType, StructType.fromDDL(columns)).fields


@concise_calls
class _InOrder(StatefulProcessor):
    def __init__(self, function: Any, on_timer: Any, state: StructType, output: list[str]) -> None:
        self._function, self._on_timer, self._schema, self._output = function, on_timer, state, output

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._state = handle.getValueState("state", self._schema)

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: TimerValues) -> Iterator[pd.DataFrame]:
        before, state = self._load(timerValues)
        topic, sharding_key = key
        messages, progress = following(topic, sharding_key, _messages(rows), before)
        if messages:
            yield from self._store(sharding_key, self._function(sharding_key, messages, state), progress, state)

    def handleExpiredTimer(self, key: Any, timerValues: TimerValues, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:
        if self._on_timer is not None:
            progress, state = self._load(timerValues)
            yield from self._store(key[1], self._on_timer(key[1], expiredTimerInfo.getExpiryTimeInMs(), state), progress, state)

    def close(self) -> None: ...

    def _load(self, times: TimerValues) -> tuple[Progress, KeyState]:
        stored = self._state.get() if self._state.exists() else None
        if stored is None:
            return Progress(), KeyState(None, self._handle, times)
        count = len(Progress._fields)
        return Progress(*stored[:count]), KeyState(stored[count + 1 :] if stored[count] else None, self._handle, times)

    def _store(self, key: str, rows: Iterable[tuple[Any, ...]], progress: Progress, state: KeyState) -> Iterator[pd.DataFrame]:
        import pandas as pd

        # A generator changes the state while its rows are taken.
        table = pd.DataFrame([(key, *row) for row in rows or ()], columns=self._output, dtype=object)
        absent = (None,) * (len(self._schema) - len(progress) - 1)
        self._state.update((*progress, state.value is not None, *(absent if state.value is None else state.value)))
        yield table


def _messages(frames: Iterator[pd.DataFrame]) -> list[Any]:
    messages: list[Any] = []
    for frame in frames:
        messages += map(_message_type(tuple(frame.columns)), *(frame[name] for name in frame.columns))
    return messages


@lru_cache
def _message_type(columns: tuple[str, ...]) -> Any:
    # Creating the type for each key would take longer than the rest.
    return namedtuple("Message", columns, rename=True)


def following(topic: str, key: str | None, messages: list[Any], progress: Progress) -> tuple[list[Any], Progress]:
    """Return the messages of a key that come after ``progress``, each once and in order, and the progress after them. Pure.

    The sequence begins anew if a topic is deleted and created again; a message that was stored later than all that were processed belongs to
    the new one. Raises MessageError NULL_KEY without a key, and BAD_KEY if a key has messages in two queues, although the topic was not
    resized between them: such messages have no order.
    """
    if key is None:
        raise MessageError(
            MessageCondition.NULL_KEY,
            f"process_in_order got a message of topic {topic!r} without a sharding key, which has no order. Leave such messages out with "
            'where("sharding_key IS NOT NULL")',
        )
    if any(one.key_sequence <= progress.key_sequence and one.store_micros > progress.store_micros for one in messages):
        messages = [one for one in messages if one.store_micros > progress.store_micros]
        progress = Progress()
    by_sequence = {one.key_sequence: one for one in messages if one.key_sequence > progress.key_sequence}
    ordered = sorted(by_sequence.values(), key=attrgetter("key_sequence"))
    last: Any = progress
    for message in ordered:
        same_queue = (message.broker_name, message.queue_id) == (last.broker_name, last.queue_id)
        if (
            last.key_sequence >= 0
            and not same_queue
            and generation_of(message.key_sequence) == generation_of(last.key_sequence)
        ):
            raise MessageError(
                MessageCondition.BAD_KEY,
                f"key {key!r} of topic {topic!r} is in queue {last.queue_id} of broker {last.broker_name} and in queue {message.queue_id} of "
                f"{message.broker_name}, so its messages have no order. Send them by their key, and change the number of queues only with "
                "orderedmq topic resize",
            )
        last = message
    if not ordered:
        return [], progress
    stored = max(progress.store_micros, *(message.store_micros for message in ordered))
    return ordered, Progress(last.key_sequence, stored, last.broker_name, last.queue_id)
