"""The Admin protocol over a cluster: topics. group_admin.py has the groups.

Brokers store topics, and nameservers list them. So a topic is created at each broker, and deleted at all brokers before it is
deleted at the nameservers (MQAdminExt). Its queues are divided evenly among the brokers, so that their total is the number
asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from orderedmq.broker import Keep, QueueInfo, TopicInfo
from orderedmq.conditions import OptionCondition, RocketMQCondition, UnavailableCondition
from orderedmq.errors import (
    OptionError,
    RocketMQError,
    RocketMQUnavailableError,
    TopicError,
    cannot_shrink,
    topic_exists,
)
from orderedmq.model import DEFAULT_COMPRESSION, MessageQueue, check_queue_count, check_topic, missing_topic
from orderedmq.rocketmq.group_admin import GroupAdmin
from orderedmq.rocketmq.messages.log import RocketMQLog
from orderedmq.rocketmq.messages.topic_creation import await_registration, queue_counts
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.deadline import REQUEST_TIMEOUT, Deadline
from orderedmq.rocketmq.sink.message_stamp import is_bookmark_group
from orderedmq.rocketmq.wire import admin_requests
from orderedmq.rocketmq.wire.group_requests import all_consumer_offsets
from orderedmq.rocketmq.wire.message_requests import topic_stats


class TopicAdmin:
    """The topics' part of the Admin protocol."""

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
        self._resize(name, dict.fromkeys(self._masters(), 0), queues)
        return self._log.topic(name)

    def alter_topic(
        self, name: str, *, retention_seconds: float | Keep | None = Keep.KEEP, retention_bytes: int | Keep | None = Keep.KEEP
    ) -> TopicInfo:
        """Raises OptionError UNSUPPORTED for any change."""
        for what, value in (("a retention by age", retention_seconds), ("a retention by size", retention_bytes)):
            if value is not Keep.KEEP:
                self._log.queues(name)
                raise _not_settable(what, name)
        return self._log.topic(name)

    def add_queues(self, name: str, queues: int) -> TopicInfo:
        """See `Admin.add_queues`. The brokers with the fewest queues get the new ones."""
        check_queue_count(name, queues)
        there = queue_counts(self._log, name)
        if not there:
            raise missing_topic(name)
        total = sum(there.values())
        if queues < total:
            raise cannot_shrink(name, total, queues)
        self._resize(name, {broker: there.get(broker, 0) for broker in self._masters()}, queues, already=total)
        return self._log.topic(name)

    def delete_topic(self, name: str) -> None:
        """See `Admin.delete_topic`, but before RocketMQ 5.0 the groups' offsets stay.

        Also deletes the groups of sinks' bookmarks in the topic, except a ``sinkGroup`` that a user named.
        """
        self._log.forget(name)
        self._log.route(name)
        for master in self._masters().values():
            sinks = self._bookmarks(master, name)
            delete_at_broker(self._client, master, name)
            for group in sinks:
                with contextlib.suppress(RocketMQError):
                    self._client.call_address(master, admin_requests.delete_group(group), Deadline.after(REQUEST_TIMEOUT))
        failed: RocketMQUnavailableError | None = None
        for nameserver in self._client.nameservers:
            try:
                self._client.call_address(
                    nameserver, admin_requests.delete_topic_in_nameserver(name), Deadline.after(REQUEST_TIMEOUT)
                )
            except RocketMQUnavailableError as error:
                # A nameserver keeps no routes on disk, so one that is down has nothing to forget.
                failed = error
        self._log.forget(name)
        if failed is not None and len(self._client.nameservers) == 1:
            raise failed

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

    def _masters(self) -> dict[str, str]:
        """Return the address of each broker's master, by broker name. Raises RocketMQUnavailableError NO_BROKER."""
        cluster = self._client.cluster(Deadline.after(REQUEST_TIMEOUT))
        away = sorted(name for name, broker in cluster.brokers.items() if broker.master is None)
        if away or not cluster.brokers:
            raise RocketMQUnavailableError(
                UnavailableCondition.NO_BROKER,
                f"topics can be changed only while every broker has a master; brokers without one: {', '.join(away) or 'all'}",
            )
        return {name: str(cluster.brokers[name].master) for name in sorted(cluster.brokers)}

    def _resize(self, name: str, counts: Mapping[str, int], queues: int, already: int = 0) -> None:
        """Add queues to the brokers with the fewest until there are ``queues``, and wait until the nameserver knows them."""
        grown = dict(counts)
        for _ in range(queues - already):
            grown[min(grown, key=lambda broker: (grown[broker], broker))] += 1
        masters = self._masters()
        for broker, count in grown.items():
            if count > counts[broker]:
                self._client.call_address(
                    masters[broker], admin_requests.create_topic(name, count), Deadline.after(REQUEST_TIMEOUT)
                )
        await_registration(lambda: sum(queue_counts(self._log, name).values()) == queues, name)


def delete_at_broker(client: Client, master: str, topic: str) -> None:
    """Delete a topic at one broker, where it may be missing."""
    try:
        client.call_address(master, admin_requests.delete_topic(topic), Deadline.after(REQUEST_TIMEOUT))
    except RocketMQError as error:
        # With timerWheelEnable=false 5.x fails after its last step (AdminBrokerProcessor.deleteTopicInBroker).
        if error.sub != RocketMQCondition.SERVER_ERROR or _is_at_broker(client, master, topic):
            raise


def _is_at_broker(client: Client, master: str, topic: str) -> bool:
    try:
        client.call_address(master, topic_stats(topic), Deadline.after(REQUEST_TIMEOUT))
    except TopicError:
        return False
    return True


def _not_settable(what: str, topic: str) -> OptionError:
    return OptionError(
        OptionCondition.UNSUPPORTED,
        f"{what} of topic {topic!r} cannot be set: RocketMQ has it for a whole broker only (fileReservedTime, compressType); leave it out, "
        "or set it in the broker's configuration",
    )


class RocketMQAdmin(TopicAdmin, GroupAdmin):
    """The Admin protocol."""
