"""What lies in a queue's parking lot and is not planned, as a task finds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ordered_source.lock_token import LotPlan
from orderedmq import lots
from orderedmq.broker import Broker
from orderedmq.core.key_lanes import NOTHING
from orderedmq.core.key_order import Outcome
from orderedmq.core.lock import LockToken
from orderedmq.core.parked_rows import Lot
from orderedmq.core.pull_settings import PullSettings
from orderedmq.model import MessageQueue

#: The lots that this process has read: of (broker, group, queue), under the lock of that epoch.
_LOTS: Final[dict[tuple[str, str, MessageQueue], tuple[int, Lot]]] = {}


class Lying:
    """The messages of a parking lot behind what is planned of it, up to its end.

    ``waiting``: by key, the offsets in the queue of those that were parked before this range; ``attempted``: of those that an
    earlier attempt of this range has parked.
    """

    def __init__(self, lot: Lot, plan: LotPlan) -> None:
        self._lot = lot
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
    def read(cls, broker: Broker, token: LockToken, parked: MessageQueue, plan: LotPlan) -> Lying:
        """Read the lot ``parked`` from the broker, from the end of what is planned to its own end.

        Nobody else writes messages to it while the lock is held, so what a former task of this process has read is continued.
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
        return cls(lot, plan)

    @property
    def offsets(self) -> Mapping[int, int]:
        """The offsets in the queue of all messages, and where each lies in the lot."""
        return self._lot.places

    def repeated(self, offsets: Sequence[int], keys: Sequence[str | None]) -> list[Outcome]:
        """Return outcomes of those of the task's messages that an earlier attempt has parked."""
        lot = self._lot
        if not offsets or lot.max_offset < min(offsets):
            return []
        return [
            Outcome(offset, key, "PARKED", 0, 0, 0.0, None)
            for offset, key in zip(offsets, keys, strict=True)
            if offset in lot.places
        ]


def _offsets(lot: Lot, begin: int) -> dict[object, Sequence[int]]:
    """The offsets of each key from ``begin`` on, in the queue."""
    if begin <= 0:
        return {key: one.offsets for key, one in lot.keys.items()}
    return {key: found for key, one in lot.keys.items() if (found := [offset for offset in one.offsets if offset >= begin])}
