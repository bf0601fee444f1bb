"""The atomic sink of the simulation, by the rules of the outbox: publish shows a batch's rows and moves its sources' offsets at once."""

from __future__ import annotations

from dataclasses import dataclass, field

from orderedmq.core.lock import LockToken
from orderedmq.errors import SinkError
from orderedmq.model import MessageQueue, OffsetRange
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
    """``registered``: what the tasks of each run have read; ``records``: the batches that the sink knows."""

    world: World
    registered: dict[Run, Sources] = field(default_factory=dict)
    records: dict[tuple[str, int], dict[MessageQueue, OffsetRange]] = field(default_factory=dict)

    def register(self, run: Run, span: OffsetRange, proof: LockToken) -> None:
        self.registered.setdefault(run, {})[proof.queue] = (span, proof)

    def publish(self, run: Run) -> None:
        """Raises LockError LOST for a stale epoch, SinkError REPLAY_DIFFERS."""
        sources = self.registered.get(run, {})
        known = self.records.get((run.query, run.batch))
        if known is not None:
            for queue, (span, _) in sources.items():
                then = known.get(queue)
                # A replay may lack queues, never end elsewhere.
                if then is None or not then.begin <= span.begin <= span.end == then.end:
                    raise SinkError("REPLAY_DIFFERS", f"batch {run.batch} of {run.query}: {queue} had {then}, now {span}")
            return
        for _, proof in sources.values():
            self.world.require_current(proof)
        self._require_new(run, sources)
        self.records[run.query, run.batch] = {queue: span for queue, (span, _) in sources.items()}
        name = {"query": run.query, "run": run.number, "batch": run.batch}
        for queue, (span, proof) in sources.items():
            self.world.accepted(proof)
            read = {"event": "read", **name, "group": GROUP, "queue": str(queue), "epoch": proof.epoch}
            self.world.history.append({**read, "begin": span.begin, "end": span.end})
        self.world.history.append({"event": "publish", **name, "accepted": True})
        for queue, (span, proof) in sources.items():
            self.world.ledger.out(run.query, proof, span)
            self.world.forward(queue, span.end)

    def _require_new(self, run: Run, sources: Sources) -> None:
        for queue, (span, _) in sources.items():
            if self.world.group_offsets.get(queue, 0) <= span.begin:
                continue
            for (query, batch), record in self.records.items():
                then = record.get(queue)
                if query == run.query and then is not None and span.begin < then.end and then.begin < span.end:
                    raise SinkError("REPLAY_DIFFERS", f"batch {run.batch} of {run.query}: {queue} {span} was in batch {batch}")
