"""The brokers of a sink's topic, with the records and gates that `agreement` uses."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from orderedmq.errors import RocketMQUnavailableError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.sink.agreement import BrokerState, States
from orderedmq.rocketmq.sink.batch_queues import Record
from orderedmq.rocketmq.sink.bookmarks import Bookmarks
from orderedmq.rocketmq.sink.broker_lock import Attempt, BrokerLock
from orderedmq.rocketmq.sink.broker_queue import RocketMQQueue
from orderedmq.rocketmq.wire.route import Route

#: Seconds to wait for a broker before it counts as away. This is less than the time for which a gate is trusted.
TIMEOUT: Final = 5.0


class RocketMQTopicBrokers:
    """The `TopicBrokers` of one topic. Used by one thread at a time."""

    def __init__(self, attempt: Attempt, topic: str) -> None:
        """``attempt`` has a writer."""
        assert attempt.writer is not None
        self._attempt = attempt
        self._topic = topic
        self._bookmarks = Bookmarks(attempt.client, attempt.writer.sink, topic, attempt.writer.group, timeout=TIMEOUT)

    def route(self) -> Route:
        return self._attempt.log.route(self._topic)

    def read(self, names: Sequence[str]) -> States:
        queues = [self._queue(name) for name in names]
        with contextlib.suppress(RocketMQUnavailableError):
            return dict(zip(names, self._bookmarks.states(queues)))
        return {name: self._state(queue) for name, queue in zip(names, queues)}

    def _state(self, queue: MessageQueue) -> BrokerState | RocketMQUnavailableError:
        try:
            return self._bookmarks.states([queue])[0]
        except RocketMQUnavailableError as error:
            return error

    @contextlib.contextmanager
    def gates(self, names: Sequence[str], unless: Callable[[], bool]) -> Iterator[Callable[[], bool] | None]:
        with contextlib.ExitStack() as gates:
            checks: list[Callable[[], bool]] = []
            for name in names:
                is_locked = gates.enter_context(BrokerLock(self._attempt, self._queue(name)).gate(unless))
                if is_locked is None:
                    yield None
                    return
                checks.append(is_locked)
            yield lambda: all(is_locked() for is_locked in checks)

    def enter(self, name: str) -> None:
        RocketMQQueue(self._attempt, self._queue(name)).enter()

    def write(self, name: str, record: Record) -> None:
        self._bookmarks.write_record(self._queue(name), record)

    def wait(self, seconds: float) -> None:
        self._attempt.wait(seconds, self._queue(""))

    def now(self) -> float:
        return time.monotonic()

    def _queue(self, name: str) -> MessageQueue:
        """Return a queue that identifies the broker."""
        return MessageQueue(self._topic, name, 0)
