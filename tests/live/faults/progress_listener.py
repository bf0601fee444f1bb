"""Listeners of each kind that log each call, for tests of what a listener gets again after a kill."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from ordered_source import (
    ConcurrentSettings,
    ConsumeConcurrentlyStatus,
    ConsumeOrderlyStatus,
    OrderPerKey,
    OrderPerQueue,
    consume_concurrently,
    consume_orderly,
)
from ordered_source.listener import engine_task
from tests import event_log
from tests.waits import STEP

#: Environment variables, which Spark's workers inherit: the folder of the log of calls, the seconds between two records of a task's
#: progress, and how many calls each listener finishes in a second.
CALLS: Final = "ORDEREDMQ_TEST_CALLS"
INTERVAL: Final = "ORDEREDMQ_TEST_PROGRESS_INTERVAL"
PER_SECOND: Final = "ORDEREDMQ_TEST_CALLS_PER_SECOND"
#: The file in the folder without which no call ends, so that listeners begin their work together.
GO: Final = "go"
#: Calls that a listener makes at a time.
_CONCURRENCY: Final = {"queue": 1, "key": 4, "none": 4, "async": 50}

# Workers import this module before a task begins.
setattr(engine_task, "PROGRESS_INTERVAL", float(os.environ.get(INTERVAL, "5")))  # noqa: B010


def _log(what: str, kind: str, messages: Sequence[Any]) -> None:
    event_log.write(Path(os.environ[CALLS]), what=what, kind=kind, offsets=[message.queue_offset for message in messages])


def _may_end() -> bool:
    return (Path(os.environ[CALLS]) / GO).exists()


def _seconds(kind: str) -> float:
    return _CONCURRENCY[kind] / float(os.environ[PER_SECOND])


def _call(kind: str, messages: Sequence[Any]) -> None:
    _log("begins", kind, messages)
    while not _may_end():
        time.sleep(STEP)
    time.sleep(_seconds(kind))
    _log("ends", kind, messages)


def in_queue_order(messages: Sequence[Any], context: Any) -> ConsumeOrderlyStatus:
    _call("queue", messages)
    return ConsumeOrderlyStatus.SUCCESS


def in_key_order(messages: Sequence[Any], context: Any) -> ConsumeOrderlyStatus:
    _call("key", messages)
    return ConsumeOrderlyStatus.SUCCESS


def in_no_order(messages: Sequence[Any], context: Any) -> ConsumeConcurrentlyStatus:
    _call("none", messages)
    return ConsumeConcurrentlyStatus.CONSUME_SUCCESS


async def awaited(messages: Sequence[Any], context: Any) -> ConsumeOrderlyStatus:
    _log("begins", "async", messages)
    while not _may_end():
        await asyncio.sleep(STEP)
    await asyncio.sleep(_seconds("async"))
    _log("ends", "async", messages)
    return ConsumeOrderlyStatus.SUCCESS


class Kind(NamedTuple):
    """A kind of listener: the function that runs it, the listener and its settings, and the source's option that it needs."""

    consume: Callable[..., Any]
    listener: Callable[..., Any]
    settings: Any
    option: str = "parkingLot"


KINDS: Final[Mapping[str, Kind]] = {
    "queue": Kind(consume_orderly, in_queue_order, OrderPerQueue(), "includeLockToken"),
    "key": Kind(consume_orderly, in_key_order, OrderPerKey(concurrency=_CONCURRENCY["key"])),
    "none": Kind(consume_concurrently, in_no_order, ConcurrentSettings(concurrency=_CONCURRENCY["none"])),
    "async": Kind(consume_orderly, awaited, OrderPerKey(concurrency=_CONCURRENCY["async"])),
}
