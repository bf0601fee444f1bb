"""A program that moves micro-batches of ten rows from source to sink, and marks when each send and micro-batch begins."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import orderedmq
from orderedmq import Producer
from tests.contract.support import rows
from tests.micro_batches import MicroBatchLoop
from tests.power.recorder import MARKS


def main() -> None:
    folder = Path(sys.argv[1])
    marks = os.open(folder / MARKS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def say(what: str) -> None:
        os.write(marks, json.dumps(what).encode() + b"\n")

    path = folder / "store"
    with orderedmq.connect(path) as broker:
        broker.admin.create_topic("in", 2)
        broker.admin.create_topic("out", 4)
        producer = Producer(broker.log, "in")
        query = MicroBatchLoop(
            {"path": path, "topic": "in", "consumerGroup": "g"}, {"path": path, "topic": "out", "shardingKey": "sharding_key"}
        )
        for _ in range(6):
            say("send")
            producer.send(rows(range(10), sharding_key=[f"key {number}" for number in range(10)]))
            say("micro-batch")
            query.advance("committed")
        say("end")
        query.stop()


if __name__ == "__main__":
    main()
