"""Names of topics and groups in a namespace, as they occur in requests and answers."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from orderedmq.errors import GroupError, ProtocolError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.wire import admin_requests, group_requests, message_requests
from orderedmq.rocketmq.wire.frame import RemotingCommand
from orderedmq.rocketmq.wire.namespaces import NO_NAMESPACES, Namespaces
from orderedmq.rocketmq.wire.request import Request

ACME = Namespaces("acme")
QUEUE = MessageQueue("orders", "a", 1)


@pytest.mark.parametrize(
    ("bare", "spelled"),
    [
        ("orders", "acme%orders"),
        ("acme%orders", "acme%orders"),
        ("%RETRY%billing", "%RETRY%acme%billing"),
        ("%DLQ%billing", "%DLQ%acme%billing"),
        ("%PARKED%billing%orders", "acme%%PARKED%billing%orders"),
        ("CID_billing", "acme%CID_billing"),
        ("CID_RMQ_SYS_TRANS", "CID_RMQ_SYS_TRANS"),
        ("TOOLS_CONSUMER", "TOOLS_CONSUMER"),
        ("SELF_TEST_C_GROUP", "acme%SELF_TEST_C_GROUP"),
        ("SELF_TEST_TOPIC", "SELF_TEST_TOPIC"),
        ("", ""),
    ],
)
def test_a_name_has_the_prefix_where_javas_client_puts_it(bare: str, spelled: str) -> None:
    assert ACME.spelled(bare) == spelled
    assert ACME.spelled(spelled) == spelled
    assert NO_NAMESPACES.spelled(bare) == bare
    if bare != spelled:
        assert ACME.bare(spelled) == bare
        assert Namespaces("other").bare(spelled) == spelled


def test_a_column_of_topics_is_shown_without_the_prefix() -> None:
    topics = ["acme%orders", "%RETRY%acme%billing", "%DLQ%acme%billing", "other%orders", "orders", None]
    shown = ["orders", "%RETRY%billing", "%DLQ%billing", "other%orders", "orders", None]
    assert ACME.bare_column(pa.array(topics)).to_pylist() == shown
    assert NO_NAMESPACES.bare_column(pa.array(topics)).to_pylist() == topics


def test_a_name_that_is_too_long_with_its_namespace_is_refused_before_it_is_sent() -> None:
    with pytest.raises(GroupError, match=r"too long with namespace 'acme'"):
        ACME.request(message_requests.topic_route("t" * 123))


@pytest.mark.parametrize(
    ("request_", "ext"),
    [
        (message_requests.topic_route("orders"), {"topic": "acme%orders"}),
        (message_requests.pull(QUEUE, "billing", 0, 1), {"topic": "acme%orders", "consumerGroup": "acme%billing"}),
        (message_requests.max_offset(QUEUE), {"topic": "acme%orders"}),
        (
            message_requests.send(QUEUE, b"x", "", group="billing", born=0),
            {"a": "acme%billing", "b": "acme%orders", "c": "acme%orders", "n": "a"},
        ),
        (group_requests.consumer_offset("billing", QUEUE), {"topic": "acme%orders", "consumerGroup": "acme%billing"}),
        (group_requests.consumer_list("billing"), {"consumerGroup": "acme%billing"}),
        (admin_requests.delete_group("billing"), {"groupName": "acme%billing"}),
        (admin_requests.create_topic("orders", 4), {"topic": "acme%orders", "defaultTopic": "TBW102"}),
    ],
)
def test_headers_have_the_servers_names(request_: Request[object], ext: dict[str, str]) -> None:
    named = ACME.request(request_)
    assert {name: named.ext[name] for name in ext} == ext
    assert named.ext.keys() == request_.ext.keys()
    assert NO_NAMESPACES.request(request_) is request_


def test_bodies_have_the_servers_names() -> None:
    beat = ACME.request(group_requests.heartbeat("me", "billing", [group_requests.TopicSubscription("orders")], version=1))
    [consumer] = json.loads(bytes(beat.body))["consumerDataSet"]
    assert consumer["groupName"] == "acme%billing"
    assert [one["topic"] for one in consumer["subscriptionDataSet"]] == ["acme%orders"]
    asked = json.loads(bytes(ACME.request(group_requests.lock("billing", "me", [QUEUE])).body))
    assert asked["consumerGroup"] == "acme%billing"
    assert asked["mqSet"] == [{"topic": "acme%orders", "brokerName": "a", "queueId": 1}]
    group = json.loads(bytes(ACME.request(admin_requests.create_group("billing")).body))
    assert group["groupName"] == "acme%billing"


def _answered(request: Request[Any], body: object) -> object:
    return ACME.request(request).answer(RemotingCommand(0, flag=1, body=json.dumps(body).encode()), "server")


def test_answers_have_the_users_names_and_no_other_namespaces() -> None:
    there = [{"topic": "acme%orders", "brokerName": "a", "queueId": 1}]
    assert _answered(group_requests.lock("billing", "me", [QUEUE]), {"lockOKMQSet": there}) == {QUEUE}
    topics = ["acme%orders", "%RETRY%acme%billing", "other%orders", "orders", "TBW102"]
    assert _answered(message_requests.topic_list(), {"topicList": topics}) == ("orders", "%RETRY%billing", "TBW102")
    groups: dict[str, object] = {"acme%billing": {}, "other%billing": {}, "TOOLS_CONSUMER": {}}
    assert _answered(admin_requests.groups(), {"subscriptionGroupTable": groups}) == ("TOOLS_CONSUMER", "billing")
    offsets = {"acme%orders@acme%billing": {"1": 7}, "orders@billing": {"1": 8}}
    assert _answered(group_requests.all_consumer_offsets(), {"offsetTable": offsets}) == {
        "billing": {QUEUE._replace(broker_name=""): 7}
    }


@pytest.mark.parametrize(
    ("request_", "body"),
    [
        (group_requests.lock("billing", "me", [QUEUE]), {"lockOKMQSet": [1]}),
        (group_requests.lock("billing", "me", [QUEUE]), {"lockOKMQSet": [{"topic": 1}]}),
        (group_requests.lock("billing", "me", [QUEUE]), {"lockOKMQSet": 1}),
        (message_requests.topic_list(), {"topicList": [1]}),
        (message_requests.topic_list(), {"topicList": "ab"}),
        (admin_requests.groups(), {"subscriptionGroupTable": [1]}),
        (group_requests.subscriptions("billing"), {"subscriptionTable": [1]}),
        (group_requests.all_consumer_offsets(), {"offsetTable": [1]}),
    ],
)
def test_a_malformed_answer_is_a_named_error(request_: Request[Any], body: object) -> None:
    with pytest.raises(ProtocolError, match=r"PROTOCOL\] the answer of server to the .* cannot be read"):
        _answered(request_, body)


def test_a_server_may_send_half_a_character() -> None:
    assert _answered(message_requests.topic_list(), {"topicList": ["acme%\ud800"]}) == ("\ud800",)


def test_a_namespace_of_version_2_is_in_each_header_and_changes_no_name() -> None:
    request = message_requests.topic_route("orders")
    assert Namespaces(field="acme").request(request).ext == {**request.ext, "nsd": "true", "ns": "acme"}
