"""The pytest plugin: fixtures for tests of pipelines. The guide is docs/guides/testing.md.

pytest imports this module at every start, even if no test uses it. So this module imports only pytest, and loads the rest when a test
requests a fixture.
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
    """Additional settings of ``orderedmq_spark``. Define a fixture of this name in conftest.py to set your own."""
    return {}


@pytest.fixture(scope="session")
def orderedmq_spark(orderedmq_spark_config: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A small local Spark session for all tests, or the active session unchanged. The extra ``java`` provides a Java runtime."""
    from orderedmq.testing.session import local_session

    folder = tmp_path_factory.mktemp("orderedmq-spark")
    with local_session({"spark.sql.warehouse.dir": str(folder), **orderedmq_spark_config}) as spark:
        yield spark
