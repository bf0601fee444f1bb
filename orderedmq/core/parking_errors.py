"""The errors that keep parked messages from being lost or overtaken. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from orderedmq.conditions import GroupCondition, TopicCondition
from orderedmq.errors import GroupError, Remedy, TopicError


def has_parked(group: str, parked: Mapping[str, int]) -> GroupError:
    """A query without parking lots would overtake what its group has parked. ``parked``: the number of messages by topic."""
    of = ", ".join(f"{count:,} of topic {topic!r}" for topic, count in sorted(parked.items()))
    return GroupError(
        GroupCondition.PARKED,
        f"group {group!r} has parked messages, {of}: a query without a parking lot would process newer messages of their keys first; set "
        f"parkingLot=true and use consume_orderly(..., OrderPerKey()), or drop them (orderedmq group seek {group}, with --parked drop)",
    )


def seek_with_parked(group: str, messages: int, queues: Sequence[object]) -> GroupError:
    """A seek does not say what becomes of the messages that the group has parked from the queues."""
    return GroupError(
        GroupCondition.PARKED,
        f"group {group!r} has {messages:,} parked messages of {_queues(queues)}, which a seek keeps or drops: kept, they come back when "
        "they are due; dropped, nobody sees them again",
        Remedy('pass parked="keep" or parked="drop"', "give --parked keep or --parked drop"),
    )


def delete_with_parked(group: str, messages: int, queues: Sequence[object]) -> GroupError:
    """A group cannot be deleted without a word while it has parked messages: they would be lost."""
    return GroupError(
        GroupCondition.PARKED,
        f"group {group!r} has {messages:,} parked messages of {_queues(queues)}, which nobody sees again if it is deleted",
        Remedy(
            "let a query of the group process them, or pass force=True",
            "let a query of the group process them, or give --force",
        ),
    )


def lot_in_use(topic: str, group: str, messages: int) -> GroupError:
    """A topic of parking lots cannot be deleted while something is parked there."""
    return GroupError(
        GroupCondition.PARKED,
        f"group {group!r} has {messages:,} parked messages in topic {topic!r}; let a query of the group process them, or delete the group",
    )


def lot_of_a_query(topic: str, group: str, why: str) -> GroupError:
    """A topic of parking lots cannot be deleted while a query of its group is at work: it knows how far it has read them."""
    return GroupError(
        GroupCondition.IN_USE,
        f"topic {topic!r} has the parking lots of group {group!r}, which is in use: {why}; stop that query first",
    )


def lots_left(topic: str, lots: Sequence[str], why: str) -> str:
    """Return what an error says after a topic was deleted, and its parking lots were not, for the reason ``why``."""
    return f"topic {topic!r} is deleted, but not its parking lots ({', '.join(lots)}): {why}; then delete them, too (orderedmq topic delete)"


def lots_kept(group: str, lots: Sequence[str], why: str) -> str:
    """Return what an error says after a group's parking lots were not deleted, for the reason ``why``; its settings already are."""
    return (
        f"the parking lots of group {group!r} ({', '.join(lots)}) are not deleted, and its offsets are kept: {why}; then delete the group "
        "again (orderedmq group delete)"
    )


def is_parking_lot(topic: str, group: str) -> TopicError:
    """A topic of parking lots has no settings, and its messages are those that its group's queries park and process."""
    return TopicError(
        TopicCondition.RESERVED,
        f"topic {topic!r} has the parked messages of consumer group {group!r}: it has no settings, grows with its topic, and its messages "
        "are deleted when the group has processed them; set the group's offsets of the topic itself",
    )


def read_as_a_stream(name: str, group: str, topic: str) -> TopicError:
    """A stream cannot read a topic of parking lots: as its group it would lose messages, as another it would miss some."""
    return TopicError(
        TopicCondition.RESERVED,
        f"option topic: topic {name!r} has the parked messages of consumer group {group!r}, and the group's query moves and deletes them: "
        f"read topic {topic!r} with parkingLot=true to process them, or list them (orderedmq parked list {group}, or spark.read)",
    )


def _queues(queues: Sequence[object]) -> str:
    shown = ", ".join(str(queue) for queue in queues[:3])
    return f"queue {shown}" if len(queues) == 1 else f"queues {shown}{' and others' if len(queues) > 3 else ''}"
