"""Determines which topics and queues a streaming query reads, and whether a topic was deleted or recreated since it was read."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from ordered_source import plan
from ordered_source.group_session import Session
from ordered_source.lot_planner import without_lots
from orderedmq.broker import Broker, TopicInfo
from orderedmq.conditions import DataLossCondition, OptionCondition
from orderedmq.errors import DataLossError, OptionError, TopicError, of_other_kind, recreated, topic_deleted
from orderedmq.model import EMBEDDED_BROKER, MessageQueue
from orderedmq.options.source import SourceOptions
from orderedmq.ownership.offsets import Checkpoint

logger = logging.getLogger("orderedmq")

#: Seconds between two listings of topics, for a broker that cannot report whether anything changed.
LISTING_INTERVAL: Final = 1.0


class TopicWatch:
    """The topics that the options select. They are listed again after a change at the broker."""

    def __init__(self, broker: Broker, options: SourceOptions) -> None:
        self._broker = broker
        self._options = options
        self._log = broker.log.reading(options.pull_settings)
        self._topics: list[TopicInfo] = []
        #: (change number, monotonic seconds) of the last listing.
        self._listed: tuple[int | None, float] = (None, float("-inf"))
        #: The incarnation of each topic at the last check.
        self._incarnations: dict[str, str] = {}
        #: Topics without which the query continues, because the user accepts their loss with failOnDataLoss=false or no longer selects
        #: them, as (topic, its anchor in the checkpoint).
        self._accepted: set[tuple[str, str]] = set()
        #: Queues that a shared group does not read because they cannot be read.
        self._left_out: set[MessageQueue] = set()

    @property
    def names(self) -> list[str]:
        return [topic.name for topic in self._topics]

    def topics(self, *, fresh: bool = False) -> list[TopicInfo]:
        """Return the current topics. They are listed again only after a change at the broker, or if ``fresh``.

        Raises TopicError MISSING.
        """
        change, now = self._broker.log.change(), time.monotonic()
        last_change, listed = self._listed
        if fresh or change != last_change or (change is None and now - listed >= LISTING_INTERVAL):
            self._topics = plan.topics(self._broker, self._options)
            self._listed = (change, now)
        return self._topics

    def forget_listing(self) -> None:
        """List the topics again at the next call of `topics`."""
        self._listed = (None, float("-inf"))

    def queues(self, start: Checkpoint, target: Collection[MessageQueue] | None, *, shared: bool) -> list[MessageQueue]:
        """Return the queues to read. With a ``target``, return only the queues in it.

        A query that does not share its group also reads every queue of its checkpoint ``start`` whose topic is selected, because without
        an entry in the next offset, the query would forget how far it has read that queue.
        """
        queues = plan.queues_of(self._broker, self._topics)
        if target is not None:
            # With availableNow, queues that appear later are left to the next run.
            queues = [queue for queue in queues if queue in target]
        if shared:
            return self._shared(queues)
        former = self.former_topics(start)
        read = {queue for queue in without_lots(start.next) if queue.topic not in former}
        return [*queues, *sorted(read - set(queues))]

    def _shared(self, queues: list[MessageQueue]) -> list[MessageQueue]:
        """Return the queues that the group's members divide: those that may be read, as Java's consumers also divide them.

        If none of a topic's queues may be read, return all of them, so that the query fails where it would read.
        """
        divided: list[MessageQueue] = []
        for topic in self._topics:
            every = [queue for queue in queues if queue.topic == topic.name]
            readable = set(self._log.readable(topic.name))
            divided += [queue for queue in every if queue in readable] or every
        left_out = set(queues).difference(divided)
        if left_out - self._left_out:
            logger.warning(
                "%d queues cannot be read at the moment, as their permissions say (%s, ...). The group's members read the others, and "
                "continue in these queues when they can be read",
                len(left_out),
                min(left_out),
            )
        self._left_out = left_out
        return divided

    def former_topics(self, start: Checkpoint) -> set[str]:
        """Return the topics of ``start`` that the options no longer select."""
        return {name for name in start.topics if not plan.selects(self._options, name)}

    def require_place_of(self, start: Checkpoint) -> None:
        """Refuse a checkpoint of another store or of the other kind of broker. Raises StoreError REPLACED, OffsetError INVALID."""
        if self._options.endpoint.embedded and any(queue.broker_name != EMBEDDED_BROKER for queue in start.next):
            raise of_other_kind("a RocketMQ cluster", "Set namesrvAddr to that cluster")
        for anchor in start.topics.values():
            self._log.require_place_of(anchor)

    def drop_lost_topics(self, session: Session, start: Checkpoint) -> Checkpoint:
        """Return ``start`` without topics that were deleted or recreated, and drop their queues from the session.

        Topics that the options no longer select stay in it while they exist, with a warning. Raises DataLossError unless the user accepts
        the loss, OptionError CONFLICT if a query without a group would forget its position in a topic that exists.
        """
        try:
            listed = {topic.name: topic.incarnation for topic in self.topics()}
        except TopicError as error:
            if not start.topics:
                raise
            raise DataLossError(
                DataLossCondition.TOPIC_DELETED, f"a topic that this query has read was deleted: {error.message}"
            ) from error
        former = self.former_topics(start)
        for name in former:
            with contextlib.suppress(TopicError):
                listed[name] = self._broker.log.topic(name).incarnation
        stale = {name for name, incarnation in self._incarnations.items() if listed.get(name) != incarnation}
        gone: set[str] = set()
        for name, anchor in sorted(start.topics.items()):
            loss = self._loss(name, anchor, listed, [queue for queue in start.next if queue.topic == name])
            if loss is not None:
                gone.add(name)
            elif name not in former:
                continue
            if (name, anchor) not in self._accepted:
                if loss is not None and name not in former:
                    plan.fail_or_warn(loss, fail=self._options.fail_on_data_loss)
                elif loss is None and self._options.consumer_group is None and self._options.fail_on_data_loss:
                    raise OptionError(
                        OptionCondition.CONFLICT,
                        f"the options no longer select topic {name!r}, which this query has read before. Without a consumer group, only the "
                        "checkpoint knows its position. Select the topic again, or set failOnDataLoss=false to forget its position",
                    )
                else:
                    logger.warning(
                        "the options no longer select topic %r, which this query has read before: it continues without it", name
                    )
                self._accepted.add((name, anchor))
                if loss is not None:
                    stale.add(name)
        if stale:
            session.drop([queue for queue in session.owner.owned if queue.topic in stale])
        self._incarnations = listed
        if not gone:
            return start
        return replace(
            start,
            next={queue: offset for queue, offset in start.next.items() if queue.topic not in gone},
            topics={name: anchor for name, anchor in start.topics.items() if name not in gone},
        )

    def recreated_topics(self, start: Checkpoint) -> set[str]:
        """Return the topics whose deletion or recreation the user accepted and that ``start`` does not contain yet."""
        return {name for name, _ in self._accepted}.difference(start.topics)

    def _loss(self, name: str, anchor: str, listed: Mapping[str, str], queues: Sequence[MessageQueue]) -> DataLossError | None:
        """Return the error for a topic that was deleted or recreated since it was read, or None if it is the same topic.

        ``queues``: its queues in the checkpoint. A topic that is not listed may exist at a broker of which the nameserver has not heard.
        """
        with contextlib.suppress(TopicError):
            if name in listed:
                return recreated(name) if self._log.is_another(name, anchor) else None
            # The route that this log knows may be older than the listing.
            self._log.queues(name)
        if self._log.bounds(queues):
            return None
        return topic_deleted(name, "this query has read it before")
