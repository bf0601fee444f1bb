"""Pure functions that check a copy of a topic, made while the topics' queues and brokers changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Copied(NamedTuple):
    """A message of the copy: its micro-batch, its key, and the place of its original."""

    batch: str
    key: str
    queue: str
    offset: int


class Verdict(NamedTuple):
    """``missing``: originals without a copy. ``twice``: originals with more than one. ``unsent``: copies without an original.
    ``split``: a micro-batch and a key whose copies are in several queues. ``disordered``: copies that come after a later message of
    their key from the same queue.
    """

    missing: list[tuple[str, int]]
    twice: list[tuple[str, int]]
    unsent: list[tuple[str, int]]
    split: list[tuple[str, str]]
    disordered: list[Copied]


def judge(originals: Iterable[tuple[str, int]], copies: Mapping[str, Sequence[Copied]]) -> Verdict:
    """``originals``: queue and offset of each message. ``copies``: the messages of each queue of the copy, in order.

    A key may move to another queue between two micro-batches, because the number of queues changes.
    """
    counts = Counter((message.queue, message.offset) for messages in copies.values() for message in messages)
    places = set(originals)
    queues_of: dict[tuple[str, str], set[str]] = {}
    disordered = []
    for queue, messages in copies.items():
        newest: dict[tuple[str, str], int] = {}
        for message in messages:
            queues_of.setdefault((message.batch, message.key), set()).add(queue)
            if message.offset < newest.get((message.key, message.queue), -1):
                disordered.append(message)
            newest[message.key, message.queue] = message.offset
    return Verdict(
        sorted(places - counts.keys()),
        sorted(place for place, count in counts.items() if count > 1),
        sorted(counts.keys() - places),
        sorted(part for part, queues in queues_of.items() if len(queues) > 1),
        disordered,
    )
