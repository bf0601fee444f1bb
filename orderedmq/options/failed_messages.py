"""The options for messages that a listener could not process: they wait in a parking lot or in the group's retry topic."""

from __future__ import annotations

from typing import NamedTuple

from orderedmq.conditions import OptionCondition
from orderedmq.endpoint import Endpoint
from orderedmq.errors import OptionError
from orderedmq.options.declared import Given
from orderedmq.options.values import conflict, integer, only_for_cluster, parse_bool
from orderedmq.ownership.allocate import Allocation


class FailedMessages(NamedTuple):
    """``parking_lot``: maximum messages in a queue's parking lot, None without a lot. ``retry_topic``: whether the retry topic is read."""

    parking_lot: int | None
    retry_topic: bool


def parse_failed_messages(
    given: Given, endpoint: Endpoint, group: str | None, allocation: Allocation, streaming: bool | None
) -> FailedMessages:
    """Return the checked options parkingLot, parkingLotMaxMessages and retryTopic. Raises OptionError."""
    room = given.value("parkingLotMaxMessages", integer(1, example=10000))
    parking_lot = given.value("parkingLot", parse_bool)
    if not parking_lot and given.has("parkingLotMaxMessages"):
        raise conflict(
            "option parkingLotMaxMessages limits a parking lot, but parkingLot is false. Set parkingLot=true, or drop parkingLotMaxMessages"
        )
    retry_topic = given.value("retryTopic", parse_bool)
    if retry_topic and endpoint.embedded:
        raise only_for_cluster(
            "retryTopic", "the embedded broker has no retry topics, but parkingLot=true has the same purpose"
        )
    if retry_topic and parking_lot:
        raise conflict(
            "options parkingLot and retryTopic both say where failed messages wait. Keep retryTopic to share these messages with Java "
            "consumers of the group, else keep parkingLot"
        )
    if retry_topic and allocation.strategy == "CONFIG":
        raise conflict(
            "option retryTopic cannot be used with allocateMessageQueueStrategy=CONFIG: no query would own the retry topic's queues. "
            "Use another strategy, or parkingLot=true"
        )
    for name, chosen, remedy in (
        ("parkingLot", parking_lot, "Use spark.readStream, or `orderedmq parked list`"),
        ("retryTopic", retry_topic, "Use spark.readStream, or read the topic %RETRY%<group> by its name"),
    ):
        if chosen and streaming is False:
            raise OptionError(
                OptionCondition.UNSUPPORTED, f"option {name} is not supported in a batch, which has no locks. {remedy}"
            )
        if chosen and group is None:
            raise conflict(
                f"option {name} needs a consumer group, to which the waiting messages belong. Set consumerGroup, or drop {name}"
            )
    return FailedMessages(room if parking_lot else None, retry_topic)
