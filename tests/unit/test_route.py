"""Which task of a repartitioned DataFrame gets the rows of a queue."""

from __future__ import annotations

import numpy as np
import pytest

from ordered_sink.routing import numbers_of_tasks, spark_hashes


def test_numbers_are_hashed_as_by_spark() -> None:
    """The hashes come from ``SELECT hash(0), hash(1), hash(-1), hash(2147483647)``."""
    hashes = spark_hashes(np.array([0, 1, -1, 2**31 - 1], np.int32))
    assert hashes.tolist() == [933211791, -559580957, -1604776387, 133916647]


@pytest.mark.parametrize("count", [1, 2, 3, 8, 1000, 65536])
def test_each_task_has_a_number_that_spark_hashes_to_it(count: int) -> None:
    assert (spark_hashes(numbers_of_tasks(count)).astype(np.int64) % count).tolist() == list(range(count))
