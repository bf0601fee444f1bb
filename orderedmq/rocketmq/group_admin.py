"""The groups' part of the Admin protocol over a cluster.

A broker does not report who holds a lock, so locks are known only from what members report (running_info.py). Only a lock
request shows whether a queue is locked at all. A seek takes the locks of the queues that it sets, so that no query enters
half-way, and then gives them back.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Final

from orderedmq.broker import LockInfo, MemberInfo
from orderedmq.conditions import LockCondition
from orderedmq.errors import GroupError, LockError, RocketMQError, TopicError, in_use, missing_group, outside_queue
from orderedmq.model import RETRY_PREFIX, MessageQueue
from orderedmq.ownership.lock import LOCK_LIFE
from orderedmq.parking.rules import AtSeek, delete_with_parked, is_parking_lot, leader_of, lots_kept, seek_with_parked
from orderedmq.rocketmq.group import lock_rules
from orderedmq.rocketmq.group.membership import Directory
from orderedmq.rocketmq.group.offsets import GROUP_TIMEOUT
from orderedmq.rocketmq.messages.topic_changes import every_master
from orderedmq.rocketmq.net.deadline import Deadline
from orderedmq.rocketmq.net.fan_out import ask_queues
from orderedmq.rocketmq.parked_admin import ParkedAdmin
from orderedmq.rocketmq.sink.message_stamp import is_bookmark_group
from orderedmq.rocketmq.wire import admin_requests, group_requests

#: The servers' own groups (MixAll.PREDEFINE_GROUP_SET, isSysConsumerGroup).
_SYSTEM_GROUPS: Final = frozenset(
    (
        "DEFAULT_CONSUMER", "TOOLS_CONSUMER", "SCHEDULE_CONSUMER", "FILTERSRV_CONSUMER", "__MONITOR_CONSUMER", "SELF_TEST_C_GROUP",
        "CID_ONS-HTTP-PROXY", "CID_ONSAPI_PERMISSION", "CID_ONSAPI_OWNER", "CID_ONSAPI_PULL", "CID_SYS_RMQ_TRANS",
    )
)  # fmt: skip
_SYSTEM_PREFIX: Final = "CID_RMQ_SYS_"


class GroupAdmin(ParkedAdmin):
    """The groups' part of the Admin protocol, for a subclass that has a client and a log."""

    @cached_property
    def _directory(self) -> Directory:
        return Directory(self._client)

    # -- listings

    def groups(self, *, of_sinks: bool = False) -> list[str]:
        """Return the groups that have settings or offsets at a broker, without those that hold sinks' bookmarks.

        ``of_sinks``: these in place of the others; a group that a user named (``sinkGroup``) is one of the others.
        """
        return [name for name in self._every_group() if is_bookmark_group(name) is of_sinks]

    def _every_group(self) -> list[str]:
        found: set[str] = set()
        for address in self._numbers.masters().values():
            configured = self._client.call_address(address, admin_requests.groups(), Deadline.after(GROUP_TIMEOUT))
            found.update(configured)
            # Before 5.3 a group can have offsets without settings. An account that may not read all offsets does without them.
            with contextlib.suppress(RocketMQError):
                offsets = self._client.call_address(
                    address, group_requests.all_consumer_offsets(), Deadline.after(GROUP_TIMEOUT)
                )
                found.update(offsets)
        return sorted(name for name in found if name not in _SYSTEM_GROUPS and not name.startswith(_SYSTEM_PREFIX))

    def _require(self, group: str) -> None:
        lock_rules.check_name(group)
        if group not in self._every_group():
            raise missing_group(group, "this cluster")

    def group_offsets(self, group: str) -> dict[MessageQueue, int]:
        self._require(group)
        found: dict[MessageQueue, int] = {}
        for name, broker in self._client.cluster(Deadline.after(GROUP_TIMEOUT)).brokers.items():
            if broker.master is not None:
                offsets = self._client.call_address(
                    broker.master, group_requests.all_consumer_offsets(), Deadline.after(GROUP_TIMEOUT)
                )
                found.update((queue._replace(broker_name=name), at) for queue, at in offsets.get(group, {}).items())
        # Before 5.0 offsets outlive their topic, and fences and other numbers are stored among them (offsets.py).
        there: set[MessageQueue] = set()
        for topic in {queue.topic for queue in found if not queue.topic.startswith(RETRY_PREFIX)}:
            with contextlib.suppress(TopicError):
                there.update(self._client.route(topic, Deadline.after(GROUP_TIMEOUT)).subscribe_set())
        return {queue: found[queue] for queue in sorted(found) if queue in there}

    def _owned(self, group: str) -> list[MessageQueue]:
        """Return the queues with offsets that have locks of their own: all but parking lots."""
        return [queue for queue in self.group_offsets(group) if leader_of(group, queue) == queue]

    def members(self, group: str) -> list[MemberInfo]:
        lock_rules.check_name(group)
        ids, brokers = self._directory.ids_everywhere(group), self._directory.masters()
        found = self._directory.members(group, ids, brokers, None)
        now = time.time()
        return [
            MemberInfo(member, max(0.0, now - member.renewed.seconds)) for member in sorted(found, key=lambda one: one.joined)
        ]

    def locks(self, group: str | None = None) -> list[LockInfo]:
        """Return the locks that members report. Locks of other clients, or of members that do not answer, cannot be seen."""
        out = []
        brokers = self._directory.masters()
        for name in self.groups() if group is None else [group]:
            for client_id in self._directory.ids_everywhere(name):
                # strict: an account that may not see locks gets an error, not an empty list.
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

    # -- interventions

    def seek(self, group: str, offsets: Mapping[MessageQueue, int], *, force: bool = False, parked: AtSeek = None) -> int:
        """See `Admin.seek`. A running query loses the queues at its next check: at a commit, or at a renewal within 20 s."""
        lock_rules.check_name(group)
        for queue in offsets:
            if leader_of(group, queue) != queue:
                raise is_parking_lot(queue.topic, group)
        bounds = self._log.bounds(list(offsets))
        for queue, offset in offsets.items():
            if queue not in bounds:
                self._log.require(queue)
            end = bounds[queue].max_offset if queue in bounds else 0
            if not 0 <= offset <= end:
                raise outside_queue(queue, offset, end)
        topics = {queue.topic for queue in offsets}
        lots = self._queues_of(name for name, (_, topic) in self._lots(group=group).items() if topic in topics)
        lots = [lot for lot in lots if leader_of(group, lot) in offsets]
        with self._hold_locks(group, list(offsets), force):
            if parked is None:
                self._require_none_parked(group, lots, seek_with_parked)
            self._numbers.raise_fences(group, dict.fromkeys(offsets, time.time_ns() // 1000))
            self._numbers.write(group, {**offsets, **(self._ends(lots) if parked == "drop" else {})})
            return self._numbers.raise_reset_number(group, list(offsets))

    def require_unused(self, group: str) -> None:
        """See `Admin.require_unused`. Locks of clients that are no members count, too: requests for these locks reveal them."""
        lock_rules.check_name(group)
        queues = self._owned(group) if group in self.groups() else []
        with self._hold_locks(group, queues, force=False):
            pass

    def delete_group(self, group: str, *, force: bool = False) -> None:
        """See `Admin.delete_group`. A running query creates the group again."""
        self._require(group)
        lots = self._lots(group=group)
        with self._hold_locks(group, self._owned(group), force):
            if not force:
                self._require_none_parked(group, self._queues_of(lots), delete_with_parked)
            if lots:
                masters = every_master(self._client)
                # The settings first: only their deletion shows whether the account may delete the group, and nothing parked is lost
                # that it may not. The offsets last: they say what is parked, if the account may not delete the lots.
                self._delete_group(group, offsets=False)
                self._delete_lots(lots, masters, partial(lots_kept, group))
            self._delete_group(group, offsets=True)

    def _delete_group(self, group: str, *, offsets: bool) -> None:
        for address in self._numbers.masters().values():
            request = admin_requests.delete_group(group, offsets=offsets)
            self._client.call_address(address, request, Deadline.after(GROUP_TIMEOUT))

    def release(self, group: str, queues: Sequence[MessageQueue], *, force: bool = False) -> list[MessageQueue]:
        """See `Admin.release`. Only members' locks can be taken away.

        Raises LockError HELD_BY_OTHER for others, which expire.
        """
        self._require(group)
        name = _probe()
        granted = self._lock(group, name, queues)
        self._unlock(group, name, granted)
        held = [queue for queue in dict.fromkeys(queues) if queue not in granted]
        if not held:
            return []
        if not force:
            # Any member may be the holder.
            raise in_use(group, self._user(group, self._directory.ids_everywhere(group), held))
        with self._hold_locks(group, held, force=True) as taken:
            self._numbers.raise_fences(group, dict.fromkeys(taken, time.time_ns() // 1000))
        left = [queue for queue in held if queue not in taken]
        if left:
            raise LockError(
                LockCondition.HELD_BY_OTHER,
                f"{len(left)} of {len(held)} queues of group {group!r} are locked by a client that is not a member, and RocketMQ does not tell "
                f"which client: the lock of {left[0]} expires within {LOCK_LIFE:.0f} s unless it is renewed",
            )
        return taken

    # -- locks

    @contextlib.contextmanager
    def _hold_locks(
        self, group: str, queues: Sequence[MessageQueue], force: bool, error: Callable[[str, str], GroupError] = in_use
    ) -> Iterator[list[MessageQueue]]:
        """Hold the queues' locks during the ``with`` block and yield the queues that were granted; ``force`` may not get all.

        Raises ``error`` (GroupError IN_USE) if the group has a member or one of the queues is locked. ``force`` takes the locks from
        members instead.
        """
        ids = self._directory.ids_everywhere(group)
        if not force and ids:
            raise error(group, self._user(group, ids, ()))
        for name in {name for client_id in ids for name in lock_rules.lock_names(client_id)}:
            self._unlock(group, name, queues)
        name = _probe()
        granted = self._lock(group, name, queues)
        try:
            if not force and len(granted) < len(set(queues)):
                raise error(group, self._user(group, (), [queue for queue in queues if queue not in granted]))
            yield granted
        finally:
            self._unlock(group, name, granted)

    def _lock(self, group: str, name: str, queues: Sequence[MessageQueue]) -> list[MessageQueue]:
        asked = [(of_broker[0], group_requests.lock(group, name, of_broker)) for of_broker in _by_broker(queues)]
        granted = frozenset[MessageQueue]().union(*ask_queues(self._client, asked, Deadline.after(GROUP_TIMEOUT)))
        return [queue for queue in dict.fromkeys(queues) if queue in granted]

    def _unlock(self, group: str, name: str, queues: Sequence[MessageQueue]) -> None:
        asked = [(of_broker[0], group_requests.unlock(group, name, of_broker)) for of_broker in _by_broker(queues)]
        ask_queues(self._client, asked, Deadline.after(GROUP_TIMEOUT))

    def _user(self, group: str, ids: Sequence[str], held: Sequence[MessageQueue]) -> str:
        """Return who uses the group, for an error: the owner of a queue, else a member."""
        brokers = self._directory.masters()
        for client_id in ids:
            info = self._directory.info(group, client_id, brokers, fresh=True)
            for one in info.held if info is not None else ():
                if not held or one.queue in held:
                    return f"{client_id} owns queue {one.queue}"
        if ids:
            return f"{ids[0]} is a member"
        return f"a client that is not a member owns queue {held[0]}; if it has ended, for {LOCK_LIFE:.0f} s at most"


def _probe() -> str:
    return f"orderedmq-admin-{uuid.uuid4().hex}"


def _by_broker(queues: Sequence[MessageQueue]) -> list[list[MessageQueue]]:
    out: dict[str, list[MessageQueue]] = {}
    for queue in queues:
        out.setdefault(queue.broker_name, []).append(queue)
    return list(out.values())
