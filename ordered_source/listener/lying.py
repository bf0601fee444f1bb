"""What earlier attempts and owners have settled of a task's messages: parked, or made dead letters of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Final

from ordered_source.listener.messages import runs
from ordered_source.read_context import LotPlan
from orderedmq import lots
from orderedmq.broker import Broker
from orderedmq.core.key_lanes import NOTHING
from orderedmq.core.key_order import Message, Outcome
from orderedmq.core.lock import LockToken
from orderedmq.core.parked_rows import Lot
from orderedmq.core.pull_settings import PullSettings
from orderedmq.model import MAX_OFFSET, MessageQueue, OffsetRange

#: The lots that this process has read: of (broker, group, queue), under the lock of that epoch.
_LOTS: Final[dict[tuple[str, str, MessageQueue], tuple[int, Lot]]] = {}


class Lying:
    """The messages of a parking lot behind what is planned of it, up to its end, and the offsets of those with dead letters.

    ``waiting``: by key, the offsets in the queue of those that were parked before this range; ``attempted``: of those that an
    earlier attempt of this range has parked.
    """

    def __init__(self, lot: Lot, plan: LotPlan, letters: Set[int] = frozenset()) -> None:
        self._lot = lot
        self._letters = letters
        self.waiting: Mapping[object, Sequence[int]] = NOTHING
        self.attempted: Mapping[object, Sequence[int]] = NOTHING
        if plan.begin < plan.end:
            # All of it was planned as it was: who put the rest there worked on this range.
            self.attempted = _offsets(lot, -1)
        elif lot.max_offset < plan.q_begin:
            self.waiting = _offsets(lot, -1)
        else:
            self.attempted = _offsets(lot, plan.q_begin)
            self.waiting = {
                key: below
                for key, one in lot.keys.items()
                if (below := [offset for offset in one.offsets if offset < plan.q_begin])
            }

    @classmethod
    def read(cls, broker: Broker, token: LockToken, parked: MessageQueue, plan: LotPlan, planned: Sequence[int] = ()) -> Lying:
        """Read the lot ``parked`` from the broker, from the end of what is planned to its own end, and ask for dead letters.

        ``planned``: the offsets in the queue of what is planned. Nobody else writes messages to the lot while the lock is held, so
        what a former task of this process has read is continued.
        """
        name = (broker.identity, token.group, parked)
        epoch, lot = _LOTS.get(name, (-1, None))
        # As the group: the account may be allowed to read in no other name.
        log = broker.log.reading(PullSettings(token.group))
        end = lots.end_of(log, parked)
        if lot is None or epoch != token.epoch or lot.begin != plan.end or lot.end > end:
            lot = Lot(plan.end)
        # It is noted once it is complete, because a read that fails may have come half way.
        _LOTS.pop(name, None)
        lots.read(log, lot, parked, end)
        _LOTS[name] = token.epoch, lot
        spans = [*runs(sorted(offset for offset in planned if offset < plan.q_begin)), OffsetRange(plan.q_begin, MAX_OFFSET)]
        return cls(lot, plan, broker.groups.letters(token, spans))

    @property
    def offsets(self) -> Mapping[int, int]:
        """The offsets in the queue of all messages, and where each lies in the lot."""
        return self._lot.places

    def divide(self, messages: list[Message]) -> tuple[list[Message], list[Outcome]]:
        """Return those of the task's messages that are to be processed, and the outcomes of those that are settled.

        A message with a dead letter that is also parked is PARKED here, and a DEAD_LETTER when its place in the lot is planned.
        """
        lot, letters = self._lot, self._letters
        if not messages or (not letters and lot.max_offset < min(one.offset for one in messages)):
            return messages, []
        left: list[Message] = []
        settled: list[Outcome] = []
        for one in messages:
            if one.offset in lot.places:
                settled.append(Outcome(one.offset, one.key, "PARKED", 0, 0, 0.0, None))
            elif one.offset in letters:
                settled.append(Outcome(one.offset, one.key, "DEAD_LETTER", 0, 0, 0.0, None))
            else:
                left.append(one)
        return left, settled


def _offsets(lot: Lot, begin: int) -> dict[object, Sequence[int]]:
    """The offsets of each key from ``begin`` on, in the queue."""
    if begin <= 0:
        return {key: one.offsets for key, one in lot.keys.items()}
    return {key: found for key, one in lot.keys.items() if (found := [offset for offset in one.offsets if offset >= begin])}
