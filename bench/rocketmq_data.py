"""The messages that are read from a RocketMQ: similar ones, and ones that all differ."""

from __future__ import annotations

import random

import pyarrow as pa


def messages(count: int) -> pa.RecordBatch:
    """Return messages that differ only in their numbers, with bodies of 100 bytes, a tag, a key and a sharding key."""
    return pa.record_batch(
        {
            "body": pa.array([b"%0100d" % number for number in range(count)], pa.binary()),
            "tags": pa.array(["created"] * count),
            "keys": pa.array([f"key-{number}" for number in range(count)]),
            "sharding_key": pa.array([f"account-{number % 1000}" for number in range(count)]),
        }
    )


def sized_messages(size: int, count: int) -> pa.RecordBatch:
    """Return messages as `messages` does, but with random bodies of ``size`` bytes."""
    data = random.Random(7).randbytes(size + count)
    bodies = pa.array([data[number : number + size] for number in range(count)], pa.binary())
    return messages(count).set_column(0, "body", bodies)


def mixed_messages(count: int) -> pa.RecordBatch:
    """Return messages that all differ: bodies of 20 to 2,000 bytes, tags and keys of many lengths or none, user properties."""
    draw = random.Random(7)
    tags = ["created", "paid", "shipped", "cancelled", "returned-by-customer", "eu", "refund"]
    body = draw.randbytes(4000)
    rows = []
    for number in range(count):
        length, at = min(2000, 20 + int(draw.lognormvariate(5.0, 0.8))), draw.randrange(2000)
        keys = [f"order-{draw.randrange(10 ** draw.randint(1, 9))}" for _ in range(draw.choice([0, 1, 1, 1, 2]))]
        own = {"source": draw.choice(["web", "shop-floor", "partner"])} if number % 3 else {}
        if number % 5 > 1:
            own["traceparent"] = f"00-{draw.getrandbits(128):032x}-{draw.getrandbits(64):016x}-01"
        rows.append(
            {
                "body": body[at : at + length],
                "tags": draw.choice([*tags, None]),
                "keys": " ".join(keys) or None,
                "sharding_key": f"customer-{draw.randrange(1_000_000)}",
                "properties": list(own.items()),
            }
        )
    kinds = {"body": pa.binary(), "properties": pa.map_(pa.string(), pa.string())}
    return pa.record_batch({name: pa.array([row[name] for row in rows], kinds.get(name, pa.string())) for name in rows[0]})
