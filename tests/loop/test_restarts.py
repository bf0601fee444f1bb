"""A query that ends between any two of Spark's steps resumes where it stopped, without loss or repeats."""

from __future__ import annotations

import pytest

from tests.loop.conftest import LoopWorld
from tests.micro_batches import Point

POINTS: list[Point] = ["planned", "logged", "written", "published", "committed", "idle"]


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "stopped"])
@pytest.mark.parametrize("batch", ["first", "later"])
@pytest.mark.parametrize("point", POINTS)
def test_a_query_that_ends_between_two_steps_goes_on_without_loss_or_repeat(
    point: Point, batch: str, killed: bool, world: LoopWorld
) -> None:
    world.produce(10)
    query = world.start(source={"maxOffsetsPerTrigger": 15})
    if batch == "later":
        query.advance("committed")
    query.advance(point)
    if killed:
        query.kill()
    else:
        query.stop()
    if (point, batch, killed) == ("planned", "first", False):
        # The offset that names the owner is not in the checkpoint yet. To the next run, the locks therefore seem to belong to another
        # query, which stopped after planning a batch.
        world.outlast(20, world.held()[0].owner)
    world.produce(10)
    # A batch that was logged keeps its end; a batch that was not logged is planned again and includes more messages.
    world.run(source={"maxOffsetsPerTrigger": 25})
    assert world.count() == 60
    world.judge()
