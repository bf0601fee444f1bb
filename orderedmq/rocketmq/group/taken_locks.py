"""Locks that an administrator takes on a group's queues, so that no query starts to read them while the group is changed.

A broker does not report who holds a lock. Only a lock request shows whether a queue is locked, and only the members' reports
(running_info.py) show which client holds the lock.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Sequence

from orderedmq.errors import in_use
from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import LOCK_LIFE
from orderedmq.rocketmq.group import lock_rules
from orderedmq.rocketmq.group.membership import Directory
from orderedmq.rocketmq.group.offsets import GROUP_TIMEOUT
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.deadline import Deadline
from orderedmq.rocketmq.net.fan_out import ask_queues
from orderedmq.rocketmq.wire import group_requests


class TakenLocks:
    """Takes locks under unique names. Thread-safe."""

    def __init__(self, client: Client, directory: Directory) -> None:
        self._client = client
        self._directory = directory

    def free(self, group: str, queues: Sequence[MessageQueue]) -> list[MessageQueue]:
        """Return the queues that are not locked."""
        name = _new_name()
        granted = self._lock(group, name, queues)
        self._unlock(group, name, granted)
        return granted

    @contextlib.contextmanager
    def held(self, group: str, queues: Sequence[MessageQueue], force: bool) -> Iterator[list[MessageQueue]]:
        """Hold the queues' locks during the ``with`` block and yield the queues that were granted.

        Raises GroupError IN_USE if the group has a member or one of the queues is locked. With ``force``, takes the locks
        from the members instead, and does not raise even if some locks are not granted.
        """
        ids = self._directory.ids_everywhere(group)
        if not force and ids:
            raise in_use(group, self.user(group, ids, ()))
        for name in {name for client_id in ids for name in lock_rules.lock_names(client_id)}:
            self._unlock(group, name, queues)
        name = _new_name()
        granted = self._lock(group, name, queues)
        try:
            if not force and len(granted) < len(set(queues)):
                raise in_use(group, self.user(group, (), [queue for queue in queues if queue not in granted]))
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

    def user(self, group: str, ids: Sequence[str], held: Sequence[MessageQueue]) -> str:
        """Return a text for an error that says who uses the group: the owner of one of its queues, or else a member."""
        brokers = self._directory.masters()
        for client_id in ids:
            info = self._directory.info(group, client_id, brokers, fresh=True)
            for one in info.held if info is not None else ():
                if not held or one.queue in held:
                    return f"{client_id} owns queue {one.queue}"
        if ids:
            return f"{ids[0]} is a member"
        return f"a client that is not a member owns queue {held[0]}, and keeps it for at most {LOCK_LIFE:.0f} s if it has ended"


def _new_name() -> str:
    return f"orderedmq-admin-{uuid.uuid4().hex}"


def _by_broker(queues: Sequence[MessageQueue]) -> list[list[MessageQueue]]:
    out: dict[str, list[MessageQueue]] = {}
    for queue in queues:
        out.setdefault(queue.broker_name, []).append(queue)
    return list(out.values())
