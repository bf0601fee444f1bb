"""A topic and a group that belong to one test, for tests of messages, groups and locks."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Self

import pytest

from orderedmq.endpoint import Endpoint
from orderedmq.errors import OrderedMQError
from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import ClientIdentity, LockToken, Refusal
from orderedmq.ownership.membership import Subscription
from orderedmq.rocketmq.broker import RocketMQBroker
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.rocketmq.messages.log import RocketMQLog
from tests.contract.support import ids, locked, rows


class World:
    """A cluster, a new topic, and a group that the brokers do not know yet."""

    def __init__(self, cluster: Cluster, queues: int = 4, address: str | None = None) -> None:
        """``address``: the address of a nameserver's proxy, if connections are to go through proxies."""
        self.cluster = cluster
        self._address = address or cluster.address
        self.topic = f"t-{uuid.uuid4().hex[:8]}"
        self.group = f"g-{self.topic}"
        self._connections: list[RocketMQBroker] = []
        self.broker = self.connect()
        self.broker.admin.create_topic(self.topic, queues)
        self.log: RocketMQLog = self.broker.log
        self.queues = self.log.queues(self.topic)
        self.queue = self.queues[0]

    def connect(self, trust: float = 30.0) -> RocketMQBroker:
        broker = RocketMQBroker(Endpoint(None, self._address))
        broker.groups.trust = trust
        self._connections.append(broker)
        return broker

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for broker in self._connections:
            broker.close()

    def send(self, queue: MessageQueue, count: int) -> None:
        self.log.append({queue: rows(range(count))})

    def lock(
        self, broker: RocketMQBroker, client: ClientIdentity, queues: Sequence[MessageQueue] | None = None
    ) -> list[LockToken]:
        return locked(broker, self.group, client, self.queues if queues is None else queues)

    def shared(self) -> Subscription:
        return Subscription("shared", self.topic, "AVG")

    def ids(self, broker: RocketMQBroker) -> list[str]:
        return ids(broker, self.group)


def error_of(call: Callable[[], object]) -> OrderedMQError:
    with pytest.raises(OrderedMQError) as caught:
        call()
    return caught.value


def condition(call: Callable[[], object]) -> str:
    return error_of(call).condition.removeprefix("ORDEREDMQ_")


def refused(answers: dict[MessageQueue, LockToken | Refusal]) -> list[Refusal]:
    return [answer for answer in answers.values() if isinstance(answer, Refusal)]


def granted(answers: dict[MessageQueue, LockToken | Refusal]) -> list[LockToken]:
    assert not refused(answers), answers
    return [answer for answer in answers.values() if isinstance(answer, LockToken)]
