"""Decides how rows are sent through a RocketMQ Proxy to a topic that accepts messages of one type only.

A topic of RocketMQ 5 may have the attribute ``message.type``. A broker stores messages of any type. A Proxy refuses a request whose type
is not the topic's, unless the topic's type is MIXED (``enableTopicMessageTypeCheck``). It derives the type of a request from the
properties in the request's header: a sharding key makes it FIFO, otherwise it is NORMAL
(TopicMessageType.parseFromMessageProperty). A batch has the properties of its messages in its body, where the Proxy does not look, and its
envelope is in the header. So a batch of messages with sharding keys passes as NORMAL if its envelope is empty, and as FIFO if its envelope
has a sharding key.

Brokers before 5.4 add the properties of the envelope to each message of the batch (MessageExtEncoder.encode), which would replace the
key of the message. Messages of a FIFO topic are therefore sent to these brokers one by one.

A Proxy does not return the attributes of topics, but it checks the type before it passes a message on. So the type is found by sending a
message for a queue that does not exist: the Proxy refuses the message and names the type, or the broker refuses it. Nothing is stored.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.errors import RocketMQError, RocketMQUnavailableError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.codec.encode import Packing
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.deadline import Deadline
from orderedmq.rocketmq.wire import message_requests
from orderedmq.rocketmq.wire.request import wrong_type

FIFO: Final = "FIFO"
#: MQVersion.V5_4_0. From this release on, only the Proxy uses the envelope of a batch.
_KEEPS_KEYS: Final = 493


def packing_for(
    client: Client, queue: MessageQueue, rows: pa.RecordBatch, where: str, seconds: float, first: int = 0
) -> Packing:
    """Return how rows for a queue are divided into requests. ``seconds``: how long the servers may take to answer.

    ``where`` names the target in errors, which count rows from ``first``. Raises RocketMQError NOT_SUPPORTED for rows that a
    Proxy does not pass on to the topic, and RocketMQUnavailableError.
    """
    if not client.behind_proxy(Deadline.after(seconds)):
        return Packing.BATCH
    place = queue.topic, queue.broker_name
    packing = client.packings.get(place)
    if packing is None:
        try:
            expected = _expected(client, queue, seconds)
        except RocketMQUnavailableError:
            raise
        except RocketMQError:
            # The account may lack the right to write. In that case the first send gets the same error.
            return Packing.BATCH
        if expected is not None and expected != FIFO:
            raise wrong_type(_named(queue), expected, "NORMAL", "rows are sent as type NORMAL")
        packing = Packing.BATCH if expected is None else fifo_packing(_version(client, queue, seconds))
        client.packings[place] = packing
    if packing is not Packing.BATCH and (row := _first_without_key(rows)) is not None:
        why = f"row {first + row} for {where} has no sharding key"
        raise wrong_type(_named(queue), FIFO, "NORMAL", why, "give each row a sharding key, ")
    return packing


def fifo_packing(version: int) -> Packing:
    """Return how messages of type FIFO are sent through a Proxy to a broker of this version (MQVersion). Pure."""
    return Packing.FIFO_BATCH if version >= _KEEPS_KEYS else Packing.ALONE


def forget(client: Client, topic: str) -> None:
    """Forget how rows are sent to a topic. Called when a Proxy has refused rows, because the topic's type must have changed."""
    for place in [place for place in list(client.packings) if place[0] == topic]:
        client.packings.pop(place, None)


def _expected(client: Client, queue: MessageQueue, seconds: float) -> str | None:
    """Return the topic's type if a Proxy refuses messages without properties, or None if it passes them on."""
    request = message_requests.refused_type(queue)
    return client.call(request, Deadline.after(seconds), topic=queue.topic, broker_name=queue.broker_name)


def _named(queue: MessageQueue) -> str:
    return f"topic {queue.topic!r}"


def _version(client: Client, queue: MessageQueue, seconds: float) -> int:
    """Return the broker's version, which a Proxy passes on with each of the broker's answers."""
    request = message_requests.version_of(queue)
    return client.call(request, Deadline.after(seconds), topic=queue.topic, broker_name=queue.broker_name)


def _first_without_key(rows: pa.RecordBatch) -> int | None:
    """Return the number of the first row without a sharding key, or None. An empty key counts as none."""
    index = rows.schema.get_field_index("sharding_key")
    if index < 0:
        return 0 if rows.num_rows else None
    lengths = pc.fill_null(pc.binary_length(rows.column(index)), 0)
    row = pc.index(lengths, pa.scalar(0, lengths.type)).as_py()
    return int(row) if row >= 0 else None
