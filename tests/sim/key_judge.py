"""Judges listeners with order per key by the invariants K1 to K7, independently of the rules in the code.

- K1: The first decisions of a key's messages (success, dead letter, dropped) are in offset order. Exception: an operator may drop
  a key's parked messages. Older messages of the key may be parked after that, and are decided later.
- K2: After a committed success at offset n, no listener gets a message of the key at n or below, except in a repeat of the
  micro-batch that committed it.
- K3: Every message of a committed range is either decided once, or is in the lot once.
- K4: No listener gets messages of a key while an older message of the key is parked and not due. Listeners are called for keys
  that are due.
- K5: Other keys continue while one is parked, and lots drain once their listeners accept (`Simulation._heal`).
- K6: A message becomes a dead letter, or is parked because it failed, only if it has failed alone in this attempt or the listener has
  named it. The messages of its batch that were accepted do not fail with it.
- K7: A message that was decided below a recorded progress is given to no listener again, unless somebody seeks (`Ledger`). A repeat that
  leaves out an accepted message gives no older message of its key.

After a seek, messages that are read again are decided again. From then on, K1 to K5 apply to these messages and to the parked
messages that were kept. Messages that a seek skips or drops count as decided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import LockToken
from orderedmq.parking import lane_key, parked_queue, queue_token
from tests.sim.lots import Lots
from tests.sim.world import GROUP, World

if TYPE_CHECKING:
    from tests.sim.key_task import KeyTask

#: Events that must happen within the default number of seeds (counted in `World.reached`), so that the tests cover them.
REACHED: Final = (
    "parked",
    "diverted",
    "held",
    "moved not due",
    "came back and succeeded",
    "dead letter from the lot",
    "dead letter honoured",
    "repeated after parking",
    "passed over",
    "settled place refused",
    "same place again",
    "second copy skipped",
    "lot in another order",
    "order carried out",
    "dropped",
    "handed over with a lot",
    "full lot fallback",
    "queue behind a full lot",
    "batch failed for an unknown message",
    "batch failed for a named message",
    "range committed",
    "progress recorded",
    "progress honoured",
    "seek with --parked keep",
    "seek with --parked drop",
    "lot ahead of its queue",
)
_DECIDED: Final = ("SUCCESS", "DEAD_LETTER", "DROPPED")
#: The decision of a message that a seek passed over.
_SKIPPED: Final = "SKIPPED"


class KeyJudge:
    """Records the decision of each message. ``strict`` is False if two runs use one checkpoint, because one of them may repeat
    committed batches.
    """

    def __init__(self, world: World, lots: Lots) -> None:
        self.world, self.lots = world, lots
        self.strict = True
        #: The first decision of each message, and the offset of the last decided message of each key.
        self.first: dict[tuple[MessageQueue, int], str] = {}
        self.last: dict[tuple[MessageQueue, object], int] = {}
        #: For each decided message: the decision in the committed run of its range, and the name of that micro-batch.
        self.final: dict[tuple[MessageQueue, int], tuple[str, object]] = {}
        #: The highest committed success of a key, and its micro-batch.
        self.best: dict[tuple[MessageQueue, object], tuple[int, object]] = {}
        #: The last run of each range, by the queue and the ends of the ranges in the queue and the lot.
        self.runs: dict[tuple[MessageQueue, int, int], KeyTask] = {}
        self.at: dict[MessageQueue, tuple[int, int]] = {}
        #: Keys that were due when some run of a range began, with the start of the lot's range. The clock may have gone back since.
        self.due: set[tuple[MessageQueue, int, object]] = set()
        #: The epoch of each queue's last seek. Decisions under older tokens do not count.
        self.anew: dict[MessageQueue, int] = {}

    def lane(self, queue: MessageQueue, offset: int) -> object:
        return lane_key(self.lots.key_of(queue, offset), offset)

    def began(self, task: KeyTask) -> None:
        """Record that an attempt of a task has read the lot."""
        for lane, head in task.heads.items():
            if head.is_due(task.began):
                self.due.add((task.token.queue, task.lot.begin, lane))

    # -- listeners -------------------------------------------------------------------------------------------------------------

    def called(self, task: KeyTask, offsets: Sequence[int]) -> None:
        """Check a call of a listener with messages of one key."""
        queue = task.token.queue
        if not self.world.check(task.token):
            # The queue has another owner by now, so the results of this call will not be committed.
            return
        task.called.update(offsets)
        lane = self.lane(queue, offsets[0])
        if any(self.lane(queue, one) != lane for one in offsets) or sorted(offsets) != list(offsets):
            self.world.fail(f"{task}: {offsets} were passed to the listener in one call")
        if offsets[0] <= task.passed.get(lane, -1):
            self.world.fail(f"{task}: the listener gets {offsets[0]} of key {lane!r} after {task.passed[lane]} (K2)")
        best, batch = self.best.get((queue, lane), (-1, None))
        if self.strict and offsets[0] <= best and batch != task.batch:
            self.world.fail(f"{task}: the listener gets {offsets[0]} of key {lane!r} after {best} has succeeded (K2)")
        behind = self.lots.entries.get(task.lot_token.queue, [])[task.lot.end :]
        # A progress says that an earlier attempt has decided them, although they lie there until the group's offset passes them.
        decided = self.world.ledger.finished.get(queue, ())
        for one in behind:
            if one.command is None and one.lane == lane and one.offset <= offsets[-1] and one.offset not in decided:
                self.world.fail(f"{task}: the listener gets {offsets} of key {lane!r}, but {one.offset} is parked (K4)")
        head = task.heads.get(lane)
        if head is None:
            return
        if head.dropped.intersection(offsets):
            self.world.fail(f"{task}: the listener gets {offsets}, which were dropped (K4)")
        if (queue, task.lot.begin, lane) not in self.due and any(one not in head.dropped for one in head.offsets):
            self.world.fail(
                f"{task}: the listener gets {offsets} of key {lane!r} at {task.began}, but the key is due at {head.due} (K4)"
            )

    def skipped(self, task: KeyTask, offset: int) -> None:
        """Check a message that was accepted in an earlier attempt. Listeners got no older message of its key in this attempt."""
        lane = self.lane(task.token.queue, offset)
        older = [one for one in task.called if one < offset and self.lane(task.token.queue, one) == lane]
        if older:
            self.world.fail(f"{task}: {offset} of key {lane!r} was accepted before, and the listener got {older} after it (K7)")

    def returned(self, task: KeyTask, offsets: Sequence[int], ack_index: int, *, accepted: bool) -> None:
        """Record that a call has returned."""
        if accepted:
            return
        if len(offsets) == 1:
            task.failed.add(offsets[0])
        elif ack_index < len(offsets) - 1:
            task.failed.add(offsets[ack_index + 1])
            self.world.reached["batch failed for a named message"] += 1
        else:
            self.world.reached["batch failed for an unknown message"] += 1

    def given_up(self, task: KeyTask, offsets: Iterable[int]) -> None:
        """Check messages that become dead letters, or that are parked because they failed."""
        for offset in offsets:
            if offset not in task.failed:
                self.world.fail(f"{task}: {offset} is given up because of another message of its batch (K6)")

    def decided(self, task: KeyTask, offset: int, status: str, *, earlier: bool = False) -> None:
        """Record a run's decision of a message, committed or not. ``earlier``: an attempt before this run has decided it."""
        queue = task.token.queue
        lane = self.lane(queue, offset)
        if status != "DROPPED" and not earlier:
            task.passed[lane] = max(offset, task.passed.get(lane, -1))
        if (queue, offset) in self.first or task.token.epoch <= self.anew.get(queue, 0):
            return
        if earlier:
            # The dead letter is older than a seek that kept the message in the lot.
            self.first[queue, offset] = status
            return
        last = self.last.get((queue, lane), -1)
        if offset < last:
            self.world.fail(f"{task}: {offset} of key {lane!r} is first decided ({status}) after {last} (K1)")
        self.first[queue, offset] = status
        if status != "DROPPED":
            self.last[queue, lane] = offset

    def finished(self, task: KeyTask) -> None:
        """Check a finished run of a range: every message has one outcome, and listeners were called for all keys that were due."""
        skipped = {one for one in task.expected if task.lies(one)}
        if task.outcomes.keys() | skipped != task.expected or task.outcomes.keys() & skipped:
            self.world.fail(f"{task}: outcomes {task.outcomes}, skipped {skipped}, expected {task.expected}")
        for lane, head in task.heads.items():
            first = next((one for one in head.offsets if one not in head.dropped), None)
            if first is not None and head.is_due(task.began) and first not in task.seen and first not in skipped:
                self.world.fail(
                    f"{task}: key {lane!r} was due at {head.due}, but no listener was called for it at {task.began} (K4)"
                )
        name = task.token.queue, task.span.end, task.lot.end
        known = self.runs.get(name)
        if known is None or known.token.epoch <= task.token.epoch:
            self.runs[name] = task

    # -- commits ---------------------------------------------------------------------------------------------------------------

    def moved(self, tokens: Iterable[LockToken]) -> None:
        """Record that the group's offsets were moved under these tokens."""
        offsets = self.world.group_offsets
        for queue in {queue_token(token).queue for token in tokens}:
            at = offsets.get(queue, 0), offsets.get(parked_queue(GROUP, queue), 0)
            task = self.runs.get((queue, *at))
            if self.at.get(queue) != at and task is not None:
                self._committed(task)
            self.at[queue] = at

    def _committed(self, task: KeyTask) -> None:
        self.world.reached["range committed"] += 1
        queue = task.token.queue
        live = Counter(one.offset for one in self.lots.messages(queue))
        for offset in task.expected:
            status, lies = task.outcomes.get(offset, "PARKED"), live[offset]
            if status in _DECIDED:
                self._decided(task, queue, offset, status)
                if lies:
                    self.world.fail(f"{task}: {offset} is {status}, but is still in the lot (K3)")
            elif lies > 1:
                self.world.fail(f"{task}: {offset} is in the lot {lies} times (K3)")
            elif not lies:
                if (queue, offset) not in self.first or status == "PARKED":
                    self.world.fail(f"{task}: {offset} is {status}, but is not in the lot (K3)")
                # An earlier run of the range has decided the message.
                self._decided(task, queue, offset, self.first[queue, offset])

    def _decided(self, task: KeyTask, queue: MessageQueue, offset: int, status: str) -> None:
        then = self.final.get((queue, offset))
        if then is not None and then[1] != task.batch and self.strict:
            self.world.fail(f"{task}: {offset} is {status}, but was {then[0]} in {then[1]} (K3)")
        self.final[queue, offset] = status, task.batch
        if status == "SUCCESS":
            lane = self.lane(queue, offset)
            best, _ = self.best.get((queue, lane), (-1, None))
            if offset >= best:
                self.best[queue, lane] = offset, task.batch

    def sought(self, queue: MessageQueue, to: int) -> None:
        """Record a seek: the queue is read from ``to`` on, and the messages in its lot were kept."""
        world = self.world
        self.anew[queue] = world.numbers
        kept = {one.offset for one in self.lots.messages(queue)}
        # The first offset of each key that is still to be processed.
        begins: dict[object, int] = {}
        for offset in sorted({*kept, *range(to, world.ends[queue])}):
            begins.setdefault(self.lane(queue, offset), offset)
            self.first.pop((queue, offset), None)
            self.final.pop((queue, offset), None)
        for name in [name for name in (*self.last, *self.best) if name[0] == queue]:
            self.last.pop(name, None)
            self.best.pop(name, None)
        for offset in range(to):
            if offset in kept:
                continue
            self.first.setdefault((queue, offset), _SKIPPED)
            status, batch = self.final.setdefault((queue, offset), (_SKIPPED, None))
            lane = self.lane(queue, offset)
            if status == "SUCCESS" and offset < begins.get(lane, offset + 1):
                self.best[queue, lane] = offset, batch
        self.runs = {name: task for name, task in self.runs.items() if name[0] != queue}
        self.at[queue] = world.group_offsets.get(queue, 0), world.group_offsets.get(parked_queue(GROUP, queue), 0)

    # -- final checks ----------------------------------------------------------------------------------------------------------

    def others(self, room: int) -> None:
        """Fail unless every message that is not parked is decided, except in queues that a full lot stops (K5)."""
        for queue, end in self.world.ends.items():
            parked = {one.offset for one in self.lots.live(queue) if one.command is None}
            if len(parked) >= room:
                self.world.reached["queue behind a full lot"] += 1
                continue
            for offset in range(end):
                if offset not in parked and (queue, offset) not in self.first:
                    self.world.fail(f"{queue}: {offset} is not decided and not in the lot (K5)")

    def drained(self) -> None:
        """Fail unless every message is decided, and committed once."""
        for queue, end in self.world.ends.items():
            for offset in range(end):
                if (queue, offset) not in (self.final if self.strict else self.first):
                    self.world.fail(f"{queue}: {offset} is not decided in the end (K3)")
