"""Reads ahead for a look-back: pulls the messages where requests begin, many in one round trip.

A task that starts to write to a queue late in a batch walks back over the requests that other tasks have sent there (lookback.py). It
reads the pair of messages around the beginning of each request, which would need one round trip per request. Here the stamps of
sampled messages show where requests begin, and all messages at these places are pulled at the same time.

This is only an optimization: messages do not change, so a pair that was read ahead is the same as a pull would return. The caller pulls
each pair that was not read ahead, and all pairs after an error.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from orderedmq.errors import OrderedMQError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.codec.decode import decode
from orderedmq.rocketmq.codec.row_decoder import Unreadable
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.deadline import Deadline
from orderedmq.rocketmq.net.lane import Lane
from orderedmq.rocketmq.sink.message_stamp import COLUMNS, read_stamp
from orderedmq.rocketmq.wire.message_requests import PullResult, PullStatus
from orderedmq.rocketmq.wire.pull_frames import PullTemplate
from orderedmq.rocketmq.wire.rights import TOOLS_GROUP

#: Messages between two samples. A full request of small messages has some 4,000.
STRIDE: Final = 2048
#: Samples per round trip.
SAMPLES: Final = 64
#: Round trips after the samples. Each pulls the beginnings of requests that the messages of the previous round trip have shown.
_ROUNDS: Final = 4
#: Seconds for all round trips together.
_TIMEOUT: Final = 5.0


class Boundaries:
    """Pairs of adjacent messages of one queue that were read ahead. Used by one thread at a time."""

    def __init__(self, client: Client, queue: MessageQueue, sink: str) -> None:
        self._client = client
        self._queue = queue
        self._sink = sink
        self._pairs: dict[int, pa.RecordBatch] = {}
        self._asked = 0
        #: The lowest offset at which the beginning of a request was searched for; None before the first search.
        self._lowest: int | None = None

    def pair(self, begin: int) -> pa.RecordBatch | None:
        """Return the messages ``begin`` and ``begin`` + 1 with `message_stamp.COLUMNS`; None if they were not read ahead."""
        self._asked += 1
        # Usually only one request is skipped, so read ahead only when the caller asks for a second pair.
        if begin not in self._pairs and self._asked > 1 and (self._lowest is None or begin < self._lowest):
            try:
                self._read_ahead(begin)
            except (OrderedMQError, Unreadable):
                self._lowest = 0
        return self._pairs.pop(begin, None)

    def _read_ahead(self, begin: int) -> None:
        lowest = self._lowest = max(0, begin - SAMPLES * STRIDE)
        deadline = Deadline.after(_TIMEOUT)
        address = self._client.address(self._queue.topic, self._queue.broker_name, deadline, any_replica=True)
        lane = self._client.lane(address, deadline)
        try:
            template = PullTemplate(self._queue, TOOLS_GROUP, None, lane.account.current, lane.names)
            samples = [(offset, 1) for offset in range(begin - STRIDE, lowest, -STRIDE)]
            messages = self._pull(lane, template, [(begin, 2), *samples], deadline)
            asked: set[int] = set()
            for _ in range(_ROUNDS):
                new = {first - 1 for first in self._beginnings(messages) if lowest < first <= begin} - asked
                if not new:
                    break
                asked |= new
                messages = self._pull(lane, template, [(offset, 2) for offset in sorted(new)], deadline)
        finally:
            self._client.give_back(lane)

    def _pull(self, lane: Lane, template: PullTemplate, ranges: list[tuple[int, int]], deadline: float) -> pa.RecordBatch:
        """Return the messages of some ranges, and keep the pairs of adjacent ones. Raises OrderedMQError, Unreadable."""
        bodies = {}
        lane.ask(template, ranges, deadline)
        while lane.in_flight:
            for offset, _, result in lane.receive(1.0):
                if not isinstance(result, PullResult):
                    raise result
                if result.status is PullStatus.FOUND:
                    bodies[offset] = result.body
        parts = [memoryview(bodies[offset]) for offset in sorted(bodies)]
        batch, _ = decode(parts, COLUMNS, lane.names.spelled_queue(self._queue))
        offsets = batch.column("queue_offset").to_pylist()
        for row in range(len(offsets) - 1):
            if offsets[row + 1] == offsets[row] + 1:
                self._pairs[offsets[row]] = batch.slice(row, 2)
        return batch

    def _beginnings(self, messages: pa.RecordBatch) -> set[int]:
        """Return, for the sink's messages among these, the offsets at which their requests begin."""
        out = set()
        for offset, pairs in zip(messages.column("queue_offset").to_pylist(), messages.column("properties").to_pylist()):
            stamp = read_stamp({name: value or "" for name, value in pairs or ()}, self._sink)
            if stamp is not None:
                out.add(stamp._replace(offset=offset).begin)
        return out
