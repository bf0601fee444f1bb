"""Simulates one seed: a few hundred random steps of queries, time and faults. Then faults end, and all queries must become idle."""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Final

from orderedmq.errors import OrderedMQError
from orderedmq.listening.key_engine import OrderPerKey
from orderedmq.ownership.lock import LOCK_LIFE, LockToken
from orderedmq.parking import HELD, AtSeek
from tests import checker
from tests.sim.key_judge import KeyJudge
from tests.sim.key_task import Around, Keys, KeyTask, Listener
from tests.sim.lots import Lots
from tests.sim.process import Caller, Network, Process, virtual
from tests.sim.query import Kind, Query
from tests.sim.resizing import QUEUES, Resizing
from tests.sim.sink import Sink
from tests.sim.task import ListenerTask
from tests.sim.world import TICK, Violation, World, message

STEPS: Final = 200
#: The maximum depth of nested steps, which other queries take while a call runs.
_DEPTH: Final = 3


@dataclass(frozen=True)
class Scenario:
    """The set-up of a seed. ``calm``: queries only start and stop, without faults, and no message may come out twice."""

    seed: int
    calm: bool
    members: int
    queues: int
    seeks: bool
    #: The last member has a different strategy from the others. Either this member or the others should be refused.
    stranger: bool
    #: The first query is sometimes started a second time on the same checkpoint.
    twin: bool
    kind: Kind
    #: The topic is resized often. Without seeks, after which a key's messages may come out in another order.
    resizes: bool = False

    @classmethod
    def resizing(cls, seed: int) -> Scenario:
        scenario = cls.of(seed)
        queues = random.Random(f"queues {seed}").randint(1, 4)
        return replace(scenario, queues=queues, seeks=False, resizes=True)

    @classmethod
    def of(cls, seed: int) -> Scenario:
        draw = random.Random(f"scenario {seed}")
        calm = draw.random() < 0.25
        kind = Kind(
            shared=draw.random() < 0.8,
            strategy=draw.choice(("AVG", "AVG_BY_CIRCLE", "CONSISTENT_HASH")),
            atomic=draw.random() < 0.5,
            listener=draw.random() < 0.4,
            max_rows=draw.choice((None, 3, 8)),
            batch_size=draw.choice((1, 1, 3)),
            auto_commit=draw.random() < 0.7,
        )
        seeks = not calm and draw.random() < 0.2
        stranger = kind.shared and draw.random() < 0.1
        members, queues = draw.randint(2, 4), draw.randint(3, 8)
        if kind.listener and not seeks:
            kind = replace(kind, keys=_keys(seed))
        if kind.keys is not None:
            # Use few queues, so that each has many messages and the lots cost less.
            queues = min(queues, 4)
            seeks = not calm and kind.keys.seeks
        return cls(seed, calm, members, queues, seeks, stranger, not calm and draw.random() < 0.25, kind)


def _keys(seed: int) -> Keys | None:
    """Draw the settings of order per key, or None, from a separate generator, so that the other draws do not depend on them."""
    draw = random.Random(f"lots {seed}")
    if draw.random() >= 0.45:
        return None
    settings = OrderPerKey(
        consume_message_batch_max_size=draw.choice((1, 1, 3)),
        suspend_current_queue_time_millis=draw.choice((10, 1000)),
        max_reconsume_times=draw.choice((-1, 0, 2, 5)),
        concurrency=draw.randint(1, 4),
        in_batch_attempts=draw.randint(1, 3),
        max_batch_seconds=draw.choice((1.0, 5.0, 30.0)),
        on_exhausted=draw.choice(("dead_letter", "dead_letter", "hold")),
    )
    return Keys(
        settings,
        room=draw.choice((1, 2, 5, 1000, 1000)),
        poison=draw.choice((0.05, 0.2, 0.4)),
        deadly=draw.choice((0.0, 0.3)),
        flaky=draw.choice((0.0, 0.2, 0.5)),
        keyless=draw.random() < 0.3,
        orders=draw.random() < 0.75,
        keys=draw.choice((1, 3, 3)),
        seeks=draw.random() < 0.5,
    )


class Simulation:
    """One run of a scenario. ``steps`` counts all steps, including nested ones."""

    def __init__(self, scenario: Scenario, *, trace: bool = False) -> None:
        self.scenario = scenario
        self.random = random.Random(scenario.seed)
        self.world = World(self.random, scenario.queues)
        if trace:
            self.world.trace = []
        self.network = Network(self.world, self.random)
        self.network.meanwhile = self._meanwhile
        self.network.pause = self._pause
        self.sink = Sink(self.world)
        names = "ABCD"[: scenario.members]
        self.queries = [Query(name, scenario.kind, self.world, self.network, self.sink, self.random) for name in names]
        if scenario.stranger:
            self.queries[-1].strategy = "AVG" if scenario.kind.strategy == "AVG_BY_CIRCLE" else "AVG_BY_CIRCLE"
        if scenario.twin:
            first = self.queries[0]
            self.queries.append(Query("A'", scenario.kind, self.world, self.network, self.sink, self.random, first))
        self.by_path = {query.options()["path"]: query for query in self.queries}
        kind = scenario.kind
        # Without auto-commit, a listener that leaves messages uncommitted fails its query, and the restart repeats the batch.
        self.world.ledger.exact = kind.atomic or (scenario.calm and (kind.auto_commit or not kind.listener))
        self.world.ledger.strict = not scenario.twin
        self.world.ledger.at_work = self._at_work
        self.listener = Listener(self.random, 0.0, 0.0, 0.0, calm=True)
        if scenario.resizes:
            self.world.resizing = Resizing(self.world, keyless=kind.keys is not None and kind.keys.keyless)
        if kind.keys is not None:
            self._park(kind.keys)
        self.steps = 0
        self.depth = 0
        #: When the request began during which nested steps are taken.
        self.asked = 0.0
        #: Whether faults have ended. Once they have, no query is started.
        self.healing = False
        self.events = self._events()

    def _park(self, keys: Keys) -> None:
        """Add parking lots and their judge to the world."""
        world = self.world
        world.lots = Lots(world, keys.key_of if world.resizing is None else world.resizing.key_of)
        world.keys = KeyJudge(world, world.lots)
        world.keys.strict = not self.scenario.twin
        self.listener = Listener(self.random, keys.poison, keys.deadly, keys.flaky)
        around = Around(self.network, world.lots, world.keys, self.listener)
        for query in self.queries:
            query.around = around

    def run(self, steps: int = STEPS) -> None:
        """Simulate the seed. Raises AssertionError for a violation."""
        self.world.note(str(self.scenario))
        with virtual(self.network, lambda path: self.by_path[path].connect()):
            for queue in self.world.queues:
                self.world.produce(queue, self.random.randint(0, 6))
            self.network.mishap = 0.0 if self.scenario.calm else self.random.choice((0.005, 0.02, 0.05))
            self.network.overlap = self.random.choice((0.03, 0.1, 0.3))
            while self.steps < steps:
                self.step()
            self._heal()
        self._judge()

    # -- steps ---------------------------------------------------------------------------------------------------------------

    def _events(self) -> tuple[list[Callable[[], None]], list[int]]:
        """Return the events of a step, and the cumulative sums of their weights."""
        table: list[tuple[Callable[[], None], int]] = [
            (self._go, 760),
            (self._little_time, 60),
            (self._much_time, 25),
            (self._produce, 60),
            (self._stop, 12),
            (self._late_task, 25),
            (self._resize, 40) if self.scenario.resizes else (self._grow, 4),
            (self._wall_jumps, 8),
        ]
        if not self.scenario.calm:
            table += [
                (self._kill_runner, 12),
                (self._kill_driver, 12),
                (self._driver_ends, 6),
                (self._orphan, 8),
                (self._former_ends, 8),
                (self._some_pause, 10),
                (self._late_call, 20),
                (self._release, 4),
                (self._reboot, 2),
            ]
        if self.scenario.seeks:
            table.append((self._seek, 12 if self.scenario.kind.keys is None else 25))
        if self.scenario.kind.keys is not None:
            table.append((self._until_due, 25))
            if not self.scenario.calm:
                table.append((self._kill_after_parking, 15))
            if self.scenario.kind.keys.orders:
                table.append((self._order, 30))
        return [event for event, _ in table], list(accumulate(weight for _, weight in table))

    def step(self) -> None:
        self.steps += 1
        events, sums = self.events
        events[bisect(sums, self.random.randrange(sums[-1]))]()
        self._check()

    def _check(self) -> None:
        for query in self.queries:
            if query.moved and not query.busy:
                query.invariants()
        if self.world.broken:
            raise Violation(self.world.broken)

    def _meanwhile(self) -> None:
        if self.depth < _DEPTH:
            self.asked = self.asked if self.depth else self.world.now
            self.depth += 1
            for _ in range(self.random.randint(0, 5)):
                if self.scenario.calm and self.world.now > self.asked + LOCK_LIFE / 3:
                    # Without faults, a broker answers a request for locks before these locks end.
                    break
                self.step()
            self.depth -= 1

    def _some(self, fits: Callable[[Query], bool]) -> Query | None:
        found = [query for query in self.queries if fits(query)]
        return self.random.choice(found) if found else None

    def _go(self) -> None:
        query = self._some(_can_step)
        if query is not None and query.phase == "idle" and query.quiet:
            # A quiet idle query has nothing to do, so draw once more.
            query = self._some(_can_step)
        if query is not None and (query.up or (not self.healing and self.random.random() < 0.4)):
            if self.healing:
                self._calm(query)
            query.step()

    @staticmethod
    def _calm(query: Query) -> None:
        """Let the query's listeners accept every message."""
        for task in query.tasks:
            if isinstance(task, ListenerTask):
                task.moody = False

    def _little_time(self) -> None:
        self.world.advance(self.random.randint(1, 40) * TICK)

    def _much_time(self) -> None:
        self.world.advance(self.random.choice((5.0, 10.0, 20.0)))

    def _produce(self) -> None:
        for _ in range(self.random.randint(1, 3)):
            self.world.produce(self.random.choice(self.world.queues), self.random.randint(1, 5))

    def _grow(self) -> None:
        if len(self.world.queues) < 10:
            self.world.grow()
            self.world.note(f"the topic has {len(self.world.queues)} queues now")

    def _resize(self) -> None:
        resizing = self.world.resizing
        assert resizing is not None
        resizing.resize(self.random.randint(1, QUEUES))
        self.world.note(f"the topic is resized to {resizing.count} queues at {self.world.ends}")

    def _wall_jumps(self) -> None:
        self.world.wall_offset += self.random.choice((-3600.0, -90.0, 90.0, 3600.0))
        self.world.note("the wall clock jumps")

    # -- faults --------------------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        query = self._some(self._may_stop)
        if query is not None and query.up:
            self.world.note(f"{query.name}: is stopped in phase {query.phase}")
            query.leave(terminated=True)

    def _may_stop(self, query: Query) -> bool:
        if query.busy or query.frozen:
            return False
        if query.up and self.scenario.calm and not self.scenario.kind.atomic:
            # With a sink that is not atomic, a stop in the middle of a batch may repeat it.
            owner = query.owner
            return query.phase == "idle" and (owner is None or not owner.in_flight())
        return True

    def _kill_runner(self) -> None:
        query = self._some(lambda one: one.process is not None and not one.process.dead)
        if query is not None and query.process is not None:
            self.world.note(f"{query.name}: its runner is killed in phase {query.phase}")
            query.process.kill()

    def _kill_driver(self) -> None:
        query = self._some(lambda one: one.up)
        if query is not None:
            self.world.note(f"{query.name}: is killed in phase {query.phase}")
            query.kill()

    def _driver_ends(self) -> None:
        query = self._some(lambda one: one.up and not one.busy and not one.frozen)
        if query is not None:
            self.world.note(f"{query.name}: its driver ends in phase {query.phase}")
            query.leave(terminated=False)

    def _orphan(self) -> None:
        query = self._some(lambda one: one.process is not None and not one.busy and not one.frozen and not one.process.renewing)
        if query is not None:
            self.world.note(f"{query.name}: its driver is killed in phase {query.phase}, but its runner is not")
            query.orphan()

    def _former_ends(self) -> None:
        query = self._some(lambda one: bool(one.former) and not one.busy)
        if query is not None:
            query.former_ends()

    def _some_pause(self) -> None:
        query = self._some(lambda one: one.process is not None and not one.frozen)
        if query is not None and query.process is not None:
            self._pause(query.process)

    def _pause(self, caller: Caller) -> None:
        """SIGSTOP a process for some time. Other processes continue, including the driver and the tasks of a paused runner."""
        process = caller.process if isinstance(caller, Query) else caller
        if not isinstance(process, Process) or process.frozen or self.depth >= _DEPTH:
            return
        end = self.world.now + self.random.choice((10.0, 40.0, LOCK_LIFE, LOCK_LIFE + TICK, 61.0, 90.0, 130.0))
        self.world.note(f"{process.name}: is paused for {end - self.world.now:.3f} s")
        process.frozen = True
        self.depth += 1
        while self.world.now < end:
            self.world.advance(min(end - self.world.now, self.random.choice((TICK, 5.0, 20.0, 60.0))))
            for _ in range(self.random.randint(0, 3)):
                self.step()
        self.depth -= 1
        process.frozen = False
        self.world.note(f"{process.name}: it continues")

    def _late_task(self) -> None:
        query = self._some(lambda one: bool(one.zombies))
        if query is not None:
            query.late_task()

    def _late_call(self) -> None:
        query = self._some(lambda one: bool(one.late))
        if query is not None:
            query.late_publish()
        elif self.network.late:
            what, effect = self.network.late.pop(self.random.randrange(len(self.network.late)))
            self.world.note(f"{what}: takes effect late")
            try:
                effect()
            except OrderedMQError as error:
                self.world.note(f"{what}: is refused: {error.sub}")

    def _release(self) -> None:
        queue = self.random.choice(self.world.queues)
        self.world.note(f"an operator releases {queue}")
        self.world.release(queue)

    def _reboot(self) -> None:
        if self.depth:
            return
        self.world.note("the machine reboots")
        for query in self.queries:
            query.kill()
            for process, _, _ in query.former:
                process.kill()
            query.zombies, query.late, query.former = [], [], []
        self.network.late = []
        self.world.reboot()

    def _seek(self) -> None:
        chosen = self.random.sample(self.world.queues, self.random.randint(1, 2))
        offsets = {queue: self.random.randint(0, self.world.ends[queue]) for queue in chosen}
        parked: AtSeek = "keep"
        if self.world.lots is not None:
            parked = self.random.choice(("keep", "keep", "drop"))
            for queue in chosen:
                # Often seek to the first parked message, or to an offset before it.
                lying = self.world.lots.messages(queue)
                if lying and self.random.random() < 0.7:
                    first = min(one.offset for one in lying)
                    offsets[queue] = self.random.choice((first, max(0, first - self.random.randint(1, 6))))
        where = ", ".join(f"{queue} to {at}" for queue, at in offsets.items())
        self.world.note(f"an operator seeks {where}, --parked {parked}")
        self.world.seek(offsets, parked)

    def _kill_after_parking(self) -> None:
        """Kill a driver whose tasks have parked messages, so that the next owner of the queue finds a half-processed range."""
        query = self._some(lambda one: one.up and any(isinstance(task, KeyTask) and task.half_done() for task in one.tasks))
        if query is not None:
            self.world.note(f"{query.name}: is killed after it parked a message")
            query.kill()
            for other in self.queries:
                # Let other queries take over its queues before it restarts.
                if other.phase == "idle" and _can_step(other):
                    other.step()

    def _until_due(self) -> None:
        """Let time pass until a parked key is due, or some seconds longer."""
        assert self.world.lots is not None
        queue = self.random.choice(self.world.queues)
        due = [one.ticket.due for one in self.world.lots.live(queue) if one.ticket is not None]
        left = min((at - self.world.milliseconds() for at in due if at > self.world.milliseconds()), default=0) / 1000
        seconds = min(left, 130.0) + self.random.choice((0.0, 0.0, 10.0, 30.0))
        self.world.advance(min(seconds, LOCK_LIFE / 3) if self.scenario.calm and self.depth else seconds)

    def _order(self) -> None:
        """Let an operator give a command for a parked key."""
        lots = self.world.lots
        assert lots is not None
        queue = self.random.choice(self.world.queues)
        parked = [one for one in lots.live(queue) if one.ticket is not None]
        if not parked:
            return
        one = self.random.choice(parked)
        command = one.ordered(self.random.choice(("retry", "retry", "drop", "hold")))
        self.world.note(f"an operator gives {command} in {queue}")
        lots.command(queue, [command])

    def _at_work(self, token: LockToken) -> bool:
        return any(query.at_work(token) for query in self.queries)

    # -- healing and final checks --------------------------------------------------------------------------------------------

    def _heal(self) -> None:
        """End all faults. The remaining queries must soon own the queues that the strategy gives them, and drain these."""
        self.world.note("everything heals")
        self.network.mishap, self.network.overlap = 0.0, 0.03
        keys = self.scenario.kind.keys
        if keys is not None and (keys.room < 1000 or keys.settings.max_reconsume_times < 0):
            # A message that always fails may hold up its queue forever.
            self.listener.calm = True
        while self.network.late or any(query.late for query in self.queries):
            self._late_call()
        while any(query.former for query in self.queries):
            self._former_ends()
        events = (self._go, self._little_time, self._late_task)
        self.events = (list(events), [10, 12, 13])
        self.healing = True
        staying = self._staying()
        for query in self.queries:
            query.staying = query in staying
            # A run that its twin has overtaken would fail with its next batch and never become idle.
            if query.up and (query.available_now or not query.staying or not query.alone):
                while not self._may_stop(query):
                    self.world.advance(1.0)
                    query.step()
                    self._check()
                if not query.dead and not self._frozen(query):
                    query.leave(terminated=True)
        for _ in range(4):
            runs = [query.runs for query in staying]
            self._rounds(staying)
            self.world.advance(LOCK_LIFE + TICK)
            self._rounds(staying)
            self._rounds(staying)
            if runs == [query.runs for query in staying]:
                break
        else:
            self.world.fail("queries fail repeatedly, although there are no faults")
        self._owned(staying)
        moves = len(self.world.moves)
        for queue in self.world.queues:
            self.world.produce(queue, self.random.randint(0, 2))
        self._rounds(staying)
        self._rounds(staying)
        self._through_generations(staying)
        if self.world.lots is not None:
            self._drain(staying)
        if len(self.world.moves) > moves:
            queue, client = self.world.moves[-1]
            self.world.fail(f"{queue} went to {client}, although no member joined or left")
        for queue, end in self.world.ends.items():
            at, processed = self.world.group_offsets.get(queue), self.world.ledger.processed[queue]
            if processed != end or at != end:
                self.world.fail(f"{queue}: {processed} of {end} messages came out, and the group is at {at}")

    def _through_generations(self, staying: Sequence[Query]) -> None:
        """Step the queries until they read nothing more: what one member has processed lets another one read on."""
        before: object = None
        while self.world.resizing is not None and before != self.world.group_offsets:
            before = dict(self.world.group_offsets)
            self._rounds(staying)

    def _drain(self, staying: Sequence[Query]) -> None:
        """Fail unless all unparked messages are decided and, once listeners accept everything, also the parked ones."""
        lots, judge, keys = self.world.lots, self.world.keys, self.scenario.kind.keys
        assert lots is not None
        assert judge is not None
        assert keys is not None
        if self.world.resizing is None:
            # A parked message also holds newer messages of other queues if the topic was resized.
            judge.others(keys.room)
        self.listener.calm = True
        for _ in range(10 if self.world.resizing is None else 100):
            parked = [(queue, one) for queue in self.world.queues for one in lots.live(queue)]
            if not parked:
                break
            for queue in self.world.queues:
                held = {one.lane: one for one in lots.live(queue) if one.ticket is not None and one.ticket.due == HELD}
                lots.command(queue, [one.ordered("retry") for one in held.values()])
            now = self.world.milliseconds()
            late = max((one.ticket.due - now for _, one in parked if one.ticket is not None), default=0)
            self.world.advance(max(0, late) / 1000)
            self._rounds(staying)
            self._through_generations(staying)
        else:
            self.world.fail(f"lots do not drain: {parked[:3]} (K5)")
        judge.drained()

    def _frozen(self, query: Query) -> bool:
        """Sometimes pause a query that is not to stay in the group, and never resume it. Return whether the query was paused."""
        process = query.process
        if query.staying or self.scenario.calm or process is None or process.dead or self.random.random() < 0.5:
            return False
        process.frozen = True
        return True

    def _staying(self) -> list[Query]:
        alike = [query for query in self.queries if query.twin is None]
        alike = alike[:-1] if self.scenario.stranger else alike
        if self.scenario.kind.shared:
            return sorted(self.random.sample(alike, self.random.randint(1, len(alike))), key=lambda one: one.name)
        return [self.random.choice(alike)]

    def _rounds(self, staying: Sequence[Query]) -> None:
        """Step each query until it is idle and has nothing to read."""
        self.world.advance(1.0)
        for query in staying:
            query.quiet = False
            for _ in range(1000):
                self._calm(query)
                if query.phase in ("running", "down"):
                    self.world.advance(1.0)
                query.step()
                self._check()
                if query.phase == "idle" and query.quiet:
                    break
            else:
                self.world.fail(f"{query.name} does not become idle; its phase is {query.phase}")

    def _owned(self, staying: Sequence[Query]) -> None:
        """Fail unless every queue has the owner that the strategy gives it."""
        members = {query.process.client.client_id: None for query in staying if query.process and query.process.client}
        for query in staying:
            owner = query.owner
            assert owner is not None
            wanted = owner.strategy(self.world.queues, members)
            leaders = {queue: owned for queue, owned in owner.owned.items() if owned.leader is None}
            if sorted(leaders) != sorted(wanted):
                self.world.fail(f"{query.name} owns {sorted(leaders)}, but the strategy gives it {sorted(wanted)}")
            for queue, owned in leaders.items():
                lock = self.world.locks[queue]
                if owned.token is None or not lock.held or lock.epoch != owned.token.epoch:
                    self.world.fail(f"{queue} is not held by its owner")
        owners = [query.owner for query in staying if query.owner]
        if (
            sorted(queue for owner in owners for queue, owned in owner.owned.items() if owned.leader is None)
            != self.world.queues
        ):
            self.world.fail("not every queue has an owner")

    def _judge(self) -> None:
        sends: list[dict[str, Any]] = []
        for queue, end in self.world.ends.items():
            for offset in range(end):
                key, name = message(queue, offset)
                sent = {"event": "send", "queue": str(queue), "offset": offset, "key": key, "id": name, "outcome": "ok"}
                sends.append(sent)
        # After a seek back, messages come out again after later messages. (The history omits repeats to an at-least-once sink.)
        allowed = ("duplicate", "nonmonotonic") if self.scenario.seeks else ()
        found = [one for one in checker.judge([*sends, *self.world.history]) if one.kind not in allowed]
        if found:
            raise Violation(f"{len(found)} anomalies: {'; '.join(map(str, found[:3]))}")


def _can_step(query: Query) -> bool:
    if query.busy:
        return False
    return not query.frozen or query.phase in ("running", "publishing", "committing")
