"""An in-memory broker for one client, and a clock that advances only when the client sleeps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from orderedmq.model import MessageQueue
from orderedmq.rocketmq.wire.codes import RequestCode
from orderedmq.rocketmq.wire.message_requests import SendResult, SendStatus
from orderedmq.rocketmq.wire.request import Request


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
