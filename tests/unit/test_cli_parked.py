"""The commands for parked messages: they list them and send orders to their owners. Other commands also count parked messages."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import orderedmq
from orderedmq import pulls
from orderedmq.broker import Broker
from orderedmq.cli import app
from orderedmq.errors import OptionError
from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import ClientIdentity, LockToken
from orderedmq.parking import AT_ONCE, DEAD_LETTERED, DROPPED, HELD, LOT_COLUMNS, Lot, Parking, Ticket, lot_token, parked_queue
from orderedmq.tools.parked import LotReader
from tests.command import Run

HOUR = 3_600_000


class Owner(NamedTuple):
    """A query of group g, and its actions on the lots of its queues."""

    broker: Broker
    client: ClientIdentity
    tokens: dict[MessageQueue, LockToken]

    def park(self, queue: MessageQueue, *tickets: Ticket) -> None:
        assert all(self.broker.groups.park(self.tokens[queue], [Parking(queue, one.offset, one) for one in tickets]))

    def done(self, queue: MessageQueue, offset: int) -> None:
        """Commit the lot's offset: its messages before ``offset`` are decided or parked again."""
        self.broker.groups.commit({lot_token(self.tokens[queue]): offset})

    def leave(self) -> None:
        self.broker.groups.unlock(list(self.tokens.values()))
        self.broker.groups.leave(self.client)

    def sees(self, queue: MessageQueue) -> dict[object, int]:
        """The due time of each key, as the owner reads it when it plans its next batch."""
        lot, at = parked_queue("g", queue), self.broker.groups.offsets("g", [parked_queue("g", queue)])
        found = Lot(at.get(lot, 0))
        pulls.read_lot(self.broker.log, found, lot, pulls.end_of_lot(self.broker.log, lot))
        return {key: one.due for key, one in found.keys.items()}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def broker(store: Path) -> Iterator[Broker]:
    """Topic a has two queues of six messages each, with the keys x, y, none, x, y, none. Topic b has one queue and the key x."""
    with orderedmq.connect(store) as broker:
        broker.admin.create_topic("a", 2)
        broker.admin.create_topic("b", 1)
        for queue in broker.log.queues("a"):
            broker.log.append({queue: rows("x", "y", None, "x", "y", None)})
        broker.log.append({broker.log.queues("b")[0]: rows("x")})
        yield broker


def rows(*keys: str | None) -> pa.RecordBatch:
    return pa.record_batch({"body": [b"body"] * len(keys), "sharding_key": pa.array(keys, pa.string())})


@pytest.fixture
def queues(broker: Broker) -> tuple[MessageQueue, MessageQueue, MessageQueue]:
    first, second, other = *broker.log.queues("a"), *broker.log.queues("b")
    return first, second, other


@pytest.fixture
def owner(broker: Broker, queues: Sequence[MessageQueue]) -> Owner:
    client = broker.groups.join("billing")
    found = broker.groups.lock("g", client, queues)
    return Owner(broker, client, {queue: token for queue, token in found.items() if isinstance(token, LockToken)})


class Ran(NamedTuple):
    rows: list[dict[str, Any]]
    error: str


@pytest.fixture
def run(store: Path) -> Callable[..., Ran]:
    """Run the command. Returns the JSON lines that it printed, and its other output."""

    def call(*arguments: str, code: int = 0) -> Ran:
        result = CliRunner().invoke(app, ["--path", str(store), *arguments])
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output
        if code:
            assert result.stdout == ""
            assert len(result.stderr.splitlines()) == 1
        return Ran([json.loads(line) for line in result.stdout.splitlines()], result.stderr)

    return call


@pytest.fixture
def text(store: Path) -> Run:
    """Run the command as a person does. Returns its output."""

    def call(*arguments: str, width: int = 200) -> str:
        result = CliRunner().invoke(app, ["--path", str(store), "--no-json", *arguments], env={"COLUMNS": str(width)})
        assert result.exit_code == 0, result.output
        return result.output

    return call


def soon(ms: int) -> int:
    return int(time.time() * 1000) + ms


def shown(found: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in found]


# General.


@pytest.mark.parametrize(
    "command",
    [["list"], ["retry", "--all"], ["drop", "--all", "--yes"], ["hold", "--key", "x"], ["dead-letter", "--key", "x"],
     ["replace", "--key", "x", "--body", "b"]],
)  # fmt: skip
def test_a_group_that_is_not_there(run: Callable[..., Ran], store: Path, command: list[str]) -> None:
    name, *more = command
    assert "STORE.MISSING" in run("parked", name, "g", *more, code=3).error
    assert not store.exists()
    with orderedmq.connect(store) as broker:
        broker.admin.create_topic("a", 1)
        assert "GROUP.MISSING" in run("parked", name, "g", *more, code=3).error
        assert "GROUP.BAD_NAME" in run("parked", name, "g h", *more, code=2).error
        assert broker.admin.groups() == []


# Listing.


def test_each_parked_key_is_listed_with_what_its_first_message_says(
    run: Callable[..., Ran], text: Run, broker: Broker, owner: Owner, queues: Sequence[MessageQueue]
) -> None:
    first, second, _ = queues
    stored = broker.log.pull(first, 0, 1, 1 << 20, ("store_timestamp",)).column(0).cast(pa.int64())[0].as_py()
    due = soon(HOUR)
    owner.park(first, Ticket(0, 3, 1, due, "ValueError: no"), Ticket(3, 0, 0, AT_ONCE), Ticket(2, 1, 1, HELD))
    owner.park(second, Ticket(1, 2, 1, soon(-5)))
    found = run("parked", "list", "g").rows
    assert 3500 < found[0].pop("due_in") <= 3600
    assert found[0] == {
        "group": "g",
        "topic": "a",
        "broker": "embedded",
        "queue_id": 0,
        "sharding_key": "x",
        "offset": 0,
        "messages": 2,
        "state": "waiting",
        "due": datetime.fromtimestamp(due / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "attempts": 3,
        "times_parked": 1,
        "error": "ValueError: no",
        "oldest": datetime.fromtimestamp(stored / 1e6, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
    }
    names = ("queue_id", "sharding_key", "offset", "messages", "state", "attempts", "error")
    assert shown(found[1:], *names) == [(0, None, 2, 1, "held", 1, None), (1, "y", 1, 1, "waiting", 2, None)]
    assert shown(found[1:], "due_in") == [(None,), (0,)]
    lines = text("parked", "list", "g").splitlines()[2:]
    assert ["ValueError: no" in line for line in lines[1:4]] == [True, False, False]
    assert [word in line for word, line in zip(("in 60 m", "held", "now"), lines[1:4], strict=True)] == [True] * 3
    assert ["offset 2" in line for line in lines[1:4]] == [False, True, False], "a message without a key has its offset"


def test_reads_a_lot_again_that_its_owner_has_changed(
    broker: Broker, owner: Owner, queues: Sequence[MessageQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = queues[0]
    # Two chunks, because only whole chunks are deleted.
    owner.park(first, *(Ticket(offset, 1, 1, HELD) for offset in range(5)))
    owner.park(first, Ticket(5, 1, 1, HELD))
    reader = LotReader(broker)
    read = pulls.read_lot
    seen: list[Any] = []

    def read_late(*given: Any) -> None:
        # After the group's offset was looked up and before the lot is read, the owner finishes two batches, and the broker
        # deletes the first.
        if not seen:
            owner.done(first, 5)
            owner.done(first, 6)
        seen.append(given)
        read(*given)

    monkeypatch.setattr(pulls, "read_lot", read_late)
    assert reader.look("g") == {}
    assert len(seen) == 1
    assert broker.log.bounds([parked_queue("g", first)])[parked_queue("g", first)].min_offset == 5


def test_each_parked_message_is_read_once(
    broker: Broker, owner: Owner, queues: Sequence[MessageQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = queues[0]
    pulled: list[tuple[int, tuple[str, ...]]] = []
    log = broker.log
    pull = log.pull

    def count(queue: MessageQueue, offset: int, most: int, size: int, columns: tuple[str, ...], *more: Any) -> pa.RecordBatch:
        found = pull(queue, offset, most, size, columns, *more)
        pulled.extend((at, columns) for at in range(offset, offset + found.num_rows))
        return found

    monkeypatch.setattr(log, "pull", count)
    reader = LotReader(broker)
    owner.park(first, Ticket(0, 1, 1, HELD), Ticket(3, 0, 0, AT_ONCE))
    for _ in range(3):
        assert reader.look("g")[first].messages == 2
    owner.park(first, Ticket(1, 1, 1, HELD))
    assert reader.look("g")[first].messages == 3
    assert pulled == [(0, LOT_COLUMNS), (1, LOT_COLUMNS), (2, LOT_COLUMNS)]
    owner.done(first, 3)
    assert reader.look("g") == {}


# Orders.


@pytest.mark.parametrize(("action", "due"), [("retry", AT_ONCE), ("hold", HELD)])
def test_an_order_reaches_the_owner(
    run: Callable[..., Ran], owner: Owner, queues: Sequence[MessageQueue], action: str, due: int
) -> None:
    first, second, _ = queues
    later = soon(HOUR)
    assert shown(run("parked", action, "g", "--all").rows, "keys") == [(0,)], "nothing is parked"
    owner.park(first, Ticket(0, 3, 1, later), Ticket(3, 0, 0, AT_ONCE), Ticket(1, 1, 1, later), Ticket(2, 1, 1, later))
    owner.park(second, Ticket(2, 1, 1, later))
    run("parked", action, "g", "--offset", "2", "--topic", "a/0")
    ran = run("parked", action, "g", "--offset", "3", "--topic", "a/0")
    at = {"topic": "a", "broker": "embedded", "queue_id": 0, "owned": True}
    assert ran.rows == [{"group": "g", "action": action, "keys": 1, "messages": 2, "queues": [at]}]
    assert ran.error == ""
    assert owner.sees(first) == {"x": due, "y": later, 2: due}
    assert owner.sees(second) == {2: later}


def test_an_order_without_an_owner_waits_for_one(run: Callable[..., Ran], owner: Owner, queues: Sequence[MessageQueue]) -> None:
    owner.park(queues[0], Ticket(0, 3, 1, HELD))
    owner.leave()
    ran = run("parked", "hold", "g", "--key", "x")
    assert [queue["owned"] for queue in ran.rows[0]["queues"]] == [False]
    assert ran.error == "no query owns queue a/embedded/0 in group g now. The next owner carries the command out\n"


def test_a_drop_is_asked_for(run: Callable[..., Ran], owner: Owner, queues: Sequence[MessageQueue]) -> None:
    first, second, _ = queues
    owner.park(first, Ticket(0, 3, 1, HELD), Ticket(3, 0, 0, AT_ONCE), Ticket(2, 1, 1, HELD))
    owner.park(second, Ticket(0, 3, 1, HELD))
    for arguments, question in (
        (["--key", "x", "--all"], "3 parked messages of 2 keys of group g from queues a/embedded/0, a/embedded/1?"),
        (["--key", "x", "--all", "--topic", "a/0"], "2 parked messages of key 'x' of group g from queue a/embedded/0?"),
        (["--key", "x", "--topic", "a/0"], "message 0 of key 'x' of group g from queue a/embedded/0?"),
        (["--key", "x", "--offset", "3"], "message 3 of key 'x' of group g from queue a/embedded/0?"),
        (["--offset", "2"], "message 2 of queue a/embedded/0 of group g from queue a/embedded/0?"),
    ):
        said = run("parked", "drop", "g", *arguments, code=2).error
        assert f"Drop {question} No listener sees what is dropped." in said
        assert "Give --yes" in said
    assert [owner.sees(queue) for queue in (first, second)] == [{"x": HELD, 2: HELD}, {"x": HELD}]
    run("parked", "drop", "g", "--key", "x", "--all", "--topic", "a/0", "--yes")
    assert [owner.sees(queue) for queue in (first, second)] == [{"x": DROPPED, 2: HELD}, {"x": HELD}]


@pytest.mark.parametrize(
    ("command", "action"), [(["drop", "--yes"], "drop"), (["dead-letter"], "dead_letter"), (["replace", "--yes"], "replace")]
)
def test_an_order_for_one_message_is_for_the_first_of_its_key_or_the_one_at_its_offset(
    run: Callable[..., Ran], owner: Owner, queues: Sequence[MessageQueue], tmp_path: Path, command: list[str], action: str
) -> None:
    first = queues[0]
    later = soon(HOUR)
    owner.park(first, Ticket(0, 3, 1, later), Ticket(3, 0, 0, AT_ONCE), Ticket(1, 1, 1, HELD), Ticket(2, 1, 1, later))
    name, *more = command
    (tmp_path / "body").write_bytes(b"\xff")
    body = ["--file", str(tmp_path / "body")] if action == "replace" else []
    ran = run("parked", name, "g", "--key", "x", *more, *body)
    at = {"topic": "a", "broker": "embedded", "queue_id": 0, "owned": True}
    assert ran.rows == [{"group": "g", "action": action, "keys": 1, "messages": 1, "queues": [at]}]
    assert owner.sees(first) == {"x": AT_ONCE, "y": HELD, 2: later}
    run("parked", name, "g", "--key", "x", "--offset", "3", *more, *body)
    run("parked", name, "g", "--offset", "2", *more, *body)
    ended = {"drop": DROPPED, "dead_letter": DEAD_LETTERED, "replace": AT_ONCE}[action]
    assert owner.sees(first) == {"x": ended, "y": HELD, 2: ended}
    states = [{"drop": "dropped", "dead_letter": "dead_letter", "replace": "replaced"}[action]] * 2
    assert [row["state"] for row in run("parked", "list", "g").rows if row["sharding_key"] != "y"] == states
    if action == "replace":
        rows = pa.Table.from_batches(
            pulls.pulls(owner.broker.log, parked_queue("g", first), 4, 7, 9, 1 << 20, ("body", "sharding_key"))
        ).to_pylist()
        assert rows == [{"body": b"\xff", "sharding_key": key} for key in ("x", "x", None)]
    else:
        assert "GROUP.NOT_PARKED" in run("parked", name, "g", "--key", "x", *more, code=1).error


def test_lists_dropped_messages_until_the_owner_reads_the_order(
    run: Callable[..., Ran], text: Run, owner: Owner, queues: Sequence[MessageQueue]
) -> None:
    first = queues[0]
    owner.park(first, Ticket(0, 3, 1, HELD), Ticket(1, 1, 1, HELD))
    run("parked", "drop", "g", "--key", "x", "--all", "--yes")
    assert shown(run("parked", "list", "g").rows, "sharding_key", "messages", "state") == [
        ("x", 1, "dropped"),
        ("y", 1, "held"),
    ]
    assert "dropped" in text("parked", "list", "g")
    for action in ("retry", "hold", "drop"):
        said = run("parked", action, "g", "--key", "x", code=1).error
        assert "GROUP.NOT_PARKED" in said
    assert shown(run("parked", "retry", "g", "--all").rows, "keys") == [(1,)]
    # A message that was parked after the order is counted separately.
    owner.park(first, Ticket(3, 0, 0, AT_ONCE))
    assert shown(run("parked", "list", "g").rows, "sharding_key", "offset", "messages", "state") == [
        ("x", 3, 1, "waiting"),
        ("y", 1, 1, "waiting"),
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--key", "z"], 1, r"GROUP.NOT_PARKED\] group 'g' has no parked messages of key 'z', or an order"),
        (["--key", "y", "--topic", "b"], 1, "GROUP.NOT_PARKED"),
        (["--offset", "5"], 1, "no parked message at offset 5"),
        (["--key", "x"], 2, "TOPIC.AMBIGUOUS.*parked from several topics. Give --topic with a or b"),
        (["--offset", "2"], 2, "TOPIC.AMBIGUOUS.*offset 2 of 2 queues. Give --topic with a/embedded/0 or a/embedded/1"),
        ([], 2, "OPTION.MISSING.*the command needs --key or --offset, once or several times, or --all"),
        (["--all", "--key", "x"], 2, "OPTION.CONFLICT"),
        (["--offset", "-1"], 2, "--offset"),
        (["--key", "y", "--key", "z"], 1, "key 'z'"),
    ],
)
def test_an_order_that_makes_no_sense_is_not_given(
    store: Path, owner: Owner, queues: Sequence[MessageQueue], arguments: list[str], code: int, says: str
) -> None:
    first, second, other = queues
    owner.park(first, Ticket(0, 3, 1, HELD), Ticket(2, 1, 1, HELD), Ticket(1, 1, 1, HELD))
    owner.park(second, Ticket(2, 3, 1, HELD))
    owner.park(other, Ticket(0, 3, 1, HELD))
    for action in (["retry"], ["hold"]):
        ran = CliRunner().invoke(app, ["--path", str(store), "parked", *action, "g", *arguments], env={"COLUMNS": "200"})
        assert ran.exit_code == code
        assert re.search(says, ran.stderr)
    assert [owner.sees(queue) for queue in queues] == [{"x": HELD, 2: HELD, "y": HELD}, {2: HELD}, {"x": HELD}]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--key", "z"], 1, "GROUP.NOT_PARKED"),
        (["--offset", "5"], 1, "GROUP.NOT_PARKED.*no parked message at offset 5"),
        (["--key", "y", "--offset", "0"], 1, "GROUP.NOT_PARKED.*no parked message at offset 0 of key 'y'"),
        (["--key", "x"], 2, "TOPIC.AMBIGUOUS.*parked from several topics"),
        (["--offset", "0"], 2, "TOPIC.AMBIGUOUS.*offset 0 of 2 queues"),
        ([], 2, "OPTION.MISSING"),
    ],
)
def test_an_order_for_a_message_that_is_not_named_well_is_not_given(
    store: Path, owner: Owner, queues: Sequence[MessageQueue], arguments: list[str], code: int, says: str
) -> None:
    first, _, other = queues
    owner.park(first, Ticket(0, 3, 1, HELD), Ticket(1, 1, 1, HELD))
    owner.park(other, Ticket(0, 3, 1, HELD))
    change = owner.broker.log.change()
    for action in (["drop", "--yes"], ["dead-letter"], ["replace", "--yes", "--body", "b"]):
        ran = CliRunner().invoke(app, ["--path", str(store), "parked", *action, "g", *arguments], env={"COLUMNS": "200"})
        assert (ran.exit_code, bool(re.search(says, ran.stderr))) == (code, True), ran.stderr
    assert owner.broker.log.change() == change


def test_a_command_that_contradicts_itself_is_refused(
    run: Callable[..., Ran], owner: Owner, queues: Sequence[MessageQueue]
) -> None:
    owner.park(queues[0], Ticket(0, 3, 1, HELD), Ticket(1, 3, 1, HELD))
    for more in ([], ["--key", "x"]):
        assert "OPTION.CONFLICT" in run("parked", "drop", "g", "--all", "--offset", "0", "--yes", *more, code=2).error
    for body in ([], ["--body", "a", "--file", "-"]):
        assert "OPTION.MISSING" in run("parked", "replace", "g", "--key", "x", *body, code=2).error
    two = ("--key", "x", "--key", "y", "--body", "b")
    assert "TOPIC.AMBIGUOUS" in run("parked", "replace", "g", *two, code=2).error
    assert (
        "Replace the body of message 0 of key 'x' of group g from queue a/embedded/0, 'body' (4 bytes), by 'b' (1 bytes)?"
        in run("parked", "replace", "g", "--key", "x", "--body", "b", code=2).error
    )
    broker = owner.broker
    wrongs: tuple[dict[str, Any], ...] = ({}, {"key": "x", "body": b""}, {"offset": 0, "action": "replace"})
    for wrong in wrongs:
        with pytest.raises(OptionError):
            orderedmq.repair_parked(broker, "g", **{"action": "drop", **wrong})


# Output of other commands.


def test_a_group_shows_what_is_parked_with_its_queue(
    run: Callable[..., Ran], text: Run, broker: Broker, owner: Owner, queues: Sequence[MessageQueue]
) -> None:
    first, second, _ = queues
    for command in (["group", "describe", "g"], ["top", "g"]):
        assert "parked" not in text(*command)
        assert {row["parked"] for row in run(*command).rows} == {0}
    owner.park(first, Ticket(0, 3, 1, soon(HOUR)), Ticket(3, 0, 0, AT_ONCE), Ticket(1, 1, 1, HELD))
    owner.park(second, Ticket(1, 1, 1, HELD))
    broker.groups.commit({owner.tokens[first]: 6, owner.tokens[second]: 6})
    # The group now also has an offset for the lot.
    owner.done(first, 0)
    for command in (["group", "describe", "g"], ["top", "g"], ["top"]):
        found = run(*command).rows
        names = ("topic", "queue_id", "lag", "parked", "parked_keys")
        assert shown(found, *names) == [("a", 0, 0, 3, 2), ("a", 1, 0, 1, 1), ("b", 0, 1, 0, 0)]
        assert 3500 < found[0]["parked_due_in"] <= 3600
        assert shown(found[1:], "parked_due_in") == [(None,), (None,)]
        assert re.search(r"parked +due in .*\n.*\n.* 3 +60 m .*\n.* 1 +- ", text(*command))
    assert text("group", "describe", "g").rstrip().endswith("yes"), "the owner of the last queue lives"
    assert run("group", "list").rows == [
        {"group": "g", "topics": ["a", "b"], "queues": 3, "lag": 1, "owned_queues": 3, "alive": True}
    ]
