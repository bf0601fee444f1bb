"""How the attempts of a batch agree on the batch's queues in a topic, before any of them sends a row. Uses no sockets.

The rule: a list of queues is used only when every broker that it needs has stored its record (`batch_queues`), and a list that a record
names is never replaced for the same batch. The usual attempt finds the record of the proposed list at all these brokers. Otherwise it locks
the *gate* at every broker of the topic that answers, read-only ones included, so that one attempt at a time decides. It reads the
records again, and uses the recorded list, or else records its own. It also restores records that a killed broker has forgotten. If a
broker of the recorded list is away or takes no rows, the attempt waits, and then fails without having sent anything.

An attempt whose list was agreed on once may send at any later time, because every later attempt finds that list. A broker that was
killed may forget the record, with the locks of its queues. So an attempt that gets the lock of a queue compares the record there, and
agrees again if it is gone. Nothing is known about the list if no broker with its record is left, as after the loss of the only broker.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final, NamedTuple, Protocol

from orderedmq.conditions import SinkCondition
from orderedmq.errors import RocketMQUnavailableError, SinkError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.net.deadline import Backoff
from orderedmq.rocketmq.sink.batch_queues import BatchQueues, Record, queues_away, recorded
from orderedmq.rocketmq.wire.route import Route

_RETRY: Final = Backoff(first=0.1, most=2.0)


class BrokerState(NamedTuple):
    """What a broker stores for the sink in the topic. ``committed``: the newest committed batch, -1 for none.

    ``entered``: whether the sink has its group and bookmarks there. An absent record has the value 0.
    """

    record: Record
    committed: int
    entered: bool


States = dict[str, BrokerState | RocketMQUnavailableError]


class TopicBrokers(Protocol):
    """The brokers of one topic, as one attempt of the sink uses them. Brokers are named."""

    def route(self) -> Route:
        """Return the topic's present route."""
        ...

    def read(self, names: Sequence[str]) -> States:
        """Return each broker's state, or the error of a broker that cannot be reached within seconds."""
        ...

    def gates(self, names: Sequence[str], unless: Callable[[], bool]) -> AbstractContextManager[Callable[[], bool] | None]:
        """Wait for the gate at each of these brokers, in order. Enter with None when ``unless()`` is true.

        Otherwise enter with a function that returns whether all gates are still held. Raises LockError HELD_BY_OTHER.
        """
        ...

    def enter(self, name: str) -> None:
        """Create the sink's group and bookmarks at a broker."""
        ...

    def write(self, name: str, record: Record) -> None: ...
    def wait(self, seconds: float) -> None: ...
    def now(self) -> float:
        """Return the time in monotonic seconds."""
        ...


class Agreement:
    """The agreed list of one batch in one topic. Thread-safe."""

    def __init__(self, brokers: TopicBrokers, batch: int, patience: float) -> None:
        """``patience``: the longest wait for brokers that are away, in seconds."""
        self._brokers = brokers
        self._batch = batch
        self._patience = patience
        self._agreed: BatchQueues | None = None
        self._guard = threading.Lock()
        #: The sink's newest committed batch at any broker that was asked; -1 for none. If it is not below the batch, no row may be sent.
        self.committed = -1

    def reach(self, proposed: Sequence[MessageQueue]) -> tuple[MessageQueue, ...]:
        """Return the batch's queues: those of an earlier attempt, or else ``proposed``.

        Raises SinkError QUEUES_AWAY, or the error of a broker that is away, after waiting for ``patience`` seconds.
        """
        with self._guard:
            self._agreed = self._reach(BatchQueues(self._batch, tuple(proposed)))
            return self._agreed.queues

    def holds(self, broker_name: str, record: Record) -> bool:
        """Return whether a broker's record is that of the agreed list."""
        return self._agreed is not None and record == self._agreed.record(broker_name)

    def renew(self) -> None:
        """Restore the records that brokers have forgotten. Raises SinkError QUEUES_AWAY if another list was agreed on since."""
        with self._guard:
            assert self._agreed is not None
            if self._reach(self._agreed) != self._agreed:
                raise queues_away(self._agreed, "a broker has forgotten them, and another run of the batch uses others")

    def _reach(self, proposed: BatchQueues) -> BatchQueues:
        deadline = self._brokers.now() + self._patience
        failures = 0
        while True:
            try:
                return self._step(proposed)
            except (RocketMQUnavailableError, SinkError) as error:
                if isinstance(error, SinkError) and error.sub != SinkCondition.QUEUES_AWAY:
                    raise
                failures += 1
                delay = _RETRY.delay(failures, random.random())
                if self._brokers.now() + delay > deadline:
                    raise
            self._brokers.wait(delay)

    def _step(self, proposed: BatchQueues) -> BatchQueues:
        route = self._brokers.route()
        states = self._read(list(proposed.counts))
        if _is_recorded(proposed, states) and proposed.lack(route, sending=True, recorded=True) is None:
            return proposed
        masters = sorted(name for name, broker in route.brokers.items() if broker.master is not None)
        states |= self._read([name for name in masters if name not in states])
        answering = [name for name in masters if isinstance(states[name], BrokerState)]
        with self._brokers.gates(answering, lambda: _is_recorded(proposed, self._read(list(proposed.counts)))) as locked:
            if locked is None:
                return proposed
            return self._decide(proposed, route, states | self._read(answering), locked)

    def _read(self, names: Sequence[str]) -> States:
        states = self._brokers.read(names)
        newest = [state.committed for state in states.values() if isinstance(state, BrokerState)]
        self.committed = max([self.committed, *newest])
        return states

    def _decide(
        self,
        proposed: BatchQueues,
        route: Route,
        states: States,
        locked: Callable[[], bool],
    ) -> BatchQueues:
        """Return the recorded list, or else the proposed one. If rows may be sent, first store its record where it is missing."""
        present = {name: state for name, state in states.items() if isinstance(state, BrokerState)}
        fixed = recorded(proposed, {name: state.record for name, state in present.items()}, route, self.committed)
        queues = fixed or proposed
        sending = self.committed < self._batch
        why = queues.lack(route, sending=sending, recorded=fixed is not None)
        if why is not None:
            raise queues_away(queues, why)
        if not sending:
            return queues
        required = queues.required(route)
        for name in required:
            state = states[name]
            if not isinstance(state, BrokerState):
                raise state
        # The brokers that need the record come last: if they have it, the others have it too.
        for name in [*(name for name in present if name not in required), *required]:
            if present[name].record == queues.record(name):
                continue
            try:
                if not present[name].entered:
                    self._brokers.enter(name)
                if not locked():
                    raise queues_away(queues, "the locks of the brokers' gates were lost")
                self._brokers.write(name, queues.record(name))
            except RocketMQUnavailableError:
                # The record at a broker without queues of the batch helps only if the other brokers are away or forget theirs.
                if name in required:
                    raise
        if not locked():
            # A broker has restarted, so another attempt may have decided since.
            raise queues_away(queues, "the locks of the brokers' gates were lost")
        return queues


def _is_recorded(queues: BatchQueues, states: States) -> bool:
    """Return whether every broker of the list has its record."""
    return bool(queues.counts) and all(
        isinstance(state := states[name], BrokerState) and state.record == queues.record(name) for name in queues.counts
    )
