"""An exhaustive model of the ownership rules: it visits every interleaving of a few steps of two queries.

It models the locks of `orderedmq.ownership.lock`, how `orderedmq.ownership.owner` enters queues and repeats batches, the publish
of the embedded outbox, and these faults of a query:

- a crash after which its locks are free immediately;
- a crash that leaves a *former run*: a source runner that is paused or slow to die and still holds the locks;
- a pause that outlasts a lock;
- a publish of an earlier run that takes effect late.

While no query runs, an operator may seek a queue back to 0. Then its messages count as neither published nor delivered. Or the one
query of the model changes its group, and changes it back.

After each step it checks:

- atomic sink: the published messages of a queue are 0, 1, 2, … once and in order, and the group's offset never passes an
  unpublished message;
- foreign sink: no message is first delivered before its predecessor, and the group's offset never passes an undelivered message;
- numbering sink, a foreign sink that ignores batches whose numbers it knows: no message is delivered twice while its queue has the same
  owner and is not sought.

The model checks safety only. The simulation checks that all messages are delivered in the end. ``python -m
tests.sim.ownership_model`` explores larger bounds.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple, TypeVar

#: Rules that a test can leave out one at a time, to check that the model then finds an error.
RULES: Final = ("tenure", "fence", "replay_check", "own_run", "seek", "scope", "group")
#: The rules of a broker that keeps no lineage, where a query and a Java consumer share a group.
JAVA_RULES: Final = ("tenure", "end_tenure")
#: What a sink knows of a batch: whether the source's epochs are current, its number, or nothing.
Sink = Literal["atomic", "numbering", "foreign"]


_T = TypeVar("_T")


class Lock(NamedTuple):
    """A lock. ``state``: free, held, former (held by a former run of ``holder``), or stale (expired without its holder's knowledge).

    ``tenure``: the epoch at which the last owner's tenure began, which a Java consumer does not change. ``reset``: the epoch of the last
    seek. ``turn``: a number that changes with the owner and with each seek, which no rule uses.
    """

    state: str = "free"
    holder: str | None = None
    epoch: int = 0
    last: str | None = None
    tenure: int = 0
    reset: int = 0
    turn: tuple[str | None, int] = (None, 0)


Span = tuple[int, int]
#: A logged batch: the queue, range, tenure and turn of each part, and the group.
Batch = tuple[tuple[int, Span, int, tuple[str | None, int], int], ...]


class Running(NamedTuple):
    """A batch that a run works on: its number, its ranges, and the epochs that its tasks registered. ``turns``: see `Lock`."""

    batch: int
    ranges: tuple[tuple[int, Span], ...]
    epochs: tuple[tuple[int, int], ...]
    turns: tuple[tuple[int, tuple[str | None, int]], ...]


class Query(NamedTuple):
    """``log``: batches logged by Spark; ``committed``: how many are committed; ``held``: queue → (epoch, position or None, tenure)."""

    up: bool = False
    log: tuple[Batch, ...] = ()
    committed: int = 0
    held: tuple[tuple[int, tuple[int, int | None, int]], ...] = ()
    phase: str = "idle"
    running: Running | None = None


class World(NamedTuple):
    """A state of the model. ``records``: batches that the sink knows; ``out``: published or delivered messages per queue.

    ``late``: publishes that may take effect late; ``crashes``, ``pauses``, ``gives``, ``seeks``, ``changes``: how many more of these may
    happen. ``number``: which of two groups the query is in. ``other``: the locks and offsets of the other one.
    ``delivered``: what a numbering sink got of each queue, with its turn. ``twice``: a message that it got twice in a turn.
    """

    locks: tuple[Lock, ...]
    group: tuple[int, ...]
    records: frozenset[tuple[str, int, tuple[tuple[int, Span], ...]]]
    out: tuple[tuple[int, ...], ...]
    A: Query
    B: Query
    late: tuple[tuple[str, Running], ...]
    crashes: int
    pauses: int
    gives: int
    seeks: int
    delivered: frozenset[tuple[int, tuple[str | None, int], int]] = frozenset()
    twice: tuple[int, int] | None = None
    changes: int = 0
    number: int = 0
    other: tuple[tuple[Lock, ...], tuple[int, ...]] = ((), ())


@dataclass(frozen=True)
class Bounds:
    """The number of queues and messages, and how often each fault may happen."""

    queues: int = 1
    messages: int = 2
    crashes: int = 2
    pauses: int = 1
    gives: int = 1
    seeks: int = 0
    changes: int = 0


@dataclass
class Result:
    """The outcome of an exploration. ``wrong`` is None if no rule is violated. ``complete``: every state was visited."""

    states: int
    wrong: str | None = None
    trace: list[str] = field(default_factory=list)
    complete: bool = True


class Model:
    """Two queries of one group.

    An atomic sink publishes and moves the group's offset in one step. ``fenced``: the broker has epochs and keeps earlier
    owners like the embedded broker; RocketMQ does neither. ``java``: B is a Java consumer. ``without``: the rule to leave out.
    """

    def __init__(
        self,
        bounds: Bounds,
        *,
        sink: Sink,
        shared: bool = True,
        fenced: bool = True,
        java: bool = False,
        without: str | None = None,
    ) -> None:
        self.bounds = bounds
        self.sink = sink
        self.shared = shared
        self.fenced = fenced
        self.java = java
        self.without = without

    # -- rules -------------------------------------------------------------------------------------------------------------

    def has(self, rule: str) -> bool:
        return rule != self.without

    def is_java(self, name: str) -> bool:
        return self.java and name == "B"

    def grant(self, world: World, name: str, queue: int, logged: int | None) -> World | None:
        """Grant the lock, or return None. ``logged``: where the query's tenure began according to its checkpoint."""
        lock = world.locks[queue]
        if lock.state == "former" or (lock.state == "held" and lock.holder != name):
            return None
        epoch = lock.epoch + 1
        if self.fenced:
            unbroken = lock.last == name
        else:
            unbroken = self.is_java(name) or (logged == lock.tenure and (logged > lock.reset or not self.has("seek")))
        tenure = lock.tenure if unbroken else epoch
        turn = lock.turn if lock.turn[0] == name else (name, epoch)
        return world._replace(locks=_put(world.locks, queue, Lock("held", name, epoch, name, tenure, lock.reset, turn)))

    def unbroken(self, world: World, name: str, queue: int, logged: int, processed: int) -> bool:
        """Whether the query ``name``, which has just locked the queue, resumes at its own position (``processed``)."""
        if self.is_java(name):
            return False
        lock = world.locks[queue]
        same = lock.tenure == logged or not self.has("tenure")
        if self.fenced:
            return same
        reset = logged <= lock.reset and self.has("seek")
        return world.group[queue] <= processed and not reset and (same or not self.shared)

    def in_former(
        self, world: World, name: str, queue: int, tenure: int, number: int, processed: int
    ) -> tuple[World, int | None]:
        """Return the offset of the checkpoint's group if the tenure is broken there and the query is in the other group, else None."""
        if number == world.number or not self.has("former"):
            return world, None
        granted = self.grant(_swapped(world), name, queue, tenure)
        assert granted is not None, "the query was down when it changed its group"
        broken = not self.unbroken(granted, name, queue, tenure, processed)
        released = _release(granted, name, [(queue, granted.locks[queue].epoch)])
        return _swapped(released), released.group[queue] if broken else None

    def follows(self, world: World, name: str, queue: int, tenure: int, number: int, processed: int) -> bool:
        """Like `unbroken`, for a query whose checkpoint may belong to the other group."""
        if number != world.number and self.has("group"):
            return world.group[queue] <= processed
        return self.unbroken(world, name, queue, tenure, processed)

    def stale(self, world: World, queue: int, epoch: int) -> bool:
        return self.fenced and self.has("fence") and world.locks[queue].epoch != epoch

    def publish(self, world: World, name: str, run: Running) -> tuple[World, bool]:
        out, group = world.out, world.group
        if self.sink != "atomic":
            if self.sink == "numbering":
                if any((known_name, batch) == (name, run.batch) for known_name, batch, _ in world.records):
                    return world, True
                turns = dict(run.turns)
                got = {(queue, turns[queue], at) for queue, span in run.ranges for at in range(*span)}
                twice = next(((queue, at) for queue, _, at in got & world.delivered), world.twice)
                records = world.records | {(name, run.batch, ())}
                world = world._replace(delivered=world.delivered | got, twice=twice, records=records)
            for queue, (begin, end) in run.ranges:
                # This limit keeps the model finite, because repeats could continue forever.
                if len(out[queue]) < 3 * self.bounds.messages:
                    out = _put(out, queue, out[queue] + tuple(range(begin, end)))
            return world._replace(out=out), True
        for known_name, batch, ranges in world.records:
            if (known_name, batch) == (name, run.batch):
                known = dict(ranges)
                same = all(q in known and known[q][0] <= begin and end <= known[q][1] for q, (begin, end) in run.ranges)
                return world, same
        if any(self.stale(world, queue, epoch) for queue, epoch in run.epochs):
            return world, False
        for queue, (begin, end) in run.ranges:
            out = _put(out, queue, out[queue] + tuple(range(begin, end)))
            group = _put(group, queue, max(group[queue], end))
        return world._replace(records=world.records | {(name, run.batch, run.ranges)}, out=out, group=group), True

    # -- steps -------------------------------------------------------------------------------------------------------------

    def steps(self, world: World) -> Iterator[tuple[str, World]]:
        for name in "A" if self.bounds.changes else "AB":
            query: Query = getattr(world, name)
            if not query.up:
                yield from self.start(world, name, query)
            else:
                if query.phase == "idle":
                    yield from self.idle(world, name, query)
                else:
                    yield from self.work(world, name, query)
                yield from self.faults(world, name, query)
        for queue, lock in enumerate(world.locks):
            if lock.state == "former":
                # The former run is killed, or it resumes, finds Spark gone and ends, or its lock expires.
                ended = lock._replace(state="free", holder=None)
                yield (
                    f"{lock.holder}'s former run ends, queue {queue} is free",
                    world._replace(locks=_put(world.locks, queue, ended)),
                )
        for name, run in world.late:
            published, _ = self.publish(world, name, run)
            yield f"late publish of {name}: {run.batch} {dict(run.ranges)}", published._replace(late=())
        unused = not (world.A.up or world.B.up or world.late) and all(lock.state != "former" for lock in world.locks)
        if world.seeks and unused:
            for queue in range(self.bounds.queues):
                yield f"an operator seeks queue {queue} to 0", self.sought(world, queue)

        if world.changes and unused:
            yield "A is in the other group", _swapped(world)._replace(changes=world.changes - 1)

    def sought(self, world: World, queue: int) -> World:
        """Seek a queue, which ends its tenure. Without "scope", the tenures of all queues end."""
        for other in range(self.bounds.queues) if not self.has("scope") else (queue,):
            lock = world.locks[other]
            epoch = lock.epoch + 1
            after = lock._replace(epoch=epoch, turn=(None, epoch) if other == queue else lock.turn)
            if self.has("seek"):
                after = after._replace(last=None, tenure=epoch, reset=epoch)
            world = world._replace(locks=_put(world.locks, other, after))
        out, group = _put(world.out, queue, ()), _put(world.group, queue, 0)
        return world._replace(out=out, group=group, seeks=world.seeks - 1)

    def start(self, world: World, name: str, query: Query) -> Iterator[tuple[str, World]]:
        up = query._replace(up=True, held=(), phase="idle", running=None)
        if len(query.log) == query.committed:
            yield f"{name} starts", _with(world, name, up)
            return
        ranges: list[tuple[int, Span]] = []
        held: dict[int, tuple[int, int | None, int]] = {}
        for queue, (begin, end), tenure, _, number in query.log[-1]:
            lock = world.locks[queue]
            granted = self.grant(world, name, queue, tenure)
            if granted is None:
                own = self.fenced and lock.state == "former" and lock.holder == name
                other = number != world.number and self.has("group")
                if not self.shared or (own and self.has("own_run")) or other:
                    # The query waits and finally fails. It processes nothing of the batch and keeps no lock.
                    return
                if not self.fenced and not self.is_java(name) and lock.tenure == tenure and self.has("end_tenure"):
                    world = world._replace(locks=_put(world.locks, queue, lock._replace(tenure=-1)))
                continue
            world = granted
            epoch, began = world.locks[queue].epoch, world.locks[queue].tenure
            world, former = self.in_former(world, name, queue, tenure, number, end - 1)
            follows = former is None and self.follows(world, name, queue, tenure, number, end - 1)
            if follows or not self.has("replay_check"):
                ranges.append((queue, (begin, end)))
                held[queue] = (epoch, end, began)
            else:
                held[queue] = (epoch, None, began)
        epochs = tuple((queue, held[queue][0]) for queue, _ in ranges)
        turns = tuple((queue, turn) for queue, _, _, turn, _ in query.log[-1])
        run = Running(len(query.log) - 1, tuple(ranges), epochs, turns)
        up = up._replace(phase="planned", running=run, held=tuple(sorted(held.items())))
        yield f"{name} starts, repeats {dict(ranges)}", _with(world, name, up)

    def boundary(self, world: World, name: str, query: Query) -> tuple[World, Query]:
        """Commit processed offsets and forget lost queues."""
        held = []
        for queue, (epoch, position, tenure) in query.held:
            if self.stale(world, queue, epoch):
                continue
            if position is None:
                logged, former = _logged(query, queue), None
                if logged is not None:
                    world, former = self.in_former(world, name, queue, *logged[1:], logged[0])
                position = max(world.group[queue], former or 0)
            else:
                world = world._replace(group=_put(world.group, queue, max(world.group[queue], position)))
            held.append((queue, (epoch, position, tenure)))
        return world, query._replace(held=tuple(held))

    def idle(self, world: World, name: str, query: Query) -> Iterator[tuple[str, World]]:
        at, now = self.boundary(world, name, query)
        if now.held != query.held or at.group != world.group:
            yield f"{name} commits its offsets", _with(at, name, now)
        mine = dict(now.held)
        for queue in range(self.bounds.queues):
            if queue not in mine:
                logged = _logged(query, queue)
                taken = self.grant(at, name, queue, logged and logged[1])
                if taken is not None:
                    yield self.take(taken, name, now, queue)
            elif at.gives:
                rest = tuple(one for one in now.held if one[0] != queue)
                given = _release(at, name, [(queue, mine[queue][0])])._replace(gives=at.gives - 1)
                yield f"{name} unlocks queue {queue}", _with(given, name, now._replace(held=rest))
        yield from self.plan(at, name, now)

    def take(self, taken: World, name: str, query: Query, queue: int) -> tuple[str, World]:
        logged = _logged(query, queue)
        former: int | None = None
        if logged is not None:
            taken, former = self.in_former(taken, name, queue, *logged[1:], logged[0])
        position = taken.group[queue] if former is None else max(taken.group[queue], former)
        if logged is not None and former is None and self.follows(taken, name, queue, *logged[1:], logged[0]):
            position = logged[0]
        if logged is not None and position > taken.group[queue]:
            taken = taken._replace(group=_put(taken.group, queue, max(taken.group[queue], position)))
        lock = taken.locks[queue]
        held = tuple(sorted((*query.held, (queue, (lock.epoch, position, lock.tenure)))))
        return f"{name} takes queue {queue} at {position}", _with(taken, name, query._replace(held=held))

    def plan(self, world: World, name: str, query: Query) -> Iterator[tuple[str, World]]:
        found = {queue: at for queue, (_, at, _) in query.held if at is not None and at < self.bounds.messages}
        if not found:
            return
        ranges = tuple((queue, (at, at + 1)) for queue, at in found.items())
        epochs = tuple((queue, epoch) for queue, (epoch, _, _) in query.held if queue in found)
        mine = dict(query.held)
        batch = tuple((queue, span, mine[queue][2], _turn(world, name, queue), world.number) for queue, span in ranges)
        held = tuple(
            (queue, (epoch, found[queue] + 1 if queue in found else at, tenure)) for queue, (epoch, at, tenure) in query.held
        )
        turns = tuple((queue, turn) for queue, _, _, turn, _ in batch)
        run = Running(len(query.log), ranges, epochs, turns)
        planned = query._replace(log=(*query.log, batch), held=held, phase="planned", running=run)
        yield f"{name} plans batch {run.batch}: {dict(ranges)}", _with(world, name, planned)

    def work(self, world: World, name: str, query: Query) -> Iterator[tuple[str, World]]:
        assert query.running is not None
        if query.phase == "published":
            done = query._replace(phase="idle", running=None, committed=len(query.log))
            yield f"Spark commits {name}'s batch", _with(world, name, done)
            return
        after, accepted = self.publish(world, name, query.running)
        if accepted:
            said = f"{name} publishes batch {query.running.batch}: {dict(query.running.ranges)}"
            yield said, _with(after, name, query._replace(phase="published"))
        else:
            yield (
                f"{name}'s publish is refused, and the query fails",
                _with(_release(after, name, _tokens(query)), name, _down(query)),
            )

    def faults(self, world: World, name: str, query: Query) -> Iterator[tuple[str, World]]:
        if world.crashes:
            left = world._replace(crashes=world.crashes - 1)
            dead = _with(_release(left, name, _tokens(query)), name, _down(query))
            yield f"{name} crashes", dead
            if query.phase == "planned" and not world.late:
                assert query.running is not None
                yield f"{name} crashes while it publishes", dead._replace(late=((name, query.running),))
            if query.held:
                orphan = _with(_leave(left, name, query), name, _down(query))
                yield f"{name}'s driver is killed while its runner still holds the locks", orphan
                if query.phase == "planned" and not world.late:
                    assert query.running is not None
                    said = f"{name}'s driver is killed during a publish while its runner still holds the locks"
                    yield said, orphan._replace(late=((name, query.running),))
        if world.pauses:
            for queue, (epoch, _, _) in query.held:
                lock = world.locks[queue]
                if (lock.state, lock.holder, lock.epoch) == ("held", name, epoch):
                    expired = _put(world.locks, queue, lock._replace(state="stale"))
                    yield (
                        f"{name} pauses for longer than its lock of queue {queue} lives",
                        world._replace(locks=expired, pauses=world.pauses - 1),
                    )

    # -- exploration ---------------------------------------------------------------------------------------------------------

    def wrong(self, world: World) -> str | None:
        if world.twice is not None:
            return "queue {}: message {} was delivered twice".format(*world.twice)
        for queue, out in enumerate(world.out):
            if self.sink == "atomic":
                if out != tuple(range(len(out))):
                    return f"queue {queue}: published {out}"
                if world.group[queue] > len(out):
                    return f"queue {queue}: the group is at {world.group[queue]}, but {len(out)} messages were published"
                continue
            seen = -1
            for offset in out:
                if offset > seen + 1:
                    return f"queue {queue}: delivered {out}"
                seen = max(seen, offset)
            if world.group[queue] > seen + 1:
                return f"queue {queue}: the group is at {world.group[queue]}, but {seen + 1} messages were delivered"
        return None

    def explore(self, limit: int = 1_000_000) -> Result:
        """Visit states breadth-first until one is wrong, or until ``limit`` states were visited."""
        queues = self.bounds.queues
        first = World(
            (Lock(),) * queues, (0,) * queues, frozenset(), ((),) * queues, Query(), Query(), (),
            self.bounds.crashes, self.bounds.pauses, self.bounds.gives, self.bounds.seeks, changes=self.bounds.changes,
            other=((Lock(epoch=100),) * queues, (0,) * queues),
        )  # fmt: skip
        seen: dict[World, tuple[World, str] | None] = {first: None}
        waiting = deque([first])
        while waiting:
            world = waiting.popleft()
            for step, after in self.steps(world):
                if after in seen:
                    continue
                seen[after] = (world, step)
                wrong = self.wrong(after)
                if wrong is not None:
                    return Result(len(seen), wrong, _trace(seen, after))
                if len(seen) >= limit:
                    return Result(len(seen), complete=False)
                waiting.append(after)
        return Result(len(seen))


def _swapped(world: World) -> World:
    """Return the world as the other group has it."""
    locks, group = world.other
    return world._replace(locks=locks, group=group, other=(world.locks, world.group), number=1 - world.number)


def _turn(world: World, name: str, queue: int) -> tuple[str | None, int]:
    """Return the turn of a queue that the query ``name`` holds, or has lost without knowing it."""
    lock = world.locks[queue]
    return lock.turn if lock.turn[0] == name else (name, lock.epoch)


def _put(values: tuple[_T, ...], index: int, value: _T) -> tuple[_T, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _with(world: World, name: str, query: Query) -> World:
    return world._replace(A=query) if name == "A" else world._replace(B=query)


def _down(query: Query) -> Query:
    return query._replace(up=False, held=(), phase="idle", running=None)


def _tokens(query: Query) -> list[tuple[int, int]]:
    return [(queue, epoch) for queue, (epoch, _, _) in query.held]


def _logged(query: Query, queue: int) -> tuple[int, int, int] | None:
    """Return the end of the queue in the newest batch that has it, and the tenure and the group that the batch logged."""
    return next(
        ((span[1], tenure, group) for batch in query.log[::-1] for one, span, tenure, _, group in batch if one == queue), None
    )


def _release(world: World, name: str, tokens: list[tuple[int, int]]) -> World:
    for queue, epoch in tokens:
        lock = world.locks[queue]
        if lock.holder == name and lock.epoch == epoch and lock.state != "former":
            world = world._replace(locks=_put(world.locks, queue, lock._replace(state="free", holder=None)))
    return world


def _leave(world: World, name: str, query: Query) -> World:
    """Mark the locks of a run that outlives its driver as locks of a former run."""
    for queue, epoch in _tokens(query):
        lock = world.locks[queue]
        if (lock.state, lock.holder, lock.epoch) == ("held", name, epoch):
            world = world._replace(locks=_put(world.locks, queue, lock._replace(state="former")))
    return world


def _trace(seen: dict[World, tuple[World, str] | None], world: World) -> list[str]:
    steps: list[str] = []
    while (before := seen[world]) is not None:
        world, step = before
        steps.append(step)
    return steps[::-1]


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]]
    chosen, most = replace(Bounds(), **dict(zip(Bounds.__annotations__, numbers))), 10_000_000
    every: tuple[tuple[bool, bool, Sink], ...] = (
        (True, True, "atomic"),
        (True, True, "foreign"),
        (True, True, "numbering"),
        (True, False, "atomic"),
        (True, False, "numbering"),
        (False, True, "foreign"),
        (False, False, "numbering"),
    )
    for fenced, shared, sink in every:
        model = Model(chosen, sink=sink, shared=shared, fenced=fenced)
        print(f"fenced {fenced}, shared {shared}, sink {sink}:", model.explore(most), flush=True)
    for rule in RULES:
        for fenced, shared, sink in every:
            model = Model(chosen, sink=sink, shared=shared, fenced=fenced, without=rule)
            print(f"without {rule}, fenced {fenced}, shared {shared}, sink {sink}:", model.explore(most), flush=True)
