"""The kinds of queries that `soak` runs, and the store of each. Every micro-batch has one message."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pyarrow as pa

from bench.key_order import _park
from ordered_source import OrderPerKey, OrderPerQueue
from orderedmq.broker import Broker

#: The kinds, and the number of queries of each.
KINDS: Final = {"source": 1, "sink": 1, "listener-queue": 1, "listener-key": 1, "parking": 1, "shared": 2, "idle": 1}
#: Messages that are parked, due in an hour, while the listener with order per key runs.
PARKED: Final = 3_000
#: Messages that the kind "parking" parks, one in each micro-batch, before it gets its other messages.
POISONED: Final = 3_000
#: Body of a message for which the listener fails.
POISON: Final = b"poison"
GROUP: Final = "soak"
#: Bytes after which the oldest messages of the topic that the sink writes are deleted.
_KEPT_BYTES: Final = 1024 * 1024


def prepare(broker: Broker, kind: str, messages: int) -> None:
    """Make the topics of a kind, with ``messages`` messages in each queue that is read."""
    if kind == "sink":
        broker.admin.create_topic("out", 1, retention_bytes=_KEPT_BYTES)
        return
    broker.admin.create_topic("t", KINDS[kind])
    count = 1 if kind == "idle" else messages
    poisoned = min(POISONED, count) if kind == "parking" else 0
    bodies = [POISON] * poisoned + [b"x" * 100] * (count - poisoned)
    # No other message has the key of a poisoned message, because such a message would also be parked.
    keys = [f"poisoned-{number}" if number < poisoned else f"key-{number % 100}" for number in range(count)]
    for queue in broker.log.queues("t"):
        broker.log.append({queue: pa.record_batch({"body": pa.array(bodies, pa.binary()), "sharding_key": keys})})
    if kind == "listener-key":
        # The parked messages belong to a second queue, which has no other messages.
        broker.admin.add_queues("t", 2)
        _park(broker, GROUP, broker.log.queues("t")[1], PARKED)


def options(kind: str, path: Path) -> dict[str, str]:
    """Return the options of the source, or of the sink."""
    if kind == "sink":
        return {"path": str(path), "topic": "out"}
    found = {"path": str(path), "topic": "t", "consumerGroup": GROUP, "maxOffsetsPerTrigger": "1"}
    if kind == "shared":
        found |= {"assignment": "shared", "lockTimeout": "60s"}
    if kind == "listener-queue":
        found["includeLockToken"] = "true"
    if isinstance(order(kind), OrderPerKey):
        found |= {"parkingLot": "true", "parkingLotMaxMessages": str(10 * PARKED)}
    return found


def order(kind: str) -> OrderPerQueue | OrderPerKey | None:
    """Return the order of the kind's listener; None if it has none."""
    by_key = OrderPerKey(in_batch_attempts=1)
    orders: dict[str, OrderPerQueue | OrderPerKey] = {
        "listener-queue": OrderPerQueue(),
        "listener-key": by_key,
        "parking": by_key,
    }
    return orders.get(kind)


def disturb(broker: Broker, number: int) -> None:
    """Change the store of an idle query without adding messages. Otherwise the query would only read the store's change number."""
    broker.admin.seek("other", {broker.log.queues("t")[0]: number % 2})
