"""A group's numbers at the brokers: its offsets, and the `registers` of queues and of the group.

A 5.x broker distinguishes "never committed" from "committed 0" (``setZeroIfNotFound``). A 4.9 broker answers 0 in both cases while
the queue's first message is recent (ConsumerManageProcessor.queryConsumerOffset). In this case, this module reads the table of all
offsets, with the request that replicas use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from orderedmq.broker import Progress
from orderedmq.conditions import GroupCondition, LockCondition
from orderedmq.errors import GroupError, LockError, TopicError, not_an_offset
from orderedmq.model import RETRY_PREFIX, MessageQueue
from orderedmq.rocketmq.group import lock_rules
from orderedmq.rocketmq.group.lock_rules import not_created
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.deadline import Deadline
from orderedmq.rocketmq.net.fan_out import ask_queues, existing
from orderedmq.rocketmq.wire import group_requests, message_requests, registers
from orderedmq.rocketmq.wire.codes import RequestCode, ResponseCode
from orderedmq.rocketmq.wire.frame import RemotingCommand
from orderedmq.rocketmq.wire.request import Request, int_field
from orderedmq.rocketmq.wire.rights import TOOLS_GROUP

#: Seconds for an operation on a group with all its retries.
GROUP_TIMEOUT: Final = 25.0
#: V5_0_0: from this version on, a broker distinguishes "never committed" from 0.
_TELLS_NEVER: Final = 413


class GroupOffsets:
    """Reads and writes the numbers of groups. Thread-safe."""

    def __init__(self, client: Client) -> None:
        self._client = client

    # -- offsets

    def read(self, group: str, queues: Sequence[MessageQueue], seconds: float = GROUP_TIMEOUT) -> dict[MessageQueue, int]:
        """Return the committed offsets. Queues that do not exist or have no committed offset are left out."""
        deadline = Deadline.after(seconds)
        there = existing(
            self._client,
            queues,
            lambda topic, fresh: self._client.route(topic, deadline, fresh=fresh),
            (TOOLS_GROUP, group),
            deadline,
        )
        answers = ask_queues(self._client, [(queue, _offset(group, queue)) for queue in there], deadline)
        offsets: dict[MessageQueue, int] = {}
        doubtful: dict[str, list[MessageQueue]] = {}
        for queue, (offset, certain) in zip(there, answers):
            if offset is not None and certain:
                offsets[queue] = offset
            elif offset is not None:
                doubtful.setdefault(queue.broker_name, []).append(queue)
        for of_broker in doubtful.values():
            committed = self._committed(group, of_broker[0], deadline)
            offsets.update((queue, 0) for queue in of_broker if queue._replace(broker_name="") in committed)
        return {queue: offsets[queue] for queue in queues if queue in offsets}

    def _committed(self, group: str, at: MessageQueue, deadline: float) -> Mapping[MessageQueue, int]:
        every = group_requests.all_consumer_offsets()
        return self._client.call(every, deadline, topic=at.topic, broker_name=at.broker_name).get(group, {})

    def write(self, group: str, offsets: Mapping[MessageQueue, int], seconds: float = GROUP_TIMEOUT) -> list[MessageQueue]:
        """Set offsets in any direction, and create the group if a broker requires that it exists (5.3).

        Returns the queues that RocketMQ's own tools have reset: a 5.x broker (useServerSideResetOffset) keeps the reset offset
        until it is accepted (`move`). Raises GroupError MISSING if brokers do not create groups on demand, and OffsetError INVALID
        for an offset that is negative or too large.
        """
        if not offsets:
            return []
        deadline = Deadline.after(seconds)
        for queue, offset in offsets.items():
            if not 0 <= offset < 2**63:
                raise not_an_offset(offset, queue, group)
        # For the first offset of the group in a topic, a broker creates a table, without a lock (ConsumerOffsetManager.commitOffset). If
        # two first offsets arrive at the same time, the broker may create two tables and lose one. So one offset of each topic at each
        # broker is written before the others.
        first = set({(queue.topic, queue.broker_name): queue for queue in offsets}.values())
        reset: list[MessageQueue] = []
        for queues in ([queue for queue in offsets if queue in first], [queue for queue in offsets if queue not in first]):
            requests = [(queue, group_requests.update_consumer_offset(group, queue, offsets[queue])) for queue in queues]
            try:
                accepted = ask_queues(self._client, requests, deadline)
            except GroupError:
                self.create_group(group, queues, deadline)
                accepted = ask_queues(self._client, requests, deadline)
            reset += [queue for queue, is_accepted in zip(queues, accepted) if not is_accepted]
        return reset

    def clear(self, group: str, queues: Iterable[MessageQueue]) -> list[MessageQueue]:
        """Set offsets to 0, but create no group. Return the queues whose offset was set.

        A 5.3 broker without the group refuses. Such a broker needs no change, because it deletes offsets with their topic.
        """
        cleared = []
        for queue in queues:
            with contextlib.suppress(GroupError):
                request = (queue, group_requests.update_consumer_offset(group, queue, 0))
                ask_queues(self._client, [request], Deadline.after(GROUP_TIMEOUT))
                cleared.append(queue)
        return cleared

    def move(
        self, group: str, offsets: Mapping[MessageQueue, int], held: Iterable[MessageQueue], seconds: float = GROUP_TIMEOUT
    ) -> None:
        """Like `write`, for a consumer that holds the locks of the queues ``held``.

        Raises LockError LOST if RocketMQ's own tools have reset the group. Before that, it finds and accepts all resets of the queues in
        ``offsets`` and ``held``, and records them, so that a restarted query follows the offsets that the tools have set instead of its
        checkpoint.
        """
        reset = self.write(group, offsets, seconds)
        if not reset:
            return
        others = sorted(set(held).difference(offsets))
        # Write the other offsets again unchanged, because the broker's answers say which queues were reset.
        reset += self.write(group, self.read(group, others, seconds), seconds)
        # Record the resets before accepting them: if this process is killed in between, they are found again.
        self.record_resets(group, self.next_epochs(group, reset))
        self._accept_resets(group, reset, seconds)
        raise LockError(
            LockCondition.LOST,
            f"the offsets of group {group!r} in {len(reset)} queues ({', '.join(map(str, sorted(reset)))}) were reset by RocketMQ's own "
            "tools, so this query's work since its last commit is not committed. Restart the query to resume at the new offsets",
        )

    def _accept_resets(self, group: str, queues: Sequence[MessageQueue], seconds: float) -> None:
        """Accept resets by RocketMQ's own tools with one pull per queue, so that brokers accept commits for these queues again."""
        requests = [(queue, message_requests.pull(queue, group, 0, 1)) for queue in queues]
        ask_queues(self._client, requests, Deadline.after(seconds))

    def create_group(self, group: str, queues: Sequence[MessageQueue], deadline: float) -> None:
        """Create the group at the queues' brokers with a pull, as any consumer does. Raises GroupError MISSING if this is disabled."""
        one_of_each = {queue.broker_name: queue for queue in queues}.values()
        for queue in one_of_each:
            real = registers.queue_of(queue)
            if real.topic.startswith(RETRY_PREFIX):
                # The group's first heartbeat creates the retry topic and the group.
                continue
            with _explain_missing(group):
                self._client.call(
                    message_requests.pull(real, group, 0, 1), deadline, topic=queue.topic, broker_name=queue.broker_name
                )

    # -- fences

    def fences(self, group: str, queues: Sequence[MessageQueue], seconds: float = GROUP_TIMEOUT) -> dict[MessageQueue, int]:
        """Return the fence of each queue; 0 for a queue without a fence."""
        return dict(zip(queues, self._registers(group, [registers.fence(queue) for queue in queues], seconds)))

    def known_fences(self, group: str, queues: Sequence[MessageQueue]) -> dict[MessageQueue, int]:
        """Like `fences`, before anything is decided by them. Raises GroupError NEWER_FORMAT."""
        fences = self.fences(group, queues)
        registers.require_known(group, fences.values())
        return fences

    def fence(self, group: str, epochs: Mapping[MessageQueue, int], seconds: float = GROUP_TIMEOUT) -> None:
        """Set fences. Tokens with these or lower epochs become stale for every client that reads the fences. Skip deleted topics."""
        self._write_of_existing(group, {registers.fence(queue): epoch for queue, epoch in epochs.items()}, seconds)

    def raise_fences(self, group: str, epochs: Mapping[MessageQueue, int], seconds: float) -> None:
        """Like `fence`, but only for queues whose fence is lower."""
        fences = self.fences(group, list(epochs), seconds)
        self.fence(group, {queue: epoch for queue, epoch in epochs.items() if epoch > fences[queue]}, seconds)

    # -- tenures and resets

    def tenures(self, group: str, queues: Sequence[MessageQueue]) -> dict[MessageQueue, int]:
        """Return the epoch at which the tenure of each queue's last owner began; 0 for a queue without one."""
        return dict(zip(queues, self._registers(group, [registers.tenure(queue) for queue in queues])))

    def set_tenures(self, group: str, epochs: Mapping[MessageQueue, int], seconds: float = GROUP_TIMEOUT) -> None:
        """Set the epochs at which tenures began. Skip deleted topics."""
        self._write_of_existing(group, {registers.tenure(queue): epoch for queue, epoch in epochs.items()}, seconds)

    def _write_of_existing(self, group: str, numbers: Mapping[MessageQueue, int], seconds: float) -> None:
        """Write registers of locks, but not of deleted topics: their locks protect nothing, and must not stop those of other topics.

        The next boundary finds out which messages are lost. If such a topic is created again, a renewal writes its registers.
        """
        try:
            self.write(group, numbers, seconds)
        except TopicError:
            for topic in dict.fromkeys(place.topic for place in numbers):
                with contextlib.suppress(TopicError):
                    self.write(group, {place: number for place, number in numbers.items() if place.topic == topic}, seconds)

    def resets(self, group: str, queues: Sequence[MessageQueue]) -> dict[MessageQueue, int]:
        """Return the epoch of each queue's last reset; 0 for a queue that was never reset."""
        return dict(zip(queues, self._registers(group, [registers.reset(queue) for queue in queues])))

    def record_resets(self, group: str, epochs: Mapping[MessageQueue, int]) -> None:
        """Record resets of queues, which end all progress there. ``epochs``: see `next_epochs`. The epochs of later grants are higher."""
        cleared = {registers.progress(queue): 0 for queue in epochs}
        reset = self.write(group, {**{registers.reset(queue): epoch for queue, epoch in epochs.items()}, **cleared})
        assert not reset, "RocketMQ's tools do not know this register, so they never reset it"

    def next_epochs(self, group: str, queues: Sequence[MessageQueue]) -> dict[MessageQueue, int]:
        """Return for each queue an epoch that no grant so far exceeds. With this fence, the queue counts as given back.

        Raises GroupError NEWER_FORMAT.
        """
        return {queue: lock_rules.freed(fence) for queue, fence in self.known_fences(group, queues).items()}

    # -- progress

    def progress(self, group: str, queue: MessageQueue, listener: str) -> Progress:
        """See `Groups.progress`."""
        reset, *numbers = self._progress(group, queue)
        at, lot = map(registers.offset_of, numbers)
        is_valid, has_lot = (
            number == registers.progress_of(offset, reset, listener) for number, offset in zip(numbers, (at, lot), strict=True)
        )
        return Progress(at, lot if has_lot else 0) if is_valid else Progress()

    def _progress(self, group: str, queue: MessageQueue) -> list[int]:
        """Return the registers `reset`, `progress` and `lot_progress` of a queue."""
        places = [register(queue) for register in (registers.reset, registers.progress, registers.lot_progress)]
        return self._registers(group, places)

    def record_progress(self, group: str, queue: MessageQueue, progress: Progress, listener: str) -> None:
        """Record a listener's progress in a queue."""
        reset, _, former = self._progress(group, queue)
        at, lot = (registers.progress_of(offset, reset, listener) for offset in progress)
        if former != lot and (progress.lot or registers.offset_of(former)):
            # If this process is killed in between, nothing counts as decided: an offset of one batch must not meet a lot's of another.
            self.write(group, {registers.progress(queue): 0})
            self.write(group, {registers.lot_progress(queue): lot})
        self.write(group, {registers.progress(queue): at})

    def forget_progress(self, group: str, passed: Mapping[MessageQueue, Progress]) -> None:
        """Forget progress that the group's offsets ``passed`` in queues and their lots have passed.

        Otherwise it would count again after RocketMQ's own tools have set the group's offset back, of which nobody records an epoch.
        """
        places = [register(queue) for queue in passed for register in (registers.progress, registers.lot_progress)]
        offsets = map(registers.offset_of, self._registers(group, places))
        recorded = dict(zip(passed, map(Progress, offsets, offsets)))
        done = [queue for queue, (at, lot) in recorded.items() if 0 < at <= passed[queue].offset and lot <= passed[queue].lot]
        self.write(group, {registers.progress(queue): 0 for queue in done})

    def _registers(self, group: str, places: Sequence[MessageQueue], seconds: float = GROUP_TIMEOUT) -> list[int]:
        """Return the numbers in these registers; 0 for a register that was never written."""
        answers = ask_queues(self._client, [(place, _offset(group, place)) for place in places], Deadline.after(seconds))
        return [number or 0 for number, _ in answers]

    def masters(self) -> dict[str, str]:
        """Return the addresses of all masters by broker name. Masters are the brokers that accept writes."""
        brokers = self._client.whole_cluster(Deadline.after(GROUP_TIMEOUT)).brokers
        return {name: broker.master for name, broker in sorted(brokers.items()) if broker.master is not None}


def _offset(group: str, queue: MessageQueue) -> Request[tuple[int | None, bool]]:
    """Return a request for a stored number. Its result also says whether the number is certain, as 4.9 answers 0 if none is stored."""
    request = group_requests.consumer_offset(group, queue)

    def parse(response: RemotingCommand) -> tuple[int | None, bool]:
        if response.code != ResponseCode.SUCCESS:
            return None, True
        offset = int_field(response, "offset")
        return offset, offset != 0 or response.version >= _TELLS_NEVER

    return Request(
        RequestCode.QUERY_CONSUMER_OFFSET, request.what, request.resource, parse, request.ext, accepts=request.accepts
    )


@contextlib.contextmanager
def _explain_missing(group: str) -> Iterator[None]:
    """Replace GroupError MISSING by an error that says how to create the group at brokers that do not create it on demand."""
    try:
        yield
    except GroupError as error:
        if error.sub != GroupCondition.MISSING:
            raise
        raise not_created(group) from error
