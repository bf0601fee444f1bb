"""The writers that Spark plans with. At the end of a batch they publish or discard it, on the driver.

With Capabilities.atomic_publish, the rows become visible together, or disappear without a trace. Otherwise readers see them as
soon as the tasks send them, and they stay.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from ordered_sink.columns import Plan, plan_columns
from ordered_sink.keys import count_shared
from ordered_sink.writer import Written, target_queues, write
from orderedmq.broker import Broker, Published
from orderedmq.concise import concise_calls
from orderedmq.conditions import MessageCondition, SinkCondition, StoreCondition
from orderedmq.connections import reach
from orderedmq.errors import MessageError, OrderedMQError, RocketMQError, SinkError, StoreError
from orderedmq.model import DEFAULT_COMPRESSION
from orderedmq.options.sink import NO_KEY, SinkOptions
from orderedmq.routing.selector import selector

log = logging.getLogger("orderedmq")


class _Planned:
    """The checked options and columns, the store's identity, and the job's name. Both writers share this class.

    Tasks refuse a store with another identity, such as another machine's. Spark makes one writer for all tasks of a job, and
    another for each job that writes the same batch again.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool, *, streaming: bool) -> None:
        if overwrite:
            raise SinkError(
                SinkCondition.MODE,
                "a queue cannot be overwritten: use outputMode('append') in a stream, mode('append') in a batch; complete mode would send "
                "every row again in each batch",
            )
        self.options = SinkOptions.parse(options, streaming=streaming)
        self.plan: Plan = plan_columns(schema, self.options)
        self.streaming = streaming
        # A user's function is loaded here once, so that a mistake shows before any task starts.
        selector(self.options.selector, 0)
        with reach(self.options.endpoint) as broker:
            try:
                self.identity = self._prepare(broker)
            except RocketMQError as error:
                # A Proxy that checks accounts refuses even routes, and names one right.
                if error.denied and self.options.topic is not None:
                    identified = streaming or self.options.txn_app_id is not None
                    broker.outbox.require_rights(self.options.topic, self.options.sink_group, identified=identified)
                raise
        self.job = uuid.uuid4().hex

    def _prepare(self, broker: Broker) -> str:
        """Check what the broker can do, make the topic if it is missing and may be made, and return the broker's identity."""
        if self.plan.delays:
            broker.outbox.require_delays(self.plan.delays, self.options.topic)
        if self.options.trace_topic is not None:
            broker.traced(self.options.trace_topic)
        if self.options.topic is not None:
            try:
                target_queues(broker, self.options.topic, self.options)
            except StoreError as error:
                if error.sub != StoreCondition.MISSING or self.options.topic_queue_nums is None:
                    raise
                broker.admin.create_topic(
                    self.options.topic,
                    self.options.topic_queue_nums,
                    compression=self.options.compression or DEFAULT_COMPRESSION,
                )
        return broker.identity

    def write(self, rows: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return write(rows, self.options, self.plan, self.identity, self.job, streaming=self.streaming)

    def publish(self, messages: Sequence[WriterCommitMessage | None]) -> Published | None:
        """Publish the batch and return what became visible; None if no task sent a message."""
        written = [message for message in messages if isinstance(message, Written)]
        if not written:
            return None
        self._check_keys(written)
        self._warn(written)
        with reach(self.options.endpoint, identity=self.identity, seen_here=True) as broker:
            return broker.outbox.publish(
                written[0].batch,
                [message.receipt for message in written],
                # A batch write inside foreachBatch is one of several outputs: the offsets move at the end of the batch.
                move_offsets=self.streaming,
                skip_differing_replay=self.options.on_replay_differs == "skip",
            )

    def discard(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Delete what the tasks have staged, as far as that is possible. Raise nothing, or Spark would not show why the batch failed."""
        receipts = [message.receipt for message in messages if isinstance(message, Written)]
        if receipts:
            try:
                with reach(self.options.endpoint, identity=self.identity, seen_here=True) as broker:
                    broker.outbox.discard(receipts)
            except OrderedMQError as error:
                log.warning("the rows of an aborted batch could not be deleted now, and are deleted later: %s", error)

    def _check_keys(self, written: Sequence[Written]) -> None:
        if self.options.on_key_conflict == "ignore":
            return
        # Two attempts of one task have the same keys. The first one counts, as it does for the broker.
        tasks = {message.receipt.partition: message.keys for message in reversed(written)}
        conflicts = count_shared(list(tasks.values()))
        if not conflicts:
            return
        why = (
            f"{conflicts} sharding keys occur in more than one task of the batch, so their messages have no defined order: route the rows "
            "first (ordered_sink.route(df, order_by=...))"
        )
        if self.options.on_key_conflict == "error":
            # This is true because the options accept "error" only where publishing is atomic.
            what = "or set onKeyConflict=warn or ignore if order within a batch does not matter; no row of the batch became visible"
            raise SinkError(SinkCondition.KEY_CONFLICT, f"{why}, {what}")
        atomic = self.options.endpoint.capabilities.atomic_publish
        rows = "they are published all the same" if atomic else "they were sent before this could be known"
        what = f"or set onKeyConflict=ignore if order within a batch does not matter; {rows}"
        log.warning("%s", SinkError(SinkCondition.KEY_CONFLICT, f"{why}, {what}"))

    def _warn(self, written: Sequence[Written]) -> None:
        """Warn, once per batch, of rows without a key and of rows with several tags."""
        # Of two attempts of one task, one counts.
        tasks = {message.receipt.partition: message for message in written}.values()
        rows, null_keys, tags = (sum(getattr(task, name) for task in tasks) for name in ("rows", "null_keys", "several_tags"))
        if null_keys:
            to = (
                "go to the queues in turn"
                if self.options.endpoint.capabilities.atomic_publish
                else "go to queues by their content"
            )
            what = f"{null_keys} of {rows} rows have no key (column {self.plan.key!r} is null): they {to} and have no order among each other"
            log.warning(
                "%s",
                MessageError(
                    MessageCondition.NULL_KEY, f"{what}; filter them out, or write them separately with shardingKey={NO_KEY}"
                ),
            )
        if tags:
            what = f"{tags} of {rows} rows have a comma or || in column 'tags': a message has one tag, and no filter finds this one"
            log.warning(
                "%s", MessageError(MessageCondition.SEVERAL_TAGS, f"{what}; write one tag, and more in keys or properties")
            )


@concise_calls
class StreamWriter(DataSourceStreamArrowWriter):
    """The sink of one streaming query. It writes each (query, micro-batch) once."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        self._planned = _Planned(options, schema, overwrite, streaming=True)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._planned.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002
        self._planned.publish(messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002
        self._planned.discard(messages)


@concise_calls
class BatchWriter(DataSourceArrowWriter):
    """A batch write, done once per (txnAppId, txnVersion) if these are given.

    If publishing is atomic, it writes all rows or none.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        self._planned = _Planned(options, schema, overwrite, streaming=False)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._planned.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._planned.publish(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._planned.discard(messages)
