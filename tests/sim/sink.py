"""The simulation's atomic sink. As in the embedded outbox, one step publishes a batch and moves the offsets of its source queues."""

from __future__ import annotations

from dataclasses import dataclass, field

from orderedmq.conditions import SinkCondition
from orderedmq.errors import SinkError
from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.ownership.lock import LockToken
from tests.sim.world import GROUP, World

Sources = dict[MessageQueue, tuple[OffsetRange, LockToken]]


@dataclass(frozen=True)
class Run:
    """One run of one micro-batch of a query."""

    query: str
    batch: int
    number: int


@dataclass
class Sink:
    """Publishes batches. ``registered``: the ranges read by the tasks of each run; ``records``: the published batches."""

    world: World
    registered: dict[Run, Sources] = field(default_factory=dict)
    records: dict[tuple[str, int], dict[MessageQueue, OffsetRange]] = field(default_factory=dict)

    def register(self, run: Run, span: OffsetRange, token: LockToken) -> None:
        self.registered.setdefault(run, {})[token.queue] = (span, token)

    def publish(self, run: Run) -> None:
        """Publish the batch of ``run``, unless it was published before. Raises LockError LOST, SinkError REPLAY_DIFFERS."""
        sources = self.registered.get(run, {})
        known = self.records.get((run.query, run.batch))
        if known is not None:
            for queue, (span, _) in sources.items():
                then = known.get(queue)
                # A repeated batch may lack queues, but its ranges must end at the same offsets.
                if then is None or not then.begin <= span.begin <= span.end == then.end:
                    raise SinkError(
                        SinkCondition.REPLAY_DIFFERS, f"batch {run.batch} of {run.query}: {queue} had {then} and now has {span}"
                    )
            return
        for _, token in sources.values():
            self.world.require_current(token)
        self._require_new(run, sources)
        self.records[run.query, run.batch] = {queue: span for queue, (span, _) in sources.items()}
        name = {"query": run.query, "run": run.number, "batch": run.batch}
        for queue, (span, token) in sources.items():
            self.world.accepted(token)
            read = {"event": "read", **name, "group": GROUP, "queue": str(queue), "epoch": token.epoch}
            self.world.history.append({**read, "begin": span.begin, "end": span.end})
        self.world.history.append({"event": "publish", **name, "accepted": True})
        for queue, (span, token) in sources.items():
            self.world.ledger.out(run.query, token, span)
            self.world.forward(queue, span.end)
        if self.world.keys is not None:
            self.world.keys.moved([token for _, token in sources.values()])

    def _require_new(self, run: Run, sources: Sources) -> None:
        for queue, (span, _) in sources.items():
            if self.world.group_offsets.get(queue, 0) <= span.begin:
                continue
            for (query, batch), record in self.records.items():
                then = record.get(queue)
                if query == run.query and then is not None and span.begin < then.end and then.begin < span.end:
                    raise SinkError(
                        SinkCondition.REPLAY_DIFFERS,
                        f"batch {run.batch} of {run.query}: {span} of {queue} was in batch {batch}",
                    )
