"""A group's numbers at the brokers: its offsets, and some of ours that RocketMQ has no place for.

A broker keeps (group, topic, queue id) → number and does not ask whether the queue exists, so beside the offsets of a queue there is room:

- the *fence* of a queue, under its id plus FENCES (locks.py says what it is for);
- the *reset number* of a group, at every broker, under RESETS of the group's own retry topic.

A sink's group has its mark there (bookmarks.MARKS).

They are written to disk with the offsets and are deleted with the group or topic; tools that count up a topic's queues do not see them.

Never committed or committed 0: a broker of 5.x says it (``setZeroIfNotFound``). One of 4.9 answers 0 to both while the queue's first
message is young (ConsumerManageProcessor.queryConsumerOffset): then the table of all offsets is asked for, which its slaves copy.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from orderedmq.errors import GroupError, LockError, OffsetError, OrderedMQError, RocketMQError, TopicError
from orderedmq.model import RETRY_PREFIX, MessageQueue
from orderedmq.rocketmq import group_requests, requests
from orderedmq.rocketmq.asking import ask_queues, ask_servers, existing
from orderedmq.rocketmq.client import Client
from orderedmq.rocketmq.codes import RequestCode, ResponseCode
from orderedmq.rocketmq.frame import RemotingCommand
from orderedmq.rocketmq.request import Request, number

#: Seconds for an operation with all its retries.
TIMEOUT: Final = 25.0
#: Above any queue's id (MAX_QUEUES).
FENCES: Final = 1 << 20
RESETS: Final = 1 << 21
#: V5_0_0: from here on a broker tells "never committed" from 0.
_TELLS_NEVER: Final = 413


def soon(seconds: float = TIMEOUT) -> float:
    return time.monotonic() + seconds


def fence_of(queue: MessageQueue) -> MessageQueue:
    return queue._replace(queue_id=queue.queue_id + FENCES)


class GroupOffsets:
    """See the module. Thread-safe."""

    def __init__(self, client: Client) -> None:
        self._client = client

    # -- offsets

    def read(self, group: str, queues: Sequence[MessageQueue], seconds: float = TIMEOUT) -> dict[MessageQueue, int]:
        """The offsets of queues of which one was committed. Queues that do not exist are left out."""
        deadline = soon(seconds)
        there = existing(self._client, queues, lambda topic, fresh: self._client.route(topic, deadline, fresh=fresh), deadline)
        answers = ask_queues(self._client, [(queue, _offset(group, queue)) for queue in there], deadline)
        found: dict[MessageQueue, int] = {}
        doubtful: dict[str, list[MessageQueue]] = {}
        for queue, (offset, certain) in zip(there, answers):
            if offset is not None and certain:
                found[queue] = offset
            elif offset is not None:
                doubtful.setdefault(queue.broker_name, []).append(queue)
        for asked in doubtful.values():
            committed = self._committed(group, asked[0], deadline)
            found.update((queue, 0) for queue in asked if queue._replace(broker_name="") in committed)
        return {queue: found[queue] for queue in queues if queue in found}

    def _committed(self, group: str, at: MessageQueue, deadline: float) -> Mapping[MessageQueue, int]:
        every = group_requests.all_consumer_offsets()
        return self._client.call(every, deadline, topic=at.topic, broker_name=at.broker_name).get(group, {})

    def write(self, group: str, offsets: Mapping[MessageQueue, int], seconds: float = TIMEOUT) -> list[MessageQueue]:
        """Set offsets, in any direction; makes the group where a broker wants that first (5.3).

        Returns the queues whose offset was reset by RocketMQ's own tools and not noticed since: the broker keeps that (5.x,
        useServerSideResetOffset), until it is accepted (`move`). Raises GroupError MISSING where groups are not made by themselves.
        """
        if not offsets:
            return []
        deadline = soon(seconds)
        for queue, offset in offsets.items():
            if not 0 <= offset < 2**63:
                raise OffsetError("INVALID", f"{offset} is no offset of queue {queue} for group {group!r}; offsets begin at 0")
        asked = [(queue, group_requests.update_consumer_offset(group, queue, offset)) for queue, offset in offsets.items()]
        try:
            done = ask_queues(self._client, asked, deadline)
        except GroupError:
            self.make(group, list(offsets), deadline)
            done = ask_queues(self._client, asked, deadline)
        return [queue for (queue, _), taken in zip(asked, done) if not taken]

    def move(
        self, group: str, offsets: Mapping[MessageQueue, int], held: Iterable[MessageQueue], seconds: float = TIMEOUT
    ) -> None:
        """As `write`, for a consumer that holds the queues ``held``. Raises LockError LOST when RocketMQ's own tools have reset the group.

        Then the resets of all its queues are found and accepted in one go, and the group's reset number is raised: a restart follows the
        offsets that were set, whatever its checkpoint says.
        """
        found = self.write(group, offsets, seconds)
        if not found:
            return
        others = sorted(set(held).difference(offsets))
        # Written again as they are: a broker that keeps a reset says so.
        found += self.write(group, self.read(group, others, seconds), seconds)
        # Before they are accepted: if this process is killed in between, they are found again.
        self.raise_reset_number(group, found)
        self._accept_resets(group, found, seconds)
        raise LockError(
            "LOST",
            f"the offsets of group {group!r} in {len(found)} queues ({', '.join(map(str, sorted(found)))}) were reset by RocketMQ's own "
            "tools, and what this query has done since its last commit was not committed; restart it, it goes on at the offsets that were "
            "set",
        )

    def _accept_resets(self, group: str, queues: Sequence[MessageQueue], seconds: float) -> None:
        """Take notice of resets by RocketMQ's own tools, so that the brokers take offsets of these queues again: pull once."""
        asked = [(queue, requests.pull(queue, group, 0, 1)) for queue in queues]
        ask_queues(self._client, asked, soon(seconds))

    def make(self, group: str, queues: Sequence[MessageQueue], deadline: float) -> None:
        """Make the group at the brokers of queues, as any consumer does: by a pull. Raises GroupError MISSING where that is switched off."""
        one_of_each = {queue.broker_name: queue for queue in queues}.values()
        for queue in one_of_each:
            real = queue._replace(queue_id=queue.queue_id % FENCES)
            if real.topic.startswith(RETRY_PREFIX):
                # Made with the group's first heartbeat, like the group.
                continue
            with _named(group):
                self._client.call(requests.pull(real, group, 0, 1), deadline, topic=queue.topic, broker_name=queue.broker_name)

    # -- fences

    def fences(self, group: str, queues: Sequence[MessageQueue], seconds: float = TIMEOUT) -> dict[MessageQueue, int]:
        """0 where there is none."""
        asked = [(queue, _offset(group, fence_of(queue))) for queue in queues]
        answers = ask_queues(self._client, asked, soon(seconds))
        return {queue: offset or 0 for queue, (offset, _) in zip(queues, answers)}

    def fence(self, group: str, epochs: Mapping[MessageQueue, int], seconds: float = TIMEOUT) -> None:
        """Make tokens up to these epochs stale, for everyone who looks."""
        kept = self.write(group, {fence_of(queue): epoch for queue, epoch in epochs.items()}, seconds)
        assert not kept, "no tool knows a fence, so none resets it"

    def raise_fences(self, group: str, epochs: Mapping[MessageQueue, int], seconds: float = TIMEOUT) -> None:
        """As `fence`, where it is lower."""
        known = self.fences(group, list(epochs), seconds)
        self.fence(group, {queue: epoch for queue, epoch in epochs.items() if epoch > known[queue]}, seconds)

    # -- the reset number

    def reset_number(self, group: str) -> int:
        """The highest that a broker knows; one that is away is not asked."""
        masters = self.masters()
        place = _reset_place(group)
        answers = [0]
        for address in masters:
            with contextlib.suppress(RocketMQError, TopicError):
                (offset, _) = self._client.call_address(address, _offset(group, place), soon(5.0))
                answers.append(offset or 0)
        if len(answers) == 1 and masters:
            # No broker answered. Ask one again and raise its error if it fails, too: 0 would mean that the group was never reset.
            [(offset, _)] = ask_servers(self._client, [(masters[0], _offset(group, place))], soon(5.0))
            answers.append(offset or 0)
        return max(answers)

    def raise_reset_number(self, group: str, queues: Sequence[MessageQueue]) -> int:
        """At every broker that can be reached; ``queues`` are those whose offsets were set: their brokers must be among these."""
        raised = self.reset_number(group) + 1
        deadline = soon()
        must = {self._client.address(queue.topic, queue.broker_name, deadline) for queue in queues}
        for address in sorted({*must, *self.masters()}):
            try:
                self._write_reset(group, address, raised, deadline)
            except OrderedMQError:
                if address in must:
                    raise
        return raised

    def _write_reset(self, group: str, address: str, value: int, deadline: float) -> None:
        request = group_requests.update_consumer_offset(group, _reset_place(group), value)
        try:
            self._client.call_address(address, request, deadline)
        except (GroupError, TopicError):
            # The group's first heartbeat makes both; there was none at this broker, so there is no member whose subscription it changes.
            with self._client.another() as member:
                name = f"orderedmq-reset@{value}"
                member.call_address(address, group_requests.heartbeat(name, group, (), version=1), deadline)
                member.call_address(address, group_requests.unregister(name, group), deadline)
            with _named(group):
                self._client.call_address(address, request, deadline)

    def masters(self) -> list[str]:
        """The addresses of all brokers that can be written to."""
        brokers = self._client.cluster(soon()).brokers
        return [broker.master for _, broker in sorted(brokers.items()) if broker.master is not None]


def _reset_place(group: str) -> MessageQueue:
    return MessageQueue(RETRY_PREFIX + group, "", RESETS)


def _offset(group: str, queue: MessageQueue) -> Request[tuple[int | None, bool]]:
    """The number, and whether it was really written: 4.9 makes up a 0."""
    asked = group_requests.consumer_offset(group, queue)

    def parse(response: RemotingCommand) -> tuple[int | None, bool]:
        if response.code != ResponseCode.SUCCESS:
            return None, True
        offset = number(response, "offset")
        return offset, offset != 0 or response.version >= _TELLS_NEVER

    return Request(RequestCode.QUERY_CONSUMER_OFFSET, asked.what, asked.resource, parse, asked.ext, accepts=asked.accepts)


@contextlib.contextmanager
def _named(group: str) -> Iterator[None]:
    """A group that a broker does not make by itself is the administrator's to make."""
    try:
        yield
    except GroupError as error:
        if error.sub != "MISSING":
            raise
        raise GroupError(
            "MISSING",
            f"consumer group {group!r} does not exist, and the brokers make none by themselves (autoCreateSubscriptionGroup=false): create it "
            f"(mqadmin updateSubGroup -c CLUSTER -g {group}), or use one that exists",
        ) from error
