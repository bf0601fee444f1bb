"""The tasks of ``dead_letter`` on a real store: the rows that they store and pass on, repeated tasks, and owners that lost their queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from ordered_source.columns import ReadContext
from ordered_source.listener.dead_letter import separate
from orderedmq.embedded.broker import EmbeddedBroker
from orderedmq.endpoint import Endpoint
from orderedmq.errors import LockError
from orderedmq.model import DEAD_LETTER_PREFIX, MessageQueue
from orderedmq.ownership.lock import LockToken
from orderedmq.tools import dead_letters
from tests.contract.support import locked, rows

QUEUES = [MessageQueue("orders", "embedded", number) for number in (0, 1)]


class World:
    """A topic of two queues with six messages each, and tasks that read them."""

    def __init__(self, path: Path) -> None:
        self.path = str(path / "store")
        self.broker = EmbeddedBroker(path / "store")
        self.broker.admin.create_topic("orders", 2)
        for queue in QUEUES:
            self.broker.log.append({queue: rows([f"{queue.queue_id}:{n}" for n in range(6)], sharding_key=list("ababab"))})
        self.me = self.broker.groups.join("me")
        self.tokens = locked(self.broker, "g", self.me, QUEUES)

    def batch(
        self, number: int, bad: Sequence[int], begin: int = 0, end: int = 6, token: LockToken | None = None
    ) -> pa.RecordBatch:
        """Rows [begin, end) of a queue as a task gets them, with the lock token, and with a reason in the rows at the offsets ``bad``."""
        columns = ("topic", "broker_name", "queue_id", "queue_offset", "body", "sharding_key", "message_id")
        found = self.broker.log.pull(QUEUES[number], begin, end - begin, 1 << 30, columns)
        text = ReadContext.of(Endpoint(self.path), self.broker.identity, token or self.tokens[number]).to_text()
        why = [f"bad {offset}" if offset in bad else None for offset in range(begin, end)]
        return pa.RecordBatch.from_arrays(
            [*found.columns, pa.array([text] * (end - begin)), pa.array(why, pa.string())],
            names=[*columns, "lock_token", "why"],
        )

    def letters(self) -> list[tuple[bytes, str | None, int | None, str | None]]:
        """The body, key, origin offset and error of each dead letter, in order."""
        queue = MessageQueue(DEAD_LETTER_PREFIX + "g", "embedded", 0)
        pieces = dead_letters.read(self.broker.log, queue, 0, self.broker.log.bounds([queue])[queue].max_offset)
        return [(one.body, one.sharding_key, one.origin_offset, one.error) for piece in pieces for one in piece]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.broker.close()


def passed(batches: Sequence[pa.RecordBatch]) -> list[str]:
    found = list(separate(iter(batches)))
    assert all(batch.schema.names == batches[0].schema.names[:-1] for batch in found)
    return [body.decode() for batch in found for body in batch.column("body").to_pylist()]


def test_a_repeated_task_stores_only_new_dead_letters(world: World) -> None:
    for bad in ([1, 2], [1, 2], [1, 2, 5]):
        assert passed([world.batch(0, bad)]) == [f"0:{n}" for n in range(6) if n not in bad]
    assert [offset for _, _, offset, _ in world.letters()] == [1, 2, 5]


def test_the_rows_of_several_queues_in_one_batch_go_under_the_lock_of_each(world: World) -> None:
    """A shuffle can bring the rows of several queues together."""
    both = pa.Table.from_batches([world.batch(0, [0]), world.batch(1, [3, 5])]).combine_chunks().to_batches()
    assert len(passed(both)) == 9
    assert [(body, offset) for body, _, offset, _ in world.letters()] == [(b"0:0", 0), (b"1:3", 3), (b"1:5", 5)]


def test_the_letter_of_a_row_that_cannot_be_stored_is_the_message_as_it_was_sent_and_the_others_are_the_rows(
    world: World,
) -> None:
    batch = world.batch(0, range(6))
    body = pa.array([b"new 0", b"new 1", None, b"new 3", b"new 4", b"new 5"], pa.binary())
    assert passed([batch.set_column(batch.schema.get_field_index("body"), "body", body)]) == []
    assert [letter[0] for letter in world.letters()] == [b"new 0", b"new 1", b"0:2", b"new 3", b"new 4", b"new 5"]


@pytest.mark.holds("dead letter by condition")
def test_an_owner_without_its_lock_stores_and_passes_no_row(world: World) -> None:
    stale = world.tokens[0]
    world.broker.groups.unlock([stale])
    locked(world.broker, "g", world.broker.groups.join("them"), QUEUES[:1])
    with pytest.raises(LockError, match=r"LOCK\.LOST"):
        list(separate(iter([world.batch(0, [2], token=stale)])))
    assert not any(topic.name.startswith(DEAD_LETTER_PREFIX) for topic in world.broker.log.topics())


#: The number of messages, and of messages per micro-batch, in the test that kills processes.
MESSAGES, SPAN = 400, 10
