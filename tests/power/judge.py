"""Judges the state after a loss of power: acknowledged changes are in the store, no other changes are, and the store is usable."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orderedmq.broker import SinkBatch
from orderedmq.embedded import garbage
from orderedmq.embedded.broker import EmbeddedBroker
from orderedmq.embedded.check import examine
from orderedmq.embedded.store.database import Store
from orderedmq.errors import OrderedMQError
from orderedmq.model import MessageQueue
from tests.contract.support import bodies, queues_of, rows
from tests.power.workload import COPY, LARGE, BootClock, seen

State = dict[str, Any] | None
#: A modification time so old that the file cannot belong to a running writer.
LONG_AGO = 3600.0


def allowed(marks: Sequence[str], all_marks: Sequence[str]) -> list[State]:
    """Return the states that are allowed after ``marks``: the last reported state, and the state after a step that had begun."""
    known = [json.loads(mark) for mark in marks]
    out = [next((mark["state"] for mark in reversed(known) if "state" in mark), None)]
    if known and "begin" in known[-1]:
        out.append(json.loads(all_marks[len(marks)])["state"])
    return out


def messages(state: State) -> int:
    """Return the number of messages in a state. Of a queue it has the incarnation, the bounds and the bodies."""
    return sum(len(content) - 2 for name, content in (state or {}).items() if not name.startswith("group "))


def allowed_copy(marks: Sequence[str], all_marks: Sequence[str]) -> list[State]:
    """Return the allowed states of the copy: no copy, or the state of the store when the copy was made."""
    made = next(mark for mark in map(json.loads, all_marks) if mark.get("end") == "snapshot" and mark["error"] is None)
    done = any(json.loads(mark) == made for mark in marks)
    return [made["state"]] if done else [None, made["state"]]


def findings(store: Path, states: Sequence[State]) -> list[str]:
    """Return what is wrong with the store: it must be in one of these states, sound, without garbage, and usable."""
    clock = BootClock("boot-after", 1_700_001_000_000_000)
    try:
        with EmbeddedBroker(store, clock=clock) as broker:
            there = seen(broker)
            if there not in states:
                return [_differences(there, states)]
            if there is None:
                broker.admin.create_topic("orders", 2, compression="none")
            found = examine(store).findings
            return found or [*_garbage(store, clock), *_more(broker), *examine(store).findings]
    except OrderedMQError as error:
        # A snapshot that was never acknowledged may leave files, which keep another one out.
        half_copied = store.name == COPY and states[0] is None and error.condition == "ORDEREDMQ_STORE.NOT_EMPTY"
        return [] if half_copied else [str(error)]


def _differences(there: State, states: Sequence[State]) -> str:
    nearest = states[-1]
    if there is None or nearest is None:
        return f"the store {'has nothing' if there is None else 'is there'}"
    return "; ".join(
        f"{name}: {str(there.get(name))[:300]} instead of {str(nearest.get(name))[:300]}"
        for name in sorted(set(there) | set(nearest))
        if there.get(name) != nearest.get(name)
    )


def _garbage(store: Path, clock: BootClock) -> list[str]:
    """Return the unneeded files that remain in the folder of segments after garbage collection."""
    for name in examine(store).unused:
        os.utime(store / "segments" / name, (LONG_AGO, LONG_AGO))
    opened = Store.open(store)
    try:
        garbage.collect_now(opened, clock)
    finally:
        opened.close()
    left = examine(store)
    return [f"{name} stays" for name in (*left.unused, *left.foreign)]


def _more(broker: EmbeddedBroker) -> list[str]:
    """Append messages and publish staged rows. Return an error for each queue that lacks old or new messages, or has others."""
    out = []
    queues = queues_of(broker)
    before = {queue: _bodies(broker, queue) for queue in queues}
    broker.log.append({queue: rows([b"new", b"n" * LARGE]) for queue in queues})
    for number, size in enumerate((10, LARGE)):
        batch = SinkBatch("after", number)
        staging = broker.outbox.open(batch, 0)
        staging.add(queues[0], rows([b"s" * size]))
        broker.outbox.publish(batch, [staging.receipt()])
    new = {queues[0]: ["new", "n" * LARGE, "s" * 10, "s" * LARGE], queues[1]: ["new", "n" * LARGE]}
    for queue in queues:
        if _bodies(broker, queue) != before[queue] + new[queue]:
            out.append(f"{queue} does not have what was written after the loss of power")
    return out


def _bodies(broker: EmbeddedBroker, queue: MessageQueue) -> list[str]:
    return bodies(broker, queue, broker.log.bounds([queue])[queue].min_offset)
