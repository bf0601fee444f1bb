"""A sink's numbers in one topic, stored as offsets of a consumer group without consumers. See lookback.py.

The offset of a queue is its *bookmark*. The other numbers are `registers`: the run and batch that write to a broker, the committed
batches, and the sink to which the numbers belong. Every broker of the topic stores the committed batches: a batch may have rows in only
some queues, but if it is repeated with other rows, these may go to any queue.

A broker writes a new group to disk immediately, but offsets only within 5 s. So it also matters whether the group exists. If the group
exists, the sink may have sent messages even if there is no bookmark, and the queue's history is read. If it does not exist, the sink
is new or its group was deleted, so only the last messages of each of the topic's queues at the broker are searched. A queue in which
none of them is the sink's gets a bookmark: the end that it had before any task could send. If several tasks do this at the same time,
the bookmarks are at worst too low.

A group that the user named may exist before the sink and hold another sink's bookmarks. So each broker also stores the *mark* in the
group, a number that identifies the sink, and the mark counts instead of the group. It is an offset, so a broker that is killed may
forget it, and then each queue's last messages are searched again. Bookmarks that a deleted sink left are at worst too low. Two running
sinks would use each other's bookmarks, so a commit checks the mark. The mark is stored before the bookmarks, so a group that has offsets
in the topic but no mark is the group of consumers, and a sink refuses it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

from orderedmq.conditions import GroupCondition, OptionCondition
from orderedmq.errors import GroupError, OptionError, RocketMQError
from orderedmq.model import MessageQueue
from orderedmq.ownership.micro_batch import KEPT_BATCHES
from orderedmq.rocketmq.group.offsets import GroupOffsets
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.deadline import Deadline
from orderedmq.rocketmq.net.fan_out import ask_queues
from orderedmq.rocketmq.sink import commit_history
from orderedmq.rocketmq.sink.agreement import BrokerState
from orderedmq.rocketmq.sink.batch_queues import Record
from orderedmq.rocketmq.sink.commit_history import Committed
from orderedmq.rocketmq.sink.message_stamp import Writer, bookmark_group, sink_mark
from orderedmq.rocketmq.wire import admin_requests, message_requests, registers
from orderedmq.rocketmq.wire.group_requests import consumer_offset, update_consumer_offset
from orderedmq.rocketmq.wire.request import Request

T = TypeVar("T")

#: Seconds for a request with all its retries, because a broker may be restarting.
TIMEOUT: Final = 60.0


class WriterEntry(NamedTuple):
    """The run that writes a batch to a broker, with partition numbers below ``width``. ``batch``: the last 15 bits of the batch number."""

    width: int
    batch: int
    run: int

    @classmethod
    def of(cls, writer: Writer) -> WriterEntry:
        """Return the entry that the broker must have before the writer sends. An entry with a greater width is also sufficient.

        The width is rounded up, so that only a few of many tasks have to change the entry.
        """
        width = 64
        while width <= writer.partition:
            width *= 4
        return cls(min(width, (1 << 16) - 1), writer.batch & 0x7FFF, int(writer.run or "0", 16))

    @classmethod
    def parse(cls, value: int) -> WriterEntry:
        return cls(value >> 47, value >> 32 & 0x7FFF, value & 0xFFFF_FFFF)

    @property
    def value(self) -> int:
        return self.width << 47 | self.batch << 32 | self.run

    def widened(self, other: WriterEntry) -> WriterEntry:
        """Return this entry with the greater of both widths."""
        return self._replace(width=max(self.width, other.width))

    def covers(self, other: WriterEntry) -> bool:
        return self[1:] == other[1:] and self.width >= other.width


class Numbers(NamedTuple):
    """The numbers of a broker that a task needs before it writes there.

    ``committed``: the newest batch known to be committed; -1 for none. ``record``: see `batch_queues`.
    """

    committed: int
    entry: WriterEntry
    record: Record


class Bookmarks:
    """The numbers of one sink in one topic, stored at its brokers."""

    def __init__(self, client: Client, sink: str, topic: str, named: str | None = None, *, timeout: float = TIMEOUT) -> None:
        """``named``: the group that the user chose, if any."""
        self.group = bookmark_group(sink, topic, named)
        self._mark = sink_mark(sink) if named is not None else None
        self._client = client
        self._offsets = GroupOffsets(client)
        self._topic = topic
        self._timeout = timeout

    def get(self, queue: MessageQueue) -> int | None:
        """Return the bookmark. If it was never set, return None, or perhaps 0 from a broker before 5.0."""
        return self.get_all([queue])[0]

    def get_all(self, queues: Sequence[MessageQueue]) -> list[int | None]:
        requests = [(queue, consumer_offset(self.group, queue)) for queue in queues]
        return ask_queues(self._client, requests, Deadline.after(self._timeout))

    def move(self, queue: MessageQueue, bookmark: int) -> None:
        """Set the bookmark. While an administrator's reset is pending, the bookmark stays lower, which is harmless."""
        self.move_all({queue: bookmark})

    def move_all(self, bookmarks: Mapping[MessageQueue, int]) -> None:
        requests = [(queue, update_consumer_offset(self.group, queue, bookmark)) for queue, bookmark in bookmarks.items()]
        try:
            ask_queues(self._client, requests, Deadline.after(self._timeout))
        except GroupError:
            # From 5.3 on, the group must exist.
            for queue in {queue.broker_name: queue for queue in bookmarks}.values():
                self._create_group(queue)
            ask_queues(self._client, requests, Deadline.after(self._timeout))

    def get_own(self, queues: Sequence[MessageQueue]) -> list[int | None]:
        """Do what `get_all` does for queues of one broker. Bookmarks of another sink in the group count as missing."""
        if self._mark is None:
            return self.get_all(queues)
        mark, *bookmarks = self.get_all([registers.mark(queues[0]), *queues])
        return bookmarks if mark == self._mark else [None] * len(queues)

    def numbers(self, queue: MessageQueue) -> Numbers:
        """Return the numbers of the queue's broker. Numbers of another sink in the group count as missing, except the entry."""
        places = [registers.writer(queue), registers.committed(queue), registers.queues(queue)]
        if self._mark is not None:
            places.append(registers.mark(queue))
        entry, *numbers = (number or 0 for number in self.get_all(places))
        committed, record = numbers[:2] if numbers[2:] in ([], [self._mark]) else (0, 0)
        return Numbers(committed - 1, WriterEntry.parse(entry), Record.parse(record))

    def states(self, queues: Sequence[MessageQueue]) -> list[BrokerState]:
        """Return what the brokers of these queues store about the sink's last batches. See `read` about numbers of another sink.

        Each attempt calls this before it sends a row. Raises GroupError NEWER_FORMAT.
        """
        places = [
            place for queue in queues for place in (registers.queues(queue), registers.committed(queue), registers.mark(queue))
        ]
        numbers = [number or 0 for number in self.get_all(places)]
        registers.require_known(self.group, numbers[2::3])
        return [
            BrokerState(Record.parse(record), committed - 1, record > 0)
            if self._mark in (None, mark)
            else BrokerState(Record.parse(0), -1, False)
            for record, committed, mark in zip(numbers[::3], numbers[1::3], numbers[2::3])
        ]

    def write_record(self, queue: MessageQueue, record: Record) -> None:
        """Store the record of a batch's queues at the queue's broker. Call `enter` before the first call."""
        self.move(registers.queues(queue), record.value)

    def committed(self, queue: MessageQueue, batch: int) -> Committed:
        """Return what the queue's broker knows about the batch. Numbers of another sink in the group count as missing."""
        places = [registers.committed(queue), registers.history(queue, commit_history.slot_of(batch))]
        if self._mark is not None:
            places.append(registers.mark(queue))
        newest, history, *mark = self.get_all(places)
        return Committed((newest or 0) - 1, history or 0) if not mark or mark[0] == self._mark else Committed()

    def commit(self, queue: MessageQueue, batch: int, stored: Committed) -> None:
        """Store at the queue's broker that the batch is committed. Call `require_own` first, which checks the mark there.

        ``stored``: the answer of `committed` about this batch.
        """
        history = commit_history.with_batch(stored.history, batch)
        if history != stored.history and stored.newest - batch < KEPT_BATCHES:
            # Write the history before the newest batch: after a failure in between, `Committed.has` ignores this batch's bit.
            self.move(registers.history(queue, commit_history.slot_of(batch)), history)
        if stored.newest < batch:
            self.move(registers.committed(queue), batch + 1)

    def commit_elsewhere(
        self,
        queue: MessageQueue,
        batch: int,
        stored: Committed,
        seen_before: Callable[[MessageQueue, int], bool],
        permitted: Callable[[], None],
    ) -> None:
        """Like `commit`, but for a broker that has none of the batch's rows. ``seen_before`` and ``permitted``: see `enter`."""
        if stored.newest < 0:
            if self._mark is not None and self.get(registers.mark(queue)) not in (None, 0, self._mark):
                # Another sink, which may be running, has stored this mark.
                return
            # This may be the group's first use at this broker. Creating the group includes setting the bookmarks.
            self.enter(queue, seen_before, permitted)
        self.commit(queue, batch, stored)

    def forget(self, queue: MessageQueue) -> None:
        """Reset the bookmark and the committed batches after the topic was created again, because they would hide messages."""
        self.move(queue, 0)
        self._forget_batches(queue)

    def _forget_batches(self, queue: MessageQueue) -> None:
        slots = (registers.history(queue, slot) for slot in range(commit_history.SLOTS))
        for place in (registers.queues(queue), registers.committed(queue), *slots):
            if self.get(place):
                self.move(place, 0)

    def entry(self, queue: MessageQueue) -> WriterEntry:
        """Return the entry of the queue's broker. All its numbers are 0 before the first run."""
        return WriterEntry.parse(self.get(registers.writer(queue)) or 0)

    def write_entry(self, queue: MessageQueue, entry: WriterEntry) -> None:
        self.move(registers.writer(queue), entry.value)

    def enter(
        self, queue: MessageQueue, seen_before: Callable[[MessageQueue, int], bool], permitted: Callable[[], None]
    ) -> None:
        """Create the group, and the bookmarks of all queues at the queue's broker, if they are missing.

        ``seen_before(queue, end)`` returns whether the last messages before an offset include messages of the sink. ``permitted()``
        raises an error if the account lacks a right that a sink needs. Nothing is stored in that case. Raises OptionError CONFLICT if the
        group that the user named has the offsets of consumers.
        """
        if self._own_bookmark(queue):
            return
        # A task enters many queues of a broker, and the first one searches them all.
        with self._client.entering:
            self._enter(queue, seen_before, permitted)

    def _enter(
        self, queue: MessageQueue, seen_before: Callable[[MessageQueue, int], bool], permitted: Callable[[], None]
    ) -> None:
        if self._has_group(queue) if self._mark is None else self._is_marked(queue):
            return
        ends = self._ends(queue)
        # Ask again, because another task may have entered, and sent rows, before the ends were read.
        has_group = self._has_group(queue)
        if has_group if self._mark is None else self._is_marked(queue):
            return
        permitted()
        if self._mark is not None:
            self._refuse_consumers(queue, list(ends))
        entered_before = {each for each, end in ends.items() if seen_before(each, end)}
        if entered_before and self._mark is not None and self.get(registers.mark(queue)):
            # Another sink, which may be running, has replaced the mark. The commit raises an error.
            return
        # 0 counts as no bookmark. A bookmark after the sink's messages would say that their batch is committed.
        bookmarks = {each: 0 if each in entered_before else end for each, end in ends.items()}
        if not has_group:
            self._create_group(queue)
        if self._mark is not None:
            self._store_mark(queue, self._mark)
        self._offsets.write(self.group, bookmarks, self._timeout)

    def _refuse_consumers(self, queue: MessageQueue, queues: Sequence[MessageQueue]) -> None:
        offsets = self._offsets.read(self.group, queues, self._timeout)
        # Read the mark last, because another task may be storing the mark and then the bookmarks.
        if offsets and not self.get(registers.mark(queue)):
            at, offset = next(iter(offsets.items()))
            raise OptionError(
                OptionCondition.CONFLICT,
                f"option sinkGroup: group {self.group!r} has the offsets of consumers of topic {self._topic!r} (queue {at} is at {offset}), "
                "which the sink's bookmarks would replace, so that the consumers would skip messages. Name a group that does not consume this "
                "topic, or drop the option",
            )

    def require_own(self, queue: MessageQueue) -> None:
        """Check the mark before a commit.

        Raises GroupError IN_USE if the group named by the user holds another sink's bookmarks.
        """
        if self._mark is None:
            return
        mark = self.get(registers.mark(queue))
        if not mark:
            self._store_mark(queue, self._mark)
        elif mark != self._mark:
            raise GroupError(
                GroupCondition.IN_USE,
                f"sinkGroup {self.group!r} has the bookmarks of another query (or txnAppId, or checkpoint) that writes to topic "
                f"{self._topic!r} (broker {queue.broker_name}). Stop that query, or set another sinkGroup for this one, and start it again",
            )

    def _store_mark(self, queue: MessageQueue, mark: int) -> None:
        """Store this sink's mark, and first clear the committed batches, because another sink may have stored them."""
        self._forget_batches(queue)
        self.move(registers.mark(queue), mark)

    def _own_bookmark(self, queue: MessageQueue) -> int | None:
        return self.get(queue) if self._mark is None or self._is_marked(queue) else None

    def _is_marked(self, queue: MessageQueue) -> bool:
        return self.get(registers.mark(queue)) == self._mark

    def _ends(self, queue: MessageQueue) -> dict[MessageQueue, int]:
        """Return the ends of all queues of the topic at the queue's broker, because each broker stores its queues' bookmarks."""
        # A broker that is read-only now may accept rows later.
        counts = {
            data.broker_name: max(data.read_queues, data.write_queues)
            for data in self._client.route(self._topic, Deadline.after(self._timeout)).queues
        }
        queues = [queue._replace(queue_id=number) for number in range(counts.get(queue.broker_name, 0))]
        queues = list(dict.fromkeys([*queues, queue]))
        requests = [(queue, message_requests.max_offset(queue)) for queue in queues]
        return dict(zip(queues, ask_queues(self._client, requests, Deadline.after(self._timeout))))

    def _has_group(self, queue: MessageQueue) -> bool:
        try:
            return self.group in self._ask(queue, admin_requests.groups())
        except RocketMQError as error:
            if not error.denied:
                raise
            # If the account may not list groups, assume that the group exists, so that the history is read.
            return True

    def _create_group(self, queue: MessageQueue) -> None:
        try:
            self._ask(queue, admin_requests.create_group(self.group))
        except RocketMQError as error:
            if not error.denied:
                raise
            # A pull also creates the group, if the broker permits that.
            with contextlib.suppress(GroupError):
                self._ask(queue, message_requests.pull(registers.queue_of(queue), self.group, 0, 1))

    def _ask(self, queue: MessageQueue, request: Request[T]) -> T:
        return self._client.call(request, Deadline.after(self._timeout), topic=queue.topic, broker_name=queue.broker_name)
