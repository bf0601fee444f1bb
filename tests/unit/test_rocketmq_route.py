"""A client derives the same facts from a route as every other client.

A cluster's addresses are never standard JSON, and a list of topics also has names that are no users' topics.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orderedmq.errors import ProtocolError, RocketMQError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.wire.frame import RemotingCommand
from orderedmq.rocketmq.wire.message_requests import topic_route
from orderedmq.rocketmq.wire.route import BrokerData, ClusterInfo, Route, parse_cluster, parse_route, parse_topics, user_topics


def queue_data(broker: str, read: int = 2, write: int = 2, perm: int = 6) -> dict[str, Any]:
    return {"brokerName": broker, "perm": perm, "readQueueNums": read, "writeQueueNums": write, "topicSysFlag": 0}


def broker_data(name: str, *ids: int) -> dict[str, Any]:
    return {"brokerName": name, "cluster": "C", "brokerAddrs": {str(i): f"{name}:{10911 + i}" for i in ids or (0,)}}


def route(brokers: list[dict[str, Any]], queues: list[dict[str, Any]], **more: Any) -> Route:
    return parse_route(
        "T", json.dumps({"brokerDatas": brokers, "queueDatas": queues, "filterServerTable": {}, **more}).encode()
    )


def names(queues: tuple[MessageQueue, ...]) -> list[str]:
    assert all(queue.topic == "T" for queue in queues)
    return [f"{queue.broker_name}{queue.queue_id}" for queue in queues]


def test_producers_choose_among_writable_queues_by_broker_name() -> None:
    parsed = route([broker_data("b"), broker_data("a")], [queue_data("b", 1, 3), queue_data("a", 4, 2), queue_data("c")])
    assert names(parsed.publish_list()) == ["a0", "a1", "b0", "b1", "b2"]


def test_consumers_divide_readable_queues_in_order() -> None:
    queues = [queue_data("b", 11, 3), queue_data("a", 2, 4), queue_data("c", 1)]
    assert names(route([broker_data("b"), broker_data("a")], queues).subscribe_set()) == (
        ["a0", "a1"] + [f"b{i}" for i in range(11)] + ["c0"]
    )


@pytest.mark.parametrize(
    ("perm", "written", "read"), [(0, 0, 0), (1, 0, 0), (2, 1, 0), (4, 0, 1), (6, 1, 1), (7, 1, 1), (14, 1, 1)]
)
def test_the_permission_decides_over_reading_and_writing(perm: int, written: int, read: int) -> None:
    parsed = route([broker_data("a")], [queue_data("a", 1, 1, perm)])
    assert len(parsed.publish_list()) == written
    assert len(parsed.subscribe_set()) == read


def test_without_a_master_a_broker_is_read_but_not_written() -> None:
    parsed = route([broker_data("a", 1, 2), broker_data("b", 0, 1)], [queue_data("a"), queue_data("b")])
    assert names(parsed.publish_list()) == ["b0", "b1"]
    assert names(parsed.subscribe_set()) == ["a0", "a1", "b0", "b1"]


def test_an_order_configuration_fixes_the_list_whatever_is_there() -> None:
    parsed = route([broker_data("a")], [queue_data("a", 8, 8)], orderTopicConf="b:2;a:1")
    assert names(parsed.publish_list()) == ["b0", "b1", "a0"]
    assert len(parsed.subscribe_set()) == 8


@pytest.mark.parametrize("conf", ["a", "a:", ":4", "a:x", "a:-1", "a:1;;b:1", "a:9999999"])
def test_malformed_order_configurations_are_refused(conf: str) -> None:
    with pytest.raises(ProtocolError, match="order configuration"):
        route([broker_data("a")], [queue_data("a")], orderTopicConf=conf)


def test_names_sort_as_in_java() -> None:
    # By code points, U+FF5E comes before U+1F600. Java compares the latter's surrogate, which is lower.
    low, high = "\U0001f600", "\uff5e"
    assert sorted((low, high)) == [high, low]
    parsed = route([broker_data(high), broker_data(low)], [queue_data(high, 1, 1), queue_data(low, 1, 1)])
    assert names(parsed.publish_list()) == names(parsed.subscribe_set()) == [f"{low}0", f"{high}0"]


def test_a_static_topic_is_refused_by_name() -> None:
    with pytest.raises(RocketMQError) as caught:
        route([broker_data("a")], [], topicQueueMappingByBroker={"a": {"topic": "T"}})
    assert caught.value.condition == "ORDEREDMQ_ROCKETMQ.STATIC_TOPIC"
    assert "'T'" in caught.value.message
    nothing: list[dict[str, Any] | None] = [None, {}]
    for empty in nothing:
        assert route([broker_data("a")], [queue_data("a")], topicQueueMappingByBroker=empty).publish_list()


def test_a_replica_that_acts_as_master_is_read_but_is_no_master() -> None:
    acting = {**broker_data("a", 0, 2), "enableActingMaster": True}
    parsed = route([acting, broker_data("b")], [{**queue_data("a"), "perm": 4}, queue_data("b")])
    broker = parsed.brokers["a"]
    assert (broker.master, broker.acting, broker.address(0)) == (None, True, acting["brokerAddrs"]["2"])
    assert sorted(broker.addresses.values()) == sorted(acting["brokerAddrs"].values())
    assert names(parsed.publish_list()) == ["b0", "b1"]
    assert names(parsed.subscribe_set()) == ["a0", "a1", "b0", "b1"]
    # Address 0 is a master if its queues are writable, or if the cluster has no acting masters.
    for broker_, perm in ((acting, 6), ({**acting, "enableActingMaster": False}, 4)):
        assert route([broker_], [{**queue_data("a"), "perm": perm}]).brokers["a"].master == acting["brokerAddrs"]["0"]


def test_an_address_is_chosen_by_replica() -> None:
    broker = BrokerData("a", "C", {0: "master", 1: "one", 2: "two"})
    assert [broker.address(i) for i in (0, 1, 2, 7)] == ["master", "one", "two", "master"]
    orphans = BrokerData("a", "C", {2: "two", 1: "one"})
    assert (orphans.master, orphans.address(0), orphans.address(2)) == (None, "one", "two")
    assert BrokerData("a", "C", {}).address(0) is None


def test_trap_2_a_cluster_and_an_old_route_have_bare_integers_as_keys() -> None:
    text = (
        '{"brokerAddrTable":{"a":{"brokerAddrs":{0:"127.0.0.1:10911",1:"127.0.0.1:10921"},"brokerName":"a","cluster":"C",'
        '"enableActingMaster":false}},"clusterAddrTable":{"C":["a"]}}'
    )
    for written in (text, text.replace("{0:", '{"0":').replace(",1:", ',"1":')):
        cluster = parse_cluster(written.encode())
        assert cluster.brokers == {"a": BrokerData("a", "C", {0: "127.0.0.1:10911", 1: "127.0.0.1:10921"})}
        assert cluster.clusters == {"C": ("a",)}
    old = b'{"brokerDatas":[{"brokerAddrs":{0:"h:1"},"brokerName":"a","cluster":"C"}],"queueDatas":[]}'
    assert parse_route("T", old).brokers["a"].master == "h:1"


def test_two_nameservers_together_know_each_brokers_servers() -> None:
    def known(**brokers: dict[str, str]) -> ClusterInfo:
        table = {name: {"brokerName": name, "brokerAddrs": addresses} for name, addresses in brokers.items()}
        return parse_cluster(json.dumps({"brokerAddrTable": table, "clusterAddrTable": {"C": [*brokers]}}).encode())

    union = known(a={"0": "a:1"}).united(known(a={"0": "former:1", "1": "a:2"}, b={"0": "b:1"}))
    assert union == known(a={"0": "a:1", "1": "a:2"}, b={"0": "b:1"})


def test_trap_20_a_list_of_topics_has_names_that_are_no_users_topics() -> None:
    cluster = parse_cluster(b'{"brokerAddrTable":{"a":{"brokerName":"a","brokerAddrs":{}}},"clusterAddrTable":{"C":["a"]}}')
    listed = parse_topics(
        b'{"brokerAddr":null,"topicList":["orders","a","C","TBW102","rmq_sys_REVIVE_LOG_C","%RETRY%g","%DLQ%g","C_REPLY_TOPIC",'
        b'"SCHEDULE_TOPIC_XXXX","orders"]}'
    )
    assert user_topics(listed, cluster) == ("%DLQ%g", "orders")
    assert parse_topics(b"{}") == ()


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'{"queueDatas":{}}', b'{"queueDatas":[1]}', b'{"queueDatas":[{}]}', b'{"brokerDatas":[{"brokerName":1}]}',
     b'{"brokerDatas":[{"brokerName":"a","brokerAddrs":{"x":"h:1"}}]}', b'{"brokerDatas":[{"brokerName":"a","brokerAddrs":{"0":1}}]}',
     b'{"queueDatas":[{"brokerName":"a","readQueueNums":-1}]}', b'{"queueDatas":[{"brokerName":"a","readQueueNums":2147483647}]}',
     b'{"queueDatas":[{"brokerName":"a","perm":"6"}]}', b'{"topicQueueMappingByBroker":[]}', b'{"orderTopicConf":4}'],
)  # fmt: skip
def test_malformed_routes_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_route("T", body)


@pytest.mark.parametrize("body", [b"", b'{"topicList":1}', b'{"topicList":[1]}'])
def test_malformed_lists_of_topics_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_topics(body)


WHOLE = json.dumps(
    {
        "brokerDatas": [broker_data("a", 0, 1)],
        "queueDatas": [queue_data("a")],
        "orderTopicConf": "a:2",
        "topicQueueMappingByBroker": None,
    }
).encode()


@given(
    st.lists(
        st.tuples(st.integers(0, len(WHOLE) - 1), st.sampled_from(list('{}[]":,0x-')) | st.text(max_size=2)),
        min_size=1,
        max_size=5,
    )
)
def test_mutations_give_a_route_or_a_named_error(changes: list[tuple[int, str]]) -> None:
    text = list(WHOLE.decode())
    for at, replacement in changes:
        text[at] = replacement
    try:
        parsed = parse_route("T", "".join(text).encode("utf-8", "surrogatepass"))
    except RocketMQError:
        return
    parsed.publish_list()
    parsed.subscribe_set()


def test_a_route_says_that_a_proxy_answered_also_with_brokers_of_an_earlier_one() -> None:
    body = json.dumps({"brokerDatas": [broker_data("a")], "queueDatas": [queue_data("a")]}).encode()
    by_nameserver = topic_route("T").answer(RemotingCommand(0, body=body), "h:1")
    by_proxy = topic_route("T").answer(RemotingCommand(0, ext={"MSG_REGION": "", "TRACE_ON": "false"}, body=body), "h:1")
    assert (by_nameserver.by_proxy, by_proxy.by_proxy) == (False, True)
    assert by_proxy.with_unknown(by_nameserver, ["b"]).by_proxy
