"""An in-memory broker, which may also be its client and log, and a clock that advances only when the client sleeps."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self

import pyarrow as pa

from orderedmq.conditions import UnavailableCondition
from orderedmq.errors import RocketMQUnavailableError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.codec.stored_message import parse_properties
from orderedmq.rocketmq.wire.codes import RequestCode
from orderedmq.rocketmq.wire.message_requests import PullResult, SendResult, SendStatus
from orderedmq.rocketmq.wire.request import Request
from tests.unit.rocketmq_sink_queue import Stored, pulled, split

SENDS: Final = (RequestCode.SEND_BATCH_MESSAGE, RequestCode.SEND_MESSAGE_V2)


class FakeTime:
    """A clock that advances only when the code sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return int(self.now * 1e9)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FakeBroker:
    """A broker that keeps the holder of each queue's lock, and the numbers that a group has stored."""

    def __init__(self) -> None:
        self.locks: dict[MessageQueue, str] = {}
        self.numbers: dict[int, int] = {}
        self.end = 1
        #: The next answers to a request for a queue's end, before ``end``.
        self.ends: Iterator[int] = iter(())
        #: The commit log's offset of the last message.
        self.position = 0

    def answer(self, request: Request[Any]) -> Any:
        if request.code in (RequestCode.LOCK_BATCH_MQ, RequestCode.UNLOCK_BATCH_MQ):
            asked = json.loads(bytes(request.body))
            client = asked["clientId"]
            keys = [MessageQueue(key["topic"], key["brokerName"], key["queueId"]) for key in asked["mqSet"]]
            if request.code == RequestCode.LOCK_BATCH_MQ:
                granted = [key for key in keys if self.locks.setdefault(key, client) == client]
                return frozenset(granted)
            for key in keys:
                if self.locks.get(key) == client:
                    del self.locks[key]
        if request.code == RequestCode.UPDATE_CONSUMER_OFFSET:
            self.numbers[int(request.ext["queueId"])] = int(request.ext["commitOffset"])
        if request.code == RequestCode.QUERY_CONSUMER_OFFSET:
            number = int(request.ext["queueId"])
            return self.numbers.get(number, 1 if number == 0 else 0)
        if request.code == RequestCode.GET_MAX_OFFSET:
            return next(self.ends, self.end)
        if request.code == RequestCode.SEND_BATCH_MESSAGE:
            begin, self.end = self.end, self.end + 2
            return SendResult(SendStatus.SEND_OK, 0, begin, self.position)
        return 0


@dataclass
class FakePending:
    """A sent request whose answer has already arrived."""

    answer: Any

    def result(self) -> Any:
        return self.answer


class MemoryCluster(FakeBroker):
    """A broker that stores messages. It is also its client, the client's only connection, and the log."""

    trace = account = None
    routed_by_proxy = closed = False

    def __init__(self) -> None:
        super().__init__()
        self.messages: defaultdict[MessageQueue, list[Stored]] = defaultdict(list)
        self.unsettled: set[MessageQueue] = set()

    def answer(self, request: Request[Any]) -> Any:
        fields = request.ext
        if request.code == RequestCode.GET_MAX_OFFSET:
            return len(self.messages[MessageQueue(fields["topic"], fields["bname"], int(fields["queueId"]))])
        if request.code in SENDS:
            self.position += 1
            return SendResult(SendStatus.SEND_OK, int(fields["e"]), self.store(request), self.position)
        return super().answer(request)

    def store(self, request: Request[Any]) -> int:
        """Store the messages of a request to send, and return the offset of the first one."""
        fields, body = request.ext, bytes(request.body)
        stored = self.messages[self.place(MessageQueue(fields["b"], fields["n"], int(fields["e"])))]
        begin = len(stored)
        stored += (
            split(body)
            if request.code == RequestCode.SEND_BATCH_MESSAGE
            else [Stored(body, parse_properties(fields["i"].encode()))]
        )
        return begin

    def place(self, queue: MessageQueue) -> MessageQueue:
        """The queue in which the broker stores what is sent to ``queue``."""
        return queue

    # -- the client and its connection

    def behind_proxy(self, deadline: float) -> bool:
        return False

    def address(self, topic: str, broker_name: str, deadline: float, **more: Any) -> str:
        return "h:1"

    def connection(self, address: str, deadline: float) -> Any:
        return self

    def call(self, request: Request[Any], deadline: float, **where: str) -> Any:
        return self.answer(request)

    def begin(self, request: Request[Any], deadline: float) -> Callable[[], Any]:
        return partial(self.answer, request)

    def send_all(self, asked: Sequence[tuple[Request[Any], None]], deadline: float) -> list[FakePending]:
        return [FakePending(self.answer(request)) for request, _ in asked]

    # -- the log

    def reading(self, how: object) -> Self:
        return self

    def pull_once(self, offsets: Mapping[MessageQueue, int], most: int) -> list[PullResult]:
        raise RocketMQUnavailableError(UnavailableCondition.UNREACHABLE, "not here")

    def pull(
        self, queue: MessageQueue, begin: int, count: int, most: int, columns: Sequence[str], *_: object
    ) -> pa.RecordBatch:
        return pulled(self.messages[queue], begin, begin + count, columns)
