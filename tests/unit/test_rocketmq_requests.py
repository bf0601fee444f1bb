"""Requests as the servers expect them, and the meaning of their answers.

Among others: required fields and lower-case booleans, where a pull continues, that no offset is not offset 0, that a batch is marked as a
batch, hashes of tags as in Java, and a code that a Proxy or a VIP port does not support.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orderedmq.endpoint import Credentials
from orderedmq.errors import (
    GroupError,
    MessageError,
    OrderedMQError,
    ProtocolError,
    RocketMQError,
    RocketMQUnavailableError,
    TopicError,
)
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.net.deadline import CONNECT, RETRY, Backoff
from orderedmq.rocketmq.wire import admin_requests, group_requests, message_requests
from orderedmq.rocketmq.wire.codes import RequestCode, ResponseCode
from orderedmq.rocketmq.wire.frame import FrameDecoder, RemotingCommand, encode
from orderedmq.rocketmq.wire.group_requests import TopicSubscription
from orderedmq.rocketmq.wire.message_requests import PullStatus, SendResult, SendStatus
from orderedmq.rocketmq.wire.request import Request, signature, signed
from tests.unit.rocketmq_peer import feed

QUEUE = MessageQueue("T", "a", 3)
#: Each request, with the fields that its header class in RocketMQ marks CFNotNull.
REQUESTS: list[tuple[Request[Any], str]] = [
    (message_requests.topic_route("T"), "topic"),
    (message_requests.cluster_info(), ""),
    (message_requests.topic_list(), ""),
    (message_requests.send(QUEUE, b"x", "", group="g", born=1), "a b c d e f g h"),
    (message_requests.send(QUEUE, b"x", "", group="g", born=1, batch=True), "a b c d e f g h"),
    (message_requests.pull(QUEUE, "g", 7, 32),
     "consumerGroup topic queueId queueOffset maxMsgNums sysFlag commitOffset suspendTimeoutMillis subVersion"),
    (message_requests.max_offset(QUEUE), "topic queueId"),
    (message_requests.min_offset(QUEUE), "topic queueId"),
    (message_requests.search_offset(QUEUE, 5), "topic queueId timestamp"),
    (group_requests.consumer_offset("g", QUEUE), "consumerGroup topic queueId"),
    (group_requests.update_consumer_offset("g", QUEUE, 5), "consumerGroup topic queueId commitOffset"),
    (group_requests.heartbeat("me", "g", [TopicSubscription("T")], version=1), ""),
    (group_requests.unregister("me", "g"), "clientID"),
    (group_requests.consumer_list("g"), "consumerGroup"),
    (group_requests.subscriptions("g"), "consumerGroup"),
    (group_requests.check_client_config("me", "g", TopicSubscription("T", "a > 1", "SQL92")), ""),
    (group_requests.lock("g", "me", [QUEUE]), ""),
    (group_requests.unlock("g", "me", [QUEUE]), ""),
    (admin_requests.create_topic("T", 4), "topic defaultTopic readQueueNums writeQueueNums perm topicFilterType order"),
    (admin_requests.delete_topic("T"), "topic"),
    (admin_requests.delete_topic_in_nameserver("T"), "topic"),
    (admin_requests.create_group("g"), ""),
    (admin_requests.delete_group("g"), "groupName"),
    (admin_requests.groups(), ""),
]  # fmt: skip


def answer(request: Request[Any], code: int = 0, remark: str | None = None, *, body: bytes = b"", **ext: Any) -> Any:
    return request.answer(RemotingCommand(code, 1, 1, remark, ext, body), "host:1")


@pytest.mark.parametrize(
    ("request_", "required"), REQUESTS, ids=lambda value: value.code.name if isinstance(value, Request) else ""
)
def test_trap_3_required_fields_are_there_and_every_field_is_a_text_as_java_writes_it(
    request_: Request[Any], required: str
) -> None:
    assert set(required.split()) <= request_.ext.keys()
    assert all(type(value) is str for value in request_.ext.values())
    assert not {"True", "False", "None"} & set(request_.ext.values())
    (sent,) = feed(FrameDecoder(), encode(RemotingCommand(request_.code, ext=request_.ext, body=request_.body)))
    assert sent.code == request_.code
    # Without a body, a lock request or a heartbeat causes a NullPointerException in the server.
    if not request_.ext and "request for" not in request_.what:
        assert json.loads(bytes(sent.body))


@pytest.mark.parametrize(("request_", "required"), REQUESTS)
def test_every_code_is_an_answer_or_a_named_error(request_: Request[Any], required: str) -> None:
    for code in [*ResponseCode, 99, -5, 2000]:
        error = error_of(request_, code)
        if error is None:
            assert code in request_.accepts
        else:
            assert "\n" not in str(error)
            assert len(str(error)) < 1000
            assert "host:1" in str(error)


def error_of(request: Request[Any], code: int) -> OrderedMQError | None:
    try:
        answer(request, code, "some remark\nof two lines" + "x" * 1000)
    except OrderedMQError as error:
        return error
    return None


@given(
    st.sampled_from([request for request, _ in REQUESTS]),
    st.dictionaries(st.text(), st.text(), max_size=3),
    st.binary(max_size=50) | st.text().map(str.encode),
)
def test_any_answer_is_read_or_a_protocol_error(request: Request[Any], ext: dict[str, str], body: bytes) -> None:
    for code in request.accepts:
        try:
            request.answer(RemotingCommand(code, 1, 1, None, ext, body), "host:1")
        except (ProtocolError, RocketMQError):
            pass


@pytest.mark.parametrize(
    ("code", "remark", "kind", "condition", "retriable"),
    [
        (1, "boom", RocketMQError, "ORDEREDMQ_ROCKETMQ.SERVER_ERROR", False),
        (1, "org.apache.rocketmq.acl.common.AclException: no", RocketMQError, "ORDEREDMQ_ROCKETMQ.NO_PERMISSION", False),
        (1, "connect to 127.0.0.1:9876 failed", RocketMQUnavailableError, "ORDEREDMQ_ROCKETMQ.UNREACHABLE", True),
        (1, "request is not implemented in LocalMessageService", RocketMQError, "ORDEREDMQ_ROCKETMQ.NOT_SUPPORTED", False),
        (1, "name server not ready", RocketMQUnavailableError, "ORDEREDMQ_ROCKETMQ.UNAVAILABLE", True),
        (2, "[REJECTREQUEST]busy", RocketMQUnavailableError, "ORDEREDMQ_ROCKETMQ.BUSY", True),
        (13, None, RocketMQError, "ORDEREDMQ_ROCKETMQ.MESSAGE_ILLEGAL", False),
        (14, None, RocketMQUnavailableError, "ORDEREDMQ_ROCKETMQ.UNAVAILABLE", True),
        (16, None, RocketMQError, "ORDEREDMQ_ROCKETMQ.NO_PERMISSION", False),
        (16, "the topic[T] pulling message is forbidden", RocketMQUnavailableError, "ORDEREDMQ_ROCKETMQ.NOT_READABLE", True),
        (16, "the broker[h] pulling message is forbidden", RocketMQUnavailableError, "ORDEREDMQ_ROCKETMQ.NOT_READABLE", True),
        (17, None, TopicError, "ORDEREDMQ_TOPIC.MISSING", False),
        (23, None, RocketMQError, "ORDEREDMQ_ROCKETMQ.FILTER", False),
        (24, None, RocketMQError, "ORDEREDMQ_ROCKETMQ.FILTER", False),
        (26, None, GroupError, "ORDEREDMQ_GROUP.MISSING", False),
        (29, None, RocketMQError, "ORDEREDMQ_ROCKETMQ.INVALID_PARAMETER", False),
        (215, None, RocketMQUnavailableError, "ORDEREDMQ_ROCKETMQ.BUSY", True),
        (501, None, RocketMQError, "ORDEREDMQ_ROCKETMQ.STATIC_TOPIC", False),
        (1500, None, RocketMQUnavailableError, "ORDEREDMQ_ROCKETMQ.GO_AWAY", True),
        (777, None, RocketMQError, "ORDEREDMQ_ROCKETMQ.SERVER_ERROR", False),
    ],
)
def test_each_response_code_has_its_condition(
    code: int, remark: str | None, kind: type[OrderedMQError], condition: str, retriable: bool
) -> None:
    with pytest.raises(kind) as caught:
        answer(message_requests.max_offset(QUEUE), code, remark)
    assert caught.value.condition == condition
    assert caught.value.retriable is retriable
    if isinstance(caught.value, RocketMQUnavailableError):
        assert not caught.value.outcome_unknown


def test_a_refused_permission_names_resource_and_code() -> None:
    with pytest.raises(RocketMQError) as caught:
        answer(message_requests.pull(QUEUE, "billing", 0, 32), 16, "denied")
    assert all(text in caught.value.message for text in ("topic 'T'", "group 'billing'", "code 16", "denied", "secretKey"))


def test_a_proxy_that_refuses_a_message_for_the_topics_type_is_not_supported() -> None:
    remark = "TopicMessageType validate failed, the expected type is FIFO, but actual type is NORMAL"
    with pytest.raises(RocketMQError) as caught:
        answer(message_requests.send(QUEUE, b"x", "", group="g", born=0, batch=True), 13, remark)
    assert caught.value.sub == "NOT_SUPPORTED"
    assert "topic 'T' has type FIFO" in caught.value.message


@pytest.mark.parametrize(
    ("remark", "condition"),
    [
        ("send request to <127.0.0.1:10911> failed", "CONNECTION_LOST"),
        ("wait response on the channel <127.0.0.1:10911> timeout, 3000(ms)", "TIMEOUT"),
    ],
)
def test_a_send_that_a_proxy_passed_on_without_an_answer_may_be_stored(remark: str, condition: str) -> None:
    with pytest.raises(RocketMQUnavailableError) as caught:
        answer(message_requests.send(QUEUE, b"x", "", group="g", born=0), 1, remark)
    assert caught.value.sub == condition
    assert caught.value.outcome_unknown


def test_a_topic_whose_type_a_proxy_could_not_get_has_no_wrong_type() -> None:
    remark = "TopicMessageType validate failed, the expected type is UNSPECIFIED, but actual type is NORMAL"
    for asked in (message_requests.send(QUEUE, b"x", "", group="g", born=0), message_requests.refused_type(QUEUE)):
        with pytest.raises(RocketMQUnavailableError, match="UNAVAILABLE"):
            answer(asked, 13, remark)


def test_a_proxy_names_the_type_of_a_topic_and_a_broker_does_not() -> None:
    asked = message_requests.refused_type(QUEUE)
    assert asked.ext["e"] == str(2**31 - 1), "no topic may have this queue, because the request must store nothing"
    remark = "TopicMessageType validate failed, the expected type is FIFO, but actual type is NORMAL"
    assert answer(asked, 13, remark) == "FIFO"
    # A broker refuses the queue with code 29 or, before 5.3.2, with the general code 1.
    for code in (29, 1):
        assert answer(asked, code, "request queueId[2147483647] is illegal, TopicConfig [topicName=T]") is None
    with pytest.raises(RocketMQError) as caught:
        answer(asked, 16, "denied")
    assert caught.value.denied


def test_a_brokers_version_is_in_its_answer() -> None:
    assert answer(message_requests.version_of(QUEUE), 0, offset="3") == 409


def test_a_topics_type_is_among_its_attributes_and_normal_by_default() -> None:
    creation = admin_requests.create_topic("T", 2, message_type="FIFO")
    assert creation.ext["attributes"] == "+message.type=FIFO"
    assert "attributes" not in admin_requests.create_topic("T", 2).ext
    asked = admin_requests.topic_config("T")
    numbers = '"readQueueNums":8,"writeQueueNums":4,"perm":6,"topicSysFlag":3,"order":true'
    typed = f'{{"topicName":"T",{numbers},"attributes":{{"message.type":"FIFO","x":"y"}}}}'.encode()
    config = admin_requests.TopicConfig(8, 4, 6, 3, order=True, message_type="FIFO")
    assert answer(asked, 0, body=typed) == config
    assert answer(asked, 0, body=f"{{{numbers}}}".encode()).message_type == "NORMAL"
    put = admin_requests.put_topic("T", config._replace(message_type=None)).ext
    assert (put["readQueueNums"], put["writeQueueNums"], put["topicSysFlag"], put["order"]) == ("8", "4", "3", "true")
    assert "attributes" not in put


def test_trap_17_a_code_that_a_server_does_not_know_has_an_error_of_its_own() -> None:
    with pytest.raises(RocketMQError) as caught:
        answer(admin_requests.create_topic("T", 4), 3)
    assert caught.value.sub == "NOT_SUPPORTED"


def test_trap_4_and_5_a_pull_says_where_to_go_on_and_what_the_bounds_are() -> None:
    pull = message_requests.pull(QUEUE, "g", 7, 1000)
    ext: dict[str, Any] = {"nextBeginOffset": "39", "minOffset": "2", "maxOffset": "100", "suggestWhichBrokerId": "1"}
    result = answer(pull, 0, body=b"messages", **ext)
    assert (result.status, result.next_begin_offset, result.min_offset, result.max_offset) == (PullStatus.FOUND, 39, 2, 100)
    assert (result.suggested_broker_id, result.body) == (1, b"messages")
    statuses = {19: PullStatus.NO_NEW_MESSAGE, 20: PullStatus.NO_MATCHED_MESSAGE, 21: PullStatus.OFFSET_ILLEGAL}
    assert {code: answer(pull, code, **ext).status for code in statuses} == statuses
    for name in ("nextBeginOffset", "minOffset", "maxOffset"):
        with pytest.raises(ProtocolError, match=name):
            answer(pull, 0, **{**ext, name: "many"})


@pytest.mark.parametrize("text", ["", " 1", "1_0", "\u0661", "1.0", "+1", "0x1", "9223372036854775808", "1" * 30])
def test_a_number_is_what_java_writes(text: str) -> None:
    with pytest.raises(ProtocolError):
        answer(message_requests.max_offset(QUEUE), offset=text)
    assert answer(message_requests.max_offset(QUEUE), offset="9223372036854775807") == 2**63 - 1


def test_a_pull_carries_its_subscription_and_is_answered_at_once() -> None:
    ext = message_requests.pull(QUEUE, "g", 0, 1).ext
    assert (ext["sysFlag"], ext["commitOffset"], ext["suspendTimeoutMillis"]) == ("4", "0", "0")


def test_trap_13_code_and_field_of_a_batch_agree() -> None:
    single, batch = (message_requests.send(QUEUE, b"x", "p", group="g", born=1, batch=batch) for batch in (False, True))
    assert (single.code, single.ext["m"]) == (RequestCode.SEND_MESSAGE_V2, "false")
    assert (batch.code, batch.ext["m"]) == (RequestCode.SEND_BATCH_MESSAGE, "true")
    assert not single.repeatable
    assert not batch.repeatable


def test_a_send_names_no_template_by_which_a_broker_makes_a_missing_topic() -> None:
    assert message_requests.send(QUEUE, b"x", "", group="g", born=1).ext["c"] == QUEUE.topic


def test_only_a_dead_letter_says_how_often_it_was_retried() -> None:
    fields = message_requests.send(QUEUE, b"x", "", group="g", born=1, reconsume_times=1, max_reconsume_times=0).ext
    assert (fields["j"], fields["l"]) == ("1", "0")
    usual = message_requests.send(QUEUE, b"x", "", group="g", born=1).ext
    assert usual["j"] == "0"
    assert "l" not in usual


def test_a_body_without_a_byte_is_not_sent() -> None:
    with pytest.raises(MessageError) as caught:
        message_requests.send(QUEUE, b"", "", group="g", born=1)
    assert caught.value.sub == "NULL_BODY"


@pytest.mark.parametrize("status", SendStatus)
def test_a_message_that_waits_for_disk_or_slave_is_stored(status: SendStatus) -> None:
    send = message_requests.send(QUEUE, b"x", "", group="g", born=1)
    result = answer(send, status.value, queueId="3", queueOffset="12", msgId="AB,CD")
    assert result == SendResult(status, 3, 12)


def test_trap_8_no_offset_is_none_and_not_zero() -> None:
    query = group_requests.consumer_offset("g", QUEUE)
    assert query.ext["setZeroIfNotFound"] == "false"
    assert answer(query, 22, "not found") is None
    assert answer(query, 0, offset="0") == 0
    commit = group_requests.update_consumer_offset("g", QUEUE, 5)
    assert answer(commit, 0) is True
    assert answer(commit, 0, "Offset has been previously reset") is False
    with pytest.raises(GroupError):
        answer(commit, 26)


def test_trap_16_tags_hash_as_in_java() -> None:
    heartbeat = group_requests.heartbeat(
        "me", "g", [TopicSubscription("T", "TagB || TagA||é"), TopicSubscription("U")], version=9
    )
    body = json.loads(bytes(heartbeat.body))
    (consumer,) = body["consumerDataSet"]
    first, second = consumer["subscriptionDataSet"]
    # The hash codes of "TagA" and the other tags, from Java.
    assert dict(zip(first["tagsSet"], first["codeSet"])) == {"TagA": 2598919, "TagB": 2598920, "é": 233}
    assert (second["tagsSet"], second["codeSet"], second["subString"]) == ([], [], "*")
    assert (body["clientID"], body["producerDataSet"], consumer["consumeType"]) == ("me", [], "CONSUME_PASSIVELY")
    assert TopicSubscription("T", "a > 1", "SQL92").tags() == []


def test_lists_of_members_are_parsed() -> None:
    members = group_requests.consumer_list("g")
    assert answer(members, body=b'{"consumerIdList":["b","a"]}') == ("a", "b")
    assert answer(members, 1, "no consumer for this group, g") == ()
    # A Proxy's NullPointerException, with and without the JVM's explanation.
    assert answer(members, 1, 'Cannot invoke "ConsumerGroupInfo.getAllClientId()" because "consumerGroupInfo" is null') == ()
    assert answer(members, 1, None) == ()
    with pytest.raises(RocketMQError, match="boom"):
        answer(members, 1, "boom")
    subscriptions = group_requests.subscriptions("g")
    body = b'{"connectionSet":[{"clientId":"b"}],"subscriptionTable":{"T":{"topic":"T","subString":"x"}}}'
    assert answer(subscriptions, body=body) == {"T": TopicSubscription("T", "x")}
    assert answer(subscriptions, 206) == {}


def test_lock_requests_and_answers_are_encoded() -> None:
    lock = group_requests.lock("g", "me", [QUEUE])
    assert json.loads(bytes(lock.body)) == {
        "consumerGroup": "g", "clientId": "me", "onlyThisBroker": False, "mqSet": [{"topic": "T", "brokerName": "a", "queueId": 3}],
    }  # fmt: skip
    assert answer(lock, body=b'{"lockOKMQSet":[{"brokerName":"a","queueId":3,"topic":"T"}]}') == {QUEUE}
    assert answer(lock, body=b'{"lockOKMQSet":[]}') == frozenset()
    with pytest.raises(ProtocolError, match="lock of queues"):
        answer(lock, body=b'{"lockOKMQSet":[1]}')


def test_lists_of_groups_are_parsed() -> None:
    assert answer(admin_requests.groups(), body=b'{"dataVersion":{},"subscriptionGroupTable":{"b":{},"a":{}}}') == ("a", "b")


# --- signature


def test_the_signature_of_the_projects_own_test() -> None:
    assert signature(b"RocketMQ", "12345678") == "IUc8rrO/0gDch8CjObLQsW2rsiA="


def test_the_signature_covers_fields_and_body() -> None:
    account = Credentials("ak-value", "12345678", "token")
    fields = signed({"topic": "Té", "b": "2", "Signature": "old"}, memoryview(b"body"), account)
    assert fields["Signature"] == signature("ak-valuetoken2Té".encode() + b"body", "12345678")
    assert (fields["AccessKey"], fields["SecurityToken"], fields["topic"]) == ("ak-value", "token", "Té")
    assert signed({}, b"", Credentials("ak", "s")).keys() == {"AccessKey", "Signature"}


def test_secrets_are_in_no_repr() -> None:
    account = Credentials("ak-value", "my-secret", "my-token")
    assert "ak-value" in repr(account)
    assert "my-" not in f"{account!r} {account}"


# --- backoff


@given(st.integers(1, 10**9), st.floats(0, 1, exclude_max=True))
def test_waits_grow_within_bounds(failures: int, draw: float) -> None:
    for policy in (CONNECT, RETRY, Backoff(jitter=0.0)):
        delay = policy.delay(failures, draw)
        assert 0 < delay <= policy.most
        assert policy.delay(failures, 0.0) <= policy.delay(failures + 1, 0.0)


def test_a_backoff_doubles_up_to_its_maximum() -> None:
    policy = Backoff(first=0.1, most=1.0, factor=2.0, jitter=0.5)
    assert [policy.delay(failures, 0.0) for failures in range(6)] == [0.0, 0.1, 0.2, 0.4, 0.8, 1.0]
    assert policy.delay(5, 0.5) == 0.75


def test_each_request_for_a_queue_names_its_broker_for_a_proxy() -> None:
    queue = MessageQueue("T", "broker-a", 1)
    for request in (
        message_requests.pull(queue, "g", 0, 1),
        message_requests.min_offset(queue),
        message_requests.max_offset(queue),
        message_requests.search_offset(queue, 0),
        group_requests.consumer_offset("g", queue),
        group_requests.update_consumer_offset("g", queue, 0),
    ):
        assert request.ext["bname"] == "broker-a"
    assert message_requests.send(queue, b"x", "", group="g", born=0).ext["n"] == "broker-a"
