"""Which topics and queues a streaming query reads, and whether each topic is still the one that it has read before."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Final

from ordered_source import data_loss, plan
from orderedmq.broker import Broker, TopicInfo
from orderedmq.core.offsets import Checkpoint
from orderedmq.core.ownership import Owner
from orderedmq.errors import DataLossError, TopicError, recreated
from orderedmq.model import MessageQueue
from orderedmq.options.source import SourceOptions

#: Seconds between two listings of topics where the broker cannot tell that nothing changed.
LISTING_INTERVAL: Final = 1.0


class TopicWatch:
    """The topics that the options ask for, listed again when the broker has changed."""

    def __init__(self, broker: Broker, options: SourceOptions) -> None:
        self._broker = broker
        self._options = options
        self._log = broker.log.reading(options.reading)
        self._topics: list[TopicInfo] = []
        #: (change number, moment) of the last listing.
        self._listed: tuple[int | None, float] = (None, float("-inf"))
        #: The incarnation of each topic whose queues are owned.
        self._owned: dict[str, str] = {}
        #: Losses that the user accepted: (topic, its anchor in the checkpoint).
        self._accepted: set[tuple[str, str]] = set()

    @property
    def names(self) -> list[str]:
        """The topics of the last listing."""
        return [topic.name for topic in self._topics]

    def topics(self, *, fresh: bool = False) -> list[TopicInfo]:
        """The topics as they are now; those of the last listing if the broker has not changed since. ``fresh``: ask in any case.

        Raises TopicError MISSING.
        """
        change, now = self._broker.log.change(), time.monotonic()
        known, listed = self._listed
        if fresh or change != known or (change is None and now - listed >= LISTING_INTERVAL):
            self._topics = plan.topics(self._broker, self._options)
            self._listed = (change, now)
        return self._topics

    def queues(self, known: Checkpoint, target: Collection[MessageQueue] | None, *, shared: bool) -> list[MessageQueue]:
        """The queues to read, those of ``target`` only if there is one.

        A query that does not share its group also reads every queue of its checkpoint ``known``: without an entry in the next offsets,
        the query would forget how far it has read that queue.
        """
        queues = plan.queues_of(self._broker, self._topics)
        if target is not None:
            # With availableNow, what appears later is for the next run.
            queues = [queue for queue in queues if queue in target]
        return queues if shared else [*queues, *sorted(known.next.keys() - set(queues))]

    def same_topics(self, owner: Owner, start: Checkpoint) -> Checkpoint:
        """``start`` without the queues of topics that were deleted or made anew. Raises DataLossError unless the user accepts the loss."""
        try:
            listed = {topic.name: topic.incarnation for topic in self.topics()}
        except TopicError as error:
            if not start.topics:
                raise
            raise DataLossError("TOPIC_DELETED", f"{error.message}; this query has read it before") from error
        stale = {name for name, incarnation in self._owned.items() if listed.get(name) != incarnation}
        gone: set[str] = set()
        for name, anchor in sorted(start.topics.items()):
            loss = self._loss(name, anchor, listed)
            if loss is None:
                continue
            gone.add(name)
            if (name, anchor) not in self._accepted:
                data_loss.lose(loss, fail=self._options.fail_on_data_loss)
                self._accepted.add((name, anchor))
                stale.add(name)
        if stale:
            owner.drop([queue for queue in owner.owned if queue.topic in stale])
        self._owned = listed
        if not gone:
            return start
        return replace(
            start,
            next={queue: offset for queue, offset in start.next.items() if queue.topic not in gone},
            topics={name: anchor for name, anchor in start.topics.items() if name not in gone},
        )

    def made_anew(self, start: Checkpoint) -> set[str]:
        """Topics that were deleted or made anew with the user's consent and that ``start`` does not know yet as they are now."""
        return {name for name, _ in self._accepted}.difference(start.topics)

    def _loss(self, name: str, anchor: str, listed: Mapping[str, str]) -> DataLossError | None:
        """What happened to a topic that was read before; None if it is the same topic."""
        try:
            if name in listed:
                return recreated(name) if self._log.is_another(name, anchor) else None
        except TopicError:
            pass
        return DataLossError("TOPIC_DELETED", f"topic {name!r} was deleted; failOnDataLoss=false goes on without it")
