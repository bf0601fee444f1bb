"""The command over a cluster of two brokers, each of which has a queue 0."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from orderedmq.cli import app
from orderedmq.model import DEAD_LETTER_PREFIX
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.rows.dead_letters import dead_letter_properties
from orderedmq.schema import PRODUCER_SCHEMA
from orderedmq.tools import dead_letters
from tests.command import bodies
from tests.live.rocketmq.group_world import World
from tests.ui_site import served
from tests.waits import until

pytestmark = pytest.mark.usefixtures("unhurried")

Run = Callable[..., Any]


@pytest.fixture
def world(two_brokers: Cluster) -> Iterator[World]:
    with World(two_brokers) as world:
        yield world


@pytest.fixture
def run(two_brokers: Cluster) -> Run:
    """A function that runs the command. It returns the JSON rows, the output with --no-json, or the error for an exit code above 0."""

    def call(*arguments: str, code: int = 0) -> Any:
        result = CliRunner().invoke(app, [*arguments, "--namesrv", two_brokers.address], env={"COLUMNS": "200"})
        assert result.exit_code == code, result.output
        if code:
            return result.stderr
        return result.output if "--no-json" in arguments else [json.loads(line) for line in result.stdout.splitlines()]

    return call


def where(rows: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(row["broker"], row["queue_id"]) for row in rows]


FOUR = [("broker-a", 0), ("broker-a", 1), ("broker-b", 0), ("broker-b", 1)]


def test_each_queue_is_shown_with_its_broker(world: World, run: Run) -> None:
    for queue in world.queues:
        world.send(queue, 1)
    client = replace(world.broker.groups.join("query"), name="billing")
    world.broker.groups.heartbeat(world.group, client, world.shared())
    tokens = world.lock(world.broker, client)
    world.broker.groups.commit(dict.fromkeys(tokens, 1))
    assert {(row["query"], row["query_name"]) for row in run("lock", "list", "--group", world.group)} == {("query", "billing")}
    assert "orderedmq-query" not in run("lock", "list", "--group", world.group, "--no-json")
    for arguments in (["topic", "describe", world.topic], ["lock", "list", "--group", world.group], ["top", world.group]):
        assert where(run(*arguments)) == FOUR
        shown = run(*arguments, "--no-json")
        assert "broker " in shown
        assert shown.count("broker-b") == 2
    rows = run("group", "describe", world.group)
    assert where([row for row in rows if row["kind"] == "queue"]) == FOUR
    assert run("group", "describe", world.group, "--no-json").count("broker-b") == 2
    assert where(run("group", "seek", world.group, "--to", "earliest", "--force")) == FOUR


def give_up_at_each_broker(world: World) -> None:
    """Write dead letters for the first two messages of queue 0 of each broker."""
    client = world.broker.groups.join("query")
    for token in world.lock(world.broker, client, [queue for queue in world.queues if queue.queue_id == 0]):
        world.send(token.queue, 2)
        letters = [
            {
                "body": f"{token.queue.broker_name} {offset}".encode(),
                "properties": list(
                    dead_letter_properties(
                        token.queue, offset, message_id="", reconsume_times=1, error="no", properties={}
                    ).items()
                ),
            }
            for offset in range(2)
        ]
        world.broker.groups.dead_letter(token, pa.RecordBatch.from_pylist(letters, schema=PRODUCER_SCHEMA), range(2))
    world.broker.groups.leave(client)
    until(lambda: len(world.log.queues(DEAD_LETTER_PREFIX + world.group)) == 2, "the letters' route has both brokers", 60)


def test_the_dead_letters_of_each_broker_are_seen_and_replayed(world: World, run: Run) -> None:
    give_up_at_each_broker(world)
    places = [("broker-a", 0), ("broker-a", 1), ("broker-b", 0), ("broker-b", 1)]
    assert [(row["at_broker"], row["offset"]) for row in run("dlq", "list", world.group)] == places
    assert "more letters follow: --at-broker broker-b --offset 0" in run("dlq", "list", world.group, "-n", "2", "--no-json")
    named = ["--at-broker", "broker-b", "--offset", "1"]
    assert [row["body"] for row in run("dlq", "list", world.group, *named)] == ["broker-b 1"]
    for words in (["list"], ["replay"]):
        assert "Name one of broker-a, broker-b with at_broker (--at-broker)" in run(
            "dlq", *words, world.group, "--offset", "1", code=2
        )
    assert "Name one of broker-a, broker-b" in run("dlq", "list", world.group, "--at-broker", "broker-c", code=2)
    assert dead_letters.count(world.broker, world.group) == dead_letters.LetterCount(4, 4, 4)

    def sent() -> list[str]:
        return sorted(body.decode() for queue in bodies(world.broker, world.topic) for _, body in queue if b"broker" in body)

    assert run("dlq", "replay", world.group, *named)[0]["replayed"] == 1
    assert sent() == ["broker-b 1"]
    with served(world.broker, allow_changes=True) as site:
        page = f"/groups/{world.group}/dead"
        assert "broker-a 0" in site.get(page).words
        there = site.get(f"{page}?broker=broker-b").words
        assert "broker-b 0" in there
        assert "broker-a 0" not in there
        answer = site.post(f"{page}/replay?broker=broker-a", [("offset", "1")])
        assert "Replayed 1 dead letter" in site.follow(answer).words
    assert sent() == ["broker-a 1", "broker-b 1"]
    assert [run("dlq", "replay", world.group, "--limit", "2")[0]["replayed"] for _ in range(3)] == [2, 2, 0]
    assert sent() == sorted([*(f"{broker} {offset}" for broker, offset in places), "broker-a 1", "broker-b 1"])
    assert all(row["replayed"] for row in run("dlq", "list", world.group))
