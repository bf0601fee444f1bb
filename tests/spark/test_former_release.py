"""A store and two checkpoints that the former release left behind go on with today's code (former_release/make.py made them)."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import orderedmq
from orderedmq.embedded.check import check
from orderedmq.model import MessageQueue
from tests.contract.support import bodies, locked
from tests.spark.conftest import Rig
from tests.spark.former_release import make

FORMER = Path(__file__).parent / "former_release"
ANSWERS = json.loads((FORMER / "answers.json").read_text())
#: What a query finds: the messages of the former release, and as many more per queue as `more` adds.
MORE = 3
END = make.MESSAGES + MORE


@pytest.fixture
def rig(spark: SparkSession, tmp_path: Path) -> Iterator[Rig]:
    """The store and the checkpoints as they were left."""
    for name in ("copying", "billing"):
        shutil.copytree(FORMER / name, tmp_path / name)
    store = tmp_path / "store"
    store.mkdir()
    (store / "data.mdb").write_bytes(gzip.decompress((FORMER / "data.mdb.gz").read_bytes()))
    with orderedmq.connect(store) as broker:
        yield Rig(broker, str(store), tmp_path, spark)
    for query in spark.streams.active:
        query.stop()
    assert check(store) == []


def more(rig: Rig) -> None:
    for queue in rig.broker.log.queues("orders"):
        rig.broker.log.append({queue: make.orders(queue.queue_id, range(make.MESSAGES, END))})


def finish(rig: Rig, query: Any) -> Any:
    query = query.trigger(availableNow=True).start()
    query.awaitTermination()
    return query


def logged(checkpoint: Path, kind: str = "offsets") -> list[int]:
    """The batches in a checkpoint's log."""
    return sorted(int(path.name) for path in (checkpoint / kind).iterdir() if path.name.isdigit())


def next_offsets(checkpoint: Path, batch: int) -> dict[str, int]:
    """Where a batch ends, as Spark logged it."""
    value = json.loads((checkpoint / "offsets" / str(batch)).read_text().splitlines()[-1])
    offsets: dict[str, int] = value["next"]["orders"]["embedded"]
    return offsets


def everywhere(offset: int) -> dict[str, int]:
    return {str(queue): offset for queue in range(make.QUEUES)}


def test_the_data_is_what_it_is_said_to_be() -> None:
    for name in ("copying", "billing"):
        assert (logged(FORMER / name), logged(FORMER / name, "commits")) == ([0, 1, 2], [0, 1])
        assert [next_offsets(FORMER / name, batch) for batch in range(3)] == [everywhere(4), everywhere(8), everywhere(12)]
    # The batch of copying is published, that of billing only handed over.
    assert ANSWERS["offsets"] == {"billing": everywhere(8), "copying": everywhere(12), "parking": {"0": 5}}
    assert [batch for batch, _ in ANSWERS["billed"]] == [0, 1, 2]


def test_everything_in_the_store_is_read_as_the_former_release_read_it(rig: Rig) -> None:
    assert json.loads(json.dumps(make.answers(rig.broker))) == {name: ANSWERS[name] for name in ("messages", "offsets")}


def test_a_query_goes_on_with_the_batch_in_which_the_former_release_was_killed(rig: Rig) -> None:
    more(rig)
    billed: list[tuple[int, Any]] = []
    query = make.billing(rig.spark, rig.path, rig.folder / "billing", lambda *batch: billed.append(batch))
    finish(rig, query)
    assert (billed[0][0], billed[0][1]) == tuple(ANSWERS["billed"][2]), "the batch is repeated as it was"
    committed = [rows for _, rows in ANSWERS["billed"][:2]]
    for queue in range(make.QUEUES):
        found = [row for rows in (*committed, *(rows for _, rows in billed)) for row in rows.get(str(queue), ())]
        assert found == [[number, f"{queue:02}:{number:02}"] for number in range(END)]
    assert [batch for batch, _ in billed] == [2, 3, 4, 5], "12 messages a batch, of 69"
    rig.released("billing")
    assert make.offsets(rig.broker, "billing") == everywhere(END) == next_offsets(rig.folder / "billing", 5)
    assert (rig.folder / "billing/offsets/2").read_bytes() == (FORMER / "billing/offsets/2").read_bytes()


def test_a_query_from_source_to_sink_that_the_former_release_began_writes_each_message_once(rig: Rig) -> None:
    before = rig.bodies("copies")
    more(rig)
    query = finish(rig, make.copying(rig.spark, rig.path, rig.folder / "copying"))
    assert next(progress.batchId for progress in query.recentProgress if progress.numInputRows) == 2, "the batch is repeated"
    after = rig.bodies("copies")
    for queue, found in before.items():
        assert after[queue][: len(found)] == found, "what was there stays"
    every = [body for found in after.values() for body in found]
    assert sorted(every) == [f"{queue:02}:{number:02}" for queue in range(make.QUEUES) for number in range(END)]
    keys: dict[str, list[int]] = {}
    for row in rig.batch(topic="copies").orderBy("queue_id", "queue_offset").collect():
        keys.setdefault(row.sharding_key, []).append(int(bytes(row.body)[3:]))
    assert keys == {f"customer-{q}-{k}": list(range(k, END, 3)) for q in range(make.QUEUES) for k in range(3)}
    rig.released("copying")
    assert make.offsets(rig.broker, "copying") == everywhere(END) == next_offsets(rig.folder / "copying", 5)


def test_a_batch_write_of_the_former_release_is_not_written_again(rig: Rig) -> None:
    before = rig.bodies("loads")
    make.load(rig.spark, rig.path, 1, 6)
    assert rig.bodies("loads") == before
    with pytest.raises(Exception, match="ORDEREDMQ_SINK.REPLAY_DIFFERS"):
        make.load(rig.spark, rig.path, 1, 7)
    assert rig.bodies("loads") == before
    make.load(rig.spark, rig.path, 2, 6)
    assert sorted(body for found in rig.bodies("loads").values() for body in found) == [
        f"{version}:{row}" for version in (1, 2) for row in range(6)
    ]


def test_a_dead_letter_of_the_former_release_is_not_put_aside_again(rig: Rig) -> None:
    parked = MessageQueue("%DLQ%parking", "embedded", 0)
    me = rig.broker.groups.join("parker")
    [token] = locked(rig.broker, "parking", me, [MessageQueue("orders", "embedded", 0)])
    assert rig.broker.groups.dead_letter(token, make.orders(0, [3, 4]), [3, 4]) == 1
    assert bodies(rig.broker, parked) == ["00:03", "00:04"]
    rig.broker.groups.unlock([token])
    rig.broker.groups.leave(me)
