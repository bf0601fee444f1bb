"""A Spark driver in a separate process, for tests that kill or stop it. It executes the commands that it reads and answers each.

    python -m tests.live.faults.job local[2,3]
    python -m tests.live.faults.job local[2] spark.cores.max=2    with settings of Spark

Commands are JSON lines on stdin. Answers are JSON lines on stdout that begin with ``@``, because Spark may also print there.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from ordered_source import stop_on_sigterm
from orderedmq.java import ensure_java
from tests.live.faults.faulty import FaultySource
from tests.live.faults.queries import session_config, start


def state(query: StreamingQuery) -> dict[str, Any]:
    """A query's id, whether it is active, and the text of its failure, if any."""
    # Read isActive first: in the other order, a query that fails between the two reads would seem to have ended without failing.
    active, failure = query.isActive, query.exception()
    return {"id": str(query.id), "active": active, "failure": None if failure is None else str(failure)}


MAIN = threading.get_ident()


def when_main_waits(done: Callable[[], None]) -> None:
    """Call ``done`` once the main thread waits in ``awaitTermination`` for Java's answer."""
    waits = {"awaitTermination", "readinto"}
    while not waits <= {frame.f_code.co_name for frame, _ in traceback.walk_stack(sys._current_frames()[MAIN])}:
        time.sleep(0.01)
    done()


def main(master: str, *settings: str) -> None:
    ensure_java()
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    builder = SparkSession.builder.master(master).appName("orderedmq-faults")
    given = dict(setting.split("=", 1) for setting in settings)
    for name, value in {**session_config(), **given}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    spark.dataSource.register(FaultySource)
    queries: dict[str, StreamingQuery] = {}

    def answer(value: dict[str, Any]) -> None:
        print("@" + json.dumps(value), flush=True)

    answer({"ready": True})
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("query", "")
        match command.pop("do"):
            case "start":
                try:
                    queries[name] = start(spark, **command)
                    answer({})
                except Exception as error:
                    answer({"refused": str(error)})
            case "stop on sigterm":
                stop_on_sigterm(spark)
                answer({})
            case "await":
                threading.Thread(target=when_main_waits, args=(lambda: answer({}),)).start()
                queries[name].awaitTermination()
            case "state":
                answer(state(queries[name]))
            case "stop":
                queries[name].stop()
                answer(state(queries[name]))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
