"""Finds out when the first unprocessed message of each queue was stored, which shows groups' lag as a time.

Rules: a broker reports this time only with the message, so each `look` requests at most `MOST` messages. A known message is
requested again only after `AGAIN` seconds, because its topic may have been recreated. The queues that were requested longest ago
come first. A queue whose offset has moved keeps the time of its former message until its new message is requested. The new message
was stored later, so the lag may look greater than it is, but never smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from orderedmq.broker import Broker, PullSettings
from orderedmq.errors import RocketMQError
from orderedmq.model import MessageQueue
from orderedmq.tools.group_state import GroupQueue

#: Maximum number of messages that one call of `look` requests.
MOST: Final = 500
#: Seconds after which a message is requested again, even if the account was not allowed to read it.
AGAIN: Final = 600.0

#: A group and one of its queues.
Place = tuple[str, MessageQueue]


class _Known(NamedTuple):
    """``stored``: in seconds since 1970, None if the message could not be read. ``asked``: when the broker was asked."""

    offset: int
    stored: float | None
    asked: float


class StoreTimes:
    """The store times of the first unprocessed messages of all groups of a broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._known: dict[Place, _Known] = {}

    def look(self, now: float, queues: Sequence[GroupQueue]) -> dict[Place, float]:
        """Return when the first unprocessed message of each queue was stored, in seconds since 1970, as far as that is known.

        A queue without an unprocessed message is left out. ``now``: in seconds, from any clock.
        """
        behind = {(one.group, one.queue): one.following for one in queues if one.lag}
        self._known = {place: known for place, known in self._known.items() if place in behind}
        due = [place for place, offset in behind.items() if self._is_due(now, place, offset)]
        due.sort(key=lambda place: self._known[place].asked if place in self._known else float("-inf"))
        by_group: dict[str, dict[MessageQueue, int]] = {}
        for group, queue in due[:MOST]:
            by_group.setdefault(group, {})[queue] = behind[group, queue]
        for group, offsets in by_group.items():
            found = self._ask(group, offsets)
            for queue, offset in offsets.items():
                stored = found.get(queue)
                self._known[group, queue] = _Known(offset, None if stored is None else stored / 1e6, now)
        return {place: known.stored for place, known in self._known.items() if known.stored is not None}

    def _is_due(self, now: float, place: Place, offset: int) -> bool:
        known = self._known.get(place)
        return known is None or known.offset != offset or now - known.asked >= AGAIN

    def _ask(self, group: str, offsets: dict[MessageQueue, int]) -> dict[MessageQueue, int]:
        try:
            # Read as the group: the account may have no right to read under another name.
            return self._broker.log.reading(PullSettings(group)).stored_at(offsets)
        except RocketMQError as error:
            if not error.denied:
                raise
            return {}
