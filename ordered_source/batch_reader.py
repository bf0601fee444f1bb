"""The reader for ``spark.read``. It never locks a queue and never moves a group's offsets."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from ordered_source import partition_reader, plan
from ordered_source.columns import arrow_schema, chosen_columns
from ordered_source.partition_reader import QueuePartition
from orderedmq.broker import Broker, Log, QueueBounds
from orderedmq.conditions import OffsetCondition
from orderedmq.connections import reach
from orderedmq.errors import DataLossError, OffsetError, queue_deleted
from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.options.parse import parse
from orderedmq.options.source import SourceOptions, StartingOffsets
from orderedmq.options.values import EARLIEST
from orderedmq.spark_support import concise_calls

logger = logging.getLogger("orderedmq")


@concise_calls
class BatchReader(DataSourceReader):
    """Reads one partition per queue with a non-empty range; the ranges are fixed when Spark plans the read."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self.options = parse(SourceOptions, options, streaming=False)
        self.columns = chosen_columns(schema)
        self.schema = schema
        with reach(self.options.endpoint) as broker:
            plan.check(broker, self.options)

    def partitions(self) -> Sequence[InputPartition]:
        options = self.options
        with reach(options.endpoint) as broker:
            topics = plan.topics(broker, options)
            anchors = {topic.name: topic.incarnation for topic in topics}
            spans = self._spans(broker, plan.queues_of(broker, topics))
            identity = broker.identity
            generations = plan.generations(broker, self.columns, spans)
        out: list[InputPartition] = [
            QueuePartition(identity, queue, span.begin, span.end, None, anchors[queue.topic], False, None, generations[queue])
            for queue, span in spans.items()
            if span.messages
        ]
        # If the list were empty, Spark would make a partition itself and read it.
        return out or [InputPartition(None)]

    def _spans(self, broker: Broker, queues: Sequence[MessageQueue]) -> dict[MessageQueue, OffsetRange]:
        """Return the range of each queue that the options do not leave out.

        The bounds are read once, so that producers and queries of the group that run at the same time do not change the result. The
        group's offsets are read before the bounds, so that no offset is beyond the end. Offsets that later searches find are limited to
        these bounds. Raises DataLossError unless losses are accepted, OffsetError if options contradict each other.
        """
        options = self.options
        log = broker.log.reading(options.pull_settings)
        committed: Mapping[MessageQueue, int] = {}
        starting = options.starting
        if starting.kind == "committed":
            assert options.consumer_group is not None
            committed = broker.groups.offsets(options.consumer_group, queues)
            starting = options.never_committed
        bounds = broker.log.bounds(queues)
        read = []
        for queue in queues:
            if (options.ending.offsets or {}).get(queue) == EARLIEST:
                continue
            if queue in bounds:
                read.append(queue)
            else:
                self._fail_or_warn(queue_deleted(queue, "it was about to be read"))
        begins = plan.beginnings(log, starting, read, bounds, bounds)
        ends = plan.endings(log, options.ending, read, bounds, bounds)
        return {
            queue: self._span(log, queue, bounds[queue], committed.get(queue), begins[queue], ends[queue]) for queue in read
        }

    def _span(self, log: Log, queue: MessageQueue, at: QueueBounds, committed: int | None, begin: int, end: int) -> OffsetRange:
        end = min(end, at.max_offset)
        if committed is None:
            begin = min(begin, at.max_offset)
            if begin > end and _names_offset(self.options.starting, queue):
                raise OffsetError(
                    OffsetCondition.BEGIN_AFTER_END,
                    f"queue {queue} would be read from {begin} to {end}: {self.options.starting.option} is after endingOffsets or "
                    "endingTimestamp. Lower the start, or raise the end",
                )
        else:
            begin = committed
        if begin > end and begin <= at.max_offset:
            logger.warning(
                "no messages of queue %s are read: its start offset %d is beyond its end offset %d", queue, begin, end
            )
            return OffsetRange(begin, begin)
        begin, loss = plan.check_position(queue, begin, at, f"group {self.options.consumer_group!r}", log.tail_loss, end=end)
        if loss is not None:
            self._fail_or_warn(loss)
        return OffsetRange(begin, max(begin, end))

    def _fail_or_warn(self, error: DataLossError) -> None:
        plan.fail_or_warn(error, fail=self.options.fail_on_data_loss)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, QueuePartition):
            return iter(())
        return partition_reader.read(partition, self.options, self.columns, arrow_schema(self.schema))


def _names_offset(starting: StartingOffsets, queue: MessageQueue) -> bool:
    """Whether the options name the timestamp or the offset at which to begin the queue."""
    named = starting.offsets.get(queue) if starting.offsets is not None else None
    return starting.kind == "timestamp" or (starting.kind == "json" and named != EARLIEST)
