"""Real brokers with ACL 1.0 (4.9.7) or 2.0 (5.x): signed requests are accepted; a request without a signature or a right gets an
error that names it.

The module is long because it also tests the documented table of rights, and because all tests share one slow cluster start.
"""

from __future__ import annotations

import json
import operator
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from ordered_sink.commit import BatchWriter
from ordered_source import ConsumeOrderlyContext, ConsumeOrderlyStatus, consume_orderly
from orderedmq.endpoint import Credentials, Endpoint
from orderedmq.errors import RocketMQError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.broker import RocketMQBroker
from orderedmq.rocketmq.group.offsets import GroupOffsets
from orderedmq.rocketmq.local.jars import DEFAULT_VERSION
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.wire import admin_requests as admin
from orderedmq.rocketmq.wire import group_requests as groups
from orderedmq.rocketmq.wire import message_requests
from orderedmq.rocketmq.wire.request import Request
from tests.jars import jars_required
from tests.live.clusters import roles
from tests.live.clusters.accounts import ADMIN, BEHIND_PROXY, PLAIN_ACL, PROPERTIES, Accounts, Right, rights
from tests.live.clusters.roles import Place, Through
from tests.live.rocketmq.proxy import Proxy
from tests.live.rocketmq.rocketmq_proxy import ProxyServer
from tests.quick_spark import QUICK_SERVER
from tests.waits import first_good, soon

QUEUE = MessageQueue("orders", "broker-a", 0)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "guarded" in metafunc.fixturenames:
        # The versions cover ACL 1.0 and 2.0.
        versions = list(PROPERTIES) if metafunc.config.getoption("nightly") else [DEFAULT_VERSION]
        # Releases before 5.0 have no Proxy.
        versions = [version for version in versions if version.startswith("5") or "proxied" not in metafunc.fixturenames]
        metafunc.parametrize("guarded", versions, indirect=True, scope="module")


@pytest.fixture(scope="module")
def guarded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that refuses unsigned requests, with a topic."""
    folder: Path = tmp_path_factory.mktemp("guarded")
    with jars_required():
        cluster = Cluster(folder, request.param, properties=PROPERTIES[request.param], jvm=QUICK_SERVER)
        if request.param == "4.9.7":
            conf = cluster.broker.home / "conf"
            conf.mkdir(parents=True)
            (conf / "plain_acl.yml").write_text(PLAIN_ACL)
        cluster.start()
    with cluster:
        ask(cluster, ADMIN, admin.create_topic(QUEUE.topic, 1))
        ask(cluster, ADMIN, admin.create_topic("invoices", 1))
        with RocketMQBroker(Endpoint(None, cluster.address, credentials=ADMIN)) as broker:
            broker.log.append({QUEUE: roles.row()})
        roles.commit(cluster, ADMIN, "shipping")
        roles.put_aside(cluster, ADMIN, "returns")
        roles.park(cluster, ADMIN, "decided")
        roles.hold(cluster, ADMIN, "held")
        yield cluster


@pytest.fixture(scope="module")
def accounts(guarded: Cluster) -> Iterator[Accounts]:
    accounts = Accounts(guarded)
    yield accounts
    accounts.close()


@pytest.fixture(scope="module")
def proxied(guarded: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Through]:
    """A Proxy in front of the guarded cluster. It checks accounts against the brokers' accounts."""
    with jars_required():
        server = ProxyServer(tmp_path_factory.mktemp("proxied"), guarded, BEHIND_PROXY, credentials=ADMIN)
        server.start()
    yield Through(server.address, guarded)
    server.stop()


def ask(cluster: Cluster, credentials: Credentials | None, request: Request[Any]) -> Any:
    with Client(cluster.address, credentials=credentials) as client:
        return client.call_address(cluster.broker.address, request, soon())


REQUESTS: list[Request[Any]] = [
    message_requests.send(QUEUE, b"body \xff\x00", "TAGS\x01a\x02n\x01ü\x02", group="producers", born=1),
    message_requests.pull(QUEUE, "billing", 0, 32),
    groups.heartbeat("me", "billing", [groups.TopicSubscription(QUEUE.topic)], version=1),
    groups.consumer_list("billing"),
    groups.lock("billing", "me", [QUEUE]),
    groups.update_consumer_offset("billing", QUEUE, 0),
    groups.consumer_offset("billing", QUEUE),
    message_requests.max_offset(QUEUE),
    groups.unlock("billing", "me", [QUEUE]),
    admin.create_topic(QUEUE.topic, 1),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "credentials", [None, Credentials("administrator", "not-the-secret"), Credentials("somebody-else", "any-secret")]
)
def test_unknown_accounts_are_refused_after_one_request(guarded: Cluster, credentials: Credentials | None) -> None:
    with Proxy(guarded.broker.address) as proxy, Client(guarded.address, credentials=credentials) as client:
        for number, request in enumerate(REQUESTS):
            with pytest.raises(RocketMQError) as caught:
                client.call_address(proxy.address, request, soon(60))
            assert caught.value.condition == "ORDEREDMQ_ROCKETMQ.NO_PERMISSION"
            assert request.resource in caught.value.message
            assert "secret-of" not in str(caught.value)
            assert "not-the" not in str(caught.value)
            assert len(proxy.requests()) == number + 1


# --- the documented table of rights


class Role(NamedTuple):
    """``rows``: how the role's rows in the table begin. ``act`` gets a unique name, which replaces ``name`` in the rights."""

    rows: tuple[str, ...]
    act: Callable[[Place, Credentials, str], object]
    name: str = ""


def run(*arguments: str, given: str | None = None) -> Callable[[Place, Credentials, str], object]:
    """Return the role of a command. NAME among its arguments is replaced by the unique name."""
    return lambda cluster, account, name: roles.command(
        cluster, account, *(name if argument == "NAME" else argument for argument in arguments), given=given
    )


def make_topic(cluster: Place, name: str) -> str:
    with RocketMQBroker(Endpoint(None, roles.behind(cluster).address, credentials=ADMIN)) as broker:
        return broker.admin.create_topic(name, 1).name


def delete_topic(cluster: Place, account: Credentials, name: str) -> None:
    roles.command(cluster, account, "topic", "delete", make_topic(cluster, name), "--yes")


def delete_group(cluster: Place, account: Credentials, name: str) -> None:
    roles.commit(roles.behind(cluster), ADMIN, name)
    roles.command(cluster, account, "group", "delete", name)


def new_topic(cluster: Place, account: Credentials, name: str) -> None:
    """Create a topic as the sink does during planning."""
    options = {"namesrvAddr": cluster.address, "accessKey": account.access_key, "secretKey": account.secret_key}
    BatchWriter(
        {**options, "topic": name, "topicQueueNums": "1"},
        StructType().add("body", "string").add("sharding_key", "string"),
        False,
    )


def listen(cluster: Place, account: Credentials, group: str) -> None:
    roles.source(cluster, account, consumerGroup=group)
    assert roles.put_aside(cluster, account, group) == 2


def listen_by_key(cluster: Place, account: Credentials, group: str) -> None:
    roles.make_lots(roles.behind(cluster), ADMIN, group)
    # No source runs here, because it would move the group's offset past the message.
    roles.park(cluster, account, group)
    listen(cluster, account, group)


def topic_with_a_lot(cluster: Place, account: Credentials, name: str) -> None:
    with RocketMQBroker(Endpoint(None, cluster.address, credentials=ADMIN)) as broker:
        broker.log.append({broker.log.queues(make_topic(cluster, name))[0]: roles.row()})
    roles.park(cluster, ADMIN, "billing", name)
    roles.command(cluster, account, "topic", "delete", name, "--yes")


def with_a_lot(act: Callable[[Place, Credentials, str], object]) -> Callable[[Place, Credentials, str], object]:
    """Return the role of a command for the group NAME, which has a parking lot in which every message is settled."""

    def acting(cluster: Place, account: Credentials, name: str) -> object:
        roles.park(cluster, ADMIN, name)
        return act(cluster, account, name)

    return acting


def with_a_held_message(act: Callable[[Place, Credentials, str], object]) -> Callable[[Place, Credentials, str], object]:
    """Return the role of a command for the group NAME, which has a message on hold."""

    def acting(cluster: Place, account: Credentials, name: str) -> object:
        roles.hold(cluster, ADMIN, name)
        return act(cluster, account, name)

    return acting


def beside(*arguments: str) -> Callable[[Place, Credentials, str], object]:
    """Return the role of a command that runs while the group NAME has a member."""
    return lambda cluster, account, name: roles.held(
        cluster, ADMIN, name, account, *(name if argument == "NAME" else argument for argument in arguments)
    )


ROLES: dict[str, Role] = {
    "source": Role(("source of",), lambda cluster, account, _: roles.source(cluster, account, consumerGroup="billing")),
    "source that shares, from a time on": Role(
        ("source of",),
        lambda cluster, account, _: roles.source(
            cluster,
            account,
            consumerGroup="billing",
            assignment="shared",
            startingOffsets=None,
            startingTimestamp="1000",
            tags="A || B",
        ),
    ),
    "source without a group": Role(
        ("source without",), lambda cluster, account, _: roles.source(cluster, account, messageModel="broadcasting")
    ),
    "listener": Role(("source of", "`consume_orderly`"), listen, "billing"),
    "listener with order per key": Role(("source of", "`consume_orderly`", "`OrderPerKey` (+)"), listen_by_key, "billing"),
    "first parked message": Role(("`OrderPerKey`, where",), roles.make_lots, "billing"),
    "source with a parking lot": Role(
        ("source of", "source with `parkingLot"),
        lambda cluster, account, name: roles.source(cluster, account, consumerGroup=name, parkingLot="true"),
        "billing",
    ),
    "source that parked before": Role(
        ("source of", "`parkingLot=false`"),
        lambda cluster, account, name: roles.source(cluster, account, consumerGroup=name),
        "billing",
    ),
    "sink with sinkGroup": Role(
        ("sink to `invoices`, `sinkGroup",),
        lambda cluster, account, name: roles.sink(cluster, account, "invoices", name),
        "billing-out",
    ),
    "sink": Role(("sink to `invoices`, without",), lambda cluster, account, _: roles.sink(cluster, account, "invoices")),
    "write": Role(("batch write",), lambda cluster, account, _: roles.write(cluster, account, "invoices")),
    "new topic": Role(("sink with `topicQueueNums`",), new_topic, "invoices"),
    "topic list": Role(("`topic list`",), run("topic", "list")),
    "topic describe": Role(("`topic describe",), run("topic", "describe", "orders")),
    "peek": Role(("`topic describe",), run("peek", "orders")),
    "peek --follow": Role(("`topic describe",), run("peek", "orders", "--follow", "--last", "1", "--count", "1")),
    "audit": Role(("`topic describe",), run("audit", "orders", "orders")),
    "topic create": Role(("`topic create`",), run("topic", "create", "NAME", "--queues", "1"), "orders"),
    "topic delete": Role(("`topic delete orders`",), delete_topic, "orders"),
    "topic delete with a parking lot": Role(("`topic delete orders`", "`topic delete`, of"), topic_with_a_lot, "orders"),
    "produce": Role(("`produce orders`",), run("produce", "invoices", given="line"), "orders"),
    "produce to a new topic": Role(
        ("`produce orders`", "`produce --queues`"), run("produce", "NAME", "--queues", "1", given="line"), "orders"
    ),
    "group list": Role(("`group list`",), run("group", "list")),
    "lock list": Role(("`lock list`",), run("lock", "list")),
    "top": Role(("`group list`", "`top`, while"), beside("top")),
    "group describe": Role(("`group describe billing`",), beside("group", "describe", "NAME"), "billing"),
    "top of a group": Role(("`group describe billing`",), beside("top", "NAME"), "billing"),
    "lock list of a group": Role(("`lock list --group",), beside("lock", "list", "--group", "NAME"), "billing"),
    "group seek": Role(("`group seek billing`",), run("group", "seek", "shipping", "--to", "2020-01-01T00:00:00Z"), "billing"),
    "group copy": Role(("`group seek billing`",), run("group", "copy", "shipping", "NAME"), "billing"),
    "group seek with parked messages": Role(
        ("`group seek billing`", "`group seek`, of"),
        with_a_lot(run("group", "seek", "NAME", "--to", "earliest", "--parked", "drop")),
        "billing",
    ),
    "group delete": Role(("`group delete billing`",), delete_group, "billing"),
    "group delete with a parking lot": Role(
        ("`group delete billing`", "`group delete`, of"), with_a_lot(run("group", "delete", "NAME")), "billing"
    ),
    "group describe with parked messages": Role(
        ("`group describe billing`", "`group describe`, while"), beside("group", "describe", "NAME"), "billing"
    ),
    "parked list": Role(("`parked list",), run("parked", "list", "NAME"), "billing"),
    "parked hold": Role(("`parked list", "`parked retry"), beside("parked", "hold", "NAME", "--all"), "billing"),
    "parked retry": Role(
        ("`parked list", "`parked retry"), with_a_held_message(beside("parked", "retry", "NAME", "--all")), "billing"
    ),
    "parked drop": Role(
        ("`parked list", "`parked retry"), with_a_held_message(beside("parked", "drop", "NAME", "--all", "--yes")), "billing"
    ),
    "parked replace": Role(
        ("`parked list", "`parked retry"),
        with_a_held_message(beside("parked", "replace", "NAME", "--offset", "0", "--body", "b", "--yes")),
        "billing",
    ),
    "lock release": Role(("`lock release",), beside("lock", "release", "NAME", "--force"), "billing"),
    "dlq list": Role(("`dlq list",), run("dlq", "list", "returns"), "billing"),
    "dlq replay": Role(
        ("`dlq list", "`dlq replay"),
        run("dlq", "replay", "returns", "--offset", "0", "--to-topic", "orders", "--yes"),
        "billing",
    ),
}
#: Roles that use an existing name instead of a unique one.
FIXED = {
    "source that parked before": "decided",
    "source with a parking lot": "decided",
    **dict.fromkeys(("group describe with parked messages", "parked list", "parked hold", "top"), "held"),
    "produce": "invoices",
    "group seek": "shipping",
    "dlq list": "returns",
    "dlq replay": "returns",
}
#: Rights that 4.9 does not check, because it ignores them for SEND_BATCH_MESSAGE.
UNCHECKED = {
    ("4.9.7", who, "PUB")
    for who in (
        "write",
        "produce",
        "produce to a new topic",
        "dlq replay",
        "parked hold",
        "parked retry",
        "parked drop",
        "parked replace",
    )
}


#: Roles of the fast tier: one that reads and commits, and one that writes.
FAST = ("source", "sink with sinkGroup")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("who", [pytest.param(who, marks=[] if who in FAST else [pytest.mark.nightly]) for who in ROLES])
def test_the_rights_of_the_readme_are_enough_and_without_each_of_them_an_error_names_its_resource(
    guarded: Cluster, accounts: Accounts, who: str
) -> None:
    play(ROLES[who], who, guarded, guarded, accounts)


_AT_PROXY = "through a Proxy that"
_SOURCE_AT_PROXY = (_AT_PROXY, "source through such a Proxy")
#: Roles that a Proxy can serve, and the table rows with the additional rights that they need there.
THROUGH_PROXY: dict[str, tuple[str, ...]] = {
    "source": _SOURCE_AT_PROXY,
    "sink with sinkGroup": (_AT_PROXY,),
    "listener with order per key": (_AT_PROXY,),
    "source that shares, from a time on": _SOURCE_AT_PROXY,
    "source without a group": (_AT_PROXY,),
    "listener": _SOURCE_AT_PROXY,
    "source with a parking lot": (_AT_PROXY,),
    "sink": (_AT_PROXY,),
    "write": (_AT_PROXY,),
    "produce": (_AT_PROXY,),
    "peek": (),
}


#: Roles of the fast tier: one that reads and commits, and one that writes.
FAST_THROUGH_PROXY = ("source", "sink with sinkGroup")


@pytest.mark.holds("features through a Proxy")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "who", [pytest.param(who, marks=[] if who in FAST_THROUGH_PROXY else [pytest.mark.nightly]) for who in THROUGH_PROXY]
)
def test_the_rights_through_a_proxy_that_checks_accounts(
    guarded: Cluster, proxied: Through, accounts: Accounts, who: str
) -> None:
    play(ROLES[who], who, proxied, guarded, accounts, THROUGH_PROXY[who])


def play(
    role: Role, who: str, place: Place, guarded: Cluster, accounts: Accounts, through: tuple[str, ...] | None = None
) -> None:
    """Play a role with all its rights, then without each one in turn. ``through``: table rows of a Proxy, which accepts other
    rights instead of Get.
    """

    def own(name: str) -> list[Right]:
        return rights(guarded.version, *role.rows, **({role.name: name} if role.name else {}))

    def given(name: str) -> list[Right]:
        return rights(guarded.version, *role.rows, *(through or ()), **({role.name: name} if role.name else {}))

    names: list[str] = []

    def without(number: int | None) -> tuple[Credentials, str | None]:
        """Act under a unique name without one of the rights. Return the account and the error."""
        name = FIXED.get(who) or f"n-{uuid.uuid4().hex[:8]}"
        names.append(name)
        account = accounts.make([right for at, right in enumerate(given(name)) if at != number])
        return account, refusal(lambda: role.act(place, account, name))

    assert remembered(lambda: without(None))[1] is None
    for number, right in enumerate(given("any")):
        spare = through is not None and right.action == "Get" and right in own("any")
        if spare or (guarded.version, who, right.action) in UNCHECKED:
            continue
        account, said = remembered(lambda: without(number))  # noqa: B023 (called at once)
        missing = given(names[-1])[number]
        assert said is not None, missing
        assert "ORDEREDMQ_ROCKETMQ.NO_PERMISSION" in said, missing
        assert re.search(missing.pattern, said), (missing, said)
        assert account.secret_key not in said


def refusal(act: Callable[[], object]) -> str | None:
    try:
        act()
    except (RocketMQError, roles.Refused) as error:
        return str(error)
    return None


def remembered(act: Callable[[], tuple[Credentials, str | None]]) -> tuple[Credentials, str | None]:
    """Return the result of ``act``, and retry while the broker does not know the account.

    4.9 rereads its accounts file when the file has changed. If the file is being written at that moment, the broker lacks some
    accounts until it reads the file again.
    """
    for _ in range(10):
        account, said = act()
        if said is None or not re.search(r"No acl config for|No PlainAccessResource for|No accessKey is", said):
            break
        time.sleep(1.0)
    return account, said


def left_behind(cluster: Cluster) -> tuple[set[str], dict[str, int]]:
    """Return the groups and topics that a broker knows, and the end offsets of two topics.

    The servers make a group of their own for the heartbeats of proxies when they have been up for a while.
    """
    configured = ask(cluster, ADMIN, admin.groups())
    offsets = ask(cluster, ADMIN, groups.all_consumer_offsets())
    with Client(cluster.address) as client:
        names = {*configured, *offsets, *client.topics(soon())} - {"CID_DefaultHeartBeatSyncerTopic@broadcast"}
    ends = {
        topic: ask(cluster, ADMIN, message_requests.max_offset(QUEUE._replace(topic=topic))) for topic in ("orders", "invoices")
    }
    return names, ends


@pytest.mark.timeout(300)
def test_a_sink_that_lacks_a_right_leaves_no_group_and_no_message(guarded: Cluster, accounts: Accounts) -> None:
    """Each query is a different sink with its own group."""
    before = left_behind(guarded)
    reads = [right for right in rights(guarded.version, "source without") if not right.is_of_topic]
    for name, row in ((None, "sink to `invoices`, without"), ("billing-none", "sink to `invoices`, `sinkGroup")):
        every = rights(guarded.version, row, **{"billing-out": "billing-none"})
        for missing in every:
            account = accounts.make([*(right for right in every if right != missing), *reads])
            for _ in range(2):
                with pytest.raises(RocketMQError, match="NO_PERMISSION"):
                    roles.sink(guarded, account, "invoices", name)
    assert left_behind(guarded) == before


@pytest.mark.timeout(300)
def test_a_source_or_listener_that_lacks_a_right_leaves_no_group_and_no_message(guarded: Cluster, accounts: Accounts) -> None:
    before = left_behind(guarded)
    every = rights(guarded.version, "source of", billing="billing-none")
    for missing in every:
        account = accounts.make([right for right in every if right != missing])
        with pytest.raises(RocketMQError, match="NO_PERMISSION"):
            roles.source(guarded, account, consumerGroup="billing-none")
    assert left_behind(guarded) == before
    # No message was parked yet, and the lots do not exist.
    with pytest.raises(RocketMQError, match="%PARKED%billing-none%orders"):
        roles.source(guarded, accounts.make(every), consumerGroup="billing-none", parkingLot="true")
    assert left_behind(guarded) == before
    with_lots = rights(guarded.version, "source of", "source with `parkingLot", billing="billing-none")
    roles.source(guarded, accounts.make(with_lots), consumerGroup="billing-none", parkingLot="true")
    # This account may read, but may not check whether a message already has a dead letter.
    roles.source(guarded, accounts.make(every), consumerGroup="billing-none")
    before = left_behind(guarded)
    with pytest.raises(RocketMQError, match="%DLQ%billing-none"):
        roles.put_aside(guarded, accounts.make(every), "billing-none")
    assert left_behind(guarded) == before
    # It may not park a message either.
    with pytest.raises(RocketMQError, match="%PARKED%billing-none%orders"):
        roles.park(guarded, accounts.make(every), "billing-none")
    assert left_behind(guarded) == before


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kept", ["orders", "%PARKED%billing%orders"])
def test_a_deletion_that_is_refused_keeps_what_is_parked(guarded: Cluster, accounts: Accounts, kept: str) -> None:
    """ACL 1.0 refuses both deletions; with ACL 2.0 the account lacks Delete on the topic or on its parking lots."""
    name = f"n-{uuid.uuid4().hex[:8]}"
    every = rights(guarded.version, "`topic delete orders`", "`topic delete`, of", "`parked list")
    given = [right for right in every if right not in (Right(f"Topic:{kept}", "Delete"), Right("admin", "true"))]
    with RocketMQBroker(Endpoint(None, guarded.address, credentials=ADMIN)) as broker:
        broker.log.append({broker.log.queues(make_topic(guarded, name))[0]: roles.row()})
        roles.park(guarded, ADMIN, "billing", name)
        [lot] = broker.log.queues(f"%PARKED%billing%{name}")

        def delete() -> tuple[Credentials, str | None]:
            account = accounts.make([Right(right.resource.replace("orders", name), right.action) for right in given])
            return account, refusal(lambda: roles.command(guarded, account, "topic", "delete", name, "--yes"))

        said = remembered(delete)[1]
        assert said is not None
        assert "ORDEREDMQ_ROCKETMQ.NO_PERMISSION" in said
        assert broker.log.bounds([lot])[lot].max_offset == 1
        assert broker.groups.offsets("billing", [lot]) == {lot: 1}
        if guarded.version.startswith("5") and kept != "orders":
            assert f"topic '{name}' is deleted, but not its parking lots ({lot.topic})" in said
            # Parked messages of a deleted topic can never be processed, so its lots can be deleted although a message is parked again.
            GroupOffsets(broker._checked).write("billing", {lot: 0})
            broker.admin.delete_topic(lot.topic)
            assert lot.topic not in {topic.name for topic in broker.log.topics()}


@pytest.mark.timeout(300)
def test_a_group_whose_deletion_is_refused_keeps_what_is_parked(guarded: Cluster, accounts: Accounts) -> None:
    """ACL 1.0 refuses everything; with ACL 2.0 the account lacks Delete on the group, and then on its parking lots."""
    name = f"n-{uuid.uuid4().hex[:8]}"
    every = rights(guarded.version, "`group delete billing`", "`group delete`, of", billing=name)
    lots = f"%PARKED%{name}%orders"
    roles.hold(guarded, ADMIN, name)

    def delete(*missing: Right) -> str | None:
        def act() -> tuple[Credentials, str | None]:
            account = accounts.make([right for right in every if right not in missing])
            return account, refusal(lambda: roles.command(guarded, account, "group", "delete", name, "--force"))

        return remembered(act)[1]

    with RocketMQBroker(Endpoint(None, guarded.address, credentials=ADMIN)) as broker:
        [lot] = broker.log.queues(lots)
        for kept in (f"Group:{name}", f"Topic:{lots}"):
            said = delete(Right(kept, "Delete"), Right("admin", "true"))
            assert said is not None
            assert "ORDEREDMQ_ROCKETMQ.NO_PERMISSION" in said
            assert broker.log.bounds([lot])[lot].max_offset == 1
            assert broker.groups.offsets(name, [QUEUE]) == {QUEUE: 1}
            if guarded.version.startswith("5") and kept.startswith("Topic"):
                assert f"the parking lots of group '{name}' ({lots}) are not deleted, and its offsets are kept" in said
        assert delete() is None
        assert lots not in {topic.name for topic in broker.log.topics()}
        assert name not in broker.admin.groups()


@pytest.mark.holds("renewed account")
@pytest.mark.timeout(300)
def test_an_account_expires_while_queries_run_and_none_of_them_notices(
    guarded: Cluster, accounts: Accounts, spark: SparkSession, tmp_path: Path
) -> None:
    """A listener runs between source and sink. The connections of driver and workers stay open, but their requests are refused."""
    topics = [f"{name}-{uuid.uuid4().hex[:8]}" for name in ("in", "out")]
    given = rights(
        guarded.version,
        "source of",
        "`consume_orderly`",
        "sink to `invoices`, `sinkGroup",
        orders=topics[0],
        invoices=topics[1],
    )
    with RocketMQBroker(Endpoint(None, guarded.address, credentials=ADMIN)) as broker:
        for topic in topics:
            broker.admin.create_topic(topic, 1)
        [source], [target] = map(broker.log.queues, topics)

        def written() -> list[bytes]:
            return broker.log.pull(target, 0, 1000, 1 << 20, ("body",)).column(0).to_pylist()

        def renew() -> Credentials:
            account = accounts.make(given)
            new = tmp_path / "new.json"
            new.write_text(json.dumps({"accessKey": account.access_key, "secretKey": account.secret_key}))
            new.chmod(0o600)
            new.replace(tmp_path / "account.json")
            return account

        def listener(messages: Sequence[Any], context: ConsumeOrderlyContext) -> ConsumeOrderlyStatus:
            return ConsumeOrderlyStatus.SUCCESS

        former = renew()
        options = {"namesrvAddr": guarded.address, "credentialsFile": str(tmp_path / "account.json")}
        rows = (
            spark.readStream.format("orderedmq")
            .options(**options, topic=topics[0], consumerGroup="billing", includeLockToken="true")
            .load()
        )
        outcomes = rows.transform(consume_orderly, listener)
        bodies = outcomes.selectExpr("'none' AS sharding_key", "CAST(CAST(begin_offset AS STRING) AS BINARY) AS body")
        writer = bodies.writeStream.format("orderedmq").options(**options, topic=topics[1], sinkGroup="billing-out")
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        try:
            for number in range(3):
                broker.log.append({source: roles.row()})
                first_good(lambda: len(written()), partial(operator.eq, number + 1), 60)
                following = renew()
                accounts.end(former)
                former = following
            assert query.exception() is None
        finally:
            query.stop()
        assert written() == [b"0", b"1", b"2"]
