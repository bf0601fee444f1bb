"""Stores and queries for tests that run in this process (tests/micro_batches.py): the real source and sink, without Spark."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import orderedmq
from ordered_source.older_spark import PASSES_START
from orderedmq.broker import Broker
from orderedmq.errors import OrderedMQError
from pyspark_orderedmq import DefaultSource
from tests.live.faults.conftest import StoreWorld
from tests.live.faults.faulty import FaultySource
from tests.live.spark.conftest import StoreRig
from tests.micro_batches import Checkpoint, ForeachBatch, MicroBatchLoop, batch_write, end_workers

#: Runs a test in the loop of Spark 4.2 and later, and in that of 4.0 and 4.1.
EACH_LOOP = pytest.mark.parametrize("older", [False, True], ids=["4.2", "4.0"], indirect=True)


@pytest.fixture
def older(request: pytest.FixtureRequest) -> bool:
    """Whether queries run as in Spark 4.0 and 4.1."""
    return getattr(request, "param", not PASSES_START)


@pytest.fixture(autouse=True)
def workers() -> Iterator[None]:
    """End the workers after each test, including tests that create their own tasks."""
    yield
    end_workers()


class LoopRig(StoreRig):
    """A store and queries over it. Each query has a named checkpoint."""

    def __init__(
        self, broker: Broker, path: str, folder: Path, query: Callable[..., MicroBatchLoop], older: bool = False
    ) -> None:
        super().__init__(broker, path, folder)
        self._query = query
        self.older = older
        self.checkpoints: dict[str, Checkpoint] = {}

    def start(
        self,
        source: dict[str, Any],
        sink: dict[str, Any] | ForeachBatch | None,
        checkpoint: str = "ck",
        *,
        available_now: bool = False,
        **more: Any,
    ) -> MicroBatchLoop:
        """Start a query. ``source`` and ``sink`` are options; the store's path is added. For ``more`` see `MicroBatchLoop`."""
        given = {"path": self.path, **sink} if isinstance(sink, dict) else sink
        kept = self.checkpoints.setdefault(checkpoint, Checkpoint())
        more = {"older": self.older, **more}
        return self._query({"path": self.path, **source}, given, kept, available_now=available_now, **more)

    def run(self, *given: Any, **more: Any) -> list[MicroBatchLoop]:
        """Run a query with availableNow until nothing is left, and return its runs: in older releases, one for each micro-batch."""
        runs = [self.start(*given, available_now=True, **more).process_all_available()]
        while runs[-1].batches and self.older:
            runs.append(self.start(*given, available_now=True, **more).process_all_available())
        return runs

    def copied(self, checkpoint: str = "ck", **options: Any) -> list[int]:
        """Copy topic ``in`` to topic ``out`` with availableNow. Return how many rows each batch read."""
        source = {"topic": "in", "consumerGroup": "g", **options}
        runs = self.run(source, {"topic": "out", "topicQueueNums": 2}, checkpoint)
        return [rows for run in runs for rows in run.rows]

    def save(self, options: dict[str, str], *tasks: pa.RecordBatch, **more: Any) -> None:
        """Write rows as ``df.write`` does, with one task per record batch. For ``more`` see `batch_write`."""
        batch_write(DefaultSource({"path": self.path, **options}), tasks, **more)

    def fails(self, **options: Any) -> str:
        """Copy topic ``in`` to topic ``out`` and expect a failure. Return the error's text."""
        with pytest.raises(OrderedMQError) as caught:
            self.copied(**options)
        return str(caught.value)


@pytest.fixture
def rig(tmp_path: Path, query: Callable[..., MicroBatchLoop], older: bool) -> Iterator[LoopRig]:
    path = str(tmp_path / "store")
    with orderedmq.connect(path) as broker:
        yield LoopRig(broker, path, tmp_path, query, older)


class LoopWorld(StoreWorld):
    """A store and queries over it whose history is checked."""

    def __init__(self, folder: Path, queues: int, older: bool) -> None:
        super().__init__(folder, queues)
        self.older = older
        self.checkpoints: dict[str, Checkpoint] = {}

    def start(self, checkpoint: str = "ck", *, available_now: bool = False, **more: Any) -> MicroBatchLoop:
        spec = self.spec(checkpoint, **more)
        source = {"path": spec["path"], "topic": spec.get("topic", "in"), **spec["source"]}
        if spec["group"] is not None:
            source["consumerGroup"] = spec["group"]
        kept = self.checkpoints.setdefault(checkpoint, Checkpoint())
        sink = {"path": spec["path"], "topic": "out"}
        how: dict[str, Any] = {"rows": with_origin, "available_now": available_now, "format": FaultySource, "older": self.older}
        run = MicroBatchLoop(source, sink, kept, **how)
        self._queries.append(run)
        return run

    def run(self, checkpoint: str = "ck", **more: Any) -> None:
        """Run a query until it has processed all current messages and ended. In older releases, each run has one micro-batch."""
        while self.start(checkpoint, available_now=True, **more).process_all_available().batches and self.older:
            pass

    def fail(self, query: MicroBatchLoop) -> str:
        """Continue a query and expect a failure. Return the error's text."""
        with pytest.raises(OrderedMQError) as caught:
            query.process_all_available()
        return str(caught.value)

    def close(self) -> None:
        super().close()
        log = logging.getLogger("orderedmq")
        for handler in list(log.handlers):
            if isinstance(handler, logging.FileHandler):
                log.removeHandler(handler)
                handler.close()


def with_origin(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return the columns for the sink, with each row's origin in the format that the checker reads."""
    names = ("topic", "broker_name", "queue_id", "queue_offset")
    places = zip(*(rows.column(name).to_pylist() for name in names), strict=True)
    origins = pa.array([f"{topic}/{broker}/{queue}:{offset}" for topic, broker, queue, offset in places], pa.string())
    columns = [rows.column("body"), rows.column("sharding_key"), origins]
    return pa.RecordBatch.from_arrays(columns, names=["body", "sharding_key", "keys"])


@pytest.fixture
def world(tmp_path: Path, older: bool) -> Iterator[LoopWorld]:
    with contextlib.closing(LoopWorld(tmp_path, 3, older)) as world:
        yield world
