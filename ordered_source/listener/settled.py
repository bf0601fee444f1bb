"""What earlier attempts of a range have settled, so that a task does not give it to its listener again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from itertools import groupby, repeat
from typing import Final

from ordered_source.columns import LotPlan
from orderedmq import pulls
from orderedmq.broker import Broker, Progress, PullSettings
from orderedmq.listening.engine import NO_BOUND, LotView, Message, Outcome, OutcomeStatus
from orderedmq.model import MAX_OFFSET, MessageQueue, OffsetRange
from orderedmq.ownership.lock import LockToken
from orderedmq.parking import Lot

NO_PROGRESS: Final = Progress()
#: The parking lots that this process has read: (broker, group, queue) → (epoch of the lock under which it was read, lot).
_LOTS: Final[dict[tuple[str, str, MessageQueue], tuple[int, Lot]]] = {}


class Settled:
    """Messages of a queue that a task must not process because they are settled.

    They are dead letters, or they are in the parking lot and do not belong to this micro-batch, or an earlier run of the range has
    recorded that they are decided (`Progress`).
    """

    def __init__(self, lot: Lot, plan: LotPlan, letters: Set[int] = frozenset(), progress: Progress = NO_PROGRESS) -> None:
        """``lot``: the contents of the parking lot after the part that this micro-batch reads."""
        self._plan = plan
        self._letters = letters
        self._progress = progress
        #: The parked messages, without those that an earlier owner, which has read more of the lot, has decided.
        self._places: Mapping[int, int] = lot.places
        self._keys: Mapping[object, Sequence[int]] = {key: parked.offsets for key, parked in lot.keys.items()}
        self._max_offset = max(lot.places, default=-1)
        #: Whether messages of that part of the lot are undecided, and not planned either.
        self._is_behind = False
        if progress.lot > plan.end:
            undecided = {offset for offset in lot.places if not self._is_decided(offset, lot.place(offset))}
            self._places = {offset: place for offset, place in lot.places.items() if offset in undecided}
            self._keys = _chosen(self._keys, undecided.__contains__)
            self._max_offset = max(undecided, default=-1)
            self._is_behind = any(lot.place(offset) < progress.lot for offset in undecided)

    @classmethod
    def without_lot(cls, letters: Set[int], progress: Progress = NO_PROGRESS) -> Settled:
        """Return the settled messages of a task without a parking lot."""
        return cls(Lot(0), LotPlan(0, 0, 0, NO_BOUND), letters, progress)

    @classmethod
    def read(
        cls,
        broker: Broker,
        token: LockToken,
        parked: MessageQueue,
        plan: LotPlan,
        planned: Collection[int] = (),
        progress: Progress = NO_PROGRESS,
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
        if progress.lot > end:
            # It is that of a former lot.
            progress = progress._replace(lot=0)
        return cls(lot, plan, broker.groups.letters(token, spans), progress)

    def view(self, planned: Sequence[Message] = ()) -> LotView:
        """Return the parking lot as the engine sees it. ``planned``: this micro-batch's messages from the lot, without settled ones."""
        plan, offsets = self._plan, self._keys
        parked_before: Mapping[object, Sequence[int]] = {}
        in_range: Mapping[object, Sequence[int]] = {}
        if plan.begin < plan.end:
            # The plan includes all messages that were in the lot when it was made. An earlier attempt at
            # this range has parked the messages that were added after the plan.
            in_range = offsets
        elif self._max_offset < plan.q_begin:
            parked_before = offsets
        else:
            parked_before = _chosen(offsets, lambda offset: offset < plan.q_begin)
            in_range = _chosen(offsets, lambda offset: offset >= plan.q_begin)
        return LotView(plan.capacity, planned, self._places.keys(), parked_before, in_range)

    def divide(self, messages: list[Message], places: Sequence[int] | None = None) -> tuple[list[Message], list[Outcome]]:
        """Return the messages of the task that have to be processed, and the outcomes of the settled messages.

        ``places``: where the messages lie in the parking lot, None if they are of the queue. A message that is parked and also has a dead
        letter gets the outcome PARKED here. It gets DEAD_LETTER in the micro-batch that reads it from the parking lot.
        """
        letters = self._letters
        highest = max(self._max_offset, self._progress.offset - 1)
        if not letters and (highest < 0 or not messages or highest < min(message._offset for message in messages)):
            return messages, []
        undecided: list[Message] = []
        settled: list[Outcome] = []
        for message, place in zip(messages, places or repeat(-1)):
            offset = message._offset
            status: OutcomeStatus
            if offset in self._places:
                status = "PARKED"
            elif offset in letters:
                status = "DEAD_LETTER"
            elif self._is_decided(offset, place):
                status = "SUCCESS"
            else:
                undecided.append(message)
                continue
            settled.append(Outcome(offset, offset + 1, message._key, status, 0, 0.0, None))
        return undecided, settled

    def _is_decided(self, offset: int, place: int) -> bool:
        """Whether the progress covers a message at a place in the parking lot, or -1 if it is in the queue."""
        return offset < self._progress.offset and place < self._progress.lot

    def advance(self, offset: int) -> Progress | None:
        """Return the progress of a task whose messages below ``offset``, of the range and planned ones, are all decided.

        Return None if an earlier run has recorded more, or if that would cover messages of the lot that this task does not have.
        """
        if self._is_behind or offset < self._progress.offset:
            return None
        return Progress(offset, max(self._plan.end, self._progress.lot))


def runs(offsets: Sequence[int]) -> list[OffsetRange]:
    """Return ascending offsets as ranges of consecutive offsets."""
    numbered = (list(run) for _, run in groupby(enumerate(offsets), lambda one: one[1] - one[0]))
    return [OffsetRange(run[0][1], run[-1][1] + 1) for run in numbered]


def _chosen(offsets: Mapping[object, Sequence[int]], which: Callable[[int], bool]) -> dict[object, Sequence[int]]:
    return {key: chosen for key, every in offsets.items() if (chosen := [offset for offset in every if which(offset)])}
