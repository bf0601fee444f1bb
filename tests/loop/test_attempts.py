"""The sink's tasks and commits in every order that Spark may cause: duplicate and late attempts, repeated and aborted batches.

Spark never runs two copies of a task on one host, so these tests call ``write`` and ``commit`` themselves, as Spark would.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

import orderedmq
from ordered_sink.commit import StreamWriter
from ordered_source import partition_reader as task_module
from ordered_source.partition_reader import QueuePartition
from orderedmq.broker import Broker
from orderedmq.embedded.check import check
from orderedmq.embedded.store import transaction
from orderedmq.errors import LockError, SinkError
from orderedmq.model import MessageQueue
from orderedmq.options.source import SourceOptions
from orderedmq.ownership.lock import LockToken
from orderedmq.ownership.micro_batch import BATCH, QUERY, RUN, SourceRun
from tests import checker
from tests.live.faults.store_access import staged

SCHEMA = StructType(
    [StructField("body", BinaryType()), StructField("sharding_key", StringType()), StructField("keys", StringType())]
)
COLUMNS = ("body", "sharding_key", "keys")


class Task:
    """Replaces Spark's TaskContext."""

    def __init__(self, run: SourceRun, partition: int) -> None:
        self._properties = {QUERY: run.query_id, BATCH: str(run.batch_id), RUN: run.run_id}
        self._partition = partition

    def partitionId(self) -> int:
        return self._partition

    def taskAttemptId(self) -> int:
        return self._partition

    def getLocalProperty(self, name: str) -> str | None:
        return self._properties.get(name)


class Rig:
    """A query from ``in`` to ``out`` whose steps a test calls one by one."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = str(folder / "store")
        # Store the rows of every attempt in a segment file, however few they are.
        monkeypatch.setattr(transaction, "INLINE_BYTES", 0)
        self.broker: Broker = orderedmq.connect(self.path)
        for topic in ("in", "out"):
            self.broker.admin.create_topic(topic, 2)
        for queue in self.source:
            bodies = [f"{queue}:{place}".encode() for place in range(20)]
            self.broker.log.append({queue: pa.record_batch({"body": bodies, "sharding_key": [f"{queue.queue_id}"] * 20})})
        self._monkeypatch = monkeypatch

    @property
    def source(self) -> list[MessageQueue]:
        return self.broker.log.queues("in")

    def own(self, owner: str = "owner") -> dict[MessageQueue, LockToken]:
        """Lock the queues for a new process of a query and return the tokens. An earlier process of that query must be dead."""
        answers = self.broker.groups.lock("g", self.broker.groups.join(owner), self.source)
        tokens = {queue: answer for queue, answer in answers.items() if isinstance(answer, LockToken)}
        assert len(tokens) == 2
        return tokens

    def sink(self, **options: str) -> StreamWriter:
        return StreamWriter({"path": self.path, "topic": "out", **options}, SCHEMA, False)

    def attempt(
        self, run: SourceRun, partition: int, begin: int, end: int, token: LockToken | None = None, **options: str
    ) -> Any:
        """Run one attempt of a task that reads messages of a queue and writes them. Return its commit message."""
        self.be(run, partition)
        return self.sink(**options).write(self.rows(partition, begin, end, token))

    def be(self, run: SourceRun, partition: int) -> None:
        """Make this process a task of that run from now on."""
        self._monkeypatch.setattr(TaskContext, "get", lambda: Task(run, partition))

    def rows(self, partition: int, begin: int, end: int, token: LockToken | None) -> Iterator[pa.RecordBatch]:
        queue = self.source[partition]
        where = (self.broker.identity, queue, begin, end, token, self.broker.log.topic("in").incarnation)
        part = QueuePartition(*where, streaming=True)
        options = SourceOptions(path=self.path, pull_batch_size=5)
        columns = ("body", "sharding_key", "queue_offset")
        schema = pa.schema([("body", pa.binary()), ("sharding_key", pa.string()), ("queue_offset", pa.int64())])
        for batch in task_module.read(part, options, columns, schema):
            origins = [f"{queue}:{place}" for place in batch.column("queue_offset").to_pylist()]
            yield pa.RecordBatch.from_arrays([batch.column(0), batch.column(1), pa.array(origins)], names=list(COLUMNS))

    def count(self) -> int:
        return sum(at.max_offset for at in self.broker.log.bounds(self.broker.log.queues("out")).values())

    def judge(self, drained: bool = True) -> None:
        history = [*checker.sent(self.broker, "in"), *checker.delivered(self.broker, "out")]
        assert checker.judge(history, drained=drained) == []


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    rig = Rig(tmp_path, monkeypatch)
    yield rig
    rig.broker.close()
    assert check(Path(rig.path)) == []


def run(batch: int, run_id: str = "r1") -> SourceRun:
    return SourceRun("query", batch, run_id)


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_two_attempts_of_each_task_may_all_be_offered_in_any_order(order: tuple[int, ...], rig: Rig) -> None:
    messages = [rig.attempt(run(0), partition, 0, 20) for partition in (0, 0, 1, 1)]
    rig.sink().commit([messages[place] for place in order], 0)
    assert staged(rig.path) == 0
    rig.judge()


def test_an_attempt_that_is_not_committed_is_never_visible_and_is_deleted(rig: Rig) -> None:
    failed = rig.attempt(run(0), 0, 0, 10)
    messages = [rig.attempt(run(0), partition, 0, 10) for partition in (0, 1)]
    rig.sink().commit(messages, 0)
    assert staged(rig.path) == 0
    rig.judge(drained=False)
    # A separate commit offers the failed attempt after all.
    rig.sink().commit([failed], 0)
    assert rig.count() == 20
    rig.judge(drained=False)


def test_an_attempt_that_breaks_off_leaves_nothing(rig: Rig) -> None:
    def broken() -> Iterator[pa.RecordBatch]:
        yield from rig.rows(0, 0, 10, None)
        raise RuntimeError("the task breaks off")

    rig.be(run(0), 0)
    with pytest.raises(RuntimeError, match="breaks off"):
        rig.sink().write(broken())
    assert staged(rig.path) == 0
    assert rig.count() == 0


@pytest.mark.holds("sink once")
@pytest.mark.parametrize("known", [(0, 1), (0,), (1,), ()])
def test_a_write_that_ends_after_the_abort_is_never_visible(known: tuple[int, ...], rig: Rig) -> None:
    early = [rig.attempt(run(0), partition, 0, 20) for partition in (0, 1)]
    rig.sink().abort([early[partition] if partition in known else None for partition in (0, 1)], 0)
    late = rig.attempt(run(0), 0, 0, 20)
    assert rig.count() == 0
    assert staged(rig.path) == 3 - len(known)
    # The next run repeats the batch.
    rig.sink().commit([rig.attempt(run(0, "r2"), partition, 0, 20) for partition in (0, 1)], 0)
    assert staged(rig.path) == 0
    rig.judge()
    # A late commit offers an attempt that the abort did not know about.
    rig.sink().commit([late], 0)
    rig.judge()


def test_an_abort_after_the_commit_undoes_nothing(rig: Rig) -> None:
    messages = [rig.attempt(run(0), partition, 0, 20) for partition in (0, 1)]
    rig.sink().commit(messages, 0)
    rig.sink().abort(messages, 0)
    rig.sink().abort([None, None], 0)
    rig.judge()


@pytest.mark.holds("sink once")
def test_a_batch_that_comes_again_with_the_same_content_does_nothing(rig: Rig) -> None:
    tokens = rig.own()
    for run_id in ("r1", "r2", "r3"):
        messages = [rig.attempt(run(0, run_id), queue.queue_id, 0, 20, token) for queue, token in tokens.items()]
        for _ in range(2):
            rig.sink().commit(messages, 0)
        assert staged(rig.path) == 0
        rig.judge()
    assert rig.broker.groups.offsets("g", rig.source) == dict.fromkeys(rig.source, 20)


@pytest.mark.parametrize("end", [15, 5])
@pytest.mark.parametrize("source", ["with locks", "without a group"])
def test_a_batch_that_comes_again_with_other_messages_is_refused_and_cannot_be_skipped(source: str, end: int, rig: Rig) -> None:
    """The next batch begins at the repeat's end: after a later end, messages would be lost; after an earlier end, written twice."""
    tokens = rig.own() if source == "with locks" else dict.fromkeys(rig.source)

    def batch(run_id: str, end: int) -> list[Any]:
        return [rig.attempt(run(0, run_id), queue.queue_id, 0, end, token) for queue, token in tokens.items()]

    rig.sink().commit(batch("r1", 10), 0)
    other = batch("r2", end)
    for on_replay_differs in ("error", "skip"):
        with pytest.raises(SinkError, match="REPLAY_DIFFERS.*skip does not apply"):
            rig.sink(onReplayDiffers=on_replay_differs).commit(other, 0)
        assert rig.count() == 20
    rig.judge(drained=False)


def test_a_replay_that_dropped_a_queue_is_the_same_batch(rig: Rig) -> None:
    tokens = rig.own()
    rig.sink().commit([rig.attempt(run(0), queue.queue_id, 0, 20, token) for queue, token in tokens.items()], 0)
    first = next(iter(tokens))
    rig.sink().commit([rig.attempt(run(0, "r2"), 0, 0, 20, tokens[first])], 0)
    rig.judge()


def test_a_commit_of_an_earlier_run_is_refused_once_the_next_run_has_the_queues(rig: Rig) -> None:
    zombie = [rig.attempt(run(0), queue.queue_id, 0, 20, token) for queue, token in rig.own("first").items()]
    rig.broker.groups.close()  # type: ignore[attr-defined]
    tokens = rig.own("first")
    with pytest.raises(LockError, match="LOST"):
        rig.sink().commit(zombie, 0)
    assert rig.count() == 0
    rig.sink().commit([rig.attempt(run(0, "r2"), queue.queue_id, 0, 20, token) for queue, token in tokens.items()], 0)
    rig.judge()


def test_a_task_of_an_earlier_run_reads_nothing_once_another_query_has_the_queue(rig: Rig) -> None:
    stale = next(iter(rig.own("first").values()))
    rig.broker.groups.close()  # type: ignore[attr-defined]
    rig.own("second")
    with pytest.raises(LockError, match="LOST"):
        rig.attempt(run(0), 0, 0, 20, stale)
    assert staged(rig.path) == 0


def test_a_commit_that_is_refused_for_its_keys_is_aborted_without_a_trace(rig: Rig) -> None:
    # Two tasks write the same key: the second one reads the same queue, but counts as partition 1.
    messages = [rig.attempt(run(0), 0, 0, 10), rig.attempt(run(0), 0, 10, 20)]
    receipt = messages[1].receipt
    messages[1].receipt = replace(receipt, partition=1)
    with pytest.raises(SinkError, match="KEY_CONFLICT"):
        rig.sink().commit(messages, 0)
    rig.sink().abort(messages, 0)
    assert staged(rig.path) == 0
    assert rig.count() == 0


def test_an_abort_that_cannot_delete_anything_leaves_the_error_of_the_commit_to_be_seen(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    messages = [rig.attempt(run(0), 0, 0, 10)]
    sink = rig.sink()
    Path(rig.path).rename(f"{rig.path}-elsewhere")
    sink.abort(messages, 0)
    [said] = [record.getMessage() for record in caplog.records if "aborted batch" in record.getMessage()]
    assert "ORDEREDMQ_STORE.OTHER_MACHINE" in said
    Path(f"{rig.path}-elsewhere").rename(rig.path)
    sink.abort(messages, 0)
    assert staged(rig.path) == 0


def test_an_old_checkpoint_with_other_batches_publishes_no_message_twice(rig: Rig) -> None:
    first, second = rig.own().values()

    def commit(batch: int, run_id: str, **spans: tuple[int, int]) -> None:
        tokens = {"first": (0, first), "second": (1, second)}
        tasks = [(*tokens[name], *span) for name, span in spans.items()]
        source = run(batch, run_id)
        rig.sink().commit([rig.attempt(source, number, begin, end, token) for number, token, begin, end in tasks], batch)

    commit(0, "r1", first=(0, 10), second=(0, 10))
    commit(1, "r1", first=(10, 11), second=(10, 20))
    # A copy of the checkpoint after batch 0, with a limit of one message: its batch 1 is part of the published batch 1 ...
    commit(1, "r2", first=(10, 11))
    # ... and the other part is now in batch 2, which was never published.
    with pytest.raises(SinkError, match=r"REPLAY_DIFFERS.* but batch 1 has already published 10 to 19"):
        commit(2, "r2", second=(10, 11))
    rig.judge(drained=False)
    commit(2, "r3", first=(11, 20))
    rig.judge()


def test_messages_are_published_again_after_a_seek(rig: Rig) -> None:
    tokens = rig.own()
    messages = [rig.attempt(run(0), queue.queue_id, 0, 20, token) for queue, token in tokens.items()]
    rig.sink().commit(messages, 0)
    tokens = {token.queue: token for token in rig.broker.groups.reset(dict.fromkeys(tokens.values(), 5))}
    messages = [rig.attempt(run(1), queue.queue_id, 5, 20, token) for queue, token in tokens.items()]
    rig.sink().commit(messages, 1)
    assert rig.count() == 70
