"""Determines from which offset and up to which offset a streaming query reads each queue."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ordered_source import data_loss, plan
from ordered_source.group_session import Session
from ordered_source.lot_planner import require_none, without_lots
from ordered_source.topic_watch import TopicWatch
from orderedmq.broker import Broker, QueueBounds
from orderedmq.errors import queue_deleted
from orderedmq.model import MessageQueue, is_retry
from orderedmq.options.source import SourceOptions
from orderedmq.ownership.offsets import Checkpoint, ranges
from orderedmq.parking.rules import leader_of

log = logging.getLogger("orderedmq")


class Positions:
    """Determines the position in each queue from the checkpoint, the group's offsets or the options. The session records it."""

    def __init__(self, broker: Broker, options: SourceOptions, session: Session, watch: TopicWatch) -> None:
        self._broker = broker
        self._options = options
        self._session = session
        self._owner = session.owner
        self._watch = watch
        self._log = broker.log.reading(options.pull_settings)
        #: Deleted queues whose loss was already reported. A parking lot may be created again.
        self._gone: set[MessageQueue] = set()

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
        deleted = self._deleted_lots(start, [queue for queue in queues if owner.owned[queue].leader is not None], bounds)
        start = replace(start, next={queue: at for queue, at in start.next.items() if queue not in deleted})
        if start.fresh:
            if starting.kind == "committed":
                starting = plan.never_committed(self._options)
            # A retry topic is read from its first message, as Java's consumers do (RebalancePushImpl.computePullFromWhere).
            chosen = [queue for queue in without_lots(queues) if not is_retry(queue)]
            every = plan.queues_of(self._broker, self._watch.topics())
            begins |= plan.beginnings(self._log, starting, chosen, bounds, every)
        ends = {queue: at.max_offset for queue, at in bounds.items()}
        self._session.place(start, begins, ends, self._watch.recreated_topics(start))

    def _deleted_lots(
        self, at: Checkpoint, lots: Iterable[MessageQueue], bounds: Mapping[MessageQueue, QueueBounds]
    ) -> list[MessageQueue]:
        """Return the parking lots that end before their offset in ``at``. They were deleted, and later messages are in new lots."""
        deleted = []
        for queue in lots:
            position, known = at.next.get(queue, 0), bounds.get(queue)
            if queue not in self._gone and position > (0 if known is None else known.max_offset):
                log.warning(
                    "parking lot %s was deleted after this query had processed it up to %d. A new one is read from its start",
                    queue,
                    position,
                )
                self._gone.add(queue)
            if queue in self._gone:
                deleted.append(queue)
        return deleted

    def ends(self, target: Mapping[MessageQueue, int] | None) -> dict[MessageQueue, int]:
        """Return the end of each owned queue, at most ``target``. Raises DataLossError unless the user accepts losses."""
        bounds = self._broker.log.bounds(list(self._owner.owned))
        ends: dict[MessageQueue, int] = {}
        for queue, owned in self._owner.owned.items():
            at, position = bounds.get(queue), owned.position
            if position is None:
                continue
            if at is None:
                if queue not in self._gone and (owned.leader is None or position):
                    data_loss.fail_or_warn(
                        queue_deleted(queue, f"this query has read it up to {position}"), fail=self._options.fail_on_data_loss
                    )
                    self._gone.add(queue)
                    if owned.leader is not None:
                        # The next parked messages are in a new lot.
                        self._session.skip(queue, 0)
                continue
            if owned.leader is not None and queue in self._gone:
                self._gone.remove(queue)
                position = self._return(queue, position, at)
            after, loss = data_loss.check_position(queue, position, at, "this query", self._log.tail_loss)
            if loss is not None:
                data_loss.fail_or_warn(loss, fail=self._options.fail_on_data_loss)
                # A lot that ends too early was deleted and created again under the same name.
                self._session.skip(queue, after if owned.leader is None else at.min_offset)
            limited = target is not None and owned.leader is None
            ends[queue] = min(at.max_offset, target.get(queue, 0)) if target is not None and limited else at.max_offset
        return ends

    def _return(self, lot: MessageQueue, position: int, at: QueueBounds) -> int:
        """Return the offset at which to continue in a parking lot that was missing and exists again.

        If the lot was created again, the group has no offset in it.
        """
        back = self._session.offsets([lot]).get(lot, at.min_offset)
        if back != position:
            self._session.skip(lot, back)
        return back

    def replay(self, start: Checkpoint, end: Checkpoint, known: Checkpoint) -> None:
        """Plan again the ranges of a batch that was logged before a restart.

        ``known`` is ``end`` without the topics that were deleted or recreated. Topics that the options no longer select are repeated:
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
        missing = sorted({queue for queue in logged if queue in known.next and queue not in owner.owned})
        require_none(self._broker, self._options, missing)
        session.repeat(start, end, missing)
        for queue in missing:
            if queue not in owner.owned:
                log.warning(
                    "queue %s of group %s has another owner: its part of the logged batch is not repeated", queue, group
                )
        lots = [queue for queue, owned in owner.owned.items() if owned.leader is not None]
        for lot in self._deleted_lots(end, lots, self._broker.log.bounds(lots) if lots else {}):
            session.unplace(lot)
        for queue in owner.unplaced().queues:
            # A parking lot is not in the batch if it was logged by a run without parking lots.
            if queue in end.next:
                log.warning(
                    "queue %s of group %s had another owner or was reset: its part of the logged batch is not repeated",
                    queue,
                    group,
                )
