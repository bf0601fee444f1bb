"""``process_in_order`` without Spark's state store: histories with shuffles, repeats and resizes give what one thread would compute."""

from __future__ import annotations

import copy
from random import Random
from typing import Any, NamedTuple

import pandas as pd
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from ordered_source.in_order import _PROGRESS, Progress, _InOrder, following
from orderedmq.conditions import MessageCondition
from orderedmq.errors import MessageError
from orderedmq.routing.generations import OFFSET_BITS

HISTORIES = 10_000
SCHEMA = StructType([*_PROGRESS, StructField("total", LongType()), StructField("last", StringType())])
COLUMNS = ["topic", "broker_name", "queue_id", "sharding_key", "key_sequence", "store_micros", "body"]


class Message(NamedTuple):
    """A row of the source, with the columns that the order needs."""

    key_sequence: int
    store_micros: int
    queue_id: int = 0
    broker_name: str = "embedded"
    body: int = 0


class Cell:
    """Spark's ValueState of one key. Spark stores only values of the schema."""

    def __init__(self) -> None:
        self.value: tuple[Any, ...] | None = None

    def exists(self) -> bool:
        return self.value is not None

    def get(self) -> tuple[Any, ...] | None:
        return self.value

    def update(self, value: tuple[Any, ...]) -> None:
        assert len(value) == len(SCHEMA)
        self.value = tuple(value)


class Handle:
    """Spark's StatefulProcessorHandle of one key."""

    def __init__(self) -> None:
        self.cell = Cell()
        self.timers: set[int] = set()

    def getValueState(self, name: str, schema: StructType) -> Cell:
        assert (name, schema) == ("state", SCHEMA)
        return self.cell

    def registerTimer(self, at: int) -> None:
        self.timers.add(at)

    def deleteTimer(self, at: int) -> None:
        self.timers.discard(at)


class Times:
    """Spark's TimerValues."""

    def getCurrentProcessingTimeInMs(self) -> int:
        return 1000

    def getCurrentWatermarkInMs(self) -> int:
        return -1


def fold(key: str, messages: Any, state: Any) -> Any:
    """A fold whose result depends on the order, and that forgets its state from time to time."""
    for message in messages:
        total, _ = state.value or (0, "")
        state.value = (total * 31 + message.body) % 1_000_003, f"{key}{message.body}"
        yield state.value
        if message.body % 7 == 0:
            state.value = None


class Call:
    """A processor with the state of one key."""

    def __init__(self, function: Any = fold, on_timer: Any = None) -> None:
        self.handle = Handle()
        self.processor = _InOrder(function, on_timer, SCHEMA, ["sharding_key", "total", "last"])
        self.processor.init(self.handle)  # type: ignore[arg-type]

    def rows(self, *frames: list[Message]) -> list[tuple[Any, ...]]:
        tables = (
            pd.DataFrame(
                [("t", m.broker_name, m.queue_id, "k", m.key_sequence, m.store_micros, m.body) for m in frame], columns=COLUMNS
            )
            for frame in frames
        )
        out = self.processor.handleInputRows(("t", "k"), tables, Times())  # type: ignore[arg-type]
        return [row for table in out for row in table.itertuples(index=False, name=None)]


def history(random: Random) -> list[Message]:
    """The messages of a key over up to three resizes, in the order in which they were sent. A resize moves the key to another queue."""
    messages, number, stored = [], 0, 0
    for generation in range(random.randint(1, 4)):
        queue, offset = generation, random.randrange(100)
        for _ in range(random.randrange(6)):
            offset += random.randint(1, 9)
            stored += random.randrange(3)
            number += 1
            messages.append(Message(generation << OFFSET_BITS | offset, stored, queue, body=number))
    return messages


class Key:
    """A key with what its state would have, without Spark."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.value: tuple[int, str] | None = None

    def rows(self, *frames: list[Message]) -> list[tuple[Any, ...]]:
        messages, self.progress = following("t", "k", [message for frame in frames for message in frame], self.progress)
        return list(fold("k", messages, self))


@pytest.mark.holds("state per key")
@pytest.mark.parametrize(("key", "histories"), [(Key, HISTORIES), (Call, HISTORIES // 200)], ids=["rule", "processor"])
def test_random_histories_equal_the_fold_of_one_thread(key: Any, histories: int) -> None:
    for seed in range(histories):
        random = Random(seed)
        messages = history(random)
        one_thread = Key()
        in_turn = [row for message in messages for row in one_thread.rows([message])]
        query, rows, begin = key(), [], 0
        while begin < len(messages):
            # A micro-batch may begin before the end of the last one, after a seek or a take-over. Its rows come shuffled and in pieces.
            end = min(len(messages), begin + random.randint(1, 6))
            batch = messages[max(0, begin - random.randrange(4)) : end]
            random.shuffle(batch)
            cut = random.randrange(len(batch) + 1)
            before = copy.deepcopy(query)
            output = query.rows(batch[:cut], batch[cut:])
            if random.random() < 0.2:
                # The batch has failed. Spark repeats it with the state from before it.
                query = before
                continue
            rows += output
            begin = end
        assert [row[-2:] for row in rows] == in_turn, seed


def test_a_topic_that_was_created_again_begins_anew() -> None:
    former = [Message(5, 100, body=1), Message(6, 110, body=2)]
    _, progress = following("t", "k", former, Progress())
    anew = [Message(3, 120, body=3), Message(7, 130, body=4)]
    messages, progress = following("t", "k", [*former, *reversed(anew)], progress)
    assert messages == anew
    assert progress == Progress(7, 130, "embedded", 0)


def test_a_clock_that_was_set_back_loses_no_message() -> None:
    _, progress = following("t", "k", [Message(1, 100)], Progress())
    later = [Message(2, 50), Message(3, 60)]
    assert following("t", "k", later, progress) == (later, Progress(3, 100, "embedded", 0))


def test_a_message_without_a_key_is_refused() -> None:
    with pytest.raises(MessageError) as error:
        following("t", None, [Message(1, 100)], Progress())
    assert error.value.sub == MessageCondition.NULL_KEY


@pytest.mark.parametrize("together", [True, False])
def test_a_key_that_was_sent_to_two_queues_is_refused(together: bool) -> None:
    progress, messages = Progress(), [Message(1, 100, 0), Message(2, 110, 3)]
    if not together:
        _, progress = following("t", "k", messages[:1], progress)
        messages = messages[1:]
    with pytest.raises(MessageError) as error:
        following("t", "k", messages, progress)
    assert error.value.sub == MessageCondition.BAD_KEY


def test_a_timer_changes_the_state_and_not_the_progress() -> None:
    def remind(key: str, messages: Any, state: Any) -> Any:
        state.value = (len(messages), key)
        state.set_timer(state.now + 5)
        return ()

    def on_timer(key: str, at: int, state: Any) -> Any:
        yield at, f"{key} has waited since message {state.value[0]}"
        state.value = None

    class Expired:
        def getExpiryTimeInMs(self) -> int:
            return 1005

    call = Call(remind, on_timer)
    assert call.rows([Message(4, 100), Message(5, 100)]) == []
    assert call.handle.timers == {1005}
    [table] = call.processor.handleExpiredTimer(("t", "k"), Times(), Expired())  # type: ignore[arg-type]
    assert table.values.tolist() == [["k", 1005, "k has waited since message 2"]]
    assert call.handle.cell.value == (5, 100, "embedded", 0, False, None, None)
    assert call.rows([Message(5, 100)]) == []
