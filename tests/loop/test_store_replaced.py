"""A store is replaced, moved or deleted under an idle query, or is another one in its tasks: the query fails with a named error."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

from orderedmq.errors import StoreError
from tests.loop.conftest import LoopRig, LoopWorld


def copied(rig: LoopRig) -> None:
    """Replace the store as a restore from a backup does, by a file with the same content. Between the two moves there is no store."""
    copy = shutil.copytree(rig.path, rig.path + "-copy")
    shutil.move(rig.path, rig.path + "-former")
    shutil.move(copy, rig.path)


def gone(rig: LoopRig) -> None:
    shutil.rmtree(rig.path)


@pytest.mark.holds("replaced store")
@pytest.mark.parametrize("happen", [gone, copied])
def test_an_idle_query_fails_by_name_when_its_store_is_gone(happen: Callable[[LoopRig], None], rig: LoopRig) -> None:
    rig.topic("in", 2, rows=10)
    query = rig.start({"topic": "in", "consumerGroup": "g"}, None).process_all_available()
    assert sum(rig.offsets("g").values()) == 10
    happen(rig)
    with pytest.raises(StoreError) as caught:
        query.process_all_available()
    # A renewal of the locks may come between the two moves.
    assert caught.value.sub in (("MISSING",) if happen is gone else ("MISSING", "REPLACED"))


def test_an_executor_that_sees_another_store_says_that_a_store_serves_one_machine(world: LoopWorld) -> None:
    world.produce(10)
    elsewhere = world.points.folder / "elsewhere"
    elsewhere.touch()
    assert "ORDEREDMQ_STORE.OTHER_MACHINE" in world.fail(world.start())
    elsewhere.unlink()
    world.run()
    world.judge()
