"""A listener with order per key that logs each call, and a judge of these logs."""

from __future__ import annotations

import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from pyspark import TaskContext

from ordered_source import ConsumeOrderlyContext, ConsumeOrderlyStatus
from orderedmq import pulls
from orderedmq.broker import Broker
from orderedmq.model import DEAD_LETTER_PREFIX, MessageQueue
from orderedmq.ownership.micro_batch import run_of
from orderedmq.parking import Lot, parked_queue
from orderedmq.rows.dead_letters import ORIGIN_BROKER, ORIGIN_OFFSET, REAL_QUEUE, REAL_TOPIC
from tests import event_log

#: The environment variable with the folder of the call logs. Spark's workers inherit it.
CALLS: Final = "ORDEREDMQ_TEST_CALLS"
#: A prefix of keys. The listener never accepts a message whose key has this prefix.
POISON: Final = "poison"
#: A prefix of keys. Most calls for a key with this prefix fail, so some messages become dead letters though another attempt would
#: accept them.
MOODY: Final = "moody"
#: The share of calls for moody keys that fail.
BAD_MOOD: Final = 0.75
#: The seconds that a call takes.
CALL: Final = 0.02
#: The share of all other calls that fail, at random.
BAD_LUCK: Final = 0.01


class Recorder:
    """The listener; each worker thread has one object. Each call is logged to a file, which survives a kill of the worker."""

    def __init__(self) -> None:
        self.random = random.Random()

    def __call__(self, messages: Sequence[Any], context: ConsumeOrderlyContext) -> ConsumeOrderlyStatus:
        key = messages[0].sharding_key
        offsets = [message.queue_offset for message in messages]
        began = time.time_ns() // 1000
        # Take some time, so that a kill can hit a micro-batch while it runs.
        time.sleep(CALL)
        ok = not key.startswith(POISON) and self.random.random() >= (BAD_MOOD if key.startswith(MOODY) else BAD_LUCK)
        call = {
            "began": began,
            "queue": str(context.message_queue),
            "key": key,
            "offsets": offsets,
            "ok": ok,
        }
        task = TaskContext.get()
        run = None if task is None else run_of(task.getLocalProperty)
        if run is not None:
            call |= {"query": run.query_id, "batch": run.batch_id, "run": run.run_id}
        event_log.write(Path(os.environ[CALLS]), **call)
        if not ok:
            raise RuntimeError("this call was chosen to fail")
        return ConsumeOrderlyStatus.SUCCESS


def at_work(folder: Path) -> int | None:
    """The process id of the worker that made the most recent call, or None if no call was logged in the last moments."""
    last, pid = max(((file.stat().st_mtime, int(file.stem)) for file in folder.iterdir()), default=(0.0, 0))
    return pid if time.time() - last < 2 * CALL else None


def read_lot(broker: Broker, group: str, queue: MessageQueue) -> Lot:
    """Return the current content of a queue's parking lot."""
    parked = parked_queue(group, queue)
    lot = Lot(broker.groups.offsets(group, [parked]).get(parked, 0))
    pulls.read_lot(broker.log, lot, parked, pulls.end_of_lot(broker.log, parked))
    return lot


def dead_letters(broker: Broker, group: str) -> Iterator[tuple[str, str, int, int]]:
    """The queue, key, offset and time (µs since 1970) of each dead letter, in the order in which they were stored."""
    topic = DEAD_LETTER_PREFIX + group
    if topic not in {info.name for info in broker.log.topics()}:
        return
    [queue] = broker.log.queues(topic)
    at = broker.log.bounds([queue])[queue]
    columns = ("sharding_key", "properties", "store_timestamp")
    for rows in pulls.pulls(broker.log, queue, at.min_offset, at.max_offset, 8192, 1 << 24, columns):
        keys, properties, times = rows.columns
        for key, items, stored in zip(keys.to_pylist(), properties.to_pylist(), times.cast("int64").to_pylist(), strict=True):
            origin = dict(items)
            where = str(MessageQueue(origin[REAL_TOPIC], origin[ORIGIN_BROKER], int(origin[REAL_QUEUE])))
            yield where, key, int(origin[ORIGIN_OFFSET]), stored


def judge(broker: Broker, group: str, queues: Sequence[MessageQueue], folder: Path) -> Counter[str]:
    """Assert that each message was decided once, in the order of its key, and that nothing is parked. Return counts.

    A repeated batch may give up a message that a killed attempt had accepted. But the listener must never again get a message
    that was given up.
    """
    last: dict[tuple[str, int], int] = {}
    first: dict[tuple[str, int], int] = {}
    order: dict[tuple[str, str], list[int]] = defaultdict(list)
    seen: Counter[str] = Counter()
    for call in event_log.read(folder):
        seen["calls"] += 1
        seen["failures"] += not call["ok"]
        for offset in call["offsets"]:
            last[call["queue"], offset] = max(call["began"], last.get((call["queue"], offset), 0))
        for offset in call["offsets"] if call["ok"] else ():
            place = call["queue"], offset
            seen["repeats"] += place in first
            if place not in first:
                first[place] = call["at"]
                order[call["queue"], call["key"]].append(offset)
    dead: dict[tuple[str, str], list[int]] = defaultdict(list)
    for where, key, offset, stored in dead_letters(broker, group):
        late = last[where, offset] - stored
        assert late <= 0, f"{where}:{offset} became a dead letter, but the listener got it again {late} µs later"
        seen["dead letters"] += 1
        if (where, offset) in first:
            seen["accepted, then given up in a repeat"] += 1
        else:
            dead[where, key].append(offset)
    for of in (order, dead):
        for lane, offsets in of.items():
            assert offsets == sorted(set(offsets)), f"messages of {lane} are repeated or out of order: {offsets}"
    for queue in queues:
        end = broker.log.bounds([queue])[queue].max_offset
        assert broker.groups.offsets(group, [queue]) == {queue: end}
        assert read_lot(broker, group, queue).messages == 0
        name = str(queue)
        decided = sorted(
            offset for of in (order, dead) for (there, _), offsets in of.items() if there == name for offset in offsets
        )
        assert decided == list(range(end)), f"{queue}: {len(decided)} of {end} messages were decided"
        seen["messages"] += end
    return seen
