"""The batch reader: ``spark.read``. It never locks and never moves a group's offsets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from ordered_source import plan, task
from ordered_source.columns import chosen_columns
from ordered_source.task import QueuePartition
from orderedmq.broker import Broker
from orderedmq.connections import reach
from orderedmq.errors import OffsetError, aged_out
from orderedmq.model import MessageQueue
from orderedmq.source_options import SourceOptions


class BatchReader(DataSourceReader):
    """One partition per queue and non-empty range, fixed when the DataFrame is planned."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self.options = SourceOptions.parse(options, streaming=False)
        self.columns = chosen_columns(schema)
        self.schema = schema
        with reach(self.options.endpoint) as broker:
            plan.check(broker, self.options)

    def partitions(self) -> Sequence[InputPartition]:
        options = self.options
        with reach(options.endpoint) as broker:
            topics = plan.topics(broker, options)
            incarnations = {topic.name: topic.incarnation for topic in topics}
            queues = plan.queues_of(broker, topics)
            bounds = broker.log.bounds(queues)
            begins = self._begins(broker, queues)
            ends = plan.endings(broker.log.reading(options.reading), options.ending, queues, bounds)
            out: list[InputPartition] = []
            for queue in queues:
                begin, end = begins[queue], ends[queue]
                if begin > end:
                    raise OffsetError(
                        "BEGIN_AFTER_END", f"queue {queue} would be read from {begin} to {end}; change the options"
                    )
                if begin < min(bounds[queue].min_offset, end):
                    if options.fail_on_data_loss:
                        raise aged_out(queue, begin, min(bounds[queue].min_offset, end))
                    begin = min(bounds[queue].min_offset, end)
                if begin < end:
                    out.append(
                        QueuePartition(
                            options.endpoint,
                            broker.identity,
                            queue,
                            begin,
                            end,
                            None,
                            incarnations[queue.topic],
                            options.fail_on_data_loss,
                            options.pull_batch_size,
                            streaming=False,
                            matching=options.matching,
                            reading=options.reading,
                        )
                    )
            # Spark reads one partition of its own making when there is none.
            return out or [InputPartition(None)]

    def _begins(self, broker: Broker, queues: Sequence[MessageQueue]) -> dict[MessageQueue, int]:
        source = broker.log.reading(self.options.reading)
        bounds = source.bounds(queues)
        starting = self.options.starting
        if starting.kind != "committed":
            return plan.beginnings(source, starting, queues, bounds)
        assert self.options.consumer_group is not None
        known = broker.groups.offsets(self.options.consumer_group, queues)
        where = plan.never_committed(self.options)
        return {**plan.beginnings(source, where, queues, bounds), **known}

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, QueuePartition):
            return iter(())
        return task.read(partition, self.columns, to_arrow_schema(self.schema, timezone="UTC"))
