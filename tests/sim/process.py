"""Processes of the simulation: a source runner's view of the broker, time and signals, and the faults of its calls."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any, Final, Protocol
from unittest import mock

import pyarrow as pa

from ordered_source import group_session, stopping, stream_reader, topic_watch
from ordered_source.renewal import Renewal
from orderedmq.broker import PullSettings, QueueBounds, TopicInfo
from orderedmq.conditions import StoreCondition
from orderedmq.endpoint import EMBEDDED
from orderedmq.errors import StoreError, aged_out
from orderedmq.model import MessageQueue, is_parked
from orderedmq.ownership.lock import ClientIdentity, LockToken, Refusal
from orderedmq.ownership.membership import Member, Subscription
from orderedmq.parking import leader_of
from orderedmq.routing.generations import Resize
from tests.sim.world import GROUP, TICK, World

#: The possible faults of a call. A repeated entry makes a fault more frequent. A late call takes effect after its caller gave up.
MISHAPS: Final = (
    "no answer",
    "lost",
    "lost",
    "repeated",
    "late",
    "killed before",
    "killed after",
    "paused before",
    "paused after",
)


class Killed(BaseException):
    """kill -9 of the process that made the call. It is a BaseException, so that no code of the project catches it."""


class Caller(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def dead(self) -> bool: ...

    @property
    def renewing(self) -> bool: ...

    def kill(self) -> None: ...


class Network:
    """Passes calls to the broker. ``mishap``: the share of faulty calls; ``overlap``: the share of calls during which other
    queries run.
    """

    def __init__(self, world: World, random: Random) -> None:
        self.world = world
        self.random = random
        self.mishap = 0.0
        self.overlap = 0.05
        #: Calls that their callers gave up and that may still take effect.
        self.late: list[tuple[str, Callable[[], object]]] = []
        self.meanwhile: Callable[[], None] = lambda: None
        self.pause: Callable[[Caller], None] = lambda _: None

    def call(self, caller: Caller, what: str, effect: Callable[..., Any], *args: Any) -> Any:
        if caller.dead:
            raise Killed
        chance = self.random.random()
        # A renewal overlaps with other calls only in runs with faults, because a renewal that outlasts its lock is a fault.
        if chance > self.overlap + self.mishap or (caller.renewing and not self.mishap):
            return effect(*args)
        if chance <= self.overlap:
            self.meanwhile()
            if caller.dead:
                raise Killed
            result = effect(*args)
            self.meanwhile()
            if caller.dead:
                raise Killed
            return result
        return self._goes_wrong(caller, what, effect, *args)

    def _goes_wrong(self, caller: Caller, what: str, effect: Callable[..., Any], *args: Any) -> Any:
        mishap = self.random.choice(MISHAPS)
        self.world.note(f"{caller.name}: {what}: {mishap}")
        match mishap:
            case "lost":
                raise _unreachable(what)
            case "late":
                self.late.append((f"{caller.name}: {what}", lambda: effect(*args)))
                raise _unreachable(what)
            case "killed before":
                caller.kill()
                raise Killed
            case "paused before":
                self.pause(caller)
            case "repeated":
                effect(*args)
        if caller.dead:
            raise Killed
        result = effect(*args)
        match mishap:
            case "no answer":
                raise _unreachable(what)
            case "killed after":
                caller.kill()
            case "paused after":
                self.pause(caller)
        if caller.dead:
            raise Killed
        return result


def _unreachable(what: str) -> StoreError:
    return StoreError(StoreCondition.IO, f"{what} failed because of a simulated fault")


class Process:
    """The source runner of one run of a query: its connection to the broker (Broker, Log and Groups) and its renewals."""

    identity = "simulation"
    capabilities = EMBEDDED

    def __init__(self, network: Network, name: str) -> None:
        self.network = network
        self.world = network.world
        self.name = name
        self.client: ClientIdentity | None = None
        self.dead = False
        self.frozen = False
        self.renewal: VirtualRenewal | None = None
        self.renewing = False
        self.renewed = 0.0
        self.log = self.groups = self
        self.world.processes.append(self)

    def kill(self) -> None:
        if not self.dead:
            self.dead = True
            self.renewal = None
            self.world.processes.remove(self)
            if self.client is not None:
                self.world.alive.discard(self.client.client_id)

    def renew_due(self) -> float | None:
        return None if self.renewal is None or self.renewing else self.renewed + self.renewal._interval

    def renew_now(self) -> None:
        assert self.renewal is not None
        self.renewed = self.world.now
        if self.network.random.random() < self.network.mishap:
            self.world.note(f"{self.name}: misses a renewal")
            return
        self.renewing = True
        try:
            self.renewal.once()
        except Killed:
            pass
        finally:
            self.renewing = False

    def _call(self, effect: Callable[..., Any], *args: Any) -> Any:
        return self.network.call(self, effect.__name__, effect, *args)

    # -- Log -----------------------------------------------------------------------------------------------------------------

    tail_loss = "the simulation lost it"

    def reading(self, how: PullSettings) -> Process:
        return self

    def change(self) -> int:
        return self.world.changes

    def topic(self, name: str) -> TopicInfo:
        return self.world.topic_info

    def anchor(self, topic: str, offsets: Mapping[MessageQueue, int]) -> str:
        return self.world.topic_info.incarnation

    def require_place_of(self, anchor: str) -> None:
        """Accept every anchor."""

    def is_another(self, topic: str, anchor: str) -> bool:
        return anchor != self.world.topic_info.incarnation

    def queues(self, name: str) -> list[MessageQueue]:
        return self.world.queues

    def readable(self, name: str) -> list[MessageQueue]:
        return self.world.queues

    def resizes(self, topics: Sequence[str]) -> list[Resize]:
        # Without resizes, make no call, so that such seeds keep their random draws.
        return [] if self.world.resizing is None else self._call(self.world.resizes)

    def require_rights(self, topics: Sequence[str], group: str | None) -> None:
        """Allow everything."""

    def bounds(self, queues: Sequence[MessageQueue]) -> dict[MessageQueue, QueueBounds]:
        if self.world.lots is None and any(map(is_parked, queues)):
            # Without lots, make no call, so that seeds without lots keep the random draws that they had before lots were added.
            return {}
        return self._call(self.world.bounds, queues)

    def pull(
        self,
        queue: MessageQueue,
        offset: int,
        max_messages: int,
        max_bytes: int,
        columns: Sequence[str],
        anchor: str | None = None,
        until: int | None = None,
    ) -> pa.RecordBatch:
        assert self.world.lots is not None
        assert is_parked(queue)
        return self._call(self._pull, queue, offset, offset + max_messages)

    def _pull(self, lot: MessageQueue, begin: int, end: int) -> pa.RecordBatch:
        lots, lock = self.world.lots, self.world.locks.get(leader_of(GROUP, lot))
        assert lots is not None
        mine = lock is not None and self.client is not None and lock.client_id == self.client.client_id
        if begin < lots.begins.get(lot, 0) and not mine:
            # This process was paused, and since then the next owner has moved the group's offset.
            raise aged_out(lot, begin, lots.begins[lot])
        return lots.pull(lot, begin, end)

    # -- Groups --------------------------------------------------------------------------------------------------------------

    def join(self, owner: str) -> ClientIdentity:
        if self.dead:
            raise Killed
        self.client = ClientIdentity(owner, f"{owner}@{self.name}")
        self.world.alive.add(self.client.client_id)
        return self.client

    def cut_off(self, client: ClientIdentity) -> bool:
        del client
        return False

    def leave(self, client: ClientIdentity) -> None:
        self._call(self.world.leave, client)

    def heartbeat(self, name: str, client: ClientIdentity, subscription: Subscription) -> list[Member]:
        return self._call(self.world.heartbeat, client, subscription)

    def members(self, name: str) -> list[Member]:
        return self._call(self.world.members)

    def lock(
        self,
        name: str,
        client: ClientIdentity,
        queues: Sequence[MessageQueue],
        tenures: Mapping[MessageQueue, int] | None = None,
    ) -> dict[MessageQueue, LockToken | Refusal]:
        return self._call(self.world.lock, client, queues)

    def renew(self, tokens: Sequence[LockToken]) -> list[LockToken]:
        return self._call(self.world.renew, tokens)

    def unlock(self, tokens: Sequence[LockToken], linger: float = 0.0) -> None:
        self._call(self.world.unlock, tokens, linger)

    def stale(self, tokens: Sequence[LockToken]) -> list[LockToken]:
        return self._call(self.world.stale, tokens)

    def end_tenures(self, name: str, tenures: Mapping[MessageQueue, int]) -> None:
        """The world's broker keeps lineage."""

    def offsets(self, name: str, queues: Sequence[MessageQueue]) -> dict[MessageQueue, int]:
        return self._call(self.world.offsets, queues)

    def commit(self, offsets: Mapping[LockToken, int]) -> None:
        self._call(self.world.commit, offsets)

    def close(self) -> None:
        self.kill()


class VirtualRenewal(Renewal):
    """The renewal without its thread. The world's clock starts each round."""

    def start(self) -> None:
        process = self._groups
        assert isinstance(process, Process)
        process.renewal, process.renewed = self, process.world.now

    def stop(self) -> None:
        process = self._groups
        assert isinstance(process, Process)
        process.renewal = None

    def once(self) -> None:
        rounds = iter((False, True))
        self._wait = lambda: next(rounds)  # type: ignore[method-assign]
        self._run()


class Clock:
    """Replaces the module ``time`` in a process of the world."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def monotonic(self) -> float:
        return self._network.world.now

    def time(self) -> float:
        return self._network.world.wall()

    def sleep(self, seconds: float) -> None:
        self._network.world.advance(-(-seconds // TICK) * TICK)
        self._network.meanwhile()


def _no_request(request: stopping.StopRequest) -> None:
    """Look for no file, because no application asks a simulated query to stop."""


@contextlib.contextmanager
def virtual(network: Network, connect: Callable[[str], Process]) -> Iterator[None]:
    """Run the source's real code in the world: with its broker and clock, names drawn from the seed, no signals and no log."""
    clock, logger = Clock(network), logging.getLogger("orderedmq")
    drawn = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=f"{network.random.getrandbits(32):08x}"))
    signals = SimpleNamespace(SIGTERM=15, SIG_IGN=1, signal=lambda *_: None)
    disabled, logger.disabled = logger.disabled, True
    try:
        with (
            mock.patch.object(stream_reader, "time", clock),
            mock.patch.object(topic_watch, "time", clock),
            mock.patch.object(group_session, "time", clock),
            mock.patch.object(stream_reader, "uuid", drawn),
            mock.patch.object(stream_reader, "signal", signals),
            mock.patch.object(group_session, "Renewal", VirtualRenewal),
            mock.patch.object(stopping.StopRequest, "_file", _no_request),
            mock.patch.object(stream_reader, "reach", lambda endpoint: connect(endpoint.path)),
        ):
            yield
    finally:
        logger.disabled = disabled
