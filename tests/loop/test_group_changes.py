"""A query whose checkpoint belongs to another consumer group says where it begins, and repeats and skips nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orderedmq.errors import GroupError, LockError
from orderedmq.model import MessageQueue
from orderedmq.parking import Parking, Ticket, lot_token
from tests.contract.support import locked
from tests.live.spark.conftest import numbers
from tests.loop.conftest import LoopRig
from tests.micro_batches import Point

OUT = {"topic": "out", "topicQueueNums": 2}
QUEUES = [MessageQueue("in", "embedded", number) for number in range(2)]


def read_as(group: str | None, **more: Any) -> dict[str, Any]:
    """Return the options of a query in ``group``; None: it is broadcasting."""
    return {"topic": "in", **({"messageModel": "broadcasting"} if group is None else {"consumerGroup": group}), **more}


def changes(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings of a changed group so far, and forget them."""
    warnings = [record.getMessage() for record in caplog.records if "[ORDEREDMQ_GROUP.CHANGED]" in record.getMessage()]
    caplog.clear()
    return warnings


def commit(rig: LoopRig, group: str, offsets: dict[MessageQueue, int]) -> None:
    """Move the offsets of a group, as another query that then stopped."""
    client = rig.broker.groups.join("another query")
    tokens = {token.queue: token for token in locked(rig.broker, group, client, list(offsets))}
    rig.broker.groups.commit({tokens[queue]: offset for queue, offset in offsets.items()})
    rig.broker.groups.leave(client)


@pytest.mark.holds("source to sink once")
@pytest.mark.parametrize("assignment", ["exclusive", "shared"])
@pytest.mark.parametrize("point", ["logged", "published", "committed", "idle"])
@pytest.mark.parametrize("groups", [["g", "h", "g"], ["g", None, "g"], [None, "g"]], ids=str)
def test_a_message_is_written_once_whatever_groups_the_query_was_in(
    groups: list[str | None], point: Point, assignment: str, rig: LoopRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.topic("in", 2, rows=10)
    rows = 10
    for group in groups:
        more = {} if group is None else {"assignment": assignment}
        query = rig.start(read_as(group, maxOffsetsPerTrigger=8, **more), OUT)
        former = query.checkpoint.end(-1)["group"] if query.checkpoint.log else group
        query.advance(point)
        query.stop()
        assert bool(changes(caplog)) == (group != former)
        rig.fill("in", 6, first=rows)
        rows += 6
    last = groups[-1]
    assert last is not None
    rig.start(read_as(last, assignment=assignment), OUT, available_now=True).process_all_available()
    assert numbers(rig.bodies("out")) == list(range(rows))
    assert sum(rig.offsets(last).values()) == rows


@pytest.mark.parametrize("assignment", ["exclusive", "shared"])
@pytest.mark.parametrize(
    ("at", "begin"), [({}, 5), ({0: 3, 1: 3}, 5), ({0: 5, 1: 5}, 5), ({0: 7, 1: 7}, 7)], ids=["none", "lower", "same", "higher"]
)
def test_the_warning_says_where_the_queues_begin(
    at: dict[int, int], begin: int, assignment: str, rig: LoopRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.topic("in", 2, rows=10)
    rig.start(read_as("g"), None, available_now=True).process_all_available()
    rig.fill("in", 10, first=10)
    if at:
        commit(rig, "h", {QUEUES[number]: offset for number, offset in at.items()})
    query = rig.start(read_as("h", assignment=assignment), None, available_now=True).process_all_available()
    assert query.batches[-1].ranges == {"in/embedded/0": (begin, 10), "in/embedded/1": (begin, 10)}
    [warning] = changes(caplog)
    assert "group 'g'" in warning
    assert "group 'h'" in warning
    assert json.dumps({"in": {"embedded": {"0": begin, "1": begin}}}) in warning
    assert "from the checkpoint's" not in caplog.text


def test_a_query_in_a_new_group_logs_the_group_at_once(rig: LoopRig, caplog: pytest.LogCaptureFixture) -> None:
    """So a seek of the new group is followed, and the warning is not repeated."""
    rig.topic("in", 2, rows=10)
    rig.start(read_as("g"), None, available_now=True).process_all_available()
    for _ in range(2):
        rig.start(read_as("h"), None, available_now=True).process_all_available()
    assert len(changes(caplog)) == 1
    rig.broker.admin.seek("h", dict.fromkeys(QUEUES, 2))
    query = rig.start(read_as("h"), None, available_now=True).process_all_available()
    assert query.batches[-1].ranges == {"in/embedded/0": (2, 5), "in/embedded/1": (2, 5)}


@pytest.mark.parametrize("group", ["h", None])
def test_a_former_group_that_was_deleted_stays_deleted(group: str | None, rig: LoopRig) -> None:
    rig.topic("in", 2, rows=10)
    rig.start(read_as("g"), None, available_now=True).process_all_available()
    rig.broker.admin.delete_group("g")
    rig.fill("in", 2, first=10)
    query = rig.start(read_as(group), None, available_now=True).process_all_available()
    assert query.batches[-1].ranges == {"in/embedded/0": (5, 6), "in/embedded/1": (5, 6)}
    assert rig.broker.admin.groups() == ([] if group is None else [group])


def test_members_that_move_to_a_new_group_together_begin_where_the_former_group_was(rig: LoopRig) -> None:
    """Each gets queues that another one has in its checkpoint."""
    rig.topic("in", 2, rows=10)
    rig.start(read_as("g", assignment="shared"), None, available_now=True).process_all_available()
    rig.fill("in", 4, first=10)
    commit(rig, "g", {QUEUES[1]: 6})
    checkpoint = rig.checkpoints["ck"]
    checkpoint.log[-1] = json.dumps({**checkpoint.end(-1), "next": {"in": {"embedded": {"0": 5}}}})
    query = rig.start(read_as("h", assignment="shared"), None, available_now=True).process_all_available()
    assert query.batches[-1].ranges == {"in/embedded/0": (5, 7), "in/embedded/1": (6, 7)}


@pytest.mark.parametrize("assignment", ["exclusive", "shared"])
def test_a_logged_batch_is_not_left_to_the_members_of_another_group(assignment: str, rig: LoopRig) -> None:
    """A member of the new group begins where its own options say, which may be after the batch."""
    rig.topic("in", 2, rows=10)
    query = rig.start(read_as("g"), None)
    query.advance("logged")
    query.stop()
    other = rig.broker.groups.join("another query")
    [token] = locked(rig.broker, "h", other, QUEUES[1:])
    rig.broker.groups.commit({token: 5})
    with pytest.raises(LockError, match=r"LOCK.HELD_BY_OTHER.*'h'"):
        rig.start(read_as("h", assignment=assignment, lockTimeout="0"), None).advance("committed")
    rig.broker.groups.leave(other)
    again = rig.start(read_as("h", assignment=assignment), None)
    again.advance("committed")
    # The other query has processed the whole part of its queue.
    assert again.batches[0].ranges == {"in/embedded/0": (0, 5)}


@pytest.mark.holds("no silent loss of parked messages")
@pytest.mark.parametrize("group", ["h", None])
def test_a_query_that_has_parked_messages_stays_in_its_group(group: str | None, rig: LoopRig) -> None:
    rig.topic("in", 2, rows=10)
    rig.start(read_as("g", parkingLot="true"), None, available_now=True).process_all_available()
    client = rig.broker.groups.join("another query")
    [token] = locked(rig.broker, "g", client, QUEUES[:1])
    rig.fill("in", 2, first=10)
    rig.broker.groups.park(token, [Parking(QUEUES[0], 5, Ticket(5, 1, 1, 0))])
    rig.broker.groups.leave(client)
    with pytest.raises(GroupError, match=r"GROUP.PARKED\] group 'g', to which .* 1 parked messages"):
        rig.start(read_as(group), None, available_now=True).process_all_available()
    [token] = locked(rig.broker, "g", rig.broker.groups.join("another query"), QUEUES[:1])
    rig.broker.groups.commit({token: 6, lot_token(token): 1})
    rig.fill("in", 2, first=12)
    query = rig.start(read_as(group), None, available_now=True).process_all_available()
    assert query.batches[-1].ranges == {"in/embedded/0": (6, 7), "in/embedded/1": (5, 7)}


@pytest.mark.parametrize("point", ["logged", "committed"])
@pytest.mark.parametrize("group", ["h", None])
def test_a_queue_that_another_query_of_the_former_group_had_begins_at_that_groups_offset(
    group: str | None, point: Point, rig: LoopRig
) -> None:
    rig.topic("in", 2, rows=10)
    query = rig.start(read_as("g"), None)
    query.advance(point)
    query.kill()
    commit(rig, "g", {QUEUES[0]: 7})
    rig.fill("in", 10, first=10)
    query = rig.start(read_as(group), None, available_now=True).process_all_available()
    first = [{"in/embedded/1": (0, 5)}] if point == "logged" else []
    assert [batch.ranges for batch in query.batches if batch.rows] == [
        *first,
        {"in/embedded/0": (7, 10), "in/embedded/1": (5, 10)},
    ]
    if group is not None:
        assert rig.offsets("h") == {0: 10, 1: 10}


@pytest.mark.holds("former run")
@pytest.mark.parametrize("group", ["h", None])
def test_a_former_run_in_the_former_group_is_waited_for(group: str | None, rig: LoopRig) -> None:
    rig.topic("in", 2, rows=10)
    query = rig.start(read_as("g"), None)
    query.advance("committed")
    with pytest.raises(LockError, match=r"LOCK.HELD_BY_OTHER.*'g' are held by another run of this same query"):
        rig.start(read_as(group, lockTimeout="0"), None).advance("idle")
    query.stop()
    rig.fill("in", 2, first=10)
    query = rig.start(read_as(group), None, available_now=True).process_all_available()
    assert query.batches[-1].ranges == {"in/embedded/0": (5, 6), "in/embedded/1": (5, 6)}
