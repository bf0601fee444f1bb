"""A topic is resized again and again under two producers and two shared queries, which are killed. Every process is a real one."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import uuid
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import orderedmq
from orderedmq.broker import Broker
from orderedmq.embedded.check import check
from orderedmq.tools.producer import Producer
from tests import evidence
from tests.contract.support import bodies
from tests.waits import until

ROOT = Path(__file__).parents[3]
KEYS = 24


class Query:
    """A query of the group, which copies ``in`` to ``out``. It is started again after it was killed or has failed."""

    def __init__(self, folder: Path, store: Path) -> None:
        self._folder = folder
        folder.mkdir()
        source = {
            "path": str(store),
            "topic": "in",
            "consumerGroup": "g",
            "assignment": "shared",
            "startingOffsets": "earliest",
        }
        source |= {"maxOffsetsPerTrigger": "200"}
        sink = {"path": str(store), "topic": "out", "onKeyConflict": "ignore"}
        (folder / "query.json").write_text(json.dumps({"id": str(uuid.uuid4()), "source": source, "sink": sink}))
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with (self._folder / "log").open("ab") as log:
            command = [sys.executable, "-m", "tests.live.clusters.topology_query", str(self._folder)]
            return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stderr=log)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def restart(self) -> None:
        self.kill()
        self._process = self._start()

    def go_on(self) -> None:
        if self._process.poll() is not None:
            self.restart()


class Sender(threading.Thread):
    """A long-lived producer. Each message has its number within its key."""

    def __init__(self, store: Path, number: int) -> None:
        super().__init__(daemon=True)
        self._store = store
        self._keys = [f"{number}-{key}" for key in range(KEYS)]
        self._ended = threading.Event()
        self.sent = 0

    def run(self) -> None:
        with orderedmq.connect(str(self._store)) as broker:
            producer = Producer(broker.log, "in")
            while not self._ended.is_set():
                texts = [f"{key} {self.sent}".encode() for key in self._keys]
                producer.send(pa.record_batch({"body": pa.array(texts, pa.binary()), "sharding_key": self._keys}))
                self.sent += 1
                self._ended.wait(0.02)

    def end(self) -> None:
        self._ended.set()
        self.join()


def copies(broker: Broker) -> dict[str, list[int]]:
    """Return the numbers of each key's messages in ``out``, which has one queue, in its order."""
    out: dict[str, list[int]] = defaultdict(list)
    for body in bodies(broker, broker.log.queues("out")[0]):
        key, number = body.split()
        out[key].append(int(number))
    return out


@pytest.mark.fault("topology", "embedded")
@pytest.mark.holds("resize", "shared source to sink")
@pytest.mark.timeout(900)
def test_no_key_is_out_of_order_lost_or_twice_while_a_topic_is_resized_and_queries_are_killed(
    tmp_path: Path, nightly: bool
) -> None:
    resizes, store, draw = (100 if nightly else 8), tmp_path / "store", random.Random(7)
    with orderedmq.connect(str(store)) as broker:
        broker.admin.create_topic("in", 2)
        broker.admin.create_topic("out", 1)
        queries = [Query(tmp_path / name, store) for name in ("one", "two")]
        senders = [Sender(store, number) for number in (1, 2)]
        for sender in senders:
            sender.start()

        def size(topic: str) -> int:
            return sum(at.max_offset for at in broker.log.bounds(broker.log.queues(topic)).values())

        def copied(more: int) -> None:
            """Wait until the queries have copied some more messages."""
            least = size("out") + more

            def enough() -> Any:
                for query in queries:
                    query.go_on()
                return size("out") >= least

            until(enough, "the queries copy messages")

        try:
            copied(1)
            for number in range(resizes):
                broker.admin.resize_topic("in", draw.randint(1, 8))
                if number % 5 == 2:
                    draw.choice(queries).restart()
                copied(draw.randint(1, 100))
            for sender in senders:
                sender.end()
            expected = sum(sender.sent for sender in senders) * KEYS
            copied(max(0, expected - size("out")))
        finally:
            for query in queries:
                query.kill()
        sent = {key: list(range(sender.sent)) for sender in senders for key in sender._keys}
        seen = copies(broker)
        evidence.note_lists(sent, seen, runs=resizes)
        assert seen == sent
    assert check(store) == []
