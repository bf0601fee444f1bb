"""Access control of real brokers, 1.0 (4.9.7) and 2.0 (5.3.3): signed requests are let in, others get an error that says what is missing."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from orderedmq.errors import RocketMQError, ServersError
from orderedmq.filters import Filter
from orderedmq.lock import LockToken
from orderedmq.membership import Subscription
from orderedmq.model import MessageQueue
from orderedmq.reading import Reading
from orderedmq.rocketmq import admin_requests as admin
from orderedmq.rocketmq import group_requests as groups
from orderedmq.rocketmq import requests
from orderedmq.rocketmq.acl import Credentials
from orderedmq.rocketmq.broker import RocketMQBroker
from orderedmq.rocketmq.client import Client
from orderedmq.rocketmq.request import Request
from orderedmq.rocketmq.servers import Cluster
from tests.quick_spark import QUICK_SERVER

#: Keys must have more than six characters.
ADMIN = Credentials("administrator", "secret-of-admin")
#: May read, in the name of one group.
READER = Credentials("reads-for-billing", "secret-of-reader")
QUEUE = MessageQueue("orders", "broker-a", 0)

_AUTH = "org.apache.rocketmq.auth."
_PROPERTIES: dict[str, dict[str, object]] = {
    "4.9.7": {"aclEnable": True},
    "5.3.3": {
        "authenticationEnabled": True,
        "authenticationProvider": f"{_AUTH}authentication.provider.DefaultAuthenticationProvider",
        "authenticationMetadataProvider": f"{_AUTH}authentication.provider.LocalAuthenticationMetadataProvider",
        "authorizationEnabled": True,
        "authorizationProvider": f"{_AUTH}authorization.provider.DefaultAuthorizationProvider",
        "authorizationMetadataProvider": f"{_AUTH}authorization.provider.LocalAuthorizationMetadataProvider",
        "initAuthenticationUser": f'{{"username":"{ADMIN.access_key}","password":"{ADMIN.secret_key}"}}',
        "innerClientAuthenticationCredentials": f'{{"accessKey":"{ADMIN.access_key}","secretKey":"{ADMIN.secret_key}"}}',
    },
}
_PLAIN_ACL = f"""\
accounts:
  - accessKey: {ADMIN.access_key}
    secretKey: {ADMIN.secret_key}
    admin: true
  - accessKey: {READER.access_key}
    secretKey: {READER.secret_key}
    admin: false
    defaultTopicPerm: SUB
    defaultGroupPerm: DENY
    groupPerms:
      - billing=SUB
"""


@pytest.fixture(scope="module", params=list(_PROPERTIES))
def guarded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that lets nobody in without a signature, with a topic."""
    folder: Path = tmp_path_factory.mktemp("guarded")
    try:
        cluster = Cluster(folder, request.param, properties=_PROPERTIES[request.param], jvm=QUICK_SERVER)
        if request.param == "4.9.7":
            conf = cluster.broker.home / "conf"
            conf.mkdir(parents=True)
            (conf / "plain_acl.yml").write_text(_PLAIN_ACL)
        cluster.start()
    except ServersError as error:
        if error.sub == "NO_JARS" and os.environ.get("CI") != "true":
            pytest.skip(str(error))
        raise
    with cluster:
        ask(cluster, ADMIN, admin.create_topic(QUEUE.topic, 1))
        yield cluster


def ask(cluster: Cluster, credentials: Credentials | None, request: Request[Any]) -> Any:
    with Client(cluster.address, credentials=credentials) as client:
        return client.call_address(cluster.broker.address, request, time.monotonic() + 20)


REQUESTS: list[Request[Any]] = [
    requests.send(QUEUE, b"body \xff\x00", "TAGS\x01a\x02n\x01ü\x02", group="producers", born=1),
    requests.pull(QUEUE, "billing", 0, 32),
    groups.heartbeat("me", "billing", [groups.TopicSubscription(QUEUE.topic)], version=1),
    groups.consumer_list("billing"),
    groups.lock("billing", "me", [QUEUE]),
    groups.update_consumer_offset("billing", QUEUE, 0),
    groups.consumer_offset("billing", QUEUE),
    requests.max_offset(QUEUE),
    groups.unlock("billing", "me", [QUEUE]),
    admin.create_topic(QUEUE.topic, 1),
    admin.broker_config(),
]


@pytest.mark.timeout(300)
def test_signed_requests_are_let_in(guarded: Cluster) -> None:
    for request in REQUESTS:
        ask(guarded, ADMIN, request)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "credentials", [None, Credentials("administrator", "not-the-secret"), Credentials("somebody-else", "any-secret")]
)
def test_others_are_refused_by_name_and_once(guarded: Cluster, credentials: Credentials | None) -> None:
    begin = time.monotonic()
    for request in REQUESTS:
        with pytest.raises(RocketMQError) as caught:
            ask(guarded, credentials, request)
        assert caught.value.condition == "ORDEREDMQ_ROCKETMQ.NO_PERMISSION"
        assert request.resource in caught.value.message
        assert "secret-of" not in str(caught.value)
        assert "not-the" not in str(caught.value)
    assert time.monotonic() - begin < 15


@pytest.mark.timeout(300)
def test_an_account_of_one_group_reads_in_its_name(guarded: Cluster) -> None:
    if guarded.version != "4.9.7":
        pytest.skip("the account is written in 4.9's file")
    with RocketMQBroker(guarded.address, credentials=ADMIN) as broker:
        queue = broker.log.queues(QUEUE.topic)[0]
        begin = broker.log.append(queue, pa.record_batch({"body": pa.array([b"x"]), "tags": ["a"]})).begin
    with RocketMQBroker(guarded.address, credentials=READER) as broker:
        for log in (broker.log, broker.log.reading(Reading("shipping"))):
            with pytest.raises(RocketMQError, match="NO_PERMISSION"):
                log.pull(queue, begin, 1, 10, ("body",))
        log = broker.log.reading(Reading("billing"))
        anchor = log.anchor(queue.topic, {queue: begin + 1})
        assert log.pull(queue, begin, 1, 10, ("body",), anchor).column(0).to_pylist() == [b"x"]
        assert log.pull_matching(queue, begin, 1, 10, ("body",), Filter(tags=("a",)), anchor)[1] == begin + 1


@pytest.mark.timeout(300)
def test_a_group_under_access_control(guarded: Cluster) -> None:
    """All that a query does in its group; and who may not is told so at once."""
    with RocketMQBroker(guarded.address, credentials=ADMIN) as broker:
        queue = broker.log.queues(QUEUE.topic)[0]
        me = broker.groups.join("me")
        [member] = broker.groups.heartbeat("billing", me, Subscription("shared", QUEUE.topic, "AVG"))
        assert member.client_id == me.client_id
        token = broker.groups.lock("billing", me, [queue])[queue]
        assert isinstance(token, LockToken)
        broker.groups.commit({token: 0})
        assert broker.groups.offsets("billing", [queue]) == {queue: 0}
        letter = pa.record_batch({"body": pa.array([b"x"])})
        with RocketMQBroker(guarded.address, credentials=ADMIN) as task:
            assert task.groups.dead_letter(token, letter, [0]) == 1
            assert task.groups.dead_letter(token, letter, [0]) == 0
            assert [lock.client_id for lock in task.admin.locks("billing")] == [me.client_id]
    begin = time.monotonic()
    with RocketMQBroker(guarded.address, credentials=Credentials("administrator", "not-the-secret")) as broker:
        me = broker.groups.join("me")
        for call in (
            lambda: broker.groups.heartbeat("billing", me, Subscription("shared", QUEUE.topic)),
            lambda: broker.groups.lock("billing", me, [queue]),
            lambda: broker.groups.offsets("billing", [queue]),
            lambda: broker.groups.members("billing"),
        ):
            with pytest.raises(RocketMQError) as caught:
                call()
            assert caught.value.condition == "ORDEREDMQ_ROCKETMQ.NO_PERMISSION"
            assert "billing" in caught.value.message
            assert "not-the" not in str(caught.value)
    assert time.monotonic() - begin < 15
