"""Finds the messages of a task that are settled: an earlier attempt or owner has parked them or made them dead letters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from itertools import groupby
from typing import Final

from ordered_source.read_context import TaskLot
from orderedmq import pulls
from orderedmq.broker import Broker, PullSettings
from orderedmq.listening.engine import NO_BOUND, LotView, Message, Outcome
from orderedmq.model import MAX_OFFSET, MessageQueue, OffsetRange
from orderedmq.ownership.lock import LockToken
from orderedmq.parking import Lot

#: The parking lots that this process has read: (broker, group, queue) → (epoch of the lock under which it was read, lot).
_LOTS: Final[dict[tuple[str, str, MessageQueue], tuple[int, Lot]]] = {}


class Settled:
    """Messages of a queue that a task must not process because they are settled.

    They are dead letters, or they are in the parking lot and do not belong to this micro-batch.
    """

    def __init__(self, lot: Lot, plan: TaskLot, letters: Set[int] = frozenset()) -> None:
        """``lot``: the contents of the parking lot after the part that this micro-batch reads."""
        self._lot = lot
        self._plan = plan
        self._letters = letters

    @classmethod
    def without_lot(cls, letters: Set[int] = frozenset()) -> Settled:
        """Return the settled messages of a task without a parking lot."""
        return cls(Lot(0), TaskLot(0, 0, 0, NO_BOUND), letters)

    @classmethod
    def read(
        cls, broker: Broker, token: LockToken, parked: MessageQueue, plan: TaskLot, planned: Collection[int] = ()
    ) -> Settled:
        """Read the parking lot ``parked`` from the end of its planned part to its current end, and ask the broker for dead letters.

        ``planned``: the queue offsets of the planned messages. No other process writes messages to the lot while the query holds the lock.
        So the contents that this process has read are kept, and the process's next task continues to read where this task stopped.
        """
        name = (broker.identity, token.group, parked)
        epoch, lot = _LOTS.get(name, (-1, None))
        # Read as the group: the account may have no right to read under another name.
        log = broker.log.reading(PullSettings(token.group))
        end = pulls.end_of_lot(log, parked)
        if lot is None or epoch != token.epoch or lot.begin != plan.end or lot.end > end:
            lot = Lot(plan.end)
        # Store the lot only after a complete read, because a failed read may have stopped half way.
        _LOTS.pop(name, None)
        pulls.read_lot(log, lot, parked, end)
        _LOTS[name] = token.epoch, lot
        spans = [*runs(sorted(offset for offset in planned if offset < plan.q_begin)), OffsetRange(plan.q_begin, MAX_OFFSET)]
        return cls(lot, plan, broker.groups.letters(token, spans))

    def view(self, planned: Sequence[Message] = ()) -> LotView:
        """Return the parking lot as the engine sees it. ``planned``: this micro-batch's messages from the lot, without settled ones."""
        lot, plan = self._lot, self._plan
        offsets = {key: parked.offsets for key, parked in lot.keys.items()}
        waiting: Mapping[object, Sequence[int]] = {}
        attempted: Mapping[object, Sequence[int]] = {}
        if plan.begin < plan.end:
            # The plan includes all messages that were in the lot when it was made. An earlier attempt at
            # this range has parked the messages that were added after the plan.
            attempted = offsets
        elif lot.max_offset < plan.q_begin:
            waiting = offsets
        else:
            waiting = _chosen(offsets, lambda offset: offset < plan.q_begin)
            attempted = _chosen(offsets, lambda offset: offset >= plan.q_begin)
        return LotView(plan.capacity, planned, lot.places, waiting, attempted)

    def divide(self, messages: list[Message]) -> tuple[list[Message], list[Outcome]]:
        """Return the messages of the task that have to be processed, and the outcomes of the settled messages.

        A message that is parked and also has a dead letter gets the outcome PARKED here. It gets DEAD_LETTER in the micro-batch that reads
        it from the parking lot.
        """
        lot, letters = self._lot, self._letters
        if not letters and (
            lot.max_offset < 0 or not messages or lot.max_offset < min(message._offset for message in messages)
        ):
            return messages, []
        left: list[Message] = []
        settled: list[Outcome] = []
        for message in messages:
            if message._offset in lot.places:
                settled.append(Outcome(message._offset, message._offset + 1, message._key, "PARKED", 0, 0.0, None))
            elif message._offset in letters:
                settled.append(Outcome(message._offset, message._offset + 1, message._key, "DEAD_LETTER", 0, 0.0, None))
            else:
                left.append(message)
        return left, settled


def runs(offsets: Sequence[int]) -> list[OffsetRange]:
    """Return ascending offsets as ranges of consecutive offsets."""
    numbered = (list(run) for _, run in groupby(enumerate(offsets), lambda one: one[1] - one[0]))
    return [OffsetRange(run[0][1], run[-1][1] + 1) for run in numbered]


def _chosen(offsets: Mapping[object, Sequence[int]], which: Callable[[int], bool]) -> dict[object, Sequence[int]]:
    return {key: chosen for key, every in offsets.items() if (chosen := [offset for offset in every if which(offset)])}
