"""The writers that Spark calls on the driver. At the end of a batch they publish or discard the batch.

With Capabilities.atomic_publish, the rows become visible together, or are deleted before anybody sees them. Otherwise readers see
rows as soon as the tasks send them, and the rows cannot be deleted.
"""

from __future__ import annotations

import logging
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from ordered_sink.columns import Plan, plan_columns
from ordered_sink.writer import Written, choose_again, count_shared, target_queues, write
from orderedmq.broker import Broker, Published
from orderedmq.conditions import MessageCondition, SinkCondition, StoreCondition
from orderedmq.connections import reach
from orderedmq.errors import MessageError, OrderedMQError, SinkError, StoreError
from orderedmq.model import DEFAULT_COMPRESSION, MessageQueue
from orderedmq.options.parse import parse
from orderedmq.options.sink import NO_KEY, SinkOptions
from orderedmq.routing.selector import selector
from orderedmq.spark_support import concise_calls

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter as ArrowStreamWriter
else:

    class ArrowStreamWriter(DataSourceStreamWriter, DataSourceArrowWriter):
        """Each release of Spark passes record batches to such a class, also in a stream. Those after 4.0 have another class for it."""


logger = logging.getLogger("orderedmq")

#: The module that Spark loads only in the processes that commit and abort micro-batches.
COMMITTER: Final = "pyspark.sql.worker.python_streaming_sink_runner"


class _Planned:
    """The checked options and columns, the store's identity, the topic's queues, and the job's name. Both writers use this class.

    The queues are chosen here, so that all tasks and attempts of the job spread their rows over the same ones. Tasks refuse a store with
    another identity, for example a store on another machine. Spark makes one writer for all tasks of a job, and another writer for each
    job that writes the same batch again.
    """

    def __init__(
        self, options: Mapping[str, str], schema: StructType, overwrite: bool, *, streaming: bool, for_tasks: bool = True
    ) -> None:
        if overwrite:
            raise SinkError(
                SinkCondition.MODE,
                "a queue cannot be overwritten, and complete mode would send every row again in each batch. Use outputMode('append') in a "
                "stream, mode('append') in a batch",
            )
        self.options = parse(SinkOptions, options, streaming=streaming)
        self.plan: Plan = plan_columns(schema, self.options)
        self.streaming = streaming
        # Load a user's selector function here, so that a mistake is reported before any task starts.
        selector(self.options.selector, 0)
        self.identity = ""
        #: The queues of option topic. Empty if a column names the topics.
        self.queues: Sequence[MessageQueue] = ()
        if for_tasks:
            self._connect()
        self.job = uuid.uuid4().hex

    def _connect(self) -> None:
        """Connect to the broker, and call `_prepare`."""
        with reach(self.options.endpoint) as broker:
            self._prepare(broker)

    def _prepare(self, broker: Broker) -> None:
        """Check the broker's abilities, create the topic if it is missing and the options allow that, and choose its queues."""
        if self.options.topic is not None:
            try:
                self.queues = target_queues(broker, self.options.topic, self.options)
            except StoreError as error:
                if error.sub != StoreCondition.MISSING or self.options.topic_queue_nums is None:
                    raise
                broker.admin.create_topic(
                    self.options.topic,
                    self.options.topic_queue_nums,
                    compression=self.options.compression or DEFAULT_COMPRESSION,
                )
                self.queues = target_queues(broker, self.options.topic, self.options)
        self.identity = broker.identity

    def write(self, rows: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return write(rows, self.options, self.plan, self.identity, self.job, self.queues, streaming=self.streaming)

    def publish(self, messages: Sequence[WriterCommitMessage | None]) -> Published | None:
        """Publish the batch. Return what became visible, or None if no task sent a commit message."""
        written = [message for message in messages if isinstance(message, Written)]
        if not written:
            return None
        self._check_keys(written)
        self._warn(written)
        with reach(self.options.endpoint, identity=written[0].identity) as broker:
            return broker.outbox.publish(
                written[0].batch,
                [message.receipt for message in written],
                # A batch write in foreachBatch may be one of several outputs, so the offsets move only at the end of the micro-batch.
                move_offsets=self.streaming,
                skip_differing_replay=self.options.on_replay_differs == "skip",
                again=partial(choose_again, self.options, self.plan, written[0].batch),
            )

    def discard(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Delete the rows that the tasks have staged, if possible. It raises nothing, because Spark must show why the batch failed."""
        written = [message for message in messages if isinstance(message, Written)]
        if written:
            try:
                with reach(self.options.endpoint, identity=written[0].identity) as broker:
                    broker.outbox.discard([message.receipt for message in written])
            except OrderedMQError as error:
                logger.warning("the rows of an aborted batch could not be deleted now, but will be deleted later: %s", error)

    def _check_keys(self, written: Sequence[Written]) -> None:
        if self.options.on_key_conflict == "ignore":
            return
        # Two attempts of one task have the same keys. The first attempt counts, as it does for the broker.
        tasks = {message.receipt.partition: message.keys for message in reversed(written)}
        conflicts = count_shared(list(tasks.values()))
        if not conflicts:
            return
        why = f"{conflicts} sharding keys occur in more than one task of the batch, so their messages have no defined order"
        if self.options.on_key_conflict == "error":
            # No row is visible yet, because the options accept "error" only if publishing is atomic.
            what = (
                "No row of the batch became visible. Route the rows first (ordered_sink.route(df, order_by=...)), or set "
                "onKeyConflict=warn or ignore if order within a batch does not matter"
            )
            raise SinkError(SinkCondition.KEY_CONFLICT, f"{why}. {what}")
        atomic = self.options.endpoint.capabilities.atomic_publish
        rows = "They are published nevertheless" if atomic else "They were sent before this could be known"
        what = (
            f"{rows}. Route the rows first (ordered_sink.route(df, order_by=...)), or set onKeyConflict=ignore if order within a batch does "
            "not matter"
        )
        logger.warning("%s", SinkError(SinkCondition.KEY_CONFLICT, f"{why}. {what}"))

    def _warn(self, written: Sequence[Written]) -> None:
        """Log a warning, once per batch, about rows without a key and rows with several tags."""
        # If a task had two attempts, only one of them counts.
        tasks = {message.receipt.partition: message for message in written}.values()
        rows, null_keys, tags = (sum(getattr(task, name) for task in tasks) for name in ("rows", "null_keys", "several_tags"))
        if null_keys:
            to = (
                "go to the queues in turn"
                if self.options.endpoint.capabilities.atomic_publish
                else "go to queues by their content"
            )
            what = f"{null_keys} of {rows} rows have no key (column {self.plan.key!r} is null): they {to} and have no order among themselves"
            logger.warning(
                "%s",
                MessageError(
                    MessageCondition.NULL_KEY, f"{what}. Filter them out, or write them separately with shardingKey={NO_KEY}"
                ),
            )
        if tags:
            what = f"{tags} of {rows} rows have a comma or || in column 'tags': a message has only one tag, and no filter matches such a text"
            logger.warning(
                "%s",
                MessageError(
                    MessageCondition.SEVERAL_TAGS, f"{what}. Write one tag, and put further ones into keys or properties"
                ),
            )


@concise_calls
class StreamWriter(ArrowStreamWriter):
    """The sink of one streaming query. It writes each (query, micro-batch) once."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        # Spark makes another writer in another process for each commit and abort. That writer must not connect here: if the broker is
        # away, the abort after a failed commit would fail too, and Spark would then show neither error, only "Writing job failed".
        self._planned = _Planned(options, schema, overwrite, streaming=True, for_tasks=COMMITTER not in sys.modules)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._planned.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002
        self._planned.publish(messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002
        self._planned.discard(messages)


@concise_calls
class BatchWriter(DataSourceArrowWriter):
    """A batch write. With (txnAppId, txnVersion), rows are written only once for each pair.

    If publishing is atomic, all rows are written or none.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        self._planned = _Planned(options, schema, overwrite, streaming=False)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._planned.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._planned.publish(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._planned.discard(messages)
