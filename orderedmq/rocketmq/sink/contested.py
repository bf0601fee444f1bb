"""At the commit, sends rows that are missing because several tasks took the same message for one of their rows. Uses no sockets.

When a batch is written again with other partitions, its tasks find messages of an earlier run. Tasks that have rows with equal content
may take the same message. The commit reads such messages from the queue, repeats each for every task that took it, and writes the
copies like the rows of one more task. Of rows with equal content, the writer finds as many as there are messages, and sends the
rest. An interrupted commit is repeated in the same way as a task.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from orderedmq.conditions import DataLossCondition
from orderedmq.errors import DataLossError
from orderedmq.model import PRODUCER_COLUMNS
from orderedmq.rocketmq.sink.queue_writer import QueuePort, QueueWriter
from orderedmq.rows.message_rows import normalise


def settle(port: QueuePort, work: QueueWriter, where: str, taken: Mapping[int, int]) -> None:
    """Send rows until the queue has as many messages as the tasks have rows.

    ``taken``: offsets of messages, and how many tasks took each message for one of their rows. ``work`` writes to the port for a
    partition of the same run that no task has. ``where`` names the queue and batch in errors. Raises DataLossError AGED_OUT if a
    message was deleted after a task took it, and the errors of `QueueWriter.write`.
    """
    offsets = np.array(sorted(taken), dtype=np.int64)
    counts = np.array([taken[offset] for offset in offsets.tolist()])
    read = rows = 0
    for batch in port.read(int(offsets[0]), int(offsets[-1]) + 1):
        _, rows_of_batch, chosen = np.intersect1d(batch.column("queue_offset").to_numpy(), offsets, return_indices=True)
        names = [name for name in PRODUCER_COLUMNS if name in batch.schema.names]
        again = batch.select(names).take(pa.array(np.repeat(rows_of_batch, counts[chosen])))
        work.write(normalise(again, where), rows)
        read, rows = read + len(rows_of_batch), rows + again.num_rows
    if read < len(offsets):
        raise DataLossError(
            DataLossCondition.AGED_OUT,
            f"{len(offsets) - read} messages of {where}, which an earlier attempt sent, were deleted by the broker before the batch was "
            "committed, so rows with their content may be missing. Let the broker keep messages for longer (fileReservedTime), and start "
            "the query again",
        )
