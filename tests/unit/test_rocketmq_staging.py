"""One attempt of a writing task over RocketMQ shares requests among the queues of a broker, and gives locks back to attempts that wait."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from orderedmq.broker import SinkBatch
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.sink import staging
from orderedmq.rocketmq.sink.broker_lock import LockTiming
from orderedmq.rocketmq.sink.staging import RocketMQStaging
from orderedmq.rocketmq.wire.codes import RequestCode
from orderedmq.rocketmq.wire.message_requests import PullResult, PullStatus
from orderedmq.rocketmq.wire.request import Request
from orderedmq.rocketmq.wire.route import BrokerData, QueueData, Route
from tests import stored_messages
from tests.unit.rocketmq_memory import FakePending
from tests.unit.rocketmq_sink_queue import SINK, rows_of
from tests.unit.test_rocketmq_bookmarks import Cluster
from tests.waits import until

#: The most messages that the broker returns to a pull.
MOST_PULLED = 32


class Broker(Cluster):
    """A broker with many queues, or several brokers with the same numbers. Thread-safe. It counts what its client writes to it."""

    names = SimpleNamespace(spelled_queue=lambda queue: queue)

    def __init__(self, count: int, names: Sequence[str] = ("a",)) -> None:
        super().__init__()
        share = count // len(names)
        self.queues = [MessageQueue("t", names[number // share], number) for number in range(count)]
        brokers = {name: BrokerData(name, "C", {0: "h:1"}) for name in names}
        self._route = Route("t", brokers, tuple(QueueData(name, count, count, 6) for name in names))
        self.writes: Counter[RequestCode] = Counter()
        #: By client id, the requests for locks that were not all granted.
        self.refusals: Counter[str] = Counter()
        self._lock = threading.Lock()

    def answer(self, request: Request[Any]) -> Any:
        with self._lock:
            answer = super().answer(request)
            if request.code == RequestCode.LOCK_BATCH_MQ:
                asked = json.loads(bytes(request.body))
                self.refusals[asked["clientId"]] += len(answer) < len(asked["mqSet"])
            return answer

    def call(self, request: Request[Any], deadline: float, **where: str) -> Any:
        self.writes[request.code] += 1
        return self.answer(request)

    def begin(self, request: Request[Any], deadline: float) -> Callable[[], Any]:
        answer = self.call(request, deadline)
        return lambda: answer

    def send_all(self, asked: Sequence[tuple[Request[Any], None]], deadline: float) -> list[FakePending]:
        self.writes[asked[0][0].code] += 1
        return [FakePending(self.answer(request)) for request, _ in asked]

    def route(self, topic: str, deadline: float = 0, *, fresh: bool = False) -> Route:
        return self._route

    def refuse_hidden_static(self, topic: str) -> None:
        """No topic is static."""

    def pull_once(self, offsets: Mapping[MessageQueue, int], most: int) -> list[PullResult]:
        self.writes[RequestCode.PULL_MESSAGE] += 1
        return [self._pulled(queue, offset) for queue, offset in offsets.items()]

    def _pulled(self, queue: MessageQueue, begin: int) -> PullResult:
        stored = self.messages[queue]
        end = min(begin + MOST_PULLED, len(stored))
        packed = [
            stored_messages.Stored(
                offset,
                stored[offset].body,
                "".join(f"{name}\x01{value}\x02" for name, value in stored[offset].properties.items()).encode(),
                queue.topic.encode(),
                queue.queue_id,
            ).pack()
            for offset in range(begin, end)
        ]
        status = PullStatus.FOUND if packed else PullStatus.NO_NEW_MESSAGE
        return PullResult(status, end, 0, len(stored), 0, b"".join(packed))

    def bodies(self, number: int) -> list[str]:
        return [message.body.decode() for message in self.messages[self.queues[number]]]

    def attempt(self, batch: int = 0, *, timing: LockTiming = LockTiming()) -> RocketMQStaging:  # type: ignore[override]  # noqa: B008
        client: Any = self
        attempt = RocketMQStaging(client, client, SinkBatch(SINK, batch, job="job", topic="t"), 0, timing)
        attempt.targets("t", self.queues)
        return attempt


def write(broker: Broker, batch: int, names: Sequence[str] = ("a1",)) -> None:
    attempt = broker.attempt(batch)
    for queue in broker.queues:
        attempt.add(queue, rows_of(list(names)))
    attempt.receipt()


def test_the_requests_of_a_task_do_not_grow_with_its_queues_of_a_broker_except_sends() -> None:
    writes = []
    for count in (5, 50):
        broker = Broker(count)
        for batch in range(3):
            broker.writes.clear()
            write(broker, batch)
        assert broker.writes.pop(RequestCode.SEND_BATCH_MESSAGE) == count
        writes.append(broker.writes)
        assert all(broker.bodies(number) == ["a1"] * 3 for number in range(count))
    assert writes[0] == writes[1]
    assert sum(writes[0].values()) < 20


@pytest.mark.holds("sink once")
@pytest.mark.parametrize("count", [3, 3 * MOST_PULLED])
def test_a_second_attempt_finds_the_rows_of_the_first_in_each_queue(count: int) -> None:
    names = [f"a{number}" for number in range(count)]
    broker = Broker(5)
    write(broker, 0, names)
    write(broker, 0, [*names, "a-last"])
    assert all(broker.bodies(number) == [*names, "a-last"] for number in range(5))


@pytest.mark.parametrize("threads", [1, 16])
def test_two_attempts_that_wait_for_each_other_s_brokers_both_end(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """With one thread, an attempt also holds a broker for which it has new rows while its thread waits for another broker."""
    monkeypatch.setattr(staging, "PARALLEL", threads)
    broker = Broker(20, ("a", "b"))
    halves = broker.queues[:10], broker.queues[10:]
    attempts = [broker.attempt(timing=LockTiming(lock_yield=0.5, lock_wait=20.0)) for _ in halves]

    def finish(attempt: RocketMQStaging, own: list[MessageQueue], other: list[MessageQueue]) -> None:
        for queue in other:
            attempt.add(queue, rows_of(["a1", "a2"]))
        attempt.start()
        until(lambda: broker.refusals[attempt._attempt.client_id] >= 2, "a thread waits for the other lock")
        for queue in own:
            attempt.add(queue, rows_of(["a2"]))
        attempt.receipt()

    for attempt, own in zip(attempts, halves):
        for queue in own:
            attempt.add(queue, rows_of(["a1"]))
        attempt._join()
    assert len(broker.locks) == 2
    with ThreadPoolExecutor() as pool:
        list(pool.map(finish, attempts, halves, halves[::-1]))
    assert not broker.locks
    assert all(broker.bodies(number) == ["a1", "a2"] for number in range(20))


@pytest.mark.holds("sink once")
def test_an_attempt_that_lost_its_locks_finds_what_another_one_has_sent_meanwhile() -> None:
    broker = Broker(5)
    late = broker.attempt()
    for queue in broker.queues:
        late.add(queue, rows_of(["a1"]))
    late.start()
    late._join()
    broker.locks.clear()
    for lock in late._locks.values():
        lock.lose()
    write(broker, 0, ["a1", "a2"])
    for queue in broker.queues:
        late.add(queue, rows_of(["a2", "a3"]))
    late.receipt()
    assert all(broker.bodies(number) == ["a1", "a2", "a3"] for number in range(5))
