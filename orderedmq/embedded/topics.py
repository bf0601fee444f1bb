"""The records of topics in the store. The caller holds the transaction."""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict

from orderedmq.broker import TopicInfo
from orderedmq.embedded import index, payloads
from orderedmq.embedded.store import layout
from orderedmq.embedded.store.transaction import Transaction
from orderedmq.model import DEFAULT_COMPRESSION, missing_topic


def topic_of(txn: Transaction, name: str) -> TopicInfo:
    """Return a topic's record. Raises TopicError MISSING."""
    value = txn.get("topics", layout.topic_key(name))
    if value is None:
        raise missing_topic(name)
    return TopicInfo(**json.loads(value))


def incarnation_of(txn: Transaction, name: str) -> str:
    """Return what distinguishes a topic from an earlier one of the same name, "" if there is no such topic."""
    value = txn.get("topics", layout.topic_key(name))
    return "" if value is None else str(json.loads(value)["incarnation"])


def every(txn: Transaction) -> list[TopicInfo]:
    return [TopicInfo(**json.loads(value)) for _, value in txn.scan("topics")]


def put_topic(txn: Transaction, topic: TopicInfo) -> None:
    txn.put("topics", layout.topic_key(topic.name), json.dumps(asdict(topic)).encode())


def new_incarnation() -> str:
    """Return 16 random hex digits that distinguish a topic from an earlier one of the same name."""
    return uuid.uuid4().hex[:16].upper()


def put_queues(txn: Transaction, topic: TopicInfo, begin: int = 0) -> None:
    """Store a topic's record, and create its queues from number ``begin`` on."""
    put_topic(txn, topic)
    if not begin:
        payloads.begin_space(txn, topic)
    for queue in index.queues_of(topic)[begin:]:
        txn.put("queues", layout.queue_key(queue), layout.QueueState(0, 0, 0, 0).pack())


def made(txn: Transaction, name: str, queues: int) -> TopicInfo:
    """Return a topic that the broker keeps for a group. It is created without retention if it is missing."""
    if txn.get("topics", layout.topic_key(name)) is None:
        put_queues(txn, TopicInfo(name, queues, new_incarnation(), None, None, DEFAULT_COMPRESSION))
    return topic_of(txn, name)
