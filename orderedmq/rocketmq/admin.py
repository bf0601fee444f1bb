"""The Admin protocol over a cluster: topics. group_admin.py has the groups.

Brokers store topics, and nameservers list them. So a topic is created at each broker, and deleted at all brokers before it is
deleted at the nameservers (MQAdminExt). Its queues are divided evenly among the brokers, so that their total is the number
asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial

from orderedmq.broker import Keep, QueueInfo, TopicInfo
from orderedmq.conditions import OptionCondition
from orderedmq.errors import (
    OptionError,
    RocketMQError,
    cannot_shrink,
    topic_exists,
)
from orderedmq.model import DEFAULT_COMPRESSION, MessageQueue, check_queue_count, check_topic, missing_topic
from orderedmq.parking.rules import lot_in_use, lot_of_a_query, lots_left, origin
from orderedmq.rocketmq.group_admin import GroupAdmin
from orderedmq.rocketmq.messages.log import RocketMQLog
from orderedmq.rocketmq.messages.topic_changes import await_registration, delete_topic, every_master, queue_counts
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.deadline import REQUEST_TIMEOUT, Deadline
from orderedmq.rocketmq.parked_admin import refuse_parking_lot
from orderedmq.rocketmq.sink.message_stamp import is_bookmark_group
from orderedmq.rocketmq.wire import admin_requests
from orderedmq.rocketmq.wire.group_requests import all_consumer_offsets


class RocketMQAdmin(GroupAdmin):
    """The Admin protocol: the topics' part, and that of groups."""

    def __init__(self, client: Client, log: RocketMQLog) -> None:
        self._client = client
        self._log = log

    def create_topic(
        self,
        name: str,
        queues: int,
        *,
        retention_seconds: float | None = None,
        retention_bytes: int | None = None,
        compression: str = DEFAULT_COMPRESSION,
    ) -> TopicInfo:
        """See `Admin.create_topic`. ``queues``: of all brokers together. Also raises OptionError UNSUPPORTED for settings."""
        check_topic(name, writing=True)
        check_queue_count(name, queues)
        for what, value, default in (
            ("a retention by age", retention_seconds, None),
            ("a retention by size", retention_bytes, None),
            ("compression", compression, DEFAULT_COMPRESSION),
        ):
            if value != default:
                raise _not_settable(what, name)
        there = queue_counts(self._log, name)
        if there:
            raise topic_exists(name, sum(there.values()))
        self._resize(name, dict.fromkeys(every_master(self._client), 0), queues)
        return self._log.topic(name)

    def alter_topic(
        self, name: str, *, retention_seconds: float | Keep | None = Keep.KEEP, retention_bytes: int | Keep | None = Keep.KEEP
    ) -> TopicInfo:
        """Raises OptionError UNSUPPORTED for any change."""
        refuse_parking_lot(name)
        for what, value in (("a retention by age", retention_seconds), ("a retention by size", retention_bytes)):
            if value is not Keep.KEEP:
                self._log.queues(name)
                raise _not_settable(what, name)
        return self._log.topic(name)

    def add_queues(self, name: str, queues: int) -> TopicInfo:
        """See `Admin.add_queues`. The brokers with the fewest queues get the new ones."""
        check_queue_count(name, queues)
        refuse_parking_lot(name)
        there = queue_counts(self._log, name)
        if not there:
            raise missing_topic(name)
        total = sum(there.values())
        if queues < total:
            raise cannot_shrink(name, total, queues)
        self._resize(name, {broker: there.get(broker, 0) for broker in every_master(self._client)}, queues, already=total)
        return self._log.topic(name)

    def delete_topic(self, name: str) -> None:
        """See `Admin.delete_topic`, but before RocketMQ 5.0 the groups' offsets of a topic that is no parking lot stay.

        Also deletes the groups of sinks' bookmarks in the topic, except a ``sinkGroup`` that a user named.
        """
        self._log.forget(name)
        self._log.route(name)
        masters, found = every_master(self._client), origin(name)
        if found is not None:
            messages = sum(self._count_parked(found[0], self._queues_of([name])).values())
            # Without the topic nobody can process them.
            if messages and self._queues_of([found[1]]):
                raise lot_in_use(name, found[0], messages)
            with self._hold_locks(found[0], self._queues_of([found[1]]), False, partial(lot_of_a_query, name)):
                self._delete_lots({name: found}, masters)
            return
        sinks = {master: self._bookmarks(master, name) for master in masters.values()}
        lots = self._lots(topic=name)
        # The topic first: only its deletion shows whether the account may delete it, and no message is lost that it may not.
        delete_topic(self._client, self._log, name, masters.values())
        self._delete_lots(lots, masters, partial(lots_left, name))
        for master, groups in sinks.items():
            for group in groups:
                with contextlib.suppress(RocketMQError):
                    self._client.call_address(master, admin_requests.delete_group(group), Deadline.after(REQUEST_TIMEOUT))

    def describe_topic(self, name: str) -> list[QueueInfo]:
        """See `Admin.describe_topic`. ``chunks`` and ``stored_bytes`` are 0: brokers do not report how a queue is stored."""
        queues = self._log.queues(name)
        bounds = self._log.bounds(queues)
        out = []
        for queue in queues:
            first = last = None
            if queue in bounds and bounds[queue].min_offset < bounds[queue].max_offset:
                first = self._log.stored(queue, bounds[queue].min_offset)
                last = self._log.stored(queue, bounds[queue].max_offset - 1)
            if queue in bounds:
                out.append(QueueInfo(queue, bounds[queue], 0, 0, first, last))
        return out

    def trim(self, name: str, before: Mapping[MessageQueue, int] | None = None) -> dict[MessageQueue, int]:  # noqa: ARG002
        """Raises OptionError UNSUPPORTED."""
        refuse_parking_lot(name)
        self._log.queues(name)
        raise OptionError(
            OptionCondition.UNSUPPORTED,
            f"topic {name!r} cannot be trimmed: a RocketMQ broker deletes messages by age alone, whole files of all topics together "
            "(fileReservedTime, deleteWhen); delete the topic, or set fileReservedTime",
        )

    # --- inside

    def _bookmarks(self, master: str, topic: str) -> list[str]:
        """Return the groups of sinks that wrote to a topic; none if the account may not read the offsets of all groups."""
        try:
            offsets = self._client.call_address(master, all_consumer_offsets(), Deadline.after(REQUEST_TIMEOUT))
        except RocketMQError as error:
            if not error.denied:
                raise
            return []
        return [
            name
            for name, queues in offsets.items()
            if is_bookmark_group(name) and any(queue.topic == topic for queue in queues)
        ]

    def _resize(self, name: str, counts: Mapping[str, int], queues: int, already: int = 0) -> None:
        """Add queues to the brokers with the fewest until there are ``queues``, and wait until the nameserver knows them."""
        grown = dict(counts)
        for _ in range(queues - already):
            grown[min(grown, key=lambda broker: (grown[broker], broker))] += 1
        masters = every_master(self._client)
        for broker, count in grown.items():
            if count > counts[broker]:
                self._client.call_address(
                    masters[broker], admin_requests.create_topic(name, count), Deadline.after(REQUEST_TIMEOUT)
                )
        await_registration(lambda: sum(queue_counts(self._log, name).values()) == queues, name)


def _not_settable(what: str, topic: str) -> OptionError:
    return OptionError(
        OptionCondition.UNSUPPORTED,
        f"{what} of topic {topic!r} cannot be set: RocketMQ has it for a whole broker only (fileReservedTime, compressType); leave it out, "
        "or set it in the broker's configuration",
    )
