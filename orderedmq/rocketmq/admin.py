"""The Admin protocol over a cluster: topics and groups.

Brokers store topics, and nameservers list them. So a topic is created at each broker, and is deleted at all brokers before it is
deleted at the nameservers (MQAdminExt). A topic's queues are divided evenly among the brokers, and the requested number is their total.

Locks are known only from the reports of members (running_info.py). A seek first takes the locks of the queues that it sets
(`locks.TakenLocks`), so that no query takes a queue during the seek, and then gives them back.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from orderedmq.broker import Admin, Keep, LockInfo, MemberInfo, PullSettings, QueueInfo, TopicInfo
from orderedmq.conditions import LockCondition, OptionCondition, UnavailableCondition
from orderedmq.errors import (
    GroupError,
    LockError,
    OptionError,
    RocketMQError,
    RocketMQUnavailableError,
    TopicError,
    in_use,
    missing_group,
    outside_queue,
    topic_exists,
)
from orderedmq.model import (
    DEFAULT_COMPRESSION,
    MESSAGE_TYPES,
    PARKED_PROPERTIES,
    RETRY_PREFIX,
    MessageQueue,
    check_queue_count,
    check_topic,
)
from orderedmq.ownership.lock import LOCK_LIFE
from orderedmq.parking import (
    AtSeek,
    Command,
    command_rows,
    delete_with_parked,
    is_parking_lot,
    leader_of,
    lots_kept,
    lots_left,
    origin,
    parked_queue,
    parked_topic,
    seek_with_parked,
)
from orderedmq.rocketmq.codec.encode import encode, property_columns
from orderedmq.rocketmq.group import lock_rules
from orderedmq.rocketmq.group.locks import TakenLocks
from orderedmq.rocketmq.group.membership import Directory
from orderedmq.rocketmq.group.offsets import GROUP_TIMEOUT, GroupOffsets
from orderedmq.rocketmq.group.parking_lots import LotTopics
from orderedmq.rocketmq.messages.log import RocketMQLog
from orderedmq.rocketmq.messages.topic_changes import await_registration, delete_topic, every_master, queue_counts
from orderedmq.rocketmq.net.behind_proxy import AT_EVERY_BROKER
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.deadline import REQUEST_TIMEOUT, Deadline
from orderedmq.rocketmq.resizing import TopicResize
from orderedmq.rocketmq.sink.message_stamp import is_bookmark_group
from orderedmq.rocketmq.wire import admin_requests, group_requests, registers
from orderedmq.rocketmq.wire.message_requests import broker_config, version_of
from orderedmq.rocketmq.wire.route import SYSTEM_GROUP_PREFIX

#: The servers' own groups without `SYSTEM_GROUP_PREFIX`. They are not listed (MixAll.isSysConsumerGroupPullMessage).
_SYSTEM_GROUPS: Final = frozenset(
    (
        "DEFAULT_CONSUMER", "TOOLS_CONSUMER", "SCHEDULE_CONSUMER", "FILTERSRV_CONSUMER", "__MONITOR_CONSUMER", "SELF_TEST_C_GROUP",
        "CID_ONS-HTTP-PROXY", "CID_ONSAPI_PERMISSION", "CID_ONSAPI_OWNER", "CID_ONSAPI_PULL", "CID_SYS_RMQ_TRANS",
    )
)  # fmt: skip
#: V5_0_0 (MQVersion): the first version of a broker whose topics have attributes.
_HAS_TYPES: Final = 413
#: Seconds for which the brokers' answers about their settings are reused.
SETTINGS_AGE: Final = 600.0


class RocketMQAdmin(Admin):
    """The Admin protocol."""

    def __init__(self, client: Client, log: RocketMQLog) -> None:
        self._client = client
        self._log = log
        self._offsets = GroupOffsets(client)
        self._directory = Directory(client)
        self._locks = TakenLocks(client, self._directory)
        self._lots = LotTopics(client, log, self._offsets)
        #: When the brokers were last asked how long they keep messages, and the shortest time in their answers.
        self._retention: tuple[float, float | None] | None = None

    # --- topics

    def create_topic(
        self,
        name: str,
        queues: int,
        *,
        retention_seconds: float | None = None,
        retention_bytes: int | None = None,
        compression: str = DEFAULT_COMPRESSION,
        message_type: str | None = None,
    ) -> TopicInfo:
        """See `Admin.create_topic`. ``queues`` is the total of all brokers."""
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
        masters = every_master(self._client)
        if message_type is not None:
            self._require_types(name, message_type, masters)
        self._make(name, queues, masters, message_type=message_type)
        return self._log.topic(name)

    def alter_topic(
        self, name: str, *, retention_seconds: float | Keep | None = Keep.KEEP, retention_bytes: int | Keep | None = Keep.KEEP
    ) -> TopicInfo:
        """See `Admin.alter_topic`. Raises OptionError UNSUPPORTED for any change."""
        _refuse_parking_lot(name)
        for what, value in (("a retention by age", retention_seconds), ("a retention by size", retention_bytes)):
            if value is not Keep.KEEP:
                self._log.queues(name)
                raise _not_settable(what, name)
        return self._log.topic(name)

    def resize_topic(self, name: str, queues: int) -> TopicInfo:
        """See `Admin.resize_topic` and `resizing`. The topic takes no messages for about 50 s, and this waits as long."""
        check_queue_count(name, queues)
        _refuse_parking_lot(name)
        TopicResize(self._client, self._log, name, queues).run()
        return self._log.topic(name)

    def delete_topic(self, name: str) -> None:
        """See `Admin.delete_topic`. Before RocketMQ 5.0, groups keep their offsets in a deleted topic, unless it is a parking lot.

        Also deletes the groups in which sinks keep their bookmarks in the topic, except a ``sinkGroup`` that a user named.
        """
        self._log.forget(name)
        # The route has also brokers of which a restarted nameserver has not heard again. They would report the topic again.
        masters, found = every_master(self._client, self._log.route(name).brokers), origin(name)
        if found is not None:
            if self._lots.queues_of([found[1]]):
                raise is_parking_lot(name, found[0])
            # When the topic was deleted, the account had no right to delete its parking lots.
            self._lots.delete({name: found}, masters)
            return
        sinks = {master: self._bookmarks(master, name) for master in masters.values()}
        lots = self._lots.find(topic=name)
        # Delete the topic first, because only this shows whether the account may delete it. If it may not, no parked message is lost.
        delete_topic(self._client, self._log, name, masters.values())
        self._lots.delete(lots, masters, partial(lots_left, name))
        for master, groups in sinks.items():
            for group in groups:
                with contextlib.suppress(RocketMQError):
                    self._client.call_address(master, admin_requests.delete_group(group), Deadline.after(REQUEST_TIMEOUT))

    def describe_topic(self, name: str) -> list[QueueInfo]:
        """See `Admin.describe_topic`. ``chunks`` and ``stored_bytes`` are 0, because brokers do not report how a queue is stored."""
        route = self._log.route(name, fresh=True)
        bounds = self._log.bounds(route.all_queues())
        filled = {queue: at for queue, at in bounds.items() if at.min_offset < at.max_offset}
        first = self._log.stored_at({queue: at.min_offset for queue, at in filled.items()})
        last = self._log.stored_at({queue: at.max_offset - 1 for queue, at in filled.items()})
        readable = set(route.subscribe_set())
        return [
            QueueInfo(queue, at, 0, 0, first.get(queue), last.get(queue), queue in readable) for queue, at in bounds.items()
        ]

    def message_type(self, name: str) -> str | None:
        """See `Admin.message_type`. None before RocketMQ 5.0, and for an account that may not read it."""
        # The topic may have no queue that can be read.
        for broker in sorted(self._log.route(name).brokers)[:1]:
            with contextlib.suppress(RocketMQError):
                request = admin_requests.topic_config(name)
                config = self._client.call(request, Deadline.after(REQUEST_TIMEOUT), topic=name, broker_name=broker)
                return config.message_type
        return None

    def _require_types(self, topic: str, message_type: str, masters: Mapping[str, str]) -> None:
        """Raise OptionError INVALID or UNSUPPORTED if a broker would create the topic without this message type."""
        if message_type not in MESSAGE_TYPES:
            raise OptionError(
                OptionCondition.INVALID,
                f"{message_type!r} is not a type of messages for topic {topic!r}. Give one of {', '.join(MESSAGE_TYPES)}",
            )
        for broker, address in masters.items():
            # An account may lack the right to request the version. Ignore that, because brokers that check this right are newer than 5.0.
            with contextlib.suppress(RocketMQError):
                request = version_of(MessageQueue(AT_EVERY_BROKER, broker, 0))
                if self._client.call_address(address, request, Deadline.after(REQUEST_TIMEOUT)) < _HAS_TYPES:
                    raise OptionError(
                        OptionCondition.UNSUPPORTED,
                        f"topic {topic!r} cannot have messages of type {message_type}: broker {broker!r} is older than RocketMQ 5.0 and "
                        "would ignore the type. Leave the type out",
                    )

    def trim(self, name: str, before: Mapping[MessageQueue, int] | None = None) -> dict[MessageQueue, int]:  # noqa: ARG002
        """Raise OptionError UNSUPPORTED, because RocketMQ cannot trim a topic."""
        _refuse_parking_lot(name)
        self._log.queues(name)
        raise OptionError(
            OptionCondition.UNSUPPORTED,
            f"topic {name!r} cannot be trimmed: a RocketMQ broker deletes messages only by age, in whole files of all topics together "
            "(fileReservedTime, deleteWhen). Delete the topic, or set fileReservedTime",
        )

    def kept_for(self, topics: Iterable[str]) -> dict[str, float]:
        """See `Admin.kept_for`. The time is the shortest fileReservedTime of all brokers, requested every `SETTINGS_AGE` seconds.

        The time is unknown through a Proxy, and if the account may not read the brokers' settings.
        """
        now = time.monotonic()
        if self._retention is None or now - self._retention[0] > SETTINGS_AGE:
            retentions: list[float] = []
            with contextlib.suppress(RocketMQError):
                for address in self._offsets.masters().values():
                    _, config = self._client.call_address(address, broker_config(), Deadline.after(REQUEST_TIMEOUT))
                    if config.get("fileReservedTime", "").isdecimal():
                        retentions.append(3600.0 * int(config["fileReservedTime"]))
            self._retention = now, min(retentions, default=None)
        retention = self._retention[1]
        return {} if retention is None else dict.fromkeys(topics, retention)

    # --- groups

    def groups(self, *, of_sinks: bool = False) -> list[str]:
        """Return the groups that have settings or offsets at a broker, without the groups of sinks' bookmarks.

        ``of_sinks``: return only the groups of sinks' bookmarks. A ``sinkGroup`` that a user named does not count as one of them.
        """
        return [name for name in self._every_group() if is_bookmark_group(name) is of_sinks]

    def _every_group(self) -> list[str]:
        groups: set[str] = set()
        masters = self._offsets.masters()
        if not masters:
            # Without this error, a cluster whose brokers are all down would look like a cluster without groups.
            raise RocketMQUnavailableError(
                UnavailableCondition.NO_BROKER,
                "the nameserver knows no broker with a master, so the cluster's groups cannot be listed: all masters are down or starting",
            )
        for address in masters.values():
            configured = self._client.call_address(address, admin_requests.groups(), Deadline.after(GROUP_TIMEOUT))
            groups.update(configured)
            # Before 5.3, a group can have offsets without settings. Such groups are missing if the account may not read all offsets.
            with contextlib.suppress(RocketMQError):
                offsets = self._client.call_address(
                    address, group_requests.all_consumer_offsets(), Deadline.after(GROUP_TIMEOUT)
                )
                groups.update(offsets)
        return sorted(name for name in groups if name not in _SYSTEM_GROUPS and not name.startswith(SYSTEM_GROUP_PREFIX))

    def _require(self, group: str) -> None:
        lock_rules.check_name(group)
        groups = self._every_group()
        if group not in groups:
            raise missing_group(group, "this cluster", groups)

    def group_offsets(self, group: str) -> dict[MessageQueue, int]:
        self._require(group)
        numbers = self._numbers(group)
        # Before 5.0, offsets outlive their topic. Fences and other numbers are also stored as offsets (offsets.py). Leave both out.
        there: set[MessageQueue] = set()
        for topic in {queue.topic for queue in numbers if not queue.topic.startswith(RETRY_PREFIX)}:
            with contextlib.suppress(TopicError):
                there.update(self._log.route(topic, fresh=True).all_queues())
        return {queue: numbers[queue] for queue in sorted(numbers) if queue in there}

    def _numbers(self, group: str) -> dict[MessageQueue, int]:
        """Return all numbers that the brokers store for a group: its offsets, and the `registers`."""
        numbers: dict[MessageQueue, int] = {}
        for name, master in self._offsets.masters().items():
            offsets = self._client.call_address(master, group_requests.all_consumer_offsets(), Deadline.after(GROUP_TIMEOUT))
            numbers.update((queue._replace(broker_name=name), at) for queue, at in offsets.get(group, {}).items())
        return numbers

    def group_progress(self, group: str) -> dict[MessageQueue, int]:
        numbers = self._numbers(group)
        every = {queue: numbers.get(registers.progress(queue), 0) for queue in map(registers.queue_of, numbers)}
        return {queue: registers.offset_of(number) for queue, number in every.items() if number}

    def _owned(self, group: str) -> list[MessageQueue]:
        """Return the queues in which the group has offsets. Parking lots are left out, because they have no separate locks."""
        return [queue for queue in self.group_offsets(group) if leader_of(group, queue) == queue]

    def members(self, group: str) -> list[MemberInfo]:
        lock_rules.check_name(group)
        ids, brokers = self._directory.ids_everywhere(group), self._directory.masters()
        members = self._directory.members(group, ids, brokers, None)
        now = time.time()
        return [
            MemberInfo(member, max(0.0, now - member.renewed.seconds)) for member in sorted(members, key=lambda one: one.joined)
        ]

    def locks(self, group: str | None = None) -> list[LockInfo]:
        """Return the locks that members report. The locks of other clients and of members that do not answer are missing."""
        out = []
        brokers = self._directory.masters()
        for name in self.groups() if group is None else [group]:
            for client_id in self._directory.ids_everywhere(name):
                # With strict, an account that may not read locks gets an error instead of an empty list.
                info = self._directory.info(name, client_id, brokers, fresh=True, strict=True)
                if info is None:
                    continue
                for held in info.held:
                    age = max(0.0, time.time() - held.renewed)
                    who, left = info.member, max(0.0, LOCK_LIFE - age)
                    out.append(
                        LockInfo(
                            name, held.queue, who.owner, client_id, held.epoch, held.tenure, True, True, age, left, who.name
                        )
                    )
        return sorted(out, key=lambda lock: (lock.group, lock.queue, lock.client_id))

    def seek(self, group: str, offsets: Mapping[MessageQueue, int], *, force: bool = False, parked: AtSeek = None) -> None:
        """See `Admin.seek`. A running query loses the queues at its next commit or renewal, which is within 20 s."""
        lock_rules.check_name(group)
        for queue in offsets:
            if leader_of(group, queue) != queue:
                raise is_parking_lot(queue.topic, group)
        # A Proxy may not show all members of the group.
        self._client.refuse_proxy("a seek")
        bounds = self._log.bounds(list(offsets))
        for queue, offset in offsets.items():
            if queue not in bounds:
                self._log.require(queue)
            end = bounds[queue].max_offset if queue in bounds else 0
            if not 0 <= offset <= end:
                raise outside_queue(queue, offset, end)
        lots: list[MessageQueue] = []
        for topic in sorted({queue.topic for queue in offsets}):
            # A group whose lots could have no name has none. Ask by name, because a restarted nameserver may not list them yet.
            with contextlib.suppress(GroupError):
                lots += self._lots.queues_of([parked_topic(group, topic)])
        lots = [lot for lot in lots if leader_of(group, lot) in offsets]
        with self._locks.hold(group, list(offsets), force):
            if parked is None:
                self._lots.require_none(group, lots, seek_with_parked)
            epochs = self._offsets.next_epochs(group, list(offsets))
            self._offsets.fence(group, epochs)
            # If this process is killed between the two, a query follows the group's offsets, which are the old ones.
            self._offsets.record_resets(group, epochs)
            self._offsets.write(group, {**offsets, **(self._lots.ends(lots) if parked == "drop" else {})})

    def require_unused(self, group: str) -> None:
        """See `Admin.require_unused`. This also finds locks of clients that are not members, because requesting these locks fails."""
        lock_rules.check_name(group)
        queues = self._owned(group) if group in self.groups() else []
        with self._locks.hold(group, queues, force=False):
            pass

    def delete_group(self, group: str, *, force: bool = False) -> None:
        """See `Admin.delete_group`. A running query creates the group again."""
        self._require(group)
        lots = self._lots.find(group=group)
        with self._locks.hold(group, self._owned(group), force):
            if not force:
                self._lots.require_none(group, self._lots.queues_of(lots), delete_with_parked)
            if lots:
                masters = every_master(self._client)
                # Delete the settings first, because only this shows whether the account may delete the group. If it may not, no parked
                # message is lost. Delete the offsets last. If the account may not delete the lots, the offsets still show what is parked.
                self._delete_group(group, offsets=False)
                self._lots.delete(lots, masters, partial(lots_kept, group))
            self._delete_group(group, offsets=True)

    def _delete_group(self, group: str, *, offsets: bool) -> None:
        for address in self._offsets.masters().values():
            request = admin_requests.delete_group(group, offsets=offsets)
            self._client.call_address(address, request, Deadline.after(GROUP_TIMEOUT))

    def release(self, group: str, queues: Sequence[MessageQueue], *, force: bool = False) -> list[MessageQueue]:
        """See `Admin.release`. Only the locks of members can be released.

        Raises LockError HELD_BY_OTHER for other locks. They expire by themselves.
        """
        self._require(group)
        granted = self._locks.free(group, queues)
        locked = [queue for queue in dict.fromkeys(queues) if queue not in granted]
        if not locked:
            return []
        if not force:
            # Any member may hold these locks.
            raise in_use(group, self._locks.user(group, self._directory.ids_everywhere(group), locked))
        with self._locks.hold(group, locked, force=True) as released:
            self._offsets.fence(group, self._offsets.next_epochs(group, released))
        refused = [queue for queue in locked if queue not in released]
        if refused:
            raise LockError(
                LockCondition.HELD_BY_OTHER,
                f"{len(refused)} of {len(locked)} queues of group {group!r} are locked by a client that is not a member, and RocketMQ does not "
                f"report which client it is. The lock of {refused[0]} expires within {LOCK_LIFE:.0f} s unless it is renewed",
            )
        return released

    def command_parked(self, group: str, queue: MessageQueue, commands: Sequence[Command]) -> None:
        """See `Admin.command_parked`."""
        lock_rules.check_name(group)
        lot = parked_queue(group, queue)
        self._log.require(lot)
        rows = command_rows(commands)
        log = self._log.reading(PullSettings(group))
        keys = log.sender.keys.take(rows.num_rows)
        extra = property_columns(rows, PARKED_PROPERTIES)
        log.sender.append_encoded(lot, list(encode(rows, keys, f"the parking lot {lot}", extra=extra)), keys)

    # --- inside

    def _bookmarks(self, master: str, topic: str) -> list[str]:
        """Return the groups with bookmarks of sinks in a topic; an empty list if the account may not read all groups' offsets."""
        try:
            offsets = self._client.call_address(master, group_requests.all_consumer_offsets(), Deadline.after(REQUEST_TIMEOUT))
        except RocketMQError as error:
            if not error.denied:
                raise
            return []
        return [
            name
            for name, queues in offsets.items()
            if is_bookmark_group(name) and any(queue.topic == topic for queue in queues)
        ]

    def _make(self, name: str, queues: int, masters: Mapping[str, str], *, message_type: str | None) -> None:
        """Divide a new topic's queues evenly among the brokers. Wait until the nameserver knows them."""
        names = sorted(masters)
        for place, broker in enumerate(names):
            count = (queues - place + len(names) - 1) // len(names)
            if count:
                request = admin_requests.create_topic(name, count, message_type=message_type)
                self._client.call_address(masters[broker], request, Deadline.after(REQUEST_TIMEOUT))
        await_registration(lambda: sum(queue_counts(self._log, name).values()) == queues, name)


def _refuse_parking_lot(name: str) -> None:
    """Raise TopicError RESERVED if the topic is a parking lot, because administrators may not change it."""
    parked_by = origin(name)
    if parked_by is not None:
        raise is_parking_lot(name, parked_by[0])


def _not_settable(what: str, topic: str) -> OptionError:
    return OptionError(
        OptionCondition.UNSUPPORTED,
        f"{what} of topic {topic!r} cannot be set: RocketMQ has this setting only for a whole broker (fileReservedTime, compressType). Leave "
        "it out, or set it in the broker's configuration",
    )
