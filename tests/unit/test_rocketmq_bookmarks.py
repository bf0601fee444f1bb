"""How a sink finds its messages again after its broker was killed and has forgotten the sink's newest numbers.

The broker is in memory, and has two queues. Attempts and bookmarks are real.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from orderedmq.broker import SinkBatch
from orderedmq.errors import GroupError, LockError, OptionError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.sink import broker_lock
from orderedmq.rocketmq.sink.bookmarks import Bookmarks
from orderedmq.rocketmq.sink.broker_lock import BrokerLock, LockTiming
from orderedmq.rocketmq.sink.broker_queue import RocketMQQueue
from orderedmq.rocketmq.sink.commit_report import QueueReport, Token, Verdict, judge
from orderedmq.rocketmq.sink.message_stamp import Writer, bookmark_group
from orderedmq.rocketmq.sink.queue_writer import QueueWriter
from orderedmq.rocketmq.wire import registers
from orderedmq.rocketmq.wire.codes import RequestCode
from orderedmq.rocketmq.wire.frame import RemotingCommand
from orderedmq.rocketmq.wire.request import Request
from orderedmq.rocketmq.wire.route import BrokerData, QueueData, Route
from tests.unit.rocketmq_memory import FakePending, FakeTime, MemoryCluster
from tests.unit.rocketmq_sink_queue import SINK, Stored, rows_of

QUEUES = [MessageQueue("t", "a", number) for number in range(2)]
FIRST, SECOND, THIRD = "0000000a", "0000000b", "0000000c"


time = FakeTime()


@pytest.fixture(autouse=True)
def _time(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("sink.broker_lock", "append.broker_port", "net.deadline"):
        monkeypatch.setattr(f"orderedmq.rocketmq.{module}.time", time)
    monkeypatch.setattr(broker_lock.Attempt, "wait", lambda *_: time.sleep(_[1]))


class Cluster(MemoryCluster):
    """A broker with two queues and some groups."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: set[str] = set()
        self.entering = threading.Lock()
        #: How often settings of a group were written.
        self.settings = 0

    def kill(self) -> None:
        """Forget what a broker writes to disk only every 5 s, and the locks. Groups and messages stay."""
        self.numbers.clear()
        self.locks.clear()

    def answer(self, request: Request[Any]) -> Any:
        if request.code == RequestCode.QUERY_CONSUMER_OFFSET:
            offset = self.numbers.get(int(request.ext["queueId"]))
            return request.parse(
                RemotingCommand(22) if offset is None else RemotingCommand(0, ext={"offset": str(offset)}, version=413)
            )
        if request.code == RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP:
            self.groups.add(json.loads(bytes(request.body))["groupName"])
            self.settings += 1
        if request.code == RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG:
            return frozenset(self.groups)
        return super().answer(request)

    def route(self, topic: str, deadline: float, *, fresh: bool = False) -> Route:
        return Route(topic, {"a": BrokerData("a", "C", {0: "h:1"})}, (QueueData("a", len(QUEUES), len(QUEUES), 6),))

    # -- the sink

    def attempt(self, writer: Writer) -> Attempt:
        return Attempt(self, writer)

    def bodies(self, number: int) -> list[str]:
        return [message.body.decode() for message in self.messages[QUEUES[number]]]


class Attempt:
    """An attempt of a task of the sink."""

    def __init__(self, cluster: Cluster, writer: Writer) -> None:
        self.writer = writer
        shared: Any = cluster
        name = f"{writer.run}-{writer.batch}-{writer.partition}"
        self._attempt = broker_lock.Attempt(shared, shared, writer, LockTiming(), name)
        self._lock = BrokerLock(self._attempt, QUEUES[0])
        self._open: dict[int, tuple[QueueWriter, RocketMQQueue]] = {}

    def port(self, number: int = 0) -> RocketMQQueue:
        return self._opened(number)[1]

    def write(self, names: list[str], number: int = 0, first: int = 0) -> None:
        self._opened(number)[0].write(rows_of(names), first)

    def end(self) -> Token:
        """Give the queues back and return the report."""
        reports = list[QueueReport]()
        for writer, _ in self._open.values():
            reports.append(writer.report())
        RocketMQQueue.release_all({port: writer.end for writer, port in self._open.values()})
        return Token(SINK, self.writer.batch, self.writer.partition, tuple(reports), self.writer.run)

    def _opened(self, number: int) -> tuple[QueueWriter, RocketMQQueue]:
        if number not in self._open:
            port = RocketMQQueue(self._attempt, QUEUES[number], self._lock)
            self._open[number] = QueueWriter(port, self.writer, self.writer.partition), port
        return self._open[number]


@pytest.mark.holds("sink once")
@pytest.mark.parametrize("named", ["billing-out", None])
@pytest.mark.parametrize("filled_first", [True, False])
def test_messages_of_a_sink_are_found_after_a_broker_forgot_its_bookmarks(named: str | None, filled_first: bool) -> None:
    """The broker is killed in the sink's first seconds. Without ``named``, the sink's group is deleted as well."""
    cluster = Cluster()
    cluster.messages[QUEUES[1]] = [Stored(b"old", {})]
    cluster.attempt(Writer(SINK, 0, 0, FIRST, named)).write(["a1", "a2"], 1)
    cluster.kill()
    if named is None:
        cluster.groups.clear()
    one, other = (cluster.attempt(Writer(SINK, 0, partition, SECOND, named)) for partition in (0, 1))
    for number in (1, 0) if filled_first else (0, 1):
        one.write([["b1"], ["a1", "a2", "a3"]][number], number)
    other.write(["c1"], 1)
    tokens = [one.end(), other.end()]
    assert [cluster.bodies(number) for number in (0, 1)] == [["b1"], ["old", "a1", "a2", "a3", "c1"]]
    bookmarks = {queue: cluster.numbers[queue.queue_id] for queue in QUEUES}
    verdict = judge(SinkBatch(SINK, 0, None, named, "", "t"), tokens, bookmarks, [])
    assert verdict == Verdict(False, {QUEUES[0]: 1, QUEUES[1]: 2}, newest=0)


@pytest.mark.holds("newer format")
@pytest.mark.parametrize("named", ["billing-out", None])
def test_the_numbers_of_a_sink_of_a_newer_version_are_refused(named: str | None) -> None:
    cluster: Any = Cluster()
    cluster.numbers[registers.mark(QUEUES[0]).queue_id] = 1 << 62 | 7
    bookmarks = Bookmarks(cluster, SINK, "t", named)
    with pytest.raises(GroupError) as caught:
        bookmarks.states(QUEUES[:1])
    assert caught.value.condition == "ORDEREDMQ_GROUP.NEWER_FORMAT"
    assert repr(bookmarks.group) in caught.value.message


def test_a_sink_without_messages_begins_at_the_ends_of_all_queues() -> None:
    """Otherwise its tasks would read the history of each queue."""
    cluster = Cluster()
    cluster.messages[QUEUES[0]], cluster.messages[QUEUES[1]] = ([Stored(b"old", {})] * count for count in (3, 5))
    cluster.attempt(Writer(SINK, 0, 0, FIRST)).write(["a1"])
    assert cluster.groups == {bookmark_group(SINK, "t")}
    assert [cluster.numbers[number] for number in (0, 1)] == [3, 5]


def test_a_sink_asks_once_for_the_ends_of_a_broker_s_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the first batch to a broker of n queues would send n * n requests."""
    cluster = Cluster()
    real, asked = Cluster.answer, []

    def answer(self: Cluster, request: Request[Any]) -> Any:
        asked.append(request.code)
        return real(self, request)

    monkeypatch.setattr(Cluster, "answer", answer)
    attempt = cluster.attempt(Writer(SINK, 0, 0, FIRST))
    for number in range(2):
        attempt.port(number).enter()
    assert asked.count(RequestCode.GET_MAX_OFFSET) == 2


@pytest.mark.parametrize("offset", [0, 3])
def test_a_group_whose_consumers_read_the_topic_is_refused(offset: int) -> None:
    cluster = Cluster()
    cluster.messages[QUEUES[0]], cluster.messages[QUEUES[1]] = ([Stored(b"old", {})] * 5 for _ in range(2))
    cluster.groups = {"billing"}
    cluster.numbers[1] = offset
    for _ in range(2):
        with pytest.raises(
            OptionError, match=f"'billing' has the offsets of consumers of topic 't' .queue t/a/1 is at {offset}"
        ) as caught:
            cluster.attempt(Writer(SINK, 0, 0, FIRST, "billing")).write(["a1"])
        assert caught.value.condition == "ORDEREDMQ_OPTION.CONFLICT"
    assert (cluster.numbers, len(cluster.messages[QUEUES[0]]), cluster.settings) == ({1: offset}, 5, 0)


def test_a_sink_uses_the_group_of_another_sink_without_changing_its_settings() -> None:
    cluster = Cluster()
    cluster.groups = {"out"}
    cluster.numbers[registers.fence(QUEUES[0]).queue_id] = 7
    for sink in ("former", SINK):
        cluster.attempt(Writer(sink, 0, 0, FIRST, "out")).write(["a1"])
    assert cluster.bodies(0) == ["a1", "a1"]
    assert cluster.settings == 0
    assert Bookmarks(cluster, SINK, "t", "out").get_own(QUEUES[:1]) == [1]  # type: ignore[arg-type]


@pytest.mark.holds("sink once")
def test_the_end_of_a_queue_is_not_older_than_the_entry_that_names_the_writer() -> None:
    """A broker answers requests for offsets and for ends in different threads, so in any order."""
    cluster = Cluster()
    cluster.messages[QUEUES[0]] = [Stored(b"old", {})]
    old, sibling, new = (
        cluster.attempt(Writer(SINK, 0, partition, run)) for run, partition in ((FIRST, 1), (SECOND, 0), (SECOND, 1))
    )
    old.write(["a1"])
    send_all = cluster.send_all

    def ends_first(asked: Sequence[tuple[Request[Any], None]], deadline: float) -> list[FakePending]:
        cluster.send_all = send_all  # type: ignore[method-assign]
        is_end = [request.code == RequestCode.GET_MAX_OFFSET for request, _ in asked]
        ends = {at: FakePending(cluster.answer(asked[at][0])) for at in range(len(asked)) if is_end[at]}
        old.write(["a2"], first=1)
        old.end()
        sibling.port().acquire()
        return [ends.get(at) or FakePending(cluster.answer(request)) for at, (request, _) in enumerate(asked)]

    cluster.send_all = ends_first  # type: ignore[method-assign]
    new.write(["a1", "a2", "a3"])
    assert cluster.bodies(0) == ["old", "a1", "a2", "a3"]


@pytest.mark.holds("sink once")
@pytest.mark.parametrize("paused", [False, True])
def test_a_late_attempt_of_a_committed_batch_leaves_the_entry_of_the_next_batch(paused: bool) -> None:
    """Otherwise a third run would not wait for the second one, and rows would be sent twice. ``paused``: after it has read the entry."""
    cluster = Cluster()
    late, second, third = (cluster.attempt(Writer(SINK, *one)) for one in ((7, 0, FIRST), (8, 0, SECOND), (8, 0, THIRD)))
    answer = cluster.answer

    def begin_next_batch() -> None:
        cluster.answer = answer  # type: ignore[method-assign]
        cluster.numbers[registers.committed(QUEUES[0]).queue_id] = 8
        second.write(["a1"])

    def paused_at_the_gate(request: Request[Any]) -> Any:
        if request.code == RequestCode.LOCK_BATCH_MQ and b"gate" in bytes(request.body):
            begin_next_batch()
        return answer(request)

    if paused:
        cluster.answer = paused_at_the_gate  # type: ignore[method-assign]
    else:
        begin_next_batch()
    late.write(["z"])
    with pytest.raises(LockError, match="HELD_BY_OTHER"):
        third.write(["a1", "a2"])
    assert cluster.bodies(0) == ["a1"]


@pytest.mark.holds("out of order")
def test_a_batch_whose_commit_was_interrupted_is_not_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster: Any = Cluster()
    bookmarks, [queue, _] = Bookmarks(cluster, SINK, "t"), QUEUES
    bookmarks.commit(queue, 5, bookmarks.committed(queue, 5))
    moved, move = list[MessageQueue](), Bookmarks.move

    def move_once(self: Bookmarks, place: MessageQueue, number: int) -> None:
        if moved:
            raise TimeoutError
        moved.append(place)
        move(self, place, number)

    monkeypatch.setattr(Bookmarks, "move", move_once)
    with pytest.raises(TimeoutError):
        bookmarks.commit(queue, 6, bookmarks.committed(queue, 6))
    monkeypatch.setattr(Bookmarks, "move", move)
    assert [bookmarks.committed(queue, batch).has(batch) for batch in (5, 6)] == [True, False]
    bookmarks.commit(queue, 6, bookmarks.committed(queue, 6))
    assert [bookmarks.committed(queue, batch).has(batch) for batch in (5, 6)] == [True, True]
