"""Deliberate bugs in parking lots and in listeners with order per key. Tests check that the simulation notices each of them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final
from unittest import mock

from ordered_source.listener.settled import Settled
from ordered_source.lot_planner import LotPlanner
from orderedmq import parking as parking_lot
from orderedmq.broker import Progress
from orderedmq.listening import key_engine
from orderedmq.listening.engine import Engine, KeyLane, Park
from orderedmq.listening.key_engine import KeyEngine
from orderedmq.listening.listener import ConsumeOrderlyStatus
from orderedmq.listening.process_queue import ProcessQueue
from orderedmq.model import is_parked
from orderedmq.ownership import owner as ownership
from orderedmq.ownership.owned_queue import Step
from orderedmq.ownership.owner import Commit, Owner
from orderedmq.parking import HELD, Lot, Ticket
from tests.sim import key_task
from tests.sim.lots import Lots


def _instead(where: Any, name: str, by: Any, **how: Any) -> AbstractContextManager[Any]:
    return mock.patch.object(where, name, by, **how)


@contextlib.contextmanager
def parked_after_the_commit() -> Iterator[None]:
    """A task reports a message as parked, but parks it only together with the next one. A crash in between loses the message."""
    park = Lots.park
    owed: dict[int, tuple[Any, Any]] = {}

    def later(self: Lots, token: Any, parkings: Any) -> list[bool]:
        self.world.require_current(token)
        before = owed.pop(id(self), None)
        owed[id(self)] = token, parkings
        if before is not None and self.world.check(before[0]):
            park(self, *before)
        return [True] * len(parkings)

    with _instead(Lots, "park", later):
        yield


def keys_read_only_to_the_ranges_end() -> AbstractContextManager[Any]:
    """A task does not look for messages that an earlier attempt of its range has parked."""
    return _instead(key_task, "Settled", lambda lot, plan, *more: Settled(Lot(plan.end), plan, *more))


def letters_not_honoured() -> AbstractContextManager[Any]:
    """A task does not look for dead letters that an earlier attempt of its range has written."""
    return _instead(key_task, "Settled", lambda lot, plan, letters, progress: Settled(lot, plan, frozenset(), progress))


def lot_not_committed_with_its_queue() -> AbstractContextManager[Any]:
    """The offset of a parking lot is not committed with its queue's offset, so the next owner finds the lot's old offset."""
    take_processed = Owner.take_processed

    def without_lots(self: Owner, start: Any) -> Commit | None:
        found = take_processed(self, start)
        if found is None:
            return None
        kept = {token: offset for token, offset in found.offsets.items() if not is_parked(token.queue)}
        return Commit(kept) if kept else None

    return _instead(Owner, "take_processed", without_lots)


def lot_kept_when_its_queue_is_given_up() -> AbstractContextManager[Any]:
    """When an owner gives up a queue and gets it back, it reads the parking lot from the position at which it had stopped."""
    locked, forget = Owner.locked, Owner._forget
    kept: dict[tuple[int, Any], int] = {}

    def remembers(self: Owner, queues: Any, step: Step) -> None:
        gone = set(queues)
        for queue, owned in self.owned.items():
            if owned.leader in gone and owned.position is not None:
                kept[id(self), queue] = owned.position
        forget(self, gone, step)

    def again(self: Owner, tokens: Any) -> None:
        locked(self, tokens)
        for queue, owned in self.owned.items():
            if owned.position is None and (position := kept.pop((id(self), queue), None)) is not None:
                owned.place(position, entered=True)

    stack = contextlib.ExitStack()
    stack.enter_context(_instead(Owner, "_forget", remembers))
    stack.enter_context(_instead(Owner, "locked", again))
    return stack


def due_a_moment_too_late() -> AbstractContextManager[Any]:
    """``<`` instead of ``<=``: a key that is due exactly now is moved in the lot, and its listener is not called."""
    return _instead(Ticket, "is_due", lambda self, now: self.due == -2 or (self.due != HELD and self.due < now))


def due_too_early() -> AbstractContextManager[Any]:
    """The driver plans a lot when a key is due, but the task consumes all planned messages, including those that are not due."""
    return _instead(Ticket, "is_due", lambda self, now: self.due != HELD)


def identity_ignored() -> AbstractContextManager[Any]:
    """A message that was already parked from a place is parked from that place again."""
    return _instead(Lots, "parked_before", lambda self, lot, parking: False)


def newer_message_not_diverted() -> AbstractContextManager[Any]:
    """A newer message of a key that waits in the lot is consumed."""
    return _instead(KeyEngine, "_may_consume", staticmethod(lambda lane, message: True))


def dead_letter_overtaken() -> AbstractContextManager[Any]:
    """While a dead letter is written, the next message of its key is consumed in a separate lane."""
    consumed = KeyEngine.consumed

    def goes_on(self: KeyEngine, batch: Any, *arguments: Any) -> Any:
        out = consumed(self, batch, *arguments)
        lane = batch.lane
        if any(batch is one for one, _ in self._exhausted) and lane.waiting:
            other = KeyLane(
                lane.key, waiting=lane.waiting, parked_offsets=lane.parked_offsets, diverted_from=lane.diverted_from
            )
            lane.waiting = deque()
            self._ready.append(other)
        return out

    return _instead(KeyEngine, "consumed", goes_on)


def settled_place_parked_again() -> AbstractContextManager[Any]:
    """A message below the group's offset can be parked, so a late repeat parks a message that is already decided."""
    return _instead(Lots, "settled", lambda self, parking: False)


def dropped_by_a_seek_and_still_known() -> AbstractContextManager[Any]:
    """A message whose parked copy was dropped by a seek is not parked again from its place."""
    return _instead(Lots, "parked_before", lambda self, lot, parking: parking.place in self.known.get(lot, {}))


def lot_not_sought_with_its_queue() -> AbstractContextManager[Any]:
    """A lot is read from the checkpoint's offset, although a seek or another owner came in between."""
    unbroken = Owner.unbroken
    return _instead(Owner, "unbroken", lambda self, owned, *given: owned.leader is not None or unbroken(self, owned, *given))


def passed_over_before_what_is_parked() -> AbstractContextManager[Any]:
    """A message that fails while newer messages of its key are parked is passed over, as if it had been decided before."""
    consumed = KeyEngine.consumed

    def passes(self: KeyEngine, batch: Any, answer: Any, now: float) -> Any:
        if answer.status is ConsumeOrderlyStatus.SUCCESS or batch.lane.diverted_from is None:
            return consumed(self, batch, answer, now)
        self._returned(batch, now)
        return self._decide(batch.lane, "REPEATED")

    return _instead(KeyEngine, "consumed", passes)


def lot_planned_before_what_is_older() -> AbstractContextManager[Any]:
    """A lot is planned although its messages are at or after the queue's position, and older messages of their keys are still unread."""
    return _instead(Lot, "max_offset", property(lambda self: -1, lambda self, value: None), create=True)


def parked_from_the_first_copy() -> AbstractContextManager[Any]:
    """A message with two copies in the lot is parked from the place of its first copy, although it was parked from there before."""
    return _instead(Lot, "place", lambda self, offset: self.places[offset])


def order_missed_by_what_moves() -> AbstractContextManager[Any]:
    """An operator's order has no effect on messages that a task is moving while the order is given."""
    return _instead(parking_lot, "_places_in_lot", lambda rows: [-1] * rows.num_rows)


def lot_in_its_own_order() -> AbstractContextManager[Any]:
    """The messages of a key are processed in the order of the lot instead of the queue's order."""
    return _instead(key_engine, "sorted", lambda messages, key: messages, create=True)


def lot_read_on_from_the_checkpoint() -> AbstractContextManager[Any]:
    """A lot without committed offsets is read from the checkpoint's offset, although its queue has had another owner since."""
    return _instead(ownership, "_at_group", lambda owned, group: group.get(owned.queue))


def queue_stopped_by_a_lot_that_waits_for_it() -> AbstractContextManager[Any]:
    """A full lot stops its queue, although the lot itself waits for the queue."""
    plan = LotPlanner.plan

    def stops(self: LotPlanner, owner: Owner, *arguments: Any) -> Any:
        found = plan(self, owner, *arguments)
        lots = [(one.leader, self._lots.get(queue)) for queue, one in owner.owned.items() if one.leader is not None]
        return replace(
            found, full=frozenset(leader for leader, lot in lots if lot is not None and lot.messages >= self._capacity)
        )

    return _instead(LotPlanner, "plan", stops)


def first_message_given_up_for_its_batch() -> AbstractContextManager[Any]:
    """When a batch fails, its first message counts as the one that failed."""
    accepted = KeyEngine._accepted
    return _instead(KeyEngine, "_accepted", lambda *given: 0 if (found := accepted(*given)) is None else found)


def progress_up_to_the_highest_message_that_is_done() -> AbstractContextManager[Any]:
    """The progress passes messages that are not done if a higher one is."""
    remove = ProcessQueue.remove_message

    def passes(self: ProcessQueue, offsets: Sequence[int]) -> int:
        self.progress = max(remove(self, offsets), offsets[-1] + 1)
        return self.progress

    return _instead(ProcessQueue, "remove_message", passes)


def progress_before_what_is_parked() -> AbstractContextManager[Any]:
    """A message counts as decided before it is in the lot."""
    park = Engine._park

    def passes(self: Engine, now: float) -> Park:
        action = park(self, now)
        self._decided(sorted(action.messages, key=lambda message: message._offset))
        return action

    return _instead(Engine, "_park", passes)


def progress_without_the_lot() -> AbstractContextManager[Any]:
    """The progress does not say which messages of the lot are decided, so a repeat gives them after newer ones of their keys."""
    advance = Settled.advance

    def forgets(self: Settled, offset: int) -> Progress | None:
        progress = advance(self, offset)
        return None if progress is None else progress._replace(lot=0)

    return _instead(Settled, "advance", forgets)


def parked_messages_below_the_progress_skipped() -> AbstractContextManager[Any]:
    """A message of the lot counts as decided because its offset in the queue is below the progress."""
    return _instead(Settled, "_is_decided", lambda self, offset, place: offset < self._progress.offset)


def progress_that_goes_back() -> AbstractContextManager[Any]:
    """A task records less than an earlier owner has recorded, because it has messages of the lot that are older."""

    def goes_back(self: Settled, offset: int) -> Progress | None:
        return None if self._is_behind else Progress(offset, max(self._plan.end, self._progress.lot))

    return _instead(Settled, "advance", goes_back)


KEY_BUGS: Final[tuple[Callable[[], AbstractContextManager[Any]], ...]] = (
    parked_after_the_commit,
    keys_read_only_to_the_ranges_end,
    letters_not_honoured,
    lot_not_committed_with_its_queue,
    lot_kept_when_its_queue_is_given_up,
    due_a_moment_too_late,
    due_too_early,
    identity_ignored,
    newer_message_not_diverted,
    dead_letter_overtaken,
    settled_place_parked_again,
    lot_planned_before_what_is_older,
    parked_from_the_first_copy,
    order_missed_by_what_moves,
    lot_in_its_own_order,
    lot_read_on_from_the_checkpoint,
    queue_stopped_by_a_lot_that_waits_for_it,
    dropped_by_a_seek_and_still_known,
    lot_not_sought_with_its_queue,
    passed_over_before_what_is_parked,
    first_message_given_up_for_its_batch,
    progress_up_to_the_highest_message_that_is_done,
    progress_before_what_is_parked,
    progress_without_the_lot,
    parked_messages_below_the_progress_skipped,
    progress_that_goes_back,
)
