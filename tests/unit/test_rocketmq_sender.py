"""Appends to several queues over RocketMQ, which are sent separately: an error says which rows are already stored."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

from orderedmq.conditions import RocketMQCondition, UnavailableCondition
from orderedmq.errors import MessageError, OrderedMQError, RocketMQError, RocketMQUnavailableError
from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.rocketmq.append.broker_port import BrokerPort
from orderedmq.rocketmq.codec import encode
from orderedmq.rocketmq.codec.encode import SendBody
from orderedmq.rocketmq.messages.log import RocketMQLog
from orderedmq.rocketmq.net.client import Client
from tests.contract.support import rows

QUEUES = [MessageQueue("t", "a", number) for number in range(3)]


class Sends:
    """Records the stored requests; one request fails with an error."""

    def __init__(self, fails_at: int, error: OrderedMQError) -> None:
        self.stored: list[tuple[int, int]] = []
        self._fails_at = fails_at
        self._error = error

    def send(self, port: BrokerPort, body: SendBody) -> int:
        queue = port.queue
        if len(self.stored) == self._fails_at:
            raise self._error
        self.stored.append((queue.queue_id, body.rows))
        return sum(count for queue_id, count in self.stored[:-1] if queue_id == queue.queue_id)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A log whose topic exists, and whose requests have at most three rows."""
    monkeypatch.setattr(encode, "MOST_ROWS", 3)
    for name in ("require", "refuse_hidden_static", "forget"):
        monkeypatch.setattr(RocketMQLog, name, lambda self, given: None)
    monkeypatch.setattr(Client, "behind_proxy", lambda self, deadline: False)
    monkeypatch.setattr(BrokerPort, "end", lambda self: 0)
    monkeypatch.setattr(BrokerPort, "await_readable", lambda self, end: None)
    # The sender gives up at the first error.
    monkeypatch.setattr(BrokerPort, "pause", lambda self, error, failures: raised(error))
    with Client("127.0.0.1:1") as client:
        yield RocketMQLog(client)


def raised(error: OrderedMQError) -> None:
    raise error


def spoiled(monkeypatch: pytest.MonkeyPatch, fails_at: int, error: OrderedMQError) -> Sends:
    sends = Sends(fails_at, error)

    def send(self: BrokerPort, body: SendBody) -> Callable[[], int]:
        return partial(sends.send, self, body)

    monkeypatch.setattr(BrokerPort, "send", send)
    return sends


ILLEGAL = RocketMQError(RocketMQCondition.MESSAGE_ILLEGAL, "no")
GIVEN: dict[MessageQueue, pa.RecordBatch] = dict(zip(QUEUES, [rows("abcd"), rows("efgh"), rows("ij")]))


@pytest.mark.holds("all queues or none")
@pytest.mark.parametrize(
    ("fails_at", "error", "says"),
    [
        (1, ILLEGAL, "no. 3 of 10 rows are stored (3 of 4 of queue t/a/0). Send only"),
        (3, ILLEGAL, "no. 7 of 10 rows are stored (4 of 4 of queue t/a/0, 3 of 4 of queue t/a/1). Send only"),
        (
            4,
            RocketMQUnavailableError(UnavailableCondition.TIMEOUT, "no"),
            "4 of 4 of queue t/a/1), and perhaps the next ones. Send only",
        ),
    ],
)
def test_an_error_says_how_many_rows_of_which_queues_are_stored(
    fails_at: int, error: OrderedMQError, says: str, log: RocketMQLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    sends = spoiled(monkeypatch, fails_at, error)
    with pytest.raises(type(error)) as caught:
        log.append(GIVEN)
    assert (caught.value.condition, says in caught.value.message) == (error.condition, True), caught.value.message
    assert len(sends.stored) == fails_at


def test_an_error_before_any_row_is_stored_says_nothing_of_rows(log: RocketMQLog, monkeypatch: pytest.MonkeyPatch) -> None:
    spoiled(monkeypatch, 0, ILLEGAL)
    with pytest.raises(RocketMQError) as caught:
        log.append(GIVEN)
    assert caught.value.message == "no"


def test_a_row_of_the_last_queue_that_cannot_be_sent_refuses_all(log: RocketMQLog, monkeypatch: pytest.MonkeyPatch) -> None:
    sends = spoiled(monkeypatch, 99, ILLEGAL)
    with pytest.raises(MessageError, match="BAD_PROPERTY"):
        log.append({**GIVEN, QUEUES[2]: rows("i", properties=[[("a", "\x01")]])})
    assert sends.stored == []
    assert log.append(GIVEN) == {queue: OffsetRange(0, some.num_rows) for queue, some in GIVEN.items()}
