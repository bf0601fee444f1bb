"""A store is replaced, moved or deleted under an idle query, or is another one in its tasks: the query fails with a named error."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable

import pytest

from orderedmq.errors import StoreError
from tests.loop.conftest import LoopRig, LoopWorld
from tests.spark.test_store_replaced import copied


def gone(rig: LoopRig) -> None:
    shutil.rmtree(rig.path)


@pytest.mark.holds("replaced store")
@pytest.mark.parametrize(("happen", "condition"), [(gone, "MISSING"), (copied, "(REPLACED|MISSING)")])
def test_an_idle_query_fails_by_name_when_its_store_is_gone(
    happen: Callable[[LoopRig], None], condition: str, rig: LoopRig
) -> None:
    rig.topic("in", 2, rows=10)
    query = rig.start({"topic": "in", "consumerGroup": "g"}, None).process_all_available()
    assert sum(rig.offsets("g").values()) == 10
    happen(rig)
    with pytest.raises(StoreError) as caught:
        query.process_all_available()
    text = str(caught.value)
    assert re.search(rf"\[ORDEREDMQ_STORE\.{condition}\] the store at {re.escape(rig.path)} was", text), text
    assert "while it was in use" in text


def test_an_executor_that_sees_another_store_says_that_a_store_serves_one_machine(world: LoopWorld) -> None:
    world.produce(10)
    elsewhere = world.points.folder / "elsewhere"
    elsewhere.touch()
    text = world.fail(world.start())
    assert (
        f"[ORDEREDMQ_STORE.OTHER_MACHINE] the query was planned with a store at {world.path}, but there is another store"
        in text
    )
    assert "the embedded broker serves only one machine. Use namesrvAddr" in text
    elsewhere.unlink()
    world.run()
    world.judge()
