"""What the Admin protocol says of parking lots, over a cluster: orders, counts and deletion (rules: parking/rules.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

from orderedmq.errors import GroupError, RocketMQError, TopicError
from orderedmq.model import PARKED_PROPERTIES, MessageQueue
from orderedmq.parking.lot import Lot, order_rows
from orderedmq.parking.reading import read as read_lot
from orderedmq.parking.rules import Order, is_parking_lot, leader_of, origin, parked_queue
from orderedmq.rocketmq.codec.encode import encode, property_columns
from orderedmq.rocketmq.group import lock_rules
from orderedmq.rocketmq.group.offsets import GroupOffsets
from orderedmq.rocketmq.messages.log import RocketMQLog
from orderedmq.rocketmq.messages.topic_changes import delete_topic
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.deadline import REQUEST_TIMEOUT, Deadline
from orderedmq.rows.pull_settings import PullSettings


class ParkedAdmin:
    """The parking lots' part of the Admin protocol, for a subclass that has a client and a log."""

    _client: Client
    _log: RocketMQLog

    @cached_property
    def _numbers(self) -> GroupOffsets:
        return GroupOffsets(self._client)

    def order_parked(self, group: str, queue: MessageQueue, orders: Sequence[Order]) -> None:
        """See `Admin.order_parked`."""
        lock_rules.check_name(group)
        lot = parked_queue(group, queue)
        self._log.require(lot)
        rows = order_rows(orders)
        log = self._log.reading(PullSettings(group))
        keys = log.sender.unique_keys(rows.num_rows)
        extra = property_columns(rows, PARKED_PROPERTIES)
        log.sender.append_encoded(lot, list(encode(rows, keys, f"the parking lot {lot}", extra=extra)), keys)

    def _lots(self, *, group: str | None = None, topic: str | None = None) -> dict[str, tuple[str, str]]:
        """Return the topics of parking lots of a group, or for a topic, with group and topic."""
        names = sorted(self._client.topics(Deadline.after(REQUEST_TIMEOUT)))
        found = {name: of for name in names if (of := origin(name)) is not None}
        return {name: of for name, of in found.items() if group in (None, of[0]) and topic in (None, of[1])}

    def _queues_of(self, names: Iterable[str]) -> list[MessageQueue]:
        """Return the queues of those topics that exist."""
        found: list[MessageQueue] = []
        for name in names:
            with contextlib.suppress(TopicError):
                found += self._log.queues(name)
        return found

    def _ends(self, lots: Sequence[MessageQueue]) -> dict[MessageQueue, int]:
        return {lot: bounds.max_offset for lot, bounds in self._log.bounds(lots).items()}

    def _count_parked(self, group: str, lots: Sequence[MessageQueue]) -> dict[MessageQueue, int]:
        """Return how many messages are parked in each lot; lots without any are left out."""
        counts: dict[MessageQueue, int] = {}
        log, offsets = self._log.reading(PullSettings(group)), self._numbers.read(group, lots)
        for lot, bounds in self._log.bounds(lots).items():
            found = Lot(max(bounds.min_offset, min(offsets.get(lot, 0), bounds.max_offset)))
            read_lot(log, found, lot, bounds.max_offset)
            if found.messages:
                counts[lot] = found.messages
        return counts

    def _require_none_parked(
        self, group: str, lots: Sequence[MessageQueue], error: Callable[[str, int, Sequence[MessageQueue]], GroupError]
    ) -> None:
        used = self._count_parked(group, lots)
        if used:
            raise error(group, sum(used.values()), [leader_of(group, lot) for lot in used])

    def _delete_lots(
        self,
        names: Mapping[str, tuple[str, str]],
        masters: Mapping[str, str],
        explain: Callable[[Sequence[str], str], str] | None = None,
    ) -> None:
        """Delete topics of parking lots, their own lots, and the groups' offsets of them. Raises RocketMQUnavailableError.

        ``explain`` makes an error's message from the topics that are left and the reason.
        """
        left = sorted(names)
        while left:
            try:
                self._delete_lot(left[0], names[left[0]][0], masters)
            except RocketMQError as error:
                if explain is None:
                    raise
                raise type(error)(error.sub, explain(left, error.message)) from error
            del left[0]

    def _delete_lot(self, name: str, group: str, masters: Mapping[str, str]) -> None:
        self._delete_lots(self._lots(topic=name), masters)
        offsets = self._numbers.read(group, self._queues_of([name]))
        # Before 5.0 offsets outlive their topic. In a new lot of that name they would hide what is parked.
        cleared = self._numbers.clear(group, [lot for lot, offset in offsets.items() if offset])
        try:
            delete_topic(self._client, self._log, name, masters.values())
        except RocketMQError as error:
            if error.denied:
                # If the lot stays, what the group has settled in it stays settled.
                with contextlib.suppress(TopicError):
                    self._numbers.write(group, {lot: offsets[lot] for lot in cleared})
            raise


def refuse_parking_lot(name: str) -> None:
    """Raises TopicError RESERVED for a topic of parking lots, which administrators do not change."""
    found = origin(name)
    if found is not None:
        raise is_parking_lot(name, found[0])
