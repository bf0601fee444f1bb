"""A store that is replaced while a query uses it: the query soon fails with a named error."""

from __future__ import annotations

import re
import shutil
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException

from tests.spark.conftest import Rig, StoreRig


def copied(rig: StoreRig) -> None:
    """Replace the store as a restore from a backup does, by a file with the same content. Between the two moves there is no store."""
    copy = shutil.copytree(rig.path, rig.path + "-copy")
    shutil.move(rig.path, rig.path + "-former")
    shutil.move(copy, rig.path)


def fails(query: Any) -> str:
    """Return the error of a query that is expected to fail soon. The timeout of a minute is for a busy machine."""
    with pytest.raises(StreamingQueryException) as caught:
        assert query.awaitTermination(60), "the query is still active"
    return str(caught.value)


@pytest.mark.holds("replaced store")
def test_a_query_fails_by_name_when_its_store_is_replaced(rig: Rig) -> None:
    rig.topic("in", 2, rows=4)
    query = rig.start(rig.stream(topic="in", consumerGroup="g"), topic="out", topicQueueNums=2)
    query.processAllAvailable()
    copied(rig)
    text = fails(query)
    assert re.search(rf"\[ORDEREDMQ_STORE\.(REPLACED|MISSING)\] the store at {re.escape(rig.path)} was", text), text
