"""Sends many requests to many brokers, all in flight at the same time (through a Proxy, as many as it is certain to answer)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from orderedmq.errors import RocketMQError, RocketMQUnavailableError, TopicError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.net.behind_proxy import answered_together
from orderedmq.rocketmq.net.client import Client, attempt_deadline
from orderedmq.rocketmq.net.connection import Connection, Pending
from orderedmq.rocketmq.net.deadline import Deadline
from orderedmq.rocketmq.wire import group_requests
from orderedmq.rocketmq.wire.message_requests import is_there
from orderedmq.rocketmq.wire.request import Request
from orderedmq.rocketmq.wire.route import Route, RouteState, state_of

T = TypeVar("T")


def existing(
    client: Client,
    queues: Sequence[MessageQueue],
    route: Callable[[str, bool], Route],
    groups: Iterable[str],
    deadline: float,
) -> list[MessageQueue]:
    """Return ``queues`` without duplicates and without those that are certain not to exist (`wire.route`).

    ``route(topic, fresh)`` returns a topic's route. A queue that a route lacks is dropped only if its broker then answers that it does
    not have it, or the account may read in none of ``groups``, so that the broker does not say. A queue of a broker that the nameserver
    does not know is kept, so that requests for it fail, and its messages do not count as lost.
    """

    def missed(asked: Collection[MessageQueue], fresh: bool) -> list[MessageQueue]:
        routes: dict[str, Route] = {}
        for topic in {queue.topic for queue in asked}:
            with contextlib.suppress(TopicError):
                routes[topic] = route(topic, fresh)
        return [queue for queue in asked if state_of(queue, routes.get(queue.topic)) is RouteState.UNKNOWN]

    distinct = list(dict.fromkeys(queues))
    unknown = missed(distinct, False)
    if not unknown:
        return distinct
    reporting = client.cluster(deadline).brokers
    # Request the routes again, so that they have queues and brokers that were reported since the first request.
    absent: set[MessageQueue] = set()
    for (_, name), of_broker in _by_topic_and_broker(missed(unknown, True)).items():
        master = reporting[name].master if name in reporting else None
        if master is None:
            continue
        try:
            absent.update(queue for queue in of_broker if not holds(client, master, queue, groups, deadline))
        except TopicError:
            absent.update(of_broker)
    return [queue for queue in distinct if queue not in absent]


def holds(client: Client, master: str, queue: MessageQueue, groups: Iterable[str], deadline: float) -> bool | None:
    """Ask a broker whether its topic has a queue. Return None if the account may read the topic in none of ``groups``.

    Raises TopicError MISSING if the broker does not have the topic, and the errors of `Client.call`.
    """
    for group in groups:
        try:
            return client.call_address(master, is_there(queue, group), deadline)
        except RocketMQError as error:
            if not error.denied:
                raise
    return None


def _by_topic_and_broker(queues: Iterable[MessageQueue]) -> dict[tuple[str, str], list[MessageQueue]]:
    together: dict[tuple[str, str], list[MessageQueue]] = {}
    for queue in queues:
        together.setdefault((queue.topic, queue.broker_name), []).append(queue)
    return together


def ask_queues(client: Client, requests: Sequence[tuple[MessageQueue, Request[T]]], deadline: float) -> list[T]:
    """Return the answers of the queues' masters, in order.

    Raises the errors of `Client.call`, perhaps after other requests have been executed.
    """
    most = answered_together(0) if client.routed_by_proxy else max(1, len(requests))
    answers: list[T] = []
    for begin in range(0, len(requests), most):
        together = range(begin, min(begin + most, len(requests)))
        by_connection: dict[Connection, list[int]] = {}
        for index in together:
            # Requests that fail here are sent again below, with retries.
            with contextlib.suppress(RocketMQUnavailableError):
                address = client.address(requests[index][0].topic, requests[index][0].broker_name, deadline)
                by_connection.setdefault(client.connection(address, deadline), []).append(index)
        sent: dict[int, Pending[T]] = {}
        for connection, indices in by_connection.items():
            pending = connection.send_all(
                [(requests[index][1], None) for index in indices], attempt_deadline(requests[indices[0]][1], deadline)
            )
            sent.update(zip(indices, pending))
        for index in together:
            # A request that fails here is sent again, because all requests are repeatable.
            with contextlib.suppress(RocketMQUnavailableError):
                if index in sent:
                    answers.append(sent[index].result())
                    continue
            queue, request = requests[index]
            answers.append(client.call(request, deadline, topic=queue.topic, broker_name=queue.broker_name))
    return answers


def lock_queues(client: Client, group: str, names: Mapping[MessageQueue, str], seconds: float) -> set[MessageQueue]:
    """Lock each queue under its client id in ``names``. Return the queues that were granted. Raises the errors of `Client.call`."""
    together = _by_broker_and_name(names)
    requests = [(queues[0], group_requests.lock(group, name, queues)) for name, queues in together]
    granted: set[MessageQueue] = set()
    for (_, queues), answer in zip(together, ask_queues(client, requests, Deadline.after(seconds))):
        granted.update(answer.intersection(queues))
    return granted


def unlock_queues(client: Client, group: str, names: Mapping[MessageQueue, str], seconds: float) -> None:
    """Unlock each queue under its client id. Locks at a broker that cannot be reached expire by themselves."""
    for name, queues in _by_broker_and_name(names):
        with contextlib.suppress(RocketMQUnavailableError):
            ask_queues(client, [(queues[0], group_requests.unlock(group, name, queues))], Deadline.after(seconds))


def _by_broker_and_name(names: Mapping[MessageQueue, str]) -> list[tuple[str, list[MessageQueue]]]:
    together: dict[tuple[str, str], list[MessageQueue]] = {}
    for queue, name in names.items():
        together.setdefault((queue.broker_name, name), []).append(queue)
    return [(name, queues) for (_, name), queues in together.items()]
