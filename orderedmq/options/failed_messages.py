"""The options that say where messages wait that a listener could not process: in a parking lot, or in the group's retry topic."""

from __future__ import annotations

from typing import NamedTuple

from orderedmq.conditions import OptionCondition
from orderedmq.endpoint import Endpoint
from orderedmq.errors import OptionError
from orderedmq.options.declared import Given
from orderedmq.options.values import conflict, integer, only_for_cluster, parse_bool
from orderedmq.ownership.allocate import Allocation


class FailedMessages(NamedTuple):
    """``parking_lot``: maximum messages in a queue's parking lot, None without one. ``retry_topic``: whether it is read."""

    parking_lot: int | None
    retry_topic: bool


def parse_failed_messages(
    given: Given, endpoint: Endpoint, group: str | None, allocation: Allocation, streaming: bool | None
) -> FailedMessages:
    """Check the options parkingLot, parkingLotMaxMessages and retryTopic. Raises OptionError."""
    room = given.value("parkingLotMaxMessages", integer(1, example=10000))
    parking_lot = given.value("parkingLot", parse_bool)
    if not parking_lot and given.has("parkingLotMaxMessages"):
        raise conflict("option parkingLotMaxMessages limits a parking lot; set parkingLot=true, or drop it")
    retry_topic = given.value("retryTopic", parse_bool)
    if retry_topic and endpoint.embedded:
        raise only_for_cluster("retryTopic", "the embedded broker has no retry topics; set parkingLot=true instead")
    if retry_topic and parking_lot:
        raise conflict(
            "options parkingLot and retryTopic both say where messages wait that fail; keep retryTopic to share them with Java's consumers "
            "of the group, else parkingLot"
        )
    if retry_topic and allocation.strategy == "CONFIG":
        raise conflict(
            "option retryTopic does not go with allocateMessageQueueStrategy=CONFIG, where no query would have the retry topic's queues; "
            "use another strategy, or parkingLot=true"
        )
    for name, chosen, remedy in (
        ("parkingLot", parking_lot, "use spark.readStream, or `orderedmq parked list`"),
        ("retryTopic", retry_topic, "use spark.readStream, or read the topic %RETRY%<group> by its name"),
    ):
        if chosen and streaming is False:
            raise OptionError(
                OptionCondition.UNSUPPORTED, f"option {name} is not supported in a batch, which has no locks; {remedy}"
            )
        if chosen and group is None:
            raise conflict(f"option {name} needs a consumer group, whose messages wait; set consumerGroup, or drop it")
    return FailedMessages(room if parking_lot else None, retry_topic)
