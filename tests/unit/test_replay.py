"""Replays of dead letters and copies of offsets, by the command, on a real store: selection, sending once, and quarantine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import orderedmq
from ordered_source.listener.engine_task import Consumer
from orderedmq.broker import Broker
from orderedmq.cli import app
from orderedmq.errors import OptionError, TopicError
from orderedmq.listening.queue_engine import OrderPerQueue
from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import ClientIdentity, LockToken
from orderedmq.ownership.membership import Subscription
from orderedmq.parking import Parking, Ticket
from orderedmq.routing.selector import Keying
from orderedmq.rows.dead_letters import REPLAYS, dead_letter_properties
from orderedmq.schema import PRODUCER_SCHEMA
from orderedmq.tools import dead_letters
from orderedmq.tools.replay import _choose_queues, _commands
from orderedmq.tools.seek import parse_target, resolve
from tests.command import Run, bodies
from tests.contract.support import locked
from tests.unit.test_engine_task import LATER, SUCCESS, SUSPEND, Rig


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def broker(store: Path) -> Iterator[Broker]:
    """A store with the topics a (two queues) and b (one queue)."""
    with orderedmq.connect(store) as broker:
        broker.admin.create_topic("a", 2)
        broker.admin.create_topic("b", 1)
        yield broker


@pytest.fixture
def run(store: Path) -> Callable[..., Any]:
    """Run the command. Returns the JSON lines that it printed, or its error output if it refused."""

    def call(*arguments: str, code: int = 0) -> Any:
        result = CliRunner().invoke(app, ["--path", str(store), *arguments])
        assert result.exit_code == code, result.output
        if code:
            assert result.stdout == ""
            return result.stderr
        return [json.loads(line) for line in result.stdout.splitlines()]

    return call


def give_up(broker: Broker, letters: Sequence[tuple[str, str, str]], replays: str = "") -> None:
    """Make dead letters of new messages in the first queue. Each has a body, a key and an error."""
    queue = broker.log.queues("a")[0]
    begin = broker.log.bounds([queue])[queue].max_offset
    broker.log.append({queue: pa.record_batch({"body": [b"?"] * len(letters)})})
    own = {REPLAYS: replays} if replays else {}
    rows = [
        {
            "body": body.encode(),
            "sharding_key": key,
            "properties": list(
                dead_letter_properties(queue, begin + at, message_id="", reconsume_times=1, error=error, properties=own).items()
            ),
        }
        for at, (body, key, error) in enumerate(letters)
    ]
    client = broker.groups.join("listener")
    [token] = locked(broker, "g", client, [queue])
    broker.groups.dead_letter(token, pa.RecordBatch.from_pylist(rows, schema=PRODUCER_SCHEMA), range(begin, begin + len(rows)))
    broker.groups.unlock([token])
    broker.groups.leave(client)


def sent(broker: Broker, topic: str = "a") -> list[str]:
    return [body.decode() for queue in bodies(broker, topic) for _, body in queue if body != b"?"]


ORDERS = [
    ("1", "x", "Timeout: 1"),
    ("2", "y", "KeyError"),
    ("3", "x", "KeyError"),
    ("4", "z", "a Timeout"),
    ("5", "x", "timeout"),
]


# -- other groups


def test_a_replay_names_the_other_groups_that_get_the_letters_and_asks(run: Run, broker: Broker) -> None:
    give_up(broker, ORDERS[:2])
    for group, topic in (("shipping", "a"), ("mail", "b"), ("dlq-replay", "a"), ("g", "a")):
        broker.admin.seek(group, {broker.log.queues(topic)[0]: 0})
    said = run("dlq", "replay", "g", "--all", code=2)
    assert "Send 2 dead letters of group g to a? Groups that also read there: shipping." in said
    assert "Give --yes" in said
    assert "mail" in run("dlq", "replay", "g", "--key", "x", "--to-topic", "b", code=2)
    assert sent(broker) == sent(broker, "b") == []
    assert run("dlq", "replay", "g", "--all", "--yes")[0]["replayed"] == 2
    # Nothing is left to send, and nobody else reads the topic.
    assert run("dlq", "replay", "g", "--all")[0]["replayed"] == 0
    broker.admin.delete_group("shipping")
    assert run("dlq", "replay", "g", "--key", "x", "--offset", "0", code=2)
    assert run("dlq", "replay", "g", "--offset", "0")[0]["replayed"] == 1


# -- selection


@pytest.mark.parametrize(
    ("conditions", "chosen"),
    [
        (["--key", "x"], ["1", "3", "5"]),
        (["--key", "y", "--key", "z"], ["2", "4"]),
        (["--error", "Timeout"], ["1", "4"]),
        (["--error", "Timeout", "--key", "x"], ["1"]),
        (["--error", "[a-z]"], []),
        (["--since", "2020-01-01"], ["1", "2", "3", "4", "5"]),
        (["--since", "2100-01-01"], []),
        (["--all", "--key", "z"], ["4"]),
    ],
)
def test_a_replay_sends_the_letters_that_the_list_shows_with_the_same_conditions(
    run: Run, broker: Broker, conditions: list[str], chosen: list[str]
) -> None:
    give_up(broker, ORDERS)
    shown = [one for one in conditions if one != "--all"]
    assert [row["body"] for row in run("dlq", "list", "g", *shown)] == chosen
    assert run("dlq", "replay", "g", *conditions, "--to-topic", "b")[0]["replayed"] == len(chosen)
    assert sent(broker, "b") == chosen
    assert not any(row["replayed"] for row in run("dlq", "list", "g")), "only a replay of all letters records what it has sent"


def test_a_limit_sends_the_first_letters_and_a_replay_of_all_letters_continues_behind_them(run: Run, broker: Broker) -> None:
    give_up(broker, ORDERS)
    for conditions, steps in ((["--key", "x", "--limit", "2"], [2, 2]), (["--limit", "3"], [3, 2, 0])):
        assert [run("dlq", "replay", "g", *conditions, "--to-topic", "b")[0]["replayed"] for _ in steps] == steps
    assert sent(broker, "b") == ["1", "3", "1", "3", "1", "2", "3", "4", "5"]


@pytest.mark.parametrize(
    ("arguments", "condition", "said"),
    [
        ([], "OPTION.MISSING", "the command does not say which letters"),
        (["--offset", "0", "--key", "x"], "OPTION.CONFLICT", "--offset already selects the letters"),
        (["--offset", "0", "--limit", "1"], "OPTION.CONFLICT", "Drop --all, --key"),
        (["--error", ""], "OPTION.INVALID", "--error is empty"),
        (["--since", "yesterday"], "OPTION.INVALID", "is not a time since 1970"),
    ],
)
def test_letters_that_are_chosen_wrongly_are_refused(
    run: Run, broker: Broker, arguments: list[str], condition: str, said: str
) -> None:
    give_up(broker, ORDERS)
    error = run("dlq", "replay", "g", *arguments, code=2)
    assert condition in error
    assert said in error
    assert sent(broker) == []


# -- sending once


@pytest.mark.holds("replay once")
def test_replays_of_all_letters_send_each_once_until_somebody_seeks_back(run: Run, broker: Broker) -> None:
    give_up(broker, ORDERS)

    def replays(*which: str) -> int:
        [done] = run("dlq", "replay", "g", *which, "--to-topic", "b")
        return int(done["replayed"])

    assert [replays("--error", "Timeout"), replays("--key", "x"), replays("--all")] == [2, 3, 5], (
        "chosen letters are only copied"
    )
    assert [replays("--error", "Timeout"), replays("--key", "x"), replays("--all"), replays("--offset", "0")] == [0, 0, 0, 1]
    run("group", "seek", dead_letters.REPLAY_GROUP, "--to", "earliest")
    assert [replays("--key", "x"), replays("--all")] == [3, 5]


def test_a_replay_is_refused_if_the_group_is_beyond_the_end_of_the_letters(run: Run, broker: Broker) -> None:
    """RocketMQ before 5.0 keeps the offsets in a deleted topic, and a broker may lose its last letters."""
    give_up(broker, ORDERS[:3])
    client = broker.groups.join(dead_letters.REPLAY_GROUP)
    [token] = locked(broker, dead_letters.REPLAY_GROUP, client, broker.log.queues("%DLQ%g"))
    broker.groups.commit({token: 4})
    broker.groups.unlock([token])
    assert not any(row["replayed"] for row in run("dlq", "list", "g"))
    assert dead_letters.replayed_to(broker, token.queue) == 0
    for which in (["--key", "y"], ["--all"]):
        assert "group seek dlq-replay --topic %DLQ%g --to earliest" in run("dlq", "replay", "g", *which, code=1)
    run("group", "seek", "dlq-replay", "--topic", "%DLQ%g", "--to", "earliest")
    assert run("dlq", "replay", "g", "--key", "y")[0]["replayed"] == 1
    assert run("dlq", "replay", "g", "--all")[0] == {
        "group": "g",
        "replayed": 3,
        "topics": {"a": 3},
        "quarantined": 0,
        "deleted": 0,
    }
    give_up(broker, ORDERS[3:])
    assert dead_letters.count(broker, "g") == dead_letters.LetterCount(stored=5, waiting=2, written=5)
    assert run("dlq", "replay", "g", "--all")[0]["replayed"] == 2
    assert sorted(sent(broker)) == ["1", "2", "2", "3", "4", "5"]


# -- quarantine


def no_order(messages: Any, context: Any) -> Any:
    return LATER


ENGINES = {
    "queue": lambda rig: Consumer(rig.listener(lambda _: SUSPEND), OrderPerQueue(1, max_reconsume_times=0)),
    "key": lambda rig: rig.by_key(lambda _: SUSPEND, max_reconsume_times=1),
    "none": lambda rig: rig.concurrently(no_order, max_reconsume_times=1),
}


@pytest.mark.holds("quarantine")
@pytest.mark.parametrize("order", ENGINES)
def test_a_message_that_is_given_up_again_after_each_replay_is_in_quarantine(tmp_path: Path, run: Run, order: str) -> None:
    """The count of replays passes through listener, parking lot, dead letter and replay, even if the listener does not read properties."""
    rig, consumer = Rig(tmp_path), ENGINES[order]
    rig.send("bad")

    def process() -> None:
        """Run until the message is a dead letter. If there is a lot, the message is parked and returns when it is due."""
        rig.run(consumer(rig), lot=order != "queue")
        if order != "queue":
            rig.now += 10
            rig.run(consumer(rig), planned=True)

    for replays in range(3):
        process()
        assert [row["replays"] for row in run("dlq", "list", "g")] == list(range(replays + 1))
        assert run("dlq", "replay", "g", "--all")[0]["replayed"] == 1
    process()
    *_, last = run("dlq", "list", "g")
    assert (last["offset"], last["replays"], last["quarantined"], last["replayed"]) == (3, 3, True, False)
    [done] = run("dlq", "replay", "g", "--all")
    assert (done["replayed"], done["quarantined"]) == (0, 1)
    assert rig.ends()[0] == 4, "a message in quarantine must not be sent"
    rig.broker.close()


# -- to one group


@pytest.mark.holds("given back")
def test_a_letter_comes_back_to_its_group_alone_after_the_parked_messages_of_its_key(tmp_path: Path, run: Run) -> None:
    rig = Rig(tmp_path)
    fails = rig.by_key(lambda message: SUSPEND if message.sharding_key == "a" else SUCCESS, max_reconsume_times=1)
    rig.send("a", "a", "b")
    rig.run(fails)
    rig.now += 10
    assert rig.run(fails, planned=True) == [(0, "DEAD_LETTER", 2, None), (1, "PARKED", 1, 10)]
    assert run("dlq", "replay", "g", "--all", "--to-group")[0] | {"deleted": 0} == {
        "group": "g", "replayed": 1, "topics": {"orders": 1}, "quarantined": 0, "deleted": 0,
    }  # fmt: skip
    assert run("dlq", "replay", "g", "--all", "--to-group")[0]["replayed"] == 0
    # Whoever gives the same letter once more changes nothing while it is parked.
    assert run("dlq", "replay", "g", "--offset", "0", "--to-group")[0]["replayed"] == 1
    assert rig.ends()[0] == 3, "no other group gets it"
    rig.now += 10
    rig.send("a")
    rig.heard.clear()
    succeeds = rig.by_key(lambda message: SUCCESS)
    assert rig.run(succeeds, planned=True) == [(1, "SUCCESS", 2, None), (0, "SUCCESS", 1, None), (3, "SUCCESS", 1, None)]
    assert rig.heard == [[1], [0], [3]], "the listener sees the offset that the message has in its queue"
    assert rig.lying() == {}
    rig.broker.close()


@pytest.mark.holds("given back")
@pytest.mark.parametrize("order", ["key", "none"])
def test_a_letter_that_is_given_back_and_fails_again_is_another_letter_until_it_is_in_quarantine(
    tmp_path: Path, run: Run, order: str
) -> None:
    rig, consumer = Rig(tmp_path), ENGINES[order]
    rig.send("bad")
    rig.run(consumer(rig))
    for replays in range(4):
        if replays:
            rig.run(consumer(rig), planned=True)
        rig.now += 1e5
        calls = len(rig.heard)
        # A worker that dies after its letter is stored repeats neither the call nor the letter.
        assert [one[:2] for one in rig.run(consumer(rig), planned=True, commit=False)] == [(0, "DEAD_LETTER")]
        assert [one[:2] for one in rig.run(consumer(rig), planned=True)] == [(0, "DEAD_LETTER")]
        assert len(rig.heard) - calls == (order == "key")
        listed = [(row["offset"], row["replays"], row["origin_offset"], row["body"]) for row in run("dlq", "list", "g")]
        assert listed == [(number, number, 0, "body bad") for number in range(replays + 1)]
        [done] = run("dlq", "replay", "g", "--all", "--to-group")
        assert (done["replayed"], done["quarantined"]) == ((1, 0) if replays < 3 else (0, 1))
    rig.broker.close()


def test_letters_without_a_way_back_to_their_group_are_refused(run: Run, broker: Broker) -> None:
    give_up(broker, ORDERS[:1])
    assert "GROUP.NOT_PARKED" in run("dlq", "replay", "g", "--all", "--to-group", code=1)
    for more in (["--to-topic", "b"], ["--sharding-key-type", "text"]):
        assert "OPTION.CONFLICT" in run("dlq", "replay", "g", "--all", "--to-group", *more, code=2)
    queue = broker.log.queues("%DLQ%g")[0]
    letters = [letter for piece in dead_letters.read(broker.log, queue, 0, 1) for letter in piece]
    with pytest.raises(TopicError, match="does not say from which offset"):
        _commands([replace(letters[0], origin_offset=None)])


def test_letters_in_quarantine_are_replayed_only_on_request(run: Run, broker: Broker) -> None:
    give_up(broker, ORDERS[:2])
    give_up(broker, [("poison", "x", "Timeout"), ("worse", "y", "KeyError")], "g=3,other=1")
    give_up(broker, ORDERS[2:3], "g=2,other=9")
    listed = run("dlq", "list", "g", "--quarantined")
    assert [(row["body"], row["replays"], row["quarantined"]) for row in listed] == [("poison", 3, True), ("worse", 3, True)]
    said = run("dlq", "replay", "g", "--offset", "2", code=2)
    assert "OPTION.MISSING" in said
    assert "dead letter 2 is in quarantine: its message was replayed 3 times" in said
    to = ["--to-topic", "b"]
    for conditions, counts in ((["--key", "x"], (2, 1)), (["--all"], (3, 2)), (["--all"], (0, 0))):
        [done] = run("dlq", "replay", "g", *conditions, *to)
        assert (done["replayed"], done["quarantined"]) == counts
    assert sent(broker, "b") == ["1", "3", "1", "2", "3"]
    assert [row["replayed"] for row in run("dlq", "list", "g")] == [True, True, False, False, True]
    for conditions, count in (
        (["--quarantined", "--error", "Timeout"], 1),
        (["--all", "--quarantined"], 2),
    ):
        assert run("dlq", "replay", "g", *conditions, *to)[0]["replayed"] == count
    assert run("dlq", "replay", "g", "--offset", "2", "--offset", "0", "--quarantined", *to)[0]["replayed"] == 2
    assert sent(broker, "b")[5:] == ["poison", "poison", "worse", "1", "poison"]
    assert [row["replayed"] for row in run("dlq", "list", "g")] == [True, True, False, False, True]
    [queue] = broker.log.queues("b")
    copies = broker.log.pull(queue, 5, 1, 1 << 20, ("properties",)).to_pylist()
    assert copies == [{"properties": [(REPLAYS, "g=4,other=1")]}]


def test_a_table_names_what_is_in_quarantine(store: Path, broker: Broker) -> None:
    give_up(broker, ORDERS[:1], "g=3")
    result = CliRunner().invoke(app, ["--path", str(store), "--no-json", "dlq", "list", "g"], env={"COLUMNS": "200"})
    assert "quarantined" in result.output
    result = CliRunner().invoke(app, ["--path", str(store), "--no-json", "dlq", "replay", "g", "--all"])
    assert (
        "left out 1 in quarantine, because each was replayed 3 times or more and failed again. Give --quarantined to send them"
        in result.output
    )


# -- copies of offsets


class Two:
    """The groups live and canary. A query of live owns both queues of topic a. live also has an offset in topic b."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.queues = broker.log.queues("a")
        [self.other] = broker.log.queues("b")
        for queue in (*self.queues, self.other):
            broker.log.append({queue: pa.record_batch({"body": [b"m"] * 10})})
        self.tokens = self.work("live", [*self.queues, self.other])
        broker.groups.commit(dict(zip(self.tokens, (3, 5, 7), strict=True)))

    def work(self, group: str, queues: Sequence[MessageQueue]) -> list[LockToken]:
        client = self.broker.groups.join(f"query of {group}")
        self.broker.groups.heartbeat(group, client, Subscription("shared", "a", "averagely"))
        return locked(self.broker, group, client, queues)

    def at(self, group: str) -> list[int | None]:
        known = self.broker.groups.offsets(group, [*self.queues, self.other])
        return [known.get(queue) for queue in (*self.queues, self.other)]


@pytest.fixture
def two(broker: Broker) -> Two:
    return Two(broker)


def test_copies_the_offsets_of_a_running_group_to_a_new_one(run: Run, two: Two) -> None:
    planned = run("group", "copy", "live", "canary", "--dry-run")
    assert [(row["group"], row["topic"], row["queue_id"], row["old"], row["new"], row["dry_run"]) for row in planned] == [
        ("canary", "a", 0, None, 3, True),
        ("canary", "a", 1, None, 5, True),
        ("canary", "b", 0, None, 7, True),
    ]
    assert "canary" not in two.broker.admin.groups()
    before = datetime.now(UTC)
    done = run("group", "copy", "live", "canary")
    copied_at = done[0]["time"]
    assert before <= datetime.fromisoformat(copied_at) <= datetime.now(UTC), "--since of an audit needs the time of the copy"
    assert done == [{**row, "dry_run": False, "time": copied_at} for row in planned]
    assert two.at("canary") == two.at("live") == [3, 5, 7]
    assert two.broker.groups.stale(two.tokens) == [], "the query of the first group must keep its locks"


def test_refuses_a_copy_that_would_forget_parked_messages(run: Run, two: Two) -> None:
    """Parked messages of live are not copied. Those of canary are kept or dropped, as by a seek. The user must decide first."""
    assert two.broker.groups.park(two.tokens[0], [Parking(two.queues[0], 4, Ticket(4, 1, 1, 9, "no"))])
    for more in ([], ["--dry-run"]):
        said = run("group", "copy", "live", "canary", *more, code=1)
        assert "GROUP.PARKED" in said
        assert "1 parked messages of queue a/embedded/0" in said or "1 parked message" in said
        assert "--leave-parked" in said
    assert two.at("canary") == [None] * 3
    assert len(run("group", "copy", "live", "canary", "--topic", "b")) == 1, "no message of b is parked, so b can be copied"
    run("group", "copy", "live", "canary", "--leave-parked")
    [token] = two.work("canary", two.queues[:1])
    two.broker.groups.park(token, [Parking(two.queues[0], 6, Ticket(6, 1, 1, 9, "no"))])
    two.broker.groups.unlock([token])
    two.broker.groups.leave(ClientIdentity(token.owner, token.client_id))
    said = run("group", "copy", "live", "canary", "--leave-parked", code=1)
    assert "--parked keep, --parked drop" in said
    assert len(run("group", "copy", "live", "canary", "--leave-parked", "--parked", "drop")) == 3


def test_what_cannot_be_copied_is_refused_before_anything_changes(run: Run, two: Two) -> None:
    two.broker.admin.create_topic("c", 1)
    for arguments, condition, said, code in (
        (["live", "live"], "OPTION.CONFLICT", "cannot be copied to itself", 2),
        (["none", "canary"], "GROUP.MISSING", "'none'", 3),
        (["live", "can ary"], "GROUP.BAD_NAME", "can ary", 2),
        (["live", "canary", "--topic", "c"], "OPTION.MISSING", "no offsets in topic 'c'", 2),
        (["live", "canary", "--topic", "d"], "TOPIC.MISSING", "'d'", 3),
    ):
        error = run("group", "copy", *arguments, code=code)
        assert condition in error
        assert said in error
    two.work("idle", two.queues)
    assert "has no offsets that could be copied" in run("group", "copy", "idle", "canary", code=2)
    assert two.broker.admin.trim("a", {two.queues[0]: 10})
    error = run("group", "copy", "live", "canary", code=1)
    assert "group 'live' is at 3 in queue a/embedded/0, which now begins at 10 and ends at 10. Seek this group first" in error
    assert two.at("canary") == [None] * 3
    to = '{"a": {"embedded": {"0": 3}}}'
    assert "the message at 3 was deleted by retention. Use -2" in run("group", "seek", "idle", "--to", to, "--force", code=1)


def test_a_seek_to_a_time_ends_at_the_end_that_was_seen(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process writes between the request for the ends and the search for the time."""
    log, real = two.broker.log, two.broker.log.offset_at

    def written_to(queue: MessageQueue, timestamp: int) -> int:
        log.append({queue: pa.record_batch({"body": [b"m"] * 2})})
        return real(queue, timestamp)

    monkeypatch.setattr(log, "offset_at", written_to)
    assert resolve(log, parse_target("2999-01-01T00:00:00Z", "--to"), two.queues) == dict.fromkeys(two.queues, 10)


def test_in_python_the_same_letters_are_chosen_and_all_are_sent_once(broker: Broker) -> None:
    give_up(broker, ORDERS)
    chosen = orderedmq.LetterFilter(error="KeyError", quarantined=False)
    first = orderedmq.replay_dead_letters(broker, "g", chosen, limit=1)
    assert (first.letters, first.topics, sent(broker)) == (1, {"a": 1}, ["2"])
    assert orderedmq.replay_dead_letters(broker, "g", chosen).letters == 2
    assert orderedmq.replay_dead_letters(broker, "g").letters == 5
    assert sorted(sent(broker)) == ["1", "2", "2", "2", "3", "3", "4", "5"]
    assert orderedmq.replay_dead_letters(broker, "g").letters == 0
    for limit in (0, -1, 1.5):
        with pytest.raises(OptionError, match=f"limit is {limit}, but must be a whole number from 1"):
            orderedmq.replay_dead_letters(broker, "g", limit=limit)  # type: ignore[arg-type]


def test_a_remedy_names_what_its_reader_can_set(broker: Broker) -> None:
    # "4294967299" goes to the second of two queues as a String, and to the first one as a Long.
    give_up(broker, [("1", "4294967299", "no")], "g=3")
    every = orderedmq.LetterFilter(offsets=frozenset([0]), quarantined=False)
    with pytest.raises(OptionError, match="Set quarantined=None in the LetterFilter .*, or raise max_replays"):
        orderedmq.replay_dead_letters(broker, "g", every)
    every = orderedmq.LetterFilter(quarantined=None)
    with pytest.raises(OptionError, match='Say with sharding_key_type="long" .*, or pass sharding_key_type="text"'):
        orderedmq.replay_dead_letters(broker, "g", every)
    with pytest.raises(OptionError, match='whole numbers, not text. Drop selector="mod"'):
        orderedmq.replay_dead_letters(broker, "g", every, selector="mod", sharding_key_type="text")
    assert orderedmq.replay_dead_letters(broker, "g", every, sharding_key_type="long").letters == 1
    assert [body for _, body in bodies(broker, "a")[0]] == [b"?", b"1"]
    broker.admin.delete_topic("a")
    with pytest.raises(TopicError, match=r"which no longer exists. Pass to_topic \(--to-topic\)"):
        orderedmq.replay_dead_letters(broker, "g", orderedmq.LetterFilter(offsets=frozenset([0])))


def test_a_letter_without_a_key_goes_to_its_old_queue_at_its_broker() -> None:
    queues = [MessageQueue("t", name, number) for name in ("broker-a", "broker-b") for number in range(2)]

    def goes_to(origin: MessageQueue | None) -> MessageQueue:
        letter = dead_letters.DeadLetter(
            MessageQueue("%DLQ%g", "broker-b", 0), 3, origin, 9, b"", None, None, None, None, None, None, 0, {}
        )
        [(queue, _)] = _choose_queues([letter], {"t": queues}, "t", Keying())
        return queue

    assert [goes_to(queue) for queue in queues] == queues
    assert goes_to(MessageQueue("other", "", 1)) == queues[3]
    assert goes_to(MessageQueue("t", "broker-c", 5)) == queues[1]
    assert goes_to(None) == queues[3]
