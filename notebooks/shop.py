"""A small shop for the notebook: its order events, a quiet local Spark, and errors and progress in short."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

STEPS = ("created", "paid", "packed", "shipped")
OPENING = datetime(2024, 5, 6, 8, tzinfo=UTC)


def order_events(orders: int, seed: int) -> pa.Table:
    """The events of ``orders`` orders as they happen: each order in its own order, many orders at once. Same seed, same events."""
    chance = random.Random(seed)
    happened = []
    for number in range(1, orders + 1):
        seconds = number * 60.0
        for step, name in enumerate(STEPS):
            happened.append((seconds, number, step, name))
            seconds += 20 + chance.expovariate(1 / 240)
    happened.sort()
    times = [(OPENING + timedelta(seconds=round(seconds))).isoformat() for seconds, *_ in happened]
    keys = [f"order-{number:04}" for _, number, _, _ in happened]
    events = [name for *_, name in happened]
    bodies = [json.dumps({"order": key, "event": event, "at": at}) for key, event, at in zip(keys, events, times)]
    return pa.table({"sharding_key": keys, "tags": events, "body": bodies})


def local_spark(folder: Path) -> SparkSession:
    """Spark on two threads of this machine. What its JVM has to say goes to ``spark.log`` in ``folder``."""
    builder = SparkSession.builder.master("local[2]").appName("explore")
    settings = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        # A short life: the JVM compiles quickly rather than well.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.driver.memory": "1g",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    with _error_output_to(folder / "spark.log"), warnings.catch_warnings():
        # PySpark 4.3 says of every pandas 3 that it may not do; nothing here uses pandas.
        warnings.simplefilter("ignore", FutureWarning)
        return builder.config(map=settings).getOrCreate()


@contextlib.contextmanager
def _error_output_to(file: Path) -> Iterator[None]:
    """What a process that is started meanwhile writes to its standard error goes to ``file``, for as long as it lives."""
    ours = os.dup(2)
    theirs = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(theirs, 2)
    try:
        yield
    finally:
        os.dup2(ours, 2)
        os.close(ours)
        os.close(theirs)


def what_orderedmq_said(error: PySparkException) -> str:
    """The line of Spark's error that this project wrote, names shortened and without machine and process."""
    lines = [line.strip() for line in str(error).splitlines() if "[ORDEREDMQ_" in line]
    line = lines[0][lines[0].index("[ORDEREDMQ_") :]
    line = re.sub(r" \(\w+@[^)]*\)", "", line)
    return re.sub(r"\b([0-9a-f]{6})[0-9a-f]{26}\b", r"\1", line)


def next_of(offset: str) -> Mapping[str, Any]:
    """The part of an offset in Spark's progress report that says what is read next."""
    return json.loads(offset)["next"]


def wait_until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Raises TimeoutError when ``condition`` does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:.0f} s")
        time.sleep(0.02)
