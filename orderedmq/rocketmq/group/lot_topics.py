"""Finds the topics of parking lots at the brokers, counts their parked messages, and deletes them, for administrators."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from orderedmq.broker import PullSettings
from orderedmq.errors import GroupError, RocketMQError, TopicError
from orderedmq.model import MessageQueue
from orderedmq.parking.lot import Lot
from orderedmq.parking.rules import leader_of, origin
from orderedmq.pulls import read_lot as read_lot
from orderedmq.rocketmq.group.offsets import GroupOffsets
from orderedmq.rocketmq.messages.log import RocketMQLog
from orderedmq.rocketmq.messages.topic_changes import delete_topic
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.deadline import REQUEST_TIMEOUT, Deadline


class LotTopics:
    """Finds, counts and deletes parking lots. Thread-safe."""

    def __init__(self, client: Client, log: RocketMQLog, offsets: GroupOffsets) -> None:
        self._client = client
        self._log = log
        self._offsets = offsets

    def find(self, *, group: str | None = None, topic: str | None = None) -> dict[str, tuple[str, str]]:
        """Return the names of parking lots' topics with their (group, topic), restricted to ``group`` and ``topic`` if given."""
        names = sorted(self._client.topics(Deadline.after(REQUEST_TIMEOUT)))
        found = {name: of for name in names if (of := origin(name)) is not None}
        return {name: of for name, of in found.items() if group in (None, of[0]) and topic in (None, of[1])}

    def queues_of(self, names: Iterable[str]) -> list[MessageQueue]:
        """Return the queues of the topics in ``names`` that exist."""
        found: list[MessageQueue] = []
        for name in names:
            with contextlib.suppress(TopicError):
                found += self._log.queues(name)
        return found

    def ends(self, lots: Sequence[MessageQueue]) -> dict[MessageQueue, int]:
        return {lot: bounds.max_offset for lot, bounds in self._log.bounds(lots).items()}

    def count(self, group: str, lots: Sequence[MessageQueue]) -> dict[MessageQueue, int]:
        """Return how many messages are parked in each lot. Lots without parked messages are left out."""
        counts: dict[MessageQueue, int] = {}
        log, offsets = self._log.reading(PullSettings(group)), self._offsets.read(group, lots)
        for lot, bounds in self._log.bounds(lots).items():
            found = Lot(max(bounds.min_offset, min(offsets.get(lot, 0), bounds.max_offset)))
            read_lot(log, found, lot, bounds.max_offset)
            if found.messages:
                counts[lot] = found.messages
        return counts

    def require_none(
        self, group: str, lots: Sequence[MessageQueue], error: Callable[[str, int, Sequence[MessageQueue]], GroupError]
    ) -> None:
        used = self.count(group, lots)
        if used:
            raise error(group, sum(used.values()), [leader_of(group, lot) for lot in used])

    def delete(
        self,
        names: Mapping[str, tuple[str, str]],
        masters: Mapping[str, str],
        explain: Callable[[Sequence[str], str], str] | None = None,
    ) -> None:
        """Delete these topics of parking lots, with the groups' offsets in them. Raises RocketMQUnavailableError.

        If a group has read one of these topics as a normal topic, it may have parking lots of that topic. These lots are also deleted.

        ``explain`` makes an error's message from the topics that were not deleted and the reason.
        """
        left = sorted(names)
        while left:
            try:
                self._delete_one(left[0], names[left[0]][0], masters)
            except RocketMQError as error:
                if explain is None:
                    raise
                raise type(error)(error.sub, explain(left, error.message)) from error
            del left[0]

    def _delete_one(self, name: str, group: str, masters: Mapping[str, str]) -> None:
        self.delete(self.find(topic=name), masters)
        offsets = self._offsets.read(group, self.queues_of([name]))
        # Before 5.0, offsets outlive their topic. In a new lot of the same name they would hide parked messages.
        cleared = self._offsets.clear(group, [lot for lot, offset in offsets.items() if offset])
        try:
            delete_topic(self._client, self._log, name, masters.values())
        except RocketMQError as error:
            if error.denied:
                # The lot stays, so restore the group's offsets in it.
                with contextlib.suppress(TopicError):
                    self._offsets.write(group, {lot: offsets[lot] for lot in cleared})
            raise
