"""Determines from which offset and up to which offset a streaming query reads each queue."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

from ordered_source import plan
from ordered_source.group_session import Session
from ordered_source.lot_planner import require_none, without_lots
from ordered_source.topic_watch import TopicWatch
from orderedmq.barrier import Barrier
from orderedmq.broker import Broker, Log
from orderedmq.errors import queue_deleted
from orderedmq.model import MessageQueue, is_parked
from orderedmq.options.source import SourceOptions
from orderedmq.ownership.offsets import Checkpoint, ranges
from orderedmq.parking import leader_of, lot_deleted
from orderedmq.routing.generations import Wait

logger = logging.getLogger("orderedmq")


class Positions:
    """Determines the position in each queue from the checkpoint, the group's offsets or the options. The session records it."""

    def __init__(self, broker: Broker, options: SourceOptions, session: Session, watch: TopicWatch) -> None:
        self._broker = broker
        self._options = options
        self._session = session
        self._owner = session.owner
        self._watch = watch
        self._log = broker.log.reading(options.pull_settings)
        #: Deleted queues whose loss was already reported.
        self._gone: set[MessageQueue] = set()
        self._barrier = Barrier(broker, options.consumer_group)
        #: Queues that the last boundary could not plan to their ends, because their topic was resized.
        self.waits: dict[MessageQueue, Wait] = {}
        #: Whether some of them wait for queues that other members of the group process.
        self.waits_for_others = False
        self._waiting_since: dict[MessageQueue, tuple[Wait, float]] = {}

    def place(self, start: Checkpoint) -> None:
        """Decide where to begin in each owned queue that has no position yet. Raises OffsetError, DataLossError."""
        owner = self._owner
        queues = owner.unplaced().queues
        if not queues:
            return
        bounds = self._broker.log.bounds(queues)
        # Drop queues that were deleted after the listing and never read. The next listing does not contain them.
        self._session.drop([queue for queue in without_lots(queues) if queue not in bounds and queue not in start.next])
        queues = tuple(queue for queue in queues if queue in owner.owned)
        # The former owner may have parked messages while this query waited for the queue.
        require_none(self._broker, self._options, queues)
        starting = self._options.starting
        # A deleted queue of the checkpoint has no bounds here; `ends` reports its lost messages. A parking lot without bounds does not
        # exist, because no message was parked in it.
        begins = {queue: bounds[queue].min_offset if queue in bounds else 0 for queue in queues}
        if start.fresh:
            # These count only for queues without an offset of the group, unless `GroupSession` resets the group to them.
            if starting.kind == "committed":
                starting = self._options.never_committed
            every = plan.queues_of(self._broker, self._watch.topics())
            begins |= plan.beginnings(self._log, starting, without_lots(queues), bounds, every)
        ends = {queue: at.max_offset for queue, at in bounds.items()}
        self._session.place(start, begins, ends, self._watch.recreated_topics(start))

    def ends(self, target: Mapping[MessageQueue, int] | None) -> dict[MessageQueue, int]:
        """Return the end of each owned queue, at most ``target``.

        After a resize of the topic, a queue ends where it has to wait for others (`routing.generations`). Raises DataLossError unless
        the user accepts losses, and for a parking lot that was deleted although its queue exists.
        """
        bounds = self._broker.log.bounds(list(self._owner.owned))
        ends: dict[MessageQueue, int] = {}
        for queue, owned in self._owner.owned.items():
            at, position = bounds.get(queue), owned.position
            if position is None:
                continue
            if at is None:
                if owned.leader is not None:
                    if position and owned.leader in bounds:
                        raise lot_deleted(queue, position)
                elif queue not in self._gone:
                    plan.fail_or_warn(
                        queue_deleted(queue, f"this query has read it up to {position}"), fail=self._options.fail_on_data_loss
                    )
                    self._gone.add(queue)
                continue
            after, loss = plan.check_position(queue, position, at, "this query", self._log.tail_loss)
            if loss is not None:
                plan.fail_or_warn(loss, fail=self._options.fail_on_data_loss)
                self._session.skip(queue, after)
            limited = target is not None and owned.leader is None
            ends[queue] = min(at.max_offset, target.get(queue, 0)) if target is not None and limited else at.max_offset
        positions = self._owner.following({})
        waits = self._barrier.waits(self._watch.names, positions)
        others = any(parent.queue not in self._owner.owned for wait in waits.values() for parent in wait.parents)
        self.waits = {
            queue: wait for queue, wait in waits.items() if queue in ends and ends[queue] > max(wait.offset, positions[queue])
        }
        for queue, wait in self.waits.items():
            ends[queue] = max(wait.offset, positions[queue])
        self.waits_for_others = others and bool(self.waits)
        return ends

    def warn_of_waits(self, now: float) -> None:
        """Warn once of each queue that has waited for the same offsets of other queues for a minute. ``now``: monotonic seconds."""
        since = self._waiting_since
        self._waiting_since = {
            queue: since[queue] if queue in since and since[queue][0] == wait else (wait, now)
            for queue, wait in self.waits.items()
        }
        for queue, (wait, begin) in self._waiting_since.items():
            if now - begin >= STUCK_SECONDS:
                self._waiting_since[queue] = wait, float("inf")
                logger.warning("%s", stuck(queue, wait))

    def replay(self, start: Checkpoint, end: Checkpoint, current: Checkpoint) -> None:
        """Plan again the ranges of a batch that was logged before a restart.

        ``current`` is ``end`` without the topics that were deleted or recreated. Topics that the options no longer select are repeated:
        Spark commits the whole batch, so a run that selects them again would resume after it. Raises LockError HELD_BY_OTHER, GroupError
        PARKED.
        """
        session, owner, group = self._session, self._owner, self._options.consumer_group
        logged = [queue for queue, span in ranges(start, end).items() if span.messages] if session.shared else list(end.next)
        if group is not None:
            # A parking lot is locked with its queue.
            logged = [leader_of(group, queue) for queue in logged]
        # A checkpoint of another group has that group's parking lots, in which no message is parked (`require_none_left`).
        logged = without_lots(logged)
        missing = sorted({queue for queue in logged if queue in current.next and queue not in owner.owned})
        require_none(self._broker, self._options, missing)
        lots = self._broker.log.bounds([queue for queue in end.next if is_parked(queue)])
        session.repeat(start, end, missing, {lot: at.max_offset for lot, at in lots.items()})
        for queue in missing:
            if queue not in owner.owned:
                logger.warning(
                    "queue %s of group %s has another owner: its part of the logged batch is not repeated", queue, group
                )
        for queue in owner.unplaced().queues:
            # A parking lot is not in the batch if it was logged by a run without parking lots.
            if queue in end.next:
                logger.warning(
                    "queue %s of group %s had another owner, was reset, or was created again: its part of the logged batch is not repeated",
                    queue,
                    group,
                )


#: Seconds after which the wait of a queue is a warning, unless the queues for which it waits are processed further.
STUCK_SECONDS: Final = 60.0


def stuck(queue: MessageQueue, wait: Wait) -> str:
    """Return the warning of a queue that waits for others."""
    return (
        f"queue {queue} is read only up to {wait.offset}: its topic was resized, and older messages of its keys are not processed yet. For "
        f"{STUCK_SECONDS:.0f} s it has waited for {wait}. Find out what holds these queues up, settle parked "
        "keys (orderedmq parked retry or drop), or seek the group beyond these messages"
    )


#: Seconds, or messages of the topic, after which an anchor is refreshed.
REFRESH_SECONDS: Final = 300.0
REFRESH_MESSAGES: Final = 1_000_000


class Anchors:
    """Refreshes topic anchors. A query stores them in its offsets to check later whether a topic is still the one that it read.

    Getting an anchor may cost a request to the broker. Over RocketMQ, an anchor names one of the messages that were read (`Log.anchor`),
    so it becomes invalid when this message is deleted. So anchors are copied from offset to offset, and each batch refreshes at most one
    old anchor. A topic without an anchor gets one in the next batch. This remembers only when each anchor was requested.
    """

    def __init__(self) -> None:
        #: Topic -> monotonic seconds of the last request, and the sum of the topic's next offsets at that time.
        self._requests: dict[str, tuple[float, int]] = {}

    def of(
        self, log: Log, topics: Iterable[str], former: Mapping[str, str], following: Mapping[MessageQueue, int], now: float
    ) -> dict[str, str]:
        """Return the anchor of each topic, to be stored in the offset at the end of the next batch.

        ``former``: the anchors in the previous offset, without topics that were deleted or recreated. ``following``: the next offset of
        each queue after the batch. Raises TopicError MISSING.
        """
        ends: defaultdict[str, dict[MessageQueue, int]] = defaultdict(dict)
        for queue, offset in following.items():
            ends[queue.topic][queue] = offset
        out: dict[str, str] = {}
        due: list[tuple[float, str]] = []
        for topic in topics:
            # An anchor from the checkpoint has an unknown age, so it is due.
            at, then = self._requests.get(topic, (float("-inf"), 0))
            if not former.get(topic) and (topic not in former or not then):
                out[topic] = self._ask(log, topic, ends[topic], now)
                continue
            out[topic] = former[topic]
            if now - at >= REFRESH_SECONDS or sum(ends[topic].values()) - then >= REFRESH_MESSAGES:
                due.append((at, topic))
        if due:
            topic = min(due)[1]
            # If retention has deleted the messages, the broker may have no anchor. In that case, keep the old anchor.
            out[topic] = self._ask(log, topic, ends[topic], now) or out[topic]
        return out

    def _ask(self, log: Log, topic: str, ends: Mapping[MessageQueue, int], now: float) -> str:
        self._requests[topic] = (now, sum(ends.values()))
        return log.anchor(topic, ends)
