"""Deliberate bugs in the real code or in the broker's rules. Tests check that the simulation notices each of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final
from unittest import mock

from ordered_source.columns import LotPlan
from ordered_source.group_session import GroupSession
from ordered_source.listener.settled import Settled
from orderedmq.broker import Progress
from orderedmq.listening.engine import Engine
from orderedmq.listening.queue_engine import QueueEngine
from orderedmq.ownership import lock as rules
from orderedmq.ownership.lock import Instant, LockToken, QueueLock
from orderedmq.ownership.owner import Commit, Owner, Unlock
from orderedmq.parking import Lot
from tests.sim.process import Process
from tests.sim.world import World


def _instead(where: Any, name: str, by: Any) -> AbstractContextManager[Any]:
    return mock.patch.object(where, name, by)


def no_epoch_check() -> AbstractContextManager[Any]:
    """The broker accepts a change under any epoch."""
    return _instead(rules, "is_current", lambda lock, token: lock is not None)


@contextlib.contextmanager
def offset_read_before_the_lock() -> Iterator[None]:
    """The group's offset is read before the queue is locked, while the last owner may still move it."""
    take, offsets = GroupSession._take, Process.offsets
    early: dict[Process, dict[Any, int]] = {}

    def reads_first(self: GroupSession, action: Any, *, patient: bool) -> None:
        process: Any = self._groups
        early[process] = offsets(process, self.group, action.queues)
        take(self, action, patient=patient)

    def read_early(self: Process, name: str, queues: Any) -> dict[Any, int]:
        return {**offsets(self, name, queues), **{queue: at for queue, at in early.get(self, {}).items() if queue in queues}}

    with _instead(GroupSession, "_take", reads_first), _instead(Process, "offsets", read_early):
        yield


def unlock_before_commit() -> AbstractContextManager[Any]:
    """A queue is unlocked before its offset is committed, so the next owner reads the old offset."""
    boundary = Owner.boundary

    def unlocks_first(self: Owner, *arguments: Any) -> Any:
        return sorted(boundary(self, *arguments), key=lambda action: not isinstance(action, Unlock))

    return _instead(Owner, "boundary", unlocks_first)


def commit_of_a_given_up_queue() -> AbstractContextManager[Any]:
    """When an owner gives up a queue, it commits the queue's end at the broker, although the messages up to there are not processed."""
    boundary = Owner.boundary

    def commits_all(self: Owner, *arguments: Any) -> Any:
        before = dict(self.owned)
        actions = boundary(self, *arguments)
        gone = {one.token: one.known for queue, one in before.items() if one.token and queue not in self.owned}
        known = next((action.offsets for action in actions if isinstance(action, Commit)), {})
        rest = [action for action in actions if not isinstance(action, Commit)]
        return [Commit({**known, **gone}), *rest] if known or gone else rest

    return _instead(Owner, "boundary", commits_all)


def renew_that_grants_a_free_queue() -> AbstractContextManager[Any]:
    """A client that lost a queue gets it back by a renewal if the queue is free, and resumes at its old position."""
    renew = rules.renew

    def grants(lock: QueueLock | None, token: LockToken, now: Instant) -> QueueLock | None:
        if lock is not None and not lock.held:
            mine = replace(lock, owner=token.owner, client_id=token.client_id, epoch=token.epoch, tenure=token.tenure)
            return replace(mine, held=True, renewed=now)
        return renew(lock, token, now)

    return _instead(rules, "renew", grants)


def expired_too_early() -> AbstractContextManager[Any]:
    """``<=`` instead of ``<``: a lock is taken over when its age equals its life exactly."""
    return _instead(QueueLock, "expired", lambda self, now: self.life <= self.age(now))


def wall_clock() -> AbstractContextManager[Any]:
    """The age of a lock is computed from the wall clock, which jumps."""
    return _instead(World, "instant", lambda self: Instant(f"boot-{self.boot}", self.wall()))


def _trusting(name: str) -> AbstractContextManager[Any]:
    """Patch the method ``name`` of Owner so that it assumes that no other query has owned its queues in between."""
    method = getattr(Owner, name)

    def trusts(self: Owner, *arguments: Any) -> Any:
        with _instead(Owner, "unbroken", lambda *_: True):
            return method(self, *arguments)

    return _instead(Owner, name, trusts)


def replay_of_a_moved_queue() -> AbstractContextManager[Any]:
    """A logged batch is repeated without checking whether its queues have had another owner since."""
    return _trusting("replay")


def start_trusted_after_a_break() -> AbstractContextManager[Any]:
    """A queue is read from ``start.next``, although it has had another owner since."""
    return _trusting("enter")


def replay_without_what_a_former_run_holds() -> AbstractContextManager[Any]:
    """A logged batch is run without the queues that the query's former run holds. Later these queues' tenure seems unbroken."""
    return _instead(Owner, "indispensable", lambda self, asked, refused: list(refused) if asked.all_or_none else [])


def stop_that_unlocks_a_queue_in_flight() -> AbstractContextManager[Any]:
    """A stopped query unlocks its queues immediately, while its tasks still run."""
    stop = Owner.stop

    def at_once(self: Owner, group: Any) -> Unlock:
        release = stop(self, group)
        return Unlock((*release.idle, *release.in_flight), ())

    return _instead(Owner, "stop", at_once)


def letters_of_a_queue_not_honoured() -> AbstractContextManager[Any]:
    """With order per queue, a task does not look for dead letters that an earlier attempt of its range has written."""
    return _instead(
        Settled, "without_lot", lambda letters, progress: Settled(Lot(0), LotPlan(0, 0, 0, 0), frozenset(), progress)
    )


def first_message_of_a_queue_given_up_for_its_batch() -> AbstractContextManager[Any]:
    """With order per queue, when a batch fails, its first message counts as the one that failed."""
    accepted = QueueEngine._accepted
    return _instead(QueueEngine, "_accepted", lambda *given: 0 if (found := accepted(*given)) is None else found)


def progress_before_the_outcome() -> AbstractContextManager[Any]:
    """A task records the progress up to the end of the messages that it has, not of those that are decided."""
    return _instead(Engine, "progress", property(lambda self: self._range._end))


def progress_that_survives_a_seek() -> AbstractContextManager[Any]:
    """A seek leaves the recorded progress as it is."""
    return _instead(World, "_forget_progress", lambda self, queue: self.ledger.progress_forgotten(queue))


def progress_of_an_older_epoch() -> AbstractContextManager[Any]:
    """A task that has lost the lock records its progress in place of the next owner's."""
    record = World.record_progress

    def records(self: World, token: LockToken, progress: Progress) -> None:
        if self.check(token):
            record(self, token, progress)
        else:
            self.progress[token.queue] = progress

    return _instead(World, "record_progress", records)


BUGS: Final[tuple[Callable[[], AbstractContextManager[Any]], ...]] = (
    no_epoch_check,
    offset_read_before_the_lock,
    unlock_before_commit,
    commit_of_a_given_up_queue,
    renew_that_grants_a_free_queue,
    expired_too_early,
    wall_clock,
    replay_of_a_moved_queue,
    start_trusted_after_a_break,
    replay_without_what_a_former_run_holds,
    stop_that_unlocks_a_queue_in_flight,
    letters_of_a_queue_not_honoured,
    first_message_of_a_queue_given_up_for_its_batch,
    progress_before_the_outcome,
    progress_that_survives_a_seek,
    progress_of_an_older_epoch,
)
