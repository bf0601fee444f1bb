"""The pytest plugin: fixtures for tests of pipelines. docs/guides/testing.md is the guide.

pytest imports this module at each of its starts, also for users who do not use it. So it imports nothing but pytest, and loads the rest
when a test asks for a fixture.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from orderedmq.testing import TemporaryStore


@pytest.fixture
def orderedmq_store(tmp_path: Path) -> Iterator[TemporaryStore]:
    """A store of the embedded broker for one test: an `orderedmq.testing.TemporaryStore`."""
    from orderedmq.testing import TemporaryStore

    with TemporaryStore(tmp_path / "orderedmq") as store:
        yield store


@pytest.fixture(scope="session")
def orderedmq_spark_config() -> dict[str, str]:
    """Settings of ``orderedmq_spark``, on top of its own. Define a fixture of this name in conftest.py to give others."""
    return {}


@pytest.fixture(scope="session")
def orderedmq_spark(orderedmq_spark_config: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A small local Spark session for all tests; with the extra ``java``, no Java has to be installed. An active session is used as it is."""
    from orderedmq.testing.session import local_session

    folder = tmp_path_factory.mktemp("orderedmq-spark")
    with local_session({"spark.sql.warehouse.dir": str(folder), **orderedmq_spark_config}) as spark:
        yield spark
