"""Helpers of the notebooks: the order events of a small shop, a quiet local Spark, and short reports on queries."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from orderedmq.barrier import Barrier
from orderedmq.broker import Broker
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.tools.group_state import group_queues
from orderedmq.tools.parked import LotReader

STEPS = ("created", "paid", "packed", "shipped")
OPENING = datetime(2024, 5, 6, 8, tzinfo=UTC)


def order_events(orders: int, seed: int) -> pa.Table:
    """Return the events of ``orders`` orders, sorted by time. The orders overlap; each has its steps in order.

    The same seed gives the same events.
    """
    chance = random.Random(seed)
    happened = []
    for number in range(1, orders + 1):
        seconds = number * 60.0
        for step, name in enumerate(STEPS):
            happened.append((seconds, number, step, name))
            seconds += 20 + chance.expovariate(1 / 240)
    happened.sort()
    times = [(OPENING + timedelta(seconds=round(seconds))).isoformat() for seconds, *_ in happened]
    keys = [f"order-{number:04}" for _, number, _, _ in happened]
    events = [name for *_, name in happened]
    bodies = [json.dumps({"order": key, "event": event, "at": at}) for key, event, at in zip(keys, events, times)]
    return pa.table({"sharding_key": keys, "tags": events, "body": bodies})


def with_a_date_of_its_own(events: pa.Table, order: str, step: str) -> pa.Table:
    """Return ``events``, but with the date of the event ``step`` of ``order`` in another format, such as 06.05.2024 08:10."""
    rows = events.to_pylist()
    for row in rows:
        if (row["sharding_key"], row["tags"]) == (order, step):
            body = json.loads(row["body"])
            row["body"] = json.dumps({**body, "at": datetime.fromisoformat(body["at"]).strftime("%d.%m.%Y %H:%M")})
    return pa.Table.from_pylist(rows, schema=events.schema)


def local_spark(folder: Path, threads: int = 2) -> SparkSession:
    """Return a Spark session on some threads of this machine. The log of its JVM goes to ``spark.log`` in ``folder``."""
    builder = SparkSession.builder.master(f"local[{threads}]").appName("explore")
    settings = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        # The JVM lives for a short time, so it compiles quickly rather than well.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.driver.memory": "1g",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    with _error_output_to(folder / "spark.log"):
        return builder.config(map=settings).getOrCreate()


@contextlib.contextmanager
def _error_output_to(file: Path) -> Iterator[None]:
    """Send the standard error of processes that are started in this context to ``file``, as long as they run."""
    ours = os.dup(2)
    theirs = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(theirs, 2)
    try:
        yield
    finally:
        os.dup2(ours, 2)
        os.close(ours)
        os.close(theirs)


def what_orderedmq_said(error: PySparkException, names: Mapping[str, str] | None = None) -> str:
    """Return orderedmq's line of a Spark error without machine and process; owners are replaced by ``names`` or shortened."""
    lines = [line.strip() for line in str(error).splitlines() if "[ORDEREDMQ_" in line]
    line = lines[0][lines[0].index("[ORDEREDMQ_") :]
    line = re.sub(r" \(\w+@[^)]*\)", "", line)
    return re.sub(r"\b[0-9a-f]{32}\b", lambda found: (names or {}).get(found[0], found[0][:6]), line)


def next_of(offset: str) -> dict[int, int]:
    """Return the next offset by queue number of a topic's queues, from an offset in Spark's progress report."""
    brokers = (broker for topic in json.loads(offset)["next"].values() for broker in topic.values())
    return {int(queue): following for queues in brokers for queue, following in queues.items()}


def local_cluster(folder: Path) -> Cluster:
    """Start RocketMQ's servers in a folder; ``stop()`` ends them."""
    servers = Cluster(folder)
    servers.start()
    return servers


def owner_of(query: StreamingQuery) -> str:
    """Return the owner of a query's locks.

    Waits for the query's first progress report. Raises the query's error if it fails before that.
    """
    wait_until(lambda: not query.isActive or (query.lastProgress and query.lastProgress.sources[0].endOffset))
    if error := query.exception():
        raise error
    return json.loads(query.lastProgress.sources[0].endOffset)["owner"]


@dataclass(frozen=True)
class Look:
    """A group at one moment: its members, the owner of each queue, and the next offset to process in each."""

    members: list[str]
    owners: dict[int, str | None]
    offsets: dict[int, int]


def look(broker: Broker, group: str, names: Mapping[str, str]) -> Look:
    """Return the present state of the group. ``names`` has the names of queries by their owner."""
    queues = group_queues(broker, group)
    return Look(
        members=sorted(names[seen.member.owner] for seen in broker.admin.members(group)),
        owners={found.queue.queue_id: names[found.lock.owner] if found.lock else None for found in queues},
        offsets={found.queue.queue_id: found.offset or 0 for found in queues},
    )


@dataclass
class Turn:
    """One owner's turn with a queue: the offsets from ``begin`` to ``end`` (exclusive), and when each micro-batch was stored."""

    queue: int
    owner: str
    begin: int
    end: int
    done: list[datetime]


def turns(messages: pa.Table) -> list[Turn]:
    """Return which owner had which queue, turn by turn.

    ``messages`` has queue_id, queue_offset, owner and store_timestamp, sorted by queue and offset.
    """
    found: list[Turn] = []
    for row in messages.to_pylist():
        queue, offset, owner, at = row["queue_id"], row["queue_offset"], row["owner"], row["store_timestamp"]
        if not found or (found[-1].queue, found[-1].owner) != (queue, owner):
            found.append(Turn(queue, owner, offset, offset, []))
        turn = found[-1]
        turn.end = offset + 1
        if at not in turn.done[-1:]:
            turn.done.append(at)
    return found


@dataclass(frozen=True)
class ResizedQueue:
    """A queue of a topic that was resized once: where the new generation begins, the queue's end, and the group's next offset.

    ``waits``: the numbers of the queues that have to be processed before the group reads this one further.
    """

    queue: int
    begin: int
    end: int
    offset: int
    waits: list[int]


def resized(broker: Broker, topic: str, group: str) -> list[ResizedQueue]:
    """Return the queues of a topic that was resized once, as the group has processed them now."""
    (resize,) = broker.log.resizes([topic])
    bounds = broker.log.bounds(broker.log.queues(topic))
    offsets = broker.groups.offsets(group, list(bounds))
    waits = Barrier(broker, group).waits([topic], {})
    parents = {queue: [parent.queue.queue_id for parent in wait.parents] for queue, wait in waits.items()}
    return [
        ResizedQueue(queue.queue_id, resize.begin(queue), at.max_offset, offsets.get(queue, 0), parents.get(queue, []))
        for queue, at in bounds.items()
    ]


def parked(broker: Broker, group: str) -> int:
    """Return how many messages are parked in the group now."""
    return sum(lot.messages for lot in LotReader(broker).look(group).values())


def orderedmq_command(store: str, words: str) -> str:
    """Run the command ``orderedmq`` and return what it prints on a terminal."""
    return _orderedmq(store, "--no-json", words)


def orderedmq_rows(store: str, words: str) -> list[Mapping[str, Any]]:
    """Run the command ``orderedmq`` and return the rows that it prints as JSON."""
    return [json.loads(line) for line in _orderedmq(store, "--json", words).splitlines()]


def _orderedmq(store: str, form: str, words: str) -> str:
    command = [sys.executable, "-c", "from orderedmq.cli import app; app()", "--path", store, form, *words.split()]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def wait_until(condition: Callable[[], Any], seconds: float = 120.0) -> None:
    """Wait until ``condition`` is true. Raises TimeoutError after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:.0f} s")
        time.sleep(0.02)
