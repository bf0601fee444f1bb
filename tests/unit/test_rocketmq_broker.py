"""A connection to a cluster whose servers fail and restart: how it is recognised, and what administrators change and see there."""

from __future__ import annotations

import json
from functools import partial

import pytest

import orderedmq
from orderedmq.endpoint import Endpoint
from orderedmq.errors import RocketMQError, RocketMQUnavailableError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.broker import RocketMQBroker
from orderedmq.rocketmq.wire.codes import RequestCode
from tests.unit.rocketmq_peer import Cluster, Link

QUEUE = MessageQueue("T", "a", 0)


BOTH = {"0": "h:1", "1": "h:2"}


@pytest.mark.parametrize(
    ("planned", "found"),
    [
        pytest.param(BOTH, {"1": "h:2"}, id="the-master-has-failed"),
        pytest.param({"1": "h:2"}, BOTH, id="the-master-has-returned"),
        pytest.param(BOTH, {"0": "h:2", "1": "h:1"}, id="the-replica-has-become-the-master"),
        pytest.param(BOTH, {"0": "h:3", "1": "h:2"}, id="the-master-has-moved"),
    ],
)
def test_a_cluster_is_recognised_while_one_server_is_where_it_was(
    cluster: Cluster, planned: dict[str, str], found: dict[str, str]
) -> None:
    address = cluster.nameserver().address
    cluster.routes["T"] = {"a": planned}
    with RocketMQBroker(Endpoint(None, address)) as driver:
        identity = driver.identity
    cluster.routes["T"] = {"a": found}
    with RocketMQBroker(Endpoint(None, address), identity=identity) as worker:
        assert worker.log
    cluster.routes["T"] = {"a": {"0": "h:4"}}
    with (
        RocketMQBroker(Endpoint(None, address), identity=identity) as other,
        pytest.raises(RocketMQError, match="OTHER_CLUSTER.*a@h:4"),
    ):
        assert other.log


class Stored:
    """Brokers with the topic ``T``, in which the group ``g`` has the offset 7."""

    def __init__(self, cluster: Cluster, *names: str) -> None:
        self.names = set(names)
        for name in names:
            cluster.scripted(name, partial(self._serve, name))

    def _serve(self, name: str, link: Link) -> None:
        for request in link.requests():
            body = b""
            if request.code == RequestCode.DELETE_TOPIC_IN_BROKER:
                self.names.discard(name)
            elif request.code in (RequestCode.GET_TOPIC_STATS_INFO, RequestCode.PULL_MESSAGE) and name not in self.names:
                link.reply(request, 17, remark="no topic")
                continue
            elif request.code == RequestCode.GET_ALL_CONSUMER_OFFSET:
                body = json.dumps({"offsetTable": {"T@g": {"0": 7}}}).encode()
            elif request.code == RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG:
                body = b'{"subscriptionGroupTable":{"g":{}}}'
            link.reply(request, body=body, offset="0")


@pytest.mark.parametrize("turn", [0, 1])
def test_a_topic_is_deleted_also_at_brokers_that_a_restarted_nameserver_does_not_know_yet(cluster: Cluster, turn: int) -> None:
    stored = Stored(cluster, "a", "b")
    cluster.reporting = {"a", "b"}
    with Cluster() as anew:
        anew.routes["T"] = {"a": cluster.routes["T"]["a"]}
        with RocketMQBroker(Endpoint(None, f"{anew.nameserver().address};{cluster.nameserver().address}")) as broker:
            broker._client._turn = turn
            broker.admin.delete_topic("T")
    assert not stored.names


def test_a_topic_is_not_deleted_while_the_only_nameserver_does_not_know_one_of_its_brokers(cluster: Cluster) -> None:
    stored = Stored(cluster, "a", "b")
    cluster.reporting = {"a", "b"}
    with orderedmq.connect(namesrv_addr=cluster.nameserver().address) as broker:
        assert len(broker.log.queues("T")) == 2
        del cluster.routes["T"]["b"]
        cluster.reporting = {"a"}
        with pytest.raises(RocketMQUnavailableError, match=r"NO_BROKER.*master of b:"):
            broker.admin.delete_topic("T")
    assert stored.names == {"a", "b"}


def test_offsets_in_a_deleted_topic_are_left_out_also_by_a_process_that_knew_the_topic(cluster: Cluster) -> None:
    """A broker before 5.0 keeps the offsets."""
    stored = Stored(cluster, "a")
    with orderedmq.connect(namesrv_addr=cluster.nameserver().address) as broker:
        assert broker.admin.group_offsets("g") == {QUEUE: 7}
        stored.names.clear()
        cluster.routes["other"] = cluster.routes.pop("T")
        assert broker.admin.group_offsets("g") == {}
