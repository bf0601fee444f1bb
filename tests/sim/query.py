"""A streaming query of the simulation: steps of Spark's micro-batch loop (tests/micro_batches.py) around the real reader.

The driver may outlive the source runner, whose death it notices at its next call. Tasks may outlive the driver.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import LongType, StructField, StructType

from ordered_source.partition_reader import QueuePartition
from ordered_source.stream_reader import StreamReader
from orderedmq.errors import OrderedMQError, SinkError
from orderedmq.listening.queue_engine import OrderPerQueue
from orderedmq.model import OffsetRange
from orderedmq.ownership.lock import LockToken
from orderedmq.ownership.owner import Owner
from tests.micro_batches import AnotherRun, Checkpoint, MicroBatches
from tests.sim.key_task import Around, Keys, KeyTask
from tests.sim.process import Killed, Network, Process
from tests.sim.sink import Run, Sink
from tests.sim.task import ListenerTask, Task
from tests.sim.world import GROUP, TOPIC, World

SCHEMA: Final = StructType([StructField("queue_offset", LongType())])


@dataclass(frozen=True)
class Kind:
    """The kind of queries in a world. ``atomic``: their sink is atomic; ``listener``: they run an orderly listener.

    ``keys``: the settings of order per key, or None for order per queue.
    """

    shared: bool
    strategy: str
    atomic: bool
    listener: bool
    max_rows: int | None
    batch_size: int
    auto_commit: bool
    keys: Keys | None = None


class Query:
    """One streaming query. ``twin``: the query on whose checkpoint this one is started a second time, by mistake."""

    def __init__(
        self, name: str, kind: Kind, world: World, network: Network, sink: Sink, random: Random, twin: Query | None = None
    ) -> None:
        self.strategy = kind.strategy
        self.name, self.kind, self.world, self.network, self.sink, self.random = name, kind, world, network, sink, random
        # Without retries, a message that is blamed for its batch becomes a dead letter immediately.
        most = 3 if kind.batch_size == 1 else 0
        self.settings = OrderPerQueue(kind.batch_size, suspend_current_queue_time_millis=1000, max_reconsume_times=most)
        #: With order per key: objects that its tasks share with the tasks of other queries.
        self.around: Around | None = None
        self.twin = twin
        self.checkpoint: Checkpoint = Checkpoint() if twin is None else twin.checkpoint
        #: Spark's state of the current or last run.
        self.batches: MicroBatches | None = None
        self.runs = 0
        #: Whether no other query uses the checkpoint.
        self.alone = twin is None
        if twin is not None:
            twin.alone = False
        self.phase = "down"
        self.busy = False
        #: Whether the query took a step after the last check of its invariants.
        self.moved = False
        self.checks = 0
        self.process: Process | None = None
        self.reader: StreamReader | None = None
        #: Some runs are availableNow: they end when they have nothing more to read.
        self.available_now = False
        self.staying = False
        #: Whether the last boundary found nothing to read.
        self.quiet = False
        self.tasks: list[Task] = []
        #: Tasks that outlived their driver, and the runs whose driver died during a publish.
        self.zombies: list[Task] = []
        self.late: list[Run] = []
        #: Former runs whose driver is dead and whose runner holds its locks, with the start offset of Spark's last request.
        self.former: list[tuple[Process, StreamReader, dict[str, Any] | None]] = []

    # -- what other objects see --------------------------------------------------------------------------------------------

    @property
    def up(self) -> bool:
        return self.phase != "down"

    @property
    def dead(self) -> bool:
        return self.phase == "down"

    @property
    def renewing(self) -> bool:
        return False

    @property
    def frozen(self) -> bool:
        return self.process is not None and self.process.frozen

    @property
    def owner(self) -> Owner | None:
        return None if self.reader is None or self.reader._run is None else self.reader._run.owner

    @property
    def run(self) -> Run:
        assert self.batches is not None
        name = self.name if self.twin is None else self.twin.name
        return Run(name, self.batches.logged - 1, self.batches.number)

    @property
    def committed(self) -> int:
        """The number of batches that the run knows to be committed."""
        return 0 if self.batches is None else self.batches.committed

    def options(self) -> dict[str, str]:
        out = {"path": f"/simulation/{self.name}", "topic": TOPIC, "consumerGroup": GROUP, "lockTimeout": "300ms"}
        if self.kind.shared:
            out |= {"assignment": "shared", "allocateMessageQueueStrategy": self.strategy}
        if self.kind.keys is not None:
            out |= {"parkingLot": "true", "parkingLotMaxMessages": str(self.kind.keys.room)}
        return out

    def connect(self) -> Process:
        assert self.process is not None
        if self.process.dead:
            raise Killed
        return self.process

    # -- Spark's loop ------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Take the query's next step, as its phase requires."""
        self.busy = self.moved = True
        try:
            getattr(self, f"_{self.phase}")()
        except OrderedMQError as error:
            self.world.note(f"{self.name}: fails: {type(error).__name__}.{error.sub}")
            if self.process is not None:
                # If there is no process, the query was killed while one of its tasks waited for the broker.
                self.leave(terminated=True)
        except AnotherRun as found:
            self.world.note(f"{self.name}: another run has {found}, so Spark ends this one")
            self.leave(terminated=True)
        except Killed:
            self.crash()
        finally:
            self.busy = False

    def _down(self) -> None:
        self.runs += 1
        self.reader = StreamReader(self.options(), SCHEMA)
        self.batches = batches = MicroBatches(self.reader, self.checkpoint)
        self.process = Process(self.network, f"{self.name}.{batches.number}")
        self.quiet = False
        self.available_now = not self.staying and self.random.random() < 0.1
        self.phase = "planned" if batches.in_flight else "idle"
        self.world.note(
            f"{self.name}: starts run {batches.number}{', availableNow' if self.available_now else ''}, {self.phase}"
        )
        if self.available_now:
            self.reader.prepareForTriggerAvailableNow()

    def _idle(self) -> None:
        batches = self._spark()
        most = None if self.staying else self.kind.max_rows
        end = batches.latest_offset(ReadAllAvailable() if most is None else ReadMaxRows(most))
        self.quiet = end is None
        if self.world.trace is not None:
            self.world.note(
                f"{self.name}: latestOffset → {'nothing' if end is None else _short(json.loads(end))}; {self._owns()}"
            )
        if end is None:
            if self.available_now:
                self.leave(terminated=True)
        elif batches.overtaken or self.random.random() >= self.network.mishap:
            batches.write_offset_log(end)
            batches.commit_source()
            self.phase = "planned"
        else:
            self.world.note(f"{self.name}: the planned offset is not logged")

    def _planned(self) -> None:
        partitions = self._spark().partitions()
        self.tasks = [self._task(one) for one in partitions if isinstance(one, QueuePartition)]
        if len({task.token.queue for task in self.tasks}) < len(self.tasks):
            self.world.fail(f"{self.name}: one queue has two partitions")
        self.phase = "running"
        if self.world.trace is not None:
            spans = " ".join(task.reads() for task in self.tasks)
            self.world.note(f"{self.name}: batch {self.run.batch} reads {spans or 'nothing'}")

    def _task(self, partition: QueuePartition) -> Task:
        span, token = OffsetRange(partition.begin, partition.end), partition.token
        assert token is not None
        lot, kind = partition.lot, self.kind
        empty = span.begin == span.end and (lot is None or lot.begin == lot.end)
        if empty or not 0 <= span.begin <= span.end <= self.world.ends[token.queue]:
            self.world.fail(f"{self.name}: {token.queue} was planned from {span.begin} to {span.end}")
        if self.world.resizing is not None:
            self.world.resizing.planned(self.name, token.queue, *span)
        if kind.keys is not None:
            assert lot is not None
            assert self.around is not None
            return KeyTask(self.world, self.sink, self.run, span, token, kind.keys, lot, self.around, staged=kind.atomic)
        if not kind.listener:
            return Task(self.world, self.sink, self.run, span, token, staged=kind.atomic)
        auto, staged = kind.auto_commit, kind.atomic
        return ListenerTask(self.world, self.sink, self.run, span, token, self.settings, auto=auto, staged=staged)

    def _running(self) -> None:
        waiting = [task for task in self.tasks if not task.done]
        if not waiting:
            self.phase = "publishing"
            return self._publishing()
        task = self.random.choice(waiting)
        if self.random.random() < self.network.mishap:
            self.world.note(f"{task}: another attempt")
            task.retry()
        task.step(self.random)
        return None

    def _publishing(self) -> None:
        if self.kind.atomic:
            try:
                self.network.call(self, f"publish batch {self.run.batch}", self.sink.publish, self.run)
            except SinkError as error:
                if self.alone:
                    self.world.fail(error.message)
                # The other run has committed the batch without the messages that this run worked on.
                raise
        self.world.note(f"{self.name}: batch {self.run.batch} is published or delivered")
        self.phase = "committing"
        if self.kind.keys is not None and self.random.random() < 10 * self.network.mishap:
            self.world.note(f"{self.name}: is killed before Spark commits batch {self.run.batch}")
            raise Killed

    def _committing(self) -> None:
        assert self.batches is not None
        self.batches.write_commit_log()
        self.tasks = []
        self.phase = "idle"
        self.world.note(f"{self.name}: Spark commits batch {self.committed - 1}")

    def _spark(self) -> MicroBatches:
        """The run's loop. Raises Killed if the source runner is dead, which Spark notices at its next call."""
        assert self.process is not None
        assert self.batches is not None
        if self.process.dead:
            raise Killed
        return self.batches

    # -- ends of a run -----------------------------------------------------------------------------------------------------

    def leave(self, *, terminated: bool) -> None:
        """Stop the query, or end it after a failure. If ``terminated``, Spark ends the runner; otherwise Spark itself died."""
        process, reader, busy = self.process, self.reader, self.busy
        assert process is not None
        assert reader is not None
        self._forsake(all_gone=not terminated)
        self.busy = True
        if process.renewing:
            # An orderly end would have to wait for the renewal to return.
            process.kill()
        try:
            if terminated:
                try:
                    reader._terminate(15, None)
                except SystemExit:
                    pass
            reader.stop()
        except (OrderedMQError, Killed):
            self.world.note(f"{self.name}: its runner ends and has not unlocked everything")
        self.busy = busy
        self._gone(process)

    def crash(self) -> None:
        """End the query without a ``stop``, because its runner or its driver died."""
        if self.process is not None:
            self._forsake(all_gone=False)
            self._gone(self.process)

    def kill(self) -> None:
        """Kill the driver. A publish that it has requested may still take effect."""
        if self.phase == "publishing" and self.random.random() < 0.5:
            self.late.append(self.run)
        self.crash()

    def orphan(self) -> None:
        """Kill the driver without its runner noticing, because the runner is stopped or too slow."""
        process, reader = self.process, self.reader
        assert process is not None
        assert reader is not None
        if self.phase == "publishing" and self.random.random() < 0.5:
            self.late.append(self.run)
        self._forsake(all_gone=False)
        process.frozen = True
        assert self.batches is not None
        asked = self.batches.start if self.phase == "idle" and reader._connected is not None else None
        self.former.append((process, reader, asked))
        self.process = self.reader = None
        self.phase = "down"

    def former_ends(self) -> None:
        """End a former run: kill it, or let it finish Spark's last call and find Spark dead."""
        process, reader, asked = self.former.pop(0)
        if self.random.random() < 0.5:
            self.world.note(f"{process.name}: the former run is killed")
            process.kill()
            return
        self.world.note(f"{process.name}: the former run continues, and ends")
        process.frozen = False
        try:
            if asked is not None and self.random.random() < 0.5:
                reader.latestOffset(asked, ReadAllAvailable())
        except (OrderedMQError, Killed) as error:
            self.world.note(f"{process.name}: {error!r}")
        try:
            reader.stop()
        except (OrderedMQError, Killed):
            self.world.note(f"{process.name}: the runner ends and has not unlocked everything")
        process.kill()

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
        """Step a task whose driver is dead."""
        task = self.random.choice(self.zombies)
        try:
            task.step(self.random)
        except OrderedMQError as error:
            self.world.note(f"{task} without a driver fails: {error.sub}")
            task.done = True
        else:
            self.world.note(f"{task} without a driver is at {task.position}")
        if task.done or self.random.random() < 0.1:
            self.zombies = [one for one in self.zombies if one is not task]

    def late_publish(self) -> None:
        run = self.late.pop()
        try:
            self.sink.publish(run)
        except OrderedMQError as error:
            self.world.note(f"{self.name}: a late publish of batch {run.batch} is refused: {error.sub}")
        else:
            self.world.note(f"{self.name}: late publish of batch {run.batch} of run {run.number}")

    # -- checks ------------------------------------------------------------------------------------------------------------

    def invariants(self) -> None:
        self.moved = False
        owner = self.owner
        self.checks += 1
        # Check less often if there are parking lots, because they double the number of queues and so the cost of a check.
        if owner is not None and (self.kind.keys is None or self.checks % 3 == 0):
            owner._check()
        for task in self.tasks:
            task.invariants()

    def at_work(self, token: LockToken) -> bool:
        """Whether a task works on a queue under this token. Tasks that only repeat published messages do not count."""

        def repeats(task: Task) -> bool:
            return task.staged or not self.alone

        return any(
            task.token == token and task.checked is not None and not task.done and (task.unpublished() or not repeats(task))
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

    return f"next {of('next')} entered {of('entered') or '-'} gen {of('gen')}"
