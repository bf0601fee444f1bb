"""How the log handles messages that a broker leaves out. These tests start no server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pyarrow as pa
import pytest

import orderedmq
from orderedmq.broker import QueueBounds
from orderedmq.errors import DataLossError, aged_out
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.messages import fetch
from orderedmq.rocketmq.messages import log as module
from orderedmq.rocketmq.messages.log import RocketMQLog
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.wire.codes import RequestCode
from orderedmq.rocketmq.wire.namespaces import NO_NAMESPACES
from tests.unit.rocketmq_peer import Cluster, Link

QUEUE = MessageQueue("orders", "broker-a", 3)
ROWS = pa.record_batch({"queue_offset": [7]})


class Broker:
    """A client and a puller. The first ``left_out`` pulls at offset 7 find only messages from 9 on. ``least``: the queue's first offset."""

    names = NO_NAMESPACES

    def __init__(self, left_out: int, least: int) -> None:
        self.left_out, self.least = left_out, least
        self.pulls = 0

    def call(self, request: Any, deadline: float, *, topic: str, broker_name: str) -> int:
        return self.least

    def knows(self, queue: MessageQueue) -> bool:
        return True

    def pull(self, *_: object) -> pa.RecordBatch:
        self.pulls += 1
        if self.pulls <= self.left_out:
            raise aged_out(QUEUE, 7, 9)
        return ROWS

    def read(self) -> pa.RecordBatch:
        log = RocketMQLog(cast(Client, self))
        log._puller = cast(Any, self)
        return log.pull(QUEUE, 7, 10, 1000, ("queue_offset",))


def test_messages_that_a_broker_leaves_out_and_still_has_are_pulled_again() -> None:
    """A broker that has just started skips messages that it cannot read yet."""
    assert Broker(left_out=2, least=0).read() == ROWS


def test_messages_before_a_queues_beginning_are_gone_at_once() -> None:
    broker = Broker(left_out=2, least=9)
    with pytest.raises(DataLossError, match="AGED_OUT"):
        broker.read()
    assert broker.pulls == 1


def test_a_permanent_hole_is_a_loss_of_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HOLE_PATIENCE", 1.0)
    broker = Broker(left_out=1 << 30, least=0)
    with pytest.raises(DataLossError, match="AGED_OUT"):
        broker.read()
    assert broker.pulls > 1


# -- a queue whose messages have all expired


EXPIRED = MessageQueue("T", "a", 0)


@pytest.fixture(params=[(20, "MESSAGE_WAS_REMOVING"), (19, "OFFSET_FOUND_NULL")], ids=["commit log", "consume queue"])
def expired(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A broker with the queue `EXPIRED`, which has the bounds 0 and 10, and whose messages were all deleted.

    RocketMQ 4.9 does not correct the minimum of such a queue until it gets a new message. The answer to a pull depends on the file that
    was deleted.
    """
    code, remark = request.param
    monkeypatch.setattr(fetch, "HOLE_PATIENCE", 0.2)
    monkeypatch.setattr(module, "HOLE_PATIENCE", 0.2)

    def script(link: Link) -> None:
        for asked in link.requests():
            bounds: dict[str, Any] = {"minOffset": "0", "maxOffset": "10", "nextBeginOffset": "10"}
            if asked.code == RequestCode.PULL_MESSAGE and asked.ext["queueOffset"] == "10":
                link.reply(asked, 19, remark="OFFSET_OVERFLOW_ONE", **bounds)
            elif asked.code == RequestCode.PULL_MESSAGE:
                link.reply(asked, code, remark=remark, **bounds)
            else:
                link.offset(asked, 10 if asked.code == RequestCode.GET_MAX_OFFSET else 0)

    with Cluster() as cluster:
        cluster.scripted("a", script)
        with orderedmq.connect(namesrv_addr=cluster.nameserver().address) as broker:
            yield broker


def test_expired_messages_are_a_loss_of_data(expired: Any) -> None:
    with pytest.raises(DataLossError, match=r"AGED_OUT.* messages 0 to 9 \(10\)"):
        expired.log.pull(EXPIRED, 0, 5, 1000, ("body",))
    assert expired.log.offset_at(EXPIRED, 0) == 10


def test_a_queue_whose_messages_expired_can_be_described(expired: Any) -> None:
    (description,) = expired.admin.describe_topic("T")
    assert (description.bounds, description.first_timestamp, description.last_timestamp) == (QueueBounds(0, 10), None, None)
    assert not expired.log.is_another("T", "a/0/9@80")
