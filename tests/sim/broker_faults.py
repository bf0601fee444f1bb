"""Queries of a RocketMQ group whose broker restarts, is paused or is away, while members join, leave and die: one run per seed.

Each query is a loop of micro-batches around the real group session. It delivers a batch and commits it in one step. Checked are:

- no message of a queue is delivered before its predecessor;
- no message of a batch that Spark has committed is delivered again, unless another query took over from a run that was killed, failed
  or was paused for longer than a lock lives, or an exclusive query repeats a batch that another has processed in part; a query that is
  alone in its group never repeats one;
- a living query loses no lock to a query that joins;
- when faults have ended, all messages are delivered, and the group's offsets are at the ends of the queues.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any, Final, cast

from ordered_source.group_session import GroupSession, Session, open_session
from orderedmq.broker import Broker
from orderedmq.endpoint import ROCKETMQ
from orderedmq.errors import LockError, OrderedMQError
from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.options.parse import parse
from orderedmq.options.source import SourceOptions
from orderedmq.ownership.lock import LOCK_LIFE
from orderedmq.ownership.offsets import Checkpoint, ranges
from orderedmq.rocketmq.group.groups import RocketMQGroups
from tests.sim.rocketmq_world import ADDRESS, GROUP, TOPIC, Client, Killed, Process, Violation, World, virtual

STEPS: Final = 120


@dataclass(eq=False)
class Run:
    """One run of a query. ``bad``: it was killed or failed, or was paused for so long that others may have taken its queues."""

    query: str
    bad: bool = False


@dataclass(eq=False)
class Batch:
    """``repeated``: a former run of the query logged it."""

    run: Run
    repeated: bool
    committed: bool = False


@dataclass
class Lane:
    """The batches that delivered the messages of a queue, by offset."""

    batches: list[Batch] = field(default_factory=list)


class Query:
    """One streaming query: its checkpoint, and its present run if it is running."""

    def __init__(self, name: str, simulation: Simulation) -> None:
        self.name, self.simulation, self.world = name, simulation, simulation.world
        self.start = Checkpoint()
        self.logged: Checkpoint | None = None
        self.session: Session | None = None
        self.process = Process()
        self.run = Run(name)
        self.busy = False
        #: Whether the batch that runs was logged by a former run.
        self._repeats = False
        self._spans: dict[MessageQueue, OffsetRange] = {}

    @property
    def up(self) -> bool:
        return self.session is not None

    @property
    def owns(self) -> bool:
        return self.session is not None and bool(self.session.owner.owned)

    @property
    def can_step(self) -> bool:
        return not (self.busy or self.process.frozen or self.process.renewing)

    def step(self) -> None:
        self.busy = True
        try:
            if self.session is None:
                self._begin()
            elif self.logged is None:
                self._boundary(self.session)
            else:
                self._work(self.session)
        except OrderedMQError as error:
            self.simulation.note(f"{self.name} fails: {error}")
            if isinstance(error, LockError) and error.sub.value == "LOST" and self.simulation.alone:
                raise Violation(f"{self.name} lost a lock, although it is alone: {error}") from error
            self.run.bad = True
            self.end(clean=False)
        except Killed:
            self.end(clean=False)
        finally:
            self.busy = False

    def _begin(self) -> None:
        self.process, self.run = Process(), Run(self.name)
        self.simulation.note(f"{self.name} starts, {'repeats a batch' if self.logged else 'idle'}")
        client = cast(Any, Client(self.world, self.process, None))
        log: Any = SimpleNamespace()
        self.groups = RocketMQGroups(client, log)
        broker = cast(Broker, SimpleNamespace(groups=self.groups, capabilities=ROCKETMQ))
        self.session = open_session(broker, self.simulation.options, self.name)
        if self.logged is not None:
            spans, shared = ranges(self.start, self.logged), self.session.shared
            self.session.repeat(
                self.start, self.logged, [queue for queue, span in spans.items() if span.messages or not shared], {}
            )
            self._spans, self._repeats = self.session.owner.in_flight(), True

    def _boundary(self, session: Session) -> None:
        owner, world = session.owner, self.world
        session.boundary(self.start, world.queues, patient=False)
        queues = owner.unplaced().queues
        if queues:
            session.place(self.start, dict.fromkeys(queues, 0), self.simulation.ends, ())
        backlog = session.backlog({queue: self.simulation.ends[queue] for queue in owner.owned})
        counts = {queue: world.random.randint(1, span.messages) for queue, span in backlog.items() if span.messages}
        if counts or self.start.fresh:
            self.logged = session.plan(counts, {})
            self._spans, self._repeats = owner.in_flight(), False
            self.simulation.note(f"{self.name} plans {_short(self._spans)}")

    def _work(self, session: Session) -> None:
        world = self.world
        world.advance(world.random.choice((0.5, 0.5, 2.0, 12.0)))
        if self.process.dead:
            raise Killed
        # Tasks check their locks at the brokers.
        tokens = [session.owner.owned[queue].token for queue in self._spans if queue in session.owner.owned]
        if self.groups.stale([token for token in tokens if token is not None]):
            raise Killed
        session.raise_if_lost()
        batch = Batch(self.run, self._repeats)
        for queue, span in self._spans.items():
            self.simulation.deliver(batch, queue, span)
        if world.random.random() < self.simulation.deaths:
            self.simulation.note(f"{self.name} is killed before Spark commits")
            raise Killed
        batch.committed = True
        assert self.logged is not None
        self.start, self.logged = self.logged, None

    def end(self, *, clean: bool) -> None:
        """End the run: by a clean stop at a boundary, or by a failure or a kill."""
        session, self.session = self.session, None
        self.run.bad = self.run.bad or not clean
        if session is None:
            return
        try:
            if clean:
                assert isinstance(session, GroupSession)
                session.give_back(self.start)
            elif not self.process.dead:
                session.stop(terminated=True)
        except (OrderedMQError, Killed) as error:
            self.simulation.note(f"{self.name}: its stop fails: {error}")
            self.run.bad = True
        self._gone()

    def kill(self) -> None:
        self.run.bad = True
        self._gone()
        if not self.busy:
            self.session = None

    def _gone(self) -> None:
        self.process.dead = True
        self.world.renewals = [one for one in self.world.renewals if one._process is not self.process]
        for member in list(self.groups._member_clients.values()):
            self.world.broker.disconnected(cast(Client, member._client))


class Simulation:
    """The run of one seed. ``alone``: the group has one query. Such a query may be killed only while its broker is not."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.trace: list[str] = []
        self.alone = random.random() < 0.35
        self.shared = random.random() < 0.75
        self.deaths = random.choice((0.0, 0.0, 0.03))
        self.restarts = not (self.alone and self.deaths)
        self.world = World(random, queues=random.randint(2, 4))
        self.world.others = self._other_steps
        self.world.overlap = random.choice((0.0, 0.03, 0.1))
        self.ends = dict.fromkeys(self.world.queues, 0)
        self.lanes = {queue: Lane() for queue in self.world.queues}
        options = {"namesrvAddr": ADDRESS, "topic": TOPIC, "consumerGroup": GROUP, "lockTimeout": "300ms"}
        options["assignment"] = "shared" if self.shared else "exclusive"
        self.options = parse(SourceOptions, options, streaming=True)
        self.queries = [Query(name, self) for name in ("A" if self.alone else "ABC")]

    def note(self, text: str) -> None:
        self.trace.append(f"{self.world.now - 1000:8.1f}  {text}")

    def run(self) -> None:
        """Run the seed. Raises Violation."""
        logger = logging.getLogger("orderedmq")
        disabled, logger.disabled = logger.disabled, True
        try:
            with virtual(self.world):
                for _ in range(STEPS):
                    self._step()
                self._heal()
        finally:
            logger.disabled = disabled

    def deliver(self, batch: Batch, queue: MessageQueue, span: OffsetRange) -> None:
        before = self.lanes[queue].batches
        self.note(f"{batch.run.query} delivers {queue.queue_id}: {span.begin} to {span.end}")
        if span.begin > len(before):
            raise Violation(f"{queue}: {batch.run.query} delivers from {span.begin} on, but {len(before)} never came out")
        for earlier in before[span.begin : span.end]:
            other = earlier.run.query != batch.run.query
            if other and batch.repeated and not self.shared:
                # An exclusive query repeats a batch as a whole unless another query has processed all of it (Owner.replay).
                continue
            if earlier.committed and not (earlier.run.bad and (other or not self.alone)):
                raise Violation(f"{queue}: {batch.run.query} repeats {span.begin}, which {earlier.run.query} had committed")
        before[span.begin : span.end] = [batch] * span.messages

    # -- steps ---------------------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        kinds = (self._query_steps, self._produce, self._broker_fault, self._stop, self._pause, self._time)
        self.random.choices(kinds, (70, 12, 5, 4, 2, 7))[0]()

    def _query_steps(self) -> None:
        able = [query for query in self.queries if query.can_step]
        if able:
            self.random.choice(able).step()

    def _other_steps(self) -> None:
        """Take steps during a call of another query, but none that may wait for a lock, because the caller cannot continue meanwhile."""
        for _ in range(self.random.randint(0, 3)):
            able = [query for query in self.queries if query.can_step and (self.shared or query.owns)]
            if able:
                self.random.choice(able).step()

    def _produce(self) -> None:
        self.ends[self.random.choice(self.world.queues)] += self.random.randint(1, 4)

    def _time(self) -> None:
        self.world.advance(self.random.choice((1.0, 5.0, 20.0)))

    def _broker_fault(self) -> None:
        broker, away = self.world.broker, self.random.choice((2.0, 4.0, 8.0, 20.0, 35.0))
        restarts = self.restarts and self.random.random() < 0.7
        if not broker.up or (restarts and broker.would_forget_a_grant()):
            return
        self.note(f"the broker is {'killed' if restarts else 'paused'} for {away:.0f} s")
        if restarts:
            broker.kill()
        broker.up = False

        def back() -> None:
            self.note("the broker is back")
            broker.start() if restarts else setattr(broker, "up", True)
            if not any(query.busy or query.process.renewing for query in self.queries) and self.random.random() < 0.6:
                self._rush()

        self.world.later(away, back)

    def _rush(self) -> None:
        """Start a query and take a few steps before any renewal."""
        down = [query for query in self.queries if not query.up and query.can_step]
        if down:
            self.random.choice(down).step()
        for _ in range(self.random.randint(0, 8)):
            self._query_steps()

    def _stop(self) -> None:
        able = [query for query in self.queries if query.up and query.can_step and query.logged is None]
        if able:
            query = self.random.choice(able)
            self.note(f"{query.name} stops")
            query.busy = True
            query.end(clean=True)
            query.busy = False

    def _pause(self) -> None:
        able = [query for query in self.queries if query.up and query.can_step]
        if not able:
            return
        query, seconds = self.random.choice(able), self.random.choice((10.0, 35.0, 59.0, 75.0, 130.0))
        self.note(f"{query.name} is paused for {seconds:.0f} s")
        query.process.frozen = True
        query.run.bad = query.run.bad or seconds + 20 > LOCK_LIFE
        process = query.process
        self.world.later(seconds, lambda: setattr(process, "frozen", False))

    # -- the end -------------------------------------------------------------------------------------------------------------

    def _heal(self) -> None:
        """End all faults. The queries must then deliver everything."""
        self.note("everything heals")
        self.deaths = self.world.overlap = 0.0
        self.world.advance(140.0)
        staying = self.queries if self.shared else self.queries[:1]
        for query in self.queries:
            for _ in range(10):
                if query not in staying and query.up and query.logged is not None:
                    query.step()
            if query not in staying:
                query.end(clean=query.logged is None)
        for _ in range(60):
            for query in staying:
                query.step()
            self.world.advance(2.0)
            undone = self._undone()
            if not undone and all(query.logged is None for query in staying):
                return
        raise Violation(f"not everything is delivered and committed: {undone}")

    def _undone(self) -> dict[str, tuple[int, int, int]]:
        """Return each queue whose delivered messages and group offset are not at its end."""
        numbers = self.world.broker.numbers
        at = {queue: (len(self.lanes[queue].batches), numbers.get(queue, 0), end) for queue, end in self.ends.items()}
        return {str(queue): numbers for queue, numbers in at.items() if len(set(numbers)) > 1}


def _short(spans: dict[MessageQueue, OffsetRange]) -> str:
    return ", ".join(f"{queue.queue_id}: {span.begin} to {span.end}" for queue, span in spans.items()) or "nothing"


def violation(simulation: Simulation) -> str | None:
    """Run a simulation. Return the promise that it breaks, if there is one."""
    try:
        simulation.run()
    except Violation as error:
        return str(error)
    return None
