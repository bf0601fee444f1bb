"""Which topics a log lists if a nameserver cuts the connection between its requests. Also topics that cannot be read."""

from __future__ import annotations

import json

import orderedmq
from orderedmq.rocketmq.messages.log import RocketMQLog
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.wire.codes import RequestCode
from orderedmq.rocketmq.wire.frame import RemotingCommand
from tests.unit.rocketmq_peer import Cluster, Link, Peer


def route(request: RemotingCommand) -> bytes:
    """A route. The topic "static" has queues that move between brokers."""
    brokers = [{"brokerName": "a", "cluster": "C", "brokerAddrs": {"0": "h:1"}}]
    queues = [{"brokerName": "a", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}]
    body = {"brokerDatas": brokers, "queueDatas": queues}
    mapping = {"topicQueueMappingByBroker": {"a": {"topic": "static"}}} if request.ext["topic"] == "static" else {}
    return json.dumps({**body, **mapping}).encode()


def test_a_static_topic_is_left_out_also_where_a_nameserver_has_to_be_asked_again() -> None:
    """The first request about a topic gets no answer. The repeated request shows that the topic is static."""
    cut: list[RemotingCommand] = []

    def nameserver(link: Link) -> None:
        for request in link.requests():
            if request.code == RequestCode.GET_ROUTEINFO_BY_TOPIC:
                if not cut:
                    cut.append(request)
                    return
                link.reply(request, body=route(request))
            elif request.code == RequestCode.GET_BROKER_CLUSTER_INFO:
                table = {"a": {"brokerName": "a", "brokerAddrs": {"0": "h:1"}}}
                link.reply(request, body=json.dumps({"brokerAddrTable": table, "clusterAddrTable": {}}).encode())
            else:
                link.reply(request, body=b'{"topicList":["static","usual"]}')

    with Peer(nameserver) as peer, Client(peer.address) as client:
        assert [info.name for info in RocketMQLog(client).topics()] == ["usual"]
    assert cut


def test_a_topic_that_cannot_be_read_has_a_type() -> None:
    """An administrator has taken away the permission to read (mqadmin updateTopicPerm -p 2)."""
    settings = {"readQueueNums": 1, "writeQueueNums": 1, "perm": 2, "attributes": {"message.type": "FIFO"}}

    def script(link: Link) -> None:
        for request in link.requests():
            link.reply(request, body=json.dumps(settings).encode(), offset="0")

    with Cluster() as cluster:
        cluster.perm = 2
        cluster.scripted("a", script)
        with orderedmq.connect(namesrv_addr=cluster.nameserver().address) as broker:
            [queue] = broker.admin.describe_topic("T")
            assert not queue.readable
            assert broker.admin.message_type("T") == "FIFO"
