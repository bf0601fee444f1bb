"""RocketMQ's message traces on real servers: they are written as Java writes them, and Java's tools find and read them."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest
from py4j.protocol import Py4JJavaError

from ordered_source import ConsumeOrderlyContext, ConsumeOrderlyStatus
from ordered_source.columns import ReadContext
from ordered_source.listener import engine_task
from ordered_source.listener.engine_task import Consumer
from ordered_source.listener.tracing import Tracing
from orderedmq.broker import SinkBatch
from orderedmq.endpoint import Endpoint
from orderedmq.errors import OptionError
from orderedmq.listening.queue_engine import OrderPerQueue
from orderedmq.rocketmq.broker import RocketMQBroker
from orderedmq.rocketmq.codec.encode import SendBody
from orderedmq.rocketmq.codec.message_trace import Sent, Trace, of_call, of_sent
from orderedmq.rocketmq.group.dead_letters import key_of
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.rocketmq.messages.log import RocketMQLog
from orderedmq.rows.message_trace import Ended, ReturnType, TracedCall, TracedMessage
from tests.contract.support import locked
from tests.rocketmq.group_world import World
from tests.rocketmq.peers import Peers
from tests.waits import until

SUCCESS, AGAIN = ConsumeOrderlyStatus.SUCCESS, ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT


@pytest.fixture
def world(cluster: Cluster) -> Iterator[World]:
    with World(cluster, 1) as world:
        yield world


@pytest.fixture
def traces(world: World) -> str:
    """A topic for traces."""
    topic = f"traces-{uuid.uuid4().hex[:8]}"
    world.broker.admin.create_topic(topic, 2)
    return topic


class Reader:
    """Finds the traces of messages in a topic by the keys of the trace messages, and decodes them as Java does."""

    def __init__(self, peers: Peers, log: RocketMQLog, topic: str) -> None:
        self._peers, self._log, self._topic = peers, log, topic
        self._view = peers.rocketmq.client.trace.TraceView

    def messages(self) -> list[dict[str, Any]]:
        bounds = self._log.bounds(self._log.queues(self._topic))
        pulled = [self._log.pull(queue, 0, at.max_offset, 1 << 24, ("body", "keys")) for queue, at in bounds.items()]
        return [message for batch in pulled for message in batch.to_pylist()]

    def views(self, message_id: str) -> list[dict[str, Any]]:
        names = ("MsgType", "GroupName", "Status", "Topic", "Keys", "Tags", "StoreHost", "OffSetMsgId", "CostTime", "TimeStamp")
        out = []
        for message in self.messages():
            if message_id in message["keys"].split():
                in_java = self._peers.rocketmq.common.message.MessageExt()
                in_java.setBody(bytearray(message["body"]))
                views = self._view.decodeFromTraceTransData(message_id, in_java)
                out += [{name: getattr(view, f"get{name}")() for name in names} for view in views]
        return out

    def wait(self, message_id: str, count: int) -> list[dict[str, Any]]:
        """Wait for this many traces of a message, and return them, the traces of sends first."""
        until(lambda: len(self.views(message_id)) >= count, f"{count} traces of {message_id}", 60.0)
        return sorted(self.views(message_id), key=lambda view: view["MsgType"])


def rows(*bodies: str) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "body": [body.encode() for body in bodies],
            "keys": [f"key-{body} all" for body in bodies],
            "tags": ["T"] * len(bodies),
        }
    )


def ids(world: World) -> list[str]:
    bounds = world.log.bounds([world.queue])[world.queue]
    return world.log.pull(world.queue, 0, bounds.max_offset, 1 << 24, ("message_id",)).column(0).to_pylist()


# -- as Java encodes


def java_bean(peers: Peers, message_id: str, keys: str | None, **fields: Any) -> Any:
    bean = peers.rocketmq.client.trace.TraceBean()
    for name, value in {"msgId": message_id, "keys": keys, **fields}.items():
        getattr(bean, f"set{name[0].upper()}{name[1:]}")(value)
    return bean


def java_trace(peers: Peers, kind: str, beans: Sequence[Any], **fields: Any) -> Trace:
    """Return the output of Java's TraceDataEncoder, which lists each key once and in no particular order."""
    trace = peers.rocketmq.client.trace
    context = trace.TraceContext()
    context.setTraceType(getattr(trace.TraceType, kind))
    context.setAccessChannel(peers.rocketmq.client.AccessChannel.LOCAL)
    listed = peers.java.java.util.ArrayList()
    for bean in beans:
        listed.add(bean)
    for name, value in {"traceBeans": listed, **fields}.items():
        getattr(context, f"set{name[0].upper()}{name[1:]}")(value)
    encoded = trace.TraceDataEncoder.encoderFromContextBean(context)
    return Trace(str(encoded.getTransData()), tuple(sorted(map(str, encoded.getTransKey()))))


def joined(traces: Iterator[Trace]) -> Trace:
    texts, keys = zip(*traces)
    return Trace("".join(texts), tuple(sorted({key for some in keys for key in some})))


@pytest.mark.holds("message trace")
def test_traces_are_encoded_as_java_encodes_them(peers: Peers) -> None:
    kinds = peers.rocketmq.common.message.MessageType
    body = b"hello"
    for properties, kind, told in (
        ("UNIQ_KEY\x01ID1\x02TAGS\x01T\x02KEYS\x01k1 k2\x02", kinds.Normal_Msg, ("T", "k1 k2")),
        ("UNIQ_KEY\x01ID1\x02", kinds.Normal_Msg, (None, None)),
    ):
        sent = Sent("orders", "me", "there", "1.2.3.4:10911", SendBody(0, 1, memoryview(body), properties), 17, 4, "OFF", False)
        tags, keys = told
        bean = java_bean(
            peers,
            "ID1",
            keys,
            topic="orders",
            tags=tags,
            storeHost="1.2.3.4:10911",
            bodyLength=5,
            msgType=kind,
            offsetMsgId="OFF",
        )
        java = java_trace(peers, "Pub", [bean], timeStamp=17, regionId="there", groupName="me", costTime=4, success=False)
        assert joined(of_sent(sent)) == java
    call = TracedCall("me", "there", "REQUEST", 17, (TracedMessage("ID1", "k1 k2", 0), TracedMessage("ID2", None, 3)))
    beans = [java_bean(peers, "ID1", "k1 k2", retryTimes=0), java_bean(peers, "ID2", None, retryTimes=3)]
    same = {"timeStamp": 17, "regionId": "there", "groupName": "me", "requestId": "REQUEST"}
    assert joined(of_call(call)) == java_trace(peers, "SubBefore", beans, **same)
    for how, name in ((ReturnType.SUCCESS, "SUCCESS"), (ReturnType.FAILED, "FAILED"), (ReturnType.EXCEPTION, "EXCEPTION")):
        code = getattr(peers.rocketmq.client.consumer.listener.ConsumeReturnType, name).ordinal()
        after = java_trace(peers, "SubAfter", beans, **same, costTime=9, success=name == "SUCCESS", contextCode=code)
        assert joined(of_call(call._replace(ended=Ended(9, how)))) == after


# -- over servers


IN_TWOS = OrderPerQueue(consume_message_batch_max_size=2, suspend_current_queue_time_millis=10)


def consume(world: World, listener: Any, traces: str, settings: OrderPerQueue = IN_TWOS) -> None:
    """Run a task of consume_orderly over all messages of the queue."""
    broker = world.connect()
    me = broker.groups.join("me")
    broker.groups.heartbeat(world.group, me, world.shared())
    [token] = locked(broker, world.group, me, [world.queue])
    end = world.log.bounds([world.queue])[world.queue].max_offset
    columns = ("topic", "broker_name", "queue_id", "queue_offset", "body", "keys", "message_id", "reconsume_times")
    pulled = world.log.pull(world.queue, 0, end, 1 << 24, columns)
    text = ReadContext.of(Endpoint(namesrv_addr=world.cluster.address), broker.identity, token).to_text()
    batch = pulled.append_column("lock_token", pa.array([text] * pulled.num_rows))
    list(engine_task.consume(iter([batch]), Consumer(listener, settings, tracing=Tracing(True, traces))))


@pytest.mark.holds("message trace")
def test_java_reads_the_traces_of_sends_and_of_calls(world: World, traces: str, peers: Peers) -> None:
    """A Java producer and a Java consumer write their own traces to the same topic."""
    address, reader = world.cluster.address, Reader(peers, world.log, traces)
    in_java = peers.producer(address, "java-producers", enableTrace=True, traceTopic=traces)
    by_java = in_java.send(world.topic, b"j", tags="T", keys="key-j all").id
    until(lambda: len(ids(world)) == 1, "the message can be read")
    world.broker.traced(traces).log.append({world.queue: rows("a", "b")})
    batch = SinkBatch("a-sink", 0, topic=world.topic)
    staging = world.broker.traced(traces).outbox.open(batch, 0)
    staging.add(world.queue, rows("c", "d"))
    world.broker.outbox.publish(batch, [staging.receipt()])
    java_consumer = peers.consumer(address, "java-consumers", world.topic, enableTrace=True, traceTopic=traces)
    java_consumer.wait(5)
    calls: list[int] = []

    def listener(messages: Sequence[Any], context: ConsumeOrderlyContext) -> ConsumeOrderlyStatus:
        calls.append(len(messages))
        return AGAIN if len(calls) == 2 else SUCCESS

    consume(world, listener, traces)
    assert calls == [2, 2, 1, 1, 1]
    own = ids(world)
    assert own[0] == by_java
    host = str(world.broker._client.address(world.topic, world.queue.broker_name, float("inf")))
    for message_id, body, group in zip(own, "jabcd", ["java-producers", *["CLIENT_INNER_PRODUCER"] * 2, *["OMQ_SINK"] * 2]):
        again = body in "bc"
        # Each consumer writes a trace before and after a call; our consumer also does so when it repeats the messages that
        # its listener refused. Java sends traces after up to 5 s. When a Java consumer is stopped, it sends them immediately, but on
        # a busy machine it may give up first (AsyncTraceDispatcher.flush).
        views = reader.wait(message_id, 7 if again else 5)
        sent = views[0]
        sent_fields = {name: sent[name] for name in ("MsgType", "GroupName", "Status", "Topic", "Keys", "Tags", "StoreHost")}
        assert sent_fields == {
            "MsgType": "Pub", "GroupName": group, "Status": "success", "Topic": world.topic, "Keys": f"key-{body} all", "Tags": "T",
            "StoreHost": host,
        }  # fmt: skip
        assert len(sent["OffSetMsgId"]) == 32
        assert sent["CostTime"] >= 0
        after = [(view["GroupName"], view["Status"]) for view in views if view["MsgType"] == "SubAfter"]
        ours = [(world.group, "failed"), (world.group, "success")] if again else [(world.group, "success")]
        assert sorted(after) == sorted([("java-consumers", "success"), *ours])
        assert len(views) == (7 if again else 5)


@pytest.mark.holds("message trace")
def test_dead_letters_of_a_traced_listener_are_traced(world: World, traces: str, peers: Peers) -> None:
    """Both the first dead letter, which is sent through the retry topic, and a later one are traced."""
    world.broker.log.append({world.queue: rows("a", "b")})
    consume(world, lambda messages, context: AGAIN, traces, OrderPerQueue(max_reconsume_times=0))
    dead = f"%DLQ%{world.group}"
    for offset, body in enumerate("ab"):
        [view] = Reader(peers, world.log, traces).wait(key_of(world.group, world.queue, offset), 1)
        assert {name: view[name] for name in ("MsgType", "GroupName", "Status", "Topic", "Keys")} == {
            "MsgType": "Pub", "GroupName": world.group, "Status": "success", "Topic": dead, "Keys": f"key-{body} all",
        }  # fmt: skip


@pytest.mark.holds("message trace")
def test_mqadmin_shows_the_traces_in_the_usual_topic(quick_locks: Cluster, peers: Peers) -> None:
    with World(quick_locks, 1) as world:
        world.broker.traced().log.append({world.queue: rows("a")})
        [message_id] = ids(world)
        output = until(lambda: mqadmin(peers, "-i", message_id, "-n", quick_locks.address), "the trace is indexed", 60.0)
    shown = output.split()
    assert shown[:6] == ["#Type", "#ProducerGroup", "#ClientHost", "#SendTime", "#CostTimes", "#Status"]
    assert (*shown[6:8], shown[-1]) == ("Pub", "CLIENT_INNER_PRODUCER", "success")


def mqadmin(peers: Peers, *arguments: str) -> str:
    """Return the output of ``mqadmin queryMsgTraceById``, or "" if it finds nothing."""
    java = peers.java
    command = peers.rocketmq.tools.command.message.QueryMsgTraceByIdSubCommand()
    options = command.buildCommandlineOptions(
        peers.rocketmq.srvutil.ServerUtil.buildCommandlineOptions(java.org.apache.commons.cli.Options())
    )
    given = peers.array("String", len(arguments))
    for place, argument in enumerate(arguments):
        given[place] = argument
    out, system = java.java.io.ByteArrayOutputStream(), java.java.lang.System
    before = system.out
    system.setOut(java.java.io.PrintStream(out, True))
    try:
        command.execute(java.org.apache.commons.cli.DefaultParser().parse(options, given), options, None)
    except Py4JJavaError as error:
        if "no message" not in str(error):
            raise
    finally:
        system.setOut(before)
    # Drop the log output that comes before the table.
    return "".join(str(out.toString()).partition("#Type")[1:])


# -- best effort


@pytest.mark.holds("message trace")
def test_a_missing_topic_is_an_error_at_the_start_and_a_warning_later(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(OptionError, match="UNSUPPORTED.*'RMQ_SYS_TRACE_TOPIC'"):
        world.broker.traced()
    with pytest.raises(OptionError, match="UNSUPPORTED.*'no-traces'"):
        world.broker.traced("no-traces")
    with RocketMQBroker(Endpoint(None, world.cluster.address)) as broker, caplog.at_level(logging.WARNING, "orderedmq"):
        traced = broker.traced("no-traces", check=False)
        traced.log.append({world.queue: rows("a", "b")})
        until(lambda: broker._traced["no-traces"].dispatcher.dropped == 2, "the traces are dropped")
        traced.log.append({world.queue: rows("c")})
    assert len(ids(world)) == 3
    first, last = (record.getMessage() for record in caplog.records if "trace" in record.getMessage())
    assert first.startswith("the traces of 2 messages were not written to topic no-traces: ")
    assert "topic 'no-traces' does not exist" in first
    assert last.startswith("the traces of 1 messages were not written to topic no-traces: ")
