"""Refusals by brokers that an account causes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from orderedmq.model import MessageQueue
from orderedmq.rocketmq.wire import rights
from orderedmq.rocketmq.wire.codes import ResponseCode
from orderedmq.rocketmq.wire.frame import RemotingCommand
from orderedmq.rocketmq.wire.message_requests import pull
from orderedmq.rocketmq.wire.request import refusal

ROOT = Path(__file__).parents[2]
#: Refusals by brokers of 5.3.3 and 4.9.7.
SECOND = "User:reader has no permission to access {} from 127.0.0.1, no matched policies."
FIRST = (
    "org.apache.rocketmq.acl.common.AclException: No default permission for {}, "
    "org.apache.rocketmq.acl.plain.PlainPermissionManager.checkPerm(PlainPermissionManager.java:605)"
)


@pytest.mark.parametrize(
    ("code", "remark", "lacks"),
    [
        (ResponseCode.NO_PERMISSION, SECOND.format("Topic:a%b"), True),
        (ResponseCode.SYSTEM_ERROR, SECOND.format("Group:billing"), True),
        (ResponseCode.SYSTEM_ERROR, FIRST.format("topic:a"), True),
        (ResponseCode.SYSTEM_ERROR, FIRST.format("group:billing"), True),
        (ResponseCode.SYSTEM_ERROR, "org.apache.rocketmq.acl.common.AclException: Need admin permission for request code=17", True),
        (ResponseCode.SYSTEM_ERROR, "org.apache.rocketmq.acl.common.AclException: Check signature failed for accessKey=reader", False),
        (ResponseCode.SYSTEM_ERROR, "User:reader is not found.", False),
        (ResponseCode.SYSTEM_ERROR, "check signature failed.", False),
        (ResponseCode.NO_PERMISSION, "the broker[a] sending message is forbidden", False),
    ],
)  # fmt: skip
def test_a_refusal_has_the_brokers_remark_and_names_the_table_of_rights(code: ResponseCode, remark: str, lacks: bool) -> None:
    request = pull(MessageQueue("a", "broker-a", 0), "billing", 0, 1)
    error = refusal(request, RemotingCommand(code, remark=remark), "127.0.0.1:10911")
    assert error.condition == "ORDEREDMQ_ROCKETMQ.NO_PERMISSION"
    assert remark in error.message
    assert rights.is_missing_right(error.message) is lacks
    [heading, guide] = re.findall(r'"([^"]+)" in (\S+)', error.message)[0]
    assert f"\n## {heading}\n" in (ROOT / guide).read_text()
    assert "\n" not in error.message


def test_a_proxy_that_may_not_ask_for_a_group_is_named() -> None:
    request = pull(MessageQueue("a", "broker-a", 0), "billing", 0, 1)
    error = refusal(request, RemotingCommand(ResponseCode.SYSTEM_ERROR, remark="group not found: billing"), "proxy:8080")
    assert error.condition == "ORDEREDMQ_ROCKETMQ.UNAVAILABLE", "the brokers may also be away"
    assert "innerClientAuthenticationCredentials" in error.message
