"""What a broker's refusal says about an account's missing rights, and how to grant them."""

from __future__ import annotations

import pytest

from orderedmq.model import MessageQueue
from orderedmq.rocketmq.wire import rights
from orderedmq.rocketmq.wire.codes import RequestCode, ResponseCode
from orderedmq.rocketmq.wire.frame import RemotingCommand
from orderedmq.rocketmq.wire.message_requests import pull
from orderedmq.rocketmq.wire.request import refusal
from orderedmq.rocketmq.wire.rights import MissingRight, Right

#: Refusals by brokers of 5.3.3 and 4.9.7.
SECOND = "User:reader has no permission to access {} from 127.0.0.1, no matched policies."
FIRST = (
    "org.apache.rocketmq.acl.common.AclException: No default permission for {}, "
    "org.apache.rocketmq.acl.plain.PlainPermissionManager.checkPerm(PlainPermissionManager.java:605)"
)


@pytest.mark.parametrize(
    ("code", "said", "found"),
    [
        (RequestCode.PULL_MESSAGE, SECOND.format("Topic:a%b"), MissingRight(2, Right("Topic", "a%b", "Sub"), "reader")),
        (RequestCode.PULL_MESSAGE, SECOND.format("Group:g"), MissingRight(2, Right("Group", "g", "Sub"), "reader")),
        (RequestCode.SEND_BATCH_MESSAGE, SECOND.format("Topic:a"), MissingRight(2, Right("Topic", "a", "Pub"), "reader")),
        (RequestCode.GET_MAX_OFFSET, SECOND.format("Topic:a"), MissingRight(2, Right("Topic", "a", "Get"), "reader")),
        (
            RequestCode.GET_CONSUMER_LIST_BY_GROUP,
            SECOND.format("Group:g"),
            MissingRight(2, Right("Group", "g", "Sub"), "reader", "Get"),
        ),
        (RequestCode.PULL_MESSAGE, FIRST.format("topic:a"), MissingRight(1, Right("Topic", "a", "Sub"))),
        (RequestCode.PULL_MESSAGE, FIRST.format("group:g"), MissingRight(1, Right("Group", "g", "Sub"))),
        (RequestCode.UPDATE_AND_CREATE_TOPIC, "AclException: Need admin permission for request code=17", MissingRight(1, None)),
        (RequestCode.PULL_MESSAGE, "AclException: Check signature failed for accessKey=reader", None),
        (RequestCode.PULL_MESSAGE, "the topic[a] pulling message is forbidden", None),
    ],
)
def test_the_missing_right_is_parsed_from_a_refusal(code: RequestCode, said: str, found: MissingRight | None) -> None:
    assert rights.refusal(code, said) == found


@pytest.mark.parametrize(
    ("code", "remark", "lacks", "remedy"),
    [
        (ResponseCode.NO_PERMISSION, SECOND.format("Group:billing"), "lacks Group:billing Sub. ", "updateAcl -c CLUSTER -s User:reader "),
        (ResponseCode.SYSTEM_ERROR, SECOND.format("Group:billing"), "lacks Group:billing Sub. ", "updateAcl -c CLUSTER -s User:reader "),
        (ResponseCode.SYSTEM_ERROR, "User:reader is not found.", "code 1", "Check the account"),
        (ResponseCode.SYSTEM_ERROR, "check signature failed.", "code 1", "Check the account"),
        (ResponseCode.SYSTEM_ERROR, FIRST.format("group:billing"), "lacks groupPerms billing=SUB. ", "plain_acl.yml"),
        (ResponseCode.SYSTEM_ERROR, "AclException: Need admin permission for request", "lacks admin: true", "an administrator's account"),
        (ResponseCode.NO_PERMISSION, "the broker[a] sending message is forbidden", "code 16", "the permissions of topic and broker"),
    ],
)  # fmt: skip
def test_an_error_names_the_right_and_what_to_type(code: ResponseCode, remark: str, lacks: str, remedy: str) -> None:
    request = pull(MessageQueue("a", "broker-a", 0), "billing", 0, 1)
    error = refusal(request, RemotingCommand(code, remark=remark), "127.0.0.1:10911")
    assert error.condition == "ORDEREDMQ_ROCKETMQ.NO_PERMISSION"
    assert lacks in error.message
    assert remedy in error.message
    assert "\n" not in error.message


def test_a_proxy_that_may_not_ask_for_a_group_is_named() -> None:
    request = pull(MessageQueue("a", "broker-a", 0), "billing", 0, 1)
    error = refusal(request, RemotingCommand(ResponseCode.SYSTEM_ERROR, remark="group not found: billing"), "proxy:8080")
    assert error.condition == "ORDEREDMQ_ROCKETMQ.UNAVAILABLE", "the brokers may also be away"
    assert "innerClientAuthenticationCredentials" in error.message
