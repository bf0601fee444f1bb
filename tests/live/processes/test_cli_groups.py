"""The commands for consumer groups: describing, seeking and deleting groups, locks, dead letters, and the live view.

This module is long because its commands are tested on the same group with the same helpers.
"""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import orderedmq
from orderedmq.broker import Broker, Progress
from orderedmq.cli.top import _view
from orderedmq.errors import OptionError
from orderedmq.model import EMBEDDED_BROKER, MessageQueue
from orderedmq.ownership.lock import ClientIdentity, LockToken
from orderedmq.ownership.membership import Subscription
from orderedmq.parking import Parking, Ticket, lot_token, parked_queue
from orderedmq.rows.dead_letters import dead_letter_properties
from orderedmq.schema import PRODUCER_SCHEMA
from orderedmq.tools.dead_letters import NOTED, REPLAY_GROUP
from orderedmq.tools.group_state import Rates
from orderedmq.tools.seek import Target, parse_target
from tests.command import COMMAND, ENVIRONMENT, Run, bodies, on_terminal

SHARED = Subscription("shared", "a", "averagely")
#: The command, killed after it has appended its second piece of letters and before it commits that piece.
KILLED_REPLAY = """
import os
from orderedmq.tools import dead_letters
from orderedmq.cli import app
from orderedmq.embedded.groups import EmbeddedGroups
pass_on, pieces = EmbeddedGroups.pass_on, []
def die(self, *of_piece):
    pass_on(self, *of_piece)
    pieces.append(of_piece)
    if len(pieces) == 2:
        os.kill(os.getpid(), 9)
EmbeddedGroups.pass_on = die
dead_letters.PIECE = 3
app()
"""


@pytest.fixture
def broker(store: Path) -> Iterator[Broker]:
    """A store with topic a, which has three messages in each of two queues."""
    with orderedmq.connect(store) as broker:
        broker.admin.create_topic("a", 2)
        for queue in broker.log.queues("a"):
            broker.log.append({queue: pa.record_batch({"body": [b"1", b"2", b"3"]})})
        yield broker


def take(broker: Broker, group: str, client: ClientIdentity, *queues: MessageQueue) -> list[LockToken]:
    answers = broker.groups.lock(group, client, queues)
    return [token for token in answers.values() if isinstance(token, LockToken)]


def commit(broker: Broker, group: str, offsets: dict[MessageQueue, int]) -> None:
    """Set the group's offsets, as if by a query that has since ended."""
    client = broker.groups.join("earlier")
    tokens = take(broker, group, client, *offsets)
    broker.groups.commit({token: offsets[token.queue] for token in tokens})
    broker.groups.unlock(tokens)
    broker.groups.leave(client)


def offsets(broker: Broker, group: str = "g") -> list[int]:
    return list(broker.admin.group_offsets(group).values())


# General.


@pytest.mark.parametrize(
    "arguments",
    [
        ["group", "describe", "g"],
        ["group", "seek", "g", "--to", "latest"],
        ["group", "delete", "g"],
        ["lock", "release", "g"],
        ["dlq", "list", "g"],
        ["dlq", "replay", "g", "--all"],
        ["top", "g"],
    ],
)
def test_a_group_that_is_not_there(run: Run, store: Path, arguments: list[str]) -> None:
    assert "STORE.MISSING" in run(*arguments, code=3)
    assert not store.exists()
    with orderedmq.connect(store) as broker:
        broker.admin.create_topic("a", 1)
        assert "GROUP.MISSING" in run(*arguments, code=3)
        arguments = ["a b" if argument == "g" else argument for argument in arguments]
        assert "GROUP.BAD_NAME" in run(*arguments, code=2)
        assert broker.admin.groups() == []


# Groups.


def test_describe_shows_members_and_queues(run: Run, text: Run, broker: Broker) -> None:
    first, second = broker.log.queues("a")
    first_member, second_member = broker.groups.join("query-1"), broker.groups.join("query-2")
    broker.groups.heartbeat("g", first_member, SHARED)
    broker.groups.heartbeat("g", second_member, SHARED)
    broker.groups.commit(dict.fromkeys(take(broker, "g", first_member, first), 1))
    take(broker, "g", second_member, second)
    rows = run("group", "describe", "g")
    members = [row for row in rows if row["kind"] == "member"]
    assert [(row["client"], row["query"]) for row in members] == [
        (first_member.client_id, "query-1"),
        (second_member.client_id, "query-2"),
    ]
    assert {(row["assignment"], row["strategy"], row["topics"], row["alive"]) for row in members} == {
        ("shared", "averagely", "a", True)
    }
    assert all(0 <= row["heartbeat_age"] < 60 for row in members)
    queues = [row for row in rows if row["kind"] == "queue"]
    assert [(row["queue_id"], row["owner"], row["offset"], row["end"], row["lag"]) for row in queues] == [
        (0, first_member.client_id, 1, 3, 2),
        (1, second_member.client_id, None, 3, 3),
    ]
    assert all(0 <= row["lock_age"] < 60 for row in queues)
    assert len(rows) == 4
    shown = text("group", "describe", "g")
    assert "query-1" in shown
    assert "averagely" in shown
    broker.groups.leave(first_member)
    broker.groups.leave(second_member)
    assert [row["alive"] for row in run("group", "describe", "g")] == [False, False]
    assert [(row["owned_queues"], row["alive"]) for row in run("group", "list")] == [(0, False)]
    assert "has no members now" in text("group", "describe", "g")


def test_seek_to_each_kind_of_place(run: Run, text: Run, broker: Broker) -> None:
    first, second = broker.log.queues("a")
    broker.admin.create_topic("other", 1)
    commit(broker, "g", {first: 2})
    # Seek all queues of the topics in which the group has offsets.
    rows = run("group", "seek", "g", "--to", "latest")
    assert [(row["topic"], row["queue_id"], row["old"], row["new"]) for row in rows] == [("a", 0, 2, 3), ("a", 1, None, 3)]
    assert [row["dry_run"] for row in rows] == [False, False]
    assert broker.admin.group_offsets("g") == {first: 3, second: 3}
    run("group", "seek", "g", "--to", "earliest")
    assert offsets(broker) == [0, 0]
    run("group", "seek", "g", "--to", '{"a": {"embedded": {"1": 2}}}')
    assert offsets(broker) == [0, 2]
    run("group", "seek", "g", "--to", '{"a": {"embedded": {"0": -1, "1": -2}}}')
    assert offsets(broker) == [3, 0]
    broker.admin.trim("a", {second: 3})
    run("group", "seek", "g", "--to", "Earliest", "--topic", "a")
    assert offsets(broker) == [0, 3]
    run("group", "seek", "g", "--to", "latest", "--topic", "other", "--topic", "a")
    assert [queue.topic for queue in broker.admin.group_offsets("g")] == ["a", "a", "other"]
    assert "old offset" in text("group", "seek", "g", "--to", "earliest")


def test_targets_of_a_seek_are_parsed() -> None:
    assert parse_target(" LATEST", "--to") == Target("latest")
    assert parse_target("1700000000123", "--to") == Target("timestamp", timestamp=1_700_000_000_123_000)
    assert parse_target("1700000000123456", "--to") == Target("timestamp", timestamp=1_700_000_000_123_456)
    for bad in (
        "",
        "-1",
        "committed",
        "soon",
        "2026-13-01",
        "20260301",
        "9999-12-31T23:59:59-01:00",
        "9" * 18,
        "9" * 19,
        "{}",
        '{"a": {"embedded": {"0": -3}}}',
    ):
        with pytest.raises(OptionError, match="option --to"):
            parse_target(bad, "--to")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--to", "soon"], 2, "OPTION.INVALID"),
        ([], 2, "--to"),
        (["--to", '{"a": {"embedded": {"0": 1}}}', "--topic", "a"], 2, "OPTION.CONFLICT"),
        (["--to", "latest", "--topic", "none"], 3, "TOPIC.MISSING"),
        (["--to", "latest", "--topic", "a b"], 2, "TOPIC.BAD_NAME"),
        (["--to", '{"none": {"embedded": {"0": 1}}}'], 3, "TOPIC.MISSING"),
        (["--to", '{"a": {"embedded": {"2": 1}}}'], 3, "TOPIC.NO_SUCH_QUEUE"),
        (["--to", '{"a": {"broker-a": {"0": 1}}}'], 3, "TOPIC.NO_SUCH_QUEUE"),
        (["--to", '{"a": {"embedded": {"1": 3, "0": 4}}}'], 1, "OFFSET.BEYOND_END"),
        (["--to", '{"a": {"embedded": {"0": 1, "1": 2}}}'], 1, "OFFSET.INVALID.*begins at 3"),
    ],
)
def test_a_refused_seek_changes_no_offset(run: Run, broker: Broker, arguments: list[str], code: int, says: str) -> None:
    first, second = broker.log.queues("a")
    commit(broker, "g", {first: 2})
    broker.admin.trim("a", {second: 3})
    for dry in ([], ["--dry-run"]):
        assert re.search(says, run("group", "seek", "g", *arguments, *dry, code=code))
    assert broker.admin.group_offsets("g") == {first: 2}


@pytest.mark.parametrize("where", [["--to", "latest", "--topic", "a"], ["--to", '{"a": {"embedded": {"0": 3, "1": 3}}}']])
def test_a_group_that_has_never_run_gets_its_first_offsets(run: Run, text: Run, broker: Broker, where: list[str]) -> None:
    assert [(row["old"], row["new"]) for row in run("group", "seek", "first", *where, "--dry-run")] == [(None, 3), (None, 3)]
    assert broker.admin.groups() == []
    assert "group first had no offsets in these queues" in text("group", "seek", "first", *where)
    assert list(broker.admin.group_offsets("first").values()) == [3, 3]


def test_a_dry_run_of_a_seek_changes_nothing(run: Run, text: Run, broker: Broker) -> None:
    first = broker.log.queues("a")[0]
    commit(broker, "g", {first: 2})
    rows = run("group", "seek", "g", "--to", "earliest", "--dry-run")
    assert [(row["old"], row["new"], row["dry_run"]) for row in rows] == [(2, 0, True), (None, 0, True)]
    assert "would move to" in text("group", "seek", "g", "--to", "earliest", "--dry-run")
    assert broker.admin.group_offsets("g") == {first: 2}


@pytest.mark.parametrize("as_what", ["member", "owner"])
def test_a_group_at_work_is_left_alone_unless_forced(run: Run, broker: Broker, as_what: str) -> None:
    queues = broker.log.queues("a")
    commit(broker, "g", dict.fromkeys(queues, 2))
    client = broker.groups.join("query")
    tokens = take(broker, "g", client, *queues) if as_what == "owner" else []
    if not tokens:
        broker.groups.heartbeat("g", client, SHARED)
    for arguments in (["seek", "g", "--to", "latest"], ["seek", "g", "--to", "latest", "--dry-run"], ["delete", "g"]):
        assert f"in use: {client.client_id}" in run("group", *arguments, code=1)
    assert offsets(broker) == [2, 2]
    run("group", "seek", "g", "--to", "latest", "--force", "--dry-run")
    assert offsets(broker) == [2, 2]
    run("group", "seek", "g", "--to", "latest", "--force")
    assert offsets(broker) == [3, 3]
    assert broker.groups.stale(tokens) == tokens
    run("group", "delete", "g", "--force")
    assert broker.admin.groups() == []


def test_delete_returns_the_offsets_of_the_group(run: Run, text: Run, broker: Broker) -> None:
    first, second = broker.log.queues("a")
    commit(broker, "g", {first: 1, second: 2})
    commit(broker, "h", {first: 1})
    assert [(row["group"], row["lag"], row["owned_queues"]) for row in run("group", "list")] == [("g", 3, 0), ("h", 2, 0)]
    assert run("group", "delete", "g") == [{"group": "g", "deleted": 2, "offsets": {"a": {"embedded": {"0": 1, "1": 2}}}}]
    assert [row["group"] for row in run("group", "list")] == ["h"]
    assert "GROUP.MISSING" in run("group", "delete", "g", code=3)
    assert "offsets of 1 queues" in text("group", "delete", "h")


# Parked messages.


@pytest.fixture
def parked(broker: Broker) -> MessageQueue:
    """The first queue of topic a. Group g has parked two of its messages and processed the others."""
    queue = broker.log.queues("a")[0]
    client = broker.groups.join("query")
    [token] = take(broker, "g", client, queue)
    broker.groups.park(token, [Parking(queue, at, Ticket(at, 1, 1, 9)) for at in (0, 2, 1)])
    broker.groups.commit({token: 3, lot_token(token): 1})
    broker.groups.unlock([token])
    broker.groups.leave(client)
    return queue


def test_a_seek_asks_what_becomes_of_parked_messages(run: Run, broker: Broker, parked: MessageQueue) -> None:
    lot = parked_queue("g", parked)
    offsets_before = {lot: 1, parked: 3}
    for dry in ([], ["--dry-run"]):
        said = run("group", "seek", "g", "--to", "earliest", *dry, code=1)
        assert "GROUP.PARKED" in said
        assert "2 parked messages of queue a/embedded/0" in said
        assert "--parked keep, --parked drop" in said
        assert "--parked" in run("group", "seek", "g", "--to", "earliest", "--parked", "lose", *dry, code=2)
    run("group", "seek", "g", "--to", "earliest", "--parked", "drop", "--dry-run")
    assert broker.admin.group_offsets("g") == offsets_before
    run("group", "seek", "g", "--to", '{"a": {"embedded": {"1": 2}}}')
    rows = run("group", "seek", "g", "--to", "earliest", "--parked", "keep")
    assert [(row["topic"], row["queue_id"], row["old"], row["new"]) for row in rows] == [("a", 0, 3, 0), ("a", 1, 2, 0)]
    assert broker.groups.offsets("g", [lot]) == {lot: 1}
    run("group", "seek", "g", "--to", "latest", "--parked", "drop")
    assert broker.groups.offsets("g", [lot, parked]) == {lot: 3, parked: 3}
    run("group", "seek", "g", "--to", "earliest")


# Locks.


def test_release(run: Run, text: Run, broker: Broker) -> None:
    broker.admin.create_topic("b", 1)
    first, second, [other] = *broker.log.queues("a"), broker.log.queues("b")
    client = broker.groups.join("query")
    tokens = take(broker, "g", client, first, second, other)
    assert "in use" in run("lock", "release", "g", "a/0", code=1)
    assert broker.groups.stale(tokens) == []
    assert [(row["group"], row["queue_id"], row["alive"]) for row in run("lock", "list", "--group", "g")] == [
        ("g", 0, True),
        ("g", 1, True),
        ("g", 0, True),
    ]
    assert run("lock", "list", "--group", "other") == []
    rows = run("lock", "release", "g", "a/1", "--force")
    assert [(row["topic"], row["queue_id"], row["owner"]) for row in rows] == [("a", 1, client.client_id)]
    assert broker.groups.stale(tokens) == [tokens[1]]
    assert run("lock", "release", "g", "a/embedded/1", "--force") == []
    assert len(run("lock", "release", "g", "a", "b/0", "--force")) == 2
    assert run("lock", "list") == []
    take(broker, "g", client, first, second)
    broker.groups.leave(client)
    # The owner is gone, so no --force is needed.
    assert len(run("lock", "release", "g")) == 2
    assert "none of these queues is locked" in text("lock", "release", "g")
    for queue, code in (("none", 3), ("a/2", 3), ("a/x", 2), ("a/broker-a/0", 3), ("/1", 2), ("a/0/0/0", 2)):
        run("lock", "release", "g", queue, code=code)


# Dead letters.


def put_aside(
    broker: Broker,
    queue: MessageQueue,
    letters: dict[int, str | None],
    group: str = "g",
    error: str = "ValueError: no",
    **columns: Any,
) -> None:
    """Write dead letters of the group for messages of a queue, given as offset → sharding key."""
    client = broker.groups.join("listener")
    [token] = take(broker, group, client, queue)
    rows = [
        {
            "body": f"{queue.queue_id}-{offset}".encode(),
            "sharding_key": key,
            "properties": list(
                dead_letter_properties(
                    queue,
                    offset,
                    message_id=f"ID{offset}",
                    reconsume_times=16,
                    error=error,
                    properties={"mine": "x"},
                ).items()
            ),
            **columns,
        }
        for offset, key in letters.items()
    ]
    broker.groups.dead_letter(token, pa.RecordBatch.from_pylist(rows, schema=PRODUCER_SCHEMA), list(letters))
    broker.groups.unlock([token])
    broker.groups.leave(client)


def sent(broker: Broker, topic: str = "a") -> list[list[bytes]]:
    """The bodies in each queue, without the three messages that topic a has from the start."""
    return [[body for _, body in rows if b"-" in body] for rows in bodies(broker, topic)]


def test_the_command_knows_all_properties_that_a_dead_letter_gets() -> None:
    noted = dead_letter_properties(
        MessageQueue("a", "embedded", 0), 1, message_id="I", reconsume_times=1, error="e", properties={}
    )
    assert noted.keys() == NOTED


def test_dead_letters_are_listed(run: Run, text: Run, broker: Broker) -> None:
    first, second = broker.log.queues("a")
    commit(broker, "g", {first: 0})
    assert run("dlq", "list", "g") == []
    assert "no dead letters" in text("dlq", "list", "g")
    assert run("dlq", "replay", "g", "--all")[0]["replayed"] == 0
    put_aside(broker, first, {0: "k", 2: None}, tags="t")
    put_aside(broker, second, {1: "x"}, body=b"\xff" + b"long " * 100)
    rows = run("dlq", "list", "g")
    stored = rows[0].pop("stored")
    assert stored.endswith("Z")
    assert rows[0] == {
        "at_broker": "embedded",
        "offset": 0,
        "topic": "a",
        "broker": "embedded",
        "queue_id": 0,
        "origin_offset": 0,
        "sharding_key": "k",
        "tags": "t",
        "keys": None,
        "error": "ValueError: no",
        "retries": 16,
        "message_id": "ID0",
        "replayed": False,
        "replays": 0,
        "quarantined": False,
        "properties": {"mine": "x"},
        "body": "0-0",
    }
    assert [(row["offset"], row["queue_id"], row["origin_offset"], row["sharding_key"]) for row in rows] == [
        (0, 0, 0, "k"),
        (1, 0, 2, None),
        (2, 1, 1, "x"),
    ]
    assert rows[2]["body_hex"].startswith("ff6c6f")
    shown = text("dlq", "list", "g")
    assert "ValueError: no" in shown
    assert "0xff6c6f" in shown
    assert "…" in shown
    assert [row["offset"] for row in run("dlq", "list", "g", "--offset", "1", "-n", "1")] == [1]
    assert "more letters follow: --offset 2" in text("dlq", "list", "g", "-n", "2")
    assert "BEYOND_END" in run("dlq", "list", "g", "--offset", "4", code=1)
    # Dead letters outlive their group.
    broker.admin.delete_group("g")
    assert len(run("dlq", "list", "g")) == 3


def test_replay_sends_each_letter_once(run: Run, text: Run, broker: Broker) -> None:
    first, second = broker.log.queues("a")
    # As in Java, "x".hashCode() is 120 and "y".hashCode() is 121.
    put_aside(broker, first, {0: "x", 1: "y", 2: None}, tags="t", keys="k1")
    put_aside(broker, second, {0: None, 2: "x"})
    [done] = run("dlq", "replay", "g", "--all")
    assert done == {"group": "g", "replayed": 5, "topics": {"a": 5}, "quarantined": 0, "deleted": 0}
    assert sent(broker) == [[b"0-0", b"0-2", b"1-2"], [b"0-1", b"1-0"]]
    assert all(row["replayed"] for row in run("dlq", "list", "g"))
    assert run("dlq", "replay", "g", "--all")[0]["replayed"] == 0
    put_aside(broker, second, {1: "y"})
    assert [row["replayed"] for row in run("dlq", "list", "g")] == [True] * 5 + [False]
    assert "replayed 1 dead letter of group g: 1 to a" in text("dlq", "replay", "g", "--all")
    assert sent(broker)[1] == [b"0-1", b"1-0", b"1-1"]
    row = broker.log.pull(first, 3, 1, 1 << 20, ("tags", "keys", "sharding_key", "properties")).to_pylist()[0]
    # The message is as it was, without the properties of its failure, but with the number of its replays.
    own = [("mine", "x"), ("ORDEREDMQ_REPLAYS", "g=1")]
    assert row == {"tags": "t", "keys": "k1", "sharding_key": "x", "properties": own}
    assert run("lock", "list", "--group", REPLAY_GROUP) == []
    # A seek of the replay group makes the letters replayable again.
    run("group", "seek", REPLAY_GROUP, "--to", "earliest")
    assert run("dlq", "replay", "g", "--all")[0]["replayed"] == 6


def test_replay_says_how_many_letters_were_deleted_before_it_reached_them(run: Run, text: Run, broker: Broker) -> None:
    queue = broker.log.queues("a")[0]
    put_aside(broker, queue, {0: "x", 1: "x", 2: "x"})
    assert run("dlq", "replay", "g", "--offset", "0")[0]["deleted"] == 0
    assert broker.admin.trim("%DLQ%g", {MessageQueue("%DLQ%g", EMBEDDED_BROKER, 0): 3})
    put_aside(broker, queue, {3: "x"})
    assert [row["offset"] for row in run("dlq", "list", "g")] == [3]
    assert "OFFSET.INVALID" in run("dlq", "replay", "g", "--offset", "1", code=1)
    assert "3 dead letters were deleted by retention before a replay of all letters reached them" in text(
        "dlq", "replay", "g", "--all"
    )
    assert sent(broker)[0] == [b"0-0", b"0-3"]
    [done] = run("dlq", "replay", "g", "--all")
    assert (done["replayed"], done["deleted"]) == (0, 0)


def test_replay_into_another_topic(run: Run, broker: Broker) -> None:
    broker.admin.create_topic("gone", 3)
    put_aside(broker, broker.log.queues("a")[0], {0: "x"})
    put_aside(broker, broker.log.queues("gone")[2], {0: None, 1: "y"})
    broker.admin.delete_topic("gone")
    # No letter is sent unless all letters have a topic to go to.
    said = run("dlq", "replay", "g", "--all", code=3)
    assert "dead letter 1 came from topic 'gone'" in said
    assert sent(broker) == [[], []]
    broker.admin.create_topic("b", 2)
    assert run("dlq", "replay", "g", "--all", "--to-topic", "b")[0]["topics"] == {"b": 3}
    assert (sent(broker, "b"), sent(broker)) == ([[b"0-0", b"2-0"], [b"2-1"]], [[], []])


def test_replay_of_keys_that_are_numbers_goes_to_the_queue_that_they_came_from(run: Run, broker: Broker) -> None:
    # As a String, "17" has the hash 1574 and goes to the first queue. As a number it is odd and goes to the second.
    first, second = broker.log.queues("a")
    put_aside(broker, second, {0: "17"})
    put_aside(broker, first, {1: "x", 2: "4294967298"})
    put_aside(broker, second, {1: "4294967298"})
    said = run("dlq", "replay", "g", "--all", code=2)
    assert "dead letter 0 came from queue a/embedded/1" in said
    for flag in ("--sharding-key-type int", "--sharding-key-type long", "--selector mod"):
        assert flag in said
    assert "dead letter 3 " in (said := run("dlq", "replay", "g", "--offset", "3", code=2))
    assert "--sharding-key-type long" in said
    # Keys that are not numbers, and keys that went to their queue by their text, are sent as before.
    assert run("dlq", "replay", "g", "--offset", "1", "--offset", "2")[0]["replayed"] == 2
    assert sent(broker) == [[b"0-1", b"0-2"], []]
    run("dlq", "replay", "g", "--offset", "3", "--selector", "mod")
    run("dlq", "replay", "g", "--offset", "0", "--sharding-key-type", "text")
    assert sent(broker) == [[b"0-1", b"0-2", b"1-1", b"1-0"], []]
    assert "BAD_KEY" in run("dlq", "replay", "g", "--offset", "1", "--sharding-key-type", "long", code=1)
    run("dlq", "replay", "g", "--offset", "0", "--offset", "3", "--sharding-key-type", "long")
    assert sent(broker)[1] == [b"1-0", b"1-1"]


@pytest.mark.holds("replay once")
def test_a_killed_replay_of_all_letters_loses_and_repeats_nothing(run: Run, store: Path, broker: Broker) -> None:
    put_aside(broker, broker.log.queues("a")[0], dict.fromkeys(range(10), "x"))
    script = [sys.executable, "-c", KILLED_REPLAY, "--path", str(store), "dlq", "replay", "g", "--all"]
    killed = subprocess.run(script, capture_output=True, env=ENVIRONMENT)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    # Pieces have three letters.
    assert [row["replayed"] for row in run("dlq", "list", "g")] == [True] * 6 + [False] * 4
    # The killed process no longer holds its lock.
    assert run("dlq", "replay", "g", "--all")[0]["replayed"] == 4
    assert sent(broker)[0] == [f"0-{offset}".encode() for offset in range(10)]


# The live view.


def test_rates() -> None:
    rates = Rates(window=10.0)
    assert rates.see(0.0, {"a": 0, "b": None}) == {}
    assert rates.see(2.0, {"a": 10, "b": 5}) == {"a": 5.0}
    assert rates.see(4.0, {"a": 10, "b": 9}) == {"a": 2.5, "b": 2.0}
    assert rates.see(14.0, {"a": 10}) == {"a": 0.0}
    # After a seek back, there is no earlier value to compare with.
    assert rates.see(15.0, {"a": 3, "b": 9}) == {}
    assert rates.see(16.0, {"a": 4}) == {"a": 1.0}


def test_top_without_a_terminal_looks_once(run: Run, text: Run, broker: Broker) -> None:
    assert run("top") == []
    assert "no consumer groups" in text("top", "--once")
    first, second = broker.log.queues("a")
    commit(broker, "h", {second: 3})
    client = broker.groups.join("query")
    tokens = take(broker, "g", client, first)
    broker.groups.commit(dict.fromkeys(tokens, 1))
    assert "done" not in text("top")
    broker.groups.record_progress(tokens[0], Progress(2), "consume_orderly books.book")
    assert "done" in text("top")
    rows = run("top")
    assert [row["progress"] for row in rows] == [1, 0]
    assert [
        (row["group"], row["queue_id"], row["offset"], row["lag"], row["owner"], row["alive"], row["rate"]) for row in rows
    ] == [
        ("g", 0, 1, 2, client.client_id, True, None),
        ("h", 1, 3, 0, None, None, None),
    ]
    assert [row["group"] for row in run("top", "h", "--once")] == ["h"]
    assert re.search(r"1,?0*\s.* query@", text("top"))
    for bad in ("0s", "50ms", "often"):
        assert "option --interval" in run("top", "--interval", bad, code=2)


def test_top_on_a_terminal_ends_with_q(store: Path, broker: Broker) -> None:
    commit(broker, "g", dict.fromkeys(broker.log.queues("a"), 1))
    said, status = on_terminal(["top", "--interval", "100ms", "--path", str(store)], (b"q ends", b"xq"))
    assert "group g, 2 queues, lag 4" in said
    assert status == 0
    said, status = on_terminal(["top", "g", "--once", "--path", str(store)])
    assert "msg/s" in said
    assert status == 0


def test_top_follows_and_ends_with_ctrl_c(store: Path, broker: Broker) -> None:
    commit(broker, "g", dict.fromkeys(broker.log.queues("a"), 1))
    ours, theirs = pty.openpty()
    top = subprocess.Popen(
        [*COMMAND, "top", "--interval", "100ms", "--path", str(store)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=ENVIRONMENT,
        start_new_session=True,
    )
    os.close(theirs)
    said = b""
    for wanted, step in ((b"lag 4", None), (b"lag 3", 2), (b"lag 2", 3)):
        if step:
            commit(broker, "g", {broker.log.queues("a")[0]: step})
        while wanted not in said and select.select([ours], [], [], 60)[0]:
            said += os.read(ours, 65536)
        assert wanted in said
    top.send_signal(signal.SIGINT)
    assert top.wait(60) == 0
    while select.select([ours], [], [], 1)[0]:
        try:
            said += os.read(ours, 65536)
        except OSError:
            break
    os.close(ours)
    assert b"Traceback" not in said
    # The cursor is visible again at the end.
    assert said.rindex(b"\x1b[?25h") > said.rindex(b"\x1b[?25l")


def test_top_shows_the_queues_with_the_most_lag_if_not_all_fit() -> None:
    from rich.console import Console

    rows = [
        {
            "group": "g",
            "topic": f"t{number}",
            "broker": "embedded",
            "queue_id": 0,
            "offset": 0,
            "end": number,
            "lag": number % 7,
            "rate": None,
            "owner": None,
        }
        for number in range(40)
    ]
    rows[5] |= {"owner": "x" * 200, "lag": 6}
    out = io.StringIO()
    Console(width=80, file=out).print(_view(rows, 15))
    lines = out.getvalue().splitlines()
    assert "lag 116" in lines[0]
    assert "The 10 with the most lag:" in lines[0]
    shown = [int(found[1]) for line in lines if (found := re.search(r"\bt(\d+)\b", line))]
    assert shown == sorted(shown)
    assert [number for number in shown if number % 7 < 6] == [5, 12, 19, 26, 33]
    assert len(lines) <= 15


@pytest.mark.holds("resize")
def test_the_queues_that_wait_since_a_resize_say_for_which_queue(run: Run, text: Run, broker: Broker) -> None:
    broker.admin.resize_topic("a", 4)
    queues = broker.log.queues("a")
    broker.log.append({queue: pa.record_batch({"body": [b"4"]}) for queue in queues[2:]})
    broker.admin.seek("g", {queues[0]: 3, queues[1]: 2, queues[2]: 0, queues[3]: 0})
    reason = "queue 1, which is processed up to 2 of 3"
    assert f"group g: queue 3 waits for {reason}" in text("topic", "describe", "a")
    for command in (("group", "describe", "g"), ("top", "--once")):
        assert [row["waits_for"] for row in run(*command) if "lag" in row] == [None, None, None, reason]
        assert "waits for" in text(*command)
    broker.admin.seek("g", {queues[1]: 3})
    assert "waits" not in text("topic", "describe", "a")
    assert "waits for" not in text("group", "describe", "g")
