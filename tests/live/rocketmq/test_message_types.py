"""Topics for messages of one type. Brokers store any message in them, but RocketMQ's Proxy accepts only messages of their type."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import orderedmq
from orderedmq.broker import Broker, Published, SinkBatch
from orderedmq.cli import app
from orderedmq.conditions import RocketMQCondition
from orderedmq.errors import OptionError, RocketMQError
from orderedmq.model import MessageQueue
from orderedmq.pulls import pulls
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.wire import admin_requests, message_requests
from orderedmq.rocketmq.wire.request import Request
from tests.contract.support import rows
from tests.jars import jars_required
from tests.live.rocketmq.rocketmq_proxy import ProxyServer, bodies
from tests.waits import soon, until

#: Messages with two alternating keys. If a request's key were given to all its messages, half of them would have the wrong key.
BODIES = [b"%d" % number for number in range(40)]
KEYS = ["a", "b"] * 20


def make(broker: Broker, topic: str, message_type: str, queues: int = 2) -> MessageQueue:
    broker.admin.create_topic(topic, queues, message_type=message_type)
    return broker.log.queues(topic)[0]


def messages(broker: Broker, queue: MessageQueue) -> list[tuple[bytes, Any]]:
    end = broker.log.bounds([queue])[queue].max_offset
    batches = pulls(broker.log, queue, 0, end, 1000, 1 << 24, ("body", "sharding_key"))
    return [pair for batch in batches for pair in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist())]


def write(broker: Broker, queue: MessageQueue, given: pa.RecordBatch, job: str = "", batch: int = 0) -> Published:
    one = SinkBatch("a sink", batch, job=job, topic=queue.topic)
    staging = broker.outbox.open(one, 0)
    try:
        staging.add(queue, given)
        receipt = staging.receipt()
    except BaseException:
        staging.abandon()
        raise
    return broker.outbox.publish(one, [receipt])


def produce(broker: Broker, queue: MessageQueue, given: pa.RecordBatch) -> None:
    orderedmq.Producer(broker.log, queue.topic).send(given)


def in_fifo(topic: str, direct: Broker, other: Broker) -> None:
    """Write to a new FIFO topic twice through ``other``, and read the topic."""
    queue = make(direct, topic, "FIFO", 1)
    given = rows(BODIES, sharding_key=KEYS)
    wanted = list(zip(BODIES, KEYS))
    assert not write(other, queue, given, "first").replayed
    assert messages(direct, queue) == wanted
    # Another run sends only the missing rows, and a run after the commit sends none.
    assert write(other, queue, given, "second").replayed
    assert messages(direct, queue) == wanted
    staging = other.outbox.open(SinkBatch("a sink", 1, job="killed", topic=topic), 0)
    staging.add(queue, given.slice(0, 15))
    staging.receipt()
    assert not write(other, queue, given, "restarted", 1).replayed
    assert sorted(messages(direct, queue)[40:]) == sorted(wanted)
    produce(other, queue, given.slice(0, 3))
    assert messages(other, queue)[80:] == wanted[:3]


@pytest.mark.parametrize("how", ["direct", "through"])
def test_a_topic_of_type_fifo_has_each_row_once_in_order_with_its_own_key(
    how: str, direct: Broker, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    other: Broker = request.getfixturevalue(how)
    asked: list[str] = []
    ask = message_requests.refused_type

    def counted(queue: MessageQueue) -> Request[str | None]:
        asked.append(queue.topic)
        return ask(queue)

    monkeypatch.setattr(message_requests, "refused_type", counted)
    in_fifo(f"fifo-{how}", direct, other)
    assert asked == ([] if how == "direct" else ["fifo-through"]), (
        "the type is requested once per topic, and only through a Proxy"
    )


@pytest.mark.parametrize("what", [write, produce])
def test_a_row_without_a_key_is_refused_by_name_before_any_other_is_stored(
    what: Callable[[Broker, MessageQueue, pa.RecordBatch], object], direct: Broker, through: Broker
) -> None:
    queue = make(direct, f"fifo-keyless-{what.__name__}", "FIFO", 1)
    for key in (None, ""):
        with pytest.raises(RocketMQError) as error:
            what(through, queue, rows([b"a", b"b"], sharding_key=["k", key]))
        assert error.value.sub == RocketMQCondition.NOT_SUPPORTED
        assert f"topic '{queue.topic}' " in error.value.message
        assert "row 1 " in error.value.message
    with pytest.raises(RocketMQError, match="NOT_SUPPORTED.*row 0 "):
        what(through, queue, rows([b"a"]))
    assert messages(direct, queue) == []
    what(direct, queue, rows([b"a"]))
    assert messages(direct, queue) == [(b"a", None)], "a broker accepts rows without a key"


@pytest.mark.parametrize("kind", ["DELAY", "TRANSACTION"])
def test_a_topic_of_another_type_is_refused_by_name(kind: str, direct: Broker, through: Broker) -> None:
    queue = make(direct, f"typed-{kind}", kind)
    given = rows([b"a", b"b"], sharding_key=["k", "k"])
    for refused in (write, produce):
        with pytest.raises(RocketMQError) as error:
            refused(through, queue, given)
        assert error.value.sub == RocketMQCondition.NOT_SUPPORTED
        assert f"topic '{queue.topic}' " in error.value.message
    assert all(not texts for texts in bodies(direct, queue.topic).values())
    write(direct, queue, given)
    assert [texts for texts in bodies(direct, queue.topic).values() if texts] == [["a", "b"]]


def test_a_topic_whose_type_was_changed_is_written_again_after_one_refusal(
    newest: Cluster, direct: Broker, through: Broker
) -> None:
    queue = make(direct, "becomes-fifo", "NORMAL", 2)
    given = rows([b"a"], sharding_key=["k"])
    write(through, queue, given, batch=0)
    with Client(newest.address) as client:
        request = admin_requests.create_topic(queue.topic, 1, message_type="FIFO")
        client.call(request, soon(), topic=queue.topic, broker_name=queue.broker_name)
        other = direct.log.queues(queue.topic)[1]
        client.call(request, soon(), topic=other.topic, broker_name=other.broker_name)
    refusals: list[RocketMQError] = []
    written = 0

    def is_refused() -> bool:
        nonlocal written
        try:
            through.log.append({queue: given})
            written += 1
        except RocketMQError as error:
            refusals.append(error)
        return bool(refusals)

    until(is_refused, "the Proxy knows the new type")
    assert refusals[0].sub == RocketMQCondition.NOT_SUPPORTED
    through.log.append({queue: given})
    assert len(messages(direct, queue)) == written + 2


def test_the_command_creates_a_fifo_topic_which_keeps_its_type(cluster: Cluster) -> None:
    run, at = CliRunner(), ["--no-json", "--namesrv", cluster.address]
    created = run.invoke(app, [*at, "topic", "create", "ordered", "--queues", "2", "--message-type", "FIFO"])
    assert created.exit_code == 0, created.output
    described = run.invoke(app, [*at, "topic", "describe", "ordered"])
    assert "ordered: 2 queues, 0 messages of type FIFO" in described.output, described.output
    again = run.invoke(app, [*at, "topic", "create", "ordered", "--queues", "2", "--if-not-exists", "--message-type", "NORMAL"])
    assert "keeps its settings" in again.output, again.output
    with orderedmq.connect(namesrv_addr=cluster.address) as broker:
        with pytest.raises(OptionError, match="'Fifo'"):
            broker.admin.create_topic("other", 1, message_type="Fifo")
        broker.admin.create_topic("plain", 1)
        assert broker.admin.message_type("plain") == "NORMAL"
        assert "other" not in {topic.name for topic in broker.log.topics()}


@pytest.mark.nightly
def test_each_release_creates_topics_of_a_type_or_refuses_them(every_version: Cluster) -> None:
    with orderedmq.connect(namesrv_addr=every_version.address) as broker:
        if every_version.version.startswith("4"):
            with pytest.raises(OptionError, match="topic 'typed'"):
                make(broker, "typed", "FIFO")
            assert "typed" not in {topic.name for topic in broker.log.topics()}
            broker.admin.create_topic("typed", 1)
            assert broker.admin.message_type("typed") is None
            return
        make(broker, "typed", "FIFO")
        assert broker.admin.message_type("typed") == "FIFO"
        in_fifo("fifo-direct", broker, broker)


@pytest.mark.nightly
@pytest.mark.spark
def test_brokers_before_5_4_behind_a_proxy_have_the_rows_of_a_fifo_topic_with_their_own_keys(
    cluster: Cluster, tmp_path: pathlib.Path
) -> None:
    """Brokers before 5.4 give the key in a batch's envelope to all messages of the batch."""
    proxy_server = ProxyServer(tmp_path, cluster, {})
    with jars_required():
        proxy_server.start()
    try:
        with (
            orderedmq.connect(namesrv_addr=cluster.address) as direct,
            orderedmq.connect(namesrv_addr=proxy_server.address) as through,
        ):
            in_fifo("fifo-old", direct, through)
    finally:
        proxy_server.stop()
