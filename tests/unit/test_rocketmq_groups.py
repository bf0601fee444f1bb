"""Rules of queue locks over RocketMQ's lock table, and what members report about themselves. These tests start no server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ordered_source.group_session import held_by_other_error
from orderedmq.conditions import UnavailableCondition
from orderedmq.errors import GroupError, ProtocolError, RocketMQUnavailableError
from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import LockToken, Refusal
from orderedmq.ownership.membership import Member, Subscription
from orderedmq.parking import lot_token
from orderedmq.rocketmq.group import lock_rules, membership, running_info
from orderedmq.rocketmq.group.dead_letters import key_of
from orderedmq.rocketmq.group.groups import RocketMQGroups
from orderedmq.rocketmq.group.locks import Commits, HeldLock, HeldLocks, by_broker, by_group
from orderedmq.rocketmq.group.offsets import GroupOffsets
from orderedmq.rocketmq.group.roster import Roster
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.wire.group_requests import TopicSubscription
from orderedmq.rocketmq.wire.namespaces import NO_NAMESPACES
from orderedmq.rocketmq.wire.route import BrokerData, Route
from tests.unit.rocketmq_peer import Cluster as Peers
from tests.unit.rocketmq_peer import Link
from tests.waits import until

QUEUE = MessageQueue("orders", "broker-a", 3)
#: The answer of a Java 5.3.3 client, without the fields that are not read.
JAVA = b"""{"mqPopTable":{},"mqTable":{{"brokerName":"broker-a","queueId":0,"topic":"orders"}:{"cachedMsgCount":0,"commitOffset":-1,
"droped":false,"lastLockTimestamp":1795284830736,"locked":true,"tryUnlockTimes":0},{"brokerName":"broker-a","queueId":1,"topic":"orders"}:
{"droped":false,"lastLockTimestamp":0,"locked":false},{"brokerName":"broker-a","queueId":2,"topic":"orders"}:{"droped":true,
"lastLockTimestamp":1795284830736,"locked":true}},"properties":{"consumeMessageBatchMaxSize":"1","PROP_CONSUMER_START_TIMESTAMP":
"1795284828828","PROP_CONSUME_TYPE":"CONSUME_PASSIVELY","messageModel":"CLUSTERING","allocateMessageQueueStrategy":
"org.apache.rocketmq.client.consumer.rebalance.%s@5caa1d65"},"statusTable":{},"subscriptionSet":[{"classFilterMode":false,"codeSet":[],
"expressionType":"TAG","subString":"*","subVersion":1795284825706,"tagsSet":[],"topic":"orders"},{"classFilterMode":false,"codeSet":[],
"expressionType":"TAG","subString":"*","subVersion":1795284825706,"tagsSet":[],"topic":"%%RETRY%%g"}]}"""


def token(client_id: str = "c", epoch: int = 2, queue: MessageQueue = QUEUE) -> LockToken:
    return LockToken("g", queue, "q", client_id, epoch, epoch)


# -- names and epochs -------------------------------------------------------------------------------------------------------------


@given(st.text())
def test_runs_of_a_query_have_one_name_for_locks_and_ids_of_their_own(owner: str) -> None:
    one, two = lock_rules.new_client(owner), lock_rules.new_client(owner)
    assert one.owner == owner
    assert one.client_id != two.client_id
    assert lock_rules.is_ours(one.client_id)
    assert lock_rules.query_of(one.client_id) == lock_rules.query_of(two.client_id) == lock_rules.query_name(owner)
    assert one.client_id.isascii()
    assert one.client_id.isprintable()
    assert len(one.client_id) < 255
    assert lock_rules.query_of("10.0.0.1@12#34") == "10.0.0.1@12#34"


@given(st.text(), st.text())
def test_two_queries_have_two_names(one: str, other: str) -> None:
    assert (lock_rules.query_name(one) == lock_rules.query_name(other)) == (one == other)


def test_a_query_takes_its_own_name_as_long_as_no_other_run_is_there() -> None:
    mine, again, other = (lock_rules.new_client(owner).client_id for owner in ("a", "a", "b"))
    assert lock_rules.is_only_run(mine, [])
    assert lock_rules.is_only_run(mine, [mine, other, "10.0.0.1@12#34"])
    assert not lock_rules.is_only_run(mine, [mine, again])


def test_a_lock_is_in_the_querys_name_or_the_clients() -> None:
    client_id = lock_rules.new_client("a").client_id
    assert lock_rules.lock_name(client_id, only_run=True) == lock_rules.query_name("a")
    assert lock_rules.lock_name(client_id, only_run=False) == client_id
    assert set(lock_rules.lock_names(client_id)) == {client_id, lock_rules.query_name("a")}
    assert lock_rules.lock_names("10.0.0.1@12#34") == ("10.0.0.1@12#34",)


@given(st.lists(st.integers(0, 2**60), max_size=50))
def test_epochs_grow_and_lie_above_the_fence(fences: list[int]) -> None:
    epochs, last, mine = lock_rules.Epochs(), 0, lock_rules.new_client("a").client_id
    for fence in fences:
        epoch = epochs.next(fence, mine)
        assert epoch > max(lock_rules.last_epoch(fence), last)
        assert lock_rules.last_epoch(lock_rules.fence_of(epoch)) == lock_rules.last_epoch(epoch) == epoch
        last = epoch


@given(st.integers(0, 2**60), st.booleans())
def test_a_fence_shows_whether_another_query_owns_the_queue(fence: int, given_back: bool) -> None:
    mine, again, others = (lock_rules.new_client(owner).client_id for owner in ("a", "a", "b"))
    epoch = lock_rules.Epochs().next(fence, mine)
    fence = epoch if given_back else lock_rules.fence_of(epoch)
    assert lock_rules.is_owned_by_other(fence, others) is not given_back
    assert not lock_rules.is_owned_by_other(fence, again)
    freed = lock_rules.freed(fence)
    assert freed > epoch
    assert not lock_rules.is_owned_by_other(freed, others)


@pytest.mark.parametrize("name", ["", "a b", "x" * 121, "x" * 200])
def test_invalid_group_names_are_refused(name: str) -> None:
    with pytest.raises(GroupError, match="BAD_NAME"):
        lock_rules.check_name(name)
    lock_rules.check_name("x" * 120)


# -- offsets ------------------------------------------------------------------------------------------------------------------------


def test_no_first_offset_of_a_group_is_lost_where_those_that_arrive_together_overwrite_each_other() -> None:
    """Real brokers lost a first offset in 4 of 300 groups: they use no lock, so two requests can each create a table of offsets."""
    queues = [MessageQueue("T", "a", number) for number in range(5)]
    table: dict[int, int] = {}

    def script(link: Link) -> None:
        while True:
            together = link.read_all()
            if not table:
                table.update({int(together[-1].ext["queueId"]): 7})
            else:
                table.update({int(request.ext["queueId"]): 7 for request in together})
            for request in together:
                link.reply(request)

    with Peers() as cluster:
        cluster.scripted("a", script)
        with Client(cluster.nameserver().address) as client:
            assert GroupOffsets(client).write("g", dict.fromkeys(queues, 7)) == []
    assert table == {queue.queue_id: 7 for queue in queues}


# -- held locks ---------------------------------------------------------------------------------------------------------------------


def test_a_lock_is_trusted_for_thirty_seconds() -> None:
    mine = HeldLock(token(), 100.0)
    assert mine.trusted(130.0)
    assert not mine.trusted(130.001)
    assert mine.trusted(131.0, 60.0)


def test_held_locks_know_the_last_token_of_each_client() -> None:
    held_locks = HeldLocks()
    old, new, others = token(epoch=2), token(epoch=4), token("d", epoch=6)
    for one in (old, new, others):
        held_locks.put(HeldLock(one, 0.0))
    assert held_locks.own(old) is None
    assert held_locks.own(new) is not None
    held_locks.forget(old)
    assert held_locks.own(new) is not None, "an older token must not remove a newer one"
    assert held_locks.clients("g") == {"c", "d"}
    assert len(held_locks.of_queue("g", QUEUE)) == 2
    held_locks.forget(new)
    assert held_locks.of_client("c") == []
    assert held_locks.clients("h") == set()


def test_a_fence_is_asked_for_again_after_a_second() -> None:
    held_locks, mine, others = HeldLocks(), token(), token("d")
    held_locks.put(HeldLock(mine, 0.0))
    assert held_locks.must_read_fence(mine, 10.0, 1.0), "the fence was not read yet"
    held_locks.record_fences_read([mine, others], [], 10.0)
    assert not held_locks.must_read_fence(mine, 10.9, 1.0)
    assert held_locks.must_read_fence(mine, 11.0, 1.0)
    assert held_locks.must_read_fence(mine, 10.0, 0.0), "commits and tasks must always read the fence"
    assert held_locks.must_read_fence(others, 10.0, 1.0), "the lock of another process is not known here"
    held_locks.record_fences_read([mine], [mine], 10.5)
    assert held_locks.must_read_fence(mine, 10.5, 1.0), "a fenced lock must be checked until it is forgotten"
    held_locks.record_fences_read([mine], [], 10.5)
    again = token(epoch=4)
    held_locks.put(HeldLock(again, 10.6))
    assert held_locks.must_read_fence(mine, 10.6, 1.0)
    assert held_locks.must_read_fence(again, 10.6, 1.0)


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        (
            Refusal(QUEUE, "q1", "q1@h", True, False, 40.0),
            ("belong to query q1 (q1@h), which is alive", "ends in 40 s", "foreachBatch"),
        ),
        (Refusal(QUEUE, "q1", "q1@h", None, False, 40.0), ("not known to be alive",)),
        (Refusal(QUEUE, "q1", "q1@h", None, True, 40.0), ("query q1 (q1@h), which stopped in the middle of a batch",)),
        (Refusal(QUEUE, "", "", None, False, 60.0), ("held by a client that is not a member of the group", "ends within 60 s")),
        (
            Refusal(QUEUE, "", "a, b", None, False, 60.0),
            ("member of the group (a, b), or a client that has exited", "within 60 s"),
        ),
    ],
)
def test_the_error_of_a_refused_query_names_the_owners_of_its_queues(refusal: Refusal, words: tuple[str, ...]) -> None:
    error = held_by_other_error("billing", [refusal], 4, "this")
    assert error.condition == "ORDEREDMQ_LOCK.HELD_BY_OTHER"
    for word in ("1 of 4 queues of group 'billing'", str(QUEUE), "a separate consumerGroup", *words):
        assert word in error.message
    assert "unknown" not in error.message
    assert "\n" not in error.message


class Written:
    """Records a group's numbers. ``writes`` has the queues of each write."""

    def __init__(self) -> None:
        self.numbers: dict[MessageQueue, int] = {}
        self.writes: list[list[MessageQueue]] = []

    def read(self, group: str, queues: Sequence[MessageQueue], seconds: float = 0.0) -> dict[MessageQueue, int]:
        return {queue: self.numbers[queue] for queue in queues if queue in self.numbers}

    def move(self, group: str, offsets: Mapping[MessageQueue, int], held: object, seconds: float = 0.0) -> None:
        self.writes.append(list(offsets))
        self.numbers.update(offsets)


def test_a_lots_offset_is_written_before_its_queues_also_after_a_broker_forgot_both() -> None:
    """A reader that finds only the lot's offset repeats the queue's range, but no older parked messages."""
    written, locks, lot = Written(), HeldLocks(), lot_token(token())
    commits = Commits(cast(GroupOffsets, written), locks)
    locks.put(HeldLock(token(), 0.0))
    commits.move({token(): 8, lot: 3})
    assert written.writes == [[lot.queue], [QUEUE]]
    written.numbers = {QUEUE: 7, lot.queue: 1}
    assert commits.repeat([locks.own(token())], 1.0) == []  # type: ignore[list-item]
    assert written.writes[2:] == [[lot.queue], [QUEUE]]
    assert written.numbers == {QUEUE: 8, lot.queue: 3}
    commits.move({token(): 9})
    assert written.writes[4:] == [[QUEUE]]


@pytest.mark.holds("no silent loss of parked messages")
def test_a_lot_without_an_offset_does_not_get_the_offset_of_a_former_lot() -> None:
    """It may be a new lot, whose parked messages the offset would hide."""
    written, locks, lot = Written(), HeldLocks(), lot_token(token())
    commits = Commits(cast(GroupOffsets, written), locks)
    locks.put(lock := HeldLock(token(), 0.0))
    commits.move({token(): 8, lot: 3})
    written.numbers = {QUEUE: 7}
    assert commits.repeat([lock], 1.0) == []
    assert written.numbers == {QUEUE: 8}


def test_tokens_by_group_and_broker() -> None:
    elsewhere = token(queue=QUEUE._replace(broker_name="broker-b"))
    assert by_broker([token(), elsewhere, token("d")]) == [[token(), token("d")], [elsewhere]]
    assert by_group([token(), elsewhere]) == {"g": [token(), elsewhere]}


# -- what members report ------------------------------------------------------------------------------------------------------------


@given(st.text(), st.text(), st.none() | st.text(), st.integers(0, 2**53))
def test_the_report_of_a_member_is_decoded_as_it_was(owner: str, topics: str, strategy: str | None, joined: int) -> None:
    client = lock_rules.new_client(owner)
    member = Member(
        owner,
        client.client_id,
        Subscription("shared", topics, strategy),
        joined,
        running_info.now(),
        running_info.CHANNEL_LIFE,
    )
    has = token(client.client_id)
    info = running_info.decode(client.client_id, running_info.encode(member, [], [(has, 12.5)], 1))
    assert info.member == member
    assert info.held == (running_info.HeldQueue(QUEUE, 12.5, 2, 2),)


@pytest.mark.parametrize(
    ("java", "ours"),
    [
        (b"AllocateMessageQueueAveragely", "AVG"),
        (b"AllocateMessageQueueAveragelyByCircle", "AVG_BY_CIRCLE"),
        (b"AllocateMessageQueueConsistentHash", "CONSISTENT_HASH"),
        (b"MyOwn", "MyOwn"),
    ],
)
def test_the_report_of_a_java_consumer_has_topics_strategy_and_locks(java: bytes, ours: str) -> None:
    info = running_info.decode("10.0.0.1@12#34", JAVA % java)
    assert info.member.subscription == Subscription("shared", "orders", ours)
    assert info.member.joined == 1795284828828000
    assert info.held == (running_info.HeldQueue(QUEUE._replace(queue_id=0), 1795284830.736),)


@pytest.mark.parametrize(
    ("read", "filter_", "kind"),
    [
        ([], "*", "TAG"),
        ([("orders", "", "TAG")], "*", "TAG"),
        ([("orders", "b||a", "TAG"), ("bills", " a || b ", "TAG")], "a || b", "TAG"),
        ([("orders", "b", "TAG"), ("bills", "a", "TAG")], "a; b", "TAG"),
        ([("orders", " a > 5 ", "SQL92"), ("%RETRY%g", "*", "TAG")], "a > 5", "SQL92"),
    ],
)
def test_filters_of_other_clients_are_compared_by_meaning(read: list[tuple[str, str, str]], filter_: str, kind: str) -> None:
    subscription = running_info.subscription_of([TopicSubscription(*fields) for fields in read], "AVG")
    assert (subscription.filter, subscription.filter_type) == (filter_, kind)


def test_a_heartbeat_says_the_filter_but_not_of_retries() -> None:
    wanted = Subscription("shared", "bills,orders", "AVG", "a > 5", "SQL92")
    assert running_info.subscriptions("g", ["bills", "orders"], wanted) == [
        TopicSubscription("bills", "a > 5", "SQL92"),
        TopicSubscription("orders", "a > 5", "SQL92"),
        TopicSubscription("%RETRY%g"),
    ]


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"properties":[]}', b'{"properties":{"orderedmq":"{}"}}', b'{"properties":{"orderedmq":"1"}}']
)
def test_a_malformed_report_is_a_protocol_error(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        running_info.decode(lock_rules.new_client("a").client_id, body)


@pytest.mark.holds("newer format")
@pytest.mark.parametrize("more", [{}, {"locks": "another form"}, {"subscription": {"format": 2, "quorum": 3}}])
def test_a_member_of_a_newer_version_disagrees_whatever_else_it_reports(more: dict[str, Any]) -> None:
    client_id = lock_rules.new_client("a").client_id
    subscription = {"assignment": "shared", "topics": "orders", "strategy": "AVG", "format": 2}
    own = {"owner": "a", "subscription": subscription, "joined": 7, "renewed": 1.0, "locks": [], **more}
    info = running_info.decode(client_id, json.dumps({"properties": {running_info.OURS: json.dumps(own)}}).encode())
    assert (info.member.client_id, info.member.joined) == (client_id, 7)
    assert Subscription("shared", "orders", "AVG").differences(info.member.subscription) == [
        "group format 1 of its version of orderedmq, not 2"
    ]


def test_a_silent_member_counts_as_agreeing() -> None:
    mine = Subscription("shared", "orders", "AVG")
    client_id = lock_rules.new_client("a").client_id
    assert running_info.silent_member(client_id, mine).subscription == mine
    assert running_info.silent_member("10.0.0.1@12#34", None).subscription.topics == ""


@pytest.mark.parametrize(
    ("text", "topics", "read", "agrees"),
    [
        ("orders", ["orders"], "orders", True),
        ("or.*|bills", ["bills", "orders"], "bills,orders", True),
        ("or.*|bills", ["bills", "orders"], "orders", False),
        ("or.*|bills", ["orders"], "bills,orders", False),
        ("orders", ["orders"], "bills", False),
    ],
)
@pytest.mark.parametrize("strategy", [None, "AVG"])
def test_a_stranger_names_topics_where_ours_have_a_pattern(
    text: str, topics: list[str], read: str, agrees: bool, strategy: str | None
) -> None:
    mine = Subscription("shared", text, "AVG")
    stranger = Member("java", "10.0.0.1@12#34", Subscription("shared", read, strategy), 1, running_info.now())
    assert (running_info.with_like_texts(stranger, mine, topics).subscription == mine) == agrees
    by_circle = replace(stranger, subscription=Subscription("shared", read, "AVG_BY_CIRCLE"))
    assert running_info.with_like_texts(by_circle, mine, topics).subscription.strategy == "AVG_BY_CIRCLE"
    assert running_info.with_like_texts(stranger, None, topics) == stranger


@pytest.mark.holds("agreement")
@pytest.mark.parametrize(
    ("orderly", "parking_lot", "agrees"), [("true", False, True), ("true", True, False), ("false", False, False)]
)
def test_a_java_consumer_agrees_if_it_is_orderly_and_the_query_parks_no_messages(
    orderly: str, parking_lot: bool, agrees: bool
) -> None:
    """A Java consumer reads no parking lots. A concurrent one sends messages back, to a queue of the retry topic that a query may own."""
    java = (JAVA % b"AllocateMessageQueueAveragely").replace(
        b'"properties":{', b'"properties":{"PROP_CONSUMEORDERLY":"%s",' % orderly.encode()
    )
    info = running_info.decode("10.0.0.1@12#34", java)
    assert bool(info.held) is (orderly == "true"), "a concurrent consumer reports all its queues as locked"
    like = Subscription("shared", "orders", "AVG", parking_lot=parking_lot)
    subscription = running_info.with_like_texts(info.member, like, ["orders"]).subscription
    assert (like.differences(subscription) == []) is agrees


def test_ours_agree_by_the_pattern_while_one_has_not_listed_a_new_topic_yet() -> None:
    mine = Subscription("shared", "or.*", "AVG")
    other = Member("q", lock_rules.new_client("q").client_id, mine, 1, running_info.now())
    for topics in (["orders"], ["orders", "orders-2"]):
        assert running_info.with_like_texts(other, mine, topics).subscription == mine
    named = replace(other, subscription=Subscription("shared", "orders", "AVG"))
    assert running_info.with_like_texts(named, mine, ["orders"]).subscription != mine


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("orders", ["orders"]),
        ("orders,bills", ["bills", "orders"]),
        ("orders,nothing", ["orders"]),
        ("or.*", ["orders"]),
        (".*", ["bills", "orders"]),
        ("orders|bills", ["bills", "orders"]),
        ("%DLQ%g", ["%DLQ%g"]),
        ("[", []),
        ("nothing", []),
    ],
)
def test_topics_of_a_subscription(text: str, found: list[str]) -> None:
    assert running_info.topics_of(text, ["orders", "bills", "%DLQ%g", "%RETRY%g"]) == found


def test_the_key_of_a_dead_letter_is_its_identity() -> None:
    keys = {
        key_of(group, queue, offset)
        for group in ("g", "h")
        for queue in (QUEUE, QUEUE._replace(queue_id=4))
        for offset in (0, 1)
    }
    assert len(keys) == 8
    assert all(len(key) == 32 and int(key, 16) >= 0 for key in keys)
    assert key_of("g", QUEUE, 0) == key_of("g", QUEUE, 0)


def test_a_java_consumer_is_asked_once_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests at a time can end the connection of a Java 5.x client, which answers in as many threads as it has cores."""
    now, asked = [0.0], list[str]()
    java, ours = "10.0.0.1@12#34", lock_rules.new_client("a").client_id

    class Cluster:
        names = NO_NAMESPACES

        def call_address(self, address: str, request: Any, deadline: float) -> bytes:
            asked.append(request.ext["clientId"])
            return JAVA % b"MyOwn"

    monkeypatch.setattr("orderedmq.rocketmq.group.membership.time.monotonic", lambda: now[0])
    directory = membership.Directory(cast(Client, Cluster()))
    for at in (0.0, 6.0, 100.0):
        now[0] = at
        directory.members("g", [java, ours], ["h:1"], None)
    assert asked.count(java) == 1
    assert asked.count(ours) == 3
    directory.holder("g", QUEUE, [java], ["h:1"])
    directory.holder("g", QUEUE, [java], ["h:1"])
    assert asked.count(java) == 2


def test_a_java_consumer_is_asked_by_one_thread_at_a_time() -> None:
    asked, begun, answer = list[str](), threading.Event(), threading.Event()

    class Cluster:
        names = NO_NAMESPACES

        def call_address(self, address: str, request: Any, deadline: float) -> bytes:
            asked.append(request.ext["clientId"])
            begun.set()
            assert answer.wait(60)
            return JAVA % b"MyOwn"

    directory = membership.Directory(cast(Client, Cluster()))
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(directory.members, "g", ["10.0.0.1@12#34"], ["h:1"], None)
        assert begun.wait(60)
        second = threads.submit(directory.members, "g", ["10.0.0.1@12#34"], ["h:1"], None)
        until(second.running, "the second thread sends its request")
        answer.set()
        assert first.result() == second.result()
    assert len(asked) == 1


class Answers:
    """A directory whose broker gives these answers in turn: "no address", "silent" (no answer), or a member."""

    def __init__(self, *answers: str) -> None:
        self.left = list(answers)

    def groups(self, monkeypatch: pytest.MonkeyPatch) -> RocketMQGroups:
        monkeypatch.setattr("orderedmq.rocketmq.group.groups._MEMBER_POLL", 0.0)
        groups = object.__new__(RocketMQGroups)
        groups._directory = cast(membership.Directory, self)
        monkeypatch.setattr(groups, "_brokers_of", lambda _: {} if self.left and self.left[0] == "no address" else {"a": "h:1"})
        monkeypatch.setattr(groups, "_fenced", lambda _: [])
        return groups

    def ids(self, group: str, brokers: Sequence[str]) -> list[str]:
        answer = self.left.pop(0) if self.left else "c"
        if answer == "silent":
            raise RocketMQUnavailableError(UnavailableCondition.TIMEOUT, "no answer")
        return [answer]


def test_a_task_waits_for_a_broker_that_is_away_before_it_asks_for_its_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    away = Answers("silent", "no address", "silent", "another")
    assert away.groups(monkeypatch)._is_member(token("c"), time.monotonic() + 60)
    assert away.left == []


@pytest.mark.parametrize("answer", ["silent", "no address"])
def test_a_broker_that_stays_away_is_not_taken_for_a_lost_lock(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    with pytest.raises(RocketMQUnavailableError):
        Answers(*[answer] * 5).groups(monkeypatch)._is_member(token("c"), 0.0)


def test_a_client_that_does_not_join_in_time_is_not_a_member(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Answers("another").groups(monkeypatch)._is_member(token("c"), 0.0)


def test_members_that_a_restarted_broker_has_forgotten_are_members_unless_their_query_has_started_again() -> None:
    former, again = ([lock_rules.new_client(name).client_id for name in ("me", "first", "second")] for _ in range(2))
    listed = [sorted(former), *([sorted([former[0], again[1]])] * 2)]
    roster = Roster(cast(membership.Directory, SimpleNamespace(ids=lambda *_: listed.pop(0))))
    mine = SimpleNamespace(in_group=lambda _: True, rejoined_within=lambda seconds: len(listed) == 1 and seconds == 30.0)
    roster.clients[former[0]] = cast(membership.MemberClient, mine)
    assert roster.ids("g", ["h:1"], 30.0) == sorted(former)
    assert roster.ids("g", ["h:1"], 30.0) == sorted([former[0], again[1], former[2]]), "the broker has just been restarted"
    assert roster.ids("g", ["h:1"], 30.0) == sorted([former[0], again[1]]), "the second member must have expired"


@pytest.mark.holds("one owner")
def test_members_are_counted_through_a_second_restart_of_a_broker_and_no_longer_than_they_trust_a_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, gone, late = (lock_rules.new_client(name).client_id for name in ("mine", "gone", "late"))
    answers = iter([[mine, gone], [mine], [mine, late], [mine], [mine], [mine]])
    roster = Roster(cast(membership.Directory, SimpleNamespace(ids=lambda *_: sorted(next(answers)))))
    now, rejoined = [0.0], [-100.0]
    monkeypatch.setattr("orderedmq.rocketmq.group.roster.time.monotonic", lambda: now[0])
    client = SimpleNamespace(in_group=lambda _: True, rejoined_within=lambda seconds: now[0] - rejoined[0] < seconds)
    roster.clients[mine] = cast(membership.MemberClient, client)

    def ids(at: float) -> list[str]:
        now[0] = at
        return roster.ids("g", ["h:1"], 30.0)

    assert ids(0.0) == sorted([mine, gone])
    rejoined[0] = 1.0
    assert ids(1.0) == sorted([mine, gone])
    assert ids(10.0) == sorted([mine, gone, late]), "a new member has joined the restarted broker"
    rejoined[0] = 20.0
    assert ids(20.0) == sorted([mine, gone, late]), "the broker has been restarted again"
    assert ids(32.0) == sorted([mine, late]), "a member unlisted for longer than a lock is trusted must be gone"
    assert ids(50.0) == [mine]


class TwoBrokers:
    """A cluster's client and directory. The first broker accepts no heartbeat."""

    names = NO_NAMESPACES

    def __init__(self) -> None:
        self.heard: list[str] = []

    def another(self, on_push: Any) -> TwoBrokers:
        return self

    def behind_proxy(self, deadline: float) -> bool:
        return True

    def route(self, topic: str, deadline: float) -> Route:
        return Route(topic, {name: BrokerData(name, "c", {0: f"{name}:1"}) for name in ("a", "b")}, ())

    def connection(self, address: str, deadline: float) -> TwoBrokers:
        return self

    def call_address(self, address: str, request: Any, deadline: float) -> None:
        if address == "a:1":
            raise RocketMQUnavailableError(UnavailableCondition.TIMEOUT, "no answer")
        self.heard.append(address)

    def refuse_other_consumers(self, *_: object) -> None:
        """There are no other consumers."""

    def ids(self, group: str, brokers: Sequence[str]) -> list[str]:
        # By now the first broker answers, but it does not know the member.
        return ["me"] if brokers[0] in self.heard else []

    def doubt(self, topic: str) -> None:
        """Its routes never change."""


def test_a_broker_that_got_no_heartbeat_is_not_asked_whether_it_made_the_group() -> None:
    cluster = TwoBrokers()
    identity = lock_rules.new_client("query")
    client = membership.MemberClient(cast(Client, cluster), replace(identity, client_id="me"), lambda *_: [])
    client.send_heartbeat("g", Subscription("shared", "orders", "AVG"), cast(membership.Directory, cluster))
    assert client.brokers("g") == ["a:1", "b:1"]
