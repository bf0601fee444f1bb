"""RocketMQ's own Java client, driven from Python, to do what a neighbouring Java application would do.

PySpark's py4j starts a JVM with RocketMQ's jars and exposes its objects. ``peers.java`` is the root of all Java classes, for calls
that have no method here.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyspark
from py4j.java_gateway import CallbackServerParameters, GatewayParameters, JavaGateway, JavaMember, launch_gateway
from py4j.protocol import STATIC_PREFIX, Py4JJavaError

from orderedmq.java import ensure_java
from orderedmq.rocketmq.local.jars import DEFAULT_VERSION, fetch_jars
from tests.quick_spark import QUICK_JVM

#: A broker's name and a queue's id.
Queue = tuple[str, int]


@dataclass(frozen=True)
class Sent:
    """The queue and offset at which a message was stored. ``queue`` is the broker's name and the queue's id."""

    status: str
    queue: Queue
    offset: int
    id: str


@dataclass(frozen=True)
class Received:
    queue: Queue
    offset: int
    body: bytes
    key: str | None
    tags: str | None
    keys: str | None
    id: str
    properties: Mapping[str, str]
    #: time.monotonic() when the listener received the message.
    at: float


class Peers:
    """A JVM with the Java client. All Java objects end with it."""

    def __init__(self, home: Path, version: str = DEFAULT_VERSION) -> None:
        py4j_jar = next((Path(pyspark.__file__).parent / "jars").glob("py4j-*.jar"))
        java = ensure_java()
        self._names = itertools.count()
        port, token, self._process = launch_gateway(
            classpath=f"{fetch_jars(version)}/*",
            jarpath=str(py4j_jar),
            # The JVM writes its logs to its home folder, and ends with this process even if that is killed.
            javaopts=["-Xmx256m", *QUICK_JVM, f"-Duser.home={home}"],
            java_path=str(java),
            enable_auth=True,
            die_on_exit=True,
            return_proc=True,
        )
        self._gateway = JavaGateway(
            gateway_parameters=GatewayParameters(port=port, auth_token=token, auto_convert=True),
            # Set no token for calls from Java to Python: py4j's Java side cannot send one, so every call would fail silently.
            callback_server_parameters=CallbackServerParameters(port=0, daemonize=True, daemonize_connections=True),
        )
        callback = self._gateway.get_callback_server()
        assert callback is not None
        self._gateway.java_gateway_server.resetCallbackClient(
            self._gateway.java_gateway_server.getCallbackClient().getAddress(), callback.get_listening_port()
        )
        self.client: Any = self._gateway._gateway_client
        self.java: Any = self._gateway.jvm
        self.rocketmq: Any = self.java.org.apache.rocketmq

    def array(self, kind: str, length: int) -> Any:
        """Return an array of a class of java.lang, which converts the values that are put into it."""
        return self._gateway.new_array(getattr(self.java.java.lang, kind), length)

    def producer(self, namesrv: str, group: str = "java-producer", **settings: Any) -> Producer:
        """Return a started producer. ``settings`` are properties of the Java object, such as ``sendMsgTimeout=1000``.

        By default a send may take 30 s instead of Java's 3 s, because a broker on a busy machine can pause for that long.
        """
        settings = {"sendMsgTimeout": 30_000, **settings}
        producer = self._client(self.rocketmq.client.producer.DefaultMQProducer(group), namesrv, settings)
        producer.start()
        return Producer(self, producer)

    def consumer(
        self, namesrv: str, group: str, topic: str, consume: Callable[[list[Received]], bool] | None = None, **settings: Any
    ) -> Consumer:
        """Return a started orderly push consumer that begins at the first offset. Batches that ``consume`` refuses are redelivered.

        ``consume`` refuses by returning False or raising an exception.
        """
        client = self._client(self.rocketmq.client.consumer.DefaultMQPushConsumer(group), namesrv, settings)
        client.setConsumeFromWhere(self.rocketmq.common.consumer.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)
        client.subscribe(topic, "*")
        # Without this wait, the consumer would end before it has the result of the listener's last call, and would not store its offset.
        client.setAwaitTerminationMillisWhenShutdown(5000)
        return Consumer(self, client, topic, consume)

    def concurrent_consumer(self, namesrv: str, group: str, topic: str) -> ConcurrentConsumer:
        """Return a started MessageListenerConcurrently that accepts every message."""
        client = self._client(self.rocketmq.client.consumer.DefaultMQPushConsumer(group), namesrv, {})
        client.subscribe(topic, "*")
        return ConcurrentConsumer(self, client, topic, None)

    def admin(self, namesrv: str) -> Admin:
        client = self._client(self.rocketmq.tools.admin.DefaultMQAdminExt(), namesrv, {})
        client.start()
        return Admin(self, client)

    def close(self) -> None:
        """Kill the JVM without stopping its clients, because each client would wait for its cluster, which may no longer exist."""
        self._gateway.shutdown()
        self._process.kill()
        self._process.wait()
        # py4j closes only its own end of this pipe.
        self._process.stdin.close()

    def _client(self, client: Any, namesrv: str, settings: Mapping[str, Any]) -> Any:
        client.setNamesrvAddr(namesrv)
        # Clients with the same name in one JVM share connections and rebalancing, so each peer gets a unique name.
        client.setInstanceName(f"peer-{os.getpid()}-{next(self._names)}")
        client.setVipChannelEnabled(False)
        for name, value in settings.items():
            getattr(client, f"set{name[0].upper()}{name[1:]}")(value)
        return client


class Producer:
    def __init__(self, peers: Peers, client: Any) -> None:
        self._peers = peers
        self.client = client
        self._select = peers.rocketmq.client.producer.selector.SelectMessageQueueByHash()
        self._send_by: Any = None

    def send(self, topic: str, body: bytes, key: str | None = None, **fields: Any) -> Sent:
        """Send to the queue that Java's hash of ``key`` selects, or to the next queue if there is no key. ``fields``: see `message`."""
        message = self.message(topic, body, key, **fields)
        while True:
            try:
                return self._sent(self.client.send(message) if key is None else self.client.send(message, self._select, key))
            except Py4JJavaError as error:
                # A busy broker rejects a send that waited for 200 ms, with this error. Java's ordered send leaves the retry to the caller.
                if "[TIMEOUT_CLEAN_QUEUE]" not in str(error.java_exception):
                    raise

    def send_by(self, topic: str, key: Any, kind: str, select: Callable[[Any, int], int] | None = None) -> Sent:
        """Send the text of ``key`` to the queue that Java's hash or ``select(key, queues)`` chooses. ``kind``: the key's class of
        java.lang.

        py4j would convert a Python int to an Integer or a Long, depending on its value, so the key is passed by Java reflection.
        """
        items = self._peers.java.java.util.ArrayList()
        for item in (self.message(topic, str(key).encode()), self._select if select is None else Selector(select), None):
            items.add(item)
        one, given = self._peers.array(kind, 1), items.toArray()
        one[0] = key
        self._peers.java.java.lang.System.arraycopy(one, 0, given, 2, 1)
        if self._send_by is None:
            rocketmq, class_of = "org.apache.rocketmq", self._peers.java.java.lang.Class.forName
            types = self._peers.array("Class", 3)
            types[0] = class_of(f"{rocketmq}.common.message.Message")
            types[1] = class_of(f"{rocketmq}.client.producer.MessageQueueSelector")
            types[2] = class_of("java.lang.Object")
            self._send_by = self.client.getClass().getMethod("send", types)
        return self._sent(self._send_by.invoke(self.client, given))

    def _sent(self, sent: Any) -> Sent:
        queue = sent.getMessageQueue()
        where = (str(queue.getBrokerName()), int(queue.getQueueId()))
        return Sent(str(sent.getSendStatus().toString()), where, int(sent.getQueueOffset()), str(sent.getMsgId()))

    def message(
        self,
        topic: str,
        body: bytes,
        key: str | None = None,
        *,
        tags: str | None = None,
        keys: str | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> Any:
        message = self._peers.rocketmq.common.message.Message(topic, bytearray(body))
        if tags is not None:
            message.setTags(tags)
        if keys is not None:
            message.setKeys(keys)
        if key is not None:
            message.putUserProperty("__SHARDINGKEY", key)
        for name, value in (properties or {}).items():
            message.putUserProperty(name, value)
        return message

    def stop(self) -> None:
        self.client.shutdown()


class Selector:
    """A user-defined MessageQueueSelector in Python. ``choose(key, queues)`` returns an index into the list of queues."""

    def __init__(self, choose: Callable[[Any, int], int]) -> None:
        self._choose = choose

    def select(self, queues: Any, message: Any, key: Any) -> Any:
        return queues.get(self._choose(key, queues.size()))

    class Java:
        implements = ("org.apache.rocketmq.client.producer.MessageQueueSelector",)


class Consumer:
    """An orderly consumer. ``received`` has every message that its listener received, and a redelivered message once per delivery."""

    STATUS = ("ConsumeOrderlyStatus", "SUCCESS", "SUSPEND_CURRENT_QUEUE_A_MOMENT")

    def __init__(self, peers: Peers, client: Any, topic: str, consume: Callable[[list[Received]], bool] | None) -> None:
        self.client = client
        self._topic = topic
        self.received: list[Received] = []
        self._consume = consume
        name, success, again = self.STATUS
        status = getattr(peers.rocketmq.client.consumer.listener, name)
        self._success, self._again = getattr(status, success), getattr(status, again)
        # toJson has static and other overloads. py4j's own lookup of a static member stops at whichever the JVM lists first.
        serializable = peers.rocketmq.remoting.protocol.RemotingSerializable
        self._json = JavaMember("toJson", None, STATIC_PREFIX + serializable._fqn, peers.client)
        client.registerMessageListener(self._listener())
        client.start()

    def _listener(self) -> Any:
        return _Listener(self)

    def wait(self, count: int, timeout: float = 60.0) -> list[Received]:
        deadline = time.monotonic() + timeout
        while len(self.received) < count:
            assert time.monotonic() < deadline, f"{len(self.received)} of {count} messages after {timeout:.0f} s"
            time.sleep(0.02)
        return list(self.received)

    @property
    def id(self) -> str:
        """The consumer's client id, as in locks and lists of members."""
        return str(self.client.getDefaultMQPushConsumerImpl().getmQClientFactory().getClientId())

    @property
    def queues(self) -> list[Queue]:
        """The queues of the consumer's topic that it owns and has locked. Its queue of the retry topic is left out."""
        return self.queues_of(self._topic)

    def queues_of(self, topic: str) -> list[Queue]:
        """Return the same as `queues` for any topic, given by the name that the servers use."""
        table = self.client.getDefaultMQPushConsumerImpl().getRebalanceImpl().getProcessQueueTable()
        owned = [entry.getKey() for entry in table.entrySet() if entry.getValue().isLocked()]
        return sorted((str(q.getBrokerName()), int(q.getQueueId())) for q in owned if q.getTopic() == topic)

    def stop(self) -> None:
        """Stop in an orderly way: the consumer waits for its listener's result, stores its offsets and releases its locks."""
        self.client.shutdown()

    def _given(self, messages: Any, queue: Any) -> Any:
        where = (str(queue.getBrokerName()), int(queue.getQueueId()))
        # Convert all messages in one call, because each call to a Java object costs a round trip.
        batch = [_received(message, where) for message in json.loads(self._json(messages, False))]
        self.received += batch
        try:
            taken = self._consume is None or self._consume(batch)
        except Exception:
            taken = False
        return self._success if taken else self._again


class ConcurrentConsumer(Consumer):
    """A concurrent consumer. It locks no queues."""

    STATUS = ("ConsumeConcurrentlyStatus", "CONSUME_SUCCESS", "RECONSUME_LATER")

    def _listener(self) -> Any:
        return _ConcurrentListener(self)

    def has(self, topic: str) -> list[Queue]:
        """Return the queues of a topic that are assigned to the consumer."""
        table = self.client.getDefaultMQPushConsumerImpl().getRebalanceImpl().getProcessQueueTable()
        assigned = [entry.getKey() for entry in table.entrySet() if not entry.getValue().isDropped()]
        return sorted((str(q.getBrokerName()), int(q.getQueueId())) for q in assigned if str(q.getTopic()) == topic)


def _received(message: Mapping[str, Any], where: Queue) -> Received:
    properties = message["properties"]
    return Received(
        where,
        message["queueOffset"],
        base64.b64decode(message["body"]),
        properties.get("__SHARDINGKEY"),
        properties.get("TAGS"),
        properties.get("KEYS"),
        message["msgId"],
        properties,
        time.monotonic(),
    )


class _Listener:
    """The listener that Java calls."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    def consumeMessage(self, messages: Any, context: Any) -> Any:
        return self._consumer._given(messages, context.getMessageQueue())

    def toString(self) -> str:
        """Return a name; Java asks for it when a tool requests information about the consumer."""
        return "a listener in Python"

    class Java:
        implements = ("org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly",)


class _ConcurrentListener(_Listener):
    class Java:
        implements = ("org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently",)


class Admin:
    """The actions of ``mqadmin``."""

    def __init__(self, peers: Peers, client: Any) -> None:
        self._peers = peers
        self.client = client

    def create_topic(self, broker: str, topic: str, queues: int = 4) -> None:
        """Create a topic at the broker with this address. The topic exists there, and at the nameserver, when this returns."""
        config = self._peers.rocketmq.common.TopicConfig(topic, queues, queues)
        self.client.createAndUpdateTopicConfig(broker, config)

    # These methods ask for one queue at a time, because the statistics of DefaultMQAdminExt for a topic or group use requests that a
    # 4.9 broker does not know.

    def offsets(self, group: str, topic: str) -> dict[Queue, int]:
        offsets_by_queue = {}
        for (name, queue), address in self._queues(topic).items():
            header = self._peers.rocketmq.remoting.protocol.header.QueryConsumerOffsetRequestHeader()
            header.setTopic(topic)
            header.setConsumerGroup(group)
            header.setQueueId(queue)
            try:
                offsets_by_queue[name, queue] = int(self._api().queryConsumerOffset(address, header, 3000))
            except Py4JJavaError as error:
                if not error.java_exception.getClass().getName().endswith(".OffsetNotFoundException"):
                    raise
        return offsets_by_queue

    def ends(self, topic: str) -> dict[Queue, tuple[int, int]]:
        """Return the minimum offset and the end of each queue."""
        bounds_by_queue = {}
        for name, queue in self._queues(topic):
            where = self._peers.rocketmq.common.message.MessageQueue(topic, name, queue)
            bounds_by_queue[name, queue] = (int(self.client.minOffset(where)), int(self.client.maxOffset(where)))
        return bounds_by_queue

    def _queues(self, topic: str) -> dict[Queue, str]:
        """Return the queues of a topic, with the addresses of their brokers."""
        route = self.client.examineTopicRouteInfo(topic)
        brokers = {str(data.getBrokerName()): str(data.selectBrokerAddr()) for data in route.getBrokerDatas()}
        queues = [
            (str(data.getBrokerName()), queue) for data in route.getQueueDatas() for queue in range(data.getReadQueueNums())
        ]
        return {queue: brokers[queue[0]] for queue in sorted(queues)}

    def members(self, group: str) -> list[str]:
        connections = self.client.examineConsumerConnectionInfo(group).getConnectionSet()
        return sorted(str(connection.getClientId()) for connection in connections)

    def _api(self) -> Any:
        return self.client.getDefaultMQAdminExtImpl().getMqClientInstance().getMQClientAPIImpl()
