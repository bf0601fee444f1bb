"""Many questions to many brokers, all on their way at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from orderedmq.errors import RocketMQUnavailableError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.client import Client
from orderedmq.rocketmq.connection import Pending
from orderedmq.rocketmq.request import Request

T = TypeVar("T")


def ask_queues(client: Client, asked: Sequence[tuple[MessageQueue, Request[T]]], deadline: float) -> list[T]:
    """Answers of the masters of queues, in order. Raises what `Client.call` raises; others may be done by then."""

    def again(place: int) -> T:
        queue, request = asked[place]
        return client.call(request, deadline, topic=queue.topic, broker_name=queue.broker_name)

    def where(place: int) -> str:
        queue, _ = asked[place]
        return client.address(queue.topic, queue.broker_name, deadline)

    return _ask(client, [request for _, request in asked], where, again, deadline)


def ask_servers(client: Client, asked: Sequence[tuple[str, Request[T]]], deadline: float) -> list[T]:
    """As `ask_queues`, by address."""
    return _ask(
        client,
        [request for _, request in asked],
        lambda place: asked[place][0],
        lambda place: client.call_address(*asked[place], deadline),
        deadline,
    )


def _ask(
    client: Client,
    requests: Sequence[Request[T]],
    where: Callable[[int], str],
    again: Callable[[int], T],
    deadline: float,
) -> list[T]:
    sent: list[Pending[T] | None] = []
    for place, request in enumerate(requests):
        try:
            sent.append(client.connection(where(place), deadline).send(request, deadline))
        except RocketMQUnavailableError:
            sent.append(None)
    answers: list[T] = []
    for place, pending in enumerate(sent):
        try:
            if pending is not None:
                answers.append(pending.result())
                continue
        except RocketMQUnavailableError:
            # All that is asked here may be done twice.
            pass
        answers.append(again(place))
    return answers
