"""A query that is asked to stop releases its queues between two micro-batches, after committing everything that Spark has committed."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ordered_source.stopping import StopRequest, stop_at_boundary
from orderedmq.errors import OptionError
from orderedmq.model import MessageQueue
from orderedmq.ownership.offsets import Checkpoint
from tests.loop.conftest import EACH_LOOP, LoopRig
from tests.micro_batches import MicroBatchLoop

SOURCE = {"topic": "in", "consumerGroup": "g", "assignment": "shared", "maxOffsetsPerTrigger": 4}


@pytest.fixture
def queues(rig: LoopRig) -> list[MessageQueue]:
    rig.broker.admin.create_topic("in", 2)
    rig.fill("in", 10)
    return rig.broker.log.queues("in")


@pytest.fixture
def request_to(rig: LoopRig) -> Iterator[Any]:
    """A function that requests the stop of a checkpoint's query. The checkpoint must have logged a batch."""
    requests: list[StopRequest] = []

    def create(checkpoint: str = "ck") -> StopRequest:
        requests.append(StopRequest(rig.checkpoints[checkpoint].end(-1)["owner"]))
        return requests[-1]

    yield create
    for request in requests:
        request.withdraw()


def start(rig: LoopRig, **more: Any) -> MicroBatchLoop:
    return rig.start({**SOURCE, **more}, None)


def held(rig: LoopRig) -> list[MessageQueue]:
    return [lock.queue for lock in rig.broker.admin.locks("g") if lock.held]


@EACH_LOOP
def test_the_batch_in_flight_is_finished_and_no_other_is_planned(
    rig: LoopRig, queues: list[MessageQueue], request_to: Any
) -> None:
    query = start(rig)
    query.advance("written")
    request = request_to()
    request.write()
    assert len(held(rig)) == 2
    assert query.advance("committed") == "committed"
    assert not request.answered
    # There are more messages, but no batch is planned.
    assert query.advance() == "idle"
    assert query.advance() == "idle"
    assert request.answered
    assert held(rig) == []
    assert rig.broker.groups.members("g") == []
    assert sum(rig.broker.groups.offsets("g", queues).values()) == sum(query.rows) == 4
    query.stop()
    # The next owner resumes immediately, at the committed offsets.
    runs = rig.run({**SOURCE, "lockTimeout": "0"}, None, "other")
    assert sum(rows for run in runs for rows in run.rows) == 6
    # The query itself then resumes after the other owner, whose offsets are newer than its checkpoint.
    rig.fill("in", 3)
    again = start(rig, lockTimeout="0")
    again.advance("idle")
    assert sum(again.rows) == 3


@pytest.mark.holds("stop at a boundary")
def test_offsets_in_a_stop_request_are_committed_between_two_triggers(
    rig: LoopRig, queues: list[MessageQueue], request_to: Any
) -> None:
    query = start(rig)
    query.advance("committed")
    request = request_to()
    request.write(rig.checkpoints["ck"].end(-1))
    query.stop()
    assert request.answered
    assert held(rig) == []
    assert sum(rig.broker.groups.offsets("g", queues).values()) == 4
    again = start(rig, lockTimeout="0")
    again.advance("idle")
    assert sum(again.rows) == 6


def test_an_idle_query_has_nothing_to_commit(rig: LoopRig, queues: list[MessageQueue], request_to: Any) -> None:
    query = start(rig)
    query.advance("idle")
    request = request_to()
    request.write(rig.checkpoints["ck"].end(-1))
    query.stop()
    assert request.answered
    assert held(rig) == []
    assert sum(rig.broker.groups.offsets("g", queues).values()) == 10


@pytest.mark.parametrize("processed", [False, True], ids=["not said", "an earlier batch"])
def test_a_batch_that_is_cut_commits_nothing_and_keeps_its_locks(
    processed: bool, rig: LoopRig, queues: list[MessageQueue], request_to: Any
) -> None:
    query = start(rig)
    query.advance("committed")
    before = rig.checkpoints["ck"].end(-1)
    query.advance("written")
    request = request_to()
    request.write(before if processed else None)
    query.stop()
    assert not request.answered
    assert len(held(rig)) == 2
    assert sum(rig.broker.groups.offsets("g", queues).values()) == 4


def set_clock(request: StopRequest, hours: int) -> None:
    """Give the request's file the time that it has if the clock was set, by ``hours``, between the request and the query's start."""
    at = time.time() + 3600 * hours
    os.utime(request._path, (at, at))


def test_a_request_that_was_left_behind_does_not_stop_the_next_run(
    rig: LoopRig, queues: list[MessageQueue], request_to: Any
) -> None:
    query = start(rig)
    query.advance("committed")
    request = request_to()
    request.write()
    query.kill()
    set_clock(request, 1)
    again = start(rig)
    again.advance("idle")
    assert sum(again.rows) == 6
    assert not request.answered
    request_to().write()
    again.advance()
    assert request.answered


def test_a_request_counts_although_the_clock_was_set_back(rig: LoopRig, queues: list[MessageQueue], request_to: Any) -> None:
    query = start(rig)
    query.advance("committed")
    request = request_to()
    request.write()
    set_clock(request, -1)
    assert query.advance() == "idle"
    assert request.answered


def test_an_answer_to_an_earlier_application_is_no_answer_to_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    StopRequest("owner").answer()
    request = StopRequest("owner")
    request.write()
    assert not request.answered


def test_an_answer_that_was_written_over_is_given_again_at_the_end(
    rig: LoopRig, queues: list[MessageQueue], request_to: Any
) -> None:
    query = start(rig)
    query.advance("committed")
    request_to().write()
    query.advance()
    late = request_to()
    late.write(rig.checkpoints["ck"].end(-1))
    assert not late.answered
    query.stop()
    assert late.answered


def test_an_answer_stays_and_another_users_folder_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    request = StopRequest("../some/owner")
    request.write()
    assert request.is_made
    assert request.processed is None
    assert os.listdir(tmp_path) == [f"orderedmq-{os.geteuid()}"]
    request.answer()
    request.write({"v": 1})
    assert request.answered
    folder = tmp_path / f"orderedmq-{os.geteuid()}"
    folder.chmod(0o777)
    assert not request.is_made
    assert not request.answered


class Application:
    """A query as its application sees it. ``query`` is the running query, if any."""

    name, isActive = "orders", True

    def __init__(self, end: object, query: MicroBatchLoop | None = None, *, at_work: bool = False) -> None:
        self.status = {"isTriggerActive": at_work}
        self.lastProgress = {"sources": [{"endOffset": end}]}
        self._query = query

    def stop(self) -> None:
        self.isActive = False
        if self._query is not None:
            self._query.stop()


@pytest.mark.parametrize("shown", [dict, json.dumps, str])
def test_a_query_between_two_triggers_is_stopped_without_waiting_for_the_next_one(
    rig: LoopRig, queues: list[MessageQueue], shown: Callable[[dict[str, Any]], object]
) -> None:
    """Releases of Spark show the offsets of a query's progress in different forms."""
    query = start(rig)
    query.advance("committed")
    application: Any = Application(shown(rig.checkpoints["ck"].end(-1)), query)
    assert stop_at_boundary(application)
    assert held(rig) == []
    assert sum(rig.broker.groups.offsets("g", queues).values()) == 4


def test_a_batch_that_takes_longer_than_the_timeout_is_cut(rig: LoopRig, queues: list[MessageQueue]) -> None:
    query = start(rig)
    query.advance("committed")
    query.advance("written")
    application: Any = Application(rig.checkpoints["ck"].end(0), query, at_work=True)
    assert not stop_at_boundary(application, 0.2)
    assert not query.active
    assert len(held(rig)) == 2


@pytest.mark.parametrize("end", [{"rate": 1}, "17", "no json", '{"next": {}, "v": 1}', "[0]", "None", None])
def test_a_query_of_another_format_is_refused_and_stays_active(end: object) -> None:
    application: Any = Application(end)
    with pytest.raises(OptionError) as caught:
        stop_at_boundary(application)
    assert caught.value.condition == "ORDEREDMQ_OPTION.UNSUPPORTED"
    assert application.isActive


def test_a_query_that_cannot_be_asked_is_stopped_nevertheless(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    folder = tmp_path / f"orderedmq-{os.geteuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    query: Any = Application(Checkpoint("owner").to_spark())
    assert not stop_at_boundary(query)
    assert not query.isActive
    assert "query orders is stopped as by query.stop()" in caplog.text
    assert f"{folder} is not a folder that only this user can write. Remove it, or set TMPDIR" in caplog.text
