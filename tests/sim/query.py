"""A streaming query of the simulation: what its checkpoint keeps, and Spark's micro-batch loop around the real reader.

The driver may live on when the source runner dies: it notices with its next call. Tasks may live on when the driver is gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any, Final

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import LongType, StructField, StructType

from ordered_source.reader import StreamReader
from ordered_source.task import QueuePartition
from orderedmq.errors import OrderedMQError, SinkError
from orderedmq.listener import OrderlySettings
from orderedmq.lock import LockToken
from orderedmq.model import OffsetRange
from orderedmq.ownership import Owner
from tests.sim.process import Killed, Network, Process
from tests.sim.sink import Run, Sink
from tests.sim.task import ListenerTask, Task
from tests.sim.world import GROUP, TOPIC, World

SCHEMA: Final = StructType([StructField("queue_offset", LongType())])


@dataclass(frozen=True)
class Kind:
    """What the queries of a world are. ``atomic``: their sink is; ``listener``: what they do is to run one."""

    shared: bool
    strategy: str
    atomic: bool
    listener: bool
    max_rows: int | None
    batch_size: int
    auto_commit: bool


class Query:
    """``log`` and ``committed`` are Spark's checkpoint: the offset log, and how many batches the commit log has."""

    def __init__(self, name: str, kind: Kind, world: World, network: Network, sink: Sink, random: Random) -> None:
        self.strategy = kind.strategy
        self.name, self.kind, self.world, self.network, self.sink, self.random = name, kind, world, network, sink, random
        self.settings = OrderlySettings(kind.batch_size, suspend_current_queue_time_millis=1000, max_reconsume_times=3)
        self.log: list[dict[str, Any]] = []
        self.committed = 0
        self.runs = 0
        self.phase = "down"
        self.busy = False
        #: It has done something since its invariants were checked.
        self.moved = False
        self.process: Process | None = None
        self.reader: StreamReader | None = None
        #: Some runs end when they have nothing more to read.
        self.available_now = False
        self.staying = False
        #: The last boundary found nothing to read.
        self.quiet = False
        self.tasks: list[Task] = []
        #: Tasks that outlived their driver, and publishes that were under way.
        self.zombies: list[Task] = []
        self.late: list[Run] = []

    # -- what the others see -----------------------------------------------------------------------------------------------

    @property
    def up(self) -> bool:
        return self.phase != "down"

    @property
    def dead(self) -> bool:
        return self.phase == "down"

    @property
    def frozen(self) -> bool:
        return self.process is not None and self.process.frozen

    @property
    def owner(self) -> Owner | None:
        return None if self.reader is None else self.reader._owner

    @property
    def run(self) -> Run:
        return Run(self.name, len(self.log) - 1, self.runs)

    @property
    def start(self) -> dict[str, Any]:
        return self.log[self.committed - 1] if self.committed else {}

    def options(self) -> dict[str, str]:
        out = {"path": f"/simulation/{self.name}", "topic": TOPIC, "consumerGroup": GROUP, "lockTimeout": "300ms"}
        if self.kind.shared:
            out |= {"assignment": "shared", "allocateMessageQueueStrategy": self.strategy}
        return out

    def connect(self) -> Process:
        assert self.process is not None
        if self.process.dead:
            raise Killed
        return self.process

    # -- Spark's loop ------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """What this query does next."""
        self.busy = self.moved = True
        try:
            getattr(self, f"_{self.phase}")()
        except OrderedMQError as error:
            self.world.note(f"{self.name}: fails: {type(error).__name__}.{error.sub}")
            self.leave(terminated=True)
        except Killed:
            self.crash()
        finally:
            self.busy = False

    def _down(self) -> None:
        self.runs += 1
        self.process = Process(self.network, f"{self.name}.{self.runs}")
        self.reader = StreamReader(self.options(), SCHEMA)
        self.quiet = False
        self.available_now = not self.staying and self.random.random() < 0.1
        self.phase = "planned" if len(self.log) > self.committed else "idle"
        self.world.note(f"{self.name}: starts run {self.runs}{', availableNow' if self.available_now else ''}, {self.phase}")
        if self.available_now:
            self.reader.prepareForTriggerAvailableNow()

    def _idle(self) -> None:
        reader = self._runner()
        most = None if self.staying else self.kind.max_rows
        limit = ReadAllAvailable() if most is None else ReadMaxRows(most)
        start = self.start
        end = reader.latestOffset(start, limit)
        self.quiet = end == start
        if self.world.trace is not None:
            self.world.note(f"{self.name}: latestOffset → {'nothing' if self.quiet else _short(end)}; {self._owns()}")
        if self.quiet:
            if self.available_now:
                self.leave(terminated=True)
        elif self.random.random() >= self.network.mishap:
            self.log.append(end)
            self.phase = "planned"
        else:
            self.world.note(f"{self.name}: what was planned is not logged")

    def _planned(self) -> None:
        reader = self._runner()
        end = self.log[-1]
        start = self.log[-2] if len(self.log) > 1 else {}
        partitions = reader.partitions(start, end)
        self.tasks = [self._task(one) for one in partitions if isinstance(one, QueuePartition)]
        if len({task.proof.queue for task in self.tasks}) < len(self.tasks):
            self.world.fail(f"{self.name}: a queue has two partitions")
        self.phase = "running"
        if self.world.trace is not None:
            spans = " ".join(f"{task.proof.queue.queue_id}:{task.span.begin}-{task.span.end}" for task in self.tasks)
            self.world.note(f"{self.name}: batch {self.run.batch} reads {spans or 'nothing'}")

    def _task(self, partition: QueuePartition) -> Task:
        span, proof = OffsetRange(partition.begin, partition.end), partition.token
        assert proof is not None
        if not 0 <= span.begin < span.end <= self.world.ends[proof.queue]:
            self.world.fail(f"{self.name}: {proof.queue} is to be read from {span.begin} to {span.end}")
        kind = self.kind
        if not kind.listener:
            return Task(self.world, self.sink, self.run, span, proof, staged=kind.atomic)
        auto, staged = kind.auto_commit, kind.atomic
        return ListenerTask(self.world, self.sink, self.run, span, proof, self.settings, auto=auto, staged=staged)

    def _running(self) -> None:
        waiting = [task for task in self.tasks if not task.done]
        if not waiting:
            self.phase = "publishing"
            return self._publishing()
        task = self.random.choice(waiting)
        if self.random.random() < self.network.mishap:
            self.world.note(f"{task}: a further attempt")
            task.retry()
        task.step(self.random)
        return None

    def _publishing(self) -> None:
        if self.kind.atomic:
            try:
                self.network.call(self, f"publish batch {self.run.batch}", self.sink.publish, self.run)
            except SinkError as error:
                self.world.fail(error.message)
        self.world.note(f"{self.name}: batch {self.run.batch} is out")
        self.phase = "committing"

    def _committing(self) -> None:
        self.committed = len(self.log)
        self.tasks = []
        self.phase = "idle"
        self.world.note(f"{self.name}: Spark commits batch {self.committed - 1}")

    def _runner(self) -> StreamReader:
        assert self.process is not None
        assert self.reader is not None
        if self.process.dead:
            raise Killed
        return self.reader

    # -- the end -----------------------------------------------------------------------------------------------------------

    def leave(self, *, terminated: bool) -> None:
        """The query stops, or has failed: Spark asks the runner to end. ``terminated`` False: Spark itself is gone."""
        process, reader, busy = self.process, self.reader, self.busy
        assert process is not None
        assert reader is not None
        self._forsake(all_gone=not terminated)
        self.busy = True
        if process.renewing:
            # The runner would wait for the renewal to return.
            process.kill()
        try:
            if terminated:
                try:
                    reader._terminate(15, None)
                except SystemExit:
                    pass
            reader.stop()
        except (OrderedMQError, Killed):
            self.world.note(f"{self.name}: its runner ends without having given back everything")
        self.busy = busy
        self._gone(process)

    def crash(self) -> None:
        """The runner is dead, and the query fails for it; or the driver is."""
        if self.process is not None:
            self._forsake(all_gone=False)
            self._gone(self.process)

    def kill(self) -> None:
        """The driver dies; what it has asked for may still happen."""
        if self.phase == "publishing" and self.random.random() < 0.5:
            self.late.append(self.run)
        self.crash()

    def _gone(self, process: Process) -> None:
        process.kill()
        if self.process is process:
            self.process = self.reader = None
            self.phase = "down"

    def _forsake(self, *, all_gone: bool) -> None:
        tasks, self.tasks = self.tasks, []
        if self.phase == "running" and not all_gone and self.random.random() < 0.7:
            self.zombies += [task for task in tasks if not task.done and task.checked is not None]

    def late_task(self) -> None:
        """A task that nobody waits for goes on."""
        task = self.random.choice(self.zombies)
        try:
            task.step(self.random)
        except OrderedMQError as error:
            self.world.note(f"{task}, forsaken, fails: {error.sub}")
            task.done = True
        else:
            self.world.note(f"{task}, forsaken, is at {task.position}")
        if task.done or self.random.random() < 0.1:
            self.zombies = [one for one in self.zombies if one is not task]

    def late_publish(self) -> None:
        run = self.late.pop()
        try:
            self.sink.publish(run)
        except OrderedMQError as error:
            self.world.note(f"{self.name}: a late publish of batch {run.batch} is refused: {error.sub}")
        else:
            self.world.note(f"{self.name}: a late publish of batch {run.batch} of run {run.number}")

    # -- checks ------------------------------------------------------------------------------------------------------------

    def invariants(self) -> None:
        self.moved = False
        owner = self.owner
        if owner is not None:
            owner._check()
        for task in self.tasks:
            task.invariants()

    def at_work(self, proof: LockToken) -> bool:
        """Whether a task works on a queue under this token. One that repeats what was published before can add nothing."""
        out = self.world.group_offsets.get(proof.queue, 0)
        return any(
            task.proof == proof and task.checked is not None and not task.done and not (task.staged and task.span.end <= out)
            for task in (*self.tasks, *self.zombies)
        )

    def _owns(self) -> str:
        owner = self.owner
        if owner is None:
            return "owns nothing"
        shown = (
            f"{queue.queue_id}@{one.position}/{one.token and one.token.epoch}" for queue, one in sorted(owner.owned.items())
        )
        return "owns " + (" ".join(shown) or "nothing")


def _short(end: dict[str, Any]) -> str:
    def of(part: str) -> str:
        found = end.get(part, {}).get(TOPIC, {}).get("embedded", {})
        return " ".join(f"{number}:{offset}" for number, offset in found.items())

    return f"next {of('next')} entered {of('entered') or '-'} gen {of('gen')} reset {end.get('reset')}"
