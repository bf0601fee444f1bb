"""A writing task: the selector chooses a queue for each row, and the broker gets the rows in order.

Rules: rows keep their order, or get the order of ``orderBy``, which needs all rows of the task in memory (up to a limit). The
task collects about 16 MiB of rows before it routes them, so that each queue gets a chunk of efficient size.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage

from ordered_sink.columns import Plan, sorted_rows
from orderedmq.broker import Broker, ChooseAgain, Receipt, SinkBatch, Staging
from orderedmq.conditions import MessageCondition, TopicCondition
from orderedmq.connections import cached
from orderedmq.errors import MessageError, TopicError
from orderedmq.model import DEFAULT_COMPRESSION, MessageQueue, check_topic
from orderedmq.options.sink import SinkOptions
from orderedmq.ownership.micro_batch import SourceRun, run_of, sink_of
from orderedmq.routing.selector import Queues, Selector, by_queue, is_own, selector
from orderedmq.routing.sharding_key import HashedKeys, hashed_keys, key_hash64
from orderedmq.rows.message_rows import normalise, several_tags
from orderedmq.schema import PRODUCER_COLUMNS, concat_batches
from orderedmq.text import repaired

logger = logging.getLogger("orderedmq")

GATHER_BYTES: Final = 16 * 1024 * 1024
GATHER_ROWS: Final = 131072
#: Hashes of keys, 64 bits each.
Words = npt.NDArray[np.uint64]

#: The number of hashes to collect before duplicates are removed.
_GATHER: Final = 1 << 18
#: Size of the table of recently seen hashes, which fits into a core's cache.
_RECENT: Final = 1 << 16


@dataclass
class Written(WriterCommitMessage):
    """A task's message to the commit: the identity of the store, its batch, its receipt, and its keys as sorted 64-bit hashes.

    Of the task's ``rows`` rows, ``null_keys`` have no key and ``several_tags`` have more than one tag. The commit logs a warning
    about these.
    """

    identity: str
    batch: SinkBatch
    receipt: Receipt
    keys: bytes
    rows: int = 0
    null_keys: int = 0
    several_tags: int = 0


def sink_batch(options: SinkOptions, run: SourceRun | None, job: str, *, streaming: bool) -> SinkBatch:
    """Return the identity under which a batch is published only once: (query, batch), the user's transaction, or no identity."""
    sink_id, batch_id = None, 0
    if options.txn_app_id is not None and options.txn_version is not None:
        sink_id, batch_id = sink_of(options.txn_app_id), options.txn_version
    elif streaming and run is not None:
        sink_id, batch_id = run.query_id, run.batch_id
    group = options.sink_group if sink_id is not None else None
    return SinkBatch(sink_id, batch_id, run, group, job, options.topic, is_own(options.selector))


def write(
    rows: Iterator[pa.RecordBatch],
    options: SinkOptions,
    plan: Plan,
    identity: str,
    job: str = "",
    queues: Sequence[MessageQueue] = (),
    *,
    streaming: bool,
) -> Written:
    """Stage all rows of one attempt of one task. Capabilities.atomic_publish says whether readers see them only after the commit.

    ``job``: see `SinkBatch`. ``queues``: those of option topic, as the driver has chosen them for all attempts of the job.
    """
    context = TaskContext.get()
    assert context is not None, "a writer runs in a Spark task"
    batch = sink_batch(options, run_of(context.getLocalProperty), job, streaming=streaming)
    broker = cached(options.endpoint, identity)
    staging = broker.outbox.open(batch, context.partitionId())
    try:
        task = _Task(broker, staging, options, plan, batch, context.partitionId(), queues)
        for gathered in _gather_rows(rows, options):
            task.route(gathered)
        if task.malformed:
            logger.warning(
                "%d rows of partition %d of batch %d have a tag, key or property that is not UTF-8: each malformed byte sequence is replaced "
                "by U+FFFD, as in Java. Encode such bytes (hex, base64) before they are written",
                task.malformed,
                context.partitionId(),
                batch.batch_id,
            )
        return Written(
            identity,
            batch,
            staging.receipt(),
            task.seen.to_bytes(),
            task.rows,
            null_keys=task.null_keys,
            several_tags=task.several_tags,
        )
    except BaseException:
        staging.abandon()
        raise


def selector_of(options: SinkOptions, batch: SinkBatch, partition: int, *, atomic: bool) -> Selector:
    """Return the selector of a partition. ``atomic``: see `Capabilities`."""
    # Without atomic publishing, sent rows stay, so a retry that gets its rows in another order must choose the same queues.
    return selector(options.selector, batch.batch_id * 65537 + partition, by_content=not atomic)


def choose_again(options: SinkOptions, plan: Plan, batch: SinkBatch, partition: int) -> ChooseAgain:
    """Return what chooses the queues of a partition's staged rows again, after a topic was resized."""
    chooser = selector_of(options, batch, partition, atomic=True)

    def choose(rows: pa.RecordBatch, queues: int) -> Queues:
        keys = hashed_keys(rows.column("sharding_key"), plan.key_type, f"partition {partition}") if plan.key else None
        return chooser.select(rows, keys, queues)

    return choose


def _gather_rows(rows: Iterator[pa.RecordBatch], options: SinkOptions) -> Iterator[pa.RecordBatch]:
    """Yield the rows in order, in batches of about `GATHER_BYTES`; with orderBy, yield one sorted batch of all rows."""
    if options.order_by:
        full = (
            f"orderBy holds a task's rows in memory, but they take more than orderBufferSize={options.order_buffer_size} bytes. "
            "Raise it, write smaller batches (maxOffsetsPerTrigger), or spread the rows over more tasks"
        )
        yield from sorted_rows(rows, options.order_by, options.order_buffer_size, full)
        return
    waiting: list[pa.RecordBatch] = []
    size = count = 0
    for batch in rows:
        if not batch.num_rows:
            continue
        waiting.append(batch)
        size += batch.nbytes
        count += batch.num_rows
        if size >= GATHER_BYTES or count >= GATHER_ROWS:
            yield concat_batches(waiting)
            waiting, size, count = [], 0, 0
    if waiting:
        yield waiting[0] if len(waiting) == 1 else concat_batches(waiting)


class _Task:
    """The state of a writing task: known topics, the selector, the keys seen, and counts of rows."""

    def __init__(
        self,
        broker: Broker,
        staging: Staging,
        options: SinkOptions,
        plan: Plan,
        batch: SinkBatch,
        partition: int,
        proposed: Sequence[MessageQueue],
    ) -> None:
        self._broker = broker
        self._staging = staging
        self._options = options
        self._plan = plan
        self._partition = partition
        self.rows = self.null_keys = self.several_tags = 0
        self._selector = selector_of(options, batch, partition, atomic=broker.capabilities.atomic_publish)
        self._proposed = proposed
        self._queues: dict[str, list[MessageQueue]] = {}
        self.seen = SeenKeys()
        #: Number of rows that contain a text that is not UTF-8.
        self.malformed = 0

    def route(self, rows: pa.RecordBatch) -> None:
        """Check ``rows`` and stage them in their queues."""
        where = f"partition {self._partition}"
        odd: set[int] = set()
        keys = self._keys(rows, where, odd)
        messages = normalise(self._messages(rows, keys), where, self.rows, odd.update)
        self.malformed += len(odd)
        self.rows += rows.num_rows
        self.several_tags += several_tags(messages)
        if self._options.needs_key and keys is not None:
            self.null_keys += keys.keys.null_count
        if "queue_id" in rows.schema.names:
            # The selector needs this column. It is removed before the rows are staged.
            messages = messages.append_column("queue_id", rows.column("queue_id"))
        if self._plan.topic is None:
            assert self._options.topic is not None
            self._route(self._options.topic, messages, keys)
            return
        column, _ = repaired(rows.column(rows.schema.get_field_index(self._plan.topic)))
        if column.null_count:
            row = self.rows - rows.num_rows + int(pc.index(column.is_null(), True).as_py())
            raise MessageError(
                MessageCondition.NULL_TOPIC,
                f"row {row} of partition {self._partition} has no topic. Fill the column or set option topic",
            )
        for topic in pc.unique(column):
            mask = pc.equal(column, topic)
            if mask.true_count == len(mask):
                self._route(topic.as_py(), messages, keys)
            else:
                self._route(topic.as_py(), messages.filter(mask), keys and keys.filter(mask))

    def _route(self, topic: str, messages: pa.RecordBatch, keys: HashedKeys | None) -> None:
        queues = self._queues_of(topic)
        chosen = self._selector.select(messages, keys, len(queues))
        if keys is not None and self._options.on_key_conflict != "ignore":
            hashes = keys.hash64 if keys.valid is None else keys.hash64[keys.valid]
            if self._plan.topic is not None:
                # Equal keys in different topics are different keys.
                hashes = hashes ^ key_hash64(pa.array([topic]))[0]
            self.seen.add(hashes)
        messages = messages.select([name for name in PRODUCER_COLUMNS if name in messages.schema.names])
        for queue, some in by_queue(messages, chosen, queues):
            self._staging.add(queue, some)

    def _keys(self, rows: pa.RecordBatch, where: str, odd: set[int]) -> HashedKeys | None:
        """Return the rows' hashed keys; None without a key column. Rows whose key is not UTF-8 are added to ``odd``."""
        if self._plan.key is None:
            return None
        column, bad = repaired(rows.column(rows.schema.get_field_index(self._plan.key)))
        odd.update(bad.tolist())
        return hashed_keys(column, self._plan.key_type, where, self.rows)

    def _messages(self, rows: pa.RecordBatch, keys: HashedKeys | None) -> pa.RecordBatch:
        """Return the producer's columns of the rows. The key's column is named ``sharding_key``, whatever its name was."""
        names, arrays = [], []
        for name in PRODUCER_COLUMNS:
            at = rows.schema.get_field_index(name)
            column = (keys and keys.keys) if name == "sharding_key" else rows.column(at) if at >= 0 else None
            if column is not None:
                names.append(name)
                arrays.append(column)
        return pa.RecordBatch.from_arrays(arrays, names=names)

    def _queues_of(self, topic: str) -> list[MessageQueue]:
        queues = self._queues.get(topic)
        if queues is None:
            proposed = self._proposed
            if self._plan.topic is not None:
                check_topic(topic, writing=True)
                proposed = target_queues(self._broker, topic, self._options)
            queues = self._queues[topic] = self._staging.targets(topic, proposed)
        return queues


def target_queues(broker: Broker, topic: str, options: SinkOptions) -> list[MessageQueue]:
    """Return the queues that rows go to. A missing topic is created if the options give its number of queues.

    Raises TopicError MISSING; QUEUE_COUNT if the topic's number of queues differs from the option although it was not resized, because
    keys would then go to other queues; NO_SUCH_QUEUE for a read-only topic.
    """
    count = options.topic_queue_nums
    try:
        queues = broker.log.targets(topic)
    except TopicError:
        if count is None:
            raise
        try:
            broker.admin.create_topic(topic, count, compression=options.compression or DEFAULT_COMPRESSION)
        except TopicError as error:
            if error.sub != TopicCondition.EXISTS:
                raise
        queues = broker.log.targets(topic)
    whole = count is None or len(queues) == count or broker.capabilities.atomic_resize
    if not whole and not broker.log.resizes([topic]):
        raise TopicError(
            TopicCondition.QUEUE_COUNT,
            f"topic {topic!r} has {len(queues)} queues, but option topicQueueNums says {count}: with another number, keys go to other queues. "
            "Correct the option, or over RocketMQ wait for the broker that is away",
        )
    return queues


# -- keys that occur in several tasks of a batch, and therefore have no order ------------------------------------------------


class SeenKeys:
    """The keys of one task as sorted unique hashes. The task sends them as bytes in its commit message."""

    def __init__(self) -> None:
        self._unique: Words = np.empty(0, dtype=np.uint64)
        self._waiting: list[Words] = []
        self._count = 0
        #: Index: the last bits of a hash. Value: an added hash with these bits; at first, a value whose last bits differ from the index.
        self._recent: Words = np.arange(1, _RECENT + 1, dtype=np.uint64)

    def add(self, hashes: Words) -> None:
        # Keys repeat, and a lookup is several times faster than sorting.
        mask = np.uint64(_RECENT - 1)
        new = _distinct(hashes[self._recent[hashes & mask] != hashes])
        self._recent[new & mask] = new
        self._waiting.append(new)
        self._count += len(new)
        if self._count > _GATHER:
            self._merge()

    def _merge(self) -> None:
        self._unique = _distinct(np.concatenate([self._unique, *self._waiting]))
        self._waiting, self._count = [], 0

    def to_bytes(self) -> bytes:
        self._merge()
        return self._unique.tobytes()


def _distinct(hashes: Words) -> Words:
    """Return the sorted unique hashes, as np.unique does. (That takes 3 times as long if keys repeat and 12 times if they do not.)"""
    every = np.sort(hashes)
    return every[np.concatenate(([True], every[1:] != every[:-1]))] if len(every) else every


def count_shared(tasks: Sequence[bytes]) -> int:
    """Return how many keys occur in more than one of the tasks."""
    hashes_by_task = [np.frombuffer(keys, dtype=np.uint64) for keys in tasks if keys]
    if len(hashes_by_task) < 2:
        return 0
    every = np.sort(np.concatenate(hashes_by_task))
    same = every[1:] == every[:-1]
    # A key in three tasks makes two pairs of equal neighbours, but counts once.
    return int(np.count_nonzero(same & ~np.concatenate(([False], same[:-1]))))
